"""Claim: evicted turns of a chat get their first token several times faster with kvtier, at no other cost.

Engines of vLLM's CPU build live in one process and run in turns, so that disturbances affect both.

Chats: several conversations go on at once, each turn sends everything said so far, and vLLM's cache holds a
third of them. The figures are the time to the first token, the prompt tokens computed, and the tokens
served per second, by vLLM alone (off) and with kvtier (on), whose tokens are compared.

Nothing to reuse: prompts that all differ, so that kvtier looks up without success, stores, and evicts
again. Each pair of neighbouring runs of off and on gives a ratio; the median of many is stable on a machine
that does other things too.

Scheduler: the time of vLLM's scheduler in the hooks of its connector, for each step that computes, with
kvtier and with vLLM's own offloading connector and manager. A plain copy replaces the worker of the latter,
since vLLM's needs a GPU. Prompts are long and the model has one layer, because only the number of blocks
matters here. Needs an environment with vLLM 0.32 and kvtier (`make bench` builds one).
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

# First: it sets variables that torch reads when it is imported.
from _vllm import (
    BLOCK,
    THREADS,
    Answer,
    VllmEngine,
    save_model,
)

# isort: split

from _common import open_console, random_prompt, spread, write_json
from rich.console import Console
from rich.table import Table

from kvtier.config import parse_size

TARGET = 0.97
MIN_ROUNDS = 3


class Chats(NamedTuple):
    """Conversations: their number, turns of each, tokens of the first message, later ones, an answer."""

    chats: int
    turns: int
    first: int
    more: int
    answer: int
    at_once: int
    """Requests in flight."""


CHATS = Chats(chats=8, turns=5, first=512, more=64, answer=16, at_once=2)
UNIQUE, UNIQUE_ANSWER = (256, 512, 320, 448), 32
"""Prompts of a run with nothing to reuse, and the tokens generated for each."""
LONG_CHATS = Chats(chats=6, turns=3, first=4096, more=1024, answer=32, at_once=4)
OPTIONS = {
    "max_model_len": 1024,
    "max_num_seqs": len(UNIQUE),
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 72,
    "kv_cache_memory_bytes": 64 << 20,
}
"""72 blocks are 2,304 tokens: a third of all chats' tokens at the end, and enough for unique prompts."""
LONG_OPTIONS = OPTIONS | {
    "max_model_len": 8192,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 900,
}
ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
ONE_LAYER |= {"num_key_value_heads": 2}
POOL = "96MiB"
"""Room for 12,288 tokens: two rounds of all chats; with one layer, five rounds of the long ones."""
KVTIER = {
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "kvtier.integrations.vllm",
    "kv_connector_extra_config": {"cpu": {"capacity": POOL}},
}
OWN = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": "_vllm_host_spec",
        "cpu_bytes_to_use": parse_size(POOL),
        "offload_prompt_only": False,  # as kvtier does
    },
}

Transfer = dict[str, Any] | None
T = TypeVar("T")


@dataclass(slots=True)
class Served:
    """One engine's answers to all chats of a round."""

    seconds: float
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    """By chat and turn."""

    @property
    def tokens_per_second(self) -> float:
        return (
            sum(answer.prompt_tokens + len(answer.tokens) for answer in self.answers.values()) / self.seconds
        )


def serve_chats(engine: VllmEngine, kind: Chats, seed: int) -> Served:
    """Hold conversations, turn by turn, with a few requests in flight at any time."""
    source = random.Random(seed)
    lengths = [kind.first, *[kind.more] * (kind.turns - 1)]
    messages = [[random_prompt(source, length) for length in lengths] for _ in range(kind.chats)]
    said: list[list[int]] = [[] for _ in messages]
    waiting = [(chat, turn) for turn in range(kind.turns) for chat in range(kind.chats)]
    running: dict[str, tuple[int, int]] = {}
    gc.collect()
    served, start = Served(0.0), time.perf_counter()
    while waiting or running:
        while waiting and len(running) < kind.at_once:
            chat, turn = waiting.pop(0)
            said[chat] += messages[chat][turn]
            running[engine.submit(said[chat], kind.answer)] = chat, turn
        for request_id, answer in engine.step().items():
            chat, turn = running.pop(request_id)
            said[chat] += answer.tokens
            served.answers[chat, turn] = answer
    served.seconds = time.perf_counter() - start
    engine.drain()
    return served


