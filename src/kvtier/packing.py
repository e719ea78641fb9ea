"""The packed form of a block: bfloat16 values without loss in 0.77 of their bytes.

Sign and mantissa of KV do not compress, exponents do: they have 2 to 3 bits of entropy in 8. A packed block
keeps a byte of sign and mantissa for each value and a 4-bit code for its exponent, relative to the largest
one of its channel. The few values that no code fits are *exceptions*, kept whole in a list that all pages of
the block share. The length depends only on the number of values, never on the data, so rows stay rows of one
length. A block with more exceptions than the list has room for does not pack.

    head        number of exceptions, check of the shape, and for each unit: its base exponent and the index
                of its first exception
    exceptions  position in the unit and value of each
    scales      2 bits for each channel of each unit
    codes       4 bits for each value
    rest        sign and mantissa of each value: 1 byte

A *unit* is `unit_tokens` rows of as many channels as lie together for a token in a page. Cutting pages into
units in another way is never wrong, it only changes how many exceptions there are. docs/formats.md has the
bytes.

`pack_python` and `unpack_python` are the specification; `kvtier.native._packing` does the same in C, without
the GIL. Nothing here needs torch. Threads may pack and unpack different blocks at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvtier.native import form_of, uses_c

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

FORMAT = "packed1"
"""The name of this form. It is part of the namespace of packed rows."""
LEAST_CHANNELS = 64
"""A unit has at least as many channels, so that the room for the heads of units depends on no shape."""
_UNIT_TOKENS, _LEAST_UNIT_TOKENS = 16, 8
_MOST_UNIT_VALUES = 1 << 16  # positions of exceptions have 16 bits
_VALUES_PER_EXCEPTION = 256
_LEAST_EXCEPTIONS = 64
_ALIGNMENT = 64
_HEAD_WORDS = 2

_ZERO_CODE, _EXCEPTION_CODE = 14, 15
_MOST_SCALE, _SCALE_STEP = 3, 4


class BlockFormat(NamedTuple):
    """The layout of packed blocks of one size: the offset of each part, and the bytes of the whole."""

    unit_tokens: int
    max_exceptions: int
    exceptions: int
    scales: int
    codes: int
    rest: int
    bytes: int


def block_format(raw_bytes: int, block_size: int) -> BlockFormat | None:
    """Return the format of blocks of `raw_bytes` of bfloat16 with `block_size` tokens.

    `None` if such blocks are not packed: their tokens are too few to share scales.
    """
    rows, num_values = unit_tokens(block_size), raw_bytes // 2
    if rows < _LEAST_UNIT_TOKENS or raw_bytes % (2 * rows * LEAST_CHANNELS):
        return None
    # With the two words at their head, the lists of a block of many pages end with a whole page of memory.
    max_exceptions = max(_LEAST_EXCEPTIONS, num_values // _VALUES_PER_EXCEPTION - _HEAD_WORDS)
    exceptions = 4 * (_HEAD_WORDS + num_values // (rows * LEAST_CHANNELS))
    scales = _aligned(exceptions + 4 * max_exceptions)
    codes = _aligned(scales + num_values // (4 * rows))
    rest = _aligned(codes + num_values // 2)
    return BlockFormat(rows, max_exceptions, exceptions, scales, codes, rest, _aligned(rest + num_values))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def unit_tokens(block_size: int) -> int:
    """Return the number of rows of a unit: the largest divisor of a block's tokens up to 16."""
    return next(rows for rows in range(min(_UNIT_TOKENS, block_size), 0, -1) if block_size % rows == 0)


def pages_fit(page_bytes: Iterable[int], block_size: int) -> bool:
    """Return whether all pages of a block can be cut into units."""
    unit_bytes = 2 * unit_tokens(block_size) * LEAST_CHANNELS
    return unit_tokens(block_size) >= _LEAST_UNIT_TOKENS and not any(
        size % unit_bytes for size in page_bytes
    )


def name_rows(packed_groups: Iterable[bool], raw_row_bytes: int) -> str:
    """Return what tells packed rows apart in a namespace: the form, the groups that have it, and the length
    that the rows would have without it.
    """
    return f"x{FORMAT}x{''.join('rp'[is_packed] for is_packed in packed_groups)}x{raw_row_bytes}"


def raw_row_bytes_of(namespace: str) -> int | None:
    """Return the length that the rows of a namespace would have without packing; `None` if it is theirs."""
    found = re.search(rf"x{FORMAT}x[rp]+x([0-9]+)$", namespace)
    return None if found is None else int(found[1])


