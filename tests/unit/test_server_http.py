"""The index server's door: who may ask, what is refused, and whatever bytes a stranger may send."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import select
import socket
import threading
import time
import tracemalloc
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.unit.server_kit import (
    PATIENCE,
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

from kvtier.errors import InputError
from kvtier.events.types import BlockRemoved
from kvtier.index.http import Access, HttpError, HttpLimits, HttpRequest, HttpServer, Response, read_token
from kvtier.index.service import Settings


@pytest.fixture
def client() -> Iterator[Client]:
    with IndexServer(settings=SMALL) as server:
        yield Client(server.url)


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
def test_json_content_types_are_accepted(client: Client, kind: str) -> None:
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


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_requests_that_a_browser_marks_as_cross_site_are_refused(site: str) -> None:
    with pytest.raises(HttpError, match="Sec-Fetch-Site"):
        Access().expect_caller({"host": "localhost:8080", "sec-fetch-site": site})
    Access().expect_caller({"host": "localhost:8080", "sec-fetch-site": "same-origin"})


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
def test_invalid_requests_are_refused(client: Client, data: bytes, status: int) -> None:
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
        idle = [socket.create_connection((host, int(port)), timeout=PATIENCE) for _ in range(2)]
        with suppress(OSError):  # it may have ended by now
            idle[0].sendall(b"POST /query HTTP/1.1\r\nContent-Length: 5\r\n\r\n{")
        until(lambda: client.bytes(b"", half_close=False)[:12] in (b"", b"HTTP/1.1 503"))
        for sock in idle:
            assert is_ended(sock)
            sock.close()
        until(lambda: is_healthy(client))


def is_ended(sock: socket.socket) -> bool:
    """Return whether the server has ended a connection, without a word. Wait for it."""
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:  # what it had sent was not read
        return True


def is_healthy(client: Client) -> bool:
    """Return whether a server answers. It may end this connection too if the machine is slow."""
    try:
        return client.raw("GET", "/health")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


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


def test_requests_that_fail_are_one_traceback_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever found a request that fails could fill the disk of the log."""

    async def answer(request: HttpRequest) -> Response:
        raise ZeroDivisionError("a bug")

    async def ask() -> list[bytes]:
        server = HttpServer(answer)
        host, port = await server.start("127.0.0.1", 0)
        found = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /bug HTTP/1.0\r\n\r\n")
            found.append((await reader.read())[:12])
            writer.close()
        await server.close()
        return found

    assert asyncio.run(ask()) == [b"HTTP/1.1 500"] * 20
    (record,) = [record for record in caplog.records if record.name == "kvtier.index.http"]
    assert record.getMessage() == "GET /bug failed"
    assert record.exc_info is not None


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


def test_a_client_that_stops_in_a_head_is_cut_off() -> None:
    """One byte now and then kept a connection for as long as one that is idle between two requests."""
    limits = HttpLimits(receive_timeout=0.3, idle_timeout=600)
    with IndexServer(settings=SMALL, limits=limits) as server:
        client = Client(server.url)
        with ExitStack() as stack:
            kept = []

            def is_kept() -> bool:
                kept.append(stack.enter_context(client.connected()))
                return is_served(kept[-1])

            until(is_kept)  # a busy machine may be too slow with the first
            slow, silent = (stack.enter_context(client.connected()) for _ in range(2))
            with suppress(OSError):
                slow.sendall(b"GET /health HT")
            assert is_ended(slow)
            assert is_ended(silent)
            assert is_served(kept[-1])


def test_a_head_that_arrives_byte_by_byte_has_one_deadline() -> None:
    """A limit on each read would let a client hold its connection for hours."""
    limits = HttpLimits(receive_timeout=0.4, idle_timeout=600)
    with IndexServer(settings=SMALL, limits=limits) as server, Client(server.url).connected() as sock:
        end = time.monotonic() + PATIENCE
        with suppress(OSError):
            while not select.select([sock], (), (), 0.05)[0]:
                sock.sendall(b"x")
                assert time.monotonic() < end
            assert is_ended(sock)


def test_a_head_of_many_fields_is_bounded_as_a_whole(client: Client) -> None:
    fields = b"".join(b"X-%d: %b\r\n" % (number, b"y" * 4000) for number in range(90))
    answer = client.bytes(b"GET /health HTTP/1.1\r\n" + fields + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_connections_without_a_request_count() -> None:
    limits = HttpLimits(connections=8, receive_timeout=600)
    with IndexServer(settings=SMALL, limits=limits) as server, ExitStack() as stack:
        client = Client(server.url)
        sockets = [stack.enter_context(client.connected()) for _ in range(40)]
        until(lambda: len(select.select(sockets, (), (), 1)[0]) == 32)
        refused = select.select(sockets, (), (), 0)[0]
        assert {sock.recv(12) for sock in refused} == {b"HTTP/1.1 503"}


def is_served(sock: socket.socket) -> bool:
    """Return whether a request is answered; if not, the connection has ended."""
    with suppress(OSError):
        sock.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        return sock.recv(4096).startswith(b"HTTP/1.1 200")
    return False


def test_a_client_that_sends_too_much_sees_why(client: Client) -> None:
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
    assert 'kvtier_index_request_seconds_bucket{path="/register",le="+Inf"} 1' in lines
    assert 'kvtier_index_request_seconds_count{path="/register"} 1' in lines
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
