"""Never a wrong token, never a stalled engine, with everything at once, against what the model must say.

Random workloads over one to three ranks: shared prefixes that come again, aborts, preemptions, windows and
states, resets that swap the weights, ids that come again at once, faults of every rank's own transfers,
forward passes that raise, outputs of single ranks that are lost or come late. Every rank's KV is compared in
every pass. The controls take one mend out each and must fail.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from time import monotonic
from typing import Any, ClassVar

import pytest
from tests.engine.drive import tokens
from tests.engine.ranked import OutputAggregator, PassFailedError, RankedEngine, RankedModel, Wire

from kvtier.config import KVTierConfig, OffloadingConfig
from kvtier.connector import StepView
from kvtier.connector.jobs import RunningJobs
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engine import EngineConfig, SamplingParams
from kvtier.engine.config import STATE, LayerKind
from kvtier.engine.request import RequestOutput
from kvtier.offload import CPULoadStoreSpec, CPUOffloadingManager, CPUOffloadingSpec, OffloadingSpec
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.testing.faults import Fault, FaultPlan, with_faults
from kvtier.testing.toy_model import ToyModel
from kvtier.transfer.base import TransferType

FIRST = int(os.environ.get("KVTIER_SEED", "0"))
NUM_SEEDS = int(os.environ.get("KVTIER_SEEDS", "60"))
BATCH = 10
Layers = tuple[LayerKind, ...]
MODELS: tuple[Layers, ...] = (
    (None, None),
    (None, None),
    (None, 12, None, 12),
    (None, STATE, STATE),
    (STATE, 12, None, STATE),
)
INTERVALS = (None, 0, 8)
"""Which states are kept."""


class LoadsFail(FaultPlan):
    """Faults in loads alone: with stores that arrive there is more to load."""

    def choose(self, transfer_type: TransferType, job_id: int) -> tuple[Fault | None, float]:
        is_load = transfer_type[0] == CPULoadStoreSpec.medium()
        return super().choose(transfer_type, job_id) if is_load else (None, 1.0)


@dataclass
class Scenario:
    """What is drawn from a seed."""

    seed: int
    random: Random = field(init=False)
    num_ranks: int = field(init=False)
    wire: Wire = field(init=False)
    fault_rate: float = field(init=False)
    faults: type[FaultPlan] = field(init=False)
    raises: float = field(init=False)
    host: dict[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        self.random = random = Random(self.seed)
        self.num_ranks = random.choice((1, 2, 2, 3))
        loss, delay = random.choice(((0.0, 0.0), (0.0, 0.0), (0.03, 0.1), (0.2, 0.2)))
        self.wire = Wire(Random(self.seed), loss, delay)
        self.fault_rate = random.choice((0.0, 0.1, 0.4))
        self.raises = random.choice((0.0, 0.02))
        by_workers = loss == 0.0 and random.random() < 0.5
        self.host = {"by_workers": by_workers, "frees_at_once": random.random() < 0.5}
        self.faults = random.choice((FaultPlan, LoadsFail))
        self.wire.lag, self.wire.stutter = random.choice((0, 0, 1, 2)), random.choice((0.0, 0.4))

    def make_spec(self, config: OffloadingConfig) -> OffloadingSpec:
        spec = CPUOffloadingSpec(config)
        plan = self.faults(100 * self.seed + config.rank, self.fault_rate)
        return with_faults(spec, plan) if self.fault_rate else spec

    def engine(self) -> RankedEngine:
        random = self.random
        layers = random.choice(MODELS)
        config = EngineConfig(
            num_blocks=random.randint(26, 40) * len(set(layers)),
            block_size=4,
            state_interval=random.choice(INTERVALS),
            max_num_seqs=random.randint(2, 6),
            max_num_batched_tokens=random.choice((8, 16, 64)),
        )
        settings = {
            "cpu": {
                "capacity": random.choice((4, 16, 64, 64)) * 4096,
                "policy": random.choice(("lru", "arc", "gittins")),
            },
            "blocks_per_chunk": random.choice((1, 1, 2)),
            "load_deadline": 0.02,
            "store_deadline": 0.02,
            "load_if_faster": random.random() < 0.2,
        }
        more: dict[str, Any] = {"num_ranks": self.num_ranks, "wire": self.wire, "make_spec": self.make_spec}
        return RankedEngine(ToyModel(layers), config, KVTierConfig.from_dict(settings), **more, **self.host)


@dataclass
class Player:
    """Plays a scenario and judges every answer."""

    patience: ClassVar[float] = 60.0
    """Seconds that slots may take to come back in the end: threads may be late, and some calls have no
    deadline.
    """
    scenario: Scenario
    engine: RankedEngine
    max_steps: int = 6000
    num_prompts: int = 3
    num_requests: tuple[int, int] = 12, 24
    reset_rate: float = 0.06
    swap_rate: float = 0.03
    tiers_too: float = 0.1
    """How many of the resets are for the tiers too."""
    asked: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    tainted: set[str] = field(default_factory=set)
    """Requests that have seen two sets of weights, as they would have without kvtier."""
    counts: Counter[str] = field(default_factory=Counter)

    def play(self) -> None:
        random = self.scenario.random
        prompts = [
            tokens(random.randint(9, 40), seed=random.randrange(10**6)) for _ in range(self.num_prompts)
        ]
        for _ in self.turns(prompts):
            pass
        self._settle()

    def turns(self, prompts: list[list[int]]) -> Iterator[None]:
        """Ask for prompts and step until all is answered; yield after every step."""
        random, steps = self.scenario.random, 0
        left = random.randint(*self.num_requests)
        while left or self.engine.has_unfinished():
            steps += 1
            assert steps < self.max_steps, f"seed {self.scenario.seed}: a request is stuck"
            if left and random.random() < 0.3:
                left -= self._add(random.choice(prompts))
            self._disturb()
            self._step()
            yield

    def _add(self, base: list[int]) -> bool:
        """Ask for a part of a prompt that others ask for as well, under one of few names."""
        random = self.scenario.random
        name = f"r{random.randrange(8)}"
        if name in self.engine._requests or name in self.engine._scheduler.held:
            return False
        kept = random.choice((len(base), random.randint(1, len(base))))
        prompt = base[:kept] + tokens(random.randint(0, 5), seed=random.randrange(99))
        self.asked[name] = prompt, SamplingParams(max_tokens=random.randint(1, 12))
        self.tainted.discard(name)
        self.engine.add_request(*self.asked[name], request_id=name)
        return True

    def _disturb(self) -> None:
        random, engine = self.scenario.random, self.engine
        if random.random() < 0.02 and engine._requests:
            engine.abort(random.choice(list(engine._requests)))
        if random.random() < self.reset_rate:
            engine.reset_prefix_cache(reset_connector=random.random() < self.tiers_too)
        if random.random() < self.swap_rate:
            self.counts["swaps"] += 1
            self.tainted |= engine.swap_weights()
        if random.random() < self.scenario.raises:
            assert isinstance(engine.model, RankedModel)
            engine.model.fails_next = True

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except PassFailedError:
            self.counts["raised"] += 1
            return
        for output in outputs:
            if output.finished and output.request_id not in self.tainted:
                self._judge(output)
        self.engine.check()

    def _judge(self, output: RequestOutput) -> None:
        prompt, params = self.asked[output.request_id]
        assert isinstance(self.engine.model, RankedModel)
        expected = self.engine.model.model.expect(prompt, params)
        assert output.token_ids == expected, (
            f"seed {self.scenario.seed}, request {output.request_id}: wrong tokens"
        )
        self.counts["judged"] += 1
        self.counts["loaded"] += sum(output.source.tiers.values()) if output.source else 0

    def _settle(self) -> None:
        """Once ranks answer again every slot comes back."""
        self.scenario.wire.loss = self.scenario.wire.delay = self.scenario.wire.stutter = 0.0
        self.scenario.wire.silent.clear()
        manager = self.scheduler.manager
        assert isinstance(manager, (CPUOffloadingManager, TieredOffloadingManager))
        until = monotonic() + self.patience
        for steps in count():
            self._drain()
            stats = manager.stats()
            if stats.free + stats.ready == stats.slots and not stats.reading and not self.scenario.wire.late:
                break
            if steps >= 500 and monotonic() >= until:
                raise AssertionError(f"seed {self.scenario.seed}: slots are lost: {stats}")
            self.engine.step()
        self.engine.check()
        assert self.engine.num_free_blocks == self.engine.config.num_blocks - 1
        assert self.scheduler._requests == {}

    def _drain(self) -> None:
        """Do what `Engine.drain` does, and no longer than some steps."""
        engine = self.engine
        for _ in range(self.max_steps):
            if not (engine.has_unfinished() or engine._scheduler.held or engine._has_transfers()):
                return
            engine.step()
        raise AssertionError(f"seed {self.scenario.seed}: draining does not end")

    @property
    def scheduler(self) -> OffloadingConnectorScheduler:
        assert self.engine.connector is not None
        assert self.engine.connector.connector_scheduler is not None
        return self.engine.connector.connector_scheduler


def play(scenario: Scenario, max_steps: int = 6000) -> Counter[str]:
    with scenario.engine() as engine:
        player = Player(scenario, engine, max_steps)
        player.play()
        stats = player.scheduler.stats
        more = {"failed loads": stats.loads_failed, "expired": stats.expired, "lost": scenario.wire.lost}
        return player.counts + Counter(more)


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("first", range(FIRST, FIRST + NUM_SEEDS, BATCH))
def test_same_tokens_and_nobody_waits(first: int, totals: Counter[str]) -> None:
    for seed in range(first, first + BATCH):
        totals.update(play(Scenario(seed)))


def test_the_workloads_exercised_what_they_claim(totals: Counter[str]) -> None:
    """Guards the test above: without loads, swaps, failures and losses it would show nothing."""
    if not totals:
        pytest.skip("runs after test_same_tokens_and_nobody_waits in the same session only")
    for what in ("judged", "loaded", "swaps", "raised", "failed loads", "expired", "lost"):
        assert totals[what] > NUM_SEEDS // 4, (what, totals)


def without_epochs(patch: pytest.MonkeyPatch) -> None:
    """As if blocks computed before a reset might be stored after it."""

    def reset_cache(self: OffloadingConnectorScheduler, kept_blocks: object) -> bool:
        self.manager.reset_cache()
        for state in self._requests.values():
            state.next_offer = 0
            for group in state.groups:
                group.next_store = 0
        return True

    patch.setattr(OffloadingConnectorScheduler, "reset_cache", reset_cache)


def without_held_blocks(patch: pytest.MonkeyPatch) -> None:
    """As if blocks that did not arrive were told at once, and their request when all ranks have spoken."""

    def take_invalid(self: OutputAggregator, complete: set[str]) -> set[int]:
        told, self._invalid = self._invalid, {}
        return set().union(*told.values())

    patch.setattr(OutputAggregator, "_take_invalid", take_invalid)


def without_fresh_states(patch: pytest.MonkeyPatch) -> None:
    """As if a request that has finished but still stores were found by its id."""
    finish = OffloadingConnectorScheduler.request_finished

    def request_finished(self: OffloadingConnectorScheduler, request: Any, *more: Any) -> Any:
        state = self._requests.get(request.request_id)
        answer = finish(self, request, *more)
        if state is not None and state.store_jobs:
            self._requests[request.request_id] = state
        return answer

    patch.setattr(OffloadingConnectorScheduler, "request_finished", request_finished)


def without_expiry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningJobs, "expire", lambda self, now: [])


def has_ranks_that_fail_apart(scenario: Scenario) -> bool:
    fails = scenario.faults is LoadsFail and scenario.fault_rate > 0.1
    return fails and scenario.num_ranks > 1 and scenario.wire.stutter > 0.0


Control = tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Scenario], bool]]
CONTROLS: list[Control] = [
    (without_epochs, lambda scenario: True),
    (without_held_blocks, lambda s: s.host["by_workers"] and has_ranks_that_fail_apart(s)),
    (without_fresh_states, lambda scenario: scenario.host["frees_at_once"]),
    (without_expiry, lambda scenario: scenario.wire.loss > 0),
]
"""What takes a mend out, and the scenarios in which that should show."""


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control[0].__name__)
def test_the_workloads_notice_when_a_mend_is_taken_out(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_out, shows = control
    take_out(monkeypatch)
    monkeypatch.setattr(Player, "patience", 0.0)  # what is lost is lost
    for scenario in filter(shows, map(Scenario, range(20_000))):
        try:
            play(scenario, max_steps=600)
        except (
            AssertionError,
            RuntimeWarning,
        ):  # wrong tokens, nobody gets on, or numbers that no page holds
            return
    raise AssertionError(f"nothing was noticed {take_out.__name__}")


def test_an_engine_goes_on_without_an_answer_of_one_rank() -> None:
    """One rank's transfers work and nothing is ever heard of them: prompts are computed, and
    draining ends.
    """
    scenario = Scenario(4)
    scenario.num_ranks, scenario.fault_rate, scenario.raises = 2, 0.0, 0.0
    scenario.wire, scenario.host = Wire(Random(0), silent={1}), {"by_workers": False, "frees_at_once": False}
    with scenario.engine() as engine:
        player = Player(scenario, engine)
        for index in range(6):
            player.asked[f"r{index}"] = tokens(24, seed=index % 2), SamplingParams(max_tokens=4)
            engine.add_request(*player.asked[f"r{index}"], request_id=f"r{index}")
            while engine.has_unfinished():
                player._step()
            engine.drain()
        assert player.counts["judged"] == 6
        assert player.scheduler.stats.expired > 0
        assert not engine.connector.build_connector_meta(StepView()).reqs_to_load  # type: ignore[union-attr]
        player._settle()
