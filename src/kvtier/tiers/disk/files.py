"""`DiskFiles`: the three files of a place, as a backend whose tier chooses the slot of each row.

Slots are `stride` bytes apart in one preallocated file. Reads and writes use direct I/O, past the page
cache; memory that is not aligned goes through a buffer, and a file system that refuses direct I/O is used
through its cache. To store a row into a slot: 1. empty the record, 2. write the row, 3. write its
description, 4. write the record with the seal. If the process is killed in between, the slot is empty;
after a power cut any of it may be missing, and the seal decides. No file is deleted or grown later: all
space is taken at opening.

Everything blocks; several I/O threads at once, on different slots.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import shlex
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.config import ROW_ALIGNMENT, format_size
from kvtier.errors import OutsideError
from kvtier.keys import OffloadKey
from kvtier.tiers.base import Backend, BackendRow
from kvtier.tiers.disk.folder import (
    DESCRIPTIONS,
    RECORDS,
    SLOTS,
    find_rank_places,
    learnt_bytes,
    open_file,
    place_name,
    reserve_learnt,
    taken_bytes,
)
from kvtier.tiers.disk.format import (
    EMPTY,
    HEADER_BYTES,
    MOST_KEY_BYTES,
    PAGE_BYTES,
    RECORD_BYTES,
    TICK,
    VERSION,
    DiskHeader,
    FoundRecords,
    description_stride,
    pack_description,
    pack_header,
    pack_record,
    read_description,
    read_header,
    read_records,
)
from kvtier.tiers.seal import SEAL_BYTES, SealScope, copy_into, copy_out

logger = logging.getLogger(__name__)

_READ_AT_ONCE = 64 << 20
_LONGEST_RUN = 64
"""Rows in one call; the system takes up to 1,024 pieces of memory."""
_TICK_AT = RECORD_BYTES - TICK.size
_REGION = 512
"""Records rewritten at once when many last uses have changed: 64 KiB."""
_SINGLE_TICKS = 8
"""Up to so many last uses of a region are written one by one: that is faster than rewriting the region."""


class PlaceRefused(OutsideError):
    """Something has to be removed from the folder before this place can be opened; the text says how."""


class OpenedFiles(NamedTuple):
    """The files of a place, and what they hold."""

    files: DiskFiles
    found: FoundRecords
    scope: SealScope


class DiskFiles(Backend):
    """The files of one place. `on_write_step` is called at each step of a write; tests kill us there."""

    def __init__(
        self, folder: Path, header: DiskHeader, descriptors: tuple[int, int, int], *, direct: bool
    ) -> None:
        self.folder, self.direct = folder, direct
        self.header = header
        self._records, self._descriptions, self._slots = self._descriptors = descriptors
        self._stride, self._described = header.stride, description_stride(header.description_bytes)
        # One entry per slot. Memoryviews, because numpy takes a microsecond for one item.
        self._seals = memoryview(bytearray(header.slots * SEAL_BYTES))
        self._lengths = memoryview(bytearray(header.slots * 8)).cast("q")  # 0: the slot is empty
        self.ticks: npt.NDArray[np.int64] = np.zeros(header.slots, dtype=np.int64)
        """When each slot was last used. The tier owns this array, and its thread writes to it."""
        self._saved_ticks = self.ticks.copy()
        self._header_lock = threading.Lock()
        self._records_lock = threading.Lock()  # a region of records is rewritten, or a record is written
        self._buffers = threading.local()
        self.on_write_step: Callable[[str], None] = _on_write_step
        self._dirty = False

    # -- opening -----------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        parent: Path,
        namespace: str,
        row_bytes: int,
        capacity: int,
        description_bytes: int,
        share: int | None = None,
    ) -> OpenedFiles:
        """Open or make the place of a namespace, with the slots that the capacity allows; read its records.

        Other places below `parent` are left alone, but count against the capacity. `OutsideError` in one
        line if there is no room; the place is then cut to the space that `share` (by default the capacity)
        allows.
        """
        folder = parent / place_name(namespace, row_bytes)
        with _explained(folder):
            stride, described = _strides(row_bytes, description_bytes)
            slots = _count_slots(parent, folder, capacity, stride, described)
            if slots < 1:
                allowed = capacity if share is None else share
                cls.shrink(parent, namespace, row_bytes, allowed, description_bytes)
                _refuse(parent, folder, capacity, stride)
            _expect_space(parent, folder, slots * (stride + RECORD_BYTES + described))
            folder.mkdir(mode=0o700, exist_ok=True)
            old = _read_old(folder, namespace, description_bytes)
            header = DiskHeader(
                namespace=namespace,
                row_bytes=row_bytes,
                stride=stride,
                slots=slots,
                description_bytes=description_bytes,
            )
            if old is not None:
                header = msgspec.structs.replace(
                    header, epoch=old.epoch, sequence=old.sequence, prices=old.prices, written=old.written
                )
            elif _has_records(folder):  # their epoch is not known: use one that no record can have
                header = msgspec.structs.replace(header, epoch=secrets.randbits(48))
            files = cls._open_files(folder, header, os.O_RDWR | os.O_CREAT)
            try:
                files._take_space()
                reserve_learnt(folder, capacity)
                files._save_header(both=True)
                scope = SealScope(namespace, header.epoch)
                found = files._read_records(scope)
            except BaseException:
                files.close()
                raise
        return OpenedFiles(files, found, scope)

    @classmethod
    def shrink(
        cls, parent: Path, namespace: str, row_bytes: int, capacity: int, description_bytes: int
    ) -> None:
        """Give back the space that a place has beyond the capacity, without opening the place."""
        folder = parent / place_name(namespace, row_bytes)
        stride, described = _strides(row_bytes, description_bytes)
        with _explained(folder):
            slots = _count_slots(parent, folder, capacity, stride, described)
            if not slots:
                reserve_learnt(folder, 0)
            before = taken_bytes(folder)
            sizes = (HEADER_BYTES + slots * RECORD_BYTES if slots else 0, slots * described, slots * stride)
            for name, size in zip((RECORDS, DESCRIPTIONS, SLOTS), sizes, strict=True):
                _cut(folder / name, size)  # first the records, which announce rows
            if (given := before - taken_bytes(folder)) > 0:
                line = (
                    "disk tier: %s: the capacity has no room for all of its rows any more; %s were given up"
                )
                logger.warning(line, folder, format_size(given))

    @classmethod
    def open_again(cls, folder: Path, header: DiskHeader) -> OpenedFiles:
        """Open an existing place to inspect it. Creates nothing. The caller must hold the folder's lock.

        The number of slots is that of the records that are there, whatever the header says.
        """
        with _explained(folder):
            there = max(0, (folder / RECORDS).stat().st_size - HEADER_BYTES) // RECORD_BYTES
            header = msgspec.structs.replace(header, slots=min(header.slots, there))
            files = cls._open_files(folder, header, os.O_RDWR)
            try:
                scope = SealScope(header.namespace, header.epoch)
                return OpenedFiles(files, files._read_records(scope), scope)
            except BaseException:
                files.close()
                raise

    @classmethod
    def _open_files(cls, folder: Path, header: DiskHeader, flags: int) -> Self:
        opened: list[int] = []
        try:
            for name in (RECORDS, DESCRIPTIONS):
                opened.append(open_file(folder / name, flags))
            direct = True
            try:
                opened.append(open_file(folder / SLOTS, flags | os.O_DIRECT))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                direct = False
                opened.append(open_file(folder / SLOTS, flags))
                logger.warning(
                    "disk tier: %s: its file system has no direct I/O; the page cache is used", folder
                )
            records, descriptions, slots = opened
            return cls(folder, header, (records, descriptions, slots), direct=direct)
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise

    def _sizes(self) -> tuple[int, int, int]:
        slots = self.header.slots
        return HEADER_BYTES + slots * RECORD_BYTES, slots * self._described, slots * self._stride

    def _take_space(self) -> None:
        """Take all space that the files will ever need, or none: after a failure the new space is freed."""
        before = [os.fstat(descriptor).st_size for descriptor in self._descriptors]
        for descriptor, size, old in zip(self._descriptors, self._sizes(), before, strict=True):
            if old > size:
                os.ftruncate(descriptor, size)
        try:
            for descriptor, size in zip(self._descriptors, self._sizes(), strict=True):
                if size:
                    os.posix_fallocate(descriptor, 0, size)
        except OSError:
            for descriptor, size, old in zip(self._descriptors, self._sizes(), before, strict=True):
                with suppress(OSError):
                    os.ftruncate(descriptor, min(old, size))
            raise

    def _read_records(self, scope: SealScope) -> FoundRecords:
        content = np.empty(self.header.slots * RECORD_BYTES, dtype=np.uint8)  # numpy asks for large pages
        at = 0
        while at < len(content):
            got = os.preadv(self._records, [content[at : at + _READ_AT_ONCE].data], HEADER_BYTES + at)
            if got == 0:
                break
            at += got
        content[at:] = 0
        found = read_records(content, scope.number)
        np.frombuffer(self._seals, dtype="<u8").reshape(-1, SEAL_BYTES // 8)[found.slots] = found.seals
        np.frombuffer(self._lengths, dtype=np.int64)[found.slots] = found.lengths
        self._saved_ticks[found.slots] = found.ticks
        return found

    # -- rows --------------------------------------------------------------------------------------

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        return [error for run in self._runs(rows) for error in self._write(run)]

    def _write(self, run: list[BackendRow]) -> list[OSError | None]:
        """Write rows of adjacent slots at once; if that fails, one by one: only bad rows are lost."""
        try:
            self._store(run)
        except OSError as error:
            return [error] if len(run) == 1 else [error for row in run for error in self._write([row])]
        return [None] * len(run)

    def _store(self, run: list[BackendRow]) -> None:
        first, count = run[0].place, len(run)
        for row in run:
            if row.nbytes > self._stride or len(row.key) > MOST_KEY_BYTES:
                raise OSError(
                    errno.EFBIG, f"expected a row of at most {self._stride} bytes, got {row.nbytes}"
                )
        self._empty(first, count)
        self.on_write_step("row")
        self._move(run, into_memory=False)
        if self._described:
            self.on_write_step("description")
            packed = [pack_description(row.key, row.description, self._described) for row in run]
            packed[:-1] = [description.ljust(self._described, b"\0") for description in packed[:-1]]
            _write_all(self._descriptions, b"".join(packed), first * self._described)
        self.on_write_step("record")
        ticks, lengths = self.ticks[first : first + count].tolist(), [row.nbytes for row in run]
        records = [
            pack_record(row.place, row.key, row.seal, length, row.scope, tick)
            for row, length, tick in zip(run, lengths, ticks, strict=True)
        ]
        self._write_records(first, b"".join(records))
        self._seals[first * SEAL_BYTES : (first + count) * SEAL_BYTES] = b"".join([row.seal for row in run])
        self._lengths[first : first + count] = array("q", lengths)
        self._dirty = True
        self.on_write_step("end")

    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        return [answer for run in self._runs(rows) for answer in self._read(run)]

    def _read(self, run: list[BackendRow]) -> list[bytes | OSError | None]:
        """Read rows of adjacent slots at once; if that fails, one by one."""
        lengths = [row.nbytes for row in run]
        if self._lengths[run[0].place : run[0].place + len(run)].tolist() != lengths:
            return [None] if len(run) == 1 else [answer for row in run for answer in self._read([row])]
        try:
            self._move(run, into_memory=True)
        except OSError as error:
            return [error] if len(run) == 1 else [answer for row in run for answer in self._read([row])]
        starts = [row.place * SEAL_BYTES for row in run]
        return [bytes(self._seals[start : start + SEAL_BYTES]) for start in starts]

    def _runs(self, rows: Sequence[BackendRow]) -> Iterator[list[BackendRow]]:
        """Cut rows into runs of adjacent, full slots: each run is one system call instead of several."""
        run: list[BackendRow] = []
        for row in rows:
            if run and (
                row.place != run[-1].place + 1 or row.nbytes != self._stride or len(run) == _LONGEST_RUN
            ):
                yield run
                run = []
            run.append(row)
            if row.nbytes != self._stride:
                yield run
                run = []
        if run:
            yield run

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        return [bool(self._lengths[row.place]) for row in rows]

    def delete(self, rows: Sequence[BackendRow]) -> None:
        for row in rows:
            self._empty(row.place, 1)

    def empty_records(self, slots: Sequence[int]) -> None:
        """Empty the records of slots, whatever is in them."""
        for slot in slots:
            self._write_records(slot, EMPTY)

    def _empty(self, first: int, count: int) -> None:
        """Make slots absent, for later processes too, before anything is written into them."""
        if any(self._lengths[first : first + count]):
            self._lengths[first : first + count] = array("q", bytes(8 * count))
            self.on_write_step("emptied record")
            self._write_records(first, EMPTY * count)

    def _write_records(self, first: int, records: bytes) -> None:
        with self._records_lock:
            _write_all(self._records, records, HEADER_BYTES + first * RECORD_BYTES)

    def _move(self, run: list[BackendRow], *, into_memory: bool) -> None:
        """Read or write rows of adjacent slots, past the page cache where their memory allows."""
        move: Callable[[int, list[memoryview], int], int] = os.preadv if into_memory else os.pwritev
        row, offset = run[0], run[0].place * self._stride
        length = sum([row.nbytes for row in run])
        moved = -1
        if not self.direct or length % ROW_ALIGNMENT == 0:
            try:
                moved = move(self._slots, [piece for row in run for piece in row.pieces], offset)
            except OSError as error:
                if not self.direct or error.errno != errno.EINVAL or len(run) > 1:
                    raise
        if moved == -1:  # direct I/O refuses this memory or length
            buffer = self._aligned_buffer()
            if not into_memory:
                copy_out(row.pieces, buffer)
            moved = move(self._slots, [buffer[: -(-length // ROW_ALIGNMENT) * ROW_ALIGNMENT].data], offset)
            if into_memory and moved >= length:
                copy_into(row.pieces, buffer.data)
        if moved < length:
            raise OSError(errno.EIO, f"expected {length} bytes to be moved, got {moved}")

    def _aligned_buffer(self) -> npt.NDArray[np.uint8]:
        """Return this thread's buffer for one row."""
        buffer: npt.NDArray[np.uint8] | None = getattr(self._buffers, "buffer", None)
        if buffer is None:
            buffer = self._buffers.buffer = np.frombuffer(mmap.mmap(-1, self._stride), dtype=np.uint8)
        return buffer

    # -- beside rows -------------------------------------------------------------------------------

    def read_descriptions(self, slots: Sequence[int], keys: Sequence[OffloadKey]) -> tuple[bytes, ...]:
        """Return the descriptions that were kept for these slots and keys; empty where there is none."""
        if not self._described:
            return (b"",) * len(slots)
        return tuple(
            read_description(key, os.pread(self._descriptions, self._described, slot * self._described))
            for slot, key in zip(slots, keys, strict=True)
        )

    def save_ticks(self) -> int:
        """Save the last uses that have changed since the last save, and return how many."""
        now = self.ticks.copy()
        changed = np.flatnonzero(now != self._saved_ticks)
        starts = np.flatnonzero(np.diff(changed // _REGION, prepend=-1))
        for slots in np.split(changed, starts[1:]):
            self._save_ticks(slots, now[slots])
        self._saved_ticks = now
        return len(changed)

    def _save_ticks(self, slots: npt.NDArray[np.int64], ticks: npt.NDArray[np.int64]) -> None:
        """Save the last uses of slots of one region of the records."""
        if len(slots) <= _SINGLE_TICKS:
            for slot, tick in zip(slots.tolist(), ticks.tolist(), strict=True):
                _write_all(self._records, TICK.pack(tick), HEADER_BYTES + slot * RECORD_BYTES + _TICK_AT)
            return
        first, last = int(slots[0]), int(slots[-1])
        region, offset = bytearray((last + 1 - first) * RECORD_BYTES), HEADER_BYTES + first * RECORD_BYTES
        with self._records_lock:  # a record that another thread writes meanwhile must not be undone
            if os.preadv(self._records, [region], offset) < len(region):
                raise OSError(errno.EIO, f"expected {len(region)} bytes of records, got less")
            words = np.frombuffer(region, dtype="<i8").reshape(-1, RECORD_BYTES // TICK.size)
            words[slots - first, _TICK_AT // TICK.size] = ticks
            _write_all(self._records, region, offset)

    def save_header(
        self,
        *,
        epoch: int | None = None,
        prices: Mapping[str, float] | None = None,
        written: Sequence[int] | None = None,
    ) -> None:
        """Write the header with these changes. A new epoch goes to both pages."""
        with self._header_lock:
            changes: dict[str, object] = {"sequence": self.header.sequence + 1}
            changes |= {} if epoch is None else {"epoch": epoch}
            changes |= {} if prices is None else {"prices": dict(prices)}
            changes |= {} if written is None else {"written": list(written)}
            self.header = msgspec.structs.replace(self.header, **changes)
            self._save_header(both=epoch is not None)

    def sync_header(self) -> None:
        """Block until the header is on the disk."""
        os.fdatasync(self._records)

    def _save_header(self, *, both: bool) -> None:
        page = pack_header(self.header)
        for at in (0, 1) if both else (self.header.sequence % 2,):
            self.on_write_step("header")
            _write_all(self._records, page, at * PAGE_BYTES)

    def sync(self) -> None:
        """Block until everything written is on the disk; rows are synced before their records."""
        if self._dirty:
            self._dirty = False
            for descriptor in (self._slots, self._descriptions, self._records):
                os.fdatasync(descriptor)

    def expect_there(self) -> None:
        """Raise `FileNotFoundError` if a file is no longer at its path: writes to it would be lost."""
        for name, descriptor in zip((RECORDS, DESCRIPTIONS, SLOTS), self._descriptors, strict=True):
            ours, found = os.fstat(descriptor), os.stat(self.folder / name)
            if (ours.st_dev, ours.st_ino) != (found.st_dev, found.st_ino):
                raise FileNotFoundError(
                    errno.ENOENT, "expected the file that was opened, found another", name
                )

    def probe(self) -> None:
        self.expect_there()
        self.save_header()
        buffer = mmap.mmap(-1, PAGE_BYTES)
        if self.header.slots and os.preadv(self._slots, [buffer], 0) < PAGE_BYTES:
            raise OSError(errno.EIO, "expected to read a page, got less")

    def close(self) -> None:
        descriptors, self._descriptors = self._descriptors, (-1, -1, -1)
        for descriptor in descriptors:
            if descriptor != -1:
                os.close(descriptor)


def _on_write_step(_where: str) -> None:
    return


def _strides(row_bytes: int, description_bytes: int) -> tuple[int, int]:
    """Return the distance between rows, and the distance between descriptions."""
    return -(-row_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT, description_stride(description_bytes)


def _count_slots(parent: Path, folder: Path, capacity: int, stride: int, described: int) -> int:
    """Return how many slots fit into the capacity, beside the space of other places."""
    fixed = HEADER_BYTES + 3 * PAGE_BYTES + learnt_bytes(capacity)
    left = capacity - _taken_by_others(parent, folder) - fixed
    return max(0, left // (stride + RECORD_BYTES + described))


def _taken_by_others(parent: Path, folder: Path) -> int:
    return taken_bytes(parent) - taken_bytes(folder)


def _cut(path: Path, size: int) -> None:
    """Cut a file to a size, if it is there and longer."""
    with suppress(FileNotFoundError), os.fdopen(open_file(path, os.O_RDWR), "r+b") as file:
        if os.fstat(file.fileno()).st_size > size:
            file.truncate(size)


def _refuse(parent: Path, folder: Path, capacity: int, stride: int) -> NoReturn:
    others = _taken_by_others(parent, folder)
    problem = (
        f"disk tier: {folder}: expected room for one row ({format_size(stride)}) in a capacity of"
        f" {format_size(capacity)}"
    )
    if not others:
        raise OutsideError(f"{problem}; raise disk.capacity")
    raise PlaceRefused(
        f"{problem}, of which other models' rows take {format_size(others)};"
        f" {_how_to_remove(parent, folder)}, or set disk.take_over_unused, or raise disk.capacity"
    )


def _how_to_remove(parent: Path, folder: Path) -> str:
    """Return the command that removes the place beside this one that was not used for the longest time."""
    path = parent.parent
    places = [place for place in find_rank_places(parent) if place.folder != folder]
    if not places:
        return f"see `kvtier disk ls {shlex.quote(str(path))}`"
    place = min(places, key=lambda place: place.used_at)
    command = f"kvtier disk gc {shlex.quote(str(path))} {place.folder.relative_to(path)}"
    return f"`{command}` removes those that were not used for the longest time"


def _expect_space(parent: Path, folder: Path, needed: int) -> None:
    """Raise `OutsideError` if the file system has no room; log how much other places take of it."""
    statistics = os.statvfs(parent)
    free = statistics.f_bavail * statistics.f_frsize + taken_bytes(folder)
    if needed > free:
        raise OutsideError(
            f"disk tier: {folder}: expected {format_size(needed)} of free space, found {format_size(free)};"
            " lower disk.capacity or make room"
        )
    if others := _taken_by_others(parent, folder):
        logger.warning(
            "disk tier: %s: rows of other models, row sizes or versions take %s of the capacity; when this"
            " engine has ended, %s",
            parent,
            format_size(others),
            _how_to_remove(parent, folder),
        )


def _read_old(folder: Path, namespace: str, description_bytes: int) -> DiskHeader | None:
    """Return the header that an earlier process left."""
    try:
        with os.fdopen(open_file(folder / RECORDS, os.O_RDONLY), "rb") as file:
            pages = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return None
    header = read_header(pages)
    if header is None:
        if any(pages):
            logger.warning("disk tier: %s: its header is damaged; it starts empty", folder)
        return None
    if header.version != VERSION or header.namespace != namespace:
        path = folder.parent.parent
        command = f"kvtier disk gc {shlex.quote(str(path))} {folder.relative_to(path)}"
        raise PlaceRefused(
            f"disk tier: {folder}: expected version {VERSION} and this model's namespace,"
            f" found version {header.version} and {header.namespace[:16]!r};"
            f" `{command}` removes it; or choose another path"
        )
    if header.description_bytes != description_bytes:
        (folder / DESCRIPTIONS).unlink(missing_ok=True)
    return header


def _has_records(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return (folder / RECORDS).stat().st_size > 0
    return False


def _write_all(descriptor: int, content: bytes | bytearray, offset: int) -> None:
    if os.pwrite(descriptor, content, offset) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn an `OSError` into an `OutsideError` that says what failed."""
    try:
        yield
    except OSError as error:
        remedy = "; lower disk.capacity or make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        name = f"{Path(error.filename).name}: " if isinstance(error.filename, str) else ""
        why = f"{name}{error.strerror or error}{remedy}"
        raise OutsideError(f"disk tier: {folder}: cannot be opened: {why}") from error
