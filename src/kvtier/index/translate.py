"""Translates events, which name blocks by the engine's hashes, to the keys of an index that hashes tokens.

A block's key depends on its tokens and its parent's key. So a block has no key while its parent is unknown,
or if it came without tokens, as some engines send for lower tiers. A name is good for all groups, so a state
that is sent without its tokens has the key of the attention block that ends with it. `Orphans` keeps the
data of a block without a key, and the areas in which the worker holds it, until the parent or the block
itself has a name. Waiting blocks, and the names of blocks under a cache salt, take bytes of a budget that
workers share: when it is spent, this worker's block that has waited longest is dropped and counted.

Engines send a cache salt with the first block only, so it is remembered along the chain. Not for several
threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.events.types import BlockRemoved, BlockStored
from kvtier.events.wire import to_u64
from kvtier.index.base import SLACK, STATE, IndexBackend, MemoryBudget, NamePart, Op, parts_of
from kvtier.index.xxh3 import chain_keys, extra_hashes, local_hashes, lora_of, salt_of, seed_of

T = TypeVar("T")

# Bytes of a waiting block, in any number of areas, without its tokens and extra keys;
# `tests/unit/test_index_bounds.py` measures it.
_ORPHAN_BYTES = 1536
_SALTED_BYTES = 320  # bytes of a name under a salt
_MOST_EDITS = 4096  # edits collected before they are applied

Edit = tuple[Op, int, list[int]]
"""The kind of a change, its area, and its keys."""
AreaOf = Callable[[BlockStored | BlockRemoved], int | None]
"""Returns an event's area, or `None` if the event does not count or is refused."""
Run = Callable[[list[Edit]], None]
"""Applies edits to the table."""


class _Name(NamedTuple):
    """A block's key in the index, and the salt that its chain began with."""

    key: int
    salt: str | None = None


class _Blocks(NamedTuple):
    """Consecutive stored blocks.

    `tokens` are u32, empty if the event had none; `copies` has the number of copies per area.
    """

    hashes: list[int]
    parent: int | None
    tokens: bytes
    lora: str | None
    salt: str | None
    extra: list[list[int]]
    copies: Mapping[int, int]

    def single(self, number: int) -> _Blocks:
        """Return one of the blocks."""
        width = len(self.tokens) // len(self.hashes)
        return self._replace(
            hashes=self.hashes[number : number + 1],
            parent=self.hashes[number - 1] if number else self.parent,
            tokens=self.tokens[number * width : (number + 1) * width],
            extra=self.extra[number : number + 1],
        )

    @property
    def size(self) -> int:
        """The bytes that a single block takes while it waits."""
        return _ORPHAN_BYTES + len(self.tokens) + sum(64 + 40 * len(hashes) for hashes in self.extra)


class _Edits(list[Edit]):
    """Edits that are applied together."""

    def __init__(self, apply: Run) -> None:
        super().__init__()
        self._apply = apply

    def flush(self) -> None:
        """Apply them."""
        if self:
            self._apply(list(self))
            self.clear()


class _Orphan(NamedTuple, Generic[T]):
    """A waiting block: its parent if known, its data, its size, and the number of copies per area."""

    parent: int | None
    item: T
    size: int
    copies: dict[int, int]


