"""Compiles our kernels before the first request, in the place of vLLM's QSA warm-up. Imports vLLM.

vLLM's own warm-up looks for its own layers and finds none in a model that runs ours.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import torch

from flash_qsa.integrations.vllm.step import attend_step, prepare_step, select_step
from flash_qsa.ops.batch_plan.api import PlanRows
from flash_qsa.ops.prepare.api import Caches
from flash_qsa.plan import BatchPlan
from flash_qsa.warmup import StepShape, step_shapes

logger = logging.getLogger("vllm.flash_qsa")

_STOCK_MODULE = "vllm.model_executor.warmup.qwen4_exp_qsa_warmup"
_CALLER_MODULE = "vllm.model_executor.warmup.kernel_warmup"
_NAME = "qwen4_exp_qsa_triton_warmup"


def install_warmup() -> None:
    """Puts `warm_up` where vLLM's worker calls its QSA warm-up; safe to repeat."""
    import vllm.model_executor.warmup.qwen4_exp_qsa_warmup as stock

    stock.qwen4_exp_qsa_triton_warmup = warm_up
    caller = sys.modules.get(_CALLER_MODULE)
    if caller is not None and hasattr(caller, _NAME):
        setattr(caller, _NAME, warm_up)


def warm_up(worker: Any) -> list[str]:
    """Runs every batch shape class once on rows that are padding: kernels compile, nothing is
    written.

    Returns:
        One entry a shape: "decode 8 × 4 rows, 16384 tokens".
    """
    from flash_qsa.integrations.vllm.owner import QSAAttention

    layers = [m for m in worker.get_model().modules() if isinstance(m, QSAAttention)]
    if not layers or layers[0].kv_cache.numel() == 0:
        return []
    config = worker.vllm_config
    shapes = step_shapes(
        config.scheduler_config.max_num_seqs,
        config.scheduler_config.max_num_batched_tokens,
        1 + config.num_speculative_tokens,
        config.model_config.max_model_len,
    )
    # the largest first: smaller ones then fit the memory that torch has cached
    shapes.sort(key=lambda shape: shape.rows * shape.seq_len, reverse=True)
    start = time.monotonic()
    unlike = {_signature(layer): layer for layer in layers}
    for layer in unlike.values():
        for shape in shapes:
            run_padding(layer, shape, config.model_config.max_model_len)
    taken = time.monotonic() - start
    logger.info("flash-qsa warmed up %d batch shapes in %.0f s.", len(shapes), taken)
    return [str(shape) for shape in shapes]


def _signature(layer: Any) -> tuple:
    """Equal for layers that run the same kernels."""
    main = layer.impl.typed_cache(layer.kv_cache)
    index = layer.indexer
    return (
        layer.options,
        index.config,
        index.reusable,
        main.dtype,
        index.index_dtype,
        main.stride(),
        index.compressed_key_cache.kv_cache.stride(),
        index.raw_key_cache.kv_cache.stride(),
    )


def padding_plan(
    shape: StepShape,
    columns: int,
    *,
    ratio: int,
    page_size: int,
    ring_capacity: int,
    device: torch.device,
) -> BatchPlan:
    """A plan of `shape` whose rows all are padding, over page tables of `columns` columns."""
    rows = PlanRows.empty(shape.rows, device)
    for buffer in rows:
        buffer.fill_(-1)
    rows.visible_blocks.zero_()
    index = {"dtype": torch.int32, "device": device}
    requests = shape.counts()["num_requests"]
    return BatchPlan(
        **shape.counts(),
        compress_ratio=ratio,
        page_size=page_size,
        ring_capacity=ring_capacity,
        query_start=torch.zeros(requests + 1, **index),
        seq_lens=torch.zeros(requests, **index),
        page_table=torch.full((requests, columns), -1, **index),
        ring_table=torch.full((requests, 1), -1, **index),
        **rows._asdict(),
    )


def run_padding(layer: Any, shape: StepShape, max_seq_len: int) -> None:
    """One step of a layer on padding rows alone.

    Its page table is as wide as the engine's, whatever the step's length: the compiler tells widths
    that are a multiple of 16 from others.
    """
    device, dtype = layer.kv_cache.device, layer.q_norm.weight.dtype
    page_size = layer.kv_cache.shape[2]
    plan = padding_plan(
        shape,
        -(-max_seq_len // page_size),
        ratio=layer.options.compress_ratio,
        page_size=page_size,
        ring_capacity=layer.indexer.raw_key_cache.kv_cache.shape[1],
        device=device,
    )
    width = 2 * layer.q_size + 2 * layer.kv_size
    joint = torch.zeros(shape.rows, width + layer.index_qk_size, dtype=dtype, device=device)
    qkv, index_qk = joint.split((width, layer.index_qk_size), -1)
    axes = 3 if layer.rope_table(dtype).mrope_section else 1
    positions = torch.zeros(axes, shape.rows, dtype=torch.int64, device=device)
    main = layer.impl.typed_cache(layer.kv_cache)
    caches = Caches(
        main, layer.indexer.compressed_key_cache.kv_cache, layer.indexer.raw_key_cache.kv_cache
    )
    scales = layer.impl.scales(layer)
    options = layer.options
    prepared = prepare_step(
        options,
        qkv,
        index_qk,
        positions,
        layer.rope_table(dtype),
        layer.norms(),
        caches,
        plan,
        *scales,
    )
    rows = torch.empty(shape.rows, layer.indexer.row_width, dtype=torch.int32, device=device)
    select_step(options, prepared.index_query, caches.compressed, plan.page_table, plan, rows, True)
    output = torch.empty_like(prepared.query)
    for reused in (False, True) if layer.indexer.reusable else (False,):
        attend_step(
            options,
            prepared,
            main,
            plan,
            rows,
            output,
            reused=reused,
            k_scale=scales[0],
            v_scale=scales[1],
        )
