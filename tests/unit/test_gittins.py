"""`gittins` keeps the chunks that come back, refuses those that do not, and remembers what it has learnt."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.policies import Ending, GittinsPolicy, LRUPolicy
from kvtier.policies.reuse import _MOST_COUNTS, AGES, NUM_BINS, NUM_CLASSES, NUM_ENDINGS, ReuseModel
from kvtier.slot_table import SlotTable


class Cache:
    """A pool under `gittins` with a clock that the test moves."""

    def __init__(self, slots: int, policy: str = "gittins") -> None:
        self.now = 0.0
        self.manager = CPUOffloadingManager(slots, policy)
        self.policy = self.manager.policy
        self.policy.clock = lambda: self.now  # type: ignore[method-assign]
        self._ids = 0

    def ask(self, keys: list[OffloadKey], ending: Ending | None = None) -> int:
        """Run a request over these chunks, and return how many leading ones were there."""
        self._ids += 1
        context = ReqContext(req_id=str(self._ids))
        hits = self.manager.lookup_prefix(keys, context, wait=False) or 0
        output = self.manager.prepare_store(keys, context)
        if output is not None:
            self.manager.complete_store(output.keys_to_store)
        context.ending = ending or Ending(100)
        self.manager.touch(keys, context)
        self.manager.on_request_finished(context)
        return hits


def chunks(*names: object) -> list[OffloadKey]:
    return [OffloadKey(repr(name).encode().ljust(32, b".") + bytes(4)) for name in names]


def run(cache: Cache, seconds: int, seed: int) -> tuple[int, int]:
    """Run ten chats that come back every ten seconds, and twice as many requests that never do.

    Chats have long answers. Return hits and possible hits of the second half.
    """
    rng, due, hits, possible = random.Random(seed), dict[int, list[OffloadKey]](), 0, 0
    for second in range(seconds):
        cache.now += 1.0
        chat = due.pop(second, None) or chunks(*((second, at) for at in range(rng.randint(1, 4))))
        found = cache.ask(chat, Ending(1000))
        due[second + 10] = chat
        if second >= seconds // 2:
            hits, possible = hits + found, possible + len(chat)
        for other in range(2):
            cache.ask(chunks(*((second, other, at) for at in range(rng.randint(1, 4)))), Ending(10))
    cache.manager.check()
    return hits, possible


def test_it_learns_which_requests_come_back() -> None:
    """The chats take some 25 slots; with all that comes between two of their turns, LRU would need 75."""
    found = {policy: run(Cache(40, policy), 400, seed=1) for policy in ("gittins", "lru")}
    hits, possible = found["gittins"]
    assert hits > 0.9 * possible
    assert found["lru"][0] < 0.1 * possible


def test_it_refuses_chunks_that_are_worth_less_than_those_that_would_leave() -> None:
    cache = Cache(20)
    run(cache, 400, seed=2)
    assert cache.manager.stats().refused > 0
    context = ReqContext(req_id="new")
    output = cache.manager.prepare_store(chunks(*(("never seen", at) for at in range(20))), context)
    assert output is not None
    assert len(output.keys_to_store) < 20
    assert context.is_cut, "chunks behind those could not be loaded"
    output = cache.manager.prepare_store(chunks("more"), context)
    assert output is not None
    assert output.keys_to_store == []


def test_refused_chunks_are_known_when_they_come_back() -> None:
    cache = Cache(1)
    policy = cache.policy
    assert isinstance(policy, GittinsPolicy)
    (kept,), (other,) = chunks("kept"), chunks("other")
    for _ in range(6):
        cache.now += 1.0
        cache.ask([kept])
    # As if chunks of one use never came back.
    policy.model.indices[:NUM_ENDINGS] = 0.0
    assert cache.ask([other]) == 0
    assert cache.manager.lookup_prefix([kept], ReqContext(), wait=False) == 1, "the other one was refused"
    policy.insert(np.array([0]), [other])
    assert policy.chunks["uses"].tolist() == [2]


def test_a_chunk_that_comes_back_after_its_eviction_has_its_uses() -> None:
    cache = Cache(2)
    policy = cache.policy
    assert isinstance(policy, GittinsPolicy)
    first, second = chunks("a", "b"), chunks("c", "d")
    for keys in (first, first, second):
        cache.now += 1.0
        cache.ask(keys)
    policy.evict(2, np.ones(2, dtype=np.bool_), lambda slots: second)
    cache.now += 1.0
    policy.insert(np.array([0, 1]), first)
    assert policy.chunks["uses"].tolist() == [3, 3]


def test_a_prompt_stored_in_steps_does_not_push_its_own_beginning_out() -> None:
    cache = Cache(8)
    for name in "abc":
        cache.now += 1.0
        cache.ask(chunks(*((name, at) for at in range(4))))
    prompt, context = chunks(*range(12)), ReqContext(req_id="long")
    cache.now += 60.0
    for start in range(0, 12, 2):
        output = cache.manager.prepare_store(prompt[start : start + 2], context)
        assert output is not None
        cache.manager.complete_store(output.keys_to_store)
    assert cache.manager.lookup_prefix(prompt, ReqContext(), wait=False) == 8


def test_a_prompt_longer_than_the_pool_keeps_its_beginning() -> None:
    cache = Cache(8)
    prompt, context = chunks(*range(20)), ReqContext(req_id="long")
    for start in range(20):
        cache.now += 100.0
        output = cache.manager.prepare_store(prompt[start : start + 1], context)
        if output is not None:
            cache.manager.complete_store(output.keys_to_store)
    assert cache.manager.lookup_prefix(prompt, ReqContext(), wait=False) == 8


@pytest.mark.parametrize("learns_first", [False, True])
def test_requests_that_go_on_do_not_keep_newcomers_out(learns_first: bool) -> None:
    """Requests with long answers fill the pool, none of them ends, and many wait: each gets its slots."""
    cache = Cache(32)
    if learns_first:
        run(cache, 200, seed=6)
    for number in range(300):
        cache.now += 0.2
        prompt, context = chunks(*((number, at) for at in range(8))), ReqContext(req_id=f"goes on {number}")
        output = cache.manager.prepare_store(prompt, context)
        assert output is not None
        cache.manager.complete_store(output.keys_to_store)
        if number >= 20:
            assert output.keys_to_store == prompt, number
            assert not context.is_cut
    cache.manager.check()


def test_a_table_that_is_not_told_of_ends_takes_newcomers() -> None:
    """As that of a disk with `write: evict`, whose rows come when their requests are long over."""
    policy = GittinsPolicy(16)
    now = [0.0]
    policy.clock = lambda: now[0]  # type: ignore[method-assign]
    table = SlotTable(16, policy)
    for number in range(200):
        now[0] += 0.1
        keys = chunks(*((number, at) for at in range(4)))
        slots, _, _ = table.reserve(keys)
        assert len(slots) == 4, number
        table.complete(keys)
    table.check()


def test_ends_of_the_request_that_stored_a_chunk_are_no_second_use() -> None:
    cache = Cache(4)
    policy = cache.policy
    assert isinstance(policy, GittinsPolicy)
    keys, context = chunks(1, 2), ReqContext(req_id="one")
    cache.manager.prepare_store(keys, context)
    cache.manager.complete_store(keys)
    cache.manager.touch(keys, context)  # an audit
    context.ending = Ending(5)
    cache.manager.touch(keys, context)
    assert policy.chunks["uses"][:2].tolist() == [1, 1]
    cache.ask(keys)
    assert policy.chunks["uses"][:2].tolist() == [2, 2]


# -- the model ----------------------------------------------------------------------------------------


def naive_index(used: list[float], reached: list[float], at: int) -> float:
    """Compute an index from its definition, without classes to lean on."""
    best = 0.0
    alive, gained, taken = 1.0, 0.0, 0.0
    widths = [*np.diff(AGES), AGES[-1] * (2**0.5 - 1)]
    for bin_ in range(at, NUM_BINS):
        chance = min(0.95, used[bin_] / reached[bin_]) if reached[bin_] else 0.0
        gained += alive * chance
        taken += alive * (1 - chance / 2) * widths[bin_]
        alive *= 1 - chance
        best = max(best, gained / taken)
    return best


def count(table: np.ndarray, classes: np.ndarray, ages: np.ndarray) -> None:
    """Count idle times in a table by class and bin."""
    bins = np.searchsorted(AGES, ages, side="right") - 1
    np.add.at(table.reshape(NUM_CLASSES, NUM_BINS), (classes, bins), 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_indices_are_those_of_the_definition(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.policies.reuse._SHRINKAGE", 1e-9)
    rng, model = random.Random(seed), ReuseModel()
    ages = np.array([rng.choice((0.1, 1.0, 30.0, 500.0, 9000.0)) * rng.uniform(1, 2) for _ in range(400)])
    ages[:30] = 1e9  # so that something is known of every age
    kept = np.array([rng.random() < 0.6 for _ in ages]) & (ages < 1e9)
    count(model._used, np.zeros(int(kept.sum()), dtype=np.int64), ages[kept])
    count(model._given_up, np.zeros(int((~kept).sum()), dtype=np.int64), ages[~kept])
    model.derive(model.new_counts())
    used = model._used[:NUM_BINS]
    reached = np.cumsum((used + model._given_up[:NUM_BINS])[::-1])[::-1]
    for at in range(NUM_BINS):
        expected = naive_index(used.tolist(), reached.tolist(), at)
        assert model.indices[0, at] == pytest.approx(expected, rel=1e-3)


def test_chunks_with_more_uses_are_never_worth_less() -> None:
    """The head of a prefix has at least the uses of its tail, and must not leave before it."""
    rng, model = np.random.default_rng(3), ReuseModel()
    count(model._used, rng.integers(0, NUM_CLASSES, 5000), rng.exponential(100.0, 5000))
    count(model._given_up, rng.integers(0, NUM_CLASSES, 5000), rng.exponential(900.0, 5000))
    model.derive(model.new_counts())
    by_uses = model.indices.reshape(5, -1, NUM_BINS)
    assert (np.diff(by_uses, axis=0) >= 0).all()
    assert np.isfinite(model.indices).all()


def test_old_habits_are_forgotten() -> None:
    model = ReuseModel()
    for _ in range(1000):
        model._given_up[5] += 1000.0
        model.derive(model.new_counts())
    assert model._given_up.sum() <= _MOST_COUNTS + 1000.0


def test_what_is_learnt_survives_as_bytes() -> None:
    cache = Cache(40)
    run(cache, 300, seed=4)
    policy, copy = cache.policy, GittinsPolicy(7)
    assert isinstance(policy, GittinsPolicy)
    data = policy.learnt()
    assert len(data) < 24_000
    assert copy.take_learnt(data)
    assert copy.learnt() == data
    habits = list(copy.model.habits())
    assert all(habit.idle_times > 0 and 0 <= habit.comes_back <= 1 for habit in habits)
    (long,) = [h for h in habits if (h.uses, h.answer_tokens) == ("1", "256 or more")]
    assert long.median_seconds == pytest.approx(10.0, rel=0.5)


@pytest.mark.parametrize("more", [1.0, 1.05])
def test_of_chunks_that_are_worth_nearly_the_same_the_last_used_stays(more: float) -> None:
    """Guards evictions in the order of classes within a bin of age, and by differences that are noise."""
    policy, now = GittinsPolicy(8), [0.0]
    policy.clock = lambda: now[0]  # type: ignore[method-assign]
    policy.insert(np.arange(8), chunks(*range(8)))
    for slot in range(8):
        now[0] = 1000.0 - 4 ** (4 - slot / 2)
        ending = Ending(1000 if slot % 2 else 10, ("unknown", "tool")[slot % 2])
        policy.end_request(np.array([slot]), np.array([slot % 3 == 0]), ending)
    policy.model.indices[:] = 1.0
    policy.model.indices[policy.chunks["class"][0]] = more  # those of the oldest, too
    now[0] = 1000.0
    assert policy.ranked().tolist() == list(range(8))


def test_chunks_of_long_requests_tell_no_more_than_their_requests() -> None:
    """Guards indices that follow the noise where requests have many chunks, which come back together."""
    found = {}
    for chunks_of_request in (1, 100):
        model = ReuseModel()
        for _ in range(20):
            model.count_request(chunks_of_request)
        used, given_up = (table.reshape(NUM_CLASSES, NUM_BINS) for table in (model._used, model._given_up))
        used[:, 25], given_up[:, 30] = 40.0 * chunks_of_request, 60.0 * chunks_of_request
        # Of ten requests, four came back, and sooner than those of other classes do.
        used[0, 15], used[0, 25] = 4.0 * chunks_of_request, 0.0
        given_up[0, 30] = 6.0 * chunks_of_request
        model.derive(model.new_counts())
        found[chunks_of_request] = model.indices[0, 20]
    assert found[100] == pytest.approx(found[1], rel=0.2)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_bytes_are_not_taken(seed: int) -> None:
    """The last case is a NaN of which numpy warns when it is cast."""
    rng, data = random.Random(seed), bytearray(ReuseModel().to_bytes())
    match seed % 4:
        case 0:
            del data[rng.randrange(len(data)) :]
        case 1:
            data[rng.randrange(16)] ^= 1 << rng.randrange(8)
        case 2:
            data += b"more"
        case 3 if seed < 19:
            data[-4:] = np.array([rng.choice((-1.0, np.inf, np.nan, 1e12))], dtype="<f4").tobytes()
        case 3:
            data[-4:] = (0x7F800001).to_bytes(4, "little")
    model = ReuseModel()
    assert not model.take_bytes(bytes(data))
    assert (model.indices == ReuseModel().indices).all()


class Forgetful(GittinsPolicy):
    """Fails when it should say what it has learnt."""

    def learnt(self) -> bytes:
        raise RuntimeError("what was it?")

    def take_learnt(self, data: bytes) -> bool:
        raise RuntimeError("what is that?")


def test_a_foreign_policy_that_cannot_save_what_it_learnt_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for call in (lambda table: table.habits(), lambda table: table.take_habits(b"")):
        table = SlotTable(4, Forgetful(4))
        table.take(chunks(1, 2))
        assert not call(table)
        assert type(table.policy) is LRUPolicy
        table.check()
    assert "policy Forgetful: learnt failed" in caplog.text


def test_a_large_pool_is_sampled() -> None:
    policy = GittinsPolicy(100_000)
    now = [0.0]
    policy.clock = lambda: now[0]  # type: ignore[method-assign]
    slots = np.arange(100_000)
    policy.insert(slots, chunks(*range(100_000)))
    for _ in range(2):
        now[0] += 10.0
        policy.end_request(slots, np.ones(100_000, dtype=np.bool_), Ending(5))
    assert 2000 < policy.model._used.sum() < 2500
    policy.check()


@pytest.mark.parametrize("jumps", [(0.0, 1e18, -1e18), (5.0, 4.0, -1.0), (1e300, -1e300)])
def test_a_clock_that_jumps_breaks_nothing(jumps: tuple[float, ...]) -> None:
    cache, rng = Cache(8), random.Random(1)
    for turn in range(100):
        cache.now = jumps[turn % len(jumps)]
        cache.ask(chunks(rng.randrange(20), *range(100 + 3 * turn, 103 + 3 * turn)), Ending(5))
        cache.manager.check()


@pytest.mark.parametrize("num_tokens", [-(10**30), -1, 0, 10**30, np.nan, np.inf, 3.5])
@pytest.mark.parametrize("how", ["tool", "junk", "", None])
def test_endings_that_cannot_be_break_nothing(num_tokens: Any, how: Any) -> None:
    policy = GittinsPolicy(4)
    policy.insert(np.arange(4), chunks(*range(4)))
    for _ in range(3):
        policy.end_request(np.arange(4), np.ones(4, dtype=np.bool_), Ending(num_tokens, how))
        policy.check()


class Vain(LRUPolicy):
    """Finds everything worth something that is no number."""

    def worth(self, newcomers: list[OffloadKey]) -> Any:
        return ["much"] * len(newcomers)


def test_a_foreign_policy_that_misjudges_newcomers_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    table = SlotTable(4, Vain(4))
    assert table.worth(chunks(1, 2)) is None
    assert type(table.policy) is LRUPolicy
    assert "policy Vain: worth failed" in caplog.text
