"""An S3 server that only keeps objects in memory, so that a benchmark measures the client.

Test servers take several milliseconds per request: with them all clients look alike. Objects here are files
in memory, which are sent without a copy by this program; several processes answer, with `--delay MS` as
late as a store that is further away. It prints its port, and ends when its input ends.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import threading
import time
from hashlib import md5
from pathlib import Path
from tempfile import TemporaryDirectory

PROCESSES = 4

_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
_FOUND = f'ETag: "1"\r\nLast-Modified: {_DATE}\r\nContent-Length: '
_ABSENT = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_DELETED = b"HTTP/1.1 204 No Content\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RANGE = re.compile(rb"\r\nrange: *bytes=0-(\d+)", re.IGNORECASE)


def talk(client: socket.socket, folder: Path, delay: float) -> None:
    """Answer the requests of one connection."""
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            if not (more := client.recv(65536)):
                return
            data += more
        head, _, data = data.partition(b"\r\n\r\n")
        method, name, _ = head.split(b" ", 2)
        path = folder / md5(name).hexdigest()
        found = _LENGTH.search(head)
        body = bytearray(int(found[1]) if found else 0)
        at = min(len(data), len(body))
        body[:at], data = data[:at], data[at:]
        while at < len(body):
            if not (count := client.recv_into(memoryview(body)[at:])):
                return
            at += count
        if delay:
            time.sleep(delay)
        if method == b"PUT":
            new = path.with_suffix(f".{threading.get_native_id()}")
            new.write_bytes(body)
            new.rename(path)
            client.sendall(f"HTTP/1.1 200 OK\r\n{_FOUND}0\r\n\r\n".encode())
        elif method == b"DELETE":
            path.unlink(missing_ok=True)
            client.sendall(_DELETED)
        else:
            part = _RANGE.search(head)
            send(client, path, int(part[1]) + 1 if part else None, with_body=method == b"GET")


def send(client: socket.socket, path: Path, most: int | None, *, with_body: bool) -> None:
    """Send an object, or its first bytes."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        client.sendall(_ABSENT)
        return
    try:
        size = os.fstat(file).st_size
        length = size if most is None else min(size, most)
        status = "200 OK\r\n" if most is None else "206 Partial Content\r\n"
        if most is not None:
            status += f"Content-Range: bytes 0-{length - 1}/{size}\r\n"
        client.sendall(f"HTTP/1.1 {status}{_FOUND}{length}\r\n\r\n".encode(), socket.MSG_MORE * with_body)
        at = 0
        while with_body and at < length:
            at += os.sendfile(client.fileno(), file, at, length - at)
    finally:
        os.close(file)


def serve(server: socket.socket, folder: Path, delay: float) -> None:
    """Run one of the processes."""
    while True:
        client, _ = server.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=talk, args=(client, folder, delay), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds before each answer")
    delay = parser.parse_args().delay / 1e3
    with (
        TemporaryDirectory(dir="/dev/shm") as folder,
        socket.create_server(("127.0.0.1", 0), backlog=64) as server,
    ):
        children = []
        for _ in range(PROCESSES):
            if not (child := os.fork()):
                sys.stdin.close()
                serve(server, Path(folder), delay)
            children.append(child)
        print(server.getsockname()[1], flush=True)
        sys.stdin.read()
        for child in children:
            os.kill(child, 9)


if __name__ == "__main__":
    main()
