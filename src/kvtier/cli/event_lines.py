"""Lines that describe an event stream: for people, or one JSON object each.

JSON lines have a `kind`: `batch` (with `seq`, `ts`, `rank`, `events` as on the wire, `mark`), `state` or
`forgotten`. Bytes are written as hex.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Protocol

import msgspec

from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, ExternalBlockHash, Mark
from kvtier.events.wire import DecodedBatch

__all__ = ["HumanLines", "JSONLines", "Lines", "describe_mark"]


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
