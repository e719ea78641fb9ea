"""kvtier as a child of vLLM's `MultiConnector`: alone in it, beside others, and with transfers that fail."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.device import on_gpu
from tests.vllm.disks import disk_tier
from tests.vllm.engines import KVTIER, as_connector, make_prompt, vllm_engine
from tests.vllm.test_faults import DEADLINES, FAULTY, use
from tests.vllm.test_tiers import wait_open, wait_written

from kvtier.testing.faults import Fault, FaultPlan

PROMPTS = [make_prompt(seed, 60 + 40 * seed) for seed in range(4)]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def own_connector() -> dict[str, Any]:
    """Return vLLM's own connector and manager, on a CPU with a worker that copies there."""
    settings: dict[str, Any] = {"cpu_bytes_to_use": 16 << 20, "offload_prompt_only": False}
    if not on_gpu():
        settings |= {"spec_name": "HostSpec", "spec_module_path": "_vllm_host_spec"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


@pytest.fixture(autouse=True)
def at_info(monkeypatch: pytest.MonkeyPatch) -> None:
    """At this level vLLM adds up what connectors have counted, whose classes it then looks up by name."""
    monkeypatch.setattr("vllm.v1.metrics.loggers.logger.isEnabledFor", lambda level: True)


def others(kind: str, folder: Path, connector: tuple[str, str] = KVTIER) -> list[dict[str, Any]]:
    """Return the other children of a `MultiConnector`."""
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    return {
        "alone": [],
        "beside_a_store": [example | {"kv_connector_extra_config": {"shared_storage_path": str(folder)}}],
        "beside_another_kvtier": [as_connector({"cpu": {"capacity": "1MiB"}} | DEADLINES, connector)],
    }[kind]


@pytest.mark.parametrize("kind", ["alone", "beside_a_store", "beside_another_kvtier"])
def test_same_tokens_and_what_was_counted(
    llama: Path, reference: Reference, tmp_path: Path, kind: str
) -> None:
    with vllm_engine(llama, {}, beside=others(kind, tmp_path)) as engine:
        rounds = []
        for _ in range(3):
            rounds.append(tokens_of(engine.generate(PROMPTS)))
            engine.forget()
        engine.llm.llm_engine.do_log_stats()
        counted = {
            metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")
        }
        assert engine.stats.loads == 2 * len(PROMPTS)
    assert rounds == [reference(llama, PROMPTS)] * 3
    assert counted["vllm:kvtier_loads"] == 2 * len(PROMPTS), (
        "the first child is asked first, and has everything"
    )
    assert counted["vllm:external_prefix_cache_hits"] == 2 * (32 + 96 + 128 + 160)


@pytest.mark.parametrize("sibling", [{"cpu": {"capacity": "8MiB"}}, {}], ids=["other", "equal"])
def test_each_of_two_kvtiers_has_its_own_pool(
    llama: Path, reference: Reference, tmp_path: Path, sibling: dict[str, Any]
) -> None:
    """A disk once moved rows between files and the pool of the other child, whose worker opened last."""
    settings = disk_tier(tmp_path / "disk")
    if not sibling:  # it gets no disk, which the first child owns
        sibling = settings
    for start in range(2):
        with vllm_engine(llama, settings, beside=[as_connector(sibling)]) as engine:
            outputs = [engine.generate([prompt])[0] for prompt in PROMPTS]
            if start == 0:
                wait_open(engine)
                wait_written(engine)
        assert tokens_of(outputs) == reference(llama, PROMPTS)
        assert [output.cached for output in outputs] == [0 if start == 0 else n for n in (32, 96, 128, 160)]


@pytest.mark.parametrize("kind", ["alone", "beside_another_kvtier"])
def test_a_failed_load_does_not_end_its_request(
    model: Path, reference: Reference, tmp_path: Path, kind: str
) -> None:
    from tests.vllm.faulty import HangingLoads

    use(HangingLoads(seed=0, rate=1.0))
    with vllm_engine(model, DEADLINES, connector=FAULTY, beside=others(kind, tmp_path, FAULTY)) as engine:
        engine.generate(PROMPTS)
        engine.forget()
        again = tokens_of(engine.generate(PROMPTS))
        engine.settle()
        assert engine.stats.loads_failed > 0
    assert again == reference(model, PROMPTS)


def test_right_tokens_although_transfers_fail(model: Path, reference: Reference, tmp_path: Path) -> None:
    prompts = [make_prompt(seed % 9, 100 + 10 * (seed % 9)) for seed in range(24)]
    use(FaultPlan(1, 0.3, (Fault.REFUSE, Fault.FAIL, Fault.HANG, Fault.SHORT)))
    children = others("beside_another_kvtier", tmp_path, FAULTY)
    with vllm_engine(model, DEADLINES, connector=FAULTY, beside=children, num_blocks=20) as engine:
        rounds = [tokens_of(engine.generate(prompts, 24)) for _ in range(2)]
        engine.settle()
        assert engine.stats.loads > engine.stats.loads_failed > 0
    assert rounds == [reference(model, prompts, 24)] * 2


def test_beside_vllms_own_connector(
    llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has everything: what one has lost the other gives, and so the first has it again."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    with vllm_engine(llama, {}, beside=[own_connector()]) as engine:
        rounds, loads = [], []
        for is_emptied in (False, False, True, False):
            if is_emptied:
                engine.connector.reset_cache()
            rounds.append(engine.generate(PROMPTS))
            engine.forget()
            loads.append(engine.stats.loads)
    assert [tokens_of(outputs) for outputs in rounds] == [reference(llama, PROMPTS)] * 4
    assert loads == [0, 4, 4, 8]
    assert [output.cached for output in rounds[0]] == [0] * 4
    assert [[output.cached for output in outputs] for outputs in rounds[1:]] == [[32, 96, 128, 160]] * 3


@pytest.mark.parametrize("all_hang", [False, True])
def test_failures_beside_vllms_own_connector(
    llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, all_hang: bool
) -> None:
    """After a failed load vLLM may wait for ever for another to begin, and its own connector offered one."""
    from tests.vllm.faulty import HangingLoads

    monkeypatch.syspath_prepend(BENCHMARKS)
    prompts = [make_prompt(seed % 9, 100 + 10 * (seed % 9)) for seed in range(24)]
    kinds = (Fault.REFUSE, Fault.FAIL, Fault.HANG, Fault.SHORT)
    use(HangingLoads(seed=0, rate=1.0) if all_hang else FaultPlan(1, 0.3, kinds))
    with vllm_engine(llama, DEADLINES, connector=FAULTY, beside=[own_connector()], num_blocks=20) as engine:
        rounds = [tokens_of(engine.generate(prompts, 24)) for _ in range(2)]
        engine.settle()
        assert (engine.stats.loads if all_hang else engine.stats.loads - 1) >= engine.stats.loads_failed > 0
    assert rounds == [reference(llama, prompts, 24)] * 2


def test_a_store_does_not_read_what_a_sibling_loads(
    llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends, another gets its blocks, and the sibling loads into them while our store
    reads them.
    """
    monkeypatch.syspath_prepend(BENCHMARKS)
    ended, later, loaded = make_prompt(0, 128), make_prompt(1, 96), make_prompt(2, 140)
    is_loaded = Event()
    with vllm_engine(llama, {}, beside=[own_connector()], num_blocks=8, max_model_len=224) as engine:
        ours, theirs = engine.core.scheduler.connector.sub_connectors
        engine.generate([loaded])
        engine.forget()
        ours.reset_cache()
        store = engine.worker._connectors[0]._connector.connector_worker._handlers["GPU", "CPU"].stores
        store.probe = partial(_wait, is_loaded, store)
        # Four blocks, the other three, and again the four of the first.
        for request_id, prompt in {"ended": ended, "later": later, "loaded": loaded}.items():
            engine.add(request_id, prompt, max_tokens=1)
            while request_id not in engine.step():
                pass
        is_loaded.set()
        engine.forget()
        theirs.reset_cache()
        (again,) = engine.generate([ended])
    assert again.tokens == reference(llama, [ended])[0]


def _wait(event: Event, handler: Any, job: Any) -> None:
    """Hold a transfer up before its next block until the event, or until somebody ends it."""
    while not event.is_set() and not handler.wait_ending(job, 0.01):
        pass
