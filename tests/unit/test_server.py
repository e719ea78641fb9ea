"""The index over HTTP: real publishers, real connections, and whatever bytes a stranger may send."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
import zmq

from kvtier.errors import InputError, OutsideError
from kvtier.events.config import KVEventsConfig
from kvtier.events.publisher import ZmqEventPublisher
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvtier.events.wire import DecodedBatch, EventEncoder, frame_batch
from kvtier.index.forms import FORMS
from kvtier.index.http import HttpError, HttpRequest, HttpServer, Response
from kvtier.index.prefix import PrefixIndex
from kvtier.index.server import (
    Access,
    GroupKey,
    HttpLimits,
    IndexServer,
    Registration,
    Settings,
    read_token,
)
from kvtier.index.service import Service
from kvtier.index.xxh3 import chain_keys, local_hashes, token_array
from kvtier.keys import hash_blocks, hash_to_u64

T = list(range(200, 260))
SMALL = Settings(budget=4 << 20, form="python")


class Client:
    """Speaks JSON to a server."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, headers, data = self.raw(method, path, None if body is None else json.dumps(body).encode())
        return status, json.loads(data) if headers.get("content-type", "").startswith(
            "application/json"
        ) else data.decode()

    def raw(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._address, timeout=20)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            return (
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    def bytes(self, data: bytes, half_close: bool = True) -> bytes:
        """Send bytes as they are, and return all that comes back."""
        host, _, port = self._address.partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            try:
                sock.sendall(data)
                if half_close:
                    sock.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: sock.recv(65536), b""))
            except (ConnectionResetError, BrokenPipeError):
                return b""

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """Give a connection, and break it off in the end."""
        host, _, port = self._address.partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            yield sock

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics; labels are part of the name."""
        lines = self("GET", "/metrics")[1].splitlines()
        return {
            name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")
        }

    def listener(self, rank: int = 0) -> dict[str, Any]:
        """Return what /workers says of the one instance there is."""
        return self("GET", "/workers")[1][0]["listeners"][str(rank)]

    def query_status(self) -> int:
        return self.raw("POST", "/query", b'{"token_ids":[1],"model_name":"none"}')[0]

    def query(self, tokens: list[int], **more: Any) -> Any:
        status, answer = self("POST", "/query", {"token_ids": tokens, "model_name": "m"} | more)
        assert status == 200, answer
        return answer


def until(condition: Callable[[], bool]) -> None:
    """Ask until the answer is yes; the asking takes long enough by itself."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"


@contextmanager
def publishing(rank: int = 0, **options: Any) -> Iterator[ZmqEventPublisher]:
    publisher = ZmqEventPublisher(
        rank, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=KVEventsConfig(**options)
    )
    try:
        yield publisher
    finally:
        publisher.shutdown()


def stored(hashes: list[int], parent: int | None, tokens: list[int], medium: str = "GPU") -> BlockStored:
    return BlockStored(hashes, parent, tokens, 4, None, medium, None)


def publish(publisher: ZmqEventPublisher, *events: Any) -> None:
    publisher.publish(KVEventBatch(time.time(), list(events)))


def registered(publisher: ZmqEventPublisher, instance: int | str = 1, **more: Any) -> dict[str, Any]:
    endpoints = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    return {"instance_id": instance, "model_name": "m", "block_size": 4} | endpoints | more


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
def test_a_wrong_block_size_is_said(form: str, caplog: pytest.LogCaptureFixture) -> None:
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


def test_blocks_dropped_before_their_parents_came_are_said() -> None:
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


def test_ranks_beyond_the_bound_are_said(caplog: pytest.LogCaptureFixture) -> None:
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


def test_two_registrations_whose_batches_say_the_same_rank(client: Client) -> None:
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


# -- who may ask -----------------------------------------------------------------------------------


