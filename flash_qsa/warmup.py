"""Compiling, before the first request, every kernel that serving can reach.

The steps that serving can take are walked through on meta tensors with launches recorded instead of
performed: the ops' own host code says which kernels, tiles and specialisations there are, so this
module keeps no list of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """(requests, rows of each, sequence length) of the steps that schedules tell apart.

        The compiler tells multiples of 16 and the number 1 from the rest, so every size is walked
        with uneven neighbours.
        """
        lengths = _with_neighbours(_doublings(256, self.max_seq_len, 4), 5)
        for each in sorted({1, 1 + self.draft_tokens}):
            for requests in _with_neighbours(_doublings(1, self.max_requests, 2), 1):
                if requests * each <= self.max_rows:
                    yield from ((requests, each, max(length, each)) for length in lengths)
        for rows in _with_neighbours(_doublings(16, self.max_rows, 2), 1, 2, 3, 5):
            yield from ((1, rows, max(length, rows)) for length in lengths)


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
            _walk(config, serving, *step)
        for launch in launches:
            found.setdefault(launch.specialise(target).key, launch)
    return found


def _doublings(first: int, last: int, factor: int) -> list[int]:
    """first, first · factor, … and last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]


def _with_neighbours(sizes: list[int], *distances: int) -> list[int]:
    """The sizes, and those below them by each distance that are at least 1."""
    below = {size - distance for size in sizes for distance in distances}
    return sorted({*sizes, *(size for size in below if size > 0)})


def _walk(config: QSAConfig, serving: Serving, requests: int, each: int, length: int) -> None:
    """One step of every op on meta tensors, the separate ones beside the fused."""
    rows, dtype, ratio = requests * each, serving.dtype, config.compress_ratio
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
    decodes = requests if each <= 1 + serving.draft_tokens else 0
    plan = BatchPlan(
        num_tokens=rows,
        num_requests=requests,
        num_decodes=decodes,
        num_decode_tokens=decodes * each,
        decode_query_len=each if decodes else 1,
        max_query_len=each,
        max_seq_len=length,
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
