"""vLLM's QSA operators as peers of `flash-qsa bench`, from a folder that holds its op files.

The folder has `qsa.py`, `qsa_indexer.py` and `qsa_prepare.py` of a release under
`vllm/models/qwen4_exp/nvidia/ops/`, what they import, and `bench_vllm.py`, which loads the compiled
top-k. It is not part of this project; `benchmarks/README.md` says what belongs in it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from flash_qsa.ops.compress_keys.ring_rows import stores_positions
from flash_qsa.ops.fp8 import is_fp8
from flash_qsa.testing.inputs import Problem
from flash_qsa.testing.measure.cases import PEERS
from flash_qsa.testing.measure.problem import step_problem
from flash_qsa.testing.measure.timing import Run
from flash_qsa.testing.steps import StepProblem

NAME = "vllm 0.33.0"
OPS = "vllm.models.qwen4_exp.nvidia.ops"


def register(folder: Path) -> None:
    """Adds vLLM's operators to PEERS.

    Raises:
        FileNotFoundError: the folder does not hold them.
    """
    if not (folder / "bench_vllm.py").is_file():
        raise FileNotFoundError(f"peers: {folder} holds no bench_vllm.py")
    sys.path.insert(0, str(folder.resolve()))
    importlib.import_module("bench_vllm")
    indexer = importlib.import_module(f"{OPS}.qsa_indexer")
    attention = importlib.import_module(f"{OPS}.qsa")

    def select(problem: Problem, ids: torch.Tensor) -> Run:
        out = torch.empty_like(ids)
        return lambda: _select(indexer, problem, out)

    def attend(problem: Problem, ids: torch.Tensor) -> Run:
        packed = _packed(problem)
        _expand(indexer, problem, ids.contiguous(), packed)
        out = torch.empty_like(problem.query)
        return lambda: _attend(attention, problem, packed, out)

    def both(problem: Problem, ids: torch.Tensor) -> Run:
        chosen, packed = torch.empty_like(ids), _packed(problem)
        out = torch.empty_like(problem.query)

        def run() -> None:
            _select(indexer, problem, chosen)
            _expand(indexer, problem, chosen, packed)
            _attend(attention, problem, packed, out)

        return run

    for op, peer in (("select", select), ("attend", attend), ("select+attend", both)):
        PEERS[op][NAME] = peer
    PEERS["prepare"][NAME] = lambda problem, ids: prepare_call(step_problem(problem))


def _packed(problem: Problem) -> torch.Tensor:
    shape = problem.shape
    width = shape.top_k * shape.ratio + shape.ratio
    rows = problem.plan.num_rows
    return torch.empty(rows, width, dtype=torch.int32, device=problem.query.device)


def _select(indexer, problem: Problem, out: torch.Tensor) -> None:
    plan, shape = problem.plan, problem.shape
    budget = shape.top_k * shape.ratio
    common = (problem.index_query, problem.key_cache, plan.page_table)
    if plan.num_decode_tokens:
        query_len = plan.decode_query_len
        indexer.qsa_select_paged_decode(
            *common, plan.visible_blocks, budget, shape.ratio, query_len, out
        )
    else:
        indexer.qsa_select_paged_prefill(
            *common,
            plan.query_start,
            plan.visible_blocks,
            budget,
            shape.ratio,
            plan.max_query_len,
            out,
            plan.max_seq_len,
        )


def _expand(indexer, problem: Problem, ids: torch.Tensor, packed: torch.Tensor) -> None:
    plan, shape = problem.plan, problem.shape
    budget = shape.top_k * shape.ratio
    indexer.expand_qsa_block_indices(
        ids, plan.positions, plan.visible_blocks, shape.ratio, budget, packed
    )


def _attend(attention, problem: Problem, packed: torch.Tensor, out: torch.Tensor) -> None:
    plan = problem.plan
    keys, values = problem.kv_cache.transpose(1, 2).split(problem.shape.head_dim, -1)
    scale = 1.0 if is_fp8(keys.dtype) else None
    attention.qsa_sparse_paged_attention(
        problem.query,
        keys,
        values,
        packed,
        plan.page_table,
        plan.request_ids,
        plan.max_query_len > 8,
        out,
        scale,
        scale,
        output_gate=problem.gate,
    )


def prepare_call(problem: StepProblem) -> Run:
    """vLLM's fused preparation of the same step; the folder must be on the path."""
    qsa_prepare = importlib.import_module(f"{OPS}.qsa_prepare").qsa_prepare
    plan, shape, caches = problem.plan, problem.shape, problem.caches
    width = shape.index_heads * shape.index_dim
    lens, starts = plan.seq_lens.tolist(), plan.query_start.tolist()
    work = []
    for request, length in enumerate(lens):
        before = length - (starts[request + 1] - starts[request])
        groups = length // shape.ratio - before // shape.ratio
        work += [[request, group] for group in range(max(groups, 1))]
    ring_width = caches.ring.shape[-1]
    with_positions = stores_positions(ring_width, shape.index_dim, caches.ring.dtype)
    arguments = (
        problem.index_qk[:, :width],
        problem.index_qk[:, width:],
        problem.positions,
        problem.rope.cos_sin,
        problem.norms.index_query,
        problem.norms.index_key,
        problem.norms.eps,
        caches.compressed.new_empty(plan.num_rows, shape.index_heads, shape.index_dim),
        caches.ring,
        plan.ring_slots,
        plan.ring_table,
        plan.query_start,
        plan.positions,
        caches.compressed,
        plan.compressed_slots,
        torch.tensor(work, dtype=torch.int32, device=problem.qkv.device),
    )
    options = {
        "compress_ratio": shape.ratio,
        "mrope_section": problem.rope.mrope_section,
        "rope_pos_offset": shape.index_dim if with_positions else None,
        "main_qkv": problem.qkv,
        "main_q_norm_weight": problem.norms.query,
        "main_k_norm_weight": problem.norms.key,
        "main_eps": problem.norms.eps,
        "main_kv_cache": caches.main.transpose(1, 2),
        "main_slot_mapping": plan.main_slots,
        "main_k_scale": 1.0,
        "main_v_scale": 1.0,
    }
    return lambda: qsa_prepare(*arguments, **options)
