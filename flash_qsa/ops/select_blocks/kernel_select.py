"""The selection: the K best of a row of ordered int32 scores, ids ascending. Exact.

One program a row. A *bound* is found by bisection over integers: between `low`, which at least K
keys reach, and `high`, which fewer do. It starts from the row's largest and doubles its step until
K keys are covered, then halves; it ends early as soon as the count is good enough.

Short rows stay in registers. Longer rows first bound the K-th largest *group maximum*, a lower
bound of the K-th largest key: K groups each hold one such key. Only the K … K + slack groups that
reach it can hold a selected key. Where equal maxima make them more, the first of the equal ones
suffice: each holds a key of that value, and lower ids come first. Listed groups are narrowed to
quads, quads to the keys that reach the bound; where those are too many the bound is raised by
counting over the quads. So every list has room by construction, and concentrated scores only cost
rounds.

Rows that see at most K blocks are written without reading a score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_qsa.ops.direct import direct
from flash_qsa.ops.select_blocks.kernel_score import HIDDEN, scatter

NAN_KEY = tl.constexpr(-1)
"""Every negative word but HIDDEN means NaN; raised to this, differences of keys fit int32."""
OCTAVE = tl.constexpr(1 << 23)
"""Step of the integer order that halves a float."""
WHOLE = tl.constexpr(1 << 30)


@triton.jit
def _probe(low, high, step):
    return tl.maximum(low + (high - low) // 2, high - step)


@triton.jit
def bound_of(x, low, count, want, most):
    """Splits x so that about `want` elements are at or above the bound.

    `low` is reached by `count` ≥ want elements. Returns (sure, tied, ties): elements ≥ sure belong,
    and so do the first `ties` elements equal to `tied`. Their number is want … most.
    """
    high = tl.max(x, 0) + 1
    above = 0
    step = OCTAVE
    while (high - low > 1) & (count > most):
        middle = _probe(low, high, step)
        reached = tl.sum((x >= middle).to(tl.int32), 0)
        if reached >= want:
            low = middle
            count = reached
            step = WHOLE
        else:
            high = middle
            above = reached
            step = 2 * tl.minimum(step, WHOLE // 2)
    exact = count > most
    sure = tl.where(exact, high, low)
    ties = tl.where(exact, want - above, 0)
    return sure, low, ties


@triton.jit
def members(x, sure, tied, ties):
    """Elements that `bound_of` chose, as int32 0 / 1."""
    chosen = (x >= sure).to(tl.int32)
    if ties > 0:
        equal = (x == tied).to(tl.int32)
        chosen += tl.where(tl.cumsum(equal, 0) <= ties, equal, 0)
    return chosen


@triton.jit
def _write_chosen(out_row, chosen, ids, TOP_K: tl.constexpr, PTX: tl.constexpr):
    places = tl.cumsum(chosen, 0) - 1
    scatter(out_row + places, ids, tl.where(places < TOP_K, chosen, 0), PTX)


@triton.jit
def _write_run(out_row, start, count, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr):
    offs = tl.arange(0, TOP_K_PAD)
    tl.store(out_row + offs, tl.where(offs < count, start + offs, -1), mask=offs < TOP_K)


@triton.jit
def _listed_keys(
    scores_row, list_row, start, listed, first, stored, GROUP: tl.constexpr, CHUNK: tl.constexpr
):
    """Keys and ids [CHUNK · GROUP] of the listed groups start … start + CHUNK - 1."""
    offs = start + tl.arange(0, CHUNK)
    groups = tl.load(list_row + offs, mask=offs < listed, other=0)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    keys = tl.load(scores_row + ids, mask=(offs < listed)[:, None], other=HIDDEN)
    candidate = (ids >= first) & (ids < stored) & (offs < listed)[:, None]
    keys = tl.where(candidate, tl.maximum(keys, NAN_KEY), HIDDEN)
    return tl.reshape(keys, (CHUNK * GROUP,)), tl.reshape(ids, (CHUNK * GROUP,))


@triton.jit
def _quads_of(
    scores_row,
    list_row,
    quads_row,
    listed,
    bound,
    first,
    stored,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Writes to quads_row the ascending quads (ids / 4) of listed groups that reach the bound."""
    QUADS: tl.constexpr = CHUNK * GROUP // 4
    total = 0
    for start in range(0, listed, CHUNK):
        keys, ids = _listed_keys(scores_row, list_row, start, listed, first, stored, GROUP, CHUNK)
        keep = (tl.max(tl.reshape(keys, (QUADS, 4)), 1) >= bound).to(tl.int32)
        quads = tl.min(tl.reshape(ids, (QUADS, 4)), 1) // 4
        scatter(quads_row + (total + tl.cumsum(keep, 0) - 1), quads, keep, PTX)
        total += tl.sum(keep, 0)
    return total


