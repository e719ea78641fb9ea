"""`SlotTier`: a tier that assigns rows to the slots of its backend, and so knows what it holds.

Lookups are answered from memory. A demotion takes a slot, evicts if it must, and is announced when its call
has succeeded; a promotion pins its slots until its call has returned. A row that fails its check is dropped
in this tier only. Three things are bounded: bytes queued for demotion (the end of a job that is too long is
refused), bytes with the backend (`tiers/io_threads`), bytes written in a day. Calls that are stuck or fail
suspend the tier (`io_tier.TierHealth`).

`DiskTier` is a `SlotTier` over files; the tests of a manager use one with a backend in memory. Scheduler
thread only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey
from kvtier.policies import Ending, Slots
from kvtier.policies.slots import ABSENT, slot_array
from kvtier.residency import BoundedKeyMap, MissReason, OffloadingEvent
from kvtier.slot_table import NO_SLOTS, ChangeLog, SlotTable
from kvtier.tiers.base import Backend, BackendRow, Direction, RowBatch, RowJob, TierResult
from kvtier.tiers.io_tier import REMEMBERED, IOTier
from kvtier.tiers.seal import SealScope

_BAD_ROWS = 2
_QUEUED_BYTES = 256 << 20
_DISCARD_WAIT = 0.5
"""How long a discard may wait for deletions, and for writes that have begun."""
_HOURS = 24


class WriteLimit:
    """Bounds the bytes that a tier writes in any 24 hours, counted by the hour.

    Flash wears out, and an engine can write more in a day than a disk is made for in a month. Hours are
    those of the wall clock, because the count outlives the process. If the clock goes back, writes count
    into the newest hour; if the clock was more than a day ahead, the old counts are treated as written just
    now. Scheduler thread only.
    """

    def __init__(self, limit: int | None, wall_clock: Callable[[], float] = time.time) -> None:
        """Without a `limit`, bytes are only counted."""
        self.limit = limit
        self._wall_clock = wall_clock
        self._hour = 0
        self._written = [0] * _HOURS

    @property
    def room(self) -> int | None:
        """The bytes that may be written now; `None` if there is no limit."""
        if self.limit is None:
            return None
        self._turn()
        return max(0, self.limit - sum(self._written))

    def spend(self, nbytes: int) -> None:
        """Count written bytes."""
        self._turn()
        self._written[self._hour % _HOURS] += nbytes

    def give_back(self, nbytes: int) -> None:
        """Take back bytes that were counted and not written, as far as that was in this hour."""
        self._turn()
        at = self._hour % _HOURS
        self._written[at] = max(0, self._written[at] - nbytes)

    def save(self) -> list[int]:
        """Return the state for a later process: the hour, and the bytes of each of 24 hours."""
        return [self._hour, *self._written]

    def restore(self, saved: Sequence[int]) -> None:
        """Continue the count of an earlier process. Ignores invalid values."""
        if len(saved) == _HOURS + 1 and saved[0] > 0 and min(saved) >= 0:
            self._hour, self._written = saved[0], list(saved[1:])
        self._turn()

    def _turn(self) -> None:
        """Forget the hours that are more than a day ago."""
        if (now := int(self._wall_clock() // 3600)) == self._hour:
            return
        if (ahead := self._hour - now) > _HOURS:  # else nothing would be forgotten until that hour
            self._written = [self._written[(hour + ahead) % _HOURS] for hour in range(_HOURS)]
            self._hour = now
        for hour in range(max(self._hour, now - _HOURS) + 1, now + 1):
            self._written[hour % _HOURS] = 0
        self._hour = max(self._hour, now)


class SlotTier(IOTier):
    """Rows of `row_bytes` at most in slots of a backend. It is not open until `open_table` is called."""

    def __init__(
        self,
        name: str,
        row_bytes: int,
        *,
        threads: int = 8,
        max_in_flight: int = 16 << 20,
        max_queued: int = _QUEUED_BYTES,
        write_limit: WriteLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
        check_seals: bool = True,
    ) -> None:
        super().__init__(
            name,
            row_bytes,
            threads=threads,
            max_in_flight=max_in_flight,
            max_queued=max_queued,
            clock=clock,
            check_seals=check_seals,
        )
        self._limit = write_limit or WriteLimit(None)
        self._table: SlotTable | None = None
        self._offered: BoundedKeyMap[bool] = BoundedKeyMap(REMEMBERED)
        self._read_failures: Counter[int] = Counter()
        self._bad_rows: Counter[int] = Counter()  # by slot, for as long as the tier lives
        self._undeleted: set[int] = set()  # slots of dropped rows that a later process might find
        self._delete_again: list[Callable[[], None]] = []
        self._changes = ChangeLog(self.medium, self._misses.record)

    def open_table(self, table: SlotTable, backend: Backend, scope: SealScope) -> None:
        """Open the tier with these slots, this backend and this scope."""
        self._table, self._io.backend, self._scope = table, backend, scope

    # -- asking ------------------------------------------------------------------------------------

    def lookup_many(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        self._take_opened()
        table = self._readable()
        if table is None:
            return [None if self.is_awaited() else False] * len(keys)
        return [*table.ready(_as_list(keys))]

    def explain(self, key: OffloadKey) -> MissReason | None:
        table = self._table
        if table is None:
            return MissReason.NOT_OPEN
        if table.is_writing(key):
            return MissReason.WRITING
        if table.ready([key])[0]:
            return MissReason.SUSPENDED if self._is_suspended(Direction.PROMOTE) else None
        return self._changes.explain(key) or self._misses.get(key) or MissReason.NEVER_STORED

    def _readable(self) -> SlotTable | None:
        return None if self._is_suspended(Direction.PROMOTE) or self._closed else self._table

    def _writable(self) -> SlotTable | None:
        """Return the table if demotions are taken now."""
        return self._table if self.takes_rows() else None

    # -- moving ------------------------------------------------------------------------------------

    def promote(self, job: RowJob) -> None:
        table = self._readable()
        if table is None:
            is_open = self._table is not None
            self._refuse(job, range(len(job)), MissReason.SUSPENDED if is_open else MissReason.NOT_OPEN)
            return
        ready = table.ready(job.keys)
        job.addresses = table.find(job.keys)
        if all(ready):
            wanted: Sequence[int] = range(len(job))
            table.pin(job.addresses)
        else:
            wanted = [at for at, is_ready in enumerate(ready) if is_ready]
            self._refuse(job, [at for at, is_ready in enumerate(ready) if not is_ready], MissReason.EVICTED)
            table.pin(job.addresses[wanted])
        self._submit(job, wanted)

    def demote(self, job: RowJob) -> list[int]:
        table, offered = self._writable(), job.keys
        if table is None:
            self._record_refused(offered)
            return []
        missing = table.missing(offered)
        wanted = self._within_bounds(self._within_limit(missing))
        if not wanted:
            self._record_refused(missing)
            return []
        spared = table.held(offered) if len(missing) < len(offered) else NO_SLOTS
        slots, evicted, victims = table.reserve(wanted, spared, job.tenant)
        taken = wanted[: len(slots)]
        if len(taken) < len(missing):
            distinct = set(taken)
            self._record_refused([key for key in missing if key not in distinct])
        if evicted:
            self._counts["evicted"] += len(evicted)
            self._misses.record(evicted, MissReason.EVICTED)
            self._announce_removed(evicted, victims)
        positions = job.positions_of(taken)
        if positions:
            self._limit.spend(len(taken) * self.row_bytes)
            self._last_progress = self._clock()
            job.addresses = slots
            if len(positions) < len(job):
                job.addresses = np.full(len(job), ABSENT, dtype=np.int64)
                job.addresses[positions] = slots
            self._submit(job, positions)
        return positions

    def _within_limit(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Leave out keys that the write limit forbids.

        What is left of the limit goes to the rows that are worth most. Beyond it, a row must be worth more
        than a new one; if the policy cannot tell, it must be offered a second time.
        """
        room = self._limit.room
        if room is None or len(keys) * self.row_bytes <= room:
            return keys
        table = self._expect_table()
        worth = table.worth(keys)
        if worth is None:
            worth = np.array([2.0 if self._offered.get(key) else 1.0 for key in keys])
        is_written = worth > 1.0
        is_written[_best(worth, room // self.row_bytes)] = True
        forbidden = list(compress(keys, (~is_written).tolist()))
        self._offered.record(forbidden, True)
        table.refuse(forbidden)
        return list(compress(keys, is_written.tolist()))

    def _within_bounds(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Leave out the rows that are worth least, the last first, if not all fit into the queue."""
        count = len(super()._within_bounds(keys))
        worth = None if count == len(keys) else self._expect_table().worth(keys)
        return keys[:count] if worth is None else [keys[at] for at in sorted(_best(worth, count).tolist())]

    # -- outcomes of rows --------------------------------------------------------------------------

    def _settle_read(self, result: TierResult) -> None:
        job, positions, outcome = result.job, result.positions, result.outcome
        if outcome is None:
            if self._read_failures:
                for slot in job.addresses_at(positions).tolist():
                    self._read_failures.pop(slot, None)
        elif outcome is MissReason.FAILED:
            self._drop_bad(self._still_held(job, positions), MissReason.FAILED)
        elif outcome is MissReason.EVICTED:
            self._drop_bad(self._still_held(job, positions), MissReason.LOST)
        elif outcome is MissReason.IO_FAILED:
            self._count_read_failures(job, positions)
        if self._table is not None:
            self._table.unpin(job.addresses_at(positions))

    def _settle_write(self, result: TierResult) -> None:
        job, positions, outcome = result.job, result.positions, result.outcome
        table, slots = self._expect_table(), job.addresses_at(positions)
        if self._undeleted:
            self._undeleted.difference_update(slots.tolist())
        if outcome is None:
            keys = result.keys
            if (stored := table.complete(keys)) is not None:
                self._announce_stored(stored)
                return
            held = table.find(keys) == slots
            self._announce_stored(table.written(slots[held]))
            if not held.all():
                gone = np.flatnonzero(~held).tolist()
                self._end_discarded(job, [keys[at] for at in gone], slots[gone])
        elif outcome is MissReason.IO_FAILED:
            self._misses.record(table.unwritten(slots), MissReason.IO_FAILED)
        else:
            self._limit.give_back(len(positions) * self.row_bytes)
            self._misses.record(table.unwritten(slots), MissReason.REFUSED)

    def _end_discarded(self, job: RowJob, keys: list[OffloadKey], slots: Slots) -> None:
        """Free the slots of rows of a job that were made absent while they were written.

        A row from before a reset is void by its scope; a discarded row must be deleted first.
        """
        free = self._expect_table().written
        if job.scope.number != self._scope.number:
            free(slots)
        else:
            self._delete(keys, slots, free)

    def _delete(self, keys: list[OffloadKey], slots: Slots, free: Callable[[Slots], object]) -> None:
        """Delete rows, then free their slots. Failed deletions are tried again after a successful probe."""
        backend = self._io.backend
        if keys and backend is not None:
            scope, addresses = self._scope.number, slots.tolist()
            rows = [BackendRow(key, (), at, scope) for key, at in zip(keys, addresses, strict=True)]
            self._undeleted.update(addresses)

            def end(_value: object, error: BaseException | None) -> None:
                if error is None:
                    self._undeleted.difference_update(addresses)
                    free(slots)
                else:
                    self._health[Direction.DEMOTE].suspend(f"rows cannot be deleted: {error}")
                    self._delete_again.append(lambda: self._delete(keys, slots, free))

            self._io.call(lambda: backend.delete(rows), end)

    def _count_read_failures(self, job: RowJob, positions: list[int]) -> None:
        """Drop rows whose read failed twice: a disk may recover after a while, a bad sector does not.

        A read that does not return counts as failed: else every attempt would cost a deadline and a thread.
        """
        slots = self._still_held(job, positions)
        self._read_failures.update(slots)
        self._drop_bad([slot for slot in slots if self._read_failures[slot] > 1], MissReason.IO_FAILED)

    def _still_held(self, job: RowJob, positions: list[int]) -> list[int]:
        """Return the slots that still hold these rows."""
        is_held, slots = self._expect_table().is_held, job.addresses_at(positions).tolist()
        return [slot for key, slot in zip(job.keys_at(positions), slots, strict=True) if is_held(slot, key)]

    def _drop_bad(self, slots: list[int], reason: MissReason) -> None:
        """Drop rows whose bytes are at fault. A slot that has spoilt two rows is not used again."""
        self._bad_rows.update(slots)
        bad = [slot for slot in slots if self._bad_rows[slot] >= _BAD_ROWS]
        if bad:
            self._expect_table().pin(slot_array(bad))  # for ever, so the slot never becomes free
        self._drop(slot_array(slots), reason)

    def _drop(self, slots: Slots, reason: MissReason) -> None:
        """Make chunks absent, on the backend too. Their slots become free when the deletion is done."""
        if not len(slots):
            return
        table = self._expect_table()
        slots = np.unique(slots)
        keys = table.keys(slots)
        ready = np.array(table.ready(keys), dtype=np.bool_)
        table.pin(slots[ready])  # the slots must not be reused before the records are deleted
        removed, unwritten = table.drop(slots)
        self._undeleted.update(slots[~ready].tolist())  # until the write has ended and the row is deleted
        self._io.cancel(Direction.DEMOTE, unwritten, MissReason.FAILED)
        self._misses.record([*removed, *unwritten], reason)
        self._announce_removed(removed, slots[ready])
        for slot in slots[ready].tolist():
            self._read_failures.pop(slot, None)
        self._delete(removed, slots[ready], table.unpin)

    def _announce_stored(
        self, keys: list[OffloadKey], descriptions: tuple[bytes, ...] | None = None
    ) -> None:
        self._changes.add_stored(keys, self._expect_table().find, descriptions)

    def _announce_removed(self, keys: list[OffloadKey], slots: Slots) -> None:
        """Announce the removal of keys that were ready in these slots."""
        self._changes.add_removed(keys)

    # -- suspension --------------------------------------------------------------------------------

    def _settle_stuck_read(self, batch: RowBatch) -> None:
        if self._table is not None:
            self._count_read_failures(batch.job, batch.positions)

    def _end_probe(self, error: BaseException | None) -> None:
        super()._end_probe(error)
        if error is None:
            again, self._delete_again = self._delete_again, []
            for delete in again:
                delete()

    # -- held rows ---------------------------------------------------------------------------------

    def touch(self, keys: Sequence[OffloadKey], ending: Ending | None = None) -> None:
        if self._table is not None:
            slots = self._table.held(_as_list(keys))
            if len(slots):
                self._table.touch(slots, ending=ending)

    def habits(self) -> bytes:
        return b"" if self._table is None else self._table.habits()

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Make chunks with wrong bytes absent, so that they stay absent if the process is then killed.

        Waits for the deletion, for half a second at most, but not if the tier is suspended. If it takes
        longer, the tier is suspended.
        """
        if self._table is None:
            return
        slots = self._table.held(_as_list(keys))
        self._drop(slots, MissReason.FAILED)
        dropped, until = set(slots.tolist()), time.monotonic() + _DISCARD_WAIT
        writing = self._health[Direction.DEMOTE]
        while (
            dropped & self._undeleted and writing.problem is None and (left := until - time.monotonic()) > 0
        ):
            self._io.wait_any(left)
            for result in self._io.poll():
                self._settle(result)
        if writing.problem is None and dropped & self._undeleted:
            self._suspend("a deletion does not return")

    def reset(self, suffix: str) -> None:
        self._scope = SealScope(self._scope.namespace, self._scope.epoch + 1, suffix)
        self._forget_all(MissReason.CLEARED)
        self._io.give_up(MissReason.CLEARED)

    def _forget_all(self, reason: MissReason) -> None:
        """Make everything absent at once, and leave the backend as it is."""
        self._offered.clear()
        self._read_failures.clear()
        self._undeleted.clear()
        if self._table is not None:
            book, ready, unwritten = self._table.clear()
            self._misses.record(unwritten, reason)
            self._changes.add_cleared(book, self._announced(ready), reason)

    def take_events(self) -> list[OffloadingEvent]:
        return self._changes.take()

    def _announced(self, slots: Slots) -> Slots:
        """Return those of the slots whose chunks were announced; their removal is about to be."""
        return slots

    def has_pending_work(self) -> bool:
        return super().has_pending_work() or self._changes.has_slices()

    # -- reports -----------------------------------------------------------------------------------

    def _num_rows(self) -> tuple[int, int]:
        return (0, 0) if self._table is None else (len(self._table), self._table.num_slots)

    def check(self) -> None:
        super().check()
        if self._table is not None:
            self._table.check()

    def _expect_table(self) -> SlotTable:
        assert self._table is not None, "rows come back only from a table that gave them slots"
        return self._table


def _best(worth: npt.NDArray[np.float64], count: int) -> Slots:
    """Return the positions of the `count` highest numbers; between equal ones, the first."""
    return np.argsort(-worth, kind="stable")[:count]


def _as_list(keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    return keys if isinstance(keys, list) else list(keys)
