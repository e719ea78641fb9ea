"""The replica of one publisher: the state given to the consumer, and the proof that the publisher holds it.

One object owns both. `seq` is the last batch applied, `newest` the newest known to exist. The replica is
exact when it is whole, not behind, not being built, and not doubted to have the same publisher.

Our publishers mark batches with epoch, count and digest. A mark that equals the running sums confirms them,
but only if nothing was lost: losses can cancel in the sums and still leave wrong blocks (a lost store, a
removal and a store that arrive, a lost removal). After a loss the replica needs a snapshot, or a clear of
every rank heard of before the loss and then a mark; see `RankSums`. Other publishers send no marks: their
batches are counted from number 0 or from a clear, and the bytes of the last batch show whether the same
publisher answers. A publisher counts as one of these only once that is proven: by its answer to a status
request, or by a number 0 without a mark, because the first batch of each of our processes has one. Until
then a clear proves nothing about ranks that were never heard of.

A replica sends no requests and has no clock; `kvtier.events.follow.follower` does both. Not for several
threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Generic, TypeVar

import xxhash

from kvtier.errors import IntegrityError
from kvtier.events.types import Mark
from kvtier.events.updates import Counters, Kind, Received, Reset, State, StateChanged, Update
from kvtier.events.wire import Batch, Change

__all__ = ["MAX_RANKS", "MarkResult", "RankSums", "Replica", "payload_hash"]

B = TypeVar("B", bound=Batch)

MAX_RANKS = 4096
"""How many ranks of one publisher are tracked; with more, no replica is exact."""
_REMEMBERED = 1024
"""How many replayed batches are remembered, to recognize them when they arrive live."""
_U64 = (1 << 64) - 1

payload_hash = xxhash.xxh3_64_intdigest


class MarkResult(Enum):
    """A mark's verdict on a replica."""

    CONFIRMED = auto()  # the sums agree, and nothing was lost
    DISPROVED = auto()  # the sums do not agree, and should
    OPEN = auto()  # the replica was known or suspected to lack something
    REPLACED = auto()  # another incarnation sent the mark, and the replica is not what it holds


class RankSums:
    """The sums of each rank's blocks, and whether they are known to be complete.

    A mark covers all ranks together, and a clear only its batch's rank. A lost batch may have changed any
    rank, even one never heard of. So a loss *tears* the ranks heard of before it; a clear mends one. When
    no rank is torn, the sums can lack only the blocks of ranks that were first heard of since, or never. A
    mark with the same number of blocks shows that there are no such blocks.
    """

    __slots__ = ("_fresh", "_is_crowded", "_ranks", "_torn", "is_open")

    def __init__(self, *, is_open: bool = True) -> None:
        """Begin with nothing; `is_open`: the publisher may have held blocks before."""
        self.is_open = is_open  # something may have been lost since the last proof
        self._ranks: dict[int, list[int]] = {}  # blocks, and their digest before it is reduced
        self._torn: set[int] = set()  # heard of before a loss, and not cleared since
        self._fresh: set[int] = set()  # first heard of after a loss, and not cleared since
        self._is_crowded = False

    def add(self, rank: int, change: Change) -> None:
        """Count an applied batch of a rank; a batch without a rank has rank 0."""
        cleared, blocks, digest = change
        sums = self._ranks.get(rank) or self._hear_of(rank)
        if cleared:
            sums[0] = sums[1] = 0
            self._torn.discard(rank)
            self._fresh.discard(rank)
        sums[0] += blocks
        sums[1] += digest

    def _hear_of(self, rank: int) -> list[int]:
        if len(self._ranks) >= MAX_RANKS:
            self._is_crowded = self.is_open = True
            return [0, 0]
        if self.is_open:
            self._fresh.add(rank)
        return self._ranks.setdefault(rank, [0, 0])

    @property
    def blocks(self) -> int:
        """The number of held blocks."""
        return sum(blocks for blocks, _ in self._ranks.values())

    @property
    def digest(self) -> int:
        """The digest of all held blocks."""
        return sum(digest for _, digest in self._ranks.values()) & _U64

    def note_loss(self) -> None:
        """Note that a batch was lost, of an unknown rank."""
        self.is_open = True
        self._torn.update(self._ranks)
        self._fresh.clear()

    def confirm(self, mark: Mark) -> bool:
        """Accept a mark as a proof if it is one; return whether it is."""
        if self._torn or self._is_crowded or (mark.blocks, mark.digest) != (self.blocks, self.digest):
            return False
        self.is_open = False
        self._fresh.clear()
        return True

    def are_whole(self, *, is_stock: bool) -> bool:
        """Say whether nothing can be missing.

        A publisher that is known to be a stock one has only the ranks that it has named.
        """
        if not self.is_open:
            return True
        return is_stock and bool(self._ranks) and not (self._torn or self._fresh or self._is_crowded)

    def check(self) -> None:
        """Raise `IntegrityError` if proven sums have open ranks, or a rank is unknown."""
        if not (self._torn | self._fresh) <= self._ranks.keys() or self._torn & self._fresh:
            raise IntegrityError(
                f"ranks {self._torn} are torn and {self._fresh} fresh, but {set(self._ranks)} were heard of"
            )
        if not self.is_open and (self._torn or self._fresh or self._is_crowded):
            raise IntegrityError(f"sums count as proven, but ranks {self._torn | self._fresh} are not")


