"""The page of a sweep: curves over capacity with policies as lines under the optimum, and a table.

It is made of the parts of the demo's report, so it is one file that loads nothing, follows light and dark
mode, and fits a phone. Everything here is pure; any thread may call it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from html import escape
from operator import attrgetter

from kvtier.config import format_size
from kvtier.report.figures import Figure, spaced
from kvtier.report.page import make_figure, make_page, make_section, make_table
from kvtier.report.plots import Linear, Log, Plot, format_time
from kvtier.simulate.sweep import CellResult
from kvtier.simulate.trace import Trace

_COLOURS = ("on", "gpu", "disk", "recomputed", "bad", "off")

Value = Callable[[CellResult], float]
Label = Callable[[float], str]


def table_of(results: Sequence[CellResult]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of all cells, without columns that say nothing."""
    head = ["memory", "disk", "policy", "chunk", "saved", "from memory", "from disk", "optimum"]
    head += ["first token p50", "first token p99", "if computed p50", "if computed p99", "tokens computed"]
    head += ["written a day", "flash lasts", "cost of 1M"]
    rows = [_row(result) for result in results]
    shown = [at for at in range(len(head)) if any(row[at] for row in rows)]
    return [head[at] for at in shown], [[row[at] for at in shown] for row in rows]


def _row(result: CellResult) -> list[str]:
    cell, has_disk, cost = result.cell, result.cell.disk_rows > 0, result.cost_per_million_tokens
    return [
        _size(cell.memory, cell.memory_bytes),
        _size(cell.disk, cell.disk_bytes) if has_disk else "",
        cell.policy,
        f"{cell.chunk_tokens}",
        f"{result.hit_rate:.2%}",
        f"{result.hit_rate_memory:.2%}" if has_disk else "",
        f"{result.hit_rate_disk:.2%}" if has_disk else "",
        f"{result.hit_rate_optimum:.2%}",
        seconds(result.first_token_p50),
        seconds(result.first_token_p99),
        seconds(result.compute_p50),
        seconds(result.compute_p99),
        f"{result.tokens_computed:,}",
        format_size(round(result.disk_written_per_day)) if has_disk else "",
        "" if result.flash_years is None else _years(result.flash_years),
        "" if cost is None else f"{cost:.3g}",
    ]


def _size(text: str, size: int) -> str:
    """Return a capacity as it was given; a share with its bytes."""
    return f"{text} = {format_size(size)}" if text.endswith("%") else text


def _hours(hours: float) -> str:
    return f"{hours:.2g} h" if hours >= 1 else f"{hours * 60:.2g} min"


def _years(years: float) -> str:
    return f"{years:.3g} years" if years >= 1 else f"{years * 365:.3g} days"


def seconds(value: float) -> str:
    """Return a time as text."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def describe_trace(trace: Trace) -> str:
    """Describe a trace in one line."""
    return (
        f"{trace.name} ({trace.kind}): {len(trace.requests):,} requests in {trace.seconds:,.0f} s,"
        f" {trace.prompt_tokens:,} prompt tokens"
    )


def remarks_on(results: Sequence[CellResult]) -> list[str]:
    """Return what a reader should know about the results, in sentences."""
    hours = [result.write_limit_hours for result in results if result.write_limit_hours is not None]
    if not hours:
        return []
    first = _hours(min(hours))
    return [
        f"In {len(hours)} of {len(results)} combinations the disk's write limit would bind within a day, the"
        f" first after {first}. From then on less is written, and less is saved, than shown here."
    ]


def render_page(
    trace: Trace, results: Sequence[CellResult], here: int | None = None, command: Sequence[str] = ()
) -> str:
    """Return the page. `here` is a capacity to mark; `command` is the command line that repeats the run."""
    best = max(results, key=lambda result: result.hit_rate)
    room = format_size(best.cell.memory_bytes + best.cell.disk_bytes)
    notes = "".join(f"<p>{escape(note)}</p>" for note in (*trace.notes, *remarks_on(results)))
    repeat = f"<pre>{escape(shlex.join(command))}</pre>" if command else ""
    return make_page(
        escape(f"kvtier simulate: {trace.name}"),
        [
            f"""<header><p class="brand">kvtier simulate</p>
