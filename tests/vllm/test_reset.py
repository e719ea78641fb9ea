"""Resets, and what they tell: everything is gone from the tiers, and the event stream says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.vllm.conftest import Reference
from tests.vllm.engines import make_prompt, vllm_engine

from kvtier.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx, hash_to_u64
from kvtier.offload import OffloadingManager, ReqContext


def test_a_reset_empties_the_tiers_if_asked(llama: Path, reference: Reference) -> None:
    prompt = make_prompt(0, 100)
    with vllm_engine(llama, {}) as engine:
        engine.generate([prompt])
        engine.forget(tiers_too=True)
        output = engine.generate([prompt])[0]
    assert (output.cached, output.tokens) == (0, reference(llama, [prompt])[0])


def test_a_reset_while_requests_run(model: Path, reference: Reference) -> None:
    prompts = [make_prompt(seed, 60 + 30 * seed) for seed in range(4)]
    with vllm_engine(model, {}) as engine:
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, 40)
        for step in range(6):
            engine.step()
            if step % 2:
                scheduler = engine.core.scheduler
                assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        done = engine.run()
    assert sorted(done.values()) == sorted(reference(model, prompts, 40))


def test_events_say_what_the_pool_holds(model: Path) -> None:
    from vllm.config import KVEventsConfig

    events: list[Any] = []
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with vllm_engine(model, {"cpu": {"capacity": "1MiB"}}, kv_events_config=config) as engine:
        engine.core.scheduler.kv_event_publisher.publish = lambda batch: events.extend(batch.events)
        watch = _Watch(engine.connector._connector.connector_scheduler.manager)
        for seed in range(12):
            engine.generate([make_prompt(seed, 150)])
        engine.settle()
        assert 0 < len(_replay(events)) < 12 * 4
        assert _replay(events) == watch.held()
        engine.forget(tiers_too=True)
        engine.generate([make_prompt(99, 100)])
        engine.settle()
        assert _replay(events) == watch.held()
        assert len(watch.held()) == 3 * len(engine.connector._groups)


def _replay(events: Iterable[Any]) -> set[tuple[int, int]]:
    held: set[tuple[int, int]] = set()
    for event in events:
        if type(event).__name__ == "AllBlocksCleared":
            held.clear()
        if getattr(event, "medium", None) != "CPU":
            continue
        named = {(block_hash, event.group_idx) for block_hash in event.block_hashes}
        if type(event).__name__ == "BlockStored":
            assert not named & held
            held |= named
        else:
            assert named <= held
            held -= named
    return held


class _Watch:
    """Knows all keys that were ever offered to a manager, and so which of them it holds."""

    def __init__(self, manager: OffloadingManager) -> None:
        self._manager = manager
        self._offered: set[OffloadKey] = set()
        self._prepare_store = manager.prepare_store
        manager.prepare_store = self._note  # type: ignore[method-assign]

    def _note(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Any:
        self._offered |= set(keys)
        return self._prepare_store(keys, req_context)

    def held(self) -> set[tuple[int, int]]:
        ready = [key for key in self._offered if self._manager.lookup(key, ReqContext())]
        return {(hash_to_u64(get_offload_block_hash(key)), get_offload_group_idx(key)) for key in ready}
