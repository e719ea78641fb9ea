"""The steps of publishing that touch every block and every token, and the one that the engine waits for, written twice.

In C (`_events.c`) for speed, and here, for machines without a C compiler and as the specification of the other. `HOT_BY` says
which is in use; `KVTIER_EVENTS=python` asks for the second. The C form of `Blocks` takes hashes that are unsigned 64-bit ints;
for others there is `PythonBlocks`. Any thread may call the functions; what they are given belongs to one, and so does a table.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any, Protocol, Self

import msgspec

from kvtier.events.types import ExternalBlockHash
from kvtier.events.wire import U64, hash_sum

__all__ = [
    "HOT_BY",
    "BlockTable",
    "Blocks",
    "PythonBlocks",
    "encode_plain",
    "join_removals",
    "python_encode_plain",
    "python_join_removals",
    "python_wake",
    "sum_of",
    "wake",
]

Hashes = tuple[ExternalBlockHash, ...] | list[ExternalBlockHash]
Dropped = tuple[int, list[ExternalBlockHash], list[tuple[int, int]]]
"""The sum of the hashes, the hashes, and runs of `(number, times)`."""

_encode = msgspec.msgpack.Encoder().encode
_place = attrgetter("medium", "group_idx", "locality", "ownership")
_KINDS = ("BlockStored", "BlockRemoved")


# -- events ---------------------------------------------------------------------------------------------------------------


def python_encode_plain(event: Any) -> bytes | None:
    """Return the bytes of a stored or removed event, as a map, if its hashes are all unsigned 64-bit ints; `None` if not.

    In C also `None` if it has another value that is not a string, an unsigned int or a list of these ints.
    """
    if type(event).__name__ not in _KINDS:
        return None
    hashes, parent = event.block_hashes, getattr(event, "parent_block_hash", None)
    if type(hashes) is not list or not _are_plain(hashes if parent is None else [*hashes, parent]):
        return None
    try:
        return _encode(event)
    except (OverflowError, RecursionError, TypeError, ValueError):
        return None


def _are_plain(hashes: list[Any]) -> bool:
    return not hashes or (set(map(type, hashes)) == {int} and min(hashes) >= 0 and max(hashes) <= U64)


def python_join_removals(events: list[Any], start: int) -> tuple[list[ExternalBlockHash], int] | None:
    """Return all hashes of the removals from one place that follow each other from `start` on, and where they end.

    `None` if one has no list of hashes; in C also if the events are not structs with the fields of ours.
    """
    first = events[start]
    place = _place(first)
    hashes: list[ExternalBlockHash] = []
    stop = start
    while stop < len(events) and type(events[stop]) is type(first) and _place(events[stop]) == place:
        if type(events[stop].block_hashes) is not list:
            return None
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


# -- blocks ---------------------------------------------------------------------------------------------------------------


class BlockTable(Protocol):
    """Block hashes, each with a number from 1 to 2^32 - 1. Whatever is no hash raises `TypeError` and changes nothing."""

    def hold(self, hashes: Hashes, number: int, /) -> int | None:
        """Give all hashes a number and return the sum of their low 64 bits, modulo 2^64.

        `None`, and nothing changed, if one is held already or is named twice.
        """

    def drop(self, hashes: list[ExternalBlockHash], children: Any, /) -> Dropped | None:
        """Take hashes out; return the sum, the list and the numbers, in runs, of those that were held.

        `None`, and nothing changed, if one of them is in `children`, another table of this kind.
        """

    def get(self, block: ExternalBlockHash, /) -> int:
        """Return a hash's number, 0 if it is not held."""

    def put(self, block: ExternalBlockHash, number: int, /) -> None:
        """Give a hash a number, whether it has one or not."""

    def pop(self, block: ExternalBlockHash, /) -> int:
        """Take one hash out and return its number, 0 if it was not held."""

    def count(self, hashes: Hashes, number: int, /) -> int:
        """Return how many of the hashes have that number."""

    def copy(self) -> Self:
        """Return a table of the same."""

    def __len__(self) -> int:
        """Return how many hashes are held."""


class PythonBlocks:
    """`BlockTable` as a dict, for hashes of any type."""

    def __init__(self) -> None:
        self._numbers: dict[ExternalBlockHash, int] = {}

    def hold(self, hashes: Hashes, number: int, /) -> int | None:
        """Give all hashes a number."""
        total, numbers = sum_of(hashes), self._numbers
        if not numbers.keys().isdisjoint(hashes):
            return None
        before = len(numbers)
        numbers.update(zip(hashes, repeat(number), strict=False))
        if len(numbers) == before + len(hashes):
            return total & U64
        deque(map(numbers.pop, set(hashes)), maxlen=0)
        return None

    def drop(self, hashes: list[ExternalBlockHash], children: PythonBlocks, /) -> Dropped | None:
        """Take hashes out that have no children."""
        total = sum_of(hashes)
        if not children._numbers.keys().isdisjoint(hashes):
            return None
        numbers = [self._numbers.pop(block, 0) for block in hashes]
        if 0 in numbers:
            hashes = [block for block, number in zip(hashes, numbers, strict=True) if number]
            total, numbers = sum_of(hashes), [number for number in numbers if number]
        return total & U64, hashes, [(number, len(list(same))) for number, same in groupby(numbers)]

    def get(self, block: ExternalBlockHash, /) -> int:
        """Return a hash's number."""
        return self._numbers.get(block, 0)

    def put(self, block: ExternalBlockHash, number: int, /) -> None:
        """Give a hash a number."""
        self._numbers[block] = number

    def pop(self, block: ExternalBlockHash, /) -> int:
        """Take one hash out."""
        return self._numbers.pop(block, 0)

    def count(self, hashes: Hashes, number: int, /) -> int:
        """Return how many of the hashes have that number."""
        return list(map(self._numbers.get, hashes)).count(number)

    def copy(self) -> PythonBlocks:
        """Return a table of the same."""
        made = PythonBlocks()
        made._numbers = self._numbers.copy()
        return made

    def __len__(self) -> int:
        return len(self._numbers)


def sum_of(hashes: Hashes) -> int:
    """Return what `hash_sum` returns; raise `TypeError` for what is no hash."""
    total = hash_sum(hashes)
    if type(total) is not int:
        raise TypeError(f"a block hash is an int or bytes, got {hashes!r}")
    return total


# -- the form in use ------------------------------------------------------------------------------------------------------

Blocks: Callable[[], BlockTable]
encode_plain: Callable[[Any], bytes | None]
join_removals: Callable[[list[Any], int], tuple[list[ExternalBlockHash], int] | None]
wake: Callable[[int], bool]
try:
    if os.environ.get("KVTIER_EVENTS") == "python":
        raise ImportError("the environment asks for the Python form")
    from kvtier._events import Blocks, encode_plain, join_removals, wake

    HOT_BY = "c"
except ImportError:
    Blocks, encode_plain = PythonBlocks, python_encode_plain
    join_removals, wake = python_join_removals, python_wake
    HOT_BY = "python"
