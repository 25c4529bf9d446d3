"""Ring-slot allocation: one slot a request, never shared."""

from __future__ import annotations

from flash_qsa.cache.pages import CacheExhaustedError


def ring_capacity(compress_ratio: int, draft_tokens: int = 0) -> int:
    """Rows of a ring slot: the open group and the draft window, in whole groups.

    A verify step writes its draft keys while the group that they complete still needs up to C - 1
    older ones, and a rejected draft must leave those in place: C + drafts rows.
    """
    if compress_ratio < 1 or draft_tokens < 0:
        raise ValueError(
            "compress_ratio must be at least 1 and draft_tokens at least 0, got "
            f"{compress_ratio} and {draft_tokens}"
        )
    return -(-(compress_ratio + draft_tokens) // compress_ratio) * compress_ratio


def require_ring_capacity(capacity: int, compress_ratio: int, draft_tokens: int) -> None:
    """Refuses a ring in which a draft window would overwrite raw keys that are still needed."""
    if capacity < compress_ratio + draft_tokens:
        raise ValueError(
            f"ring_capacity: {capacity} rows cannot hold an open group of compress_ratio "
            f"{compress_ratio} and {draft_tokens} draft tokens; at least "
            f"{compress_ratio + draft_tokens} are needed"
        )


class RingAllocator:
    """Hands out ring slots `reserved` … `num_slots` - 1, each to one request.

    Args:
        num_slots: slots of the pool, reserved ones included.
        reserved: leading slots that are never handed out.

    Raises:
        ValueError: sizes that leave no slot.
    """

    def __init__(self, num_slots: int, *, reserved: int = 0) -> None:
        if reserved < 0 or num_slots <= reserved:
            raise ValueError(
                f"num_slots: {num_slots} slots of which {reserved} are reserved leave none"
            )
        self.num_slots = num_slots
        self.reserved = reserved
        self._free = list(range(num_slots - 1, reserved - 1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self) -> int:
        """Takes a slot.

        Raises:
            CacheExhaustedError: none is free.
        """
        if not self._free:
            raise CacheExhaustedError(
                f"a ring slot is needed, 0 of {self.num_slots - self.reserved} are free"
            )
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back.

        Raises:
            ValueError: a slot that is not in use.
        """
        if slot not in self._used:
            raise ValueError(f"ring slot {slot} is not in use (freed twice?)")
        self._used.remove(slot)
        self._free.append(slot)