class Orphans(Generic[T]):
    """Keeps one worker's blocks without a name, by the engine's hash, in order of arrival."""

    def __init__(self, budget: MemoryBudget, counts: bool = False) -> None:
        """Keep as much as the budget permits. If it `counts`, an area may hold several copies of a block."""
        self.dropped = 0  # blocks dropped since the last clear
        self._budget, self._counts = budget, counts
        self._blocks: dict[int, _Orphan[T]] = {}
        self._children: dict[int, dict[int, None]] = {}  # by parent

    def __len__(self) -> int:
        return len(self._blocks)

    def park(self, block: int, parent: int | None, item: T, size: int, copies: Mapping[int, int]) -> None:
        """Keep `item`, which takes `size` bytes, for a block that is now held in these areas too.

        An item without a `parent` has no description of the block, so it does not replace an earlier item.
        """
        before = self._blocks.get(block)
        if before is None or (before.parent is None and parent is not None):
            held = {} if before is None else self._take(block).copies
            if not self._make_room(size):
                self.dropped += 1
                return
            before = self._blocks[block] = _Orphan(parent, item, size, held)
            if parent is not None:
                self._children.setdefault(parent, {})[block] = None
        for area, count in copies.items():
            before.copies[area] = before.copies.get(area, 0) + count if self._counts else 1

    def _make_room(self, size: int) -> bool:
        while not self._budget.take(size):
            if not self._blocks:
                return False
            self._take(next(iter(self._blocks)))
            self.dropped += 1
        return True

    def release(self, block: int) -> list[tuple[T, Mapping[int, int]]]:
        """Take out a block, which has a name now, and its children, oldest first: items and copies."""
        ready = [block] if block in self._blocks else []
        ready += self._children.get(block, ())
        return [(orphan.item, orphan.copies) for orphan in map(self._take, ready)]

    def discard(self, block: int, area: int) -> bool:
        """Drop a copy of a block in an area; return whether there was one."""
        orphan = self._blocks.get(block)
        if orphan is None or area not in orphan.copies:
            return False
        orphan.copies[area] -= 1
        if not orphan.copies[area]:
            del orphan.copies[area]
            if not orphan.copies:
                self._take(block)
        return True

    def clear(self) -> None:
        """Drop all blocks, and reset the count of dropped ones."""
        self._budget.give(self.bytes())
        self._blocks.clear()
        self._children.clear()
        self.dropped = 0

    def bytes(self) -> int:
        """Return the bytes taken from the budget."""
        return sum(orphan.size for orphan in self._blocks.values())

    def _take(self, block: int) -> _Orphan[T]:
        orphan = self._blocks.pop(block)
        if orphan.parent is not None:
            siblings = self._children[orphan.parent]
            del siblings[block]
            if not siblings:
                del self._children[orphan.parent]
        self._budget.give(orphan.size)
        return orphan

    def check(self) -> None:
        """Raise `IntegrityError` unless blocks are found by their parents, and are held somewhere."""
        by_parent = [(block, parent) for parent, blocks in self._children.items() for block in blocks]
        expected = {
            block: orphan.parent for block, orphan in self._blocks.items() if orphan.parent is not None
        }
        if dict(by_parent) != expected or len(by_parent) != len(expected):
            raise IntegrityError(f"orphans: {len(expected)} have a parent, {len(by_parent)} are found by it")
        for block, orphan in self._blocks.items():
            if not orphan.copies or min(orphan.copies.values()) < 1:
                raise IntegrityError(f"orphans: block {block} waits, but is held nowhere")


