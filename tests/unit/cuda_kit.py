"""A CUDA driver for tests without a device: functions that C can call, which carry out each call at once
and record it.

Streams and events are numbers, and memory of the device is the host's. Nothing is asynchronous: it shows
that the right bytes are copied, not that they are copied in the right order.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvtier.packing import pack, unpack
from kvtier.transfer.cuda import commands, driver, lanes, pieces
from kvtier.transfer.cuda.driver import Launch, Launches
from kvtier.transfer.cuda.pieces import PackedUnits, Part

SIGNATURES: dict[str, list[Any]] = {
    "cuLaunchKernel": [c_uint64, *[c_uint] * 7, c_uint64, c_void_p, c_void_p],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_uint64],
    "cuMemcpyBatchAsync": [*[c_void_p] * 3, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_uint64],
    "cuEventRecord": [c_uint64, c_uint64],
    "cuStreamWaitEvent": [c_uint64, c_uint64, c_uint],
    "cuEventQuery": [c_uint64],
    "cuStreamQuery": [c_uint64],
    "cuEventSynchronize": [c_uint64],
    "cuStreamSynchronize": [c_uint64],
    "cuEventElapsedTime": [c_void_p, c_uint64, c_uint64],
}


compiled_only = pytest.mark.skipif(
    commands.SUBMITTED_BY == "python", reason="kvtier.native._cuda was not compiled here"
)


def cut_small(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let pieces begin and end with this size."""
    for name in ("SHORT_STORE", "SHORT_LOAD", "LAST_LOAD"):
        monkeypatch.setattr(pieces, name, size)


class Kernel(NamedTuple):
    """What a launch does. Packing takes two launches, which share a scratch."""

    part: Part
    gather: bool
    scratch: int = 0
    finishes: bool = True


def read(kind: Any, address: int | None, count: int) -> list[int]:
    return list((kind * count).from_address(address or 0)) if count else []


