"""Every query of the dashboard and of the alerts, asked of a real Prometheus that scrapes a real vLLM with a
disk and a real index that follows its events.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from tests.deploy_kit import DEPLOY, all_metrics, load_alerts, load_dashboard, metrics_in, panel_queries
from tests.ports import free_port
from tests.vllm.disks import disk_tier
from tests.vllm.engines import make_prompt
from tests.vllm.test_explain import ROW
from tests.vllm.test_server import complete, is_listening, launching, wait_ready

pytestmark = pytest.mark.newest_vllm

ABSENT = {
    "vllm:kvtier_tier_dropped_total": "no row was withdrawn",
    "vllm:kvtier_tier_evicted_total": "the disk is not full",
    "vllm:kvtier_tier_failed_checks_total": "no row was damaged",
    "vllm:kvtier_tier_failed_total": "no call failed",
    "vllm:kvtier_tier_late_total": "no call was late",
    "vllm:kvtier_tier_refused_total": "the disk took every row",
}
"""Counters with a label that have nothing to count here: vLLM then declares them, and has no sample."""

Ask = Callable[..., Any]


@contextmanager
def running(*command: str, port: int) -> Iterator[None]:
    """Run a server until the end of the block, which begins when it listens."""
    env = os.environ | {"KVTIER_INDEX": "python"}  # nothing is compiled
    with subprocess.Popen(command, env=env) as process:
        try:
            while not is_listening(port):
                assert process.poll() is None, f"{command[0]} has ended"
                time.sleep(0.02)
            yield
        finally:
            process.kill()


@contextmanager
def prometheus(folder: Path, targets: dict[str, int]) -> Iterator[Ask]:
    """Scrape servers every second, with our alerts; yield what asks Prometheus' HTTP API."""
    jobs = {name: [{"targets": [f"127.0.0.1:{port}"]}] for name, port in targets.items()}
    config: dict[str, Any] = {"rule_files": [str(DEPLOY / "prometheus" / "alerts.yml")]}
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"] = [{"job_name": name, "static_configs": jobs[name]} for name in jobs]
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]

    def ask(path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urlencode(parameters)}"
        try:
            return json.load(urlopen(url))["data"]
        except HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    with running(*command, port=port):
        yield ask


@pytest.fixture(scope="module")
def ask(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Serve prompts until every panel shows a number, or for a while; ask the Prometheus that watches."""
    if shutil.which("prometheus") is None:
        pytest.skip("no Prometheus here; `make servers` installs Debian's")
    folder, index_port = tmp_path_factory.mktemp("dashboard"), free_port()
    addresses = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    config = {"enable_kv_cache_events": True, "publisher": "zmq"} | addresses
    settings = disk_tier(folder / "disk") | {"cpu": {"capacity": 40 * ROW}}
    index = [sys.executable, "-m", "kvtier", "index", "serve", "--model-name", "tiny"]
    index += ["--port", str(index_port), "--follow", "worker=" + ",".join(addresses.values())]
    prompts = [make_prompt(seed, 182) for seed in range(12)]
    body = json.dumps({"model_name": "tiny", "token_ids": prompts[0]}).encode()
    with ExitStack() as stack:
        connect = stack.enter_context(launching(llama, settings, kv_events_config=json.dumps(config)))
        stack.enter_context(running(*index, port=index_port))
        client = connect()
        targets = {"vllm": client.base_url.port, "index": index_port}
        ask = stack.enter_context(prometheus(folder, targets))
        wait_ready(client)
        for turn in range(30):
            # Back over the GPU, then the pool, then the disk. The last prompt is new, and so written.
            for prompt in [*prompts, *prompts[::-1], make_prompt(100 + turn, 182)]:
                complete(client, prompt)
            urlopen(Request(f"http://127.0.0.1:{index_port}/query", body)).close()
            if not silent_panels(ask):
                break
            time.sleep(0.5)  # a rate needs two scrapes
        yield ask


def silent_panels(ask: Ask) -> set[str]:
    """Return the queries of panels without a number, except for those about failures that did not happen."""
    silent = set()
    for where, query in panel_queries().items():
        values = [float(sample["value"][1]) for sample in ask("query", query=query)["result"]]
        if all(math.isnan(value) for value in values) and not metrics_in(query) & ABSENT.keys():
            silent.add(where)
    return silent


@pytest.mark.slow
def test_every_panel_shows_a_number(ask: Ask) -> None:
    assert silent_panels(ask) == set()


def test_every_metric_was_scraped(ask: Ask) -> None:
    assert all_metrics() - set(ask("label/__name__/values")) <= ABSENT.keys()
    declared = {name.removesuffix("_total") for name in ask("metadata")}
    assert {name.removesuffix("_total") for name in ABSENT} <= declared


def test_variables_have_values(ask: Ask) -> None:
    values = {}
    for variable in load_dashboard()["templating"]["list"][1:]:
        matching, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
        values[label] = ask(f"label/{label}/values", **{"match[]": re.sub(r"\$\w+", ".*", matching)})
    assert (values["job"], values["model_name"], len(values["instance"])) == (["vllm"], ["tiny"], 1)


def test_alerts_are_evaluated_and_none_fires(ask: Ask) -> None:
    (group,) = ask("rules")["groups"]
    assert {rule["name"]: rule["health"] for rule in group["rules"]} == {
        rule["alert"]: "ok" for rule in load_alerts()
    }
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []
