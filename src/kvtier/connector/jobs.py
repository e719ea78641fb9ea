"""Jobs: one transfer each, planned here from a request's state, and followed until every rank has reported.

A job knows its chunks (`keys`, in the order of the slots), and the chunk of each block of its GPU end. So a
report of failed blocks becomes a set of failed chunks. Data that only a failure needs is computed when one
comes, so that planning costs a few slices.

`RunningJobs` holds a job from its start until every rank has reported. A job whose reports do not come
expires: it no longer counts as running, but its slots are not used again while a rank may still touch them.
Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kvtier.config import OffloadingConfig, Recompute
from kvtier.connector.metadata import EndOrder, OffloadingConnectorMetadata, ReqId, TransferReport
from kvtier.connector.state import ChunkGeometry, GroupState, RequestState
from kvtier.errors import InputError, IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.base import ReadLease, WriteLease
from kvtier.transfer.base import NULL_BLOCK, BlockIDsLoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec

_FAILURES_TO_BLAME = 2  # after this many failed loads of a chunk in a row, the chunk itself is blamed
_MAX_COUNTED = 4096
_MARGIN = 1.5
"""A job is late after this many deadlines: a worker's clock starts when the job reaches it, and its report
comes only with a step.
"""
_MAX_ASKED = 256
"""The most expired jobs that a step asks for: a rank that is silent for ever leaves ever more of them."""
_GRACE_OUTPUTS = 2
"""A job is late only after more worker outputs than this since its deadline: a step may take longer than any
deadline.
"""


@dataclass(slots=True, kw_only=True)
class PlannedJob:
    """One transfer, seen from the scheduler."""

    request: RequestState
    keys: list[OffloadKey]
    gpu_end: GPULoadStoreSpec
    num_bytes: int
    """The sum over all ranks that move bytes."""
    missing_ranks: set[int]
    """The ranks that have not reported."""
    deadline: float
    """Seconds after which a worker gives the job up."""
    job_id: int = 0
    started: float = 0.0
    epoch: int = 0
    """The number of resets of the tiers before the job started."""
    expired: bool = False
    """The job's reports did not come in time, and the job counts as failed."""
    outputs_since_deadline: int = 0
    failed: set[int] = field(default_factory=set)
    """Indices into `keys` of chunks that did not arrive whole on some rank."""
    corrupt: set[int] = field(default_factory=set)
    """The indices in `failed` of chunks whose bytes are wrong."""
    seconds: float | None = None
    """The transfer's own time on the slowest rank; `None` if no rank has measured it."""
    unpacked: int = 0
    """Blocks that some rank could not pack."""
    failed_blocks: set[int] = field(default_factory=set)
    """Positions in the GPU end of blocks that did not arrive on some rank."""

    @property
    def req_id(self) -> ReqId:
        """The id of the request that this job belongs to."""
        return self.request.view.request_id

    def add_to(self, meta: OffloadingConnectorMetadata) -> None:
        """Order this job from the workers."""
        raise NotImplementedError

    def settle(self) -> None:
        """Give the job's slots back: every rank is done with them."""
        raise NotImplementedError

    def take_report(self, report: TransferReport) -> None:
        """Take in the report of one rank.

        A report of an expired job changes only one thing: the rank is done with the job.
        """
        self.missing_ranks.discard(report.rank)
        if self.expired:
            return
        if report.result.transfer_time is not None:
            self.seconds = max(self.seconds or 0.0, report.result.transfer_time)
        self.unpacked += report.result.unpacked
        if not report.result.success:
            self._fail(report.result.failed_blocks, report.result.corrupt)

    def expire(self) -> None:
        """Give up waiting for reports, and count everything as not arrived."""
        self.fail()
        self.expired = True

    def fail(self) -> None:
        """Count everything as failed."""
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
        """Return the order to end this job, for the ranks that have not reported it."""
        return EndOrder(self.req_id, frozenset(self.missing_ranks), (), void=self.expired)

    def arrived(self) -> list[int]:
        """Return the indices into `keys` of chunks that arrived whole on every rank that has reported."""
        return [index for index in range(len(self.keys)) if index not in self.failed]

    def _keys_of_blocks(self) -> list[int]:
        """Return, for each block of the GPU end, the index of its chunk in `keys`.

        Every group begins a new chunk.
        """
        indices: list[int] = []
        first_key, per_chunk = 0, self.request.groups[0].geometry.blocks_per_chunk
        for size, position in zip(self.gpu_end.group_sizes, self.gpu_end.block_indices or (), strict=True):
            skipped = position % per_chunk
            indices += [first_key + block // per_chunk for block in range(skipped, skipped + size)]
            first_key = indices[-1] + 1 if indices else 0
        return indices


@dataclass(slots=True, kw_only=True)
class LoadJob(PlannedJob):
    """A transfer to the GPU: tokens `[local, end)` of its request."""

    local: int
    end: int
    lease: ReadLease | None = None
    """The chunks in the pool; `None` if they are not there any more, and the load fails before it begins."""
    wait_budget: float
    """Seconds after which computing is the better choice."""
    promoted_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that were in the pool only because they had been promoted, by tier."""
    void: bool = False
    """A reset came after the load was planned: nothing of it may be used."""

    def add_to(self, meta: OffloadingConnectorMetadata) -> None:
        """Order this load, unless its chunks are gone: an end order then has it reported as failed."""
        if self.lease is not None:
            meta.reqs_to_load[self.req_id] = self.lease.spec, self.gpu_end
            meta.load_jobs[self.req_id] = self.job_id

    def settle(self) -> None:
        """Unpin the chunks."""
        if self.lease is not None:
            self.lease.release()

    def end_order(self) -> EndOrder:
        """Return the order to end this load, with its blocks, for the ranks that have not reported it."""
        blocks = tuple(self.gpu_end.block_ids.tolist())
        return EndOrder(self.req_id, frozenset(self.missing_ranks), blocks, void=self.void or self.expired)

    def invalid_block_ids(self) -> set[int]:
        """Return the blocks that did not arrive."""
        return set(self.gpu_end.block_ids[sorted(self.failed_blocks)].tolist())

    def first_failed_token(self) -> int:
        """Return the first token whose block did not arrive."""
        return min(start for start, _ in self._lost())

    def tokens_saved(self, recompute: Recompute) -> int:
        """Count the tokens that an engine with this way to `recompute` need not compute."""
        if not self.failed:
            return self.end - self.local
        if recompute is Recompute.MISSING:
            return self.end - self.local - sum(stop - start for start, stop in self._lost())
        return self.first_failed_token() - self.local if recompute is Recompute.REST else 0

    def _lost(self) -> set[tuple[int, int]]:
        """Return the tokens `[start, stop)` of each block that did not arrive."""
        spans: list[tuple[int, int]] = []
        counts, firsts = self.gpu_end.group_sizes, self.gpu_end.block_indices or ()
        for count, first, group in zip(counts, firsts, self.request.groups, strict=True):
            size = group.geometry.block_size
            spans += [(at * size, min((at + 1) * size, self.end)) for at in range(first, first + count)]
        return {spans[position] for position in self.failed_blocks}


@dataclass(slots=True, kw_only=True)
class StoreJob(PlannedJob):
    """A transfer from the GPU, of whole chunks."""

    lease: WriteLease
    """The slots that the chunks are written to, in the order of `keys`."""
    block_ids: frozenset[int] = field(init=False)
    """The blocks that the store reads."""

    def __post_init__(self) -> None:
        self.block_ids = frozenset(self.gpu_end.block_ids.tolist())

    def add_to(self, meta: OffloadingConnectorMetadata) -> None:
        """Order this store."""
        meta.reqs_to_store[self.req_id] = self.gpu_end, self.lease.spec
        meta.store_jobs[self.req_id] = self.job_id

    def settle(self) -> None:
        """Make the chunks ready that have arrived, and free the slots of the others."""
        if self.failed:
            self.lease.abandon(self.failed)
        self.lease.commit()


S = TypeVar("S", bound=StoreJob)


def _gpu_end(config: OffloadingConfig, blocks: list[tuple[int, list[int]]]) -> tuple[GPULoadStoreSpec, int]:
    """Return the GPU end of a job, and its bytes over all ranks.

    `blocks` gives for each group the position in the request of its first block, and its block ids.
    """
    sizes = [len(block_ids) for _, block_ids in blocks]
    block_ids = [block_id for _, of_group in blocks for block_id in of_group]
    num_bytes = sum(size * config.bytes_of_all_ranks(group) for group, size in enumerate(sizes))
    return GPULoadStoreSpec(block_ids, sizes, [position for position, _ in blocks]), num_bytes


def expect_loadable(state: RequestState, end: int) -> None:
    """Raise `InputError` if the request lacks keys or blocks for a load up to `end`."""
    for group in state.groups:
        size = group.geometry.block_size
        room = len(group.block_ids) * size
        if end > min(room, group.num_keyed):
            raise InputError(
                f"external tokens: expected those offered, and blocks for them, got tokens up to {end}, "
                f"keys up to {group.num_keyed} and blocks up to {room}"
            )
        if group.geometry.is_state and (
            end % group.geometry.chunk_size or group.block_ids[end // size - 1] == NULL_BLOCK
        ):
            raise InputError(
                f"external tokens: expected to end at a state's boundary, a multiple of"
                f" {group.geometry.chunk_size} tokens, and a block for the state, got tokens up to {end}"
            )


def plan_load(config: OffloadingConfig, state: RequestState, end: int, wait_budget: float) -> LoadJob:
    """Plan the load of `[state.local, end)` into the blocks that the request holds."""
    blocks: list[tuple[int, list[int]]] = []
    keys: list[OffloadKey] = []
    per_chunk = config.settings.blocks_per_chunk
    for group in state.groups:
        first, last = _blocks_to_load(group, state.local, end)
        blocks.append((first, group.block_ids[first:last]))
        if first < last:
            keys += group.keys[first // per_chunk : -(-last // per_chunk)]
    gpu_end, num_bytes = _gpu_end(config, blocks)
    return LoadJob(
        request=state,
        keys=keys,
        gpu_end=gpu_end,
        num_bytes=num_bytes,
        missing_ranks=set(range(config.world_size)),
        deadline=config.settings.load_deadline,
        local=state.local,
        end=end,
        wait_budget=wait_budget,
    )


def _blocks_to_load(group: GroupState, local: int, end: int) -> tuple[int, int]:
    """Return the range of block positions to load, without leading positions that have no block.

    The engine does not need those. A state is always needed: without a block for it the load fails.
    """
    size = group.geometry.block_size
    if local % size:
        raise InputError(f"num_computed_tokens: expected a multiple of the block size ({size}), got {local}")
    first, last = group.geometry.first_needed(local, end) // size, -(-end // size)
    if not group.geometry.is_state:
        while first < min(last, len(group.block_ids)) and group.block_ids[first] == NULL_BLOCK:
            first += 1
    return first, last


def chunks_to_store(
    geometry: ChunkGeometry, state: RequestState, limit: int, allocated_at: Mapping[int, int]
) -> list[dict[OffloadKey, int]]:
    """Return for each group the complete chunks, up to token `limit`, that were not offered before.

    They are given by key, with their positions. `allocated_at` tells which blocks of windowed groups the
    request has lost. Of a state group these are the states that the request reaches in this step.
    """
    wanted = []
    ends = state.window_ends(geometry.reach_alignment) if geometry.has_costly_windows else None
    for group in state.groups:
        if group.geometry.is_state:
            wanted.append({group.keys[at]: at for at in group.boundary_blocks if at < len(group.keys)})
            continue
        start, stop = group.next_store, group.num_complete(limit)
        chunks = dict(zip(group.keys[start:stop], range(start, stop), strict=True))
        if group.geometry.is_windowed:
            chunks = {
                key: at
                for key, at in chunks.items()
                if geometry.may_need(group.geometry, at, ends) and group.still_has(at, allocated_at)
            }
        wanted.append(chunks)
    return wanted


def plan_store(
    config: OffloadingConfig,
    state: RequestState,
    chunks: list[dict[OffloadKey, int]],
    lease: WriteLease,
    make: Callable[..., S],
) -> S:
    """Plan the store of whole chunks, given by group: the key of each and its position.

    `make` is `StoreJob`, or makes a job of a kind of its own.
    """
    per_chunk = config.settings.blocks_per_chunk
    positions = [list(chunks_of_group.values()) for chunks_of_group in chunks]
    blocks = [
        (at[0] * per_chunk if at else 0, group.blocks_of(at))
        for group, at in zip(state.groups, positions, strict=True)
    ]
    gpu_end, num_bytes = _gpu_end(config, blocks)
    return make(
        request=state,
        keys=lease.keys,
        gpu_end=gpu_end,
        num_bytes=num_bytes // config.replicas,
        missing_ranks=set(config.storing_ranks),
        deadline=config.settings.store_deadline,
        lease=lease,
    )


def reordered(spec: LoadStoreSpec, keys: list[OffloadKey], order: list[OffloadKey]) -> LoadStoreSpec:
    """Return the pool end of a store, which is in the order of `keys`, in another order of the same keys."""
    if keys == order:
        return spec
    if not isinstance(spec, BlockIDsLoadStoreSpec):
        raise InputError(
            f"{type(spec).__name__}: expected a BlockIDsLoadStoreSpec where there are several groups"
        )
    position = {key: index for index, key in enumerate(keys)}
    return type(spec)(spec.block_ids[[position[key] for key in order]])


class RunningJobs:
    """Owns the jobs that run, and the expired jobs that some rank has not reported. It assigns the job ids.

    Only this writes the `load_job` and the `store_jobs` of requests.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, LoadJob | StoreJob] = {}
        self._expired: OrderedDict[int, LoadJob | StoreJob] = OrderedDict()
        self._loading: dict[OffloadKey, LoadJob] = {}
        """The newest running load of each chunk."""
        self._newest = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, job: LoadJob | StoreJob, now: float) -> None:
        """Give a planned job its id."""
        self._newest += 1
        job.job_id, job.started = self._newest, now
        self._jobs[job.job_id] = job
        if isinstance(job, LoadJob):
            self._loading.update(dict.fromkeys(job.keys, job))
            job.request.load_job = job.job_id
        else:
            job.request.store_jobs.add(job.job_id)

    @staticmethod
    def end(job: LoadJob | StoreJob) -> bool:
        """End a job for its request, and return whether the request still had the blocks of the job."""
        state = job.request
        if isinstance(job, LoadJob):
            state.load_job = None
            return True
        had_blocks = job.job_id in state.store_jobs
        state.store_jobs.discard(job.job_id)
        return had_blocks

    @staticmethod
    def release_blocks(state: RequestState) -> None:
        """Record that a request has lost its blocks, while stores may still read them."""
        state.store_jobs.clear()

    def take_report(self, report: TransferReport) -> LoadJob | StoreJob | None:
        """Take in a rank's report of a job, and return the job.

        A job leaves when all ranks have reported it. `None` means that this rank, or all ranks, had reported
        it before.
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
        """Expire and return the jobs whose reports should have come long ago.

        Call it once for every output.
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
        if self._jobs.pop(job.job_id, None) is not None and isinstance(job, LoadJob):
            for key in job.keys:
                if self._loading.get(key) is job:
                    del self._loading[key]

    def void_loads(self) -> None:
        """Make all running loads void: nothing of them may be used."""
        for job in self.loads():
            job.void = True

    def end_orders(self, now: float) -> dict[int, EndOrder]:
        """Return the orders to end jobs: expired jobs, and loads that are void or exceed their wait budget.

        The orders name only some of very many expired jobs; the next call names the next ones.
        """
        if not self._jobs and not self._expired:  # most steps
            return {}
        loads = [job for job in self.loads() if job.void or now > job.started + job.wait_budget]
        expired = list(islice(self._expired.values(), _MAX_ASKED))
        for job in expired:
            self._expired.move_to_end(job.job_id)
        return {job.job_id: job.end_order() for job in (*loads, *expired)}

    def load_of(self, key: OffloadKey) -> LoadJob | None:
        """Return the running load of a chunk, if there is one."""
        return self._loading.get(key)

    def storing(self) -> set[OffloadKey]:
        """Return the chunks that running stores store."""
        return set().union(*(job.keys for job in self.stores()))

    def loads(self) -> Iterator[LoadJob]:
        """Return the loads among the jobs."""
        return (job for job in self._jobs.values() if isinstance(job, LoadJob))

    def stores(self) -> Iterator[StoreJob]:
        """Return the stores among the jobs."""
        return (job for job in self._jobs.values() if isinstance(job, StoreJob))

    def stores_reading(self, blocks: Set[int]) -> set[int]:
        """Return the ids of running stores that read any of these blocks."""
        if not blocks:
            return set()
        return {job.job_id for job in self.stores() if not job.block_ids.isdisjoint(blocks)}

    def check(self, requests: Iterable[RequestState] = ()) -> None:
        """Raise `IntegrityError` if a chunk or one of the requests has a job that does not run, or if a job
        waits for no rank.
        """
        for state in requests:
            req_id, load = state.view.request_id, state.load_job
            if load is not None and not isinstance(self._jobs.get(load), LoadJob):
                raise IntegrityError(f"request {req_id} waits for load {load}, which does not exist")
            if not state.store_jobs <= self._jobs.keys():
                raise IntegrityError(f"request {req_id} holds blocks for stores that do not exist")
        if not all(self._jobs.get(job.job_id) is job for job in self._loading.values()):
            raise IntegrityError("a chunk is being loaded by a load that does not exist")
        if not all(job.missing_ranks for job in (*self._jobs.values(), *self._expired.values())):
            raise IntegrityError("a job that every rank has reported is waited for")


class LoadFailures:
    """Counts the failed loads of each chunk, to find the chunks that should not be loaded again.

    A chunk is to blame if its bytes are wrong or its loads fail in a row. The number of chunks is bounded:
    beyond it all are forgotten.
    """

    def __init__(self) -> None:
        self._counts: Counter[OffloadKey] = Counter()

    def blame(self, job: LoadJob) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Count the failures of a load that is over, and return the chunks that should not be loaded again.

        First those whose bytes are wrong, then those whose loads fail in a row.
        """
        if self._counts:
            for index in job.arrived():
                self._counts.pop(job.keys[index], None)
        corrupt = [job.keys[index] for index in job.corrupt]
        failed = [job.keys[index] for index in job.failed if index not in job.corrupt]
        self._counts.update(failed)
        failing = [key for key in failed if self._counts[key] >= _FAILURES_TO_BLAME]
        for key in (*corrupt, *failing):
            self._counts.pop(key, None)
        if len(self._counts) > _MAX_COUNTED:
            self._counts.clear()
        return corrupt, failing

    def clear(self) -> None:
        """Forget all failures."""
        self._counts.clear()
