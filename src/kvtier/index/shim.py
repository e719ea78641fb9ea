"""Stands in for what `PrefixIndex` is about to offer itself: a block size learnt from the stream, why
workers are incomplete, a dump in slices, counters, a start before anything is compiled. `PrefixIndex.dump`
tells whether it does.

TO BE DELETED with the merge of that index: `new_index` is then `PrefixIndex` (with form `auto` by
default), `reasons_of` is `incomplete()`, `counts_of` is `stats()._asdict()`, and `slices_of` is `dump()`.
Any thread may call anything here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

from kvtier.events.types import BlockStored
from kvtier.events.wire import DecodedBatch
from kvtier.index.base import Op, Tier
from kvtier.index.prefix import PrefixIndex

__all__ = ["counts_of", "new_index", "reasons_of", "slices_of"]

logger = logging.getLogger(__name__)

_IS_THERE = hasattr(PrefixIndex, "dump")
_NO_ROOM = "some of its blocks found no room in the index: raise --budget"
_ORPHANS = "more of its blocks than can wait came before their parents"


class _LearningIndex(PrefixIndex):
    """An index that may learn its block size (`None`) from the first store, and notices others."""

    def __init__(self, *, block_size: int | None, **settings: Any) -> None:
        super().__init__(block_size=block_size or 1, **settings)
        self.block_size: Any = block_size
        self._others: dict[str, str] = {}

    def apply(self, worker: str, batch: Any) -> None:
        with self._lock:
            self._learn(worker, batch)
            if self.block_size is not None:
                super().apply(worker, batch)

    def _learn(self, worker: str, batch: Any) -> None:
        for size in _sizes(batch):
            if self.block_size is None:
                self.block_size = size
            elif size != self.block_size and worker not in self._others:
                problem = f"its blocks have {size} tokens, those of this index {self.block_size}"
                self._others[worker] = f"{problem}: register all with block_size {size}, or without one"
                logger.warning("worker %r is degraded: %s", worker, self._others[worker])

    def clear(self, worker: str) -> None:
        self._others.pop(worker, None)
        super().clear(worker)

    def remove_worker(self, worker: str) -> None:
        self._others.pop(worker, None)
        super().remove_worker(worker)

    def reasons(self) -> dict[str, str]:
        with self._lock:
            parked = {
                name: _ORPHANS
                for name, worker in self._workers.items()
                if worker.translator is not None and worker.translator.waiting.dropped
            }
            return dict.fromkeys(self.incomplete(), _NO_ROOM) | parked | self._others

    def counts(self) -> dict[str, Any]:
        with self._lock:
            known = [worker.translator for worker in self._workers.values() if worker.translator is not None]
            orphans, refused = sum(one.waiting.dropped for one in known), sum(one.refused for one in known)
            return self.stats()._asdict() | {"orphans_dropped": orphans, "refused": refused}


def _sizes(batch: Any) -> set[int]:
    """Return the block sizes of a batch's stores; placeholders say 0."""
    if isinstance(batch, DecodedBatch):
        return {event.block_size for event in batch.events if isinstance(event, BlockStored)} - {0}
    from kvtier.index.compiled.scan import SCANNED_BLOCK_SIZE

    stores = batch.steps[batch.steps[:, 0] == int(Op.STORED)]
    return set(stores[:, SCANNED_BLOCK_SIZE].tolist()) - {0}


def new_index(*, form: str | None, **settings: Any) -> PrefixIndex:
    """Return an empty index; without a form it answers at once and is compiled in the background."""
    if _IS_THERE:
        return PrefixIndex(form=form or os.environ.get("KVTIER_INDEX") or "auto", **settings)
    return _LearningIndex(form=form, **settings)


def reasons_of(index: Any) -> dict[str, str]:
    """Return the workers that the index knows too little of, each with the reason."""
    reasons: dict[str, str] = index.incomplete() if _IS_THERE else index.reasons()
    return reasons


def counts_of(index: Any) -> dict[str, Any]:
    """Return an index's size and counters."""
    counts: dict[str, Any] = index.stats()._asdict() if _IS_THERE else index.counts()
    return counts


def slices_of(index: Any) -> Iterator[list[tuple[str, int, Tier]]]:
    """Yield all that is held in slices: worker, the engine's hash, tier."""
    if _IS_THERE:
        yield from index.dump()
        return
    entries = index.entries()
    names = {worker: index.engine_hashes(worker) for worker in index.workers}
    while part := list(islice(entries, 1024)):
        yield [(worker, names[worker].get(key, key), tier) for worker, key, tier in part]
