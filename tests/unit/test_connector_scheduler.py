"""The scheduler's side of the connector, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.connector_kit import BLOCK, Clock, Host, ManagerOnlySpec, Request, make_config, make_host

from kvtier.config import GroupConfig, Recompute
from kvtier.connector import (
    CachedRequest,
    KVConnectorOutput,
    OffloadingConnectorScheduler,
    StepView,
    TransferReport,
)
from kvtier.errors import InputError
from kvtier.events.types import BlockRemoved, BlockStored
from kvtier.offload import CPUOffloadingManager, GPULoadStoreSpec, MissReason, TransferResult

PROMPT = list(range(100, 126))  # 26 tokens: six blocks and a tail


def load(host: Host, request: Request, local: int = 0, groups: int = 1) -> tuple[int, tuple[list[int], ...]]:
    """Ask, allocate for what is offered, and start the load; return the job and the blocks."""
    tokens, is_async = host.scheduler.get_num_new_matched_tokens(request, local)
    assert tokens, f"expected a hit, got {tokens}"
    assert is_async
    blocks = host.blocks((local + tokens) // BLOCK, groups)
    host.scheduler.update_state_after_alloc(request, blocks, tokens)
    meta = host.idle()
    return meta.load_jobs[request.request_id], blocks


def used_slots(host: Host) -> int:
    manager = host.scheduler.manager
    assert isinstance(manager, CPUOffloadingManager)
    stats = manager.stats()
    return stats.slots - stats.free


def test_a_computed_prompt_is_stored_and_found_again() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    again = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(again, 0) == (24, True)
    assert host.scheduler.get_num_new_matched_tokens(again, 8) == (16, True), "asking twice changes nothing"
    job, blocks = load(host, again, local=8)
    host.report(job)
    meta = host.run_new(again, (blocks[0] + [99],), computed=24)
    assert not meta.reqs_to_store, "what was loaded is not stored again"
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (explanation.from_gpu, explanation.from_tiers, explanation.recomputed) == (8, {"cpu": 16}, 2)
    assert explanation.first_miss is None, "only the unfinished tail was computed"


def test_load_spec_names_slots_and_blocks_in_order() -> None:
    host = make_host(blocks_per_chunk=2)
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT)
    # Unaligned: half of the first chunk is here.
    tokens, _ = host.scheduler.get_num_new_matched_tokens(request, BLOCK)
    assert tokens == 20
    host.scheduler.update_state_after_alloc(request, ([7, 8, 9, 10, 11, 12],), tokens)
    source, destination = host.idle().reqs_to_load["b"]
    assert isinstance(destination, GPULoadStoreSpec)
    assert destination.block_ids.tolist() == [8, 9, 10, 11, 12]
    assert destination.block_indices == (1,)
    assert len(source.block_ids) == 3  # type: ignore[attr-defined]


def test_chunked_prefill_and_decode_store_each_chunk_once() -> None:
    host = make_host()
    request = Request("a", list(PROMPT))
    host.scheduler.get_num_new_matched_tokens(request, 0)
    (ids,) = host.blocks(8)
    stored: list[int] = []
    meta = host.run_new(request, (ids[:3],), 0, 10)
    stored += meta.reqs_to_store["a"][0].block_ids.tolist()  # type: ignore[attr-defined]
    meta = host.run_more(request, 10, 16, (ids[3:7],))
    stored += meta.reqs_to_store["a"][0].block_ids.tolist()  # type: ignore[attr-defined]
    for computed in range(26, 31):
        request.tokens.append(computed)
        meta = host.run_more(request, computed, 1, (ids[7:],) if computed == 28 else None)
        for source, _ in meta.reqs_to_store.values():
            stored += source.block_ids.tolist()  # type: ignore[attr-defined]
    assert stored == ids[:7], "six prompt blocks and the one that decoding filled, each once"


def test_prompt_only_leaves_decoded_blocks_out() -> None:
    host = make_host(prompt_only=True)
    request = Request("a", PROMPT + [1, 2, 3, 4, 5, 6], num_prompt_tokens=len(PROMPT))
    host.scheduler.get_num_new_matched_tokens(request, 0)
    meta = host.run_new(request, host.blocks(8))
    assert len(meta.reqs_to_store["a"][0].block_ids) == 6  # type: ignore[attr-defined]


def test_a_gpu_hit_that_the_tier_has_lost_is_stored_again() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    host.scheduler.reset_cache()
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, 24) == (0, False)
    meta = host.run_new(request, host.blocks(7), computed=24)
    assert len(meta.reqs_to_store["b"][0].block_ids) == 6  # type: ignore[attr-defined]


def test_finish_while_a_store_runs_holds_the_blocks() -> None:
    host = make_host()
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    meta = host.run_new(request, host.blocks(7))
    assert host.scheduler.request_finished(request) == (True, None)
    assert host.scheduler.has_pending_push_work()
    assert host.idle().reqs_to_hold == {"a"}
    host.report(meta.store_jobs["a"])
    assert not host.scheduler.has_pending_push_work()
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (24, True)


@pytest.mark.parametrize("state", ["unknown", "asked", "loading", "stored"])
def test_abort_in_every_state_leaves_nothing_pinned(state: str) -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT)
    if state == "asked":
        host.scheduler.get_num_new_matched_tokens(request, 0)
    job = load(host, request)[0] if state == "loading" else None
    if state == "stored":
        host.scheduler.get_num_new_matched_tokens(request, 24)
        host.run_new(request, host.blocks(7), computed=24)
    assert host.scheduler.request_finished(request)[0] is (state == "loading")
    assert not host.idle().reqs_to_hold, "a request that is being loaded is named as received"
    if job is not None:
        host.report(job)
    assert not host.scheduler.has_pending_push_work()
    assert host.scheduler.get_num_new_matched_tokens(Request("c", PROMPT), 0) == (24, True)
    stats = host.scheduler.manager.stats()  # type: ignore[attr-defined]
    assert stats.reading == 0


def test_a_failed_load_is_not_offered_again_and_what_failed_is_stored_anew() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT)
    job, blocks = load(host, request)
    host.report(job, success=False, failed_blocks=(2, 3), corrupt=True)
    assert host.scheduler.get_num_new_matched_tokens(request, 8) == (0, False)
    meta = host.run_new(request, (blocks[0] + [77],), computed=8)
    assert meta.reqs_to_store["b"][0].block_ids.tolist() == blocks[0][2:4]  # type: ignore[attr-defined]
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert explanation.first_miss is MissReason.FAILED
    assert (explanation.first_missing_token, explanation.from_tiers) == (8, {"cpu": 16})
    host.report(meta.store_jobs["b"])
    assert host.scheduler.get_num_new_matched_tokens(Request("c", PROMPT), 0) == (24, True)


def test_a_failed_load_is_offered_again_only_after_a_preemption() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT)
    job, blocks = load(host, request)
    host.report(job, success=False)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (0, False), "though all chunks are there"
    assert host.scheduler.get_num_new_matched_tokens(Request("c", PROMPT), 0) == (24, True)
    host.run_new(request, (blocks[0] + [77],))
    host.scheduler.build_connector_meta(StepView(preempted_req_ids={"b"}))
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (24, True)


def test_a_load_that_fails_after_its_request_ended_is_no_failure_of_the_next_one_of_that_id() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    first, second = Request("b", PROMPT), Request("b", PROMPT)
    job, _ = load(host, first)
    assert host.scheduler.request_finished(first) == (True, None)
    assert host.scheduler.get_num_new_matched_tokens(second, 0)[0] is None, "it waits for the chunks' load"
    host.report(job, success=False)
    assert host.scheduler.get_num_new_matched_tokens(second, 0) == (24, True)


def test_of_a_chunk_that_came_short_only_the_missing_blocks_count_as_computed() -> None:
    host = make_host(blocks_per_chunk=2)
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT)
    job, _ = load(host, request)
    host.report(job, success=False, failed_blocks=(3,))
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (explanation.from_tiers, explanation.recomputed) == ({"cpu": 20}, 6)
    assert explanation.first_missing_token == 12


@pytest.mark.parametrize(
    ("recompute", "loaded"), [(Recompute.MISSING, 20), (Recompute.REST, 8), (Recompute.ALL, 0)]
)
def test_behind_a_gap_tokens_count_as_loaded_only_if_the_engine_keeps_them(
    recompute: Recompute, loaded: int
) -> None:
    host = make_host(recompute=recompute)
    host.cache(Request("a", PROMPT))
    job, _ = load(host, Request("b", PROMPT))
    host.report(job, success=False, failed_blocks=(2,))
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (sum(explanation.from_tiers.values()), explanation.recomputed) == (loaded, 26 - loaded)
    assert (explanation.first_miss, explanation.first_missing_token) == (MissReason.IO_FAILED, 8)
    assert (host.scheduler.stats.asked_tokens, host.scheduler.stats.loaded_tokens) == (26 + 26, loaded)


@pytest.mark.parametrize(
    ("seconds", "corrupt", "reset", "reason"),
    [
        (0.0, False, False, MissReason.IO_FAILED),
        (2.0, False, False, MissReason.TOO_SLOW),
        (2.0, True, False, MissReason.FAILED),
        (0.0, False, True, MissReason.CLEARED),
    ],
)
def test_why_a_load_did_not_arrive_is_told_as_it_was(
    seconds: float, corrupt: bool, reset: bool, reason: MissReason
) -> None:
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT))
    job, _ = load(host, Request("b", PROMPT))
    if reset:
        host.scheduler.reset_cache()
    clock.now += seconds
    host.report(job, success=False, corrupt=corrupt)
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (explanation.first_miss, explanation.first_missing_token) == (reason, 0)


@pytest.mark.parametrize(
    ("limit", "told"),
    [(8, (MissReason.LIMITED, 8)), (0, (MissReason.LIMITED, 0)), (24, (None, None)), (99, (None, None))],
)
def test_a_request_that_limits_its_loads_is_explained(
    limit: int, told: tuple[MissReason | None, int | None]
) -> None:
    """A null says that only the unfinished end was computed."""
    host = make_host()
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT, kv_transfer_params={"max_load_tokens": limit})
    if limit:
        job, blocks = load(host, request)
        host.report(job)
    else:
        assert host.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        blocks = host.blocks(0)
        host.scheduler.update_state_after_alloc(request, blocks, 0)
    host.run_new(request, (blocks[0] + [77],), computed=min(limit, 24))
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (explanation.first_miss, explanation.first_missing_token) == told


def test_a_chunk_that_fails_twice_is_given_up_even_if_its_bytes_are_not_blamed() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    for name in "bc":
        job, _ = load(host, Request(name, PROMPT))
        host.report(job, success=False, failed_blocks=(0,))
    assert host.scheduler.get_num_new_matched_tokens(Request("d", PROMPT), 0) == (0, False)
    events = list(host.scheduler.take_events())
    assert isinstance(events[-1], BlockRemoved)
    assert len(events[-1].block_hashes) == 1


def test_nothing_is_kept_of_an_aborted_request_whose_load_failed() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 24)
    host.run_new(request, host.blocks(7), computed=24)
    host.scheduler.build_connector_meta(StepView(preempted_req_ids={"b"}))
    job, _ = load(host, request)
    host.scheduler.request_finished(request)
    host.refuse(job)
    kept = {
        name: value for name, value in vars(host.scheduler._explainer).items() if isinstance(value, dict)
    }
    assert kept.pop("_explained") is not None
    assert kept.pop("misses") is not None  # totals by reason, which are never more than there are reasons
    assert not any(kept.values())
    assert host.scheduler._requests == {}


def test_failed_store_frees_its_place() -> None:
    host = make_host()
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    meta = host.run_new(request, host.blocks(7))
    host.report(meta.store_jobs["a"], success=False, failed_blocks=(4, 5))
    assert used_slots(host) == 4
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (16, True)
    assert len(next(iter(host.scheduler.take_events())).block_hashes) == 4  # type: ignore[attr-defined]


def test_a_job_is_done_when_every_rank_has_reported() -> None:
    host = make_host(world_size=2)
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    job = host.run_new(request, host.blocks(7)).store_jobs["a"]
    host.report(job, rank=1)
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (None, False), (
        "still being written"
    )
    host.report(job, rank=0, success=False, failed_blocks=(5,))
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (20, True)
    host.report(job, rank=0)  # a late report of a job that is over changes nothing


def test_a_preempted_requests_blocks_are_fenced_until_its_stores_are_over() -> None:
    host = make_host()
    request, other = Request("a", PROMPT), Request("b", list(range(9)))
    host.scheduler.get_num_new_matched_tokens(request, 0)
    (ids,) = host.blocks(7)
    job = host.run_new(request, (ids,)).store_jobs["a"]
    host.scheduler.get_num_new_matched_tokens(other, 0)
    meta = host.run_new(other, ([90, ids[3], 91],), preempted_req_ids={"a"})
    assert meta.jobs_to_flush == {job}, "a block that the store still reads was handed on"
    host.report(job)
    assert host.scheduler.request_finished(request) == (False, None), "it holds no blocks any more"


def test_a_preempted_request_that_ends_before_its_stores_holds_no_blocks() -> None:
    host = make_host()
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    job = host.run_new(request, host.blocks(7)).store_jobs["a"]
    host.scheduler.build_connector_meta(StepView(preempted_req_ids={"a"}))
    assert host.scheduler.request_finished(request) == (False, None)
    output = KVConnectorOutput(reports=[TransferReport(0, TransferResult(job, success=True))])
    host.scheduler.update_connector_output(output)
    assert output.finished_sending == set(), "the engine has freed its blocks, and waits for no word of them"
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (24, True)


@pytest.mark.parametrize("is_loading", [False, True])
def test_the_end_of_a_store_is_not_reported_for_the_next_request_of_the_same_id(is_loading: bool) -> None:
    host = make_host()
    host.cache(Request("cached", PROMPT))
    first, second = Request("a", list(range(9))), Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(first, 0)
    job = host.run_new(first, host.blocks(3)).store_jobs["a"]
    assert host.scheduler.request_finished(first) == (True, None)
    if is_loading:
        load(host, second)
        assert host.scheduler.request_finished(second) == (True, None), "its load runs"
    else:
        assert host.scheduler.get_num_new_matched_tokens(second, 0) == (24, True)
    output = KVConnectorOutput(reports=[TransferReport(0, TransferResult(job, success=True))])
    host.scheduler.update_connector_output(output)
    assert output.finished_sending == set(), "the engine would free the blocks of the second request"


def test_blocks_given_to_a_request_that_was_never_asked_about_are_fenced_too() -> None:
    host = make_host()
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    (ids,) = host.blocks(7)
    job = host.run_new(request, (ids,)).store_jobs["a"]
    assert host.run_new(Request("unknown", [1, 2]), ([ids[0]],), preempted_req_ids={"a"}).jobs_to_flush == {
        job
    }


def test_blocks_that_a_finished_request_did_not_keep_are_fenced() -> None:
    host = make_host()
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    (ids,) = host.blocks(7)
    job = host.run_new(request, (ids,)).store_jobs["a"]
    assert host.scheduler.request_finished(request) == (True, None), "an engine may free them all the same"
    other = Request("b", list(range(50, 59)))
    host.scheduler.get_num_new_matched_tokens(other, 0)
    assert host.run_new(other, ([90, 91, ids[2]],)).jobs_to_flush == {job}


def test_an_engine_may_say_how_much_it_can_use() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    for limit, expected in ((None, 24), (25, 24), (23, 20), (4, 4), (3, 0), (0, 0)):
        request = Request(f"b{limit}", PROMPT)
        assert host.scheduler.get_num_new_matched_tokens(request, 0, limit) == (expected, expected > 0)
    assert host.scheduler.get_num_new_matched_tokens(Request("c", PROMPT), 8, 15) == (12, True)


def test_a_prefix_hit_on_a_fenced_block_needs_no_flush() -> None:
    host = make_host()
    request, other = Request("a", PROMPT), Request("b", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    (ids,) = host.blocks(7)
    host.run_new(request, (ids,))
    host.scheduler.get_num_new_matched_tokens(other, 24)
    meta = host.run_new(other, (ids[:6] + [99],), computed=24)
    assert not meta.jobs_to_flush, "nobody overwrites a block that was hit"


def test_a_load_into_a_fenced_block_flushes_the_store() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    victim = Request("v", list(range(8)))
    host.scheduler.get_num_new_matched_tokens(victim, 0)
    job = host.run_new(victim, ([50, 51],)).store_jobs["v"]
    request = Request("b", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    host.scheduler.update_state_after_alloc(request, ([50, 60, 61, 62, 63, 64],), 24)
    meta = host.scheduler.build_connector_meta(StepView(preempted_req_ids={"v"}))
    assert meta.jobs_to_flush == {job}


def test_blocks_into_which_another_connector_may_load_are_fenced() -> None:
    host = make_host()
    victim, request = Request("v", list(range(8))), Request("b", PROMPT)
    host.scheduler.get_num_new_matched_tokens(victim, 0)
    job = host.run_new(victim, ([50, 51],)).store_jobs["v"]
    host.scheduler.request_finished(victim)
    host.scheduler.get_num_new_matched_tokens(request, 4)
    host.scheduler.update_state_after_alloc(request, ([60, 51, 61],), 0)
    assert host.idle().jobs_to_flush == {job}
    assert host.idle().jobs_to_flush == set()


@pytest.mark.parametrize("is_given_away", [False, True])
def test_a_chunk_whose_key_comes_late_is_stored_although_its_request_has_ended(is_given_away: bool) -> None:
    host = make_host()
    request = Request("a", list(range(7)))
    host.scheduler.get_num_new_matched_tokens(request, 0)
    host.run_new(request, ([1, 2],))
    assert not host.run_more(request, 7, 1).store_jobs, "the eighth token is not known yet"
    request.tokens += [7, 8]
    host.scheduler.get_num_new_matched_tokens(Request("b", [9]), 0)
    ended = [CachedRequest("a", None, 8)]
    meta = host.run_new(Request("b", [9]), ([2 if is_given_away else 3],), ended=ended)
    stored = {req_id: spec[0].block_ids.tolist() for req_id, spec in meta.reqs_to_store.items()}
    assert stored == ({} if is_given_away else {"a": [2]})


def test_a_chunk_being_written_is_waited_for_only_so_long() -> None:
    clock = Clock()
    host = make_host(clock=clock)
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    host.run_new(request, host.blocks(7))
    late = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(late, 0) == (None, False)
    clock.now += 10
    assert host.scheduler.get_num_new_matched_tokens(late, 0) == (0, False)
    host.run_new(late, host.blocks(7))
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert explanation.first_miss is MissReason.WRITING


def test_the_second_request_for_a_chunk_waits_if_the_load_is_nearly_here() -> None:
    host = make_host(clock=Clock())
    host.cache(Request("a", PROMPT))
    job, _ = load(host, Request("b", PROMPT))
    second = Request("c", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    host.report(job)
    assert host.scheduler.get_num_new_matched_tokens(second, 24) == (0, False), "now it is a hit on the GPU"


def test_no_convoy_where_computing_is_faster_than_the_load_under_way() -> None:
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT))
    host.scheduler.cost.loads.learn(64, 10.0)
    load(host, Request("b", PROMPT))
    host.scheduler.cost.learn_step(1000, 0.001)
    assert host.scheduler.get_num_new_matched_tokens(Request("c", PROMPT), 0) == (0, False)
    assert host.scheduler.stats.not_worth == 1


def test_a_load_slower_than_computing_is_not_done_unless_told_so() -> None:
    for settings, expected in (({}, (0, False)), ({"load_if_faster": False}, (24, True))):
        host = make_host(**settings)  # type: ignore[arg-type]
        host.cache(Request("a", PROMPT))
        host.scheduler.cost.loads.learn(64, 10.0)
        host.scheduler.cost.learn_step(1000, 0.001)
        request = Request("b", PROMPT)
        assert host.scheduler.get_num_new_matched_tokens(request, 0) == expected
        if expected == (0, False):
            host.run_new(request, host.blocks(7))
            explanation = host.scheduler.explain("b")
            assert explanation is not None
            assert explanation.first_miss is MissReason.NOT_WORTH_LOADING


def test_a_step_scheduled_while_another_runs_is_charged_for_its_own_time_only() -> None:
    """As under asynchronous scheduling: a prefill of 10 s runs while a decode step of 1 s is scheduled
    behind it.
    """
    clock = Clock()
    host = make_host(clock=clock)
    schedule, ended = host.scheduler.build_connector_meta, KVConnectorOutput()
    schedule(StepView(num_scheduled_tokens={"a": 1000}))
    clock.now = 9.0
    schedule(StepView(num_scheduled_tokens={"a": 1}))
    clock.now = 10.0
    host.scheduler.update_connector_output(ended)
    assert host.scheduler.cost.compute_seconds(1000) == 10.0
    schedule(StepView(num_scheduled_tokens={"b": 500}))
    clock.now = 11.0
    host.scheduler.update_connector_output(ended)
    clock.now = 16.0
    host.scheduler.update_connector_output(ended)
    assert host.scheduler.cost.compute_seconds(1000) == 10.0, (
        "500 tokens took 5 s, not the 6 s since they were scheduled"
    )
    host.scheduler.update_connector_output(ended)
    assert host.scheduler.cost.compute_seconds(1000) == 10.0


def test_reset_while_jobs_run_frees_everything_in_the_end() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    job, _ = load(host, Request("b", PROMPT))
    writer = Request("w", list(range(8)))
    host.scheduler.get_num_new_matched_tokens(writer, 0)
    store = host.run_new(writer, host.blocks(2)).store_jobs["w"]
    assert host.scheduler.reset_cache()
    assert host.scheduler.get_num_new_matched_tokens(Request("c", PROMPT), 0) == (0, False)
    held: set[object] = set()
    for event in host.scheduler.take_events():
        assert isinstance(event, BlockStored | BlockRemoved)
        held = (
            held - set(event.block_hashes)
            if isinstance(event, BlockRemoved)
            else held | set(event.block_hashes)
        )
    assert not held, "the stream says that nothing is left"
    host.report(job)
    host.report(store)
    assert used_slots(host) == 0
    assert not list(host.scheduler.take_events())


def test_events_that_nobody_wants_do_not_pile_up() -> None:
    host = make_host()
    object.__setattr__(host.scheduler.spec.config, "enable_kv_cache_events", False)
    host.cache(Request("a", PROMPT))
    assert not list(host.scheduler.manager.take_events())


def test_a_full_pool_takes_the_leading_part_and_refusals_are_retried() -> None:
    host = make_host(num_slots=4)
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    meta = host.run_new(request, host.blocks(7))
    assert len(meta.reqs_to_store["a"][0].block_ids) == 4  # type: ignore[attr-defined]
    other = Request("b", list(range(8)))
    host.scheduler.get_num_new_matched_tokens(other, 0)
    assert not host.run_new(other, host.blocks(2)).reqs_to_store, "every place is being written"
    host.report(meta.store_jobs["a"])
    steps = [host.run_more(other, 8, 0) for _ in range(20)]
    assert sum(len(step.reqs_to_store) for step in steps) == 1


def test_windowed_groups_need_only_the_window() -> None:
    host = make_host(windows=(None, 8))
    host.cache(Request("a", PROMPT), groups=2)
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (24, True)
    host.scheduler.update_state_after_alloc(request, ([41, 42, 43, 44, 45, 46], [0, 0, 0, 0, 55, 56]), 24)
    source, destination = host.idle().reqs_to_load["b"]
    assert isinstance(destination, GPULoadStoreSpec)
    assert destination.group_sizes == (6, 2)
    assert destination.block_indices == (0, 4)
    assert destination.block_ids.tolist() == [41, 42, 43, 44, 45, 46, 55, 56]
    assert len(source.block_ids) == 8  # type: ignore[attr-defined]


def test_blocks_that_a_window_will_never_need_are_not_stored() -> None:
    """A load ends where the large blocks do: of the small ones only those in sight of such an end are of
    use.
    """
    groups = (
        GroupConfig(block_size=4 * BLOCK, bytes_per_block=64, layer_names=("full",)),
        GroupConfig(
            block_size=BLOCK, bytes_per_block=64, layer_names=("windowed",), sliding_window=BLOCK + 1
        ),
    )
    spec = ManagerOnlySpec(replace(make_config(), groups=groups), CPUOffloadingManager(64))
    host = Host(OffloadingConnectorScheduler(spec, Clock(), Request.describe))
    request = Request("a", list(range(33)))
    host.scheduler.get_num_new_matched_tokens(request, 0)
    blocks = [1, 2, 3], list(range(10, 19))
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    meta = host.run_new(request, blocks)
    source, _ = meta.reqs_to_store["a"]
    assert source.block_ids.tolist() == [1, 2, 12, 13, 16, 17]
    host.report(meta.store_jobs["a"])
    host.scheduler.request_finished(request)
    for length, expected in ((33, 32), (31, 16), (15, 0)):
        again = Request(f"b{length}", list(range(length)))
        assert host.scheduler.get_num_new_matched_tokens(again, 0) == (expected, expected > 0)


def test_a_block_that_a_window_left_and_someone_else_got_is_not_stored() -> None:
    host = make_host(windows=(8,), blocks_per_chunk=4)
    request, other = Request("a", list(range(16))), Request("b", list(range(50, 54)))
    host.scheduler.get_num_new_matched_tokens(request, 0)
    host.run_new(request, ([1, 2, 3],), 0, 12)
    host.scheduler.get_num_new_matched_tokens(other, 0)
    host.run_new(other, ([1],))
    meta = host.run_more(request, 12, 4, ([4],))
    assert not meta.reqs_to_store, "its first block is no longer its own"


class CountingList(list[int]):
    """Counts how often one looks into it."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        CountingList.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        CountingList.looks += 1
        return super().__iter__()


