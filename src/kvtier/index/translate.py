"""From events, which name blocks by the engine's hashes, to the keys of an index that hashes tokens.

A store whose parent is unknown waits for it. A store without tokens, as some engines send for lower tiers,
waits until the same block comes with tokens. What waits, and the names of blocks under a cache salt, take
bytes of an allowance; what finds no room there is dropped and counted.

Blocks under a cache salt: engines name the salt with the first block only, so it is remembered along the
chain. Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.events.types import BlockRemoved, BlockStored
from kvtier.events.wire import to_u64
from kvtier.index.base import Op, Table
from kvtier.index.duplicates import Allowance
from kvtier.index.names import SLACK, NamePart, Names, parts_of
from kvtier.index.orphans import Orphans
from kvtier.index.xxh3 import chain_keys, extra_hashes, local_hashes, lora_of, salt_of, seed_of

__all__ = ["Edit", "Name", "Translator"]

# of a block that waits, beside its tokens and extra keys; `tests/unit/test_index_bounds.py` weighs it
_ORPHAN_BYTES = 1024
_SALTED_BYTES = 320  # of a name under a salt

Edit = tuple[Op, int, list[int]]
"""What an event does, in which area, to which keys."""
AreaOf = Callable[[BlockStored | BlockRemoved], int | None]
"""Gives an event's area; `None`: it is of no interest, or refused."""
Run = Callable[[list[Edit]], None]
"""Applies edits to the table."""


class Name(NamedTuple):
    """What a block is called in the index, and the salt that its chain began with."""

    key: int
    salt: str | None = None


class _Run(NamedTuple):
    """Consecutive blocks that were stored in an area. `tokens` are u32, none where the event had none."""

    area: int
    hashes: list[int]
    parent: int | None
    tokens: bytes
    lora: str | None
    salt: str | None
    extra: list[list[int]]

    def block(self, number: int, width: int) -> _Run:
        """Return one of the blocks, which has a parent."""
        return self._replace(
            hashes=self.hashes[number : number + 1],
            parent=self.hashes[number - 1] if number else self.parent,
            tokens=self.tokens[number * width : (number + 1) * width],
            extra=self.extra[number : number + 1],
        )

    @property
    def size(self) -> int:
        """How many bytes a single block takes while it waits."""
        return _ORPHAN_BYTES + len(self.tokens) + sum(64 + 40 * len(hashes) for hashes in self.extra)


class _Edits(list[Edit]):
    """Edits that are to be applied together."""

    def __init__(self, apply: Run) -> None:
        super().__init__()
        self._apply = apply

    def flush(self) -> None:
        """Apply them."""
        if self:
            self._apply(list(self))
            self.clear()


