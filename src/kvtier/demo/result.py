"""The results of a demo: each request of the run without kvtier (`off`), of the run with it (`on`) and of
the runs over a disk before and after a kill (`restart`), and their sums.

All runs list their requests in the same order, the order of asking. Times are in seconds unless a name ends
in `_ms`. Results are immutable; any thread may use them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from kvtier import __version__
from kvtier.tiers.base import TierStats


class Process(Enum):
    """The process in which a run is played."""

    OWN = "the demo's own"
    KILLED = "a process with a disk tier"
    RESTARTED = "a process that starts again over that disk"


class Run(NamedTuple):
    """A run of the demo: where it is played, and its name in a table and in a difference of tokens."""

    process: Process
    label: str
    in_difference: str


RUNS = {
    "off": Run(Process.OWN, "without kvtier", "without it"),
    "on": Run(Process.OWN, "with kvtier", "with it"),
    "computed": Run(Process.KILLED, "computed", "over a disk, computed"),
    "pool": Run(Process.KILLED, "from the pool", "over a disk, from the pool"),
    "disk": Run(Process.RESTARTED, "disk, after kill -9", "from disk after a kill"),
}
"""All runs of the demo, in their order."""


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile with linear interpolation; 0 if there are no values."""
    return float(np.percentile(values, percent)) if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """The result of a request. `from_gpu`, `from_tiers` and `recomputed` sum up to `prompt_tokens`."""

    conversation: int
    turn: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    from_gpu: int
    from_tiers: dict[str, int] = field(default_factory=dict)
    recomputed: int
    first_miss: str | None = None
    ttft: float
    preemptions: int = 0


class PoolUse(NamedTuple):
    """The use of the pool at the end of a run, in slots, and the number of chunks that were evicted."""

    used: int
    slots: int
    row_bytes: int
    evicted: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """One pass through the workload, up to the last token.

    On a busy machine `cpu_seconds` are a better measure than `wall_seconds`.
    """

    requests: tuple[RequestResult, ...]
    wall_seconds: float
    cpu_seconds: float = 0.0
    pool: PoolUse | None = None

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def generated_tokens(self) -> int:
        """The tokens of all answers."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def from_gpu(self) -> int:
        """The prompt tokens whose KV the engine's own cache had."""
        return sum(request.from_gpu for request in self.requests)

    @property
    def from_tiers(self) -> dict[str, int]:
        """The prompt tokens whose KV was loaded, by tier."""
        tokens: Counter[str] = Counter()
        for request in self.requests:
            tokens.update(request.from_tiers)
        return dict(tokens)

    @property
    def recomputed(self) -> int:
        """The prompt tokens that were computed."""
        return sum(request.recomputed for request in self.requests)

    @property
    def preemptions(self) -> int:
        """The number of times that a request lost its blocks to an older one."""
        return sum(request.preemptions for request in self.requests)

    @property
    def generated_per_second(self) -> float:
        """The answer tokens per second."""
        return self.generated_tokens / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """The prompt and answer tokens per second."""
        return (self.prompt_tokens + self.generated_tokens) / self.wall_seconds if self.wall_seconds else 0.0

    def ttft_ms(self, percent: float, *, from_turn: int = 1, to_turn: int | None = None) -> float:
        """Return a percentile of the time to first token, of all requests from a turn on, or to one."""
        last = float("inf") if to_turn is None else to_turn
        times = [request.ttft for request in self.requests if from_turn <= request.turn <= last]
        return percentile(times, percent) * 1000


class Difference(NamedTuple):
    """The first position where two answers differ; a token is `None` if its answer had ended."""

    conversation: int
    turn: int
    position: int
    off: int | None
    on: int | None
    run: str = "on"
    """The run that differs from the run without kvtier; `on` is its token."""

    def __str__(self) -> str:
        tokens = f"token {self.off} without kvtier, {self.on} {RUNS[self.run].in_difference}"
        return f"conversation {self.conversation}, turn {self.turn}, answer token {self.position}: {tokens}"


