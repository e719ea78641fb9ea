"""Transfers that are refused, fail, hang past their deadline or arrive short: the same tokens, nobody stuck,
nothing left.

What did not arrive is filled with poison, so an engine that used it would give other tokens.
`Fault.CORRUPT`, wrong bytes that nobody reports, is the negative control.
"""

from __future__ import annotations

from collections import Counter

import pytest
from tests.engine.workloads import Outcome, Workload, draw, expect_same_tokens, run

from kvtier.config import OffloadingConfig
from kvtier.offload import CPUOffloadingSpec, OffloadingSpec
from kvtier.testing.faults import Fault, FaultPlan, with_faults

RATES = (0.01, 0.03, 0.1, 0.3)
SEEDS = range(1000, 1040)


def run_with_faults(workload: Workload, plan: FaultPlan) -> Outcome:
    """Run a workload with deadlines so short that a hanging transfer costs little."""
    workload.settings |= {"load_deadline": "20ms", "store_deadline": "20ms"}

    def make_spec(config: OffloadingConfig) -> OffloadingSpec:
        return with_faults(CPUOffloadingSpec(config), plan)

    return run(workload, with_kvtier=True, spec_factory=make_spec)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_same_tokens_whatever_fails(is_packed: bool, rate: float) -> None:
    injected: Counter[Fault] = Counter()
    failed_loads = loaded = 0
    for seed in SEEDS:
        workload = draw(seed, is_packed=is_packed)
        plan = FaultPlan(seed, rate)
        off, on = run(workload, with_kvtier=False), run_with_faults(workload, plan)
        expect_same_tokens(workload, off, on)
        injected += plan.injected
        failed_loads += on.stats.loads_failed
        loaded += on.from_tiers
    assert loaded > 0
    if rate >= 0.1:
        assert injected.keys() == {Fault.REFUSE, Fault.FAIL, Fault.HANG, Fault.SHORT}
        assert failed_loads >= 10 * rate, "loads must have failed for this to show anything"


@pytest.mark.parametrize(
    "kind", [Fault.REFUSE, Fault.FAIL, Fault.HANG, Fault.SHORT], ids=lambda kind: kind.name
)
def test_every_transfer_fails(kind: Fault) -> None:
    """The tier is of little use or none, and the engine is none the worse."""
    for seed in SEEDS[:8]:
        workload = draw(seed)
        off, on = run(workload, with_kvtier=False), run_with_faults(workload, FaultPlan(seed, 1.0, (kind,)))
        expect_same_tokens(workload, off, on)
        assert kind in (Fault.HANG, Fault.SHORT) or on.from_tiers == 0, "these two deliver leading blocks"


def test_wrong_bytes_that_nobody_reports_are_seen() -> None:
    """The negative control: these workloads do use what they load."""
    changed = 0
    for seed in SEEDS:
        workload = draw(seed)
        off = run(workload, with_kvtier=False)
        on = run_with_faults(workload, FaultPlan(seed, 1.0, (Fault.CORRUPT,)))
        try:
            expect_same_tokens(workload, off, on)
        except AssertionError:
            changed += 1
    assert changed >= 3
