"""What attackers have found: faults beside each other, at bad moments, and in numbers."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.tiers.test_disk import capacity, disk, make_tier, opened, place_of
from tests.tiers.test_parts import Gate, make_threads, submit

from kvtier.cli import main
from kvtier.errors import OutsideError
from kvtier.policies import LRUPolicy
from kvtier.residency import MissReason
from kvtier.slot_table import SlotTable
from kvtier.testing.tier_suite import ROW_BYTES, ManualClock, content, key, keys
from kvtier.tiers.base import BackendRow, Direction
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk import files as files_module
from kvtier.tiers.disk import folder as folder_module
from kvtier.tiers.disk.folder import FolderLock, find_places, place_name, taken_bytes

LONG = 30.0
"""Longer than a busy machine stops anybody, and shorter than what hangs here goes on hanging."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let resets and discards wait for the page cache of a busy machine."""
    monkeypatch.setattr("kvtier.tiers.slot_tier._DISCARD_WAIT", 30)
    monkeypatch.setattr("kvtier.tiers.disk.tier._RESET_WAIT", 30)


@pytest.mark.parametrize("garbage", [b"\0", b"\xa5"])
def test_without_a_header_nothing_from_before_a_reset_is_back(tmp_path: Path, garbage: bytes) -> None:
    with opened(tmp_path) as driver:
        driver.store(1, 2)
    with opened(tmp_path) as driver:
        driver.tier.reset("weights were swapped")
    with (place_of(tmp_path) / "records").open("r+b") as records:
        records.write(garbage * 8192)
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 0
        driver.store(3)
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 1


