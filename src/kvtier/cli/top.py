"""`kvtier top`: engines live in a terminal, from their `/metrics`.

Each server is asked on a thread of its own, one request at a time, so that one that hangs stops neither the
others nor the keys. The threads do not keep the process alive. Rates are the changes between two scrapes,
divided by the time between them. All else belongs to the main thread.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Annotated, NamedTuple

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from kvtier.cli.scrape import EngineSample, Scrape, read_url, scrape
from kvtier.cli.streams import ending_quietly
from kvtier.config import format_size

_TIMEOUT = 2.0
_LATENESS = 0.5
"""Seconds after which a snapshot no longer waits for a thread whose request should have ended."""
_LARGEST = 1e18
"""Larger figures are no counts, and are shown as not known."""
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
        self._clock = clock
        self._names = {url: url.partition("://")[2].removesuffix("/metrics") for url in urls}
        self._before: dict[str, tuple[float, EngineSample]] = {}
        self._engines: dict[str, list[EngineFigures]] = {}
        self._problems = {url: Problem(name, "no answer yet") for url, name in self._names.items()}
        self.has_rates = False

    @property
    def engines(self) -> list[EngineFigures]:
        """The figures of all engines, in the order of their servers."""
        return [engine for url in self._names for engine in self._engines.get(url, ())]

    @property
    def problems(self) -> list[Problem]:
        """The servers of which nothing can be shown."""
        return [self._problems[url] for url in self._names if url in self._problems]

    def take(self, scrapes: Mapping[str, Scrape]) -> None:
        """Take in one scrape of each of these servers; the others stay as they are."""
        now = self._clock()
        self.has_rates = self.has_rates or any(url in self._engines for url in scrapes)
        for url, scraped in scrapes.items():
            self._engines[url] = []
            self._problems.pop(url, None)
            if scraped.problem is not None:
                self._problems[url] = Problem(self._names[url], scraped.problem)
            for label, sample in scraped.engines.items():
                name = self._names[url]
                full = f"{name} #{label}" if len(scraped.engines) > 1 else name
                key = f"{url} {label}"
                then, before = self._before.get(key, (now, None))
                self._engines[url].append(_figures(full, sample, before, now - then))
                self._before[key] = now, sample


class Scraper:
    """Asks servers, each on a thread of its own. A server that has not answered yet is not asked again.

    The threads call `ring` when a server has answered.
    """

    def __init__(self, urls: Sequence[str], ring: Callable[[], None] = lambda: None) -> None:
        self._urls, self._ring, self._pending = urls, ring, set[str]()
        self._found: SimpleQueue[tuple[str, Scrape]] = SimpleQueue()

    def start(self) -> None:
        """Ask every server that is not being asked."""
        for url in self._urls:
            if url not in self._pending:
                self._pending.add(url)
                Thread(target=self._ask, args=[url], name="kvtier-top", daemon=True).start()

    def take_found(self) -> dict[str, Scrape]:
        """Return what has come since the last call."""
        found: dict[str, Scrape] = {}
        with suppress(Empty):
            while True:
                url, found[url] = self._found.get_nowait()
                self._pending.discard(url)
        return found

    def wait_all(self, seconds: float) -> dict[str, Scrape]:
        """Wait for every server, for so long at most, and return what has come or that nothing has."""
        late = Scrape({}, f"unreachable: no answer in {seconds:g} s")
        found, deadline = dict.fromkeys(self._urls, late), time.monotonic() + seconds
        with suppress(Empty):
            while self._pending:
                url, found[url] = self._found.get(timeout=max(deadline - time.monotonic(), 0.0))
                self._pending.discard(url)
        return found

    def _ask(self, url: str) -> None:
        self._found.put((url, scrape(url, _TIMEOUT)))
        self._ring()


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
            return _finite(self.since(upper) / self.since(lower))
        return _finite(self.total(upper) / self.total(lower)) if self.total(lower) > 0 else None

    def share(self, used: str, capacity: str) -> float | None:
        if used not in self._now or not self.total(capacity):
            return None
        return _finite(self.total(used) / self.total(capacity))


def _finite(value: float | None) -> float | None:
    """Return a figure, or `None` for one that is not known, or that cannot be true."""
    return value if value is not None and math.isfinite(value) and abs(value) <= _LARGEST else None


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
        misses=dict(
            sorted(
                ((reason, count) for reason, count in sample.misses.items() if _finite(count) is not None),
                key=lambda item: -item[1],
            )
        ),
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

    After a single scrape there are no rates, and totals take their place. A table that is too wide becomes
    lines that wrap.
    """
    engines = sorted(watch.engines, key=lambda engine: _sort_value(engine, sort))
    parts: list[RenderableType] = []
    if engines:
        parts.append(_engines_table(engines, watch.has_rates, width, sort))
    if any(engine.tiers for engine in engines):
        parts.append(_tiers_table(engines, watch.has_rates, width))
    for engine in engines:
        if engine.misses:
            few = list(engine.misses.items())[:_REASONS]
            told = ", ".join(f"{reason} {count:,.0f}" for reason, count in few)
            parts.append(Text(f" misses of {engine.name}: {told}"))
    for name, problem in watch.problems:
        parts.append(Text(f" {name}: {problem}", style="red"))
    if status:
        parts.append(Text(f" {status}", style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Text]], width: int, sort: str) -> RenderableType:
    """Return a table, or a line with all cells for each row if that does not fit."""
    headings = [f"{column}▾" if column == sort else column for column in columns]
    sizes = [
        max(cell_len(heading), *(cell.cell_len for cell in cells)) + 2
        for heading, cells in zip(headings, zip(*rows, strict=True), strict=True)
    ]
    if sum(sizes) > width:
        lines = []
        for name, *cells in rows:
            line = Text(" ").append_text(Text(name.plain, style="bold"))
            for heading, cell in zip(headings[1:], cells, strict=True):
                line.append(f"  {heading} ", style="dim").append_text(cell)
            lines.append(line)
        return Group(Text(), *lines)
    table = Table(
        box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), expand=True
    )
    table.add_column(headings[0], no_wrap=True, ratio=1)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _engines_table(
    engines: Sequence[EngineFigures], has_rates: bool, width: int, sort: str
) -> RenderableType:
    wide = width >= _WIDE
    rates, totals = ["loaded/s", "computed/s"] if has_rates else [], ["loaded", "computed"]
    columns = ["engine", *(rates or totals), "hit", "pool", "GB/s", "load ms", "saved"]
    columns += [*(totals if rates else ()), "of pool", "failed"] if wide else []
    rows = []
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
        rows.append([Text(engine.name), *map(Text, cells)])
    return _table(columns, rows, width, sort)


