"""The calls of the CUDA driver that a transfer is made of: copies, launches, events, and pinning memory; and
`Device`, which owns the streams, events and memory of a lane.

`libcuda` comes with the driver, so this needs no package. Streams and events are handles, even if torch made
them: a call through ctypes takes half the time of a call through torch, and torch lacks some of these calls.
Calls that only enqueue keep the GIL, since releasing and retaking it takes longer than the call. An error of
the driver becomes a `TransferError` with its name.

Any thread may call, if it has a current CUDA context, as every thread that has used torch on the device.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from functools import cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import TransferError
from kvtier.transfer.cuda.pieces import Part

Addresses = npt.NDArray[np.int64]

_LIBRARY = "libcuda.so.1"
_PORTABLE = 1  # pinned for every context of this process
_NON_BLOCKING = 1  # a stream that does not wait for the default stream, nor that for it
_NOT_READY = 600


class _BatchAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`: one rule for all ranges of a batch.

    The location hints stay empty, because the driver knows its addresses.
    """

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", ctypes.c_int * 2),
        ("dst_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = _BatchAttributes(src_access_order=1)
_FIRST = ctypes.c_size_t(0)


_POINTER, _SIZE, _COUNT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER),
    "cuMemcpyBatchAsync": (
        _POINTER,
        _POINTER,
        _POINTER,
        _SIZE,
        _POINTER,
        _POINTER,
        _SIZE,
        _POINTER,
        _POINTER,
    ),
    "cuEventElapsedTime": (_POINTER, _POINTER, _POINTER),
    "cuEventElapsedTime_v2": (_POINTER, _POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventSynchronize": (_POINTER,),
    "cuLaunchKernel": (_POINTER, *[_COUNT] * 7, _POINTER, _POINTER, _POINTER),
    "cuStreamCreateWithPriority": (_POINTER, _COUNT, ctypes.c_int),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuStreamQuery": (_POINTER,),
    "cuStreamSynchronize": (_POINTER,),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _COUNT),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, ctypes.c_uint),
    "cuMemHostUnregister": (_POINTER,),
}


def _load(kind: type[ctypes.CDLL]) -> Any:
    library = kind(_LIBRARY)
    for name, signature in _SIGNATURES.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = signature
    return library


@cache
def _enqueuing() -> Any:
    """Return the library for calls that return at once; they hold the GIL."""
    return _load(ctypes.PyDLL)


@cache
def _waiting() -> Any:
    """Return the library for calls that may take long; they release the GIL."""
    return _load(ctypes.CDLL)


@cache
def has_batches() -> bool:
    """Return whether the driver can copy many ranges in one call (since CUDA 12.8)."""
    return hasattr(_enqueuing(), "cuMemcpyBatchAsync")


SUBMIT_FUNCTIONS = (
    "cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuEventRecord", "cuStreamWaitEvent",
    "cuEventQuery", "cuStreamQuery", "cuEventSynchronize", "cuEventElapsedTime",
)  # fmt: skip
"""The functions that `kvtier.native._cuda` calls, in the order in which it takes them."""


_NEWER = {"cuEventElapsedTime": "cuEventElapsedTime_v2"}
"""Functions to call instead where the driver has them: this one takes 0.3 us, the older one 3.5 us."""


def find_functions() -> bytes:
    """Return the addresses of `SUBMIT_FUNCTIONS`, 0 for a function that the driver lacks."""
    library = _enqueuing()
    names = [
        _NEWER.get(name, name) if hasattr(library, _NEWER.get(name, name)) else name
        for name in SUBMIT_FUNCTIONS
    ]
    found = [getattr(library, name, None) for name in names]
    return struct.pack(
        "9Q", *(ctypes.cast(function, ctypes.c_void_p).value if function else 0 for function in found)
    )


def fail(status: int, what: str) -> NoReturn:
    """Raise `TransferError` with the driver's name for the error of a failed call."""
    name = ctypes.c_char_p()
    _waiting().cuGetErrorName(status, ctypes.byref(name))
    raise TransferError(
        f"{what}: expected success, got {(name.value or b'?').decode()} ({status}) from the driver"
    )