def test_a_step_of_one_request_does_not_look_at_the_blocks_of_others() -> None:
    """With windows every allocation went through every block of every request that was not stored yet."""
    host = make_host(windows=(None, 8), prompt_only=True)
    others = [Request(f"other {i}", [i, *range(40)], num_prompt_tokens=1) for i in range(20)]
    for other in others:
        host.scheduler.get_num_new_matched_tokens(other, 0)
        host.run_new(other, host.blocks(11, groups=2))
    for state in host.scheduler._requests.values():
        for group in state.groups:
            group.block_ids = CountingList(group.block_ids)
    CountingList.looks = 0
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    meta = host.run_new(request, host.blocks(7, groups=2))
    assert meta.reqs_to_store
    assert CountingList.looks == 0


def test_an_unaligned_local_hit_is_refused() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 3)
    with pytest.raises(InputError, match="multiple of the block size"):
        host.scheduler.update_state_after_alloc(request, ([1, 2, 3, 4, 5, 6],), 21)


@pytest.mark.parametrize(("tokens", "num_blocks"), [(10, 3), (8, 1), (8, 0)])
def test_a_host_that_does_not_allocate_for_all_offered_tokens_has_a_failed_load(
    tokens: int, num_blocks: int
) -> None:
    """With the last block, which no chunk covers, the load was ordered, and its end raised; the request then
    waited for ever.
    """
    host = make_host()
    prompt = list(range(10))
    host.cache(Request("a", prompt))
    request, blocks = Request("b", prompt), host.blocks(num_blocks)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    host.scheduler.update_state_after_alloc(request, blocks, tokens)
    meta = host.idle()
    assert not meta.reqs_to_load
    ((job_id, order),) = meta.jobs_to_end.items()
    assert order.block_ids == tuple(blocks[0])
    host.refuse(job_id)
    assert host.scheduler.manager.stats().ready == 2, "no fault of the chunks"


