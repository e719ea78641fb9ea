"""`GittinsPolicy`: keep the chunks that promise the most hits for the time that they take a slot.

Chunks are in classes by the number of their uses and by how the last request that used them ended: the
length of its answer, and whether it called a tool. A `ReuseModel` learns for each class when its chunks come
back, and derives an index for each class and age. Within a class the oldest chunk leaves first; between the
oldest chunks of all classes, the lowest index decides. A new chunk whose index is clearly lower than that of
the chunk that would have to leave is not taken.

Chunks that left, or were not taken, are remembered for a while (six for each slot, 35 bytes each), so that
the model also learns of uses that came too late. The model counts a sample of a few thousand slots, which is
enough for its statistics and bounds its work.

A chunk is idle from the end of a request that used it until its next use. While a request uses it, or has
stored it and goes on, it leaves after all others: a long prompt must not push its own beginning out.
Scheduler thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.policies.base import CachePolicy, Ending, KeysOf, Slots
from kvtier.policies.reuse import AGES, NO_ENDING, NUM_BINS, NUM_CLASSES, ReuseModel, bins_of, classes_of
from kvtier.policies.slots import ABSENT, ClassLists, GhostLists

_GHOSTS = 6
"""Chunks remembered after they left, for each slot."""
_SAMPLED = 2048
"""About how many slots are sampled for the statistics."""
_DERIVE_AFTER = 64
"""Ends of requests between two derivations of the indices; at the beginning fewer."""
_RUNNING = 60.0
"""Seconds after which a chunk no longer counts as part of a request that runs: with `write: evict`, a disk
is not told how the request ended that stored it.
"""
_ADMISSION = 0.8
"""A new chunk is taken if its index is at least this share of the index of the chunk that has to leave: its
class is not known before its request ends, and a chunk that is not taken cannot show what it is worth.
"""


_CHUNK = np.dtype([("stamp", "f8"), ("uses", "u1"), ("class", "u1"), ("is_idle", "?")], align=True)


class GittinsPolicy(CachePolicy):
    """A ranking of slots by the learnt rate of hits that each promises."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.model = ReuseModel()
        self._every = max(1, capacity // _SAMPLED)
        self._num_ends, self._derive_at = 0, _DERIVE_AFTER // 16
        self._ranking = self._rank()
        self.clear()

    def clear(self) -> None:
        """Forget all chunks. What was learnt of when chunks come back stays true."""
        self._lists = ClassLists(self.capacity, NUM_CLASSES)
        self._slots = _Chunks(self.capacity)
        self._ghosts = GhostLists(_GHOSTS * self.capacity, 1)
        self._gone = _Chunks(_GHOSTS * self.capacity)

    # -- uses --------------------------------------------------------------------------------------

    def insert(self, slots: Slots, keys: list[OffloadKey]) -> None:
        new = np.zeros(len(slots), dtype=_CHUNK)
        uses = self._take_ghosts(keys)
        classes = classes_of(uses)
        new["uses"], new["class"], new["stamp"] = uses, classes, self.clock()
        self._slots.all[slots] = new
        self._lists.use(slots, classes)

    def touch(self, slots: Slots, reused: npt.NDArray[np.bool_]) -> None:
        self._use(slots, reused, None)

    def end_request(self, slots: Slots, reused: npt.NDArray[np.bool_], ending: Ending) -> None:
        self._use(slots, reused, ending)
        self._num_ends += 1
        if self._num_ends >= self._derive_at:
            self._derive_at += min(self._derive_at, _DERIVE_AFTER)
            self._derive(self.clock())

    def _use(self, slots: Slots, reused: npt.NDArray[np.bool_], ending: Ending | None) -> None:
        """Count uses of idle chunks. They are idle again if the request has ended."""
        chunks, now = self._slots, self.clock()
        used = slots[reused & chunks.is_idle[slots]]
        self._count_uses(chunks, used, now)
        chunks.uses[used] = _one_more(chunks.uses[used])
        chunks.stamps[slots] = now
        chunks.is_idle[slots] = ending is not None
        self._classify(slots, ending)

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
        self._ranking = self._rank()

    def _rank(self) -> npt.NDArray[np.float64]:
        """Return the indices by which chunks leave."""
        self._least_index = float(self.model.indices[classes_of(np.ones(1, dtype=np.uint8)), 0].item())
        ranking = self.model.indices.copy()
        ranking[NO_ENDING, AGES < _RUNNING] = np.inf
        return ranking

    # -- leaving -----------------------------------------------------------------------------------

    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        return self._leave(self.coldest(count, evictable), keys_of)

    def evict_for(
        self, newcomers: list[OffloadKey], count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf
    ) -> Slots:
        victims = self.coldest(count, evictable)
        taken = self._num_worth(newcomers, victims)
        if taken < len(victims):
            self.refuse(newcomers[taken - len(victims) :])
        return self._leave(victims[:taken], keys_of)

    def _num_worth(self, newcomers: list[OffloadKey], victims: Slots) -> int:
        """Return how many of the victims should leave for newcomers, of which the last are refused first."""
        if not len(victims):
            return 0
        ages = self.clock() - self._slots.stamps[victims]
        needed = _ADMISSION * self._ranking[self._slots.classes[victims], bins_of(ages)]
        most_needed = needed.max()
        if self._least_index >= most_needed:  # that of a chunk that nobody has used before
            return len(victims)
        offered = self.model.indices[classes_of(self._uses_with_this(newcomers[-len(victims) :])), 0]
        if offered.min() >= most_needed:
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

    def refuse(self, newcomers: list[OffloadKey]) -> None:
        refused = np.empty(len(newcomers), dtype=_CHUNK)
        uses = self._take_ghosts(newcomers)
        refused["uses"], refused["class"] = uses, classes_of(uses)
        refused["stamp"], refused["is_idle"] = self.clock(), True
        self._remember(newcomers, refused)

    def _leave(self, slots: Slots, keys_of: KeysOf) -> Slots:
        """Unrank slots and remember their chunks."""
        self._lists.drop(slots)
        self._remember(keys_of(slots), self._slots.all[slots])
        self._slots.is_idle[slots] = False
        return slots

    def _remember(self, keys: list[OffloadKey], chunks: npt.NDArray[np.void]) -> None:
        numbers = self._ghosts.remember(0, keys)
        self._count_given_up(self._gone, numbers)  # those that they push out
        self._gone.all[numbers] = chunks

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
        return self._lists.order(count, evictable, self._slots.stamps, bounds, self._ranking.reshape(-1))

    def learnt(self) -> bytes:
        return self.model.to_bytes()

    def take_learnt(self, data: bytes) -> bool:
        is_taken = self.model.take_bytes(data)
        self._ranking = self._rank()
        return is_taken

    def check(self) -> None:
        if not np.isfinite(self.model.indices).all():
            raise IntegrityError("gittins: expected finite indices")
        if (self._slots.classes >= NUM_CLASSES).any():
            raise IntegrityError("gittins: a slot has a class that there is not")


class _Chunks:
    """What is known of chunks, by slot, or by position among those that have left."""

    def __init__(self, count: int) -> None:
        self.all: npt.NDArray[np.void] = np.zeros(count, dtype=_CHUNK)
        self.stamps: npt.NDArray[np.float64] = self.all["stamp"]
        """The time of the last use."""
        self.uses: npt.NDArray[np.uint8] = self.all["uses"]
        self.classes: npt.NDArray[np.uint8] = self.all["class"]
        self.is_idle: npt.NDArray[np.bool_] = self.all["is_idle"]
        """Whether the chunk is idle, so that its next use is counted."""


def _one_more(uses: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.minimum(uses, 254) + np.uint8(1)
