"""The jobs that run: which of them brings which chunk, which still reads which block, and which are given
up.

A job is here from its start until every rank has reported. One whose reports do not come expires: from then
on it does not run, it is only waited for, so that its slots are not used again while a rank may still touch
them. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set

from kvtier.connector.jobs import LoadJob, StoreJob
from kvtier.connector.metadata import EndOrder, TransferReport
from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey

__all__ = ["LoadFailures", "RunningJobs"]

_FAILURES_TO_BLAME = 2  # loads of one chunk that fail in a row: the chunk itself is blamed
_MAX_COUNTED = 4096

# times its deadline; a worker's clock starts when the job reaches it, and its report travels with a step
_MARGIN = 1.5
_GRACE_OUTPUTS = (
    2  # a step may last longer than any deadline, so a job is late only if workers have answered since
)


class RunningJobs:
    """Jobs by their ids, which are given here."""

    def __init__(self) -> None:
        self._jobs: dict[int, LoadJob | StoreJob] = {}
        self._expired: dict[int, LoadJob | StoreJob] = {}
        self._loading: dict[OffloadKey, int] = {}
        self._storing: dict[OffloadKey, int] = {}
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
        self._jobs_by_key(job).update(dict.fromkeys(job.keys, job.job_id))

    def _jobs_by_key(self, job: LoadJob | StoreJob) -> dict[OffloadKey, int]:
        return self._loading if isinstance(job, LoadJob) else self._storing

    def take_report(self, report: TransferReport) -> LoadJob | StoreJob | None:
        """Note what a rank reports of a job, and return the job; one that all have reported is no longer
        here.

        `None`: the rank has reported it before, or all have.
        """
        job_id = report.result.job_id
        job = self._jobs.get(job_id) or self._expired.get(job_id)
        if job is None or report.rank not in job.missing_ranks:
            return None
        job.take_report(report)
        if not job.missing_ranks:
            self._forget(job)
            self._expired.pop(job_id, None)
        return job

    def expire(self, now: float) -> list[LoadJob | StoreJob]:
        """Return the jobs whose reports should have come long ago.

        They run no more. Comes once for every output.
        """
        expired = [job for job in self._jobs.values() if self._is_late(job, now)]
        for job in expired:
            job.expire()
            self._forget(job)
            self._expired[job.job_id] = job
        return expired

    @staticmethod
    def _is_late(job: LoadJob | StoreJob, now: float) -> bool:
        if now <= job.started + job.deadline:
            return False
        job.outputs_since_deadline += 1
        return job.outputs_since_deadline > _GRACE_OUTPUTS and now > job.started + _MARGIN * job.deadline

    def _forget(self, job: LoadJob | StoreJob) -> None:
        if self._jobs.pop(job.job_id, None) is None:
            return
        newest = self._jobs_by_key(job)
        for key in job.keys:
            if newest.get(key) == job.job_id:
                del newest[key]

    def void_loads(self) -> None:
        """Note that what the running loads bring may not be used."""
        for job in self.loads():
            job.void = True

    def end_orders(self, now: float) -> dict[int, EndOrder]:
        """Return what the workers are to end: expired jobs, and loads that are void or take longer than they
        are worth.
        """
        loads = [job for job in self.loads() if job.void or now > job.started + job.patience]
        return {job.job_id: job.end_order() for job in (*loads, *self._expired.values())}

    def load_of(self, key: OffloadKey) -> LoadJob | None:
        """Return the load that brings a chunk, if one does."""
        job = self._jobs.get(self._loading.get(key, -1))
        return job if isinstance(job, LoadJob) else None

    def is_storing(self, key: OffloadKey) -> bool:
        """Say whether a store of a chunk runs."""
        return key in self._storing

    def loads(self) -> Iterator[LoadJob]:
        """Return the loads among the jobs."""
        return (job for job in self._jobs.values() if isinstance(job, LoadJob))

    def stores(self) -> Iterator[StoreJob]:
        """Return the stores among the jobs."""
        return (job for job in self._jobs.values() if isinstance(job, StoreJob))

    def stores_reading(self, blocks: Set[int]) -> set[int]:
        """Return the stores that read any of these blocks."""
        if not blocks:
            return set()
        return {job.job_id for job in self.stores() if not job.block_ids.isdisjoint(blocks)}

    def check(self) -> None:
        """Raise `IntegrityError` where a chunk is noted as being loaded by nobody, or a job is here for no
        reason.
        """
        if not set(self._loading.values()) <= {job.job_id for job in self.loads()}:
            raise IntegrityError("a chunk is noted as being loaded by a load that does not exist")
        if not set(self._storing.values()) <= {job.job_id for job in self.stores()}:
            raise IntegrityError("a chunk is noted as being stored by a store that does not exist")
        if not all(job.missing_ranks for job in (*self._jobs.values(), *self._expired.values())):
            raise IntegrityError("a job that every rank has reported is waited for")


class LoadFailures:
    """Which chunks are to blame for loads that failed: those whose bytes are wrong, or that fail again and
    again.

    Bounded: it forgets all rather than grow.
    """

    def __init__(self) -> None:
        self._counts: Counter[OffloadKey] = Counter()

    def blame(self, job: LoadJob) -> list[OffloadKey]:
        """Take in how a load ended, and return the chunks that should be loaded no more."""
        if self._counts:
            for index in job.arrived():
                self._counts.pop(job.keys[index], None)
        guilty = [
            job.keys[index]
            for index in job.failed
            if self._is_to_blame(job.keys[index], index in job.corrupt)
        ]
        if len(self._counts) > _MAX_COUNTED:
            self._counts.clear()
        return guilty

    def _is_to_blame(self, key: OffloadKey, is_corrupt: bool) -> bool:
        self._counts[key] += 1
        is_guilty = is_corrupt or self._counts[key] >= _FAILURES_TO_BLAME
        if is_guilty:
            del self._counts[key]
        return is_guilty

    def clear(self) -> None:
        """Forget all failures."""
        self._counts.clear()
