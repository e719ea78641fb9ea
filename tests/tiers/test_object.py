"""The backend over object stores: a real S3 server, and sockets that answer as a broken one would."""

from __future__ import annotations

import errno
import json
import struct
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.tiers.object_server import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    BUCKET,
    REGION,
    S3Server,
    ToldServer,
    http_answer,
    need_object_store,
    s3_credentials,
    serve_azure,
)
from tests.tiers.servers import RealServerSuite

from kvtier.errors import ConfigError
from kvtier.testing import shared_tier_suite
from kvtier.testing.backend_suite import ROW_BYTES, BackendSuite, content, empty, payload_of, sealed
from kvtier.tier_config import ObjectConfig
from kvtier.tiers.base import Backend
from kvtier.tiers.object import ObjectBackend
from kvtier.tiers.seal import HEADER_BYTES

obstore = pytest.importorskip("obstore", reason="needs the package obstore: pip install 'kvtier[object]'")
PATIENCE = 60.0
_prefixes = count()


@pytest.fixture(scope="module", autouse=True)
def credentials() -> Iterator[None]:
    need_object_store()
    with s3_credentials():
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


def open_backend(endpoint: str, bucket: str = BUCKET, timeout: float = PATIENCE) -> ObjectBackend:
    """Open a backend in a place of its own."""
    url = f"s3://{bucket}/run-{next(_prefixes)}"
    config = ObjectConfig(url=url, endpoint=endpoint, region=REGION, allow_http=True)
    return ObjectBackend(config, ROW_BYTES, timeout=timeout)


class TestObject(BackendSuite):
    turns = 10  # a request takes 4 ms

    @pytest.fixture(autouse=True)
    def at(self, server: S3Server) -> None:
        self.endpoint = server.endpoint

    def make(self) -> Backend:
        return open_backend(self.endpoint)

    def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, ObjectBackend)
        backend.close()
        config = ObjectConfig(url=backend.url, endpoint=self.endpoint, region=REGION, allow_http=True)
        return ObjectBackend(config, ROW_BYTES, timeout=PATIENCE)

    @pytest.mark.parametrize("seed", [0])  # others say nothing new of a server that takes 4 ms for a request
    @pytest.mark.parametrize("rate", [0.01, 0.3])
    def test_never_wrong(self, backend: Backend, seed: int, rate: float) -> None:
        super().test_never_wrong(backend, seed, rate)


class TestShared(RealServerSuite):
    """Tiers of several engines over one bucket."""

    @pytest.fixture(autouse=True)
    def at(self, server: S3Server) -> None:
        url = f"s3://{BUCKET}/run-{next(_prefixes)}"
        self.config = ObjectConfig(url=url, endpoint=server.endpoint, region=REGION, allow_http=True)

    def make_backend(self) -> Backend:
        return ObjectBackend(self.config, shared_tier_suite.ROW_BYTES, timeout=PATIENCE)


class TestWhatLies:
    """Objects that are not what was written: no wrong byte, and no byte beyond the row."""

    @pytest.fixture
    def backend(self, server: S3Server) -> ObjectBackend:
        options = {"endpoint": server.endpoint, "region": REGION, "client_options": {"allow_http": True}}
        self.bucket = obstore.store.S3Store(BUCKET, **options)
        return open_backend(server.endpoint)

    def put(self, backend: ObjectBackend, number: int, value: bytes) -> None:
        """Write as whoever may write to the bucket can."""
        obstore.put(self.bucket, self.name(backend, number), value)

    def value(self, backend: ObjectBackend, number: int) -> bytes:
        return bytes(obstore.get(self.bucket, self.name(backend, number)).bytes())

    def name(self, backend: ObjectBackend, number: int) -> str:
        row = empty(number)
        return f"{backend.url.rpartition('/')[2]}/{row.scope:016x}/{row.key.hex()}"

    def test_the_value_is_header_and_row(self, backend: ObjectBackend) -> None:
        backend.write([sealed(1, cuts=(100,))])
        row = sealed(1)
        header = struct.pack("<8sQQB7x32s", b"kvtrow1\n", ROW_BYTES, row.scope, 16, row.seal)
        assert self.value(backend, 1) == header + content(1)

    @pytest.mark.parametrize("length", [0, 1, 64, ROW_BYTES, ROW_BYTES + HEADER_BYTES - 1, 3 * ROW_BYTES])
    def test_another_length_fails_its_check(self, backend: ObjectBackend, length: int) -> None:
        backend.write([sealed(1)])
        value = self.value(backend, 1)
        self.put(backend, 1, (value * 3)[:length])
        found = empty(1)
        assert backend.read([found]) == [b""]
        assert payload_of(found) == bytes(ROW_BYTES)
        assert backend.contains([found]) == [True], "so that it is read, fails its check and is deleted"

    @pytest.mark.parametrize("byte", [0, 7, 8, 16, 23])
    def test_a_header_of_something_else(self, backend: ObjectBackend, byte: int) -> None:
        backend.write([sealed(1)])
        value = bytearray(self.value(backend, 1))
        value[byte] ^= 1
        self.put(backend, 1, bytes(value))
        assert backend.read([empty(1)]) == [b""]

    def test_a_swapped_object_has_the_other_seal(self, backend: ObjectBackend) -> None:
        backend.write([sealed(1), sealed(2)])
        self.put(backend, 1, self.value(backend, 2))
        assert backend.read([empty(1)]) == [sealed(2).seal]

    def test_rows_of_another_scope_are_other_rows(self, backend: ObjectBackend) -> None:
        backend.write([sealed(1)])
        assert backend.read([empty(1)._replace(scope=7)]) == [None]


