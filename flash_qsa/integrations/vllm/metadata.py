"""vLLM's step metadata, mapped to `BatchPlan` without reading anything back from the device.

vLLM describes a step once per group of caches: the main keys and values, the compressed keys
(same pages as the main ones) and the raw-key rings (one block per request). Block 0 is vLLM's null
block: requests that only pad a captured graph point at it, and nothing may be written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flash_qsa import ops
from flash_qsa.ops.batch_plan.api import PlanRows
from flash_qsa.plan import BatchPlan


@dataclass
class MainMetadata:
    """One step of the main cache.

    Attributes:
        num_actual_tokens: rows to process; under a captured graph it counts padded rows too.
        max_query_len: longest query of the step.
        block_table: int32 [R, n], physical block of each logical block.
        slot_mapping: int64 [T], block · size + offset of each row's key and value, -1 to skip.
    """

    num_actual_tokens: int
    max_query_len: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass
class SideMetadata:
    """One step of the compressed keys or of the rings, in the names of vLLM's own metadata.

    Padded rows hold request -1, position -1, visible 0 and slot -1.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    token_to_req: torch.Tensor
    logical_positions: torch.Tensor
    visible_blocks: torch.Tensor
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    max_query_len: int
    decode_query_len: int
    max_seq_len: int
    storage_block_size: int
    compress_ratio: int

    @classmethod
    def from_stock(cls, stock: Any, is_ring: bool) -> SideMetadata:
        """Reads vLLM's `QSAForwardMetadata`, whose padded rows name request 0."""
        values = {name: getattr(stock, name) for name in cls.__dataclass_fields__}
        padding = values["logical_positions"] < 0
        values["token_to_req"] = values["token_to_req"].masked_fill(padding, -1)
        if is_ring:
            values["block_table"] = mask_null_block(values["block_table"][:, :1])
        return cls(**values)


