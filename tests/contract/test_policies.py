"""Every policy in the tree runs the suite, and so does one from outside it: the contract can be met in a few
lines.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.errors import ConfigError
from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.policies import CachePolicy, Slots, make_policy, policy_names, register_policy
from kvtier.policies.base import KeysOf
from kvtier.testing.policy_suite import PolicySuite, key_of


class FIFO(CachePolicy):
    """First in, first out, in plain Python."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: list[int] = []

    def insert(self, slots: Slots, keys: list[OffloadKey]) -> None:
        self._order += reversed(slots.tolist())

    def touch(self, slots: Slots, reused: npt.NDArray[np.bool_]) -> None:
        pass

    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        victims = np.array([slot for slot in self._order if evictable[slot]][:count], dtype=np.int64)
        self.remove(victims)
        return victims

    def remove(self, slots: Slots) -> None:
        gone = set(slots.tolist())
        self._order = [slot for slot in self._order if slot not in gone]

    def clear(self) -> None:
        self._order.clear()

    def ranked(self) -> Slots:
        return np.array(self._order, dtype=np.int64)


class TestLRU(PolicySuite):
    def make(self, capacity: int) -> CachePolicy:
        return make_policy("lru", capacity)


class TestARC(PolicySuite):
    def make(self, capacity: int) -> CachePolicy:
        return make_policy("arc", capacity)


class TestGittins(PolicySuite):
    def make(self, capacity: int) -> CachePolicy:
        return make_policy("gittins", capacity)


class TestFIFO(PolicySuite):
    def make(self, capacity: int) -> CachePolicy:
        return make_policy(f"{__name__}:FIFO", capacity)


@pytest.mark.parametrize("name", ["lru", "arc", "gittins"])
def test_the_coldest_are_found_without_ranking_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is written ahead of evictions asks every few steps, of a pool of many slots."""
    policy, evictable = make_policy(name, 64), np.ones(64, dtype=np.bool_)
    policy.insert(np.arange(64), [key_of(slot) for slot in range(64)])
    policy.touch(np.arange(40, 64), np.ones(24, dtype=np.bool_))
    evictable[::3] = False
    with monkeypatch.context() as patch:
        patch.setattr(policy, "ranked", None)
        coldest = policy.coldest(30, evictable).tolist()
    evicted = policy.evict(30, evictable, lambda slots: [key_of(slot) for slot in slots.tolist()])
    assert coldest == evicted.tolist()


class Wrong(FIFO):
    """Evicts what it was told not to."""

    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        return super().evict(count, np.ones_like(evictable), keys_of)


def test_a_policy_that_evicts_chunks_in_use_is_named_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    manager = CPUOffloadingManager(2, Wrong(2))
    context = ReqContext(req_id="a")
    keys = [key_of(slot) for slot in range(4)]
    assert manager.prepare_store(keys[:2], context) is not None
    assert manager.prepare_store(keys[2:], context) is None, "both slots are being written"
    assert "policy Wrong: evict failed" in caplog.text
    manager.check()


@pytest.fixture
def registered() -> Iterator[str]:
    register_policy("fifo-for-a-test", FIFO)
    yield "fifo-for-a-test"
    from kvtier import policies

    policies._policies.pop("fifo-for-a-test", None)


def test_policies_are_found_by_name(registered: str) -> None:
    found = make_policy(registered, 3)
    assert isinstance(found, FIFO)
    assert {"lru", "arc", "gittins", registered} <= set(policy_names())


@pytest.mark.parametrize(
    "name", ["lur", "nowhere.at.all:Policy", "kvtier.errors:KVTierError", f"{__name__}:Nothing"]
)
def test_an_unknown_policy_is_one_clear_line(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^cpu\.policy: ") as caught:
        make_policy(name, 3)
    assert "\n" not in str(caught.value)
    assert name != "lur" or "lru" in str(caught.value)
