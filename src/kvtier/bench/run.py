"""Measures a server: pairs of requests over the same prompt, of which one may load KV and the other may not.

Each prompt is sent once, so that kvtier stores it. Then the server's own cache is emptied: with
`/reset_prefix_cache` if the server has it, else with other prompts that fill it and that kvtier does not
store. Then the pairs follow; which side goes first changes from pair to pair. Requests that may not load
carry a `cache_salt` of their own, so that they find neither KV of the other side nor of an earlier run; the
salt is the same for all of them, so that prompts which share a prefix share it on both sides. They store
nothing either: their side is the server as it would be without kvtier.

`Bench` belongs to one thread, and sends requests on threads of its own. It reads metrics before and after
each round of requests, while none of its requests runs.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from kvtier.bench.client import Server, TimeOver
from kvtier.bench.prompts import Prompt, make_document
from kvtier.bench.result import SOURCES, BenchResult, Side
from kvtier.cli.scrape import fetch, read_samples
from kvtier.errors import InputError, OutsideError

_INSPECTION_TIMEOUT = 10.0
_METRICS_TIMEOUT = 5.0
_METRICS_LAG = 1.0
"""Seconds for which the metrics may lag behind an answer."""
_PROBE_WORDS = 200
_USUAL_LENGTH = 2048
"""Tokens of the longest prompt of a model, if the server does not tell."""
_FIRST_FILLER = 1_000_000
"""Documents from this number on are fillers."""
_COMPUTE = {"max_load_tokens": 0, "max_offload_tokens": 0}


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What a user may set."""

    model: str | None = None
    prompts: tuple[Prompt, ...] = ()
    """Prompts of the user; without any, documents of `tokens` tokens."""
    pairs: int = 8
    tokens: int = 1024
    answer_tokens: int = 32
    concurrency: int = 1
    max_seconds: float = 600.0
    filler_tokens: int | None = None
    """Tokens that push prompts out of the server's own cache; by default, as many as it has room for."""
    chat: bool = False


