"""The bytes of the event stream: encoding, decoding, frames, and the digest that both ends compare.

A batch is the msgpack array `[ts, events, data_parallel_rank]`. An event travels as a map (vLLM 0.24 and
later) or as an array with the fields of a chosen earlier version. Encoding gives vLLM's bytes exactly.
Decoding is per event: an unreadable event is counted and skipped, the rest of the batch is used; unknown
fields are ignored.

A mark travels in an event that is harmless to every consumer: a `BlockRemoved` of no blocks of the CPU
(Dynamo logs an empty one of the GPU), with one more field, `kvtier`. The digest of a set of blocks is a sum
modulo 2^64: for each block, the hash's low 64 bits times an odd weight of its place (medium, group,
ownership, locality). Hashes are uniform already, so a plain sum distinguishes sets as well as any mix,
needs no memory of the set, and can undo a removal.

A live message has the frames `[topic, seq, payload]`; some publishers leave the topic out. A reply to a
request is `["", topic, seq, payload]`, or the same without the topic (vLLM up to 0.25, SGLang up to 0.5.21);
the last has sequence number -1, and a text if the request failed. Any other message is `None` here, never an
exception. Any thread may call any function here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

from kvtier.errors import show_value
from kvtier.events.types import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalBlockHash,
    KVCacheEvent,
    Mark,
)
from kvtier.events.wire_structs import EACH, OUTER, WHOLE, Encoding, Event, encoding_of

MARK_KEY, SALT_KEY = "kvtier", "cache_salt"
"""The fields of marks and of SGLang's salts, which are not fields of an event."""
U64 = (1 << 64) - 1
_MARK_BYTES, _SALT_BYTES = msgspec.msgpack.encode(MARK_KEY), msgspec.msgpack.encode(SALT_KEY)
_SHORT_HEAD = struct.Struct(">BBdB").pack
_MIDDLE_HEAD = struct.Struct(">BBdBH").pack
_LONG_HEAD = struct.Struct(">BBdBI").pack

# The number of fields of an event, by the vLLM version that introduced it.
_STORED_FIELD_COUNTS = (
    ("0.8", 5),
    ("0.10.2", 6),
    ("0.14", 7),
    ("0.17", 8),
    ("0.20", 9),
    ("0.22", 11),
    ("0.26", 12),
    ("0.32", 14),
)
_REMOVED_FIELD_COUNTS = (("0.8", 1), ("0.10.2", 2), ("0.20", 3), ("0.26", 4), ("0.32", 5))


# -- the change that a batch makes -----------------------------------------------------------------

Place = tuple[str, int, str, str]
"""The place of a block: medium, group, ownership, locality; absent fields have their default."""


class Change(NamedTuple):
    """The effect of a batch on the set of held blocks: clears it or not, changes its size and digest."""

    cleared: bool
    blocks: int
    digest: int


_SIGN: dict[type[KVCacheEvent], int] = {BlockStored: 1, BlockRemoved: -1}
_PLACE_FIELDS = ("medium", "group_idx", "ownership", "locality")


def place_of(event: BlockStored | BlockRemoved) -> Place:
    """Return the place of the event's blocks."""
    return event.medium or MEDIUM_GPU, event.group_idx or 0, event.ownership or "", event.locality or ""


@lru_cache(maxsize=4096)
def place_weight(place: Place) -> int:
    """Return the odd weight of a place's hashes in the digest."""
    return xxhash.xxh3_64_intdigest("\0".join(map(str, place)).encode()) | 1


def to_u64(block_hash: ExternalBlockHash) -> int:
    """Return the hash's low 64 bits; all forms of one hash give the same number."""
    return int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash & U64


def hash_sum(hashes: Sequence[ExternalBlockHash]) -> int:
    """Return the sum of the hashes' low 64 bits, not reduced: right modulo 2^64, also for negative forms.

    Raise `TypeError` if a value is not a hash.
    """
    try:
        total: Any = sum(hashes)
    except TypeError:
        return sum(map(to_u64, hashes))
    if type(total) is not int:
        raise TypeError(f"a block hash is an int or bytes, got {hashes!r}")
    return total


def change_of(events: Iterable[KVCacheEvent]) -> Change:
    """Return the joint effect of events; each stored block counts as new and each removed block as held."""
    cleared, blocks = False, 0
    sums: dict[Place, int] = {}
    for event in events:
        sign = _SIGN.get(type(event))
        if sign is not None:
            hashes, place = event.block_hashes, place_of(event)  # type: ignore[attr-defined, arg-type]
            blocks += sign * len(hashes)
            sums[place] = sums.get(place, 0) + sign * hash_sum(hashes)
        elif isinstance(event, AllBlocksCleared):
            cleared, blocks = True, 0
            sums.clear()
    digest = sum(total * place_weight(place) for place, total in sums.items())
    return Change(cleared, blocks, digest & U64)


