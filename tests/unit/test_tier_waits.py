"""`TierWaits`: the phases of a wait and its deadline, one by one and in random order."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from tests.unit.connector_kit import Request
from tests.unit.test_connector_lookups import CachedHashes
from tests.unit.test_connector_promotion import PROMPT, TieredHost, keys_of
from tests.unit.tier_kit import ROW, Tiered, context, key, keys

from kvtier.keys import OffloadKey
from kvtier.offload import waits
from kvtier.offload.waits import WaitPhase
from kvtier.residency import MissReason

FIRST = int(os.environ.get("KVTIER_SEED", "0"))
NUM_SEEDS = int(os.environ.get("KVTIER_SEEDS", "40"))


def phase(tiered: Tiered, name: str = "a") -> WaitPhase | None:
    """Return the phase of a request's wait."""
    wait = tiered.manager.waits._waits.get(name)
    return None if wait is None else wait.phase


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_MOST_WAITING", 1)


def look_up(tiered: Tiered, *numbers: int, name: str = "a") -> None:
    """Begin a lookup of chunks of which the tier does not know whether it has them."""
    tiered.tier.unknown |= set(keys(*numbers))
    tiered.look_up(tiered.manager.promotions.unknown(keys(*numbers)), name)


def test_a_wait_passes_through_its_phases() -> None:
    tiered = Tiered()
    tiered.tier.held = set(keys(1, 2))
    look_up(tiered, 1, 2)
    assert phase(tiered) is WaitPhase.LOOKUP
    assert tiered.manager.waits.open(context(), 0) is None
    tiered.submit()
    tiered.poll()
    assert phase(tiered) is WaitPhase.LOOKUP
    tiered.tier.answer()
    tiered.poll()
    assert phase(tiered) is WaitPhase.IDLE
    wait = tiered.manager.waits.open(context(), 0)
    assert wait is not None
    assert wait.is_looked_up
    tiered.promote(1, 2)
    assert phase(tiered) is WaitPhase.PROMOTION
    job = tiered.submit()
    assert job is not None
    tiered.tier.finish(job.job_id)
    tiered.poll()
    assert phase(tiered) is WaitPhase.PROMOTION, "its rows are pinned until the load"
    assert not tiered.manager.waits.must_wait("a")
    tiered.manager.complete_load(keys(1, 2), tiered.manager.prepare_load(keys(1, 2), context()))
    assert phase(tiered) is WaitPhase.OVER
    assert tiered.manager.waits.open(context(), 0) is None
    tiered.manager.waits.forget(context())
    assert phase(tiered) is None
    assert not tiered.wait().is_looked_up


def test_a_wait_for_a_turn_has_one_bound(one_at_a_time: None) -> None:
    tiered = Tiered()
    tiered.poll()
    look_up(tiered, 1)
    assert tiered.manager.waits.is_full()
    assert tiered.manager.waits.await_turn(tiered.wait("b"), 2.0)
    tiered.clock.now = 1.5
    assert tiered.manager.waits.await_turn(tiered.wait("b"), 2.0), "the first call has set the deadline"
    assert tiered.manager.waits.must_wait("b")
    tiered.clock.now = 2.0
    assert not tiered.manager.waits.must_wait("b")
    assert phase(tiered, "b") is WaitPhase.OVER


def test_a_turn_after_a_lookup_keeps_the_deadline_of_the_lookup(one_at_a_time: None) -> None:
    tiered = Tiered()
    tiered.poll()
    look_up(tiered, 1)
    tiered.submit()
    tiered.tier.answer()
    tiered.poll()
    look_up(tiered, 2, name="b")  # it takes the only place
    tiered.clock.now = 0.5
    assert tiered.manager.waits.await_turn(tiered.wait(), 100.0)
    tiered.clock.now = 1.0
    assert not tiered.manager.waits.must_wait("a")
    assert phase(tiered) is WaitPhase.OVER


def test_a_request_that_skips_its_lookup_may_wait_for_its_turn(one_at_a_time: None) -> None:
    tiered = Tiered()
    tiered.poll()
    look_up(tiered, 1, name="b")
    tiered.manager.waits.skip_lookup(tiered.wait())
    assert tiered.manager.waits.await_turn(tiered.wait(), 1.0)


