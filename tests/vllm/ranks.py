"""A program for `test_processes`: two ranks whose transfers fail independently of each other.

`python ranks.py MODEL OPTIONS [TIMES]` computes prompts in an engine with these options, given in JSON, then
forgets and loads them again and again, and says in a line of JSON whether all tokens were those of the first
time, and what was counted. Prompts are so many times as long.
"""

from __future__ import annotations

import json
import sys

from tests.vllm.engines import Prompt, as_connector, make_llm, make_prompt
from vllm import LLM, SamplingParams

LENGTHS = range(60, 260, 25)
ROUNDS = 8


def main() -> None:
    settings = {"load_deadline": "100ms", "store_deadline": "300ms"}
    faulty = as_connector(settings, ("tests.vllm.faulty", "FaultyRanks"))
    model, options, times = sys.argv[1], json.loads(sys.argv[2]), int([*sys.argv, "1"][3])
    if options.get("pipeline_parallel_size"):
        options["worker_extension_cls"] = "tests.vllm.stages.StageWorker"
    llm = make_llm(model, 64, faulty, disable_log_stats=False, **options)
    if options.get("pipeline_parallel_size"):
        llm.collective_rpc("make_intermediate_tensors")
    prompts = [make_prompt(length, times * length) for length in LENGTHS]
    computed = generate(llm, prompts)
    loaded = []
    for _ in range(ROUNDS):
        llm.reset_prefix_cache()
        loaded.append(generate(llm, prompts))
    counted = {metric.name: metric.value for metric in llm.get_metrics() if "kvtier_loads" in metric.name}
    print(json.dumps({"wrong": sum(tokens != computed for tokens in loaded)} | counted), flush=True)


def generate(llm: LLM, prompts: list[Prompt]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
