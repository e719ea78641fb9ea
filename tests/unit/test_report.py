"""The report is well-formed, self-contained, escaped, and draws whatever a demo can measure."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.demo_kit import demo_result, with_restart, with_wrong_token

from kvtier.demo.result import DemoResult
from kvtier.report import render_report
from kvtier.report.page import STYLE
from kvtier.report.plots import HEIGHT, WIDTH, Linear, Log, Plot

positive = st.floats(min_value=1e-3, max_value=1e9)


def parse(result: DemoResult) -> ElementTree.Element:
    return ElementTree.fromstring(render_report(result, command=["kvtier", "demo"]))


def text_of(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_it_loads_nothing_from_elsewhere() -> None:
    page = render_report(demo_result())
    for reference in ("http:", "https:", "//", "src=", "href=", "url(", "@import", "<script", "<link"):
        assert reference not in page, reference


def test_the_headline_says_it_all() -> None:
    header = text_of(next(parse(demo_result()).iter("header")))
    assert "First token 8.75× faster" in header
    assert "✓ identical: all 72 generated tokens are the same" in header
    assert "700 ms → 80.0 ms" in header


def test_the_headline_says_which_model_and_that_its_weights_are_random() -> None:
    page = parse(demo_result())
    for element in (next(page.iter("h1")), next(page.iter("title"))):
        assert "built-in model (llama), 9.97 million parameters, random weights" in text_of(element)
    assert "The model's weights are random" in text_of(next(page.iter("header")))
    model = {"name": "Qwen3-8B", "family": "qwen3", "parameters": 8_190_735_360, "random_weights": False}
    page = parse(replace(demo_result(), config={"model": model}))
    assert "Qwen3-8B (qwen3), 8.19 billion parameters" in text_of(next(page.iter("h1")))
    assert "random" not in text_of(next(page.iter("header")))


def test_on_a_phone_every_cell_stands_below_the_other_and_says_its_column() -> None:
    """A table of four columns needs more than 320 pixels; its right column would only come by scrolling."""
    page = parse(demo_result())
    for table in page.iter("table"):
        columns = [column.text or "" for column in table.iter("th")]
        for row in table.iter("tr"):
            cells = list(row.iter("td"))
            assert [cell.get("data-column", "") for cell in cells] in (columns, [])
            assert all(bool(text_of(cell)) != (cell.get("class") == "empty") for cell in cells)
    phone = STYLE[STYLE.index("@media (max-width: 560px)") :]
    assert "table, tbody, tr, td { display: block; }" in phone
    assert "td[data-column]::before { content: attr(data-column);" in phone


def test_questions_and_answers_are_shown() -> None:
    result = demo_result(conversations=1, turns=2)
    assert "Questions and answers" not in render_report(result)
    texts = {(1, 1): ("Who <built> it?", "Clara Holm."), (1, 2): ("How high?", "38 metres.")}
    shown = " ".join("".join(parse(replace(result, texts=texts)).itertext()).split())
    assert "Who <built> it? Clara Holm.840 prompt tokens, cold" in shown.replace("?C", "? C")
    assert "How high?38 metres.648 of 880 prompt tokens from the pool" in shown


def test_weak_figures_are_explained() -> None:
    page = render_report(demo_result())
    assert "Turn 1 is cold: its text is new, so it is computed with kvtier too. The p99 of the run" in page
    assert "The whole run gains less than the first tokens" in page


def test_without_anything_to_load_there_is_no_verdict_on_speed() -> None:
    result = demo_result(turns=1)
    page = render_report(result)
    assert "There was nothing to load" in page
    assert "Nobody asked twice: kvtier had nothing to load" in page
    assert "× faster" not in page


def test_a_difference_is_not_hidden() -> None:
    header = text_of(next(parse(with_wrong_token(demo_result())).iter("header")))
    assert "✗ tokens differ: conversation 4, turn 1, answer token 2" in header
    assert "Tokens differ" in header
    assert "faster" not in header
    assert "identical" not in header


def test_there_are_four_plots_with_axes_and_alternative_text() -> None:
    plots = list(parse(demo_result()).iter("svg"))
    assert len(plots) == 4
    for plot in plots:
        assert len(plot.attrib["aria-label"]) > 20
        labels = [text.text for text in plot.iter("text") if "label" in text.attrib["class"]]
        assert len(labels) == 2
        assert len([text for text in plot.iter("text") if "tick" in text.attrib["class"]]) >= 5


def test_the_kill_is_a_fifth_plot() -> None:
    page = parse(with_restart(demo_result()))
    assert "came from disk in 300 ms; computing it took 2.70 s" in text_of(next(page.iter("header")))
    assert "✓ identical: all 99 generated tokens are the same" in text_of(next(page.iter("header")))
    plots = list(page.iter("svg"))
    assert len(plots) == 5
    heights = {bar.attrib["class"]: float(bar.attrib["height"]) for bar in plots[4].iter("rect")}
    assert heights.keys() == {"fill recomputed", "fill cpu", "fill disk"}
    assert heights["fill recomputed"] / heights["fill disk"] == pytest.approx(2.7 / 0.3, rel=0.02)
    assert len(list(plots[4].iter("circle"))) == 9
    text = text_of(page)
    assert (
        "restarted, disk: 600 rows (75.0 MiB of 512.0 MiB), 141 promoted (17.6 MiB in 0.00 s of I/O)" in text
    )
    assert (
        "killed (SIGKILL) and started again over the same folder, from disk. It could answer 2.5 s after"
        in text
    )


def test_a_run_over_a_disk_that_was_left_out_is_not_hidden() -> None:
    page = parse(replace(demo_result(), restart_skipped="/tmp is memory <tmpfs>"))
    assert "Not run: /tmp is memory <tmpfs>" in text_of(page)
    assert len(list(page.iter("svg"))) == 4


def test_each_request_is_a_dot_in_both_colours() -> None:
    dots = [dot.attrib["class"] for dot in next(parse(demo_result()).iter("svg")).iter("circle")]
    assert sorted(set(dots)) == ["dot off", "dot on"]
    assert dots.count("dot off") == dots.count("dot on") == 24


def test_bars_are_as_high_as_their_tokens() -> None:
    plot = list(parse(demo_result()).iter("svg"))[2]
    heights: dict[str, float] = {}
    for bar in plot.iter("rect"):
        title = bar.findtext("title") or ""
        if title.startswith("turn 2, with kvtier"):
            heights[bar.attrib["class"]] = float(bar.attrib["height"])
    assert heights["fill cpu"] / heights["fill gpu"] == pytest.approx(648 / 192, rel=0.02)
    assert heights["fill recomputed"] / heights["fill gpu"] == pytest.approx(40 / 192, rel=0.02)


def test_reasons_of_misses_are_explained() -> None:
    result = demo_result()
    evicted = replace(result.on.requests[-1], first_miss="evicted")
    nothing = replace(result.on.requests[-2], first_miss=None)
    result = replace(result, on=replace(result.on, requests=(*result.on.requests[:-2], nothing, evicted)))
    page = text_of(parse(result))
    assert "never stored" in page
    assert "The pool was full and the policy chose this chunk to leave." in page
    assert "All whole chunks were there" in page


def test_text_from_outside_is_escaped() -> None:
    result = replace(demo_result(), config={"model": {"source": "<script>alert('x')</script> & co"}})
    assert "<script" not in render_report(result, command=["kvtier", "demo", "--model", "<b>&"])
    assert "<script>alert('x')</script> & co" in text_of(parse(result))


@pytest.mark.parametrize("ttft", [0.0, 1e-6, 0.5, 4000.0])
@pytest.mark.parametrize(("conversations", "turns"), [(1, 1), (1, 12), (40, 2), (3, 30)])
def test_every_shape_of_demo_is_drawn_inside_its_frame(conversations: int, turns: int, ttft: float) -> None:
    page = parse(with_restart(demo_result(conversations, turns, ttft=ttft)))
    for plot in page.iter("svg"):
        for element in plot.iter():
            for name in ("x", "x1", "x2", "cx"):
                assert 0 <= float(element.attrib.get(name, 0)) <= WIDTH
            for name in ("y", "y1", "y2", "cy"):
                assert 0 <= float(element.attrib.get(name, 0)) <= HEIGHT


def test_labels_of_an_axis_keep_their_distance() -> None:
    for shape in ((6, 4), (2, 3), (12, 9)):
        for plot in parse(demo_result(*shape)).iter("svg"):
            below = sorted(
                float(text.attrib["x"]) for text in plot.iter("text") if text.attrib["class"] == "tick"
            )
            assert all(right - left >= 20 for left, right in pairwise(below)), shape


def test_settings_are_written_for_people() -> None:
    page = text_of(parse(demo_result()))
    assert "cpu capacity: 512.0 MiB" in page
    assert "load deadline: 2 s" in page
    assert "prompt only: no" in page
    assert "Activations are float64" in page


def test_without_float64_the_report_warns() -> None:
    result = replace(demo_result(), config={"engine": {"compute_dtype": "float32"}})
    assert "float32: rounding depends on which requests share a batch" in text_of(parse(result))


@given(st.lists(positive, min_size=1), st.sampled_from([Linear.up_to, Log.around]))
def test_scales_hold_all_values_in_order(values: list[float], make: type[Linear] | type[Log]) -> None:
    scale = make(values)  # type: ignore[call-arg, arg-type]
    places = [scale.position(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 1 for place in places)


@given(positive, st.floats(min_value=1.5, max_value=1e6))
def test_ticks_lie_on_the_axis_and_are_few(low: float, ratio: float) -> None:
    for scale in (Linear(0, low * ratio), Log.around([low, low * ratio])):
        ticks = scale.ticks()
        assert 2 <= len(ticks) <= 10
        assert ticks == sorted(set(ticks))
        assert all(-1e-9 <= scale.position(tick) <= 1 for tick in ticks)


def test_a_plot_without_values_is_still_a_plot() -> None:
    plot = Plot("nothing to see", Linear.up_to([]), Log.around([]), x_label="x", y_label="y")
    plot.line([], "on")
    assert re.fullmatch(r"<svg .*</svg>", plot.svg(), flags=re.DOTALL)
