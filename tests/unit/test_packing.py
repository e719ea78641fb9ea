"""Packed blocks give back every bit of what went in, in C and in Python, whatever went in; and bytes that
are no packed block are reported, never used.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import packing
from kvtier.packing import (
    BlockFormat,
    PackedPages,
    PageShape,
    block_format,
    pack_python,
    pages_fit,
    unit_tokens,
    unpack_python,
)

_packing = pytest.importorskip(
    "kvtier.native._packing", reason="kvtier.native._packing was not compiled here"
)

VALUES = int(os.environ.get("KVTIER_PACKED_VALUES", str(1 << 22)))
"""Random values that make a round trip; the C form takes a second for 10^9."""
SPECIAL = np.array(
    [
        0,
        0x8000,
        1,
        0x8001,
        0x7F,
        0x807F,
        0x80,
        0x8080,
        0x7F7F,
        0xFF7F,
    ]  # zeros, subnormals, smallest, largest
    + [0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x7FFF, 0xFFFF],  # infinities and NaNs
    np.uint16,
)

Bits = npt.NDArray[np.uint16]


class Block:
    """Pages of bits in an engine with a few blocks, and a pool of rows for their packed form."""

    def __init__(self, shapes: Sequence[PageShape], tokens: int, *, per_slot: int = 1, gap: int = 0) -> None:
        form = block_format(sum(shape.bytes for shape in shapes), tokens)
        assert form is not None
        self.form: BlockFormat = form
        self.shapes, self.per_slot = shapes, per_slot
        self.pages = [np.zeros((4, shape.bytes + gap), np.int8)[:, : shape.bytes] for shape in shapes]
        self.rows = np.full((3, 64 + per_slot * form.bytes), 0xA5, np.uint8)

    def write(self, block: int, bits: Bits) -> None:
        first = 0
        for page in self.pages:
            page[block] = bits[first : first + page.shape[1] // 2].view(np.int8)
            first += page.shape[1] // 2

    def read(self, block: int) -> Bits:
        return np.concatenate([page[block] for page in self.pages]).view(np.uint16)

    @property
    def num_values(self) -> int:
        return sum(shape.bytes for shape in self.shapes) // 2

    def packed(self) -> PackedPages:
        return PackedPages(self.rows, 64, self.form, self.pages, self.shapes)

    def run(self, function: Callable[..., None], slot: int, index: int, block: int) -> int:
        """Call a form of `pack` or `unpack` for one block, and return its count."""
        packed, count = self.packed(), np.empty(1, np.int64)
        function(
            self.rows, packed._pages, packed._channels, packed._geometry,
            np.array([slot]), np.array([index]), np.array([block]), count,
        )  # fmt: skip
        return int(count[0])


def kv(rng: np.random.Generator, shape: tuple[int, ...]) -> Bits:
    """Return bits as of KV: normal values whose scale differs by channel."""
    scale = np.exp2(rng.normal(0, 2, shape[-1]))
    return bits_of(rng.standard_normal(shape) * scale)


def bits_of(values: Any) -> Bits:
    bits: Bits = (np.asarray(values, np.float32).reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
    return bits


def draw_bits(rng: np.random.Generator, count: int) -> Bits:
    """Return bits of one of several kinds, from KV to anything."""
    kind = rng.integers(6)
    bits = kv(rng, (count // 64, 64)) if kind < 4 else rng.integers(0, 1 << 16, count, np.uint16)
    if kind == 1:
        bits[rng.random(count) < 0.002] = rng.choice(SPECIAL, 1)
    if kind == 2:
        bits = np.where(rng.random(count) < 0.5, np.uint16(0), bits)
    if kind == 3:
        bits[rng.integers(count, size=rng.integers(9))] = rng.choice(SPECIAL)
    if kind == 5:
        bits[:] = rng.choice(SPECIAL)
    return bits


SHAPES = st.sampled_from(
    [
        ([(16 * 64 * 2, 64)], 16),
        ([(16 * 128 * 2, 64), (16 * 128 * 2, 128)], 16),  # two ways to cut a page
        ([(8 * 1024 * 2, 1024)] * 2, 8),
        ([(16 * 576 * 2, 576), (16 * 128 * 2, 128)], 16),  # latents, and an indexer's pages
        ([(64 * 192 * 2, 192)], 64),
        ([(272 * 64 * 2, 64)], 272),
        ([(16 * 96 * 2 * 2, 96)], 16),
        ([(16 * 64 * 2, 0)] * 3, 16),
        ([(24 * 80 * 8 * 2, 640)], 24),
    ]
)


@given(st.integers(0, 2**32), SHAPES, st.integers(1, 3), st.sampled_from([0, 2, 6]))
def test_c_and_python_agree(seed: int, shape: Any, per_slot: int, gap: int) -> None:
    """They write the same bytes, count the same exceptions, and read back the same bits."""
    rng = np.random.default_rng(seed)
    shapes, tokens = [PageShape(*page) for page in shape[0]], shape[1]
    block = Block(shapes, tokens, per_slot=per_slot, gap=gap)
    bits, index = draw_bits(rng, block.num_values), int(rng.integers(per_slot))
    block.write(2, bits)
    in_python, in_c = (
        (block.run(function, 1, index, 2), block.rows.tobytes()) for function in (pack_python, _packing.pack)
    )
    assert in_python == in_c
    count = in_c[0]
    for function in (unpack_python, _packing.unpack):
        block.write(3, np.zeros_like(bits))
        if count <= block.form.max_exceptions:
            assert block.run(function, 1, index, 3) == count
            assert (block.read(3) == bits).all()
        else:
            assert block.run(function, 1, index, 3) == -1
    assert (block.read(2) == bits).all()
    outside = np.delete(
        block.rows[1], np.s_[64 + index * block.form.bytes : 64 + (index + 1) * block.form.bytes]
    )
    assert (outside == 0xA5).all()
    assert (block.rows[[0, 2]] == 0xA5).all()


POSITIONS = (0, 1, 2, 3, 63, 64, 65, 510, 511, 960, 1022, 1023)
"""First, last and other rows and channels of a unit of 16 rows of 64 channels, even and odd."""


@pytest.mark.parametrize("position", POSITIONS)
def test_every_value_in_every_kind_of_position(position: int) -> None:
    """Each of the 65,536 patterns has a unit for itself, whose other values are those of KV or zero."""
    _expect_values_survive(_packing.pack, _packing.unpack, position)


@pytest.mark.exhaustive
def test_every_value_in_python() -> None:
    _expect_values_survive(pack_python, unpack_python, 511)


def _expect_values_survive(
    pack: Callable[..., None], unpack: Callable[..., None], position: int, num_units: int = 1024
) -> None:
    block = Block([PageShape(16 * 64 * 2, 64)] * num_units, 16)
    usual = bits_of(np.random.default_rng(position).standard_normal((num_units, 16 * 64)))
    usual = usual.reshape(num_units, -1)
    for first in range(0, 1 << 16, num_units):
        values = np.arange(first, first + num_units, dtype=np.uint16)
        bits = usual.copy()
        bits[(values >> 7 & 0xFF) >= 136] = 0  # beside a huge value, others do not fit their codes
        bits[:, position] = values
        block.write(1, bits.reshape(-1))
        assert block.run(pack, 0, 0, 1) <= block.form.max_exceptions
        block.write(2, ~bits.reshape(-1))
        assert block.run(unpack, 0, 0, 2) >= 0
        assert (block.read(2) == bits.reshape(-1)).all()


def test_many_random_values_survive() -> None:
    """Values from narrow ranges of exponents, which pack, and any bits, which seldom do."""
    block = Block([PageShape(16 * 1024 * 2, 1024)] * 8, 16)
    rng = np.random.default_rng(int(os.environ.get("KVTIER_FUZZ_SEED", "0")))
    packed = 0
    for _ in range(-(-VALUES // block.num_values)):
        bits = rng.integers(0, 1 << 16, block.num_values, np.uint16)
        lowest, width = rng.integers(0, 240), rng.integers(1, 16)
        exponents = lowest + (bits >> 7) % width
        bits = (bits & 0x807F) | (exponents.astype(np.uint16) << 7)
        some = rng.integers(block.num_values, size=rng.integers(block.form.max_exceptions))
        odd = rng.integers(0, 1 << 16, len(some), np.uint16)
        is_huge = (odd >> 7 & 0xFF) > lowest + width
        bits[some] = np.where(is_huge, odd | 0x7F80, odd)  # infinite or NaN
        block.write(0, bits)
        if block.run(_packing.pack, 0, 0, 0) > block.form.max_exceptions:
            continue
        packed += block.num_values
        block.write(1, ~bits)
        assert block.run(_packing.unpack, 0, 0, 1) >= 0
        assert (block.read(1) == bits).all()
    assert packed > VALUES / 4


@pytest.mark.parametrize("pack", [_packing.pack, pack_python], ids=["c", "python"])
def test_a_block_packs_up_to_its_number_of_exceptions(pack: Callable[..., None]) -> None:
    block = Block([PageShape(16 * 64 * 2, 64)] * 2, 16)
    for extra in (0, 1):
        bits = np.full(block.num_values, 0x3F80, np.uint16)
        bits[: block.form.max_exceptions + extra] = 0x7FC0
        block.write(0, bits)
        assert block.run(pack, 0, 0, 0) == block.form.max_exceptions + extra
        assert block.run(_packing.unpack, 0, 0, 1) == (-1 if extra else block.form.max_exceptions)


def test_equal_blocks_make_equal_bytes() -> None:
    """Nothing of what a slot had before remains, not even where nothing is read."""
    block = Block([PageShape(16 * 128 * 2, 128)] * 2, 16)  # of units that need less than the room for heads
    block.write(0, kv(np.random.default_rng(0), (32, 128)))
    rows = []
    for filling in (0, 0xFF):
        block.rows[:] = filling
        block.packed().store(*(np.array([at]) for at in (0, 0, 0)))
        rows.append(block.rows[0, 64:].tobytes())
    assert rows[0] == rows[1]


def test_the_format_of_an_8b_model() -> None:
    """32 layers of K and V of 8 heads: the bytes that docs/formats.md gives as the example."""
    form = block_format(64 * 16 * 1024 * 2, 16)
    assert form is not None
    assert form.bytes == 1_609_728
    assert 2_097_152 / form.bytes > 1.30


@pytest.mark.parametrize("tokens", [16, 32, 64, 128, 272])
@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256, 576, 1024])
def test_every_usual_shape_packs_to_less_than_four_fifths(tokens: int, width: int) -> None:
    raw = 8 * tokens * width * 8 * 2
    form = block_format(raw, tokens)
    assert form is not None
    assert form.bytes < 0.78 * raw


def test_few_tokens_or_channels_do_not_pack() -> None:
    assert block_format(7 * 1024 * 2, 7) is None
    assert block_format(13 * 1024 * 2, 13) is not None  # one unit of 13 rows
    assert not pages_fit([16 * 32 * 2], 16)
    assert not pages_fit([16 * 64 * 2, 16 * 64], 16)
    assert pages_fit([16 * 64 * 2] * 3, 16)
    assert [unit_tokens(size) for size in (1, 4, 16, 24, 32, 272, 17)] == [1, 4, 16, 12, 16, 16, 1]


def test_the_size_does_not_depend_on_how_pages_are_cut() -> None:
    """Ranks know only the sizes of the others' blocks, not their layout."""
    raw = 16 * 1024 * 2
    for values in (1024, 512, 128, 64, 0, 48):
        shape = PageShape(raw, values)
        units = raw // (2 * 16 * shape.channels(16))
        form = block_format(raw, 16)
        assert form is not None
        assert 4 * (2 + units) <= form.exceptions