def has_context() -> bool:
    """Return whether the calling thread has a CUDA context."""
    context = ctypes.c_void_p()
    return not _enqueuing().cuCtxGetCurrent(ctypes.byref(context)) and context.value is not None


# -- streams and events ----------------------------------------------------------------------------


def new_stream(priority: int) -> int:
    """Return a stream of our own. Torch has only 32 of each priority, and gives each out many times."""
    stream = ctypes.c_void_p()
    if status := _waiting().cuStreamCreateWithPriority(ctypes.addressof(stream), _NON_BLOCKING, priority):
        fail(status, "making a stream")
    return stream.value or 0


def end_stream(stream: int) -> None:
    """Free a stream once its work is done."""
    _waiting().cuStreamDestroy_v2(stream)  # fails if the device is gone, but then the stream is gone too


def record(event: int, stream: int) -> None:
    """Have an event happen once a stream has done all work enqueued so far."""
    if status := _enqueuing().cuEventRecord(event, stream):
        fail(status, "recording an event")


def wait_for(stream: int, event: int) -> None:
    """Make all work enqueued on a stream from now on wait for an event, on the device."""
    if status := _enqueuing().cuStreamWaitEvent(stream, event, 0):
        fail(status, "letting a stream wait")


def is_over(event: int) -> bool:
    """Return whether an event has happened."""
    if status := _enqueuing().cuEventQuery(event):
        if status == _NOT_READY:
            return False
        fail(status, "asking for an event")
    return True


def is_idle(stream: int) -> bool:
    """Return whether a stream has done all its work."""
    if status := _enqueuing().cuStreamQuery(stream):
        if status == _NOT_READY:
            return False
        fail(status, "asking for a stream")
    return True


def wait_over(event: int) -> None:
    """Block until an event has happened."""
    if status := _waiting().cuEventSynchronize(event):
        fail(status, "waiting for an event")


def wait_idle(stream: int) -> None:
    """Block until a stream has done all its work."""
    if status := _waiting().cuStreamSynchronize(stream):
        fail(status, "waiting for a stream")


def seconds_between(start: int, end: int) -> float:
    """Return the device's time between two events that have happened."""
    milliseconds = ctypes.c_float()
    if status := _enqueuing().cuEventElapsedTime(ctypes.addressof(milliseconds), start, end):
        fail(status, "reading the time between events")
    return milliseconds.value / 1000


# -- work ------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """A compiled kernel that copies tiles, the table of tiles on the device, and the kernel's share of the
    device; see `kernels`.
    """

    function: int
    threads: int
    shared_bytes: int
    programs: int
    """The most programs of a launch."""
    tiles: int
    """The number of tiles that a program copies at once."""
    table: int
    num_tiles: int

    def start(self, args: int, num_blocks: int, stream: int) -> None:
        """Enqueue a run for some blocks. `args` is the address of the block ids and rows for the kernel."""
        programs = max(1, min(self.programs, -(-num_blocks * self.num_tiles // self.tiles)))
        values = (ctypes.c_uint64 * 5)(self.table, args, num_blocks, self.num_tiles, 0)
        at = ctypes.addressof(values)
        # The driver reads as many arguments as the kernel has. Triton's compiler adds some, which are null.
        arguments = (ctypes.c_void_p * 8)(at, at + 8, at + 16, at + 24, *[at + 32] * 4)
        sizes = (programs, 1, 1, self.threads, 1, 1, self.shared_bytes)
        status = _enqueuing().cuLaunchKernel(
            self.function, *sizes, stream, ctypes.addressof(arguments), None
        )
        if status:
            fail(status, "launching a kernel")


Launches = tuple[Launch, ...]
"""Kernels that do their work one after the other."""


def copy_range(dst: int, src: int, size: int, stream: int, *, pinned: bool = True) -> None:
    """Enqueue one copy. If the host's end is not `pinned`, the driver may wait for the stream first."""
    if status := (_enqueuing() if pinned else _waiting()).cuMemcpyAsync(dst, src, size, stream):
        fail(status, f"copying {size} bytes")


