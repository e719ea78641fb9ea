"""The kernels that pack the pages of an engine's blocks, and unpack them (`kvtier.packing` has the form).

    pack      units of pages  ->  scales, codes, rest, each in its part of the packed block
              their exceptions, in order, and how many  ->  scratch
              the exceptions of all units of a block  ->  the block's list, and its head
    unpack    units of packed blocks  ->  pages

A unit is packed by one program. The list of a block is shared by its units, and where a unit's exceptions
begin is known only when all units before it are counted. So the program that is last to pack a unit of a
block lays them out, in an order that depends on nothing but the values: the bytes are those that C and
Python make. A block with too many exceptions says so in its head, which the host reads when the block has
arrived.

Tables on the device have the addresses of the units of any block. The arguments of a launch are those of
`kernels`: block ids and, behind them, the addresses of packed blocks. Positions of exceptions that are
outside of their unit change nothing, so damaged bytes write to no other memory.

This needs Triton, on a CUDA device or in Triton's interpreter. One thread at a time may use an object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.pieces import MOST_BLOCKS, PackedUnits, most_kept


class Share(NamedTuple):
    """A kernel's share of the device. A program has as many units under way as its threads have two words of
    each row for.
    """

    warps: int
    programs: int

    def units(self, lanes: int) -> int:
        """Return the number of units, each with so many words in a row, that a program has under way."""
        return max(1, 64 * self.warps // lanes)


# docs/cuda-constants.md has the measurements for these.
PACK, UNPACK = Share(8, 64), Share(8, 64)

_HEAD_WORDS = tl.constexpr(2)
_ZERO = tl.constexpr(14)
_EXCEPTION = tl.constexpr(15)


@triton.jit
def _finite(exponent):  # type: ignore[no-untyped-def]
    return tl.where(exponent < 255, exponent, 0)


@triton.jit
def _scale(base, highest):  # type: ignore[no-untyped-def]
    return tl.minimum((base - highest) >> 2, 3)


@triton.jit
def _code(exponent, first):  # type: ignore[no-untyped-def]
    below = first - exponent
    code = tl.where((below >= 0) & (below < _ZERO), below, _EXCEPTION)
    return tl.where(exponent == 0, _ZERO, code)


@triton.jit
def _rest(value):  # type: ignore[no-untyped-def]
    return (value & 0x7F) | ((value >> 8) & 0x80)


@triton.jit  # type: ignore[untyped-decorator]
def _keep(entries, rank, position, value, code, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keep the exceptions among some values, and return the ranks of those behind them."""
    found = code == _EXCEPTION
    tl.store(entries + rank, position | (value << 16), mask=found & (rank < LIMIT))
    return rank + found.to(tl.int32)


