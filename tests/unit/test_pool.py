"""The pool: one region for all parties, and nothing left behind by anybody, however they end."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvtier.pool
from kvtier.errors import InputError, IntegrityError, PoolError
from kvtier.pool import Pool

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
            directory = args.pop()
            pool = Pool.open(*args, directory=directory and Path(directory))
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

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", self.SCRIPT], text=True, **pipes)

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


def start(parties: list[Party], count: int) -> list[Party]:
    parties += [Party() for _ in range(count)]
    return parties[-count:]


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
    second = Pool.open("engine", 3, ROW, 2, directory=tmp_path)
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
    assert one.ask("open", engine_id, 4, ROW, 2, None) == "opened"
    assert one.ask("complete") is False
    assert two.ask("open", engine_id, 4, ROW, 2, None) == "opened"
    assert one.ask("complete") is True
    assert one.ask("write", 3, 42) == "written"
    assert two.ask("read", 3) == [42, 42]
    assert two.ask("write", 0, 17) == "written"
    assert one.ask("read", 0) == [17, 17]
    assert not list(kvtier.pool._shared_directory().glob(f"*{engine_id}*"))
    one.kill()
    assert two.ask("read", 3) == [42, 42]


def test_processes_that_race_to_create_get_one_region(tmp_path: Path, parties: list[Party]) -> None:
    racers = start(parties, 5)
    for racer in racers:
        racer.tell("open", "engine", 5, ROW, 5, str(tmp_path))
    assert [racer.reply() for racer in racers] == ["opened"] * 5
    for slot, racer in enumerate(racers):
        assert racer.ask("write", slot, slot + 1) == "written"
    for racer in racers:
        assert [racer.ask("read", slot) for slot in range(5)] == [[slot + 1] * 2 for slot in range(5)]
    assert list(tmp_path.iterdir()) == []


def test_a_region_whose_parties_were_killed_goes_with_the_next_start(tmp_path: Path, parties: list[Party]) -> None:
    for party in start(parties, 2):
        assert party.ask("open", "engine", 4, ROW, 3, str(tmp_path)) == "opened"
    parties[0].kill()
    Pool.open("other", 1, ROW, 2, directory=tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 1, "one party still holds it"
    parties[1].kill()
    Pool.open("other", 1, ROW, 2, directory=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_the_last_to_close_an_incomplete_region_removes_it(tmp_path: Path, parties: list[Party]) -> None:
    killed, closing = start(parties, 2)
    for party in (killed, closing):
        assert party.ask("open", "engine", 4, ROW, 3, str(tmp_path)) == "opened"
    killed.kill()
    assert closing.ask("close") is None
    assert list(tmp_path.iterdir()) == []


KILLED_AT_EVERY_STEP = """
import fcntl, json, os, signal, sys
from pathlib import Path
import kvtier.pool
from kvtier.pool import Pool

directory = Path(sys.argv[1])
real = {name: getattr(os, name) for name in ("open", "close", "ftruncate", "pwrite", "pread", "fstat", "statvfs")}

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
    kvtier.pool._write_header = dying(kvtier.pool._write_header)
    pools = [Pool.open("engine", 2, 4096, 3, directory=directory) for _ in range(2)]
    pools[0].close()
    pools += [Pool.open("engine", 2, 4096, 3, directory=directory) for _ in range(2)]
    os._exit(0)

step, left = 0, []
while True:
    step += 1
    child = os.fork()
    if child == 0:
        run(step)
    _, status = os.waitpid(child, 0)
    fresh = Pool.open("engine", 9, 4096, 2, directory=directory)  # another size: attaching to a leftover would fail
    fresh.close()
    left += [str(path) for path in directory.iterdir()]
    if os.WIFEXITED(status):
        break
