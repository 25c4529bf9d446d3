"""Named shapes of real serving and training steps, shared by tests, `verify` and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flash_qsa.testing.inputs import REAL, Shape


@dataclass(frozen=True)
class Workload:
    """`batch` requests of `context` tokens, each bringing `rows` new rows.

    overlap is the AR(1) correlation of neighbouring rows' index queries: how alike they choose.
    fp8_index: index keys and queries are e4m3. fp8_cache: so are the main cache's keys and values.
    """

    name: str
    batch: int
    rows: int
    context: int
    overlap: float = 0.0
    shape: Shape = REAL
    fp8_index: bool = False
    fp8_cache: bool = False

    @property
    def total_rows(self) -> int:
        return self.batch * self.rows


def _k(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens < 1 << 20 else f"{tokens >> 20}m"


def _decode(batch: int, context: int) -> Workload:
    return Workload(f"decode-b{batch}-{_k(context)}", batch, 1, context)


def _verify(batch: int, context: int, overlap: float, rows: int = 4) -> Workload:
    name = f"verify{rows}-b{batch}-{_k(context)}-corr{overlap:g}"
    return Workload(name, batch, rows, context, overlap)


def _prefill(rows: int, context: int, overlap: float) -> Workload:
    name = f"prefill-{_k(rows)}-at-{_k(context)}-corr{overlap:g}"
    return Workload(name, 1, rows, context, overlap)


DECODE = tuple(
    _decode(batch, context)
    for batch, contexts in {
        1: (8192, 32768, 131072, 262144, 1 << 20),
        8: (8192, 32768, 131072, 262144),
        32: (8192, 32768, 131072),
        128: (8192, 32768),
    }.items()
    for context in contexts
)
OPEN_DECODE = tuple(
    replace(_decode(batch, 32768), name=f"decode-b{batch}-32k-open", context=32767)
    for batch in (1, 8, 32)
)
"""Three tokens of an open group, which three of four decode steps have, and `DECODE` has not."""

DRAFT_VERIFY = tuple(
    _verify(batch, context, overlap)
    for overlap in (0.97, 0.0)
    for batch in (8, 32)
    for context in (32768, 262144)
)
"""Rows of one draft window choose alike; those of correlation 0 are the worst case."""

PREFILL = tuple(
    _prefill(8192, context, overlap)
    for context in (8192, 32768, 131072, 262144)
    for overlap in (0.99, 0.97, 0.0)
)
SHORT_PREFILL = (_prefill(1024, 8192, 0.97),)
LONG_PREFILL = (_prefill(16384, 1 << 20, 0.97),)


def _rank(ranks: int, *workloads: Workload) -> tuple[Workload, ...]:
    """What one of `ranks` does: its share of the query heads, of the KV heads no less than one,
    which others then hold too, and the whole indexer."""
    kv_heads = max(REAL.kv_heads // ranks, 1)
    shape = replace(REAL, heads=REAL.heads // ranks, kv_heads=kv_heads)
    return tuple(
        replace(workload, name=f"tp{ranks}-{workload.name}", shape=shape) for workload in workloads
    )


TENSOR_PARALLEL = (
    *_rank(2, _decode(32, 32768), _prefill(8192, 32768, 0.97)),
    *_rank(
        4,
        *(_decode(batch, context) for batch in (8, 32) for context in (32768, 131072)),
        *(_prefill(8192, context, 0.97) for context in (32768, 131072)),
    ),
    *_rank(8, _decode(32, 32768), _prefill(8192, 32768, 0.97)),
)
FP8_INDEX = tuple(
    replace(workload, name=f"fp8index-{workload.name}", fp8_index=True)
    for workload in (_decode(8, 131072), _decode(32, 131072), _prefill(8192, 131072, 0.97))
)
FP8_CACHE = tuple(
    replace(workload, name=f"fp8-{workload.name}", fp8_index=True, fp8_cache=True)
    for workload in (
        *(_decode(batch, 32768) for batch in (1, 8, 32, 128)),
        _decode(32, 131072),
        _verify(32, 32768, 0.97),
        *(_prefill(8192, context, 0.97) for context in (32768, 131072)),
        _prefill(8192, 32768, 0.0),
    )
)
CPU = (
    _decode(1, 8192),
    _decode(1, 32768),
    Workload("prefill-256-at-4k-corr0.97", 1, 256, 4096, 0.97),
)
"""What two CPU cores do in a minute."""

WORKLOADS = {
    workload.name: workload
    for workload in (
        *DECODE,
        *OPEN_DECODE,
        *DRAFT_VERIFY,
        *PREFILL,
        *SHORT_PREFILL,
        *LONG_PREFILL,
        *TENSOR_PARALLEL,
        *FP8_INDEX,
        *FP8_CACHE,
        *CPU,
    )
}
