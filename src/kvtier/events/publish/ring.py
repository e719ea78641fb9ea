"""The last batches that were sent, by sequence number, within a count and a number of bytes. One thread owns it.

Messages are kept as they are, so what the state holds of them too is there once. Batches that travelled together count one by
one, so that what is kept reaches back equally far however they went.
"""

from __future__ import annotations

from kvtier.errors import IntegrityError
from kvtier.events.publish.hot import Message, PythonMessage

__all__ = ["Ring"]

_Slot = tuple[int, int, Message]
"""How many batches a message carries, its bytes, the message."""

_NOTHING: _Slot = (0, 0, PythonMessage())


class Ring:
    """Messages of consecutive sequence numbers `[head, next)`; the oldest leave first."""

    def __init__(self, capacity: int, max_bytes: int, start: int) -> None:
        """Hold nothing yet; the first message will have number `start`. `capacity` counts batches."""
        self.head = start
        self.next = start
        self.batches = self.bytes = 0
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._slots: list[_Slot] = [_NOTHING] * capacity

    def append(self, message: Message, batches: int = 1) -> None:
        """Keep the message of number `next`, which carries so many batches; the newest stays however many they are."""
        while self.head < self.next and self.batches + batches > self._capacity:
            self._forget_oldest()
        size = len(message)
        self._slots[self.next % self._capacity] = batches, size, message
        self.next += 1
        self.batches += batches
        self.bytes += size
        while self.bytes > self._max_bytes and self.head < self.next:
            self._forget_oldest()

    def __getitem__(self, seq: int) -> bytes:
        """Return the bytes of the message of a number in `[head, next)`."""
        if not self.head <= seq < self.next:
            raise IndexError(f"sequence number {seq} is not in [{self.head}, {self.next})")
        return bytes(self._slots[seq % self._capacity][2].payload())

    def __len__(self) -> int:
        return self.next - self.head

    def restart(self, start: int) -> None:
        """Forget everything; the next message has number `start`."""
        while self.head < self.next:
            self._forget_oldest()
        self.head = self.next = start

    def check(self) -> None:
        """Raise `IntegrityError` where the bounds do not hold or the bytes do not add up."""
        held = sum(len(self[seq]) for seq in range(self.head, self.next))
        batches = sum(self._slots[seq % self._capacity][0] for seq in range(self.head, self.next))
        is_full = batches > self._capacity and len(self) > 1
        if (held, batches) != (self.bytes, self.batches) or is_full or self.bytes > self._max_bytes:
            raise IntegrityError(
                f"ring [{self.head}, {self.next}) of {self._capacity}: {batches} batches and {held} bytes, "
                f"kept {self.batches} and {self.bytes}"
            )

    def _forget_oldest(self) -> None:
        place = self.head % self._capacity
        batches, size, message = self._slots[place]
        message.forget()
        self.batches -= batches
        self.bytes -= size
        self._slots[place] = _NOTHING
        self.head += 1
