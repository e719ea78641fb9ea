"""The pool: a fixed array of slots in host memory, one row each, mapped by every process that is a party.

    region:  [ header, 4096 bytes | slot 0 | slot 1 | ... ]

A row is at the beginning of its slot. The caller of `open` chooses the slot's size, and uses the room behind
the row as it likes.

Parties are numbered: the ranks are 0, 1, ..., and any other process that maps the pool comes after them. The
first party creates the region as memory without a name (`memfd_create`) and announces it
(`kvtier.rendezvous`). The others attach, and the last to attach removes the announcement. So the memory is
freed with the last process that maps it. SIGKILL at any moment leaks no memory, and at most a named file of
some bytes, which the next start removes. If the creator ends before all have attached, the next party
creates another region, and the pools of the parties that had attached never become `complete`.

The memory of a shared region is reserved before its creator's `open` returns: later writes cannot fail. A
pool with one party is private memory. Its size is only compared with the free memory; a page is taken when
its first byte is written.

Any thread may call `open` and `close`; calls in different processes wait for one another, briefly. The pool
has no locks on its rows: its users decide who may touch which row when.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvtier.config import format_size
from kvtier.errors import InputError, IntegrityError, PoolError, show_value
from kvtier.machine import expect_free_memory
from kvtier.rendezvous import announce, default_directory, find, lock_and_sweep, path_of

_HEADER_BYTES = 4096
_FORMAT = struct.Struct("<8sQQQ32s")
_MAGIC = b"kvtpool2"
# Each changing value has its own bytes, so that no process overwrites another's change.
_RESERVED = 64  # 1 once all memory is reserved; only the creator writes it
_ATTACHED = 128  # a byte for each party, 1 while it is attached; written under the directory's lock
_LOOK_BYTES = 256 << 20  # the bytes reserved between two looks at the free memory
_CLOSE_PATIENCE = 1.0  # seconds; if `close` gives up, the next start removes the rest
# In older kernels a signal undoes everything that a call has reserved, so no call may be long.
_CALL_BYTES = 8 << 20

MAX_PARTIES = _HEADER_BYTES - _ATTACHED
"""The most processes that may share a pool."""


class _Header(NamedTuple):
    """The constant part of a region's header."""

    magic: bytes
    num_slots: int
    slot_bytes: int
    parties: int
    launch: bytes

    @property
    def region_bytes(self) -> int:
        return _HEADER_BYTES + self.num_slots * self.slot_bytes

    def __str__(self) -> str:
        return f"{self.num_slots} slots of {self.slot_bytes} bytes for {self.parties} parties"


