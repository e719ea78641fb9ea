"""A lane takes the pieces of one direction over the bus, in order, and says when each has arrived.

    store   kernel stream:  gather piece n into buffer n % BUFFERS  --ready-->  copy stream:  buffer to rows  --done
    load    copy stream:    rows to buffer n % BUFFERS  --ready-->  kernel stream:  scatter piece n            --done

A kernel waits for its buffer on the device, never on the host, and the bus goes on while kernels wait for the engine's
own. Pieces alternate between two copy streams: where rows are small, one fills the gaps of the other. A piece with nothing
before it has nothing to overlap with, and takes one stream and fewer calls. At most `RUN_AHEAD` pieces are under way, so
that stopping is a matter of milliseconds.

A lane knows nothing of jobs and has no lock: its handler calls it from one thread at a time. The engine's work that a
piece must follow is over when the piece is enqueued. Errors of the device are `TransferError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvtier.errors import TransferError
from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.memory import BUFFERS, CudaMemory
from kvtier.transfer.cuda.pieces import MOST_BLOCKS, Ints, Piece, Ranges
from kvtier.transfer.plan import Plan

__all__ = ["RUN_AHEAD", "Lane", "LoadLane", "StoreLane"]

RUN_AHEAD = 8
PRIORITY = 0  # the lowest that CUDA has; higher ones moved no more bytes beside matrix products
_COPY_STREAMS = 2


def _translate(error: RuntimeError) -> TransferError:
    """Return an error of torch as one of ours."""
    if isinstance(error, TransferError):
        return error
    return TransferError(f"expected a working CUDA device, got: {str(error).splitlines()[0]}")


def _new_event(*, enable_timing: bool = False, blocking: bool = False) -> torch.cuda.Event:
    """Return an event. `blocking`: a thread that waits for it sleeps."""
    return torch.cuda.Event(enable_timing=enable_timing, blocking=blocking)  # type: ignore[no-untyped-call]


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=PRIORITY)  # type: ignore[no-untyped-call]


class Lane(ABC):
    """Streams, buffers and events of one direction."""

    gathers: bool

    def __init__(self, memory: CudaMemory) -> None:
        from kvtier.transfer.cuda.kernels import PageCopy  # needs Triton, which only who has a device needs

        device = self._device = memory.device
        self._pool = memory.pool_map
        self._pinned = memory.pinning.pinned
        self._enqueued = 0
        self._kernels = _new_stream(device)
        self._copies = [_new_stream(device) for _ in range(_COPY_STREAMS)]
        staging = torch.empty((BUFFERS, memory.staging_bytes // 2 // BUFFERS), dtype=torch.int8, device=device)
        self._buffers: list[torch.Tensor] = list(staging)
        self._told = list(torch.empty((RUN_AHEAD, MOST_BLOCKS), dtype=torch.int64, pin_memory=True))
        self._told_numpy = [row.numpy() for row in self._told]
        self._block_ids = list(torch.empty((RUN_AHEAD, MOST_BLOCKS), dtype=torch.int64, device=device))
        self._spare_fences: list[torch.cuda.Event] = []
        self._spare_timers: list[torch.cuda.Event] = []
        self._ready = [_new_event() for _ in range(RUN_AHEAD)]
        self._done = [_new_event(enable_timing=True) for _ in range(RUN_AHEAD)]
        with torch.cuda.device(device):
            self._page_copies = {
                id(part): PageCopy(part, device, gather=self.gathers)
                for parts in memory.parts
                for part in parts
                if not part.direct
            }
            torch.cuda.synchronize()

    def enter_thread(self) -> None:
        """Make the device that of the calling thread."""
        torch.cuda.set_device(self._device)

    def fence(self) -> torch.cuda.Event:
        """Mark what the caller's current stream has been told so far."""
        fence = self._spare_fences.pop() if self._spare_fences else _new_event(blocking=True)
        fence.record(torch.cuda.current_stream(self._device))
        return fence

    def is_over(self, fence: torch.cuda.Event) -> bool:
        """Say whether what is before a fence has been done."""
        try:
            return bool(fence.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise _translate(error) from error

    def wait_over(self, fence: torch.cuda.Event) -> None:
        """Block until what is before a fence has been done."""
        try:
            fence.synchronize()
        except RuntimeError as error:
            raise _translate(error) from error

    def timer(self) -> torch.cuda.Event:
        """Return what `enqueue` starts and `seconds` reads."""
        return self._spare_timers.pop() if self._spare_timers else _new_event(enable_timing=True)

    def take_back(self, fence: torch.cuda.Event, timer: torch.cuda.Event) -> None:
        """Use a fence and a timer again, for another job: making events takes longer than recording them."""
        self._spare_fences.append(fence)
        self._spare_timers.append(timer)

    @abstractmethod
    def _enqueue_staged(
        self, number: int, piece: Piece, ranges: Ranges, copies: torch.cuda.Stream
    ) -> torch.cuda.Stream:
        """Enqueue a piece through its buffer; return the stream on which it ends."""

    @abstractmethod
    def _enqueue_alone(
        self, number: int, piece: Piece, ranges: Ranges, copies: torch.cuda.Stream, timer: torch.cuda.Event | None
    ) -> torch.cuda.Stream:
        """Do the same with nothing before it to overlap with: on one stream, in as few calls as possible."""

    @abstractmethod
    def _copy(self, ranges: Ranges, stream: torch.cuda.Stream) -> None:
        """Enqueue a copy over the bus."""

    def enqueue(self, piece: Piece, plan: Plan, places: Ints, timer: torch.cuda.Event | None) -> int:
        """Enqueue a piece and return its number. `timer` starts with it."""
        number = self._enqueued
        try:
            stream = self._enqueue_piece(number, piece, plan, places, timer)
            self._done[number % RUN_AHEAD].record(stream)
        except RuntimeError as error:
            raise _translate(error) from error
        self._enqueued += 1
        return number

    def _enqueue_piece(
        self, number: int, piece: Piece, plan: Plan, places: Ints, timer: torch.cuda.Event | None
    ) -> torch.cuda.Stream:
        copies = self._copies[number % _COPY_STREAMS]
        if piece.part.direct:
            ranges = self._pool.direct_ranges(piece, places, plan.blocks)
            if timer is not None:
                timer.record(copies)
            self._copy(ranges, copies)
            return copies
        ranges = self._pool.staged_ranges(piece, places, self._buffers[number % BUFFERS].data_ptr())
        self._told_numpy[number % RUN_AHEAD][: piece.last - piece.first] = plan.blocks[piece.first : piece.last]
        if self._is_idle(number):
            return self._enqueue_alone(number, piece, ranges, copies, timer)
        if timer is not None:
            timer.record(self._kernels if self.gathers else copies)
        return self._enqueue_staged(number, piece, ranges, copies)

    def _is_idle(self, number: int) -> bool:
        """Say whether the piece before has arrived, and the last user of the buffer is done with it.

        The second does not follow from the first: pieces that are copied as they are overtake kernels.
        """
        return all(self.is_done(before) for before in (number - 1, number - BUFFERS) if before >= 0)

    def is_done(self, number: int) -> bool:
        """Say whether a piece that was enqueued has arrived. It is one of the last `RUN_AHEAD`."""
        return self.is_over(self._done[number % RUN_AHEAD])

    def wait_done(self, number: int) -> None:
        """Block until a piece has arrived. May be called beside the thread that enqueues."""
        self.wait_over(self._done[number % RUN_AHEAD])

    def seconds(self, timer: torch.cuda.Event, number: int) -> float:
        """Return the device's time from the start of a timer to the end of a piece that has arrived."""
        try:
            return float(timer.elapsed_time(self._done[number % RUN_AHEAD])) / 1000
        except RuntimeError as error:
            raise _translate(error) from error

    def drain(self) -> None:
        """Block until the streams are empty, also of a piece that could not be enqueued whole."""
        try:
            for stream in (self._kernels, *self._copies):
                stream.synchronize()
        except RuntimeError as error:
            raise _translate(error) from error

    def _wait_for_buffer(self, number: int, stream: torch.cuda.Stream) -> None:
        """Let a stream wait until the last user of a piece's buffer is done with it."""
        if number >= BUFFERS:
            stream.wait_event(self._done[(number - BUFFERS) % RUN_AHEAD])

    def _tell_blocks(self, number: int, piece: Piece, stream: torch.cuda.Stream) -> None:
        """Copy a piece's block ids to the device: a kernel that read them over a busy bus would take twice as long."""
        row, size = number % RUN_AHEAD, 8 * (piece.last - piece.first)
        driver.copy_range(self._block_ids[row].data_ptr(), self._told[row].data_ptr(), size, stream.cuda_stream)

    def _copy_pages(self, number: int, piece: Piece, block_ids: list[torch.Tensor], stream: torch.cuda.Stream) -> None:
        row, buffer = block_ids[number % RUN_AHEAD], self._buffers[number % BUFFERS]
        self._page_copies[id(piece.part)](row, piece.last - piece.first, buffer, stream.cuda_stream)


class StoreLane(Lane):
    """From the device to the pool."""

    gathers = True

    def _enqueue_staged(
        self, number: int, piece: Piece, ranges: Ranges, copies: torch.cuda.Stream
    ) -> torch.cuda.Stream:
        ready = self._ready[number % RUN_AHEAD]
        self._wait_for_buffer(number, self._kernels)
        self._tell_blocks(number, piece, self._kernels)
        self._copy_pages(number, piece, self._block_ids, self._kernels)
        ready.record(self._kernels)
        copies.wait_event(ready)
        self._copy(ranges, copies)
        return copies

    def _enqueue_alone(
        self, number: int, piece: Piece, ranges: Ranges, copies: torch.cuda.Stream, timer: torch.cuda.Event | None
    ) -> torch.cuda.Stream:
        if timer is not None:
            timer.record(copies)
        self._copy_pages(number, piece, self._told, copies)
        self._copy(ranges, copies)
        return copies

    def _copy(self, ranges: Ranges, stream: torch.cuda.Stream) -> None:
        driver.copy_ranges(ranges.host, ranges.device, ranges.size, stream.cuda_stream, pinned=self._pinned)


class LoadLane(Lane):
    """From the pool to the device."""

    gathers = False

    def _enqueue_staged(
        self, number: int, piece: Piece, ranges: Ranges, copies: torch.cuda.Stream
    ) -> torch.cuda.Stream:
        ready = self._ready[number % RUN_AHEAD]
        self._wait_for_buffer(number, copies)
        self._tell_blocks(number, piece, copies)
        self._copy(ranges, copies)
        ready.record(copies)
        self._kernels.wait_event(ready)
        self._copy_pages(number, piece, self._block_ids, self._kernels)
        return self._kernels

    def _enqueue_alone(
        self, number: int, piece: Piece, ranges: Ranges, copies: torch.cuda.Stream, timer: torch.cuda.Event | None
    ) -> torch.cuda.Stream:
        if timer is not None:
            timer.record(copies)
        self._copy(ranges, copies)
        self._copy_pages(number, piece, self._told, copies)
        return copies

    def _copy(self, ranges: Ranges, stream: torch.cuda.Stream) -> None:
        driver.copy_ranges(ranges.device, ranges.host, ranges.size, stream.cuda_stream, pinned=self._pinned)
