"""The thread behind a `ZmqEventPublisher`: its queue, its sockets, and the order in which it does things.

Each turn sends a few waiting batches, a slice of the replays, a part of a snapshot, and a heartbeat if one
is due. While replays and snapshots are unfinished, the thread rests between two turns so that other threads
get the interpreter. When nothing is left to do it dozes a moment, then sleeps until a batch, a request or a
deadline comes. It never polls periodically. An exception in a turn is logged and counted, and the next turn
begins.

If more than `max_queue_size` batches wait, the thread applies them to the state without sending them. If the
engine is so far ahead that the queue itself is full, batches are lost, and consumers are told to forget
everything. Any thread may make and stop a `PublisherLoop`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from kvtier.errors import IntegrityError, OutsideError
from kvtier.events.config import KVEventsConfig, check_ports, is_bound, offset_endpoint
from kvtier.events.curve import Gate
from kvtier.events.publish.replay import CLIENT_QUEUE, STALLED_AFTER, ReplayServer
from kvtier.events.publish.sender import Sender, SequenceFile

logger = logging.getLogger(__name__)

_BATCHES_A_TURN = 64
_BEHIND = 64  # number of waiting batches from which on they are joined
_LEAST_CAPACITY = 10_000  # batches, so that a short queue of batches to send costs no exactness
_DOZE = 0.002  # seconds that a batch may wait right after another
_LOOK = 0.05  # seconds between two checks whether the thread is alive
_LINGER = 250  # milliseconds for subscribers to take the last messages
_AFTER_ERROR = 0.01  # seconds, so that a permanent fault does not flood the log
_MAX_REQUEST = 64 << 10
_LARGE_MESSAGE = 128 << 10  # bytes; hardly any is larger, as large events and batches are cut
_LEAST_WAITING = 64
_WORK = 100e-6  # seconds of a turn for snapshots; replays have as much
_REST = 50e-6  # seconds; in a shorter rest, a thread that waits for the interpreter does not wake in time


class Loss:
    """Stands in the queue for batches that found no room, and counts them."""

    def __init__(self) -> None:
        self.batches = 0


class Outbox:
    """Queues batches for the sending thread, in order; it is bounded, and never makes a caller wait.

    `ZmqEventPublisher.publish` appends to the queue while that is shorter than `room`, and writes to an
    eventfd if the sending thread sleeps. It touches little memory, because that memory is cold when an
    engine publishes after a step. If the queue is full, batches are lost until the sending thread has
    reached the `Loss` behind the batches that wait.

    Any thread may call `queue_or_lose`, `call`, `wake` and `close`; the sending thread owns the other
    methods.
    """

    def __init__(self, capacity: int) -> None:
        """Queue up to `capacity` batches."""
        self.closed = False
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._capacity = self.room = capacity  # no room while there is a loss, or once closed
        self.queue: deque[Any] = deque()  # batches, tasks and at most one loss
        self._loss: Loss | None = None
        self._lock = threading.Lock()  # guards the loss
        self.is_asleep = False

    def queue_or_lose(self, batch: Any) -> None:
        """Count a batch that found no room as lost, unless there is room now. `RuntimeError` once closed."""
        if self.closed:
            raise RuntimeError("Publisher is closed")
        with self._lock:
            if self._loss is None:
                if len(self.queue) < self._capacity:  # there is room by now
                    self.queue.append(batch)
                    return
                self.room = 0
                self._loss = Loss()
                self.queue.append(self._loss)
            self._loss.batches += 1

    def call(self, task: Any) -> None:
        """Queue a task, even if the queue is full."""
        self.queue.append(task)
        self.wake()

    def wake(self) -> None:
        """Wake the sending thread."""
        self.is_asleep = False
        os.eventfd_write(self.wake_fd, 1)

    def close(self) -> None:
        """Take no more batches."""
        with self._lock:
            self.close_without_lock()
        self.wake()

    def close_without_lock(self) -> None:
        """Take no more batches, without the lock: in a forked child no thread would release it."""
        self.closed = True
        self.room = 0

    # -- for the sending thread --------------------------------------------------------------------

    def take(self) -> Any:
        """Take the next item, `None` if there is none. A loss no longer grows once it is taken."""
        item = self.queue.popleft() if self.queue else None
        if type(item) is Loss:
            with self._lock:
                self._loss = None
                self.room = 0 if self.closed else self._capacity
        return item

    def fall_asleep(self) -> bool:
        """Ask the next batch to wake us through `wake_fd`; return whether it is safe to sleep now."""
        self.is_asleep = True
        if self.queue or self.closed:
            self.is_asleep = False
        return self.is_asleep

    def wake_up(self) -> None:
        """Take the wake-up, if there was one."""
        self.is_asleep = False
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def __len__(self) -> int:
        return len(self.queue)

    def __del__(self) -> None:
        # Not earlier: a concurrent `publish` in another thread must not write to a file that reuses the
        # number.
        os.close(self.wake_fd)

    def check(self) -> None:
        """Raise `IntegrityError` if more than the one open loss is queued."""
        with self._lock:
            found = [item for item in self.queue if isinstance(item, Loss)]
            if len(found) > 1 or (found and found[0] is not self._loss):
                raise IntegrityError(f"outbox: {len(found)} losses queued, expected one at most, and open")


class _Task:
    """A function for the thread to run, and its result."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.function()
        except BaseException as error:
            self.error = error
        self.done.set()


