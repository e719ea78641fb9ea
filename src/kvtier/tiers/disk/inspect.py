"""Inspects a disk tier's folder from outside: the content of each place, and whether every row is whole.

For the command line. Everything blocks; a place that a process owns is only listed, never read or changed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvtier.errors import OutsideError
from kvtier.tiers.base import BackendRow
from kvtier.tiers.disk.files import DiskFiles, OpenedFiles
from kvtier.tiers.disk.folder import DiskPlace, FolderLock
from kvtier.tiers.seal import seal_of

_READ_BYTES = 8 << 20


class PlaceCheck(NamedTuple):
    """The result of the check of a place, in rows."""

    whole: int
    bad: int
    """Rows whose bytes differ from the sealed bytes, or that cannot be read."""
    damaged_records: int
    """Records that are neither empty nor whole. Their row is not known."""
    dropped: int
    """Bad rows and damaged records that were removed."""


def check_place(
    place: DiskPlace, *, drop: bool = False, advance: Callable[[int, int], None] = lambda done, total: None
) -> PlaceCheck:
    """Read every row of a place and check its seal; `drop` empties damaged records and those of bad rows.

    `advance` gets the number of rows done, and the total. `OutsideError` if a process owns the place, or it
    cannot be read.
    """
    if place.header is None:
        raise OutsideError(
            f"disk tier: {place.folder}: expected a header of this version, found none that is whole"
        )
    lock = FolderLock.take_nowait(place.folder.parent)
    try:
        opened = DiskFiles.open_again(place.folder, place.header)
        try:
            return _check(opened, drop, advance)
        finally:
            opened.files.close()
    except (OSError, MemoryError) as error:
        why = str(error) or "not enough memory"
        raise OutsideError(f"disk tier: {place.folder}: cannot be checked: {why}") from None
    finally:
        lock.release()


def _check(opened: OpenedFiles, drop: bool, advance: Callable[[int, int], None]) -> PlaceCheck:
    files, found, scope = opened
    stride, total, bad = files.header.stride, len(found.slots), 0
    count = max(1, _READ_BYTES // stride)
    buffer = np.frombuffer(mmap.mmap(-1, count * stride), dtype=np.uint8).reshape(count, stride)
    advance(0, total)
    for start in range(0, total, count):
        part = range(start, min(total, start + count))
        rows = [
            BackendRow(found.keys[at], (buffer[at - start, : found.lengths[at]].data,), int(found.slots[at]))
            for at in part
        ]
        wrong = [
            row
            for row, seal in zip(rows, files.read(rows), strict=True)
            if not isinstance(seal, bytes) or seal != seal_of(scope, row.key, row.pieces)
        ]
        bad += len(wrong)
        if drop:
            files.delete(wrong)
        advance(part.stop, total)
    damaged = len(found.damaged)
    if drop:
        files.empty_records(found.damaged.tolist())
    return PlaceCheck(total - bad, bad, damaged, bad + damaged if drop else 0)
