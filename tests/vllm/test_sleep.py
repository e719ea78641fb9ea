"""Sleep: transfers end before vLLM unmaps its memory, and kvtier stores and loads again after the wake-up.

The CPU build cannot sleep, so there the hooks are called as vLLM's worker calls them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.engines import Engine, make_prompt, vllm_engine
from tests.vllm.test_contract import is_at_least

PROMPTS = [make_prompt(seed, 100 + 30 * seed) for seed in range(3)]


def sleep(engine: Engine) -> None:
    """Do what vLLM does with a connector, of all that `LLM.sleep` does."""
    assert engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.worker.unregister_kv_caches()


def test_stores_that_run_end_before_memory_is_unmapped(model: Path, reference: Reference) -> None:
    with vllm_engine(model, {}) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add(str(index), prompt, 8)
        engine.step()  # its stores may be under way
        sleep(engine)
        worker = engine.worker._connector.connector_worker
        assert not worker._jobs
        sleep(engine)
        engine.worker.restore_kv_caches()
        engine.worker.restore_kv_caches()
        done = engine.run()
        engine.forget()
        again = engine.generate(PROMPTS)
        engine.settle()
        assert engine.stats.loads > 0
    expected = reference(model, PROMPTS)
    assert [done[str(index)] for index in range(len(PROMPTS))] == expected
    assert tokens_of(again) == expected
    assert all(output.cached > 0 for output in again)


def test_nothing_is_left_in_the_pool_of_before_a_sleep(llama: Path) -> None:
    """vLLM says neither why it resets nor whether weights change before the engine wakes up."""
    with vllm_engine(llama, {}) as engine:
        engine.generate(PROMPTS)
        engine.settle()
        sleep(engine)
        engine.worker.restore_kv_caches()
        assert [output.cached for output in engine.generate(PROMPTS)] == [0] * len(PROMPTS)


def test_weights_are_not_looked_at_while_an_engine_sleeps(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be unmapped, and vLLM may step a sleeping engine whose connector has work left.

    Here a request makes it step, whose stores nobody takes.
    """
    with vllm_engine(llama, {}) as engine:
        engine.generate(PROMPTS)
        sleep(engine)
        looks: list[bool] = []
        watcher = engine.worker._live_weights
        look = watcher.look
        monkeypatch.setattr(watcher, "look", lambda **how: looks.append(how["after_clear"]) or look(**how))
        engine.generate(PROMPTS[:1])
        engine.settle()
        assert not looks
        assert engine.stats.stores_failed > 0, "else no step was made"
        engine.worker.restore_kv_caches()
        engine.generate(PROMPTS)
        assert looks[0], "the reset has left no KV of other weights"
        assert engine.stats.weight_changes == 0
        monkeypatch.undo()


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_wakes_up(model: Path, reference: Reference, level: int) -> None:
    if not is_at_least("0.33"):
        pytest.skip("vLLM tells connectors of a sleep from 0.33 on")
    options: dict[str, Any] = {"enable_sleep_mode": True}
    with vllm_engine(model, {}, **options) as engine:
        for turn in range(2):
            for index, prompt in enumerate(PROMPTS):
                engine.add(f"{turn}-{index}", prompt, 8)
            engine.step()
            engine.step()
            engine.llm.sleep(level=level)
            engine.llm.wake_up()
            if level == 2:
                engine.llm.collective_rpc("reload_weights")
        engine.settle()
        first = engine.generate(PROMPTS)
        engine.forget()
        again = engine.generate(PROMPTS)
        engine.settle()
        assert engine.stats.loads > 0
    assert tokens_of(first) == tokens_of(again) == reference(model, PROMPTS)
    assert all(output.cached > 0 for output in again)
