"""How the Hopper row-union schedule loads an FP8 cache: its producer warpgroup for e4m3.

cp.async brings 64 tokens of keys, then of values, into a buffer each; the threads that copied them
convert them to BF16 where the matrix units read them. While one buffer is converted the other one
is filled. Conversion is exact, so the consumers are those of a BF16 cache; it is they who fence
what was written here against what the matrix units read: a fence here would wait for the copies
that are under way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from flash_qsa.ops.sparse_attention.kernel_union_sm90_store import barrier, gather_async

BLOCK_N = gl.constexpr(64)
STAGES = gl.constexpr(2)
ROWS = gl.constexpr(32)
"""Tokens converted at a time: more would not fit the producer's registers."""


@gluon.jit
def _request(buffer, pointers, masks_ptr, step, last, offs_n, offs_d, DIM: gl.constexpr):
    """Copies the tokens of `step`, if there is one before `last`, and counts as one group."""
    begin, end, steps = last
    if step < end:
        if step < steps - 2:
            gather_async(buffer, pointers)
        else:
            # Open groups come last and may hold tokens never written: zeros instead.
            live = gl.load(masks_ptr + (step - begin) * BLOCK_N + offs_n) != 0
            gather_async(buffer, pointers, mask=live[:, None] & (offs_d < DIM)[None, :])
    async_copy.commit_group()


@gluon.jit
def _convert(buffer, smem, layout: gl.constexpr):
    """e4m3 [64, D] to BF16. FP16 in between holds every e4m3 number; FP32 behind it, because FP16
    turns into BF16 at an eighth of the rate."""
    for part in gl.static_range(BLOCK_N // ROWS):
        codes = buffer.slice(part * ROWS, ROWS).load(layout)
        values = codes.to(gl.float16).to(gl.float32).to(gl.bfloat16)
        smem.slice(part * ROWS, ROWS).store(values)


@gluon.jit
def fp8_producer(
    k_ptr,
    v_ptr,
    cells_ptr,
    masks_ptr,
    begin,
    end,
    steps,
    stride_s,
    buffers,
    k_smem,
    v_smem,
    k_ready,
    v_ready,
    k_free,
    v_free,
    RATIO: gl.constexpr,
    UNIT: gl.constexpr,
    VALUES_AT: gl.constexpr,
    DIM: gl.constexpr,
):
    """As `kernel_union_sm90._producer`; buffers: e4m3 [2, 64, D] of shared memory."""
    LANES: gl.constexpr = DIM // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [4, 1], [1, 0])
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    apart = VALUES_AT
    if VALUES_AT == 0:
        apart = v_ptr.to(gl.int64) - k_ptr.to(gl.int64)
    base = ((offs_n % RATIO) * stride_s)[:, None] + offs_d[None, :]
    cells_at = cells_ptr + offs_n // RATIO
    last = (begin, end, steps)

    offset = (gl.load(cells_at).to(gl.int64) * UNIT)[:, None]
    k_from = k_ptr + base + offset
    v_from = k_from + apart
    k_from = gl.max_contiguous(gl.multiple_of(k_from, [1, 16]), [1, DIM])
    v_from = gl.max_contiguous(gl.multiple_of(v_from, [1, 16]), [1, DIM])
    _request(buffers.index(0), k_from, masks_ptr, begin, last, offs_n, offs_d, DIM)
    _request(buffers.index(1), v_from, masks_ptr, begin, last, offs_n, offs_d, DIM)
    cells_at += BLOCK_N // RATIO
    upcoming = gl.load(cells_at)
    for step in range(begin, end):
        stage = (step - begin) % STAGES
        phase = ((step - begin) // STAGES) & 1
        offset = (upcoming.to(gl.int64) * UNIT)[:, None]
        cells_at += BLOCK_N // RATIO
        upcoming = gl.load(cells_at)
        k_from = k_ptr + base + offset
        v_from = k_from + apart
        k_from = gl.max_contiguous(gl.multiple_of(k_from, [1, 16]), [1, DIM])
        v_from = gl.max_contiguous(gl.multiple_of(v_from, [1, 16]), [1, DIM])

        async_copy.wait_group(1)
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        _convert(buffers.index(0), k_smem.index(stage), layout)
        barrier()
        mbarrier.arrive(k_ready.index(stage), count=1)
        _request(buffers.index(0), k_from, masks_ptr, step + 1, last, offs_n, offs_d, DIM)

        async_copy.wait_group(1)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        _convert(buffers.index(1), v_smem.index(stage), layout)
        barrier()
        mbarrier.arrive(v_ready.index(stage), count=1)
        _request(buffers.index(1), v_from, masks_ptr, step + 1, last, offs_n, offs_d, DIM)
    async_copy.wait_group(0)
