"""`find_mount`: the file system that a path is on, as Linux tells it; `None` where nothing is known.

Blocks as long as reading one small file of the kernel's does. Any thread.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mount", "find_mount"]

_MOUNTS = Path("/proc/self/mountinfo")
_LINE = re.compile(r"\S+ \S+ \S+ \S+ (\S+) (\S+) .*?- (\S+) ")
"""The mount point, its options and the type of a line."""
_IN_MEMORY = {"devtmpfs", "hugetlbfs", "ramfs", "rootfs", "tmpfs"}


class Mount(NamedTuple):
    """Where a file system is mounted, and of which type it is: `ext4`, `tmpfs`."""

    point: Path
    kind: str
    read_only: bool

    @property
    def is_memory(self) -> bool:
        """Whether its files are host memory."""
        return self.kind in _IN_MEMORY


def find_mount(path: Path, mounts: Path = _MOUNTS) -> Mount | None:
    """Return the mount that a path is on, be it there or not; `None` if this system does not say."""
    target = path.resolve()
    found: Mount | None = None
    with suppress(OSError):
        for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            if (match := _LINE.match(line)) is None:
                continue
            point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), match[1]))
            deeper = found is None or len(point.parts) >= len(found.point.parts)  # a later one lies on top
            if deeper and target.is_relative_to(point):
                found = Mount(point, match[3], "ro" in match[2].split(","))
    return found
