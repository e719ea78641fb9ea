"""The promise: with kvtier an engine gives exactly the tokens that it gives without.

float32 KV, greedy, seeded random workloads: shared prefixes, preemptions, chunk factors 1, 2 and 4, blocks
of 8 to 32 tokens, groups of windows and of states, aborts, resets, pools of one to forty chunks. A negative
control corrupts the pool and must see other tokens.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.engine.workloads import Outcome, Workload, draw, expect_same_tokens, run

from kvtier import packing
from kvtier.engine import Engine

SEEDS = range(240)
BATCH = 20


@pytest.fixture(scope="module")
def totals() -> Outcome:
    return Outcome()


@pytest.mark.parametrize("first", SEEDS[::BATCH])
def test_same_tokens(first: int, totals: Outcome) -> None:
    for seed in range(first, first + BATCH):
        workload = draw(seed)
        off, on = run(workload, with_kvtier=False), run(workload, with_kvtier=True)
        expect_same_tokens(workload, off, on)
        totals.from_tiers += on.from_tiers
        totals.states_loaded += on.from_tiers * (workload.model == "states")
        totals.preemptions += on.preemptions
        totals.aborted |= {f"{seed}/{name}" for name in on.aborted}
        totals.stats.stores += on.stats.stores


def test_the_workloads_exercised_what_they_claim(totals: Outcome) -> None:
    """Guards the test above: without hits, preemptions or aborts it would show nothing."""
    if totals.stats.stores == 0:
        pytest.skip("runs after test_same_tokens in the same session only")
    drawn = [draw(seed) for seed in SEEDS]
    assert totals.from_tiers > 3_000
    assert totals.preemptions > 50
    assert len(totals.aborted) > 50
    assert {w.settings["blocks_per_chunk"] for w in drawn} == {1, 2, 4}
    assert {w.engine.block_size for w in drawn} == {8, 16, 32}
    assert {(w.model, w.engine.state_interval is None) for w in drawn} >= {
        ("llama", True),
        ("two groups", True),
        ("states", True),
        ("states", False),
    }
    assert totals.states_loaded > 500


@pytest.mark.parametrize("first", range(1000, 1040, BATCH))
def test_same_tokens_from_packed_rows(first: int) -> None:
    """KV in bfloat16, kept in three quarters of its bytes."""
    loaded = preempted = 0
    for seed in range(first, first + BATCH):
        workload = draw(seed, is_packed=True)
        off, on = run(workload, with_kvtier=False), run(workload, with_kvtier=True)
        expect_same_tokens(workload, off, on)
        assert on.stats.unpacked_chunks == 0
        loaded += on.from_tiers
        preempted += on.preemptions
    assert loaded > 100
    assert preempted > 0


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_same_tokens_whatever_does_not_pack(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks with too many exceptions are not kept, and all others of the request are."""
    rng, pack, unpacked, loaded = random.Random(int(100 * share)), packing.pack, 0, 0

    def pack_some(*arguments: Any) -> None:
        pack(*arguments)
        counts = arguments[-1]
        counts[[rng.random() < share for _ in counts]] = 1 << 20

    monkeypatch.setattr(packing, "pack", pack_some)
    for seed in range(1000, 1008):
        workload = draw(seed, is_packed=True)
        off, on = run(workload, with_kvtier=False), run(workload, with_kvtier=True)
        expect_same_tokens(workload, off, on)
        unpacked += on.stats.unpacked_chunks
        loaded += on.from_tiers
        assert on.stats.stores_failed == 0
    assert unpacked > 3
    assert bool(loaded) is (share < 1)


def test_corrupt_bytes_change_tokens() -> None:
    """The negative control: if the loaded bytes were not used, corrupting them would go unseen."""
    changed = loaded = 0
    for seed in range(30):
        workload = draw(seed)
        off = run(workload, with_kvtier=False)
        on = run(workload, with_kvtier=True, before_step=_corrupt)
        loaded += on.from_tiers > 0
        changed += _differs(workload, off, on)
    assert loaded >= 8
    assert changed >= loaded // 2


def _corrupt(engine: Engine, step: int) -> None:
    assert engine.connector is not None
    pool = engine.connector.connector_scheduler.spec.open_pool()  # type: ignore[union-attr,attr-defined]
    pool.rows[:] = 0x3F  # every float becomes 0.75 or so


def _differs(workload: Workload, off: Outcome, on: Outcome) -> bool:
    try:
        expect_same_tokens(workload, off, on)
    except AssertionError:
        return True
    return False
