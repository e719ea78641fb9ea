"""Reads the batches of the event stream straight into arrays, without making an object per hash or token.

`Scanner` reads the usual batches: plain stores, removals and clears, as maps or as arrays. It reads only
what it knows; at the first other byte (a mark, hashes as bytes, extra keys, a rarer medium or group,
damage) it passes the whole batch to `decode_batch`, so both always agree. Tokens are skipped, or read into
an array as well.

Each thread needs its own `Scanner`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, Mark
from kvtier.events.wire import U64, Change, DecodedBatch, decode_batch, place_weight
from kvtier.events.wire_structs import Event
from kvtier.index.base import FULL_ATTENTION, PLACES, Edits, Hashes, Op
from kvtier.index.compiled import jit

_TS = struct.Struct(">d")
_STORED, _REMOVED, _CLEARED = int(Op.STORED), int(Op.REMOVED), int(Op.CLEARED)
_OTHER, _FULL = -1, -2  # not readable here; the given arrays are full

# Fields of `totals`: how full the arrays are, and the rank and effect of the batch.
_HASHES, _EDITS, _TOKENS, _RANK, _HAS_RANK, _WIPED, _BLOCKS, _DIGEST, _TOTALS = range(9)
# Columns of a scanned batch's edits, after the columns that all edits have.
_OP, _AREA, _COUNT, PARENT, HAS_PARENT, FIRST_TOKEN, TOKEN_COUNT, SCANNED_BLOCK_SIZE, _COLUMNS = range(9)

# The forms of a field. A field is identified by its position in the event; `_STORED_FIELD_FORMS` and
# `_REMOVED_FIELD_FORMS` give the names that maps use.
_F_HASHES, _F_PARENT, _F_TOKENS, _F_INT, _F_TEXT, _F_MEDIUM, _F_ZERO, _F_KIND, _F_NIL, _F_WHOLE = range(10)
_STORED_FIELD_FORMS = (
    ("block_hashes", _F_HASHES), ("parent_block_hash", _F_PARENT), ("token_ids", _F_TOKENS),
    ("block_size", _F_WHOLE), ("lora_id", _F_INT), ("medium", _F_MEDIUM), ("lora_name", _F_TEXT),
    ("extra_keys", _F_NIL), ("group_idx", _F_ZERO), ("kv_cache_spec_kind", _F_KIND),
    ("kv_cache_spec_sliding_window", _F_INT), ("locality", _F_NIL), ("ownership", _F_NIL),
    ("session_id", _F_TEXT),
)  # fmt: skip
_REMOVED_FIELD_FORMS = (
    ("block_hashes", _F_HASHES), ("medium", _F_MEDIUM), ("group_idx", _F_ZERO), ("locality", _F_NIL),
    ("ownership", _F_NIL),
)  # fmt: skip


def _dictionary(words: list[str]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the words' bytes, joined, and where each word begins."""
    ends = np.cumsum([0] + [len(word) for word in words])
    return np.frombuffer("".join(words).encode(), np.uint8), ends.astype(np.int64)


_NAMES, _NAME_ENDS = _dictionary([name for name, _ in _STORED_FIELD_FORMS])
_FORMS = np.array([form for _, form in _STORED_FIELD_FORMS], np.int64)
_REMOVED_AT = np.array(
    [[name for name, _ in _STORED_FIELD_FORMS].index(name) for name, _ in _REMOVED_FIELD_FORMS], np.int64
)
_IN_REMOVED = sum(1 << int(field) for field in _REMOVED_AT)
_LORA_ID, _LORA_NAME = (
    [name for name, _ in _STORED_FIELD_FORMS].index(name) for name in ("lora_id", "lora_name")
)
_TAGS, _TAG_ENDS = _dictionary(["BlockStored", "BlockRemoved", "AllBlocksCleared"])
_MEDIA, _MEDIUM_ENDS = _dictionary([place[0] for place in PLACES])
_KINDS, _KIND_ENDS = _dictionary(list(FULL_ATTENTION))
_TYPE, _TYPE_ENDS = _dictionary(["type"])
_WEIGHTS = np.array([place_weight(place) for place in PLACES], np.uint64)

