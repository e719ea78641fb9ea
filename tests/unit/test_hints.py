"""Hints: what is read from a request's parameters, and which chunks leave first because of them."""

from __future__ import annotations

import logging
import math
import random
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.errors import LogLimit
from kvtier.hints import NO_HINTS, Hints, read_hints, tenant_of
from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.policies import CachePolicy, Ending, KeysOf, LRUPolicy, Slots
from kvtier.slot_marks import SlotMarks

POLICIES = pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
KEEP, DROP, LOW, HIGH = Hints(keep=60.0), Hints(drop=True), Hints(priority=-1), Hints(keep=100, priority=1)


class Cache:
    """A pool with a clock that the test moves. Every request is checked."""

    def __init__(self, slots: int, policy: str | CachePolicy, share: float | None = None) -> None:
        self.now = 0.0
        self.manager = CPUOffloadingManager(slots, policy, share=share)
        self.manager.policy.clock = lambda: self.now  # type: ignore[method-assign]
        self._ids = 0

    def ask(self, keys: list[OffloadKey], hints: Hints = NO_HINTS, tenant: str = "") -> int:
        """Run a request over these chunks, and return how many leading ones were there."""
        self._ids += 1
        self.now += 0.01
        context = ReqContext(req_id=str(self._ids), hints=hints, tenant=tenant)
        hits = self.manager.lookup_prefix(keys, context, wait=False) or 0
        output = self.manager.prepare_store(keys, context)
        if output is not None:
            self.manager.complete_store(output.keys_to_store)
        context.ending = Ending(100)
        self.manager.touch(keys, context)
        self.manager.check()
        return hits

    def flood(self, count: int, tenant: str = "", hints: Hints = NO_HINTS) -> None:
        """Run requests of four chunks that never come back."""
        for _ in range(count):
            self.ask(chunks(f"flood {self._ids}", 4), hints, tenant)

    def held(self, keys: list[OffloadKey]) -> int:
        return sum(map(bool, self.manager.lookup_many(keys, ReqContext())))


def chunks(name: str, count: int) -> list[OffloadKey]:
    return [OffloadKey(f"{name} {at}".encode().ljust(32, b".") + bytes(4)) for at in range(count)]


# -- who leaves ---------------------------------------------------------------------------------------


@POLICIES
def test_kept_chunks_outlive_a_flood_until_their_time(policy: str) -> None:
    cache, kept, other = Cache(40, policy), chunks("kept", 8), chunks("other", 8)
    cache.ask(kept, KEEP)
    cache.ask(other)
    cache.flood(50)
    assert (cache.held(kept), cache.held(other)) == (8, 0)
    cache.now += 60.0
    cache.flood(50)
    assert cache.held(kept) == 0


@POLICIES
@pytest.mark.parametrize("hints", [DROP, LOW])
def test_dropped_and_low_chunks_leave_first(policy: str, hints: Hints) -> None:
    cache, early, late = Cache(24, policy), chunks("early", 12), chunks("late", 12)
    cache.ask(early)
    cache.ask(late, hints)
    cache.flood(3)
    assert (cache.held(early), cache.held(late)) == (12, 0)
    cache.flood(2)
    assert cache.held(early) < 12, "they are gone, and the next are the oldest"


@POLICIES
def test_only_what_a_request_has_stored_is_dropped(policy: str) -> None:
    cache, system, session = Cache(24, policy), chunks("system", 8), chunks("session", 8)
    cache.ask(system)
    cache.ask(system + session, DROP)
    cache.ask(chunks("x", 4))
    cache.flood(3)
    assert (cache.held(system), cache.held(session)) == (8, 0)


@POLICIES
def test_a_use_by_another_request_ends_a_drop(policy: str) -> None:
    cache, shared, other = Cache(24, policy), chunks("shared", 8), chunks("other", 8)
    cache.ask(other)
    cache.ask(shared, DROP)
    cache.ask(shared)
    cache.flood(3)
    assert cache.held(shared) == 8


@POLICIES
def test_a_low_request_does_not_make_what_others_use_low(policy: str) -> None:
    cache, shared, low = Cache(24, policy), chunks("shared", 8), chunks("low", 8)
    cache.ask(chunks("oldest", 8))
    cache.ask(shared)
    cache.ask(shared + low, LOW)
    cache.flood(3)
    assert (cache.held(shared), cache.held(low)) == (8, 0)
    cache.ask(low, LOW)
    cache.ask(low)
    cache.flood(1)
    assert cache.held(low) == 8


