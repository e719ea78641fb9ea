"""The two contracts below the pool: `Tier`, which a manager talks to, and `Backend`, which moves bytes.

    manager (scheduler thread)  ->  Tier  ->  tiers/io_threads  ->  Backend  ->  disk, server, ...

A `Tier` belongs to the scheduler thread: it knows what it holds, takes promotions and demotions, and tells
by `poll` what became of them. None of its methods blocks except `wait_any` and `close`, and, for half a
second at most, `discard` and `reset`. A `Backend` blocks, knows nothing of requests or policies, and is
called by I/O threads only. Seals are put on and checked between the two.

Memory is lent: from the call that takes a job until a result says that a row's memory is free, nobody else
may write it (promotions) or change it (demotions). Late means failed, not freed: a result may be out while a
call still uses the memory, and a second result then tells when that is over. Nothing here imports an engine.
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
    """The memory of one row of a job, lent to the tier; and what events tell of the chunk, opaque here.

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
    """Rows of one memory, each made when it is looked at: by the thread that moves it, not by who lends it.

    `piece_of` returns the memory of a slot, `describe` what events tell of the n-th row. Any thread may call
    both.
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

    `job_id` is the caller's, unique among its jobs in this tier. At `deadline` (of the tier's clock, by
    default `time.monotonic`) what has not arrived is late. Of two jobs of one direction the lower
    `priority` goes first, then the older; promotions always go before demotions.
    """

    job_id: int
    rows: Sequence[LentRow]
    deadline: float
    priority: int = 0

    @property
    def keys(self) -> list[OffloadKey]:
        """The keys of its rows. To be asked for rather than rows by who needs no more."""
        return self.rows.keys if isinstance(self.rows, LentRows) else [row.key for row in self.rows]


class Outcome(Enum):
    """What became of a row of a job."""

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
    """What became of some rows of a job, all the same.

    Every row that was taken is in one result; its memory is free from then on unless `in_use`, in which
    case it is in a second one, `RETURNED`, when the last call that uses it has ended. `nbytes` and
    `seconds` are those of the I/O, zero where there was none. `why` says more of a failure, in words for
    people.
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
    """Chunks that can be promoted from now on or, `removed`, no more. In the order in which it happened.

    `descriptions` has one for each key where only the tier knows them: after a warm restart. An empty one:
    not known either.
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
    """Not written: no room in the queue, needed elsewhere first, beyond the write limit."""
    FAILED = "could not be written"
    FAILED_CHECK = "failed its check"
    CLEARED = "cleared by a reset"
    LOST = "lost with its files"
    SUSPENDED = "suspended"
    NOT_OPEN = "not open yet"
    """The namespace is not known, records are being read, or another process is the owner."""
    NO_ANSWER = "no answer in time"
    """It was asked whether it has the chunk."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds, and what has happened so far, in rows unless said otherwise."""

    name: str
    medium: str
    state: str
    """`open`, `suspended`, or what it is waiting for; for people."""
    suspended: str | None
    """Why it gives or takes nothing now; `None`: it works."""
    used: int
    capacity: int
    used_bytes: int
    capacity_bytes: int
    promoted: int
    promoted_bytes: int
    promote_seconds: float
    """The I/O time of promotions, over all threads."""
    demoted: int
    demoted_bytes: int
    demote_seconds: float
    refused: int
    """Offered for demotion and not taken: beyond the write limit, or no room in tier or queue."""
    dropped: int
    """Taken for demotion and not written: withdrawn, reset, suspended or too late while queued."""
    evicted: int
    failed_checks: int
    failed: int
    """Calls on a row that ended with an error."""
    late: int
    stuck: int
    """Rows whose call has not returned although their job was late: what is lost until it does."""
    queued_bytes: int
    """Of promotions and demotions that no thread has begun."""
    questions: int = 0
    """Prefixes that a tier was asked about which does not know what it holds."""
    round_trips: int = 0
    """Calls that it took to answer them."""


