"""The pool: a fixed array of slots in host memory, one row each, mapped by every process that is a party to it.

    region:  [ header, 4096 bytes | row 0 | row 1 | ... ]

Whoever comes first creates the region, the others attach, and the last to attach unlinks its name: from then on it
lives only in the mappings and SIGKILL leaks nothing. Until then every party holds a shared lock on it for as long as
its mapping lives, and each start unlinks the regions that nobody holds. A pool with one party is private memory and
never has a name.

Memory is not reserved at the start, only counted: a page of it is taken when its first byte is written. So a big pool
opens at once, and a pool in a shared directory relies on nobody else filling that directory.

`open` and `close` may be called by any thread and wait for one another across processes, briefly. Who may touch which
row when is decided elsewhere: the pool has no locks on its rows.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from kvtier.config import format_size
from kvtier.errors import InputError, IntegrityError, PoolError

__all__ = ["Pool", "expect_memory"]

_HEADER_BYTES = 4096
_FORMAT = struct.Struct("<8sQQQQ")
_MAGIC = b"kvtpool1"
_PREFIX, _SUFFIX = "kvtier-", ".pool"
_LOCK_SECONDS = 30.0


class _Header(NamedTuple):
    magic: bytes
    num_slots: int
    row_bytes: int
    parties: int
    attached: int

    @property
    def region_bytes(self) -> int:
        return _HEADER_BYTES + self.num_slots * self.row_bytes

    def __str__(self) -> str:
        return f"{self.num_slots} slots of {self.row_bytes} bytes for {self.parties} parties"


class Pool:
    """One party's mapping of the slots. Use `Pool.open`."""

    def __init__(self, region: mmap.mmap, path: Path | None) -> None:
        self._region: mmap.mmap | None = region
        self._path = path
        self._header = _read_header(region)
        count = self.num_slots * self.row_bytes
        flat = np.frombuffer(region, np.uint8, count, _HEADER_BYTES) if count else np.empty(0, np.uint8)
        self._rows: npt.NDArray[np.uint8] | None = flat.reshape(self.num_slots, self.row_bytes)

    @classmethod
    def open(
        cls, engine_id: str, num_slots: int, row_bytes: int, parties: int = 1, *, directory: Path | None = None
    ) -> Self:
        """Create the region of an engine or attach to it.

        All `parties` must give the same sizes. Two opens in one process are two parties. `directory` holds the region's
        name until all have attached; the default is /dev/shm, or the temporary directory on systems without it.
        """
        if num_slots < 0 or row_bytes < 1 or parties < 1:
            wrong = f"num_slots={num_slots}, row_bytes={row_bytes}, parties={parties}"
            raise InputError(f"pool: expected num_slots >= 0, row_bytes >= 1 and parties >= 1, got {wrong}")
        header = _Header(_MAGIC, num_slots, row_bytes, parties, attached=0)
        if parties == 1:
            region, path = _map_private(header), None
        else:
            path = (directory or _shared_directory()) / f"{_PREFIX}{quote(engine_id, safe='')}{_SUFFIX}"
            region = _map_shared(path, header)
        return cls(region, path)

    @property
    def num_slots(self) -> int:
        """How many rows there are."""
        return self._header.num_slots

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self._header.row_bytes

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The bytes of all slots, `(num_slots, row_bytes)`: the same memory for every party."""
        if self._rows is None:
            raise PoolError("pool: expected an open pool, got one that was closed")
        return self._rows

    @property
    def complete(self) -> bool:
        """Whether every party has attached. Before that, some of them may yet turn out to look elsewhere."""
        if self._header.attached < self._header.parties and self._region is not None:
            self._header = _read_header(self._region)
        return self._header.attached == self._header.parties

    def close(self) -> None:
        """Give up this mapping. Idempotent. Arrays taken from `rows` stay valid and keep the memory while they live."""
        region, self._region, self._rows = self._region, None, None
        if region is None:
            return
        if self._path is None or _read_header(region).attached == self._header.parties:
            _unmap(region)
            return
        with _locked(self._path.parent):
            header = _read_header(region)
            if header.attached < header.parties:  # else the last one has just attached and unlinked it
                _write_header(region, header._replace(attached=header.attached - 1))
            _unmap(region)
            _sweep(self._path.parent)

    def check(self) -> None:
        """Raise `IntegrityError` if the region is not what was opened."""
        if self._region is None:
            return
        found = _read_header(self._region)
        if found._replace(attached=0) != self._header._replace(attached=0) or found.attached > found.parties:
            raise IntegrityError(f"pool: the header was overwritten: expected {self._header!r}, found {found!r}")
        if len(self._region) != found.region_bytes or self.rows.shape != (self.num_slots, self.row_bytes):
            raise IntegrityError(f"pool: expected {found.region_bytes} bytes mapped, found {len(self._region)}")
        if self._path is not None and not self.complete and not self._path.exists():
            raise IntegrityError(f"pool: {self._path} is gone with {found.attached} of {found.parties} attached")


def expect_memory(needed: int) -> None:
    """Raise `PoolError` if this machine cannot give that many bytes now."""
    _expect_free(needed, _free_memory(), "of memory is available", "lower cpu.capacity")


def _map_private(header: _Header) -> mmap.mmap:
    expect_memory(header.region_bytes)
    try:
        region = mmap.mmap(-1, header.region_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise PoolError(f"pool: cannot map {format_size(header.region_bytes)}: {error}; lower cpu.capacity") from error
    with suppress(OSError, AttributeError):  # large pages fill several times faster, but not every kernel has them
        region.madvise(mmap.MADV_HUGEPAGE)
    _write_header(region, header._replace(attached=1))
    return region


def _map_shared(path: Path, header: _Header) -> mmap.mmap:
    try:
        with _locked(path.parent):
            _sweep(path.parent)
            if not path.exists():
                _expect_room(path.parent, header.region_bytes)
            return _attach(path, header)
    except OSError as error:
        raise PoolError(f"pool: cannot open {path} ({format_size(header.region_bytes)}): {error}") from error


def _attach(path: Path, header: _Header) -> mmap.mmap:
    """Map the region, creating it if it is not there, and unlink its name if nobody else is to come."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid != os.geteuid():
            raise PoolError(f"pool: {path} belongs to another user; choose another engine_id")
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, header.region_bytes)
            os.pwrite(fd, _FORMAT.pack(*header), 0)
        found = _Header(*_FORMAT.unpack(os.pread(fd, _FORMAT.size, 0)))
        if found._replace(attached=0) != header:
            raise PoolError(f"pool: expected {header}, but {path} has {found}; give all its processes one config")
        # The mapping keeps a duplicate of the descriptor, and with it the lock, until it is unmapped.
        region = mmap.mmap(fd, header.region_bytes)
    except BaseException:
        os.close(fd)
        _sweep(path.parent)
        raise
    os.close(fd)
    _write_header(region, found._replace(attached=found.attached + 1))
    if found.attached + 1 == found.parties:
        path.unlink()
    return region


