"""What kvtier relies on in vLLM is there, and what it does not know of is noticed."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.device import on_gpu, skip_without_devices
from tests.vllm.engines import BLOCK, Engine, make_prompt, vllm_engine
from tests.vllm.models import save_mla_config

from kvtier.connector import ConnectorRole, ConnectorStats, KVConnectorOutput, TransferReport
from kvtier.errors import ConfigError, InputError
from kvtier.integrations import VersionRange
from kvtier.integrations.summary import INTERVAL, Summary
from kvtier.offload import TransferResult
from kvtier.testing.kit import ManualClock

LEFT_ALONE = {
    "bind_gpu_block_pool": "the cache manager is bound",
    "bind_kv_cache_manager": "keeps it for us",
    "finish_forward": "stores are fenced",
    "get_external_cache_hit_sources": "there is one source: _cache_hit_source",
    "get_finished_count": "every rank reports",
    "get_kv_connector_kv_cache_events": "events come from the scheduler's side",
    "get_loaded_kv_cache_group_ids": "all prefix-cacheable groups: kvtier refuses others",
    "get_mem_pool_context": "vLLM's own memory will do",
    "has_connector_metadata": "about what bind_connector_metadata keeps",
    "has_pending_block_frees": "no blocks are held",
    "register_finished_partial_tail": "recurrent models only",
    "requires_piecewise_for_cudagraph": "nothing is done layer by layer",
    "reset_capture_state": "nothing is captured",
    "role": "as given",
    "set_host_xfer_buffer_ops": "copies are our own",
    "set_xfer_handshake_metadata": "vLLM calls the one that knows of pipeline stages",
    "supports_divergent_local_hybrid_hits": "recurrent models only",
}
IGNORED = {"lookahead_token_ids"}
"""Fields of events, from 0.33 on, that vLLM does not fill in an engine with a connector."""
NEW_IN_32 = {"get_external_cache_hit_sources", "get_loaded_kv_cache_group_ids"}


def hooks(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")} - {"__module__"}


def is_at_least(version: str) -> bool:
    import vllm

    return vllm.__version__ in VersionRange(version, "1000")


def test_every_hook_is_used_or_left_alone_on_purpose() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from kvtier.integrations.vllm import KVTierConnector

    theirs = hooks(KVConnectorBase_V1) | hooks(SupportsHMA)
    left_alone = LEFT_ALONE.keys() - (set() if is_at_least("0.32") else NEW_IN_32)
    assert theirs - hooks(KVTierConnector) == left_alone


def test_the_inventory_lists_every_hook_that_is_overridden() -> None:
    """With the parameters that kvtier has: those of vLLM are compared with the inventory at every start."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics

    from kvtier.integrations.vllm import KVTierConnector, KVTierMetrics, KVTierStats, KVTierWorkerMetadata
    from kvtier.integrations.vllm.compat import NEWER, OVERRIDDEN

    ours_by_base = {
        base.KVConnectorBase_V1: KVTierConnector,
        base.KVConnectorWorkerMetadata: KVTierWorkerMetadata,
        base.SupportsHMA: KVTierConnector,
        metrics.KVConnectorPromMetrics: KVTierMetrics,
        metrics.KVConnectorStats: KVTierStats,
    }
    found: dict[str, tuple[str, ...] | None] = {}
    for theirs, ours in ours_by_base.items():
        for name in vars(theirs).keys() & vars(ours).keys():
            is_hook = not name.startswith("_") or (name == "__init__" and not is_dataclass(theirs))
            value = getattr(ours, name)
            if is_hook and (callable(value) or isinstance(value, property)):
                parameters = inspect.signature(value).parameters if callable(value) else None
                hook = f"{theirs.__module__}:{theirs.__qualname__}.{name}"
                found[hook] = parameters and tuple(item for item in parameters if item != "self")
    missing = {hook for hook, since in NEWER.items() if not is_at_least(since)}
    assert found == {hook: names for hook, names in OVERRIDDEN.items() if hook not in missing}


