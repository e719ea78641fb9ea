"""The compiled table's slots: extendible hashing over one flat array.

The table grows by segments of 1,024 slots. A directory, indexed by the leading bits of the mixed hash, names the segment;
within it, linear probing. A full segment is split in two, so growth never copies the table nor needs it twice. A slot is
three words: the hash's halves and the number of the holder set, 0 for an empty slot. Removal shifts what follows back,
so there are no tombstones. Slots whose set has died (see `sets`) are swept out when their segment fills up, and bit by bit
with later batches.

Hashes are mixed with a secret, so nobody can choose hashes that fall into one segment.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.index.compiled.jit import jit, prefetch

__all__ = [
    "AGAIN", "CLOSED", "DEAD", "DEPTH", "DROPPED", "FILL", "FREE", "HAND", "HARD_LIMIT", "LIMIT", "LOCAL", "MAX_DEPTH",
    "MAX_SEGMENTS", "META", "SECRET", "SEGMENTS", "SLOTS", "SLOT_WORDS", "UNKNOWN", "USED", "erase", "expect", "find", "key_at",
    "make_room", "mix", "put", "segment_of", "sweep",
]  # fmt: skip

SLOTS = 1024
SLOT_WORDS = 3
LIMIT = SLOTS * 4 // 5
"""A segment this full is split."""
HARD_LIMIT = SLOTS * 15 // 16
"""A segment may become this full when the budget allows no more of them."""
_AHEAD = 8  # as many loads as a core has under way without trouble
_WORTH = SLOTS // 16  # a sweep that frees fewer slots than this does not spare the split

# Fields of `meta`.
USED, DEAD, SEGMENTS, MAX_SEGMENTS, DEPTH, MAX_DEPTH, FREE, DROPPED, UNKNOWN, HAND, SECRET, CLOSED, AGAIN, META = range(
    14
)
# Columns of `segments`: slots in use, and by how many leading bits the segment is known.
FILL, LOCAL = 0, 1

_M1, _M2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_ONE, _LOW = np.uint64(1), np.uint64(0xFFFFFFFF)
_S29, _S32, _S33 = np.uint64(29), np.uint64(32), np.uint64(33)
_MASK = np.uint64(SLOTS - 1)


@jit
def mix(key: Any, secret: Any) -> Any:
    """Spread a hash over 64 bits; which bits it starts from only this process knows."""
    key = (key ^ np.uint64(secret)) * _M1
    key = (key ^ (key >> _S33)) * _M2
    return key ^ (key >> _S29)


@jit
def segment_of(directory: Any, depth: Any, mixed: Any) -> Any:
    return np.int64(directory[mixed >> np.uint64(64 - depth)])


@jit
def find(slots: Any, segment: Any, mixed: Any, key: Any) -> Any:
    """Return the place of a hash in its segment, or `~place` of the empty slot where it belongs."""
    low, high = np.uint32(key & _LOW), np.uint32(key >> _S32)
    base = segment * (SLOTS * SLOT_WORDS)
    at = mixed & _MASK
    while True:
        place = base + np.int64(at) * SLOT_WORDS
        if slots[place + 2] == 0:
            return ~place
        if slots[place] == low and slots[place + 1] == high:
            return place
        at = (at + _ONE) & _MASK


@jit
def expect(meta: Any, directory: Any, slots: Any, hashes: Any, at: Any, stop: Any) -> None:
    """Begin to load the slot of a hash some places ahead: tables are larger than caches, and waiting is most of the work."""
    if at + _AHEAD < stop:
        mixed = mix(hashes[at + _AHEAD], meta[SECRET])
        segment = segment_of(directory, meta[DEPTH], mixed)
        prefetch(slots, (segment * SLOTS + np.int64(mixed & _MASK)) * SLOT_WORDS)


@jit
def put(slots: Any, place: Any, key: Any, holders: Any) -> None:
    slots[place] = np.uint32(key & _LOW)
    slots[place + 1] = np.uint32(key >> _S32)
    slots[place + 2] = np.uint32(holders)


@jit
def key_at(slots: Any, place: Any) -> Any:
    return np.uint64(slots[place]) | (np.uint64(slots[place + 1]) << _S32)


@jit
def rehash(meta: Any, directory: Any, slots: Any, segments: Any, refs: Any, alias: Any, segment: Any) -> None:
    """Put a segment's entries where the directory now sends them, and leave out those that nobody holds."""
    base, size = segment * (SLOTS * SLOT_WORDS), SLOTS * SLOT_WORDS
    old = slots[base : base + size].copy()
    slots[base : base + size] = 0
    segments[segment, FILL] = 0
    for place in range(0, size, SLOT_WORDS):
        number = old[place + 2]
        if number == 0:
            continue
        holders = alias[number]
        refs[number] -= 1
        if holders == 0:
            meta[USED] -= 1
            meta[DEAD] -= 1
            continue
        refs[holders] += 1
        key = key_at(old, place)
        mixed = mix(key, meta[SECRET])
        target = segment_of(directory, meta[DEPTH], mixed)
        put(slots, ~find(slots, target, mixed, key), key, holders)
        segments[target, FILL] += 1


