"""Jobs: one transfer each, planned here from a request's state, and followed until every rank has reported.

A job knows its chunks (`keys`, in the order of the slots) and can tell for each block of its GPU end which
chunk it belongs to, so that a report of failed blocks becomes a set of failed chunks. What only a failure
asks for is worked out when one comes, and planning costs a few slices.

`RunningJobs` has a job from its start until every rank has reported. One whose reports do not come expires:
from then on it does not run, it is only waited for, so that its slots are not used again while a rank may
still touch them. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import islice

from kvtier.config import OffloadingConfig, Recompute
from kvtier.connector.metadata import EndOrder, ReqId, TransferReport
from kvtier.connector.state import GroupState, RequestState
from kvtier.errors import InputError, IntegrityError
from kvtier.keys import OffloadKey
from kvtier.transfer.base import NULL_BLOCK, BlockIDsLoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec

__all__ = [
    "LoadFailures",
    "LoadJob",
    "PlannedJob",
    "RunningJobs",
    "StoreJob",
    "plan_load",
    "plan_store",
    "reordered",
]

_FAILURES_TO_BLAME = 2  # loads of one chunk that fail in a row: the chunk itself is blamed
_MAX_COUNTED = 4096
_MARGIN = 1.5
"""Times its deadline: a worker's clock starts when the job reaches it, its report travels with a step."""
_MAX_ASKED = 256
"""Expired jobs that are asked for in a step: of a rank that says nothing for ever there are ever more."""
_GRACE_OUTPUTS = 2
"""A step may last longer than any deadline, so a job is late only if workers have answered since."""


