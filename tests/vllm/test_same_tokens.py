"""The tokens are those of vLLM without a connector, wherever the KV came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.device import on_gpu
from tests.vllm.engines import BLOCK, make_prompt, vllm_engine

LENGTHS = (20, 31, 33, 100, 128, 250)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_after_a_reset_prompts_come_back(model: Path, reference: Reference, blocks_per_chunk: int) -> None:
    prompts = [make_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    chunk = BLOCK * blocks_per_chunk
    with vllm_engine(model, {"blocks_per_chunk": blocks_per_chunk}) as engine:
        first = engine.generate(prompts)
        engine.forget()
        again = engine.generate(prompts)
        windowed = len(engine.connector._groups) > 1
    assert tokens_of(first) == tokens_of(again) == reference(model, prompts)
    assert [output.cached for output in first] == [0] * len(prompts)
    # What fills whole chunks; with a window all but the last token, which vLLM computes again in any case.
    expected = [min(length // chunk * chunk, length - windowed) for length in LENGTHS]
    assert [output.cached for output in again] == expected


def test_after_eviction_prompts_come_back(model: Path, reference: Reference) -> None:
    prompt, others = make_prompt(0, 200), [make_prompt(seed, 200) for seed in range(1, 13)]
    with vllm_engine(model, {}) as engine:
        first = engine.generate([prompt])
        engine.generate(others)
        again = engine.generate([prompt])
    assert tokens_of(first) == tokens_of(again) == reference(model, [prompt])
    assert again[0].cached == 192


def test_part_on_the_gpu_and_part_in_the_pool(model: Path, reference: Reference) -> None:
    prompt = make_prompt(0, 240)
    with vllm_engine(model, {}) as engine:
        engine.generate([prompt])
        engine.forget()
        engine.generate([prompt[:130]])
        loaded = engine.stats.load_bytes
        again = engine.generate([prompt])
        engine.settle()
        assert engine.stats.load_bytes > loaded
    assert tokens_of(again) == reference(model, [prompt])
    assert again[0].cached == 224


def test_prompts_that_share_a_prefix(model: Path, reference: Reference) -> None:
    shared = make_prompt(0, 130)
    prompts = [shared + make_prompt(seed, 10 + 7 * seed) for seed in range(1, 9)]
    with vllm_engine(model, {}, num_blocks=64) as engine:
        engine.generate(prompts)
        engine.forget()
        again = engine.generate(prompts)
    assert tokens_of(again) == reference(model, prompts)
    assert all(output.cached >= 128 for output in again)


STRESS = [make_prompt(i % 16, 40 + i * 37 % 180) + make_prompt(1000 + i, i * 13 % 60) for i in range(48)]


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_dozens_of_preemptions(model: Path, reference: Reference, blocks_per_chunk: int) -> None:
    expected = reference(model, STRESS, 48)
    with vllm_engine(model, {"blocks_per_chunk": blocks_per_chunk}, num_blocks=20) as engine:
        rounds = [tokens_of(engine.generate(STRESS, 48)) for _ in range(2)]
        one_group = len(engine.connector._groups) == 1  # else fewer requests are let in at once
        assert engine.count_preemptions() >= (24 if one_group else 12)
        assert engine.stats.loads > 24
    assert rounds == [expected, expected]


@pytest.mark.parametrize("chunks", [0, 1, 8])
def test_a_pool_that_is_far_too_small(llama: Path, reference: Reference, chunks: int) -> None:
    row = 3 * BLOCK * 2 * 2 * 32 * 4  # layers, tokens, K and V, heads, head_dim, bytes
    with vllm_engine(llama, {"cpu": {"capacity": row * chunks}}, num_blocks=20) as engine:
        rounds = [tokens_of(engine.generate(STRESS[:16], 48)) for _ in range(2)]
        engine.settle()
        assert (engine.stats.stores > 0) == (chunks > 0)
        assert engine.stats.loads == 0 or chunks > 0
        scheduler = engine.connector._connector.connector_scheduler
        assert scheduler.manager.stats().ready == chunks, "it is full"
        assert (engine.worker._connector.connector_worker.spec._pool is None) == (chunks == 0)
    assert rounds == [reference(llama, STRESS, 48)[:16]] * 2


def test_loads_that_must_be_faster_than_computing(llama: Path, reference: Reference) -> None:
    with vllm_engine(llama, {"load_if_faster": True}, num_blocks=20) as engine:
        rounds = [tokens_of(engine.generate(STRESS[:24], 48)) for _ in range(2)]
    assert rounds == [reference(llama, STRESS, 48)[:24]] * 2


def test_salts_keep_tenants_apart(llama: Path, reference: Reference) -> None:
    prompt = make_prompt(0, 100)
    with vllm_engine(llama, {}) as engine:
        engine.generate([prompt], salts=["a"])
        engine.forget()
        unsalted, other, same = (engine.generate([prompt], salts=[salt])[0] for salt in (None, "b", "a"))
    assert [unsalted.cached, other.cached, same.cached] == [0, 0, 96]
    assert [unsalted.tokens, other.tokens, same.tokens] == reference(llama, [prompt]) * 3


@pytest.mark.parametrize("prompt_only", [False, True])
def test_generated_tokens_are_kept_too(llama: Path, reference: Reference, prompt_only: bool) -> None:
    prompt = make_prompt(0, 20)
    with vllm_engine(llama, {"prompt_only": prompt_only}) as engine:
        turn = prompt + engine.generate([prompt], 80)[0].tokens + make_prompt(1, 10)
        engine.forget()
        output = engine.generate([turn])[0]
    assert output.tokens == reference(llama, [turn])[0]
    assert output.cached == (0 if prompt_only else 96)


def test_without_vllms_own_prefix_cache(llama: Path, reference: Reference) -> None:
    prompts = [make_prompt(seed, 150) for seed in range(4)]
    with vllm_engine(llama, {}, enable_prefix_caching=False) as engine:
        first, again = engine.generate(prompts), engine.generate(prompts)
    assert tokens_of(first) == tokens_of(again) == reference(llama, prompts)
    assert [output.cached for output in again] == [128] * 4


def test_the_far_end_of_a_window_is_there(hybrid: Path) -> None:
    """If all of a prompt were loaded, its last token would look at a block that is gone: too little to
    change a token.
    """
    tolerance = 1e-4 if on_gpu() else 2e-6
    with vllm_engine(hybrid, {}) as engine:
        for seed in range(3):
            prompt = make_prompt(seed, 4 * BLOCK)
            computed = engine.logprobs(prompt)
            engine.forget()
            assert engine.logprobs(prompt) == pytest.approx(computed, abs=tolerance)
        assert engine.stats.loads == 3


def test_wrong_bytes_would_be_noticed(model: Path, reference: Reference) -> None:
    """The negative control: if this finds the right tokens, the tests above prove nothing."""
    prompt = make_prompt(0, 200)
    with vllm_engine(model, {}) as engine:
        engine.generate([prompt])
        engine.forget()
        engine.falsify_pool()
        output = engine.generate([prompt])[0]
    assert output.cached == 192
    assert output.tokens != reference(model, [prompt])[0]
