"""Claim: with a pool for a fifth of the working set, `gittins` saves more prompt tokens in vLLM than LRU.

The goal for a step of vLLM's scheduler is 1.2 times the time with LRU, at the 99th percentile.

Chats come back again and again, each turn with all that was said before; between two turns come prompts that
nobody sends again, twice as many. Two engines of vLLM's CPU build, which differ in the policy of kvtier's
pool, live in one process and serve the same requests in turns, twenty at a time. vLLM's own cache is small.
The model has one layer, because only the number of blocks matters here; times to first tokens are therefore
those of a tiny model. The first half of the requests is left out: a policy that learns has learnt by then.
The working set is what is said between two turns of a chat. A step of the scheduler is `schedule` and
`update_from_output`, with all that they call in the connector, in CPU time of their thread.
Needs an environment with vLLM 0.32 and kvtier (`make bench` builds one).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

# First: it sets variables that torch reads when it is imported.
from _vllm import THREADS, Answer, VllmEngine, save_model

# isort: split

from _common import open_console, random_prompt, write_json
from rich.table import Table
from vllm_ttft import LONG_OPTIONS, ONE_LAYER, quantiles

POLICIES = "lru", "gittins"
TARGET = 1.2
CHATS, FIRST, MORE, ONCE, ANSWER, AT_ONCE = 24, 512, 64, 640, 8, 20
TURNS = 8
"""Turns of a chat, after which another one takes its place."""
BYTES_PER_TOKEN = 2 * 2 * 32 * 4
"""Of the model with one layer: keys and values, two heads of 32, float32."""


class Turn(NamedTuple):
    """A request, and whether an earlier one began like it."""

    prompt: list[int]
    comes_back: bool


def make_turns(seed: int) -> Iterator[Turn]:
    """Yield turns of chats in random order, and twice as many prompts that come once."""
    source = random.Random(seed)
    chats: list[tuple[list[int], int]] = [([], 0)] * CHATS
    while True:
        at = source.randrange(CHATS)
        said, turn = chats[at] if chats[at][1] < TURNS else ([], 0)
        said = said + random_prompt(source, MORE if turn else FIRST)
        chats[at] = said, turn + 1
        yield Turn(said, turn > 0)
        for _ in range(2):
            yield Turn(random_prompt(source, ONCE), comes_back=False)


def serve(engine: VllmEngine, turns: list[Turn]) -> list[Answer]:
    """Serve requests together, and return their answers in order."""
    ids = {engine.submit(turn.prompt, ANSWER): at for at, turn in enumerate(turns)}
    answers: dict[int, Answer] = {}
    while len(answers) < len(turns):
        answers |= {ids[request_id]: answer for request_id, answer in engine.step().items()}
    engine.drain()
    return [answers[at] for at in range(len(turns))]


class StepTimer:
    """Times the steps of an engine's scheduler, in CPU time of its thread: other work does not count."""

    def __init__(self, engine: VllmEngine) -> None:
        self.seconds: list[float] = []
        scheduler = engine._scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def timed_schedule(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            output = schedule(*arguments, **named)
            self.seconds.append(time.thread_time() - start)
            return output

        def timed_update(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            output = update(*arguments, **named)
            self.seconds[-1] += time.thread_time() - start
            return output

        scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update


def measure(requests: int, seed: int) -> dict[str, Any]:
    """Serve the requests with each policy in turns, and return the figures of the second half."""
    turns = list(islice(make_turns(seed), requests))
    working_set = CHATS * (FIRST + MORE * (TURNS - 1) // 2 + 2 * ONCE)
    pool = working_set * BYTES_PER_TOKEN // 5
    found: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        weights = save_model(Path(folder), **ONE_LAYER)
        engines, timers = {}, {}
        for policy in POLICIES:
            settings = {"cpu": {"capacity": pool, "policy": policy}, "load_if_faster": False, "audit": 0}
            transfer = {
                "kv_connector": "KVTierConnector",
                "kv_connector_module_path": "kvtier.integrations.vllm",
                "kv_connector_extra_config": settings,
            }
            options = LONG_OPTIONS | {"num_gpu_blocks_override": 600, "max_num_seqs": AT_ONCE}
            engines[policy] = stack.enter_context(closing(VllmEngine(weights, transfer, **options)))
            timers[policy] = StepTimer(engines[policy])
        answers: dict[str, list[Answer]] = {policy: [] for policy in POLICIES}
        for start in range(0, requests, AT_ONCE):
            order = POLICIES if start // AT_ONCE % 2 else POLICIES[::-1]
            for policy in order:
                answers[policy] += serve(engines[policy], turns[start : start + AT_ONCE])
                if start < requests // 2:
                    timers[policy].seconds.clear()
        for policy, engine in engines.items():
            later = list(zip(turns, answers[policy], strict=True))[requests // 2 :]
            back = [answer for turn, answer in later if turn.comes_back]
            prompts = sum(len(turn.prompt) for turn, _ in later)
            found[policy] = {
                "tokens_saved": sum(answer.cached for _, answer in later) / prompts,
                "first_token_of_turns_ms": median(answer.ttft for answer in back) * 1e3,
                "scheduler_us_per_step": quantiles(timers[policy].seconds, 1e6),
                "counts": engine.counts(),
            }
        same = sum(
            one.tokens == other.tokens
            for one, other in zip(*(answers[policy] for policy in POLICIES), strict=True)
        )
    return {
        "policies": found,
        "pool_bytes": pool,
        "same_answers": same,
        "answers": requests,
        "target": TARGET,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too, `-` for stdout")
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(threads=THREADS)
    arguments = parser.parse_args()
    result = measure(arguments.requests, arguments.seed)
    console = open_console(arguments)
    table = Table("", *POLICIES)
    found = [result["policies"][policy] for policy in POLICIES]
    table.add_row("prompt tokens not computed", *(f"{each['tokens_saved']:.1%}" for each in found))
    table.add_row(
        "first token of later turns, p50, ms", *(f"{each['first_token_of_turns_ms']:.0f}" for each in found)
    )
    for statistic in ("p50", "p99", "mean"):
        table.add_row(
            f"scheduler, µs a step, {statistic}",
            *(f"{each['scheduler_us_per_step'][statistic]:.0f}" for each in found),
        )
    console.print(table)
    console.print(f"Same answers: {result['same_answers']} of {result['answers']}")
    write_json(arguments, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
