"""Claim: in vLLM on a GPU an evicted prompt's first token comes as soon as the bus allows.

And it comes faster than with vLLM's own connector.

    python benchmarks/vllm_gpu.py [--shape hybrid] [--json FILE] [--plot FILE.svg]

Engines of vLLM with an 8B-shaped Llama (random weights, bf16, CUDA graphs), each in its own process, take
turns on one GPU: vLLM alone (off), vLLM's own `OffloadingConnector` (own), kvtier, and kvtier without
packing (raw), all with the same host memory. A name that ends in a layout, as in kvtier-LBNHC, is an engine
with that cache layout; any other engine has the layout that it asks for itself.

With `--shape hybrid` the model has 24 gated delta nets and 8 layers of attention, and only first tokens are
measured unless `--parts` says more. vLLM then keeps states at the boundaries of blocks of hundreds of
tokens, so prompts are cut to whole blocks and one token: every engine can reuse all but that token.

First token       a new prompt; after vLLM has evicted it; once more, when vLLM has it (hit). A load without
                  overlap takes at least the time of that hit plus the prompt's bytes, packed by engines
                  that pack, at the speed of one large pinned copy, which is measured in every turn.
Chats             turns of conversations of which vLLM's cache holds a quarter: a fixed number of requests at
                  once (closed loop), and per second (open loop). Figures: requests per second, time to the
                  first token, and from one token to the next.
Nothing to reuse  prompts that all differ: a connector looks up without success, stores, and evicts again.
                  Ratios to off, turn by turn.

Needs vLLM for this machine, with kernels for experts if the shape is hybrid, and kvtier. Without a GPU,
`--small` tries the program on vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from _shapes import HYBRID_8B, LLAMA_8B, cached_bytes
from _vllm_arm import Arm, ArmPlan, Chats

from kvtier.report.plots import Log, Plot

LARGE = LLAMA_8B | {"torch_dtype": "bfloat16"}
SMALL = LARGE | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 8192,
    "torch_dtype": "float32",
}
HYBRID = HYBRID_8B | {"torch_dtype": "bfloat16"}
SMALL_HYBRID = HYBRID | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": HYBRID["layer_types"][:4],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "mlp_only_layers": [0, 1, 2],
    "num_experts": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 8192,
}


class Sizes(NamedTuple):
    """The sizes of a measurement: model, options, memory and workloads."""

    model: Mapping[str, Any]
    options: Mapping[str, Any]
    pool: int
    lengths: Sequence[int]
    chats: Chats
    rates: Sequence[float]
    unique: Sequence[int]


GPU = Sizes(
    model=LARGE,
    options={
        "dtype": "bfloat16",
        "load_format": "dummy",
        "attention_backend": "FLASH_ATTN",
        "block_size": 16,
        "max_model_len": 33024,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 6 << 30,
        "gpu_memory_utilization": 0.15,
        "enforce_eager": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32],
        },
    },
    pool=26 << 30,
    lengths=[1024, 2048, 4096, 8192, 16384, 32768],
    chats=Chats(chats=32, turns=4, first=2048, more=1280, answer=64, at_once=24),
    rates=[6, 9, 12],
    unique=[2048, 3072, 4096, 1024, 2048, 4096],
)
"""The cache holds 49,152 tokens, the chats have 196,608 at the end, and the pool holds 212,992."""
CPU = Sizes(
    model=SMALL,
    options={
        "dtype": "float32",
        "load_format": "dummy",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 48,
        "kv_cache_memory_bytes": 64 << 20,
    },
    pool=64 << 20,
    lengths=[128, 512],
    chats=Chats(chats=6, turns=2, first=256, more=64, answer=8, at_once=3),
    rates=[20],
    unique=[64, 128],
)
GPU_HYBRID = GPU._replace(
    model=HYBRID,
    options={
        **GPU.options,
        "enable_prefix_caching": True,
        # vLLM's first choice on an H100 or H200 is a package that may be missing.
        "additional_config": {"gdn_prefill_backend": "triton"},
    },
    pool=16 << 30,
    lengths=[8192, 16384, 32768],
)
"""The prompts of four turns have 7.6 GB of KV and states, all of which the pool holds."""
CPU_HYBRID = CPU._replace(
    model=SMALL_HYBRID,
    options={
        **CPU.options,
        "dtype": "bfloat16",
        "enable_prefix_caching": True,
        "block_size": 128,
        "max_model_len": 4096,
        "max_num_batched_tokens": 1152,
        "num_gpu_blocks_override": 40,
    },
    lengths=[1200, 2400],
)
SHAPES = {
    ("llama", False): GPU,
    ("llama", True): CPU,
    ("hybrid", False): GPU_HYBRID,
    ("hybrid", True): CPU_HYBRID,
}
"""The sizes by shape, and whether they are small."""
UNIQUE_ANSWER = 32
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
BARS = {
    "of_least": 1.1,
    "sooner_than_own": 1.3,
    "longest_sooner_than_own": 1.6,
    "tokens_of_own": 1.0,
    "chats_own": 1.0,
    "chats_off": 1.5,
    "chats_raw": 1.0,
    "unique": 0.98,
}
PARTS = ("unique", "first", "closed", "open")
LONG, LONGEST = 4096, 16384
"""The prompt lengths from which on the bars of the first token count."""

Result = dict[str, Any]
Results = dict[str, Any]


def plan_arm(name: str, sizes: Sizes, model: Path) -> ArmPlan:
    """Return the plan of the arm with this name."""
    kind, _, layout = name.partition("-")
    transfers: dict[str, Mapping[str, Any] | None] = {
        "off": None,
        "own": {
            "kv_connector": "OffloadingConnector",
            # Generated tokens are kept too, as in kvtier: chats send them again.
            "kv_connector_extra_config": {"cpu_bytes_to_use": sizes.pool, "offload_prompt_only": False},
        },
        "kvtier": {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.integrations.vllm",
            "kv_connector_extra_config": {"cpu": {"capacity": sizes.pool}},
        },
        "raw": {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.integrations.vllm",
            "kv_connector_extra_config": {"cpu": {"capacity": sizes.pool}, "packing": "off"},
        },
    }
    if kind not in transfers or layout not in ("", *LAYOUTS):
        raise SystemExit(f"--arms: expected {', '.join(transfers)} or one of them with -LAYOUT, got {name}")
    environment = {"VLLM_KV_CACHE_LAYOUT": layout} if layout else {}
    return ArmPlan(name, model, transfers[kind], sizes.options, environment)


def measure_first(
    arms: Sequence[Arm], sizes: Sizes, setups: Mapping[str, Result], turns: int, repetitions: int
) -> list[Result]:
    """Time first tokens, one length after the other, with the arms in turns. The first turn warms up.

    Prompts have whole blocks, and one token more.
    """
    rows = []
    block_size = max(setup["block_size"] for setup in setups.values())
    for length in [wanted // block_size * block_size for wanted in sizes.lengths]:
        size = cached_bytes(sizes.model, length)
        times: dict[str, dict[str, list[float]]] = {arm.name: {} for arm in arms}
        speeds = []
        for turn in range(-1, turns):
            for arm in in_turn(arms, turn):
                times_each = repetitions if turn >= 0 and arm is not arms[0] else 1  # off computes each time
                got = arm.ask("first_tokens", length=length, seed=turn, repetitions=times_each)
                for key, values in got.items() if turn >= 0 else ():
                    times[arm.name].setdefault(key, []).extend(values)
            speeds.append(arms[0].ask("bus", size=min(1 << 30, size), repetitions=5)["load"])
        row: Result = {
            "tokens": length,
            "bytes": size,
            "bus_bytes_per_second": statistics.median(speeds),
        }
        row["bus_ms"] = 1e3 * row["bytes"] / row["bus_bytes_per_second"]
        for name, got in times.items():
            medians = {
                f"{key}_ms": 1e3 * statistics.median(got[key]) for key in ("computed", "evicted", "hit")
            }
            row[name] = medians | {"cached": min(got["cached"]), "all": got}
            row[name]["least_ms"] = row[name]["hit_ms"] + row["bus_ms"] / setups[name]["packing"]
            row[name]["of_least"] = row[name]["evicted_ms"] / row[name]["least_ms"]
        rows.append(row)
    return rows


def in_turn(arms: Sequence[Arm], turn: int) -> list[Arm]:
    """Return the arms in the order of a turn: each turn begins with another arm."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


