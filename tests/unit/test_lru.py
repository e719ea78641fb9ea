"""LRU against a plain list, and what it must do with a manager around it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.policies import LRUPolicy
from kvtier.testing.manager_suite import keys
from kvtier.testing.policy_suite import keys_of, slots_of


class NaiveLRU:
    """Slots in a list, least recently used first."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def use(self, slots: list[int]) -> None:
        self.order = [slot for slot in self.order if slot not in slots] + slots[::-1]

    def evict(self, count: int, evictable: list[bool]) -> list[int]:
        victims = [slot for slot in self.order if evictable[slot]][:count]
        self.order = [slot for slot in self.order if slot not in victims]
        return victims


@pytest.mark.parametrize("seed", range(30))
def test_against_a_list(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice((1, 4, 24))
    policy, naive = LRUPolicy(capacity), NaiveLRU()
    for _ in range(200):
        absent = [slot for slot in range(capacity) if slot not in naive.order]
        new = rng.sample(absent, rng.randint(0, len(absent)))
        policy.insert(slots_of(*new), keys_of(slots_of(*new)))
        naive.use(new)
        used = rng.sample(naive.order, rng.randint(0, len(naive.order)))
        policy.touch(slots_of(*used), np.ones(len(used), dtype=np.bool_))
        naive.use(used)
        evictable = [rng.random() < 0.7 for _ in range(capacity)]
        count = rng.randint(0, capacity)
        assert policy.evict(count, np.array(evictable), keys_of).tolist() == naive.evict(count, evictable)
        assert policy.ranked().tolist() == naive.order


def store(
    manager: CPUOffloadingManager, *numbers: int, request: str = "a"
) -> tuple[list[bytes], list[bytes], list[int]]:
    """Store chunks; return what was taken, who left, and the slots."""
    output = manager.prepare_store(keys(*numbers), ReqContext(req_id=request))
    assert output is not None
    manager.complete_store(output.keys_to_store)
    manager.check()
    return list(output.keys_to_store), list(output.evicted_keys), output.store_spec.block_ids.tolist()


def test_the_tail_of_a_prompt_leaves_first() -> None:
    manager = CPUOffloadingManager(4, "lru")
    assert store(manager, 1, 2, 3, 4)[2] == [0, 1, 2, 3]
    assert store(manager, 5, 6)[1:] == (keys(4, 3), [2, 3])


def test_chunks_of_the_offer_stay_and_reading_does_not_renew() -> None:
    manager = CPUOffloadingManager(4, "lru")
    context = ReqContext(req_id="b")
    store(manager, 1, 2)
    output = manager.prepare_store(keys(2, 3, 4, 5), context)
    assert output is not None
    assert output.keys_to_store == keys(3, 4, 5)
    assert output.evicted_keys == keys(1), "2 is older, but offered"
    waiting = manager.prepare_store(keys(1, 6), context)
    assert waiting is not None
    assert waiting.keys_to_store == keys(1), "2 could leave, and nobody else"
    manager.complete_store(keys(3, 4, 5, 1))
    manager.prepare_load(keys(5, 4), context)
    manager.complete_load(keys(5, 4))
    assert store(manager, 7, 8, 9)[1] == keys(5, 4, 3)


def test_a_finished_request_leaves_from_its_tail_though_it_stored_in_parts() -> None:
    manager = CPUOffloadingManager(6, "lru")
    store(manager, 1, 2)
    store(manager, 3, 4)
    store(manager, 5, 6)
    manager.touch(keys(1, 2, 3, 4, 5, 6), ReqContext(req_id="a"))
    assert store(manager, 10, 11, 12, 13)[1] == keys(6, 5, 4, 3)
