"""Names in arrays, and the compiled translation of scanned tokens to keys.

A name is a cell of the compiled hash table (see `cells`): the engine's hash, the worker's tag, the key.
When a worker is cleared its tag changes, so all its names are void at once; a later sweep removes them. Not
for several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.index.base import MAX_WORKERS, SLACK, Hashes, NamePart, Op
from kvtier.index.compiled import jit
from kvtier.index.compiled.blocks import holds_one
from kvtier.index.compiled.cells import (
    CELLS,
    FILL,
    LIMIT,
    SEGMENTS,
    USED,
    Cells,
    fill,
    find,
    mixed_of,
    prefetch_cell,
    put_word,
    rehash,
    segment_of,
    split,
    word_at,
    words_of,
)
from kvtier.index.compiled.hashing import chain_one, hash_block
from kvtier.index.compiled.scan import (
    FIRST_TOKEN,
    HAS_PARENT,
    PARENT,
    SCANNED_BLOCK_SIZE,
    TOKEN_COUNT,
    Scanned,
)
from kvtier.index.compiled.table import CompiledTable
from kvtier.index.xxh3 import SEED

_WIDTH, _TAG, _KEY = 5, 2, 3  # words of a cell, and the positions of tag and key
_WORKER_BITS = 12  # enough for MAX_WORKERS
_STORED, _REMOVED = int(Op.STORED), int(Op.REMOVED)
_BLOCK_SEED = np.uint64(SEED)


@jit
def _get(meta: Any, directory: Any, cells: Any, engine_hash: Any, tag: Any) -> Any:
    """Return whether there is a name, and its key."""
    mixed = mixed_of(meta, engine_hash, tag)
    offset = find(cells, _WIDTH, segment_of(meta, directory, mixed), mixed, engine_hash, tag)
    return (True, word_at(cells, offset + _KEY)) if offset >= 0 else (False, np.uint64(0))


@jit
def _put(
    meta: Any, directory: Any, cells: Any, segments: Any, engine_hash: Any, tag: Any, key: Any, keeps: Any
) -> Any:  # fmt: skip
    """Store a name; `False` if there is no room, or if `keeps` and the hash names another key."""
    mixed = mixed_of(meta, engine_hash, tag)
    while True:
        segment = segment_of(meta, directory, mixed)
        offset = find(cells, _WIDTH, segment, mixed, engine_hash, tag)
        if offset >= 0 or segments[segment, FILL] < LIMIT:
            break
        if not split(meta, directory, cells, segments, _WIDTH, True, mixed):
            return False
    if offset < 0:
        offset = ~offset
        fill(meta, cells, segments, segment, offset, engine_hash, tag)
    elif keeps and word_at(cells, offset + _KEY) != key:
        return False
    put_word(cells, offset + _KEY, key)
    return True


@jit
def _put_all(meta: Any, directory: Any, cells: Any, segments: Any, hashes: Any, tag: Any, keys: Any) -> Any:
    done = 0
    while done < hashes.size and _put(
        meta, directory, cells, segments, hashes[done], tag, keys[done], False
    ):
        done += 1
    return done == hashes.size


@jit
def _sweep(
    meta: Any, directory: Any, cells: Any, segments: Any, tags: Any,
    table_meta: Any, table_directory: Any, table_cells: Any, rows: Any, alias: Any, words: Any,
    first: Any, count: Any,
) -> None:  # fmt: skip
    """Drop the names in some segments whose worker was cleared, or does not hold the block."""
    for number in range(count):
        segment = (first + number) % meta[SEGMENTS]
        base = segment * (CELLS * _WIDTH)
        for offset in range(base, base + CELLS * _WIDTH, _WIDTH):
            tag = cells[offset + _TAG]
            worker = np.int64(tag) & (MAX_WORKERS - 1)
            if tag and not (
                tags[worker] == tag
                and holds_one(
                    table_meta,
                    table_directory,
                    table_cells,
                    rows,
                    alias,
                    words,
                    worker,
                    word_at(cells, offset + _KEY),
                )
            ):
                cells[offset + _TAG] = 0
        rehash(meta, directory, cells, segments, _WIDTH, True, segment)


@jit
def _translate(
    meta: Any, directory: Any, cells: Any, segments: Any, tag: Any, block_size: Any, strict: Any,
    edits: Any, hashes: Any, tokens: Any, edit: Any, first: Any, keys: Any,
) -> Any:  # fmt: skip
    """Compute the keys of a batch's blocks from `edit` on; return where it stopped: edit and hashes.

    Stops at a clear, and at stores that are not plain: an unknown parent, tokens that do not fit, no room
    for a name, or a name that another block has. If `strict`, also at a removal of a block without a name;
    otherwise such a block gets key 0.
    """
    while edit < edits.shape[0]:
        op, count = edits[edit, 0], edits[edit, 2]
        if op == _REMOVED:
            for i in range(first, first + count):
                found, keys[i] = _get(meta, directory, cells, hashes[i], tag)
                if strict and not found:
                    return edit, first
        elif (
            op != _STORED
            or edits[edit, SCANNED_BLOCK_SIZE] != block_size
            or edits[edit, TOKEN_COUNT] != count * block_size
        ):
            return edit, first
        else:
            found, parent = False, np.uint64(0)
            if edits[edit, HAS_PARENT]:
                found, parent = _get(meta, directory, cells, np.uint64(edits[edit, PARENT]), tag)
                if not found:
                    return edit, first
            at = edits[edit, FIRST_TOKEN]
            for i in range(first, first + count):
                prefetch_cell(meta, directory, cells, _WIDTH, hashes[i], tag)
                local = hash_block(tokens, at, block_size, _BLOCK_SEED)
                parent = chain_one(parent, local) if found else local
                found, keys[i] = True, parent
                at += block_size
            # a separate loop, so that cells are loaded while keys are computed
            for i in range(first, first + count):
                if not _put(meta, directory, cells, segments, hashes[i], tag, keys[i], True):
                    return edit, first
        first += count
        edit += 1
    return edit, first


class CompiledNames:
    """Names of a compiled table's blocks. See `kvtier.index.base.Names`."""

    def __init__(self, table: CompiledTable, budget: int) -> None:
        """Name blocks of `table`, in at most `budget` bytes; memory is taken on demand."""
        self._table = table
        self._cells = Cells.reserve(max(2, budget // Cells.segment_bytes(_WIDTH)), _WIDTH)
        self._meta = self._cells.meta
        self._tags = (1 << _WORKER_BITS) | np.arange(MAX_WORKERS, dtype=np.uint32)
        self._untidy, self._hand, self._left = SLACK, 0, 0

    def get(self, worker: int, engine_hash: int) -> int | None:
        found, key = _get(*self._cells[:3], np.uint64(engine_hash), self._tags[worker])
        return int(key) if found else None

    def put(self, worker: int, hashes: Sequence[int], keys: Hashes) -> bool:
        return bool(_put_all(*self._cells, np.array(hashes, np.uint64), self._tags[worker], keys))

    def translate(
        self, worker: int, block_size: int, strict: bool, batch: Scanned, edit: int, first: int, keys: Hashes
    ) -> tuple[int, int]:
        """Fill in the keys of a scanned batch's blocks from `edit` on; `first` hashes come before that edit.

        Returns the first edit that needs the plain path, and how many hashes come before it.
        """
        tag = self._tags[worker]
        stopped: tuple[int, int] = _translate(
            *self._cells, tag, block_size, strict, batch.edits, batch.hashes, batch.tokens, edit, first, keys
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
        _sweep(*self._cells, self._tags, *self._table.holders_state, self._hand, count)
        self._hand = (self._hand + count) % int(self._meta[SEGMENTS])

    def parts(self) -> Iterator[NamePart]:
        for part in self._cells.parts(_WIDTH):
            workers = part[:, _TAG] & np.uint32(MAX_WORKERS - 1)
            now = part[self._tags[workers] == part[:, _TAG]]
            yield NamePart(now[:, _TAG] & np.uint32(MAX_WORKERS - 1), words_of(now, 0), words_of(now, _KEY))

    def bytes(self) -> int:
        return int(self._meta[SEGMENTS]) * Cells.segment_bytes(_WIDTH)

    def check(self) -> None:
        """Raise `IntegrityError` if the counts do not agree with the cells."""
        if not self._cells.fills(_WIDTH):
            raise IntegrityError("index names: the counts are not those of the cells")
