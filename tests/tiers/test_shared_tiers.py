"""Every backend that engines share runs the suite of shared tiers: in memory, asked in batches or one by
one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from tests.ports import free_port

from kvtier.config import GroupConfig, KVTierConfig, OffloadingConfig
from kvtier.connector.metrics import describe_tier
from kvtier.errors import ConfigError, OutsideError
from kvtier.keys import make_offload_key
from kvtier.offload import CPUOffloadingSpec, ReqContext
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.testing.faulty_backend import FaultyBackend
from kvtier.testing.memory_tier import MemoryServer, make_shared_tier
from kvtier.testing.shared_tier_suite import SharedTierSuite
from kvtier.testing.tier_suite import ROW_BYTES, ManualClock, TierDriver, key, keys
from kvtier.tiers import factory, shared_tier
from kvtier.tiers.base import Backend, BackendRow, RowBuffer
from kvtier.tiers.shared_tier import CallsAtOnce, SharedTier, search_prefix


class TestInBatches(SharedTierSuite):
    @pytest.fixture(autouse=True)
    def server(self) -> None:
        self.memory = MemoryServer()

    def make_backend(self) -> Backend:
        return self.memory


class TestOneByOne(TestInBatches):
    @pytest.fixture(autouse=True)
    def server(self) -> None:
        self.memory = MemoryServer(contains_batch=1)


@pytest.mark.parametrize(("seconds", "questions"), [(0.5, [2]), (4.0, [2]), (6.0, [2, 2])])
def test_a_server_that_has_just_said_no_is_not_asked_again_before_rows_are_sent(
    seconds: float, questions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt that is new is asked about, then computed, then sent: a request more for each row."""
    monkeypatch.setattr(shared_tier, "_LARGE_ROW", ROW_BYTES)
    clock, server = ManualClock(1000.0), MemoryServer()
    tier = make_shared_tier(ROW_BYTES, backend=server, clock=clock)
    driver = TierDriver(tier, FaultyBackend(server), clock)
    tier.ask(keys(1, 2), clock.now + 5)
    driver.wait(lambda: tier.lookup_many(keys(1, 2)) == [False, False])
    clock.now += seconds
    driver.store(1, 2)
    assert server.questions == questions
    assert server.num_written == 2
    tier.check()
    assert tier.close()


# As an engine makes them


@pytest.mark.parametrize("hanging", ["the opening", "a row"])
def test_a_tier_closed_during_a_hang_closes_its_backend_when_the_call_returns(hanging: str) -> None:
    """Once, and after the last call: no other call follows the close of a backend."""
    closed, release = threading.Event(), threading.Event()

    class Server(MemoryServer):
        num_closed = 0

        def close(self) -> None:
            self.num_closed += 1
            closed.set()

    server = Server()
    faulty = FaultyBackend(server)

    def open_backend() -> Backend:
        assert hanging != "the opening" or release.wait(30)
        return faulty

    tier = SharedTier("valkey", ROW_BYTES, open_backend, namespace=lambda: "model", threads=2)
    driver = TierDriver(tier, faulty, ManualClock(1000.0))
    if hanging == "a row":
        assert tier.wait_open()
        faulty.hang()
        assert driver.demote(1)[1] == keys(1)
        assert faulty.hanging.wait(30)
    assert tier.close(0.1) is False
    assert not closed.is_set()
    faulty.release()
    release.set()
    assert closed.wait(30)
    assert tier.close()
    assert server.num_closed == 1


def engine_config(**tier: Any) -> OffloadingConfig:
    settings = KVTierConfig.from_dict({"cpu": {"capacity": "1MiB"}, "tiers": [tier]})
    group = GroupConfig(block_size=4, bytes_per_block=4096, layer_names=("layer",))
    return OffloadingConfig(
        settings=settings, groups=(group,), hash_block_size=4, engine_id="test", namespace="a model"
    )


