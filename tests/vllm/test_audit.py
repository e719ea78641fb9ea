"""Audits inside vLLM: rows of the same KV pass in every company, and tokens do not change. What a namespace
or a rule of ours keeps apart, audits find where that rule is taken out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.engines import Engine, make_prompt, vllm_engine
from tests.vllm.models import save_blip2, save_llama
from tests.vllm.test_media import COUNTED, look
from tests.vllm.test_reset import _add_noise
from tests.vllm.test_tiers import wait_open, wait_written

pytestmark = pytest.mark.newest_vllm


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


MOST_REQUESTS = 400


def find_wrong_rows(engine: Engine, ask: Callable[[], object]) -> None:
    """Ask until an audit finds a wrong row, with the settings that everybody has."""
    engine.connector._connector.connector_scheduler._audits._rng = random.Random(5)
    for _ in range(MOST_REQUESTS):
        ask()
        engine.settle()
        if engine.stats.audit_mismatches:
            return
    raise AssertionError(f"no audit has found a wrong row: {engine.stats}")


def on_disk(folder: Path) -> dict[str, Any]:
    return {"tiers": [{"disk": {"path": str(folder), "capacity": "256MiB"}}], "load_deadline": "30s"}


@pytest.fixture(scope="module")
def blip2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_blip2(tmp_path_factory.mktemp("blip2"))


@pytest.mark.slow
def test_settings_that_the_namespace_forgot_are_found(
    tmp_path: Path, blip2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.integrations.vllm.describe.all_settings", lambda config: str)
    with vllm_engine(blip2, on_disk(tmp_path), skip_tokenizer_init=False) as engine:
        wait_open(engine)
        look(engine, "red")
        wait_written(engine)
    changed = {"mm_processor_kwargs": {"do_normalize": False}, "skip_tokenizer_init": False}
    with vllm_engine(blip2, on_disk(tmp_path), **changed) as engine:
        wait_open(engine)

        def ask() -> None:
            look(engine, "red")
            engine.forget()

        find_wrong_rows(engine, ask)


@pytest.mark.slow
def test_images_that_have_the_name_of_others_are_found(
    tmp_path: Path, blip2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.integrations.vllm.translate._media_digest", lambda config: re.compile(".*"))
    options = COUNTED | {"skip_tokenizer_init": False}
    with vllm_engine(blip2, on_disk(tmp_path), **options) as engine:
        wait_open(engine)
        for _ in range(MOST_REQUESTS):
            look(engine, "red")
        wait_written(engine)
    with vllm_engine(blip2, on_disk(tmp_path), **options) as engine:
        wait_open(engine)
        find_wrong_rows(engine, lambda: look(engine, "blue"))


@pytest.mark.slow
def test_weights_that_nobody_hashed_are_found(
    tmp_path: Path, llama: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.integrations.vllm.describe.all_weights", lambda config: [])
    prompt = make_prompt(0, 200)
    with vllm_engine(llama, on_disk(tmp_path)) as engine:
        wait_open(engine)
        engine.generate([prompt])
        wait_written(engine)
    others = change_weights(save_llama(tmp_path_factory.mktemp("others")))
    with vllm_engine(others, on_disk(tmp_path)) as engine:
        wait_open(engine)

        def ask() -> None:
            engine.generate([prompt], 2)
            engine.forget()

        find_wrong_rows(engine, ask)


def change_weights(folder: Path) -> Path:
    """Give one matrix of a model other values."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if "layers.1.mlp.down_proj" in name)
    generator = torch.Generator().manual_seed(1)
    weights[name] = torch.randn(weights[name].shape, generator=generator) * weights[name].std()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_weights_that_change_unnoticed_are_found(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.integrations.vllm.connector.watchable", lambda config: None)
    prompt = make_prompt(0, 200)
    with vllm_engine(llama, {}) as engine:
        engine.generate([prompt])
        engine.settle()
        engine.llm.apply_model(partial(_add_noise, seed=1))
        engine.forget()

        def ask() -> None:
            engine.generate([prompt], 2)
            engine.forget()

        find_wrong_rows(engine, ask)
