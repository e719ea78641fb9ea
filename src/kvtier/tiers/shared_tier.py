"""`SharedTier`: rows on a server that other engines use too, and that evicts as it likes.

The tier does not know what it holds. It asks about a prefix on I/O threads (`ask`) and remembers answers
for a while, a yes for longer than a no; a row that this process has written or read counts as a yes. An
answer may be stale: a stale yes costs one failed promotion, and puts every older yes in doubt; a stale no
means computing a chunk that another engine has just written. Nothing is announced, because nothing about
this tier is exact (docs/decisions/0014).

Rows go by key, and names on the server by scope and key: engines with the same namespace and seal key share
rows, and after a reset an engine has names of its own. A row known to be stored is not written again;
before a large row is sent, the server is asked for it. A server that does not answer delays a request by
one deadline; while such a call is open, and while the tier is suspended, an unknown chunk counts as absent.
Once the memory of the rows is set, an I/O thread opens the backend, and retries with growing back-off until
that works. Scheduler thread only, except for functions that say that they run on an I/O thread.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from typing import NamedTuple

from kvtier.config import format_size
from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey, get_offload_group_idx
from kvtier.residency import MissReason
from kvtier.tiers.base import Backend, BackendRow, Direction, RowBuffer, RowJob, TierResult
from kvtier.tiers.io_threads import say_error
from kvtier.tiers.io_tier import REMEMBERED, IOTier
from kvtier.tiers.remote_lookups import InFlightLookup, InFlightLookups, PresenceCache
from kvtier.tiers.seal import SealKey, SealScope

_LONGEST_BACKOFF = 5.0
"""The most seconds between two probes of a suspended server: a server that works again is used soon."""
_SLOW_FAILURE = 0.1
"""A failure this slow delays requests, so a single one suspends. A few quick failures are tolerated."""
_LARGE_ROW = 64 << 10
"""From this size on, sending a row takes longer than asking whether it is there."""


class SharedTier(IOTier):
    """Rows of one namespace on a server. `namespace()` is called until it returns a name."""

    def __init__(
        self,
        name: str,
        row_bytes: int,
        open_backend: Callable[[], Backend],
        *,
        namespace: Callable[[], str | None],
        threads: int = 4,
        max_in_flight: int = 16 << 20,
        max_queued: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
        check_seals: bool = True,
        seal_key: SealKey | None = None,
        place: str = "a server",
        sparse_groups: frozenset[int] = frozenset(),
    ) -> None:
        """An I/O thread calls `open_backend`, which may block and may fail.

        With a `seal_key` only rows sealed with that key are accepted; their names depend on it, too. `place`
        names the server in the log. `sparse_groups` are those of which single chunks of a prefix are stored.
        """
        super().__init__(
            name,
            row_bytes,
            threads=threads,
            max_in_flight=max(max_in_flight, threads * row_bytes),
            max_queued=max_queued,
            clock=clock,
            check_seals=check_seals,
            longest_backoff=_LONGEST_BACKOFF,
            slow_failure=_SLOW_FAILURE,
            seal_key=seal_key,
        )
        self._open_backend, self._namespace, self._seal_key = open_backend, namespace, seal_key
        self._num_threads, self._sparse_groups = threads, sparse_groups
        self._server = place
        self._unasked: list[tuple[Sequence[OffloadKey], float]] = []  # lookups from before it was open
        self._suffix = ""  # of the last reset
        self._known, self._lookups = PresenceCache(REMEMBERED, clock), InFlightLookups()
        # Rows of the current scope that a call works on. No row is written or deleted beside another call.
        self._writing: set[OffloadKey] = set()
        self._reading: Counter[OffloadKey] = Counter()
        self._deleting: set[OffloadKey] = set()
        self._unwanted: set[OffloadKey] = set()  # rows to delete as soon as no call works on them
        self.undeleted: str | None = None
        """Why the last failed deletion failed. The rows are wrong, and a read of them fails its check.
        """

    # -- opening -----------------------------------------------------------------------------------

    def set_buffer(self, buffer: RowBuffer) -> None:
        super().set_buffer(buffer)
        self._open_soon()

    def wait_open(self, timeout: float = 30.0) -> bool:
        """Block as `IOTier.wait_open` does. If no memory was set before, the backend is not told of any."""
        self._open_soon()
        return super().wait_open(timeout)

    def _open_soon(self) -> None:
        """Begin to open the backend, unless that has begun."""
        if not self._opening.is_running and not self.is_open() and not self._closed:
            self._begin_opening(self._open_once, self._use)

    def _open_once(self) -> tuple[Backend, str]:
        """Open the backend, tell it which memory holds the rows, and await the namespace.

        On an I/O thread.
        """
        backend, buffer = self._open_backend(), self._io.buffer
        try:
            if buffer is not None and buffer.memory is not None:
                backend.lend(buffer.memory)
        except BaseException:
            backend.close()
            raise
        self._releases.add(backend.close)
        return backend, self._await_namespace(self._namespace)

    def _use(self, opened: tuple[Backend, str]) -> None:
        """Take over what was opened, and ask what was to be asked once the tier is open."""
        self._io.backend, namespace = opened
        self._scope = SealScope(namespace, suffix=self._suffix, seal_key=self._seal_key)
        size = format_size(self.row_bytes)
        self._log_open(self._server, f"rows of {size}; only the server knows how many it holds and may hold")
        unasked, self._unasked = self._unasked, []
        for keys, deadline in unasked:
            self.ask(keys, deadline)

    # -- asking ------------------------------------------------------------------------------------

    def lookup_many(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        self._take_opened()
        if not self._is_readable():
            return [None if self.is_awaited() else False] * len(keys)
        now, may_ask = self._clock(), not self._lookups.late()
        found = self._known.look_up(keys, now)
        for at, key in enumerate(keys) if None in found else ():
            if found[at] is None:
                lookup = self._lookups.get(key)
                may_come = may_ask if lookup is None else now < lookup.deadline
                found[at] = None if may_come else False
        return found

    def ask(self, keys: Sequence[OffloadKey], deadline: float) -> None:
        if self.is_awaited():
            self._unasked.append((keys, deadline))
        if not self._is_readable() or self._lookups.late():
            return
        new: list[OffloadKey] = []
        for key, found in zip(keys, self.lookup_many(keys), strict=True):
            if (lookup := self._lookups.get(key)) is not None:
                lookup.deadline = max(lookup.deadline, deadline)
            elif found is None:
                new.append(key)
        if new:
            lookup = self._lookups.add(new, self._scope.number, deadline)
            self._counts["questions"] += 1
            self._io.call(
                lambda: self._search(lookup), lambda value, error: self._answer(lookup, value, error)
            )

    def _search(self, lookup: InFlightLookup) -> FoundPrefix | None:
        """Search for the chunks, unless the lookup is late already. On an I/O thread."""
        began, backend = self._clock(), self._io.backend
        if lookup.is_late or backend is None:
            return None
        lookup.began = began
        rows = [BackendRow(key, (), scope=lookup.scope) for key in lookup.keys]
        calls = CallsAtOnce(backend.contains, backend.contains_batch, self._num_threads, self._io.run_soon)
        try:
            is_wanted, sparse = (lambda: not lookup.is_late), self._sparse_groups
            return search_prefix(calls.contains, rows, calls.width, is_wanted, sparse)
        finally:
            lookup.seconds = self._clock() - began

    def _answer(
        self, lookup: InFlightLookup, found: FoundPrefix | None, error: BaseException | None
    ) -> None:
        """Process the answer to a lookup, even a late one."""
        self._lookups.forget(lookup)
        if lookup.scope != self._scope.number:
            return
        if error is not None:
            self._health[Direction.PROMOTE].record_failure(say_error(error), lookup.seconds)
            self._record_absent(lookup.keys, MissReason.TOO_SLOW)
        elif found is not None:
            self._counts["round_trips"] += found.round_trips
            self._health[Direction.PROMOTE].record_success()
            self._record_present(
                [key for key, is_there in zip(lookup.keys, found.there, strict=True) if is_there]
            )
            absent = [key for key, is_there in zip(lookup.keys, found.there, strict=True) if not is_there]
            if not lookup.is_late:  # else some rounds were skipped
                evicted = list(self._known.were_there(absent))
                self._record_absent(absent, MissReason.NEVER_STORED)
                self._record_absent(evicted, MissReason.EVICTED)

    def _look_after_lookups(self) -> None:
        """Give up late lookups. A server that still does not answer is suspended."""
        if not len(self._lookups):
            return
        if unanswered := self._lookups.take_late(self._clock()):
            self._record_absent(unanswered, MissReason.TOO_SLOW)
        for lookup in self._lookups.late():
            if self._is_stuck(lookup.began):
                self._suspend("a lookup is not answered")
                self._lookups.forget(lookup)  # it must not block others after a successful probe

    def _record_present(self, keys: list[OffloadKey]) -> None:
        self._known.record(keys, is_there=True)

    def _record_absent(self, keys: list[OffloadKey], reason: MissReason) -> None:
        self._known.record(keys, is_there=False)
        self._misses.record(keys, reason)

    def explain(self, key: OffloadKey) -> MissReason | None:
        if not self.is_open():
            return MissReason.NOT_OPEN
        if key in self._writing:
            return MissReason.WRITING
        known = self._known.last(key)
        if known is False:
            return self._misses.get(key) or MissReason.NEVER_STORED
        if self._is_suspended(Direction.PROMOTE):
            return MissReason.SUSPENDED
        if known:
            return None
        return MissReason.TOO_SLOW if self._lookups.get(key) is not None else self._misses.get(key)

    def _is_readable(self) -> bool:
        return self.is_open() and not self._closed and not self._is_suspended(Direction.PROMOTE)

    # -- moving ------------------------------------------------------------------------------------

    def promote(self, job: RowJob) -> None:
        if not self._is_readable():
            reason = MissReason.SUSPENDED if self.is_open() else MissReason.NOT_OPEN
            self._refuse(job, range(len(job)), reason)
            return
        busy = self._writing | self._deleting
        free = [at for at, key in enumerate(job.keys) if key not in busy]
        if len(free) < len(job):
            self._refuse(job, [at for at, key in enumerate(job.keys) if key in busy], MissReason.EVICTED)
        self._reading.update(job.keys_at(free))
        self._submit(job, free)

    def demote(self, job: RowJob) -> list[int]:
        keys = list(dict.fromkeys(job.keys))
        if not self.takes_rows():
            self._record_refused(keys)
            return []
        held = self._writing | self._deleting | self._reading.keys() | self._known.were_there(keys)
        missing = [key for key in keys if key not in held]
        wanted = self._within_bounds(missing)
        self._record_refused(missing[len(wanted) :])
        positions = job.positions_of(wanted)
        if wanted:
            self._writing.update(wanted)
            self._last_progress = now = self._clock()
            if self.row_bytes >= _LARGE_ROW:
                absent = self._known.were_just_absent(wanted, now)
                job.may_exist = frozenset([at for at in positions if job.keys[at] not in absent])
            self._submit(job, positions)
        return positions

    def poll(self) -> list[TierResult]:
        self._look_after_lookups()
        return super().poll()

    # -- outcomes of rows --------------------------------------------------------------------------

    def _settle(self, result: TierResult) -> None:
        super()._settle(result)
        if result.in_use and result.job.direction is Direction.PROMOTE:
            self._record_absent(self._current(result.job, result.positions), MissReason.TOO_SLOW)

    def _settle_read(self, result: TierResult) -> None:
        outcome, current = result.outcome, self._let_go(result.job, result.positions)
        if outcome is None:
            self._record_present(current)
        elif outcome is MissReason.FAILED:
            self._record_absent(current, MissReason.FAILED)
            self._delete(current)
        elif outcome is MissReason.EVICTED:
            self._counts["evicted"] += len(result.positions)
            # The server may have lost all rows; the rows behind these were not even read.
            self._known.doubt()
            self._record_absent(current, MissReason.EVICTED)
        elif outcome is MissReason.IO_FAILED:
            self._record_absent(current, MissReason.IO_FAILED)
        elif outcome is not MissReason.REFUSED:
            self._record_absent(current, MissReason.TOO_SLOW)

    def _settle_write(self, result: TierResult) -> None:
        outcome, current = result.outcome, self._let_go(result.job, result.positions)
        if outcome is None:
            self._record_present([key for key in current if key not in self._deleting])
        else:
            is_failed = outcome is MissReason.IO_FAILED
            self._misses.record(current, MissReason.IO_FAILED if is_failed else MissReason.REFUSED)

    def _current(self, job: RowJob, positions: list[int]) -> list[OffloadKey]:
        """Return the keys of rows, or none if they are from before a reset."""
        return job.keys_at(positions) if job.scope.number == self._scope.number else []

    def _let_go(self, job: RowJob, positions: list[int]) -> list[OffloadKey]:
        """Record that no call works on rows any more.

        Return their keys, or none if they are from before a reset.
        """
        current = self._current(job, positions)
        if job.direction is Direction.DEMOTE:
            self._writing.difference_update(current)
        else:
            for key in current:
                self._reading[key] -= 1
                if not self._reading[key]:
                    self._reading.pop(key)
        if self._unwanted:
            self._delete([key for key in current if key in self._unwanted])
        return current

    # -- held rows ---------------------------------------------------------------------------------

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Make chunks with wrong bytes absent; an I/O thread deletes them, and the caller does not wait.

        If the process is killed before the deletion, the rows are still there. Such a row fails its check
        again, is a miss again, and is deleted by the next reader.
        """
        self._record_absent(list(keys), MissReason.FAILED)
        if self.is_open():
            self._delete(list(keys))

    def _delete(self, keys: list[OffloadKey]) -> None:
        """Delete rows with wrong bytes, as soon as no call works on them.

        If that fails, readers still see that the bytes are wrong.
        """
        busy = {key for key in keys if key in self._writing or key in self._reading}
        self._unwanted.update(busy)
        free = [key for key in keys if key not in busy and key not in self._deleting]
        backend = self._io.backend
        if not free or backend is None or self._closed:
            return
        self._unwanted.difference_update(free)
        self._deleting.update(free)
        scope = self._scope.number
        rows = [BackendRow(key, (), scope=scope) for key in free]

        def end(_value: object, error: BaseException | None) -> None:
            if error is not None:
                self.undeleted = say_error(error)
            if scope == self._scope.number:
                self._deleting.difference_update(free)

        self._io.call(lambda: backend.delete(rows), end)

    def reset(self, suffix: str) -> None:
        """Use new names from now on: the rows of other engines stay as they are."""
        self._suffix = suffix
        self._scope = SealScope(self._scope.namespace, suffix=suffix, seal_key=self._seal_key)
        self._misses.record(list(self._known), MissReason.CLEARED)
        self._known.clear()
        for rows in (self._writing, self._deleting, self._unwanted, self._reading):
            rows.clear()
        self._lookups.forget_chunks()
        self._io.give_up(MissReason.CLEARED)

    # -- reports and ends --------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        self._lookups.check()
        for holds, what in (
            (self._writing.isdisjoint(self._reading), "no row is written and read at once"),
            (
                self._deleting.isdisjoint(self._writing | self._reading.keys()),
                "no row is deleted beside a call",
            ),
            (self._unwanted <= self._writing | self._reading.keys(), "unwanted rows are in use"),
        ):
            if not holds:
                raise IntegrityError(f"{self.name} tier: expected that {what}")

    def close(self, timeout: float = 5.0) -> bool:
        ended = super().close(timeout)
        if ended:
            self._io.backend = None
        return ended


