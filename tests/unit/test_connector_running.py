"""Jobs while they run, and the chunks that are blamed when loads of them fail."""

from __future__ import annotations

import pytest

from kvtier.connector.jobs import Job, LoadJob, StoreJob
from kvtier.connector.running import RunningJobs
from kvtier.connector.strikes import Strikes
from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.transfer.base import GPULoadStoreSpec, TransferResult

A, B, C = (make_offload_key(bytes([n]) * 32, 0) for n in range(3))


def load(*keys: OffloadKey, ranks: int = 1) -> LoadJob:
    end = GPULoadStoreSpec(list(range(1, 1 + len(keys))), [len(keys)], [0])
    return LoadJob(
        req_id="r", keys=list(keys), gpu_end=end, blocks_per_chunk=1, num_bytes=8, ranks_left=ranks,
        local=0, end=16 * len(keys), block_sizes=(16,),
    )  # fmt: skip


def store(*blocks: int) -> StoreJob:
    end = GPULoadStoreSpec(list(blocks), [len(blocks)], [0])
    return StoreJob(req_id="r", keys=[A], gpu_end=end, blocks_per_chunk=len(blocks), num_bytes=8, ranks_left=1)


def result(job: Job, success: bool = True) -> TransferResult:
    return TransferResult(job.job_id, success)


def test_a_job_runs_until_every_rank_has_reported() -> None:
    jobs, job = RunningJobs(), load(A, B, ranks=2)
    jobs.start(job, 7.0)
    assert (job.job_id in jobs, job.started, list(jobs.loads())) == (True, 7.0, [job])
    assert jobs.take_result(result(job)) is job
    assert jobs.load_of(A) is job
    assert jobs.take_result(result(job)) is job
    assert (len(jobs), jobs.load_of(A), jobs.take_result(result(job))) == (0, None, None)
    jobs.check()


def test_a_chunk_belongs_to_the_load_that_came_last() -> None:
    jobs, first, second = RunningJobs(), load(A, B), load(B, C)
    jobs.start(first, 0.0)
    jobs.start(second, 0.0)
    jobs.take_result(result(first))
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
    jobs._loading[A] = 5
    with pytest.raises(IntegrityError, match="by a load that does not exist"):
        jobs.check()


def failed(*keys: OffloadKey, failed: set[int], corrupt: bool = False) -> LoadJob:
    job = load(*keys)
    job.failed, job.corrupt = failed, failed if corrupt else set()
    return job


def test_a_chunk_is_blamed_when_it_fails_twice_in_a_row() -> None:
    strikes = Strikes()
    assert strikes.blame(failed(A, B, failed={0})) == []
    assert strikes.blame(failed(A, B, failed={0, 1})) == [A]
    assert strikes.blame(failed(A, failed={0})) == [], "it was blamed, and may be stored anew"
    assert strikes.blame(failed(A, B, failed=set())) == []
    assert strikes.blame(failed(A, B, failed={0, 1})) == [], "both had arrived in between"
    strikes.clear()
    assert strikes.blame(failed(A, failed={0})) == []


def test_wrong_bytes_are_blamed_at_once() -> None:
    assert Strikes().blame(failed(A, B, failed={1}, corrupt=True)) == [B]
