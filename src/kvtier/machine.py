"""The machine as Linux describes it: the memory that this process can have, and the file system of a path.

The memory is the least that the machine or a control group has left:

    the machine       MemAvailable
    a control group   limit - usage + page cache, for the group of this process and for each group around it

Page cache counts as free, active or not, as in MemAvailable: an engine that has just read its weights has
filled much of it, and the kernel drops it when memory is needed. Swap does not count. A system that does not
report a number sets no bound.

Each call blocks while it reads small files of the kernel, anew every time. Any thread may call. `root`
stands for `/` in tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvtier.config_fields import format_size
from kvtier.errors import PoolError

_ROOT = Path("/")
_UNLIMITED = 1 << 60  # version 1 has a number near 2^63 for "no limit"
_MOUNTS = Path("/proc/self/mountinfo")
_MOUNT = re.compile(r"\S+ \S+ (\S+) \S+ (\S+) (\S+) .*?- (\S+) ")
"""Matches the device, the mount point, its options and the type of the file system in a line."""
_IN_MEMORY = {"devtmpfs", "hugetlbfs", "ramfs", "rootfs", "tmpfs"}


class MemoryBound(NamedTuple):
    """A number of bytes that can be had, the reason for this bound, and a remedy besides asking for less."""

    size: int
    where: str
    remedy: str = ""


def free_memory(root: Path = _ROOT) -> MemoryBound | None:
    """Return the memory that can be taken now without swapping; `None` where the system does not say."""
    available = _read_table(root / "proc/meminfo").get("MemAvailable:")
    machine = [] if available is None else [MemoryBound(available * 1024, "of memory is available")]
    return min([*machine, *(group.left for group in _control_groups(root))], default=None)


def total_memory(root: Path = _ROOT) -> MemoryBound | None:
    """Return the memory that could be taken if none were in use; `None` where the system does not say."""
    total = _read_table(root / "proc/meminfo").get("MemTotal:")
    machine = [] if total is None else [MemoryBound(total * 1024, "of memory is in this machine")]
    return min([*machine, *(group.whole for group in _control_groups(root))], default=None)


def expect_free_memory(needed: int, root: Path = _ROOT) -> None:
    """Raise `PoolError` if `needed` bytes cannot be had now."""
    _expect(needed, free_memory(root))


def expect_total_memory(needed: int, root: Path = _ROOT) -> None:
    """Raise `PoolError` if `needed` bytes can never be had here, even with no other memory in use."""
    _expect(needed, total_memory(root))


def _expect(needed: int, bound: MemoryBound | None) -> None:
    if bound is not None and needed > bound.size:
        but = f"but only {format_size(bound.size)} {bound.where}"
        raise PoolError(f"pool: needs {format_size(needed)}, {but}; lower cpu.capacity{bound.remedy}")


class _Names(NamedTuple):
    """The names of a control group's files, which differ between versions 1 and 2."""

    limits: tuple[str, ...]
    usage: str
    page_cache: tuple[str, ...]
    """The names of lines in memory.stat."""


# memory.high is a limit too: above it no process is killed, but all processes of the group slow to a halt.
_VERSION_2 = _Names(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))
_CACHE = ("total_active_file", "total_inactive_file")
_VERSION_1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", _CACHE)


class _Group(NamedTuple):
    """A control group with a limit. `used` does not include page cache."""

    folder: Path
    limit: int
    used: int

    @property
    def left(self) -> MemoryBound:
        where = f"is left of the {format_size(self.limit)} that the control group {self.folder} may use"
        return MemoryBound(max(0, self.limit - self.used), where, _REMEDY)

    @property
    def whole(self) -> MemoryBound:
        return MemoryBound(self.limit, f"is what the control group {self.folder} may use", _REMEDY)


_REMEDY = " or raise that limit (docker run --memory, resources.limits.memory)"


def _control_groups(root: Path) -> Iterator[_Group]:
    """Yield this process's control groups that have a limit, from the innermost outwards."""
    for folder, names in _group_folders(root):
        limit = min(_read_limits(folder, names), default=_UNLIMITED)
        with suppress(OSError, ValueError):
            if limit < _UNLIMITED:
                usage = int((folder / names.usage).read_text("ascii"))
                pages = _read_table(folder / "memory.stat")
                yield _Group(folder, limit, usage - sum(pages.get(name, 0) for name in names.page_cache))


def _read_limits(folder: Path, names: _Names) -> Iterator[int]:
    for name in names.limits:
        with suppress(OSError, ValueError):  # no such group in this mount, or a limit of "max"
            yield int((folder / name).read_text("ascii"))


def _group_folders(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the folders where this process's groups may be.

    In a container, the path of a group may begin above the folder that is mounted.
    """
    mounts = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from ((folder, _VERSION_2) for folder in _inside_out(mounts, path))
                yield from ((folder, _VERSION_2) for folder in _inside_out(mounts / "unified", path))
            elif "memory" in controllers.split(","):
                yield from ((folder, _VERSION_1) for folder in _inside_out(mounts / "memory", path))


def _inside_out(mount: Path, path: str) -> list[Path]:
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts:  # the process is outside of the namespace that is mounted here
        parts = ()
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read_table(path: Path) -> dict[str, int]:
    """Return the numbers in a file of lines such as `MemAvailable:  1234 kB`; none if there is no file."""
    with suppress(OSError):
        rows = (line.split() for line in path.read_text("ascii", "replace").splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
    return {}


# -- file systems ----------------------------------------------------------------------------------


class Mount(NamedTuple):
    """A mounted file system: its mount point, and its type, such as `ext4` or `tmpfs`."""

    point: Path
    kind: str
    read_only: bool

    @property
    def is_memory(self) -> bool:
        """Whether the files of this mount are in host memory."""
        return self.kind in _IN_MEMORY


def find_mount(path: Path, mounts: Path | None = None) -> Mount | None:
    """Return the mount of a path, which need not exist; `None` if the system does not say."""
    target = path.resolve()
    found: Mount | None = None
    for _, mount in _read_mounts(mounts or _MOUNTS):
        # Of two mounts at one point, the later covers the earlier.
        is_deeper = found is None or len(mount.point.parts) >= len(found.point.parts)
        if is_deeper and target.is_relative_to(mount.point):
            found = mount
    return found


def is_in_memory(device: int) -> bool:
    """Return whether the file system of a device number is in memory; False if the system does not say."""
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(found == number and mount.is_memory for found, mount in _read_mounts(_MOUNTS))


def _read_mounts(mounts: Path) -> Iterator[tuple[str, Mount]]:
    """Yield the device number and the mount of each line; nothing if the file cannot be read."""
    with suppress(OSError):
        for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            if (match := _MOUNT.match(line)) is not None:
                point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), match[2]))
                yield match[1], Mount(point, match[4], "ro" in match[3].split(","))
