"""The records of a handler's jobs: which wait, which are under way, which are over, and one result for each.

Every handler of ours is a `JobHandler`; a subclass says only how bytes move. A job is planned and checked,
and waits in a queue. The handler's thread runs it, or another thread that waits for it. A job ends in one of
two ways: its last block has arrived, or it is ended early (by its deadline, a cancel, a shutdown or a
failure). Jobs of one direction begin in the order given.

Deadlines count from `transfer_async`; `get_finished` and `wait` check them. `transfer_async` refuses a job
when `max_jobs` jobs are accepted and not over, or when the device does not answer. All public methods belong
to the worker's thread.

A forked child has the records but not the thread: its first job starts a new thread. That works if no job
was under way at the fork. Private memory, such as a pool with one party, is from then on the child's own
copy.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar, Generic, TypeVar

from kvtier.errors import InputError, IntegrityError, PoolError, TransferError
from kvtier.pool import Pool
from kvtier.transfer.base import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
    TransferType,
)
from kvtier.transfer.plan import JobBounds, Plan, pair_blocks

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
Ends = tuple[GPULoadStoreSpec, CPULoadStoreSpec]

_JOIN_SECONDS = 5.0


@dataclass(eq=False)
class Job:
    """A job on its way.

    Its leading `blocks_done` blocks have arrived; the copy of its leading `blocks_begun` blocks has begun.

    Fields without an argument are class attributes until they change. That makes a new job cheap: the device
    may be done before it is recorded.
    """

    job_id: int
    plan: Plan
    deadline: float
    ending: bool = field(default=False, init=False)
    """A thread is about to end the job."""
    blocks_begun: int = field(default=0, init=False)
    blocks_done: int = field(default=0, init=False)
    bytes_done: int = field(default=0, init=False)
    lost: tuple[int, ...] = field(default=(), init=False)
    """Positions of blocks that were done and have no bytes: they do not pack, or are no packed blocks."""


J = TypeVar("J", bound=Job)


class JobHandler(OffloadingHandler, Generic[J]):
    """A handler with records of its jobs.

    A subclass makes, runs and stops jobs, and also inherits from `Stores` or `Loads`.
    """

    transfer_type: ClassVar[TransferType]
    wait_tick: ClassVar[float]
    """The seconds by which `wait` may notice a deadline too late."""

    def __init__(
        self,
        pool: Pool,
        bounds: JobBounds,
        piece_bytes: int,
        deadline: float,
        *,
        clock: Clock = time.monotonic,
        max_jobs: int = 1024,
    ) -> None:
        self.piece_bytes = piece_bytes
        """The most bytes copied between two checks whether the job is ending, or one block if that is more.
        """
        self.probe: Callable[[J], None] | None = None
        """A function that the thread calls before each piece, holding no lock.

        Tests use it to wait, or to raise `TransferError`.
        """
        self.pool, self._bounds = pool, bounds
        self._deadline, self._clock, self._max_jobs = deadline, clock, max_jobs
        self._lock = threading.RLock()  # guards everything below
        self._changed = threading.Condition(self._lock)
        self._jobs: dict[int, J] = {}
        self._queue: deque[J] = deque()
        self._results: list[TransferResult] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    # -- for subclasses ----------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def _ends(spec: TransferSpec) -> Ends | None:
        """Return the two ends of a job, or `None` if it is of the other direction."""

    @abstractmethod
    def _make_job(self, job_id: int, ends: Ends, deadline: float) -> J:
        """Return a new job, or raise `InputError`.

        The job follows all work that the engine has been given so far.
        """

    @abstractmethod
    def _begin(self, job: J) -> None:
        """Put a new job at the end of the queue and have it run. It does not wait; `_lock` is held."""

    @abstractmethod
    def _run(self, job: J) -> None:
        """Work on the first job in the queue. The thread calls this again and again."""

    @abstractmethod
    def _end(self, job: J) -> bool:
        """Stop a job and give it its result; return whether it had no result before.

        Afterwards the job touches no memory.
        """

    @abstractmethod
    def _wait_a_little(self, job_ids: set[int], seconds: float) -> None:
        """Block until something has changed, for about `seconds` at most.

        The caller waits for these jobs, which were not over just before.
        """

    def _enter_thread(self) -> None:
        """Prepare the calling thread, if it calls for the first time."""
        return

    def _update_progress(self) -> None:
        """Record the blocks that have arrived. `_lock` is held."""
        return

    def _abandon(self, job: J) -> None:
        """End a job after a failed call."""
        self._end(job)

    # -- the worker's calls ------------------------------------------------------------------------

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a job and return at once.

        A wrong spec raises `InputError` and touches no memory.
        """
        ends = self._expect_ends(spec)
        if not self.pool.complete:
            raise PoolError(
                f"job {job_id}: not every process has attached to the pool; do all have the same config?"
            )
        self._enter_thread()
        with self._lock:
            if job_id in self._jobs:
                raise InputError(f"job {job_id}: expected a new id, got one that is under way")
            if self._closed or len(self._jobs) >= self._max_jobs:
                return False
            try:
                job = self._make_job(job_id, ends, self._clock() + self._deadline)
            except TransferError as error:
                logger.warning("%s job %d was refused: %s", self, job_id, error)
                return False
            if self._closed:  # the device was found to be broken meanwhile
                return False
            self._jobs[job_id] = job
            self._begin(job)
        return True

    def get_finished(self) -> list[TransferResult]:
        """End jobs past their deadline, and take the results so far."""
        if self._jobs:
            self._enter_thread()
            with self._lock:
                self._update_progress()
            self._end_late_jobs()
        with self._lock:
            taken, self._results = self._results, []
        return taken

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        """Block until these jobs are over, until their deadlines at most, or until `timeout`; return
        whether they are over.
        """
        until = None if timeout is None else time.monotonic() + timeout
        self._enter_thread()
        self._end_late_jobs()
        while not self._are_over(job_ids):
            left = self.wait_tick if until is None else until - time.monotonic()
            if left <= 0:
                with self._lock:
                    self._update_progress()
                return self._are_over(job_ids)
            self._wait_a_little(job_ids, min(left, self.wait_tick))
            self._end_late_jobs()
        return True

    def wait_ending(self, job: J, timeout: float | None = None) -> bool:
        """Block until a job is being ended, or `timeout`; return whether it is ending.

        Probes use this to let a job hang.
        """
        with self._changed:
            return self._changed.wait_for(lambda: job.ending, timeout)

    def cancel(self, job_ids: set[int]) -> None:
        """End these jobs now. Wait for their pieces that are being copied."""
        self._enter_thread()
        with self._changed:
            jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
        for job in jobs:
            self._end(job)

    def shutdown(self) -> None:
        """End all jobs. Idempotent; results can still be taken."""
        with self._changed:
            self._closed = True
            jobs = set(self._jobs)
            self._changed.notify_all()
        self.cancel(jobs)
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def check(self) -> None:
        """Raise `IntegrityError` if the records do not agree."""
        with self._changed:
            stale = {job.job_id for job in self._queue} - self._jobs.keys()
            twice = {result.job_id for result in self._results} & self._jobs.keys()
        if stale or twice:
            raise IntegrityError(
                f"{self}: jobs {sorted(stale)} wait though over, {sorted(twice)} are over and under way"
            )

    def __str__(self) -> str:
        return " to ".join(self.transfer_type)

    def plan(self, spec: TransferSpec) -> Plan:
        """Pair the ends of a job, or raise `InputError` if they do not fit."""
        return pair_blocks(*self._expect_ends(spec), self._bounds)

    def _expect_ends(self, spec: TransferSpec) -> Ends:
        ends = self._ends(spec)
        if ends is None:
            raise InputError(
                f"expected a transfer from {self}, got {' to '.join(type(end).__name__ for end in spec)}"
            )
        return ends

    # -- the records -------------------------------------------------------------------------------

    def _are_over(self, job_ids: set[int]) -> bool:
        with self._lock:
            return not self._jobs or self._jobs.keys().isdisjoint(job_ids)

    def _mark_ending(self, job: J) -> None:
        with self._changed:
            job.ending = True
            self._changed.notify_all()

    def _finish(self, job: J, seconds: float | None, *, success: bool) -> None:
        """Give a job its result and remove it from the jobs under way. `_lock` is held."""
        del self._jobs[job.job_id]
        if self._queue and job in self._queue:
            self._queue.remove(job)
        failed, is_whole = job.lost, success
        if not success:
            failed += tuple(job.plan.positions[job.blocks_done :].tolist())
        success &= not job.lost
        result = TransferResult(
            job.job_id, success, job.bytes_done, seconds, self.transfer_type, None if success else failed
        )
        self._results.append(self._blame(result, len(job.lost), is_whole) if job.lost else result)
        if self._thread is not None:  # else no thread waits for it
            self._changed.notify_all()

    @staticmethod
    @abstractmethod
    def _blame(result: TransferResult, num_lost: int, is_whole: bool) -> TransferResult:
        """Return the result of a job with lost blocks, which says why they are lost.

        `is_whole` says that no other block has failed.
        """

    def _end_late_jobs(self) -> None:
        if not self._jobs:
            return
        with self._lock:
            now = self._clock()
            # Jobs are in the order of their deadlines.
            late = list(takewhile(lambda job: now > job.deadline, self._jobs.values()))
            if late:
                self._update_progress()
        for job in reversed(late):  # the last first, so that ending the running job does not start another
            if self._end(job):
                logger.warning("%s job %d was not over after %.3g s", self, job.job_id, self._deadline)

    # -- the thread --------------------------------------------------------------------------------

    def _wake_thread(self) -> None:
        """Let the thread look at the queue; the first call starts it. `_lock` is held."""
        self._changed.notify_all()
        if (
            self._thread is None or not self._thread.is_alive()
        ):  # not alive: it belonged to the process that forked
            self._thread = threading.Thread(target=self._serve, name=f"kvtier {self}", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        """Run jobs until the handler is closed. This is the thread's main loop."""
        self._enter_thread()
        while (job := self._next_job()) is not None:
            try:
                self._run(job)
            except TransferError as error:
                logger.warning("%s job %d failed: %s", self, job.job_id, error)
                self._abandon(job)
            except Exception:
                logger.exception("%s job %d failed", self, job.job_id)
                self._abandon(job)

    def _next_job(self) -> J | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            return None if self._closed else self._queue[0]


class Stores:
    """Jobs from the engine to the pool."""

    transfer_type: ClassVar[TransferType] = (GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium())

    @staticmethod
    def _ends(spec: TransferSpec) -> Ends | None:
        match spec:
            case (GPULoadStoreSpec() as gpu, CPULoadStoreSpec() as cpu):
                return gpu, cpu
        return None

    @staticmethod
    def _blame(result: TransferResult, num_lost: int, is_whole: bool) -> TransferResult:
        return result._replace(unpacked=num_lost)


class Loads:
    """Jobs from the pool to the engine."""

    transfer_type: ClassVar[TransferType] = (CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium())

    @staticmethod
    def _ends(spec: TransferSpec) -> Ends | None:
        match spec:
            case (CPULoadStoreSpec() as cpu, GPULoadStoreSpec() as gpu):
                return gpu, cpu
        return None

    @staticmethod
    def _blame(result: TransferResult, num_lost: int, is_whole: bool) -> TransferResult:
        # Of a load that ended early too, the next load tells which blocks have wrong bytes.
        return result._replace(corrupt=is_whole)
