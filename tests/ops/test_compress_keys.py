"""compress_keys.

Claims:
* the mean of a group's raw keys, added oldest first in FP32 and rounded once, in the row that
  closes the group; members come from the step or, before it, from the ring (hand-worked);
* the group's position is its first token's, on three axes, from the step or from the ring;
* rows that close nothing, padding, and groups with a member that is nowhere are left untouched;
* however a request is cut into steps, drafts accepted and rejected included, its groups are those
  of one pass, and unused memory never reaches them;
* groups follow token order, not position numbers: images whose tokens share a position too;
* everything that does not fit is refused by name.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qsa.checks import UnsupportedError
from flash_qsa.ops import compress_keys, store_rows
from flash_qsa.ops.compress_keys.reference import mean_in_order
from flash_qsa.ops.compress_keys.ring_rows import pack_rows, ring_width
from flash_qsa.testing.inputs import Shape, make_plan
from flash_qsa.testing.steps import make_step

NO_PAGES = torch.zeros(1, 1, dtype=torch.int32)
DIM = 6


def step_plan(seq_lens: list[int], query_lens: list[int], capacity: int = 8, **options):
    shape = Shape(ring_capacity=capacity)
    return make_plan(query_lens, seq_lens, NO_PAGES.expand(len(seq_lens), 1), shape, **options)


@pytest.mark.parity("P16", "P45")
@pytest.mark.bug("O-16")
def test_hand_worked() -> None:
    # five tokens came before: the step's rows are tokens 5 … 8, the ring holds 4
    keys = torch.tensor([[5.0], [6.0], [7.0], [8.0]])
    ring = torch.full((1, 8, 1, 1), torch.nan)
    ring[0, 4] = 4.0
    plan = step_plan([9], [4])
    pooled, first = compress_keys(keys, torch.tensor([50, 60, 70, 80]), ring, plan.ring_table, plan)
    assert pooled.tolist() == [[0.0], [0.0], [(4 + 5 + 6 + 7) / 4], [0.0]]
    # token 4 left no exact position: its logical one is it
    assert first[:, 0].tolist() == [[-1] * 3, [-1] * 3, [4] * 3, [-1] * 3]

    whole = step_plan([4], [4])
    pooled, first = compress_keys(
        keys, torch.tensor([50, 60, 70, 80]), ring, whole.ring_table, whole
    )
    assert pooled[3].item() == 6.5 and first[3, 0].tolist() == [50, 50, 50]


@pytest.mark.parity("P06", "P16")
def test_exact_positions_come_back_from_the_ring() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        width = ring_width(DIM, dtype, True)
        ring = torch.full((2, 8, 1, width), torch.nan, dtype=dtype)
        where = torch.tensor([[[1 << 40, 7, (1 << 62) + 12345]]])
        key = torch.arange(DIM, dtype=dtype)[None]
        ring[1, 4] = pack_rows(key, where, width)
        ring[1, 5] = ring[1, 6] = pack_rows(key, where * 0, width)
        plan = step_plan([8], [1])
        plan = dataclasses.replace(plan, ring_table=torch.ones(1, 1, dtype=torch.int32))
        pooled, first = compress_keys(key, torch.tensor([99]), ring, plan.ring_table, plan)
        assert torch.equal(pooled, key)
        assert torch.equal(first[0], where[0])


@pytest.mark.parity("P45")
def test_untouched_rows_stay_as_they_were() -> None:
    keys = torch.randn(6, DIM)
    ring = torch.full((1, 8, 1, DIM), torch.nan)
    # request 0 closes nothing; request 1 closes at its last row but has no ring slot
    plan = step_plan([3, 8], [3, 1], padding=2)
    plan = dataclasses.replace(plan, ring_table=torch.tensor([[0], [-1]], dtype=torch.int32))
    out, first = torch.full((6, DIM), 7.0), torch.full((6, 1, 3), 9)
    compress_keys(
        keys,
        torch.arange(6),
        ring,
        plan.ring_table,
        plan,
        out=out,
        first_positions_out=first,
    )
    assert (out == 7).all() and (first == 9).all()
    far = torch.tensor([[0], [5]], dtype=torch.int32)
    compress_keys(keys, torch.arange(6), ring, far, plan, out=out, first_positions_out=first)
    assert (out == 7).all() and (first == 9).all()


@pytest.mark.parity("P45")
def test_no_rows_give_empties() -> None:
    plan = step_plan([], [])
    ring, table = torch.zeros(0, 8, 1, DIM), torch.zeros(0, 0, dtype=torch.int32)
    pooled, first = compress_keys(torch.zeros(0, DIM), torch.arange(0), ring, table, plan)
    assert pooled.shape == (0, DIM) and first.shape == (0, 1, 3)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(0, 2**31))
def test_mean_is_the_rounded_sum_oldest_first(ratio: int, seed: int) -> None:
    keys = torch.randn(3, ratio, DIM, generator=torch.Generator().manual_seed(seed)) * 1e3
    want = torch.zeros(3, DIM)
    for member in range(ratio):
        want = (want + keys[:, member]).float()
    # FP64 holds the quotient of two FP32 numbers well enough to round it once
    assert torch.equal(mean_in_order(keys), (want.double() / ratio).float())


def run_in_steps(
    keys: torch.Tensor,
    positions: torch.Tensor,
    cuts: list[tuple[int, int]],
    capacity: int,
    ratio: int = 4,
    slot: int = 1,
    backend: str = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups [N, Di] and first positions [N, 3] of a request fed by `cuts`, rows (from, to) each.

    A cut may go back: later rows then replace drafts. The ring starts as NaN, its other slots too.
    """
    width = ring_width(keys.shape[1], keys.dtype, True)
    ring = torch.full((3, capacity, 1, width), torch.nan, dtype=keys.dtype)
    blocks = keys.shape[0] // ratio
    pooled = torch.full((blocks, keys.shape[1]), torch.nan, dtype=keys.dtype)
    first = torch.full((blocks, 3), -1)
    shape = Shape(ring_capacity=capacity, ratio=ratio, page_size=4 * ratio)
    table = torch.full((1, 1), slot, dtype=torch.int32)
    for start, end in cuts:
        plan = make_plan([end - start], [end], NO_PAGES, shape, ring_table=table)
        rows, where = keys[start:end], positions[start:end]
        got, at = compress_keys(
            rows, where, ring, table, plan, compress_ratio=ratio, backend=backend
        )
        closed = (at[:, 0, 0] >= 0).nonzero().flatten()
        pooled[(start + closed) // ratio] = got[closed]
        first[(start + closed) // ratio] = at[closed, 0]
        store_rows(ring, plan.ring_slots, pack_rows(rows, where, width), backend=backend)
    return pooled, first


def sequence(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(count, DIM, generator=generator)
    return keys, torch.randint(0, 1 << 40, (count, 1, 3), generator=generator)


@pytest.mark.parity("P45")
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_chunking_gives_the_groups_of_one_pass(data: st.DataObject) -> None:
    ratio = data.draw(st.sampled_from([2, 3, 4]))
    count = data.draw(st.integers(1, 40))
    capacity = ratio * data.draw(st.integers(1, 3))
    keys, positions = sequence(count)
    edges = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=8))})
    cuts = list(zip(edges, edges[1:]))
    got = run_in_steps(keys, positions, cuts, capacity, ratio)
    blocks = count // ratio
    groups = keys[: blocks * ratio].view(blocks, ratio, DIM)
    assert torch.equal(got[0], mean_in_order(groups))
    assert torch.equal(got[1], positions[: blocks * ratio : ratio, 0])


