"""Random calls of a manager over the pool and two tiers: nothing is lent twice, read half written, or lost.

Every row has bytes that follow from its key. Tiers answer late, in any order and with any outcome, and
write to the memory that they were lent until they say that they are done with it. Whatever a load pins must
hold its own bytes, whatever a demotion writes too, and once all is over every slot is free or ready.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from tests.unit.tier_kit import ROW, HandTier, TickingClock, Tiered, context, keys

from kvtier.keys import OffloadKey
from kvtier.offload.promotions import Promotions
from kvtier.residency import MissReason
from kvtier.tiers.base import RowJob, TierResult
from kvtier.transfer.base import CPULoadStoreSpec

FIRST = int(os.environ.get("KVTIER_SEED", "0"))
NUM_SEEDS = int(os.environ.get("KVTIER_SEEDS", "40"))
CHUNKS = 24
OUTCOMES: list[MissReason | None] = [None] * 6 + [
    MissReason.FAILED,
    MissReason.IO_FAILED,
    MissReason.TOO_SLOW,
    MissReason.SUSPENDED,
    MissReason.EVICTED,
]


def mark(chunk: OffloadKey, generation: int) -> int:
    """Return the byte that fills a chunk's row, between two resets."""
    return (hash((chunk, generation)) % 255) + 1


@dataclass
class Lent:
    """A row of a job that is not over."""

    tier: HandTier
    job: RowJob
    position: int
    generation: int
    is_late: bool = False

    @property
    def key(self) -> OffloadKey:
        return self.job.keys[self.position]

    @property
    def slot(self) -> int:
        return int(self.job.slots[self.position])


