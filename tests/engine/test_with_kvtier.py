"""The engine with the real connector under it: where tokens come from, what is told, and that nothing stays
behind.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Any

import pytest
from tests.engine.drive import ALL_KINDS, ONE_GROUP, STATES, TWO_GROUPS, expect, expect_idle, run, tokens
from tests.engine.test_engine import Workload
from tests.unit.event_kit import publisher

from kvtier.config import KVTierConfig
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.engine.cache import group_layers
from kvtier.engine.config import STATE, LayerKind
from kvtier.engine.event_buffer import EventBuffer
from kvtier.errors import ConfigError, LayoutError
from kvtier.events import Received, Source, Subscriber
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from kvtier.keys import (
    OffloadKey,
    extra_keys_of,
    get_offload_group_idx,
    hash_blocks,
    hash_to_u64,
    make_offload_key,
)
from kvtier.offload import (
    CPULoadStoreSpec,
    CPUOffloadingManager,
    CPUOffloadingSpec,
    GPULoadStoreSpec,
    MissReason,
)
from kvtier.testing.faults import FaultPlan, with_faults
from kvtier.testing.toy_model import ToyModel

ROW = 4096
KVTIER_SETTINGS = ("blocks_per_chunk", "load_deadline", "store_deadline")
LAYERS = [ONE_GROUP, TWO_GROUPS, STATES, ALL_KINDS]


def engine_with(
    layers: Sequence[LayerKind] = ONE_GROUP,
    *,
    rows: int = 64,
    spec_factory: Any = CPUOffloadingSpec,
    publisher: Any = None,
    **settings: Any,
) -> Engine:
    """Make a toy engine with a pool of `rows` chunks.

    Loads are never too slow to be worth it, nor late unless told so: the clock decides nothing.
    """
    kvtier: dict[str, Any] = {"load_deadline": "60s", "store_deadline": "60s"}
    kvtier |= {name: settings.pop(name) for name in KVTIER_SETTINGS if name in settings}
    kvtier |= {
        "cpu": {"capacity": rows * ROW, "policy": settings.pop("policy", "lru")},
        "load_if_faster": False,
    }
    settings = {"kv_events": None if publisher else True} | settings
    config = EngineConfig(**{"num_blocks": 65, "block_size": 4, "max_num_batched_tokens": 16} | settings)
    more = {"spec_factory": spec_factory, "publisher": publisher}
    return Engine(ToyModel(layers), config, KVTierConfig.from_dict(kvtier), **more)


def ask(engine: Engine, prompt: list[int], name: str, max_tokens: int = 4) -> Any:
    params = SamplingParams(max_tokens=max_tokens)
    engine.add_request(prompt, params, request_id=name)
    output = run(engine)[name]
    assert output.token_ids == expect(engine, prompt, params)
    return output


def most_loaded(layers: Sequence[LayerKind], num_tokens: int) -> int:
    """Return how much of a prompt that a tier has is loaded: a state must end before the last token."""
    return (num_tokens - 1) // 4 * 4 if STATE in layers else num_tokens - 1


def expect_nothing_left(engine: Engine) -> None:
    """Expect every block free, every slot free or ready, and no request remembered."""
    expect_idle(engine)
    assert engine.connector is not None
    scheduler = engine.connector.connector_scheduler
    assert scheduler is not None
    assert isinstance(scheduler.manager, CPUOffloadingManager)
    stats = scheduler.manager.stats()
    assert (stats.writing, stats.reading, stats.doomed) == (0, 0, 0)
    assert stats.free + stats.ready == stats.slots
    assert scheduler._requests == {}
    assert engine._requests == {}


@pytest.mark.parametrize("layers", LAYERS)
def test_a_forgotten_prompt_comes_back_from_the_tier(layers: Sequence[LayerKind]) -> None:
    with engine_with(layers) as engine:
        first = ask(engine, tokens(33), "first")
        assert (first.source.gpu, first.source.tiers, first.source.recomputed) == (0, {}, 33)
        assert first.source.first_miss is MissReason.NEVER_STORED
        engine.drain()
        engine.reset_prefix_cache()
        again = ask(engine, tokens(33), "again")
        assert (again.source.gpu, again.source.tiers, again.source.recomputed) == (0, {"cpu": 32}, 1)
        assert again.source.first_miss is None
        third = ask(engine, tokens(33), "third")
        assert (third.source.gpu, third.source.tiers) == (32, {})
        explanation = engine.explain("again")
        assert explanation is not None
        assert (explanation.from_tiers, explanation.recomputed) == ({"cpu": 32}, 1)
        expect_nothing_left(engine)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_whole_prompt_is_loaded_and_its_last_token_computed(layers: Sequence[LayerKind]) -> None:
    with engine_with(layers) as engine:
        ask(engine, tokens(32), "first")
        engine.drain()
        engine.reset_prefix_cache()
        again = ask(engine, tokens(32), "again")
        loaded = most_loaded(layers, 32)
        assert (again.source.gpu, again.source.tiers) == (0, {"cpu": loaded})
        assert again.source.recomputed == 32 - loaded
        expect_nothing_left(engine)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("rows", [0, 1, 8])
@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
def test_a_pool_of_any_size_serves(layers: Sequence[LayerKind], rows: int, policy: str) -> None:
    """Nothing, one chunk, and a pool that is always full, beside a cache that is always full too."""
    num_blocks = 36 if STATE in layers else 24
    with engine_with(layers, rows=rows, num_blocks=num_blocks, policy=policy) as engine:
        for index in range(20):
            ask(engine, [*tokens(24, seed=index % 3), *tokens(5, seed=100 + index)], f"r{index}")
        engine.drain()
        assert engine.connector is not None
        scheduler = engine.connector.connector_scheduler
        assert scheduler is not None
        assert (scheduler.stats.stores > 0) == (rows > 0)
        seeds, until = count(200), time.monotonic() + 30
        # On a busy machine stores end early, because their blocks are needed: their slots are free.
        while (stats := scheduler.manager.stats()).ready != rows:  # type: ignore[attr-defined]
            assert time.monotonic() < until, stats
            ask(engine, tokens(29, seed=next(seeds)), "more")
            engine.drain()
        engine.reset_prefix_cache()
        again = ask(engine, tokens(24), "again")
        if rows == 0:
            assert scheduler.stats.loads == 0
            assert (again.source.tiers, again.source.first_miss) == ({}, MissReason.REFUSED)
        expect_nothing_left(engine)


def test_decoded_tokens_are_stored_too() -> None:
    with engine_with() as engine:
        first = ask(engine, tokens(10), "first", max_tokens=20)
        engine.drain()
        engine.reset_prefix_cache()
        longer = ask(engine, [*tokens(10), *first.token_ids], "longer")
        assert longer.source.tiers == {"cpu": 28}


def test_a_reset_of_both_leaves_nothing_to_load() -> None:
    with engine_with() as engine:
        ask(engine, tokens(33), "first")
        engine.drain()
        engine.reset_prefix_cache(reset_connector=True)
        again = ask(engine, tokens(33), "again")
        assert (again.source.tiers, again.source.first_miss) == ({}, MissReason.CLEARED)


class Consumer:
    """Replays events as an index does: by medium and group, counting, since two chunks may have a block in
    common.
    """

    def __init__(self, layers: Sequence[LayerKind] = ONE_GROUP) -> None:
        self._groups = group_layers(ToyModel(layers).config.layer_names, layers)
        self.held: dict[str | None, Counter[tuple[Any, int | None]]] = {"GPU": Counter(), "CPU": Counter()}

    def apply(self, events: Sequence[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held = {"GPU": Counter(), "CPU": Counter()}
                continue
            assert isinstance(event, (BlockStored, BlockRemoved))
            keys = Counter((block_hash, event.group_idx) for block_hash in event.block_hashes)
            if isinstance(event, BlockStored):
                self.held[event.medium] += keys
                self._check_tokens(event)
            else:
                self.held[event.medium] -= keys

    def _check_tokens(self, event: BlockStored) -> None:
        """Expect that hashing the tokens behind the parent gives the hashes.

        On the CPU windows are not described.
        """
        group = self._groups[event.group_idx or 0]
        if event.medium == "CPU" and group.sliding_window is not None:
            assert (event.block_size, event.kv_cache_spec_kind) == (0, None)
            return
        kinds = {None: "full_attention", STATE: "mamba"}
        assert event.kv_cache_spec_kind == kinds.get(group.kind, "sliding_window")
        salts = [keys[0] for keys in event.extra_keys or () if keys]
        extra = extra_keys_of(len(event.block_hashes), event.block_size, salt=salts[0]) if salts else {}
        parent: Any = event.parent_block_hash
        assert (
            hash_blocks(event.token_ids, event.block_size, parent=parent, extra_keys=extra)
            == event.block_hashes
        )


def blocks_in_pool(
    engine: Engine, streams: list[tuple[list[int], str]], per_chunk: int
) -> Counter[tuple[Any, int]]:
    """Return what the pool has ready of these tokens and salts, in blocks; only of full attention more than
    the chunks' own hashes.
    """
    assert engine.connector is not None
    manager = engine.connector.connector_scheduler.manager  # type: ignore[union-attr]
    assert isinstance(manager, CPUOffloadingManager)
    chunks: dict[OffloadKey, list[bytes]] = {}
    for stream, salt in streams:
        extra = extra_keys_of(len(stream) // 4, 4, salt=salt)
        hashes = hash_blocks(stream, 4, extra_keys=extra)
        for end in range(per_chunk, len(hashes) + 1, per_chunk):
            for index, group in enumerate(engine.groups):
                first = end - per_chunk if group.kind is None else end - 1
                chunks[make_offload_key(hashes[end - 1], index)] = list(hashes[first:end])
    ready = {key: blocks for key, blocks in chunks.items() if manager.explain(key) is None}
    assert len(ready) == manager.stats().ready
    return Counter((block, get_offload_group_idx(key)) for key, blocks in ready.items() for block in blocks)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("published", [False, True])
def test_events_of_both_media_replay_to_what_each_holds(
    layers: Sequence[LayerKind], blocks_per_chunk: int, published: bool
) -> None:
    """Prefixes of 22 tokens end inside a block and, with two blocks to a chunk, inside a chunk."""
    consumer, random, batches, shared = Consumer(layers), Random(0), Batches(), 0
    streams: list[tuple[list[int], str]] = []
    with engine_with(
        layers,
        num_blocks=40,
        rows=64 if STATE in layers else 32,
        blocks_per_chunk=blocks_per_chunk,
        publisher=batches if published else None,
    ) as engine:
        for index in range(40):
            prompt, salt = [*tokens(22, seed=index % 2), *tokens(7, seed=100 + index)], random.choice("ab")
            name = engine.add_request(prompt, SamplingParams(max_tokens=4), cache_salt=salt)
            streams.append(([*prompt, *run(engine)[name].token_ids], salt))
            if random.random() < 0.1:
                engine.reset_prefix_cache(reset_connector=random.random() < 0.5)
            engine.drain()
            consumer.apply(batches.take() if published else engine.take_events())
            assert consumer.held["GPU"] == Counter(engine._cache._found_by.keys())
            in_pool = blocks_in_pool(engine, streams, blocks_per_chunk)
            assert consumer.held["CPU"] == Counter(set(in_pool)), "each once, whatever chunks have it"
            shared = max(shared, *in_pool.values(), 0)
        assert (shared > 1) == (blocks_per_chunk > 1), "chunks had blocks in common"
        assert engine.connector is not None
        assert engine.connector.connector_scheduler.manager.stats().evicted > 0  # type: ignore[union-attr]


def test_events_applied_to_a_set_give_the_content_of_the_pool() -> None:
    """Prompts part inside a chunk, and one of two chunks with a common block is evicted before the other."""
    streams: list[tuple[list[int], str]] = []
    held: set[tuple[str, int | None, Any]] = set()
    with (
        publisher() as made,
        engine_with(num_blocks=32, rows=16, blocks_per_chunk=2, publisher=made) as engine,
    ):
        with Subscriber([Source("engine", made.endpoint, made.replay_endpoint)]) as subscriber:
            for index in range(20):
                prompt = [*tokens(22, seed=index % 2), *tokens(7, seed=100 + index)]
                name = engine.add_request(prompt, SamplingParams(max_tokens=4), cache_salt="a")
                streams.append(([*prompt, *run(engine)[name].token_ids], "a"))
                engine.drain()
                in_pool = blocks_in_pool(engine, streams, 2)
                wanted = {(group, hash_to_u64(block)) for block, group in in_pool}
                until = time.monotonic() + 30
                while {(group, block) for medium, group, block in held if medium == "CPU"} != wanted:
                    assert time.monotonic() < until
                    for update in subscriber.poll(0.05):
                        if isinstance(update, Received):
                            follow(held, update.batch.events)
        assert max(in_pool.values()) > 1
        manager = engine.connector.connector_scheduler.manager  # type: ignore[union-attr]
        assert manager.stats().evicted > 0  # type: ignore[attr-defined]


def follow(held: set[tuple[str, int | None, Any]], events: Sequence[KVCacheEvent]) -> None:
    for event in events:
        if isinstance(event, AllBlocksCleared):
            held.clear()
        elif isinstance(event, BlockStored):
            held |= {(event.medium or "GPU", event.group_idx, block) for block in event.block_hashes}
        else:
            assert isinstance(event, BlockRemoved)
            held -= {(event.medium or "GPU", event.group_idx, block) for block in event.block_hashes}


class Batches:
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self._batches: list[KVEventBatch] = []

    def publish(self, events: KVEventBatch) -> None:
        self._batches.append(events)

    def take(self) -> list[KVCacheEvent]:
        taken, self._batches = self._batches, []
        assert all(batch.events for batch in taken), "a step without events publishes nothing"
        return [event for batch in taken for event in batch.events]


def test_a_reset_of_an_idle_engine_is_published_at_once() -> None:
    """Nobody may step it for hours."""
    batches = Batches()
    with engine_with(publisher=batches) as engine:
        ask(engine, tokens(9), "first")
        engine.drain()
        batches.take()
        engine.reset_prefix_cache(reset_connector=True)
        assert AllBlocksCleared() in batches.take()
        assert engine.take_events() == []


def pieces_of(engine: Engine) -> list[list[Any]]:
    """Return every list in which events could pile up."""
    assert engine.connector is not None
    scheduler = engine.connector.connector_scheduler
    assert scheduler is not None
    assert isinstance(scheduler.manager, CPUOffloadingManager)
    return [
        engine._cache._events or [],
        engine._events._events,
        scheduler._events_to_take,
        scheduler.manager._changes._events,
    ]


@pytest.mark.parametrize("kv_events", [None, False])
def test_events_that_nobody_asked_for_are_not_kept(kv_events: bool | None) -> None:
    """Guards the shortest program there is, an engine and prompts: it once kept every event of its life."""
    with engine_with(num_blocks=32, rows=32, kv_events=kv_events) as engine:
        for index in range(20):
            ask(engine, tokens(29, seed=index), f"r{index}")
        engine.drain()
        assert pieces_of(engine) == [[], [], [], []]
        assert engine.take_events() == []


def test_events_wait_in_a_bounded_place_and_never_tell_too_much() -> None:
    """Nobody takes events for a while: a consumer that comes back believes in no block that is not there."""
    consumer, believed, cleared = Consumer(), 0, 0
    streams: list[tuple[list[int], str]] = []
    with engine_with(num_blocks=32, rows=32, kv_events=True) as engine:
        engine._events = EventBuffer(most_blocks=100)
        for index in range(60):
            prompt, salt = tokens(29, seed=index % 7), "ab"[index % 2]
            name = engine.add_request(prompt, SamplingParams(max_tokens=4), cache_salt=salt)
            streams.append(([*prompt, *run(engine)[name].token_ids], salt))
            engine.drain()
            told, waiting, *inside = pieces_of(engine)
            assert (told, inside) == ([], [[], []]), "nothing piles up where it has no bound"
            assert sum(len(getattr(event, "block_hashes", ())) for event in waiting) <= 100
            if index % 7 == 6:
                events = engine.take_events()
                cleared += AllBlocksCleared() in events
                consumer.apply(events)
                assert consumer.held["GPU"] <= Counter(engine._cache._found_by.keys())
                assert consumer.held["CPU"] <= blocks_in_pool(engine, streams, 1)
                believed += sum(map(len, consumer.held.values()))
    assert believed > 0
    assert cleared > 0


def play(workload: Workload, engine: Engine) -> None:
    """Run a workload with aborts and resets, checking everything after every step."""
    random = workload.random
    waiting = [(f"r{index}", prompt, workload.params()) for index, prompt in enumerate(workload.prompts)]
    asked = {name: (prompt, params) for name, prompt, params in waiting}
    while waiting or engine.has_unfinished():
        if waiting and random.random() < 0.5:
            name, prompt, params = waiting.pop(0)
            engine.add_request(prompt, params, request_id=name)
        if random.random() < 0.02 and engine._requests:
            engine.abort(random.choice(list(engine._requests)))
        if random.random() < 0.05:
            engine.reset_prefix_cache(reset_connector=random.random() < 0.3)
        for output in engine.step():
            prompt, params = asked[output.request_id]
            if output.finished:
                assert output.token_ids == expect(engine, prompt, params)
                source = output.source
                assert source is not None
                assert source.gpu + sum(source.tiers.values()) + source.recomputed == len(prompt)
        engine.check()
    expect_nothing_left(engine)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
def test_random_workloads(blocks_per_chunk: int) -> None:
    """25 of them, and more where transfers are slow: until some blocks were loaded."""
    loads = 0
    for seed in count():
        if seed >= 25 and loads > 5:
            break
        assert seed < 500, f"{loads} loads"
        workload = Workload(3000 + seed)
        rows = workload.random.choice([1, 4, 16, 64])
        with engine_with(
            workload.layers, rows=rows, blocks_per_chunk=blocks_per_chunk, **workload.settings
        ) as engine:
            play(workload, engine)
            loads += engine.connector.connector_scheduler.stats.loads  # type: ignore[union-attr]


def test_random_workloads_with_faults() -> None:
    failed = 0
    for seed in range(25):
        workload = Workload(4000 + seed)
        plan = FaultPlan(seed=seed, rate=0.5)
        with engine_with(
            workload.layers,
            load_deadline=0.02,
            store_deadline=0.02,
            blocks_per_chunk=workload.random.choice([1, 2]),
            spec_factory=lambda config, plan=plan: with_faults(CPUOffloadingSpec(config), plan),
            **workload.settings,
        ) as engine:
            play(workload, engine)
            failed += engine.connector.connector_scheduler.stats.loads_failed  # type: ignore[union-attr]
    assert failed > 0


def test_a_pool_smaller_than_a_row_is_refused_and_leaves_nothing_behind() -> None:
    with pytest.raises(ConfigError, match=r"cpu\.capacity: expected at least one row"):
        engine_with(rows=0.5)  # type: ignore[arg-type]


def test_a_connector_that_cannot_be_made_is_closed() -> None:
    """Guards against a pool that outlives an engine which never came to be."""
    made: list[CPUOffloadingSpec] = []

    class Broken(CPUOffloadingSpec):
        closed = False

        def get_handlers(self, kv_caches: Any) -> Any:
            made.append(self)
            raise LayoutError("no handler for these")

        def shutdown(self) -> None:
            self.closed = True
            super().shutdown()

    with pytest.raises(LayoutError, match="no handler for these"):
        engine_with(spec_factory=Broken)
    assert made[0].closed  # type: ignore[attr-defined]


def test_close_is_idempotent() -> None:
    engine = engine_with()
    ask(engine, tokens(9), "r")
    assert engine.worker is not None
    assert engine.worker.connector_worker is not None
    handlers = list(engine.worker.connector_worker._handlers.values())
    assert handlers
    for _ in range(2):
        engine.close()
        assert not handlers[0].transfer_async(99, (GPULoadStoreSpec([1]), CPULoadStoreSpec([0])))


class FailingBatches(Batches):
    """A publisher that raises while it fails."""

    fails = False

    def publish(self, events: KVEventBatch) -> None:
        if self.fails:
            raise RuntimeError("Publisher is closed")
        super().publish(events)


def test_a_publisher_that_fails_for_a_while_loses_no_events(caplog: pytest.LogCaptureFixture) -> None:
    """A step's events were gone if it raised once, and the stream was wrong from then on."""
    consumer, batches = Consumer(), FailingBatches()
    with engine_with(num_blocks=16, publisher=batches) as engine:
        for index in range(12):
            batches.fails = index % 3 != 2
            ask(engine, tokens(22, seed=index), f"r{index}")
            engine.drain()
        consumer.apply(batches.take())
        assert consumer.held["GPU"] == Counter(engine._cache._found_by.keys())
        manager = engine.connector.connector_scheduler.manager  # type: ignore
        assert len(consumer.held["CPU"]) == manager.stats().ready
    failures = [line for line in caplog.messages if "the publisher failed with" in line]
    assert len(failures) == 4, "one for each time that it began to fail"


