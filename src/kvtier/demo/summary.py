"""The demo's result as rows of text, which the terminal's table and the report's table both show.

Everything here is pure; any thread may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtier.config import format_size
from kvtier.demo.result import RUNS, DemoResult, PoolUse, Process, RestartResult, RunResult

OWN_RUNS = {name: run.label for name, run in RUNS.items() if run.process is Process.OWN}
"""The runs without and with kvtier, and their labels."""
RESTART_RUNS = {name: run.label for name, run in RUNS.items() if run.process is not Process.OWN}
"""The runs over a disk, and their labels."""

MEANINGS = {
    "nothing": "All whole chunks were there; only the rest of the prompt, less than a chunk, was computed.",
    "never stored": "The tokens are new: nobody had sent or generated them before.",
    "evicted": "The pool was full and the policy chose this chunk to leave.",
    "refused": "The pool had no place that could be freed when the chunk was offered.",
    "still being written": "The chunk was on its way to the pool and could not be read yet.",
    "failed its check": "Its bytes were found wrong, so the tokens were computed again.",
    "cleared by a reset": "The cache was emptied on request.",
    "not worth loading": "Computing these tokens was expected to be faster than loading them.",
    "could not be read or written": "A transfer failed, or a tier below the pool answered with an error.",
    "too slow": "A transfer or a tier below the pool did not bring it in time.",
    "suspended": "The tier that has it is not asked for a while: its calls failed or hung.",
    "not open yet": "The tier below the pool is being opened, or belongs to another process.",
    "namespace not known yet": (
        "The weights are still being digested; until then nothing below the pool may be used."
    ),
    "lost with its files": "The tier's files are gone.",
    "no room in the pool to promote it": "Other promotions had taken their share of the pool.",
    "beyond what the request may load": "The request has set a limit on what is loaded for it.",
    "computed for an audit": "It was kept, and computed all the same, to compare the two.",
    "no state at this boundary": "Its recurrent layers' state was kept at other boundaries only.",
    "follows KV of before a reset": "The engine went on from KV of before a reset, which is not kept.",
}
"""An explanation of each reason for a missing chunk."""


class Row(NamedTuple):
    """One line of the table. `change` compares the run with kvtier to the run without it."""

    label: str
    off: str
    on: str
    change: str = ""


def format_ms(milliseconds: float) -> str:
    """Return a time as text with three digits: `0.85 ms`, `120 ms`, `1.50 s`."""
    value, unit = (milliseconds / 1000, "s") if milliseconds >= 999.5 else (milliseconds, "ms")
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def describe_model(result: DemoResult) -> str:
    """Describe the model: `built-in model (llama), 9.97 million parameters, random weights`."""
    model = result.config.get("model", {})
    words = [str(model.get("name", "model of no name"))]
    if "family" in model:
        words[0] += f" ({model['family']})"
    if "parameters" in model:
        words.append(_parameters(model["parameters"]))
    return ", ".join(words + (["random weights"] if model.get("random_weights") else []))


def _parameters(number: int) -> str:
    value, unit = (number / 1e9, "billion") if number >= 999_500_000 else (number / 1e6, "million")
    return f"{value:.3g} {unit} parameters"


def summarize(result: DemoResult) -> Iterator[Row]:
    """Yield the rows of the table. If there was nothing to load, times differ by chance: none is judged."""
    off, on = result.off, result.on
    time, rate = (_uncompared(_time), _uncompared(_rate)) if result.fitted else (_time, _rate)
    yield Row("requests", f"{len(off.requests):,}", f"{len(on.requests):,}")
    yield Row("prompt tokens", f"{off.prompt_tokens:,}", f"{on.prompt_tokens:,}")
    yield Row("  from the GPU cache", _share(off.from_gpu, off), _share(on.from_gpu, on))
    yield Row("  from the pool", "–", _share(sum(on.from_tiers.values()), on))
    less = _less(off.recomputed, on.recomputed)
    yield Row("  recomputed", _share(off.recomputed, off), _share(on.recomputed, on), less)
    yield time("time to first token, p50", off.ttft_ms(50), on.ttft_ms(50))
    if any(request.turn > 1 for request in on.requests):
        yield time("  in turn 1, which is cold", off.ttft_ms(50, to_turn=1), on.ttft_ms(50, to_turn=1))
        yield time("  in later turns", off.ttft_ms(50, from_turn=2), on.ttft_ms(50, from_turn=2))
    yield time("time to first token, p99", off.ttft_ms(99), on.ttft_ms(99))
    yield rate("generated tokens/s", off.generated_per_second, on.generated_per_second)
    yield rate("  prompt tokens included", off.tokens_per_second, on.tokens_per_second)
    yield time("wall time", off.wall_seconds * 1000, on.wall_seconds * 1000)
    yield time("  processor time", off.cpu_seconds * 1000, on.cpu_seconds * 1000, "less", "more")
    yield Row("preemptions", f"{off.preemptions:,}", f"{on.preemptions:,}")
    if on.pool is not None:
        yield Row("pool in use", "–", _in_use(on.pool))
        yield Row("  chunks evicted", "–", f"{on.pool.evicted:,}")
    yield Row("same tokens", "", "identical" if result.identical else "DIFFERENT")


def describe_fit(result: DemoResult) -> str:
    """Say why there was nothing to load, and what to change; nothing if there was."""
    if not result.fitted:
        return ""
    if all(request.turn == 1 for request in result.on.requests):
        why, change = "Nobody asked twice", "use two or more --turns"
    else:
        blocks = result.config.get("engine", {}).get("gpu_blocks")
        why = "Everything fitted into the engine's own cache"
        change = f"use more --conversations, or fewer --gpu-blocks than {blocks}"
    return f"{why}: kvtier had nothing to load, and times differ by chance. To see it load, {change}."


def explain_figures(result: DemoResult) -> Iterator[str]:
    """Yield an explanation of each figure that is weaker than the first tokens of later turns."""
    off, on = result.off, result.on
    if off.ttft_ms(50, to_turn=1) < 1.5 * on.ttft_ms(50, to_turn=1):
        slowest = max(on.requests, key=lambda request: request.ttft)
        p99 = " The p99 of the run with kvtier is such a request." if slowest.turn == 1 else ""
        yield f"Turn 1 is cold: its text is new, so it is computed with kvtier too.{p99}"
    if off.wall_seconds < result.ttft_speedup_p50 * on.wall_seconds:
        yield (
            "The whole run gains less than the first tokens: it includes turn 1, and the time in which"
            " answers are generated token by token, which kvtier does not change."
        )


def describe_restart(restart: RestartResult) -> str:
    """Describe the run over a disk in two sentences."""
    count = len(restart.disk.requests)
    prompts = f"{count} prompts of the last turn were" if count > 1 else "A prompt of the last turn was"
    return (
        f"Over a disk: {prompts} computed, answered from the pool, and, after the engine's process was"
        " killed (SIGKILL) and started again over the same folder, from disk. It could answer"
        f" {restart.restart_seconds:.1f} s after the kill, most of which Python, torch and the model took."
    )


def summarize_restart(restart: RestartResult) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the second table: a label, and a value for each run."""
    runs = restart.runs.values()
    for percent in (50, 99):
        yield _row(f"first token, p{percent}", (format_ms(run.ttft_ms(percent)) for run in runs))
    yield _row("prompt tokens", (f"{run.prompt_tokens:,}" for run in runs))
    for tier, label in (("cpu", "  from the pool"), ("disk", "  from disk")):
        loaded = [(run.from_tiers.get(tier, 0), run) for run in runs]
        yield _row(label, (_share(tokens, run) if tokens else "–" for tokens, run in loaded))
    yield _row("  from the GPU", (_share(run.from_gpu, run) for run in runs))
    yield _row("  recomputed", (_share(run.recomputed, run) for run in runs))


