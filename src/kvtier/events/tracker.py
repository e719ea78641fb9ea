"""`OffloadingEventsTracker`: adds the description of each chunk to the tiers' events.

A tier knows a chunk by its key alone. A router of requests needs the chunk's blocks: their hashes, tokens,
parent and extra keys. The tracker records these when a store is planned, while the request can still be
asked, and keeps them, packed, as long as some medium holds the chunk. Then

- a stored chunk is announced with its blocks; consecutive chunks of one change travel in one event;
- a removed chunk is announced with the same hashes;
- blocks that two chunks share (their prompts part inside a chunk) are stored with the first chunk in a
  medium and removed with the last, so that a consumer needs a set and no counts;
- a chunk without a description (of a sliding window or chunked-local attention, or not recorded) is a
  placeholder: its key's hash, no tokens, block size 0;
- the chunk of a state group is announced as the block that ends where the state was taken, under the kind of
  a state. Its parent is the block before, of which there may be no state: as in vLLM's own events, the
  attention groups announce it.

The tracker keeps only chunks that are being stored or are held: a failed store is dropped (`drop`), and a
chunk that no medium holds is forgotten. Hashes leave in the engine's form. Scheduler thread only.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import astuple

from kvtier.errors import IntegrityError
from kvtier.events.types import BlockRemoved, BlockStored, ExternalBlockHash, KVCacheEvent
from kvtier.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx
from kvtier.residency import OffloadingEvent

_FULL_ATTENTION, _STATE = "full_attention", "mamba"
_TOKEN_TYPE = "i"


class Description(NamedTuple):
    """A request's data about consecutive blocks; `extra_keys` has an entry for each block, or is `None`.

    `keyed_by_content` is False if the keys of the request's blocks name something that their KV depends on
    otherwise than by its content, for example an image by a number: another process may give that name to
    another image.
    """

    token_ids: Sequence[int]
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    keyed_by_content: bool = True


Describe = Callable[[Any, int, int, int], Description]
"""Called with a request, the range `[start, stop)` of its tokens and the block size."""


class _Request(Protocol):
    @property
    def block_hashes(self) -> Sequence[bytes]: ...


class ChunkGroup(Protocol):
    """The chunks of one KV cache group: how tokens and hashes are divided into them."""

    @property
    def index(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def blocks_per_chunk(self) -> int: ...
    @property
    def hashes_per_chunk(self) -> int: ...
    @property
    def is_windowed(self) -> bool: ...
    @property
    def is_state(self) -> bool: ...


class _KeptChunk(msgspec.Struct, array_like=True, gc=False):
    """The content of a chunk as a tier keeps it; without a description, its key's hash and block size 0.

    There may be a million, so tokens are packed and the garbage collector does not track them.
    """

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: bytes
    block_size: int
    group: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    is_state: bool = False


class _Chunk(_KeptChunk):
    """A kept chunk with the media that hold it."""

    media: tuple[str, ...] = ()
    """Media that were announced with these hashes."""
    undescribed_in: tuple[str, ...] = ()
    """Media that were announced by the key alone, before the chunk was described."""


class _Cleared(NamedTuple):
    """The chunks that were held before a reset and are not announced as removed yet; their shared blocks."""

    held: dict[OffloadKey, _Chunk]
    shared: dict[tuple[str, int], dict[bytes, int]]


_get_extra_keys = attrgetter("extra_keys")
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_KeptChunk)


class OffloadingEventsTracker:
    """Knows the blocks of every chunk that is being stored or is held."""

    def __init__(self, describe: Describe | None = None) -> None:
        """Describe requests with `describe`; without it nothing is kept, and all events are placeholders."""
        self.enabled = describe is not None
        self._describe = describe
        self._planned: dict[OffloadKey, _Chunk] = {}
        self._held: dict[OffloadKey, _Chunk] = {}
        # By medium and group: how many held chunks contain a block. A chunk's last block is not counted:
        # it is in no other chunk, because its hash is the key.
        self._shared: dict[tuple[str, int], dict[bytes, int]] = {}
        self._cleared: list[_Cleared] = []  # the oldest first

    def __len__(self) -> int:
        """Return how many chunks are described."""
        return len(self._planned) + len(self._held)

    # -- recording ---------------------------------------------------------------------------------

    def record_store(
        self, req: _Request, group_config: ChunkGroup, offload_block_idx: int, offload_key: OffloadKey
    ) -> None:
        """Record the content of the `offload_block_idx`-th chunk of a request, whose store is planned."""
        self.record_stores(req, group_config, {offload_key: offload_block_idx})

    def record_stores(self, req: _Request, group: ChunkGroup, chunks: Mapping[OffloadKey, int]) -> None:
        """Record the content of chunks of a request, by key and position, whose stores are planned."""
        if self._describe is None or group.is_windowed:
            return
        runs: list[tuple[int, list[OffloadKey]]] = []
        for key, position in chunks.items():
            if runs and position == runs[-1][0] + len(runs[-1][1]):
                runs[-1][1].append(key)
            else:
                runs.append((position, [key]))
        for first, keys in runs:
            described = _chunks_of(self._describe, req, group, first, len(keys))
            self._planned.update(zip(keys, described, strict=True))

    def drop(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the chunks among these whose store has failed."""
        for key in keys:
            self._planned.pop(key, None)

    def reset(self) -> None:
        """Forget everything: later chunks are recorded later, or are placeholders.

        For tiers that forget without events. Removals that are not translated yet would lose their blocks.
        """
        self._planned.clear()
        self._held.clear()
        self._shared.clear()
        self._cleared.clear()

    def clear(self) -> None:
        """Treat all chunks as gone from every medium, although the removals are announced only later.

        Call it when all earlier changes are translated. The chunks that are stored from now on are described
        anew, also if their former selves are not announced as removed yet.
        """
        if self._held:
            self._cleared.append(_Cleared(self._held, self._shared))
            self._held, self._shared = {}, {}

    # -- translating -------------------------------------------------------------------------------

    def take_events(self, events: Iterable[OffloadingEvent]) -> list[KVCacheEvent]:
        """Translate the tiers' changes, in order."""
        announced: list[KVCacheEvent] = []
        removed: list[OffloadKey] = []
        for event in events:
            if event.removed:
                announced += self._removed(event)
                removed += event.keys
            else:
                if event.descriptions is not None:
                    self._recall(event.keys, event.descriptions)
                if self._cleared:
                    announced += self._remove_cleared_blocks(event)
                announced += _announce(self._settle(event.keys, event.medium), event.medium)
        if self._held:
            for key in removed:  # only now: a chunk that left one medium may have arrived in another
                if key in self._held and not _media(self._held[key]):
                    del self._held[key]
        return announced

    def retell(self) -> list[KVCacheEvent]:
        """Announce every held chunk again, parents first.

        For listeners that were made to forget too much.
        """
        announced: list[KVCacheEvent] = []
        for medium in sorted({medium for chunk in self._held.values() for medium in _media(chunk)}):
            held = (
                chunk if medium in chunk.media else _undescribed(key)
                for key, chunk in self._held.items()
                if medium in _media(chunk)
            )
            announced += _announce(_without_repeats(_parents_first(held)), medium)
        return announced

    def describe_chunks(self, keys: Sequence[OffloadKey]) -> Callable[[int], bytes]:
        """Return a function that encodes the description of the n-th of these chunks, for a tier to keep.

        Any thread may call the function, at any time. It returns empty bytes if nothing is known now, or
        cannot be encoded.
        """
        chunks = [self._held.get(key) or self._planned.get(key) for key in keys]
        return lambda at: _encode(chunks[at])

    def _recall(self, keys: Sequence[OffloadKey], descriptions: Sequence[bytes]) -> None:
        """Record the descriptions that a tier has kept; skip invalid ones and those of other chunks."""
        for key, description in zip(keys, descriptions, strict=True):
            if self.enabled and description and key not in self._held and key not in self._planned:
                chunk = _decode(description)
                if chunk is not None and _is_of(chunk, key):
                    self._planned[key] = chunk

    def _settle(self, keys: Sequence[OffloadKey], medium: str) -> list[_Chunk]:
        """Keep the descriptions of chunks that `medium` holds now.

        Return the chunks without blocks held there before.
        """
        settled = []
        for key in keys:
            planned, chunk = self._planned.pop(key, None), self._held.get(key)
            if chunk is None or chunk.block_size == 0:  # else another medium relies on the description
                media = () if chunk is None else chunk.media
                chunk = planned or chunk or _undescribed(key)
                if chunk is planned:
                    chunk.undescribed_in = media
            if self.enabled:
                self._held[key] = chunk
                if medium not in chunk.media:
                    chunk.media += (medium,)
                    if len(chunk.hashes) > 1:
                        chunk = _tail(chunk, self._share(chunk, medium))
            settled.append(chunk)
        return settled

    def _share(self, chunk: _Chunk, medium: str) -> int:
        """Count a chunk's blocks. Return how many of its first blocks other chunks of this medium have."""
        counts = self._shared.setdefault((medium, chunk.group), {})
        held = [counts.get(block_hash, 0) for block_hash in chunk.hashes[:-1]]
        for block_hash, count in zip(chunk.hashes, held, strict=False):
            counts[block_hash] = count + 1
        return held.index(0) if 0 in held else len(held)

    @staticmethod
    def _unshare(chunk: _Chunk, counts: dict[bytes, int]) -> Iterator[bytes]:
        """Yield the blocks of a chunk that no other chunk of its medium has; count the others down."""
        for block_hash in chunk.hashes[:-1]:
            if block_hash not in counts:
                continue  # cleared by a reset, and announced as removed before it was stored again
            counts[block_hash] -= 1
            if counts[block_hash] == 0:
                del counts[block_hash]
                yield block_hash
        yield chunk.hashes[-1]

    def _remove_cleared_blocks(self, event: OffloadingEvent) -> Iterator[BlockRemoved]:
        """Announce the removal of blocks that a reset has cleared and that stored chunks bring again.

        The removal of the cleared chunk comes later, and must not take such a block away again.
        """
        by_group: dict[int, list[ExternalBlockHash]] = {}
        for key in event.keys:
            chunk = self._planned.get(key) or self._held.get(key) or _undescribed(key)
            for block_hash in chunk.hashes[:-1]:
                places = (cleared.shared.get((event.medium, chunk.group), {}) for cleared in self._cleared)
                if sum(counts.pop(block_hash, 0) for counts in places):
                    by_group.setdefault(chunk.group, []).append(block_hash)
        for group, hashes in by_group.items():
            yield BlockRemoved(hashes, event.medium, group_idx=group)

    def _removed(self, event: OffloadingEvent) -> Iterator[BlockRemoved]:
        by_group: dict[int, list[ExternalBlockHash]] = {}
        for key in event.keys:
            hashes = by_group.setdefault(get_offload_group_idx(key), [])
            held, shared = self._find(key, event.medium) if self._cleared else (self._held, self._shared)
            chunk = held.get(key)
            if chunk is None or event.medium not in chunk.media:
                hashes.append(get_offload_block_hash(key))
                if chunk is not None:
                    chunk.undescribed_in = _without(chunk.undescribed_in, event.medium)
            else:
                hashes += self._unshare(chunk, shared.get((event.medium, chunk.group), {}))
                chunk.media = _without(chunk.media, event.medium)
            if held is not self._held and chunk is not None and not _media(chunk):
                del held[key]
        self._cleared = [cleared for cleared in self._cleared if cleared.held]
        for group, hashes in by_group.items():
            yield BlockRemoved(hashes, event.medium, group_idx=group)

    def _find(self, key: OffloadKey, medium: str) -> _Cleared:
        """Return the chunks among which a medium holds a chunk: the oldest, since removals are in order."""
        for cleared in self._cleared:
            if (chunk := cleared.held.get(key)) is not None and medium in _media(chunk):
                return cleared
        return _Cleared(self._held, self._shared)

    def check(self) -> None:
        """Raise `IntegrityError` if a chunk is kept that no medium holds, or under a wrong key."""
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


