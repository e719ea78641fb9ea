"""The parts of a follower's state: sums, pending live batches, the open request, the back-off.

`RankSums` add up what the publisher holds. Our publishers mark batches with the number of blocks that they
hold and a digest of them. A mark that equals the sums confirms them, but only if nothing was lost: losses
can cancel in the sums and still leave wrong blocks (a lost store, a removal and a store that arrive, a lost
removal). After a loss the sums need a snapshot, or a clear of every rank heard of before the loss and then
a mark.

`PendingBatches` are bounded in number and bytes. `Backoff` spaces requests: each failure is followed by a
longer wait, so that no loop can spin. One `Follower` owns one of each. Not for several threads at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from kvtier.errors import IntegrityError
from kvtier.events.types import Mark
from kvtier.events.updates import Limits
from kvtier.events.wire import SNAPSHOT, STATUS, U64, Change, replay_request

MAX_RANKS = 4096
"""How many ranks of one publisher are tracked; with more, no replica is exact."""


class RankSums:
    """Adds up the blocks of each rank.

    A mark covers all ranks together, and a clear only its batch's rank. A lost batch may have changed any
    rank, even one never heard of. So a loss *tears* the ranks heard of before it, and a clear mends one.
    When no rank is torn, the sums can lack only the blocks of ranks that were first heard of since, or
    never. A mark with the same number of blocks shows that there are no such blocks.
    """

    __slots__ = ("_fresh", "_is_crowded", "_ranks", "_torn", "is_open")

    def __init__(self, *, is_open: bool = True) -> None:
        """Begin with nothing; `is_open` says that the publisher may have held blocks before."""
        self.is_open = is_open  # something may have been lost since the last proof
        self._ranks: dict[int, list[int]] = {}  # blocks, and their digest before it is reduced
        self._torn: set[int] = set()  # heard of before a loss, and not cleared since
        self._fresh: set[int] = set()  # first heard of after a loss, and not cleared since
        self._is_crowded = False

    def add(self, rank: int, change: Change) -> None:
        """Count an applied batch of a rank."""
        cleared, blocks, digest = change
        sums = self._ranks.get(rank) or self._add_rank(rank)
        if cleared:
            sums[0] = sums[1] = 0
            self._torn.discard(rank)
            self._fresh.discard(rank)
        sums[0] += blocks
        sums[1] += digest

    def _add_rank(self, rank: int) -> list[int]:
        if len(self._ranks) >= MAX_RANKS:
            self._is_crowded = self.is_open = True
            return [0, 0]
        if self.is_open:
            self._fresh.add(rank)
        return self._ranks.setdefault(rank, [0, 0])

    @property
    def blocks(self) -> int:
        """The number of held blocks. Any thread may ask, while another adds ranks."""
        return sum(blocks for blocks, _ in list(self._ranks.values()))

    @property
    def digest(self) -> int:
        """The digest of all held blocks."""
        return sum(digest for _, digest in self._ranks.values()) & U64

    def add_loss(self) -> None:
        """Record that a batch of an unknown rank was lost."""
        self.is_open = True
        self._torn.update(self._ranks)
        self._fresh.clear()

    def confirm(self, mark: Mark) -> bool:
        """Accept a mark as a proof if it is one; return whether it is."""
        if self._torn or self._is_crowded or (mark.blocks, mark.digest) != (self.blocks, self.digest):
            return False
        self.is_open = False
        self._fresh.clear()
        return True

    def are_whole(self, *, is_stock: bool) -> bool:
        """Return whether nothing can be missing.

        A publisher that is known to be a stock one has only the ranks that it has named.
        """
        if not self.is_open:
            return True
        return is_stock and bool(self._ranks) and not (self._torn or self._fresh or self._is_crowded)

    def check(self) -> None:
        """Raise `IntegrityError` if proven sums have open ranks, or a rank is unknown."""
        if not (self._torn | self._fresh) <= self._ranks.keys() or self._torn & self._fresh:
            raise IntegrityError(
                f"ranks {self._torn} are torn and {self._fresh} fresh, but {set(self._ranks)} were heard of"
            )
        if not self.is_open and (self._torn or self._fresh or self._is_crowded):
            raise IntegrityError(f"sums count as proven, but ranks {self._torn | self._fresh} are not")


class RequestKind(StrEnum):
    """The kind of a request to a publisher."""

    STATUS = "status"  # which process are you, and what is your newest batch
    SNAPSHOT = "snapshot"  # everything you hold
    REPLAY = "replay"  # batches from a number on, to close a gap
    HISTORY = "history"  # batches from 0 on, to rebuild the replica


@dataclass(slots=True, eq=False)
class StreamRequest:
    """An open request, and how far its answer has come."""

    kind: RequestKind
    data: bytes
    start: int = 0  # the first batch that is asked for
    held: int = -1  # the batch that the replica held last at the time of the request,
    proof: bytes | None = None  # and its bytes, if they are known: the answer must have the same
    newest: int = -1  # the newest batch that was known to exist then
    replies: int = 0
    applied: int = 0  # how many replies have changed the replica
    is_continued: bool = False  # the answer has the same bytes,
    is_named: bool = False  # and a mark of the process that is followed
    said: tuple[int, Mark] | None = None  # in the answer to a status request: the newest batch, and the mark

    @classmethod
    def status(cls) -> StreamRequest:
        """Ask for the publisher's epoch and newest batch. A stock publisher sends an empty answer."""
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
    def replay(cls, start: int, held: int, proof: bytes | None) -> StreamRequest:
        """Ask for the batches from `start` on, to go on after batch `held`."""
        return cls(RequestKind.REPLAY, replay_request(start), start, held, proof)


