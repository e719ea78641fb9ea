"""`DiskTier`: rows in files that outlive the process.

It opens itself on an I/O thread, without a step of the engine: first it locks the folder; then, when the
namespace is known, it opens that namespace's place, reads the records and has the rows of the earlier
process. Until then it holds nothing, and requests may wait for it (`IOTier.is_awaited`). A failed attempt is
repeated with growing back-off. So a second engine on one folder runs without the tier and takes over when
the first has gone, and a folder that has vanished is made again.

Restored rows are announced in slices, newest first, with the descriptions that were kept. Every few seconds
the tier saves last uses, prices and the count of the write limit. A reset writes a new epoch before any
further row is written; demotions wait for it meanwhile. Scheduler thread only, except for functions that
say that they run on an I/O thread.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier.config import DiskConfig, format_size
from kvtier.errors import OutsideError
from kvtier.keys import OffloadKey
from kvtier.policies import Slots, make_policy
from kvtier.residency import MissReason
from kvtier.slot_table import NO_SLOTS, SlotTable
from kvtier.tiers.base import Direction, TierResult
from kvtier.tiers.disk.files import DiskFiles, OpenedFiles, PlaceRefused
from kvtier.tiers.disk.folder import (
    DiskPlace,
    FolderLock,
    find_rank_places,
    find_ranks,
    is_owned,
    place_name,
    read_learnt,
    save_learnt,
    taken_bytes,
    void_places,
)
from kvtier.tiers.io_threads import IOCall
from kvtier.tiers.seal import SealScope
from kvtier.tiers.slot_tier import SlotTier, WriteLimit

logger = logging.getLogger(__name__)

_SLICE = 1024
"""Chunks announced per step."""
_SAVE_EVERY = 5.0
_SAVE_LEARNT_EVERY = 60.0
_EPOCH_BACKOFF = (0.05, 0.2, 1.0, 5.0)
_RESET_WAIT = 0.5
"""How long a reset may wait for the page cache."""


_EpochWriter = Callable[[threading.Event], None]
"""Runs on an I/O thread: writes the epoch of a reset, sets the event, then syncs it to the disk."""


class _Vanished(OutsideError):
    """The folder that was locked no longer exists."""


class _Opened(NamedTuple):
    """An opened place, ready for the scheduler thread."""

    files: DiskFiles
    table: SlotTable
    scope: SealScope
    newest_first: Slots


class DiskTier(SlotTier):
    """Rows of one namespace in a folder.

    `namespace()` is called until it is known. `rank`: data-parallel. `share` is the part of the slots that a
    tenant may have; rows of an earlier process belong to nobody.
    """

    def __init__(
        self,
        config: DiskConfig,
        *,
        row_bytes: int,
        namespace: Callable[[], str | None],
        rank: int = 0,
        ranks: int = 1,
        description_bytes: int = 512,
        threads: int = 8,
        max_in_flight: int = 16 << 20,
        max_queued: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
        check_seals: bool = True,
        share: float | None = None,
    ) -> None:
        """Begin to lock the folder, without waiting; `wait_open` waits for the tier to open."""
        super().__init__(
            "disk",
            row_bytes,
            threads=threads,
            max_in_flight=max_in_flight,
            max_queued=max_queued,
            write_limit=WriteLimit(-(-(config.write_limit or 0) // ranks) or None),
            clock=clock,
            check_seals=check_seals,
        )
        self.config, self._tenant_share = config, share
        self._folder = Path(config.path) / f"rank-{rank}"
        self._rank, self._ranks, self._reported_others = rank, ranks, 0
        self._description_bytes = description_bytes
        self._namespace = namespace
        self._lock: FolderLock | None = None
        self._device: int | None = None  # the file system of the folder since it was first locked
        self._files: DiskFiles | None = None
        self.where, self.required = f"disk tier: {self._folder}", config.required
        self._lost: str | None = None
        self._suffix: str | None = None  # of the last reset
        self._epoch_unsaved, self._epoch_saving = False, IOCall()
        self._epoch_error: str | None = None  # of the last attempt, at the end
        self._epoch_at = 0.0
        self._epoch_written = threading.Event()
        self._owning = threading.Lock()  # the folder is being locked; on I/O threads
        self._headers = threading.Lock()  # for headers of places; on I/O threads, while the tier is not open
        # Restored rows that are not announced yet: their slots in order; a flag per slot; whether any is
        # left.
        self._to_announce = NO_SLOTS
        self._silent = np.zeros(0, dtype=np.bool_)
        self._some_silent = False
        self._describing = IOCall()
        self._saving = IOCall()
        self._save_learnt_at = 0.0
        self._save_at = 0.0
        self._begin_opening(self._open_once, self._use)

    # -- opening -----------------------------------------------------------------------------------

    def _open_once(self) -> _Opened:
        """Lock the folder, unless it is locked, and open the place of the namespace. On an I/O thread."""
        lock = self._own()
        try:
            if self._epoch_unsaved:  # perhaps of a reset that came before the lock
                self._expect_held(lock)
                self._epoch_writer()(threading.Event())
            self._await(lambda: not self._ending.is_set())
            return self._open(self._await_namespace(self._namespace))
        except _Vanished:
            self._release(lock.release)
            self._lock = None
            raise

    def _own(self) -> FolderLock:
        """Lock the folder, unless it is locked. On an I/O thread.

        After the first time, only on the same file system. A reset that finds no lock leaves its epoch to
        the thread that takes the lock.
        """
        with self._owning:
            lock = self._lock
            if lock is None:
                lock = FolderLock.take_nowait(self._folder, self._device)
                self._releases.add(lock.release)
                self._lock, self._device = lock, lock.device
                if not self._ending.is_set():
                    self._clear_problem()
            return lock

    def _expect_held(self, lock: FolderLock | None) -> FolderLock:
        if lock is None or not lock.is_held:
            raise _Vanished(f"disk tier: {self._folder}: the folder has vanished")
        return lock

    def _open(self, namespace: str) -> _Opened:
        """Open the place and fill a table. On an I/O thread."""
        files, found, scope = self._open_files(namespace)
        self._releases.add(files.close)
        try:
            slots = files.header.slots
            table = SlotTable(slots, make_policy(self.config.policy, slots), self._tenant_share)
            table.take_habits(read_learnt(files.folder))
            for _done in table.restore(found.slots, found.keys, found.ticks):
                time.sleep(0)  # let the engine run
            table.free_holes()
            files.ticks = table.ticks
            newest = found.slots[np.argsort(-found.ticks, kind="stable")]
        except BaseException:
            self._release(files.close)
            raise
        if len(found.damaged):
            logger.warning(
                "disk tier: %s: %d damaged records were left out", files.folder, len(found.damaged)
            )
        return _Opened(files, table, scope, newest)

    def _open_files(self, namespace: str) -> OpenedFiles:
        """Take this rank's part of the capacity, and open the files of the place. On an I/O thread.

        Ranks do this one after the other, or two of them would take the same space. A tier that is refused
        lets the folder go, so that the command in the refusal can make room.
        """
        lock = self._expect_held(self._lock)
        lock.retake()
        parent = self._folder.parent
        line = (
            f"disk tier: {self._folder}: expected {parent / 'lock'} to be free in a moment, but another"
            " process holds it; end that process if it hangs"
        )
        sharing = FolderLock.wait(parent, lambda is_locked: self._await_other(is_locked, line))
        try:
            with self._headers:
                self._take_over(namespace)
                share, left = self._share()
                if left < share and self._may_wait:
                    DiskFiles.shrink(self._folder, namespace, self.row_bytes, share, self._description_bytes)
                    raise OutsideError(
                        f"disk tier: {self._folder}: expected {format_size(share)} of disk.capacity, other"
                        f" ranks leave {format_size(left)}; they give the rest back when they open"
                    )
                return DiskFiles.open(
                    self._folder, namespace, self.row_bytes, left, self._description_bytes, share
                )
        except PlaceRefused:
            lock.let_go()
            raise
        finally:
            sharing.release()

    def _take_over(self, namespace: str) -> None:
        """Remove places that nobody has used for as long as the user says. On an I/O thread.

        The place that was not used for the longest time goes first, until this one has room for half of its
        share. Places of this rank count, and of ranks beyond the current number: these reduce the share.
        """
        if self.config.take_over_unused is None:
            return
        own = self._folder / place_name(namespace, self.row_bytes)
        before = time.time() - self.config.take_over_unused
        places: list[DiskPlace] = []
        for rank, folder in find_ranks(self._folder.parent):
            if rank == self._rank or (rank >= self._ranks and not is_owned(folder)):
                with suppress(OSError):  # the folder may be another user's
                    places += find_rank_places(folder, rank)
        for place in sorted(places, key=lambda place: place.used_at):
            if place.used_at >= before or place.folder.name == own.name:
                continue
            room = self._share()[1] - taken_bytes(self._folder) + taken_bytes(own)
            if room >= self.config.capacity // self._ranks // 2:
                return
            try:
                (place.remove_owned if place.rank == self._rank else place.remove)()
                line = (
                    "disk tier: %s: removed %s, which nobody has used for %.1f days, to have its space: %s"
                )
                days = (time.time() - place.used_at) / 86400
                logger.warning(line, own, place.folder, days, format_size(place.taken))
            except OutsideError as error:
                logger.warning("%s", error)

    def _share(self) -> tuple[int, int]:
        """Return this rank's share of the capacity, and how many bytes of it are free of other ranks' files.

        The share does not include files left by ranks beyond the current number. While other ranks hold
        more than their share, less is free: running ranks give it back when they open. So the tier waits
        for it, but not for ever, because some of those ranks may not run.
        """
        taken = {rank: taken_bytes(folder) for rank, folder in find_ranks(self._folder.parent)}
        left = sum(size for rank, size in taken.items() if rank >= self._ranks and rank != self._rank)
        others = sum(size for rank, size in taken.items() if rank != self._rank)
        equal = self.config.capacity // self._ranks
        share = max(0, equal - -(-left // self._ranks))
        now = max(0, min(share, self.config.capacity - others))
        if now < equal and others != self._reported_others:
            self._reported_others = others
            line = (
                "disk tier: %s: other ranks have %s of the capacity; `kvtier disk ls %s` lists what was left"
            )
            logger.warning(line, self._folder, format_size(others), self._folder.parent)
        return share, now

    def _use(self, opened: _Opened) -> None:
        if self._closed:
            return  # the last thread releases the files
        self._files = opened.files
        self.open_table(opened.table, opened.files, opened.scope)
        self._limit.restore(opened.files.header.written)
        self.prices = self.prices or opened.files.header.prices
        self._to_announce = opened.newest_first
        self._silent = np.zeros(opened.table.num_slots, dtype=np.bool_)
        self._silent[opened.newest_first] = True
        self._some_silent = len(opened.newest_first) > 0
        self._last_progress = self._clock()
        self._save_at = self._clock() + _SAVE_EVERY
        if self._suffix is not None:
            self.reset(self._suffix)
        held, slots = len(opened.table), opened.table.num_slots
        self._log_open(
            str(opened.files.folder),
            f"{held:,} of {slots:,} rows"
            f" ({format_size(held * self.row_bytes)} of {format_size(slots * self.row_bytes)})",
        )

    # -- a step ------------------------------------------------------------------------------------

    def poll(self) -> list[TierResult]:
        results = super().poll()
        if self._lost is not None:
            self._lose(self._lost)
        self._save_epoch()
        self._announce_slice()
        self._save()
        return results

    def _announce_slice(self) -> None:
        """Start to read the descriptions of the next chunks, unless a read is under way."""
        if not len(self._to_announce) or self._describing.is_running:
            return
        files, table = self._files, self._readable()
        if files is None or table is None:
            return
        part, self._to_announce = self._to_announce[:_SLICE], self._to_announce[_SLICE:]
        part = part[self._silent[part]]
        keys = table.keys(part)

        def end(descriptions: tuple[bytes, ...] | None, error: BaseException | None) -> None:
            self._last_progress = self._clock()
            unknown = (b"",) * len(keys)
            self._announce_restored(part, keys, unknown if descriptions is None else descriptions)
            self._some_silent = len(self._to_announce) > 0

        self._describing = self._io.call(lambda: files.read_descriptions(part.tolist(), keys), end)

    def _announce_restored(
        self, slots: Slots, keys: list[OffloadKey], descriptions: tuple[bytes, ...]
    ) -> None:
        """Announce the chunks that are unchanged since their descriptions were requested."""
        still = self._silent[slots].tolist() if len(self._silent) else [False] * len(keys)
        self._silent[slots[still]] = False
        self._announce_stored(list(compress(keys, still)), tuple(compress(descriptions, still)))

    def _announced(self, slots: Slots) -> Slots:
        if not self._some_silent:
            return slots
        announced = slots[~self._silent[slots]]
        self._silent[slots] = False
        return announced

    def _announce_removed(self, keys: list[OffloadKey], slots: Slots) -> None:
        """Announce removals, except of chunks that were never announced."""
        if self._some_silent:
            keys = list(compress(keys, (~self._silent[slots]).tolist()))
            self._silent[slots] = False
        super()._announce_removed(keys, slots)

    def _save(self) -> None:
        """Every few seconds, save the state for a restart, and check that the files are still there."""
        files = self._files
        if files is None or self._saving.is_running or self._clock() < self._save_at or self._table is None:
            return

        def end(_value: object, error: BaseException | None) -> None:
            self._save_at = self._clock() + _SAVE_EVERY
            self._notice_loss(error)

        habits = b""
        if self._clock() >= self._save_learnt_at:
            habits = self.habits()
            self._save_learnt_at = self._clock() + _SAVE_LEARNT_EVERY
        self._saving = self._io.call(lambda: self._write_down(files, habits), end)

    def _write_down(self, files: DiskFiles, habits: bytes) -> None:
        """Save the state for a restart. On an I/O thread."""
        files.expect_there()
        if self._lock is not None and not self._lock.is_held:
            raise FileNotFoundError(errno.ENOENT, "expected the lock that was taken, found another")
        if habits:
            save_learnt(files.folder, habits)
        ticks = files.save_ticks()
        prices, written = dict(self.prices), self._limit.save()
        if ticks or (prices, written) != (files.header.prices, files.header.written):
            files.save_header(prices=prices, written=written)
        if self.config.durability == "periodic":
            files.sync()

    def _write_last(self, files: DiskFiles | None, habits: bytes, reset_saved: threading.Event) -> None:
        """Save the state when the tier closes, and first the reset, unless it is saved. On an I/O thread."""
        if not reset_saved.is_set():
            nobody, never = threading.Event(), threading.Event()
            try:
                self._own()
                put_down = self._epoch_writer()
                _write_epoch(put_down, nobody, lambda seconds: not never.wait(min(seconds, 0.2)))
            except (OSError, OutsideError) as error:
                self._epoch_error = str(error)
                raise
            reset_saved.set()
        if files is not None:
            self._write_down(files, habits)
            files.save_header()  # its time says when the place was last used

    def _end_probe(self, error: BaseException | None) -> None:
        super()._end_probe(error)
        self._notice_loss(error)

    def _notice_loss(self, error: BaseException | None) -> None:
        if isinstance(error, FileNotFoundError):
            self._lost = f"disk tier: {self._folder}: its files have vanished"

    def _lose(self, why: str) -> None:
        """Give up the files: announce that all rows are gone, and open again when that is possible."""
        for health in self._health.values():
            health.suspend("its files have vanished")
        self._io.give_up(MissReason.IO_FAILED, why=why)
        for result in self._io.poll():
            self._settle(result)
        self._to_announce = NO_SLOTS
        self._forget_all(MissReason.LOST)
        if self._io.stuck_rows() or self._io.open_calls:
            return  # calls still use the old slots and files: try again at the next poll
        self._lost = None
        if self._files is not None:
            self._io.call(partial(self._release, self._files.close))
        if self._lock is not None:
            self._io.call(partial(self._release, self._lock.release))
            self._lock = None
        self._files = self._table = self._io.backend = None
        self._delete_again.clear()
        for health in self._health.values():
            health.resume()
        self._record_problem(OutsideError(why))
        self._begin_opening(self._open_once, self._use)

    # -- resets ------------------------------------------------------------------------------------

    def reset(self, suffix: str) -> None:
        """Make everything absent.

        Waits for the write to the page cache, for half a second at most, but not if the disk is suspended or
        has not yet written an earlier reset.
        """
        self._take_opened()
        self._suffix = suffix
        if self._files is not None:
            self._to_announce = NO_SLOTS
            super().reset(suffix)
            self._io.hold(Direction.DEMOTE)
        can_write = self._files is None or self._writable() is not None
        is_waited_for = can_write and not self._epoch_saving.is_running
        self._epoch_unsaved, self._epoch_at = True, 0.0
        self._save_epoch()
        if self._epoch_saving.is_running and is_waited_for:
            # So that no row comes back after a kill right now. A write to the page cache takes microseconds.
            self._epoch_written.wait(_RESET_WAIT)

    def _save_epoch(self) -> None:
        """Write the epoch of the last reset, and retry until that works. No row is written before."""
        if not self._epoch_unsaved or self._epoch_saving.is_running or self._lock is None:
            return
        if self._clock() < self._epoch_at:
            return
        files, epoch = self._files, self._scope.epoch
        put_down = self._epoch_writer()
        self._epoch_written = written = threading.Event()

        def save() -> None:  # retries here, because an idle engine does not poll
            _write_epoch(put_down, written, lambda seconds: not self._ending.wait(seconds))

        def end(_value: object, error: BaseException | None) -> None:
            self._epoch_unsaved = error is not None or (files, epoch) != (self._files, self._scope.epoch)
            if not self._epoch_unsaved:
                self._io.resume(Direction.DEMOTE)
            if error is not None:
                self._epoch_at = self._clock() + _SAVE_EVERY
                logger.warning("disk tier: %s: a reset could not be written down: %s", self._folder, error)

        self._epoch_saving = self._io.call(save, end)

    def _epoch_writer(self) -> _EpochWriter:
        """Return a function that makes all rows from before a reset void for later processes.

        While the tier is not open, it voids the rows of the tier's place, or of all namespaces if the
        namespace is not known.
        """
        files, lock, epoch, namespace = self._files, self._lock, self._scope.epoch, self._namespace()

        def save(written: threading.Event) -> None:
            if files is not None:
                files.save_header(epoch=epoch)
                written.set()
                files.sync_header()
            else:
                with self._headers:
                    if lock is not None:
                        lock.retake()
                    void_places(self._folder, namespace, self.row_bytes)

        return save

    # -- reports and ends --------------------------------------------------------------------------

    def has_pending_work(self) -> bool:
        recent = self._clock() - self._last_progress < 1.0
        announcing = len(self._to_announce) > 0 or self._describing.is_running
        return (
            super().has_pending_work() or (announcing and recent and not self._closed) or self.is_awaited()
        )

    def close(self, timeout: float = 5.0) -> bool:
        files, first = self._files, not self._closed
        self._ending.set()
        reset_saved = threading.Event()
        if not self._epoch_unsaved:
            reset_saved.set()
        if first and (self._epoch_unsaved or self._table is not None):
            habits = self.habits()
            self._io.call_last(lambda: self._write_last(files, habits, reset_saved))
        if self._lock is not None:
            self._lock.has_stuck_call = True  # if it is not released by the time that `close` returns
        has_ended = super().close(timeout)
        if first and self._epoch_unsaved and not reset_saved.is_set():
            logger.warning(
                "disk tier: %s: the last reset could not be written down before the end: %s; the next engine"
                " on this folder may load rows from before it; `kvtier disk gc` removes them",
                self._folder,
                self._epoch_error or f"the folder did not answer within {timeout:g} s",
            )
        return has_ended


def _write_epoch(
    put_down: _EpochWriter, tried: threading.Event, may_retry_after: Callable[[float], bool]
) -> None:
    """Write an epoch to the disk, with retries. Runs on an I/O thread."""
    for backoff in (*_EPOCH_BACKOFF, None):
        try:
            return put_down(tried)
        except OSError:
            if backoff is None or not may_retry_after(backoff):
                raise
        finally:
            tried.set()
    return None
