"""A lane takes the pieces of one direction over the bus, in order, and says when each has arrived.

    store   kernels: gather piece n into buffer n % BUFFERS  --ready-->  copies: buffer to rows   --done
    load    copies: rows to buffer n % BUFFERS  --ready-->  kernels: scatter piece n              --done

A kernel waits for its buffer on the device, never on the host, and the bus goes on while kernels wait for
the engine's own. The bus carries pieces one after the other, so that the last kernel has little to do; if
their ranges are small a second copy stream fills the gaps of the first. A piece with nothing before it, and
if it is a load nothing behind it, has nothing to overlap with, and takes one stream and fewer calls; or no
buffer: if it is short as well, one kernel copies it between the engine and the pool, and if its pages are
large, they are copied as they are. A long store begins so, and its next piece is gathered meanwhile. At most
`RUN_AHEAD` pieces are under way, so that stopping is a matter of milliseconds. Those that end on different
streams may arrive in another order than they were enqueued in.

The engine copies too: its tokens, to the host. The device's copy engine serves a stream until it has nothing
to do or must wait, and stores always have something to do; so they go over to another stream after every
`BURST_BYTES`, which waits for the first.

What streams are told for a piece is a script, written once for each part, route and turn (its place in the
ring of events and buffers), and played by `commands` in one call.

A lane knows nothing of jobs and has no lock: its handler calls it from one thread at a time. The engine's
work that a piece must follow is over when the piece is enqueued. Errors of the device are `TransferError`.
Streams and events are handles, as `driver` takes them, and 0 is none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.commands import (
    CopyPages,
    LaunchKernel,
    Note,
    OpenEvent,
    Placeholder,
    Plain,
    Script,
    TellKernel,
    make_submitter,
)
from kvtier.transfer.cuda.device import Device
from kvtier.transfer.cuda.memory import BUFFERS, CudaMemory
from kvtier.transfer.cuda.pieces import (
    MOST_BLOCKS,
    SHORT_LOAD,
    SHORT_STORE,
    Ints,
    Pages,
    Part,
    Piece,
    Rows,
)

__all__ = [
    "ALONE_BYTES",
    "BURST_BYTES",
    "OPENING_PROGRAMS",
    "RUN_AHEAD",
    "Begun",
    "Lane",
    "LoadLane",
    "StoreLane",
]

# Sizes and counts below were measured: docs/tuning.md has the sweeps.
RUN_AHEAD = 8
"""Pieces under way, at most: the length of the ring. A multiple of `BUFFERS`."""

BURST_BYTES = 32 << 20
"""Copied to the host before others have their turn, or one piece where that is more: they wait 0.7 ms at
most.
"""

ALONE_BYTES = 128 << 10
"""From this page size on, a piece that is alone and not short is copied page by page: the bus waits for no
kernel.
"""

OPENING_PROGRAMS = 4
"""Of the kernel that a long store begins with: with more, the next gather hardly gets on beside it."""

_CopyStreams = tuple[int, int, int, int]
"""A stream, one beside it for small ranges, an event to join them by, and another that both begin after."""
_BLOCKS: Final = Placeholder.BLOCKS
_FIRST: Final = Placeholder.FIRST
_LAST: Final = Placeholder.LAST
_COUNT: Final = Placeholder.COUNT
_ROWS: Final = Placeholder.ROWS
_START: Final = Placeholder.START
_WAIT: Final = Placeholder.WAIT
_Route = Literal["direct", "short", "opening", "alone", "staged"]
"""How a piece is copied: page by page; by a kernel, over the bus, with others to follow or not; through a
buffer, on one stream or beside other pieces."""


class _Ways(NamedTuple):
    """What pieces of a part are copied by: kernels to or from a buffer and the pool, and the rows in each
    buffer.

    The rows of a buffer are what its kernel copies, and pages to the copy over the bus.
    """

    staged: driver.Launch
    short: driver.Launch
    opening: driver.Launch
    rows: list[Rows]
    pages: list[Pages]
    alone: _Route
    """How a piece is copied that is alone, and not short."""


class Begun(NamedTuple):
    """A job whose first piece was enqueued."""

    number: int
    timer: int
    rows: Rows


class Lane(ABC):
    """Streams, buffers and events of one direction."""

    gathers: bool
    begins_alone: bool
    """Whether the first of several pieces has nothing to overlap with."""
    short_bytes: int
    """Up to this size a kernel copies a piece over the bus itself, if it is alone."""
    gives_way: bool
    """Whether others have a turn between its copies: else they wait for as long as its stream goes on."""

    def __init__(self, memory: CudaMemory) -> None:
        self._pinned = memory.pinning.pinned
        self._submitter = make_submitter(memory.pool_map, to_pool=self.gathers, pinned=self._pinned)
        self._enqueued = 0
        device = self._device = Device(memory.device)
        self._kernels, self._notes = device.stream(), device.stream()
        self._copies, self._side = device.stream(), device.stream()
        self._next_copies = device.stream() if self.gives_way else self._copies
        self._burst = 0
        """Bytes that the copy stream was told in one go."""
        self._joined = [device.event() for _ in range(RUN_AHEAD)]
        self._ready = [device.event() for _ in range(RUN_AHEAD)]
        self._done = [device.event(timing=True) for _ in range(RUN_AHEAD)]
        self._spare_fences: list[int] = []
        self._spare_timers: list[int] = []
        self._buffers = device.rows(BUFFERS, memory.piece_bytes)
        told, heard = (make(RUN_AHEAD, 16 * MOST_BLOCKS) for make in (device.host_rows, device.rows))
        self._told = [Note(row, 0, 0, 0, MOST_BLOCKS) for row in told]
        self._heard = [
            note._replace(heard=row, notes=self._notes, noted=device.event())
            for note, row in zip(self._told, heard, strict=True)
        ]
        staged = [(group, part) for group, part in self._parts(memory) if not part.direct]
        self._ways = {id(part): self._find_ways(memory, group, part) for group, part in staged}
        self._plain = self._find_plain(memory)
        self.has_plain_jobs = self._plain is not None
        """Whether `begin` may be called."""
        self._scripts: dict[tuple[int, _Route, int, int, bool, bool], Script] = {}

    def _parts(self, memory: CudaMemory) -> Iterator[tuple[int, Part]]:
        """Yield all parts that pieces of this direction may have, with their groups."""
        for group, parts in enumerate(memory.parts):
            for part in parts:
                yield group, part

    def _find_ways(self, memory: CudaMemory, group: int, part: Part) -> _Ways:
        staged, short = self._device.kernels(
            part, memory.pool_map.alignment(part, group), gather=self.gathers
        )
        opening = short._replace(programs=min(short.programs, OPENING_PROGRAMS))
        size, offset = part.bytes, part.offset
        rows = [Rows(None, buffer, size) for buffer in self._buffers]
        pages = [
            Pages(*np.array([[buffer], [size], [size], [offset]], np.int64)) for buffer in self._buffers
        ]
        has_large_pages = part.bytes >= ALONE_BYTES * len(part.pages.size)
        return _Ways(staged, short, opening, rows, pages, "direct" if has_large_pages else "alone")

    def _find_plain(self, memory: CudaMemory) -> Plain | None:
        """Return what plain jobs keep to, where there are any: blocks are chunks, of one part."""
        bounds, pool = memory.bounds, memory.pool_map
        if len(memory.parts) > 1 or len(memory.parts[0]) > 1 or bounds.blocks_per_chunk > 1:
            return None
        return Plain(pool.first, pool.slot_bytes, bounds.num_blocks, bounds.num_slots)

    def enter_thread(self) -> None:
        """Make the device that of the calling thread, if it has none."""
        self._device.enter_thread()

    # -- the engine's work before a job ------------------------------------------------------------

    def fence(self) -> int | None:
        """Mark what the caller's current stream has been told so far; `None`: it has done it all."""
        stream = self._device.current_stream()
        if self._submitter.is_idle(stream):
            return None
        if not self._spare_fences:
            self._spare_fences.append(self._device.event(blocking=True))
        driver.record(self._spare_fences[-1], stream)
        return self._spare_fences.pop()

    def is_over(self, fence: int) -> bool:
        """Say whether what is before a fence has been done."""
        return self._submitter.is_over(fence)

    def wait_over(self, fence: int) -> None:
        """Block until what is before a fence has been done."""
        self._submitter.wait_over(fence)

    def timer(self) -> int:
        """Return what `enqueue` starts and `seconds` reads."""
        return self._spare_timers.pop() if self._spare_timers else self._device.event(timing=True)

    def take_back(self, fence: int | None, timer: int) -> None:
        """Use a fence and a timer again, for another job: making events takes longer than recording them."""
        if fence is not None:
            self._spare_fences.append(fence)
        self._spare_timers.append(timer)

    # -- pieces ------------------------------------------------------------------------------------

    def is_plain(self, blocks: Ints, slots: Ints) -> bool:
        """Say whether a job is paired by `pair_plain` and needs no fence.

        If not, it may be so all the same.
        """
        return self._plain is not None and self._submitter.is_plain(
            self._plain, blocks, slots, self._device.current_stream()
        )

    def begin(self, pieces: Sequence[Piece], blocks: Ints, slots: Ints) -> Begun | None:
        """Enqueue the first of its pieces, with nothing before it, if a job is plain; `None`: it takes the
        usual way.
        """
        plain = self._plain
        if plain is None or not self._submitter.is_plain(
            plain, blocks, slots, self._device.current_stream()
        ):
            return None
        rows = Rows(slots, plain.first, plain.stride)
        if not self._spare_timers:
            self._spare_timers.append(self._device.event(timing=True))
        timer = self._spare_timers[-1]
        number = self.enqueue(pieces[0], blocks, rows, timer, None, is_last=len(pieces) == 1)
        self._spare_timers.pop()
        return Begun(number, timer, rows)

    def enqueue(
        self, piece: Piece, blocks: Ints, rows: Rows, timer: int | None, oldest: int | None, *, is_last: bool
    ) -> int:
        """Enqueue a piece of a job and return its number.

        `timer` starts with it. All pieces before `oldest` have arrived, or all. `is_last`: nothing is known
        to come behind it.
        """
        part, first, last, _ = piece
        number, route = self._enqueued, self._choose_route(piece, oldest, is_last=is_last)
        if oldest is None:
            self._burst = 0
        changes = route not in ("short", "opening") and self._change_streams(piece.bytes)
        script = self._find_script(
            part, route, number % RUN_AHEAD, begins=timer is not None, changes=changes
        )
        is_taken = oldest is not None and number - BUFFERS >= oldest
        free = self._done[(number - BUFFERS) % RUN_AHEAD] if is_taken else 0
        self._submitter.play(script, blocks, first, last, last - first, rows, timer or 0, free)
        self._enqueued = number + 1
        return number

    def _choose_route(self, piece: Piece, oldest: int | None, *, is_last: bool) -> _Route:
        if piece.part.direct:
            return "direct"
        if oldest is not None or not (is_last or self.begins_alone):
            return "staged"
        if piece.bytes <= self.short_bytes and self._pinned:
            return "short" if is_last else "opening"
        return self._ways[id(piece.part)].alone

    def _change_streams(self, size: int) -> bool:
        """Go over to the other copy stream if this one has had its burst; say whether that is so."""
        changes = self.gives_way and self._burst > 0 and self._burst + size > BURST_BYTES
        if changes:
            self._copies, self._next_copies = self._next_copies, self._copies
            self._burst = 0
        self._burst += size
        return changes

    # -- scripts: what streams are told for a piece ------------------------------------------------

    def _find_script(self, part: Part, route: _Route, turn: int, *, begins: bool, changes: bool) -> Script:
        key = (id(part), route, turn, self._copies, begins, changes)
        script = self._scripts.get(key)
        if script is None:
            after = self._done[(turn - 1) % RUN_AHEAD] if changes else 0
            script = self._scripts[key] = self._write_script(part, route, turn, after, begins)
        return script

    def _write_script(self, part: Part, route: _Route, turn: int, after: int, begins: bool) -> Script:
        """Write down a piece.

        Its copy comes `after` that of the piece before it, if they are on two streams.
        """
        match route:
            case "direct":
                return self._write_direct(part, turn, after)
            case "short":
                return self._write_short(part, turn, self._ways[id(part)].short)
            case "opening":
                return self._write_short(part, turn, self._ways[id(part)].opening)
            case "alone":
                return self._write_alone(part, turn)
            case "staged":
                return self._write_staged(part, turn, after, begins)

    def _write_direct(self, part: Part, turn: int, after: int) -> Script:
        streams = self._copy_streams(turn, after)
        return (CopyPages(part.pages, _BLOCKS, _FIRST, _LAST, _ROWS, *streams, _START, 0, self._done[turn]),)

    def _write_short(self, part: Part, turn: int, kernel: driver.Launch) -> Script:
        note = self._told[turn]
        return (
            TellKernel(note, _BLOCKS, _FIRST, _LAST, _ROWS, part.offset),
            LaunchKernel(kernel, note, _COUNT, self._side, _START, 0, self._done[turn]),
        )

    @abstractmethod
    def _write_alone(self, part: Part, turn: int) -> Script:
        """Write down a piece that takes one stream, and as few calls as possible."""

    @abstractmethod
    def _write_staged(self, part: Part, turn: int, after: int, begins: bool) -> Script:
        """Write down a piece that is copied beside others. `begins`: it is the first of its job."""

    def _copy_streams(self, turn: int, after: int) -> _CopyStreams:
        return self._copies, self._side, self._joined[turn], after

    def _tell(self, note: Note, part: Part, turn: int) -> TellKernel:
        """Tell a kernel the blocks of a piece, and that their rows are in its buffer."""
        return TellKernel(note, _BLOCKS, _FIRST, _LAST, self._ways[id(part)].rows[turn % BUFFERS], 0)

    def _launch(
        self, note: Note, part: Part, stream: int, start: OpenEvent, wait: OpenEvent, done: int
    ) -> LaunchKernel:
        """Let a kernel copy a piece between the engine and its buffer."""
        return LaunchKernel(self._ways[id(part)].staged, note, _COUNT, stream, start, wait, done)

    def _copy(
        self, part: Part, turn: int, streams: _CopyStreams, start: OpenEvent, wait: OpenEvent, done: int
    ) -> CopyPages:
        """Copy a piece between its buffer and the pool."""
        pages = self._ways[id(part)].pages[turn % BUFFERS]
        return CopyPages(pages, None, _FIRST, _LAST, _ROWS, *streams, start, wait, done)

    # -- what has arrived --------------------------------------------------------------------------

    def is_done(self, number: int) -> bool:
        """Say whether a piece that was enqueued has arrived. It is one of the last `RUN_AHEAD`."""
        return self._submitter.is_over(self._done[number % RUN_AHEAD])

    def wait_done(self, number: int) -> None:
        """Block until a piece has arrived. May be called beside the thread that enqueues."""
        self._submitter.wait_over(self._done[number % RUN_AHEAD])

    def let_follow(self, number: int) -> None:
        """Let what the caller's current stream is told from now on wait for a piece, on the device."""
        driver.wait_for(self._device.current_stream(), self._done[number % RUN_AHEAD])

    def seconds(self, timer: int, number: int) -> float:
        """Return the device's time from the start of a timer to the end of a piece that has arrived."""
        return self._submitter.seconds_between(timer, self._done[number % RUN_AHEAD])

    def drain(self) -> None:
        """Block until the streams are empty, also of a piece that could not be enqueued whole."""
        for stream in (self._kernels, self._notes, self._copies, self._side, self._next_copies):
            driver.wait_idle(stream)


