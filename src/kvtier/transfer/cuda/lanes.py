"""A lane takes the pieces of one direction over the bus, in order, and says when each has arrived.

    store   kernel stream:  gather piece n into buffer n % BUFFERS  --ready-->  copy stream:  buffer to rows  --done
    load    copy stream:    rows to buffer n % BUFFERS  --ready-->  kernel stream:  scatter piece n            --done

A kernel waits for its buffer on the device, never on the host, and the bus goes on while kernels wait for the engine's
own. Pieces arrive one after the other, so that the last kernel has little to do; if their ranges are small a second copy stream
fills the gaps of the first. A piece with nothing before it has nothing to overlap with, and takes one stream and fewer calls;
if it is short as well, one kernel copies it between the engine and the pool, with no buffer: a long store begins so, and its next
piece is gathered meanwhile. At most `RUN_AHEAD` pieces are under way, so that stopping is a matter of milliseconds.

A lane knows nothing of jobs and has no lock: its handler calls it from one thread at a time. The engine's work that a
piece must follow is over when the piece is enqueued. Errors of the device are `TransferError`. Streams and events are
handles, as `driver` takes them, and 0 is none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.device import Device
from kvtier.transfer.cuda.memory import BUFFERS, CudaMemory
from kvtier.transfer.cuda.pieces import MOST_BLOCKS, WHOLE_BYTES, Ints, Pages, Part, Piece, Rows
from kvtier.transfer.cuda.steps import Note, Plain, make_steps
from kvtier.transfer.plan import Plan

__all__ = ["RUN_AHEAD", "Begun", "Lane", "LoadLane", "StoreLane"]

RUN_AHEAD = 8

_CopyStreams = tuple[int, int, int]
"""A stream, one beside it for small ranges, and an event to join them by."""


class _Ways(NamedTuple):
    """What pieces of a part are copied by: kernels to or from a buffer and the pool, and the rows in each buffer.

    The rows of a buffer are what its kernel copies, and pages to the copy over the bus.
    """

    staged: driver.Launch
    short: driver.Launch
    rows: list[Rows]
    pages: list[Pages]


class _Whole(NamedTuple):
    """What a job is begun with that is one short piece."""

    part: Part
    kernel: driver.Launch
    plain: Plain
    most_blocks: int


class Begun(NamedTuple):
    """The one piece of a job, which was enqueued."""

    piece: Piece
    number: int
    timer: int


class Lane(ABC):
    """Streams, buffers and events of one direction."""

    gathers: bool
    short_bytes: int
    """Up to this size a kernel copies a piece over the bus itself, if it is alone: beyond, staging is as fast.

    On an H200 a load of 4 MiB takes its caller 31 us more than its bytes take the bus, and 48 us staged; one of 8 MiB 54 and 53.
    """

    def __init__(self, memory: CudaMemory) -> None:
        self._pinned = memory.pinning.pinned
        self._steps = make_steps(memory.pool_map, to_pool=self.gathers, pinned=self._pinned)
        self._enqueued = 0
        device = self._device = Device(memory.device)
        self._kernels, self._notes = device.stream(), device.stream()
        self._copies, self._side = device.stream(), device.stream()
        self._copy_streams = [(self._copies, self._side, device.event()) for _ in range(RUN_AHEAD)]
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
        self._whole = self._find_whole(memory)

    def _parts(self, memory: CudaMemory) -> Iterator[tuple[int, Part]]:
        """Yield all parts that pieces of this direction may have, with their groups."""
        for group, parts in enumerate(memory.parts):
            for part in parts:
                yield group, part

    def _find_ways(self, memory: CudaMemory, group: int, part: Part) -> _Ways:
        kernels = self._device.kernels(part, memory.pool_map.alignment(part, group), gather=self.gathers)
        size, offset = part.bytes, part.offset
        rows = [Rows(None, buffer, size) for buffer in self._buffers]
        pages = [Pages(*np.array([[buffer], [size], [size], [offset]], np.int64)) for buffer in self._buffers]
        return _Ways(*kernels, rows, pages)

    def _find_plain(self, memory: CudaMemory) -> Plain | None:
        """Return what plain jobs keep to, where there are any: blocks are chunks, of one part."""
        geometry, pool = memory.geometry, memory.pool_map
        if len(memory.parts) > 1 or len(memory.parts[0]) > 1 or geometry.blocks_per_chunk > 1:
            return None
        return Plain(pool.first, pool.row_bytes, geometry.num_blocks, geometry.num_slots)

    def _find_whole(self, memory: CudaMemory) -> _Whole | None:
        """Return what a plain job takes that is one short piece, if there are any."""
        part = memory.parts[0][0]
        if self._plain is None or part.direct or not self._pinned:
            return None
        most_blocks = min(MOST_BLOCKS, min(self.short_bytes, WHOLE_BYTES, memory.piece_bytes) // part.bytes)
        return _Whole(part, self._ways[id(part)].short, self._plain, most_blocks)

    def enter_thread(self) -> None:
        """Make the device that of the calling thread, if it has none."""
        self._device.enter_thread()

    # -- the engine's work before a job ------------------------------------------------------------------------------------

    def fence(self) -> int | None:
        """Mark what the caller's current stream has been told so far; `None`: it has done it all."""
        stream = self._device.current_stream()
        if self._steps.is_idle(stream):
            return None
        fence = self._spare_fences.pop() if self._spare_fences else self._device.event(blocking=True)
        driver.record(fence, stream)
        return fence

    def is_over(self, fence: int) -> bool:
        """Say whether what is before a fence has been done."""
        return self._steps.is_over(fence)

    def wait_over(self, fence: int) -> None:
        """Block until what is before a fence has been done."""
        self._steps.wait_over(fence)

    def timer(self) -> int:
        """Return what `enqueue` starts and `seconds` reads."""
        return self._spare_timers.pop() if self._spare_timers else self._device.event(timing=True)

    def take_back(self, fence: int | None, timer: int) -> None:
        """Use a fence and a timer again, for another job: making events takes longer than recording them."""
        if fence is not None:
            self._spare_fences.append(fence)
        self._spare_timers.append(timer)

    # -- pieces ------------------------------------------------------------------------------------------------------------

    def is_plain(self, blocks: Ints, slots: Ints) -> bool:
        """Say whether a job is paired by `pair_plain` and needs no fence. If not, it may be so all the same."""
        return self._plain is not None and self._steps.is_plain(
            self._plain, blocks, slots, self._device.current_stream()
        )

    def begin(self, blocks: Ints, slots: Ints) -> Begun | None:
        """Enqueue a plain job that is one short piece, with nothing before it; `None`: it takes the usual way."""
        if self._whole is None or len(blocks) > self._whole.most_blocks:
            return None
        part, kernel, plain, _ = self._whole
        number, timer, count = self._enqueued, self.timer(), len(blocks)
        note, done = self._told[number % RUN_AHEAD], self._done[number % RUN_AHEAD]
        engine = self._device.current_stream()
        if not self._steps.begin(kernel, plain, note, blocks, slots, engine, self._copies, timer, done):
            self._spare_timers.append(timer)
            return None
        self._enqueued += 1
        return Begun(Piece(part, 0, count, count), number, timer)

    def enqueue(self, piece: Piece, plan: Plan, rows: Rows, timer: int | None, oldest: int | None) -> int:
        """Enqueue a piece and return its number. `timer` starts with it. All pieces before `oldest` have arrived, or all."""
        number, start = self._enqueued, timer or 0
        if piece.part.direct:
            self._enqueue_direct(number, piece, plan, rows, start)
        elif oldest is not None or not self._may_go_alone(piece, plan):
            taken = oldest is not None and number - BUFFERS >= oldest
            free = self._done[(number - BUFFERS) % RUN_AHEAD] if taken else 0
            self._enqueue_staged(number, piece, plan, rows, start, free)
        elif piece.bytes <= self.short_bytes and self._pinned:
            self._enqueue_short(number, piece, plan, rows, start)
        else:
            self._enqueue_alone(number, piece, plan, rows, start)
        self._enqueued += 1
        return number

    def _enqueue_direct(self, number: int, piece: Piece, plan: Plan, rows: Rows, start: int) -> None:
        """Enqueue a piece of large pages."""
        streams, done = self._copy_streams[number % RUN_AHEAD], self._done[number % RUN_AHEAD]
        self._steps.copy(piece.part.pages, plan.blocks, piece.first, piece.last, rows, *streams, start, 0, done)

    def _enqueue_short(self, number: int, piece: Piece, plan: Plan, rows: Rows, start: int) -> None:
        """Enqueue a small piece with nothing before it. It takes a copy stream: the next piece may be gathered meanwhile."""
        part, first, last, _ = piece
        note, done = self._told[number % RUN_AHEAD], self._done[number % RUN_AHEAD]
        self._steps.tell(note, plan.blocks, first, last, rows, part.offset)
        self._steps.launch(self._ways[id(part)].short, note, last - first, self._copies, start, 0, done)

    @abstractmethod
    def _may_go_alone(self, piece: Piece, plan: Plan) -> bool:
        """Say whether a piece with nothing before it should take one stream."""

    @abstractmethod
    def _enqueue_alone(self, number: int, piece: Piece, plan: Plan, rows: Rows, start: int) -> None:
        """Enqueue a piece with nothing before it: on one stream, in as few calls as possible."""

    @abstractmethod
    def _enqueue_staged(self, number: int, piece: Piece, plan: Plan, rows: Rows, start: int, free: int) -> None:
        """Enqueue a piece through its buffer, beside others. `free`: when the buffer is."""

    def _tell(self, note: Note, number: int, piece: Piece, plan: Plan) -> None:
        """Tell a kernel the blocks of a piece, and that their rows are in its buffer."""
        rows = self._ways[id(piece.part)].rows[number % BUFFERS]
        self._steps.tell(note, plan.blocks, piece.first, piece.last, rows, 0)

    def _launch(self, note: Note, piece: Piece, stream: int, start: int, wait: int, done: int) -> None:
        """Let a kernel copy a piece between the engine and its buffer."""
        kernel, count = self._ways[id(piece.part)].staged, piece.last - piece.first
        self._steps.launch(kernel, note, count, stream, start, wait, done)

    def _copy(
        self, number: int, piece: Piece, rows: Rows, streams: _CopyStreams, start: int, wait: int, done: int
    ) -> None:
        """Copy a piece between its buffer and the pool."""
        pages = self._ways[id(piece.part)].pages[number % BUFFERS]
        self._steps.copy(pages, None, piece.first, piece.last, rows, *streams, start, wait, done)

    def is_done(self, number: int) -> bool:
        """Say whether a piece that was enqueued has arrived. It is one of the last `RUN_AHEAD`."""
        return self._steps.is_over(self._done[number % RUN_AHEAD])

    def wait_done(self, number: int) -> None:
        """Block until a piece has arrived. May be called beside the thread that enqueues."""
        self._steps.wait_over(self._done[number % RUN_AHEAD])

    def let_follow(self, number: int) -> None:
        """Let what the caller's current stream is told from now on wait for a piece, on the device."""
        driver.wait_for(self._device.current_stream(), self._done[number % RUN_AHEAD])

    def seconds(self, timer: int, number: int) -> float:
        """Return the device's time from the start of a timer to the end of a piece that has arrived."""
        return self._steps.seconds_between(timer, self._done[number % RUN_AHEAD])

    def drain(self) -> None:
        """Block until the streams are empty, also of a piece that could not be enqueued whole."""
        for stream in (self._kernels, self._notes, self._copies, self._side):
            driver.wait_idle(stream)