class PublisherLoop:
    """Opens all resources of a publisher, or raises and leaves nothing open.

    Call `start` and `stop` once.
    """

    def __init__(self, config: KVEventsConfig, rank: int) -> None:
        self.errors = 0
        self.rest = time.sleep
        self.gate: Gate | None = None
        self.replay: ReplayServer | None = None
        self._config, self._rank = config, rank
        self._pid = os.getpid()
        self._stop_at = math.inf
        self._overdue = 0  # items at the head of the queue that waited too long to be sent
        self._sockets: list[zmq.Socket[bytes]] = []
        self._numbers: SequenceFile | None = None
        self._context: zmq.Context[Any] | None = None
        check_ports(config.endpoint, config.replay_endpoint, rank)
        try:
            self._open()
        except BaseException:
            self._close(linger=0)
            raise
        self.thread = threading.Thread(target=self._run, name=f"kvtier-publisher-{rank}", daemon=True)
        _loops.add(self)

    # -- any thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to send."""
        self.thread.start()

    def stop(self, timeout: float) -> None:
        """Send waiting batches while time lasts, close everything, and return within `timeout` seconds."""
        if os.getpid() != self._pid:
            return
        self._stop_at = time.monotonic() + timeout / 2
        self.outbox.close()
        self.thread.join(timeout)
        if self.thread.is_alive():
            logger.warning("the publisher's thread is still busy after %s s; it is left to itself", timeout)
        else:
            self._close(linger=0)

    def check(self) -> None:
        """Raise `IntegrityError` if a part of the publisher is broken."""
        self.run(self._check)

    def run(self, function: Callable[[], None], timeout: float = 60.0) -> None:
        """Run a function on the thread after all batches that wait now are sent; raise what it raises."""
        task = _Task(function)
        self.outbox.call(task)
        until = time.monotonic() + timeout
        while not task.done.wait(_LOOK):
            if not self.thread.is_alive():
                task.run()
            elif time.monotonic() >= until:
                raise TimeoutError(f"the publisher's thread did not answer within {timeout} s")
        if task.error is not None:
            raise task.error

    def forget(self) -> None:
        """Tell a forked child that the thread does not exist there."""
        self.outbox.close_without_lock()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        begun = not self._config.clear_on_start
        try:
            while not self._is_over():
                try:
                    if not begun:
                        begun = True
                        self.sender.start()
                    self._turn()
                except Exception:
                    self.errors += 1
                    logger.exception("a turn of the publisher's thread failed; it goes on")
                    time.sleep(_AFTER_ERROR)
        finally:
            self._close(linger=_LINGER if self.outbox.closed else 0)

    def _is_over(self) -> bool:
        if not self.outbox.closed:
            return False
        return time.monotonic() >= self._stop_at or not (len(self.outbox) or self.replay)

    def _turn(self) -> None:
        sent = self._send_some()
        wait = self.replay.serve() if self.replay is not None else math.inf
        if self.gate is not None:
            self.gate.serve()
        wait = min(wait, self.sender.beat(time.monotonic()))
        if self.sender.work(_WORK):
            wait = 0.0
        if wait == 0.0:
            self.rest(_REST)
        elif sent < _BATCHES_A_TURN:
            if sent or self.outbox.closed:
                self._doze(min(wait, _DOZE))
            else:
                self._sleep(wait)

    def _send_some(self) -> int:
        """Send waiting batches, up to a limit; return how many.

        If many wait, a batch may travel with the next one. If too many wait, none of them is sent.
        """
        outbox, sender, most = self.outbox, self.sender, self._config.max_queue_size
        sent = 0
        try:
            while sent < _BATCHES_A_TURN and (item := outbox.take()) is not None:
                if len(outbox.queue) >= most and not self._overdue:
                    self._overdue = len(outbox.queue) + 1
                if type(item) is Loss:
                    sender.forget_all(item.batches)
                elif type(item) is _Task:
                    sender.flush()
                    item.run()
                elif self._overdue:
                    sender.leave_out(item)
                else:
                    sender.send(item, more=len(outbox.queue) > _BEHIND)
                sent += 1
                if self._overdue:
                    self._overdue -= 1
                    if not self._overdue:
                        sender.end_gap()
            return sent
        finally:
            sender.flush()

    def _doze(self, seconds: float) -> None:
        """Rest a moment without being woken by batches: more follow soon, and waking costs time."""
        if self._poller.poll(math.ceil(1000 * seconds)):
            self.outbox.wake_up()  # costs ten microseconds if nothing was written

    def _sleep(self, seconds: float) -> None:
        """Wait for a batch, a request, a handshake, or the time to pass."""
        if self.outbox.fall_asleep():
            self._poller.poll(None if seconds == math.inf else math.ceil(1000 * seconds))
            self.outbox.wake_up()

    def _check(self) -> None:
        self.outbox.check()
        self.sender.check()
        for part in (self.replay, self._numbers):
            if part is not None:
                part.check()

    # -- sockets -----------------------------------------------------------------------------------

    def _open(self) -> None:
        config, rank = self._config, self._rank
        endpoint = offset_endpoint(config.endpoint, rank)
        replay_endpoint = offset_endpoint(config.replay_endpoint, rank)
        assert endpoint is not None
        if config.sequence_file is not None:
            self._numbers = SequenceFile(config.sequence_file + (f".dp{rank}" if rank else ""))
        # Others in this process reach an inproc endpoint only through the common context, which we must
        # not end.
        common = any(
            address is not None and address.startswith("inproc") for address in (endpoint, replay_endpoint)
        )
        self._context = zmq.Context.instance() if common else zmq.Context()
        self._owns_context = not common
        if config.curve is not None and config.curve.clients_dir is not None:
            self.gate = Gate(self._context, config.curve.clients_dir)
        pub = self._socket(zmq.PUB)
        pub.set_hwm(_most_waiting(config))
        self.endpoint = _attach(
            pub, endpoint, rank, bind=is_bound(endpoint) if config.bind is None else config.bind
        )
        self.sender = Sender(pub, config, rank, self._numbers)
        self.outbox = Outbox(max(2 * config.max_queue_size, _LEAST_CAPACITY))
        self.replay_endpoint: str | None = None
        if replay_endpoint is not None:
            self._open_replay(replay_endpoint)
        self._poller = zmq.Poller()
        for source in (self.outbox.wake_fd, *self._sockets[1:], *([self.gate.socket] if self.gate else [])):
            self._poller.register(source, zmq.POLLIN)

    def _open_replay(self, endpoint: str) -> None:
        router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST)
        router.setsockopt(zmq.SNDHWM, CLIENT_QUEUE)
        router.setsockopt(zmq.TCP_MAXRT, int(1000 * STALLED_AFTER))  # drops a client that does not read
        self.replay_endpoint = _attach(router, endpoint, self._rank, bind=True)
        self.replay = ReplayServer(router, self.sender, self._config)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        assert self._context is not None
        sock: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(sock)
        sock.linger = 0
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
            (zmq.TCP_KEEPALIVE_INTVL, 10),
        ):
            sock.setsockopt(option, value)  # a client whose machine is gone must not keep its queue for ever
        if self._config.curve is not None:
            self._config.curve.apply(sock)
        return sock

    def _close(self, linger: int) -> None:
        """Close everything that is open; a second call does nothing."""
        sockets, self._sockets = self._sockets, []
        for sock in sockets:
            sock.close(linger=linger)
        if self.gate is not None:
            self.gate.close()
        context, self._context = self._context, None
        if context is not None and self._owns_context:
            context.term()
        if self._numbers is not None:
            self._numbers.close(self.sender.next_seq if hasattr(self, "sender") else self._numbers.start)