Contains = Callable[[Sequence[BackendRow]], list[bool]]


class FoundPrefix(NamedTuple):
    """Whether each chunk is stored, and the number of sequential calls that it took to find out."""

    there: list[bool]
    round_trips: int


def search_prefix(
    contains: Contains,
    rows: Sequence[BackendRow],
    width: int,
    is_wanted: Callable[[], bool] = lambda: True,
    sparse_groups: Set[int] = frozenset(),
) -> FoundPrefix:
    """Find out in few round trips which rows of a prefix are there, with calls of `width` rows at most.

    A prefix is stored from its head on, so the stored chunks are usually a run from the head. If one call
    can ask about all chunks, it does, and sees gaps. Otherwise the search asks about the first chunk first,
    since most prompts are new, and then searches for the end of the run: each round asks about chunks at
    even distances and leaves one interval between two of them. It does not notice a gap before that end
    (other engines' rows may have evicted a chunk): the read of that chunk fails then. Rows of several groups
    are searched group by group if one call cannot take all. Of `sparse_groups` single chunks are stored, so
    all are asked about, from the tail: one near the tail is worth most. Once the answer is no longer wanted,
    no further call is made, and chunks not known by then count as absent. Any thread; it blocks.
    """
    if not rows:
        return FoundPrefix([], 0)
    if len(rows) <= width:
        return FoundPrefix(contains(rows), 1)
    by_group: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        by_group.setdefault(get_offload_group_idx(row.key), []).append(at)
    there, round_trips = [False] * len(rows), 0
    for group, positions in by_group.items():
        search = _search_all if group in sparse_groups else _search_run
        found = search(contains, [rows[at] for at in positions], width, is_wanted)
        round_trips += found.round_trips
        for at, is_there in zip(positions, found.there, strict=True):
            there[at] = is_there
    return FoundPrefix(there, round_trips)


