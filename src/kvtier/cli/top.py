"""`kvtier top`: engines live in a terminal, from their `/metrics`.

Each server is asked on a thread of its own, so that one that hangs does not stop the others. Rates are the
changes between two scrapes, divided by the time between them. All else belongs to the main thread.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, NamedTuple

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from kvtier.cli.scrape import EngineSample, Scrape, read_url, scrape
from kvtier.cli.streams import ending_quietly
from kvtier.config import format_size

_TIMEOUT = 2.0
_WIDE = 110
_MOST_SERVERS = 256
_REASONS = 4
"""Reasons of misses that a line has room for."""
_SORTS = ("engine", "loaded/s", "computed/s", "hit", "pool", "saved")

_Urls = Annotated[list[str], Argument(metavar="URL...", help="HOST:PORT, or the address of /metrics.")]
_Interval = Annotated[float, Option(min=0.2, max=3600.0, help="Seconds between two scrapes.")]


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What is shown of a tier. Without a value, it is not known, or there is nothing yet to divide by."""

    name: str
    used: float | None
    """The share of its capacity."""
    promoted_bytes: float
    """Bytes that came from the tier."""
    demoted_bytes: float
    promoted_per_second: float | None
    demoted_per_second: float | None
    read_bandwidth: float | None
    """Bytes a second while it was reading."""
    read_seconds: float | None
    """The mean time of a promotion."""
    failures: float
    suspended: bool


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What is shown of an engine. Rates need two scrapes; a share or a mean is of the time between them, and
    since the engine's start if nothing happened in between.
    """

    name: str
    loaded_tokens: float
    computed_tokens: float
    loaded_per_second: float | None
    computed_per_second: float | None
    hit_rate: float | None
    used: float | None
    """The share of the pool that is taken."""
    capacity: float | None
    bandwidth: float | None
    """Bytes a second while loads were running."""
    load_seconds: float | None
    """The mean time of a load."""
    saved_seconds: float
    loads_failed: float
    misses: dict[str, float]
    tiers: tuple[TierFigures, ...]


class Problem(NamedTuple):
    """A server of which nothing can be shown."""

    name: str
    problem: str


class Watch:
    """Keeps the last scrape of each server, and the figures between it and the one before."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float]) -> None:
        self._urls, self._clock = urls, clock
        self._before: dict[str, tuple[float, EngineSample]] = {}
        self.engines: list[EngineFigures] = []
        self.problems: list[Problem] = []
        self.has_rates = False

    def take(self, scrapes: Sequence[Scrape]) -> None:
        """Take in one scrape of each server, in their order."""
        now = self._clock()
        self.has_rates = bool(self._before)
        self.engines, self.problems = [], []
        for url, scraped in zip(self._urls, scrapes, strict=True):
            name = url.partition("://")[2].removesuffix("/metrics")
            if scraped.problem is not None:
                self.problems.append(Problem(name, scraped.problem))
            for label, sample in scraped.engines.items():
                full = f"{name} #{label}" if len(scraped.engines) > 1 else name
                key = f"{url} {label}"
                then, before = self._before.get(key, (now, None))
                self.engines.append(_figures(full, sample, before, now - then))
                self._before[key] = now, sample


# -- figures ---------------------------------------------------------------------------------------


