"""The sending half of a publisher alone: what goes out, and what is held, are one and the same."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from kvtier.events.config import KVEventsConfig
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
    places = [placed for state in sender._states.values() for placed in state.places()]
    return {to_u64(block) for placed in places for block, _ in placed.items()}


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
def test_batches_that_are_left_out_change_the_state_like_others(history: str) -> None:
    direct, _ = make_sender()
    behind, wire = make_sender()
    for sender in (direct, behind):
        sender.send(EventBatch(1.0, [stored([5])], 0))
    sent = len(wire.frames)
    for event in HISTORIES[history]:
        direct.send(EventBatch(1.0, [event], 0))
        behind.leave_out(EventBatch(1.0, [event], 0))
    assert len(wire.frames) == sent
    behind.end_gap()
    assert held_by(behind) == held_by(direct)
    assert (behind.blocks, behind.digest) == (direct.blocks, direct.digest)
    behind.check()


def numbers(wire: Wire) -> list[int]:
    return [int.from_bytes(frame, "big") for frame in wire.frames[1::3]]


def test_a_gap_ends_with_a_mark_under_a_new_number() -> None:
    sender, wire = make_sender()
    sender.send(EventBatch(1.0, [stored([1])], 0))
    for n in (2, 3, 4):
        sender.leave_out(EventBatch(1.0, [stored([n])], 0))
    sender.end_gap()
    sender.end_gap()  # there is no other
    first, last = numbers(wire)
    assert (last - first, sender.ring.head) == (4, last)
    mark = decode_batch(wire.frames[-1]).mark
    assert (mark, sender.blocks) == (sender.mark(), 4)
    sender.check()


def test_a_gap_has_numbers_for_every_rank_and_for_a_large_state() -> None:
    sender, wire = make_sender()
    for rank in range(5):
        sender.leave_out(EventBatch(1.0, [stored([1 + n for n in range(64)])], rank))
    before = sender.next_seq
    sender.end_gap()
    assert numbers(wire) == [before]  # five batches were left out, and five numbers are enough
    sender.leave_out(EventBatch(1.0, [stored([100 + n for n in range(640)])], 0))
    sender.end_gap()
    assert numbers(wire) == [before, before + 1 + 15]  # 960 blocks


@pytest.mark.parametrize("events", [7, None, [object()]])
def test_a_batch_of_no_events_can_be_left_out(events: Any) -> None:
    sender, _ = make_sender()
    sender.leave_out(EventBatch(1.0, events, 0))
    sender.end_gap()
    assert sender.blocks == 0


def test_a_loss_clears_every_rank_under_numbers_of_its_own() -> None:
    sender, wire = make_sender()
    for rank in (0, 3):
        sender.send(EventBatch(1.0, [stored([1, 2])], rank))
    second = numbers(wire)[-1]
    sender.forget_all(7)
    batches = [decode_batch(payload) for payload in wire.frames[2::3]][2:]
    assert [batch.data_parallel_rank for batch in batches] == [3, 0]
    assert all(batch.events == [AllBlocksCleared()] for batch in batches)
    assert (batches[-1].mark, sender.blocks, sender.digest) == (sender.mark(), 0, 0)
    assert numbers(wire)[2:] == [second + 8, second + 9]
    sender.send(EventBatch(1.0, [BlockRemoved([1], "GPU"), stored([2])], 0))
    assert held_by(sender) == {2}
    sender.check()


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
def test_events_with_wrong_types_are_refused(what: str, hash_format: str) -> None:
    sender, wire = make_sender(hash_format=hash_format)
    with contextlib.suppress(TypeError):  # of a store that is not even a list
        sender.send(EventBatch(1.0, [WRONG_TYPES[what]], 0))
    assert sender.counters["unencodable"] == 1
    assert (sender.blocks, wire.replica()) == (0, set())
