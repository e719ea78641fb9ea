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


@pytest.mark.parametrize("load_if_faster", [False, True])
def test_loads_that_a_rank_never_reports_do_not_pile_up(load_if_faster: bool) -> None:
    """Where computing has a price, their chunks were never blamed, and every fourth request tried again."""
    clock = Clock()
    host = make_host(world_size=2, clock=clock, load_if_faster=load_if_faster)
    host.cache(Request("a", PROMPT))
    host.scheduler.cost.learn_step(40, 0.04)
    for number in range(20):
        request = Request(f"r{number}", PROMPT, kv_transfer_params={"max_offload_tokens": 0})
        tokens, _ = host.scheduler.get_num_new_matched_tokens(request, 0)
        if tokens:
            host.scheduler.update_state_after_alloc(request, host.blocks(7), tokens)
            host.report(host.idle().load_jobs[request.request_id], rank=0)
            silence(host, clock)
        host.scheduler.request_finished(request)
    assert host.scheduler.stats.expired == 2
    assert len(host.idle().jobs_to_end) == 2


def test_of_many_expired_jobs_a_step_asks_for_some_and_of_all_in_turn() -> None:
    """A rank that says nothing for ever: each step told all ranks of all of them."""
    clock, num_jobs = Clock(), 600
    host = make_host(num_slots=num_jobs, world_size=2, clock=clock)
    for number in range(num_jobs):
        request = Request(f"r{number}", [number] * 4)
        host.scheduler.get_num_new_matched_tokens(request, 0)
        (job,) = host.run_new(request, host.blocks(1)).store_jobs.values()
        host.report(job, rank=0)
        host.scheduler.request_finished(request)
    silence(host, clock)
    assert doomed(host) == host.scheduler.stats.expired == num_jobs
    orders = [set(host.idle().jobs_to_end) for _ in range(3)]
    assert [len(asked) for asked in orders] == [256, 256, 256]
    assert len(set.union(*orders)) == num_jobs
    for _ in range(3):
        for job in host.idle().jobs_to_end:
            host.report(job, success=False, rank=1)
    assert (doomed(host), host.idle().jobs_to_end) == (0, {})


def test_a_load_that_takes_longer_than_computing_is_ended_and_not_tried_again_at_once() -> None:
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT))
    host.scheduler.cost.learn_step(40, 0.04)
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
    host.scheduler.cost.learn_step(1000, 1.0)
    load(host, Request("b", PROMPT))
    clock.now += 1.9
    assert host.idle().jobs_to_end == {}


def test_a_load_refused_at_once_says_nothing_of_the_bus() -> None:
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT))
    host.scheduler.cost.learn_step(1000, 1.0)
    job, _ = load(host, Request("b", PROMPT))
    clock.now += 0.03  # a step's time
    host.refuse(job)
    assert host.scheduler.cost.loads.seconds(1) in (None, 0.0)
