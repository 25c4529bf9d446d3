"""select_blocks' kernels on a CUDA device.

Claims:
    where scores are exact in FP32 (small integers, ties everywhere) every schedule of both
    selectors gives the specification's answer, at any length, K, page size, head count and dtype;
    elsewhere every chosen block reaches the float64 cut within the rounding of FP32 accumulation,
    FP8 included;
    the answer is bitwise the same in every run, batch composition, chunking, page placement and
    schedule, and on a workspace full of garbage;
    a captured graph serves other lengths.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa import ops
from flash_qsa.ops.select_blocks import kernel
from flash_qsa.ops.select_blocks.selector import obstacle, select_cuda
from flash_qsa.ops.select_blocks.tiles import Phase
from flash_qsa.targets import device_target
from flash_qsa.testing.compare import assert_selection, true_scores

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
DECODE, SPEC, PREFILL = (1, 1), (2, 4), (1, 150)


@pytest.fixture
def each_selector(monkeypatch):
    """Orders one selector after the other, that of CUDA C++ where it can run."""

    def each():
        names = ["triton"]
        if obstacle(device_target(torch.device("cuda"))) is None:
            names.append("cuda")
        for name in names:
            monkeypatch.setenv("FLASH_QSA_SELECTOR", name)
            yield name

    return each


class Step:
    """`batch` requests of `blocks` blocks, `rows` rows each at their end; permuted pages."""

    def __init__(
        self, batch, rows, blocks, dtype=torch.bfloat16, whole=False, page=16, heads=4, dim=128
    ):
        pages = -(-blocks // page)
        order = torch.randperm(batch * pages + 1)
        self.table = order[1:].view(batch, pages).int().cuda()

        def drawn(*shape):
            made = torch.randint(-1, 2, shape).float() if whole else torch.randn(shape)
            return made.cuda().to(dtype)

        self.query = drawn(batch * rows, heads, dim)
        self.cache = drawn(batch * pages + 1, page, 1, dim)
        self.requests = torch.arange(batch).repeat_interleave(rows).int().cuda()
        ends = blocks * 4 - rows + torch.arange(rows) + 1
        self.visible = (ends // 4).int().repeat(batch).cuda()

    def arguments(self, rows=slice(None)):
        return (
            self.query[rows],
            self.cache,
            self.table,
            self.requests[rows],
            self.visible[rows],
        )

    def select(self, top_k=512, rows=slice(None), backend="triton", **options):
        arguments = self.arguments(rows)
        out = torch.full((arguments[0].shape[0], top_k), 0x7FFFFFFF, dtype=torch.int32).cuda()
        return ops.select_blocks(*arguments, top_k, out=out, backend=backend, **options)

    def launch(self, tuning, top_k=512):
        out = torch.full((self.query.shape[0], top_k), 0x7FFFFFFF, dtype=torch.int32).cuda()
        kernel.launch(*self.arguments(), None, None, 256 << 20, out, tuning=tuning)
        return out

    def assert_within_rounding(self, got, rows):
        for row in rows:
            one, count = slice(row, row + 1), int(self.visible[row])
            request = self.table[int(self.requests[row])]
            scores, rounding = true_scores(self.query[one], self.cache, request, max(count, 1))
            assert_selection(got[one], scores, rounding, self.visible[one])


@pytest.mark.parametrize("shape", (DECODE, SPEC, PREFILL), ids=("decode", "verify", "prefill"))
@pytest.mark.parametrize("blocks", (511, 513, 2047, 8191, 32768, 65521, 262144))
@pytest.mark.bug("O-01", "O-02", "O-03", "O-08")
def test_exact_scores_give_the_specified_blocks(each_selector, shape, blocks):
    step = Step(*shape, blocks, whole=True)
    want = step.select(backend="reference")
    for selector in each_selector():
        assert torch.equal(step.select(), want), selector


@pytest.mark.parametrize("top_k", (1, 64, 1000, 2048, 4096))
@pytest.mark.bug("O-51")
def test_any_k(each_selector, top_k):
    for shape in (SPEC, PREFILL):
        step = Step(*shape, 20_001, whole=True)
        want = step.select(top_k, backend="reference")
        for selector in each_selector():
            assert torch.equal(step.select(top_k), want), selector


@pytest.mark.parametrize(
    "page, heads, dim", ((1, 4, 128), (49, 2, 128), (196, 4, 64), (400, 16, 128), (16, 3, 96))
)
@pytest.mark.parity("P02")
def test_any_page_and_head_geometry(page, heads, dim):
    for shape in (SPEC, PREFILL):
        step = Step(*shape, 5003, whole=True, page=page, heads=heads, dim=dim)
        assert torch.equal(step.select(), step.select(backend="reference"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", (3000, 20_000))
@pytest.mark.parity("P05")
def test_real_scores_stay_within_fp32_rounding(dtype, blocks):
    for shape in (DECODE, SPEC, PREFILL):
        step = Step(*shape, blocks, dtype)
        step.assert_within_rounding(step.select(), range(0, step.query.shape[0], 7))


@pytest.mark.bug("O-52", "O-54")
@pytest.mark.parametrize("context", (8192, 32768, 131072))
def test_a_whole_prefill_chunk_on_a_workspace_of_garbage(monkeypatch, context):
    step = Step(1, 8192, context // 4)
    answers = []
    for garbage, size in ((0x41, 512), (0xFF, 512), (0x7F, 96)):
        buffer = torch.full((size << 20,), garbage, dtype=torch.uint8, device="cuda")
        answers.append(step.select(workspace=buffer))
    monkeypatch.setenv("FLASH_QSA_SELECTOR", "triton")
    answers.append(step.select(workspace=buffer))
    assert all(torch.equal(answers[0], other) for other in answers[1:])
    step.assert_within_rounding(answers[0], range(0, 8192, 407))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.bug("O-03")
def test_bits_do_not_depend_on_the_schedule_the_batch_or_the_pages(dtype):
    step = Step(2, 96, 20_000, dtype)
    whole = step.select()
    for _ in range(3):
        assert torch.equal(step.select(), whole)
    for phase in (Phase(0, 192, True, 1), Phase(0, 192, True, 4), Phase(0, 192, False, 96)):
        for dense in (True, None):
            tuning = {"phases": [phase]} | ({} if dense else {"dense": None})
            assert torch.equal(step.launch(tuning), whole), (phase, dense)
    for rows in (slice(5, 6), slice(90, 140), slice(0, 192, 3)):
        assert torch.equal(step.select(rows=rows), whole[rows])
    order = torch.randperm(step.cache.shape[0], device="cuda")
    moved = torch.empty_like(step.cache)
    moved.view(torch.uint8)[order] = step.cache.view(torch.uint8)
    step.table, step.cache = order[step.table.long()].int(), moved
    assert torch.equal(step.select(), whole)


@pytest.mark.bug("O-01", "O-04", "O-05")
def test_hostile_scores_and_rows(each_selector):
    step = Step(2, 40, 9000, whole=True)
    step.cache[::3] = float("nan")
    step.cache[5, 3, 0, 0] = float("inf")
    step.table[0, 3] = -1
    step.table[1, 100:] = 1 << 30
    step.visible.copy_(torch.randint(-2, 9500, (80,)))
    step.requests[::5] = -1
    step.requests[3] = 2
    step.requests[60:] = 0
    first = torch.randint(-2, 9000, (80,)).int().cuda()
    for options in ({}, {"first_block": first}, {"workspace": 8 << 20}):
        want = step.select(backend="reference", **options)
        for selector in each_selector():
            assert torch.equal(step.select(**options), want), selector
            out = torch.empty(80, 512, dtype=torch.int32, device="cuda")
            tuning = {"phases": [Phase(0, 80, True, 3)]}
            arguments = (*step.arguments(), options.get("first_block"), None, 256 << 20, out)
            kernel.launch(*arguments, tuning=tuning)
            assert torch.equal(out, want), selector


@pytest.mark.bug("O-01", "O-02")
def test_scores_that_differ_in_their_last_bits(each_selector):
    step = Step(1, 70, 30_000, torch.float32, heads=1)
    step.query.zero_()[:, 0, 0] = 1.0
    steps = torch.randperm(step.cache.shape[0] * 16).double()
    step.cache.zero_()[:, :, 0, 0] = (1 + steps * 2.0**-20).float().view(-1, 16).cuda()
    want = step.select(backend="reference")
    for selector in each_selector():
        assert torch.equal(step.select(), want), selector
        assert torch.equal(step.launch({"phases": [Phase(0, 70, True, 1)]}), want), selector


@pytest.mark.bug("O-33")
def test_pages_beyond_two_billion_elements():
    pages = (1 << 31) // (16 * 128) + 3
    step = Step(1, 2, 4096, whole=True)
    cache = torch.empty(pages, 16, 1, 128, dtype=torch.bfloat16, device="cuda")
    want = step.select()
    order = pages - 1 - torch.arange(step.cache.shape[0], device="cuda")
    cache[order] = step.cache
    step.table, step.cache = order[step.table.long()].int(), cache
    assert torch.equal(step.select(), want)
    assert torch.equal(step.launch({"phases": [Phase(0, 2, False, 2)]}), want)


@pytest.mark.bug("O-21")
def test_a_captured_graph_serves_other_lengths(each_selector):
    step = Step(4, 1, 40_000, whole=True)
    for selector in each_selector():
        out = step.select()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.select_blocks(*step.arguments(), 512, out=out, backend="triton")
        for lengths in ([40_000, 3, 512, 513], [0, 2048, 9000, 39_999], [-1, 700, 1, 20_000]):
            step.visible.copy_(torch.tensor(lengths))
            graph.replay()
            assert torch.equal(out, step.select(backend="reference")), selector


@pytest.mark.bug("O-21")
def test_a_kernel_that_is_first_launched_inside_a_capture(monkeypatch):
    step = Step(1, 1, 9000, whole=True)
    out = step.select(67)
    monkeypatch.setattr(select_cuda, "_loaded", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.select_blocks(*step.arguments(), 67, out=out, backend="triton")
    out.zero_()
    graph.replay()
    assert torch.equal(out, step.select(67, backend="reference"))
