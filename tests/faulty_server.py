"""A server on a real socket that sends what it likes, as slowly as it likes, for tests of clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE = 30.0


@contextmanager
def trickling(head: bytes, piece: bytes = b"") -> Iterator[str]:
    """Answer each connection with `head`, then with `piece` over and over until the client has gone."""
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(head)
            while not over.wait(0.02):
                connection.sendall(piece)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=serve, args=[listener.accept()[0]]))
                threads[-1].start()

    threads: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))
    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(PATIENCE)
        listener.close()
        for thread in threads:
            thread.join(PATIENCE)
