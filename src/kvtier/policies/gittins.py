"""`GittinsPolicy`: keep the chunks that promise the most hits for the time that they take a slot.

Chunks are in classes by the number of their uses and by how the last request that used them ended: the
length of its answer, and whether it called a tool. A `ReuseModel` learns for each class when its chunks come
back, and derives an index for each class and age. Within a class the oldest chunk leaves first; between the
oldest chunks of all classes, the lowest index decides. A new chunk whose index is clearly lower than that of
the chunk that would have to leave is not taken.

Chunks that left, or were not taken, are remembered for a while (six for each slot, 35 bytes each), so that
the model also learns of uses that came too late. The model counts a sample of a few thousand slots, which is
enough for its statistics and bounds its work.

A use is counted when its request ends: the first end after a chunk was stored is that of the request that
stored it, and begins the first idle time. Scheduler thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.policies.base import UNKNOWN_ENDING, CachePolicy, Ending, KeysOf, Slots
from kvtier.policies.reuse import AGES, NUM_BINS, NUM_CLASSES, ReuseModel, bins_of, classes_of
from kvtier.policies.slots import ABSENT, ClassLists, GhostLists

_GHOSTS = 6
"""Chunks remembered after they left, for each slot."""
_SAMPLED = 4096
"""About how many slots are sampled for the statistics."""
_DERIVE_AFTER = 64
"""Ends of requests between two derivations of the indices."""
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
        self._num_ends = 0
        self.clear()

    def clear(self) -> None:
        """Forget all chunks. What was learnt of when chunks come back stays true."""
        self._lists = ClassLists(self.capacity, NUM_CLASSES)
        self._slots = _Chunks(self.capacity)
        self._ghosts = GhostLists(_GHOSTS * self.capacity, 1)
        self._gone = _Chunks(_GHOSTS * self.capacity)

    # -- uses --------------------------------------------------------------------------------------

    def insert(self, slots: Slots, keys: list[OffloadKey]) -> None:
        chunks = self._slots
        chunks.uses[slots] = self._take_ghosts(keys)
        chunks.stamps[slots] = self.clock()
        chunks.is_idle[slots] = False
        self._classify(slots, None)

    def touch(self, slots: Slots, reused: npt.NDArray[np.bool_]) -> None:
        self.end_request(slots, reused, UNKNOWN_ENDING)

    def end_request(self, slots: Slots, reused: npt.NDArray[np.bool_], ending: Ending) -> None:
        chunks, now = self._slots, self.clock()
        used = slots[reused & chunks.is_idle[slots]]
        self._count_uses(chunks, used, now)
        chunks.uses[used] = _one_more(chunks.uses[used])
        chunks.stamps[slots] = now
        chunks.is_idle[slots] = True
        self._classify(slots, ending)
        self._num_ends += 1
        if self._num_ends % _DERIVE_AFTER == 0:
            self._derive(now)

    def _classify(self, slots: Slots, ending: Ending | None) -> None:
        classes = classes_of(self._slots.uses[slots], ending)
        self._slots.classes[slots] = classes
        self._lists.use(slots, classes)

    def _take_ghosts(self, keys: list[OffloadKey]) -> npt.NDArray[np.uint8]:
        """Forget chunks that come back, count their uses, and return the uses of each key with this one."""
        uses = np.ones(len(keys), dtype=np.uint8)
        ghosts = self._ghosts.recall(keys)
        if ghosts is not None:
            known = ghosts != ABSENT
            ghosts = ghosts[known]
            uses[known] = _one_more(self._gone.uses[ghosts])
            self._count_uses(self._gone, ghosts[self._gone.is_idle[ghosts]], self.clock())
            self._gone.is_idle[ghosts] = False
        return uses

    # -- learning ----------------------------------------------------------------------------------

    def _sampled(self, numbers: Slots) -> Slots:
        return numbers if self._every == 1 else numbers[numbers % self._every == 0]

    def _count_uses(self, chunks: _Chunks, numbers: Slots, now: float) -> None:
        numbers = self._sampled(numbers)
        if len(numbers):
            self.model.count_uses(chunks.classes[numbers], now - chunks.stamps[numbers])

    def _count_given_up(self, chunks: _Chunks, numbers: Slots) -> None:
        numbers = self._sampled(numbers[chunks.is_idle[numbers]])
        if len(numbers):
            self.model.count_given_up(chunks.classes[numbers], self.clock() - chunks.stamps[numbers])

    def _derive(self, now: float) -> None:
        counts = np.zeros(NUM_CLASSES * NUM_BINS)
        for chunks in (self._slots, self._gone):
            idle = chunks.is_idle[:: self._every]
            ages = now - chunks.stamps[:: self._every][idle]
            places = chunks.classes[:: self._every][idle].astype(np.int64) * NUM_BINS + bins_of(ages)
            counts += np.bincount(places, minlength=len(counts))
        self.model.derive(counts.reshape(NUM_CLASSES, NUM_BINS))

    # -- leaving -----------------------------------------------------------------------------------

    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        return self._leave(self.coldest(count, evictable), keys_of)

    def evict_for(
        self, newcomers: list[OffloadKey], count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf
    ) -> Slots:
        victims = self.coldest(count, evictable)
        taken = self._num_worth(newcomers, victims)
        if taken < len(victims):
            self._refuse(newcomers[taken - len(victims) :])
        return self._leave(victims[:taken], keys_of)

    def _num_worth(self, newcomers: list[OffloadKey], victims: Slots) -> int:
        """Return how many of the victims should leave for newcomers, of which the last are refused first."""
        if not len(victims):
            return 0
        ages = self.clock() - self._slots.stamps[victims]
        needed = _ADMISSION * self.model.indices[self._slots.classes[victims], bins_of(ages)]
        offered = self.model.indices[classes_of(self._uses_with_this(newcomers[-len(victims) :])), 0]
        if offered.min() >= needed.max():
            return len(victims)
        taken, refused = 0, 0
        while taken + refused < len(victims):
            if offered[-1 - refused] < needed[taken]:
                refused += 1
            else:
                taken += 1
        return taken

    def _uses_with_this(self, keys: list[OffloadKey]) -> npt.NDArray[np.uint8]:
        """Return the uses of absent chunks, with the one that is beginning."""
        uses = np.ones(len(keys), dtype=np.uint8)
        ghosts = self._ghosts.find(keys)
        if ghosts is not None:
            known = ghosts != ABSENT
            uses[known] = _one_more(self._gone.uses[ghosts[known]])
        return uses

    def _refuse(self, keys: list[OffloadKey]) -> None:
        uses = self._take_ghosts(keys)
        self._remember(keys, uses, classes_of(uses), self.clock(), is_idle=True)

    def _leave(self, slots: Slots, keys_of: KeysOf) -> Slots:
        """Unrank slots and remember their chunks."""
        chunks = self._slots
        self._lists.drop(slots)
        self._remember(
            keys_of(slots), chunks.uses[slots], chunks.classes[slots], chunks.stamps[slots],
            is_idle=chunks.is_idle[slots],
        )  # fmt: skip
        chunks.is_idle[slots] = False
        return slots

    def _remember(
        self,
        keys: list[OffloadKey],
        uses: npt.NDArray[np.uint8],
        classes: npt.NDArray[np.integer],
        stamps: npt.NDArray[np.float64] | float,
        *,
        is_idle: npt.NDArray[np.bool_] | bool,
    ) -> None:
        gone, numbers = self._gone, self._ghosts.remember(0, keys)
        self._count_given_up(gone, numbers)  # those that they push out
        gone.uses[numbers], gone.classes[numbers] = uses, classes
        gone.stamps[numbers], gone.is_idle[numbers] = stamps, is_idle

    def remove(self, slots: Slots) -> None:
        self._count_given_up(self._slots, slots)
        self._slots.is_idle[slots] = False
        self._lists.drop(slots)

    # -- reports -----------------------------------------------------------------------------------

    def ranked(self) -> Slots:
        return self.coldest(self.capacity, np.ones(self.capacity, dtype=np.bool_))

    def coldest(self, count: int, evictable: npt.NDArray[np.bool_]) -> Slots:
        bounds = self.clock() - AGES
        bounds[0] = np.inf
        return self._lists.order(
            count, evictable, self._slots.stamps, bounds, self.model.indices.reshape(-1)
        )

    def learnt(self) -> bytes:
        return self.model.to_bytes()

    def take_learnt(self, data: bytes) -> bool:
        return self.model.take_bytes(data)

    def check(self) -> None:
        if not np.isfinite(self.model.indices).all():
            raise IntegrityError("gittins: expected finite indices")
        if (self._slots.classes >= NUM_CLASSES).any():
            raise IntegrityError("gittins: a slot has a class that there is not")


class _Chunks:
    """What is known of chunks, by slot, or by position among those that have left."""

    def __init__(self, count: int) -> None:
        self.stamps = np.zeros(count)
        """The time of the last use."""
        self.uses = np.zeros(count, dtype=np.uint8)
        self.classes = np.zeros(count, dtype=np.uint8)
        self.is_idle = np.zeros(count, dtype=np.bool_)
        """Whether the chunk is idle, so that its next use is counted."""


def _one_more(uses: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.minimum(uses, 254) + np.uint8(1)
