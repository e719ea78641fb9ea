"""The few calls of the CUDA driver that torch has no name for: copies of many ranges at once, and pinning memory.

`libcuda` comes with the driver, so this needs no package, and a call through ctypes with arrays as they are costs a
microsecond for any number of ranges. Copies only enqueue: they keep the GIL, since letting it go and getting it back
takes longer than the call. An error of the driver is a `TransferError` with its name.

Callers have a current CUDA context, as every thread has that has used torch on the device. Any thread.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError

__all__ = ["Addresses", "copy_range", "copy_ranges", "has_batches", "pin", "unpin"]

Addresses = npt.NDArray[np.int64]

_LIBRARY = "libcuda.so.1"
_PORTABLE = 1  # pinned for every context of this process


class _BatchAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`: one rule for all ranges of a batch. No location hints: the driver knows its addresses."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", ctypes.c_int * 2),
        ("dst_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = _BatchAttributes(src_access_order=1)
_FIRST = ctypes.c_size_t(0)


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER),
    "cuMemcpyBatchAsync": (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER),
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
    """Return the library for calls that return at once."""
    return _load(ctypes.PyDLL)


@cache
def _waiting() -> Any:
    """Return the library for calls that take their time, without the GIL."""
    return _load(ctypes.CDLL)


@cache
def has_batches() -> bool:
    """Say whether the driver copies many ranges in one call: it does since CUDA 12.8."""
    return hasattr(_enqueuing(), "cuMemcpyBatchAsync")


def _expect(status: int, what: str) -> None:
    if status:
        name = ctypes.c_char_p()
        _waiting().cuGetErrorName(status, ctypes.byref(name))
        raise TransferError(f"{what}: expected success, got {(name.value or b'?').decode()} ({status}) from the driver")


def copy_range(dst: int, src: int, size: int, stream: int, *, pinned: bool = True) -> None:
    """Enqueue one copy. With the host's end not `pinned` the driver may wait for the stream first."""
    library = _enqueuing() if pinned else _waiting()
    _expect(library.cuMemcpyAsync(dst, src, size, stream), f"copying {size} bytes")


def copy_ranges(dst: Addresses, src: Addresses, sizes: Addresses, stream: int, *, pinned: bool = True) -> None:
    """Enqueue copies of ranges, in no particular order among themselves."""
    if len(sizes) == 1 or not pinned or not has_batches():
        for each in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
            copy_range(*each, stream, pinned=pinned)
        return
    failed = ctypes.c_size_t(0)
    status = _enqueuing().cuMemcpyBatchAsync(
        *(array.ctypes.data for array in (dst, src, sizes)), len(sizes),
        ctypes.addressof(_IN_STREAM_ORDER), ctypes.addressof(_FIRST), 1, ctypes.addressof(failed), stream,
    )  # fmt: skip
    _expect(status, f"copying {len(sizes)} ranges")


def pin(address: int, size: int) -> None:
    """Lock memory so that the device copies from and to it at full speed, behind the host's back."""
    _expect(_waiting().cuMemHostRegister_v2(address, size, _PORTABLE), f"pinning {size} bytes")


def unpin(address: int) -> None:
    """Undo one `pin`."""
    _expect(_waiting().cuMemHostUnregister(address), "unpinning memory")
