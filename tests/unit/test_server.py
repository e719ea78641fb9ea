"""The index over HTTP: real publishers, real connections, and answers that are true."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from typing import Any, Self

import msgspec
import pytest
import zmq
from tests.unit.server_kit import (
    SMALL,
    Client,
    IndexServer,
    T,
    publish,
    publishing,
    registered,
    stored,
    until,
)

from kvtier.cli.index import serve_command
from kvtier.config import parse_size
from kvtier.errors import OutsideError
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored
from kvtier.events.wire import DecodedBatch, EventEncoder, frame_batch
from kvtier.index.prefix import FORMS, PrefixIndex
from kvtier.index.service import GroupKey, Registration, Service, Settings
from kvtier.index.xxh3 import chain_keys, local_hashes, token_array
from kvtier.keys import hash_blocks, hash_to_u64


@pytest.fixture
def client() -> Iterator[Client]:
    with IndexServer(settings=SMALL) as server:
        yield Client(server.url)


# -- following -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_publisher_is_followed_from_before_it_was_registered(form: str) -> None:
    if form == "numba":
        pytest.importorskip("numba")
    with IndexServer(settings=Settings(budget=4 << 20, form=form)) as server, publishing() as publisher:
        client = Client(server.url)
        publish(
            publisher,
            stored([1, 2], None, T[:8]),
            stored([3], 2, T[8:12], "CPU"),
            stored([4], 3, T[12:16], "STORAGE"),
        )
        assert client("POST", "/register", registered(publisher)) == (201, {"status": "ok"})
        until(lambda: client.query(T[:20])["states"] == {"1": {"0": "exact"}})
        until(lambda: bool(client.query(T[:20])["instances"]))
        compiled = client.metrics()['kvtier_index_compiled{model="m",routing_group="default"}']
        assert compiled == (form == "numba")
        assert client.query(T[:20]) == {
            "scores": {"1": {"0": 8}},
            "frequencies": [],
            "instances": {"1": {"longest_matched": 16, "gpu": 8, "dp": {"0": 8}, "cpu": 12, "disk": 16}},
            "states": {"1": {"0": "exact"}},
        }
        publish(publisher, BlockRemoved([3], "CPU"))
        until(lambda: client.query(T[:20])["instances"]["1"]["longest_matched"] == 8)
        publish(publisher, AllBlocksCleared())
        until(lambda: not client.query(T[:20])["instances"])


def test_two_ranks_of_one_instance(client: Client) -> None:
    with publishing(0) as zero, publishing(1) as one:
        client("POST", "/register", registered(zero))
        client("POST", "/register", registered(one, dp_rank=1))
        publish(zero, stored([1], None, T[:4]))
        publish(one, stored([1, 2], None, T[:8]))
        until(lambda: client.query(T)["scores"] == {"1": {"0": 4, "1": 8}})
        assert client.query(T)["instances"]["1"]["gpu"] == 8
        assert client("POST", "/unregister", {"instance_id": 1, "model_name": "m", "dp_rank": 1}) == (
            200,
            {"status": "ok"},
        )
        assert client.query(T)["scores"] == {"1": {"0": 4}}
        assert client("POST", "/unregister", {"instance_id": 1, "model_name": "m"}) == (
            200,
            {"status": "ok"},
        )
        assert client("POST", "/query", {"token_ids": T, "model_name": "m"})[0] == 404


def test_a_registrations_rank_counts_more_than_its_batches(client: Client) -> None:
    with publishing(3) as publisher:
        for _ in range(2):
            client("POST", "/register", registered(publisher, dp_rank=5))
            publish(publisher, stored([1], None, T[:4]))
            until(lambda: client.query(T)["scores"] == {"1": {"5": 4}})
            assert client.query(T)["states"].keys() == {"1"}
            client("POST", "/unregister", {"instance_id": 1, "model_name": "m"})


def test_a_lost_publisher_is_seen_in_the_answer(client: Client) -> None:
    with publishing() as publisher:
        client("POST", "/register", registered(publisher))
        publish(publisher, stored([1], None, T[:4]))
        until(lambda: client.query(T)["states"] == {"1": {"0": "exact"}})
    until(lambda: client.query(T)["states"] != {"1": {"0": "exact"}})
    assert client.query(T)["instances"]["1"]["gpu"] == 4


def test_models_and_groups_are_kept_apart(client: Client) -> None:
    with publishing() as publisher:
        for more in ({}, {"model_name": "n"}, {"routing_group": "g"}):
            assert client("POST", "/register", registered(publisher, **more))[0] == 201
        publish(publisher, stored([1], None, T[:4]))
        for more in ({}, {"model_name": "n"}, {"routing_group": "g"}):
            until(lambda more=more: client.query(T, **more)["scores"] == {"1": {"0": 4}})
        assert (
            client("POST", "/unregister", {"instance_id": 1, "model_name": "m", "routing_group": "g"})[0]
            == 200
        )
        assert client.query(T)["scores"] == {"1": {"0": 4}}
        listed = client("GET", "/workers")[1]
        assert [(worker["model_name"], worker["routing_group"]) for worker in listed] == [
            ("m", "default"),
            ("n", "default"),
        ]
        assert client("GET", "/workers?model_name=n")[1] == listed[1:]
        assert client("GET", "/workers?routing_group=g") == (200, [])


def test_hashes_instead_of_tokens(client: Client) -> None:
    local = local_hashes(token_array(T[:12]), 4)
    with publishing() as publisher:
        client("POST", "/register", registered(publisher))
        publish(publisher, stored([1, 2, 3], None, T[:12]))
        until(lambda: client.query(T)["scores"] == {"1": {"0": 12}})
        signed = [number - (1 << 64) if number >> 63 else number for number in local.tolist()]
        for hashes in (
            {"block_hashes": local.tolist()},
            {"block_hashes": signed},
            {"seq_hashes": chain_keys(local).tolist()},
        ):
            answer = client("POST", "/query_by_hash", {"model_name": "m"} | hashes)[1]
            assert answer["scores"] == {"1": {"0": 12}}
        salted = {"model_name": "m", "block_hashes": signed, "cache_salt": ""}
        assert client("POST", "/query_by_hash", salted)[0] == 400


def test_mooncakes_dialect(client: Client) -> None:
    with publishing() as publisher:
        new = {
            "type": "vLLM",
            "modelname": "d",
            "tenant_id": "t",
            "instance_id": "node",
            "block_size": 4,
            "dp_rank": 0,
        }
        new |= {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "additionalsalt": "w8a8",
        }
        assert client("POST", "/register", new) == (
            200,
            {"status": "registered successfully", "instance_id": "node"},
        )
        publish(publisher, stored([1], None, T[:4]), stored([1, 2], None, T[:8], "CPU"))
        question = {"model": "d", "tenant_id": "t", "block_size": 4, "token_ids": T}
        until(lambda: client("POST", "/query", question)[1]["t"]["node"]["longest_matched"] == 8)
        held = {"longest_matched": 8, "GPU": 4, "DP": {"0": 8}, "CPU": 8, "DISK": 0, "state": "exact"}
        assert client("POST", "/query", question) == (200, {"t": {"node": held}})
        assert client("POST", "/query", question | {"instance_id": "other"}) == (200, {"t": {}})
        assert client("POST", "/query", question | {"block_size": 8})[0] == 400
        assert client("POST", "/unregister", new) == (
            200,
            {"status": "unregistered successfully", "removed_instances": ["node|t|0"]},
        )


def test_keys_of_the_engine() -> None:
    settings = Settings(keys="engine", seed="s", budget=4 << 20, form="python")
    hashes = [hash_to_u64(block) for block in hash_blocks(T[:12], 4, seed="s")]
    with IndexServer(settings=settings) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher))
        publish(publisher, stored(hashes, None, T[:12]))
        until(lambda: client.query(T[:12])["scores"] == {"1": {"0": 12}})
        by_hash = client("POST", "/query_by_hash", {"model_name": "m", "block_hashes": hashes[:2]})[1]
        assert by_hash["scores"] == {"1": {"0": 8}}


def test_the_dump_has_the_engines_hashes(client: Client) -> None:
    with publishing() as publisher:
        client("POST", "/register", registered(publisher))
        publish(publisher, stored([71, 72], None, T[:8]), stored([71], None, T[:4], "STORAGE"))
        until(lambda: client.query(T)["instances"].get("1", {}).get("gpu") == 8)
        dump = client("GET", "/dump")[1]
    assert dump.keys() == {"m:default"}
    assert dump["m:default"]["block_size"] == 4
    events = dump["m:default"]["events"]
    found = {
        (event["worker_id"], event["event"]["dp_rank"], event["storage_tier"], block["block_hash"])
        for event in events
        for block in event["event"]["data"]["stored"]["blocks"]
    }
    assert found == {(1, 0, "device", 71), (1, 0, "device", 72), (1, 0, "disk", 71)}


def test_a_dump_names_instances_as_they_were_registered(client: Client) -> None:
    """Texts that are the same number to `int` are different instances."""
    ids = ["7", "07", " 7", "\u0667", 8, "x"]
    with publishing() as publisher:
        for instance_id in ids:
            client("POST", "/register", registered(publisher, instance_id=instance_id))
        publish(publisher, stored([71], None, T[:4]))
        until(lambda: len(client.query(T)["instances"]) == len(ids))
        dump = client("GET", "/dump")[1]
    assert sorted(map(repr, ids)) == sorted(
        repr(event["worker_id"]) for event in dump["m:default"]["events"]
    )


def test_a_worker_whose_blocks_found_no_room_is_degraded() -> None:
    with IndexServer(settings=Settings(budget=20_000, form="python")) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher))
        publish(publisher, *(stored([block], None, [block] * 4) for block in range(1000)))
        until(lambda: client.query([0] * 4)["states"] == {"1": {"0": "degraded"}})


def test_followed_from_the_start() -> None:
    with publishing() as publisher:
        first = Registration(
            GroupKey("m"), 7, 0, publisher.endpoint, publisher.replay_endpoint, block_size=4
        )
        publish(publisher, stored([1], None, T[:4]))
        with IndexServer(settings=SMALL, follow=[first]) as server:
            client = Client(server.url)
            until(lambda: client.query(T)["scores"] == {"7": {"0": 4}})
            listener = client("GET", "/workers")[1][0]["listeners"]["0"]
            assert (listener["endpoint"], listener["status"]) == (publisher.endpoint, "active")


# -- states that are true --------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_block_size_is_learnt_from_the_first_store(form: str) -> None:
    """Whoever left it out, or took the README's word for it, indexed nothing and was told that this is
    exact.
    """
    if form == "numba":
        pytest.importorskip("numba")
    with IndexServer(settings=Settings(budget=4 << 20, form=form)) as server, publishing() as publisher:
        client = Client(server.url)
        new = registered(publisher)
        del new["block_size"]
        assert client("POST", "/register", new)[0] == 201
        assert client.query(T)["instances"] == {}
        assert client("GET", "/workers")[1][0]["block_size"] is None
        publish(publisher, stored([1, 2], None, T[:8]))
        until(lambda: client.query(T)["scores"] == {"1": {"0": 8}})
        assert client("GET", "/workers")[1][0]["block_size"] == 4
        assert client("GET", "/dump")[1]["m:default"]["block_size"] == 4
        with publishing() as other:
            assert client("POST", "/register", registered(other, 2, block_size=8))[0] == 409
            assert client("POST", "/register", registered(other, 2, block_size=None))[0] == 201


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_block_size_is_reported(form: str, caplog: pytest.LogCaptureFixture) -> None:
    if form == "numba":
        pytest.importorskip("numba")
    with IndexServer(settings=Settings(budget=4 << 20, form=form)) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher, block_size=16))
        for at in range(3):
            publish(publisher, stored([at + 1], None, T[at : at + 4]))
        until(lambda: client.query(T)["states"] == {"1": {"0": "degraded"}})
        reason = client.query(T)["reasons"]["1"]["0"]
        assert "4" in reason
        assert "16" in reason
        assert "block_size" in reason
        listener = client.listener()
        assert (listener["state"], listener["last_error"]) == ("degraded", reason)
        until(lambda: client.metrics()['kvtier_index_refused_total{model="m",routing_group="default"}'] == 3)
        source = 'kvtier_index_source_state{model="m",routing_group="default",instance="1",rank="0",state='
        assert client.metrics()[source + '"degraded"}'] == 1
        assert client.metrics()[source + '"exact"}'] == 0
        mooncake = client("POST", "/query", {"model": "m", "token_ids": T})[1]["default"]["1"]
        assert (mooncake["state"], mooncake["reason"]) == ("degraded", reason)
        publish(publisher, stored([9], None, T[9:13]))
        until(lambda: client.metrics()['kvtier_index_refused_total{model="m",routing_group="default"}'] == 4)
    warnings = [record for record in caplog.records if record.name.startswith("kvtier.index")]
    assert [record.levelname for record in warnings] == ["WARNING"]


def test_a_block_size_that_comes_later_counts_until_one_is_learnt(client: Client) -> None:
    with publishing() as first, publishing() as second:
        client("POST", "/register", registered(first, 1, block_size=None))
        assert client("POST", "/register", registered(second, 2, block_size=4))[0] == 201
        assert client("GET", "/workers")[1][0]["block_size"] == 4
        publish(first, stored([1], None, T[:4]))
        until(lambda: client.query(T)["scores"] == {"1": {"0": 4}})


def test_blocks_dropped_before_their_parents_came_are_reported() -> None:
    with IndexServer(settings=SMALL) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher))
        publish(publisher, stored([1], None, T[:4]))
        until(lambda: client.query(T)["states"] == {"1": {"0": "exact"}})
        for first in range(1 << 32, (1 << 32) + 101_000, 1000):
            publish(publisher, stored(list(range(first, first + 1000)), 77, [first & 0xFFFF] * 4000))
        until(lambda: client.query(T)["states"] == {"1": {"0": "degraded"}})
        assert client.query(T)["reasons"]["1"]["0"]
        until(
            lambda: (
                client.metrics()['kvtier_index_orphans_dropped_total{model="m",routing_group="default"}']
                >= 1000
            )
        )


def test_ranks_beyond_the_bound_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(budget=4 << 20, form="python", max_ranks=2)
    with IndexServer(settings=settings) as server, StockPublisher() as publisher:
        client = Client(server.url)
        client("POST", "/register", publisher.registration)
        publisher.publish(0, stored([1], None, T[:4]))
        until(lambda: client.query(T)["states"] == {"1": {"0": "exact"}})
        for rank in (1, 2, 2, -1):
            publisher.publish(rank, stored([1, 2], None, T[:8]))
        until(lambda: client.metrics()["kvtier_index_ignored_batches_total"] == 3)
        assert client.query(T)["states"] == {"1": {"0": "degraded", "1": "degraded"}}
        assert client.query(T)["scores"] == {"1": {"0": 4, "1": 8}}
        assert (client.listener()["ranks"], client.listener()["ignored_batches"]) == ([0, 1], 3)
        assert "rank -1" in client.listener()["last_error"]
    assert sum("rank 2" in record.getMessage() for record in caplog.records) == 1


def test_an_answer_never_belongs_to_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that becomes exact between the match and the look at its state would vouch for what was
    before.
    """
    with IndexServer(settings=SMALL) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher))
        publish(publisher, stored([1], None, T[:4]))
        until(lambda: client.query(T)["states"] == {"1": {"0": "exact"}})
        match, applied = PrefixIndex.match, threading.Event()

        def slow_match(index: PrefixIndex, hashes: Any) -> Any:
            found = match(index, hashes)
            publish(publisher, stored([2], 1, T[4:8]))
            assert not applied.wait(0.2)  # the longer, the surer; nothing comes of it but time
            return found

        apply_all = PrefixIndex.apply_all

        def noted_apply(index: PrefixIndex, worker: str, batches: Any) -> None:
            apply_all(index, worker, batches)
            applied.set()

        monkeypatch.setattr(PrefixIndex, "apply_all", noted_apply)
        monkeypatch.setattr(PrefixIndex, "match", slow_match)
        assert client.query(T)["scores"] == {"1": {"0": 4}}
        monkeypatch.setattr(PrefixIndex, "match", match)
        until(lambda: client.query(T)["scores"] == {"1": {"0": 8}})