def serve_unique(engine: VllmEngine, seed: int) -> tuple[float, float]:
    """Return the seconds that new prompts take until their last store is over: wall time and CPU time."""
    source = random.Random(f"unique {seed}")
    prompts = [random_prompt(source, length) for length in UNIQUE]
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    left = {engine.submit(prompt, UNIQUE_ANSWER) for prompt in prompts}
    while left:
        left -= engine.step().keys()
    engine.drain()
    return time.perf_counter() - start, time.process_time() - cpu


def measure_chats(off: VllmEngine, on: VllmEngine, seconds: float) -> dict[str, Any]:
    """Serve rounds of chats in turns, the first to warm up, and return the numbers."""
    rounds = in_turns(seconds, off, on, lambda engine, seed: serve_chats(engine, CHATS, seed))
    result = {
        "off": summarize([first for first, _ in rounds]),
        "on": summarize([second for _, second in rounds]),
    }
    pairs = [
        (first.answers[turn], second.answers[turn]) for first, second in rounds for turn in first.answers
    ]
    return result | {
        "rounds": len(rounds),
        "answers": len(pairs),
        "same_answers": sum(first.tokens == second.tokens for first, second in pairs),
        "ttft_speedup": result["off"]["later_ttft_ms"]["p50"] / result["on"]["later_ttft_ms"]["p50"],
        "throughput_ratio": spread(
            [second.tokens_per_second / first.tokens_per_second for first, second in rounds]
        ),
    }


def in_turns(
    seconds: float, off: VllmEngine, on: VllmEngine, serve: Callable[[VllmEngine, int], T]
) -> list[tuple[T, T]]:
    """Have both engines serve the same in turns, off on, on off, …, for a while. The first pair warms up."""
    pairs: list[tuple[T, T]] = []
    until = time.perf_counter() + seconds
    while len(pairs) <= MIN_ROUNDS or time.perf_counter() < until:
        seed, on_first = len(pairs), len(pairs) % 2
        first, second = (serve(engine, seed) for engine in ((on, off) if on_first else (off, on)))
        pairs.append((second, first) if on_first else (first, second))
    return pairs[1:]


def summarize(rounds: list[Served]) -> dict[str, Any]:
    """Return the figures that a user sees of one engine."""
    answers = [(turn, answer) for served in rounds for (_, turn), answer in served.answers.items()]
    return {
        "ttft_ms": quantiles([answer.ttft for _, answer in answers], 1e3),
        "later_ttft_ms": quantiles([answer.ttft for turn, answer in answers if turn], 1e3),
        "prompt_tokens": sum(answer.prompt_tokens for _, answer in answers),
        "prompt_tokens_computed": sum(answer.prompt_tokens - answer.cached for _, answer in answers),
        "tokens_per_second": median(served.tokens_per_second for served in rounds),
    }


def quantiles(values: Sequence[float], scale: float) -> dict[str, float]:
    """Return the median, the 99th percentile and the mean of values."""
    ordered = sorted(value * scale for value in values)
    return {"p50": median(ordered), "p99": ordered[ceil(0.99 * len(ordered)) - 1], "mean": mean(ordered)}


def measure_unique(off: VllmEngine, on: VllmEngine, seconds: float) -> dict[str, Any]:
    """Serve unique prompts in turns, and return the ratios."""
    pairs = in_turns(seconds, off, on, serve_unique)
    tokens = sum(UNIQUE) + len(UNIQUE) * UNIQUE_ANSWER
    runs = zip(("off", "on"), zip(*pairs, strict=True), strict=True)
    return {
        "target": TARGET,
        "pairs": len(pairs),
        "ratio": spread([off_wall / on_wall for (off_wall, _), (on_wall, _) in pairs]),
        "cpu_ratio": spread([off_cpu / on_cpu for (_, off_cpu), (_, on_cpu) in pairs]),
        "tokens_per_second": {name: tokens / median(wall for wall, _ in turns) for name, turns in runs},
    }


