"""Texts about an event stream: lines that describe it, and the report of `kvtier events check`.

Lines are for people, or one JSON object each. JSON lines have a `kind`: `batch` (with `seq`, `ts`, `rank`,
`events` as on the wire, `mark`), `state` or `forgotten`. Bytes are written as hex.

`examine_stream` compares the announced blocks with the publisher's own statement. The subscriber verifies
marks with running sums, which assume that no block is announced twice. This module keeps the set itself, so
it also detects a publisher that breaks that promise. Only the command's thread uses it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import msgspec

from kvtier.events.follow.link import Source
from kvtier.events.subscriber import Subscriber
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, ExternalBlockHash, Mark
from kvtier.events.updates import Received, Reset, SourceStatus, State, StateChanged, Update
from kvtier.events.wire import DecodedBatch, Place, place_of, place_weight, to_u64


class Lines(Protocol):
    """Turns updates of a stream into lines."""

    def batch(self, time: float, seq: int, batch: DecodedBatch) -> Iterator[str]:
        """Yield the lines of a batch."""

    def state(self, time: float, state: str, detail: str) -> Iterator[str]:
        """Yield the line of a change of the stream's state."""

    def forgotten(self, time: float) -> Iterator[str]:
        """Yield the line for the moment when all blocks so far are forgotten."""


class JSONLines:
    """One JSON object a line."""

    def batch(self, time: float, seq: int, batch: DecodedBatch) -> Iterator[str]:
        """Yield one line."""
        events = [_plain(msgspec.to_builtins(event, builtin_types=(bytes,))) for event in batch.events]
        mark = None if batch.mark is None else msgspec.to_builtins(batch.mark)
        yield _json(
            kind="batch",
            time=time,
            seq=seq,
            ts=batch.ts,
            rank=batch.data_parallel_rank,
            events=events,
            mark=mark,
            skipped=batch.skipped,
        )

    def state(self, time: float, state: str, detail: str) -> Iterator[str]:
        """Yield one line."""
        yield _json(kind="state", time=time, state=state, detail=detail)

    def forgotten(self, time: float) -> Iterator[str]:
        """Yield one line."""
        yield _json(kind="forgotten", time=time)


class HumanLines:
    """A line for each event: its time of receipt, its number, and its content."""

    def batch(self, time: float, seq: int, batch: DecodedBatch) -> Iterator[str]:
        """Yield a line for each event, for the mark, and for unreadable events."""
        said = [_describe(event) for event in batch.events]
        if batch.mark is not None:
            said.append(f"mark     {describe_mark(batch.mark)}")
        if batch.skipped:
            said.append(f"unread   {_count(batch.skipped, 'event')}")
        for text in said or ["empty"]:
            yield f"{_clock(time)}  {seq:>8}  {_printable(text)}"

    def state(self, time: float, state: str, detail: str) -> Iterator[str]:
        """Yield one line."""
        yield f"{_clock(time)}  -------- {state}{': ' if detail else ''}{_printable(detail)}"

    def forgotten(self, time: float) -> Iterator[str]:
        """Yield one line."""
        yield f"{_clock(time)}  -------- all that was held is forgotten"


def describe_mark(mark: Mark) -> str:
    """Return a mark in words."""
    return f"epoch {mark.epoch:016x}  {_count(mark.blocks, 'block')}  digest {mark.digest:016x}"


def _describe(event: BlockStored | BlockRemoved | AllBlocksCleared) -> str:
    if isinstance(event, AllBlocksCleared):
        return "cleared"
    where = (event.medium or "GPU") + ("" if event.group_idx is None else f" group {event.group_idx}")
    blocks = f"{where}  {_count(len(event.block_hashes), 'block')} {_span(event.block_hashes)}"
    if isinstance(event, BlockRemoved):
        return f"removed  {blocks}"
    parent = (
        "from the start" if event.parent_block_hash is None else f"after {_short(event.parent_block_hash)}"
    )
    adapter = f"  lora {event.lora_name}" if event.lora_name else ""
    return f"stored   {blocks}  {parent}  {_count(len(event.token_ids), 'token')}{adapter}"


def _span(hashes: Sequence[ExternalBlockHash]) -> str:
    return " … ".join(_short(block) for block in (hashes if len(hashes) < 2 else (hashes[0], hashes[-1])))


def _short(block_hash: ExternalBlockHash) -> str:
    """Return the hash; of a long one only its end, which is its 64-bit form."""
    return f"{block_hash & (1 << 64) - 1:016x}" if isinstance(block_hash, int) else block_hash[-8:].hex()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%H:%M:%S.%f")[:-3]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {_key(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _key(key: Any) -> str | int | float:
    """Return a key that JSON allows; msgpack allows keys of all types."""
    return key if type(key) in (str, int, float) else str(_plain(key))


def _json(**fields: Any) -> str:
    return msgspec.json.encode(fields).decode()  # it writes NaN as null, as JSON has no NaN


def _printable(text: str) -> str:
    """Return text without control characters, whatever a publisher sent."""
    return (
        text
        if text.isprintable()
        else "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    )


# -- the check -------------------------------------------------------------------------------------


class StreamReport(NamedTuple):
    """Whether a stream is good, and the lines to print about it."""

    is_good: bool
    lines: list[str]


@dataclass(slots=True)
class AnnouncedBlocks:
    """Holds the blocks that a publisher announced; counts repeated stores, and removals of absent blocks."""

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