print(json.dumps({"steps": step, "left": left, "status": os.WEXITSTATUS(status)}))
"""


def test_a_process_killed_at_any_step_leaves_nothing_after_the_next_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(tmp_path)], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    assert report["left"] == []
    assert report["status"] == 0
    assert report["steps"] > 30, "every call that changes the outside world was a step"


def test_a_party_that_closes_early_makes_room_for_another(tmp_path: Path) -> None:
    stays = Pool.open("engine", 2, ROW, 3, directory=tmp_path)
    Pool.open("engine", 2, ROW, 3, directory=tmp_path).close()
    second = Pool.open("engine", 2, ROW, 3, directory=tmp_path)
    assert not second.complete
    third = Pool.open("engine", 2, ROW, 3, directory=tmp_path)
    stays.rows[0] = 5
    assert (third.rows[0] == 5).all()
    for pool in (stays, second, third):
        assert pool.complete
        pool.close()


def test_one_party_too_many_is_never_complete(tmp_path: Path) -> None:
    """It sees other bytes than the rest, so it must be able to know."""
    pools = [Pool.open("engine", 1, ROW, 2, directory=tmp_path) for _ in range(3)]
    assert [pool.complete for pool in pools] == [True, True, False]
    for pool in pools:
        pool.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", [(3, ROW, 2), (2, 2 * ROW, 2), (2, ROW, 3)])
def test_parties_must_agree(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    pool = Pool.open("engine", 2, ROW, 2, directory=tmp_path)
    with pytest.raises(PoolError, match=r"expected .* slots of .* but .* has 2 slots of 4096 bytes for 2 parties"):
        Pool.open("engine", *sizes, directory=tmp_path)
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_too_much_memory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"needs 4\.0 PiB, but only .* of memory is available; lower cpu\.capacity"):
        Pool.open("engine", 1 << 40, ROW)
    with pytest.raises(PoolError, match=r"needs 4\.0 PiB, but only .* is free in .*; lower cpu\.capacity or enlarge"):
        Pool.open("engine", 1 << 40, ROW, 2, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_big_pool_takes_no_memory_until_it_is_used() -> None:
    free = kvtier.pool._free_memory()
    if free is None:
        pytest.skip("the system does not say how much memory it has")
    before = resident_bytes()
    pool = Pool.open("engine", free // 2 // ROW, ROW)
    pool.rows[-1] = 1
    assert resident_bytes() - before < min(free // 8, 64 << 20)
    pool.close()


def resident_bytes() -> int:
    """Return the memory that this process has taken, as the system counts it."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("sizes", [(-1, ROW, 1), (1, 0, 1), (1, ROW, 0)])
def test_sizes_must_make_sense(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="expected num_slots >= 0"):
        Pool.open("engine", *sizes)


@pytest.mark.parametrize("parties_", [1, 2])
def test_a_pool_may_have_no_slots(tmp_path: Path, parties_: int) -> None:
    pool = Pool.open("engine", 0, ROW, parties_, directory=tmp_path)
    assert pool.rows.shape == (0, ROW)
    pool.check()
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_any_engine_id_will_do(tmp_path: Path) -> None:
    pools = [Pool.open("../a b/ü*", 1, ROW, 2, directory=tmp_path / ".") for _ in range(2)]
    pools[0].rows[0] = 3
    assert (pools[1].rows[0] == 3).all()
    with pytest.raises(PoolError, match="File name too long"):
        Pool.open("x" * 300, 1, ROW, 2, directory=tmp_path)
    for pool in pools:
        pool.close()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("kvtier-")


def test_close_releases_the_memory_once_nobody_looks_at_it(tmp_path: Path) -> None:
    before = mappings()
    pools = [Pool.open("engine", 2, ROW, 2, directory=tmp_path) for _ in range(2)]
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
            Pool.open("engine", 1, ROW, 2, directory=tmp_path)
    pool.close()


def test_a_directory_that_stays_locked_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.pool, "_LOCK_SECONDS", 0.0)
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(PoolError, match="locked by another process"):
        Pool.open("engine", 1, ROW, 2, directory=tmp_path)
    os.close(fd)


def test_check_notices_a_header_that_was_overwritten(tmp_path: Path) -> None:
    pool = Pool.open("engine", 1, ROW, 2, directory=tmp_path)
    (name,) = tmp_path.iterdir()
    header = np.memmap(name, np.uint8, "r+", shape=(64,))
    header[9] += 1
    with pytest.raises(IntegrityError, match="overwritten"):
        pool.check()
    header[9] -= 1
    name.unlink()
    with pytest.raises(IntegrityError, match="is gone"):
        pool.check()
    pool.close()
