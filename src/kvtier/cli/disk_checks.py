"""The checks of `kvtier doctor` in the folder of a disk tier.

One line for each question that decides whether the tier works, and how well. Like all checks, these report
what they cannot find out, and change nothing. The speed is measured in a separate file without a name, so
that nothing is left whatever happens; if the folder does not exist, in the nearest parent that does.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvtier.cli.checks import Check, Status, quote
from kvtier.config import format_size
from kvtier.errors import InputError
from kvtier.file_systems import Mount, find_mount
from kvtier.tiers.disk.folder import is_owned, taken_bytes

__all__ = ["examine_disk", "read_folder"]

_REMOTE = {"9p", "afs", "ceph", "cifs", "fuse", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs"}
_BLOCK = 1 << 20
_MOST_BYTES = 256 << 20
_SECONDS = 1.0
"""Seconds for writing, and again for reading."""
_THREADS = 4
_SLOW = 200e6
"""Bytes per second: slower than any serving GPU computes KV."""


def read_folder(text: str) -> Path:
    """Return the folder that a command line names. An empty name does not mean the current folder."""
    if not text:
        raise InputError("expected the path of a folder, got ''; the current one is '.'")
    return Path(text)


def examine_disk(path: Path, capacity: int | None = None) -> list[Check]:
    """Run all checks of the folder of a disk tier, existing or planned."""
    place = _nearest(path)
    folder, file_system = _check_folder(path, place), _check_file_system(find_mount(place))
    if Status.FAIL in (folder.status, file_system.status):
        return [folder, file_system]
    return [
        folder,
        file_system,
        _check_direct(place),
        _check_space(path, place, capacity),
        _check_speed(place),
        _check_owner(path),
        _check_seed(),
    ]


def _nearest(path: Path) -> Path:
    """Return the folder, or its deepest existing parent."""
    path = path.absolute()
    return next((found for found in (path, *path.parents) if os.path.lexists(found)), path)


def _check_folder(path: Path, place: Path) -> Check:
    name = "disk folder"
    if not place.is_dir():
        return Check(name, Status.FAIL, f"{quote(place)} is no folder", "choose another disk.path")
    try:
        with _probe_file(place):
            pass
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "make room" if full else "check its owner and how it is mounted"
        return Check(name, Status.FAIL, f"{quote(place)} cannot be written to: {error.strerror}", hint)
    if place != path.absolute():
        return Check(name, Status.OK, f"{quote(path)} does not exist; an engine makes it")
    return Check(name, Status.OK, quote(path))


def _check_file_system(mount: Mount | None) -> Check:
    name = "disk file system"
    if mount is None:
        return Check(name, Status.WARN, "this system does not say which it is")
    detail = f"{mount.kind}, mounted at {quote(mount.point)}" + (", read-only" if mount.read_only else "")
    if mount.is_memory:
        hint = "choose a folder on a disk; for more memory raise cpu.capacity"
        return Check(name, Status.FAIL, f"{detail}: its files are memory and end with the machine", hint)
    if mount.read_only:
        return Check(name, Status.FAIL, detail, "mount it for writing, or choose another disk.path")
    if mount.kind == "overlay":
        return Check(
            name, Status.WARN, f"{detail}: a container's layer, which ends with it", "mount a volume"
        )
    if mount.kind.partition(".")[0] in _REMOTE:
        hint = "use a local disk: it belongs to one engine, and locks over a network may not hold"
        return Check(name, Status.WARN, f"{detail}: not a local disk", hint)
    return Check(name, Status.OK, detail)


def _check_direct(place: Path) -> Check:
    name = "disk direct I/O"
    try:
        with _probe_file(place) as probe:
            if probe.is_direct:
                return Check(name, Status.OK, "rows are moved past the page cache")
    except OSError as error:
        return Check(name, Status.WARN, f"could not be tried: {error.strerror}")
    hint = "ext4 and xfs have it; without it rows take memory and CPU twice"
    return Check(name, Status.WARN, "not here: the page cache is used", hint)


def _check_space(path: Path, place: Path, capacity: int | None) -> Check:
    name = "disk space"
    try:
        statistics = os.statvfs(place)
        free, taken = statistics.f_bavail * statistics.f_frsize, sum(map(taken_bytes, path.glob("rank-*")))
    except OSError as error:
        return Check(name, Status.WARN, f"could not be found out: {error.strerror}")
    detail = f"{format_size(free)} free" + (f", {format_size(taken)} taken by the tier" if taken else "")
    if capacity is None:
        return Check(name, Status.OK, detail)
    detail += f"; disk.capacity is {format_size(capacity)}"
    if capacity > free + taken:
        hint = f"lower disk.capacity to at most {format_size(free + taken)}, or make room"
        return Check(name, Status.FAIL, detail, hint)
    return Check(name, Status.OK, detail)


def _check_speed(place: Path) -> Check:
    name = "disk speed"
    try:
        with _probe_file(place) as probe:
            written, read = _measure(probe)
    except OSError as error:
        return Check(name, Status.WARN, f"could not be measured: {error.strerror}")
    detail = f"{_rate(written)} written, {_rate(read)} read: 1 GiB of KV is read in {(1 << 30) / read:.2f} s"
    if read < _SLOW:
        hint = "most GPUs compute KV sooner than that; kvtier then computes, and the disk is of little use"
        return Check(name, Status.WARN, detail, hint)
    return Check(name, Status.OK, detail)


def _check_owner(path: Path) -> Check:
    name = "disk owner"
    try:
        owned = [rank.name for rank in sorted(path.glob("rank-*")) if is_owned(rank)]
    except OSError as error:
        return Check(name, Status.WARN, f"could not be found out: {error.strerror}")
    if not owned:
        return Check(name, Status.OK, "no process owns it")
    hint = "an engine that starts now runs without the tier until that ends; give each its own disk.path"
    return Check(name, Status.WARN, f"another process owns {', '.join(owned)}", hint)


def _check_seed() -> Check:
    """Check the seed of vLLM's keys: with a random seed, no process finds the rows of another."""
    name, seed = "disk hash seed", os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return Check(name, Status.OK, f"PYTHONHASHSEED={seed}; a start with the same finds what was written")
    detail = (
        "PYTHONHASHSEED is not set: a restarted vLLM finds all with sha256, its default, nothing with xxhash"
    )
    return Check(name, Status.OK, detail, "for --prefix-caching-hash-algo xxhash: export PYTHONHASHSEED=0")


