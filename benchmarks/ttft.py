"""Claim: a prompt whose KV is in the pool gets its first token many times faster than a computed one.

For each prompt length, in turns: a new prompt (recompute), the same prompt after the engine has forgotten
it so that only the pool has it (load), and a bare memcpy of as many bytes between memory that no cache
holds. Medians over many prompts; one request at a time, so that nothing hides a load. The time of a loaded
prompt consists of: asking, and planning the load (ask, plan); the load job, from its start until a worker
knows that it is over (job), and reporting that (end); the pass over the last token, which is always
computed (token); and the rest of the engine's two steps. A pass in float64 first shows that computed and
loaded KV give the same tokens.

`--disk` measures a restart instead: an engine computes prompts and ends, another opens the same folder and
answers them from its disk tier, whether that is faster or not. Bare reads of as many bytes are measured
beside it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from _common import Seconds, Stopwatch, make_model, make_parser, open_console, random_prompt, write_json
from rich.console import Console
from rich.table import Table

from kvtier.config import KVTierConfig
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.errors import IntegrityError

LENGTHS = (256, 1024, 2048)
ANSWER = 4
MIN_ROUNDS = 5
COLD_BYTES = 128 << 20
"""The memory that memcpy cycles through: more than caches hold."""
PARTS: dict[str, tuple[str, ...]] = {
    "ask": ("get_num_new_matched_tokens",),
    "plan": ("update_state_after_alloc", "build_connector_meta"),
    "job": ("start_load_kv", "wait_for_transfers"),
    "end": ("take_output", "update_connector_output"),
    "token": ("forward",),
}


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time of one first token, and of the calls in it."""

    seconds: float
    calls: Seconds
    tokens: list[int]
    from_tier: int


class Round(NamedTuple):
    """One prompt, both ways, and a copy of as many bytes."""

    computed: FirstToken
    loaded: FirstToken
    memcpy: float


class Restart(NamedTuple):
    """One prompt, computed by one engine and answered by the next, and a read of as many bytes."""

    computed: FirstToken
    from_disk: FirstToken
    read: float


def first_token(engine: Engine, stopwatch: Stopwatch, prompt: list[int], tier: str = "cpu") -> FirstToken:
    """Run a prompt; the engine has nothing else to do, before and after."""
    stopwatch.take()
    engine.add_request(prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True))
    while not (outputs := engine.step()):
        pass
    calls = stopwatch.take()
    while not outputs[0].finished:
        outputs = engine.step()
    engine.drain()
    engine.take_events()
    (output,) = outputs
    assert output.source is not None
    assert output.ttft is not None
    return FirstToken(output.ttft, calls, output.token_ids, output.source.tiers.get(tier, 0))


def compute_and_load(
    engine: Engine, stopwatch: Stopwatch, prompt: list[int]
) -> tuple[FirstToken, FirstToken]:
    """Compute a prompt, let the engine forget it, and load it."""
    computed = first_token(engine, stopwatch, prompt)
    engine.reset_prefix_cache()
    loaded = first_token(engine, stopwatch, prompt)
    expected, got = (0, len(prompt) - 1), (computed.from_tier, loaded.from_tier)
    if got != expected:
        raise IntegrityError(f"expected {expected} tokens from the pool, got {got}")
    return computed, loaded


def memcpy_seconds(memory: npt.NDArray[np.uint8], size: int) -> Iterator[float]:
    """Yield the time of a bare copy of `size` bytes, each time between other parts of the memory."""
    source, target = memory
    while True:
        for offset in range(0, COLD_BYTES - size + 1, size):
            start = time.perf_counter()
            target[offset : offset + size] = source[offset : offset + size]
            yield time.perf_counter() - start


def make_engine(compute_dtype: str, lengths: Sequence[int], stopwatch: Stopwatch) -> Engine:
    """Return an engine for one prompt, with a pool for several, and a stopwatch on all its calls."""
    config = EngineConfig(
        num_blocks=2 + (max(lengths) + ANSWER) // 16, compute_dtype=compute_dtype, kv_events=True
    )
    model = make_model(config)
    stopwatch.watch(model, ["forward"])
    engine = Engine(model, config, KVTierConfig.from_dict({"cpu": {"capacity": "64MiB"}}))
    stopwatch.watch_connector(engine)
    return engine


