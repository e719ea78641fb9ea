"""A program for `test_processes`: two ranks whose transfers fail independently of each other.

`python ranks.py MODEL` computes prompts, then forgets and loads them again and again, and says in a line of
JSON whether all tokens were those of the first time, and what was counted.
"""

from __future__ import annotations

import json
import sys

from tests.vllm.engines import as_connector, make_llm
from vllm import LLM, SamplingParams

PROMPTS = [[(7 * seed + 13 * token) % 512 for token in range(60 + 25 * seed)] for seed in range(8)]
ROUNDS = 8


def main() -> None:
    settings = {"load_deadline": "100ms", "store_deadline": "300ms"}
    faulty = as_connector(settings, ("tests.vllm.faulty", "FaultyRanks"))
    llm = make_llm(sys.argv[1], 64, faulty, disable_log_stats=False, tensor_parallel_size=2)
    computed = generate(llm)
    loaded = []
    for _ in range(ROUNDS):
        llm.reset_prefix_cache()
        loaded.append(generate(llm))
    counted = {metric.name: metric.value for metric in llm.get_metrics() if "kvtier_loads" in metric.name}
    print(json.dumps({"wrong": sum(tokens != computed for tokens in loaded)} | counted), flush=True)


def generate(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
