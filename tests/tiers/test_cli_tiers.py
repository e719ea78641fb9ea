"""`kvtier tiers check`: real folders and servers through the command line, and what is said of those that
do not work."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port
from tests.tiers.servers import ValkeyServer
from tests.tiers.test_disk import opened

from kvtier.cli import main
from kvtier.tiers import factory


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer(password="open sesame") as server:
        yield server


def check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *tiers: dict[str, Any]
) -> tuple[int, list[str]]:
    """Check these tiers; return the exit code and the lines."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"cpu": {"capacity": "1MiB"}, "tiers": list(tiers)}))
    code = main(["tiers", "check", str(file), "--row-size", "64KiB"])
    out = capsys.readouterr()
    assert out.err == ""
    return code, out.out.splitlines()


def disk(path: Path) -> dict[str, Any]:
    return {"disk": {"path": str(path), "capacity": "4MiB"}}


def test_a_working_tier_is_measured_and_nothing_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], server: ValkeyServer
) -> None:
    password = tmp_path / "password"
    password.write_text("open sesame")
    valkey = {"valkey": {"url": server.url, "password_file": str(password)}}
    code, lines = check(tmp_path, capsys, disk(tmp_path / "kv"), valkey)
    assert code == 0, lines
    for line, kind in zip(lines, ("disk", "valkey"), strict=True):
        assert line.startswith(f"{kind}: opens in ")
        for word in ("puts", "gets", "looks up in"):
            assert word in line
    assert not (tmp_path / "kv").exists()
    assert server.say("DBSIZE") in (b":0\r\n", b":1\r\n"), "a probe goes by itself"
    assert main(["tiers", "check", str(tmp_path / "config.json"), "--json", "--rows", "2"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["tier"], second["tier"]) == ("disk", "valkey")
    assert first["problem"] is None
    assert second["put_bytes_per_second"] > 0


def test_a_broken_tier_is_reported_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], server: ValkeyServer
) -> None:
    port = free_port()
    code, lines = check(tmp_path, capsys, {"valkey": {"url": f"valkey://127.0.0.1:{port}"}})
    assert (code, lines) == (1, [f"valkey: no connection to 127.0.0.1:{port}: Connection refused"])
    code, (line,) = check(tmp_path, capsys, {"valkey": {"url": server.url}})
    assert code == 1
    assert line.startswith("valkey: ")
    assert "NOAUTH" in line or "password" in line


def test_a_package_that_is_missing_is_named_with_its_install_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"obstore", "mooncake"}
    find = importlib.util.find_spec
    monkeypatch.setattr(factory, "find_spec", lambda name: None if name in missing else find(name))
    mooncake = {"mooncake": {"master": "127.0.0.1:1", "metadata": "http://127.0.0.1:2/metadata"}}
    code, lines = check(tmp_path, capsys, {"object": {"url": "s3://bucket"}}, mooncake)
    assert code == 1
    assert lines == [
        f"{kind}: tiers[{at}].{kind}: expected the package {package}, which is not there: "
        f"in a checkout, pip install '.[{kind}]'"
        for at, (kind, package) in enumerate({"object": "obstore", "mooncake": "mooncake"}.items())
    ]


def test_a_folder_that_an_engine_has_is_said_to_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path / "kv", 8) as driver:
        driver.store(1, 2, 3)
        code, (line,) = check(tmp_path, capsys, disk(tmp_path / "kv"))
        assert code == 1
        assert "a process owns it" in line
        assert "puts" in line, "the disk itself works"
    code, _ = check(tmp_path, capsys, disk(tmp_path / "kv"))
    assert code == 0


def test_a_disk_without_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (line,) = check(tmp_path, capsys, {"disk": {"path": str(tmp_path / "kv"), "capacity": "900TiB"}})
    assert code == 1
    assert "expected room for 900.0 TiB more" in line


def test_without_tiers_there_is_nothing_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"cpu": {"capacity": "1MiB"}}')
    assert main(["tiers", "check", str(file)]) == 2
    assert "expected tiers, got none" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "0.5B", "1TiB"])
def test_a_row_size_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"cpu": {"capacity": "1MiB"}, "tiers": [disk(tmp_path / "kv")]}))
    assert main(["tiers", "check", str(file), "--row-size", size]) == 2
    assert "--row-size: expected" in capsys.readouterr().err


def test_rows_that_cannot_be_removed_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], server: ValkeyServer
) -> None:
    rights = ("~kvtier:*", "+set", "+get", "+exists", "+ping", "+select")
    assert server.say("ACL", "SETUSER", "kv", "on", ">hush", *rights) == b"+OK\r\n"
    password = tmp_path / "password"
    password.write_text("hush")
    url = server.url.replace("://", "://kv@")
    code, lines = check(tmp_path, capsys, {"valkey": {"url": url, "password_file": str(password)}})
    assert code == 1
    assert len(lines) == 1
    assert "rows that were put could not be removed" in lines[0]
    assert "NOPERM" in lines[0]
