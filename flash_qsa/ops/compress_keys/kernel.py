"""compress_keys in Triton: one program a row, most of which see at once that it closes no group.
Mirrors `reference.py`, in the same order of additions.

Reads C keys and writes one for each closed group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_qsa.ops.compress_keys.ring_rows import position_offset, stores_positions
from flash_qsa.ops.compress_keys.tiles import choose_warps
from flash_qsa.ops.device import Groups, Heads, Positions, Ring, pool_group, ring_position
from flash_qsa.ops.direct import direct
from flash_qsa.plan import BatchPlan


@direct
@triton.jit(do_not_specialize=["requests", "axis_stride"])
def _compress_keys_kernel(
    keys,
    ring,
    rotary,
    request_ids_ptr,
    ring_table_ptr,
    ring_table_stride,
    query_start_ptr,
    seq_lens_ptr,
    positions_ptr,
    out,
    first_out,
    axis_stride,
    requests,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    last_position = tl.load(positions_ptr + row)
    request = tl.load(request_ids_ptr + row).to(tl.int64)
    closes = (last_position >= 0) & ((last_position + 1) % GROUPS.ratio == 0)
    if closes & (request >= 0) & (request < requests):
        start = tl.load(query_start_ptr + request)
        end = tl.load(query_start_ptr + request + 1)
        first_here = (tl.load(seq_lens_ptr + request) - (end - start)).to(tl.int64)
        slot = tl.load(ring_table_ptr + request * ring_table_stride).to(tl.int64)
        first_position = last_position - (GROUPS.ratio - 1)
        in_step = first_position >= first_here
        in_ring = (slot >= 0) & (slot < ring.slots)
        if in_step | in_ring:
            d = tl.arange(0, GROUPS.block)[None, :]
            unread = (d >= GROUPS.dim).to(tl.int32)
            group = (row, last_position, first_here, slot)
            mean = pool_group(keys, ring, group, d, unread, GROUPS, True)
            at = out.ptr + row * out.stride + d
            tl.store(at, mean.to(out.ptr.dtype.element_ty), mask=d < GROUPS.dim)
            first = first_out.ptr + row * first_out.stride
            if in_step:
                source = rotary.ptr + (row - (GROUPS.ratio - 1)) * rotary.stride_row
                for axis in tl.static_range(3):
                    tl.store(first + axis, tl.load(source + axis * axis_stride))
            elif GROUPS.has_positions:
                for axis in tl.static_range(3):
                    tl.store(first + axis, ring_position(ring, slot, first_position, axis, GROUPS))
            else:
                for axis in tl.static_range(3):
                    tl.store(first + axis, first_position)


def launch(
    raw_keys: torch.Tensor,
    positions: torch.Tensor,
    ring: torch.Tensor,
    ring_table: torch.Tensor,
    plan: BatchPlan,
    ratio: int,
    out: torch.Tensor,
    first_positions_out: torch.Tensor,
) -> None:
    """Fills the rows of `out` and `first_positions_out` that close a group."""
    rows, dim = raw_keys.shape
    requests = plan.seq_lens.shape[0]
    if requests == 0:
        return
    block = max(4, triton.next_power_of_2(dim))
    has_positions = stores_positions(ring.shape[3], dim, ring.dtype)
    position_at = position_offset(dim, ring.dtype) if has_positions else dim
    bits = ring.view(torch.int32 if ring.element_size() == 4 else torch.int16)
    _compress_keys_kernel[(rows,)](
        Heads(raw_keys, raw_keys.stride(0)),
        Ring(bits, bits.stride(0), bits.stride(1), bits.shape[0]),
        Positions(positions, positions.stride(0)),
        plan.request_ids.contiguous(),
        ring_table,
        ring_table.stride(0),
        plan.query_start.contiguous(),
        plan.seq_lens.contiguous(),
        plan.positions.contiguous(),
        Heads(out, out.stride(0)),
        Heads(first_positions_out, first_positions_out.stride(0)),
        positions.stride(2),
        requests,
        GROUPS=Groups(ratio, ring.shape[1], dim, block, position_at, has_positions),
        num_warps=choose_warps(block),
    )
