"""The figures of the demo's report: four of the two runs, and one of the run over a disk.

Each function takes a result and returns one SVG. All are pure; any thread may call them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvtier.demo.result import DemoResult, RequestResult, RestartResult, RunResult
from kvtier.demo.summary import OWN_RUNS, RESTART_RUNS, format_ms
from kvtier.report.plots import BOTTOM, LEFT, RIGHT, TOP, Linear, Log, Plot, format_count, format_time

RUNS = tuple(OWN_RUNS.items())
SOURCES = (("gpu", "from the GPU cache"), ("cpu", "loaded from the pool"), ("recomputed", "recomputed"))

RESTART = tuple(zip(("recomputed", "cpu", "disk"), RESTART_RUNS.values(), strict=True))
"""The runs over a disk in their order, and their colours."""


class Figure(NamedTuple):
    """A plot with its title, caption and legend. The legend pairs CSS classes with words."""

    title: str
    caption: str
    legend: tuple[tuple[str, str], ...]
    svg: str


def figures(result: DemoResult) -> Iterator[Figure]:
    """Yield the figures of the two runs in the order of the page."""
    caption = "One pair of dots for each request, in the order of asking."
    yield Figure("Time to first token of each request", caption, RUNS, _ttft(result))
    caption = "How many of the requests had their first token by then."
    yield Figure("Distribution of the time to first token", caption, RUNS, _ecdf(result))
    caption = "Mean over the requests of a turn: left without kvtier, right with it."
    yield Figure("Where prompt tokens came from", caption, SOURCES, _sources(result))
    caption = "Summed up over the run. Lower is better."
    yield Figure("Prompt tokens computed so far", caption, RUNS, _computed(result))


def restart_figure(restart: RestartResult) -> Figure:
    """Return the figure of the run over a disk."""
    caption = "The same prompts three times. Bars are medians, dots are requests. Lower is better."
    return Figure("First token, before and after a kill", caption, RESTART, _restart(restart))


def _ttft(result: DemoResult) -> str:
    runs = {"off": result.off.requests, "on": result.on.requests}
    count = len(result.on.requests)
    y = Log.around(request.ttft * 1000 for requests in runs.values() for request in requests)
    plot = Plot(
        "Time to first token of each request without and with kvtier",
        Linear(0.5, count + 0.5),
        y,
        x_label="request, in the order of asking",
        y_label="time to first token (log scale)",
    )
    plot.y_axis((tick, format_time(tick)) for tick in y.ticks())
    _mark_turns(plot, result.on.requests)
    for number, (off, on) in enumerate(zip(runs["off"], runs["on"], strict=True), 1):
        plot.line([(number, off.ttft * 1000), (number, on.ttft * 1000)], "link")
    for name, requests in runs.items():
        for number, request in enumerate(requests, 1):
            plot.dot(
                (number, request.ttft * 1000), name, f"{_name(request)}: {format_ms(request.ttft * 1000)}"
            )
    return plot.svg()


def _mark_turns(plot: Plot, requests: Sequence[RequestResult]) -> None:
    """Shade every other turn, and label the turns or, if there is no room, some request numbers."""
    turns = [request.turn for request in requests]
    bounds = {
        turn: (turns.index(turn) + 0.5, len(turns) - turns[::-1].index(turn) + 0.5)
        for turn in sorted(set(turns))
    }
    for turn, (start, end) in bounds.items():
        if turn % 2 == 0:
            plot.band(start, end, "band")
    if all(plot.x(end) - plot.x(start) > 46 for start, end in bounds.values()):
        for turn, (start, end) in bounds.items():
            plot.text((plot.x(start) + plot.x(end)) / 2, BOTTOM + 20, f"turn {turn}", "tick")
    else:
        plot.x_axis(_whole_numbers(len(turns)))


def _whole_numbers(count: int) -> list[tuple[float, str]]:
    return [(tick, f"{tick:.0f}") for tick in Linear(0, max(count, 1)).ticks() if tick == int(tick) > 0]


def _ecdf(result: DemoResult) -> str:
    runs = {name: sorted(request.ttft * 1000 for request in run.requests) for name, run in result.both()}
    x, y = Log.around([*runs["off"], *runs["on"]]), Linear(0, 1.04)
    plot = Plot(
        "Share of requests that had their first token by a given time, without and with kvtier",
        x,
        y,
        x_label="time to first token (log scale)",
        y_label="share of requests",
    )
    plot.y_axis((share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1))
    plot.x_axis(spaced(plot, ((tick, format_time(tick)) for tick in x.ticks())), grid=True)
    for name, times in runs.items():
        corners = [(x.low, 0.0)]
        for rank, time in enumerate(times):
            corners += [(time, rank / len(times)), (time, (rank + 1) / len(times))]
        plot.line([*corners, (x.high, 1.0)], name)
    return plot.svg()


def spaced(plot: Plot, labels: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the labels without those that would touch the one before."""
    kept: list[tuple[float, str]] = []
    for value, label in labels:
        if not kept or plot.x(value) - plot.x(kept[-1][0]) > 60:
            kept.append((value, label))
    return kept


