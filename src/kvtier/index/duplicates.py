"""How many copies of a block a worker holds beyond the first, and the allowance of bytes for all that is
beside the table.

vLLM sends a store and a removal for every physical copy of a block. Second copies are rare, so only they are
counted; one that does not fit is dropped and counted as such, and its block is forgotten at its first
removal: too early, never too late. Not for several threads at once.
"""

from __future__ import annotations

__all__ = ["Allowance", "DuplicateCounts"]

_COUNT_BYTES = 256  # a pair of ints and its place in a dict that has just doubled


class Allowance:
    """Bytes that several owners share."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` bytes in all."""
        self.limit, self.used = limit, 0

    def take(self, size: int) -> bool:
        """Take so many bytes; `False`, and nothing taken, where they are not left."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """Give bytes back."""
        self.used -= size


class DuplicateCounts:
    """How many copies of a block one worker holds beyond the first."""

    def __init__(self, allowance: Allowance) -> None:
        """Remember as much as the allowance has room for."""
        self.dropped = 0  # since it was last cleared
        self._allowance = allowance
        self._more: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._more)

    def add(self, area: int, block_hash: int) -> None:
        """Count one more copy of a block that is held already."""
        more = self._more.get((area, block_hash), 0)
        if more or self._allowance.take(_COUNT_BYTES):
            self._more[area, block_hash] = more + 1
        else:
            self.dropped += 1

    def take(self, area: int, block_hash: int) -> bool:
        """Count one copy less; `False` where there is but one, which is not counted here."""
        more = self._more.get((area, block_hash), 0)
        if more > 1:
            self._more[area, block_hash] = more - 1
        elif more:
            del self._more[area, block_hash]
            self._allowance.give(_COUNT_BYTES)
        return more > 0

    def clear(self) -> None:
        """Forget all duplicates."""
        self._allowance.give(_COUNT_BYTES * len(self._more))
        self._more.clear()
        self.dropped = 0

    def bytes(self) -> int:
        """Return what is taken of the allowance."""
        return _COUNT_BYTES * len(self._more)
