"""Memory limits of the machine and of its control groups, and that a pool respects them; and the file system
of a path: that of the deepest mount, or of the later of two mounts at one point.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import PoolError
from kvtier.machine import expect_free_memory, expect_total_memory, find_mount, free_memory, total_memory

MIB = 1 << 20
GIB = 1 << 30


class Machine:
    """The files of a system with 16 GiB of memory, of which half is available."""

    def __init__(self, root: Path, groups: str = "") -> None:
        self.root = root
        self.put(
            "proc/meminfo",
            "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0",
        )
        if groups:
            self.put("proc/self/cgroup", groups)

    def put(self, name: str, content: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")

    def group_2(
        self, name: str, limit: object, usage: int, inactive: int = 0, active: int = 0, high: object = "max"
    ) -> None:
        """Make a group of version 2."""
        folder = f"sys/fs/cgroup/{name}"
        self.put(f"{folder}/memory.max", limit)
        self.put(f"{folder}/memory.high", high)
        self.put(f"{folder}/memory.current", usage)
        self.put(f"{folder}/memory.stat", f"anon 5\nfile 77\ninactive_file {inactive}\nactive_file {active}")

    def group_1(self, name: str, limit: int, usage: int, inactive: int = 0) -> None:
        """Make a group of version 1."""
        folder = f"sys/fs/cgroup/memory/{name}"
        self.put(f"{folder}/memory.limit_in_bytes", limit)
        self.put(f"{folder}/memory.usage_in_bytes", usage)
        self.put(
            f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file 0"
        )

    @property
    def free(self) -> int | None:
        room = free_memory(self.root)
        return None if room is None else room.size

    @property
    def total(self) -> int | None:
        room = total_memory(self.root)
        return None if room is None else room.size


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert (machine.free, machine.total) == (8 * GIB, 16 * GIB)


def test_a_system_that_does_not_say_sets_no_bound(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    assert total_memory(tmp_path) is None
    expect_free_memory(1 << 80, tmp_path)
    expect_total_memory(1 << 80, tmp_path)


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    """An engine that has just read its weights is not refused the memory that they were read through."""
    machine = Machine(tmp_path, "0::/box")
    machine.group_2("box", 4 * GIB, 3 * GIB)
    assert (machine.free, machine.total) == (1 * GIB, 4 * GIB)
    machine.group_2("box", 4 * GIB, 3 * GIB, inactive=GIB, active=GIB // 2)
    assert machine.free == 5 * GIB // 2


def test_the_least_of_all_groups_around_a_process_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/slice/pod/box")
    machine.group_2("slice/pod/box", "max", GIB)
    machine.group_2("slice/pod", 6 * GIB, 4 * GIB)
    machine.group_2("slice", 7 * GIB, 4 * GIB)
    assert (machine.free, machine.total) == (2 * GIB, 6 * GIB)
    machine.group_2("slice", 7 * GIB, 6 * GIB)
    assert (machine.free, machine.total) == (1 * GIB, 6 * GIB)
    machine.group_2("slice/pod/box", 9 * GIB, 0, high=GIB // 2)
    assert (machine.free, machine.total) == (GIB // 2, GIB // 2)


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/box")
    machine.group_2("box", GIB, 2 * GIB)
    assert machine.free == 0


@pytest.mark.parametrize("path", ["/", "/../..", "/docker/0123"])
def test_in_a_container_the_mount_is_the_group(tmp_path: Path, path: str) -> None:
    """The path may be that of the namespace, of one outside of it, or of the host, where it is
    not mounted.
    """
    machine = Machine(tmp_path, f"0::{path}")
    machine.group_2(".", 3 * GIB, GIB)
    assert machine.free == 2 * GIB


def test_groups_of_version_1(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "9:name=systemd:/x\n4:cpu,memory:/outer/inner\n0::/")
    machine.group_1("outer/inner", (1 << 63) - 4096, GIB)
    machine.group_1("outer", 5 * GIB, 4 * GIB, inactive=2 * GIB)
    machine.group_1(".", (1 << 63) - 4096, GIB)
    assert (machine.free, machine.total) == (3 * GIB, 5 * GIB)


def test_files_that_make_no_sense_set_no_bound(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/box:with:colons\nnonsense")
    machine.group_2("box:with:colons", "a lot", GIB)
    machine.put("sys/fs/cgroup/memory.max", GIB)
    machine.put("sys/fs/cgroup/memory.current", "some")
    assert machine.free == 8 * GIB


def test_the_message_says_who_sets_the_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/box")
    machine.group_2("box", 300 * MIB, 20 * MIB)
    with pytest.raises(PoolError) as caught:
        expect_free_memory(GIB, tmp_path)
    assert str(caught.value) == (
        f"pool: needs 1.0 GiB, but only 280.0 MiB is left of the 300.0 MiB that the control group"
        f" {tmp_path}/sys/fs/cgroup/box may use;"
        " lower cpu.capacity or raise that limit (docker run --memory, resources.limits.memory)"
    )
    expect_free_memory(280 * MIB, tmp_path)
    expect_total_memory(300 * MIB, tmp_path)
    with pytest.raises(PoolError, match=r"needs 301\.0 MiB, but only 300\.0 MiB is what the control group"):
        expect_total_memory(301 * MIB, tmp_path)


# -- a real control group --------------------------------------------------------------------------


def own_group() -> tuple[Path, str] | None:
    """Return this process's control group for memory and the name of its limit's file."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"
        if not controllers and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path(f"/sys/fs/cgroup{path}"), "memory.max"
    return None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with 300 MiB, where the machine lets a test make one."""
    found = own_group()
    if found is None:
        pytest.skip("no control group for memory is mounted here")
    parent, limit = found
    group = parent / f"kvtier-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(300 * MIB))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"a test may not make a control group here: {error}")
    yield group
    group.rmdir()


INSIDE = """
import os, sys
from pathlib import Path
group, directory = Path(sys.argv[1]), Path(sys.argv[2])
(group / "cgroup.procs").write_text(str(os.getpid()))
from kvtier.errors import PoolError
from kvtier.pool import Pool
def attempt(name, mebibytes, parties):
    try:
        pool = Pool.open(name, mebibytes, 1 << 20, parties, directory=directory)
        pool.rows[:] = 1
        print(name, "written", flush=True)
        return pool
    except PoolError as error:
        print(name, "refused:", error, flush=True)
