"""The switch from plain Python to compiled loops while the index answers: nothing is lost or waits for long.

numba takes a minute or two to compile everything on a new machine. So an index of form `auto` starts as a
plain one. A child process compiles, because the compiler would hold the interpreter for long stretches, and
leaves the result on disk; a thread loads it (or compiles, if there is none) and then copies. From the start
of the copying the compiled table is the plain table's twin: every change is made in both, so the time at
which a block is copied does not matter. When everything is copied the compiled form takes over. If there is
no room for both (a very small budget) the index stays plain.

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
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from kvtier.events.wire import Batch, decode_batch
from kvtier.index.forms import Form, Keys
from kvtier.index.names import Names, PlainNames
from kvtier.index.plain_table import PlainTable

if TYPE_CHECKING:
    from kvtier.index.compiled.scan import Scanner
    from kvtier.index.compiled.table import CompiledTable
    from kvtier.index.prefix import PrefixIndex


logger = logging.getLogger(__name__)

_PAUSE = 0.001
"""Seconds between two slices, so that other threads get the lock."""
_compiling = threading.Lock()
_compiled: set[Keys] = set()


def start(index: PrefixIndex) -> None:
    """Compile in the background, then switch the index to the compiled form."""
    threading.Thread(
        target=_run, args=(weakref.ref(index),), name="kvtier-index-compile", daemon=True
    ).start()


def _run(wanted: weakref.ref[PrefixIndex]) -> None:
    try:
        with _compiling:  # in one thread; the others then find everything compiled
            index = wanted()
            if index is None:
                return
            _compile_in_child(index.keys)
            index.warm_up()
        for _ in index.switch_to_compiled():
            time.sleep(_PAUSE)
    except Exception:  # the top of the thread: without a compiler the plain form still answers
        logger.exception("the index could not be compiled and stays in plain Python")


def _compile_in_child(keys: Keys) -> None:
    """Let a child process compile, once for each kind of keys.

    Its failures show when the index is warmed up.
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


class BatchDecoder:
    """Decodes batches for an index, with compiled loops once they exist. Not for several threads at once."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index, self._tokens = index, index.keys == "xxh3"
        self._scanner: Scanner | None = None

    def __call__(self, payload: bytes) -> Batch:
        """Read a batch in either encoding. `ValueError` if the payload is not a batch at all."""
        if self._scanner is not None:
            return self._scanner(payload)
        if self._index.form == "python":
            return decode_batch(payload, tokens=self._tokens)
        from kvtier.index.compiled.scan import Scanner

        self._scanner = Scanner(self._tokens)
        return self._scanner(payload)


def copy_and_switch(lock: threading.RLock, form: Form, new: Form, budget: int) -> Iterator[None]:
    """Copy a plain form to an empty compiled one, one slice per step, and then switch to that.

    The lock is free between steps. Both together take no more than `budget` bytes, plus a slice.
    """
    table, names, twin = form.table, form.names, cast("CompiledTable", new.table)
    assert isinstance(table, PlainTable)
    assert isinstance(names, PlainNames)
    with lock:
        has_room = table.attach(twin)
    slices, is_copied = _copy(table, names, new.names), False
    while has_room and not is_copied:
        with lock:
            is_copied = next(slices, True)
            has_room = table.stats().bytes + names.bytes() <= budget
        yield
    with lock:
        if has_room and names.twin is not None and not twin.stats().dropped:
            table.hand_over(twin)
            form.table, form.names = twin, new.names
        else:
            logger.warning("the index stays in plain Python: its budget is too small for both forms at once")
            table.twin = names.twin = None


def _copy(table: PlainTable, names: PlainNames, new_names: Names) -> Iterator[bool]:
    """Copy all blocks and names to the twins; yield `False` after each slice: there is more to do."""
    for blocks in table.hashes():
        table.copy_to_twin(blocks)
        yield False
    names.twin = new_names  # only now: a full book asks its table which names are needed
    for part in names.parts():
        names.copy_to_twin(part)
        yield False
