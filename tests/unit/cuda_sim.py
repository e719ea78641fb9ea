"""A CUDA driver for tests of order: its streams run later, in any order that events allow, drawn from a
seed.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_uint64
from typing import Any

import pytest
from tests.unit.cuda_kit import FakeDevice, FakeDriver, read

from kvtier.transfer.cuda import lanes

NOT_READY = 600
ENGINE = 0  # the stream that is current
ENQUEUING = ("cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuEventRecord", "cuStreamWaitEvent")

Work = Callable[[], object]


class SimDriver(FakeDriver):
    """Enqueued work waits in `streams`. With each call some of it is done: the lazier, the less."""

    def __init__(self, seed: int = 0, *, laziness: float = 0.5) -> None:
        self.rng, self.laziness = random.Random(seed), laziness
        self.streams: dict[int, deque[tuple[int, int] | Work]] = defaultdict(deque)
        """Work, or an event and how often it must have happened first."""
        self.frozen: set[int] = set()
        """Streams that do nothing."""
        self.engine_is_busy = False
        """At times it is found to be."""
        self.calls_until_failure: int | None = None
        self._recorded: dict[int, int] = defaultdict(int)
        self._happened: dict[int, int] = defaultdict(int)
        self._lock = threading.RLock()
        self._devices = 0
        super().__init__(copies=True)

    def _function(self, name: str) -> Callable[..., int]:
        do = getattr(self, f"_{name}")

        def call(*args: Any) -> int:
            with self._lock:
                while self.rng.random() > self.laziness and self.advance():
                    pass
                return self._failure(name) or do(*args) or 0

        return call

    def _failure(self, name: str) -> int:
        if self.calls_until_failure is not None and name in ENQUEUING:
            self.calls_until_failure -= 1
            if self.calls_until_failure < 0:
                self.calls_until_failure = None
                return 1
        return self.failing.get(name, 0)

    def advance(self) -> bool:
        """Do the next thing of a stream that need not wait; return whether there was any."""
        streams = [stream for stream, queue in self.streams.items() if queue and stream not in self.frozen]
        self.rng.shuffle(streams)
        for stream in streams:
            first = self.streams[stream][0]
            if isinstance(first, tuple):
                if self._happened[first[0]] < first[1]:
                    continue
                self.streams[stream].popleft()
            else:
                self.streams[stream].popleft()
                first()
            return True
        assert not streams, f"streams {streams} wait for what nobody will do"
        return False

    def run(self, *streams: int) -> None:
        """Let streams do all their work."""
        for stream in streams:
            while self.streams[stream]:
                assert self.advance()

    def _cuMemcpyAsync(self, dst: int, src: int, size: int, stream: int) -> Any:
        self.streams[stream].append(lambda: ctypes.memmove(dst, src, size))

    def _cuMemcpyBatchAsync(self, dst: int, src: int, size: int, count: int, *rest: int) -> Any:
        ranges = list(zip(*(read(c_uint64, column, count) for column in (dst, src, size)), strict=True))
        self.rng.shuffle(ranges)
        for copy in ranges:
            self._cuMemcpyAsync(*copy, rest[-1])

    def _cuLaunchKernel(self, function: int, *rest: Any) -> Any:
        *_, stream, arguments, _ = rest
        addresses = read(c_uint64, arguments, 8)
        (args,), (count,) = read(c_uint64, addresses[1], 1), read(c_int, addresses[2], 1)
        kernel = self.kernels[function]
        self.streams[stream].append(lambda: self._run(kernel, read(c_int64, args, 2 * count)))

    def _cuEventRecord(self, event: int, stream: int) -> None:
        self._recorded[event] += 1
        times = self._recorded[event]
        self.streams[stream].append(
            lambda: self._happened.update({event: max(times, self._happened[event])})
        )

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self.streams[stream].append((event, self._recorded[event]))

    def _is_over(self, event: int) -> bool:
        return self._happened[event] >= self._recorded[event]

    def _cuEventQuery(self, event: int) -> int:
        return 0 if self._is_over(event) else NOT_READY

    def _cuStreamQuery(self, stream: int) -> int:
        busy = (
            self.rng.random() < self.engine_is_busy / 2 if stream == ENGINE else bool(self.streams[stream])
        )
        return NOT_READY if busy else 0

    def _cuEventSynchronize(self, event: int) -> None:
        times = self._recorded[event]
        while self._happened[event] < times:
            assert self.advance()

    def _cuStreamSynchronize(self, stream: int) -> None:
        self.run(stream)

    def _cuEventElapsedTime(self, milliseconds: int, start: int, end: int) -> Any:
        if not (self._is_over(start) and self._is_over(end)):
            return NOT_READY
        c_float.from_address(milliseconds).value = 1
        return 0

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the driver; each lane has a device of its own, so that no two have streams or events of one
        number.
        """
        super().use(monkeypatch)
        monkeypatch.setattr(lanes, "Device", self._make_device)

    def _make_device(self, device: object) -> FakeDevice:
        self._devices += 1
        made = FakeDevice(self)
        made._handles = 100_000 * self._devices
        return made
