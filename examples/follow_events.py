"""Follow the KV events of an engine (kvtier's, vLLM's or SGLang's) and know whether the picture is exact.

python examples/follow_events.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558
"""

from __future__ import annotations

import argparse

from kvtier.events import (
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    Received,
    Reset,
    Source,
    StateChanged,
    Subscriber,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint", help="where the engine publishes")
    parser.add_argument("replay_endpoint", nargs="?", help="where it answers; without it no gap is repaired")
    parser.add_argument("--batches", type=int, help="end after so many")
    args = parser.parse_args()
    held: set[int | bytes] = set()
    batches = 0
    engine = Source("engine", args.endpoint, args.replay_endpoint)
    with Subscriber[DecodedBatch]([engine]) as subscriber:
        for update in subscriber:
            match update:
                case Reset(source):
                    held.clear()
                    print(f"{source} starts over", flush=True)
                case Received(source, number, batch):
                    for event in batch.events:
                        if isinstance(event, BlockStored):
                            held.update(event.block_hashes)
                        elif isinstance(event, BlockRemoved):
                            held.difference_update(event.block_hashes)
                        else:  # AllBlocksCleared
                            held.clear()
                    batches += 1
                    print(f"{source} batch {number}: {len(held)} blocks", flush=True)
                case StateChanged(source, state, reason):
                    print(f"{source} is {state.value}{': ' * bool(reason)}{reason}", flush=True)
            if args.batches is not None and batches >= args.batches:
                break


if __name__ == "__main__":
    main()