class _Change:
    """Totals now and their change since a scrape before, if there was one."""

    def __init__(self, now: Mapping[str, float], before: Mapping[str, float] | None, seconds: float) -> None:
        self._now, self._seconds = now, seconds
        fell = before is not None and any(
            now.get(name, 0.0) < value for name, value in before.items() if name.endswith("_total")
        )
        self._before = None if fell else before  # an engine that was started anew counts from 0

    def total(self, name: str) -> float:
        return _finite(self._now.get(name)) or 0.0

    def since(self, name: str) -> float:
        return self.total(name) - ((_finite(self._before.get(name)) or 0.0) if self._before else 0.0)

    def rate(self, name: str) -> float | None:
        return self.since(name) / self._seconds if self._before is not None and self._seconds > 0 else None

    def quotient(self, upper: str, lower: str) -> float | None:
        """Divide the changes or, if nothing happened, the totals."""
        if self.since(lower) > 0:
            return self.since(upper) / self.since(lower)
        return self.total(upper) / self.total(lower) if self.total(lower) > 0 else None

    def share(self, used: str, capacity: str) -> float | None:
        return (
            self.total(used) / self.total(capacity) if used in self._now and self.total(capacity) else None
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _figures(name: str, sample: EngineSample, before: EngineSample | None, seconds: float) -> EngineFigures:
    change = _Change(sample.values, None if before is None else before.values, seconds)
    loaded, asked = change.rate("loaded_tokens_total"), change.rate("asked_tokens_total")
    return EngineFigures(
        name=name,
        loaded_tokens=change.total("loaded_tokens_total"),
        computed_tokens=change.total("asked_tokens_total") - change.total("loaded_tokens_total"),
        loaded_per_second=loaded,
        computed_per_second=None if asked is None or loaded is None else asked - loaded,
        hit_rate=change.quotient("loaded_tokens_total", "asked_tokens_total"),
        used=change.share("used_bytes", "capacity_bytes"),
        capacity=_finite(sample.values.get("capacity_bytes")),
        bandwidth=change.quotient("load_bytes_total", "load_seconds_sum"),
        load_seconds=change.quotient("load_seconds_sum", "load_seconds_count"),
        saved_seconds=change.total("saved_seconds_total"),
        loads_failed=change.total("loads_failed_total"),
        misses=dict(sorted(sample.misses.items(), key=lambda item: -item[1])),
        tiers=tuple(
            _tier_figures(tier, values, None if before is None else before.tiers.get(tier), seconds)
            for tier, values in sample.tiers.items()
        ),
    )


def _tier_figures(
    name: str, values: Mapping[str, float], before: Mapping[str, float] | None, seconds: float
) -> TierFigures:
    change = _Change(values, before, seconds)
    return TierFigures(
        name=name,
        used=change.share("used_bytes", "capacity_bytes"),
        promoted_bytes=change.total("promoted_bytes_total"),
        demoted_bytes=change.total("demoted_bytes_total"),
        promoted_per_second=change.rate("promoted_bytes_total"),
        demoted_per_second=change.rate("demoted_bytes_total"),
        read_bandwidth=change.quotient("promoted_bytes_total", "promote_seconds_sum"),
        read_seconds=change.quotient("promote_seconds_sum", "promote_seconds_count"),
        failures=sum(change.total(f"{kind}_total") for kind in ("failed", "failed_checks", "late")),
        suspended=change.total("suspended") > 0,
    )


# -- the view --------------------------------------------------------------------------------------


def _sort_value(engine: EngineFigures, by: str) -> tuple[float, str]:
    """Return the place of an engine: the largest value first, then by name."""
    values = {
        "loaded/s": engine.loaded_per_second,
        "computed/s": engine.computed_per_second,
        "hit": engine.hit_rate,
        "pool": engine.used,
        "saved": engine.saved_seconds,
    }
    return -(values.get(by) or 0.0), engine.name


def render(watch: Watch, width: int, sort: str = "engine", status: str = "") -> RenderableType:
    """Return everything that is known, for a terminal of `width` columns.

    After a single scrape there are no rates, and totals take their place.
    """
    engines = sorted(watch.engines, key=lambda engine: _sort_value(engine, sort))
    parts: list[RenderableType] = []
    if engines:
        parts.append(_engines_table(engines, watch.has_rates, wide=width >= _WIDE, sort=sort))
    if any(engine.tiers for engine in engines):
        parts.append(_tiers_table(engines, watch.has_rates))
    for engine in engines:
        if engine.misses:
            few = list(engine.misses.items())[:_REASONS]
            told = ", ".join(f"{reason} {count:,.0f}" for reason, count in few)
            parts.append(Text(f" misses of {engine.name}: {told}", no_wrap=True, overflow="ellipsis"))
    for name, problem in watch.problems:
        parts.append(Text(f" {name}: {problem}", style="red", no_wrap=True, overflow="ellipsis"))
    if status:
        parts.append(Text(f" {status}", style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _table(name: str, columns: Sequence[str], sort: str = "") -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), expand=True
    )
    table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1, min_width=8)
    for column in columns:
        mark = "▾" if column == sort else ""
        table.add_column(f"{column}{mark}", justify="right", no_wrap=True)
    return table


def _engines_table(engines: Sequence[EngineFigures], has_rates: bool, wide: bool, sort: str) -> Table:
    rates, totals = ["loaded/s", "computed/s"] if has_rates else [], ["loaded", "computed"]
    columns = [*(rates or totals), "hit", "pool", "GB/s", "load ms", "saved"]
    columns += [*(totals if rates else ()), "of pool", "failed"] if wide else []
    table = _table("engine", columns, sort)
    for engine in engines:
        total_cells = [_count(engine.loaded_tokens), _count(engine.computed_tokens)]
        rate_cells = [_count(engine.loaded_per_second), _count(engine.computed_per_second)]
        cells = [
            *(rate_cells if has_rates else total_cells),
            _share(engine.hit_rate),
            _share(engine.used),
            _scaled(engine.bandwidth, 1e-9),
            _scaled(engine.load_seconds, 1e3),
            _duration(engine.saved_seconds),
        ]
        if wide:
            cells += total_cells if has_rates else []
            cells += ["–" if engine.capacity is None else format_size(int(engine.capacity))]
            cells += [_count(engine.loads_failed)]
        table.add_row(Text(engine.name), *map(Text, cells))
    return table


