"""The prefix index: which worker holds which leading blocks of a prompt, and on which tier.

    index = PrefixIndex()
    with Subscriber([Source("worker-0", "tcp://host:5557")], decode=index.decoder()) as updates:
        for update in updates:
            index.follow(update)
    index.match(hashes)

Keys are the engine's own hashes, or (`keys="xxh3"`) hashes of the tokens, equal for all engines. Two table forms give the
same answers: compiled by numba (the extra `index`), or plain Python. The environment variable `KVTIER_INDEX`, or the
parameter `form`, picks one; otherwise numba is used where it is installed.

The table, and the names that keys by XXH3 need, never take more than the byte budget: a block that finds no room is refused
and counted, and its worker counts as incomplete until it is next cleared. An index may know too little, never too much.

Any thread may call anything here; calls exclude each other, and a batch is applied as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from threading import RLock
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError
from kvtier.events.types import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored
from kvtier.events.updates import Received, Reset, Update
from kvtier.events.wire import Batch, DecodedBatch, EventEncoder, Place, decode_batch, frame_batch, place_of, to_u64
from kvtier.index.base import Hashes, Match, Op, Steps, Tier, columns_of
from kvtier.index.copies import Copies
from kvtier.index.forms import Keys, choose_form, make_form
from kvtier.index.places import PLACES, counts, tier_of
from kvtier.index.translate import Step, Translator
from kvtier.index.xxh3 import chain_keys, local_hashes, seed_of, token_array
from kvtier.keys import extra_keys_of, hash_to_u64
from kvtier.keys import hash_blocks as hash_as_engine

__all__ = ["IndexStats", "PrefixIndex", "WorkerStats"]

Counting = Literal["set", "count"]
_NO_HASHES = np.empty(0, np.uint64)


class WorkerStats(NamedTuple):
    """What one worker holds on each tier, how many blocks wait for their parent, and how many were refused since it was
    last cleared."""

    blocks: dict[Tier, int]
    waiting: int
    dropped: int


class IndexStats(NamedTuple):
    """An index's size. `bytes` is what the budget bounds; `unknown` counts removals of what was not held, `ignored`
    blocks of groups that no prefix match can be made of, or whose tokens do not fit the block size."""

    form: str
    blocks: int
    workers: int
    sets: int
    bytes: int
    budget: int
    dropped: int
    unknown: int
    ignored: int


@dataclass(slots=True)
class _Worker:
    """A worker's place in the table, and what must be remembered besides."""

    slot: int
    copies: Copies | None
    translator: Translator | None


