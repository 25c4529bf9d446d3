"""Stages before selection: the plan, norm, rotation, compression, storage, and all at once."""

from __future__ import annotations

import torch

from flash_qsa.ops import plan_rows, store_rows
from flash_qsa.ops.fp8 import is_fp8
from flash_qsa.testing.selfcheck.prepare_case import PrepareCase, make_prepare_case
from flash_qsa.testing.selfcheck.problem import Cases, Outcome, Problems, bits, exact, within


def plan(problems: Problems) -> Cases:
    """plan_rows against a loop over requests and tokens."""
    at, n = problems.setting, problems.length
    size, ratio, ring = at.shape.page_size, at.shape.ratio, at.shape.ring_capacity

    def check() -> Outcome:
        lengths = [n, max(1, n - 1), 5]
        queries = [1, 1, 5]
        columns = -(-max(lengths) // size)
        pages = torch.randperm(3 * columns).view(3, columns).int()
        slots = torch.tensor([[7], [0], [3]], dtype=torch.int32)
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        seen = plan_rows(
            *(t.to(at.device) for t in (starts, torch.tensor(lengths).int(), pages, slots)),
            sum(queries) + 2,
            compress_ratio=ratio,
            page_size=size,
            ring_capacity=ring,
            backend=at.backend,
        )
        truth: dict[str, list[int]] = {name: [] for name in seen._fields}
        for request, (length, count) in enumerate(zip(lengths, queries)):
            for p in range(length - count, length):
                slot = int(pages[request, p // size]) * size + p % size
                cell = int(slots[request, 0]) * ring + p % ring
                truth["request_ids"].append(request)
                truth["positions"].append(p)
                truth["visible_blocks"].append((p + 1) // ratio)
                truth["main_slots"].append(slot)
                truth["compressed_slots"].append(slot // ratio if (p + 1) % ratio == 0 else -1)
                truth["ring_slots"].append(cell if length - p <= ring else -1)
        for name, values in truth.items():
            values += [0 if name == "visible_blocks" else -1] * 2
        return exact(
            *(
                (name, buffer, torch.tensor(truth[name], dtype=buffer.dtype, device=at.device))
                for name, buffer in seen._asdict().items()
            )
        )

    yield "mixed batch with padding", check


def norm(problems: Problems) -> Cases:
    """At position 0 a rotation is the identity: what prepare returns is the norm alone."""

    def check() -> Outcome:
        return _queries(make_prepare_case(problems.setting, problems.length, rotary_zero=True))

    yield "query and index query", check


def _queries(case: PrepareCase) -> Outcome:
    seen = case.run()
    query, index_query = case.query_truth()
    return within(
        ("query", seen.query, query.value, query.error),
        ("index_query", seen.index_query, index_query.value, index_query.error),
    )


def rope(problems: Problems) -> Cases:
    """The table itself, then rotations of ±1 entries, which the norm leaves as they are."""
    at, n = problems.setting, problems.length

    yield "table", lambda: within(make_prepare_case(at, n).table_parts())
    yield "mRoPE at the end of the context", lambda: _queries(make_prepare_case(at, n, unit=True))


def compress(problems: Problems) -> Cases:
    """compress_keys, with members in the step and in the ring."""

    def check() -> Outcome:
        case = make_prepare_case(problems.setting, problems.length)
        pooled, first = case.compress()
        truth, first_truth = case.pooled_truth()
        moved = exact(("first_positions", first, first_truth))
        return moved if moved[2] else within(("pooled", pooled, truth.value, truth.error))

    yield "groups across ring and step", check


def store(problems: Problems) -> Cases:
    """store_rows to the first, a middle and the last cell; everything else stays as it was."""
    at, size = problems.setting, problems.setting.shape.page_size
    pages = -(-problems.length // size)

    def check(dtype: torch.dtype) -> Outcome:
        generator = torch.Generator().manual_seed(at.seed)
        fill = torch.full((pages, size, 1, 8), 3.0).to(dtype)
        cache = fill.to(at.device, copy=True)
        cells = pages * size
        slots = torch.tensor([cells - 1, -1, 0, cells, cells // 2, -7])
        rows = (torch.randn(6, 8, generator=generator) * 300).to(at.dtype)
        store_rows(cache, slots.to(at.device), rows.to(at.device), backend=at.backend)
        truth = fill.clone()
        for row in (0, 2, 4):
            cell = int(slots[row])
            kept = rows[row].float().clamp(-448, 448) if is_fp8(dtype) else rows[row]
            stored = kept.to(torch.float8_e4m3fn) if is_fp8(dtype) else kept.to(dtype)
            bits(truth)[cell // size, cell % size, 0] = bits(stored)
        return exact(("cache", cache, truth.to(at.device)))

    yield "cells and skipped slots", lambda: check(at.dtype)
    yield "FP8, saturated", lambda: check(torch.float8_e4m3fn)


def prepare(problems: Problems) -> Cases:
    """Everything before selection in one call: queries, gate, and all three caches."""
    at, n = problems.setting, problems.length

    def check(fp8: bool) -> Outcome:
        case = make_prepare_case(at, n, fp8=fp8)
        seen = case.run()
        moved = exact(*case.moved_parts(seen))
        return moved if moved[2] else within(*case.compare_parts(seen))

    yield "outputs and caches", lambda: check(False)
    yield "FP8 caches", lambda: check(True)
