"""On a GPU: every way in which vLLM runs a model there gives the tokens that it gives without kvtier.

In float32 all tokens are compared. In bfloat16 a few of vLLM's own differ between a cold and a warm cache,
so that most must be the same, and none of those loaded from a falsified pool, which is the negative control
of either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import tokens_of
from tests.vllm.engines import Prompt, make_prompt, vllm_engine
from tests.vllm.models import save_mla
from tests.vllm.test_same_tokens import STRESS

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "async_scheduling": True,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
COMPILED: dict[str, Any] = {"enforce_eager": False, "async_scheduling": True}
SETUPS: dict[str, dict[str, Any]] = {
    "eager": {},
    "steps_ahead": {"async_scheduling": True},
    "graphs": GRAPHS,
    "compiled": COMPILED,
}
BF16: dict[str, Any] = GRAPHS | {"dtype": "bfloat16", "attention_backend": "FLASH_ATTN"}


@pytest.mark.parametrize("setup", SETUPS)
def test_same_tokens_under_preemption(model: Path, setup: str) -> None:
    options = SETUPS[setup]
    with vllm_engine(model, num_blocks=256, **options) as plain:
        expected = tokens_of(plain.generate(STRESS, 48))
    num_blocks = 20 if "llama" in model.name else 28  # the least for one prompt
    with vllm_engine(model, {}, num_blocks=num_blocks, **options) as engine:
        rounds = [tokens_of(engine.generate(STRESS, 48)) for _ in range(2)]
        engine.settle()
        assert engine.stats.loads > 24
        assert engine.stats.loads_failed + engine.stats.stores_failed == 0
        assert engine.count_preemptions() > 0
    assert rounds == [expected, expected]


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_same_tokens_in_every_layout(model: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [make_prompt(seed, length) for seed, length in enumerate((33, 100, 128, 250))]
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    with vllm_engine(model, {}, **GRAPHS) as engine:
        assert engine.llm.llm_engine.vllm_config.cache_config.kv_cache_layout == layout
        first = engine.generate(prompts)
        engine.forget()
        again = engine.generate(prompts)
        engine.forget()
        engine.falsify_pool()
        wrong = engine.generate(prompts)
    assert tokens_of(first) == tokens_of(again)
    assert all(output.cached > 0 for output in (*again, *wrong))
    assert all(right != false for right, false in zip(tokens_of(again), tokens_of(wrong), strict=True))


def test_flash_attention_in_bfloat16(llama: Path) -> None:
    prompts = _prompts()
    with vllm_engine(llama, num_blocks=256, **BF16) as plain:
        expected = tokens_of(plain.generate(prompts))
    _compare_most(llama, prompts, expected, **BF16)


def test_mla_in_bfloat16(tmp_path: Path) -> None:
    """Skipped where vLLM has not the kernels: it decodes with Triton, and prefills with FlashAttention."""
    from vllm.distributed import cleanup_dist_env_and_memory

    model, prompts = save_mla(tmp_path), _prompts()
    options = {"dtype": "bfloat16", "attention_backend": "TRITON_MLA"}
    try:
        with vllm_engine(model, num_blocks=256, **options) as plain:
            expected = tokens_of(plain.generate(prompts))
    except (ImportError, AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        cleanup_dist_env_and_memory()
        pytest.skip(f"vLLM alone does not run MLA here: {error}")
    _compare_most(model, prompts, expected, **options)


def _prompts() -> list[Prompt]:
    return [make_prompt(seed, 96 + 5 * seed) for seed in range(24)]


def _compare_most(model: Path, prompts: list[Prompt], expected: list[list[int]], **options: Any) -> None:
    """Expect most prompts to give the same tokens after a load, and none if the pool is falsified."""
    with vllm_engine(model, {"audit": 0}, num_blocks=256, **options) as engine:
        engine.generate(prompts)
        engine.forget()
        again = engine.generate(prompts)
        engine.forget()
        engine.falsify_pool()
        wrong = engine.generate(prompts)
    assert all(output.cached >= len(prompt) - 32 for output, prompt in zip(again, prompts, strict=True))
    assert _num_same(tokens_of(again), expected) >= 16, "two of twelve differ in vLLM alone"
    assert _num_same(tokens_of(wrong), expected) == 0


def _num_same(outputs: list[list[int]], expected: list[list[int]]) -> int:
    return sum(tokens == right for tokens, right in zip(outputs, expected, strict=True))
