"""From plain Python to compiled loops while questions are answered: nothing is lost, and nobody waits for
long.

numba takes a minute or two to compile everything on a new machine. An index of form `auto` therefore starts
as a plain one. A child process compiles, since the compiler would keep the interpreter to itself for long
stretches, and leaves its work on disk; a thread loads that (or compiles, where nothing was left) and then
copies. From the start of the copying every change is made in both forms, so a block that is copied late is
as good as one copied early; when all is copied the compiled form takes over. Where it cannot take all (a
very small budget) the index stays plain.

The lock of the index is held for a slice of about a thousand blocks at a time.
"""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.events.wire import Batch, decode_batch
from kvtier.index.base import Columns, Edits, Hashes, IndexArea, Table, TableStats
from kvtier.index.forms import Keys
from kvtier.index.names import NamePart, Names, PlainNames
from kvtier.index.plain import PlainTable

if TYPE_CHECKING:
    from kvtier.index.compiled.names import CompiledNames
    from kvtier.index.compiled.scan import Scanner
    from kvtier.index.compiled.table import CompiledTable
    from kvtier.index.prefix import PrefixIndex

__all__ = ["CompiledParts", "MovingTable", "PlainParts", "SwitchingDecoder", "move", "start"]

logger = logging.getLogger(__name__)

_PAUSE = 0.001
"""Seconds between two slices, so that others get the lock."""
_compiling = threading.Lock()
_compiled: set[Keys] = set()


class PlainParts(NamedTuple):
    """The plain form of an index."""

    table: PlainTable
    names: PlainNames | None


class CompiledParts(NamedTuple):
    """The compiled form, which is empty and has the same workers and areas."""

    table: CompiledTable
    names: CompiledNames | None


Use = Callable[[Table, Names | None], None]
"""Makes the index use a table and names from now on."""


def start(index: PrefixIndex) -> None:
    """Compile in the background, then make the index go over to the compiled form."""
    threading.Thread(
        target=_run, args=(weakref.ref(index),), name="kvtier-index-compile", daemon=True
    ).start()


def _run(wanted: weakref.ref[PrefixIndex]) -> None:
    try:
        with _compiling:  # by one thread; the others then find all of it compiled
            index = wanted()
            if index is None:
                return
            _compile_aside(index.keys)
            index.warm_up()
        for _ in index.go_over():
            time.sleep(_PAUSE)
    except Exception:  # the top of the thread: a machine that cannot compile can still answer
        logger.exception("the index could not be compiled and stays in plain Python")


def _compile_aside(keys: Keys) -> None:
    """Let a child process compile, once for each kind of keys.

    Whatever goes wrong with it shows when the index is warmed up.
    """
    if keys in _compiled or not sys.executable:
        return
    _compiled.add(keys)
    code = (
        "from kvtier.index import PrefixIndex; "
        f"PrefixIndex(keys={keys!r}, form='numba', budget=1 << 20).warm_up()"
    )
    nothing = subprocess.DEVNULL
    child = subprocess.Popen([sys.executable, "-c", code], stdin=nothing, stdout=nothing, stderr=nothing)
    atexit.register(child.kill)
    child.wait()
    atexit.unregister(child.kill)


