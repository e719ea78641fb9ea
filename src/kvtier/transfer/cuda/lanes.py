"""A lane moves the pieces of one direction over the bus, in order, and says when each has arrived.

    store   kernels: gather piece n into buffer n % BUFFERS  --ready-->  copies: buffer to rows   --done
    load    copies: rows to buffer n % BUFFERS  --ready-->  kernels: scatter piece n              --done

Blocks that are kept packed are packed and unpacked in place of the gather and the scatter. A kernel waits
for its buffer on the device, never on the host, and the bus stays busy while kernels wait for the engine's
kernels. The bus carries pieces one after the other, so that the last kernel has little to do; if their
ranges are small, a second copy stream fills the gaps of the first. Two kinds of piece take no buffer: the
kernels carry a short piece, with no other before or behind it, over the bus themselves, and large pages are
copied without a kernel. At most `RUN_AHEAD` pieces are under way, so that stopping takes milliseconds.
Pieces that end on different streams may arrive in another order than they were enqueued in.

The engine copies too: its tokens, to the host. The device's copy engine serves a stream until that stream
has no work or must wait, and a stream of stores always has work. So stores change to another stream after
every `BURST_BYTES`; the new stream waits for the old one.

The commands for a piece are a script. It is written once for each part, route and turn (the piece's position
in the ring of events and buffers), and `commands` plays it in one call.

A lane knows nothing of jobs and has no lock: its handler calls it from one thread at a time. The engine's
work that a piece must follow is over when the piece is enqueued. Errors of the device are `TransferError`.
Streams and events are handles, as `driver` takes them; 0 means none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.commands import (
    CopyPages,
    KernelArgs,
    LaunchKernel,
    OpenEvent,
    Placeholder,
    Script,
    SimpleBounds,
    WriteArgs,
    make_submitter,
)
from kvtier.transfer.cuda.driver import Device, Launches
from kvtier.transfer.cuda.memory import BUFFERS, CudaMemory
from kvtier.transfer.cuda.pieces import (
    MOST_BLOCKS,
    ROW_ALIGNMENT,
    SHORT_LOAD,
    SHORT_STORE,
    Ints,
    Pages,
    Part,
    Piece,
    Rows,
    most_blocks,
    scratch_bytes,
)

RUN_AHEAD = 8
"""The most pieces under way, and the length of the ring. It is a multiple of `BUFFERS`."""

# docs/cuda-constants.md has the measurements for the constants below.
BURST_BYTES = 32 << 20
"""The bytes copied to the host before other copies have their turn, or one piece if that is more."""

_CopyStreams = tuple[int, int, int, int]
"""A stream, a second stream for small ranges, the event that joins them, and the event that both wait for.
"""
_BLOCKS: Final = Placeholder.BLOCKS
_FIRST: Final = Placeholder.FIRST
_LAST: Final = Placeholder.LAST
_COUNT: Final = Placeholder.COUNT
_ROWS: Final = Placeholder.ROWS
_START: Final = Placeholder.START
_WAIT: Final = Placeholder.WAIT
_Route = Literal["direct", "short", "staged"]
"""How a piece is copied: page by page, by its kernels over the bus, or through a buffer."""


class _PartRoutes(NamedTuple):
    """The means to copy pieces of a part: its kernels, and the views of each buffer.

    A kernel sees a buffer as `rows`; the copy over the bus sees it as `pages`.
    """

    staged: Launches
    alone: Launches
    """Kernels for a piece with nothing beside it."""
    reaches_pool: bool
    """Whether these can read and write the pool itself: its rows have the alignment."""
    rows: list[Rows]
    pages: list[Pages]


class Begun(NamedTuple):
    """The number, timer and rows of a job whose first piece was enqueued."""

    number: int
    timer: int
    rows: Rows


class Lane(ABC):
    """Owns the streams, buffers and events of one direction."""

    gathers: bool
    short_bytes: int
    """The largest piece that its kernels copy over the bus themselves, if the piece is alone."""
    gives_way: bool
    """Whether the lane changes streams so that other copies have their turn.

    Else they wait for its stream.
    """

    def __init__(self, memory: CudaMemory) -> None:
        self._pinned = memory.pinning.pinned
        self._submitter = make_submitter(memory.pool_map, to_pool=self.gathers, pinned=self._pinned)
        self._enqueued = 0
        device = self._device = Device(memory.device)
        self._kernels, self._args_stream = device.stream(), device.stream()
        self._copies, self._side = device.stream(), device.stream()
        self._next_copies = device.stream() if self.gives_way else self._copies
        self._burst = 0
        """The bytes given to the copy stream since it was last changed."""
        self._joined = [device.event() for _ in range(RUN_AHEAD)]
        self._ready = [device.event() for _ in range(RUN_AHEAD)]
        self._done = [device.event(timing=True) for _ in range(RUN_AHEAD)]
        self._spare_fences: list[int] = []
        self._spare_timers: list[int] = []
        self._buffers = device.rows(BUFFERS, memory.buffer_bytes)
        self._scratch = self._make_scratch(memory) if self.gathers else 0
        """The address of the memory that the kernels of pieces use one after the other."""
        on_host, on_device = (make(RUN_AHEAD, 16 * MOST_BLOCKS) for make in (device.host_rows, device.rows))
        self._host_args = [KernelArgs(row, 0, 0, 0, MOST_BLOCKS) for row in on_host]
        self._device_args = [
            args._replace(device=row, stream=self._args_stream, copied=device.event())
            for args, row in zip(self._host_args, on_device, strict=True)
        ]
        self._routes = {
            id(part): self._find_routes(memory, group, part)
            for group, parts in enumerate(memory.parts)
            for part in parts
            if not part.direct
        }
        self._simple_bounds = self._find_simple_bounds(memory)
        self.has_simple_jobs = self._simple_bounds is not None
        """Whether `begin` may be called."""
        self._scripts: dict[tuple[int, _Route, int, int, bool, bool], Script] = {}

    def _make_scratch(self, memory: CudaMemory) -> int:
        """Return the address of scratch for packing the largest piece."""
        sizes = [
            scratch_bytes(part.units, most_blocks(part, memory.piece_bytes))
            for parts in memory.parts
            for part in parts
            if part.units is not None
        ]
        return self._device.rows(1, max(sizes))[0] if sizes else 0

    def _find_routes(self, memory: CudaMemory, group: int, part: Part) -> _PartRoutes:
        row_align = memory.pool_map.alignment(part, group)
        staged, alone = self._device.kernels(part, row_align, self._scratch, gather=self.gathers)
        reaches_pool = part.units is None or row_align >= ROW_ALIGNMENT
        size, offset = part.bytes, part.offset
        rows = [Rows(None, buffer, size) for buffer in self._buffers]
        pages = [
            Pages(*np.array([[buffer], [size], [size], [offset]], np.int64)) for buffer in self._buffers
        ]
        return _PartRoutes(staged, alone, reaches_pool, rows, pages)

    def _find_simple_bounds(self, memory: CudaMemory) -> SimpleBounds | None:
        """Return the bounds of simple jobs.

        `None` means that there are none: chunks have several blocks, or blocks have several parts.
        """
        bounds, pool = memory.bounds, memory.pool_map
        if len(memory.parts) > 1 or len(memory.parts[0]) > 1 or bounds.blocks_per_chunk > 1:
            return None
        return SimpleBounds(pool.first, pool.slot_bytes, bounds.num_blocks, bounds.num_slots)

    def enter_thread(self) -> None:
        """Make the lane's device current for the calling thread, if the thread has none."""
        self._device.enter_thread()

    # -- the engine's work before a job ------------------------------------------------------------

    def fence(self) -> int | None:
        """Mark the end of the work on the caller's current stream. `None` means that all of it is done."""
        stream = self._device.current_stream()
        if self._submitter.is_idle(stream):
            return None
        if not self._spare_fences:
            self._spare_fences.append(self._device.event(blocking=True))
        driver.record(self._spare_fences[-1], stream)
        return self._spare_fences.pop()

    def is_over(self, fence: int) -> bool:
        """Return whether the work before a fence is done."""
        return self._submitter.is_over(fence)

    def wait_over(self, fence: int) -> None:
        """Block until the work before a fence is done."""
        self._submitter.wait_over(fence)

    def timer(self) -> int:
        """Return a timer, which `enqueue` starts and `seconds` reads."""
        return self._spare_timers.pop() if self._spare_timers else self._device.event(timing=True)

    def recycle(self, fence: int | None, timer: int) -> None:
        """Keep a fence and a timer for another job: making events takes longer than recording them."""
        if fence is not None:
            self._spare_fences.append(fence)
        self._spare_timers.append(timer)

    # -- pieces ------------------------------------------------------------------------------------

    def is_simple(self, blocks: Ints, slots: Ints) -> bool:
        """Return whether a job can be paired by `pair_simple` and needs no fence.

        `False` may also mean that this was not checked.
        """
        return self._simple_bounds is not None and self._submitter.is_simple(
            self._simple_bounds, blocks, slots, self._device.current_stream()
        )

    def begin(self, pieces: Sequence[Piece], blocks: Ints, slots: Ints) -> Begun | None:
        """Enqueue the first piece of a simple job, with no piece before it.

        `None` means that the job is not simple.
        """
        bounds = self._simple_bounds
        if bounds is None or not self._submitter.is_simple(
            bounds, blocks, slots, self._device.current_stream()
        ):
            return None
        rows = Rows(slots, bounds.first, bounds.stride)
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

        `timer` starts with the piece. All pieces before number `oldest` have arrived; with `None`, all
        pieces have. `is_last` says that no piece is known to follow.
        """
        part, first, last, _ = piece
        number, route = self._enqueued, self._choose_route(piece, oldest, is_last=is_last)
        if oldest is None:
            self._burst = 0
        changes = route != "short" and self._change_streams(piece.bytes)
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
        is_short = is_last and oldest is None and piece.bytes <= self.short_bytes and self._pinned
        return "short" if is_short and self._routes[id(piece.part)].reaches_pool else "staged"

    def _change_streams(self, size: int) -> bool:
        """Change to the other copy stream if this one has had its burst; return whether it changed."""
        changes = self.gives_way and self._burst > 0 and self._burst + size > BURST_BYTES
        if changes:
            self._copies, self._next_copies = self._next_copies, self._copies
            self._burst = 0
        self._burst += size
        return changes

    # -- scripts: the commands for a piece ---------------------------------------------------------

    def _find_script(self, part: Part, route: _Route, turn: int, *, begins: bool, changes: bool) -> Script:
        key = (id(part), route, turn, self._copies, begins, changes)
        script = self._scripts.get(key)
        if script is None:
            after = self._done[(turn - 1) % RUN_AHEAD] if changes else 0
            script = self._scripts[key] = self._write_script(part, route, turn, after, begins)
        return script

    def _write_script(self, part: Part, route: _Route, turn: int, after: int, begins: bool) -> Script:
        """Write the script of a piece.

        Its copy waits for the event `after`, the end of the piece before it, if they are on two streams.
        """
        match route:
            case "direct":
                return self._write_direct(part, turn, after)
            case "short":
                return self._write_short(part, turn)
            case "staged":
                return self._write_staged(part, turn, after, begins)

    def _write_direct(self, part: Part, turn: int, after: int) -> Script:
        streams = self._copy_streams(turn, after)
        return (CopyPages(part.pages, _BLOCKS, _FIRST, _LAST, _ROWS, *streams, _START, 0, self._done[turn]),)

    def _write_short(self, part: Part, turn: int) -> Script:
        args, kernels = self._host_args[turn], self._routes[id(part)].alone
        write = WriteArgs(args, _BLOCKS, _FIRST, _LAST, _ROWS, part.offset)
        return (write, *self._launch(kernels, args, _START, 0, self._done[turn]))

    @abstractmethod
    def _write_staged(self, part: Part, turn: int, after: int, begins: bool) -> Script:
        """Write the script of a piece beside others. With `begins` it is the first of its job."""

    def _copy_streams(self, turn: int, after: int) -> _CopyStreams:
        return self._copies, self._side, self._joined[turn], after

    def _write_args(self, args: KernelArgs, part: Part, turn: int) -> WriteArgs:
        """Return the command that gives a kernel the blocks of a piece and their rows in its buffer."""
        return WriteArgs(args, _BLOCKS, _FIRST, _LAST, self._routes[id(part)].rows[turn % BUFFERS], 0)

    def _launch(
        self, kernels: Launches, args: KernelArgs, start: OpenEvent, wait: OpenEvent, done: int
    ) -> Script:
        """Return the commands that launch the kernels of a piece, one after the other."""
        first, last = kernels[0], kernels[-1]
        return tuple(
            LaunchKernel(
                kernel,
                args,
                _COUNT,
                self._kernels,
                start if kernel is first else 0,
                wait if kernel is first else 0,
                done if kernel is last else 0,
            )
            for kernel in kernels
        )

    def _copy(
        self, part: Part, turn: int, streams: _CopyStreams, start: OpenEvent, wait: OpenEvent, done: int
    ) -> CopyPages:
        """Return the command that copies a piece between its buffer and the pool."""
        pages = self._routes[id(part)].pages[turn % BUFFERS]
        return CopyPages(pages, None, _FIRST, _LAST, _ROWS, *streams, start, wait, done)

    # -- arrivals ----------------------------------------------------------------------------------

    def is_done(self, number: int) -> bool:
        """Return whether a piece has arrived. It must be one of the last `RUN_AHEAD` that were enqueued."""
        return self._submitter.is_over(self._done[number % RUN_AHEAD])

    def wait_done(self, number: int) -> None:
        """Block until a piece has arrived. Any thread may call this, even while another one enqueues."""
        self._submitter.wait_over(self._done[number % RUN_AHEAD])

    def seconds(self, timer: int, number: int) -> float:
        """Return the device's time from the start of a timer to the arrival of a piece."""
        return self._submitter.seconds_between(timer, self._done[number % RUN_AHEAD])

    def drain(self) -> None:
        """Block until the streams are empty, even of a piece that could only be enqueued in part."""
        for stream in (self._kernels, self._args_stream, self._copies, self._side, self._next_copies):
            driver.wait_idle(stream)


