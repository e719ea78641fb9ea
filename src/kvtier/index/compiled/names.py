"""Names in arrays, and the compiled way from scanned tokens to keys.

Built as the table is (see `slots`): segments of 1,024 slots, a directory, linear probing. A slot is five words:
the engine's hash, the worker's tag (0: empty), the key. A worker's tag changes when it is cleared, and so all its names are
gone at once; they are swept out later. Not for several threads at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.index.base import MAX_WORKERS, Hashes, Op
from kvtier.index.compiled.hashing import chain_one, hash_block
from kvtier.index.compiled.jit import jit, prefetch
from kvtier.index.compiled.questions import holds_one
from kvtier.index.compiled.scan import FIRST_TOKEN, HAS_PARENT, PARENT, SCANNED_BLOCK_SIZE, TOKEN_COUNT, Scanned
from kvtier.index.compiled.slots import DEPTH, MAX_DEPTH, MAX_SEGMENTS, META, SECRET, SEGMENTS, SLOTS, USED, mix
from kvtier.index.compiled.table import CompiledTable
from kvtier.index.names import SLACK
from kvtier.index.xxh3 import SEED

__all__ = ["CompiledNames"]

_WORDS = 5
_SEGMENT_BYTES = SLOTS * _WORDS * 4 + 2 * 4 + 8 * 4
_LIMIT = SLOTS * 4 // 5
_WORKER_BITS = 12  # enough for MAX_WORKERS
_STORED, _REMOVED = int(Op.STORED), int(Op.REMOVED)
_TAG, _KEY = 2, 3  # words of a slot, behind the hash's two
_FILL, _LOCAL = 0, 1
_LOW, _S32, _ONE, _MASK = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(1), np.uint64(SLOTS - 1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_BLOCK_SEED = np.uint64(SEED)


@jit
def _mixed(meta: Any, engine_hash: Any, tag: Any) -> Any:
    return mix(engine_hash ^ (np.uint64(tag) * _SPREAD), meta[SECRET])


@jit
def _segment(meta: Any, directory: Any, mixed: Any) -> Any:
    return np.int64(directory[mixed >> np.uint64(64 - meta[DEPTH])])


@jit
def _word(slots: Any, place: Any) -> Any:
    return np.uint64(slots[place]) | (np.uint64(slots[place + 1]) << _S32)


@jit
def _find(slots: Any, segment: Any, mixed: Any, engine_hash: Any, tag: Any) -> Any:
    """Return a name's place, or `~place` of the empty slot where it belongs."""
    base, at = segment * (SLOTS * _WORDS), mixed & _MASK
    while True:
        place = base + np.int64(at) * _WORDS
        if slots[place + _TAG] == 0:
            return ~place
        if slots[place + _TAG] == tag and _word(slots, place) == engine_hash:
            return place
        at = (at + _ONE) & _MASK


@jit
def _expect(meta: Any, directory: Any, slots: Any, engine_hash: Any, tag: Any) -> None:
    """Begin to load the slot of a name that will be put soon."""
    mixed = _mixed(meta, engine_hash, tag)
    prefetch(slots, (_segment(meta, directory, mixed) * SLOTS + np.int64(mixed & _MASK)) * _WORDS)


@jit
def _get(meta: Any, directory: Any, slots: Any, engine_hash: Any, tag: Any) -> Any:
    """Return whether there is a name, and its key."""
    mixed = _mixed(meta, engine_hash, tag)
    place = _find(slots, _segment(meta, directory, mixed), mixed, engine_hash, tag)
    return (True, _word(slots, place + _KEY)) if place >= 0 else (False, np.uint64(0))


@jit
def _rehash(meta: Any, directory: Any, slots: Any, segments: Any, segment: Any) -> None:
    """Put a segment's names where the directory now sends them. A slot with tag 0 is left out."""
    base, size = segment * (SLOTS * _WORDS), SLOTS * _WORDS
    old = slots[base : base + size].copy()
    slots[base : base + size] = 0
    meta[USED] -= segments[segment, _FILL]
    segments[segment, _FILL] = 0
    for place in range(0, size, _WORDS):
        tag = old[place + _TAG]
        if tag:
            engine_hash = _word(old, place)
            mixed = _mixed(meta, engine_hash, tag)
            target = _segment(meta, directory, mixed)
            to = ~_find(slots, target, mixed, engine_hash, tag)
            for word in range(_WORDS):
                slots[to + word] = old[place + word]
            segments[target, _FILL] += 1
            meta[USED] += 1


