"""The index over HTTP: real publishers, real connections, and whatever bytes a stranger may send."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvtier.errors import OutsideError
from kvtier.events.config import KVEventsConfig
from kvtier.events.publisher import ZmqEventPublisher
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvtier.index.forms import FORMS
from kvtier.index.server import GroupKey, HttpLimits, IndexServer, Registration, Settings
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

    def raw(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._address, timeout=20)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
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
    publisher = ZmqEventPublisher(rank, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=KVEventsConfig(**options))
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


# -- following -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_publisher_is_followed_from_before_it_was_registered(form: str) -> None:
    if form == "numba":
        pytest.importorskip("numba")
    with IndexServer(settings=Settings(budget=4 << 20, form=form)) as server, publishing() as publisher:
        client = Client(server.url)
        publish(
            publisher, stored([1, 2], None, T[:8]), stored([3], 2, T[8:12], "CPU"), stored([4], 3, T[12:16], "STORAGE")
        )
        assert client("POST", "/register", registered(publisher)) == (201, {"status": "ok"})
        until(lambda: client.query(T[:20])["states"] == {"1": {"0": "exact"}})
        until(lambda: bool(client.query(T[:20])["instances"]))
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
        assert client("POST", "/unregister", {"instance_id": 1, "model_name": "m"}) == (200, {"status": "ok"})
        assert client("POST", "/query", {"token_ids": T, "model_name": "m"})[0] == 404


def test_a_batchs_rank_counts_more_than_the_registrations(client: Client) -> None:
    with publishing(3) as publisher:
        client("POST", "/register", registered(publisher, dp_rank=5))
        publish(publisher, stored([1], None, T[:4]))
        until(lambda: client.query(T)["scores"] == {"1": {"3": 4}})
        client("POST", "/unregister", {"instance_id": 1, "model_name": "m"})
        client("POST", "/register", registered(publisher, dp_rank=5))
        until(lambda: client.query(T)["scores"] == {"1": {"3": 4}})


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
        assert client("POST", "/unregister", {"instance_id": 1, "model_name": "m", "routing_group": "g"})[0] == 200
        assert client.query(T)["scores"] == {"1": {"0": 4}}
        listed = client("GET", "/workers")[1]
        assert [(each["model_name"], each["routing_group"]) for each in listed] == [("m", "default"), ("n", "default")]
        assert client("GET", "/workers?model_name=n")[1] == listed[1:]
        assert client("GET", "/workers?routing_group=g") == (200, [])


def test_hashes_instead_of_tokens(client: Client) -> None:
    local = local_hashes(token_array(T[:12]), 4)
    with publishing() as publisher:
        client("POST", "/register", registered(publisher))
        publish(publisher, stored([1, 2, 3], None, T[:12]))
        until(lambda: client.query(T)["scores"] == {"1": {"0": 12}})
        signed = [each - (1 << 64) if each >> 63 else each for each in local.tolist()]
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
        new = {"type": "vLLM", "modelname": "d", "tenant_id": "t", "instance_id": "node", "block_size": 4, "dp_rank": 0}
        new |= {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint, "additionalsalt": "w8a8"}
        assert client("POST", "/register", new) == (200, {"status": "registered successfully", "instance_id": "node"})
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
    hashes = [hash_to_u64(each) for each in hash_blocks(T[:12], 4, seed="s")]
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
        (each["worker_id"], each["event"]["dp_rank"], each["storage_tier"], block["block_hash"])
        for each in events
        for block in each["event"]["data"]["stored"]["blocks"]
    }
    assert found == {(1, 0, "device", 71), (1, 0, "device", 72), (1, 0, "disk", 71)}


def test_a_worker_whose_blocks_found_no_room_is_degraded() -> None:
    with IndexServer(settings=Settings(budget=20_000, form="python")) as server, publishing() as publisher:
        client = Client(server.url)
        client("POST", "/register", registered(publisher))
        publish(publisher, *(stored([each], None, [each] * 4) for each in range(1000)))
        until(lambda: client.query([0] * 4)["states"] == {"1": {"0": "degraded"}})


def test_followed_from_the_start() -> None:
    with publishing() as publisher:
        first = Registration(GroupKey("m"), 7, 0, publisher.endpoint, publisher.replay_endpoint)
        publish(publisher, stored([1], None, T[:4]))
        with IndexServer(settings=SMALL, follow=[(first, 4)]) as server:
            client = Client(server.url)
            until(lambda: client.query(T)["scores"] == {"7": {"0": 4}})
            listener = client("GET", "/workers")[1][0]["listeners"]["0"]
            assert (listener["endpoint"], listener["status"]) == (publisher.endpoint, "active")


# -- requests that are wrong -----------------------------------------------------------------------------------------------


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
        ("POST", "/register", b'{"instance_id":1,"endpoint":"bogus","model_name":"m","block_size":4}', 400, "tcp://"),
        (
            "POST",
            "/register",
            b'{"instance_id":1,"endpoint":"tcp://*:1","model_name":"m","block_size":4}',
            400,
            "tcp://",
        ),
        ("POST", "/register", b'{"instance_id":1,"endpoint":"tcp://a b:x","model_name":"m","block_size":4}', 400, ""),
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


# -- bytes ------------------------------------------------------------------------------------------------------------------


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
    head = b"POST /query HTTP/1.1\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
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


# -- life -------------------------------------------------------------------------------------------------------------------


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
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        client = Client(process.stdout.readline().strip())
        assert client("GET", "/health") == (200, "")
        os.kill(process.pid, number)
        assert process.wait(timeout=20) == 0