def measure_scheduler(own: VllmEngine, on: VllmEngine, seconds: float) -> dict[str, Any]:
    """Serve long chats in turns, and return the scheduler's microseconds a step in each connector."""
    spent: dict[VllmEngine, list[float]] = {own: [], on: []}
    for engine in spent:
        engine.time_scheduler()

    def serve(engine: VllmEngine, seed: int) -> None:
        serve_chats(engine, LONG_CHATS, seed)
        taken = engine.take_scheduler_seconds()
        spent[engine] += taken if seed else []

    in_turns(seconds, own, on, serve)
    blocks = LONG_CHATS.first + (LONG_CHATS.turns - 1) * (LONG_CHATS.more + LONG_CHATS.answer)
    result = {"on": quantiles(spent[on], 1e6), "own": quantiles(spent[own], 1e6)}
    return result | {"steps": len(spent[on]), "blocks_of_longest_prompt": blocks // BLOCK}


def show(console: Console, chats: dict[str, Any], unique: dict[str, Any], scheduler: dict[str, Any]) -> None:
    """Print the numbers."""
    console.print(
        f"{chats['rounds']} rounds of {CHATS.chats} chats of {CHATS.turns} turns on vLLM's CPU build, "
        "float32"
    )
    table = Table("", "vLLM alone", "with kvtier", "")
    for title, name in (("first token", "ttft_ms"), ("first token, later turns", "later_ttft_ms")):
        for quantile in ("p50", "p99"):
            off, on = (chats[engine][name][quantile] for engine in ("off", "on"))
            table.add_row(
                f"{title}, {quantile}, ms", f"{off:.1f}", f"{on:.1f}", f"{off / on:.1f} times as soon"
            )
    off, on = (chats[engine]["prompt_tokens_computed"] for engine in ("off", "on"))
    table.add_row(
        "prompt tokens computed",
        f"{off:,}",
        f"{on:,}",
        f"{on / off:.2f}, of {chats['on']['prompt_tokens']:,}",
    )
    rates = (f"{chats[engine]['tokens_per_second']:.0f}" for engine in ("off", "on"))
    table.add_row("tokens/s", *rates, describe(chats["throughput_ratio"]))
    rates = (f"{unique['tokens_per_second'][engine]:.0f}" for engine in ("off", "on"))
    table.add_row("tokens/s, nothing to reuse", *rates, describe(unique["ratio"]))
    console.print(table)
    console.print(f"Same answers: {chats['same_answers']} of {chats['answers']}")
    blocks = scheduler["blocks_of_longest_prompt"]
    console.print(
        f"vLLM's scheduler in its connector, µs a step; {scheduler['steps']} steps, "
        f"prompts up to {blocks} blocks"
    )
    table = Table("", "p50", "p99", "mean")
    for title, name in (("kvtier", "on"), ("vLLM's own connector and manager", "own")):
        table.add_row(title, *(f"{scheduler[name][statistic]:.0f}" for statistic in ("p50", "p99", "mean")))
    console.print(table)
    ratio, pairs = unique["ratio"]["median"], unique["pairs"]
    console.print(
        f"With nothing to reuse: {ratio:.3f} of vLLM alone, over {pairs} pairs; the claim is {TARGET:g}"
    )
    console.print(
        f"By CPU time, which tells the same without the neighbours: {describe(unique['cpu_ratio'])}"
    )


def describe(ratio: dict[str, float]) -> str:
    """Write a ratio with its confidence interval."""
    return f"{ratio['median']:.3f} (95 %: {ratio['low']:.3f} – {ratio['high']:.3f})"


@contextmanager
def engines(options: dict[str, Any], *transfers: Transfer, **model: Any) -> Iterator[list[VllmEngine]]:
    """Start an engine for each connector, all with one model."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        weights = save_model(Path(folder), **model)
        yield [
            stack.enter_context(closing(VllmEngine(weights, transfer, **options))) for transfer in transfers
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too, `-` for stdout")
    parser.add_argument("--seconds", type=float, default=75, help="how long to go on with each workload")
    parser.set_defaults(threads=THREADS)
    arguments = parser.parse_args()
    with engines(OPTIONS, None, KVTIER) as (off, on):
        chats = measure_chats(off, on, arguments.seconds)
        unique = measure_unique(off, on, arguments.seconds)
    with engines(LONG_OPTIONS, OWN, KVTIER, **ONE_LAYER) as (own, on):
        scheduler = measure_scheduler(own, on, arguments.seconds / 3)
    show(open_console(arguments), chats, unique, scheduler)
    write_json(arguments, {"chats": chats, "nothing_to_reuse": unique, "scheduler_us_per_step": scheduler})
    return 0


if __name__ == "__main__":
    sys.exit(main())
