"""Publish the KV events of a cache of your own, as an engine does: subscribers of vLLM's stream read them.

    python examples/publish_events.py
    python examples/follow_events.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558    # in another terminal

A subscriber may come late or miss batches: it asks for them, and marks prove that nothing is missing.
"""

from __future__ import annotations

import argparse
import time

from kvtier import events
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
    config = events.KVEventsConfig(endpoint=args.endpoint, replay_endpoint=args.replay_endpoint, bind=True)
    publisher = events.ZmqEventPublisher(data_parallel_rank=0, config=config)
    print(f"live at {publisher.endpoint}, replays at {publisher.replay_endpoint}", flush=True)
    try:
        for number in range(args.prompts):
            publisher.publish(events.KVEventBatch(ts=time.time(), events=changes(number)))
            time.sleep(args.interval)
    finally:
        publisher.shutdown()


def changes(number: int) -> list[events.BlockStored | events.BlockRemoved | events.AllBlocksCleared]:
    """Announce the blocks of a prompt; beyond eight prompts, take those of the oldest back."""
    tokens, block_hashes = make_blocks(number)
    stored = events.BlockStored(block_hashes, None, tokens, BLOCK_SIZE, None, events.MEDIUM_CPU, None)
    if number < 8:
        return [stored]
    return [stored, events.BlockRemoved(make_blocks(number - 8)[1], events.MEDIUM_CPU)]


def make_blocks(number: int) -> tuple[list[int], list[int | bytes]]:
    """Return the tokens of a prompt, and the hashes of its blocks."""
    tokens = [number * 1000 + position for position in range(4 * BLOCK_SIZE)]
    return tokens, [hash_to_u64(block) for block in hash_blocks(tokens, BLOCK_SIZE)]


if __name__ == "__main__":
    main()