class Tier(ABC):
    """A place below the pool where rows can live. Scheduler thread only; nothing blocks but what says so."""

    name: str
    """The word of the config: `disk`. In explanations and metrics."""
    medium: str
    """What events call it."""

    # -- asking ------------------------------------------------------------------------------------

    @abstractmethod
    def lookup_many(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Say of each key whether it can be promoted now; `None`: being asked, ask again. Starts no I/O.

        A tier that is suspended or not open has nothing.
        """

    def lookup(self, key: OffloadKey) -> bool | None:
        """Say whether one key can be promoted now."""
        return self.lookup_many((key,))[0]

    def lookup_prefix(self, keys: Sequence[OffloadKey]) -> int | None:
        """Count the leading keys that can be promoted; `None`: the run ends at one that is being asked."""
        for hits, found in enumerate(self.lookup_many(keys)):
            if not found:
                return None if found is None else hits
        return len(keys)

    @abstractmethod
    def explain(self, key: OffloadKey) -> TierMiss | None:
        """Say why a key cannot be promoted, as far as is remembered; `None`: it can."""

    def is_open(self) -> bool:
        """Say whether rows can be moved, suspended or not."""
        return True

    def takes_rows(self) -> bool:
        """Say whether demotions are looked at now. Rows that are offered to one that does not wait."""
        return self.is_open()

    @property
    @abstractmethod
    def promotion_bytes(self) -> int:
        """The bytes of promotions that are queued or on their way: what a further one waits for."""

    def ask(self, keys: Sequence[OffloadKey], deadline: float) -> None:
        """Have it found out which of these chunks, of a prefix from its head on, can be promoted.

        Only a tier that answers `None` needs it. From then on until `deadline` each of them is answered
        `None` or what was found out; at the deadline what is not known is not there. Keys being asked are
        asked once.
        """
        return

    def lend(self, memory: memoryview) -> None:
        """Take note of the memory in which the rows of all jobs lie, before the first job. Once."""
        return

    # -- moving ------------------------------------------------------------------------------------

    @abstractmethod
    def promote(self, job: TierJob) -> None:
        """Fill the memory of each row with what the tier holds. Always taken; results come by `poll`.

        A row that is not held, or a tier that is suspended, is a result like any other. After any outcome
        but `DONE` the memory holds no particular bytes.
        """

    @abstractmethod
    def demote(self, job: TierJob) -> list[OffloadKey]:
        """Take copies of rows, and return the keys that were taken; of those, results come by `poll`.

        Not taken, in this order, are: what is held or being written, what the write limit forbids, what
        finds no slot, and the end of the job if the queue is full. Their memory is not used. Others may be
        evicted for it.
        """

    @abstractmethod
    def withdraw(self, job_id: int, keys: Sequence[OffloadKey] | None = None) -> list[OffloadKey]:
        """Take back those rows of a job (all, or these) that no thread has begun, and return their keys.

        Their memory is free at once and no result follows. For demotions whose slot in the pool is needed,
        and promotions that nobody waits for.
        """

    @abstractmethod
    def poll(self) -> list[TierResult]:
        """Take what has become of jobs since the last call, and let the tier do what falls due. Once a step.

        Deadlines, suspension, probes and slices of announcements are noticed here, so call it when idle,
        too, whenever the engine steps.
        """

    # -- what is held ------------------------------------------------------------------------------

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note a use of these chunks, ordered from the head of a prefix. Absent keys are ignored."""
        return

    @abstractmethod
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Make chunks absent here, because their bytes are wrong. They may be demoted again at once.

        May block, for half a second at most, so that a kill right after this does not bring them back.
        """

    @abstractmethod
    def reset(self, suffix: str) -> None:
        """Make everything absent, for good: no row from before comes back, in this process or a later one.

        Rows from now on belong to the namespace with this suffix, which no other reset has had. Jobs from
        before end as `RESET`. Removals are announced. May block as `discard` does.
        """

    def take_events(self) -> list[TierChange]:
        """Drain the changes since the last call, in order."""
        return []

    # -- prices ------------------------------------------------------------------------------------

    def learn(self, prices: Mapping[str, float]) -> None:
        """Keep what the caller has learnt of this tier, for a later process, in place of what was kept."""
        return

    def learnt(self) -> dict[str, float]:
        """Return what this process, or one before it, has learnt; empty if nothing is known (yet)."""
        return {}

    # -- reports and ends --------------------------------------------------------------------------

    @abstractmethod
    def stats(self) -> TierStats:
        """Count what is held and what has happened."""

    @abstractmethod
    def has_pending_work(self) -> bool:
        """Say whether an idle engine should step for this tier: demotions or announcements are under way.

        True only while one was taken or has ended within the last second; never for stuck calls and
        probes, so that a hung disk does not keep an idle engine stepping.
        """

    @abstractmethod
    def wait_any(self, timeout: float) -> bool:
        """Block until `poll` may have something to tell, for `timeout` seconds at most. For facades."""

    @abstractmethod
    def check(self) -> None:
        """Raise `IntegrityError` if an invariant is broken."""

    @abstractmethod
    def close(self, timeout: float = 5.0) -> bool:
        """End: write what is queued while there is time, then give up the rest. Blocks; idempotent.

        False: a call still uses memory that was lent, so that memory must outlive the process's threads.
        Results can be polled afterwards.
        """


class BackendRow(NamedTuple):
    """A row as a backend gets it.

    `place` is where its tier has put it, for backends whose tier decides that (a slot file); others go by
    key. `scope` is the number of the namespace and epoch that the row belongs to, to be kept beside it.
    `seal` is to be stored with it; empty when reading.
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
    """Moves the bytes of rows, in batches, and blocks while it does. Any I/O thread; several at once.

    Rows may be read by several calls at once; a row is never written or deleted beside another call about
    it or about its place. Calls release the GIL while they wait. A failure of one row is a value in the
    answer and says nothing of the others; a call may raise `OSError` if all of it failed. After a failed
    `write` the row is absent, old or new, never a mixture that its seal would not show. A backend makes no
    promise about the bytes: whoever reads checks the seal.
    """

    contains_batch: int = 1024
    """How many rows one call of `contains` asks about in the time of one. With 1, whoever asks bisects."""
    writes_once: bool = False
    """`write` leaves a row that is there as it is, and says it is stored: a bad one has to be deleted."""
    call_bytes: int = 2 << 20
    """How much a call should move: enough that small rows cost few calls, little enough that a
    job spreads.
    """

    def lend(self, memory: memoryview) -> None:
        """Take note of the memory in which most pieces will lie, e.g. to register it.

        Before any other call.
        """
        return

    @abstractmethod
    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        """Store rows with their seals, replacing what is there unless `writes_once`.

        `None` for each stored.
        """

    @abstractmethod
    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        """Fill the pieces of each row. Return the seal it was stored with; `None`: there is no such row.

        Of what is there and cannot be this row, as by its length, return an empty seal: it is then deleted.
        """

    @abstractmethod
    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        """Say of each row whether it is there. `OSError` if that cannot be known."""

    @abstractmethod
    def delete(self, rows: Sequence[BackendRow]) -> None:
        """Make rows absent, so that a later process does not find them. Absent ones are left alone."""

    def probe(self) -> None:
        """Raise `OSError` if reading or writing would fail now. For a tier that is suspended."""
        return

    def close(self) -> None:
        """Release what is held. Idempotent. No other call is made from then on."""
        return
