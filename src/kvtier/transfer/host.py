"""Handlers for an engine on the host: stores and loads by a thread of their own, one for each direction.

A job is copied piece by piece, leading blocks first. Each piece is copied under the job's lock after a look at whether
the job is over, and ending a job (its deadline, a cancel, a shutdown) takes that lock: so once a job has a result,
nothing of it is touched again, and of a load that ended early it is known which blocks have arrived. Jobs of one
direction run in the order given; stores and loads do not wait for each other.

Deadlines count from `transfer_async` and are looked at by `get_finished` and `wait`. With `max_jobs` jobs accepted and
not over, `transfer_async` refuses the next one. All methods belong to the worker's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from kvtier.errors import InputError, IntegrityError, PoolError, TransferError
from kvtier.transfer.base import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
    TransferType,
)
from kvtier.transfer.plan import Plan, pair_blocks
from kvtier.transfer.spans import BATCH_BYTES, Span, Spans

__all__ = ["HostHandler", "HostJob", "HostLoadHandler", "HostStoreHandler"]

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_WAIT_TICK = 0.01  # how late `wait` may notice a deadline
_JOIN_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class HostJob:
    """A job on its way. `over` is set under `lock`; whoever holds the lock while it is not set may touch memory.

    `ending` is set by whoever is about to take the lock for that. Locks are not fair: without it the copy could take the
    lock again and again before them.
    """

    job_id: int
    plan: Plan
    deadline: float
    fence: Callable[[], object]
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    ending: bool = False
    started: float | None = None
    blocks_done: int = 0
    bytes_done: int = 0


class HostHandler(OffloadingHandler):
    """What both directions share. A subclass says which end is which and how one span is copied."""

    transfer_type: ClassVar[TransferType]

    def __init__(self, spans: Spans, deadline: float, *, clock: Clock = time.monotonic, max_jobs: int = 1024) -> None:
        self.piece_bytes = BATCH_BYTES
        self.probe: Callable[[HostJob], None] | None = None
        """Called before each piece, holding no lock. Tests make it wait, or raise `TransferError`."""
        self.spans = spans
        self._deadline = deadline
        self._clock = clock
        self._max_jobs = max_jobs
        self._changed = threading.Condition()  # guards everything below
        self._jobs: dict[int, HostJob] = {}
        self._queue: deque[HostJob] = deque()
        self._results: list[TransferResult] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    @abstractmethod
    def _ends(self, spec: TransferSpec) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec] | None:
        """Return the two ends of a job, or `None` if it does not go this way."""

    @abstractmethod
    def _copy(self, spans: list[Span], blocks: Plan) -> None:
        """Copy blocks between the engine and the pool."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a job and return at once. A spec that makes no sense is an `InputError` and touches nothing."""
        if not self.spans.pool.complete:
            raise PoolError(f"job {job_id}: not every process has attached to the pool; do all have the same config?")
        job = HostJob(job_id, self.plan(spec), self._clock() + self._deadline, self.spans.memory.fence())
        with self._changed:
            if job_id in self._jobs:
                raise InputError(f"job {job_id}: expected a new id, got one that is under way")
            if self._closed or len(self._jobs) >= self._max_jobs:
                return False
            self._jobs[job_id] = job
            self._queue.append(job)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"kvtier {self}", daemon=True)
                self._thread.start()
        return True

    def get_finished(self) -> list[TransferResult]:
        """Take the results that are in, ending jobs past their deadline first."""
        self._end_late_jobs()
        with self._changed:
            taken, self._results = self._results, []
        return taken

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        """Block until these jobs are over, by their deadlines at the latest, or `timeout`; say whether they are."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._end_late_jobs()
            with self._changed:
                if self._jobs.keys().isdisjoint(job_ids):
                    return True
                left = _WAIT_TICK if until is None else until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, _WAIT_TICK))

    def cancel(self, job_ids: set[int]) -> None:
        """End these jobs now. Waits for at most one piece of each."""
        with self._changed:
            jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
        for job in jobs:
            self._end(job, success=False)

    def shutdown(self) -> None:
        """End everything. Idempotent; results remain to be taken."""
        with self._changed:
            self._closed = True
            jobs = set(self._jobs)
            self._changed.notify_all()
        self.cancel(jobs)
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def check(self) -> None:
        """Raise `IntegrityError` if the books do not agree."""
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
        """Pair the ends of a job, or raise `InputError` if it makes no sense here."""
        ends = self._ends(spec)
        if ends is None:
            raise InputError(f"expected a transfer from {self}, got {' to '.join(type(end).__name__ for end in spec)}")
        return pair_blocks(*ends, self.spans.geometry)

    def _serve(self) -> None:
        """Run jobs until the handler is closed. The whole life of the thread."""
        while (job := self._next_job()) is not None:
            try:
                self._move(job)
            except TransferError as error:
                logger.warning("%s job %d failed: %s", self, job.job_id, error)
                self._end(job, success=False)
            except Exception:
                logger.exception("%s job %d failed", self, job.job_id)
                self._end(job, success=False)

    def _next_job(self) -> HostJob | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            return None if self._closed else self._queue.popleft()

    def _move(self, job: HostJob) -> None:
        job.fence()
        job.started = self._clock()
        longest = [max(1, self.piece_bytes // size) for size in self.spans.block_bytes]
        for group, piece in job.plan.pieces(longest):
            if self.probe is not None:
                self.probe(job)
            for batch in self.spans.batches[group]:
                with job.lock:
                    if job.ending:
                        return
                    self._copy(batch, piece)
            job.bytes_done += len(piece) * self.spans.block_bytes[group]
            job.blocks_done += len(piece)
        self._end(job, success=True)

    def _end_late_jobs(self) -> None:
        now = self._clock()
        with self._changed:
            late = [job for job in self._jobs.values() if now > job.deadline]
        for job in reversed(late):  # the last first, so that ending the one that runs does not start another
            if self._end(job, success=False):
                logger.warning("%s job %d was not over after %.3g s", self, job.job_id, self._deadline)

    def _end(self, job: HostJob, success: bool) -> bool:
        """Give a job its result; say whether it had none before."""
        job.ending = True
        with job.lock:
            if job.over.is_set():
                return False
            job.over.set()
        seconds = None if job.started is None else self._clock() - job.started
        failed = None if success else tuple(job.plan.positions[job.blocks_done :].tolist())
        with self._changed:
            del self._jobs[job.job_id]
            if job in self._queue:
                self._queue.remove(job)
            self._results.append(
                TransferResult(job.job_id, success, job.bytes_done, seconds, self.transfer_type, failed)
            )
            self._changed.notify_all()
        return True


class HostStoreHandler(HostHandler):
    """Copies blocks into the pool."""

    transfer_type = (GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium())

    def _ends(self, spec: TransferSpec) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec] | None:
        match spec:
            case (GPULoadStoreSpec() as gpu, CPULoadStoreSpec() as cpu):
                return gpu, cpu
        return None

    def _copy(self, spans: list[Span], blocks: Plan) -> None:
        self.spans.memory.store(spans, blocks)


class HostLoadHandler(HostHandler):
    """Copies blocks out of the pool."""

    transfer_type = (CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium())

    def _ends(self, spec: TransferSpec) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec] | None:
        match spec:
            case (CPULoadStoreSpec() as cpu, GPULoadStoreSpec() as gpu):
                return gpu, cpu
        return None

    def _copy(self, spans: list[Span], blocks: Plan) -> None:
        self.spans.memory.load(spans, blocks)
