"""Pinning: whole rows, all or none, held by whoever uses the memory and given up by the last of them."""

from __future__ import annotations

import gc

import pytest

from kvtier.errors import InputError, TransferError
from kvtier.pool import Pool
from kvtier.transfer.cuda import memory
from kvtier.transfer.cuda.memory import Pinning


class Driver:
    """Records the pinned pieces. Refuses after `room` bytes."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.pieces: dict[int, int] = {}

    def pin(self, address: int, size: int) -> None:
        if size > self.room:
            raise TransferError(f"no room for {size} bytes")
        self.room -= size
        self.pieces[address] = size

    def unpin(self, address: int) -> None:
        del self.pieces[address]


def open_pool(num_slots: int, row_bytes: int = 4096) -> Pool:
    return Pool.open("test", num_slots, row_bytes)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PINNED_BYTES", 3 * 4096)


def make(pool: Pool, driver: Driver) -> Pinning:
    return Pinning(pool, lambda: None, pin=driver.pin, unpin=driver.unpin)


def test_memory_is_pinned_in_pieces_of_whole_rows() -> None:
    pool, driver = open_pool(8), Driver()
    pinned = make(pool, driver)
    start = pool.rows.ctypes.data
    assert pinned.pinned
    assert pinned.seam == 3 * 4096
    assert driver.pieces == {start: 3 * 4096, start + 3 * 4096: 3 * 4096, start + 6 * 4096: 2 * 4096}


def test_a_row_larger_than_a_piece_is_a_piece() -> None:
    pool, driver = open_pool(2, 5 * 4096), Driver()
    pinned = make(pool, driver)
    assert pinned.seam == 5 * 4096
    assert sorted(driver.pieces.values()) == [5 * 4096] * 2


def test_rows_that_end_within_a_page_are_one_piece() -> None:
    pool, driver = open_pool(100, 1000), Driver()
    pinned = make(pool, driver)
    assert pinned.seam == 100_000
    assert list(driver.pieces.values()) == [100_000]


def test_if_one_piece_is_refused_none_stays_pinned(caplog: pytest.LogCaptureFixture) -> None:
    pool, driver = open_pool(8), Driver(room=6 * 4096)
    pinned = make(pool, driver)
    assert not pinned.pinned
    assert driver.pieces == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pageable" in caplog.text
    assert "no room" in caplog.text


def test_the_last_user_unpins() -> None:
    pool, driver = open_pool(8), Driver()
    pinned = make(pool, driver)
    pinned.hold()
    pinned.hold()
    pinned.release()
    assert len(driver.pieces) == 3
    pinned.release()
    assert driver.pieces == {}
    pinned.check()
    with pytest.raises(InputError, match="unpinned"):
        pinned.hold()


def test_memory_stays_mapped_while_it_is_pinned() -> None:
    pool, driver = open_pool(2), Driver()
    pinned = make(pool, driver)
    pinned.hold()
    rows = pool.rows
    pool.close()
    rows[0] = 7
    assert (rows[0] == 7).all()
    pinned.release()


def test_memory_that_nobody_released_is_unpinned_before_it_is_unmapped() -> None:
    """Else the driver copies to where its addresses once led, and the next pool there reads and writes wrong
    bytes.
    """
    pool, driver = open_pool(8), Driver()
    pinned = make(pool, driver)
    pinned.hold()
    pool.close()
    del pinned, pool
    gc.collect()
    assert driver.pieces == {}


def test_taking_memory_changes_none_of_it() -> None:
    """Another rank may be writing its part of a row meanwhile."""
    pool = open_pool(8)
    pool.rows[:] = 5
    make(pool, Driver())
    assert (pool.rows == 5).all()