def _tiers_table(engines: Sequence[EngineFigures], has_rates: bool) -> Table:
    moved = ["in MB/s", "out MB/s"] if has_rates else ["in MB", "out MB"]
    table = _table("engine", ["tier", "used", *moved, "GB/s", "read ms", "failed", "state"])
    for engine in engines:
        for tier in engine.tiers:
            state = Text("suspended", style="bold red") if tier.suspended else Text("ok", style="green")
            cells = [
                tier.name,
                _share(tier.used),
                _scaled(tier.demoted_per_second if has_rates else tier.demoted_bytes, 1e-6),
                _scaled(tier.promoted_per_second if has_rates else tier.promoted_bytes, 1e-6),
                _scaled(tier.read_bandwidth, 1e-9),
                _scaled(tier.read_seconds, 1e3),
                _count(tier.failures),
            ]
            table.add_row(Text(engine.name), *map(Text, cells), state)
    return table


def _count(value: float | None) -> str:
    """Write a count in at most seven characters."""
    if value is None:
        return "–"
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 10_000:
            return f"{value:,.0f}{unit}"
        value /= 1000
    return f"{value:,.0f}P"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _scaled(value: float | None, factor: float) -> str:
    return "–" if value is None else f"{value * factor:,.1f}"


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:,.0f} h"


# -- the command -----------------------------------------------------------------------------------


def top_command(
    urls: _Urls,
    interval: _Interval = 2.0,
    once: Annotated[bool, Option("--once", help="Print one snapshot.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one snapshot as JSON.")] = False,
) -> None:
    """Watch engines in the terminal: loaded and computed tokens, tiers, misses. q quits, s sorts, p pauses.

    With --once or --json it exits with 1 if nothing can be shown of a server.
    """
    addresses = [read_url(url) for url in dict.fromkeys(urls)]
    if len(addresses) > _MOST_SERVERS:
        raise typer.BadParameter(f"expected at most {_MOST_SERVERS} servers, got {len(addresses)}")
    watch, console = Watch(addresses, time.monotonic), Console(highlight=False)
    with ThreadPoolExecutor(max_workers=len(addresses), thread_name_prefix="kvtier-top") as threads:

        def scrape_all() -> None:
            watch.take(list(threads.map(lambda url: scrape(url, _TIMEOUT), addresses)))

        if once or as_json or not console.is_terminal:
            scrape_all()
            if as_json:
                engines = [asdict(engine) for engine in watch.engines]
                problems = [problem._asdict() for problem in watch.problems]
                typer.echo(json.dumps({"engines": engines, "problems": problems}))
            else:
                console.print(render(watch, console.width))
            raise typer.Exit(1 if watch.problems else 0)
        with ending_quietly(), _keys() as read_key:
            _run(watch, console, scrape_all, read_key, interval)


def _run(
    watch: Watch,
    console: Console,
    scrape_all: Callable[[], None],
    read_key: Callable[[float], str],
    interval: float,
) -> None:
    """Show the figures until the user quits. `read_key` waits for a key for so many seconds at most."""
    sort, is_paused = 0, False
    with Live(console=console, screen=True, auto_refresh=False) as live:
        scrape_all()
        due = time.monotonic() + interval
        while True:
            state = "paused" if is_paused else f"every {interval:g} s"
            status = f"{state}   q quit   s sort ({_SORTS[sort]})   p pause"
            live.update(render(watch, console.width, _SORTS[sort], status), refresh=True)
            key = read_key(max(0.0, due - time.monotonic()))
            if key == "q":
                return
            if key == "s":
                sort = (sort + 1) % len(_SORTS)
            elif key in ("p", " "):
                is_paused = not is_paused
            if time.monotonic() >= due:
                if not is_paused:
                    scrape_all()
                due = time.monotonic() + interval


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read single keys from the terminal; without one, only wait."""
    if not sys.stdin.isatty():
        yield _wait
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def read_key(seconds: float) -> str:
        ready, _, _ = select.select([terminal], [], [], seconds)
        # A terminal that has gone has nothing to read.
        return (os.read(terminal, 1).decode(errors="replace") or "q") if ready else ""

    tty.setcbreak(terminal)
    try:
        yield read_key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
