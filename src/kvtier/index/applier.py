"""Applies workers' events to an index: which events count, in which areas, and the resulting edits.

A batch of simple events is applied as scanned. In other batches, and if blocks must be named first, each
event is handled separately. A worker's state beside the table is its groups, its duplicates and the counts
of its refused blocks: the index does not know a block that was refused, or dropped while it waited, and
`WorkerState.reason()` reports that until the worker is cleared.

Groups of full attention count, and if a worker has several, a block counts on a tier if all of them hold it
there. Groups of recurrent layers hold states, and a prefix counts up to the last block whose states all of
them hold (see `kvtier.index.base.Match`). A worker has the groups that it has announced until it is reset,
even while they hold nothing. A prefix match says nothing about a group with a sliding window: an engine with
such groups may be able to use less of a prefix than the index says, as with every other indexer of these
events. An event that does not name the kind of its group means the kind that is known, and full attention
if the group is the first and unknown.

Not for several threads at once: `kvtier.index.prefix.PrefixIndex` ensures that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtier.errors import LogLimit
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored
from kvtier.events.wire import DecodedBatch, Place, place_of, to_u64
from kvtier.events.wire_structs import Event
from kvtier.index.base import (
    FULL_ATTENTION,
    MAX_AREAS,
    PLACES,
    STATE,
    Edits,
    Hashes,
    IndexArea,
    IndexBackend,
    Keys,
    MemoryBudget,
    Op,
    Table,
    tier_of,
)
from kvtier.index.translate import Edit, Translator

if TYPE_CHECKING:
    from kvtier.index.compiled.names import CompiledNames


_MAX_BLOCK_SIZE = 1 << 20
_MOST = 64  # the most groups to remember; no engine has so many
_COUNT_BYTES = 256  # a pair of ints and its entry in a dict that has just doubled


class Areas:
    """Numbers the areas of an index: one for each place in which any worker holds blocks."""

    def __init__(self) -> None:
        self._by_place = {place: number for number, place in enumerate(PLACES)}
        self._groups = {0: 0}

    def get(self, place: Place) -> int | None:
        """Return the area of a place."""
        return self._by_place.get(place)

    def needed(self, groups: Iterable[int]) -> int:
        """Return a bit for each of these groups; all bits, which no worker has, if one has no number."""
        needed = 0
        for group in groups:
            number = self._group(group)
            needed |= (1 << MAX_AREAS) - 1 if number is None else 1 << number
        return needed

    def _group(self, group: int) -> int | None:
        """Return the number of a group; `None` if no more are possible."""
        if group not in self._groups and len(self._groups) < MAX_AREAS:
            self._groups[group] = len(self._groups)
        return self._groups.get(group)

    def make(self, place: Place, table: Table) -> int | None:
        """Return a place's area, and add it to the table if it is new; `None` if no more are possible."""
        number = self._by_place.get(place)
        group = self._group(place[1])
        if number is None and group is not None:
            number = table.add_area(IndexArea(tier_of(place[0]), group))
            if number is not None:
                self._by_place[place] = number
        return number


class Groups:
    """Keeps what kind of group each of a worker's groups is, by `group_idx`."""

    def __init__(self) -> None:
        self.attention: set[int] = set()
        self.states: set[int] = set()
        # Number of blocks left out because the kind of their group was not known, by group.
        self.unclear: Counter[int] = Counter()
        self._others: set[int] = set()

    @property
    def first_counts(self) -> bool | None:
        """Return whether the first group is one of full attention; `None` if no group is known."""
        others = self.attention or 0 in self.states or 0 in self._others
        return 0 in self.attention or (False if others else None)

    def learn(self, event: BlockStored) -> bool:
        """Learn the kind of an event's group; return whether it was unknown or has changed."""
        group, kind = event.group_idx or 0, event.kv_cache_spec_kind
        known = next((kept for kept in self._kinds() if group in kept), None)
        if kind is None and known is None and group:
            if group in self.unclear or len(self.unclear) < _MOST:
                self.unclear[group] += len(event.block_hashes)
            return False
        if kind is None and known is not None:
            return False
        if kind is None or kind in FULL_ATTENTION:
            kept = self.attention
        elif kind == STATE:
            kept = self.states
        else:
            kept = self._others
            self.unclear.pop(group, None)
        if kept is known:
            return False
        if known is not None:
            known.remove(group)
        if len(kept) < _MOST:
            kept.add(group)
        return True

    def __contains__(self, group: int) -> bool:
        """Return whether a group's blocks or states count."""
        return group in self.attention or group in self.states

    def clear(self) -> None:
        """Forget all groups."""
        self.unclear.clear()
        for kept in self._kinds():
            kept.clear()

    def _kinds(self) -> tuple[set[int], ...]:
        return self.attention, self.states, self._others


