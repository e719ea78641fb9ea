"""The jobs that run: which of them brings which chunk, and which still reads which block.

A job is here from its start until every rank has reported. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from kvtier.connector.jobs import LoadJob, StoreJob
from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.transfer.base import TransferResult

__all__ = ["RunningJobs"]


class RunningJobs:
    """Jobs by their ids, which are given here."""

    def __init__(self) -> None:
        self._jobs: dict[int, LoadJob | StoreJob] = {}
        self._loading: dict[OffloadKey, int] = {}
        self._newest = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[LoadJob | StoreJob]:
        return iter(self._jobs.values())

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def start(self, job: LoadJob | StoreJob, now: float) -> None:
        """Give a planned job its id."""
        self._newest += 1
        job.job_id, job.started = self._newest, now
        self._jobs[job.job_id] = job
        if isinstance(job, LoadJob):
            self._loading.update(dict.fromkeys(job.keys, job.job_id))

    def take_result(self, result: TransferResult) -> LoadJob | StoreJob | None:
        """Note what a rank reports of a job, and return the job; one that all have reported is no longer here."""
        job = self._jobs.get(result.job_id)
        if job is None:
            return None
        job.take_result(result)
        if job.ranks_left == 0:
            del self._jobs[job.job_id]
            if isinstance(job, LoadJob):
                self._forget_keys(job)
        return job

    def _forget_keys(self, job: LoadJob) -> None:
        for key in job.keys:
            if self._loading.get(key) == job.job_id:
                del self._loading[key]

    def load_of(self, key: OffloadKey) -> LoadJob | None:
        """Return the load that brings a chunk, if one does."""
        job = self._jobs.get(self._loading.get(key, -1))
        return job if isinstance(job, LoadJob) else None

    def loads(self) -> Iterator[LoadJob]:
        """Return the loads among the jobs."""
        return (job for job in self._jobs.values() if isinstance(job, LoadJob))

    def stores_reading(self, blocks: Set[int]) -> set[int]:
        """Return the stores that read any of these blocks."""
        if not blocks:
            return set()
        return {job.job_id for job in self if isinstance(job, StoreJob) and not job.block_ids.isdisjoint(blocks)}

    def check(self) -> None:
        """Raise `IntegrityError` where a chunk is noted as being loaded by nobody."""
        if not set(self._loading.values()) <= {job.job_id for job in self.loads()}:
            raise IntegrityError("a chunk is noted as being loaded by a load that does not exist")