class StoreLane(Lane):
    """Moves pieces from the device to the pool."""

    gathers = True
    short_bytes = SHORT_STORE
    gives_way = True

    def _write_staged(self, part: Part, turn: int, after: int, begins: bool) -> Script:
        args, ready = self._device_args[turn], self._ready[turn]
        # The bus waits for the first piece, and packing takes longer than a gather.
        routes = self._routes[id(part)]
        kernels = routes.alone if begins and part.units is not None else routes.staged
        return (
            self._write_args(args, part, turn),
            *self._launch(kernels, args, _START, _WAIT, ready),
            self._copy(part, turn, self._copy_streams(turn, after), 0, ready, self._done[turn]),
        )


class LoadLane(Lane):
    """Moves pieces from the pool to the device."""

    gathers = False
    short_bytes = SHORT_LOAD
    gives_way = False

    def _write_staged(self, part: Part, turn: int, after: int, begins: bool) -> Script:
        args, ready = self._device_args[turn], self._ready[turn]
        write = self._write_args(args, part, turn)
        copy = self._copy(part, turn, self._copy_streams(turn, after), _START, _WAIT, ready)
        # Arguments behind the copy have to wait for it, but a job's first bytes should not wait for them.
        return (
            *((copy, write) if begins else (write, copy)),
            *self._launch(self._routes[id(part)].staged, args, 0, ready, self._done[turn]),
        )
