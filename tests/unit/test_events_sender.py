"""The sending half of a publisher alone: what goes out, and what is held, are one and the same."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from kvtier.events.config import KVEventsConfig
from kvtier.events.publish.outbox import Overflow
from kvtier.events.publish.sender import Sender
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvtier.events.wire import decode_batch, to_u64


class Wire:
    """Takes what a PUB socket is given."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send(self, frame: bytes, flags: int = 0) -> None:
        self.frames.append(frame)

    def replica(self) -> set[tuple[Any, ...]]:
        """Return what a consumer holds that was told everything: medium, group and hash."""
        held: set[tuple[Any, ...]] = set()
        for payload in self.frames[2::3]:
            for event in decode_batch(payload).events:
                if isinstance(event, AllBlocksCleared):
                    held.clear()
                elif isinstance(event, BlockStored):
                    held |= {
                        (event.medium, event.group_idx or 0, to_u64(block)) for block in event.block_hashes
                    }
                else:
                    held -= {
                        (event.medium, event.group_idx or 0, to_u64(block)) for block in event.block_hashes
                    }
        return held


def make_sender(**settings: Any) -> tuple[Sender, Wire]:
    wire = Wire()
    return Sender(wire, KVEventsConfig(**settings), 0, None), wire  # type: ignore[arg-type]


def stored(blocks: list[Any], medium: str | None = "GPU", **fields: Any) -> BlockStored:
    given: dict[str, Any] = {"parent_block_hash": None, "token_ids": [1] * len(blocks), "block_size": 1}
    given |= {"lora_id": None, "lora_name": None} | fields
    return BlockStored(block_hashes=blocks, medium=medium, **given)


def held_by(sender: Sender) -> set[int]:
    holdings = [holding for state in sender._states.values() for holding in state.holdings()]
    return {to_u64(block) for holding in holdings for block, _ in holding.blocks.items()}


PLACES_UNSAID = {
    "ownership": ("0.23", "STORAGE", {"ownership": "disk"}),
    "locality": ("0.23", "CPU", {"locality": "REMOTE"}),
    "group": ("0.17", "GPU", {"group_idx": 1}),
    "medium": ("0.8", None, {}),
}


@pytest.mark.parametrize("field", PLACES_UNSAID)
def test_places_that_an_encoding_cannot_tell_apart_are_one(field: str) -> None:
    """A removal from one of two such places was read as one from both, and the sums agreed."""
    version, medium, fields = PLACES_UNSAID[field]
    sender, wire = make_sender(encoding="array", array_version=version)
    other = "CPU" if field == "medium" else medium
    for event in (
        stored([1, 2], medium),
        stored([1, 2], other, **fields),
        BlockRemoved([1, 2], other, **fields),
    ):
        sender.send(EventBatch(1.0, [event]))
    assert held_by(sender) == {block for *_, block in wire.replica()} == {1, 2}
    assert sender.blocks == 2
    sender.check()


HISTORIES: dict[str, list[Any]] = {
    "ill-typed, then removed": [stored([5], lora_name=7), BlockRemoved([5], "GPU")],
    "bytes, then a number": [stored([(9).to_bytes(32, "big")]), BlockRemoved([9], "GPU")],
    "good, then ill-typed": [stored([6]), stored([6], lora_name=7)],
    "extra keys of no kind": [stored([7]), stored([8], extra_keys=[{}])],
    "not to be encoded": [stored([7]), stored([8], extra_keys=[(object(),)])],
}


@pytest.mark.parametrize("history", HISTORIES)
def test_an_overflow_ends_as_the_queue_would(history: str) -> None:
    """It took events that the queue's way refuses, and told hashes apart that are one."""
    batches = [EventBatch(1.0, [event], 0) for event in HISTORIES[history]]
    direct, _ = make_sender()
    overflowing, _ = make_sender()
    for sender in (direct, overflowing):
        sender.send(EventBatch(1.0, [stored([5])], 0))
    for batch in batches:
        direct.send(batch)
    overflow = Overflow("count", overflowing.draft)
    for batch in batches:
        overflow.add(batch)
    overflowing.absorb(overflow)
    assert held_by(overflowing) == held_by(direct)
    overflowing.check()


def test_what_overflowed_is_cut_as_well() -> None:
    sender, _ = make_sender(max_blocks_per_event=2)
    overflow = Overflow("count", sender.draft)
    overflow.add(EventBatch(1.0, [stored(list(range(1, 8)))], 0))
    sender.absorb(overflow)
    state = sender._states[0]
    sizes = {len(record.hashes) for holding in state.holdings() for _, record in holding.blocks.items()}
    assert max(sizes) <= 2
    assert sender.blocks == 7


@pytest.mark.parametrize("events", [7, None, [object()]])
def test_an_overflow_survives_a_batch_of_no_events(events: Any) -> None:
    sender, _ = make_sender()
    overflow = Overflow("count", sender.draft)
    overflow.add(EventBatch(1.0, events, 0))
    sender.absorb(overflow)
    assert sender.blocks == 0


WRONG_TYPES: dict[str, Any] = {
    "a flag among hashes": stored([True, 2]),
    "a flag as group": stored([1], group_idx=True),
    "a hash as text": stored(["AAAA"]),  # base64 of three bytes
    "hashes by name": stored({1: 2}),  # type: ignore[arg-type]
    "half a parent": stored([1], parent_block_hash=1.5),
    "extra keys of no kind": stored([1, 2], extra_keys=[{}, 7]),
    "no tokens": stored([1], token_ids=None),
    "no block size": stored([1], block_size=None),
}


@pytest.mark.parametrize("what", WRONG_TYPES)
@pytest.mark.parametrize("hash_format", ["u64", "as_is"])
def test_what_consumers_cannot_read_is_refused(what: str, hash_format: str) -> None:
    sender, wire = make_sender(hash_format=hash_format)
    with contextlib.suppress(TypeError):  # of a store that is not even a list
        sender.send(EventBatch(1.0, [WRONG_TYPES[what]], 0))
    assert sender.counters["unencodable"] == 1
    assert (sender.blocks, wire.replica()) == (0, set())
