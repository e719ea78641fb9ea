"""Random cache traffic as an engine makes it, and the brute-force truth of what it leaves behind.

Blocks form chains on the GPU and are evicted from their ends, as engines do; copies of them come and go on
the CPU in any order. Every event also changes the model, a plain dictionary, so the truth owes nothing to
the code under test.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch

BLOCK_SIZE = 4


class Block(NamedTuple):
    """A block in one medium; a first block has parent 0."""

    medium: str
    hash: int
    parent: int


class Traffic:
    """Makes batches from a seed. `truth` is what is held once all batches made so far are applied."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._gpu: dict[int, int] = {}
        self._cpu: dict[int, int] = {}
        self._parents: dict[int, int] = {}

    @property
    def truth(self) -> set[Block]:
        """Return what is held."""
        gpu = {Block("GPU", block, parent) for block, parent in self._gpu.items()}
        return gpu | {Block("CPU", block, parent) for block, parent in self._cpu.items()}

    def batches(self, count: int) -> list[KVEventBatch]:
        """Return the next batches."""
        return [self.batch() for _ in range(count)]

    def batch(self) -> KVEventBatch:
        """Return the next batch, of one to four events."""
        events = [event for _ in range(self._random.randint(1, 4)) if (event := self._event()) is not None]
        return batch_of(*events)

    def clear(self) -> KVEventBatch:
        """Return a batch that empties the cache and begins anew."""
        self._gpu.clear()
        self._cpu.clear()
        return batch_of(AllBlocksCleared(), self._grow())

    def evict_all(self) -> KVEventBatch:
        """Return a batch that empties the GPU, children before their parents."""
        gone = list(reversed(self._gpu))
        self._gpu.clear()
        return batch_of(BlockRemoved(block_hashes=gone, medium="GPU"))

    def prompt(self) -> list[int]:
        """Return the tokens of a chain that was once stored, whatever is left of it, and some that never
        were.
        """
        block, blocks = self._random.choice(list(self._parents)), []
        while block:
            blocks.append(block)
            block = self._parents[block]
        known = [token for parent in reversed(blocks) for token in tokens_of(parent)]
        return known + [1 << 20] * self._random.randrange(2 * BLOCK_SIZE)

    def _event(self) -> KVCacheEvent | None:
        weights = (5, 2, 3, 1)
        (make,) = self._random.choices((self._grow, self._evict, self._copy, self._drop_copy), weights)
        return make()

    def _grow(self) -> BlockStored:
        """Extend a chain, or begin one, by one to six blocks."""
        parent = self._random.choice(list(self._gpu)) if self._gpu and self._random.random() < 0.7 else 0
        hashes = [self._random.getrandbits(63) | 1 << 62 for _ in range(self._random.randint(1, 6))]
        for block, before in zip(hashes, [parent, *hashes], strict=False):
            self._gpu[block] = self._parents[block] = before
        return stored("GPU", hashes, parent)

    def _evict(self) -> BlockRemoved | None:
        """Take up to eight blocks from the ends of chains."""
        gone: list[int] = []
        for _ in range(self._random.randint(1, 8)):
            ends = self._gpu.keys() - self._gpu.values()
            if not ends:
                break
            gone.append(self._random.choice(sorted(ends)))
            del self._gpu[gone[-1]]
        return BlockRemoved(block_hashes=gone, medium="GPU") if gone else None

    def _copy(self) -> BlockStored | None:
        """Copy a block, wherever in its chain, to the CPU."""
        news = sorted(self._gpu.keys() - self._cpu.keys())
        if not news:
            return None
        block = self._random.choice(news)
        self._cpu[block] = self._gpu[block]
        return stored("CPU", [block], self._gpu[block])

    def _drop_copy(self) -> BlockRemoved | None:
        if not self._cpu:
            return None
        block = self._random.choice(sorted(self._cpu))
        del self._cpu[block]
        return BlockRemoved(block_hashes=[block], medium="CPU")


def batch_of(*events: KVCacheEvent) -> KVEventBatch:
    """Return a batch of these events."""
    return KVEventBatch(ts=1.0, events=list(events), data_parallel_rank=0)


def tokens_of(block: int | bytes) -> list[int]:
    """Return the tokens of a block.

    No two blocks have the same: a tree of tokens would take them for one.
    """
    number = int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else block
    return [number >> 16 * at & 0xFFFF for at in range(BLOCK_SIZE)]


def stored(medium: str, hashes: Sequence[int | bytes], parent: int | bytes | None) -> BlockStored:
    """Return the event that stores a chain; its tokens differ from block to block."""
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent or None,
        token_ids=[token for block in hashes for token in tokens_of(block)],
        block_size=BLOCK_SIZE,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )
