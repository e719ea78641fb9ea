"""Loads on their way beside other requests: what runs goes on, and a load that fails is computed again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.engine.drive import ONE_GROUP, expect, run, tokens
from tests.engine.test_with_kvtier import LAYERS, ask, engine_with, expect_nothing_left, most_loaded

from kvtier.config import OffloadingConfig
from kvtier.engine import Engine, SamplingParams
from kvtier.engine.config import LayerKind
from kvtier.offload import CPUOffloadingSpec, OffloadingSpec
from kvtier.testing.faults import Fault, FaultPlan, with_faults
from kvtier.transfer.base import TransferType


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


def engine_that_forgot(prompt: list[int], layers: Sequence[LayerKind], **settings: Any) -> Engine:
    """Return an engine that has a prompt in its tier only."""
    engine = engine_with(layers, **settings)
    ask(engine, prompt, "first")
    engine.drain()
    engine.reset_prefix_cache()
    return engine


@pytest.mark.parametrize("layers", LAYERS)
def test_running_requests_do_not_wait_for_a_load(layers: Sequence[LayerKind]) -> None:
    with engine_that_forgot(tokens(32), layers) as engine:
        params = SamplingParams(max_tokens=20)
        engine.add_request(tokens(5, seed=9), params, request_id="busy")
        engine.step()
        released = hold(engine, "CPU", "GPU")
        engine.add_request(tokens(32), params, request_id="again")
        for _ in range(10):
            engine.step()
        assert len(engine._scheduler.loading) == 1
        released.set()
        await_loads(engine)  # or the other might be over before the load is
        outputs = run(engine)
        assert outputs["again"].token_ids == expect(engine, tokens(32), params)
        assert outputs["again"].source.tiers["cpu"] == most_loaded(layers, 32)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_request_added_during_a_load_gets_its_own_tokens(layers: Sequence[LayerKind]) -> None:
    with engine_that_forgot(tokens(32), layers) as engine:
        params = SamplingParams(max_tokens=4)
        engine.add_request(tokens(32), params, request_id="again")
        engine.step()
        engine.add_request(tokens(7, seed=9), params, request_id="other")
        outputs = run(engine)
        assert outputs["again"].token_ids == expect(engine, tokens(32), params)
        assert outputs["other"].token_ids == expect(engine, tokens(7, seed=9), params)
        expect_nothing_left(engine)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_request_aborted_during_its_load_leaves_nothing(layers: Sequence[LayerKind]) -> None:
    with engine_that_forgot(tokens(32), layers) as engine:
        engine.add_request(tokens(32), request_id="again")
        engine.step()
        engine.abort("again")
        engine.drain()
        assert ask(engine, tokens(9, seed=3), "next").source.gpu == 0
        expect_nothing_left(engine)


class LoadsOnly(FaultPlan):
    """Faults in loads."""

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        return super().choose(transfer_type, job_id) if transfer_type[0] == "CPU" else (None, 1.0)


@pytest.mark.parametrize("kind", [Fault.FAIL, Fault.SHORT, Fault.HANG], ids=lambda kind: kind.name)
@pytest.mark.parametrize("layers", LAYERS)
def test_a_failed_load_is_computed_again(layers: Sequence[LayerKind], kind: Fault) -> None:
    plan = LoadsOnly(0, 1.0, (kind,))

    def make_spec(config: OffloadingConfig) -> OffloadingSpec:
        return with_faults(CPUOffloadingSpec(config), plan)

    with engine_that_forgot(tokens(33), layers, spec_factory=make_spec, load_deadline="20ms") as engine:
        assert ask(engine, tokens(33), "again").token_ids
        assert plan.injected[kind] == 1
        expect_nothing_left(engine)


def test_a_failed_load_of_a_prompt_of_one_block_is_computed_again() -> None:

    def make_spec(config: OffloadingConfig) -> OffloadingSpec:
        return with_faults(CPUOffloadingSpec(config), LoadsOnly(0, 1.0, (Fault.FAIL,)))

    with engine_that_forgot(tokens(1), ONE_GROUP, block_size=1, spec_factory=make_spec) as engine:
        ask(engine, tokens(1), "again")
        expect_nothing_left(engine)


@pytest.mark.parametrize("layers", LAYERS)
def test_requests_that_load_together_are_computed_together(layers: Sequence[LayerKind]) -> None:
    with engine_that_forgot(tokens(32), layers) as engine:
        ask(engine, tokens(32, seed=5), "other")
        engine.drain()
        engine.reset_prefix_cache()
        params = SamplingParams(max_tokens=4)
        released = hold(engine, "CPU", "GPU")  # or one of them might be over before the other is looked at
        for name, seed in (("again", 0), ("other again", 5)):
            engine.add_request(tokens(32, seed=seed), params, request_id=name)
        engine.step()
        assert len(engine._scheduler.loading) == 2
        released.set()
        outputs = run(engine)
        assert outputs["again"].token_ids == expect(engine, tokens(32), params)
        assert outputs["other again"].token_ids == expect(engine, tokens(32, seed=5), params)
        loaded = most_loaded(layers, 32)
        assert all(outputs[name].source.tiers["cpu"] == loaded for name in ("again", "other again"))
