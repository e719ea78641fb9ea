"""The contract of a backend as tests: subclass `BackendSuite` and define `make`.

    class TestMine(BackendSuite):
        def make(self):
            return MyBackend(...)

Every row of the suite has its own place below `NUM_PLACES`, for backends that go by place. Rows have
`ROW_BYTES` at most. The second half runs the backend with faults and the real I/O threads: whether rows are
flipped, swapped, torn, cut short, refused or hang, no wrong byte is ever reported as right.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest

from kvtier.keys import OffloadKey
from kvtier.residency import MissReason
from kvtier.testing.faulty_backend import BackendFault, BackendFaultPlan, FaultyBackend
from kvtier.testing.kit import PATIENCE, content_of, key
from kvtier.testing.memory_tier import LooseRows
from kvtier.tiers.base import Backend, BackendRow, Direction, RowJob, TierResult
from kvtier.tiers.io_threads import IOThreads
from kvtier.tiers.seal import SealScope, seal_of

NUM_PLACES = 320
ROW_BYTES = 8192
_CHURNED = 64
"""Rows of the tests with faults."""
_SCOPE = SealScope("suite")
_OTHER_SCOPE = SealScope("suite", epoch=1)


def content(number: int, version: int = 0) -> bytes:
    """Return the bytes of a row."""
    return content_of(number, version, ROW_BYTES)


def sealed(number: int, version: int = 0, cuts: tuple[int, ...] = ()) -> BackendRow:
    """Return a row to write, in one piece or cut at these bytes."""
    payload = bytearray(content(number, version))
    pieces = _cut(payload, cuts)
    seal = seal_of(_SCOPE, key(number), pieces)
    return BackendRow(key(number), pieces, number, _SCOPE.number, seal)


def empty(number: int, cuts: tuple[int, ...] = ()) -> BackendRow:
    """Return a row to read into."""
    return BackendRow(key(number), _cut(bytearray(ROW_BYTES), cuts), number, _SCOPE.number)


def _in_scope(row: BackendRow, scope: SealScope, name: OffloadKey) -> BackendRow:
    """Return a row with the same bytes and place under another name."""
    return row._replace(key=name, scope=scope.number, seal=seal_of(scope, name, row.pieces))


def _shortened(row: BackendRow, nbytes: int) -> BackendRow:
    return row._replace(pieces=(row.pieces[0][:nbytes],))


def _emptied(row: BackendRow) -> BackendRow:
    """Return a row of this name to read into."""
    return row._replace(pieces=(memoryview(bytearray(row.nbytes)),), seal=b"")


def _cut(payload: bytearray, cuts: tuple[int, ...]) -> tuple[memoryview, ...]:
    ends = [0, *cuts, len(payload)]
    return tuple(memoryview(payload)[start:stop] for start, stop in pairwise(ends))


def submit_rows(
    threads: IOThreads,
    direction: Direction,
    job_id: int,
    rows: list[BackendRow],
    scope: SealScope = _SCOPE,
    deadline: float = float("inf"),
) -> RowJob:
    """Submit rows to I/O threads as one job."""
    if not isinstance(threads.buffer, LooseRows):
        threads.buffer = LooseRows()
    slots = np.array(threads.buffer.add(row.pieces for row in rows), dtype=np.int64)
    job = RowJob(job_id, direction, [row.key for row in rows], slots, deadline)
    job.addresses, job.scope = np.array([row.place for row in rows], dtype=np.int64), scope
    threads.submit(job, range(len(rows)))
    return job


def payload_of(row: BackendRow) -> bytes:
    """Return the content of a row's memory."""
    return b"".join(row.pieces)


