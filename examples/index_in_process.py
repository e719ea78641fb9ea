"""Ask which worker holds the longest part of a prompt, from the events of each: the core of a router.

    python examples/index_in_process.py

`kvtier index serve` answers the same over HTTP, and docs/events.md feeds an index from live streams.
"""

from __future__ import annotations

import time

from kvtier.events import MEDIUM_CPU, MEDIUM_GPU, BlockRemoved, BlockStored, DecodedBatch
from kvtier.index import PrefixIndex
from kvtier.keys import hash_blocks, hash_to_u64

BLOCK_SIZE = 16
DOCUMENT = list(range(1000, 1000 + 8 * BLOCK_SIZE))


def main() -> None:
    index = PrefixIndex()
    index.apply("worker-1", batch(store(DOCUMENT, MEDIUM_GPU)))
    index.apply("worker-2", batch(store(DOCUMENT[: 5 * BLOCK_SIZE], MEDIUM_CPU)))
    show(index, "both know the document")
    index.apply("worker-1", batch(BlockRemoved(hashes(DOCUMENT)[2:], MEDIUM_GPU)))
    show(index, "worker-1 has evicted all but two blocks")


def show(index: PrefixIndex, when: str) -> None:
    """Print who holds how much of a prompt that begins with the document."""
    match = index.match_tokens(DOCUMENT + [7, 8, 9])
    blocks = dict(zip(match.workers, match.on_any_tier.tolist(), strict=True))
    best = max(blocks, key=lambda worker: blocks[worker])
    print(f"{when}: {blocks}; best: {best} with {blocks[best] * BLOCK_SIZE} tokens")


def batch(event: BlockStored | BlockRemoved) -> DecodedBatch:
    return DecodedBatch(ts=time.time(), events=[event])


def store(tokens: list[int], medium: str) -> BlockStored:
    return BlockStored(hashes(tokens), None, tokens, BLOCK_SIZE, None, medium, None)


def hashes(tokens: list[int]) -> list[int | bytes]:
    return [hash_to_u64(block) for block in hash_blocks(tokens, BLOCK_SIZE)]


if __name__ == "__main__":
    main()
