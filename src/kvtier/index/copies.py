"""How many copies of a block a worker holds beyond the first, for engines that announce each of them.

vLLM sends a store and a removal for every physical copy of a block. Copies are rare, so only they are remembered; what
does not fit is dropped and counted, and such a block is forgotten at its first removal: too early, never too late.
Not for several threads at once.
"""

from __future__ import annotations

__all__ = ["Copies"]


class Copies:
    """Counts of second and further copies."""

    def __init__(self, limit: int = 100_000) -> None:
        """Remember at most `limit` blocks with more than one copy."""
        self.limit = limit
        self.dropped = 0
        self._more: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._more)

    def add(self, lane: int, block_hash: int) -> None:
        """Count one more copy of a block that is held already."""
        more = self._more.get((lane, block_hash), 0)
        if more or len(self._more) < self.limit:
            self._more[lane, block_hash] = more + 1
        else:
            self.dropped += 1

    def take(self, lane: int, block_hash: int) -> bool:
        """Count one copy less; `False` where there is but one, which is not counted here."""
        more = self._more.get((lane, block_hash), 0)
        if more > 1:
            self._more[lane, block_hash] = more - 1
        elif more:
            del self._more[lane, block_hash]
        return more > 0

    def clear(self) -> None:
        """Forget all copies."""
        self._more.clear()
