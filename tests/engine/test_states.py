"""States of recurrent layers in the engine: which are kept, when they are offered to a connector, where a
load ends, and that a wrong one is noticed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.drive import STATES, expect, expect_idle, run, tokens, toy_engine
from tests.engine.fake_connector import FakeConnector
from tests.engine.test_scheduler import add, compute, filled
from tests.engine.test_with_kvtier import ask, engine_with, expect_nothing_left

from kvtier.connector.metadata import BoundaryState
from kvtier.engine import Engine, SamplingParams
from kvtier.engine.cache import KVCache
from kvtier.engine.request import Request
from kvtier.offload import MissReason
from kvtier.transfer.base import NULL_BLOCK


def offered(engine: Engine, name: str) -> list[tuple[int, int]]:
    """Step, and return the states of a request that a connector may store: group and boundary."""
    step = engine._scheduler.schedule()
    states = step.view.boundary_states.get(name, [])
    rows = engine._requests[name].table.rows
    assert all(block_id == rows[group][end // 4 - 1] != NULL_BLOCK for group, block_id, end in states)
    compute(engine, step)
    return [(group, boundary) for group, _, boundary in states]


@pytest.mark.parametrize(
    ("interval", "steps"),
    [
        (None, [[4, 8, 12, 16], [20, 24, 28, 32], [], [], [], [36]]),
        (0, [[], [32], [], [], [], []]),
        (12, [[12], [24, 32], [], [], [], [36]]),
    ],
)
@pytest.mark.parametrize("caching", [False, True])
def test_kept_states_are_offered_in_the_step_that_computes_them(
    interval: int | None, steps: list[list[int]], caching: bool
) -> None:
    """With 0, only where the same prompt, whose last token is computed again, would begin."""
    engine = toy_engine(STATES, state_interval=interval, enable_prefix_caching=caching)
    add(engine, "r", tokens(33), max_tokens=8)
    assert [offered(engine, "r") for _ in range(6)] == [
        [(group, boundary) for group in (1, 2) for boundary in boundaries] for boundaries in steps
    ]
    hits = engine._cache._found_by
    kept = [boundary for boundaries in steps for boundary in boundaries if caching]
    request = engine._requests["r"]
    for group in (1, 2):
        assert [b for b in range(4, 37, 4) if (request.block_hashes[b // 4 - 1], group) in hits] == kept


@pytest.mark.parametrize(
    ("interval", "length", "loaded"),
    [(None, 33, 32), (None, 32, 28), (None, 31, 28), (0, 33, 32), (0, 32, 0), (0, 37, 32), (16, 32, 16)],
)
def test_a_load_ends_at_a_kept_state_before_the_last_token(
    interval: int | None, length: int, loaded: int
) -> None:
    """A state after the last token would be of no use: that token would be counted twice."""
    engine, prompt, _ = filled(STATES, state_interval=interval, load_steps=3)
    longer = [*prompt, *tokens(4, seed=1)][:length]
    add(engine, "again", longer)
    engine.step()
    assert sum(request.load_end for request in engine._scheduler.loading) == loaded
    assert run(engine)["again"].token_ids == expect(engine, longer, SamplingParams(max_tokens=4))
    expect_idle(engine)


Patch = pytest.MonkeyPatch


def one_boundary_earlier(patch: Patch) -> None:
    """As if the block offered for a boundary were the one before it in the table."""
    states = KVCache.boundary_states

    def boundary_states(self: KVCache, request: Request, start: int, end: int) -> list[BoundaryState]:
        rows, found = request.table.rows, states(self, request, start, end)
        return [s._replace(block_id=rows[s.group][s.boundary // 4 - 2]) for s in found if s.boundary > 4]

    patch.setattr(KVCache, "boundary_states", boundary_states)


def without_one_group(patch: Patch) -> None:
    """As if a load needed the states of one group only."""
    first = FakeConnector._first

    def first_needed(self: FakeConnector, group: int, local: int, end: int) -> int:
        return end if group == 2 else first(self, group, local, end)

    patch.setattr(FakeConnector, "_first", first_needed)


def by_position(patch: Patch) -> None:
    """As if the block that a request was once given at a position held the state of that position, and could
    be stored when a chunk of eight blocks is complete.
    """
    plan = FakeConnector._plan_store
    patch.setattr(
        FakeConnector, "_plan_store", lambda self, req_id, stop, _: plan(self, req_id, stop // 8 * 8, [])
    )
    patch.setattr(FakeConnector, "_positional", FakeConnector._groups)


@pytest.mark.parametrize("control", [None, one_boundary_earlier, without_one_group, by_position])
def test_wrong_states_are_noticed(control: Callable[[Patch], None] | None, monkeypatch: Patch) -> None:
    """The negative controls of all tests with states: without one of them, nothing is wrong."""
    if control is not None:
        control(monkeypatch)
    wrong, params = 0, SamplingParams(max_tokens=4)
    engine = toy_engine(STATES, num_blocks=41, max_num_batched_tokens=8, state_interval=0)
    connector = FakeConnector(engine, store_steps=2)
    for number in range(12):
        prompts = {f"{number}/{k}": tokens(33, seed=k)[: 33 - number % 6 * 4] for k in range(2)}
        for name, prompt in prompts.items():
            add(engine, name, prompt)
        outputs = run(engine)
        wrong += sum(outputs[n].token_ids != expect(engine, p, params) for n, p in prompts.items())
        engine.reset_prefix_cache()
    assert sum(call == "recved" for call, _ in connector.log) > 5
    assert (wrong > 0) == (control is not None)


# -- with kvtier -----------------------------------------------------------------------------------


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize("interval", [None, 0, 16])
@pytest.mark.parametrize("length", [31, 32, 33, 36, 37])
def test_a_prompt_comes_back_up_to_a_stored_state(length: int, interval: int | None, per_chunk: int) -> None:
    """At boundaries that are kept and that end a chunk; the last token is never loaded."""
    with engine_with(STATES, state_interval=interval, blocks_per_chunk=per_chunk) as engine:
        ask(engine, tokens(length), "first")
        engine.drain()
        engine.reset_prefix_cache()
        again = ask(engine, tokens(length), "again")
        last = (length - 1) // 4 * 4
        kept = [
            end
            for end in range(4, last + 1, 4)
            if interval is None or end == last or (interval and end % interval == 0)
        ]
        loaded = max((end for end in kept if end % (4 * per_chunk) == 0), default=0)
        assert (again.source.tiers.get("cpu", 0), again.source.recomputed) == (loaded, length - loaded)
        expect_nothing_left(engine)


def offer_late(patch: Patch) -> None:
    """As if a state could be stored two steps later, from the block that was at its position."""
    states, offers = KVCache.boundary_states, dict[str, list[list[BoundaryState]]]()

    def boundary_states(self: KVCache, request: Request, start: int, end: int) -> list[BoundaryState]:
        waiting = offers.setdefault(request.request_id, [[], []])
        waiting.append(states(self, request, start, end))
        return waiting.pop(0)

    patch.setattr(KVCache, "boundary_states", boundary_states)


@pytest.mark.parametrize("control", [None, one_boundary_earlier, offer_late])
def test_the_wrong_block_is_noticed_with_kvtier(
    control: Callable[[Patch], None] | None, monkeypatch: Patch
) -> None:
    if control is not None:
        control(monkeypatch)
    wrong = loaded = 0
    params = SamplingParams(max_tokens=4)
    settings = {"num_blocks": 41, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    with engine_with(STATES, **settings) as engine:
        for number in range(20):
            prompts = {f"{number}/{k}": tokens(41, seed=k)[: 41 - number % 6 * 4] for k in range(3)}
            for name, prompt in prompts.items():
                add(engine, name, prompt)
            outputs = run(engine)
            wrong += sum(outputs[n].token_ids != expect(engine, p, params) for n, p in prompts.items())
            loaded += sum(sum(output.source.tiers.values()) for output in outputs.values())  # type: ignore
            engine.drain()
            engine.reset_prefix_cache()
    assert loaded > 100
    assert (wrong > 0) == (control is not None)


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_prefix_without_the_states_of_one_group_is_not_loaded(is_needed: bool, monkeypatch: Patch) -> None:
    """The control looks for the states of one group only: it plans loads that fail, for want of a row."""
    states = KVCache.boundary_states
    monkeypatch.setattr(
        KVCache, "boundary_states", lambda *arguments: [s for s in states(*arguments) if s.group == 1]
    )
    with engine_with(STATES) as engine:
        ask(engine, tokens(33), "first")
        engine.drain()
        engine.reset_prefix_cache()
        scheduler = engine.connector.connector_scheduler  # type: ignore[union-attr]
        assert scheduler is not None
        if not is_needed:
            geometry = scheduler._geometry
            geometry.sparse = geometry.sparse[:1]
        again = ask(engine, tokens(33), "again")
        assert again.source.tiers == {}
        assert (scheduler.stats.loads, scheduler.stats.loads_failed) == ((0, 0) if is_needed else (1, 1))
        if is_needed:
            assert again.source.first_miss is MissReason.NO_STATE
        expect_nothing_left(engine)
