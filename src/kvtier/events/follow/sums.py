"""The running sums of what a publisher holds, and whether they are known to be complete.

Our publishers mark batches with the number of blocks that they hold and a digest of them. A mark that equals
the running sums confirms them, but only if nothing was lost: losses can cancel in the sums and still leave
wrong blocks (a lost store, a removal and a store that arrive, a lost removal). After a loss the sums need a
snapshot, or a clear of every rank heard of before the loss and then a mark. Not for several threads at once.
"""

from __future__ import annotations

from kvtier.errors import IntegrityError
from kvtier.events.types import Mark
from kvtier.events.wire import Change

MAX_RANKS = 4096
"""How many ranks of one publisher are tracked; with more, no replica is exact."""
_U64 = (1 << 64) - 1


class RankSums:
    """The sums of each rank's blocks.

    A mark covers all ranks together, and a clear only its batch's rank. A lost batch may have changed any
    rank, even one never heard of. So a loss *tears* the ranks heard of before it, and a clear mends one.
    When no rank is torn, the sums can lack only the blocks of ranks that were first heard of since, or never.
    A mark with the same number of blocks shows that there are no such blocks.
    """

    __slots__ = ("_fresh", "_is_crowded", "_ranks", "_torn", "is_open")

    def __init__(self, *, is_open: bool = True) -> None:
        """Begin with nothing; `is_open` says that the publisher may have held blocks before."""
        self.is_open = is_open  # something may have been lost since the last proof
        self._ranks: dict[int, list[int]] = {}  # blocks, and their digest before it is reduced
        self._torn: set[int] = set()  # heard of before a loss, and not cleared since
        self._fresh: set[int] = set()  # first heard of after a loss, and not cleared since
        self._is_crowded = False

    def add(self, rank: int, change: Change) -> None:
        """Count an applied batch of a rank."""
        cleared, blocks, digest = change
        sums = self._ranks.get(rank) or self._add_rank(rank)
        if cleared:
            sums[0] = sums[1] = 0
            self._torn.discard(rank)
            self._fresh.discard(rank)
        sums[0] += blocks
        sums[1] += digest

    def _add_rank(self, rank: int) -> list[int]:
        if len(self._ranks) >= MAX_RANKS:
            self._is_crowded = self.is_open = True
            return [0, 0]
        if self.is_open:
            self._fresh.add(rank)
        return self._ranks.setdefault(rank, [0, 0])

    @property
    def blocks(self) -> int:
        """The number of held blocks."""
        return sum(blocks for blocks, _ in self._ranks.values())

    @property
    def digest(self) -> int:
        """The digest of all held blocks."""
        return sum(digest for _, digest in self._ranks.values()) & _U64

    def add_loss(self) -> None:
        """Record that a batch of an unknown rank was lost."""
        self.is_open = True
        self._torn.update(self._ranks)
        self._fresh.clear()

    def confirm(self, mark: Mark) -> bool:
        """Accept a mark as a proof if it is one; return whether it is."""
        if self._torn or self._is_crowded or (mark.blocks, mark.digest) != (self.blocks, self.digest):
            return False
        self.is_open = False
        self._fresh.clear()
        return True

    def are_whole(self, *, is_stock: bool) -> bool:
        """Return whether nothing can be missing.

        A publisher that is known to be a stock one has only the ranks that it has named.
        """
        if not self.is_open:
            return True
        return is_stock and bool(self._ranks) and not (self._torn or self._fresh or self._is_crowded)

    def check(self) -> None:
        """Raise `IntegrityError` if proven sums have open ranks, or a rank is unknown."""
        if not (self._torn | self._fresh) <= self._ranks.keys() or self._torn & self._fresh:
            raise IntegrityError(
                f"ranks {self._torn} are torn and {self._fresh} fresh, but {set(self._ranks)} were heard of"
            )
        if not self.is_open and (self._torn or self._fresh or self._is_crowded):
            raise IntegrityError(f"sums count as proven, but ranks {self._torn | self._fresh} are not")