def test_explanations_name_eviction() -> None:
    host = make_host(num_slots=6)
    host.cache(Request("a", PROMPT))
    host.cache(Request("x", list(range(24))))
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    host.run_new(request, host.blocks(7))
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (explanation.first_miss, explanation.first_missing_token) == (MissReason.EVICTED, 0)


def test_decodes_of_many_requests_do_not_teach_what_a_prompt_costs() -> None:
    """A step of 64 requests that decode was taken for 64 tokens of a prompt. On a busy GPU a token could
    then look more costly than it is, and loads seem to save more.
    """
    clock = Clock()
    host = make_host(clock=clock)
    decodes = {f"decode {number}": 1 for number in range(64)}
    for scheduled, seconds, learnt in ((decodes, 0.64, None), (decodes | {"prompt": 936}, 1.0, 0.001)):
        host.scheduler.build_connector_meta(StepView(num_scheduled_tokens=scheduled))
        clock.now += seconds
        host.scheduler.update_connector_output(KVConnectorOutput())
        assert host.scheduler.cost.compute_seconds(1) == learnt


def test_a_load_that_should_be_in_does_not_hold_up_the_next() -> None:
    """Results come with a step's end: what is on the bus by the books has often left it long ago."""
    clock = Clock()
    host = make_host(clock=clock)
    first, second = list(range(1, 26)), list(range(101, 126))
    for index, prompt in enumerate((first, second)):
        host.cache(Request(f"cached {index}", prompt))
    host.scheduler.cost.learn_step(100, 4.0)  # a prompt takes a second to compute, and 0.6 to load
    host.scheduler.cost.loads.learn(_load_bytes(host, 24), 0.6)
    load(host, Request("b", first))
    assert host.scheduler.get_num_new_matched_tokens(Request("c", second), 0) == (0, False), (
        "1.2 s with the wait"
    )
    clock.now += 0.6
    assert host.scheduler.get_num_new_matched_tokens(Request("d", second), 0) == (24, True)


