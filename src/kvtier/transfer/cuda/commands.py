"""Commands to the streams of a lane: tell a kernel its blocks, launch it, copy over the bus, with the events
around it.

A command starts a timer, waits for an event, does its work and records another event, each if there is one
(0: none). A script is the commands of a whole piece, submitted in one call. `PythonSubmitter` says how, call
by call; compiled (`native/_cuda.c`), a script takes little longer than the driver does, and small jobs wait
for nothing else. `make_submitter` chooses. `SUBMITTED_BY` says which was compiled.

Streams, events and addresses are numbers. One thread at a time; any may wait. Errors of the driver are
`TransferError`.
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

__all__ = [
    "BATCH_RANGES",
    "FIRST_RANGES",
    "SMALL_RANGE",
    "SUBMITTED_BY",
    "Command",
    "CommandKind",
    "CopyPages",
    "LaunchKernel",
    "Note",
    "OpenEvent",
    "Placeholder",
    "Plain",
    "PythonSubmitter",
    "Script",
    "Submitter",
    "TellKernel",
    "make_submitter",
]

SUBMITTED_BY = form_of("cuda")
"""Who tells streams what to do. Both tell them the same."""

# What was measured for these: docs/tuning.md.
SMALL_RANGE = 1 << 20
"""Below this size there are gaps between the ranges of a stream, which another can fill."""
BATCH_RANGES = 32
"""In one call of the driver, which takes about a microsecond for each: the bus should not wait for all of
them.
"""

FIRST_RANGES = 4
"""In the first batch of a copy that a job begins with, while the bus is idle; each batch after it has twice
as many.
"""


class Note(NamedTuple):
    """Where a kernel is told its blocks and rows: in pinned memory, and with `heard` in a copy on the
    device.

    The copy is made on a stream of its own (`notes`) long before the kernel's turn: read over a busy bus, it
    would take the kernel twice as long. It queues behind all that the bus carries to the device.
    """

    told: int
    heard: int
    notes: int
    noted: int
    most_blocks: int


class Plain(NamedTuple):
    """What a plain job keeps to. Blocks are chunks: slot i is `i * stride` bytes behind `first`."""

    first: int
    stride: int
    num_blocks: int
    num_slots: int


class Placeholder(StrEnum):
    """Stands in a command for what every piece has its own: scripts are written once, and played for many
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
    """What a command does. The last field of each, and the place of its function in C."""

    TELL = 0
    LAUNCH = 1
    COPY = 2


OpenEvent = int | Literal[Placeholder.START, Placeholder.WAIT]
"""An event, 0 for none, or the name of one that every piece has its own."""


class TellKernel(NamedTuple):
    """The arguments of `Submitter.tell`."""

    note: Note
    blocks: Literal[Placeholder.BLOCKS]
    first: Literal[Placeholder.FIRST]
    last: Literal[Placeholder.LAST]
    rows: Rows | Literal[Placeholder.ROWS]
    offset: int
    kind: CommandKind = CommandKind.TELL


class LaunchKernel(NamedTuple):
    """The arguments of `Submitter.launch`."""

    kernel: driver.Launch
    note: Note
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


Command = TellKernel | LaunchKernel | CopyPages
Script = tuple[Command, ...]


class Submitter(Protocol):
    """What both forms do."""

    def is_plain(self, plain: Plain, blocks: Ints, slots: Ints, engine: int, /) -> bool:
        """Say whether a job has as many slots as blocks, all there and none null, and the engine's stream is
        idle.
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

        The other arguments take the place of `Placeholder`s, in that order.
        """

    def tell(self, note: Note, blocks: Ints, first: int, last: int, rows: Rows, offset: int, /) -> None:
        """Write down blocks `[first, last)` for a kernel, and the places of their rows, plus `offset`."""

    def launch(
        self,
        kernel: driver.Launch,
        note: Note,
        num_blocks: int,
        stream: int,
        start: int,
        wait: int,
        done: int,
        /,
    ) -> None:
        """Copy the blocks of a note by a kernel."""

    def copy(
        self, pages: Pages, blocks: Ints | None, first: int, last: int, rows: Rows,
        stream: int, side: int, side_done: int, after: int, start: int, wait: int, done: int, /,
    ) -> None:  # fmt: skip
        """Copy pages of blocks `[first, last)` between the device and their rows in the pool, joined into
        ranges.

        Without `blocks` they are numbered from 0. Small ranges take turns on two streams, where one fills
        the gaps of the other, unless there is no `side_done` to join them by. What begins with `start`
        begins with a few of them, and `after` another event: that is not the copy's own time.
        """

    def is_over(self, event: int, /) -> bool:
        """Say whether an event has happened."""

    def is_idle(self, stream: int, /) -> bool:
        """Say whether a stream has done all that it has been told."""

    def wait_over(self, event: int, /) -> None:
        """Block until an event has happened."""

    def seconds_between(self, start: int, end: int, /) -> float:
        """Return the device's time between two events that have happened."""


def make_submitter(pool: PoolMap, *, to_pool: bool, pinned: bool) -> Submitter:
    """Return what submits the commands of one direction."""
    if (
        CompiledSubmitter is None or not pinned
    ):  # copies of pageable memory may wait, and must not hold the GIL
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
    """Submits command by command, from Python."""

    def __init__(self, pool: PoolMap, *, to_pool: bool, pinned: bool = True) -> None:
        self._pool, self._to_pool, self._pinned = pool, to_pool, pinned

    def is_plain(self, *job: object) -> bool:
        """Say no, so that the job takes the usual way: to ask would take as long."""
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
        """Do one after the other."""
        own: dict[Placeholder, Any] = dict(
            zip(Placeholder, (blocks, first, last, count, rows, start, wait), strict=True)
        )
        calls: dict[CommandKind, Callable[..., None]] = {
            CommandKind.TELL: self.tell,
            CommandKind.LAUNCH: self.launch,
            CommandKind.COPY: self.copy,
        }
        for command in script:
            *arguments, kind = command
            calls[kind](*(own[item] if isinstance(item, Placeholder) else item for item in arguments))

    def tell(self, note: Note, blocks: Ints, first: int, last: int, rows: Rows, offset: int, /) -> None:
        """Write a note, and bring it to the device."""
        count = last - first
        told = np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(note.told))
        told[:count] = blocks[first:last]
        told[count:] = rows.places(first, last) + offset
        if note.heard:
            driver.copy_range(note.heard, note.told, told.nbytes, note.notes)
            driver.record(note.noted, note.notes)

    def launch(
        self,
        kernel: driver.Launch,
        note: Note,
        num_blocks: int,
        stream: int,
        start: int,
        wait: int,
        done: int,
        /,
    ) -> None:
        """Launch a kernel when its note is there."""
        if start:
            driver.record(start, stream)
        if note.heard:
            driver.wait_for(stream, note.noted)
        if wait:
            driver.wait_for(stream, wait)
        kernel.start(note.heard or note.told, num_blocks, stream)
        if done:
            driver.record(done, stream)

    def copy(
        self, pages: Pages, blocks: Ints | None, first: int, last: int, rows: Rows,
        stream: int, side: int, side_done: int, after: int, start: int, wait: int, done: int, /,
    ) -> None:  # fmt: skip
        """Find the ranges, and copy them."""
        some = np.arange(last - first) if blocks is None else blocks[first:last]
        device, host, size = self._pool.ranges(pages, some, rows.places(first, last))
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
