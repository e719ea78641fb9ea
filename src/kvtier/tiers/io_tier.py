"""`IOTier`: the common base of tiers that move rows by I/O threads.

It hands jobs to `tiers/io_threads` and counts their results. Stuck or failing calls suspend the tier
(`TierHealth`); a probe ends the suspension. An I/O thread opens the tier, and tries again with growing
back-off until that works: an idle engine makes no step and must find its tiers open all the same. A subclass
defines how it opens, which rows it takes, and what it knows of a row that was read or written:
`_settle_read`, `_settle_write`. Scheduler thread only, except for functions that say that they run on an I/O
thread; only `wait_open`, `wait_any` and `close` block.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import TypeVar

from kvtier.errors import KVTierError, OutsideError
from kvtier.keys import OffloadKey
from kvtier.residency import MEDIUM_STORAGE, BoundedKeyMap, MissReason
from kvtier.tiers.base import (
    Direction,
    RowBatch,
    RowBuffer,
    RowJob,
    Tier,
    TierResult,
    TierStats,
)
from kvtier.tiers.io_threads import IOCall, IOThreads, say_error
from kvtier.tiers.seal import SealKey, SealScope

logger = logging.getLogger(__name__)

REMEMBERED = 64_000
"""Keys for which a tier remembers something, e.g. the reason of a miss."""
_STUCK_AFTER = 1.0
"""A call of a late job that runs for this many seconds is stuck, not just the last of a long queue."""
_IDLE_AFTER = 1.0
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 10.0
"""Seconds between two attempts to open a tier."""
_LOOK_EVERY = 0.02
"""Seconds between two looks of an opening thread at the clock or the namespace."""
_LOG_AFTER = 1.0
"""Seconds that an opening thread waits for another process without a line in the log."""
_AWAITED_SECONDS = 10.0
"""How long requests may wait for a tier that opens, each within its own wait budget. A million records take
a second or two to read; a tier that takes longer than this hangs, or is too large to wait for.
"""
_FAILURES = 3
"""One bad sector is no reason to give up a disk."""
_FIRST_PROBE, _LONGEST_PROBE = 1.0, 60.0
"""Seconds until the first probe of a suspended tier, and the most seconds between two."""

_T = TypeVar("_T")


class _TierClosedError(Exception):
    """The tier was closed while a thread was opening it."""


class IOTier(Tier):
    """A tier of rows of `row_bytes` at most, moved by threads.

    It is open while the threads have a backend.
    """

    medium = MEDIUM_STORAGE

    def __init__(
        self,
        name: str,
        row_bytes: int,
        *,
        threads: int,
        max_in_flight: int,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
        check_seals: bool = True,
        longest_backoff: float = _LONGEST_PROBE,
        slow_failure: float = inf,
        seal_key: SealKey | None = None,
    ) -> None:
        """`longest_backoff`: the most seconds between two probes of a suspended tier.

        A single failure that took `slow_failure` seconds suspends. `seal_key` makes the seals.
        """
        self.name, self.row_bytes = name, row_bytes
        self._clock = clock
        self._max_queued = max_queued
        self._scope = SealScope("")
        self._io = IOThreads(
            row_bytes=row_bytes,
            name=name,
            threads=threads,
            max_in_flight=max(max_in_flight, 4 * row_bytes),
            clock=clock,
            check_seals=check_seals,
            seal_key=seal_key,
            on_end=self._release_all,
        )
        # Functions that release locks, files and connections. I/O threads change the set.
        self._releases: set[Callable[[], None]] = set()
        self._health = {
            direction: TierHealth(f"{name} tier: {what}", clock, longest_backoff, slow_failure)
            for direction, what in ((Direction.PROMOTE, "reading"), (Direction.DEMOTE, "writing"))
        }
        self.required = False
        """An engine does not start without this tier."""
        self.where = f"{name} tier"
        """How lines in the log begin."""
        self._opening, self._opening_since = IOCall(), float("-inf")
        self._ending = threading.Event()  # the tier is being closed
        # Written by the opening thread, too.
        self.problem: str | None = None
        """Why the tier cannot be opened, in one line; `None` if no reason is known."""
        self._lacks_namespace = False
        self._waits_for: str | None = None
        self._backoff, self._retry_at = _FIRST_BACKOFF, float("-inf")
        self._probing = IOCall()
        self._closed = False
        self._misses: BoundedKeyMap[MissReason] = BoundedKeyMap(REMEMBERED)
        self._results: list[TierResult] = []
        self._last_progress = float("-inf")
        self._counts: Counter[str] = Counter()
        """The counters of `TierStats`."""
        self._seconds = {Direction.PROMOTE: 0.0, Direction.DEMOTE: 0.0}

    # -- for subclasses ----------------------------------------------------------------------------

    @abstractmethod
    def _settle_read(self, result: TierResult) -> None:
        """Update what is known of rows to be read, once no call uses them.

        The outcome of rows that were taken back is `REFUSED`.
        """

    @abstractmethod
    def _settle_write(self, result: TierResult) -> None:
        """Update what is known of rows to be written, once no call uses them."""

    def _settle_stuck_read(self, batch: RowBatch) -> None:
        """Update the books for rows whose read does not return."""
        return

    def _num_rows(self) -> tuple[int, int] | None:
        """Return how many rows are held, and how many there is room for; `None` if only a server knows."""
        return None

    # -- opening -----------------------------------------------------------------------------------

    def is_open(self) -> bool:
        return self._io.backend is not None

    def takes_rows(self) -> bool:
        return self.is_open() and not self._closed and not self._is_suspended(Direction.DEMOTE)

    def lacks_namespace(self) -> bool:
        """Return whether only the namespace is missing."""
        return self._lacks_namespace

    def is_awaited(self) -> bool:
        """Return whether the tier will probably be open soon, so that a request may wait for it."""
        return (
            not self.is_open()
            and self.problem is None
            and self._waits_for is None
            and not self._closed
            and self._clock() < self._opening_since + _AWAITED_SECONDS
        )

    def wait_open(self, timeout: float = 30.0) -> bool:
        """Block until the tier is open, or only the namespace is missing. For the start of an engine.

        `OutsideError` if the tier is `required` and cannot be opened; else False.
        """
        until = time.monotonic() + timeout
        while not self.is_open():
            problem = self.problem
            self._results = self.poll()  # kept for the next caller of `poll`
            if self.is_open() or self.lacks_namespace():
                return True
            left = until - time.monotonic()
            if left <= 0 or problem is not None:
                break
            self._io.wait_any(min(left, _LOOK_EVERY))
        if not self.is_open() and self.required:
            why = (
                self.problem or self._waits_for or f"{self.where}: expected it to open within {timeout:g} s"
            )
            raise OutsideError(f"{why} ({self.name}.required is true)")
        return self.is_open()

    def _begin_opening(self, open_once: Callable[[], _T], take: Callable[[_T], None]) -> None:
        """Have an I/O thread call `open_once` until it succeeds; then `take` gets what it returned.

        `take` runs on the scheduler thread, in the next poll or lookup.
        """

        def end(opened: _T | None, error: BaseException | None) -> None:
            if opened is not None:
                take(opened)
            elif not isinstance(error, _TierClosedError):
                self._record_problem(error)

        self._opening_since = self._clock()
        self._opening = self._io.call(lambda: self._open_at_last(open_once), end)

    def _open_at_last(self, open_once: Callable[[], _T]) -> _T:
        """Try to open the tier until that works. On an I/O thread."""
        while True:
            self._await(lambda: self._clock() >= self._retry_at)
            try:
                opened = open_once()
            except _TierClosedError:
                raise
            except BaseException as error:  # a panic of compiled code is no Exception
                self._record_problem(error)
            else:
                self._clear_problem()
                return opened

    def _await_namespace(self, namespace: Callable[[], str | None]) -> str:
        """Wait until the namespace is known, and return it. On an I/O thread."""
        while (name := namespace()) is None:
            self._lacks_namespace = True  # only now: `wait_open` does not wait for it
            try:
                self._await(lambda: namespace() is not None)
            finally:
                self._lacks_namespace = False
        return name

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. On an I/O thread."""
        while not condition():
            if self._ending.wait(_LOOK_EVERY):
                raise _TierClosedError

    def _await_other(self, condition: Callable[[], bool], line: str) -> None:
        """Wait for another process; if that takes long, log the line, and no request waits any more.

        On an I/O thread.
        """
        since = self._clock()

        def look() -> bool:
            if condition():
                return True
            if self._waits_for is None and self._clock() - since >= _LOG_AFTER:
                self._waits_for = line
                logger.warning("%s; running without it meanwhile", line)
            return False

        try:
            self._await(look)
        finally:
            self._waits_for = None

    def _take_opened(self) -> None:
        """Take over what a thread has opened, if it has. For a lookup: an idle engine does not poll."""
        if self._opening.is_running and not self.is_open():
            for result in self._io.poll():
                self._settle(result)

    @property
    def _may_wait(self) -> bool:
        """Whether there were so few attempts that the next one may still succeed."""
        return self._backoff < _LONGEST_BACKOFF

    def _record_problem(self, error: BaseException | None) -> None:
        """Record why the tier is not open, log it once, and set the time of the next attempt."""
        line = str(error) if isinstance(error, KVTierError) else f"{self.where}: {say_error(error)}"
        if line != self.problem:
            logger.warning("%s; running without it", line)
        self.problem = line
        self._retry_at = self._clock() + self._backoff
        self._backoff = min(2 * self._backoff, _LONGEST_BACKOFF)

    def _log_open(self, where: str, content: str) -> None:
        """Log that the tier is open, where it is, and with what."""
        logger.info("%s tier: %s: open with %s", self.name, where, content)

    def _clear_problem(self) -> None:
        if self.problem is not None:
            logger.warning("%s: can be used now", self.where)
        self.problem, self._backoff, self._retry_at = None, _FIRST_BACKOFF, float("-inf")

    # -- moving ------------------------------------------------------------------------------------

    @property
    def promotion_bytes(self) -> int:
        return self._io.open_bytes(Direction.PROMOTE)

    def set_buffer(self, buffer: RowBuffer) -> None:
        self._io.buffer = buffer

    def withdraw(self, job: RowJob, positions: Sequence[int] | None = None) -> list[int]:
        withdrawn = self._io.withdraw(job, positions)
        if withdrawn:
            self._enter(TierResult(job, withdrawn, MissReason.REFUSED))
        return withdrawn

    def poll(self) -> list[TierResult]:
        for result in self._io.poll():
            self._settle(result)
        self._check_health()
        results, self._results = self._results, []
        return results

    def _within_bounds(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Cut off the keys at the end that do not fit into the queue."""
        room = self._max_queued - self._io.queued_bytes(Direction.DEMOTE)
        return keys if len(keys) * self.row_bytes <= room else keys[: max(0, room // self.row_bytes)]

    def _submit(self, job: RowJob, positions: Sequence[int]) -> None:
        """Hand rows of a job to the threads."""
        if positions:
            job.scope = self._scope
            self._io.submit(job, positions)

    def _refuse(self, job: RowJob, positions: Sequence[int], reason: MissReason) -> None:
        """Report rows of a promotion that the tier cannot give."""
        if positions:
            for at in positions:
                job.outcomes[at] = reason
            self._results.append(TierResult(job, list(positions), reason))

    # -- outcomes of rows --------------------------------------------------------------------------

    def _settle(self, result: TierResult) -> None:
        """Enter a result into the books, and keep it for `poll`."""
        if not result.in_use:
            self._enter(result)
        if result.outcome is MissReason.TOO_SLOW:
            self._counts["late"] += len(result.positions)
        self._results.append(result)

    def _enter(self, result: TierResult) -> None:
        """Count rows that no call uses any more, and learn from them how well their direction works."""
        direction, outcome, count = result.job.direction, result.outcome, len(result.positions)
        is_read, health = direction is Direction.PROMOTE, self._health[direction]
        if outcome is None and not (is_read and result.returned):
            what = "promoted" if is_read else "demoted"
            self._counts[what] += count
            self._counts[f"{what}_bytes"] += count * self.row_bytes
            self._seconds[direction] += result.seconds
        if outcome is None or outcome is MissReason.EVICTED:
            health.record_success()
        elif outcome is MissReason.IO_FAILED:
            self._counts["failed"] += count
            health.record_failure(result.why, result.seconds)
        elif not is_read:
            self._counts["dropped"] += count
        elif outcome is MissReason.FAILED:
            self._counts["failed_checks"] += count
        if is_read:
            self._settle_read(result)
            return
        if outcome is None:
            self._last_progress = self._clock()
        self._settle_write(result)

    def _record_refused(self, keys: list[OffloadKey]) -> None:
        self._counts["refused"] += len(keys)
        self._misses.record(keys, MissReason.REFUSED)

    # -- suspension --------------------------------------------------------------------------------

    def _is_suspended(self, direction: Direction) -> bool:
        return self._health[direction].problem is not None

    def _check_health(self) -> None:
        stuck, is_starved = self._io.take_stuck(_STUCK_AFTER)
        if stuck or is_starved:
            self._suspend("a call does not return")
        for batch in stuck:
            if batch.job.direction is Direction.PROMOTE:
                self._settle_stuck_read(batch)
        suspended = [(way, health) for way, health in self._health.items() if health.problem is not None]
        if not suspended:
            return
        for direction, health in suspended:
            if health.problem is not None and self._io.open_jobs(direction):
                self._io.give_up(MissReason.SUSPENDED, direction, health.problem)
        # `take_due` runs for both directions, so that the back-off of both grows.
        due = [health.take_due() for _, health in suspended]
        backend = self._io.backend
        if any(due) and not self._probing.is_running and backend is not None and not self._closed:
            self._probing = self._io.call(backend.probe, lambda _value, error: self._end_probe(error))

    def _is_stuck(self, since: float | None) -> bool:
        """Return whether a call that began at `since`, if it has begun, runs too long to be merely slow."""
        return since is not None and self._clock() - since >= _STUCK_AFTER

    def _suspend(self, why: str) -> None:
        for health in self._health.values():
            health.suspend(why)

    def _end_probe(self, error: BaseException | None) -> None:
        """End the suspension if a probe has found that the backend works again."""
        if error is None:
            for health in self._health.values():
                health.resume()

    # -- reports and ends --------------------------------------------------------------------------

    def state(self) -> str:
        """Return the tier's state in a word or two, or in one line why it is not open."""
        if self._closed:
            return "closed"
        if not self.is_open():
            why = self.problem or self._waits_for
            return why or ("waiting for the namespace" if self._lacks_namespace else "opening")
        return "suspended" if any(self._is_suspended(direction) for direction in Direction) else "open"

    def stats(self) -> TierStats:
        problems = [health.problem for health in self._health.values() if health.problem is not None]
        used, capacity = self._num_rows() or (None, None)
        return TierStats(
            name=self.name,
            medium=self.medium,
            state=self.state(),
            suspended=problems[0] if problems else None,
            used=used,
            capacity=capacity,
            used_bytes=None if used is None else used * self.row_bytes,
            capacity_bytes=None if capacity is None else capacity * self.row_bytes,
            queued_bytes=sum(self._io.queued_bytes(direction) for direction in Direction),
            stuck=self._io.stuck_rows(),
            promote_seconds=self._seconds[Direction.PROMOTE],
            demote_seconds=self._seconds[Direction.DEMOTE],
            **self._counts,
        )

    def has_pending_work(self) -> bool:
        recent = self._clock() - self._last_progress < _IDLE_AFTER
        return recent and not self._closed and self._io.open_jobs(Direction.DEMOTE) > 0

    def wait_any(self, timeout: float) -> bool:
        return bool(self._results) or self._io.wait_any(timeout)

    def has_open_calls(self) -> bool:
        """Return whether the tier's own calls are under way: deletions, lookups, probes."""
        return self._io.open_calls > 0

    def check(self) -> None:
        self._io.check()

    def _release(self, release: Callable[[], None]) -> None:
        """Release one thing while the tier lives. On an I/O thread."""
        self._releases.discard(release)
        release()

    def _release_all(self) -> None:
        """Release everything after the last call of a closed tier has returned. On an I/O thread.

        A call may return long after `close` has given up waiting for it, and with something new: a lock
        that was waited for, or a backend.
        """
        for release in list(self._releases):
            with suppress(OSError):
                self._release(release)

    def close(self, timeout: float = 5.0) -> bool:
        self._ending.set()
        if self._closed:
            return self._io.close(0.0)
        self._closed = True
        return self._io.close(timeout)


class TierHealth:
    """Suspends one direction of a tier, schedules probes, and ends the suspension.

    Several failed calls in a row, or a slow one, suspend their direction (a disk that turned read-only can
    still be read); one stuck call suspends both. During a suspension a probe is due after a back-off, which
    doubles after each probe. A successful probe ends the suspension; only successful real work makes the
    next back-off short again. Scheduler thread only.
    """

    def __init__(
        self,
        what: str,
        clock: Callable[[], float],
        longest_backoff: float = _LONGEST_PROBE,
        slow_failure: float = inf,
    ) -> None:
        """`what` names the direction in the log."""
        self._what, self._clock, self._longest_backoff = what, clock, longest_backoff
        self._slow_failure = slow_failure
        self.problem: str | None = None
        """Why the direction is suspended; `None` if it is not."""
        self._failures = 0
        self._backoff = _FIRST_PROBE
        self._due = 0.0

    def record_success(self) -> None:
        """Record that a call has succeeded."""
        self._failures = 0
        if self.problem is None:
            self._backoff = _FIRST_PROBE

    def record_failure(self, why: str, seconds: float = 0.0) -> None:
        """Record that a call has failed after `seconds`."""
        self._failures += 1
        if self._failures >= _FAILURES or seconds >= self._slow_failure:
            self.suspend(why)

    def suspend(self, why: str) -> None:
        """Suspend the direction. Logs one line, not one for each failure."""
        if self.problem is None:
            self.problem = why
            self._due = self._clock() + self._backoff
            logger.warning("%s is suspended: %s; next try in %g s", self._what, why, self._backoff)

    def take_due(self) -> bool:
        """Return whether a probe is due; if so, schedule the next one after twice the back-off."""
        if self.problem is None or self._clock() < self._due:
            return False
        self._backoff = min(2 * self._backoff, self._longest_backoff)
        self._due = self._clock() + self._backoff
        return True

    def resume(self) -> None:
        """End the suspension after a successful probe."""
        if self.problem is not None:
            logger.warning("%s works again (it was suspended: %s)", self._what, self.problem)
            self.problem, self._failures = None, 0
