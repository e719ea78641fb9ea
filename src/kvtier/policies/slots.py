"""The maps and lists that managers and policies are made of: which chunk is in which slot, slots in order of
use, in one list or by class, and keys that were evicted.

Each is written twice: in `native/_slots.c`, for speed, and here, for machines without a C compiler and as
the specification of the C form. `SLOTS_BY` says which form is in use. All take and return batches; in C, a
batch of one key costs some 100 ns a call. Scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice, takewhile

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


class PythonClassLists:
    """Up to `capacity` slots in `num_classes` lists, each from the least to the most recently used."""

    def __init__(self, capacity: int, num_classes: int, /) -> None:
        self._lists: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_classes)]
        self._class_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._class_of)

    def use(self, slots: Slots, classes: Slots, /) -> None:
        """Put each slot into the list of its class as the most recent, the first slot most of all."""
        if len(slots) != len(classes):
            raise ValueError("expected a class for each slot")
        self.drop(slots)
        for slot, kind in zip(slots[::-1].tolist(), classes[::-1].tolist(), strict=True):
            self._lists[kind][slot] = None
            self._class_of[slot] = kind

    def drop(self, slots: Slots, /) -> None:
        """Remove those of the slots that are in a list."""
        for slot in slots.tolist():
            if (kind := self._class_of.pop(slot, None)) is not None:
                del self._lists[kind][slot]

    def order(
        self, count: int, allowed: Mask, stamps: Numbers, bounds: Numbers, indices: Numbers, /
    ) -> Slots:
        """Return up to `count` slots with `allowed[slot]`, in the order of their index, the lowest first.

        The index of a slot depends on its class and its age: `stamps` has the time of its last use,
        `bounds` the latest time of each bin of age, and `indices` the index for each class and bin. Within a
        class the order is that of use. The oldest slots of all classes are compared; between equal indices,
        the older slot comes first. Slots of the same class and bin follow one another.
        """
        numbers = indices.reshape(len(self._lists), len(bounds)).tolist()
        left = [[slot for slot in each if allowed[slot]] for each in self._lists]
        ordered: list[int] = []
        while len(ordered) < count and any(left):
            _, oldest, kind = min(
                (numbers[kind][_bin_of(stamps.item(slots[0]), bounds)], stamps.item(slots[0]), kind)
                for kind, slots in enumerate(left)
                if slots
            )
            used = stamps[left[kind]] <= bounds[_bin_of(oldest, bounds)]
            length = len(used) if used.all() else int(used.argmin())
            ordered += left[kind][:length]
            del left[kind][:length]
        return slot_array(ordered[: max(0, count)])


def _bin_of(stamp: float, bounds: Numbers) -> int:
    """Return the last bin whose bound is not before the stamp; bounds go back in time."""
    return max(0, int(np.count_nonzero(bounds >= stamp)) - 1)


def slot_array(slots: list[int]) -> Slots:
    """Return slots as the array that books and policies take."""
    return np.array(slots, dtype=np.int64)


if uses_c("slots"):
    from kvtier.native._slots import ClassLists as ClassLists
    from kvtier.native._slots import GhostLists as GhostLists
    from kvtier.native._slots import RecencyList as RecencyList
    from kvtier.native._slots import SlotBook as SlotBook
else:
    GhostLists, RecencyList = PythonGhosts, PythonRecency  # type: ignore[misc, assignment]
    SlotBook, ClassLists = PythonBook, PythonClassLists  # type: ignore[misc, assignment]

SLOTS_BY = form_of("slots")
