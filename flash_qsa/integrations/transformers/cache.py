"""A transformers cache layer for QSA that grows in place and pools every group once.

transformers' dynamic layer copies all keys and values at every step, to append one token, and its
indexer pools, norms and rotates all groups again. `GrowingIndexedLayer` writes new tokens behind
the old ones in buffers with room to spare, and keeps the compressed keys of finished groups.

`keys`, `values` and `indexer_keys` stay what transformers expects, here as views of the buffers'
leading tokens. So its own methods crop, reorder, select and offload them; a tensor that is no view
of its buffer any more simply gets a new buffer at the next step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers.cache_utils import DynamicIndexedLayer

from flash_qsa.integrations.transformers.layout import TokenLayout
from flash_qsa.integrations.transformers.pooling import pool_keys

_SPARE_TOKENS = 256


def adopt(cache: Any | None, layer_idx: int) -> None:
    """Makes a plain dynamic layer of `cache` a growing one, in place.

    Anything else stays as it is: static, offloaded and quantised caches, subclasses of the user's
    own, and programs that are being traced, where a list of layers must not change.
    """
    if cache is None or torch.compiler.is_compiling() or getattr(cache, "offloading", False):
        return
    layer = cache.layers[layer_idx]
    if type(layer) is DynamicIndexedLayer:
        grown = GrowingIndexedLayer()
        grown.__dict__.update(vars(layer))
        cache.layers[layer_idx] = grown


class GrowingIndexedLayer(DynamicIndexedLayer):
    """`DynamicIndexedLayer` without a copy of everything at every step.

    Attributes:
        compressed: [B, slots, Di], compressed keys by slot; None where none are kept.
        compressed_tokens: cached tokens when they were last extended.
        run_starts: per batch row, the token at which its visible tokens start; the compressed keys
            are worth nothing under other starts.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: dict[str, torch.Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        self.compressed: torch.Tensor | None = None
        self.compressed_tokens = 0
        self.run_starts: tuple[int, ...] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, H, L, D] with the new ones behind the old."""
        if _must_copy(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", self.keys, key_states, dim=2)
        self.values = self._append("values", self.values, value_states, dim=2)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Raw index keys [B, L, Di] with the new ones behind the old."""
        if _must_copy(indexer_key_states):
            return super().update_indexer(indexer_key_states)
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        self.indexer_keys = self._append(
            "indexer_keys", self.indexer_keys, indexer_key_states, dim=1
        )
        return self.indexer_keys

    def _append(self, name: str, cached: torch.Tensor, new: torch.Tensor, dim: int) -> torch.Tensor:
        old = cached.shape[dim] if cached.numel() else 0
        total = old + new.shape[dim]
        buffer = self._buffers.get(name)
        if buffer is None or not _leads(cached, buffer, dim) or buffer.shape[dim] < total:
            shape = list(new.shape)
            shape[dim] = total + max(_SPARE_TOKENS, total // 4)
            buffer = new.new_empty(shape)
            if old:
                buffer.narrow(dim, 0, old).copy_(cached)
            self._buffers[name] = buffer
        buffer.narrow(dim, old, new.shape[dim]).copy_(new)
        return buffer.narrow(dim, 0, total)

    def compressed_keys(
        self,
        indexer: torch.nn.Module,
        raw_keys: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layout: TokenLayout,
    ) -> torch.Tensor:
        """Compressed keys [B, slots, Di]; as `pool_keys`, but pools only what is new.

        Groups that closed since the last call are pooled, and one that may still be open; nothing
        where no row closed one, as in most steps of a generation.
        """
        starts, tokens = layout.run_starts, raw_keys.shape[1]
        if starts is None or torch.compiler.is_compiling():
            self._forget()
            return pool_keys(indexer, raw_keys, cos, sin, layout)
        if starts != self.run_starts or tokens < self.compressed_tokens:
            self._forget()
            self.run_starts = starts
        ratio, (batch, _, dim) = layout.compress_ratio, raw_keys.shape
        if self.compressed is not None and self._closed(tokens, ratio) == self._closed(
            self.compressed_tokens, ratio
        ):
            return self.compressed[:, : max(1, tokens // ratio)]
        start = torch.zeros(batch, 1, dtype=torch.int64, device=raw_keys.device)
        if layout.block_start is not None:
            start = layout.block_start[:, :1]
        # As many groups as any row may have closed, from each row's first that was open.
        count = max(1, -(-(tokens - self.compressed_tokens) // ratio))
        first = (self.compressed_tokens - start).clamp(min=0) // ratio
        slots = first + torch.arange(count, device=raw_keys.device)
        fresh = dataclasses.replace(layout, block_start=start + slots * ratio)
        pooled = pool_keys(indexer, raw_keys, cos, sin, fresh)
        total = self.compressed_tokens // ratio + count  # no row's last slot is behind this
        buffer = self.compressed
        if buffer is None or buffer.shape[1] < total:
            buffer = pooled.new_zeros(batch, total + max(_SPARE_TOKENS, total // 4), dim)
            if self.compressed is not None:
                buffer[:, : self.compressed.shape[1]] = self.compressed
        self.compressed = buffer.scatter_(1, slots[..., None].expand(-1, -1, dim), pooled)
        self.compressed_tokens = tokens
        return buffer[:, :total]

    def _closed(self, tokens: int, ratio: int) -> list[int]:
        """Groups that each row has closed when so many tokens are cached."""
        return [max(tokens - start, 0) // ratio for start in self.run_starts]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove:
            self._forget()

    def reset(self) -> None:
        super().reset()
        self._forget()
        self._buffers.clear()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._take_rows(torch.arange(len(self.run_starts or ())).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._forget()  # indices may be a mask or a slice

    def _take_rows(self, rows: torch.Tensor) -> None:
        if self.compressed is not None:
            self.run_starts = tuple(self.run_starts[row] for row in rows.tolist())
            self.compressed = self.compressed.index_select(0, rows.to(self.compressed.device))


def _must_copy(*states: torch.Tensor) -> bool:
    """Whether appending in place would be wrong: gradients, and programs being traced."""
    recording = torch.is_grad_enabled() and any(s.requires_grad for s in states)
    return recording or torch.compiler.is_compiling()


def _leads(cached: torch.Tensor, buffer: torch.Tensor, dim: int) -> bool:
    """Whether `cached` is the leading part of `buffer`, which may be written here."""
    return (
        cached.data_ptr() == buffer.data_ptr()
        and cached.stride() == buffer.stride()
        and cached.dtype == buffer.dtype
        and all(a == b for i, (a, b) in enumerate(zip(cached.shape, buffer.shape)) if i != dim)
        and (not buffer.is_inference() or torch.is_inference_mode_enabled())
    )
