"""store_rows in PyTorch: the specification."""

from __future__ import annotations

import torch

from flash_qsa.ops.fp8 import as_bytes, from_storage, is_fp8, to_storage


def store_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    pages, size = cache.shape[:2]
    kept = (slots >= 0) & (slots < pages * size)
    cells = slots[kept].long()
    values = from_storage(rows[kept]) if is_fp8(rows.dtype) else rows[kept]
    stored = as_bytes(to_storage(values, cache.dtype))
    as_bytes(cache)[cells // size, cells % size, 0] = stored
