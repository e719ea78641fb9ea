"""`kvtier events check`: compares the announced blocks with the publisher's own statement.

The subscriber verifies marks with running sums, which assume that no block is announced twice. This module
keeps the set itself, so it also detects a publisher that breaks that promise. Only the command's thread
uses it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.cli.event_lines import describe_mark
from kvtier.events.follow.link import Source
from kvtier.events.subscriber import Subscriber
from kvtier.events.types import AllBlocksCleared, BlockStored, Mark
from kvtier.events.updates import Received, Reset, SourceStatus, State, StateChanged, Update
from kvtier.events.wire import DecodedBatch, Place, place_of, place_weight, to_u64

__all__ = ["AnnouncedBlocks", "StreamReport", "examine_stream"]


class StreamReport(NamedTuple):
    """Whether a stream is good, and the lines to print about it."""

    is_good: bool
    lines: list[str]


@dataclass(slots=True)
class AnnouncedBlocks:
    """The blocks that a publisher announced; counts repeated stores, and removals of absent blocks."""

    held: dict[tuple[int, Place], set[int]] = field(default_factory=lambda: defaultdict(set))
    stored_twice: int = 0
    removed_unheld: int = 0

    def apply(self, batch: DecodedBatch) -> None:
        """Apply a batch."""
        rank = batch.data_parallel_rank or 0
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._clear(rank)
                continue
            hashes = {to_u64(block_hash) for block_hash in event.block_hashes}
            held = self.held[rank, place_of(event)]
            if isinstance(event, BlockStored):
                self.stored_twice += len(hashes & held)
                held |= hashes
            else:
                self.removed_unheld += len(hashes - held)
                held -= hashes

    def _clear(self, rank: int) -> None:
        for key in [key for key in self.held if key[0] == rank]:
            del self.held[key]

    def forget(self) -> None:
        """Forget all blocks."""
        self.held.clear()

    @property
    def blocks(self) -> int:
        """Return the number of held blocks."""
        return sum(map(len, self.held.values()))

    @property
    def digest(self) -> int:
        """Return the digest of the held blocks."""
        return (
            sum(place_weight(place) * sum(hashes) for (_, place), hashes in self.held.items())
            & (1 << 64) - 1
        )

    def compare(self, mark: Mark) -> list[str]:
        """Describe how the publisher's mark differs; empty if both are equal."""
        found = []
        if self.blocks != mark.blocks:
            found.append(f"blocks: the publisher has {mark.blocks:,}, it announced {self.blocks:,}")
        if self.digest != mark.digest:
            found.append(f"digest: the publisher has {mark.digest:016x}, it announced {self.digest:016x}")
        return found


def examine_stream(source: Source, timeout: float) -> StreamReport:
    """Join a publisher; judge by the first mark after the replica is exact, else by the last state."""
    announced, joined, latest, deadline = AnnouncedBlocks(), False, None, time.monotonic() + timeout
    subscriber: Subscriber[DecodedBatch] = Subscriber()
    with subscriber:
        subscriber.add(source)
        while (left := deadline - time.monotonic()) > 0:
            for update in subscriber.poll(left):
                _apply(announced, update)
                if isinstance(update, StateChanged):
                    joined = update.state is State.EXACT
                elif isinstance(update, Received) and update.batch.mark is not None:
                    latest = _report_mark(announced, update.seq, update.batch.mark)
                    if joined:
                        return latest
        return _report_state(announced, subscriber.status(source.name), source, timeout, latest)


def _apply(announced: AnnouncedBlocks, update: Update) -> None:
    if isinstance(update, Reset):
        announced.forget()
    elif isinstance(update, Received):
        announced.apply(update.batch)


def _report_mark(announced: AnnouncedBlocks, seq: int, mark: Mark) -> StreamReport:
    differences = announced.compare(mark)
    heading = f"{'differs' if differences else 'exact'} at {seq}: {describe_mark(mark)}"
    return StreamReport(not differences, [heading, *differences, *_oddities(announced)])


def _report_state(
    announced: AnnouncedBlocks,
    status: SourceStatus,
    source: Source,
    timeout: float,
    latest: StreamReport | None,
) -> StreamReport:
    """Report the state if no mark has proved anything."""
    reason = f" ({status.reason})" if status.reason else ""
    hint = (
        []
        if source.replay_endpoint
        else ["with --replay ENDPOINT it could be asked for what it said before"]
    )
    if status.seq < 0 and status.connected and not source.replay_endpoint:
        idle = f"connected to {status.name}, which said nothing in {timeout:g} s"
        return StreamReport(
            True, [f"{idle}: an idle vLLM or SGLang does not, so there is nothing to compare", *hint]
        )
    if status.seq < 0 and status.state is not State.EXACT:
        return StreamReport(False, [f"nothing received from {status.name} in {timeout:g} s{reason}"])
    state = f"{status.state} at {status.seq}{reason}"
    if latest is not None:
        # no mark since it became exact (a rare heartbeat, or none): an earlier mark counts
        is_good = latest.is_good and status.state is State.EXACT
        return StreamReport(is_good, latest.lines if is_good else [state, *latest.lines, *hint])
    lines = [
        f"{state}; {announced.blocks:,} blocks announced",
        f"no mark in {timeout:g} s: stock publishers (vLLM, SGLang) send none; "
        "only their numbers tell what is missing",
        *_oddities(announced),
    ]
    is_exact = status.state is State.EXACT
    return StreamReport(is_exact, lines if is_exact else lines + hint)


def _oddities(announced: AnnouncedBlocks) -> list[str]:
    odd = []
    if announced.stored_twice:
        odd.append(f"{announced.stored_twice:,} blocks were announced though they were there")
    if announced.removed_unheld:
        odd.append(f"{announced.removed_unheld:,} blocks were removed though they were not there")
    return odd
