"""A sample of prompts, in which the longest prefixes that several workers share can be found.

A table knows who holds a block, but not which block comes after which: parents would cost every block eight
more bytes. So an index's server keeps the beginnings of some prompts instead, taken from queries and from
stores as they come. Who holds how much of them is asked when somebody wants to know. A prefix is therefore
found if a prompt with it came by while the sample was due; what is said about it is exact.

Memory is bounded, and so is time: each taken prompt is followed by a pause of `_PAUSE` times the time that
it took, over all samples that share a `Pace`. Not for several threads at once: the service's lock guards it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtier.events.types import BlockStored
from kvtier.events.wire import DecodedBatch, to_u64
from kvtier.index.base import STATE, Hashes, Match
from kvtier.index.prefix import PrefixIndex

_PAUSE = 200
"""So sampling takes half a percent of a thread's time at most."""
_MOST_CHAINS = 256
_MOST_BLOCKS = 1 << 14
"""The most blocks of a chain: with 16 tokens each, a prompt of 262,144 tokens."""
_MOST_HASHES = 1 << 18
"""The most hashes of a sample, over all its chains: 2 MiB."""


class Pace:
    """Lets work take a small share of the time: a pause in proportion follows each piece of it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._rest_until = float("-inf")

    def begin(self) -> bool:
        """Return whether the pause is over; if so, a piece of work begins."""
        self._start = self._clock()
        return self._start >= self._rest_until

    def end(self) -> None:
        """End the piece of work."""
        now = self._clock()
        self._rest_until = now + _PAUSE * (now - self._start)


class _Chain(NamedTuple):
    """The leading blocks of a prompt, and how many of them two workers held when it was taken."""

    keys: Hashes
    shared: int


class PromptSample:
    """Keeps chains of blocks: the beginnings of prompts of one index."""

    def __init__(self, index: PrefixIndex, pace: Pace) -> None:
        self._index, self._pace = index, pace
        self._chains: dict[int, _Chain] = {}  # by the last key, the oldest first
        self._hashes = 0

    def chains(self) -> list[Hashes]:
        """Return the kept chains; the arrays never change."""
        return [chain.keys for chain in self._chains.values()]

    def offer_query(self, keys: Hashes, match: Match) -> None:
        """Take a prompt that was asked about, if a sample is due."""
        if self._pace.begin():
            self._take(keys, match)
            self._pace.end()

    def offer_batch(self, worker: str, batch: Any) -> None:
        """Take the longest prompt that begins in a batch of a worker's events, if a sample is due."""
        if self._pace.begin():
            keys = max((self._chain_of(worker, *run) for run in _longest_runs(batch)), key=len, default=None)
            if keys is not None and len(keys):
                self._take(keys, self._index.match(keys))
            self._pace.end()

    def _chain_of(self, worker: str, parent: int | None, hashes: Sequence[int]) -> Hashes:
        """Return the keys from a prompt's first block to a run's end; none if its beginning is unknown."""
        keys = self._index.keys_of(worker, hashes[:_MOST_BLOCKS])
        if parent is None:
            return keys
        before = self._index.keys_of(worker, [parent])
        known = self._chains.get(int(before[0])) if len(before) else None
        return keys[:0] if known is None else np.concatenate([known.keys, keys])[:_MOST_BLOCKS]

    def _take(self, keys: Hashes, match: Match) -> None:
        """Keep as much of a chain as any worker holds; the least shared chains leave for it."""
        depths = np.sort(match.on_any_tier)[::-1].tolist()
        longest = min(depths[0], _MOST_BLOCKS) if depths else 0
        if not longest:
            return
        self._drop(int(keys[longest - 1]))
        self._chains[int(keys[longest - 1])] = _Chain(
            keys[:longest].copy(), depths[1] if len(depths) > 1 else 0
        )
        self._hashes += longest
        while len(self._chains) > _MOST_CHAINS or self._hashes > _MOST_HASHES:
            self._drop(min(self._chains, key=lambda last: self._chains[last].shared))

    def _drop(self, last: int) -> None:
        if (gone := self._chains.pop(last, None)) is not None:
            self._hashes -= len(gone.keys)


def _longest_runs(batch: Any) -> Iterator[tuple[int | None, Sequence[int]]]:
    """Yield the longest store without a parent and the longest one with a parent: parent and hashes."""
    runs = _decoded_runs(batch) if isinstance(batch, DecodedBatch) else batch.longest_runs()
    best: dict[bool, tuple[int | None, Sequence[int]]] = {}
    for parent, hashes in runs:
        kept = best.get(parent is None)
        if kept is None or len(hashes) > len(kept[1]):
            best[parent is None] = parent, hashes
    return iter(best.values())


def _decoded_runs(batch: DecodedBatch) -> Iterator[tuple[int | None, Sequence[int]]]:
    for event in batch.events:
        if isinstance(event, BlockStored) and event.kv_cache_spec_kind != STATE:
            parent = None if event.parent_block_hash is None else to_u64(event.parent_block_hash)
            yield parent, [to_u64(block_hash) for block_hash in event.block_hashes]


class SharedDepth(NamedTuple):
    """A length of a prefix in blocks: how many workers hold so much, in total and whole on each tier."""

    blocks: int
    workers: int
    on_tier: tuple[int, ...]


class SharedPrefix(NamedTuple):
    """A prefix that at least two workers hold: its keys, and steps from its longest to its widest."""

    keys: Hashes
    steps: tuple[SharedDepth, ...]

    @property
    def last_key(self) -> int:
        """The key of the last block that two workers hold."""
        return int(self.keys[self.steps[0].blocks - 1])

    @property
    def best(self) -> SharedDepth:
        """The step of which other workers have the most copies: what its branches have in common."""
        return max(self.steps, key=lambda step: step.blocks * (step.workers - 1))

    def is_branch_of(self, other: SharedPrefix) -> bool:
        """Return whether another prefix, which is not shorter, begins with the best step of this one."""
        last = self.best.blocks - 1
        return bool(other.keys[last] == self.keys[last])


def shared_prefix(keys: Hashes, match: Match) -> SharedPrefix | None:
    """Return what of a chain is held by at least 2, 4, 8 … workers and by all that hold any of it."""
    depths = match.on_any_tier
    held = np.sort(depths[depths > 0])[::-1].tolist()
    if len(held) < 2:
        return None
    ranks = [1 << power for power in range(1, len(held).bit_length())] + [len(held)]
    steps = tuple(
        SharedDepth(
            blocks, int((depths >= blocks).sum()), tuple((match.on_tier >= blocks).sum(axis=0).tolist())
        )
        for blocks in dict.fromkeys(held[rank - 1] for rank in ranks)
    )
    return SharedPrefix(keys, steps)


def longest(found: list[SharedPrefix], most: int) -> list[SharedPrefix]:
    """Return the longest prefixes, the longest first, without branches of longer ones."""
    best: list[SharedPrefix] = []
    for prefix in sorted(found, key=lambda prefix: prefix.steps[0], reverse=True):
        if len(best) < most and not any(map(prefix.is_branch_of, best)):
            best.append(prefix)
    return best
