"""Follows one publisher: decides what to deliver, when something is missing, and what to ask for. No socket, no clock.

The caller puts in what happens (`live`, `reply`, `end`, `connected`, `disconnected`, `tick`) with the time, and takes out
`take_updates()`, the request that should be under way (`ask`), and when it wants to be ticked (`deadline`). Every input
changes the picture (see `picture` and `facts` beside this; answers do by way of `repair`) and ends with `_settle`, which says
how good the picture is and starts the request that makes it better; a plain batch that was to come next leaves an exact
picture exact, and is spared this. A request that fails is tried again with growing pauses, so nothing here can spin.

Guarantees: no batch is delivered twice; batches of one incarnation are delivered in order, over a hole only where it could
not be filled (then the state is not exact); memory is bounded by `Limits`; no payload raises. Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvtier.errors import IntegrityError
from kvtier.events.follow.asks import Ask, What
from kvtier.events.follow.facts import Verdict, payload_hash
from kvtier.events.follow.held import HeldBatches
from kvtier.events.follow.pauses import Pauses
from kvtier.events.follow.picture import Picture
from kvtier.events.follow.repair import Failed, Outcome, Repair, Restarted
from kvtier.events.frames import END_SEQ
from kvtier.events.types import Mark
from kvtier.events.updates import Kind, Limits, State, Update
from kvtier.events.wire import Batch

__all__ = ["Follower"]

B = TypeVar("B", bound=Batch)

_NOBODY = -1
"""No epoch."""


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
        self.is_connected = False
        self.ask: Ask | None = None
        self._can_ask = can_ask
        self._limits = limits = limits or Limits()
        self.picture = Picture(name, decode)
        self._facts, self.counters = self.picture.facts, self.picture.counters
        self._repair = Repair(self.picture)
        self._pauses = Pauses(limits, now)
        self._held = HeldBatches(limits.held_batches, limits.held_bytes)
        self._live_seq: int | None = None
        self._live_payload = b""
        self._tied_to = _NOBODY if can_ask else None  # the epoch that the live stream was shown to be of
        self._status: tuple[int, Mark] | None = None  # what a publisher said of itself
        self._was_connected = False
        self._cut = "no connection"  # why there is none
        self._now = self._heard = self._grace = now
        self._ask_until = now
        self._gone_at: float | None = now + limits.reply_timeout

    # -- what comes out --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """How good the picture is."""
        return self.picture.state

    @property
    def reason(self) -> str:
        """Why it is not exact."""
        return self.picture.reason

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
        times = [self._probe_at, self._pauses.until, self._gone_at, self._ask_until if self.ask is not None else None]
        if self._grace > self._now:
            times.append(self._grace)
        return min(at for at in times if at is not None)

    def take_updates(self) -> list[Update]:
        """Take out what the consumer should do, in order."""
        return self.picture.take_updates()

    # -- what goes in ----------------------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """Note that the live stream is connected, for the first time or again."""
        self._now = self._heard = now
        if self.is_connected:
            return
        if self._was_connected:
            self._note_reconnect()
        self.is_connected = self._was_connected = True
        self._gone_at = None
        self._pauses.end()
        self.picture.tell(State.REPAIRING, self.picture.why)
        self._settle()

    def disconnected(self, now: float, reason: str = "connection lost") -> None:
        """Note that the live stream is cut, and why."""
        self._now = now
        if self.is_connected:
            self.is_connected = False
            self._gone_at = now + self._limits.reply_timeout
        self.picture.why = self._cut = reason
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
        else:
            epoch = self._facts.epoch
            self._act_on(self._repair.take(ask, seq, payload, now))
            if epoch not in (None, self._facts.epoch):
                self._forget_live()  # it came from the one before
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
        else:
            self._act_on(self._repair.end(ask, -1 if self._live_seq is None else self._live_seq))
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
            self.picture.why = f"{self._cut} for {self._limits.reply_timeout:g} s"
            self.picture.tell(State.DEGRADED, self.picture.why)
        if self.ask is not None and now >= self._ask_until:
            self.counters.timeouts += 1
            self._fail(f"no answer to {self.ask.what} for {self._limits.reply_timeout:g} s")
            self._drain()
        self._pauses.tick(now)
        if now >= self._probe_at:
            self._heard = now
            self._probe()
        self._settle()

    # -- the live stream -------------------------------------------------------------------------------------------------

    def _is_next(self, seq: int) -> bool:
        """Say whether this is the batch that was to come, and nothing else is going on."""
        if self.picture.state is not State.EXACT or self.ask is not None or self._held:
            return False
        if self._tied_to != self._facts.epoch:
            return False
        return seq - 1 == self._facts.seq == self._live_seq

    def _follow_closely(self, seq: int, payload: bytes) -> None:
        """Apply the batch that was to come. Nearly all come this way, so it settles only what is no longer settled."""
        batch = self.picture.read(payload)
        if batch is None:
            self._miss_or_lose(seq)
            self._settle()
            return
        self._act_on(self.picture.deliver(seq, batch, payload, self._now))
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
            self.picture.why = f"joined at batch {seq}"
        if seq <= self.seq:
            self._drop_covered(seq, payload)
            return True
        if seq > self.seq + 1:
            self.picture.why = f"batches {self.seq + 1} to {seq - 1} are missing"
            if not self._does_without():
                self._miss(seq)
                return False
            self.picture.lose(seq)
        batch = self.picture.read(payload)
        if batch is None:
            self._miss_or_lose(seq)
        elif self._tie(batch) or self._does_without():
            self._act_on(self.picture.deliver(seq, batch, payload, self._now))
        else:
            self._verify(seq)
            return False
        return True

    def _tie(self, batch: B) -> bool:
        """Say whether the live stream is that of the picture's publisher; a mark in it shows whether it is.

        The picture may come from an answer, and whoever answered may have been started since the live batches that are
        still on their way here were sent: their numbers alone can fit by chance.
        """
        if batch.mark is not None:
            self._tied_to = batch.mark.epoch
        return batch.mark is not None or self._tied_to == self._facts.epoch

    def _verify(self, seq: int) -> None:
        """Have batch `seq` replayed, to see whether the live one is the same."""
        if self.state is State.EXACT:
            self.picture.why = f"batch {seq} may be another publisher's"
        if seq > self._facts.ahead:
            self._facts.ahead = seq
            self._facts.doubt = True
        self._grace = self._now

    def _miss_or_lose(self, seq: int) -> None:
        """Go on without a batch that cannot be read, unless a replay may have it whole."""
        if self._does_without():
            self.picture.lose(seq + 1)
        else:
            self._miss(seq)

    def _does_without(self) -> bool:
        """Say whether the stream goes on over what is missing, as there is nobody to ask for it, now or at all."""
        return not self._can_ask or (self.state is State.DEGRADED and bool(self._pauses))

    def _miss(self, seq: int) -> None:
        """Note that batches up to `seq` exist and were not received."""
        if seq > self._facts.ahead:  # else it is known already
            self.counters.gaps += 1
            self._facts.ahead = seq
            self._facts.doubt = True
        self._grace = self._now

    def _drop_covered(self, seq: int, payload: bytes) -> None:
        """Drop a live batch that a replay brought already, unless it shows that another publisher speaks."""
        self.counters.duplicates += 1
        known = self.picture.recall(seq)
        if known == payload_hash(payload):
            self._tied_to = self._facts.epoch
        elif self._facts.is_ours:  # a state that was replayed has its numbers, not its bytes
            batch = self.picture.read(payload)
            if batch is not None and batch.mark is not None:
                self._tied_to = batch.mark.epoch
                if self._tied_to != self._facts.epoch:
                    self._restart("the epoch changed")
        elif known is None:
            self._facts.doubt = True
        else:
            self._restart(f"batch {seq} is not what was replayed")

    # -- answers ---------------------------------------------------------------------------------------------------------

    def _act_on(self, outcome: Outcome | None) -> None:
        """Do what follows from a batch that was applied, or from an answer."""
        if outcome is None or outcome is Verdict.OPEN:
            return
        if outcome is Verdict.PROVEN:
            if not self._facts.growing:
                self._pauses.forget_mismatches()
        elif outcome is Verdict.DISPROVED:
            if self._pauses.after_mismatch(self._now):
                self.picture.tell(State.DEGRADED, self.picture.why)
        elif outcome is Verdict.REPLACED:
            self._reset("the epoch changed")
        elif isinstance(outcome, Restarted):
            self._restart(outcome.why)
        elif isinstance(outcome, Failed):
            self._fail(outcome.why)
        else:
            self._stop_asking()

    def _take_status(self, seq: int, payload: bytes) -> None:
        batch = self.picture.read(payload)
        if batch is not None and batch.mark is not None:
            self._status = seq, batch.mark

    def _end_status(self, ask: Ask) -> None:
        """Learn who publishes; of one that is known, whether it is still the same and how far it is."""
        facts = self._facts
        status, self._status = self._status, None
        if status is None:
            if facts.is_ours:
                self._restart("another publisher answers")
            facts.kind = Kind.STOCK
            return
        newest, mark = status
        if facts.seq is None or facts.epoch != mark.epoch:
            if facts.epoch not in (None, mark.epoch):
                self._restart("the epoch changed")
            facts.kind, facts.epoch, facts.complete = Kind.KVTIER, mark.epoch, False
            return
        facts.doubt = False
        if newest < ask.ahead:
            self._forget_numbers_above(newest)
        if newest == facts.seq:
            self._act_on(self.picture.compare(mark))
        elif newest > facts.seq:
            if facts.seq >= facts.ahead:  # nothing is known to be lost: it may be under way
                self._grace = self._now + self._limits.catch_up_delay
            facts.ahead = max(facts.ahead, newest)

    def _forget_numbers_above(self, newest: int) -> None:
        """Drop live batches under numbers that the publisher had not used: they are not its own."""
        self.counters.bad_frames += 1
        self._forget_live()
        self._facts.ahead = newest

    def _forget_live(self) -> None:
        """Forget what came live, and under which numbers."""
        self._held.clear()
        self._live_seq = None

    # -- trouble ---------------------------------------------------------------------------------------------------------

    def _note_reconnect(self) -> None:
        """Doubt the picture; where nobody can be asked, give it up until the stream itself proves it."""
        self.counters.reconnects += 1
        self.picture.why = "batches may be missing since the connection was lost"
        self._stop_asking()
        self._drain()  # what was received before; no mark in it says anything of the time since
        self._facts.doubt = self._can_ask
        self._facts.complete = self._facts.complete and self._can_ask

    def _stop_asking(self) -> None:
        """Drop the request under way. A state that it was bringing is cut off."""
        if self._facts.growing and self._facts.kind is not Kind.STOCK:
            self._facts.complete = False
        self._facts.growing = False
        self.ask = None

    def _restart(self, why: str) -> None:
        """Note that another incarnation publishes."""
        self.counters.restarts += 1
        self._reset(why)

    def _reset(self, why: str) -> None:
        """Drop the picture and all that is known of the publisher, and whatever was asked of it."""
        self.picture.why = why
        self.ask = None
        self._tied_to = _NOBODY if self._can_ask else None
        self._repair.forget_hole()
        self.picture.begin_anew()
        self._facts.kind = self._facts.epoch = None
        self._facts.ahead = -1
        self._held.clear()
        self._pauses.after_reset(self._now)

    def _fail(self, why: str) -> None:
        """Note that a request failed: try again later, and after several failures make do with what comes live."""
        self.picture.why = why
        self._stop_asking()
        self._facts.doubt = True
        if self._pauses.after_failure(self._now):
            self.picture.tell(State.DEGRADED, why)

    # -- deciding --------------------------------------------------------------------------------------------------------

    @property
    def _is_exact(self) -> bool:
        return self.is_connected and self._facts.is_exact

    def _settle(self) -> None:
        """Say how good the picture is, and start the request that makes it better."""
        picture = self.picture
        if self._is_exact:
            self._pauses.end()
            picture.tell(State.EXACT, "")
            return
        if picture.state is not State.DEGRADED:
            picture.tell(State.REPAIRING, picture.why)
        if self.ask is not None or self._pauses or not self.is_connected:
            return
        ask = self._next_ask()
        if ask is not None:
            self._start(ask)
        elif self._grace <= self._now and self._facts.seq is not None:
            picture.tell(State.DEGRADED, picture.why)  # nothing that could be asked would help

    def _next_ask(self) -> Ask | None:
        if not self._can_ask:
            return None
        return self._facts.next_ask(other_way=self._pauses.other_way, may_catch_up=self._grace <= self._now)

    def _start(self, ask: Ask) -> None:
        self.ask = ask
        self._ask_until = self._now + self._limits.reply_timeout
        self._status = None
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
        if not self.is_connected or self.ask is not None or self._pauses or facts.seq is None:
            return
        if self._can_ask:
            self._start(Ask.status() if facts.is_ours or facts.kind is None else facts.catch_up())
        elif facts.is_ours:
            facts.doubt = True
            self.picture.why = f"silent for {self._limits.probe_interval:g} s"

    def check(self) -> None:
        """Raise `IntegrityError` where the facts contradict each other."""
        self._held.check()
        if (self.state is State.EXACT) != self._is_exact:
            raise IntegrityError(
                f"{self.name}: says {self.state}, but knows {self._facts}, connected={self.is_connected}"
            )
