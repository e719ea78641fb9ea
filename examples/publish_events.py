"""Publish the KV events of a cache of your own, as an engine does: any subscriber of vLLM's stream reads them.

    python examples/publish_events.py
    python examples/follow_events.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558    # in another terminal

A subscriber may come late or miss batches: the publisher replays them, and marks prove that nothing is missing.
"""

from __future__ import annotations

import argparse
import time

from kvtier.events import (
    MEDIUM_CPU,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventsConfig,
    ZmqEventPublisher,
)
from kvtier.keys import hash_blocks, hash_to_u64

BLOCK_SIZE = 16
"""The tokens in a block."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:5557")
    parser.add_argument("--replay-endpoint", default="tcp://127.0.0.1:5558")
    parser.add_argument("--prompts", type=int, default=60, help="how many to announce, one every --interval")
    parser.add_argument("--interval", type=float, default=1.0, help="in seconds")
    args = parser.parse_args()
    config = KVEventsConfig(endpoint=args.endpoint, replay_endpoint=args.replay_endpoint, bind=True)
    publisher = ZmqEventPublisher(data_parallel_rank=0, config=config)
    print(f"live at {publisher.endpoint}, replays at {publisher.replay_endpoint}", flush=True)
    try:
        for number in range(args.prompts):
            events = [store(number), remove(number - 8)] if number >= 8 else [store(number)]
            publisher.publish(KVEventBatch(ts=time.time(), events=events))
            time.sleep(args.interval)
    finally:
        publisher.shutdown()


def store(number: int) -> BlockStored:
    """Return the event that announces the blocks of a prompt, with its tokens."""
    tokens = prompt(number)
    return BlockStored(hashes(number), None, tokens, BLOCK_SIZE, None, MEDIUM_CPU, None)


def remove(number: int) -> BlockRemoved:
    """Return the event that takes them back: the cache of this example holds eight prompts."""
    return BlockRemoved(hashes(number), MEDIUM_CPU)


def prompt(number: int) -> list[int]:
    return [number * 1000 + position for position in range(4 * BLOCK_SIZE)]


def hashes(number: int) -> list[int | bytes]:
    return [hash_to_u64(block) for block in hash_blocks(prompt(number), BLOCK_SIZE)]


if __name__ == "__main__":
    main()
