"""The tracker: chunks announced as blocks, removed as the same blocks, and nothing kept of what
is not held.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from tests.unit.connector_kit import BLOCK, Host, Request, make_host

from kvtier.errors import IntegrityError
from kvtier.events import BlockRemoved, BlockStored, Description, KVCacheEvent, OffloadingEventsTracker
from kvtier.keys import OffloadKey, get_offload_block_hash, hash_blocks, make_offload_key
from kvtier.offload import CPUOffloadingManager, OffloadingEvent


@dataclass(frozen=True)
class Group:
    """Chunks of two blocks of four tokens; two hashes name a block's halves."""

    index: int = 0
    block_size: int = 4
    blocks_per_chunk: int = 2
    hashes_per_chunk: int = 4
    is_windowed: bool = False
    is_state: bool = False


STATES = Group(index=1, blocks_per_chunk=1, hashes_per_chunk=2, is_state=True)
"""A state after every block."""


class Prompt:
    """A request with a hash for every two tokens."""

    def __init__(
        self, num_tokens: int = 32, extra: dict[int, tuple[Any, ...]] | None = None, lora: str | None = None
    ) -> None:
        self.tokens = list(range(num_tokens))
        self.block_hashes = hash_blocks(self.tokens, 2)
        self.extra, self.lora = extra or {}, lora

    def describe(self, start: int, stop: int, block_size: int) -> Description:
        extra = [self.extra.get(block) for block in range(start // block_size, stop // block_size)]
        return Description(self.tokens[start:stop], 7 if self.lora else None, self.lora, extra)

    def key(self, chunk: int, group: int = 0) -> OffloadKey:
        return make_offload_key(self.block_hashes[chunk * 4 + 3], group)


def make(prompt: Prompt, *chunks: int, group: Group | None = None) -> OffloadingEventsTracker:
    """Return a tracker with these chunks planned."""
    tracker, group = OffloadingEventsTracker(Prompt.describe), group or Group()
    for chunk in chunks:
        tracker.record_store(prompt, group, chunk, prompt.key(chunk, group.index))
    return tracker


def told(
    tracker: OffloadingEventsTracker, removed: bool, *keys: OffloadKey, medium: str = "CPU"
) -> list[KVCacheEvent]:
    events = tracker.take_events([OffloadingEvent(list(keys), medium, removed)])
    tracker.check()
    return events


def block(prompt: Prompt, index: int) -> bytes:
    """Return the hash that names a block: the last of its two."""
    return prompt.block_hashes[index * 2 + 1]


def test_a_chunk_is_announced_as_its_blocks() -> None:
    prompt = Prompt(extra={2: ("salt",)}, lora="adapter")
    tracker = make(prompt, 1)
    assert told(tracker, False, prompt.key(1)) == [
        BlockStored(
            block_hashes=[block(prompt, 2), block(prompt, 3)],
            parent_block_hash=block(prompt, 1),
            token_ids=list(range(8, 16)),
            block_size=4,
            lora_id=7,
            medium="CPU",
            lora_name="adapter",
            extra_keys=[("salt",), None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
    ]
    assert told(tracker, True, prompt.key(1)) == [
        BlockRemoved([block(prompt, 2), block(prompt, 3)], "CPU", group_idx=0)
    ]
    assert len(tracker) == 0


def test_chunks_in_a_row_travel_in_one_event() -> None:
    prompt = Prompt(extra={4: (("image", -3),)})
    tracker = make(prompt, 0, 1, 2, 3)
    first, last = told(tracker, False, prompt.key(1), prompt.key(2), prompt.key(0))
    assert isinstance(first, BlockStored)
    assert first.block_hashes == [block(prompt, index) for index in range(2, 6)]
    assert (first.parent_block_hash, first.token_ids) == (block(prompt, 1), list(range(8, 24)))
    assert first.extra_keys == [None, None, (("image", -3),), None]
    assert isinstance(last, BlockStored)
    assert (last.parent_block_hash, last.token_ids, last.extra_keys) == (None, list(range(8)), None)


def test_removals_come_together_by_group() -> None:
    prompt, windowed = Prompt(), Group(index=1, is_windowed=True)
    tracker = make(prompt, 0, 1)
    tracker.record_store(prompt, windowed, 0, prompt.key(0, 1))
    keys = [prompt.key(0), prompt.key(0, 1), prompt.key(1)]
    told(tracker, False, *keys)
    assert told(tracker, True, *keys) == [
        BlockRemoved([block(prompt, index) for index in range(4)], "CPU", group_idx=0),
        BlockRemoved([block(prompt, 1)], "CPU", group_idx=1),
    ]


@pytest.mark.parametrize("tracker", [OffloadingEventsTracker(), OffloadingEventsTracker(Prompt.describe)])
def test_a_chunk_without_description_is_a_placeholder(tracker: OffloadingEventsTracker) -> None:
    """Without a description, or of a window: the hash, no tokens, no block size."""
    prompt, windowed = Prompt(), Group(index=3, is_windowed=True)
    tracker.record_store(prompt, windowed, 0, prompt.key(0, 3))
    assert len(tracker) == 0
    placeholder = BlockStored([block(prompt, 1)], None, [], 0, None, "CPU", None, group_idx=3)
    assert told(tracker, False, prompt.key(0, 3)) == [placeholder]
    assert told(tracker, True, prompt.key(0, 3)) == [BlockRemoved([block(prompt, 1)], "CPU", group_idx=3)]


def test_a_placeholder_ends_a_run() -> None:
    prompt = Prompt()
    tracker = make(prompt, 0, 2)
    events = told(tracker, False, prompt.key(0), prompt.key(1), prompt.key(2))
    assert [event.block_size for event in events] == [4, 0, 4]  # type: ignore[attr-defined]
    assert told(tracker, True, prompt.key(1)) == [BlockRemoved([block(prompt, 3)], "CPU", group_idx=0)]


def test_without_describe_nothing_is_asked_or_kept() -> None:
    tracker = OffloadingEventsTracker()
    tracker.record_store(None, None, 0, OffloadKey(b""))  # type: ignore[arg-type]
    assert (tracker.enabled, len(tracker)) == (False, 0)


def test_a_store_that_came_to_nothing_leaves_nothing() -> None:
    prompt = Prompt()
    tracker = make(prompt, 0, 1)
    told(tracker, False, prompt.key(0))
    tracker.drop([prompt.key(0), prompt.key(1), prompt.key(2)])
    assert len(tracker) == 1, "what is held stays described"
    assert told(tracker, True, prompt.key(0)) == [
        BlockRemoved([block(prompt, 0), block(prompt, 1)], "CPU", group_idx=0)
    ]


def test_a_chunk_stored_again_before_its_removal_is_announced() -> None:
    """Guards against a removal that takes the new description along."""
    prompt = Prompt()
    tracker = make(prompt, 0)
    told(tracker, False, prompt.key(0))
    tracker.record_store(prompt, Group(), 0, prompt.key(0))
    (gone,) = told(tracker, True, prompt.key(0))
    (back,) = told(tracker, False, prompt.key(0))
    assert gone.block_hashes == back.block_hashes == [block(prompt, 0), block(prompt, 1)]


def test_a_description_lasts_as_long_as_any_medium_holds_the_chunk() -> None:
    prompt = Prompt()
    tracker, key = make(prompt, 0), prompt.key(0)
    in_memory, on_disk, left_memory = tracker.take_events(
        [
            OffloadingEvent([key], "CPU", False),
            OffloadingEvent([key], "STORAGE", False),
            OffloadingEvent([key], "CPU", True),
        ]
    )
    assert isinstance(in_memory, BlockStored)
    assert isinstance(on_disk, BlockStored)
    assert (on_disk.token_ids, on_disk.medium, left_memory.medium) == (in_memory.token_ids, "STORAGE", "CPU")
    assert len(tracker) == 1
    (left_disk,) = told(tracker, True, key, medium="STORAGE")
    assert left_disk == BlockRemoved(in_memory.block_hashes, "STORAGE", group_idx=0)
    assert len(tracker) == 0


def test_a_chunk_that_moves_within_one_call_stays_described() -> None:
    prompt = Prompt()
    tracker, key = make(prompt, 0), prompt.key(0)
    told(tracker, False, key)
    moved = tracker.take_events(
        [OffloadingEvent([key], "CPU", True), OffloadingEvent([key], "STORAGE", False)]
    )
    assert moved[1].token_ids == list(range(8))  # type: ignore[attr-defined]
    tracker.check()


def test_a_placeholder_of_another_medium_is_removed_as_a_placeholder() -> None:
    """A disk that was warm at the start announced the key's hash alone."""
    prompt = Prompt()
    tracker, key = OffloadingEventsTracker(Prompt.describe), prompt.key(0)
    told(tracker, False, key, medium="STORAGE")
    tracker.record_store(prompt, Group(), 0, key)
    told(tracker, False, key)
    assert told(tracker, True, key, medium="STORAGE") == [
        BlockRemoved([block(prompt, 1)], "STORAGE", group_idx=0)
    ]


def test_a_placeholder_of_another_medium_is_announced_again_in_full() -> None:
    """As a disk does of rows that a process without events has written: described by the next store of the
    chunk, they are still there.
    """
    prompt = Prompt()
    tracker, key = make(prompt), prompt.key(0)
    (bare,) = told(tracker, False, key, medium="STORAGE")
    tracker.record_store(prompt, Group(), 0, key)
    (described,) = told(tracker, False, key)
    assert tracker.retell() == [described, bare]
    told(tracker, True, key)
    assert tracker.retell() == [bare]
    assert told(tracker, True, key, medium="STORAGE") == [
        BlockRemoved([get_offload_block_hash(key)], "STORAGE", group_idx=0)
    ]
    assert len(tracker) == 0


def test_descriptions_of_other_media_outlive_a_new_store() -> None:
    """Guards against a disk's removal that names fewer blocks than its announcement."""
    prompt = Prompt()
    tracker, key = make(prompt, 0), prompt.key(0)
    told(tracker, False, key)
    (on_disk,) = told(tracker, False, key, medium="STORAGE")
    told(tracker, True, key)
    tracker.record_store(prompt, Group(), 0, key)
    told(tracker, False, key)
    (gone,) = told(tracker, True, key, medium="STORAGE")
    assert gone.block_hashes == on_disk.block_hashes  # type: ignore[attr-defined]
    assert len(tracker) == 1


def test_blocks_that_chunks_share_are_stored_with_the_first_and_removed_with_the_last() -> None:
    prompt, other = Prompt(8, extra={1: ("salt",)}), Prompt(8)
    other.tokens[4:] = [40, 41, 42, 43]
    other.block_hashes = hash_blocks(other.tokens, 2)
    first, second = prompt.key(0), other.key(0)
    tracker = make(prompt, 0)
    tracker.record_store(other, Group(), 0, second)
    assert told(tracker, False, first)[0].block_hashes == [block(prompt, 0), block(prompt, 1)]
    (rest,) = told(tracker, False, second)
    assert isinstance(rest, BlockStored)
    assert (rest.block_hashes, rest.parent_block_hash) == ([block(other, 1)], block(prompt, 0))
    assert (rest.token_ids, rest.extra_keys) == ([40, 41, 42, 43], None)
    (below,) = told(tracker, False, second, medium="STORAGE")
    assert below.block_hashes == [block(other, 0), block(other, 1)], "media are apart"
    again = [(event.medium, event.block_hashes) for event in tracker.retell()]  # type: ignore[attr-defined]
    both = [block(prompt, 0), block(prompt, 1)]
    assert again == [
        ("CPU", both),
        ("CPU", [block(other, 1)]),
        ("STORAGE", [block(other, 0), block(other, 1)]),
    ]
    assert told(tracker, True, first) == [BlockRemoved([block(prompt, 1)], "CPU", group_idx=0)]
    assert told(tracker, True, second) == [
        BlockRemoved([block(prompt, 0), block(other, 1)], "CPU", group_idx=0)
    ]
    assert told(tracker, True, second, medium="STORAGE") == [
        BlockRemoved(below.block_hashes, "STORAGE", group_idx=0)
    ]  # type: ignore[attr-defined]
    assert len(tracker) == 0


def test_held_chunks_can_be_announced_again_parents_first() -> None:
    prompt, other = Prompt(), Prompt(extra={0: ("salt",)})
    tracker = make(prompt, 0, 1, 2, 3)
    other.block_hashes = hash_blocks(other.tokens, 2, parent=prompt.block_hashes[7])
    tracker.record_store(other, Group(), 0, other.key(0))
    for key in (prompt.key(2), prompt.key(3), other.key(0), prompt.key(0), prompt.key(1), prompt.key(0, 1)):
        told(tracker, False, key)
    told(tracker, True, prompt.key(3))
    told(tracker, False, prompt.key(2), medium="STORAGE")
    again = tracker.retell()
    assert [(event.medium, event.block_hashes) for event in again] == [  # type: ignore[attr-defined]
        ("CPU", [block(prompt, index) for index in range(6)]),
        ("CPU", [block(other, 0), block(other, 1)]),
        ("CPU", [block(prompt, 1)]),
        ("STORAGE", [block(prompt, 4), block(prompt, 5)]),
    ]
    assert again[2] == BlockStored([block(prompt, 1)], None, [], 0, None, "CPU", None, group_idx=1)
    assert (again[0].token_ids, again[1].extra_keys) == (list(range(24)), [("salt",), None])


def test_reset_forgets_everything() -> None:
    prompt = Prompt()
    tracker = make(prompt, 0, 1)
    told(tracker, False, prompt.key(0))
    tracker.reset()
    assert len(tracker) == 0


def test_the_check_finds_a_wrong_key() -> None:
    prompt = Prompt()
    tracker = OffloadingEventsTracker(Prompt.describe)
    tracker.record_store(prompt, Group(), 0, prompt.key(1))
    with pytest.raises(IntegrityError, match="described as another one"):
        tracker.check()


# -- in the scheduler ------------------------------------------------------------------------------


class Listener:
    """Keeps what the stream says is held in a plain set; stored blocks must come with their tokens, and
    once.
    """

    def __init__(self) -> None:
        self.held: set[tuple[bytes, int | None]] = set()
        self.tokens: dict[bytes, tuple[int, ...]] = {}

    def listen(self, host: Host) -> None:
        self.apply(host.scheduler.take_events())

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            assert isinstance(event, (BlockStored, BlockRemoved))
            blocks = {(block_hash, event.group_idx) for block_hash in event.block_hashes}
            assert len(blocks) == len(event.block_hashes)
            if isinstance(event, BlockRemoved):
                assert blocks <= self.held, "nothing is removed that was not stored"
                self.held -= blocks
            else:
                assert not blocks & self.held, "nothing is stored twice"
                self.held |= blocks
                self._check_tokens(event)

    def _check_tokens(self, event: BlockStored) -> None:
        """Expect that hashing the tokens after the parent gives the hashes."""
        if event.block_size == 0:
            assert event.group_idx == 1, "only the windowed group goes undescribed"
            return
        hashes = hash_blocks(event.token_ids, event.block_size, parent=event.parent_block_hash)
        assert hashes == event.block_hashes


def ready_blocks(
    host: Host, prompts: list[list[int]], per_chunk: int, windows: int
) -> set[tuple[bytes, int]]:
    """Return what a listener must hold, from what the pool has ready."""
    manager = host.scheduler.manager
    assert isinstance(manager, CPUOffloadingManager)
    chunks: dict[OffloadKey, list[bytes]] = {}
    for prompt in prompts:
        hashes = hash_blocks(prompt, BLOCK)
        for end in range(per_chunk, len(hashes) + 1, per_chunk):
            chunks[make_offload_key(hashes[end - 1], 0)] = list(hashes[end - per_chunk : end])
            if windows:
                chunks[make_offload_key(hashes[end - 1], 1)] = [hashes[end - 1]]
    held: set[tuple[bytes, int]] = set()
    for key, blocks in chunks.items():
        if manager.explain(key) is None:
            held.update((block_hash, key[-1]) for block_hash in blocks)
    assert manager.stats().ready == sum(manager.explain(key) is None for key in chunks)
    return held


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_the_stream_equals_the_content_of_the_pool(per_chunk: int, windows: tuple[int | None, ...]) -> None:
    """Stores that succeed, fail and half fail, shared prefixes that end inside a chunk, evictions and
    resets.
    """
    rng, listener, prompts = Random(0), Listener(), list[list[int]]()
    host = make_host(num_slots=24, windows=windows, blocks_per_chunk=per_chunk)
    running: dict[int, Request] = {}
    for turn in range(150):
        base = rng.choice(prompts)[: rng.randrange(1, 40)] if prompts and rng.random() < 0.7 else []
        prompts.append([*base, *(rng.randrange(1000) for _ in range(rng.randrange(4, 30)))])
        request = Request(f"r{turn}", prompts[-1])
        host.scheduler.get_num_new_matched_tokens(request, 0)
        blocks = host.blocks(-(-request.num_tokens // BLOCK), len(windows))
        host.scheduler.update_state_after_alloc(request, blocks, 0)
        meta = host.run_new(request, blocks)
        running.update(dict.fromkeys(meta.store_jobs.values(), request))
        if rng.random() < 0.05:
            host.scheduler.reset_cache()
        while running and rng.random() < 0.7:
            job_id = rng.choice(list(running))
            failed = rng.choice([None, (0,), (0, 1)]) if rng.random() < 0.3 else None
            host.report(job_id, success=rng.random() < 0.7 and failed is None, failed_blocks=failed)
            del running[job_id]
        host.scheduler.request_finished(request, blocks)
        if rng.random() < 0.5:
            listener.listen(host)
            assert listener.held == ready_blocks(host, prompts, per_chunk, len(windows) - 1)
            stats = host.scheduler.manager.stats()  # type: ignore[attr-defined]
            assert len(host.scheduler._tracker) <= stats.ready + stats.writing + stats.doomed
    for job_id in running:
        host.report(job_id)
    listener.listen(host)
    again = Listener()
    again.apply(host.scheduler.retell_events())
    assert again.held == listener.held, "told again, it is the same"
    host.scheduler.reset_cache()
    listener.listen(host)
    assert (listener.held, len(host.scheduler._tracker)) == (set(), 0)


def test_switched_off_the_stream_has_hashes_alone() -> None:
    host = make_host(self_describing_kv_events=False)
    host.cache(Request("a", list(range(8))))
    events = list(host.scheduler.take_events())
    assert [(event.block_hashes, event.block_size) for event in events] == [  # type: ignore[attr-defined]
        ([get_offload_block_hash(make_offload_key(block, 0))], 0)
        for block in hash_blocks(list(range(8)), BLOCK)
    ]
    assert not host.scheduler._tracker.enabled


# What a tier keeps of a chunk


def restarted(*events: OffloadingEvent) -> tuple[OffloadingEventsTracker, list[KVCacheEvent]]:
    """Return a tracker that has heard of chunks from tiers alone, and what it told."""
    tracker = OffloadingEventsTracker(Prompt.describe)
    events_told = tracker.take_events(events)
    tracker.check()
    return tracker, events_told


def as_lists(value: Any) -> Any:
    """Return a value with lists for tuples, as msgpack brings them back."""
    return [as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("extra", [{}, {0: ("salt", b"image", 7), 3: ((1, 2), None)}])
def test_a_kept_description_announces_a_chunk_in_full(extra: dict[int, tuple[Any, ...]]) -> None:
    prompt = Prompt(extra=extra, lora="adapter")
    first = make(prompt, 0, 1)
    keys = [prompt.key(0), prompt.key(1)]
    (before,) = told(first, False, *keys, medium="STORAGE")
    describe = first.describe_chunks(keys)
    kept = tuple(describe(at) for at in range(len(keys)))
    tracker, (after,) = restarted(OffloadingEvent(keys, "STORAGE", False, kept))
    assert isinstance(before, BlockStored)
    assert isinstance(after, BlockStored)
    assert (after.token_ids, after.block_hashes, after.lora_name) == (
        before.token_ids, before.block_hashes, "adapter",
    )  # fmt: skip
    assert as_lists(after.extra_keys) == as_lists(before.extra_keys)
    (removed,) = told(tracker, True, *keys, medium="STORAGE")
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == before.block_hashes
    assert len(tracker) == 0


@pytest.mark.parametrize("group", [STATES, replace(STATES, blocks_per_chunk=2, hashes_per_chunk=4)])
def test_a_state_is_announced_as_the_block_that_it_ends(group: Group) -> None:
    """Also after a restart, and although nobody has announced its parent in that group."""
    prompt = Prompt()
    tracker, key = OffloadingEventsTracker(Prompt.describe), make_offload_key(block(prompt, 5), STATES.index)
    tracker.record_store(prompt, group, 6 // group.blocks_per_chunk - 1, key)
    state = BlockStored(
        block_hashes=[block(prompt, 5)],
        parent_block_hash=block(prompt, 4),
        token_ids=prompt.tokens[20:24],
        block_size=4,
        lora_id=None,
        medium="STORAGE",
        lora_name=None,
        group_idx=1,
        kv_cache_spec_kind="mamba",
    )
    assert told(tracker, False, key, medium="STORAGE") == [state]
    assert tracker.retell() == [state]
    kept = tracker.describe_chunks([key])(0)
    again, events = restarted(OffloadingEvent([key], "STORAGE", False, (kept,)))
    assert events == [state]
    assert told(again, True, key, medium="STORAGE") == [
        BlockRemoved([block(prompt, 5)], "STORAGE", group_idx=1)
    ]


def test_nonsense_that_a_tier_has_kept_is_not_believed() -> None:
    prompt = Prompt()
    other = make(prompt, 1).describe_chunks([prompt.key(1)])(0)
    whole = make(prompt, 0).describe_chunks([prompt.key(0)])(0)
    for kept in (b"", b"\x90", b"\xc1", whole[:-1], whole + b"0", other, bytes(len(whole))):
        _, (event,) = restarted(OffloadingEvent([prompt.key(0)], "STORAGE", False, (kept,)))
        assert isinstance(event, BlockStored)
        assert (event.block_size, event.token_ids) == (0, []), kept


def test_extra_keys_that_cannot_be_written_are_not_kept() -> None:
    prompt = Prompt(extra={0: (object(),)})
    assert make(prompt, 0).describe_chunks([prompt.key(0)])(0) == b""
    assert make(prompt).describe_chunks([prompt.key(0)])(0) == b""


def test_chunks_cleared_by_a_reset_are_removed_later_and_announced_once() -> None:
    """Their removals come in slices. Meanwhile one of them is stored and described anew."""
    prompt = Prompt()
    tracker = make(prompt, 0, 1)
    both = prompt.key(0), prompt.key(1)
    told(tracker, False, *both)
    told(tracker, False, *both, medium="STORAGE")
    tracker.clear()
    assert tracker.retell() == [], "no medium holds anything"
    hashes = set(prompt.block_hashes[1:8:2])
    removed = told(tracker, True, prompt.key(0))
    tracker.record_store(prompt, Group(), 0, prompt.key(0))
    (stored,) = told(tracker, False, prompt.key(0))
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == prompt.tokens[:8], "described again"
    removed += told(tracker, True, *both, medium="STORAGE") + told(tracker, True, prompt.key(1))
    for medium in ("CPU", "STORAGE"):
        events = [event for event in removed if isinstance(event, BlockRemoved) and event.medium == medium]
        assert {name for event in events for name in event.block_hashes} == hashes
    tracker.check()
    assert len(tracker.retell()) == 1
    told(tracker, True, prompt.key(0))
    assert (len(tracker), tracker._cleared) == (0, [])
