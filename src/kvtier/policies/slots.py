"""The maps and lists that managers and policies are made of: which chunk is in which slot, slots in order of
use, keys that were evicted.

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
    """The last `capacity` keys evicted from each of two lists, 0 and 1, without those that came back."""

    def __init__(self, capacity: int, /) -> None:
        self._capacity = capacity
        self._rings: tuple[list[OffloadKey | None], ...] = ([None] * capacity, [None] * capacity)
        self._next = [0, 0]
        self._sizes = [0, 0]
        self._known: dict[OffloadKey, tuple[int, int]] = {}  # list and position in its ring

    def remember(self, which: int, keys: list[OffloadKey], /) -> None:
        """Remember keys that were evicted from a list."""
        for key in keys if self._capacity else ():
            position = self._next[which]
            self._forget(key)
            self._forget(self._rings[which][position])
            self._rings[which][position] = key
            self._known[key] = which, position
            self._sizes[which] += 1
            self._next[which] = (position + 1) % self._capacity

    def recall(self, keys: list[OffloadKey], /) -> Slots | None:
        """Return the list that each key was evicted from, `ABSENT` for unknown keys; forget the keys.

        `None` means that all are unknown.
        """
        lists = slot_array([self._forget(key) for key in keys])
        return lists if (lists != ABSENT).any() else None

    def sizes(self) -> tuple[int, int]:
        """Return the number of known keys of each list."""
        return self._sizes[0], self._sizes[1]

    def _forget(self, key: OffloadKey | None) -> int:
        """Forget a key and return its list."""
        if key is None or key not in self._known:
            return ABSENT
        which, position = self._known.pop(key)
        self._rings[which][position] = None
        self._sizes[which] -= 1
        return which


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


def slot_array(slots: list[int]) -> Slots:
    """Return slots as the array that books and policies take."""
    return np.array(slots, dtype=np.int64)


if uses_c("slots"):
    from kvtier.native._slots import GhostLists as GhostLists
    from kvtier.native._slots import RecencyList as RecencyList
    from kvtier.native._slots import SlotBook as SlotBook
else:
    GhostLists, RecencyList = PythonGhosts, PythonRecency  # type: ignore[misc, assignment]
    SlotBook = PythonBook  # type: ignore[misc, assignment]

SLOTS_BY = form_of("slots")