@triton.jit
def _select_listed(
    scores_row,
    list_row,
    kept_row,
    listed,
    bound,
    first,
    stored,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    TOP_K: tl.constexpr,
    SURVIVORS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Writes to kept_row the ascending ids of TOP_K … SURVIVORS keys that hold the best TOP_K.

    Returns their number.
    """
    total = 0
    for start in range(0, listed, CHUNK):
        keys, ids = _listed_keys(scores_row, list_row, start, listed, first, stored, GROUP, CHUNK)
        keep = (keys >= bound).to(tl.int32)
        places = total + tl.cumsum(keep, 0) - 1
        scatter(kept_row + places, ids, tl.where(places < SURVIVORS, keep, 0), PTX)
        total += tl.sum(keep, 0)
    if total > SURVIVORS:
        high = bound
        for start in range(0, listed, CHUNK):
            keys, _ = _listed_keys(scores_row, list_row, start, listed, first, stored, GROUP, CHUNK)
            high = tl.maximum(high, tl.max(keys, 0) + 1)
        low = bound
        above = 0
        step = OCTAVE
        while (high - low > 1) & (total > SURVIVORS):
            middle = _probe(low, high, step)
            reached = 0
            for start in range(0, listed, CHUNK):
                keys, _ = _listed_keys(
                    scores_row, list_row, start, listed, first, stored, GROUP, CHUNK
                )
                reached += tl.sum((keys >= middle).to(tl.int32), 0)
            if reached >= TOP_K:
                low = middle
                total = reached
                step = WHOLE
            else:
                high = middle
                above = reached
                step = 2 * tl.minimum(step, WHOLE // 2)
        exact = total > SURVIVORS
        sure = tl.where(exact, high, low)
        ties = tl.where(exact, TOP_K - above, 0)
        tl.debug_barrier()
        total = 0
        for start in range(0, listed, CHUNK):
            keys, ids = _listed_keys(
                scores_row, list_row, start, listed, first, stored, GROUP, CHUNK
            )
            equal = (keys == low).to(tl.int32)
            keep = (keys >= sure).to(tl.int32)
            keep += tl.where((keys < sure) & (tl.cumsum(equal, 0) <= ties), equal, 0)
            places = total + tl.cumsum(keep, 0) - 1
            scatter(kept_row + places, ids, tl.where(places < SURVIVORS, keep, 0), PTX)
            total += tl.sum(keep, 0)
            ties -= tl.minimum(tl.sum(equal, 0), ties)
    return total


@direct
@triton.jit(do_not_specialize=["row_begin", "width", "num_requests"])
def select_kernel(
    scores_ptr,
    maxima_ptr,
    scratch_ptr,
    request_ids_ptr,
    visible_ptr,
    first_ptr,
    out_ptr,
    stride_scores,
    stride_maxima,
    stride_scratch,
    stride_out,
    row_begin,
    width,
    num_requests,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    SLACK: tl.constexpr,
    SURVIVORS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    local = tl.program_id(0).to(tl.int64)
    row = row_begin + local
    request = tl.load(request_ids_ptr + row)
    visible = tl.load(visible_ptr + row)
    visible = tl.where((request >= 0) & (request < num_requests), visible, 0)
    first = 0
    if HAS_FIRST:
        first = tl.maximum(tl.load(first_ptr + row), 0)
    # scores exist for first … stored - 1; blocks behind them have no page and rank last
    stored = tl.minimum(visible, width)
    out_row = out_ptr + row * stride_out
    if PDL:
        # everything above was written before the scorer let this kernel in
        tl.extra.cuda.gdc_wait()
    if stored - first <= TOP_K:
        _write_run(out_row, first, visible - first, TOP_K, TOP_K_PAD)
    elif GROUP == 1:
        ids = tl.arange(0, UNITS)
        # rounding the length up keeps loads wide; the words behind it are masked below
        keys = tl.load(
            scores_ptr + local * stride_scores + ids,
            mask=ids < (stored + 15) // 16 * 16,
            other=HIDDEN,
        )
        keys = tl.where((ids >= first) & (ids < stored), tl.maximum(keys, NAN_KEY), HIDDEN)
        low = tl.min(tl.where(keys == HIDDEN, 0x7FFFFFFF, keys), 0)
        sure, tied, ties = bound_of(keys, low, stored - first, TOP_K, TOP_K)
        _write_chosen(out_row, members(keys, sure, tied, ties), ids, TOP_K, PTX)
    elif GROUP > 1:
        scores_row = scores_ptr + local * stride_scores
        kept_row = scratch_ptr + local * stride_scratch
        list_row = kept_row + SURVIVORS
        units = tl.arange(0, UNITS)
        begin = first // GROUP
        end = (stored + GROUP - 1) // GROUP
        maxima = tl.load(
            maxima_ptr + local * stride_maxima + units,
            mask=units < (end + 15) // 16 * 16,
            other=HIDDEN,
        )
        maxima = tl.where((units >= begin) & (units < end), tl.maximum(maxima, NAN_KEY), HIDDEN)
        low = tl.min(tl.where(maxima == HIDDEN, 0x7FFFFFFF, maxima), 0)
        if end - begin <= TOP_K + SLACK:
            # too few groups to bound anything: every key from NaN upwards may be chosen
            sure = NAN_KEY
            tied = NAN_KEY
            ties = 0
        else:
            sure, tied, ties = bound_of(maxima, low, end - begin, TOP_K, TOP_K + SLACK)
        chosen = members(maxima, sure, tied, ties)
        scatter(list_row + (tl.cumsum(chosen, 0) - 1), units, chosen, PTX)
        listed = tl.sum(chosen, 0)
        bound = tl.where(ties > 0, tied, sure)
        tl.debug_barrier()
        if GROUP > 4:
            quads_row = list_row + (TOP_K + SLACK)
            listed = _quads_of(
                scores_row, list_row, quads_row, listed, bound, first, stored, GROUP, CHUNK, PTX
            )
            list_row = quads_row
            tl.debug_barrier()
        kept = _select_listed(
            scores_row,
            list_row,
            kept_row,
            listed,
            bound,
            first,
            stored,
            4,
            min(SURVIVORS, CHUNK * GROUP // 4),
            TOP_K,
            SURVIVORS,
            PTX,
        )
        tl.debug_barrier()
        offs = tl.arange(0, SURVIVORS)
        ids = tl.load(kept_row + offs, mask=offs < kept, other=0)
        keys = tl.load(scores_row + ids, mask=offs < kept, other=HIDDEN)
        keys = tl.where(offs < kept, tl.maximum(keys, NAN_KEY), HIDDEN)
        low = tl.min(tl.where(keys == HIDDEN, 0x7FFFFFFF, keys), 0)
        sure, tied, ties = bound_of(keys, low, kept, TOP_K, TOP_K)
        _write_chosen(out_row, members(keys, sure, tied, ties), ids, TOP_K, PTX)
