"""Both sides of `bench_vllm_layer`: our step and vLLM's kernels, on one batch of vLLM's layout."""

from __future__ import annotations

import dataclasses

import torch

from flash_qsa.integrations.vllm import selection
from flash_qsa.integrations.vllm.step import (
    StepOptions,
    attend_step,
    prepare_step,
    select_step,
)
from flash_qsa.ops.compress_keys.ring_rows import position_offset
from flash_qsa.ops.fp8 import as_bytes
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.testing.inputs import REAL
from flash_qsa.testing.vllm_layout import PagedEngine

DTYPE = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECTION = (11, 11, 10)
WORKSPACE = 512 << 20


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of a batch: `decodes` requests of `rows` rows, then prefill chunks."""

    name: str
    page: int
    context: int
    decodes: int = 0
    rows: int = 1
    chunks: tuple[int, ...] = ()
    padded: int = 0
    fp8: bool = False
    alike: float = 0.0
    """Correlation of neighbouring rows' index projections; text has much, noise has none."""

    @property
    def query_lens(self) -> list[int]:
        return [self.rows] * self.decodes + list(self.chunks)

    @property
    def captured(self) -> bool:
        return not self.chunks


class Layer:
    """Projections, weights and one set of caches for each side and copy."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        capacity = 8 if case.rows > 1 else 4
        self.shape = dataclasses.replace(REAL, page_size=case.page, ring_capacity=capacity)
        self.requests = len(case.query_lens)
        fp8 = torch.float8_e4m3fn if case.fp8 else None
        self.engine = PagedEngine(
            self.shape, self.requests, case.context, DTYPE, main_dtype=fp8, index_dtype=fp8,
            with_positions=True, device=DEVICE,
        )  # fmt: skip
        fill(self.engine)
        self.padded_rows = case.padded * case.rows
        which, lens = list(range(self.requests)), case.query_lens
        seq_lens = [case.context - 3 * (i % 5) for i in which]
        self.plan = self.engine.step(
            which, lens, seq_lens, padded_rows=self.padded_rows, padded_requests=case.padded
        )
        rows, shape = self.plan.num_rows, self.shape
        width = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        joint = torch.randn(
            rows, width + (shape.index_heads + 1) * shape.index_dim, device=DEVICE, dtype=DTYPE
        )
        self.qkv, self.index_qk = joint[:, :width], joint[:, width:]
        if case.alike:
            correlate(self.index_qk, case.alike)
        at = self.plan.positions.clamp(min=0)
        self.positions = torch.stack((at, at // 2, at // 3))
        angles = torch.rand(case.context, 32, device=DEVICE) * 6.28
        table = torch.cat((angles.cos(), angles.sin()), -1).to(DTYPE)
        self.rope = RopeTable(table, SECTION, True, True)
        dims = (shape.index_dim,) * 2 + (shape.head_dim,) * 2
        weights = [0.1 * torch.randn(dim, device=DEVICE) for dim in dims]
        self.norms = Norms(*(weight.to(DTYPE) for weight in weights), 1e-6)
        scale = torch.ones((), device=DEVICE)
        self.scales = (scale, scale) if case.fp8 else (None, None)
        self.options = StepOptions(
            shape.top_k, shape.ratio, shape.head_dim**-0.5, workspace=WORKSPACE
        )
        self.rows = torch.empty(
            rows, selection.row_width(shape.top_k), dtype=torch.int32, device=DEVICE
        )
        self.output = torch.empty(rows, shape.heads, shape.head_dim, device=DEVICE, dtype=DTYPE)

    def prepare(self, caches) -> Prepared:
        return prepare_step(
            self.options, self.qkv, self.index_qk, self.positions, self.rope, self.norms, caches,
            self.plan, *self.scales,
        )  # fmt: skip

    def select(self, index_query: torch.Tensor, caches) -> torch.Tensor:
        select_step(
            self.options, index_query, caches.compressed, self.plan.page_table, self.plan,
            self.rows, False,
        )  # fmt: skip
        return selection.blocks(self.rows, self.shape.top_k)

    def attend(self, prepared: Prepared, caches) -> torch.Tensor:
        attend_step(
            self.options, prepared, caches.main, self.plan, self.rows, self.output,
            k_scale=self.scales[0], v_scale=self.scales[1],
        )  # fmt: skip
        return self.output


class Peer:
    """vLLM's kernels on the same step, called as vLLM's own layer calls them."""

    def __init__(self, layer: Layer) -> None:
        from vllm.models.qwen4_exp.nvidia.ops import qsa, qsa_indexer, qsa_prepare

        self.qsa, self.indexer, self.preparation = qsa, qsa_indexer, qsa_prepare
        self.layer, plan = layer, layer.plan
        case, shape = layer.case, layer.shape
        self.request_ids = plan.request_ids.clamp(min=0)
        self.ring_table = plan.ring_table.clamp(min=0)
        self.work = group_work(plan, shape.ratio).to(DEVICE)
        rows = plan.num_rows
        index_dtype = torch.float8_e4m3fn if case.fp8 else DTYPE
        self.index_query = torch.empty(
            rows, shape.index_heads, shape.index_dim, device=DEVICE, dtype=index_dtype
        )
        self.blocks = torch.empty(rows, shape.top_k, device=DEVICE, dtype=torch.int32)
        width = shape.top_k * shape.ratio + shape.ratio
        self.tokens = torch.empty(rows, width, device=DEVICE, dtype=torch.int32)
        self.output = torch.empty_like(layer.output)
        self.decode_rows = (case.decodes + case.padded) * case.rows
        self.prefill_starts = plan.query_start[case.decodes + case.padded :]
        self.longest = max(case.query_lens)

    def prepare(self, caches) -> Prepared:
        layer, plan, shape = self.layer, self.layer.plan, self.layer.shape
        heads = shape.index_heads * shape.index_dim
        query, gate = self.preparation.qsa_prepare(
            layer.index_qk[:, :heads], layer.index_qk[:, heads:], layer.positions,
            layer.rope.cos_sin, layer.norms.index_query, layer.norms.index_key, layer.norms.eps,
            self.index_query, caches.ring, plan.ring_slots, self.ring_table, plan.query_start,
            plan.positions, caches.compressed, plan.compressed_slots, self.work,
            compress_ratio=shape.ratio, mrope_section=SECTION,
            rope_pos_offset=position_offset(shape.index_dim, DTYPE), main_qkv=layer.qkv,
            main_q_norm_weight=layer.norms.query, main_k_norm_weight=layer.norms.key,
            main_eps=layer.norms.eps, main_kv_cache=caches.main.transpose(1, 2),
            main_slot_mapping=plan.main_slots, main_k_scale=1.0, main_v_scale=1.0,
        )  # fmt: skip
        return Prepared(query, gate, self.index_query)

    def select(self, index_query: torch.Tensor, caches) -> torch.Tensor:
        plan, shape, case = self.layer.plan, self.layer.shape, self.layer.case
        budget, lead = shape.top_k * shape.ratio, self.decode_rows
        requests = case.decodes + case.padded
        if lead:
            self.indexer.qsa_select_paged_decode(
                index_query[:lead], caches.compressed, plan.page_table[:requests],
                plan.visible_blocks[:lead], budget, shape.ratio, case.rows, self.blocks[:lead],
            )  # fmt: skip
        if case.chunks:
            self.indexer.qsa_select_paged_prefill(
                index_query[lead:], caches.compressed, plan.page_table[requests:],
                self.prefill_starts, plan.visible_blocks[lead:], budget, shape.ratio,
                self.longest, self.blocks[lead:], plan.max_seq_len,
            )  # fmt: skip
        self.expand(self.blocks)
        return self.blocks

    def expand(self, blocks: torch.Tensor) -> None:
        plan, shape = self.layer.plan, self.layer.shape
        self.indexer.expand_qsa_block_indices(
            blocks, plan.positions, plan.visible_blocks, shape.ratio, shape.top_k * shape.ratio,
            self.tokens,
        )  # fmt: skip

    def attend(self, prepared: Prepared, caches) -> torch.Tensor:
        keys, values = caches.main.transpose(1, 2).chunk(2, -1)
        scale = 1.0 if self.layer.case.fp8 else None
        self.qsa.qsa_sparse_paged_attention(
            prepared.query, keys, values, self.tokens, self.layer.plan.page_table,
            self.request_ids, self.longest > self.layer.case.rows, self.output, k_scale=scale,
            v_scale=scale, output_gate=prepared.gate,
        )  # fmt: skip
        return self.output


def correlate(rows: torch.Tensor, alike: float) -> None:
    """Makes each row resemble the one before (first-order autoregression), at the same spread."""
    state = rows[0].float()
    for row in rows[1:]:
        state = alike * state + (1 - alike**2) ** 0.5 * row.float()
        row.copy_(state)


def fill(engine: PagedEngine) -> None:
    """Finite numbers in every block but the null ones, drawn on the GPU."""
    for cache in (engine.main, engine.compressed):
        for part in range(1, cache.shape[0], 256):
            noise = torch.randn(cache[part : part + 256].shape, device=DEVICE, dtype=DTYPE)
            target = cache[part : part + 256]
            as_bytes(target).copy_(as_bytes(noise.to(cache.dtype)))
    dim = engine.shape.index_dim
    engine.ring[1:, ..., :dim].normal_()
    engine.ring[1:, ..., position_offset(dim, DTYPE) :].zero_()


def group_work(plan, ratio: int) -> torch.Tensor:
    """vLLM's work list: (request, item) for each group closed, at least one a live request."""
    starts, lengths = plan.query_start.tolist(), plan.seq_lens.tolist()
    work = []
    for request, length in enumerate(lengths):
        count = starts[request + 1] - starts[request]
        closed = length // ratio - (length - count) // ratio
        work += [(request, item) for item in range(max(closed, 1) if count else 0)]
    room = (plan.num_rows + (ratio - 1) * len(lengths)) // ratio
    work += [(-1, -1)] * (room - len(work))
    return torch.tensor(work, dtype=torch.int32)


def clone_caches(engine: PagedEngine) -> Caches:
    """The same bytes in memory of their own, with the same strides."""
    pool, caches = engine.pool.clone(), engine.caches

    def moved(cache: torch.Tensor) -> torch.Tensor:
        base = pool.view(cache.dtype)
        return base.as_strided(cache.shape, cache.stride(), cache.storage_offset())

    return caches._replace(
        main=moved(caches.main), compressed=moved(caches.compressed), ring=caches.ring.clone()
    )
