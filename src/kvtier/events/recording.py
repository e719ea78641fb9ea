"""Recorded event streams: a file of batches as they were received, for any number of readers.

    file    magic "kvtevts1" (the last character is the version), then records
    record  length of the body u32 . CRC-32 of the body u32 . body
    body    time of receipt f64 . sequence number u64 . length of the topic u16 . topic . payload

Numbers are big-endian, as on the wire. A record without a payload tells readers to forget everything before
it. Each record is written by one call, so a killed writer leaves at most one torn record, at the end.
Readers stop before it and report it; the next writer cuts it off. Damage anywhere else is an `InputError`. A
payload has at most 256 MiB, as does a message that a subscriber accepts, so a reader needs no more memory
than that, even for a damaged file. A file has one writer at a time, enforced by `flock`. A writer or reader
belongs to one thread.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from msgspec.structs import astuple

from kvtier.errors import InputError, OutsideError
from kvtier.events.wire import DecodedBatch, decode_batch

MAGIC = b"kvtevts1"
_HEAD = struct.Struct(">II")
_BODY = struct.Struct(">dQH")
_MAX_PAYLOAD = 256 << 20
_MAX_BODY = _BODY.size + 0xFFFF + _MAX_PAYLOAD
_END_OF_TIME = 253_402_300_800.0  # the year 10000, which clocks do not show


class RecordedBatch(NamedTuple):
    """A batch as it was received. An empty payload marks the moment when everything before was forgotten."""

    time: float
    seq: int
    payload: bytes
    topic: str = ""


class KeptBatch(DecodedBatch):
    """A batch with its original bytes; a subscriber that records decodes with `KeptBatch.read`."""

    payload: bytes = b""

    @classmethod
    def read(cls, payload: bytes) -> Self:
        """Read a batch; `ValueError` if the payload is not one."""
        fields: tuple[Any, ...] = (*astuple(decode_batch(payload)), payload)
        return cls(*fields)


class RecordingReader:
    """Reads a recording. Iterate once; `torn` is then the size of an incomplete last record, or 0."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file; `InputError` if it is not a recording."""
        self.path = Path(path)
        self.torn = 0
        with _opening(self.path):
            self._file = self.path.open("rb")
        self._size = os.fstat(self._file.fileno()).st_size
        if (magic := self._file.read(len(MAGIC))) != MAGIC:
            self._file.close()
            raise InputError(
                f"{self.path}: not a recording of events: expected {MAGIC!r} at its start, got {magic!r}"
            )

    @property
    def end(self) -> int:
        """The end of the last whole record, once all were read."""
        return self._size - self.torn

    def __iter__(self) -> Iterator[RecordedBatch]:
        start = len(MAGIC)
        while start < self._size and (record := self._record(start)) is not None:
            yield record
            start = self._file.tell()
        self.torn = self._size - start

    def _record(self, start: int) -> RecordedBatch | None:
        """Return the record at `start`, or `None` if it is torn."""
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        length, checksum = _HEAD.unpack(head)
        end = start + _HEAD.size + length
        if end > self._size:
            return None
        if length > _MAX_BODY:
            raise self._damage(start, f"a record of {length:,} bytes, expected at most {_MAX_BODY:,}")
        fixed = self._file.read(min(length, _BODY.size))
        time, seq, topic_length = _BODY.unpack(fixed) if len(fixed) == _BODY.size else (-1.0, 0, 0)
        topic = self._file.read(min(topic_length, length - len(fixed)))
        payload = self._file.read(length - len(fixed) - len(topic))
        if zlib.crc32(payload, zlib.crc32(topic, zlib.crc32(fixed))) != checksum or len(fixed) < _BODY.size:
            if end == self._size:
                return None
            raise self._damage(start, "the checksum of the record there does not fit")
        if not 0 <= time < _END_OF_TIME or len(topic) < topic_length:
            raise self._damage(start, "the record there was not written by kvtier")
        return RecordedBatch(time, seq, payload, topic.decode(errors="replace"))

    def _damage(self, start: int, what: str) -> InputError:
        return InputError(f"{self.path}: damaged at byte {start}: {what}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RecordingWriter:
    """Appends to a recording.

    `records` counts its records; `cut` is the size of a torn record cut off at opening.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open or make the file. It is read once, so that nothing is appended to a damaged file."""
        self.path = Path(path)
        self.records = self.cut = 0
        with _opening(self.path):
            # Unbuffered: a record is then one system call, and a kill can tear only the last one.
            self._file = self.path.open("ab", buffering=0)
        try:
            self._lock()
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{self.path}: another process is recording to it; name another file") from None

    def _resume(self) -> None:
        if (size := os.fstat(self._file.fileno()).st_size) < len(MAGIC):
            self._start(size)
            return
        with RecordingReader(self.path) as reader:
            self.records = sum(1 for _ in reader)
            self.cut = reader.torn
        os.ftruncate(self._file.fileno(), reader.end)

    def _start(self, size: int) -> None:
        """Write the magic; its first `size` bytes may be there already."""
        with self.path.open("rb") as file:
            if file.read(size) != MAGIC[:size]:
                raise InputError(f"{self.path}: not a recording of events, and not empty")
        self._write(MAGIC[size:])

    def write(self, record: RecordedBatch) -> None:
        """Append a record.

        If the disk is full, raise `OutsideError` and leave the file without the record.
        """
        topic = record.topic.encode()
        if len(record.payload) > _MAX_PAYLOAD:
            raise InputError(
                f"{self.path}: a batch of {len(record.payload):,} bytes, expected at most {_MAX_PAYLOAD:,}"
            )
        body = b"".join((_BODY.pack(record.time, record.seq, len(topic)), topic, record.payload))
        self._write(_HEAD.pack(len(body), zlib.crc32(body)) + body)
        self.records += 1

    def _write(self, data: bytes) -> None:
        start = os.fstat(self._file.fileno()).st_size
        try:
            done = self._file.write(data)
        except OSError as error:
            raise OutsideError(f"{self.path}: cannot be written: {error.strerror}") from error
        if done != len(data):
            os.ftruncate(self._file.fileno(), start)
            raise OutsideError(
                f"{self.path}: only {done} of {len(data)} bytes could be written: the disk is full"
            )

    def close(self) -> None:
        """Close the file and let others write to it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be opened: {error.strerror}") from error
