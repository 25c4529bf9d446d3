"""One layer's step behind the projections: prepare, select, attend, with vLLM's tensors.

Nothing here imports vLLM, so tests and benchmarks drive the very code that serves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_qsa import ops
from flash_qsa.checks import Scale
from flash_qsa.integrations.vllm import selection
from flash_qsa.layers.preparation import prepare_unfused
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import BatchPlan


@dataclass(frozen=True)
class StepOptions:
    """Constants of a layer.

    Attributes:
        top_k, compress_ratio, scale: K, C and the softmax scale.
        fused: one launch prepares the step; otherwise separate ops do, with the same result.
        backend, deterministic: as the ops take them.
        workspace: bytes that scoring may hold at a time.
    """

    top_k: int
    compress_ratio: int
    scale: float
    fused: bool = True
    backend: str = "auto"
    deterministic: bool = False
    workspace: int = 128 << 20


def prepare_step(
    options: StepOptions,
    qkv: torch.Tensor,
    index_qk: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeTable,
    norms: Norms,
    caches: Caches,
    plan: BatchPlan,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> Prepared:
    """Writes the step into the caches; arguments may have more rows than the plan.

    Raises:
        ValueError: no qkv, or no slots for the main cache.
    """
    if qkv is None or plan.main_slots is None:
        missing = "qkv" if qkv is None else "slot_mapping"
        raise ValueError(f"{missing}: preparing a step needs the projections and the main slots")
    rows = plan.num_rows
    run = ops.prepare if options.fused else prepare_unfused
    return run(
        qkv[:rows],
        index_qk[:rows],
        positions[..., :rows],
        rope,
        norms,
        caches,
        plan,
        k_scale=k_scale,
        v_scale=v_scale,
        backend=options.backend,
    )


def select_step(
    options: StepOptions,
    index_query: torch.Tensor,
    compressed: torch.Tensor,
    page_table: torch.Tensor,
    plan: BatchPlan,
    rows: torch.Tensor,
    keep_counts: bool,
) -> None:
    """Fills the step's selection rows in place.

    Args:
        rows: int32 [T, selection.row_width(K)].
        keep_counts: also store the visible counts, which only rows that are reused need.
    """
    selection.require_rows(rows, plan.num_rows, options.top_k)
    ops.select_blocks(
        index_query,
        compressed,
        page_table,
        plan.request_ids,
        plan.visible_blocks,
        options.top_k,
        plan=plan,
        workspace=options.workspace,
        out=selection.blocks(rows, options.top_k),
        backend=options.backend,
    )
    if keep_counts:
        selection.visible(rows).copy_(plan.visible_blocks)


def attend_step(
    options: StepOptions,
    prepared: Prepared,
    main: torch.Tensor,
    plan: BatchPlan,
    rows: torch.Tensor,
    output: torch.Tensor,
    *,
    reused: bool = False,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> None:
    """Attends the selected blocks and the open group; rows behind the plan's become zero.

    Args:
        rows: the step's selection rows, or an earlier draft step's with `reused`.
        output: [T' ≥ T, Hq, D], written in place.
    """
    selection.require_rows(rows, plan.num_rows, options.top_k)
    output[plan.num_rows :].zero_()
    ops.sparse_attention(
        prepared.query,
        main,
        selection.blocks(rows, options.top_k),
        plan.positions,
        plan.page_table,
        plan.request_ids,
        compress_ratio=options.compress_ratio,
        scale=options.scale,
        gate=prepared.gate,
        k_scale=k_scale,
        v_scale=v_scale,
        tail_start=selection.visible(rows) * options.compress_ratio if reused else None,
        plan=plan,
        deterministic=options.deterministic,
        out=output[: plan.num_rows],
        backend=options.backend,
    )