@jit
def _split(meta: Any, directory: Any, slots: Any, segments: Any, mixed: Any) -> Any:
    """Split the segment that a mixed hash belongs to; `False` when there is no other."""
    segment = _segment(meta, directory, mixed)
    local = segments[segment, _LOCAL]
    if meta[SEGMENTS] >= meta[MAX_SEGMENTS] or local >= meta[MAX_DEPTH]:
        return False
    if local == meta[DEPTH]:
        for at in range((1 << meta[DEPTH]) - 1, -1, -1):
            directory[2 * at] = directory[2 * at + 1] = directory[at]
        meta[DEPTH] += 1
    new = meta[SEGMENTS]
    meta[SEGMENTS] += 1
    segments[segment, _LOCAL] = segments[new, _LOCAL] = local + 1
    span = 1 << (meta[DEPTH] - local - 1)
    first = (np.int64(mixed >> np.uint64(64 - local)) * 2 + 1) * span
    directory[first : first + span] = new
    _rehash(meta, directory, slots, segments, segment)
    return True


@jit
def _put(meta: Any, directory: Any, slots: Any, segments: Any, engine_hash: Any, tag: Any, key: Any) -> Any:
    """Remember a name; `False` when there is no room."""
    mixed = _mixed(meta, engine_hash, tag)
    while True:
        segment = _segment(meta, directory, mixed)
        place = _find(slots, segment, mixed, engine_hash, tag)
        if place >= 0 or segments[segment, _FILL] < _LIMIT:
            break
        if not _split(meta, directory, slots, segments, mixed):
            return False
    if place < 0:
        place = ~place
        segments[segment, _FILL] += 1
        meta[USED] += 1
        slots[place], slots[place + 1] = np.uint32(engine_hash & _LOW), np.uint32(engine_hash >> _S32)
        slots[place + _TAG] = tag
    slots[place + _KEY], slots[place + _KEY + 1] = np.uint32(key & _LOW), np.uint32(key >> _S32)
    return True


@jit
def _put_all(meta: Any, directory: Any, slots: Any, segments: Any, hashes: Any, tag: Any, keys: Any) -> Any:
    done = 0
    while done < hashes.size and _put(meta, directory, slots, segments, hashes[done], tag, keys[done]):
        done += 1
    return done == hashes.size


@jit
def _sweep(
    meta: Any, directory: Any, slots: Any, segments: Any, tags: Any,
    table_meta: Any, table_directory: Any, table_slots: Any, rows: Any, alias: Any, words: Any, first: Any, count: Any,
) -> None:  # fmt: skip
    """Forget the names in some segments whose worker was cleared, or does not hold the block."""
    for step in range(count):
        segment = (first + step) % meta[SEGMENTS]
        base = segment * (SLOTS * _WORDS)
        for place in range(base, base + SLOTS * _WORDS, _WORDS):
            tag = slots[place + _TAG]
            worker = np.int64(tag) & (MAX_WORKERS - 1)
            if tag and not (
                tags[worker] == tag
                and holds_one(
                    table_meta, table_directory, table_slots, rows, alias, words, worker, _word(slots, place + _KEY)
                )
            ):
                slots[place + _TAG] = 0
        _rehash(meta, directory, slots, segments, segment)


@jit
def _translate(
    meta: Any, directory: Any, slots: Any, segments: Any, tag: Any, block_size: Any, strict: Any,
    steps: Any, hashes: Any, tokens: Any, step: Any, first: Any, keys: Any,
) -> Any:  # fmt: skip
    """Find the keys of a batch's blocks from `step` on; return where it stopped, and how many hashes come before.

    Stops at a clear, and at stores that are not plain: an unknown parent, tokens that do not fit, no room for a name. If
    `strict`, also at a removal of a block without a name; otherwise such a block gets key 0.
    """
    while step < steps.shape[0]:
        op, count = steps[step, 0], steps[step, 2]
        if op == _REMOVED:
            for i in range(first, first + count):
                found, keys[i] = _get(meta, directory, slots, hashes[i], tag)
                if strict and not found:
                    return step, first
        elif (
            op != _STORED
            or steps[step, SCANNED_BLOCK_SIZE] != block_size
            or steps[step, TOKEN_COUNT] != count * block_size
        ):
            return step, first
        else:
            found, parent = False, np.uint64(0)
            if steps[step, HAS_PARENT]:
                found, parent = _get(meta, directory, slots, np.uint64(steps[step, PARENT]), tag)
                if not found:
                    return step, first
            at = steps[step, FIRST_TOKEN]
            for i in range(first, first + count):
                _expect(meta, directory, slots, hashes[i], tag)
                local = hash_block(tokens, at, block_size, _BLOCK_SEED)
                parent = chain_one(parent, local) if found else local
                found, keys[i] = True, parent
                at += block_size
            # a loop of its own, so that slots are loaded while keys are computed
            for i in range(first, first + count):
                if not _put(meta, directory, slots, segments, hashes[i], tag, keys[i]):
                    return step, first
        first += count
        step += 1
    return step, first


