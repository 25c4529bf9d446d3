"""Launching a Triton kernel again without binding its arguments again.

Triton sorts the forty arguments of a launch into classes (types, multiples of 16, constants) each
time, which takes the host longer than the launch itself. A kernel decorated with `direct` remembers
which binary served which arguments: integers and constants by value, tensors by dtype and whether
they lie on 16 bytes, which is all that Triton's classes depend on. What it has not seen before goes
through Triton as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flash_qsa.dispatch import interpreting
from flash_qsa.targets import Target

MAX_REMEMBERED = 4096
"""Launches of a kernel that are told apart; a growing sequence has other numbers at every token."""

reuse = True
"""False while launches are recorded rather than performed, see `flash_qsa.launches.record`."""


class Direct:
    """A Triton kernel: `kernel[grid](*arguments, **constants_and_options)`.

    Arguments come by position, constants (all of them) and compiler options by name.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._known: dict[tuple, tuple[Any, tuple]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        key = (
            torch.cuda.current_device() if torch.cuda.is_initialized() else None,
            tuple(named),
            tuple(named.values()),
            *_facts_of(args),
        )
        known = self._known.get(key) if reuse else None
        if known is not None:
            compiled, constants = known
            compiled[(*grid, 1, 1)[:3]](*args, *constants)
            return
        compiled = self.kernel[grid](*args, **named)
        if compiled is not None and reuse:  # interpreted and recorded launches return nothing
            constants = tuple(named[param.name] for param in self.kernel.params[len(args) :])
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[key] = compiled, constants


def _facts_of(args: tuple) -> list:
    return [arg if arg.__class__ is int else _facts(arg) for arg in args]


def _facts(arg: Any) -> Any:
    """What Triton's classes depend on, of an argument that is not an integer."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, tuple):
        return arg.__class__, *_facts_of(arg)
    # Triton does not tell floats apart by their values
    return float if isinstance(arg, float) else (arg.__class__, arg)


def launches_early(target: Target) -> bool:
    """Whether a launch may overlap its predecessor's end (programmatic dependent launch)."""
    return target.backend == "cuda" and target.capability >= (9, 0) and not interpreting()


def direct(kernel: Any) -> Direct:
    """Decorates a Triton or Gluon kernel that is launched, not called by others."""
    return Direct(kernel)