class BackendSuite:
    """The tests that every backend passes."""

    turns: ClassVar[int] = 40
    """How often the long tests write and read; fewer for a server with slow rows."""

    def make(self) -> Backend:
        """Return an empty backend."""
        raise NotImplementedError

    def reopen(self, backend: Backend) -> Backend | None:
        """Reopen the backend as a later process would; `None` if it keeps nothing."""
        backend.close()
        return None

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        backend = self.make()
        yield backend
        backend.close()

    # Rows

    def test_written_rows_are_read_with_their_seals(self, backend: Backend) -> None:
        rows = [sealed(number) for number in range(5)]
        assert backend.write(rows) == [None] * 5
        found = [empty(number) for number in range(5)]
        assert backend.read(found) == [row.seal for row in rows]
        assert [payload_of(row) for row in found] == [content(number) for number in range(5)]

    def test_rows_not_written_are_absent(self, backend: Backend) -> None:
        backend.write([sealed(1)])
        assert backend.contains([empty(0), empty(1), empty(2)]) == [False, True, False]
        answers = backend.read([empty(0), empty(1), empty(2)])
        assert [answer is None for answer in answers] == [True, False, True]

    def test_a_row_is_replaced(self, backend: Backend) -> None:
        backend.write([sealed(3)])
        assert backend.write([sealed(3, version=1)]) == [None]
        found = empty(3)
        if backend.writes_once:
            assert backend.read([found]) == [sealed(3).seal]
            assert payload_of(found) == content(3)
            backend.delete([empty(3)])
            assert backend.write([sealed(3, version=1)]) == [None]
        assert backend.read([found]) == [sealed(3, version=1).seal]
        assert payload_of(found) == content(3, 1)

    def test_a_row_is_deleted(self, backend: Backend) -> None:
        backend.write([sealed(1), sealed(2)])
        backend.delete([empty(1), empty(9)])
        assert backend.contains([empty(1), empty(2)]) == [False, True]
        assert backend.read([empty(1)]) == [None]
        backend.write([sealed(1)])
        assert backend.contains([empty(1)]) == [True]

    @pytest.mark.parametrize("cuts", [(4096,), (1, 2, 5000), (512, 4608)])
    def test_rows_of_several_pieces(self, backend: Backend, cuts: tuple[int, ...]) -> None:
        assert backend.write([sealed(1, cuts=cuts)]) == [None]
        for other in ((), (100,), cuts):
            found = empty(1, other)
            assert backend.read([found]) == [sealed(1).seal], "how a row is cut does not matter"
            assert payload_of(found) == content(1)

    def test_an_empty_batch(self, backend: Backend) -> None:
        assert backend.write([]) == []
        assert backend.read([]) == []
        assert backend.contains([]) == []
        backend.delete([])

    def test_threads_at_once(self, backend: Backend) -> None:
        def work(thread: int) -> None:
            for version in range(self.turns // 4):
                numbers = range(thread * 8, thread * 8 + 8)
                if backend.writes_once:
                    backend.delete([empty(number) for number in numbers])
                assert backend.write([sealed(number, version) for number in numbers]) == [None] * 8
                found = [empty(number) for number in numbers]
                assert None not in backend.read(found)
                assert [payload_of(row) for row in found] == [content(number, version) for number in numbers]

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, thread) for thread in range(8)]:
                done.result()

    def test_a_probe_of_what_works(self, backend: Backend) -> None:
        backend.write([sealed(0)])
        backend.probe()
        assert backend.contains([empty(0)]) == [True]

    def test_it_is_there_after_a_restart(self) -> None:
        backend = self.make()
        backend.write([sealed(number) for number in range(10)])
        backend.delete([empty(4)])
        again = self.reopen(backend)
        if again is None:
            return
        try:
            numbers = [number for number in range(10) if number != 4]
            found = [empty(number) for number in numbers]
            assert again.read(found) == [sealed(number).seal for number in numbers]
            assert [payload_of(row) for row in found] == [content(number) for number in numbers]
            assert again.contains([empty(4)]) == [False]
        finally:
            again.close()

    # Names, lengths, numbers

    def test_a_row_that_was_written_is_a_copy(self, backend: Backend) -> None:
        """The memory of a row is lent for the call; afterwards it holds other chunks."""
        rows = [sealed(1), sealed(2, cuts=(4096,)), sealed(3, cuts=(1, 5000))]
        seals = [row.seal for row in rows]
        assert backend.write(rows) == [None] * 3
        for row in rows:
            for piece in row.pieces:
                piece[:] = bytes(piece.nbytes)
        found = [empty(number) for number in (1, 2, 3)]
        assert backend.read(found) == seals
        assert [payload_of(row) for row in found] == [content(number) for number in (1, 2, 3)]
        again = [empty(number) for number in (1, 2, 3)]
        for row in found:
            row.pieces[0][:] = bytes(ROW_BYTES)
        backend.read(again)
        assert [payload_of(row) for row in again] == [content(number) for number in (1, 2, 3)]

    def test_scopes_have_rows_of_their_own(self, backend: Backend) -> None:
        """Rows of another model or from before a reset have the same keys."""
        self._expect_apart(backend, [sealed(1), _in_scope(sealed(2), _OTHER_SCOPE, key(1))])

    def test_groups_have_rows_of_their_own(self, backend: Backend) -> None:
        """Two groups of layers have the same tokens, and so keys with the same hash."""
        self._expect_apart(backend, [sealed(1), _in_scope(sealed(2), _SCOPE, key(1, group=1))])

    def _expect_apart(self, backend: Backend, rows: list[BackendRow]) -> None:
        """Expect that of two rows with similar names each is written, read and deleted alone."""
        first, second = rows
        backend.delete(rows)
        assert backend.write([first]) == [None]
        assert backend.contains(rows) == [True, False]
        assert backend.read([_emptied(second)]) == [None]
        assert backend.write([second]) == [None]
        found = [_emptied(row) for row in rows]
        assert backend.read(found) == [row.seal for row in rows]
        assert [payload_of(row) for row in found] == [payload_of(row) for row in rows]
        backend.delete([first])
        assert backend.contains(rows) == [False, True]
        assert backend.read([_emptied(second)]) == [second.seal]

    @pytest.mark.parametrize("nbytes", [1, 4096, 5000, ROW_BYTES - 1])
    def test_rows_of_other_lengths(self, backend: Backend, nbytes: int) -> None:
        """A row may be shorter than the longest. Read with another length, it never has its seal."""
        row = _in_scope(_shortened(sealed(1), nbytes), _SCOPE, key(1))
        assert backend.write([sealed(0), row, sealed(2)]) == [None] * 3
        found = [empty(0), _shortened(empty(1), nbytes), empty(2)]
        assert backend.read(found) == [sealed(0).seal, row.seal, sealed(2).seal]
        assert [payload_of(each) for each in found] == [content(0), content(1)[:nbytes], content(2)]
        for other in {nbytes + 1, max(1, nbytes - 1)} - {nbytes}:
            assert backend.read([_shortened(empty(1), other)])[0] in (None, b"")

    def test_many_rows_in_one_call(self, backend: Backend) -> None:
        numbers = range(NUM_PLACES)
        assert backend.write([sealed(number) for number in numbers]) == [None] * NUM_PLACES
        assert backend.contains([empty(number) for number in numbers]) == [True] * NUM_PLACES
        found = [empty(number) for number in numbers]
        assert backend.read(found) == [sealed(number).seal for number in numbers]
        assert all(payload_of(row) == content(row.place) for row in found)
        backend.delete([empty(number) for number in numbers if number != 7])
        assert backend.contains(found) == [number == 7 for number in numbers]

    # Behind faults

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("rate", [0.01, 0.3])
    def test_never_wrong(self, backend: Backend, seed: int, rate: float) -> None:
        plan = BackendFaultPlan(seed, rate)
        done, wrong = self._churn(backend, plan, check_seals=True)
        assert done > 0
        assert wrong == 0, f"{plan.injected}"

    def test_without_the_check_it_is_wrong(self, backend: Backend) -> None:
        """The negative control: without a check, these faults would be visible."""
        kinds = (BackendFault.FLIP, BackendFault.SWAP, BackendFault.TORN, BackendFault.SHORT)
        _, wrong = self._churn(backend, BackendFaultPlan(0, 0.3, kinds), check_seals=False)
        assert wrong > 0

    def _churn(self, backend: Backend, plan: BackendFaultPlan, *, check_seals: bool) -> tuple[int, int]:
        """Write and read rows in many versions; count successful reads, and the wrong ones among them."""
        threads = IOThreads(
            FaultyBackend(backend, plan), row_bytes=ROW_BYTES, threads=4, check_seals=check_seals
        )
        source, versions = random.Random(plan.seed), dict.fromkeys(range(_CHURNED), 0)
        done = wrong = 0
        try:
            for turn in range(self.turns):
                numbers = source.sample(range(_CHURNED), 8)
                for number in numbers:
                    versions[number] = turn
                written = [sealed(number, turn)._replace(seal=b"") for number in numbers]
                assert self._run(threads, Direction.DEMOTE, 2 * turn, written)
                found = [empty(number) for number in source.sample(range(_CHURNED), 16)]
                for result in self._run(threads, Direction.PROMOTE, 2 * turn + 1, found):
                    if result.outcome is None:
                        done += len(result.positions)
                        # A failed write leaves the row as it was before: an old version is still a whole
                        # row.
                        read = [found[at] for at in result.positions]
                        wrong += sum(not _is_any_version(row, turn) for row in read)
            threads.check()
        finally:
            assert threads.close(PATIENCE)
        return done, wrong

    def _run(
        self, threads: IOThreads, direction: Direction, job_id: int, rows: list[BackendRow]
    ) -> list[TierResult]:
        submit_rows(threads, direction, job_id, rows)
        results: list[TierResult] = []
        while sum(len(result.positions) for result in results) < len(rows):
            assert threads.wait_any(PATIENCE)
            results += threads.poll()
        return results

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENOENT])
    def test_errors_are_failures_of_their_rows(self, backend: Backend, code: int) -> None:
        faulty = FaultyBackend(backend)
        threads = IOThreads(faulty, row_bytes=ROW_BYTES, threads=2)
        try:
            faulty.broken = OSError(code, os.strerror(code))
            for direction in Direction:
                for report in self._run(
                    threads, direction, direction, [empty(number) for number in range(4)]
                ):
                    assert (report.outcome, report.why) == (MissReason.IO_FAILED, os.strerror(code))
                    assert not report.in_use
            faulty.broken = None
            assert {r.outcome for r in self._run(threads, Direction.DEMOTE, 9, [empty(1)])} == {None}
        finally:
            assert threads.close(PATIENCE)

    def test_a_hang_costs_its_deadline_and_keeps_the_memory(self, backend: Backend) -> None:
        now = [0.0]
        faulty = FaultyBackend(backend)
        threads = IOThreads(faulty, row_bytes=ROW_BYTES, threads=1, clock=lambda: now[0])
        try:
            faulty.hang()
            submit_rows(threads, Direction.DEMOTE, 1, [sealed(1)], deadline=5.0)
            assert faulty.hanging.wait(PATIENCE)
            submit_rows(threads, Direction.DEMOTE, 2, [sealed(2)], deadline=5.0)
            assert threads.poll() == []
            now[0] = 5.0
            free, used = sorted(threads.poll(), key=lambda report: report.in_use)
            assert {free.outcome, used.outcome} == {MissReason.TOO_SLOW}
            assert (free.in_use, used.in_use) == (False, True), "one row was begun, the other never will be"
            assert threads.stuck_rows() == 1
            faulty.release()
            results: list[TierResult] = []
            while not results:
                assert threads.wait_any(PATIENCE)
                results = threads.poll()
            (result,) = results
            assert (result.returned, result.keys) == (True, used.keys)
            assert threads.stuck_rows() == 0
            threads.check()
        finally:
            faulty.release()
            assert threads.close(PATIENCE)

    def test_threads_end(self, backend: Backend) -> None:
        before = threading.active_count()
        threads = IOThreads(backend, row_bytes=ROW_BYTES, threads=3)
        assert threads.close(PATIENCE)
        assert threading.active_count() == before


def _is_any_version(row: BackendRow, newest: int) -> bool:
    number, payload = row.place, payload_of(row)
    return any(payload == content(number, version) for version in range(newest, -1, -1))
