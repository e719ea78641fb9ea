"""The maps and lists that managers and policies are made of: which chunk is in which slot, slots in order of
use, in one list or by class with what is learnt of their reuse, and keys that were evicted.

Each is written twice: in `native/_slots.c`, for speed, and here, for machines without a C compiler and as
the specification of the C form. `SLOTS_BY` says which form is in use. All take and return batches; in C, a
batch of one key costs some 100 ns a call. Scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey
from kvtier.native import form_of, uses_c
from kvtier.policies.base import Slots

ABSENT = -1
"""The slot number of a key without a slot, and the list number of a key that was not evicted."""
WRITING = -1
"""The number of readers of a slot that is being written."""
Mask = npt.NDArray[np.bool_]
"""A flag for each slot."""
Numbers = npt.NDArray[np.float64]
CHUNK = np.dtype([("stamp", "f8"), ("uses", "u1"), ("class", "u1"), ("is_idle", "?")], align=True)
"""What `ReuseLists` knows of a chunk: the time of its last use, the number of its uses, its class, and
whether it is idle, so that its next use is counted.
"""
Chunks = npt.NDArray[np.void]
_MOST_LIKELY = 0.95


class PythonBook:
    """The map of chunks to the slots of a tier, with the state of each slot.

    A slot is free, or held by a key, or empty: without a key and not free. The three arrays, by slot, are
    kept up to date here, and their maker may read and write them too: the number of readers, or `WRITING`;
    whether the slot is ready and unread; and a number for the request that stored it.
    """

    def __init__(
        self, readers: Slots, evictable: Mask, stored_by: Slots, empty: Slots | None = None, /
    ) -> None:
        """Make a book with all slots free but those that are to be `empty`."""
        self._readers, self._evictable, self._stored_by = readers, evictable, stored_by
        self._slots: dict[OffloadKey, int] = {}
        self._keys: list[OffloadKey | None] = [None] * len(readers)
        taken = set() if empty is None else set(empty.tolist())
        if taken and not 0 <= min(taken) <= max(taken) < len(readers):
            raise ValueError("expected slots of this book")
        self._free = [slot for slot in range(len(readers)) if slot not in taken][::-1]  # a stack
        self._is_free = [slot not in taken for slot in range(len(readers))]

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, key: OffloadKey, /) -> int | None:
        """Return the slot of a key."""
        return self._slots.get(key)

    def leading(self, keys: list[OffloadKey], /) -> int:
        """Count the leading keys that are ready."""
        slots = slot_array([self._slots[key] for key in takewhile(self._slots.__contains__, keys)])
        writing = self._readers[slots] == WRITING
        return int(writing.argmax()) if writing.any() else len(slots)

    def find(self, keys: list[OffloadKey], /) -> Slots:
        """Return the slot of each key, `ABSENT` where it has none."""
        return slot_array([self._slots.get(key, ABSENT) for key in keys])

    def held(self, keys: list[OffloadKey], /) -> Slots:
        """Return the slots of the keys that have one, in the order of the keys, each once."""
        return slot_array([self._slots[key] for key in dict.fromkeys(keys) if key in self._slots])

    def missing(self, keys: list[OffloadKey], /) -> list[OffloadKey]:
        """Return the keys without a slot, each once."""
        return [key for key in dict.fromkeys(keys) if key not in self._slots]

    def reserve(self, user: int, keys: list[OffloadKey], /) -> Slots:
        """Give each new key a free slot, which is then being written. `ValueError`: nothing has changed."""
        if len(keys) > len(self._free):
            raise ValueError(f"expected at most {len(self._free)} keys, one for each free slot")
        if len(self.missing(keys)) < len(keys):
            raise ValueError("expected keys without a slot")
        slots = [self._free.pop() for _ in keys]
        for slot, key in zip(slots, keys, strict=True):
            self._slots[key] = slot
            self._keys[slot] = key
            self._is_free[slot] = False
        self._readers[slots] = WRITING
        self._stored_by[slots] = user
        return slot_array(slots)

    def complete(self, keys: list[OffloadKey], /) -> list[OffloadKey]:
        """Make those of the keys ready that are being written, and return them."""
        slots = self.held(keys)
        written = slots[self._readers[slots] == WRITING]
        self._readers[written] = 0
        self._evictable[written] = True
        return self.keys(written)

    def pin(self, slots: Slots, /) -> int:
        """Add a reader to each slot.

        Return the number of slots before the first that is not ready. If it is not all, nothing has changed.
        """
        readers = self._readers_of(slots)
        if WRITING in readers:
            return readers.index(WRITING)
        np.add.at(self._readers, slots, 1)
        self._evictable[slots] = False
        return len(slots)

    def unpin(self, slots: Slots, /) -> int:
        """Take a reader from each slot.

        Return the number of slots before the first without a reader. If it is not all, nothing has changed.
        """
        numbers = slots.tolist()
        left = dict(zip(numbers, self._readers_of(slots), strict=True))
        for done, slot in enumerate(numbers):
            left[slot] -= 1
            if left[slot] < 0:
                return done
        self._readers[slots] = [left[slot] for slot in numbers]
        self._evictable[slots] = [left[slot] == 0 and self._keys[slot] is not None for slot in numbers]
        return len(slots)

    def keys(self, slots: Slots, /) -> list[OffloadKey]:
        """Return the keys of the slots that have one."""
        return [key for slot in slots.tolist() if (key := self._keys[slot]) is not None]

    def release(self, slots: Slots, /) -> list[OffloadKey] | None:
        """Free slots and return their keys.

        `None` means that a slot is not evictable or is named twice; nothing has changed then.
        """
        ours = bool(((slots >= 0) & (slots < len(self._keys))).all()) and len(set(slots.tolist())) == len(
            slots
        )
        if not ours or not self._evictable[slots].all() or len(self.keys(slots)) < len(slots):
            return None
        keys = self.remove(slots)
        self.free(slots)
        return keys

    def remove(self, slots: Slots, /) -> list[OffloadKey]:
        """Empty slots and return their keys."""
        self._evictable[slots] = False
        keys = list(dict.fromkeys(self.keys(slots)))
        for key in keys:
            self._keys[self._slots.pop(key)] = None
        return keys

    def free(self, slots: Slots, /) -> None:
        """Free slots that are empty and not free yet, each named once. `ValueError`: nothing has changed."""
        numbers = slots.tolist()
        empty = all(self._keys[slot] is None and not self._is_free[slot] for slot in numbers)
        if not empty or len(set(numbers)) < len(numbers):
            raise ValueError(f"expected empty slots that are not free, each once, got {numbers}")
        self._readers[slots] = 0
        for slot in numbers:
            self._is_free[slot] = True
        self._free += numbers

    def _readers_of(self, slots: Slots) -> list[int]:
        """Return the number of readers of each slot; `ABSENT` counts as a slot that is being written."""
        if len(slots) and slots.min() != ABSENT:
            return list(self._readers[slots].tolist())
        return [WRITING if slot == ABSENT else self._readers.item(slot) for slot in slots.tolist()]

    def num_free(self) -> int:
        """Count the free slots."""
        return len(self._free)

    def free_slots(self) -> Slots:
        """Return the free slots; the last is used next."""
        return slot_array(self._free)


class PythonGhosts:
    """The last `capacity` keys evicted from each of `num_lists` lists, without those that came back.

    A key has a position: that in its list, and `capacity` more in the second list.
    """

    def __init__(self, capacity: int, num_lists: int, /) -> None:
        self._capacity = capacity
        self._ring: list[OffloadKey | None] = [None] * (capacity * num_lists)
        self._next, self._sizes = [0] * num_lists, [0] * 2
        self._known: dict[OffloadKey, int] = {}

    def remember(self, which: int, keys: list[OffloadKey], /) -> Slots:
        """Remember keys that were evicted from a list, and return their positions."""
        return slot_array([self._add(which, key) for key in keys])

    def _add(self, which: int, key: OffloadKey) -> int:
        if not self._capacity:
            return ABSENT
        position = which * self._capacity + self._next[which]
        self._forget(key)
        if (oldest := self._ring[position]) is not None:
            self._forget(oldest)
        self._ring[position] = key
        self._known[key] = position
        self._sizes[which] += 1
        self._next[which] = (self._next[which] + 1) % self._capacity
        return position

    def find(self, keys: list[OffloadKey], /) -> Slots | None:
        """Return the position of each key, `ABSENT` for unknown keys; `None` if all are unknown."""
        positions = slot_array([self._known.get(key, ABSENT) for key in keys])
        return positions if (positions != ABSENT).any() else None

    def recall(self, keys: list[OffloadKey], /) -> Slots | None:
        """Return what `find` does, and forget the keys."""
        positions = slot_array([self._forget(key) for key in keys])
        return positions if (positions != ABSENT).any() else None

    def position(self, key: OffloadKey) -> int:
        """Return the position of one key."""
        return self._known.get(key, ABSENT)

    def sizes(self) -> tuple[int, int]:
        """Return the number of known keys of each list."""
        return self._sizes[0], self._sizes[1]

    def _forget(self, key: OffloadKey) -> int:
        """Forget a key and return the position that it had."""
        position = self._known.pop(key, ABSENT)
        if position != ABSENT:
            self._ring[position] = None
            self._sizes[position >= self._capacity] -= 1
        return position


class PythonRecency:
    """Up to `capacity` slots from the least to the most recently used."""

    def __init__(self, capacity: int, /) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def use(self, slots: Slots, /) -> None:
        """Make slots the most recent, the first of them most of all. They need not be in the list before."""
        for slot in slots[::-1].tolist():
            self._order[slot] = None
            self._order.move_to_end(slot)

    def renew(self, slots: Slots, /) -> Slots:
        """Use the slots that are in the list, and return the others."""
        held = np.array([slot in self._order for slot in slots.tolist()], dtype=np.bool_)
        self.use(slots[held])
        return slots[~held]

    def drop(self, slots: Slots, /) -> None:
        """Remove those of the slots that are in the list."""
        for slot in slots.tolist():
            self._order.pop(slot, None)

    def take(self, count: int, allowed: Mask, /) -> Slots:
        """Remove and return up to `count` slots with `allowed[slot]`, the least recent first."""
        taken = self.coldest(count, allowed)
        self.drop(taken)
        return taken

    def coldest(self, count: int, allowed: Mask, /) -> Slots:
        """Return the slots that `take` would, but leave them in the list.

        It looks at no slot behind them.
        """
        return slot_array(list(islice((slot for slot in self._order if allowed[slot]), max(0, count))))

    def slots(self) -> Slots:
        """Return all slots, the least recent first."""
        return slot_array(list(self._order))


class PythonReuseLists:
    """The chunks of a tier in lists by class, those that left, and counts of the times that they were idle.

    Each class has a list, from the least to the most recently used slot. The class of a chunk follows from
    its uses (1, 2, 3 to 4, 5 to 8, and so on) and from how the last request that used it ended. The last
    ending stands for a request that has not ended: its chunks are not idle.

    The arrays belong to the caller, who may read them: what is known of the chunk in each slot, and of each
    chunk that has left; the idle times that ended in a use, and those of which nothing more will be known,
    by class and bin of age; the index of each class and bin; the youngest age of each bin; and what
    an index is multiplied by for the order. One slot in `every` is counted, and one chunk that has left.
    """

    def __init__(
        self,
        chunks: Chunks,
        gone: Chunks,
        used: Numbers,
        given_up: Numbers,
        indices: Numbers,
        ages: Numbers,
        lean: Numbers,
        num_endings: int,
        every: int,
        /,
    ) -> None:
        self._chunks, self._gone, self._used, self._given_up = chunks, gone, used, given_up
        self._indices, self._ages, self._lean = indices, ages, lean
        self._num_bins, self._num_endings, self._every = len(ages), num_endings, every
        self._num_classes = len(used) // len(ages)
        self._lists: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(self._num_classes)]
        self._class_of: dict[int, int] = {}
        self._keys: dict[int, OffloadKey] = {}
        self._ghosts = PythonGhosts(len(gone), 1)

    def __len__(self) -> int:
        return len(self._class_of)

    # -- uses --------------------------------------------------------------------------------------

    def insert(self, slots: Slots, keys: list[OffloadKey], now: float, /) -> None:
        """Add new chunks, of requests that go on, the first slot as the most recent of its class."""
        if len(slots) != len(keys):
            raise ValueError("expected a key for each slot")
        running = self._num_endings - 1
        for slot, key in zip(slots.tolist(), keys, strict=True):
            uses = self._recall(key, now)
            self._chunks[slot] = now, uses, self._number_of_class(uses, running), False
            self._keys[slot] = key
        self._link(slots)

    def use(self, slots: Slots, reused: Mask, now: float, ending: int, /) -> None:
        """Count the uses of idle chunks that are reused, and give all the class of this ending."""
        if len(slots) != len(reused):
            raise ValueError("expected a flag for each slot")
        for slot, is_reused in list(zip(slots.tolist(), reused.tolist(), strict=True))[::-1]:
            chunk = self._chunks[slot]
            if is_reused and chunk["is_idle"]:
                self._count(self._used, chunk, slot, now)
                chunk["uses"] = min(255, chunk["uses"] + 1)
            chunk["stamp"], chunk["is_idle"] = now, ending < self._num_endings - 1
            chunk["class"] = self._number_of_class(int(chunk["uses"]), ending)
        self._link(slots)

    def _link(self, slots: Slots) -> None:
        for slot in slots[::-1].tolist():
            self._unlink(slot)
            self._class_of[slot] = kind = int(self._chunks[slot]["class"])
            self._lists[kind][slot] = None

    def _unlink(self, slot: int) -> None:
        if (kind := self._class_of.pop(slot, None)) is not None:
            del self._lists[kind][slot]

    def _number_of_class(self, uses: int, ending: int) -> int:
        by_uses = min((uses - 1).bit_length(), self._num_classes // self._num_endings - 1)
        return by_uses * self._num_endings + ending

    # -- leaving -----------------------------------------------------------------------------------

    def order(self, count: int, allowed: Mask, now: float, /) -> Slots:
        """Return up to `count` slots with `allowed[slot]`, in the order of their index, the lowest first.

        Within a class the order is that of use. The oldest slots of all classes are compared; between equal
        indices, the older slot comes first.
        """
        left = [[slot for slot in each if allowed[slot]][::-1] for each in self._lists]
        ordered: list[int] = []
        while len(ordered) < count and any(left):
            oldest = (slots[-1] for slots in left if slots)
            slot = min(
                oldest, key=lambda slot: (self._index(slot, now, self._lean), self._chunks[slot]["stamp"])
            )
            ordered.append(left[self._class_of[slot]].pop())
        return slot_array(ordered)

    def offered(self, newcomers: list[OffloadKey], /) -> list[float]:
        """Return the index of each new chunk, which a request begins to use."""
        return [self._offered(key) for key in newcomers]

    def _offered(self, key: OffloadKey) -> float:
        position = self._ghosts.position(key)
        uses = 1 if position == ABSENT else min(255, int(self._gone[position]["uses"]) + 1)
        return float(self._indices[self._number_of_class(uses, self._num_endings - 1) * self._num_bins])

    def take_for(
        self,
        newcomers: list[OffloadKey],
        count: int,
        allowed: Mask,
        now: float,
        admission: float,
        stored_by: Slots,
        user: int,
        /,
    ) -> Slots:
        """Remove and return up to `count` slots for newcomers of this user, and remember their chunks.

        The slots are taken in the order of `order`, and none from the first on whose chunk the user has
        stored. A newcomer is worth it if its index is at least `admission` times that of the chunk there.
        The last newcomers are refused first, and remembered as by `refuse`.
        """
        found = self.order(count, allowed, now)
        if len(newcomers) < len(found) or len(stored_by) < len(self._chunks):
            raise ValueError("expected a user for each slot, and a key for each victim")
        others = list(takewhile(lambda slot: stored_by[slot] != user, found.tolist()))
        taken, without = 0, len(newcomers) - len(found)  # newcomers that need no slot of another chunk
        stored = without + len(others)
        while taken < stored - without:
            if self._offered(newcomers[stored - 1]) >= admission * self._index(others[taken], now):
                taken += 1
            else:
                stored -= 1
        self.refuse(newcomers[stored:], now)
        self.leave(found[:taken], now)
        return found[:taken]

    def leave(self, slots: Slots, now: float, /) -> None:
        """Remove slots, and remember their chunks."""
        for slot in slots.tolist():
            if slot in self._class_of:
                self._unlink(slot)
                self._remember(self._keys[slot], tuple(self._chunks[slot]), now)
                self._chunks[slot]["is_idle"] = False

    def refuse(self, keys: list[OffloadKey], now: float, /) -> None:
        """Remember chunks that are not stored, as if they had left at once."""
        for key in keys:
            uses = self._recall(key, now)
            self._remember(key, (now, uses, self._number_of_class(uses, self._num_endings - 1), True), now)

    def remove(self, slots: Slots, now: float, /) -> None:
        """Remove slots, and remember nothing."""
        for slot in slots.tolist():
            self._count(self._given_up, self._chunks[slot], slot, now)
            self._chunks[slot]["is_idle"] = False
            self._unlink(slot)

    def _recall(self, key: OffloadKey, now: float) -> int:
        """Forget a chunk that comes back, count that, and return its uses with this one."""
        positions = self._ghosts.recall([key])
        if positions is None:
            return 1
        gone = self._gone[positions[0]]
        self._count(self._used, gone, int(positions[0]), now)
        gone["is_idle"] = False
        return min(255, int(gone["uses"]) + 1)

    def _remember(self, key: OffloadKey, chunk: tuple[Any, ...], now: float) -> None:
        known = self._ghosts.position(key)
        if known != ABSENT:
            self._gone[known]["is_idle"] = False
        (position,) = self._ghosts.remember(0, [key]).tolist()
        if position != ABSENT:
            self._count(self._given_up, self._gone[position], position, now)  # it is pushed out
            self._gone[position] = chunk

    # -- learning ----------------------------------------------------------------------------------

    def _bin(self, chunk: np.void, now: float) -> int:
        """Return the last bin whose youngest age is not above the age of a chunk."""
        return max(0, int(np.searchsorted(self._ages, now - chunk["stamp"], side="right")) - 1)

    def _index(self, slot: int, now: float, lean: Numbers | None = None) -> float:
        """Return the index of a chunk at its age: between those of the beginnings of two bins."""
        chunk, ages = self._chunks[slot], self._ages
        age, bin_ = float(now - chunk["stamp"]), self._bin(chunk, now)
        row = self._indices.reshape(-1, self._num_bins)[chunk["class"]]
        row = row if lean is None else row * lean
        begin, index = float(ages[bin_]), float(row[bin_])
        if age <= begin:
            return index
        if bin_ + 1 == self._num_bins:
            return index * begin / age if begin > 0 else index
        part = (age - begin) / (float(ages[bin_ + 1]) - begin)
        return index + part * (float(row[bin_ + 1]) - index)

    def _count(self, counts: Numbers, chunk: np.void, number: int, now: float) -> None:
        if chunk["is_idle"] and number % self._every == 0:
            counts[int(chunk["class"]) * self._num_bins + self._bin(chunk, now)] += 1.0

    def count_idle(self, start: int, stop: int, now: float, counts: Numbers, /) -> None:
        """Count the idle times that have not ended, of the counted chunks from `start` to `stop`."""
        if len(counts) != len(self._used) or start < 0:
            raise ValueError("expected a number for each class and bin")
        held = -(-len(self._chunks) // self._every)
        for at in range(start, stop):
            chunks, number = (self._chunks, at) if at < held else (self._gone, at - held)
            if number * self._every >= len(chunks):
                break
            self._count(counts, chunks[number * self._every], number * self._every, now)

    def derive(self, idle: Numbers, guess: Numbers, shrinkage: float, /) -> None:
        """Write the index of each class and bin. `idle` counts the idle times that have not ended.

        `guess` has the chance of a use in each bin before anything is known. A class with few idle times
        leans on all endings of as many uses, and these on all classes; `shrinkage` is how many it must have
        seen to weigh as much as they do.
        """
        if len(idle) != len(self._used) or len(guess) != self._num_bins:
            raise ValueError("expected a number for each class and bin, and for each bin")
        shape = -1, self._num_endings, self._num_bins
        used = self._used.reshape(shape).copy()
        times = used + self._given_up.reshape(shape) + idle.reshape(shape)
        reached = np.cumsum(times[:, :, ::-1], axis=2)[:, :, ::-1].copy()
        pooled = _chances(used.sum(axis=(0, 1)), reached.sum(axis=(0, 1)), guess, shrinkage)
        used[:, -1], reached[:, -1] = used.sum(axis=1), reached.sum(axis=1)  # stands for all endings
        groups = _chances(used[:, -1], reached[:, -1], pooled, shrinkage)
        chances = _chances(used, reached, groups[:, None], shrinkage)
        chances[:, -1] = groups
        indices = np.array([[self._index_bins(row) for row in rows] for rows in chances])
        self._indices[:] = _rising(indices, reached + shrinkage).reshape(-1)

    def _index_bins(self, chances: Numbers) -> list[float]:
        """Return the index of each bin: the highest ratio of hits and seconds, over all ends of waiting.

        Going back from the last bin, a stretch of bins takes in the next stretch as long as that raises its
        ratio.
        """
        widths = np.append(self._ages[1:], self._ages[-1] * np.sqrt(2.0)) - self._ages
        alive = np.cumprod(np.append(1.0, 1.0 - chances[:-1]))
        stretches: list[tuple[float, float]] = []
        indices: list[float] = []
        for hits, seconds in zip(
            (alive * chances)[::-1].tolist(),
            (alive * (1.0 - chances / 2.0) * widths)[::-1].tolist(),
            strict=True,
        ):
            while stretches and stretches[-1][0] / stretches[-1][1] > hits / seconds:
                more_hits, more_seconds = stretches.pop()
                hits, seconds = hits + more_hits, seconds + more_seconds
            stretches.append((hits, seconds))
            indices.append(hits / seconds)
        return indices[::-1]


def _chances(used: Numbers, reached: Numbers, leant_on: Numbers, shrinkage: float) -> Numbers:
    """Return the chance of a use in each bin, for a chunk that has reached it.

    With few idle times, it leans on other chances, times what fits best.
    """
    ratio = (used.sum(axis=-1) + 1.0) / ((reached * leant_on).sum(axis=-1) + 1.0)
    others = shrinkage * ratio[..., None] * leant_on
    chances: Numbers = np.minimum(_MOST_LIKELY, (used + others) / (reached + shrinkage))
    return chances


def _rising(indices: Numbers, weights: Numbers) -> Numbers:
    """Make indices rise with the uses, the first axis: where they fall, several take their weighted mean.

    A head of a prefix has at least the uses of its tail, so it must not be worth less.
    """
    rising = indices.copy()
    for at in np.ndindex(indices.shape[1:]):
        runs: list[tuple[float, float, int]] = []
        for mean, weight in zip(indices[:, *at].tolist(), weights[:, *at].tolist(), strict=True):
            length = 1
            while runs and runs[-1][0] > mean:
                other, more, others = runs.pop()
                mean = (mean * weight + other * more) / (weight + more)
                weight, length = weight + more, length + others
            runs.append((mean, weight, length))
        rising[:, *at] = [mean for mean, _, length in runs for _ in range(length)]
    return rising


def slot_array(slots: list[int]) -> Slots:
    """Return slots as the array that books and policies take."""
    return np.array(slots, dtype=np.int64)


if uses_c("slots"):
    from kvtier.native._slots import GhostLists as GhostLists
    from kvtier.native._slots import RecencyList as RecencyList
    from kvtier.native._slots import ReuseLists as ReuseLists
    from kvtier.native._slots import SlotBook as SlotBook
else:
    GhostLists, RecencyList = PythonGhosts, PythonRecency  # type: ignore[misc, assignment]
    SlotBook, ReuseLists = PythonBook, PythonReuseLists  # type: ignore[misc, assignment]

SLOTS_BY = form_of("slots")
