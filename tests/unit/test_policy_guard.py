"""A policy of somebody else's may raise, lie, or write into what it is given: LRU goes on in its place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.policies import ARCPolicy, CachePolicy, GuardedPolicy, KeysOf, LRUPolicy, Slots, make_policy
from kvtier.policies.slots import Mask
from kvtier.testing import PolicySuite
from kvtier.transfer import CPULoadStoreSpec

CALLS = ["insert", "touch", "evict", "remove", "clear", "ranked", "coldest", "check"]


class TestGuardedARC(PolicySuite):
    """As long as a policy keeps the contract, so does the guard around it."""

    def make(self, capacity: int) -> CachePolicy:
        return GuardedPolicy(ARCPolicy(capacity))


class Failing(LRUPolicy):
    """Fails from its `after`-th call of one method on."""

    fails: ClassVar[str] = ""
    after: ClassVar[int] = 0
    answer: ClassVar[Callable[[Slots], object] | None] = None

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name != Failing.fails:
            return found
        Failing.after -= 1
        if Failing.after >= 0:
            return found
        if Failing.answer is None:
            raise ZeroDivisionError("a policy of mine")
        answer = Failing.answer
        return lambda *args: answer(found(*args))


class Scribbler(LRUPolicy):
    """Writes into all that it is given."""

    def insert(self, slots: Slots, keys: list[OffloadKey]) -> None:
        super().insert(slots, keys)
        slots[:] = slots[::-1].copy()
        keys.clear()

    def touch(self, slots: Slots, reused: Mask) -> None:
        super().touch(slots, reused)
        slots[:], reused[:] = 0, False

    def evict(self, count: int, evictable: Mask, keys_of: KeysOf) -> Slots:
        victims = super().evict(count, evictable, keys_of)
        evictable[:] = True
        return victims

    def remove(self, slots: Slots) -> None:
        super().remove(slots)
        slots[:] = 0


def play(manager: CPUOffloadingManager, seed: int) -> list[object]:
    """Play a random history over a small manager, check it after each call, and return all answers."""
    rng = random.Random(seed)
    keys = [OffloadKey(b"%d" % n + bytes(4)) for n in range(40)]
    answers: list[object] = []
    for step in range(600):
        context = ReqContext(req_id=f"r{step % 7}")
        some = rng.sample(keys, rng.randint(1, 6))
        kind = rng.random()
        if kind < 0.5:
            output = manager.prepare_store(some, context)
            if output is not None:
                assert isinstance(output.store_spec, CPULoadStoreSpec)
                slots = output.store_spec.block_ids.tolist()
                assert manager._book.find(output.keys_to_store).tolist() == slots
                answers.append((output.keys_to_store, slots, output.evicted_keys))
                manager.complete_store(output.keys_to_store, rng.random() < 0.9)
        elif kind < 0.8:
            manager.touch(some, context)
        elif kind < 0.9:
            manager.discard(some[:2])
        elif kind < 0.97:
            answers.append((manager.coldest(3), manager.hottest()))
        else:
            manager.reset_cache()
        manager.check()
    return answers


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("call", CALLS)
def test_a_policy_that_raises_is_replaced_by_lru(
    call: str, after: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody notices but the log: until then the policy was LRU, and what follows is LRU's choice too."""
    path = f"{__name__}:Failing"
    for seed in range(5):
        caplog.clear()
        monkeypatch.setattr(Failing, "fails", call)
        monkeypatch.setattr(Failing, "after", after)
        manager = CPUOffloadingManager(16, make_policy_at(path))
        assert play(manager, seed) == play(CPUOffloadingManager(16, "lru"), seed)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1, "told once"
        assert f"policy Failing: {call} failed" in lines[0]
        assert "a policy of mine" in lines[0]


@pytest.mark.parametrize(
    "answer",
    [
        lambda slots: slots[:-1],
        lambda slots: np.append(slots, slots[:1]),
        lambda slots: np.append(slots[:-1], 10**9),
        lambda slots: np.append(slots[:-1], -1),
        lambda slots: np.zeros((2, 2)),
        lambda slots: None,
        lambda slots: "slots",
    ],
    ids=["too few", "twice", "beyond", "negative", "2-d", "None", "str"],
)
@pytest.mark.parametrize("call", ["evict", "coldest", "ranked"])
def test_a_policy_that_names_what_may_not_leave_is_replaced(
    call: str,
    answer: Callable[[Slots], object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Failing, "fails", call)
    monkeypatch.setattr(Failing, "after", 2)
    monkeypatch.setattr(Failing, "answer", answer)
    manager = CPUOffloadingManager(16, make_policy_at(f"{__name__}:Failing"))
    assert play(manager, 1) == play(CPUOffloadingManager(16, "lru"), 1)
    assert [f"policy Failing: {call} failed" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("slot", [0, 3], ids=["being read", "holds nothing"])
def test_a_victim_that_may_not_leave_is_not_taken(slot: int, caplog: pytest.LogCaptureFixture) -> None:
    """As many as asked for, different, and within the tier: but not one that may leave."""

    class Wrong(LRUPolicy):
        def evict(self, count: int, evictable: Mask, keys_of: KeysOf) -> Slots:
            return np.array([slot])

    policy = GuardedPolicy(Wrong(4))
    policy.insert(np.array([2, 1, 0]), [OffloadKey(b"%d" % n + bytes(4)) for n in (2, 1, 0)])
    evictable = np.array([False, True, True, True])
    assert policy.evict(1, evictable, lambda slots: []).tolist() == [1], "LRU's: the tail, 0, may not leave"
    assert "evict failed" in caplog.text


def test_a_policy_that_writes_into_what_it_is_given_changes_no_transfer() -> None:
    for seed in range(5):
        manager = CPUOffloadingManager(16, make_policy_at(f"{__name__}:Scribbler"))
        assert play(manager, seed) == play(CPUOffloadingManager(16, "lru"), seed)


class Untold(Exception):
    """An error that cannot even be shown."""

    def __repr__(self) -> str:
        raise ZeroDivisionError


class Endless:
    """An answer that says it is short, and never ends."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        if index > 1000:
            pytest.fail("it was read on and on")
        return index


@pytest.mark.parametrize("answer", [Untold(), Endless()])
def test_what_cannot_be_shown_or_read_is_replaced(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(LRUPolicy):
        def evict(self, count: int, evictable: Mask, keys_of: KeysOf) -> Slots:
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[return-value]

    policy = GuardedPolicy(Wrong(4))
    policy.insert(np.array([2, 1]), [OffloadKey(b"%d" % n + bytes(4)) for n in (2, 1)])
    assert len(policy.evict(1, np.ones(4, np.bool_), lambda slots: [])) == 1
    assert caplog.text.count("evict failed") == 1
    policy.check()


def make_policy_at(path: str) -> CachePolicy:
    policy = make_policy(path, 16)
    assert isinstance(policy, GuardedPolicy)
    return policy