class PrefixIndex:
    """Who holds which prefix on which tier."""

    def __init__(
        self,
        *,
        keys: Keys = "engine",
        block_size: int = 16,
        budget: int = 1 << 30,
        form: str | None = None,
        seed: str = "",
        counting: Counting = "set",
        orphan_limit: int = 100_000,
    ) -> None:
        """Start empty.

        `block_size` is the number of tokens in a block, and `seed` the engine's hash seed: both are needed for questions about
        tokens. `counting` is how workers announce blocks unless `add_worker` says otherwise: `set` once each, as kvtier does,
        or `count` once for every copy, as vLLM and SGLang do. `orphan_limit` is how many blocks of a worker may wait for
        their parent; that matters with keys by XXH3 only, and they are not part of the budget.
        """
        if keys not in ("engine", "xxh3"):
            raise InputError(f"keys: expected engine or xxh3, got {keys!r}")
        if block_size < 1:
            raise InputError(f"block_size: expected at least 1 token, got {block_size}")
        self.keys, self.block_size, self.seed, self.counting = keys, block_size, seed, counting
        self.form = choose_form(form)
        self._budget, self._orphan_limit = budget, orphan_limit
        self._table, self._book = make_form(self.form, keys, budget)
        self._lock = RLock()
        self._workers: dict[str, _Worker] = {}
        self._names: tuple[str | None, ...] = ()
        self._lanes: dict[Place, int] = {place: lane for lane, place in enumerate(PLACES)}
        self._ignored = 0

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that the index knows."""
        return tuple(self._workers)

    def decoder(self) -> Callable[[bytes], Batch]:
        """Return what reads batches fastest for this index: give it to a subscriber. Each thread needs its own."""
        if self.form == "numba":
            from kvtier.index.compiled.scan import Scanner

            return Scanner(tokens=self.keys == "xxh3")
        return partial(decode_batch, tokens=self.keys == "xxh3")

    def warm_up(self) -> None:
        """Compile what this kind of index needs, on one of its own: seconds once on a machine, then next to nothing."""
        twin = PrefixIndex(keys=self.keys, block_size=1, budget=1 << 20, form=self.form, counting=self.counting)
        decode, encoder = twin.decoder(), EventEncoder()
        tokens = list(range(1, 4))
        events = [
            BlockStored([1, 2], None, tokens[:2], 1, None, MEDIUM_GPU, None),
            BlockStored([3], 2, tokens[2:], 1, None, MEDIUM_GPU, None),
            BlockRemoved([3], MEDIUM_GPU),
        ]
        twin.apply("twin", decode(frame_batch(0.0, [encoder.event(event) for event in events], 0)))
        twin.match_tokens(tokens)
        twin.remove_worker("twin")
        if twin._book is not None:
            twin._book.sweep()

    # -- workers -----------------------------------------------------------------------------------------------------------

    def add_worker(self, worker: str, counting: Counting | None = None) -> None:
        """Make a worker known, so that matches list it. Applying a batch does the same."""
        with self._lock:
            if worker not in self._workers:
                self._add(worker, counting or self.counting)

    def _add(self, worker: str, counting: Counting) -> _Worker:
        slot = self._names.index(None) if None in self._names else len(self._names)
        if not self._table.grow(slot + 1):
            raise InputError(f"worker {worker!r}: the index has no room for more than {slot} workers; raise its budget")
        copies = Copies() if counting == "count" else None
        translator = None
        if self._book is not None:
            translator = Translator(slot, self.block_size, self._book, self._table, self._orphan_limit)
        self._names = (*self._names[:slot], worker, *self._names[slot + 1 :])
        self._workers[worker] = made = _Worker(slot, copies, translator)
        return made

    def remove_worker(self, worker: str) -> None:
        """Forget a worker and all that it holds. Unknown ones are ignored."""
        with self._lock:
            if (gone := self._workers.pop(worker, None)) is not None:
                self._clear(gone)
                self._names = (*self._names[: gone.slot], None, *self._names[gone.slot + 1 :])

    def clear(self, worker: str) -> None:
        """Forget all that a worker holds. Unknown ones are ignored."""
        with self._lock:
            if (known := self._workers.get(worker)) is not None:
                self._clear(known)

    def _clear(self, worker: _Worker) -> None:
        self._table.clear(worker.slot)
        if worker.copies is not None:
            worker.copies.clear()
        if worker.translator is not None:
            worker.translator.clear()

    # -- changes -----------------------------------------------------------------------------------------------------------

    def follow(self, update: Update) -> None:
        """Apply what a subscriber says; its sources are the workers."""
        if isinstance(update, Received):
            self.apply(update.source, update.batch)
        elif isinstance(update, Reset):
            self.clear(update.source)

    def apply(self, worker: str, batch: Any) -> None:
        """Apply a batch of a worker's events: a decoded one, or what `decoder()` made of it."""
        with self._lock:
            known = self._workers.get(worker) or self._add(worker, self.counting)
            if known.translator is not None:
                self._apply_tokens(known, known.translator, batch)
            elif isinstance(batch, DecodedBatch):
                self._run(known, *self._steps_of(batch))
            else:
                self._run(known, batch.steps, batch.hashes)

    def apply_all(self, worker: str, batches: Sequence[Any]) -> None:
        """Apply consecutive batches of a worker's events, which is faster than one by one."""
        if len(batches) == 1:
            self.apply(worker, batches[0])
            return
        with self._lock:
            for is_decoded, run in groupby(batches, lambda batch: isinstance(batch, DecodedBatch)):
                parts = list(run)
                for batch in parts if is_decoded else parts[0].join(parts):
                    self.apply(worker, batch)

    def _apply_tokens(self, worker: _Worker, translator: Translator, batch: Any) -> None:
        """Apply events whose blocks must be named by their tokens."""
        if isinstance(batch, DecodedBatch):
            self._run(worker, *_pack(translator.translate(batch.events, self._lane)))
        else:
            self._apply_scanned(worker, translator, batch)
        translator.tidy()
        assert self._book is not None
        self._book.tidy()

    def _apply_scanned(self, worker: _Worker, translator: Translator, batch: Any) -> None:
        """Do so with compiled loops, but for the events they leave to us."""
        book: Any = self._book
        steps, hashes = batch.steps, batch.hashes
        keys = np.empty_like(hashes)
        step = first = 0
        while step < len(steps):
            strict = not translator.is_plain
            stop, end = book.translate(worker.slot, self.block_size, strict, batch, step, first, keys)
            self._run(worker, steps[step:stop], keys[first:end])
            if len(translator.waiting):
                self._run(worker, *_pack(translator.release(hashes[first:end].tolist())))
            if stop < len(steps):
                self._run(worker, *_pack(translator.translate([batch.event(stop)], self._lane)))
                end += int(steps[stop, 2])
            step, first = stop + 1, end

    def _run(self, worker: _Worker, steps: Steps, hashes: Hashes) -> None:
        """Apply steps over keys."""
        if not len(steps):
            return
        if worker.copies is None:
            self._table.apply(worker.slot, steps, hashes)
        elif len(worker.copies):
            self._run_counting(worker, worker.copies, steps, hashes)
        elif (stopped := self._table.apply(worker.slot, steps, hashes, unique=True)) is not None:
            self._run_counting(worker, worker.copies, steps, hashes, *stopped)

    def _run_counting(
        self, worker: _Worker, copies: Copies, steps: Steps, hashes: Hashes, first: int = 0, done: int = 0
    ) -> None:
        """Apply steps of a worker that has copies of a block, one by one, since each depends on those before.

        Begins at step `first`, of which `done` hashes are done.
        """
        start = int(steps[:first, 2].sum()) + done
        for op, lane, count in steps[first:, :3].tolist():
            part = hashes[start : start + count - done]
            start, done = start + len(part), 0
            if op == Op.CLEARED:
                self._table.clear(worker.slot)
                copies.clear()
            elif op == Op.STORED:
                fresh = self._table.store(worker.slot, lane, part)
                for again in part[~fresh].tolist():
                    copies.add(lane, again)
            else:
                last = [each for each in part.tolist() if not copies.take(lane, each)]
                self._table.apply(worker.slot, np.array([(op, lane, len(last))]), np.array(last, np.uint64))

    def _steps_of(self, batch: DecodedBatch) -> tuple[Steps, Hashes]:
        """Return the events of a decoded batch as steps over the engine's hashes."""
        steps: list[Step] = []
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                steps.append((Op.CLEARED, 0, []))
            elif (lane := self._lane(event)) is not None:
                op = Op.STORED if isinstance(event, BlockStored) else Op.REMOVED
                steps.append((op, lane, [to_u64(each) for each in event.block_hashes]))
        return _pack(steps)

    def _lane(self, event: BlockStored | BlockRemoved) -> int | None:
        """Return the lane of an event's place, `None` for one that is of no interest. A store makes it if need be."""
        place = place_of(event)
        lane = self._lanes.get(place)
        if isinstance(event, BlockRemoved):
            return lane
        if counts(event) and lane is None:
            lane = self._table.add_lane(tier_of(place[0]))
            if lane is not None:
                self._lanes[place] = lane
        if not counts(event) or lane is None:
            self._ignored += len(event.block_hashes)
            return None
        return lane

    # -- questions ---------------------------------------------------------------------------------------------------------

    def match(self, hashes: npt.ArrayLike) -> Match:
        """Return how many of these leading blocks each worker holds. A `uint64` array is taken as it is, without a copy."""
        wanted = _as_hashes(hashes)
        with self._lock:
            columns = self._table.match(wanted, np.array((0, len(wanted))))
            return columns_of(self._names, columns[0, : len(self._names)])

    def match_many(self, queries: Sequence[npt.ArrayLike]) -> Match:
        """Answer many questions at once; the arrays of the answer have the question as their first dimension."""
        arrays = [_as_hashes(each) for each in queries]
        offsets = np.cumsum([0] + [len(each) for each in arrays])
        with self._lock:
            columns = self._table.match(np.concatenate(arrays) if arrays else _NO_HASHES, offsets)
            return columns_of(self._names, columns[:, : len(self._names)])

    def match_tokens(self, tokens: Any, *, lora: str | None = None, salt: str | None = None) -> Match:
        """Return how many leading full blocks of a prompt each worker holds."""
        return self.match(self.hash_tokens(tokens, lora=lora, salt=salt))

    def hash_tokens(self, tokens: Any, *, lora: str | None = None, salt: str | None = None) -> Hashes:
        """Return the keys of a prompt's full blocks: hashed as kvtier's engine does, or by XXH3."""
        if self.keys == "xxh3":
            return self._hash_xxh3(token_array(tokens), seed_of(lora, salt))
        extra = extra_keys_of(len(tokens) // self.block_size, self.block_size, lora=lora, salt=salt)
        hashes = hash_as_engine(tokens, self.block_size, extra_keys=extra, seed=self.seed)
        return np.array([hash_to_u64(each) for each in hashes], np.uint64)

    def _hash_xxh3(self, tokens: npt.NDArray[np.uint32], seed: int) -> Hashes:
        if self.form == "python":
            return chain_keys(local_hashes(tokens, self.block_size, seed))
        from kvtier.index.compiled.hashing import chain, hash_blocks

        keys: Hashes = chain(hash_blocks(tokens, self.block_size, np.uint64(seed)), np.uint64(0), False)
        return keys

    def entries(self) -> Iterator[tuple[str, int, Tier]]:
        """Return all that is held now: worker, key, tier. Only taking the picture keeps others waiting, not reading it."""
        with self._lock:
            names, tiers = self._names, [tier_of(place[0]) for place in self._lanes]
            held = self._table.entries()
        return ((name, key, tiers[lane]) for key, slot, lane in held if (name := names[slot]) is not None)

    def engine_hashes(self, worker: str) -> dict[int, int]:
        """Return what the worker's engine calls each key, where that differs."""
        with self._lock:
            known = self._workers.get(worker)
            translator = None if known is None else known.translator
            return {} if translator is None else translator.engine_hashes()

    def worker_stats(self, worker: str) -> WorkerStats:
        """Return what one worker holds."""
        with self._lock:
            known = self._workers[worker]
            blocks = dict.fromkeys(Tier, 0)
            for place, count in zip(self._lanes, self._table.held(known.slot), strict=True):
                blocks[tier_of(place[0])] += count
            waiting = 0 if known.translator is None else len(known.translator.waiting)
            return WorkerStats(blocks, waiting, self._table.dropped()[known.slot])

    def incomplete(self) -> set[str]:
        """Return the workers some of whose blocks found no room since they were last cleared."""
        with self._lock:
            dropped = self._table.dropped()
            return {name for name, known in self._workers.items() if dropped[known.slot]} if any(dropped) else set()

    def stats(self) -> IndexStats:
        """Return the index's size."""
        with self._lock:
            size = self._table.stats()
            refused = sum(each.translator.refused for each in self._workers.values() if each.translator is not None)
            names = 0 if self._book is None else self._book.bytes()
            return IndexStats(
                form=self.form,
                blocks=size.blocks,
                workers=len(self._workers),
                sets=size.sets,
                bytes=size.bytes + names,
                budget=self._budget,
                dropped=size.dropped,
                unknown=size.unknown,
                ignored=self._ignored + refused,
            )

    def check(self) -> None:
        """Raise `IntegrityError` where the index contradicts itself."""
        with self._lock:
            self._table.check()
            for worker in self._workers.values():
                if worker.translator is not None:
                    worker.translator.check()


def _as_hashes(hashes: npt.ArrayLike) -> Hashes:
    """Return hashes as one flat array; negative ones are the same 64 bits seen as signed."""
    if isinstance(hashes, np.ndarray) and hashes.dtype == np.uint64 and hashes.ndim == 1 and hashes.flags.c_contiguous:
        return hashes
    try:
        return np.array([int(each) & ((1 << 64) - 1) for each in hashes], np.uint64)  # type: ignore[union-attr, arg-type]
    except (TypeError, ValueError) as error:
        raise InputError(f"hashes: expected integers, got something else ({error})") from None


def _pack(steps: Iterable[Step]) -> tuple[Steps, Hashes]:
    """Return steps as arrays."""
    steps = list(steps)
    table = np.array([(op, lane, len(hashes)) for op, lane, hashes in steps], np.int64).reshape(-1, 3)
    return table, np.array([each for _, _, hashes in steps for each in hashes], np.uint64)
