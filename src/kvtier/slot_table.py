"""`SlotTable`: the books of an exact tier: chunk by slot, readers, eviction order and last uses.

A slot is free, writing, ready or reading, as in the pool; or doomed, if its chunk was made absent while a
call was using the slot: it becomes free when that call has returned. Last uses are ticks of a counter, not
of a clock, so that they can be saved and the order restored. One thread at a time: an I/O thread fills a
table from the records, then the scheduler thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError, IntegrityError
from kvtier.keys import OffloadKey
from kvtier.policies import CachePolicy, Slots
from kvtier.policies.slots import ABSENT, WRITING, SlotBook, broken_rule, held_slots

__all__ = ["Reserved", "SlotTable"]

_SLICE = 16_384
"""Keys entered at once during a restore: some milliseconds in which no other thread runs."""


_MOST_TICKS = 1 << 62


class Reserved(NamedTuple):
    """Slots for new chunks, and the evicted chunks with the slots they had."""

    slots: Slots
    evicted: list[OffloadKey]
    evicted_slots: Slots


class SlotTable:
    """The books of a tier of `num_slots` slots; `policy` chooses the chunks to evict."""

    def __init__(self, num_slots: int, policy: CachePolicy) -> None:
        if policy.capacity != num_slots:
            raise InputError(f"policy: expected one for {num_slots} slots, got one for {policy.capacity}")
        self.num_slots, self.policy = num_slots, policy
        self._doomed: set[int] = set()
        self._open_book(np.zeros(num_slots, dtype=np.int64))
        self.ticks = np.zeros(num_slots, dtype=np.int64)
        """The tick of each slot's last use; the highest is the newest."""
        self._tick = 0

    def __len__(self) -> int:
        """Count the chunks that are held, ready or writing."""
        return len(self._book)

    # -- asking ------------------------------------------------------------------------------------

    def leading(self, keys: list[OffloadKey]) -> int:
        """Count the leading keys that are ready."""
        return self._book.leading(keys)

    def ready(self, keys: list[OffloadKey]) -> list[bool]:
        """Say of each key whether it is ready."""
        slots = self._book.find(keys)
        found = slots != ABSENT
        found[found] = self._readers[slots[found]] != WRITING
        return list(found.tolist())

    def is_writing(self, key: OffloadKey) -> bool:
        """Say whether a key is held and not ready."""
        slot = self._book.get(key)
        return slot is not None and bool(self._readers[slot] == WRITING)

    def missing(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that are not held, each once."""
        return self._book.missing(keys)

    def held(self, keys: list[OffloadKey]) -> Slots:
        """Return the slots of those keys that are held, each once."""
        return self._book.held(keys)

    def find(self, keys: list[OffloadKey]) -> Slots:
        """Return the slot of each key, `ABSENT` where it has none."""
        return self._book.find(keys)

    def keys(self, slots: Slots) -> list[OffloadKey]:
        """Return the keys of those slots that are held."""
        return self._book.keys(slots)

    def is_held(self, slot: int, key: OffloadKey) -> bool:
        """Say whether this slot holds this chunk, ready or writing."""
        return self._book.get(key) == slot

    def held_slots(self) -> Slots:
        """Return the slots that are neither free nor doomed, in ascending order."""
        return held_slots(self._book, self.num_slots, self._doomed)

    # -- using -------------------------------------------------------------------------------------

    def pin(self, slots: Slots) -> None:
        """Add a reader to slots that are ready."""
        if self._book.pin(slots) < len(slots):
            raise IntegrityError("slot table: expected to read slots that are ready")

    def unpin(self, slots: Slots) -> None:
        """Remove a reader; doomed slots without readers become free."""
        if self._book.unpin(slots) < len(slots):
            raise IntegrityError("slot table: expected slots that are being read")
        self._free_doomed(slots, 0)

    def touch(self, slots: Slots) -> None:
        """Note a use of held slots, ordered head to tail of a prefix."""
        self.policy.touch(slots, np.ones(len(slots), dtype=np.bool_))
        self._stamp(slots)

    def reserve(self, keys: list[OffloadKey], spared: Slots) -> Reserved:
        """Give slots to as many new keys as possible. Evicts other chunks if needed, but no spared slot."""
        needed = len(keys) - self._book.num_free()
        evicted: list[OffloadKey] = []
        victims = np.zeros(0, dtype=np.int64)
        if needed > 0:
            victims, evicted = self._evict_others(needed, spared) if len(spared) else self._evict(needed)
        keys = keys[: self._book.num_free()]
        slots = self._book.reserve(0, keys)
        self.policy.insert(slots, keys)
        self._stamp(slots)
        return Reserved(slots, evicted, victims)

    def _evict_others(self, count: int, spared: Slots) -> tuple[Slots, list[OffloadKey]]:
        """Evict chunks, but hide the spared slots from the policy."""
        hidden = spared[self._evictable[spared]]
        self._evictable[hidden] = False
        try:
            return self._evict(count)
        finally:
            self._evictable[hidden] = True

    def _evict(self, count: int) -> tuple[Slots, list[OffloadKey]]:
        victims = self.policy.evict(count, self._evictable, self._book.keys)
        keys = self._book.release(victims) if len(victims) <= count else None
        if keys is None:
            name = type(self.policy).__qualname__
            raise InputError(
                f"policy {name}: expected at most {count} different evictable slots, got {victims.tolist()}"
            )
        return victims, keys

    def complete(self, keys: list[OffloadKey]) -> list[OffloadKey] | None:
        """End the writing of keys and return them; `None`: some slots are doomed, use `written` by slot."""
        return None if self._doomed else self._book.complete(keys)

    def written(self, slots: Slots) -> list[OffloadKey]:
        """End the writing of slots and return the keys that are ready now. Doomed slots become free."""
        keys = self._book.complete(self._book.keys(slots))
        self._free_doomed(slots, WRITING)
        return keys

    def unwritten(self, slots: Slots) -> list[OffloadKey]:
        """End a failed write of slots and return the keys that are absent now. The slots become free."""
        self._free_doomed(slots, WRITING)
        keys = self._book.complete(self._book.keys(slots))
        gone = self._book.find(keys)
        self.policy.remove(gone)
        self._book.release(gone)
        return keys

    def drop(self, slots: Slots) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Make held chunks absent; return the keys that were ready, and the keys that were being written.

        Slots in use become doomed.
        """
        ready, busy = self._readers[slots] != WRITING, self._readers[slots] != 0
        self.policy.remove(slots)
        keys = self._book.remove(slots)
        self._doomed.update(slots[busy].tolist())
        self._book.free(slots[~busy])
        flags = ready.tolist()
        return (
            [key for key, was_ready in zip(keys, flags, strict=True) if was_ready],
            [key for key, was_ready in zip(keys, flags, strict=True) if not was_ready],
        )

    def clear(self) -> tuple[SlotBook, Slots, list[OffloadKey]]:
        """Make all chunks absent; return their book, the slots that were ready, and the keys that were not.

        Slots in use become doomed. The time does not depend on the number of chunks, but for some passes
        over arrays.
        """
        book, readers, held = self._book, self._readers, self.held_slots()
        self._doomed.update(held[readers[held] != 0].tolist())
        used = np.array(sorted(self._doomed), dtype=np.int64)
        left = np.zeros(self.num_slots, dtype=np.int64)
        left[used] = readers[used]
        self._open_book(left, used)
        self.policy.clear()
        are_written = readers[held] != WRITING
        return book, held[are_written], book.keys(held[~are_written])

    def _open_book(self, readers: Slots, used: Slots | None = None) -> None:
        """Begin with no chunks. `used` are the slots that calls still use."""
        self._readers = readers
        self._evictable = np.zeros(self.num_slots, dtype=np.bool_)
        used = np.zeros(0, dtype=np.int64) if used is None else used
        self._book = SlotBook(readers, self._evictable, np.zeros(self.num_slots, dtype=np.int64), used)

    def _free_doomed(self, slots: Slots, readers: int) -> None:
        if self._doomed:
            over = [slot for slot in dict.fromkeys(slots.tolist()) if slot in self._doomed]
            over = [slot for slot in over if self._readers[slot] == readers]
            self._doomed.difference_update(over)
            self._book.free(np.array(over, dtype=np.int64))

    def _stamp(self, slots: Slots) -> None:
        """Give ticks to slots; the first slot gets the highest."""
        self._tick += len(slots)
        self.ticks[slots] = np.arange(self._tick, self._tick - len(slots), -1)

    # -- restoring ---------------------------------------------------------------------------------

    def restore(
        self, slots: Slots, keys: Sequence[OffloadKey], ticks: npt.NDArray[np.int64]
    ) -> Iterator[int]:
        """Fill an empty table: these slots, ascending, hold these different keys, last used at these ticks.

        Yields how many slots are done, so that other threads may run in between.
        """
        if not len(slots):
            return
        # The book gives out slots from 0 on: take all slots up to the last one, and give back the holes.
        end, at = int(slots[-1]) + 1, 0
        for start in range(0, end, _SLICE):
            stop = min(end, start + _SLICE)
            until = int(np.searchsorted(slots, stop))
            names, holes = self._name_all(slots[at:until] - start, keys[at:until], start, stop)
            taken = self._book.reserve(0, names)
            if not np.array_equal(taken, np.arange(start, stop)):
                raise IntegrityError("slot table: expected an empty table, which gives out slots from 0 on")
            self._readers[start:stop] = 0
            self._evictable[start:stop] = True
            self._holes(holes + start)
            at = until
            yield stop
        if ticks.min() < 0 or ticks.max() >= _MOST_TICKS:  # a saved tick may be wrong
            ticks = np.argsort(np.argsort(ticks, kind="stable"), kind="stable") + 1
        self.ticks[slots] = ticks
        self._tick = int(ticks.max())
        newest_first = np.argsort(-ticks, kind="stable")
        self.policy.insert(slots[newest_first], list(map(keys.__getitem__, newest_first.tolist())))

    @staticmethod
    def _name_all(
        places: Slots, keys: Sequence[OffloadKey], start: int, stop: int
    ) -> tuple[list[OffloadKey], Slots]:
        """Return a key for each place from `start` to `stop`, and the places whose key is invented."""
        if len(keys) == stop - start:
            return list(keys), np.zeros(0, dtype=np.int64)
        names = [OffloadKey(b"%d" % slot) for slot in range(start, stop)]
        for place, key in zip(places.tolist(), keys, strict=True):
            names[place] = key
        is_hole = np.ones(stop - start, dtype=np.bool_)
        is_hole[places] = False
        return names, np.flatnonzero(is_hole)

    def _holes(self, slots: Slots) -> None:
        """Empty the holes. They become free only at the end, or the book would give them out again."""
        self._book.remove(slots)
        self._doomed.update(slots.tolist())

    def free_holes(self) -> None:
        """Free the slots that `restore` left empty, so that the lowest slot is used first."""
        holes = np.array(sorted(self._doomed, reverse=True), dtype=np.int64)
        self._doomed.clear()
        self._book.free(holes)

    def check(self) -> None:
        """Raise `IntegrityError` if an invariant is broken."""
        rule = broken_rule(self._book, self.policy, self._doomed, self._readers, self._evictable)
        if rule is not None:
            raise IntegrityError(f"slot table: expected that {rule}")