# Unsigned integers of at most 32 bits, by their first byte: their length (0: not such an integer), and
# the position of their bits in the five bytes from the first on.
_U32_LENGTH = np.array([1] * 0x80 + [0] * 0x4C + [2, 3, 5] + [0] * 0x31)
_U32_SHIFT = np.where(_U32_LENGTH > 0, 40 - 8 * _U32_LENGTH, 0).astype(np.uint64)
_U32_MASK = np.where(_U32_LENGTH == 1, 0x7F, (1 << 8 * np.maximum(_U32_LENGTH - 1, 0)) - 1).astype(np.uint64)


# -- pieces of msgpack -----------------------------------------------------------------------------
#
# Each function takes a position in the array and returns the position after the piece, or -1 if there is no
# such piece. None ever reads past the end.


@jit
def head(data: Any, at: Any, small: Any, limit: Any, word: Any) -> Any:
    """Read the head of an array, a map or a text; return its length (or -1) and the position after it.

    `small` is the first byte of the short form, which has up to `limit` elements; `word` is that of the
    16-bit form.
    """
    if at >= data.size:
        return np.int64(-1), at
    byte = np.int64(data[at])
    if small <= byte < small + limit:
        return byte - small, at + 1
    if byte == word and at + 3 <= data.size:
        return (np.int64(data[at + 1]) << 8) | np.int64(data[at + 2]), at + 3
    if byte == word + 1 and at + 5 <= data.size:
        size = np.int64(0)
        for i in range(1, 5):
            size = (size << 8) | np.int64(data[at + i])
        return size, at + 5
    return np.int64(-1), at


@jit
def text(data: Any, at: Any) -> Any:
    """Read a text's head; return the text's start and end, -1 if there is none."""
    if at + 1 < data.size and data[at] == 0xD9:
        size, start = np.int64(data[at + 1]), at + 2
    else:
        size, start = head(data, at, 0xA0, 32, 0xDA)
    if size < 0 or start + size > data.size:
        return np.int64(-1), np.int64(-1)
    return start, start + size


@jit
def word_in(data: Any, start: Any, stop: Any, words: Any, ends: Any) -> Any:
    """Return the number of the dictionary word that a text equals, -1 for none."""
    for word in range(ends.size - 1):
        first = ends[word]
        if ends[word + 1] - first != stop - start:
            continue
        same = True
        for i in range(stop - start):
            if data[start + i] != words[first + i]:
                same = False
                break
        if same:
            return word
    return -1


@jit
def integer(data: Any, at: Any) -> Any:
    """Read an integer; return its low 64 bits and the position after it, -1 if there is none."""
    if at >= data.size:
        return np.uint64(0), np.int64(-1)
    byte = np.int64(data[at])
    if byte < 0x80:
        return np.uint64(byte), at + 1
    if byte >= 0xE0:
        return np.uint64(byte - 256), at + 1
    if byte == 0xCF and at + 9 <= data.size:  # nearly all hashes: one load, because the width is known
        value = (
            np.uint64(data[at + 1]) << np.uint64(56)
            | np.uint64(data[at + 2]) << np.uint64(48)
            | np.uint64(data[at + 3]) << np.uint64(40)
            | np.uint64(data[at + 4]) << np.uint64(32)
            | np.uint64(data[at + 5]) << np.uint64(24)
            | np.uint64(data[at + 6]) << np.uint64(16)
            | np.uint64(data[at + 7]) << np.uint64(8)
            | np.uint64(data[at + 8])
        )
        return value, at + 9
    if not 0xCC <= byte <= 0xD3:
        return np.uint64(0), np.int64(-1)
    width = 1 << ((byte - 0xCC) & 3)
    if at + 1 + width > data.size:
        return np.uint64(0), np.int64(-1)
    value = np.uint64(0)
    for i in range(1, width + 1):
        value = (value << np.uint64(8)) | np.uint64(data[at + i])
    if byte >= 0xD0 and width < 8 and data[at + 1] >= 0x80:
        value |= ~np.uint64(0) << np.uint64(8 * width)
    return value, at + 1 + width


