"""Which kernel selects: Triton's, for every GPU, or the one in CUDA C++ where NVRTC is there.

Both give the same ids. FLASH_QSA_SELECTOR=triton or cuda orders one of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flash_qsa.checks import UnsupportedError
from flash_qsa.dispatch import interpreting
from flash_qsa.ops import nvrtc
from flash_qsa.ops.select_blocks import tiles
from flash_qsa.targets import Target

VARIABLE = "FLASH_QSA_SELECTOR"
SELECTORS = ("auto", "triton", "cuda")
MIN_CAPABILITY = (8, 0)
"""The first with reductions over a warp in one instruction."""

select_cuda = nvrtc.Kernel(
    Path(__file__).with_name("select.cu"), "select_blocks_cuda", __name__, "6P4q3i"
)


@dataclass(frozen=True)
class Choice:
    """Which selector runs ("triton" or "cuda"), and why."""

    selector: str
    reason: str


def obstacle(target: Target) -> str | None:
    """Why the selector in CUDA C++ cannot run on a target, or None where it can."""
    if target.backend != "cuda":
        return f"{target.name} is not an NVIDIA GPU"
    if interpreting():
        return "TRITON_INTERPRET=1 has no GPU"
    if target.capability < MIN_CAPABILITY:
        return f"{target.name} is below sm_80"
    return nvrtc.obstacle(target.name)


def choose(target: Target, order: str | None = None) -> Choice:
    """The selector for a target. `order` comes before FLASH_QSA_SELECTOR.

    Raises:
        ValueError: an unknown selector. UnsupportedError: "cuda" where it cannot run.
    """
    name = "selector" if order is not None else VARIABLE
    order = os.environ.get(VARIABLE, "auto") if order is None else order
    if order not in SELECTORS:
        raise ValueError(f"{name}: expected one of {', '.join(SELECTORS)}, got {order!r}")
    if order == "triton":
        return Choice("triton", f"{name} says triton")
    reason = obstacle(target)
    if order == "cuda":
        if reason:
            raise UnsupportedError(f"{name} 'cuda': {reason}")
        return Choice("cuda", f"{name} says cuda")
    return Choice("triton", reason) if reason else Choice("cuda", "NVRTC compiles it")


def choose_tiles(
    rows: int,
    width: int,
    top_k: int,
    target: Target,
    max_group: int = tiles.MAX_GROUP,
    order: str | None = None,
) -> tiles.SelectTiles | tiles.CudaSelectTiles:
    """Tiles of the selector that runs: CUDA C++'s where it is chosen and holds such rows."""
    if choose(target, order).selector == "cuda":
        chosen = tiles.choose_cuda_select(rows, width, top_k, target, max_group)
        if chosen is not None:
            return chosen
    return tiles.choose_select(rows, width, top_k, target, max_group)


def macros(select: tiles.CudaSelectTiles, top_k: int, has_first: bool) -> dict[str, int]:
    """What select.cu is specialised on."""
    return {
        "THREADS": select.threads,
        "BLOCKS": select.blocks,
        "UNITS": select.units,
        "GROUP": select.group,
        "TOP_K": top_k,
        "SLACK": select.slack,
        "CAPACITY": select.capacity,
        "HAS_FIRST": int(has_first),
        "SHARED": select.shared_bytes(top_k),
    }


def launch_cuda(
    select: tiles.CudaSelectTiles,
    top_k: int,
    rows: int,
    pdl: bool,
    has_first: bool,
    arguments: tuple[int, ...],
) -> None:
    """`arguments`: the fields of select.cu's Arguments."""
    constants = macros(select, top_k, has_first)
    select_cuda.run(
        *arguments,
        grid=(rows,),
        warmup=False,
        threads=select.threads,
        shared=constants["SHARED"],
        pdl=pdl,
        **constants,
    )
