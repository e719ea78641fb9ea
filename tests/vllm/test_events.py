"""Events of the pool inside vLLM: they describe their blocks as vLLM's own do, and say exactly what the
pool holds.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.device import lora_options
from tests.vllm.engines import BLOCK, Engine, make_prompt, vllm_engine
from tests.vllm.models import save_adapter

from kvtier.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx
from kvtier.offload import ReqContext

Block = tuple[Any, int]


class Listener:
    """Hears every batch that the engine publishes, and counts what it says is held."""

    def __init__(self, engine: Engine, silence: bool = True) -> None:
        """Listen; with `silence` instead of the engine's publisher."""
        self.events: list[Any] = []
        publisher = engine.core.scheduler.kv_event_publisher
        publish = publisher.publish

        def hear(batch: Any) -> None:
            self.events.extend(batch.events)
            if not silence:
                publish(batch)

        publisher.publish = hear
        self.stored_keys: dict[OffloadKey, None] = {}
        self._manager = engine.connector._connector.connector_scheduler.manager
        complete_store = self._manager.complete_store

        def note(keys: list[OffloadKey], success: bool = True, spec: Any = None) -> None:
            self.stored_keys.update(dict.fromkeys(keys))
            complete_store(keys, success, spec)

        self._manager.complete_store = note

    def of(self, medium: str, kind: str = "BlockStored") -> list[Any]:
        return [e for e in self.events if type(e).__name__ == kind and e.medium == medium]

    def held(self) -> Counter[Block]:
        held: Counter[Block] = Counter()
        for event in self.events:
            if type(event).__name__ == "AllBlocksCleared":
                held.clear()
            if getattr(event, "medium", None) != "CPU":
                continue
            blocks = Counter((block_hash, event.group_idx) for block_hash in event.block_hashes)
            if type(event).__name__ == "BlockStored":
                held += blocks
            else:
                assert blocks <= held, "nothing is removed that was not stored"
                held -= blocks
        return held

    def chunks_in_pool(self) -> set[Block]:
        """Return the last block and the group of each chunk that can be read."""
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        ready = [key for key in self.stored_keys if self._manager.lookup(key, ReqContext())]
        return {
            (maybe_convert_block_hash(get_offload_block_hash(key)), get_offload_group_idx(key))
            for key in ready
        }


def events_on() -> dict[str, Any]:
    from vllm.config import KVEventsConfig

    return {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}


def by_block(events: list[Any]) -> dict[Any, dict[str, Any]]:
    """Return what events say of each block of theirs."""
    told: dict[Any, dict[str, Any]] = {}
    for event in events:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        parents = [event.parent_block_hash, *event.block_hashes]
        for index, block_hash in enumerate(event.block_hashes):
            told[block_hash] = {
                "parent": parents[index],
                "tokens": event.token_ids[index * event.block_size : (index + 1) * event.block_size],
                "extra": event.extra_keys[index] if event.extra_keys else None,
                "lora": (event.lora_id, event.lora_name),
                "group": event.group_idx,
                "kind": event.kv_cache_spec_kind,
            }
    return told