@pytest.mark.parity("P45")
@pytest.mark.bug("O-17")
@pytest.mark.parametrize("accepted", range(8))
def test_a_window_wider_than_a_group_does_not_alias(accepted: int) -> None:
    keys, positions = sequence(25)
    drafted = keys.clone()
    drafted[10 + accepted : 17] += 100  # what the rejected drafts had been
    capacity = 12  # 4 + 7 drafts, rounded up
    one, _ = run_in_steps(drafted, positions, [(0, 10), (10, 17)], capacity)
    assert torch.equal(one[2], mean_in_order(drafted[None, 8:12])[0])
    assert torch.equal(one[3], mean_in_order(drafted[None, 12:16])[0])
    # rows 10 … 16 are verified, then the request goes on from what was accepted
    state = _Replay(capacity)
    state.step(drafted, positions, 0, 10)
    state.step(drafted, positions, 10, 17)
    state.step(keys, positions, 10 + accepted, 18 + accepted)
    blocks = (18 + accepted) // 4
    for block in range(blocks):
        want = mean_in_order(keys[None, 4 * block : 4 * block + 4])[0]
        if 4 * block + 4 <= 10 + accepted:
            want = mean_in_order(drafted[None, 4 * block : 4 * block + 4])[0]
        assert torch.equal(state.pooled[block], want), block


