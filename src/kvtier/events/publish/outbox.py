"""Between the threads that publish and the one that sends: a bounded queue that never makes anybody wait.

`put` is one append, and one write to an eventfd if the sending thread sleeps. When the queue is full, batches are folded
until the sending thread has come to the fold: at most one fold exists, always last, so nothing is overtaken. Any thread
may call `put`, `wake` and `close`; the others belong to the sending thread, which may also take batches, but no fold, from the
front of `queue`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from kvtier.errors import IntegrityError
from kvtier.events.publish.fold import Fold
from kvtier.events.publish.hot import wake

__all__ = ["Outbox"]


class Outbox:
    """Batches on their way to the sending thread, in order."""

    def __init__(self, capacity: int, counting: str) -> None:
        self.closed = False
        self.folded = 0
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._capacity = capacity
        self._counting = counting
        self.queue: deque[Any] = deque()
        self._fold: Fold | None = None
        self._lock = threading.Lock()  # of the fold
        self._asleep = False

    def put(self, item: Any) -> None:
        """Queue a batch, or fold it if the queue is full. Raises `RuntimeError` once closed."""
        if self.closed:
            raise RuntimeError("Publisher is closed")
        if self._fold is not None or len(self.queue) >= self._capacity:
            self._put_folded(item)
        else:
            self.queue.append(item)
        if self._asleep:
            self.wake()

    def _put_folded(self, batch: Any) -> None:
        with self._lock:
            if self._fold is None and len(self.queue) < self._capacity:  # there is room meanwhile
                self.queue.append(batch)
                return
            if self._fold is None:
                self._fold = Fold(self._counting)
                self.queue.append(self._fold)
            self._fold.add(batch.events)
            self.folded += 1

    def call(self, task: Any) -> None:
        """Queue something that is not a batch, full or not."""
        self.queue.append(task)
        self.wake()

    def wake(self) -> None:
        """Make the sending thread look."""
        self._asleep = False
        wake(self.wake_fd)

    def close(self) -> None:
        """Take no more batches."""
        self.closed = True
        self.wake()

    # -- the sending thread's -------------------------------------------------------------------------------------------

    def take(self) -> Any | None:
        """Take the next item, `None` if there is none; a fold that was taken grows no more."""
        if not self.queue:
            return None
        item = self.queue.popleft()
        if item is self._fold:
            with self._lock:
                self._fold = None
        return item

    def fall_asleep(self) -> bool:
        """Ask to be woken through `wake_fd` by the next `put`; return whether it is safe to sleep now."""
        self._asleep = True
        if self.queue or self.closed:
            self._asleep = False
        return self._asleep

    def wake_up(self) -> None:
        """Take note of being awake."""
        self._asleep = False
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def __len__(self) -> int:
        return len(self.queue)

    def __del__(self) -> None:
        # Not before: a `put` that is under way in another thread must not write to whatever gets the number next.
        os.close(self.wake_fd)

    def check(self) -> None:
        """Raise `IntegrityError` where a fold is not the last in the queue."""
        with self._lock:
            folds = [item for item in self.queue if isinstance(item, Fold)]
            if len(folds) > 1 or (folds and folds[0] is not self._fold):
                raise IntegrityError(f"outbox: {len(folds)} folds queued, expected one at most, and open")
            if self._fold is not None:
                self._fold.check()
