"""The queue between the publishing threads and the sending thread: bounded, and never makes a caller wait.

`ZmqEventPublisher.publish` appends to the queue while that is shorter than `room`, and writes to an eventfd
if the sending thread sleeps. It touches little memory, because that memory is cold when an engine publishes
after a step. If the queue is full, batches go into an overflow until the sending thread takes it: at most
one exists, always last, so the order is kept.

An overflow is the effect of its batches on the published state. A batch changes the count of a block by +1,
by -1 but not below 0, or to a constant. Any sequence of these is some `n -> max(n + shift, least)`, so a
block needs two numbers however many batches overflow, and the event that stored it last. So an overflow is
never larger than what the cache holds or held.

Any thread may call `queue_or_overflow`, `call`, `wake` and `close`; the sending thread owns the other
methods. An `Overflow` is not for several threads at once; the outbox locks it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

from kvtier.errors import IntegrityError
from kvtier.events.publish.drafts import UNENCODABLE, Draft
from kvtier.events.publish.state import PublishedState
from kvtier.events.types import BlockRemoved, BlockStored, ExternalBlockHash
from kvtier.events.wire import Place, place_of

__all__ = ["Outbox", "Overflow"]

_DraftEvents = Callable[[Any], tuple[list[Draft], list[str]]]


class _Net:
    """The net effect on one block: its count `n` becomes `max(n + shift, least)`.

    `event` is the last event that stored it, or one that removed it.
    """

    __slots__ = ("event", "least", "shift")

    def __init__(self, event: BlockStored | BlockRemoved, shift: float) -> None:
        self.event, self.shift, self.least = event, shift, 0


class Overflow:
    """The net effect of a run of batches, and their number."""

    def __init__(self, counting: str, draft: _DraftEvents) -> None:
        """Begin with no effect. `draft` brings events into their published form, see `Drafter.draft`."""
        self.batches = 0
        self.unreadable = 0  # batches and events that cannot be published
        self.cleared: set[int] = set()
        self._draft = draft
        self._counted = counting == "count"
        self._nets: dict[int, dict[Place, dict[ExternalBlockHash, _Net]]] = {}

    def add(self, batch: Any) -> None:
        """Add one batch.

        Events of an unknown kind, and events that cannot be published, do not change the state.
        """
        self.batches += 1
        try:
            drafts, problems = self._draft(batch.events)
            self.unreadable += len(problems)
            for kind, event, _ in drafts:
                self._add(batch.data_parallel_rank, kind, event)
        except UNENCODABLE:  # dropped whole, as in the queue
            self.unreadable += 1

    def _add(self, rank: int, kind: str, event: Any) -> None:
        if kind == "AllBlocksCleared":
            self.cleared.add(rank)
            self._nets.pop(rank, None)
        elif kind in ("BlockStored", "BlockRemoved"):
            nets = self._nets.setdefault(rank, {}).setdefault(place_of(event), {})
            first_shift = -inf if rank in self.cleared else 0
            is_store = kind == "BlockStored"
            for block in event.block_hashes:
                net = nets.get(block)
                if net is None:
                    net = nets[block] = _Net(event, first_shift)
                if is_store:
                    net.event = event
                    net.shift, net.least = (net.shift + 1, net.least + 1) if self._counted else (-inf, 1)
                else:
                    net.shift, net.least = (
                        (net.shift - 1, max(net.least - 1, 0)) if self._counted else (-inf, 0)
                    )

    def ranks(self) -> set[int]:
        """Return the ranks whose states change."""
        return self.cleared | self._nets.keys()

    def apply(self, rank: int, state: PublishedState) -> None:
        """Apply the batches' effect to a rank's state. If the rank was cleared, the state must be empty."""
        for nets in self._nets.get(rank, {}).values():
            _apply_nets(state, nets)

    def check(self) -> None:
        """Raise `IntegrityError` if a net effect is impossible."""
        for rank, places in self._nets.items():
            for place, nets in places.items():
                wrong = [block for block, net in nets.items() if net.least < 0 or net.shift > net.least]
                if wrong:
                    raise IntegrityError(f"overflow: rank {rank}, {place}: impossible net effect of {wrong}")


def _apply_nets(state: PublishedState, nets: dict[ExternalBlockHash, _Net]) -> None:
    """Remove blocks first, then add blocks, then set counts."""
    stored: dict[int, tuple[Any, dict[ExternalBlockHash, int]]] = {}
    for block, net in nets.items():
        before = state.count_of(net.event, block)
        after = int(max(before + net.shift, net.least))
        if before:
            state.set_count(net.event, block, after)
        elif after:
            stored.setdefault(id(net.event), (net.event, {}))[1][block] = after
    for event, counts in stored.values():
        state.adopt(event, set(counts))
        for block, count in counts.items():
            state.set_count(event, block, count)


class Outbox:
    """Batches for the sending thread, in order."""

    def __init__(self, capacity: int, counting: str, rank: int, draft: _DraftEvents) -> None:
        """Queue up to `capacity` batches. An overflowing batch without a rank gets `rank`.

        `counting` and `draft` are for an overflow.
        """
        self.closed = False
        self.overflowed = 0
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._capacity = self.room = capacity  # no room while there is an overflow, or once closed
        self._rank = rank
        self._counting = counting
        self._draft = draft
        self.queue: deque[Any] = deque()  # batches, tasks and at most one overflow
        self._overflow: Overflow | None = None
        self._lock = threading.Lock()  # guards the overflow
        self.is_asleep = False

    def queue_or_overflow(self, batch: Any) -> None:
        """Let a batch that found no room overflow, unless there is room now. `RuntimeError` once closed."""
        if self.closed:
            raise RuntimeError("Publisher is closed")
        if batch.data_parallel_rank is None:
            batch.data_parallel_rank = self._rank
        with self._lock:
            if self._overflow is None and len(self.queue) < self._capacity:  # there is room by now
                self.queue.append(batch)
                return
            if self._overflow is None:
                self.room = 0
                self._overflow = Overflow(self._counting, self._draft)
                self.queue.append(self._overflow)
            self._overflow.add(batch)
            self.overflowed += 1

    def call(self, task: Any) -> None:
        """Queue a task, even if the queue is full."""
        self.queue.append(task)
        self.wake()

    def wake(self) -> None:
        """Wake the sending thread."""
        self.is_asleep = False
        os.eventfd_write(self.wake_fd, 1)

    def close(self) -> None:
        """Take no more batches."""
        with self._lock:
            self.close_without_lock()
        self.wake()

    def close_without_lock(self) -> None:
        """Take no more batches, without the lock: in a forked child no thread would release it."""
        self.closed = True
        self.room = 0

    # -- for the sending thread --------------------------------------------------------------------

    def take(self) -> Any:
        """Take the next item, `None` if there is none. An overflow no longer grows once it is taken."""
        item = self.queue.popleft() if self.queue else None
        if type(item) is Overflow:
            with self._lock:
                self._overflow = None
                self.room = 0 if self.closed else self._capacity
        return item

    def fall_asleep(self) -> bool:
        """Ask the next batch to wake us through `wake_fd`; return whether it is safe to sleep now."""
        self.is_asleep = True
        if self.queue or self.closed:
            self.is_asleep = False
        return self.is_asleep

    def wake_up(self) -> None:
        """Note that the thread is awake."""
        self.is_asleep = False
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def __len__(self) -> int:
        return len(self.queue)

    def __del__(self) -> None:
        # Not earlier: a concurrent `publish` in another thread must not write to a file that reuses the
        # number.
        os.close(self.wake_fd)

    def check(self) -> None:
        """Raise `IntegrityError` if more than the one open overflow is queued."""
        with self._lock:
            found = [item for item in self.queue if isinstance(item, Overflow)]
            if len(found) > 1 or (found and found[0] is not self._overflow):
                raise IntegrityError(
                    f"outbox: {len(found)} overflows queued, expected one at most, and open"
                )
            if self._overflow is not None:
                self._overflow.check()
