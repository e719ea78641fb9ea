"""Follows one publisher: decides what to deliver and what to ask for. No socket, no clock.

The caller puts in events (`live`, `reply`, `end`, `connected`, `disconnected`, `tick`) with their time, and
takes out `take_updates()`, the wanted request (`request`), and the time of the next tick (`deadline`). The
`Replica` knows what the consumer holds and whether that is proven; the follower only moves batches into it.
Every input ends with `_settle`, which reports the replica's state and starts the request that improves it;
a plain batch in sequence leaves an exact replica exact, and skips this. A failed request is tried again
with growing pauses.

Guarantees: no batch is delivered twice; batches of one incarnation are delivered in order, with a gap only
if it could not be filled (then the state is not exact); memory is bounded by `Limits`; no payload raises.
Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvtier.errors import IntegrityError
from kvtier.events.follow.replica import MarkResult, Replica, payload_hash
from kvtier.events.follow.requests import Backoff, PendingBatches, RequestKind, StreamRequest
from kvtier.events.types import Mark
from kvtier.events.updates import Kind, Limits, State, Update
from kvtier.events.wire import END_SEQ, Batch

__all__ = ["Follower"]

B = TypeVar("B", bound=Batch)

_FAR = 10_000
"""A gap of more batches than this is closed with a snapshot."""
_NOBODY = -1
"""The epoch of a live stream that must be checked; `None` is that of stock publishers."""


class Follower(Generic[B]):
    """Keeps the replica of one publisher as good as possible."""

    def __init__(
        self,
        name: str,
        decode: Callable[[bytes], B],
        *,
        can_ask: bool = True,
        limits: Limits | None = None,
        now: float = 0.0,
    ) -> None:
        """Follow a publisher; `can_ask` says whether it answers requests at all."""
        self.name = name
        self.is_connected = False
        self.request: StreamRequest | None = None
        self.replica = Replica(name, decode)
        self.counters = self.replica.counters
        self._can_ask = can_ask
        self._limits = limits = limits or Limits()
        self._backoff = Backoff(limits, now)
        self._pending = PendingBatches(limits.pending_batches, limits.pending_bytes)
        self._live_seq: int | None = None
        self._live_payload = b""
        self._unknown_epoch = _NOBODY if can_ask else None
        self._live_epoch = self._unknown_epoch  # the epoch that the live stream is known to have,
        self._known_upto: int | None = None  # up to this batch
        # Whether marks named two epochs: a status request must show which is the later one.
        self._is_contested = False
        self._status: tuple[int, Mark] | None = None  # the answer to a status request
        self._replay_hole: int | None = None  # the batch before the hole that the last replay left
        self._was_connected = False
        self._cut = "no connection"  # why there is no connection
        self._now = self._heard_at = self._grace_until = self._answer_by = now
        self._gone_at: float | None = now + limits.reply_timeout

    # -- output ------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """The number of live batches that wait for a replay."""
        return len(self._pending)

    @property
    def deadline(self) -> float:
        """When `tick` must be called, if nothing else happens before."""
        times = [
            self._probe_at,
            self._backoff.until,
            self._gone_at,
            self._answer_by if self.request else None,
        ]
        if self._grace_until > self._now:
            times.append(self._grace_until)
        return min(at for at in times if at is not None)

    def take_updates(self) -> list[Update]:
        """Take the updates for the consumer, in order."""
        return self.replica.take_updates()

    # -- input -------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """Note that the live stream is connected, for the first time or again."""
        self._now = self._heard_at = now
        if self.is_connected:
            return
        if self._was_connected:
            self._note_reconnect()
        self.is_connected = self._was_connected = True
        self._gone_at = None
        self._backoff.end()
        self.replica.set_state(State.REPAIRING, self.replica.problem)
        self._settle()

    def disconnected(self, now: float, reason: str = "connection lost") -> None:
        """Note that the live stream is disconnected, and why."""
        self._now = now
        if self.is_connected:
            self.is_connected = False
            self._gone_at = now + self._limits.reply_timeout
        self.replica.problem = self._cut = reason
        self._settle()

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """Take a message of the live stream."""
        self._now = self._heard_at = now
        if self._is_next(seq):
            self._live_seq = self._known_upto = seq
            self._live_payload = payload
            self._follow_closely(seq, payload)
            return
        if not self._was_connected:
            self.connected(now)
        if self._went_back(seq, payload):
            self._restart(f"sequence went back from {self._live_seq} to {seq}")
            self._live_seq = None
        elif seq == self._live_seq:
            self.counters.duplicates += 1
            return
        if seq != END_SEQ:
            self._live_seq, self._live_payload = seq, payload
            self._take_live(seq, payload)
        self._settle()

    def reply(self, request: StreamRequest, seq: int, payload: bytes, now: float) -> None:
        """Take one batch of the answer to `request`; answers to other requests are ignored."""
        if request is not self.request:
            return
        self._now = now
        self._answer_by = now + self._limits.reply_timeout
        request.replies += 1
        restarts = self.counters.restarts
        if request.kind is RequestKind.STATUS:
            self._take_status(seq, payload)
        elif request.kind is RequestKind.SNAPSHOT:
            self._take_snapshot(request, seq, payload)
        else:
            self._take_replay(request, seq, payload)
        if self.counters.restarts != restarts:
            self._forget_live()  # it may have come from the previous publisher
        if request is not self.request:
            self._drain()
        self._settle()

    def end(self, request: StreamRequest, now: float, error: str = "") -> None:
        """Take the end of the answer to `request`, or its error."""
        if request is not self.request:
            return
        self._now = now
        self.request = None
        restarts = self.counters.restarts
        if error:
            self._fail(error)
        elif request.kind is RequestKind.STATUS:
            self._end_status(request)
        elif request.kind is RequestKind.SNAPSHOT:
            self._end_snapshot(request)
        else:
            self._end_replay(request)
        if self.counters.restarts != restarts:
            self._forget_live()  # it may have come from the previous publisher
        self._drain()
        self._settle()

    def bad_frame(self) -> None:
        """Count an invalid message."""
        self.counters.bad_frames += 1

    def tick(self, now: float) -> None:
        """Handle the passing of time."""
        self._now = now
        if self._gone_at is not None and now >= self._gone_at:
            self._gone_at = None
            self._degrade(f"{self._cut} for {self._limits.reply_timeout:g} s")
        if self.request is not None and now >= self._answer_by:
            self.counters.timeouts += 1
            self._fail(f"no answer to {self.request.kind} for {self._limits.reply_timeout:g} s")
            self._drain()
        self._backoff.tick(now)
        if now >= self._probe_at:
            self._heard_at = now
            self._probe()
        self._settle()

    # -- the live stream ---------------------------------------------------------------------------

    def _is_next(self, seq: int) -> bool:
        """Say whether this batch is the next in sequence, and nothing else is going on."""
        replica = self.replica
        if replica.state is not State.EXACT or self.request is not None or self._pending:
            return False
        return self._live_epoch == replica.epoch and seq - 1 == replica.seq == self._live_seq

    def _follow_closely(self, seq: int, payload: bytes) -> None:
        """Apply the next batch in sequence.

        Nearly all batches come this way, so it settles only if needed.
        """
        batch = self.replica.read(payload)
        if batch is None:
            self._miss_or_lose(seq)
            self._settle()
            return
        self._apply(seq, batch, payload)
        if batch.mark is not None:
            self._live_epoch = batch.mark.epoch
            self._settle()
        elif self.replica.sums.is_open and not self.replica.is_whole:
            self._settle()

    def _went_back(self, seq: int, payload: bytes) -> bool:
        """Say whether the live stream has restarted: its numbers only go up, even during a replay."""
        if seq == END_SEQ:
            return True
        if self._live_seq is None or seq > self._live_seq:
            return False
        return seq < self._live_seq or payload != self._live_payload

    def _take_live(self, seq: int, payload: bytes) -> None:
        """Apply a live batch, or let it wait if it is not its turn."""
        if not self._pending and not self._must_wait() and self._apply_if_next(seq, payload):
            return
        if not self._pending.push(seq, payload):
            self.replica.expect(seq)
        self.counters.pending_overflows = self._pending.overflows

    def _must_wait(self) -> bool:
        """Say whether live batches must wait: for a replay of earlier batches, or for a first replica.

        A replayed state may use numbers that live batches have too, so no live batch may come in between.
        """
        if self.request is not None and self.request.kind is not RequestKind.STATUS:
            return True
        return self.replica.seq is None and self._can_ask and self.replica.state is not State.DEGRADED

    def _drain(self) -> None:
        """Apply the waiting live batches, up to the next hole."""
        while self._pending and not self._must_wait():
            seq, payload = self._pending.pop()
            if not self._apply_if_next(seq, payload):
                self._pending.put_back(seq, payload)
                return

    def _apply_if_next(self, seq: int, payload: bytes) -> bool:
        """Apply a live batch if nothing before it is missing; say whether it is done with."""
        replica = self.replica
        if self._known_upto not in (seq - 1, seq):
            self._live_epoch = self._unknown_epoch  # a batch that is missing may have told of a restart
        self._known_upto = seq
        if replica.seq is None:
            replica.begin_at(seq)
            replica.problem = f"joined at batch {seq}"
        if seq <= replica.position:
            self._drop_covered(seq, payload)
            return True
        if seq > replica.position + 1:
            replica.problem = f"batches {replica.position + 1} to {seq - 1} are missing"
            if not self._does_without():
                self._miss(seq)
                return False
            replica.lose(seq)
        batch = replica.read(payload)
        if batch is None:
            self._miss_or_lose(seq)
        elif self._is_of_replica(batch) or self._does_without():
            if self._can_ask and batch.mark is None and self._live_epoch != replica.epoch:
                replica.note_loss()  # it may be of another process
            if seq == 0 and batch.mark is None and not batch.skipped and replica.kind is None:
                replica.identify(Kind.STOCK)  # the first batch of one of ours has a mark
            self._apply(seq, batch, payload)
        else:
            self._verify(seq)
            return False
        return True

    def _is_of_replica(self, batch: B) -> bool:
        """Say whether the live stream comes from the replica's publisher; a mark in the batch answers that.

        The replica may come from an answer, and the publisher that answered may have started after the live
        batches on their way here were sent: their numbers alone may fit by chance.
        """
        if batch.mark is not None:
            self._live_epoch = batch.mark.epoch
        return batch.mark is not None or self._live_epoch == self.replica.epoch

    def _verify(self, seq: int) -> None:
        """Have batch `seq` replayed, to check that the live one is the same."""
        if self.replica.state is State.EXACT:
            self.replica.problem = f"checking batch {seq}, the first that came live"
        self._expect(seq)

    def _miss_or_lose(self, seq: int) -> None:
        """Continue without an unreadable batch, unless a replay may have it whole."""
        if self._does_without():
            self.replica.lose(seq + 1)
        else:
            self._miss(seq)

    def _does_without(self) -> bool:
        """Say whether the stream goes on without missing batches, because no publisher answers."""
        return not self._can_ask or (self.replica.state is State.DEGRADED and self._backoff.is_waiting)

    def _miss(self, seq: int) -> None:
        """Note that batches up to `seq` exist and were not received."""
        self.counters.gaps += seq > self.replica.newest  # else the gap is known already
        self._expect(seq)

    def _expect(self, seq: int) -> None:
        """Note that batches up to `seq` must be requested now."""
        if seq > self.replica.newest:
            self.replica.expect(seq)
            self.replica.doubt()
        self._grace_until = self._now

    def _drop_covered(self, seq: int, payload: bytes) -> None:
        """Drop a live batch that a replay brought already, unless it comes from another publisher."""
        self.counters.duplicates += 1
        known = self.replica.recall(seq)
        if known == payload_hash(payload):
            self._live_epoch = self.replica.epoch
        elif self.replica.has_marks:  # a replayed state has the same numbers, but not the same bytes
            batch = self.replica.read(payload)
            if batch is None or batch.mark is None:
                self._live_epoch = self._unknown_epoch
            else:
                self._live_epoch = batch.mark.epoch
                if self._live_epoch != self.replica.epoch:
                    self._restart("the epoch changed", batch.mark.epoch)
        elif known is None:
            self.replica.doubt()
        else:
            self._restart(f"batch {seq} is not what was replayed")

    def _apply(self, seq: int, batch: B, payload: bytes, *, is_snapshot: bool = False) -> None:
        """Apply a batch, and do what follows from its mark."""
        restarts = self.counters.restarts
        result = self.replica.apply(seq, batch, payload, self._now, is_snapshot=is_snapshot)
        if self.counters.restarts != restarts:
            self._is_contested = self._can_ask
        if self._is_contested:
            self.replica.doubt()
        if batch.skipped and self.replica.has_marks:
            self._note_mismatch()
        if result is not None:
            self._act_on(result)

    def _act_on(self, result: MarkResult) -> None:
        if result is MarkResult.CONFIRMED:
            if not self.replica.is_building:
                self._backoff.forget_mismatches()
        elif result is MarkResult.DISPROVED:
            self._note_mismatch()
        elif result is MarkResult.REPLACED:
            self._reset("the epoch changed", self.replica.epoch)

    def _note_mismatch(self) -> None:
        if self._backoff.after_mismatch(self._now):
            self._degrade(self.replica.problem)

    # -- answers -----------------------------------------------------------------------------------

    def _take_status(self, seq: int, payload: bytes) -> None:
        batch = self.replica.read(payload)
        if batch is not None and batch.mark is not None:
            self._status = seq, batch.mark

    def _end_status(self, request: StreamRequest) -> None:
        """Learn the kind of the publisher; if it is known, check that and its newest batch."""
        replica = self.replica
        status, self._status = self._status, None
        if status is None:
            if replica.has_marks:
                self._restart("another publisher answers")
            replica.identify(Kind.STOCK)
            return
        newest, mark = status
        if replica.seq is None or replica.epoch != mark.epoch:
            if replica.epoch not in (None, mark.epoch):
                self._restart("the epoch changed")
            replica.identify(Kind.KVTIER, mark.epoch)
            return
        self._is_contested = False
        replica.trust()
        if newest < request.newest:  # it has not used these numbers: the live batches are not its own
            self.counters.bad_frames += 1
            self._forget_live()
            replica.expect_only(newest)
        if newest == replica.seq:
            self._act_on(replica.judge(mark))
        elif newest > replica.seq:
            if not replica.is_behind:  # no batch is known to be lost: some may be on their way
                self._grace_until = self._now + self._limits.catch_up_delay
            replica.expect(newest)

    def _take_snapshot(self, request: StreamRequest, seq: int, payload: bytes) -> None:
        """Apply a part of a snapshot; `seq` is the batch that follows it."""
        batch = self.replica.read(payload)
        if batch is None:
            self._fail(self.replica.problem)
            return
        if request.replies == 1:
            self.replica.forget()
        self.replica.begin_building()
        self._apply(seq - 1, batch, payload, is_snapshot=True)

    def _end_snapshot(self, request: StreamRequest) -> None:
        """Accept the snapshot if a mark confirmed it.

        It may be a little older than the request, so batches that were received live before may have to be
        replayed.
        """
        replica, live = self.replica, -1 if self._live_seq is None else self._live_seq
        if not replica.end_building():
            self._fail("no snapshot came")
        elif not replica.is_whole:
            self._fail("the snapshot does not add up")
        else:
            is_near = replica.position < live <= replica.position + _FAR
            replica.expect_only(live if is_near else replica.position)

    def _take_replay(self, request: StreamRequest, seq: int, payload: bytes) -> None:
        """Apply a batch of a replay. The replay must begin at the requested number and leave nothing out."""
        replica = self.replica
        if request.replies == 1 and not self._can_begin(request, seq, payload):
            return
        if seq > replica.position + 1 and not self._can_skip_to(seq):
            return
        if seq <= replica.position:
            return
        replica.begin_building()
        batch = replica.read(payload)
        if batch is None:
            replica.lose(seq + 1)
            return
        self._apply(seq, batch, payload)
        replica.remember(seq, payload)

    def _can_begin(self, request: StreamRequest, seq: int, payload: bytes) -> bool:
        """Judge the first batch of a replay; say whether the rest can be used."""
        replica = self.replica
        if request.kind is RequestKind.HISTORY:
            replica.rebuild_from(seq)
        elif request.proof is not None and seq == request.start:
            if payload_hash(payload) != request.proof:
                self._restart(f"batch {seq} is not what it was")
                return False
            replica.trust()
        elif seq > request.start and replica.kind is Kind.STOCK:
            self.counters.lost_batches += seq - request.start - (request.proof is not None)
            replica.rebuild_from(seq)
        elif seq != request.start:
            self.counters.truncated_replays += 1
            replica.note_loss()  # ask for a snapshot next
            self._fail(f"asked for batch {request.start}, got {seq}")
            return False
        return True

    def _can_skip_to(self, seq: int) -> bool:
        """Handle a hole inside a replay; say whether to continue after it, because there is nothing better.

        A stock publisher drops replies to a slow reader, so it is asked again; a second hole at the same
        place is a batch it never had.
        """
        replica, before = self.replica, self.replica.position
        replica.problem = f"the replay leaves out batches {before + 1} to {seq - 1}"
        if replica.has_marks:
            self._fail(replica.problem)
            return False
        if self._replay_hole != before:
            self._replay_hole = before
            replica.expect(seq)
            self._stop_asking()
            return False
        replica.lose(seq)
        return True

    def _end_replay(self, request: StreamRequest) -> None:
        replica = self.replica
        grew = replica.end_building()
        if not request.replies and request.kind is RequestKind.HISTORY:
            replica.rebuild_from(0)
        elif not request.replies and request.proof is not None:
            self._restart(f"the publisher no longer has batch {request.start}")
            return
        if replica.kind is None and replica.sums.is_open:
            self._fail("an answer without a mark is incomplete, so the kind of the publisher is unknown")
            return
        if replica.kind is None:
            replica.identify(Kind.STOCK)  # one of ours would have sent a mark
        if not replica.has_marks:
            replica.trust()
            if request.kind is RequestKind.HISTORY:
                replica.exhaust()
        elif grew and self.counters.digest_checks == request.checks:
            replica.doubt()  # no mark came: a status request will show which publisher answered
        if not grew and replica.is_behind:
            if replica.has_marks:
                replica.note_loss()  # ask for a snapshot next
            self._fail(f"the replay ended at batch {replica.position}, before {replica.newest}")

    def _forget_live(self) -> None:
        """Forget the live batches and their numbers."""
        self._pending.clear()
        self._live_seq = None

    # -- trouble -----------------------------------------------------------------------------------

    def _note_reconnect(self) -> None:
        """Doubt the replica. Give it up if the publisher cannot be asked and sends no marks."""
        self.counters.reconnects += 1
        self.replica.problem = "batches may be missing since the connection was lost"
        self._stop_asking()
        self._drain()  # batches from before; no mark in them covers the time since
        self.replica.doubt()
        self._live_epoch = self._unknown_epoch
        if self.replica.has_marks or (self._can_ask and self.replica.kind is Kind.STOCK):
            return  # a mark, or the bytes of its last batch, will show whether it is the same
        self.replica.note_loss()
        if not self._can_ask:
            self.replica.trust()
            self.replica.kind = None  # another publisher may have come

    def _stop_asking(self) -> None:
        """Drop the open request. A state that it was bringing stays incomplete."""
        if self.replica.end_building() and self.replica.kind is not Kind.STOCK:
            self.replica.note_loss()
        self.request = None

    def _restart(self, problem: str, epoch: int | None = None) -> None:
        """Note that another incarnation of the publisher is active, and its epoch if a mark named it."""
        self.counters.restarts += 1
        self._reset(problem, epoch)

    def _reset(self, problem: str, epoch: int | None = None) -> None:
        """Drop the replica, all knowledge of the publisher but its new epoch, and the open request."""
        self.replica.problem = problem
        self.replica.forget_publisher()
        if epoch is not None:
            self.replica.identify(Kind.KVTIER, epoch)
        self.request = self._replay_hole = None
        self._is_contested = False
        self._live_epoch = self._unknown_epoch
        self._pending.clear()
        self._backoff.after_reset(self._now)

    def _fail(self, problem: str) -> None:
        """Note a failed request: try again later; after many failures, continue with the live stream."""
        self.replica.problem = problem
        self._stop_asking()
        self.replica.doubt()
        if self._backoff.after_failure(self._now):
            self._degrade(problem)

    def _degrade(self, problem: str) -> None:
        self.replica.problem = problem
        self.replica.set_state(State.DEGRADED, problem)

    # -- deciding ----------------------------------------------------------------------------------

    @property
    def _is_exact(self) -> bool:
        return self.is_connected and self.replica.is_exact

    def _settle(self) -> None:
        """Report the replica's state, and start the request that improves it."""
        replica = self.replica
        if self._is_exact:
            self._backoff.end()
            replica.set_state(State.EXACT, "")
            return
        if replica.state is not State.DEGRADED:
            replica.set_state(State.REPAIRING, replica.problem)
        if self.request is not None or self._backoff.is_waiting or not self.is_connected:
            return
        request = self._next_request() if self._can_ask else None
        if request is not None:
            self._start(request)
        elif self._grace_until <= self._now and replica.seq is not None:
            replica.set_state(State.DEGRADED, replica.problem)  # no request would help

    def _next_request(self) -> StreamRequest | None:
        """Return the request that brings the replica closer to exact, if there is one."""
        replica = self.replica
        if replica.kind is None:
            return StreamRequest.history() if self._backoff.other_way else StreamRequest.status()
        if not (replica.is_whole or replica.is_exhausted):
            return StreamRequest.snapshot() if replica.has_marks else StreamRequest.history()
        if replica.is_doubted and replica.has_marks:
            return StreamRequest.status()
        if self._grace_until > self._now or not (replica.is_doubted or replica.is_behind):
            return None
        is_far = replica.newest > replica.position + _FAR
        return StreamRequest.snapshot() if replica.has_marks and is_far else self._catch_up()

    def _catch_up(self) -> StreamRequest:
        """Return the request for the following batches, with a proof if the publisher sends no marks."""
        replica = self.replica
        return StreamRequest.replay(replica.position, None if replica.has_marks else replica.proof)

    def _start(self, request: StreamRequest) -> None:
        self.request = request
        self._answer_by = self._now + self._limits.reply_timeout
        self._status = None
        request.checks, request.newest = self.counters.digest_checks, self.replica.newest
        if request.kind is RequestKind.STATUS:
            self.counters.probes += 1
        elif request.kind is RequestKind.SNAPSHOT:
            self.counters.snapshots += 1
        else:
            self.counters.replays += 1

    @property
    def _probe_at(self) -> float:
        return self._heard_at + self._limits.probe_interval

    def _probe(self) -> None:
        """Ask a silent publisher whether there is more; doubt one that cannot be asked but sends marks."""
        replica = self.replica
        if (
            not self.is_connected
            or self.request is not None
            or self._backoff.is_waiting
            or replica.seq is None
        ):
            return
        if self._can_ask:
            self._start(self._catch_up() if replica.kind is Kind.STOCK else StreamRequest.status())
        elif replica.has_marks:
            replica.doubt()
            replica.problem = f"silent for {self._limits.probe_interval:g} s"

    def check(self) -> None:
        """Raise `IntegrityError` if the follower's data contradict each other."""
        replica = self.replica
        self._pending.check()
        replica.check()
        if (replica.state is State.EXACT) != self._is_exact:
            raise IntegrityError(
                f"{self.name}: says {replica.state}, but connected={self.is_connected}, "
                f"whole={replica.is_whole}, doubted={replica.is_doubted}, "
                f"at {replica.position} of {replica.newest}"
            )
