"""The pool: one region for all parties, and nothing left behind by anybody, however they end."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
import pytest

import kvtier.rendezvous
from kvtier.errors import InputError, IntegrityError, PoolError
from kvtier.machine import free_memory
from kvtier.pool import MAX_PARTIES, Pool

ROW = 4096


class Party:
    """A process that opens a pool and does what it is told."""

    SCRIPT = """
import json, sys
from pathlib import Path
from kvtier.pool import Pool
for line in sys.stdin:
    verb, *args = json.loads(line)
    try:
        if verb == "open":
            *args, party, directory = args
            launch_id = args.pop() if len(args) == 5 else ""
            directory = directory and Path(directory)
            pool = Pool.open(*args, party=party, launch_id=launch_id, directory=directory)
            reply = "opened"
        elif verb == "write":
            pool.rows[args[0]] = args[1]
            reply = "written"
        elif verb == "read":
            reply = [int(pool.rows[args[0]].min()), int(pool.rows[args[0]].max())]
        elif verb == "complete":
            reply = pool.complete
        elif verb == "close":
            reply = pool.close()
    except Exception as error:
        reply = f"{type(error).__name__}: {error}"
    print(json.dumps(reply), flush=True)
"""

    def __init__(self, *wrapper: str) -> None:
        """`wrapper` is a command that runs the one behind it."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([*wrapper, sys.executable, "-c", self.SCRIPT], text=True, **pipes)

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)

    def reply(self) -> object:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *command: object) -> object:
        self.tell(*command)
        return self.reply()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def parties() -> Iterator[list[Party]]:
    """Processes, all ended when the test is."""
    started: list[Party] = []
    yield started
    for party in started:
        party.kill()


def start(parties: list[Party], count: int, *wrapper: str) -> list[Party]:
    parties += [Party(*wrapper) for _ in range(count)]
    return parties[-count:]


def open_all(num_slots: int, parties: int, directory: Path) -> list[Pool]:
    """Open a pool as every party, in this process."""
    return [
        Pool.open("engine", num_slots, ROW, parties, party=party, directory=directory)
        for party in range(parties)
    ]


def test_one_party_has_private_memory_without_a_name(tmp_path: Path) -> None:
    pool = Pool.open("engine", 3, ROW, directory=tmp_path)
    pool.rows[1] = 7
    assert pool.complete
    assert pool.rows.shape == (3, ROW)
    assert pool.rows.sum() == 7 * ROW
    assert list(tmp_path.iterdir()) == []
    pool.check()
    pool.close()


def test_two_parties_of_one_process_share_bytes(tmp_path: Path) -> None:
    first = Pool.open("engine", 3, ROW, 2, directory=tmp_path)
    assert not first.complete
    (name,) = tmp_path.iterdir()
    assert name.stat().st_mode & 0o777 == 0o600
    first.check()
    second = Pool.open("engine", 3, ROW, 2, party=1, directory=tmp_path)
    assert first.complete
    assert second.complete
    assert list(tmp_path.iterdir()) == []
    first.rows[2] = 9
    assert (second.rows[2] == 9).all()
    for pool in (first, second):
        pool.check()
        pool.close()


def test_processes_share_bytes_and_leave_nothing_in_shared_memory(parties: list[Party]) -> None:
    engine_id = f"test-{os.getpid()}"
    one, two = start(parties, 2)
    assert one.ask("open", engine_id, 4, ROW, 2, 0, None) == "opened"
    assert one.ask("complete") is False
    assert two.ask("open", engine_id, 4, ROW, 2, 1, None) == "opened"
    assert one.ask("complete") is True
    assert one.ask("write", 3, 42) == "written"
    assert two.ask("read", 3) == [42, 42]
    assert two.ask("write", 0, 17) == "written"
    assert one.ask("read", 0) == [17, 17]
    assert not list(kvtier.rendezvous.default_directory().glob(f"*{engine_id}*"))
    one.kill()
    assert two.ask("read", 3) == [42, 42]


def test_processes_that_race_to_create_get_one_region(tmp_path: Path, parties: list[Party]) -> None:
    racers = start(parties, 5)
    for party, racer in enumerate(racers):
        racer.tell("open", "engine", 5, ROW, 5, party, str(tmp_path))
    assert [racer.reply() for racer in racers] == ["opened"] * 5
    for slot, racer in enumerate(racers):
        assert racer.ask("write", slot, slot + 1) == "written"
    for racer in racers:
        assert [racer.ask("read", slot) for slot in range(5)] == [[slot + 1] * 2 for slot in range(5)]
    assert list(tmp_path.iterdir()) == []


