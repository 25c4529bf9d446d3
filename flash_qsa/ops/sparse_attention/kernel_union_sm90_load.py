"""How the Hopper row-union schedule loads keys and values: its producer warpgroup.

A BF16 cache is gathered by cp.async where the matrix units read it, 64 tokens of K and of V at a
time. An FP8 cache is copied into a buffer for each; the threads that copied e4m3 convert it to
BF16, and while one buffer is converted the other one is filled. Conversion is exact, so consumers
need not know. It is they who fence what was written here against what the matrix units read: a
fence here would wait for the copies that are under way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from flash_qsa.ops.sparse_attention.kernel_union_sm90_store import barrier

# Triton 3.9's name, or that of 3.6.
_gather_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
BLOCK_N = gl.constexpr(64)
STAGES = gl.constexpr(2)
ROWS = gl.constexpr(32)
"""Tokens of FP8 converted at a time: more would not fit the producer's registers."""


@gluon.jit
def _first_places(
    k_ptr,
    v_ptr,
    cells_ptr,
    stride_s,
    offs_n,
    offs_d,
    RATIO: gl.constexpr,
    VALUES_AT: gl.constexpr,
    ITEM: gl.constexpr,
):
    """How far values lie behind keys, offsets [64, D] in a cell, and pointers [64] to the first
    step's cells. ITEM: bytes of an element."""
    # Values lie where keys do, so many elements behind; pointers of their own would not fit.
    apart = VALUES_AT
    if VALUES_AT == 0:
        apart = (v_ptr.to(gl.int64) - k_ptr.to(gl.int64)) // ITEM
    # One base for all tokens of a thread; a token then adds its cell's offset, in one instruction.
    base = ((offs_n % RATIO) * stride_s)[:, None] + offs_d[None, :]
    return apart, base, cells_ptr + offs_n // RATIO


@gluon.jit
def _live(masks_ptr, offs_n, offs_d, DIM: gl.constexpr):
    """Which elements [64, D] of a step are copied where it may hold open groups: those come last,
    with tokens that were never written and are zeros instead."""
    live = gl.load(masks_ptr + offs_n) != 0
    return live[:, None] & (offs_d < DIM)[None, :]


@gluon.jit
def _places(k_from, apart, DIM: gl.constexpr):
    """Pointers to keys and values [64, D] of a step's tokens; their rows lie on 16 bytes."""
    v_from = k_from + apart
    k_from = gl.max_contiguous(gl.multiple_of(k_from, [1, 16]), [1, DIM])
    v_from = gl.max_contiguous(gl.multiple_of(v_from, [1, 16]), [1, DIM])
    return k_from, v_from


@gluon.jit
def producer(
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
    LANES: gl.constexpr = min(DIM // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    apart, base, cells_at = _first_places(
        k_ptr, v_ptr, cells_ptr, stride_s, offs_n, offs_d, RATIO, VALUES_AT, 2
    )
    upcoming = gl.load(cells_at)
    for step in range(begin, end):
        stage = (step - begin) % STAGES
        phase = ((step - begin) // STAGES) & 1
        offset = (upcoming.to(gl.int64) * UNIT)[:, None]
        # The next step's cells arrive while this one's keys and values do.
        cells_at += BLOCK_N // RATIO
        upcoming = gl.load(cells_at)
        k_from, v_from = _places(k_ptr + base + offset, apart, DIM)
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        if step < steps - 2:
            _gather_async(k_smem.index(stage), k_from)
            async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            _gather_async(v_smem.index(stage), v_from)
        else:
            live = _live(masks_ptr, offs_n, offs_d, DIM)
            _gather_async(k_smem.index(stage), k_from, mask=live)
            async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            _gather_async(v_smem.index(stage), v_from, mask=live)
        async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)
        masks_ptr += BLOCK_N
    async_copy.wait_group(0)


@gluon.jit
def _request(buffer, pointers, masks_ptr, step, last, offs_n, offs_d, DIM: gl.constexpr):
    """Copies the tokens of `step`, if there is one before `last`, and counts as one group."""
    begin, end, steps = last
    if step < end:
        if step < steps - 2:
            _gather_async(buffer, pointers)
        else:
            masks_ptr += (step - begin) * BLOCK_N
            _gather_async(buffer, pointers, mask=_live(masks_ptr, offs_n, offs_d, DIM))
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
    """As `producer`; buffers: e4m3 [2, 64, D] of shared memory."""
    LANES: gl.constexpr = DIM // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [4, 1], [1, 0])
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    apart, base, cells_at = _first_places(
        k_ptr, v_ptr, cells_ptr, stride_s, offs_n, offs_d, RATIO, VALUES_AT, 1
    )
    last = (begin, end, steps)

    offset = (gl.load(cells_at).to(gl.int64) * UNIT)[:, None]
    k_from, v_from = _places(k_ptr + base + offset, apart, DIM)
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
        k_from, v_from = _places(k_ptr + base + offset, apart, DIM)

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