class TestServers:
    def test_killed_and_started_again(self) -> None:
        server = S3Server()
        try:
            backend = open_backend(server.endpoint)
            assert backend.write([sealed(1)]) == [None]
            server.stop()
            (failed,) = backend.write([sealed(2)])
            assert isinstance(failed, ConnectionError)
            (failed_read,) = backend.read([empty(1)])
            assert isinstance(failed_read, ConnectionError)
            with pytest.raises(ConnectionError):
                backend.contains([empty(1)])
            with pytest.raises(ConnectionError):
                backend.probe()
            server.start()
            backend.probe()
            assert backend.read([empty(1)]) == [None], "it came back empty"
            assert backend.write([sealed(1)]) == [None]
            assert backend.read([empty(1)]) == [sealed(1).seal]
        finally:
            server.stop()

    def test_one_that_never_answers_costs_one_deadline(self) -> None:
        server = ToldServer(None)
        try:
            backend = open_backend(server.endpoint, timeout=1.0)
            answers = backend.read([empty(number) for number in range(20)])
            assert {type(answer) for answer in answers} == {TimeoutError}
            until = time.monotonic() + PATIENCE
            while not server.requests:  # the server's thread may see it later than that
                assert time.monotonic() < until, "expected that the first row is asked for"
                time.sleep(0.01)
            assert len(server.requests) == 1, "the other rows were not tried, nor the first again"
            with pytest.raises(TimeoutError):
                backend.probe()
        finally:
            server.close()

    def test_one_that_answers_small_requests_alone_fails_its_probe(self) -> None:
        """Else it is taken back again and again, and each time a request waits for one deadline in vain."""
        server = ToldServer(http_answer("200 OK", headers='ETag: "1"\r\n'), most=1024)
        try:
            obstore.put(open_backend(server.endpoint)._store, "small", b"kvtier", use_multipart=False)
            with pytest.raises(OSError, match="object store"):
                open_backend(server.endpoint, timeout=1.0).probe()
        finally:
            server.close()

    @pytest.mark.parametrize(
        "status", ["200 OK", f"206 Partial Content\r\nContent-Range: bytes 0-{(1 << 30) - 1}/{1 << 30}"]
    )
    def test_a_store_that_sends_more_than_was_asked_for_fails_its_probe(self, status: str) -> None:
        """Reads fail there too. The client must not take memory for as many bytes as the server says."""
        dates = 'ETag: "1"\r\nLast-Modified: Mon, 02 Mar 2026 10:00:00 GMT\r\n'
        server = ToldServer(f"HTTP/1.1 {status}\r\nContent-Length: {1 << 30}\r\n{dates}\r\n".encode())
        try:
            backend = open_backend(server.endpoint, timeout=5.0)
            with pytest.raises(OSError, match="object store"):
                backend.probe()
            (answer,) = backend.read([empty(1)])
            assert isinstance(answer, OSError)
        finally:
            server.close()

    def test_a_server_that_sends_without_end_costs_one_row(self) -> None:
        """The range is announced as asked for, and the client would collect all that comes behind it."""
        length, endless = ROW_BYTES + HEADER_BYTES + 1, 256 << 20
        head = f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-{length - 1}/{1 << 40}\r\n"
        dates = 'ETag: "1"\r\nLast-Modified: Mon, 02 Mar 2026 10:00:00 GMT\r\n'
        answer = f"{head}Content-Length: {1 << 40}\r\n{dates}\r\n".encode()
        server = ToldServer(answer, endless=endless)
        try:
            backend = open_backend(server.endpoint)
            found = empty(1)
            assert backend.read([found]) == [b""], "it is deleted then, as other objects that are no rows"
            assert payload_of(found) == bytes(ROW_BYTES)
            with pytest.raises(OSError, match="object store"):  # the probe asks for another range
                backend.probe()
            assert server.num_sent < endless // 4, "no more than fits into the buffers of sockets"
        finally:
            server.close()

    def test_a_probe_that_comes_back_shorter(self) -> None:
        answer = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-2/3\r\nContent-Length: 3\r\n"
        dates = b'ETag: "1"\r\nLast-Modified: Mon, 02 Mar 2026 10:00:00 GMT\r\n\r\n'
        server = ToldServer(answer + dates + b"abc")
        try:
            with pytest.raises(OSError, match="the probe came back with 3 bytes instead of"):
                open_backend(server.endpoint).probe()
        finally:
            server.close()

    def test_one_that_is_no_object_store(self) -> None:
        server = ToldServer(b"+PONG\r\n\r\n")
        try:
            (answer,) = open_backend(server.endpoint).read([empty(1)])
            assert isinstance(answer, OSError)
        finally:
            server.close()

    @pytest.mark.parametrize(
        ("status", "number", "words"),
        [
            ("403 Forbidden", errno.EACCES, "these credentials may not do that (HTTP 403, SomeCode)"),
            ("401 Unauthorized", errno.EACCES, "these credentials may not do that (HTTP 401, SomeCode)"),
            ("404 Not Found", errno.ENOENT, "there is no such bucket or container (HTTP 404, SomeCode)"),
            ("400 Bad Request", errno.EIO, "the server failed (HTTP 400, SomeCode)"),
            ("500 Internal Server Error", errno.EIO, "the server failed (HTTP 500, SomeCode)"),
            ("503 Slow Down", errno.EIO, "the server failed (HTTP 503, SomeCode)"),
            ("301 Moved Permanently", errno.EIO, "the server sends us elsewhere; is the region right?"),
        ],
    )
    def test_a_refusal_of_the_server_is_one_line(self, status: str, number: int, words: str) -> None:
        body = b"<Error><Code>SomeCode</Code><Message>a secret\nin it</Message></Error>"
        server = ToldServer(http_answer(status, body))
        try:
            backend = open_backend(server.endpoint)
            (failed,) = backend.write([sealed(1)])
            assert isinstance(failed, OSError)
            assert (failed.errno, failed.strerror) == (number, f"object store {backend.url}: {words}")
            assert failed.__cause__ is None
            found = backend.read([empty(1)])
            assert ("s3:ListBucket" in str(found[0])) == (number == errno.EACCES)
            assert found == [None] if number == errno.ENOENT else isinstance(found[0], OSError)
            with pytest.raises(OSError, match="object store") as raised:
                backend.probe()
            assert "secret" not in repr(raised.value)
            assert raised.value.__suppress_context__
        finally:
            server.close()

    @pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Slow Down"])
    def test_at_most_one_retry(self, status: str) -> None:
        server = ToldServer(http_answer(status))
        try:
            open_backend(server.endpoint).read([empty(1)])
            assert len(server.requests) == 2
        finally:
            server.close()

    def test_one_without_conditional_writes(self) -> None:
        server = ToldServer(http_answer("501 Not Implemented"))
        try:
            backend = open_backend(server.endpoint)
            assert isinstance(backend.write([sealed(1)])[0], OSError)
            conditional = [b"if-none-match" in head.lower() for head in server.requests]
            assert conditional == [True, True, False, False], "each with its retry"
            server.answer = http_answer("200 OK", headers='ETag: "1"\r\n')
            assert backend.write([sealed(1)]) == [None]
            assert b"if-none-match" not in server.requests[-1].lower()
        finally:
            server.close()

    def test_a_missing_bucket(self, server: S3Server) -> None:
        backend = open_backend(server.endpoint, bucket="no-such-bucket")
        (failed,) = backend.write([sealed(1)])
        assert isinstance(failed, FileNotFoundError)
        assert "NoSuchBucket" in str(failed)
        with pytest.raises(FileNotFoundError, match="no such bucket"):
            backend.probe()

    def test_no_credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The machine's role is asked for last; where nobody answers, that ends in time, too."""
        silent = ToldServer(None)
        try:
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", silent.endpoint)
            (answer,) = open_backend("http://127.0.0.1:9", timeout=0.5).read([empty(1)])
            assert isinstance(answer, PermissionError)
            assert "no credentials could be had" in str(answer)
        finally:
            silent.close()

    def test_a_line_end_in_a_credential(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a secret's file often has. The client panics, which is no `Exception`."""
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-id\n")
        backend = open_backend("http://127.0.0.1:9")
        answers = backend.read([empty(1), empty(2)])
        assert [type(answer) for answer in answers] == [ConnectionAbortedError] * 2
        with pytest.raises(
            OSError, match=r"the client panicked; is there a line end in a credential"
        ) as told:
            backend.probe()
        assert "test-id" not in str(told.value)


class TestProfiles:
    """The files of AWS profiles, which the store's own chain does not read."""

    @pytest.fixture(autouse=True)
    def no_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("boto3", reason="needs the package boto3")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        file = tmp_path / "credentials"
        file.write_text("[default]\naws_access_key_id = from-file\naws_secret_access_key = x\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        return file

    @pytest.mark.usefixtures("file")
    def test_they_are_read(self) -> None:
        server = ToldServer(http_answer("404 Not Found"))
        try:
            assert open_backend(server.endpoint).read([empty(1)]) == [None]
            assert b"Credential=from-file/" in server.requests[0]
        finally:
            server.close()

    @pytest.mark.usefixtures("file")
    def test_there_is_no_such_profile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_PROFILE", "absent")
        with pytest.raises(ConfigError, match="ProfileNotFound; is AWS_PROFILE right"):
            open_backend("http://127.0.0.1:9")

    @pytest.mark.usefixtures("file")
    def test_the_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
        with pytest.raises(ConfigError, match="pip install boto3"):
            open_backend("http://127.0.0.1:9")


def test_google(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store of Google would be asked; there is no server to be had that answers like one."""
    account = {"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": True}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    server = ToldServer(http_answer("200 OK", headers='ETag: "1"\r\n'))
    try:
        config = ObjectConfig(url="gs://bucket/pre/fix", endpoint=server.endpoint, allow_http=True)
        backend = ObjectBackend(config, ROW_BYTES, timeout=PATIENCE)
        row = sealed(1)
        assert backend.write([row]) == [None]
        name = f"/bucket/pre%2Ffix%2F{row.scope:016x}%2F{row.key.hex()} "
        assert server.requests[0].startswith(b"PUT " + name.encode())
        assert b"x-goog-if-generation-match: 0\r\n" in server.requests[0]
        server.answer = http_answer("412 Precondition Failed")
        assert backend.write([row]) == [None], "it is there"
        server.answer = http_answer("404 Not Found")
        assert backend.read([row]) == [None]
    finally:
        server.close()


@pytest.fixture(scope="module")
def azurite() -> Iterator[str]:
    with serve_azure(BUCKET) as endpoint:
        yield endpoint


class TestAzure(BackendSuite):
    @pytest.fixture(autouse=True)
    def at(self, monkeypatch: pytest.MonkeyPatch, azurite: str) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
        self.endpoint = azurite

    def make(self) -> Backend:
        url = f"az://{BUCKET}/run-{next(_prefixes)}"
        config = ObjectConfig(url=url, endpoint=self.endpoint, allow_http=True)
        return ObjectBackend(config, ROW_BYTES, timeout=PATIENCE)


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        ObjectBackend(ObjectConfig(url="az://container/x"), ROW_BYTES, timeout=1.0)


def test_half_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="MissingSecretAccessKey"):
        ObjectBackend(ObjectConfig(url="s3://bucket/x"), ROW_BYTES, timeout=1.0)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[object\]'"):
        ObjectBackend(ObjectConfig(url="s3://bucket/x"), ROW_BYTES, timeout=1.0)
