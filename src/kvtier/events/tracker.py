"""`OffloadingEventsTracker`: makes what the tiers announce describe itself.

A tier knows a chunk by its key alone. Who routes requests needs its blocks: their hashes, tokens, parent and
extra keys. The tracker notes these when a store is planned, while the request is there to be asked, and
keeps them, packed, as long as some medium holds the chunk. Then

- a stored chunk is announced with its blocks; consecutive chunks of one change travel in one event;
- a removed chunk is announced with the same hashes;
- blocks that two chunks have in common (their prompts part inside a chunk) are stored with the first in a
  medium and removed with the last, so that a consumer needs a set and no counts;
- a chunk that is not described (of a sliding window, or not recorded) is a placeholder: its key's hash, no
  tokens, block size 0.

What is kept is bounded by what is being stored or is held: a store that came to nothing is dropped (`drop`),
and what no medium holds is forgotten. Hashes leave as the engine has them. Scheduler thread only.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import astuple

from kvtier.errors import IntegrityError
from kvtier.events.types import BlockRemoved, BlockStored, ExternalBlockHash, KVCacheEvent
from kvtier.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx

__all__ = ["ChunkGroup", "Describe", "Description", "OffloadingEventsTracker", "TierEvent"]

_FULL_ATTENTION = "full_attention"
_TOKEN_TYPE = "i"


class Description(NamedTuple):
    """What a request says of consecutive blocks; `extra_keys` has an entry for each, or is `None`."""

    token_ids: Sequence[int]
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None


Describe = Callable[[Any, int, int, int], Description]
"""Called with a request, the range `[start, stop)` of its tokens and the block size."""


class _Request(Protocol):
    @property
    def block_hashes(self) -> Sequence[bytes]: ...


class ChunkGroup(Protocol):
    """The chunks of one KV cache group: how tokens and hashes fall into them."""

    @property
    def index(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def blocks_per_chunk(self) -> int: ...
    @property
    def hashes_per_chunk(self) -> int: ...
    @property
    def window(self) -> int | None: ...


class TierEvent(Protocol):
    """What a tier announces: chunks that a medium holds from now on or, `removed`, no more."""

    @property
    def keys(self) -> Sequence[OffloadKey]: ...
    @property
    def medium(self) -> str: ...
    @property
    def removed(self) -> bool: ...
    @property
    def descriptions(self) -> tuple[bytes, ...] | None:
        """What `describe_chunks` told of each, if it is a tier's word and not a store's: after a restart."""
        ...


class _KeptChunk(msgspec.Struct, array_like=True, gc=False):
    """What a chunk holds, as a tier keeps it; undescribed, its key's hash and a block size of 0.

    There may be a million, so tokens are packed and the garbage collector need not look.
    """

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: bytes
    block_size: int
    group: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None


class _Chunk(_KeptChunk):
    """The same with the media that hold the chunk."""

    media: tuple[str, ...] = ()
    """Those that were announced so with these hashes."""
    undescribed_in: tuple[str, ...] = ()
    """Those that were announced so by its key alone, before it was described."""


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_KeptChunk)


class OffloadingEventsTracker:
    """Knows the blocks of every chunk that is being stored or is held."""

    def __init__(self, describe: Describe | None = None) -> None:
        """Ask requests through `describe`; without it nothing is kept, and all events are placeholders."""
        self.enabled = describe is not None
        self._describe = describe
        self._planned: dict[OffloadKey, _Chunk] = {}
        self._held: dict[OffloadKey, _Chunk] = {}
        # By medium and group: how many held chunks have a block. The last block is in no other chunk: it is
        # the key.
        self._shared: dict[tuple[str, int], dict[bytes, int]] = {}

    def __len__(self) -> int:
        """Return how many chunks are described."""
        return len(self._planned) + len(self._held)

    # -- noting ------------------------------------------------------------------------------------

    def record_store(
        self, req: _Request, group_config: ChunkGroup, offload_block_idx: int, offload_key: OffloadKey
    ) -> None:
        """Note what a request's `offload_block_idx`-th chunk in its group holds: its store is planned."""
        if self._describe is not None and group_config.window is None:
            self._planned[offload_key] = _chunk_of(self._describe, req, group_config, offload_block_idx)

    def drop(self, keys: Iterable[OffloadKey]) -> None:
        """Forget those of these chunks whose store is over and came to nothing."""
        for key in keys:
            self._planned.pop(key, None)

    def reset(self) -> None:
        """Forget everything: what tiers announce from here on was recorded later, or is a placeholder.

        For tiers that forget without a word. Removals that are still to be translated would lose their
        blocks.
        """
        self._planned.clear()
        self._held.clear()
        self._shared.clear()

    # -- translating -------------------------------------------------------------------------------

    def take_events(self, events: Iterable[TierEvent]) -> list[KVCacheEvent]:
        """Translate what the tiers announce, in order."""
        told: list[KVCacheEvent] = []
        removed: list[OffloadKey] = []
        for event in events:
            if event.removed:
                told += self._removed(event)
                removed += event.keys
            else:
                if event.descriptions is not None:
                    self._recall(event.keys, event.descriptions)
                told += _announce((self._settle(key, event.medium) for key in event.keys), event.medium)
        if self._held:
            for key in removed:  # only now: a chunk that left one medium may have come to another since
                if key in self._held and not _media(self._held[key]):
                    del self._held[key]
        return told

    def retell(self) -> list[KVCacheEvent]:
        """Announce afresh every chunk that is held, parents first.

        For when listeners were told to forget too much.
        """
        told: list[KVCacheEvent] = []
        for medium in sorted({medium for chunk in self._held.values() for medium in _media(chunk)}):
            held = (
                chunk if medium in chunk.media else _undescribed(key)
                for key, chunk in self._held.items()
                if medium in _media(chunk)
            )
            told += _announce(_without_repeats(_parents_first(held)), medium)
        return told

    def describe_chunks(self, keys: Sequence[OffloadKey]) -> Callable[[int], bytes]:
        """Return what makes bytes of what is known of the n-th of these chunks, for a tier to keep.

        Any thread may call that, at any time. It returns none if nothing is known now, or cannot be written.
        """
        chunks = [self._held.get(key) or self._planned.get(key) for key in keys]
        return lambda at: _encode(chunks[at])

    def _recall(self, keys: Sequence[OffloadKey], descriptions: Sequence[bytes]) -> None:
        """Note what a tier has kept of chunks, unless it makes no sense or is of another chunk."""
        for key, description in zip(keys, descriptions, strict=True):
            if self.enabled and description and key not in self._held and key not in self._planned:
                chunk = _decode(description)
                if chunk is not None and _is_of(chunk, key):
                    self._planned[key] = chunk

    def _settle(self, key: OffloadKey, medium: str) -> _Chunk:
        """Keep what is known of a chunk that `medium` holds now.

        Return it, without blocks that were there before.
        """
        planned, chunk = self._planned.pop(key, None), self._held.get(key)
        if chunk is None or chunk.block_size == 0:  # a description that another medium relies on stays
            media = () if chunk is None else chunk.media
            chunk = planned or chunk or _undescribed(key)
            if chunk is planned:
                chunk.undescribed_in = media
        if self.enabled:
            self._held[key] = chunk
            if medium not in chunk.media:
                chunk.media += (medium,)
                return _tail(chunk, self._share(chunk, medium))
        return chunk

    def _share(self, chunk: _Chunk, medium: str) -> int:
        """Count a chunk's blocks. Return how many of its first ones other chunks of this medium have."""
        counts = self._shared.setdefault((medium, chunk.group), {})
        held = [counts.get(block_hash, 0) for block_hash in chunk.hashes[:-1]]
        counts.update((block_hash, count + 1) for block_hash, count in zip(chunk.hashes, held, strict=False))
        return held.index(0) if 0 in held else len(held)

    def _unshare(self, chunk: _Chunk, medium: str) -> Iterator[bytes]:
        """Yield the blocks of a chunk that no other chunk of this medium has, and count the others down."""
        counts = self._shared[medium, chunk.group]
        for block_hash in chunk.hashes[:-1]:
            counts[block_hash] -= 1
            if counts[block_hash] == 0:
                del counts[block_hash]
                yield block_hash
        yield chunk.hashes[-1]

    def _removed(self, event: TierEvent) -> Iterator[BlockRemoved]:
        by_group: dict[int, list[ExternalBlockHash]] = {}
        for key in event.keys:
            hashes = by_group.setdefault(get_offload_group_idx(key), [])
            chunk = self._held.get(key) if self._held else None
            if chunk is None or event.medium not in chunk.media:
                hashes.append(get_offload_block_hash(key))
                if chunk is not None:
                    chunk.undescribed_in = _without(chunk.undescribed_in, event.medium)
            else:
                hashes += self._unshare(chunk, event.medium)
                chunk.media = _without(chunk.media, event.medium)
        for group, hashes in by_group.items():
            yield BlockRemoved(hashes, event.medium, group_idx=group)

    def check(self) -> None:
        """Raise `IntegrityError` if something is kept that no medium holds, or under another's key."""
        if not self.enabled and len(self):
            raise IntegrityError(f"events tracker: it is off and yet keeps {len(self)} chunks")
        for key, chunk in (*self._planned.items(), *self._held.items()):
            if not _is_of(chunk, key):
                raise IntegrityError(f"events tracker: chunk {key.hex()} is described as another one")
        for key, chunk in self._held.items():
            if not _media(chunk):
                raise IntegrityError(f"events tracker: chunk {key.hex()} is kept and no medium holds it")
        blocks = Counter(
            (medium, chunk.group, block_hash)
            for chunk in self._held.values()
            for medium in chunk.media
            for block_hash in chunk.hashes[:-1]
        )
        if blocks != {
            (*place, name): count for place, counts in self._shared.items() for name, count in counts.items()
        }:
            raise IntegrityError("events tracker: the blocks of the chunks that are held are miscounted")


