"""A small engine around one layer's state: NaN in unused memory, pages in a random order."""

from __future__ import annotations

import torch

from flash_qsa.cache import CacheSpec, build_plan
from flash_qsa.config import QSAConfig, RopeConfig
from flash_qsa.ops.fp8 import as_bytes, is_fp8
from flash_qsa.ops.prepare.api import Caches
from flash_qsa.plan import BatchPlan


def small_config(**overrides) -> QSAConfig:
    """Sparse from the 21st token on."""
    fields = {
        "hidden_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "index_heads": 2,
        "index_head_dim": 16,
        "token_budget": 16,
        "compress_ratio": 4,
        "rope": RopeConfig(rotary_dim=8, max_positions=256, mrope_section=(2, 1, 1)),
    }
    return QSAConfig(**{**fields, **overrides})


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """NaN everywhere (FP8: its NaN code)."""
    as_bytes(tensor).fill_(0x7F if is_fp8(tensor.dtype) else float("nan"))
    return tensor


class Engine:
    """Pages, ring slots and lengths of a few requests of one layer."""

    def __init__(
        self,
        config: QSAConfig,
        *,
        requests: int = 3,
        max_tokens: int = 120,
        draft_tokens: int = 0,
        page_size: int = 8,
        kv_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        main_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        per_request = -(-max_tokens // page_size)
        self.spec = CacheSpec.from_config(
            config,
            num_layers=1,
            num_pages=requests * per_request + 1,
            page_size=page_size,
            num_ring_slots=requests + 1,
            dtype=dtype,
            main_dtype=main_dtype,
            compressed_dtype=index_dtype,
            draft_tokens=draft_tokens,
            num_kv_heads=kv_heads,
        )
        self.device = device
        (state,) = self.spec.allocate(device)
        self.caches = Caches(*(poison(tensor) for tensor in state))
        order = torch.randperm(self.spec.num_pages).tolist()
        self.pages = [order[i * per_request : (i + 1) * per_request] for i in range(requests)]
        self.slots = torch.randperm(requests + 1)[:requests].tolist()
        self.lengths = [0] * requests
        self.draft_tokens = draft_tokens

    def plan(self, rows: dict[int, int], padding: int = 0, **options) -> BatchPlan:
        """A step of `rows` new tokens a request, in the given order; the lengths advance."""
        options = {"num_rows": sum(rows.values()) + padding, "device": self.device, **options}
        for request, count in rows.items():
            self.lengths[request] += count
        return build_plan(
            list(rows.values()),
            [self.lengths[request] for request in rows],
            [self.pages[r][: -(-self.lengths[r] // self.spec.page_size)] for r in rows],
            [self.slots[request] for request in rows],
            compress_ratio=self.spec.compress_ratio,
            page_size=self.spec.page_size,
            ring_capacity=self.spec.ring_capacity,
            draft_tokens=self.draft_tokens,
            **options,
        )

    def snapshot(self) -> Caches:
        """A copy of the state."""
        return Caches(*(tensor.clone() for tensor in self.caches))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
