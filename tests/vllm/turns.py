"""A program for `test_processes`: it serves prompts in vLLM's own processes, and says what came out as lines
of JSON.

`python turns.py MODEL TENSOR_PARALLEL_SIZE [TIER ...]` computes prompts, forgets them, loads them back, and
then goes on generating until somebody kills it. A tier is a folder for a disk tier or the address of a
Valkey server; each has all of them by the time the line is there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from socket import create_connection
from typing import Any

from tests.vllm.disks import num_rows
from tests.vllm.engines import as_connector, make_llm
from vllm import LLM, SamplingParams

PROMPTS = [[(7 * seed + 13 * token) % 512 for token in range(60 + 40 * seed)] for seed in range(4)]
ROWS = 2 + 3 + 4 + 5
"""Blocks of 32 that the prompts and the KV of 7 more tokens fill."""


def main() -> None:
    model, tensor_parallel_size, *places = sys.argv[1:]
    settings = {"load_deadline": "30s", "tiers": [settings_of(place) for place in places]}
    llm = make_llm(model, 24, as_connector(settings), tensor_parallel_size=int(tensor_parallel_size))
    computed = generate(llm, 8)
    assert llm.reset_prefix_cache()
    loaded = generate(llm, 8)
    while any(count_rows(place) < ROWS for place in places):
        # On a busy machine a tier may have been suspended: what it was not given waits for the next steps.
        run(llm, [[1, 2, 3]], 1, {})
        time.sleep(0.02)
    print(json.dumps({"computed": computed, "loaded": loaded}), flush=True)
    while True:
        generate(llm, 64)
        llm.reset_prefix_cache()


def settings_of(place: str) -> dict[str, Any]:
    """Return the settings of a tier."""
    if "://" in place:
        return {"valkey": {"url": place}}
    return {"disk": {"path": place, "capacity": "64MiB"}}


def count_rows(place: str) -> int:
    """Count the rows that are in a tier, whoever has written them."""
    if "://" not in place:
        return num_rows(Path(place))
    host, _, port = place.removeprefix("valkey://").partition("/")[0].partition(":")
    with create_connection((host, int(port))) as connection:
        connection.sendall(b"DBSIZE\r\n")
        return int(connection.recv(64)[1:])


def generate(llm: LLM, max_tokens: int) -> list[tuple[list[int], int, dict[str, int]]]:
    """Return of each prompt the tokens that follow, how many were not computed, and what tiers gave."""
    outputs = run(llm, PROMPTS, max_tokens, {"kvtier": {"explain": True}})
    return [
        (
            list(output.outputs[0].token_ids),
            output.num_cached_tokens,
            output.kv_transfer_params["kvtier"]["from_tiers"],
        )
        for output in outputs
    ]


def run(llm: LLM, prompts: list[list[int]], max_tokens: int, asked: dict[str, Any]) -> list[Any]:
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            # The question is taken out of it.
            extra_args={"kv_transfer_params": json.loads(json.dumps(asked))},
        )
        for _ in prompts
    ]
    outputs: list[Any] = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return outputs


if __name__ == "__main__":
    main()
