"""From events, which name blocks by the engine's hashes, to the keys of an index that hashes tokens.

A store whose parent is unknown waits for it (at most 100,000 blocks per worker, then the oldest goes). A store without
tokens, as some engines send for lower tiers, waits until the same block comes with tokens.

Blocks under a cache salt: engines name the salt with the first block only, so it is remembered along the chain.
Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from kvtier.events.orphans import Orphans
from kvtier.events.shapes import Event
from kvtier.events.types import BlockRemoved, BlockStored, blocks_of
from kvtier.events.wire import to_u64
from kvtier.index.base import Hashes, Op, Table
from kvtier.index.names import SLACK, Names
from kvtier.index.xxh3 import SEED, chain_keys, image_hashes, local_hashes, salt_of, seed_of

__all__ = ["Name", "Step", "Translator"]

Step = tuple[Op, int, list[int]]
"""What an event does, in which lane, to which keys."""
LaneOf = Callable[[BlockStored | BlockRemoved], int | None]
"""Gives an event's lane; `None`: it is of no interest."""


class Name(NamedTuple):
    """What a block is called in the index, and the salt that its chain began with."""

    key: int
    salt: str | None = None


class Translator:
    """Translates one worker's events."""

    def __init__(self, worker: int, block_size: int, names: Names, table: Table, limit: int = 100_000) -> None:
        """Translate events with blocks of `block_size` tokens; let at most `limit` blocks wait."""
        self.worker, self.block_size = worker, block_size
        self.waiting: Orphans[tuple[BlockStored, int]] = Orphans(limit)
        self.refused = 0  # blocks whose tokens do not fit the block size
        self._names, self._table = names, table
        self._salted: dict[int, Name] = {}  # engine hash -> name of a block under a salt; the others are in `_names`
        self._untidy = SLACK

    @property
    def is_plain(self) -> bool:
        """Whether a block without a name in the book is unknown here too."""
        return not self._salted and not len(self.waiting)

    def clear(self) -> None:
        """Forget all names and all that waits."""
        self._names.clear(self.worker)
        self._salted.clear()
        self.waiting.clear()

    def translate(self, events: Iterable[Event], lane_of: LaneOf) -> list[Step]:
        """Return what the events do to keys."""
        steps: list[Step] = []
        for event in events:
            if not isinstance(event, (BlockStored, BlockRemoved)):
                self.clear()
                steps.append((Op.CLEARED, 0, []))
            elif (lane := lane_of(event)) is None:
                continue
            elif isinstance(event, BlockStored):
                steps += self._store([(event, lane)])
            else:
                steps.append((Op.REMOVED, lane, self._remove(event, lane)))
        return steps

    def release(self, hashes: Iterable[int]) -> list[Step]:
        """Return the stores that waited for these blocks."""
        return self._store([waited for each in hashes for waited in self.waiting.release(each)])

    def tidy(self) -> None:
        """Forget names of salted blocks that are gone, if they are many."""
        if len(self._salted) > self._untidy:
            keys = np.fromiter((name.key for name in self._salted.values()), np.uint64, len(self._salted))
            held = self._table.holds(self.worker, keys).tolist()
            self._salted = {
                each: name for (each, name), is_held in zip(self._salted.items(), held, strict=True) if is_held
            }
            self._untidy = 2 * len(self._salted) + SLACK

    def _get(self, engine_hash: int) -> Name | None:
        key = self._names.get(self.worker, engine_hash)
        return self._salted.get(engine_hash) if key is None else Name(key)

    def _remove(self, event: BlockRemoved, lane: int) -> list[int]:
        """Return the keys of removed blocks, 0 for one that is unknown; those that wait cease to."""
        keys = []
        for each in map(to_u64, event.block_hashes):
            if not len(self.waiting) or not self.waiting.discard((lane, each)):
                name = self._get(each)
                keys.append(0 if name is None else name.key)
        return keys

    def _store(self, ready: list[tuple[BlockStored, int]]) -> list[Step]:
        """Name the events' blocks, then those that waited for them, and so on."""
        steps: list[Step] = []
        while ready:
            event, lane = ready.pop()
            hashes = [to_u64(each) for each in event.block_hashes]
            keys = self._name(event, hashes, lane) if event.token_ids else self._keys_of_named(event, hashes, lane)
            if keys:
                steps.append((Op.STORED, lane, keys))
                if event.token_ids and len(self.waiting):
                    ready += [waited for each in hashes for waited in self.waiting.release(each)]
        return steps

    def _name(self, event: BlockStored, hashes: list[int], lane: int) -> list[int]:
        """Name the blocks of an event with tokens, all or none, and return their keys."""
        if event.block_size != self.block_size or len(event.token_ids) != len(hashes) * event.block_size:
            self.refused += len(hashes)
            return []
        parent: Name | None = None
        if event.parent_block_hash is not None:
            parent = self._get(to_u64(event.parent_block_hash))
            if parent is None:
                self._park(event, hashes, lane)
                return []
        salt = parent.salt if parent is not None else salt_of(event.extra_keys, event.lora_name)
        local = self._local(event, salt)
        if local is None:
            self.refused += len(hashes)
            return []
        keys = chain_keys(local, None if parent is None else parent.key)
        if salt is not None:
            self._salted.update(zip(hashes, (Name(key, salt) for key in keys.tolist()), strict=True))
        elif not self._names.put(self.worker, hashes, keys):
            self._table.refuse(self.worker, len(hashes))
            return []
        numbers: list[int] = keys.tolist()
        return numbers

    def _local(self, event: BlockStored, salt: str | None) -> Hashes | None:
        """Return the blocks' local hashes, `None` where a token is no token."""
        try:
            tokens = np.array(event.token_ids, np.uint32)
        except (OverflowError, TypeError, ValueError):
            return None
        seed = seed_of(event.lora_name, salt) if event.lora_name or salt else SEED
        return local_hashes(tokens, self.block_size, seed, image_hashes(event.extra_keys))

    def _keys_of_named(self, event: BlockStored, hashes: list[int], lane: int) -> list[int]:
        """Return the keys of those blocks that have a name; the others wait for one."""
        keys = []
        for i, each in enumerate(hashes):
            name = self._get(each)
            if name is not None:
                keys.append(name.key)
            else:
                self.waiting.park(each, (lane, each), (blocks_of(event, i, i + 1), lane))
        return keys

    def _park(self, event: BlockStored, hashes: list[int], lane: int) -> None:
        """Park every block on its own, behind the one before it: any of them may be removed meanwhile."""
        for i, each in enumerate(hashes):
            block = blocks_of(event, i, i + 1)
            assert block.parent_block_hash is not None
            self.waiting.park(to_u64(block.parent_block_hash), (lane, each), (block, lane))

    def engine_hashes(self) -> dict[int, int]:
        """Return what the engine calls each key."""
        names = self._names.items(self.worker) | {each: name.key for each, name in self._salted.items()}
        return {key: engine_hash for engine_hash, key in names.items()}

    def check(self) -> None:
        """Raise `IntegrityError` where what waits is not in order."""
        self.waiting.check()
