"""Tiers below the pool, in vLLM: an engine that starts over a folder of another has what that one had."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.engines import Engine, make_prompt, vllm_engine

pytestmark = pytest.mark.newest_vllm

LENGTHS = (33, 100, 250)


def wait_open(engine: Engine) -> Any:
    """Step until the namespace is known and the disk is open; return the manager."""
    scheduler = engine.connector._connector.connector_scheduler
    assert scheduler.spec.config.namespace.wait(120.0) is not None
    seed = 1000
    while scheduler.manager.tier_stats()[0].state != "open":
        engine.generate([make_prompt(seed, 8)], max_tokens=1)
        seed += 1
    return scheduler.manager


def wait_written(engine: Engine) -> None:
    """Step until all that was offered to the tiers is written. vLLM takes no step by itself when nothing has
    moved for a second, which on a busy machine says nothing.
    """
    demotions = engine.connector._connector.connector_scheduler.manager._demotions
    until = time.monotonic() + 60
    engine.settle()
    while demotions.has_jobs() or any(demotions._offers.values()):
        assert time.monotonic() < until
        engine.generate([make_prompt(2000, 8)], max_tokens=1)


def test_prompts_come_back_from_disk_after_a_restart(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    prompts = [make_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    settings = {"tiers": [{"disk": {"path": str(tmp_path), "capacity": "64MiB"}}], "load_deadline": "30s"}
    with vllm_engine(model, settings) as engine:
        first = engine.generate(prompts)
        manager = wait_open(engine)
        wait_written(engine)
        assert manager.tier_stats()[0].demoted > 0
    with vllm_engine(model, settings) as engine:
        again = engine.generate(prompts)  # the first request, too, waits for the disk if it is not open yet
        windowed = len(engine.connector._groups) > 1
        engine.settle()
    assert tokens_of(first) == tokens_of(again) == reference(model, prompts)
    assert [output.cached for output in first] == [0] * len(prompts)
    assert [output.cached for output in again] == [(length - windowed) // 32 * 32 for length in LENGTHS]


def test_a_producer_only_stores_and_a_consumer_only_loads(
    llama: Path, reference: Reference, tmp_path: Path
) -> None:
    known, new = make_prompt(0, 100), make_prompt(1, 100)
    settings = {"tiers": [{"disk": {"path": str(tmp_path), "capacity": "64MiB"}}], "load_deadline": "30s"}
    with vllm_engine(llama, settings, role="kv_producer") as engine:
        wait_open(engine)
        engine.generate([known])
        engine.forget()
        produced = engine.generate([known])
        wait_written(engine)
        assert (engine.stats.stores, engine.stats.loads) == (1, 0)
    with vllm_engine(llama, settings, role="kv_consumer") as engine:
        wait_open(engine)
        consumed = engine.generate([known, new])
        engine.forget()
        consumed += engine.generate([known, new])
        assert engine.stats.stores == 0
    assert [output.cached for output in produced + consumed] == [0, 96, 0, 96, 0]
    assert tokens_of(produced + consumed) == reference(llama, [known, known, new, known, new])
