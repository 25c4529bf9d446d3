"""A workload's tensors, drawn on the device itself: caches of gigabytes take milliseconds."""

from __future__ import annotations

import torch

from flash_qsa.config import RopeConfig
from flash_qsa.ops.fp8 import as_bytes, is_fp8, to_storage
from flash_qsa.ops.prepare.api import Caches, Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.testing.inputs import Problem, make_plan
from flash_qsa.testing.steps import StepProblem
from flash_qsa.testing.workloads import Workload

MAX_DRAFT_ROWS = 16
"""Rows of a request up to which a step verifies drafts rather than fills a prompt."""

MAX_COPIES = 256


def workload_problem(
    workload: Workload, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Problem:
    """One step of `workload`: random caches over permuted pages, index queries that drift.

    Neighbouring rows of a request have index queries correlated by workload.overlap, an AR(1)
    sequence, so that they choose alike as much as rows of real text do.
    """
    shape = workload.shape
    generator = torch.Generator(device).manual_seed(seed)
    columns = -(-workload.context // shape.page_size)
    pages = workload.batch * columns
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    plan = make_plan(
        [workload.rows] * workload.batch,
        [workload.context] * workload.batch,
        order.view(workload.batch, columns).int(),
        shape,
        decode_query_len=workload.rows if workload.rows <= MAX_DRAFT_ROWS else 1,
        device=device,
    )

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

    rows = workload.total_rows
    index_dtype = torch.float8_e4m3fn if workload.fp8_index else dtype
    return Problem(
        shape,
        plan,
        draw(rows, shape.heads, shape.head_dim),
        draw(rows, shape.heads, shape.head_dim),
        to_storage(
            _drifting(
                draw(workload.batch, workload.rows, shape.index_heads, shape.index_dim),
                workload.overlap,
            ).flatten(0, 1),
            index_dtype,
        ),
        _stored(
            draw(pages, shape.kv_heads, shape.page_size, 2 * shape.head_dim),
            torch.float8_e4m3fn if workload.fp8_cache else dtype,
        ),
        to_storage(draw(pages, shape.page_size // shape.ratio, 1, shape.index_dim), index_dtype),
    )


def _stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`to_storage` of gigabytes: FP8 in parts, because FP32 of it all would not fit beside it."""
    if not is_fp8(dtype):
        return values
    parts = [as_bytes(to_storage(part, dtype)) for part in values.split(1024)]
    return torch.cat(parts).view(dtype)


def step_problem(problem: Problem) -> StepProblem:
    """What `prepare` takes for the rows of `problem`: random projections and norms, text positions,
    and caches of its own, so that the problem's stay as they are."""
    plan, shape = problem.plan, problem.shape
    device, dtype = problem.query.device, problem.query.dtype

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype)

    rope = RopeConfig(theta=1e7, rotary_dim=shape.index_dim // 2, max_positions=plan.max_seq_len)
    return StepProblem(
        shape,
        draw(plan.num_rows, (shape.heads + shape.kv_heads) * 2 * shape.head_dim),
        draw(plan.num_rows, (shape.index_heads + 1) * shape.index_dim),
        plan.positions,
        RopeTable.from_config(rope, dtype, device),
        Norms(*(draw(d) for d in (shape.index_dim,) * 2 + (shape.head_dim,) * 2), 1e-6),
        Caches(
            problem.kv_cache.clone(),
            problem.key_cache.clone(),
            draw(plan.num_requests, plan.ring_capacity, 1, shape.index_dim),
        ),
        plan,
        [],
    )


def _drifting(noise: torch.Tensor, correlation: float) -> torch.Tensor:
    """AR(1) along axis 1 with unit variance; correlation 0 leaves the noise as it is."""
    if correlation == 0:
        return noise
    fresh = (1 - correlation**2) ** 0.5
    out = noise.float()
    for row in range(1, out.shape[1]):
        out[:, row] = correlation * out[:, row - 1] + fresh * out[:, row]
    return out.to(noise.dtype)


def problem_bytes(workload: Workload, dtype: torch.dtype) -> int:
    """Bytes of the workload's caches, the bulk of what a problem takes."""
    shape = workload.shape
    per_token = shape.kv_heads * 2 * shape.head_dim + shape.index_dim // shape.ratio
    return workload.batch * workload.context * per_token * dtype.itemsize


def copies_of(moved: float, size: int, device: torch.device) -> int:
    """Copies of a problem through which calls rotate, so that none finds its inputs in the device's
    last cache: three times as large as that together, by the bytes that the least op moves. Caches
    of `size` bytes each, of which an op may also want copies, take a quarter of the memory."""
    if device.type != "cuda":
        return 1
    properties = torch.cuda.get_device_properties(device)
    cache = getattr(properties, "L2_cache_size", 64 << 20)
    room = properties.total_memory // 4 // size
    return int(max(1, min(MAX_COPIES, -(-3 * cache // moved), room)))
