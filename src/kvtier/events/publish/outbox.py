"""Between the threads that publish and the one that sends: a bounded queue that never makes anybody wait.

`ZmqEventPublisher.publish` appends to the queue while that is shorter than `room`, and writes to an eventfd
if the sending thread sleeps: what it touches is cold when an engine comes to it after a step, so it looks at
little. When the queue is full, batches go into an overflow until the sending thread has come to it: at most
one exists, always last, so nothing is overtaken.
Any thread may call `put_aside`, `call`, `wake` and `close`; the others belong to the sending thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from kvtier.errors import IntegrityError
from kvtier.events.publish.overflow import Draft, Overflow

__all__ = ["Outbox"]


class Outbox:
    """Batches on their way to the sending thread, in order."""

    def __init__(self, capacity: int, counting: str, rank: int, draft: Draft) -> None:
        """Queue up to `capacity` batches; those that overflow and name no rank are of `rank`.

        `counting` and `draft` are for an overflow.
        """
        self.closed = False
        self.overflowed = 0
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._capacity = self.room = capacity  # no room while there is an overflow, or once closed
        self._rank = rank
        self._counting = counting
        self._draft = draft
        self.queue: deque[Any] = deque()  # of batches, tasks and an overflow
        self._overflow: Overflow | None = None
        self._lock = threading.Lock()  # of the overflow
        self.is_asleep = False

    def put_aside(self, batch: Any) -> None:
        """Let a batch overflow that found no room. Raises `RuntimeError` once closed."""
        if self.closed:
            raise RuntimeError("Publisher is closed")
        if batch.data_parallel_rank is None:
            batch.data_parallel_rank = self._rank
        with self._lock:
            if self._overflow is None and len(self.queue) < self._capacity:  # there is room meanwhile
                self.queue.append(batch)
                return
            if self._overflow is None:
                self.room = 0
                self._overflow = Overflow(self._counting, self._draft)
                self.queue.append(self._overflow)
            self._overflow.add(batch)
            self.overflowed += 1

    def call(self, task: Any) -> None:
        """Queue something that is not a batch, full or not."""
        self.queue.append(task)
        self.wake()

    def wake(self) -> None:
        """Make the sending thread look."""
        self.is_asleep = False
        os.eventfd_write(self.wake_fd, 1)

    def close(self) -> None:
        """Take no more batches."""
        with self._lock:
            self.refuse()
        self.wake()

    def refuse(self) -> None:
        """Take no more batches; for a forked child, where nobody lets go of the lock."""
        self.closed = True
        self.room = 0

    # -- the sending thread's ----------------------------------------------------------------------

    def take(self) -> Any:
        """Take the next item, `None` if there is none; an overflow that was taken grows no more."""
        item = self.queue.popleft() if self.queue else None
        if type(item) is Overflow:
            with self._lock:
                self._overflow = None
                self.room = 0 if self.closed else self._capacity
        return item

    def fall_asleep(self) -> bool:
        """Ask to be woken through `wake_fd` by the next batch; return whether it is safe to sleep now."""
        self.is_asleep = True
        if self.queue or self.closed:
            self.is_asleep = False
        return self.is_asleep

    def wake_up(self) -> None:
        """Take note of being awake."""
        self.is_asleep = False
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def __len__(self) -> int:
        return len(self.queue)

    def __del__(self) -> None:
        # Not before: a `publish` that is under way in another thread must not write to whatever gets the number
        # next.
        os.close(self.wake_fd)

    def check(self) -> None:
        """Raise `IntegrityError` where more than the open overflow is queued."""
        with self._lock:
            found = [item for item in self.queue if isinstance(item, Overflow)]
            if len(found) > 1 or (found and found[0] is not self._overflow):
                raise IntegrityError(
                    f"outbox: {len(found)} overflows queued, expected one at most, and open"
                )
            if self._overflow is not None:
                self._overflow.check()
