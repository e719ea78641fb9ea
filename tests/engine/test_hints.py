"""Agents that wait for tools: with `keep`, their KV is still there when they come back; tokens are the same.

And shares over a pool and a real disk: one tenant floods, and the rows of another stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.drive import ONE_GROUP, TWO_GROUPS, expect, run, tokens
from tests.engine.tier_kit import PATIENCE, ROW, manager_of, settle

from kvtier.config import KVTierConfig
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.engine.config import LayerKind
from kvtier.hints import tenant_of
from kvtier.testing.toy_model import ToyModel

PARAMS = SamplingParams(max_tokens=4)


def make_engine(layers: Sequence[LayerKind], rows: int, policy: str, **settings: Any) -> Engine:
    """Make an engine with a pool of `rows` chunks and no cache of its own, so that all hits are loads."""
    cpu = {"capacity": rows * ROW, "policy": policy}
    kvtier = {"cpu": cpu, "load_if_faster": False, "load_deadline": PATIENCE, "audit": 0} | settings
    config = EngineConfig(num_blocks=65, block_size=4, enable_prefix_caching=False)
    return Engine(ToyModel(layers), config, KVTierConfig.from_dict(kvtier), weights_id="toy")


def ask(engine: Engine, prompt: list[int], **options: Any) -> Any:
    """Run one request, expect the model's tokens, and return its output."""
    name = engine.add_request(prompt, PARAMS, **options)
    output = run(engine)[name]
    assert output.token_ids == expect(engine, prompt, PARAMS)
    engine.drain()
    return output


def serve_agents(policy: str, layers: Sequence[LayerKind], hints: dict[str, Any] | None) -> float:
    """Return the part of the agents' histories that was loaded, while others flood between two turns."""
    params = None if hints is None else {"kvtier": hints}
    loaded = history = 0
    with make_engine(layers, 128 * len(set(layers)), policy) as engine:
        agents = [tokens(32, seed=agent) for agent in range(4)]
        for turn in range(4):
            for agent, talk in enumerate(agents):
                before = len(talk)
                output = ask(engine, talk, kv_transfer_params=params)
                loaded += sum(output.source.tiers.values())
                history += (before - 8) // 4 * 4 if turn else 0  # what the turn before has left
                talk += output.token_ids + tokens(4, seed=100 * turn + agent)  # the answer of the tool
            for other in range(8):  # while the tools run
                ask(engine, tokens(64, seed=1000 + 10 * turn + other))
    return loaded / history


@pytest.mark.parametrize("layers", [ONE_GROUP, TWO_GROUPS])
@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
def test_agents_that_wait_for_tools_hit_with_keep(policy: str, layers: Sequence[LayerKind]) -> None:
    without = serve_agents(policy, layers, None)
    kept = serve_agents(policy, layers, {"keep": "10m", "ending": "tool"})
    print(f"{policy}: of the agents' history {without:.0%} is loaded without hints, {kept:.0%} with keep")
    assert without < (0.1 if policy == "lru" else 0.7)  # the others keep what was used twice
    assert kept > 0.9


@pytest.mark.parametrize("limit", [None, 0.5])
def test_shares_hold_on_the_disk(limit: float | None, tmp_path: Path) -> None:
    """The pool has 16 rows and the disk some hundred, and the greedy tenant writes five times as many."""
    disk = {"disk": {"path": str(tmp_path), "capacity": "1MiB", "write_limit": 0, "required": True}}
    shares = {} if limit is None else {"shares": {"by": "cache_salt", "limit": limit}}
    with make_engine(ONE_GROUP, 16, "lru", tiers=[disk], **shares) as engine:
        session, manager = tokens(33), manager_of(engine)
        ask(engine, session, cache_salt="modest")
        settle(engine)
        slots = manager.tier_stats()[0].capacity
        assert slots is not None
        for other in range(5 * slots // 16):
            ask(engine, tokens(64, seed=other + 1), cache_salt="greedy")
            settle(engine)
        manager.pool.reset_cache()  # else it would come from there
        loaded = ask(engine, session, cache_salt="modest").source.tiers
        assert loaded == ({} if limit is None else {"disk": 32})
        manager.check()
        shown = engine.connector.connector_scheduler.metrics.text()  # type: ignore[union-attr]
        assert "modest" not in shown
        assert (f'kvtier_tenant_used_bytes{{tenant="{tenant_of("modest")}"}} ' in shown) == (
            limit is not None
        )
