"""Handlers for an engine on the host, with one thread for stores and one for loads.

A job is copied piece by piece, leading blocks first. Each piece is copied under the job's lock, after a
check whether the job is ending. Ending a job takes the same lock. So the memory of a job with a result is
never touched again, and it is known which blocks of a load that ended early have arrived. Stores and loads
do not wait for each other.

`JobHandler` says what belongs to which thread, and when jobs end.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.transfer.jobs import Clock, Ends, Job, JobHandler, Loads, Stores
from kvtier.transfer.plan import Plan, pair_blocks
from kvtier.transfer.spans import BATCH_BYTES, Span, Spans

__all__ = ["HostHandler", "HostJob", "HostLoadHandler", "HostStoreHandler"]


@dataclass(slots=True, eq=False, kw_only=True)
class HostJob(Job):
    """A job on its way.

    `over` is set under `lock`; a thread that holds the lock while it is not set may touch memory. `ending`
    is set by a thread that is about to take the lock to end the job. Locks are not fair: without `ending`,
    the copying thread could take the lock again and again before that thread.
    """

    fence: Callable[[], object]
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    started: float | None = None


class HostHandler(JobHandler[HostJob]):
    """The common base of both directions. A subclass copies a batch of spans."""

    wait_tick = 0.01

    def __init__(
        self, spans: Spans, deadline: float, *, clock: Clock = time.monotonic, max_jobs: int = 1024
    ) -> None:
        super().__init__(spans.pool, spans.bounds, BATCH_BYTES, deadline, clock=clock, max_jobs=max_jobs)
        self.spans = spans

    @abstractmethod
    def _copy(self, spans: list[Span], blocks: Plan) -> None:
        """Copy blocks between the engine and the pool."""

    def _make_job(self, job_id: int, ends: Ends, deadline: float) -> HostJob:
        plan = pair_blocks(*ends, self._bounds)
        return HostJob(job_id=job_id, plan=plan, deadline=deadline, fence=self.spans.memory.fence())

    def _begin(self, job: HostJob) -> None:
        self._queue.append(job)
        self._wake_thread()

    def _wait_a_little(self, job_ids: set[int], seconds: float) -> None:
        with self._changed:
            if not self._jobs.keys().isdisjoint(job_ids):
                self._changed.wait(seconds)

    def _run(self, job: HostJob) -> None:
        with self._changed:
            if job not in self._queue:
                return  # the job was ended meanwhile
            self._queue.remove(job)
        job.fence()
        job.started = self._clock()
        longest = [max(1, self.piece_bytes // size) for size in self.spans.block_bytes]
        for group, piece in job.plan.pieces(longest):
            if self.probe is not None:
                self.probe(job)
            job.blocks_begun += len(piece)
            for batch in self.spans.batches[group]:
                with job.lock:
                    if job.ending:
                        return
                    self._copy(batch, piece)
            job.bytes_done += len(piece) * self.spans.block_bytes[group]
            job.blocks_done += len(piece)
        self._end(job, success=True)

    def _end(self, job: HostJob, *, success: bool = False) -> bool:
        self._mark_ending(job)
        with job.lock:
            if job.over.is_set():
                return False
            job.over.set()
        seconds = None if job.started is None else self._clock() - job.started
        with self._changed:
            self._finish(job, seconds, success=success)
        return True


class HostStoreHandler(Stores, HostHandler):
    """The handler that copies blocks into the pool."""

    def _copy(self, spans: list[Span], blocks: Plan) -> None:
        self.spans.memory.store(spans, blocks)


class HostLoadHandler(Loads, HostHandler):
    """The handler that copies blocks out of the pool."""

    def _copy(self, spans: list[Span], blocks: Plan) -> None:
        self.spans.memory.load(spans, blocks)
