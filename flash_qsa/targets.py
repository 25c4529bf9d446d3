"""GPU targets: what a tile choice may depend on, and the limits a kernel must keep.

Tile choices are pure functions of numbers. `device_target` reads those numbers from the device a
launch runs on; `pretend` replaces the answer, so that a launch can be recorded for a GPU that is
not there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Target:
    """One GPU architecture.

    Attributes:
        name: "sm_90" or "gfx942".
        backend: "cuda" or "hip".
        capability: (major, minor) of a CUDA device; (0, 0) for HIP.
        shared_memory: bytes that one program may use.
        processors: streaming multiprocessors (compute units) of the device.
        warp_size: lanes of a warp.
    """

    name: str
    backend: str
    capability: tuple[int, int]
    shared_memory: int
    processors: int
    warp_size: int = 32

    @property
    def has_e4m3(self) -> bool:
        """Whether Triton has the e4m3 type there; below, FP8 is decoded from its bytes."""
        return self.backend == "hip" or self.capability >= (8, 9)

    @property
    def has_bf16(self) -> bool:
        """Whether matrix units take BF16; Turing's do not."""
        return self.backend == "hip" or self.capability >= (8, 0)


TARGETS = {
    target.name: target
    for target in (
        Target("sm_75", "cuda", (7, 5), 64 << 10, 40),  # T4
        Target("sm_80", "cuda", (8, 0), 163 << 10, 108),  # A100
        Target("sm_86", "cuda", (8, 6), 99 << 10, 84),  # RTX 3090
        Target("sm_89", "cuda", (8, 9), 99 << 10, 128),  # RTX 4090
        Target("sm_90", "cuda", (9, 0), 227 << 10, 132),  # H100, H200
        Target("sm_100", "cuda", (10, 0), 227 << 10, 148),  # B200
        Target("sm_120", "cuda", (12, 0), 99 << 10, 188),  # RTX 5090 and relatives
        Target("gfx942", "hip", (0, 0), 64 << 10, 304, 64),  # MI300X
    )
}
"""Every target that the kernels are compiled for; shared memory is the opt-in limit of a block."""

_pretended: Target | None = None


@contextlib.contextmanager
def pretend(target: Target | str) -> Iterator[Target]:
    """Makes `device_target` answer `target` inside."""
    global _pretended
    chosen = TARGETS[target] if isinstance(target, str) else target
    before, _pretended = _pretended, chosen
    try:
        yield chosen
    finally:
        _pretended = before


def device_target(device: torch.device) -> Target:
    """The target of a CUDA or HIP device; without one (interpreter), sm_90's numbers."""
    if _pretended is not None:
        return _pretended
    if device.type != "cuda":
        return TARGETS["sm_90"]
    return _read(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _read(index: int) -> Target:
    props = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        name = props.gcnArchName.split(":")[0]
        return Target(name, "hip", (0, 0), 64 << 10, props.multi_processor_count, props.warp_size)
    capability = (props.major, props.minor)
    shared = getattr(props, "shared_memory_per_block_optin", None)
    if shared is None:
        shared = min(_nearest(capability).shared_memory, TARGETS["sm_90"].shared_memory)
    name = f"sm_{props.major}{props.minor}"
    return Target(name, "cuda", capability, shared, props.multi_processor_count)


def _nearest(capability: tuple[int, int]) -> Target:
    """The listed CUDA target at or below `capability` (the lowest where there is none)."""
    known = [target for target in TARGETS.values() if target.backend == "cuda"]
    below = [target for target in known if target.capability <= capability]
    return max(below or known[:1], key=lambda target: target.capability)