@POLICIES
def test_a_later_use_extends_keep_and_never_shortens_it(policy: str) -> None:
    cache, kept = Cache(40, policy), chunks("kept", 8)
    for hints in (KEEP, Hints(keep=1.0), NO_HINTS):
        cache.ask(kept, hints)
    cache.now += 50.0
    cache.flood(30)
    assert cache.held(kept) == 8
    cache.ask(kept, KEEP)
    cache.now += 50.0
    cache.flood(30)
    assert cache.held(kept) == 8


@POLICIES
def test_high_priority_keeps(policy: str) -> None:
    cache, high = Cache(40, policy), chunks("high", 8)
    cache.ask(high, HIGH)
    cache.flood(50)
    assert cache.held(high) == 8


@POLICIES
def test_hints_never_keep_a_request_from_being_stored(policy: str) -> None:
    """Half of the pool is kept at most; and if it is all that may leave, it leaves."""
    cache = Cache(40, policy)
    cache.flood(50, hints=KEEP)
    assert cache.manager.stats().not_kept == 50 * 4 - 20
    new = chunks("new", 40)
    cache.ask(new)
    assert cache.held(new) == 40


@POLICIES
def test_what_leaves_first_is_written_first(policy: str) -> None:
    cache = Cache(24, policy)
    cache.ask(chunks("kept", 8), KEEP)
    cache.ask(chunks("plain", 8))
    cache.ask(chunks("low", 8), LOW)
    found = [key.split()[0] for key in cache.manager.coldest(24)]
    assert found == [b"low"] * 8 + [b"plain"] * 8 + [b"kept"] * 8


@POLICIES
def test_marks_leave_with_their_chunks(policy: str) -> None:
    cache, keys = Cache(24, policy, share=0.5), chunks("a", 8)
    for leave in (cache.manager.discard, lambda _keys: cache.manager.reset_cache()):
        for hints in (KEEP, LOW):
            cache.ask(keys, hints, "tenant")
            leave(keys)
            cache.manager.check()
    assert cache.manager.stats().by_tenant == {}
    output = cache.manager.prepare_store(keys, ReqContext(tenant="tenant"))
    assert output is not None
    cache.manager.complete_store(keys, False, output.store_spec)
    cache.manager.check()
    assert cache.manager.stats().by_tenant == {}


