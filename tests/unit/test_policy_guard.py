"""A policy of another package may raise, lie, or write into its arguments: LRU goes on in its place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.policies import KeysOf, LRUPolicy, Slots, make_policy
from kvtier.policies.slots import Mask
from kvtier.transfer import CPULoadStoreSpec

FAILING = f"{__name__}:Failing"
CALLS = ["insert", "touch", "evict", "remove", "clear", "ranked", "coldest", "check"]


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
                assert manager._table.find(output.keys_to_store).tolist() == slots
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
    """`play` checks after each call that the table is whole and LRU ranks all that is held."""
    for seed in range(5):
        caplog.clear()
        monkeypatch.setattr(Failing, "fails", call)
        monkeypatch.setattr(Failing, "after", after)
        manager = CPUOffloadingManager(16, make_policy(FAILING, 16))
        play(manager, seed)
        assert type(manager.policy) is LRUPolicy
        assert [record.getMessage() for record in caplog.records] == [
            f"policy Failing: {call} failed; going on with lru until the engine starts again"
        ], "it is logged once"
        assert "a policy of mine" in caplog.text


def test_lru_goes_on_from_the_chunks_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks used after the failure leave after those that were not."""
    monkeypatch.setattr(Failing, "fails", "touch")
    monkeypatch.setattr(Failing, "after", 0)
    manager, context = CPUOffloadingManager(4, Failing(4)), ReqContext(req_id="a")
    keys = [OffloadKey(b"%d" % n + bytes(4)) for n in range(6)]
    manager.prepare_store(keys[:4], context)
    manager.complete_store(keys[:4])
    manager.touch([keys[2], keys[0]], context)
    output = manager.prepare_store(keys[4:], context)
    assert output is not None
    assert set(output.evicted_keys) == {keys[1], keys[3]}
    manager.check()


LIES: dict[str, Callable[[Slots], object]] = {
    "twice": lambda slots: np.append(slots, slots[:1]),
    "beyond": lambda slots: np.append(slots[:-1], 10**9),
    "negative": lambda slots: np.append(slots[:-1], -1),
    "2-d": lambda slots: np.zeros((2, 2)),
    "None": lambda slots: None,
    "str": lambda slots: "slots",
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("call", ["evict", "coldest", "ranked"])
def test_a_policy_that_answers_with_wrong_slots_is_replaced(
    call: str, lie: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Failing, "fails", call)
    monkeypatch.setattr(Failing, "after", 2)
    monkeypatch.setattr(Failing, "answer", staticmethod(LIES[lie]))
    manager = CPUOffloadingManager(16, make_policy(FAILING, 16))
    play(manager, 1)
    assert type(manager.policy) is LRUPolicy
    assert [f"policy Failing: {call} failed" in record.getMessage() for record in caplog.records] == [True]


def test_a_policy_that_names_too_few_victims_costs_only_the_stores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A policy may choose badly: chunks without a slot are refused."""

    class Stingy(LRUPolicy):
        def evict(self, count: int, evictable: Mask, keys_of: KeysOf) -> Slots:
            return np.zeros(0, dtype=np.int64)

    manager = CPUOffloadingManager(16, Stingy(16))
    play(manager, 1)
    assert manager.stats().refused
    assert not caplog.records


class Wrong(LRUPolicy):
    """Gives one answer, or raises it, when it is asked for a victim."""

    answer: ClassVar[object] = None

    def evict(self, count: int, evictable: Mask, keys_of: KeysOf) -> Slots:
        if isinstance(Wrong.answer, Exception):
            raise Wrong.answer
        return Wrong.answer  # type: ignore[return-value]


class Unprintable(Exception):
    """An error whose text cannot be made."""

    def __repr__(self) -> str:
        raise ZeroDivisionError

    __str__ = __repr__


class Endless:
    """An answer that says it is short, and never ends."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        if index > 1000:
            pytest.fail("it was read on and on")
        return index


@pytest.mark.parametrize(
    "answer",
    [np.array([0]), np.array([2]), Unprintable(), Endless()],
    ids=["being read", "being written", "unprintable", "endless"],
)
def test_a_wrong_victim_is_not_taken(
    answer: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Wrong, "answer", answer)
    manager, context = CPUOffloadingManager(3, Wrong(3)), ReqContext(req_id="a")
    keys = [OffloadKey(b"%d" % n + bytes(4)) for n in range(4)]
    manager.prepare_store(keys[:3], context)
    manager.complete_store(keys[:2])
    manager.prepare_load(keys[:1], context)
    output = manager.prepare_store(keys[3:], context)
    assert output is not None
    assert output.evicted_keys == [keys[1]]
    assert caplog.text.count("evict failed") == 1
    manager.check()


def test_a_policy_that_writes_into_its_arguments_changes_no_transfer() -> None:
    for seed in range(5):
        manager = CPUOffloadingManager(16, make_policy(f"{__name__}:Scribbler", 16))
        assert play(manager, seed) == play(CPUOffloadingManager(16, "lru"), seed)
