"""Streams of our own: what the driver is asked for, and what is made of its answers."""

from __future__ import annotations

from ctypes import c_uint64
from typing import Any

import pytest
from tests.unit.cuda_kit import FakeDriver

from kvtier.errors import TransferError
from kvtier.transfer.cuda import driver

NON_BLOCKING = 1


class StreamDriver(FakeDriver):
    """Its streams count from 70."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 70
        self.cuStreamCreateWithPriority = self._function("cuStreamCreateWithPriority")
        self.cuStreamDestroy_v2 = self._function("cuStreamDestroy_v2")

    def _cuStreamCreateWithPriority(self, address: int, flags: int, priority: int) -> tuple[Any, ...]:
        c_uint64.from_address(address).value = self.made
        self.made += 1
        return flags, priority


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> StreamDriver:
    fake = StreamDriver()
    fake.use(monkeypatch)
    return fake


def test_each_stream_is_a_new_one_and_waits_for_no_default_stream(fake: StreamDriver) -> None:
    assert [driver.new_stream(0), driver.new_stream(-1)] == [70, 71]
    assert fake.calls == [
        ("cuStreamCreateWithPriority", NON_BLOCKING, 0),
        ("cuStreamCreateWithPriority", NON_BLOCKING, -1),
    ]


def test_a_device_that_makes_no_stream_is_named(fake: StreamDriver) -> None:
    fake.failing = {"cuStreamCreateWithPriority": 2}
    with pytest.raises(TransferError, match=r"making a stream: expected success, got CUDA_ERROR_2 \(2\)"):
        driver.new_stream(0)


def test_a_stream_may_end_after_its_device(fake: StreamDriver) -> None:
    driver.end_stream(70)
    fake.failing = {"cuStreamDestroy_v2": 4}
    driver.end_stream(71)
    assert [name for name, *_ in fake.calls] == ["cuStreamDestroy_v2"] * 2
