"""What was computed or stored before a reset never comes back: weights may have been swapped at it.

Ids that come again.
"""

from __future__ import annotations

import pytest
from tests.unit.connector_kit import BLOCK, Clock, Host, Request, make_host
from tests.unit.test_connector_scheduler import PROMPT, load, used_slots

from kvtier.connector import KVConnectorOutput, StepView, TransferReport
from kvtier.events.types import BlockStored
from kvtier.offload import MissReason, TransferResult


def asked(host: Host, name: str, tokens: list[int] = PROMPT) -> Request:
    request = Request(name, tokens)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    return request


def test_a_request_that_runs_at_a_reset_stores_nothing_from_before_it() -> None:
    host = make_host()
    request = asked(host, "a")
    first = host.run_new(request, host.blocks(7), scheduled=12)
    host.report(first.store_jobs["a"])
    host.scheduler.reset_cache()
    later = host.run_more(request, 12, 14)
    assert not later.reqs_to_store, "what it computes now it computes from KV of before"
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (0, False)
    assert used_slots(host) == 0


def test_a_request_that_starts_over_after_a_reset_stores_again() -> None:
    host = make_host()
    request = asked(host, "a")
    host.report(host.run_new(request, host.blocks(7)).store_jobs["a"])
    host.scheduler.reset_cache()
    host.scheduler.build_connector_meta(StepView(preempted_req_ids={"a"}))
    host.scheduler.get_num_new_matched_tokens(request, 0)
    again = host.run_more(request, 0, 26, host.blocks(7), resumed=True)
    assert again.reqs_to_store
    host.report(again.store_jobs["a"])
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (24, True)


def test_a_store_under_way_at_a_reset_does_not_make_a_newer_one_ready() -> None:
    """The same chunk is stored again before the old store is over: each job ends its own."""
    host = make_host()
    old = host.run_new(asked(host, "old"), host.blocks(7)).store_jobs["old"]
    host.scheduler.reset_cache()
    new = host.run_new(asked(host, "new"), host.blocks(7)).store_jobs["new"]
    host.report(old)
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (None, False), (
        "still being written"
    )
    host.report(new)
    assert host.scheduler.get_num_new_matched_tokens(Request("c", PROMPT), 0) == (24, True)
    events = list(host.scheduler.take_events())
    assert [event.token_ids for event in events if isinstance(event, BlockStored)] == [PROMPT[: 6 * BLOCK]]
    assert used_slots(host) == 6


def test_a_load_under_way_at_a_reset_has_failed() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    job, blocks = load(host, Request("b", PROMPT))
    host.scheduler.reset_cache()
    order = host.idle().jobs_to_end[job]
    assert (order.void, order.block_ids) == (True, tuple(blocks[0]))
    output = KVConnectorOutput(set(), {"b"}, set(), [TransferReport(0, TransferResult(job, success=True))])
    host.scheduler.update_connector_output(output)
    assert (output.finished_recving, output.invalid_block_ids) == ({"b"}, set(blocks[0]))
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (0, False)
    assert used_slots(host) == 0
    assert host.idle().jobs_to_end == {}


def test_a_failure_of_before_a_reset_is_not_held_against_a_chunk_of_after_it() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    job, _ = load(host, Request("b", PROMPT))
    host.scheduler.reset_cache()
    host.cache(Request("c", PROMPT))
    host.report(job, success=False, corrupt=True)
    assert host.scheduler.get_num_new_matched_tokens(Request("d", PROMPT), 0) == (24, True)


def test_an_id_that_comes_again_while_its_first_owner_still_stores_is_another_request() -> None:
    host = make_host()
    job = host.run_new(asked(host, "a"), host.blocks(7)).store_jobs["a"]
    assert host.scheduler.request_finished(Request("a", PROMPT))[0]
    other = Request("a", list(range(500, 526)))
    assert host.scheduler.get_num_new_matched_tokens(other, 0) == (0, False), "nobody has stored this prompt"
    blocks = host.blocks(7)
    host.scheduler.update_state_after_alloc(other, blocks, 0)
    meta = host.run_new(other, blocks)
    host.report(job)
    host.report(meta.store_jobs["a"])
    for prompt in (PROMPT, other.tokens):
        assert host.scheduler.get_num_new_matched_tokens(Request("b", prompt), 0) == (24, True)
        host.scheduler.request_finished(Request("b", prompt))
    assert not host.scheduler.request_finished(other)[0]
    assert not host.scheduler.has_pending_push_work()


