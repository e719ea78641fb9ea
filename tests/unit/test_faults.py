"""The fault kit: faults happen as planned, are reported as the contract says, and what did not arrive is
poisoned.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from kvtier.errors import InputError
from kvtier.offload import CPUOffloadingSpec, OffloadingHandler
from kvtier.testing.caches import Caches, make_caches, make_config
from kvtier.testing.faults import POISON, Fault, FaultPlan, corrupt_pool, with_faults
from kvtier.testing.kit import ManualClock
from kvtier.transfer.base import NULL_BLOCK, CPULoadStoreSpec, GPULoadStoreSpec
from kvtier.transfer.layout import canonicalize

PATIENCE = 30.0
POISONED = int.from_bytes(bytes([POISON] * 2), "little")
BLOCKS = [3, 4, NULL_BLOCK, 9, 5]
LOAD = (CPULoadStoreSpec(range(5)), GPULoadStoreSpec(BLOCKS))
STORE = (GPULoadStoreSpec(BLOCKS), CPULoadStoreSpec(range(5)))


class Rig:
    """Faulty handlers over a pool whose bytes are all 1 and an engine whose bytes are all 0."""

    def __init__(self, *kinds: Fault, rate: float = 1.0, seed: int = 0) -> None:
        self.caches: Caches = make_caches("kv_first")
        for allocation in self.caches.allocations:
            allocation.zero_()
        self.clock = ManualClock()
        self.plan = FaultPlan(seed, rate, kinds)
        self.spec = with_faults(CPUOffloadingSpec(make_config(self.caches), clock=self.clock), self.plan)
        handlers = self.spec.get_handlers(canonicalize(self.caches.layers, self.caches.groups))
        (_, _, self.store), (_, _, self.load) = handlers
        assert isinstance(self.spec.spec, CPUOffloadingSpec)
        self.rows = self.spec.spec.open_pool().rows
        self.rows[:] = 1

    def value(self, block: int) -> int:
        """Return the one value that all elements of a block have."""
        values = {int(value) for page in self.caches.pages(0, block) for value in page.unique()}
        assert len(values) == 1, values
        return values.pop()

    def close(self) -> None:
        self.store.shutdown()
        self.load.shutdown()
        self.spec.shutdown()


def over(handler: OffloadingHandler, job_id: int) -> tuple[bool, tuple[int, ...] | None]:
    assert handler.wait({job_id}, PATIENCE)
    (result,) = handler.get_finished()
    assert result.job_id == job_id
    return result.success, result.failed_blocks


def test_a_failed_load_leaves_poison_and_nothing_else() -> None:
    rig = Rig(Fault.FAIL)
    assert rig.load.transfer_async(0, LOAD)
    assert over(rig.load, 0) == (False, (0, 1, 3, 4))
    assert [rig.value(block) for block in (3, 4, 9, 5)] == [POISONED] * 4
    assert rig.value(NULL_BLOCK) == rig.value(1) == 0
    rig.close()


def test_short_loads_deliver_their_leading_blocks() -> None:
    rig = Rig(Fault.SHORT)
    seen = set()
    for job_id in range(40):
        assert rig.load.transfer_async(job_id, LOAD)
        success, failed = over(rig.load, job_id)
        assert not success
        assert failed
        values = [rig.value(BLOCKS[position]) for position in (0, 1, 3, 4)]
        assert values == [POISONED if position in failed else 0x0101 for position in (0, 1, 3, 4)]
        seen.add(len(failed))
    assert seen == {1, 2, 3, 4}
    rig.close()


def test_a_hanging_transfer_is_ended_by_the_real_deadline() -> None:
    rig = Rig(Fault.HANG)
    assert rig.load.transfer_async(0, LOAD)
    assert not rig.load.wait({0}, 0.001)
    rig.clock.now += 11
    success, failed = over(rig.load, 0)
    assert not success
    assert [rig.value(BLOCKS[position]) for position in failed or ()] == [POISONED] * len(failed or ())
    rig.close()


def test_a_failed_store_poisons_its_slots() -> None:
    rig = Rig(Fault.FAIL)
    assert rig.store.transfer_async(0, STORE)
    assert over(rig.store, 0) == (False, (0, 1, 3, 4))
    image = rig.caches.groups[0].bytes_per_block
    assert [set(row[:image].tolist()) for row in rig.rows[:6]] == [
        {POISON},
        {POISON},
        {1},
        {POISON},
        {POISON},
        {1},
    ]
    rig.close()


@pytest.mark.parametrize("end", ["cancel", "shutdown", "wait"])
def test_poison_is_in_place_when_a_job_is_over(end: str) -> None:
    """Afterwards the blocks may be somebody else's."""
    rig = Rig(Fault.HANG)
    assert rig.load.transfer_async(0, LOAD)
    if end == "cancel":
        rig.load.cancel({0})
    elif end == "shutdown":
        rig.load.shutdown()
    else:
        rig.clock.now += 11
        assert rig.load.wait({0}, PATIENCE)
    for allocation in rig.caches.allocations:
        assert (allocation.view(torch.int8) == POISON).any()
        allocation.zero_()
    (result,) = rig.load.get_finished()
    assert not result.success
    assert {rig.value(block) for block in (3, 4, 9, 5)} == {0}
    rig.close()


