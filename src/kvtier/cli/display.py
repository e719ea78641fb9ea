"""Shows `kvtier demo`: the runs while they go on, and the tables at the end.

If the model talks, each question stays on the screen with the words of its answer, which are shown as they
come. On a terminal there is a live table of the runs, elsewhere a line for each quarter of a run. A table
that is too wide becomes lines that wrap: nothing is cut off. Only one thread may use it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvtier.demo.result import RUNS, DemoResult, RequestResult, RestartResult, RunResult
from kvtier.demo.setup import Turn
from kvtier.demo.summary import (
    OWN_RUNS,
    RESTART_RUNS,
    Row,
    describe_fit,
    describe_model,
    describe_restart,
    describe_tiers,
    format_ms,
    summarize,
    summarize_restart,
)
from kvtier.demo.talk import Talk

_ALL_NAMES = OWN_RUNS | RESTART_RUNS
_FEW = 8
"""A run with fewer requests gets a single line, at its end."""
_REFRESH_SECONDS = 0.125
_SHOWN = ("off", "on", "disk")
"""The runs whose answers stay on the screen. The others repeat them once more."""


@dataclass(slots=True)
class _Run:
    """One line of the display."""

    name: str
    total: int
    started: float = field(default_factory=time.perf_counter)
    requests: list[RequestResult] = field(default_factory=list)
    wall: float | None = None

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """Return the texts beside the bar."""
        result = RunResult(tuple(self.requests), self.wall or time.perf_counter() - self.started)
        return (
            f"{len(self.requests)}/{self.total}",
            f"{result.from_gpu:,}",
            f"{sum(result.from_tiers.values()):,}" if self.name != "off" else "–",
            f"{result.recomputed:,}",
            format_ms(result.ttft_ms(50)) if self.requests else "",
            f"{result.wall_seconds:.0f} s",
        )


class ProgressDisplay:
    """Watches a demo. Use it as a context."""

    def __init__(self, console: Console, talk: Talk | None = None) -> None:
        self._console, self._talk = console, talk
        self._runs: dict[str, _Run] = {}
        self._answers: dict[Turn, Text] = {}
        """The answers that are on their way, with their questions."""
        # Drawn by this thread alone: another one would draw between two lines that are printed above.
        self._live = Live(console=console, get_renderable=self._render, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """Print a remark above the display."""
        self._console.print(f"note: {text}", style="yellow", soft_wrap=True)

    def begin(self, run: str, requests: int) -> None:
        """Add a line for a run."""
        self._runs[run] = _Run(run, requests)
        if self._talk is not None:
            where = "" if run in OWN_RUNS else f", in {RUNS[run].process.value}"
            self._console.print(Text(f"\n{_ALL_NAMES[run]}{where}", style="bold cyan"))

    def hear(self, run: str, turn: Turn, tokens: Sequence[int]) -> None:
        """Show the words of an answer that have come."""
        if self._talk is not None:
            text = Text(f"chat {turn.conversation}: {self._talk.questions[turn]}\n", style="bold")
            self._answers[turn] = text.append(self._talk.text_of(tokens), style="not bold")
        if self._live.is_started and time.perf_counter() - self._drawn > _REFRESH_SECONDS:
            self._live.refresh()
            self._drawn = time.perf_counter()

    def advance(self, run: str, request: RequestResult) -> None:
        """Count a request of a run."""
        line = self._runs[run]
        line.requests.append(request)
        answer = self._answers.pop(Turn(request.conversation, request.turn), None)
        self._live.refresh()
        if answer is not None and run in _SHOWN:
            self._console.print(answer)
            self._console.print(Text(self._describe(run, request), style="dim"))
            return
        done, parts = len(line.requests), 4 if line.total >= _FEW else 1
        if not self._console.is_terminal and done * parts // line.total > (done - 1) * parts // line.total:
            self._console.print(_sentence(line), soft_wrap=True)

    def end(self, run: str, result: RunResult) -> None:
        """Stop the clock of a run."""
        self._runs[run].wall = result.wall_seconds

    def _describe(self, run: str, request: RequestResult) -> str:
        """Describe when the first token came, and where the prompt's tokens came from."""
        loaded = {"GPU": request.from_gpu, "pool": request.from_tiers.get("cpu", 0)}
        loaded |= {"disk": request.from_tiers.get("disk", 0), "computed": request.recomputed}
        sources = ", ".join(f"{tokens:,} {source}" for source, tokens in loaded.items() if tokens)
        was = {(asked.conversation, asked.turn): asked.ttft * 1000 for asked in self._runs["off"].requests}
        without = "" if run == "off" else f", was {format_ms(was[request.conversation, request.turn])}"
        time = f"{format_ms(request.ttft * 1000)}{without}"
        return f"  first token {time}; {request.prompt_tokens:,} tokens: {sources}"

    def _render(self) -> RenderableType:
        if not self._runs:
            return Text("loading the model …", style="dim")
        table = self._table()
        lines = (
            [table] if _fits(self._console, table) else [Text(_sentence(run)) for run in self._runs.values()]
        )
        return Group(*self._answers.values(), *lines)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for heading in ("", ""):
            table.add_column(heading)
        for heading in ("requests", "GPU", "loaded", "recomputed", "TTFT p50", ""):
            table.add_column(heading, justify="right", no_wrap=True)
        for line in self._runs.values():
            bar = ProgressBar(total=line.total, completed=len(line.requests), width=14)
            table.add_row(_ALL_NAMES[line.name], bar, *line.cells())
        return table


