"""The only threads that touch a backend, and the queue in front of them.

The threads order work by direction: small calls of the tier itself first, then promotions, then demotions;
within one direction the older job goes first. A thread takes the next few rows of the first job, so one
request gets all threads, and its first rows come first. At most
`max_in_flight` bytes are with the backend at a time: more depth only adds latency, and rows in the queue
can still be reordered or dropped. If there are several threads, demotions never occupy all of them, so that
writes which do not return hold up no question and no read.

`poll` reports the results of rows. At a job's deadline, rows that no thread has begun are late and free;
rows in a running call are late and in use, and a second report says when the call has returned.

The scheduler thread calls all methods; it never waits, except for a lock that is held for microseconds.
`wait_any` and `close` block.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from kvtier.errors import InputError, IntegrityError
from kvtier.keys import OffloadKey
from kvtier.tiers.base import Backend, Outcome
from kvtier.tiers.row_mover import DONE, JobRows, RowEnd, RowMover
from kvtier.tiers.seal import SealKey, SealScope

__all__ = ["Direction", "IOReport", "IOThreads"]

_LAST_WAIT = 0.2


class Direction(IntEnum):
    """The direction in which rows move. The lower value goes first."""

    PROMOTE = 0
    DEMOTE = 1


_IN_ORDER = tuple(Direction)


@dataclass(slots=True)
class IOReport:
    """The outcome of rows of a job. `returned`: the true outcome of rows that were given up earlier."""

    job_id: int
    direction: Direction
    scope: SealScope
    rows: JobRows
    outcome: Outcome
    in_use: bool = False
    nbytes: int = 0
    seconds: float = 0.0
    why: str = ""
    returned: Outcome | None = None

    def tells_the_same(self, other: IOReport) -> bool:
        """Say whether another report of the same job differs only in its rows."""
        return (self.job_id, self.outcome, self.in_use, self.why, self.returned) == (
            other.job_id,
            other.outcome,
            other.in_use,
            other.why,
            other.returned,
        )


@dataclass(eq=False, slots=True)
class _IOJob:
    """A job with rows that are queued, or in a batch that `poll` has not reported yet."""

    job_id: int
    direction: Direction
    rows: JobRows
    scope: SealScope
    deadline: float
    queued: list[int] = field(init=False)
    """Indices of the rows that no thread has begun."""
    batches: set[_Batch] = field(default_factory=set)
    given_up: bool = False

    def __post_init__(self) -> None:
        self.queued = list(range(len(self.rows)))

    def begun(self) -> list[int]:
        """Return the indices of the rows in its batches."""
        return sorted(at for batch in self.batches for at in batch.indices)

    def report(self, rows: JobRows, outcome: Outcome, why: str = "", *, in_use: bool = False) -> IOReport:
        return IOReport(self.job_id, self.direction, self.scope, rows, outcome, in_use, why=why)


@dataclass(eq=False, slots=True)
class _Batch:
    """The rows of a job that one thread has taken."""

    job: _IOJob
    indices: list[int]
    nbytes: int


class _Ended(NamedTuple):
    """The result of a batch, by row."""

    batch: _Batch
    outcomes: list[RowEnd]
    seconds: float


class _Call(NamedTuple):
    """A function that the tier wants run on a thread; `on_done` gets its result on the scheduler thread."""

    function: Callable[[], Any]
    on_done: Callable[[Any, BaseException | None], None] | None


class _Answer(NamedTuple):
    call: _Call
    value: Any
    error: BaseException | None


class IOThreads:
    """Threads over one backend. Use `close()`; the threads keep no process alive."""

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        name: str = "tier",
        threads: int = 8,
        max_in_flight: int = 16 << 20,
        clock: Callable[[], float] = time.monotonic,
        check_seals: bool = True,
        seal_key: SealKey | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the threads. `backend` may be set later, before rows are submitted.

        After `close`, the last thread to end calls `on_end`, once: no call is under way then, however late
        the last one has returned.
        With a `seal_key` only rows sealed with that key are accepted; the first other row logs a warning.
        `check_seals=False` is a negative control for tests: wrong bytes then pass unnoticed.
        """
        self.backend = backend
        self._clock, self._mover = clock, RowMover(name, check_seals, seal_key)
        self._num_threads, self._max_in_flight = threads, max_in_flight
        self._lock = threading.Condition(threading.Lock())
        # Guarded by the lock: the work that threads take.
        self._calls: deque[_Call] = deque()
        self._queues: tuple[deque[_IOJob], ...] = (deque(), deque())  # by direction, the oldest first
        self._queued_bytes = [0, 0]
        self._running_bytes = [0, 0]
        self._running: dict[_Batch, float] = {}  # with the start time
        self._on_hold: set[Direction] = set()
        self._busy: dict[int, float] = {}  # threads that move rows or run calls, with the start time
        self._stuck: set[_Batch] = set()
        self._stuck_bytes = 0
        self._last: _Call | None = None
        self._closed = False
        self._alive, self._on_end = threads, on_end
        # Filled by threads, drained by `poll`.
        self._ended: deque[_Ended | _Answer] = deque()
        self._has_ended = threading.Event()
        # Touched by the scheduler thread only.
        self._jobs: dict[int, _IOJob] = {}
        self._given_up: set[_IOJob] = set()
        self._starved = False  # rows were given up before a thread began them
        self._stuck_reads: list[JobRows] = []
        self._next_deadline = float("inf")
        self.open_calls = 0
        """Functions given to `call` whose result `on_done` has not received yet."""
        self._reports: list[IOReport] = []
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # -- the scheduler's side ----------------------------------------------------------------------

    def submit(
        self,
        direction: Direction,
        job_id: int,
        rows: JobRows,
        scope: SealScope,
        deadline: float,
    ) -> None:
        """Queue the rows of a job. Their memory is in use until a report says otherwise."""
        if job_id in self._jobs:
            raise InputError(f"job_id: expected one that no open job of this tier has, got {job_id}")
        job = self._jobs[job_id] = _IOJob(job_id, direction, rows, scope, deadline)
        self._next_deadline = min(self._next_deadline, deadline)
        with self._lock:
            self._queued_bytes[direction] += rows.nbytes
            self._queues[direction].append(job)
            self._lock.notify()  # one is enough: a thread that leaves rows in the queue wakes the next

    def call(
        self, function: Callable[[], Any], on_done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Run a function on a thread, before all rows; `poll` then gives its value or error to `on_done`."""
        self.open_calls += 1
        with self._lock:
            self._calls.append(_Call(function, on_done))
            self._lock.notify()

    def run_soon(self, function: Callable[[], None]) -> None:
        """Run a function on a free thread, before all rows.

        I/O threads may call this; the result is dropped.
        """
        with self._lock:
            if not self._closed:
                self._calls.append(_Call(function, None))
                self._lock.notify()

    def call_last(self, function: Callable[[], Any]) -> None:
        """Run a function on a thread after `close` was called and all rows are done.

        Its result is dropped.
        """
        self.open_calls += 1
        with self._lock:
            self._last = _Call(function, lambda _value, _error: None)

    def withdraw(
        self, job_id: int, keys: Sequence[OffloadKey] | None = None
    ) -> tuple[Direction | None, JobRows]:
        """Take back the rows of a job (all, or these) that no thread has begun. No report follows."""
        job = self._jobs.get(job_id)
        if job is None:
            return None, JobRows([], [], 0)
        wanted = None if keys is None else set(keys)
        with self._lock:
            rows = self._take_out(
                job, [at for at in job.queued if wanted is None or job.rows.keys[at] in wanted]
            )
        self._starved |= len(rows) > 0 and job.direction is Direction.PROMOTE
        self._forget_if_over(job)
        return job.direction, rows

    def cancel(self, direction: Direction, keys: Sequence[OffloadKey], outcome: Outcome) -> None:
        """End rows of these keys that no thread has begun: the next `poll` reports this outcome."""
        for job in list(self._jobs.values()) if keys else ():
            if job.direction is direction:
                _, rows = self.withdraw(job.job_id, keys)
                if len(rows):
                    self._reports.append(job.report(rows, outcome))

    def give_up(self, outcome: Outcome, direction: Direction | None = None, why: str = "") -> None:
        """End all jobs (of one direction) now: the next `poll` reports their rows with this outcome."""
        for job in list(self._jobs.values()):
            if direction is None or job.direction is direction:
                self._give_up(job, outcome, why)

    def hold(self, direction: Direction) -> None:
        """Begin no rows of a direction until `resume`. Jobs can still be submitted, withdrawn, or late."""
        with self._lock:
            self._on_hold.add(direction)

    def resume(self, direction: Direction) -> None:
        """Begin rows of a direction again."""
        with self._lock:
            self._on_hold.discard(direction)
            self._lock.notify_all()

    def poll(self) -> list[IOReport]:
        """Return the reports since the last call."""
        if self._has_ended.is_set():
            self._has_ended.clear()
        self._drain_ended()
        self._give_up_late()
        reports, self._reports = self._reports, []
        return reports

    def queued_bytes(self, direction: Direction) -> int:
        """Return the bytes that no thread has begun."""
        return self._queued_bytes[direction]

    def open_bytes(self, direction: Direction) -> int:
        """Return the bytes that are queued or in a running call."""
        return self._queued_bytes[direction] + self._running_bytes[direction]

    def open_jobs(self, direction: Direction) -> int:
        """Count the jobs that are not over. Jobs that were given up do not count."""
        return sum(job.direction is direction for job in self._jobs.values())

    def stuck_rows(self) -> int:
        """Count the rows that were given up while their call still runs."""
        return sum(len(job.begun()) for job in self._given_up)

    def take_stuck(self, seconds: float) -> int:
        """Count the newly stuck calls: calls of given-up jobs that have run for at least `seconds`.

        Returns 1 if there is no such call, but all threads have been busy for that long and queued rows
        were given up meanwhile.
        """
        if not self._given_up and not self._starved:
            return 0
        with self._lock:
            began = self._clock() - seconds
            stuck = {
                batch for batch, since in self._running.items() if batch.job.given_up and since <= began
            }
            new = stuck - self._stuck
            self._stuck |= new
            self._stuck_bytes += sum(batch.nbytes for batch in new)
            reads = [batch for batch in new if batch.job.direction is Direction.PROMOTE]
            self._stuck_reads += [batch.job.rows.pick(batch.indices) for batch in reads]
            if new:
                self._lock.notify()  # stuck bytes do not count against the limit, so other rows may start
            all_busy = len(self._busy) == self._num_threads and max(self._busy.values()) <= began
        starved, self._starved = self._starved, False
        return len(new) or int(starved and all_busy)

    def take_stuck_reads(self) -> list[JobRows]:
        """Return the rows of the stuck reads that `take_stuck` has counted since the last call."""
        reads, self._stuck_reads = self._stuck_reads, []
        return reads

    def wait_any(self, timeout: float) -> bool:
        """Block until `poll` may have a report."""
        return bool(self._reports) or bool(self._ended) or self._has_ended.wait(timeout)

    def close(self, timeout: float) -> bool:
        """End: finish the queue while there is time, give up the rest. False: a call has not returned."""
        until = time.monotonic() + timeout
        self._drain_ended()
        self._give_up_late()
        for direction in self._on_hold:  # rows on hold would wait for a resume that may never come
            self.give_up(Outcome.LATE, direction, "the tier was closed")
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._drain_ended()
        self.give_up(Outcome.LATE, why="the tier was closed")
        with self._lock:
            self._calls.clear()
            self._lock.notify_all()
        until = time.monotonic() + _LAST_WAIT  # for threads that were idle
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def check(self) -> None:
        """Raise `IntegrityError` if the counts do not agree."""
        with self._lock:
            jobs = [*self._jobs.values(), *self._given_up]
            for direction in Direction:
                queued = sum(
                    len(job.queued) * job.rows.row_bytes for job in jobs if job.direction is direction
                )
                if queued != self._queued_bytes[direction]:
                    found = self._queued_bytes[direction]
                    raise IntegrityError(
                        f"tier I/O: expected {queued} bytes queued for {direction.name}, found {found}"
                    )
            for job in jobs:
                open_rows = job.queued + job.begun()
                if not open_rows or len(set(open_rows)) < len(open_rows):
                    raise IntegrityError(f"tier I/O: job {job.job_id} is over and kept, or has a row twice")

    # -- inside, on the scheduler's thread ---------------------------------------------------------

    def _take_out(self, job: _IOJob, indices: list[int]) -> JobRows:
        """Remove rows from the queue. Needs the lock."""
        taken, rows = set(indices), job.rows.pick(indices)
        job.queued = [at for at in job.queued if at not in taken]
        self._queued_bytes[job.direction] -= rows.nbytes
        return rows

    def _give_up(self, job: _IOJob, outcome: Outcome, why: str) -> None:
        del self._jobs[job.job_id]
        with self._lock:
            free = self._take_out(job, job.queued)
            used = job.rows.pick(job.begun())
        job.given_up = True
        if len(used):
            self._given_up.add(job)
        for rows, in_use in ((free, False), (used, True)):
            if len(rows):
                self._reports.append(job.report(rows, outcome, why, in_use=in_use))

    def _give_up_late(self) -> None:
        now = self._clock()
        if now >= self._next_deadline:
            for job in [job for job in self._jobs.values() if job.deadline <= now]:
                self._starved |= len(job.queued) > 0
                self._give_up(job, Outcome.LATE, "")
            self._next_deadline = min((job.deadline for job in self._jobs.values()), default=float("inf"))

    def _drain_ended(self) -> None:
        """Report the batches that have ended, and hand the results of calls to their `on_done`."""
        while self._ended:
            ended = self._ended.popleft()
            if isinstance(ended, _Answer):
                if ended.call.on_done is not None:
                    self.open_calls -= 1
                    ended.call.on_done(ended.value, ended.error)
            else:
                self._report_batch(ended)

    def _report_batch(self, ended: _Ended) -> None:
        """Report the results of a batch; rows with the same outcome share a report."""
        job, indices = ended.batch.job, ended.batch.indices
        job.batches.discard(ended.batch)
        if ended.outcomes.count(DONE) == len(indices):
            self._add(job, indices, DONE, ended.seconds)
        else:
            by_outcome: dict[RowEnd, list[int]] = {}
            for at, told in zip(indices, ended.outcomes, strict=True):
                by_outcome.setdefault(told, []).append(at)
            for told, some in by_outcome.items():
                self._add(job, some, told, ended.seconds * len(some) / len(indices))
        self._forget_if_over(job)

    def _add(self, job: _IOJob, indices: list[int], told: RowEnd, seconds: float) -> None:
        """Add a report of rows of one outcome; extend the last report if only the rows differ."""
        outcome, why = told
        report = job.report(job.rows.pick(indices), outcome, why)
        report.nbytes, report.seconds = report.rows.nbytes, seconds
        if job.given_up:
            report.outcome, report.returned = Outcome.RETURNED, outcome
        if self._reports and self._reports[-1].tells_the_same(report):
            last = self._reports[-1]
            last.rows += report.rows
            last.nbytes += report.nbytes
            last.seconds += report.seconds
        else:
            self._reports.append(report)

    def _forget_if_over(self, job: _IOJob) -> None:
        if not job.queued and not job.batches:
            self._given_up.discard(job)
            if self._jobs.get(job.job_id) is job:
                del self._jobs[job.job_id]

    # -- inside, on the threads --------------------------------------------------------------------

    def _run(self) -> None:
        ended: _Batch | None = None
        while (task := self._claim(ended)) is not None:
            if isinstance(task, _Call):
                ended = None
                self._ended.append(self._answer(task))
            else:
                ended = task
                start = time.perf_counter()
                outcomes = self._move(task)
                self._ended.append(_Ended(task, outcomes, time.perf_counter() - start))
            if not self._has_ended.is_set():
                self._has_ended.set()
        with self._lock:
            self._alive -= 1
            is_last = self._alive == 0
        if is_last:
            self._on_end()

    def _claim(self, ended: _Batch | None) -> _Call | _Batch | None:
        """Give back the room of an ended batch, and wait for work; `None`: no work will come."""
        with self._lock:
            self._busy.pop(threading.get_ident(), None)
            if ended is not None:
                if ended in self._stuck:
                    self._stuck.discard(ended)
                    self._stuck_bytes -= ended.nbytes
                self._running_bytes[ended.job.direction] -= ended.nbytes
                del self._running[ended]
            while True:
                task: _Call | _Batch | None = self._calls.popleft() if self._calls else None
                for direction in _IN_ORDER:
                    task = task or self._next_batch(direction)
                if task is None and self._closed and not any(self._queued_bytes):
                    self._lock.notify_all()
                    if self._running:
                        return None  # a busy thread will do the remaining work
                    task, self._last = self._last, None
                    return task
                if task is not None:
                    if any(self._queued_bytes):
                        self._lock.notify()  # there is more, and perhaps room for it
                    self._busy[threading.get_ident()] = self._clock()
                    return task
                self._lock.wait()

    def _next_batch(self, direction: Direction) -> _Batch | None:
        """Take the next rows of the first job that has any, if there is room for them. Needs the lock."""
        queue, running = self._queues[direction], sum(self._running_bytes) - self._stuck_bytes
        while queue:
            job = queue[0]
            if not job.queued or job.deadline <= self._clock():  # `poll` will report them as late
                queue.popleft()  # on hold too, or jobs that are over would pile up
                continue
            if direction in self._on_hold:
                return None
            size = max(1, job.rows.row_bytes)
            if running and running + size > self._max_in_flight:
                return None
            if direction is Direction.DEMOTE and self._writing_threads() >= max(1, self._num_threads - 1):
                return None
            most = max(1, (self.backend or Backend).call_bytes // size)
            # All threads share a promotion, because a request waits for it. One thread takes as much of a
            # demotion as a call should move: each thread that wakes costs the engine's own thread time.
            if direction is Direction.PROMOTE:
                most = max(1, min(most, -(-self._queued_bytes[direction] // (size * self._num_threads))))
            indices = job.queued[:most]
            batch = _Batch(job, indices, len(indices) * job.rows.row_bytes)
            job.batches.add(batch)  # first: a job with neither rows queued nor batches counts as over
            del job.queued[:most]
            self._queued_bytes[direction] -= batch.nbytes
            self._running_bytes[direction] += batch.nbytes
            self._running[batch] = self._clock()
            return batch
        return None

    def _writing_threads(self) -> int:
        """Count the threads busy with demotions. One thread stays free of them. Needs the lock."""
        return sum(batch.job.direction is Direction.DEMOTE for batch in self._running)

    def _answer(self, call: _Call) -> _Answer:
        try:
            return _Answer(call, call.function(), None)
        except BaseException as error:  # a panic of compiled code is no Exception, and the thread must go on
            return _Answer(call, None, error)

    def _move(self, batch: _Batch) -> list[RowEnd]:
        """Move the rows of a batch."""
        job = batch.job
        if (backend := self.backend) is None:
            return [(Outcome.FAILED, "not open")] * len(batch.indices)
        move = self._mover.read if job.direction is Direction.PROMOTE else self._mover.write
        return move(backend, job.rows, batch.indices, job.scope)
