"""Live batches that wait for a replay of what precedes them: in order, bounded in number and bytes.

Not for several threads at once.
"""

from __future__ import annotations

from collections import deque

from kvtier.errors import IntegrityError

__all__ = ["PendingBatches"]


class PendingBatches:
    """A queue of numbered payloads. Without room, all but the newest go: a replay will bring them again."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.overflows = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._queue: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, seq: int, payload: bytes) -> bool:
        """Keep a batch; say whether it is kept, which only one larger than all the room is not."""
        if len(self._queue) >= self._max_batches or self._bytes + len(payload) > self._max_bytes:
            self.overflows += 1
            self.clear()
        fits = len(payload) <= self._max_bytes
        if fits:
            self._queue.append((seq, payload))
            self._bytes += len(payload)
        return fits

    def pop(self) -> tuple[int, bytes]:
        """Take out the oldest."""
        seq, payload = self._queue.popleft()
        self._bytes -= len(payload)
        return seq, payload

    def put_back(self, seq: int, payload: bytes) -> None:
        """Return what `pop` gave."""
        self._queue.appendleft((seq, payload))
        self._bytes += len(payload)

    def clear(self) -> None:
        """Drop everything."""
        self._queue.clear()
        self._bytes = 0

    def check(self) -> None:
        """Raise `IntegrityError` unless numbers go up and the bytes are counted right."""
        numbers = [seq for seq, _ in self._queue]
        if numbers != sorted(set(numbers)):
            raise IntegrityError(f"pending batches are out of order: {numbers[:20]}")
        if self._bytes != sum(len(payload) for _, payload in self._queue):
            raise IntegrityError(f"pending batches: {self._bytes} bytes by the count, which is wrong")