BODY = json.dumps(
    {"instance_id": 1, "model_name": "m", "endpoint": "tcp://127.0.0.1:1", "block_size": 4}
).encode()


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_changes_are_json(client: Client, kind: str) -> None:
    """A page of anybody may post these kinds to a server on the reader's machine without asking it first."""
    for path in ("/register", "/unregister"):
        status, _, data = client.raw("POST", path, BODY, {"Content-Type": kind})
        assert status == 415, data
        assert "application/json" in json.loads(data)["error"]
    assert client("GET", "/workers") == (200, [])
    assert (
        client.raw("POST", "/query", b'{"token_ids":[1],"model_name":"m"}', {"Content-Type": kind})[0] == 404
    )


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_what_routers_send(client: Client, kind: str) -> None:
    assert client.raw("POST", "/register", BODY, {"Content-Type": kind})[0] == 201


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "http://[bad"},
        {"Host": "evil.example"},
        {"Host": "evil.example:8090", "Origin": "http://evil.example:8090"},
        {"Host": "localhost.evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[::1"},
        {"Host": "0x7f000001"},
    ],
)
def test_pages_of_others_are_refused(client: Client, headers: dict[str, str]) -> None:
    """The second kind is DNS rebinding: the page's own name leads to this server."""
    for method, path in (
        ("POST", "/register"),
        ("POST", "/unregister"),
        ("GET", "/dump"),
        ("GET", "/workers"),
    ):
        status, _, data = client.raw(method, path, BODY if method == "POST" else None, headers)
        assert (status, headers.keys() >= {json.loads(data)["error"].partition(":")[0]}) == (403, True)
    assert client("GET", "/workers") == (200, [])


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8090", "localhost.", "127.0.0.1:1", "[::1]:8090", "10.2.3.4"]
)
def test_addresses_and_loopback_names_are_ours(client: Client, host: str) -> None:
    assert client.raw("GET", "/health", None, {"Host": host})[0] == 200
    assert client.raw("GET", "/health", None, {"Host": host, "Origin": f"http://{host}"})[0] == 200


def test_names_may_be_allowed() -> None:
    with IndexServer("localhost", settings=SMALL, access=Access(hosts=("Index.svc.",))) as server:
        client = Client(server.url)
        assert client.raw("GET", "/health", None, {"Host": "index.svc:8090"})[0] == 200
        assert client.raw("GET", "/health", None, {"Host": "other.svc"})[0] == 403
    with IndexServer(settings=SMALL, access=Access(hosts=("*",))) as server:
        assert Client(server.url).raw("GET", "/health", None, {"Host": "other.svc"})[0] == 200


def test_doubled_fields_that_decide_who_may_ask(client: Client) -> None:
    for name in ("Host: localhost", "Origin: http://localhost", "Authorization: x", "Content-Type: x"):
        head = f"GET /health HTTP/1.1\r\n{name}\r\n{name}\r\n\r\n"
        assert client.bytes(head.encode()).startswith(b"HTTP/1.1 400 ")


def test_sockets_of_the_machine_only_where_allowed(tmp_path: Path) -> None:
    local = json.dumps(json.loads(BODY) | {"endpoint": f"ipc://{tmp_path}/s"}).encode()
    replay = json.dumps(json.loads(BODY) | {"replay_endpoint": f"ipc://{tmp_path}/s"}).encode()
    with IndexServer(settings=SMALL) as server:
        for body in (local, replay):
            status, _, data = Client(server.url).raw("POST", "/register", body)
            assert (status, "--allow-ipc" in json.loads(data)["error"]) == (403, True)
    with IndexServer(settings=SMALL, access=Access(ipc=True)) as server:
        assert Client(server.url).raw("POST", "/register", local)[0] == 201


def test_changes_may_need_a_token(caplog: pytest.LogCaptureFixture) -> None:
    token = "correct horse battery"
    with IndexServer(settings=SMALL, access=Access(token=token)) as server:
        client = Client(server.url)
        for given in (None, "Bearer", f"Basic {token}", f"Bearer {token}x", "Bearer \xe9", token):
            headers = {} if given is None else {"Authorization": given}
            for path in ("/register", "/unregister"):
                status, found, data = client.raw("POST", path, BODY, headers)
                assert (status, found["www-authenticate"], token in data.decode()) == (401, "Bearer", False)
        assert client("GET", "/workers") == (200, [])
        assert client.raw("POST", "/register", BODY, {"Authorization": f"bearer {token}"})[0] == 201
        assert client.raw("POST", "/query", b'{"token_ids":[1],"model_name":"m"}')[0] == 200
    assert token not in caplog.text
    assert token not in repr(Access(token=token))