class Pool:
    """One party's mapping of the slots. Use `Pool.open`."""

    def __init__(self, region: mmap.mmap, party: int, path: Path | None, shown: ExitStack | None) -> None:
        """Wrap a mapped region.

        `path` is the named file that announces a shared region. `shown` holds the descriptors that its
        creator keeps open, so that others find it.
        """
        self._region: mmap.mmap | None = region
        self._party = party
        self._path = path
        self._created = shown is not None
        self._hide = weakref.finalize(self, (shown or ExitStack()).close)
        self._header = _read_header(region)
        self._complete = False
        self._users = 1
        count = self.num_slots * self.slot_bytes
        flat = np.frombuffer(region, np.uint8, count, _HEADER_BYTES) if count else np.empty(0, np.uint8)
        self._rows: npt.NDArray[np.uint8] | None = flat.reshape(self.num_slots, self.slot_bytes)

    @classmethod
    def open(
        cls,
        engine_id: str,
        num_slots: int,
        slot_bytes: int,
        parties: int = 1,
        *,
        party: int = 0,
        launch_id: str = "",
        directory: Path | None = None,
    ) -> Self:
        """Create the region of an engine or attach to it, as number `party` of `parties`.

        All parties must give the same sizes and the same `launch_id`. No other start of an engine has that
        id, so it reveals two engines that have one `engine_id` by mistake. `directory` is where the parties
        meet; the default is /dev/shm, or the temporary directory on systems without it. Some bytes are
        written there.
        """
        if num_slots < 0 or slot_bytes < 1 or not 0 <= party < parties <= MAX_PARTIES:
            expected = f"expected num_slots >= 0, slot_bytes >= 1 and 0 <= party < parties <= {MAX_PARTIES}"
            wrong = f"num_slots={num_slots}, slot_bytes={slot_bytes}, party={party}, parties={parties}"
            raise InputError(f"pool: {expected}, got {wrong}")
        _encode("engine_id", engine_id)
        launch = sha256(_encode("launch_id", launch_id)).digest()
        header = _Header(_MAGIC, num_slots, slot_bytes, parties, launch)
        if parties == 1:
            return cls(_map_private(header), party, None, None)
        path = path_of(engine_id, directory or default_directory())
        return cls._open_shared(engine_id, header, party, path)

    @classmethod
    def _open_shared(cls, engine_id: str, header: _Header, party: int, path: Path) -> Self:
        with _explained(f"open {path}"), lock_and_sweep(path.parent), ExitStack() as opened:
            memory = find(path)
            created = memory is None
            if memory is None:
                memory = _create(path.stem, header, opened)
                opened.callback(os.close, announce(path, memory))
            else:
                opened.callback(os.close, memory)
            region = _attach(memory, engine_id, header, party)
            if _all_attached(region, header):
                path.unlink(missing_ok=True)
            pool = cls(region, party, path, opened.pop_all() if created else None)
        if created:
            pool._reserve(memory)
        return pool

    def _reserve(self, memory: int) -> None:
        """Take all memory of a new region.

        Parties may attach meanwhile; `complete` is false until the end.
        """
        try:
            size = self._header.region_bytes
            with _explained(f"reserve {format_size(size)}", "; lower cpu.capacity"):
                _reserve(memory, size)
        except BaseException:
            self.close()
            raise
        assert self._region is not None
        self._region[_RESERVED] = 1

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        return self._header.num_slots

    @property
    def slot_bytes(self) -> int:
        """The bytes from one row to the next."""
        return self._header.slot_bytes

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The bytes of all slots, `(num_slots, slot_bytes)`: the same memory for every party."""
        if self._rows is None:
            raise PoolError("pool: expected an open pool, got one that was closed")
        return self._rows

    @property
    def complete(self) -> bool:
        """Whether all memory is reserved and all parties have attached.

        Before that, some party may still create or map another region.
        """
        if not self._complete and self._region is not None:
            self._complete = self._region[_RESERVED] == 1 and _all_attached(self._region, self._header)
        return self._complete

    def share(self) -> Self:
        """Return this pool for one more user in this process.

        The mapping ends when each user has closed it.
        """
        self._users += 1
        return self

    def close(self) -> None:
        """Give up this mapping. Idempotent. Arrays taken from `rows` stay valid and keep the memory.

        A party that closes before all have attached makes room for another one. The mapping is given up even
        if the directory is gone or stays locked. The named file is then left behind, as by a killed process,
        and the next start removes it.
        """
        self._users -= 1
        if self._users > 0:
            return
        region, self._region, self._rows = self._region, None, None
        if region is None:
            return
        try:
            self._withdraw(region)
        finally:
            self._hide()
            _unmap(region)

    def _withdraw(self, region: mmap.mmap) -> None:
        if self._path is None or _all_attached(region, self._header):
            return
        with suppress(OSError, PoolError), lock_and_sweep(self._path.parent, _CLOSE_PATIENCE):
            if not _all_attached(region, self._header):  # else the last one has just attached
                region[_ATTACHED + self._party] = 0
            self._hide()

    def check(self) -> None:
        """Raise `IntegrityError` if the region is not what was opened."""
        region = self._region
        if region is None:
            return
        found = _read_header(region)
        if found != self._header or region[_ATTACHED + self._party] != 1:
            wrong = f"expected party {self._party} in {self._header!r}, found {found!r}"
            raise IntegrityError(f"pool: the header was overwritten: {wrong}")
        if len(region) != found.region_bytes or self.rows.shape != (self.num_slots, self.slot_bytes):
            raise IntegrityError(f"pool: expected {found.region_bytes} bytes mapped, found {len(region)}")
        is_gone = self._created and self._path is not None and not self._path.exists()
        if is_gone and not _all_attached(region, self._header):
            raise IntegrityError(f"pool: {self._path} is gone, and not every party has attached")


def _map_private(header: _Header) -> mmap.mmap:
    expect_free_memory(header.region_bytes)
    with _explained(f"map {format_size(header.region_bytes)}", "; lower cpu.capacity"):
        region = mmap.mmap(-1, header.region_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # large pages, where available, fill several times as fast
        region.madvise(mmap.MADV_HUGEPAGE)
    _FORMAT.pack_into(region, 0, *header)
    region[_RESERVED] = region[_ATTACHED] = 1
    return region


def _create(name: str, header: _Header, opened: ExitStack) -> int:
    """Return a descriptor of a new region, before any of its memory is taken."""
    expect_free_memory(header.region_bytes)
    memory = os.memfd_create(name[:200], os.MFD_CLOEXEC)  # only people who look at /proc see the name
    opened.callback(os.close, memory)
    os.ftruncate(memory, header.region_bytes)
    os.pwrite(memory, _FORMAT.pack(*header), 0)
    return memory


def _attach(memory: int, engine_id: str, header: _Header, party: int) -> mmap.mmap:
    found = _read_announced(memory, engine_id)
    if found.launch != header.launch:
        raise PoolError(f"pool: two engines have the engine_id {engine_id!r}; give each its own")
    if found != header:
        remedy = "give all its processes one config and one version of kvtier"
        raise PoolError(f"pool: expected {header}, but {engine_id!r} has {found}; {remedy}")
    region = mmap.mmap(memory, header.region_bytes)  # keeps its own descriptor
    if region[_ATTACHED + party]:
        taken = f"party {party} has attached already"
        raise PoolError(f"pool: {taken}: two engines have the engine_id {engine_id!r}; give each its own")
    region[_ATTACHED + party] = 1
    return region


def _read_announced(memory: int, engine_id: str) -> _Header:
    """Return the header of an announced region. A file of any content may have been announced."""
    start = os.pread(memory, _FORMAT.size, 0)
    header = _Header(*_FORMAT.unpack(start.ljust(_FORMAT.size, b"\0")))
    if header.magic != _MAGIC or header.region_bytes != os.fstat(memory).st_size:
        remedy = "give all its processes one version of kvtier, or choose another engine_id"
        raise PoolError(
            f"pool: expected the memory of a pool of this version, but {engine_id!r} has none; {remedy}"
        )
    return header


def _reserve(memory: int, size: int) -> None:
    """Take memory piece by piece, with looks at the free memory.

    If two processes together want too much, one of them gets an error before no memory is left.
    """
    for start in range(0, size, _CALL_BYTES):
        if start % _LOOK_BYTES == 0:
            expect_free_memory(size - start)
        os.posix_fallocate(memory, start, min(_CALL_BYTES, size - start))


def _encode(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"pool: {name}: expected text that can be encoded, got {show_value(text)}"
        ) from None


def _all_attached(region: mmap.mmap, header: _Header) -> bool:
    return region[_ATTACHED : _ATTACHED + header.parties] == b"\1" * header.parties


def _read_header(region: mmap.mmap) -> _Header:
    return _Header(*_FORMAT.unpack_from(region))


def _unmap(region: mmap.mmap) -> None:
    with suppress(BufferError):  # arrays still use the region, which is unmapped with the last of them
        region.close()


@contextmanager
def _explained(doing: str, remedy: str = "") -> Iterator[None]:
    """Turn an error of the system into a `PoolError` that says what failed and what to do."""
    try:
        yield
    except (OSError, OverflowError) as error:
        raise PoolError(f"pool: cannot {doing}: {error}{remedy}") from error