@jit
def _length(byte: Any) -> Any:
    """Return the length of the integer that begins with a byte, 0 if none does."""
    if 0xCC <= byte <= 0xD3:
        return 1 + (1 << (byte & 3))
    return 1 if byte < 0x80 or byte >= 0xE0 else 0


@jit
def skip_integers(data: Any, at: Any, count: Any) -> Any:
    """Return the position after `count` integers, -1 if something else is among them.

    The start of an integer is known only after the ones before it, so a core mostly waits. Long lists are
    therefore walked from two positions at once; the second one is a guess:

        at ---- taken ----> goal ---- taken ----> ahead

    If the first walk arrives at the start of the second, both together are one walk; else the second was
    useless.
    """
    size = data.size
    while count >= 64 and at + count <= size:
        goal = at + count - 8
        while goal < at + count and data[goal] & 0xFC != 0xCC:  # tokens of several bytes begin like this
            goal += 1
        ahead, taken = goal, np.int64(0)  # at most `count` integers, as each has at least a byte
        while at < goal:
            length = _length(np.int64(data[at]))
            if length == 0:
                return np.int64(-1)
            at += length
            taken += 1
            if ahead >= 0:
                length = _length(np.int64(data[ahead])) if ahead < size else 0
                ahead = ahead + length if length else np.int64(-1)
        count -= taken
        if at == goal and 0 <= ahead <= size and taken <= count:
            at, count = ahead, count - taken
    for _ in range(count):
        length = _length(np.int64(data[at])) if at < size else 0
        if length == 0:
            return np.int64(-1)
        at += length
    return at if at <= size else np.int64(-1)


@jit
def read_u32(data: Any, at: Any, count: Any, out: Any, start: Any) -> Any:
    """Read `count` integers of at most 32 bits into `out[start:]`.

    Return the position after them, -1 if something else is there. The lengths of tokens are unpredictable,
    so they come from a table and not from branches.
    """
    sure = data.size - 5  # up to here, all five bytes lie in the array
    for i in range(start, start + count):
        if at <= sure and _U32_LENGTH[data[at]]:
            head = data[at]
            word = (
                np.uint64(head) << np.uint64(32)
                | np.uint64(data[at + 1]) << np.uint64(24)
                | np.uint64(data[at + 2]) << np.uint64(16)
                | np.uint64(data[at + 3]) << np.uint64(8)
                | np.uint64(data[at + 4])
            )
            out[i] = np.uint32((word >> _U32_SHIFT[head]) & _U32_MASK[head])
            at += _U32_LENGTH[head]
        else:
            value, at = integer(data, at)
            if at < 0 or value > np.uint64(0xFFFFFFFF):
                return np.int64(-1)
            out[i] = np.uint32(value)
    return at


# -- events ----------------------------------------------------------------------------------------


@jit
def _hash_list(data: Any, at: Any, hashes: Any, totals: Any) -> Any:
    """Append a list of hashes to those already read; return their number and the position after it."""
    count, at = head(data, at, 0x90, 16, 0xDC)
    if count < 0 or count > data.size - at:
        return np.int64(_OTHER), at
    if totals[_HASHES] + count > hashes.size:
        return np.int64(_FULL), at
    for i in range(count):
        hashes[totals[_HASHES] + i], at = integer(data, at)
        if at < 0:
            return np.int64(_OTHER), at
    return count, at


@jit
def _token_list(data: Any, at: Any, tokens: Any, totals: Any) -> Any:
    """Append a list of tokens to those already read; return their number and the position after it."""
    count, at = head(data, at, 0x90, 16, 0xDC)
    if count < 0 or count > data.size - at:
        return np.int64(_OTHER), at
    first = totals[_TOKENS]
    if first + count > tokens.size:
        return np.int64(_FULL), at
    at = read_u32(data, at, count, tokens, first)
    return (count, at) if at >= 0 else (np.int64(_OTHER), at)


