"""The places where a worker can hold blocks, their tiers, and which of a worker's groups count.

An event names a medium, and perhaps a group, an owner and a locality. Each combination is an area of its
own, so that a removal from one never removes a block from another. Unknown media count as storage.

Only groups of full attention count, and if a worker has several, a block counts on a tier if all of them
hold it there. A prefix match says nothing about a group with a sliding window or a recurrent state: an
engine with such groups may be able to use less of a prefix than the index says, as with every other indexer
of these events. A group whose events do not name its kind counts if it is the first, or was known before.

Not for several threads at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier.events.types import MEDIUM_CPU, MEDIUM_GPU, MEDIUM_STORAGE, BlockStored
from kvtier.events.wire import Place
from kvtier.index.base import MAX_AREAS, IndexArea, StorageTier, Table

PLACES: tuple[Place, ...] = tuple((medium, 0, "", "") for medium in (MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE))
"""The places that every index has from the start, in the order of their areas."""

FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")

_MOST = 64  # the most groups to remember; no engine has so many
_TIERS = {
    StorageTier.GPU: ("GPU", "DEVICE", "G1"),
    StorageTier.CPU: ("CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "HOST_PINNED", "G2"),
}
_TIER_OF = {medium: tier for tier, media in _TIERS.items() for medium in media}


def tier_of(medium: str) -> StorageTier:
    """Return the tier of a medium, in upper or lower case."""
    return _TIER_OF.get(medium.upper(), StorageTier.STORAGE)


class Areas:
    """The areas of an index: one for each place in which any worker holds blocks."""

    def __init__(self) -> None:
        self._by_place = {place: number for number, place in enumerate(PLACES)}
        self._groups = {0: 0}

    def get(self, place: Place) -> int | None:
        """Return the area of a place."""
        return self._by_place.get(place)

    def needed(self, groups: Iterable[int]) -> int:
        """Return a bit for each of these groups; all bits, which no worker has, if one has no number."""
        needed = 0
        for group in groups:
            number = self._group(group)
            needed |= (1 << MAX_AREAS) - 1 if number is None else 1 << number
        return needed

    def _group(self, group: int) -> int | None:
        """Return the number of a group; `None` if no more are possible."""
        if group not in self._groups and len(self._groups) < MAX_AREAS:
            self._groups[group] = len(self._groups)
        return self._groups.get(group)

    def make(self, place: Place, table: Table) -> int | None:
        """Return a place's area, and add it to the table if it is new; `None` if no more are possible."""
        number = self._by_place.get(place)
        group = self._group(place[1])
        if number is None and group is not None:
            number = table.add_area(IndexArea(tier_of(place[0]), group))
            if number is not None:
                self._by_place[place] = number
        return number


class Groups:
    """The groups of a worker that count, by their `group_idx`."""

    def __init__(self) -> None:
        self.counted: set[int] = set()
        # Number of blocks left out because the kind of their group was not known, by group.
        self.unclear: Counter[int] = Counter()
        self._others: set[int] = set()  # groups of another kind than full attention

    @property
    def first_counts(self) -> bool | None:
        """Whether the first group counts; `None` if no group is known."""
        return 0 in self.counted or (False if self.counted or 0 in self._others else None)

    def admit(self, event: BlockStored) -> bool:
        """Say whether an event's group counts, and learn the group's kind from the event."""
        group, kind = event.group_idx or 0, event.kv_cache_spec_kind
        if kind is None and group not in self._others and (group == 0 or group in self.counted):
            kind = FULL_ATTENTION[0]
        if kind in FULL_ATTENTION:
            if len(self.counted) < _MOST:
                self.counted.add(group)
            return True
        if kind is not None:
            self.counted.discard(group)
            self.unclear.pop(group, None)
            if len(self._others) < _MOST:
                self._others.add(group)
        elif group not in self._others and (group in self.unclear or len(self.unclear) < _MOST):
            self.unclear[group] += len(event.block_hashes)
        return False

    def clear(self) -> None:
        """Forget all groups."""
        self.counted.clear()
        self.unclear.clear()
        self._others.clear()
