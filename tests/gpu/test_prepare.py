"""prepare and the movers on a GPU.

Claims:
* BF16, FP16 and FP32 steps keep their bounds against float64 and write just the named cells, as on
  the CPU; FP8 bytes are those of the CPU reference where both round alike;
* the real head shapes, long prefills, many requests and padded batches too;
* a captured graph replays with other lengths, pages, scales and live rows and gives the eager bits;
* repeats give the same bits, and a row's bits do not depend on the rest of its batch;
* addresses past 2^31 elements, and a native context in one call, are right;
* every e4m3 code is read and written as the format says.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_qsa.config import RopeConfig
from flash_qsa.ops import compress_keys, expand_blocks, plan_rows, store_rows
from flash_qsa.ops.batch_plan.api import PlanRows
from flash_qsa.ops.fp8 import as_bytes, from_storage, to_storage
from flash_qsa.ops.prepare.api import Caches, Prepared
from flash_qsa.plan import BatchPlan
from flash_qsa.testing.inputs import REAL, Shape
from flash_qsa.testing.prepared import assert_prepared, bits, on_cpu
from flash_qsa.testing.steps import StepProblem, make_step

MROPE = RopeConfig(rotary_dim=64, max_positions=4096, mrope_section=(11, 11, 10))
MIXED = ([9, 7, 300, 4, 12, 2050], [1, 2, 170, 4, 12, 4])


def assert_rounded(
    got: torch.Tensor, floats: torch.Tensor, scale: torch.Tensor | None = None, codes: int = 1
) -> None:
    """FP8 `got` holds `floats` of another binary, rounded: within `codes`, and seldom apart at all.

    Each binary sums squares in its own order, so that now and then a float, and with it its code,
    rounds the other way. Cells that nobody wrote are NaN.
    """
    floats = floats.cpu()
    want = to_storage(floats, torch.uint8, scale)
    apart = (as_bytes(got).cpu().int() - want.int()).abs()[floats.isfinite()]
    assert apart.max() <= codes and (apart > 0).double().mean() < 0.01


@pytest.mark.parity("P10", "P13", "P16", "P29", "P30", "P49")
@pytest.mark.bug("O-36")
@pytest.mark.parametrize(
    ("dtype", "form", "shape"),
    [
        (torch.bfloat16, "3d", REAL),
        (torch.bfloat16, "1d", REAL),
        (torch.float16, "canonical", Shape(8, 1, 64, 16, 128)),
        (torch.float32, "3d", Shape(6, 2, 48, 3, 32)),
    ],
)
def test_equals_float64_and_writes_only_the_named_cells(
    dtype: torch.dtype, form: str, shape: Shape
) -> None:
    rope = MROPE
    if shape.index_dim < 64:
        sections = {"mrope_section": (3, 3, 2), "mrope_interleaved": False}
        rope = RopeConfig(rotary_dim=16, max_positions=4096, **sections)
    problem = make_step(
        *MIXED,
        shape,
        dtype=dtype,
        rope=rope,
        position_form=form,
        ring_positions=form != "1d",
        padding=5,
        device="cuda",
    )
    caches, before = problem.clone_caches(), problem.clone_caches()
    out = problem.run(caches, backend="triton")
    assert_prepared(*on_cpu(problem, out, caches, before))


@pytest.mark.parity("P05", "P31", "P41", "P42")
@pytest.mark.bug("O-42", "O-43")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_fp8_caches_hold_the_rounded_float_caches(dtype: torch.dtype) -> None:
    options = {"dtype": torch.bfloat16, "rope": MROPE, "scale": 300.0, "device": "cuda"}
    wide = make_step(*MIXED, REAL, **options)
    wide_caches = wide.clone_caches()
    wide_out = wide.run(wide_caches, backend="triton")
    narrow = make_step(*MIXED, REAL, main_dtype=dtype, index_dtype=dtype, **options)
    caches = narrow.clone_caches()
    scales = {"k_scale": 0.3, "v_scale": torch.tensor([0.7], device="cuda")}
    out = narrow.run(caches, backend="triton", **scales)
    assert_rounded(out.index_query, wide_out.index_query)
    assert_rounded(caches.compressed, wide_caches.compressed)
    keys, values = wide_caches.main.chunk(2, -1)
    dim = REAL.head_dim
    # scales as tensors: FP32 divisions on both sides
    assert_rounded(caches.main[..., :dim], keys, torch.tensor(0.3))
    assert_rounded(caches.main[..., dim:], values, torch.tensor(0.7), codes=0)


@pytest.mark.bug("O-18", "O-21", "O-42")
def test_a_graph_replays_with_other_lengths_pages_and_scales() -> None:
    shape = dataclasses.replace(REAL, page_size=16)
    options = {"dtype": torch.bfloat16, "rope": MROPE, "ring_positions": True, "device": "cuda"}
    options |= {"main_dtype": torch.float8_e4m3fn, "position_form": "3d"}
    rows, requests = 8, 8
    steps = [
        make_step([2040 + s + r for r in range(live)], [1] * live, shape, seed=s, **options)
        for s, live in enumerate((8, 1, 3, 8, 5))
    ]
    steps = [dataclasses.replace(step, norms=steps[0].norms) for step in steps]  # one layer
    pages = max(step.caches.main.shape[0] for step in steps)
    columns = max(step.plan.page_table.shape[1] for step in steps)
    held = _Held(steps[0], rows, requests, pages, columns)
    held.load(steps[0])
    held.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.step()
    for number, step in enumerate(steps):
        held.scale.fill_(0.25 * (number + 1))
        held.load(step)
        graph.replay()
        caches = step.clone_caches()
        out = step.run(caches, backend="triton", k_scale=held.scale, v_scale=0.5)
        live = step.plan.num_tokens
        for one, two in zip(held.out, out):
            assert torch.equal(bits(one[:live]), bits(two[:live]))
        for one, two in zip(held.caches, caches):
            count = min(one.shape[0], two.shape[0])
            assert torch.equal(bits(one[:count]), bits(two[:count])), number


class _Held:
    """Buffers of a captured step, refilled between replays."""

    def __init__(self, like: StepProblem, rows: int, requests: int, pages: int, columns: int):
        def room(tensor: torch.Tensor, count: int) -> torch.Tensor:
            return torch.zeros(count, *tensor.shape[1:], dtype=tensor.dtype, device="cuda")

        self.like, self.rows = like, rows
        self.qkv, self.index_qk = room(like.qkv, rows), room(like.index_qk, rows)
        self.positions = torch.zeros(3, rows, dtype=torch.int64, device="cuda")
        slots = requests + 1
        self.caches = Caches(
            room(like.caches.main, pages),
            room(like.caches.compressed, pages),
            room(like.caches.ring, slots),
        )
        self.scale = torch.ones(1, device="cuda")
        self.starts = torch.zeros(requests + 1, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(requests, dtype=torch.int32, device="cuda")
        self.pages = torch.full((requests, columns), -1, dtype=torch.int32, device="cuda")
        self.rings = torch.full((requests, 1), -1, dtype=torch.int32, device="cuda")
        self.planned = PlanRows.empty(rows, "cuda")
        self.out = like.run(like.clone_caches(), backend="triton", k_scale=1.0, v_scale=0.5)
        self.out = Prepared(*(room(part, rows) for part in self.out))

    def load(self, step: StepProblem) -> None:
        live, plan = step.plan.num_tokens, step.plan
        for mine in (self.qkv, self.index_qk):
            mine.fill_(float("nan"))
        self.qkv[:live], self.index_qk[:live] = step.qkv, step.index_qk
        self.positions.fill_(-(1 << 40))
        self.positions[:, :live] = step.positions
        self.starts.fill_(live)
        self.starts[: live + 1] = plan.query_start
        self.lengths.zero_()
        self.lengths[:live] = plan.seq_lens
        self.pages.fill_(-1)
        self.pages[:live, : plan.page_table.shape[1]] = plan.page_table
        self.rings.fill_(-1)
        self.rings[:live] = plan.ring_table
        for mine, theirs in zip(self.caches, step.caches):
            as_bytes(mine[: theirs.shape[0]]).copy_(as_bytes(theirs))

    def step(self) -> None:
        shape, plan = self.like.shape, self.like.plan
        tables = (self.starts, self.lengths, self.pages, self.rings)
        plan_rows(
            *tables,
            self.rows,
            compress_ratio=shape.ratio,
            page_size=shape.page_size,
            ring_capacity=shape.ring_capacity,
            out=self.planned,
            backend="triton",
        )
        live = dataclasses.replace(
            plan,
            query_start=self.starts,
            seq_lens=self.lengths,
            page_table=self.pages,
            ring_table=self.rings,
            **self.planned._asdict(),
        )
        assert isinstance(live, BatchPlan)
        problem = dataclasses.replace(
            self.like, qkv=self.qkv, index_qk=self.index_qk, positions=self.positions, plan=live
        )
        problem.run(self.caches, backend="triton", k_scale=self.scale, v_scale=0.5, out=self.out)


def test_repeats_and_batches_give_the_same_bits() -> None:
    options = {"dtype": torch.bfloat16, "rope": MROPE, "device": "cuda"}
    problem = make_step([4000, 700], [3000, 1], REAL, **options)
    runs = []
    for _ in range(5):
        caches = problem.clone_caches()
        runs.append((*problem.run(caches, backend="triton"), *caches))
    for run in runs[1:]:
        assert all(torch.equal(bits(one), bits(two)) for one, two in zip(runs[0], run))
    # the decode row on its own
    alone = make_step([700], [1], REAL, **options)
    alone = dataclasses.replace(
        alone,
        qkv=problem.qkv[3000:],
        index_qk=problem.index_qk[3000:],
        positions=problem.positions[3000:],
        norms=problem.norms,
    )
    out = alone.run(alone.clone_caches(), backend="triton")
    for one, two in zip(out, runs[0]):
        assert torch.equal(bits(one[0]), bits(two[3000]))


@pytest.mark.bug("O-33", "O-40")
@pytest.mark.parametrize("page", [65_535, 65_536, 70_000])
def test_pages_past_two_to_the_thirty_first(page: int) -> None:
    options = {"dtype": torch.bfloat16, "rope": MROPE, "device": "cuda"}
    problem = make_step([4], [4], REAL, **options)
    want = problem.clone_caches()
    problem.run(want, backend="triton")
    main = torch.zeros(page + 1, 2, 64, 512, dtype=torch.bfloat16, device="cuda")
    keys = torch.zeros(1_048_577, 16, 1, 128, dtype=torch.bfloat16, device="cuda")
    far = 1_048_576 if page == 70_000 else 1_048_575
    slots = {
        "main_slots": page * 64 + torch.arange(4, device="cuda"),
        "compressed_slots": torch.tensor([-1, -1, -1, far * 16 + 5], device="cuda"),
    }
    plan = dataclasses.replace(problem.plan, **slots)
    caches = problem.clone_caches()._replace(main=main, compressed=keys)
    dataclasses.replace(problem, plan=plan).run(caches, backend="triton")
    home = int(problem.plan.main_slots[0]) // 64
    key_home = int(problem.plan.compressed_slots[3])
    assert torch.equal(main[page, :, :4], want.main[home, :, :4])
    assert torch.equal(keys[far, 5], want.compressed[key_home // 16, key_home % 16])
    # where a wrapped offset would have landed
    assert main[: page // 2].count_nonzero() == 0 and keys[:1024].count_nonzero() == 0
    store_rows(keys, torch.tensor([far * 16 + 6], device="cuda"), keys[far, 5], backend="triton")
    assert torch.equal(keys[far, 6], keys[far, 5])


@pytest.mark.bug("O-46")
@pytest.mark.parametrize("count", [262_140, 262_144, 1_048_576])
def test_native_context_in_one_call(count: int) -> None:
    shape = Shape(heads=1, kv_heads=1, head_dim=16, index_heads=1, index_dim=16, page_size=64)
    rope = RopeConfig(theta=1e7, rotary_dim=8, max_positions=count)
    problem = make_step([count], [count], shape, dtype=torch.bfloat16, rope=rope, device="cuda")
    caches = problem.clone_caches()
    problem.run(caches, backend="triton")
    keys = problem.index_qk[:, -16:]
    ring, table = problem.caches.ring, problem.plan.ring_table
    pooled, first = compress_keys(
        keys, problem.positions, ring, table, problem.plan, backend="triton"
    )
    for block in (0, count // 8, count // 4 - 1):
        row = 4 * block + 3
        group = keys[4 * block : 4 * block + 4].float()
        total = ((group[0] + group[1]) + group[2]) + group[3]
        assert torch.equal(pooled[row], (total / 4).bfloat16())
        assert first[row, 0].tolist() == [4 * block] * 3
        slot = int(problem.plan.compressed_slots[row])
        here = make_step([4], [4], shape, dtype=torch.bfloat16, rope=rope, device="cuda")
        here = dataclasses.replace(
            here,
            qkv=problem.qkv[row - 3 : row + 1],
            index_qk=problem.index_qk[row - 3 : row + 1],
            positions=problem.positions[row - 3 : row + 1],
            norms=problem.norms,
        )
        small = here.clone_caches()
        here.run(small, backend="triton")
        at = int(here.plan.compressed_slots[3])
        assert torch.equal(
            caches.compressed[slot // 16, slot % 16], small.compressed[at // 16, at % 16]
        )


@pytest.mark.parity("P21", "P45", "P47")
def test_movers_equal_their_references() -> None:
    problem = make_step(*MIXED, REAL, dtype=torch.bfloat16, ring_positions=True, device="cuda")
    keys = problem.index_qk[:, -128:]
    plan = problem.plan
    for backend in ("triton", "reference"):
        got = compress_keys(
            keys, problem.positions, problem.caches.ring, plan.ring_table, plan, backend=backend
        )
        if backend == "triton":
            ours = got
    assert torch.equal(ours[0], got[0]) and torch.equal(ours[1], got[1])

    for top_k, ratio in ((512, 4), (37, 3), (4096, 4)):
        generator = torch.Generator().manual_seed(top_k)
        at = torch.randint(-1, 30_000, (9,), generator=generator).cuda()
        visible = torch.div(at + 1, ratio, rounding_mode="floor").int()
        ids = torch.randint(-1, 9_000, (9, top_k), generator=generator).int().cuda()
        one, two = (
            expand_blocks(ids, at, visible, ratio, backend=b) for b in ("triton", "reference")
        )
        assert torch.equal(one, two)

    starts = torch.arange(1025).int().cuda() * 3
    lengths = torch.randint(1, 4000, (1024,)).int().cuda()
    table = torch.randint(-1, 9_000, (1024, 63)).int().cuda()
    rings = torch.randint(-1, 2000, (1024, 1)).int().cuda()
    sizes = {"compress_ratio": 4, "page_size": 64, "ring_capacity": 8}
    one, two = (
        plan_rows(starts, lengths, table, rings, 3100, **sizes, backend=b)
        for b in ("triton", "reference")
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.bug("O-42", "O-43")
@pytest.mark.parametrize("typed", [False, True])
def test_every_e4m3_code(typed: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(16, 16)
    rows = codes.view(torch.float8_e4m3fn) if typed else codes
    wide = torch.zeros(16, 1, 1, 16, device="cuda")
    slots = torch.arange(16, device="cuda")
    store_rows(wide, slots, rows, backend="triton")
    want = from_storage(codes.cpu())
    assert torch.equal(wide.view(16, 16).cpu().nan_to_num(99), want.nan_to_num(99))
    back = torch.zeros(16, 1, 1, 16, dtype=torch.uint8, device="cuda")
    store_rows(back, slots, wide.view(16, 16), backend="triton")
    assert torch.equal(back.view(16, 16).cpu(), to_storage(wide.view(16, 16).cpu(), torch.uint8))
