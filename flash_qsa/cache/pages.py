"""Page allocation with reference counts: pure bookkeeping, no tensors.

A page belongs to every request that lists it. Forks share pages; who writes into a shared page
copies it first (`QSACache.append`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class CacheExhaustedError(RuntimeError):
    """No page or ring slot is left. Nothing was changed; free a request and try again."""


class PageAllocator:
    """Hands out pages `reserved` … `num_pages` - 1.

    Args:
        num_pages: pages of the pool, reserved ones included.
        reserved: leading pages that are never handed out; 1 keeps page 0 as the null page that
            engines point unused table entries at.

    Raises:
        ValueError: sizes that leave no page.
    """

    def __init__(self, num_pages: int, *, reserved: int = 0) -> None:
        if reserved < 0 or num_pages <= reserved:
            raise ValueError(
                f"num_pages: {num_pages} pages of which {reserved} are reserved leave none"
            )
        self.num_pages = num_pages
        self.reserved = reserved
        self._free = list(range(num_pages - 1, reserved - 1, -1))
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._references)

    def references(self, page: int) -> int:
        """How many requests list `page`; 0 for a free or reserved page."""
        return self._references.get(page, 0)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, each with one reference.

        Raises:
            ValueError: a negative count.
            CacheExhaustedError: fewer are free; none is taken.
        """
        if count < 0:
            raise ValueError(f"count: expected at least 0, got {count}")
        if count > len(self._free):
            raise CacheExhaustedError(
                f"{count} pages are needed, {len(self._free)} of "
                f"{self.num_pages - self.reserved} are free"
            )
        pages = [self._free.pop() for _ in range(count)]
        self._references.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds one reference to each page.

        Raises:
            ValueError: a page that nobody holds; no reference is added.
        """
        pages = list(pages)
        for page in pages:
            if page not in self._references:
                raise ValueError(f"page {page} cannot be shared: it is not in use")
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drops one reference from each page; returns the pages that became free.

        Raises:
            ValueError: a page released more often than it is held; nothing is released.
        """
        pages = list(pages)
        for page, times in Counter(pages).items():
            held = self.references(page)
            if times > held:
                raise ValueError(
                    f"page {page} is released {times} times but has {held} references; freed twice?"
                )
        freed = []
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                self._free.append(page)
                freed.append(page)
        return freed

    def relocate(self, moves: dict[int, int]) -> None:
        """Renames used pages: references of `old` become those of `new`, for all pairs at once.

        Raises:
            ValueError: an unused source, a target taken twice, reserved or outside the pool, or a
                used target that is not itself moved; nothing changes.
        """
        targets = set(moves.values())
        if len(targets) != len(moves):
            raise ValueError(f"moves: a target appears twice in {moves}")
        for old, new in moves.items():
            if old not in self._references:
                raise ValueError(f"page {old} cannot be moved: it is not in use")
            if not self.reserved <= new < self.num_pages:
                raise ValueError(f"page {old} cannot move to {new}: outside the pool or reserved")
            if new in self._references and new not in moves:
                raise ValueError(f"page {old} cannot move to {new}: that page is in use")
        moved = {new: self._references.pop(old) for old, new in moves.items()}
        self._references.update(moved)
        left = [old for old in moves if old not in moved]
        self._free = [page for page in self._free if page not in moved] + left