class StoreLane(Lane):
    """From the device to the pool."""

    gathers = True
    begins_alone = True
    short_bytes = SHORT_STORE
    gives_way = True

    def _write_alone(self, part: Part, turn: int) -> Script:
        note, stream = self._told[turn], self._copies
        return (
            self._tell(note, part, turn),
            self._launch(note, part, stream, _START, 0, 0),
            self._copy(part, turn, (stream, 0, 0, 0), 0, 0, self._done[turn]),
        )

    def _write_staged(self, part: Part, turn: int, after: int, begins: bool) -> Script:
        note, ready = self._heard[turn], self._ready[turn]
        return (
            self._tell(note, part, turn),
            self._launch(note, part, self._kernels, _START, _WAIT, ready),
            self._copy(part, turn, self._copy_streams(turn, after), 0, ready, self._done[turn]),
        )


class LoadLane(Lane):
    """From the pool to the device."""

    gathers = False
    begins_alone = False  # the copy of the next piece would wait for its kernel
    short_bytes = SHORT_LOAD
    gives_way = False

    def _parts(self, memory: CudaMemory) -> Iterator[tuple[int, Part]]:
        yield from super()._parts(memory)
        for stage in memory.stages:
            for group, parts in enumerate(stage):
                for part in parts:
                    yield group, part

    def _write_alone(self, part: Part, turn: int) -> Script:
        note, stream = self._told[turn], self._copies
        return (
            self._copy(part, turn, (stream, 0, 0, 0), _START, 0, 0),
            self._tell(note, part, turn),
            self._launch(note, part, stream, 0, 0, self._done[turn]),
        )

    def _write_staged(self, part: Part, turn: int, after: int, begins: bool) -> Script:
        note, ready = self._heard[turn], self._ready[turn]
        tell = self._tell(note, part, turn)
        copy = self._copy(part, turn, self._copy_streams(turn, after), _START, _WAIT, ready)
        # A note that is behind the copy waits for it, but a job's first bytes should not wait for a note.
        return (
            *((copy, tell) if begins else (tell, copy)),
            self._launch(note, part, self._kernels, 0, ready, self._done[turn]),
        )
