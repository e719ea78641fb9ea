"""A program for `test_processes`: it serves prompts in vLLM's own processes, and says what came out as lines of JSON.

`python turns.py MODEL TENSOR_PARALLEL_SIZE` computes prompts, forgets them, loads them back, and then goes on generating
until somebody kills it.
"""

from __future__ import annotations

import json
import sys

from tests.vllm.device import engine_options
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PROMPTS = [[(7 * seed + 13 * token) % 512 for token in range(60 + 40 * seed)] for seed in range(4)]


def main() -> None:
    model, tensor_parallel_size = sys.argv[1:]
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
            kv_connector_extra_config={"cpu": {"capacity": "16MiB"}, "load_if_faster": False},
        ),
    )
    computed = generate(llm, 8)
    assert llm.reset_prefix_cache()
    loaded = generate(llm, 8)
    print(json.dumps({"computed": computed, "loaded": loaded}), flush=True)
    while True:
        generate(llm, 64)
        llm.reset_prefix_cache()


def generate(llm: LLM, max_tokens: int) -> list[tuple[list[int], int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.num_cached_tokens) for output in outputs]


if __name__ == "__main__":
    main()
