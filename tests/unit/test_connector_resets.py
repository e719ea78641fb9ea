"""What was computed or stored before a reset never comes back: weights may have been swapped at it. Ids that come again."""

from __future__ import annotations

from tests.unit.connector_kit import BLOCK, Host, Request, make_host
from tests.unit.test_connector_scheduler import PROMPT, load, used_slots

from kvtier.connector import KVConnectorOutput, StepView, TransferReport
from kvtier.events.types import BlockStored
from kvtier.offload import TransferResult


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
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (None, False), "still being written"
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