# -- a file for tests ------------------------------------------------------------------------------


class _ProbeFile(NamedTuple):
    """An open file without a name, and whether its I/O goes past the page cache."""

    descriptor: int
    is_direct: bool


@contextmanager
def _probe_file(folder: Path) -> Iterator[_ProbeFile]:
    """Make a file that disappears when it is closed, in whatever way."""
    name = folder / f".kvtier-doctor-{os.getpid()}"
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(name)
        yield _ProbeFile(descriptor, _set_direct(descriptor))
    finally:
        os.close(descriptor)


def _set_direct(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _measure(probe: _ProbeFile) -> tuple[float, float]:
    """Return the bytes per second of writing and of reading, several at once as in the tier."""
    statistics = os.fstatvfs(probe.descriptor)
    size = min(_MOST_BYTES, statistics.f_bavail * statistics.f_frsize // 4) // _BLOCK * _BLOCK
    if size == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    buffer = mmap.mmap(-1, _BLOCK)
    buffer.write(os.urandom(_BLOCK))  # some disks compress
    written, rate = _move(os.pwritev, probe.descriptor, buffer, range(0, size, _BLOCK), os.fdatasync)
    if not probe.is_direct:
        os.posix_fadvise(probe.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return rate, _move(os.preadv, probe.descriptor, buffer, written)[1]


def _move(
    move: Callable[[int, list[mmap.mmap], int], int],
    descriptor: int,
    buffer: mmap.mmap,
    offsets: Iterable[int],
    finish: Callable[[int], None] = lambda descriptor: None,
) -> tuple[list[int], float]:
    """Move blocks until none are left or time is up; return the moved offsets, and the speed."""
    began = time.perf_counter()

    def move_one(offset: int) -> int | None:
        if offset and time.perf_counter() - began > _SECONDS:
            return None
        move(descriptor, [buffer], offset)
        return offset

    with ThreadPoolExecutor(_THREADS) as threads:
        moved = [offset for offset in threads.map(move_one, offsets) if offset is not None]
    finish(descriptor)
    return moved, len(moved) * _BLOCK / max(time.perf_counter() - began, 1e-9)


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.2f} GB/s"