def test_the_inventory_lists_everything_that_is_imported() -> None:
    import kvtier.integrations.vllm
    from kvtier.integrations.vllm.compat import CALLED, OVERRIDDEN

    always_there = {"vllm:envs", "vllm.logger:init_logger"}
    known = {re.sub(r"\..*", "", hook.partition(":")[2]) for hook in (*CALLED, *OVERRIDDEN)}
    listed = {f"{hook.partition(':')[0]}:{name}" for hook in (*CALLED, *OVERRIDDEN) for name in known}
    folder = Path(str(kvtier.integrations.vllm.__file__)).parent
    imported = set[str]()
    for file in folder.glob("*.py"):
        if file.name != "compat.py":
            for node in ast.parse(file.read_text()).body:  # without those for type checkers
                if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm":
                    imported |= {f"{node.module}:{name.name}" for name in node.names}
    modules = {
        name for name in imported if name.replace(":", ".") in {item.partition(":")[0] for item in listed}
    }
    assert len(imported) > 20
    assert imported - listed - modules == always_there


def test_fields_that_are_read_are_there() -> None:
    from vllm.distributed import kv_events
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvtier.events import AllBlocksCleared, BlockRemoved, BlockStored

    def has(cls: type, *names: str) -> bool:
        return set(names) <= {field.name for field in fields(cls)}

    assert has(NewRequestData, "req_id", "block_ids", "num_computed_tokens")
    assert has(CachedRequestData, "req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens")
    assert has(SchedulerOutput, "num_scheduled_tokens", "preempted_req_ids", "finished_req_ids")
    assert has(KVConnectorOutput, "kv_connector_worker_meta", "failed_recving", "invalid_block_ids")
    assert isinstance(Request.num_tokens, property)
    for ours in (AllBlocksCleared, BlockRemoved, BlockStored):
        theirs = getattr(kv_events, ours.__name__).__struct_fields__
        assert tuple(name for name in theirs if name not in IGNORED) == ours.__struct_fields__


def test_the_rest_of_an_output_is_kept_until_vllm_takes_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its failed blocks, a load that vLLM was told of would count as good."""
    report = TransferReport(0, TransferResult(1, success=False))
    outputs = iter(
        [KVConnectorOutput(set(), {"r"}, {7}, reports=[report], failed_recving={"r"}), KVConnectorOutput()]
    )
    monkeypatch.setattr(engine.worker._connector, "take_output", lambda: next(outputs))
    assert engine.worker.get_finished(set()) == (set(), {"r"})
    assert engine.worker.get_transfer_results(set()).finished_recving == set()
    assert engine.worker.get_block_ids_with_load_errors() == {7}
    assert engine.worker.build_connector_worker_meta().reports == [report]
    assert engine.worker.build_connector_worker_meta() is None
    monkeypatch.undo()


def import_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the package as a new process does, up to the check of its hooks."""
    import kvtier.integrations.vllm

    runpy.run_path(str(kvtier.integrations.vllm.__file__))


def test_a_missing_hook_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    import_again(monkeypatch)
    monkeypatch.setattr(vllm, "__version__", "0.41.0")
    monkeypatch.delattr(KVConnectorBase_V1, "handle_preemptions")
    expected = (
        r"^vllm 0\.41\.0: expected vllm\.distributed\..*\.KVConnectorBase_V1\.handle_preemptions"
        r"\(kv_connector_metadata\), got no such name; install vllm>=0\.31,<0\.34, or a kvtier for"
    )
    with pytest.raises(InputError, match=expected) as caught:
        import_again(monkeypatch)
    assert "\n" not in str(caught.value)


def test_a_hook_with_other_parameters_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int, limit: int) -> None:
        raise NotImplementedError

    monkeypatch.setattr(KVConnectorBase_V1, "get_num_new_matched_tokens", get_num_new_matched_tokens)
    expected = (
        r"expected .*\.get_num_new_matched_tokens\(request, num_computed_tokens\), "
        r"got \(request, num_computed_tokens, limit\); install "
    )
    with pytest.raises(InputError, match=expected):
        import_again(monkeypatch)


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_function_that_needs_more_arguments_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_needed: bool
) -> None:
    """One that can be given more is not."""
    from vllm.v1 import kv_cache_interface

    def needs_more(kv_cache_spec: Any, layout: str) -> None:
        raise NotImplementedError

    def takes_more(kv_cache_spec: Any, layout: str = "") -> None:
        raise NotImplementedError

    function = needs_more if is_needed else takes_more
    monkeypatch.setattr(kv_cache_interface, "get_kv_cache_spec_kind", function)
    if is_needed:
        with pytest.raises(InputError, match=r"get_kv_cache_spec_kind\(kv_cache_spec\), got \(.*layout\)"):
            import_again(monkeypatch)
    else:
        import_again(monkeypatch)


