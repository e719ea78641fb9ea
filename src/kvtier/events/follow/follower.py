"""Follows one publisher: owns the replica that the consumer has, and decides what to request.

A follower has no socket and no clock. The caller puts in events (`live`, `reply`, `end`, `connected`,
`disconnected`, `tick`) with their time, and takes out `take_updates()`, the wanted request (`request`) and
the time of the next tick (`deadline`). Every input ends with `_settle`, which reports the state and starts
the request that improves it.

The rules are those of a partial resynchronization, as Redis has it:

- **Who speaks.** A live mark names the process (its epoch) that sends the live stream. From then on the
  stream is *linked* to the replica, up to the next hole in its numbers or cut of its connection: the first
  mark of another process may have been lost there. A batch that has the same bytes live and in an answer
  links the stream too.
- **Full resynchronization.** A snapshot is requested when the live stream is linked, and accepted only with
  that epoch. If it is older than the live stream, the batches in between are replayed. A publisher that
  sends no marks for a while names its epoch in the answer to a status request instead.
- **Partial resynchronization.** A gap is replayed, beginning with the batch that we hold last; other bytes
  mean that the replay does not continue the replica. The replica stays in doubt until a mark names the
  process that has answered: one in the answer, the next live one, or the answer to a status request.
- **Stock publishers** (vLLM's own, SGLang's) have numbers and a buffer, but no marks and no snapshots. They
  are joined from the first batch that they still have. The same bytes prove that the same process answers.

Guarantees: no batch is delivered twice; batches of one process are delivered in order, with a gap only if it
could not be filled (then the state is not exact); memory is bounded by `Limits`; no payload raises. Not for
several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvtier.errors import IntegrityError
from kvtier.events.follow.state import Backoff, PendingBatches, RankSums, RequestKind, StreamRequest
from kvtier.events.types import Mark
from kvtier.events.updates import Counters, Kind, Limits, Received, Reset, State, StateChanged, Update
from kvtier.events.wire import END_SEQ, Batch

B = TypeVar("B", bound=Batch)

_FAR = 10_000
"""A gap of more batches than this is closed with a snapshot."""


class Follower(Generic[B]):
    """Owns the replica of one publisher, and keeps it as good as possible."""

    def __init__(
        self,
        name: str,
        decode: Callable[[bytes], B],
        *,
        can_ask: bool = True,
        limits: Limits | None = None,
        now: float = 0.0,
    ) -> None:
        """Follow a publisher; `can_ask` says whether it answers requests at all.

        `decode` turns a payload into a batch, or raises `ValueError`.
        """
        limits = limits or Limits()
        self.name = name
        self.counters = Counters()
        self._decode = decode
        self._can_ask = can_ask
        self._limits = limits

        # What the consumer was given.
        self.state = State.REPAIRING
        self.reason = "connecting"
        self._updates: list[Update] = [StateChanged(name, self.state, self.reason)]
        self._has_delivered = False  # batches since the last reset

        # The replica.
        self.kind: Kind | None = None
        self.epoch: int | None = None  # of the process that is followed
        self.seq: int | None = None  # the last batch applied
        self.sums = RankSums()
        self.ts: float | None = None  # of the last batch applied
        self.applied_at: float | None = None
        self._last: bytes | None = None  # the last batch itself; `None` if it came in a snapshot
        self._newest = -1  # the newest batch known to exist
        self._is_doubted = False  # another process may have taken over
        self._is_exhausted = False  # a stock publisher no longer has what is missing
        self._problem = "joining"  # why the replica is not exact

        # The live stream.
        self.is_connected = False
        self._was_connected = False
        self._cut = "no connection"  # why there is no connection
        self._live_seq: int | None = None
        self._live_payload = b""
        self._is_linked = False  # all since the last hole is known to come from the replica's process
        self._pending = PendingBatches(limits.pending_batches, limits.pending_bytes)

        # The open request, and when to send the next.
        self.request: StreamRequest | None = None
        self._backoff = Backoff(limits, now)
        self._replay_hole: int | None = None  # the batch before the hole that the last replay left
        self._now = self._heard_at = self._marked_at = self._grace_until = self._answer_by = now
        self._gone_at: float | None = now + limits.reply_timeout

    # -- output ------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The last batch applied; -1 before the first."""
        return -1 if self.seq is None else self.seq

    @property
    def pending(self) -> int:
        """The number of live batches that wait for an answer."""
        return len(self._pending)

    @property
    def blocks(self) -> int | None:
        """The number of blocks that the consumer holds, if known."""
        return self.sums.blocks if self.kind is Kind.KVTIER and self._is_whole else None

    @property
    def deadline(self) -> float:
        """When `tick` must be called, if nothing else happens before."""
        times = [
            self._probe_at,
            self._backoff.until,
            self._gone_at,
            self._answer_by if self.request else None,
            *(at for at in (self._grace_until, self._mark_by) if at > self._now),
        ]
        return min(at for at in times if at is not None)

    def take_updates(self) -> list[Update]:
        """Take the updates for the consumer, in order."""
        taken, self._updates = self._updates, []
        return taken

    # -- input -------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """Record that the live stream is connected, for the first time or again."""
        self._now = self._heard_at = now
        if self.is_connected:
            return
        self._marked_at = now
        if self._was_connected:
            self._reconnect()
        self.is_connected = self._was_connected = True
        self._gone_at = None
        self._backoff.end()
        self._set_state(State.REPAIRING, self._problem)
        self._settle()

    def disconnected(self, now: float, reason: str = "connection lost") -> None:
        """Record that the live stream is disconnected, and why."""
        self._now = now
        if self.is_connected:
            self.is_connected = False
            self._gone_at = now + self._limits.reply_timeout
        self._problem = self._cut = reason
        self._settle()

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """Take a message of the live stream."""
        self._now = self._heard_at = now
        if not self._was_connected:
            self.connected(now)
        if seq == END_SEQ:
            self._restart("the publisher announced a restart")
            self._settle()
            return
        if self._live_seq is not None and seq <= self._live_seq:
            if seq == self._live_seq and payload == self._live_payload:
                self.counters.duplicates += 1
                return
            self._restart(f"sequence went back from {self._live_seq} to {seq}")
        batch = self._read(payload)
        if batch is None or self._live_seq != seq - 1:
            self._unlink()
            is_known = self.seq is None or seq <= max(self.seq, self._newest) + 1
            self.counters.gaps += not is_known
        if batch is not None and batch.mark is not None:
            self._take_live_mark(batch.mark)
        self._live_seq, self._live_payload = seq, payload
        self._newest = max(self._newest, seq)
        if self._pending or self._must_wait() or not self._apply_live(seq, payload, batch):
            if batch is not None:
                self._pending.push(seq, payload)
                self.counters.pending_overflows = self._pending.overflows
            self._grace_until = now
        self._settle()

    def reply(self, request: StreamRequest, seq: int, payload: bytes, now: float) -> None:
        """Take one batch of the answer to `request`; answers to other requests are ignored."""
        if request is not self.request:
            return
        self._now = now
        self._answer_by = now + self._limits.reply_timeout
        request.replies += 1
        if request.kind is RequestKind.STATUS:
            self._take_status(request, seq, payload)
        elif request.kind is RequestKind.SNAPSHOT:
            self._take_snapshot(request, seq, payload)
        else:
            self._take_replay(request, seq, payload)
        if request is not self.request:
            self._drain()
        self._settle()

    def end(self, request: StreamRequest, now: float, error: str = "") -> None:
        """Take the end of the answer to `request`, or its error."""
        if request is not self.request:
            return
        self._now = now
        if error:
            self._fail(error)
        elif request.kind is RequestKind.STATUS:
            self.request = None
            self._end_status(request)
        elif request.kind is RequestKind.SNAPSHOT:
            self._end_snapshot(request)
        else:
            self._end_replay(request)
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

    def _take_live_mark(self, mark: Mark) -> None:
        """Learn from a live mark which process sends the live stream."""
        self._marked_at = self._now
        self._follow_epoch(mark.epoch)
        if not self._is_linked:
            self._pending.clear()  # these may be of an earlier process
            self._is_linked = True

    def _unlink(self) -> None:
        """Stop trusting the live stream: a batch is missing that may be the first of another process."""
        self._is_linked = False
        self._pending.clear()

    def _follow_epoch(self, epoch: int) -> None:
        """Follow the process that a mark names; it may be another one than before."""
        if self.kind is Kind.STOCK or self.epoch not in (None, epoch):
            self._restart("the epoch changed")
        self.kind, self.epoch, self._is_exhausted = Kind.KVTIER, epoch, False

    def _must_wait(self) -> bool:
        """Return whether live batches must wait: for the end of an answer, or for a first replica.

        The numbers of a snapshot are those of live batches too, so no live batch may come in between.
        """
        if self.request is not None and self.request.kind is not RequestKind.STATUS:
            return True
        return self.seq is None and not self._does_without()

    def _does_without(self) -> bool:
        """Return whether live batches are applied as they come, because no publisher answers."""
        return not self._can_ask or (self.state is State.DEGRADED and self._backoff.is_waiting)

    def _drain(self) -> None:
        """Apply the pending live batches, up to the first that has to wait."""
        while self._pending and not self._must_wait():
            seq, payload = self._pending.first
            if not self._apply_live(seq, payload, self._read(payload)):
                return
            if self._pending and self._pending.first[0] == seq:
                self._pending.pop()

    def _apply_live(self, seq: int, payload: bytes, batch: B | None) -> bool:
        """Apply a live batch if it is its turn; return whether it is done with.

        `None` stands for a batch that cannot be read.
        """
        if self.seq is None:
            self._begin_at(seq)
            self._problem = f"joined at batch {seq}"
        if seq <= self.position:
            return self._drop_covered(seq, payload)
        if seq > self.position + 1:
            self._problem = f"batches {self.position + 1} to {seq - 1} are missing"
            if not self._does_without():
                return False
            self._lose(seq)
        if batch is None:
            if not self._does_without():
                return False
            self._lose(seq + 1)
            return True
        if self._can_ask and not self._is_linked:
            if not self._does_without():
                if self.state is State.EXACT:
                    self._problem = f"checking batch {seq}, the first that came live"
                return False
            self.sums.add_loss()  # the batch may be of another process
        if seq == 0 and batch.mark is None and not batch.skipped and self.kind is None:
            self.kind = Kind.STOCK  # the first batch of one of ours has a mark
        self._apply(seq, batch, payload)
        return True

    def _drop_covered(self, seq: int, payload: bytes) -> bool:
        """Drop a live batch that an answer has brought already; return whether that is all.

        A stock publisher's must be compared with the answer: only the bytes show which process sent it.
        """
        if self._is_linked or not self._can_ask or self.kind is Kind.KVTIER:
            self.counters.duplicates += 1
            return True
        if seq == self.seq and self._last is not None:
            self.counters.duplicates += 1
            if payload == self._last:
                self._is_linked = True
            else:
                self._restart(f"batch {seq} is not what was replayed")
            return True
        self._is_doubted = True
        return False

    def _forget_live(self) -> None:
        """Forget the live batches and their numbers, which are not of the process that is followed."""
        self._unlink()
        self._live_seq = None
        self._newest = self.position

    def _drop_foreign_live(self) -> None:
        """Drop live batches with numbers that the followed process says it has not used yet."""
        self.counters.bad_frames += 1
        self._forget_live()

    # -- the replica -------------------------------------------------------------------------------

    @property
    def _is_whole(self) -> bool:
        """Whether the consumer has everything that the publisher held at `seq`."""
        return self.seq is not None and self.sums.are_whole(is_stock=self.kind is Kind.STOCK)

    @property
    def _is_behind(self) -> bool:
        """Whether there are batches that are not applied."""
        return self.position < self._newest

    @property
    def _is_building(self) -> bool:
        """Whether an answer is arriving, so that the replica is neither the old nor the new one."""
        return self.request is not None and self.request.applied > 0

    @property
    def _is_exact(self) -> bool:
        if not self.is_connected or self._is_doubted or self._is_behind or self._is_building:
            return False
        return self._is_whole

    def _read(self, payload: bytes) -> B | None:
        """Decode a batch; return `None` if that fails."""
        try:
            return self._decode(payload)
        except ValueError as error:
            self.counters.bad_frames += 1
            self._problem = f"a batch cannot be read: {error}"
            return None

    def _apply(self, seq: int, batch: B, payload: bytes | None) -> None:
        """Give a batch to the consumer, count it, and compare the sums with its mark, if any."""
        self.sums.add(batch.data_parallel_rank or 0, batch.change())
        self.seq, self._last = seq, payload
        self._newest = max(self._newest, seq)
        if self._is_exhausted and self._is_whole:
            self._is_exhausted = False
        if batch.skipped:
            self.sums.add_loss()
            self.counters.skipped_events += batch.skipped
            self._problem = f"{batch.skipped} events of batch {seq} cannot be read"
        if self.state is State.EXACT and (self._is_building or not self._is_whole):
            # Before the batch, so that a consumer that reads in order never trusts a wrong moment.
            self._set_state(State.REPAIRING, self._problem)
        self._has_delivered = True
        self._updates.append(Received(self.name, seq, batch))
        self.counters.batches += 1
        self.ts, self.applied_at = batch.ts, self._now
        if batch.skipped and self.kind is Kind.KVTIER:
            self._count_mismatch()
        if batch.mark is not None:
            self._compare(batch.mark)

    def _compare(self, mark: Mark) -> None:
        """Compare the sums with what the followed process says that it holds at `seq`."""
        self.counters.digest_checks += 1
        if self.sums.confirm(mark):
            if not self._is_building:
                self._is_doubted = False
                self._backoff.forget_mismatches()
        elif not self.sums.is_open:
            self.sums.add_loss()
            if not self._is_doubted:
                self.counters.digest_mismatches += 1
                self._problem = (
                    f"digest of batch {self.seq}: it has {mark.blocks} blocks, "
                    f"the stream adds up to {self.sums.blocks}"
                )
                self._count_mismatch()

    def _count_mismatch(self) -> None:
        if self._backoff.after_mismatch(self._now):
            self._degrade(self._problem)

    def _lose(self, upto: int) -> None:
        """Continue at batch `upto` without those before it."""
        self.counters.lost_batches += upto - self.position - 1
        self.seq, self._last = upto - 1, None
        self._newest = max(self._newest, self.seq)
        self.sums.add_loss()

    def _begin_at(self, seq: int) -> None:
        """Build the replica from batch `seq` on: it is whole only if nothing precedes that batch."""
        self.seq = seq - 1
        self.sums = RankSums(is_open=seq > 0)

    def _rebuild_from(self, seq: int) -> None:
        """Begin again with the first batch that the publisher still has."""
        self._forget()
        self._begin_at(seq)
        if seq:
            self.counters.truncated_replays += 1
            self._problem = f"the publisher's buffer begins at batch {seq}"
            self._is_exhausted = self.kind is Kind.STOCK

    def _forget(self) -> None:
        """Drop the replica; still follow the same process."""
        if self._has_delivered:
            if self.state is State.EXACT:
                # First: a consumer that has forgotten everything holds nothing exact.
                self._set_state(State.REPAIRING, self._problem)
            self.counters.resets += 1
            self._updates.append(Reset(self.name))
        self._has_delivered = self._is_doubted = self._is_exhausted = False
        self.seq = self._last = None
        self.sums = RankSums()

    def _restart(self, problem: str) -> None:
        """Drop the replica, the open request, and all knowledge of the process: another one is active."""
        self._problem = problem
        self.counters.restarts += 1
        self._forget()
        self.kind = self.epoch = None
        self.request = self._replay_hole = None
        self._forget_live()
        self._backoff.after_reset(self._now)

    # -- answers -----------------------------------------------------------------------------------

    def _take_status(self, request: StreamRequest, seq: int, payload: bytes) -> None:
        batch = self._read(payload)
        if batch is not None and batch.mark is not None:
            request.said = seq, batch.mark

    def _end_status(self, request: StreamRequest) -> None:
        """Learn the kind of the publisher; if it is known, check its epoch and its newest batch."""
        if request.said is None:
            if self.kind is Kind.KVTIER:
                self._restart("another publisher answers")
            self.kind = Kind.STOCK
            return
        newest, mark = request.said
        self._follow_epoch(mark.epoch)
        if not self._is_whole:
            if self._now >= self._mark_by:
                self._newest = max(self._newest, newest)
                self._start(StreamRequest.snapshot())
            return
        self._is_doubted = False
        if newest < request.newest:
            self._drop_foreign_live()
        if newest == self.seq:
            self._compare(mark)
        elif newest > self._newest:  # no batch is known to be lost: some may be on their way
            self._grace_until = self._now + self._limits.catch_up_delay
            self._newest = newest

    def _take_snapshot(self, request: StreamRequest, seq: int, payload: bytes) -> None:
        """Apply a part of a snapshot; `seq` is the batch that follows it."""
        batch = self._read(payload)
        if batch is None:
            self._fail(self._problem)
            return
        if batch.mark is not None and batch.mark.epoch != self.epoch:
            self._is_linked = False  # the next live mark shows which of the two processes is the later one
            self._fail("another process has answered")
            return
        if request.replies == 1:
            self._forget()
        request.applied += 1
        self._apply(seq - 1, batch, payload)
        self._last = None  # no replay has these bytes

    def _end_snapshot(self, request: StreamRequest) -> None:
        """Accept the snapshot if a mark confirmed it.

        It may be older than the live stream; then the batches that are missing are replayed.
        """
        if not request.replies:
            self._fail("no snapshot came")
        elif not self._is_whole:
            self._fail("the snapshot does not add up")
        else:
            self.request = None
            self._is_doubted = False
            if self._newest > self.position + _FAR:
                self._forget_live()  # no publisher is that far ahead of its own snapshot

    def _take_replay(self, request: StreamRequest, seq: int, payload: bytes) -> None:
        """Apply a batch of a replay, which must be the one that comes next."""
        if request.replies == 1 and not self._can_begin(request, seq):
            return
        if not self._agrees_with_live(seq, payload):
            return
        if seq == request.held and request.proof is not None:
            if payload != request.proof:
                self._refuse(f"batch {seq} is not what it was")
                return
            request.is_continued = True
        if request.applied and seq <= self.position:
            # One of ours sends a state of more ranks than numbers like this; the rest of it would be lost.
            if payload != self._last:
                self._refuse(f"batch {seq} came twice in the replay")
            return
        if seq <= self.position or (seq > self.position + 1 and not self._can_skip_to(seq)):
            return
        batch = self._read(payload)
        if batch is not None and batch.mark is not None:
            if self.kind is not Kind.KVTIER or batch.mark.epoch != self.epoch:
                self._stop_asking()
                self.sums.add_loss()
                self._follow_epoch(batch.mark.epoch)
                return
            request.is_named = True
        request.applied += 1
        if batch is None:
            self._lose(seq + 1)
        else:
            self._apply(seq, batch, payload)

    def _can_begin(self, request: StreamRequest, seq: int) -> bool:
        """Judge the number of the first batch of a replay; return whether the rest can be used."""
        if request.kind is RequestKind.HISTORY:
            self._rebuild_from(seq)
        elif seq > request.held + (request.proof is None):
            if self.kind is Kind.STOCK:
                self.counters.lost_batches += seq - request.held - 1
                request.proof = None
                self._rebuild_from(seq)
            else:
                self._refuse(f"asked for batch {request.start}, got {seq}")
                return False
        return True

    def _agrees_with_live(self, seq: int, payload: bytes) -> bool:
        """Compare a replayed batch with the live one of the same number, if that is pending.

        The same bytes link the live stream to the process that answers.
        """
        while self._pending and self._pending.first[0] < seq:
            self._pending.pop()
        if not self._pending or self._pending.first[0] != seq:
            return True
        _, live_payload = self._pending.first
        self._pending.pop()
        self.counters.duplicates += 1
        if live_payload == payload:
            self._is_linked = True
            return True
        if self.kind is not Kind.KVTIER:
            self._restart(f"batch {seq} is not what was replayed")
            return False
        self._problem = f"batch {seq} came live from another process than in the replay"
        self._stop_asking()
        self._forget_live()
        self._is_doubted = True  # a status request shows which of the two processes is the later one
        return False

    def _refuse(self, problem: str) -> None:
        """Stop a replay that does not continue the replica, and build another one."""
        if self.kind is not Kind.KVTIER:
            self._restart(problem)
            return
        # Perhaps another process answers; or the publisher's buffer is too short, and it sends its state.
        self._problem = problem
        self.counters.truncated_replays += 1
        self._stop_asking()
        self.sums.add_loss()

    def _can_skip_to(self, seq: int) -> bool:
        """Handle a hole inside a replay; return whether to continue after it, as there is nothing better.

        A stock publisher drops replies to a slow reader, so it is asked again; a second hole at the same
        number is a batch that it never had.
        """
        before = self.position
        self._problem = f"the replay leaves out batches {before + 1} to {seq - 1}"
        if self.kind is Kind.KVTIER:
            self._fail(self._problem)
            self.sums.add_loss()
            return False
        if self._replay_hole != before:
            self._replay_hole = before
            self._newest = max(self._newest, seq)
            self._stop_asking()
            return False
        self.counters.gaps += 1
        self._lose(seq)
        return True

    def _end_replay(self, request: StreamRequest) -> None:
        """Judge a replay that is complete."""
        if request.proof is not None and not request.is_continued:
            self._refuse(f"the publisher no longer has batch {request.held}")
            return
        if request.kind is RequestKind.HISTORY and not request.replies:
            self._rebuild_from(0)
        if self.kind is None and self.sums.is_open:
            self._fail("an answer without a mark is incomplete, so the kind of the publisher is unknown")
            return
        self.request = None
        if self.kind is not Kind.KVTIER:
            self.kind = Kind.STOCK  # one of ours would have sent a mark
            self._is_doubted = False
            self._is_exhausted |= request.kind is RequestKind.HISTORY and not self._is_whole
        elif not request.is_named:
            self._is_doubted = True
        if self.position < request.newest and not request.applied:
            if request.is_continued and self.kind is Kind.KVTIER:
                self._drop_foreign_live()
            else:
                self._fail(f"the replay ended at batch {self.position}, before {request.newest}")

    # -- trouble -----------------------------------------------------------------------------------

    def _reconnect(self) -> None:
        """Doubt the replica. Give it up if the publisher cannot be asked and sends no marks."""
        self.counters.reconnects += 1
        self._problem = "batches may be missing since the connection was lost"
        self._stop_asking()
        self._unlink()
        self._is_doubted = True
        if self.kind is Kind.KVTIER or (self._can_ask and self.kind is Kind.STOCK):
            return  # a mark, or the bytes of its last batch, will show whether it is the same
        self.sums.add_loss()
        if not self._can_ask:
            self._is_doubted = False
            self.kind = None  # another publisher may have come

    def _stop_asking(self) -> None:
        """Drop the open request. If it brought batches that do not continue the replica, that is a loss."""
        request, self.request = self.request, None
        if request is None or not request.applied:
            return
        if not request.is_continued and self.kind is not Kind.STOCK:
            self.sums.add_loss()

    def _fail(self, problem: str) -> None:
        """Give up a request, and try again after a back-off.

        After many failures the live stream is followed without answers.
        """
        self._problem = problem
        self._stop_asking()
        self._is_doubted = True
        if self._backoff.after_failure(self._now):
            self._degrade(problem)

    def _degrade(self, problem: str) -> None:
        self._problem = problem
        self._set_state(State.DEGRADED, problem)

    def _set_state(self, state: State, reason: str) -> None:
        """Set the state, and report it to the consumer if it has changed."""
        if state is not self.state:
            self._updates.append(StateChanged(self.name, state, reason))
        self.state, self.reason = state, reason

    # -- deciding ----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Report the state of the replica, and start the request that improves it."""
        if self._is_exact:
            if self.state is not State.EXACT:
                self._backoff.end()
                self._set_state(State.EXACT, "")
            return
        if self.state is not State.DEGRADED:
            self._set_state(State.REPAIRING, self._problem)
        if self.request is not None or self._backoff.is_waiting or not self.is_connected:
            return
        request = self._next_request() if self._can_ask else None
        if request is not None:
            self._start(request)
        elif self.seq is not None and not self._is_expecting:
            self._set_state(State.DEGRADED, self._problem)  # no request would help

    @property
    def _is_expecting(self) -> bool:
        """Whether something is due that may help: a live mark, or batches that are on their way."""
        return self._can_ask and (self.kind is Kind.KVTIER or self._now < self._grace_until)

    def _next_request(self) -> StreamRequest | None:
        """Return the request that brings the replica closer to exact, if there is one."""
        if self.kind is None:
            return StreamRequest.history() if self._backoff.other_way else StreamRequest.status()
        is_ours = self.kind is Kind.KVTIER
        if is_ours and self._newest > self.position + _FAR:
            self.sums.add_loss()
        if not (self._is_whole or self._is_exhausted):
            return self._first_request() if is_ours else StreamRequest.history()
        if self._is_doubted and is_ours:
            return StreamRequest.status()
        if self._grace_until > self._now or not (self._is_doubted or self._is_behind):
            return None
        return self._catch_up()

    def _first_request(self) -> StreamRequest | None:
        """Return the request for a whole replica: a snapshot, once it is known who sends the live stream."""
        if self._is_linked:
            return StreamRequest.snapshot()
        return StreamRequest.status() if self._now >= self._mark_by else None

    def _catch_up(self) -> StreamRequest:
        """Return the request for the batches after the last one, with that one as a proof if it is known."""
        start = self.position + (self._last is None)
        if self._pending:
            start = min(start, self._pending.first[0])
        return StreamRequest.replay(start, self.position, self._last)

    def _start(self, request: StreamRequest) -> None:
        self.request = request
        request.newest = self._newest
        self._answer_by = self._now + self._limits.reply_timeout
        if request.kind is RequestKind.STATUS:
            self.counters.probes += 1
        elif request.kind is RequestKind.SNAPSHOT:
            self.counters.snapshots += 1
        else:
            self.counters.replays += 1

    @property
    def _probe_at(self) -> float:
        return self._heard_at + self._limits.probe_interval

    @property
    def _mark_by(self) -> float:
        """Until when a live mark is awaited, before a status request has to do."""
        return self._marked_at + self._limits.reply_timeout

    def _probe(self) -> None:
        """Ask a silent publisher whether there is more; doubt one that cannot be asked but sends marks."""
        if not self.is_connected or self.request is not None or self._backoff.is_waiting or self.seq is None:
            return
        if self._can_ask:
            is_stock = self.kind is Kind.STOCK
            self._start(self._catch_up() if is_stock else StreamRequest.status())
        elif self.kind is Kind.KVTIER:
            self._is_doubted = True
            self._problem = f"silent for {self._limits.probe_interval:g} s"

    def check(self) -> None:
        """Raise `IntegrityError` if the follower's data contradict each other."""
        self._pending.check()
        self.sums.check()
        if (self.state is State.EXACT) != self._is_exact:
            raise IntegrityError(
                f"{self.name}: says {self.state}, but connected={self.is_connected}, "
                f"whole={self._is_whole}, doubted={self._is_doubted}, "
                f"at {self.position} of {self._newest}"
            )
