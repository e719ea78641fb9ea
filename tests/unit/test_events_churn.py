"""A publisher's states against plain dicts, through much traffic of all kinds, and what a plain dict once
was not.
"""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections import Counter
from typing import Any

import pytest
import zmq
from tests.unit.event_kit import Client, ask, publisher, removed, stored

from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    place_of,
    place_weight,
)

BATCHES = 4_000
MEDIA, GROUPS, RANKS = ("GPU", "CPU", "STORAGE"), (None, 0, 1), (0, 1, 5)


class Dicts:
    """How often each rank holds each block, and what that is by the mark's digest."""

    def __init__(self, counting: str) -> None:
        self.counting = counting
        self.counts: dict[int, Counter[Any]] = {rank: Counter() for rank in RANKS}

    def apply(self, batch: EventBatch) -> None:
        assert batch.data_parallel_rank is not None
        counts = self.counts[batch.data_parallel_rank]
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                counts.clear()
                continue
            for block in event.block_hashes:
                key = place_of(event), block
                if isinstance(event, BlockStored):
                    counts[key] = counts[key] + 1 if self.counting == "count" else 1
                elif counts[key] > 1:
                    counts[key] -= 1
                else:
                    del counts[key]

    def held(self) -> dict[int, set[Any]]:
        return {rank: set(counts) for rank, counts in self.counts.items() if counts}

    def mark(self) -> tuple[int, int]:
        keys = [key for counts in self.counts.values() for key in counts]
        return len(keys), sum(block * place_weight(place) for place, block in keys) % (1 << 64)


class Engine:
    """Draws what engines of several ranks might publish: chains, copies, evictions, clears."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.hashes = [source.getrandbits(64) for _ in range(600)]

    def batch(self, model: Dicts) -> EventBatch:
        rank = self.source.choice(RANKS)
        return EventBatch(1.0, [self._event(model, rank) for _ in range(self.source.randint(1, 4))], rank)

    def _event(self, model: Dicts, rank: int) -> Any:
        source, dice = self.source, self.source.random()
        if dice < 0.005:
            return AllBlocksCleared()
        medium, group = source.choice(MEDIA), source.choice(GROUPS)
        held = [key[1] for key in list(model.counts[rank])[:50]]
        if dice < 0.5 and held:
            return removed(
                source.sample(held, min(len(held), source.randint(1, 6))), medium, group_idx=group
            )
        start = source.randrange(len(self.hashes) - 8)
        chain = self.hashes[start : start + source.randint(1, 8)]
        parent = self.hashes[start - 1] if start and source.random() < 0.8 else None
        return stored(chain, parent, medium=medium, group_idx=group)


def held_by_rank(payloads: list[bytes]) -> dict[int, set[Any]]:
    """Return what a consumer holds of each rank; a clear is of its batch's rank."""
    held: dict[int, set[Any]] = {}
    for payload in payloads:
        batch = decode_batch(payload)
        assert batch.data_parallel_rank is not None
        blocks = held.setdefault(batch.data_parallel_rank, set())
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                blocks.clear()
                continue
            some = {(place_of(event), block) for block in event.block_hashes}
            if isinstance(event, BlockRemoved):
                assert some <= blocks, "removed though not held"
                blocks -= some
            else:
                assert not some & blocks, "stored though held"
                blocks |= some
    return {rank: blocks for rank, blocks in held.items() if blocks}


@pytest.mark.parametrize("queue", [100_000, 5])  # with the small one most batches overflow
@pytest.mark.parametrize("counting", ["count", "set"])
@pytest.mark.parametrize("seed", range(2))
def test_the_states_are_dicts(seed: int, counting: str, queue: int) -> None:
    """At random moments a snapshot is what the dicts hold, rank by rank, and its mark is what they add up
    to.
    """
    source = random.Random(seed)
    engine, model, client = Engine(source), Dicts(counting), Client()
    settings = {
        "counting": counting,
        "max_queue_size": queue,
        "buffer_steps": 50,
        "heartbeat_interval": 60.0,
    }
    with publisher(**settings) as made:
        dealer = client.open(zmq.DEALER, made.replay_endpoint, rcvhwm=0)
        live = client.subscribe(made)
        for number in range(BATCHES):
            batch = engine.batch(model)
            model.apply(batch)
            made.publish(batch)
            if number % 400 == source.randrange(400) or number == BATCHES - 1:
                made.check()
                made._loop.sender._retire_snapshot()  # a shared one may be older
                answer = [payload for _, _, payload in ask(dealer, b"snapshot")]
                assert held_by_rank(answer) == model.held()
                mark = decode_batch(answer[-1]).mark
                assert mark is not None
                assert (mark.blocks, mark.digest) == model.mark()
        assert (made.stats().blocks, made.stats().digest) == model.mark()
        if queue > BATCHES:
            payloads = []
            while live.poll(50):
                payloads.append(live.recv_multipart()[2])
            assert held_by_rank(payloads) == model.held()
        else:
            assert made.stats().overflowed > 100
    client.close()


def test_a_publisher_survives_random_replacement() -> None:
    """4,000 blocks, each new one in the place of a random old one: it hung within 11,000 batches,
    interpreter and all.
    """
    code = """
        import random
        from kvtier.events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
        source, held = random.Random(10), []
        made = ZmqEventPublisher(0, "tcp://127.0.0.1:0")
        for number in range(20_000):
            events = []
            if len(held) == 4_000:
                place = source.randrange(4_000)
                events.append(BlockRemoved([held[place]], "GPU"))
                held[place] = new = source.getrandbits(64)
            else:
                new = source.getrandbits(64)
                held.append(new)
            events.append(BlockStored([new], None, [1], 1, None, "GPU", None))
            made.publish(KVEventBatch(ts=1.0, events=events))
            if number % 1_000 == 0:
                made.check()
        made.check()
        assert made.stats().blocks == 4_000
        made.shutdown()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=100)
