"""Least recently used: the chunk that was unused for the longest time leaves first.

A store and a touch are uses. A read is not, so that the time of a transfer does not matter. Scheduler thread
only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey
from kvtier.policies.base import CachePolicy, KeysOf, Slots
from kvtier.policies.slots import RecencyList


class LRUPolicy(CachePolicy):
    """A ranking of slots by their last use."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recency = RecencyList(capacity)

    def insert(self, slots: Slots, keys: list[OffloadKey]) -> None:
        self._recency.use(slots)

    def touch(self, slots: Slots, reused: npt.NDArray[np.bool_]) -> None:
        self._recency.use(slots)

    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        return self._recency.take(count, evictable)

    def remove(self, slots: Slots) -> None:
        self._recency.drop(slots)

    def clear(self) -> None:
        self._recency = RecencyList(self.capacity)

    def ranked(self) -> Slots:
        return self._recency.slots()

    def coldest(self, count: int, evictable: npt.NDArray[np.bool_]) -> Slots:
        return self._recency.coldest(count, evictable)
