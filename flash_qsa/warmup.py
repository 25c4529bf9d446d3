"""Compiling, before the first request, every kernel that serving can reach.

The steps that serving can take are walked through on meta tensors with launches recorded instead of
performed: the ops' own host code says which kernels, tiles and specialisations there are, so this
module keeps no list of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flash_qsa.config import QSAConfig
from flash_qsa.launches import Launch, record
from flash_qsa.ops import (
    compress_keys,
    expand_blocks,
    plan_rows,
    prepare,
    select_blocks,
    sparse_attention,
    store_rows,
)
from flash_qsa.ops.batch_plan.api import PlanRows
from flash_qsa.ops.compress_keys.ring_rows import ring_width
from flash_qsa.ops.fp8 import is_fp8
from flash_qsa.ops.prepare.api import Caches, Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import BatchPlan
from flash_qsa.targets import TARGETS, Target, device_target


@dataclass(frozen=True)
class StepShape:
    """A batch as far as schedules look at it.

    Attributes:
        requests, query_len: requests of so many rows each: decodes or draft windows if `decode`,
            prompts otherwise.
        seq_len: no request is longer.
        chunk: rows of one more request, a prompt behind them; 0 without.
    """

    requests: int
    query_len: int
    seq_len: int
    decode: bool
    chunk: int = 0

    @property
    def rows(self) -> int:
        return self.requests * self.query_len + self.chunk

    def counts(self) -> dict[str, int]:
        """The host integers of the step's BatchPlan."""
        return {
            "num_tokens": self.rows,
            "num_requests": self.requests + (self.chunk > 0),
            "num_decodes": self.requests if self.decode else 0,
            "num_decode_tokens": self.requests * self.query_len if self.decode else 0,
            "decode_query_len": self.query_len if self.decode else 0,
            "max_query_len": max(self.query_len, self.chunk),
            "max_seq_len": self.seq_len,
        }

    def __str__(self) -> str:
        kind = "decode" if self.decode else "prefill"
        behind = f" + {self.chunk}" if self.chunk else ""
        return f"{kind} {self.requests} × {self.query_len}{behind} rows, {self.seq_len} tokens"


@dataclass(frozen=True)
class Serving:
    """What a server will be asked for.

    Attributes:
        dtype: activation dtype. main_dtype, index_dtype: of the caches, dtype by default.
        max_requests: requests of one step. max_rows: rows of one step.
        draft_tokens: drafts verified beside each decoded token.
        max_seq_len: longest sequence. page_size: S.
    """

    dtype: torch.dtype = torch.bfloat16
    main_dtype: torch.dtype | None = None
    index_dtype: torch.dtype | None = None
    max_requests: int = 64
    max_rows: int = 8192
    draft_tokens: int = 0
    max_seq_len: int = 32_768
    page_size: int = 64

    def steps(self) -> list[StepShape]:
        """Steps that between them launch every binary."""
        limits = (self.max_requests, self.max_rows, 1 + self.draft_tokens, self.max_seq_len)
        return step_shapes(*limits)


def warm_up(
    config: QSAConfig, serving: Serving | None = None, *, target: Target | str | None = None
) -> list[str]:
    """Compiles every kernel specialisation that `serving` can reach; launches nothing.

    Args:
        config: the layers' geometry.
        serving: batches, lengths and dtypes to expect; Serving's defaults if None.
        target: compile for this GPU into Triton's disk cache, whether it is here or not. By default
            the current CUDA device, whose kernels are then ready in this process.

    Returns:
        One line a binary: the kernel's name and the values it was specialised on, sorted.

    Raises:
        RuntimeError: no target was given and there is no CUDA device.
    """
    serving = serving or Serving()
    here = target is None
    if here:
        if not torch.cuda.is_available():
            raise RuntimeError("warm_up: no CUDA device; name a target to compile for one")
        target = device_target(torch.device("cuda"))
    elif isinstance(target, str):
        target = TARGETS[target]
    launches = reachable(config, serving, target)
    for launch in launches.values():
        if here:
            launch.kernel.run(*launch.args, grid=launch.grid, warmup=True, **launch.kwargs)
        else:
            launch.specialise(target).compile()
    return sorted(launches)


def reachable(config: QSAConfig, serving: Serving, target: Target) -> dict[str, Launch]:
    """The distinct launches of every step, keyed by kernel and specialisation."""
    found: dict[str, Launch] = {}
    for step in serving.steps():
        with record(target) as launches:
            _walk(config, serving, step)
        for launch in launches:
            found.setdefault(launch.specialise(target).key, launch)
    return found