def test_a_closed_publisher_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=4)
    with publisher() as made, engine_with(publisher=made) as engine:
        made.shutdown()
        for seed in range(3):
            prompt = tokens(22, seed=seed)
            (output,) = engine.generate([prompt], params)
            assert output.token_ids == expect(engine, prompt, params)
        engine.drain()
        engine.reset_prefix_cache()
    failures = [line for line in caplog.messages if "the publisher failed with" in line]
    assert len(failures) == 1
    assert "closed" in failures[0]


def test_events_that_a_publisher_does_not_take_are_bounded() -> None:
    batches = FailingBatches()
    batches.fails = True
    with engine_with(num_blocks=16, publisher=batches) as engine:
        engine._events._most_blocks = 50
        for index in range(20):
            ask(engine, tokens(22, seed=index), f"r{index}")
        assert len(engine._events._events) <= 51
        batches.fails = False
        engine.reset_prefix_cache()
        assert batches.take()[0] == AllBlocksCleared()


def test_a_reused_id_is_not_explained_as_the_request_that_had_it_before() -> None:
    with engine_with() as engine:
        ask(engine, tokens(40), "a")
        engine.drain()  # its id is its own until its stores are over
        engine.add_request(tokens(3), SamplingParams(max_tokens=1), request_id="a")
        assert engine.explain("a") is None
        output = engine.abort("a")
        assert output is not None
        assert output.source is not None
        assert output.source.recomputed == 3
