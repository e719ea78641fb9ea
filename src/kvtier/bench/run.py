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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any

from kvtier.bench.client import Server, TimeOver
from kvtier.bench.prompts import Prompt, make_document
from kvtier.bench.result import SOURCES, BenchResult, Side
from kvtier.cli.scrape import describe_failure, fetch, read_samples
from kvtier.demo.summary import format_ms
from kvtier.errors import InputError, OutsideError

_INSPECTION_TIMEOUT = 10.0
_METRICS_TIMEOUT = 5.0
_SLICE = 0.5
_METRICS_LAG = 1.0
"""Seconds for which the metrics may lag behind an answer."""
_PROBE_WORDS = 200
_USUAL_LENGTH = 2048
"""Tokens of the longest prompt of a model, if the server does not tell."""
_FIRST_FILLER = 1_000_000
"""Documents from this number on are fillers."""
_LONGEST_FILLER = 1 << 20
_LARGEST_COUNT = 1 << 60
_COMPUTE = {"max_load_tokens": 0, "max_offload_tokens": 0}
_COUNTED = {
    "vllm:prompt_tokens_by_source_total": ("source", "source"),
    "vllm:kvtier_misses_total": ("miss", "reason"),
    "vllm:kvtier_tier_promoted_bytes_total": ("promoted", "tier"),
}
"""The metrics that are read, what they count, and the label that tells their values apart."""


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
        self._threads = ThreadPoolExecutor(settings.concurrency, "kvtier-bench")
        self._salt = f"kvtier-bench-{uuid.uuid4().hex}"
        self._fillers = self._capacity = 0
        self._longest = _USUAL_LENGTH
        self._tokens_per_word, self._tokens_around = 1.5, 0.0
        self.result = BenchResult(server.url, "", asdict(settings))

    def inspect(self) -> str:
        """Ask what the server has, without load, and return a sentence that says what a run will send."""
        settings, url = self._settings, self._server.url
        models = self._server.models(self._deadline)
        name = settings.model or next(iter(models), None)
        if name is None or name not in models:
            raise InputError(f"{url}: expected a model of {', '.join(models)}, got {name!r}")
        self._longest = models[name] or _USUAL_LENGTH
        length = settings.tokens + settings.answer_tokens
        if not settings.prompts and length > self._longest:
            raise InputError(
                f"--tokens and --answer-tokens: expected at most {self._longest:,} together, the length of "
                f"{name}, got {length:,}"
            )
        text = self._metrics()
        if not any(read_samples(text, ("vllm:kvtier_",))):
            raise InputError(
                f"{url}: the server shows no metrics of kvtier; start it with KVTierConnector in "
                "--kv-transfer-config"
            )
        self._capacity = _capacity(text) if settings.filler_tokens is None else settings.filler_tokens
        count = min(len(settings.prompts) or settings.pairs, settings.pairs)
        self.result.model = name
        self.result.settings |= {"model": name, "prompts": count, "filler_tokens": self._capacity}
        self.result.settings |= {"tokens": None} if settings.prompts else {}
        fillers = self._capacity * math.ceil(settings.pairs / count)
        return (
            f"kvtier bench sends load to {url}: {count + 2 * settings.pairs} requests over {count} prompt(s)"
            f"{'' if settings.prompts else f' of {settings.tokens:,} tokens'} and up to {fillers:,} tokens "
            f"that fill its cache, {settings.concurrency} at a time, for at most {settings.max_seconds:g} s."
            " It slows other clients down and empties the server's prefix cache."
        )

    def run(self) -> None:
        """Measure all pairs. If the time is over after some, the result says so. Other errors are raised."""
        pairs, self._deadline = self._settings.pairs, self._clock() + self._settings.max_seconds
        try:
            self._probe()
            prompts = list(self._settings.prompts[:pairs]) or [
                self._make_document(number, self._settings.tokens) for number in range(pairs)
            ]
            self._tell(f"storing {len(prompts)} prompt(s)")
            for number, prompt in enumerate(prompts, 1):
                try:
                    self._complete(prompt)
                except InputError as error:
                    raise InputError(f"prompt {number}: {error}") from None
            for start in range(0, pairs, len(prompts)):
                self._empty_cache()
                self._measure(prompts[: pairs - start])
        except TimeOver as error:
            if not self.result.pairs:
                raise OutsideError(
                    f"nothing was measured: --max-seconds ({self._settings.max_seconds:g}) were over before "
                    f"the first pair was complete: {error}"
                ) from None
            self.result.ended_early = f"The time of {self._settings.max_seconds:g} s was over"
        finally:
            self._server.abort()  # else the threads wait for answers that nobody reads
            self._threads.shutdown()

    # -- whole answers -----------------------------------------------------------------------------

    def _probe(self) -> None:
        """Send two short prompts to learn how many tokens words make."""
        most = min(_PROBE_WORDS, self._longest // 4)
        few, many = (
            self._complete(make_document(_FIRST_FILLER - 1, words), self._salt)
            for words in (most // 2, most)
        )
        self._tokens_per_word = max((many - few) / (most - most // 2), 0.1)
        self._tokens_around = max(many - most * self._tokens_per_word, 0.0)

    def _make_document(self, number: int, tokens: float) -> str:
        """Return a document of about so many tokens, those of a chat's template included."""
        return make_document(number, max(int((tokens - self._tokens_around) / self._tokens_per_word), 2))

    def _empty_cache(self) -> None:
        """Make the server's own cache forget everything that was sent so far."""
        if self._server.reset_prefix_cache(self._deadline):
            self._tell("the server has reset its own prefix cache")
            return
        self._tell(f"filling the server's own cache with {self._capacity:,} other tokens")
        sent = 0
        while sent < self._capacity:
            self._fillers += 1
            # Some texts take more tokens than the probe: leave a margin.
            tokens = min(self._longest - 1, self._capacity - sent, _LONGEST_FILLER) * 0.9
            filler = self._make_document(_FIRST_FILLER + self._fillers, tokens)
            sent += max(self._complete(filler, f"{self._salt}-{self._fillers}"), 1)

    def _complete(self, prompt: Prompt, salt: str | None = None) -> int:
        """Send a prompt for one token, and return its length. With a salt, kvtier leaves it alone."""
        path, body = self._request(prompt, 1, salt)
        return self._server.complete(path, body, self._deadline)

    def _request(self, prompt: Prompt, tokens: int, salt: str | None) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a request for exactly so many tokens."""
        body: dict[str, Any] = {"model": self.result.model, "max_tokens": tokens}
        body |= {"temperature": 0.0, "ignore_eos": True}
        body |= {} if salt is None else {"cache_salt": salt, "kv_transfer_params": _COMPUTE}
        if isinstance(prompt, str) and not self._settings.chat:
            return "/v1/completions", body | {"prompt": prompt}
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return "/v1/chat/completions", body | {"messages": messages}

    # -- pairs -------------------------------------------------------------------------------------

    def _measure(self, prompts: Sequence[Prompt]) -> None:
        """Send pairs, as many at a time as the settings say. A round that is not complete does not count."""
        size, result = self._settings.concurrency, self.result
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            if result.pairs // size % 2:
                loading = self._send_round(batch, None)
                without = self._send_round(batch, self._salt)
            else:
                without = self._send_round(batch, self._salt)
                loading = self._send_round(batch, None)
            result.loading.add(loading)
            result.without.add(without)
            off, on = format_ms(without.first_ms(50)), format_ms(loading.first_ms(50))
            pair = f"pair {result.pairs} of {self._settings.pairs}"
            self._tell(f"{pair}: first token {off} without loading, {on} with it")

    def _send_round(self, batch: Sequence[Prompt], salt: str | None) -> Side:
        """Send a request for each prompt, together, and return what was measured."""
        side, before, start = Side(), self._counts(), self._clock()
        requests = [self._request(prompt, self._settings.answer_tokens, salt) for prompt in batch]
        futures = [self._threads.submit(self._server.stream, *one, self._deadline) for one in requests]
        # In slices: a Ctrl-C that the system hands to another thread does not end a wait of this one.
        while wait(futures, timeout=_SLICE).not_done:
            pass
        side.answers = [future.result() for future in futures]
        side.seconds = self._clock() - start
        patience = time.monotonic() + _METRICS_LAG
        while True:
            change = self._counts() - before  # without what has not grown
            foreign = sum(change["source", source] for source in SOURCES) - side.prompt_tokens
            if foreign >= 0 or time.monotonic() > patience:
                break
            time.sleep(0.02)
        for (what, name), number in change.items():
            {"source": side.sources, "miss": side.misses, "promoted": side.promoted}[what][name] = number
        self.result.foreign_tokens += max(foreign, 0)
        return side

    def _metrics(self) -> str:
        url = f"{self._server.url}/metrics"
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise TimeOver(f"{url}: no time is left")
        try:
            return fetch(url, min(_METRICS_TIMEOUT, remaining))
        except (OSError, HTTPException, ValueError) as error:
            kind = TimeOver if self._clock() >= self._deadline else OutsideError
            raise kind(f"{url}: expected vLLM's metrics: {describe_failure(error)}") from None

    def _counts(self) -> Counter[tuple[str, str]]:
        """Return the server's totals, over all its engines."""
        counts: Counter[tuple[str, str]] = Counter()
        for name, labels, value in read_samples(self._metrics(), tuple(_COUNTED)):
            if name in _COUNTED:
                if not 0 <= value <= _LARGEST_COUNT:  # NaN is refused, too
                    url = f"{self._server.url}/metrics"
                    raise OutsideError(f"{url}: expected a count in {name}, got {value:g}")
                what, label = _COUNTED[name]
                counts[what, labels.get(label, "")] += int(value)
        return counts


def _capacity(text: str) -> int:
    """Return the tokens for which the server's own caches have room; 0 if the metrics do not tell."""
    total = 0
    for _, labels, _ in read_samples(text, ("vllm:cache_config_info",)):
        sizes = [labels.get(name, "") for name in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")]
        tokens, blocks, block_size = (
            int(size) if size.isdecimal() and len(size) < 19 else 0 for size in sizes
        )
        total += max(tokens, blocks * block_size)
    return total