@pytest.mark.usefixtures("patient")
def test_a_kill_right_after_a_reset_brings_nothing_back(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            with opened(tmp_path) as driver:
                driver.store(1, 2)
                driver.tier.reset("weights were swapped")
                os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 0


@pytest.mark.parametrize("failures", [1, 3])
def test_a_reset_that_could_not_be_written_is_written_at_the_end(
    tmp_path: Path, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all, left = files_module._write_all, [0]

    def fail(descriptor: int, content: bytes, offset: int) -> None:
        if offset < 8192 and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "for a while")
        write_all(descriptor, content, offset)

    monkeypatch.setattr(files_module, "_write_all", fail)
    with opened(tmp_path) as driver:
        driver.store(1, 2)
        left[0] = failures
        driver.tier.reset("weights were swapped")
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 0


def test_a_reset_waits_for_no_hung_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all, hang, go_on = files_module._write_all, [False], threading.Event()

    def wait(descriptor: int, content: bytes, offset: int) -> None:
        if hang[0]:
            assert go_on.wait(2 * LONG)
        write_all(descriptor, content, offset)

    monkeypatch.setattr(files_module, "_write_all", wait)
    with opened(tmp_path) as driver:
        driver.store(1)
        hang[0] = True
        began = time.monotonic()
        driver.tier.reset("weights were swapped")
        assert time.monotonic() - began < LONG
        assert driver.tier.lookup(key(1)) is False
        go_on.set()


def killed(play: Callable[[], None]) -> None:
    """Do something in a process of its own, and kill it."""
    child = os.fork()
    if child == 0:
        try:
            play()
            os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9


@pytest.mark.usefixtures("patient")
def test_a_kill_right_after_a_discard_does_not_bring_the_row_back(tmp_path: Path) -> None:
    def play() -> None:
        with opened(tmp_path) as driver:
            driver.store(1, 2)
            driver.tier.discard([key(1)])
            os.kill(os.getpid(), 9)

    killed(play)
    with opened(tmp_path) as driver:
        assert driver.tier.lookup_many(keys(1, 2)) == [False, True]


@pytest.mark.usefixtures("patient")
def test_a_kill_right_after_a_discard_of_what_is_being_written(tmp_path: Path) -> None:
    def play() -> None:
        with opened(tmp_path) as driver:
            driver.faulty.hang()
            driver.demote(1)
            assert driver.faulty.hanging.wait(30)
            timer = threading.Timer(0.1, driver.faulty.release)
            timer.start()
            driver.tier.discard([key(1)])
            timer.join()
            assert driver.tier.wait_any(30)
            os.kill(os.getpid(), 9)

    killed(play)
    with opened(tmp_path) as driver:
        assert driver.tier.lookup(key(1)) is False


def test_rows_discarded_in_the_queue_are_never_written(tmp_path: Path) -> None:
    with opened(tmp_path, threads=1) as driver:
        driver.faulty.hang()
        first, _ = driver.demote(1)
        assert driver.faulty.hanging.wait(30)
        second, _ = driver.demote(2, 3)
        driver.tier.discard([key(2)])
        driver.faulty.release()
        assert driver.finish(first, second) == dict(
            zip(keys(1, 2, 3), (None, MissReason.FAILED, None), strict=True)
        )
        assert key(2) not in driver.faulty.moved


def test_a_discard_waits_for_no_hung_disk(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1)
        driver.faulty.hang()
        began = time.monotonic()
        driver.tier.discard([key(1)])
        assert time.monotonic() - began < LONG
        assert driver.tier.lookup(key(1)) is False
        driver.faulty.release()


@pytest.mark.usefixtures("patient")
def test_a_row_that_cannot_be_deleted_is_deleted_later(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1, 2)
        driver.faulty.broken = OSError(errno.EIO, "for a while")
        driver.tier.discard([key(1)])
        assert driver.tier.stats().suspended is not None
        driver.faulty.broken = None
        driver.clock.now += 2
        driver.wait(lambda: driver.tier.stats().suspended is None)
        driver.store(1, version=1)
        assert driver.fetch(1) == {1: content(1, 1)}
        driver.tier.discard([key(1)])
    with opened(tmp_path) as driver:
        assert driver.tier.lookup_many(keys(1, 2)) == [False, True]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("end", ["close", "kill"])
@pytest.mark.parametrize("when", ["unknown", "known late", "refused"])
def test_a_reset_before_it_is_open_is_for_good(tmp_path: Path, when: str, end: str) -> None:
    with opened(tmp_path) as driver:
        driver.store(1, 2)
    child = os.fork()
    if child == 0:
        try:
            known: list[str] = ["model"] if when == "refused" else []
            more = {"capacity": 1 << 60} if when == "refused" else {}  # no disk has that
            tier = make_tier(tmp_path, namespace=lambda: known[0] if known else None, settings=more)
            tier.wait_open()
            tier.reset("weights were swapped")
            if when == "known late":
                known.append("model")
                tier.poll()
            if end == "kill":
                os.kill(os.getpid(), 9)
            tier.close(30)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {"close": 0, "kill": -9}[end]
    with opened(tmp_path, 60) as driver:
        assert driver.tier.stats().used == 0
        driver.store(3)
    with opened(tmp_path, 60) as driver:
        assert driver.tier.stats().used == 1


def test_a_reset_before_the_folder_is_owned_is_written_when_it_is(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1, 2)
        second = make_tier(tmp_path, namespace=lambda: None)
        assert not second.wait_open()
        second.reset("weights were swapped")
        assert driver.fetch(1) == {1: content(1)}, "the rows of the owner are its own"
    assert isinstance(second._clock, ManualClock)
    second._clock.now += 60
    while second.state() != "waiting for the namespace":
        second.poll()
        second.wait_any(0.01)
    second.close(30)
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 0


def test_a_reset_before_it_is_open_leaves_rows_of_another_size(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1)
    tier = make_tier(tmp_path, 40, namespace=lambda: None, row_bytes=2 * ROW_BYTES)
    assert tier.wait_open()
    tier.reset("weights were swapped")
    tier.close(30)
    with opened(tmp_path) as driver:
        assert driver.fetch(1) == {1: content(1)}


# Calls that do not return


def test_stuck_calls_leave_room_for_others() -> None:
    gate, now = Gate(), [0.0]
    threads = make_threads(gate, threads=4, max_in_flight=4 << 20, clock=lambda: now[0])
    submit(threads, Direction.PROMOTE, 1, 0, 1, deadline=1.0)
    for _ in range(2):
        assert gate.begun.acquire(timeout=30)
    now[0] = 3.0
    assert {report.outcome for report in threads.poll()} == {MissReason.TOO_SLOW}
    stuck, _ = threads.take_stuck(1.0)
    assert len(stuck) == 2
    submit(threads, Direction.PROMOTE, 2, 2, deadline=100.0)
    assert gate.begun.acquire(timeout=LONG), "two threads and all the room are left"
    gate.open.release(100)
    assert threads.close(30)
    threads.poll()
    threads.check()


def test_a_long_call_of_a_job_in_time_is_not_stuck() -> None:
    """Beside a call that is stuck, another call that runs as long and has time left is merely slow."""
    gate, now = Gate(), [0.0]
    threads = make_threads(gate, threads=2, clock=lambda: now[0])
    submit(threads, Direction.PROMOTE, 1, 0, deadline=1.0)
    submit(threads, Direction.PROMOTE, 2, 1, deadline=100.0)
    for _ in range(2):
        assert gate.begun.acquire(timeout=30)
    now[0] = 3.0
    assert [result.job.job_id for result in threads.poll()] == [1]
    stuck, is_starved = threads.take_stuck(1.0)
    assert ([batch.job.job_id for batch in stuck], is_starved) == ([1], False)
    gate.open.release(100)
    assert threads.close(30)


def test_threads_that_are_all_stuck_in_calls_are_noticed() -> None:
    gate, now, go_on = Gate(), [0.0], threading.Event()
    threads = make_threads(gate, threads=2, clock=lambda: now[0])
    begun = threading.Semaphore(0)

    def call() -> None:
        begun.release()
        assert go_on.wait(30)

    for _ in range(2):
        threads.call(call, lambda _value, _error: None)
    for _ in range(2):
        assert begun.acquire(timeout=30)
    submit(threads, Direction.PROMOTE, 1, 0, deadline=5.0)
    now[0] = 4.0
    threads.poll()
    assert threads.take_stuck(1.0) == (set(), False), "nobody has waited in vain"
    now[0] = 6.0
    assert [report.outcome for report in threads.poll()] == [MissReason.TOO_SLOW]
    assert threads.take_stuck(1.0) == (set(), True)
    assert threads.take_stuck(1.0) == (set(), False)
    go_on.set()
    gate.open.release(100)
    assert threads.close(30)


def test_a_row_whose_read_never_returns_is_dropped_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, threads=4) as driver:
        driver.store(*range(8))
        files, begun, go_on = driver.faulty.backend, threading.Semaphore(0), threading.Event()
        read = files.read

        def wait(rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
            if any(row.key == key(1) for row in rows):
                begun.release()
                assert go_on.wait(60)
            return read(rows)

        monkeypatch.setattr(files, "read", wait)
        for held in (True, False):
            driver.promote(1, deadline=driver.clock.now + 1.5)
            assert begun.acquire(timeout=30)
            driver.clock.now += 3
            driver.poll()
            assert driver.tier.stats().suspended is not None
            driver.clock.now += 10
            driver.wait(lambda: driver.tier.stats().suspended is None)
            assert driver.tier.lookup(key(1)) is held
            assert driver.fetch(2) == {2: content(2)}
        assert driver.tier.explain(key(1)) is MissReason.IO_FAILED
        assert driver.listener() == set(keys(0, *range(2, 8)))
        driver.wait(lambda: not disk(driver)._undeleted)
        assert driver.demote(9)[1] == [key(9)], "in the slot of one that was evicted"
        assert driver.tier.stats().stuck == 2
        go_on.set()
        driver.wait(lambda: driver.tier.stats().stuck == 0)
        driver.store(1, version=1)
        assert driver.fetch(1) == {1: content(1, 1)}


# Space


def test_fewer_ranks_than_before_take_no_more_than_the_capacity(tmp_path: Path) -> None:
    settings = {"capacity": capacity(64)}
    for rank in range(4):
        tier = make_tier(tmp_path, rank=rank, ranks=4, settings=settings)
        assert tier.wait_open()
        tier.close()
    for rank in range(2):
        tier = make_tier(tmp_path, rank=rank, ranks=2, settings=settings)
        assert tier.wait_open()
        assert tier.stats().capacity > 0
        assert taken_bytes(tmp_path) <= capacity(64)
        tier.close()


def test_more_ranks_than_before_wait_for_the_first_to_shrink(tmp_path: Path) -> None:
    settings = {"capacity": capacity(64)}
    tier = make_tier(tmp_path, settings=settings)
    assert tier.wait_open()
    tier.close()
    second = make_tier(tmp_path, rank=1, ranks=2, settings=settings)
    assert not second.wait_open()
    assert taken_bytes(tmp_path) <= capacity(64)
    second.close()
    first = make_tier(tmp_path, rank=0, ranks=2, settings=settings)
    assert first.wait_open()
    second = make_tier(tmp_path, rank=1, ranks=2, settings=settings)
    assert second.wait_open()
    assert taken_bytes(tmp_path) <= capacity(64)
    first.close()
    second.close()


def test_a_place_for_which_there_is_no_room_any_more_gives_its_space_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, 40, "another model") as driver:
        driver.store(*range(8))
    with opened(tmp_path, 60) as driver:
        driver.store(1)
    before = taken_bytes(place_named(tmp_path, "another model"))
    tier = make_tier(tmp_path, 20)
    assert not tier.wait_open()
    tier.close()
    assert taken_bytes(place_named(tmp_path, "model")) == 0
    assert "were given up" in caplog.text
    assert tier.problem is not None
    assert "other models' rows take" in tier.problem
    assert taken_bytes(place_named(tmp_path, "another model")) == before, "never those of others"
    with opened(tmp_path, 40, "another model") as driver:
        assert driver.fetch(1) == {1: content(1)}
    with opened(tmp_path, 60) as driver:
        assert driver.tier.stats().used == 0
        driver.store(1)


