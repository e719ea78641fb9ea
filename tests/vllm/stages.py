"""A program for `test_processes`: two pipeline stages, the second of which fails loads when it is told to.

`python stages.py MODEL FOLDER [ROWS]` computes prompts, loads them, loads them while the second stage fails,
loads them again, and says what came out in a line of JSON; then it waits until somebody kills it. In the
folder there is a disk tier, which has so many rows by the time the line is there. Without a number all tiers
are cleared at the end, and the prompts are run once more. The scheduler is in this process, the stages are
in processes of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.vllm.disks import PROBE, disk_tier, num_rows
from tests.vllm.engines import as_connector, make_llm, make_prompt
from tests.vllm.turns import generate, run
from vllm import LLM


class StageWorker:
    """What vLLM's workers get as methods of theirs."""

    model_runner: Any

    def make_intermediate_tensors(self) -> None:
        """Make what the second stage receives into.

        vLLM does so in a trial run, which its CPU build leaves out without compilation.
        """
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


def main() -> None:
    model, folder, *rows = sys.argv[1:]
    fail = Path(folder) / "fail"
    os.environ |= {"KVTIER_TEST_FAIL": str(fail), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    llm = make_llm(
        model,
        40,
        as_connector(disk_tier(Path(folder) / "disk"), ("tests.vllm.faulty", "FailingStage")),
        disable_log_stats=False,
        pipeline_parallel_size=2,
        worker_extension_cls="tests.vllm.stages.StageWorker",
    )
    llm.collective_rpc("make_intermediate_tensors")
    said: dict[str, Any] = {"computed": generate(llm, 8), "loaded": again(llm)}
    fail.touch()
    said["failing"] = again(llm)
    fail.unlink()
    said["after"] = again(llm)
    if rows:
        while num_rows(Path(folder) / "disk") < int(rows[0]):
            probe(llm, 0)  # rows are written in steps
    else:
        said["cleared"] = again(llm, reset_connector=True)
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    said["failed loads"] = metrics["vllm:kvtier_loads_failed"]
    print(json.dumps(said), flush=True)
    time.sleep(3600)


def probe(llm: LLM, seed: int) -> dict[str, Any]:
    """Run a prompt that leaves nothing behind, and return what is explained of it."""
    explained: dict[str, Any] = run(llm, [make_prompt(seed, 40)], 1, PROBE)[0].kv_transfer_params["kvtier"]
    return explained


def again(llm: LLM, **options: bool) -> list[tuple[list[int], int, dict[str, int]]]:
    """Forget the prompts, and run them again."""
    assert llm.reset_prefix_cache(**options)
    return generate(llm, 8)


if __name__ == "__main__":
    main()
