"""What `kvtier events check` compares: the blocks that were announced, kept one by one, with what the publisher says of itself.

The subscriber verifies marks with a running sum, which trusts that no block is announced twice. Here the set itself is
kept, so that a publisher that breaks that promise is found out, too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.cli.event_lines import describe_mark
from kvtier.events.subscriber import Source, Subscriber
from kvtier.events.types import AllBlocksCleared, BlockStored, Mark
from kvtier.events.updates import Received, Reset, SourceStatus, State, StateChanged, Update
from kvtier.events.wire import DecodedBatch, Place, place_of, place_weight, to_u64

__all__ = ["Picture", "Verdict", "examine_stream"]


class Verdict(NamedTuple):
    """Whether the picture is exact, and what there is to say about it."""

    exact: bool
    lines: list[str]


@dataclass(slots=True)
class Picture:
    """The blocks that a publisher announced, and how often it announced one twice or removed one that was not there."""

    held: dict[Place, set[int]] = field(default_factory=lambda: defaultdict(set))
    stored_twice: int = 0
    removed_unheld: int = 0

    def apply(self, batch: DecodedBatch) -> None:
        """Take a batch in."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.forget()
                continue
            hashes, held = {to_u64(each) for each in event.block_hashes}, self.held[place_of(event)]
            if isinstance(event, BlockStored):
                self.stored_twice += len(hashes & held)
                held |= hashes
            else:
                self.removed_unheld += len(hashes - held)
                held -= hashes

    def forget(self) -> None:
        """Hold nothing."""
        self.held.clear()

    @property
    def blocks(self) -> int:
        """Return how many blocks are held."""
        return sum(map(len, self.held.values()))

    @property
    def digest(self) -> int:
        """Return their digest."""
        return sum(place_weight(place) * sum(hashes) for place, hashes in self.held.items()) & (1 << 64) - 1

    def compare(self, mark: Mark) -> list[str]:
        """Return what the publisher says differently, in words; nothing if the pictures are the same."""
        found = []
        if self.blocks != mark.blocks:
            found.append(f"blocks: the publisher has {mark.blocks:,}, it announced {self.blocks:,}")
        if self.digest != mark.digest:
            found.append(f"digest: the publisher has {mark.digest:016x}, it announced {self.digest:016x}")
        return found


def examine_stream(source: Source, timeout: float) -> Verdict:
    """Join a publisher and judge by the first mark that comes once the picture should be exact, or else by what there is."""
    picture, joined, latest, deadline = Picture(), False, None, time.monotonic() + timeout
    subscriber: Subscriber[DecodedBatch] = Subscriber()
    with subscriber:
        subscriber.add(source)
        while (left := deadline - time.monotonic()) > 0:
            for update in subscriber.poll(left):
                _apply(picture, update)
                if isinstance(update, StateChanged):
                    joined = update.state is State.EXACT
                elif isinstance(update, Received) and update.batch.mark is not None:
                    latest = _judge_mark(picture, update.seq, update.batch.mark)
                    if joined:
                        return latest
        return _judge_state(picture, subscriber.status(source.name), timeout, latest)


def _apply(picture: Picture, update: Update) -> None:
    if isinstance(update, Reset):
        picture.forget()
    elif isinstance(update, Received):
        picture.apply(update.batch)


def _judge_mark(picture: Picture, seq: int, mark: Mark) -> Verdict:
    differences = picture.compare(mark)
    heading = f"{'differs' if differences else 'exact'} at {seq}: {describe_mark(mark)}"
    return Verdict(not differences, [heading, *differences, *_oddities(picture)])


def _judge_state(picture: Picture, status: SourceStatus, timeout: float, latest: Verdict | None) -> Verdict:
    """Say what can be known where no mark proved the picture."""
    reason = f" ({status.reason})" if status.reason else ""
    if status.seq < 0:
        return Verdict(False, [f"nothing received from {status.name} in {timeout:g} s{reason}"])
    state = f"{status.state} at {status.seq}{reason}"
    if latest is not None:
        return Verdict(False, [state, *latest.lines])
    lines = [
        f"{state}; {picture.blocks:,} blocks announced",
        f"no mark in {timeout:g} s: stock publishers (vLLM, SGLang) send none; only their numbers tell what is missing",
    ]
    return Verdict(status.state is State.EXACT, lines + _oddities(picture))


def _oddities(picture: Picture) -> list[str]:
    odd = []
    if picture.stored_twice:
        odd.append(f"{picture.stored_twice:,} blocks were announced though they were there")
    if picture.removed_unheld:
        odd.append(f"{picture.removed_unheld:,} blocks were removed though they were not there")
    return odd