def test_a_server_that_is_required_and_not_there_is_an_error_of_one_line() -> None:
    port = free_port()
    config = engine_config(valkey={"url": f"valkey://127.0.0.1:{port}", "required": True})
    with pytest.raises(
        OutsideError, match=rf"^valkey tier: .*{port}.*Connection refused \(valkey.required is true\)$"
    ):
        CPUOffloadingSpec(config).get_manager()


def test_a_server_that_is_not_there_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    config = engine_config(valkey={"url": f"valkey://127.0.0.1:{free_port()}"})
    spec = CPUOffloadingSpec(config)
    manager = spec.get_manager()
    assert isinstance(manager, TieredOffloadingManager)
    (stats,) = manager.tier_stats()
    assert "Connection refused" in stats.state
    assert manager.promotions.lookup_many(keys(1, 2), ReqContext()) == [False, False]
    assert caplog.text.count("running without it") == 1
    manager.shutdown()
    spec.shutdown()


@pytest.mark.parametrize("kind", ["valkey", "object", "mooncake"])
def test_a_tier_that_opens_is_one_line_with_its_place(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of tiers on servers the log said nothing unless they failed. The backend then knows the memory."""
    lent: list[memoryview] = []

    class Server(MemoryServer):
        def lend(self, memory: memoryview) -> None:
            lent.append(memory)

    caplog.set_level(logging.INFO)
    places = {
        "valkey": "valkey://host:6379/2",
        "object": "s3://bucket/kv at https://host",
        "mooncake": "host:1",
    }
    settings = {
        "valkey": {"url": "valkey://host:6379/2"},
        "object": {"url": "s3://bucket/kv", "endpoint": "https://host"},
        "mooncake": {"master": "host:1", "metadata": "http://host:2/metadata"},
    }
    config = engine_config(**{kind: settings[kind]})
    monkeypatch.setattr(factory, "open_backend", lambda *_: Server())
    monkeypatch.setattr(factory, "expect_package", lambda *_: None)
    tier = factory.make_tier(config.settings.tiers[0], config)
    assert isinstance(tier, shared_tier.SharedTier)
    tier.set_buffer(RowBuffer(memory := memoryview(bytearray(1 << 20)), ROW_BYTES))
    assert tier.wait_open()
    assert lent == [memory]
    (record,) = caplog.records
    assert record.levelname == "INFO"
    said = f"{kind} tier: {places[kind]}: open with rows of 4.0 KiB"
    assert record.getMessage().startswith(said)
    stats = tier.stats()
    assert (stats.used, stats.capacity, stats.used_bytes, stats.capacity_bytes) == (None,) * 4
    assert describe_tier(stats).startswith(f"{kind}: 0 promoted"), "neither of them is made up"
    assert tier.close()


def test_a_key_file_that_is_not_there_is_named_with_its_path() -> None:
    config = engine_config(valkey={"url": "valkey://host", "seal_key_file": "/nowhere/key"})
    with pytest.raises(ConfigError, match=r"^tiers\[0\]\.valkey\.seal_key_file: expected 32 bytes"):
        CPUOffloadingSpec(config).get_manager()


# Searching


@pytest.mark.parametrize(
    ("width", "rounds", "questions"), [(1024, 1, 1000), (64, 2, 100), (16, 3, 40), (1, 11, 11)]
)
def test_how_many_round_trips_a_prompt_of_1000_chunks_takes(width: int, rounds: int, questions: int) -> None:
    rows = [BackendRow(key(number), ()) for number in range(1000)]
    asked = 0

    def contains(some: Sequence[BackendRow]) -> list[bool]:
        nonlocal asked
        asked += len(some)
        return [int(row.key[:32]) < end for row in some]

    for end in (0, 1, 2, 3, 15, 16, 17, 499, 500, 501, 998, 999, 1000):
        asked = 0
        found = search_prefix(contains, rows, width)
        assert found.there == [number < end for number in range(1000)]
        assert found.round_trips <= rounds
        assert asked <= questions
    end = 0
    assert search_prefix(contains, rows, width).round_trips == 1, "most prompts are new"


def test_gaps_are_seen_where_one_call_asks_about_all() -> None:
    rows = [BackendRow(key(number), ()) for number in range(8)]
    found = search_prefix(lambda some: [int(row.key[:32]) % 3 > 0 for row in some], rows, 8)
    assert found.there == [number % 3 > 0 for number in range(8)]


def test_groups_are_searched_apart() -> None:
    rows = [
        BackendRow(make_offload_key(b"%032d" % number, group), ())
        for number in range(50)
        for group in (0, 1)
    ]
    found = search_prefix(lambda some: [row.key[-1] == 1 or int(row.key[:32]) < 9 for row in some], rows, 4)
    assert found.there == [row.key[-1] == 1 or int(row.key[:32]) < 9 for row in rows]


def test_groups_of_states_are_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(valkey={"url": "valkey://host:6379/2"})
    full = config.groups[0]
    state = replace(full, is_state=True, layer_names=("states",))
    config = replace(config, groups=(state, full))
    monkeypatch.setattr(factory, "open_backend", lambda *_: MemoryServer())
    monkeypatch.setattr(factory, "expect_package", lambda *_: None)
    tier = factory.make_tier(config.settings.tiers[0], config)
    assert isinstance(tier, SharedTier)
    assert tier._sparse_groups == {0}
    assert tier.close()


@pytest.mark.parametrize("width", [1, 4, 33, 1000])
def test_single_chunks_of_sparse_groups_are_found(width: int) -> None:
    """Of a recurrent layer few states are stored: the first is missing, and most of the others are too."""
    rows = [
        BackendRow(make_offload_key(b"%032d" % number, group), ())
        for number in range(50)
        for group in (0, 1, 2)
    ]
    stored = {(0, number) for number in range(31)} | {(1, 17), (1, 30), (2, 30), (2, 49)}
    asked: list[int] = []

    def contains(some: Sequence[BackendRow]) -> list[bool]:
        assert len(some) <= width
        asked.append(len(some))
        return [(row.key[-1], int(row.key[:32])) in stored for row in some]

    found = search_prefix(contains, rows, width, sparse_groups={1, 2})
    assert found.there == [(row.key[-1], int(row.key[:32])) in stored for row in rows]
    assert found.round_trips == len(asked)


def test_sparse_groups_are_searched_from_the_tail() -> None:
    """An answer that comes too late for all knows of those that make the longest prefix."""
    rows = [BackendRow(make_offload_key(b"%032d" % number, 1), ()) for number in range(10)]
    wanted = iter((True, True, False))
    found = search_prefix(lambda some: [True] * len(some), rows, 3, lambda: next(wanted), {1})
    assert found.there == [False] * 4 + [True] * 6
    assert found.round_trips == 2


def test_an_answer_that_nobody_wants_costs_no_further_round_trip() -> None:
    rows = [BackendRow(key(number), ()) for number in range(100)]
    wanted = iter((True, True, False))
    found = search_prefix(lambda some: [True] * len(some), rows, 1, lambda: next(wanted))
    assert found.round_trips == 2
    assert not all(found.there)


@pytest.mark.parametrize("helpers", [0, 3])
def test_calls_at_once_need_no_other_thread(helpers: int) -> None:
    rows = [BackendRow(key(number), ()) for number in range(10)]
    with ThreadPoolExecutor(4) as pool:
        spawn: Any = pool.submit if helpers else lambda work: None
        calls = CallsAtOnce(lambda some: [int(row.key[:32]) < 4 for row in some], 1, 4, spawn)
        assert calls.contains(rows) == [number < 4 for number in range(10)]

        def fail(some: Sequence[BackendRow]) -> list[bool]:
            raise ConnectionResetError(104, "Connection reset by peer")

        with pytest.raises(ConnectionResetError):
            CallsAtOnce(fail, 1, 4, spawn).contains(rows)
