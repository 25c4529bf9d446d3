"""The row-union schedule for Hopper: warp-specialised, in Gluon.

One program attends for a tile of 2·HALF consecutive rows and one KV head. Two consumer warpgroups
own HALF rows each, HALF·G of the 64 rows of a wgmma tile; a producer warpgroup gathers the listed
cells with cp.async into double-buffered shared memory, 64 tokens of K and of V at a time. A list
comes in sections (see `kernel_build`): what only the first half attends, what only the second half
attends, what both do; a consumer skips the tiles that it has no row in, so sharing loads never
costs a half more arithmetic than its own union.

Probabilities are relative to the largest score of the first tile that a consumer sees, as in
`kernel_union` with FIXED; a tile whose sums leave 2^±60, or whose answers are not finite, is handed
to the per-row schedule.

The whole shared memory of a processor goes into one program: Q 2 · 64 · D, K and V 2 · 64 · D each.
How they get there, and FP8 becomes BF16 on the way, is in `kernel_union_sm90_load`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_qsa.ops.direct import direct
from flash_qsa.ops.sparse_attention.kernel_union_sm90_load import (
    BLOCK_N,
    STAGES,
    fp8_producer,
    producer,
)
from flash_qsa.ops.sparse_attention.kernel_union_sm90_store import (
    BLOCK_M,
    LOG2E,
    barrier,
    store_answer,
    store_partial,
)

SAFE_SUM = gl.constexpr(1.152921504606847e18)
SAFE_PARTIAL_SUM = gl.constexpr(1.073741824e9)
LOWEST = gl.constexpr(-1.0e38)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def _read_scale(scale_ptr, IS_TENSOR: gl.constexpr):
    """A per-tensor scale that is a float argument or a one-element tensor."""
    if IS_TENSOR:
        return gl.load(scale_ptr).to(gl.float32)
    else:
        return scale_ptr


@gluon.jit
def _lane_sums(weights):
    """[64, 64] scores' layout → [64, 4]: what each thread holds of a row, added."""
    parts = gl.reshape(weights, [BLOCK_M, BLOCK_N // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def _consumer(
    q_ptr,
    gate_ptr,
    out_ptr,
    lse_ptr,
    acc_ptr,
    stats_ptr,
    masks_ptr,
    shared_ptr,
    begin,
    end,
    steps,
    first_steps,
    second_steps,
    first_row,
    end_row,
    first_head,
    partial_row,
    num_splits,
    stride_q_t,
    stride_q_h,
    stride_gate_t,
    stride_gate_h,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    log2_scale,
    v_scale,
    q_smem,
    k_smem,
    v_smem,
    k_ready,
    v_ready,
    k_free,
    v_free,
    WHICH: gl.constexpr,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    FP8: gl.constexpr,
    SPLIT: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    LANES: gl.constexpr = min(DIM // 8, 32)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])

    offs_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, q_layout))
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, q_layout))
    row = first_row + offs_m // GROUP
    live = (offs_m < HALF * GROUP) & (row < end_row)
    q_at = row.to(gl.int64) * stride_q_t + (first_head + offs_m % GROUP) * stride_q_h
    q_smem.store(gl.load(q_ptr + q_at[:, None] + offs_d[None, :], mask=live[:, None], other=0.0))
    fence_async_shared()

    # A thread's score columns come in pairs of neighbours. A whole block's tokens have one mask, so
    # half of the masks do; only open groups, in the last two steps, tell tokens apart.
    pairs: gl.constexpr = gl.DistributedLinearLayout(
        [[4], [8], [16]], [[1], [2], [0], [0], [0]], [[0], [0]], [], [BLOCK_N // 2]
    )
    offs_p = gl.arange(0, BLOCK_N // 2, layout=pairs)
    offs_ms = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, s_layout))
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
    bits = gl.where(offs_ms < HALF * GROUP, 1 << (WHICH * HALF + offs_ms // GROUP), 0)
    # lifts a row's bit of a mask to the sign
    lift = gl.where(offs_ms < HALF * GROUP, 31 - WHICH * HALF - offs_ms // GROUP, 0)

    acc = gl.zeros([BLOCK_M, DIM], gl.float32, o_layout)
    peak = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, s_layout))
    # Sums stay apart by lane until the end: no shuffles in the loop.
    lanes = _lane_sums(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout))
    exact = lanes
    alone = first_steps + second_steps
    paired = 2 * gl.minimum(first_steps, second_steps)
    longer = gl.where(first_steps > second_steps, 0, 1)
    began = 0
    seen = gl.zeros([BLOCK_N // 2], gl.int32, pairs)
    upcoming = gl.load(masks_ptr + 2 * offs_p)
    for step in range(begin, end):
        stage = (step - begin) % STAGES
        phase = ((step - begin) // STAGES) & 1
        owner = gl.where(step < paired, step % 2, longer)
        mine = gl.where(step >= alone, 1, gl.where(owner == WHICH, 1, 0))
        member = upcoming.to(gl.uint16, bitcast=True).to(gl.int32)
        # a step ahead, like the producer's cells; behind the last step nobody uses them
        upcoming = gl.load(masks_ptr + BLOCK_N + 2 * offs_p)
        if mine == 1:
            mbarrier.wait(k_ready.index(stage), phase)
            fence_async_shared()
            blank = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)
            keys = k_smem.index(stage).permute((1, 0))
            scores = warpgroup_mma(q_smem, keys, blank, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            barrier()
            mbarrier.arrive(k_free.index(stage), count=1)
            if began == 0:
                peak = gl.max(scores, 1) * log2_scale
            began = 1
            if step >= steps - 2:
                each = gl.load(masks_ptr + offs_n).to(gl.int32)
                scores = gl.where((each[None, :] & bits[:, None]) != 0, scores, float("-inf"))
            weights = gl.exp2(scores * log2_scale - peak[:, None])
            # All ones where attended: predicates would not fit their registers.
            both = gl.reshape(gl.join(member, member), [BLOCK_N])
            both = gl.convert_layout(both, gl.SliceLayout(0, s_layout), assert_trivial=True)
            attended = (both[None, :] << lift[:, None]) >> 31
            kept = weights.to(gl.int32, bitcast=True) & attended
            if HAS_LSE:
                exact += _lane_sums(kept.to(gl.float32, bitcast=True))
            # cut off to BF16, see kernel_union
            rounded = (kept & -0x10000).to(gl.float32, bitcast=True)
            lanes += _lane_sums(rounded)
            if SPLIT:
                seen |= member
            operand = gl.convert_layout(rounded.to(DTYPE), p_layout)
            mbarrier.wait(v_ready.index(stage), phase)
            fence_async_shared()
            acc = warpgroup_mma(operand, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        else:
            # The other consumer still counts on this phase: pass it on only once it has begun.
            mbarrier.wait(k_ready.index(stage), phase)
            mbarrier.arrive(k_free.index(stage), count=1)
            mbarrier.wait(v_ready.index(stage), phase)
        barrier()
        mbarrier.arrive(v_free.index(stage), count=1)
        masks_ptr += BLOCK_N

    total = gl.convert_layout(gl.sum(lanes, 1), gl.SliceLayout(1, s_layout))
    row_s = first_row + offs_ms // GROUP
    live_s = (offs_ms < HALF * GROUP) & (row_s < end_row)
    if SPLIT:
        safe = (total > 1.0 / SAFE_PARTIAL_SUM) & (total < SAFE_PARTIAL_SUM)
        # A row that attends nothing here has no sum that could be wrong.
        some = (gl.reduce(seen, 0, _either) & bits) != 0
        safe = gl.where(some | (total != 0), safe, True)
    else:
        safe = (total > 1.0 / SAFE_SUM) & (total < SAFE_SUM)
    # A value that is not finite, of a token that some row attends, reaches all rows of a product.
    finite = gl.convert_layout(gl.sum(acc - acc, 1), gl.SliceLayout(1, s_layout)) == 0
    unsafe = gl.max(gl.where(live_s & ((safe & finite) == 0), 1, 0), 0)
    if unsafe > 0:
        gl.store(shared_ptr, 0)

    if HAS_LSE:
        every = gl.convert_layout(gl.sum(exact, 1), gl.SliceLayout(1, s_layout))
        factor = gl.where(total > 0, every / total, 1.0)
        acc *= gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
        total = every
    if FP8:
        acc *= v_scale
    if SPLIT:
        peak = gl.where(total > 0, peak, LOWEST)
        at = (partial_row + offs_ms // GROUP).to(gl.int64) * gl.num_programs(1) * GROUP
        at = (at + first_head + offs_ms % GROUP) * num_splits + gl.program_id(2)
        gl.store(stats_ptr + 2 * at, peak, mask=live_s)
        gl.store(stats_ptr + 2 * at + 1, total, mask=live_s)
        store_partial(
            acc_ptr, acc, partial_row, num_splits, first_head, first_row, end_row,
            HALF, GROUP, DIM, o_layout,
        )  # fmt: skip
    else:
        if HAS_LSE:
            lse = (peak + gl.log2(total)) * LN2
            lse_at = row_s.to(gl.int64) * stride_lse_t
            lse_at += (first_head + offs_ms % GROUP) * stride_lse_h
            gl.store(lse_ptr + lse_at, lse, mask=live_s)
        store_answer(
            acc, total, q_smem, gate_ptr, out_ptr, first_row, end_row, first_head,
            stride_gate_t, stride_gate_h, stride_out_t, stride_out_h,
            HALF, GROUP, DIM, HAS_GATE, o_layout, q_layout,
        )  # fmt: skip


@direct
@gluon.jit(do_not_specialize=["first_row", "end_row", "num_splits"])
def union_sm90_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cells_ptr,
    masks_ptr,
    counts_ptr,
    sections_ptr,
    shared_ptr,
    gate_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    lse_ptr,
    acc_ptr,
    stats_ptr,
    stride_q_t,
    stride_q_h,
    stride_k_h,
    stride_s,
    stride_v_h,
    stride_gate_t,
    stride_gate_h,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    first_row,
    end_row,
    num_splits,
    capacity,
    scale,
    RATIO: gl.constexpr,
    UNIT: gl.constexpr,
    VALUES_AT: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    HALF: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    SPLIT: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_LSE: gl.constexpr,
    K_SCALE: gl.constexpr,
    V_SCALE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid [tiles, Hkv, splits]; a split takes consecutive steps, SPLIT: there are several. counts
    in cells, a multiple of 64 / C; sections int32 [tiles, 2], the 64-token steps that only the
    first and only the second half attends, interleaved in front."""
    tile = gl.program_id(0)
    if gl.load(shared_ptr + tile) == 0:
        return
    kv_head = gl.program_id(1).to(gl.int64)
    steps = gl.load(counts_ptr + tile) * RATIO // BLOCK_N
    first_steps = gl.load(sections_ptr + 2 * tile)
    second_steps = gl.load(sections_ptr + 2 * tile + 1)

    splits = num_splits if SPLIT else 1
    per_split = (steps + splits - 1) // splits
    begin = gl.minimum(gl.program_id(2) * per_split, steps)
    end = gl.minimum(begin + per_split, steps)

    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    tile_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], DTYPE)
    q_first = gl.allocate_shared_memory(DTYPE, [BLOCK_M, DIM], tile_shared)
    q_second = gl.allocate_shared_memory(DTYPE, [BLOCK_M, DIM], tile_shared)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, DIM], tile_shared)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, DIM], tile_shared)
    CACHED: gl.constexpr = k_ptr.dtype.element_ty
    FP8: gl.constexpr = CACHED != DTYPE
    buffers = k_smem
    if FP8:
        rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        buffers = gl.allocate_shared_memory(CACHED, [2, BLOCK_N, DIM], rows)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # threads whose copies arrived, or the producer as a whole
        mbarrier.init(k_ready.index(stage), count=1 if FP8 else 128)
        mbarrier.init(v_ready.index(stage), count=1 if FP8 else 128)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()

    first_cell = tile.to(gl.int64) * capacity + begin * (BLOCK_N // RATIO)
    cells = cells_ptr + first_cell
    masks = masks_ptr + first_cell * RATIO
    row = first_row + tile * 2 * HALF
    head = kv_head.to(gl.int32) * GROUP
    log2_scale = scale * LOG2E
    v_scale = 1.0
    if K_SCALE > 0:
        log2_scale = log2_scale * _read_scale(k_scale_ptr, K_SCALE == 2)
    if V_SCALE > 0:
        v_scale = _read_scale(v_scale_ptr, V_SCALE == 2)
    gl.warp_specialize(
        [
            (_consumer, (
                q_ptr, gate_ptr, out_ptr, lse_ptr, acc_ptr, stats_ptr, masks, shared_ptr + tile,
                begin, end, steps, first_steps, second_steps,
                row, end_row, head, tile * 2 * HALF, num_splits,
                stride_q_t, stride_q_h, stride_gate_t, stride_gate_h,
                stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, log2_scale, v_scale,
                q_first, k_smem, v_smem, k_ready, v_ready, k_free, v_free,
                0, HALF, GROUP, DIM, FP8, SPLIT, HAS_GATE, HAS_LSE,
            )),
            (_consumer, (
                q_ptr, gate_ptr, out_ptr, lse_ptr, acc_ptr, stats_ptr, masks, shared_ptr + tile,
                begin, end, steps, first_steps, second_steps,
                row + HALF, end_row, head, tile * 2 * HALF + HALF, num_splits,
                stride_q_t, stride_q_h, stride_gate_t, stride_gate_h,
                stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, log2_scale, v_scale,
                q_second, k_smem, v_smem, k_ready, v_ready, k_free, v_free,
                1, HALF, GROUP, DIM, FP8, SPLIT, HAS_GATE, HAS_LSE,
            )),
            (fp8_producer if FP8 else producer, (
                k_ptr + kv_head * stride_k_h, v_ptr + kv_head * stride_v_h, cells, masks,
                begin, end, steps, stride_s, buffers, k_smem, v_smem,
                k_ready, v_ready, k_free, v_free, RATIO, UNIT, VALUES_AT, DIM,
            )),
        ],
        [4, 4],
        [(504 - PRODUCER_REGS) // 2, PRODUCER_REGS],
    )  # fmt: skip
