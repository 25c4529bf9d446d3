"""How the Hopper row-union schedule stores what a consumer warpgroup holds: its rows' answers, or
the partials of a split."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Triton 3.9's name, or that of 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

BLOCK_M = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def store_partial(
    acc_ptr,
    acc,
    partial_row,
    num_splits,
    first_head,
    first_row,
    end_row,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    layout: gl.constexpr,
):
    """acc [64, D] to FP32 partials [rows, Hq, splits, D] of this split, for `kernel_merge`."""
    offs_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    at = (partial_row + offs_m // GROUP).to(gl.int64) * gl.num_programs(1) * GROUP
    at = (at + first_head + offs_m % GROUP) * num_splits + gl.program_id(2)
    live = (offs_m < HALF * GROUP) & (first_row + offs_m // GROUP < end_row)
    gl.store(acc_ptr + at[:, None] * DIM + offs_d[None, :], acc, mask=live[:, None])


@gluon.jit
def store_answer(
    acc,
    total,
    smem,
    gate_ptr,
    out_ptr,
    first_row,
    end_row,
    first_head,
    stride_gate_t,
    stride_gate_h,
    stride_out_t,
    stride_out_h,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    HAS_GATE: gl.constexpr,
    acc_layout: gl.constexpr,
    layout: gl.constexpr,
):
    """acc [64, D] over total [64], rounded, gated and stored.

    It passes through `smem` [64, D], which nobody reads any more, into rows of 16-byte pieces
    (`layout`).
    """
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    inverse = 1.0 / gl.convert_layout(total, gl.SliceLayout(1, acc_layout))
    smem.store((acc * inverse[:, None]).to(DTYPE))
    barrier()
    result = smem.load(layout)
    offs_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))[None, :]
    row = first_row + offs_m // GROUP
    live = ((offs_m < HALF * GROUP) & (row < end_row))[:, None]
    row = row.to(gl.int64)
    head = first_head + offs_m % GROUP
    if HAS_GATE:
        gate_at = (row * stride_gate_t + head * stride_gate_h)[:, None]
        gate = gl.load(gate_ptr + gate_at + offs_d, mask=live, other=0.0).to(gl.float32)
        result = (result.to(gl.float32) / (1.0 + gl.exp2(-gate * LOG2E))).to(DTYPE)
    out_at = (row * stride_out_t + head * stride_out_h)[:, None]
    gl.store(out_ptr + out_at + offs_d, result, mask=live)
