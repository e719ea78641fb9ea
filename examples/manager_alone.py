"""Run a manager without an engine: how many chunks of a workload would a pool of this size find?

    python examples/manager_alone.py --slots 64 --policy lru arc own_policy:FewestUses

A manager decides and moves no bytes: a store takes slots, a load pins them. Both must be completed.
The policy gittins learns from times, and there are none here: compare it with `kvtier simulate`.
"""

from __future__ import annotations

import argparse
import random

from kvtier.keys import OffloadKey, hash_blocks, make_offload_key
from kvtier.offload import CPUOffloadingManager, ReqContext

BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--slots", type=int, default=64, help="chunks that the pool holds")
    parser.add_argument("--policy", nargs="+", default=["lru", "arc", "own_policy:FewestUses"])
    args = parser.parse_args()
    prompts = make_prompts(random.Random(0))
    for policy in args.policy:
        manager = CPUOffloadingManager(args.slots, policy)
        found = sum(run(manager, str(number), keys) for number, keys in enumerate(prompts))
        manager.check()
        print(f"{policy}: {found / sum(map(len, prompts)):.1%} of all chunks found")


def run(manager: CPUOffloadingManager, name: str, keys: list[OffloadKey]) -> int:
    """Serve a request: load the chunks that are there, store the rest, and return how many were there."""
    request = ReqContext(req_id=name)
    found = manager.lookup_prefix(keys, request) or 0
    manager.prepare_load(keys[:found], request)  # a real engine copies these slots to its blocks now
    manager.complete_load(keys[:found])
    manager.touch(keys, request)
    if (store := manager.prepare_store(keys, request)) is not None:  # and its blocks to these slots
        manager.complete_store(store.keys_to_store)
    manager.on_request_finished(request)
    return found


def make_prompts(rng: random.Random) -> list[list[OffloadKey]]:
    """Return the keys of 400 prompts: a few documents are asked about often, others once."""
    prompts = []
    for number in range(400):
        document = rng.randrange(10) if rng.random() < 0.5 else 1000 + number
        tokens = [document * 10_000 + position for position in range(6 * BLOCK_SIZE)]
        prompts.append([make_offload_key(block, 0) for block in hash_blocks(tokens, BLOCK_SIZE)])
    return prompts


if __name__ == "__main__":
    main()