def _chunk_of(describe: Describe, req: _Request, group: ChunkGroup, index: int) -> _Chunk:
    """Describe a request's `index`-th chunk."""
    per_chunk, size = group.hashes_per_chunk, group.block_size * group.blocks_per_chunk
    per_block = per_chunk // group.blocks_per_chunk  # a block is named by the last of its hashes
    first, hashes = index * per_chunk, req.block_hashes
    told = describe(req, index * size, (index + 1) * size, group.block_size)
    extra = told.extra_keys
    return _Chunk(
        hashes=tuple(hashes[first + per_block - 1 : first + per_chunk : per_block]),
        parent=hashes[first - 1] if first else None,
        tokens=array(_TOKEN_TYPE, told.token_ids).tobytes(),
        block_size=group.block_size,
        group=group.index,
        lora_id=told.lora_id,
        lora_name=told.lora_name,
        extra_keys=tuple(extra) if extra is not None and any(extra) else None,
    )


def _encode(chunk: _Chunk | None) -> bytes:
    """Return a chunk as a tier keeps it; nothing if that cannot be."""
    if chunk is None or chunk.block_size == 0:
        return b""
    try:
        return _ENCODER.encode(_KeptChunk(*astuple(chunk)[: len(_KeptChunk.__struct_fields__)]))
    except (TypeError, ValueError, OverflowError):  # extra keys are an engine's own
        return b""