def describe_tiers(restart: RestartResult) -> list[str]:
    """Describe the statistics of the disk tier in both processes."""
    from kvtier.connector.metrics import describe_tier  # late: showing help should import no sockets

    before, after = restart.tiers
    return [f"killed, {describe_tier(before)}", f"restarted, {describe_tier(after)}"]


def _row(label: str, values: Iterator[str]) -> tuple[str, str, str, str]:
    computed, pool, disk = values
    return label, computed, pool, disk


def _share(tokens: int, run: RunResult) -> str:
    return f"{tokens:,} ({tokens / run.prompt_tokens:.0%})" if run.prompt_tokens else f"{tokens:,}"


def _less(off: float, on: float) -> str:
    return f"{1 - on / off:.0%} less" if on < off else ""


def _time(label: str, off: float, on: float, better: str = "faster", worse: str = "slower") -> Row:
    change = _times(off, on, better) if on <= off else _times(on, off, worse)
    return Row(label, format_ms(off), format_ms(on), change)


def _uncompared(make: Callable[..., Row]) -> Callable[..., Row]:
    return lambda *values: make(*values)._replace(change="")


def _rate(label: str, off: float, on: float) -> Row:
    change = _times(on, off, "more") if on >= off else _times(off, on, "fewer")
    return Row(label, _number(off), _number(on), change)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _times(more: float, less: float, word: str) -> str:
    return f"{more / less:.3g}× {word}" if less and more / less >= 1.005 else ""


def _in_use(pool: PoolUse) -> str:
    if pool.slots == 0:
        return "0 B"
    return f"{format_size(pool.used * pool.row_bytes)} ({pool.used / pool.slots:.0%})"
