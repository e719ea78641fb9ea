"""Events that wait to be taken or published, up to a bound, since they may never be taken.

When more events wait than the bound allows, all of them are dropped, and the next ones begin with
`AllBlocksCleared`: a consumer then knows of too few blocks, never of too many. A caller that takes the
events after every step loses none, however many a step has. Events that a publisher fails to take wait, too.
One thread uses this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from kvtier.errors import show_value
from kvtier.events.types import AllBlocksCleared, KVCacheEvent, KVEventBatch

logger = logging.getLogger(__name__)

MOST_BLOCKS = 100_000
"""The most blocks that the waiting events may name: some 20 MB with 16 tokens a block."""


class Publisher(Protocol):
    """A publisher of events, as the engine needs it; `kvtier.events` has some.

    It must not block. If it raises, it gets the same events again, with those of the next step.
    """

    def publish(self, events: KVEventBatch) -> None: ...


class EventBuffer:
    """The events that were added and not taken yet."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._events: list[KVCacheEvent] = []
        self._size = 0
        self._has_warned = False
        self._is_publishing = True
        """False from a failure of the publisher until its next success."""

    def add(self, events: Sequence[KVCacheEvent]) -> None:
        """Keep events; if they exceed the bound, drop all that waited before."""
        size = sum(map(_size_of, events))
        if self._events and self._size + size > self._most_blocks:
            self._drop()
        self._events += events
        self._size += size

    def take(self) -> list[KVCacheEvent]:
        """Drain the events, in order."""
        taken, self._events, self._size = self._events, [], 0
        return taken

    def publish_to(self, publisher: Publisher) -> None:
        """Publish the waiting events as one batch. If the publisher fails, they go on waiting."""
        events = self.take()
        if not events:
            return
        try:
            publisher.publish(KVEventBatch(time.time(), events))  # type: ignore[arg-type]
            self._is_publishing = True
        except Exception as error:  # a publisher may be foreign code, and must not stop the engine
            self.add(events)
            if self._is_publishing:
                self._is_publishing = False
                logger.error(
                    "KV events: the publisher failed with %s; the engine goes on, and events wait for it",
                    show_value(error),
                )

    def _drop(self) -> None:
        self._events, self._size = [AllBlocksCleared()], 1
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "KV events of more than %d blocks were not taken and are dropped; "
                "take_events() goes on with "
                "AllBlocksCleared. Call it after every step, or leave kv_events off.",
                self._most_blocks,
            )


def _size_of(event: KVCacheEvent) -> int:
    """Count an event and the blocks that it names."""
    return 1 + len(getattr(event, "block_hashes", ()))
