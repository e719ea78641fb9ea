"""The result of `kvtier bench`: the answers of both sides, where their prompts came from, and a table of it.

`without` is the side whose requests may load nothing, `loading` the side whose requests may. Both list their
answers in the order of the pairs. Everything here is plain data; times are in seconds unless a name says ms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier import __version__
from kvtier.bench.client import StreamedAnswer
from kvtier.demo.result import percentile
from kvtier.demo.summary import Row, format_ms

SOURCES = {
    "local_cache_hit": "from the GPU cache",
    "external_kv_transfer": "loaded by kvtier",
    "local_compute": "computed",
}
"""Where vLLM's metrics say that prompt tokens came from."""


@dataclass(slots=True)
class Side:
    """The measured requests of one kind. Sources, misses and promoted bytes are what `/metrics` counted."""

    answers: list[StreamedAnswer] = field(default_factory=list)
    seconds: float = 0.0
    """The time in which requests of this kind were running."""
    sources: Counter[str] = field(default_factory=Counter)
    """Prompt tokens by source, under vLLM's names."""
    misses: Counter[str] = field(default_factory=Counter)
    """Requests by the reason why their first chunk that was computed was not loaded."""
    promoted: Counter[str] = field(default_factory=Counter)
    """Bytes by the tier below the pool that they were read from."""

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(answer.prompt_tokens for answer in self.answers)

    def first_ms(self, percent: float) -> float:
        """Return a percentile of the time to first token."""
        return percentile([answer.first for answer in self.answers], percent) * 1000

    def gap_ms(self, percent: float) -> float:
        """Return a percentile of the time between two tokens."""
        return percentile([gap for answer in self.answers for gap in answer.gaps], percent) * 1000

    def tokens_per_second(self) -> float:
        """Return the prompt and answer tokens per second."""
        tokens = self.prompt_tokens + sum(answer.answer_tokens for answer in self.answers)
        return tokens / self.seconds if self.seconds else 0.0

    def add(self, other: Side) -> None:
        """Add what was measured later."""
        self.answers += other.answers
        self.seconds += other.seconds
        self.sources += other.sources
        self.misses += other.misses
        self.promoted += other.promoted

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {
            "answers": [asdict(answer) for answer in self.answers],
            "seconds": self.seconds,
            "sources": dict(self.sources),
            "misses": dict(self.misses),
            "promoted_bytes": dict(self.promoted),
            "first_token_ms": {f"p{percent}": self.first_ms(percent) for percent in (50, 99)},
            "inter_token_ms": {f"p{percent}": self.gap_ms(percent) for percent in (50, 99)},
            "tokens_per_second": self.tokens_per_second(),
            "prompt_tokens": self.prompt_tokens,
        }


@dataclass(slots=True)
class BenchResult:
    """Everything that a run has measured so far."""

    url: str
    model: str
    settings: dict[str, Any]
    without: Side = field(default_factory=Side)
    loading: Side = field(default_factory=Side)
    ended_early: str | None = None
    """Why there are fewer pairs than asked for."""
    foreign_tokens: int = 0
    """Prompt tokens of other clients that the server's metrics counted in the same time."""

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return len(self.loading.answers)

    @property
    def different(self) -> list[int]:
        """The numbers, from 1 on, of the pairs whose answers differ."""
        both = zip(self.without.answers, self.loading.answers, strict=True)
        return [number for number, (one, other) in enumerate(both, 1) if one.text != other.text]

    @property
    def speedup(self) -> float:
        """The factor by which the first token is faster with loading, at the median."""
        return self.without.first_ms(50) / self.loading.first_ms(50) if self.loading.first_ms(50) else 0.0

    def verdict(self) -> str:
        """Describe the result in a few words."""
        if not self.pairs:
            return "Nothing measured"
        if self.speedup >= 1:
            return f"First token {self.speedup:.3g}× faster"
        return f"First token {1 / self.speedup:.3g}× slower"

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the table."""
        without, loading = self.without, self.loading
        yield Row("pairs", f"{self.pairs}", f"{self.pairs}")
        for name, ms in (("first token", Side.first_ms), ("inter-token", Side.gap_ms)):
            for percent in (50, 99):
                yield _time(f"{name}, p{percent}", ms(without, percent), ms(loading, percent))
        off, on = without.tokens_per_second(), loading.tokens_per_second()
        more = _ratio(off, on, "more", "fewer")
        yield Row("tokens/s, prompts included", f"{off:,.0f}", f"{on:,.0f}", more)
        yield Row("prompt tokens", f"{without.prompt_tokens:,}", f"{loading.prompt_tokens:,}")
        for source, label in SOURCES.items():
            yield Row(f"  {label}", _share(without, source), _share(loading, source))
        yield Row("same answers", "", f"{self.pairs - len(self.different)} of {self.pairs}")

    def remarks(self) -> Iterator[str]:
        """Yield the sentences that belong below the table."""
        if self.ended_early is not None:
            yield f"{self.ended_early} after {self.pairs} of {self.settings['pairs']} pairs."
        if not self.pairs:
            return
        if 0 < self.pairs < 20:
            yield f"With {self.pairs} pairs, p99 is hardly more than the slowest request."
        loading, off, on = self.loading, self.without.gap_ms(50), self.loading.gap_ms(50)
        if self.settings["concurrency"] == 1 and abs(on - off) > 0.1 * off:
            yield "Loads end before the first token: a difference in inter-token times is noise."
        if not loading.sources["external_kv_transfer"]:
            yield "kvtier loaded nothing, so both sides did the same work."
        if loading.sources["local_cache_hit"] > loading.prompt_tokens / 10:
            yield "The server's own cache had part of the prompts: raise --filler-tokens to push them out."
        if loading.promoted:
            told = ", ".join(f"{size / 1e6:,.1f} MB from {tier}" for tier, size in loading.promoted.items())
            yield f"Read from tiers below the pool: {told}."
        if loading.misses:
            told = ", ".join(f"{reason} ({count})" for reason, count in loading.misses.most_common())
            yield f"Why the first chunk that was computed was not loaded, by requests: {told}."
        if self.foreign_tokens:
            yield (
                f"Others used the server meanwhile ({self.foreign_tokens:,} prompt tokens): "
                "times include theirs, and so do the counts of where prompts came from."
            )
        if self.different:
            numbers = ", ".join(map(str, self.different[:10]))
            yield (
                f"Answers differ in pair {numbers}. Rounding can do that, because the end of a loaded prompt"
                " is computed in another batch than the whole; vLLM's own prefix cache has the same effect."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {
            "version": __version__,
            "url": self.url,
            "model": self.model,
            "settings": self.settings,
            "ended_early": self.ended_early,
            "foreign_tokens": self.foreign_tokens,
            "pairs": self.pairs,
            "first_token_speedup_p50": self.speedup,
            "same_answers": self.pairs - len(self.different),
            "different_pairs": self.different,
            "without": self.without.to_dict(),
            "loading": self.loading.to_dict(),
        }


def _share(side: Side, source: str) -> str:
    total = sum(side.sources.values())
    return f"{side.sources[source]:,} ({side.sources[source] / total:.0%})" if total else "–"


def _time(label: str, without: float, loading: float) -> Row:
    return Row(label, format_ms(without), format_ms(loading), _ratio(without, loading, "slower", "faster"))


def _ratio(before: float, after: float, more: str, less: str) -> str:
    """Compare `after` to `before`: `3.1× more`; nothing if they are about equal."""
    if not before or not after or 0.995 < after / before < 1.005:
        return ""
    return f"{after / before:.3g}× {more}" if after > before else f"{before / after:.3g}× {less}"
