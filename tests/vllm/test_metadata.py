"""vLLM's step metadata, mapped to a BatchPlan.

Claims: requests, positions, visible blocks and slots follow from the query starts and lengths on
the device; padded rows hold -1 (visible 0) and null blocks are nowhere; a captured graph's tensors
keep their addresses from step to step; vLLM's own metadata maps to the same plan; groups that
disagree are refused; nothing is read back to the host.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from flash_qsa.integrations.vllm.metadata import (
    BatchSplit,
    MainMetadata,
    SideBuffers,
    SideMetadata,
    batch_plan,
    mask_null_block,
    step_plan,
)

NO, C, S, CAPACITY = -1, 4, 16, 8


def common(starts, seq_lens, table, slots, rows=None):
    """A CommonAttentionMetadata: only what builders read."""
    start = torch.tensor(starts, dtype=torch.int32)
    lengths = torch.diff(start)
    return SimpleNamespace(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(seq_lens),
        num_actual_tokens=len(slots) if rows is None else rows,
        max_query_len=int(lengths.max()),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.tensor(table, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
    )


def mixed_step(buffers=None):
    """Two decodes, a three-row chunk ending at token 17, one padded request and two padded rows."""
    slots = [3 * S + 7, 5 * S + 3, 9 * S + 15, 2 * S, 2 * S + 1, NO, NO]
    main = common([0, 1, 2, 5, 5], [8, 20, 18, 0], [[3, 0], [1, 5], [9, 2], [0, 0]], slots)
    rings = common([0, 1, 2, 5, 5], [8, 20, 18, 0], [[4], [2], [7], [0]], slots)
    split = BatchSplit.of((2, 2, 2, 5), main.query_start_loc_cpu)
    buffers = buffers or (SideBuffers(16, 8, "cpu"), SideBuffers(16, 8, "cpu"))
    ring = buffers[0].ring_step(rings, split, CAPACITY)
    compressed = buffers[1].compressed_step(main, split, C, S // C)
    metadata = MainMetadata(7, 3, main.block_table_tensor, main.slot_mapping)
    return metadata, ring, compressed


@pytest.mark.parity("P10", "P20", "P40")
def test_rows_follow_from_starts_and_lengths():
    plan = batch_plan(*mixed_step(), CAPACITY)
    assert plan.request_ids.tolist() == [0, 1, 2, 2, 2, NO, NO]
    assert plan.positions.tolist() == [7, 19, 15, 16, 17, NO, NO]
    assert plan.visible_blocks.tolist() == [2, 5, 4, 4, 4, 0, 0]
    assert plan.main_slots.tolist() == [3 * S + 7, 5 * S + 3, 9 * S + 15, 2 * S, 2 * S + 1, NO, NO]
    # rows that close a group: token 7 in block 3, token 19 in block 5, token 15 in block 9
    assert plan.compressed_slots.tolist() == [3 * 4 + 1, 5 * 4, 9 * 4 + 3, NO, NO, NO, NO]
    assert plan.ring_slots.tolist() == [4 * 8 + 7, 2 * 8 + 3, 7 * 8 + 7, 7 * 8, 7 * 8 + 1, NO, NO]
    assert plan.ring_table.tolist() == [[4], [2], [7], [NO]]
    assert plan.page_table.tolist() == [[3, 0], [1, 5], [9, 2], [0, 0]]
    assert (plan.num_rows, plan.num_decodes, plan.num_decode_tokens) == (7, 2, 2)
    assert (plan.decode_query_len, plan.max_query_len, plan.max_seq_len) == (1, 3, 20)
    assert (plan.page_size, plan.compress_ratio, plan.ring_capacity) == (S, C, CAPACITY)


@pytest.mark.parity("P10")
def test_a_row_without_a_main_slot_closes_no_group():
    main = common([0, 4], [4], [[3]], [3 * S, 3 * S + 1, 3 * S + 2, NO])
    side = SideBuffers(8, 2, "cpu").compressed_step(
        main, BatchSplit.of((0, 1, 0, 4), main.query_start_loc_cpu), C, S // C
    )
    assert side.slot_mapping.tolist() == [NO] * 4


def test_only_the_last_rows_of_a_long_chunk_reach_the_ring():
    rings = common([0, 11], [11], [[6]], list(range(11)))
    side = SideBuffers(16, 2, "cpu").ring_step(
        rings, BatchSplit.of((0, 1, 0, 11), rings.query_start_loc_cpu), CAPACITY
    )
    assert side.slot_mapping.tolist() == [NO] * 3 + [6 * 8 + p % 8 for p in range(3, 11)]


@pytest.mark.bug("O-37")
@pytest.mark.parametrize("capacity", [8, 16])
@pytest.mark.parametrize("position", [0, 3, 4, 7, 8, 262_143, 500_001, 1_048_575])
def test_a_ring_is_addressed_by_position_modulo_its_rows(position, capacity):
    rings = common([0, 1], [position + 1], [[6]], [0])
    split = BatchSplit.of((1, 0, 1, 0), rings.query_start_loc_cpu)
    side = SideBuffers(2, 2, "cpu").ring_step(rings, split, capacity)
    assert side.slot_mapping.tolist() == [6 * capacity + position % capacity]
    assert side.logical_positions.tolist() == [position]
    # a table that is one page wide has no page for later tokens, rather than a neighbour's
    pages = SideBuffers(2, 2, "cpu").compressed_step(rings, split, C, S // C)
    closes = position < S and position % C == C - 1
    assert pages.slot_mapping.tolist() == [6 * (S // C) + position // C if closes else NO]


@pytest.mark.parity("P40")
def test_requests_on_the_null_block_write_nowhere():
    slots = [NO] * 3
    rings = common([0, 1, 2, 3], [1, 1, 1], [[0], [0], [0]], slots)
    buffers = SideBuffers(8, 4, "cpu")
    split = BatchSplit.of((3, 0, 3, 0), rings.query_start_loc_cpu)
    ring = buffers.ring_step(rings, split, CAPACITY)
    assert ring.slot_mapping.tolist() == [NO] * 3
    assert ring.block_table.tolist() == [[NO]] * 3
    table = torch.tensor([[3], [0], [-1]], dtype=torch.int32)
    assert mask_null_block(table).tolist() == [[3], [NO], [NO]]


@pytest.mark.parity("P38", "P40")
def test_the_next_step_reuses_the_same_memory():
    buffers = SideBuffers(16, 8, "cpu"), SideBuffers(16, 8, "cpu")
    first = batch_plan(*mixed_step(buffers), CAPACITY)
    addresses = [
        first.positions.data_ptr(),
        first.ring_slots.data_ptr(),
        first.ring_table.data_ptr(),
    ]
    for side in buffers:
        for buffer in side.rows:
            buffer.fill_(12345)
    again = batch_plan(*mixed_step(buffers), CAPACITY)
    assert addresses == [
        again.positions.data_ptr(), again.ring_slots.data_ptr(), again.ring_table.data_ptr(),
    ]  # fmt: skip
    assert again.positions.tolist() == [7, 19, 15, 16, 17, NO, NO]


def test_vllms_own_metadata_maps_to_the_same_plan():
    """vLLM gives padded rows request 0 and position -1, and rings their raw block table."""
    main, ring, compressed = mixed_step()
    stock = []
    for side, table in ((ring, [[4], [2], [7], [0]]), (compressed, None)):
        fields = {f.name: getattr(side, f.name) for f in dataclasses.fields(side)}
        fields["token_to_req"] = fields["token_to_req"].clamp(min=0)
        if table:
            fields["block_table"] = torch.tensor(table, dtype=torch.int32)
        stock.append(SimpleNamespace(**fields, k_work_metadata=None))
    ours = batch_plan(main, ring, compressed, CAPACITY)
    theirs = batch_plan(
        main,
        SideMetadata.from_stock(stock[0], is_ring=True),
        SideMetadata.from_stock(stock[1], is_ring=False),
        CAPACITY,
    )
    for field in dataclasses.fields(ours):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert equal, field.name


@pytest.mark.parity("P22")
@pytest.mark.parametrize(
    ("group", "changes", "said"),
    [
        ("main", {"num_actual_tokens": 6}, "token counts.*'main': 6"),
        ("ring", {"num_actual_tokens": 6}, "token counts.*'ring': 6"),
        ("ring", {"num_decodes": 1}, "batch splits.*num_decodes"),
        ("ring", {"num_prefill_tokens": 4}, "batch splits.*num_prefill_tokens"),
        ("compressed", {"decode_query_len": 2}, "batch splits.*decode_query_len"),
        ("ring", {"logical_positions": torch.zeros(7, dtype=torch.int64)}, "positions"),
    ],
)
def test_groups_that_disagree_are_refused(group, changes, said):
    step = dict(zip(("main", "ring", "compressed"), mixed_step()))
    step[group] = dataclasses.replace(step[group], **changes)
    with pytest.raises(RuntimeError, match=said):
        batch_plan(*step.values(), CAPACITY)


@pytest.mark.parity("P19")
def test_decode_rows_must_share_one_query_length():
    main, ring, compressed = mixed_step()
    sides = [
        dataclasses.replace(s, num_decode_tokens=3, num_prefill_tokens=4)
        for s in (ring, compressed)
    ]
    with pytest.raises(ValueError, match="2 decode requests of 1 rows do not make 3"):
        batch_plan(main, *sides, CAPACITY)


def test_a_step_has_one_plan_for_all_its_layers():
    step = mixed_step()
    assert step_plan(*step, CAPACITY) is step_plan(*step, CAPACITY)
    other = dataclasses.replace(step[0])
    assert step_plan(other, *step[1:], CAPACITY) is not step_plan(*step, CAPACITY)


@pytest.mark.parity("P19", "P40")
@pytest.mark.parametrize(
    ("counts", "starts", "expected"),
    [
        ((3, 0, 12, 0), [0, 4, 8, 12], 4),
        ((4, 0, 8, 0), [0, 2, 4, 6, 6], 2),
        ((0, 2, 0, 9), [0, 4, 9], 0),
        ((2, 0, 2, 0), [0, 0, 0], 0),
    ],
    ids=["drafts", "padded request", "prefills", "all padding"],
)
def test_the_split_reads_vllms_host_copy_alone(counts, starts, expected):
    split = BatchSplit.of(counts, torch.tensor(starts))
    assert split.decode_query_len == expected
    assert (split.num_decodes, split.num_prefills) == counts[:2]
    assert (split.num_decode_tokens, split.num_prefill_tokens) == counts[2:]


def test_mapping_reads_nothing_from_a_device():
    """On meta tensors a read raises, so this passes only where none happens."""
    start = torch.tensor([0, 4, 8])
    meta = SimpleNamespace(
        query_start_loc=start.int().to("meta"),
        query_start_loc_cpu=start,
        seq_lens=torch.empty(2, dtype=torch.int32, device="meta"),
        num_reqs=2,
        num_actual_tokens=8,
        max_query_len=4,
        max_seq_len=99,
        block_table_tensor=torch.empty(2, 3, dtype=torch.int32, device="meta"),
        slot_mapping=torch.empty(8, dtype=torch.int64, device="meta"),
    )
    split = BatchSplit.of((2, 0, 8, 0), start)
    ring = SideBuffers(8, 2, "meta").ring_step(meta, split, CAPACITY)
    compressed = SideBuffers(8, 2, "meta").compressed_step(meta, split, C, S // C)
    main = MainMetadata(8, 4, meta.block_table_tensor, meta.slot_mapping)
    plan = batch_plan(main, ring, compressed, CAPACITY)
    assert plan.positions.device.type == "meta" and plan.max_seq_len == 99