def _search_all(
    contains: Contains, rows: Sequence[BackendRow], width: int, is_wanted: Callable[[], bool]
) -> FoundPrefix:
    """Ask about every row, from the tail."""
    there, stop, round_trips = [False] * len(rows), len(rows), 0
    while stop > 0 and is_wanted():
        start = max(0, stop - width)
        there[start:stop] = contains(rows[start:stop])
        stop, round_trips = start, round_trips + 1
    return FoundPrefix(there, round_trips)


def _search_run(
    contains: Contains, rows: Sequence[BackendRow], width: int, is_wanted: Callable[[], bool]
) -> FoundPrefix:
    """Search for the end of the run: `[0, low)` is there, `[high, ...)` is not."""
    low, high, round_trips = 0, len(rows), 0
    while low < high and is_wanted():
        left = high - low
        if left <= width:
            last = contains(rows[low:high])
            return FoundPrefix([True] * low + last + [False] * (len(rows) - high), round_trips + 1)
        asked = [low + (at + 1) * left // (width + 1) for at in range(width)]
        if round_trips == 0:
            asked[0] = 0
        answers = contains([rows[at] for at in asked])
        round_trips += 1
        num_there = next((at for at, is_there in enumerate(answers) if not is_there), width)
        if num_there < width:
            high = asked[num_there]
        if num_there:
            low = asked[num_there - 1] + 1
    return FoundPrefix([True] * low + [False] * (len(rows) - low), round_trips)


class CallsAtOnce:
    """Splits one call of `contains` about many rows into several parallel calls of `batch` rows each.

    `spawn` runs a function on a free thread, now or later. The calling thread works too, and waits only for
    calls that have begun, so it does not matter if no other thread is ever free.
    """

    def __init__(
        self, contains: Contains, batch: int, most: int, spawn: Callable[[Callable[[], None]], None]
    ) -> None:
        self._contains, self._batch, self._most, self._spawn = contains, batch, most, spawn
        self.width = batch * most
        """The rows of one call of `contains`, at most."""

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        """Return for each row whether it is stored. `OSError` if a call fails."""
        parts = [rows[at : at + self._batch] for at in range(0, len(rows), self._batch)]
        answers: list[Future[list[bool]]] = [Future() for _ in parts]
        left = deque(zip(parts, answers, strict=True))

        def work() -> None:
            while left:
                try:
                    part, answer = left.popleft()
                except IndexError:  # another thread was quicker
                    return
                try:
                    answer.set_result(self._contains(part))
                except Exception as error:  # the top of the work that another thread does for us
                    answer.set_exception(error)

        for _ in range(min(len(parts), self._most) - 1):
            self._spawn(work)
        work()
        return [is_there for answer in answers for is_there in answer.result()]