# -- ranks -----------------------------------------------------------------------------------------


class StockPublisher:
    """Sends batches of whatever rank, with numbers and nothing else, as vLLM does."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.registration = {"instance_id": 1, "model_name": "m", "block_size": 4, "endpoint": self.endpoint}
        self._seq = itertools.count()
        self._is_heard = False

    def publish(self, rank: int | None, *events: Any) -> None:
        if not self._is_heard:
            assert self._socket.poll(20_000)  # somebody has subscribed
            self._is_heard = True
        payload = frame_batch(time.time(), [EventEncoder().event(event) for event in events], rank)
        self._socket.send_multipart((b"", next(self._seq).to_bytes(8, "big"), payload))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        self._context.term()


def test_two_registrations_whose_batches_name_the_same_rank(client: Client) -> None:
    """Two engines behind one instance that both think they are rank 0 are two workers, and one clear clears
    one.
    """
    with StockPublisher() as zero, StockPublisher() as one:
        client("POST", "/register", zero.registration | {"dp_rank": 0})
        client("POST", "/register", one.registration | {"dp_rank": 1})
        zero.publish(0, stored([1], None, T[:4]))
        one.publish(0, stored([1, 2], None, T[:8]))
        until(lambda: client.query(T)["scores"] == {"1": {"0": 4, "1": 8}})
        zero.publish(0, AllBlocksCleared())
        until(lambda: client.query(T)["scores"] == {"1": {"1": 8}})
        assert client("POST", "/unregister", {"instance_id": 1, "model_name": "m", "dp_rank": 0})[0] == 200
        assert client.query(T)["scores"] == {"1": {"1": 8}}
        assert client.query(T)["states"] == {"1": {"1": "exact"}}


def test_one_of_several_learnt_ranks_cannot_be_unregistered_alone(client: Client) -> None:
    """Such a call removed nothing and said that the instance is not there."""
    with StockPublisher() as publisher:
        client("POST", "/register", publisher.registration)
        publisher.publish(0, stored([1], None, T[:4]))
        publisher.publish(1, stored([1, 2], None, T[:8]))
        until(lambda: client.query(T)["scores"] == {"1": {"0": 4, "1": 8}})
        status, answer = client("POST", "/unregister", {"instance_id": 1, "model_name": "m", "dp_rank": 1})
        assert status == 409
        assert "ranks 0, 1: unregister it without dp_rank" in answer["error"]
        assert client("POST", "/unregister", {"instance_id": 1, "model_name": "m", "dp_rank": 2})[0] == 404
        assert client.query(T)["scores"] == {"1": {"0": 4, "1": 8}}
        assert client("POST", "/unregister", {"instance_id": 1, "model_name": "m"})[0] == 200


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_the_only_learnt_rank_is_unregistered_by_its_number(client: Client, rank: int | None) -> None:
    """Who registers without a rank may learn it from `/workers`, and use it."""
    with StockPublisher() as publisher:
        client("POST", "/register", publisher.registration)
        publisher.publish(rank, stored([1], None, T[:4]))
        until(lambda: client.query(T)["scores"] == {"1": {str(rank or 0): 4}})
        assert client("POST", "/unregister", {"instance_id": 1, "model_name": "m", "dp_rank": 7})[0] == 404
        assert (
            client("POST", "/unregister", {"instance_id": 1, "model_name": "m", "dp_rank": rank or 0})[0]
            == 200
        )
        assert client("POST", "/query", {"token_ids": T, "model_name": "m"})[0] == 404


def test_a_registration_without_a_rank_speaks_for_those_of_its_batches(client: Client) -> None:
    with StockPublisher() as publisher, StockPublisher() as other:
        client("POST", "/register", publisher.registration)
        publisher.publish(0, stored([1], None, T[:4]))
        publisher.publish(3, stored([1, 2], None, T[:8]))
        publisher.publish(None, stored([2], 1, T[4:8]), stored([3], 2, T[8:12]))
        until(lambda: client.query(T)["scores"] == {"1": {"0": 12, "3": 8}})
        publisher.publish(3, AllBlocksCleared())
        until(lambda: client.query(T)["scores"] == {"1": {"0": 12}})
        assert client.query(T)["states"] == {"1": {"0": "exact", "3": "exact"}}
        status, answer = client("POST", "/register", other.registration | {"dp_rank": 3})
        assert (status, answer["error"]) == (409, "instance 1 dp_rank 3 already registered")


def test_a_rank_that_another_registration_names_is_not_taken_over(client: Client) -> None:
    with StockPublisher() as named, StockPublisher() as publisher:
        client("POST", "/register", named.registration | {"dp_rank": 3})
        client("POST", "/register", publisher.registration)
        named.publish(3, stored([1], None, T[:4]))
        publisher.publish(0, stored([1], None, T[:4]))
        publisher.publish(3, AllBlocksCleared(), stored([1, 2], None, T[:8]))
        until(lambda: client.query(T)["states"] == {"1": {"3": "exact", "0": "degraded"}})
        assert client.query(T)["scores"] == {"1": {"3": 4, "0": 4}}
        assert named.endpoint in client.query(T)["reasons"]["1"]["0"]


def test_a_registration_with_a_rank_speaks_for_no_other(client: Client) -> None:
    """A second rank in its stream is not merged into the first: that would claim blocks that are
    elsewhere.
    """
    with StockPublisher() as publisher:
        client("POST", "/register", publisher.registration | {"dp_rank": 1})
        publisher.publish(0, stored([1], None, T[:4]))
        publisher.publish(4, stored([1, 2], None, T[:8]))
        until(lambda: client.query(T)["states"] == {"1": {"1": "degraded"}})
        assert client.query(T)["scores"] == {"1": {"1": 4}}
        assert "without dp_rank" in client.query(T)["reasons"]["1"]["1"]


def test_a_restart_empties_all_ranks_of_a_publisher(client: Client) -> None:
    with StockPublisher() as publisher:
        client("POST", "/register", publisher.registration)
        for rank in (0, 1):
            publisher.publish(rank, stored([1], None, T[:4]))
        until(lambda: client.query(T)["scores"] == {"1": {"0": 4, "1": 4}})
        publisher._seq = itertools.count()
        publisher.publish(1, stored([1, 2], None, T[:8]))
        until(lambda: client.query(T)["scores"] == {"1": {"1": 8}})


# -- life ------------------------------------------------------------------------------------------


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(OutsideError, match=f"cannot listen on 127.0.0.1 port {port}"),
            IndexServer(port=port, settings=SMALL),
        ):
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(number: signal.Signals) -> None:
    code = """
        from kvtier.index.server import Settings, serve
        serve(port=0, settings=Settings(form="python"), on_ready=lambda url: print(url, flush=True))
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        client = Client(process.stdout.readline().strip())
        assert client("GET", "/health") == (200, "")
        os.kill(process.pid, number)
        assert process.wait(timeout=60) == 0