def test_a_wait_that_is_forgotten_before_its_submission_starts_nothing() -> None:
    tiered = Tiered()
    tiered.tier.held = set(keys(3))
    look_up(tiered, 1, name="a")
    tiered.promote(3, name="b")
    tiered.manager.on_request_finished(context("a"))
    tiered.manager.on_request_finished(context("b"))
    assert tiered.submit() is None
    assert not tiered.tier.asked
    look_up(tiered, 1, name="a")
    tiered.submit()
    assert len(tiered.tier.asked) == 1, "another request of the same id"


def test_a_promotion_without_room_is_over_at_once_and_takes_no_turn(one_at_a_time: None) -> None:
    tiered = Tiered(2)
    tiered.poll()
    tiered.tier.held = set(keys(1, 2))
    assert not tiered.promote(1, 2, whole=True)
    assert phase(tiered) is WaitPhase.OVER
    assert not tiered.manager.waits.is_full()
    tiered.manager.check()


def test_a_reset_lets_a_request_go_on_from_its_lookup() -> None:
    tiered = Tiered()
    look_up(tiered, 1, name="a")
    tiered.tier.held = set(keys(3))
    tiered.promote(3, name="b")
    tiered.submit()
    tiered.manager.reset_cache()
    tiered.manager.check()
    assert (phase(tiered, "a"), phase(tiered, "b")) == (WaitPhase.IDLE, WaitPhase.OVER)
    assert not tiered.manager.waits.is_waiting(context("a"))
    tiered.poll()


def test_a_preemption_unpins_rows_that_were_not_loaded() -> None:
    host = TieredHost()
    host.tier.held = set(keys_of(PROMPT))
    request = Request("a", PROMPT)
    host.promote(request)
    host.run(request)  # although the rows have come
    assert host.tiered.pool.stats().reading
    for job_id in list(host.tier.demotions):
        host.tier.finish(job_id)
    host.host.run_more(request, 26, 0, preempted_req_ids={"a"})
    host.end_step()
    assert not host.tiered.pool.stats().reading
    assert host.ask(request) == 24


def test_a_late_result_for_one_request_is_in_time_for_another() -> None:
    tiered = Tiered()
    tiered.tier.held = set(keys(1, 2))
    tiered.promote(1, 2, name="a", wait_budget=1.0)
    job = tiered.submit()
    assert job is not None
    tiered.promote(2, name="b", wait_budget=5.0)
    tiered.submit()
    tiered.clock.now = 1.0
    tiered.poll()
    assert (phase(tiered, "a"), phase(tiered, "b")) == (WaitPhase.OVER, WaitPhase.PROMOTION)
    assert tiered.ready(1, 2) == [False, None], "only the row that another request wants is kept"
    tiered.tier.finish(job.job_id, 2)
    tiered.poll()
    assert not tiered.is_waiting("b")
    assert tiered.manager.waits.sources(context("b")) == {key(2): "disk"}


@pytest.mark.parametrize("arrived", [0, 1])
def test_a_promotion_of_which_nothing_came_in_time_is_a_lower_bound_of_its_cost(arrived: int) -> None:
    tiered = Tiered()
    tiered.tier.held = set(keys(1, 2))
    tiered.promote(1, 2, wait_budget=1.0)
    job = tiered.submit()
    assert job is not None
    if arrived:
        tiered.tier.finish(job.job_id, 1)
        tiered.poll()
    tiered.clock.now = 1.0
    tiered.poll()
    (time,) = tiered.manager.promotions.take_times()
    assert time == (("disk", ROW, 0.001, False) if arrived else ("disk", 2 * ROW, 1.0, True))


# Random engines


