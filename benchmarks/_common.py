"""Shared by the benchmarks of the whole engine: a model, prompts, a stopwatch, and the output of results.

They run `kvtier.engine` on seeded random weights: nothing is downloaded, and every repetition computes the
same shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvtier.engine import Decoder, Engine, EngineConfig, ModelConfig, random_weights
from kvtier.engine.assembly import make_decoder
from kvtier.keys import HASHED_BY
from kvtier.transfer.host import COPIED_BY

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
"""12 million parameters, 8 KiB of float32 KV a token."""
SCHEDULER_CALLS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "take_events",
)
WORKER_CALLS = (
    "bind_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "wait_for_transfers",
    "take_output",
    "clear_connector_metadata",
)

Seconds = Mapping[str, float]


class Stopwatch:
    """Adds up the seconds spent in named calls."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def watch(self, target: object, names: Iterable[str]) -> None:
        """Put a timer around methods of an object. The time of a generator's items counts as well."""
        for name in names:
            setattr(target, name, self._timed(name, getattr(target, name)))

    def watch_connector(self, engine: Engine) -> None:
        """Time all calls that an engine makes to both sides of its connector, if it has one."""
        if engine.connector is not None and engine.worker is not None:
            self.watch(engine.connector, SCHEDULER_CALLS)
            self.watch(engine.worker, WORKER_CALLS)

    def take(self) -> Seconds:
        """Take the sums since the last call; a call that was not made took no time."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **named)
            if isinstance(result, Iterator):
                result = list(result)
            self._seconds[name] += time.perf_counter() - start
            return result

        return timed


def make_model(config: EngineConfig) -> Decoder:
    """Return the model, with random weights."""
    model = ModelConfig.from_dict(MODEL)
    return make_decoder(model, random_weights(model, seed=0), config)


def random_prompt(source: random.Random, length: int) -> list[int]:
    """Return a prompt that shares no block with any other."""
    return source.choices(range(1, MODEL["vocab_size"]), k=length)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median of values, its 95 % confidence interval and the quartiles.

    The interval comes from ranks, and assumes nothing about the distribution.
    """
    ordered = sorted(values)
    low = max(0, round(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5 - 0.5))
    first, middle, third = statistics.quantiles(ordered, n=4, method="inclusive")
    return {
        "median": middle,
        "low": ordered[low],
        "high": ordered[-1 - low],
        "quartile_1": first,
        "quartile_3": third,
    }


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that the benchmarks share.

    By default one thread computes: torch's threads spin while they wait for each other, so on a machine
    that does anything else at the same time, such as copying KV, one thread per core is slower than one
    thread.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too, `-` for stdout")
    return parser


def open_console(arguments: argparse.Namespace) -> Console:
    """Return the console for tables: not stdout if the numbers go there."""
    return Console(stderr=arguments.json == "-", highlight=False, soft_wrap=True)


def write_json(arguments: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write the numbers to the requested file, with the settings they depend on."""
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "torch_threads": arguments.threads,
        "copied_by": COPIED_BY,
        "hashed_by": HASHED_BY,
    }
    text = json.dumps({**result, "machine": machine}, indent=2) + "\n"
    if arguments.json == "-":
        sys.stdout.write(text)
    elif arguments.json:
        Path(arguments.json).write_text(text)
