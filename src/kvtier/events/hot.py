"""The steps of publishing that touch every block and every token, and the one that the engine waits for, written twice.

In C (`_events.c`) for speed, and here, for machines without a C compiler and as the specification of the other. `HOT_BY` says
which is in use. Any thread may call them; what they are given belongs to one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from kvtier.events.types import ExternalBlockHash
from kvtier.events.wire import U64, hash_sum

__all__ = [
    "HOT_BY",
    "ONE_EVENT_AT",
    "drop_leaves",
    "frame_stored",
    "hold",
    "join_removals",
    "python_drop_leaves",
    "python_frame_stored",
    "python_hold",
    "python_join_removals",
    "python_wake",
    "sum_of",
    "wake",
]

ONE_EVENT_AT = 11
"""Where the event begins in a batch of one: behind 93, cb and the time, 91."""

Value = TypeVar("Value")
_encode = msgspec.msgpack.Encoder().encode
_place = attrgetter("medium", "group_idx", "locality", "ownership")


def python_frame_stored(ts: float, event: Any, tail: bytes) -> bytes | None:
    """Return the batch `[ts, [event], rank]`, the event as a map; `tail` is the rank's bytes.

    `None` if the event cannot be encoded, or, in C, if it is not made of lists of unsigned ints, ints and strings only.
    """
    try:
        return b"".join((b"\x93", _encode(ts), b"\x91", _encode(event), tail))
    except (OverflowError, RecursionError, TypeError, ValueError):
        return None


def python_hold(
    blocks: dict[ExternalBlockHash, Value], hashes: tuple[ExternalBlockHash, ...], record: Value
) -> int | None:
    """Map all hashes to a record that none is mapped to yet; return the sum of their low 64 bits, modulo 2^64.

    `None`, and nothing changed, if one was there before or is named twice. Raises `TypeError` for what is no hash.
    """
    total = sum_of(hashes)
    before = len(blocks)
    deque(map(blocks.setdefault, hashes, repeat(record)), maxlen=0)
    if len(blocks) == before + len(hashes):
        return total & U64
    for block in hashes:
        if blocks.get(block) is record:
            del blocks[block]
    return None


def python_drop_leaves(
    blocks: dict[ExternalBlockHash, Value], children: dict[ExternalBlockHash, int], hashes: list[ExternalBlockHash]
) -> tuple[int, list[Value | None]] | None:
    """Take hashes out; return the sum of their low 64 bits, modulo 2^64, and what each was mapped to, `None` for nothing.

    `None`, and nothing changed, if one of them has children. Raises `TypeError` for what is no hash.
    """
    total = sum_of(hashes)
    if not children.keys().isdisjoint(hashes):
        return None
    return total & U64, list(map(blocks.pop, hashes, repeat(None)))


def python_join_removals(events: list[Any], start: int) -> tuple[list[ExternalBlockHash], int]:
    """Return all hashes of the removals from one place that follow each other from `start` on, and where they end."""
    first = events[start]
    place = _place(first)
    hashes: list[ExternalBlockHash] = []
    stop = start
    while stop < len(events) and type(events[stop]) is type(first) and _place(events[stop]) == place:
        hashes += events[stop].block_hashes
        stop += 1
    return hashes, stop


def python_wake(fd: int) -> bool:
    """Make a non-blocking eventfd readable; return whether it was not about to overflow, which it never is."""
    try:
        os.eventfd_write(fd, 1)
    except OSError:
        return False
    return True


def sum_of(hashes: tuple[ExternalBlockHash, ...] | list[ExternalBlockHash]) -> int:
    """Return what `hash_sum` returns; raise `TypeError` for what is no hash."""
    total = hash_sum(hashes)
    if type(total) is not int:
        raise TypeError(f"a block hash is an int or bytes, got {hashes!r}")
    return total


drop_leaves: Callable[[dict[Any, Any], dict[Any, int], list[Any]], tuple[int, list[Any]] | None]
wake: Callable[[int], bool]
join_removals: Callable[[list[Any], int], tuple[list[ExternalBlockHash], int]]
frame_stored: Callable[[float, Any, bytes], bytes | None]
hold: Callable[[dict[Any, Any], tuple[Any, ...], Any], int | None]
try:
    from kvtier._events import drop_leaves, frame_stored, hold, join_removals, wake

    HOT_BY = "c"
except ImportError:
    drop_leaves, frame_stored, hold = python_drop_leaves, python_frame_stored, python_hold
    join_removals, wake = python_join_removals, python_wake
    HOT_BY = "python"
