"""ARC against a chunk-by-chunk model of itself, and the steps of an example worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.policies import ARCPolicy
from kvtier.testing.manager_suite import keys
from kvtier.testing.policy_suite import key_of, slots_of

Key = OffloadKey


class NaiveARC:
    """Four lists, oldest first; one chunk at a time. B1 and B2 remember the last `capacity` evictions."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target = capacity, 0.0
        self.held: tuple[list[int], list[int]] = ([], [])
        self.ghosts: tuple[list[Key | None], list[Key | None]] = ([], [])

    def sizes(self) -> list[int]:
        return [sum(key is not None for key in ghosts[-self.capacity :]) for ghosts in self.ghosts]

    def insert(self, slots: list[int], names: list[Key]) -> None:
        size1, size2 = (max(1, size) for size in self.sizes())
        homes = [self.recall(name) for name in names]
        for slot, home in reversed(list(zip(slots, homes, strict=True))):
            self.held[home is not None].append(slot)
        target = (
            self.target + homes.count(0) * max(1.0, size2 / size1) - homes.count(1) * max(1.0, size1 / size2)
        )
        self.target = min(max(target, 0.0), float(self.capacity))

    def recall(self, name: Key) -> int | None:
        for which, ghosts in enumerate(self.ghosts):
            recent = ghosts[-self.capacity :]
            if name in recent:
                ghosts[len(ghosts) - len(recent) + recent.index(name)] = None
                return which
        return None

    def touch(self, slots: list[int], reused: list[bool]) -> None:
        for slot, again in reversed(list(zip(slots, reused, strict=True))):
            target = self.held[1] if again or slot in self.held[1] else self.held[0]
            self.drop(slot)
            target.append(slot)

    def drop(self, slot: int) -> int:
        which = int(slot in self.held[1])
        self.held[which].remove(slot)
        return which

    def evict(self, count: int, evictable: list[bool], names: dict[int, Key]) -> list[int]:
        victims = []
        for _ in range(count):
            order = (0, 1, 0) if len(self.held[0]) >= int(self.target) else (1, 0)
            found = [slot for which in order for slot in self.held[which] if evictable[slot]]
            if found:
                victims.append(found[0])
                self.ghosts[self.drop(found[0])].append(names[found[0]])
        return victims


@pytest.mark.parametrize("seed", range(40))
def test_against_a_model_that_goes_chunk_by_chunk(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice((1, 3, 8, 20))
    policy, naive = ARCPolicy(capacity), NaiveARC(capacity)
    names: dict[int, Key] = {}
    for _ in range(150):
        absent = [slot for slot in range(capacity) if slot not in names]
        new = rng.sample(absent, rng.randint(0, len(absent)))
        free = [key for n in range(3 * capacity) if (key := key_of(n)) not in names.values()]
        chosen = rng.sample(free, len(new))
        names.update(zip(new, chosen, strict=True))
        policy.insert(slots_of(*new), chosen)
        naive.insert(new, chosen)
        used = rng.sample(sorted(names), rng.randint(0, len(names)))
        reused = [rng.random() < 0.4 for _ in used]
        policy.touch(slots_of(*used), np.array(reused, dtype=np.bool_))
        naive.touch(used, reused)
        evictable = [rng.random() < 0.8 for _ in range(capacity)]
        count = rng.randint(0, capacity)
        victims = policy.evict(
            count, np.array(evictable), lambda slots: [names[slot] for slot in slots.tolist()]
        ).tolist()
        assert victims == naive.evict(count, evictable, names)
        for slot in victims:
            del names[slot]
        assert policy.target == naive.target
        assert sorted(policy.ranked().tolist()) == sorted(names)
        policy.check()


def test_an_example_by_hand() -> None:
    manager = CPUOffloadingManager(4, policy := ARCPolicy(4))

    def run(request: str, *numbers: int) -> list[bytes]:
        context = ReqContext(req_id=request)
        hits = manager.lookup_prefix(keys(*numbers), context)
        output = manager.prepare_store(keys(*numbers)[hits:], context)
        assert output is not None
        manager.complete_store(output.keys_to_store)
        manager.touch(keys(*numbers), context)
        return list(output.evicted_keys)

    assert run("a", 1, 2, 3, 4) == []
    assert run("b", 1, 2) == [], "1 and 2 are used again: they go to T2"
    assert run("c", 5) == keys(4), "the tail of what was used once"
    assert policy.target == 0.0
    assert run("d", 4) == keys(3)
    assert policy.target == 1.0, "4 came back from B1: T1 was too small"
    assert run("e", 6) == keys(5), "4 is in T2 by now"
    assert run("f", 7) == keys(6)


def test_a_request_that_uses_what_it_stored_does_not_count_twice() -> None:
    manager = CPUOffloadingManager(3, "arc")
    context = ReqContext(req_id="a")
    for numbers in ((1, 2), (3,)):
        assert manager.prepare_store(keys(*numbers), context) is not None
        manager.complete_store(keys(*numbers))
    manager.touch(keys(3), ReqContext(req_id="b"))
    for _ in range(5):
        manager.touch(keys(1, 2), context)
    output = manager.prepare_store(keys(4, 5), context)
    assert output is not None
    assert output.evicted_keys == keys(2, 1), "3 was used by another request"


def test_a_scan_does_not_wash_out_what_is_used_again() -> None:
    """What ARC is for: chunks that several requests use survive many that only one does."""
    manager = CPUOffloadingManager(16, "arc")
    shared = list(range(8))
    for request in range(3):
        run_request(manager, f"shared {request}", shared)
    for request in range(50):
        run_request(manager, f"scan {request}", range(100 + 8 * request, 108 + 8 * request))
    assert manager.lookup_prefix(keys(*shared), ReqContext()) == 8


def run_request(manager: CPUOffloadingManager, req_id: str, numbers: list[int] | range) -> None:
    context = ReqContext(req_id=req_id)
    output = manager.prepare_store(keys(*numbers), context)
    assert output is not None
    manager.complete_store(output.keys_to_store)
    manager.touch(keys(*numbers), context)
    manager.check()


def test_check_finds_a_slot_in_both_lists_and_a_wild_target() -> None:
    policy = ARCPolicy(4)
    policy.insert(slots_of(0, 1), [key_of(0), key_of(1)])
    policy.check()
    policy._t2.use(slots_of(1))
    with pytest.raises(IntegrityError, match="both in T1 and in T2"):
        policy.check()
    policy._t2.drop(slots_of(1))
    policy.target = 5.0
    with pytest.raises(IntegrityError, match="target"):
        policy.check()