@pytest.fixture(params=["1", "0"])
def int_hashes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether hashes travel as numbers: vLLM's own switch."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", request.param)
    return bool(request.param == "1")


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_blocks_are_described_as_vllm_describes_its_own(
    llama: Path, tmp_path: Path, int_hashes: bool, per_chunk: int
) -> None:
    """Tokens, parents, salts, adapters, group and kind of every block are those of the GPU's event."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("adapter", 1, str(save_adapter(tmp_path, 1)))
    settings = {"blocks_per_chunk": per_chunk, "prompt_only": True}
    options = {"enable_lora": True, "max_lora_rank": 8} | lora_options() | events_on()
    with vllm_engine(llama, settings, num_blocks=64, **options) as engine:
        listener = Listener(engine)
        engine.generate([make_prompt(0, 160), make_prompt(0, 160)], salts=["tenant", None])
        engine.generate([make_prompt(1, 160)], lora_request=lora)
        engine.settle()
        engine.step()
        on_gpu, on_cpu = by_block(listener.of("GPU")), by_block(listener.of("CPU"))
    assert len(on_cpu) == 3 * (160 // BLOCK // per_chunk) * per_chunk
    assert {block_hash: on_gpu[block_hash] for block_hash in on_cpu} == on_cpu
    assert {type(block_hash) for block_hash in on_cpu} == ({int} if int_hashes else {bytes})
    extras = Counter(told["extra"] for told in on_cpu.values())
    assert extras[("tenant",)] == 1, "a salt marks the first block"
    assert extras[("adapter",)] == sum(told["lora"] == (1, "adapter") for told in on_cpu.values()) > 1
    assert {told["kind"] for told in on_cpu.values()} == {"full_attention"}


def test_an_image_is_an_extra_key_of_its_blocks() -> None:
    """Without a multimodal model: what vLLM would hand over, and what its own events would say."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from kvtier.integrations.vllm.translate import describe_blocks

    def image(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
        where = PlaceholderRange(offset=offset, length=length)
        return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=where)

    request = Request(
        request_id="r",
        prompt_token_ids=list(range(64)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[image("cat", 5, 20), image("dog", 40, 4)],
        cache_salt="tenant",
    )
    first, second = describe_blocks(request, 0, 32, 16), describe_blocks(request, 32, 64, 16)
    assert first.extra_keys == [(("cat", 5), "tenant"), (("cat", -11),)]
    assert second.extra_keys == [(("dog", 8),), None]
    assert (list(second.token_ids), second.lora_id, second.lora_name) == (list(range(32, 64)), None, None)


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_the_stream_says_what_the_pool_holds(model: Path, per_chunk: int) -> None:
    """With evictions, a shared prefix that ends inside a chunk, and a reset of everything."""
    settings = {"cpu": {"capacity": "1MiB"}, "blocks_per_chunk": per_chunk}
    with vllm_engine(model, settings, **events_on()) as engine:
        listener = Listener(engine)
        for seed in range(12):
            engine.generate([make_prompt(seed % 2, 100) + make_prompt(seed, 100)])
        expect_true(listener, engine, per_chunk)
        assert listener.of("CPU", "BlockRemoved"), "the pool overflowed"
        engine.forget(tiers_too=True)
        engine.generate([make_prompt(99, 100)])
        expect_true(listener, engine, per_chunk)
        assert len(listener.chunks_in_pool()) == 3 // per_chunk * len(engine.connector._groups)


def expect_true(listener: Listener, engine: Engine, per_chunk: int) -> None:
    """Expect that what was announced and not removed is what the pool holds, all blocks of every described
    chunk.
    """
    engine.settle()
    engine.step()  # vLLM publishes with a step
    held, chunks = listener.held(), listener.chunks_in_pool()
    assert chunks <= held.keys()
    assert set(held.values()) <= {1}, "blocks that chunks share are told once"
    described = sum(engine.connector._groups[group].sliding_window is None for _, group in chunks)
    told = held.total() - (len(chunks) - described)
    if per_chunk == 1:
        assert told == described
    else:
        assert described < told <= described * per_chunk


def test_a_reset_of_the_gpu_does_not_make_listeners_forget_the_tiers(model: Path) -> None:
    """vLLM then says that all blocks are cleared, and means its own."""
    with vllm_engine(model, {"cpu": {"capacity": "1MiB"}}, **events_on()) as engine:
        listener = Listener(engine)
        for seed in range(3):
            engine.generate([make_prompt(seed, 100)])
        expect_true(listener, engine, 1)
        engine.forget()
        engine.generate([make_prompt(3, 100)])
        expect_true(listener, engine, 1)
        assert "AllBlocksCleared" in [type(event).__name__ for event in listener.events]
        assert len(listener.chunks_in_pool()) == 4 * 3 * len(engine.connector._groups)


def test_switched_off_events_carry_the_hash_alone(llama: Path) -> None:
    with vllm_engine(llama, {"self_describing_kv_events": False}, **events_on()) as engine:
        listener = Listener(engine)
        engine.generate([make_prompt(0, 100)])
        engine.settle()
        engine.step()
        stored = listener.of("CPU")
        assert not len(engine.connector._connector.connector_scheduler._tracker)
    assert [(len(e.block_hashes), e.token_ids, e.block_size, e.parent_block_hash) for e in stored] == [
        (1, [], 0, None)
    ] * 3
