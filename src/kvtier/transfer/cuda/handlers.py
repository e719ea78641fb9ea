"""Handlers for an engine on a CUDA device: a lane for each direction, and a thread that keeps it filled.

Order of memory, which is all that a caller must know:

- A job follows everything that was on the caller's current stream when it was given: a store reads what the step has
  written, and a load is not overwritten by work from before it. Nothing is enqueued for a job until that work is over, so
  ending a job never waits for the engine's kernels.
- Once a job has a result, none of its pieces is on the device, or ever will be: both ends may be handed to someone else.
  What the engine enqueues after a result sees the bytes of the load.
- Jobs of one direction begin in the order given. Stores and loads do not wait for each other. Jobs that are under way
  together share no block or slot that one of them writes: their managers see to that.

`transfer_async` enqueues the first pieces itself, if the engine's stream is idle: a small job needs no other thread. The
rest is the thread's, at most `lanes.RUN_AHEAD` pieces ahead of the device. Ending a job early (its deadline, a cancel, a
shutdown) waits for those of its pieces that are under way, a few milliseconds, and of a load it is known which blocks have
arrived. No call waits for the compute stream, and none puts anything on it.

All methods belong to the worker's thread. Deadlines are looked at by `get_finished` and `wait`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvtier.errors import InputError, IntegrityError, PoolError, TransferError
from kvtier.transfer.base import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
    TransferType,
)
from kvtier.transfer.cuda.lanes import RUN_AHEAD, Lane, LoadLane, StoreLane
from kvtier.transfer.cuda.memory import CudaMemory
from kvtier.transfer.cuda.pieces import Ints, Piece, cut_job
from kvtier.transfer.plan import Plan, pair_blocks

if TYPE_CHECKING:
    import torch

__all__ = ["CudaHandler", "CudaJob", "CudaLoadHandler", "CudaStoreHandler"]

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_INLINE_PIECES = 2
_WAIT_TICK = 0.001
_JOIN_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class CudaJob:
    """A job on its way. `places` are the blocks' addresses in the pool, `left` the pieces that are not enqueued."""

    job_id: int
    plan: Plan
    places: Ints
    deadline: float
    fence: torch.cuda.Event
    timer: torch.cuda.Event
    left: Iterator[Piece]
    upcoming: Piece | None
    last_pieces: tuple[int, ...] = ()
    """The numbers of the last two: they are on two streams, and either may arrive last."""
    blocks_done: int = 0
    bytes_done: int = 0
    seconds: float = 0.0


class _UnderWay(NamedTuple):
    number: int
    job: CudaJob
    piece: Piece