@jit
def sweep(meta: Any, directory: Any, slots: Any, segments: Any, refs: Any, alias: Any, budget: Any) -> None:
    """Sweep some segments for entries that nobody holds, going round."""
    for _ in range(budget):
        if meta[DEAD] == 0:
            return
        meta[HAND] = (meta[HAND] + 1) % meta[SEGMENTS]
        rehash(meta, directory, slots, segments, refs, alias, meta[HAND])


@jit
def make_room(meta: Any, directory: Any, slots: Any, segments: Any, refs: Any, alias: Any, mixed: Any) -> Any:
    """Sweep or split the segment that a mixed hash belongs to; `False` when neither can be done."""
    segment = segment_of(directory, meta[DEPTH], mixed)
    if meta[DEAD] > 0:
        rehash(meta, directory, slots, segments, refs, alias, segment)
        if segments[segment, FILL] <= LIMIT - _WORTH:
            return True
    local = segments[segment, LOCAL]
    if meta[SEGMENTS] >= meta[MAX_SEGMENTS] or local >= meta[MAX_DEPTH]:
        return False
    if local == meta[DEPTH]:
        for at in range((1 << meta[DEPTH]) - 1, -1, -1):
            directory[2 * at] = directory[2 * at + 1] = directory[at]
        meta[DEPTH] += 1
    new = meta[SEGMENTS]
    meta[SEGMENTS] += 1
    segments[segment, LOCAL] = segments[new, LOCAL] = local + 1
    span = 1 << (meta[DEPTH] - local - 1)
    first = (np.int64(mixed >> np.uint64(64 - local)) * 2 + 1) * span
    for at in range(first, first + span):
        directory[at] = new
    rehash(meta, directory, slots, segments, refs, alias, segment)
    return True


@jit
def erase(meta: Any, slots: Any, segments: Any, segment: Any, place: Any) -> None:
    """Empty a slot and move later entries of its run back, so that probing never stops short."""
    base = segment * (SLOTS * SLOT_WORDS)
    hole = np.uint64((place - base) // SLOT_WORDS)
    at = hole
    while True:
        at = (at + _ONE) & _MASK
        source = base + np.int64(at) * SLOT_WORDS
        if slots[source + 2] == 0:
            break
        home = mix(key_at(slots, source), meta[SECRET]) & _MASK
        if ((at - home) & _MASK) >= ((at - hole) & _MASK):
            target = base + np.int64(hole) * SLOT_WORDS
            for word in range(SLOT_WORDS):
                slots[target + word] = slots[source + word]
            hole = at
    slots[base + np.int64(hole) * SLOT_WORDS + 2] = 0
    segments[segment, FILL] -= 1
    meta[USED] -= 1