def test_the_tokens_file_is_its_owners(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    for mode in (0o644, 0o640, 0o602):
        file.chmod(mode)
        with pytest.raises(InputError, match=rf"only its owner can read, got mode {mode:04o}: chmod 600"):
            read_token(file)
    file.chmod(0o600)
    assert read_token(file) == "0123456789abcdef"
    for wrong in (b"", b"short", b"\xff" * 20, b"two\nlines of a token", b"x" * 5000):
        file.write_bytes(wrong)
        with pytest.raises(InputError, match="expected a token of 16 to 4096 printable"):
            read_token(file)
    with pytest.raises(InputError, match="cannot read the token: No such file"):
        read_token(tmp_path / "none")


# -- requests that are wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/register", b"{nope", 400, "JSON"),
        ("POST", "/register", b"", 400, "JSON"),
        ("POST", "/register", b"\xff\xfe", 400, "JSON"),
        ("POST", "/register", b'{"x":' * 100_000, 400, "JSON"),
        ("POST", "/register", b"[]", 422, "Expected `object`"),
        ("POST", "/register", b"{}", 422, "instance_id"),
        (
            "POST",
            "/register",
            b'{"instance_id":-1,"endpoint":"tcp://h:1","model_name":"m","block_size":4}',
            422,
            "instance_id",
        ),
        (
            "POST",
            "/register",
            b'{"instance_id":1,"endpoint":"tcp://h:1","model_name":"m","block_size":0}',
            422,
            "block_size",
        ),
        ("POST", "/register", b'{"instance_id":1,"endpoint":"tcp://h:1","block_size":4}', 422, "model_name"),
        (
            "POST",
            "/register",
            b'{"instance_id":1,"endpoint":"bogus","model_name":"m","block_size":4}',
            400,
            "tcp://",
        ),
        (
            "POST",
            "/register",
            b'{"instance_id":1,"endpoint":"tcp://*:1","model_name":"m","block_size":4}',
            400,
            "tcp://",
        ),
        (
            "POST",
            "/register",
            b'{"instance_id":1,"endpoint":"tcp://a b:x","model_name":"m","block_size":4}',
            400,
            "",
        ),
        ("POST", "/unregister", b'{"instance_id":9,"model_name":"m"}', 404, "instance 9"),
        ("POST", "/query", b'{"token_ids":[1],"model_name":"m"}', 404, "model=m routing_group=default"),
        ("POST", "/query", b'{"token_ids":[-1],"model_name":"m"}', 422, "token_ids[0]"),
        ("POST", "/query", b'{"token_ids":[4294967296],"model_name":"m"}', 422, "token_ids[0]"),
        ("POST", "/query", b'{"token_ids":[1]}', 422, "model_name"),
        ("POST", "/query_by_hash", b'{"model_name":"m"}', 404, "model=m"),
        ("GET", "/query", None, 405, "POST /query"),
        ("POST", "/health", b"", 405, "GET /health"),
        ("GET", "/nope", None, 404, "/query_by_hash"),
    ],
)
def test_errors_say_what_was_expected(
    client: Client, method: str, path: str, body: bytes | None, status: int, says: str
) -> None:
    found, headers, data = client.raw(method, path, body)
    assert (found, headers["content-type"]) == (status, "application/json")
    assert says in json.loads(data)["error"]
    assert client("GET", "/health") == (200, "")


def test_conflicts(client: Client) -> None:
    with publishing() as publisher:
        assert client("POST", "/register", registered(publisher))[0] == 201
        assert client("POST", "/register", registered(publisher))[0] == 409
        status, answer = client("POST", "/register", registered(publisher, 2, block_size=8))
        assert (status, answer["error"]) == (
            409,
            "block_size mismatch for model=m routing_group=default: existing=4, requested=8",
        )
        assert client("POST", "/query_by_hash", {"model_name": "m"})[0] == 422
        assert client("POST", "/query_by_hash", {"model_name": "m", "block_hashes": [1 << 64]})[0] == 422


