"""The place where events wait: in order, bounded, and honest about what it dropped."""

from __future__ import annotations

import logging

import pytest

from kvtier.engine.event_buffer import EventBuffer
from kvtier.events.types import AllBlocksCleared, BlockRemoved, KVCacheEvent


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(list(hashes), "GPU")


def test_events_are_taken_once_and_in_order() -> None:
    buffer = EventBuffer(9)
    buffer.add([removed(1), removed(2, 3)])
    buffer.add([])
    buffer.add([removed(4)])
    assert buffer.take() == [removed(1), removed(2, 3), removed(4)]
    assert buffer.take() == []


def test_too_many_waiting_events_are_dropped_as_a_whole_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffer = EventBuffer(6)
    with caplog.at_level(logging.WARNING):
        for n in range(21):
            buffer.add([removed(n)])
    assert buffer.take() == [AllBlocksCleared(), removed(19), removed(20)]
    assert [record.message[:44] for record in caplog.records] == [
        "KV events of more than 6 blocks were not tak"
    ]


def test_taking_after_every_step_loses_nothing() -> None:
    buffer, step = EventBuffer(6), list[KVCacheEvent]([removed(n) for n in range(50)])
    for _ in range(3):
        buffer.add(step)
        assert buffer.take() == step
