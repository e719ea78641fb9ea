"""The stream of a real engine, followed over its own sockets by our subscriber and read by vLLM's own
decoder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.ports import free_ports
from tests.vllm.engines import Engine, make_prompt, vllm_engine
from tests.vllm.test_events import Listener

from kvtier.events import Source, State, Subscriber
from kvtier.index import PrefixIndex

pytestmark = pytest.mark.newest_vllm

WORKER = "vllm"


class Follower:
    """A subscriber with an index, and a plain socket whose messages vLLM's typed decoder must read."""

    def __init__(self, endpoint: str, replay: str) -> None:
        # vLLM announces every copy of a block. In Python: a process that has numba loaded cannot start
        # another vLLM engine, whose scan of all modules trips over llvmlite.
        self.index = PrefixIndex(keys="engine", form="python")
        self.updates: Subscriber[Any] = Subscriber(
            [Source(WORKER, endpoint, replay)], decode=self.index.decoder()
        )
        self._context = zmq.Context()
        self._plain = self._context.socket(zmq.SUB)
        self._plain.subscribe(b"")
        self._plain.connect(endpoint)
        self.read_by_vllm = 0

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.updates.close()
        self._plain.close(linger=0)
        self._context.term()

    def catch_up(self, done: Callable[[], bool], seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while not (done() and self.updates.status(WORKER).state is State.EXACT):
            assert time.monotonic() < until, f"not in time: {self.updates.status(WORKER)}"
            for update in self.updates.poll(0.05):
                self.index.follow(update)
        self._decode_plain()

    def _decode_plain(self) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while self._plain.poll(0):
            _, _, payload = self._plain.recv_multipart()
            self.read_by_vllm += len(decoder.decode(payload).events)

    def held(self) -> dict[str, set[int]]:
        held: dict[str, set[int]] = {}
        for _, block_hash, tier in self.index.entries():
            held.setdefault(tier.name, set()).add(block_hash)
        return held


def truth(engine: Engine, listener: Listener) -> dict[str, set[int]]:
    """Return what the engine's block pool and our pool hold, by asking them."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

    cached = engine.core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    gpu = {maybe_convert_block_hash(get_block_hash(key)) for key in cached}
    held = {"GPU": gpu, "CPU": {block_hash for block_hash, _ in listener.chunks_in_pool()}}
    return {medium: hashes for medium, hashes in held.items() if hashes}


def test_an_index_holds_what_gpu_and_cpu_tier_hold(llama: Path) -> None:
    """After evictions on both tiers, after a reset of the GPU alone, and after one of everything."""
    from vllm.config import KVEventsConfig

    live, replay = free_ports(2)
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"tcp://*:{live}",
        replay_endpoint=f"tcp://*:{replay}",
    )
    with (
        vllm_engine(llama, {"cpu": {"capacity": "1MiB"}}, kv_events_config=config) as engine,
        Follower(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}") as follower,
    ):
        listener = Listener(engine, silence=False)

        def expect_true() -> None:
            engine.settle()
            engine.step()  # vLLM publishes with a step
            follower.catch_up(lambda: follower.held() == truth(engine, listener))
            assert set(truth(engine, listener)) == {"GPU", "CPU"}

        for seed in range(12):
            engine.generate([make_prompt(seed % 2, 100) + make_prompt(seed, 100)])
        expect_true()
        assert listener.of("CPU", "BlockRemoved")
        assert listener.of("GPU", "BlockRemoved")
        engine.forget()
        engine.generate([make_prompt(50, 100)])
        expect_true()
        engine.forget(tiers_too=True)
        engine.generate([make_prompt(99, 100)])
        expect_true()
        assert follower.updates.status(WORKER).counters.skipped_events == 0
        assert follower.read_by_vllm > 50
