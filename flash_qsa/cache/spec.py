"""CacheSpec: shapes and exact byte counts of a QSA model's state, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flash_qsa.cache.rings import require_ring_capacity, ring_capacity
from flash_qsa.checks import (
    E4M3_DTYPES,
    FLOAT_DTYPES,
    UnsupportedError,
    expect_contiguous_last,
    expect_positive,
)
from flash_qsa.config import QSAConfig
from flash_qsa.ops.compress_keys.ring_rows import ring_width
from flash_qsa.ops.prepare.api import Caches


@dataclass(frozen=True)
class CacheSpec:
    """Geometry of the three caches of `num_layers` QSA layers.

    Attributes:
        num_layers: QSA layers; other layers of the model have no state here.
        num_pages: P. page_size: S, tokens of a page, a multiple of compress_ratio.
        num_ring_slots: requests that can be alive at a time (and reserved slots).
        num_kv_heads, head_dim: Hkv, D. index_head_dim: Di. compress_ratio: C.
        dtype: activation dtype, which the ring has too.
        main_dtypes: one a layer, `dtype` or FP8 (float8_e4m3fn, or its bytes in uint8).
        compressed_dtype: `dtype` or FP8 without scales.
        draft_tokens: widest draft window. ring_capacity: rows of a ring slot.
        stores_positions: three exact int64 positions behind each raw key (mRoPE models).

    Raises:
        ValueError: sizes that do not fit. UnsupportedError: a dtype that is not listed.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_ring_slots: int
    num_kv_heads: int
    head_dim: int
    index_head_dim: int
    compress_ratio: int
    dtype: torch.dtype
    main_dtypes: tuple[torch.dtype, ...]
    compressed_dtype: torch.dtype
    draft_tokens: int
    ring_capacity: int
    stores_positions: bool

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "num_pages",
            "page_size",
            "num_ring_slots",
            "num_kv_heads",
            "head_dim",
            "index_head_dim",
            "compress_ratio",
            "ring_capacity",
        ):
            expect_positive(name, getattr(self, name))
        if self.page_size % self.compress_ratio:
            raise ValueError(
                f"page_size: {self.page_size} tokens are not a multiple of compress_ratio "
                f"{self.compress_ratio}"
            )
        if len(self.main_dtypes) != self.num_layers:
            raise ValueError(
                f"main_dtypes: expected one of each of {self.num_layers} layers, "
                f"got {len(self.main_dtypes)}"
            )
        require_ring_capacity(self.ring_capacity, self.compress_ratio, self.draft_tokens)
        _expect(self.dtype, "dtype", FLOAT_DTYPES)
        for main_dtype in self.main_dtypes:
            _expect(main_dtype, "main_dtype", (self.dtype, *E4M3_DTYPES))
        _expect(self.compressed_dtype, "compressed_dtype", (self.dtype, *E4M3_DTYPES))

    @classmethod
    def from_config(
        cls,
        config: QSAConfig,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_ring_slots: int,
        dtype: torch.dtype = torch.bfloat16,
        main_dtype: torch.dtype | Sequence[torch.dtype] | None = None,
        compressed_dtype: torch.dtype | None = None,
        draft_tokens: int = 0,
        num_kv_heads: int | None = None,
        stores_positions: bool | None = None,
    ) -> CacheSpec:
        """The caches of `num_layers` layers of `config`.

        Args:
            main_dtype: one dtype for every layer, or one a layer; `dtype` by default.
            compressed_dtype: `dtype` by default.
            num_kv_heads: KV heads of this rank; the config's by default.
            stores_positions: by default what the rotary embedding needs.
        """
        main = dtype if main_dtype is None else main_dtype
        return cls(
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_ring_slots=num_ring_slots,
            num_kv_heads=config.num_kv_heads if num_kv_heads is None else num_kv_heads,
            head_dim=config.head_dim,
            index_head_dim=config.index_head_dim,
            compress_ratio=config.compress_ratio,
            dtype=dtype,
            main_dtypes=(main,) * num_layers if isinstance(main, torch.dtype) else tuple(main),
            compressed_dtype=dtype if compressed_dtype is None else compressed_dtype,
            draft_tokens=draft_tokens,
            ring_capacity=ring_capacity(config.compress_ratio, draft_tokens),
            stores_positions=(
                config.rope.mrope_section is not None
                if stores_positions is None
                else stores_positions
            ),
        )

    @property
    def blocks_per_page(self) -> int:
        """Compressed keys of a page: S / C."""
        return self.page_size // self.compress_ratio

    @property
    def ring_width(self) -> int:
        """Elements of a ring row."""
        return ring_width(self.index_head_dim, self.dtype, self.stores_positions)

    @property
    def main_shape(self) -> tuple[int, int, int, int]:
        return (self.num_pages, self.num_kv_heads, self.page_size, 2 * self.head_dim)

    @property
    def compressed_shape(self) -> tuple[int, int, int, int]:
        return (self.num_pages, self.blocks_per_page, 1, self.index_head_dim)

    @property
    def ring_shape(self) -> tuple[int, int, int, int]:
        return (self.num_ring_slots, self.ring_capacity, 1, self.ring_width)

    def main_page_bytes(self, layer: int) -> int:
        """Bytes of K and V of one page of one layer."""
        return math.prod(self.main_shape[1:]) * self.main_dtypes[layer].itemsize

    @property
    def compressed_page_bytes(self) -> int:
        """Bytes of the compressed keys of one page of one layer."""
        return math.prod(self.compressed_shape[1:]) * self.compressed_dtype.itemsize

    @property
    def ring_slot_bytes(self) -> int:
        """Bytes of one request's ring in one layer."""
        return math.prod(self.ring_shape[1:]) * self.dtype.itemsize

    def page_bytes(self, layer: int) -> int:
        """Bytes that one page takes in one layer: K, V and compressed keys."""
        return self.main_page_bytes(layer) + self.compressed_page_bytes

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one layer's three caches."""
        return self.num_pages * self.page_bytes(layer) + self.num_ring_slots * self.ring_slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers: what `QSACache` allocates, to the byte."""
        return sum(self.layer_bytes(layer) for layer in range(self.num_layers))

    def request_bytes(self, tokens: int) -> int:
        """Bytes that one request of `tokens` tokens occupies in all layers, in whole pages."""
        pages = -(-tokens // self.page_size)
        return sum(
            pages * self.page_bytes(layer) + self.ring_slot_bytes
            for layer in range(self.num_layers)
        )

    def allocate(self, device: torch.device | str) -> tuple[Caches, ...]:
        """Zeroed caches of every layer."""
        return tuple(
            Caches(
                torch.zeros(self.main_shape, dtype=main_dtype, device=device),
                torch.zeros(self.compressed_shape, dtype=self.compressed_dtype, device=device),
                torch.zeros(self.ring_shape, dtype=self.dtype, device=device),
            )
            for main_dtype in self.main_dtypes
        )

    def require(self, layers: Sequence[Caches]) -> None:
        """Refuses tensors that are not what this spec describes."""
        if len(layers) != self.num_layers:
            raise ValueError(f"layers: expected {self.num_layers}, got {len(layers)}")
        for index, (layer, main_dtype) in enumerate(zip(layers, self.main_dtypes)):
            expected = {
                "main": (self.main_shape, main_dtype),
                "compressed": (self.compressed_shape, self.compressed_dtype),
                "ring": (self.ring_shape, self.dtype),
            }
            for name, (shape, dtype) in expected.items():
                tensor = getattr(layer, name)
                if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                    raise ValueError(
                        f"layers[{index}].{name}: expected {dtype} {list(shape)}, "
                        f"got {tensor.dtype} {list(tensor.shape)}"
                    )
                expect_contiguous_last(f"layers[{index}].{name}", tensor)


def _expect(dtype: torch.dtype, name: str, allowed: Sequence[torch.dtype]) -> None:
    if dtype not in allowed:
        names = ", ".join(str(one).removeprefix("torch.") for one in allowed)
        raise UnsupportedError(
            f"{name}: {str(dtype).removeprefix('torch.')} is not supported; expected {names}"
        )