"""


def run_inside(group: Path, directory: Path, script: str) -> list[str]:
    """Run a script in a group and return its lines."""
    command = [sys.executable, "-c", INSIDE + script, str(group), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def test_private_memory_beyond_the_limit_is_refused(small_group: Path, tmp_path: Path) -> None:
    """1 GiB opened under a limit of 300 MiB, and the process was killed as soon as it had filled that much
    of it.
    """
    too_much, enough = run_inside(small_group, tmp_path, "attempt('a', 1024, 1)\nattempt('b', 150, 1)")
    assert too_much.startswith("a refused: pool: needs 1.0 GiB, but only ")
    assert (
        f"is left of the 300.0 MiB that the control group {small_group} may use; lower cpu.capacity"
        in too_much
    )
    assert enough == "b written"


def test_two_shared_pools_beyond_the_limit(small_group: Path, tmp_path: Path) -> None:
    """The first has its memory when it opens, so the second one is refused before it takes any."""
    script = "first = attempt('a', 150, 2)\nattempt('b', 150, 2)\nfirst.rows[:] = 2"
    first, second = run_inside(small_group, tmp_path, script)
    assert first == "a written"
    assert second.startswith("b refused: pool: needs 150.0 MiB, but only ")


# -- file systems ----------------------------------------------------------------------------------

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


def test_a_system_without_a_list_of_mounts_has_no_answer(tmp_path: Path) -> None:
    assert find_mount(tmp_path, tmp_path / "nothing") is None


def test_shared_memory_of_this_system_is_memory() -> None:
    found = find_mount(Path("/dev/shm/somewhere/below"))
    assert found is None or found.is_memory
