"""Jobs: one transfer each, planned here from a request's state, and followed until every rank has reported.

A job knows its chunks (`keys`, in the order of the slots) and, for each block of its GPU end, which chunk it belongs to, so that
a report of failed blocks becomes a set of failed chunks. Scheduler thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.config import OffloadingConfig
from kvtier.connector.metadata import ReqId
from kvtier.connector.state import GroupState, RequestState
from kvtier.errors import InputError
from kvtier.keys import OffloadKey
from kvtier.transfer.base import NULL_BLOCK, BlockIDsLoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, TransferResult

__all__ = ["ChunkPlace", "Job", "LoadJob", "StoreJob", "plan_load", "plan_store", "reordered"]

ChunkPlace = tuple[GroupState, int]
"""A chunk of a request: its group, and its position there."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One transfer, seen from the scheduler."""

    req_id: ReqId
    keys: list[OffloadKey]
    gpu_end: GPULoadStoreSpec
    key_of_block: list[int]
    """For each block of the GPU end, the index of its chunk in `keys`."""
    num_bytes: int
    """Over all ranks."""
    ranks_left: int
    job_id: int = 0
    started: float = 0.0
    failed: set[int] = field(default_factory=set)
    """Indices into `keys` of chunks that did not arrive whole on some rank."""
    corrupt: set[int] = field(default_factory=set)
    """Those of them whose bytes are at fault."""
    block_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.block_ids = frozenset(self.gpu_end.block_ids.tolist())

    def take_result(self, result: TransferResult) -> None:
        """Note what one rank reports."""
        self.ranks_left -= 1
        if result.success:
            return
        positions = range(len(self.key_of_block)) if result.failed_blocks is None else result.failed_blocks
        failed = {self.key_of_block[position] for position in positions}
        self.failed |= failed
        if result.corrupt:
            self.corrupt |= failed

    def failed_keys(self) -> list[OffloadKey]:
        """Return the chunks that did not arrive."""
        return [self.keys[index] for index in sorted(self.failed)]

    def arrived_keys(self) -> list[OffloadKey]:
        """Return the chunks that arrived whole on every rank that has reported."""
        return [key for index, key in enumerate(self.keys) if index not in self.failed] if self.failed else self.keys


@dataclass(slots=True, kw_only=True)
class LoadJob(Job):
    """Towards the GPU: tokens `[local, end)` of its request."""

    local: int
    end: int
    chunk_spans: list[tuple[int, int]]
    """For each key, the tokens of its chunk that are loaded."""

    def first_failed_token(self) -> int:
        """Return the first token whose chunk did not arrive."""
        return min(self.chunk_spans[index][0] for index in self.failed)

    def tokens_arrived(self, windowed: bool) -> int:
        """Count the tokens that need not be computed. With a windowed group a load is of use whole or not at all."""
        if self.failed and windowed:
            return 0
        lost = {self.chunk_spans[index] for index in self.failed}
        return self.end - self.local - sum(stop - start for start, stop in lost)


class StoreJob(Job):
    """Away from the GPU: whole chunks."""


class _GPUEnd:
    """The GPU end of a job under construction, filled group by group."""

    def __init__(self, num_groups: int) -> None:
        self._block_ids: list[int] = []
        self._sizes = [0] * num_groups
        self._indices = [0] * num_groups
        self.key_of_block: list[int] = []

    def add(self, group: int, position: int, block_ids: list[int], keys: list[int]) -> None:
        """Append blocks of a group, the first of which is the request's `position`-th, and the key index of each."""
        if self._sizes[group] == 0:
            self._indices[group] = position
        self._sizes[group] += len(block_ids)
        self._block_ids += block_ids
        self.key_of_block += keys

    def spec(self) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(self._block_ids, self._sizes, self._indices)

    def num_bytes(self, config: OffloadingConfig) -> int:
        blocks = sum(size * group.bytes_per_block for size, group in zip(self._sizes, config.groups, strict=True))
        return blocks * config.world_size


def plan_load(config: OffloadingConfig, state: RequestState, end: int) -> LoadJob:
    """Plan the load of `[state.local, end)` into the blocks that the request holds."""
    gpu_end = _GPUEnd(len(state.groups))
    keys: list[OffloadKey] = []
    spans: list[tuple[int, int]] = []
    for group in state.groups:
        per_chunk, size = group.geometry.blocks_per_chunk, group.geometry.chunk_size
        first, last = _blocks_to_load(group, state.local, end)
        if first == last:
            continue
        chunks = range(first // per_chunk, -(-last // per_chunk))
        chunk_of = [len(keys) + position // per_chunk - chunks.start for position in range(first, last)]
        gpu_end.add(group.geometry.index, first, group.block_ids[first:last], chunk_of)
        keys += group.keys[chunks.start : chunks.stop]
        spans += [(max(chunk * size, state.local), min((chunk + 1) * size, end)) for chunk in chunks]
    return LoadJob(
        req_id=state.view.request_id,
        keys=keys,
        gpu_end=gpu_end.spec(),
        key_of_block=gpu_end.key_of_block,
        num_bytes=gpu_end.num_bytes(config),
        ranks_left=config.world_size,
        local=state.local,
        end=end,
        chunk_spans=spans,
    )


def _blocks_to_load(group: GroupState, local: int, end: int) -> tuple[int, int]:
    """Return the range of block positions to load; leading positions without a block are not needed by the engine."""
    size = group.geometry.block_size
    if local % size:
        raise InputError(f"num_computed_tokens: expected a multiple of the block size ({size}), got {local}")
    first, last = group.geometry.first_needed(local, end) // size, -(-end // size)
    while first < last and group.block_ids[first] == NULL_BLOCK:
        first += 1
    return first, last


def plan_store(
    config: OffloadingConfig, state: RequestState, keys: list[OffloadKey], places: list[ChunkPlace]
) -> StoreJob:
    """Plan the store of whole chunks, given group by group with the place of each."""
    gpu_end = _GPUEnd(len(state.groups))
    for index, (group, chunk) in enumerate(places):
        blocks = group.chunk_blocks(chunk)
        gpu_end.add(group.geometry.index, chunk * group.geometry.blocks_per_chunk, blocks, [index] * len(blocks))
    return StoreJob(
        req_id=state.view.request_id,
        keys=keys,
        gpu_end=gpu_end.spec(),
        key_of_block=gpu_end.key_of_block,
        num_bytes=gpu_end.num_bytes(config),
        ranks_left=config.world_size,
    )


def reordered(spec: LoadStoreSpec, order: list[int]) -> LoadStoreSpec:
    """Return the other end of a store with its places in the order of the blocks."""
    if order == sorted(order):
        return spec
    if not isinstance(spec, BlockIDsLoadStoreSpec):
        raise InputError(f"{type(spec).__name__}: expected a BlockIDsLoadStoreSpec where there are several groups")
    return type(spec)(spec.block_ids[order])
