"""QSA over whole sequences without caches: the differentiable form, for training."""

from __future__ import annotations

import torch

from flash_qsa import ops
from flash_qsa.layers.preparation import prepare_index, real_positions, split_heads
from flash_qsa.ops.norm import rms_norm
from flash_qsa.ops.prepare.api import Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import BatchPlan

BLOCKS_PER_PAGE = 16


def attend_sequences(
    qkv: torch.Tensor,
    index_qk: torch.Tensor,
    positions: torch.Tensor | None,
    query_start: torch.Tensor,
    rope: RopeTable,
    norms: Norms,
    *,
    kv_heads: int,
    head_dim: int,
    index_head_dim: int,
    top_k: int,
    compress_ratio: int,
    workspace: int | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Gated attention [T, Hq, D] of R packed sequences, differentiable in qkv and the main norms.

    Nothing is read back to the host, and no copy of keys or values is made: attention reads the
    step's own rows. Selection takes no gradients, so `index_qk` receives none.

    Args:
        qkv: [T, Hq·2·D + 2·Hkv·D]. index_qk: [T, (Hi + 1)·Di].
        positions: rotary positions; by default those inside each sequence.
        query_start: int32 [R + 1], first row of each sequence, then T.
    """
    plan = _sequence_plan(query_start, qkv.shape[0], compress_ratio)
    at = real_positions(plan.positions if positions is None else positions, plan)
    with torch.no_grad():
        pages = qkv.shape[0] // plan.page_size + query_start.shape[0] - 1
        compressed = index_qk.new_zeros(pages, BLOCKS_PER_PAGE, 1, index_head_dim)
        unused_ring = index_qk.new_zeros(1, compress_ratio, 1, index_head_dim)
        index_query = prepare_index(
            index_qk, at, rope, norms, compressed, unused_ring, plan, commit=False, backend=backend
        )
        block_ids = ops.select_blocks(
            index_query,
            compressed,
            plan.page_table,
            plan.request_ids,
            plan.visible_blocks,
            top_k,
            plan=plan,
            workspace=workspace,
            backend=backend,
        )
    query, gate, keys, values = split_heads(qkv, kv_heads, head_dim)
    query = rope.apply(rms_norm(query, norms.query, norms.eps), at)
    keys = rope.apply(rms_norm(keys, norms.key, norms.eps), at)
    one_page = query_start.new_zeros(query_start.shape[0] - 1, 1)
    return ops.sparse_attention(
        query,
        (keys.transpose(0, 1)[None], values.transpose(0, 1)[None]),
        block_ids,
        plan.positions,
        one_page,
        plan.request_ids,
        compress_ratio=compress_ratio,
        gate=gate,
        token_base=query_start[:-1][plan.request_ids.clamp(min=0)],
        deterministic=deterministic,
        backend=backend,
    )


def _sequence_plan(query_start: torch.Tensor, rows: int, ratio: int) -> BatchPlan:
    """A plan whose pages hold compressed keys alone.

    Sequence r starts at page query_start[r] // S + r, which leaves every sequence a page for its
    remainder: ⌊start / S⌋ + r + ⌈length / S⌉ never passes the next sequence's first page.
    """
    sequences, page_size = query_start.shape[0] - 1, BLOCKS_PER_PAGE * ratio
    device = query_start.device
    first_page = query_start[:-1] // page_size + torch.arange(sequences, device=device)
    columns = torch.arange(rows // page_size + 1, device=device)
    page_table = (first_page[:, None] + columns).int()
    ring_table = query_start.new_zeros(sequences, 1)
    seq_lens = query_start.diff()
    per_row = ops.plan_rows(
        query_start,
        seq_lens,
        page_table,
        ring_table,
        rows,
        compress_ratio=ratio,
        page_size=page_size,
        ring_capacity=ratio,
        backend="auto",
    )
    return BatchPlan(
        num_tokens=rows,
        num_requests=sequences,
        num_decodes=0,
        num_decode_tokens=0,
        decode_query_len=1,
        max_query_len=rows,
        max_seq_len=rows,
        compress_ratio=ratio,
        page_size=page_size,
        ring_capacity=ratio,
        query_start=query_start,
        seq_lens=seq_lens,
        page_table=page_table,
        ring_table=ring_table,
        **per_row._asdict(),
    )
