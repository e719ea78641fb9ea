"""What the demo measured: each request of the run without kvtier (`off`) and of the one with it (`on`), and their sums.

Requests of both runs stand in the order in which they were asked, which is the same. Times are in seconds unless a name ends
in `_ms`. Immutable; any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvtier import __version__

__all__ = ["DemoResult", "Difference", "PoolUse", "RequestResult", "RunResult", "percentile"]


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile with linear interpolation; 0 of nothing."""
    return float(np.percentile(values, percent)) if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One request that has finished. `from_gpu`, `from_tiers` and `recomputed` sum to `prompt_tokens`."""

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
    """How full the pool was at the end of a run, in slots, and how many chunks had to leave it."""

    used: int
    slots: int
    row_bytes: int
    evicted: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """One pass through the workload, up to the last token. On a busy machine `cpu_seconds` say more than `wall_seconds`."""

    requests: tuple[RequestResult, ...]
    wall_seconds: float
    cpu_seconds: float = 0.0
    pool: PoolUse | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def from_gpu(self) -> int:
        """Prompt tokens whose KV the engine's own cache had."""
        return sum(request.from_gpu for request in self.requests)

    @property
    def from_tiers(self) -> dict[str, int]:
        """Prompt tokens whose KV was loaded, by tier."""
        tokens: Counter[str] = Counter()
        for request in self.requests:
            tokens.update(request.from_tiers)
        return dict(tokens)

    @property
    def recomputed(self) -> int:
        """Prompt tokens that were computed."""
        return sum(request.recomputed for request in self.requests)

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks to an older one."""
        return sum(request.preemptions for request in self.requests)

    @property
    def generated_per_second(self) -> float:
        """Answer tokens a second."""
        return self.generated_tokens / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Prompt and answer tokens a second."""
        return (self.prompt_tokens + self.generated_tokens) / self.wall_seconds if self.wall_seconds else 0.0

    def ttft_ms(self, percent: float, *, from_turn: int = 1) -> float:
        """Return a percentile of the time to first token, of all requests or of those from some turn on."""
        times = [request.ttft for request in self.requests if request.turn >= from_turn]
        return percentile(times, percent) * 1000


class Difference(NamedTuple):
    """The first place where an answer differs; `None` stands where one of them had ended."""

    conversation: int
    turn: int
    position: int
    off: int | None
    on: int | None

    def __str__(self) -> str:
        tokens = f"token {self.off} without kvtier, {self.on} with it"
        return f"conversation {self.conversation}, turn {self.turn}, answer token {self.position}: {tokens}"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both runs, and the settings under which they ran."""

    off: RunResult
    on: RunResult
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def difference(self) -> Difference | None:
        """The first token that is not the same in both runs, in the order of asking."""
        return next(self._differences(), None)

    @property
    def identical(self) -> bool:
        """Whether all answers are equal, token for token."""
        return self.difference is None

    @property
    def ttft_speedup_p50(self) -> float:
        """How many times sooner the first token comes, at the median."""
        on = self.on.ttft_ms(50)
        return self.off.ttft_ms(50) / on if on else 0.0

    @property
    def why_missing(self) -> dict[str, int]:
        """For how many requests each reason kept the first missing chunk from being loaded, most frequent first."""
        reasons = Counter(request.first_miss for request in self.on.requests if request.first_miss is not None)
        return dict(reasons.most_common())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON. Counts at the top are those of the run with kvtier."""
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
            "ttft_ms": {name: _ttft(run) for name, run in self._runs()},
            "ttft_ms_returning": {name: _ttft(run, from_turn=2) for name, run in self._runs()},
            "ttft_speedup_p50": self.ttft_speedup_p50,
            "tokens_per_second": {"off": off.tokens_per_second, "on": on.tokens_per_second},
            "generated_per_second": {"off": off.generated_per_second, "on": on.generated_per_second},
            "wall_seconds": {"off": off.wall_seconds, "on": on.wall_seconds},
            "cpu_seconds": {"off": off.cpu_seconds, "on": on.cpu_seconds},
            "recomputed": {"off": off.recomputed, "on": on.recomputed},
            "preemptions": {"off": off.preemptions, "on": on.preemptions},
            "pool": on.pool and on.pool._asdict(),
            "config": self.config,
            "kvtier_version": __version__,
            "per_request": [_pair(*pair) for pair in zip(off.requests, on.requests, strict=True)],
        }

    def _runs(self) -> tuple[tuple[str, RunResult], ...]:
        return ("off", self.off), ("on", self.on)

    def _differences(self) -> Iterator[Difference]:
        for off, on in zip(self.off.requests, self.on.requests, strict=True):
            for position in range(max(len(off.token_ids), len(on.token_ids))):
                tokens = [run.token_ids[position] if position < len(run.token_ids) else None for run in (off, on)]
                if tokens[0] != tokens[1]:
                    yield Difference(off.conversation, off.turn, position + 1, tokens[0], tokens[1])


def _ttft(run: RunResult, from_turn: int = 1) -> dict[str, float]:
    return {f"p{percent}": run.ttft_ms(percent, from_turn=from_turn) for percent in (50, 99)}


def _pair(off: RequestResult, on: RequestResult) -> dict[str, Any]:
    """Describe one request of both runs."""
    return {
        "conversation": on.conversation,
        "turn": on.turn,
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