class Replica(Generic[B]):
    """The state given to the consumer, and how good it is. `problem` says why it is not exact."""

    def __init__(self, name: str, decode: Callable[[bytes], B]) -> None:
        """Begin with nothing; `decode` raises `ValueError` if a payload is not a batch."""
        self.name = name
        self.state = State.REPAIRING
        self.reason = "connecting"
        self.problem = "joining"
        self.kind: Kind | None = None
        self.epoch: int | None = None
        self.seq: int | None = None
        self.newest = -1
        self.is_doubted = False  # another publisher may have taken over
        self.is_building = False  # an answer is arriving: the replica is neither the old nor the new one
        self.is_exhausted = False  # the publisher no longer has the missing batches
        self.counters = Counters()
        self.ts: float | None = None  # of the newest batch applied
        self.applied_at: float | None = None
        self.sums = RankSums()  # read only; the methods below change them
        self._last: bytes | None = None  # the last applied batch, if the publisher sends no marks
        self._decode = decode
        self._updates: list[Update] = [StateChanged(name, self.state, self.reason)]
        self._has_delivered = False  # since the last reset
        self._replayed: dict[int, int] = {}  # hashes of replayed batches that may still arrive live

    # -- state -------------------------------------------------------------------------------------

    @property
    def has_marks(self) -> bool:
        """Whether the publisher marks its batches, i.e. is one of ours."""
        return self.kind is Kind.KVTIER

    @property
    def is_whole(self) -> bool:
        """Whether the consumer has everything that the publisher held at `seq`."""
        return self.seq is not None and self.sums.are_whole(is_stock=self.kind is Kind.STOCK)

    @property
    def is_exact(self) -> bool:
        """Whether the replica is what the publisher holds, as far as known."""
        return self.is_whole and not (self.is_behind or self.is_doubted or self.is_building)

    @property
    def is_behind(self) -> bool:
        """Whether there are batches that are not applied."""
        return self.position < self.newest

    @property
    def position(self) -> int:
        """The last batch applied; -1 before the first."""
        return -1 if self.seq is None else self.seq

    @property
    def blocks(self) -> int | None:
        """The number of blocks that the consumer holds, if known."""
        return self.sums.blocks if self.has_marks and self.is_whole else None

    @property
    def proof(self) -> int | None:
        """The hash of the last applied batch, if the publisher sends no marks; computed on demand."""
        return None if self._last is None else payload_hash(self._last)

    # -- updates for the consumer ------------------------------------------------------------------

    def take_updates(self) -> list[Update]:
        """Take the updates for the consumer, in order."""
        taken, self._updates = self._updates, []
        return taken

    def set_state(self, state: State, reason: str) -> None:
        """Set the replica's state, and report it to the consumer if it has changed."""
        if state is not self.state:
            self._updates.append(StateChanged(self.name, state, reason))
        self.state, self.reason = state, reason

    def read(self, payload: bytes) -> B | None:
        """Decode a batch; `None` if that fails."""
        try:
            return self._decode(payload)
        except ValueError as error:
            self.counters.bad_frames += 1
            self.problem = f"a batch cannot be read: {error}"
            return None

    def apply(
        self, seq: int, batch: B, payload: bytes, now: float, *, is_snapshot: bool = False
    ) -> MarkResult | None:
        """Give a batch to the consumer and count it; return the verdict of its mark, if any.

        In a snapshot, all blocks in the sums came with the snapshot, whichever publisher made it.
        """
        mark, sums = batch.mark, self.sums
        is_other = mark is not None and self.epoch not in (None, mark.epoch)
        if is_other:
            self.counters.restarts += 1
            if not is_snapshot:
                sums.note_loss()  # another incarnation holds nothing from this one
        sums.add(batch.data_parallel_rank or 0, batch.change())
        self.seq = seq
        self._last = None if self.kind is Kind.KVTIER else payload
        if self.is_exhausted and self.is_whole:
            self.is_exhausted = False
        if batch.skipped:
            sums.note_loss()
            self.counters.skipped_events += batch.skipped
            self.problem = f"{batch.skipped} events of batch {seq} cannot be read"
        if self.state is State.EXACT and not self.is_whole:
            # Before the batch, so that a consumer that reads in order never trusts a wrong moment.
            self.set_state(State.REPAIRING, self.problem)
        self._has_delivered = True
        self._updates.append(Received(self.name, seq, batch))
        self.counters.batches += 1
        self.ts, self.applied_at = batch.ts, now
        if mark is None:
            return None
        result = self.judge(mark)
        return MarkResult.REPLACED if is_other and result is not MarkResult.CONFIRMED else result

    def remember(self, seq: int, payload: bytes) -> None:
        """Remember a replayed batch: when it comes live, it shows which publisher sends the live stream."""
        self._replayed[seq] = payload_hash(payload)
        if len(self._replayed) > _REMEMBERED:
            del self._replayed[next(iter(self._replayed))]

    def recall(self, seq: int) -> int | None:
        """Return the hash of an applied batch, once; `None` if it is no longer known."""
        return self._replayed.pop(seq, self.proof if seq == self.seq else None)

    # -- proofs, losses, new beginnings ------------------------------------------------------------

    def judge(self, mark: Mark) -> MarkResult:
        """Compare the sums with what the publisher says it holds at `seq`."""
        self.kind, self.epoch, self.is_exhausted = Kind.KVTIER, mark.epoch, False
        self.counters.digest_checks += 1
        sums = self.sums
        if sums.confirm(mark):
            self.is_doubted = False
            return MarkResult.CONFIRMED
        if sums.is_open:
            return MarkResult.OPEN
        sums.note_loss()
        if self.is_doubted:
            return MarkResult.OPEN
        self.counters.digest_mismatches += 1
        self.problem = (
            f"digest of batch {self.seq}: it has {mark.blocks} blocks, the stream adds up to {sums.blocks}"
        )
        return MarkResult.DISPROVED

    def expect(self, seq: int) -> None:
        """Note that batches up to `seq` exist."""
        self.newest = max(self.newest, seq)

    def expect_only(self, seq: int) -> None:
        """Note that `seq` is the newest batch, whatever was known before."""
        self.newest = seq

    def doubt(self) -> None:
        """Note that another publisher may have taken over."""
        self.is_doubted = True

    def trust(self) -> None:
        """Note that the publisher is the same."""
        self.is_doubted = False

    def begin_building(self) -> None:
        """Note that an answer is arriving."""
        self.is_building = True

    def end_building(self) -> bool:
        """Note that the answer is complete; say whether there was one."""
        was_building, self.is_building = self.is_building, False
        return was_building

    def identify(self, kind: Kind, epoch: int | None = None) -> None:
        """Note the publisher's own word on its kind; for one of ours, what it holds is not known yet."""
        self.kind, self.epoch = kind, epoch
        if kind is Kind.KVTIER:
            self.is_exhausted = False  # it has snapshots
            self.sums.note_loss()

    def note_loss(self) -> None:
        """Note that the publisher cannot bring this replica up to date, or was not heard for a while."""
        self.sums.note_loss()

    def lose(self, upto: int) -> None:
        """Continue at batch `upto` without those before it."""
        self.counters.gaps += 1
        self.counters.lost_batches += upto - self.position - 1
        self.seq, self.newest = upto - 1, max(self.newest, upto - 1)
        self._last = None
        self.sums.note_loss()

    def begin_at(self, seq: int) -> None:
        """Build the replica from batch `seq` on: it is whole only if nothing precedes that batch."""
        self.seq = seq - 1
        self.sums = RankSums(is_open=seq > 0)

    def rebuild_from(self, seq: int) -> None:
        """Begin again with the first batch that the publisher still has."""
        self.forget()
        self.begin_at(seq)
        if seq:
            self.counters.truncated_replays += 1
            self.problem = f"the publisher's buffer begins at batch {seq}"
            self.is_exhausted = self.kind is Kind.STOCK

    def exhaust(self) -> None:
        """Note that everything was replayed: this publisher cannot provide what is missing now."""
        self.is_exhausted = not self.is_whole

    def forget(self) -> None:
        """Drop all updates given so far; still know the publisher and its newest batch."""
        if self._has_delivered:
            if self.state is State.EXACT:
                # First: a consumer that has forgotten everything holds nothing exact.
                self.set_state(State.REPAIRING, self.problem)
            self.counters.resets += 1
            self._updates.append(Reset(self.name))
        self._has_delivered = self.is_doubted = self.is_building = self.is_exhausted = False
        self.seq = self._last = None
        self.sums = RankSums()
        self._replayed.clear()

    def forget_publisher(self) -> None:
        """Drop all updates given so far, and the knowledge of the publisher."""
        self.forget()
        self.kind = self.epoch = None
        self.newest = -1

    def check(self) -> None:
        """Raise `IntegrityError` if the sums contradict each other."""
        self.sums.check()
