"""A program for `test_processes`: it serves prompts in vLLM's own processes, and says what came out as lines
of JSON.

`python turns.py MODEL TENSOR_PARALLEL_SIZE [FOLDER]` computes prompts, forgets them, loads them back, and
then goes on generating until somebody kills it. With a folder there is a disk tier in it, which has all of
them by the time the line is there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.vllm.device import engine_options
from tests.vllm.disks import PROBE, disk_tier, wait_open, wait_rows
from tests.vllm.engines import make_prompt
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PROMPTS = [[(7 * seed + 13 * token) % 512 for token in range(60 + 40 * seed)] for seed in range(4)]
ROWS = 2 + 3 + 4 + 5
"""Blocks of 32 that the prompts and the KV of 7 more tokens fill."""


def main() -> None:
    model, tensor_parallel_size, *folders = sys.argv[1:]
    llm = LLM(
        **engine_options(),
        model=model,
        dtype="float32",
        max_model_len=352,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=24,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
        tensor_parallel_size=int(tensor_parallel_size),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu": {"capacity": "16MiB"}, "load_if_faster": False}
            | (disk_tier(Path(folders[0])) if folders else {}),
        ),
    )
    if folders:
        wait_open(lambda seed: run(llm, [make_prompt(seed, 40)], 1, PROBE)[0].kv_transfer_params["kvtier"])
    computed = generate(llm, 8)
    assert llm.reset_prefix_cache()
    loaded = generate(llm, 8)
    if folders:
        wait_rows(Path(folders[0]), ROWS)
    print(json.dumps({"computed": computed, "loaded": loaded}), flush=True)
    while True:
        generate(llm, 64)
        llm.reset_prefix_cache()


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