def test_the_end_of_a_store_does_not_name_an_id_that_another_request_has_by_then() -> None:
    host = make_host()
    host.cache(Request("other", PROMPT))
    mine = list(range(500, 526))
    job = host.run_new(asked(host, "r", mine), host.blocks(7)).store_jobs["r"]
    assert host.scheduler.request_finished(Request("r", mine))[0]
    again = Request("r", PROMPT)
    load_job, _ = load(host, again)
    assert host.scheduler.request_finished(again)[0], "its load fills blocks"
    output = KVConnectorOutput(reports=[TransferReport(0, TransferResult(job, success=True))])
    host.scheduler.update_connector_output(output)
    assert (output.finished_sending, output.finished_recving) == (set(), set())
    output = KVConnectorOutput(reports=[TransferReport(0, TransferResult(load_job, success=True))])
    host.scheduler.update_connector_output(output)
    assert output.finished_recving == {"r"}


def test_a_reset_between_ask_and_allocation_is_a_failed_load() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (24, True)
    host.scheduler.reset_cache()
    blocks = host.blocks(6)
    host.scheduler.update_state_after_alloc(request, blocks, 24)
    meta = host.idle()
    assert not meta.reqs_to_load
    ((job, order),) = meta.jobs_to_end.items()
    assert (order.void, order.block_ids) == (True, tuple(blocks[0]))
    output = KVConnectorOutput(reports=[TransferReport(0, TransferResult(job, success=False))])
    host.scheduler.update_connector_output(output)
    assert (output.finished_recving, output.invalid_block_ids) == ({"b"}, set(blocks[0]))
    host.scheduler.check()
    assert used_slots(host) == 0


def test_the_end_of_an_older_store_takes_nothing_from_a_newer_ones_announcement() -> None:
    """Twice a chunk is found corrupt by a load and stored again before the store before that is over."""
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT[:4]))
    second = Request("second", PROMPT[:4])
    loads = [load(host, Request("first", PROMPT[:4]))[0]]
    assert host.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    clock.now += 1.0  # it has waited for the other's load long enough
    loads.append(load(host, second)[0])
    list(host.scheduler.take_events())
    host.report(loads[0], success=False, corrupt=True)
    old = host.run_new(asked(host, "x", PROMPT[:4]), host.blocks(1)).store_jobs["x"]
    host.report(loads[1], success=False, corrupt=True)
    new = host.run_new(asked(host, "y", PROMPT[:4]), host.blocks(1)).store_jobs["y"]
    host.report(old)
    host.report(new)
    stored = [event for event in host.scheduler.take_events() if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored] == [PROMPT[:4]]


def test_blocks_taken_ahead_of_a_step_count_as_allocated() -> None:
    """A window left block 1 behind, and a request that never runs had something computed into it."""
    host = make_host(windows=(8,), blocks_per_chunk=4)
    request = asked(host, "a", list(range(16)))
    host.run_new(request, ([1, 2, 3],), 0, 12)
    host.scheduler.build_connector_meta(StepView(speculative_blocks={1}))
    assert not host.run_more(request, 12, 4, ([4],)).reqs_to_store


# Blocks that an engine keeps at a reset.


def stale_blocks(host: Host) -> float:
    values = {metric.name: samples[0][1] for metric, samples in host.scheduler.metrics.collect() if samples}
    gauge = values["stale_blocks"]
    assert isinstance(gauge, int)
    return gauge


def run_after_hit(host: Host, name: str, hits: list[int], fresh: list[int]) -> bool:
    """Run a request that the engine begins with `hits`; return whether anything of it is stored."""
    request, blocks = Request(name, PROMPT), (hits + fresh,)
    local = len(hits) * BLOCK
    host.scheduler.get_num_new_matched_tokens(request, local, 0)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    meta = host.run_new(request, blocks, local)
    for job in meta.store_jobs.values():
        host.report(job)
    host.scheduler.request_finished(request, blocks)
    return bool(meta.reqs_to_store)


def test_only_requests_that_go_on_from_kept_blocks_store_nothing() -> None:
    host = make_host()
    host.scheduler.reset_cache(kept_blocks=[1, 2, 3])
    assert run_after_hit(host, "other", [11, 12], [13, 14, 15, 16, 17])
    assert not run_after_hit(host, "kept", [1, 2], [21, 22, 23, 24, 25])
    explanation = host.scheduler.explain("kept")
    assert explanation is not None
    assert explanation.first_miss is MissReason.STALE_PREFIX
    assert not run_after_hit(host, "again", [1, 2, 21], [31, 32, 33, 34]), "computed from a kept block"
    assert stale_blocks(host) == 3 + 5 + 4


