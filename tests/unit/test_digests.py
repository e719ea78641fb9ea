"""Digests of files: known from a hub's cache, remembered, or computed; and never those of
another content.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier import digests as module
from kvtier import machine
from kvtier.digests import Digests, FileState, default_file, hub_digest
from kvtier.errors import OutsideError

SHA = hashlib.sha256(b"weights").hexdigest()
LATER = 10**10


def later() -> int:
    """A clock by which files that were just written have been as they are for a while."""
    return time.time_ns() + LATER


def digest(path: Path, digests: Digests) -> str:
    return digests.of(path, FileState.of(path))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Where digests are remembered."""
    return tmp_path / "cache" / "kvtier" / "digests.json"


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make hashing fail, so that a digest that is given was known.

    Taking a file's permissions away would not stop root.
    """

    def refuse(*_: object) -> str:
        raise AssertionError("the content was read")

    monkeypatch.setattr(Digests, "_compute", refuse)


def hub_file(
    cache: Path, content: bytes, *, blob: str | None = None, name: str = "model.safetensors"
) -> Path:
    """Add a file to a cache as the hub's client does."""
    repository = cache / "models--org--name"
    stored = repository / "blobs" / (blob or hashlib.sha256(content).hexdigest())
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_bytes(content)
    path = repository / "snapshots" / ("c" * 40) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(stored, path.parent))
    return path


