"""Which file system a path is on: by the deepest mount, the later of two in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.file_systems import find_mount

MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - overlay overlay rw,lowerdir=/a - b
23 22 0:22 / /data rw,relatime master:1 propagate_from:2 - ext4 /dev/sda1 rw
24 22 0:23 / /data/with\\040space ro,nosuid - xfs /dev/sdb1 rw
25 22 0:24 / /data/memory rw - ext4 /dev/sdc1 rw
26 22 0:25 / /data/memory rw - tmpfs tmpfs rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/elsewhere/deep", "overlay"),
        ("/data", "ext4"),
        ("/database", "overlay"),
        ("/data/with space/kv", "xfs"),
        ("/data/memory/kv", "tmpfs"),
    ],
)
def test_the_deepest_mount_counts(path: str, kind: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    found = find_mount(Path(path), mounts)
    assert found is not None
    assert found.kind == kind
    assert found.is_memory == (kind == "tmpfs")
    assert found.read_only == (kind == "xfs")


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert find_mount(tmp_path, tmp_path / "nothing") is None


def test_this_system() -> None:
    found = find_mount(Path("/dev/shm/somewhere/below"))
    assert found is None or found.is_memory