def copy_ranges(
    dst: Addresses, src: Addresses, sizes: Addresses, stream: int, *, pinned: bool = True
) -> None:
    """Enqueue copies of ranges, in no particular order among themselves."""
    if len(sizes) == 1 or not pinned or not has_batches():
        for copy in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
            copy_range(*copy, stream, pinned=pinned)
        return
    failed = ctypes.c_size_t(0)
    status = _enqueuing().cuMemcpyBatchAsync(
        *(array.ctypes.data for array in (dst, src, sizes)), len(sizes),
        ctypes.addressof(_IN_STREAM_ORDER), ctypes.addressof(_FIRST), 1, ctypes.addressof(failed), stream,
    )  # fmt: skip
    if status:
        fail(status, f"copying {len(sizes)} ranges")


# -- memory ----------------------------------------------------------------------------------------


def pin(address: int, size: int) -> None:
    """Lock memory, so that the device can copy from and to it at full speed without the host."""
    if status := _waiting().cuMemHostRegister_v2(address, size, _PORTABLE):
        fail(status, f"pinning {size} bytes")


def unpin(address: int) -> None:
    """Undo one `pin`."""
    if status := _waiting().cuMemHostUnregister(address):
        fail(status, "unpinning memory")


# -- a lane's resources ----------------------------------------------------------------------------

PRIORITY = 0
"""The priority of streams, the lowest of CUDA.

A higher priority moved no more bytes beside matrix products.
"""


class Device:
    """Owns a lane's streams, events, memory and kernels, most of them torch's, for as long as it lives.

    All are given out as handles and addresses. Any thread may ask for the current stream; the rest is for
    one thread at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index or 0
        self._kept: list[object] = []
        self._any_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread, if the thread has none."""
        if not has_context():
            torch.cuda.set_device(self._device)

    def current_stream(self) -> int:
        """Return the calling thread's current stream."""
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def stream(self) -> int:
        """Return a new stream."""
        with torch.cuda.device(self._device):
            stream = new_stream(PRIORITY)
        weakref.finalize(self, end_stream, stream)
        return stream

    def event(self, *, timing: bool = False, blocking: bool = False) -> int:
        """Return a new event. `blocking`: a waiting thread sleeps."""
        event = torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]
        event.record(self._any_stream)  # the event has a handle only after this
        self._kept.append(event)
        return int(event.cuda_event)

    def rows(self, count: int, size: int) -> list[int]:
        """Return the addresses of new rows in the device's memory."""
        return self._keep_rows(torch.empty((count, size), dtype=torch.int8, device=self._device))

    def host_rows(self, count: int, size: int) -> list[int]:
        """Return the addresses of new rows in pinned memory."""
        return self._keep_rows(torch.empty((count, size), dtype=torch.int8, pin_memory=True))

    def _keep_rows(self, rows: torch.Tensor) -> list[int]:
        self._kept.append(rows)
        return [row.data_ptr() for row in rows]

    def kernels(
        self, part: Part, row_align: int, scratch: int, *, gather: bool
    ) -> tuple[Launches, Launches]:
        """Return the kernels that copy a part beside other work, and those for a piece with nothing beside
        it. The latter also take rows in the pool.
        """
        # Imported here, because only a process with a device needs Triton.
        from kvtier.transfer.cuda.kernels import SHORT, STAGED, PageCopy
        from kvtier.transfer.cuda.packing import ALONE, BESIDE, Pack, Unpack

        both: list[PageCopy | Pack | Unpack]
        with torch.cuda.device(self._device):
            if part.units is None:
                staged = PageCopy(part, self._device, STAGED, gather=gather)
                both = [staged, PageCopy(part, self._device, SHORT, gather=gather, row_align=row_align)]
            elif gather:
                both = [Pack(part.units, self._device, scratch, share) for share in (BESIDE, ALONE)]
            else:
                both = [Unpack(part.units, self._device, share) for share in (BESIDE, ALONE)]
            torch.cuda.synchronize()
        if not all(kernels.launches for kernels in both):
            raise TransferError(
                "expected compiled kernels, got Triton's interpreter: unset TRITON_INTERPRET"
            )
        self._kept += both
        return both[0].launches, both[1].launches
