"""What the demo says about its numbers: sums, the first difference, JSON, and the rows of the table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.unit.demo_kit import demo_result, run, with_restart, with_wrong_token

from kvtier.demo.result import DemoResult, Difference, percentile
from kvtier.demo.summary import MEANINGS, format_ms, summarize, summarize_restart
from kvtier.residency import MissReason


def test_equal_tokens_are_identical() -> None:
    assert demo_result().identical
    assert demo_result().difference is None


def test_the_first_difference_is_named() -> None:
    result = with_wrong_token(with_wrong_token(demo_result(), index=9), index=3)
    assert result.difference == Difference(conversation=4, turn=1, position=2, off=1, on=4242)
    assert (
        str(result.difference)
        == "conversation 4, turn 1, answer token 2: token 1 without kvtier, 4242 with it"
    )


def test_an_answer_that_ends_early_differs() -> None:
    result = demo_result()
    short = replace(result.on.requests[0], token_ids=result.on.requests[0].token_ids[:2])
    result = replace(result, on=replace(result.on, requests=(short, *result.on.requests[1:])))
    assert result.difference == Difference(1, 1, 3, 7, None)


def test_a_lost_request_is_not_overlooked() -> None:
    result = demo_result()
    with pytest.raises(ValueError, match="shorter"):
        _ = replace(result, on=replace(result.on, requests=result.on.requests[:-1])).identical


def test_every_prompt_token_has_one_source() -> None:
    for name, found in (("off", demo_result().off), ("on", demo_result().on)):
        assert found.from_gpu + sum(found.from_tiers.values()) + found.recomputed == found.prompt_tokens, (
            name
        )


def test_json_has_what_is_promised() -> None:
    result = demo_result()
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["identical"] is True
    assert plain["requests"] == 24
    assert (
        plain["tokens_from_gpu"] + plain["tokens_from_tiers"]["cpu"] + plain["tokens_recomputed"]
        == plain["prompt_tokens"]
    )
    assert plain["recomputed"] == {"off": result.off.recomputed, "on": result.on.recomputed}
    assert plain["ttft_ms"]["off"]["p50"] == pytest.approx(700)
    assert plain["ttft_ms"]["on"]["p50"] == pytest.approx(80)
    assert plain["ttft_speedup_p50"] == pytest.approx(8.75)
    assert plain["why_missing"] == {"never stored": 24}
    assert len(plain["per_request"]) == 24
    assert all(request["identical"] for request in plain["per_request"])


def test_json_names_the_tier_even_if_nothing_came_from_it() -> None:
    off = run(2, 1, cached=False)
    assert DemoResult(off, off).to_dict()["tokens_from_tiers"] == {"cpu": 0}


def test_json_marks_the_request_that_differs() -> None:
    plain = with_wrong_token(demo_result()).to_dict()
    assert plain["identical"] is False
    expected = {"conversation": 4, "turn": 1, "position": 2, "off": 1, "on": 4242, "run": "on"}
    assert plain["first_difference"] == expected
    assert [index for index, request in enumerate(plain["per_request"]) if not request["identical"]] == [3]


@pytest.mark.parametrize("name", ["computed", "pool", "disk"])
def test_a_difference_after_a_kill_counts(name: str) -> None:
    result = with_restart(demo_result())
    assert result.identical
    restart = result.restart
    assert restart is not None
    run = restart.runs[name]
    wrong = replace(run.requests[1], token_ids=(2, 4, 8))
    run = replace(run, requests=(run.requests[0], wrong, run.requests[2]))
    result = replace(result, restart=replace(restart, **{name: run}))
    assert result.difference == Difference(conversation=2, turn=4, position=3, off=7, on=8, run=name)
    words = {
        "computed": "over a disk, computed",
        "pool": "over a disk, from the pool",
        "disk": "from disk after a kill",
    }
    assert str(result.difference).endswith(f"token 7 without kvtier, 8 {words[name]}")


def test_json_tells_of_the_kill() -> None:
    plain = json.loads(json.dumps(with_restart(demo_result()).to_dict()))["restart"]
    assert plain["exit_code"] == -9
    assert plain["ttft_ms"]["disk"]["p50"] == pytest.approx(300)
    assert plain["tokens_from_tiers"] == {"computed": {}, "pool": {"cpu": 2256}, "disk": {"disk": 2256}}
    assert plain["tier"]["before"]["demoted"] == 600
    assert len(plain["per_request"]) == 3
    assert demo_result().to_dict()["restart"] is None


def test_the_second_table_has_a_column_for_each_run() -> None:
    restart = with_restart(demo_result()).restart
    assert restart is not None
    rows = {label.strip(): values for label, *values in summarize_restart(restart)}
    assert rows["first token, p50"] == ["2.70 s", "210 ms", "300 ms"]
    assert rows["from disk"] == ["–", "–", "2,256 (78%)"]


def test_percentiles_interpolate() -> None:
    assert percentile([1.0, 2.0, 4.0], 50) == 2.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([], 50) == 0.0


def test_the_table_compares() -> None:
    rows = {row.label.strip(): row for row in summarize(demo_result())}
    assert rows["time to first token, p50"][1:] == ("700 ms", "80.0 ms", "8.75× faster")
    assert rows["wall time"][1:] == ("40.0 s", "16.0 s", "2.5× faster")
    assert rows["processor time"][1:] == ("36.0 s", "12.0 s", "3× less")
    assert rows["pool in use"].on == "75.0 MiB (15%)"
    assert rows["chunks evicted"].on == "3"
    assert rows["same tokens"].on == "identical"


def test_the_table_says_when_it_got_worse() -> None:
    result = demo_result()
    rows = {row.label.strip(): row for row in summarize(replace(result, off=result.on, on=result.off))}
    assert rows["time to first token, p50"].change == "8.75× slower"
    assert rows["generated tokens/s"].change == "2.5× fewer"
    assert rows["recomputed"].change == ""


def test_the_table_says_that_tokens_differ() -> None:
    assert [row.on for row in summarize(with_wrong_token(demo_result()))][-1] == "DIFFERENT"


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0.0, "0.00 ms"),
        (0.854, "0.85 ms"),
        (12.34, "12.3 ms"),
        (99.96, "100 ms"),
        (999.6, "1.00 s"),
        (61_000, "61.0 s"),
    ],
)
def test_times_have_three_digits(milliseconds: float, text: str) -> None:
    assert format_ms(milliseconds) == text


def test_every_reason_is_explained() -> None:
    assert {reason.value for reason in MissReason} <= MEANINGS.keys()
