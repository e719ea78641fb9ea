"""`kvtier disk`: real folders, spoilt and old, through the command line."""

from __future__ import annotations

import json
import os
import pty
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import xxhash
from tests.tiers.test_disk import opened, place_of

from kvtier.cli import main
from kvtier.errors import OutsideError
from kvtier.keys import OffloadKey
from kvtier.packing import name_rows
from kvtier.testing.tier_suite import ROW_BYTES, content, key
from kvtier.tiers.disk import DiskFiles, find_places
from kvtier.tiers.disk.files import OpenedFiles
from kvtier.tiers.disk.format import DiskHeader, pack_record
from kvtier.tiers.disk.inspect import check_place


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with opened(tmp_path / "kv", 8) as driver:
        driver.store(1, 2, 3)
    return tmp_path / "kv"


def flip(path: Path, slot: int) -> None:
    with (place_of(path) / "slots").open("r+b") as slots:
        slots.seek(slot * ROW_BYTES + 100)
        byte = slots.read(1)[0]
        slots.seek(slot * ROW_BYTES + 100)
        slots.write(bytes([byte ^ 4]))


def test_ls(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(path, 20, "another model"):
        assert main(["disk", "ls", str(path)]) == 0
        text = capsys.readouterr().out
        assert "model" in text
        assert "4.0 KiB" in text
        assert text.count("in use") == 2
    assert main(["disk", "ls", str(path), "--json"]) == 0
    first, second = sorted(json.loads(capsys.readouterr().out), key=lambda place: str(place["namespace"]))
    assert (first["namespace"], second["namespace"]) == ("another model", "model")
    assert (second["slots"], second["row_bytes"], second["rank"], second["in_use"]) == (
        8,
        ROW_BYTES,
        0,
        False,
    )
    assert second["bytes_on_disk"] > 8 * ROW_BYTES


def test_ls_shows_both_lengths_of_packed_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kv = tmp_path / "kv"
    for slots, namespace in ((8, "model 1x1x4096" + name_rows((True, False), 5120)), (20, "model 1x1x4096")):
        with opened(kv, slots, namespace):
            pass
    assert main(["disk", "ls", str(kv)]) == 0
    text = capsys.readouterr().out
    assert text.count("4.0 KiB (packed from 5.0 KiB)") == 1
    assert main(["disk", "ls", str(kv), "--json"]) == 0
    places = json.loads(capsys.readouterr().out)
    assert sorted((place["row_bytes"], place["raw_row_bytes"]) for place in places) == [
        (ROW_BYTES, ROW_BYTES),
        (ROW_BYTES, 5120),
    ]


def test_ls_of_another_version_and_a_damaged_header(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / "rank-0" / f"{'a' * 16}-4096-v7").mkdir()
    (place_of_first(path) / "records").write_bytes(bytes(10_000))
    assert main(["disk", "ls", str(path)]) == 0
    text = capsys.readouterr().out
    assert "version 7, not known here" in text
    assert "its header is damaged" in text


def place_of_first(path: Path) -> Path:
    return next(folder for folder in (path / "rank-0").iterdir() if folder.name.endswith("-v1"))


def test_check(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disk", "check", str(path)]) == 0
    assert "3 rows are whole, 0 are bad" in capsys.readouterr().out
    flip(path, 1)
    assert main(["disk", "check", str(path)]) == 1
    assert "2 rows are whole, 1 are bad" in capsys.readouterr().out
    assert main(["disk", "check", str(path), "--drop", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found == {"whole": 2, "bad": 1, "damaged_records": 0, "dropped": 1}
    assert main(["disk", "check", str(path)]) == 0
    with opened(path) as driver:
        held = [number for number in (1, 2, 3) if driver.tier.lookup(key(number))]
        assert len(held) == 2
        assert driver.fetch(*held) == {number: content(number) for number in held}


def test_check_shows_how_far_it_is(path: Path) -> None:
    """On a terminal, which stderr is here; what is printed for programs stays as it is."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvtier", "disk", "check", str(path), "--json"]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # EIO: the other side has closed it
            while piece := os.read(ours, 4096):
                shown += piece
        assert process.stdout is not None
        (found,) = json.loads(process.stdout.read()).values()
    os.close(ours)
    assert found["whole"] == 3
    assert str(place_of(path).relative_to(path)).encode() in shown
    assert b"3/3" in shown


def test_check_of_a_damaged_record(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (place_of(path) / "records").open("r+b") as records:
        records.seek(8192 + 128 + 40)
        records.write(b"?")
    assert main(["disk", "check", str(path)]) == 1
    assert "2 rows are whole, 0 are bad, 1 damaged records" in capsys.readouterr().out
    assert main(["disk", "check", str(path), "--drop"]) == 0
    assert "1 damaged records; dropped 1" in capsys.readouterr().out
    assert main(["disk", "check", str(path)]) == 0
    assert "2 rows are whole, 0 are bad\n" in capsys.readouterr().out


def test_check_makes_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slots = place_of(path) / "slots"
    slots.unlink()
    assert main(["disk", "check", str(path)]) == 1
    assert "cannot be opened: slots: No such file or directory" in capsys.readouterr().out
    assert not slots.exists()


def test_ls_beside_links_to_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place_of(path) / "dangling").symlink_to(path / "nothing")
    (place_of(path) / "loop").symlink_to("loop")
    assert main(["disk", "ls", str(path)]) == 0
    assert "4.0 KiB" in capsys.readouterr().out


def test_ls_of_a_folder_that_is_no_tiers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (path / "rank-0", path.parent):
        assert main(["disk", "ls", str(wrong)]) == 2
        assert f"{wrong}: expected the folder that a disk tier's `path` names" in capsys.readouterr().err
    (path.parent / "empty").mkdir()
    assert main(["disk", "ls", str(path.parent / "empty")]) == 0
    assert "no places" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["disk", "ls"], ["disk", "check"], ["disk", "gc", "--all"], ["doctor", "--disk"]],
    ids=" ".join,
)
def test_no_path_is_not_the_current_folder(
    arguments: list[str],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards who has an empty variable in a script: `gc --all` removed what was in the current folder."""
    monkeypatch.chdir(path)
    assert main([*arguments, ""]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert "expected the path of a folder, got ''" in " ".join(errors.split())
    assert place_of(path).is_dir()


def test_check_of_what_is_in_use(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(path):
        assert main(["disk", "check", str(path)]) == 1
    assert "expected to be its only owner" in capsys.readouterr().out


def test_gc_removes_what_is_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(path, 20, "another model") as driver:
        driver.store(1)
    old = place_of_first(path)
    places = sorted(
        str(folder.relative_to(path)) for folder in (path / "rank-0").iterdir() if folder.is_dir()
    )
    assert main(["disk", "gc", str(path)]) == 2
    error = capsys.readouterr().err
    assert "expected places to remove" in error
    assert all(place in error for place in places)
    assert main(["disk", "gc", str(path), "rank-0/nothing"]) == 2
    assert old.exists(), "nothing is removed unless asked for"
    capsys.readouterr()
    assert main(["disk", "gc", str(path), str(old.relative_to(path)), "--json"]) == 0
    (removed,) = json.loads(capsys.readouterr().out)
    assert removed["place"] == str(old.relative_to(path))
    assert not old.exists()
    assert len(list((path / "rank-0").iterdir())) == 2, "the lock and the other model's rows"


def test_gc_by_age(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = place_of(path)
    assert main(["disk", "gc", str(path), "--older-than", "1h"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    for file in place.iterdir():
        os.utime(file, (1, 1))
    assert main(["disk", "gc", str(path), "--older-than", "1h"]) == 0
    assert not place.exists()


def test_gc_leaves_what_is_in_use(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(path) as driver:
        assert main(["disk", "gc", str(path), "--all"]) == 0
        assert capsys.readouterr().out == "nothing to remove\n"
        name = str(place_of(path).relative_to(path))
        assert main(["disk", "gc", str(path), name]) == 1
        assert driver.fetch(1) == {1: content(1)}
    assert main(["disk", "gc", str(path), "--all"]) == 0
    assert list((path / "rank-0").iterdir()) == [path / "rank-0" / "lock"]


@pytest.mark.parametrize("command", ["ls", "check", "gc"])
def test_a_folder_that_is_none(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disk", command, str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "expected the folder of a disk tier: No such file or directory" in error
    assert not (tmp_path / "nowhere").exists()


# Damage


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["records", "descriptions", "slots", "../lock"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda file: os.symlink("/dev/zero", file)])
def test_no_command_waits_for_a_file_that_is_none(
    path: Path, name: str, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """`ls` and `check` opened a pipe and waited for somebody to write into it."""
    place = place_of(path)
    (place / name).unlink()
    make(place / name)
    assert main(["disk", "ls", str(path)]) == 0
    assert main(["disk", "check", str(path)]) == 1
    output, errors = capsys.readouterr()
    assert place.name in output
    assert errors == ""
    if name == "../lock" and make is os.mkfifo:
        assert main(["doctor", "--disk", str(path)]) in (0, 1)
    assert main(["disk", "gc", str(path), "--all"]) == (1 if name == "../lock" else 0)
    assert place.exists() == (name == "../lock")


def write_header(records: Path, **changes: object) -> None:
    """Write a header with these values and a right checksum to both pages."""
    content = records.read_bytes()
    length = int.from_bytes(content[16:20], "little")
    values = json.loads(content[20 : 20 + length]) | changes
    body = json.dumps(values).encode()
    rest = len(body).to_bytes(4, "little") + body.ljust(4076, b"\0")[:4076]
    page = content[:8] + xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest
    records.write_bytes(page * 2 + content[8192:])


ABSURD = [-1, 0, 1, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 64, 10**300, -(10**300)]


@pytest.mark.parametrize("field", ["row_bytes", "stride", "slots", "description_bytes", "epoch", "sequence"])
def test_absurd_numbers_in_a_header_are_a_line(
    path: Path, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` ended with a traceback, or took memory for as many slots as the header said."""
    records = place_of(path) / "records"
    for number in ABSURD:
        write_header(records, **{field: number})
        for command in ("ls", "check"):
            assert main(["disk", command, str(path)]) in (0, 1)
            output, errors = capsys.readouterr()
            assert errors == ""
            assert output.count("\n") == (2 if command == "ls" else 1)


def test_a_place_too_large_for_the_memory_is_a_line_of_its_own(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` said `not enough memory`, neither for which place nor anything about the others."""
    with opened(path, 24, "other") as driver:
        driver.store(1)
    first, second = (place.folder for place in find_places(path))
    open_again = DiskFiles.open_again

    def open_one(folder: Path, header: DiskHeader) -> OpenedFiles:
        if folder == first:
            raise MemoryError
        return open_again(folder, header)

    monkeypatch.setattr(DiskFiles, "open_again", open_one)
    assert main(["disk", "check", str(path)]) == 1
    one, other = capsys.readouterr().out.splitlines()
    assert first.name in one
    assert "cannot be checked: not enough memory" in one
    assert second.name in other
    assert "rows are whole" in other


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_no_damage_is_more_than_a_line(path: Path, seed: int) -> None:
    """Headers and records of random bytes, 2,000 in all: no other exception, no hang, little memory."""
    place, source = place_of(path), random.Random(seed)
    whole = {name: (place / name).read_bytes() for name in ("records", "descriptions", "slots")}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(500):
        damage(place / "records", whole["records"], source)
        name = source.choice(list(whole))
        if source.random() < 0.3:
            os.truncate(place / name, source.choice([0, 1, 4096, 8192, 10_000, len(whole[name]) // 2]))
        for found in find_places(path):
            _name = (found.used_at, found.is_removed, found.taken)
            with suppress(OutsideError):
                check_place(found, drop=source.random() < 0.2)
        for name, content_of in whole.items():
            (place / name).write_bytes(content_of)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 64 << 10, "KiB"


def damage(records: Path, whole: bytes, source: random.Random) -> None:
    """Change some bytes, or some values of the header with a right checksum, or a record with one."""
    content_of = bytearray(whole)
    for _ in range(source.choice([0, 1, 1, 8, 200])):
        content_of[source.randrange(source.choice([300, len(content_of)]))] = source.randrange(256)
    if source.random() < 0.5:  # a record with a right checksum and any length
        slot, length = source.randrange(8), source.choice([0, 1, 4097, 1 << 40, (1 << 64) - 1])
        scope = int.from_bytes(whole[8192 + 8 : 8192 + 16], "little")
        key_of = source.randbytes(source.choice([0, 1, 36, 64]))
        record = pack_record(slot, OffloadKey(key_of), source.randbytes(16), length, scope, -1)
        content_of[8192 + slot * 128 : 8192 + slot * 128 + 128] = record
    records.write_bytes(content_of)
    if source.random() < 0.5:
        records.write_bytes(whole[:8192] + content_of[8192:])
        fields = ["row_bytes", "stride", "slots", "description_bytes", "epoch", "sequence", "version"]
        odd: list[object] = [*ABSURD, None, "x", [], [[[]] * 9], 0.5, {"a": 1e300}, 4096, 8]
        names = source.sample(
            [*fields, "prices", "written", "namespace", "unknown"], source.choice([1, 2, 4])
        )
        write_header(records, **{name: source.choice(odd) for name in names})


def test_deep_headers_and_odd_times(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = place_of(path) / "records"
    nested: list[object] = []
    for _ in range(900):
        nested = [nested]
    write_header(records, unknown=nested)
    os.utime(records, ns=(0, 9_000_000_000 * 10**9))
    assert main(["disk", "ls", str(path)]) == 0
    write_header(records, namespace="\x1b[31mred\nmodel")
    assert main(["disk", "ls", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