@dataclass
class Play:
    """Makes random calls and knows what must be true."""

    seed: int
    asks: bool = True
    """Some tiers forget at times whether they have a row."""
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        slots = self.random.choice((2, 5, 12, 32))
        self.tiered = Tiered(
            slots, self.random.choice(("through", "evict")), num_tiers=self.random.choice((1, 2))
        )
        self.generation = 0
        self.stores: list[tuple[list[OffloadKey], CPULoadStoreSpec, int]] = []
        self.loads: list[tuple[list[OffloadKey], CPULoadStoreSpec]] = []
        self.lent: list[Lent] = []
        self.names: set[str] = set()

    def run(self, calls: int = 250) -> None:
        moves = [
            self.store,
            self.store,
            self.end_store,
            self.promote,
            self.promote,
            self.step,
            self.step,
            self.end_rows,
        ]
        moves += [
            self.end_rows,
            self.end_rows,
            self.load,
            self.end_load,
            self.finish,
            self.disturb,
            self.restart,
        ]
        moves += [self.look_up] if self.asks else []
        for _ in range(calls):
            self.random.choice(moves)()
            self.take_jobs()
            self.tiered.manager.check()
            self.expect_ready_rows()
        self.settle()

    def take_jobs(self) -> None:
        """Look at what tiers were newly given; what is to be written must be whole."""
        known = {(id(lent.tier), lent.job.job_id) for lent in self.lent}
        for tier in self.tiered.tiers:
            for job in (*tier.promotions.values(), *tier.demotions.values()):
                if (id(tier), job.job_id) in known:
                    continue
                left = tier._left[job.job_id]
                tier.begun |= {chunk for chunk in left if self.random.random() < 0.7}
                self.lent += [
                    Lent(tier, job, at, self.generation) for at, key in enumerate(job.keys) if key in left
                ]
                if job.job_id < 0:
                    for key, slot in zip(job.keys, job.slots.tolist(), strict=True):
                        self.expect_whole(key, self.tiered.rows[slot].tobytes())

    def expect_whole(self, chunk: OffloadKey, content: bytes) -> None:
        expected = mark(chunk, self.generation)
        assert content == bytes([expected]) * ROW, f"seed {self.seed}: a row has another one's bytes"

    def expect_ready_rows(self) -> None:
        """Look at every row that could be loaded now."""
        ready = [chunk for chunk in keys(*range(CHUNKS)) if self.tiered.pool.lookup(chunk, context())]
        spec = self.tiered.pool.prepare_load(ready, context())
        for chunk, slot in zip(ready, spec.block_ids.tolist(), strict=True):
            self.expect_whole(chunk, self.tiered.rows[slot].tobytes())
        self.tiered.pool.complete_load(ready, spec)

    # Moves

    def some(self, most: int = 8) -> list[int]:
        start = self.random.randrange(0, CHUNKS, 6)
        return [(start + at) % CHUNKS for at in range(self.random.randint(1, most))]

    def store(self) -> None:
        confined = self.random.random() < 0.1
        output = self.tiered.manager.prepare_store(keys(*self.some()), context("s", confined))
        if output is not None and output.keys_to_store:
            assert isinstance(output.store_spec, CPULoadStoreSpec)
            self.stores.append((output.keys_to_store, output.store_spec, self.generation))

    def end_store(self) -> None:
        if not self.stores:
            return
        chunks, spec, generation = self.stores.pop(self.random.randrange(len(self.stores)))
        for chunk, slot in zip(chunks, spec.block_ids.tolist(), strict=True):
            self.tiered.rows[slot] = mark(chunk, generation)
        self.tiered.manager.complete_store(chunks, self.random.random() < 0.9, spec)

    def promote(self) -> None:
        name = f"r{self.random.randrange(5)}"
        chunks, manager = self.some(12), self.tiered.manager
        hits = manager.promotions.lookup_prefix(keys(*chunks), context(name), wait=False) or 0
        if hits and not self.is_waiting(name):
            self.names.add(name)
            whole = self.random.random() < 0.2
            self.counts["promotions"] += self.tiered.promote(
                *chunks[:hits], name=name, wait_budget=3.0, whole=whole
            )

    def look_up(self) -> None:
        """Have tiers asked about chunks of which they have forgotten whether they have them."""
        name, chunks = f"r{self.random.randrange(5)}", keys(*self.some(12))
        self.random.choice(self.tiered.tiers).unknown = set(self.random.sample(chunks, len(chunks) // 2))
        lookups = self.tiered.manager.promotions.unknown(chunks)
        if lookups and not self.is_waiting(name):
            self.names.add(name)
            self.tiered.look_up(lookups, name)
            self.counts["lookups"] += 1

    def is_waiting(self, name: str) -> bool:
        """Return whether a request waits, as both kinds of questions must agree on."""
        waits = self.tiered.manager.waits
        is_waiting = waits.is_waiting(context(name))
        if is_waiting:
            assert waits.must_wait(name), f"seed {self.seed}"
        return is_waiting

    def step(self) -> None:
        self.tiered.clock.now += self.random.choice((0.0, 0.1, 0.5))
        self.tiered.manager.begin_step()
        self.take_jobs()
        for tier in self.tiered.tiers:
            if self.asks and self.random.random() < 0.7:
                tier.answer()
        self.tiered.manager.end_step()

    def end_rows(self) -> None:
        """Have a tier end some of its rows, or give memory back."""
        self.lent = [
            lent
            for lent in self.lent
            if lent.is_late or lent.key in lent.tier._left.get(lent.job.job_id, ())
        ]
        for lent in self.random.sample(self.lent, min(len(self.lent), self.random.randint(1, 4))):
            self.end_row(lent)

    def end_row(self, lent: Lent) -> None:
        tier, job, chunk = lent.tier, lent.job, lent.key
        outcome = self.random.choice(OUTCOMES)
        if lent.is_late:
            self.fill(lent, 0)  # the last word of a call that was given up
            self.lent.remove(lent)
            tier.return_rows(job, lent.position)
            self.counts["returned"] += 1
        elif outcome is MissReason.TOO_SLOW and self.random.random() < 0.7:
            lent.is_late = True
            tier.finish_rows(job, [chunk], outcome, in_use=True)
        else:
            if lent.generation != self.generation:
                outcome = MissReason.CLEARED
            self.fill(lent, mark(chunk, self.generation) if outcome is None else 0)
            self.lent.remove(lent)
            tier.finish_rows(job, [chunk], outcome)
            self.counts[
                ("promoted " if job.job_id > 0 else "demoted ")
                + ("DONE" if outcome is None else outcome.name)
            ] += 1

    def fill(self, lent: Lent, value: int) -> None:
        if lent.job.job_id > 0:
            self.tiered.rows[lent.slot] = value
        elif value:
            self.expect_whole(lent.key, self.tiered.rows[lent.slot].tobytes())

    def load(self) -> None:
        """Load ready chunks, promoted or not, as a connector does; their bytes must be right."""
        name = self.random.choice([*sorted(self.names), "other"])
        chunks = keys(*self.some(12))
        ready = self.tiered.manager.lookup_prefix(chunks, context(name), wait=False) or 0
        if not ready or self.is_waiting(name):
            return
        spec = self.tiered.manager.prepare_load(chunks[:ready], context(name))
        assert isinstance(spec, CPULoadStoreSpec)
        self.loads.append((chunks[:ready], spec))
        for chunk, slot in zip(chunks, spec.block_ids.tolist(), strict=False):
            self.expect_whole(chunk, self.tiered.rows[slot].tobytes())
        self.counts["loaded"] += ready

    def end_load(self) -> None:
        if self.loads:
            self.tiered.manager.complete_load(*self.loads.pop(self.random.randrange(len(self.loads))))

    def finish(self) -> None:
        if self.names:
            name = self.random.choice(sorted(self.names))
            self.names.discard(name)
            self.tiered.manager.on_request_finished(context(name))

    def disturb(self) -> None:
        if self.random.random() < 0.1:
            self.counts["resets"] += 1
            self.generation += 1
            self.tiered.manager.reset_cache()
        elif self.random.random() < 0.5:
            self.tiered.manager.discard(keys(*self.some(3)))
        elif self.random.random() < 0.5:
            for tier in self.tiered.tiers:
                tier.held -= set(self.random.sample(sorted(tier.held), len(tier.held) // 2))

    def restart(self) -> None:
        """Let a tier have more rows than it was given here, as one does that outlives its process."""
        self.random.choice(self.tiered.tiers).held |= set(keys(*self.some(12)))

    def settle(self) -> None:
        """Once everything is over, every slot is free or ready, and nobody reads."""
        for name in sorted(self.names):
            self.tiered.manager.on_request_finished(context(name))
        while self.stores:
            self.end_store()
        while self.loads:
            self.end_load()
        for _ in range(100):
            self.take_jobs()
            while self.lent:
                self.end_rows()
            self.tiered.manager.end_step()
        self.tiered.manager.check()
        stats = self.tiered.manager.stats()
        assert (stats.reading, stats.writing, stats.doomed) == (0, 0, 0), f"seed {self.seed}: {stats}"
        assert stats.free + stats.ready == stats.slots


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM_SEEDS))
def test_rows_are_right_and_no_slot_is_lost(seed: int, totals: Counter[str]) -> None:
    play = Play(seed)
    play.run()
    totals.update(play.counts)


def test_the_calls_exercised_what_they_claim(totals: Counter[str]) -> None:
    if not totals:
        pytest.skip("runs after test_rows_are_right_and_no_slot_is_lost in the same session only")
    for what in (
        "promotions",
        "lookups",
        "promoted DONE",
        "promoted FAILED",
        "demoted DONE",
        "returned",
        "loaded",
        "resets",
    ):
        assert totals[what] > NUM_SEEDS // 4, (what, totals)


def test_a_slot_that_is_freed_while_a_call_writes_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: late taken as freed, wrong bytes are loaded, or the books break."""
    take = Promotions.take_result

    def take_result(self: Promotions, result: TierResult) -> None:
        if not result.returned:
            take(self, replace(result, in_use=False))

    monkeypatch.setattr(Promotions, "take_result", take_result)
    for seed in range(200):
        try:
            Play(seed, asks=False).run()
        except (AssertionError, KeyError):
            return
    raise AssertionError("nothing was noticed")


@dataclass
class AdapterPlay:
    """Random ends of stores, some of which are an adapter's; its chunks are given to no tier.

    A store may be given up and its chunks stored anew before it is reported, well or not.
    """

    seed: int
    stores: list[tuple[list[OffloadKey], CPULoadStoreSpec]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, calls: int = 150) -> Counter[str]:
        self.random = Random(self.seed)
        slots, write = self.random.choice((4, 7, 12)), self.random.choice(("through", "evict"))
        self.tiered = Tiered(slots, write, clock=TickingClock())
        moves = [self.store, self.store, self.end_store, self.end_store, self.give_up, self.poll]
        for _ in range(calls):
            self.random.choice(moves)()
            if self.random.random() < 0.02:
                self.tiered.manager.reset_cache()
            self.expect_no_adapters()
            self.tiered.manager.check()
        self.tiered.manager.shutdown()
        self.expect_no_adapters()
        return self.counts

    def store(self) -> None:
        """Offer chunks; of eight, the first four are an adapter's."""
        confined = self.random.random() < 0.5
        offered = keys(*self.random.sample(range(4) if confined else range(4, 8), 2))
        output = self.tiered.manager.prepare_store(offered, context("s", confined))
        if output is not None and output.keys_to_store:
            assert isinstance(output.store_spec, CPULoadStoreSpec)
            self.stores.append((output.keys_to_store, output.store_spec))
            self.counts["confined"] += confined

    def end_store(self) -> None:
        if self.stores:
            chunks, spec = self.stores.pop(self.random.randrange(len(self.stores)))
            self.tiered.manager.complete_store(chunks, self.random.random() < 0.5, spec)

    def give_up(self) -> None:
        """Expire a job, as a connector does."""
        if self.stores:
            self.tiered.manager.discard(self.random.choice(self.stores)[0])

    def poll(self) -> None:
        for job_id in list(self.tiered.tier.demotions):
            self.tiered.tier.finish(job_id, outcome=self.random.choice((None, MissReason.IO_FAILED)))
        self.tiered.manager.end_step()

    def expect_no_adapters(self) -> None:
        written = {key for job in self.tiered.tier.demotions.values() for key in job.keys}
        assert written.isdisjoint(keys(*range(4))), f"seed {self.seed}: an adapter's row is given to a tier"
        self.counts["demoted"] += len(written)


def test_no_row_of_an_adapter_is_given_to_a_tier() -> None:
    totals = sum((AdapterPlay(seed).run() for seed in range(FIRST, FIRST + NUM_SEEDS)), Counter[str]())
    assert min(totals["confined"], totals["demoted"]) > NUM_SEEDS, totals