def test_a_module_that_is_gone_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.integrations.vllm import compat

    monkeypatch.setitem(compat.CALLED, "vllm.v1.core.moved_away:function", ())
    with pytest.raises(InputError, match=r"expected vllm\.v1\.core\.moved_away\.function\(\), got no such"):
        import_again(monkeypatch)


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "dev"])
def test_another_version_starts_with_one_warning(
    llama: Path, cache_config: Any, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """That names the version and the range. A version in the range starts without."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvtier.integrations.vllm import KVTierConnector
    from kvtier.integrations.vllm.compat import logger

    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: lines.append(text % values))
    KVTierConnector(engine_config(llama), KVConnectorRole.SCHEDULER, cache_config).shutdown()
    assert not lines
    config = engine_config(llama)
    monkeypatch.setattr(vllm, "__version__", version)
    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        KVTierConnector(config, role, cache_config).shutdown()
    (line,) = lines
    assert line.startswith(f"kvtier is tested with vllm>=0.31,<0.34, and this is vllm {version}: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu": {"capacity": "1kB"}}, r"cpu\.capacity: expected at least one row"),
        ({"cpu": {"capcity": "1GiB"}}, r"cpu\.capcity: no such setting; did you mean cpu\.capacity"),
    ],
)
def test_a_bad_setting_stops_the_start_in_one_line(
    llama: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message), vllm_engine(llama, settings):
        pass


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What kvtier writes to vLLM's log. vLLM takes handlers away when an engine starts."""
    from kvtier.integrations.vllm.connector import logger

    lines: list[str] = []

    def info(text: str, *values: object) -> None:
        if "the namespace is" not in text:  # said by a thread, at any time
            lines.append(text % values)

    monkeypatch.setattr(logger, "info", info)
    return lines


def test_log_lines_and_counts_of_a_run(llama: Path, said: list[str]) -> None:
    clock = ManualClock()
    with vllm_engine(llama, {"cpu": {"capacity": "4MiB"}}) as engine:
        engine.connector._summary.close()
        engine.connector._summary = Summary(engine.stats, said.append, clock)  # without its timer
        prompt = make_prompt(0, 100)
        engine.generate([prompt])
        engine.forget()
        engine.generate([prompt])
        engine.settle()
        engine.generate([make_prompt(1, 10)])
        clock.now += INTERVAL
        engine.connector._summary.log_changes()
        found = {
            metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")
        }
        config = engine.connector._connector.connector_scheduler.spec.config
        engine.generate([make_prompt(2, 20)])
    policy, start, summary, rest = said
    assert "kv_load_failure_policy is now 'recompute'" in policy
    assert "4.0 MiB of host memory keep 85 chunks of 32 tokens (48.0 KiB each); policy gittins" in start
    assert summary == (
        "kvtier, last 60 s: 96 prompt tokens loaded instead of computed (46% of the 210 that were not on "
        "the GPU); 144.0 KiB loaded, 144.0 KiB stored, "
        f"0 of {found['vllm:kvtier_stores'] + 1:.0f} transfers failed"
    )
    assert "0 prompt tokens loaded instead of computed (0% of the 20 that were not on the GPU)" in rest
    assert found["vllm:kvtier_loads"] == 1
    assert found["vllm:kvtier_load_bytes"] == 3 * 48 * 1024
    assert found["vllm:kvtier_store_bytes"] == 3 * 48 * 1024
    assert found["vllm:kvtier_asked_tokens"] == 210
    assert found["vllm:kvtier_loaded_tokens"] == found["vllm:external_prefix_cache_hits"] == 96
    assert len(config.namespace.wait(60)) == 64


def test_the_summary_is_logged_although_no_step_follows(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls a connector in its steps alone, and an engine that has gone idle makes none."""
    from kvtier.integrations.vllm.connector import logger

    said: Queue[str] = Queue()
    monkeypatch.setattr(logger, "info", lambda text, *values: said.put(text % values))
    monkeypatch.setattr("kvtier.integrations.summary.INTERVAL", 2.0)
    with vllm_engine(llama, {}) as engine:
        engine.generate([make_prompt(0, 100)])
        engine.settle()
        while "144.0 KiB stored" not in said.get(timeout=60):
            pass


def test_every_step_is_ended_once(engine: Engine) -> None:
    """Else the time of a step would be taken for that of another. vLLM keeps quiet about steps with nothing
    to tell.
    """
    prompt = make_prompt(0, 200)
    engine.generate([prompt])
    engine.forget()
    engine.generate([prompt])
    engine.settle()
    scheduler = engine.connector._connector.connector_scheduler
    assert not scheduler._timer._in_flight
    assert scheduler.cost.compute_seconds(1) is not None


def test_names_at_metrics_stay() -> None:
    """Dashboards know them. What is of a tier has its name as a label, and misses have their reason."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    from kvtier.integrations.vllm.metrics import KVTierMetrics

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    shown = KVTierMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    shown.observe({"loads": 2, "tier_promoted:disk": 3, "tier_suspended:disk": 1, "used_bytes": 10}, 1)
    shown.observe({"misses:never stored": 4, "saved_seconds": 0.5}, 1)
    shown.observe({"load_seconds": [0.25], "tier_demote_seconds:disk": [0.5, 40.0]}, 1)
    text = generate_latest(registry).decode()
    for total in fields(ConnectorStats):
        assert f'vllm:kvtier_{total.name}_total{{engine="0",model_name="m"}} 0.0' in text
    for line in (
        'loads_total{engine="1",model_name="m"} 2.0',
        'evictions_total{engine="1",model_name="m"} 0.0',
        'misses_total{engine="1",model_name="m",reason="never stored"} 4.0',
        'saved_seconds_total{engine="1",model_name="m"} 0.5',
        'refusals_total{engine="1",model_name="m"} 0.0',
        'used_bytes{engine="1",model_name="m"} 10.0',
        'load_seconds_bucket{engine="1",le="0.5",model_name="m"} 1.0',
        'store_seconds_count{engine="1",model_name="m"} 0.0',
        'tier_promoted_total{engine="1",model_name="m",tier="disk"} 3.0',
        'tier_suspended{engine="1",model_name="m",tier="disk"} 1.0',
        'tier_demote_seconds_bucket{engine="1",le="+Inf",model_name="m",tier="disk"} 2.0',
    ):
        assert f"vllm:kvtier_{line}\n" in text, line
    assert "\nvllm:kvtier_capacity_bytes{" not in text, "nobody has told it yet"
    assert 'used_bytes{engine="0"' not in text


def test_a_capacity_of_zero_is_said_once(llama: Path, said: list[str]) -> None:
    with vllm_engine(llama, {"cpu": {"capacity": 0}}):
        pass
    _, start = said
    assert start.endswith(": cpu.capacity is 0: nothing is stored and nothing is loaded")


def test_a_source_tree_is_enough(llama: Path, cache_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PYTHONPATH kvtier has no metadata that could be asked for its version."""
    import kvtier
    from kvtier.integrations.vllm.describe import describe_engine, summarize

    def find_none(cls: type[metadata.Distribution], name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    config = describe_engine(engine_config(llama), cache_config)
    monkeypatch.setattr(metadata.Distribution, "from_name", classmethod(find_none))
    assert summarize(config).startswith(f"kvtier {kvtier.__version__}: 1.0 MiB of host memory")


@pytest.fixture(scope="module")
def cache_config(llama: Path) -> Any:
    """How vLLM lays out the KV of a Llama."""
    with vllm_engine(llama, {}) as engine:
        return engine.connector._kv_cache_config


def engine_config(model: Path, **options: Any) -> Any:
    """Return vLLM's config of an engine with kvtier that is not started."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_connector_module_path="kvtier.integrations.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu": {"capacity": "1MiB"}},
    )
    defaults = {"dtype": "float32", "block_size": BLOCK, "skip_tokenizer_init": True}
    return EngineArgs(
        model=str(model), kv_transfer_config=transfer, **(defaults | options)
    ).create_engine_config()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "decode_context_parallel_size",
            "kvtier does not follow KV that is spread over ranks by token; vLLM's own",
        ),
        (
            "prefill_context_parallel_size",
            "kvtier does not follow KV that is spread over ranks by token; vLLM's own",
        ),
    ],
)
def test_ways_to_divide_a_model_that_are_refused(
    llama: Path, cache_config: Any, name: str, advice: str
) -> None:
    from kvtier.integrations.vllm import describe_engine

    config = engine_config(llama)
    setattr(config.parallel_config, name, 2)
    with pytest.raises(ConfigError, match=f"^{name}: expected 1, got 2: {advice}") as caught:
        describe_engine(config, cache_config)
    assert "\n" not in str(caught.value)


