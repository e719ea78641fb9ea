"""Follows one publisher: decides what to deliver, when something is missing, and what to ask for. No socket, no clock.

The caller puts in what happens (`live`, `reply`, `end`, `connected`, `disconnected`, `tick`) with the time, and takes out
`take_updates()`, the request that should be under way (`ask`), and when it wants to be ticked (`deadline`). Every input
changes the facts (see `kvtier.events.follow.facts`) and ends with `_settle`, which says how good the picture is and starts the
request that makes it better; a plain batch that was to come next leaves an exact picture exact, and is spared this. A
request that fails is tried again with growing pauses, so nothing here can spin.

Guarantees: no batch is delivered twice; batches of one incarnation are delivered in order, over a hole only where it could
not be filled (then the state is not exact); memory is bounded by `Limits`; no payload raises. Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvtier.errors import IntegrityError
from kvtier.events.follow.asks import Ask, What
from kvtier.events.follow.facts import FAR, Facts, Verdict, payload_hash
from kvtier.events.follow.held import HeldBatches
from kvtier.events.frames import END_SEQ
from kvtier.events.types import Mark
from kvtier.events.updates import Counters, Kind, Limits, Received, Reset, State, StateChanged, Update
from kvtier.events.wire import Batch

__all__ = ["Follower"]

B = TypeVar("B", bound=Batch)

_REMEMBERED = 1024
"""How many replayed batches of a publisher without marks can be told from other ones when they arrive live."""


class Follower(Generic[B]):
    """The picture of one publisher, as far as it can be known."""

    def __init__(
        self,
        name: str,
        decode: Callable[[bytes], B],
        *,
        can_ask: bool = True,
        limits: Limits | None = None,
        now: float = 0.0,
    ) -> None:
        """Follow a publisher; `can_ask` says whether it can be asked for replays at all."""
        self.name = name
        self.state = State.REPAIRING
        self.reason = "connecting"
        self.counters = Counters()
        self.is_connected = False
        self.ask: Ask | None = None
        self.ts: float | None = None  # of the newest batch applied
        self.applied_at: float | None = None
        self._decode = decode
        self._can_ask = can_ask
        self._limits = limits = limits or Limits()
        self._updates: list[Update] = [StateChanged(name, self.state, self.reason)]
        self._facts = Facts()
        self._held = HeldBatches(limits.held_batches, limits.held_bytes)
        self._is_dirty = False  # something was delivered since the last reset
        self._live_seq: int | None = None
        self._live_payload = b""
        self._replayed: dict[int, int] = {}  # hashes of what a replay brought and the live stream may bring again
        self._hole: int | None = None  # behind which batch the last replay left something out
        self._answer: tuple[int, Mark] | None = None
        self._why = "joining"
        self._failures = 0
        self._mismatches = 0
        self._was_connected = False
        self._cut = "no connection"  # why there is none
        self._now = self._heard = self._grace = now
        self._ask_until = now
        self._retry_at: float | None = None
        self._gone_at: float | None = now + limits.reply_timeout
        self._reset_at = now - limits.backoff

    # -- what comes out --------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> Kind | None:
        """Who publishes, once that is known."""
        return self._facts.kind

    @property
    def epoch(self) -> int | None:
        """The publisher's incarnation, if it tells."""
        return self._facts.epoch

    @property
    def seq(self) -> int:
        """The last batch applied; -1 before the first."""
        return -1 if self._facts.seq is None else self._facts.seq

    @property
    def blocks(self) -> int | None:
        """How many blocks the picture has, where that is known."""
        return self._facts.blocks if self._facts.complete and self._facts.is_ours else None

    @property
    def held(self) -> int:
        """How many live batches wait for a replay."""
        return len(self._held)

    @property
    def deadline(self) -> float:
        """When `tick` is wanted, if nothing else happens before."""
        times = [self._probe_at, self._retry_at, self._gone_at, self._ask_until if self.ask is not None else None]
        if self._grace > self._now:
            times.append(self._grace)
        return min(at for at in times if at is not None)

    def take_updates(self) -> list[Update]:
        """Take out what the consumer should do, in order."""
        taken, self._updates = self._updates, []
        return taken

    # -- what goes in ----------------------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """Note that the live stream is connected, for the first time or again."""
        self._now = self._heard = now
        if self.is_connected:
            return
        if self._was_connected:
            self._note_reconnect()
        self.is_connected = self._was_connected = True
        self._gone_at = self._retry_at = None
        self._failures = 0
        self._set(State.REPAIRING, self._why)
        self._drain()
        self._settle()

    def disconnected(self, now: float, reason: str = "connection lost") -> None:
        """Note that the live stream is cut, and why."""
        self._now = now
        if self.is_connected:
            self.is_connected = False
            self._gone_at = now + self._limits.reply_timeout
        self._why = self._cut = reason
        self._settle()

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """Take a message of the live stream."""
        self._now = self._heard = now
        if self._is_next(seq):
            self._live_seq, self._live_payload = seq, payload
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

    def reply(self, ask: Ask, seq: int, payload: bytes, now: float) -> None:
        """Take one batch of the answer to `ask`; answers to anything but the request under way are ignored."""
        if ask is not self.ask:
            return
        self._now = now
        self._ask_until = now + self._limits.reply_timeout
        ask.replies += 1
        if ask.what is What.STATUS:
            self._take_status(seq, payload)
        elif ask.what is What.SNAPSHOT:
            self._take_snapshot(ask, seq, payload)
        else:
            self._take_replay(ask, seq, payload)
        if ask is not self.ask:
            self._drain()
        self._settle()

    def end(self, ask: Ask, now: float, error: str = "") -> None:
        """Take the end of the answer to `ask`, or what it failed with."""
        if ask is not self.ask:
            return
        self._now = now
        self.ask = None
        if error:
            self._fail(error)
        elif ask.what is What.STATUS:
            self._end_status(ask)
        elif ask.what is What.SNAPSHOT:
            self._end_snapshot(ask)
        else:
            self._end_replay(ask)
        self._drain()
        self._settle()

    def bad_frame(self) -> None:
        """Count a message that is none."""
        self.counters.bad_frames += 1

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._now = now
        if self._gone_at is not None and now >= self._gone_at:
            self._gone_at = None
            self._why = f"{self._cut} for {self._limits.reply_timeout:g} s"
            self._set(State.DEGRADED, self._why)
        if self.ask is not None and now >= self._ask_until:
            self.counters.timeouts += 1
            self._fail(f"no answer to {self.ask.what} for {self._limits.reply_timeout:g} s")
            self._drain()
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
        if now >= self._probe_at:
            self._heard = now
            self._probe()
        self._settle()

    # -- the live stream -------------------------------------------------------------------------------------------------

    def _is_next(self, seq: int) -> bool:
        """Say whether this is the batch that was to come, and nothing else is going on."""
        if self.state is not State.EXACT or self.ask is not None or self._held:
            return False
        return seq - 1 == self._facts.seq == self._live_seq

    def _follow_closely(self, seq: int, payload: bytes) -> None:
        """Apply the batch that was to come. Nearly all come this way, so it settles only what is no longer settled."""
        batch = self._read(payload)
        if batch is None:
            self._miss_or_lose(seq)
            self._settle()
            return
        self._deliver(seq, batch, payload)
        if batch.mark is not None or batch.skipped:
            self._settle()

    def _went_back(self, seq: int, payload: bytes) -> bool:
        """Say whether the live stream began anew: its numbers go up, whatever is replayed meanwhile."""
        if seq == END_SEQ:
            return True
        if self._live_seq is None or seq > self._live_seq:
            return False
        return seq < self._live_seq or payload != self._live_payload

    def _take_live(self, seq: int, payload: bytes) -> None:
        """Apply a live batch, or hold it where it is not its turn."""
        if not self._held and not self._is_held_up() and self._follow(seq, payload):
            return
        if not self._held.push(seq, payload):
            self._facts.ahead = max(self._facts.ahead, seq)
        self.counters.held_overflows = self._held.overflows

    def _is_held_up(self) -> bool:
        """Say whether live batches must wait: for a replay that fills in what precedes them, or for a first picture.

        A state may be replayed under numbers that live batches have too, so none may slip in between.
        """
        if self.ask is not None and self.ask.what is not What.STATUS:
            return True
        return self._facts.seq is None and self._can_ask and self.state is not State.DEGRADED

    def _drain(self) -> None:
        """Apply the live batches that were held, up to the next hole."""
        while self._held and not self._is_held_up():
            seq, payload = self._held.pop()
            if not self._follow(seq, payload):
                self._held.put_back(seq, payload)
                return

    def _follow(self, seq: int, payload: bytes) -> bool:
        """Apply a live batch if nothing is missing before it; say whether it is dealt with."""
        if self._facts.seq is None:
            self._facts.begin_at(seq)
            self._why = f"joined at batch {seq}"
        if seq <= self.seq:
            self._drop_covered(seq, payload)
            return True
        if seq > self.seq + 1:
            self._why = f"batches {self.seq + 1} to {seq - 1} are missing"
            if not self._does_without():
                self._miss(seq)
                return False
            self._lose(seq)
        batch = self._read(payload)
        if batch is None:
            self._miss_or_lose(seq)
        else:
            self._deliver(seq, batch, payload)
        return True

    def _miss_or_lose(self, seq: int) -> None:
        """Go on without a batch that cannot be read, unless a replay may have it whole."""
        if self._does_without():
            self._lose(seq + 1)
        else:
            self._miss(seq)

    def _does_without(self) -> bool:
        """Say whether the stream goes on over what is missing, as there is nobody to ask for it, now or at all."""
        return not self._can_ask or (self.state is State.DEGRADED and self._retry_at is not None)

    def _miss(self, seq: int) -> None:
        """Note that batches up to `seq` exist and were not received."""
        if seq > self._facts.ahead:  # else it is known already
            self.counters.gaps += 1
            self._facts.ahead = seq
            self._facts.doubt = True
        self._grace = self._now

    def _lose(self, upto: int) -> None:
        """Go on at batch `upto` without those before it."""
        self.counters.gaps += 1
        self.counters.lost_batches += self._facts.skip_to(upto)

    def _drop_covered(self, seq: int, payload: bytes) -> None:
        """Drop a live batch that a replay brought already, unless it shows that another publisher speaks."""
        self.counters.duplicates += 1
        if self._facts.is_ours:
            batch = self._read(payload)
            if batch is not None and batch.mark is not None and batch.mark.epoch != self._facts.epoch:
                self._restart("the epoch changed")
            return
        known = self._replayed.pop(seq, self._facts.proof if seq == self.seq else None)
        if known is None:
            self._facts.doubt = True
        elif known != payload_hash(payload):
            self._restart(f"batch {seq} is not what was replayed")

    # -- applying --------------------------------------------------------------------------------------------------------

    def _read(self, payload: bytes) -> B | None:
        try:
            return self._decode(payload)
        except ValueError as error:
            self.counters.bad_frames += 1
            self._why = f"a batch cannot be read: {error}"
            return None

    def _deliver(self, seq: int, batch: B, payload: bytes) -> None:
        """Give a batch to the consumer and bring the running sum up to it."""
        self._facts.add(seq, batch.change(), payload)
        self._is_dirty = True
        self._updates.append(Received(self.name, seq, batch))
        self.counters.batches += 1
        self.ts, self.applied_at = batch.ts, self._now
        if batch.skipped:
            self._note_skipped(seq, batch.skipped)
        if batch.mark is not None:
            self._compare(batch.mark)

    def _note_skipped(self, seq: int, skipped: int) -> None:
        self.counters.skipped_events += skipped
        self._why = f"{skipped} events of batch {seq} cannot be read"
        if self._facts.is_ours:
            self._facts.doubt = True  # a mark tells whether they mattered
        else:
            self._facts.complete = False

    def _compare(self, mark: Mark) -> None:
        """Hold the running sum against what the publisher says it holds."""
        facts = self._facts
        self.counters.digest_checks += 1
        self.counters.restarts += facts.epoch not in (None, mark.epoch)
        verdict = facts.judge(mark)
        if verdict is Verdict.PROVEN and not facts.growing:
            self._mismatches = 0
        elif verdict is Verdict.REPLACED:
            self._reset("the epoch changed")
        elif verdict is Verdict.DISPROVED:
            self._why = (
                f"digest of batch {facts.seq}: it has {mark.blocks} blocks, the stream adds up to {facts.blocks}"
            )
            self._note_mismatch()

    def _note_mismatch(self) -> None:
        self.counters.digest_mismatches += 1
        self._mismatches += 1
        if self._mismatches >= self._limits.tries:
            self._back_off(self._mismatches)

    # -- answers ---------------------------------------------------------------------------------------------------------

    def _take_status(self, seq: int, payload: bytes) -> None:
        batch = self._read(payload)
        if batch is not None and batch.mark is not None:
            self._answer = seq, batch.mark

    def _end_status(self, ask: Ask) -> None:
        """Learn who publishes; of one that is known, whether it is still the same and how far it is."""
        facts = self._facts
        answer, self._answer = self._answer, None
        if answer is None:
            if facts.is_ours:
                self._restart("another publisher answers")
            facts.kind = Kind.STOCK
            return
        newest, mark = answer
        if facts.seq is None or facts.epoch != mark.epoch:
            if facts.epoch not in (None, mark.epoch):
                self._restart("the epoch changed")
            facts.kind, facts.epoch, facts.complete = Kind.KVTIER, mark.epoch, False
            return
        facts.doubt = False
        if newest < ask.ahead:
            self._forget_numbers_above(newest)
        if newest == facts.seq:
            self._compare(mark)
        elif newest > facts.seq:
            if facts.seq >= facts.ahead:  # nothing is known to be lost: it may be under way
                self._grace = self._now + self._limits.catch_up_delay
            facts.ahead = max(facts.ahead, newest)

    def _forget_numbers_above(self, newest: int) -> None:
        """Drop live batches under numbers that the publisher had not used: they are not its own."""
        self.counters.bad_frames += 1
        self._held.clear()
        self._live_seq = None
        self._facts.ahead = newest

    def _take_snapshot(self, ask: Ask, seq: int, payload: bytes) -> None:
        """Apply a part of a snapshot; `seq` is the batch that follows it."""
        batch = self._read(payload)
        if batch is None:
            self._fail(self._why)
            return
        if ask.replies == 1:
            self._begin_anew(silent=batch.change().cleared)
        self._facts.growing = True
        self._deliver(seq - 1, batch, payload)

    def _end_snapshot(self, ask: Ask) -> None:
        """Take the snapshot for true if it ended with a mark that it adds up to.

        It may be a little older than the request, so what was received live before may have to be replayed.
        """
        proven = self._facts.complete and self.counters.digest_checks > ask.checks
        self._facts.growing = False
        if proven:
            live = -1 if self._live_seq is None else self._live_seq
            self._facts.ahead = live if self.seq < live <= self.seq + FAR else self.seq
        else:
            self._facts.complete = False
            self._fail("the snapshot does not add up" if ask.replies else "no snapshot came")

    def _take_replay(self, ask: Ask, seq: int, payload: bytes) -> None:
        if ask.replies == 1 and not self._begin_replay(ask, seq, payload):
            return
        if seq <= self.seq or (seq > self.seq + 1 and not self._skip_hole(seq)):
            return
        self._facts.growing = True
        batch = self._read(payload)
        if batch is None:
            self._lose(seq + 1)
            return
        self._deliver(seq, batch, payload)
        if self._facts.proof is not None:
            self._remember(seq, self._facts.proof)

    def _begin_replay(self, ask: Ask, seq: int, payload: bytes) -> bool:
        """Judge the first batch of a replay; say whether the rest can be used."""
        if ask.what is What.HISTORY:
            self._build_from(seq)
        elif ask.proof is not None and seq == ask.start:
            if payload_hash(payload) != ask.proof:
                self._restart(f"batch {seq} is not what it was")
                return False
            self._facts.doubt = False
        elif seq > ask.start and self._facts.kind is Kind.STOCK:
            self.counters.lost_batches += seq - ask.start - (ask.proof is not None)
            self._build_from(seq)
        elif seq != ask.start:
            self.counters.truncated_replays += 1
            self._facts.complete = False
            self._fail(f"asked for batch {ask.start}, got {seq}")
            return False
        return True

    def _build_from(self, seq: int) -> None:
        """Begin a new picture with the first batch that the publisher still has."""
        self._begin_anew()
        self._facts.begin_at(seq)
        if seq:
            self.counters.truncated_replays += 1
            self._why = f"the publisher's buffer begins at batch {seq}"
            self._facts.hopeless = self._facts.kind is Kind.STOCK

    def _skip_hole(self, seq: int) -> bool:
        """Deal with a hole inside a replay; say whether to go on behind it.

        A stock publisher drops replies to a slow reader, so it is asked again; a hole that comes back at the same place
        is a batch it never had.
        """
        self._why = f"the replay leaves out batches {self.seq + 1} to {seq - 1}"
        if self._facts.is_ours:
            self._fail(self._why)
            return False
        if self._hole != self.seq:
            self._hole = self.seq
            self._facts.ahead = max(self._facts.ahead, seq)
            self._stop_asking()
            return False
        self._lose(seq)
        return True

    def _end_replay(self, ask: Ask) -> None:
        facts = self._facts
        grew, facts.growing = facts.growing, False
        facts.kind = facts.kind or Kind.STOCK
        if not ask.replies and ask.what is What.HISTORY:
            self._build_from(0)
        elif not ask.replies and ask.proof is not None:
            self._restart(f"the publisher no longer has batch {ask.start}")
            return
        if facts.kind is Kind.STOCK:
            facts.doubt = False
            facts.hopeless = not facts.complete if ask.what is What.HISTORY else facts.hopeless
        if not grew and self.seq < facts.ahead:
            facts.complete = facts.complete and not facts.is_ours  # a snapshot will do
            self._fail(f"the replay ended at batch {self.seq}, before {facts.ahead}")

    def _remember(self, seq: int, digest: int) -> None:
        self._replayed[seq] = digest
        if len(self._replayed) > _REMEMBERED:
            del self._replayed[next(iter(self._replayed))]

    # -- trouble ---------------------------------------------------------------------------------------------------------

    def _note_reconnect(self) -> None:
        """Doubt the picture; where nobody can be asked, give it up until the stream itself proves it."""
        self.counters.reconnects += 1
        self._why = "batches may be missing since the connection was lost"
        self._stop_asking()
        self._facts.doubt = self._can_ask
        self._facts.complete = self._facts.complete and self._can_ask

    def _stop_asking(self) -> None:
        """Drop the request under way. A state that it was bringing is cut off."""
        if self._facts.growing and self._facts.kind is not Kind.STOCK:
            self._facts.complete = False
        self._facts.growing = False
        self.ask = None

    def _begin_anew(self, *, silent: bool = False) -> None:
        """Drop the picture, keep the knowledge of who publishes. `silent`: the next batch tells the consumer itself."""
        if self._is_dirty and not silent:
            self.counters.resets += 1
            self._updates.append(Reset(self.name))
        self._is_dirty = False
        self._facts.blank()
        self._replayed.clear()

    def _restart(self, why: str) -> None:
        """Note that another incarnation publishes."""
        self.counters.restarts += 1
        self._reset(why)

    def _reset(self, why: str) -> None:
        """Drop the picture and all that is known of the publisher, and whatever was asked of it."""
        self._why = why
        self.ask = self._hole = None
        self._begin_anew()
        self._facts.kind = self._facts.epoch = None
        self._facts.ahead = -1
        self._held.clear()
        is_flapping = self._now < self._reset_at + self._limits.backoff
        self._retry_at = self._now + self._limits.backoff if is_flapping else None
        self._reset_at = self._now

    def _fail(self, why: str) -> None:
        """Note that a request failed: try again later, and after several failures make do with what comes live."""
        self._why = why
        self._stop_asking()
        self._facts.doubt = True
        self._failures += 1
        self._back_off(self._failures)

    def _back_off(self, times: int) -> None:
        """Wait before the next request, longer each time; from `tries` times on the picture counts as degraded."""
        pause = self._limits.backoff * 2 ** min(times - 1, 16)
        self._retry_at = self._now + min(pause, self._limits.backoff_max)
        if times >= self._limits.tries:
            self._set(State.DEGRADED, self._why)

    # -- deciding --------------------------------------------------------------------------------------------------------

    @property
    def _is_exact(self) -> bool:
        return self.is_connected and self._facts.is_exact

    def _settle(self) -> None:
        """Say how good the picture is, and start the request that makes it better."""
        if self._is_exact:
            self._failures, self._retry_at = 0, None
            self._set(State.EXACT, "")
            return
        if self.state is not State.DEGRADED:
            self._set(State.REPAIRING, self._why)
        if self.ask is not None or self._retry_at is not None or not self.is_connected:
            return
        ask = self._next_ask()
        if ask is not None:
            self._start(ask)
        elif self._grace <= self._now and self._facts.seq is not None:
            self._set(State.DEGRADED, self._why)  # nothing that could be asked would help

    def _next_ask(self) -> Ask | None:
        if not self._can_ask:
            return None
        return self._facts.next_ask(other_way=self._failures % 2 == 1, may_catch_up=self._grace <= self._now)

    def _start(self, ask: Ask) -> None:
        self.ask = ask
        self._ask_until = self._now + self._limits.reply_timeout
        self._answer = None
        ask.checks, ask.ahead = self.counters.digest_checks, self._facts.ahead
        if ask.what is What.STATUS:
            self.counters.probes += 1
        elif ask.what is What.SNAPSHOT:
            self.counters.snapshots += 1
        else:
            self.counters.replays += 1

    @property
    def _probe_at(self) -> float:
        return self._heard + self._limits.probe_interval

    def _probe(self) -> None:
        """Ask a silent publisher whether there is more; one that cannot be asked and should not be silent is doubted."""
        facts = self._facts
        if not self.is_connected or self.ask is not None or self._retry_at is not None or facts.seq is None:
            return
        if self._can_ask:
            self._start(Ask.status() if facts.is_ours or facts.kind is None else facts.catch_up())
        elif facts.is_ours:
            facts.doubt = True
            self._why = f"silent for {self._limits.probe_interval:g} s"

    def _set(self, state: State, reason: str) -> None:
        if state is not self.state:
            self._updates.append(StateChanged(self.name, state, reason))
        self.state, self.reason = state, reason

    def check(self) -> None:
        """Raise `IntegrityError` where the facts contradict each other."""
        self._held.check()
        if (self.state is State.EXACT) != self._is_exact:
            raise IntegrityError(
                f"{self.name}: says {self.state}, but knows {self._facts}, connected={self.is_connected}"
            )