def step_shapes(max_requests: int, max_rows: int, window: int, max_seq_len: int) -> list[StepShape]:
    """Steps that between them launch every binary that a step within these limits can.

    Schedules follow the number of rows closely, because it decides how work is shared among the
    processors; lengths decide independently of that, and whether rows are few or many. So rows are
    walked finely at two lengths, and lengths at a few numbers of rows.

    Args:
        window: rows of a request that verifies drafts, its decoded token included.
    """
    lengths = _sizes(min(128, max_seq_len), max_seq_len, 4)
    octaves = _sizes(min(128, max_seq_len), max_seq_len, 1)
    usual = sorted({min(16_384, max_seq_len), max_seq_len})
    shapes = []
    for each, decode in sorted({(1, True), (window, True), (0, False)}):
        # a prompt is one request, whose rows are what varies
        most = min(max_requests, max_rows // each) if decode else max_rows
        if not most:
            continue
        few = _sizes(1, most, 0.5)
        for count in sorted({*few, *_sizes(1, most, 32)}):
            requests, rows = (count, each) if decode else (1, count)
            for length in lengths if count in few else usual:
                shapes.append(StepShape(requests, rows, max(length, rows), decode))
    # prompts of several requests: a few rows of each, which are scored as decodes are, or more
    several = {*_sizes(1, max_requests, 1), min(max_rows // 17, max_requests)}
    for requests in sorted(several - {0, 1}):
        most = max_rows // requests
        for rows in sorted({*(min(n, most) for n in (4, 8, 12, 16, 17)), most} - {0, 1}):
            shapes += [StepShape(requests, rows, max(n, rows), False) for n in octaves]
    return list(dict.fromkeys(shapes))


def _sizes(first: int, last: int, each: float) -> list[int]:
    """Whole numbers from first to last, both included, about `each` of them an octave."""
    steps = range(math.ceil(each * math.log2(last / first)))
    return sorted({*(int(first * 2 ** (step / each)) for step in steps), last})


def _walk(config: QSAConfig, serving: Serving, shape: StepShape) -> None:
    """One step of every op on meta tensors, the separate ones beside the fused."""
    rows, requests = shape.rows, shape.counts()["num_requests"]
    dtype, ratio = serving.dtype, config.compress_ratio
    main_dtype, index_dtype = serving.main_dtype or dtype, serving.index_dtype or dtype
    page, dim = serving.page_size, config.index_head_dim
    columns = -(-serving.max_seq_len // page)
    capacity = -(-(ratio + serving.draft_tokens) // ratio) * ratio
    mrope = config.rope.mrope_section is not None

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    starts, lengths = (empty(n, dtype=torch.int32) for n in (requests + 1, requests))
    page_table = empty(requests, columns, dtype=torch.int32)
    ring_table = empty(requests, 1, dtype=torch.int32)
    sizes = {"compress_ratio": ratio, "page_size": page, "ring_capacity": capacity}
    planned = PlanRows.empty(rows, "meta")
    plan_rows(starts, lengths, page_table, ring_table, rows, **sizes, out=planned, backend="triton")
    plan = BatchPlan(
        **shape.counts(),
        query_start=starts,
        seq_lens=lengths,
        page_table=page_table,
        ring_table=ring_table,
        **sizes,
        **planned._asdict(),
    )
    caches = Caches(
        empty(columns, config.num_kv_heads, page, 2 * config.head_dim, dtype=main_dtype),
        empty(columns, page // ratio, 1, dim, dtype=index_dtype),
        empty(requests + 1, capacity, 1, ring_width(dim, dtype, mrope)),
    )
    norms = Norms(
        empty(dim), empty(dim), empty(config.head_dim), empty(config.head_dim), config.rms_norm_eps
    )
    rope = RopeTable(
        empty(config.rope.max_positions, config.rope.rotary_dim),
        config.rope.mrope_section,
        config.rope.mrope_interleaved,
        config.rope.neox_style,
    )
    index_qk = empty(rows, (config.index_heads + 1) * dim)
    qkv = empty(rows, 2 * (config.num_heads + config.num_kv_heads) * config.head_dim)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if is_fp8(main_dtype) else {}
    positions = empty(3, rows, dtype=torch.int64) if mrope else empty(rows, dtype=torch.int64)
    out = prepare(qkv, index_qk, positions, rope, norms, caches, plan, **scales, backend="triton")
    raw_keys = index_qk[:, -dim:]
    compress_keys(raw_keys, positions, caches.ring, ring_table, plan, backend="triton")
    store_rows(caches.compressed, plan.compressed_slots, empty(rows, dim), backend="triton")
    blocks = select_blocks(
        out.index_query,
        caches.compressed,
        page_table,
        plan.request_ids,
        plan.visible_blocks,
        config.top_k,
        plan=plan,
        backend="triton",
    )
    expand_blocks(blocks, plan.positions, plan.visible_blocks, ratio, backend="triton")
    for gate in (out.gate, None):
        sparse_attention(
            out.query,
            caches.main,
            blocks,
            plan.positions,
            page_table,
            plan.request_ids,
            compress_ratio=ratio,
            gate=gate,
            plan=plan,
            **scales,
            backend="triton",
        )