class PageShape(NamedTuple):
    """The bytes of a page, and the number of values from one token to the next; 0 if that is not known."""

    bytes: int
    token_values: int

    def channels(self, rows: int) -> int:
        """Return the channels of the units of `rows` rows that the page is cut into.

        They are the values of a token that lie together, unless those are too few or too many.
        """
        fits = (
            LEAST_CHANNELS <= self.token_values <= _MOST_UNIT_VALUES // rows
            and self.token_values % 4 == 0
            and self.bytes % (2 * rows * self.token_values) == 0
        )
        return self.token_values if fits else LEAST_CHANNELS


def shape_check(form: BlockFormat, shapes: Sequence[PageShape]) -> int:
    """Return the word that tells blocks of these pages from others."""
    rows = form.unit_tokens
    sizes, channels = [shape.bytes for shape in shapes], [shape.channels(rows) for shape in shapes]
    return crc32(np.array([rows, *sizes, *channels], "<i8").tobytes())


class PackedPages:
    """The pages of one group on an engine, and their packed blocks in the pool.

    `pages` has an int8 array `(num_blocks, bytes)` for each page of a block, in the order of the image, and
    `shapes` the shape of each. The blocks of slot s begin `offset` bytes into row s.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.uint8],
        offset: int,
        form: BlockFormat,
        pages: Sequence[npt.NDArray[np.int8]],
        shapes: Sequence[PageShape],
    ) -> None:
        self.form = form
        self._rows, self._pages = rows, tuple(pages)
        self._channels = np.array([shape.channels(form.unit_tokens) for shape in shapes], np.int64)
        self._geometry = np.array([offset, shape_check(form, shapes), *form], np.int64)

    def store(self, slots: Ints, indices: Ints, blocks: Ints) -> npt.NDArray[np.bool_]:
        """Pack blocks into their slots; return which of them packed. The others' bytes must not be used."""
        counts = np.empty(len(blocks), np.int64)
        pack(self._rows, self._pages, self._channels, self._geometry, slots, indices, blocks, counts)
        return counts <= self.form.max_exceptions

    def load(self, slots: Ints, indices: Ints, blocks: Ints) -> npt.NDArray[np.bool_]:
        """Unpack blocks from their slots; return which of them did. The others are no packed blocks."""
        counts = np.empty(len(blocks), np.int64)
        unpack(self._rows, self._pages, self._channels, self._geometry, slots, indices, blocks, counts)
        return counts >= 0


class Heads:
    """The heads of the packed blocks of one group in the pool.

    They tell of blocks that were packed or unpacked elsewhere. The blocks of slot s begin `offset` bytes
    into row s.
    """

    def __init__(
        self, rows: npt.NDArray[np.uint8], offset: int, form: BlockFormat, check: int, per_chunk: int
    ) -> None:
        self._least, self._room = np.uint64(check << 32), np.uint64(form.max_exceptions)
        strides = (rows.strides[0], form.bytes)
        self._words = np.ndarray((len(rows), per_chunk), "<u8", rows, offset, strides)

    def fit(self, slots: Ints, indices: Ints) -> npt.NDArray[np.bool_]:
        """Return which blocks are packed blocks of this shape, and did pack."""
        fits: npt.NDArray[np.bool_] = self._words[slots, indices] - self._least <= self._room
        return fits


# -- the Python form ------------------------------------------------------------------------------


def pack_python(
    rows: npt.NDArray[np.uint8],
    pages: tuple[npt.NDArray[np.int8], ...],
    channels: Ints,
    geometry: Ints,
    slots: Ints,
    indices: Ints,
    blocks: Ints,
    counts: Ints,
    /,
) -> None:
    """Pack blocks, and write how many exceptions each has. With too many the block is not whole."""
    offset, check, form = _read_geometry(geometry)
    for at, (slot, index, block) in enumerate(
        zip(slots.tolist(), indices.tolist(), blocks.tolist(), strict=True)
    ):
        first = offset + index * form.bytes
        packed = rows[slot, first : first + form.bytes]
        packed[:] = 0
        counts[at] = _pack_block(packed, [page[block] for page in pages], channels, form, check)


def unpack_python(
    rows: npt.NDArray[np.uint8],
    pages: tuple[npt.NDArray[np.int8], ...],
    channels: Ints,
    geometry: Ints,
    slots: Ints,
    indices: Ints,
    blocks: Ints,
    counts: Ints,
    /,
) -> None:
    """Unpack blocks, and write how many exceptions each has: -1 for bytes that are no packed block."""
    offset, check, form = _read_geometry(geometry)
    for at, (slot, index, block) in enumerate(
        zip(slots.tolist(), indices.tolist(), blocks.tolist(), strict=True)
    ):
        first = offset + index * form.bytes
        packed = rows[slot, first : first + form.bytes]
        counts[at] = _unpack_block(packed, [page[block] for page in pages], channels, form, check)