def _decode(description: bytes) -> _Chunk | None:
    """Return the chunk that a tier has kept; `None` if it makes no sense."""
    try:
        kept = _DECODER.decode(description)
    except msgspec.MsgspecError:
        return None
    num_tokens = len(kept.tokens) // array(_TOKEN_TYPE).itemsize
    is_whole = kept.hashes and kept.block_size > 0 and num_tokens == kept.block_size * len(kept.hashes)
    if not is_whole or (kept.extra_keys is not None and len(kept.extra_keys) != len(kept.hashes)):
        return None
    return _Chunk(*msgspec.structs.astuple(kept))


def _is_of(chunk: _Chunk, key: OffloadKey) -> bool:
    """Say whether a description is of the chunk that a key names."""
    return chunk.hashes[-1] == get_offload_block_hash(key) and chunk.group == get_offload_group_idx(key)


def _undescribed(key: OffloadKey) -> _Chunk:
    """Return a chunk of which nothing but the key is known."""
    return _Chunk((get_offload_block_hash(key),), None, b"", 0, get_offload_group_idx(key))


def _media(chunk: _Chunk) -> tuple[str, ...]:
    """Return all media that hold a chunk and were announced so."""
    return chunk.media + chunk.undescribed_in


def _without(media: tuple[str, ...], gone: str) -> tuple[str, ...]:
    return tuple(medium for medium in media if medium != gone)


