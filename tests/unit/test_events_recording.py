"""Recordings: what was written is read again, a torn end is noticed and cut, damage is not passed on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import InputError, OutsideError
from kvtier.events.recording import MAGIC, RecordedBatch, RecordingReader, RecordingWriter

RECORDS = [
    RecordedBatch(1.5, 0, b"first"),
    RecordedBatch(2.5, 2**64 - 1, b"", "kv@pod"),
    RecordedBatch(2.75, 1, b"x" * 100_000, "thé"),
]


def write(path: Path, records: list[RecordedBatch]) -> None:
    with RecordingWriter(path) as writer:
        for record in records:
            writer.write(record)


def read(path: Path) -> tuple[list[RecordedBatch], int]:
    with RecordingReader(path) as reader:
        return list(reader), reader.torn


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stream.kvtevents"


def test_written_records_are_read_again(path: Path) -> None:
    write(path, RECORDS)
    assert read(path) == (RECORDS, 0)


def test_the_bytes_are_those_of_the_docstring(path: Path) -> None:
    write(path, [RecordedBatch(1.0, 7, b"\x90", "t")])
    body = "3ff0000000000000" + "0000000000000007" + "0001" + "74" + "90"
    assert path.read_bytes().hex() == MAGIC.hex() + "00000014" + "6311f075" + body


def test_a_second_writer_continues(path: Path) -> None:
    write(path, RECORDS[:2])
    with RecordingWriter(path) as writer:
        assert (writer.records, writer.cut) == (2, 0)
        writer.write(RECORDS[2])
    assert read(path) == (RECORDS, 0)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(min_value=1, max_value=8 + 18 + len(b"last batch") - 1))
def test_a_torn_end_is_noticed_and_cut(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "stream"
    write(path, [*RECORDS, RecordedBatch(3.0, 3, b"last batch")])
    os.truncate(path, path.stat().st_size - cut)
    torn = 8 + 18 + len(b"last batch") - cut
    assert read(path) == (RECORDS, torn)
    with RecordingWriter(path) as writer:
        assert (writer.records, writer.cut) == (3, torn)
        writer.write(RECORDS[0])
    assert read(path) == ([*RECORDS, RECORDS[0]], 0)


@pytest.mark.parametrize("size", range(len(MAGIC)))
def test_a_file_torn_in_its_magic_is_started_again(path: Path, size: int) -> None:
    path.write_bytes(MAGIC[:size])
    write(path, RECORDS)
    assert read(path) == (RECORDS, 0)


def test_damage_before_the_end_is_an_error(path: Path) -> None:
    write(path, RECORDS)
    data = bytearray(path.read_bytes())
    data[len(MAGIC) + 8 + 18] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged at byte 8: the checksum"):
        read(path)
    with pytest.raises(InputError, match="damaged at byte 8"):
        RecordingWriter(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("time", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_time_that_is_none_is_refused(path: Path, time: float) -> None:
    write(path, [RecordedBatch(time, 0, b"payload")])
    with pytest.raises(InputError, match="damaged at byte 8: the record there was not written by kvtier"):
        read(path)


def test_a_huge_length_takes_no_memory(path: Path) -> None:
    path.write_bytes(MAGIC + b"\xff" * 8 + b"x" * 100)
    assert read(path) == ([], 108)


@pytest.mark.parametrize("content", [b"hello world, not a recording", b"kvt?"])
def test_other_files_are_refused_and_not_touched(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a recording of events"):
        RecordingReader(path)
    with pytest.raises(InputError, match="not a recording of events"):
        RecordingWriter(path)
    assert path.read_bytes() == content


def test_a_missing_file_or_folder_is_one_line(path: Path) -> None:
    with pytest.raises(InputError, match="cannot be opened: No such file"):
        RecordingReader(path)
    with pytest.raises(InputError, match="cannot be opened: No such file"):
        RecordingWriter(path / "below")


def test_two_writers_exclude_each_other(path: Path) -> None:
    with RecordingWriter(path), pytest.raises(InputError, match="another process is recording to it"):
        RecordingWriter(path)
    write(path, RECORDS)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_an_outside_error() -> None:
    with pytest.raises(OutsideError, match="cannot be written: No space left"):
        RecordingWriter("/dev/full")


WRITE_UNTIL_KILLED = """
import sys
from kvtier.events.recording import RecordedBatch, RecordingWriter
with RecordingWriter(sys.argv[1]) as writer:
    for seq in range(10**9):
        writer.write(RecordedBatch(seq / 8, seq, seq.to_bytes(4, "big") * 50))
        if seq == 1000:
            print("going", flush=True)
"""


def test_a_killed_writer_loses_no_record_but_the_last(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        process.send_signal(signal.SIGKILL)
    records, _ = read(path)
    assert len(records) > 1000
    assert records == [
        RecordedBatch(seq / 8, seq, seq.to_bytes(4, "big") * 50) for seq in range(len(records))
    ]


def test_a_length_that_no_record_has_is_refused_before_it_is_read(path: Path) -> None:
    """A file with holes can say that a record of gigabytes is there, and take next to no room."""
    write(path, RECORDS[:1])
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write((3_200_000_000).to_bytes(4, "big") + bytes(4))
        file.truncate(3_300_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"a record of 3,200,000,000 bytes, expected at most 268,"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        path.unlink()
