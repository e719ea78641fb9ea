"""The only threads that touch a backend, and the queue in front of them.

The threads order work by direction: small calls of the tier itself first, then promotions, then demotions;
within one direction the older job goes first. A thread claims the next few rows of the first job, so one
request gets all threads, and its first rows come first. At most
`max_in_flight` bytes are with the backend at a time: more depth only adds latency, and rows in the queue
can still be reordered or dropped. If there are several threads, demotions never occupy all of them, so that
writes which do not return hold up no question and no read.

`poll` reports the results of rows. At a job's deadline, rows that no thread has begun are late and free;
rows in a running call are late and in use, and a second result says when the call has returned.

The scheduler thread calls all methods; it never waits, except for a lock that is held for microseconds.
`wait_any` and `close` block. `RowMover` runs on the I/O threads: it seals rows on their way out and checks
them on their way in, while the bytes are in the thread's cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtier.errors import InputError, IntegrityError
from kvtier.keys import OffloadKey
from kvtier.residency import MissReason
from kvtier.tiers.base import Backend, BackendRow, Direction, RowBatch, RowBuffer, RowJob, TierResult
from kvtier.tiers.seal import SealKey, seal_of

logger = logging.getLogger(__name__)

_LAST_WAIT = 0.2
_IN_ORDER = tuple(Direction)
_NOT_OUR_SEAL = (
    "tier %s: a row under one of our names does not bear a seal of our seal_key_file: it was forged or "
    "damaged. It is a miss, as are all that follow; they are counted and not logged"
)


@dataclass(eq=False, slots=True)
class IOCall:
    """A function that a tier has run on an I/O thread. Its end is handled on the scheduler thread."""

    function: Callable[[], Any] = lambda: None
    on_end: Callable[[Any, BaseException | None], None] | None = None
    """Gets the value or the error, in the next `poll` after the function has returned."""
    value: Any = None
    error: BaseException | None = None
    is_running: bool = False
    """Whether the function was submitted and its end has not been handled. Scheduler thread only."""

    def run(self) -> None:
        """Call the function. On an I/O thread."""
        try:
            self.value = self.function()
        except BaseException as error:  # a panic of compiled code is no Exception, and the thread must go on
            self.error = error


class IOThreads:
    """Owns the threads over one backend. Use `close()`; the threads keep no process alive."""

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        row_bytes: int,
        buffer: RowBuffer | None = None,
        name: str = "tier",
        threads: int = 8,
        max_in_flight: int = 16 << 20,
        clock: Callable[[], float] = time.monotonic,
        check_seals: bool = True,
        seal_key: SealKey | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the threads. `backend` and `buffer` may be set later, before rows are submitted.

        All rows count as `row_bytes`. After `close`, the last thread to end calls `on_end`, once: no call is
        under way then, however late the last one has returned.
        With a `seal_key` only rows sealed with that key are accepted; the first other row logs a warning.
        `check_seals=False` is a negative control for tests: wrong bytes then pass unnoticed.
        """
        self.backend, self.buffer = backend, buffer
        self._row_bytes = row_bytes
        self._clock, self._mover = clock, RowMover(name, check_seals, seal_key)
        self._num_threads, self._max_in_flight = threads, max_in_flight
        self._lock = threading.Condition(threading.Lock())
        # Guarded by the lock: the work that threads take.
        self._calls: deque[IOCall] = deque()
        self._queues: tuple[deque[RowJob], ...] = (deque(), deque())  # by direction, the oldest first
        self._queued_bytes = [0, 0]
        self._running: dict[IOCall | RowBatch, float] = {}  # one for each busy thread, with the start time
        self._on_hold: set[Direction] = set()
        self._stuck: set[RowBatch] = set()
        self._last: IOCall | None = None
        self._closed = False
        self._alive, self._on_end = threads, on_end
        # Filled by threads, drained by `poll`.
        self._ended: deque[RowBatch | IOCall] = deque()
        self._has_ended = threading.Event()
        # Touched by the scheduler thread only.
        self._jobs: dict[int, RowJob] = {}
        self._given_up: set[RowJob] = set()
        self._starved = False  # rows were given up before a thread began them
        self._next_deadline = float("inf")
        self.open_calls = 0
        """Functions given to `call` whose end has not been handled yet."""
        self._results: list[TierResult] = []
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # -- the scheduler's side ----------------------------------------------------------------------

    def submit(self, job: RowJob, positions: Iterable[int]) -> None:
        """Queue rows of a job. Their memory is in use until a result says otherwise."""
        if job.job_id in self._jobs:
            raise InputError(f"job_id: expected one that no open job of this tier has, got {job.job_id}")
        if self.buffer is None:
            raise InputError("set_buffer: expected a call before the first job")
        job.queued = list(positions)
        self._jobs[job.job_id] = job
        self._next_deadline = min(self._next_deadline, job.deadline)
        with self._lock:
            self._queued_bytes[job.direction] += len(job.queued) * self._row_bytes
            self._queues[job.direction].append(job)
            self._lock.notify()  # one is enough: a thread that leaves rows in the queue wakes the next

    def call(
        self,
        function: Callable[[], Any],
        on_end: Callable[[Any, BaseException | None], None] = lambda _value, _error: None,
    ) -> IOCall:
        """Run a function on a thread, before all rows; `poll` then gives its value or error to `on_end`."""
        self.open_calls += 1
        call = IOCall(function, on_end, is_running=True)
        with self._lock:
            self._calls.append(call)
            self._lock.notify()
        return call

    def run_soon(self, function: Callable[[], None]) -> None:
        """Run a function on a free thread, before all rows.

        I/O threads may call this; the result is dropped.
        """
        with self._lock:
            if not self._closed:
                self._calls.append(IOCall(function))
                self._lock.notify()

    def call_last(self, function: Callable[[], Any]) -> None:
        """Run a function on a thread after `close` was called and all rows are done.

        Its result is dropped.
        """
        with self._lock:
            self._last = IOCall(function)

    def withdraw(self, job: RowJob, positions: Sequence[int] | None = None) -> list[int]:
        """Take back the rows of a job (all, or these) that no thread has begun. No result follows."""
        if self._jobs.get(job.job_id) is not job:
            return []
        wanted = None if positions is None else set(positions)
        with self._lock:
            withdrawn = self._take_out(job, wanted)
        self._starved |= len(withdrawn) > 0 and job.direction is Direction.PROMOTE
        self._forget_if_over(job)
        return withdrawn

    def cancel(self, direction: Direction, keys: Sequence[OffloadKey], reason: MissReason) -> None:
        """End rows of these keys that no thread has begun: the next `poll` reports this reason."""
        wanted = set(keys)
        for job in list(self._jobs.values()) if wanted else ():
            if job.direction is direction:
                found = self.withdraw(job, [at for at, key in enumerate(job.keys) if key in wanted])
                self._end_unbegun(job, found, reason)

    def give_up(self, reason: MissReason, direction: Direction | None = None, why: str = "") -> None:
        """End all jobs (of one direction) now: the next `poll` reports their rows with this reason."""
        for job in list(self._jobs.values()):
            if direction is None or job.direction is direction:
                self._give_up(job, reason, why)

    def hold(self, direction: Direction) -> None:
        """Begin no rows of a direction until `resume`. Jobs can still be submitted, withdrawn, or late."""
        with self._lock:
            self._on_hold.add(direction)

    def resume(self, direction: Direction) -> None:
        """Begin rows of a direction again."""
        with self._lock:
            self._on_hold.discard(direction)
            self._lock.notify_all()

    def poll(self) -> list[TierResult]:
        """Return the results since the last call."""
        if self._has_ended.is_set():
            self._has_ended.clear()
        self._drain_ended()
        self._give_up_late()
        results, self._results = self._results, []
        return results

    def queued_bytes(self, direction: Direction) -> int:
        """Return the bytes that no thread has begun."""
        return self._queued_bytes[direction]

    def open_bytes(self, direction: Direction) -> int:
        """Return the bytes that are queued or in a running call."""
        running = [self._nbytes(batch) for batch in self._batches() if batch.job.direction is direction]
        return self._queued_bytes[direction] + sum(running)

    def open_jobs(self, direction: Direction) -> int:
        """Count the jobs that are not over. Jobs that were given up do not count."""
        return sum(job.direction is direction for job in self._jobs.values())

    def stuck_rows(self) -> int:
        """Count the rows that were given up while their call still runs."""
        return sum(len(batch.positions) for job in self._given_up for batch in job.running)

    def take_stuck(self, seconds: float) -> tuple[set[RowBatch], bool]:
        """Return the newly stuck calls: calls of given-up jobs that have run for at least `seconds`.

        Also returns whether all threads have been busy for that long and queued rows were given up since
        the last call.
        """
        if not self._given_up and not self._starved:
            return set(), False
        with self._lock:
            began = self._clock() - seconds
            given_up = {batch for batch in self._batches() if batch.job.given_up is not None}
            new = {batch for batch in given_up - self._stuck if self._running[batch] <= began}
            self._stuck |= new
            if new:
                self._lock.notify()  # stuck bytes do not count against the limit, so other rows may start
            all_busy = len(self._running) == self._num_threads and max(self._running.values()) <= began
        starved, self._starved = self._starved, False
        return new, starved and all_busy

    def wait_any(self, timeout: float) -> bool:
        """Block until `poll` may have a result."""
        return bool(self._results) or bool(self._ended) or self._has_ended.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Finish the queue while there is time, give up the rest, and return whether all calls ended."""
        until = time.monotonic() + timeout
        self._drain_ended()
        self._give_up_late()
        for direction in self._on_hold:  # rows on hold would wait for a resume that may never come
            self.give_up(MissReason.TOO_SLOW, direction, "the tier was closed")
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._drain_ended()
        self.give_up(MissReason.TOO_SLOW, why="the tier was closed")
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
                rows = sum(len(job.queued) for job in jobs if job.direction is direction)
                queued = rows * self._row_bytes
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

    def _take_out(self, job: RowJob, wanted: set[int] | None = None) -> list[int]:
        """Remove rows, all or those wanted, from the queue and return their positions. Needs the lock."""
        taken = job.queued if wanted is None else [at for at in job.queued if at in wanted]
        job.queued = [] if wanted is None else [at for at in job.queued if at not in wanted]
        self._queued_bytes[job.direction] -= len(taken) * self._row_bytes
        return taken

    def _give_up(self, job: RowJob, reason: MissReason, why: str = "") -> None:
        del self._jobs[job.job_id]
        with self._lock:
            free, used = self._take_out(job), job.begun()
        job.given_up = reason
        self._end_unbegun(job, free, reason, why)
        if used:
            self._given_up.add(job)
            self._results.append(TierResult(job, used, reason, in_use=True, why=why))

    def _end_unbegun(self, job: RowJob, positions: list[int], reason: MissReason, why: str = "") -> None:
        """Add a result of rows that no thread has begun."""
        if positions:
            for at in positions:
                job.outcomes[at] = reason
            self._results.append(TierResult(job, positions, reason, why=why))

    def _give_up_late(self) -> None:
        now = self._clock()
        if now >= self._next_deadline:
            for job in [job for job in self._jobs.values() if job.deadline <= now]:
                self._starved |= len(job.queued) > 0
                self._give_up(job, MissReason.TOO_SLOW)
            self._next_deadline = min((job.deadline for job in self._jobs.values()), default=float("inf"))

    def _drain_ended(self) -> None:
        """Report the batches that have ended, and handle the ends of calls."""
        while self._ended:
            ended = self._ended.popleft()
            if isinstance(ended, RowBatch):
                self._report_batch(ended)
            elif ended.on_end is not None:
                self.open_calls -= 1
                ended.is_running = False
                ended.on_end(ended.value, ended.error)

    def _report_batch(self, batch: RowBatch) -> None:
        """Report the results of a batch; rows with the same outcome share a result."""
        job, positions = batch.job, batch.positions
        job.running.discard(batch)
        ends = [job.outcomes[at] for at in positions]
        if ends.count(None) == len(ends):
            self._add(job, positions, None, batch.seconds)
        else:
            alike: dict[tuple[MissReason | None, str], list[int]] = {}
            for at, outcome in zip(positions, ends, strict=True):
                alike.setdefault((outcome, job.errors.get(at, "")), []).append(at)
            for (outcome, why), some in alike.items():
                self._add(job, some, outcome, batch.seconds * len(some) / len(positions), why)
        self._forget_if_over(job)

    def _add(
        self, job: RowJob, positions: list[int], outcome: MissReason | None, seconds: float, why: str = ""
    ) -> None:
        """Add a result of rows that ended alike; extend the last result if only the rows differ."""
        returned = job.given_up is not None
        last = self._results[-1] if self._results else None
        if (
            last is not None
            and last.job is job
            and (last.outcome, last.in_use, last.returned, last.why) == (outcome, False, returned, why)
        ):
            last.positions += positions
            last.seconds += seconds
        else:
            self._results.append(
                TierResult(job, list(positions), outcome, returned=returned, seconds=seconds, why=why)
            )

    def _forget_if_over(self, job: RowJob) -> None:
        if not job.queued and not job.running:
            self._given_up.discard(job)
            if self._jobs.get(job.job_id) is job:
                del self._jobs[job.job_id]

    # -- inside, on the threads --------------------------------------------------------------------

    def _run(self) -> None:
        task: IOCall | RowBatch | None = None
        while (task := self._claim(task)) is not None:
            if isinstance(task, IOCall):
                task.run()
            else:
                start = time.perf_counter()
                self._mover.move(self.backend, self.buffer, task)
                task.seconds = time.perf_counter() - start
            self._ended.append(task)
            if not self._has_ended.is_set():
                self._has_ended.set()
        with self._lock:
            self._alive -= 1
            is_last = self._alive == 0
        if is_last:
            self._on_end()

    def _claim(self, ended: IOCall | RowBatch | None) -> IOCall | RowBatch | None:
        """Give back the room of an ended batch, and wait for work; `None` if none will come."""
        with self._lock:
            if ended is not None:
                self._running.pop(ended, None)  # the last call is not there
            if isinstance(ended, RowBatch):
                self._stuck.discard(ended)
            while True:
                task: IOCall | RowBatch | None = self._calls.popleft() if self._calls else None
                for direction in _IN_ORDER:
                    task = task or self._next_batch(direction)
                if task is None and self._closed and not any(self._queued_bytes):
                    self._lock.notify_all()
                    if self._batches():
                        return None  # a busy thread will do the remaining work
                    task, self._last = self._last, None
                    return task
                if task is not None:
                    if any(self._queued_bytes):
                        self._lock.notify()  # there is more, and perhaps room for it
                    self._running[task] = self._clock()
                    return task
                self._lock.wait()

    def _next_batch(self, direction: Direction) -> RowBatch | None:
        """Take the next rows of the first job that has any, if there is room for them. Needs the lock."""
        queue, size = self._queues[direction], max(1, self._row_bytes)
        running = sum(self._nbytes(batch) for batch in self._batches() if batch not in self._stuck)
        while queue:
            job = queue[0]
            if not job.queued or job.deadline <= self._clock():  # `poll` will report them as late
                queue.popleft()  # on hold too, or jobs that are over would pile up
                continue
            if direction in self._on_hold:
                return None
            if running and running + size > self._max_in_flight:
                return None
            if direction is Direction.DEMOTE and self._writing_threads() >= max(1, self._num_threads - 1):
                return None
            most = max(1, (self.backend or Backend).call_bytes // size)
            # All threads share a promotion, because a request waits for it. One thread takes as much of a
            # demotion as a call should move: each thread that wakes costs the engine's own thread time.
            if direction is Direction.PROMOTE:
                most = max(1, min(most, -(-self._queued_bytes[direction] // (size * self._num_threads))))
            batch = RowBatch(job, job.queued[:most])
            job.running.add(batch)  # first: a job with rows neither queued nor running counts as over
            del job.queued[:most]
            self._queued_bytes[direction] -= self._nbytes(batch)
            return batch
        return None

    def _batches(self) -> list[RowBatch]:
        """Return the batches that threads are moving. Any thread; a copy of a dict's keys needs no lock."""
        return [task for task in list(self._running) if isinstance(task, RowBatch)]

    def _nbytes(self, batch: RowBatch) -> int:
        """Return the bytes that the rows of a batch count as."""
        return len(batch.positions) * self._row_bytes

    def _writing_threads(self) -> int:
        """Count the threads busy with demotions. One thread stays free of them. Needs the lock."""
        return sum(batch.job.direction is Direction.DEMOTE for batch in self._batches())


