"""A naive publisher of several ranks, links that lose the worst batches, and a consumer to check.

Everything is drawn from a seed. Blocks are few and come and go, so that losses often cancel in the sums; a
`Nemesis` loses batches so that they do. Everything here has a clock of its own and no sockets.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.chaos.stream_kit import Heard

from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    EventEncoder,
    Follower,
    Limits,
    Mark,
    Place,
    Received,
    RequestKind,
    Reset,
    State,
    StateChanged,
    StreamRequest,
    Update,
    decode_batch,
    frame_batch,
    place_of,
    place_weight,
    to_u64,
)
from kvtier.index import PrefixIndex

KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
Message = tuple[int, bytes]
Blocks = frozenset[tuple[int, Place, int]]

BLOCK_SIZE = 2
PLACES: tuple[Place, ...] = (
    ("GPU", 0, "", ""),
    ("CPU", 0, "", ""),
    ("GPU", 1, "", ""),
    ("STORAGE", 0, "", ""),
)
HASHES = [block_hash | 1 << 61 for block_hash in Random(5).sample(range(1 << 61), 8)]
UNREADABLE = b"\x92\xa7Unknown\x01"


def stored(place: Place, hashes: list[int]) -> BlockStored:
    """Return a store of blocks that stand alone; their tokens follow from their hashes."""
    tokens = [block_hash + at & 0xFFFF for block_hash in hashes for at in range(BLOCK_SIZE)]
    return BlockStored(
        hashes,
        None,
        tokens,
        BLOCK_SIZE,
        None,
        place[0],
        None,
        group_idx=place[1],
        kv_cache_spec_kind="full_attention",
    )


def removed(place: Place, hashes: list[int]) -> BlockRemoved:
    return BlockRemoved(hashes, place[0], group_idx=place[1])


class Holdings:
    """What is held of each rank; what a consumer that applies updates has."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, Place, int], None] = {}
        self.state: State | None = None

    def follow(self, updates: list[Update]) -> None:
        for update in updates:
            if isinstance(update, Received):
                self.apply(update.batch.data_parallel_rank, update.batch.events)
            elif isinstance(update, Reset):
                self.blocks.clear()
            else:
                self.state = update.state

    def apply(self, rank: int, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for key in [key for key in self.blocks if key[0] == rank]:
                    del self.blocks[key]
                continue
            keys = [(rank, place_of(event), to_u64(block_hash)) for block_hash in event.block_hashes]
            for key in keys:
                if isinstance(event, BlockStored):
                    self.blocks[key] = None
                else:
                    self.blocks.pop(key, None)

    @property
    def held(self) -> Blocks:
        return frozenset(self.blocks)


class RankedPublisher:
    """The protocol in its simplest form, for several ranks; stock ones send no marks and no snapshots."""

    def __init__(
        self,
        random: Random,
        *,
        ranks: int,
        ring: int,
        is_stock: bool,
        places: int,
        hashes: int,
        marks: float = 0.2,
        clears: float = 0.03,
        clears_first: bool = True,
    ) -> None:
        """Mark and clear this often; `clears_first`: the first batch of a process is a clear."""
        self.random = random
        self._marks, self._clears, self._clears_first = marks, clears, clears_first
        self.ranks = ranks
        self.is_stock = is_stock
        self.newest = -1
        self.runs = 0
        self.epochs: list[int] = []
        self.truth = Holdings()
        self.history: dict[tuple[int, int], Blocks] = {}  # by epoch and number: what was held then
        self.sent_by: dict[bytes, int] = {}  # the epochs of live batches
        self._encoder = EventEncoder(random.choice(("map", "array")))
        self._ring: deque[Message] = deque(maxlen=ring)
        self._places, self._hashes = PLACES[:places], HASHES[:hashes]
        self._heard: set[int] = set()
        self._shared: tuple[int, int, list[bytes]] = (0, -1, [])  # the epoch and number of a snapshot
        self.begin()

    def begin(self, *, keeps_sequence: bool = False) -> Message | None:
        """Start, or start again: empty, under another epoch."""
        self.runs += 1
        self.epoch = self.runs << 32 | self.random.getrandbits(31)
        self.epochs.append(self.epoch)
        self.truth, self._heard = Holdings(), {0}
        self._ring.clear()
        self.newest += self.random.choice((0, 0, 7)) if keeps_sequence else -self.newest - 1
        if self.is_stock:
            return None
        return self.send(0, [AllBlocksCleared()] if self._clears_first else [], is_marked=True)

    def step(self) -> Message:
        """Send what an engine might do."""
        rank = self.random.randrange(self.ranks)
        if self.random.random() < self._clears:
            return self.send(rank, [AllBlocksCleared()])
        return self.send(
            rank, [event for _ in range(self.random.choice((1, 1, 1, 2))) for event in self.change(rank)]
        )

    def change(self, rank: int) -> list[KVEvent]:
        """Remove blocks that are there, or else store them."""
        place = self.random.choice(self._places)
        hashes = self.random.sample(self._hashes, min(len(self._hashes), self.random.choice((1, 1, 1, 2))))
        there = [block_hash for block_hash in hashes if (rank, place, block_hash) in self.truth.blocks]
        events: list[KVEvent] = (
            [removed(place, there)] if there else [stored(place, [held]) for held in hashes]
        )
        self.truth.apply(rank, events)
        return events

    def clear(self, rank: int) -> Message:
        return self.send(rank, [AllBlocksCleared()])

    def heartbeat(self) -> Message | None:
        return None if self.is_stock else self.send(0, [], is_marked=True)

    def overflow(self) -> None:
        """Take a batch for which there is no room: its number is used up, and cannot be replayed."""
        rank = self.random.randrange(self.ranks)
        self._heard.add(rank)
        self.change(rank)
        self.newest += 1
        self.history[self.epoch, self.newest] = self.truth.held
        self._ring.clear()

    def send(self, rank: int, events: list[KVEvent], *, is_marked: bool | None = None) -> Message:
        self._heard.add(rank)
        self.truth.apply(rank, [event for event in events if isinstance(event, AllBlocksCleared)])
        self.newest += 1
        marked = self.random.random() < self._marks if is_marked is None else is_marked
        message = self.newest, self._frame(rank, events, marked and not self.is_stock)
        self._ring.append(message)
        self.history[self.epoch, self.newest] = self.truth.held
        self.sent_by[message[1]] = self.epoch
        return message

    def _frame(self, rank: int, events: list[KVEvent], is_marked: bool) -> bytes:
        parts = [self._encoder.event(event) for event in events]
        return frame_batch(
            self.random.random(), [*parts, self._encoder.mark(self._mark())] if is_marked else parts, rank
        )

    def _mark(self) -> Mark:
        digest = sum(block_hash * place_weight(place) for _, place, block_hash in self.truth.blocks)
        return Mark(self.epoch, len(self.truth.blocks), digest % (1 << 64))

    def answer(self, request: bytes) -> list[Message]:
        """Return all batches of the answer, without the end marker."""
        if not self.is_stock and request == b"kvtier:status":
            return [(self.newest, self._frame(0, [], is_marked=True))]
        if not self.is_stock and request == b"snapshot":
            epoch, newest, parts = self._shared
            if epoch != self.epoch or not self._continues(newest) or self.random.random() < 0.5:
                self._shared = _, newest, parts = self.epoch, self.newest, self._snapshot()
            return [(newest + 1, part) for part in parts]
        start = int.from_bytes(request, "big")
        if start > self.newest or self.is_stock or (self._ring and self._ring[0][0] <= start):
            return [(seq, payload) for seq, payload in self._ring if seq >= start]
        parts, count = self._snapshot(), self.newest + 1 - start
        if len(parts) > count:  # as few as there can be: a batch for each rank, perhaps under one number
            parts = self._snapshot(is_dense=True)
        parts += [self._frame(0, [], is_marked=False)] * (count - len(parts))
        return [(min(start + at, self.newest), part) for at, part in enumerate(parts)]

    def _continues(self, newest: int) -> bool:
        """Return whether the ring has every batch after a snapshot, so that others may have it too."""
        return newest == self.newest or (bool(self._ring) and self._ring[0][0] <= newest + 1)

    def _snapshot(self, *, is_dense: bool = False) -> list[bytes]:
        parts: list[tuple[int, list[KVEvent]]] = []
        for rank in sorted(self._heard):
            held = [(place, block_hash) for of, place, block_hash in self.truth.blocks if of == rank]
            stores: list[KVEvent] = [stored(place, [block_hash]) for place, block_hash in held]
            if is_dense:
                parts.append((rank, [AllBlocksCleared(), *stores]))
            else:
                parts += [(rank, [AllBlocksCleared()]), *((rank, [store]) for store in stores)]
        return [self._frame(*part, is_marked=part is parts[-1]) for part in parts]


class Nemesis:
    """Loses what hurts: first anything, then just the batches that make the lost ones cancel."""

    def __init__(self, random: Random, loss: float) -> None:
        self.random, self.loss, self.is_at_work = random, loss, loss > 0
        self._lost: Counter[int] = Counter()

    def loses(self, payload: bytes) -> bool:
        """Return whether this batch is lost."""
        if not self.is_at_work:
            return False
        change = _weights(payload)
        debt = Counter({key: value for key, value in self._lost.items() if value})
        cancels = (
            bool(debt) and all(change.get(key, 0) == -value for key, value in debt.items()) and bool(change)
        )
        if self.random.random() < (0.9 if cancels else self.loss):
            self._lost.update(change)
            return True
        return False


def _weights(payload: bytes) -> dict[int, int]:
    """Return what a batch does to the digest, block by block; as in the digest, the rank does not count."""
    weights: Counter[int] = Counter()
    for event in decode_batch(payload).events:
        if not isinstance(event, AllBlocksCleared):
            for block_hash in event.block_hashes:
                sign = 1 if isinstance(event, BlockStored) else -1
                weights[to_u64(block_hash) * place_weight(place_of(event))] += sign
    return dict(weights)


@dataclass
class Case:
    """One publisher, one follower, what lies between them, and a clock; all drawn from a seed."""

    seed: int
    random: Random = field(init=False)
    publisher: RankedPublisher = field(init=False)
    follower: Follower[DecodedBatch] = field(init=False)
    consumer: Holdings = field(init=False, default_factory=Holdings)
    updates: list[Update] = field(init=False, default_factory=list)
    claims: int = field(init=False, default=0)
    now: float = field(init=False, default=100.0)

    def __post_init__(self) -> None:
        self.random = random = Random(self.seed)
        self.is_stock = random.random() < 0.15
        self.can_ask = random.random() < 0.6
        self.ring = random.choice((1, 4, 20, 100_000))
        self.publisher = RankedPublisher(
            random,
            ranks=1 if self.is_stock else random.choice((1, 2, 2, 3)),
            ring=self.ring,
            is_stock=self.is_stock,
            places=random.choice((1, 1, 2, len(PLACES))),
            hashes=random.choice((1, 1, 2, 4)),
            marks=random.choice((0.0, 0.05, 0.2)),
            clears=random.choice((0.03, 0.12, 0.25)),
            clears_first=random.random() < 0.7,
        )
        self.beats = random.choice((0.0, 0.01, 0.01, 0.05, 0.05, 0.14, 0.14))
        self.cuts = random.choice((0.04, 0.04, 0.04, 0.12))
        tiny = Limits(pending_batches=3, pending_bytes=400, probe_interval=2.0, backoff=0.1, backoff_max=0.5)
        roomy = Limits(probe_interval=2.0, backoff=0.1, backoff_max=0.5)
        limits = random.choice((tiny, roomy))
        self.follower = Follower("p", decode_batch, can_ask=self.can_ask, limits=limits, now=self.now)
        self.nemesis = Nemesis(random, random.choice((0.0, 0.05, 0.2, 0.4)))
        self.damage = random.choice((0.0, 0.0, 0.05))
        self.trouble = random.choice((0.0, 0.3, 0.9, 1.0))  # how many answers go wrong
        self.restarts = random.choice((0.0, 0.02, 0.1))
        self.ambushes = 0.0 if self.is_stock else random.choice((0.0, 0.0, 0.15 if self.can_ask else 0.05))
        self._link: deque[Message] = deque()
        self._replies: deque[Message] | None = None
        self._asked: StreamRequest | None = None
        self._ending = ""
        self.heard = Heard()
        for _ in range(random.choice((0, 0, 1, 10))):
            self.publisher.step()
        self.follower.connected(self.now)

    def run(self, steps: int = 120) -> None:
        """Let much go wrong, and hold every claim to the truth; then nothing, and demand the truth."""
        for _ in range(steps):
            self.step()
        self._calm_down()

    def step(self) -> None:
        """Let something happen, and hold what is claimed then to the truth."""
        self._happen()
        self._serve(self.random.randint(0, 3))
        self.check_claim()

    # -- what happens ------------------------------------------------------------------------------

    def _happen(self) -> None:
        random, publisher = self.random, self.publisher
        self.now += random.random() * 0.2
        dice = random.random()
        if random.random() < self.ambushes and (self._asked is not None or not self.can_ask):
            self._ambush()
        elif dice < self.restarts:
            self._restart()
        elif dice < self.cuts:
            self._reconnect()
        elif dice < self.cuts + 0.02 and not self.is_stock:
            publisher.overflow()
        elif dice < self.cuts + 0.02 + self.beats:
            self._send(publisher.heartbeat())
        else:
            self._send(publisher.step())

    def _send(self, message: Message | None) -> None:
        if message is None or self.nemesis.loses(message[1]):
            return
        if self.nemesis.is_at_work and self.random.random() < self.damage:
            damaged = _damaged(message[1])
            self.publisher.sent_by[damaged] = self.publisher.sent_by[message[1]]
            message = message[0], damaged
        self._link.append(message)
        if self.nemesis.is_at_work and self.random.random() < self.damage:
            self._link.append(message)  # twice

    def _restart(self) -> None:
        is_seen = self.is_stock or self.random.random() < 0.5
        hello = self.publisher.begin(keeps_sequence=not self.is_stock and self.random.random() < 0.6)
        if self.random.random() < 0.4:  # it may come to where the old one was, unheard
            while self.publisher.newest < self.follower.position:
                hello = self.publisher.step()
            hello = None if self.publisher.newest == self.follower.position else hello
        if is_seen:
            self._reconnect(is_cut=True)
        if self.random.random() < 0.4:  # else it is lost, and nothing live tells of the restart yet
            self._send(hello)

    def _ambush(self) -> None:
        """Start another process unseen, and let it go on just where its batches would fit in."""
        if self.random.random() < 0.5:
            self._link.clear()
        newest = self.random.choice(self._last_numbers())
        self.publisher.begin()
        while self.publisher.newest < newest:
            self.publisher.step()
        if self._asked is not None and self._asked.kind is RequestKind.STATUS:
            return  # only the answer tells
        rank = self.random.randrange(self.publisher.ranks)
        self._link.append(self.publisher.send(rank, self.publisher.change(rank), is_marked=False))

    def _last_numbers(self) -> list[int]:
        """Return numbers behind which a batch of another process looks like the next one."""
        if self._replies and self._asked is not None:  # behind the answer that is under way
            return [self._replies[-1][0] - (self._asked.kind is RequestKind.SNAPSHOT)]
        if self._link and self._asked is not None and self._asked.kind is RequestKind.SNAPSHOT:
            return [self._link[0][0] - 2]  # its snapshot ends before a batch of the process before it
        numbers = [self.follower.position, self.publisher.newest, self.publisher.newest + 2]
        return numbers + [seq for seq, _ in list(self._link)[-1:]]

    def _reconnect(self, *, is_cut: bool = False) -> None:
        if is_cut or self.random.random() < 0.7:
            self._link.clear()
        self.heard.cut()
        self.follower.disconnected(self.now)
        self.follower.connected(self.now)

    def _serve(self, budget: int) -> None:
        """Let a part of what is under way arrive."""
        for _ in range(min(budget, len(self._link))):
            seq, payload = self._link.popleft()
            self.heard.live(seq, payload, self.publisher.sent_by[payload])
            self.follower.live(seq, payload, self.now)
            self._consume()
        self._converse(budget)
        if self.now >= self.follower.deadline:
            self.follower.tick(self.now)
        self._consume()
        self.follower.check()

    def _consume(self) -> None:
        """Let the consumer read, update by update, and check what it may believe in between."""
        for update in self.follower.take_updates():
            self.updates.append(update)
            self.consumer.follow([update])
            if self.consumer.state is State.EXACT and not self.heard.is_hidden:
                assert isinstance(update, (Received, StateChanged)), self._wrong
                if isinstance(update, Received):
                    history = self.publisher.history
                    states = [history.get((epoch, update.seq)) for epoch in self.publisher.epochs]
                    assert self.consumer.held in states, self._wrong

    def _converse(self, budget: int) -> None:
        if self.follower.request is not self._asked:
            self._asked, self._replies = self.follower.request, None
            self.heard.answers.clear()
            return
        if self._asked is None:
            return
        if self._replies is None:
            self._replies, self._ending = self._answer(self._asked.data)
        while budget and self._replies and self.follower.request is self._asked:
            seq, payload = self._replies.popleft()
            self.heard.reply(payload)
            self.follower.reply(self._asked, seq, payload, self.now)
            self._consume()
            budget -= 1
        if self._ending != "silence" and not self._replies and self.follower.request is self._asked:
            self.heard.end()
            self.follower.end(self._asked, self.now, self._ending)

    def _answer(self, request: bytes) -> tuple[deque[Message], str]:
        """Return an answer and how it ends: well, refused, cut off, or with a part lost or damaged."""
        replies = deque(self.publisher.answer(request))
        if not self.nemesis.is_at_work or self.random.random() >= self.trouble:
            return replies, ""
        dice = self.random.random()
        if replies and self.random.random() < self.damage:
            at = self.random.randrange(len(replies))
            replies[at] = replies[at][0], _damaged(replies[at][1])
            return replies, ""
        if dice < 0.3:
            return deque(), "error: refused"
        if dice < 0.6:
            return deque(list(replies)[: self.random.randint(0, len(replies))]), "silence"
        if len(replies) > 1:  # who loses the last one does not hear the end: it comes behind it
            del replies[self.random.randrange(len(replies) - 1)]
        return replies, ""

    # -- what must hold ----------------------------------------------------------------------------

    def check_claim(self) -> None:
        """Whoever says exact holds what its publisher held as of that batch.

        No later process has spoken, and no later batch has come, unless it still waits.
        """
        replica, heard = self.follower, self.heard
        if replica.state is not State.EXACT or heard.excuses(replica.epoch):
            return
        self.claims += 1
        epoch = self.publisher.epoch if replica.epoch is None else replica.epoch
        held = self.publisher.history.get((epoch, replica.position))
        is_empty = held is None and replica.position == -1  # nothing was sent yet
        is_latest = epoch != heard.epoch or replica.position >= heard.seq or self.follower.pending
        assert is_empty or held is not None, self._wrong
        assert self.consumer.held == (held or frozenset()), self._wrong
        assert is_latest, self._wrong
        assert epoch >= heard.marked_epoch, self._wrong

    @property
    def _wrong(self) -> tuple[int, int, str]:
        return self.seed, self.follower.position, "called exact and is not"

    def _calm_down(self) -> None:
        self.nemesis.is_at_work = False
        until = self.now + 40.0
        while not self._is_done():
            assert self.now < until, (self.seed, self.follower.state, self.follower.reason)
            if int(self.now) != int(self.now + 0.1) and (self.beats or not self.can_ask):
                self._send(self.publisher.heartbeat())  # without heartbeats, requests must do
            if int(self.now / 10) != int(self.now / 10 + 0.01):
                self._help()
            self.now += 0.1
            self._serve(1000)
            self.check_claim()
        assert self.consumer.held == self.publisher.truth.held, self.seed
        assert self.consumer.state is State.EXACT

    def _help(self) -> None:
        """Do the only thing that helps where nobody has what was lost: clear, or begin from number 0."""
        if self.is_stock and not self.can_ask:
            self.publisher.begin()
            self._reconnect(is_cut=True)
            self._send(self.publisher.step())
        elif self.is_stock or not self.can_ask:
            for rank in range(self.publisher.ranks):
                self._send(self.publisher.clear(rank))

    def _is_done(self) -> bool:
        is_of_it = self.is_stock or self.follower.epoch == self.publisher.epoch
        return (
            is_of_it
            and self.follower.state is State.EXACT
            and self.follower.position == self.publisher.newest
        )


def _damaged(payload: bytes) -> bytes:
    """Return a batch one of whose events cannot be read, or that cannot be read at all."""
    batch = decode_batch(payload)
    encoder = EventEncoder()
    if not batch.events:
        return payload[:-3]
    parts = [UNREADABLE, *(encoder.event(event) for event in batch.events[1:])]
    if batch.mark is not None:
        parts.append(encoder.mark(batch.mark))
    return frame_batch(batch.ts, parts, batch.data_parallel_rank)


# -- indexes ---------------------------------------------------------------------------------------


class FedIndex:
    """An index that follows a source as the service does: a worker for each rank."""

    def __init__(self, form: str, keys: Any) -> None:
        self.index = PrefixIndex(form=form, keys=keys, block_size=BLOCK_SIZE, budget=1 << 20)
        self._decode = self.index.decoder()
        self._ranks: set[int] = set()
        self._encoder = EventEncoder()
        self.heard: set[tuple[int, Any]] = set()
        """Ranks and their places since the last reset: a group that was heard of counts, though it holds
        nothing.
        """

    def follow(self, updates: list[Update]) -> None:
        for update in updates:
            if isinstance(update, Received):
                batch = update.batch
                parts = [self._encoder.event(event) for event in batch.events]
                self._apply(batch.data_parallel_rank, parts)
                stores = [event for event in batch.events if isinstance(event, BlockStored)]
                self.heard |= {(batch.data_parallel_rank, place_of(event)) for event in stores}
            elif isinstance(update, Reset):
                self.heard.clear()
                for rank in self._ranks:
                    self.index.clear(str(rank))

    def fill(self, blocks: Blocks, heard: set[tuple[int, Any]]) -> None:
        """Take in what a publisher holds, and nothing else; of the places that were heard of, that they
        exist.
        """
        for rank, place in sorted(heard):
            event = stored(place, [1])
            gone = BlockRemoved([1], event.medium, event.group_idx, event.locality, event.ownership)
            self._apply(rank, [self._encoder.event(event), self._encoder.event(gone)])
        for rank, place, block_hash in sorted(blocks):
            self._apply(rank, [self._encoder.event(stored(place, [block_hash]))])

    def _apply(self, rank: int, parts: list[bytes]) -> None:
        self._ranks.add(rank)
        self.index.apply(str(rank), self._decode(frame_batch(0.0, parts, rank)))

    def claims(self) -> list[Any]:
        """Return all that it says it has."""
        return sorted(self.index.entries())