@dataclass(frozen=True, slots=True)
class RestartResult:
    """The results of the same prompts three times: computed, from the pool, and from disk after a kill."""

    computed: RunResult
    pool: RunResult
    disk: RunResult
    exit_code: int
    """The exit code of the first process: -9, for SIGKILL."""
    restart_seconds: float
    """The time from the kill until the second process could answer, with Python, torch and model loaded."""
    rows_found: int
    """The number of rows that the second process found on disk."""
    tiers: tuple[TierStats, TierStats]
    """The statistics of the disk tier in the first and the second process, just before each was killed."""

    @property
    def runs(self) -> dict[str, RunResult]:
        """The runs by name, in their order."""
        return {"computed": self.computed, "pool": self.pool, "disk": self.disk}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {
            "requests": len(self.disk.requests),
            "exit_code": self.exit_code,
            "restart_seconds": self.restart_seconds,
            "rows_found": self.rows_found,
            "prompt_tokens": self.disk.prompt_tokens,
            "ttft_ms": {name: _ttft(run) for name, run in self.runs.items()},
            "tokens_from_gpu": {name: run.from_gpu for name, run in self.runs.items()},
            "tokens_from_tiers": {name: run.from_tiers for name, run in self.runs.items()},
            "tokens_recomputed": {name: run.recomputed for name, run in self.runs.items()},
            "tier": dict(zip(("before", "after"), map(asdict, self.tiers), strict=True)),
            "per_request": [
                {
                    "conversation": request.conversation,
                    "turn": request.turn,
                    "ttft_ms": {name: run.requests[index].ttft * 1000 for name, run in self.runs.items()},
                    "tokens_from_tiers": request.from_tiers,
                    "tokens_recomputed": request.recomputed,
                    "first_miss": request.first_miss,
                }
                for index, request in enumerate(self.disk.requests)
            ],
        }


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All runs, and the settings under which they ran."""

    off: RunResult
    on: RunResult
    config: dict[str, Any] = field(default_factory=dict)
    texts: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    """Question and answer of each turn of each conversation, with kvtier; none if tokens were random."""
    restart: RestartResult | None = None
    restart_skipped: str | None = None
    """The reason why there was no run over a disk, although one was asked for."""

    @property
    def difference(self) -> Difference | None:
        """The first token that differs from the run without kvtier, in the order of asking."""
        return next(self._differences(), None)

    @property
    def identical(self) -> bool:
        """Whether all answers are equal, token for token, in all runs."""
        return self.difference is None

    @property
    def compared_tokens(self) -> int:
        """The number of generated tokens that were compared with the run without kvtier."""
        restarted = [] if self.restart is None else self.restart.runs.values()
        return self.on.generated_tokens + sum(run.generated_tokens for run in restarted)

    @property
    def ttft_speedup_p50(self) -> float:
        """The factor by which the first token is faster, at the median."""
        on = self.on.ttft_ms(50)
        return self.off.ttft_ms(50) / on if on else 0.0

    @property
    def fitted(self) -> bool:
        """Whether the engine's cache held everything that was computed, so that nothing was to be loaded."""
        missed = self.why_missing.keys() - {"never stored"}
        return not self.on.from_tiers and not missed and self.on.recomputed <= self.off.recomputed

    @property
    def why_missing(self) -> dict[str, int]:
        """The number of requests by the reason why their first missing chunk was not loaded, most frequent
        first.
        """
        reasons = Counter(
            request.first_miss for request in self.on.requests if request.first_miss is not None
        )
        return dict(reasons.most_common())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON. Top-level counts are those of the run with kvtier."""
        off, on = self.off, self.on
        return {
            "identical": self.identical,
            "first_difference": self.difference and self.difference._asdict(),
            "requests": len(on.requests),
            "prompt_tokens": on.prompt_tokens,
            "generated_tokens": on.generated_tokens,
            "tokens_from_gpu": on.from_gpu,
            "tokens_from_tiers": {"cpu": 0} | on.from_tiers,
            "tokens_recomputed": on.recomputed,
            "why_missing": self.why_missing,
            "ttft_ms": {name: _ttft(run) for name, run in self.both()},
            "ttft_ms_returning": {name: _ttft(run, from_turn=2) for name, run in self.both()},
            "ttft_speedup_p50": self.ttft_speedup_p50,
            "fitted_in_gpu_cache": self.fitted,
            "tokens_per_second": {"off": off.tokens_per_second, "on": on.tokens_per_second},
            "generated_per_second": {"off": off.generated_per_second, "on": on.generated_per_second},
            "wall_seconds": {"off": off.wall_seconds, "on": on.wall_seconds},
            "cpu_seconds": {"off": off.cpu_seconds, "on": on.cpu_seconds},
            "recomputed": {"off": off.recomputed, "on": on.recomputed},
            "preemptions": {"off": off.preemptions, "on": on.preemptions},
            "pool": on.pool and on.pool._asdict(),
            "restart": self.restart and self.restart.to_dict(),
            "restart_skipped": self.restart_skipped,
            "config": self.config,
            "kvtier_version": __version__,
            "per_request": [
                _pair(*pair, self.texts.get((pair[1].conversation, pair[1].turn), (None, None)))
                for pair in zip(off.requests, on.requests, strict=True)
            ],
        }

    def both(self) -> tuple[tuple[str, RunResult], ...]:
        """Return the runs without and with kvtier by name."""
        return ("off", self.off), ("on", self.on)

    def _differences(self) -> Iterator[Difference]:
        yield from _differences("on", self.off.requests, self.on.requests)
        if self.restart is not None:
            asked = {(request.conversation, request.turn): request for request in self.off.requests}
            for name, run in self.restart.runs.items():
                off = [asked[request.conversation, request.turn] for request in run.requests]
                yield from _differences(name, off, run.requests)


def _differences(
    run: str, off: Sequence[RequestResult], on: Sequence[RequestResult]
) -> Iterator[Difference]:
    for expected, got in zip(off, on, strict=True):
        for position, tokens in enumerate(zip_longest(expected.token_ids, got.token_ids), 1):
            if tokens[0] != tokens[1]:
                yield Difference(expected.conversation, expected.turn, position, *tokens, run)


def _ttft(run: RunResult, from_turn: int = 1) -> dict[str, float]:
    return {f"p{percent}": run.ttft_ms(percent, from_turn=from_turn) for percent in (50, 99)}


def _pair(off: RequestResult, on: RequestResult, text: tuple[str | None, str | None]) -> dict[str, Any]:
    """Describe one request of both runs."""
    return {
        "conversation": on.conversation,
        "turn": on.turn,
        "question": text[0],
        "answer": text[1],
        "prompt_tokens": on.prompt_tokens,
        "tokens_from_gpu": on.from_gpu,
        "tokens_from_tiers": on.from_tiers,
        "tokens_recomputed": on.recomputed,
        "first_miss": on.first_miss,
        "ttft_ms": {"off": off.ttft * 1000, "on": on.ttft * 1000},
        "recomputed": {"off": off.recomputed, "on": on.recomputed},
        "preemptions": {"off": off.preemptions, "on": on.preemptions},
        "identical": off.token_ids == on.token_ids,
    }