def _read_geometry(geometry: Ints) -> tuple[int, int, BlockFormat]:
    offset, check, *form = geometry.tolist()
    return offset, check, BlockFormat(*form)


class _Unit(NamedTuple):
    """The parts of one unit, as views."""

    values: npt.NDArray[np.uint16]
    scales: npt.NDArray[np.uint8]
    codes: npt.NDArray[np.uint8]
    rest: npt.NDArray[np.uint8]


def _units(
    packed: npt.NDArray[np.uint8], pages: list[Any], channels: Ints, form: BlockFormat
) -> Iterator[_Unit]:
    done, rows = 0, form.unit_tokens
    for page, width in zip(pages, channels.tolist(), strict=True):
        for values in page.view("<u2").reshape(-1, rows, width):
            first, last = done, done + rows * width
            yield _Unit(
                values,
                packed[form.scales + first // (4 * rows) : form.scales + last // (4 * rows)],
                packed[form.codes + first // 2 : form.codes + last // 2],
                packed[form.rest + first : form.rest + last],
            )
            done = last


def _pack_block(
    packed: npt.NDArray[np.uint8], pages: list[Any], channels: Ints, form: BlockFormat, check: int
) -> int:
    head = packed[: form.exceptions].view("<u4")
    exceptions = packed[form.exceptions : form.scales].view("<u4")
    count = 0
    for number, unit in enumerate(_units(packed, pages, channels, form)):
        exponents = (unit.values >> 7 & 0xFF).astype(np.int32)
        highest = np.where(exponents == 0xFF, 0, exponents).max(axis=0)
        base = int(highest.max())
        scales = np.minimum((base - highest) // _SCALE_STEP, _MOST_SCALE)
        unit.scales[:] = np.bitwise_or.reduce(scales.reshape(-1, 4) << [0, 2, 4, 6], axis=1)
        below = base - _SCALE_STEP * scales - exponents
        codes = np.where((below >= 0) & (below < _ZERO_CODE), below, _EXCEPTION_CODE)
        codes[exponents == 0] = _ZERO_CODE
        unit.codes[:] = codes.reshape(-1, 2) @ [1, 16]
        unit.rest[:] = (unit.values & 0x7F | unit.values >> 8 & 0x80).reshape(-1)
        head[_HEAD_WORDS + number] = base << 24 | min(count, form.max_exceptions)
        positions = np.flatnonzero(codes == _EXCEPTION_CODE)
        some = positions[: max(0, form.max_exceptions - count)]
        exceptions[count : count + len(some)] = some | unit.values.reshape(-1)[some].astype(np.uint32) << 16
        count += len(positions)
    head[0], head[1] = min(count, form.max_exceptions + 1), check
    return count


def _unpack_block(
    packed: npt.NDArray[np.uint8], pages: list[Any], channels: Ints, form: BlockFormat, check: int
) -> int:
    head = packed[: form.exceptions].view("<u4")
    count, units = int(head[0]), list(_units(packed, pages, channels, form))
    starts = [*(head[_HEAD_WORDS : _HEAD_WORDS + len(units)] & 0xFFFFFF).tolist(), count]
    if count > form.max_exceptions or head[1] != check or starts[0] or starts != sorted(starts):
        return -1
    exceptions = packed[form.exceptions : form.exceptions + 4 * count].view("<u4")
    for number, unit in enumerate(units):
        base = int(head[_HEAD_WORDS + number]) >> 24
        scales = (unit.scales[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1).astype(np.int32)
        codes = np.stack([unit.codes & 15, unit.codes >> 4], axis=1).reshape(unit.values.shape)
        exponents = (base - _SCALE_STEP * scales - codes) & 0xFF
        exponents[codes == _ZERO_CODE] = 0
        rest = unit.rest.astype(np.uint16).reshape(unit.values.shape)
        unit.values[:] = (rest & 0x80) << 8 | exponents.astype(np.uint16) << 7 | rest & 0x7F
        own = exceptions[starts[number] : starts[number + 1]]
        positions = own & 0xFFFF
        if (positions >= unit.values.size).any():
            return -1
        unit.values[np.divmod(positions, unit.values.shape[1])] = own >> 16
    return count


if uses_c("packing"):
    from kvtier.native import _packing

    pack, unpack = _packing.pack, _packing.unpack
else:
    pack, unpack = pack_python, unpack_python

PACKED_BY = form_of("packing")
"""Whether C or Python packs the blocks of an engine on the host."""
