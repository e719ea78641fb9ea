"""It explains itself: in the answer of a request that asks, in the log, and at /metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import Engine, as_connector, make_prompt, vllm_engine
from tests.vllm.test_tiers import wait_open

from kvtier.connector import Explanation
from kvtier.offload import MissReason
from kvtier.testing.kit import ManualClock

ASK = {"kvtier": {"explain": True}}
ROW = 3 * 32 * 2 * 2 * 32 * 4  # layers, tokens, K and V, heads, head_dim, bytes


def explained(engine: Engine, prompt: list[int], asked: Any = ASK) -> Any:
    """Run a prompt that asks, and return what its answer carries."""
    params = engine.params(8, extra_args={"kv_transfer_params": asked})
    (done,) = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return done.kv_transfer_params


def test_an_answer_says_where_its_prompt_came_from(llama: Path) -> None:
    prompt, longer = make_prompt(0, 100), make_prompt(0, 100) + make_prompt(1, 100)
    with vllm_engine(llama, {}) as engine:
        new = explained(engine, prompt)["kvtier"]
        hit = explained(engine, prompt)["kvtier"]
        engine.forget()
        loaded = explained(engine, longer)["kvtier"]
    assert new == {
        "prompt_tokens": 100,
        "from_gpu": 0,
        "from_tiers": {},
        "computed": 100,
        "first_miss": "never stored",
        "first_missing_token": 0,
        "load_seconds": None,
    }
    assert (hit["from_gpu"], hit["computed"], hit["first_miss"]) == (96, 4, None)
    assert loaded["from_tiers"] == {"cpu": 96}
    assert (loaded["computed"], loaded["first_miss"], loaded["first_missing_token"]) == (
        104,
        "never stored",
        96,
    )
    assert loaded["load_seconds"] > 0


def test_an_explanation_is_in_the_log_for_answers_that_do_not_carry_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.integrations.vllm.connector import logger

    said: list[str] = []
    monkeypatch.setattr(logger, "debug", lambda text, *values: said.append(text % values))
    with vllm_engine(llama, {}) as engine:
        engine.generate([make_prompt(0, 40)])
        told = explained(engine, make_prompt(1, 40))["kvtier"]
    (line,) = [line for line in said if line.startswith("kvtier: request")]
    assert json.loads(line.split(": ", 2)[2]) == told, "for the request that asks, and for no other"


def test_an_eviction_is_in_the_answer_and_in_the_log(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.integrations.vllm.connector import logger

    said: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *values: said.append(text % values))
    with vllm_engine(llama, {"cpu": {"capacity": 4 * ROW}}) as engine:
        for seed in range(3):
            engine.generate([make_prompt(seed, 128)])
            engine.settle()
        engine.forget()
        got = explained(engine, make_prompt(0, 128))["kvtier"]
        explained(engine, make_prompt(1, 128))
    assert (got["computed"], got["first_miss"], got["first_missing_token"]) == (128, "evicted", 0)
    lines = [line for line in said if line.startswith("kvtier: request")]
    assert len(lines) == 1, "once in a while"
    assert "128 of 128 prompt tokens were computed; what begins at token 0: evicted" in lines[0]


@pytest.mark.parametrize(
    "asked", [{}, {"kvtier": 5}, {"kvtier": {"explain": "no"}}, {"other": {"explain": True}}]
)
def test_a_request_without_the_question_gets_no_explanation(engine: Engine, asked: Any) -> None:
    assert explained(engine, make_prompt(0, 40), asked) is None


def test_two_children_give_one_answer(llama: Path) -> None:
    """vLLM ends the engine if two children of a `MultiConnector` answer under one name."""
    with vllm_engine(llama, {}, beside=[as_connector({"cpu": {"capacity": "1MiB"}})]) as engine:
        assert explained(engine, make_prompt(0, 40))["kvtier"]["computed"] == 40


def test_the_log_tells_of_slow_loads_and_of_losses_at_a_bounded_rate() -> None:
    from kvtier.integrations.vllm.requests import INTERVAL, RequestLog

    said: list[str] = []
    clock = ManualClock()
    log = RequestLog(said.append, load_deadline=2.0, clock=clock)
    fine = [
        None,
        Explanation(from_gpu=96, recomputed=4),
        Explanation(recomputed=100, first_miss=MissReason.NEVER_STORED, first_missing_token=0),
        Explanation(from_gpu=90, recomputed=10, first_miss=MissReason.EVICTED, first_missing_token=90),
        Explanation(from_tiers={"cpu": 96}, recomputed=4, load_seconds=0.4),
    ]
    for index, explanation in enumerate(fine):
        log.record(str(index), explanation)
    assert said == []
    slow = Explanation(from_tiers={"cpu": 96}, recomputed=4, load_seconds=0.75)
    for index in range(5):
        log.record(f"slow {index}", slow)
    assert said == ["kvtier: request slow 0: its load of 96 of 100 prompt tokens took 0.75 s"]
    clock.now += INTERVAL
    log.record(
        "lost", Explanation(from_gpu=32, recomputed=68, first_miss=MissReason.FAILED, first_missing_token=32)
    )
    expected = "68 of 100 prompt tokens were computed; what begins at token 32: failed its check"
    assert said[1].startswith(f"kvtier: request lost: {expected}")
    assert said[1].endswith("; and 4 more since the last such line")


def test_levels_and_times_are_shown(llama: Path) -> None:
    prompts = [make_prompt(seed, 128) for seed in range(3)]
    with vllm_engine(llama, {"cpu": {"capacity": 8 * ROW}}) as engine:
        for prompt in prompts:
            engine.generate([prompt])
            engine.settle()
        engine.forget()
        engine.generate(prompts[-1:])
        engine.settle()
        found = {metric.name: metric for metric in engine.llm.get_metrics() if "kvtier" in metric.name}
    assert found["vllm:kvtier_capacity_bytes"].value == 8 * ROW
    assert found["vllm:kvtier_used_bytes"].value == 8 * ROW
    assert found["vllm:kvtier_evictions"].value == 4
    assert found["vllm:kvtier_load_seconds"].count == found["vllm:kvtier_loads"].value == 1
    assert found["vllm:kvtier_store_seconds"].count == found["vllm:kvtier_stores"].value
    assert 0 < found["vllm:kvtier_load_seconds"].sum < 60


def test_tiers_are_shown(llama: Path, tmp_path: Path) -> None:
    settings = {"tiers": [{"disk": {"path": str(tmp_path), "capacity": "4MiB"}}]}
    with vllm_engine(llama, settings) as engine:
        manager = wait_open(engine)
        engine.generate([make_prompt(0, 128)])
        engine.settle()
        (tier,), pool = manager.tier_stats(), manager.stats()
        found = {metric.name.removeprefix("vllm:kvtier_"): metric for metric in engine.llm.get_metrics()}
    assert found["tier_demoted"].labels["tier"] == "disk"
    assert found["tier_demoted"].value == tier.demoted > 0
    assert found["tier_used_bytes"].value == tier.used_bytes
    assert found["tier_capacity_bytes"].value == tier.capacity_bytes
    assert found["tier_suspended"].value == 0
    assert found["tier_demote_seconds"].count > 0
    assert found["used_bytes"].value == (pool.slots - pool.free) * ROW, "of a pool with tiers below it too"


def test_counts_add_up_and_levels_do_not() -> None:
    from kvtier.integrations.vllm import KVTierStats

    first = KVTierStats({"loads": 1, "load_seconds": [0.25], "used_bytes": 10})
    both = first.aggregate(KVTierStats({"loads": 2, "stores": 1, "load_seconds": [0.75], "used_bytes": 4}))
    assert both.data == {"loads": 3, "stores": 1, "load_seconds": [0.25, 0.75], "used_bytes": 4}
    assert both.reduce()["kvtier load_seconds median"] == "0.5000"
    tier = KVTierStats({"tier_demoted:disk": 2, "tier_used_bytes:disk": 4096, "tier_suspended:disk": 1})
    both = tier.aggregate(
        KVTierStats({"tier_demoted:disk": 1, "tier_used_bytes:disk": 8192, "tier_suspended:disk": 0})
    )
    assert both.data == {"tier_demoted:disk": 3, "tier_used_bytes:disk": 8192, "tier_suspended:disk": 0}
    assert both.reduce()["kvtier tier_used_bytes:disk"] == "8.0 KiB"