def _unmap(region: mmap.mmap) -> None:
    with suppress(BufferError):  # arrays of it are still in use: it goes with the last of them
        region.close()


def _read_header(region: mmap.mmap) -> _Header:
    return _Header(*_FORMAT.unpack_from(region))


def _write_header(region: mmap.mmap, header: _Header) -> None:
    _FORMAT.pack_into(region, 0, *header)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock under which regions come and go. It is on the directory itself, so no lock file is left behind."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(fd):
            if time.monotonic() > deadline:
                raise PoolError(f"pool: {directory} has been locked by another process for {_LOCK_SECONDS:.0f} s")
            time.sleep(0.001)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(directory: Path) -> None:
    """Unlink regions that no process holds. Those of other users are out of reach and left alone."""
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _try_lock(fd):
                    path.unlink()
            finally:
                os.close(fd)


def _shared_directory() -> Path:
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def _expect_room(directory: Path, needed: int) -> None:
    stat = os.statvfs(directory)
    remedy = f"lower cpu.capacity or enlarge {directory} (docker run --shm-size, mount -o remount,size=...)"
    _expect_free(needed, stat.f_bavail * stat.f_frsize, f"is free in {directory}", remedy)
    expect_memory(needed)


def _expect_free(needed: int, free: int | None, where: str, remedy: str) -> None:
    if free is not None and needed > free:
        raise PoolError(f"pool: needs {format_size(needed)}, but only {format_size(free)} {where}; {remedy}")


def _free_memory() -> int | None:
    """Return the bytes that can be taken without swapping; `None` where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
