"""The prefix index: which worker holds which leading blocks of a prompt, and on which tier.

    index = PrefixIndex()
    with Subscriber([Source("worker-0", "tcp://host:5557")], decode=index.decoder()) as updates:
        for update in updates:
            index.follow(update)
    index.match_tokens(tokens)

Keys are hashes of the tokens (`keys="xxh3"`), equal for all engines, or the engine's own hashes. Two table
forms give the same answers: compiled by numba (the extra `index`), or plain Python. An index has one form
from its start: that of the parameter `form`, else that of the environment variable `KVTIER_INDEX`, else
numba if it is installed.

The table, the names that XXH3 keys need, blocks that wait for their parent and counts of duplicates
together never take more than the byte budget. A block that finds no room is refused and counted; so is a
block of another size, or in an area beyond the limit. Its worker is then `incomplete()` until it is next
cleared. An index may know too little, never too much.

Any thread may call anything here; calls exclude each other, and a batch is applied as a whole.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import groupby, takewhile
from threading import RLock
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError, IntegrityError
from kvtier.events.types import MEDIUM_GPU, BlockRemoved, BlockStored
from kvtier.events.updates import Received, Reset, Update
from kvtier.events.wire import U64, Batch, DecodedBatch, EventEncoder, decode_batch, frame_batch
from kvtier.index.applier import EventApplier, WorkerState
from kvtier.index.base import (
    MAX_AREAS,
    MIN_COMPILED_BYTES,
    Hashes,
    IndexBackend,
    Keys,
    Match,
    MemoryBudget,
    StorageTier,
)
from kvtier.index.plain import PlainNames, PlainTable
from kvtier.index.xxh3 import chain_keys, local_hashes, seed_of, token_array
from kvtier.keys import extra_keys_of, hash_to_u64
from kvtier.keys import hash_blocks as hash_as_engine

logger = logging.getLogger(__name__)

FORMS = ("numba", "python")
AUTO = "auto"
Counting = Literal["set", "count"]
Entry = tuple[str, int, StorageTier]
"""A worker, the hash of a block that it holds, and the tier."""
_NO_HASHES = np.empty(0, np.uint64)


def choose_form(form: str | None) -> str:
    """Return the form: the parameter's, else that of `KVTIER_INDEX`; `auto` is the fastest installed one."""
    form = form or os.environ.get("KVTIER_INDEX") or AUTO
    if form not in (*FORMS, AUTO):
        raise InputError(f"index form: expected one of {', '.join((*FORMS, AUTO))}, got {form!r}")
    if form == "numba" and not find_spec("numba"):
        raise InputError("index form: numba is wanted but not installed: pip install numba")
    if form == AUTO:
        return "numba" if find_spec("numba") else "python"
    return form


def shared_budget_of(keys: Keys, budget: int) -> int:
    """Return how many bytes of a budget are for data beside the table and the names.

    Blocks that wait for their parent are large. An index with the engine's keys has only duplicates, which
    are few.
    """
    return budget // (8 if keys == "xxh3" else 64)


def make_backend(form: str, keys: Keys, budget: int) -> IndexBackend:
    """Make a table, and names if its keys need them.

    A name takes one and a half times the bytes of a block.
    """
    left = budget - shared_budget_of(keys, budget)
    table_budget = left if keys == "engine" else left * 2 // 5
    if form == "python":
        plain = PlainTable(table_budget)
        return IndexBackend(plain, PlainNames(plain, left - table_budget))
    if table_budget < MIN_COMPILED_BYTES:
        least = MIN_COMPILED_BYTES * budget // table_budget + 1 if table_budget else MIN_COMPILED_BYTES * 3
        raise InputError(
            f"budget: expected at least {least} bytes for a compiled index with {keys} keys, got {budget}"
        )
    from kvtier.index.compiled.names import CompiledNames
    from kvtier.index.compiled.table import CompiledTable

    table = CompiledTable(table_budget)
    if keys == "engine":
        return IndexBackend(table, PlainNames(table, 0))
    return IndexBackend(table, CompiledNames(table, left - table_budget))


class WorkerStats(NamedTuple):
    """One worker's counts: blocks by tier, blocks that wait for a parent, blocks refused since a clear."""

    blocks: dict[StorageTier, int]
    waiting: int
    dropped: int


class IndexStats(NamedTuple):
    """An index's size. The budget bounds `bytes`. Counters, which only grow: `dropped`, blocks that found
    no room; `unknown`, removals of blocks that were not held; `ignored`, blocks of groups that a prefix
    match cannot use; `refused`, blocks of another size, with tokens that do not fill whole blocks, or in an
    area beyond the limit; `orphans_dropped`, blocks that found no room to wait for their parent. `waiting`
    counts the blocks that wait now.
    """

    form: str
    blocks: int
    workers: int
    sets: int
    bytes: int
    budget: int
    dropped: int
    unknown: int
    ignored: int
    refused: int
    waiting: int
    orphans_dropped: int


