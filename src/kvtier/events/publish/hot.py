"""The steps of publishing that touch every block and every token, and the one that the engine waits for, written twice.

In C (`_events.c`) for speed, and in Python, for machines without a C compiler and as the specification of the other. `HOT_BY`
says which is in use; `KVTIER_EVENTS=python` asks for the second. The C form of `Blocks` takes hashes that are unsigned 64-bit
ints; for others there is `PythonBlocks`. Any thread may call `wake`; the rest belongs to one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from itertools import groupby, repeat
from typing import Any, Protocol, Self

import msgspec

from kvtier.events.types import ExternalBlockHash
from kvtier.events.wire import U64, hash_sum

__all__ = [
    "HOT_BY",
    "Begun",
    "BlockTable",
    "Blocks",
    "Draft",
    "Express",
    "Message",
    "PythonBlocks",
    "PythonExpress",
    "PythonMessage",
    "ShortWay",
    "make_message",
    "python_read_stored",
    "python_wake",
    "read_stored",
    "sum_of",
    "wake",
]

Hashes = tuple[ExternalBlockHash, ...] | list[ExternalBlockHash]
Dropped = tuple[int, list[ExternalBlockHash], list[tuple[int, int]]]
"""The sum of the hashes, the hashes, and runs of `(number, times)`."""

Draft = tuple[str, Any, bytes]
"""An event on its way out: the name of its kind, the event, its bytes."""

Begun = tuple[float, int, list[Draft]]
"""A batch that was begun: its time, how many events the message had before it, and what of it is left to do."""


class _Hashes(msgspec.Struct):
    block_hashes: list[ExternalBlockHash]


_read_map = msgspec.msgpack.Decoder(_Hashes).decode
_read_array = msgspec.msgpack.Decoder().decode


# -- messages -------------------------------------------------------------------------------------------------------------


class Message(Protocol):
    """A message: first events are added, then it is sealed and stays as it is.

    In C, what a record has of its event is a *piece* of the message: bytes-like, and no copy. Pieces outlive what the ring keeps:
    a message that was forgotten takes no more than twice the room of those that are still in use, and some kilobytes.
    """

    events: int
    batches: int
    ts: float
    """Of how many batches the events are, and the time of the last; set by whoever adds them."""

    def append(self, data: bytes, /) -> None:
        """Add an event."""

    def seal(self, head: bytes, tail: bytes, /) -> None:
        """Put the rest around the events, and add no more."""

    def payload(self) -> Any:
        """Return all of it as something bytes-like, which stays as it is."""

    def forget(self) -> None:
        """Take note that nobody will ask for the payload again."""

    def __len__(self) -> int:
        """Return how many bytes it has."""


class PythonMessage:
    """`Message` as a list of its parts: those that the state holds too are there once."""

    def __init__(self) -> None:
        self.events = self.batches = 0
        self.ts = 0.0
        self._parts: list[bytes] = []
        self._size = 0

    def append(self, data: bytes, /) -> None:
        """Add an event."""
        self.events += 1
        self._parts.append(data)
        self._size += len(data)

    def seal(self, head: bytes, tail: bytes, /) -> None:
        """Put the rest around the events."""
        self._parts = [head, *self._parts, tail]
        self._size += len(head) + len(tail)

    def payload(self) -> bytes:
        """Return all of it."""
        return b"".join(self._parts)

    def forget(self) -> None:
        """Do nothing: what is not shared leaves with the message."""

    def __len__(self) -> int:
        return self._size


# -- batches --------------------------------------------------------------------------------------------------------------


class ShortWay(Protocol):
    """A short way into a `PublishedState` that publishes maps. Whatever goes through it comes to the same as without it."""

    def take(self, events: Any, out: Message, /) -> list[Draft] | None:
        """Bring a batch into the state and what of it is news to `out`; return what is left from the first unusual event on.

        `None`, and nothing done, unless all are stores and removals with hashes that are unsigned 64-bit ints, tokens and
        numbers that are too, and texts. Removals in a row from one place become one. What is unusual: a block that is stored
        again, is counted, or was not held; a removal that leaves orphans; a place that is new.
        """

    def join(self, queue: deque[Any], most: int, most_bytes: int, rank: int, out: Message, /) -> Begun | None:
        """Take up to `most` batches of a rank from the front of a queue that has as many, until `out` has `most_bytes`.

        They are counted in `out`. What is no batch, or one of another rank, or with a time that is no float, or that `take` would
        leave alone, stays in the queue with all behind it. One that is done in part, or is no news, is the last to be taken,
        and is returned: it is not counted yet.
        """


class PythonExpress:
    """`ShortWay` that takes nothing: all batches go the long way."""

    def __init__(self, state: Any) -> None:
        """Lead to a state."""

    def take(self, events: Any, out: Message, /) -> list[Draft] | None:
        """Leave a batch alone."""
        return None

    def join(self, queue: deque[Any], most: int, most_bytes: int, rank: int, out: Message, /) -> Begun | None:
        """Leave all batches in the queue."""
        return None


def python_read_stored(data: bytes) -> list[Any]:
    """Return the hashes of an encoded store; in C `None` unless it is a map of unsigned 64-bit ints."""
    return _read_map(data).block_hashes if bytes(data)[0] >> 4 == 0x8 else _read_array(data)[1]


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
Express: Callable[[Any], ShortWay]
make_message: Callable[[], Message]
read_stored: Callable[[bytes], list[Any] | None]
wake: Callable[[int], bool]
try:
    if os.environ.get("KVTIER_EVENTS") == "python":
        raise ImportError("the environment asks for the Python form")
    from kvtier._events import Blocks, Express, read_stored, wake
    from kvtier._events import Message as _MessageInC

    make_message = _MessageInC
    HOT_BY = "c"
except ImportError:
    Blocks, Express, make_message = PythonBlocks, PythonExpress, PythonMessage
    read_stored, wake = python_read_stored, python_wake
    HOT_BY = "python"
