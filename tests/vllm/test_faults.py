"""Transfers that fail, hang or arrive short inside vLLM: the tokens stay right and nobody is stuck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.engines import Engine, make_prompt, vllm_engine
from tests.vllm.test_same_tokens import STRESS

from kvtier.testing.faults import Fault, FaultPlan

FAULTY = ("tests.vllm.faulty", "FaultyConnector")
KINDS = (Fault.REFUSE, Fault.FAIL, Fault.HANG, Fault.SHORT, Fault.SLOW)
LOAD_DEADLINE = {"load_deadline": "100ms"}
DEADLINES = LOAD_DEADLINE | {"store_deadline": "300ms"}


def use(plan: FaultPlan) -> FaultPlan:
    """Make the next engine's transfers go wrong."""
    from tests.vllm.faulty import FaultyConnector

    FaultyConnector.plan = plan
    return plan


@pytest.mark.parametrize(
    ("rate", "seed", "num_kinds"),
    [(0.01, 637, 2), (0.1, 1, 4), (0.3, 1, 5)],
    ids=["1_percent", "10_percent", "30_percent"],
)
def test_right_tokens_although_transfers_fail(
    model: Path, reference: Reference, rate: float, seed: int, num_kinds: int
) -> None:
    expected = reference(model, STRESS, 48)
    plan = use(FaultPlan(seed, rate, KINDS))
    with vllm_engine(model, DEADLINES, connector=FAULTY, num_blocks=20) as engine:
        rounds = [tokens_of(engine.generate(STRESS, 48)) for _ in range(2)]
        engine.settle()
        assert engine.stats.loads_failed + engine.stats.stores_failed > 0
        assert engine.stats.loads > engine.stats.loads_failed
    assert rounds == [expected, expected]
    assert len(plan.injected) >= num_kinds


def test_a_load_that_fails_is_not_tried_for_ever(model: Path, reference: Reference) -> None:
    prompt = make_prompt(0, 200)
    expected = reference(model, [prompt])
    use(_hanging_loads())
    with vllm_engine(model, LOAD_DEADLINE, connector=FAULTY) as engine:
        engine.generate([prompt])
        for failed in (1, 2, 3):  # one load each time, and then everything is computed
            engine.forget()
            assert tokens_of(engine.generate([prompt])) == expected
            engine.settle()
            assert engine.stats.loads_failed == failed


def test_of_half_a_load_vllm_keeps_what_is_said(model: Path, reference: Reference) -> None:
    from tests.vllm.faulty import HalfLoads

    prompt = make_prompt(0, 200)
    use(HalfLoads(seed=0, rate=1.0))
    with vllm_engine(model, LOAD_DEADLINE, connector=FAULTY) as engine:
        engine.generate([prompt])
        engine.forget()
        computed = _watch_computed(engine.connector)
        (again,) = engine.generate([prompt])
        (request_id,) = list(engine.connector._connector.connector_scheduler._explainer._explained)[1:]
        explanation = engine.connector._connector.explain(request_id)
        one_group = len(engine.connector._groups) == 1
    kept = sum(explanation.from_tiers.values())
    assert kept == (96 if one_group else 0), "half of 192, but with a window nothing"
    assert computed == [kept], "vLLM computes the rest"
    assert again.tokens == reference(model, [prompt])[0]


def test_a_slow_load_holds_nobody_up(llama: Path, reference: Reference) -> None:
    slow, other = make_prompt(0, 200), make_prompt(1, 60)
    use(_hanging_loads())
    with vllm_engine(llama, {"load_deadline": "1s"}, connector=FAULTY) as engine:
        engine.generate([slow])
        engine.forget()
        engine.add("slow", slow)
        engine.add("other", other)
        finished = list(engine.run().items())
    assert [tokens for _, tokens in finished] == [*reference(llama, [other]), *reference(llama, [slow])]


def test_a_request_aborted_while_it_loads(llama: Path) -> None:
    prompt = make_prompt(0, 200)
    use(_hanging_loads())
    with vllm_engine(llama, LOAD_DEADLINE, connector=FAULTY) as engine:
        engine.generate([prompt])
        engine.forget()
        engine.add("gone", prompt)
        engine.step()
        assert engine.loading == 1
        engine.llm.llm_engine.abort_request(["gone"])
        engine.settle()
        assert engine.loading == 0
        assert engine.free_blocks == 23


def test_a_request_aborted_while_it_stores(engine: Engine) -> None:
    engine.add("gone", make_prompt(0, 200), max_tokens=64)
    for _ in range(3):
        engine.step()
    engine.llm.llm_engine.abort_request(["gone"])
    engine.settle()
    assert engine.free_blocks == 23
    assert engine.generate([make_prompt(0, 200)])[0].cached == 192


def _watch_computed(connector: Any) -> list[int]:
    """Collect with how many tokens already computed requests begin to run."""
    computed: list[int] = []
    build_connector_meta = connector.build_connector_meta

    def note(scheduler_output: Any) -> Any:
        computed.extend(new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs)
        return build_connector_meta(scheduler_output)

    connector.build_connector_meta = note
    return computed


def _hanging_loads() -> FaultPlan:
    from tests.vllm.faulty import HangingLoads

    return HangingLoads(seed=0, rate=1.0)
