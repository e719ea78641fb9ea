"""KV events as they travel: blocks stored, blocks removed, and the batch that carries them.

Fields, their order and their encoding are those of vLLM 0.32, so that consumers of one read the other: a
batch is an array `[ts, events, data_parallel_rank]`, an event a map whose first entry `type` names its
class; fields at their default are left out. Events are immutable, compare by value and hash over every
field. Any thread may use them.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "ExternalBlockHash",
    "KVCacheEvent",
    "KVEventBatch",
    "Mark",
    "blocks_of",
]

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"

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

    `parent_block_hash` is the block before the first (`None`: there is none). `extra_keys` has one entry
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