def place_named(path: Path, namespace: str) -> Path:
    return path / "rank-0" / place_name(namespace, ROW_BYTES)


def test_ranks_that_all_have_too_much_shrink_to_their_shares(tmp_path: Path) -> None:
    for slots in (64, 32):
        tiers = [make_tier(tmp_path, slots, rank=rank, ranks=2) for rank in range(2)]
        for _ in range(8):
            let_pass(tiers, 20)
        assert min(tier.stats().capacity for tier in tiers) >= slots // 2 - 8
        assert taken_bytes(tmp_path) <= capacity(slots)
        for tier in tiers:
            tier.close()


def test_a_rank_that_opens_while_another_shrinks_waits_for_its_share(tmp_path: Path) -> None:
    for rank in range(2):
        with closing(make_tier(tmp_path, 64, rank=rank, ranks=2)) as tier:
            assert tier.wait_open()
    # As if the other had got no further than half of its way to 16.
    (other,) = (tmp_path / "rank-1").glob("*-v*/slots")
    os.truncate(other, 22 * ROW_BYTES)
    first = make_tier(tmp_path, 32, rank=0, ranks=2)
    assert not first.wait_open()
    assert first.problem is not None
    assert "they give the rest back when they open" in first.problem
    with closing(first), closing(make_tier(tmp_path, 32, rank=1, ranks=2)) as second:
        let_pass([second], 20)  # it gives back what it has too much
        let_pass([first], 20)
        assert min(tier.stats().capacity for tier in (first, second)) >= 8
        assert taken_bytes(tmp_path) <= capacity(32)


