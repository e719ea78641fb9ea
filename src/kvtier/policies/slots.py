"""What managers and policies are made of: keys -> slots and back, slots in order of use, keys that were evicted.

Each is written twice: in `_slots.c`, for speed, and here, for machines without a C compiler and as the specification of the
other. `SLOTS_BY` says which is in use. Below them are the classes to use, which hide that arrays are filled in place.
Called on the scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice, takewhile

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey
from kvtier.policies.base import Slots

__all__ = ["ABSENT", "SLOTS_BY", "GhostLists", "RecencyList", "SlotIndex"]

ABSENT = -1
Mask = npt.NDArray[np.bool_]


class PythonIndex:
    """`_slots.Index`, in Python."""

    def __init__(self, num_slots: int, /) -> None:
        self._slots: dict[OffloadKey, int] = {}
        self._keys: list[OffloadKey | None] = [None] * num_slots

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: OffloadKey, /) -> bool:
        return key in self._slots

    def find_into(self, keys: list[OffloadKey], out: Slots, /) -> int:
        found = [self._slots.get(key, ABSENT) for key in keys]
        return _fill(out, found) - found.count(ABSENT)

    def leading_into(self, keys: list[OffloadKey], out: Slots, /) -> int:
        return _fill(out, [self._slots[key] for key in takewhile(self._slots.__contains__, keys)])

    def held_into(self, keys: list[OffloadKey], out: Slots, /) -> int:
        return _fill(out, [self._slots[key] for key in dict.fromkeys(keys) if key in self._slots])

    def missing(self, keys: list[OffloadKey], /) -> list[OffloadKey]:
        return [key for key in dict.fromkeys(keys) if key not in self._slots]

    def get(self, key: OffloadKey, /) -> int | None:
        return self._slots.get(key)

    def add(self, keys: list[OffloadKey], slots: Slots, /) -> None:
        for key, slot in zip(keys, slots.tolist(), strict=True):
            if key in self._slots:
                raise ValueError("expected keys without a slot")
            if (old := self._keys[slot]) is not None:
                del self._slots[old]
            self._slots[key] = slot
            self._keys[slot] = key

    def keys(self, slots: Slots, /) -> list[OffloadKey]:
        return [key for slot in slots.tolist() if (key := self._keys[slot]) is not None]

    def count(self, slots: Slots, allowed: Mask, /) -> int:
        if not all(0 <= slot < len(self._keys) for slot in slots.tolist()):
            raise IndexError(f"expected slots from 0 to {len(self._keys) - 1}, got {slots.tolist()}")
        return sum(bool(allowed[slot]) for slot in set(slots.tolist()))

    def remove(self, slots: Slots, /) -> list[OffloadKey]:
        keys = list(dict.fromkeys(self.keys(slots)))
        for key in keys:
            self._keys[self._slots.pop(key)] = None
        return keys


class PythonGhosts:
    """`_slots.Ghosts`, in Python."""

    def __init__(self, capacity: int, /) -> None:
        self._capacity = capacity
        self._rings: tuple[list[OffloadKey | None], ...] = ([None] * capacity, [None] * capacity)
        self._next = [0, 0]
        self._sizes = [0, 0]
        self._known: dict[OffloadKey, tuple[int, int]] = {}  # list and place in its ring

    def remember(self, which: int, keys: list[OffloadKey], /) -> None:
        for key in keys if self._capacity else ():
            place = self._next[which]
            self._forget(key)
            self._forget(self._rings[which][place])
            self._rings[which][place] = key
            self._known[key] = which, place
            self._sizes[which] += 1
            self._next[which] = (place + 1) % self._capacity

    def recall_into(self, keys: list[OffloadKey], out: Slots, /) -> int:
        found = [self._forget(key) for key in keys]
        return _fill(out, found) - found.count(ABSENT)

    def sizes(self) -> tuple[int, int]:
        return self._sizes[0], self._sizes[1]

    def clear(self) -> None:
        for key in list(self._known):
            self._forget(key)

    def _forget(self, key: OffloadKey | None) -> int:
        """Forget a key and return its list."""
        if key is None or key not in self._known:
            return ABSENT
        which, place = self._known.pop(key)
        self._rings[which][place] = None
        self._sizes[which] -= 1
        return which


class PythonRecency:
    """`_slots.Recency`, in Python."""

    def __init__(self, capacity: int, /) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def use(self, slots: Slots, /) -> None:
        for slot in slots[::-1].tolist():
            self._order[slot] = None
            self._order.move_to_end(slot)

    def drop(self, slots: Slots, /) -> None:
        for slot in slots.tolist():
            self._order.pop(slot, None)

    def take_into(self, count: int, allowed: Mask, out: Slots, /) -> int:
        taken = list(islice((slot for slot in self._order if allowed[slot]), max(0, count)))
        for slot in taken:
            del self._order[slot]
        return _fill(out, taken)

    def holds_into(self, slots: Slots, out: Mask, /) -> None:
        out[: len(slots)] = [slot in self._order for slot in slots.tolist()]

    def slots_into(self, out: Slots, /) -> int:
        return _fill(out, list(self._order))

    def clear(self) -> None:
        self._order.clear()


def _fill(out: Slots, slots: list[int]) -> int:
    out[: len(slots)] = slots
    return len(slots)


try:
    from kvtier._slots import Ghosts, Index, Recency
except ImportError:
    Ghosts, Index, Recency = PythonGhosts, PythonIndex, PythonRecency  # type: ignore[misc, assignment]

SLOTS_BY = "python" if issubclass(Index, PythonIndex) else "c"


class SlotIndex(Index):
    """Maps the keys that a tier holds to its slots, and back.

    Besides what is here: `len`, `in`, `get(key)`, `missing(keys)` (those without a slot, each once), `add(keys, slots)`,
    `keys(slots)`, and `remove(slots)`, which returns their keys. Slots without a key are left out.
    """

    __slots__ = ()

    def find(self, keys: list[OffloadKey]) -> Slots:
        """Return the slot of each key, `ABSENT` where it has none."""
        slots = np.empty(len(keys), dtype=np.int64)
        self.find_into(keys, slots)
        return slots

    def leading(self, keys: list[OffloadKey]) -> Slots:
        """Return the slots of the leading keys that have one."""
        slots = np.empty(len(keys), dtype=np.int64)
        return slots[: self.leading_into(keys, slots)]

    def held(self, keys: list[OffloadKey]) -> Slots:
        """Return the slots of those keys that have one, in their order, each once."""
        slots = np.empty(len(keys), dtype=np.int64)
        return slots[: self.held_into(keys, slots)]


class RecencyList(Recency):
    """Up to `capacity` slots from the least to the most recently used.

    Besides what is here: `len`, `use(slots)` (they become the most recent, the first most of all), `drop(slots)`, `clear()`.
    """

    __slots__ = ()

    def take(self, count: int, allowed: Mask) -> Slots:
        """Take out and return up to `count` slots with `allowed[slot]`, the least recent first."""
        slots = np.empty(max(0, count), dtype=np.int64)
        return slots[: self.take_into(count, allowed, slots)]

    def holds(self, slots: Slots) -> Mask:
        """Say of each slot whether it is in the list."""
        held = np.empty(len(slots), dtype=np.bool_)
        self.holds_into(slots, held)
        return held

    def slots(self) -> Slots:
        """Return all slots, the least recent first."""
        slots = np.empty(len(self), dtype=np.int64)
        self.slots_into(slots)
        return slots


class GhostLists(Ghosts):
    """The last `capacity` keys that were evicted from each of two lists, 0 and 1, less those that came back.

    Besides what is here: `remember(which, keys)`, `sizes()`, `clear()`.
    """

    __slots__ = ()

    def recall(self, keys: list[OffloadKey]) -> Slots | None:
        """Return the list that each key was evicted from, else `ABSENT`, and forget the keys. `None`: all are unknown."""
        lists = np.empty(len(keys), dtype=np.int64)
        return lists if self.recall_into(keys, lists) else None
