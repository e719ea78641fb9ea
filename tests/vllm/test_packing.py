"""Rows kept packed, in vLLM with a cache in bfloat16: the same tokens as from rows kept as they are.

In bfloat16 rounding depends on what runs together, so prompts run one at a time, in the same order with and
without packing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.vllm.conftest import tokens_of
from tests.vllm.device import on_gpu
from tests.vllm.engines import Engine, Output, make_prompt, vllm_engine
from tests.vllm.models import save_hybrid, save_llama, save_qwen3_next
from tests.vllm.test_tiers import wait_open, wait_written

pytestmark = pytest.mark.newest_vllm

LENGTHS = (33, 100, 250, 100)
BF16: dict[str, Any] = {"dtype": "bfloat16"}
_LARGE_BLOCKS = {"max_model_len": 4096, "max_num_batched_tokens": 1152, "block_size": 128}


class Model(NamedTuple):
    """How to save a model, the options of its engines, and how long its prompts are."""

    save: Callable[[Path], Path]
    options: dict[str, Any]
    times: int = 1


MODELS = {
    "full": Model(save_llama, BF16),
    "windows": Model(save_hybrid, BF16),
    "states": Model(save_qwen3_next, BF16 | _LARGE_BLOCKS, 12),  # a block is as large as a state
}


@pytest.fixture(autouse=True)
def _on_hosts_only() -> None:
    if on_gpu():
        pytest.skip("caches on a GPU are not packed yet")


def ask(engine: Engine, times: int = 1) -> list[Output]:
    prompts = [make_prompt(seed, times * length) for seed, length in enumerate(LENGTHS)]
    return [output for prompt in prompts for output in engine.generate([prompt])]


def settings(packing: str, **more: Any) -> dict[str, Any]:
    return {"packing": packing, "load_deadline": "30s", "audit": 0, "cpu": {"capacity": "64MiB"}} | more


@pytest.mark.parametrize("kind", MODELS)
def test_same_tokens_from_packed_rows(kind: str, tmp_path: Path) -> None:
    model, results = MODELS[kind], {}
    saved = model.save(tmp_path)
    for packing in ("off", "on"):
        with vllm_engine(saved, settings(packing), **model.options) as engine:
            computed = ask(engine, model.times)
            engine.forget()
            loaded = ask(engine, model.times)
            engine.settle()
            results[packing] = [(output.tokens, output.cached) for output in computed + loaded]
            assert engine.stats.unpacked_chunks == 0
            assert sum(output.cached for output in loaded) > model.times * sum(LENGTHS) / 3
            config = engine.connector._connector.connector_scheduler.spec.config
            assert config.packs is (packing == "on")
    assert results["on"] == results["off"]


def test_the_negative_control_wrong_values_change_tokens(tmp_path: Path) -> None:
    with vllm_engine(save_llama(tmp_path), settings("on"), **BF16) as engine:
        computed = ask(engine)
        engine.forget()
        spec = engine.worker._connector.connector_worker.spec
        spec.open_pool().rows[:, spec.config.packed_format(0).rest :] ^= 0x80  # the sign of each value
        loaded = ask(engine)
        assert sum(output.cached for output in loaded) > 0
    assert tokens_of(loaded) != tokens_of(computed)


def test_packed_rows_come_back_from_disk_and_raw_rows_do_not_mix_with_them(tmp_path: Path) -> None:
    """The same folder serves engines that pack and engines that do not, each with its own rows."""
    model = save_llama(tmp_path)
    cached, tokens = [], []
    # The second kind needs room of its own.
    for packing, capacity in (("on", "16MiB"), ("off", "64MiB"), ("on", "64MiB"), ("off", "64MiB")):
        disk = {"disk": {"path": str(tmp_path / "kv"), "capacity": capacity}}
        with vllm_engine(model, settings(packing, tiers=[disk]), **BF16) as engine:
            outputs = ask(engine)
            wait_open(engine)
            wait_written(engine)
            cached.append([output.cached for output in outputs])
            tokens.append(tokens_of(outputs))
    whole = [(length - 1) // 32 * 32 for length in LENGTHS]
    assert cached == [[0] * len(LENGTHS), [0] * len(LENGTHS), whole, whole]
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]


def test_audits_compare_packed_rows(tmp_path: Path) -> None:
    with vllm_engine(save_llama(tmp_path), settings("on", audit=1.0), **BF16) as engine:
        ask(engine)
        for _ in range(4):
            engine.forget()
            ask(engine)
        engine.settle()
        assert engine.stats.audited_chunks > 0
        assert engine.stats.audit_mismatches == 0
