"""The page of `kvtier bench`: figures, plots and how they were measured, in one HTML file to send on.

It is made of the parts of the demo's report, and like it loads nothing. Everything here is pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from html import escape

from kvtier.bench.result import SOURCES, BenchResult, Side
from kvtier.demo.summary import format_ms
from kvtier.report.figures import Figure
from kvtier.report.page import indent, make_figure, make_page, make_section, make_table, make_tile
from kvtier.report.plots import BOTTOM, Linear, Log, Plot, format_count, format_time

SIDES = (("off", "without loading"), ("on", "with loading"))
_COLOURS = dict(zip(SOURCES, ("gpu", "cpu", "recomputed"), strict=True))


def render_bench(result: BenchResult, *, command: Sequence[str] = ()) -> str:
    """Return the page. `command` is the command line that repeats the run."""
    rows = [(indent(row.label), row.off, row.on, row.change) for row in result.rows()]
    head = ("", *(words for _, words in SIDES), "")
    body = [
        _headline(result),
        '<section class="plots">',
        *(make_figure(figure) for figure in _figures(result) if result.pairs),
        "</section>",
        make_section("Both sides", make_table(head, rows) + _paragraphs(result.remarks())),
        make_section("How this was measured", _method(result, command)),
    ]
    return make_page(escape(f"kvtier bench: {result.verdict()}; {result.model}"), body)


def _headline(result: BenchResult) -> str:
    sides = result.without, result.loading
    tiles = [
        (f"{name}, {word}", *(format_ms(ms(side, percent)) for side in sides))
        for name, ms in (("first token", Side.first_ms), ("inter-token", Side.gap_ms))
        for percent, word in ((50, "median"), (99, "p99"))
    ]
    same = result.pairs - len(result.different)
    good = result.pairs and not result.different
    badge = f"{'✓' if good else '✗'} {same} of {result.pairs} pairs of answers are the same"
    loaded = result.loading.sources["external_kv_transfer"] / max(sum(result.loading.sources.values()), 1)
    return f"""<header>
<p class="brand">kvtier bench</p>
<h1>{escape(result.verdict())} <span class="model">{escape(result.model)} at {escape(result.url)}</span></h1>
<p class="badge {"good" if good else "bad"}">{badge}</p>
<p class="lead">{result.pairs} pairs of requests went to a running server. {loaded:.0%} of the prompt tokens
came from kvtier where a request was allowed to load; where it was not, the server computed them.</p>
<div class="tiles">{"".join(make_tile(*values) for values in tiles)}</div>
</header>"""


def _figures(result: BenchResult) -> Iterator[Figure]:
    caption = "One pair of dots for each pair of requests, in the order of sending."
    yield Figure("First token of each pair", caption, SIDES, _first_tokens(result))
    legend = tuple((css, SOURCES[source]) for source, css in _COLOURS.items())
    caption = "Counted by the server's metrics, summed up over all pairs."
    yield Figure("Where prompt tokens came from", caption, legend, _sources(result))


def _first_tokens(result: BenchResult) -> str:
    times = [[answer.first * 1000 for answer in side.answers] for side in (result.without, result.loading)]
    y = Log.around(time for side in times for time in side)
    plot = Plot(
        "Time to first token of each pair, without and with loading",
        Linear(0.5, result.pairs + 0.5),
        y,
        x_label="pair",
        y_label="time to first token (log scale)",
    )
    plot.y_axis((tick, format_time(tick)) for tick in y.ticks())
    step = -(-result.pairs // 10)
    plot.x_axis((number, f"{number}") for number in range(1, result.pairs + 1, step))
    for number, pair in enumerate(zip(*times, strict=True), 1):
        plot.line([(number, time) for time in pair], "link")
        for (css, words), time in zip(SIDES, pair, strict=True):
            plot.dot((number, time), css, f"pair {number}, {words}: {format_ms(time)}")
    return plot.svg()


def _sources(result: BenchResult) -> str:
    sides = result.without.sources, result.loading.sources
    y = Linear.up_to(sum(side.values()) for side in sides)
    plot = Plot(
        "Prompt tokens by source, without and with loading",
        Linear(0, 2),
        y,
        x_label="",
        y_label="prompt tokens",
    )
    plot.y_axis((tick, format_count(tick)) for tick in y.ticks())
    for position, ((_, words), side) in enumerate(zip(SIDES, sides, strict=True)):
        middle, below = plot.x(position + 0.5), 0
        for source, css in _COLOURS.items():
            top, bottom = plot.y(below + side[source]), plot.y(below)
            tip = f"{words}: {side[source]:,} {SOURCES[source]}"
            plot.rect_px(middle - 48, top, 96, bottom - top, f"fill {css}", tip)
            below += side[source]
        plot.text(middle, BOTTOM + 20, words, "tick")
    return plot.svg()


def _method(result: BenchResult, command: Sequence[str]) -> str:
    repeat = f"<p>Repeat it:</p><pre>{escape(shlex.join(command))}</pre>" if command else ""
    settings = [
        (name.replace("_", " "), _setting(value))
        for name, value in result.settings.items()
        if value is not None
    ]
    return f"""<p>Each prompt was sent once, so that kvtier stored it. Then the server's own prefix cache was
emptied, by a reset or by other prompts that filled it. Then the pairs followed: one request that may load
what kvtier keeps, and one that may neither load nor store (max_load_tokens and max_offload_tokens are 0) and
has another cache salt, so that the server computes it as it would without kvtier. Which of the two goes
first changes from pair to pair. Answers are greedy and streamed; times are those of the client.</p>
{repeat}
{make_table(("setting", "value"), settings, css="words")}"""


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}".removesuffix(".0") if isinstance(value, int | float) else str(value)


def _paragraphs(sentences: Iterator[str]) -> str:
    return "".join(f'<p class="soft">{escape(sentence)}</p>' for sentence in sentences)
