"""A naive publisher and a naive consumer of the event stream, to hold the real ones against.

`ModelPublisher` keeps a dictionary and answers requests at once; `ModelReplica` is what a consumer holds
that applies updates one by one; `Workload` draws what an engine might do; `LossyLink` carries a live stream
badly.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Iterable

import zmq
from tests.ports import free_port

from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventEncoder,
    Mark,
    Place,
    Received,
    Reset,
    State,
    StateChanged,
    Update,
    blocks_of,
    decode_batch,
    frame_batch,
    place_of,
    place_weight,
    to_u64,
)

Event = BlockStored | BlockRemoved | AllBlocksCleared
Message = tuple[int, bytes]

BLOCK_SIZE = 2
MEDIA = ("GPU", "CPU", "STORAGE")


def stored(hashes: list[int], parent: int | None = None, medium: str = "GPU") -> BlockStored:
    """Return a store of blocks whose tokens follow from their hashes."""
    tokens = [(block + i) & 0xFFFF for block in hashes for i in range(BLOCK_SIZE)]
    return BlockStored(list(hashes), parent, tokens, BLOCK_SIZE, None, medium, None)


class ModelReplica:
    """What a consumer holds: how often each block is held in each place."""

    def __init__(self) -> None:
        self.blocks: Counter[tuple[Place, int]] = Counter()
        self.state: State | None = None
        self.exact_seen = 0
        self.unknown_removals = 0

    def apply(self, updates: Iterable[Update]) -> None:
        """Do what the updates say."""
        for update in updates:
            if isinstance(update, Reset):
                self.blocks.clear()
            elif isinstance(update, StateChanged):
                self.state = update.state
                self.exact_seen += update.state is State.EXACT
            else:
                assert isinstance(update, Received)
                self.apply_events(update.batch.events)

    def apply_events(self, events: Iterable[Event]) -> None:
        """Apply events."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            else:
                self._apply_blocks(event)

    def _apply_blocks(self, event: BlockStored | BlockRemoved) -> None:
        place = place_of(event)
        for key in ((place, to_u64(block)) for block in event.block_hashes):
            if isinstance(event, BlockStored):
                self.blocks[key] += 1
            elif self.blocks[key] > 1:
                self.blocks[key] -= 1
            else:
                self.unknown_removals += key not in self.blocks or self.blocks[key] == 0
                del self.blocks[key]

    @property
    def held(self) -> set[tuple[Place, int]]:
        """Every block, with where it is."""
        return set(self.blocks)


