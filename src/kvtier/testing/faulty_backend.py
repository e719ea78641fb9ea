"""A backend that goes wrong on purpose: `FaultyBackend(backend, plan)`.

Rows come back flipped, swapped with another, torn (the second half is zero) or cut short; calls fail
with `EIO`, say that the disk is full, or hang until `release()`. The plan's seed and the number of the
row's call decide which call goes wrong, and how. A fault reports no more than a broken disk would: the
tests check that the caller notices. `KillPoint` ends the process at a given write, as SIGKILL does.

Any I/O thread, several at once.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtier.keys import OffloadKey
from kvtier.tiers.base import Backend, BackendRow
from kvtier.tiers.seal import copy_into


class BackendFault(Enum):
    """The way in which a backend goes wrong, with a row or a call."""

    FLIP = "gives a row with one bit wrong"
    SWAP = "gives another row with that one's seal"
    TORN = "writes half of a row and says that it wrote it"
    SHORT = "fills half of a row and says that it is whole"
    EIO = "fails"
    FULL = "has no room"
    HANG = "does not return until it is released"


READ_FAULTS = (BackendFault.FLIP, BackendFault.SWAP, BackendFault.SHORT, BackendFault.EIO)
WRITE_FAULTS = (BackendFault.TORN, BackendFault.EIO, BackendFault.FULL)


@dataclass(frozen=True, slots=True)
class BackendFaultPlan:
    """Which rows go wrong: `rate` of them, evenly over a direction's kinds. `injected` counts them."""

    seed: int = 0
    rate: float = 0.0
    kinds: tuple[BackendFault, ...] = READ_FAULTS + WRITE_FAULTS
    injected: Counter[BackendFault] = field(default_factory=Counter, compare=False)

    def choose(self, number: int, possible: tuple[BackendFault, ...]) -> BackendFault | None:
        """Return the fault of the row that is moved as the `number`-th, if any."""
        source = random.Random(f"{self.seed} {number}")
        kinds = [kind for kind in self.kinds if kind in possible]
        fault = source.choice(kinds) if kinds and source.random() < self.rate else None
        if fault is not None:
            self.injected[fault] += 1
        return fault


class FaultyBackend(Backend):
    """Another backend with faults, by plan or by hand."""

    def __init__(self, backend: Backend, plan: BackendFaultPlan | None = None) -> None:
        self.backend = backend
        self.contains_batch, self.writes_once = backend.contains_batch, backend.writes_once
        self.call_bytes = backend.call_bytes
        self.plan = plan or BackendFaultPlan()
        self.broken: OSError | None = None
        """Fails every call while it is set."""
        self.full = False
        """Makes every write fail while it is set."""
        self.flip_next = False
        """Flips a bit of the next row that is read."""
        self.moved: list[OffloadKey] = []
        """The rows of all calls, in the order in which they passed."""
        self.hanging = threading.Event()
        """Set while a call hangs: a test waits for it instead of sleeping."""
        self._hang = False
        self._released = False
        self._held: list[threading.Event] = []
        self._number = 0
        self._lock = threading.Lock()
        self._last: tuple[bytes, bytes] | None = None  # seal and bytes of the previously read row

    def lend(self, memory: memoryview) -> None:
        self.backend.lend(memory)

    @property
    def num_hanging(self) -> int:
        """How many calls hang."""
        return len(self._held)

    def hang(self) -> None:
        """Make every call from now on wait for `release`."""
        with self._lock:
            self._released, self._hang = False, True

    def release(self) -> None:
        """Let hanging calls go on, and stop hanging."""
        with self._lock:
            self._released, self._hang = True, False
            for call in self._held:
                call.set()
            self._held.clear()
            self.hanging.clear()

    def release_one(self) -> None:
        """Let one hanging call go on; new calls do not hang, the other hanging calls stay."""
        with self._lock:
            self._hang = False
            self._held.pop(0).set()

    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        self._pass()
        return [self._write(row) for row in rows]

    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        self._pass()
        return [self._read(row) for row in rows]

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        self._pass()
        return self.backend.contains(rows)

    def delete(self, rows: Sequence[BackendRow]) -> None:
        self._pass()
        self.backend.delete(rows)

    def probe(self) -> None:
        self._pass()
        self.backend.probe()

    def close(self) -> None:
        self.backend.close()

    def _pass(self) -> None:
        if self._hang:
            self._hold()
        if self.broken is not None:
            raise OSError(self.broken.errno, self.broken.strerror)

    def _choose(self, possible: tuple[BackendFault, ...]) -> BackendFault | None:
        with self._lock:
            self._number += 1
            fault = self.plan.choose(self._number, (*possible, BackendFault.HANG))
        if fault is BackendFault.HANG:
            self._hold()
        return fault

    def _hold(self) -> None:
        call = threading.Event()
        with self._lock:
            if self._released:
                return
            self._held.append(call)
            self.hanging.set()
        call.wait()

    def _write(self, row: BackendRow) -> OSError | None:
        fault = BackendFault.FULL if self.full else self._choose(WRITE_FAULTS)
        self.moved.append(row.key)
        if fault is BackendFault.EIO:
            return OSError(errno.EIO, os.strerror(errno.EIO))
        if fault is BackendFault.FULL:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault is BackendFault.TORN:
            torn = bytearray().join(row.pieces)
            torn[len(torn) // 2 :] = bytes(len(torn) - len(torn) // 2)
            row = row._replace(pieces=(memoryview(torn),))
        return self.backend.write([row])[0]

    def _read(self, row: BackendRow) -> bytes | OSError | None:
        fault = BackendFault.FLIP if self.flip_next else self._choose(READ_FAULTS)
        self.flip_next = False
        self.moved.append(row.key)
        if fault is BackendFault.EIO:
            return OSError(errno.EIO, os.strerror(errno.EIO))
        before = b"".join(row.pieces)
        seal = self.backend.read([row])[0]
        if not isinstance(seal, bytes):
            return seal
        payload = b"".join(row.pieces)
        with self._lock:
            other, self._last = self._last, (seal, payload)
        if fault is BackendFault.FLIP:
            at = self._number % max(1, len(payload))
            _fill(row, payload[:at] + bytes([payload[at] ^ (1 << self._number % 8)]) + payload[at + 1 :])
        elif fault is BackendFault.SHORT:
            _fill(row, payload[: len(payload) // 2] + before[len(payload) // 2 :])
        elif fault is BackendFault.SWAP and other is not None and len(other[1]) == len(payload):
            _fill(row, other[1])
            return other[0]
        return seal


def _fill(row: BackendRow, payload: bytes) -> None:
    copy_into(row.pieces, memoryview(payload))


class KillPoint:
    """Kills this process at its `number`-th call: no handler runs, no buffer is flushed."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._lock = threading.Lock()

    def __call__(self, *_where: object) -> None:
        """Count down; kill the process at zero."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