def test_a_refused_job_has_no_result() -> None:
    rig = Rig(Fault.REFUSE)
    assert not rig.load.transfer_async(0, LOAD)
    assert rig.load.wait({0}, 0)
    assert rig.load.get_finished() == []
    rig.close()


def test_corruption_is_reported_as_success() -> None:
    rig = Rig(Fault.CORRUPT)
    assert rig.load.transfer_async(0, LOAD)
    assert over(rig.load, 0) == (True, None)
    assert rig.value(3) == POISONED
    rig.close()


def test_without_faults_bytes_arrive() -> None:
    rig = Rig(*Fault, rate=0.0)
    for job_id in range(20):
        assert rig.load.transfer_async(job_id, LOAD)
        assert over(rig.load, job_id) == (True, None)
    assert [rig.value(block) for block in (3, 4, 9, 5)] == [0x0101] * 4
    assert rig.plan.injected == Counter()
    rig.close()


def test_faults_follow_from_the_seed_and_the_job() -> None:
    def fates(seed: int) -> list[object]:
        plan = FaultPlan(seed, 0.3)
        return [
            plan.choose(way, job_id) for way in (("GPU", "CPU"), ("CPU", "GPU")) for job_id in range(500)
        ]

    assert fates(1) == fates(1)
    assert fates(1) != fates(2)
    plan = FaultPlan(1, 0.3)
    for job_id in range(2000):
        plan.choose(("GPU", "CPU"), job_id)
    assert 500 < plan.injected.total() < 700
    assert set(plan.injected) == set(plan.kinds)
    assert Fault.CORRUPT not in plan.kinds


@pytest.mark.parametrize("faulty", [False, True])
def test_corrupt_pool_changes_every_byte(faulty: bool) -> None:
    spec = CPUOffloadingSpec(make_config(make_caches("kv_first")))
    rows = spec.open_pool().rows
    before = rows.copy()
    corrupt_pool(with_faults(spec, FaultPlan(0, 0.0)) if faulty else spec, np.random.default_rng(0))
    assert (rows != before).all()
    corrupt_pool(spec.open_pool(), np.random.default_rng(0))
    assert (rows == before).all()
    spec.shutdown()


def test_only_handlers_with_a_probe_can_be_made_faulty() -> None:
    class Bare(CPUOffloadingSpec):
        def get_handlers(self, kv_caches):  # type: ignore[no-untyped-def]
            yield GPULoadStoreSpec, CPULoadStoreSpec, object()

    caches = make_caches("kv_first")
    spec = with_faults(Bare(make_config(caches)), FaultPlan(0, 1.0))
    with pytest.raises(InputError, match="expected handlers with a probe"):
        list(spec.get_handlers(canonicalize(caches.layers, caches.groups)))
