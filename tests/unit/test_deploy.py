"""The files in `deploy/`: up to date, about metrics that exist, and with settings that kvtier reads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
from tests.deploy_kit import DEPLOY, all_metrics, load_alerts, load_dashboard
from tests.unit.test_links import anchors_of

from kvtier.config import KVTierConfig
from kvtier.config import parse_size as size
from kvtier.connector.metrics import METRICS
from kvtier.index import routes
from kvtier.metrics import Metric, MetricKind

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed here")
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "kvtier.yaml").read_text()))


def run(*command: str) -> None:
    """Run a program that must succeed."""
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def tool(name: str) -> str:
    """Return the path of a program, or skip: of this environment, else of the machine."""
    path = shutil.which(str(Path(sys.executable).with_name(name))) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed here; `make deploy` or `make servers` installs it")
    return path


def series_of(prefix: str, metrics: Iterable[Metric]) -> set[str]:
    """Return the names of what Prometheus stores of metrics."""
    endings = {MetricKind.COUNTER: ["_total"], MetricKind.GAUGE: [""]}
    times = ["_bucket", "_sum", "_count"]
    return {f"{prefix}{each.name}{end}" for each in metrics for end in endings.get(each.kind, times)}


def test_the_dashboard_is_what_its_code_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="the extra `dashboard` is not installed here")
    run(sys.executable, "dashboard.py", "--check")


def test_panels_have_ids_queries_and_room() -> None:
    panels = load_dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["type"] == "row" or panel["targets"] for panel in panels)
    cells: list[tuple[int, int]] = []
    for at in (panel["gridPos"] for panel in panels):
        cells += product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
    assert len(cells) == len(set(cells)), "two panels overlap"
    assert max(x for x, _ in cells) == 23


def test_queries_name_metrics_that_exist_and_all_that_matter() -> None:
    """Those of vLLM are asked of a real one in `tests/vllm/test_dashboard.py`."""
    index = [*routes._INDEX, *routes._SOURCES, *routes._TRAFFIC]
    known = series_of("vllm:kvtier_", METRICS.values()) | series_of("kvtier_index_", index)
    assert {name for name in all_metrics() if "kvtier" in name} <= known
    families = {re.sub("_(total|bucket|sum|count)$", "", name) for name in all_metrics()}
    left_out = {"tier_demoted", "tier_promoted", "tier_questions", "tier_round_trips"}
    left_out.add("tenant_used_bytes")  # only with shares, and then for up to 65 tenants
    left_out |= {"packing_ratio", "stored_chunks", "unpacked_chunks"}  # only with packing
    assert {name for name in METRICS if f"vllm:kvtier_{name}" not in families} == left_out, (
        "show it in deploy/dashboard.py and run `make deploy`, or leave it out here"
    )


def test_every_alert_is_tested_and_has_a_runbook_that_exists() -> None:
    tested = re.findall(r'alertname="(\w+)"', (DEPLOY / "prometheus" / "alerts_test.yml").read_text())
    assert [rule["alert"] for rule in load_alerts() if rule["alert"] not in tested] == []
    for rule in load_alerts():
        ((page, anchor),) = re.findall(r"docs/(\w+\.md)(?:#([\w-]+))?", rule["annotations"]["runbook"])
        assert not anchor or anchor in anchors_of(DEPLOY.parent / "docs" / page), rule["alert"]


def test_alerts_fire_when_they_should() -> None:
    run(tool("promtool"), "test", "rules", "prometheus/alerts_test.yml")
    run(tool("promtool"), "check", "config", "prometheus/prometheus.yml")


def settings_in(command: list[str]) -> KVTierConfig:
    """Return kvtier's settings in a command line of vLLM, read by kvtier."""
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert json.loads(command[command.index("--kv-events-config") + 1])["enable_kv_cache_events"]
    return KVTierConfig.from_dict(transfer["kv_connector_extra_config"])


def test_limits_and_volumes_hold_what_is_asked_for_and_secrets_are_secret() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["vllm"]
    (engines,) = (each["spec"] for each in MANIFESTS if each["kind"] == "StatefulSet")
    pod, (claim,) = engines["template"]["spec"], engines["volumeClaimTemplates"]
    (engine,), (shm, secret) = pod["containers"], pod["volumes"]
    assert secret["secret"]["defaultMode"] == 0o400
    settings, composed = settings_in(engine["args"]), settings_in(service["command"])
    memory, shared = size(engine["resources"]["limits"]["memory"]), size(shm["emptyDir"]["sizeLimit"])
    assert memory >= settings.cpu.capacity + shared + (16 << 30)
    assert size(service["mem_limit"]) >= composed.cpu.capacity + size(service["shm_size"]) + (16 << 30)
    volume = size(claim["spec"]["resources"]["requests"]["storage"])
    assert volume >= settings.tiers[0].capacity + (100 << 30)


def test_files_pass_their_validators() -> None:
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", "compose.yaml")
    run(tool("kubernetes-validate"), "--strict", "kubernetes/kvtier.yaml")
    run(tool("hadolint"), "Dockerfile")
