"""`SlotTable`: which chunk is in which slot, which jobs use it, and which chunk leaves. `ChangeLog`: the
changes of a table that are to be announced.

The pool and the disk both keep their slots in such a table. A slot is free, writing, ready or reading; or
*doomed*, if its chunk was made absent while a job used the slot. A doomed slot cannot be read, written or
evicted, and becomes free when the job is over. It belongs to the job, not to the key, which may be stored in
another slot meanwhile.

The state of a chunk is kept by slot, in arrays that `SlotBook` keeps up to date. So a call costs little
besides its keys, whether these are the thousand of a prompt or the one of a decoded block. A policy of
another package runs on the engine's scheduler thread and may fail there. The table then logs the error and
goes on with LRU.

One thread at a time may use a table: an I/O thread fills the disk's table from the records, and then the
scheduler thread owns it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError, IntegrityError
from kvtier.hints import NO_HINTS, Hints
from kvtier.keys import OffloadKey
from kvtier.policies import ARCPolicy, CachePolicy, Ending, GittinsPolicy, LRUPolicy, Slots
from kvtier.policies.slots import ABSENT, WRITING, Mask, SlotBook, slot_array
from kvtier.residency import MissReason, OffloadingEvent
from kvtier.slot_marks import SlotMarks

logger = logging.getLogger(__name__)

NO_SLOTS: Slots = np.zeros(0, dtype=np.int64)
NO_USER = -1
"""A user that has stored no chunk: no string has this hash."""

_OURS = LRUPolicy, ARCPolicy, GittinsPolicy
_QUESTIONS = "evict", "evict_for", "coldest", "ranked"
_CALLS = "insert", "touch", "end_request", "refuse", "remove", "clear", "check", *_QUESTIONS
_RESTORE_SLICE = 16_384
"""Keys entered at once during a restore: some milliseconds in which no other thread runs."""
_MOST_TICKS = 1 << 62
_CLEARED_SLICE = 2048
"""Chunks of a reset announced at once: a millisecond or two for those who translate them."""


class Reserved(NamedTuple):
    """Slots for new chunks, and the evicted chunks with the slots they had."""

    slots: Slots
    evicted: list[OffloadKey]
    evicted_slots: Slots


class SlotCounts(NamedTuple):
    """The number of slots in each state. Ready slots include those being read."""

    free: int
    ready: int
    reading: int
    writing: int
    doomed: int


class SlotTable:
    """The chunks in `num_slots` slots; `policy` chooses the chunks to evict.

    `share` is the part of the slots that a tenant may have, if tenants are to have shares. Hints and shares
    come before the policy (`SlotMarks`).
    """

    get: Callable[[OffloadKey], int | None]
    """Return the slot of a key that is held. This and the next seven are the book's own methods."""
    find: Callable[[list[OffloadKey]], Slots]
    """Return the slot of each key, `ABSENT` where it has none."""
    held: Callable[[list[OffloadKey]], Slots]
    """Return the slots of those keys that are held, each once."""
    missing: Callable[[list[OffloadKey]], list[OffloadKey]]
    """Return the keys that are not held, each once."""
    leading: Callable[[list[OffloadKey]], int]
    """Count the leading keys that are ready."""
    keys: Callable[[Slots], list[OffloadKey]]
    """Return the keys of those slots that are held."""
    num_free: Callable[[], int]
    """Count the free slots."""
    try_pin: Callable[[Slots], int]
    """Add a reader to each slot, and return the number of slots before the first that is not ready.

    If that is not all of them, nothing has changed.
    """

    def __init__(self, num_slots: int, policy: CachePolicy, share: float | None = None) -> None:
        if policy.capacity != num_slots:
            raise InputError(f"policy: expected one for {num_slots} slots, got one for {policy.capacity}")
        self.num_slots = num_slots
        self._use_policy(policy)
        self._doomed: dict[int, OffloadKey] = {}  # the key that a slot had
        self._open_book(np.zeros(num_slots, dtype=np.int64))
        self.ticks: Slots = NO_SLOTS
        """The tick of each slot's last use; the highest is the newest.

        Ticks count uses, not seconds, so that they can be saved and the order restored. Only a table that
        was restored keeps them.
        """
        self._tick = -1  # no ticks are kept
        self.marks = None if share is None else SlotMarks(num_slots, share)
        """What hints and shares say about chunks; `None` as long as nothing was said."""
        # CPython 3.11 finds attributes quickly in objects that have fewer than 30. This is the 29th.

    def _open_book(self, readers: Slots, used: Slots = NO_SLOTS) -> None:
        """Begin with no chunks. `used` are the slots that jobs still use."""
        self.readers = readers
        """The number of readers of each slot, or `WRITING`."""
        self.evictable: Mask = np.zeros(self.num_slots, dtype=np.bool_)
        """Whether each slot is ready and unread."""
        self._stored_by = np.zeros(self.num_slots, dtype=np.int64)
        self._book = book = SlotBook(readers, self.evictable, self._stored_by, used)
        self.get, self.find, self.held, self.missing = book.get, book.find, book.held, book.missing
        self.leading, self.keys, self.num_free = book.leading, book.keys, book.num_free
        self.try_pin = book.pin

    def __len__(self) -> int:
        """Count the chunks that are held, ready or writing."""
        return len(self._book)

    # -- asking ------------------------------------------------------------------------------------

    def ready(self, keys: list[OffloadKey]) -> list[bool]:
        """Return for each key whether it is ready."""
        ready: list[bool] = self.are_ready(self.find(keys)).tolist()
        return ready

    def are_ready(self, slots: Slots) -> Mask:
        """Return for each slot whether its chunk is ready; `ABSENT` is not."""
        found: Mask = slots != ABSENT
        found[found] = self.readers[slots[found]] != WRITING
        return found

    def is_writing(self, key: OffloadKey) -> bool:
        """Return whether a key is held and not ready."""
        slot = self.get(key)
        return slot is not None and bool(self.readers[slot] == WRITING)

    def is_held(self, slot: int, key: OffloadKey) -> bool:
        """Return whether this slot holds this chunk, ready or writing."""
        return self.get(key) == slot

    def held_slots(self) -> Slots:
        """Return the slots that are neither free nor doomed, in ascending order."""
        held = np.ones(self.num_slots, dtype=np.bool_)
        held[self._book.free_slots()] = False
        held[list(self._doomed)] = False
        return np.flatnonzero(held)

    def counts(self) -> SlotCounts:
        """Return the number of slots in each state."""
        readers = self.readers[self.held_slots()]
        return SlotCounts(
            free=self.num_free(),
            ready=int((readers >= 0).sum()),
            reading=int((readers > 0).sum()),
            writing=int((readers < 0).sum()),
            doomed=len(self._doomed),
        )

    def used_slots(self, keys: list[OffloadKey], *, writing: bool) -> Slots:
        """Return the slot that the oldest writer or reader of each key uses.

        It is the key's oldest doomed slot in such use, or else the slot that holds the key.
        """
        slots = self.find(keys)
        if self._doomed:
            used = (self.readers == WRITING) if writing else (self.readers > 0)
            oldest = {key: slot for slot, key in reversed(self._doomed.items()) if used[slot]}
            slots = slot_array(
                [oldest.get(key, slot) for key, slot in zip(keys, slots.tolist(), strict=True)]
            )
        return slots

    def shortfall(self, keys: list[OffloadKey], tenant: str | None = None) -> int:
        """Count the slots that are lacking to store these keys, beyond the free and evictable slots.

        With a `tenant`, its share counts.
        """
        spared = self.held(keys)
        if self.marks is not None and tenant is not None:
            evictable_mask = self.evictable.copy()
            evictable_mask[spared] = False
            available = self.marks.available(tenant, self.num_free(), evictable_mask)
            return max(0, len(self.missing(keys)) - available)
        evictable = np.count_nonzero(self.evictable) - np.count_nonzero(self.evictable[spared])
        return max(0, len(self.missing(keys)) - self.num_free() - int(evictable))

    def coldest(self, count: int) -> list[OffloadKey]:
        """Return up to `count` chunks that would be evicted next, in the order of eviction."""
        if self.marks is None:
            return self.keys(self._coldest(count, self.evictable))
        found: list[OffloadKey] = []
        for group, _ in self.marks.groups(self.evictable, self._now()):
            if len(found) < count:
                found += self.keys(self._coldest(count - len(found), group))
        return found

    def hottest(self) -> list[OffloadKey]:
        """Return all ready chunks without readers, in the reverse order of eviction."""
        ranked = self._ranked()[::-1]
        if self.marks is None:
            return self.keys(ranked[self.evictable[ranked]])
        groups = [group for group, _ in self.marks.groups(self.evictable, self._now())]
        return [key for group in reversed(groups) for key in self.keys(ranked[group[ranked]])]

    # -- reading -----------------------------------------------------------------------------------

    def pin(self, slots: Slots) -> None:
        """Add a reader to slots that are ready."""
        if self.try_pin(slots) < len(slots):
            raise IntegrityError("slot table: expected to read slots that are ready")

    def unpin(self, slots: Slots) -> None:
        """Remove a reader; doomed slots without readers become free."""
        if self.try_unpin(slots) < len(slots):
            raise IntegrityError("slot table: expected slots that are being read")

    def try_unpin(self, slots: Slots) -> int:
        """Remove a reader from each slot, and return the number of slots before the first without one.

        If that is not all of them, nothing has changed. Doomed slots without readers become free.
        """
        num_unpinned = self._book.unpin(slots)
        if self._doomed and num_unpinned == len(slots):
            self._free_doomed(slots, 0)
        return num_unpinned

    def touch(
        self,
        slots: Slots,
        user: int = NO_USER,
        ending: Ending | None = None,
        hints: Hints = NO_HINTS,
        tenant: str = "",
    ) -> None:
        """Record a use of held slots, ordered head to tail of a prefix.

        A use by the `user` who stored a chunk only renews its recency. `ending` says how the request ended,
        if it has; its hints then count.
        """
        reused = self._stored_by[slots] != user
        if ending is None:
            self._touch(slots, reused)
        else:
            self._end_request(slots, reused, ending)
            if self.marks is None and hints.orders:
                self.marks = SlotMarks(self.num_slots)
            if self.marks is not None:
                self.marks.end_request(slots, reused, hints, tenant, self._now())
        if self._tick >= 0:
            self._stamp(slots)

    # -- writing -----------------------------------------------------------------------------------

    def reserve(self, keys: list[OffloadKey], spared: Slots = NO_SLOTS, tenant: str = "") -> Reserved:
        """Give slots to as many new keys as possible. Evicts other chunks if needed, but no spared slot.

        The policy may refuse the last keys.
        """
        num_free = self.num_free()
        victims, evicted = self.make_room(len(keys) - num_free, spared, keys, tenant)
        slots = self.take(keys[: num_free + len(evicted)], tenant=tenant)
        return Reserved(slots, evicted, victims)

    def make_room(
        self,
        count: int,
        spared: Slots = NO_SLOTS,
        newcomers: list[OffloadKey] | None = None,
        tenant: str = "",
        user: int = NO_USER,
    ) -> tuple[Slots, list[OffloadKey]]:
        """Evict up to `count` chunks, none of them in a spared slot; return their slots and their keys.

        With `newcomers`, the policy may find that the last of them are not worth it, and evict fewer. `user`
        stores them.
        """
        if count <= 0:
            return NO_SLOTS, []
        if not len(spared):
            if self.marks is None:
                return self._evict_among(self.evictable, count, newcomers, user)
            return self._evict(count, newcomers, tenant, user)
        hidden = spared[self.evictable[spared]]
        self.evictable[hidden] = False
        try:
            return self._evict(count, newcomers, tenant, user)
        finally:
            self.evictable[hidden] = True

    def take(self, keys: list[OffloadKey], user: int = 0, tenant: str = "") -> Slots:
        """Give free slots to new keys, which are then being written."""
        slots = self._book.reserve(user, keys)
        try:
            self._insert(slots, keys)
        except BaseException:  # a keyboard interrupt, perhaps: the caller does not learn of the slots
            self._book.complete(keys)
            self._book.release(slots)
            raise
        if self._tick >= 0:
            self._stamp(slots)
        if self.marks is not None:
            self.marks.store(slots, tenant)
        return slots

    def _evict(
        self, count: int, newcomers: list[OffloadKey] | None, tenant: str, user: int
    ) -> tuple[Slots, list[OffloadKey]]:
        marks = self.marks
        if marks is None:
            return self._evict_among(self.evictable, count, newcomers, user)
        all_victims, all_keys = [NO_SLOTS], list[OffloadKey]()
        groups = marks.groups_for(tenant, count, self.num_free(), self.evictable, self._now())
        for group, for_any, most in groups:
            wanted = min(most - len(all_keys), int(np.count_nonzero(group)))
            if wanted <= 0:
                continue
            victims, keys = self._evict_among(group, wanted, None if for_any else newcomers, user)
            marks.leave(victims)
            all_victims.append(victims)
            all_keys += keys
            if len(keys) < wanted or len(all_keys) == count:
                break  # if there are fewer, the newcomers are worth less than these, and than the next
        return np.concatenate(all_victims), all_keys

    def _evict_among(
        self, group: Mask, count: int, newcomers: list[OffloadKey] | None, user: int
    ) -> tuple[Slots, list[OffloadKey]]:
        """Evict up to `count` chunks of a group, all of which are evictable."""
        if newcomers is None:
            victims = self._choose_victims(count, group, self.keys)
        else:
            victims = self._choose_for(newcomers, count, group, self.keys, self._stored_by, user)
        if len(victims) <= count and (self.marks is None or group[victims].all()):
            keys = self._book.release(victims)
            if keys is not None:
                return victims, keys
        wrong = InputError(f"expected at most {count} different evictable slots, got {victims.tolist()}")
        if type(self.policy) in _OURS:
            raise IntegrityError(f"policy {type(self.policy).__qualname__}: {wrong}")
        self._replace_policy("evict", wrong)
        return self._evict_among(group, count, newcomers, user)

    def _now(self) -> float:
        """Return the time by the policy's clock, which is simulated if the policy's time is."""
        return self.policy.clock() if type(self.policy) in _OURS else time.monotonic()

    def complete(self, keys: list[OffloadKey]) -> list[OffloadKey] | None:
        """End the writing of keys and return those that were being written.

        `None` means that some slots are doomed, so that the caller must name the slots (`written`).
        """
        return None if self._doomed else self._book.complete(keys)

    def written(self, slots: Slots) -> list[OffloadKey]:
        """End the writing of slots and return the keys that are ready now. Doomed slots become free."""
        keys = self._book.complete(self.keys(slots))
        self._free_doomed(slots, WRITING)
        return keys

    def unwritten(self, slots: Slots) -> list[OffloadKey]:
        """End a failed write of slots and return the keys that are absent now. The slots become free."""
        self._free_doomed(slots, WRITING)
        keys = self._book.complete(self.keys(slots))
        gone = self.find(keys)
        self._remove(gone)
        self._book.release(gone)
        if self.marks is not None:
            self.marks.leave(gone)
        return keys

    # -- making absent -----------------------------------------------------------------------------

    def drop(self, slots: Slots) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Make held chunks absent; return the keys that were ready, and the keys that were being written.

        Slots in use become doomed.
        """
        ready, busy = self.readers[slots] != WRITING, self.readers[slots] != 0
        self._remove(slots)
        keys = self._book.remove(slots)
        if self.marks is not None:
            self.marks.leave(slots)
        self._doomed.update(compress(zip(slots.tolist(), keys, strict=True), busy.tolist()))
        self._book.free(slots[~busy])
        return list(compress(keys, ready.tolist())), list(compress(keys, (~ready).tolist()))

    def clear(self) -> tuple[SlotBook, Slots, list[OffloadKey]]:
        """Make all chunks absent; return their book, the slots that were ready, and the keys that were not.

        Slots in use become doomed. The time does not depend on the number of chunks, but for some passes
        over arrays.
        """
        book, readers, held = self._book, self.readers, self.held_slots()
        busy = held[readers[held] != 0]
        self._doomed.update(zip(busy.tolist(), book.keys(busy), strict=True))
        used = slot_array(list(self._doomed))
        left = np.zeros(self.num_slots, dtype=np.int64)
        left[used] = readers[used]
        self._open_book(left, used)
        self._clear()
        if self.marks is not None:
            self.marks.clear()
        are_written = readers[held] != WRITING
        return book, held[are_written], book.keys(held[~are_written])

    def _free_doomed(self, slots: Slots, readers: int) -> None:
        """Free the doomed slots with this count of readers: their last job is over."""
        if self._doomed:
            over = [slot for slot in dict.fromkeys(slots.tolist()) if slot in self._doomed]
            over = [slot for slot in over if self.readers[slot] == readers]
            for slot in over:
                del self._doomed[slot]
            self._book.free(slot_array(over))

    def _stamp(self, slots: Slots) -> None:
        """Give ticks to slots; the first slot gets the highest."""
        self._tick += len(slots)
        self.ticks[slots] = np.arange(self._tick, self._tick - len(slots), -1)

    # -- the policy --------------------------------------------------------------------------------

    def _use_policy(self, policy: CachePolicy) -> None:
        """Take over a policy; the calls of one of another package go through `_ask`."""
        self.policy = policy
        is_ours = type(policy) in _OURS
        calls = (getattr(policy, name) if is_ours else partial(self._ask, name) for name in _CALLS)
        self._insert, self._touch, self._end_request, self.refuse, self._remove, *rest = calls
        self._clear, self._check, self._choose_victims, self._choose_for, *questions = rest
        self._coldest, self._ranked = questions
        if type(policy).end_request is CachePolicy.end_request:
            self._end_request = lambda slots, reused, _ending: self._touch(slots, reused)
        if type(policy).evict_for is CachePolicy.evict_for:
            self._choose_for = lambda _newcomers, *args: self._choose_victims(*args[:3])

    def _ask(self, call: str, *args: Any) -> Any:
        """Call a policy of another package, with copies of arrays: the originals belong to transfers too.

        If it raises, or answers with anything but different slots, LRU takes its place.
        """
        try:
            answer = getattr(self.policy, call)(*map(_copied, args))
            return self._expect_slots(answer) if call in _QUESTIONS else None
        except Exception as error:  # foreign code on the engine's thread: it may choose badly, no more
            self._replace_policy(call, error)
            return getattr(self.policy, call)(*args)

    def habits(self) -> bytes:
        """Return what the policy has learnt of when chunks come back."""
        try:
            return bytes(self.policy.learnt())
        except Exception as error:  # foreign code, as in `_ask`
            self._replace_policy("learnt", error)
            return b""

    def worth(self, newcomers: list[OffloadKey]) -> npt.NDArray[np.float64] | None:
        """Return what the policy finds each new chunk worth; `None` if it cannot tell."""
        try:
            found = self.policy.worth(newcomers.copy())
            if found is None or (found.shape == (len(newcomers),) and found.dtype.kind == "f"):
                return found
            raise InputError(f"expected a number for each of {len(newcomers)} chunks, got {found.dtype}")
        except Exception as error:  # foreign code, as in `_ask`
            self._replace_policy("worth", error)
            return None

    def take_habits(self, data: bytes) -> bool:
        """Let the policy begin with what another one had learnt, and return whether it was of use."""
        try:
            return bool(self.policy.take_learnt(data))
        except Exception as error:  # foreign code, as in `_ask`
            self._replace_policy("take_learnt", error)
            return False

    def _expect_slots(self, answer: object) -> Slots:
        slots = np.asarray(answer, dtype=np.int64) if type(answer) is np.ndarray else None
        if slots is None or slots.ndim != 1 or len(np.unique(slots)) < len(slots):
            raise InputError(f"expected a one-dimensional array of different slots, got {type(answer)}")
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.num_slots:
            raise InputError(f"expected slots from 0 to {self.num_slots - 1}, got {slots}")
        return slots

    def _replace_policy(self, call: str, error: Exception) -> None:
        """Go on with LRU over what is held: the order of use is lost, and only the next uses count."""
        name, lru, held = type(self.policy).__qualname__, LRUPolicy(self.num_slots), self.held_slots()
        lru.insert(held, self.keys(held))
        self._use_policy(lru)
        logger.error(
            "policy %s: %s failed; going on with lru until the engine starts again",
            name, call, exc_info=error,
        )  # fmt: skip

    # -- restoring ---------------------------------------------------------------------------------

    def restore(
        self, slots: Slots, keys: Sequence[OffloadKey], ticks: npt.NDArray[np.int64]
    ) -> Iterator[int]:
        """Fill an empty table: these slots, ascending, hold these different keys, last used at these ticks.

        Yields how many slots are done, so that other threads may run in between.
        """
        self.ticks, self._tick = np.zeros(self.num_slots, dtype=np.int64), 0
        if not len(slots):
            return
        # The book gives out slots from 0 on: take all slots up to the last one, and give back the holes.
        end, at = int(slots[-1]) + 1, 0
        for start in range(0, end, _RESTORE_SLICE):
            stop = min(end, start + _RESTORE_SLICE)
            until = int(np.searchsorted(slots, stop))
            names, holes = self._name_all(slots[at:until] - start, keys[at:until], start, stop)
            taken = self._book.reserve(0, names)
            if not np.array_equal(taken, np.arange(start, stop)):
                raise IntegrityError("slot table: expected an empty table, which gives out slots from 0 on")
            self.readers[start:stop] = 0
            self.evictable[start:stop] = True
            self._holes(holes + start)
            at = until
            yield stop
        if ticks.min() < 0 or ticks.max() >= _MOST_TICKS:  # a saved tick may be wrong
            ticks = np.argsort(np.argsort(ticks, kind="stable"), kind="stable") + 1
        self.ticks[slots] = ticks
        self._tick = int(ticks.max())
        newest_first = np.argsort(-ticks, kind="stable")
        self._insert(slots[newest_first], list(map(keys.__getitem__, newest_first.tolist())))

    @staticmethod
    def _name_all(
        positions: Slots, keys: Sequence[OffloadKey], start: int, stop: int
    ) -> tuple[list[OffloadKey], Slots]:
        """Return a key for each slot from `start` to `stop`, and the positions whose key is invented."""
        if len(keys) == stop - start:
            return list(keys), NO_SLOTS
        names = [OffloadKey(b"%d" % slot) for slot in range(start, stop)]
        for position, key in zip(positions.tolist(), keys, strict=True):
            names[position] = key
        is_hole = np.ones(stop - start, dtype=np.bool_)
        is_hole[positions] = False
        return names, np.flatnonzero(is_hole)

    def _holes(self, slots: Slots) -> None:
        """Empty the holes. They become free only at the end, or the book would give them out again."""
        self._book.remove(slots)
        self._doomed.update(dict.fromkeys(slots.tolist(), OffloadKey(b"")))

    def free_holes(self) -> None:
        """Free the slots that `restore` left empty, so that the lowest slot is used first."""
        holes = slot_array(sorted(self._doomed, reverse=True))
        self._doomed.clear()
        self._book.free(holes)

    def check(self) -> None:
        """Raise `IntegrityError` if an invariant of the table or its policy is broken."""
        self._check()
        if self.marks is not None:
            self.marks.check(self.held_slots(), self._now())
        held, used, free = self.held_slots(), list(self._doomed), self._book.free_slots()
        readers, keys = self.readers, self.keys(held)
        unread = np.zeros(self.num_slots, dtype=np.bool_)
        unread[held] = readers[held] == 0
        ranked, policy = np.sort(self._ranked()), type(self.policy).__qualname__
        rules = (
            (len(held) + len(used) + len(free) == self.num_slots, "every slot is held, doomed or free"),
            (len(self._book) == len(keys) == len(held), "a slot has a key iff it is held"),
            (np.array_equal(self.find(keys), held), "keys and slots map to each other"),
            (readers.min(initial=0) >= WRITING, "a chunk has one writer"),
            (readers[used].all(), "doomed slots are in use"),
            (not readers[free].any(), "free slots are not in use"),
            (np.array_equal(self.evictable, unread), "what may be evicted is ready and unread"),
            (np.array_equal(ranked, held), f"{policy} ranks what is held"),
        )
        for holds, rule in rules:
            if not holds:
                raise IntegrityError(f"slot table: expected that {rule}; {self.counts()}")


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray | list) else value


class ChangeLog:
    """The changes of a table's chunks that are not announced yet, as events of one medium.

    A reset makes all chunks absent at once. Their removals are announced in slices, one at once and one for
    each `take`, but each before its key, or a key in its slot, is announced as stored again. The books of
    cleared chunks are emptied slice by slice, too: to free a million keys takes as long as to announce them.
    """

    def __init__(self, medium: str, record_miss: Callable[[list[OffloadKey], MissReason], object]) -> None:
        """Begin empty. `record_miss` is told the cleared chunks when they are announced."""
        self._medium, self._record_miss = medium, record_miss
        self._events: list[OffloadingEvent] = []
        # The oldest book first, each with the slots that are left to announce, and a flag for each of these.
        self._cleared: deque[tuple[SlotBook, Slots, Mask]] = deque()
        self._cleared_because = MissReason.CLEARED

    def has_slices(self) -> bool:
        """Return whether removals of cleared chunks are left for later calls of `take`."""
        return bool(self._cleared)

    def explain(self, key: OffloadKey) -> MissReason | None:
        """Return why a chunk is absent whose removal is left for later."""
        is_cleared = any(book.get(key) is not None for book, _, _ in self._cleared)
        return self._cleared_because if is_cleared else None

    def add_stored(
        self,
        keys: list[OffloadKey],
        find: Callable[[list[OffloadKey]], Slots],
        descriptions: tuple[bytes, ...] | None = None,
    ) -> None:
        """Announce chunks that became ready. `find` gives their slots."""
        if keys:
            if self._cleared:
                self._announce_cleared(self._take_before(keys, find(keys)))
            self._events.append(OffloadingEvent(keys, self._medium, False, descriptions))

    def add_removed(self, keys: list[OffloadKey]) -> None:
        """Announce chunks that were ready and are now absent."""
        if keys:
            self._events.append(OffloadingEvent(keys, self._medium, True))

    def add_cleared(self, book: SlotBook, announced: Slots, reason: MissReason) -> None:
        """Take over a book that nobody else uses any more, and the slots whose chunks were announced."""
        self._cleared_because = reason
        if len(announced):
            is_announced = np.zeros(announced.max() + 1, dtype=np.bool_)
            is_announced[announced] = True
            self._cleared.append((book, announced, is_announced))
        self._announce_slice()

    def take(self) -> list[OffloadingEvent]:
        """Take the changes so far, with one more slice of the cleared chunks."""
        self._announce_slice()
        events, self._events = self._events, []
        return events

    def _announce_slice(self) -> None:
        keys: list[OffloadKey] = []
        while self._cleared and len(keys) < _CLEARED_SLICE:
            book, slots, flags = self._cleared.popleft()
            count = _CLEARED_SLICE - len(keys)
            part, rest = slots[:count], slots[count:]
            keys += book.remove(part)
            if len(rest):
                self._cleared.appendleft((book, rest, flags))
        self._announce_cleared(keys)

    def _take_before(self, keys: list[OffloadKey], slots: Slots) -> list[OffloadKey]:
        """Remove and return the cleared chunks of these keys, and those that were in these slots."""
        taken: list[OffloadKey] = []
        for book, _, is_announced in self._cleared:
            named = np.concatenate((book.held(keys), slots))
            named = named[(named >= 0) & (named < len(is_announced))]
            taken += book.remove(named[is_announced[named]])
        return list(dict.fromkeys(taken))

    def _announce_cleared(self, keys: list[OffloadKey]) -> None:
        if keys:
            self._record_miss(keys, self._cleared_because)
            self.add_removed(keys)
