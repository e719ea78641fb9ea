"""The manager of the pool: which chunk is in which slot, which jobs use it, and which chunk leaves.

A held chunk (ready or writing) is in the index and ranked by the policy. If a chunk is made absent (by
`reset_cache` or `discard`) while a job uses its slot, the slot is *doomed*: it cannot be read, stored into
or evicted, and it becomes free when the job completes. The doomed slot belongs to the job, not to the key.
The key may be stored in another slot meanwhile; `complete_load` and `complete_store` tell the two slots
apart by the job's spec. The state of a chunk is kept by slot, in arrays that `SlotBook` keeps up to date. So
a call costs little besides its keys, whether these are the thousand of a prompt or the one of a decoded
block.

Events: `prepare_store` announces the chunks it evicted, `complete_store` the chunks that became ready,
`discard` the chunks that were ready and are now absent. The chunks that `reset_cache` made absent are
announced in slices, one at once and one for each `take_events`, but each before its key or its place is
announced again. Scheduler thread only; nothing blocks. A call that raises `InputError` has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from kvtier.errors import InputError, IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.base import (
    NO_REQUEST,
    MissReason,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
)
from kvtier.offload.miss_history import MissHistory
from kvtier.policies import CachePolicy, Slots, make_policy
from kvtier.policies.slots import (
    ABSENT,
    WRITING,
    ClearedChunks,
    Mask,
    SlotBook,
    broken_rule,
    held_slots,
)
from kvtier.transfer.base import CPULoadStoreSpec, LoadStoreSpec

__all__ = ["CPUOffloadingManager", "ManagerStats"]

_MEDIUM = CPULoadStoreSpec.medium()
_EVICTED = MissReason.EVICTED  # an enum lookup takes as long as the lookup of a key
_NO_USER = -1  # no string has this hash
_SLICE = 2048  # chunks of a reset announced at once: a millisecond or two for those who translate them


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """The slots of a pool by state, and totals of its chunks so far."""

    slots: int
    free: int
    ready: int
    """Chunks that can be read, including those being read."""
    reading: int
    writing: int
    doomed: int
    stored: int
    """The total of chunks that became ready."""
    evicted: int
    refused: int
    """Chunks that were offered and not taken: below the threshold, or no place."""


class CPUOffloadingManager(OffloadingManager):
    """The manager of up to `num_slots` chunks in the pool; `policy` decides which chunk leaves.

    With a `store_threshold` of 2 or more, a chunk is taken only when it is offered that many times.
    `max_tracked` bounds the notes on absent chunks: how often they were offered, and why they are absent.
    """

    def __init__(
        self,
        num_slots: int,
        policy: str | CachePolicy = "lru",
        *,
        store_threshold: int = 0,
        max_tracked: int = 64_000,
    ) -> None:
        if num_slots < 0 or max_tracked < 0:
            raise InputError(
                f"expected num_slots >= 0 and max_tracked >= 0, got {num_slots} and {max_tracked}"
            )
        self.num_slots = num_slots
        self.policy = make_policy(policy, num_slots) if isinstance(policy, str) else policy
        if self.policy.capacity != num_slots:
            raise InputError(
                f"policy: expected one for {num_slots} slots, got one for {self.policy.capacity}"
            )
        self._stays = np.zeros(num_slots, dtype=np.bool_)  # the chunk last put there must not leave the pool
        self._some_stay = False  # whether any chunk ever had to stay
        self._doomed: dict[int, OffloadKey] = {}  # the key that a slot had
        self._open_book(np.zeros(num_slots, dtype=np.int64))
        self._cleared = ClearedChunks()
        self._store_threshold = store_threshold
        self._miss_history = MissHistory(max_tracked)
        self._events: list[OffloadingEvent] = []
        self._stored = self._evicted = self._refused = 0

    # -- lookup ------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        slot = self._book.get(key)
        if slot is None:
            return False
        return None if self._readers[slot] == WRITING else True

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        slots = self._book.find(_as_list(keys))
        held = slots != ABSENT
        answers: list[bool | None] = held.tolist()
        places = np.flatnonzero(held)
        for place in places[self._readers[slots[places]] == WRITING].tolist():
            answers[place] = None
        return answers

    def lookup_prefix(
        self, keys: Iterable[OffloadKey], req_context: ReqContext, *, wait: bool = True
    ) -> int | None:
        keys = _as_list(keys)
        ready = self._book.leading(keys)
        return None if wait and ready < len(keys) and self._book.get(keys[ready]) is not None else ready

    def explain(self, key: OffloadKey) -> MissReason | None:
        found = self.lookup(key, NO_REQUEST)
        if found is False:
            return MissReason.CLEARED if key in self._cleared else self._miss_history.reason(key)
        return None if found else MissReason.WRITING

    # -- load --------------------------------------------------------------------------------------

    def prepare_load(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        keys = _as_list(keys)
        slots = self._book.find(keys)
        if (pinned := self._book.pin(slots)) < len(keys):
            raise self._misuse("prepare_load", "ready", keys[pinned])
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Iterable[OffloadKey], spec: LoadStoreSpec | None = None) -> None:
        keys = _as_list(keys)
        slots = self._slots_of_job(keys, spec, self._readers > 0) if self._doomed else self._book.find(keys)
        if (unpinned := self._book.unpin(slots)) < len(keys):
            raise self._misuse("complete_load", "being read", keys[unpinned])
        if self._doomed:
            self._free_doomed(slots, 0)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        slots = self._book.held(_as_list(keys))
        if len(slots):
            user = hash(req_context.req_id) if req_context.req_id else _NO_USER
            self.policy.touch(slots, self._stored_by[slots] != user)

    # -- store -------------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Iterable[OffloadKey], req_context: ReqContext, *, ignore_threshold: bool = False
    ) -> PrepareStoreOutput | None:
        """Take the chunks of an offer that can be stored; `ignore_threshold`: also if offered too rarely."""
        offered = _as_list(keys)
        wanted = self._book.missing(offered) if ignore_threshold else self._choose(offered)
        if not wanted:
            return PrepareStoreOutput([], CPULoadStoreSpec([]))
        needed = len(wanted) - self._book.num_free()
        evicted = []
        if needed > 0:
            evicted = self._make_room(
                needed, self._book.held(offered) if len(offered) > len(wanted) else None
            )
        if len(evicted) < needed:
            self._refuse(wanted[len(evicted) - needed :])
            del wanted[len(evicted) - needed :]
            if not wanted:
                return None
        slots = self._book.reserve(hash(req_context.req_id), wanted)
        try:
            self.policy.insert(slots, wanted)
        except BaseException:  # a policy may be foreign code
            self._book.complete(wanted)
            self._book.release(slots)
            raise
        if self._some_stay or req_context.stays_in_pool:
            self._some_stay = True
            self._stays[slots] = req_context.stays_in_pool
        return PrepareStoreOutput(wanted, CPULoadStoreSpec(slots), evicted)

    def reserve(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        return self.prepare_store(keys, req_context, ignore_threshold=True)

    def complete_store(
        self, keys: Iterable[OffloadKey], success: bool = True, spec: LoadStoreSpec | None = None
    ) -> None:
        keys = _as_list(keys)
        if self._doomed:
            slots = self._slots_of_job(keys, spec, self._readers == WRITING)
            keys = [key for key, slot in zip(keys, slots.tolist(), strict=True) if slot not in self._doomed]
            self._free_doomed(slots, WRITING)
        written = self._book.complete(keys)
        if success:
            self._stored += len(written)
            if self._cleared:
                self._announce_cleared(self._cleared.take_before(written, self._book.find(written)))
            self._announce(written, removed=False)
        else:
            slots = self._book.find(written)
            self.policy.remove(slots)
            self._book.release(slots)
            self._miss_history.note(written, MissReason.IO_FAILED)

    def discard(self, keys: Iterable[OffloadKey], reason: MissReason = MissReason.FAILED) -> None:
        self._drop(self._book.held(_as_list(keys)), reason)

    def abandon_store(self, keys: list[OffloadKey], spec: CPULoadStoreSpec) -> None:
        """Make chunks absent whose store has failed, while a call may still write their slots.

        The slots become free with `complete_store`. A key that has another slot by now is left alone. The
        reasons noted for the absent keys do not change.
        """
        slots = spec.block_ids
        self._drop(slots[self._book.find(keys) == slots], None)

    def reset_cache(self) -> None:
        """Make all chunks absent at once. Some of them are announced now, the others by `take_events`."""
        book, readers, held = self._book, self._readers, self._held_slots()
        busy = held[readers[held] != 0]
        self._doomed.update(zip(busy.tolist(), book.keys(busy), strict=True))
        used = _array(list(self._doomed))
        left = np.zeros(self.num_slots, dtype=np.int64)
        left[used] = readers[used]
        self._open_book(left, used)
        self._cleared.add(book, held[readers[held] != WRITING])
        self._miss_history.note(book.keys(held[readers[held] == WRITING]), MissReason.CLEARED)
        self.policy.clear()
        self._miss_history.forget_offers()
        self._announce_cleared(self._cleared.take(_SLICE))

    def _open_book(self, readers: Slots, used: Slots | None = None) -> None:
        """Begin with no chunks. `used` are the slots that jobs still use."""
        self._readers = readers  # WRITING while being written
        self._evictable = np.zeros(self.num_slots, dtype=np.bool_)  # ready and unread
        self._stored_by = np.zeros(self.num_slots, dtype=np.int64)  # hash of the request's id
        used = _array([]) if used is None else used
        self._book = SlotBook(self._readers, self._evictable, self._stored_by, used)

    # -- for tiers below ---------------------------------------------------------------------------

    def shortfall(self, keys: list[OffloadKey]) -> int:
        """Count the slots that are lacking to store these keys, beyond the free and evictable slots."""
        spared = self._book.held(keys)
        evictable = np.count_nonzero(self._evictable) - np.count_nonzero(self._evictable[spared])
        return max(0, len(self._book.missing(keys)) - self._book.num_free() - int(evictable))

    def demotable(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that are ready and may leave the pool.

        The flag of chunks that must stay is kept by slot, from one `prepare_store` to the next. It is not
        kept by key, because a key may be given up and stored in another slot before its former job reports.
        """
        if not self._some_stay and self._book.leading(keys) == len(keys):
            return keys
        slots = self._book.find(keys)
        may_leave = slots != ABSENT
        held = slots[may_leave]
        may_leave[may_leave] = (self._readers[held] != WRITING) & ~self._stays[held]
        return list(compress(keys, may_leave.tolist()))

    def coldest(self, count: int) -> list[OffloadKey]:
        """Return up to `count` chunks that would be evicted next, in the order of eviction."""
        return self._book.keys(self.policy.coldest(count, self._evictable))

    def hottest(self) -> list[OffloadKey]:
        """Return all ready chunks without readers, in the reverse order of eviction."""
        ranked = self.policy.ranked()[::-1]
        return self._book.keys(ranked[self._evictable[ranked]])

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return self._book.num_free()

    # -- reports -----------------------------------------------------------------------------------

    def take_events(self) -> list[OffloadingEvent]:
        if self._cleared:
            self._announce_cleared(self._cleared.take(_SLICE))
        events, self._events = self._events, []
        return events

    def has_pending_work(self) -> bool:
        """Say whether chunks that a reset has made absent are not announced yet."""
        return bool(self._cleared)

    def _announce_cleared(self, keys: list[OffloadKey]) -> None:
        self._miss_history.note(keys, MissReason.CLEARED)
        self._announce(keys, removed=True)

    def stats(self) -> ManagerStats:
        """Return the slots by state, and the totals so far."""
        readers = self._readers[self._held_slots()]
        return ManagerStats(
            slots=self.num_slots,
            free=self._book.num_free(),
            ready=int((readers >= 0).sum()),
            reading=int((readers > 0).sum()),
            writing=int((readers < 0).sum()),
            doomed=len(self._doomed),
            stored=self._stored,
            evicted=self._evicted,
            refused=self._refused,
        )

    def check(self) -> None:
        rule = broken_rule(self._book, self.policy, self._doomed, self._readers, self._evictable)
        if rule is not None:
            raise IntegrityError(f"CPU manager: expected that {rule}; {self.stats()}")

    # -- inside ------------------------------------------------------------------------------------

    def _held_slots(self) -> Slots:
        return held_slots(self._book, self.num_slots, self._doomed)

    def _choose(self, offered: list[OffloadKey]) -> list[OffloadKey]:
        """Return the absent keys of an offer, each once, that have been offered often enough."""
        keys = self._book.missing(offered)
        if self._store_threshold < 2:
            return keys
        counts = self._miss_history.count_offers(keys)
        self._refuse([key for key in keys if counts[key] < self._store_threshold])
        return [key for key in keys if counts[key] >= self._store_threshold]

    def _refuse(self, keys: list[OffloadKey]) -> None:
        self._refused += len(keys)
        self._miss_history.note(keys, MissReason.REFUSED)

    def _make_room(self, count: int, spared: Slots | None) -> list[OffloadKey]:
        """Evict up to `count` chunks, none of them in a `spared` slot, and return their keys."""
        keys = (
            self._evict(count)
            if spared is None
            else self._evict_others(count, spared[self._evictable[spared]])
        )
        self._evicted += len(keys)
        self._miss_history.note(keys, _EVICTED)
        self._announce(keys.copy(), removed=True)
        return keys

    def _evict(self, count: int) -> list[OffloadKey]:
        """Have the policy choose victims, check its choice, and evict them."""
        victims = self.policy.evict(count, self._evictable, self._book.keys)
        keys = self._book.release(victims) if len(victims) <= count else None
        if keys is None:
            raise InputError(
                f"policy {self._policy_name()}: expected evict to return at most {count} different "
                f"evictable slots, got {victims.tolist()}"
            )
        return keys

    def _evict_others(self, count: int, spared: Slots) -> list[OffloadKey]:
        """Evict with the spared slots hidden from the policy."""
        self._evictable[spared] = False
        try:
            return self._evict(count)
        finally:
            self._evictable[spared] = True

    def _drop(self, slots: Slots, reason: MissReason | None) -> None:
        """Make held chunks absent, and note the reason; slots in use become doomed."""
        ready, busy = self._readers[slots] != WRITING, self._readers[slots] != 0
        self.policy.remove(slots)
        keys = self._book.remove(slots)
        self._doomed.update(compress(zip(slots.tolist(), keys, strict=True), busy.tolist()))
        self._book.free(slots[~busy])
        if reason is not None:
            self._miss_history.note(keys, reason)
        self._announce(list(compress(keys, ready.tolist())), removed=True)

    def _slots_of_job(self, keys: list[OffloadKey], spec: LoadStoreSpec | None, used: Mask) -> Slots:
        """Return the slot that a job has for each key, `ABSENT` where it has none.

        The job's spec gives the slots. Without a spec, a key's slot is its oldest doomed slot that is in
        `used`, or else the slot that holds it.
        """
        if isinstance(spec, CPULoadStoreSpec):
            return spec.block_ids
        oldest = {key: slot for slot, key in reversed(self._doomed.items()) if used[slot]}
        held = self._book.find(keys).tolist()
        return _array([oldest.get(key, slot) for key, slot in zip(keys, held, strict=True)])

    def _free_doomed(self, slots: Slots, readers: int) -> None:
        """Free the doomed slots with this count of readers: their last job is over."""
        over = [
            s for s in dict.fromkeys(slots.tolist()) if s in self._doomed and self._readers[s] == readers
        ]
        for slot in over:
            del self._doomed[slot]
        self._book.free(_array(over))

    def _announce(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys:
            self._events.append(OffloadingEvent(keys, _MEDIUM, removed))

    def _misuse(self, call: str, state: str, key: OffloadKey) -> InputError:
        """Return the error for a chunk that is not in the state that a call needs."""
        reason = self.explain(key)
        found = "ready" if reason is None else reason.value
        return InputError(f"{call}: expected chunks that are {state}, got {key.hex()}, which is {found}")

    def _policy_name(self) -> str:
        return type(self.policy).__qualname__


def _as_list(keys: Iterable[OffloadKey]) -> list[OffloadKey]:
    return keys if isinstance(keys, list) else list(keys)


def _array(slots: list[int]) -> Slots:
    return np.array(slots, dtype=np.int64)
