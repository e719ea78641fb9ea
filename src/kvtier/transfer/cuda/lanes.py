"""A lane takes the pieces of one direction over the bus, in order, and says when each has arrived.

    store   kernel stream:  gather piece n into buffer n % BUFFERS  --ready-->  copy stream:  buffer to rows  --done
    load    copy stream:    rows to buffer n % BUFFERS  --ready-->  kernel stream:  scatter piece n            --done

A kernel waits for its buffer on the device, never on the host, and the bus goes on while kernels wait for the engine's
own. Pieces of small ranges take turns on two copy streams, where one fills the gaps of the other; all others arrive one
after the other, so that the last kernel has little to do. A piece with nothing before it has nothing to overlap with, and takes
one stream and fewer calls; if it is short as well, one kernel copies it between the engine and the pool, with no buffer. At
most `RUN_AHEAD` pieces are under way, so that stopping is a matter of milliseconds.

A lane knows nothing of jobs and has no lock: its handler calls it from one thread at a time. The engine's work that a
piece must follow is over when the piece is enqueued. Errors of the device are `TransferError`. Streams and events are
handles, as `driver` takes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.memory import BUFFERS, CudaMemory
from kvtier.transfer.cuda.pieces import MOST_BLOCKS, Ints, Part, Piece, Ranges
from kvtier.transfer.plan import Plan

if TYPE_CHECKING:
    from kvtier.transfer.cuda.kernels import PageCopy

__all__ = ["RUN_AHEAD", "Lane", "LoadLane", "StoreLane"]

RUN_AHEAD = 8
PRIORITY = 0  # the lowest that CUDA has; higher ones moved no more bytes beside matrix products
_SMALL_RANGE = 1 << 20


class _Handles:
    """Makes streams and events of torch, keeps them, and gives out their handles."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[object] = []
        self._any_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def stream(self) -> int:
        stream = torch.cuda.Stream(self._device, priority=PRIORITY)  # type: ignore[no-untyped-call]
        self._kept.append(stream)
        return int(stream.cuda_stream)

    def event(self, *, timing: bool = False, blocking: bool = False) -> int:
        """Return an event. `blocking`: a thread that waits for it sleeps."""
        event = torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]
        event.record(self._any_stream)  # it has a handle from now on
        self._kept.append(event)
        return int(event.cuda_event)


