"""The picture that a consumer has of one publisher: what it was told, in order, and how good that makes it.

A picture is built of what it is given. It asks for nothing, has no clock and does not judge its publisher; that is for
`kvtier.events.follow.follower` and, of batches that were asked for, `kvtier.events.follow.repair`. `facts` is what it adds up to.
Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvtier.events.follow.facts import Facts, Verdict, payload_hash
from kvtier.events.types import Mark
from kvtier.events.updates import Counters, Received, Reset, State, StateChanged, Update
from kvtier.events.wire import Batch

__all__ = ["Picture"]

B = TypeVar("B", bound=Batch)

_REMEMBERED = 1024
"""How many replayed batches can be told from other ones when they arrive live."""


class Picture(Generic[B]):
    """What the consumer was told. `why` is the reason to give where it is not exact."""

    def __init__(self, name: str, decode: Callable[[bytes], B]) -> None:
        """Begin with no picture; `decode` raises `ValueError` where a payload is no batch."""
        self.name = name
        self.state = State.REPAIRING
        self.reason = "connecting"
        self.why = "joining"
        self.facts = Facts()
        self.counters = Counters()
        self.ts: float | None = None  # of the newest batch applied
        self.applied_at: float | None = None
        self._decode = decode
        self._updates: list[Update] = [StateChanged(name, self.state, self.reason)]
        self._is_dirty = False  # something was delivered since the last reset
        self._replayed: dict[int, int] = {}  # hashes of what a replay brought and the live stream may bring again

    def take_updates(self) -> list[Update]:
        """Take out what the consumer should do, in order."""
        taken, self._updates = self._updates, []
        return taken

    def tell(self, state: State, reason: str) -> None:
        """Say how good the picture is."""
        if state is not self.state:
            self._updates.append(StateChanged(self.name, state, reason))
        self.state, self.reason = state, reason

    def read(self, payload: bytes) -> B | None:
        """Decode a batch; `None` where that cannot be done."""
        try:
            return self._decode(payload)
        except ValueError as error:
            self.counters.bad_frames += 1
            self.why = f"a batch cannot be read: {error}"
            return None

    def deliver(self, seq: int, batch: B, payload: bytes, now: float) -> Verdict | None:
        """Give a batch to the consumer and bring the running sum up to it; return what its mark, if any, says of that."""
        self.facts.add(seq, batch.change(), payload)
        self._is_dirty = True
        self._updates.append(Received(self.name, seq, batch))
        self.counters.batches += 1
        self.ts, self.applied_at = batch.ts, now
        if batch.skipped:
            self._note_skipped(seq, batch.skipped)
        return None if batch.mark is None else self.compare(batch.mark)

    def _note_skipped(self, seq: int, skipped: int) -> None:
        self.counters.skipped_events += skipped
        self.why = f"{skipped} events of batch {seq} cannot be read"
        if self.facts.is_ours:
            self.facts.doubt = True  # a mark tells whether they mattered
        else:
            self.facts.complete = False

    def compare(self, mark: Mark) -> Verdict:
        """Hold the running sum against what the publisher says it holds."""
        facts = self.facts
        self.counters.digest_checks += 1
        self.counters.restarts += facts.epoch not in (None, mark.epoch)
        verdict = facts.judge(mark)
        if verdict is Verdict.DISPROVED:
            self.counters.digest_mismatches += 1
            self.why = f"digest of batch {facts.seq}: it has {mark.blocks} blocks, the stream adds up to {facts.blocks}"
        return verdict

    def lose(self, upto: int) -> None:
        """Go on at batch `upto` without those before it."""
        self.counters.gaps += 1
        self.counters.lost_batches += self.facts.skip_to(upto)

    def begin_anew(self, *, silent: bool = False) -> None:
        """Drop the picture, keep the knowledge of who publishes. `silent`: the next batch tells the consumer itself."""
        if self._is_dirty and not silent:
            self.counters.resets += 1
            self._updates.append(Reset(self.name))
        self._is_dirty = False
        self.facts.blank()
        self._replayed.clear()

    def remember(self, seq: int, payload: bytes) -> None:
        """Remember a batch that a replay brought: it may come again, and shows then who sends the live stream."""
        self._replayed[seq] = payload_hash(payload)
        if len(self._replayed) > _REMEMBERED:
            del self._replayed[next(iter(self._replayed))]

    def recall(self, seq: int) -> int | None:
        """Return the hash of a batch that was applied, once; `None` where it is not known any more."""
        return self._replayed.pop(seq, self.facts.proof if seq == self.facts.seq else None)