def test_a_block_size_that_comes_later_loses_nothing() -> None:
    """The group's index was made anew: what had been refused was forgotten, and its worker exact again."""
    service = Service(Settings(form="python"))
    try:
        group = GroupKey("m")
        service.register(Registration(group, "a", None, "tcp://127.0.0.1:9"))
        index = service.group(group).index
        left_out = BlockStored([1, 2], None, list(range(8)), 4, None, "GPU", None, None, 3)
        index.apply("0:a", DecodedBatch(0.0, [left_out]))
        why = index.incomplete()
        assert why
        service.register(Registration(group, "b", None, "tcp://127.0.0.1:9", block_size=4))
        assert service.group(group).index is index
        assert (index.incomplete(), index.block_size) == (why, 4)
    finally:
        service.close()


def test_places_beyond_the_bound_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with IndexServer(settings=SMALL) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher))
        one = stored([1], None, T[:4], "STORAGE")
        for tier in range(20):
            publish(publisher, msgspec.structs.replace(one, ownership=f"tier{tier}"))
        until(lambda: client.query(T)["states"] == {"1": {"0": "degraded"}})
        assert "places beyond the 16" in client.query(T)["reasons"]["1"]["0"]
        refused = 'kvtier_index_refused_total{model="m",routing_group="default"}'
        until(lambda: client.metrics()[refused] >= 4)
    told = [record.levelname for record in caplog.records if record.name.startswith("kvtier.index")]
    assert told == ["WARNING"]