def test_ranks_on_several_machines_are_refused(llama: Path, cache_config: Any) -> None:
    """They were accepted, and every transfer failed: ranks share host memory."""
    skip_without_devices(2)
    from kvtier.integrations.vllm import describe_engine

    config = engine_config(llama, tensor_parallel_size=2)
    parallel = config.parallel_config
    assert describe_engine(config, cache_config).world_size == 2
    parallel.nnodes = 2
    refusal = (
        r"^nnodes: expected 1 for each engine, got 2: .*; "
        r"keep tensor_parallel_size within a machine and use data_"
    )
    with pytest.raises(ConfigError, match=refusal) as caught:
        describe_engine(config, cache_config)
    assert "\n" not in str(caught.value)
    parallel.data_parallel_size, parallel.data_parallel_size_local = 2, 1
    assert describe_engine(config, cache_config).world_size == 2, "each machine has an engine of its own"


def test_ranks_with_schedulers_of_their_own_are_refused(llama: Path, cache_config: Any) -> None:
    skip_without_devices(2)
    from kvtier.integrations.vllm import describe_engine

    config = engine_config(llama, tensor_parallel_size=2)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    with pytest.raises(
        ConfigError, match=r"^distributed_executor_backend: expected mp or ray, got external_launcher: "
    ):
        describe_engine(config, cache_config)


