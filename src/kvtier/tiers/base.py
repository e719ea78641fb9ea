"""The two contracts below the pool: `Tier`, which a manager talks to, and `Backend`, which moves bytes.

    manager (scheduler thread)  ->  Tier  ->  tiers/io_threads  ->  Backend  ->  disk, server, ...

A `Tier` belongs to the scheduler thread: it knows what it holds, takes promotions and demotions, and
reports their results through `poll`. None of its methods blocks except `wait_any` and `close`, and, for
half a second at most, `discard` and `reset`. A `Backend` blocks, knows nothing of requests or policies, and
is called by I/O threads only. Seals are put on and checked between the two.

Rows travel as one record in columns, a `RowJob`, from the manager to the I/O threads and back. The manager
owns the slots of its pool, the tier owns the addresses at which it keeps rows, and the threads own the
outcomes. A row is named by its position in the job.

From the call that takes a job until a result says that a row's memory is free, no other code may write that
memory (promotions) or change it (demotions). Late means failed, not freed: a result may be out while a call
still uses the memory, and a second result then says when that call has ended. Nothing here imports an
engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from kvtier.keys import OffloadKey
from kvtier.metrics import counter, gauge
from kvtier.policies import Ending, Slots
from kvtier.residency import MissReason, OffloadingEvent
from kvtier.tiers.seal import SealScope


class Direction(IntEnum):
    """The direction in which rows move. The lower value goes first."""

    PROMOTE = 0
    DEMOTE = 1


class RowBuffer:
    """The memory of the rows of all jobs: `buffer[slot]` is the memory of the row in a slot of the pool.

    A row is the first `row_bytes` of its slot, and slots lie `slot_bytes` apart. Any thread may index it.
    """

    memory: memoryview | None
    """The whole memory, for backends that register it; `None` if rows do not lie in one memory."""

    def __init__(self, memory: memoryview, slot_bytes: int, row_bytes: int | None = None) -> None:
        self.memory, self._slot_bytes = memory, slot_bytes
        self._row_bytes = slot_bytes if row_bytes is None else row_bytes

    def __getitem__(self, slot: int) -> tuple[memoryview, ...]:
        """Return the pieces of memory of a row, each without gaps."""
        assert self.memory is not None
        start = slot * self._slot_bytes
        return (self.memory[start : start + self._row_bytes],)

    def release(self) -> None:
        """Let go of the memory. No call may use it any more."""
        self.memory = memoryview(b"")


_NO_SCOPE = SealScope("")


def _no_description(_position: int) -> bytes:
    return b""


@dataclass(eq=False, slots=True)
class RowJob:
    """Rows to promote or to demote, in columns and in the order of their prefix: the first are moved first.

    The manager makes the job and fills in the first columns. It chooses `job_id`, unique among its jobs in
    this tier. Rows that have not moved at `deadline` (of the tier's clock, by default `time.monotonic`) are
    late. Promotions always go before demotions; of two jobs of one direction the older goes first.
    """

    job_id: int
    direction: Direction
    keys: list[OffloadKey]
    slots: Slots
    """The slots of the pool from which, or into which, the rows are moved."""
    deadline: float
    describe: Callable[[int], bytes] = _no_description
    """Returns the description for events of the row at a position (opaque). Any thread may call it."""
    tenant: str = ""
    """Whose rows these are, for a tier in which tenants have shares."""
    lent: set[int] = field(init=False)
    """The positions of rows whose memory the tier may use. The manager removes those that are free again:
    those that its lease of the slots has given back.
    """

    addresses: Slots | None = None
    """Where the tier keeps each row, if the tier decides that. Set by the tier, as are the next two."""
    may_exist: frozenset[int] = frozenset()
    """The positions of rows to demote that the backend may have already; it is asked before they are sent.
    """
    scope: SealScope = _NO_SCOPE
    """The owner of the rows' bytes, to which their seals are bound."""

    outcomes: list[MissReason | None] = field(init=False)
    """Why each row was not moved; `None` for a row that was moved, or has not ended. Written by the threads
    that move rows, and for rows that no thread has begun by the tier.
    """
    errors: dict[int, str] = field(default_factory=dict)
    """The errors of failed rows in words for people, by position."""
    given_up: MissReason | None = None
    """Why the whole job was given up. Its calls may go on, and write the true outcomes of their rows."""
    queued: list[int] = field(default_factory=list)
    """The positions of rows that no thread has begun, in order. Kept by `tiers/io_threads`."""
    running: set[RowBatch] = field(default_factory=set)
    """The batches of rows whose end `poll` has not reported. Kept by `tiers/io_threads`."""

    def __post_init__(self) -> None:
        self.lent = set(range(len(self.keys)))
        self.outcomes = [None] * len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def begun(self) -> list[int]:
        """Return the positions of the rows that threads have claimed and `poll` has not reported."""
        return sorted(at for batch in self.running for at in batch.positions)

    def positions_of(self, keys: list[OffloadKey]) -> list[int]:
        """Return the positions of distinct keys of the job that are given in its order."""
        if len(keys) == len(self.keys):
            return list(range(len(keys)))
        positions = {key: at for at, key in enumerate(self.keys)}
        return [positions[key] for key in keys]

    def keys_at(self, positions: list[int]) -> list[OffloadKey]:
        """Return the keys of some rows; of all rows, in the order of the job."""
        keys = self.keys
        return keys if len(positions) == len(keys) else [keys[at] for at in positions]

    def slots_at(self, positions: list[int]) -> Slots:
        """Return the slots of some rows, in the order of `keys_at`."""
        return self.slots if len(positions) == len(self.keys) else self.slots[positions]

    def addresses_at(self, positions: list[int]) -> Slots:
        """Return the addresses of some rows, in the order of `keys_at`."""
        assert self.addresses is not None, "only a tier that has set addresses asks for them"
        return self.addresses if len(positions) == len(self.keys) else self.addresses[positions]


@dataclass(eq=False, slots=True)
class RowBatch:
    """The rows of a job that one I/O thread has claimed for one call of the backend."""

    job: RowJob
    positions: list[int]
    seconds: float = 0.0
    """The time of the call, once it is over."""


@dataclass(eq=False, slots=True)
class TierResult:
    """Rows of a job, by position, that ended alike.

    Every row that the tier took appears in one result. Its memory is free from then on unless `in_use`: the
    row was given up while a call is using its memory. A second result with `returned` then names the row
    when that call has ended; its `outcome` says how, and concerns only the tier.
    """

    job: RowJob
    positions: list[int]
    outcome: MissReason | None
    """Why the rows were not moved; `None` means that they were."""
    in_use: bool = False
    returned: bool = False
    seconds: float = 0.0
    """The time of the I/O; zero if there was none."""
    why: str = ""
    """Explains a failure in words for people."""

    @property
    def keys(self) -> list[OffloadKey]:
        """The keys of the rows."""
        return self.job.keys_at(self.positions)


@dataclass(frozen=True, slots=True)
class TierStats:
    """The state of a tier and its counts so far. Its counters and gauges are metrics, too.

    What it holds, and for how much it has room, is `None` if only a server knows it.
    """

    name: str
    medium: str
    state: str
    """For people: `open`, `suspended`, or the thing that the tier waits for."""
    used: int | None
    """Rows that the tier holds."""
    capacity: int | None
    """Rows that the tier has room for."""
    promote_seconds: float
    """The I/O time of promotions, over all threads."""
    demote_seconds: float
    used_bytes: int | None = gauge(
        "Bytes of the rows that a tier holds; not shown for a server, which does not tell it."
    )
    capacity_bytes: int | None = gauge(
        "Bytes of the rows that an open tier has room for; not shown for a server."
    )
    queued_bytes: int = gauge("Bytes that wait for a tier's I/O.")
    stuck: int = gauge("Rows whose call has not returned although its time was over.")
    suspended: str | None = gauge("1 while a tier gives or takes nothing because its calls failed or hung.")
    """Why the tier gives or takes nothing now; `None` if it works."""
    promoted: int = counter("Rows that a tier has brought into the pool.")
    promoted_bytes: int = counter("Bytes of them.")
    demoted: int = counter("Rows that were written to a tier.")
    demoted_bytes: int = counter("Bytes of them.")
    dropped: int = counter(
        "Rows that a tier had taken and did not write: withdrawn, reset, suspended or too late."
    )
    refused: int = counter(
        "Rows that were offered to a tier and not taken: no room, or beyond the write limit."
    )
    evicted: int = counter("Rows that left a tier for others.")
    failed_checks: int = counter("Rows that did not have the bytes that were sealed.")
    failed: int = counter("Calls on a row that ended with an error.")
    late: int = counter("Rows that a tier did not move before their deadline.")
    questions: int = counter(
        "Questions to a tier that does not know by itself what it holds, one for a prefix."
    )
    round_trips: int = counter("Round trips that these took.")


class Tier(ABC):
    """A place below the pool where rows can live.

    Scheduler thread only; methods block only if they say so.
    """

    name: str
    """The tier's word in the config, e.g. `disk`. Appears in explanations and metrics."""
    medium: str
    """The tier's word in events."""
    prices: Mapping[str, float] = MappingProxyType({})
    """What the caller has learnt of the tier's speed, kept for a later process if the tier can. A caller
    that learns more replaces it. Empty, or an earlier process's, until then.
    """

    # -- asking ------------------------------------------------------------------------------------

    @abstractmethod
    def lookup_many(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Return for each key whether it can be promoted now. Starts no I/O.

        `None` means that it is not known yet, and that the caller should ask again. A tier that is suspended
        or not open answers False for every key; while it opens, for a bounded time, `None`.
        """

    def lookup(self, key: OffloadKey) -> bool | None:
        """Return whether one key can be promoted now."""
        return self.lookup_many((key,))[0]

    @abstractmethod
    def explain(self, key: OffloadKey) -> MissReason | None:
        """Return why a key cannot be promoted, as far as the tier remembers; `None` if it can."""

    def is_open(self) -> bool:
        """Return whether the tier can move rows at all. A suspended tier is open, too."""
        return True

    def takes_rows(self) -> bool:
        """Return whether the tier takes demotions now. If not, offered rows wait."""
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

    @abstractmethod
    def set_buffer(self, buffer: RowBuffer) -> None:
        """Set the memory that holds the rows of all jobs. Called once, before the first job."""

    # -- moving ------------------------------------------------------------------------------------

    @abstractmethod
    def promote(self, job: RowJob) -> None:
        """Fill the memory of each row from the tier. Every job is taken; results come by `poll`.

        An absent row or a suspended tier gives an ordinary result, not an exception. The contents of the
        memory of a row that was not moved are undefined.
        """

    @abstractmethod
    def demote(self, job: RowJob) -> list[int]:
        """Take copies of rows and return the positions that were taken; `poll` returns their results.

        Rows are refused for these reasons, in this order: the row is held or being written, the write limit
        forbids it, no slot is free, or the queue is full (this cuts off the end of the job). The memory of
        a refused row is not used. Other rows may be evicted to make room.
        """

    @abstractmethod
    def withdraw(self, job: RowJob, positions: Sequence[int] | None = None) -> list[int]:
        """Take back the rows of a job (all, or these) that no thread has begun, and return their positions.

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

    def touch(self, keys: Sequence[OffloadKey], ending: Ending | None = None) -> None:
        """Record a use of these chunks, ordered from the head of a prefix. Absent keys are ignored.

        `ending` says how the request that used them ended, if it has.
        """
        return

    def habits(self) -> bytes:
        """Return what the tier's policy has learnt of when chunks come back; nothing if that is nothing."""
        return b""

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
        as `CLEARED`. Removals are announced, in slices if there are many. May block as `discard` does.
        """

    def take_events(self) -> list[OffloadingEvent]:
        """Drain the changes since the last call, in order."""
        return []

    # -- reports and ends --------------------------------------------------------------------------

    @abstractmethod
    def stats(self) -> TierStats:
        """Return the tier's state and counts."""

    @abstractmethod
    def has_pending_work(self) -> bool:
        """Return whether an idle engine should step for this tier: rows are written or announced.

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

        False means that a call still uses the buffer, so that memory must outlive the process's threads.
        Results can be polled afterwards.
        """


class BackendRow(NamedTuple):
    """A row as a backend gets it.

    A piece is bytes without gaps; a row may have several. Pieces that begin and end at multiples of 4,096
    bytes are moved as they are; others may be copied. `place` is the address that the tier chose, for
    backends whose tier decides it (a slot file); other backends go by key. `scope` is the number of the
    row's namespace and epoch; the backend keeps it beside the row. `seal` is stored with the row and is
    empty when reading.
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
        pieces = self.pieces
        return pieces[0].nbytes if len(pieces) == 1 else sum(piece.nbytes for piece in pieces)


class Backend(ABC):
    """Moves the bytes of rows, in batches, and blocks meanwhile. I/O threads call it, several at once.

    Several calls may read a row at the same time; no row is written or deleted while another call uses it
    or its address. Calls release the GIL while they wait. The failure of one row is a value in the answer
    and says nothing about the others; a call may raise `OSError` if all of it failed. After a failed `write`
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
        """Take note of the memory in which most pieces will lie, e.g. to register it.

        Called before any other method.
        """
        return

    @abstractmethod
    def write(self, rows: Sequence[BackendRow]) -> list[OSError | None]:
        """Store rows with their seals; replace existing rows unless `writes_once`.

        The answer for each row is `None` if it is stored, or else the error.
        """

    @abstractmethod
    def read(self, rows: Sequence[BackendRow]) -> list[bytes | OSError | None]:
        """Fill the pieces of each row and return its stored seal, or `None` if there is no such row.

        If the stored value cannot be this row (e.g. its length differs), return an empty seal; the caller
        then deletes the row.
        """

    @abstractmethod
    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        """Return for each row whether it is stored. `OSError` if that cannot be known."""

    @abstractmethod
    def delete(self, rows: Sequence[BackendRow]) -> None:
        """Make rows absent, so that a later process does not find them. Absent rows are ignored."""

    def probe(self) -> None:
        """Raise `OSError` if reading or writing would fail now. Called while the tier is suspended."""
        return

    def close(self) -> None:
        """Release all resources. Idempotent. No other call follows."""
        return