def _chunks_of(describe: Describe, req: _Request, group: ChunkGroup, first: int, count: int) -> list[_Chunk]:
    """Describe `count` chunks of a request, from its `first`-th on."""
    per_chunk, num_blocks = group.hashes_per_chunk, group.blocks_per_chunk
    size, per_block = group.block_size * num_blocks, per_chunk // num_blocks
    description = describe(req, first * size, (first + count) * size, group.block_size)
    tokens = array(_TOKEN_TYPE, description.token_ids)
    hashes, extra = req.block_hashes, description.extra_keys or ()
    chunks = []
    for at in range(count):
        start = (first + at) * per_chunk
        own = tuple(extra[at * num_blocks : (at + 1) * num_blocks])
        chunk = _Chunk(
            # The last of a block's hashes names it.
            hashes=tuple(hashes[start + per_block - 1 : start + per_chunk : per_block]),
            parent=hashes[start - 1] if start else None,
            tokens=tokens[at * size : (at + 1) * size].tobytes(),
            block_size=group.block_size,
            group=group.index,
            lora_id=description.lora_id,
            lora_name=description.lora_name,
            extra_keys=own if any(own) else None,
            is_state=group.is_state,
        )
        # Between the blocks of a chunk there is no state.
        chunks.append(_tail(chunk, num_blocks - 1) if group.is_state else chunk)
    return chunks