class SwitchingDecoder:
    """Decodes batches for an index of form `auto`, with compiled loops once there are any.

    Not for several threads at once.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index, self._tokens = index, index.keys == "xxh3"
        self._scanner: Scanner | None = None

    def __call__(self, payload: bytes) -> Batch:
        """Read a batch in either encoding. Raises `ValueError` where the payload is not a batch at all."""
        if self._scanner is None and self._index.form == "numba":
            from kvtier.index.compiled.scan import Scanner

            self._scanner = Scanner(self._tokens)
        return (
            self._scanner(payload)
            if self._scanner is not None
            else decode_batch(payload, tokens=self._tokens)
        )


def move(
    lock: threading.RLock, old: PlainParts, new: CompiledParts, both: MovingTable, use: Use
) -> Iterator[None]:
    """Copy what there is, one slice for each turn, and then use the new form.

    The lock is free between turns. The index uses `both` tables since the new one was made: what was told in
    between would be in the old one alone.
    """
    names = None
    yield from _copy_blocks(lock, old.table, new.table)
    if old.names is not None and new.names is not None:
        # only now, since a full book asks the table which names are needed, and the table must know of all
        # blocks
        names = MovingNames(old.names, new.names)
        with lock:
            use(both, names)
        yield from _copy_names(lock, names)
    with lock:
        if new.table.stats().dropped or (names is not None and names.is_short):
            logger.warning("the index stays in plain Python: its budget is too small for both forms at once")
            use(*old)
        else:
            new.table.adopt(old.table, old.table.workers)
            use(*new)


def _copy_blocks(lock: threading.RLock, old: PlainTable, new: CompiledTable) -> Iterator[None]:
    slices = old.hashes()
    while True:
        with lock:
            part = next(slices, None)
            if part is None:
                return
            for (worker, area), keys in old.holders(part).items():
                new.store(worker, area, np.array(keys, np.uint64))
        yield


def _copy_names(lock: threading.RLock, names: MovingNames) -> Iterator[None]:
    slices = names.old.parts()
    while True:
        with lock:
            part = next(slices, None)
            if part is None:
                return
            for worker in np.unique(part.workers).tolist():
                theirs = part.workers == worker
                names.copy(worker, part.hashes[theirs].tolist(), part.keys[theirs])
        yield


class MovingTable:
    """Two tables: every change is made in both, and the old one answers. See `kvtier.index.base.Table`."""

    form = "python"

    def __init__(self, old: PlainTable, new: CompiledTable) -> None:
        self._old, self._new = old, new

    def grow(self, workers: int) -> bool:
        return self._new.grow(workers) and self._old.grow(workers)

    def add_area(self, area: IndexArea) -> int | None:
        number = self._new.add_area(area)
        return None if number is None else self._old.add_area(area)

    def require(self, worker: int, groups: int) -> None:
        self._old.require(worker, groups)
        self._new.require(worker, groups)

    def apply(
        self, worker: int, edits: Edits, hashes: Hashes, unique: bool = False
    ) -> tuple[int, int] | None:
        stopped = self._old.apply(worker, edits, hashes, unique)
        if stopped is not None:
            edits = edits[: stopped[0] + 1].copy()
            edits[-1, 2] = stopped[1]
        self._new.apply(worker, edits, hashes)
        return stopped

    def store(self, worker: int, area: int, hashes: Hashes) -> npt.NDArray[np.bool_]:
        fresh = self._old.store(worker, area, hashes)
        self._new.store(worker, area, hashes[fresh])
        return fresh

    def refuse(self, worker: int, count: int) -> None:
        self._old.refuse(worker, count)

    def clear(self, worker: int) -> None:
        self._old.clear(worker)
        self._new.clear(worker)

    def match(self, hashes: Hashes) -> Columns:
        return self._old.match(hashes)

    def holds(self, worker: int, hashes: Hashes) -> npt.NDArray[np.bool_]:
        return self._old.holds(worker, hashes)

    def holdings(self) -> int:
        return self._old.holdings()

    def held(self, worker: int) -> list[int]:
        return self._old.held(worker)

    def dropped(self, worker: int) -> int:
        return self._old.dropped(worker)

    def hashes(self) -> Iterator[Hashes]:
        return self._old.hashes()

    def usable(self, hashes: Hashes) -> list[Mapping[int, int]]:
        return self._old.usable(hashes)

    def stats(self) -> TableStats:
        stats = self._old.stats()
        return stats._replace(bytes=stats.bytes + self._new.stats().bytes)

    def check(self) -> None:
        """Raise `IntegrityError` where one of the tables contradicts itself."""
        self._old.check()
        self._new.check()


class MovingNames:
    """Two books of names in the same way. See `kvtier.index.names.Names`."""

    def __init__(self, old: PlainNames, new: CompiledNames) -> None:
        self.old, self._new = old, new
        self.is_short = False  # the new book has not all names

    def get(self, worker: int, engine_hash: int) -> int | None:
        return self.old.get(worker, engine_hash)

    def put(self, worker: int, hashes: Sequence[int], keys: Hashes) -> bool:
        done = self.old.put(worker, hashes, keys)
        if done:
            self.is_short = not self._new.put(worker, hashes, keys) or self.is_short
        return done

    def copy(self, worker: int, hashes: Sequence[int], keys: Hashes) -> None:
        """Put names into the new book that the old one has. Call it only between batches."""
        if not self._new.put(worker, hashes, keys):
            self._new.sweep()
            self.is_short = not self._new.put(worker, hashes, keys) or self.is_short

    def clear(self, worker: int) -> None:
        self.old.clear(worker)
        self._new.clear(worker)

    def tidy(self) -> None:
        self.old.tidy()

    def sweep(self) -> None:
        self.old.sweep()
        self._new.sweep()

    def parts(self) -> Iterator[NamePart]:
        return self.old.parts()

    def bytes(self) -> int:
        return self.old.bytes() + self._new.bytes()

    def check(self) -> None:
        """Raise `IntegrityError` where one of the books contradicts itself."""
        self.old.check()
        self._new.check()