class Lane(ABC):
    """Streams, buffers and events of one direction."""

    gathers: bool
    short_bytes: int
    """Up to this size a kernel copies a piece over the bus itself, if it is alone: beyond, staging is as fast."""

    def __init__(self, memory: CudaMemory) -> None:
        device = self._device = memory.device
        self._pool = memory.pool_map
        self._pinned = memory.pinning.pinned
        self._enqueued = 0
        with torch.cuda.device(device):
            self._handles = _Handles(device)
            self._kernels = self._handles.stream()
            self._copies = [self._handles.stream() for _ in range(2)]
            self._notes = self._handles.stream()
            self._noted = [self._handles.event() for _ in range(RUN_AHEAD)]
            self._ready = [self._handles.event() for _ in range(RUN_AHEAD)]
            self._done = [self._handles.event(timing=True) for _ in range(RUN_AHEAD)]
            self._spare_fences: list[int] = []
            self._spare_timers: list[int] = []
            self._staging = torch.empty((BUFFERS, memory.piece_bytes), dtype=torch.int8, device=device)
            self._buffers = [buffer.data_ptr() for buffer in self._staging]
            self._told = list(torch.empty((RUN_AHEAD, 2 * MOST_BLOCKS), dtype=torch.int64, pin_memory=True))
            self._told_numpy = [row.numpy() for row in self._told]
            self._heard: list[torch.Tensor] = list(
                torch.empty((RUN_AHEAD, 2 * MOST_BLOCKS), dtype=torch.int64, device=device)
            )
            self._make_kernels(memory)
            torch.cuda.synchronize()

    def _make_kernels(self, memory: CudaMemory) -> None:
        from kvtier.transfer.cuda.kernels import SHORT, STAGED, PageCopy  # needs Triton, as does only who has a device

        self._staged_copies: dict[int, PageCopy] = {}
        self._short_copies: dict[int, PageCopy] = {}
        for group, parts in self._parts(memory):
            for part in parts:
                if not part.direct:
                    align = memory.pool_map.alignment(part, group)
                    self._staged_copies[id(part)] = PageCopy(part, self._device, STAGED, gather=self.gathers)
                    self._short_copies[id(part)] = PageCopy(
                        part, self._device, SHORT, gather=self.gathers, row_align=align
                    )

    def _parts(self, memory: CudaMemory) -> Iterator[tuple[int, Sequence[Part]]]:
        """Yield all parts that pieces of this direction may have, with their groups."""
        yield from enumerate(memory.parts)

    def enter_thread(self) -> None:
        """Make the device that of the calling thread, if it has none."""
        if not driver.has_context():
            torch.cuda.set_device(self._device)

    # -- the engine's work before a job ------------------------------------------------------------------------------------

    def fence(self) -> int | None:
        """Mark what the caller's current stream has been told so far; `None`: it has done it all."""
        stream = torch._C._cuda_getCurrentRawStream(self._device.index or 0)
        if driver.is_idle(stream):
            return None
        fence = self._spare_fences.pop() if self._spare_fences else self._handles.event(blocking=True)
        driver.record(fence, stream)
        return fence

    def is_over(self, fence: int) -> bool:
        """Say whether what is before a fence has been done."""
        return driver.is_over(fence)

    def wait_over(self, fence: int) -> None:
        """Block until what is before a fence has been done."""
        driver.wait_over(fence)

    def timer(self) -> int:
        """Return what `enqueue` starts and `seconds` reads."""
        return self._spare_timers.pop() if self._spare_timers else self._handles.event(timing=True)

    def take_back(self, fence: int | None, timer: int) -> None:
        """Use a fence and a timer again, for another job: making events takes longer than recording them."""
        if fence is not None:
            self._spare_fences.append(fence)
        self._spare_timers.append(timer)

    # -- pieces ------------------------------------------------------------------------------------------------------------

    def enqueue(self, piece: Piece, plan: Plan, places: Ints, timer: int | None, oldest: int | None) -> int:
        """Enqueue a piece and return its number. `timer` starts with it. All pieces before `oldest` have arrived, or all."""
        number = self._enqueued
        oldest = number if oldest is None else oldest
        if piece.part.direct:
            stream = self._enqueue_direct(number, piece, plan, places, timer)
        elif oldest < number or not self._may_go_alone(piece, plan):
            stream = self._enqueue_staged(number, piece, plan, places, timer, oldest)
        elif piece.bytes <= self.short_bytes and self._pinned:
            stream = self._enqueue_short(number, piece, plan, places, timer)
        else:
            stream = self._enqueue_alone(number, piece, plan, places, timer)
        driver.record(self._done[number % RUN_AHEAD], stream)
        self._enqueued += 1
        return number

    def _enqueue_direct(self, number: int, piece: Piece, plan: Plan, places: Ints, timer: int | None) -> int:
        """Enqueue a piece of large pages; return the stream on which it ends, as do the others."""
        ranges = self._pool.direct_ranges(piece, places, plan.blocks)
        copies = self._copy_stream(number, ranges)
        self._start(timer, copies)
        self._copy(ranges, copies)
        return copies

    def _enqueue_short(self, number: int, piece: Piece, plan: Plan, places: Ints, timer: int | None) -> int:
        rows, count = places[piece.first : piece.last], piece.last - piece.first
        self._tell(number, piece, plan, rows + piece.part.offset if piece.part.offset else rows)
        self._start(timer, self._kernels)
        self._short_copies[id(piece.part)](self._told[number % RUN_AHEAD], count, self._kernels)
        return self._kernels

    @abstractmethod
    def _may_go_alone(self, piece: Piece, plan: Plan) -> bool:
        """Say whether a piece with nothing before it should take one stream."""

    @abstractmethod
    def _enqueue_alone(self, number: int, piece: Piece, plan: Plan, places: Ints, timer: int | None) -> int:
        """Enqueue a piece with nothing before it: on one stream, in as few calls as possible."""

    @abstractmethod
    def _enqueue_staged(
        self, number: int, piece: Piece, plan: Plan, places: Ints, timer: int | None, oldest: int
    ) -> int:
        """Enqueue a piece through its buffer, beside others."""

    @abstractmethod
    def _copy(self, ranges: Ranges, stream: int) -> None:
        """Enqueue a copy over the bus."""

    def _copy_stream(self, number: int, ranges: Ranges) -> int:
        return self._copies[number % 2 if ranges.size[0] < _SMALL_RANGE else 0]

    def _start(self, timer: int | None, stream: int) -> None:
        if timer is not None:
            driver.record(timer, stream)

    def is_done(self, number: int) -> bool:
        """Say whether a piece that was enqueued has arrived. It is one of the last `RUN_AHEAD`."""
        return driver.is_over(self._done[number % RUN_AHEAD])

    def wait_done(self, number: int) -> None:
        """Block until a piece has arrived. May be called beside the thread that enqueues."""
        driver.wait_over(self._done[number % RUN_AHEAD])

    def let_follow(self, number: int) -> None:
        """Let what the caller's current stream is told from now on wait for a piece, on the device."""
        stream = torch._C._cuda_getCurrentRawStream(self._device.index or 0)
        driver.wait_for(stream, self._done[number % RUN_AHEAD])

    def seconds(self, timer: int, number: int) -> float:
        """Return the device's time from the start of a timer to the end of a piece that has arrived."""
        return driver.seconds_between(timer, self._done[number % RUN_AHEAD])

    def drain(self) -> None:
        """Block until the streams are empty, also of a piece that could not be enqueued whole."""
        for stream in (self._kernels, self._notes, *self._copies):
            driver.wait_idle(stream)

    def _wait_for_buffer(self, number: int, stream: int, oldest: int) -> None:
        """Let a stream wait until the last user of a piece's buffer is done with it."""
        if number - BUFFERS >= oldest:
            driver.wait_for(stream, self._done[(number - BUFFERS) % RUN_AHEAD])

    def _tell(self, number: int, piece: Piece, plan: Plan, rows: Ints) -> None:
        """Write down a piece's blocks and the places of its rows, for a kernel to read."""
        told, count = self._told_numpy[number % RUN_AHEAD], piece.last - piece.first
        told[:count] = plan.blocks[piece.first : piece.last]
        told[count : 2 * count] = rows

    def _tell_buffer(self, number: int, piece: Piece, plan: Plan) -> None:
        """Do the same with rows that lie in the piece's buffer."""
        buffer, size = self._buffers[number % BUFFERS], piece.part.bytes
        self._tell(number, piece, plan, np.arange(buffer, buffer + piece.bytes, size))

    def _hear(self, number: int, piece: Piece) -> torch.Tensor:
        """Bring what the next kernel is told to the device: if it read that over a busy bus, it would take twice as long.

        On a stream of its own, long before the kernel's turn: it queues behind all that the bus carries to the device.
        """
        row, size = number % RUN_AHEAD, 16 * (piece.last - piece.first)
        driver.copy_range(self._heard[row].data_ptr(), self._told[row].data_ptr(), size, self._notes)
        driver.record(self._noted[row], self._notes)
        driver.wait_for(self._kernels, self._noted[row])
        return self._heard[row]

    def _staged_ranges(self, number: int, piece: Piece, places: Ints) -> Ranges:
        return self._pool.staged_ranges(piece, places, self._buffers[number % BUFFERS])


