"""`KVEventAggregator`: finds the events that all workers of a connector report.

A block is cached once every worker has its part. Workers' batches are added one by one; an event is common
when at least as many batches hold it as there are workers. Repeated events are counted separately: the
second `BlockStored` of a batch is common when enough batches hold a second one. So the sequence stored,
removed, stored again comes out in that order. One call of `add_events` is one worker's batch. Not for
several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Self

from kvtier.errors import InputError
from kvtier.events.types import KVCacheEvent

__all__ = ["KVConnectorKVEvents", "KVEventAggregator"]


class KVEventAggregator:
    """Counts in how many workers' batches each event appears."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = 0
        self._seen: Counter[tuple[KVCacheEvent, int]] = Counter()
        self.increment_workers(num_workers)

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Add the batch of one worker."""
        if not isinstance(events, list):
            raise TypeError(f"events: expected a list of events, got {type(events).__name__}")
        earlier: Counter[KVCacheEvent] = Counter()
        for event in events:
            self._seen[event, earlier[event]] += 1
            earlier[event] += 1

    def get_common_events(self) -> list[KVCacheEvent]:
        """Return the events that all workers reported, in the order of their first arrival."""
        return [event for (event, _), count in self._seen.items() if count >= self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """Return every event as often as it was added; equal events of several workers are grouped.

        The order of each worker's events is kept.
        """
        return [event for (event, _), count in self._seen.items() for _ in range(count)]

    def clear_events(self) -> None:
        """Forget all events; the number of workers stays."""
        self._seen.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Expect events of `count` more workers."""
        if count <= 0:
            raise InputError(f"workers: expected at least 1, got {count}")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Expect events of one worker."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """Return how many workers are expected to send events."""
        return self._num_workers

    def __repr__(self) -> str:
        """Show the number of workers and of different events."""
        different = len({event for event, _ in self._seen})
        return f"<KVEventAggregator workers={self._num_workers}, events={different}>"


class KVConnectorKVEvents(ABC):
    """The events of a connector's workers, on their way to the scheduler."""

    @abstractmethod
    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Add the batch of one worker."""

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Keep only the events that all workers report."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """Expect events of `count` more workers."""

    @abstractmethod
    def get_all_events(self) -> list[KVCacheEvent]:
        """Return every event that was added."""

    @abstractmethod
    def get_number_of_workers(self) -> int:
        """Return how many workers are expected to send events."""

    @abstractmethod
    def clear_events(self) -> None:
        """Forget all events."""

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Add the events of one other worker."""
        self.add_events(other.get_all_events())
        return self
