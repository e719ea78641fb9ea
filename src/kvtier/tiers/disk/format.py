"""The formats of a disk tier's files: header, records and descriptions. Pure functions; any thread.

The header is two pages of 4,096 bytes in front of the records, written in turn:

    magic `kvtdisk1` | XXH3-64 of the rest, u64 | length u32 | JSON, `length` bytes

The whole page with the higher sequence counts, so an interrupted write loses only itself. A new epoch is
written to both pages, so that no older page brings an older epoch back. A page whose numbers cannot be those
of any place is not whole.

Records are the books of the tier, 128 bytes per slot, each with its own checksum:

    0 checksum u64 | 8 scope u64 | 16 length u64 | 24 slot u32 | 28 key length u8, 3 of zero | 32 key, 64
    | 96 seal, 16 | 112 zero, 8 | 120 tick i64

A record is overwritten together with its slot and lies within one sector. A scope of 0 marks an empty slot.
The tick (last use of the slot) is outside the checksum: it is rewritten alone, and a wrong tick costs only
the order, not the bytes. The checksum mixes 64-bit words so that numpy can check a million records in a
tenth of a second.

Descriptions are the event data of each chunk (parent, hashes, tokens, extra keys), kept for a restart. There
is one entry per slot, all of one length:

    XXH3-64 of the payload, seeded by the key, u64 | length u32 | 4 of zero | payload

The payload is opaque here: the caller that demotes a row defines it. A description that is too long is not
kept, and the chunk is announced without one; so is a chunk whose description belongs to another key or was
damaged.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.config import ROW_ALIGNMENT
from kvtier.errors import OutsideError
from kvtier.keys import OffloadKey

VERSION = 1
"""The version of header, records, descriptions and slots together. Another version has another folder."""
PAGE_BYTES = 4096
HEADER_BYTES = 2 * PAGE_BYTES

_MAGIC = b"kvtdisk1"
_BODY_AT = 20
_MOST_SLOTS = 1 << 32
"""A record has 32 bits for the number of its slot."""
_MOST_BYTES = 1 << 62

RECORD_BYTES = 128
MOST_KEY_BYTES = 64
EMPTY = bytes(RECORD_BYTES)
TICK = struct.Struct("<q")

_BODY = struct.Struct("<QQIB3x64s16s8x")
_WORDS = struct.Struct("<14Q")
_FACTOR = 0x9E3779B97F4A7C15
_SHIFT = 29
_MASK = (1 << 64) - 1
_KEY_AT = 32
_SLICE = 8192
"""Records checked at once: their words fit into a core's cache."""

_NUM_WORDS = RECORD_BYTES // 8
_COLUMNS = [1, 2, 3, 4, 12, 13, 15]
"""The words of a record that `read_records` needs. The names below are positions in this list."""
_SCOPE, _LENGTH, _NAMED, _KEY_START, _SEAL, _TICK = 0, 1, 2, 3, 4, 6

_START = 16
_ALIGNMENT = 64


# -- the header ----------------------------------------------------------------------


class DiskHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about all slots.

    `written`: the count of the write limit, an hour and the bytes of 24 hours.
    """

    namespace: str
    row_bytes: int
    stride: int
    slots: int
    description_bytes: int
    epoch: int = 0
    sequence: int = 0
    version: int = VERSION
    prices: dict[str, float] = {}
    written: list[int] = []


def pack_header(header: DiskHeader) -> bytes:
    """Return a page. `OutsideError` if the header is longer than a page."""
    body = msgspec.json.encode(header)
    if len(body) > PAGE_BYTES - _BODY_AT:
        raise OutsideError(
            f"disk tier: expected a header of one page, got {len(body)} bytes of prices and names"
        )
    rest = len(body).to_bytes(4, "little") + body.ljust(PAGE_BYTES - _BODY_AT, b"\0")
    return _MAGIC + xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


def read_header(pages: bytes) -> DiskHeader | None:
    """Return the newest header of two pages; `None` if neither is whole."""
    found = (_read_page(pages[at : at + PAGE_BYTES]) for at in (0, PAGE_BYTES))
    return max(
        (header for header in found if header is not None), key=lambda header: header.sequence, default=None
    )


def _read_page(page: bytes) -> DiskHeader | None:
    rest = page[16:]
    if (
        len(page) < PAGE_BYTES
        or page[:8] != _MAGIC
        or page[8:16] != xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little")
    ):
        return None
    try:
        header = msgspec.json.decode(rest[4 : 4 + int.from_bytes(rest[:4], "little")], type=DiskHeader)
    except (msgspec.DecodeError, RecursionError):
        return None
    return header if header.version != VERSION or _is_possible(header) else None


def _is_possible(header: DiskHeader) -> bool:
    """Return whether a place can have these numbers."""
    return (
        0 < header.row_bytes <= header.stride == -(-header.row_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        and 0 <= header.slots <= _MOST_SLOTS
        and header.slots * header.stride < _MOST_BYTES
        and header.stride < _MOST_BYTES
        and 0 <= header.description_bytes < _MOST_SLOTS
        and 0 <= header.epoch < _MOST_BYTES
        and 0 <= header.sequence < _MOST_BYTES
        and header.namespace.isprintable()
    )


# -- records -------------------------------------------------------------------------


class FoundRecords(NamedTuple):
    """The records of a scope, by ascending slot.

    Of two records with the same key, only the newer is kept.
    """

    slots: npt.NDArray[np.int64]
    keys: list[OffloadKey]
    seals: npt.NDArray[np.uint64]
    """Two words each."""
    lengths: npt.NDArray[np.int64]
    ticks: npt.NDArray[np.int64]
    damaged: npt.NDArray[np.int64]
    """The slots of records that are neither empty nor whole."""


def pack_record(slot: int, key: OffloadKey, seal: bytes, length: int, scope: int, tick: int) -> bytes:
    """Return the record of a slot that holds a row."""
    body = _BODY.pack(scope, length, slot, len(key), key, seal)
    checksum = 0
    for word in _WORDS.unpack(body):
        checksum = ((checksum ^ word) * _FACTOR) & _MASK
        checksum ^= checksum >> _SHIFT
    return checksum.to_bytes(8, "little") + body + TICK.pack(tick)


def read_records(content: bytes | bytearray | npt.NDArray[np.uint8], scope: int) -> FoundRecords:
    """Return the whole records of a scope. `content` holds all records, beginning with slot 0."""
    words = np.frombuffer(content, dtype="<u8", count=len(content) // RECORD_BYTES * _NUM_WORDS)
    words = words.reshape(-1, _NUM_WORDS)
    columns, whole = _read_columns(words)
    named = columns[_NAMED]  # slot, then the length of the key, then zero
    key_lengths = named >> np.uint64(32)
    whole &= (named & np.uint64(0xFFFFFFFF)) == np.arange(len(words), dtype=np.uint64)
    slots = np.flatnonzero(whole & (columns[_SCOPE] == scope) & (key_lengths <= MOST_KEY_BYTES))
    keys, ticks = _keys(words, slots, key_lengths[slots]), columns[_TICK][slots].view(np.int64)
    if _may_repeat(columns[_KEY_START][slots]):
        newest = {keys[at]: at for at in np.argsort(ticks, kind="stable").tolist()}
        kept = np.array(sorted(newest.values()), dtype=np.int64)
        slots, ticks, keys = slots[kept], ticks[kept], [keys[at] for at in kept.tolist()]
    damaged = np.flatnonzero((columns[_SCOPE] != 0) & ~whole)
    seals = np.stack((columns[_SEAL][slots], columns[_SEAL + 1][slots]), axis=1)
    return FoundRecords(slots, keys, seals, columns[_LENGTH][slots].view(np.int64), ticks, damaged)


def _read_columns(words: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return the needed columns of all records, and for each record whether its checksum is right.

    Every record is fetched from memory once, a slice at a time.
    """
    columns = np.empty((len(_COLUMNS), len(words)), dtype=np.uint64)
    whole = np.empty(len(words), dtype=np.bool_)
    for at in range(0, len(words), _SLICE):
        part = np.ascontiguousarray(words[at : at + _SLICE].T)
        columns[:, at : at + _SLICE] = part[_COLUMNS]
        checksum = np.zeros(part.shape[1], dtype=np.uint64)
        for word in part[1:15]:
            checksum ^= word
            checksum *= np.uint64(_FACTOR)
            checksum ^= checksum >> np.uint64(_SHIFT)
        np.equal(checksum, part[0], out=whole[at : at + _SLICE])
    return columns, whole


def _keys(
    words: npt.NDArray[np.uint64], slots: npt.NDArray[np.int64], lengths: npt.NDArray[np.uint64]
) -> list[OffloadKey]:
    table = words.view(np.uint8)[:, _KEY_AT : _KEY_AT + MOST_KEY_BYTES]
    distinct = np.unique(lengths).tolist()
    if len(distinct) == 1 and distinct[0]:  # the usual case, and fast
        table = table[:, : distinct[0]]
        keys = np.ascontiguousarray(table if len(slots) == len(words) else table[slots])
        return list(keys.view(f"V{distinct[0]}").ravel().tolist())
    pairs = zip(table[slots], lengths.tolist(), strict=True)
    return [OffloadKey(key[:length].tobytes()) for key, length in pairs]


def _may_repeat(starts: npt.NDArray[np.uint64]) -> bool:
    """Return whether two keys may be equal: their first bytes are. A set of all keys would be slow."""
    starts = np.sort(starts)
    return bool((starts[1:] == starts[:-1]).any())


# -- descriptions --------------------------------------------------------------------


def description_stride(most_bytes: int) -> int:
    """Return the space that one description of up to `most_bytes` takes; 0 if none are kept."""
    return -(-(_START + most_bytes) // _ALIGNMENT) * _ALIGNMENT if most_bytes else 0


def pack_description(key: OffloadKey, description: bytes, stride: int) -> bytes:
    """Return the bytes to write for a slot; a description that does not fit is written as absent."""
    if not description or _START + len(description) > stride:
        return bytes(min(stride, _START))
    checksum = xxhash.xxh3_64_intdigest(description, _seed(key))
    return checksum.to_bytes(8, "little") + len(description).to_bytes(8, "little") + description


def read_description(key: OffloadKey, content: bytes) -> bytes:
    """Return the description that was kept for a key; empty if there is none."""
    length = int.from_bytes(content[8:12], "little")
    description = content[_START : _START + length]
    if not length or len(description) < length:
        return b""
    return (
        description
        if xxhash.xxh3_64_intdigest(description, _seed(key)).to_bytes(8, "little") == content[:8]
        else b""
    )


def _seed(key: OffloadKey) -> int:
    return xxhash.xxh3_64_intdigest(key)
