"""Follows any number of publishers; yields changes in order, and how good each replica is.

    with Subscriber([Source("worker-0", "tcp://host:5557", "tcp://host:5558")]) as subscriber:
        for update in subscriber:
            match update:
                case Reset(source): ...                   # forget all that it held
                case Received(source, seq, batch): ...    # apply it
                case StateChanged(source, state): ...     # exact, repairing or degraded, from here on

Sources are served in turn, a bounded number of messages each, so a busy one does not starve the others.
Everything held is bounded; malformed messages are counted and skipped. `poll` and iteration belong to one
thread at a time; `add`, `remove`, `status`, `statuses` and `close` may be called from any.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar, cast

import zmq

from kvtier.errors import InputError
from kvtier.events.follow.follower import Follower
from kvtier.events.follow.link import Link, SocketOptions, Source
from kvtier.events.updates import Limits, Reset, SourceStatus, Update
from kvtier.events.wire import Batch, decode_batch

B = TypeVar("B", bound=Batch)

_MAX_SOCKETS = 65_536
"""libzmq allows 1,023 sockets per context by default; a source has three or four."""
_BURST = 64
"""Messages of one source that are taken in one turn."""


class Subscriber(Generic[B]):
    """Updates of many sources, as an iterator or by `poll`."""

    def __init__(
        self,
        sources: Iterable[Source] = (),
        *,
        decode: Callable[[bytes], B] = decode_batch,  # type: ignore[assignment]
        limits: Limits | None = None,
        sockets: SocketOptions | None = None,
        max_updates: int = 4096,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        """Follow `sources`, and sources added later.

        `decode` turns a payload into a batch, or raises `ValueError`. A poll returns when it has
        `max_updates`, or a few more.
        """
        self._decode = decode
        self._limits = limits or Limits()
        self._sockets = sockets or SocketOptions(keep_alive=self._limits.probe_interval)
        self._max_updates = max_updates
        self._context = context
        self._own_context: zmq.Context[Any] = zmq.Context()
        self._own_context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._wall = time.time() - time.monotonic()
        self._links: dict[str, Link[B]] = {}
        self._changes: deque[tuple[bool, Link[B]]] = deque()  # (whether it is added, link), from any thread
        self._updates: list[Update] = []
        self._ready: dict[Link[B], None] = {}
        self._alarms: list[tuple[float, int, Link[B]]] = []
        self._ticket = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._polling = threading.Lock()
        self._names = threading.Lock()
        self._is_closed = False
        try:
            for source in sources:
                self.add(source)
        except BaseException:
            self.close()
            raise

    # -- any thread --------------------------------------------------------------------------------

    def add(self, source: Source) -> None:
        """Begin to follow a source. Its name must be new, and its address usable."""
        now = time.monotonic()
        can_ask = source.replay_endpoint is not None
        follower = Follower(source.name, self._decode, can_ask=can_ask, limits=self._limits, now=now)
        with self._names:
            if self._is_closed:
                raise InputError("the subscriber is closed")
            if source.name in self._links:
                raise InputError(
                    f"source {source.name!r} is followed already: remove it first, or choose another name"
                )
            link = Link(source, follower, self._context_of(source), self._sockets, now)
            self._links[source.name] = link
            self._changes.append((True, link))
        self._wake()

    def remove(self, name: str) -> None:
        """Stop following a source. Its last update is a `Reset`."""
        with self._names:
            self._changes.append((False, self._link(name)))
            del self._links[name]
        self._wake()

    def status(self, name: str) -> SourceStatus:
        """Return the status of a source."""
        return self._status(self._link(name))

    def statuses(self) -> dict[str, SourceStatus]:
        """Return the status of every source."""
        return {name: self._status(link) for name, link in list(self._links.items())}

    def close(self) -> None:
        """Close every socket. A poll in another thread returns; an iteration ends."""
        with self._names:
            if self._is_closed:
                return
            self._is_closed = True
        self._wake()
        with self._polling:
            for link in {*self._links.values(), *(link for _, link in self._changes)}:
                link.close()
            self._selector.close()
            self._own_context.destroy(linger=0)
            self._waker.close()
            self._woken.close()

    # -- the polling thread ------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> list[Update]:
        """Return the available updates; wait at most `timeout` seconds for the first.

        With `None`, wait as long as it takes.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._polling:
            wait: float | None = 0.0
            while not self._is_closed:
                self._wait(wait)
                self._run_once()
                if self._updates:
                    taken, self._updates = self._updates, []
                    return taken
                now = time.monotonic()
                if not self._ready and until is not None and now >= until:
                    break
                wait = 0.0 if self._ready else self._idle(now, until)
        return []

    def __iter__(self) -> Iterator[Update]:
        """Yield updates until the subscriber is closed."""
        while not self._is_closed:
            yield from self.poll(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check(self) -> None:
        """Raise `IntegrityError` if the data about a source contradict each other."""
        for link in list(self._links.values()):
            link.follower.check()

    def _run_once(self) -> None:
        """Do the due work, a bounded part of it for every source."""
        self._apply_source_changes()
        now = time.monotonic()
        self._tick_due_followers(now)
        waiting = deque(self._ready)
        busy = []
        while waiting and len(self._updates) < self._max_updates:
            link = waiting.popleft()
            if link.turn(now, _BURST):
                busy.append(link)
            self._collect(link)
        self._ready = dict.fromkeys((*waiting, *busy))  # links without a turn come first in the next round

    def _apply_source_changes(self) -> None:
        """Begin to serve added sources, and close removed ones."""
        while self._changes:
            is_added, link = self._changes.popleft()
            if is_added:
                self._begin(link)
            else:
                self._drop(link)

    def _begin(self, link: Link[B]) -> None:
        link.watch = lambda sock: self._watch(sock, link)
        link.unwatch = self._unwatch
        for sock in link.sockets:
            link.watch(sock)
        self._ready[link] = None

    def _drop(self, link: Link[B]) -> None:
        link.close()
        link.scheduled = -1.0
        self._ready.pop(link, None)
        self._updates.append(Reset(link.source.name))

    def _tick_due_followers(self, now: float) -> None:
        """Tick the followers whose time has come."""
        while self._alarms and self._alarms[0][0] <= now:
            at, _, link = heapq.heappop(self._alarms)
            if at != link.scheduled:
                continue  # the link was dropped, or has an earlier alarm
            link.scheduled = float("inf")
            link.tick(now)
            if link.send_request(now):
                self._ready[link] = None
            self._collect(link)

    def _collect(self, link: Link[B]) -> None:
        """Take a follower's updates, and schedule its next tick."""
        self._updates += link.follower.take_updates()
        deadline = link.deadline
        if deadline < link.scheduled:
            link.scheduled = deadline
            heapq.heappush(self._alarms, (deadline, next(self._ticket), link))

    def _wait(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._woken.recv(4096)
            else:
                self._ready[key.data] = None

    def _idle(self, now: float, until: float | None) -> float | None:
        times = [at for at in (until, self._alarms[0][0] if self._alarms else None) if at is not None]
        return max(0.0, min(times) - now) if times else None

    def _watch(self, sock: zmq.Socket[bytes], link: Link[B]) -> None:
        self._selector.register(cast("int", sock.get(zmq.FD)), selectors.EVENT_READ, link)

    def _unwatch(self, sock: zmq.Socket[bytes]) -> None:
        self._selector.unregister(cast("int", sock.get(zmq.FD)))

    def _context_of(self, source: Source) -> zmq.Context[Any]:
        """Return the context given by the caller, our own, or the shared one for `inproc`."""
        return self._context or (
            zmq.Context.instance() if source.endpoint.startswith("inproc:") else self._own_context
        )

    def _link(self, name: str) -> Link[B]:
        try:
            return self._links[name]
        except KeyError:
            raise InputError(f"no source is called {name!r}: there are {sorted(self._links)[:20]}") from None

    def _status(self, link: Link[B]) -> SourceStatus:
        follower = link.follower
        at, ts = follower.applied_at, follower.ts
        return SourceStatus(
            name=link.source.name,
            state=follower.state,
            reason=follower.reason,
            kind=follower.kind,
            connected=follower.is_connected,
            epoch=follower.epoch,
            seq=follower.position,
            blocks=follower.blocks,
            lag=None if at is None or ts is None else max(0.0, at + self._wall - ts),
            pending=follower.pending,
            counters=replace(follower.counters),
        )

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread is awake already, or closed
            self._waker.send(b"\0")
