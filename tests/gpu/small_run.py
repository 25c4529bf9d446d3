"""Every kernel once on small hostile inputs, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/small_run.py
    compute-sanitizer --tool racecheck python tests/gpu/small_run.py select_blocks

Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that the tool sees every tensor's own bounds.
"""

from __future__ import annotations

import sys

import torch

from flash_qsa import QSAAttention, QSACache, QSAConfig, dispatch
from flash_qsa.ops import expand_blocks, select_blocks, sparse_attention
from flash_qsa.testing.inputs import Shape, make_problem

SMALL = Shape(12, 1, 64, 4, 64, page_size=16, top_k=24)
BATCHES = {
    "decode": ([700, 37, 5000], [1, 1, 1]),
    "draft": ([700, 5000], [4, 4]),
    "prefill": ([900, 5000], [300, 77]),
}


def attention_and_selection(ops: list[str]) -> None:
    for dtype, storage in ((torch.bfloat16, None), (torch.float16, torch.float8_e4m3fn)):
        for lengths, rows in BATCHES.values():
            problem = make_problem(
                lengths,
                rows,
                SMALL,
                dtype=dtype,
                kv_dtype=storage,
                index_dtype=storage,
                padding=3,
                device="cuda",
            )
            plan = problem.plan
            common = (plan.page_table, plan.request_ids)
            ids = problem.block_ids()
            if "select_blocks" in ops:
                ids = select_blocks(
                    problem.index_query,
                    problem.key_cache,
                    *common,
                    plan.visible_blocks,
                    SMALL.top_k,
                    plan=plan,
                )
            if "expand_blocks" in ops:
                expand_blocks(ids, plan.positions, plan.visible_blocks, SMALL.ratio)
            if "sparse_attention" in ops:
                for deterministic in (False, True):
                    sparse_attention(
                        problem.query,
                        problem.kv_cache,
                        ids,
                        plan.positions,
                        *common,
                        compress_ratio=SMALL.ratio,
                        gate=problem.gate,
                        plan=plan,
                        deterministic=deterministic,
                        return_lse=True,
                    )


def layer() -> None:
    """A chunk, then drafts, through prepare and the plan."""
    config = QSAConfig(hidden_size=64, token_budget=64)
    module = QSAAttention(config, device="cuda", dtype=torch.bfloat16).eval()
    cache = QSACache.from_config(
        config,
        dtype=torch.bfloat16,
        device="cuda",
        num_layers=1,
        num_pages=16,
        page_size=64,
        num_ring_slots=4,
        draft_tokens=3,
    )
    for request in ("a", "b"):
        cache.allocate(request)
    for step in ({"a": 150, "b": 61}, {"a": 4, "b": 4}, {"a": 4, "b": 4}):
        plan = cache.plan(cache.append(step))
        hidden = torch.randn(plan.num_rows, 64, device="cuda", dtype=torch.bfloat16)
        with torch.inference_mode():
            module(hidden, plan.positions, plan=plan, caches=cache.layers[0])


def main(ops: list[str]) -> None:
    with dispatch.trace() as ran:
        attention_and_selection(ops)
        if "prepare" in ops:
            layer()
    torch.cuda.synchronize()
    kinds = sorted(set(ran))
    print("ran", ", ".join(f"{op} ({backend})" for op, backend in kinds))


if __name__ == "__main__":
    main(sys.argv[1:] or list(dispatch.OPS))
