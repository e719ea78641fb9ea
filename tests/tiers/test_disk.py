"""What only the disk tier promises: warm after a restart, bounded, owned by one, hard to kill."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.cli import main
from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, OutsideError
from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.offload.tiered import ConfiguredTier, TieredOffloadingManager
from kvtier.policies import Ending, GittinsPolicy
from kvtier.policies.reuse import NUM_BINS, NUM_ENDINGS
from kvtier.residency import MissReason
from kvtier.testing.caches import make_caches, make_config
from kvtier.testing.faulty_backend import FaultyBackend
from kvtier.testing.memory_tier import MemoryBackend
from kvtier.testing.tier_suite import ROW_BYTES, ManualClock, TierDriver, churn, content, key, keys
from kvtier.tiers import factory
from kvtier.tiers.base import Direction
from kvtier.tiers.disk import DiskConfig, DiskFiles, DiskTier, find_places
from kvtier.tiers.disk import files as files_module
from kvtier.tiers.disk import folder as folder_module
from kvtier.tiers.disk.folder import FolderLock, learnt_bytes, place_name, taken_bytes
from kvtier.tiers.disk.format import description_stride, pack_description, read_description
from kvtier.tiers.slot_tier import WriteLimit

SLOT_BYTES = ROW_BYTES + 128 + 576
FIXED_BYTES = 20480
PATIENCE = 60.0


def capacity(slots: int) -> int:
    size = slots * SLOT_BYTES + FIXED_BYTES
    return size + learnt_bytes(size)


def make_tier(
    path: Path, slots: int = 8, namespace: str | Callable[[], str | None] = "model", **more: Any
) -> DiskTier:
    settings = {"write_limit": 0, "capacity": capacity(slots)} | more.pop("settings", {})
    more = {"row_bytes": ROW_BYTES, "threads": 2, "clock": ManualClock(1000.0)} | more
    config = DiskConfig(path=str(path), **settings)
    return DiskTier(config, namespace=namespace if callable(namespace) else lambda: str(namespace), **more)


@contextmanager
def opened(path: Path, slots: int = 8, namespace: str = "model", **more: Any) -> Iterator[TierDriver]:
    """Open a tier as a process would, and end it as one does."""
    tier = make_tier(path, slots, namespace, **more)
    try:
        assert tier.wait_open(), tier.problem
        backend = tier._io.backend
        assert backend is not None
        faulty = tier._io.backend = FaultyBackend(backend)
        clock = tier._clock
        assert isinstance(clock, ManualClock)
        yield TierDriver(tier, faulty, clock)
        faulty.release()
        tier.check()
    finally:
        tier.close(30)


def disk(driver: TierDriver) -> DiskTier:
    assert isinstance(driver.tier, DiskTier)
    return driver.tier


def place_of(path: Path) -> Path:
    (place,) = find_places(path)
    return place.folder


# Restarts


def test_a_restart_finds_everything(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1, 2, 3)
    with opened(tmp_path) as driver:
        found = driver.tier.lookup_many(keys(1, 2, 3, 4))
        assert found == [True, True, True, False], "at once, before anything is announced"
        assert driver.fetch(1, 2, 3) == {number: content(number) for number in (1, 2, 3)}


def test_a_restart_announces_in_full_newest_first(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1, 2)
        driver.store(3, 4)
        driver.tier.touch(keys(1, 2))
    with opened(tmp_path) as driver:
        driver.wait(lambda: bool(driver.events))
        (event,) = driver.events
        assert list(event.keys) == keys(1, 2, 3, 4), "parents before what follows them"
        assert event.descriptions == tuple(b"about " + name for name in event.keys)
        assert not driver.tier.has_pending_work()


def test_announcements_come_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as driver:
        driver.store(*range(8))
    monkeypatch.setattr("kvtier.tiers.disk.tier._SLICE", 3)
    with opened(tmp_path) as driver:
        assert driver.tier.has_pending_work()
        driver.wait(lambda: len(driver.listener()) == 8)
        assert [len(event.keys) for event in driver.events] == [3, 3, 2]


def test_rows_that_leave_unannounced_stay_unannounced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as driver:
        driver.store(*range(8))
    monkeypatch.setattr("kvtier.tiers.disk.tier._SLICE", 1)
    with opened(tmp_path) as driver:
        driver.tier.discard(keys(*range(4)))
        driver.wait(lambda: driver.listener() == set(keys(4, 5, 6, 7)) and not disk(driver)._silent.any())
        driver.wait(lambda: bool(driver.demote(1)[1]))
        driver.wait(lambda: driver.listener() == set(keys(1, 4, 5, 6, 7)))


def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as driver:
        driver.store(1)
        driver.store(2)
        driver.store(3)
        driver.store(4)
        driver.tier.touch(keys(1))
    with opened(tmp_path, 4) as driver:
        driver.store(5)
        driver.store(6)
        assert driver.tier.lookup_many(keys(1, 2, 3, 4)) == [True, False, False, True]


def test_last_uses_are_written_down_while_it_runs(tmp_path: Path) -> None:
    """A process that is killed has not come to its end."""
    with opened(tmp_path, 4) as driver:
        driver.store(1)
        driver.store(2, 3, 4)
        driver.tier.touch(keys(1))
        driver.clock.now += 6
        driver.wait(lambda: not disk(driver)._saving.is_running and disk(driver)._save_at > driver.clock.now)
        copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    with opened(copy, 4) as driver:
        driver.store(5)
        assert driver.tier.lookup(key(1)) is True


def test_descriptions_are_bounded_and_bound_to_their_key() -> None:
    stride = description_stride(30)
    for description in (b"", b"x" * 48, b"x" * 49):
        kept = read_description(key(1), pack_description(key(1), description, stride).ljust(stride, b"o"))
        assert kept == (description if len(description) < 49 else b"")
    assert read_description(key(2), pack_description(key(1), b"about 1", stride)) == b""
    assert read_description(key(1), b"\xff" * stride) == b""


def test_no_descriptions(tmp_path: Path) -> None:
    with opened(tmp_path, description_bytes=0) as driver:
        driver.store(1)
    with opened(tmp_path, description_bytes=0) as driver:
        driver.wait(lambda: bool(driver.events))
        assert driver.events[0].descriptions == (b"",)
        assert driver.fetch(1) == {1: content(1)}


def test_prices_and_the_write_count_are_kept(tmp_path: Path) -> None:
    settings = {"settings": {"write_limit": 10 * ROW_BYTES}}
    with opened(tmp_path, **settings) as driver:
        driver.store(1, 2, 3)
        driver.tier.prices = {"seconds_per_byte": 1e-9}
    with opened(tmp_path, **settings) as driver:
        assert driver.tier.prices == {"seconds_per_byte": 1e-9}
        assert disk(driver)._limit.room == 7 * ROW_BYTES


def test_what_the_policy_has_learnt_outlives_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"settings": {"policy": "gittins", "capacity": 1 << 20}}
    with opened(tmp_path, **settings) as driver:
        driver.store(1, 2, 3)
        table = disk(driver)._table
        assert table is not None
        for second in range(5):
            table.policy.clock = lambda second=second: 10.0 * second  # type: ignore[method-assign]
            driver.tier.touch(keys(1, 2, 3), Ending(500))
        learnt = driver.tier.habits()
    with opened(tmp_path, **settings) as driver:
        assert driver.tier.habits() == learnt != GittinsPolicy(1).learnt()
        pool = CPUOffloadingManager(4, "gittins")
        manager = TieredOffloadingManager(
            pool, np.zeros((4, ROW_BYTES), dtype=np.uint8), [ConfiguredTier(driver.tier)]
        )
        manager.end_step()
        assert pool.policy.learnt() == learnt
    capsys.readouterr()
    assert main(["disk", "habits", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "256 or more" in shown
    assert "100%" in shown
    assert "s" in shown


def test_a_disk_without_habits_leaves_the_pool_its_own(tmp_path: Path) -> None:
    """Guards what the pool has learnt while the disk was being opened."""
    pool = CPUOffloadingManager(4, "gittins")
    pool.prepare_store(keys(1, 2), ReqContext(req_id="1"))
    for number in range(8):
        pool.policy.clock = lambda number=number: 10.0 * number  # type: ignore[method-assign]
        pool.touch(keys(1, 2), ReqContext(req_id=str(number), ending=Ending(500)))
    learnt = pool.policy.learnt()
    assert learnt != GittinsPolicy(1).learnt()
    with opened(tmp_path, settings={"policy": "gittins"}) as driver:
        manager = TieredOffloadingManager(
            pool, np.zeros((4, ROW_BYTES), dtype=np.uint8), [ConfiguredTier(driver.tier)]
        )
        manager.end_step()
    assert pool.policy.learnt() == learnt


def test_what_is_learnt_has_its_room_from_the_start(tmp_path: Path) -> None:
    """Guards places that grow beyond the capacity when their policy begins to learn."""
    more: dict[str, Any] = {"slots": 2, "settings": {"capacity": 1 << 20}}
    with opened(tmp_path, **more) as driver:
        before = taken_bytes(tmp_path)
        driver.store(1)
        other = make_tier(tmp_path, rank=1, **more)
        assert not other.wait_open(), (
            "the first has all of the capacity, with the room that it does not use yet"
        )
        other.close(30)
    assert taken_bytes(tmp_path) == before <= 1 << 20
    learnt = place_of(tmp_path) / "learnt"
    assert learnt.stat().st_size > 0
    with opened(tmp_path, settings={"capacity": 300_000}) as driver:
        assert not learnt.exists(), "a tiny place has no room for it"
        assert taken_bytes(tmp_path) <= 300_000
    assert not learnt.exists()
    assert taken_bytes(tmp_path) <= 300_000


@pytest.mark.parametrize("spoil", [b"", b"nonsense", bytes(40_000), None])
def test_damaged_knowledge_of_the_policy_is_nothing(
    tmp_path: Path, spoil: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"settings": {"policy": "gittins", "capacity": 1 << 20}}
    with opened(tmp_path, **settings) as driver:
        driver.store(1)
    learnt = place_of(tmp_path) / "learnt"
    learnt.unlink()
    if spoil is None:
        learnt.symlink_to(place_of(tmp_path) / "records")
    else:
        learnt.write_bytes(spoil)
    with opened(tmp_path, **settings) as driver:
        assert driver.tier.habits() == GittinsPolicy(1).learnt()
        assert driver.fetch(1) == {1: content(1)}
        learnt.unlink()
    assert main(["disk", "habits", str(tmp_path)]) == 0


def _spoil(path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Put something in the place of a file that nobody can read or write."""
    if how == "fails":
        open_file = folder_module.open_file

        def fail(file: Path, flags: int) -> int:
            if file.name == path.name:
                raise OSError(errno.EIO, "Input/output error", str(file))
            return open_file(file, flags)

        monkeypatch.setattr(folder_module, "open_file", fail)
        return
    path.unlink(missing_ok=True)
    make = {
        "link": lambda: path.symlink_to("records"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    make[how]()


@pytest.mark.parametrize("name", ["learnt", "learnt.new"])
@pytest.mark.parametrize("how", ["link", "pipe", "folder", "fails"])
def test_rows_and_their_order_do_not_depend_on_what_the_policy_has_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    """Guards a tier that does not open, gives up its rows or forgets their last uses for such a file."""
    settings: dict[str, Any] = {"settings": {"policy": "gittins", "capacity": 1 << 20}}
    with opened(tmp_path, **settings) as driver:
        driver.store(1, 2, 3)
        _spoil(place_of(tmp_path) / name, monkeypatch, how)
        driver.tier.touch(keys(1), Ending(500))
        driver.clock.now += 61
        driver.wait(lambda: not disk(driver)._saving.is_running and disk(driver)._save_at > driver.clock.now)
        assert driver.tier.lookup_many(keys(1, 2, 3)) == [True] * 3
        driver.tier.touch(keys(2), Ending(500))
    with opened(tmp_path, **settings) as driver:
        table = disk(driver)._table
        assert table is not None
        newest_first = np.argsort(-table.ticks[table.find(keys(1, 2, 3))])
        assert newest_first.tolist() == [1, 0, 2]
        assert driver.fetch(1, 2, 3) == {number: content(number) for number in (1, 2, 3)}
    assert main(["disk", "habits", str(tmp_path)]) == 0


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_shares_begin_anew_after_a_restart(tmp_path: Path, policy: str) -> None:
    """Rows of before belong to nobody: they leave for anybody, and the shares of new rows hold."""
    settings: dict[str, Any] = {"slots": 8, "share": 0.5, "settings": {"policy": policy}}

    def store(driver: TierDriver, tenant: str, *numbers: int) -> dict[str, int]:
        for number in numbers:
            driver.demote(number, tenant=tenant)
            driver.wait(lambda: disk(driver).explain(key(number)) is not MissReason.WRITING)  # noqa: B023
        table = disk(driver)._table
        assert table is not None
        assert table.marks is not None
        return table.marks.used_by_tenant()

    with opened(tmp_path, **settings) as driver:
        assert store(driver, "greedy", *range(8)) == {"greedy": 8}, "nobody else needs the slots"
    with opened(tmp_path, **settings) as driver:
        assert driver.tier.lookup_many(keys(*range(8))) == [True] * 8
        assert store(driver, "modest", 10, 11) == {"modest": 2}
        assert store(driver, "greedy", *range(20, 40)) == {"modest": 2, "greedy": 4}
        assert driver.tier.lookup_many(keys(10, 11)) == [True, True]
        assert sum(map(bool, driver.tier.lookup_many(keys(*range(8))))) == 2


@pytest.mark.parametrize("seed", range(6))
def test_restarts_at_random_points(tmp_path: Path, seed: int) -> None:
    source, before = random.Random(seed), set[OffloadKey]()
    for _ in range(5):
        with opened(tmp_path, 6) as driver:
            table = disk(driver)._table
            assert table is not None
            # More may be there: a row that was evicted for one never written is whole, and found again.
            assert before <= set(table.keys(table.held_slots()))
            resets = churn(driver, source, 40)
            # After a reset the weights are others; a process that starts has those of the files again.
            before = set() if resets else set(table.keys(table.held_slots()))


# Resets


def test_nothing_from_before_or_after_a_reset_is_there_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1, 2)
        driver.tier.reset("weights were swapped")
        driver.wait(lambda: bool(driver.demote(3, version=1)[1]))
        driver.wait(lambda: driver.tier.lookup(key(3)) is True)
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 0
        driver.store(1)
    with opened(tmp_path) as driver:
        assert driver.fetch(1, 2) == {1: content(1), 2: MissReason.EVICTED}


def test_no_row_is_written_before_the_epoch_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(files_module, "_on_write_step", order.append)
    with opened(tmp_path) as driver:
        driver.store(1)
        order.clear()
        driver.tier.reset("once")
        driver.store(2)
    assert order[:2] == ["header", "header"], "on both pages"
    assert order.index("row") > 1


def test_rows_offered_while_a_reset_is_written_down_are_written_after_it(tmp_path: Path) -> None:
    """They were refused once, and nobody offered them again."""
    with opened(tmp_path) as driver:
        files, may_write = disk(driver)._files, threading.Event()
        assert files is not None
        save = files.save_header

        def save_late(**changes: Any) -> None:
            assert may_write.wait(PATIENCE)
            save(**changes)

        files.save_header = save_late  # type: ignore[method-assign]
        rows = np.zeros((8, ROW_BYTES), dtype=np.uint8)
        tiers, clock = [ConfiguredTier(driver.tier)], driver.clock
        manager = TieredOffloadingManager(CPUOffloadingManager(8), rows, tiers, clock=clock)
        manager.reset_cache()
        output = manager.prepare_store(keys(1, 2), ReqContext())
        assert output is not None
        manager.complete_store(output.keys_to_store, spec=output.store_spec)
        manager.end_step()
        for _ in range(2):  # the second call would come after rows that the only free thread may begin
            answered: list[object] = []
            disk(driver)._io.call(lambda: None, lambda *answer, told=answered: told.append(answer))
            driver.wait(lambda told=answered: bool(told))
        assert disk(driver).stats().queued_bytes == 2 * ROW_BYTES, "nothing is written before the epoch is"
        may_write.set()
        for _ in range(10_000):
            manager.end_step()
            if disk(driver).lookup_many(keys(1, 2)) == [True, True]:
                break
            disk(driver).wait_any(0.01)
        assert disk(driver).lookup_many(keys(1, 2)) == [True, True]
        assert disk(driver).stats().refused == 0
        manager.check()


def test_a_disk_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong row and each reset cost the scheduler's thread half a second."""
    may_write = threading.Event()
    with opened(tmp_path) as driver:
        driver.store(*range(6))
        files, began = disk(driver)._files, time.monotonic()
        assert files is not None
        delete, save = files.delete, files.save_header
        monkeypatch.setattr(files, "delete", lambda rows: may_write.wait(30) and delete(rows))
        monkeypatch.setattr(files, "save_header", lambda **more: may_write.wait(30) and save(**more))
        for number in range(6):
            driver.tier.discard(keys(number))
        assert driver.tier.state() == "suspended"
        assert not any(driver.tier.lookup_many(keys(*range(6))))
        disk(driver)._end_probe(None)
        for _ in range(6):
            driver.tier.reset("weights were swapped")
        assert time.monotonic() - began < 3, "two waits, not twelve"
        may_write.set()
        driver.wait(lambda: not disk(driver)._epoch_unsaved)
        driver.store(1, 2)
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 0, "a reset is for good"


def test_a_reset_before_it_is_open(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1)
    name: list[str | None] = [None]
    tier = make_tier(tmp_path, namespace=lambda: name[0])
    tier.wait_open()
    assert tier.explain(key(1)) is MissReason.NOT_OPEN
    assert tier.state() == "waiting for the namespace"
    tier.reset("early")
    name[0] = "model"
    assert tier.wait_open()
    tier.poll()
    assert tier.stats().used == 0
    assert tier.take_events() == []
    tier.close()


def test_a_start_waits_for_the_tier_if_the_namespace_is_known(tmp_path: Path) -> None:
    """While the opening thread asked for a name that was known, the tier counted as waiting for it."""
    is_asked, may_answer = threading.Event(), threading.Event()

    def namespace() -> str:
        is_asked.set()
        may_answer.wait(PATIENCE)
        return "model"

    tier = make_tier(tmp_path, namespace=namespace)
    assert is_asked.wait(PATIENCE)
    assert not tier.lacks_namespace()
    may_answer.set()
    assert tier.wait_open(PATIENCE)
    assert tier.is_open()
    tier.close()


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_reset_before_the_folder_is_locked_is_for_good(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch was dropped if the opening thread did not have the lock yet."""
    with opened(tmp_path) as driver:
        driver.store(1)
    may_lock, take = threading.Event(), FolderLock.take_nowait
    monkeypatch.setattr(FolderLock, "take_nowait", lambda *more: may_lock.wait(PATIENCE) and take(*more))
    tier = make_tier(tmp_path)
    tier.reset("early")
    if end == "close":
        ending = threading.Thread(target=lambda: tier.close(PATIENCE))
        ending.start()
        assert tier._ending.wait(PATIENCE)
        may_lock.set()
        ending.join(PATIENCE)
    else:  # nobody polls: the thread that opens the tier puts the epoch down before anything is loaded
        may_lock.set()
        assert tier._io.wait_any(PATIENCE)
        assert tier._lock is not None
        tier._lock.release()
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 0
    tier.close(PATIENCE)


def test_a_reset_is_written_down_at_the_end_if_the_folder_is_free_by_then(tmp_path: Path) -> None:
    """The opening thread pauses between two attempts, and would not look again before the end."""
    with opened(tmp_path) as driver:
        driver.store(1)
        second = make_tier(tmp_path)
        assert second.wait_open() is False
        second.reset("early")
    assert second.close(PATIENCE)
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used == 0


def test_a_reset_that_cannot_be_written_down_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as driver:
        driver.store(1)
        second = make_tier(tmp_path)
        assert second.wait_open() is False
        second.reset("early")
        caplog.clear()
        assert second.close(PATIENCE)
        (record,) = caplog.records
        assert "reset could not be written down" in record.message
        assert "only owner" in record.message
        assert driver.fetch(1) == {1: content(1)}, "the folder is another engine's"


def test_a_reset_is_a_warning_if_the_folder_does_not_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_lock, take = threading.Event(), FolderLock.take_nowait
    monkeypatch.setattr(FolderLock, "take_nowait", lambda *more: may_lock.wait(PATIENCE) and take(*more))
    tier = make_tier(tmp_path)
    tier.reset("early")
    assert tier.close(0.1) is False
    (record,) = caplog.records
    assert "reset could not be written down" in record.message
    assert "did not answer within 0.1 s" in record.message
    may_lock.set()
    for thread in tier._io._threads:
        thread.join(PATIENCE)
    assert open_files(tmp_path) == []


# Owners


def test_a_lock_of_all_ranks_that_is_never_released_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread waited in the kernel: no line, and neither requests nor the end of the tier got on."""
    with closing(os.fdopen(os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT), "r+b")) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        tier = make_tier(tmp_path)
        assert tier.lookup(key(1)) is None, "it may still open"
        until = time.monotonic() + PATIENCE
        while tier.is_awaited():
            assert time.monotonic() < until
            tier._clock.now += 0.1  # type: ignore[attr-defined]
            tier.wait_any(0.05)
        assert tier._clock.now < tier._opening_since + 10, "not only because it takes long"  # type: ignore[attr-defined]
        assert not tier.has_pending_work()
        assert tier.lookup(key(1)) is False
        (record,) = caplog.records
        assert f"expected {tmp_path / 'lock'} to be free" in record.message
        assert tier.state() in record.message
        assert tier.close(PATIENCE) is True
        assert len(open_files(tmp_path)) == 1, "the one of this test"
        assert len(caplog.records) == 1
        third = make_tier(tmp_path)
        fcntl.flock(held, fcntl.LOCK_UN)
        assert third.wait_open(PATIENCE), third.state()
        third.close(PATIENCE)


def test_a_second_owner_runs_without_and_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as driver:
        driver.store(1)
        second = make_tier(tmp_path)
        assert second.wait_open() is False
        assert "another tier of this process is" in (second.problem or "")
        assert second.lookup(key(1)) is False
        assert second.explain(key(1)) is MissReason.NOT_OPEN
        for _ in range(20):
            second._clock.now += 1  # type: ignore[attr-defined]
            second.poll()
    assert sum("only owner" in record.message for record in caplog.records) == 1, (
        "one line, not one a second"
    )
    until = time.monotonic() + PATIENCE
    while second.stats().state != "open":
        assert time.monotonic() < until, second.stats().state
        second._clock.now += 1  # type: ignore[attr-defined]
        second.poll()
        second.wait_any(0.1)
    assert second.lookup(key(1)) is True
    second.close()


def test_a_required_tier_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path):
        second = make_tier(tmp_path, settings={"required": True})
        with pytest.raises(OutsideError, match=r"only owner, but another tier of .*required is true"):
            second.wait_open()
        second.close()


