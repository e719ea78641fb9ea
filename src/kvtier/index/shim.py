"""Stands in for what `PrefixIndex` is about to offer itself: a block size learnt from the stream, the reasons why
workers are incomplete, and entries in slices. Delete this file then; `service` and `api` use nothing else of it.

Any thread may call anything here, as with the index.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from kvtier.events.types import BlockStored
from kvtier.events.wire import DecodedBatch
from kvtier.index.base import Op, Tier
from kvtier.index.prefix import PrefixIndex

__all__ = ["LearningIndex", "orphans_dropped", "reasons_of", "slices_of"]

_NO_ROOM = "some of its blocks found no room in the index: raise --budget"


class LearningIndex(PrefixIndex):
    """An index that may learn its block size (`None`) from the first store, and notices others."""

    block_size: int | None  # type: ignore[assignment]

    def __init__(self, *, block_size: int | None, **settings: Any) -> None:
        """Start empty."""
        super().__init__(block_size=block_size or 1, **settings)
        self.block_size = block_size
        self._others: dict[str, str] = {}

    def apply(self, worker: str, batch: Any) -> None:
        """Apply a batch, unless nothing is known of blocks yet."""
        with self._lock:
            self._learn(worker, batch)
            if self.block_size is not None:
                super().apply(worker, batch)

    def _learn(self, worker: str, batch: Any) -> None:
        for size in _sizes(batch):
            if self.block_size is None:
                self.block_size = size
            elif size != self.block_size:
                problem = f"its blocks have {size} tokens, those of this index {self.block_size}"
                self._others[worker] = f"{problem}: register it with block_size {size} or none, once no other is"

    def clear(self, worker: str) -> None:
        """Forget all that a worker holds."""
        self._others.pop(worker, None)
        super().clear(worker)

    def remove_worker(self, worker: str) -> None:
        """Forget a worker."""
        self._others.pop(worker, None)
        super().remove_worker(worker)


def _sizes(batch: Any) -> set[int]:
    """Return the block sizes of a batch's stores; placeholders say 0."""
    if isinstance(batch, DecodedBatch):
        return {event.block_size for event in batch.events if isinstance(event, BlockStored)} - {0}
    from kvtier.index.compiled.scan import SCANNED_BLOCK_SIZE

    stores = batch.steps[batch.steps[:, 0] == int(Op.STORED)]
    return set(stores[:, SCANNED_BLOCK_SIZE].tolist()) - {0}


def reasons_of(index: LearningIndex) -> dict[str, str]:
    """Return the workers that the index knows too little of, each with the reason."""
    found: Any = index.incomplete()
    if isinstance(found, dict):
        return found
    with index._lock:
        parked = {
            name: "more blocks than can wait came before their parents"
            for name, worker in index._workers.items()
            if worker.translator is not None and worker.translator.waiting.dropped
        }
        return dict.fromkeys(found, _NO_ROOM) | parked | index._others


def orphans_dropped(index: LearningIndex) -> int:
    """Return how many blocks were dropped while they waited for their parents."""
    with index._lock:
        translators = [worker.translator for worker in index._workers.values()]
        return sum(each.waiting.dropped for each in translators if each is not None)


def slices_of(index: LearningIndex, size: int) -> Iterator[list[tuple[str, int, Tier]]]:
    """Yield all that is held now in slices: worker, the engine's hash, tier. Only the first step takes long."""
    entries = index.entries()
    names = {worker: index.engine_hashes(worker) for worker in index.workers}
    while part := [(worker, names[worker].get(key, key), tier) for worker, key, tier in islice(entries, size)]:
        yield part
