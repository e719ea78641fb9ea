"""The page: the demo's numbers, its plots and how they were measured, in one HTML file. The simulator's page
is made of the same parts.

The page loads nothing: no script, no font, no link leads out of it. It is well-formed XML, follows the
reader's light or dark mode, and fits a phone. Everything here is pure; any thread may call it.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from kvtier import __version__
from kvtier.config import format_size
from kvtier.demo.result import DemoResult
from kvtier.demo.summary import (
    MEANINGS,
    OWN_RUNS,
    RESTART_RUNS,
    describe_fit,
    describe_model,
    describe_restart,
    describe_tiers,
    explain_figures,
    format_ms,
    summarize,
    summarize_restart,
)
from kvtier.report.figures import Figure, figures, restart_figure

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<footer>kvtier {version} · this page is one file and loads nothing</footer>
</body>
</html>
"""


def render_report(result: DemoResult, *, command: Sequence[str] = ()) -> str:
    """Return the page. `command` is the command line that repeats the run."""
    body = [
        _headline(result),
        '<section class="plots">',
        *(make_figure(figure) for figure in figures(result)),
        "</section>",
        *_restart(result),
        *_conversations(result),
        make_section("Both runs side by side", _summary_table(result)),
        make_section("Why prompt tokens had to be computed", _why_table(result)),
        make_section("How this was measured", _method(result, command)),
        f"<details><summary>Every request</summary>{_request_table(result)}</details>",
    ]
    title = escape(f"kvtier demo: {_verdict(result)}; {describe_model(result)}")
    return make_page(title, body)


def make_page(title: str, body: Iterable[str]) -> str:
    """Return a whole page of a title and parts, all of them markup."""
    return _PAGE.format(title=title, style=STYLE, body="\n".join(body), version=escape(__version__))


def _headline(result: DemoResult) -> str:
    off, on = result.off, result.on
    loaded = sum(on.from_tiers.values())
    share = loaded / on.prompt_tokens if on.prompt_tokens else 0
    lead = (
        f"The GPU cache was too small for them: {loaded:,} tokens ({share:.0%}) came back from host memory."
    )
    tiles = (
        ("time to first token, median", format_ms(off.ttft_ms(50)), format_ms(on.ttft_ms(50))),
        ("of turn 1, which is cold", *(format_ms(run.ttft_ms(50, to_turn=1)) for run in (off, on))),
        ("prompt tokens computed", f"{off.recomputed:,}", f"{on.recomputed:,}"),
        ("whole run", f"{off.wall_seconds:.1f} s", f"{on.wall_seconds:.1f} s"),
    )
    return f"""<header>
<p class="brand">kvtier demo</p>
<h1>{_verdict(result)} <span class="model">{escape(describe_model(result))}</span></h1>
{_badge(result)}
<p class="lead">{len(on.requests)} requests with {on.prompt_tokens:,} prompt tokens.
{escape(describe_fit(result)) or lead}{_restarted(result)}{_caution(result)}</p>
<div class="tiles">{"".join(make_tile(*tile) for tile in tiles)}</div>
</header>"""


def _restarted(result: DemoResult) -> str:
    if result.restart is None:
        return ""
    times = {name: format_ms(run.ttft_ms(50)) for name, run in result.restart.runs.items()}
    return (
        f" After a kill -9 and a new start, the first token came from disk in {times['disk']};"
        f" computing it took {times['computed']}."
    )


def _caution(result: DemoResult) -> str:
    if not result.config.get("model", {}).get("random_weights"):
        return ""
    return (
        " The model's weights are random: its answers are nonsense, "
        "but it computes as a trained one of its size does."
    )


def _verdict(result: DemoResult) -> str:
    speedup = result.ttft_speedup_p50
    if not result.identical:
        return "Tokens differ"
    if result.fitted:
        return "There was nothing to load"
    if speedup >= 1:
        return f"First token {speedup:.3g}× faster"
    return f"First token {1 / speedup:.3g}× slower" if speedup else "No first token"