def check_tokens(lengths: Sequence[int]) -> None:
    """Compare tokens in float64, where they do not depend on how a prompt is cut into steps."""
    stopwatch = Stopwatch()
    with make_engine("float64", lengths, stopwatch) as engine:
        for length in lengths:
            computed, loaded = compute_and_load(
                engine, stopwatch, random_prompt(random.Random(length), length)
            )
            if computed.tokens != loaded.tokens:
                raise IntegrityError(
                    f"{length} tokens: computed KV gives {computed.tokens}, loaded {loaded.tokens}"
                )


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all lengths repeatedly, for a while; return the numbers of each."""
    stopwatch, source = Stopwatch(), random.Random(0)
    with make_engine("float32", arguments.lengths, stopwatch) as engine:
        compute_and_load(engine, stopwatch, random_prompt(source, min(arguments.lengths)))
        memory = np.ones((2, COLD_BYTES), np.uint8)
        copies = {
            length: memcpy_seconds(memory, length * token_bytes(engine)) for length in arguments.lengths
        }
        rounds: dict[int, list[Round]] = {length: [] for length in arguments.lengths}
        until = time.perf_counter() + arguments.seconds
        while time.perf_counter() < until or len(rounds[arguments.lengths[0]]) < MIN_ROUNDS:
            for length in arguments.lengths:
                tokens = compute_and_load(engine, stopwatch, random_prompt(source, length))
                rounds[length].append(Round(*tokens, next(copies[length])))
        return [
            summarize(length, length * token_bytes(engine), rounds[length]) for length in arguments.lengths
        ]


def measure_restarts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Repeatedly compute prompts, end the engine, and let the next one answer them from disk."""
    lengths, source, stopwatch = arguments.lengths, random.Random(0), Stopwatch()
    config = EngineConfig(num_blocks=2 + (max(lengths) + ANSWER) // 16, kv_events=True)
    model = make_model(config)
    rounds: dict[int, list[Restart]] = {length: [] for length in lengths}
    until = time.perf_counter() + arguments.seconds
    with TemporaryDirectory(dir=arguments.disk) as folder:
        disk = {"path": folder, "capacity": "256MiB", "write_limit": 0, "required": True}
        settings = {"cpu": {"capacity": "64MiB"}, "load_if_faster": False, "tiers": [{"disk": disk}]}
        while time.perf_counter() < until or len(rounds[lengths[0]]) < MIN_ROUNDS:
            prompts = {length: random_prompt(source, length) for length in lengths}
            with Engine(model, config, KVTierConfig.from_dict(settings), weights_id="bench") as engine:
                computed = {length: first_token(engine, stopwatch, prompts[length]) for length in lengths}
                size = token_bytes(engine)
            with Engine(model, config, KVTierConfig.from_dict(settings), weights_id="bench") as engine:
                loaded = {
                    length: first_token(engine, stopwatch, prompt, "disk")
                    for length, prompt in prompts.items()
                }
            reads = read_seconds(next(Path(folder).rglob("slots")), [length * size for length in lengths])
            for length, read in zip(lengths, reads, strict=True):
                if (found := loaded[length].from_tier) != length - 1:
                    raise IntegrityError(f"expected {length - 1} tokens from disk, got {found}")
                rounds[length].append(Restart(computed[length], loaded[length], read))
    return [summarize_restarts(length, length * size, rounds[length]) for length in lengths]


def read_seconds(path: Path, sizes: Sequence[int]) -> list[float]:
    """Time direct reads of these sizes, by four threads in pieces of 1 MiB."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    piece = 1 << 20
    buffers = [mmap.mmap(-1, piece) for _ in range(4)]

    def read_part(part: int, size: int) -> None:
        for at in range(part * piece, size, len(buffers) * piece):
            os.preadv(descriptor, [buffers[part]], at)

    seconds = []
    try:
        with ThreadPoolExecutor(len(buffers)) as threads:
            for size in sizes:
                start = time.perf_counter()
                list(threads.map(partial(read_part, size=size), range(len(buffers))))
                seconds.append(time.perf_counter() - start)
    finally:
        os.close(descriptor)
    return seconds


def summarize_restarts(length: int, size: int, rounds: list[Restart]) -> dict[str, Any]:
    """Return medians in milliseconds, and their ratios."""
    computed = median(turn.computed.seconds for turn in rounds) * 1e3
    from_disk = median(turn.from_disk.seconds for turn in rounds) * 1e3
    read = median(turn.read for turn in rounds) * 1e3
    return {
        "prompt_tokens": length,
        "bytes": size,
        "rounds": len(rounds),
        "recompute_ms": computed,
        "disk_ms": from_disk,
        "read_ms": read,
        "speedup": computed / from_disk,
        "disk_over_read": from_disk / read,
    }


def show_restarts(console: Console, results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the numbers."""
    console.print(f"Time to first token in ms after a restart; float32, torch threads: {arguments.threads}")
    table = Table("prompt", "KV MiB", "recompute", "from disk", "speedup", "bare read", "from disk / read")
    for result in results:
        times = (f"{result[f'{way}_ms']:.2f}" for way in ("recompute", "disk"))
        ratios = f"{result['speedup']:.1f}", f"{result['read_ms']:.2f}", f"{result['disk_over_read']:.1f}"
        table.add_row(str(result["prompt_tokens"]), f"{result['bytes'] / 2**20:.0f}", *times, *ratios)
    console.print(table)


def token_bytes(engine: Engine) -> int:
    """Return the bytes of one token's KV."""
    cache = sum(tensor.nbytes for tensor in engine.kv_caches.values())
    return cache // (engine.config.num_blocks * engine.config.block_size)


def summarize(length: int, size: int, rounds: list[Round]) -> dict[str, Any]:
    """Return medians in milliseconds, and their ratios."""
    recompute, load = (
        median(getattr(round_, way).seconds for round_ in rounds) * 1e3 for way in ("computed", "loaded")
    )
    memcpy = median(round_.memcpy for round_ in rounds) * 1e3
    divided = [divide(round_.loaded) for round_ in rounds]
    parts = {part: median(seconds[part] for seconds in divided) * 1e3 for part in divided[0]}
    return {
        "prompt_tokens": length,
        "bytes": size,
        "rounds": len(rounds),
        "recompute_ms": recompute,
        "load_ms": load,
        "memcpy_ms": memcpy,
        "speedup": recompute / load,
        "load_over_memcpy": load / memcpy,
        "job_over_memcpy": parts["job"] / memcpy,
        "memcpy_gbps": size / memcpy / 1e6,
        "job_gbps": size / parts["job"] / 1e6,
        "parts_ms": parts,
    }


def divide(token: FirstToken) -> dict[str, float]:
    """Return the parts of a first token's time."""
    parts = {part: sum(token.calls[name] for name in names) for part, names in PARTS.items()}
    return parts | {"rest": token.seconds - sum(parts.values())}


def show(console: Console, results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the numbers."""
    console.print(f"Time to first token in ms, medians; float32, torch threads: {arguments.threads}")
    table = Table("prompt", "KV MiB", "recompute", "load", "speedup", "memcpy", "load / memcpy")
    for result in results:
        times = (f"{result[f'{way}_ms']:.2f}" for way in ("recompute", "load"))
        ratios = (
            f"{result['speedup']:.1f}",
            f"{result['memcpy_ms']:.2f}",
            f"{result['load_over_memcpy']:.1f}",
        )
        table.add_row(str(result["prompt_tokens"]), f"{result['bytes'] / 2**20:.0f}", *times, *ratios)
    console.print(table)
    console.print("Where the time of a loaded prompt goes; and the job beside the memcpy, in GB/s")
    table = Table("prompt", *results[0]["parts_ms"], "job", "memcpy", "ratio")
    for result in results:
        rates = (f"{result[f'{way}_gbps']:.1f}" for way in ("job", "memcpy"))
        parts = (f"{ms:.2f}" for ms in result["parts_ms"].values())
        table.add_row(str(result["prompt_tokens"]), *parts, *rates, f"{1 / result['job_over_memcpy']:.2f}")
    console.print(table)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="of prompts, in tokens: whole blocks of 16"
    )
    parser.add_argument("--seconds", type=float, default=45, help="how long to go on repeating")
    parser.add_argument(
        "--disk", metavar="FOLDER", help="from disk after a restart, in a folder on the disk to be measured"
    )
    arguments = parser.parse_args()
    if any(length < 16 or length % 16 for length in arguments.lengths):
        parser.error(
            f"--lengths: expected multiples of 16, which can be cached whole, got {arguments.lengths}"
        )
    torch.set_num_threads(arguments.threads)
    if arguments.disk is not None:
        restarts = measure_restarts(arguments)
        show_restarts(open_console(arguments), restarts, arguments)
        write_json(arguments, {"restarts": restarts})
        return 0
    check_tokens(arguments.lengths)
    results = measure(arguments)
    show(open_console(arguments), results, arguments)
    write_json(arguments, {"same_tokens": True, "lengths": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
