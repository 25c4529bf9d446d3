"""State: page and ring allocators, the caches of a model, and the plan of a step."""

from flash_qsa.cache.ledger import Freed, RecomputeError, RequestLedger, RequestStep
from flash_qsa.cache.moves import (
    PageContents,
    move_blocks,
    move_tokens,
    read_pages,
    write_pages,
)
from flash_qsa.cache.pages import CacheExhaustedError, PageAllocator
from flash_qsa.cache.planning import PlanBuffers, build_plan, require_same_step
from flash_qsa.cache.qsa_cache import QSACache
from flash_qsa.cache.rings import RingAllocator, ring_capacity
from flash_qsa.cache.snapshot import RequestSnapshot
from flash_qsa.cache.spec import CacheSpec

__all__ = [
    "CacheExhaustedError",
    "CacheSpec",
    "Freed",
    "PageAllocator",
    "PageContents",
    "PlanBuffers",
    "QSACache",
    "RecomputeError",
    "RequestLedger",
    "RequestSnapshot",
    "RequestStep",
    "RingAllocator",
    "build_plan",
    "move_blocks",
    "move_tokens",
    "read_pages",
    "require_same_step",
    "ring_capacity",
    "write_pages",
]
