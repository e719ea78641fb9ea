"""The pool's memory, pinned for this process's device.

Memory is pinned in pieces of whole rows: one large request fails where several pass, and several threads do
it faster. No copy may reach across two of them (`seam`). If any piece cannot be pinned, none stays so:
transfers then go through the driver's own buffers, slower and as right, and a warning says so once.

Whoever uses it holds it (`hold`, `release`), and the last one unpins it. Memory is never unmapped while it
is pinned, also if nobody releases it and all is left to the garbage collector: the driver would go on
copying to where the addresses once led, for whoever is given them next. `hold` and `release` may be called
by any thread.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError, IntegrityError, TransferError
from kvtier.pool import Pool
from kvtier.transfer.cuda import driver

__all__ = ["PIECE_BYTES", "Pinning"]

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 30
_THREADS = 8  # 2 GiB of large pages take 0.12 s instead of 0.47 s
_PAGE = 4096
_POPULATE_WRITE = 23


class Pinning:
    """Pins a pool when made, if the device's driver lets it."""

    def __init__(
        self,
        pool: Pool,
        prepare_thread: Callable[[], object],
        *,
        pin: Callable[[int, int], None] = driver.pin,
        unpin: Callable[[int], None] = driver.unpin,
    ) -> None:
        """`prepare_thread` gives a new thread its CUDA context."""
        self._users = 0
        self._lock = threading.Lock()
        self.address = pool.rows.ctypes.data
        size = pool.rows.nbytes
        rows = (
            max(1, PIECE_BYTES // pool.slot_bytes)
            if pool.slot_bytes % _PAGE == 0
            else max(1, pool.num_slots)
        )
        self.seam = rows * pool.slot_bytes
        pieces = {self.address + at: min(self.seam, size - at) for at in range(0, size, self.seam)}
        addresses, error = _pin_all(pieces, prepare_thread, pin)
        self._unpin = weakref.finalize(self, _unpin_all, addresses, unpin, pool.rows)
        self.pinned = error is None
        if error is not None:
            self._unpin()
            logger.warning("the pool stays pageable, so transfers are slower: %s", error)

    def hold(self) -> None:
        """Keep the memory pinned until `release`."""
        with self._lock:
            if self.pinned and not self._unpin.alive:
                raise InputError("pinning: expected memory that is in use, got some that was unpinned")
            self._users += 1

    def release(self) -> None:
        """Undo one `hold`. Copies that use the memory are over."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._unpin()

    def check(self) -> None:
        """Raise `IntegrityError` if nobody can account for what is pinned."""
        if self._users < 0 or (self._users and self.pinned and not self._unpin.alive):
            raise IntegrityError(
                f"pinning: {self._users} users of memory that is {'' if self._unpin.alive else 'un'}pinned"
            )


def _pin_all(
    pieces: dict[int, int], prepare_thread: Callable[[], object], pin: Callable[[int, int], None]
) -> tuple[list[int], TransferError | None]:
    """Pin pieces; return the addresses of those that were, and the first error."""

    def pin_piece(piece: tuple[int, int]) -> TransferError | None:
        prepare_thread()
        _populate(*piece)
        try:
            pin(*piece)
        except TransferError as error:
            return error
        return None

    with ThreadPoolExecutor(_THREADS) as threads:
        errors = list(threads.map(pin_piece, pieces.items()))
    pinned = [address for address, error in zip(pieces, errors, strict=True) if error is None]
    return pinned, next((error for error in errors if error is not None), None)


def _unpin_all(addresses: list[int], unpin: Callable[[int], None], rows: npt.NDArray[np.uint8]) -> None:
    """Unpin pieces of the memory of `rows`, which is mapped for as long as somebody has the array."""
    for address in addresses:
        with suppress(TransferError):  # the context is gone, and with it every claim on the memory
            unpin(address)


def _populate(address: int, size: int) -> None:
    """Take memory for a range without changing it.

    Where the system cannot, the driver does it, on one thread.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)
