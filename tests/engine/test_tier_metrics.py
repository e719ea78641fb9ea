"""What tiers count, where people see it: in Prometheus' text and in one line at the end."""

from __future__ import annotations

import re

from tests.engine.drive import tokens
from tests.engine.test_with_tiers import ask, expect_idle, forget, suspend
from tests.engine.tier_kit import (
    MemoryTiers,
    SharedTiers,
    manager_of,
    settle,
    shared_engine,
    tiered_engine,
)
from tests.unit.demo_kit import tier_stats

from kvtier.connector import ConnectorStats
from kvtier.connector.metrics import describe_tier
from kvtier.engine import Engine
from kvtier.integrations.summary import Summary
from kvtier.testing.memory_tier import MemoryServer


def samples_of(engine: Engine) -> dict[str, float]:
    """Return the samples of a connector's metrics, labels in their names."""
    assert engine.connector is not None
    assert engine.connector.connector_scheduler is not None
    text = engine.connector.connector_scheduler.metrics.text()
    found = re.findall(r"^(kvtier_\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_metrics_follow_a_tier() -> None:
    with tiered_engine(MemoryTiers()) as engine:
        ask(engine, tokens(33), "first")
        forget(engine)
        ask(engine, tokens(33), "again")
        expect_idle(engine)
        found, (tier,), pool = (
            samples_of(engine),
            manager_of(engine).tier_stats(),
            manager_of(engine).stats(),
        )
        assert found['kvtier_tier_promoted_total{tier="disk"}'] == tier.promoted == 8
        assert found['kvtier_tier_demoted_total{tier="disk"}'] == tier.demoted > 0
        assert found['kvtier_tier_used_bytes{tier="disk"}'] == tier.used_bytes > 0
        assert found['kvtier_tier_capacity_bytes{tier="disk"}'] == tier.capacity_bytes
        assert found['kvtier_tier_suspended{tier="disk"}'] == 0
        for direction, seconds in (("promote", tier.promote_seconds), ("demote", tier.demote_seconds)):
            assert found[f'kvtier_tier_{direction}_seconds_count{{tier="disk"}}'] >= 1
            assert 0 < found[f'kvtier_tier_{direction}_seconds_sum{{tier="disk"}}'] <= seconds + 1e-9
        assert found["kvtier_used_bytes"] == (pool.slots - pool.free) * 4096, (
            "of a pool with tiers below it too"
        )
        assert found["kvtier_loads_total"] == found["kvtier_load_seconds_count"] == 1
        assert found["kvtier_unwritten_total"] == manager_of(engine).unwritten


def test_a_tier_that_is_suspended_shows() -> None:
    tiers = MemoryTiers()
    with tiered_engine(tiers, settings={"load_deadline": 0.3}) as engine:
        ask(engine, tokens(33), "first")
        forget(engine)
        tiers.backend.hang()
        try:
            ask(engine, tokens(33), "late")
            suspend(engine)
            found = samples_of(engine)
            assert found['kvtier_tier_suspended{tier="disk"}'] == 1
            assert found['kvtier_tier_stuck{tier="disk"}'] > 0
        finally:
            tiers.backend.release()
        while manager_of(engine).stats().doomed:
            engine.step()
        expect_idle(engine)


def test_a_line_for_each_tier_at_the_end() -> None:
    told: list[str] = []
    moved = {
        "promoted": 7,
        "promoted_bytes": 7 << 17,
        "promote_seconds": 0.125,
        "demoted": 600,
        "demoted_bytes": 1 << 20,
    }
    tier = tier_stats(**moved, late=2, failed_checks=1)
    summary = Summary(ConnectorStats(), told.append, lambda: 0.0, lambda: [describe_tier(tier)])
    summary.log_changes()
    assert told == []
    summary.close()
    summary.close()
    assert told == [
        "kvtier, tier disk: 600 rows (75.0 MiB of 512.0 MiB), 7 promoted (896.0 KiB in 0.12 s of I/O),"
        " 600 demoted (1.0 MiB in 0.00 s of I/O), 1 failed checks, 2 late"
    ]


def test_a_connector_says_what_its_tiers_did() -> None:
    with tiered_engine(MemoryTiers()) as engine:
        ask(engine, tokens(33), "first")
        expect_idle(engine)
        assert engine.connector is not None
        scheduler = engine.connector.connector_scheduler
        assert scheduler is not None
        (line,) = scheduler.describe_tiers()
        assert line.startswith(f"disk: {manager_of(engine).tier_stats()[0].used} rows (")
        assert "left the pool" not in line
        manager_of(engine)._demotions.unwritten = 3
        assert scheduler.describe_tiers()[0].endswith(
            "; 3 rows left the pool, or had to, before they were written"
        )


def test_why_a_tier_does_nothing_is_said() -> None:
    assert describe_tier(tier_stats(suspended="a call does not return")).endswith(
        "suspended: a call does not return"
    )
    assert describe_tier(tier_stats(state="waiting for the namespace")).endswith(
        ", waiting for the namespace"
    )
    assert describe_tier(tier_stats(state="closed")).endswith("0 demoted (0 B in 0.00 s of I/O)")


def test_values_that_only_a_server_knows_have_no_sample() -> None:
    """`tier_capacity_bytes{tier="valkey"}` was 0: a tier that is always full."""
    with shared_engine(SharedTiers(MemoryServer())) as engine:
        ask(engine, tokens(33), "first")
        settle(engine)
        found = samples_of(engine)
        assert found['kvtier_tier_demoted_total{tier="valkey"}'] > 0
        assert not [name for name in found if name.startswith(("kvtier_tier_used", "kvtier_tier_capacity"))]
        assert engine.connector is not None
        assert engine.connector.connector_scheduler is not None
        (line,) = engine.connector.connector_scheduler.describe_tiers()
        assert line.startswith("valkey: 0 promoted (")
