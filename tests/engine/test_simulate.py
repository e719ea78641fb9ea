"""The simulator against the real thing: the reference engine serves a trace over a real pool and disk,
and the simulator finds the same tokens in the same places, request by request and chunk by chunk.

The engine's threads are waited for after every step, as the simulator assumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.engine.tier_kit import PATIENCE, ROW, manager_of, num_unwritten

from kvtier.config import KVTierConfig
from kvtier.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from kvtier.keys import OffloadKey, hash_blocks, make_offload_keys
from kvtier.offload.base import NO_REQUEST
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.offload.tiered import TieredOffloadingManager
from kvtier.simulate import Simulator, Speeds, TraceRequest, make_config, make_settings
from kvtier.simulate.trace import PrefixIds, Trace
from kvtier.testing.toy_model import ToyModel
from kvtier.tiers.disk.tier import DiskTier

BLOCK = 4
POOL, DISK = 32, 96
"""Rows."""


@dataclass
class Chats:
    """Random chats over some shared prefixes. Each prompt extends the last answer of its chat, until that
    is too long.
    """

    random: Random
    chats: dict[int, list[int]] = field(default_factory=dict)

    def next_prompt(self) -> tuple[int, list[int], int]:
        """Return a chat, its prompt and the length of the answer."""
        chat = min(self.random.randrange(10), self.random.randrange(10))
        said = self.chats.get(chat, [])
        if not 0 < len(said) < 72:
            prefix = Random(chat % 3)
            said = [prefix.randrange(64) for _ in range(12 * (chat % 3))]
        said += [self.random.randrange(64) for _ in range(self.random.randrange(1, 20))]
        return chat, said, self.random.choice((1, 2, 3, 5, 12))

    def answered(self, chat: int, said: list[int]) -> None:
        self.chats[chat] = said


def make_engine(folder: Path, chunk: int, policy: str, write: str, disk: int, steps: int) -> Engine:
    kvtier: dict[str, Any] = {
        "cpu": {"capacity": POOL * ROW, "policy": policy},
        "blocks_per_chunk": chunk // BLOCK,
        "audit": 0,
        "load_if_faster": False,
        "load_deadline": PATIENCE,
    }
    if disk:
        place = {"path": str(folder), "capacity": disk * ROW, "policy": policy, "write": write}
        kvtier["tiers"] = [{"disk": place | {"write_limit": 0}}]
    config = EngineConfig(
        num_blocks=65, block_size=BLOCK, max_num_batched_tokens=steps, enable_prefix_caching=False
    )
    engine = Engine(ToyModel(), config, KVTierConfig.from_dict(kvtier), weights_id="toy")
    begin_stores = engine._begin_stores

    def store_at_once() -> None:
        begin_stores()
        assert engine.worker is not None
        engine.worker.wait_for_transfers(PATIENCE)

    engine._begin_stores = store_at_once  # type: ignore[method-assign]
    return engine


def serve(engine: Engine, prompt: list[int], max_tokens: int) -> RequestOutput:
    """Serve a request; after every step wait until all transfers and writes are over."""
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
        settle(engine)
    engine.drain()
    settle(engine)
    return outputs[request_id]


def settle(engine: Engine) -> None:
    if not isinstance(pool_or_tiers(engine), TieredOffloadingManager):
        return
    manager, until = manager_of(engine), time.monotonic() + PATIENCE
    (tier,) = manager.tiers
    while num_unwritten(engine) or tier.promotion_bytes:
        assert time.monotonic() < until
        tier.wait_any(0.01)
        manager.end_step()


def pool_or_tiers(engine: Engine) -> CPUOffloadingManager | TieredOffloadingManager:
    assert engine.connector is not None
    assert engine.connector.connector_scheduler is not None
    manager = engine.connector.connector_scheduler.manager
    assert isinstance(manager, CPUOffloadingManager | TieredOffloadingManager)
    return manager


def held(manager: CPUOffloadingManager | TieredOffloadingManager, keys: list[OffloadKey]) -> list[list[Any]]:
    """Return which chunks are ready in the pool, and in the disk."""
    tiers = manager.tiers if isinstance(manager, TieredOffloadingManager) else []
    return [manager.lookup_many(keys, NO_REQUEST), *(tier.lookup_many(keys) for tier in tiers)]


def set_clocks(manager: CPUOffloadingManager | TieredOffloadingManager, clock: Callable[[], float]) -> None:
    """Have the engine's policies see the time of the trace."""
    if isinstance(manager, TieredOffloadingManager):
        (tier,) = manager.tiers
        assert isinstance(tier, DiskTier)
        tier._expect_table().policy.clock = clock
        manager = manager.pool
    manager.policy.clock = clock


@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
@pytest.mark.parametrize(
    ("chunk", "disk", "steps"), [(4, 0, 512), (4, DISK, 512), (8, DISK, 24), (12, DISK, 512)]
)
def test_hits_equal_the_engines(tmp_path: Path, chunk: int, disk: int, steps: int, policy: str) -> None:
    chats, ids, keys = Chats(Random(f"{chunk} {policy}")), PrefixIds(), dict[int, OffloadKey]()
    sources = {"pool": 0, "disk": 0, "computed": 0}
    with make_engine(tmp_path, chunk, policy, "through", disk, steps) as engine:
        manager = pool_or_tiers(engine)
        rows = 0
        if isinstance(manager, TieredOffloadingManager):
            (tier,) = manager.tiers
            assert tier.wait_open(PATIENCE)  # type: ignore[attr-defined]
            rows = tier.stats().capacity or 0
            assert 0 < rows < disk, "records take some of the disk"
        settings = make_settings(POOL * ROW, rows * ROW, policy, write_limit=0, load_if_faster=False)
        config = make_config(settings, chunk, 1)
        simulator = Simulator(config, Speeds(1e4, 1e9, 1e9, steps))
        assert config.row_bytes == ROW
        set_clocks(manager, simulator.clock.trace_time)
        for number in range(200):
            simulator.clock.arrival = number
            chat, prompt, max_tokens = chats.next_prompt()
            output = serve(engine, prompt, max_tokens)
            said = prompt + output.token_ids
            chats.answered(chat, said)
            blocks = [tuple(said[at : at + BLOCK]) for at in range(0, len(said) // BLOCK * BLOCK, BLOCK)]
            traced = TraceRequest(number, ids.number([*blocks]), len(prompt), max_tokens, len(said))
            chunks = Trace("", "", BLOCK, []).chunks(traced, chunk)
            served = simulator.serve(traced, chunks)
            assert output.source is not None
            tiers = output.source.tiers
            found = tiers.get("cpu", 0), tiers.get("disk", 0), output.source.recomputed
            assert (served.pool_tokens, served.disk_tokens, served.computed_tokens) == found, number
            hashes = hash_blocks(said, BLOCK)[chunk // BLOCK - 1 :: chunk // BLOCK]
            keys |= zip(chunks.tolist(), make_offload_keys(hashes, 0), strict=True)
            ours = [OffloadKey(at.to_bytes(8, "little") + bytes(4)) for at in keys]
            assert held(simulator.manager, ours) == held(manager, list(keys.values())), number
            sources = {name: count + new for (name, count), new in zip(sources.items(), found, strict=True)}
        simulator.manager.check()
    assert len(keys) > 2 * POOL + rows, "the working set is larger than pool and disk"
    assert all(count > 100 for name, count in sources.items() if rows or name != "disk"), sources
