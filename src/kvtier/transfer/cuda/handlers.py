"""Handlers for an engine on a CUDA device: a lane for each direction, which several threads keep filled.

A caller needs to know only the order of memory accesses:

- A job follows all work that was on the caller's current stream when the job was given: a store reads what
  the step has written, and earlier work does not overwrite a load. No piece of a job is enqueued until that
  work is over, so ending a job never waits for the engine's kernels.
- Once a job has a result, none of its pieces is on the device, or ever will be: both ends may be used for
  others. Work that the engine enqueues after the result of a load sees its bytes.
- Jobs of one direction begin in the order given. Stores and loads do not wait for each other. Managers make
  sure that jobs under way together share no block or slot that one of them writes.

If the engine's stream is idle, `transfer_async` enqueues the first pieces itself: most jobs need no other
thread. The handler's thread, or a caller that waits, enqueues the rest, at most `lanes.RUN_AHEAD` pieces
ahead of the device. Ending a job early waits for its pieces under way, a few milliseconds; it is then known
which blocks of a load have arrived. No call waits for the compute stream or puts work on it.

`JobHandler` says what belongs to which thread, and when jobs end.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from kvtier.errors import IntegrityError, TransferError
from kvtier.transfer.cuda.lanes import RUN_AHEAD, Lane, LoadLane, StoreLane
from kvtier.transfer.cuda.memory import CudaMemory
from kvtier.transfer.cuda.pieces import (
    Ints,
    Part,
    Piece,
    Rows,
    cut_load,
    cut_store,
    group_sizes,
)
from kvtier.transfer.jobs import Clock, Ends, Job, JobHandler, Loads, Stores
from kvtier.transfer.plan import Plan, pair_blocks, pair_simple

logger = logging.getLogger(__name__)

_INLINE_PIECES = 4  # a job of up to 64 MiB has no more
_MOST_SIZES = 1024


@dataclass(eq=False)
class CudaJob(Job):
    """A job on its way. `rows` are its blocks in the pool."""

    timer: int
    rows: Rows
    pieces: Sequence[Piece]
    fence: int | None = None
    num_enqueued: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)

    @property
    def is_enqueued(self) -> bool:
        """Whether all pieces of the job are enqueued."""
        return self.num_enqueued >= len(self.pieces)


class _UnderWay(NamedTuple):
    number: int
    job: CudaJob
    position: int
    """The index of the piece in its job."""
    piece: Piece


class CudaHandler(JobHandler[CudaJob]):
    """Does the work that is common to both directions."""

    lane_type: ClassVar[type[Lane]]
    wait_tick = 0.001

    def __init__(
        self, memory: CudaMemory, deadline: float, *, clock: Clock = time.monotonic, max_jobs: int = 1024
    ) -> None:
        super().__init__(
            memory.pool, memory.bounds, memory.piece_bytes, deadline, clock=clock, max_jobs=max_jobs
        )
        self.memory = memory
        self._lane = self.lane_type(memory)  # `_lock` guards this and all attributes below too
        self._under_way: deque[_UnderWay] = deque()
        self._cuts: dict[tuple[int, int], Sequence[Piece]] = {}
        self._thread_state = threading.local()
        memory.pinning.hold()
        self._holds_pool = True

    def shutdown(self) -> None:
        """End all jobs, and give up pinned memory. Idempotent; results can still be taken."""
        super().shutdown()
        if self._holds_pool:
            self._holds_pool = False
            self.memory.pinning.release()

    def check(self) -> None:
        """Raise `IntegrityError` if the records do not agree."""
        super().check()
        with self._changed:
            numbers = [piece.number for piece in self._under_way]
        if len(numbers) > RUN_AHEAD or numbers != sorted(numbers):
            raise IntegrityError(
                f"{self}: expected at most {RUN_AHEAD} pieces under way in order, got {numbers}"
            )
        self.memory.pinning.check()

    # -- jobs --------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def _cut(sizes: Sequence[int], parts: Sequence[Sequence[Part]], piece_bytes: int) -> Iterator[Piece]:
        """Return the pieces of a job with `sizes[group]` blocks of each group."""

    def _cut_simple(self, num_blocks: int) -> Sequence[Piece]:
        """Return the pieces of a simple job from a cache: there are few sizes, and the bus is idle now."""
        size = (num_blocks, self.piece_bytes)
        pieces = self._cuts.get(size)
        if pieces is None:
            if len(self._cuts) >= _MOST_SIZES:
                self._cuts.clear()
            pieces = self._cuts[size] = tuple(self._cut([num_blocks], self.memory.parts, self.piece_bytes))
        return pieces

    def _make_job(self, job_id: int, ends: Ends, deadline: float) -> CudaJob:
        gpu, blocks, slots = ends[0], ends[0].block_ids, ends[1].block_ids
        has_one_group = len(gpu.group_sizes) == 1 and (
            gpu.block_indices is None or gpu.block_indices[0] >= 0
        )
        if has_one_group and (job := self._begin_at_once(job_id, blocks, slots, deadline)) is not None:
            return job
        is_simple = has_one_group and self._lane.is_simple(blocks, slots)
        plan = pair_simple(blocks, slots) if is_simple else pair_blocks(*ends, self._bounds)
        fence = None if is_simple else self._lane.fence()
        parts, rows = self.memory.parts, self.memory.pool_map.rows(plan)
        pieces = tuple(self._cut(group_sizes(plan, len(parts)), parts, self.piece_bytes))
        return CudaJob(job_id, plan, deadline, self._lane.timer(), rows, pieces, fence)

    def _begin_at_once(self, job_id: int, blocks: Ints, slots: Ints, deadline: float) -> CudaJob | None:
        """Enqueue the first piece of a job before the job is recorded, if it is the only one and simple."""
        if self._under_way or self._queue or self.probe is not None or not self._lane.has_simple_jobs:
            return None
        pieces = self._cut_simple(len(blocks))
        try:
            begun = self._lane.begin(pieces, blocks, slots)
        except TransferError:  # the usual way will fail too, and reports it as the job's failure
            self._drain()
            return None
        if begun is None:
            return None
        job = CudaJob(job_id, pair_simple(blocks, slots), deadline, begun.timer, begun.rows, pieces)
        self._record_enqueued(job, begun.number)
        return job

    def _begin(self, job: CudaJob) -> None:
        if job.num_enqueued and job.is_enqueued:
            return
        self._queue.append(job)
        enqueued = job.num_enqueued
        while enqueued < _INLINE_PIECES and self._enqueue_nowait():
            enqueued += 1
        if self._queue:
            self._wake_thread()

    def _wait_a_little(self, job_ids: set[int], seconds: float) -> None:
        """Enqueue the next piece, or wait for the oldest piece. That may take longer than `seconds`."""
        with self._lock:
            if self._enqueue_nowait():
                return
            if not self._under_way:
                if not self._jobs.keys().isdisjoint(job_ids):
                    self._changed.wait(seconds)
                return
            oldest = self._under_way[0].number
        if self._wait_done(oldest):
            with self._lock:
                self._update_progress(oldest)

    def _finish(self, job: CudaJob, seconds: float | None, *, success: bool) -> None:
        super()._finish(job, seconds, success=success)
        self._lane.recycle(job.fence, job.timer)

    def _end(self, job: CudaJob, *, drain: bool = False) -> bool:
        """Stop a job; return whether it had no result before.

        Wait for its pieces under way, or (`drain`) for those of all jobs.
        """
        self._mark_ending(job)
        with self._changed:
            job.pieces = job.pieces[: job.num_enqueued]
            if job in self._queue:
                self._queue.remove(job)
            numbers = [piece.number for piece in self._under_way if piece.job is job]
        for number in numbers:
            self._wait_done(number)
        if drain:
            self._drain()
        with self._changed:
            self._update_progress()
            unfinished = self._jobs.get(job.job_id) is job
            if unfinished:
                self._finish(job, None, success=False)
            return unfinished

    def _abandon(self, job: CudaJob) -> None:
        self._end(job, drain=True)

    def _break(self, error: TransferError) -> None:
        """Fail all jobs and take no more: a device that does not answer touches no memory either."""
        logger.error("%s: no more transfers: %s", self, error)
        with self._changed:
            self._closed = True
            self._under_way.clear()
            for job in list(self._jobs.values()):
                self._finish(job, None, success=False)

    # -- pieces, with `_lock` held -----------------------------------------------------------------

    def _update_progress(self, done: int = -1) -> None:
        """Record the pieces that have arrived. Those up to number `done` are known to have."""
        under_way, lane = self._under_way, self._lane
        try:
            while under_way and (under_way[0].number <= done or lane.is_done(under_way[0].number)):
                number, job, position, piece = under_way.popleft()
                if self._jobs.get(job.job_id) is not job:
                    continue  # the job was ended, and its timer may belong to another job
                job.blocks_done += piece.completes
                job.bytes_done += piece.bytes
                if piece.part.units is not None:
                    job.lost += self._find_lost(job.plan, slice(piece.first, piece.last))
                # The first piece and the last two are on three streams, and any of them may arrive last.
                if position == 0 or position >= len(job.pieces) - 2:
                    job.seconds = max(job.seconds, lane.seconds(job.timer, number))
                if job.blocks_done == len(job.plan):
                    self._finish(job, job.seconds, success=True)
        except TransferError as error:
            self._break(error)

    def _find_lost(self, plan: Plan, some: slice) -> tuple[int, ...]:
        """Return the positions of packed blocks, all of one group, that are no packed blocks in the pool."""
        heads = self.memory.heads[int(plan.groups[some.start])]
        fit = heads.fit(plan.slots[some], plan.indices[some])
        return () if fit.all() else tuple(plan.positions[some][~fit].tolist())

    def _enqueue_nowait(self) -> bool:
        """Enqueue the next piece, if that needs no waiting; return whether it was enqueued."""
        ready = self._queue and self.probe is None and self.memory.pinning.pinned
        if not ready or not self._is_past_fence(self._queue[0]):
            return False
        return self._enqueue(self._queue[0])

    def _is_past_fence(self, job: CudaJob) -> bool:
        try:
            return job.num_enqueued > 0 or job.fence is None or self._lane.is_over(job.fence)
        except TransferError as error:
            self._break(error)
            return False

    def _enqueue(self, job: CudaJob) -> bool:
        """Enqueue the next piece of the first job in the queue; return `False` if there is no room."""
        under_way = self._under_way
        if under_way:
            self._update_progress()
        if len(under_way) >= RUN_AHEAD or job not in self._queue:
            return False
        if not job.is_enqueued:
            is_last = job.num_enqueued + 1 == len(job.pieces) and len(self._queue) == 1
            piece, timer = job.pieces[job.num_enqueued], None if job.num_enqueued else job.timer
            oldest = under_way[0].number if under_way else None
            try:
                number = self._lane.enqueue(piece, job.plan.blocks, job.rows, timer, oldest, is_last=is_last)
            except (TransferError, MemoryError) as error:
                logger.warning("%s job %d failed: %s", self, job.job_id, error)
                self._abandon(job)
                return True
            self._record_enqueued(job, number)
        if job.is_enqueued:
            self._queue.popleft()
            if not len(job.plan):
                self._finish(job, 0.0, success=True)
        return True

    def _record_enqueued(self, job: CudaJob, number: int) -> None:
        """Record that the next piece of a job was enqueued."""
        position = job.num_enqueued
        piece = job.pieces[position]
        self._under_way.append(_UnderWay(number, job, position, piece))
        job.num_enqueued = position + 1
        job.blocks_begun += piece.completes

    def _wait_done(self, number: int) -> bool:
        """Block until a piece has arrived. Return `False` if the device is broken."""
        try:
            self._lane.wait_done(number)
        except TransferError as error:
            self._break(error)
            return False
        return True

    def _drain(self) -> None:
        try:
            self._lane.drain()
        except TransferError as error:
            self._break(error)

    # -- the thread --------------------------------------------------------------------------------

    def _enter_thread(self) -> None:
        if not hasattr(self._thread_state, "has_entered"):
            self._lane.enter_thread()
            self._thread_state.has_entered = True

    def _run(self, job: CudaJob) -> None:
        """Wait for the engine's work before a job; then enqueue one piece, or wait a little for room."""
        if not job.num_enqueued and job.fence is not None:
            self._lane.wait_over(job.fence)
        if self.probe is not None:
            self.probe(job)
        with self._changed:
            if not self._enqueue(job) and job in self._queue:
                self._changed.wait(self.wait_tick)


class CudaStoreHandler(Stores, CudaHandler):
    """Copies blocks into the pool."""

    lane_type = StoreLane

    _cut = staticmethod(cut_store)


class CudaLoadHandler(Loads, CudaHandler):
    """Copies blocks out of the pool."""

    lane_type = LoadLane

    _cut = staticmethod(cut_load)
