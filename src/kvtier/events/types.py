"""KV events as they travel: blocks stored, blocks removed, the batch that carries them, and the aggregate of
several workers' events.

Fields, their order and their encoding are those of vLLM 0.32, so that consumers of one read the other: a
batch is an array `[ts, events, data_parallel_rank]`, an event a map whose first entry `type` names its
class; fields at their default are left out. Events are immutable, compare by value and hash over every
field. Any thread may use them; an aggregator is not for several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Self

import msgspec

from kvtier.errors import InputError
from kvtier.residency import MEDIUM_CPU as MEDIUM_CPU
from kvtier.residency import MEDIUM_STORAGE as MEDIUM_STORAGE

MEDIUM_GPU = "GPU"

ExternalBlockHash = bytes | int
"""A block hash outside the engine: all its bytes, or its low 64 bits."""


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, frozen=True):
    """One change of what is cached."""

    def __hash__(self) -> int:
        return hash((type(self), *(_freeze(value) for value in msgspec.structs.astuple(self))))


def _freeze(value: Any) -> Any:
    """Return a hashable form of a value, all the way down: extra keys may hold anything that msgpack can."""
    if isinstance(value, dict):
        return frozenset((key, _freeze(item)) for key, item in value.items())
    if isinstance(value, msgspec.msgpack.Ext):
        return value.code, bytes(value.data)
    return tuple(map(_freeze, value)) if isinstance(value, (list, tuple)) else value


class BlockStored(KVCacheEvent, frozen=True):
    """Consecutive blocks became readable in `medium`.

    `parent_block_hash` is the block before the first, or `None` if there is none. `extra_keys` has one entry
    per block. `locality` is LOCAL or REMOTE as seen from the publisher. `ownership` names the tier below
    the pool that reports them. `session_id` names the request context that stored or reused them.
    `lora_id` is deprecated; use `lora_name`.
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent, frozen=True):
    """Blocks ceased to be readable in `medium`."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """The publisher's cache is empty."""


class Mark(msgspec.Struct, frozen=True, gc=False):
    """A publisher's statement about itself at a batch: its identity, and what it holds after that batch.

    `epoch` is drawn at every start. `blocks` counts the held blocks, `digest` sums them up (see
    `kvtier.events.wire`).
    """

    epoch: int
    blocks: int
    digest: int


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events published under one sequence number; `ts` is their time in Unix seconds."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVEventBatch(EventBatch):
    """A batch of KV cache events."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def blocks_of(event: BlockStored, start: int, stop: int) -> BlockStored:
    """Return the part of `event` for its blocks `[start, stop)`, with parent and tokens.

    If the tokens do not divide evenly into the event's blocks, the part has no tokens, and a block size of
    0.
    """
    hashes, size = event.block_hashes, event.block_size
    described = len(event.token_ids) == len(hashes) * size
    extra = event.extra_keys
    return msgspec.structs.replace(
        event,
        block_hashes=hashes[start:stop],
        parent_block_hash=hashes[start - 1] if start else event.parent_block_hash,
        token_ids=event.token_ids[start * size : stop * size] if described else [],
        block_size=size if described else 0,
        extra_keys=extra[start:stop] if extra is not None and len(extra) == len(hashes) else extra,
    )


# -- the events of several workers -----------------------------------------------------------------


class KVEventAggregator:
    """Counts in how many workers' batches each event appears, to find the events that all workers report.

    A block is cached once every worker has its part. Workers' batches are added one by one; an event is
    common when at least as many batches hold it as there are workers. Repeated events are counted
    separately: the second `BlockStored` of a batch is common when enough batches hold a second one. So the
    sequence stored, removed, stored again comes out in that order. One call of `add_events` is one worker's
    batch.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = 0
        self._seen: Counter[tuple[KVCacheEvent, int]] = Counter()
        self.increment_workers(num_workers)

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Add the batch of one worker."""
        if not isinstance(events, list):
            raise TypeError(f"events: expected a list of events, got {type(events).__name__}")
        earlier: Counter[KVCacheEvent] = Counter()
        for event in events:
            self._seen[event, earlier[event]] += 1
            earlier[event] += 1

    def get_common_events(self) -> list[KVCacheEvent]:
        """Return the events that all workers reported, in the order of their first arrival."""
        return [event for (event, _), count in self._seen.items() if count >= self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """Return every event as often as it was added; equal events of several workers are grouped.

        The order of each worker's events is kept.
        """
        return [event for (event, _), count in self._seen.items() for _ in range(count)]

    def clear_events(self) -> None:
        """Forget all events; the number of workers stays."""
        self._seen.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Expect events of `count` more workers."""
        if count <= 0:
            raise InputError(f"workers: expected at least 1, got {count}")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Expect events of one worker."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """Return how many workers are expected to send events."""
        return self._num_workers

    def __repr__(self) -> str:
        """Show the number of workers and of different events."""
        different = len({event for event, _ in self._seen})
        return f"<KVEventAggregator workers={self._num_workers}, events={different}>"


class KVConnectorKVEvents(ABC):
    """The events of a connector's workers, on their way to the scheduler."""

    @abstractmethod
    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Add the batch of one worker."""

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Keep only the events that all workers report."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """Expect events of `count` more workers."""

    @abstractmethod
    def get_all_events(self) -> list[KVCacheEvent]:
        """Return every event that was added."""

    @abstractmethod
    def get_number_of_workers(self) -> int:
        """Return how many workers are expected to send events."""

    @abstractmethod
    def clear_events(self) -> None:
        """Forget all events."""

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Add the events of one other worker."""
        self.add_events(other.get_all_events())
        return self
