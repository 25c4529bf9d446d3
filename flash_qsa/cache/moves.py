"""Moving state between cells and pages of one layer's tensors.

A main cell is a token (page · S + offset), a compressed cell a block (page · S / C + offset).
Both read all sources before they write, so moves may overlap or permute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flash_qsa.ops.fp8 import as_bytes
from flash_qsa.ops.prepare.api import Caches


class PageContents(NamedTuple):
    """Whole pages of every layer, main and compressed together: main[i] [n, Hkv, S, 2·D],
    compressed[i] [n, S / C, 1, Di]."""

    main: tuple[torch.Tensor, ...]
    compressed: tuple[torch.Tensor, ...]


def move_tokens(main: torch.Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """Copies token cells of a main cache [P, Hkv, S, 2·D]; every other cell stays as it is.

    Raises:
        ValueError: counts that differ, a repeated target, or a cell outside the cache.
    """
    _move(as_bytes(main).transpose(1, 2), source, target)


def move_blocks(compressed: torch.Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """Copies block cells of a compressed cache [P, S / C, 1, Di]; raises as `move_tokens`."""
    _move(as_bytes(compressed), source, target)


def read_pages(
    layers: Sequence[Caches], pages: Sequence[int], device: torch.device | str | None = None
) -> PageContents:
    """Copies of whole pages, on `device` (the cache's own by default)."""

    def read(cache: torch.Tensor) -> torch.Tensor:
        index = _index(cache, pages)
        return as_bytes(cache)[index].view(cache.dtype).to(device or cache.device)

    return PageContents(
        tuple(read(layer.main) for layer in layers),
        tuple(read(layer.compressed) for layer in layers),
    )


def write_pages(layers: Sequence[Caches], pages: Sequence[int], contents: PageContents) -> None:
    """Writes what `read_pages` returned to `pages` of the same layers."""
    if len(contents.main) != len(layers) or len(contents.compressed) != len(layers):
        raise ValueError(
            f"contents: {len(contents.main)} main and {len(contents.compressed)} compressed layers "
            f"for {len(layers)} layers"
        )
    for layer, main, compressed in zip(layers, contents.main, contents.compressed):
        for cache, values in ((layer.main, main), (layer.compressed, compressed)):
            as_bytes(cache)[_index(cache, pages)] = as_bytes(values).to(cache.device)


def _index(cache: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
    """Pages as an index tensor, refused where an index would wrap or miss."""
    for page in pages:
        if not 0 <= page < cache.shape[0]:
            raise ValueError(f"pages: {page} is outside 0 … {cache.shape[0] - 1}")
    return torch.tensor(list(pages), dtype=torch.int64, device=cache.device)


def _move(cells: torch.Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """Copies cells of a [P, cells a page, ...] view."""
    pages, per_page = cells.shape[:2]
    if len(source) != len(target):
        raise ValueError(f"target: expected {len(source)} cells, got {len(target)}")
    if len(set(target)) != len(target):
        raise ValueError(f"target: a cell appears twice in {list(target)}")
    for name, listed in (("source", source), ("target", target)):
        for cell in listed:
            if not 0 <= cell < pages * per_page:
                raise ValueError(f"{name}: cell {cell} is outside 0 … {pages * per_page - 1}")
    read = torch.tensor(list(source), dtype=torch.int64, device=cells.device)
    write = torch.tensor(list(target), dtype=torch.int64, device=cells.device)
    cells[write // per_page, write % per_page] = cells[read // per_page, read % per_page]
