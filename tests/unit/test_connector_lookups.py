"""The scheduler's side over tiers that do not know what they hold: lookups, waits and their deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import pytest
from tests.unit.connector_kit import Request
from tests.unit.test_connector_promotion import PROMPT, TieredHost, keys_of
from tests.unit.tier_kit import ROW, Tiered, context, key, keys

from kvtier.residency import MissReason

KEYS = keys_of(PROMPT)


def asking_host(**more: object) -> TieredHost:
    """Return a host over a tier that holds the prompt and does not know it."""
    host = TieredHost(**more)  # type: ignore[arg-type]
    host.tier.held, host.tier.unknown = set(KEYS), set(KEYS)
    return host


def answer(host: TieredHost) -> None:
    """Have the tier answer, and end a step."""
    host.clock.now += 0.01
    host.tier.answer()
    host.end_step()


def test_a_lookup_is_followed_by_a_promotion_and_a_load() -> None:
    host = asking_host()
    request = Request("a", PROMPT)
    assert host.ask(request) is None
    assert not host.tier.asked, "looking up starts nothing"
    host.host.idle()
    assert host.tier.asked == [(KEYS, 2.0)]
    assert host.ask(request) is None
    answer(host)
    assert host.ask(request) is None, "now it waits for the rows"
    host.host.idle()
    (job,) = host.tier.promotions.values()
    assert job.keys == KEYS
    host.tier.finish(job.job_id)
    host.end_step()
    host.load(request)
    explanation = host.scheduler.explain("a")
    assert explanation is not None
    assert (explanation.from_tiers, explanation.recomputed) == ({"disk": 24}, 2)


def test_a_request_that_waits_for_answers_is_answered_in_constant_time() -> None:
    host = asking_host()
    request = Request("a", PROMPT)
    host.ask(request)
    host.host.idle()
    before = host.tier.keys_looked_up
    assert all(host.ask(request) is None for _ in range(1000))
    assert host.tier.keys_looked_up == before
    for _ in range(100):
        host.host.idle()
        host.end_step()
    assert host.tier.keys_looked_up <= before + 100, "a step looks at one key"
    assert len(host.tier.asked) == 1


def waiting_requests(count: int) -> list[Request]:
    """Return requests with different prompts of six chunks, whose hashes are computed once."""
    return [CachedHashes(f"r{number}", [number, *range(1, 26)]) for number in range(count)]


class CachedHashes(Request):
    @cached_property
    def block_hashes(self) -> Sequence[bytes]:  # type: ignore[override]
        return Request.block_hashes.__get__(self)


def test_requests_that_no_tier_can_help_do_not_wait_behind_others() -> None:
    """A prompt of three tokens once waited for as long as all the others together."""
    host = TieredHost(num_slots=4096)
    requests = waiting_requests(300)
    host.tier.held = set()
    kept = Request("kept", [7] * 26)
    host.host.cache(kept)
    host.tier.unknown = {key for request in requests for key in keys_of(request.tokens)}
    for _ in range(3):
        assert all(host.ask(request) is None for request in requests)
        host.host.idle()
        host.end_step()
    assert len(host.tier.asked) == 256
    assert host.ask(Request("short", [1, 2, 3])) == 0
    assert host.ask(Request("in the pool", [7] * 26)) == 24
    host.clock.now = 1.9
    assert host.ask(requests[299]) is None, "its turn may still come"
    host.clock.now = 2.1  # load_deadline is the longest that it waits, however often it has asked
    assert host.ask(requests[299]) == 0


def test_a_step_asks_about_a_bounded_number_of_requests_in_turn() -> None:
    host = TieredHost(num_slots=4096)
    requests = waiting_requests(1000)
    host.tier.held = set()
    host.tier.unknown = {key for request in requests for key in keys_of(request.tokens)}
    before = 0
    for _ in range(3):  # nothing is answered: the waits of the first fill all places
        looked_up = host.tier.keys_looked_up
        assert all(host.ask(request) is None for request in requests)
        host.host.idle()
        assert len(host.tier.asked) - before <= 256
        assert host.tier.keys_looked_up - looked_up <= 5 * 2048
        before = len(host.tier.asked)
        host.end_step()
    assert before == 256
    assert [asked for asked, _ in host.tier.asked] == [keys_of(r.tokens) for r in requests[:256]]
    host.clock.now = 1.5
    answer(host)
    left = [request for request in requests if host.ask(request) is None]
    assert left == requests[256:], "those that were answered need not ask again"
    host.host.idle()
    asked = [asked for asked, _ in host.tier.asked[256:]]
    assert asked == [keys_of(r.tokens) for r in requests[256 : 256 + len(asked)]], "in turn"
    assert len(asked) > 0
    assert host.tier.asked[-1][1] == host.clock.now + 2.0, "the wait budget begins with the own wait"


def test_requests_that_never_ran_are_cancelled_without_a_lookup() -> None:
    host = asking_host()
    touched: list[object] = []
    host.tier.touch = lambda keys: touched.append(keys)  # type: ignore[method-assign]
    requests = waiting_requests(600)
    host.tier.unknown = {key for request in requests for key in keys_of(request.tokens)}
    for request in requests:
        host.ask(request)
    host.host.idle()
    looked_up = host.tier.keys_looked_up
    for request in requests:
        host.scheduler.request_finished(request)
    assert (host.tier.keys_looked_up, touched) == (looked_up, [])
    host.end_step()
    assert host.scheduler.is_idle()


def test_only_held_rows_are_promoted() -> None:
    host = asking_host()
    host.tier.held = set(KEYS[:4])
    request = Request("a", PROMPT)
    host.ask(request)
    host.host.idle()
    answer(host)
    host.promote(request)
    assert host.ask(request) == 16


def test_a_request_does_not_wait_if_the_tier_has_nothing() -> None:
    host = asking_host()
    host.tier.held = set()
    request = Request("a", PROMPT)
    host.ask(request)
    host.host.idle()
    answer(host)
    assert host.ask(request) == 0
    assert not host.tier.promotions


def test_a_request_without_an_answer_computes_at_the_deadline() -> None:
    host = asking_host()
    request = Request("a", PROMPT)
    host.ask(request)
    host.host.idle()
    host.clock.now = 1.99
    assert host.ask(request) is None
    host.clock.now = 2.0
    assert host.ask(request) == 0, "before anybody polls"
    host.end_step()
    assert [host.ask(request) for _ in range(3)] == [0, 0, 0]
    host.host.idle()
    assert len(host.tier.asked) == 1
    assert host.scheduler.cost.lookups["disk"].seconds_per_byte == 2.0, "a lower bound"
    host.tier.misses = dict.fromkeys(KEYS, MissReason.TOO_SLOW)
    host.tier.held, host.tier.unknown = set(), set()
    host.ask(request)
    host.run(request)
    explanation = host.scheduler.explain("a")
    assert explanation is not None
    assert explanation.misses["disk"] is MissReason.TOO_SLOW


def test_tiers_are_asked_again_after_a_preemption() -> None:
    host = asking_host()
    request = Request("a", PROMPT)
    host.ask(request)
    host.host.idle()
    host.clock.now = 3.0
    host.end_step()
    assert host.ask(request) == 0
    host.run(request)
    host.host.run_more(request, 26, 0, preempted_req_ids={"a"})
    host.tiered.pool.reset_cache()
    assert host.ask(request) is None


def test_the_wait_is_no_longer_than_computing() -> None:
    host = asking_host()
    host.learn(seconds_per_token=0.001, seconds_per_byte=1e-12)
    host.ask(Request("a", PROMPT))
    host.host.idle()
    ((_, deadline),) = host.tier.asked
    assert deadline == pytest.approx(0.024), "24 tokens could come"


@pytest.mark.parametrize("is_busy", [False, True])
def test_short_prompts_are_not_worth_a_round_trip(is_busy: bool) -> None:
    host = asking_host()
    host.learn(seconds_per_token=0.001, seconds_per_byte=1e-12)
    host.scheduler.cost.lookups["disk"].learn(1, 0.03)
    if is_busy:  # it would wait for its turn anyway
        other = Request("other", list(range(1000, 1100)))
        assert host.ask(other) == 0
    request = Request("a", PROMPT)
    assert host.ask(request) == (None if is_busy else 0)
    if not is_busy:
        assert host.ask(request) == 0
        host.run(request)
        explanation = host.scheduler.explain("a")
        assert explanation is not None
        assert explanation.misses == {"disk": MissReason.NOT_WORTH_LOADING}


def test_the_time_of_the_bytes_counts_too() -> None:
    host = asking_host()
    host.learn(seconds_per_token=0.001, seconds_per_byte=0.001 * 24 / (6 * ROW) * 0.9)
    host.scheduler.cost.lookups["disk"].learn(1, 0.004)
    assert host.ask(Request("a", PROMPT)) == 0


def test_a_stale_cost_estimate_is_corrected() -> None:
    """After answers that did not come nobody asks, but for one in a few; when that is answered,
    others ask.
    """
    host = asking_host()
    host.learn(seconds_per_token=0.001, seconds_per_byte=1e-12)
    host.scheduler.cost.lookups["disk"].learn_lost(1, 2.0)
    refused = 0
    while host.ask(Request(f"r{refused}", PROMPT)) == 0:
        refused += 1
        assert refused < 64
    host.host.idle()
    answer(host)
    assert host.scheduler.cost.lookups["disk"].seconds_per_byte == pytest.approx(0.01)


def test_known_chunks_are_not_looked_up() -> None:
    host = TieredHost()
    host.host.cache(Request("first", PROMPT[:8]))
    host.tier.held, host.tier.unknown = set(KEYS), set(KEYS[3:])
    request = Request("a", PROMPT)
    assert host.ask(request) is None
    host.host.idle()
    assert [asked for asked, _ in host.tier.asked] == [KEYS[3:]]
    answer(host)
    host.promote(request)
    assert host.ask(request) == 24


def test_windowed_chunks_are_looked_up_too() -> None:
    host = TieredHost(windows=(None, 8))
    full, window = keys_of(PROMPT), keys_of(PROMPT, group=1)
    host.tier.held = {*full, *window}
    host.tier.unknown = set(host.tier.held)
    request = Request("a", PROMPT)
    assert host.ask(request) is None
    host.host.idle()
    ((asked, _),) = host.tier.asked
    assert asked == [name for pair in zip(full, window, strict=True) for name in pair], "from head to tail"
    answer(host)
    assert host.ask(request) is None
    host.host.idle()
    (job,) = host.tier.promotions.values()
    assert job.keys == window[4:6] + full


def test_a_stale_yes_costs_one_promotion() -> None:
    host = asking_host()
    request = Request("a", PROMPT)
    host.ask(request)
    host.host.idle()
    answer(host)
    assert host.ask(request) is None
    host.host.idle()
    (job,) = host.tier.promotions
    host.tier.held = set()
    host.tier.finish(job, outcome=MissReason.EVICTED)
    host.end_step()
    assert host.ask(request) == 0
    assert host.ask(Request("b", PROMPT)) == 0


def test_a_request_that_ends_is_forgotten() -> None:
    host = asking_host()
    request = Request("a", PROMPT)
    host.ask(request)
    host.scheduler.request_finished(request)
    host.host.idle()
    assert not host.tier.asked, "no request waits for the answer any more"
    again = Request("a", PROMPT)
    host.ask(again)
    host.host.idle()
    host.scheduler.request_finished(again)
    answer(host)
    host.scheduler.check()


def test_a_reset_ends_the_wait() -> None:
    host = asking_host()
    request = Request("a", PROMPT)
    host.ask(request)
    host.host.idle()
    host.scheduler.reset_cache()
    host.end_step()
    assert host.ask(request) == 0


# The manager


def test_only_unknown_chunks_are_looked_up() -> None:
    tiered = Tiered(num_tiers=2)
    disk, far = tiered.tiers
    disk.held = set(keys(1, 2))
    far.held, far.unknown = set(keys(1, 2, 3, 4)), set(keys(1, 2, 3, 4, 5))
    combined, waits = tiered.manager.promotions, tiered.manager.waits
    assert combined.lookup_many(keys(1, 2, 3, 5, 6), context()) == [True, True, None, None, False]
    assert combined.lookup_prefix(keys(1, 2, 3), context()) is None
    assert combined.lookup_prefix(keys(1, 2, 3), context(), wait=False) == 2
    (lookup,) = tiered.manager.promotions.unknown(keys(1, 2, 3, 4, 5, 6))
    assert (lookup.tier, lookup.keys) == (far, keys(3, 4, 5))
    assert lookup.cost == ("object", 3 * ROW, 0)
    tiered.look_up([lookup])
    tiered.submit()
    assert waits.is_waiting(context())
    assert tiered.manager.wait_any(0.0), "an idle engine waits for the answer"
    far.answer()
    tiered.poll()
    assert not waits.is_waiting(context())
    assert not tiered.manager.wait_any(0.0)
    assert combined.lookup_prefix(keys(1, 2, 3, 4, 5), context()) == 4
    assert tiered.promote(1, 2, 3, 4)
    tiered.submit()
    assert [len(job) for tier in tiered.tiers for job in tier.promotions.values()] == [2, 2]


def test_tiers_get_the_whole_pool_as_their_buffer() -> None:
    tiered = Tiered(8)
    assert tiered.tier.buffer is not None
    assert tiered.tier.buffer.memory is not None
    assert tiered.tier.buffer.memory.nbytes == 8 * ROW
    assert tiered.manager.promotions.unknown([key(1)]) == []
