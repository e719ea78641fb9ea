"""Engines over a pool and a server that they share: what one has computed the others load, and nothing
waits in vain."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import pytest
from tests.engine.drive import ALL_KINDS, ONE_GROUP, STATES, TWO_GROUPS, expect_idle, tokens
from tests.engine.test_with_tiers import ask, count_steps, expect_sleep, forget, suspend
from tests.engine.tier_kit import PATIENCE, SharedTiers, manager_of, settle, shared_engine

from kvtier.engine.config import LayerKind
from kvtier.events.types import BlockRemoved, BlockStored
from kvtier.offload import MissReason
from kvtier.testing.memory_tier import MemoryServer

LAYERS = [ONE_GROUP, TWO_GROUPS, STATES, ALL_KINDS]


@pytest.mark.parametrize("batch", [1024, 1])
@pytest.mark.parametrize("layers", LAYERS)
def test_an_engine_loads_kv_that_another_has_computed(layers: Sequence[LayerKind], batch: int) -> None:
    server = MemoryServer(batch)
    first, second = SharedTiers(server), SharedTiers(server)
    with shared_engine(first, layers) as one, shared_engine(second, layers) as other:
        ask(one, tokens(33), "first")
        settle(one)
        again = ask(other, tokens(33), "second")
        assert (again.source.gpu, again.source.tiers, again.source.recomputed) == (0, {"valkey": 32}, 1)
        assert again.source.first_miss is None
        other.reset_prefix_cache()
        assert ask(other, tokens(33), "third").source.tiers == {"cpu": 32}
        new = ask(other, tokens(33, seed=1), "new")
        assert (new.source.tiers, new.source.recomputed) == ({}, 33)
        for engine in (one, other):
            media = {
                event.medium
                for event in engine.take_events()
                if isinstance(event, (BlockStored, BlockRemoved))
            }
            assert "STORAGE" not in media, "nothing about a shared tier is claimed"
            expect_idle(engine)
            manager_of(engine).check()


def test_a_longer_prompt_goes_on_where_another_engine_has_ended() -> None:
    server = MemoryServer()
    with shared_engine(SharedTiers(server)) as one, shared_engine(SharedTiers(server)) as other:
        ask(one, tokens(65)[:33], "first")
        settle(one)
        longer = ask(other, tokens(65), "longer")
        assert (longer.source.tiers, longer.source.recomputed) == ({"valkey": 32}, 33)
        settle(other)
        forget(one)
        back = ask(one, tokens(65), "back")
        assert back.source.tiers == {"valkey": 64}


def test_a_row_that_is_there_is_not_written_again() -> None:
    server = MemoryServer()
    with shared_engine(SharedTiers(server)) as one, shared_engine(SharedTiers(server)) as other:
        ask(one, tokens(33), "first")
        settle(one)
        written = server.num_written
        ask(other, tokens(33), "second")
        settle(other)
        assert server.num_written == written + 1, (
            "the last chunk, which was computed, is not known to be there"
        )
    assert server.num_written <= written + 3, "nor does an end write what is known to be there"


def test_a_server_that_comes_back_empty_is_a_miss() -> None:
    server = MemoryServer()
    with shared_engine(SharedTiers(server)) as engine:
        ask(engine, tokens(33), "first")
        settle(engine)
        forget(engine)
        server.evict()
        again = ask(engine, tokens(33), "again")
        assert (again.source.tiers, again.source.recomputed) == ({}, 33)
        explained = engine.explain("again")
        assert explained is not None
        assert explained.misses["valkey"] is MissReason.EVICTED
        settle(engine)
        forget(engine)
        assert ask(engine, tokens(33), "third").source.tiers == {"valkey": 32}, "it was written anew"


def test_a_server_that_does_not_answer_costs_one_deadline_and_then_nothing() -> None:
    tiers = SharedTiers()
    with shared_engine(tiers, settings={"load_deadline": 0.3}) as engine:
        tiers.backend.hang()
        try:
            began = time.monotonic()
            late = ask(engine, tokens(33), "late")
            assert time.monotonic() - began >= 0.3
            assert late.source.tiers == {}
            explained = engine.explain("late")
            assert explained is not None
            assert explained.misses["valkey"] is MissReason.TOO_SLOW
            steps = count_steps(engine, tokens(33, seed=1), "next")
            assert steps < 40, "nobody else waits"
            assert suspend(engine) is not None
            steps = count_steps(engine, tokens(33, seed=2), "then")
            assert steps < 40
            explained = engine.explain("then")
            assert explained is not None
            assert explained.misses["valkey"] is MissReason.SUSPENDED
            expect_sleep(engine)
        finally:
            tiers.backend.release()
        manager = manager_of(engine)
        until = time.monotonic() + PATIENCE
        for number in count():  # on a busy machine a load may be late, and the server suspended again
            while manager.tier_stats()[0].suspended is not None:
                assert time.monotonic() < until
                engine.step()
            found = ask(engine, tokens(33, seed=3), f"again {number}").source.tiers
            if found == {"valkey": 32}:
                break
            assert time.monotonic() < until, found
            forget(engine)
        expect_idle(engine)


def test_nothing_of_other_weights_comes_back() -> None:
    """A reset may mean other weights: an engine has names of its own from then on, and others
    keep theirs.
    """
    server = MemoryServer()
    with shared_engine(SharedTiers(server)) as one, shared_engine(SharedTiers(server)) as other:
        ask(one, tokens(33), "first")
        settle(one)
        one.reset_prefix_cache(reset_connector=True)
        assert ask(one, tokens(33), "again").source.tiers == {}
        assert ask(other, tokens(33), "other").source.tiers == {"valkey": 32}
