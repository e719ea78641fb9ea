"""The two memories between which handlers move bytes: the engine's pages on a device, and the pool, pinned.

A `CudaMemory` is immutable once made, and the handlers of both directions share it. Any thread may read it.

Memory is pinned in pieces of whole rows: one large request may fail where several pass, and several threads
are faster. No copy may cross the border of two pieces (`seam`). If any piece cannot be pinned, all are
unpinned: transfers then go through the driver's own buffers, slower but as correct, and one warning says so.

Each user holds the pinned memory (`hold`, `release`), and the last one to release it unpins it. Memory is
never unmapped while it is pinned, even if no user releases it and the garbage collector frees everything.
Otherwise the driver would go on copying to the old addresses, which may belong to something else by then.
Any thread may call `hold` and `release`.
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
import torch

from kvtier.config import OffloadingConfig
from kvtier.errors import InputError, IntegrityError, LayoutError, TransferError
from kvtier.packing import Heads
from kvtier.pool import Pool
from kvtier.transfer.base import CanonicalKVCaches
from kvtier.transfer.cuda import driver
from kvtier.transfer.cuda.pieces import Part, PoolMap, find_pages, find_units, packed_part, split_pages
from kvtier.transfer.plan import JobBounds

logger = logging.getLogger(__name__)

# docs/cuda-constants.md has the measurements for these.
BUFFERS = 4
"""The staging buffers of each direction. They hold pieces while kernels wait for the engine's kernels."""
DIRECT_BYTES = 2 << 20
"""From this page size on, pages are copied without a kernel: that is as fast."""
_ALIGNMENT = 16  # of buffers, so that kernels can move 16 bytes at a time
_PAGEABLE_BYTES = 1 << 20  # a copy of pageable memory blocks with a lock held, so pieces must be short
PINNED_BYTES = 1 << 30
"""The bytes that are pinned in one request, or one row if that is more."""
_THREADS = 8  # with these, 2 GiB of large pages take 0.12 s instead of 0.47 s
_PAGE = 4096
_POPULATE_WRITE = 23


class CudaMemory:
    """The memory that both handlers of a device share: addresses of pages and rows, and the pinned pool."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        pool: Pool,
        config: OffloadingConfig,
        *,
        staging_bytes: int | None = None,
        direct_bytes: int = DIRECT_BYTES,
        pinning: Pinning | None = None,
    ) -> None:
        """Pin the pool and find the pages. `staging_bytes` defaults to the settings."""
        groups = range(len(config.groups))
        expected = [group.bytes_per_block for group in config.groups]
        found = [kv_caches.block_bytes(group) for group in range(len(kv_caches.group_data_refs))]
        if found != expected:
            raise LayoutError(f"expected groups with blocks of {expected} bytes, got {found}")
        first = kv_caches.tensors[0].tensor
        self.kv_caches = kv_caches  # kept, because the addresses in `parts` are valid only while these live
        self.device = first.device
        self.pool = pool
        self.pinning = pinning or Pinning(pool, lambda: torch.cuda.set_device(self.device))
        self.staging_bytes = config.settings.staging if staging_bytes is None else staging_bytes
        self.piece_bytes = max(_ALIGNMENT, self.staging_bytes // 2 // BUFFERS // _ALIGNMENT * _ALIGNMENT)
        if not self.pinning.pinned:
            self.piece_bytes = min(self.piece_bytes, _PAGEABLE_BYTES)
        direct_bytes = min(direct_bytes, self.piece_bytes)
        self.parts: list[tuple[Part, ...]] = []
        self.heads: dict[int, Heads] = {}
        """By group, the heads of its packed blocks."""
        for group in groups:
            pages, form = find_pages(kv_caches, group), config.packed_format(group)
            if form is None:
                self.parts.append(split_pages(pages, self.piece_bytes, direct_bytes))
                continue
            units = find_units(kv_caches, group, form)
            self.parts.append((packed_part(pages, units),))
            offset, per_chunk = config.rank * config.max_image_bytes, config.settings.blocks_per_chunk
            self.heads[group] = Heads(pool.rows, offset, form, units.check, per_chunk)
        packed = [part.bytes for parts in self.parts for part in parts if part.units is not None]
        self.buffer_bytes = max(self.piece_bytes, *packed) if packed else self.piece_bytes
        """The bytes of a buffer: a piece, or one packed block if that is more."""
        self.bounds = JobBounds(len(groups), len(first), pool.num_slots, config.settings.blocks_per_chunk)
        self.pool_map = PoolMap(self.pinning.address, pool.slot_bytes, self.pinning.seam, config)


class Pinning:
    """The pinned memory of a pool. It is pinned when this is made, if the driver allows it."""

    def __init__(
        self,
        pool: Pool,
        prepare_thread: Callable[[], object],
        *,
        pin: Callable[[int, int], None] = driver.pin,
        unpin: Callable[[int], None] = driver.unpin,
    ) -> None:
        """Pin the pool. `prepare_thread` gives a new thread its CUDA context."""
        self._users = 0
        self._lock = threading.Lock()
        self.address = pool.rows.ctypes.data
        size = pool.rows.nbytes
        rows = (
            max(1, PINNED_BYTES // pool.slot_bytes)
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
        """Undo one `hold`. The caller's copies must be over."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._unpin()

    def check(self) -> None:
        """Raise `IntegrityError` if the number of users does not fit the pinned memory."""
        if self._users < 0 or (self._users and self.pinned and not self._unpin.alive):
            raise IntegrityError(
                f"pinning: {self._users} users of memory that is {'' if self._unpin.alive else 'un'}pinned"
            )


def _pin_all(
    pieces: dict[int, int], prepare_thread: Callable[[], object], pin: Callable[[int, int], None]
) -> tuple[list[int], TransferError | None]:
    """Pin pieces; return the addresses of the pinned ones, and the first error."""

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
    """Unpin pieces of the memory of `rows`.

    The reference to the array keeps the memory mapped until then.
    """
    for address in addresses:
        with suppress(TransferError):  # it fails if the context is gone, and then nothing is pinned any more
            unpin(address)


def _populate(address: int, size: int) -> None:
    """Take physical memory for a range without changing its bytes.

    If the system cannot, the driver does it later, on one thread.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)