MIB = 1 << 20


def test_parties_killed_before_the_last_has_attached_leave_no_memory(
    tmp_path: Path, parties: list[Party]
) -> None:
    """Only a file of some bytes, which the next start removes. It used to be the whole region."""
    for number, party in enumerate(start(parties, 2)):
        assert party.ask("open", "engine", 16, MIB, 3, number, str(tmp_path)) == "opened"
        assert party.ask("write", number, 255) == "written"
    (name,) = tmp_path.iterdir()
    creator, descriptor, _, inode = map(int, name.read_text().split())
    memory = Path(f"/proc/{creator}/fd/{descriptor}").stat()
    assert (memory.st_ino, memory.st_size) == (inode, 16 * MIB + 4096)
    assert memory.st_blocks * 512 >= memory.st_size, "all of it was reserved"
    for party in parties:
        party.kill()
    assert name.stat().st_size < 100
    assert not list(processes_that_map(inode)), "no process is left that could keep it"
    Pool.open("other", 1, ROW, 2, directory=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def processes_that_map(inode: int) -> Iterator[Path]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            lines = maps.read_text().splitlines()
            if any(f" {inode} " in line and "/memfd:kvtier-" in line for line in lines):
                yield maps


def test_memory_goes_with_the_last_that_maps_it(tmp_path: Path, parties: list[Party]) -> None:
    """Also while it is announced: then its creator's death is the end of that region, and the next one
    begins another.
    """
    creator, stays, newcomer = start(parties, 3)
    assert creator.ask("open", "engine", 4, ROW, 3, 0, str(tmp_path)) == "opened"
    (name,) = tmp_path.iterdir()
    inode = int(name.read_text().split()[3])
    assert stays.ask("open", "engine", 4, ROW, 3, 1, str(tmp_path)) == "opened"
    assert len(list(processes_that_map(inode))) == 2
    creator.kill()
    assert newcomer.ask("open", "engine", 4, ROW, 3, 2, str(tmp_path)) == "opened"
    assert int(name.read_text().split()[0]) == newcomer.process.pid
    assert len(list(processes_that_map(inode))) == 1, "it has a region of its own"
    assert stays.ask("complete") is False
    assert stays.ask("close") is None
    assert list(processes_that_map(inode)) == []
    assert name.exists(), "who leaves an old region does not touch the new one"
    assert newcomer.ask("close") is None
    assert list(tmp_path.iterdir()) == []


def test_an_announcement_stays_while_its_process_lives(tmp_path: Path, parties: list[Party]) -> None:
    (party,) = start(parties, 1)
    assert party.ask("open", "engine", 4, ROW, 3, 0, str(tmp_path)) == "opened"
    Pool.open("other", 1, ROW, 2, directory=tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 1, "one party still holds it"
    party.kill()
    Pool.open("other", 1, ROW, 2, directory=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_creator_that_closes_early_withdraws(tmp_path: Path) -> None:
    first, second = (Pool.open("engine", 4, ROW, 3, party=party, directory=tmp_path) for party in range(2))
    first.close()
    assert list(tmp_path.iterdir()) == []
    second.check()
    pools = open_all(4, 3, tmp_path)
    assert [pool.complete for pool in pools] == [True] * 3
    assert not second.complete, "it looks at memory that nobody else has"
    for pool in (second, *pools):
        pool.close()


def test_a_pool_that_is_forgotten_is_not_announced_for_ever(tmp_path: Path) -> None:
    pool = Pool.open("engine", 4, ROW, 2, directory=tmp_path)
    del pool
    gc.collect()
    for pool in open_all(2, 2, tmp_path):  # another size: attaching to what was left would fail
        assert pool.rows.shape == (2, ROW)
        pool.close()
    assert list(tmp_path.iterdir()) == []


# -- two engines with one id -----------------------------------------------------------------------

TWO_ENGINES = r"two engines have the engine_id 'engine'; give each its own"


def test_two_launches_with_one_engine_id_do_not_meet(tmp_path: Path, parties: list[Party]) -> None:
    """Their ranks used to pair up as they came, and both wrote into one region."""
    ours, theirs = start(parties, 2)
    assert ours.ask("open", "engine", 4, ROW, 2, "launch 1", 0, str(tmp_path)) == "opened"
    reply = theirs.ask("open", "engine", 4, ROW, 2, "launch 2", 1, str(tmp_path))
    assert reply == f"PoolError: pool: {TWO_ENGINES}"
    (second,) = start(parties, 1)
    assert second.ask("open", "engine", 4, ROW, 2, "launch 1", 1, str(tmp_path)) == "opened"
    assert ours.ask("complete") is True
    assert theirs.ask("open", "engine", 4, ROW, 2, "launch 2", 1, str(tmp_path)) == "opened", (
        "the first have met"
    )
    assert theirs.ask("complete") is False
    assert ours.ask("write", 0, 7) == "written"
    assert theirs.ask("read", 0) == [0, 0]


def test_a_rank_attaches_once(tmp_path: Path) -> None:
    """Also without a launch id two engines are noticed as soon as both have the same rank."""
    pool = Pool.open("engine", 2, ROW, 3, party=1, directory=tmp_path)
    with pytest.raises(PoolError, match=f"party 1 has attached already: {TWO_ENGINES}"):
        Pool.open("engine", 2, ROW, 3, party=1, directory=tmp_path)
    pool.check()
    others = [Pool.open("engine", 2, ROW, 3, party=party, directory=tmp_path) for party in (2, 0)]
    assert pool.complete
    for attached in (pool, *others):
        attached.close()


def test_a_thousand_parties(tmp_path: Path) -> None:
    first = Pool.open("engine", 1, ROW, MAX_PARTIES, party=MAX_PARTIES - 1, directory=tmp_path)
    second = Pool.open("engine", 1, ROW, MAX_PARTIES, party=0, directory=tmp_path)
    first.rows[0] = 1
    assert (second.rows[0] == 1).all()
    assert not first.complete
    assert MAX_PARTIES >= 1024
    for pool in (first, second):
        pool.check()
        pool.close()


def test_another_pid_namespace_is_one_clear_line(tmp_path: Path, parties: list[Party]) -> None:
    """Containers may share a directory without seeing each other's processes.

    Nobody takes the other one for dead.
    """
    options = ("--pid", "--fork", "--mount-proc")
    expect_unshare(*options)
    ours = Pool.open("engine", 2, ROW, 2, directory=tmp_path)
    (stranger,) = start(parties, 1, "unshare", *options)
    reply = str(stranger.ask("open", "engine", 2, ROW, 2, 1, str(tmp_path)))
    assert reply.startswith(
        f"PoolError: pool: cannot open the memory of process {os.getpid()}, to which {tmp_path}"
    )
    assert reply.endswith(
        "run an engine's processes as one user in one PID namespace, or choose another engine_id"
    )
    assert "\n" not in reply
    ours.check()
    other = Pool.open("engine", 2, ROW, 2, party=1, directory=tmp_path)
    assert ours.complete
    ours.close()
    other.close()


def expect_unshare(*options: str) -> None:
    """Skip where the system does not let a test have a namespace."""
    tried = subprocess.run(["unshare", *options, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"unshare {' '.join(options)}: {tried.stderr.strip()}")


# -- memory that is there --------------------------------------------------------------------------

TWO_POOLS = """
import sys
from pathlib import Path
from kvtier.pool import Pool
def open_pair(name):
    return [Pool.open(name, 15, 4 << 20, 2, party=party, directory=Path(sys.argv[1])) for party in range(2)]
for one, other in [open_pair("first"), open_pair("second")]:
    one.rows[:] = 9
    assert other.rows.min() == 9
print("written")
"""


def test_two_pools_in_little_shared_memory(tmp_path: Path) -> None:
    """Both opened, and SIGBUS ended whoever wrote beyond what there was.

    In a container /dev/shm has 64 MiB.
    """
    expect_unshare("--mount")
    mount = f"mount -t tmpfs -o size=100m tmpfs {tmp_path}"
    tried = subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"{mount}: {tried.stderr.strip()}")
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'{mount} && exec "$0" "$@"',
        sys.executable,
        "-c",
        TWO_POOLS,
    ]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "written\n"), done.stderr


def test_all_memory_is_there_before_anybody_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = os.posix_fallocate

    def attach_meanwhile(fd: int, start: int, length: int) -> None:
        if not seen:
            seen.append(
                others.enter_context(
                    closing(Pool.open("engine", 2, ROW, 2, party=1, directory=tmp_path))
                ).complete
            )
        real(fd, start, length)

    with ExitStack() as others:
        monkeypatch.setattr(os, "posix_fallocate", attach_meanwhile)
        pool = others.enter_context(closing(Pool.open("engine", 2, ROW, 2, directory=tmp_path)))
        assert seen == [False], "a party may attach while memory is reserved, and finds the pool incomplete"
        assert pool.complete


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_memory_that_cannot_be_reserved_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(fd: int, start: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        message = rf"cannot reserve 12\.0 KiB: .*{os.strerror(code)}; lower cpu\.capacity"
        with pytest.raises(PoolError, match=message):
            Pool.open("engine", 2, ROW, 2, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
    for pool in open_all(2, 2, tmp_path):
        pool.close()


KILLED_AT_EVERY_STEP = """
import fcntl, json, os, signal, sys
from pathlib import Path
import kvtier.pool
from kvtier.pool import Pool

directory = Path(sys.argv[1])
names = "open close memfd_create ftruncate pwrite write pread fstat stat posix_fallocate"
real = {name: getattr(os, name) for name in names.split()}

def run(step):
    calls = 0
    def dying(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for name, function in real.items():
        setattr(os, name, dying(function))
    fcntl.flock = dying(fcntl.flock)
    Path.unlink = dying(Path.unlink)
    kvtier.pool._attach = dying(kvtier.pool._attach)
    kvtier.pool._unmap = dying(kvtier.pool._unmap)
    pools = [Pool.open("engine", 2, 4096, 3, party=party, directory=directory) for party in range(2)]
    pools[1].close()
    pools += [Pool.open("engine", 2, 4096, 3, party=party, directory=directory) for party in (1, 2)]
    os._exit(0)

step, left = 0, []
while True:
    step += 1
    child = os.fork()
    if child == 0:
        run(step)
    _, status = os.waitpid(child, 0)
    # Of another size: attaching to a leftover would fail.
    fresh = Pool.open("engine", 9, 4096, 2, directory=directory)
    fresh.close()
    left += [str(path) for path in directory.iterdir()]
    if os.WIFEXITED(status):
        break
print(json.dumps({"steps": step, "left": left, "status": os.WEXITSTATUS(status)}))
"""


def test_a_process_killed_at_any_step_leaves_nothing_after_the_next_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["left"] == []
    assert report["status"] == 0
    assert report["steps"] > 50, "every call that changes the outside world was a step"


def test_a_party_that_closes_early_makes_room_for_another(tmp_path: Path) -> None:
    stays = Pool.open("engine", 2, ROW, 3, directory=tmp_path)
    Pool.open("engine", 2, ROW, 3, party=1, directory=tmp_path).close()
    second = Pool.open("engine", 2, ROW, 3, party=1, directory=tmp_path)
    assert not second.complete
    third = Pool.open("engine", 2, ROW, 3, party=2, directory=tmp_path)
    stays.rows[0] = 5
    assert (third.rows[0] == 5).all()
    for pool in (stays, second, third):
        assert pool.complete
        pool.close()


def test_one_party_too_many_is_never_complete(tmp_path: Path) -> None:
    """It sees other bytes than the rest, so it must be able to know."""
    pools = [Pool.open("engine", 1, ROW, 2, party=party, directory=tmp_path) for party in (0, 1, 1)]
    assert [pool.complete for pool in pools] == [True, True, False]
    for pool in pools:
        pool.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", [(3, ROW, 2), (2, 2 * ROW, 2), (2, ROW, 3)])
def test_parties_must_agree(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    pool = Pool.open("engine", 2, ROW, 2, directory=tmp_path)
    with pytest.raises(
        PoolError, match=r"expected .* slots of .* but .* has 2 slots of 4096 bytes for 2 parties"
    ):
        Pool.open("engine", *sizes, party=1, directory=tmp_path)
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_too_much_memory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(
        PoolError, match=r"needs 4\.0 PiB, but only .* of memory is available; lower cpu\.capacity"
    ):
        Pool.open("engine", 1 << 40, ROW)
    with pytest.raises(
        PoolError, match=r"needs 4\.0 PiB, but only .* of memory is available; lower cpu\.capacity"
    ):
        Pool.open("engine", 1 << 40, ROW, 2, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_big_pool_takes_no_memory_until_it_is_used() -> None:
    free = free_memory()
    if free is None:
        pytest.skip("the system does not say how much memory it has")
    before = resident_bytes()
    pool = Pool.open("engine", free.size // 2 // ROW, ROW)
    pool.rows[-1] = 1
    assert resident_bytes() - before < min(free.size // 8, 64 << 20)
    pool.close()


def resident_bytes() -> int:
    """Return the memory that this process has taken, as the system counts it."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "sizes",
    [
        (-1, ROW, 1, 0),
        (1, 0, 1, 0),
        (1, ROW, 0, 0),
        (1, ROW, 2, 2),
        (1, ROW, 2, -1),
        (1, ROW, MAX_PARTIES + 1, 0),
    ],
)
def test_sizes_must_make_sense(sizes: tuple[int, int, int, int]) -> None:
    *rest, party = sizes
    with pytest.raises(InputError, match="expected num_slots >= 0"):
        Pool.open("engine", *rest, party=party)


@pytest.mark.parametrize("parties_", [1, 2])
def test_a_pool_may_have_no_slots(tmp_path: Path, parties_: int) -> None:
    pool = Pool.open("engine", 0, ROW, parties_, directory=tmp_path)
    assert pool.rows.shape == (0, ROW)
    pool.check()
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_any_engine_id_will_do(tmp_path: Path) -> None:
    pools = [Pool.open("../a b/ü*", 1, ROW, 2, party=party, directory=tmp_path / ".") for party in range(2)]
    pools[0].rows[0] = 3
    assert (pools[1].rows[0] == 3).all()
    with pytest.raises(PoolError, match="File name too long"):
        Pool.open("x" * 300, 1, ROW, 2, directory=tmp_path)
    for pool in pools:
        pool.close()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:kvtier-")


def test_close_releases_the_memory_once_nobody_looks_at_it(tmp_path: Path) -> None:
    before, descriptors = mappings(), len(os.listdir("/proc/self/fd"))
    pools = open_all(2, 2, tmp_path)
    assert mappings() == before + 2
    view = pools[0].rows[1:]
    for pool in pools:
        pool.close()
        pool.close()
        pool.check()
    assert mappings() == before + 1
    view[:] = 1
    del view
    assert mappings() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(PoolError, match="closed"):
        _ = pools[0].rows


def test_only_regions_are_swept(tmp_path: Path) -> None:
    (tmp_path / "kvtier.txt").write_text("mine")
    (tmp_path / "kvtier-old.pool").write_bytes(b"left by somebody who was killed")
    Pool.open("engine", 1, ROW, 2, directory=tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["kvtier.txt"]


def test_a_region_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool.open("engine", 1, ROW, 2, directory=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(PoolError, match="belongs to another user"):
            Pool.open("engine", 1, ROW, 2, party=1, directory=tmp_path)
    pool.close()


def test_a_directory_that_stays_locked_is_an_error(tmp_path: Path) -> None:
    with (
        kvtier.rendezvous.locked(tmp_path),
        pytest.raises(PoolError, match="locked by another process for 0 s"),
    ):
        kvtier.rendezvous.locked(tmp_path, patience=0.0).__enter__()


def test_a_file_that_says_something_else_is_refused_while_it_is_held(tmp_path: Path) -> None:
    """It may be another version's. Nobody can tell what its process would make of being ignored."""
    path = kvtier.rendezvous.path_of("engine", tmp_path)
    for content in ("", "kvtpool1", f"{os.getpid()} 0 1 2"):
        path.write_text(content)
        with path.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            with pytest.raises(PoolError, match="cannot open the memory of"):
                Pool.open("engine", 1, ROW, 2, directory=tmp_path)
            assert path.exists()


def test_check_notices_a_header_that_was_overwritten(tmp_path: Path) -> None:
    pool = Pool.open("engine", 1, ROW, 2, directory=tmp_path)
    (name,) = tmp_path.iterdir()
    process, descriptor, *_ = name.read_text().split()
    header = np.memmap(f"/proc/{process}/fd/{descriptor}", np.uint8, "r+", shape=(4096,))
    for place in (9, 128):  # what does not change, and the mark of this party
        header[place] += 1
        with pytest.raises(IntegrityError, match="overwritten"):
            pool.check()
        header[place] -= 1
    pool.check()
    name.unlink()
    with pytest.raises(IntegrityError, match="is gone"):
        pool.check()
    pool.close()


# -- a directory in which others do as they like ---------------------------------------------------

OPEN_ONE = """
import os, sys
from pathlib import Path
from kvtier.errors import PoolError
from kvtier.pool import Pool
try:
    Pool.open("engine", 1, 4096, 2, directory=Path(sys.argv[1]))
except PoolError as error:
    print(error)
"""


@pytest.mark.parametrize("target", ["a pipe", "/dev/zero", "a file"])
def test_a_link_in_the_place_of_a_named_file_is_refused_at_once(tmp_path: Path, target: str) -> None:
    """A pipe stopped every start of an engine, under the directory's lock; a device was read without end."""
    os.mkfifo(tmp_path / "a pipe")
    (tmp_path / "a file").write_text("1 2 3 4")
    path = kvtier.rendezvous.path_of("engine", tmp_path)
    path.symlink_to(tmp_path / target)
    command = ["prlimit", f"--as={4 << 30}", sys.executable, "-c", OPEN_ONE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "cannot open the memory of another program" in done.stdout, done.stderr
    assert "Too many levels of symbolic links" in done.stdout
    assert path.is_symlink()


def test_a_held_pipe_is_refused_at_once(tmp_path: Path) -> None:
    path = kvtier.rendezvous.path_of("engine", tmp_path)
    os.mkfifo(path)
    held = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.flock(held, fcntl.LOCK_SH)
    command = [sys.executable, "-c", OPEN_ONE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "not a regular file" in done.stdout, done.stderr
    os.close(held)


def test_little_of_a_held_file_is_read(tmp_path: Path) -> None:
    """All of it was read, and a part of what it said was in the message."""
    path = kvtier.rendezvous.path_of("engine", tmp_path)
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        held.write(b"9\x1b[2J" * 1000)
        held.truncate(1 << 43)
        with pytest.raises(PoolError, match="cannot open the memory of another program") as caught:
            Pool.open("engine", 1, ROW, 2, directory=tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("size", [0, 10, 4096])
def test_an_announcement_that_leads_to_no_pool_is_refused(tmp_path: Path, size: int) -> None:
    """Its bytes were unpacked as a header, with an error of `struct`."""
    with (tmp_path / "something").open("w+b") as memory:
        memory.truncate(size)
        held = kvtier.rendezvous.announce(kvtier.rendezvous.path_of("engine", tmp_path), memory.fileno())
        with pytest.raises(PoolError, match="expected the memory of a pool of this version"):
            Pool.open("engine", 1, ROW, 2, directory=tmp_path)
        os.close(held)


def test_a_region_shorter_than_it_says_is_refused(tmp_path: Path) -> None:
    pool = Pool.open("engine", 4, ROW, 2, directory=tmp_path)
    (name,) = tmp_path.iterdir()
    process, descriptor, *_ = name.read_text().split()
    os.truncate(f"/proc/{process}/fd/{descriptor}", ROW)
    with pytest.raises(PoolError, match="expected the memory of a pool"):
        Pool.open("engine", 4, ROW, 2, party=1, directory=tmp_path)
    pool.close()


@pytest.mark.parametrize("parties_", [1, 2])
@pytest.mark.parametrize("name", ["engine_id", "launch_id"])
def test_ids_must_be_text(tmp_path: Path, name: str, parties_: int) -> None:
    ids = {"engine_id": "engine", "launch_id": ""} | {name: "half a pair: \ud800"}
    with pytest.raises(
        InputError, match=rf"pool: {name}: expected text that can be encoded, got 'half .*ud800'"
    ):
        Pool.open(ids["engine_id"], 1, ROW, parties_, launch_id=ids["launch_id"], directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_close_gives_the_memory_up_also_if_the_directory_is_gone(tmp_path: Path) -> None:
    before, descriptors = mappings(), len(os.listdir("/proc/self/fd"))
    directory = tmp_path / "shm"
    directory.mkdir()
    pools = [Pool.open("engine", 1, ROW, 3, party=party, directory=directory) for party in range(2)]
    shutil.rmtree(directory)
    for pool in pools:
        pool.close()
    assert (mappings(), len(os.listdir("/proc/self/fd"))) == (before, descriptors)


def test_close_gives_the_memory_up_also_if_the_directory_stays_locked(tmp_path: Path) -> None:
    """It waited for 30 seconds and raised. What it leaves in the directory, the next start removes."""
    before, descriptors = mappings(), len(os.listdir("/proc/self/fd"))
    pool = Pool.open("engine", 1, ROW, 3, directory=tmp_path)
    with kvtier.rendezvous.locked(tmp_path):
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < 20
    assert (mappings(), len(os.listdir("/proc/self/fd"))) == (before, descriptors)
    assert len(list(tmp_path.iterdir())) == 1
    for pool in open_all(2, 2, tmp_path):  # another size: attaching to what was left would fail
        pool.close()
    assert list(tmp_path.iterdir()) == []