class DuplicateCounts:
    """Counts the copies of each block that one worker holds beyond the first.

    vLLM sends a store and a removal for every physical copy of a block. Second copies are rare, so only
    they are counted. A copy that does not fit is counted as dropped, and its block is forgotten at its
    first removal: too early, never too late.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        """Remember as much as the budget permits."""
        self.dropped = 0  # since the last clear
        self._budget = budget
        self._more: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._more)

    def add(self, area: int, block_hash: int) -> None:
        """Count one more copy of a block that is held already."""
        more = self._more.get((area, block_hash), 0)
        if more or self._budget.take(_COUNT_BYTES):
            self._more[area, block_hash] = more + 1
        else:
            self.dropped += 1

    def take(self, area: int, block_hash: int) -> bool:
        """Count one copy less; `False` if there is only one, which is not counted here."""
        more = self._more.get((area, block_hash), 0)
        if more > 1:
            self._more[area, block_hash] = more - 1
        elif more:
            del self._more[area, block_hash]
            self._budget.give(_COUNT_BYTES)
        return more > 0

    def clear(self) -> None:
        """Forget all duplicates."""
        self._budget.give(_COUNT_BYTES * len(self._more))
        self._more.clear()
        self.dropped = 0

    def bytes(self) -> int:
        """Return the bytes taken from the budget."""
        return _COUNT_BYTES * len(self._more)


class WorkerState:
    """Keeps what an index knows of a worker beside the table.

    `number` is its number in the table; if it `counts`, it announces every copy of a block.
    """

    def __init__(
        self, name: str, number: int, backend: IndexBackend, budget: MemoryBudget, counts: bool
    ) -> None:
        self.name, self.number, self.counts = name, number, counts
        self.groups = Groups()
        self.duplicates = DuplicateCounts(budget)  # used if it counts
        self.translator = Translator(number, backend, budget, counts)  # used if keys are hashes of tokens
        # The newest block size that was refused, and the number of such blocks.
        self.other_size, self.of_other_size = 0, 0
        self.no_area = 0  # blocks refused because no more areas are possible
        self.problem_logged = False  # since the last clear
        self.log_limit = LogLimit()

    @property
    def refused(self) -> int:
        """How many blocks were refused since the last clear, without those that found no room."""
        return self.no_area + self.of_other_size + self.translator.misfits

    @property
    def has_losses(self) -> bool:
        """Return whether blocks are missing, apart from those that the table dropped."""
        lost = self.refused or self.translator.waiting.dropped or self.duplicates.dropped
        return bool(lost or self.groups.unclear)

    def bytes(self) -> int:
        """Return the bytes taken from the budget."""
        return self.translator.bytes() + self.duplicates.bytes()

    def reason(self, dropped: int, block_size: int | None) -> str:
        """Return a line that says why blocks are missing; `dropped` is the table's count."""
        size, groups = self.other_size, self.groups.unclear.items()
        losses = [
            (
                self.of_other_size,
                f"events have blocks of {size} tokens, the index has {block_size}: "
                f"register with block_size {size}",
            ),
            (
                self.translator.misfits,
                "{} blocks came with tokens or extra keys that are not those of whole blocks, or not those "
                "that they had before",
            ),
            (self.no_area, f"{{}} blocks are in places beyond the {MAX_AREAS} that an index can tell apart"),
            (dropped, "{} blocks found no room: raise the index's budget"),
            (
                self.translator.waiting.dropped,
                "{} blocks whose parent is unknown found no room to wait for it",
            ),
            (
                self.duplicates.dropped,
                "{} second copies of blocks found no room: raise the index's budget",
            ),
            *(
                (
                    count,
                    f"{{}} blocks of group {group} were left out: events do not say its kind of attention",
                )
                for group, count in groups
            ),
        ]
        return "; ".join(text.format(count) for count, text in losses if count)

    def clear(self) -> None:
        """Forget all blocks and refusals. Groups stay: it is the same engine."""
        self.other_size = self.of_other_size = self.no_area = 0
        self.problem_logged = False
        self.groups.unclear.clear()
        self.duplicates.clear()
        self.translator.clear()