class Workload:
    """Random events that an engine could emit: chains, overlapping stores, copies, removals, resets."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.truth = ModelReplica()
        self._parents: dict[int, int | None] = {}

    def batch(self) -> list[Event]:
        """Return the events of one step."""
        return [self._event() for _ in range(self.rng.randint(1, 4))]

    def restart(self) -> None:
        """Forget everything, as a new process does."""
        self.truth = ModelReplica()
        self._parents.clear()

    def _event(self) -> Event:
        event = self._draw()
        self.truth.apply_events([event])
        return event

    def _draw(self) -> Event:
        rng, held = self.rng, list(self.truth.blocks)
        dice = rng.random()
        if dice < 0.004:
            return AllBlocksCleared()
        if held and (dice < 0.3 or len(held) > 300):
            return self._removal(held)
        if held and dice < 0.45:
            return self._known_store(held)
        return self._new_store(held)

    def _removal(self, held: list[tuple[Place, int]]) -> BlockRemoved:
        place, _ = self.rng.choice(held)
        there = [block for where, block in held if where == place]
        return BlockRemoved(self.rng.sample(there, self.rng.randint(1, min(4, len(there)))), place[0])

    def _known_store(self, held: list[tuple[Place, int]]) -> BlockStored:
        """Store again what is held: another copy, another medium, or a chunk that overlaps it
        and goes on.
        """
        start = self.rng.choice(held)[1]
        chain = [start, *(self._new_hash() for _ in range(self.rng.randint(0, 2)))]
        self._link(chain, self._parents.get(start))
        return stored(chain, self._parents.get(start), self.rng.choice(MEDIA))

    def _new_store(self, held: list[tuple[Place, int]]) -> BlockStored:
        parent = self.rng.choice(held)[1] if held and self.rng.random() < 0.7 else None
        chain = [self._new_hash() for _ in range(self.rng.randint(1, 6))]
        self._link(chain, parent)
        return stored(chain, parent, self.rng.choice(MEDIA))

    def _link(self, chain: list[int], parent: int | None) -> None:
        for block in chain:
            self._parents.setdefault(block, parent)
            parent = block

    def _new_hash(self) -> int:
        return self.rng.getrandbits(63) | 1 << 62


class ModelPublisher:
    """The protocol in its simplest form: one of ours, or a stock one (no marks, no snapshot, every copy
    announced).
    """

    def __init__(
        self, rng: random.Random, *, encoding: str = "map", ring: int = 40, is_stock: bool = False
    ) -> None:
        self.rng = rng
        self.is_stock = is_stock
        self.newest = -1
        self.truth = ModelReplica()
        self.first_seq = 0
        # By epoch and number: what was held then.
        self.history: dict[tuple[int, int], set[tuple[Place, int]]] = {}
        self.sent_by: dict[bytes, int] = {}  # the epochs of live batches
        self._encoder = EventEncoder(encoding)
        self._ring: deque[Message] = deque(maxlen=ring)
        self._runs = 0
        self.begin()

    # -- what an engine does -----------------------------------------------------------------------

    def begin(self, *, keeps_sequence: bool = False) -> None:
        """Start, or start again: empty, under another epoch."""
        self._runs += 1
        self.epoch = self._runs << 32 | self.rng.getrandbits(31)
        self.truth = ModelReplica()
        self._ring.clear()
        self.newest += 10 if keeps_sequence else -self.newest - 1
        self.first_seq = self.newest + 1

    def hello(self) -> Message | None:
        """Return the first batch of an incarnation."""
        return None if self.is_stock else self._send([AllBlocksCleared()], marked=True)

    def publish(self, events: list[Event]) -> Message | None:
        """Return the batch that goes out, if any."""
        sent = self._effect(events)
        return self._send(sent, marked=not self.is_stock and self.rng.random() < 0.1) if sent else None

    def overflow(self, events: list[Event]) -> None:
        """Take a batch for which there is no room: its number is used up, its effect holds, nothing can be
        replayed over it.
        """
        self._effect(events)
        self.newest += 1
        self.history[self.epoch, self.newest] = self.truth.held
        self._ring.clear()

    def burn(self) -> None:
        """Use up a number for nothing, as a stock publisher does when it cannot encode a batch."""
        self.newest += 1

    def heartbeat(self) -> Message | None:
        """Return a batch with nothing but a mark."""
        return None if self.is_stock else self._send([], marked=True)

    def _effect(self, events: list[Event]) -> list[Event]:
        """Bring the state up to date; return the events that say how it changed."""
        sent: list[Event] = []
        for event in events:
            sent += [event] if self.is_stock else self._set_like(event)
            self.truth.apply_events([event])
        return sent

    def _set_like(self, event: Event) -> list[Event]:
        held = self.truth.blocks
        if isinstance(event, AllBlocksCleared):
            return [event]
        place = place_of(event)
        if isinstance(event, BlockRemoved):
            gone_now = [block for block in event.block_hashes if held[place, to_u64(block)] == 1]
            return [BlockRemoved(gone_now, event.medium)] if gone_now else []
        new = [i for i, block in enumerate(event.block_hashes) if not held[place, to_u64(block)]]
        return [blocks_of(event, i, i + 1) for i in new]

    def _send(self, events: list[Event], *, marked: bool) -> Message:
        self.newest += 1
        message = self.newest, self._frame(events, marked)
        self._ring.append(message)
        self.history[self.epoch, self.newest] = self.truth.held
        self.sent_by[message[1]] = self.epoch
        return message

    def _frame(self, events: list[Event], marked: bool) -> bytes:
        parts = [self._encoder.event(event) for event in events]
        return frame_batch(
            float(self.newest), [*parts, self._encoder.mark(self.mark())] if marked else parts, 0
        )

    def mark(self) -> Mark:
        """Return what the publisher says of its state."""
        digest = sum(block * place_weight(place) for place, block in self.truth.blocks)
        return Mark(self.epoch, len(self.truth.blocks), digest % (1 << 64))

    # -- what a subscriber asks --------------------------------------------------------------------

    def answer(self, request: bytes) -> list[Message]:
        """Return all batches of the answer, without the end marker."""
        if not self.is_stock and request == b"kvtier:status":
            return [(self.newest, self._frame([], marked=True))]
        if not self.is_stock and request == b"snapshot":
            return [(self.newest + 1, payload) for payload in self._snapshot()]
        start = int.from_bytes(request, "big")
        if start > self.newest or self.is_stock or (self._ring and self._ring[0][0] <= start):
            return [(seq, payload) for seq, payload in self._ring if seq >= start]
        return self._spread(start)

    def _spread(self, start: int) -> list[Message]:
        """Return the state as batches under the numbers that were asked for."""
        parts, numbers = self._snapshot(), range(start, self.newest + 1)
        if len(parts) > len(numbers):
            whole = [
                AllBlocksCleared(),
                *(stored([block], None, place[0]) for place, block in self.truth.blocks),
            ]
            parts = [self._frame(whole, marked=True)]
        empty = self._frame([], marked=False)
        return [(seq, parts[i] if i < len(parts) else empty) for i, seq in enumerate(numbers)]

    def _snapshot(self) -> list[bytes]:
        blocks = [stored([block], None, place[0]) for place, block in self.truth.blocks]
        parts: list[list[Event]] = [[AllBlocksCleared()]]
        parts += [list(blocks[i : i + 7]) for i in range(0, len(blocks), 7)]
        return [self._frame(part, marked=part is parts[-1]) for part in parts]


class Heard:
    """Records what a follower has received, to decide which claims it must know to be false.

    A mark names the process that sent it. Epochs of models go up, so a claim about a process is false once
    a mark of a later one was received, live or in an answer. One restart cannot be noticed: one without a
    cut connection, whose first batch that comes has no mark and has just the number that comes next. It
    stays hidden until a mark of the new process, or for as long as the numbers stay in line if no mark had
    named the old one.
    """

    def __init__(self) -> None:
        self.marked_epoch = -1  # the latest process of which a mark was received
        self.epoch = -1  # of the last live batch
        self.seq = -1  # its number; -1 since the connection was made
        self.is_hidden = False  # nothing shows yet that `epoch` is not the epoch before it
        self.answers: list[bytes] = []  # the batches of an answer that has not ended
        self._last = b""
        self._is_nameless = False  # no mark can tell: the epoch before it was never named

    def live(self, seq: int, payload: bytes, epoch: int) -> None:
        """Record a live batch of a process; the same batch again says nothing."""
        if payload == self._last and seq == self.seq:
            return
        self._last = payload
        is_in_line, is_other = seq == self.seq + 1 and self.seq >= 0, epoch != self.epoch
        was_named = self.marked_epoch >= self.epoch
        is_marked = self._record_mark(payload)
        if not is_in_line:
            self.is_hidden = self._is_nameless = False
        else:
            self._is_nameless |= is_other and not was_named
            self.is_hidden = self._is_nameless or ((self.is_hidden or is_other) and not is_marked)
        self.seq, self.epoch = seq, epoch

    def reply(self, payload: bytes) -> None:
        """Record a batch of an answer. It counts when the answer has ended."""
        self.answers.append(payload)

    def end(self) -> None:
        """Record the end of an answer."""
        for payload in self.answers:
            self._record_mark(payload)
        self.answers.clear()

    def cut(self) -> None:
        """Record that the live connection was cut."""
        self.seq, self.is_hidden, self._is_nameless = -1, False, False

    def _record_mark(self, payload: bytes) -> bool:
        try:
            mark = decode_batch(payload).mark
        except ValueError:
            return False
        self.marked_epoch = max(self.marked_epoch, -1 if mark is None else mark.epoch)
        return mark is not None

    def excuses(self, epoch: int | None) -> bool:
        """Return whether a claim about a process may be wrong, because a restart is hidden."""
        if not self.is_hidden or epoch is None:
            return False
        return self._is_nameless or self.epoch > epoch >= self.marked_epoch


class LossyLink:
    """Forwards a publisher's live stream when told to, and loses, delays or cuts it."""

    def __init__(self, rng: random.Random, upstream: str) -> None:
        self.rng = rng
        self.loss = 0.1
        self.lost = 0
        self._context = zmq.Context.instance()
        self._in = self._context.socket(zmq.SUB)
        self._in.rcvhwm = 0
        self._in.subscribe(b"")
        self._in.connect(upstream)
        self._out = self._context.socket(zmq.PUB)
        self._out.sndhwm = 0
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._out.bind(self.endpoint)
        self._delayed: deque[list[bytes]] = deque()

    def pump(self) -> None:
        """Forward what has come, except what gets lost; some of it waits for the next time."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._delayed.append(self._in.recv_multipart(zmq.NOBLOCK))
        keep = self.rng.randint(0, 5) if self.loss else 0
        while len(self._delayed) > keep:
            frames = self._delayed.popleft()
            if self.rng.random() < self.loss:
                self.lost += 1
            else:
                self._out.send_multipart(frames)

    def cut(self) -> None:
        """Break every connection downstream, with what is under way; the address stays."""
        self._delayed.clear()
        self._out.unbind(self.endpoint)
        self._out.close(linger=0)
        self._out = self._context.socket(zmq.PUB)
        self._out.sndhwm = 0
        bind_again(self._out, self.endpoint)

    def close(self) -> None:
        self._in.close(linger=0)
        self._out.close(linger=0)


def bind_again(sock: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind an address that was just let go; the system may need a moment."""
    until = time.monotonic() + 60.0
    while True:
        try:
            return sock.bind(endpoint)
        except zmq.ZMQError:
            assert time.monotonic() < until, f"{endpoint} stays in use"