@jit
def _plain(data: Any, at: Any, form: Any) -> Any:
    """Skip a field whose value does not matter, if it has the right form; -1 if not."""
    if at >= data.size:
        return np.int64(-1)
    if form not in (_F_TOKENS, _F_WHOLE) and data[at] == 0xC0:
        return at + 1
    if form in (_F_INT, _F_PARENT, _F_WHOLE):
        return integer(data, at)[1]
    if form == _F_ZERO:
        return at + 1 if data[at] == 0 else np.int64(-1)
    if form == _F_TOKENS:
        count, at = head(data, at, 0x90, 16, 0xDC)
        return skip_integers(data, at, count) if count >= 0 else np.int64(-1)
    if form == _F_NIL:
        return np.int64(-1)
    start, stop = text(data, at)
    if start < 0 or (form == _F_KIND and word_in(data, start, stop, _KINDS, _KIND_ENDS) < 0):
        return np.int64(-1)
    for i in range(start, stop):
        if data[i] >= 0x80:  # may be invalid UTF-8
            return np.int64(-1)
    return stop


@jit
def _area_of(data: Any, at: Any) -> Any:
    """Read a medium; return its area and the position after it."""
    if at < data.size and data[at] == 0xC0:
        return 0, at + 1
    start, stop = text(data, at)
    if start < 0:
        return -1, at
    return (0 if start == stop else word_in(data, start, stop, _MEDIA, _MEDIUM_ENDS)), stop


@jit
def _event(data: Any, at: Any, hashes: Any, edits: Any, tokens: Any, totals: Any) -> Any:
    """Read one event into the next edit; return the position after it, or an error code."""
    as_map = data[at] < 0x90 or data[at] == 0xDE
    size, at = head(data, at, 0x80, 16, 0xDE) if as_map else head(data, at, 0x90, 16, 0xDC)
    if size < 1:
        return np.int64(_OTHER)
    if as_map:
        start, at = text(data, at)
        if start < 0 or word_in(data, start, at, _TYPE, _TYPE_ENDS) < 0:
            return np.int64(_OTHER)
    start, at = text(data, at)
    tag = word_in(data, start, at, _TAGS, _TAG_ENDS) if start >= 0 else -1
    if tag < 0 or (tag == 2 and size > 1):
        return np.int64(_OTHER)
    seen, area, count = 0, 0, np.int64(0)
    row = totals[_EDITS]
    for column in range(_COLUMNS):
        edits[row, column] = 0
    for i in range(size - 1):
        if as_map:
            start, at = text(data, at)
            field = word_in(data, start, at, _NAMES, _NAME_ENDS) if start >= 0 else -1
        elif tag == 0:
            field = i if i < _FORMS.size else -1
        else:
            field = _REMOVED_AT[i] if i < _REMOVED_AT.size else -1
        if field < 0 or seen >> field & 1 or (tag == 1 and not _IN_REMOVED >> field & 1):
            return np.int64(_OTHER)
        seen |= 1 << field
        if _FORMS[field] == _F_HASHES:
            count, at = _hash_list(data, at, hashes, totals)
            if count < 0:
                return count
        elif _FORMS[field] == _F_TOKENS and tokens.size:
            edits[row, FIRST_TOKEN] = totals[_TOKENS]
            edits[row, TOKEN_COUNT], at = _token_list(data, at, tokens, totals)
            if edits[row, TOKEN_COUNT] < 0:
                return edits[row, TOKEN_COUNT]
        elif _FORMS[field] == _F_WHOLE or (
            _FORMS[field] == _F_PARENT and at < data.size and data[at] != 0xC0
        ):
            value, at = integer(data, at)
            if at < 0:
                return np.int64(_OTHER)
            if _FORMS[field] == _F_WHOLE:
                edits[row, SCANNED_BLOCK_SIZE] = np.int64(value)
            else:
                edits[row, PARENT], edits[row, HAS_PARENT] = np.int64(value), 1
        elif _FORMS[field] == _F_MEDIUM:
            area, at = _area_of(data, at)
            if area < 0:
                return np.int64(_OTHER)
        else:
            # the hash of tokens depends on the adapter
            form = _FORMS[field]
            if tokens.size and field in (_LORA_ID, _LORA_NAME):
                form = _F_ZERO if field == _LORA_ID else _F_NIL
            at = _plain(data, at, form)
            if at < 0:
                return np.int64(_OTHER)
    if tag < 2 and not seen & 1:
        return np.int64(_OTHER)
    edits[row, _OP], edits[row, _AREA], edits[row, _COUNT] = tag + 1, area, count
    return at