class Translator:
    """Translates one worker's events."""

    def __init__(
        self, worker: int, names: Names, table: Table, *, allowance: Allowance, limit: int, counts: bool
    ) -> None:
        """Let at most `limit` blocks wait. `counts`: the engine announces every copy of a block."""
        self.worker = worker
        self.waiting: Orphans[_Run] = Orphans(limit, allowance)
        # Blocks with tokens or extra keys not of whole blocks, or not as before; since the last clear.
        self.misfits = 0
        self._names, self._table = names, table
        self._allowance, self._counts = allowance, counts
        # By engine hash, the names of blocks under a salt; the others are in `_names`.
        self._salted: dict[int, Name] = {}
        self._untidy = SLACK

    @property
    def is_plain(self) -> bool:
        """Whether a block without a name in the book is unknown here too."""
        return not self._salted and not len(self.waiting)

    def bytes(self) -> int:
        """Return what is taken of the allowance."""
        return self.waiting.bytes() + _SALTED_BYTES * len(self._salted)

    def move(self, names: Names, table: Table) -> None:
        """Go on with another book and another table, which have the same in them."""
        self._names, self._table = names, table

    def clear(self) -> None:
        """Forget all names and all that waits."""
        self._names.clear(self.worker)
        self._allowance.give(_SALTED_BYTES * len(self._salted))
        self._salted.clear()
        self.waiting.clear()
        self.misfits = 0

    def translate(self, events: Iterable[BlockStored | BlockRemoved], area_of: AreaOf, apply: Run) -> None:
        """Apply what the events do to keys."""
        edits = _Edits(apply)
        for event in events:
            if (area := area_of(event)) is None:
                continue
            if isinstance(event, BlockRemoved):
                edits.append((Op.REMOVED, area, self._remove(event, area)))
            elif (run := _run_of(event, area)) is not None:
                self._store([run], edits)
            else:
                self.misfits += len(event.block_hashes)
        edits.flush()

    def release(self, hashes: Iterable[int], apply: Run) -> None:
        """Apply the stores that waited for these blocks."""
        edits = _Edits(apply)
        self._store(
            [waited for engine_hash in hashes for waited in self.waiting.release(engine_hash)], edits
        )
        edits.flush()

    def tidy(self) -> None:
        """Forget names of salted blocks that are gone, if they are many."""
        if len(self._salted) <= self._untidy:
            return
        before = self._salted
        keys = np.fromiter((name.key for name in before.values()), np.uint64, len(before))
        held = self._table.holds(self.worker, keys).tolist()
        self._salted = {
            engine_hash: name
            for (engine_hash, name), is_held in zip(before.items(), held, strict=True)
            if is_held
        }
        self._allowance.give(_SALTED_BYTES * (len(before) - len(self._salted)))
        self._untidy = 2 * len(self._salted) + SLACK

    def _get(self, engine_hash: int) -> Name | None:
        key = self._names.get(self.worker, engine_hash)
        return self._salted.get(engine_hash) if key is None else Name(key)

    def _remove(self, event: BlockRemoved, area: int) -> list[int]:
        """Return the keys of removed blocks, 0 for one that is unknown; those that wait cease to."""
        keys = []
        for engine_hash in map(to_u64, event.block_hashes):
            waited = len(self.waiting) > 0 and self.waiting.discard((area, engine_hash))
            if not (waited and self._counts):  # of an engine that counts, that was one copy of several
                name = self._get(engine_hash)
                keys.append(0 if name is None else name.key)
        return keys

    def _store(self, ready: list[_Run], edits: _Edits) -> None:
        """Name the runs' blocks, then those that waited for them, and so on."""
        while ready:
            run = ready.pop()
            if run.tokens:
                hashes, keys = self._name(run, edits)
            else:
                hashes, keys = self._named(run)
            if not keys:
                continue
            edits.append((Op.STORED, run.area, keys))
            if len(self.waiting):
                ready += [waited for engine_hash in hashes for waited in self.waiting.release(engine_hash)]

    def _name(self, run: _Run, edits: _Edits) -> tuple[list[int], list[int]]:
        """Name blocks that came with tokens; return their hashes and keys.

        Those before the first that can be named wait.
        """
        parent = Name(0) if run.parent is None else self._get(run.parent)
        first = 0
        while parent is None and first < len(run.hashes):
            parent = self._get(run.hashes[first])
            if parent is None:
                self._park(run, first)
            first += 1
        if parent is None:
            return [], []
        # `first` blocks are done: either none, or those that wait and one whose name was known already
        width = len(run.tokens) // len(run.hashes)
        salt = run.salt if run.parent is None else parent.salt
        local = local_hashes(
            run.tokens[first * width :], width // 4, seed_of(run.lora, salt), run.extra[first:]
        )
        keys = chain_keys(local, None if run.parent is None else parent.key)
        hashes = run.hashes[first:]
        if self._is_taken(hashes, keys.tolist(), edits):
            self.misfits += len(hashes)
            hashes, keys = [], keys[:0]
        elif not self._remember(hashes, keys.tolist(), salt, edits):
            self._table.refuse(self.worker, len(hashes))
            hashes, keys = [], keys[:0]
        known = [run.hashes[first - 1]] if first else []
        return known + hashes, [parent.key] * len(known) + keys.tolist()

    def _is_taken(self, hashes: list[int], keys: list[int], edits: _Edits) -> bool:
        """Tell whether one of the blocks is held under another key: by a second name, no removal would find
        the first.
        """
        known = map(self._get, hashes)
        others = [
            name.key for name, key in zip(known, keys, strict=True) if name is not None and name.key != key
        ]
        if not others:
            return False
        edits.flush()
        return bool(self._table.holds(self.worker, np.array(others, np.uint64)).any())

    def _remember(self, hashes: list[int], keys: list[int], salt: str | None, edits: _Edits) -> bool:
        """Remember names; `False` where there is no room.

        A full book forgets the names of what the table does not hold, so the table must first hold what was
        named before.
        """
        if salt is None:
            named = np.array(keys, np.uint64)
            if self._names.put(self.worker, hashes, named):
                return True
            edits.flush()
            self._names.sweep()
            return self._names.put(self.worker, hashes, named)
        new = sum(engine_hash not in self._salted for engine_hash in set(hashes))
        if not self._allowance.take(_SALTED_BYTES * new):
            return False
        self._salted.update(zip(hashes, (Name(key, salt) for key in keys), strict=True))
        return True

    def _named(self, run: _Run) -> tuple[list[int], list[int]]:
        """Return those blocks of a run without tokens that have a name; the others wait for one."""
        names = {engine_hash: self._get(engine_hash) for engine_hash in run.hashes}
        for number, engine_hash in enumerate(run.hashes):
            if names[engine_hash] is None:
                self._wait(engine_hash, run.block(number, 0))
        known = [(engine_hash, names[engine_hash]) for engine_hash in run.hashes]
        found = [(engine_hash, name.key) for engine_hash, name in known if name is not None]
        return [engine_hash for engine_hash, _ in found], [key for _, key in found]

    def _park(self, run: _Run, number: int) -> None:
        """Park a block on its own, behind the one before it: any of them may be removed meanwhile."""
        block = run.block(number, len(run.tokens) // len(run.hashes))
        assert block.parent is not None
        self._wait(block.parent, block)

    def _wait(self, parent: int, block: _Run) -> None:
        key = block.area, block.hashes[0]
        if not self._counts:
            self.waiting.discard(key)
        self.waiting.park(parent, key, block, block.size)

    def salted(self) -> Iterator[NamePart]:
        """Yield the names of blocks under a salt, some at a time.

        They may change meanwhile: a name that stays comes once.
        """
        return parts_of(self.worker, list(self._salted), self._salted_key)

    def _salted_key(self, engine_hash: int) -> int | None:
        name = self._salted.get(engine_hash)
        return None if name is None else name.key

    def check(self) -> None:
        """Raise `IntegrityError` where what waits is not in order."""
        self.waiting.check()
        if not self._counts and len(self.waiting) != len(self.waiting.keys()):
            raise IntegrityError(
                "orphans: a block waits twice in an area, of an engine that announces it once"
            )


def _run_of(event: BlockStored, area: int) -> _Run | None:
    """Return an event's blocks; `None` where its tokens or its extra keys are not those of whole blocks."""
    hashes = [to_u64(block_hash) for block_hash in event.block_hashes]
    parent = None if event.parent_block_hash is None else to_u64(event.parent_block_hash)
    lora, extra_keys = event.lora_name, event.extra_keys or []
    if not event.token_ids:
        return _Run(area, hashes, parent, b"", None, None, [])
    if len(event.token_ids) != len(hashes) * event.block_size or len(extra_keys) not in (0, len(hashes)):
        return None
    salt = salt_of(extra_keys, lora) if parent is None else None
    try:
        tokens = np.array(event.token_ids, "<u4").tobytes()
        extra = [extra_hashes(keys, lora, salt) for keys in extra_keys]
    except (OverflowError, TypeError, ValueError, RecursionError):
        return None
    return _Run(area, hashes, parent, tokens, lora_of(lora, event.lora_id), salt, extra)
