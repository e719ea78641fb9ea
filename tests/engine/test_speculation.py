"""Computing ahead of a load: used if the load succeeds and nothing else came in between, forgotten
otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.engine.drive import ONE_GROUP, expect, run, tokens
from tests.engine.test_with_kvtier import WINDOWS, ask, engine_with, expect_nothing_left

from kvtier.config import OffloadingConfig
from kvtier.engine import Engine, SamplingParams
from kvtier.engine import engine as engine_module
from kvtier.offload import CPUOffloadingSpec, OffloadingSpec
from kvtier.testing.faults import Fault, FaultPlan, with_faults
from kvtier.transfer.base import TransferType


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine wait for a load for as long as it takes on a busy machine."""
    monkeypatch.setattr(engine_module, "_IDLE_SECONDS", 30.0)


def hold(engine: Engine, source: str, target: str) -> threading.Event:
    """Keep transfers of a direction from moving anything until the event is set."""
    assert engine.worker is not None
    assert engine.worker.connector_worker is not None
    handler, released = engine.worker.connector_worker._handlers[source, target], threading.Event()
    copying = getattr(handler, "stores", handler)  # without audits
    copying.probe = lambda job: released.wait(30)
    return released


def await_loads(engine: Engine) -> None:
    """Wait until what is on its way from the pool has come."""
    assert engine.worker is not None
    assert engine.worker.connector_worker is not None
    handler = engine.worker.connector_worker._handlers["CPU", "GPU"]
    assert handler.wait(set(handler._jobs), 60)  # type: ignore[attr-defined]


def engine_that_forgot(prompt: list[int], windows: Sequence[int | None], **settings: Any) -> Engine:
    """Return an engine that has a prompt in its tier only."""
    engine = engine_with(windows, **settings)
    ask(engine, prompt, "first")
    engine.drain()
    engine.reset_prefix_cache()
    assert engine.speculation.runs == 0
    return engine


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("length", [31, 32, 33, 48, 49])
@pytest.mark.parametrize("windows", WINDOWS)
def test_what_was_computed_ahead_is_used(windows: Sequence[int | None], length: int) -> None:
    """Also if the last token was loaded too, and where more is left than fits into a step."""
    with engine_that_forgot(tokens(32), windows) as engine:
        again = ask(engine, tokens(length), "again")
        assert again.source.tiers["cpu"] >= 28
        assert (engine.speculation.runs, engine.speculation.used) == (1, 1)
        expect_nothing_left(engine)


@pytest.mark.parametrize("windows", WINDOWS)
def test_it_waits_for_nobody_who_can_run(windows: Sequence[int | None]) -> None:
    with engine_that_forgot(tokens(32), windows) as engine:
        params = SamplingParams(max_tokens=20)
        engine.add_request(tokens(5, seed=9), params, request_id="busy")
        engine.step()
        released = hold(engine, "CPU", "GPU")
        engine.add_request(tokens(32), params, request_id="again")
        for _ in range(10):
            engine.step()
        assert len(engine._scheduler.loading) == 1
        assert engine.speculation.runs == 0
        released.set()
        await_loads(engine)  # or the other might be over before the load is
        outputs = run(engine)
        assert outputs["again"].token_ids == expect(engine, tokens(32), params)
        assert outputs["again"].source.tiers["cpu"] == 31
        assert engine.speculation.runs == 0


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("windows", WINDOWS)
def test_who_comes_in_meanwhile_is_computed_with_it(windows: Sequence[int | None]) -> None:
    """The step that follows has two requests, so what was computed for one of them alone is forgotten."""
    with engine_that_forgot(tokens(32), windows) as engine:
        params = SamplingParams(max_tokens=4)
        engine.add_request(tokens(32), params, request_id="again")
        engine.step()
        assert engine.speculation.runs == 1
        engine.add_request(tokens(7, seed=9), params, request_id="other")
        outputs = run(engine)
        assert outputs["again"].token_ids == expect(engine, tokens(32), params)
        assert outputs["other"].token_ids == expect(engine, tokens(7, seed=9), params)
        assert engine.speculation.used == 0
        expect_nothing_left(engine)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("windows", WINDOWS)