@jit
def _add_up(hashes: Any, edits: Any, totals: Any) -> None:
    """Add the newest edit to the batch's change. The digest is modulo 2^64; its sign means nothing."""
    row = totals[_EDITS]
    op, area, count = edits[row, _OP], edits[row, _AREA], edits[row, _COUNT]
    if op == _CLEARED:
        totals[_WIPED], totals[_BLOCKS], totals[_DIGEST] = 1, 0, 0
    total = np.uint64(0)
    for i in range(totals[_HASHES], totals[_HASHES] + count):
        total += hashes[i]
    total *= _WEIGHTS[area]
    totals[_DIGEST] += np.int64(total) if op == _STORED else -np.int64(total)
    totals[_BLOCKS] += count if op == _STORED else -count
    totals[_HASHES] += count
    totals[_TOKENS] += edits[row, TOKEN_COUNT]
    totals[_EDITS] += 1


@jit
def _scan(data: Any, hashes: Any, edits: Any, tokens: Any, totals: Any) -> Any:
    """Read a batch into the arrays, after the content that `totals` counts; return 0, or an error code."""
    totals[_RANK:] = 0
    if data.size < 12 or data[0] != 0x93 or data[1] != 0xCB:
        return _OTHER
    events, at = head(data, 10, 0x90, 16, 0xDC)
    for _ in range(events):
        if at >= data.size:
            return _OTHER
        if totals[_EDITS] == edits.shape[0]:
            return _FULL
        at = _event(data, at, hashes, edits, tokens, totals)
        if at < 0:
            return at
        _add_up(hashes, edits, totals)
    if events < 0 or at >= data.size:
        return _OTHER
    if data[at] == 0xC0:
        at += 1
    else:
        totals[_HAS_RANK] = 1
        rank, at = integer(data, at)
        totals[_RANK] = np.int64(rank)
    return 0 if at == data.size else _OTHER


@jit
def _all_of_size(edits: Any, block_size: Any) -> Any:
    """Return whether all stores have this block size, or none."""
    for edit in range(edits.shape[0]):
        size = edits[edit, SCANNED_BLOCK_SIZE]
        if edits[edit, _OP] == _STORED and size != block_size and size != 0:
            return False
    return True


class ScanBuffers:
    """Arrays for consecutive batches, one after the other, so that batches need none of their own.

    Written parts never change; the arrays live as long as any of their batches.
    """

    __slots__ = ("edits", "hashes", "tokens")

    def __init__(self, hashes: int, edits: int, tokens: int) -> None:
        """Make room for this many hashes, edits and tokens."""
        self.hashes = np.empty(hashes, np.uint64)
        self.edits = np.empty((edits, _COLUMNS), np.int64)
        self.tokens = np.empty(tokens, np.uint32)


