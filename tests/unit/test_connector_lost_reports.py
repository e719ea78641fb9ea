"""Reports that do not come: nobody waits for ever, no slot is used again too early, and loads that were slow
are learnt from.
"""

from __future__ import annotations

import pytest
from tests.unit.connector_kit import Clock, Host, Request, make_host
from tests.unit.test_connector_scheduler import PROMPT, load, used_slots

from kvtier.connector import KVConnectorOutput
from kvtier.offload import CPUOffloadingManager, MissReason


def silence(host: Host, clock: Clock, seconds: float = 1000.0, outputs: int = 4) -> list[KVConnectorOutput]:
    """Let time pass, with outputs that say nothing."""
    clock.now += seconds
    told = [KVConnectorOutput() for _ in range(outputs)]
    for output in told:
        host.scheduler.update_connector_output(output)
        host.scheduler.check()
    return told


def doomed(host: Host) -> int:
    assert isinstance(host.scheduler.manager, CPUOffloadingManager)
    return host.scheduler.manager.stats().doomed


@pytest.mark.parametrize("silent", [(0, 1), (1,)], ids=["both ranks", "one rank"])
def test_a_store_that_is_never_reported_expires(silent: tuple[int, ...]) -> None:
    clock = Clock()
    host = make_host(world_size=2, clock=clock)
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    job = host.run_new(request, host.blocks(7)).store_jobs["a"]
    assert host.scheduler.request_finished(request)[0]
    host.idle()
    for rank in {0, 1} - set(silent):
        host.report(job, rank=rank)
    told = silence(host, clock)
    assert set().union(*(output.finished_sending for output in told)) == {"a"}, "its blocks are free"
    assert not host.scheduler.has_pending_push_work()
    assert (used_slots(host), doomed(host)) == (6, 6), "a rank may still write there"
    host.cache(Request("b", PROMPT))
    assert (used_slots(host), doomed(host)) == (12, 6), "the chunks can be stored elsewhere meanwhile"
    assert host.idle().jobs_to_end[job].ranks == set(silent)
    for rank in silent:
        host.report(job, rank=rank)
    assert (used_slots(host), doomed(host), host.idle().jobs_to_end) == (6, 0, {})
    assert host.scheduler.get_num_new_matched_tokens(Request("c", PROMPT), 0) == (24, True)


def test_a_load_that_is_never_reported_expires_and_its_chunks_stay() -> None:
    clock = Clock()
    host = make_host(world_size=2, clock=clock)
    host.cache(Request("a", PROMPT))
    job, blocks = load(host, Request("b", PROMPT))
    host.report(job, rank=0)
    told = silence(host, clock)
    assert [output.finished_recving for output in told if output.finished_recving] == [{"b"}]
    assert set().union(*(output.invalid_block_ids for output in told)) == set(blocks[0])
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (0, False), "it is computed"
    assert not host.scheduler.has_pending_push_work()
    assert host.scheduler.manager.stats().reading == 6  # type: ignore[attr-defined]
    host.report(job, rank=1)
    assert host.scheduler.manager.stats().reading == 0  # type: ignore[attr-defined]
    assert host.scheduler.stats.expired == 1


def test_a_report_of_a_job_that_expired_names_nobody() -> None:
    """The request may be loading something else by then, or somebody else may have its id."""
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT))
    job, _ = load(host, Request("b", PROMPT))
    silence(host, clock)
    output = KVConnectorOutput(set(), {"b"}, {1, 2, 3})
    host.scheduler.update_connector_output(output)
    host.report(job)
    assert (output.finished_recving, output.invalid_block_ids) == (set(), set())


def test_a_long_step_expires_nothing() -> None:
    """A first step may compile for minutes; workers answer after it."""
    clock = Clock()
    host = make_host(clock=clock)
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    job = host.run_new(request, host.blocks(7)).store_jobs["a"]
    silence(host, clock, outputs=2)
    host.report(job)
    assert host.scheduler.stats.expired == 0
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (24, True)


def test_a_store_lost_before_a_reset_leaves_chunks_of_after_it_alone() -> None:
    clock = Clock()
    host = make_host(clock=clock)
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    job = host.run_new(request, host.blocks(7)).store_jobs["a"]
    host.scheduler.reset_cache()
    host.cache(Request("b", PROMPT))
    silence(host, clock)
    assert host.scheduler.get_num_new_matched_tokens(Request("c", PROMPT), 0) == (24, True)
    host.report(job)
    assert used_slots(host) == 6


def test_a_load_that_takes_longer_than_computing_is_ended_and_not_tried_again_at_once() -> None:
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT))
    host.scheduler.cost.note_step(40, 0.04)
    job, _ = load(host, Request("b", PROMPT))
    clock.now += 0.21  # four times what computing takes, and three steps
    assert host.idle().jobs_to_end == {}
    clock.now += 0.01
    order = host.idle().jobs_to_end[job]
    assert not order.void, "what has arrived is good"
    host.report(job, success=False, failed_blocks=(4, 5), seconds=0.22)
    assert host.scheduler.explain("b").from_tiers == {"cpu": 16}  # type: ignore[union-attr]
    later = Request("c", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(later, 0) == (0, False)
    host.run_new(later, host.blocks(7))
    assert host.scheduler.explain("c").first_miss is MissReason.NOT_WORTH_LOADING  # type: ignore[union-attr]
    assert host.scheduler.stats.not_worth == 1


def test_only_the_deadline_ends_a_load_where_loads_are_wanted_always() -> None:
    clock = Clock()
    host = make_host(clock=clock, load_if_faster=False)
    host.cache(Request("a", PROMPT))
    host.scheduler.cost.note_step(1000, 1.0)
    load(host, Request("b", PROMPT))
    clock.now += 1.9
    assert host.idle().jobs_to_end == {}


def test_a_load_refused_at_once_says_nothing_of_the_bus() -> None:
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT))
    host.scheduler.cost.note_step(1000, 1.0)
    job, _ = load(host, Request("b", PROMPT))
    clock.now += 0.03  # a step's time
    host.refuse(job)
    assert host.scheduler.cost.load_seconds(1) in (None, 0.0)