def test_an_aborted_request_leaves_nothing(windows: Sequence[int | None]) -> None:
    with engine_that_forgot(tokens(32), windows) as engine:
        engine.add_request(tokens(32), request_id="again")
        engine.step()
        assert engine.speculation.runs == 1
        engine.abort("again")
        engine.drain()
        assert ask(engine, tokens(9, seed=3), "next").source.gpu == 0
        expect_nothing_left(engine)


class LoadsOnly(FaultPlan):
    """Faults in loads."""

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        return super().choose(transfer_type, job_id) if transfer_type[0] == "CPU" else (None, 1.0)


@pytest.mark.parametrize("kind", [Fault.FAIL, Fault.SHORT, Fault.HANG], ids=lambda kind: kind.name)
@pytest.mark.parametrize("windows", WINDOWS)
def test_a_load_that_fails_after_its_layers_were_promised(
    windows: Sequence[int | None], kind: Fault
) -> None:
    plan = LoadsOnly(0, 1.0, (kind,))

    def make_spec(config: OffloadingConfig) -> OffloadingSpec:
        return with_faults(CPUOffloadingSpec(config), plan)

    with engine_that_forgot(tokens(33), windows, spec_factory=make_spec, load_deadline="20ms") as engine:
        assert ask(engine, tokens(33), "again").token_ids
        assert plan.injected[kind] == 1
        assert (engine.speculation.runs > 0, engine.speculation.used) == (True, 0)
        expect_nothing_left(engine)


def test_what_was_computed_ahead_of_a_load_that_fails_is_not_used() -> None:
    """With blocks of one token a failed load may leave just the slice that was computed ahead of it, in
    blocks that the load has spoilt since.
    """

    def make_spec(config: OffloadingConfig) -> OffloadingSpec:
        return with_faults(CPUOffloadingSpec(config), LoadsOnly(0, 1.0, (Fault.FAIL,)))

    with engine_that_forgot(tokens(1), ONE_GROUP, block_size=1, spec_factory=make_spec) as engine:
        ask(engine, tokens(1), "again")
        assert (engine.speculation.runs, engine.speculation.used) == (1, 0)
        expect_nothing_left(engine)


def test_blocks_that_a_store_still_reads_are_known_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_that_forgot(tokens(32), ONE_GROUP) as engine:
        released = hold(engine, "GPU", "CPU")
        engine.add_request(tokens(8, seed=9), SamplingParams(max_tokens=1), request_id="slow")
        engine.step()
        (request,) = engine._scheduler.held.values()
        assert engine.worker.is_storing({request.table.rows[0][0]})
        assert not engine.worker.is_storing({64})
        monkeypatch.setattr(engine_module, "written_blocks", lambda *_: set(request.table.rows[0]))
        engine.add_request(tokens(32), SamplingParams(max_tokens=1), request_id="again")
        engine.step()
        assert engine.speculation.runs == 0
        released.set()
        engine.drain()
        expect_nothing_left(engine)


@pytest.mark.parametrize("windows", WINDOWS)
def test_requests_that_load_together_are_computed_together(windows: Sequence[int | None]) -> None:
    with engine_that_forgot(tokens(32), windows) as engine:
        ask(engine, tokens(32, seed=5), "other")
        engine.drain()
        engine.reset_prefix_cache()
        params = SamplingParams(max_tokens=4)
        released = hold(engine, "CPU", "GPU")  # or one of them might be over before the other is looked at
        for name, seed in (("again", 0), ("other again", 5)):
            engine.add_request(tokens(32, seed=seed), params, request_id=name)
        engine.step()
        assert len(engine._scheduler.loading) == 2
        assert engine.speculation.runs == 0
        released.set()
        outputs = run(engine)
        assert outputs["again"].token_ids == expect(engine, tokens(32), params)
        assert outputs["other again"].token_ids == expect(engine, tokens(32, seed=5), params)
        assert all(outputs[name].source.tiers["cpu"] == 31 for name in ("again", "other again"))