class StoreLane(Lane):
    """From the device to the pool."""

    gathers = True
    short_bytes = 4 << 20

    def _may_go_alone(self, piece: Piece, plan: Plan) -> bool:
        return True

    def _enqueue_alone(self, number: int, piece: Piece, plan: Plan, places: Ints, timer: int | None) -> int:
        copies = self._copies[0]
        self._tell_buffer(number, piece, plan)
        self._start(timer, copies)
        self._staged_copies[id(piece.part)](self._told[number % RUN_AHEAD], piece.last - piece.first, copies)
        self._copy(self._staged_ranges(number, piece, places), copies)
        return copies

    def _enqueue_staged(
        self, number: int, piece: Piece, plan: Plan, places: Ints, timer: int | None, oldest: int
    ) -> int:
        ready = self._ready[number % RUN_AHEAD]
        self._tell_buffer(number, piece, plan)
        self._start(timer, self._kernels)
        heard = self._hear(number, piece)
        self._wait_for_buffer(number, self._kernels, oldest)
        self._staged_copies[id(piece.part)](heard, piece.last - piece.first, self._kernels)
        driver.record(ready, self._kernels)
        ranges = self._staged_ranges(number, piece, places)
        copies = self._copy_stream(number, ranges)
        driver.wait_for(copies, ready)
        self._copy(ranges, copies)
        return copies

    def _copy(self, ranges: Ranges, stream: int) -> None:
        driver.copy_ranges(ranges.host, ranges.device, ranges.size, stream, pinned=self._pinned)


class LoadLane(Lane):
    """From the pool to the device."""

    gathers = False
    short_bytes = 2 << 20

    def _parts(self, memory: CudaMemory) -> Iterator[tuple[int, Sequence[Part]]]:
        yield from super()._parts(memory)
        for stage in memory.stages:
            yield from enumerate(stage)

    def _may_go_alone(self, piece: Piece, plan: Plan) -> bool:
        return piece.completes == len(plan)  # else the copy of the next piece would wait for its kernel

    def _enqueue_alone(self, number: int, piece: Piece, plan: Plan, places: Ints, timer: int | None) -> int:
        copies = self._copies[0]
        ranges = self._staged_ranges(number, piece, places)
        self._start(timer, copies)
        self._copy(ranges, copies)
        self._tell_buffer(number, piece, plan)
        self._staged_copies[id(piece.part)](self._told[number % RUN_AHEAD], piece.last - piece.first, copies)
        return copies

    def _enqueue_staged(
        self, number: int, piece: Piece, plan: Plan, places: Ints, timer: int | None, oldest: int
    ) -> int:
        ready = self._ready[number % RUN_AHEAD]
        ranges = self._staged_ranges(number, piece, places)
        copies = self._copy_stream(number, ranges)
        self._start(timer, copies)
        self._wait_for_buffer(number, copies, oldest)
        self._copy(ranges, copies)
        driver.record(ready, copies)
        self._tell_buffer(number, piece, plan)
        heard = self._hear(number, piece)
        driver.wait_for(self._kernels, ready)
        self._staged_copies[id(piece.part)](heard, piece.last - piece.first, self._kernels)
        return self._kernels

    def _copy(self, ranges: Ranges, stream: int) -> None:
        driver.copy_ranges(ranges.device, ranges.host, ranges.size, stream, pinned=self._pinned)
