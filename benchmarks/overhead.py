"""Claim: with nothing to reuse, an engine with kvtier is at least 0.97 times as fast as one without.

The worst case for kvtier: all prompts differ, so that every block is hashed, looked up without success,
stored, and evicted again by the next ones. Two engines share one model and run the same requests in turns,
off on, on off, …, for as long as `--seconds` allows. A run ends with its last store. Each pair of
neighbouring runs gives a ratio; the median of many short pairs is stable even on a machine that does other
things, and its 95 % interval says how well. The CPU time of the process, over all its threads, shows the
same without disturbance from neighbours. `--control` leaves kvtier out of both engines, and so measures the
measurement. `--disk` puts a disk tier below the pool, to which every block is then written as well; `--tier
valkey`, `object` or `mooncake` a server on this machine, which is also asked about every prompt.

`--waiting 10000` measures another thing: the longest step of the scheduler's side when that many requests
wait. An engine that has room for a few asks about all of them in every step. All come in one step, half of
their prompts are in the tier, and in the end those that still wait are cancelled in one step. The time is
the CPU time of the engine's thread in kvtier, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _common import (
    SCHEDULER_CALLS,
    WORKER_CALLS,
    Seconds,
    Stopwatch,
    make_model,
    make_parser,
    open_console,
    random_prompt,
    spread,
    write_json,
)
from rich.console import Console
from rich.table import Table
from shared_tiers import SECTIONS

from kvtier.config import CPUConfig, GroupConfig, KVTierConfig, OffloadingConfig
from kvtier.connector import KVConnectorOutput, OffloadingConnectorScheduler, StepView
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.errors import IntegrityError
from kvtier.events.tracker import Description
from kvtier.keys import make_offload_key
from kvtier.offload import CPUOffloadingManager, CPUOffloadingSpec, ReqContext
from kvtier.offload.tiered import TieredOffloadingManager

TARGET = 0.97
LENGTHS = (256, 512, 320, 448)
"""Lengths of the prompts of a run. The same in every run, so that every run has the same steps."""
ANSWER = 32
NUM_TOKENS = sum(LENGTHS) + len(LENGTHS) * ANSWER
POOL = "8MiB"
"""Room for 1,024 tokens, fewer than a run has: every run evicts."""
SIDES = {"scheduler's side": SCHEDULER_CALLS, "worker's side": WORKER_CALLS}
DISK = "64MiB"
"""A few runs fill it: from then on every written row evicts another there, too."""
SERVERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "valkey": lambda url: {"url": url},
    "object": lambda url: {"url": "s3://bench/overhead", "endpoint": url, "allow_http": True},
    "mooncake": lambda url: dict(zip(("master", "metadata"), url.split(), strict=True)),
}
"""The settings of a tier on a server started here."""
MIN_PAIRS = 5
WAITING_CHUNKS, WAITING_STORED, WAITING_STEPS, ADMITTED = 32, 512, 200, 64
"""With `--waiting`: chunks of a prompt, prompts in the tier, steps before all are cancelled, and requests
that the engine has room for in a step.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """The times of one run of one engine, in seconds."""

    wall: float
    cpu: float
    own_cpu: float
    """The part of the engine's thread, which calls the connector; the rest are copying threads.
    """
    steps: int
    calls: Seconds
    tokens: list[list[int]]


