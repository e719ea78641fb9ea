"""Never a wrong token, never a stalled engine, over a server that two engines share and that goes wrong.

Random workloads as in `test_tiers_fail`, of two engines that take turns, with the same prompts, over
small pools and one server: rows that come back flipped, swapped, torn or short, calls that fail or hang,
a server that is down for a while, evicts, or comes back empty, engines that restart, and resets that
swap one engine's weights and not the other's. The control takes the seal's check out and must change
tokens.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from signal import SIGCONT, SIGSTOP
from time import monotonic
from typing import Any, ClassVar

import pytest
from tests.engine.drive import tokens
from tests.faults.test_ranks_and_resets import MODELS
from tests.faults.tiered_player import (
    BATCH,
    FIRST,
    NUM_SEEDS,
    RATES,
    WRONG_BYTES,
    TieredPlayer,
    TieredScenario,
    shorten_backoff,
)
from tests.tiers.object_server import s3_credentials
from tests.tiers.server_kinds import (
    ServerKind,
    serve_mooncake,
    serve_mooncake_memory,
    serve_objects,
    serve_valkey,
)

from kvtier.config import DiskConfig, OffloadingConfig, TierConfig
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.residency import MissReason
from kvtier.testing.faulty_backend import BackendFaultPlan, FaultyBackend
from kvtier.testing.memory_tier import MemoryServer
from kvtier.tiers import remote_lookups
from kvtier.tiers.base import Backend, Tier
from kvtier.tiers.factory import open_backend
from kvtier.tiers.shared_tier import SharedTier

NUM_REAL_SEEDS = int(os.environ.get("KVTIER_REAL_SEEDS", "3"))
FAULT_RATES = (0.0, 0.05, 0.1, 0.3)


@dataclass
class SharedScenario(TieredScenario):
    """What is drawn from a seed for one of the engines over a server."""

    server: MemoryServer = field(default_factory=MemoryServer)
    number: int = 0
    blocks_per_chunk: int = 1
    rate: float | None = None
    faulty: FaultyBackend = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.random = random = Random(f"{self.seed} {self.number}")
        self.num_ranks, self.fault_rate = 1, random.choice((0.0, 0.0, 0.1))
        rate = random.choice(FAULT_RATES) if self.rate is None else self.rate
        self.faulty = FaultyBackend(
            self.server, BackendFaultPlan(2 * self.seed + self.number, rate, self.kinds)
        )
        self.draw_engine()
        self.settings = {
            "cpu": {
                "capacity": random.choice((4, 16, 24)) * 4096,
                "policy": random.choice(("lru", "arc", "gittins")),
            },
            "blocks_per_chunk": self.blocks_per_chunk,
            "load_deadline": random.choice((0.05, 0.2)),
            "store_deadline": 0.2,
            "load_if_faster": random.random() < 0.2,
            "tiers": [
                {"valkey": {"url": "valkey://in.memory", "write": random.choice(("through", "evict"))}}
            ],
        }

    def make_tier(self, tier: TierConfig, config: OffloadingConfig) -> Tier:
        return SharedTier(
            "valkey",
            config.row_bytes,
            lambda: self.open_backend(config),
            namespace=config.namespace_nowait,
            threads=2,
            check_seals=self.check_seals,
        )

    def open_backend(self, config: OffloadingConfig) -> Backend:
        return self.faulty


class SharedPlayer(TieredPlayer):
    """Plays in turns with another over one server, and does to the server what befalls servers."""

    scenario: SharedScenario
    tier_name = "valkey"
    bad_until: float | None = None

    def turns(self, prompts: list[list[int]]) -> Iterator[None]:
        yield from super().turns(prompts)
        self._settle()

    def _disturb(self) -> None:
        random, scenario = self.scenario.random, self.scenario
        super()._disturb()
        chance = random.random()
        if chance < 0.003:
            self._restart()
        elif chance < 0.006:
            self.counts["emptied"] += 1
            self._empty()
        elif chance < 0.02:
            self.counts["evictions"] += 1
            self._evict()
        elif chance < 0.028 and self.bad_until is None:
            deadline = scenario.settings["load_deadline"]
            self.bad_until = monotonic() + random.choice((0.0, 0.01, 1.5 * deadline))
            if random.random() < 0.5:
                self.counts["hangs"] += 1
                self._hang()
            else:
                self.counts["downs"] += 1
                self._go_down()
        if self.bad_until is not None and monotonic() >= self.bad_until and random.random() < 0.2:
            self._mend()

    def _empty(self) -> None:
        self.scenario.server.evict()

    def _evict(self) -> None:
        rows = self.scenario.server.rows
        for name in self.scenario.random.sample(sorted(rows), len(rows) // 3):
            rows.pop(name, None)

    def _hang(self) -> None:
        self.scenario.faulty.hang()

    def _go_down(self) -> None:
        self.scenario.faulty.broken = ConnectionResetError(104, "Connection reset by peer")

    def _mend(self) -> None:
        self.bad_until, self.scenario.faulty.broken = None, None
        self.scenario.faulty.release()


@dataclass
class RealScenario(SharedScenario):
    """Over a real server, by a client of its own."""

    real: ServerKind = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        ((kind, settings),) = self.real.tier.items()
        (drawn,) = self.settings["tiers"][0].values()
        self.settings["tiers"] = [{kind: settings | {"write": drawn["write"]}}]
        if kind == "mooncake":  # behind each row is as much room
            self.settings["cpu"]["capacity"] *= 2

    def open_backend(self, config: OffloadingConfig) -> Backend:
        (settings,) = config.settings.tiers
        assert not isinstance(settings, DiskConfig)
        deadline = config.settings.load_deadline
        client = open_backend(settings, config.row_bytes, deadline, config.slot_bytes)
        self.faulty = FaultyBackend(client, self.faulty.plan)
        return self.faulty


class RealPlayer(SharedPlayer):
    """Kills the server, stops it, and starts it again. Both players know how it is."""

    scenario: RealScenario
    is_down: ClassVar[bool] = False
    is_silent: ClassVar[bool] = False

    def _empty(self) -> None:
        real = self.scenario.real
        if not (self.is_down or self.is_silent):
            (real.empty or self._kill_and_start)()

    def _evict(self) -> None:
        if self.scenario.real.empty is not None:
            self._empty()

    def _kill_and_start(self) -> None:
        self.scenario.real.kill()
        self.scenario.real.start()

    def _hang(self) -> None:
        if not self.is_down:
            self.scenario.real.send_signal(SIGSTOP)
            RealPlayer.is_silent = True

    def _go_down(self) -> None:
        self.scenario.real.kill()
        RealPlayer.is_down, RealPlayer.is_silent = True, False

    def _mend(self) -> None:
        self.bad_until = None
        if self.is_down:
            self.scenario.real.start()
        elif self.is_silent:
            self.scenario.real.send_signal(SIGCONT)
        RealPlayer.is_down = RealPlayer.is_silent = False

    def _settle(self) -> None:
        """Let calls return first, which have no deadline with some servers; then as with others."""
        manager = self.scheduler.manager
        assert isinstance(manager, TieredOffloadingManager)
        until = monotonic() + self.patience
        while manager.tier_stats()[0].stuck and monotonic() < until:
            manager.tiers[0].wait_any(0.01)
            self.engine.step()
        super()._settle()


def play(seed: int, max_steps: int = 6000, real: ServerKind | None = None, **more: Any) -> Counter[str]:
    """Play two engines in turns until both are done, over a server in memory or a real one."""
    random, server = Random(seed), MemoryServer(contains_batch=Random(seed).choice((1, 1024)))
    prompts = [tokens(random.randint(9, 40), seed=random.randrange(10**6)) for _ in range(5)]
    more |= {"layers": random.choice(MODELS)}
    make = partial(SharedScenario, server=server, blocks_per_chunk=random.choice((1, 1, 2)), **more)
    player_class = SharedPlayer
    if real is not None:
        make, player_class = partial(RealScenario, real=real, **make.keywords), RealPlayer
    players: list[SharedPlayer] = []
    try:
        for number in range(2):
            scenario = make(seed=seed, number=number)
            engine = scenario.engine()
            players.append(player_class(scenario, engine, max_steps, num_requests=(20, 40), **RATES))
        running = [player.turns(prompts) for player in players]
        while running:
            running = [turns for turns in running if next(turns, "over") is None]
    finally:
        for player in players:
            player._mend()
            player.engine.close()
    return players[0].counts + players[1].counts


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """A no is forgotten soon, too."""
    shorten_backoff(monkeypatch)
    monkeypatch.setattr(remote_lookups, "_NO_SECONDS", 0.02)


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("first", range(FIRST, FIRST + NUM_SEEDS, BATCH))
def test_same_tokens_over_a_server_that_goes_wrong(first: int, totals: Counter[str]) -> None:
    for seed in range(first, first + BATCH):
        totals.update(play(seed))


def test_the_workloads_exercised_what_they_claim(totals: Counter[str]) -> None:
    """Guards the test above: without promotions, swaps, evictions and hangs it would show nothing."""
    if not totals:
        pytest.skip("runs after test_same_tokens_over_a_server_that_goes_wrong in the same session only")
    for what in (
        "judged",
        "from the tier",
        "promoted",
        "demoted",
        "questions",
        "evictions",
        "hangs",
        "downs",
    ):
        assert totals[what] > NUM_SEEDS // 4, (what, totals)
    for what in ("restarts", "swaps", "emptied", "failed_checks"):
        assert totals[what], (what, totals)


REAL_SERVERS = {
    "valkey": serve_valkey,
    "object": serve_objects,
    "mooncake master": serve_mooncake,
    "mooncake memory": serve_mooncake_memory,
}


@pytest.mark.parametrize("kind", REAL_SERVERS)
def test_same_tokens_over_a_real_server_that_is_killed_and_started_again(kind: str, tmp_path: Path) -> None:
    """`KVTIER_REAL_SEEDS` many workloads, from `KVTIER_SEED` on."""
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        real = REAL_SERVERS[kind](tmp_path / "log", stack)
        stack.enter_context(s3_credentials())
        for seed in range(FIRST, FIRST + NUM_REAL_SEEDS):
            (real.empty or (lambda: None))()
            counts.update(play(seed, real=real))
    assert counts["judged"]
    if NUM_REAL_SEEDS >= 20:  # what befalls few of them depends on how fast they run
        for what in ("from the tier", "promoted", "demoted", "downs", "hangs"):
            assert counts[what] > NUM_REAL_SEEDS // 4, (what, counts)


def test_without_the_check_tokens_change() -> None:
    """With no seal checked, flips of rows that were read are noticed: the test above would notice them."""
    for seed in range(300):
        try:
            play(seed, max_steps=600, check_seals=False, kinds=WRONG_BYTES, rate=0.3)
        except (AssertionError, RuntimeWarning):  # wrong tokens, or numbers that no page holds
            return
    raise AssertionError("wrong bytes of a server were not noticed")


def test_with_its_old_names_after_a_reset_tokens_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose weights were swapped would load, and give to others, what it must not."""
    monkeypatch.setattr(SharedTier, "reset", lambda self, suffix: self._io.give_up(MissReason.CLEARED))
    for seed in range(300):
        try:
            play(seed, rate=0.0)
        except AssertionError:
            return
    raise AssertionError("rows of other weights were not noticed")