class EventApplier:
    """Applies events to the table and the names of one index."""

    def __init__(self, backend: IndexBackend, keys: Keys, block_size: int | None) -> None:
        """Take blocks of `block_size` tokens; `None` means the size of the first store."""
        self.block_size, self.areas = block_size, Areas()
        # Blocks of groups that do not count; refusals and drops of workers before their last clear.
        self.ignored = self.past_refused = self.past_orphans = 0
        self._backend, self._by_tokens = backend, keys == "xxh3"

    def wipe(self, worker: WorkerState) -> None:
        """Forget everything that a worker holds, and its refusals."""
        self.past_refused += worker.refused
        self.past_orphans += worker.translator.waiting.dropped
        self._backend.table.clear(worker.number)
        worker.clear()

    def apply(self, worker: WorkerState, batch: Any) -> None:
        """Apply a decoded or a scanned batch."""
        if isinstance(batch, DecodedBatch):
            self._apply_events(worker, batch.events)
        elif not self._is_simple(worker, batch, edits := batch.edits):
            self._apply_events(worker, batch.events())
        elif self._by_tokens:
            self._apply_scanned(worker, batch)
        else:
            self._run(worker, edits, batch.hashes)
        if self._by_tokens:
            worker.translator.tidy()
            self._backend.names.tidy()

    def _is_simple(self, worker: WorkerState, batch: Any, edits: Edits) -> bool:
        """Return whether scanned events, all of the first group, can be applied as they are."""
        if worker.groups.first_counts is None and (edits[:, 0] == Op.STORED).any():
            worker.groups.attention.add(0)
            self.require(worker)
        if worker.groups.first_counts is False:
            return False
        if self._by_tokens:
            return self._backend.table.form == "numba"
        if worker.problem_logged and (edits[:, 0] == Op.CLEARED).any():
            return False  # the slow path also forgets refusals at a clear
        return self.block_size is not None and bool(batch.have_size(edits, self.block_size))

    def _apply_events(self, worker: WorkerState, events: Iterable[Event]) -> None:
        """Apply events one by one."""
        for is_clear, part in groupby(events, lambda event: isinstance(event, AllBlocksCleared)):
            if is_clear:
                self.wipe(worker)
            elif self._by_tokens:
                area_of, apply = partial(self._area, worker), partial(self._run_edits, worker)
                worker.translator.translate(part, area_of, apply)  # type: ignore[arg-type]
            else:
                self._run_edits(worker, self._edits_of(worker, part))  # type: ignore[arg-type]

    def _edits_of(self, worker: WorkerState, events: Iterable[BlockStored | BlockRemoved]) -> Iterator[Edit]:
        """Yield events as edits over the engine's hashes."""
        for event in events:
            if (area := self._area(worker, event)) is not None:
                op = Op.STORED if isinstance(event, BlockStored) else Op.REMOVED
                yield op, area, [to_u64(block_hash) for block_hash in event.block_hashes]

    def _apply_scanned(self, worker: WorkerState, batch: Any) -> None:
        """Name blocks by their tokens with compiled loops; handle the events that those leave over."""
        translator, names = worker.translator, cast("CompiledNames", self._backend.names)
        edits, hashes = batch.edits, batch.hashes
        keys = np.empty_like(hashes)
        edit = first = 0
        while edit < len(edits):
            strict, block_size = not translator.is_simple, -1 if self.block_size is None else self.block_size
            stop, end = names.translate(worker.number, block_size, strict, batch, edit, first, keys)
            self._run(worker, edits[edit:stop], keys[first:end])
            if len(translator.waiting):
                translator.release(hashes[first:end].tolist(), partial(self._run_edits, worker))
            if stop < len(edits):
                self._apply_events(worker, [batch.event(stop, end)])
                end += int(edits[stop, 2])
            edit, first = stop + 1, end

    def _run_edits(self, worker: WorkerState, edits: Iterable[Edit]) -> None:
        self._run(worker, *_pack(edits))

    def _run(self, worker: WorkerState, edits: Edits, hashes: Hashes) -> None:
        """Apply edits over keys."""
        if not len(edits):
            return
        if not worker.counts:
            self._backend.table.apply(worker.number, edits, hashes)
        elif len(worker.duplicates):
            self._run_counting(worker, edits, hashes)
        elif (stopped := self._backend.table.apply(worker.number, edits, hashes, unique=True)) is not None:
            self._run_counting(worker, edits, hashes, *stopped)

    def _run_counting(
        self, worker: WorkerState, edits: Edits, hashes: Hashes, first: int = 0, done: int = 0
    ) -> None:
        """Apply edits of a worker that holds two copies of a block, one by one, as each depends on the last.

        Begins at edit `first`, of which `done` hashes are already applied.
        """
        start, duplicates = int(edits[:first, 2].sum()) + done, worker.duplicates
        for op, area, count in edits[first:, :3].tolist():
            part = hashes[start : start + count - done]
            start, done = start + len(part), 0
            if op == Op.CLEARED:
                self._backend.table.clear(worker.number)
                duplicates.clear()
            elif op == Op.STORED:
                fresh = self._backend.table.store(worker.number, area, part)
                for again in part[~fresh].tolist():
                    duplicates.add(area, again)
            else:
                last = [key for key in part.tolist() if not duplicates.take(area, key)]
                self._backend.table.apply(
                    worker.number, np.array([(op, area, len(last))]), np.array(last, np.uint64)
                )

    def _area(self, worker: WorkerState, event: BlockStored | BlockRemoved) -> int | None:
        """Return the area of an event's place; `None` if the event does not count or is refused.

        A store creates the area if needed.
        """
        place, count = place_of(event), len(event.block_hashes)
        if isinstance(event, BlockRemoved):
            return self.areas.get(place)
        if not self._admit(worker, event):
            self.ignored += count
            return None
        is_state = place[1] in worker.groups.states
        if self.block_size is None and not is_state and 0 < event.block_size <= _MAX_BLOCK_SIZE:
            self.block_size = event.block_size
        if event.block_size in (0, self.block_size) or (is_state and self.block_size is None):
            area = self.areas.make(place, self._backend.table)
            worker.no_area += count if area is None else 0
            return area
        if is_state:  # inside a block, where no prefix can end
            self.ignored += count
        else:
            worker.other_size = event.block_size
            worker.of_other_size += count
        return None

    def _admit(self, worker: WorkerState, event: BlockStored) -> bool:
        """Return whether a store's group counts; a new group that counts is required from now on."""
        if worker.groups.learn(event):
            self.require(worker)
        return (event.group_idx or 0) in worker.groups

    def require(self, worker: WorkerState) -> None:
        """Tell the table the groups of a worker."""
        groups, needed = worker.groups, self.areas.needed
        self._backend.table.require(worker.number, needed(groups.attention), needed(groups.states))


def _pack(edits: Iterable[Edit]) -> tuple[Edits, Hashes]:
    """Return edits as arrays."""
    edits = list(edits)
    table = np.array([(op, area, len(hashes)) for op, area, hashes in edits], np.int64).reshape(-1, 3)
    return table, np.array([key for _, _, hashes in edits for key in hashes], np.uint64)
