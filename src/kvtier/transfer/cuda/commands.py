"""Commands to the streams of a lane: write the arguments of a kernel, launch it, copy over the bus, with the
events around it.

A command starts a timer, waits for an event, does its work and records another event; each event may be 0,
for none. A script holds the commands of a whole piece, submitted in one call. `PythonSubmitter` is the
specification, call by call. In the compiled form (`native/_cuda.c`) a script takes little longer than the
driver's own calls, which matters most for small jobs. `make_submitter` chooses a form; `SUBMITTED_BY` says
which one was compiled.

Streams, events and addresses are numbers. One thread at a time may submit; any thread may wait. Errors of
the driver are `TransferError`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from kvtier.native import form_of, uses_c
from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.pieces import Ints, Pages, PoolMap, Rows

if uses_c("cuda"):
    from kvtier.native._cuda import Submitter as CompiledSubmitter
else:
    CompiledSubmitter = None  # type: ignore[assignment, misc]

SUBMITTED_BY = form_of("cuda")
"""Whether C or Python submits commands. Both submit the same."""

# docs/cuda-constants.md has the measurements for these.
SMALL_RANGE = 1 << 20
"""Below this size there are gaps between the ranges of a stream, which a second stream can fill."""
BATCH_RANGES = 32
"""The most ranges in one call of the driver. A range takes it about a microsecond, and the bus should not
wait for many.
"""

FIRST_RANGES = 4
"""The ranges in the first batch of a job's first copy, while the bus is idle; each next batch has twice as
many.
"""


class KernelArgs(NamedTuple):
    """The addresses at which a kernel reads its blocks and rows: `host` is in pinned memory, `device` is a
    copy on the device, or 0 for none.

    The copy is made on a `stream` of its own long before the kernel's turn, and records the event `copied`:
    if the kernel read its arguments over a busy bus, it would take twice as long. The copy queues behind
    everything that the bus carries to the device.
    """

    host: int
    device: int
    stream: int
    copied: int
    max_blocks: int


class SimpleBounds(NamedTuple):
    """The bounds of simple jobs, whose chunks are single blocks. Slot i is at `first + i * stride`."""

    first: int
    stride: int
    num_blocks: int
    num_slots: int


class Placeholder(StrEnum):
    """A name in a command for a value that differs by piece: a script is written once and played for many
    pieces.
    """

    BLOCKS = "blocks"
    FIRST = "first"
    LAST = "last"
    COUNT = "count"
    ROWS = "rows"
    START = "start"
    WAIT = "wait"


class CommandKind(IntEnum):
    """The work of a command. It is the last field of each command, and the index of its function in C."""

    WRITE_ARGS = 0
    LAUNCH = 1
    COPY = 2


OpenEvent = int | Literal[Placeholder.START, Placeholder.WAIT]
"""An event, 0 for none, or the placeholder of an event that differs by piece."""


class WriteArgs(NamedTuple):
    """The arguments of `Submitter.write_args`."""

    args: KernelArgs
    blocks: Literal[Placeholder.BLOCKS]
    first: Literal[Placeholder.FIRST]
    last: Literal[Placeholder.LAST]
    rows: Rows | Literal[Placeholder.ROWS]
    offset: int
    kind: CommandKind = CommandKind.WRITE_ARGS


class LaunchKernel(NamedTuple):
    """The arguments of `Submitter.launch`."""

    kernel: driver.Launch
    args: KernelArgs
    num_blocks: Literal[Placeholder.COUNT]
    stream: int
    start: OpenEvent
    wait: OpenEvent
    done: int
    kind: CommandKind = CommandKind.LAUNCH


class CopyPages(NamedTuple):
    """The arguments of `Submitter.copy`."""

    pages: Pages
    blocks: Literal[Placeholder.BLOCKS] | None
    first: Literal[Placeholder.FIRST]
    last: Literal[Placeholder.LAST]
    rows: Literal[Placeholder.ROWS]
    stream: int
    side: int
    side_done: int
    after: int
    start: OpenEvent
    wait: OpenEvent
    done: int
    kind: CommandKind = CommandKind.COPY


Command = WriteArgs | LaunchKernel | CopyPages
Script = tuple[Command, ...]


class Submitter(Protocol):
    """The interface of the compiled and the Python form."""

    def is_simple(self, bounds: SimpleBounds, blocks: Ints, slots: Ints, engine: int, /) -> bool:
        """Return whether a job has as many slots as blocks, all valid and none null, and the engine's
        stream is idle.
        """

    def play(
        self,
        script: Script,
        blocks: Ints,
        first: int,
        last: int,
        count: int,
        rows: Rows,
        start: int,
        wait: int,
        /,
    ) -> None:
        """Submit the commands of a script for a piece.

        The other arguments replace the `Placeholder`s, in the order of that enum.
        """

    def write_args(
        self, args: KernelArgs, blocks: Ints, first: int, last: int, rows: Rows, offset: int, /
    ) -> None:
        """Write blocks `[first, last)` for a kernel, and the addresses of their rows plus `offset`."""

    def launch(
        self,
        kernel: driver.Launch,
        args: KernelArgs,
        num_blocks: int,
        stream: int,
        start: int,
        wait: int,
        done: int,
        /,
    ) -> None:
        """Launch a kernel that copies the blocks of its arguments."""

    def copy(
        self, pages: Pages, blocks: Ints | None, first: int, last: int, rows: Rows,
        stream: int, side: int, side_done: int, after: int, start: int, wait: int, done: int, /,
    ) -> None:  # fmt: skip
        """Copy pages of blocks `[first, last)` between the device and their rows in the pool, joined into
        ranges.

        Without `blocks` the blocks are numbered from 0. Small ranges take turns on two streams, where one
        fills the gaps of the other, unless there is no `side_done` to join them by. A copy with `start`
        begins with a small batch. The wait for `after` comes before `start`, because it is not the copy's
        own time.
        """

    def is_over(self, event: int, /) -> bool:
        """Return whether an event has happened."""

    def is_idle(self, stream: int, /) -> bool:
        """Return whether a stream has done all its work."""

    def wait_over(self, event: int, /) -> None:
        """Block until an event has happened."""

    def seconds_between(self, start: int, end: int, /) -> float:
        """Return the device's time between two events that have happened."""


