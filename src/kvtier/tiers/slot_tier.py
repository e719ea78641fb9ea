"""`SlotTier`: a tier that assigns rows to the slots of its backend, and so knows what it holds.

Lookups are answered from memory. A demotion takes a slot, evicts if it must, and is announced when its call
has succeeded; a promotion pins its slots until its call has returned. A row that fails its check is dropped
in this tier only. Three things are bounded: bytes queued for demotion (the end of a job that is too long is
refused), bytes with the backend (`tiers/io_threads`), bytes written in a day. Calls that are stuck or fail
suspend the tier (`tiers/health`).

`DiskTier` is a `SlotTier` over files; the tests of a manager use one with a backend in memory. Scheduler
thread only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np

from kvtier.keys import OffloadKey
from kvtier.policies import Slots
from kvtier.policies.slots import ClearedChunks
from kvtier.slot_table import SlotTable
from kvtier.tiers.base import Backend, BackendRow, Outcome, TierChange, TierJob, TierMiss
from kvtier.tiers.io_threads import Direction, IOReport
from kvtier.tiers.io_tier import REMEMBERED, IOTier
from kvtier.tiers.recent_keys import RecentKeys
from kvtier.tiers.row_mover import JobRows
from kvtier.tiers.seal import SealScope
from kvtier.tiers.write_limit import WriteLimit

__all__ = ["SlotTier"]

_BAD_ROWS = 2
_QUEUED_BYTES = 256 << 20
_SLICE = 2048
"""Chunks of a reset that are announced per step."""
_DISCARD_WAIT = 0.5
"""How long a discard may wait for deletions, and for writes that have begun."""


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
        self._offered: RecentKeys[bool] = RecentKeys(REMEMBERED)
        self._read_failures: Counter[int] = Counter()
        self._bad_rows: Counter[int] = Counter()  # by slot, for as long as the tier lives
        self._undeleted: set[int] = set()  # slots of dropped rows that a later process might find
        self._delete_again: list[Callable[[], None]] = []
        self._events: list[TierChange] = []
        self._cleared, self._cleared_because = ClearedChunks(), TierMiss.CLEARED

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

    def lookup_prefix(self, keys: Sequence[OffloadKey]) -> int | None:
        self._take_opened()
        table = self._readable()
        if table is None:
            return None if keys and self.is_awaited() else 0
        return table.leading(_as_list(keys))

    def explain(self, key: OffloadKey) -> TierMiss | None:
        table = self._table
        if table is None:
            return TierMiss.NOT_OPEN
        if table.is_writing(key):
            return TierMiss.WRITING
        if table.ready([key])[0]:
            return TierMiss.SUSPENDED if self._is_suspended(Direction.PROMOTE) else None
        if key in self._cleared:
            return self._cleared_because
        return self._misses.get(key) or TierMiss.NEVER_STORED

    def _readable(self) -> SlotTable | None:
        return None if self._is_suspended(Direction.PROMOTE) or self._closed else self._table

    def _writable(self) -> SlotTable | None:
        """Return the table if demotions are taken now."""
        return self._table if self.takes_rows() else None

    # -- moving ------------------------------------------------------------------------------------

    def promote(self, job: TierJob) -> None:
        table, keys = self._readable(), job.keys
        if table is None:
            is_open = self._table is not None
            self._refuse(job.job_id, keys, Outcome.SUSPENDED if is_open else Outcome.ABSENT)
            return
        ready = table.ready(keys)
        self._refuse(
            job.job_id, [key for key, found in zip(keys, ready, strict=True) if not found], Outcome.ABSENT
        )
        slots = table.find(list(compress(keys, ready)))
        table.pin(slots)
        self._submit_reads(job, ready, slots.tolist())

    def demote(self, job: TierJob) -> list[OffloadKey]:
        table, offered = self._writable(), job.keys
        if table is None:
            self._note_refused(offered)
            return []
        missing = table.missing(offered)
        wanted = self._within_bounds(self._within_limit(missing))
        if not wanted:
            self._note_refused(missing)
            return []
        spared = table.held(offered) if len(missing) < len(offered) else _NO_SLOTS
        slots, evicted, victims = table.reserve(wanted, spared)
        taken = wanted[: len(slots)]
        if len(taken) < len(missing):
            distinct = set(taken)
            self._note_refused([key for key in missing if key not in distinct])
        if evicted:
            self._counts["evicted"] += len(evicted)
            self._misses.note(evicted, TierMiss.EVICTED)
            self._announce_removed(evicted, victims)
        if taken:
            self._limit.spend(len(taken) * self.row_bytes)
            self._last_progress = self._clock()
            self._submit_writes(job, taken, slots.tolist())
        return taken

    def _withdrawn(self, direction: Direction, rows: JobRows) -> None:
        (self._unpin if direction is Direction.PROMOTE else self._note_dropped)(rows)

    def _within_limit(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Leave out keys that the write limit forbids: beyond it, a row must be offered a second time."""
        room = self._limit.room
        if room is None or len(keys) * self.row_bytes <= room:
            return keys
        within = room // self.row_bytes
        forbidden = dict.fromkeys(key for key in keys[within:] if not self._offered.get(key))
        self._offered.note(forbidden, True)
        return [key for key in keys if key not in forbidden]

    # -- outcomes of rows --------------------------------------------------------------------------

    def _settle_read(self, report: IOReport) -> None:
        rows, outcome = report.rows, report.returned or report.outcome
        health = self._health[Direction.PROMOTE]
        if outcome is Outcome.DONE:
            if report.returned is None:
                self._count_moved(report, "promoted")
            health.note_success()
            for place in rows.places if self._read_failures else ():
                self._read_failures.pop(place, None)
            self._unpin(rows)
        elif outcome is Outcome.FAILED_CHECK:
            self._counts["failed_checks"] += len(rows)
            self._drop_bad(self._still_held(rows), TierMiss.FAILED_CHECK)
            self._unpin(rows)
        elif outcome is Outcome.ABSENT:
            self._drop_bad(self._still_held(rows), TierMiss.LOST)
            self._unpin(rows)
        elif outcome is Outcome.FAILED:
            self._counts["failed"] += len(rows)
            health.note_failure(report.why)
            self._note_read_failures(rows)
            self._unpin(rows)
        else:
            self._unpin(rows)

    def _settle_write(self, report: IOReport) -> None:
        rows, outcome = report.rows, report.returned or report.outcome
        health = self._health[Direction.DEMOTE]
        table = self._expect_table()
        self._undeleted.difference_update(rows.places)
        if outcome is Outcome.DONE:
            self._count_moved(report, "demoted")
            health.note_success()
            self._last_progress = self._clock()
            if (stored := table.complete(rows.keys)) is not None:
                self._announce_stored(stored)
                return
            slots = _array(rows.places)
            held = table.find(rows.keys) == slots
            self._announce_stored(table.written(slots[held]))
            if not held.all():
                self._end_discarded(rows.pick(np.flatnonzero(~held).tolist()), report.scope)
        elif outcome is Outcome.FAILED:
            self._counts["failed"] += len(rows)
            health.note_failure(report.why)
            self._misses.note(table.unwritten(_array(rows.places)), TierMiss.FAILED)
        else:
            self._note_dropped(rows)

    def _end_discarded(self, rows: JobRows, scope: SealScope) -> None:
        """Free the slots of rows that were made absent while they were written.

        A row from before a reset is void by its scope; a discarded row must be deleted first.
        """
        free = self._expect_table().written
        if scope.number != self._scope.number:
            free(_array(rows.places))
        else:
            self._delete(rows.keys, rows.places, free)

    def _delete(self, keys: list[OffloadKey], places: list[int], free: Callable[[Slots], object]) -> None:
        """Delete rows, then free their slots. Failed deletions are tried again after a successful probe."""
        backend = self._io.backend
        if keys and backend is not None:
            scope = self._scope.number
            rows = [BackendRow(key, (), place, scope) for key, place in zip(keys, places, strict=True)]
            self._undeleted.update(places)

            def end(_value: object, error: BaseException | None) -> None:
                if error is None:
                    self._undeleted.difference_update(places)
                    free(_array(places))
                else:
                    self._health[Direction.DEMOTE].suspend(f"rows cannot be deleted: {error}")
                    self._delete_again.append(lambda: self._delete(keys, places, free))

            self._io.call(lambda: backend.delete(rows), end)

    def _note_read_failures(self, rows: JobRows) -> None:
        """Drop rows whose read failed twice: a disk may recover after a while, a bad sector does not.

        A read that does not return counts as failed: else every attempt would cost a deadline and a thread.
        """
        slots = self._still_held(rows)
        self._read_failures.update(slots)
        self._drop_bad([slot for slot in slots if self._read_failures[slot] > 1], TierMiss.FAILED)

    def _still_held(self, rows: JobRows) -> list[int]:
        """Return the slots that still hold these rows."""
        is_held = self._expect_table().is_held
        return [slot for key, slot in zip(rows.keys, rows.places, strict=True) if is_held(slot, key)]

    def _drop_bad(self, slots: list[int], reason: TierMiss) -> None:
        """Drop rows whose bytes are at fault. A slot that has spoilt two rows is not used again."""
        self._bad_rows.update(slots)
        bad = [slot for slot in slots if self._bad_rows[slot] >= _BAD_ROWS]
        if bad:
            self._expect_table().pin(_array(bad))  # for ever, so the slot never becomes free
        self._drop(_array(slots), reason)

    def _drop(self, slots: Slots, reason: TierMiss) -> None:
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
        self._io.cancel(Direction.DEMOTE, unwritten, Outcome.FAILED_CHECK)
        self._misses.note([*removed, *unwritten], reason)
        self._announce_removed(removed, slots[ready])
        places = slots[ready].tolist()
        for place in places:
            self._read_failures.pop(place, None)
        self._delete(removed, places, table.unpin)

    def _unpin(self, rows: JobRows) -> None:
        if self._table is not None:
            self._table.unpin(_array(rows.places))

    def _note_dropped(self, rows: JobRows) -> None:
        """Give up rows that were taken for demotion but never written."""
        self._counts["dropped"] += len(rows)
        self._limit.give_back(rows.nbytes)
        if self._table is not None:
            self._misses.note(self._table.unwritten(_array(rows.places)), TierMiss.REFUSED)

    def _announce_stored(
        self, keys: list[OffloadKey], descriptions: tuple[bytes, ...] | None = None
    ) -> None:
        if keys:
            if self._cleared:
                self._announce_cleared(self._cleared.take_before(keys, self._expect_table().find(keys)))
            self._events.append(TierChange(tuple(keys), self.medium, False, descriptions))

    def _announce_removed(self, keys: list[OffloadKey], slots: Slots) -> None:
        """Announce the removal of keys that were ready in these slots."""
        if keys:
            self._events.append(TierChange(tuple(keys), self.medium, True))

    # -- suspension --------------------------------------------------------------------------------

    def _note_stuck_reads(self, rows: JobRows) -> None:
        if self._table is not None:
            self._note_read_failures(rows)

    def _end_probe(self, value: object, error: BaseException | None) -> None:
        super()._end_probe(value, error)
        if error is None:
            again, self._delete_again = self._delete_again, []
            for delete in again:
                delete()

    # -- held rows ---------------------------------------------------------------------------------

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        if self._table is not None:
            slots = self._table.held(_as_list(keys))
            if len(slots):
                self._table.touch(slots)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Make chunks with wrong bytes absent, so that they stay absent if the process is then killed.

        Waits for the deletion, for half a second at most, but not if the tier is suspended. If it takes
        longer, the tier is suspended.
        """
        if self._table is None:
            return
        slots = self._table.held(_as_list(keys))
        self._drop(slots, TierMiss.FAILED_CHECK)
        dropped, until = set(slots.tolist()), time.monotonic() + _DISCARD_WAIT
        writing = self._health[Direction.DEMOTE]
        while (
            dropped & self._undeleted and writing.problem is None and (left := until - time.monotonic()) > 0
        ):
            self._io.wait_any(left)
            for report in self._io.poll():
                self._settle(report)
        if writing.problem is None and dropped & self._undeleted:
            self._suspend("a deletion does not return")

    def reset(self, suffix: str) -> None:
        self._scope = SealScope(self._scope.namespace, self._scope.epoch + 1, suffix)
        self._forget_all(TierMiss.CLEARED)
        self._io.give_up(Outcome.RESET)

    def _forget_all(self, reason: TierMiss) -> None:
        """Make everything absent at once, and leave the backend as it is."""
        self._offered.clear()
        self._read_failures.clear()
        self._undeleted.clear()
        if self._table is not None:
            book, ready, unwritten = self._table.clear()
            self._cleared.add(book, self._announced(ready))
            self._cleared_because = reason
            self._misses.note(unwritten, reason)
            self._announce_cleared(self._cleared.take(_SLICE))

    def take_events(self) -> list[TierChange]:
        if self._cleared:
            self._announce_cleared(self._cleared.take(_SLICE))
        events, self._events = self._events, []
        return events

    def _announced(self, slots: Slots) -> Slots:
        """Return those of the slots whose chunks were announced; their removal is about to be."""
        return slots

    def _announce_cleared(self, keys: list[OffloadKey]) -> None:
        if keys:
            self._misses.note(keys, self._cleared_because)
            self._events.append(TierChange(tuple(keys), self.medium, True))

    def has_pending_work(self) -> bool:
        return super().has_pending_work() or bool(self._cleared)

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


_NO_SLOTS: Slots = np.zeros(0, dtype=np.int64)


def _array(slots: list[int]) -> Slots:
    return np.array(slots, dtype=np.int64)


def _as_list(keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    return keys if isinstance(keys, list) else list(keys)