def run(engine: Engine, stopwatch: Stopwatch, seed: int) -> Run:
    """Run prompts that are new to the engine, and wait for the last store."""
    source = random.Random(seed)
    prompts = [random_prompt(source, length) for length in LENGTHS]
    steps = 0
    tokens: dict[str, list[int]] = {}
    gc.collect()
    stopwatch.take()
    wall, cpu, own_cpu = time.perf_counter(), time.process_time(), time.thread_time()
    ids = [
        engine.add_request(prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True)) for prompt in prompts
    ]
    while engine.has_unfinished():
        tokens |= {output.request_id: output.token_ids for output in engine.step()}
        engine.take_events()
        steps += 1
    engine.drain()
    engine.take_events()
    return Run(
        time.perf_counter() - wall,
        time.process_time() - cpu,
        time.thread_time() - own_cpu,
        steps,
        stopwatch.take(),
        [tokens[request_id] for request_id in ids],
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both engines in turns and return the numbers."""
    config = EngineConfig(
        num_blocks=160, max_num_seqs=len(LENGTHS), compute_dtype=arguments.compute_dtype, kv_events=True
    )
    model, stopwatch = make_model(config), Stopwatch()
    with ExitStack() as stack:
        settings = make_settings(arguments, stack)
        off = stack.enter_context(Engine(model, config))
        on = stack.enter_context(Engine(model, config, settings, weights_id="bench"))
        stopwatch.watch_connector(on)
        pairs = run_pairs(off, on, stopwatch, arguments)
        on.check()
        return compare(pairs) | ({} if arguments.control else account(pairs, on, arguments.threads))


def make_settings(arguments: argparse.Namespace, stack: ExitStack) -> KVTierConfig | None:
    """Return kvtier's settings: a pool, and the requested tiers; `None` without kvtier."""
    if arguments.control:
        return None
    tiers: list[dict[str, Any]] = []
    if arguments.disk is not None:
        folder = stack.enter_context(TemporaryDirectory(dir=arguments.disk))
        tiers.append({"disk": {"path": folder, "capacity": DISK, "write_limit": 0, "required": True}})
    if arguments.tier is not None:
        url = stack.enter_context(SECTIONS[arguments.tier].serve())
        tiers.append({arguments.tier: SERVERS[arguments.tier](url) | {"required": True}})
    return KVTierConfig.from_dict({"cpu": {"capacity": POOL}, "tiers": tiers})


def run_pairs(
    off: Engine, on: Engine, stopwatch: Stopwatch, arguments: argparse.Namespace
) -> list[tuple[Run, Run]]:
    """Run off and on in turns. The first pair warms up and does not count."""
    pairs: list[tuple[Run, Run]] = []
    until = time.perf_counter() + arguments.seconds
    while len(pairs) <= MIN_PAIRS or time.perf_counter() < until:
        seed, on_first = len(pairs), len(pairs) % 2
        first, second = (run(engine, stopwatch, seed) for engine in ((on, off) if on_first else (off, on)))
        pairs.append((second, first) if on_first else (first, second))
        if arguments.compute_dtype == "float64" and first.tokens != second.tokens:
            raise IntegrityError(f"run {seed}: the tokens with kvtier are not those without")
    return pairs[1:]


def compare(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Return the speed of both engines, and the ratios of the pairs."""
    wall, cpu = (
        spread([off.wall / on.wall for off, on in pairs]),
        spread([off.cpu / on.cpu for off, on in pairs]),
    )
    result = {"target": TARGET, "ratio": wall["median"], "wall_ratio": wall, "cpu_ratio": cpu}
    result |= {"pairs": len(pairs), "tokens_per_run": NUM_TOKENS, "steps_per_run": pairs[0][1].steps}
    for name, runs in zip(("off", "on"), zip(*pairs, strict=True), strict=True):
        result[name] = {
            "tokens_per_second": NUM_TOKENS / median(run.wall for run in runs),
            "tokens_per_cpu_second": NUM_TOKENS / median(run.cpu for run in runs),
        }
    return result


def account(pairs: list[tuple[Run, Run]], engine: Engine, threads: int) -> dict[str, Any]:
    """Return kvtier's part of a step: the time of its calls, and how much was stored."""
    runs = [on for _, on in pairs]

    def per_step(*names: str) -> float:
        return median(sum(run.calls[name] for name in names) / run.steps for run in runs) * 1e6

    spent = {side: per_step(*names) for side, names in SIDES.items()}
    if threads == 1:  # with more threads, their spinning hides the time of copying
        spent["copy threads"] = median((run.cpu - run.own_cpu) / run.steps for run in runs) * 1e6
    assert engine.connector is not None
    scheduler = engine.connector.connector_scheduler
    assert scheduler is not None
    manager = scheduler.manager
    assert isinstance(manager, CPUOffloadingManager | TieredOffloadingManager)
    num_runs = len(pairs) + 1
    tiers = manager.tier_stats() if isinstance(manager, TieredOffloadingManager) else []
    return {
        "demoted_bytes_per_run": sum(tier.demoted_bytes for tier in tiers) / num_runs,
        "questions_per_run": sum(tier.questions for tier in tiers) / num_runs,
        "step_us": median(run.wall / run.steps for run in runs) * 1e6,
        "us_per_step": spent,
        "call_us_per_step": {name: per_step(name) for names in SIDES.values() for name in names},
        "stored_bytes_per_run": scheduler.stats.store_bytes // num_runs,
        "stores_per_run": scheduler.stats.stores / num_runs,
        "stores_failed": scheduler.stats.stores_failed,
        "evicted_chunks_per_run": manager.stats().evicted / num_runs,
    }


def show(console: Console, result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the numbers."""
    console.print(
        f"{result['pairs']} pairs of runs of {len(LENGTHS)} requests, {result['tokens_per_run']} tokens and "
        f"{result['steps_per_run']} steps; {arguments.compute_dtype}, torch threads: {arguments.threads}"
    )
    table = Table("", "off", "on", "on / off", "95 % interval", "quartiles")
    for name, rate, ratio in (
        ("tokens/s", "tokens_per_second", result["wall_ratio"]),
        ("tokens/CPU s", "tokens_per_cpu_second", result["cpu_ratio"]),
    ):
        ranges = (
            f"{ratio[low]:.3f} – {ratio[high]:.3f}"
            for low, high in (("low", "high"), ("quartile_1", "quartile_3"))
        )
        rates = (f"{result[run][rate]:.0f}" for run in ("off", "on"))
        table.add_row(name, *rates, f"{ratio['median']:.3f}", *ranges)
    console.print(table)
    if arguments.control:
        console.print("Both without kvtier: what differs from 1 is the error of this benchmark")
        return
    spent = (
        f"{who} {us:.0f} µs ({us / result['step_us']:.2%})" for who, us in result["us_per_step"].items()
    )
    console.print(f"Of a step's {result['step_us']:.0f} µs: {', '.join(spent)}")
    stored, evicted = result["stored_bytes_per_run"] / 2**20, result["evicted_chunks_per_run"]
    console.print(
        f"A run stores {stored:.1f} MiB in {result['stores_per_run']:.0f} jobs and evicts "
        f"{evicted:.0f} chunks"
    )
    if arguments.disk is not None or arguments.tier is not None:
        written, asked = result["demoted_bytes_per_run"] / 2**20, result["questions_per_run"]
        console.print(f"and writes {written:.1f} MiB to the tiers below, which are asked {asked:.0f} times")
    console.print(f"With kvtier: {result['ratio']:.3f} of the speed without; the claim is {TARGET:g}")


@dataclass
class WaitingRequest:
    """A request that waits; its hashes are random."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int = WAITING_CHUNKS * 16 + 1
    num_prompt_tokens: int = WAITING_CHUNKS * 16 + 1
    kv_transfer_params: Any = None


def measure_waiting(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let requests wait, and return the longest and the median step, in milliseconds by call."""
    with ExitStack() as stack:
        config = OffloadingConfig(
            settings=replace(
                make_settings(arguments, stack) or KVTierConfig(), cpu=CPUConfig(capacity=256 << 20)
            ),
            groups=(GroupConfig(block_size=16, bytes_per_block=4096, layer_names=("layer",)),),
            hash_block_size=16,
            engine_id="waiting",
            enable_kv_cache_events=True,
            namespace="bench",
        )
        scheduler = OffloadingConnectorScheduler(
            CPUOffloadingSpec(config), describe=lambda request, start, stop, size: Description([0] * size)
        )
        stack.callback(scheduler.shutdown)
        source = random.Random(0)
        prompts = [[source.randbytes(32) for _ in range(WAITING_CHUNKS)] for _ in range(arguments.waiting)]
        waiting = [
            WaitingRequest(
                f"request-{number}", prompts[number // 2 % WAITING_STORED if number % 2 else number]
            )
            for number in range(arguments.waiting)
        ]
        if isinstance(scheduler.manager, TieredOffloadingManager):
            store_in_tiers(scheduler.manager, prompts[:WAITING_STORED])
        steps: list[Seconds] = []
        gc.disable()
        while waiting:
            step, waiting = take_step(scheduler, waiting, cancel=len(steps) == WAITING_STEPS)
            steps.append(step)
        gc.enable()
        scheduler.check()
    steps.sort(key=lambda step: sum(step.values()))
    named = {"worst": steps[-1], "median": steps[len(steps) // 2]}
    times = {name: {call: seconds * 1e3 for call, seconds in step.items()} for name, step in named.items()}
    return {"waiting": arguments.waiting, "steps": len(steps), "milliseconds": times}


def take_step(
    scheduler: OffloadingConnectorScheduler, waiting: list[WaitingRequest], *, cancel: bool
) -> tuple[Seconds, list[WaitingRequest]]:
    """Ask about all waiting requests; return the CPU seconds of each part, and those that wait on."""
    at = [time.thread_time()]
    left, admitted = list[WaitingRequest](), 0
    for request in waiting:
        if admitted < ADMITTED and scheduler.get_num_new_matched_tokens(request, 0)[0] is not None:
            scheduler.request_finished(request)
            admitted += 1
        else:
            left.append(request)
    at.append(time.thread_time())
    scheduler.build_connector_meta(StepView())
    at.append(time.thread_time())
    time.sleep(0.005)
    scheduler.update_connector_output(KVConnectorOutput())
    at.append(time.thread_time())
    scheduler.take_events()
    at.append(time.thread_time())
    if cancel:
        for request in left:
            scheduler.request_finished(request)
        left = []
    at.append(time.thread_time())
    names = ("asks", "orders", "output", "events", "cancellations")
    return {name: end - start for name, start, end in zip(names, at, at[1:], strict=False)}, left


def store_in_tiers(manager: TieredOffloadingManager, prompts: list[list[bytes]]) -> None:
    """Put prompts into the tiers, and empty the pool."""
    for number, prompt in enumerate(prompts):
        keys = [make_offload_key(block_hash, 0) for block_hash in prompt]
        output = manager.prepare_store(keys, ReqContext(req_id=f"stored-{number}"))
        assert output is not None
        manager.complete_store(output.keys_to_store, True, output.store_spec)
        manager.end_step()
    while manager.has_pending_work():
        manager.end_step()
        time.sleep(0.001)
    manager.pool.reset_cache()
    while manager.take_events():
        pass


def show_waiting(console: Console, result: dict[str, Any]) -> None:
    """Print the numbers of `--waiting`."""
    for name, calls in result["milliseconds"].items():
        parts = ", ".join(f"{call} {ms:.1f}" for call, ms in calls.items() if ms >= 0.05)
        console.print(f"{result['waiting']} wait: the {name} step {sum(calls.values()):.1f} ms ({parts})")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--compute-dtype", choices=("float32", "float64"), default="float32", help="float64: compare tokens"
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on making pairs")
    parser.add_argument("--disk", metavar="FOLDER", help="with a disk tier, in a folder on that disk")
    parser.add_argument(
        "--tier", choices=tuple(SERVERS), help="with a tier on a server that is started here"
    )
    parser.add_argument(
        "--control", action="store_true", help="measure an engine without kvtier against itself"
    )
    parser.add_argument(
        "--waiting", type=int, metavar="REQUESTS", help="measure the longest step when so many wait, instead"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.waiting:
        result = measure_waiting(arguments)
        show_waiting(open_console(arguments), result)
        write_json(arguments, result)
        return 0
    result = measure(arguments)
    show(open_console(arguments), result, arguments)
    write_json(arguments, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
