"""The manager of the CPU tier: which chunk is in which slot of the pool, who uses it, who leaves.

A chunk that is held, ready or writing, is in the index and ranked by the policy. One that was made absent (by `reset_cache` or
`discard`) while a job was using its slot is *doomed*: it cannot be read, stored or evicted, and its slot comes back when the
job completes. What else is known of a chunk is kept by slot, in arrays: a call costs a few array operations, and little for
each key, however long the prompt.

Events: `prepare_store` announces what it evicted, `complete_store` what became ready, `discard` and `reset_cache` what was ready
and is no more. Called on the scheduler thread only; nothing blocks. A call that raises `InputError` has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError, IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.absent import AbsentKeys
from kvtier.offload.base import MissReason, OffloadingEvent, OffloadingManager, PrepareStoreOutput, ReqContext
from kvtier.policies import CachePolicy, Slots, make_policy
from kvtier.policies.slots import ABSENT, SlotIndex
from kvtier.transfer.base import CPULoadStoreSpec

__all__ = ["CPUOffloadingManager", "ManagerStats"]

_WRITING = -1
_NOBODY = -1  # no string has this hash
_NONE: Slots = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """How full a tier is, in slots, and what has happened to chunks so far."""

    slots: int
    free: int
    ready: int
    """Chunks that can be read, including those being read."""
    reading: int
    writing: int
    doomed: int
    stored: int
    """Chunks that became ready, in all."""
    evicted: int
    refused: int
    """Chunks that were offered and not taken: below the threshold, or no place."""


class CPUOffloadingManager(OffloadingManager):
    """Keeps up to `num_slots` chunks; `policy` says who leaves.

    With a `store_threshold` of 2 or more, a chunk is taken only when it is offered that many times. `max_tracked` bounds
    what is remembered of absent chunks: how often they were offered, and why they are absent.
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
            raise InputError(f"expected num_slots >= 0 and max_tracked >= 0, got {num_slots} and {max_tracked}")
        self.num_slots = num_slots
        self.policy = make_policy(policy, num_slots) if isinstance(policy, str) else policy
        if self.policy.capacity != num_slots:
            raise InputError(f"policy: expected one for {num_slots} slots, got one for {self.policy.capacity}")
        self._index = SlotIndex(num_slots)
        self._doomed: dict[OffloadKey, int] = {}
        self._readers = np.zeros(num_slots, dtype=np.int64)  # _WRITING while being written
        self._evictable = np.zeros(num_slots, dtype=np.bool_)  # ready and unread
        self._stored_by = np.zeros(num_slots, dtype=np.int64)  # hash of the request's id
        self._free = np.arange(num_slots, dtype=np.int64)[::-1].copy()  # a stack: the first `_num_free` are free
        self._num_free = num_slots
        self._store_threshold = store_threshold
        self._absent = AbsentKeys(max_tracked)
        self._events: list[OffloadingEvent] = []
        self._stored = self._evicted = self._refused = 0

    # -- lookup ------------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        slot = self._index.get(key)
        if slot is None:
            return False
        return None if self._readers[slot] == _WRITING else True

    def lookup_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext, *, wait: bool = True) -> int | None:
        slots = self._index.leading(_as_list(keys))
        writing = self._readers[slots] == _WRITING
        if not writing.any():
            return len(slots)
        return None if wait else int(writing.argmax())

    def explain(self, key: OffloadKey) -> MissReason | None:
        found = self.lookup(key, _ANYONE)
        if found is False:
            return self._absent.reason(key)
        return None if found else MissReason.WRITING

    # -- load --------------------------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        keys = _as_list(keys)
        slots = self._index.find(keys)
        self._expect("prepare_load", "ready", keys, slots != ABSENT)
        self._expect("prepare_load", "ready", keys, self._readers[slots] != _WRITING)
        np.add.at(self._readers, slots, 1)
        self._evictable[slots] = False
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Iterable[OffloadKey]) -> None:
        keys = _as_list(keys)
        slots = self._index.find(keys)
        if self._doomed:
            slots = _array([self._doomed.get(key, slot) for key, slot in zip(keys, slots.tolist(), strict=True)])
        self._expect("complete_load", "being read", keys, slots != ABSENT)
        np.subtract.at(self._readers, slots, 1)
        left = self._readers[slots]
        if (left < 0).any():
            np.add.at(self._readers, slots, 1)
            self._expect("complete_load", "being read", keys, left >= 0)
        self._evictable[slots] = left == 0
        self._free_doomed(keys, 0)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        slots = self._index.held(_as_list(keys))
        if len(slots):
            user = hash(req_context.req_id) if req_context.req_id else _NOBODY
            self.policy.touch(slots, self._stored_by[slots] != user)

    # -- store -------------------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        offered = _as_list(keys)
        wanted = self._admit(self._missing(offered))
        if not wanted:
            return PrepareStoreOutput([], CPULoadStoreSpec([]))
        evicted = self._make_room(len(wanted), offered)
        if len(wanted) > self._num_free:
            self._refuse(wanted[self._num_free :])
            del wanted[self._num_free :]
        if not wanted:
            return None
        return PrepareStoreOutput(wanted, CPULoadStoreSpec(self._allocate(wanted, req_context)), evicted)

    def complete_store(self, keys: Iterable[OffloadKey], success: bool = True) -> None:
        keys = _as_list(keys)
        self._free_doomed(keys, _WRITING)
        slots = self._index.held(keys)
        slots = slots[self._readers[slots] == _WRITING]
        if success:
            self._readers[slots] = 0
            self._evictable[slots] = True
            self._stored += len(slots)
            self._announce(self._index.keys(slots), removed=False)
        else:
            self.policy.remove(slots)
            self._absent.note(self._index.remove(slots), MissReason.FAILED)
            self._release(slots)

    def discard(self, keys: Iterable[OffloadKey], reason: MissReason = MissReason.FAILED) -> None:
        self._drop(self._index.held(_as_list(keys)), reason)

    def reset_cache(self) -> None:
        self._drop(self._held_slots(), MissReason.CLEARED)
        self.policy.clear()
        self._absent.forget_offers()

    # -- reports -----------------------------------------------------------------------------------------------------------

    def take_events(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def stats(self) -> ManagerStats:
        """Count slots by state, and what has happened so far."""
        readers = self._readers[self._held_slots()]
        return ManagerStats(
            slots=self.num_slots,
            free=self._num_free,
            ready=int((readers >= 0).sum()),
            reading=int((readers > 0).sum()),
            writing=int((readers < 0).sum()),
            doomed=len(self._doomed),
            stored=self._stored,
            evicted=self._evicted,
            refused=self._refused,
        )

    def check(self) -> None:
        self.policy.check()
        held, doomed, free = self._held_slots(), list(self._doomed.values()), self._free[: self._num_free]
        unread = np.zeros(self.num_slots, dtype=np.bool_)
        unread[held] = self._readers[held] == 0
        keys = self._index.keys(held)
        for holds, what in (
            (len(held) + len(doomed) + len(free) == self.num_slots, "every slot is held, doomed or free"),
            (len(self._index) == len(keys) == len(held), "a slot has a key iff it is held"),
            (np.array_equal(self._index.find(keys), held), "keys and slots map to each other"),
            (not self._index.held(list(self._doomed)).size, "no doomed chunk is held"),
            (self._readers.min(initial=0) >= _WRITING, "a chunk has one writer"),
            (self._readers[doomed].all(), "doomed chunks are in use"),
            (not self._readers[free].any(), "free slots are not in use"),
            (np.array_equal(self._evictable, unread), "what may be evicted is ready and unread"),
            (np.array_equal(np.sort(self.policy.ranked()), held), f"{self._policy_name()} ranks what is held"),
        ):
            if not holds:
                raise IntegrityError(f"CPU manager: expected that {what}; {self.stats()}")

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _held_slots(self) -> Slots:
        """Return the slots that are neither free nor doomed, in ascending order."""
        held = np.ones(self.num_slots, dtype=np.bool_)
        held[self._free[: self._num_free]] = False
        held[list(self._doomed.values())] = False
        return np.flatnonzero(held)

    def _missing(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the keys of an offer that could be stored, each once."""
        missing = self._index.missing(keys)
        return [key for key in missing if key not in self._doomed] if self._doomed else missing

    def _admit(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that have been offered often enough to be taken."""
        if self._store_threshold < 2:
            return keys
        counts = self._absent.count_offers(keys)
        self._refuse([key for key in keys if counts[key] < self._store_threshold])
        return [key for key in keys if counts[key] >= self._store_threshold]

    def _refuse(self, keys: list[OffloadKey]) -> None:
        self._refused += len(keys)
        self._absent.note(keys, MissReason.REFUSED)

    def _make_room(self, count: int, offered: list[OffloadKey]) -> list[OffloadKey]:
        """Evict until `count` slots are free, or as many as can be, and return who left. What is offered stays."""
        needed = count - self._num_free
        if needed <= 0:
            return []
        victims = self._choose_victims(needed, self._index.held(offered) if len(offered) > count else _NONE)
        keys = self._index.remove(victims)
        self._release(victims)
        self._evicted += len(keys)
        self._absent.note(keys, MissReason.EVICTED)
        self._announce(keys, removed=True)
        return keys

    def _choose_victims(self, count: int, spared: Slots) -> Slots:
        """Have the policy choose among the evictable chunks that are not spared, and check its choice."""
        spared = spared[self._evictable[spared]]
        self._evictable[spared] = False
        try:
            victims = self.policy.evict(count, self._evictable, self._index.keys)
            if not self._are_evictable(victims) or len(victims) > count:
                raise InputError(
                    f"policy {self._policy_name()}: expected evict to return at most {count} different evictable slots, "
                    f"got {victims.tolist()}"
                )
        finally:
            self._evictable[spared] = True
        return victims

    def _are_evictable(self, slots: Slots) -> bool:
        """Say whether these are slots of ours, each once, that may be evicted."""
        try:
            return self._index.count(slots, self._evictable) == len(slots)
        except IndexError:
            return False

    def _allocate(self, keys: list[OffloadKey], req_context: ReqContext) -> Slots:
        """Give each key a free slot to be written.

        What was stored together and evicted from its tail on comes back in ascending slots, which one copy can fill.
        """
        end, self._num_free = self._num_free, self._num_free - len(keys)
        slots = self._free[self._num_free : end][::-1].copy()
        self._index.add(keys, slots)
        self._readers[slots] = _WRITING
        self._stored_by[slots] = hash(req_context.req_id)
        self.policy.insert(slots, keys)
        return slots

    def _drop(self, slots: Slots, reason: MissReason) -> None:
        """Make held chunks absent; those in use become doomed."""
        ready, busy = self._readers[slots] != _WRITING, self._readers[slots] != 0
        self.policy.remove(slots)
        keys = self._index.remove(slots)
        self._evictable[slots] = False
        self._doomed.update(compress(zip(keys, slots.tolist(), strict=True), busy.tolist()))
        self._release(slots[~busy])
        self._absent.note(keys, reason)
        self._announce(list(compress(keys, ready.tolist())), removed=True)

    def _free_doomed(self, keys: list[OffloadKey], readers: int) -> None:
        """Free the slots of those doomed chunks that have this count of readers: their last job is over."""
        if self._doomed:
            over = [key for key in keys if key in self._doomed and self._readers[self._doomed[key]] == readers]
            self._release(_array([self._doomed.pop(key) for key in dict.fromkeys(over)]))

    def _release(self, slots: Slots) -> None:
        start, self._num_free = self._num_free, self._num_free + len(slots)
        self._free[start : self._num_free] = slots
        self._readers[slots] = 0
        self._evictable[slots] = False

    def _announce(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys:
            self._events.append(OffloadingEvent(keys.copy(), CPULoadStoreSpec.medium(), removed))

    def _expect(self, call: str, state: str, keys: list[OffloadKey], holds: npt.NDArray[np.bool_]) -> None:
        """Raise `InputError` for the first key that is not in the state that a call needs."""
        if not holds.all():
            key = keys[holds.argmin()]
            reason = self.explain(key)
            found = "ready" if reason is None else reason.value
            raise InputError(f"{call}: expected chunks that are {state}, got {key.hex()}, which is {found}")

    def _policy_name(self) -> str:
        return type(self.policy).__qualname__


_ANYONE = ReqContext()


def _as_list(keys: Iterable[OffloadKey]) -> list[OffloadKey]:
    return keys if isinstance(keys, list) else list(keys)


def _array(slots: list[int]) -> Slots:
    return np.array(slots, dtype=np.int64)
