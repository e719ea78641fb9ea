"""The two contracts below the pool: `Tier`, which a manager talks to, and `Backend`, which moves bytes.

    manager (scheduler thread)  ->  Tier  ->  tiers/io_threads  ->  Backend  ->  disk, server, ...

A `Tier` belongs to the scheduler thread: it knows what it holds, takes promotions and demotions, and
reports their results through `poll`. None of its methods blocks except `wait_any` and `close`, and, for
half a second at most, `discard` and `reset`. A `Backend` blocks, knows nothing of requests or policies, and
is called by I/O threads only. Seals are put on and checked between the two.

Memory is lent: from the call that takes a job until a result says that a row's memory is free, no other
code may write that memory (promotions) or change it (demotions). Late means failed, not freed: a result may
be out while a call still uses the memory, and a second result then says when that call has ended. Nothing
here imports an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, overload

from kvtier.keys import OffloadKey

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_STORAGE",
    "Backend",
    "BackendRow",
    "LentRow",
    "LentRows",
    "Outcome",
    "Tier",
    "TierChange",
    "TierJob",
    "TierMiss",
    "TierResult",
    "TierStats",
]

MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


def _total_bytes(pieces: tuple[memoryview, ...]) -> int:
    return pieces[0].nbytes if len(pieces) == 1 else sum(piece.nbytes for piece in pieces)


class LentRow(NamedTuple):
    """The memory of one row of a job, lent to the tier, and the chunk's description for events (opaque).

    A piece is bytes without gaps (`array.data` of a numpy row); a row may have several, e.g. K and V apart.
    Pieces that begin and end at multiples of 4,096 bytes are moved as they are; others may be copied.
    """

    key: OffloadKey
    pieces: tuple[memoryview, ...]
    description: bytes = b""

    @property
    def nbytes(self) -> int:
        """The bytes of all pieces."""
        return _total_bytes(self.pieces)


class LentRows(Sequence[LentRow]):
    """Rows that share one memory; the thread that moves a row builds it, not the thread that lends it.

    `piece_of` returns the memory of a slot, `describe` the n-th row's description for events. Any thread
    may call both.
    """

    __slots__ = ("_describe", "_piece_of", "_slots", "keys")

    def __init__(
        self,
        keys: list[OffloadKey],
        slots: list[int],
        piece_of: Callable[[int], memoryview],
        describe: Callable[[int], bytes] = lambda at: b"",
    ) -> None:
        self.keys, self._slots, self._piece_of, self._describe = keys, slots, piece_of, describe

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> LentRow: ...
    @overload
    def __getitem__(self, at: slice) -> list[LentRow]: ...
    def __getitem__(self, at: int | slice) -> LentRow | list[LentRow]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        return LentRow(self.keys[at], (self._piece_of(self._slots[at]),), self._describe(at))


@dataclass(frozen=True, slots=True)
class TierJob:
    """Rows to promote or to demote, in the order of their prefix: the first are moved first.

    The caller chooses `job_id`, unique among its jobs in this tier. Rows that have not arrived at
    `deadline` (of the tier's clock, by default `time.monotonic`) are late. Of two jobs of one direction the
    one with the lower `priority` goes first, then the older; promotions always go before demotions.
    """

    job_id: int
    rows: Sequence[LentRow]
    deadline: float

    @property
    def keys(self) -> list[OffloadKey]:
        """The keys of its rows. Cheaper than `rows` for callers that need only keys."""
        return self.rows.keys if isinstance(self.rows, LentRows) else [row.key for row in self.rows]


class Outcome(Enum):
    """The result of one row of a job."""

    DONE = "done"
    ABSENT = "not held"
    FAILED_CHECK = "failed its check"
    FAILED = "could not be read or written"
    LATE = "too slow"
    SUSPENDED = "suspended"
    RESET = "cleared by a reset"
    RETURNED = "its memory is free"
    """Follows a result whose memory was still in use."""


@dataclass(frozen=True, slots=True)
class TierResult:
    """One outcome, shared by some rows of a job.

    Every row that the tier took appears in one result. Its memory is free from then on unless `in_use`;
    then a second result, `RETURNED`, names the row when the last call that uses its memory has ended.
    `nbytes` and `seconds` measure the I/O and are zero if there was none. `why` explains a failure in words
    for people.
    """

    job_id: int
    keys: tuple[OffloadKey, ...]
    outcome: Outcome
    in_use: bool = False
    nbytes: int = 0
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class TierChange:
    """Chunks that can be promoted from now on or, if `removed`, no longer can. Changes come in order.

    `descriptions` has one entry per key if only the tier knows them (after a warm restart). An empty entry
    means that the tier does not know it either.
    """

    keys: tuple[OffloadKey, ...]
    medium: str
    removed: bool
    descriptions: tuple[bytes, ...] | None = None


class TierMiss(Enum):
    """Why a tier does not have a chunk, or has it and cannot give it."""

    NEVER_STORED = "never stored"
    WRITING = "still being written"
    EVICTED = "evicted"
    REFUSED = "refused"
    """Not written: the queue was full, the slot was needed first, or the write limit was reached."""
    FAILED = "could not be written"
    FAILED_CHECK = "failed its check"
    CLEARED = "cleared by a reset"
    LOST = "lost with its files"
    SUSPENDED = "suspended"
    NOT_OPEN = "not open yet"
    """The namespace is not known, records are being read, or another process is the owner."""
    NO_ANSWER = "no answer in time"
    """The tier was asked whether it has the chunk."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """The state of a tier and its counts so far, in rows unless said otherwise."""

    name: str
    medium: str
    state: str
    """For people: `open`, `suspended`, or the thing that the tier waits for."""
    suspended: str | None
    """Why the tier gives or takes nothing now; `None` if it works."""
    used: int | None
    """`None`, as for the next three: a server does not tell what it holds, nor for how much it has room."""
    capacity: int | None
    used_bytes: int | None
    capacity_bytes: int | None
    promoted: int
    promoted_bytes: int
    promote_seconds: float
    """The I/O time of promotions, over all threads."""
    demoted: int
    demoted_bytes: int
    demote_seconds: float
    refused: int
    """Rows offered for demotion and not taken: beyond the write limit, or no room in tier or queue."""
    dropped: int
    """Rows taken for demotion and not written: withdrawn, reset, suspended or too late while queued."""
    evicted: int
    failed_checks: int
    failed: int
    """Calls on a row that ended with an error."""
    late: int
    stuck: int
    """Rows whose call has not returned although their job was late. Their memory is lost until it does."""
    queued_bytes: int
    """Bytes of promotions and demotions that no thread has begun."""
    questions: int = 0
    """Prefixes that were asked about, for a tier that does not know what it holds."""
    round_trips: int = 0
    """Calls to the server that answered those questions."""


class Tier(ABC):
    """A place below the pool where rows can live.

    Scheduler thread only; methods block only if they say so.
    """

    name: str
    """The tier's word in the config, e.g. `disk`. Appears in explanations and metrics."""
    medium: str
    """The tier's word in events."""

    # -- asking ------------------------------------------------------------------------------------

    @abstractmethod
    def lookup_many(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Say for each key whether it can be promoted now; `None`: not known yet, ask again. Starts no I/O.

        A tier that is suspended or not open answers False for every key; while it opens, for a bounded time,
        `None`.
        """

    def lookup(self, key: OffloadKey) -> bool | None:
        """Say whether one key can be promoted now."""
        return self.lookup_many((key,))[0]

    def lookup_prefix(self, keys: Sequence[OffloadKey]) -> int | None:
        """Count the leading keys that can be promoted; `None`: the run ends at an unknown key."""
        for hits, found in enumerate(self.lookup_many(keys)):
            if not found:
                return None if found is None else hits
        return len(keys)

    @abstractmethod
    def explain(self, key: OffloadKey) -> TierMiss | None:
        """Say why a key cannot be promoted, as far as the tier remembers; `None`: it can."""

    def is_open(self) -> bool:
        """Say whether the tier can move rows at all. A suspended tier is open, too."""
        return True

    def takes_rows(self) -> bool:
        """Say whether the tier takes demotions now. If not, offered rows wait."""
        return self.is_open()

    @property
    @abstractmethod
    def promotion_bytes(self) -> int:
        """Bytes of promotions that are queued or running: a further promotion waits for these."""

    def ask(self, keys: Sequence[OffloadKey], deadline: float) -> None:
        """Start to find out which of these chunks, a prefix from its head on, can be promoted.

        Only a tier that answers `None` when it is open needs it. Until `deadline`, a lookup of these chunks
        answers `None` or the result; after the deadline, a chunk without a result counts as absent. A key is
        asked about only once at a time.
        """
        return

    def lend(self, memory: memoryview) -> None:
        """Note the memory that holds the rows of all jobs. Called once, before the first job."""
        return

    # -- moving ------------------------------------------------------------------------------------

    @abstractmethod
    def promote(self, job: TierJob) -> None:
        """Fill the memory of each row from the tier. Every job is taken; results come by `poll`.

        An absent row or a suspended tier gives an ordinary result, not an exception. After any outcome but
        `DONE` the contents of the memory are undefined.
        """

    @abstractmethod
    def demote(self, job: TierJob) -> list[OffloadKey]:
        """Take copies of rows and return the keys that were taken; `poll` returns their results.

        Rows are refused for these reasons, in this order: the row is held or being written, the write limit
        forbids it, no slot is free, or the queue is full (this cuts off the end of the job). The memory of
        a refused row is not used. Other rows may be evicted to make room.
        """

    @abstractmethod
    def withdraw(self, job_id: int, keys: Sequence[OffloadKey] | None = None) -> list[OffloadKey]:
        """Take back the rows of a job (all, or these) that no thread has begun, and return their keys.

        Their memory is free at once and no result follows. Used for demotions whose pool slot is needed,
        and for promotions that no request waits for any longer.
        """

    @abstractmethod
    def poll(self) -> list[TierResult]:
        """Return the results of jobs since the last call, and do the work that is due. Call it once a step.

        It handles deadlines, suspension, probes and slices of announcements. So an idle engine must call
        it, too, whenever it steps.
        """

    # -- held rows ---------------------------------------------------------------------------------

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note a use of these chunks, ordered from the head of a prefix. Absent keys are ignored."""
        return

    @abstractmethod
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Make chunks absent here because their bytes are wrong. They may be demoted again at once.

        May block, for half a second at most, so that the rows do not come back if the process is killed
        right after the call.
        """

    @abstractmethod
    def reset(self, suffix: str) -> None:
        """Make everything absent for good: no earlier row comes back, in this process or a later one.

        Later rows belong to the namespace with this suffix, which no other reset has used. Earlier jobs end
        as `RESET`. Removals are announced, in slices if there are many. May block as `discard` does.
        """

    def take_events(self) -> list[TierChange]:
        """Drain the changes since the last call, in order."""
        return []

    # -- prices ------------------------------------------------------------------------------------

    def learn(self, prices: Mapping[str, float]) -> None:
        """Keep the prices that the caller has learnt, for a later process.

        Replaces the prices kept before.
        """
        return

    def learnt(self) -> dict[str, float]:
        """Return the prices that this process, or an earlier one, has learnt; empty if there are none."""
        return {}

    # -- reports and ends --------------------------------------------------------------------------

    @abstractmethod
    def stats(self) -> TierStats:
        """Return the tier's state and counts."""

    @abstractmethod
    def has_pending_work(self) -> bool:
        """Say whether an idle engine should step for this tier: demotions or announcements are under way.

        True only if one was taken or has ended within the last second. Stuck calls and probes never count,
        so that a hung disk does not keep an idle engine stepping.
        """

    @abstractmethod
    def wait_any(self, timeout: float) -> bool:
        """Block until `poll` may have a result, for `timeout` seconds at most. For synchronous callers."""

    @abstractmethod
    def check(self) -> None:
        """Raise `IntegrityError` if an invariant is broken."""

    @abstractmethod
    def close(self, timeout: float = 5.0) -> bool:
        """End the tier: write queued rows while there is time, then give up the rest. Blocks; idempotent.

        False means that a call still uses lent memory, so that memory must outlive the process's threads.
        Results can be polled afterwards.
        """


class BackendRow(NamedTuple):
    """A row as a backend gets it.

    `place` is the position that the tier chose, for backends whose tier decides it (a slot file); other
    backends go by key. `scope` is the number of the row's namespace and epoch; the backend keeps it beside
    the row. `seal` is stored with the row and is empty when reading.
    """

    key: OffloadKey
    pieces: tuple[memoryview, ...]
    place: int = -1
    scope: int = 0
    seal: bytes = b""
    description: bytes = b""

    @property
    def nbytes(self) -> int:
        """The bytes of all pieces."""
        return _total_bytes(self.pieces)


class Backend(ABC):
    """Moves the bytes of rows, in batches, and blocks meanwhile. I/O threads call it, several at once.

    Several calls may read a row at the same time; no row is written or deleted while another call uses it
    or its place. Calls release the GIL while they wait. The failure of one row is a value in the answer and
    says nothing about the others; a call may raise `OSError` if all of it failed. After a failed `write`
    the row is absent, old or new, never a mixture that its seal would not reveal. A backend makes no
    promise about the bytes: the reader checks the seal.
    """

    contains_batch: int = 1024
    """Rows that one call of `contains` handles in the time of one row. With 1, the caller bisects."""
    writes_once: bool = False
    """`write` keeps an existing row and reports it as stored. So a bad row has to be deleted first."""
    call_bytes: int = 2 << 20
    """The bytes that one call should move.

    Enough that small rows need few calls; few enough that a job spreads over threads.
    """

    def lend(self, memory: memoryview) -> None:
        """Note the memory in which most pieces will lie, e.g. to register it.

        Called before any other method.
        """
        return

    @abstractmethod
    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        """Store rows with their seals; replace existing rows unless `writes_once`.

        `None`: the row is stored.
        """

    @abstractmethod
    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        """Fill the pieces of each row and return its stored seal; `None`: there is no such row.

        If the stored value cannot be this row (e.g. its length differs), return an empty seal; the caller
        then deletes the row.
        """

    @abstractmethod
    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        """Say for each row whether it is stored. `OSError` if that cannot be known."""

    @abstractmethod
    def delete(self, rows: Sequence[BackendRow]) -> None:
        """Make rows absent, so that a later process does not find them. Absent rows are ignored."""

    def probe(self) -> None:
        """Raise `OSError` if reading or writing would fail now. Called while the tier is suspended."""
        return

    def close(self) -> None:
        """Release all resources. Idempotent. No other call follows."""
        return
