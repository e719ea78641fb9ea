"""Moves rows through a backend: makes them, seals them on the way out, checks them on the way in.

Every answer or exception of a backend becomes an outcome of the given rows, so an I/O thread survives every
backend. Seals are put on and checked in the thread that moves the bytes, while the bytes are in its cache.
Called by I/O threads, any number at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvtier.keys import OffloadKey
from kvtier.tiers.base import Backend, BackendRow, LentRow, Outcome
from kvtier.tiers.seal import SealKey, SealScope, seal_of

__all__ = ["DONE", "JobRows", "RowEnd", "RowMover", "say_error"]

logger = logging.getLogger(__name__)

RowEnd = tuple[Outcome, str]
"""The outcome of one row, and the reason of a failure."""
DONE: RowEnd = (Outcome.DONE, "")
_NOT_OUR_SEAL = (
    "tier %s: a row under one of our names does not bear a seal of our seal_key_file: it was forged or "
    "damaged. It is a miss, as are all that follow; they are counted and not told"
)


class JobRows:
    """Rows of a job: their keys, the places that their tier chose, and the lent memory.

    All rows count as `row_bytes`. The thread that moves a row builds the `BackendRow`, because the
    scheduler thread has no time for it.
    """

    __slots__ = ("keys", "lent", "places", "row_bytes")

    def __init__(
        self,
        keys: list[OffloadKey],
        places: list[int],
        row_bytes: int,
        lent: Sequence[LentRow | BackendRow] = (),
    ) -> None:
        self.keys, self.places, self.row_bytes, self.lent = keys, places, row_bytes, lent

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """The bytes that the rows count as."""
        return len(self.keys) * self.row_bytes

    def pick(self, indices: list[int]) -> JobRows:
        """Return some rows, or all, without their memory."""
        keys, places = self.keys, self.places
        if len(indices) < len(keys):
            keys, places = [keys[at] for at in indices], [places[at] for at in indices]
        return JobRows(keys, places, self.row_bytes)

    def __add__(self, other: JobRows) -> JobRows:
        return JobRows(self.keys + other.keys, self.places + other.places, self.row_bytes)


class RowMover:
    """Moves the rows of one tier."""

    def __init__(self, name: str, check_seals: bool, seal_key: SealKey | None) -> None:
        """With a `seal_key` accept only rows sealed with it; the first other row logs a warning."""
        self._name, self._check_seals, self._seal_key = name, check_seals, seal_key
        self._warned = False

    def read(self, backend: Backend, rows: JobRows, indices: list[int], scope: SealScope) -> list[RowEnd]:
        """Fill the memory of some rows, and return the outcome of each."""

        def move() -> list[RowEnd]:
            empty = [
                BackendRow(rows.keys[at], rows.lent[at].pieces, rows.places[at], scope.number)
                for at in indices
            ]
            answers = zip(empty, backend.read(empty), strict=False)
            return [self._check(row, found, scope) for row, found in answers]

        return _ends_of(indices, move)

    def write(self, backend: Backend, rows: JobRows, indices: list[int], scope: SealScope) -> list[RowEnd]:
        """Write some rows, and return the outcome of each."""

        def move() -> list[RowEnd]:
            errors = backend.write([self._sealed(rows, at, scope) for at in indices])
            return [DONE if error is None else (Outcome.FAILED, say_error(error)) for error in errors]

        return _ends_of(indices, move)

    def _sealed(self, rows: JobRows, at: int, scope: SealScope) -> BackendRow:
        key, lent = rows.keys[at], rows.lent[at]
        seal = seal_of(scope, key, lent.pieces, self._seal_key)
        return BackendRow(key, lent.pieces, rows.places[at], scope.number, seal, lent.description)

    def _check(self, row: BackendRow, found: bytes | OSError | None, scope: SealScope) -> RowEnd:
        if found is None:
            return Outcome.ABSENT, ""
        if isinstance(found, OSError):
            return Outcome.FAILED, say_error(found)
        if self._check_seals and found != seal_of(scope, row.key, row.pieces, self._seal_key):
            if self._seal_key is not None and not self._warned:
                self._warned = True
                logger.warning(_NOT_OUR_SEAL, self._name)
            return Outcome.FAILED_CHECK, ""
        return DONE


def _ends_of(rows: list[int], move: Callable[[], list[RowEnd]]) -> list[RowEnd]:
    """Move rows. An exception of the backend is a failure of all of them."""
    try:
        ends = move()
    except OSError as error:
        return [(Outcome.FAILED, say_error(error))] * len(rows)
    except BaseException as error:  # a panic of compiled code is no Exception, and the thread must go on
        logger.exception("tier I/O: the backend raised")
        return [(Outcome.FAILED, f"{type(error).__name__}: {error}")] * len(rows)
    if len(ends) != len(rows):
        why = f"expected {len(rows)} answers of the backend, got {len(ends)}"
        return [(Outcome.FAILED, why)] * len(rows)
    return ends


def say_error(error: BaseException | None) -> str:
    """Put an error into words for people."""
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return repr(error)