class _Replay:
    """One request's ring and groups, step by step; NaN where nothing was written."""

    def __init__(self, capacity: int, blocks: int = 32) -> None:
        self.width = ring_width(DIM, torch.float32, True)
        self.ring = torch.full((1, capacity, 1, self.width), torch.nan)
        self.pooled = torch.full((blocks, DIM), torch.nan)
        self.shape = Shape(ring_capacity=capacity)

    def step(self, keys: torch.Tensor, positions: torch.Tensor, start: int, end: int) -> None:
        plan = make_plan([end - start], [end], NO_PAGES, self.shape)
        rows, where = keys[start:end], positions[start:end]
        got, at = compress_keys(rows, where, self.ring, plan.ring_table, plan)
        closed = (at[:, 0, 0] >= 0).nonzero().flatten()
        self.pooled[(start + closed) // 4] = got[closed]
        store_rows(self.ring, plan.ring_slots, pack_rows(rows, where, self.width))


@pytest.mark.parity("P45")
@pytest.mark.bug("O-18")
@pytest.mark.parametrize("length", range(8))
def test_eight_drafts_a_round_never_read_stale_rows(length: int) -> None:
    capacity = 12
    truth, positions = sequence(80, seed=length)
    state = _Replay(capacity)
    if length:
        state.step(truth, positions, 0, length)
    for round_, accepted in enumerate([1, 0, 8, 3, 0, 5, 2, 7]):
        # one real token and eight drafts, of which `accepted` are right
        drafted = truth.clone()
        drafted[length + 1 + accepted : length + 9] += 10.0 * (round_ + 1)
        state.step(drafted, positions, length, length + 9)
        length += 1 + accepted
        blocks = length // 4
        assert torch.equal(
            state.pooled[:blocks], mean_in_order(truth[: 4 * blocks].view(blocks, 4, DIM))
        )
        open_tokens = torch.arange(4 * blocks, length)
        live = state.ring[0, open_tokens % capacity, 0]
        assert torch.equal(
            live.view(torch.int32),
            pack_rows(truth[open_tokens], positions[open_tokens], state.width).view(torch.int32),
        )


@pytest.mark.parity("P16")
@pytest.mark.bug("O-47")
def test_groups_follow_tokens_not_position_numbers() -> None:
    text = torch.arange(6)[:, None].expand(6, 3)
    height, width = torch.meshgrid(torch.arange(15), torch.arange(20), indexing="ij")
    image = torch.stack((torch.full((300,), 6), 6 + height.flatten(), 6 + width.flatten()), -1)
    after = torch.arange(26, 36)[:, None].expand(10, 3)
    positions = torch.cat((text, image, after))[:, None]
    keys, _ = sequence(316)
    for cuts in ([(0, 316)], [(0, 7), (7, 150), (150, 316)]):
        pooled, first = run_in_steps(keys, positions, cuts, 8)
        assert torch.equal(pooled, mean_in_order(keys.view(79, 4, DIM)))
        assert torch.equal(first, positions[::4, 0])
    assert first[1].tolist() == [4, 4, 4]  # tokens 4, 5 of text, then two of the image


@pytest.mark.bug("O-46")
@pytest.mark.parametrize("count", [262_140, 262_144, 1_048_576])
def test_native_context_in_one_call(count: int) -> None:
    keys = (torch.arange(count) % 1021).float()[:, None]
    ring = torch.full((1, 8, 1, 1), torch.nan)
    plan = step_plan([count], [count])
    pooled, first = compress_keys(keys, torch.arange(count), ring, plan.ring_table, plan)
    for block in (0, count // 8, count // 4 - 1):
        group = keys[4 * block : 4 * block + 4]
        assert pooled[4 * block + 3].item() == group.mean().item()
        assert first[4 * block + 3, 0].tolist() == [4 * block] * 3


@pytest.mark.parity("P45")
def test_unused_ring_memory_never_reaches_a_group() -> None:
    problem = make_step([9, 7, 30, 4, 12], [1, 2, 17, 4, 12], ring_positions=True, padding=2)
    keys = problem.index_qk[:, -problem.shape.index_dim :]
    ring = problem.caches.ring
    pooled, first = compress_keys(
        keys, problem.positions, ring, problem.plan.ring_table, problem.plan
    )
    real = first[:, 0, 0] >= 0
    assert int(real.sum()) == 8
    assert pooled[real].isfinite().all()
    for row in real.nonzero().flatten().tolist():
        request, position = int(problem.plan.request_ids[row]), int(problem.plan.positions[row])
        raw, where = problem.history[request]
        group = raw[position - 3 : position + 1]
        assert torch.equal(pooled[row], mean_in_order(group[None])[0])
        assert torch.equal(first[row], where[position - 3])


@pytest.mark.parity("P45")
def test_refusals() -> None:
    keys, ring = torch.zeros(5, DIM), torch.zeros(2, 8, 1, DIM)
    plan = step_plan([3, 8], [3, 2])
    table, at = plan.ring_table, torch.arange(5)
    cases = [
        ((keys[0], at, ring, table), {}, ValueError, "raw_keys: expected shape"),
        ((keys, at, ring[:, :, 0], table), {}, ValueError, "ring: expected shape"),
        ((keys, at, ring, table[0]), {}, ValueError, "ring_table: expected shape"),
        ((keys.double(), at, ring, table), {}, UnsupportedError, "raw_keys: dtype float64"),
        ((keys, at, ring.half(), table), {}, UnsupportedError, "ring: dtype float16"),
        ((keys, at, ring, table.long()), {}, UnsupportedError, "ring_table: dtype int64"),
        ((keys, at, torch.zeros(2, 8, 1, DIM + 1), table), {}, ValueError, "ring: rows of 7"),
        ((keys, at, ring[:0], table), {}, ValueError, "ring_table/ring: empty"),
        ((keys, at, ring, table[:, :0]), {}, ValueError, "ring_table/ring: empty"),
        ((keys, at, ring, table[:1]), {}, ValueError, "ring_table: 1 rows for 2 requests"),
        ((keys, at, ring[:, :3], table), {}, ValueError, "ring: capacity 3 cannot hold"),
        ((keys, at[:4], ring, table), {}, ValueError, "positions: expected 5 rows, got 4"),
        ((keys[:4], at[:4], ring, table), {}, ValueError, "plan: built for 5 rows"),
        ((keys, at, ring, table), {"compress_ratio": 0}, ValueError, "compress_ratio: expected"),
    ]
    for arguments, options, error, message in cases:
        with pytest.raises(error, match=message):
            compress_keys(*arguments, plan, **options)
    short = dataclasses.replace(plan, query_start=plan.query_start[:2])
    with pytest.raises(ValueError, match="plan.query_start: expected 3 entries"):
        compress_keys(keys, at, ring, table, short)
