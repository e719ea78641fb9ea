"""What is known of a publisher and of the picture that a consumer has of it. Pure logic: no time, nothing to send.

Five facts decide everything: `seq`, the last batch applied; `ahead`, the newest known to exist; `complete`, the picture has
all that the publisher held at `seq`; `doubt`, it may not be the same publisher any more; `kind`, who it is. The picture
is exact when it is complete, not in doubt and not behind. Where it is not, `next_ask` names the request that brings it closer.

Our publishers mark batches with epoch, count and digest: a mark that equals the running sum proves the picture, one that
does not disproves it. Others are asked for the last batch again, inclusive: its bytes tell whether it is the same one.
Not for several threads at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import xxhash

from kvtier.events.follow.asks import Ask
from kvtier.events.types import Mark
from kvtier.events.updates import Kind
from kvtier.events.wire import Change

__all__ = ["FAR", "Facts", "Verdict", "payload_hash"]

_U64 = (1 << 64) - 1
FAR = 10_000
"""A hole of more batches than this is closed by a snapshot."""

payload_hash = xxhash.xxh3_64_intdigest


class Verdict(Enum):
    """What a mark says of the picture."""

    PROVEN = auto()  # it adds up
    DISPROVED = auto()  # it does not, and should
    OPEN = auto()  # it does not, as was known or feared
    REPLACED = auto()  # another incarnation speaks, and it does not add up to that one's


@dataclass(slots=True)
class Facts:
    """What is known. `seq` is `None` while there is no picture."""

    kind: Kind | None = None
    epoch: int | None = None
    seq: int | None = None
    ahead: int = -1
    complete: bool = False
    doubt: bool = False
    hopeless: bool = False  # what is missing cannot be had from this publisher
    growing: bool = False  # a replay is building the picture: it is not what it was, and not yet what it will be
    blocks: int = 0
    digest: int = 0
    last: bytes | None = None  # the last batch applied, where the publisher sends no marks

    @property
    def is_ours(self) -> bool:
        """Whether the publisher marks its batches."""
        return self.kind is Kind.KVTIER

    @property
    def is_exact(self) -> bool:
        """Whether the picture is what the publisher held at `seq`, as far as can be known."""
        return self.seq is not None and self.complete and not self.doubt and not self.growing and self.seq >= self.ahead

    @property
    def proof(self) -> int | None:
        """The hash of the last batch applied, where the publisher sends no marks; hashed when it is asked for."""
        return None if self.last is None else payload_hash(self.last)

    def blank(self) -> None:
        """Have no picture; still know who publishes, and how far it is."""
        self.seq = self.last = None
        self.complete = self.doubt = self.hopeless = self.growing = False
        self.blocks = self.digest = 0

    def begin_at(self, seq: int) -> None:
        """Build the picture from batch `seq` on: a whole one only where nothing precedes it."""
        self.seq, self.complete = seq - 1, seq == 0

    def add(self, seq: int, change: Change, payload: bytes) -> None:
        """Count a batch that was applied."""
        cleared, blocks, digest = change
        if cleared:
            self.blocks = self.digest = 0
            self.complete, self.hopeless = True, False
        self.blocks += blocks
        self.digest = (self.digest + digest) & _U64
        self.seq = seq
        self.last = None if self.kind is Kind.KVTIER else payload

    def skip_to(self, seq: int) -> int:
        """Go on at batch `seq` without those before it; return how many they are."""
        assert self.seq is not None
        missing = seq - self.seq - 1
        self.seq, self.ahead = seq - 1, max(self.ahead, seq - 1)
        self.complete, self.last = False, None
        return missing

    def judge(self, mark: Mark) -> Verdict:
        """Hold the running sum against what the publisher says it holds."""
        replaced = self.epoch not in (None, mark.epoch)
        self.kind, self.epoch = Kind.KVTIER, mark.epoch
        if (mark.blocks, mark.digest) == (self.blocks, self.digest):
            self.complete, self.doubt = True, False
            return Verdict.PROVEN
        if replaced:
            return Verdict.REPLACED
        was_believed, self.complete = self.complete and not self.doubt, False
        return Verdict.DISPROVED if was_believed else Verdict.OPEN

    def next_ask(self, *, other_way: bool, may_catch_up: bool) -> Ask | None:
        """Return the request that brings the picture closer to exact, if there is one.

        `other_way`: who did not answer the usual question is asked another. `may_catch_up`: what is ahead is not under way.
        """
        if self.kind is None:
            return Ask.history() if other_way else Ask.status()
        if self.seq is None or not (self.complete or self.hopeless):
            return Ask.snapshot() if self.is_ours else Ask.history()
        if self.doubt and self.is_ours:
            return Ask.status()
        if not may_catch_up or not (self.doubt or self.seq < self.ahead):
            return None
        return Ask.snapshot() if self.is_ours and self.ahead > self.seq + FAR else self.catch_up()

    def catch_up(self) -> Ask:
        """Return the request for what follows `seq`, with a proof where the publisher sends no marks."""
        return Ask.replay(-1 if self.seq is None else self.seq, None if self.is_ours else self.proof)