def test_the_number_of_registrations_is_bounded() -> None:
    settings = Settings(budget=1 << 20, form="python", max_sources=2, max_groups=1)
    with IndexServer(settings=settings) as server, publishing() as publisher:
        client = Client(server.url)
        assert client("POST", "/register", registered(publisher, 1))[0] == 201
        assert client("POST", "/register", registered(publisher, 2, model_name="other"))[0] == 409
        assert client("POST", "/register", registered(publisher, 2))[0] == 201
        assert client("POST", "/register", registered(publisher, 3))[0] == 409


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00\x01\x02\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET /health HTTP/9\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"POST /query HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /query HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"POST /query HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (b"POST /query HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"POST /query HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /workers?" + b"a=b&" * 100 + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_requests_that_are_none(client: Client, data: bytes, status: int) -> None:
    answer = client.bytes(data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:100]
    assert b"Connection: close" in answer


def test_random_bytes_do_no_harm(client: Client) -> None:
    rng = random.Random(11)
    good = b'POST /query HTTP/1.1\r\nContent-Length: 35\r\n\r\n{"token_ids":[1],"model_name":"m"}  '
    for _ in range(150):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.getrandbits(8)
        client.bytes(bytes(data) if rng.random() < 0.8 else rng.randbytes(rng.randrange(200)))
    assert client("GET", "/health") == (200, "")


def test_a_connection_serves_many_requests(client: Client) -> None:
    body = b'{"token_ids":[],"model_name":"m"}'
    one = b"POST /query HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    last = b"HEAD /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    answer = client.bytes(one * 3 + last)
    assert answer.count(b"HTTP/1.1 404 ") == 3
    assert answer.count(b"HTTP/1.1 200 ") == 1


def test_expect_continue(client: Client) -> None:
    head = (
        b"POST /query HTTP/1.1\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    )
    answer = client.bytes(head)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 422 ")


def test_connections_are_bounded_and_slow_ones_end() -> None:
    limits = HttpLimits(connections=2, idle_timeout=0.2, receive_timeout=0.2)
    with IndexServer(settings=SMALL, limits=limits) as server:
        client = Client(server.url)
        host, _, port = urlsplit(server.url).netloc.partition(":")
        idle = [socket.create_connection((host, int(port)), timeout=20) for _ in range(2)]
        idle[0].sendall(b"POST /query HTTP/1.1\r\nContent-Length: 5\r\n\r\n{")
        until(lambda: client.bytes(b"", half_close=False)[:12] in (b"", b"HTTP/1.1 503"))
        for sock in idle:
            assert sock.recv(100) in (b"",)  # ended by the server
            sock.close()
        until(lambda: client.raw("GET", "/health")[0] == 200)


# -- long and many ---------------------------------------------------------------------------------


def head_of(body: int) -> bytes:
    return b"POST /query HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % body


def test_unfinished_bodies_are_bounded_together() -> None:
    """Sixty clients that never finished kept 232 MiB. Small requests are served meanwhile."""
    limits = HttpLimits(unfinished_bodies=8 << 20, receive_timeout=60)
    with IndexServer(settings=SMALL, limits=limits) as server, ExitStack() as stack:
        client = Client(server.url)
        sockets = [stack.enter_context(client.connected()) for _ in range(12)]
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for sock in sockets:
            sock.sendall(head_of(2 << 20) + b" " * ((2 << 20) - 1))
            assert client.query_status() == 404
        until(lambda: len(select.select(sockets, (), (), 1)[0]) >= 8)
        assert tracemalloc.get_traced_memory()[1] < 35 << 20
        refused = select.select(sockets, (), (), 0)[0]
        assert {sock.recv(12) for sock in refused} == {b"HTTP/1.1 503"}
        taken = next(sock for sock in sockets if sock not in refused)
        taken.sendall(b" ")
        assert taken.recv(12) == b"HTTP/1.1 400"


def test_an_idle_connection_keeps_no_body(client: Client) -> None:
    body = b'{"token_ids":[1],"model_name":"m"}' + b" " * (1 << 20)
    with ExitStack() as stack:
        sockets = [stack.enter_context(client.connected()) for _ in range(20)]
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for sock in sockets:
            sock.sendall(head_of(len(body)) + body)
            assert sock.recv(12) == b"HTTP/1.1 404"
        assert tracemalloc.get_traced_memory()[0] < 10 << 20


def test_a_dump_is_sent_in_slices_and_others_are_served_between() -> None:
    with IndexServer(settings=Settings(budget=64 << 20, form="python")) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher))
        blocks = 40_000
        for first in range(0, blocks, 1000):
            tokens = [token for at in range(first, first + 1000) for token in (at, at, at, at)]
            publish(publisher, stored(list(range(first + 1, first + 1001)), first or None, tokens))
        last = 'kvtier_index_blocks{model="m",routing_group="default"}'
        until(lambda: client.metrics().get(last) == blocks)
        with client.connected() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 << 10)
            sock.sendall(b"GET /dump HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
            answer = sock.recv(4096)  # and no more: the rest waits for us, and nobody waits for that
            assert b"Transfer-Encoding: chunked" in answer
            assert client.query([0] * 4)["scores"] == {"1": {"0": 4}}
            assert client("POST", "/unregister", {"instance_id": 1, "model_name": "m"})[0] == 200
            answer += b"".join(iter(lambda: sock.recv(1 << 20), b""))
        rest = answer.partition(b"\r\n\r\n")[2]
        data = b""
        while size := int(rest.partition(b"\r\n")[0], 16):
            start = rest.index(b"\r\n") + 2
            data, rest = data + rest[start : start + size], rest[start + size + 2 :]
        assert rest.startswith(b"0\r\n\r\nHTTP/1.1 200 OK\r\n")
        events = json.loads(data)["m:default"]["events"]
        assert [event["event"]["event_id"] for event in events] == list(range(len(events)))
        assert max(len(event["event"]["data"]["stored"]["blocks"]) for event in events) <= 1024
        found = {
            block["block_hash"] for event in events for block in event["event"]["data"]["stored"]["blocks"]
        }
        assert found == set(range(1, blocks + 1))


def test_dumps_that_nobody_reads_are_bounded() -> None:
    with IndexServer(settings=Settings(budget=64 << 20, form="python")) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher))
        blocks = 60_000
        for first in range(0, blocks, 1000):
            publish(
                publisher, stored(list(range(first + 1, first + 1001)), first or None, list(range(4000)))
            )
        until(lambda: client.metrics()['kvtier_index_blocks{model="m",routing_group="default"}'] == blocks)
        with ExitStack() as stack:
            for _ in range(4):
                sock = stack.enter_context(client.connected())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.sendall(b"GET /dump HTTP/1.1\r\n\r\n")
                assert sock.recv(12) == b"HTTP/1.1 200"
            assert client.raw("GET", "/dump")[0] == 503
            assert client.raw("HEAD", "/dump")[0] == 503
        until(lambda: client.raw("GET", "/dump")[0] == 200)  # those that went away make room