def test_prompts_that_wait_to_be_computed_speak_for_a_load() -> None:
    """Of many at once, those that the bus has no time for are computed one after the other, not all at the
    same time.
    """
    host = make_host(clock=Clock())
    prompts = [list(range(100 * index, 100 * index + 25)) for index in range(8)]
    for index, prompt in enumerate(prompts):
        host.cache(Request(f"cached {index}", prompt))
    host.scheduler.cost.learn_step(100, 4.0)
    host.scheduler.cost.loads.learn(_load_bytes(host, 24), 0.4)
    loaded = []
    for index, prompt in enumerate(prompts):
        request = Request(f"again {index}", prompt)
        tokens, _ = host.scheduler.get_num_new_matched_tokens(request, 0)
        if tokens:
            host.scheduler.update_state_after_alloc(request, host.blocks(7), tokens)
        loaded.append(bool(tokens))
    assert loaded == [True, True, False, True, True, True, False, True]
    host.scheduler.check()


def test_long_steps_do_not_make_a_load_look_slow() -> None:
    """A load begins when the step before it is over, and is seen at the end of the next.

    It was given up instead.
    """
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT))
    host.scheduler.cost.learn_step(8192, 0.25)
    job, _ = load(host, Request("b", PROMPT))
    clock.now += 0.7
    assert host.idle().jobs_to_end == {}
    clock.now += 0.1
    assert job in host.idle().jobs_to_end