class RowMover:
    """Moves the rows of one tier through its backend, and writes the outcome of each into its job.

    Every answer or exception of a backend becomes an outcome of the given rows, so an I/O thread survives
    every backend. Called by I/O threads, any number at once.
    """

    def __init__(self, name: str, check_seals: bool, seal_key: SealKey | None) -> None:
        """With a `seal_key` accept only rows sealed with it; the first other row logs a warning."""
        self._name, self._check_seals, self._seal_key = name, check_seals, seal_key
        self._warned = False

    def move(self, backend: Backend | None, buffer: RowBuffer | None, batch: RowBatch) -> None:
        """Read or write the rows of a batch. An exception of the backend is a failure of all of them."""
        try:
            if backend is None or buffer is None:
                _fail_all(batch, "not open")
            elif batch.job.direction is Direction.PROMOTE:
                self._read(backend, buffer, batch)
            else:
                self._write(backend, buffer, batch)
        except OSError as error:
            _fail_all(batch, say_error(error))
        except BaseException as error:  # a panic of compiled code is no Exception, and the thread must go on
            logger.exception("tier I/O: the backend raised")
            _fail_all(batch, f"{type(error).__name__}: {error}")

    def _read(self, backend: Backend, buffer: RowBuffer, batch: RowBatch) -> None:
        job, rows = batch.job, _backend_rows(batch.job, buffer, batch.positions)
        answers = _expect_answers(rows, backend.read(rows))
        for at, row, found in zip(batch.positions, rows, answers, strict=True):
            if found is None:
                job.outcomes[at] = MissReason.EVICTED
            elif isinstance(found, OSError):
                _fail(job, at, say_error(found))
            elif not self._is_right(job, row, found):
                job.outcomes[at] = MissReason.FAILED

    def _write(self, backend: Backend, buffer: RowBuffer, batch: RowBatch) -> None:
        """Write rows; those that the backend has already are not sent."""
        job, positions = batch.job, batch.positions
        if unsure := [at for at in positions if at in job.may_exist]:
            asked = _backend_rows(job, buffer, unsure)
            there = zip(unsure, _expect_answers(asked, backend.contains(asked)), strict=True)
            stored = {at for at, is_there in there if is_there}
            positions = [at for at in positions if at not in stored]
        rows = [
            row._replace(
                seal=seal_of(job.scope, row.key, row.pieces, self._seal_key), description=job.describe(at)
            )
            for at, row in zip(positions, _backend_rows(job, buffer, positions), strict=True)
        ]
        errors = _expect_answers(rows, backend.write(rows)) if rows else []
        for at, error in zip(positions, errors, strict=True):
            if error is not None:
                _fail(job, at, say_error(error))

    def _is_right(self, job: RowJob, row: BackendRow, seal: bytes) -> bool:
        """Return whether the bytes that were read bear their seal."""
        if not self._check_seals or seal == seal_of(job.scope, row.key, row.pieces, self._seal_key):
            return True
        if self._seal_key is not None and not self._warned:
            self._warned = True
            logger.warning(_NOT_OUR_SEAL, self._name)
        return False


def _backend_rows(job: RowJob, buffer: RowBuffer, positions: list[int]) -> list[BackendRow]:
    """Return rows of a job as a backend takes them, without seals."""
    slots, scope = job.slots, job.scope.number
    places = [-1] * len(positions) if job.addresses is None else job.addresses[positions].tolist()
    return [
        BackendRow(job.keys[at], buffer[int(slots[at])], place, scope)
        for at, place in zip(positions, places, strict=True)
    ]


T = TypeVar("T")


def _expect_answers(rows: list[BackendRow], answers: list[T]) -> list[T]:
    if len(answers) != len(rows):
        raise OSError(f"expected {len(rows)} answers of the backend, got {len(answers)}")
    return answers


def _fail(job: RowJob, position: int, why: str) -> None:
    job.errors[position] = why
    job.outcomes[position] = MissReason.IO_FAILED


def _fail_all(batch: RowBatch, why: str) -> None:
    for at in batch.positions:
        _fail(batch.job, at, why)


def say_error(error: BaseException | None) -> str:
    """Put an error into words for people."""
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return repr(error)
