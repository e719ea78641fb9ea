"""A program for `test_processes`: two ranks whose weights are reloaded without a word to kvtier.

`python new_weights.py MODEL CHECKPOINT` computes prompts, reloads the weights, computes the prompts again
and, after a reset of everything, once more. It says in a line of JSON what was computed each time and what
was counted.
"""

from __future__ import annotations

import json
import sys

from tests.vllm.engines import as_connector, make_llm, make_prompt
from tests.vllm.ranks import LENGTHS, generate

PROMPTS = [make_prompt(length, length) for length in LENGTHS]


def main() -> None:
    model, checkpoint = sys.argv[1:]
    llm = make_llm(model, 64, as_connector({}), disable_log_stats=False, tensor_parallel_size=2)
    old = generate(llm, PROMPTS)
    llm.reset_prefix_cache()
    assert generate(llm, PROMPTS) == old
    llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    llm.reset_prefix_cache()
    unsaid = generate(llm, PROMPTS)
    llm.reset_prefix_cache(reset_connector=True)
    said = generate(llm, PROMPTS)
    names = ("vllm:kvtier_loads", "vllm:kvtier_weight_changes")
    counted = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in names}
    print(json.dumps({"computed": [old, unsaid, said]} | counted), flush=True)


if __name__ == "__main__":
    main()
