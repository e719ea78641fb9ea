"""`GittinsPolicy`: keep the chunks that promise the most hits for the time that they take a slot.

Chunks are in classes by the number of their uses and by how the last request that used them ended: the
length of its answer, and whether it called a tool. A `ReuseModel` learns for each class when its chunks come
back, and derives an index for each class and age. Within a class the oldest chunk leaves first; between the
oldest chunks of all classes, the lowest index decides. A new chunk whose index is clearly lower than that of
the chunk that would have to leave is not taken.

Chunks that left, or were not taken, are remembered for a while (six for each slot, 35 bytes each), so that
the model also learns of uses that came too late. The model counts a sample of a few thousand slots, which is
enough for its statistics and bounds its work.

A chunk is idle from the end of a request that used it until its next use. A request never pushes out what it
has stored itself: without its beginning, the rest of a long prompt is worth nothing. Scheduler thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.policies.base import CachePolicy, Ending, KeysOf, Slots
from kvtier.policies.reuse import NUM_CLASSES, ReuseModel, ending_number
from kvtier.policies.slots import CHUNK, Numbers

_GHOSTS = 6
"""Chunks remembered after they left, for each slot."""
_SAMPLED = 2048
"""About how many slots are sampled for the statistics."""
_DERIVE_AFTER = 64
"""Ends of requests between two derivations of the indices; at the beginning fewer."""
_ADMISSION = 0.8
"""A new chunk is taken if its index is at least this share of the index of the chunk that has to leave: its
class is not known before its request ends, and a chunk that is not taken cannot show what it is worth.
"""


class GittinsPolicy(CachePolicy):
    """A ranking of slots by the learnt rate of hits that each promises."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.model = ReuseModel()
        self._every = max(1, capacity // _SAMPLED)
        self._next_ends = _DERIVE_AFTER // 16
        self._counted = self._ends_left = 0
        self.clear()

    def clear(self) -> None:
        """Forget all chunks. What was learnt of when chunks come back stays true."""
        self.chunks = np.zeros(self.capacity, dtype=CHUNK)
        """What is known of the chunk in each slot."""
        self.gone = np.zeros(_GHOSTS * self.capacity, dtype=CHUNK)
        """What is known of chunks that have left."""
        self._lists = self.model.make_lists(self.chunks, self.gone, self._every)
        self._num_samples = sum(-(-len(chunks) // self._every) for chunks in (self.chunks, self.gone))
        self._begin_count()

    # -- uses --------------------------------------------------------------------------------------

    def insert(self, slots: Slots, keys: list[OffloadKey]) -> None:
        self._lists.insert(slots, keys, self.clock())

    def touch(self, slots: Slots, reused: npt.NDArray[np.bool_]) -> None:
        self._lists.use(slots, reused, self.clock(), ending_number(None))

    def end_request(self, slots: Slots, reused: npt.NDArray[np.bool_], ending: Ending) -> None:
        now = self.clock()
        self._lists.use(slots, reused, now, ending_number(ending))
        self.model.count_request(len(slots) / self._every)
        self._count_idle(now)

    # -- learning ----------------------------------------------------------------------------------

    def _count_idle(self, now: float) -> None:
        """Count a part of the chunks that are idle; after the last part, derive the indices.

        No step of the scheduler pays for all of them. That they are not counted at one time does not matter.
        """
        stop = self._counted + -(-(self._num_samples - self._counted) // self._ends_left)
        self._lists.count_idle(self._counted, stop, now, self._idle)
        self._counted = stop
        self._ends_left -= 1
        if not self._ends_left:
            self.model.derive(self._idle)
            self._next_ends = min(2 * self._next_ends, _DERIVE_AFTER)
            self._begin_count()

    def _begin_count(self) -> None:
        self._idle = self.model.new_counts()
        self._counted = 0
        self._ends_left = self._next_ends

    # -- leaving -----------------------------------------------------------------------------------

    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        now = self.clock()
        victims = self._lists.order(count, evictable, now)
        self._lists.leave(victims, now)
        return victims

    def evict_for(
        self,
        newcomers: list[OffloadKey],
        count: int,
        evictable: npt.NDArray[np.bool_],
        keys_of: KeysOf,
        stored_by: Slots,
        user: int,
    ) -> Slots:
        now = self.clock()
        return self._lists.take_for(newcomers, count, evictable, now, _ADMISSION, stored_by, user)

    def refuse(self, newcomers: list[OffloadKey]) -> None:
        self._lists.refuse(newcomers, self.clock())

    def worth(self, newcomers: list[OffloadKey]) -> Numbers | None:
        if not self.model.has_learnt():
            return None
        return np.array(self._lists.offered(newcomers)) / self.model.newest_index()

    def remove(self, slots: Slots) -> None:
        self._lists.remove(slots, self.clock())

    # -- reports -----------------------------------------------------------------------------------

    def ranked(self) -> Slots:
        return self.coldest(self.capacity, np.ones(self.capacity, dtype=np.bool_))

    def coldest(self, count: int, evictable: npt.NDArray[np.bool_]) -> Slots:
        return self._lists.order(count, evictable, self.clock())

    def learnt(self) -> bytes:
        return self.model.to_bytes()

    def take_learnt(self, data: bytes) -> bool:
        return self.model.take_bytes(data)

    def check(self) -> None:
        if not np.isfinite(self.model.indices).all():
            raise IntegrityError("gittins: expected finite indices")
        if (self.chunks["class"] >= NUM_CLASSES).any():
            raise IntegrityError("gittins: a slot has a class that there is not")