def test_ranks_share_the_capacity(tmp_path: Path) -> None:
    # Each of four ranks has a quarter of everything, what is fixed included.
    settings = {"settings": {"capacity": 4 * capacity(5)}}
    with (
        opened(tmp_path, ranks=4, rank=0, **settings) as first,
        opened(tmp_path, ranks=4, rank=3, **settings) as last,
    ):
        first.store(1)
        last.store(1, 2)
        assert first.tier.stats().capacity == last.tier.stats().capacity == 5
        assert first.tier.lookup(key(2)) is False
    assert [place.rank for place in find_places(tmp_path)] == [0, 3]


def open_files(path: Path) -> list[str]:
    """Return the files below a folder that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(file for file in found if file.startswith(str(path)))


@pytest.mark.parametrize("hanging", ["a row", "the opening", "a save"])
def test_a_tier_closed_during_a_hang_is_released_when_the_call_returns(
    tmp_path: Path, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder stayed locked until the process ended, and another process was blamed."""
    began, release, open_place = threading.Event(), threading.Event(), DiskFiles.open

    def hang(*_arguments: object) -> None:
        began.set()
        assert release.wait(PATIENCE)

    def open_late(*arguments: Any) -> Any:
        hang()
        return open_place(*arguments)

    if hanging == "the opening":
        monkeypatch.setattr(DiskFiles, "open", open_late)
    tier = make_tier(tmp_path)
    if hanging != "the opening":
        assert tier.wait_open(), tier.problem
        driver = TierDriver(tier, FaultyBackend(MemoryBackend()), ManualClock(1000.0))
        if hanging == "a row":
            assert tier._files is not None
            tier._files.on_write_step = hang
            assert driver.demote(1)[1] == keys(1)
        else:
            monkeypatch.setattr(tier, "_write_down", hang)
            tier._save_at = float("-inf")
            tier.poll()
    while not began.is_set():
        tier.poll()
        began.wait(0.01)
    assert tier.close(0.1) is False
    monkeypatch.setattr(DiskFiles, "open", open_place)
    second = make_tier(tmp_path)
    assert second.wait_open() is False
    assert "closed while a call did not return" in (second.problem or "")
    assert "another process" not in (second.problem or "")
    release.set()
    until = time.monotonic() + PATIENCE
    while not second.is_open():
        assert time.monotonic() < until, second.problem
        second._clock.now += 1  # type: ignore[attr-defined]
        second.poll()
        second.wait_any(0.1)
    assert len(open_files(tmp_path)) == 4, "the lock and three files, of the second tier alone"
    assert second.close(PATIENCE)
    assert open_files(tmp_path) == []
    assert tier.close() is True