def _badge(result: DemoResult) -> str:
    if result.difference is None:
        tokens = f"all {result.compared_tokens:,} generated tokens are the same"
        return f'<p class="badge good">✓ identical: {tokens}</p>'
    return f'<p class="badge bad">✗ tokens differ: {escape(str(result.difference))}</p>'


def make_tile(label: str, off: str, on: str) -> str:
    """Return a box with a figure without and with kvtier."""
    values = f'<span class="was">{off}</span> → <strong>{on}</strong>'
    return f'<div class="tile"><p>{escape(label)}</p><p class="value">{values}</p></div>'


def make_figure(figure: Figure) -> str:
    """Return a plot with its title, caption and legend."""
    legend = "".join(
        f'<span><i class="swatch {css}"></i>{escape(words)}</span>' for css, words in figure.legend
    )
    return f"""<figure>
<figcaption><h2>{escape(figure.title)}</h2><p>{escape(figure.caption)}</p></figcaption>
<p class="legend">{legend}</p>
{figure.svg}
</figure>"""


def make_section(title: str, content: str) -> str:
    """Return markup under a title."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _summary_table(result: DemoResult) -> str:
    rows = [(indent(row.label), row.off, row.on, row.change) for row in summarize(result)]
    notes = "".join(f'<p class="soft">{escape(text)}</p>' for text in explain_figures(result))
    return make_table(("", *OWN_RUNS.values(), ""), rows) + notes


def _conversations(result: DemoResult) -> Iterator[str]:
    """Yield the section of questions and answers, a card for each chat; nothing if tokens were random."""
    if not result.texts:
        return
    was = {(request.conversation, request.turn): request.ttft for request in result.off.requests}
    chats: dict[int, str] = {}
    for request in sorted(result.on.requests, key=lambda request: (request.conversation, request.turn)):
        turn = request.conversation, request.turn
        question, answer = result.texts[turn]
        loaded = sum(request.from_tiers.values())
        source = f"{loaded:,} of {request.prompt_tokens:,} prompt tokens from the pool"
        if not loaded:
            source = f"{request.prompt_tokens:,} prompt tokens{', cold' if request.turn == 1 else ''}"
        times = make_tile(source, format_ms(was[turn] * 1000), format_ms(request.ttft * 1000))
        words = f'<p class="question">{escape(question)}</p><p>{escape(answer)}</p>'
        chats[request.conversation] = chats.get(request.conversation, "") + words + times
    cards = "".join(f"<figure><h2>Chat {number}</h2>{words}</figure>" for number, words in chats.items())
    same = "They are the same without kvtier, token for token." if result.identical else "Tokens differ."
    yield f"""<section><h2>Questions and answers</h2>
<p class="soft">Each chat is about a chapter of its own. The answers are the model's with kvtier, up to the
first full stop. {same} Below each: the time to first token without kvtier → with it.</p></section>
<section class="plots">{cards}</section>"""


def _restart(result: DemoResult) -> Iterator[str]:
    """Yield the section on the run over a disk, or the reason why there was none."""
    restart, title = result.restart, "Killed, and started again over its disk"
    if restart is not None:
        rows = [(indent(label), *values) for label, *values in summarize_restart(restart)]
        table = make_table(("", *RESTART_RUNS.values()), rows)
        caption = f"<figcaption><h2>{title}</h2><p>{escape(describe_restart(restart))}</p></figcaption>"
        counted = "".join(f'<p class="soft">{escape(line)}</p>' for line in describe_tiers(restart))
        plot = make_figure(restart_figure(restart))
        yield f'<section class="plots">{plot}<figure>{caption}{table}{counted}</figure></section>'
    elif result.restart_skipped is not None:
        yield make_section(title, f"<p>Not run: {escape(result.restart_skipped)}</p>")


def indent(label: str) -> str:
    """Return a label as markup that is indented if the label begins with a space."""
    return _Html(f'<span class="sub">{escape(label.strip())}</span>') if label.startswith(" ") else label


def _why_table(result: DemoResult) -> str:
    """Return the table of reasons why the first missing chunk of each request was missing, with kvtier."""
    requests, tokens = Counter[str](), Counter[str]()
    for request in result.on.requests:
        reason = request.first_miss or "nothing"
        requests[reason] += 1
        tokens[reason] += request.recomputed
    rows = [(_reason(reason), f"{count}", f"{tokens[reason]:,}") for reason, count in requests.most_common()]
    intro = "<p>With kvtier, for each request: why the first chunk that could not be loaded was missing.</p>"
    return intro + make_table(("reason", "requests", "tokens computed"), rows)


def _reason(reason: str) -> _Html:
    return _Html(f'{escape(reason)}<br/><span class="soft">{escape(MEANINGS[reason])}</span>')


def _method(result: DemoResult, command: Sequence[str]) -> str:
    repeat = f"<p>Repeat it:</p><pre>{escape(shlex.join(command))}</pre>" if command else ""
    return f"""<p>The same requests ran twice on one engine and one model: first without kvtier, then with