<h1>{best.hit_rate:.0%} of prompt tokens saved
<span class="model">with {escape(room)} and {escape(best.cell.policy)}; no cache of any size saves more than
{best.hit_rate_infinite:.0%}</span></h1>
<p class="lead">{escape(describe_trace(trace))}.</p></header>""",
            '<section class="plots">',
            *(make_figure(figure) for figure in _figures(results, here)),
            "</section>",
            make_section("All combinations", make_table(*table_of(results), css="wide")),
            make_section("How this was found", _METHOD + notes + repeat),
        ],
    )


_METHOD = """<p>The trace was replayed through kvtier's own connector, managers, policies and cost rule in
simulated time. Each request is served alone, when it comes in the trace: computing takes tokens over a
speed, a load takes bytes over a bandwidth and 10 ms. First tokens are therefore those of an engine without
a queue, and the GPU's own prefix cache counts as empty. The optimum knows the future and has memory and disk
as one tier; no policy can save more.</p>"""


def _figures(results: Sequence[CellResult], here: int | None) -> Iterator[Figure]:
    is_memory = len({result.cell.memory for result in results}) > 1 or not results[0].cell.disk_rows
    lines = _lines(results, is_memory)
    legend = [(css, name) for css, name, _ in lines]
    if here is not None:
        legend.append(("here", f"you are here ({format_size(here)})"))

    def draw(y_label: str, value: Value, label: Label, bound: Value | None) -> str:
        return _curves(lines, is_memory, here, y_label, value, label, bound)

    yield Figure(
        "Prompt tokens saved",
        "The share of all prompt tokens that was loaded instead of computed.",
        (*legend, ("bound", "the best possible policy")),
        draw(
            "share of prompt tokens", attrgetter("hit_rate"), "{:.0%}".format, attrgetter("hit_rate_optimum")
        ),
    )
    yield Figure(
        "First token, p50",
        "Without a queue. The dashed line is computing everything.",
        (*legend, ("bound", "computing")),
        draw(
            "time to first token",
            lambda result: result.first_token_p50 * 1000,
            format_time,
            lambda result: result.compute_p50 * 1000,
        ),
    )
    if any(result.disk_written_per_day for result in results):
        yield Figure(
            "Written to the disk a day",
            "At the rate of the trace. Lower is better for flash.",
            tuple(legend),
            draw(
                "terabytes a day",
                lambda result: result.disk_written_per_day / 1e12,
                "{:.3g} TB".format,
                None,
            ),
        )


def _capacity(result: CellResult, is_memory: bool) -> int:
    return result.cell.memory_bytes if is_memory else result.cell.disk_bytes


def _lines(results: Sequence[CellResult], is_memory: bool) -> list[tuple[str, str, list[CellResult]]]:
    """Divide results into lines over memory, or over disk, each with its colour and name."""
    lines: dict[tuple[str, ...], list[CellResult]] = {}
    for result in results:
        cell = result.cell
        words = cell.policy, f"chunks of {cell.chunk_tokens}", f"disk {cell.disk}" * is_memory
        lines.setdefault(words, []).append(result)
    varies = [len(set(words)) > 1 for words in zip(*lines, strict=True)]
    varies[0] = True
    return [
        (
            _COLOURS[at % len(_COLOURS)],
            ", ".join(word for word, shown in zip(words, varies, strict=True) if shown),
            sorted(line, key=lambda result: _capacity(result, is_memory)),
        )
        for at, (words, line) in enumerate(lines.items())
    ]


def _curves(
    lines: list[tuple[str, str, list[CellResult]]],
    is_memory: bool,
    here: int | None,
    y_label: str,
    value: Value,
    label: Label,
    bound: Value | None,
) -> str:
    """Draw a value of each line over capacity, its bound, and the mark of the reader's own machine."""
    cells = [result for _, _, line in lines for result in line]
    sizes = [_capacity(result, is_memory) for result in cells] + ([] if here is None else [here])
    x, x_label = Log.around(sizes), f"{'memory' if is_memory else 'disk'} (log scale)"
    y = Linear.up_to([*map(value, cells), *(map(bound, cells) if bound else ())])
    plot = Plot(f"{y_label} over capacity", x, y, x_label=x_label, y_label=y_label)
    plot.y_axis((tick, label(tick)) for tick in y.ticks())
    ticks = (float(1 << power) for power in range(10, 60) if x.low <= 1 << power <= x.high)
    plot.x_axis(spaced(plot, ((size, format_size(round(size)).replace(".0", "")) for size in ticks)))
    if here is not None:
        plot.line([(here, y.low), (here, y.high)], "here")
    if bound is not None:  # most lines share it with another
        bounds = [
            tuple((_capacity(result, is_memory), bound(result)) for result in line) for _, _, line in lines
        ]
        for each in dict.fromkeys(bounds):
            plot.line(each, "bound")
    for css, name, line in lines:
        points = [(float(_capacity(result, is_memory)), value(result)) for result in line]
        plot.line(points, css)
        for point in points:
            plot.dot(point, css, f"{name}, {format_size(round(point[0]))}: {label(point[1])}")
    return plot.svg()
