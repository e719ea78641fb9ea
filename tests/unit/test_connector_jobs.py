"""Jobs while they run, and the chunks that are blamed when loads of them fail."""

from __future__ import annotations

import pytest
from tests.unit.connector_kit import Request

from kvtier.connector.jobs import LoadFailures, LoadJob, PlannedJob, RunningJobs, StoreJob
from kvtier.connector.metadata import TransferReport
from kvtier.connector.state import GroupGeometry, GroupState, RequestState
from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.offload.base import WriteLease
from kvtier.transfer.base import CPULoadStoreSpec, GPULoadStoreSpec, TransferResult

A, B, C = (make_offload_key(bytes([n]) * 32, 0) for n in range(3))


REQUEST = RequestState(Request("r", [1]), ReqContext(), (GroupState(GroupGeometry(0, 16, 1, 1)),))


def load(*keys: OffloadKey, ranks: int = 1) -> LoadJob:
    end = GPULoadStoreSpec(list(range(1, 1 + len(keys))), [len(keys)], [0])
    return LoadJob(
        request=REQUEST, keys=list(keys), gpu_end=end, num_bytes=8,
        missing_ranks=set(range(ranks)), deadline=2.0, local=0, end=16 * len(keys), wait_budget=1.0,
    )  # fmt: skip


def store(*blocks: int) -> StoreJob:
    end = GPULoadStoreSpec(list(blocks), [len(blocks)], [0])
    return StoreJob(
        request=REQUEST, keys=[A], gpu_end=end, num_bytes=8,
        missing_ranks={0}, deadline=30.0,
        lease=WriteLease(CPUOffloadingManager(1), [A], CPULoadStoreSpec([0])),
    )  # fmt: skip


def report(job: PlannedJob, rank: int = 0, success: bool = True) -> TransferReport:
    return TransferReport(rank, TransferResult(job.job_id, success))


def test_a_job_runs_until_every_rank_has_reported() -> None:
    jobs, job = RunningJobs(), load(A, B, ranks=2)
    jobs.start(job, 7.0)
    assert (len(jobs), job.started, list(jobs.loads())) == (1, 7.0, [job])
    assert jobs.take_report(report(job)) is job
    assert jobs.take_report(report(job)) is None, "a rank counts once, however often it says so"
    assert jobs.load_of(A) is job
    assert jobs.take_report(report(job, rank=1)) is job
    assert (len(jobs), jobs.load_of(A), jobs.take_report(report(job))) == (0, None, None)
    jobs.check()


def test_a_chunk_belongs_to_the_load_that_came_last() -> None:
    jobs, first, second = RunningJobs(), load(A, B), load(B, C)
    jobs.start(first, 0.0)
    jobs.start(second, 0.0)
    jobs.take_report(report(first))
    assert [jobs.load_of(key) for key in (A, B, C)] == [None, second, second]
    jobs.check()


def test_stores_are_found_by_what_they_read() -> None:
    jobs, stores = RunningJobs(), [store(1, 2), store(3, 4)]
    for job in (*stores, load(A)):
        jobs.start(job, 0.0)
    assert jobs.stores_reading({1, 9}) == {stores[0].job_id}
    assert jobs.stores_reading({2, 3}) == {job.job_id for job in stores}
    assert jobs.stores_reading(set()) == jobs.stores_reading({9}) == set()


def test_check_finds_a_chunk_that_nobody_brings() -> None:
    jobs = RunningJobs()
    jobs._loading[A] = load(A)
    with pytest.raises(IntegrityError, match="by a load that does not exist"):
        jobs.check()


def test_a_job_expires_when_workers_have_answered_since_its_deadline_and_not_of_it() -> None:
    jobs, job = RunningJobs(), load(A, ranks=2)
    jobs.start(job, 0.0)
    jobs.take_report(report(job))
    assert [jobs.expire(2.0), jobs.expire(100.0), jobs.expire(100.0)] == [[], [], []], (
        "one step may have lasted that long"
    )
    assert jobs.expire(100.0) == [job]
    assert (len(jobs), jobs.load_of(A), job.failed) == (0, None, {0})
    order = jobs.end_orders(100.0)[job.job_id]
    assert (order.ranks, order.block_ids, order.void) == ({1}, (1,), True)
    assert jobs.take_report(report(job, rank=1)) is job
    assert (job.missing_ranks, jobs.end_orders(100.0)) == (set(), {})
    jobs.check()


def test_a_load_is_ended_when_computing_would_have_been_faster_and_what_has_arrived_may_be_used() -> None:
    jobs, job = RunningJobs(), load(A)
    jobs.start(job, 0.0)
    assert jobs.end_orders(1.0) == {}
    assert not jobs.end_orders(1.1)[job.job_id].void
    jobs.void_loads()
    assert jobs.end_orders(0.0)[job.job_id].void


def failed(*keys: OffloadKey, failed: set[int], corrupt: bool = False) -> LoadJob:
    job = load(*keys)
    job.failed, job.corrupt = failed, failed if corrupt else set()
    return job


def test_a_chunk_is_blamed_when_it_fails_twice_in_a_row() -> None:
    failures = LoadFailures()
    assert failures.blame(failed(A, B, failed={0})) == ([], [])
    assert failures.blame(failed(A, B, failed={0, 1})) == ([], [A])
    assert failures.blame(failed(A, failed={0})) == ([], []), "it was blamed, and may be stored anew"
    assert failures.blame(failed(A, B, failed=set())) == ([], [])
    assert failures.blame(failed(A, B, failed={0, 1})) == ([], []), "both had arrived in between"
    failures.clear()
    assert failures.blame(failed(A, failed={0})) == ([], [])


def test_wrong_bytes_are_blamed_at_once() -> None:
    assert LoadFailures().blame(failed(A, B, failed={1}, corrupt=True)) == ([B], [])


def test_a_chunk_that_fails_beside_wrong_bytes_has_none_itself() -> None:
    failures = LoadFailures()
    failures.blame(failed(A, B, failed={0, 1}))
    job = failed(A, B, failed={0, 1})
    job.corrupt = {1}
    assert failures.blame(job) == ([B], [A])
