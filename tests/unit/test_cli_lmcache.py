"""`kvtier config check` answers LMCache's settings with kvtier's, which kvtier can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.config import KVTierConfig

FILE = """\
chunk_size: 256
local_cpu: true
max_local_cpu_size: 20.0   # GiB
local_disk: "file:///mnt/nvme"
max_local_disk_size: 200
remote_url: "redis://me:hunter2@cache:6379/1"
cache_policy: ARC
save_decode_cache: False
blocking_timeout_secs: 10
numa_mode: auto
"""


def check(file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Return what the command prints, which is no success, and what it remarks."""
    assert main(["config", "check", str(file)]) == 2
    output = capsys.readouterr()
    return json.loads(output.out) if output.out else None, output.err


def test_file_of_lmcache_is_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(FILE)
    settings, remarks = check(file, capsys)
    assert settings == {
        "cpu": {"capacity": "20GiB", "policy": "arc"},
        "chunk_tokens": 256,
        "prompt_only": True,
        "load_deadline": 10.0,
        "tiers": [
            {"disk": {"path": "/mnt/nvme", "capacity": "200GiB"}},
            {"valkey": {"url": "redis://me@cache:6379/1"}},
        ],
    }
    KVTierConfig.from_dict(settings)
    assert len(remarks.splitlines()) == 1 + len(FILE.splitlines()), "a line for each name"
    assert "max_local_cpu_size → cpu.capacity, which is over all ranks" in remarks
    assert "numa_mode → no counterpart" in remarks
    assert "hunter2" not in remarks


@pytest.mark.parametrize(
    ("connector", "extra", "remark"),
    [
        ("LMCacheConnectorV1", {"lmcache.chunk_size": 256}, "chunk_size → chunk_tokens"),
        ("LMCacheMPConnector", {"lmcache.mp.port": 5555}, "mp.port → none: kvtier runs inside the engine"),
        (
            "LMCacheMPConnector",
            {"lmcache.mp.lazy_offload": True},
            "mp.lazy_offload → none: stores always run",
        ),
        ("LMCacheMPConnector", None, "--l1-size-gb of the server → cpu.capacity, of each engine"),
        ("LMCacheConnectorV1Dynamic", None, "cpu.capacity is LMCache's default"),
    ],
)
def test_connector_of_lmcache_is_replaced(
    connector: str,
    extra: dict[str, Any] | None,
    remark: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, theirs = tmp_path / "transfer.json", {"kv_connector": connector, "kv_role": "kv_consumer"}
    file.write_text(json.dumps(theirs | ({"kv_connector_extra_config": extra} if extra else {})))
    ours, remarks = check(file, capsys)
    assert (ours["kv_role"], remark in remarks) == ("kv_consumer", True)
    file.write_text(json.dumps(ours))
    assert main(["config", "check", str(file)]) == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_local_cpu_size: many", "max_local_cpu_size: expected a number of GiB, got 'many'"),
        ("remote_url: redis://[x:hunter2", "remote_url: expected an address such as valkey://host:6379"),
        ("title: something", "expected JSON"),
    ],
)
def test_bad_values_are_one_line(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    settings, remarks = check(file, capsys)
    assert settings is None
    assert remarks.startswith(f"kvtier: {file}: {problem}")
    assert len(remarks.splitlines()) == 1
    assert "hunter2" not in remarks


def test_settings_of_kvtier_are_not_taken_for_lmcaches(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"cpu": {"capacity": "1GiB"}, "chunk_tokens": 256}')
    assert main(["config", "check", str(file)]) == 0
