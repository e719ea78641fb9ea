"""Whatever is lost, cut or restarted: when the traffic pauses, every replica is what the publisher holds,
and is known to be.

Two layers. Followers against a model publisher, without sockets and with a clock of their own: thousands of
steps a seed. Then real publishers, real subscribers and a lossy link between them.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, deque
from pathlib import Path

import pytest
from tests.chaos.stream_kit import Heard, LossyLink, Message, ModelPublisher, ModelReplica, Workload
from tests.ports import free_ports

from kvtier.errors import OutsideError
from kvtier.events import (
    DecodedBatch,
    Follower,
    KVEventBatch,
    Limits,
    Source,
    State,
    StreamRequest,
    Subscriber,
    decode_batch,
)
from kvtier.events.config import KVEventsConfig
from kvtier.events.publisher import ZmqEventPublisher

LIMITS = Limits(backoff=0.1, backoff_max=2.0, pending_batches=30, pending_bytes=20_000, probe_interval=3.0)


class Client:
    """A follower behind a lossy link, and the replica that its updates give."""

    def __init__(self, name: str, rng: random.Random, now: float) -> None:
        self.rng = rng
        self.follower = Follower(name, decode_batch, limits=LIMITS, now=now)
        self.replica = ModelReplica()
        self.loss = 0.2
        self.live: deque[Message] = deque()
        self.replies: deque[Message] | None = None  # None: not answered yet
        self.asked: StreamRequest | None = None
        self.is_cut = False
        self.heard = Heard()
        self.follower.connected(now)

    def send(self, message: Message | None) -> None:
        """Put a message on the live link."""
        if message is not None and self.rng.random() >= self.loss:
            self.live.append(message)

    def reconnect(self, now: float) -> None:
        """Cut the live link and bring it back; what was on it is lost, or was received and comes
        after all.
        """
        if self.rng.random() < 0.7:
            self.live.clear()
        self.heard.cut()
        self.follower.disconnected(now)
        self.follower.connected(now)

    def step(self, publisher: ModelPublisher, now: float, budget: int) -> None:
        """Let a part of what is under way arrive."""
        for _ in range(min(budget, len(self.live))):
            seq, payload = self.live.popleft()
            self.heard.live(seq, payload, publisher.sent_by[payload])
            self.follower.live(seq, payload, now)
        self._converse(publisher, now, budget)
        if now >= self.follower.deadline:
            self.follower.tick(now)
        self.replica.apply(self.follower.take_updates())
        self.follower.check()

    def _converse(self, publisher: ModelPublisher, now: float, budget: int) -> None:
        if self.follower.request is not self.asked:
            self.asked, self.replies, self.is_cut = self.follower.request, None, False
            self.heard.answers.clear()
            return
        if self.asked is None or self.is_cut:
            return
        if self.replies is None:
            self.replies = deque(publisher.answer(self.asked.data))
        if self.loss and self.rng.random() < 0.1:
            self.is_cut = True  # nothing follows, not even the end
            return
        while budget and self.replies and self.follower.request is self.asked:
            seq, payload = self.replies.popleft()
            self.heard.reply(payload)
            self.follower.reply(self.asked, seq, payload, now)
            budget -= 1
        if not self.replies and self.follower.request is self.asked:
            self.heard.end()
            self.follower.end(self.asked, now)


class World:
    """A publisher, its clients, and a clock."""

    def __init__(self, seed: int, *, encoding: str = "map", is_stock: bool = False, ring: int = 40) -> None:
        self.rng = random.Random(seed)
        self.burns = ring < 100_000
        self.now = 100.0
        self.workload = Workload(self.rng)
        self.publisher = ModelPublisher(self.rng, encoding=encoding, ring=ring, is_stock=is_stock)
        self.clients: list[Client] = []
        self.everybody: list[Client] = []
        self.join()
        self.send(self.publisher.hello())

    def join(self) -> None:
        """Let one more client come."""
        self.clients.append(Client(f"c{len(self.everybody)}", self.rng, self.now))
        self.everybody.append(self.clients[-1])

    def send(self, message: Message | None) -> None:
        """Put a message on every live link."""
        for client in self.clients:
            client.send(message)

    def step(self) -> None:
        """Let something happen."""
        rng = self.rng
        self.now += rng.random() * 0.1
        dice = rng.random()
        if dice < 0.01:
            self.restart()
        elif dice < 0.018 and not self.publisher.is_stock:
            self.publisher.overflow(self.workload.batch())
        elif dice < 0.012 and self.publisher.is_stock and self.burns:
            self.publisher.burn()
        elif dice < 0.03:
            rng.choice(self.clients).reconnect(self.now)
        elif dice < 0.05 and len(self.clients) < 6:
            self.join()
        elif dice < 0.065 and len(self.clients) > 1:
            self.clients.pop(0)
        elif dice < 0.13:
            self.send(self.publisher.heartbeat())
        else:
            self.send(self.publisher.publish(self.workload.batch()))
        self.let_arrive(rng.randint(0, 6))

    def restart(self) -> None:
        """Start the publisher again; hidden from the clients where it marks its batches, seen as a cut
        otherwise.
        """
        newest = self.publisher.newest
        self.workload.restart()
        self.publisher.begin(keeps_sequence=not self.publisher.is_stock and self.rng.random() < 0.5)
        sent = [self.publisher.hello()]
        start = self.rng.choice((0, 0, newest + self.rng.randint(-8, 50)))  # perhaps before anybody looks
        while self.publisher.newest < start:
            sent = [self.publisher.publish(self.workload.batch())]
        for client in self.clients:
            if self.publisher.is_stock or self.rng.random() < 0.5:
                client.reconnect(self.now)
        self.send(sent[-1])

    def let_arrive(self, budget: int) -> None:
        """Serve every client, and hold those that say they are exact to it."""
        for client in self.clients:
            client.step(self.publisher, self.now, budget)

    def pause(self, patience: float) -> float:
        """Stop the traffic and repair the links, until all are exact and have all; return how
        long it took.
        """
        began = self.now
        for client in self.clients:
            client.loss = 0.0
        while self.now < began + patience and not all(self.has_all(client) for client in self.clients):
            if int(self.now) != int(self.now + 0.05):
                self.send(self.publisher.heartbeat())
            self.now += 0.05
            self.let_arrive(1000)
        return self.now - began

    def go_on(self) -> None:
        """Let the links be lossy again."""
        for client in self.clients:
            client.loss = self.rng.choice((0.0, 0.05, 0.3))

    def check_claims(self) -> None:
        """Check that a client that says it is exact holds what the publisher held as of that batch.

        Only a restart that it cannot know of yet excuses it: one that lost batches hide until the next mark.
        """
        for client in self.clients:
            client.replica.apply(client.follower.take_updates())
            if self.publisher.is_stock:
                assert not self.has_all(client) or client.replica.blocks == self.publisher.truth.blocks
            elif client.follower.state is State.EXACT:
                epoch, seq = client.follower.epoch, client.follower.position
                assert epoch is not None
                if not client.heard.excuses(epoch):
                    assert client.replica.held == self.publisher.history[epoch, seq]
                    assert epoch >= client.heard.marked_epoch

    def has_all(self, client: Client) -> bool:
        """Return whether a client claims to be exact, and has the newest batch."""
        return client.follower.state is State.EXACT and client.follower.position == self.publisher.newest


@pytest.mark.parametrize(("seed", "encoding"), [(0, "map"), (1, "array"), (2, "map"), (3, "array")])
def test_followers_have_the_truth_whenever_the_traffic_pauses(seed: int, encoding: str) -> None:
    world = World(seed, encoding=encoding)
    for turn in range(8):
        for _ in range(250):
            world.step()
            world.check_claims()
        took = world.pause(30.0)
        for client in world.clients:
            follower = client.follower
            assert world.has_all(client), (turn, took, follower.state, follower.reason)
            assert client.replica.state is State.EXACT
            assert client.replica.held == world.publisher.truth.held
            assert follower.blocks == len(client.replica.held)
        world.go_on()
    happened = sum((Counter(client.follower.counters.as_dict()) for client in world.everybody), Counter())
    assert all(
        happened[name] for name in ("gaps", "replays", "snapshots", "timeouts", "reconnects", "duplicates")
    )
    assert happened["digest_mismatches"] == 0  # everything lost is noticed before a digest has to show it


@pytest.mark.parametrize(("seed", "ring"), [(0, 100_000), (1, 100_000), (2, 60), (3, 30)])
def test_followers_of_a_stock_publisher_have_the_truth_or_know_that_they_do_not(
    seed: int, ring: int
) -> None:
    """With a buffer that holds everything they always end up exact; with a smaller one they may not, but
    never claim it.
    """
    world = World(seed, is_stock=True, ring=ring)
    exact = 0
    for _ in range(8):
        for _ in range(250):
            world.step()
            world.check_claims()
        world.pause(12.0)
        for client in world.clients:
            exact += world.has_all(client)
            assert world.has_all(client) or ring < 100_000, (
                client.follower.state,
                client.follower.reason,
            )
        world.check_claims()
        world.go_on()
    assert exact


# -- real sockets ----------------------------------------------------------------------------------

HEARTBEAT = 0.05
PATIENCE = 60.0
SOCKET_LIMITS = Limits(
    reply_timeout=0.5, probe_interval=0.5, catch_up_delay=0.05, backoff=0.02, backoff_max=0.2
)


class Site:
    """A real publisher and real subscribers: one behind a lossy link, one beside it, some that
    come and go.
    """

    def __init__(self, seed: int, encoding: str, sequence_file: Path | None) -> None:
        self.rng = random.Random(seed)
        self.workload = Workload(self.rng)
        self.options = KVEventsConfig(
            buffer_steps=30,
            max_queue_size=40,
            encoding=encoding,
            heartbeat_interval=HEARTBEAT,
            sequence_file=None if sequence_file is None else str(sequence_file),
        )
        live, replay = free_ports(2)
        self.publisher = ZmqEventPublisher(0, f"tcp://*:{live}", f"tcp://*:{replay}", config=self.options)
        self.config = self.publisher.get_publisher_config()
        self.link = LossyLink(self.rng, self.publisher.endpoint)
        self.subscribers: list[tuple[Subscriber[DecodedBatch], ModelReplica]] = []
        self.happened: Counter[str] = Counter()
        self.join(self.link.endpoint)
        self.join(self.publisher.endpoint)

    def join(self, endpoint: str) -> None:
        """Let one more subscriber come."""
        source = Source("p", endpoint, self.publisher.replay_endpoint)
        self.subscribers.append((Subscriber([source], limits=SOCKET_LIMITS), ModelReplica()))

    def leave(self, i: int) -> None:
        """Let a subscriber go."""
        subscriber, _ = self.subscribers.pop(i)
        subscriber.check()
        self.happened.update(subscriber.status("p").counters.as_dict())
        subscriber.close()

    def step(self) -> None:
        """Let something happen."""
        dice = self.rng.random()
        if dice < 0.006:
            self.restart()
        elif dice < 0.02:
            self.publish(300)  # more than the queue takes
        elif dice < 0.03:
            self.link.cut()
        elif dice < 0.05 and len(self.subscribers) < 5:
            self.join(self.rng.choice((self.link.endpoint, self.publisher.endpoint)))
        elif dice < 0.07 and len(self.subscribers) > 2:
            self.leave(2)
        else:
            self.publish(self.rng.randint(1, 20))
        self.serve()

    def publish(self, batches: int) -> None:
        for _ in range(batches):
            self.publisher.publish(KVEventBatch(time.time(), self.workload.batch()))

    def restart(self) -> None:
        """Start the publisher anew at the same addresses; perhaps it passes the old number before anybody
        hears of it.
        """
        self.publisher.shutdown()
        self.workload.restart()
        until = time.monotonic() + PATIENCE
        while True:
            try:
                config = self.config
                self.publisher = ZmqEventPublisher(
                    0, config.endpoint, config.replay_endpoint, config=self.options
                )
                break
            except OutsideError:
                assert time.monotonic() < until, "the address stays in use"
        self.publish(self.rng.choice((0, 0, 600)))

    def serve(self) -> None:
        self.link.pump()
        for subscriber, replica in self.subscribers:
            replica.apply(subscriber.poll(0))

    def pause(self) -> None:
        """Stop the traffic and the losses until every subscriber has the truth and says so."""
        self.link.loss = 0.0
        until = time.monotonic() + PATIENCE
        while not all(self.has_the_truth(*subscriber) for subscriber in self.subscribers):
            self.serve()
            assert time.monotonic() < until, [
                (subscriber.status("p"), len(replica.held), len(self.workload.truth.held))
                for subscriber, replica in self.subscribers
            ]
        self.link.loss = self.rng.choice((0.0, 0.05, 0.3))

    def has_the_truth(self, subscriber: Subscriber[DecodedBatch], replica: ModelReplica) -> bool:
        status = subscriber.status("p")
        if replica.state is not State.EXACT or status.state is not State.EXACT:
            return False
        return status.epoch == self.publisher.stats().epoch and replica.held == self.workload.truth.held

    def meet_everything(self) -> None:
        """Let each kind of trouble happen once more to subscribers that are exact, so that none depends on
        the dice.
        """
        self.link.cut()
        self.pause()
        self.link.loss = 1.0
        lost, newest = self.link.lost, self.publisher.stats().next_seq
        self.publish(3)
        until = time.monotonic() + PATIENCE
        while self.link.lost < lost + 3 or self.publisher.stats().next_seq < newest + 3:
            self.link.pump()
            assert time.monotonic() < until
        self.pause()
        self.restart()
        self.pause()

    def close(self) -> None:
        while self.subscribers:
            self.leave(0)
        self.publisher.shutdown()
        self.link.close()


@pytest.mark.parametrize(
    ("seed", "encoding", "keeps_sequence"),
    [(0, "map", False), (1, "array", True), (2, "map", True), (3, "array", False)],
)
def test_subscribers_have_the_truth_whenever_the_traffic_pauses(
    seed: int, encoding: str, keeps_sequence: bool, tmp_path: Path
) -> None:
    site = Site(seed, encoding, tmp_path / "sequence" if keeps_sequence else None)
    with contextlib.closing(site):
        site.publish(50)
        site.restart()
        for _ in range(6):
            for _ in range(60):
                site.step()
            site.pause()
        site.meet_everything()
        site.publisher.check()
    assert all(
        site.happened[name]
        for name in ("gaps", "replays", "snapshots", "restarts", "reconnects", "digest_checks")
    )
    assert site.happened["digest_mismatches"] == 0