def _sources(result: DemoResult) -> str:
    turns = sorted({request.turn for request in result.on.requests})
    bars = [(turn, name, _mean_sources(run, turn)) for turn in turns for name, run in result.both()]
    y = Linear.up_to(sum(parts.values()) for _, _, parts in bars)
    plot = Plot(
        "Prompt tokens of a request by source, for each turn, without and with kvtier",
        Linear(0, max(len(turns), 1)),
        y,
        x_label="turn of the conversation",
        y_label="prompt tokens of a request",
    )
    plot.y_axis((tick, format_count(tick)) for tick in y.ticks())
    room = (RIGHT - LEFT) / max(len(turns), 1)
    width = min(room * 0.36, 46)
    for turn, name, parts in bars:
        middle = LEFT + (turns.index(turn) + 0.5) * room
        left = middle - width - 1.5 if name == "off" else middle + 1.5
        _stack(plot, left, width, parts, f"turn {turn}, {dict(RUNS)[name]}")
        if name == "on" and (room > 24 or turn % 5 == 0):
            plot.text(middle, BOTTOM + 20, str(turn), "tick")
    return plot.svg()


def _mean_sources(run: RunResult, turn: int) -> dict[str, float]:
    requests = [request for request in run.requests if request.turn == turn]
    sums = {
        "gpu": sum(request.from_gpu for request in requests),
        "cpu": sum(sum(request.from_tiers.values()) for request in requests),
        "recomputed": sum(request.recomputed for request in requests),
    }
    return {source: tokens / max(len(requests), 1) for source, tokens in sums.items()}


def _stack(plot: Plot, left: float, width: float, parts: dict[str, float], what: str) -> None:
    """Draw one bar, with the sources stacked."""
    below = 0.0
    for source, label in SOURCES:
        if tokens := parts[source]:
            top, bottom = plot.y(below + tokens), plot.y(below)
            plot.rect_px(left, top, width, bottom - top, f"fill {source}", f"{what}: {tokens:,.0f} {label}")
            below += tokens


def _computed(result: DemoResult) -> str:
    runs = {
        name: list(accumulate(request.recomputed for request in run.requests)) for name, run in result.both()
    }
    y = Linear.up_to(sums[-1] for sums in runs.values() if sums)
    count = len(result.on.requests)
    plot = Plot(
        "Prompt tokens computed up to each request, without and with kvtier",
        Linear(0, max(count, 1)),
        y,
        x_label="request, in the order of asking",
        y_label="prompt tokens computed",
    )
    plot.y_axis((tick, format_count(tick)) for tick in y.ticks())
    plot.x_axis([(0, "0"), *_whole_numbers(count)])
    for name, sums in runs.items():
        plot.line([(0, 0), *enumerate(sums, 1)], name)
    ends = {name: plot.y(sums[-1]) - 9 for name, sums in runs.items() if sums}
    if ends and ends["on"] - ends["off"] < 16:  # the labels are too close to be above both lines
        ends["on"] = ends["off"] + 32
    for name, height in ends.items():
        plot.text(RIGHT, max(height, TOP + 4), f"{runs[name][-1]:,}", f"value {name}")
    return plot.svg()


def _restart(restart: RestartResult) -> str:
    times = [[request.ttft * 1000 for request in run.requests] for run in restart.runs.values()]
    y = Linear.up_to(time for run in times for time in run)
    plot = Plot(
        "Time to first token of the same prompts: computed, from the pool, from disk after a kill",
        Linear(0, len(RESTART)),
        y,
        x_label="the process was killed between pool and disk",
        y_label="time to first token",
    )
    plot.y_axis((tick, format_time(tick)) for tick in y.ticks())
    runs = zip(RESTART, restart.runs.values(), times, strict=True)
    for position, ((css, label), run, shown) in enumerate(runs):
        middle, median = plot.x(position + 0.5), run.ttft_ms(50)
        top = plot.y(median)
        plot.rect_px(middle - 54, top, 60, BOTTOM - top, f"fill {css}", f"{label}: {format_ms(median)}")
        plot.text(middle - 24, max(top - 8, TOP + 4), format_ms(median), "median")
        for number, (request, time) in enumerate(zip(run.requests, shown, strict=True)):
            x = position + 0.6 + 0.2 * number / len(shown)
            plot.dot((x, time), "single", f"{_name(request)}: {format_ms(time)}")
        plot.text(middle, BOTTOM + 20, ("computed", "pool", "disk")[position], "tick")
    return plot.svg()


def _name(request: RequestResult) -> str:
    return f"conversation {request.conversation}, turn {request.turn}"