# -- out -------------------------------------------------------------------------------------------


def array_fields(version: str) -> tuple[int, int]:
    """Return how many fields stores and removals have in a vLLM version, without the tag."""
    wanted = _version(version)
    if wanted < _version(_STORED_FIELD_COUNTS[0][0]):
        raise ValueError(f"vLLM {version} has no KV events: expected {_STORED_FIELD_COUNTS[0][0]} or later")
    counts = [
        [n for since, n in table if _version(since) <= wanted][-1]
        for table in (_STORED_FIELD_COUNTS, _REMOVED_FIELD_COUNTS)
    ]
    return counts[0], counts[1]


def _version(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split("."))
    except ValueError:
        raise ValueError(
            f"not a vLLM version: {show_value(text)} (expected numbers and dots, like 0.23 or 0.10.2)"
        ) from None


class EventEncoder:
    """Turns events and marks into bytes, in one encoding. Not for several threads at once."""

    def __init__(self, encoding: Encoding | str = Encoding.MAP, version: str = "0.32") -> None:
        """Encode as `encoding`; arrays have the field counts of vLLM `version`."""
        self.encoding = Encoding(encoding)
        self._fields = dict(zip(("BlockStored", "BlockRemoved"), array_fields(version), strict=True))
        named = BlockStored.__struct_fields__[: self._fields["BlockStored"]]
        removed = BlockRemoved.__struct_fields__[: self._fields["BlockRemoved"]]
        # Place fields that not both kinds of events can express: consumers never learn of them.
        self._unsaid = [name for name in _PLACE_FIELDS if name not in named or name not in removed]
        self._encode = msgspec.msgpack.Encoder().encode

    def reduced(self, event: KVCacheEvent) -> KVCacheEvent:
        """Return an event without the place fields that this encoding cannot express for both kinds."""
        if self.encoding is Encoding.MAP or not any(
            getattr(event, name, None) is not None for name in self._unsaid
        ):
            return event
        kept = {name: None for name in self._unsaid if name in event.__struct_fields__}
        return msgspec.structs.replace(event, **kept)

    def event(self, event: KVCacheEvent) -> bytes:
        """Return one event's bytes.

        An event that cannot be encoded raises `TypeError`, `ValueError` or `OverflowError`.
        """
        if self.encoding is Encoding.MAP:
            return self._encode(event)
        kind = type(event).__name__  # not the class: an engine's own event classes are accepted, too
        return self._encode((kind, *msgspec.structs.astuple(event)[: self._fields.get(kind)]))

    def mark(self, mark: Mark) -> bytes:
        """Return the bytes of the event that carries a mark."""
        if self.encoding is Encoding.MAP:
            return self._encode(
                {"type": "BlockRemoved", "block_hashes": [], "medium": MEDIUM_CPU, MARK_KEY: mark}
            )
        return self._encode(("BlockRemoved", [], MEDIUM_CPU, None, None, None, {MARK_KEY: mark}))


def frame_batch(ts: float, events: Sequence[bytes], rank: int | None) -> bytes:
    """Return the batch of some encoded events."""
    head, tail = batch_ends(ts, len(events), rank)
    return b"".join((head, *events, tail))


def batch_ends(ts: float, count: int, rank: int | None) -> tuple[bytes, bytes]:
    """Return the bytes of a batch before and after `count` encoded events."""
    if count < 16:
        head = _SHORT_HEAD(0x93, 0xCB, ts, 0x90 | count)
    elif count < 1 << 16:
        head = _MIDDLE_HEAD(0x93, 0xCB, ts, 0xDC, count)
    else:
        head = _LONG_HEAD(0x93, 0xCB, ts, 0xDD, count)
    return head, _rank_bytes(rank)


@lru_cache(maxsize=1024, typed=True)
def _rank_bytes(rank: int | None) -> bytes:
    return msgspec.msgpack.encode(rank)


# -- in --------------------------------------------------------------------------------------------


class Batch(Protocol):
    """The part of a batch that a follower needs, however the batch was decoded."""

    mark: Mark | None

    @property
    def ts(self) -> float:
        """Return when the batch was made, in Unix seconds."""

    @property
    def data_parallel_rank(self) -> int | None:
        """Return the rank of the batch, if it has one."""

    @property
    def skipped(self) -> int:
        """Return how many of its events were unreadable."""

    def change(self) -> Change:
        """Return the batch's effect on the set of held blocks."""


