"""The kernels that pack the pages of an engine's blocks, and unpack them (`kvtier.packing` has the form).

    pack      units of pages  ->  scales, codes, rest, each in its part of the packed block
              their exceptions, in order, and how many  ->  scratch
    finish    the exceptions of all units of a block  ->  the block's list, and its head
    unpack    units of packed blocks  ->  pages

A unit is packed by one program. The list of a block is shared by its units, and where a unit's exceptions
begin is known only when all units before it are counted. So a second kernel lays them out, in an order that
depends on nothing but the values: the bytes are those that C and Python make. A block with too many
exceptions says so in its head, whose first word the host reads when the block has arrived.

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
from kvtier.transfer.cuda.pieces import PackedUnits, most_kept


class Share(NamedTuple):
    """A kernel's share of the device: as many warps as a unit of 16,384 values would have."""

    warps: int
    programs: int

    def of(self, rows: int, width: int) -> tuple[int, int]:
        """Return the warps and the number of programs for units of `rows` rows of `width` channels.

        Small units have fewer warps and more programs; and more programs make up for lanes without a value.
        """
        lanes = 4 * triton.next_power_of_2(rows) * triton.next_power_of_2(width // 4)
        warps = max(1, min(self.warps, lanes * self.warps // 16384))
        return warps, self.programs * self.warps * lanes // (warps * rows * width)


# docs/cuda-constants.md has the measurements for these.
BESIDE, ALONE = Share(8, 64), Share(8, 132)
"""For pieces beside the engine's kernels and other pieces, and for those that the bus waits for."""
FINISH = Share(4, 32)

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


@triton.jit(do_not_specialize=["num_blocks", "num_units"])  # type: ignore[untyped-decorator]
def _pack(  # type: ignore[no-untyped-def]
    table, args, num_blocks, num_units,
    UNITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROW_LANES: tl.constexpr,
    LANES: tl.constexpr, SCALES: tl.constexpr, CODES: tl.constexpr, REST: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Pack the units of one width. A lane has four channels, in one word."""
    row, column = tl.arange(0, ROW_LANES)[:, None], tl.arange(0, LANES)[None, :]
    lane = row * (WIDTH // 4) + column
    in_row = column < WIDTH // 4
    there = (row < ROWS) & in_row
    scratch = tl.load(table).to(tl.pointer_type(tl.int32), bitcast=True)
    for at in range(tl.program_id(0), num_blocks * num_units, tl.num_programs(0)):
        index, unit = at // num_units, at % num_units
        block = tl.load(args + index)
        packed = tl.load(args + num_blocks + index)
        base = tl.load(table + 1 + unit)
        stride = tl.load(table + 1 + num_units + unit)
        number = tl.load(table + 1 + 2 * num_units + unit)
        before = tl.load(table + 1 + 3 * num_units + unit)  # values of the block that lie before the unit
        source = tl.multiple_of((base + block * stride).to(tl.pointer_type(tl.int64), bitcast=True), 8)
        word = tl.load(source + lane, mask=there, other=0, eviction_policy="evict_first")
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
        v0, v1, v2, v3 = low & 0xFFFF, (low >> 16) & 0xFFFF, high & 0xFFFF, (high >> 16) & 0xFFFF
        e0, e1, e2, e3 = (v0 >> 7) & 0xFF, (v1 >> 7) & 0xFF, (v2 >> 7) & 0xFF, (v3 >> 7) & 0xFF
        h0, h1 = tl.max(_finite(e0), 0)[None, :], tl.max(_finite(e1), 0)[None, :]
        h2, h3 = tl.max(_finite(e2), 0)[None, :], tl.max(_finite(e3), 0)[None, :]
        top = tl.max(tl.max(tl.maximum(tl.maximum(h0, h1), tl.maximum(h2, h3)), 1), 0)
        s0, s1, s2, s3 = _scale(top, h0), _scale(top, h1), _scale(top, h2), _scale(top, h3)
        c0, c1 = _code(e0, top - 4 * s0), _code(e1, top - 4 * s1)
        c2, c3 = _code(e2, top - 4 * s2), _code(e3, top - 4 * s3)

        scales = (packed + SCALES + before // (4 * ROWS)).to(tl.pointer_type(tl.int8), bitcast=True)
        codes = (packed + CODES + before // 2).to(tl.pointer_type(tl.int16), bitcast=True)
        rest = (packed + REST + before).to(tl.pointer_type(tl.int32), bitcast=True)
        some = s0 | (s1 << 2) | (s2 << 4) | (s3 << 6)
        tl.store(tl.multiple_of(scales, 16) + column, some.to(tl.int8), mask=in_row)
        some = c0 | (c1 << 4) | (c2 << 8) | (c3 << 12)
        tl.store(tl.multiple_of(codes, 8) + lane, some.to(tl.int16), mask=there)
        some = _rest(v0) | (_rest(v1) << 8) | (_rest(v2) << 16) | (_rest(v3) << 24)
        tl.store(tl.multiple_of(rest, 4) + lane, some, mask=there)

        found = (c0 == _EXCEPTION).to(tl.int32) + (c1 == _EXCEPTION).to(tl.int32)
        found += (c2 == _EXCEPTION).to(tl.int32) + (c3 == _EXCEPTION).to(tl.int32)
        total = tl.sum(tl.sum(found, 1), 0)
        place = index * UNITS + number
        tl.store(scratch + place, (top << 24) | total)
        if total > 0:
            flat = tl.reshape(found, (ROW_LANES * LANES,))
            rank = tl.reshape(tl.cumsum(flat, 0) - flat, (ROW_LANES, LANES))
            entries = scratch + num_blocks * UNITS + place * LIMIT
            position = row * WIDTH + 4 * column
            rank = _keep(entries, rank, position, v0, c0, LIMIT)
            rank = _keep(entries, rank, position + 1, v1, c1, LIMIT)
            rank = _keep(entries, rank, position + 2, v2, c2, LIMIT)
            rank = _keep(entries, rank, position + 3, v3, c3, LIMIT)


@triton.jit
def _fill(address, first, last):  # type: ignore[no-untyped-def]
    """Write zeros from byte `first` to byte `last` of a packed block; both are multiples of four."""
    words = address.to(tl.pointer_type(tl.int32), bitcast=True)
    for at in range(first // 4, last // 4, 1024):
        word = at + tl.arange(0, 1024)
        tl.store(words + word, tl.zeros((1024,), tl.int32), mask=word < last // 4)


@triton.jit(do_not_specialize=["num_blocks", "one"])  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    table, args, num_blocks, one,
    UNITS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, MAX: tl.constexpr, LIST: tl.constexpr,
    SCALES: tl.constexpr, CODES: tl.constexpr, REST: tl.constexpr, BYTES: tl.constexpr, LIMIT: tl.constexpr,
    UNIT_LANES: tl.constexpr, ENTRY_LANES: tl.constexpr,
):  # fmt: skip
    """Write the heads and the lists of blocks, and zeros where nothing is."""
    scratch = tl.load(table).to(tl.pointer_type(tl.int32), bitcast=True)
    check = tl.load(table + 1).to(tl.int32)
    lane = tl.arange(0, UNIT_LANES)
    entry = tl.arange(0, ENTRY_LANES)[None, :]
    for index in range(tl.program_id(0), num_blocks * one, tl.num_programs(0)):
        packed = tl.load(args + num_blocks + index)
        head = tl.multiple_of(packed.to(tl.pointer_type(tl.int32), bitcast=True), 4)
        exceptions = head + LIST // 4
        count = 0
        for first in range(0, UNITS, UNIT_LANES):
            unit = first + lane
            there = unit < UNITS
            place = index * UNITS + unit
            word = tl.load(scratch + place, mask=there, other=0)
            own = word & 0xFFFFFF
            start = count + tl.cumsum(own, 0) - own
            tl.store(head + _HEAD_WORDS + unit, (word - own) | tl.minimum(start, MAX), mask=there)
            entries = scratch + num_blocks * UNITS + place * LIMIT
            kept = tl.minimum(own, MAX - tl.minimum(start, MAX))
            for j in range(0, tl.max(kept, 0), ENTRY_LANES):
                some = there[:, None] & (j + entry < kept[:, None])
                taken = tl.load(entries[:, None] + j + entry, mask=some, other=0)
                tl.store(exceptions + start[:, None] + j + entry, taken, mask=some)
            count += tl.sum(own, 0)
        tl.store(head, tl.minimum(count, MAX + 1))
        tl.store(head + 1, check)
        _fill(packed, 4 * (_HEAD_WORDS + UNITS), LIST)
        _fill(packed, LIST + 4 * tl.minimum(count, MAX), SCALES)
        _fill(packed, SCALES + VALUES // (4 * ROWS), CODES)
        _fill(packed, CODES + VALUES // 2, REST)
        _fill(packed, REST + VALUES, BYTES)


@triton.jit
def _value(code, rest, first):  # type: ignore[no-untyped-def]
    exponent = tl.where(code == _ZERO, 0, (first - code) & 0xFF)
    return ((rest & 0x80) << 8) | (exponent << 7) | (rest & 0x7F)


@triton.jit(do_not_specialize=["num_blocks", "num_units"])  # type: ignore[untyped-decorator]
def _unpack(  # type: ignore[no-untyped-def]
    table, args, num_blocks, num_units,
    UNITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROW_LANES: tl.constexpr,
    LANES: tl.constexpr, MAX: tl.constexpr, LIST: tl.constexpr, SCALES: tl.constexpr, CODES: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Unpack the units of one width."""
    row, column = tl.arange(0, ROW_LANES)[:, None], tl.arange(0, LANES)[None, :]
    lane = row * (WIDTH // 4) + column
    in_row = column < WIDTH // 4
    there = (row < ROWS) & in_row
    entry = tl.arange(0, 128)
    for at in range(tl.program_id(0), num_blocks * num_units, tl.num_programs(0)):
        index, unit = at // num_units, at % num_units
        block = tl.load(args + index)
        packed = tl.load(args + num_blocks + index)
        base = tl.load(table + 1 + unit)
        stride = tl.load(table + 1 + num_units + unit)
        number = tl.load(table + 1 + 2 * num_units + unit)
        before = tl.load(table + 1 + 3 * num_units + unit)
        head = tl.multiple_of(packed.to(tl.pointer_type(tl.int32), bitcast=True), 4)
        mine = tl.load(head + _HEAD_WORDS + number)
        # Behind the last unit comes a zero, or the first exception if the head has no room to spare.
        after = tl.load(head + _HEAD_WORDS + number + 1, mask=number + 1 < UNITS, other=0) & 0xFFFFFF
        start, top = mine & 0xFFFFFF, (mine >> 24) & 0xFF
        stop = tl.minimum(tl.where(number + 1 < UNITS, after, tl.load(head)), MAX)
        scales = (packed + SCALES + before // (4 * ROWS)).to(tl.pointer_type(tl.int8), bitcast=True)
        codes = (packed + CODES + before // 2).to(tl.pointer_type(tl.int16), bitcast=True)
        rest = (packed + REST + before).to(tl.pointer_type(tl.int32), bitcast=True)
        scale = tl.load(tl.multiple_of(scales, 16) + column, mask=in_row, other=0).to(tl.int32)
        code = tl.load(tl.multiple_of(codes, 8) + lane, mask=there, other=0).to(tl.int32)
        bits = tl.load(tl.multiple_of(rest, 4) + lane, mask=there, other=0)
        v0 = _value(code & 15, bits, top - 4 * (scale & 3))
        v1 = _value((code >> 4) & 15, bits >> 8, top - 4 * ((scale >> 2) & 3))
        v2 = _value((code >> 8) & 15, bits >> 16, top - 4 * ((scale >> 4) & 3))
        v3 = _value((code >> 12) & 15, bits >> 24, top - 4 * ((scale >> 6) & 3))
        low = (v0 | (v1 << 16)).to(tl.int64) & 0xFFFFFFFF
        high = (v2 | (v3 << 16)).to(tl.int64) << 32
        address = base + block * stride
        target = tl.multiple_of(address.to(tl.pointer_type(tl.int64), bitcast=True), 8)
        tl.store(target + lane, low | high, mask=there)
        if start < stop:
            tl.debug_barrier()  # the words of other threads come before the exceptions among their values
            values = address.to(tl.pointer_type(tl.int16), bitcast=True)
            for first in range(start, stop, 128):
                some = first + entry < stop
                word = tl.load(head + LIST // 4 + first + entry, mask=some, other=0)
                position = word & 0xFFFF
                inside = some & (position < ROWS * WIDTH)
                tl.store(values + position, ((word >> 16) & 0xFFFF).to(tl.int16), mask=inside)


class _Step(NamedTuple):
    """A kernel with its constants, and how it is launched."""

    kernel: Any
    table: torch.Tensor
    num_tiles: int
    constants: tuple[Any, ...]
    warps: int
    programs: int

    def start(self, args: torch.Tensor, num_blocks: int) -> Any:
        """Compile the kernel if need be, and launch it on the current stream; return what was compiled."""
        programs = max(1, min(self.programs, num_blocks * self.num_tiles))
        counts = num_blocks, self.num_tiles
        return self.kernel[(programs, 1, 1)](
            self.table, args, *counts, *self.constants, num_warps=self.warps
        )


class _Packing:
    """The kernels of one direction for the blocks of one group, compiled when this is made."""

    def __init__(self, steps: Sequence[_Step]) -> None:
        self._steps = tuple(steps)
        args = torch.zeros(2, dtype=torch.int64, device=steps[0].table.device)
        compiled = [step.start(args, 0) for step in self._steps]
        self.launches: driver.Launches = ()
        """The launches by the driver, in order; none in Triton's interpreter."""
        if all(one is not None for one in compiled):
            self.launches = tuple(
                driver.Launch(
                    one.function, 32 * step.warps, one.metadata.shared, step.programs, 1,
                    step.table.data_ptr(), step.num_tiles,
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
    """Packs the blocks of one group. `scratch` is the address of `scratch_bytes` on the device."""

    def __init__(
        self, units: PackedUnits, device: torch.device | str, scratch: int, share: Share = BESIDE
    ) -> None:
        form, limit, num_units = units.form, most_kept(units), len(units.base)
        values = form.unit_tokens * int(units.channels.sum())
        steps = [
            _Step(
                _pack, table, count,
                (num_units, *sizes, form.scales, form.codes, form.rest, limit), *share.of(*sizes[:2]),
            )
            for table, count, sizes in _tables(units, device, scratch)
        ]  # fmt: skip
        check = units.check - (units.check >> 31 << 32)  # as a signed word
        head = torch.tensor([scratch, check], dtype=torch.int64, device=device)
        lanes = min(64, triton.next_power_of_2(num_units))
        constants = (
            num_units, values, form.unit_tokens, form.max_exceptions, form.exceptions, form.scales,
            form.codes, form.rest, form.bytes, limit, lanes, 32,
        )  # fmt: skip
        super().__init__([*steps, _Step(_finish, head, 1, constants, *FINISH)])


class Unpack(_Packing):
    """Unpacks the blocks of one group."""

    def __init__(self, units: PackedUnits, device: torch.device | str, share: Share = BESIDE) -> None:
        form = units.form
        super().__init__(
            [
                _Step(
                    _unpack, table, count,
                    (len(units.base), *sizes, form.max_exceptions, form.exceptions, form.scales, form.codes,
                     form.rest),
                    *share.of(*sizes[:2]),
                )
                for table, count, sizes in _tables(units, device, 0)
            ]
        )  # fmt: skip


def _tables(
    units: PackedUnits, device: torch.device | str, scratch: int
) -> list[tuple[torch.Tensor, int, tuple[int, int, int, int]]]:
    """Return, for each width of units, their table, their number, and rows, width and lanes of a unit."""
    rows = units.form.unit_tokens
    before = rows * (np.cumsum(units.channels) - units.channels)
    tables = []
    for width in np.unique(units.channels).tolist():
        chosen = np.flatnonzero(units.channels == width)
        columns = [units.base[chosen], units.stride[chosen], chosen, before[chosen]]
        table = torch.from_numpy(np.concatenate([[scratch], *columns]).astype(np.int64)).to(device)
        sizes = rows, width, triton.next_power_of_2(rows), triton.next_power_of_2(width // 4)
        tables.append((table, len(chosen), sizes))
    return tables
