"""The requests of a follower to its publisher, the pauses between them, and the live batches that wait.

A `StreamRequest` is one open request. `Backoff` spaces requests: each failure is followed by a longer
pause, so that no loop can spin. `PendingBatches` are bounded in number and bytes. Not for several threads
at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from kvtier.errors import IntegrityError
from kvtier.events.updates import Limits
from kvtier.events.wire import SNAPSHOT, STATUS, replay_request

__all__ = ["Backoff", "PendingBatches", "RequestKind", "StreamRequest"]


class RequestKind(StrEnum):
    """The kind of a request to a publisher."""

    STATUS = "status"  # which publisher are you, and what is your newest batch
    SNAPSHOT = "snapshot"  # everything you hold
    REPLAY = "replay"  # batches from a number on, to close a gap
    HISTORY = "history"  # batches from 0 on, to rebuild the replica


@dataclass(slots=True, eq=False)
class StreamRequest:
    """An open request. `proof` is the hash of batch `start`, if the answer must begin with that batch."""

    kind: RequestKind
    data: bytes
    start: int = 0
    proof: int | None = None
    replies: int = 0
    checks: int = 0  # how many marks had been compared when the request was made
    newest: int = -1  # the newest batch known to exist then

    @classmethod
    def status(cls) -> StreamRequest:
        """Ask for the publisher's identity and newest batch. A stock publisher sends an empty answer."""
        return cls(RequestKind.STATUS, STATUS)

    @classmethod
    def snapshot(cls) -> StreamRequest:
        """Ask for everything that the publisher holds."""
        return cls(RequestKind.SNAPSHOT, SNAPSHOT)

    @classmethod
    def history(cls) -> StreamRequest:
        """Ask for everything that was ever published."""
        return cls(RequestKind.HISTORY, replay_request(0))

    @classmethod
    def replay(cls, after: int, proof: int | None) -> StreamRequest:
        """Ask for the batches after a batch; with its hash as a `proof`, for that batch too."""
        start = after + (proof is None)
        return cls(RequestKind.REPLAY, replay_request(start), start, proof)


class Backoff:
    """The pause before the next request, if any, and the failures that caused it."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.until: float | None = None
        self._limits = limits
        self._failures = 0
        self._mismatches = 0
        self._reset_at = now - limits.backoff

    @property
    def is_waiting(self) -> bool:
        """Whether no request may be sent now."""
        return self.until is not None

    @property
    def other_way(self) -> bool:
        """Whether to ask a different question than the last one: on every second attempt."""
        return self._failures % 2 == 1

    def after_failure(self, now: float) -> bool:
        """Begin the pause after a failed request; say whether there were too many failures."""
        self._failures += 1
        return self._begin(self._failures, now)

    def after_mismatch(self, now: float) -> bool:
        """Begin a pause if the replica was disproved too often in a row; say whether it was."""
        self._mismatches += 1
        return self._mismatches >= self._limits.tries and self._begin(self._mismatches, now)

    def after_reset(self, now: float) -> None:
        """Begin a pause if the last reset was just before; after a single restart there is none."""
        is_flapping = now < self._reset_at + self._limits.backoff
        self.until = now + self._limits.backoff if is_flapping else None
        self._reset_at = now

    def _begin(self, times: int, now: float) -> bool:
        pause = self._limits.backoff * 2 ** min(times - 1, 16)
        self.until = now + min(pause, self._limits.backoff_max)
        return times >= self._limits.tries

    def tick(self, now: float) -> None:
        """End the pause if it is over."""
        if self.until is not None and now >= self.until:
            self.until = None

    def end(self) -> None:
        """End the pause and forget the failures."""
        self._failures, self.until = 0, None

    def forget_mismatches(self) -> None:
        """Note that the replica was confirmed."""
        self._mismatches = 0


class PendingBatches:
    """A queue of numbered payloads.

    If it is full, all are dropped but the new one: a replay brings them again.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.overflows = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._queue: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, seq: int, payload: bytes) -> bool:
        """Keep a batch; return False only if it is larger than the whole queue."""
        if len(self._queue) >= self._max_batches or self._bytes + len(payload) > self._max_bytes:
            self.overflows += 1
            self.clear()
        fits = len(payload) <= self._max_bytes
        if fits:
            self._queue.append((seq, payload))
            self._bytes += len(payload)
        return fits

    def pop(self) -> tuple[int, bytes]:
        """Take the oldest batch."""
        seq, payload = self._queue.popleft()
        self._bytes -= len(payload)
        return seq, payload

    def put_back(self, seq: int, payload: bytes) -> None:
        """Put back a batch from `pop`."""
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
