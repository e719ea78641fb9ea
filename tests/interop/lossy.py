"""A link between a publisher and a subscriber that loses batches on request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import zmq


class LossyLink:
    """Passes live batches on from `source` to whoever subscribes to `endpoint`, in a thread.

    Use it as a context.

    While it is `broken()` batches are lost.
    """

    def __init__(self, source: str) -> None:
        self._broken = threading.Event()
        self._lost = 0
        self._changed = threading.Condition()
        self._context = zmq.Context()
        self._in, self._out = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        for socket in (self._in, self._out):
            socket.linger = 0
            socket.set_hwm(0)
        self._in.connect(source)
        self._in.subscribe(b"")
        self.endpoint = f"tcp://127.0.0.1:{self._out.bind_to_random_port('tcp://127.0.0.1')}"
        self._stop, stopped = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        stopped.connect("inproc://stop")
        self._thread = threading.Thread(target=self._run, args=(stopped,))
        self._thread.start()

    def _run(self, stopped: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._in, zmq.POLLIN)
        poller.register(stopped, zmq.POLLIN)
        while stopped not in dict(poller.poll()):
            frames = self._in.recv_multipart()
            if not self._broken.is_set():
                self._out.send_multipart(frames)
                continue
            with self._changed:
                self._lost += 1
                self._changed.notify_all()
        stopped.close()

    @contextmanager
    def broken(self, least: int) -> Iterator[None]:
        """Lose everything from here on, until at least so many batches are lost and the context ends."""
        wanted = self._lost + least
        self._broken.set()
        yield
        with self._changed:
            assert self._changed.wait_for(lambda: self._lost >= wanted, timeout=60)
        self._broken.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.send(b"")
        self._thread.join()
        for socket in (self._in, self._out, self._stop):
            socket.close()
        self._context.term()
