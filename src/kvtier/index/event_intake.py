"""Applies a worker's events to an index: which count, in which areas, and the resulting edits.

A batch of plain events is applied as scanned. In other batches, and if blocks must be named first, each
event is handled separately. A refused block is counted with its worker. Not for several threads at once:
`kvtier.index.prefix.PrefixIndex` ensures that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored
from kvtier.events.wire import DecodedBatch, place_of, to_u64
from kvtier.events.wire_structs import Event
from kvtier.index.base import Edits, Hashes, Op
from kvtier.index.forms import Form, Keys
from kvtier.index.places import Areas
from kvtier.index.translate import Edit
from kvtier.index.workers import KnownWorker

if TYPE_CHECKING:
    from kvtier.index.compiled.names import CompiledNames


_MAX_BLOCK_SIZE = 1 << 20


class Intake:
    """Applies events to the table and the names of one index."""

    def __init__(self, form: Form, keys: Keys, block_size: int | None) -> None:
        """Take blocks of `block_size` tokens; `None`: the size of the first store."""
        self.block_size, self.areas = block_size, Areas()
        # Blocks of groups that do not count; refusals and drops of workers before their last clear.
        self.ignored = self.past_refused = self.past_orphans = 0
        self._form, self._by_tokens = form, keys == "xxh3"

    def wipe(self, worker: KnownWorker) -> None:
        """Forget everything that a worker holds, and its refusals."""
        self.past_refused += worker.refused
        self.past_orphans += worker.translator.waiting.dropped
        self._form.table.clear(worker.number)
        worker.clear()

    def apply(self, worker: KnownWorker, batch: Any) -> None:
        """Apply a decoded or a scanned batch."""
        if isinstance(batch, DecodedBatch):
            self._apply_events(worker, batch.events)
        elif not self._is_plain(worker, batch, edits := batch.edits):
            self._apply_events(worker, batch.events())
        elif self._by_tokens:
            self._apply_scanned(worker, batch)
        else:
            self._run(worker, edits, batch.hashes)
        if self._by_tokens:
            worker.translator.tidy()
            self._form.names.tidy()

    def _is_plain(self, worker: KnownWorker, batch: Any, edits: Edits) -> bool:
        """Say whether scanned events, all of the first group, can be applied without looking at each one."""
        if worker.groups.first_counts is None and (edits[:, 0] == Op.STORED).any():
            worker.groups.counted.add(0)
            self._form.table.require(worker.number, self.areas.needed((0,)))
        if worker.groups.first_counts is False:
            return False
        if self._by_tokens:
            return self._form.table.form == "numba"
        if worker.problem_logged and (edits[:, 0] == Op.CLEARED).any():
            return False  # the slow path also forgets refusals at a clear
        return self.block_size is not None and bool(batch.have_size(edits, self.block_size))

    def _apply_events(self, worker: KnownWorker, events: Iterable[Event]) -> None:
        """Apply events one by one."""
        for is_clear, part in groupby(events, lambda event: isinstance(event, AllBlocksCleared)):
            if is_clear:
                self.wipe(worker)
            elif self._by_tokens:
                area_of, apply = partial(self._area, worker), partial(self._run_edits, worker)
                worker.translator.translate(part, area_of, apply)  # type: ignore[arg-type]
            else:
                self._run_edits(worker, self._edits_of(worker, part))  # type: ignore[arg-type]

    def _edits_of(self, worker: KnownWorker, events: Iterable[BlockStored | BlockRemoved]) -> Iterator[Edit]:
        """Yield events as edits over the engine's hashes."""
        for event in events:
            if (area := self._area(worker, event)) is not None:
                op = Op.STORED if isinstance(event, BlockStored) else Op.REMOVED
                yield op, area, [to_u64(block_hash) for block_hash in event.block_hashes]

    def _apply_scanned(self, worker: KnownWorker, batch: Any) -> None:
        """Name blocks by their tokens with compiled loops; handle the events that those leave over."""
        translator, names = worker.translator, cast("CompiledNames", self._form.names)
        edits, hashes = batch.edits, batch.hashes
        keys = np.empty_like(hashes)
        edit = first = 0
        while edit < len(edits):
            strict, block_size = not translator.is_plain, -1 if self.block_size is None else self.block_size
            stop, end = names.translate(worker.number, block_size, strict, batch, edit, first, keys)
            self._run(worker, edits[edit:stop], keys[first:end])
            if len(translator.waiting):
                translator.release(hashes[first:end].tolist(), partial(self._run_edits, worker))
            if stop < len(edits):
                self._apply_events(worker, [batch.event(stop, end)])
                end += int(edits[stop, 2])
            edit, first = stop + 1, end

    def _run_edits(self, worker: KnownWorker, edits: Iterable[Edit]) -> None:
        self._run(worker, *_pack(edits))

    def _run(self, worker: KnownWorker, edits: Edits, hashes: Hashes) -> None:
        """Apply edits over keys."""
        if not len(edits):
            return
        if not worker.counts:
            self._form.table.apply(worker.number, edits, hashes)
        elif len(worker.duplicates):
            self._run_counting(worker, edits, hashes)
        elif (stopped := self._form.table.apply(worker.number, edits, hashes, unique=True)) is not None:
            self._run_counting(worker, edits, hashes, *stopped)

    def _run_counting(
        self, worker: KnownWorker, edits: Edits, hashes: Hashes, first: int = 0, done: int = 0
    ) -> None:
        """Apply edits of a worker that holds two copies of a block, one by one, as each depends on the last.

        Begins at edit `first`, of which `done` hashes are already applied.
        """
        start, duplicates = int(edits[:first, 2].sum()) + done, worker.duplicates
        for op, area, count in edits[first:, :3].tolist():
            part = hashes[start : start + count - done]
            start, done = start + len(part), 0
            if op == Op.CLEARED:
                self._form.table.clear(worker.number)
                duplicates.clear()
            elif op == Op.STORED:
                fresh = self._form.table.store(worker.number, area, part)
                for again in part[~fresh].tolist():
                    duplicates.add(area, again)
            else:
                last = [key for key in part.tolist() if not duplicates.take(area, key)]
                self._form.table.apply(
                    worker.number, np.array([(op, area, len(last))]), np.array(last, np.uint64)
                )

    def _area(self, worker: KnownWorker, event: BlockStored | BlockRemoved) -> int | None:
        """Return the area of an event's place; `None` if the event does not count or is refused.

        A store creates the area if needed.
        """
        place, count = place_of(event), len(event.block_hashes)
        if isinstance(event, BlockRemoved):
            return self.areas.get(place)
        if not self._admit(worker, event):
            self.ignored += count
            return None
        if self.block_size is None and 0 < event.block_size <= _MAX_BLOCK_SIZE:
            self.block_size = event.block_size
        if event.block_size not in (0, self.block_size):
            worker.other_size = event.block_size
            worker.of_other_size += count
            return None
        area = self.areas.make(place, self._form.table)
        if area is None:
            worker.no_area += count
        return area

    def _admit(self, worker: KnownWorker, event: BlockStored) -> bool:
        """Say whether a store's group counts; a new group that counts is required from now on."""
        counted = set(worker.groups.counted)
        counts = worker.groups.admit(event)
        if worker.groups.counted != counted:
            self._form.table.require(worker.number, self.areas.needed(worker.groups.counted))
        return counts


def _pack(edits: Iterable[Edit]) -> tuple[Edits, Hashes]:
    """Return edits as arrays."""
    edits = list(edits)
    table = np.array([(op, area, len(hashes)) for op, area, hashes in edits], np.int64).reshape(-1, 3)
    return table, np.array([key for _, _, hashes in edits for key in hashes], np.uint64)
