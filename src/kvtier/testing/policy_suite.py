"""The contract of an eviction policy as tests: subclass `PolicySuite`, define `make`, run pytest.

    class TestMine(PolicySuite):
        def make(self, capacity):
            return MyPolicy(capacity)

Every policy must rank exactly the slots it was given, evict only slots that may leave and as many as it
can, worst first, and let the tail of a prefix leave before its head. How it weighs recency against
frequency is not tested.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.keys import OffloadKey
from kvtier.policies import CachePolicy, Slots


def slots_of(*slots: int) -> Slots:
    """Return slots in the form for policies."""
    return np.array(slots, dtype=np.int64)


def key_of(slot: int) -> OffloadKey:
    """Return the key of a slot's chunk."""
    return OffloadKey(b"chunk %d" % slot + bytes(4))


def keys_of(slots: Slots) -> list[OffloadKey]:
    """Name the chunks in slots."""
    return [key_of(slot) for slot in slots.tolist()]


class PolicySuite:
    """The tests that every policy passes."""

    def make(self, capacity: int) -> CachePolicy:
        """Return a fresh policy for `capacity` slots."""
        raise NotImplementedError

    def insert(self, policy: CachePolicy, *slots: int) -> None:
        """Make a policy rank slots, given from the head of a prefix to its tail."""
        policy.insert(slots_of(*slots), keys_of(slots_of(*slots)))
        policy.check()

    def evict(
        self, policy: CachePolicy, count: int, evictable: npt.NDArray[np.bool_] | None = None
    ) -> list[int]:
        """Make a policy evict, by default among all slots."""
        allowed = np.ones(policy.capacity, dtype=np.bool_) if evictable is None else evictable
        before = allowed.copy()
        victims = policy.evict(count, allowed, keys_of)
        assert np.array_equal(allowed, before), "what may be evicted is not the policy's to change"
        policy.check()
        return [int(slot) for slot in victims]

    def test_a_new_policy_ranks_nothing(self) -> None:
        policy = self.make(4)
        assert policy.capacity == 4
        assert policy.ranked().tolist() == []
        assert self.evict(policy, 3) == []

    def test_capacity_may_be_zero(self) -> None:
        policy = self.make(0)
        assert self.evict(policy, 1) == []

    def test_the_tail_of_a_prefix_leaves_before_its_head(self) -> None:
        policy = self.make(8)
        self.insert(policy, 5, 2, 7, 0)
        assert self.evict(policy, 4) == [0, 7, 2, 5]

    @pytest.mark.parametrize("reused", [False, True])
    def test_a_used_prefix_leaves_from_its_tail_too(self, reused: bool) -> None:
        policy = self.make(8)
        self.insert(policy, 5, 2, 7, 0)
        policy.touch(slots_of(5, 2, 7, 0), np.full(4, reused))
        assert self.evict(policy, 4) == [0, 7, 2, 5]

    def test_evict_takes_what_ranked_says(self) -> None:
        policy = self.make(8)
        self.insert(policy, 3, 1)
        self.insert(policy, 4, 6, 2)
        policy.touch(slots_of(3), np.array([True]))
        expected = policy.ranked().tolist()
        assert sorted(expected) == [1, 2, 3, 4, 6]
        assert self.evict(policy, 3) == expected[:3]
        assert policy.ranked().tolist() == expected[3:]

    def test_only_what_is_evictable_leaves(self) -> None:
        policy = self.make(6)
        self.insert(policy, 0, 1, 2, 3, 4, 5)
        evictable = np.array([True, False, True, False, False, True])
        assert self.evict(policy, 2, evictable) == [5, 2]
        assert self.evict(policy, 9, evictable) == [0], "fewer only if fewer may leave"
        assert sorted(policy.ranked().tolist()) == [1, 3, 4]

    def test_evicting_nothing_changes_nothing(self) -> None:
        policy = self.make(4)
        self.insert(policy, 0, 1, 2)
        ranked = policy.ranked().tolist()
        assert self.evict(policy, 0) == []
        assert self.evict(policy, 2, np.zeros(4, dtype=np.bool_)) == []
        assert policy.ranked().tolist() == ranked

    def test_the_coldest_are_those_that_would_be_evicted(self) -> None:
        policy = self.make(6)
        self.insert(policy, 0, 1, 2, 3, 4, 5)
        policy.touch(slots_of(3, 1), np.array([True, True]))
        ranked, evictable = policy.ranked().tolist(), np.ones(6, dtype=np.bool_)
        evictable[ranked[0]] = False
        coldest = policy.coldest(3, evictable).tolist()
        assert policy.ranked().tolist() == ranked, "looking changes nothing"
        assert coldest == ranked[1:4]
        assert policy.coldest(9, evictable).tolist() == ranked[1:]
        assert policy.coldest(0, evictable).tolist() == []

    def test_a_removed_slot_is_not_ranked_and_can_come_back(self) -> None:
        policy = self.make(4)
        self.insert(policy, 0, 1, 2)
        policy.remove(slots_of(1))
        policy.check()
        assert sorted(policy.ranked().tolist()) == [0, 2]
        self.insert(policy, 1, 3)
        assert sorted(self.evict(policy, 4)) == [0, 1, 2, 3]

    def test_empty_batches_are_legal(self) -> None:
        policy = self.make(4)
        self.insert(policy)
        policy.touch(slots_of(), np.zeros(0, dtype=np.bool_))
        policy.remove(slots_of())
        assert policy.ranked().tolist() == []

    def test_clear_forgets_everything(self) -> None:
        policy = self.make(4)
        self.insert(policy, 0, 1, 2, 3)
        policy.clear()
        policy.check()
        assert policy.ranked().tolist() == []
        self.insert(policy, 2, 0)
        assert self.evict(policy, 2) == [0, 2]

    def test_an_evicted_chunk_may_return(self) -> None:
        policy = self.make(3)
        self.insert(policy, 0, 1, 2)
        for _ in range(8):
            (gone,) = self.evict(policy, 1)
            self.insert(policy, gone)
        assert sorted(policy.ranked().tolist()) == [0, 1, 2]

    @pytest.mark.parametrize("seed", range(12))
    def test_random_use_against_a_set(self, seed: int) -> None:
        """A set knows which slots are ranked; the policy must always agree with it."""
        rng = random.Random(seed)
        capacity = rng.choice((1, 3, 16, 200))
        policy, ranked = self.make(capacity), set[int]()
        for _ in range(120):
            self._random_call(rng, policy, ranked)
            policy.check()
            found = policy.ranked().tolist()
            assert len(found) == len(ranked)
            assert set(found) == ranked

    def _random_call(self, rng: random.Random, policy: CachePolicy, ranked: set[int]) -> None:
        absent = [slot for slot in range(policy.capacity) if slot not in ranked]
        match rng.choice(("insert", "insert", "touch", "touch", "evict", "remove", "clear")):
            case "insert":
                new = rng.sample(absent, rng.randint(0, len(absent)))
                self.insert(policy, *new)
                ranked.update(new)
            case "touch":
                used = rng.sample(sorted(ranked), rng.randint(0, len(ranked)))
                policy.touch(slots_of(*used), np.array([rng.random() < 0.5 for _ in used], dtype=np.bool_))
            case "evict":
                self._random_eviction(rng, policy, ranked)
            case "remove":
                gone = rng.sample(sorted(ranked), rng.randint(0, len(ranked) // 2))
                policy.remove(slots_of(*gone))
                ranked.difference_update(gone)
            case "clear" if rng.random() < 0.2:
                policy.clear()
                ranked.clear()

    def _random_eviction(self, rng: random.Random, policy: CachePolicy, ranked: set[int]) -> None:
        count = rng.randint(0, policy.capacity + 1)
        everyone = rng.random() < 0.4
        evictable = np.array(
            [everyone or rng.random() < 0.6 for _ in range(policy.capacity)], dtype=np.bool_
        )
        expected = policy.ranked().tolist()[:count] if everyone else None
        victims = self.evict(policy, count, evictable)
        allowed = {slot for slot in ranked if evictable[slot]}
        assert set(victims) <= allowed
        assert len(victims) == len(set(victims)) == min(count, len(allowed))
        assert expected is None or victims == expected
        ranked.difference_update(victims)