class StoreLane(Lane):
    """From the device to the pool."""

    gathers = True
    short_bytes = 4 << 20

    def _may_go_alone(self, piece: Piece, plan: Plan) -> bool:
        return True

    def _enqueue_alone(self, number: int, piece: Piece, plan: Plan, rows: Rows, start: int) -> None:
        note, stream, done = self._told[number % RUN_AHEAD], self._copies, self._done[number % RUN_AHEAD]
        self._tell(note, number, piece, plan)
        self._launch(note, piece, stream, start, 0, 0)
        self._copy(number, piece, rows, (stream, 0, 0), 0, 0, done)

    def _enqueue_staged(self, number: int, piece: Piece, plan: Plan, rows: Rows, start: int, free: int) -> None:
        note, streams = self._heard[number % RUN_AHEAD], self._copy_streams[number % RUN_AHEAD]
        ready, done = self._ready[number % RUN_AHEAD], self._done[number % RUN_AHEAD]
        self._tell(note, number, piece, plan)
        self._launch(note, piece, self._kernels, start, free, ready)
        self._copy(number, piece, rows, streams, 0, ready, done)


class LoadLane(Lane):
    """From the pool to the device."""

    gathers = False
    short_bytes = 4 << 20

    def _parts(self, memory: CudaMemory) -> Iterator[tuple[int, Part]]:
        yield from super()._parts(memory)
        for stage in memory.stages:
            for group, parts in enumerate(stage):
                for part in parts:
                    yield group, part

    def _may_go_alone(self, piece: Piece, plan: Plan) -> bool:
        return piece.completes == len(plan)  # else the copy of the next piece would wait for its kernel

    def _enqueue_alone(self, number: int, piece: Piece, plan: Plan, rows: Rows, start: int) -> None:
        note, stream, done = self._told[number % RUN_AHEAD], self._copies, self._done[number % RUN_AHEAD]
        self._copy(number, piece, rows, (stream, 0, 0), start, 0, 0)
        self._tell(note, number, piece, plan)
        self._launch(note, piece, stream, 0, 0, done)

    def _enqueue_staged(self, number: int, piece: Piece, plan: Plan, rows: Rows, start: int, free: int) -> None:
        note, streams = self._heard[number % RUN_AHEAD], self._copy_streams[number % RUN_AHEAD]
        ready, done = self._ready[number % RUN_AHEAD], self._done[number % RUN_AHEAD]
        if not start:  # a note that is behind the copy waits for it, but a job's first bytes should not wait for a note
            self._tell(note, number, piece, plan)
        self._copy(number, piece, rows, streams, start, free, ready)
        if start:
            self._tell(note, number, piece, plan)
        self._launch(note, piece, self._kernels, 0, ready, done)
