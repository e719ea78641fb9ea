"""`CPUOffloadingManager`: the manager of the pool.

A `SlotTable` has the slots. The manager adds what only the pool needs: it refuses chunks that were offered
too rarely, remembers why chunks are absent, announces changes, and keeps chunks in the pool that must not
leave it.

Events: `prepare_store` announces the chunks it evicted, `complete_store` the chunks that became ready,
`discard` the chunks that were ready and are now absent. The chunks that `reset_cache` made absent are
announced in slices (`ChangeLog`). Scheduler thread only; nothing blocks. A call that raises `InputError`
has changed nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from kvtier.errors import InputError
from kvtier.keys import OffloadKey
from kvtier.offload.base import NO_REQUEST, OffloadingManager, PrepareStoreOutput, ReqContext
from kvtier.policies import CachePolicy, Slots, make_policy
from kvtier.policies.slots import ABSENT, WRITING
from kvtier.residency import BoundedKeyMap, MissReason, OffloadingEvent
from kvtier.slot_table import NO_SLOTS, NO_USER, ChangeLog, SlotTable
from kvtier.transfer.base import CPULoadStoreSpec, LoadStoreSpec

_MEDIUM = CPULoadStoreSpec.medium()
_EVICTED = MissReason.EVICTED  # an enum lookup takes as long as the lookup of a key


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
    """Chunks that were offered and not taken: offered too rarely, or there was no slot."""
    not_kept: int = 0
    """Chunks that a hint wanted to keep, beyond the part of the slots that may be kept."""
    by_tenant: dict[str, int] = field(default_factory=dict)
    """The slots of each tenant that has any, if tenants have shares."""


class CPUOffloadingManager(OffloadingManager):
    """The manager of up to `num_slots` chunks in the pool; `policy` decides which chunk leaves.

    With a `store_threshold` of 2 or more, a chunk is taken only when it is offered that many times.
    `max_tracked` bounds what is remembered of absent chunks: how often they were offered, and why they are
    absent. `share` is the part of the slots that a tenant may have.
    """

    def __init__(
        self,
        num_slots: int,
        policy: str | CachePolicy = "lru",
        *,
        store_threshold: int = 0,
        max_tracked: int = 64_000,
        share: float | None = None,
    ) -> None:
        if num_slots < 0 or max_tracked < 0:
            raise InputError(
                f"expected num_slots >= 0 and max_tracked >= 0, got {num_slots} and {max_tracked}"
            )
        self.num_slots = num_slots
        policy = make_policy(policy, num_slots) if isinstance(policy, str) else policy
        self._table = SlotTable(num_slots, policy, share)
        self._stays = np.zeros(num_slots, dtype=np.bool_)  # the chunk last put there must not leave the pool
        self._some_stay = False  # whether any chunk ever had to stay
        self._store_threshold = store_threshold
        self._miss_history = MissHistory(max_tracked)
        self._changes = ChangeLog(_MEDIUM, self._miss_history.add)
        self._stored = self._evicted = self._refused = 0

    @property
    def policy(self) -> CachePolicy:
        """The policy that chooses the chunks to evict."""
        return self._table.policy

    # -- lookup ------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        slot = self._table.get(key)
        if slot is None:
            return False
        return None if self._table.readers[slot] == WRITING else True

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        slots = self._table.find(_as_list(keys))
        held = slots != ABSENT
        answers: list[bool | None] = held.tolist()
        for position in np.flatnonzero(held & ~self._table.are_ready(slots)).tolist():
            answers[position] = None
        return answers

    def lookup_prefix(
        self, keys: Iterable[OffloadKey], req_context: ReqContext, *, wait: bool = True
    ) -> int | None:
        keys = _as_list(keys)
        ready = self._table.leading(keys)
        return None if wait and ready < len(keys) and self._table.get(keys[ready]) is not None else ready

    def explain(self, key: OffloadKey) -> MissReason | None:
        found = self.lookup(key, NO_REQUEST)
        if found is False:
            return self._changes.explain(key) or self._miss_history.reason(key)
        return None if found else MissReason.WRITING

    # -- load --------------------------------------------------------------------------------------

    def prepare_load(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        keys = _as_list(keys)
        slots = self._table.find(keys)
        if (pinned := self._table.try_pin(slots)) < len(keys):
            raise self._misuse("prepare_load", "ready", keys[pinned])
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Iterable[OffloadKey], spec: LoadStoreSpec | None = None) -> None:
        keys = _as_list(keys)
        slots = _slots_of(spec)
        if slots is None:
            slots = self._table.used_slots(keys, writing=False)
        if (unpinned := self._table.try_unpin(slots)) < len(keys):
            raise self._misuse("complete_load", "being read", keys[unpinned])

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        slots = self._table.held(_as_list(keys))
        if len(slots):
            user = hash(req_context.req_id) if req_context.req_id else NO_USER
            context = req_context
            self._table.touch(slots, user, context.ending, context.hints, context.tenant)

    # -- store -------------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Iterable[OffloadKey], req_context: ReqContext, *, ignore_threshold: bool = False
    ) -> PrepareStoreOutput | None:
        """Take the chunks of an offer that can be stored.

        With `ignore_threshold`, chunks are taken however rarely they were offered.
        """
        table, offered = self._table, _as_list(keys)
        wanted = table.missing(offered)
        if self._store_threshold > 1 and not ignore_threshold:
            wanted = self._often_enough(wanted)
        if not wanted:
            return PrepareStoreOutput([], CPULoadStoreSpec([]))
        if req_context.is_cut and not ignore_threshold:
            self._refuse(wanted)
            table.refuse(wanted)
            return PrepareStoreOutput([], CPULoadStoreSpec([]))
        needed, tenant, user = len(wanted) - table.num_free(), req_context.tenant, hash(req_context.req_id)
        newcomers = None if ignore_threshold else wanted
        evicted = self._make_room(needed, offered, wanted, newcomers, tenant, user) if needed > 0 else []
        if len(evicted) < needed:
            refused = wanted[len(evicted) - needed :]
            self._refuse(refused)
            del wanted[len(evicted) - needed :]
            req_context.is_cut = table.shortfall(offered, tenant) < len(refused)  # else there is no room
            if not wanted and not req_context.is_cut:
                return None
        slots = table.take(wanted, user, tenant)
        if self._some_stay or req_context.stays_in_pool:
            self._some_stay = True
            self._stays[slots] = req_context.stays_in_pool
        return PrepareStoreOutput(wanted, CPULoadStoreSpec(slots), evicted)

    def _make_room(
        self,
        count: int,
        offered: list[OffloadKey],
        wanted: list[OffloadKey],
        newcomers: list[OffloadKey] | None,
        tenant: str,
        user: int,
    ) -> list[OffloadKey]:
        """Evict up to `count` chunks, none of them of the offer, and return their keys."""
        spared = self._table.held(offered) if len(offered) > len(wanted) else NO_SLOTS
        _, evicted = self._table.make_room(count, spared, newcomers, tenant, user)
        if evicted:
            self._evicted += len(evicted)
            self._miss_history.add(evicted, _EVICTED)
            self._changes.add_removed(evicted.copy())
        return evicted

    def _often_enough(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Count an offer of each key, and return the keys that have been offered often enough."""
        counts = self._miss_history.count_offers(keys)
        self._refuse([key for key in keys if counts[key] < self._store_threshold])
        return [key for key in keys if counts[key] >= self._store_threshold]

    def _refuse(self, keys: list[OffloadKey]) -> None:
        self._refused += len(keys)
        self._miss_history.add(keys, MissReason.REFUSED)

    def reserve(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        return self.prepare_store(keys, req_context, ignore_threshold=True)

    def complete_store(
        self, keys: Iterable[OffloadKey], success: bool = True, spec: LoadStoreSpec | None = None
    ) -> None:
        keys = _as_list(keys)
        written = self._table.complete(keys) if success else None
        if written is None:
            slots = _slots_of(spec)
            if slots is None:
                slots = self._table.used_slots(keys, writing=True)
                slots = slots[slots != ABSENT]
            if not success:
                self._miss_history.add(self._table.unwritten(slots), MissReason.IO_FAILED)
                return
            written = self._table.written(slots)
        self._stored += len(written)
        self._changes.add_stored(written, self._table.find)

    def discard(self, keys: Iterable[OffloadKey], reason: MissReason = MissReason.FAILED) -> None:
        self._drop(self._table.held(_as_list(keys)), reason)

    def abandon_store(self, keys: list[OffloadKey], slots: Slots) -> None:
        """Make chunks absent whose store has failed, while a call may still write their slots.

        The slots become free with `complete_store`. A key that has another slot by now is left alone. The
        reasons remembered for the absent keys do not change.
        """
        self._drop(slots[self._table.find(keys) == slots], None)

    def _drop(self, slots: Slots, reason: MissReason | None) -> None:
        """Make held chunks absent, and remember the reason."""
        ready, unwritten = self._table.drop(slots)
        if reason is not None:
            self._miss_history.add([*ready, *unwritten], reason)
        self._changes.add_removed(ready)

    def reset_cache(self) -> None:
        """Make all chunks absent at once. Some of them are announced now, the others by `take_events`."""
        book, ready, unwritten = self._table.clear()
        self._miss_history.add(unwritten, MissReason.CLEARED)
        self._miss_history.forget_offers()
        self._changes.add_cleared(book, ready, MissReason.CLEARED)

    # -- for tiers below ---------------------------------------------------------------------------

    def shortfall(self, keys: list[OffloadKey]) -> int:
        """Count the slots that are lacking to store these keys, beyond the free and evictable slots."""
        return self._table.shortfall(keys)

    def read_slots(self, slots: Slots) -> list[int]:
        """Return those of the slots that a job still reads."""
        read: list[int] = slots[self._table.readers[slots] > 0].tolist()
        return read

    def demotable(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that are ready and may leave the pool.

        The flag of chunks that must stay is kept by slot, from one `prepare_store` to the next. It is not
        kept by key, because a key may be given up and stored in another slot before its former job reports.
        """
        if not self._some_stay and self._table.leading(keys) == len(keys):
            return keys
        slots = self._table.find(keys)
        may_leave = self._table.are_ready(slots)
        may_leave[may_leave] = ~self._stays[slots[may_leave]]
        return list(compress(keys, may_leave.tolist()))

    def by_tenant(self, keys: list[OffloadKey]) -> dict[str, list[OffloadKey]]:
        """Divide ready chunks by the tenant who stored them. Without shares, there is one."""
        marks = self._table.marks
        if marks is None or marks.limit is None:
            return {"": keys}
        found: dict[str, list[OffloadKey]] = {}
        for key, tenant in zip(keys, marks.tenants_of(self._table.find(keys)), strict=True):
            found.setdefault(tenant, []).append(key)
        return found

    def coldest(self, count: int) -> list[OffloadKey]:
        """Return up to `count` chunks that would be evicted next, in the order of eviction."""
        return self._table.coldest(count)

    def hottest(self) -> list[OffloadKey]:
        """Return all ready chunks without readers, in the reverse order of eviction."""
        return self._table.hottest()

    def take_habits(self, data: bytes) -> bool:
        """Let the policy begin with what another one had learnt, and return whether it was of use."""
        return self._table.take_habits(data)

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return self._table.num_free()

    # -- reports -----------------------------------------------------------------------------------

    def take_events(self) -> list[OffloadingEvent]:
        return self._changes.take()

    def has_pending_work(self) -> bool:
        """Return whether chunks that a reset has made absent are not announced yet."""
        return self._changes.has_slices()

    def stats(self) -> ManagerStats:
        """Return the slots by state, and the totals so far."""
        free, ready, reading, writing, doomed = self._table.counts()
        marks = self._table.marks
        return ManagerStats(
            slots=self.num_slots,
            free=free,
            ready=ready,
            reading=reading,
            writing=writing,
            doomed=doomed,
            stored=self._stored,
            evicted=self._evicted,
            refused=self._refused,
            not_kept=0 if marks is None else marks.not_kept,
            by_tenant={} if marks is None else marks.used_by_tenant(),
        )

    def check(self) -> None:
        self._table.check()

    def _misuse(self, call: str, state: str, key: OffloadKey) -> InputError:
        """Return the error for a chunk that is not in the state that a call needs."""
        reason = self.explain(key)
        found = "ready" if reason is None else reason.value
        return InputError(f"{call}: expected chunks that are {state}, got {key.hex()}, which is {found}")


class MissHistory:
    """Remembers of chunks that a manager does not hold how often they were offered, and why they are absent.

    Of each kind, the newest `limit` keys are remembered, or up to an eighth more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._offers: BoundedKeyMap[int] = BoundedKeyMap(limit)
        self._reasons: BoundedKeyMap[MissReason] = BoundedKeyMap(limit)
        # Filed on the first question: chunks leave by the thousand and few are asked about.
        self._unfiled: deque[tuple[tuple[OffloadKey, ...], MissReason]] = deque()
        self._num_unfiled = 0

    def count_offers(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, int]:
        """Count one more offer of each key and return their counts."""
        counts = {key: (self._offers.get(key) or 0) + 1 for key in keys}
        self._offers.update(counts)
        return counts

    def forget_offers(self) -> None:
        """Start counting anew."""
        self._offers.clear()

    def add(self, keys: list[OffloadKey], reason: MissReason) -> None:
        """Remember why these keys are absent from now on."""
        if not keys:
            return
        self._unfiled.append((tuple(keys), reason))
        self._num_unfiled += len(keys)
        while self._unfiled and self._num_unfiled - len(self._unfiled[0][0]) >= self._limit:
            self._num_unfiled -= len(self._unfiled.popleft()[0])

    def reason(self, key: OffloadKey) -> MissReason:
        """Return why an absent key is absent, as far as is remembered.

        The last reason is returned; the age of the first one decides when the key is forgotten.
        """
        for keys, reason in self._unfiled:
            self._reasons.update(dict.fromkeys(keys, reason), renew=False)
        self._unfiled.clear()
        self._num_unfiled = 0
        return self._reasons.get(key) or MissReason.NEVER_STORED


def _as_list(keys: Iterable[OffloadKey]) -> list[OffloadKey]:
    return keys if isinstance(keys, list) else list(keys)


def _slots_of(spec: LoadStoreSpec | None) -> Slots | None:
    """Return the slots that a job was given."""
    # `isinstance` with an abstract base class takes as long as the lookup of some keys.
    return spec.block_ids if spec is not None and isinstance(spec, CPULoadStoreSpec) else None
