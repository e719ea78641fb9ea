"""Records: the books of a disk tier, 128 bytes per slot, each with its own checksum.

    0 checksum u64 | 8 scope u64 | 16 length u64 | 24 slot u32 | 28 key length u8, 3 of zero | 32 key, 64
    | 96 seal, 16 | 112 zero, 8 | 120 tick i64

A record is overwritten together with its slot and lies within one sector. A scope of 0 marks an empty slot.
The tick (last use of the slot) is outside the checksum: it is rewritten alone, and a wrong tick costs only
the order, not the bytes. The checksum mixes 64-bit words so that numpy can check a million records in a
tenth of a second. Pure functions; any thread.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey

__all__ = ["EMPTY", "MOST_KEY_BYTES", "RECORD_BYTES", "TICK", "FoundRecords", "pack_record", "read_records"]

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
    """Say whether two keys may be equal, because their first bytes are. A set of all keys would be slow."""
    starts = np.sort(starts)
    return bool((starts[1:] == starts[:-1]).any())
