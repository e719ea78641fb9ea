"""The metrics of a server: its `/metrics` fetched over HTTP within limits, and kvtier's of them read.

A server shows one engine or several (vLLM with data parallelism labels them), under the names `kvtier_…` or,
inside vLLM, `vllm:kvtier_…`. Lines that are not kvtier's, or not in Prometheus' text format, are skipped.
There is no state; any thread may call this.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.parse import urlsplit

from kvtier.cli.http import BoundedConnection
from kvtier.errors import InputError, show_text

_MOST_BYTES = 16 << 20
_PREFIXES = ("kvtier_", "vllm:kvtier_")
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\.)*"'
_LINE = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{({_LABEL}(?:,{_LABEL})*)?,?\}})?[ \t]+(\S+)(?:[ \t]+-?\d+)?"
)
_ONE_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_REPLACED = {"n": "\n"}


@dataclass(slots=True)
class EngineSample:
    """The values of one engine, without the prefix of their names."""

    values: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    """The values of each tier, without `tier_`."""
    misses: dict[str, float] = field(default_factory=dict)
    """The prompts by the reason of their first miss."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """The engines of one server by the label that tells them apart, or why there are none."""

    engines: dict[str, EngineSample]
    problem: str | None = None


def read_url(text: str) -> str:
    """Return the address of a server's metrics: `HOST:PORT` stands for `http://HOST:PORT/metrics`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = None
    if not valid or not url.isprintable() or " " in url:
        raise InputError(f"URL: expected HOST:PORT or http://HOST:PORT/metrics, got {text!r}")
    return parts._replace(path="/metrics").geturl() if parts.path in ("", "/") else url


def scrape(url: str, timeout: float, clock: Callable[[], float] = time.monotonic) -> Scrape:
    """Fetch and read a server's metrics. If it does not answer in time, the result says so."""
    try:
        text = fetch(url, timeout, clock)
    except (OSError, HTTPException, ValueError) as error:
        return Scrape({}, f"unreachable: {describe_failure(error)}")
    engines = parse(text)
    return Scrape(engines, None if engines else "reachable, but shows no metrics of kvtier")


def fetch(url: str, timeout: float, clock: Callable[[], float] = time.monotonic) -> str:
    """Return the text of a server's metrics; raise `OSError`, `HTTPException` or `ValueError`."""
    parts = urlsplit(url)
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    with closing(BoundedConnection(url, timeout, clock)) as connection:
        response = connection.request("GET", target)
        if response.status != 200:
            raise OSError(f"the server answered {response.status} {response.reason}".rstrip())
        data = response.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(f"more than {_MOST_BYTES >> 20} MiB of metrics")
    if response.length:
        raise OSError(f"the answer broke off {response.length:,} bytes before its end")
    return data.decode(errors="replace")


def describe_failure(error: Exception) -> str:
    """Return why a request failed, in one line."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return show_text(reason)


def read_samples(text: str, prefixes: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each metric in a text of Prometheus' format whose name begins so.

    Labels are ready to be shown.
    """
    for line in text.split("\n"):
        if not line.startswith(prefixes) or (match := _LINE.fullmatch(line.rstrip())) is None:
            continue
        name, labelled, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        yield name, {key: _unescape(text) for key, text in _ONE_LABEL.findall(labelled or "")}, value


def parse(text: str) -> dict[str, EngineSample]:
    """Read the engines in a text of Prometheus' format."""
    engines: dict[str, EngineSample] = {}
    for full_name, labels, value in read_samples(text, _PREFIXES):
        name = full_name.removeprefix("vllm:").removeprefix("kvtier_")
        if name.startswith("index_") or name.endswith("_created") or "le" in labels:
            continue  # of an index; when a counter was made; a bucket
        engine = engines.setdefault(labels.get("engine", ""), EngineSample())
        if name == "misses_total":
            engine.misses[labels.get("reason", "")] = value
        elif name.startswith("tier_"):
            engine.tiers.setdefault(labels.get("tier", ""), {})[name.removeprefix("tier_")] = value
        else:
            engine.values[name] = value
    return engines


def _unescape(text: str) -> str:
    return show_text(_ESCAPE.sub(lambda match: _REPLACED.get(match[1], match[1]), text))
