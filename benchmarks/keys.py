"""Claim: kvtier hashes a prompt's blocks in less than a fifth of the time of vLLM's default block hash.

Both hash the same 1,024 blocks of 16 tokens, from a list of ints, in one process and in turns; the best of
many rounds counts, since other load on a machine only adds time. vLLM's function is called as its scheduler
calls it, with the hash of its default config. Needs an environment with vLLM and kvtier (`make bench`
builds one).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.keys import HASHED_BY, hash_blocks

BLOCKS, BLOCK_SIZE, VOCABULARY = 1024, 16, 128_256
TARGET = 5.0


def vllm_hasher() -> Callable[[list[int]], list[bytes]]:
    """Return vLLM's default chain of block hashes."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.config import CacheConfig
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    function = get_hash_fn_by_name(CacheConfig().prefix_caching_hash_algo)
    init_none_hash(function)

    def run(tokens: list[int]) -> list[bytes]:
        hashes = []
        parent = None
        for start in range(0, len(tokens), BLOCK_SIZE):
            parent = hash_block_tokens(function, parent, tokens[start : start + BLOCK_SIZE], None)
            hashes.append(parent)
        return hashes

    return run


def best_ns_per_block(
    functions: list[Callable[[list[int]], object]], tokens: list[int], rounds: int
) -> list[float]:
    """Time the functions in turns; return each one's best round, per block."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter_ns()
            function(tokens)
            best[i] = min(best[i], time.perf_counter_ns() - start)
    return [ns / BLOCKS for ns in best]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    arguments = parser.parse_args()
    try:
        theirs = vllm_hasher()
    except ModuleNotFoundError as error:
        print(
            f"benchmarks/keys.py: {error}; run it with an environment that has vLLM, as `make bench` does",
            file=sys.stderr,
        )
        return 2
    source = random.Random(0)
    tokens = [source.randrange(VOCABULARY) for _ in range(BLOCKS * BLOCK_SIZE)]
    kvtier_ns, vllm_ns = best_ns_per_block(
        [lambda ids: hash_blocks(ids, BLOCK_SIZE), theirs], tokens, arguments.rounds
    )
    ratio = vllm_ns / kvtier_ns
    print(f"{BLOCKS} blocks of {BLOCK_SIZE} tokens, best of {arguments.rounds} rounds")
    print(f"  vLLM    {vllm_ns:8.1f} ns/block")
    print(f"  kvtier  {kvtier_ns:8.1f} ns/block  (hashed by {HASHED_BY})")
    print(f"  {ratio:.2f} times faster; the claim is {TARGET:g}")
    if arguments.json:
        numbers = {
            "vllm_ns_per_block": vllm_ns,
            "kvtier_ns_per_block": kvtier_ns,
            "ratio": ratio,
            "target": TARGET,
        }
        arguments.json.write_text(json.dumps(numbers | {"hashed_by": HASHED_BY}, indent=2) + "\n")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