def measure_chats(arms: Sequence[Arm], sizes: Sizes, rounds: int, rate: float | None) -> Result:
    """Serve the same chats by all arms in turns, and return the figures that a user sees of each."""
    served: dict[str, list[Result]] = {arm.name: [] for arm in arms}
    for turn in range(rounds):
        for arm in in_turn(arms, turn):
            served[arm.name].append(arm.ask("chats", kind=sizes.chats, seed=turn, rate=rate))
    return {"rate": rate} | {name: summarize(runs) for name, runs in served.items()}


def summarize(runs: list[Result]) -> Result:
    """Return the figures that a user sees of one arm, over its rounds."""
    return {
        "requests_per_second": [run["requests"] / run["seconds"] for run in runs],
        "ttft_ms": quantiles([value for run in runs for value in run["ttft"]]),
        "later_ttft_ms": quantiles([value for run in runs for value in run["later_ttft"]]),
        "between_tokens_ms": quantiles([value for run in runs for value in run["gaps"]]),
        "prompt_tokens": sum(run["prompt_tokens"] for run in runs),
        "cached_tokens": sum(run["cached_tokens"] for run in runs),
        "counts": [run["counts"] for run in runs],
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the mean, in milliseconds."""
    ordered = sorted(1e3 * value for value in seconds) or [float("nan")]
    p99 = ordered[ceil(0.99 * len(ordered)) - 1]
    return {"p50": statistics.median(ordered), "p99": p99, "mean": statistics.mean(ordered)}


def measure_unique(arms: Sequence[Arm], sizes: Sizes, rounds: int) -> Result:
    """Serve prompts that all differ, by all arms in turns, and compare each turn with that of vLLM alone."""
    runs: dict[str, list[Result]] = {arm.name: [] for arm in arms}
    for turn in range(-2, rounds):  # the first two warm up
        for arm in in_turn(arms, turn):
            got = arm.ask("unique", lengths=list(sizes.unique), answer=UNIQUE_ANSWER, seed=turn)
            if turn >= 0:
                runs[arm.name].append(got)
    tokens = sum(sizes.unique) + len(sizes.unique) * UNIQUE_ANSWER
    result: Result = {}
    for name, own in runs.items():
        ratios = [off["served"] / on["served"] for off, on in zip(runs[arms[0].name], own, strict=True)]
        seconds = statistics.median(run["served"] for run in own)
        result[name] = {
            "tokens_per_second": tokens / seconds,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    return result


def judge(results: Results) -> Result:
    """Compare each arm with kvtier with the bars."""
    verdicts: Result = {}
    for name in [name for name in results["arms"] if name.startswith(("kvtier", "raw"))]:
        long = [row for row in results.get("first", []) if row["tokens"] >= LONG]
        sooner = {
            row["tokens"]: row["own"]["evicted_ms"] / row[name]["evicted_ms"] for row in long if "own" in row
        }
        verdicts[name] = {
            "of_least": max((row[name]["of_least"] for row in long), default=None),
            "sooner_than_own": min(sooner.values(), default=None),
            "longest_sooner_than_own": min(
                (sooner[tokens] for tokens in sooner if tokens >= LONGEST), default=None
            ),
            "tokens_of_own": min(
                (row[name]["cached"] / max(1, row["own"]["cached"]) for row in long if "own" in row),
                default=None,
            ),
        }
        closed = results.get("closed")
        for peer in ("own", "off", "raw"):
            if closed and peer in closed:
                pairs = zip(
                    closed[name]["requests_per_second"], closed[peer]["requests_per_second"], strict=True
                )
                verdicts[name][f"chats_{peer}"] = min(ours / theirs for ours, theirs in pairs)
        if "unique" in results:
            verdicts[name]["unique"] = results["unique"][name]["ratio"]
    return verdicts


COLOURS = {"computed": "#8a94a0", "own": "#e59a3c", "kvtier": "#1c6dd0", "least": "#2a9d62"}


def plot_first(results: Results, name: str) -> str:
    """Draw the first token's time by the length of the prompt."""
    rows = results["first"]
    lines = {
        "computed": [(row["tokens"], row["off"]["computed_ms"]) for row in rows],
        "own": [(row["tokens"], row["own"]["evicted_ms"]) for row in rows if "own" in row],
        "kvtier": [(row["tokens"], row[name]["evicted_ms"]) for row in rows],
        "least": [(row["tokens"], row[name]["least_ms"]) for row in rows],
    }
    labels = {
        "computed": "computed",
        "own": "vLLM's own connector",
        "kvtier": "kvtier",
        "least": "GPU hit + bus",
    }
    x, y = (
        Log.around(row["tokens"] for row in rows),
        Log.around(v for line in lines.values() for _, v in line),
    )
    axes = {"x_label": "prompt, tokens", "y_label": "first token of an evicted prompt, ms"}
    plot = Plot("first token by length of the prompt", x, y, **axes)
    plot.x_axis((row["tokens"], f"{row['tokens'] >> 10}k") for row in rows)
    plot.y_axis((value, f"{value:g}") for value in y.ticks())
    for index, (kind, points) in enumerate(lines.items()):
        if points:
            plot.line(points, kind)
            plot.text(74, 44 + 17 * index, labels[kind], f"start {kind}")
    styles = "".join(
        f".line.{kind} {{ stroke: {colour} }} text.{kind} {{ fill: {colour} }} "
        for kind, colour in COLOURS.items()
    )
    style = (
        "<style>.line { fill: none; stroke-width: 2.4 } .line.least { stroke-dasharray: 5 4 }"
        " .grid { stroke: #dfe4ea }"
        " text { font: 12px sans-serif; fill: #5b6876; text-anchor: middle } text.end { text-anchor: end }"
        f" text.start {{ text-anchor: start }} {styles}</style>"
    )
    opening, rest = plot.svg().split("\n", 1)
    return opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + f"\n{style}\n{rest}\n"


def show(results: Results) -> None:
    """Print all tables."""
    for name, setup in results["arms"].items():
        print(f"{name:14}", *(f"{key} {value}" for key, value in setup.items()), sep="  ")
    for row in results.get("first", []):
        bus = f"bus {row['bus_bytes_per_second'] / 1e9:.1f} GB/s, {row['bus_ms']:.2f} ms"
        print(
            f"\nfirst token, {row['tokens']:,} tokens ({bus})     "
            "computed  evicted      hit  of hit + bus   cached"
        )
        for name in results["arms"]:
            if name in row:
                got = row[name]
                times = f"{got['computed_ms']:9.2f} {got['evicted_ms']:8.2f} {got['hit_ms']:8.2f}"
                print(f"  {name:50} {times} {got['of_least']:12.2f} {got['cached']:8,}")
    for chats in filter(None, [results.get("closed"), *results.get("open", [])]):
        rate = "closed loop" if chats["rate"] is None else f"{chats['rate']:g} a second"
        columns = "first token p50, p99   later turns p50, p99   between p50, p99   cached tokens"
        print(f"\nchats, {rate:14} requests/s            {columns}")
        for name in results["arms"]:
            if name in chats:
                got = chats[name]
                shown = [
                    got[key][q]
                    for key in ("ttft_ms", "later_ttft_ms", "between_tokens_ms")
                    for q in ("p50", "p99")
                ]
                speeds = " ".join(f"{speed:.2f}" for speed in got["requests_per_second"])
                print(
                    f"  {name:14} {speeds:24}",
                    *(f"{value:10.1f}" for value in shown),
                    f"{got['cached_tokens']:11,}",
                )
    if "unique" in results:
        print("\nnothing to reuse     tokens/s   of off")
        for name, got in results["unique"].items():
            print(f"  {name:14} {got['tokens_per_second']:12,.0f} {got['ratio']:8.3f}")
    print()
    for name, got in results["verdicts"].items():
        print(
            name, *(f"{key} {value:.3f} (bar {BARS[key]})" for key, value in got.items() if value), sep="  "
        )


def main() -> None:
    """Measure, print, and write the requested files. Results are written after each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["llama", "hybrid"], default="llama")
    parser.add_argument("--arms", nargs="+", help="off comes first")
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of the prompts of first tokens")
    parser.add_argument(
        "--turns", type=int, default=3, help="of first tokens, each with a prompt of its own"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="of first tokens in a turn")
    parser.add_argument("--rounds", type=int, default=3, help="of chats in a closed loop")
    parser.add_argument("--rates", type=float, nargs="+", help="requests a second of chats in an open loop")
    parser.add_argument("--open-rounds", type=int, default=1, help="of chats at each rate")
    parser.add_argument("--unique-rounds", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    sizes = SHAPES[options.shape, options.small]
    sizes = sizes._replace(
        rates=sizes.rates if options.rates is None else options.rates,
        lengths=sizes.lengths if options.lengths is None else options.lengths,
    )
    hybrid = options.shape == "hybrid"
    options.arms = options.arms or ["off", "own", "kvtier", *([] if hybrid else ["kvtier-LBNHC"])]
    options.parts = options.parts or (["first"] if hybrid else PARTS)
    if options.arms[0] != "off":
        raise SystemExit("--arms: expected off first, which the others are compared with")
    results: Results = {"arms": {}}
    with ExitStack() as stack:
        model = Path(stack.enter_context(TemporaryDirectory()))
        (model / "config.json").write_text(json.dumps(dict(sizes.model)))
        arms = [stack.enter_context(closing(Arm(plan_arm(name, sizes, model)))) for name in options.arms]
        results["arms"] = {arm.name: arm.wait_ready() for arm in arms}
        setups = results["arms"]
        parts: dict[str, Callable[[], Any]] = {
            "unique": lambda: measure_unique(arms, sizes, options.unique_rounds),
            "first": lambda: measure_first(arms, sizes, setups, options.turns, options.repetitions),
            "closed": lambda: measure_chats(arms, sizes, options.rounds, None),
            "open": lambda: [measure_chats(arms, sizes, options.open_rounds, rate) for rate in sizes.rates],
        }
        for part in options.parts:
            begin = time.perf_counter()
            results[part] = parts[part]()
            results["verdicts"] = judge(results)
            print(f"{part}: {time.perf_counter() - begin:.0f} s", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    show(results)
    if options.plot and "first" in results:
        best = min(results["verdicts"], key=lambda name: results["first"][-1][name]["evicted_ms"])
        options.plot.write_text(plot_first(results, best))


if __name__ == "__main__":
    main()