def test_kept_blocks_that_are_handed_out_anew_may_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvtier")
    host = make_host()
    host.scheduler.reset_cache(kept_blocks=[1, 2, 3])
    assert "3 blocks with KV of before it" in caplog.text
    assert run_after_hit(host, "a", [], [1, 2, 41, 42, 43, 44, 45])
    assert stale_blocks(host) == 1
    host.scheduler.reset_cache(kept_blocks=[1, 2, 3])
    assert run_after_hit(host, "b", [], [1, 2, 3, 42, 43, 44, 45])
    assert stale_blocks(host) == 0
    assert "handed out anew all blocks" in caplog.text
    host.scheduler.reset_cache(kept_blocks=[1])
    host.scheduler.reset_cache()
    assert stale_blocks(host) == 1, "a reset of kvtier's own does not hand out blocks"
    host.scheduler.reset_cache(kept_blocks=[])
    assert run_after_hit(host, "c", [1, 2], [3, 4, 5, 6, 7])


def test_a_request_that_runs_at_a_reset_spreads_what_was_kept() -> None:
    """The blocks that it gets later hold KV that was computed from that of before the reset."""
    host = make_host()
    running = asked(host, "running")
    host.run_new(running, ([1, 2, 3],), scheduled=12)
    host.scheduler.reset_cache(kept_blocks=[1, 2, 3])
    host.run_more(running, 12, 14, ([4, 5, 6, 7],))
    assert stale_blocks(host) == 7
    assert not run_after_hit(host, "next", [1, 2, 3, 4, 5], [11, 12])


def test_a_request_of_which_nothing_is_known_spreads_it_too() -> None:
    host = make_host()
    host.scheduler.reset_cache(kept_blocks=[1])
    host.scheduler.build_connector_meta(StepView(speculative_blocks={1, 2}))
    host.run_new(Request("unknown", PROMPT), ([1, 3],), computed=BLOCK, scheduled=BLOCK)
    assert not run_after_hit(host, "a", [2], [11, 12, 13, 14, 15, 16])
    assert not run_after_hit(host, "b", [3], [21, 22, 23, 24, 25, 26])


def test_a_copy_of_a_kept_block_is_as_old() -> None:
    """An engine that shares part of a block copies it before the step, behind the blocks of the hit."""
    for kept, is_stored in (([9], False), ([8], True)):
        host = make_host()
        host.scheduler.reset_cache(kept_blocks=kept)
        request, blocks = asked(host, "a"), ([1, 2, 3, 4, 5, 6, 7],)
        host.scheduler.update_state_after_alloc(request, blocks, 0)
        meta = host.run_new(request, blocks, computed=2, copied_blocks=[(9, 1)])
        assert bool(meta.reqs_to_store) is is_stored


def test_the_null_block_is_never_stale() -> None:
    host = make_host(windows=(8,))
    running = asked(host, "running")
    host.scheduler.reset_cache(kept_blocks=[1])
    host.run_new(running, ([0, 0, 4, 5, 6, 7, 8],), scheduled=26)
    assert run_after_hit(host, "a", [0, 0, 9, 10], [11, 12, 13])


def test_kept_blocks_are_forgotten_once_the_engine_has_cleared_its_cache() -> None:
    host = make_host()
    host.scheduler.reset_cache(kept_blocks=[1, 2, 3])
    host.scheduler.forget_stale_blocks()
    assert stale_blocks(host) == 0
    assert run_after_hit(host, "a", [1, 2], [3, 4, 5, 6, 7])


def test_a_block_that_is_stored_again_in_another_chunk_stays_after_a_reset_in_slices() -> None:
    """The late removal of the cleared chunk took the block away that the two chunks share."""
    host = make_host(num_slots=6000, capacity=1 << 24, blocks_per_chunk=2)
    held: set[object] = set()

    def listen() -> None:
        for event in host.scheduler.take_events():
            change = held.add if isinstance(event, BlockStored) else held.discard
            for block in event.block_hashes:  # type: ignore[union-attr]
                change(block)

    for number in range(2100):  # more than one slice
        host.cache(Request(f"before {number}", [number + 1000] * 8))
    host.cache(Request("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    listen()
    host.scheduler.reset_cache()
    again = Request("b", [1, 2, 3, 4, 9, 9, 9, 9])
    host.cache(again)
    while host.scheduler.manager.has_pending_work():
        listen()
    listen()
    assert len(held) == 2
    host.scheduler.reset_cache()
    listen()
    assert not held
    host.scheduler.check()