@dataclass(slots=True, kw_only=True)
class PlannedJob:
    """One transfer, seen from the scheduler."""

    request: RequestState
    keys: list[OffloadKey]
    gpu_end: GPULoadStoreSpec
    blocks_per_chunk: int
    num_bytes: int
    """Over all ranks that move them."""
    missing_ranks: set[int]
    """Those that have not reported."""
    deadline: float
    """Seconds after which a worker gives it up."""
    pool_end: LoadStoreSpec | None = None
    """Where the chunks are in the pool, in the order of `keys`. Known once the manager was asked."""
    job_id: int = 0
    started: float = 0.0
    epoch: int = 0
    """The resets of the tiers before it started."""
    expired: bool = False
    """Its reports did not come, and nobody waits for them any more."""
    outputs_since_deadline: int = 0
    failed: set[int] = field(default_factory=set)
    """Indices into `keys` of chunks that did not arrive whole on some rank."""
    corrupt: set[int] = field(default_factory=set)
    """Those of them whose bytes are at fault."""
    failed_blocks: set[int] = field(default_factory=set)
    """Positions in the GPU end of blocks that did not arrive on some rank."""
    block_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.block_ids = frozenset(self.gpu_end.block_ids.tolist())

    @property
    def req_id(self) -> ReqId:
        """The request on whose behalf it runs."""
        return self.request.view.request_id

    def take_report(self, report: TransferReport) -> None:
        """Note what one rank reports.

        What is said of an expired job changes nothing but that the rank is done with it.
        """
        self.missing_ranks.discard(report.rank)
        if not report.result.success and not self.expired:
            self._fail(report.result.failed_blocks, report.result.corrupt)

    def expire(self) -> None:
        """Give up waiting for reports: nothing of it has arrived, as far as anybody knows."""
        self.fail()
        self.expired = True

    def fail(self) -> None:
        """Note that nothing of it may be used."""
        self._fail(None, is_corrupt=False)

    def _fail(self, failed_blocks: tuple[int, ...] | None, is_corrupt: bool) -> None:
        key_of_block = self._keys_of_blocks()
        positions = range(len(key_of_block)) if failed_blocks is None else failed_blocks
        failed = {key_of_block[position] for position in positions}
        self.failed |= failed
        self.failed_blocks.update(positions)
        if is_corrupt:
            self.corrupt |= failed

    def end_order(self) -> EndOrder:
        """Order those ranks to end it that have not reported it."""
        return EndOrder(self.req_id, frozenset(self.missing_ranks), (), void=self.expired)

    def pool_part(self, indices: Iterable[int]) -> LoadStoreSpec | None:
        """Return the pool's end of some of the chunks, by index into `keys`; `None` where places have no
        numbers.
        """
        spec = self.pool_end
        return type(spec)(spec.block_ids[list(indices)]) if isinstance(spec, BlockIDsLoadStoreSpec) else None

    def arrived(self) -> list[int]:
        """Return the indices into `keys` of chunks that arrived whole on every rank that has reported."""
        return [index for index in range(len(self.keys)) if index not in self.failed]

    def arrived_keys(self) -> list[OffloadKey]:
        """Return the chunks that arrived whole on every rank that has reported."""
        return (
            [key for index, key in enumerate(self.keys) if index not in self.failed]
            if self.failed
            else self.keys
        )

    def _keys_of_blocks(self) -> list[int]:
        """For each block of the GPU end, return the index of its chunk in `keys`.

        Every group begins a new chunk.
        """
        indices: list[int] = []
        first_key, per_chunk = 0, self.blocks_per_chunk
        for size, position in zip(self.gpu_end.group_sizes, self.gpu_end.block_indices or (), strict=True):
            skipped = position % per_chunk
            indices += [first_key + block // per_chunk for block in range(skipped, skipped + size)]
            first_key = indices[-1] + 1 if indices else 0
        return indices


@dataclass(slots=True, kw_only=True)
class LoadJob(PlannedJob):
    """Towards the GPU: tokens `[local, end)` of its request."""

    local: int
    end: int
    block_sizes: tuple[int, ...]
    """Tokens of a block, by group."""
    patience: float
    """Seconds after which computing is the better choice."""
    promoted_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that were in the pool only because they had been promoted, by tier."""
    void: bool = False
    """A reset came after it was planned: nothing of it may be used."""

    def end_order(self) -> EndOrder:
        """Order those ranks to end it that have not reported it, and to name what it should have filled."""
        blocks = tuple(self.gpu_end.block_ids.tolist())
        return EndOrder(self.req_id, frozenset(self.missing_ranks), blocks, void=self.void or self.expired)

    def invalid_block_ids(self) -> set[int]:
        """Return the blocks that did not arrive."""
        return set(self.gpu_end.block_ids[sorted(self.failed_blocks)].tolist())

    def first_failed_token(self) -> int:
        """Return the first token whose block did not arrive."""
        return min(start for start, _ in self._lost())

    def tokens_saved(self, recompute: Recompute) -> int:
        """Count the tokens that an engine which recovers like this need not compute."""
        if not self.failed:
            return self.end - self.local
        if recompute is Recompute.MISSING:
            return self.end - self.local - sum(stop - start for start, stop in self._lost())
        return self.first_failed_token() - self.local if recompute is Recompute.REST else 0

    def _lost(self) -> set[tuple[int, int]]:
        """Return the tokens `[start, stop)` of each block that did not arrive."""
        spans: list[tuple[int, int]] = []
        for count, first, size in zip(
            self.gpu_end.group_sizes, self.gpu_end.block_indices or (), self.block_sizes, strict=True
        ):
            spans += [(at * size, min((at + 1) * size, self.end)) for at in range(first, first + count)]
        return {spans[position] for position in self.failed_blocks}


class StoreJob(PlannedJob):
    """Away from the GPU: whole chunks."""


class _GPUEnd:
    """The GPU end of a job under construction, filled group by group."""

    def __init__(self, num_groups: int) -> None:
        self._block_ids: list[int] = []
        self._sizes = [0] * num_groups
        self._indices = [0] * num_groups

    def add(self, group: int, position: int, block_ids: list[int]) -> None:
        """Append the blocks of a group, the first of which is the request's `position`-th."""
        self._indices[group] = position
        self._sizes[group] = len(block_ids)
        self._block_ids += block_ids

    def spec(self) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(self._block_ids, self._sizes, self._indices)

    def num_bytes(self, config: OffloadingConfig) -> int:
        return sum(size * config.bytes_of_all_ranks(group) for group, size in enumerate(self._sizes))


def plan_load(config: OffloadingConfig, state: RequestState, end: int, patience: float) -> LoadJob:
    """Plan the load of `[state.local, end)` into the blocks that the request holds."""
    gpu_end = _GPUEnd(len(state.groups))
    keys: list[OffloadKey] = []
    per_chunk = config.settings.blocks_per_chunk
    for group in state.groups:
        first, last = _blocks_to_load(group, state.local, end)
        if first == last:
            continue
        gpu_end.add(group.geometry.index, first, group.block_ids[first:last])
        keys += group.keys[first // per_chunk : -(-last // per_chunk)]
    return LoadJob(
        request=state,
        keys=keys,
        gpu_end=gpu_end.spec(),
        blocks_per_chunk=per_chunk,
        num_bytes=gpu_end.num_bytes(config),
        missing_ranks=set(range(config.world_size)),
        deadline=config.settings.load_deadline,
        local=state.local,
        end=end,
        block_sizes=tuple(group.geometry.block_size for group in state.groups),
        patience=patience,
    )


def _blocks_to_load(group: GroupState, local: int, end: int) -> tuple[int, int]:
    """Return the range of block positions to load; leading positions without a block are not needed by the
    engine.
    """
    size = group.geometry.block_size
    if local % size:
        raise InputError(f"num_computed_tokens: expected a multiple of the block size ({size}), got {local}")
    first, last = group.geometry.first_needed(local, end) // size, -(-end // size)
    while first < last and group.block_ids[first] == NULL_BLOCK:
        first += 1
    return first, last


def plan_store(
    config: OffloadingConfig, state: RequestState, chunks: list[dict[OffloadKey, int]]
) -> StoreJob:
    """Plan the store of whole chunks, given by group: the key of each and its position."""
    gpu_end = _GPUEnd(len(state.groups))
    per_chunk = config.settings.blocks_per_chunk
    for group, places in zip(state.groups, chunks, strict=True):
        if places:
            positions = list(places.values())
            gpu_end.add(group.geometry.index, positions[0] * per_chunk, group.blocks_of(positions))
    return StoreJob(
        request=state,
        keys=[key for places in chunks for key in places],
        gpu_end=gpu_end.spec(),
        blocks_per_chunk=per_chunk,
        num_bytes=gpu_end.num_bytes(config) // config.replicas,
        missing_ranks=set(config.storing_ranks),
        deadline=config.settings.store_deadline,
    )


def reordered(spec: LoadStoreSpec, keys: list[OffloadKey], order: list[OffloadKey]) -> LoadStoreSpec:
    """Return the other end of a store, whose places are those of `keys`, with its places in another order of
    the keys.
    """
    if keys == order:
        return spec
    if not isinstance(spec, BlockIDsLoadStoreSpec):
        raise InputError(
            f"{type(spec).__name__}: expected a BlockIDsLoadStoreSpec where there are several groups"
        )
    place = {key: index for index, key in enumerate(keys)}
    return type(spec)(spec.block_ids[[place[key] for key in order]])


class RunningJobs:
    """Jobs by their ids, which are given here."""

    def __init__(self) -> None:
        self._jobs: dict[int, LoadJob | StoreJob] = {}
        self._expired: OrderedDict[int, LoadJob | StoreJob] = OrderedDict()
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
        if not self._jobs:
            return []
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

        Of many expired jobs some; the next call returns the next ones.
        """
        if not self._jobs and not self._expired:  # as in most steps
            return {}
        loads = [job for job in self.loads() if job.void or now > job.started + job.patience]
        expired = list(islice(self._expired.values(), _MAX_ASKED))
        for job in expired:
            self._expired.move_to_end(job.job_id)
        return {job.job_id: job.end_order() for job in (*loads, *expired)}

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