class DecodedBatch(msgspec.Struct, gc=False):
    """A received batch: its readable events, and the number of unreadable ones."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    mark: Mark | None = None
    skipped: int = 0

    def change(self) -> Change:
        """Return the batch's effect on the set of held blocks."""
        return change_of(self.events)


def decode_batch(payload: bytes, tokens: bool = True) -> DecodedBatch:
    """Read a batch in either encoding.

    Without `tokens` every `token_ids` is empty: long events are read twice as fast. Raises `ValueError` if
    the payload is not a batch at all.
    """
    if _MARK_BYTES not in payload and _SALT_BYTES not in payload:  # the fast path would ignore both
        for reader in WHOLE[tokens]:
            try:
                batch = reader.batch(payload)
            except (ValueError, RecursionError):
                continue
            return DecodedBatch(batch.ts, batch.events, batch.data_parallel_rank)
    return _decode_each(payload, tokens)


def _decode_each(payload: bytes, tokens: bool) -> DecodedBatch:
    """Read a batch event by event, so that an unreadable event costs only itself."""
    try:
        outer = OUTER.decode(payload)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not an event batch: {error} (in {len(payload)} bytes)") from None
    batch = DecodedBatch(outer.ts, [], outer.data_parallel_rank)
    for raw in map(bytes, outer.events):
        event = decode_event(raw, tokens)
        mark = _decode_mark(raw) if _MARK_BYTES in raw and _is_empty_removal(event) else None
        if mark is not None:
            batch.mark = mark
        elif event is not None:
            batch.events.append(event)
        else:
            batch.skipped += 1
    return batch


def decode_event(raw: bytes, tokens: bool = True) -> Event | None:
    """Read one event, or at least its blocks and place; `None` if even that fails."""
    for reader in EACH[encoding_of(raw), tokens]:
        try:
            event = reader.event(raw)
        except (ValueError, RecursionError):
            continue
        return _salted(event, raw) if _SALT_BYTES in raw and isinstance(event, BlockStored) else event
    return None


def _salted(event: BlockStored, raw: bytes) -> BlockStored:
    """Move the salt of an SGLang event to its place in vLLM: the extra keys of a chain's first block."""
    salt = _read_further(raw, SALT_KEY)
    if not isinstance(salt, str) or not salt:
        return event
    if event.extra_keys is not None or event.parent_block_hash is not None:
        return event
    first = (event.lora_name, salt) if event.lora_name else (salt,)
    return msgspec.structs.replace(event, extra_keys=[first, *[None] * (len(event.block_hashes) - 1)])


def _is_empty_removal(event: Event | None) -> bool:
    return isinstance(event, BlockRemoved) and not event.block_hashes


def _decode_mark(raw: bytes) -> Mark | None:
    """Return the mark that an event carries; `None` if it carries none."""
    try:
        return msgspec.convert(_read_further(raw, MARK_KEY), Mark)
    except ValueError:
        return None


def _read_further(raw: bytes, name: str) -> Any:
    """Return a field that events do not have: an entry of a map, or of a map among an array's fields."""
    try:
        fields = msgspec.msgpack.decode(raw)
    except (TypeError, ValueError, RecursionError):
        return None
    maps = [fields] if isinstance(fields, dict) else [one for one in fields if isinstance(one, dict)]
    return next((one[name] for one in maps if name in one), None)


# -- frames ----------------------------------------------------------------------------------------

END_SEQ = (1 << 64) - 1
"""-1 as an unsigned number: ends a replay; sent live, it announces a restart."""
SNAPSHOT = b"snapshot"
STATUS = b"kvtier:status"


class NumberedPayload(NamedTuple):
    """A batch's number and bytes; in an end marker, `payload` is empty or the text of an error."""

    seq: int
    payload: bytes


def read_live(frames: Sequence[bytes]) -> NumberedPayload | None:
    """Return the batch in a live message."""
    if len(frames) not in (2, 3) or len(frames[-2]) != 8:
        return None
    return NumberedPayload(int.from_bytes(frames[-2], "big"), frames[-1])


def read_reply(frames: Sequence[bytes]) -> NumberedPayload | None:
    """Return the batch, or the end marker, in a reply to a request."""
    if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != 8:
        return None
    seq = int.from_bytes(frames[-2], "big")
    if seq == END_SEQ and len(frames) == 4 and not frames[-1]:
        return NumberedPayload(seq, frames[1] if frames[1].startswith(b"error") else b"")
    return NumberedPayload(seq, frames[-1])


def reply_topic(frames: Sequence[bytes], absent: bytes = b"") -> bytes:
    """Return the topic of a reply; `absent` if the publisher sends none."""
    return frames[1] if len(frames) == 4 else absent


def replay_request(start: int) -> bytes:
    """Return the request for all batches from `start` on."""
    return start.to_bytes(8, "big")
