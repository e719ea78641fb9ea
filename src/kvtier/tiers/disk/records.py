"""Records: what a disk tier knows of each slot, 128 bytes by slot, each with its own checksum.

    0 checksum u64 | 8 scope u64 | 16 length u64 | 24 slot u32 | 28 key length u8, 3 of zero | 32 key, 64
    | 96 seal, 16 | 112 zero, 8 | 120 tick i64

A record is overwritten with its slot and lies within one sector. A scope of 0: the slot is empty. The
tick, when the slot was last used, is outside the checksum: it is rewritten alone, and a wrong one costs an
order, no bytes. The checksum mixes 64-bit words so that numpy can check a million records in a tenth of a
second. Pure functions; any thread.
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

_RECORD = np.dtype(
    {
        "names": ["checksum", "scope", "length", "slot", "key_length", "key", "seal", "tick"],
        "formats": ["<u8", "<u8", "<u8", "<u4", "u1", f"V{MOST_KEY_BYTES}", "V16", "<i8"],
        "offsets": [0, 8, 16, 24, 28, 32, 96, 120],
        "itemsize": RECORD_BYTES,
    }
)


class FoundRecords(NamedTuple):
    """The records of a scope, by ascending slot. Of two with one key only the newer is among them."""

    slots: npt.NDArray[np.int64]
    keys: list[OffloadKey]
    seals: npt.NDArray[np.void]
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


def read_records(content: bytes | bytearray, scope: int) -> FoundRecords:
    """Return the whole records of a scope from the bytes of all, the first being that of slot 0."""
    records = np.frombuffer(content, dtype=_RECORD, count=len(content) // RECORD_BYTES)
    whole = records["slot"] == np.arange(len(records))
    for at in range(0, len(records), _SLICE):
        whole[at : at + _SLICE] &= _is_whole(records[at : at + _SLICE])
    scopes = records["scope"]
    slots = np.flatnonzero(whole & (scopes == scope) & (records["key_length"] <= MOST_KEY_BYTES))
    keys, ticks = _keys(records, slots), records["tick"][slots].astype(np.int64)
    if _may_repeat(records, slots):
        newest = {keys[at]: at for at in np.argsort(ticks, kind="stable").tolist()}
        kept = np.array(sorted(newest.values()), dtype=np.int64)
        slots, ticks, keys = slots[kept], ticks[kept], [keys[at] for at in kept.tolist()]
    damaged = np.flatnonzero((scopes != 0) & ~whole)
    return FoundRecords(slots, keys, records["seal"][slots], records["length"][slots].astype(np.int64), ticks, damaged)


def _is_whole(records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Say of each record whether its checksum is right."""
    words = np.ascontiguousarray(records.view("<u8").reshape(len(records), RECORD_BYTES // 8).T)
    checksum = np.zeros(len(records), dtype=np.uint64)
    for word in words[1:15]:
        checksum ^= word
        checksum *= np.uint64(_FACTOR)
        checksum ^= checksum >> np.uint64(_SHIFT)
    return np.asarray(checksum == words[0])


def _bytes(records: npt.NDArray[np.void], slots: npt.NDArray[np.int64], start: int, stop: int) -> npt.NDArray[np.uint8]:
    """Return a range of the bytes of some records, one record after the other."""
    table = records.view(np.uint8).reshape(len(records), RECORD_BYTES)[:, start:stop]
    return np.ascontiguousarray(table if len(slots) == len(records) else table[slots])


def _keys(records: npt.NDArray[np.void], slots: npt.NDArray[np.int64]) -> list[OffloadKey]:
    lengths = np.unique(records["key_length"][slots]).tolist()
    if len(lengths) == 1 and lengths[0]:  # the usual case, and fast
        return list(_bytes(records, slots, _KEY_AT, _KEY_AT + lengths[0]).view(f"V{lengths[0]}").ravel().tolist())
    pairs = zip(records["key"][slots].tolist(), records["key_length"][slots].tolist(), strict=True)
    return [OffloadKey(key[:length]) for key, length in pairs]


def _may_repeat(records: npt.NDArray[np.void], slots: npt.NDArray[np.int64]) -> bool:
    """Say whether two keys may be the same: their first bytes are. A set of all would take long."""
    starts = np.sort(_bytes(records, slots, _KEY_AT, _KEY_AT + 8).view("<u8").ravel())
    return bool((starts[1:] == starts[:-1]).any())
