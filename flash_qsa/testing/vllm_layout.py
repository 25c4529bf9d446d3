"""vLLM's memory layout and step description, built without vLLM.

One block of the main pool holds a page of compressed keys and, behind it, a page of keys and
values, so the block stride exceeds either page. Blocks are handed out in random order; block 0 is
the null block: requests that pad a batch point at it and nothing may be written there. Rings live
in a pool of their own, one block a request. All memory starts as NaN.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from flash_qsa.integrations.vllm.metadata import (
    BatchSplit,
    MainMetadata,
    SideBuffers,
    batch_plan,
)
from flash_qsa.ops.compress_keys.ring_rows import ring_width
from flash_qsa.ops.fp8 import is_fp8
from flash_qsa.ops.prepare.api import Caches
from flash_qsa.plan import BatchPlan
from flash_qsa.testing.inputs import Shape

DECODE_THRESHOLD = 8
"""Rows up to which a request counts as decoding: vLLM's `reorder_batch_threshold` in an engine with
seven draft tokens, so that a test may verify a window of any length up to there."""


class PagedEngine:
    """Caches and block tables of a few requests, and the metadata of any step over them.

    Args:
        shape: sizes; `ring_capacity` is a ring's rows.
        requests, max_len: room for that many requests of that many tokens.
        dtype: activations and rings; main_dtype, index_dtype: caches, `dtype` by default (uint8 or
            float8_e4m3fn for FP8).
        with_positions: rings carry mRoPE positions.
        spare_blocks: blocks that no request owns.
    """

    def __init__(
        self,
        shape: Shape,
        requests: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        *,
        main_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
        with_positions: bool = False,
        spare_blocks: int = 2,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.shape, self.device = shape, torch.device(device)
        generator = torch.Generator().manual_seed(seed)
        columns = -(-max_len // shape.page_size)
        blocks = 1 + requests * columns + spare_blocks
        order = torch.randperm(blocks - 1, generator=generator)[: requests * columns] + 1
        self.block_table = order.view(requests, columns).int().to(device)
        ring_order = torch.randperm(requests, generator=generator) + 1
        self.ring_table = ring_order.view(requests, 1).int().to(device)

        main_dtype, index_dtype = main_dtype or dtype, index_dtype or dtype
        kv_row = 2 * shape.head_dim * main_dtype.itemsize
        kv_bytes = shape.page_size * shape.kv_heads * kv_row
        index_bytes = shape.page_size // shape.ratio * shape.index_dim * index_dtype.itemsize
        index_bytes = -(-index_bytes // 16) * 16
        pool = torch.full((blocks, index_bytes + kv_bytes), 0xFF, dtype=torch.uint8)
        self.pool = pool.to(device)  # 0xFF is a NaN in every float dtype, e4m3 included

        main = self.pool[:, index_bytes:].view(main_dtype)
        per_token = shape.kv_heads * 2 * shape.head_dim
        self.main = main.as_strided(
            (blocks, shape.kv_heads, shape.page_size, 2 * shape.head_dim),
            (main.stride(0), 2 * shape.head_dim, per_token, 1),
            main.storage_offset(),
        )
        index = self.pool.view(index_dtype)
        self.compressed = index.as_strided(
            (blocks, shape.page_size // shape.ratio, 1, shape.index_dim),
            (index.stride(0), shape.index_dim, shape.index_dim, 1),
            0,
        )
        width = ring_width(shape.index_dim, dtype, with_positions)
        self.ring = torch.full(
            (requests + 1, shape.ring_capacity, 1, width), float("nan"), dtype=dtype, device=device
        )
        self.buffers: dict[str, SideBuffers] = {}

    @property
    def caches(self) -> Caches:
        return Caches(self.main, self.compressed, self.ring)

    def null_block_untouched(self) -> bool:
        """Whether every byte of both null blocks is still as it was made."""
        null_ring = self.ring[0]
        floats = null_ring.float() if not is_fp8(null_ring.dtype) else null_ring
        return bool((self.pool[0] == 0xFF).all()) and bool(floats.isnan().all())

    def common(
        self,
        which: list[int],
        query_lens: list[int],
        seq_lens: list[int],
        *,
        ring: bool = False,
        padded_rows: int = 0,
        padded_requests: int = 0,
    ) -> SimpleNamespace:
        """What vLLM's runner hands a metadata builder for requests `which`.

        `padded_requests` follow with no rows, length 0 and null blocks; `padded_rows` have slot -1.
        """
        rows = sum(query_lens)
        starts = [0]
        for length in query_lens + [0] * padded_requests:
            starts.append(starts[-1] + length)
        table = (self.ring_table if ring else self.block_table)[which]
        table = torch.cat((table, table.new_zeros(padded_requests, table.shape[1])))
        start = torch.tensor(starts, dtype=torch.int32)
        return SimpleNamespace(
            query_start_loc=start.to(self.device),
            query_start_loc_cpu=start,
            seq_lens=torch.tensor(seq_lens + [0] * padded_requests, dtype=torch.int32).to(
                self.device
            ),
            num_reqs=len(query_lens) + padded_requests,
            num_actual_tokens=rows + padded_rows,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            block_table_tensor=table,
            slot_mapping=self._slots(which, query_lens, seq_lens, padded_rows),
        )

    def _slots(
        self, which: list[int], query_lens: list[int], seq_lens: list[int], padded_rows: int
    ) -> torch.Tensor:
        size, slots = self.shape.page_size, []
        table = self.block_table.cpu().long()
        for request, count, length in zip(which, query_lens, seq_lens):
            token = torch.arange(length - count, length)
            slots.append(table[request, token // size] * size + token % size)
        slots.append(torch.full((padded_rows,), -1))
        return torch.cat(slots).to(self.device)

    def step(
        self,
        which: list[int],
        query_lens: list[int],
        seq_lens: list[int],
        *,
        padded_rows: int = 0,
        padded_requests: int = 0,
        backend: str = "auto",
    ) -> BatchPlan:
        """The plan of a step, through the integration's own metadata. Buffers are reused, as under
        a captured graph."""
        sizes = {"padded_rows": padded_rows, "padded_requests": padded_requests}
        common = self.common(which, query_lens, seq_lens, **sizes)
        ring_common = self.common(which, query_lens, seq_lens, ring=True, **sizes)
        rows, requests = common.num_actual_tokens, common.num_reqs
        for name in ("ring", "compressed"):
            kept = self.buffers.get(name)
            if kept is None or len(kept.ring_table) < requests or len(kept.rows[0]) < rows:
                self.buffers[name] = SideBuffers(max(rows, 16), max(requests, 16), self.device)
        counts = split_counts(query_lens + [0] * padded_requests, rows)
        split = BatchSplit.of(counts, common.query_start_loc_cpu)
        ring = self.buffers["ring"].ring_step(ring_common, split, self.shape.ring_capacity, backend)
        compressed = self.buffers["compressed"].compressed_step(
            common, split, self.shape.ratio, self.shape.page_size // self.shape.ratio, backend
        )
        main = MainMetadata(
            rows, common.max_query_len, common.block_table_tensor, common.slot_mapping
        )
        return batch_plan(main, ring, compressed, self.shape.ring_capacity)


def split_counts(query_lens: list[int], rows: int) -> tuple[int, int, int, int]:
    """vLLM's (decodes, prefills, decode rows, prefill rows): leading requests of one length, at
    most DECODE_THRESHOLD, are decodes; requests without rows pad them."""
    first = query_lens[0]
    if first > DECODE_THRESHOLD:
        return 0, len(query_lens), 0, rows
    decodes = next((i for i, n in enumerate(query_lens) if n not in (0, first)), len(query_lens))
    if decodes == len(query_lens) and decodes * first == rows:
        return decodes, 0, rows, 0
    decodes = next((i for i, n in enumerate(query_lens) if n != first), len(query_lens))
    return decodes, len(query_lens) - decodes, decodes * first, rows - decodes * first