def test_a_rank_takes_less_than_its_share_when_another_never_gives_it_back(tmp_path: Path) -> None:
    with closing(make_tier(tmp_path, 40)) as tier:
        assert tier.wait_open()
    second = make_tier(tmp_path, 64, rank=1, ranks=2)
    assert not second.wait_open()
    for _ in range(8):
        let_pass([second], 20)
    assert 8 <= second.stats().capacity < 32 - 8
    assert taken_bytes(tmp_path) <= capacity(64)
    second.close()


def let_pass(tiers: Sequence[DiskTier], seconds: float) -> None:
    """Let time pass, and wait until each tier is open or has failed once more."""
    for tier in tiers:
        assert isinstance(tier._clock, ManualClock)
        tier._clock.now += seconds
    for tier in tiers:
        while not tier.is_open() and tier._retry_at <= tier._clock():
            tier.wait_any(0.01)
            tier.poll()


def test_a_tick_of_garbage_breaks_nothing() -> None:
    table = SlotTable(4, LRUPolicy(4))
    ticks = np.array([5, np.iinfo(np.int64).max, np.iinfo(np.int64).min], dtype=np.int64)
    list(table.restore(np.arange(3), keys(0, 1, 2), ticks))
    table.free_holes()
    table.touch(np.array([0]))
    assert np.argsort(table.ticks[:3]).tolist() == [2, 1, 0]
    assert table.reserve(keys(3, 4), np.zeros(0, dtype=np.int64)).evicted == [key(2)]
    table.check()


