"""Recording kernel launches instead of performing them.

Inside `record`, an op's Triton launch runs its host code (tile choice, grid, specialisation) on any
tensors, meta tensors included, and nothing reaches a device. Warm-up and the compile tests compile
exactly what was recorded, so neither keeps a second list of kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from flash_qsa import dispatch
from flash_qsa.ops import direct, nvrtc
from flash_qsa.targets import Target, pretend


@dataclass(frozen=True)
class Launch:
    """One `kernel[grid](*args, **kwargs)` that did not happen."""

    kernel: Any
    grid: Any
    args: tuple = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def specialise(self, target: Target) -> Specialisation | nvrtc.Specialisation:
        """What the JIT (NVRTC, for a kernel in CUDA C++) would compile for this launch on `target`.

        The JIT's arguments fall in its own classes: constexpr, equal to 1, divisible by 16, other.
        """
        if isinstance(self.kernel, nvrtc.Kernel):
            return self.kernel.specialise(target, self.kwargs)
        kernel = self.kernel
        gpu, backend, binder = _binder(kernel, target)
        kwargs = {"debug": False, **self.kwargs}
        bound, special, options = binder(*self.args, **kwargs)
        options, signature, constexprs, attrs = kernel._pack_args(
            backend, kwargs, bound, special, options
        )
        return Specialisation(kernel, gpu, signature, constexprs, attrs, options)


@dataclass(frozen=True)
class Specialisation:
    """A compilable kernel: signature, constants, alignment facts and options for one target."""

    kernel: Any
    gpu: Any
    signature: dict[str, str]
    constexprs: dict[tuple, Any]
    attrs: dict[tuple, Any]
    options: Any

    @property
    def key(self) -> str:
        """Equal for two launches that the JIT would serve with one binary."""
        parts = (self.signature, self.constexprs, self.attrs, self.options)
        return f"{self.kernel.__name__} {self.gpu} " + " ".join(map(repr, parts))

    def compile(self) -> Any:
        """Compiles (through Triton's disk cache) and returns Triton's CompiledKernel."""
        import triton
        from triton.compiler import ASTSource

        source = ASTSource
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as source
        return triton.compile(
            source(self.kernel, self.signature, self.constexprs, self.attrs),
            target=self.gpu,
            options=dict(self.options.__dict__),
        )


@contextlib.contextmanager
def record(target: Target | str) -> Iterator[list[Launch]]:
    """Collects every launch that is attempted inside; none is performed.

    `target` is what `targets.device_target` answers, and ops accept `backend="triton"` for tensors
    on any device. Kernels must have been imported without TRITON_INTERPRET.

    Example::

        with record("sm_90") as launches:
            ops.store_rows(cache_meta, slots_meta, rows_meta, backend="triton")
        [launch.name for launch in launches]
    """
    from triton.runtime.jit import JITFunction

    if dispatch.interpreting():
        raise RuntimeError("record: TRITON_INTERPRET=1 replaces the compiler; unset it")
    recorded: list[Launch] = []

    def run(kernel, *args, grid, warmup, **kwargs):
        recorded.append(Launch(kernel, grid, args, kwargs))

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(nvrtc.Kernel, "run", run),
        mock.patch.object(direct, "reuse", False),
        mock.patch.object(dispatch, "_triton_obstacle", lambda device: None),
        pretend(target),
    ):
        yield recorded


@functools.cache
def _binder(kernel: Any, target: Target) -> tuple[Any, Any, Any]:
    """Triton's name of the target, its backend, and the function that sorts a kernel's arguments
    into classes; remembered, because making that function takes as long as a whole step's walk."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    arch = target.name if target.backend == "hip" else _cuda_arch(target)
    gpu = GPUTarget(target.backend, arch, target.warp_size)
    backend = make_backend(gpu)
    return gpu, backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def _cuda_arch(target: Target) -> int:
    return target.capability[0] * 10 + target.capability[1]