def _tiers_table(engines: Sequence[EngineFigures], has_rates: bool, width: int) -> RenderableType:
    moved = ["in MB/s", "out MB/s"] if has_rates else ["in MB", "out MB"]
    columns, rows = ["engine", "tier", "used", *moved, "GB/s", "read ms", "failed", "state"], []
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
            rows.append([Text(engine.name), *map(Text, cells), state])
    return _table(columns, rows, width, "")


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
    if once or as_json or not console.is_terminal:
        scraper = Scraper(addresses)
        scraper.start()
        watch.take(scraper.wait_all(_TIMEOUT + _LATENESS))
        if as_json:
            engines = [asdict(engine) for engine in watch.engines]
            problems = [problem._asdict() for problem in watch.problems]
            typer.echo(json.dumps({"engines": engines, "problems": problems}))
        else:
            console.print(render(watch, console.width))
        raise typer.Exit(1 if watch.problems else 0)
    bell, ringer = socket.socketpair()

    def ring() -> None:
        with suppress(OSError):  # it has rung often enough, or the command has ended
            ringer.send(b"x", socket.MSG_DONTWAIT)

    with bell, ringer, ending_quietly(), _keys(bell) as read_key:
        _run(watch, console, Scraper(addresses, ring), read_key, interval)


def _run(
    watch: Watch,
    console: Console,
    scraper: Scraper,
    read_key: Callable[[float], str],
    interval: float,
) -> None:
    """Show the figures until the user quits.

    `read_key` waits for a key, or for the answer of a server, for so many seconds at most.
    """
    sort, is_paused, due = 0, False, time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if time.monotonic() >= due:
                if not is_paused:
                    scraper.start()
                due = time.monotonic() + interval
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
            found = scraper.take_found()
            if found and not is_paused:
                watch.take(found)


@contextmanager
def _keys(bell: socket.socket) -> Iterator[Callable[[float], str]]:
    """Read single keys from the terminal, until the bell rings; without a terminal, only wait for that."""
    terminal = sys.stdin.fileno() if sys.stdin.isatty() else None
    sources = [bell] if terminal is None else [bell, terminal]

    def read_key(seconds: float) -> str:
        ready, _, _ = select.select(sources, [], [], seconds)
        if bell in ready:
            bell.recv(1 << 12)
        if terminal is None or terminal not in ready:
            return ""
        # A terminal that has gone has nothing to read.
        return os.read(terminal, 1).decode(errors="replace") or "q"

    if terminal is None:
        yield read_key
        return
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield read_key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