it. Nothing else differs. Each prompt is everything said so far in its conversation, so all but its end had
been computed before; what the GPU cache forgot is computed again in one run and loaded from host memory in
the other. Answers are greedy. Activations are
{escape(_precision(result.config))}</p>{_restart_method(result)}
{repeat}
{make_table(("setting", "value"), _settings(result.config), css="words")}"""


def _restart_method(result: DemoResult) -> str:
    if result.restart is None:
        return ""
    return """
<p>The run over a disk has processes of its own, in which the rule that computes what would load slower is
off: the disk is shown, be it worth it or not. The first process was killed in the middle of an answer, when
all rows of the prompts were written; nothing was put in order.</p>"""


def _precision(config: dict[str, Any]) -> str:
    compute = str(config.get("engine", {}).get("compute_dtype"))
    if compute == "float64":
        return (
            "float64: rounding does not depend on which requests share a batch, "
            "so tokens can be compared one by one."
        )
    return (
        f"{compute}: rounding depends on which requests share a batch, "
        "so single tokens may differ for that reason."
    )


def _settings(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings of the runs, one line for each part."""
    for part, values in config.items():
        yield part, " · ".join(f"{name}: {value}" for name, value in _flatten(values))


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        words = prefix + name.replace("_", " ")
        if isinstance(value, dict):
            yield from _flatten(value, f"{words} ")
        elif name in ("capacity", "kv_bytes_per_token"):
            yield words.replace("bytes ", ""), format_size(value)
        elif name.endswith("_deadline"):
            yield words, f"{value:g} s"
        elif isinstance(value, bool):
            yield words, "yes" if value else "no"
        elif value not in (None, []):
            yield words, f"{value:,}" if isinstance(value, int) else str(value)


def _request_table(result: DemoResult) -> str:
    rows = [
        (
            f"{number}",
            f"{on.conversation}",
            f"{on.turn}",
            f"{on.prompt_tokens:,}",
            f"{on.from_gpu:,}",
            f"{sum(on.from_tiers.values()):,}",
            f"{on.recomputed:,}",
            format_ms(off.ttft * 1000),
            format_ms(on.ttft * 1000),
            on.first_miss or "",
        )
        for number, (off, on) in enumerate(zip(result.off.requests, result.on.requests, strict=True), 1)
    ]
    head = "#,conversation,turn,prompt,GPU,pool,recomputed,first token off,first token on,first miss"
    return make_table(head.split(","), rows, css="wide")


class _Html(str):
    """Text that is markup already."""


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str = "") -> str:
    """Return a table. A phone shows each row as a paragraph; elsewhere a wide table scrolls."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(map(_cell, head, row))}</tr>" for row in rows)
    table = f'<table class="{css}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _cell(column: str, text: str) -> str:
    label = f' data-column="{escape(column)}"' if column else ""
    empty = ' class="empty"' if not text else ""
    return f"<td{label}{empty}>{text if isinstance(text, _Html) else escape(text)}</td>"


# -- style -----------------------------------------------------------------------------------------

STYLE = (files("kvtier") / "style.css").read_text("utf-8")
"""The look of the report: two palettes, one layout. Plots take their colours from here by class name."""