def _load_bytes(host: Host, tokens: int) -> int:
    return host.scheduler._geometry.load_bytes(0, tokens)


JUNK: list[Any] = [
    "",
    "x",
    0,
    3,
    0.0,
    float("nan"),
    True,
    False,
    [],
    ["max_load_tokens"],
    (),
    set(),
    b"",
    object(),
]
NO_LIMITS: list[Any] = [*JUNK[:2], *JUNK[4:], -1, -(2**70), "9" * 10_000_000, -(10**9_000), {}, {"a": {}}]


@pytest.mark.parametrize("params", JUNK, ids=lambda value: repr(value)[:20])
def test_parameters_that_are_no_dict_are_none(params: Any) -> None:
    """A client's `vllm_xargs` come here as they are; the first `.get` on them ended vLLM's engine."""
    host = make_host()
    host.cache(Request("a", PROMPT, kv_transfer_params=params))
    again = Request("b", PROMPT, kv_transfer_params=params)
    host.scheduler.on_new_request(again)
    assert host.scheduler.get_num_new_matched_tokens(again, 0) == (24, True)
    assert host.scheduler._requests["b"].context.kv_transfer_params is None


@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
@pytest.mark.parametrize("limit", NO_LIMITS, ids=lambda value: type(value).__name__)
def test_a_limit_that_is_none_is_told_once_and_briefly(
    name: str, limit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A client's 20 MB were logged at every question about its request."""
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT, kv_transfer_params={name: limit}))
    caplog.clear()
    clock.now += 60
    again = Request("b", PROMPT, kv_transfer_params={name: limit})
    for _ in range(3):
        assert host.scheduler.get_num_new_matched_tokens(again, 0) == (24, True)
    (line,) = caplog.messages
    assert name in line
    assert len(line) < 300


