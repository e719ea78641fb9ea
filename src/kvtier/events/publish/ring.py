"""The last messages of a publisher, kept for replay within a count of batches and of bytes.

Batches that travelled together count one by one, so that the ring reaches back equally far in both cases. A
message is kept in its parts, because the state shares most of them. One thread owns a ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import IntegrityError

__all__ = ["Ring"]


class Ring:
    """The messages with numbers `[head, next)`."""

    def __init__(self, capacity: int, max_bytes: int, start: int) -> None:
        """Begin empty; the first message will have number `start`. `capacity` counts batches."""
        self.head = self.next = start
        self.batches = self.bytes = 0
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._messages: dict[int, tuple[int, int, Sequence[bytes]]] = {}  # batches, bytes, parts

    def append(self, parts: Sequence[bytes], batches: int = 1) -> None:
        """Keep the message of number `next`, which carries `batches` batches.

        The newest stays, however large.
        """
        while self.head < self.next and self.batches + batches > self._capacity:
            self._forget_oldest()
        size = sum(map(len, parts))
        self._messages[self.next] = batches, size, parts
        self.next += 1
        self.batches += batches
        self.bytes += size
        while self.bytes > self._max_bytes:
            self._forget_oldest()

    def __getitem__(self, seq: int) -> bytes:
        """Return the message of a number in `[head, next)`."""
        return b"".join(self._messages[seq][2])

    def __len__(self) -> int:
        return len(self._messages)

    def restart(self, start: int) -> None:
        """Forget everything; the next message has number `start`."""
        self._messages.clear()
        self.batches = self.bytes = 0
        self.head = self.next = start

    def check(self) -> None:
        """Raise `IntegrityError` if a bound does not hold or the bytes do not add up."""
        held = sum(len(part) for *_, parts in self._messages.values() for part in parts)
        batches = sum(batches for batches, *_ in self._messages.values())
        is_full = batches > self._capacity and len(self) > 1
        numbers = list(self._messages) == list(range(self.head, self.next))
        if (held, batches) != (self.bytes, self.batches) or is_full or held > self._max_bytes or not numbers:
            raise IntegrityError(
                f"ring [{self.head}, {self.next}) of {self._capacity}: {batches} batches and {held} bytes, "
                f"kept {self.batches} and {self.bytes}"
            )

    def _forget_oldest(self) -> None:
        batches, size, _ = self._messages.pop(self.head)
        self.batches -= batches
        self.bytes -= size
        self.head += 1
