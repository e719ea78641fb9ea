"""The pool and tiers behind one manager, step by step: waits, promotions, demotions, resets and reports."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.tier_kit import ROW, TickingClock, Tiered, context, key, keys

from kvtier.keys import OffloadKey
from kvtier.residency import MissReason

# Promotions


def test_asking_starts_nothing_and_a_step_does() -> None:
    tiered = Tiered()
    tiered.tier.held = set(keys(1, 2, 3))
    combined = tiered.manager.promotions
    assert combined.lookup_prefix(keys(1, 2, 3, 4), context()) == 3
    assert combined.lookup_many(keys(3, 4), context()) == [True, False]
    assert tiered.ready(1, 2, 3) == [False] * 3, "the pool has none of it"
    assert tiered.promote(1, 2, 3)
    assert tiered.pool.num_free == tiered.num_slots, "a promotion takes no slot before it is submitted"
    assert not tiered.tier.promotions
    job = tiered.submit()
    assert job is not None
    assert job.keys == keys(1, 2, 3), "the first chunks first"
    assert tiered.ready(1) == [None]
    assert tiered.pool.num_free == tiered.num_slots - 3


def test_rows_that_have_come_are_pinned_until_the_load() -> None:
    tiered = Tiered(4)
    tiered.tier.held = set(keys(1, 2))
    tiered.promote(1, 2)
    job = tiered.submit()
    assert job is not None
    tiered.rows[job.slots] = np.array([[1], [2]], np.uint8)
    assert tiered.is_waiting()
    tiered.tier.finish(job.job_id)
    tiered.poll()
    assert not tiered.is_waiting()
    assert tiered.ready(1, 2) == [True, True]
    assert not tiered.can_evict(1, 2)
    assert tiered.manager.waits.sources(context()) == {key(1): "disk", key(2): "disk"}
    spec = tiered.manager.prepare_load(keys(1, 2), context())
    assert [int(tiered.rows[slot][0]) for slot in spec.block_ids] == [1, 2]  # type: ignore[attr-defined]
    assert tiered.manager.waits.sources(context()) == {}
    tiered.manager.complete_load(keys(1, 2), spec)
    assert tiered.can_evict(1, 2)
    tiered.manager.check()


def test_a_request_under_promotion_is_answered_in_constant_time() -> None:
    tiered = Tiered()
    tiered.tier.held = set(keys(1, 2))
    tiered.promote(1, 2)
    tiered.submit()
    before = tiered.tier.lookups
    assert all(tiered.is_waiting() for _ in range(1000))
    assert tiered.tier.lookups == before


def test_a_row_is_promoted_once_for_all_requests_that_wait() -> None:
    tiered = Tiered()
    tiered.tier.held = set(keys(1, 2, 3))
    tiered.promote(1, 2, name="a")
    first = tiered.submit()
    assert tiered.manager.promotions.lookup_prefix(keys(1, 2, 3), context("b")) == 3
    tiered.promote(1, 2, 3, name="b")
    second = tiered.submit()
    assert first is not None
    assert second is not None
    assert second.keys == keys(3)
    tiered.tier.finish(first.job_id)
    tiered.tier.finish(second.job_id)
    tiered.poll()
    tiered.manager.on_request_finished(context("a"))
    assert not tiered.can_evict(1), "another request waits for its load"
    tiered.manager.on_request_finished(context("b"))
    assert tiered.can_evict(1, 2, 3), "after an abort they are ordinary rows"
    assert tiered.ready(1, 2, 3) == [True] * 3
    tiered.manager.check()


def test_at_the_deadline_the_leading_run_counts_and_the_rest_is_withdrawn() -> None:
    tiered = Tiered()
    tiered.tier.held = set(keys(1, 2, 3, 4))
    tiered.promote(1, 2, 3, 4, wait_budget=1.0)
    job = tiered.submit()
    assert job is not None
    tiered.tier.begun = set(keys(3))
    tiered.tier.finish(job.job_id, 1, 2)
    tiered.poll()
    assert tiered.is_waiting()
    tiered.clock.now = 1.0
    assert not tiered.is_waiting(), "it is over before anybody has polled"
    assert tiered.manager.explain_tiers(key(3), context())["disk"] is MissReason.TOO_SLOW
    tiered.poll()
    assert tiered.ready(1, 2, 3, 4) == [True, True, None, False]
    assert tiered.can_evict(1, 2)
    why = tiered.manager.explain_tiers(key(3), context())
    assert why["disk"] is MissReason.TOO_SLOW
    tiered.tier.finish(job.job_id, 3)
    tiered.poll()
    assert tiered.ready(3) == [True], "a row that comes too late is kept"
    assert tiered.can_evict(3)


def test_late_means_failed_but_not_freed() -> None:
    tiered = Tiered(4)
    tiered.tier.held = set(keys(1))
    tiered.promote(1)
    job = tiered.submit()
    assert job is not None
    tiered.tier.finish(job.job_id, outcome=MissReason.TOO_SLOW, in_use=True)
    tiered.poll()
    assert not tiered.is_waiting()
    assert tiered.ready(1) == [False]
    assert tiered.manager.stats().doomed == 1, "a call may still write there"
    tiered.store(1)
    assert tiered.ready(1) == [True], "the key has another slot meanwhile"
    tiered.tier.return_rows(job)
    tiered.poll()
    assert tiered.manager.stats().doomed == 0
    assert tiered.ready(1) == [True]


def test_slots_of_late_calls_count_as_taken() -> None:
    tiered = Tiered(4)
    tiered.tier.held = set(keys(1, 2, 3))
    tiered.promote(1, 2)
    job = tiered.submit()
    assert job is not None
    tiered.tier.finish(job.job_id, outcome=MissReason.TOO_SLOW, in_use=True)
    tiered.poll()
    assert not tiered.promote(3, name="b"), "half of the pool is lost to a hung tier, and no more"
    why = tiered.manager.explain_tiers(key(3), context("b"))
    assert why["cpu"] is MissReason.NO_ROOM


def test_a_prompt_above_the_share_gets_its_leading_part() -> None:
    tiered = Tiered(8)
    tiered.tier.held = set(keys(*range(10)))
    assert tiered.promote(*range(10))
    job = tiered.submit()
    assert job is not None
    assert job.keys == keys(0, 1, 2, 3)


def test_rows_that_a_request_needs_are_not_evicted_for_it() -> None:
    tiered = Tiered(4)
    tiered.store(1, 2, 8, 9)
    tiered.tier.held = set(keys(3, 4))
    tiered.promote(1, 2, 3, 4)
    tiered.submit()
    assert tiered.ready(1, 2, 3, 4, 8, 9) == [True, True, None, None, False, False]


@pytest.mark.parametrize("vanishes", [False, True])
def test_with_windows_all_or_nothing(vanishes: bool) -> None:
    tiered = Tiered(8)
    tiered.tier.held = set(keys(1, 2, 3))
    assert not tiered.promote(*range(9), whole=True), "more than the share"
    assert tiered.promote(1, 2, 3, whole=True)
    if vanishes:
        tiered.tier.held.discard(key(2))
        assert tiered.submit() is None
        assert not tiered.is_waiting()
        assert tiered.pool.num_free == 8
        return
    job = tiered.submit()
    assert job is not None
    tiered.tier.finish(job.job_id, 2, outcome=MissReason.IO_FAILED)
    tiered.poll()
    assert not tiered.is_waiting(), "without one row the others are of no use"
    assert tiered.pool.num_free == 8


def test_rows_behind_one_that_does_not_come_are_not_waited_for() -> None:
    tiered = Tiered()
    tiered.tier.held = set(keys(1, 2, 3))
    tiered.promote(1, 2, 3)
    job = tiered.submit()
    assert job is not None
    tiered.tier.finish(job.job_id, 2, outcome=MissReason.FAILED)
    tiered.poll()
    assert tiered.is_waiting(), "the first may still come"
    tiered.tier.finish(job.job_id, 1)
    tiered.poll()
    assert not tiered.is_waiting()
    assert tiered.ready(1, 2, 3) == [True, False, False]
    assert tiered.manager.explain_tiers(key(2), context())["disk"] is MissReason.FAILED


def test_the_first_tier_that_has_a_row_gives_it() -> None:
    tiered = Tiered(num_tiers=2)
    disk, distant = tiered.tiers
    disk.held, distant.held = set(keys(1)), set(keys(1, 2))
    assert tiered.manager.promotions.lookup_prefix(keys(1, 2), context()) == 2
    costs = tiered.manager.promotions.costs(keys(1, 2))
    assert [(cost.tier, cost.num_bytes) for cost in costs] == [("disk", ROW), ("object", ROW)]
    tiered.promote(1, 2)
    tiered.submit()
    assert [[key for job in tier.promotions.values() for key in job.keys] for tier in tiered.tiers] == [
        keys(1),
        keys(2),
    ]


def test_the_store_threshold_does_not_apply_to_promotions() -> None:
    tiered = Tiered()
    tiered.pool._store_threshold = 2
    tiered.tier.held = set(keys(1))
    tiered.promote(1)
    assert tiered.submit() is not None


# Resets and discards


def test_nothing_from_before_a_reset_comes_back() -> None:
    tiered = Tiered()
    tiered.store(8)
    tiered.tier.held = set(keys(1, 2, 3))
    tiered.promote(1, 2)
    job = tiered.submit()
    assert job is not None
    tiered.tier.begun = set(keys(2))
    tiered.tier.finish(job.job_id, 1)
    tiered.poll()
    tiered.manager.reset_cache()
    tiered.manager.check()
    assert not tiered.is_waiting()
    (written,) = tiered.tier.demotions
    tiered.tier.finish(written, outcome=MissReason.CLEARED)
    tiered.tier.finish(job.job_id, 2)  # it was read before, and says so after
    tiered.poll()
    assert tiered.ready(1, 2, 8) == [False] * 3
    assert tiered.manager.promotions.lookup_prefix(keys(1, 2, 3), context()) == 0
    assert tiered.pool.num_free == tiered.num_slots
    tiered.manager.reset_cache()
    assert len(set(tiered.tier.suffixes)) == 2, "every reset has a suffix of its own"
    assert all(len(suffix) == 16 for suffix in tiered.tier.suffixes)


def test_wrong_bytes_in_memory_are_dropped_below_too_and_not_the_other_way_round() -> None:
    tiered = Tiered()
    tiered.store(1, 2)
    tiered.tier.held = set(keys(1, 3))
    tiered.manager.discard(keys(1))
    assert tiered.tier.held == set(keys(3))
    output = tiered.manager.prepare_store(keys(3), context())
    assert output is not None
    tiered.manager.discard(keys(3))
    assert tiered.tier.held == set(keys(3)), "a store that came to nothing says nothing of a row below"
    tiered.manager.complete_store(keys(3), False, output.store_spec)
    tiered.manager.check()


def test_loads_that_fail_say_nothing_against_the_rows_below() -> None:
    """A slow bus had two loads end late, and the good rows of their chunks were deleted from the disk."""
    tiered = Tiered()
    tiered.store(1)
    tiered.tier.held = set(keys(1))
    tiered.manager.discard(keys(1), MissReason.IO_FAILED)
    assert tiered.ready(1) == [False]
    assert tiered.tier.held == set(keys(1))
    tiered.manager.check()


def test_a_row_on_its_way_that_is_wrong_is_not_waited_for() -> None:
    """Guards against a request that waits for a row which another job brings by now."""
    tiered = Tiered()
    tiered.tier.held = set(keys(1, 2))
    tiered.promote(1, 2)
    job = tiered.submit()
    assert job is not None
    tiered.tier.begun = set(keys(1, 2))
    tiered.manager.discard(keys(1))
    tiered.manager.check()
    assert not tiered.is_waiting()
    assert tiered.tier.held == set(keys(2))
    tiered.tier.held.add(key(1))
    tiered.promote(1, name="b")
    tiered.submit()
    tiered.tier.finish(job.job_id)
    tiered.poll()
    assert tiered.ready(1, 2) == [None, True], "the second job has not come"
    assert tiered.is_waiting("b")


# Demotions


def demoted(tiered: Tiered) -> list[bytes]:
    return [key for job in tiered.tier.demotions.values() for key in job.keys]


def test_ready_rows_are_written_through_and_pinned_meanwhile() -> None:
    tiered = Tiered()
    tiered.manager.describe_with(lambda keys: lambda at: b"told of " + keys[at][-5:-4])
    tiered.store(1, 2)
    assert not tiered.tier.demotions, "between steps nothing is submitted"
    tiered.poll()
    assert demoted(tiered) == keys(1, 2)
    (job,) = tiered.tier.demotions.values()
    assert [job.describe(at) for at in range(2)] == [b"told of 1", b"told of 2"]
    assert not tiered.can_evict(1)
    tiered.tier.finish(job.job_id)
    tiered.poll()
    assert tiered.can_evict(1, 2)
    events = [(event.medium, event.removed) for event in tiered.manager.take_events()]
    assert events == [("STORAGE", False), ("CPU", False)], "what is below is told first"


def test_offers_wait_for_a_tier_that_is_not_open_yet() -> None:
    tiered = Tiered()
    tiered.tier.has_opened = False
    tiered.store(1, 2)
    tiered.poll()
    assert demoted(tiered) == []
    tiered.clock.now = 2.0
    assert not tiered.manager.has_pending_work(), "an idle engine does not wait for it"
    tiered.tier.has_opened = True
    tiered.poll()
    assert demoted(tiered) == keys(1, 2)


def test_refused_rows_are_unpinned_at_once() -> None:
    tiered = Tiered()
    tiered.tier.refuses = set(keys(1, 2))
    tiered.store(1, 2)
    tiered.poll()
    assert tiered.can_evict(1, 2)


def test_a_row_whose_slot_is_needed_leaves_unwritten() -> None:
    tiered = Tiered(4)
    tiered.store(1, 2, 3, 4)
    tiered.poll()
    assert demoted(tiered) == keys(1), "one slot in four may be pinned"
    tiered.store(5, 6, 7, 8)
    assert tiered.ready(1, 5, 6, 7, 8) == [False, True, True, True, True]
    assert tiered.manager.unwritten == 4, "the others had left the pool before it was their turn"
    tiered.tier.begun = set(keys(5, 6, 7, 8))
    tiered.poll()
    assert demoted(tiered) == keys(5)
    output = tiered.manager.prepare_store(keys(9, 10, 11, 12), context())
    assert output is not None
    assert len(output.keys_to_store) == 3, "a thread writes the fourth"
    tiered.manager.check()


def test_a_row_on_its_way_to_several_tiers_leaves_unwritten() -> None:
    tiered = Tiered(num_tiers=2)
    tiered.store(*range(16))
    tiered.poll()
    assert [[job.keys for job in tier.demotions.values()] for tier in tiered.tiers] == [[keys(0, 1)]] * 2
    tiered.store(*range(16, 32))
    assert all(tiered.ready(*range(16, 32)))
    assert tiered.manager.unwritten == 32, "every row counts for each tier"


def test_a_tier_gives_back_the_rows_that_another_tier_has_given_back() -> None:
    tiered = Tiered(32, num_tiers=2)
    tiered.store(*range(32))
    tiered.poll()
    output = tiered.manager.prepare_store(keys(*range(40, 69)), context())
    assert output is not None
    assert len(output.keys_to_store) == 29
    assert [len(job.lent) for job in tiered.manager._demotions._jobs] == [3, 3]
    tiered.manager.check()


def away(tiered: Tiered) -> None:
    """Have the tier take no rows."""
    tiered.tier.takes_rows = lambda: False  # type: ignore[method-assign]


def back(tiered: Tiered) -> list[OffloadKey]:
    """Have it take rows again, and return what it has after some steps."""
    tiered.tier.takes_rows = lambda: True  # type: ignore[method-assign]
    for _ in range(20):
        tiered.poll()
        for job in list(tiered.tier.demotions):
            tiered.tier.finish(job)
    tiered.manager.check()
    return sorted(tiered.tier.held)


def test_a_reset_forgets_offers() -> None:
    tiered = Tiered(4)
    away(tiered)
    tiered.store(0)
    tiered.manager.reset_cache()
    assert back(tiered) == []
    assert tiered.manager.unwritten == 0, "a row that a reset made absent was not lost for want of time"


def test_an_offer_lasts_as_long_as_its_row_is_in_the_pool() -> None:
    tiered = Tiered(4)
    away(tiered)
    tiered.store(0)
    for number in range(1, 40):
        tiered.manager.touch(keys(0), context())
        tiered.store(number)
        tiered.poll()
        assert len(tiered.manager._demotions._offers[tiered.tier]) <= 8
    assert back(tiered) == sorted(keys(0, 37, 38, 39))


@pytest.mark.parametrize("in_use", [False, True])
def test_rows_that_a_suspension_took_from_a_tier_are_offered_again(in_use: bool) -> None:
    tiered = Tiered(8)
    tiered.store(0, 1)
    tiered.poll()
    (job,) = tiered.tier.demotions.values()
    away(tiered)
    tiered.tier.finish(job.job_id, outcome=MissReason.SUSPENDED, in_use=in_use)
    tiered.poll()
    if in_use:  # a call has them, and it fails in the end
        tiered.tier.return_rows(job)
        tiered.poll()
    assert tiered.pool.stats().reading == 0
    tiered.tier.held.clear()
    assert back(tiered) == sorted(keys(0, 1))


def test_rows_that_waited_are_submitted_some_at_a_time() -> None:
    """A step would last as long as thousands of rows take, when a tier is back."""
    tiered = Tiered(16_384)
    away(tiered)
    tiered.store(*range(4096))
    tiered.tier.takes_rows = lambda: True  # type: ignore[method-assign]
    tiered.poll()
    assert sum(len(job.keys) for job in tiered.tier.demotions.values()) == 1024
    assert len(back(tiered)) == 4096


def test_after_a_reset_the_same_chunks_are_written_ahead_again() -> None:
    tiered = Tiered(4, "evict")
    for _ in range(2):
        tiered.store(0, 1, 2, 3)
        assert len(back(tiered)) == 1
        tiered.manager.reset_cache()
        tiered.tier.held.clear()


def test_promotions_go_before_demotions_that_have_not_begun() -> None:
    tiered = Tiered(4)
    tiered.store(1)
    tiered.poll()
    assert tiered.manager.prepare_store(keys(2, 3), context()) is not None
    tiered.tier.held = set(keys(8, 9))
    tiered.promote(8, 9)
    job = tiered.submit()
    assert job is not None
    assert job.keys == keys(8, 9)
    assert tiered.manager.unwritten == 1


def test_promoted_rows_are_not_offered_back() -> None:
    tiered = Tiered()
    tiered.tier.held = set(keys(1))
    tiered.promote(1)
    job = tiered.submit()
    assert job is not None
    tiered.tier.finish(job.job_id)
    tiered.tier.held.clear()  # even if it has been evicted there meanwhile
    tiered.poll()
    tiered.poll()
    assert demoted(tiered) == []


def test_the_coldest_rows_are_written_before_they_are_evicted() -> None:
    tiered = Tiered(32, write="evict")
    tiered.store(*range(16))
    for _ in range(8):
        tiered.poll()
    assert demoted(tiered) == [], "there is room"
    tiered.store(*range(16, 32))
    tiered.manager.touch(keys(*range(15)), context("b"))
    for _ in range(8):
        tiered.poll()
    assert demoted(tiered) == tiered.pool.coldest(2) or set(demoted(tiered)) == {key(15), key(31)}
    tiered.tier.refuses = set(keys(*range(32)))
    tiered.tier.finish(next(iter(tiered.tier.demotions)), outcome=MissReason.IO_FAILED)
    for _ in range(16):
        tiered.poll()
    assert demoted(tiered) == [], "nobody is asked twice because it was not wanted"


def test_chunks_of_an_adapter_stay_in_the_pool() -> None:
    tiered = Tiered(4, clock=TickingClock())
    tiered.store(1, 2, stays_in_pool=True)
    tiered.store(3)
    tiered.poll()
    assert demoted(tiered) == keys(3)
    tiered.store(4, 5, 6, 7, name="b")
    tiered.manager.shutdown()
    assert key(1) not in demoted(tiered)
    tiered.manager.check()


@pytest.mark.parametrize("write", ["through", "evict"])
@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("is_ready", [True, False])
def test_chunks_of_an_adapter_stay_in_the_pool_when_a_former_store_is_over(
    write: str, success: bool, resets: bool, is_ready: bool
) -> None:
    """The late report of a lost job let the same chunk go that was stored anew in another slot."""
    tiered = Tiered(2, write=write, clock=TickingClock())
    manager = tiered.manager
    first = manager.prepare_store(keys(1), context("a", stays_in_pool=True))
    assert first is not None
    if resets:
        manager.reset_cache()
    else:
        manager.discard(keys(1))
    second = manager.prepare_store(keys(1), context("b", stays_in_pool=True))
    assert second is not None
    reports = [(success, first.store_spec), (True, second.store_spec)]
    for succeeds, spec in reversed(reports) if is_ready else reports:
        manager.complete_store(keys(1), succeeds, spec)
    tiered.store(2)
    for _ in range(8):
        tiered.poll()
    manager.shutdown()
    assert demoted(tiered) == keys(2)
    assert tiered.ready(1) == [True]


def test_a_slot_that_held_an_adapters_chunk_may_be_written_when_another_chunk_has_it() -> None:
    tiered = Tiered(1)
    tiered.store(1, stays_in_pool=True)
    tiered.store(2)
    tiered.poll()
    assert demoted(tiered) == keys(2)


def test_a_clean_shutdown_writes_hot_rows_for_a_few_seconds_at_most() -> None:
    tiered = Tiered(16, write="evict", clock=TickingClock())
    tiered.store(1, 2, 3)
    tiered.tier.held = set(keys(2))
    tiered.manager.shutdown()
    assert demoted(tiered) == keys(1, 3)
    (timeout,) = tiered.tier.closed
    assert 0.0 < timeout <= 5.0
    tiered.manager.shutdown()
    assert len(tiered.tier.closed) == 1


def test_a_shutdown_writes_hot_rows_before_those_that_wait() -> None:
    """Guards offers that are written in the order in which they came, while seconds are left."""
    tiered = Tiered(16, clock=TickingClock())
    tiered.store(*range(16))
    tiered.manager.touch(keys(9, 12), context("a"))
    tiered.manager.shutdown()
    assert demoted(tiered)[:2] == keys(9, 12)


def test_a_shutdown_waits_only_for_rows_being_written() -> None:
    """Not for a tier that opens or announces. The clock stands still: a wait would not end."""
    tiered = Tiered(4096 + 16)
    tiered.tier.has_pending_work = lambda: True  # type: ignore[method-assign]
    tiered.store(*range(4096))
    tiered.manager.reset_cache()
    assert tiered.manager.has_pending_work(), "the reset is not announced yet"
    tiered.manager.shutdown()
    assert len(tiered.tier.closed) == 1


def test_an_idle_engine_is_kept_for_offers_only_while_something_moves() -> None:
    tiered = Tiered(8)
    tiered.store(1, 2, 3, 4, 5)
    tiered.poll()
    assert len(demoted(tiered)) == 2
    assert tiered.manager.has_pending_work(), "three rows wait for their turn"
    tiered.clock.now = 1.5
    assert not tiered.manager.has_pending_work(), "a hung tier does not keep anybody awake"


# Reports


@pytest.mark.parametrize(
    "reason",
    [
        MissReason.EVICTED,
        MissReason.SUSPENDED,
        MissReason.NOT_OPEN,
        MissReason.FAILED,
        MissReason.LOST,
    ],
)
def test_each_tier_gives_its_reason(reason: MissReason) -> None:
    tiered = Tiered(1)
    assert tiered.manager.explain_tiers(key(1), context()) == {"cpu": MissReason.NEVER_STORED}
    tiered.store(1)
    assert tiered.manager.explain_tiers(key(1), context()) == {}
    tiered.store(2)
    tiered.tier.misses[key(1)] = reason
    assert tiered.manager.explain_tiers(key(1), context()) == {"cpu": MissReason.EVICTED, "disk": reason}
    tiered.manager._is_namespace_known = lambda: False
    why = tiered.manager.explain_tiers(key(1), context())["disk"]
    assert why is (MissReason.NAMESPACE_UNKNOWN if reason is MissReason.NOT_OPEN else reason)