@triton.jit
def _fill(address, first, last):  # type: ignore[no-untyped-def]
    """Write zeros from byte `first` to byte `last` of a packed block; both are multiples of four."""
    words = address.to(tl.pointer_type(tl.int32), bitcast=True)
    for at in range(first // 4, last // 4, 1024):
        word = at + tl.arange(0, 1024)
        tl.store(words + word, tl.zeros((1024,), tl.int32), mask=word < last // 4)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    counted, kept, packed, check,
    UNITS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, MAX: tl.constexpr, LIST: tl.constexpr,
    SCALES: tl.constexpr, CODES: tl.constexpr, REST: tl.constexpr, BYTES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Write the head and the list of a block whose units are all `counted`, and zeros where nothing is."""
    UNIT_LANES: tl.constexpr = 64
    ENTRY_LANES: tl.constexpr = 32
    lane = tl.arange(0, UNIT_LANES)
    entry = tl.arange(0, ENTRY_LANES)[None, :]
    head = tl.multiple_of(packed.to(tl.pointer_type(tl.int32), bitcast=True), 4)
    exceptions = head + LIST // 4
    count = 0
    for first in range(0, UNITS, UNIT_LANES):
        unit = first + lane
        there = unit < UNITS
        word = tl.load(counted + unit, mask=there, other=0, cache_modifier=".cg")
        own = word & 0xFFFFFF
        start = count + tl.cumsum(own, 0) - own
        tl.store(head + _HEAD_WORDS + unit, (word - own) | tl.minimum(start, MAX), mask=there)
        entries = kept + unit * LIMIT
        taken = tl.minimum(own, MAX - tl.minimum(start, MAX))
        for j in range(0, tl.max(taken, 0), ENTRY_LANES):
            some = there[:, None] & (j + entry < taken[:, None])
            values = tl.load(entries[:, None] + j + entry, mask=some, other=0, cache_modifier=".cg")
            tl.store(exceptions + start[:, None] + j + entry, values, mask=some)
        count += tl.sum(own, 0)
    tl.store(head, tl.minimum(count, MAX + 1))
    tl.store(head + 1, check)
    _fill(packed, 4 * (_HEAD_WORDS + UNITS), LIST)
    _fill(packed, LIST + 4 * tl.minimum(count, MAX), SCALES)
    _fill(packed, SCALES + VALUES // (4 * ROWS), CODES)
    _fill(packed, CODES + VALUES // 2, REST)
    _fill(packed, REST + VALUES, BYTES)


@triton.jit(do_not_specialize=["num_blocks", "num_units"])  # type: ignore[untyped-decorator]
def _pack(  # type: ignore[no-untyped-def]
    table, args, num_blocks, num_units,
    UNITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROW_LANES: tl.constexpr,
    LANES: tl.constexpr, AT_ONCE: tl.constexpr, VALUES: tl.constexpr, MAX: tl.constexpr, LIST: tl.constexpr,
    SCALES: tl.constexpr, CODES: tl.constexpr, REST: tl.constexpr, BYTES: tl.constexpr, LIMIT: tl.constexpr,
    MOST_BLOCKS: tl.constexpr, FINISHES: tl.constexpr,
):  # fmt: skip
    """Pack the units of one width, some at once: rows, units, and lanes of four channels, in one word.

    The units of the last width (`FINISHES`) come when those of all others are packed. Whoever packs the last
    of a block finishes the block.
    """
    row, column = tl.arange(0, ROW_LANES)[:, None, None], tl.arange(0, LANES)[None, None, :]
    some = tl.arange(0, AT_ONCE)
    lane = row * (WIDTH // 4) + column
    # How many units of each block are packed; how many exceptions each unit has; and these, for each unit.
    packed_units = tl.load(table).to(tl.pointer_type(tl.int32), bitcast=True)
    counts = packed_units + MOST_BLOCKS
    kept = counts + num_blocks * UNITS
    total = num_blocks * num_units
    for first in range(tl.program_id(0) * AT_ONCE, total, tl.num_programs(0) * AT_ONCE):
        at = first + some
        is_unit = at < total
        index, unit = at // num_units, at % num_units
        block = tl.load(args + index, mask=is_unit, other=0)
        packed = tl.load(args + num_blocks + index, mask=is_unit, other=0)
        base = tl.load(table + 2 + unit)
        stride = tl.load(table + 2 + num_units + unit)
        number = tl.load(table + 2 + 2 * num_units + unit)
        before = tl.load(table + 2 + 3 * num_units + unit)  # values of the block that lie before the unit
        in_row = is_unit[None, :, None] & (column < WIDTH // 4)
        there = in_row & (row < ROWS)
        source = tl.multiple_of((base + block * stride).to(tl.pointer_type(tl.int64), bitcast=True), 8)
        word = tl.load(source[None, :, None] + lane, mask=there, other=0, eviction_policy="evict_first")
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
        v0, v1, v2, v3 = low & 0xFFFF, (low >> 16) & 0xFFFF, high & 0xFFFF, (high >> 16) & 0xFFFF
        e0, e1, e2, e3 = (v0 >> 7) & 0xFF, (v1 >> 7) & 0xFF, (v2 >> 7) & 0xFF, (v3 >> 7) & 0xFF
        h0, h1 = tl.max(_finite(e0), 0)[None, :, :], tl.max(_finite(e1), 0)[None, :, :]
        h2, h3 = tl.max(_finite(e2), 0)[None, :, :], tl.max(_finite(e3), 0)[None, :, :]
        top = tl.max(tl.maximum(tl.maximum(h0, h1), tl.maximum(h2, h3)), 2)[:, :, None]
        s0, s1, s2, s3 = _scale(top, h0), _scale(top, h1), _scale(top, h2), _scale(top, h3)
        c0, c1 = _code(e0, top - 4 * s0), _code(e1, top - 4 * s1)
        c2, c3 = _code(e2, top - 4 * s2), _code(e3, top - 4 * s3)

        scales = (packed + SCALES + before // (4 * ROWS)).to(tl.pointer_type(tl.int8), bitcast=True)
        codes = (packed + CODES + before // 2).to(tl.pointer_type(tl.int16), bitcast=True)
        rest = (packed + REST + before).to(tl.pointer_type(tl.int32), bitcast=True)
        word = s0 | (s1 << 2) | (s2 << 4) | (s3 << 6)
        tl.store(tl.multiple_of(scales, 16)[None, :, None] + column, word.to(tl.int8), mask=in_row)
        word = c0 | (c1 << 4) | (c2 << 8) | (c3 << 12)
        tl.store(tl.multiple_of(codes, 8)[None, :, None] + lane, word.to(tl.int16), mask=there)
        word = _rest(v0) | (_rest(v1) << 8) | (_rest(v2) << 16) | (_rest(v3) << 24)
        tl.store(tl.multiple_of(rest, 4)[None, :, None] + lane, word, mask=there)

        found = (c0 == _EXCEPTION).to(tl.int32) + (c1 == _EXCEPTION).to(tl.int32)
        found += (c2 == _EXCEPTION).to(tl.int32) + (c3 == _EXCEPTION).to(tl.int32)
        in_rows = tl.sum(found, 2)
        own = tl.sum(in_rows, 0)
        place = index * UNITS + number
        tl.store(counts + place, (tl.reshape(top, (AT_ONCE,)) << 24) | own, mask=is_unit)
        if tl.max(own, 0) > 0:
            rank = (tl.cumsum(in_rows, 0) - in_rows)[:, :, None] + tl.cumsum(found, 2) - found
            entries = (kept + place * LIMIT)[None, :, None]
            position = row * WIDTH + 4 * column
            rank = _keep(entries, rank, position, v0, c0, LIMIT)
            rank = _keep(entries, rank, position + 1, v1, c1, LIMIT)
            rank = _keep(entries, rank, position + 2, v2, c2, LIMIT)
            rank = _keep(entries, rank, position + 3, v3, c3, LIMIT)
        if FINISHES:
            tl.debug_barrier()  # all threads have written what they have counted and kept
            is_last = tl.atomic_add(packed_units + index, 1, mask=is_unit) == num_units - 1
            if tl.max((is_unit & is_last).to(tl.int32), 0) > 0:
                for unit_at in range(AT_ONCE):
                    mine = (some == unit_at) & is_unit & is_last
                    if tl.max(mine.to(tl.int32), 0) > 0:
                        done = (first + unit_at) // num_units
                        tl.store(packed_units + done, 0)
                        _finish(
                            counts + done * UNITS, kept + done * UNITS * LIMIT,
                            tl.load(args + num_blocks + done), tl.load(table + 1).to(tl.int32),
                            UNITS, VALUES, ROWS, MAX, LIST, SCALES, CODES, REST, BYTES, LIMIT,
                        )  # fmt: skip


@triton.jit
def _value(code, rest, first):  # type: ignore[no-untyped-def]
    exponent = tl.where(code == _ZERO, 0, (first - code) & 0xFF)
    return ((rest & 0x80) << 8) | (exponent << 7) | (rest & 0x7F)


@triton.jit(do_not_specialize=["num_blocks", "num_units"])  # type: ignore[untyped-decorator]
def _unpack(  # type: ignore[no-untyped-def]
    table, args, num_blocks, num_units,
    UNITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROW_LANES: tl.constexpr,
    LANES: tl.constexpr, AT_ONCE: tl.constexpr, MAX: tl.constexpr, LIST: tl.constexpr, SCALES: tl.constexpr,
    CODES: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Unpack the units of one width, some at once."""
    row, column = tl.arange(0, ROW_LANES)[:, None, None], tl.arange(0, LANES)[None, None, :]
    some, entry = tl.arange(0, AT_ONCE), tl.arange(0, 32)[None, :]
    lane = row * (WIDTH // 4) + column
    total = num_blocks * num_units
    for first in range(tl.program_id(0) * AT_ONCE, total, tl.num_programs(0) * AT_ONCE):
        at = first + some
        is_unit = at < total
        index, unit = at // num_units, at % num_units
        block = tl.load(args + index, mask=is_unit, other=0)
        packed = tl.load(args + num_blocks + index, mask=is_unit, other=0)
        base = tl.load(table + 2 + unit)
        stride = tl.load(table + 2 + num_units + unit)
        number = tl.load(table + 2 + 2 * num_units + unit)
        before = tl.load(table + 2 + 3 * num_units + unit)
        in_row = is_unit[None, :, None] & (column < WIDTH // 4)
        there = in_row & (row < ROWS)
        scales = (packed + SCALES + before // (4 * ROWS)).to(tl.pointer_type(tl.int8), bitcast=True)
        codes = (packed + CODES + before // 2).to(tl.pointer_type(tl.int16), bitcast=True)
        rest = (packed + REST + before).to(tl.pointer_type(tl.int32), bitcast=True)
        scale = tl.load(tl.multiple_of(scales, 16)[None, :, None] + column, mask=in_row, other=0).to(
            tl.int32
        )
        code = tl.load(tl.multiple_of(codes, 8)[None, :, None] + lane, mask=there, other=0).to(tl.int32)
        bits = tl.load(tl.multiple_of(rest, 4)[None, :, None] + lane, mask=there, other=0)
        head = tl.multiple_of(packed.to(tl.pointer_type(tl.int32), bitcast=True), 4)
        mine = tl.load(head + _HEAD_WORDS + number, mask=is_unit, other=0)
        # Behind the last unit comes a zero, or the first exception if the head has no room to spare.
        has_next = number + 1 < UNITS
        after = tl.load(head + _HEAD_WORDS + number + 1, mask=is_unit & has_next, other=0) & 0xFFFFFF
        count = tl.load(head, mask=is_unit, other=0)
        start = mine & 0xFFFFFF
        stop = tl.minimum(tl.where(has_next, after, count), MAX)
        top = ((mine >> 24) & 0xFF)[None, :, None]
        v0 = _value(code & 15, bits, top - 4 * (scale & 3))
        v1 = _value((code >> 4) & 15, bits >> 8, top - 4 * ((scale >> 2) & 3))
        v2 = _value((code >> 8) & 15, bits >> 16, top - 4 * ((scale >> 4) & 3))
        v3 = _value((code >> 12) & 15, bits >> 24, top - 4 * ((scale >> 6) & 3))
        low = (v0 | (v1 << 16)).to(tl.int64) & 0xFFFFFFFF
        high = (v2 | (v3 << 16)).to(tl.int64) << 32
        address = base + block * stride
        target = tl.multiple_of(address.to(tl.pointer_type(tl.int64), bitcast=True), 8)
        tl.store(target[None, :, None] + lane, low | high, mask=there)
        most = tl.max(stop - start, 0)
        if most > 0:
            tl.debug_barrier()  # the words of other threads come before the exceptions among their values
            values = address.to(tl.pointer_type(tl.int16), bitcast=True)
            exceptions = (head + LIST // 4 + start)[:, None]
            for j in range(0, most, 32):
                is_own = j + entry < (stop - start)[:, None]
                word = tl.load(exceptions + j + entry, mask=is_own, other=0)
                position = word & 0xFFFF
                inside = is_own & (position < ROWS * WIDTH)
                tl.store(values[:, None] + position, ((word >> 16) & 0xFFFF).to(tl.int16), mask=inside)


class Step(NamedTuple):
    """A kernel with its constants, and how it is launched."""

    kernel: Any
    table: torch.Tensor
    num_tiles: int
    tiles: int
    constants: tuple[Any, ...]
    share: Share

    def start(self, args: torch.Tensor, num_blocks: int) -> Any:
        """Compile the kernel if need be, and launch it on the current stream; return what was compiled."""
        programs = max(1, min(self.share.programs, -(-num_blocks * self.num_tiles // self.tiles)))
        counts = num_blocks, self.num_tiles
        return self.kernel[(programs, 1, 1)](
            self.table, args, *counts, *self.constants, num_warps=self.share.warps
        )


class _Packing:
    """The kernels of one direction for the blocks of one group, compiled when this is made."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = tuple(steps)
        args = torch.zeros(2, dtype=torch.int64, device=steps[0].table.device)
        compiled = [step.start(args, 0) for step in self._steps]
        self.launches: driver.Launches = ()
        """The launches by the driver, in order; none in Triton's interpreter."""
        if all(one is not None for one in compiled):
            self.launches = tuple(
                driver.Launch(
                    one.function, 32 * step.share.warps, one.metadata.shared, step.share.programs,
                    step.tiles, step.table.data_ptr(), step.num_tiles,
                )
                for one, step in zip(compiled, self._steps, strict=True)
            )  # fmt: skip

    def __call__(self, args: torch.Tensor, num_blocks: int) -> None:
        """Enqueue the kernels on the current stream.

        `args` holds block ids and addresses of packed blocks.
        """
        for step in self._steps:
            step.start(args, num_blocks)


class Pack(_Packing):
    """Packs the blocks of one group. `scratch` is the address of `scratch_bytes` of zeros on the device."""

    def __init__(
        self, units: PackedUnits, device: torch.device | str, scratch: int, share: Share = PACK
    ) -> None:
        form, limit, tables = units.form, most_kept(units), _tables(units, device, scratch)
        values = form.unit_tokens * int(units.channels.sum())
        block = (
            values, form.max_exceptions, form.exceptions, form.scales, form.codes, form.rest, form.bytes,
            limit, MOST_BLOCKS,
        )  # fmt: skip
        steps = []
        for place, (table, count, sizes) in enumerate(tables, 1):
            tiles = share.units(sizes[-1])
            constants = (len(units.base), *sizes, tiles, *block, place == len(tables))
            steps.append(Step(_pack, table, count, tiles, constants, share))
        super().__init__(steps)


class Unpack(_Packing):
    """Unpacks the blocks of one group."""

    def __init__(self, units: PackedUnits, device: torch.device | str, share: Share = UNPACK) -> None:
        form, steps = units.form, []
        for table, count, sizes in _tables(units, device, 0):
            tiles = share.units(sizes[-1])
            layout = form.max_exceptions, form.exceptions, form.scales, form.codes, form.rest
            steps.append(
                Step(_unpack, table, count, tiles, (len(units.base), *sizes, tiles, *layout), share)
            )
        super().__init__(steps)


def _tables(
    units: PackedUnits, device: torch.device | str, scratch: int
) -> list[tuple[torch.Tensor, int, tuple[int, int, int, int]]]:
    """Return, for each width of units, their table, their number, and rows, width and lanes of a unit."""
    rows = units.form.unit_tokens
    before = rows * (np.cumsum(units.channels) - units.channels)
    check = units.check - (units.check >> 31 << 32)  # as a signed word
    tables = []
    for width in np.unique(units.channels).tolist():
        chosen = np.flatnonzero(units.channels == width)
        columns = [units.base[chosen], units.stride[chosen], chosen, before[chosen]]
        table = torch.from_numpy(np.concatenate([[scratch, check], *columns]).astype(np.int64)).to(device)
        sizes = rows, width, triton.next_power_of_2(rows), triton.next_power_of_2(width // 4)
        tables.append((table, len(chosen), sizes))
    return tables