@pytest.fixture(params=["here", "in another process"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Hash small files, as they are, or as if they were large."""
    if request.param != "here":
        monkeypatch.setattr(module, "_SMALL", -1)
    return request.param


class TestComputed:
    @pytest.mark.parametrize("content", [b"", b"weights", bytes(range(256)) * 50_000])
    def test_is_the_sha256_of_the_content(self, file: Path, content: bytes, where: str) -> None:
        file.write_bytes(content)
        assert digest(file, Digests(None)) == hashlib.sha256(content).hexdigest()

    def test_the_other_process_gives_way(self, file: Path) -> None:
        """It says with which priority it has run."""
        code = (
            "import atexit, os, sys; atexit.register(lambda: print(os.nice(0))); "
            "from kvtier.file_hasher import main; "
        )
        with file.open("rb") as stream:
            command = [sys.executable, "-c", f"{code} main({os.getpid()})"]
            done = subprocess.run(command, stdin=stream, capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [SHA, str(min(os.nice(0) + 10, 19))]

    def test_the_other_process_ends_with_this_one(self) -> None:
        """Even if there is no end to what it reads.

        Its end is that of the output which it has from its parent.
        """
        code = f"""
import os, subprocess, sys
command = [sys.executable, {module.file_hasher.__file__!r}, str(os.getpid())]
subprocess.Popen(command, stdin=open("/dev/zero"))
os._exit(7)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (7, "", "")

    def test_another_process_that_fails_is_said(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_SMALL", -1)
        monkeypatch.setattr(module.file_hasher, "__file__", str(file))
        with pytest.raises(OutsideError, match=r"model\.bin: expected .*: hashing failed \(NameError: .*\)"):
            digest(file, Digests(None))
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(OutsideError, match="No such file"):
            digest(file, Digests(None))

    def test_a_file_that_has_changed_is_refused(self, file: Path) -> None:
        state = FileState.of(file)
        file.write_bytes(b"WEIGHTS!")
        with pytest.raises(
            OutsideError, match=r"model\.bin: expected to read what was there .*: it has changed"
        ):
            Digests(None).of(file, state)

    def test_a_file_that_changes_while_it_is_read_is_refused(
        self, file: Path, where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And it is not remembered."""
        name = "sha256" if where == "here" else "_hash_elsewhere"
        real, cache = getattr(module, name), file.parent / "digests.json"

        def hash_and_change(what: Any) -> Any:
            with file.open("ab") as stream:
                stream.write(b"more")
            return real(what)

        monkeypatch.setattr(module, name, hash_and_change)
        with pytest.raises(OutsideError, match="it has changed"):
            digest(file, Digests(cache, later))
        assert not cache.exists()

    def test_a_file_that_may_not_be_read_is_refused(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Root may read everything, so that no file's mode makes this happen everywhere."""

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(OutsideError, match=r"model\.bin: expected .*: Permission denied"):
            digest(file, Digests(None))

    def test_a_file_that_is_gone_or_none_is_refused(self, file: Path) -> None:
        state = FileState.of(file)
        file.unlink()
        with pytest.raises(OutsideError, match=r"model\.bin: expected .*: No such file"):
            Digests(None).of(file, state)
        os.mkfifo(file)
        with pytest.raises(OutsideError, match=r"model\.bin: expected .*: not a regular file"):
            Digests(None).of(file, state)


class TestRemembered:
    @pytest.fixture(autouse=True)
    def disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the folder of the tests for one on a disk, whatever it is."""
        monkeypatch.setattr(machine, "_MOUNTS", tmp_path / "no such file")

    def test_nothing_is_read_again(self, file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert digest(file, Digests(memory, later)) == SHA
        forbid_reading(monkeypatch)
        assert digest(file, Digests(memory)) == SHA
        link = file.with_name("link.bin")
        link.symlink_to(file)
        assert digest(link, Digests(memory)) == SHA

    def test_nor_by_another_process(self, file: Path, memory: Path) -> None:
        digest(file, Digests(memory, later))
        code = f"""
from pathlib import Path
from kvtier.digests import Digests, FileState
Digests._compute = None
path = Path({str(file)!r})
print(Digests(Path({str(memory)!r})).of(path, FileState.of(path)))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.stdout.strip(), done.stderr) == (SHA, "")

    def test_a_change_that_keeps_size_and_mtime_is_seen(self, file: Path, memory: Path) -> None:
        """It cannot keep ctime; in the place of the file, it cannot keep the inode."""
        digest(file, Digests(memory, later))
        before = file.stat()
        while file.stat().st_ctime_ns == before.st_ctime_ns:  # within one tick of the file system's clock
            file.write_bytes(b"WEIGHTS")
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert digest(file, Digests(memory, later)) == hashlib.sha256(b"WEIGHTS").hexdigest()

    def test_a_file_put_in_its_place_is_seen(self, file: Path, memory: Path) -> None:
        digest(file, Digests(memory, later))
        other = file.with_name("other")
        other.write_bytes(b"WEIGHTS")
        os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        other.replace(file)
        assert digest(file, Digests(memory, later)) == hashlib.sha256(b"WEIGHTS").hexdigest()

    @pytest.mark.parametrize("field", range(4))
    def test_every_part_of_the_state_counts(self, file: Path, memory: Path, field: int) -> None:
        digest(file, Digests(memory, later))
        content = json.loads(memory.read_text())
        content["files"][str(file)][field] += 1
        content["files"][str(file)][4] = "0" * 64
        memory.write_text(json.dumps(content))
        assert digest(file, Digests(memory)) == SHA

    def test_a_file_that_has_just_changed_is_not_remembered(self, file: Path, memory: Path) -> None:
        """A second change could have the same ctime."""
        clock = FileState.of(file).ctime_ns
        digest(file, Digests(memory, lambda: clock + 10**6))
        assert not memory.exists()

    def test_the_format(self, file: Path, memory: Path) -> None:
        """docs/formats.md describes it."""
        digest(file, Digests(memory, later))
        found = file.stat()
        state = [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
        assert json.loads(memory.read_text()) == {"version": 1, "files": {str(file): [*state, SHA]}}
        assert memory.stat().st_mode & 0o777 == 0o600
        assert [path.name for path in memory.parent.iterdir()] == ["digests.json"]

    def test_entries_of_other_processes_stay(self, file: Path, memory: Path) -> None:
        mine, theirs = Digests(memory, later), Digests(memory, later)
        other = file.with_name("other.bin")
        other.write_bytes(b"other")
        digest(file, mine)
        digest(other, theirs)
        digest(file, mine)
        assert set(json.loads(memory.read_text())["files"]) == {str(file), str(other)}

    def test_it_does_not_grow_for_ever(
        self, file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_MOST_ENTRIES", 2)
        files = [file.with_name(f"{number}.bin") for number in range(3)]
        for path in files:
            path.write_bytes(b"weights")
            digest(path, Digests(memory, later))
        assert list(json.loads(memory.read_text())["files"]) == [str(path) for path in files[1:]]

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"\xff\xfe",
            b"[]",
            b'{"files": {}}',
            b'{"version": 2, "files": {}}',
            b'{"version": 1, "files": {"x": 1}}',
        ],
    )
    def test_a_corrupt_file_is_said_and_replaced(
        self, file: Path, memory: Path, content: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        memory.parent.mkdir(parents=True)
        memory.write_bytes(content)
        assert digest(file, Digests(memory, later)) == SHA
        assert {(record.levelno, record.name) for record in caplog.records} == {
            (logging.WARNING, "kvtier.digests")
        }
        assert "digests.json: expected digests of files" in caplog.text
        assert list(json.loads(memory.read_text())["files"]) == [str(file)]

    def test_a_folder_that_cannot_be_written_is_said(
        self, file: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert digest(file, Digests(file / "digests.json", later)) == SHA
        assert "digests.json: expected to write digests" in caplog.text

    def test_a_path_that_is_not_utf_8_is_not_remembered(
        self, tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It raised, although the digest was known by then. JSON has no such strings."""
        folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff"))
        folder.mkdir()
        (folder / "model.bin").write_bytes(b"weights")
        assert digest(folder / "model.bin", Digests(memory, later)) == SHA
        assert not memory.exists()
        assert caplog.text == ""

    def test_the_file_is_in_the_cache_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert default_file() == Path("/somewhere/kvtier/digests.json")
        monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
        monkeypatch.setenv("HOME", "/home/me")
        assert default_file() == Path("/home/me/.cache/kvtier/digests.json")


class TestMapped:
    """Files that are written through a mapping, as `np.memmap` and `torch.from_file` do."""

    @pytest.mark.parametrize("base", [None, "/dev/shm"])
    def test_a_later_change_is_seen(self, base: str | None, tmp_path: Path, memory: Path) -> None:
        """In memory it moves no times; on a disk, only the first change of a page since it was
        written back.
        """
        if base is not None and not os.path.isdir(base):
            pytest.skip(f"there is no {base}")
        with tempfile.TemporaryDirectory(dir=base or tmp_path) as folder:
            file = Path(folder, "model.bin")
            file.write_bytes(bytes(1 << 16))
            with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
                mapped[5] = 1
                assert digest(file, Digests(memory, later)) == hashlib.sha256(mapped).hexdigest()
                wait_for_a_tick(file)
                mapped[5] = 2
                assert digest(file, Digests(memory, later)) == hashlib.sha256(mapped).hexdigest()

    @pytest.mark.parametrize(
        ("kind", "kept"), [("tmpfs", False), ("ramfs", False), ("ext4", True), ("nfs4", True)]
    )
    def test_nothing_in_memory_is_remembered(
        self, kind: str, kept: bool, file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device = file.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        mounts = f"""\
1 1 0:1000 / /dev/shm rw - tmpfs tmpfs rw
2 1 {number} / /mnt/a\\040-\\040b rw,relatime shared:3 master:2 - {kind} - rw,size=4k
3 1 0:1001 / /ram rw - ramfs none rw
"""
        monkeypatch.setattr(machine, "_MOUNTS", file.with_name("mountinfo"))
        machine._MOUNTS.write_text(mounts)
        assert digest(file, Digests(memory, later)) == SHA
        assert memory.exists() is kept

    def test_a_system_that_cannot_write_back_is_no_reason_to_fail(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """File systems that are made only to be read say no."""

        def refuse(descriptor: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(os, "fsync", refuse)
        assert digest(file, Digests(None)) == SHA


def wait_for_a_tick(file: Path) -> None:
    """Return when a change of the file would have another time than its last one."""
    other = file.with_name("other")
    other.touch()
    while other.stat().st_mtime_ns <= file.stat().st_mtime_ns:
        os.utime(other)


class TestHub:
    def test_a_blob_is_known_by_its_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = hub_file(tmp_path, b"weights")
        forbid_reading(monkeypatch)
        assert digest(path, Digests(None)) == SHA
        assert digest(hub_file(tmp_path, b"weights", name="vision/model.safetensors"), Digests(None)) == SHA

    def test_small_files_are_named_by_something_else(self, tmp_path: Path) -> None:
        """Git's SHA-1. In a plain folder the same content would have another name."""
        path = hub_file(tmp_path, b"weights", blob="a" * 40, name="config.json")
        assert hub_digest(path) is None
        assert digest(path, Digests(None)) == SHA

    def test_a_name_alone_is_not_believed(self, tmp_path: Path) -> None:
        """Whatever is not exactly a hub's cache is read."""
        named, lie = "b" * 64, tmp_path / "models--org--lie"
        for folder in (
            lie / "blobs",
            lie / "snapshots" / "c",
            tmp_path / "blobs",
            tmp_path / "snapshots" / "c",
        ):
            folder.mkdir(parents=True)
        for blob in (lie / "blobs" / named, tmp_path / "blobs" / named, tmp_path / named):
            blob.write_bytes(b"weights")
        (lie / "blobs" / ("d" * 64)).symlink_to(tmp_path / named)
        links = {
            tmp_path / "snapshots" / "c" / "1.bin": tmp_path / "blobs" / named,
            tmp_path / "2.bin": lie / "blobs" / named,
            lie / "snapshots" / "c" / "3.bin": tmp_path / "blobs" / named,
            lie / "snapshots" / "c" / "4.bin": lie / "blobs" / ("d" * 64),
            lie / "5.bin": lie / "blobs" / named,
        }
        for link, target in links.items():
            link.symlink_to(target)
            assert hub_digest(link) is None, link
            assert digest(link, Digests(None)) == SHA
        replaced = lie / "snapshots" / "c" / "6.bin"
        replaced.write_bytes(b"weights")
        assert hub_digest(replaced) is None

    def test_a_linked_folder_is_seen_where_it_is(self, tmp_path: Path) -> None:
        """Else `../../../blobs` of another folder would be taken for the cache's own."""
        snapshot = hub_file(tmp_path, b"weights").parent
        elsewhere = tmp_path / "a" / "b" / "c"
        elsewhere.mkdir(parents=True)
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / SHA).write_bytes(b"other")
        (elsewhere / "model.bin").symlink_to(f"../../../blobs/{SHA}")
        (snapshot / "linked").symlink_to(elsewhere)
        assert (
            digest(snapshot / "linked" / "model.bin", Digests(None)) == hashlib.sha256(b"other").hexdigest()
        )
