"""Audits inside vLLM: rows of the same KV pass in every company, and tokens do not change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.engines import Engine, make_prompt, vllm_engine


def play(engine: Engine, rng: random.Random, documents: list[list[int]], rounds: int) -> None:
    """Ask about documents, some at once; what is asked again is not in vLLM's own cache."""
    for _ in range(rounds):
        chosen = rng.choices(documents, k=rng.randrange(1, 5))
        prompts = [
            document[: rng.randrange(96, len(document))] + make_prompt(rng.randrange(1 << 30), 5)
            for document in chosen
        ]
        engine.generate(prompts, rng.randrange(1, 10))
        engine.forget()


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=["float32", "bfloat16"])
def test_rows_of_the_same_kv_pass(model: Path, options: dict[str, Any]) -> None:
    rng = random.Random(1)
    documents = [make_prompt(seed, 300) for seed in range(4)]
    with vllm_engine(model, {"audit": 1}, num_blocks=64, **options) as engine:
        play(engine, rng, documents, 12)
        assert engine.stats.audited_chunks > 20
        assert engine.stats.audit_mismatches == 0


def test_audited_requests_have_the_same_tokens(model: Path, reference: Reference) -> None:
    prompts = [make_prompt(seed, 150 + 20 * seed) for seed in range(4)]
    expected = reference(model, prompts, 8)
    with vllm_engine(model, {"audit": 1}) as engine:
        for _ in range(3):
            assert tokens_of(engine.generate(prompts, 8)) == expected
            engine.forget()
        assert engine.stats.audited_chunks > 0


def test_rows_with_other_content_are_found_and_dropped(llama: Path, reference: Reference) -> None:
    prompts = [make_prompt(seed, 150) for seed in range(6)]
    expected = reference(llama, prompts)
    with vllm_engine(llama, {"audit": 1}, num_blocks=64) as engine:
        engine.generate(prompts)
        engine.forget()
        engine.falsify_pool()
        for prompt in prompts:
            engine.generate([prompt])
            engine.settle()
            if engine.stats.namespace_departures:
                break
        assert engine.stats.namespace_departures == 1
        engine.forget()
        assert tokens_of(engine.generate(prompts)) == expected
