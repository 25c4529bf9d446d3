"""One call of sparse_attention as its kernels take it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from flash_qsa import dispatch
from flash_qsa.checks import E4M3_DTYPES, Scale
from flash_qsa.ops.direct import launches_early
from flash_qsa.ops.paging import constant_page
from flash_qsa.ops.sparse_attention.tiles_union import cell_units
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import Target, device_target, power_of_two

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Call(NamedTuple):
    """One call's tensors in the form kernels take them, and what follows from their dtypes.

    page: tokens of a page, 0 where kernels take them at run time (see `paging.constant_page`).
    early_launch: whether a kernel may start while its predecessor ends (programmatic dependent
    launch).
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    block_ids: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor
    request_ids: torch.Tensor
    gate: torch.Tensor | None
    tail_start: torch.Tensor | None
    token_base: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    ratio: int
    scale: float
    scales: dict
    scale_args: tuple
    compute: torch.dtype
    fp8: bool
    fp8_bytes: bool
    page: int
    target: Target
    early_launch: bool

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.keys.shape[1]

    def launch_options(self) -> dict:
        return {"launch_pdl": True} if self.early_launch else {}

    def strides(self) -> tuple[int, ...]:
        """Of query, keys and values, as both attention kernels take them."""
        return (
            *self.query.stride()[:2],
            *self.keys.stride()[:3],
            *self.values.stride()[:3],
        )

    def cell_units(self) -> tuple[int, int, int]:
        """Of the row unions' lists, see `tiles_union.cell_units`."""
        pages, _, page_size, _ = self.keys.shape
        return cell_units(pages, page_size, self.keys.stride(), self.values.stride())

    def output_strides(self) -> tuple[int, ...]:
        gate = self.query if self.gate is None else self.gate
        lse = (0, 0) if self.lse is None else self.lse.stride()
        return (*gate.stride()[:2], *self.out.stride()[:2], *lse)

    @property
    def narrow(self) -> bool:
        """Whether BF16 activations meet an FP8 cache in FP16."""
        return self.fp8 and self.compute == torch.float16

    def words_fit(self) -> bool:
        """Whether FP8 values come in words of four, 16 bytes a load, if strides are whole 16s."""
        dim, values = self.values.shape[3], self.values
        whole = self.fp8 and dim >= 64 and power_of_two(dim) == dim
        return whole and values.data_ptr() % 16 == 0 and self.target.backend != "hip"

    def or_dummy(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """A pointer for an argument that the kernel's flags say is absent."""
        return self.query if tensor is None else tensor

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_ids: torch.Tensor,
        positions: torch.Tensor,
        page_table: torch.Tensor,
        request_ids: torch.Tensor,
        ratio: int,
        scale: float,
        gate: torch.Tensor | None,
        k_scale: Scale | None,
        v_scale: Scale | None,
        tail_start: torch.Tensor | None,
        token_base: torch.Tensor | None,
        plan: BatchPlan | None,
        out: torch.Tensor,
        lse_out: torch.Tensor | None,
    ) -> Call:
        target = device_target(query.device)
        interpreted = dispatch.interpreting()
        # Without a native type, FP8 travels as bytes and BF16 products are done in FP32. FP8 is
        # multiplied in FP16: BF16 would cost three more instructions a number.
        fp8, fp8_bytes = keys.dtype in E4M3_DTYPES, False
        compute = query.dtype
        if fp8:
            fp8_bytes = interpreted or target.backend == "hip" or not target.has_e4m3
            storage = torch.uint8 if fp8_bytes else torch.float8_e4m3fn
            keys, values = keys.view(storage), values.view(storage)
            compute = torch.float16 if compute == torch.bfloat16 else compute
        elif compute == torch.bfloat16 and (interpreted or not target.has_bf16):
            compute = torch.float32
        return cls(
            query,
            keys,
            values,
            _unit_stride(block_ids),
            positions.contiguous(),
            _unit_stride(page_table),
            request_ids.contiguous(),
            None if gate is None else _unit_stride(gate),
            None if tail_start is None else tail_start.contiguous(),
            None if token_base is None else token_base.contiguous(),
            out,
            lse_out,
            ratio,
            scale,
            {"K_SCALE": _scale_kind(k_scale), "V_SCALE": _scale_kind(v_scale)},
            tuple(1.0 if s is None else s for s in (k_scale, v_scale)),
            compute,
            fp8,
            fp8_bytes,
            constant_page(keys.shape[2], page_table, plan),
            target,
            launches_early(target),
        )


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 or not tensor.numel() else tensor.contiguous()


def _scale_kind(scale: float | torch.Tensor | None) -> int:
    """0: none, 1: a float argument, 2: read on the device."""
    if scale is None:
        return 0
    return 2 if isinstance(scale, torch.Tensor) else 1
