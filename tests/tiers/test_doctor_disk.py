"""`kvtier doctor` on the folder of a disk tier: real folders, good, bad, small and owned.

It runs the check of `kvtier tiers check`, so these are tests of that check of a folder, too.
"""

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

from kvtier.cli import main
from kvtier.cli import tiers as tiers_check
from kvtier.config import CPUConfig, DiskConfig, KVTierConfig
from kvtier.machine import Mount


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may be slow; only the test of the warning makes a disk slow."""
    monkeypatch.setattr(tiers_check, "_SLOW", 0.0)


@pytest.fixture(autouse=True)
def _on_a_disk(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Where tests run may be memory; only that is made up."""
    if "mount" not in request.fixturenames:
        monkeypatch.setattr(tiers_check, "find_mount", lambda path: Mount(Path("/"), "ext4", False))


def check(path: Path, capacity: int = 1 << 20) -> tiers_check.TierCheck:
    tiers = (DiskConfig(path=str(path), capacity=capacity),)
    (found,) = tiers_check.check_tiers(KVTierConfig(cpu=CPUConfig(capacity=0), tiers=tiers), 4, 4096)
    return found


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the doctor; return its exit code and its line about the disk."""
    code = main(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] == (code == 0)
    (line,) = [line for line in found["checks"] if line["name"] == "disk tier"]
    return code, line


def write_config(folder: Path, path: Path, capacity: str) -> str:
    file = folder / "kvtier.json"
    tiers = [{"disk": {"path": str(path), "capacity": capacity}}]
    file.write_text(json.dumps({"cpu": {"capacity": "1MiB"}, "tiers": tiers}))
    return str(file)


def test_a_good_folder_is_measured_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = doctor(capsys, "--config", write_config(tmp_path, tmp_path / "kv" / "below", "1MiB"))
    assert (code, line["status"]) == (0, "ok")
    assert line["detail"].startswith("opens in ")
    assert "/s, gets " in line["detail"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvtier.json"]
    assert main(["doctor", "--disk", str(tmp_path)]) == 0
    assert "kvtier can run here.\n" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvtier.json"]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_is_no_folder(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    code, line = doctor(capsys, "--disk", str(tmp_path / name))
    assert (code, line["status"]) == (1, "fail")
    assert line["detail"] == f"{tmp_path / 'file'} is no folder; choose another disk.path"
    assert main(["doctor", "--disk", str(tmp_path / name)]) == 1
    assert "kvtier can run here, but not with these tiers." in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_to_is_a_problem() -> None:
    problem = check(Path("/sys/kernel/kv")).problem
    assert problem is not None
    assert problem.startswith("/sys/kernel cannot be written to: ")


def test_a_capacity_above_the_free_space_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = doctor(capsys, "--config", write_config(tmp_path, tmp_path / "kv", "1EiB"))
    assert (code, line["status"]) == (1, "fail")
    assert f"{tmp_path / 'kv'}: expected room for 1.0 EiB more, found " in line["detail"]


def test_space_that_the_tier_has_taken_counts_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "kv", 64):
        pass
    monkeypatch.setattr(tiers_check.shutil, "disk_usage", lambda path: type("", (), {"free": 4096}))
    taken = sum(place.taken for place in tiers_check.find_places(tmp_path / "kv"))
    assert taken > 0
    assert check(tmp_path / "kv", taken + 4096).problem is None
    problem = check(tmp_path / "kv", taken + (1 << 20)).problem
    assert problem == f"{tmp_path / 'kv'}: expected room for 1.0 MiB more, found 4.0 KiB"


LIMITED = """
import sys
from pathlib import Path
from kvtier.cli import tiers as module
from kvtier.config import CPUConfig, DiskConfig, KVTierConfig
from kvtier.machine import Mount
module.find_mount = lambda path: Mount(Path("/"), "ext4", False)
tiers = (DiskConfig(path=sys.argv[1], capacity=1 << 20),)
(found,) = module.check_tiers(KVTierConfig(cpu=CPUConfig(capacity=0), tiers=tiers), 4, 4096)
print(found.problem)
"""


def test_a_disk_that_takes_no_more_is_a_problem(tmp_path: Path) -> None:
    """A limit of the process stands for a full disk: files cannot grow, and the line says so."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        check=True,
    )
    assert os.strerror(errno.EFBIG) in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tiers_check.tempfile, "mkdtemp", refuse)
    assert check(tmp_path).problem == f"{tmp_path} cannot be written to: No space left on device"


def test_a_folder_with_an_owner_is_a_problem(tmp_path: Path) -> None:
    with opened(tmp_path):
        assert (
            check(tmp_path).problem
            == f"{tmp_path}: a process owns it; another engine would run without this tier"
        )
    assert check(tmp_path).problem is None


@pytest.fixture
def mount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mount | None:
    found: Mount | None = request.param
    monkeypatch.setattr(tiers_check, "find_mount", lambda path: found)
    return found


@pytest.mark.parametrize(
    ("mount", "problem", "warning"),
    [
        (Mount(Path("/dev/shm"), "tmpfs", False), "is on tmpfs: its files are memory", None),
        (Mount(Path("/"), "overlay", False), None, "a container's layer"),
        (Mount(Path("/net"), "nfs4", False), None, "not a local disk"),
        (Mount(Path("/net"), "fuse.sshfs", False), None, "not a local disk"),
        (Mount(Path("/data"), "xfs", False), None, None),
        (None, None, None),
    ],
    indirect=["mount"],
)
def test_unsuitable_file_systems_are_named(
    mount: Mount | None, problem: str | None, warning: str | None, tmp_path: Path
) -> None:
    found = check(tmp_path)
    assert (found.problem is None, found.warning is None) == (problem is None, warning is None)
    assert (problem or "") in (found.problem or "")
    assert (warning or "") in (found.warning or "")


@pytest.mark.parametrize("mount", [Mount(Path("/"), "overlay", False)], indirect=True)
def test_a_warning_does_not_fail_the_doctor(
    mount: Mount, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = doctor(capsys, "--disk", str(tmp_path))
    assert (code, line["status"]) == (0, "warn")
    assert "; but its file system is overlay" in line["detail"]


def test_a_file_system_without_direct_io_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    found = check(tmp_path)
    assert found.problem is None
    assert found.warning == "its file system has no direct I/O, so that rows take memory and CPU twice"


def test_a_slow_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_check, "_SLOW", 1e18)
    assert "most GPUs compute KV faster" in str(check(tmp_path).warning)


def test_settings_without_tiers_have_nothing_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvtier.json"
    file.write_text('{"cpu": {"capacity": "1MiB"}}')
    assert main(["doctor", "--json", "--config", str(file)]) == 0
    last = json.loads(capsys.readouterr().out)["checks"][-1]
    assert (last["name"], last["status"]) == ("tiers", "missing")
    assert main(["doctor", "--config", str(tmp_path / "nowhere.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