def mask_null_block(table: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """A ring table whose null blocks (and missing ones) are -1."""
    out = torch.empty_like(table) if out is None else out
    return out.copy_(table).masked_fill_(table <= 0, -1)


@dataclass(frozen=True)
class BatchSplit:
    """Host integers of a step: decode requests lead and share one query length."""

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    decode_query_len: int

    @classmethod
    def of(cls, counts: tuple[int, int, int, int], query_start_cpu: torch.Tensor) -> BatchSplit:
        """From vLLM's (decodes, prefills, decode tokens, prefill tokens) and its host copy of the
        query starts."""
        decodes, prefills, decode_tokens, prefill_tokens = counts
        lengths = torch.diff(query_start_cpu[: decodes + 1])
        lengths = lengths[lengths > 0]
        query_len = int(lengths[0]) if lengths.numel() else 0
        return cls(decodes, decode_tokens, prefills, prefill_tokens, query_len)


class SideBuffers:
    """Row tensors of one cache group, at addresses that captured graphs keep."""

    def __init__(self, max_tokens: int, max_requests: int, device: torch.device | str) -> None:
        self.rows = PlanRows.empty(max_tokens, device)
        self.ring_table = torch.full((max_requests, 1), -1, dtype=torch.int32, device=device)

    def ring_step(
        self,
        common: Any,
        split: BatchSplit,
        capacity: int,
        backend: str = "auto",
    ) -> SideMetadata:
        """Metadata of the rings from vLLM's `CommonAttentionMetadata`."""
        requests = common.query_start_loc.shape[0] - 1
        table = mask_null_block(
            common.block_table_tensor[:requests, :1], self.ring_table[:requests]
        )
        rows = self._fill(common, table, table, 1, capacity, capacity, backend)
        return _side(common, split, table, rows, rows.ring_slots, capacity, 1)

    def compressed_step(
        self,
        common: Any,
        split: BatchSplit,
        compress_ratio: int,
        rows_per_page: int,
        backend: str = "auto",
    ) -> SideMetadata:
        """Metadata of the compressed keys; a row that vLLM skips in the main cache closes none."""
        requests = common.query_start_loc.shape[0] - 1
        table = common.block_table_tensor[:requests]
        page_size = rows_per_page * compress_ratio
        rows = self._fill(
            common, table, table[:, :1], compress_ratio, page_size, compress_ratio, backend
        )
        skipped = common.slot_mapping[: rows.request_ids.shape[0]] < 0
        rows.compressed_slots.masked_fill_(skipped, -1)
        return _side(
            common, split, table, rows, rows.compressed_slots, rows_per_page, compress_ratio
        )

    def _fill(
        self,
        common: Any,
        page_table: torch.Tensor,
        ring_table: torch.Tensor,
        ratio: int,
        page_size: int,
        ring_capacity: int,
        backend: str,
    ) -> PlanRows:
        count, requests = common.num_actual_tokens, common.query_start_loc.shape[0] - 1
        return ops.plan_rows(
            common.query_start_loc,
            common.seq_lens[:requests],
            page_table,
            ring_table,
            count,
            compress_ratio=ratio,
            page_size=page_size,
            ring_capacity=ring_capacity,
            out=PlanRows(*(buffer[:count] for buffer in self.rows)),
            backend=backend,
        )


def _side(
    common: Any,
    split: BatchSplit,
    table: torch.Tensor,
    rows: PlanRows,
    slots: torch.Tensor,
    rows_per_page: int,
    ratio: int,
) -> SideMetadata:
    return SideMetadata(
        block_table=table,
        slot_mapping=slots,
        seq_lens=common.seq_lens[: table.shape[0]],
        query_start_loc=common.query_start_loc,
        token_to_req=rows.request_ids,
        logical_positions=rows.positions,
        visible_blocks=rows.visible_blocks,
        num_actual_tokens=common.num_actual_tokens,
        num_decodes=split.num_decodes,
        num_decode_tokens=split.num_decode_tokens,
        num_prefills=split.num_prefills,
        num_prefill_tokens=split.num_prefill_tokens,
        max_query_len=common.max_query_len,
        decode_query_len=split.decode_query_len,
        max_seq_len=common.max_seq_len,
        storage_block_size=rows_per_page,
        compress_ratio=ratio,
    )


_SPLIT_FIELDS = (
    "num_decodes",
    "num_decode_tokens",
    "num_prefills",
    "num_prefill_tokens",
    "decode_query_len",
)


def require_agreement(main: Any, ring: SideMetadata, compressed: SideMetadata) -> None:
    """Requires the three groups to describe the same step.

    Raises:
        RuntimeError: token counts, batch splits or (on the CPU) positions that disagree.
        ValueError: decode rows that are not one query length a request.
    """
    counts = {
        "main": main.num_actual_tokens,
        "ring": ring.num_actual_tokens,
        "compressed": compressed.num_actual_tokens,
    }
    if len(set(counts.values())) != 1:
        raise RuntimeError(f"metadata: token counts disagree, {counts}")
    for name in _SPLIT_FIELDS:
        ours, theirs = getattr(ring, name), getattr(compressed, name)
        if ours != theirs:
            raise RuntimeError(
                f"metadata: batch splits disagree in {name}, ring {ours}, compressed {theirs}"
            )
    positions = ring.logical_positions
    if positions.device.type == "cpu" and not torch.equal(positions, compressed.logical_positions):
        raise RuntimeError("metadata: logical positions of ring and compressed keys disagree")
    rows = compressed.num_decodes * compressed.decode_query_len
    if rows != compressed.num_decode_tokens:
        raise ValueError(
            f"metadata: {compressed.num_decodes} decode requests of {compressed.decode_query_len} "
            f"rows do not make {compressed.num_decode_tokens} decode rows"
        )


def batch_plan(
    main: Any, ring: SideMetadata, compressed: SideMetadata, ring_capacity: int
) -> BatchPlan:
    """The step in the words of the ops; all tensors are the metadata's own.

    Host integers may count padded rows and may be upper bounds; they choose schedules. A captured
    graph keeps those of its capture, so there max_seq_len bounds every later replay: builders
    give the model's maximum.

    Raises:
        RuntimeError, ValueError: see `require_agreement`.
    """
    require_agreement(main, ring, compressed)
    rows, ratio = compressed.num_actual_tokens, compressed.compress_ratio
    return BatchPlan(
        num_tokens=rows,
        num_requests=compressed.seq_lens.shape[0],
        num_decodes=compressed.num_decodes,
        num_decode_tokens=compressed.num_decode_tokens,
        decode_query_len=compressed.decode_query_len,
        max_query_len=compressed.max_query_len,
        max_seq_len=compressed.max_seq_len,
        compress_ratio=ratio,
        page_size=compressed.storage_block_size * ratio,
        ring_capacity=ring_capacity,
        query_start=compressed.query_start_loc,
        seq_lens=compressed.seq_lens,
        page_table=main.block_table[: compressed.seq_lens.shape[0]],
        ring_table=ring.block_table,
        request_ids=compressed.token_to_req,
        positions=compressed.logical_positions,
        visible_blocks=compressed.visible_blocks,
        main_slots=main.slot_mapping[:rows],
        compressed_slots=compressed.slot_mapping,
        ring_slots=ring.slot_mapping,
    )


def step_plan(
    main: Any, ring: SideMetadata, compressed: SideMetadata, ring_capacity: int
) -> BatchPlan:
    """`batch_plan`, built by the first layer that asks and kept on the step's metadata."""
    key = (id(compressed), id(main), id(ring), ring_capacity)
    kept = getattr(compressed, "_plan", None)
    if kept is None or kept[0] != key:
        kept = (key, batch_plan(main, ring, compressed, ring_capacity), main, ring)
        compressed._plan = kept
    return kept[1]