class Backoff:
    """Counts failures, and keeps the time before which no request is sent because of them."""

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
        """Whether to send a different request than the last one, which is so on every second attempt."""
        return self._failures % 2 == 1

    def after_failure(self, now: float) -> bool:
        """Wait after a failed request; return whether there were too many failures."""
        self._failures += 1
        return self._begin(self._failures, now)

    def after_mismatch(self, now: float) -> bool:
        """Wait if the replica was disproved too often in a row; return whether it was."""
        self._mismatches += 1
        return self._mismatches >= self._limits.tries and self._begin(self._mismatches, now)

    def after_reset(self, now: float) -> None:
        """Wait if the last reset was just before; a single restart needs no back-off."""
        is_flapping = now < self._reset_at + self._limits.backoff
        self.until = now + self._limits.backoff if is_flapping else None
        self._reset_at = now

    def _begin(self, times: int, now: float) -> bool:
        delay = self._limits.backoff * 2 ** min(times - 1, 16)
        self.until = now + min(delay, self._limits.backoff_max)
        return times >= self._limits.tries

    def tick(self, now: float) -> None:
        """End the wait if its time has come."""
        if self.until is not None and now >= self.until:
            self.until = None

    def end(self) -> None:
        """End the wait and forget the failures."""
        self._failures, self.until = 0, None

    def forget_mismatches(self) -> None:
        """Begin to count mismatches anew, because the replica was confirmed."""
        self._mismatches = 0


class PendingBatches:
    """Queues the newest part of the live stream that is not applied yet: consecutive numbers, bounded.

    If the queue is full, all batches are dropped but the new one, and a replay brings them again.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.overflows = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._queue: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first(self) -> tuple[int, bytes]:
        """The oldest batch."""
        return self._queue[0]

    def push(self, seq: int, payload: bytes) -> None:
        """Keep a batch, unless it is larger than the whole queue may be."""
        if self._queue and self._queue[-1][0] != seq - 1:
            self.clear()
        if len(self._queue) >= self._max_batches or self._bytes + len(payload) > self._max_bytes:
            self.overflows += 1
            self.clear()
        if len(payload) <= self._max_bytes:
            self._queue.append((seq, payload))
            self._bytes += len(payload)

    def pop(self) -> None:
        """Drop the oldest batch."""
        self._bytes -= len(self._queue.popleft()[1])

    def clear(self) -> None:
        """Drop everything."""
        self._queue.clear()
        self._bytes = 0

    def check(self) -> None:
        """Raise `IntegrityError` unless numbers are consecutive and the bytes are counted right."""
        numbers = [seq for seq, _ in self._queue]
        if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
            raise IntegrityError(f"pending batches are out of order: {numbers[:20]}")
        if self._bytes != sum(len(payload) for _, payload in self._queue):
            raise IntegrityError(f"pending batches: {self._bytes} bytes by the count, which is wrong")
