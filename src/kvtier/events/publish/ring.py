"""The last batches that were sent, by sequence number, within a count and a number of bytes. One thread owns it.

A batch is kept in the parts that it was made of: those that the state holds too are there once.
"""

from __future__ import annotations

from kvtier.errors import IntegrityError

__all__ = ["Parts", "Ring"]

Parts = tuple[bytes, ...]


class Ring:
    """Payloads of consecutive sequence numbers `[head, next)`; the oldest leave first."""

    def __init__(self, capacity: int, max_bytes: int, start: int) -> None:
        """Hold nothing yet; the first payload will have number `start`."""
        self.head = start
        self.next = start
        self.bytes = 0
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._slots: list[Parts] = [()] * capacity

    def append(self, parts: Parts) -> None:
        """Keep the payload of number `next`."""
        if self.next - self.head == self._capacity:
            self._forget_oldest()
        self._slots[self.next % self._capacity] = parts
        self.next += 1
        self.bytes += _size(parts)
        while self.bytes > self._max_bytes and self.head < self.next:
            self._forget_oldest()

    def __getitem__(self, seq: int) -> bytes:
        """Return the payload of a number in `[head, next)`."""
        if not self.head <= seq < self.next:
            raise IndexError(f"sequence number {seq} is not in [{self.head}, {self.next})")
        return b"".join(self._slots[seq % self._capacity])

    def __len__(self) -> int:
        return self.next - self.head

    def restart(self, start: int) -> None:
        """Forget everything; the next payload has number `start`."""
        self.head = self.next = start
        self.bytes = 0
        self._slots = [()] * self._capacity

    def check(self) -> None:
        """Raise `IntegrityError` where the bounds do not hold or the bytes do not add up."""
        held = sum(len(self[seq]) for seq in range(self.head, self.next))
        if held != self.bytes or len(self) > self._capacity or self.bytes > self._max_bytes:
            raise IntegrityError(
                f"ring [{self.head}, {self.next}) of {self._capacity}: {held} bytes, kept {self.bytes}"
            )

    def _forget_oldest(self) -> None:
        place = self.head % self._capacity
        self.bytes -= _size(self._slots[place])
        self._slots[place] = ()
        self.head += 1


def _size(parts: Parts) -> int:
    return sum(map(len, parts))