@jit
def _export(meta: Any, slots: Any, tag: Any) -> Any:
    hashes, keys, count = np.empty(meta[USED], np.uint64), np.empty(meta[USED], np.uint64), 0
    for place in range(0, meta[SEGMENTS] * SLOTS * _WORDS, _WORDS):
        if slots[place + _TAG] == tag:
            hashes[count], keys[count] = _word(slots, place), _word(slots, place + _KEY)
            count += 1
    return hashes[:count], keys[:count]


class CompiledNames:
    """Names of a compiled table's blocks. See `kvtier.index.names.Names`."""

    def __init__(self, table: CompiledTable, budget: int) -> None:
        """Name blocks of `table`, in at most `budget` bytes; memory is taken as it is needed."""
        self._table = table
        most = max(2, budget // _SEGMENT_BYTES)
        self._meta = np.zeros(META, np.int64)
        self._meta[[DEPTH, SEGMENTS, MAX_SEGMENTS]] = 1, 2, most
        self._meta[[MAX_DEPTH, SECRET]] = most.bit_length() + 2, secrets.randbits(63)
        self._directory = np.zeros(1 << int(self._meta[MAX_DEPTH]), np.uint32)
        self._slots = np.zeros(most * SLOTS * _WORDS, np.uint32)
        self._segments = np.zeros((most, 2), np.int32)
        self._directory[1] = 1
        self._segments[:2, _LOCAL] = 1
        self._tags = (1 << _WORKER_BITS) | np.arange(MAX_WORKERS, dtype=np.uint32)
        self._state = self._meta, self._directory, self._slots, self._segments
        self._untidy, self._hand, self._left = SLACK, 0, 0

    def get(self, worker: int, engine_hash: int) -> int | None:
        found, key = _get(self._meta, self._directory, self._slots, np.uint64(engine_hash), self._tags[worker])
        return int(key) if found else None

    def put(self, worker: int, hashes: Sequence[int], keys: Hashes) -> bool:
        wanted = np.array(hashes, np.uint64)
        if _put_all(*self._state, wanted, self._tags[worker], keys):
            return True
        self.sweep()
        return bool(_put_all(*self._state, wanted, self._tags[worker], keys))

    def translate(
        self, worker: int, block_size: int, strict: bool, batch: Scanned, step: int, first: int, keys: Hashes
    ) -> tuple[int, int]:
        """Fill in the keys of a scanned batch's blocks from `step` on, before which come `first` hashes.

        Returns the first step that must be done by hand, and how many hashes come before that.
        """
        tag = self._tags[worker]
        stopped: tuple[int, int] = _translate(
            *self._state, tag, block_size, strict, batch.steps, batch.hashes, batch.tokens, step, first, keys
        )
        return stopped

    def clear(self, worker: int) -> None:
        tag = int(self._tags[worker]) + MAX_WORKERS
        self._tags[worker] = tag if tag < 1 << 32 else MAX_WORKERS | worker

    def tidy(self) -> None:
        """Sweep a few segments at a time, so that no batch waits long."""
        if self._left == 0 and self._meta[USED] > self._untidy:
            self._untidy = int(self._meta[USED]) * 5 // 4
            if self._meta[USED] > 2 * self._table.holdings() + SLACK:
                self._left = int(self._meta[SEGMENTS])
        if self._left:
            count = min(8, self._left)
            self._sweep(count)
            self._left -= count
            if self._left == 0:
                self._untidy = max(SLACK, int(self._meta[USED]) * 5 // 4)

    def sweep(self) -> None:
        """Forget all names of blocks that are gone."""
        self._sweep(int(self._meta[SEGMENTS]))

    def _sweep(self, count: int) -> None:
        _sweep(*self._state, self._tags, *self._table.holders_state, self._hand, count)
        self._hand = (self._hand + count) % int(self._meta[SEGMENTS])

    def items(self, worker: int) -> dict[int, int]:
        hashes, keys = _export(self._meta, self._slots, self._tags[worker])
        return dict(zip(hashes.tolist(), keys.tolist(), strict=True))

    def bytes(self) -> int:
        return int(self._meta[SEGMENTS]) * _SEGMENT_BYTES

    def check(self) -> None:
        """Raise `IntegrityError` where the counts are not those of the slots."""
        tags = self._slots[_TAG::_WORDS][: int(self._meta[SEGMENTS]) * SLOTS].reshape(-1, SLOTS)
        fills = np.count_nonzero(tags, axis=1)
        if fills.sum() != self._meta[USED] or (fills != self._segments[: len(fills), _FILL]).any():
            raise IntegrityError("index names: the counts are not those of the slots")