def make_submitter(pool: PoolMap, *, to_pool: bool, pinned: bool) -> Submitter:
    """Return the submitter of one direction's commands."""
    if (
        CompiledSubmitter is None or not pinned
    ):  # copies of pageable memory may block, and must not hold the GIL meanwhile
        return PythonSubmitter(pool, to_pool=to_pool, pinned=pinned)
    return CompiledSubmitter(
        driver.find_functions(),
        driver.fail,
        to_pool,
        pool.address,
        pool.seam,
        SMALL_RANGE,
        FIRST_RANGES,
        BATCH_RANGES,
    )


class PythonSubmitter:
    """The Python form, which submits command by command."""

    def __init__(self, pool: PoolMap, *, to_pool: bool, pinned: bool = True) -> None:
        self._pool, self._to_pool, self._pinned = pool, to_pool, pinned

    def is_simple(self, *job: object) -> bool:
        """Return `False`, so that the job takes the usual way: the check would take as long."""
        return False

    def play(
        self,
        script: Script,
        blocks: Ints,
        first: int,
        last: int,
        count: int,
        rows: Rows,
        start: int,
        wait: int,
        /,
    ) -> None:
        """Submit one command after the other."""
        own: dict[Placeholder, Any] = dict(
            zip(Placeholder, (blocks, first, last, count, rows, start, wait), strict=True)
        )
        calls: dict[CommandKind, Callable[..., None]] = {
            CommandKind.WRITE_ARGS: self.write_args,
            CommandKind.LAUNCH: self.launch,
            CommandKind.COPY: self.copy,
        }
        for command in script:
            *arguments, kind = command
            calls[kind](*(own[item] if isinstance(item, Placeholder) else item for item in arguments))

    def write_args(
        self, args: KernelArgs, blocks: Ints, first: int, last: int, rows: Rows, offset: int, /
    ) -> None:
        """Write the arguments, and copy them to the device if they have an address there."""
        count = last - first
        written = np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(args.host))
        written[:count] = blocks[first:last]
        written[count:] = rows.addresses(first, last) + offset
        if args.device:
            driver.copy_range(args.device, args.host, written.nbytes, args.stream)
            driver.record(args.copied, args.stream)

    def launch(
        self,
        kernel: driver.Launch,
        args: KernelArgs,
        num_blocks: int,
        stream: int,
        start: int,
        wait: int,
        done: int,
        /,
    ) -> None:
        """Launch a kernel, which waits for its arguments."""
        if start:
            driver.record(start, stream)
        if args.device:
            driver.wait_for(stream, args.copied)
        if wait:
            driver.wait_for(stream, wait)
        kernel.start(args.device or args.host, num_blocks, stream)
        if done:
            driver.record(done, stream)

    def copy(
        self, pages: Pages, blocks: Ints | None, first: int, last: int, rows: Rows,
        stream: int, side: int, side_done: int, after: int, start: int, wait: int, done: int, /,
    ) -> None:  # fmt: skip
        """Find the ranges, and copy them."""
        some = np.arange(last - first) if blocks is None else blocks[first:last]
        device, host, size = self._pool.ranges(pages, some, rows.addresses(first, last))
        dst, src = (host, device) if self._to_pool else (device, host)
        two = side_done and len(size) > 1 and size[0] < SMALL_RANGE
        streams = [stream, side] if two else [stream]
        for follower in streams if after else ():
            driver.wait_for(follower, after)
        if start:
            driver.record(start, stream)
        for follower in streams if wait else ():
            driver.wait_for(follower, wait)
        most, at, turn = BATCH_RANGES if driver.has_batches() else 1, 0, 0
        batch = min(FIRST_RANGES if start else most, most)
        while at < len(size):
            now = slice(at, at + batch)
            driver.copy_ranges(
                dst[now], src[now], size[now], streams[turn % len(streams)], pinned=self._pinned
            )
            at, turn, batch = at + batch, turn + 1, min(2 * batch, most)
        if two:
            driver.record(side_done, side)
            driver.wait_for(stream, side_done)
        if done:
            driver.record(done, stream)

    is_over = staticmethod(driver.is_over)
    is_idle = staticmethod(driver.is_idle)
    wait_over = staticmethod(driver.wait_over)
    seconds_between = staticmethod(driver.seconds_between)
