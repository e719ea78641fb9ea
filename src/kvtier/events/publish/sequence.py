"""The first sequence number of a publisher, so that a restart never goes back: from the clock, or a file.

The clock gives microseconds since 1970: no publisher sends a million messages a second, so a process begins
above all numbers of the one before it unless the clock was set back. The numbers stay below 2^53 until the
year 2255, so consumers with signed 64-bit ints and with doubles can use them.

A sequence file holds one number: no message was ever sent under it or a higher one. It is moved ahead in
portions before numbers are used, so a process that dies leaves a gap, never a number used twice; a clean
end writes the exact number. One process at a time may have the file open. One thread owns it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from kvtier.errors import InputError, IntegrityError, OutsideError

__all__ = ["SequenceFile", "number_from_clock"]

logger = logging.getLogger(__name__)


def number_from_clock() -> int:
    """Return a number above all numbers of earlier processes."""
    return time.time_ns() // 1000


class SequenceFile:
    """Numbers from `start` on, to be used once `reserve` has covered them."""

    def __init__(self, path: str | Path, reserve_size: int = 10_000) -> None:
        """Open or create the file."""
        self.path = Path(path)
        self._reserve_size = reserve_size
        self._file: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._drop()
            raise OutsideError(
                f"{path}: another publisher has this sequence file open; give each its own"
            ) from None
        except OSError as error:
            self._drop()
            raise OutsideError(f"{path}: cannot open the sequence file: {error.strerror}") from error
        self.start = self.reserved = self._read(self._file)

    def reserve(self, seq: int) -> None:
        """Make sure that numbers up to `seq` may be used.

        A failed write is logged, and tried again later.
        """
        if seq < self.reserved:
            return
        self.reserved = seq + self._reserve_size
        self._write(self.reserved)

    def close(self, next_seq: int) -> None:
        """Write the next number, and close the file."""
        if self._file is not None:
            self._write(next_seq)
            self.reserved = next_seq
            self._drop()

    def check(self) -> None:
        """Raise `IntegrityError` if the number in the file is below the reserved one."""
        if self._file is not None and self._read(self._file) < self.reserved:
            raise IntegrityError(
                f"{self.path}: holds {self._read(self._file)}, reserved up to {self.reserved}"
            )

    def _read(self, file: int) -> int:
        text = os.pread(file, 64, 0).decode("ascii", "replace").strip()
        if text and not text.isdecimal():
            self._drop()
            raise InputError(
                f"{self.path}: expected one number, got {text!r}; "
                "is it a sequence file? Remove it to start at 0"
            )
        return int(text or 0)

    def _write(self, number: int) -> None:
        # One sector, fixed width, no rename: a torn write is impossible, and the lock stays on the same
        # file.
        assert self._file is not None
        try:
            os.pwrite(self._file, b"%020d\n" % number, 0)
            os.fdatasync(self._file)
        except OSError as error:
            logger.error(
                "%s: cannot write the sequence number (%s): a restart may repeat numbers", self.path, error
            )

    def _drop(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