def test_an_empty_dump(client: Client) -> None:
    with publishing() as publisher:
        assert client("GET", "/dump") == (200, {})
        for name in ("m", 'n"'):
            client("POST", "/register", registered(publisher, model_name=name))
        empty = {"block_size": 4, "events": []}
        assert client("GET", "/dump") == (200, {"m:default": empty, 'n":default': empty})
        assert client.bytes(b"HEAD /dump HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")
        old = client.bytes(b"GET /dump HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        head, _, body = old.partition(b"\r\n\r\n")
        assert b"Connection: close" in head
        assert b"chunked" not in head
        assert json.loads(body).keys() == {"m:default", 'n":default'}


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(caplog: pytest.LogCaptureFixture) -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"[1"
        yield b""
        raise RuntimeError("in the middle")

    async def answer(request: HttpRequest) -> Response:
        return Response(200, pieces())

    async def ask() -> list[bytes]:
        server = HttpServer(answer)
        host, port = await server.start("127.0.0.1", 0)
        found = []
        for version in (b"1.1", b"1.0"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/%b\r\n\r\n" % version)
            try:
                found.append(await reader.read())
            except ConnectionResetError:
                found.append(b"reset")
            writer.close()
        await server.close()
        return found

    for data in asyncio.run(ask()):
        assert data == b"reset" or not data.endswith(b"0\r\n\r\n")
    assert "an answer broke off" in caplog.text


def test_requests_sent_all_at_once_let_others_have_a_turn() -> None:
    """Bytes that are here already are read, answered and sent without waiting for anything."""
    answered, turn_after = [], []

    async def answer(request: HttpRequest) -> Response:
        if not answered:
            asyncio.get_running_loop().call_soon(lambda: turn_after.append(len(answered)))
        answered.append(request.path)
        return Response()

    async def ask() -> None:
        server = HttpServer(answer)
        reader, writer = await asyncio.open_connection(*await server.start("127.0.0.1", 0))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 500)
        writer.write_eof()
        await reader.read()
        writer.close()
        await server.close()

    asyncio.run(ask())
    assert (len(answered), turn_after) == (500, [1])


def test_who_dribbles_a_head_is_cut_off() -> None:
    """One byte now and then kept a connection for as long as one that is idle between two requests."""
    limits = HttpLimits(receive_timeout=0.3, idle_timeout=600)
    with IndexServer(settings=SMALL, limits=limits) as server:
        client = Client(server.url)
        with client.connected() as slow, client.connected() as silent, client.connected() as kept:
            kept.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert kept.recv(12) == b"HTTP/1.1 200"
            slow.sendall(b"GET /health HT")
            assert slow.recv(100) == b""
            assert silent.recv(100) == b""
            kept.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert b"HTTP/1.1 200" in kept.recv(4096) + kept.recv(4096)


def test_who_sends_too_much_sees_why(client: Client) -> None:
    """Closing over unread bytes resets the connection, and the answer is lost on its way."""
    for _ in range(10):
        with client.connected() as sock:
            sock.sendall(head_of(9 << 20) + b" " * (512 << 10))
            assert sock.recv(12) == b"HTTP/1.1 413"


def test_metrics_are_readable(client: Client) -> None:
    with publishing() as publisher:
        client("POST", "/register", registered(publisher, 'a"b\\c\nd'))
        publish(publisher, stored([1, 2], None, T[:8]))
        until(lambda: client.query(T)["scores"] != {})
        status, headers, text = client.raw("GET", "/metrics")
    lines = text.decode().splitlines()
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4")
    assert 'kvtier_index_blocks{model="m",routing_group="default"} 2' in lines
    worker = 'model="m",routing_group="default",instance="a\\"b\\\\c\\nd",rank="0"'
    assert f'kvtier_index_worker_blocks{{{worker},tier="gpu"}} 2' in lines
    assert f'kvtier_index_source_state{{{worker},state="exact"}} 1' in lines
    assert 'kvtier_index_requests_total{path="/register",status="201"} 1' in lines
    assert all(line.startswith("#") or float(line.rsplit(" ", 1)[1]) >= 0 for line in lines)


def test_questions_while_events_pour_in() -> None:
    """Two threads ask while a third applies: nobody ever sees a half-applied batch."""
    with IndexServer(settings=SMALL) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher))
        seen: list[int] = []

        def ask() -> None:
            seen.extend(client.query(T[:8])["instances"].get("1", {}).get("gpu", 0) for _ in range(60))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            publish(publisher, stored([1], None, T[:4]), stored([2], 1, T[4:8]))
            publish(publisher, BlockRemoved([2], "GPU"), BlockRemoved([1], "GPU"))
        for thread in threads:
            thread.join()
        assert set(seen) <= {0, 8}


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
        assert process.wait(timeout=20) == 0


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


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_browser_says_comes_from_another_site_is_refused(site: str) -> None:
    with pytest.raises(HttpError, match="Sec-Fetch-Site"):
        Access().expect_caller({"host": "localhost:8080", "sec-fetch-site": site})
    Access().expect_caller({"host": "localhost:8080", "sec-fetch-site": "same-origin"})
