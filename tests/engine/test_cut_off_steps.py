"""Steps that are cut off anywhere, stores that hang, engines that were closed: nobody is stuck, and every
token is right.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar

import pytest
from tests.engine.drive import ONE_GROUP, STATES, expect, run, tokens
from tests.engine.test_with_kvtier import engine_with, expect_nothing_left
from tests.seeds import seeds

from kvtier.config import OffloadingConfig
from kvtier.engine import SamplingParams
from kvtier.engine.config import LayerKind
from kvtier.errors import InputError
from kvtier.offload import CPUOffloadingSpec, GPULoadStoreSpec
from kvtier.policies import LRUPolicy
from kvtier.testing.faults import Fault, FaultPlan, with_faults

PARAMS = SamplingParams(max_tokens=12)


class CutOffError(Exception):
    """Stands for whatever ends a step early: Ctrl-C, a manager that raises, no memory."""


def sometimes(random: Random, call: Callable[..., Any]) -> Callable[..., Any]:
    """Let a call raise now and then, before or after it has done its work."""

    def risky(*args: Any, **kwargs: Any) -> Any:
        fate = random.random()
        if fate < 0.15:
            raise CutOffError
        answer = call(*args, **kwargs)
        if fate > 0.85:
            raise CutOffError
        return answer

    return risky


PLACES = [
    ("connector", "get_num_new_matched_tokens"),
    ("connector", "update_state_after_alloc"),
    ("connector", "request_finished"),
    ("worker", "handle_preemptions"),
    ("worker", "start_load_kv"),
    ("worker", "wait_for_save"),
    ("worker", "clear_connector_metadata"),
    ("model", "forward"),
]


@pytest.mark.parametrize(("part", "call"), PLACES, ids=[f"{part}.{call}" for part, call in PLACES])
@pytest.mark.parametrize("layers", [ONE_GROUP, STATES], ids=["attention", "states"])
@pytest.mark.parametrize("seed", seeds(6, few=2))
def test_a_step_that_is_cut_off_anywhere(
    part: str, call: str, layers: Sequence[LayerKind], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, cut_off, prompts = Random(seed), 0, {}
    num_blocks = 30 if layers is ONE_GROUP else 46
    deadlines = {"load_deadline": "50ms", "store_deadline": "50ms"}
    with engine_with(layers, num_blocks=num_blocks, **deadlines) as engine:
        target = getattr(engine, part)
        monkeypatch.setattr(target, call, sometimes(random, getattr(target, call)))
        outputs: dict[str, list[int]] = {}
        for step in range(600):
            if step % 4 == 0 and len(prompts) < 30:
                prompt = [*tokens(random.randint(1, 28), seed=len(prompts) % 3), *tokens(3, seed=step)]
                prompts[engine.add_request(prompt, PARAMS)] = prompt
            try:
                told = engine.step()
            except CutOffError:
                cut_off += 1
                continue
            outputs |= {output.request_id: output.token_ids for output in told}
        monkeypatch.undo()
        outputs |= {name: output.token_ids for name, output in run(engine).items()}
        assert cut_off > 3
        for name, prompt in prompts.items():
            assert outputs[name] == expect(engine, prompt, PARAMS)
        engine.drain()
        engine.check()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_comes_after_the_step_and_the_second_at_once(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_with() as engine:
        ended = []

        def forward(*args: Any) -> Any:
            monkeypatch.undo()
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            ended.append(engine.model.forward(*args))
            return ended[0]

        name = engine.add_request(tokens(9), PARAMS)
        monkeypatch.setattr(engine.model, "forward", forward)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert (len(ended), signal.getsignal(signal.SIGINT)) == (times == 1, signal.default_int_handler)
        assert run(engine)[name].token_ids == expect(engine, tokens(9), PARAMS)
        expect_nothing_left(engine)


class Stop(BaseException):
    """What nobody takes for a failure of a policy's own, as Ctrl-C in the middle of it."""


