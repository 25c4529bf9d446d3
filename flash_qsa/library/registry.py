"""How an operator is registered, and what its schema cannot say: plans and scales, flattened."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from flash_qsa.checks import Scale

LIBRARY = torch.library.Library("flash_qsa", "DEF")
# Inductor may otherwise hand an operator a tensor whose last axis it has made non-contiguous.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
PLAN = "Tensor[] plan_tensors, SymInt[] plan_sizes"
_TRACED: dict[str, Callable] = {}


def traced(op: str, backend: str) -> Callable:
    """A function with the arguments of `reference.<op>` that calls the op's operator."""

    def call(*args):
        with torch.no_grad():
            _TRACED[op](backend, *args)

    return call


def _returns_nothing(*args, **kwargs) -> None:
    """Fake of an operator that only writes."""


def operator(
    name: str, arguments: str, returns: str = "()", fake: Callable = _returns_nothing
) -> Callable:
    """Registers the decorated function as `torch.ops.flash_qsa.<name>`.

    It takes one object that has the schema's arguments as attributes.
    """

    def register(run: Callable) -> Callable:
        LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=_TAGS)
        schema = getattr(torch.ops.flash_qsa, name).default._schema
        names = [argument.name for argument in schema.arguments]

        @torch.no_grad()
        def implementation(*values):
            return run(SimpleNamespace(**dict(zip(names, values))))

        LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flash_qsa::{name}", fake, lib=LIBRARY)
        return run

    return register


def traces(op: str) -> Callable:
    """Registers the decorated function as the traced form of `dispatch`'s op."""

    def register(call: Callable) -> Callable:
        _TRACED[op] = call
        return call

    return register


def flatten_scale(scale: Scale | None) -> tuple[torch.Tensor | None, float | None]:
    return (scale, None) if isinstance(scale, torch.Tensor) else (None, scale)


def unflatten_scale(tensor: torch.Tensor | None, value: float | None) -> Scale | None:
    return value if tensor is None else tensor
