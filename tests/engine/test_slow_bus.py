"""A bus that does not move: hits are computed, not waited for.

And a forward pass that raises leaves nothing waiting.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.drive import run, tokens
from tests.engine.test_with_kvtier import engine_with, expect_nothing_left

from kvtier.config import KVTierConfig, OffloadingConfig
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.offload import CPULoadStoreSpec, CPUOffloadingSpec
from kvtier.testing.faults import Fault, FaultPlan, FaultySpec, with_faults
from kvtier.testing.toy_model import ToyModel

HITS = 15


class LoadsHang(FaultPlan):
    """No load ever arrives; stores do."""

    def choose(self, transfer_type: tuple[str, str], job_id: int) -> tuple[Fault | None, float]:
        is_load = transfer_type[0] == CPULoadStoreSpec.medium()
        return (Fault.HANG, 0.0) if is_load else (None, 0.0)


def make_spec(config: OffloadingConfig) -> FaultySpec:
    return with_faults(CPUOffloadingSpec(config), LoadsHang(seed=0, rate=1.0))


def test_hits_behind_a_dead_bus_are_computed_after_the_first_ones() -> None:
    """Every hit used to wait for the whole deadline: a load that did not arrive taught nothing."""
    settings = KVTierConfig.from_dict({"cpu": {"capacity": "1MiB"}, "load_deadline": "30s"})
    config = EngineConfig(num_blocks=65, block_size=4, max_num_batched_tokens=64)
    with Engine(ToyModel(), config, settings, spec_factory=make_spec) as engine:
        params, outputs = SamplingParams(max_tokens=2), {}
        for index in range(HITS + 1):
            engine.add_request(tokens(120), params, request_id=f"r{index}")
            outputs |= run(engine)
            engine.drain()
            engine.reset_prefix_cache()
        assert len({tuple(output.token_ids) for output in outputs.values()}) == 1
        stats = engine.connector.connector_scheduler.stats  # type: ignore[union-attr]
        assert (stats.loads + stats.not_worth, stats.loads_failed) == (HITS, stats.loads)
        assert stats.loads <= HITS // 3, "each of them waited in vain"


class RaisesOnce(ToyModel):
    """A model whose `fails_in`-th pass from now raises."""

    fails_in = 0

    def forward(self, *args: Any) -> Any:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise MemoryError("the device had none left")
        return super().forward(*args)


def test_after_a_pass_that_raised_the_engine_drains_and_stores_again() -> None:
    """The step's stores were never started: they must not be waited for, and their chunks may be stored
    later.
    """
    with engine_with(store_deadline="1h", load_deadline="1h") as engine:
        model = engine.model = RaisesOnce()
        model.fails_in = 2
        engine.add_request(tokens(33), SamplingParams(max_tokens=1), request_id="a")
        engine.step()
        with pytest.raises(MemoryError):
            engine.step()
        run(engine)
        expect_nothing_left(engine)
        engine.reset_prefix_cache()
        engine.add_request(tokens(33), SamplingParams(max_tokens=1), request_id="b")
        run(engine)
        engine.drain()
        engine.reset_prefix_cache()
        engine.add_request(tokens(33), SamplingParams(max_tokens=1), request_id="c")
        assert run(engine)["c"].source.tiers == {"cpu": 32}  # type: ignore[union-attr]
        expect_nothing_left(engine)
