"""What all workers say: nothing that one of them lacks, and nothing lost that all of them have."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVConnectorKVEvents,
    KVEventAggregator,
)


def stored(block_hash: int, lora_name: str | None = None) -> BlockStored:
    return BlockStored([block_hash], None, [1], 1, None, "CPU", lora_name)


A, B, C, GONE, CLEAR = stored(1), stored(2), stored(3), BlockRemoved([1], "CPU"), AllBlocksCleared()


def aggregate(*batches: list[KVCacheEvent]) -> KVEventAggregator:
    aggregator = KVEventAggregator(len(batches))
    for batch in batches:
        aggregator.add_events(batch)
    return aggregator


def test_only_events_of_all_workers_are_common() -> None:
    aggregator = aggregate([A, B], [C, A], [A, B])
    assert aggregator.get_common_events() == [A]
    assert aggregator.get_all_events() == [A, A, A, B, B, C]


def test_a_clear_counts_like_any_event() -> None:
    assert aggregate([CLEAR, A], [CLEAR]).get_common_events() == [CLEAR]


def test_an_adapter_tells_events_apart() -> None:
    assert aggregate([stored(1, "x")], [stored(1, "y")]).get_common_events() == []


def test_a_block_that_comes_back_is_not_lost() -> None:
    """Counted together, `A` would have come four times with two workers, and its order would be gone."""
    assert aggregate([A, GONE, A], [A, GONE, A]).get_common_events() == [A, GONE, A]


def test_repeated_events_must_repeat_in_every_batch() -> None:
    assert aggregate([A, A], [A]).get_common_events() == [A]
    assert aggregate([A, A], []).get_common_events() == []


def test_more_batches_than_workers_do_not_hide_an_event() -> None:
    aggregator = KVEventAggregator(2)
    for _ in range(3):
        aggregator.add_events([A])
    assert aggregator.get_common_events() == [A]


def test_workers_are_counted() -> None:
    aggregator = KVEventAggregator(1)
    aggregator.add_events([A])
    assert aggregator.get_common_events() == [A]
    aggregator.increment_workers(2)
    assert aggregator.get_number_of_workers() == 3
    assert aggregator.get_common_events() == []
    aggregator.reset_workers()
    assert (aggregator.get_number_of_workers(), aggregator.get_common_events()) == (1, [A])
    assert repr(aggregator) == "<KVEventAggregator workers=1, events=1>"
    aggregator.clear_events()
    assert (aggregator.get_all_events(), aggregator.get_number_of_workers()) == ([], 1)


def test_misuse_is_refused() -> None:
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"expected at least 1, got {count}"):
            KVEventAggregator(count)
        with pytest.raises(ValueError, match=f"expected at least 1, got {count}"):
            KVEventAggregator(1).increment_workers(count)
    with pytest.raises(TypeError, match="expected a list of events, got tuple"):
        KVEventAggregator(1).add_events((A,))  # type: ignore[arg-type]


batches_of_workers = st.lists(
    st.lists(st.sampled_from([A, B, C, GONE, CLEAR]), max_size=6), min_size=1, max_size=4
)


@given(batches_of_workers)
def test_common_is_the_intersection_of_all_batches(batches: list[list[KVCacheEvent]]) -> None:
    expected = Counter(batches[0])
    for batch in batches[1:]:
        expected &= Counter(batch)
    aggregator = aggregate(*batches)
    assert Counter(aggregator.get_common_events()) == expected
    assert Counter(aggregator.get_all_events()) == sum(map(Counter, batches), Counter())


@given(st.lists(st.sampled_from([A, B, GONE]), max_size=8), st.integers(1, 4))
def test_workers_that_agree_are_heard_in_order(batch: list[KVCacheEvent], workers: int) -> None:
    assert aggregate(*[batch] * workers).get_common_events() == batch


class Events(KVConnectorKVEvents):
    """A container as a connector writes it."""

    def __init__(self) -> None:
        self._aggregator = KVEventAggregator(1)

    def add_events(self, events: list[KVCacheEvent]) -> None:
        self._aggregator.add_events(events)

    def aggregate(self) -> Events:
        common = self._aggregator.get_common_events()
        self._aggregator.clear_events()
        self._aggregator.reset_workers()
        self._aggregator.add_events(common)
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._aggregator.increment_workers(count)

    def get_all_events(self) -> list[KVCacheEvent]:
        return self._aggregator.get_all_events()

    def get_number_of_workers(self) -> int:
        return self._aggregator.get_number_of_workers()

    def clear_events(self) -> None:
        self._aggregator.clear_events()


def test_containers_merge() -> None:
    rng, workers = random.Random(0), []
    for _ in range(3):
        worker = Events()
        worker.add_events(rng.sample([A, B, GONE], 3))
        workers.append(worker)
    workers[1].add_events([C])
    first, *others = workers
    for other in others:
        assert first.merge(other) is first
        first.increment_workers()
    assert first.get_number_of_workers() == 3
    assert len(first.get_all_events()) == 10
    assert set(first.aggregate().get_all_events()) == {A, B, GONE}


def test_a_container_must_be_complete() -> None:
    with pytest.raises(TypeError, match="abstract"):
        KVConnectorKVEvents()  # type: ignore[abstract]
