"""`kvtier doctor` on the folder of a disk tier: real folders, good, bad, small and owned."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.test_disk import opened

from kvtier.cli import disk_checks, main
from kvtier.cli.checks import Check, Status
from kvtier.cli.disk_checks import examine_disk
from kvtier.config import format_size
from kvtier.file_systems import Mount
from kvtier.tiers.disk.folder import taken_bytes


@pytest.fixture(autouse=True)
def _no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_checks, "_MOST_BYTES", 4 << 20)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture(autouse=True)
def _on_a_disk(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Where tests run may be memory; only that is made up."""
    if "mount" not in request.fixturenames:
        monkeypatch.setattr(disk_checks, "find_mount", lambda path: Mount(Path("/"), "ext4", False))


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name.removeprefix("disk "): check for check in checks}


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def write_config(folder: Path, path: Path, capacity: str) -> str:
    file = folder / "kvtier.json"
    tiers = [{"disk": {"path": str(path), "capacity": capacity}}]
    file.write_text(json.dumps({"cpu": {"capacity": "1MiB"}, "tiers": tiers}))
    return str(file)


def test_a_good_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--config", write_config(tmp_path, tmp_path / "kv", "1MiB"))
    assert (code, found["usable"]) == (0, True)
    checks = {check["name"]: check for check in found["checks"] if check["name"].startswith("disk")}
    names = ["folder", "file system", "direct I/O", "space", "speed", "owner", "hash seed"]
    assert list(checks) == [f"disk {name}" for name in names]
    assert checks["disk folder"]["detail"].endswith("kv does not exist; an engine makes it")
    assert "GB/s read: 1 GiB of KV is read in" in checks["disk speed"]["detail"]
    assert checks["disk space"]["detail"].endswith("disk.capacity is 1.0 MiB")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvtier.json"], (
        "nothing was made, nothing is left"
    )
    assert main(["doctor", "--disk", str(tmp_path)]) == 0
    assert "kvtier can run here.\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_is_no_folder(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    code, found = doctor(capsys, "--disk", str(tmp_path / name))
    assert (code, found["usable"]) == (1, False)
    (failed,) = [check for check in found["checks"] if check["status"] == "fail"]
    assert failed["detail"] == f"{tmp_path / 'file'} is no folder"
    assert main(["doctor", "--disk", str(tmp_path / name)]) == 1
    assert "kvtier can run here, but not with this disk." in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_to() -> None:
    folder = examine_disk(Path("/sys/kernel/kv"))[0]
    assert folder.status is Status.FAIL
    assert folder.detail.startswith("/sys/kernel cannot be written to: ")
    assert folder.hint == "check its owner and how it is mounted"


def test_a_capacity_above_what_is_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--config", write_config(tmp_path, tmp_path / "kv", "1EiB"))
    (failed,) = [check for check in found["checks"] if check["status"] == "fail"]
    assert (code, failed["name"]) == (1, "disk space")
    assert failed["detail"].endswith("free; disk.capacity is 1.0 EiB")
    assert failed["hint"].startswith("lower disk.capacity to at most ")


def test_space_of_the_tier_counts_as_room(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", 64):
        pass
    (tmp_path / "kv" / "other").write_bytes(bytes(1 << 20))
    taken = by_name(examine_disk(tmp_path / "kv", 1 << 20))["space"].detail
    assert (
        f"{format_size(taken_bytes(tmp_path / 'kv' / 'rank-0'))} taken by the tier; disk.capacity is 1.0 MiB"
        in taken
    )


LIMITED = """
import json, sys
from pathlib import Path
from kvtier.cli import disk_checks
from kvtier.file_systems import Mount
disk_checks.find_mount = lambda path: Mount(Path("/"), "ext4", False)
print(json.dumps({check.name: check.detail for check in disk_checks.examine_disk(Path(sys.argv[1]))}))
"""


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """A limit of the process stands for a full disk: writes fail, and the line says so."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        check=True,
    )
    assert json.loads(done.stdout)["disk speed"] == f"could not be measured: {os.strerror(errno.EFBIG)}"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_checks.os, "open", refuse)
    (folder, _) = examine_disk(tmp_path)
    assert (folder.status, folder.hint) == (Status.FAIL, "make room")
    assert folder.detail == f"{tmp_path} cannot be written to: No space left on device"


def test_another_owner(tmp_path: Path) -> None:
    with opened(tmp_path):
        owner = by_name(examine_disk(tmp_path))["owner"]
        assert (owner.status, owner.detail) == (Status.WARN, "another process owns rank-0")
        assert "give each its own disk.path" in owner.hint
    assert by_name(examine_disk(tmp_path))["owner"] == Check("disk owner", Status.OK, "no process owns it")


def test_the_hash_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unset = by_name(examine_disk(tmp_path))["hash seed"]
    assert "nothing with xxhash" in unset.detail
    assert unset.hint.endswith("export PYTHONHASHSEED=0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert by_name(examine_disk(tmp_path))["hash seed"].hint == ""


@pytest.fixture
def mount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mount | None:
    found: Mount | None = request.param
    monkeypatch.setattr(disk_checks, "find_mount", lambda path: found)
    return found


@pytest.mark.parametrize(
    ("mount", "status", "words"),
    [
        (Mount(Path("/dev/shm"), "tmpfs", False), Status.FAIL, "its files are memory"),
        (Mount(Path("/data"), "ext4", True), Status.FAIL, "read-only"),
        (Mount(Path("/"), "overlay", False), Status.WARN, "a container's layer"),
        (Mount(Path("/net"), "nfs4", False), Status.WARN, "not a local disk"),
        (Mount(Path("/net"), "fuse.sshfs", False), Status.WARN, "not a local disk"),
        (Mount(Path("/data"), "xfs", False), Status.OK, "xfs, mounted at /data"),
        (None, Status.WARN, "does not say"),
    ],
    indirect=["mount"],
)
def test_file_systems(mount: Mount | None, status: Status, words: str, tmp_path: Path) -> None:
    checks = by_name(examine_disk(tmp_path))
    assert checks["file system"].status is status
    assert words in checks["file system"].detail
    assert bool(checks["file system"].hint) == (status is not Status.OK and mount is not None)
    assert ("speed" in checks) == (status is not Status.FAIL)


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EINVAL, "")

    monkeypatch.setattr(disk_checks.fcntl, "fcntl", refuse)
    checks = by_name(examine_disk(tmp_path))
    assert checks["direct I/O"].status is Status.WARN
    assert checks["direct I/O"].detail == "not here: the page cache is used"
    assert "GB/s read" in checks["speed"].detail


def test_settings_without_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kvtier.json"
    file.write_text('{"cpu": {"capacity": "1MiB"}}')
    code, found = doctor(capsys, "--config", str(file))
    assert (code, found["checks"][-1]["status"]) == (0, "missing")
    assert main(["doctor", "--config", str(tmp_path / "nowhere.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