# -- bytes that are no packed block ------------------------------------------------------------------


@pytest.mark.parametrize("unpack", [_packing.unpack, unpack_python], ids=["c", "python"])
def test_rows_of_another_shape_do_not_unpack(unpack: Callable[..., None]) -> None:
    """A row that was packed with other units has the right length, and would give wrong values."""
    one, other = Block([PageShape(16 * 128 * 2, 128)], 16), Block([PageShape(16 * 128 * 2, 64)], 16)
    one.write(0, kv(np.random.default_rng(0), (16, 128)))
    one.packed().store(*(np.array([0]) for _ in range(3)))
    other.rows[:] = one.rows
    assert one.run(unpack, 0, 0, 1) >= 0
    assert other.run(unpack, 0, 0, 1) == -1


@pytest.mark.parametrize("unpack", [_packing.unpack, unpack_python], ids=["c", "python"])
@pytest.mark.parametrize(
    ("at", "word"),
    [
        (0, 1 << 31),
        (0, 65),  # one more than there is room for
        (4, 12345),
        (8, 1),  # the first unit does not begin with the first exception
        (12, 60),  # begins behind the last exception
    ],
)
def test_a_damaged_head_is_noticed(unpack: Callable[..., None], at: int, word: int) -> None:
    block = Block([PageShape(16 * 64 * 2, 64)] * 2, 16)
    block.write(0, bits_of(np.ones(block.num_values)))
    block.packed().store(*(np.array([0]) for _ in range(3)))
    assert block.run(unpack, 0, 0, 1) == 0
    struct.pack_into("<I", block.rows[0], 64 + at, word)
    assert block.run(unpack, 0, 0, 1) == -1


