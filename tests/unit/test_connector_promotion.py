"""The scheduler's side over tiers: when a request waits for them, for how long, and its explanation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.unit.connector_kit import BLOCK, Clock, GroupKind, Host, Request, make_host
from tests.unit.tier_kit import ROW, HandTier, Tiered

from kvtier.connector import KVConnectorOutput, OffloadingConnectorScheduler
from kvtier.events.tracker import Description
from kvtier.events.types import BlockRemoved, BlockStored
from kvtier.keys import OffloadKey, hash_blocks, make_offload_key
from kvtier.residency import MissReason, OffloadingEvent

PROMPT = list(range(100, 126))  # 26 tokens: six blocks and a tail


def keys_of(prompt: list[int], group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(block_hash, group) for block_hash in hash_blocks(prompt, BLOCK)]


class NumberedImageRequest(Request):
    """A request with an image that is named by a number."""

    def describe(self, start: int, stop: int, block_size: int) -> Description:
        return Description(self.tokens[start:stop], keyed_by_content=False)


class AdaptedRequest(Request):
    """A request of an adapter."""

    def describe(self, start: int, stop: int, block_size: int) -> Description:
        return Description(self.tokens[start:stop], lora_name="adapter")


@dataclass
class TieredHost:
    """A scheduler's side over a tier by hand, and the clock that both have."""

    num_slots: int = 64
    windows: tuple[GroupKind, ...] = (None,)
    settings: dict[str, Any] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.tiered = Tiered(self.num_slots, clock=self.clock)
        more = {"load_deadline": 2.0} | self.settings
        self.host: Host = make_host(
            windows=self.windows, clock=self.clock, manager=self.tiered.manager, **more
        )
        self.scheduler = self.host.scheduler

    @property
    def tier(self) -> HandTier:
        return self.tiered.tier

    def ask(self, request: Request, local: int = 0) -> int | None:
        return self.scheduler.get_num_new_matched_tokens(request, local)[0]

    def end_step(self) -> None:
        self.scheduler.update_connector_output(KVConnectorOutput())
        self.scheduler.check()

    def promote(self, request: Request) -> None:
        """Have a request's rows promoted."""
        assert self.ask(request) is None
        self.host.idle()
        self.clock.now += 0.01
        for job_id in list(self.tier.promotions):
            self.tier.finish(job_id)
        self.end_step()

    def load(self, request: Request, groups: int = 1) -> None:
        """Load what is offered, and run."""
        tokens = self.ask(request)
        assert tokens
        blocks = self.host.blocks(-(-request.num_tokens // BLOCK), groups)
        self.scheduler.update_state_after_alloc(request, blocks, tokens)
        self.host.report(self.host.idle().load_jobs[request.request_id])
        self.host.run_new(request, blocks, computed=tokens)

    def run(self, request: Request, local: int = 0, seconds: float = 0.0) -> None:
        """Compute a request whole."""
        blocks = self.host.blocks(-(-request.num_tokens // BLOCK), len(self.windows))
        self.scheduler.update_state_after_alloc(request, blocks, 0)
        meta = self.host.run_new(request, blocks, computed=local)
        self.clock.now += seconds
        self.end_step()
        for job_id in meta.store_jobs.values():
            self.host.report(job_id)

    def learn(self, seconds_per_token: float, seconds_per_byte: float) -> None:
        """Teach the cost of computing and of the disk."""
        for _ in range(50):
            self.scheduler.cost.learn_step(1000, 1000 * seconds_per_token)
            self.scheduler.cost.promotions["disk"].learn(10**6, 10**6 * seconds_per_byte)


def test_a_prompt_on_disk_is_promoted_and_then_loaded() -> None:
    host = TieredHost()
    host.tier.held = set(keys_of(PROMPT))
    request = Request("a", PROMPT)
    assert host.ask(request) is None, "ask again"
    assert not host.tier.promotions, "asking starts nothing"
    assert host.ask(request) is None
    host.host.idle()
    (job,) = host.tier.promotions.values()
    assert job.keys == keys_of(PROMPT)
    assert host.ask(request) is None
    host.tier.finish(job.job_id)
    host.end_step()
    host.load(request)
    explanation = host.scheduler.explain("a")
    assert explanation is not None
    assert (explanation.from_tiers, explanation.recomputed) == ({"disk": 24}, 2)
    assert explanation.first_miss is None
    host.scheduler.request_finished(request)
    host.tiered.manager.check()


def test_a_step_promotes_a_bounded_number_of_chunks_in_turn() -> None:
    host = TieredHost(num_slots=1 << 15)
    requests = [Request(f"r{number}", [number, *range(1, 1602)]) for number in range(24)]
    host.tier.held = {key for request in requests for key in keys_of(request.tokens)}
    under_way = 0
    for _ in range(4):
        assert all(host.ask(request) is None for request in requests)
        host.host.idle()
        jobs = list(host.tier.promotions.values())
        assert sum(len(job) for job in jobs[under_way:]) <= 2048 + 400, "the last may go beyond"
        under_way = len(jobs)
        host.end_step()
    assert 4096 <= sum(len(job) for job in jobs) <= 4096 + 400, "no more wait at a time"
    assert [job.keys[0] for job in jobs] == [keys_of(request.tokens)[0] for request in requests[:11]]
    host.clock.now = 100.0  # all time out in one step
    host.end_step()
    assert [host.ask(request) for request in requests[:11]] == [0] * 11
    assert all(host.ask(request) is None for request in requests[11:])
    host.host.idle()
    assert [job.keys[0] for job in host.tier.promotions.values()] == [
        keys_of(request.tokens)[0] for request in requests[11:17]
    ]


def test_a_prefix_in_memory_and_its_end_on_disk() -> None:
    host = TieredHost()
    host.host.cache(Request("first", PROMPT[:12]))
    host.tier.held = set(keys_of(PROMPT))
    request = Request("a", PROMPT)
    host.promote(request)
    host.load(request)
    explanation = host.scheduler.explain("a")
    assert explanation is not None
    assert explanation.from_tiers == {"cpu": 12, "disk": 12}


def test_a_request_is_promoted_once_per_admission() -> None:
    host = TieredHost()
    host.tier.held = set(keys_of(PROMPT))
    request = Request("a", PROMPT)
    assert host.ask(request) is None
    host.host.idle()
    (job,) = host.tier.promotions
    host.tier.finish(job, outcome=MissReason.IO_FAILED)
    host.end_step()
    assert [host.ask(request) for _ in range(3)] == [0, 0, 0]
    assert not host.tier.promotions
    host.run(request)
    host.host.run_more(request, 26, 0, preempted_req_ids={"a"})
    assert host.ask(request) == 24, "it was computed, and is in the pool"
    host.tiered.pool.reset_cache()
    assert host.ask(request) is None, "after a preemption it may be promoted again"


def test_arrived_rows_are_loaded_at_the_deadline() -> None:
    host = TieredHost()
    host.tier.held = set(keys_of(PROMPT))
    request = Request("a", PROMPT)
    host.ask(request)
    host.host.idle()
    (job,) = host.tier.promotions.values()
    host.tier.begun = set(keys_of(PROMPT))
    host.tier.finish_rows(job, keys_of(PROMPT)[:2])
    host.end_step()
    assert host.ask(request) is None
    host.clock.now = 2.5
    host.end_step()
    assert host.ask(request) == 8
    host.load(request)
    explanation = host.scheduler.explain("a")
    assert explanation is not None
    assert explanation.from_tiers == {"disk": 8}
    assert (explanation.first_miss, explanation.first_missing_token) == (MissReason.TOO_SLOW, 8)
    assert explanation.misses["disk"] is MissReason.TOO_SLOW


def test_a_promotion_slower_than_computing_is_not_done() -> None:
    host = TieredHost()
    host.tier.held = set(keys_of(PROMPT))
    host.learn(seconds_per_token=0.001, seconds_per_byte=0.001 * 24 / (6 * ROW) * 1.1)
    request = Request("a", PROMPT)
    assert host.ask(request) == 0
    host.run(request)
    explanation = host.scheduler.explain("a")
    assert explanation is not None
    assert explanation.misses == {"disk": MissReason.NOT_WORTH_LOADING}


@pytest.mark.parametrize("queued", [False, True])
def test_queued_bytes_of_the_tier_count(queued: bool) -> None:
    host = TieredHost()
    host.tier.held = set(keys_of(PROMPT))
    host.learn(seconds_per_token=0.001, seconds_per_byte=0.001 * 24 / (6 * ROW) * 0.9)
    host.tier.queued_bytes = 6 * ROW if queued else 0
    assert host.ask(Request("a", PROMPT)) == (0 if queued else None)


@pytest.mark.parametrize("is_busy", [False, True])
def test_waiting_costs_nothing_while_others_are_computed(is_busy: bool) -> None:
    """A promotion takes longer than computing its tokens, but others are computed before them anyway."""
    host = TieredHost()
    host.tier.held = set(keys_of(PROMPT))
    host.learn(seconds_per_token=0.001, seconds_per_byte=0.001 * 24 / (6 * ROW) * 2)
    if is_busy:
        other = Request("other", list(range(1000)))
        assert host.ask(other) == 0
        blocks = host.host.blocks(250)
        host.scheduler.update_state_after_alloc(other, blocks, 0)
        host.host.run_new(other, blocks, scheduled=100)
    assert host.ask(Request("a", PROMPT)) == (None if is_busy else 0)


def test_the_wait_budget_is_the_time_to_compute_or_the_deadline() -> None:
    host = TieredHost()
    host.tier.held = set(keys_of(PROMPT))
    assert host.ask(Request("a", PROMPT)) is None
    host.host.idle()
    (first,) = host.tier.promotions.values()
    assert first.deadline == 2.0
    host.clock.now = 1.9
    assert host.ask(Request("a", PROMPT)) is None
    host.learn(seconds_per_token=0.02, seconds_per_byte=1e-9)
    long = Request("long", [7, *range(100)])
    host.tier.held |= set(keys_of(long.tokens))
    assert host.ask(long) is None
    host.host.idle()
    second = host.tier.promotions[first.job_id + 1]
    bytes_ = 25 * ROW
    assert second.deadline == pytest.approx(1.9 + 2.0 + bytes_ * 1e-9), "a hang is noticed after a deadline"
    host.clock.now = 3.8
    assert host.ask(long) is None, "100 tokens take two seconds"
    host.clock.now = 4.0
    assert host.ask(long) == 0


def test_cost_estimates_are_learnt_and_kept() -> None:
    host = TieredHost()
    host.tier.prices = {"seconds_per_byte": 3e-9}
    host.end_step()
    assert host.scheduler.cost.promotions["disk"].seconds_per_byte == 3e-9
    host.tier.held = set(keys_of(PROMPT))
    host.promote(Request("a", PROMPT))
    learnt = host.scheduler.cost.promotions["disk"].seconds_per_byte
    assert learnt != 3e-9
    host.scheduler.shutdown()
    assert host.tier.prices == {"seconds_per_byte": learnt}


def test_a_lost_promotion_is_a_lower_bound() -> None:
    host = TieredHost()
    host.tier.held = set(keys_of(PROMPT))
    host.ask(Request("a", PROMPT))
    host.host.idle()
    (job,) = host.tier.promotions
    host.clock.now = 2.0
    host.tier.finish(job, outcome=MissReason.TOO_SLOW)
    host.end_step()
    assert host.scheduler.cost.promotions["disk"].seconds_per_byte == pytest.approx(2.0 / (6 * ROW))
    assert not host.tier.prices, "a later process need not know of one stall"


def test_windows_come_first_and_all_or_nothing() -> None:
    host = TieredHost(windows=(None, 8))
    full, window = keys_of(PROMPT), keys_of(PROMPT, group=1)
    host.tier.held = {*full, *window}
    request = Request("a", PROMPT)
    assert host.ask(request) is None
    host.host.idle()
    (job,) = host.tier.promotions.values()
    assert job.keys == window[4:6] + full
    host.tier.finish(job.job_id)
    host.end_step()
    host.load(request, groups=2)
    explanation = host.scheduler.explain("a")
    assert explanation is not None
    assert explanation.from_tiers == {"disk": 24}


def test_rows_of_an_adapter_are_not_written() -> None:
    for request, is_written in ((Request("a", PROMPT), True), (AdaptedRequest("a", PROMPT), False)):
        host = TieredHost()
        host.scheduler._describe = type(request).describe
        host.host.cache(request)
        host.end_step()
        assert bool(host.tier.demotions) is is_written


def test_chunks_that_are_not_keyed_by_content_never_leave_the_pool_nor_come_from_below() -> None:
    """Another process may have written rows under the same keys, of another image."""
    host = TieredHost()
    host.scheduler._describe = NumberedImageRequest.describe
    host.tier.held = set(keys_of(PROMPT))
    assert host.ask(NumberedImageRequest("a", PROMPT)) == 0
    host.tier.held = set()
    host.host.cache(NumberedImageRequest("b", PROMPT))
    host.end_step()
    assert not host.tier.demotions
    assert host.ask(NumberedImageRequest("c", PROMPT)) == 24, "the pool has them"


def test_without_a_description_of_requests_nothing_is_written(caplog: pytest.LogCaptureFixture) -> None:
    host = TieredHost()
    host.host.scheduler = host.scheduler = OffloadingConnectorScheduler(host.scheduler.spec, host.clock)
    host.host.cache(Request("a", PROMPT))
    host.end_step()
    assert not host.tier.demotions
    assert "nothing is written" in caplog.text


@pytest.mark.parametrize(("may_load", "may_store"), [(False, True), (True, False)])
def test_an_engine_may_only_store_or_only_load(may_load: bool, may_store: bool) -> None:
    host = TieredHost(settings={"may_load": may_load, "may_store": may_store})
    first = Request("a", PROMPT)
    host.run(first)
    host.scheduler.request_finished(first)
    assert host.scheduler.stats.stores == may_store
    held = list(range(300, 326))
    host.tier.held = set(keys_of(held))
    request = Request("b", held)
    if may_load:
        host.promote(request)
        host.load(request)
    else:
        assert host.ask(request) == 0
        host.run(request)
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert explanation.from_tiers == ({"disk": 24} if may_load else {})
    assert explanation.first_miss is (None if may_load else MissReason.LIMITED)


# Events


def test_rows_that_a_restart_brought_are_announced_in_full() -> None:
    first = TieredHost()
    first.host.cache(Request("a", PROMPT))
    first.end_step()
    (job,) = first.tier.demotions.values()
    told = {key: job.describe(at) for at, key in enumerate(job.keys)}
    assert all(told.values())
    second = TieredHost()
    keys = keys_of(PROMPT)
    second.tier.held = set(keys)
    descriptions = tuple(told[key] for key in keys[:4]) + (b"", b"\xc1 nonsense")
    second.tier._events.append(OffloadingEvent(keys, "STORAGE", False, descriptions))
    full, *placeholders = second.scheduler.take_events()
    assert isinstance(full, BlockStored)
    assert (full.medium, full.token_ids, full.block_hashes) == (
        "STORAGE",
        PROMPT[:16],
        hash_blocks(PROMPT, BLOCK)[:4],
    )
    assert [event.block_size for event in placeholders if isinstance(event, BlockStored)] == [0, 0]
    second.promote(Request("b", PROMPT))
    (stored, *_) = second.scheduler.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.medium, stored.token_ids) == ("CPU", PROMPT[:16]), (
        "what the disk has told describes the pool's row"
    )


def test_a_row_is_announced_below_before_it_leaves_the_pool() -> None:
    host = TieredHost(num_slots=24)
    host.host.cache(Request("a", PROMPT))
    host.end_step()
    (job,) = host.tier.demotions
    host.tier.finish(job)
    host.end_step()
    host.host.cache(Request("b", list(range(200, 296))))
    events = list(host.scheduler.take_events())
    removed = next(at for at, event in enumerate(events) if isinstance(event, BlockRemoved))
    below = next(at for at, e in enumerate(events) if isinstance(e, BlockStored) and e.medium == "STORAGE")
    assert below < removed
