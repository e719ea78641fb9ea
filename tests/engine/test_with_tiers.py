"""The engine over a pool and a tier below it: what the pool has forgotten comes back, and nothing waits in vain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.drive import ONE_GROUP, TWO_GROUPS, expect, expect_idle, run, tokens
from tests.engine.tier_kit import ROW, MemoryTiers, manager_of, tiered_engine

from kvtier.config import KVTierConfig
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.testing.toy_model import ToyModel

WINDOWS = [ONE_GROUP, TWO_GROUPS]


def ask(engine: Engine, prompt: list[int], name: str, max_tokens: int = 4) -> Any:
    params = SamplingParams(max_tokens=max_tokens)
    engine.add_request(prompt, params, request_id=name)
    output = run(engine)[name]
    assert output.token_ids == expect(engine, prompt, params)
    return output


def forget(engine: Engine) -> None:
    """Make the engine and the pool forget everything, but not the tier."""
    engine.drain()
    engine.reset_prefix_cache()
    manager_of(engine).pool.reset_cache()


@pytest.mark.parametrize("windows", WINDOWS)
def test_what_the_pool_has_forgotten_comes_from_the_tier(windows: Sequence[int | None]) -> None:
    with tiered_engine(MemoryTiers(), windows) as engine:
        ask(engine, tokens(33), "first")
        forget(engine)
        assert manager_of(engine).tier_stats()[0].used > 0
        again = ask(engine, tokens(33), "again")
        assert (again.source.gpu, again.source.tiers, again.source.recomputed) == (0, {"disk": 32}, 1)
        assert again.source.first_miss is None
        engine.reset_prefix_cache()
        third = ask(engine, tokens(33), "third")
        assert third.source.tiers == {"cpu": 32}, "it is in the pool again"
        expect_idle(engine)
        manager_of(engine).check()


def disk_engine(folder: Path, windows: Sequence[int | None] = ONE_GROUP, **engine: Any) -> Engine:
    """Make an engine over a pool and a real folder; its weights are those of every other that is made like it."""
    kvtier = {
        "cpu": {"capacity": 64 * ROW},
        "load_if_faster": False,
        "tiers": [{"disk": {"path": str(folder), "capacity": "4MiB", "required": True}}],
    }
    config = EngineConfig(**{"num_blocks": 65, "block_size": 4, "kv_events": True} | engine)
    return Engine(ToyModel(windows), config, KVTierConfig.from_dict(kvtier), weights_id="toy")


@pytest.mark.parametrize("windows", WINDOWS)
def test_an_engine_starts_warm_from_disk(windows: Sequence[int | None], tmp_path: Path) -> None:
    with disk_engine(tmp_path, windows) as engine:
        ask(engine, tokens(33), "first")
        expect_idle(engine)
    with disk_engine(tmp_path, windows) as engine:
        again = ask(engine, tokens(33), "again")
        assert (again.source.tiers, again.source.recomputed) == ({"disk": 32}, 1)
        expect_idle(engine)