class FakeDriver:
    """Records its calls in `calls`. Functions in `failing` return that status and do nothing."""

    def __init__(self, *, has_batches: bool = True, copies: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: dict[str, int] = {}
        self.kernels: dict[int, Kernel] = {}
        self.scratches: dict[int, list[bytes]] = {}
        self.copies = copies
        for name, signature in SIGNATURES.items():
            if has_batches or name != "cuMemcpyBatchAsync":
                setattr(self, name, ctypes.CFUNCTYPE(c_int, *signature)(self._function(name)))

    def _function(self, name: str) -> Any:
        do = getattr(self, f"_{name}", lambda *args: args)

        def call(*args: Any) -> int:
            status = self.failing.get(name, 0)
            self.calls.append((name, *do(*args)) if not status else (name,))
            return status

        return call

    def _cuEventElapsedTime(self, milliseconds: int, start: int, end: int) -> tuple[int, int]:
        c_float.from_address(milliseconds).value = abs(end - start)
        return start, end

    def _cuMemcpyAsync(self, dst: int, src: int, size: int, stream: int) -> tuple[int, ...]:
        if self.copies:
            ctypes.memmove(dst, src, size)
        return dst, src, size, stream

    def _cuMemcpyBatchAsync(self, dst: int, src: int, size: int, count: int, *rest: int) -> tuple[Any, ...]:
        attributes, first, num_attributes, _, stream = rest
        ranges = [read(c_uint64, column, count) for column in (dst, src, size)]
        for copy in zip(*ranges, strict=True):
            self._cuMemcpyAsync(*copy, stream)
        return (*ranges, read(c_int, attributes, 6), read(c_uint64, first, 1), num_attributes, stream)

    def _cuLaunchKernel(self, function: int, *rest: Any) -> tuple[Any, ...]:
        *sizes, stream, arguments, _ = rest
        addresses = read(c_uint64, arguments, 8)
        (table,), (args,), *extra = (read(c_uint64, addresses[i], 1) for i in (0, 1, 4, 5, 6, 7))
        (num_blocks,), (num_tiles,) = (read(c_int, addresses[i], 1) for i in (2, 3))
        if self.copies:
            self._run(self.kernels[function], read(c_int64, args, 2 * num_blocks))
        return (function, *sizes, stream, table, args, num_blocks, num_tiles, extra)

    def _run(self, kernel: Kernel, args: list[int]) -> None:
        units = kernel.part.units
        if units is None:
            self._copy_pages(kernel.part, kernel.gather, args)
        elif not kernel.gather:
            convert(units, args, unpack)
        elif not kernel.finishes:
            made = [bytearray(units.form.bytes) for _ in args[::2]]
            convert(units, args[: len(made)] + [address_of(block) for block in made], pack)
            self.scratches[kernel.scratch] = [bytes(block) for block in made]
        else:
            for row, packed in zip(args[len(args) // 2 :], self.scratches.pop(kernel.scratch), strict=True):
                ctypes.memmove(row, packed, len(packed))

    def _copy_pages(self, part: Part, gather: bool, args: list[int]) -> None:
        for block, row in zip(args[: len(args) // 2], args[len(args) // 2 :], strict=True):
            for base, stride, size, offset in zip(*(column.tolist() for column in part.pages), strict=True):
                ends = (row + offset - part.offset, base + block * stride)
                ctypes.memmove(*(ends if gather else ends[::-1]), size)

    @staticmethod
    def cuGetErrorName(status: int, name: Any) -> None:
        name._obj.value = f"CUDA_ERROR_{status}".encode()

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the driver, and the device of lanes."""
        monkeypatch.setattr(driver, "_enqueuing", lambda: self)
        monkeypatch.setattr(driver, "_waiting", lambda: self)
        monkeypatch.setattr(driver, "has_batches", lambda: hasattr(self, "cuMemcpyBatchAsync"))
        monkeypatch.setattr(lanes, "Device", lambda device: FakeDevice(self))


class FakeDevice:
    """Does what a `Device` does. Its handles count from 1."""

    def __init__(self, fake: FakeDriver) -> None:
        self._fake = fake
        self._handles = 0
        self._kept: list[object] = []

    def enter_thread(self) -> None: ...

    def current_stream(self) -> int:
        return 0

    def stream(self) -> int:
        self._handles += 1
        return self._handles

    def event(self, *, timing: bool = False, blocking: bool = False) -> int:
        return self.stream()

    def rows(self, count: int, size: int) -> list[int]:
        rows = np.zeros((count, size), np.int8)
        self._kept.append(rows)
        return [row.ctypes.data for row in rows]

    host_rows = rows

    def kernels(
        self, part: Part, row_align: int, scratch: int, *, gather: bool
    ) -> tuple[Launches, Launches]:
        if part.units is not None and gather:
            both = tuple(self._launch(Kernel(part, True, scratch, finishes)) for finishes in (False, True))
            return both, both
        kernel = self._launch(Kernel(part, gather))
        return (kernel,), (kernel._replace(programs=16),)

    def _launch(self, kernel: Kernel) -> Launch:
        function = len(self._fake.kernels) + 1
        self._fake.kernels[function] = kernel
        return Launch(function, 32, 0, programs=4, tiles=2, table=0, num_tiles=len(kernel.part.pages.size))


def address_of(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def convert(units: PackedUnits, args: list[int], how: Any) -> None:
    """Pack or unpack blocks, given by their ids and, behind them, the addresses of their packed bytes.

    A page of one unit each has the same bytes as pages of several.
    """
    blocks, rows = args[: len(args) // 2], args[len(args) // 2 :]
    geometry = np.array([0, units.check, *units.form], np.int64)
    sizes = 2 * units.form.unit_tokens * units.channels
    for block, row in zip(blocks, rows, strict=True):
        starts = (units.base + block * units.stride).tolist()
        pages = tuple(
            array_at(start, (1, size)).view(np.int8)
            for start, size in zip(starts, sizes.tolist(), strict=True)
        )
        packed = array_at(row, (1, units.form.bytes))
        nothing, counts = np.zeros(1, np.int64), np.empty(1, np.int64)
        how(packed, pages, units.channels, geometry, nothing, nothing, nothing, counts)


def array_at(address: int, shape: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    size = shape[0] * shape[1]
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8).reshape(shape)