@POLICIES
@pytest.mark.parametrize("seed", range(3))
def test_random_hints_and_tenants_break_nothing(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    cache = Cache(rng.randint(1, 60), policy, rng.choice((None, 0.1, 0.5, 1.0)))
    every = [NO_HINTS, KEEP, DROP, LOW, HIGH, Hints(keep=0.5), Hints(keep=1e9, priority=-1)]
    for _ in range(150):
        name, tenant = rng.randrange(12), str(rng.randrange(4))
        cache.now += rng.choice((0.0, 1.0, 100.0))
        cache.ask(chunks(f"{tenant} {name}", rng.randint(1, 30)), rng.choice(every), tenant)
        if rng.random() < 0.05:
            cache.manager.reset_cache()


class Choosy(LRUPolicy):
    """Refuses every newcomer but those for which a kept chunk would leave."""

    def evict_for(
        self,
        newcomers: list[OffloadKey],
        count: int,
        evictable: npt.NDArray[np.bool_],
        keys_of: KeysOf,
        stored_by: Slots,
        user: int,
    ) -> Slots:
        victims = self.coldest(count, evictable)
        is_taken = all(key.startswith(b"kept") for key in keys_of(victims))
        return self.evict(count if is_taken else 0, evictable, keys_of)


def test_hints_come_before_what_a_policy_finds_worth_its_slot() -> None:
    """Low chunks leave for anything; kept ones do not leave if newcomers are worth less than others."""
    cache = Cache(12, Choosy(12))
    for name, hints in (("plain", NO_HINTS), ("kept", KEEP), ("low", LOW)):
        cache.ask(chunks(name, 4), hints)
    cache.ask(chunks("new", 12))
    assert [cache.held(chunks(name, 12)) for name in ("plain", "kept", "low", "new")] == [4, 4, 0, 4]


def test_what_hints_keep_is_hot_and_what_they_drop_is_not() -> None:
    """A shutdown writes the hottest chunks first."""
    cache = Cache(12, "lru")
    for name, hints in (("kept", KEEP), ("plain", NO_HINTS), ("low", LOW)):
        cache.ask(chunks(name, 2), hints)
    hottest = cache.manager.hottest()
    assert hottest == chunks("kept", 2) + chunks("plain", 2) + chunks("low", 2)


# -- shares -------------------------------------------------------------------------------------------


def serve_beside_a_flood(policy: str, share: float | None) -> float:
    """Return the hit rate of a tenant with 24 chunks that come back, while another floods 64 slots."""
    cache, hits, asked = Cache(64, policy, share), 0, 0
    for turn in range(60):
        cache.flood(20, "greedy")
        found = cache.ask(chunks(f"session {turn % 6}", 4), tenant="modest")
        hits, asked = hits + found, asked + 4
    return hits / asked


@POLICIES
def test_a_tenant_who_floods_does_not_push_out_another(policy: str) -> None:
    """All but the first six turns of sixty can hit."""
    before, after = serve_beside_a_flood(policy, None), serve_beside_a_flood(policy, 0.5)
    print(f"{policy}: hit rate of the modest tenant {before:.0%} without shares, {after:.0%} with")
    assert before < 0.1
    assert after == 0.9


@POLICIES
def test_free_slots_are_for_everybody_and_the_greedy_give_way_first(policy: str) -> None:
    cache, early = Cache(40, policy, 0.5), chunks("early", 8)
    cache.ask(early, tenant="b")
    cache.flood(8, "a")
    assert cache.manager.stats().by_tenant == {"a": 32, "b": 8}
    cache.ask(chunks("new", 8), tenant="b")
    assert cache.held(early) == 8
    assert cache.manager.stats().by_tenant == {"a": 24, "b": 16}
    cache.ask(chunks("tiny", 1), tenant="c")
    assert cache.manager.stats().by_tenant == {"a": 23, "b": 16, "c": 1}
    for turn in range(4):
        cache.ask(chunks(f"more {turn}", 8), tenant="b")
    assert cache.manager.stats().by_tenant["b"] == 20, "at its share, it makes its own room"
    assert cache.manager.stats().by_tenant["a"] >= 19


@pytest.mark.parametrize("others", [10, 7])
def test_a_prompt_longer_than_the_share_is_stored_up_to_it(others: int) -> None:
    """With seven others, there are free slots, which count too."""
    cache, long = Cache(40, "lru", 0.5), chunks("long", 30)
    cache.flood(others, "other")
    cache.ask(long, tenant="long")
    assert cache.manager.lookup_prefix(long, ReqContext(), wait=False) == 20
    assert cache.manager.stats().by_tenant == {"other": 20, "long": 20}


def test_a_tenant_whose_chunks_are_all_in_use_asks_again_later() -> None:
    cache, own = Cache(40, "lru", 0.5), chunks("own", 20)
    cache.flood(5, "other")
    cache.ask(own, tenant="own")
    context = ReqContext(req_id="next", tenant="own")
    spec = cache.manager.prepare_load(own, context)
    assert cache.manager.prepare_store(chunks("new", 2), context) is None
    assert not context.is_cut, "its chunks are worth it"
    cache.manager.complete_load(own, spec)
    assert cache.manager.prepare_store(chunks("new", 2), context) is not None


@POLICIES
def test_a_greedy_tenant_keeps_its_share_while_another_is_read(policy: str) -> None:
    """Guards a tenant that gives what another one has too much, because that cannot leave now."""
    cache = Cache(20, policy, share=0.25)
    for tenant, count in (("modest", 4), ("greedy", 7), ("greediest", 9)):
        cache.ask(chunks(tenant, count), tenant=tenant)
    cache.manager.prepare_load(chunks("greediest", 8), ReqContext())
    cache.ask(chunks("new", 4), tenant="new")
    assert cache.manager.stats().by_tenant == {"modest": 3, "greedy": 5, "greediest": 8, "new": 4}


@pytest.mark.parametrize("num_read", [0, 150])
def test_thousands_of_greedy_tenants_cost_a_step_nothing(
    num_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a search through all tenants with more than their share, over all slots for each."""
    cache, looked_at = Cache(400, "lru", share=0.0025), 0
    for tenant in range(200):
        cache.ask(chunks(str(tenant), 2), tenant=str(tenant))
    for tenant in range(num_read):
        cache.manager.prepare_load(chunks(str(tenant), 2), ReqContext())
    groups = SlotMarks.groups

    def count_groups(*args: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return groups(*args)

    monkeypatch.setattr(SlotMarks, "groups", count_groups)
    cache.ask(chunks("new", 4), tenant="new")
    assert cache.manager.stats().by_tenant["new"] == 1
    assert looked_at <= 4


def test_a_tenant_keeps_half_of_its_share_at_most() -> None:
    cache = Cache(40, "lru", 0.5)
    cache.flood(20, "a", KEEP)
    modest = chunks("modest", 10)
    cache.ask(modest, KEEP, "b")
    cache.flood(20, "c")
    assert cache.held(modest) == 10
    assert cache.manager.stats().not_kept > 0


def test_a_tenant_keeps_no_chunks_of_another() -> None:
    """Chunks of tenants have different keys; guards the bound on kept chunks where that is not so."""
    cache = Cache(40, "lru", 0.5)
    cache.ask(chunks("shared", 20), tenant="a")
    cache.ask(chunks("own", 20), KEEP, "b")
    cache.ask(chunks("shared", 20), KEEP, "b")
    cache.flood(10, "a")
    assert cache.held(chunks("shared", 20)) == 0


@POLICIES
@pytest.mark.parametrize("start", [-1e9, -1e300, 1e300])
def test_chunks_are_kept_whatever_the_clock_says(policy: str, start: float) -> None:
    """Guards chunks that count as kept because the time is negative."""
    cache = Cache(16, policy, 0.5)
    for turn in range(40):
        if turn == 20:
            cache.now = start
        cache.ask(chunks(str(turn), 2), KEEP, str(turn % 3))
        cache.manager.check()


def test_a_million_tenants_take_no_memory() -> None:
    cache = Cache(4, "lru", 0.5)
    for tenant in range(5000):  # each of them leaves with its chunks, so that more would change nothing
        cache.ask(chunks(str(tenant), 1), KEEP, str(tenant))
    marks = cache.manager._table.marks
    assert marks is not None
    assert len(marks._numbers) == 4
    assert len(marks._spare_numbers) <= 2


def test_a_tenant_is_a_digest() -> None:
    assert tenant_of(None) == tenant_of("") == tenant_of(3) == ""
    names = {tenant_of(salt) for salt in ("a", "b", "\ud800", "a" * 10**6)}
    assert len(names) == 4
    assert all(len(name) == 12 and name.isalnum() for name in names)


# -- what clients write -------------------------------------------------------------------------------

BAD: list[Any] = [
    -2, math.nan, -math.inf, "", "soon", "10 years", "1" + " " * 10**6 + "!", "9" * 10**6, [], {}, [[[]]],
    b"1", True, "\ud800", object(), {"keep": {"keep": 1}}, -(10**5000), "-5s",
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"keep": "10m"}, Hints(keep=600.0)),
        ({"keep": 2.5}, Hints(keep=2.5)),
        ({"keep": "30d"}, Hints(keep=3600.0)),
        ({"keep": 10**5000}, Hints(keep=3600.0)),
        ({"keep": 1e300}, Hints(keep=3600.0)),
        ({"keep": math.inf}, Hints(keep=3600.0)),
        ({"drop": True}, Hints(drop=True)),
        ({"drop": True, "keep": 5}, Hints(drop=True)),
        ({"drop": False}, NO_HINTS),
        ({"priority": "low"}, Hints(priority=-1)),
        ({"priority": 1}, Hints(keep=3600.0, priority=1)),
        ({"priority": "normal", "ending": "tool"}, Hints(ending="tool")),
        ({"explain": True}, NO_HINTS),
    ],
)
def test_hints_are_read(given: dict[str, Any], read: Hints, caplog: pytest.LogCaptureFixture) -> None:
    assert read_hints({"kvtier": given}, 3600.0, LogLimit()) == read
    assert not caplog.records


def test_bad_hints_say_nothing_and_cost_one_line(caplog: pytest.LogCaptureFixture) -> None:
    limit, began = LogLimit(), time.monotonic()
    with caplog.at_level(logging.WARNING):
        for name in ("keep", "drop", "priority", "ending", "kepe", 3, None):
            for value in BAD:
                if (name, value) != ("drop", True):
                    assert read_hints({"kvtier": {name: value}}, 3600.0, limit) == NO_HINTS, (name, value)
        for junk in (None, 3, "keep", [], {"kvtier": None}, {"kvtier": ["keep"]}, {"keep": 3}):
            params: Any = junk if isinstance(junk, dict) else {"kvtier": junk}
            assert read_hints(params, 3600.0, limit) is NO_HINTS
    assert time.monotonic() - began < 2.0
    (record,) = caplog.records
    expected = (
        "kv_transfer_params.kvtier.keep: expected a time such as 500ms, 2s or a number of seconds, got -2"
    )
    assert record.getMessage() == f"{expected}; it is ignored"


def test_one_bad_hint_leaves_the_others() -> None:
    given = {"keep": "5m", "priority": "urgent", "ending": ["turn"], "drop": 0, "unknown": 1}
    assert read_hints({"kvtier": given}, 60.0, LogLimit()) == Hints(keep=60.0)


@pytest.mark.parametrize("name", ["keep", "drop", "priority", "ending"])
def test_a_hint_of_a_type_that_compares_as_it_likes_is_ignored(name: str) -> None:
    """Guards the scheduler's thread against arrays, which a caller in the same process may give."""
    assert read_hints({"kvtier": {name: np.array([1, 2])}}, 60.0, LogLimit()) == NO_HINTS