_loops: weakref.WeakSet[PublisherLoop] = weakref.WeakSet()


def _most_waiting(config: KVEventsConfig) -> int:
    """Return how many messages may wait for a subscriber, so that they take about `buffer_bytes` at most.

    ZeroMQ does not bound bytes, and the number must not be lowered later: a subscriber's connection tells
    what it has taken only after half of the number that it began with, so it would stop for ever.
    """
    return min(config.hwm, max(_LEAST_WAITING, config.buffer_bytes // _LARGE_MESSAGE))


def _forget_in_child() -> None:
    for loop in _loops:
        loop.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _attach(sock: zmq.Socket[bytes], endpoint: str, rank: int, *, bind: bool) -> str:
    """Bind or connect a socket, and return its address. `tcp://*:0` gets the port that the system chose."""
    try:
        if not bind:
            sock.connect(endpoint)
            return endpoint
        if "[" in endpoint or endpoint.startswith("tcp://::"):
            sock.setsockopt(zmq.IPV6, 1)
        sock.bind(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        raise OutsideError(
            f"data-parallel rank {rank} cannot {verb} {endpoint}: {error.strerror}"
        ) from error
    if not endpoint.endswith(":0"):
        return endpoint
    bound: Any = sock.getsockopt_string(zmq.LAST_ENDPOINT)
    return f"{endpoint.rpartition(':')[0]}:{bound.rpartition(':')[2]}"
