"""The engine over a pool and a tier below it: what the pool has forgotten comes back, and nothing waits in
vain.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.drive import ALL_KINDS, ONE_GROUP, STATES, TWO_GROUPS, expect, expect_idle, run, tokens
from tests.engine.killed_engine import MODELS
from tests.engine.tier_kit import PATIENCE, MemoryTiers, disk_engine, manager_of, settle, tiered_engine

from kvtier.engine import Engine, SamplingParams
from kvtier.engine.config import LayerKind
from kvtier.offload import MissReason
from kvtier.tiers.disk.files import DiskFiles

ROOT = Path(__file__).parents[2]
LAYERS = [ONE_GROUP, TWO_GROUPS, STATES, ALL_KINDS]


def ask(engine: Engine, prompt: list[int], name: str, max_tokens: int = 4) -> Any:
    params = SamplingParams(max_tokens=max_tokens)
    engine.add_request(prompt, params, request_id=name)
    output = run(engine)[name]
    assert output.token_ids == expect(engine, prompt, params)
    return output


def forget(engine: Engine) -> None:
    """Make the engine and the pool forget everything, but not the tier."""
    settle(engine)
    engine.reset_prefix_cache()
    manager_of(engine).pool.reset_cache()


@pytest.mark.parametrize("layers", LAYERS)
def test_chunks_evicted_from_the_pool_come_from_the_tier(layers: Sequence[LayerKind]) -> None:
    with tiered_engine(MemoryTiers(), layers) as engine:
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


@pytest.mark.parametrize("layers", LAYERS)
def test_an_engine_starts_warm_from_disk(layers: Sequence[LayerKind], tmp_path: Path) -> None:
    with disk_engine(tmp_path, layers) as engine:
        ask(engine, tokens(33), "first")
        settle(engine)
        expect_idle(engine)
    with disk_engine(tmp_path, layers) as engine:
        again = ask(engine, tokens(33), "again")
        assert (again.source.tiers, again.source.recomputed) == ({"disk": 32}, 1)
        expect_idle(engine)


@pytest.mark.parametrize(("model", "rows"), [("attention", 36), ("states", 36 + 8)])
def test_an_engine_that_was_killed_starts_warm(model: str, rows: int, tmp_path: Path) -> None:
    """SIGKILL in the middle of its work: what was written is found, and the tokens are the same."""
    command = [sys.executable, "-m", "tests.engine.killed_engine", str(tmp_path), model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        written = int(process.stdout.readline())
        process.kill()
    assert written == rows
    with disk_engine(tmp_path, MODELS[model]) as engine:
        for seed in range(4):  # the first request too, although nothing has stepped the engine before
            again = ask(engine, tokens(33, seed=seed), f"again {seed}")
            assert (again.source.tiers, again.source.recomputed) == ({"disk": 32}, 1)
        expect_idle(engine)


def test_the_first_request_after_a_pause_comes_from_disk(tmp_path: Path) -> None:
    """The disk has opened by itself meanwhile, although an idle engine makes no step."""
    with disk_engine(tmp_path) as engine:
        ask(engine, tokens(33), "first")
        settle(engine)
    with disk_engine(tmp_path) as engine:
        (tier,) = manager_of(engine).tiers
        until = time.monotonic() + PATIENCE
        while not tier._io._ended:  # type: ignore[attr-defined]
            assert time.monotonic() < until
            tier.wait_any(0.1)
        steps = count_steps(engine, tokens(33), "again")
        explained = engine.explain("again")
        assert explained is not None
        assert explained.from_tiers == {"disk": 32}
        assert steps > 0


def test_a_disk_that_hangs_while_it_opens_delays_requests_by_their_price_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price is `load_deadline`, as long as the price of computing is not known."""
    release = threading.Event()
    monkeypatch.setattr(DiskFiles, "open", lambda *_arguments: release.wait(PATIENCE) and None)
    try:
        with disk_engine(tmp_path, load_deadline=0.3) as engine:
            began = time.monotonic()
            late = ask(engine, tokens(33), "late")
            assert time.monotonic() - began >= 0.3
            assert late.source.tiers == {}
            explained = engine.explain("late")
            assert explained is not None
            assert explained.misses["disk"] is MissReason.NOT_OPEN
            release.set()
    finally:
        release.set()


# A tier that hangs


def test_a_tier_that_hangs_costs_one_deadline_and_then_nothing() -> None:
    tiers = MemoryTiers()
    with tiered_engine(tiers, settings={"load_deadline": 0.3}) as engine:
        for index in range(4):
            ask(engine, tokens(33, seed=index), f"first {index}")
        forget(engine)
        tiers.backend.hang()
        try:
            began = time.monotonic()
            late = ask(engine, tokens(33), "late")
            assert time.monotonic() - began >= 0.3
            assert late.source.tiers == {}
            explained = engine.explain("late")
            assert explained is not None
            assert explained.misses["disk"] is MissReason.TOO_SLOW
            suspended = suspend(engine)
            steps = count_steps(engine, tokens(33, seed=1), "then")
            assert steps < 40, "nobody waits for a tier that is suspended"
            explained = engine.explain("then")
            assert explained is not None
            assert explained.misses == {"cpu": MissReason.CLEARED, "disk": MissReason.SUSPENDED}
            assert suspended == "a call does not return"
            expect_sleep(engine)
        finally:
            tiers.backend.release()
        manager = manager_of(engine)
        while manager.stats().doomed:
            engine.step()
        expect_idle(engine)


def suspend(engine: Engine) -> str | None:
    """Step until the tier is suspended."""
    manager = manager_of(engine)
    while (why := manager.tier_stats()[0].suspended) is None:
        engine.step()
    return why


def count_steps(engine: Engine, prompt: list[int], name: str) -> int:
    params, steps = SamplingParams(max_tokens=4), 0
    engine.add_request(prompt, params, request_id=name)
    while engine.has_unfinished():
        for output in engine.step():
            assert not output.finished or output.token_ids == expect(engine, prompt, params)
        steps += 1
    return steps


def expect_sleep(engine: Engine) -> None:
    """Expect that an engine without requests need not step, as soon as nothing has moved for a second."""
    assert engine.connector is not None
    until = time.monotonic() + PATIENCE
    while engine.connector.has_pending_push_work():
        assert time.monotonic() < until, "an idle engine is kept stepping"
        engine.step()


def test_writes_that_hang_keep_no_engine_awake() -> None:
    tiers = MemoryTiers()
    with tiered_engine(tiers, rows=16) as engine:
        tiers.backend.hang()
        try:
            for index in range(3):
                ask(engine, tokens(33, seed=index), f"r{index}")
            expect_sleep(engine)
            manager = manager_of(engine)
            assert manager.stats().reading <= 4, "demotions keep to their share of the pool"
        finally:
            tiers.backend.release()