class CudaHandler(OffloadingHandler):
    """What both directions share."""

    transfer_type: ClassVar[TransferType]
    lane_type: ClassVar[type[Lane]]

    def __init__(
        self, memory: CudaMemory, deadline: float, *, clock: Clock = time.monotonic, max_jobs: int = 1024
    ) -> None:
        self.memory = memory
        self.probe: Callable[[CudaJob], None] | None = None
        """Called by the thread before each piece, holding no lock. Tests make it wait, or raise `TransferError`."""
        self._deadline, self._clock, self._max_jobs = deadline, clock, max_jobs
        self._lane = self.lane_type(memory)
        memory.pinning.hold()
        self._holds_pool = True
        self._changed = threading.Condition()  # guards the lane and everything below
        self._jobs: dict[int, CudaJob] = {}
        self._queue: deque[CudaJob] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._results: list[TransferResult] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    @abstractmethod
    def _ends(self, spec: TransferSpec) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec] | None:
        """Return the two ends of a job, or `None` if it does not go this way."""

    # -- the worker's calls ------------------------------------------------------------------------------------------------

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a job and return at once. A spec that makes no sense is an `InputError` and touches nothing."""
        if not self.memory.pool.complete:
            raise PoolError(f"job {job_id}: not every process has attached to the pool; do all have the same config?")
        job = self._make_job(job_id, spec)
        with self._changed:
            if job_id in self._jobs:
                raise InputError(f"job {job_id}: expected a new id, got one that is under way")
            if self._closed or len(self._jobs) >= self._max_jobs:
                return False
            self._jobs[job_id] = job
            self._queue.append(job)
            enqueued = 0
            while enqueued < _INLINE_PIECES and self._enqueue_nowait():
                enqueued += 1
            if self._queue:
                self._wake_thread()
        return True

    def get_finished(self) -> list[TransferResult]:
        """Take the results that are in, ending jobs past their deadline first."""
        self._end_late_jobs()
        with self._changed:
            self._retire()
            taken, self._results = self._results, []
        return taken

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        """Block until these jobs are over, by their deadlines at the latest, or `timeout`; say whether they are.

        It enqueues pieces meanwhile, and may be late by a piece that is under way.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._end_late_jobs()
            with self._changed:
                self._retire()
                left = _WAIT_TICK if until is None else until - time.monotonic()
                over = self._jobs.keys().isdisjoint(job_ids)
                if over or left <= 0:
                    return over
                if self._enqueue_nowait():
                    continue
                if not self._under_way:
                    self._changed.wait(min(left, _WAIT_TICK))
                    continue
                oldest = self._under_way[0].number
            self._wait_done([oldest])

    def cancel(self, job_ids: set[int]) -> None:
        """End these jobs now. Waits for their pieces that are under way."""
        with self._changed:
            jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
        for job in jobs:
            self._end(job)

    def shutdown(self) -> None:
        """End everything, and give up pinned memory and buffers. Idempotent; results remain to be taken."""
        with self._changed:
            self._closed = True
            jobs = set(self._jobs)
            self._changed.notify_all()
        self.cancel(jobs)
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        if self._holds_pool:
            self._holds_pool = False
            self.memory.pinning.release()

    def check(self) -> None:
        """Raise `IntegrityError` if the books do not agree."""
        with self._changed:
            stale = {job.job_id for job in self._queue} - self._jobs.keys()
            twice = {result.job_id for result in self._results} & self._jobs.keys()
            numbers = [each.number for each in self._under_way]
        if stale or twice:
            raise IntegrityError(
                f"{self}: jobs {sorted(stale)} wait though over, {sorted(twice)} are over and under way"
            )
        if len(numbers) > RUN_AHEAD or numbers != sorted(numbers):
            raise IntegrityError(f"{self}: expected at most {RUN_AHEAD} pieces under way in order, got {numbers}")
        self.memory.pinning.check()

    def __str__(self) -> str:
        return " to ".join(self.transfer_type)

    # -- jobs --------------------------------------------------------------------------------------------------------------

    def plan(self, spec: TransferSpec) -> Plan:
        """Pair the ends of a job, or raise `InputError` if it makes no sense here."""
        ends = self._ends(spec)
        if ends is None:
            raise InputError(f"expected a transfer from {self}, got {' to '.join(type(end).__name__ for end in spec)}")
        return pair_blocks(*ends, self.memory.geometry)

    def _make_job(self, job_id: int, spec: TransferSpec) -> CudaJob:
        memory, plan = self.memory, self.plan(spec)
        pieces = cut_job(plan, memory.parts, memory.piece_bytes)
        return CudaJob(
            job_id,
            plan,
            places=memory.pool_map.places(plan),
            deadline=self._clock() + self._deadline,
            fence=self._lane.fence(),
            timer=self._lane.timer(),
            left=pieces,
            upcoming=next(pieces, None),
        )

    def _finish(self, job: CudaJob, *, success: bool) -> None:
        """Give a job its result. It is under way no more."""
        del self._jobs[job.job_id]
        if job in self._queue:
            self._queue.remove(job)
        self._lane.take_back(job.fence, job.timer)
        seconds = job.seconds if success else None
        failed = None if success else tuple(job.plan.positions[job.blocks_done :].tolist())
        self._results.append(TransferResult(job.job_id, success, job.bytes_done, seconds, self.transfer_type, failed))
        self._changed.notify_all()

    def _end(self, job: CudaJob, *, drain: bool = False) -> bool:
        """Stop a job; say whether it had no result before. Waits for what is under way of it, or (`drain`) of any job."""
        with self._changed:
            job.upcoming = None
            if job in self._queue:
                self._queue.remove(job)
            numbers = [each.number for each in self._under_way if each.job is job]
        self._wait_done(numbers)
        if drain:
            self._drain()
        with self._changed:
            self._retire()
            unfinished = self._jobs.get(job.job_id) is job
            if unfinished:
                self._finish(job, success=False)
            return unfinished

    def _end_late_jobs(self) -> None:
        now = self._clock()
        with self._changed:
            late = [job for job in self._jobs.values() if now > job.deadline]
        for job in reversed(late):  # the last first, so that ending the one that runs does not start another
            if self._end(job):
                logger.warning("%s job %d was not over after %.3g s", self, job.job_id, self._deadline)

    def _break(self, error: TransferError) -> None:
        """Fail all jobs and take no more: the device does not answer, and so touches nothing either."""
        logger.error("%s: no more transfers: %s", self, error)
        with self._changed:
            self._closed = True
            self._under_way.clear()
            for job in list(self._jobs.values()):
                self._finish(job, success=False)

    # -- pieces, with `_changed` held --------------------------------------------------------------------------------------

    def _retire(self) -> None:
        """Take note of the pieces that have arrived."""
        try:
            while self._under_way and self._lane.is_done(self._under_way[0].number):
                number, job, piece = self._under_way.popleft()
                job.blocks_done += piece.completes
                job.bytes_done += piece.bytes
                if number in job.last_pieces:
                    job.seconds = max(job.seconds, self._lane.seconds(job.timer, number))
                if job.blocks_done == len(job.plan) and self._jobs.get(job.job_id) is job:
                    self._finish(job, success=True)
        except TransferError as error:
            self._break(error)

    def _enqueue_nowait(self) -> bool:
        """Enqueue the next piece, if that needs no waiting; say whether it was."""
        ready = self._queue and self.probe is None and self.memory.pinning.pinned
        if not ready or not self._is_past_fence(self._queue[0]):
            return False
        return self._enqueue(self._queue[0])

    def _is_past_fence(self, job: CudaJob) -> bool:
        try:
            return bool(job.last_pieces) or self._lane.is_over(job.fence)
        except TransferError as error:
            self._break(error)
            return False

    def _enqueue(self, job: CudaJob) -> bool:
        """Enqueue the next piece of the first job in the queue, if there is room; say whether it was."""
        self._retire()
        if len(self._under_way) >= RUN_AHEAD or job not in self._queue:
            return False
        if job.upcoming is not None:
            timer = None if job.last_pieces else job.timer
            try:
                number = self._lane.enqueue(job.upcoming, job.plan, job.places, timer)
            except TransferError as error:
                self._fail(job, error)
                return True
            self._under_way.append(_UnderWay(number, job, job.upcoming))
            job.last_pieces, job.upcoming = (*job.last_pieces[-1:], number), next(job.left, None)
        if job.upcoming is None:
            self._queue.popleft()
            if not len(job.plan):
                self._finish(job, success=True)
        return True

    def _fail(self, job: CudaJob, error: TransferError) -> None:
        logger.warning("%s job %d failed: %s", self, job.job_id, error)
        self._end(job, drain=True)

    def _wait_done(self, numbers: Sequence[int]) -> None:
        """Block until pieces have arrived, or the device is found to be broken."""
        try:
            for number in numbers:
                self._lane.wait_done(number)
        except TransferError as error:
            self._break(error)

    def _drain(self) -> None:
        try:
            self._lane.drain()
        except TransferError as error:
            self._break(error)

    # -- the thread --------------------------------------------------------------------------------------------------------

    def _wake_thread(self) -> None:
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"kvtier {self}", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        """Enqueue pieces until the handler is closed. The whole life of the thread."""
        self._lane.enter_thread()
        while (job := self._next_job()) is not None:
            try:
                self._fill(job)
            except TransferError as error:
                self._fail(job, error)
            except Exception:
                logger.exception("%s job %d failed", self, job.job_id)
                self._end(job, drain=True)

    def _next_job(self) -> CudaJob | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            return None if self._closed else self._queue[0]

    def _fill(self, job: CudaJob) -> None:
        """Enqueue one piece of a job, when the engine's work before it is over, or wait a little for room."""
        if not job.last_pieces:
            self._lane.wait_over(job.fence)
        if self.probe is not None:
            self.probe(job)
        with self._changed:
            if not self._enqueue(job) and job in self._queue:
                self._changed.wait(_WAIT_TICK)


class CudaStoreHandler(CudaHandler):
    """Copies blocks into the pool."""

    transfer_type = (GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium())
    lane_type = StoreLane

    def _ends(self, spec: TransferSpec) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec] | None:
        match spec:
            case (GPULoadStoreSpec() as gpu, CPULoadStoreSpec() as cpu):
                return gpu, cpu
        return None


class CudaLoadHandler(CudaHandler):
    """Copies blocks out of the pool."""

    transfer_type = (CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium())
    lane_type = LoadLane

    def _ends(self, spec: TransferSpec) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec] | None:
        match spec:
            case (CPULoadStoreSpec() as cpu, GPULoadStoreSpec() as gpu):
                return gpu, cpu
        return None