@pytest.mark.parametrize("together", [[True, True], [True, False]])
def test_ranks_that_ray_has_spread_are_refused(
    llama: Path, cache_config: Any, monkeypatch: pytest.MonkeyPatch, together: list[bool]
) -> None:
    """Only the workers can tell where Ray has put them. vLLM's own question to them is tested by vLLM."""
    skip_without_devices(2)
    from kvtier.integrations.vllm import describe, describe_engine

    monkeypatch.setattr(describe, "get_tp_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(describe, "in_the_same_node_as", lambda group: together)
    config = engine_config(llama, tensor_parallel_size=2)
    config.parallel_config.distributed_executor_backend = "ray"
    if all(together):
        assert describe_engine(config, cache_config, ConnectorRole.WORKER).world_size == 2
    else:
        refusal = (
            r"^tensor_parallel_size: expected 2 ranks on one machine, got 1: .*; "
            r"keep tensor_parallel_size within"
        )
        with pytest.raises(ConfigError, match=refusal):
            describe_engine(config, cache_config, ConnectorRole.WORKER)


def tell_stages(monkeypatch: pytest.MonkeyPatch, *others: tuple[int, ...] | str) -> list[Any]:
    """Play the other pipeline stages for this one; return what this one tells them."""
    import torch

    from kvtier.integrations.vllm import describe

    told: list[Any] = []

    def gather(found: list[Any], own: Any, group: Any) -> None:
        told.append(own)
        found[:] = [own, *others]

    pipeline = SimpleNamespace(world_size=1 + len(others), cpu_group=None)
    monkeypatch.setattr(describe, "get_pp_group", lambda: pipeline)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return told


def test_pipeline_stages_tell_each_other_how_long_their_blocks_are(
    llama: Path, cache_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_devices(2)
    from kvtier.integrations.vllm import describe_engine

    told = tell_stages(monkeypatch, (16384,))
    config = engine_config(llama, pipeline_parallel_size=2)
    described = describe_engine(config, cache_config, ConnectorRole.WORKER)
    assert told == [(49152,)]
    assert described.bytes_by_rank == ((49152,), (16384,))
    assert described.row_bytes == 2 * 49152
    config.parallel_config.tensor_parallel_size, config.parallel_config.world_size = 2, 4
    described = describe_engine(config, cache_config, ConnectorRole.WORKER)
    assert described.bytes_by_rank == ((49152,), (49152,), (16384,), (16384,))


def test_a_pipeline_stage_that_cannot_be_served_is_refused_by_all(
    llama: Path, cache_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gave up alone would leave the others waiting for it."""
    skip_without_devices(2)
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    from kvtier.integrations.vllm import describe_engine

    config, (group,) = engine_config(llama, pipeline_parallel_size=2), cache_config.kv_cache_groups
    tell_stages(monkeypatch, "its problem")
    with pytest.raises(InputError, match=r"^pipeline stage 1: its problem$"):
        describe_engine(config, cache_config, ConnectorRole.WORKER)
    told = tell_stages(monkeypatch, (16384, 16384))
    empty = KVCacheGroupSpec([], group.kv_cache_spec)  # as vLLM has it where a stage has no layer of a group
    with pytest.raises(
        InputError, match=r"^pipeline stage 0: KV cache group 1: .*PP_LAYER_PARTITION"
    ) as caught:
        describe_engine(config, replace(cache_config, kv_cache_groups=[group, empty]), ConnectorRole.WORKER)
    assert "\n" not in str(caught.value)
    assert told == [str(caught.value).removeprefix("pipeline stage 0: ")]


def test_pipeline_stages_that_are_not_in_processes_of_one_engine_are_refused(
    llama: Path, cache_config: Any
) -> None:
    skip_without_devices(2)
    from kvtier.integrations.vllm import describe_engine

    config = engine_config(llama, pipeline_parallel_size=2)
    config.parallel_config.distributed_executor_backend = "ray"
    refusal = "^distributed_executor_backend: expected mp with pipeline stages, got ray: "
    with pytest.raises(ConfigError, match=refusal):
        describe_engine(config, cache_config)


def test_the_scheduler_waits_for_the_handshake_of_pipeline_stages(llama: Path, cache_config: Any) -> None:
    skip_without_devices(2)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvtier.integrations.vllm import KVTierConnector
    from kvtier.integrations.vllm.describe import KVTierHandshake

    config = engine_config(llama, pipeline_parallel_size=2)
    connector = KVTierConnector(config, KVConnectorRole.SCHEDULER, cache_config)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute", "vLLM reads it before"
    with pytest.raises(
        ConfigError, match=r"^pipeline_parallel_size: expected the first handshake .* kvtier's"
    ):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace()})
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): KVTierHandshake(((49152,), (16384,)))})
    made = connector._connector.connector_scheduler.spec.config
    assert (made.bytes_by_rank, made.world_size, made.row_bytes) == (((49152,), (16384,)), 2, 2 * 49152)
    connector.shutdown()
    KVTierConnector(config, KVConnectorRole.SCHEDULER, cache_config).shutdown()  # of a start that failed


def test_a_launch_has_an_id_of_its_own_that_its_processes_share(llama: Path, cache_config: Any) -> None:
    import pickle

    from kvtier.integrations.vllm import describe_engine

    first, second = engine_config(llama), engine_config(llama)
    described = describe_engine(first, cache_config)
    assert described.launch_id == describe_engine(pickle.loads(pickle.dumps(first)), cache_config).launch_id
    assert "" != described.launch_id != describe_engine(second, cache_config).launch_id


def test_kernels_that_cannot_go_on_in_a_prompt_are_refused(tmp_path: Path, cache_config: Any) -> None:
    """With the CPU build's reference kernels for MLA, prompts that were loaded in part had wrong tokens."""
    if on_gpu():
        pytest.skip("kernels for GPUs can")
    from kvtier.integrations.vllm import describe_engine

    config = engine_config(save_mla_config(tmp_path), attention_backend="CPU_MLA")
    with pytest.raises(InputError, match=r"^MLA on a CPU: .*, got CPU_MLA: .*wrong tokens; use a GPU$"):
        describe_engine(config, cache_config)
    config.scheduler_config.enable_chunked_prefill = True  # as with the kernels for AMX
    assert describe_engine(config, cache_config).world_size == 1


def test_ranks_with_mla_keep_one_copy(llama: Path, cache_config: Any) -> None:
    """If vLLM says that they hold the same, and nothing else is among it."""
    skip_without_devices(2)
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec

    from kvtier.integrations.vllm import describe_engine

    def describe(*groups: Any, says: int = 2, **options: Any) -> Any:
        caches = replace(cache_config, kv_cache_groups=list(groups), kv_tp_replicas=says)
        return describe_engine(engine_config(llama, **options), caches)

    def speculative(role: Any) -> Any:
        config = engine_config(llama, tensor_parallel_size=2)
        config.speculative_config = SimpleNamespace(use_eagle_block_drop=lambda: False)
        return describe_engine(config, replace(cache_config, kv_cache_groups=[mla], kv_tp_replicas=2), role)

    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)
    mla = KVCacheGroupSpec(["model.layers.0.self_attn.mla_attn"], spec)
    (full,) = cache_config.kv_cache_groups
    one_copy = describe(mla, tensor_parallel_size=2)
    assert (one_copy.replicas, one_copy.row_bytes) == (2, one_copy.max_image_bytes)
    assert describe(mla, says=1, tensor_parallel_size=2).replicas == 1
    assert describe(full, tensor_parallel_size=2).replicas == 1
    assert describe(mla, full, tensor_parallel_size=2).replicas == 1
    assert describe(mla, says=1).replicas == 1
    assert speculative(ConnectorRole.WORKER).replicas == 1


@pytest.mark.parametrize(
    ("name", "number_format"),
    [("auto", "float32"), ("fp8_e5m2", "float8_e5m2"), ("fp8_ds_mla", ""), ("of_a_plug_in", "")],
)
def test_a_cache_is_audited_if_the_format_of_its_values_is_known(
    llama: Path, cache_config: Any, name: str, number_format: str
) -> None:
    """From 0.33 on a plug-in can register formats of its own."""
    from kvtier.integrations.vllm import describe_engine

    config = engine_config(llama)
    object.__setattr__(config.cache_config, "cache_dtype", name)
    described = describe_engine(config, cache_config)
    assert (described.number_format, described.audits) == (number_format, bool(number_format))


def test_states_that_are_not_kept_are_refused(llama: Path, cache_config: Any) -> None:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

    from kvtier.integrations.vllm import describe_engine

    state = MambaSpec(block_size=BLOCK, shapes=((4, 16),), dtypes=(torch.float32,))
    hybrid = replace(
        cache_config,
        kv_cache_groups=[*cache_config.kv_cache_groups, KVCacheGroupSpec(["model.layers.9.mixer"], state)],
    )
    refusal = r"^mamba_cache_mode: expected 'align', got 'none' for layer model.layers.9.mixer: "
    with pytest.raises(ConfigError, match=refusal) as caught:
        describe_engine(engine_config(llama), hybrid)
    assert "\n" not in str(caught.value)


def test_the_namespace_tells_models_and_settings_apart(llama: Path, hybrid: Path, cache_config: Any) -> None:
    skip_without_devices(2)
    from kvtier.integrations.vllm import describe_engine

    def namespace(model: Path = llama, stages: tuple[int, ...] = (), **options: Any) -> str:
        config, sizes = engine_config(model, **options), tuple((size,) for size in stages)
        return describe_engine(config, cache_config, bytes_by_rank=sizes).namespace.wait(60)

    different = [
        namespace(),
        namespace(hybrid),
        namespace(dtype="bfloat16"),
        namespace(prefix_caching_hash_algo="sha256_cbor"),
        namespace(load_format="dummy"),
        namespace(hf_overrides={"rope_theta": 5000.0}),
        namespace(tensor_parallel_size=2),
        namespace(pipeline_parallel_size=2, stages=(49152, 49152)),
        namespace(pipeline_parallel_size=2, stages=(49152, 16384)),
        namespace(enable_lora=True),
    ]
    assert len(set(different)) == len(different)
    assert namespace(max_num_seqs=4, num_gpu_blocks_override=30) == namespace()