def test_bad_limits_of_many_requests_are_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Any client could fill the log: each of its requests was a line."""
    clock = Clock()
    host = make_host(clock=clock)
    for number in range(100):
        params = {"max_load_tokens": "all", "max_offload_tokens": -1}
        host.scheduler.get_num_new_matched_tokens(
            Request(f"r{number}", PROMPT, kv_transfer_params=params), 0
        )
    assert len(caplog.messages) == 1
    clock.now = 60.0
    params = {"max_load_tokens": "all"}
    host.scheduler.get_num_new_matched_tokens(Request("late", PROMPT, kv_transfer_params=params), 0)
    assert caplog.messages[1].endswith(
        "the request has no such limit; and 199 more since the last such line"
    )


@pytest.mark.parametrize(("limit", "loaded"), [(0, 0), (7, 4), (8, 8), (2**70, 24), (None, 24)])
def test_a_request_may_limit_what_is_loaded(limit: int | None, loaded: int) -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    again = Request("b", PROMPT, kv_transfer_params={"max_load_tokens": limit})
    assert host.scheduler.get_num_new_matched_tokens(again, 0) == (loaded, loaded > 0)


def test_a_queued_request_is_not_explained_as_the_former_one_of_its_id() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    assert host.scheduler.explain("a") is not None
    host.scheduler.on_new_request(Request("a", PROMPT[:3]))
    assert host.scheduler.explain("a") is None


@pytest.mark.parametrize("times", [(0.25, 0.75), (0.75, None)])
def test_seconds_of_a_transfer_are_those_of_the_slowest_rank(times: tuple[float, float | None]) -> None:
    """The time from the order to the last report contained whole steps: a median of 103 s in a log."""
    clock = Clock()
    host = make_host(world_size=2, clock=clock)

    def report(job: int) -> None:
        for rank, seconds in enumerate(times):
            clock.now += 50.0  # the pass that computes the blocks, and the steps that carry the reports
            host.report(job, rank=rank, seconds=seconds)

    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    blocks = host.blocks(7)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    report(host.run_new(request, blocks).store_jobs["a"])
    host.scheduler.request_finished(request)
    report(load(host, Request("b", PROMPT))[0])
    assert (host.scheduler.stats.stores, host.scheduler.stats.loads) == (1, 1)
    assert host.scheduler.times.stores.take_recent() == [0.75]
    assert host.scheduler.times.loads.take_recent() == [0.75]


def test_a_transfer_that_no_rank_has_timed_is_counted_and_has_no_seconds() -> None:
    host = make_host()
    request, blocks = Request("a", PROMPT), host.blocks(7)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    host.report(host.run_new(request, blocks).store_jobs["a"], seconds=None)
    assert host.scheduler.stats.stores == 1
    assert host.scheduler.times.stores.take_recent() == []
