"""`find_mount`: the file system that a path is on, according to Linux.

A call blocks while it reads one small file of the kernel. Any thread may make it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mount", "find_mount"]

_MOUNTS = Path("/proc/self/mountinfo")
_LINE = re.compile(r"\S+ \S+ \S+ \S+ (\S+) (\S+) .*?- (\S+) ")
"""Matches the mount point, its options and the type of the file system in a line."""
_IN_MEMORY = {"devtmpfs", "hugetlbfs", "ramfs", "rootfs", "tmpfs"}


class Mount(NamedTuple):
    """A mounted file system: its mount point, and its type, such as `ext4` or `tmpfs`."""

    point: Path
    kind: str
    read_only: bool

    @property
    def is_memory(self) -> bool:
        """Whether the files of this mount are in host memory."""
        return self.kind in _IN_MEMORY


def find_mount(path: Path, mounts: Path = _MOUNTS) -> Mount | None:
    """Return the mount of a path, which need not exist; `None` if the system does not say."""
    target = path.resolve()
    found: Mount | None = None
    with suppress(OSError):
        for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            if (match := _LINE.match(line)) is None:
                continue
            point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), match[1]))
            deeper = found is None or len(point.parts) >= len(found.point.parts)  # a later mount covers it
            if deeper and target.is_relative_to(point):
                found = Mount(point, match[3], "ro" in match[2].split(","))
    return found