class Bench:
    """One run. Call `inspect`, then `run`; what was measured by then is in `result`."""

    def __init__(
        self,
        server: Server,
        settings: BenchSettings,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._server, self._settings, self._tell, self._clock = server, settings, tell, clock
        self._deadline = clock() + _INSPECTION_TIMEOUT
        self._salt = f"kvtier-bench-{uuid.uuid4().hex}"
        self._fillers = 0
        self._tokens_per_word, self._tokens_around = 1.5, 0.0
        self._max_length: int | None = None
        self._capacity = 0
        self.result = BenchResult(server.url, "", {})

    # -- without load ------------------------------------------------------------------------------

    def inspect(self) -> str:
        """Ask what the server has, without load, and return a sentence that says what a run will send."""
        settings = self._settings
        models = self._server.models(self._deadline)
        name = settings.model or next(iter(models), None)
        if name is None or name not in models:
            raise InputError(f"{self._server.url}: expected a model of {', '.join(models)}, got {name!r}")
        self._max_length = models[name]
        longest = settings.tokens + settings.answer_tokens
        if not settings.prompts and self._max_length is not None and longest > self._max_length:
            raise InputError(
                f"--tokens and --answer-tokens: expected at most {self._max_length:,} together, the length "
                f"of {name}, got {longest:,}"
            )
        text = self._metrics_text()
        if text is not None and not any(read_samples(text, ("vllm:kvtier_", "kvtier_"))):
            raise InputError(
                f"{self._server.url}: the server shows no metrics of kvtier; start it with KVTierConnector "
                "in --kv-transfer-config"
            )
        self._capacity = (
            settings.filler_tokens if settings.filler_tokens is not None else _capacity(text or "")
        )
        self.result.model = name
        self.result.settings = {
            "pairs": settings.pairs,
            "prompts": len(settings.prompts) or settings.pairs,
            "tokens": None if settings.prompts else settings.tokens,
            "answer_tokens": settings.answer_tokens,
            "concurrency": settings.concurrency,
            "max_seconds": settings.max_seconds,
            "filler_tokens": self._capacity,
            "chat": settings.chat,
        }
        return self._describe_load()

    def _describe_load(self) -> str:
        settings, count = self._settings, self._num_prompts
        passes = math.ceil(settings.pairs / count)
        length = "" if settings.prompts else f" of {settings.tokens:,} tokens"
        filler = (
            f" and up to {self._capacity * passes:,} tokens that fill its cache" if self._capacity else ""
        )
        return (
            f"kvtier bench sends load to {self._server.url}: {count + 2 * settings.pairs} requests over "
            f"{count} prompt(s){length}{filler}, {settings.concurrency} at a time, for at most "
            f"{settings.max_seconds:g} s. It slows other clients down and empties the server's prefix cache."
        )

    @property
    def _num_prompts(self) -> int:
        return min(len(self._settings.prompts) or self._settings.pairs, self._settings.pairs)

    # -- with load ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Measure all pairs. If the time is over, the result says so. Other errors are raised."""
        self._deadline = self._clock() + self._settings.max_seconds
        with self._sending() as threads:
            try:
                self._probe()
                prompts = self._prompts()
                self._warm_up(prompts)
                for start in range(0, self._settings.pairs, len(prompts)):
                    self._empty_cache()
                    self._measure(threads, prompts[: self._settings.pairs - start])
            except TimeOver:
                self.result.ended_early = f"The time of {self._settings.max_seconds:g} s was over"

    @contextmanager
    def _sending(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(self._settings.concurrency, "kvtier-bench") as threads:
            try:
                yield threads
            except BaseException:
                self._server.abort()  # else the threads wait for their answers
                raise

    def _probe(self) -> None:
        """Send two short prompts: does kvtier answer, and how many tokens do words make?"""
        most = min(_PROBE_WORDS, (self._max_length or _USUAL_LENGTH) // 4)
        few, many = (self._probe_tokens(words) for words in (most // 2, most))
        self._tokens_per_word = max((many - few) / (most - most // 2), 0.1)
        self._tokens_around = max(many - most * self._tokens_per_word, 0.0)

    def _probe_tokens(self, words: int) -> int:
        answer = self._complete(make_document(_FIRST_FILLER - 1, words), {"cache_salt": self._salt})
        if not (answer.get("kv_transfer_params") or {}).get("kvtier"):
            raise InputError(
                f"{self._server.url}: the server's answers have nothing of kvtier; start it with "
                "KVTierConnector in --kv-transfer-config"
            )
        return _prompt_tokens(answer)

    def _make_document(self, number: int, tokens: float) -> str:
        """Return a document of about so many tokens, those of a chat's template included."""
        return make_document(number, max(int((tokens - self._tokens_around) / self._tokens_per_word), 2))

    def _prompts(self) -> list[Prompt]:
        if self._settings.prompts:
            return list(self._settings.prompts[: self._settings.pairs])
        return [self._make_document(number, self._settings.tokens) for number in range(self._settings.pairs)]

    def _warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Send each prompt once, for kvtier to store it."""
        self._tell(f"storing {len(prompts)} prompt(s)")
        for number, prompt in enumerate(prompts, 1):
            try:
                self._complete(prompt)
            except InputError as error:
                raise InputError(f"prompt {number}: {error}") from None

    def _empty_cache(self) -> None:
        """Make the server's own cache forget everything that was sent so far."""
        if self._server.reset_prefix_cache(self._deadline):
            self._tell("the server has reset its own prefix cache")
            return
        if not self._capacity:
            self._tell(
                "the size of the server's own cache is not known, so it is not filled (--filler-tokens)"
            )
            return
        self._tell(f"filling the server's own cache with {self._capacity:,} other tokens")
        longest = min(self._capacity, (self._max_length or _USUAL_LENGTH) - 1)
        sent = 0
        while sent < self._capacity:
            # Some texts take more tokens than the probe: leave a margin.
            tokens = min(longest, self._capacity - sent) * 0.9
            filler = self._make_document(_FIRST_FILLER + self._fillers, tokens)
            self._fillers += 1
            more = {"cache_salt": f"{self._salt}-{self._fillers}", "kv_transfer_params": _COMPUTE}
            sent += max(_prompt_tokens(self._complete(filler, more)), 1)

    def _complete(self, prompt: Prompt, more: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a prompt for one token, and return the whole answer."""
        path, body = self._request(prompt, 1)
        body |= {"kv_transfer_params": {"kvtier": {"explain": True}}} | (more or {})
        return self._server.complete(path, body, self._deadline)

    def _request(self, prompt: Prompt, tokens: int) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a request for exactly so many tokens."""
        body: dict[str, Any] = {
            "model": self.result.model,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if isinstance(prompt, str) and not self._settings.chat:
            return "/v1/completions", body | {"prompt": prompt}
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return "/v1/chat/completions", body | {"messages": messages}

    def _measure(self, threads: ThreadPoolExecutor, prompts: Sequence[Prompt]) -> None:
        """Send pairs, as many at a time as the settings say. A round that is not complete does not count."""
        size, result = self._settings.concurrency, self.result
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            sides = {"loading": Side(), "without": Side()}
            order = list(sides) if result.pairs // size % 2 else list(reversed(sides))
            for kind in order:
                self._send_round(threads, batch, kind, sides[kind])
            for kind, measured in sides.items():
                _add(getattr(result, kind), measured)
            times = ", ".join(
                f"{sides[kind].first_ms(50):,.0f} ms {words}"
                for kind, words in (("without", "without loading"), ("loading", "with it"))
            )
            self._tell(f"pair {result.pairs} of {self._settings.pairs}: first token {times}")

    def _send_round(
        self, threads: ThreadPoolExecutor, batch: Sequence[Prompt], kind: str, side: Side
    ) -> None:
        """Send one request of a kind for each prompt, together, and add what was measured to `side`."""
        more = {} if kind == "loading" else {"cache_salt": self._salt, "kv_transfer_params": _COMPUTE}
        before = self._counts()
        start = self._clock()
        futures = []
        for prompt in batch:
            path, body = self._request(prompt, self._settings.answer_tokens)
            futures.append(threads.submit(self._server.stream, path, body | more, self._deadline))
        side.answers = [future.result() for future in futures]
        side.seconds = self._clock() - start
        if before is None:
            return
        expected, patience = side.prompt_tokens, time.monotonic() + _METRICS_LAG
        while (after := self._counts()) is not None:
            change = after - before  # counts that did not grow are left out
            counted = sum(change["source", source] for source in SOURCES)
            if counted >= expected or time.monotonic() > patience:
                side.sources = Counter({source: change["source", source] for source in SOURCES})
                side.misses = Counter({name: n for (what, name), n in change.items() if what == "miss"})
                side.promoted = Counter(
                    {name: n for (what, name), n in change.items() if what == "promoted"}
                )
                self.result.foreign_tokens += max(counted - expected, 0)
                return
            time.sleep(0.02)

    # -- metrics -----------------------------------------------------------------------------------

    def _metrics_text(self) -> str | None:
        try:
            return fetch(f"{self._server.url}/metrics", _METRICS_TIMEOUT)
        except (OSError, HTTPException, ValueError):
            return None

    def _counts(self) -> Counter[tuple[str, str]] | None:
        """Return the server's totals, over all its engines; `None` if it shows none."""
        text = self._metrics_text()
        if text is None:
            return None
        counts: Counter[tuple[str, str]] = Counter()
        for name, labels, value in read_samples(text, ("vllm:",)):
            if name == "vllm:prompt_tokens_by_source_total":
                counts["source", labels.get("source", "")] += int(value)
            elif name == "vllm:kvtier_misses_total":
                counts["miss", labels.get("reason", "")] += int(value)
            elif name == "vllm:kvtier_tier_promoted_bytes_total":
                counts["promoted", labels.get("tier", "")] += int(value)
        return counts


def _capacity(text: str) -> int:
    """Return the tokens for which the server's own caches have room; 0 if the metrics do not tell."""
    total = 0
    for _, labels, _ in read_samples(text, ("vllm:cache_config_info",)):
        sizes = [labels.get(name, "") for name in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")]
        tokens, blocks, block_size = (int(size) if size.isdecimal() else 0 for size in sizes)
        total += max(tokens, blocks * block_size)
    return total


def _prompt_tokens(answer: dict[str, Any]) -> int:
    try:
        return int(answer["usage"]["prompt_tokens"])
    except (KeyError, TypeError, ValueError):
        raise OutsideError("expected usage.prompt_tokens in the server's answer, got none") from None


def _add(total: Side, measured: Side) -> None:
    total.answers += measured.answers
    total.seconds += measured.seconds
    total.sources += measured.sources
    total.misses += measured.misses
    total.promoted += measured.promoted