class Grumpy(LRUPolicy):
    """A policy that fails whenever it is told of something."""

    def insert(self, *args: Any) -> None:
        raise ValueError("insert: somebody else's bug")

    def touch(self, *args: Any) -> None:
        raise ValueError("touch: somebody else's bug")


class Stopping(LRUPolicy):
    """A policy in whose calls a step is stopped, once in each of them."""

    calls: ClassVar[set[str]] = set()

    def _stop(self, call: str) -> None:
        if call not in self.calls:
            self.calls.add(call)
            raise Stop

    def insert(self, *args: Any) -> None:
        self._stop("insert")
        super().insert(*args)

    def touch(self, *args: Any) -> None:
        self._stop("touch")
        super().touch(*args)


@pytest.mark.parametrize(("policy", "stops"), [(Grumpy, 0), (Stopping, 2)])
def test_a_policy_that_raises_stops_nobody(policy: type[LRUPolicy], stops: int) -> None:
    Stopping.calls = set()
    with engine_with(policy=f"{__name__}:{policy.__name__}") as engine:
        names = [engine.add_request(tokens(9 + i, seed=i), PARAMS) for i in range(4)]
        outputs, stopped = {}, 0
        for _ in range(100):
            try:
                outputs |= {output.request_id: output.token_ids for output in engine.step()}
            except Stop:
                stopped += 1
        assert stopped == stops
        assert [outputs[name] for name in names] == [
            expect(engine, tokens(9 + i, seed=i), PARAMS) for i in range(4)
        ]
        expect_nothing_left(engine)


class StoresHang(FaultPlan):
    """No store ever ends by itself."""

    def choose(self, transfer_type: tuple[str, str], job_id: int) -> tuple[Fault | None, float]:
        return (Fault.HANG, 0.0) if transfer_type[0] == GPULoadStoreSpec.medium() else (None, 0.0)


def test_stores_that_hang_do_not_keep_the_blocks_that_others_need() -> None:
    """Requests that had finished kept their blocks for as long as their stores lasted: here, an hour."""

    def make_spec(config: OffloadingConfig) -> Any:
        return with_faults(CPUOffloadingSpec(config), StoresHang(seed=0, rate=1.0))

    with engine_with(num_blocks=20, store_deadline="1h", spec_factory=make_spec) as engine:
        for index in range(12):
            prompt = tokens(40, seed=index)
            engine.add_request(prompt, SamplingParams(max_tokens=2), request_id=f"r{index}")
            assert run(engine, max_steps=200)[f"r{index}"].token_ids == expect(
                engine, prompt, SamplingParams(max_tokens=2)
            )


def test_a_closed_engine_says_so() -> None:
    engine = engine_with()
    engine.close()
    for call in (engine.step, engine.drain, lambda: engine.add_request([1]), lambda: engine.generate([[1]])):
        with pytest.raises(InputError, match="expected an open engine, got one that was closed"):
            call()


def test_a_generate_that_raises_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_with() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "forward", sometimes(Random(1), engine.model.forward))
            with pytest.raises(CutOffError):
                engine.generate([tokens(20 + i, seed=i) for i in range(40)], PARAMS)
        assert not engine.has_unfinished()
        expect_nothing_left(engine)
        assert engine.generate([tokens(9)], PARAMS)[0].token_ids == expect(engine, tokens(9), PARAMS)


def test_a_generate_whose_request_somebody_aborts_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_with() as engine:

        def forward(*args: Any) -> Any:
            engine.abort(next(iter(engine._requests)))
            monkeypatch.undo()
            return engine.model.forward(*args)

        monkeypatch.setattr(engine.model, "forward", forward)
        first, second = engine.generate([tokens(9), tokens(12)], PARAMS)
        assert (first.finished, second.token_ids) == (True, expect(engine, tokens(12), PARAMS))
