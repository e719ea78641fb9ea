"""Sampling: the right distribution, and randomness that hangs on nothing but the seed and the count."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier.engine.sampling import SamplingParams, sample
from kvtier.errors import InputError

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -torch.inf])


def draws(logits: Tensor, count: int, **fields: Any) -> Counter[int]:
    params = SamplingParams(temperature=fields.pop("temperature", 1.0), seed=fields.pop("seed", 5), **fields)
    return Counter(sample(logits.expand(count, -1), [params] * count, range(count)))


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    assert sample(LOGITS[None], [SamplingParams()], [0]) == [1]


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    for temperature in (0.5, 1.0, 2.0):
        seen = draws(LOGITS, 4000, temperature=temperature)
        for token, probability in enumerate((LOGITS / temperature).softmax(-1).tolist()):
            deviation = math.sqrt(4000 * probability * (1 - probability))
            assert abs(seen[token] - 4000 * probability) <= 4 * deviation
    assert draws(LOGITS, 4000)[4] == 0


def test_top_k_and_top_p_cut_the_tail_and_keep_the_head() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0])  # probabilities 0.64, 0.24, 0.09, 0.03
    assert set(draws(logits, 300, top_k=2)) == {0, 1}
    assert set(draws(logits, 300, top_k=9)) == {0, 1, 2, 3}
    assert set(draws(logits, 300, top_p=0.6)) == {0}
    assert set(draws(logits, 300, top_p=0.7)) == {0, 1}
    assert set(draws(logits, 300, top_p=1e-9)) == {0}
    # Of the two that top_k leaves, the first alone holds 0.73: top_p is a share of what is left.
    assert set(draws(logits, 300, top_k=2, top_p=0.7)) == {0}


def test_seeds_and_counts_give_different_draws_and_no_seed_fresh_ones() -> None:
    flat = torch.zeros(1 << 14)
    assert len(draws(flat, 40)) > 35
    assert draws(flat, 40, seed=5) != draws(flat, 40, seed=6)
    assert draws(flat, 40, seed=None) != draws(flat, 40, seed=None)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2**-52, 2)])
def test_the_ends_of_the_interval_never_draw_the_impossible(
    uniform: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.engine.sampling._uniform", lambda *_: uniform)
    logits = torch.tensor([[-torch.inf, 0.3, 0.1, -torch.inf]])
    assert sample(logits, [SamplingParams(temperature=1.0)], [0]) == [token]


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300, 1e-5])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    """Guards against a quotient that overflows: a request with temperature 1e-320 once ended every step."""
    assert set(draws(LOGITS, 50, temperature=temperature)) == {1, 3}, "the two that are equally good"
    for more in ({"top_k": 2}, {"top_p": 0.9}, {"top_k": 1, "top_p": 1e-300}):
        assert set(draws(torch.tensor([-900.0, 900.0, 899.0]), 20, temperature=temperature, **more)) == {1}


def test_a_temperature_near_infinity_draws_evenly() -> None:
    seen = draws(LOGITS.double(), 400, temperature=1.7e308)
    assert set(seen) == {0, 1, 2, 3}
    assert min(seen.values()) > 60


@pytest.mark.parametrize("temperature", [1e-320, 1.0, 1.7e308])
def test_logits_that_are_no_numbers_leave_a_token_to_draw(temperature: float) -> None:
    inf, nan = torch.inf, torch.nan
    for logits, possible in (
        ([-inf, 1.0, nan], {1}),
        ([inf, 1.0, -inf], {0}),
        ([inf, inf, 5.0], {0, 1}),
        ([-inf, -inf], {0, 1}),
        ([nan, nan], {0, 1}),
    ):
        for more in ({}, {"top_k": 1}, {"top_p": 0.5}):
            assert set(draws(torch.tensor(logits), 40, temperature=temperature, **more)) <= possible


def test_draws_are_pinned_to_the_seed() -> None:
    """Guards reproducibility across machines and releases: these tokens may not move."""
    params = SamplingParams(temperature=1.0, seed=0)
    assert [sample(torch.zeros(1, 1000), [params], [n])[0] for n in range(4)] == [170, 999, 554, 855]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(0, 1000),
    st.integers(0, 7),
    st.sampled_from([0, 3]),
    st.floats(0.1, 1.0),
)
def test_a_draw_does_not_depend_on_the_batch(
    seed: int, count: int, place: int, top_k: int, top_p: float
) -> None:
    rows = torch.randn(8, 50, generator=torch.Generator().manual_seed(seed))
    params = [SamplingParams(temperature=0.5 * n, seed=n) for n in range(8)]
    params[place] = ours = SamplingParams(temperature=0.8, seed=seed, top_k=top_k, top_p=top_p)
    counts = [count + n - place for n in range(8)]
    assert sample(rows, params, counts)[place] == sample(rows[place : place + 1], [ours], [count])[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: expected an int, 1 or more, got 0"),
        ({"max_tokens": 1.5}, "max_tokens: expected an int, 1 or more, got 1.5"),
        ({"temperature": -0.1}, "temperature: expected a finite number, 0 or more, got -0.1"),
        ({"temperature": math.nan}, "temperature: .* got nan"),
        ({"temperature": math.inf}, "temperature: .* got inf"),
        ({"top_p": 0.0}, "top_p: expected a number above 0, at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p: .* got 1.1"),
        ({"temperature": "1"}, "temperature: .* got '1'"),
        ({"top_k": -1}, "top_k: expected an int, 0 or more, got -1"),
        ({"seed": "a"}, "seed: expected an int of at most 128 bits or None, got 'a'"),
        ({"seed": 2**128}, "seed: .* at most 128 bits .* got 340282366920938463463374607431768211456"),
        ({"temperature": 10**400}, "temperature: expected a finite number, 0 or more, got 1000"),
        ({"max_tokens": -(10**5000)}, "max_tokens: .* got a value of type int that cannot be printed"),
        ({"ignore_eos": 1}, "ignore_eos: expected True or False, got 1"),
        ({"stop_token_ids": (1, True)}, "stop_token_ids: .* got "),
        ({"stop_token_ids": [1]}, r"stop_token_ids: expected a tuple of token ids, got \[1\]"),
    ],
)
def test_bad_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**fields)