@dataclass
class EnginePlay:
    """An engine that asks about its requests in every step, over a tier that answers when it likes.

    No request may wait for longer than its turn, one lookup and one promotion may take, and each of its
    admissions may cause one lookup and one promotion at most.
    """

    seed: int
    requests: dict[str, Request] = field(default_factory=dict)
    waiting_since: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    asked: list[list[OffloadKey]] = field(default_factory=list)
    """The lookups without an answer."""
    newest: int = 0
    longest: float = 0.0

    def run(self, steps: int = 100) -> Counter[str]:
        self.random = Random(self.seed)
        self.host = TieredHost(num_slots=self.random.choice((16, 64, 256)))
        self.lookups: Counter[str] = Counter()
        self.promotions: Counter[str] = Counter()
        self.owner: dict[OffloadKey, str] = {}
        self.jobs_seen: set[int] = set()
        for _ in range(steps):
            self.arrive()
            self.ask_all()
            self.host.host.idle()
            self.count_io()
            self.host.clock.now += self.random.choice((0.01, 0.1, 0.4))
            self.answer()
            self.host.end_step()
        self.counts["longest"] = round(self.longest)
        return self.counts

    def arrive(self) -> None:
        """Add requests with new prompts, of which the tier has a part, and knows a part of that."""
        while len(self.requests) < 12:
            self.newest += 1
            name = f"r{self.newest}"
            request = self.requests[name] = CachedHashes(name, [self.newest, *range(25)])
            chunks = keys_of(request.tokens)
            self.owner.update(dict.fromkeys(chunks, name))
            self.host.tier.held |= set(chunks[: self.random.randint(0, 6)])
            if self.random.random() < 0.6:
                self.host.tier.unknown |= set(chunks[self.random.randint(0, 5) :])

    def ask_all(self) -> None:
        now = self.host.clock.now
        for name, request in list(self.requests.items()):
            if self.random.random() < 0.05:
                self.finish(name)
                continue
            answer = self.host.ask(request)
            since = self.waiting_since.setdefault(name, now)
            if answer is None:
                self.counts["waits"] += 1
                self.longest = max(self.longest, now - since)
                # The turn, the lookup and the promotion have two seconds each; asks come with the steps.
                assert now - since <= 3 * 2.4, f"seed {self.seed}: {name} has waited since {since}, at {now}"
            elif self.random.random() < 0.5:  # else it waits for the engine's room and is asked again
                self.admit(request, answer)

    def admit(self, request: Request, tokens: int) -> None:
        name = request.request_id
        if tokens and self.random.random() < 0.7:
            blocks = self.host.host.blocks(7)
            self.host.scheduler.update_state_after_alloc(request, blocks, tokens)
            self.host.host.report(self.host.host.idle().load_jobs[name])
            self.host.host.run_new(request, blocks, computed=tokens)
            self.counts["loaded"] += 1
        else:
            self.host.run(request)
        if self.random.random() < 0.4:
            self.host.host.run_more(request, 26, 0, preempted_req_ids={name})
            self.begin_admission(name)
            self.counts["preempted"] += 1
            if self.random.random() < 0.5:
                self.host.tiered.pool.reset_cache()
        else:
            self.finish(name)

    def finish(self, name: str) -> None:
        self.host.scheduler.request_finished(self.requests.pop(name))
        self.begin_admission(name)

    def begin_admission(self, name: str) -> None:
        self.waiting_since.pop(name, None)
        self.count_io()
        del self.lookups[name], self.promotions[name]

    def count_io(self) -> None:
        """Count the lookups and promotions that were submitted for each request."""
        tier = self.host.tier
        for asked, _ in tier.asked:
            self.lookups.update({self.owner[chunk] for chunk in asked})
            self.counts["lookups"] += 1
            self.asked.append(asked)
        tier.asked = []
        for job_id, job in tier.promotions.items():
            if job_id not in self.jobs_seen:
                self.jobs_seen.add(job_id)
                self.promotions.update({self.owner[chunk] for chunk in job.keys})
                self.counts["promotions"] += 1
        for counter in (self.lookups, self.promotions):
            assert all(count <= 1 for count in counter.values()), f"seed {self.seed}: {counter}"

    def answer(self) -> None:
        """Have the tier answer some lookups, and end some jobs."""
        tier, asked = self.host.tier, self.asked
        if asked and self.random.random() < 0.5:
            tier.unknown -= set(asked.pop(self.random.randrange(len(asked))))
        for job_id in list(tier.promotions):
            if self.random.random() < 0.3:
                outcome = self.random.choice((None, None, None, MissReason.IO_FAILED))
                tier.finish(job_id, outcome=outcome)
        for job_id in list(tier.demotions):
            tier.finish(job_id, outcome=MissReason.IO_FAILED)


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM_SEEDS))
def test_no_request_waits_too_long_or_twice(
    seed: int, totals: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # few may wait at a time, so that most wait for their turn
        monkeypatch.setattr(waits, "_MOST_WAITING", 3)
        monkeypatch.setattr(waits, "_MOST_CHUNKS", 14)
        monkeypatch.setattr(waits, "_NEW_CHUNKS", 30)
    totals.update(EnginePlay(seed).run())


def test_the_random_engines_exercised_every_part(totals: Counter[str]) -> None:
    if not totals:
        pytest.skip("runs after test_no_request_waits_too_long_or_twice in the same session only")
    for part in ("waits", "lookups", "promotions", "loaded", "preempted", "longest"):
        assert totals[part] > NUM_SEEDS, (part, totals)
