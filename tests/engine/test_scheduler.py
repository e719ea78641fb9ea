"""The scheduler: who runs, who waits, who gives way; and what it does with loads that are slow, failed or
too many.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.drive import (
    ALL_KINDS,
    ONE_GROUP,
    STATES,
    TWO_GROUPS,
    expect,
    expect_idle,
    run,
    tokens,
    toy_engine,
)
from tests.engine.fake_connector import FakeConnector

from kvtier.engine import Engine, SamplingParams
from kvtier.engine.config import LayerKind
from kvtier.engine.scheduler import RequestSlice, Step, _runs


def add(engine: Engine, name: str, prompt: list[int], max_tokens: int = 4) -> None:
    engine.add_request(prompt, SamplingParams(max_tokens=max_tokens), request_id=name)


def scheduled(step: Step) -> dict[str, int]:
    return step.view.num_scheduled_tokens


def compute(engine: Engine, step: Step, token: int | None = 1) -> None:
    """Do what the engine does after a forward pass; sample always the same token."""
    for request_slice in step.slices:
        last = request_slice.is_last
        engine._scheduler.finish_slice(request_slice)
        if last and token is not None:
            request_slice.request.append(token, 0.0)


# -- batches ---------------------------------------------------------------------------------------


def test_long_prompts_come_in_chunks_and_share_the_budget() -> None:
    engine = toy_engine(max_num_batched_tokens=16)
    add(engine, "long", tokens(40))
    add(engine, "short", tokens(5, seed=1))
    seen = []
    for _ in range(4):
        step = engine._scheduler.schedule()
        seen.append(scheduled(step))
        compute(engine, step)
    assert seen == [{"long": 16}, {"long": 16}, {"long": 8, "short": 5}, {"long": 1, "short": 1}]


def test_no_more_requests_than_seats() -> None:
    engine = toy_engine(max_num_seqs=2)
    for index in range(3):
        add(engine, f"r{index}", tokens(4, seed=index), max_tokens=2)
    step = engine._scheduler.schedule()
    assert set(scheduled(step)) == {"r0", "r1"}


def test_the_connectors_view_tells_all_blocks_once_and_then_the_new_ones() -> None:
    engine = toy_engine()
    add(engine, "r", tokens(6))
    first = engine._scheduler.schedule()
    (new,) = first.view.new
    assert (new.req_id, new.num_computed_tokens, len(new.block_ids[0])) == ("r", 0, 2)
    compute(engine, first)
    second = engine._scheduler.schedule()  # token 6 still fits into the second block
    (cached,) = second.view.cached
    assert (cached.new_block_ids, cached.num_computed_tokens, cached.resumed) == (None, 6, False)
    compute(engine, second)
    compute(engine, engine._scheduler.schedule())
    (cached,) = engine._scheduler.schedule().view.cached
    assert cached.new_block_ids is not None
    assert len(cached.new_block_ids[0]) == 1


def test_the_youngest_gives_way_keeps_its_tokens_and_comes_back_whole() -> None:
    engine = toy_engine(num_blocks=9)
    add(engine, "old", tokens(11), max_tokens=30)
    add(engine, "young", tokens(11, seed=1), max_tokens=30)
    scheduler = engine._scheduler
    for _ in range(40):
        step = scheduler.schedule()
        compute(engine, step)
        if step.view.preempted_req_ids:
            break
    assert step.view.preempted_req_ids == {"young"}
    assert set(scheduled(step)) == {"old"}
    (young,) = scheduler.waiting
    assert (young.preemptions, young.num_computed_tokens, young.table.rows) == (1, 0, ())
    assert young.num_tokens > 11
    engine.check()
    engine.abort("old")
    step = scheduler.schedule()
    (resumed,) = step.view.cached
    assert resumed.resumed
    assert resumed.new_block_ids == young.table.rows
    assert resumed.num_computed_tokens > 0  # its own blocks were still findable


def test_a_lone_request_without_blocks_waits_and_does_not_start_over() -> None:
    """Somebody else's transfer may hold the rest of the cache; giving the own blocks back would
    help nobody.
    """
    engine = toy_engine(num_blocks=5)
    add(engine, "r", tokens(7), max_tokens=9)
    scheduler = engine._scheduler
    compute(engine, scheduler.schedule())
    compute(engine, scheduler.schedule())
    hostage = [engine._cache._take() for _ in range(2)]
    step = scheduler.schedule()
    assert step.slices == []
    assert [request.request_id for request in scheduler.running] == ["r"]
    for block_id in hostage:
        engine._cache._let_go(block_id)
    assert scheduled(scheduler.schedule()) == {"r": 1}


def test_a_prompt_is_admitted_only_if_all_of_it_can_be_had() -> None:
    """Guards against admitting on the first chunk alone: two halves of prompts would then evict
    each other.
    """
    engine = toy_engine(num_blocks=21, max_num_batched_tokens=8)
    add(engine, "a", tokens(48))
    add(engine, "b", tokens(40, seed=1))
    seen: set[str] = set()
    for _ in range(6):
        step = engine._scheduler.schedule()
        seen |= set(scheduled(step))
        compute(engine, step)
    assert seen == {"a"}


def test_a_small_request_does_not_overtake_one_that_finds_no_room() -> None:
    engine = toy_engine(num_blocks=17)
    add(engine, "running", tokens(30), max_tokens=20)
    for _ in range(3):
        compute(engine, engine._scheduler.schedule())
    add(engine, "big", tokens(40, seed=1))
    add(engine, "small", tokens(2, seed=2))
    assert set(scheduled(engine._scheduler.schedule())) == {"running"}


def test_aborted_requests_are_reported_to_the_connector_in_the_next_step() -> None:
    engine = toy_engine()
    FakeConnector(engine)
    add(engine, "r", tokens(6))
    engine.abort("r")
    for _ in range(2):  # until it has been told: a step may be cut off before that
        step = engine._scheduler.schedule()
        assert step.view.finished_req_ids == {"r"}
    engine._scheduler.confirm(step)
    assert engine._scheduler.schedule().view.finished_req_ids == set()


def test_runs() -> None:
    assert list(_runs([True, True, False, True], 5)) == [(5, 7), (8, 9)]
    assert list(_runs([False, True], 0)) == [(1, 2)]
    assert list(_runs([], 3)) == []


# -- loads -----------------------------------------------------------------------------------------


def filled(
    layers: tuple[LayerKind, ...] = ONE_GROUP, **settings: Any
) -> tuple[Engine, list[int], list[int]]:
    """Return an engine whose tier holds a prompt of 33 tokens that its own cache has lost, the prompt, and
    its answer.
    """
    fake = {name: settings.pop(name) for name in ("load_steps", "store_steps", "fail") if name in settings}
    engine = toy_engine(layers, **settings)
    connector = FakeConnector(engine)
    prompt = tokens(33)
    add(engine, "first", prompt)
    answer = run(engine)["first"].token_ids
    engine.drain()
    engine.reset_prefix_cache()
    for name, value in fake.items():
        setattr(connector, name, value)
    return engine, prompt, answer


def calls(engine: Engine, name: str) -> list[str]:
    assert isinstance(engine.connector, FakeConnector)
    return [call for call, req_id in engine.connector.log if req_id == name]


@pytest.mark.parametrize("layers", [ONE_GROUP, TWO_GROUPS, STATES, ALL_KINDS])
def test_a_load_saves_computing_and_gives_the_same_tokens(layers: tuple[LayerKind, ...]) -> None:
    engine, prompt, answer = filled(layers, load_steps=3)
    add(engine, "again", prompt)
    engine.step()
    (request,) = engine._scheduler.loading
    assert request.num_computed_tokens == 0
    assert engine.num_free_blocks < engine.config.num_blocks - 1
    output = run(engine)["again"]
    assert output.token_ids == answer
    assert (
        calls(engine, "again")
        == ["ask", "alloc", "recved", "finished", "sent"][: len(calls(engine, "again"))]
    )
    assert len(engine._scheduler._cache._found_by) > 0
    expect_idle(engine)


def test_loaded_blocks_can_be_found_by_others() -> None:
    engine, prompt, _ = filled()
    engine.take_events()
    add(engine, "again", prompt)
    run(engine)
    assert sum(len(getattr(event, "block_hashes", ())) for event in engine.take_events()) >= 8
    add(engine, "third", prompt)
    assert run(engine)["third"].source.gpu == 32  # type: ignore[union-attr]


def test_a_whole_prompt_can_be_loaded_and_its_last_token_is_computed() -> None:
    engine, prompt, _ = filled()
    add(engine, "again", prompt[:32])
    engine.step()
    engine.step()
    assert run(engine)["again"].token_ids == expect(engine, prompt[:32], SamplingParams(max_tokens=4))
    expect_idle(engine)


@pytest.mark.parametrize(
    ("failed", "computed"),
    [
        ({0}, [4, 1]),
        ({3}, [4, 1]),
        ({7}, [5]),
        ({2, 5}, [4, 4, 1]),
        ({0, 1, 7}, [8, 5]),
        (set(range(8)), [16, 16, 1]),
    ],
)
def test_exactly_what_failed_is_computed(failed: set[int], computed: list[int]) -> None:
    engine, prompt, answer = filled(fail=lambda position: position in failed)
    add(engine, "again", prompt)
    sizes: list[int] = []
    finish_slice = engine._scheduler.finish_slice

    def note(request_slice: RequestSlice) -> None:
        sizes.append(request_slice.end - request_slice.start)
        finish_slice(request_slice)

    engine._scheduler.finish_slice = note  # type: ignore[method-assign]
    assert run(engine)["again"].token_ids == answer
    assert sizes == [*computed, 1, 1, 1]
    assert calls(engine, "again").count("alloc") == 1
    expect_idle(engine)


@pytest.mark.parametrize(("layers", "failed"), [(TWO_GROUPS, 6), (STATES, 1), (STATES, 7)])
def test_a_failed_window_or_state_starts_over_once(layers: tuple[LayerKind, ...], failed: int) -> None:
    engine, prompt, answer = filled(layers, fail=lambda position: position == failed)
    add(engine, "again", prompt)
    assert run(engine)["again"].token_ids == answer
    assert [call for call in calls(engine, "again") if call != "sent"] == [
        "ask",
        "alloc",
        "recved",
        "ask",
        "alloc",
        "finished",
    ]
    expect_idle(engine)


def test_failed_blocks_never_become_findable_with_wrong_content() -> None:
    engine, prompt, answer = filled(fail=lambda position: position in (1, 4))
    add(engine, "again", prompt)
    add(engine, "beside", prompt)
    run(engine)
    add(engine, "later", prompt)
    assert run(engine)["later"].token_ids == answer


def test_a_request_that_must_ask_again_is_passed_over_and_stays_in_order() -> None:
    engine, prompt, _ = filled(max_num_seqs=1)
    assert isinstance(engine.connector, FakeConnector)
    engine.connector.deferrals = {"patient": 1}
    add(engine, "patient", prompt)
    add(engine, "next", tokens(5, seed=3), max_tokens=6)
    add(engine, "last", tokens(5, seed=4))
    order = []
    while engine.has_unfinished():
        order += [output.request_id for output in engine.step() if output.finished]
        engine.check()
    assert order == ["next", "patient", "last"]


@pytest.mark.parametrize("load_steps", [1, 5])
def test_abort_while_loading_keeps_the_blocks_until_the_load_is_over(load_steps: int) -> None:
    engine, prompt, _ = filled(load_steps=load_steps + 1)
    add(engine, "again", prompt)
    engine.step()
    assert len(engine._scheduler.loading) == 1
    held = engine.num_free_blocks
    output = engine.abort("again")
    assert output is not None
    assert output.finish_reason == "abort"
    assert engine.num_free_blocks == held
    add(engine, "other", tokens(20, seed=9))  # would be overwritten by the late load if the blocks were free
    assert run(engine)["other"].token_ids == expect(engine, tokens(20, seed=9), SamplingParams(max_tokens=4))
    expect_idle(engine)


def test_a_request_that_finishes_during_a_store_keeps_its_blocks() -> None:
    engine = toy_engine()
    connector = FakeConnector(engine, store_steps=6)
    add(engine, "r", tokens(9), max_tokens=2)
    run(engine)
    assert list(engine._scheduler.held) == ["r"]
    assert engine.num_free_blocks < engine.config.num_blocks - 1
    expect_idle(engine)
    assert len(connector.rows) == 2


def test_an_idle_engine_waits_for_transfers_instead_of_spinning() -> None:
    engine, prompt, _ = filled(load_steps=3)
    assert isinstance(engine.connector, FakeConnector)
    add(engine, "again", prompt)
    engine.step()
    assert engine.connector.log[-2:] == [("wait", ""), ("clear", "")]


def test_many_loads_into_a_small_cache_do_not_deadlock() -> None:
    """Guards against loads that reserve blocks for their prefix only: together they fill the cache and
    nobody can finish.
    """
    engine = toy_engine(num_blocks=31, max_num_seqs=16)
    connector = FakeConnector(engine)
    prompts = [tokens(80, seed=seed) for seed in range(6)]
    for index, prompt in enumerate(prompts):
        add(engine, f"warm{index}", prompt, max_tokens=1)
    run(engine)
    engine.drain()
    engine.reset_prefix_cache()
    connector.load_steps = 4
    params = SamplingParams(max_tokens=12)
    names = [engine.add_request([*prompt, *tokens(25, seed=50)], params) for prompt in prompts]
    outputs = run(engine, max_steps=500)
    for name, prompt in zip(names, prompts, strict=True):
        assert outputs[name].token_ids == expect(engine, [*prompt, *tokens(25, seed=50)], params)
    assert ("recved", names[-1]) in connector.log
    expect_idle(engine)


def test_loads_begin_while_the_budget_is_used_up() -> None:
    """A load needs no tokens of the step; it should overlap with a long prefill in front of it."""
    engine, prompt, _ = filled(num_blocks=129, load_steps=3)
    add(engine, "long", tokens(200, seed=5))
    add(engine, "again", prompt)
    engine.step()
    assert [request.request_id for request in engine._scheduler.loading] == ["again"]