def test_a_lock_that_is_taken_after_the_close_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, take = threading.Event(), FolderLock.take_nowait
    monkeypatch.setattr(FolderLock, "take_nowait", lambda *more: release.wait(PATIENCE) and take(*more))
    tier = make_tier(tmp_path)
    assert tier.close(0.1) is False
    release.set()
    for thread in tier._io._threads:
        thread.join(PATIENCE)
    assert open_files(tmp_path) == []
    with opened(tmp_path) as driver:
        driver.store(1)


@pytest.mark.timeout(300)
def test_ranks_that_open_at_once_never_take_more_than_the_capacity(tmp_path: Path) -> None:
    """Two real processes, killed in the middle or not. Both had taken the same rest: twice the capacity."""
    child = Path(__file__).with_name("share_child.py")
    done = subprocess.run([sys.executable, child, tmp_path, "12"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) <= 1


def engine(folder: Path, index: int, engines: int | None, told: int = 1) -> OffloadingConfig:
    """Describe a data-parallel engine over a disk for two rows, which was told how many there are."""
    caches = make_caches("kv_first")
    config = make_config(caches)
    size = 2 * (capacity(0) + config.row_bytes + 128 + description_stride(config.description_bytes))
    tier = DiskConfig(path=str(folder), capacity=size, engines=engines)
    settings = replace(config.settings, tiers=(tier,))
    return replace(config, settings=settings, namespace="test", engine_index=index, num_engines=told)


def test_engines_that_were_not_told_how_many_they_are_share_by_a_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM tells its engines of a dense model that there is one, and which they are."""
    with ExitStack() as stack:
        for index in range(2):
            config = engine(tmp_path, index, engines=2)
            tier = stack.enter_context(closing(factory.make_tier(config.settings.tiers[0], config)))
            assert isinstance(tier, DiskTier)
            assert tier.wait_open(), tier.problem
            assert tier.stats().capacity == 1
    assert not caplog.records
    config = engine(tmp_path / "other", 1, engines=None)
    with closing(factory.make_tier(config.settings.tiers[0], config)):
        assert "tiers[0].disk.engines to their number" in caplog.text


@pytest.mark.parametrize(
    ("index", "engines", "told", "problem"),
    [
        (2, 2, 1, r"tiers\[0\]\.disk\.engines: expected more than 2, the index of this engine, got 2"),
        (0, 2, 4, r"tiers\[0\]\.disk\.engines: expected 4, as the engine says, or none; got 2"),
        (0, 0, 1, r"disk\.engines: expected a whole number of at least 1, got 0"),
    ],
)
def test_a_number_of_engines_that_cannot_be_is_refused(
    tmp_path: Path, index: int, engines: int, told: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        engine(tmp_path, index, engines, told)


# Namespaces, versions, sizes


def test_another_namespace_has_its_own_place_and_the_old_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, 4, "first") as driver:
        driver.store(1, 2)
    with opened(tmp_path, 12, "second") as driver:
        assert driver.tier.lookup(key(1)) is False
        driver.store(1)
        assert driver.tier.stats().capacity < 12, "the old rows take their part"
    assert "kvtier disk" in caplog.text
    with opened(tmp_path, 20, "first") as driver:
        assert driver.fetch(1, 2) == {1: content(1), 2: content(2)}
    assert taken_bytes(tmp_path) <= capacity(20)
    assert len(list(find_places(tmp_path))) == 2


def test_old_namespaces_that_take_everything(tmp_path: Path) -> None:
    with opened(tmp_path, 8, "first") as driver:
        driver.store(1)
    tier = make_tier(tmp_path, 8, "second")
    assert tier.wait_open() is False
    assert "other models' rows take" in (tier.problem or "")
    place = place_of(tmp_path)
    assert f"`kvtier disk gc {tmp_path} {place.relative_to(tmp_path)}` removes" in (tier.problem or "")
    assert main(["disk", "gc", str(tmp_path), str(place.relative_to(tmp_path))]) == 0, "beside the tier"
    clock = tier._clock
    assert isinstance(clock, ManualClock)
    until = time.monotonic() + PATIENCE
    while not tier.is_open():
        assert time.monotonic() < until, tier.problem
        clock.now += 1
        tier.poll()
        tier.wait_any(0.1)
    assert tier.stats().capacity == 8, "the running engine takes the room"
    tier.close()


def leave(path: Path, namespace: str, slots: int, days: float, rank: int = 0) -> Path:
    """Leave the place of a model that was last used days ago."""
    parent = path / f"rank-{rank}"
    parent.mkdir(parents=True, exist_ok=True)
    size = taken_bytes(parent) + capacity(slots)
    DiskFiles.open(parent, namespace, ROW_BYTES, size, 512).files.close()
    folder, when = parent / place_name(namespace, ROW_BYTES), time.time() - days * 86400
    for file in folder.iterdir():
        os.utime(file, (when, when))
    return folder


def test_rows_that_nobody_uses_make_room_for_new_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New weights never got room in a full folder."""
    old, older, young = leave(tmp_path, "b", 8, 40), leave(tmp_path, "a", 8, 60), leave(tmp_path, "c", 8, 20)
    size = {"capacity": taken_bytes(tmp_path)}
    tier = make_tier(tmp_path, namespace="new", settings=size)
    assert tier.wait_open() is False, "by default nothing is taken over"
    assert f"kvtier disk gc {tmp_path} {older.relative_to(tmp_path)}" in (tier.problem or "")
    tier.close()
    for days, gone in (("61d", 0), ("30d", 2)):
        tier = make_tier(tmp_path, namespace="new", settings=size | {"take_over_unused": days})
        assert tier.wait_open() is (gone > 0)
        assert [place.exists() for place in (older, old, young)] == [gone < 1, gone < 2, True]
        tier.close()
    assert f"removed {older}, which nobody has used for 60.0 days" in caplog.text
    assert taken_bytes(tmp_path) <= size["capacity"]


def test_no_more_is_taken_over_than_half_of_the_share_needs(tmp_path: Path) -> None:
    large, small = leave(tmp_path, "a", 20, 60), leave(tmp_path, "b", 4, 40)
    settings = {"capacity": taken_bytes(tmp_path), "take_over_unused": "1d"}
    with opened(tmp_path, namespace="new", settings=settings) as driver:
        assert driver.tier.stats().capacity >= 15
        assert (large.exists(), small.exists()) == (False, True)


def test_places_in_use_are_not_taken_over(tmp_path: Path) -> None:
    """Nor what an engine has just closed, nor rows of this model of another rank."""
    settings = {"capacity": 4 * capacity(4)}
    with opened(tmp_path, namespace="new", rank=0, ranks=4, settings=settings):
        pass
    with opened(tmp_path, namespace="other", rank=1, ranks=4, settings=settings) as driver:
        driver.store(1)
        live, left = leave(tmp_path, "third", 2, 60, rank=1), leave(tmp_path, "third", 2, 60, rank=2)
        own = leave(tmp_path, "new", 2, 60, rank=3)
        settings |= {"take_over_unused": "1d", "capacity": taken_bytes(tmp_path)}
        with opened(tmp_path, namespace="new", settings=settings):
            assert [place.exists() for place in (live, left, own)] == [True, False, True]
        assert driver.fetch(1) == {1: content(1)}


def test_a_place_is_in_use_until_its_tier_is_closed(tmp_path: Path) -> None:
    with opened(tmp_path):
        for file in place_of(tmp_path).iterdir():
            os.utime(file, (1, 1))
    (place,) = find_places(tmp_path)
    assert place.used_at > time.time() - 3600


def test_another_row_size_has_its_own_place(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as driver:
        driver.store(1)
    with opened(tmp_path, 12, row_bytes=2 * ROW_BYTES) as driver:
        assert driver.tier.lookup(key(1)) is False
    assert len(list(find_places(tmp_path))) == 2


def test_another_version_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1)
    records = place_of(tmp_path) / "records"
    header = files_module.read_header(records.read_bytes())
    assert header is not None
    page = files_module.pack_header(files_module.msgspec.structs.replace(header, version=2))
    records.write_bytes(page * 2 + records.read_bytes()[8192:])
    tier = make_tier(tmp_path, settings={"required": True})
    with pytest.raises(OutsideError, match=r"found version 2.*`kvtier disk gc \S+ rank-0/\S+` removes it"):
        tier.wait_open()
    tier.close()


@pytest.mark.parametrize("slots", [3, 6, 20])
def test_the_capacity_may_change(tmp_path: Path, slots: int) -> None:
    with opened(tmp_path, 8) as driver:
        driver.store(*range(8))
    with opened(tmp_path, slots) as driver:
        kept = [number for number in range(8) if driver.tier.lookup(key(number))]
        assert len(kept) == min(8, slots)
        assert driver.fetch(*kept) == {number: content(number) for number in kept}
        driver.store(30)
        assert taken_bytes(tmp_path) <= capacity(slots)


def test_space_is_never_above_the_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = []
    monkeypatch.setattr(files_module, "_on_write_step", lambda _where: most.append(taken_bytes(tmp_path)))
    with opened(tmp_path, 5) as driver:
        churn(driver, random.Random(0), 100)
    assert 5 * ROW_BYTES < max(most) <= capacity(5)


# When something fails (docs/tiers.md)


def test_a_flipped_bit_anywhere_costs_one_row_at_most(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(*range(8))
    source = random.Random(0)
    for name in ("records", "descriptions", "slots"):
        file = place_of(tmp_path) / name
        whole = file.read_bytes()
        for _ in range(25):
            at, bit = source.randrange(len(whole)), source.randrange(8)
            spoilt = bytearray(whole)
            spoilt[at] ^= 1 << bit
            file.write_bytes(spoilt)
            copy = tmp_path.with_name("flipped")
            shutil.copytree(tmp_path, copy)
            file.write_bytes(whole)
            with opened(copy) as driver:
                got = driver.fetch(*range(8))
                wrong = [
                    number
                    for number, row in got.items()
                    if isinstance(row, bytes) and row != content(number)
                ]
                missing = [number for number, row in got.items() if not isinstance(row, bytes)]
                assert not wrong, (name, at, bit)
                assert len(missing) <= 1, (name, at, bit)
            shutil.rmtree(copy)


def test_both_headers_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as driver:
        driver.store(1)
    records = place_of(tmp_path) / "records"
    content_of = bytearray(records.read_bytes())
    content_of[100] ^= 1
    content_of[4196] ^= 1
    records.write_bytes(content_of)
    with opened(tmp_path) as driver:
        assert driver.tier.stats().used in (0, 1)
        driver.store(2)
        assert driver.fetch(2) == {2: content(2)}
    assert "header is damaged" in caplog.text


@pytest.mark.parametrize("name", ["records", "descriptions", "slots"])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_truncated_files(tmp_path: Path, name: str, left: float) -> None:
    with opened(tmp_path) as driver:
        driver.store(*range(8))
    file = place_of(tmp_path) / name
    os.truncate(file, int(file.stat().st_size * left))
    with opened(tmp_path) as driver:
        got = driver.fetch(*range(8))
        assert all(row == content(number) for number, row in got.items() if isinstance(row, bytes))
        if name == "descriptions":
            assert all(isinstance(row, bytes) for row in got.values())
        driver.wait(lambda: bool(driver.demote(20)[1]))
        driver.wait(lambda: driver.tier.lookup(key(20)) is True)


def test_two_slots_swapped(tmp_path: Path) -> None:
    with opened(tmp_path) as driver:
        driver.store(1, 2)
    slots = place_of(tmp_path) / "slots"
    rows = slots.read_bytes()
    slots.write_bytes(rows[ROW_BYTES : 2 * ROW_BYTES] + rows[:ROW_BYTES] + rows[2 * ROW_BYTES :])
    with opened(tmp_path) as driver:
        assert driver.fetch(1, 2) == {1: MissReason.FAILED, 2: MissReason.FAILED}


def test_records_without_their_rows(tmp_path: Path) -> None:
    """What a power cut may leave: records reached the disk, rows did not."""
    with opened(tmp_path) as driver:
        driver.store(1, 2)
    slots = place_of(tmp_path) / "slots"
    slots.write_bytes(bytes(slots.stat().st_size))
    with opened(tmp_path) as driver:
        assert driver.fetch(1, 2) == {1: MissReason.FAILED, 2: MissReason.FAILED}
        driver.wait(lambda: len(driver.demote(1, 2)[1]) == 2)
        driver.wait(lambda: driver.tier.lookup_many(keys(1, 2)) == [True, True])
        assert driver.fetch(1, 2) == {1: content(1), 2: content(2)}, "stored again, they are whole"


def test_a_folder_that_vanishes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tier"
    with opened(path) as driver:
        driver.store(1, 2)
        shutil.rmtree(path)
        driver.clock.now += 6
        driver.wait(lambda: driver.tier.stats().state != "open")
        assert driver.listener() == set(), "loss is announced"
        assert driver.tier.explain(key(1)) is MissReason.NOT_OPEN

        def is_open() -> bool:
            driver.clock.now += 1
            return driver.tier.stats().state == "open"

        driver.wait(is_open)
        assert driver.tier.explain(key(1)) is MissReason.LOST
        driver.store(1)
        assert driver.fetch(1) == {1: content(1)}
    assert "vanished" in caplog.text


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than the test's."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm on a file system of its own")
    folder = Path(tempfile.mkdtemp(dir=shared))
    yield folder
    shutil.rmtree(folder)


def test_a_folder_that_is_on_another_file_system_now_is_refused(
    tmp_path: Path, other_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tier filled the file system below a lazily unmounted mount point. A link stands for the mount."""
    (tmp_path / "below").mkdir()
    mount = tmp_path / "mount"
    mount.symlink_to(other_disk)
    with opened(mount / "kv") as driver:
        driver.store(1)
        mount.unlink()
        mount.symlink_to(tmp_path / "below")
        driver.clock.now += 6
        driver.wait(lambda: driver.tier.stats().state != "open")

        def is_refused() -> bool:
            driver.clock.now += 1
            return "was it unmounted?" in driver.tier.stats().state

        driver.wait(is_refused)
        assert list((tmp_path / "below").iterdir()) == [], "nothing is made on the other file system"
        mount.unlink()
        mount.symlink_to(other_disk)

        def is_open() -> bool:
            driver.clock.now += 1
            return driver.tier.stats().state == "open"

        driver.wait(is_open)
        assert driver.fetch(1) == {1: content(1)}, "mounted again, it has its rows"
    assert "expected the file system on which it was opened" in caplog.text


def test_a_rank_may_have_a_disk_of_its_own(tmp_path: Path, other_disk: Path) -> None:
    (tmp_path / "rank-0").symlink_to(other_disk)
    with opened(tmp_path) as driver:
        driver.store(1)
    with opened(tmp_path) as driver:
        assert driver.fetch(1) == {1: content(1)}


@pytest.mark.parametrize("name", ["records", "descriptions", "slots", "../lock"])
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as driver:
        driver.store(1)
    file = place_of(tmp_path) / name
    file.unlink()
    os.mkfifo(file)
    tier = make_tier(tmp_path)
    assert tier.wait_open() is False
    assert "expected a regular file" in (tier.problem or "")
    tier.reset("once")
    assert tier.close()


@pytest.mark.parametrize("name", ["records", "descriptions", "slots", "../lock"])
@pytest.mark.parametrize("slots", [8, 0])
def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path, name: str, slots: int) -> None:
    """The tier wrote through it, to a file that was not its own; without room, it cut that file."""
    path, outside = tmp_path / "disk", tmp_path / "outside"
    with opened(path) as driver:
        driver.store(1)
    file = place_of(path) / name
    for precious in (None, b"precious" * 1000):
        if precious is not None:
            outside.write_bytes(precious)
        file.unlink()
        file.symlink_to(outside)
        tier = make_tier(path, slots)
        assert tier.wait_open() is False
        if slots or name == "../lock":
            assert f"{file.name}: expected a regular file, found a symbolic link" in (tier.problem or "")
        tier.reset("once")
        assert tier.close(PATIENCE)
        assert (outside.read_bytes() if outside.exists() else None) == precious


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x").touch()
    tier = make_tier(tmp_path / "x" / "y")
    assert tier.wait_open() is False
    assert "expected a folder that can be written to" in (tier.problem or "")
    assert tier.lookup(key(1)) is False
    tier.check()
    tier.close()
    assert len(caplog.records) == 1


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier(tmp_path, settings={"capacity": 1 << 60})
    assert tier.wait_open() is False
    assert "of free space, found" in (tier.problem or "")
    tier.close()

    def full(descriptor: int, offset: int, size: int) -> None:
        os.ftruncate(descriptor, size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files_module.os, "posix_fallocate", full)
    tier = make_tier(tmp_path)
    assert tier.wait_open() is False
    assert "No space left" in (tier.problem or "")
    tier.close()
    assert taken_bytes(tmp_path) <= 8192, "what was taken in vain is given back"


def test_a_hung_disk_does_not_hang_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setattr(DiskFiles, "open", lambda *_arguments: release.wait() and None)
    tier = make_tier(tmp_path)
    assert tier.wait_open(0.2) is False
    assert tier.lookup(key(1)) is None, "it may still open"
    tier._clock.now += 10  # type: ignore[attr-defined]
    assert tier.lookup(key(1)) is False, "nobody waits for it any more"
    assert not tier.has_pending_work()
    assert tier.close(0.1) is False
    release.set()


def test_many_last_uses_are_saved_with_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, 1200) as driver:
        driver.store(*range(1200))
        files = disk(driver)._files
        assert files is not None
        files.save_ticks()
        driver.tier.touch(keys(*range(1200))[::-1])
        files.ticks[1000] -= 1  # a slot between others that is saved with them
        written, held = list[int](), list[bool]()

        def pwrite(descriptor: int, content: bytes, offset: int) -> int:
            written.append(len(content))
            held.append(files._records_lock.locked())
            return real(descriptor, content, offset)

        real = os.pwrite
        monkeypatch.setattr(files_module.os, "pwrite", pwrite)
        assert files.save_ticks() == 1200
        assert len(written) == 3, "one for each region of 512 records"
        assert all(held), "or a record that another thread writes meanwhile would be undone"
        files.ticks[7] += 5000
        assert (files.save_ticks(), written[3:]) == (1, [8])
        monkeypatch.undo()
        ticks = files.ticks.copy()
    with opened(tmp_path, 1200) as driver:
        table = disk(driver)._table
        assert table is not None
        assert table.ticks.tolist() == ticks.tolist()
        assert len(driver.fetch(*range(0, 1200, 100))) == 12, "the records are whole"


def test_a_reset_of_many_rows_is_announced_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.slot_table._CLEARED_SLICE", 3)
    with opened(tmp_path) as driver:
        driver.store(*range(8))
        driver.events.clear()
        driver.tier.reset("suffix")
        assert driver.tier.stats().used == 0
        assert driver.tier.lookup_many(keys(*range(8))) == [False] * 8
        assert driver.tier.explain(key(7)) is MissReason.CLEARED
        driver.store(7)
        driver.wait(lambda: not disk(driver)._changes.has_slices())
        told = [(change.removed, list(change.keys)) for change in driver.events]
        assert all(len(names) <= 3 for _, names in told)
        removals = [at for at, (removed, names) in enumerate(told) if removed and key(7) in names]
        assert removals < [told.index((False, keys(7)))], "before it is announced again"
        heard = set(keys(*range(8)))
        for removed, names in told:
            (heard.difference_update if removed else heard.update)(names)
        assert heard == set(keys(7))


def test_it_opens_without_being_polled(tmp_path: Path) -> None:
    """An idle engine makes no step: the next lookup finds the rows of the earlier process."""
    with opened(tmp_path) as driver:
        driver.store(1)
    name: list[str | None] = [None]
    tier = make_tier(tmp_path, namespace=lambda: name[0])
    assert tier.lookup_many([key(1)]) == [None], "a request may wait for it"
    name[0] = "model"
    wait_ended(tier)
    assert tier.lookup_many([key(1), key(2)]) == [True, False]
    tier.check()
    tier.close()


def test_it_takes_over_without_being_polled(tmp_path: Path) -> None:
    """The former owner may go while the engine is idle."""
    with opened(tmp_path) as driver:
        driver.store(1)
        second = make_tier(tmp_path)
        assert second.wait_open() is False
        assert second.lookup(key(1)) is False, "nobody waits for another process"
    second._clock.now += 10  # type: ignore[attr-defined]
    wait_ended(second)
    assert second.lookup(key(1)) is True
    second.close()


def wait_ended(tier: DiskTier) -> None:
    """Block until the thread that opens a tier has opened it, without polling the tier."""
    until = time.monotonic() + PATIENCE
    while not tier._io._ended:
        assert time.monotonic() < until, tier.problem
        tier._io.wait_any(0.1)


def test_periodic_durability_syncs_rows_before_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fdatasync

    def note(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(files_module.os, "fdatasync", note)
    for durability, expected in (("none", []), ("periodic", ["slots", "descriptions", "records"])):
        with opened(tmp_path / durability, settings={"durability": durability}) as driver:
            driver.store(1)
            driver.clock.now += 6
            driver.wait(
                lambda: not disk(driver)._saving.is_running and disk(driver)._save_at > driver.clock.now
            )
            assert synced == expected


def test_beyond_the_write_limit_rows_must_be_offered_twice(tmp_path: Path) -> None:
    with opened(tmp_path, settings={"write_limit": 2 * ROW_BYTES}) as driver:
        assert driver.demote(1, 2, 3, 4)[1] == keys(1, 2)
        assert driver.tier.explain(key(3)) is MissReason.REFUSED
        assert driver.demote(5)[1] == []
        assert driver.demote(3, 6)[1] == keys(3)
        driver.wait(lambda: driver.tier.lookup(key(3)) is True)


def teach(driver: TierDriver, comes_back: dict[int, float]) -> None:
    """Have the disk's policy know which share of chunks comes back, by the place of their number of uses."""
    table = disk(driver)._table
    assert table is not None
    policy = table.policy
    assert isinstance(policy, GittinsPolicy)
    used, given_up = (
        counts.reshape(-1, NUM_ENDINGS, NUM_BINS) for counts in (policy.model._used, policy.model._given_up)
    )
    for at, share in comes_back.items():
        used[at, :-1, 20] = 1000.0 * share
        given_up[at, :-1, 20] = 1000.0 * (1.0 - share)
    policy.model.derive(policy.model.new_counts())


def test_what_is_left_of_the_write_limit_goes_to_the_rows_that_are_worth_most(tmp_path: Path) -> None:
    """Guards rows that are written because they come first."""
    with opened(tmp_path, settings={"write_limit": 2 * ROW_BYTES}) as driver:
        teach(driver, {0: 0.1, 1: 0.3, 2: 0.9})
        assert driver.demote(1, 2, 3, 4, 5, 6)[1] == keys(1, 2)
        driver.wait(lambda: driver.tier.lookup(key(2)) is True)
        disk(driver)._limit.give_back(2 * ROW_BYTES)
        assert driver.demote(7, 8, 3, 4)[1] == keys(3, 4), "they were offered before"
        assert driver.demote(9)[1] == []
        assert driver.demote(9)[1] == keys(9), "beyond the limit, what is worth more than a new row"


def test_rows_that_do_not_come_back_are_not_written_beyond_the_limit_however_often_offered(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, settings={"write_limit": ROW_BYTES}) as driver:
        teach(driver, {0: 0.5, 1: 0.001})
        assert driver.demote(1, 2)[1] == keys(1)
        for _ in range(2):
            assert driver.demote(2)[1] == []
        assert driver.tier.explain(key(2)) is MissReason.REFUSED


def test_a_full_queue_takes_the_rows_that_are_worth_most(tmp_path: Path) -> None:
    settings = {"write_limit": ROW_BYTES}
    with opened(tmp_path, max_queued=2 * ROW_BYTES, settings=settings) as driver:
        teach(driver, {0: 0.1, 1: 0.3, 2: 0.9})
        assert driver.demote(1, 2, 3)[1] == keys(1)
        driver.wait(lambda: driver.tier.lookup(key(1)) is True)
        disk(driver)._limit = WriteLimit(None)
        assert driver.demote(4, 5, 3, 6)[1] == keys(4, 3)


def test_rows_that_were_not_written_do_not_count_against_the_write_limit(tmp_path: Path) -> None:
    """A disk that is suspended again and again had used up its day, and written nothing."""
    with opened(tmp_path, settings={"write_limit": 2 * ROW_BYTES}) as driver:
        tier = disk(driver)
        tier._io.hold(Direction.DEMOTE)
        for _ in range(5):
            job, taken = driver.demote(1, 2)
            assert taken == keys(1, 2)
            assert driver.withdraw(job, 2) == keys(2)
            tier._suspend("a test")
            driver.wait(lambda: tier.explain(key(1)) is not MissReason.WRITING)
            tier._end_probe(None)
        tier._io.resume(Direction.DEMOTE)
        driver.store(1, 2)
        assert driver.demote(3)[1] == []


def test_a_write_limit_below_the_number_of_ranks_is_still_one(tmp_path: Path) -> None:
    with opened(tmp_path, settings={"write_limit": 1}, ranks=2) as driver:
        assert driver.demote(1)[1] == []
        assert driver.tier.explain(key(1)) is MissReason.REFUSED


def test_a_full_queue_refuses_the_end_of_a_job(tmp_path: Path) -> None:
    with opened(tmp_path, max_queued=3 * ROW_BYTES) as driver:
        assert driver.demote(1, 2, 3, 4, 5)[1] == keys(1, 2, 3)
        assert driver.tier.stats().refused == 2
        driver.wait(lambda: driver.tier.lookup(key(3)) is True)


# Settings


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([], "tiers\\[0\\].disk: expected a table"),
        ({"capacity": "1GiB"}, "disk.path: expected a value"),
        ({"path": "x"}, "disk.capacity: expected a value"),
        ({"path": "", "capacity": 1}, "disk.path: expected a folder"),
        ({"path": "x", "capacity": "much"}, "disk.capacity: expected a size"),
        (
            {"path": "x", "capacity": 1, "wite": "evict"},
            "disk.wite: no such setting; did you mean .*disk.write",
        ),
        (
            {"path": "x", "capacity": 1, "write": "back"},
            "disk.write: expected 'through' or 'evict', got 'back'",
        ),
        ({"path": "x", "capacity": 1, "durability": True}, "disk.durability: expected 'none' or 'periodic'"),
        ({"path": "x", "capacity": 1, "required": 1}, "disk.required: expected true or false"),
    ],
)
def test_wrong_settings(values: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        DiskConfig.from_dict(values, "tiers[0].disk")


def test_settings(tmp_path: Path) -> None:
    config = DiskConfig.from_dict({"path": "~/kv", "capacity": "1TiB"})
    assert config.path == os.path.expanduser("~/kv")
    assert config.write_limit == 4 << 40
    assert DiskConfig.from_dict(config.to_dict()) == config


def test_the_log_has_no_surprises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with opened(tmp_path) as driver:
        driver.store(1)
    with opened(tmp_path):
        pass
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    first, second = caplog.messages
    assert re.fullmatch(r"disk tier: \S+/rank-0/\S+: open with 0 of [\d,]+ rows \(0 B of .+\)", first)
    assert "open with 1 of " in second