def _sentence(line: _Run) -> str:
    """Return everything that the live table shows, as a sentence."""
    count, gpu, loaded, recomputed, ttft, wall = line.cells()
    tokens = f"tokens from GPU {gpu}, loaded {loaded}, recomputed {recomputed}"
    name = _ALL_NAMES[line.name]
    return f"{name}: {count} requests in {wall}, {tokens}, first token p50 {ttft}".removesuffix(" ")


def _fits(console: Console, table: Table) -> bool:
    """Return whether a terminal is wide enough for a table whose cells do not wrap."""
    return console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width


def print_rows(console: Console, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Print a table of two runs of these names, or lines if it is too wide for the terminal."""
    table = _make_table(("", *names, ""), rows)
    console.print(table if _fits(console, table) else _list(names, rows))


def _list(names: Sequence[str], rows: Iterable[Row]) -> Text:
    """Write each row of the result in two lines."""
    text = Text(f"\n{' → '.join(names)}\n", style="bold")
    for row in rows:
        values = f"{row.off} → {row.on}" if row.off else row.on
        text.append(f"{row.label}\n", style="not bold")
        text.append(f"    {values}{'  ' if row.change else ''}{row.change}\n")
    return text


def print_result(console: Console, result: DemoResult) -> None:
    """Print which model ran, the runs side by side, and the verdict."""
    console.print(Text(f"model: {describe_model(result)}"))
    print_rows(console, list(OWN_RUNS.values()), list(summarize(result)))
    if result.restart is not None:
        _print_restart(console, result.restart)
    if fit := describe_fit(result):
        console.print(Text(fit, style="yellow"), soft_wrap=True)
    if result.difference is None:
        runs = "both" if result.restart is None else "all"
        tokens = f"all {result.compared_tokens:,} generated tokens are the same in {runs} runs"
        console.print(Text(f"✓ identical: {tokens}", style="bold green"), soft_wrap=True)
        return
    console.print(Text(f"✗ tokens differ, first in {result.difference}", style="bold red"), soft_wrap=True)
    if (compute := result.config.get("engine", {}).get("compute_dtype")) != "float64":
        console.print(
            f"In {compute}, rounding depends on the batch; --compute-dtype float64 rules that out.",
            soft_wrap=True,
        )


def _make_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if table.columns else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _print_restart(console: Console, restart: RestartResult) -> None:
    """Print the run over a disk: its description, its table, and the tier's counts."""
    console.print(Text(describe_restart(restart)))
    rows = list(summarize_restart(restart))
    table = _make_table(("", *RESTART_RUNS.values()), rows)
    lines = "\n".join(f"{label}\n    {' → '.join(values)}" for label, *values in rows)
    console.print(table if _fits(console, table) else Text(f"\n{lines}\n"))
    for line in describe_tiers(restart):
        console.print(Text(line))