class PrefixIndex:
    """Knows which workers hold each prefix, and on which tier."""

    def __init__(
        self,
        *,
        keys: Keys = "xxh3",
        block_size: int | None = None,
        budget: int = 1 << 30,
        form: str | None = None,
        seed: str = "",
        counting: Counting = "count",
    ) -> None:
        """Start empty.

        `block_size` is the number of tokens in a block; `None` takes that of the first store, and until
        then no prompt matches. Stores of other sizes are refused, whatever the keys are: answers count
        blocks, and must mean the same for every worker. `seed` is the engine's hash seed, which token
        queries need. `counting` is how workers announce blocks: `count` once for every copy, as vLLM and
        SGLang do (a worker that holds every block once, as kvtier's, is a special case of that), or `set`
        once each, whatever the number of copies.
        """
        if keys not in ("engine", "xxh3"):
            raise InputError(f"keys: expected engine or xxh3, got {keys!r}")
        if block_size is not None and block_size < 1:
            raise InputError(f"block_size: expected at least 1 token, got {block_size}")
        self.keys, self.seed, self.counting = keys, seed, counting
        self._budget = budget
        self._shared_budget = MemoryBudget(shared_budget_of(keys, budget))
        self._backend = make_backend(choose_form(form), keys, budget)
        self._lock = RLock()
        self._workers: dict[str, WorkerState] = {}
        self._names: tuple[str | None, ...] = ()
        self._applier = EventApplier(self._backend, keys, block_size)

    @property
    def block_size(self) -> int | None:
        """The number of tokens in a block; `None` if no store has named it yet."""
        return self._applier.block_size

    @property
    def form(self) -> str:
        """The form of the index: `numba` or `python`."""
        return self._backend.table.form

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that the index knows."""
        return tuple(self._workers)

    def decoder(self) -> Callable[[bytes], Batch]:
        """Return the fastest batch reader for this index, for a subscriber. Each thread needs its own."""
        needs_tokens = self.keys == "xxh3"
        if self.form == "python":
            return partial(decode_batch, tokens=needs_tokens)
        from kvtier.index.compiled.scan import Scanner

        return Scanner(needs_tokens)

    def warm_up(self) -> None:
        """Compile everything that this kind of index runs, which the first calls would do otherwise.

        It takes some ten seconds once on a machine, and half a second in later processes.
        """
        sample = PrefixIndex(keys=self.keys, block_size=1, budget=1 << 20, form=self.form, counting="count")
        decode, encoder = sample.decoder(), EventEncoder()
        tokens = list(range(1, 4))
        events = [
            BlockStored([1, 2], None, tokens[:2], 1, None, MEDIUM_GPU, None),
            BlockStored([3], 2, tokens[2:], 1, None, MEDIUM_GPU, None),
            BlockRemoved([3], MEDIUM_GPU),
            BlockStored([1], None, tokens[:1], 1, None, MEDIUM_GPU, None),
        ]
        sample.apply("sample", decode(frame_batch(0.0, [encoder.event(event) for event in events], 0)))
        sample.match_tokens(tokens)
        for _ in sample.dump():
            pass
        sample.remove_worker("sample")
        sample._backend.names.sweep()

    # -- workers -----------------------------------------------------------------------------------

    def expect_block_size(self, block_size: int) -> None:
        """Set the block size if none is known yet. Earlier refusals are still reported."""
        with self._lock:
            if self._applier.block_size is None:
                self._applier.block_size = block_size

    def add_worker(self, worker: str) -> None:
        """Make a worker known, so that matches list it. Applying a batch does the same."""
        with self._lock:
            if worker not in self._workers:
                self._add(worker)

    def _add(self, name: str) -> WorkerState:
        number = self._names.index(None) if None in self._names else len(self._names)
        if not self._backend.table.grow(number + 1):
            raise InputError(
                f"worker {name!r}: the index has no room for more than {number} workers; raise its budget"
            )
        self._names = (*self._names[:number], name, *self._names[number + 1 :])
        made = WorkerState(name, number, self._backend, self._shared_budget, self.counting == "count")
        self._workers[name] = made
        return made

    def remove_worker(self, worker: str) -> None:
        """Forget a worker and everything that it holds. Unknown workers are ignored."""
        with self._lock:
            if (gone := self._workers.get(worker)) is not None:
                self.clear(worker)
                del self._workers[worker]
                self._names = (*self._names[: gone.number], None, *self._names[gone.number + 1 :])

    def clear(self, worker: str) -> None:
        """Forget everything that a worker holds, and its groups. Unknown workers are ignored."""
        with self._lock:
            if (known := self._workers.get(worker)) is not None:
                self._applier.wipe(known)
                known.groups.clear()
                self._applier.require(known)

    # -- changes -----------------------------------------------------------------------------------

    def follow(self, update: Update) -> None:
        """Apply a subscriber's update; its source is the worker."""
        if isinstance(update, Received):
            self.apply(update.source, update.batch)
        elif isinstance(update, Reset):
            self.clear(update.source)

    def apply(self, worker: str, batch: Any) -> None:
        """Apply a batch of a worker's events: a decoded one, or one from `decoder()`."""
        with self._lock:
            known = self._workers.get(worker) or self._add(worker)
            self._applier.apply(known, batch)
            self._log_problem(known)

    def apply_all(self, worker: str, batches: Sequence[Any]) -> None:
        """Apply consecutive batches of a worker's events; faster than one by one."""
        if len(batches) == 1:
            self.apply(worker, batches[0])
            return
        with self._lock:
            for is_decoded, run in groupby(batches, lambda batch: isinstance(batch, DecodedBatch)):
                parts = list(run)
                for batch in parts if is_decoded else parts[0].join(parts):
                    self.apply(worker, batch)

    def _log_problem(self, worker: WorkerState) -> None:
        """Log, at most once until the next clear, that the index is missing blocks of a worker."""
        if not worker.problem_logged and (reason := self._reason(worker)):
            worker.problem_logged = True
            if (more := worker.log_limit.admit()) is not None:
                line = "the index is missing blocks of worker %r: %s%s"
                logger.warning(line, worker.name, reason, more)

    def _reason(self, worker: WorkerState) -> str:
        dropped = self._backend.table.dropped(worker.number)
        return worker.reason(dropped, self.block_size) if dropped or worker.has_losses else ""

    # -- questions ---------------------------------------------------------------------------------

    def match(self, hashes: npt.ArrayLike) -> Match:
        """Return how many of these leading blocks each worker holds. A `uint64` array is not copied."""
        wanted = _as_hashes(hashes)
        with self._lock:
            columns = self._backend.table.match(wanted)[: len(self._names)]
            return Match(self._names, columns[:, 0], columns[:, 1:4], columns[:, 4:7])

    def match_tokens(self, tokens: Any, *, lora: str | None = None, salt: str | None = None) -> Match:
        """Return how many leading full blocks of a prompt each worker holds."""
        return self.match(self.hash_tokens(tokens, lora=lora, salt=salt))

    def hash_tokens(self, tokens: Any, *, lora: str | None = None, salt: str | None = None) -> Hashes:
        """Return the keys of a prompt's full blocks: hashed as kvtier's engine does, or by XXH3.

        There are none until the block size is known.
        """
        if self.block_size is None:
            return _NO_HASHES
        if self.keys == "xxh3":
            return self._hash_xxh3(token_array(tokens), self.block_size, seed_of(lora, salt))
        extra = extra_keys_of(len(tokens) // self.block_size, self.block_size, lora=lora, salt=salt)
        hashes = hash_as_engine(tokens, self.block_size, extra_keys=extra, seed=self.seed)
        return np.array([hash_to_u64(block_hash) for block_hash in hashes], np.uint64)

    def _hash_xxh3(self, tokens: npt.NDArray[np.uint32], block_size: int, seed: int) -> Hashes:
        if self.form == "python":
            return chain_keys(local_hashes(tokens, block_size, seed))
        from kvtier.index.compiled.hashing import chain, hash_blocks

        keys: Hashes = chain(hash_blocks(tokens, block_size, np.uint64(seed)), np.uint64(0), False)
        return keys

    def keys_of(self, worker: str, hashes: Sequence[int]) -> Hashes:
        """Return the keys of leading blocks that a worker's engine calls so, up to the first without one."""
        if self.keys == "engine":
            return np.array(hashes, np.uint64)
        with self._lock:
            known = self._workers.get(worker)
            keys = [] if known is None else takewhile(_is_key, map(known.translator.key_of, hashes))
            return np.array(list(keys), np.uint64)

    def entries(self) -> list[Entry]:
        """Return everything that is held now: worker, key, tier.

        Other callers wait meanwhile; with `dump` they do not.
        """
        with self._lock:
            return [entry for keys in self._backend.table.hashes() for entry in self._entries(keys, keys)]

    def dump(self) -> Iterator[list[Entry]]:
        """Yield all held blocks, about a thousand at a time: worker, the engine's hash, tier.

        Other callers wait for one such part at most. A block that stays comes once (for each of its engine
        hashes); a block that is stored or removed meanwhile may come or not.
        """
        parts = self._parts()
        while True:
            with self._lock:
                part = next(parts, None)
                if part is None:
                    return
                entries = self._entries(*part)
            yield entries

    def _parts(self) -> Iterator[tuple[Hashes, Hashes, npt.NDArray[np.uint32] | None]]:
        """Yield the engines' hashes of blocks, their keys, and the workers of these names, in parts."""
        if self.keys == "engine":
            for keys in self._backend.table.hashes():
                yield keys, keys, None
            return
        for part in self._backend.names.parts():
            yield part.hashes, part.keys, part.workers
        for worker in list(self._workers.values()):
            for part in worker.translator.salted():
                yield part.hashes, part.keys, part.workers

    def _entries(
        self, hashes: Hashes, keys: Hashes, workers: npt.NDArray[np.uint32] | None = None
    ) -> list[Entry]:
        """Return who holds blocks on which tiers, under the names `hashes`; only for `workers`, if given."""
        wanted = [None] * len(keys) if workers is None else workers.tolist()
        return [
            (name, called, tier)
            for called, only, held in zip(
                hashes.tolist(), wanted, self._backend.table.usable(keys), strict=True
            )
            for number, tiers in (held.items() if only is None else ((only, held.get(only, 0)),))
            if (name := self._names[number]) is not None
            for tier in StorageTier
            if tiers >> tier & 1
        ]

    def worker_stats(self, worker: str) -> WorkerStats:
        """Return one worker's counts.

        If it has several groups, a tier has as many blocks as the group with the fewest.
        """
        with self._lock:
            known = self._workers[worker]
            needed = self._applier.areas.needed(known.groups.attention)
            held: dict[StorageTier, Counter[int]] = {tier: Counter() for tier in StorageTier}
            for area, count in zip(
                self._backend.table.areas, self._backend.table.held(known.number), strict=True
            ):
                held[area.tier][area.group] += count
            groups = [group for group in range(MAX_AREAS) if needed >> group & 1]
            blocks = {
                tier: min((counts[group] for group in groups), default=0) for tier, counts in held.items()
            }
            return WorkerStats(
                blocks, len(known.translator.waiting), self._backend.table.dropped(known.number)
            )

    def held_by(self, workers: Iterable[str]) -> dict[StorageTier, int]:
        """Return how many blocks these workers hold on each tier in total; unknown ones hold none."""
        with self._lock:
            held = [self.worker_stats(worker).blocks for worker in workers if worker in self._workers]
            return {tier: sum(blocks[tier] for blocks in held) for tier in StorageTier}

    def incomplete(self) -> dict[str, str]:
        """Return the workers of which the index is missing blocks, and why, until they are cleared."""
        with self._lock:
            reasons = {name: self._reason(worker) for name, worker in self._workers.items()}
            return {name: reason for name, reason in reasons.items() if reason}

    def stats(self) -> IndexStats:
        """Return the index's size."""
        with self._lock:
            size = self._backend.table.stats()
            workers, applier = self._workers.values(), self._applier
            return IndexStats(
                form=self.form,
                blocks=size.blocks,
                workers=len(workers),
                sets=size.sets,
                bytes=size.bytes + self._backend.names.bytes() + self._shared_budget.used,
                budget=self._budget,
                dropped=size.dropped,
                unknown=size.unknown,
                ignored=applier.ignored,
                refused=applier.past_refused + sum(worker.refused for worker in workers),
                waiting=sum(len(worker.translator.waiting) for worker in workers),
                orphans_dropped=applier.past_orphans + sum(w.translator.waiting.dropped for w in workers),
            )

    def check(self) -> None:
        """Raise `IntegrityError` if the index contradicts itself."""
        with self._lock:
            self._backend.table.check()
            self._backend.names.check()
            for worker in self._workers.values():
                worker.translator.waiting.check()
            if self._shared_budget.used != sum(worker.bytes() for worker in self._workers.values()):
                raise IntegrityError(
                    f"index: {self._shared_budget.used} bytes of the shared budget are not those of workers"
                )


def _is_key(key: int | None) -> bool:
    return key is not None


def _as_hashes(hashes: npt.ArrayLike) -> Hashes:
    """Return hashes as one flat array; a negative hash is the same 64 bits as a signed number."""
    if (
        isinstance(hashes, np.ndarray)
        and hashes.dtype == np.uint64
        and hashes.ndim == 1
        and hashes.flags.c_contiguous
    ):
        return hashes
    numbers: Any = hashes
    try:
        return np.array([int(number) & U64 for number in numbers], np.uint64)
    except (TypeError, ValueError) as error:
        raise InputError(f"hashes: expected integers, got something else ({error})") from None