def _parents_first(chunks: Iterable[_Chunk]) -> Iterator[_Chunk]:
    left = {(chunk.group, chunk.hashes[-1]): chunk for chunk in chunks}
    while left:
        line = [left.pop(next(iter(left)))]
        while (parent := left.pop((line[-1].group, line[-1].parent or b""), None)) is not None:
            line.append(parent)
        yield from reversed(line)


def _tail(chunk: _Chunk, start: int) -> _Chunk:
    """Return a chunk without its first blocks."""
    if not start:
        return chunk
    extra, per_block = chunk.extra_keys, len(chunk.tokens) // len(chunk.hashes)
    return msgspec.structs.replace(
        chunk,
        hashes=chunk.hashes[start:],
        parent=chunk.hashes[start - 1],
        tokens=chunk.tokens[start * per_block :],
        extra_keys=None if extra is None or not any(extra[start:]) else extra[start:],
    )


def _without_repeats(chunks: Iterable[_Chunk]) -> Iterator[_Chunk]:
    """Leave out the first blocks that chunks before have."""
    told: set[tuple[int, bytes]] = set()
    for chunk in chunks:
        blocks = [(chunk.group, block_hash) for block_hash in chunk.hashes]
        yield _tail(chunk, next(at for at, block in enumerate(blocks) if block not in told))
        told.update(blocks)


def _announce(chunks: Iterable[_Chunk], medium: str) -> Iterator[BlockStored]:
    """Announce chunks as stored, those that follow one another together."""
    run: list[_Chunk] = []
    for chunk in chunks:
        if run and not _follows(chunk, run[-1]):
            yield _stored(run, medium)
            run = []
        run.append(chunk)
    if run:
        yield _stored(run, medium)


def _follows(chunk: _Chunk, other: _Chunk) -> bool:
    same_kind = (chunk.group, chunk.block_size) == (other.group, other.block_size)
    return chunk.parent == other.hashes[-1] and same_kind


def _stored(run: list[_Chunk], medium: str) -> BlockStored:
    """Announce chunks, each of which follows the one before."""
    first, tokens = run[0], array(_TOKEN_TYPE)
    for chunk in run:
        tokens.frombytes(chunk.tokens)
    extra = None
    if any(chunk.extra_keys is not None for chunk in run):
        extra = [keys for chunk in run for keys in chunk.extra_keys or (None,) * len(chunk.hashes)]
    return BlockStored(
        block_hashes=[block_hash for chunk in run for block_hash in chunk.hashes],
        parent_block_hash=first.parent,
        token_ids=tokens.tolist(),
        block_size=first.block_size,
        lora_id=first.lora_id,
        medium=medium,
        lora_name=first.lora_name,
        extra_keys=extra,
        group_idx=first.group,
        kv_cache_spec_kind=_FULL_ATTENTION if first.block_size else None,
    )