@pytest.mark.parametrize("by", ["setting", "environment", "default"])
def test_a_compiled_index_is_compiled_before_it_serves(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="without numba there is nothing to compile")
    warmed: list[str] = []
    monkeypatch.setattr(PrefixIndex, "warm_up", lambda index: warmed.append(index.form))
    monkeypatch.delenv("KVTIER_INDEX", raising=False)
    if by == "environment":
        monkeypatch.setenv("KVTIER_INDEX", "numba")
    Service(Settings(budget=4 << 20, form="numba" if by == "setting" else None)).close()
    assert warmed == ["numba"]


def test_an_index_and_a_server_have_the_same_defaults() -> None:
    index = {name: parameter.default for name, parameter in signature(PrefixIndex).parameters.items()}
    server = {field.name: field.default for field in fields(Settings)}
    command = {name: parameter.default for name, parameter in signature(serve_command).parameters.items()}
    for name in ("keys", "budget", "form", "seed", "counting"):
        assert index[name] == server[name], name
    assert command["keys"] == index["keys"]
    assert command["counting"] == index["counting"]
    assert parse_size(command["budget"], "budget") == index["budget"]


def test_a_registration_without_descriptors_left_gets_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a 500 with a traceback in the log."""

    def no_descriptors(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with publishing() as publisher, IndexServer(port=0, settings=SMALL) as server:
        client = Client(server.url)
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Context, "socket", no_descriptors)
            status, answer = client("POST", "/register", registered(publisher))
        assert status == 503
        assert "raise the limit of open files" in answer["error"]
        assert client("POST", "/register", registered(publisher)) == (201, {"status": "ok"})


def test_a_port_that_cannot_be_is_refused() -> None:
    with publishing() as publisher, IndexServer(port=0, settings=SMALL) as server:
        body = registered(publisher) | {"endpoint": "tcp://127.0.0.1:71093"}
        status, answer = Client(server.url)("POST", "/register", body)
        assert (status, "expected a port from 0 to 65535" in answer["error"]) == (400, True)
