"""Object stores for tests: a real S3 server in a process of its own, and sockets that answer as told."""

from __future__ import annotations

import base64
import hmac
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest
from tests.ports import free_port

BUCKET = "kvtier-test"
REGION = "us-east-1"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every Azurite has; its key is in its documentation."""
_START = 60.0


def need_object_store() -> None:
    """Skip where the client or the server is not installed, and say so."""
    packages = {"obstore": "kvtier[object]", "moto": "moto[s3]", "flask_cors": "flask-cors"}
    for package, where in packages.items():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}: pip install '{where}'")


class S3Server:
    """A moto server. It keeps its port when it is started again; `stop` makes it forget all else."""

    def __init__(self, port: int = 0) -> None:
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, bucket: str | None = BUCKET) -> None:
        command = [
            sys.executable,
            "-c",
            "from moto.server import main; main()",
            "-H",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_port(self.port, self.process)
        if bucket is not None:
            self._make_bucket(bucket)

    def forget(self) -> None:
        """Forget all objects, and have an empty bucket."""
        reset = urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset, timeout=_START).close()
        self._make_bucket(BUCKET)

    def list_names(self, prefix: str) -> list[str]:
        """Return the names of the first thousand objects below a prefix."""
        return re.findall("<Key>(.*?)</Key>", self._ask("GET", f"{BUCKET}?list-type=2&prefix={prefix}/"))

    def _make_bucket(self, bucket: str) -> None:
        self._ask("PUT", bucket)

    def _ask(self, method: str, what: str) -> str:
        request = urllib.request.Request(f"{self.endpoint}/{what}", method=method)
        whose = f"Credential=test/20260101/{REGION}/s3/aws4_request"
        request.add_header("Authorization", f"AWS4-HMAC-SHA256 {whose}")
        with urllib.request.urlopen(request, timeout=_START) as answer:
            return str(answer.read().decode())

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def wait_for_port(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    until = time.monotonic() + _START
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > until or (process is not None and process.poll() is not None):
                raise
            time.sleep(0.05)


@contextmanager
def serve_azure(container: str) -> Iterator[str]:
    """Run Azurite with a container, where it is installed, and yield its address."""
    ours = Path(sys.prefix, "servers", "node_modules", ".bin")
    program = shutil.which("azurite-blob") or shutil.which("azurite-blob", path=str(ours))
    if program is None:
        pytest.skip("needs azurite-blob: make servers")
    port = free_port()
    options = ["--loose", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", str(port)]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        date, version = formatdate(usegmt=True), "2023-11-03"
        lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{version}"]
        lines += [f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{container}", "restype:container"]
        signature = hmac.digest(base64.b64decode(AZURE_KEY), "\n".join(lines).encode(), "sha256")
        authorization = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(signature).decode()}"
        headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": authorization}
        endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        url = f"{endpoint}/{container}?restype=container"
        request = urllib.request.Request(url, headers=headers, method="PUT")
        urllib.request.urlopen(request, timeout=_START).close()
        yield endpoint
    finally:
        process.kill()
        process.wait()


class ToldServer:
    """An HTTP server that gives every request the same answer, or none, and remembers what it was asked.

    It does not answer requests with more than `most` bytes behind the head. Behind an answer it sends up to
    `endless` zeros more, and counts those that could be sent.
    """

    def __init__(self, answer: bytes | None, most: int = 1 << 40, endless: int = 0) -> None:
        self.answer, self._most, self._endless = answer, most, endless
        self.requests: list[bytes] = []
        self.num_sent = 0
        self._sock = socket.socket()
        self._sock.bind(("127.0.0.1", 0))
        self._sock.listen(64)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._sock.getsockname()[1]}"

    def close(self) -> None:
        for sock in [self._sock, *self._open]:
            with _ignored():
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with _ignored():
            while True:
                client, _ = self._sock.accept()
                self._open.append(client)
                threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with _ignored():
            while head := _read_head(client):
                self.requests.append(head)
                if self.answer is not None and _body_bytes(head) <= self._most:
                    client.sendall(self.answer)
                    zeros = bytes(1 << 16)
                    for _ in range(self._endless // len(zeros)):
                        client.sendall(zeros)
                        self.num_sent += len(zeros)


def _read_head(client: socket.socket) -> bytes:
    """Read one request and return its head; what follows it is read and forgotten."""
    data = b""
    while b"\r\n\r\n" not in data:
        got = client.recv(65536)
        if not got:
            return b""
        data += got
    head, _, body = data.partition(b"\r\n\r\n")
    left = _body_bytes(head) - len(body)
    while left > 0 and (got := client.recv(65536)):
        left -= len(got)
    return head


def _body_bytes(head: bytes) -> int:
    """Return how many bytes follow a head."""
    lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return sum(int(line.partition(b":")[2]) for line in lines)


def http_answer(status: str, body: bytes = b"", headers: str = "") -> bytes:
    """Return the bytes of an answer."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


@contextmanager
def _ignored() -> Iterator[None]:
    try:
        yield
    except OSError:
        return


@contextmanager
def s3_credentials() -> Iterator[None]:
    """Keys in the environment, as the usual chain has them first; nothing else of AWS."""
    saved = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("AWS_")}
    os.environ |= {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret"}
    os.environ["AWS_REGION"] = REGION
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ |= saved