class Scanned:
    """Events as arrays: edits, the hashes of all edits in order, and the tokens that edits refer to."""

    __slots__ = ("_begin", "_buffers", "_end")

    def __init__(self, buffers: ScanBuffers, begin: Sequence[int], end: Sequence[int]) -> None:
        """Take the part of the arrays from `begin` to `end`; both count hashes and edits."""
        self._buffers, self._begin, self._end = buffers, begin, end

    @property
    def edits(self) -> Edits:
        """One row for each event."""
        return self._buffers.edits[self._begin[_EDITS] : self._end[_EDITS]]

    @property
    def hashes(self) -> Hashes:
        """The hashes of all events."""
        return self._buffers.hashes[self._begin[_HASHES] : self._end[_HASHES]]

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """The tokens of these events and of others."""
        return self._buffers.tokens

    @staticmethod
    def have_size(edits: Edits, block_size: int) -> bool:
        """Return whether all stores have this block size, or none."""
        return bool(_all_of_size(edits, block_size))

    def events(self) -> Iterator[Event]:
        """Yield the events as objects."""
        first = 0
        for edit, count in enumerate(self.edits[:, _COUNT].tolist()):
            yield self.event(edit, first)
            first += count

    def event(self, edit: int, first: int) -> Event:
        """Return one of the events as an object; `first` hashes come before its own."""
        op, area, count, parent, has_parent, start, tokens, block_size = self.edits[edit].tolist()
        if op == Op.CLEARED:
            return AllBlocksCleared()
        hashes, medium = self.hashes[first : first + count].tolist(), PLACES[area][0]
        if op == Op.REMOVED:
            return BlockRemoved(hashes, medium)
        ids = self.tokens[start : start + tokens].tolist()
        return BlockStored(hashes, parent & U64 if has_parent else None, ids, block_size, None, medium, None)

    def longest_runs(self) -> Iterator[tuple[int | None, list[int]]]:
        """Yield the longest store without a parent and the longest with one: the parent and the hashes."""
        edits, ends = self.edits, np.cumsum(self.edits[:, _COUNT])
        for has_parent in (0, 1):
            rows = np.flatnonzero((edits[:, _OP] == Op.STORED) & (edits[:, HAS_PARENT] == has_parent))
            if len(rows):
                row = rows[np.argmax(edits[rows, _COUNT])]
                parent = int(edits[row, PARENT]) & U64 if has_parent else None
                yield parent, self.hashes[ends[row] - edits[row, _COUNT] : ends[row]].tolist()

    @staticmethod
    def join(parts: Sequence[Scanned]) -> Iterator[Scanned]:
        """Yield the events of several batches as few parts: neighbours are joined without a copy."""
        first = last = parts[0]
        for part in parts[1:]:
            if part._buffers is not last._buffers or part._begin is not last._end:
                yield Scanned(first._buffers, first._begin, last._end)
                first = part
            last = part
        yield Scanned(first._buffers, first._begin, last._end)


class ScannedBatch(Scanned):
    """A batch as arrays."""

    __slots__ = ("data_parallel_rank", "ts")

    mark: Mark | None = None
    skipped = 0

    def __init__(self, ts: float, buffers: ScanBuffers, begin: Sequence[int], totals: Sequence[int]) -> None:
        """Take the result of a scan."""
        self._buffers, self._begin, self._end = buffers, begin, totals
        self.ts = ts
        self.data_parallel_rank = totals[_RANK] if totals[_HAS_RANK] else None

    def change(self) -> Change:
        """Return the batch's effect on the set of held blocks."""
        end = self._end
        return Change(end[_WIPED] == 1, end[_BLOCKS], end[_DIGEST] & U64)


class Scanner:
    """Decodes batches: a `decode` for a subscriber that feeds an index. Not for several threads at once."""

    def __init__(self, tokens: bool = False) -> None:
        """Start with room for some hundred events; it grows on demand."""
        self._buffers = ScanBuffers(4096, 256, 1 << 15 if tokens else 0)
        self._begin = [0] * _TOTALS  # where the next batch begins
        self._totals = np.zeros(_TOTALS, np.int64)
        self.scanned = self.decoded = 0

    def __call__(self, payload: bytes) -> ScannedBatch | DecodedBatch:
        """Read a batch in either encoding. `ValueError` if the payload is not a batch at all."""
        data = np.frombuffer(payload, np.uint8)
        while status := _scan(
            data, self._buffers.hashes, self._buffers.edits, self._buffers.tokens, self._totals
        ):
            self._totals[:_RANK] = self._begin[:_RANK]
            if status == _OTHER:
                self.decoded += 1
                return decode_batch(payload, tokens=len(self._buffers.tokens) > 0)
            self._move()
        self.scanned += 1
        begin, self._begin = self._begin, self._totals.tolist()
        return ScannedBatch(_TS.unpack_from(payload, 2)[0], self._buffers, begin, self._begin)

    def _move(self) -> None:
        """Switch to empty arrays; twice as large, if the batch did not fit into empty ones.

        Each element takes at least a byte of the batch, so the batch's size bounds the growth.
        """
        full, times = self._buffers, 1 if any(self._begin[:_RANK]) else 2
        self._buffers = ScanBuffers(
            times * len(full.hashes), times * len(full.edits), times * len(full.tokens)
        )
        self._begin = [0] * _TOTALS
        self._totals[:] = 0