def _encode(chunk: _Chunk | None) -> bytes:
    """Return the bytes of a chunk for a tier; empty if it cannot be encoded."""
    if chunk is None or chunk.block_size == 0:
        return b""
    try:
        return _ENCODER.encode(_KeptChunk(*astuple(chunk)[: len(_KeptChunk.__struct_fields__)]))
    except (TypeError, ValueError, OverflowError):  # extra keys may be of any type
        return b""


def _decode(description: bytes) -> _Chunk | None:
    """Return the chunk that a tier has kept; `None` if the bytes are invalid."""
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
    """Return whether a description belongs to the chunk of a key."""
    return chunk.hashes[-1] == get_offload_block_hash(key) and chunk.group == get_offload_group_idx(key)


def _undescribed(key: OffloadKey) -> _Chunk:
    """Return a chunk with only its key known."""
    return _Chunk((get_offload_block_hash(key),), None, b"", 0, get_offload_group_idx(key))


def _media(chunk: _Chunk) -> tuple[str, ...]:
    """Return all media that hold a chunk, announced with or without its description."""
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
    """Leave out the first blocks of a chunk that earlier chunks have."""
    met: set[tuple[int, bytes]] = set()
    for chunk in chunks:
        blocks = [(chunk.group, block_hash) for block_hash in chunk.hashes]
        yield _tail(chunk, next(at for at, block in enumerate(blocks) if block not in met))
        met.update(blocks)


def _announce(chunks: Iterable[_Chunk], medium: str) -> Iterator[BlockStored]:
    """Announce chunks as stored; consecutive chunks share an event."""
    run: list[_Chunk] = []
    for chunk in chunks:
        if run:
            last = run[-1]
            follows = chunk.parent == last.hashes[-1] and chunk.group == last.group
            if not follows or chunk.block_size != last.block_size:
                yield _stored(run, medium)
                run = []
        run.append(chunk)
    if run:
        yield _stored(run, medium)


def _stored(run: list[_Chunk], medium: str) -> BlockStored:
    """Return one event for consecutive chunks."""
    first, tokens = run[0], array(_TOKEN_TYPE)
    for chunk in run:
        tokens.frombytes(chunk.tokens)
    extra = None
    if any(map(_get_extra_keys, run)):
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
        kv_cache_spec_kind=(_STATE if first.is_state else _FULL_ATTENTION) if first.block_size else None,
    )
