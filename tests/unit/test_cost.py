"""`CostModel`: whether a load or a promotion is faster than computing."""

from __future__ import annotations

import pytest

from kvtier.connector.cost import CostEstimate, CostModel, StepTimer, is_worth_trying
from kvtier.offload.promotions import TierCost


def test_every_load_is_worth_doing_until_both_costs_are_known() -> None:
    cost = CostModel()
    assert cost.worth_loading(1 << 40, 1)
    cost.loads.learn(100, 1.0)
    assert cost.worth_loading(1 << 40, 1)
    assert cost.compute_seconds(10) is None


def test_decode_steps_say_nothing_about_prefill() -> None:
    cost = CostModel()
    cost.learn_step(8, 1.0)
    assert cost.compute_seconds(1) is None
    cost.learn_step(100, 1.0)
    assert cost.compute_seconds(50) == 0.5


def test_averages_follow_the_newest_samples() -> None:
    cost = CostModel()
    cost.loads.learn(100, 1.0)
    for _ in range(50):
        cost.loads.learn(100, 3.0)
    seconds = cost.loads.seconds(100)
    assert seconds is not None
    assert 2.9 < seconds <= 3.0


def test_a_refusal_is_not_permanent() -> None:
    cost = CostModel()
    cost.loads.learn(1, 1.0)
    cost.learn_step(1000, 0.001)
    answers = [cost.worth_loading(1000, 1) for _ in range(200)]
    assert 0 < sum(answers) < 10


def test_steps_in_flight_end_in_the_order_in_which_they_began() -> None:
    timer = StepTimer()
    assert timer.end(0.0) is None
    timer.begin(1.0, 100)
    timer.begin(2.0, 7)
    timer.begin(3.0, 50)
    assert timer.end(11.0) == (100, 10.0)
    assert timer.end(12.0) == (7, 1.0)
    assert timer.end(15.0) == (50, 3.0)
    timer.begin(20.0, 9)
    assert timer.end(21.0) == (9, 1.0), "idle time belongs to no step"


def test_a_load_that_was_given_up_is_a_lower_bound_until_one_arrives() -> None:
    cost = CostModel()
    cost.loads.learn(1000, 0.001)
    cost.loads.learn_lost(1000, 2.0)
    assert cost.loads.seconds(1000) == 2.0
    cost.loads.learn_lost(1000, 0.5)
    assert cost.loads.seconds(1000) == 2.0, "the bound is weaker than the known one"
    cost.loads.learn(1000, 0.001)
    assert cost.loads.seconds(1000) == 0.001, (
        "the bus moves again, and one stall is not held against it for long"
    )


def test_a_bus_that_stood_still_is_retried_less_and_less_often() -> None:
    cost = CostModel()
    cost.learn_step(1000, 0.1)
    tries = []
    cost.loads.learn_lost(1000, 2.0)
    for ask in range(1, 300):
        if cost.worth_loading(1000, 100):
            tries.append(ask)
            cost.loads.learn_lost(1000, 2.0)
    assert tries == [4, 12, 28, 60, 124, 188, 252]


def test_each_tier_has_its_own_estimate() -> None:
    cost = CostModel()
    disk, distant = TierCost("disk", 1000, 1000), TierCost("object", 1000, 0)
    assert cost.promotion_seconds([]) == 0.0
    assert cost.promotion_seconds([disk]) is None
    cost.promotions["disk"].learn(1000, 0.1)
    assert cost.promotion_seconds([disk]) == pytest.approx(0.2), "behind the queued bytes"
    assert cost.promotion_seconds([disk, distant]) is None
    cost.promotions["object"].learn(1000, 1.0)
    assert cost.promotion_seconds([disk, distant]) == pytest.approx(1.0), "tiers work in parallel"
    cost.promotions["disk"].learn_lost(1000, 5.0)
    assert cost.promotion_seconds([disk]) == pytest.approx(10.0)
    assert cost.loads.seconds(1000) is None, "a slow disk says nothing about the bus"


def test_a_slow_tier_is_tried_again_now_and_then() -> None:
    cost = CostModel()
    cost.promotions["disk"].learn(1000, 1.0)
    answers = [is_worth_trying([cost.promotions["disk"]], 1.0, 0.1) for _ in range(200)]
    assert 0 < sum(answers) < 10
    assert is_worth_trying([cost.promotions["disk"]], 0.1, 0.1)


def test_an_estimate_of_another_process_is_used_if_nothing_is_known() -> None:
    estimate = CostEstimate()
    for nonsense in (None, 0.0, -1.0, 2.0, float("nan")):
        estimate.recall(nonsense)
        assert estimate.seconds_per_byte is None
    estimate.recall(1e-9)
    assert estimate.seconds(1000) == pytest.approx(1e-6)
    estimate.recall(2e-9)
    assert estimate.seconds_per_byte == 1e-9


def test_ends_of_prompts_do_not_make_loads_look_as_if_they_saved_hours() -> None:
    """A warm engine computes 36 tokens of each prompt, which takes about as long as a step that decodes."""
    cost = CostModel()
    assert cost.saved_seconds(1000) == 0.0
    for _ in range(20):
        cost.learn_step(36, 0.051)
        cost.learn_step(0, 0.050)
        cost.learn_step(None, 0.001)  # it waited for a tier
    assert cost.compute_seconds(1000) == pytest.approx(51 / 36)
    assert 0.001 / 36 * 1000 <= cost.saved_seconds(1000) < 0.06
    for _ in range(20):
        cost.learn_step(2048, 0.254)
    assert cost.saved_seconds(1000) == pytest.approx(0.1, rel=0.02)