@pytest.mark.parametrize("unpack", [_packing.unpack, unpack_python], ids=["c", "python"])
def test_an_exception_outside_of_its_unit_is_refused(unpack: Callable[..., None]) -> None:
    """It would be written into other pages."""
    block = Block([PageShape(16 * 64 * 2, 64)], 16)
    bits = bits_of(np.ones(block.num_values))
    bits[5] = 0x7FC0
    block.write(0, bits)
    assert block.run(_packing.pack, 0, 0, 0) == 1
    struct.pack_into("<I", block.rows[0], 64 + block.form.exceptions, 16 * 64 | 0x7FC0 << 16)
    block.write(2, np.zeros_like(bits))
    assert block.run(unpack, 0, 0, 1) == -1
    assert not block.read(2).any()


@given(st.integers(0, 2**32))
def test_any_bytes_are_refused_or_stay_within_their_pages(seed: int) -> None:
    """C checks what it reads: nothing outside of the block's own pages changes."""
    rng = np.random.default_rng(seed)
    block = Block([PageShape(16 * 64 * 2, 64), PageShape(16 * 128 * 2, 128)], 16, gap=64)
    block.write(0, kv(rng, (block.num_values // 64, 64)))
    block.packed().store(*(np.array([0]) for _ in range(3)))
    for _ in range(rng.integers(1, 6)):  # in the head, in the exceptions, or anywhere
        end = rng.choice([16, block.form.scales, block.form.bytes])
        block.rows[0, 64 + rng.integers(end)] = rng.integers(256)
    before = [page.base.copy() for page in block.pages]
    results = []
    for function in (unpack_python, _packing.unpack):
        block.write(1, np.zeros(block.num_values, np.uint16))
        results.append((block.run(function, 0, 0, 1), block.read(1).tobytes()))
    assert results[0][0] == results[1][0]
    assert results[0] == results[1] or results[0][0] == -1
    for page, old in zip(block.pages, before, strict=True):
        changed = page.base != old
        changed[1, : page.shape[1]] = False
        assert not changed.any()


ARGUMENTS = ("rows", "pages", "channels", "geometry", "slots", "indices", "blocks", "counts")


@pytest.mark.parametrize("function", [_packing.pack, _packing.unpack])
@pytest.mark.parametrize(
    "break_it",
    [
        lambda a: a | {"slots": a["slots"] + 3},
        lambda a: a | {"slots": a["slots"] - 1},
        lambda a: a | {"indices": a["indices"] + 1},
        lambda a: a | {"indices": a["indices"] - 1},
        lambda a: a | {"blocks": a["blocks"] + 4},
        lambda a: a | {"blocks": a["blocks"] - 1},
        lambda a: a | {"blocks": np.zeros(2, np.int64)},
        lambda a: a | {"blocks": a["blocks"].astype(np.int32)},
        lambda a: a | {"counts": np.zeros(0, np.int64)},
        lambda a: a | {"rows": a["rows"][:, :-8]},
        lambda a: a | {"rows": a["rows"][0]},
        lambda a: a | {"rows": None},
        lambda a: a | {"pages": list(a["pages"])},
        lambda a: a | {"pages": a["pages"] * 2},
        lambda a: a | {"pages": (a["pages"][0][:, :-2], *a["pages"][1:])},
        lambda a: a | {"pages": (a["pages"][0].astype(np.int16), *a["pages"][1:])},
        lambda a: a | {"channels": a["channels"] * 0},
        lambda a: a | {"channels": a["channels"] + 2},
        lambda a: a | {"channels": a["channels"][:1]},
        lambda a: a | {"geometry": a["geometry"][:-1]},
        lambda a: a | {"geometry": a["geometry"] - 1},
        lambda a: a | {"geometry": np.where(np.arange(9) == 3, 1 << 40, a["geometry"])},
        lambda a: a | {"geometry": np.where(np.arange(9) == 2, 0, a["geometry"])},
        lambda a: a | {"geometry": np.where(np.arange(9) == 8, 4, a["geometry"])},
        lambda a: a | {"geometry": np.where(np.arange(9) >= 3, -(1 << 62), a["geometry"])},
    ],
)
def test_c_refuses_arguments_that_do_not_fit(
    function: Callable[..., None], break_it: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    block = Block([PageShape(16 * 64 * 2, 64)] * 2, 16)
    packed = block.packed()
    ints = [np.zeros(1, np.int64) for _ in range(4)]
    values = (block.rows, packed._pages, packed._channels, packed._geometry, *ints)
    arguments = dict(zip(ARGUMENTS, values, strict=True))
    before = block.rows.tobytes()
    with pytest.raises((ValueError, TypeError, BufferError)):
        function(*break_it(arguments).values())
    assert block.rows.tobytes() == before


def test_the_switch_chooses_c() -> None:
    assert packing.pack is (_packing.pack if packing.PACKED_BY == "c" else pack_python)
