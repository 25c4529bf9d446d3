"""How much scratch a layer's largest step takes, found without running one.

The ops' own host code allocates it on meta tensors with launches recorded instead of performed, so
nothing here repeats what schedules decide.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_qsa.integrations.vllm import selection
from flash_qsa.integrations.vllm.step import StepOptions, attend_step, select_step
from flash_qsa.integrations.vllm.warmup import StepShape, padding_plan
from flash_qsa.launches import record
from flash_qsa.ops.fp8 import is_fp8
from flash_qsa.ops.prepare.api import Prepared
from flash_qsa.targets import Target

PAGES = 1 << 20
"""Of the imagined caches: enough that offsets into them need 64 bits, as in the largest real
ones."""


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """What a step's scratch depends on beside its batch; dtypes as the caches store."""

    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    page_size: int
    ring_capacity: int
    dtype: torch.dtype
    main_dtype: torch.dtype
    index_dtype: torch.dtype


def largest_steps(
    rows: int, max_requests: int, max_draft_rows: int, max_seq_len: int
) -> tuple[StepShape, ...]:
    """The batches of at most `rows` rows among which the one with the most scratch is: one prompt,
    of every power of two too, because few rows are split more, and as many decodes or draft windows
    as fit, all as long as the model allows."""
    prompts = {rows, *(1 << power for power in range(rows.bit_length()))}
    decodes = {
        StepShape(min(max_requests, rows // each), each, max_seq_len, True)
        for each in (1, max_draft_rows)
        if each <= rows
    }
    return (*(StepShape(1, count, max_seq_len, False) for count in sorted(prompts)), *decodes)


@functools.cache
def scratch_bytes(
    sizes: LayerSizes, options: StepOptions, shapes: tuple[StepShape, ...], target: Target
) -> int:
    """Bytes that selecting or attending takes in the worst of `shapes`: one follows the other."""
    options = dataclasses.replace(options, backend="triton")
    with record(target):
        return max(size for shape in shapes for size in _step(sizes, options, shape))


def _step(sizes: LayerSizes, options: StepOptions, shape: StepShape) -> list[int]:
    device, rows = torch.device("meta"), shape.rows

    def empty(*shape: int, dtype: torch.dtype = sizes.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    plan = padding_plan(
        shape,
        -(-shape.seq_len // sizes.page_size),
        ratio=options.compress_ratio,
        page_size=sizes.page_size,
        ring_capacity=sizes.ring_capacity,
        device=device,
    )
    query = empty(rows, sizes.heads, sizes.head_dim)
    index_query = empty(rows, sizes.index_heads, sizes.index_dim, dtype=sizes.index_dtype)
    chosen = empty(rows, selection.row_width(options.top_k), dtype=torch.int32)
    main = empty(PAGES, sizes.kv_heads, sizes.page_size, 2 * sizes.head_dim, dtype=sizes.main_dtype)
    per_page = sizes.page_size // options.compress_ratio
    keys = empty(PAGES, per_page, 1, sizes.index_dim, dtype=sizes.index_dtype)
    scale = 1.0 if is_fp8(sizes.main_dtype) else None
    output = torch.empty_like(query)
    with _Allocated() as selecting:
        select_step(options, index_query, keys, plan.page_table, plan, chosen, True)
    taken = [selecting.bytes]
    for reused in (False, True):
        with _Allocated() as attending:
            attend_step(
                options, Prepared(query, query, index_query), main, plan, chosen, output,
                reused=reused, k_scale=scale, v_scale=scale,
            )  # fmt: skip
        taken.append(attending.bytes)
    return taken


class _Allocated(TorchDispatchMode):
    """Counts the bytes of every tensor that is made inside and shares no memory with an older
    one."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function._schema.is_mutable:
            aliases = any(output.alias_info is not None for output in function._schema.returns)
            self.bytes += 0 if aliases else result.nbytes
        return result