class Translator:
    """Translates one worker's events."""

    def __init__(self, worker: int, backend: IndexBackend, budget: MemoryBudget, counts: bool) -> None:
        """Name blocks in the book of `backend`. An engine that `counts` announces every copy of a block."""
        self.worker = worker
        self.waiting: Orphans[_Blocks] = Orphans(budget, counts)
        # Blocks whose tokens or extra keys do not fill whole blocks, or differ from before; since the
        # last clear.
        self.misfits = 0
        self._backend, self._budget = backend, budget
        # The names of blocks under a salt, by engine hash; the other names are in the book.
        self._salted: dict[int, _Name] = {}
        self._untidy = SLACK

    @property
    def is_simple(self) -> bool:
        """Return whether every block that is not in the book is unknown here too."""
        return not self._salted and not len(self.waiting)

    def bytes(self) -> int:
        """Return the bytes taken from the budget."""
        return self.waiting.bytes() + _SALTED_BYTES * len(self._salted)

    def clear(self) -> None:
        """Forget all names and all waiting blocks."""
        self._backend.names.clear(self.worker)
        self._budget.give(_SALTED_BYTES * len(self._salted))
        self._salted.clear()
        self.waiting.clear()
        self.misfits = 0

    def translate(self, events: Iterable[BlockStored | BlockRemoved], area_of: AreaOf, apply: Run) -> None:
        """Apply the events' changes, translated to keys."""
        edits = _Edits(apply)
        for event in events:
            if (area := area_of(event)) is None:
                continue
            if isinstance(event, BlockRemoved):
                edits.append((Op.REMOVED, area, self._remove(event, area)))
            elif (blocks := _blocks_of(event, area)) is not None:
                self._store([blocks], edits)
            else:
                self.misfits += len(event.block_hashes)
        edits.flush()

    def release(self, hashes: Iterable[int], apply: Run) -> None:
        """Apply the stores that waited for these blocks, which have names now."""
        edits = _Edits(apply)
        self._store(self._released(hashes), edits)
        edits.flush()

    def _released(self, hashes: Iterable[int]) -> list[_Blocks]:
        if not len(self.waiting):
            return []
        found = [waited for engine_hash in hashes for waited in self.waiting.release(engine_hash)]
        return [block._replace(copies=copies) for block, copies in found]

    def tidy(self) -> None:
        """Forget names of removed salted blocks, if there are many."""
        if len(self._salted) <= self._untidy:
            return
        before = self._salted
        keys = np.fromiter((name.key for name in before.values()), np.uint64, len(before))
        held = self._backend.table.holds(self.worker, keys).tolist()
        self._salted = {
            engine_hash: name
            for (engine_hash, name), is_held in zip(before.items(), held, strict=True)
            if is_held
        }
        self._budget.give(_SALTED_BYTES * (len(before) - len(self._salted)))
        self._untidy = 2 * len(self._salted) + SLACK

    def key_of(self, engine_hash: int) -> int | None:
        """Return the key of a block that the engine calls so; `None` if it has none yet."""
        name = self._get(engine_hash)
        return None if name is None else name.key

    def _get(self, engine_hash: int) -> _Name | None:
        key = self._backend.names.get(self.worker, engine_hash)
        return self._salted.get(engine_hash) if key is None else _Name(key)

    def _remove(self, event: BlockRemoved, area: int) -> list[int]:
        """Return the keys of removed blocks, 0 for an unknown one. Waiting blocks stop waiting."""
        gone = [block for block in map(to_u64, event.block_hashes) if not self.waiting.discard(block, area)]
        return [0 if name is None else name.key for name in map(self._get, gone)]

    def _store(self, ready: list[_Blocks], edits: _Edits) -> None:
        """Name blocks, then the blocks that waited for them, and so on."""
        while ready:
            blocks = ready.pop()
            hashes, keys = self._name(blocks, edits) if blocks.tokens else self._named(blocks)
            if not keys:
                continue
            for area, count in blocks.copies.items():
                for _ in range(count):
                    edits.append((Op.STORED, area, keys))
                    if len(edits) == _MOST_EDITS:
                        edits.flush()
            ready += self._released(hashes)

    def _name(self, blocks: _Blocks, edits: _Edits) -> tuple[list[int], list[int]]:
        """Name blocks that came with tokens; return their hashes and keys.

        Blocks before the first nameable one wait.
        """
        parent = _Name(0) if blocks.parent is None else self._get(blocks.parent)
        first = 0
        while parent is None and first < len(blocks.hashes):
            parent = self._get(blocks.hashes[first])
            if parent is None:
                self._park(blocks.single(first))
            first += 1
        if parent is None:
            return [], []
        # `first` blocks are done: none, or the waiting ones and one whose name was known already
        width = len(blocks.tokens) // len(blocks.hashes)
        salt = blocks.salt if blocks.parent is None else parent.salt
        seed = seed_of(blocks.lora, salt)
        local = local_hashes(blocks.tokens[first * width :], width // 4, seed, blocks.extra[first:])
        hashes = blocks.hashes[first:]
        keys = chain_keys(local, None if blocks.parent is None else parent.key).tolist()
        if self._is_taken(hashes, keys, edits):
            self.misfits += len(hashes)
            hashes, keys = [], []
        elif not self._remember(hashes, keys, salt, edits):
            self._backend.table.refuse(self.worker, len(hashes))
            hashes, keys = [], []
        known = blocks.hashes[first - 1 : first] if first else []
        return known + hashes, [parent.key] * len(known) + keys

    def _is_taken(self, hashes: list[int], keys: list[int], edits: _Edits) -> bool:
        """Return whether a hash is used for two blocks, or for a held block with another key.

        A hash has one name, and no removal would find the other block.
        """
        if len(set(hashes)) < len(hashes):
            return True
        known = zip(map(self._get, hashes), keys, strict=True)
        others = [name.key for name, key in known if name is not None and name.key != key]
        if not others:
            return False
        edits.flush()
        return bool(self._backend.table.holds(self.worker, np.array(others, np.uint64)).any())

    def _remember(self, hashes: list[int], keys: list[int], salt: str | None, edits: _Edits) -> bool:
        """Remember names; `False` if there is no room.

        A full book forgets the names of blocks that the table does not hold, so the table must first hold
        all blocks named before.
        """
        if salt is None:
            names, named = self._backend.names, np.array(keys, np.uint64)
            if names.put(self.worker, hashes, named):
                return True
            edits.flush()
            names.sweep()
            return names.put(self.worker, hashes, named)
        new = sum(engine_hash not in self._salted for engine_hash in set(hashes))
        if not self._budget.take(_SALTED_BYTES * new):
            return False
        self._salted.update(zip(hashes, (_Name(key, salt) for key in keys), strict=True))
        return True

    def _named(self, blocks: _Blocks) -> tuple[list[int], list[int]]:
        """Return the hashes and keys of blocks without tokens that have a name; the others wait."""
        found = []
        for number, engine_hash in enumerate(blocks.hashes):
            if (name := self._get(engine_hash)) is None:
                self._park(blocks.single(number))
            else:
                found.append((engine_hash, name.key))
        return [engine_hash for engine_hash, _ in found], [key for _, key in found]

    def _park(self, block: _Blocks) -> None:
        """Let a block wait on its own: any block of a run may be removed meanwhile."""
        parent = block.parent if block.tokens else None
        self.waiting.park(block.hashes[0], parent, block, block.size, block.copies)

    def salted(self) -> Iterator[NamePart]:
        """Yield the names of blocks under a salt, in parts.

        They may change meanwhile: a name that stays comes once.
        """
        return parts_of(self.worker, list(self._salted), self._salted_key)

    def _salted_key(self, engine_hash: int) -> int | None:
        name = self._salted.get(engine_hash)
        return None if name is None else name.key


def _blocks_of(event: BlockStored, area: int) -> _Blocks | None:
    """Return an event's blocks; `None` if its tokens or extra keys do not fill whole blocks."""
    hashes = [to_u64(block_hash) for block_hash in event.block_hashes]
    parent = None if event.parent_block_hash is None else to_u64(event.parent_block_hash)
    lora, extra_keys, copies = event.lora_name, event.extra_keys or [], {area: 1}
    fits = len(event.token_ids) == len(hashes) * event.block_size
    # vLLM sends the tokens of a whole run with the few states that it keeps of it: their hashes must do
    if not event.token_ids or (event.kv_cache_spec_kind == STATE and not fits):
        return _Blocks(hashes, parent, b"", None, None, [], copies)
    if not fits or len(extra_keys) not in (0, len(hashes)):
        return None
    salt = salt_of(extra_keys, lora) if parent is None else None
    try:
        tokens = np.array(event.token_ids, "<u4").tobytes()
        extra = [extra_hashes(keys, lora, None if at else salt) for at, keys in enumerate(extra_keys)]
    except (OverflowError, TypeError, ValueError, RecursionError):
        return None
    return _Blocks(hashes, parent, tokens, lora_of(lora, event.lora_id), salt, extra, copies)