# Owners and the command line


def test_a_momentary_look_does_not_keep_an_owner_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rank-0"
    looking, pauses = FolderLock.take_nowait(folder), list[float]()

    def look_no_more(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            looking.release()

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "time", SimpleNamespace(sleep=look_no_more))
        FolderLock.take_nowait(folder).release()
    assert len(pauses) == 2
    assert 0 < sum(pauses) < 1
    with opened(tmp_path), pytest.raises(OutsideError, match="only owner"):
        FolderLock.take_nowait(folder)


def test_a_forked_child_does_not_keep_the_folder_of_a_killed_owner(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()

    def play() -> None:
        tier = make_tier(tmp_path)
        assert tier.wait_open()
        if os.fork() == 0:
            os.close(write_end)
            os.read(read_end, 1)  # until the test closes the other end
            os._exit(0)

    killed(play)
    os.close(read_end)
    tier = make_tier(tmp_path)
    assert tier.wait_open(), tier.problem
    tier.close()
    os.close(write_end)


def test_gc_of_what_cannot_be_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path):
        pass
    place = place_of(tmp_path)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert main(["disk", "gc", str(tmp_path), "--all"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{place}: expected to remove all of it" in error
    assert (tmp_path / "elsewhere" / "records").exists()


def test_gc_goes_on_after_a_failure_and_leaves_no_half_of_a_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, namespace in enumerate(("one", "two", "three")):
        with opened(tmp_path, 20 * (number + 1), namespace) as driver:
            driver.store(1)
    unlink, stubborn = os.unlink, place_named(tmp_path, "two")

    def fail(name: str, *, dir_fd: int | None = None) -> None:
        if name == "slots" and stubborn.name in os.readlink(f"/proc/self/fd/{dir_fd}"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        assert main(["disk", "gc", str(tmp_path), "--all"]) == 1
    told = capsys.readouterr()
    assert told.out.count("removed ") == 2
    assert told.err.count("\n") == 1
    assert f"{stubborn}: expected to remove all of it: Operation not permitted" in told.err
    with opened(tmp_path, 100, "two") as driver:
        assert driver.tier.stats().used == 0, "nothing of it is opened"
    assert main(["disk", "check", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["disk", "ls", str(tmp_path)]) == 0
    (left,) = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "being removed" in line]
    assert main(["disk", "gc", str(tmp_path), left]) == 0
    assert [place.folder for place in find_places(tmp_path)] == [stubborn]


def test_an_owner_whose_lock_was_removed_gives_up(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1)
        (tmp_path / "rank-0" / "lock").unlink()
        with opened(tmp_path, 2):
            driver.clock.now += 6
            driver.wait(lambda: driver.tier.stats().capacity == 0)
            assert driver.tier.lookup(key(1)) is False


def test_an_engine_that_does_not_know_how_many_there_are_keeps_its_place(tmp_path: Path) -> None:
    """So it is with data-parallel engines of dense models in vLLM: the second is number 1 of 1."""
    sizes = []
    for _ in range(3):
        tier = make_tier(tmp_path, rank=1, ranks=1)
        assert tier.wait_open()
        sizes.append(tier.stats().capacity)
        tier.close()
    assert len(set(sizes)) == 1, "its own rows are not what others left"
