"""An S3 server that keeps objects in memory and does nothing else, so that what is measured is the client.

Servers made for tests take several milliseconds for a request: beside them all clients look alike. It prints
its port.
"""

from __future__ import annotations

import socket
import threading

_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
_OK = f'HTTP/1.1 200 OK\r\nETag: "1"\r\nLast-Modified: {_DATE}\r\nContent-Length: {{}}\r\n\r\n'
_ABSENT = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_DELETED = b"HTTP/1.1 204 No Content\r\n\r\n"


def talk(client: socket.socket, objects: dict[bytes, bytearray]) -> None:
    """Answer the requests of one connection."""
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            if not (more := client.recv(65536)):
                return
            data += more
        head, _, data = data.partition(b"\r\n\r\n")
        method, name, _ = head.split(b"\r\n")[0].split()
        lines = [line.lower() for line in head.split(b"\r\n")[1:]]
        length = sum(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
        body = bytearray(length)
        body[: len(data)] = data[:length]
        at, data = min(len(data), length), data[length:]
        while at < length:
            if not (count := client.recv_into(memoryview(body)[at:])):
                return
            at += count
        if method == b"PUT":
            objects[name] = body
            client.sendall(_OK.format(0).encode())
        elif method == b"DELETE":
            objects.pop(name, None)
            client.sendall(_DELETED)
        elif (found := objects.get(name)) is None:
            client.sendall(_ABSENT)
        else:
            client.sendall(_OK.format(len(found)).encode())
            if method == b"GET":
                client.sendall(found)


def main() -> None:
    objects: dict[bytes, bytearray] = {}
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            client, _ = server.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=talk, args=(client, objects), daemon=True).start()


if __name__ == "__main__":
    main()
