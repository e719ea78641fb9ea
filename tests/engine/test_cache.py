"""The paged cache: ref counts, hits, who is evicted first, windows, and events that replay to what is
findable.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvtier.engine.cache import BlockTable, CacheGroup, KVCache, group_layers
from kvtier.engine.config import STATE
from kvtier.engine.request import Request
from kvtier.engine.sampling import SamplingParams
from kvtier.errors import IntegrityError
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvtier.keys import hash_blocks
from kvtier.transfer.base import NULL_BLOCK

SIZE = 4
FULL = CacheGroup(("full",))
STATES = CacheGroup(("states",), STATE)


def windowed(window: int) -> CacheGroup:
    return CacheGroup(("windowed",), window)


def make(*groups: CacheGroup, num_blocks: int = 17, max_slice: int = 64, **settings: Any) -> KVCache:
    return KVCache(groups or (FULL,), num_blocks, SIZE, max_slice=max_slice, **settings)


def request(tokens: list[int] | range, **fields: Any) -> Request:
    return Request(
        request_id="r",
        tokens=list(tokens),
        params=SamplingParams(),
        arrival=0,
        arrived_at=0.0,
        block_size=SIZE,
        **fields,
    )


def compute(cache: KVCache, wanted: Request, local: int | None = None) -> Request:
    """Admit a request and compute all of its tokens."""
    local = cache.find_prefix(wanted) if local is None else local
    wanted.table = cache.open(wanted, local, local)
    assert cache.extend(wanted.table, local, wanted.num_tokens) is not None
    wanted.num_computed_tokens = wanted.num_tokens
    cache.enter(wanted)
    return wanted


def row(wanted: Request, group: int = 0) -> list[int]:
    return wanted.table.rows[group]


def test_layers_are_grouped_by_window() -> None:
    groups = group_layers(["a", "b", "c", "d"], [8, None, 8, None])
    assert groups == (CacheGroup(("a", "c"), 8), CacheGroup(("b", "d"), None))
    assert group_layers(["a", "b"], [None, None]) == (CacheGroup(("a", "b"), None),)


def test_state_layers_make_groups_no_larger_than_the_smallest_other() -> None:
    states = [CacheGroup(("a", "b"), STATE), CacheGroup(("d",), STATE)]
    assert group_layers("abcdef", [STATE, STATE, 8, STATE, None, None]) == (
        CacheGroup(("a",), STATE),
        CacheGroup(("b",), STATE),
        CacheGroup(("d",), STATE),
        CacheGroup(("c",), 8),
        CacheGroup(("e", "f")),
    )
    assert group_layers("abcde", [STATE, STATE, None, STATE, None]) == (*states, CacheGroup(("c", "e")))
    assert group_layers("ab", [STATE, STATE]) == (CacheGroup(("a", "b"), STATE),)


def test_a_hit_shares_blocks_and_never_covers_the_last_token() -> None:
    cache = make()
    first = compute(cache, request(range(12)))
    assert cache.find_prefix(request(range(12))) == 8
    assert cache.find_prefix(request(range(13))) == 12
    assert cache.find_prefix(request([0, 1, 2, 3, 9, 9, 9, 9, 9])) == 4
    assert cache.find_prefix(request(range(1, 13))) == 0
    second = compute(cache, request(range(13)))
    assert row(second)[:3] == row(first)
    assert cache.num_free == 16 - 4
    cache.check([first.table, second.table])
    cache.release(first.table)
    assert cache.num_free == 16 - 4
    cache.release(second.table)
    assert cache.num_free == 16
    cache.check([])


def test_salt_and_lora_keep_prefixes_apart() -> None:
    cache = make()
    compute(cache, request(range(12), cache_salt="tenant"))
    assert cache.find_prefix(request(range(12))) == 0
    assert cache.find_prefix(request(range(12), lora_name="tenant")) == 0
    assert cache.find_prefix(request(range(12), cache_salt="tenant")) == 8


def test_freed_blocks_are_reused_tail_first_and_a_hit_saves_a_block() -> None:
    cache = make(num_blocks=9)
    old = compute(cache, request(range(17)))  # four full blocks and one begun
    old_blocks = list(row(old))
    cache.release(old.table)
    new = compute(cache, request(range(100, 116)))  # what is empty goes before what has content
    new_blocks = list(row(new))
    assert not set(new_blocks) & set(old_blocks[:4])
    cache.release(new.table)
    assert cache.find_prefix(request(range(17))) == 16
    # free, oldest first: old's from its tail to its head, then new's in the same way
    hit = compute(cache, request(range(9)))
    assert row(hit) == [old_blocks[0], old_blocks[1], old_blocks[3]]
    third = compute(cache, request(range(200, 208)))
    assert row(third) == [old_blocks[2], new_blocks[3]]
    assert cache.find_prefix(request(range(17))) == 8
    assert cache.find_prefix(request(range(100, 117))) == 12
    cache.check([hit.table, third.table])


def test_a_table_that_does_not_fit_takes_nothing() -> None:
    cache = make(num_blocks=4)
    wanted = request(range(16))
    wanted.table = cache.open(wanted, 0, 0)
    assert cache.extend(wanted.table, 0, 16) is None
    assert cache.num_free == 3
    assert cache.extend(wanted.table, 0, 12) == (row(wanted),)
    assert cache.extend(wanted.table, 12, 12) == ([],)
    cache.check([wanted.table])


def test_a_window_drops_blocks_and_leaves_null_behind() -> None:
    cache = make(FULL, windowed(6))
    wanted = compute(cache, request(range(12)))
    before = list(row(wanted, 1))
    assert cache.extend(wanted.table, 12, 13) is not None
    # the token at 12 looks back to 7: block 0 (tokens 0 to 3) is out, block 1 is not
    assert row(wanted, 1)[:3] == [NULL_BLOCK, before[1], before[2]]
    assert NULL_BLOCK not in row(wanted, 0)
    assert wanted.table.num_held == 4 + 3
    cache.check([wanted.table])
    cache.release(wanted.table)
    assert cache.num_free == 16


def test_a_windowed_hit_needs_only_the_window() -> None:
    cache = make(FULL, windowed(5), num_blocks=12)
    old = compute(cache, request(range(17)))
    # Positions 0 to 2 of the window are dropped but still findable.
    assert cache.extend(old.table, 16, 17) is not None
    cache.release(old.table)
    for block in [cache._found_by[old.block_hashes[i], 1] for i in (0, 1, 2)]:
        cache._free.move_to_end(block.block_id, last=False)
    taken = request(range(50, 58))
    taken.table = cache.open(taken, 0, 0)
    cache.extend(taken.table, 0, 6)  # two blocks for each group: evicts the window's positions 0 to 2
    again = request(range(17))
    assert cache.find_prefix(again) == 16
    again.table = cache.open(again, 16, 16)
    assert [block == NULL_BLOCK for block in row(again, 1)] == [True, True, True, False]
    assert NULL_BLOCK not in row(again, 0)
    assert cache.find_prefix(request(range(13))) == 0  # its window ends with position 2, which is gone
    cache.check([taken.table, again.table])


def test_a_hit_of_states_needs_only_the_state_at_its_end() -> None:
    cache = make(FULL, STATES, num_blocks=32)
    old = compute(cache, request(range(17)))
    blocks = list(row(old, 1))
    assert cache.extend(old.table, 17, 18) is not None
    assert row(old, 1) == [NULL_BLOCK] * 4 + blocks[4:], "the block of the token before is needed"
    cache.release(old.table)
    again = request(range(15))
    assert cache.find_prefix(again) == 12
    again.table = cache.open(again, 12, 12)
    assert row(again, 1) == [NULL_BLOCK, NULL_BLOCK, blocks[2]]
    assert cache.extend(again.table, 12, 15) is not None
    assert row(again, 1)[:3] == [NULL_BLOCK, NULL_BLOCK, blocks[2]]
    assert row(again, 1)[3] not in blocks[:3], "a full block is never written again"
    del cache._found_by[cache._blocks[blocks[1]].key]  # type: ignore[arg-type]
    cache._blocks[blocks[1]].key = None
    assert cache.find_prefix(request(range(11))) == 4
    assert cache.find_prefix(request(range(13))) == 12
    cache.check([again.table])


def test_a_load_with_states_fills_the_state_at_its_end() -> None:
    cache = make(FULL, STATES)
    wanted = request(range(16))
    table = cache.open(wanted, 0, 12)
    assert [block == NULL_BLOCK for block in table.rows[1]] == [True, True, False]
    assert NULL_BLOCK not in table.rows[0]


@pytest.mark.parametrize(
    ("interval", "kept"), [(None, [1, 2, 3, 4, 5]), (0, [3]), (SIZE, [1, 2, 3, 4, 5]), (2 * SIZE, [2, 3, 4])]
)
def test_states_that_are_not_kept_cannot_be_found(interval: int | None, kept: list[int]) -> None:
    """The prompt ends with the fourth block: the same prompt would begin to compute after the third."""
    cache = make(FULL, STATES, num_blocks=32, state_interval=interval)
    wanted = request(range(16))
    wanted.tokens += range(16, 21)
    compute(cache, wanted)
    states = cache.boundary_states(wanted, 0, 21)
    assert [state.boundary for state in states] == [i * SIZE for i in kept]
    assert [state.block_id for state in states] == [row(wanted, 1)[i - 1] for i in kept]
    hashes = wanted.block_hashes
    assert [i + 1 for i in range(5) if (hashes[i], 1) in cache._found_by] == kept
    assert all((hashes[i], 0) in cache._found_by for i in range(5))
    assert cache.find_prefix(request(range(21))) == max(kept) * SIZE
    (*_, told) = cache.take_events()
    assert isinstance(told, BlockStored)
    assert (told.kv_cache_spec_kind, told.kv_cache_spec_sliding_window) == ("mamba", None)


def test_room_for_loads_is_null_where_the_window_never_looks() -> None:
    cache = make(FULL, windowed(6))
    wanted = request(range(16))
    table = cache.open(wanted, 0, 12)
    assert [block == NULL_BLOCK for block in table.rows[1]] == [True, False, False]
    assert len(table.rows[0]) == 3
    cache.release(table)
    whole = cache.open(wanted, 0, 16)  # the last token, at 15, is computed again and looks back to 10
    assert [block == NULL_BLOCK for block in whole.rows[1]] == [True, True, False, False]


@pytest.mark.parametrize(
    "groups",
    [
        (FULL,),
        (windowed(6),),
        (FULL, windowed(6)),
        (windowed(3), FULL, windowed(11)),
        (STATES,),
        (STATES, FULL),
    ],
)
@pytest.mark.parametrize("max_slice", [1, 3, 8])
def test_most_blocks_is_what_a_request_holds_at_most(groups: tuple[CacheGroup, ...], max_slice: int) -> None:
    for total in range(1, 40):
        cache = make(*groups, num_blocks=200, max_slice=max_slice)
        wanted = request(range(total))
        table = cache.open(wanted, 0, 0)
        most = 0
        for start in range(0, total, max_slice):
            cache.extend(table, start, min(total, start + max_slice))
            most = max(most, table.num_held)
        assert most <= cache.most_blocks(0, total)
        if len(groups) == 1 and groups[0] is FULL:
            assert most == cache.most_blocks(0, total)


def test_the_longest_request_fits_and_one_block_more_does_not() -> None:
    assert make(FULL, num_blocks=9).longest_request(1000) == 32
    assert make(FULL, num_blocks=9).longest_request(30) == 30
    assert make(FULL, windowed(6), num_blocks=9, max_slice=4).longest_request(1000) == 5 * SIZE
    assert make(windowed(6), num_blocks=9, max_slice=4).longest_request(1000) == 1000


def test_events_tell_tokens_parents_and_groups() -> None:
    cache = make(FULL, windowed(6))
    wanted = compute(cache, request(range(8), cache_salt="s"))
    wanted.tokens += range(8, 12)
    cache.extend(wanted.table, 8, 12)
    wanted.num_computed_tokens = 12
    cache.enter(wanted)
    events = cache.take_events()
    assert [type(event) for event in events] == [BlockStored] * 4
    first, _, third, fourth = events
    assert isinstance(first, BlockStored)
    assert isinstance(third, BlockStored)
    assert isinstance(fourth, BlockStored)
    assert first.block_hashes == wanted.block_hashes[:2]
    assert (first.parent_block_hash, first.token_ids, first.extra_keys) == (
        None,
        list(range(8)),
        [("s",), None],
    )
    assert (third.parent_block_hash, third.token_ids) == (wanted.block_hashes[1], [8, 9, 10, 11])
    assert (third.medium, third.group_idx, third.kv_cache_spec_kind) == ("GPU", 0, "full_attention")
    assert (fourth.group_idx, fourth.kv_cache_spec_kind, fourth.kv_cache_spec_sliding_window) == (
        1,
        "sliding_window",
        6,
    )
    assert cache.take_events() == []


def test_reset_forgets_everything_and_what_is_computed_on_top_of_it() -> None:
    cache = make()
    wanted = compute(cache, request(range(8)))
    cache.take_events()
    cache.reset()
    assert cache.take_events() == [AllBlocksCleared()]
    assert cache.find_prefix(request(range(9))) == 0
    wanted.tokens += range(8, 12)
    cache.extend(wanted.table, 8, 12)
    wanted.num_computed_tokens = 12
    cache.enter(wanted)
    assert cache.take_events() == []
    cache.release(wanted.table)
    cache.check([])
    compute(cache, request(range(8)))
    assert cache.find_prefix(request(range(9))) == 8


def test_a_reset_that_leaves_the_tiers_names_each_block() -> None:
    cache = make()
    wanted = compute(cache, request(range(8)))
    cache.take_events()
    cache.reset(tiers_too=False)
    removed = [event.block_hashes[0] for event in cache.take_events() if isinstance(event, BlockRemoved)]
    assert sorted(removed) == sorted(wanted.block_hashes)  # type: ignore[type-var]


def test_without_prefix_caching_or_events_there_are_none() -> None:
    cache = make(enable_prefix_caching=False)
    compute(cache, request(range(12)))
    assert cache.find_prefix(request(range(12))) == 0
    assert cache.take_events() == []
    silent = make(events=False)
    compute(silent, request(range(12)))
    assert silent.find_prefix(request(range(12))) == 8
    silent.reset()
    assert silent.take_events() == []


def test_check_finds_broken_books() -> None:
    cache = make()
    wanted = compute(cache, request(range(8)))
    with pytest.raises(IntegrityError, match="is in 0 tables"):
        cache.check([])
    cache.release(wanted.table)
    with pytest.raises(IntegrityError, match="is in 1 tables"):
        cache.check([BlockTable(rows=([3],), num_null=[0])])
    key, block = next(iter(cache._found_by.items()))
    del cache._found_by[key]
    with pytest.raises(IntegrityError, match="does not find it"):
        cache.check([])
    cache._found_by[key] = block
    del cache._free[block.block_id]
    with pytest.raises(IntegrityError, match="not in the free queue"):
        cache.check([])


def replay(events: list[KVCacheEvent], held: set[tuple[Any, int | None]]) -> None:
    """Apply events as a consumer does: nothing is stored twice or removed without being there."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            held.clear()
            continue
        assert isinstance(event, (BlockStored, BlockRemoved))
        changed = {(block_hash, event.group_idx) for block_hash in event.block_hashes}
        assert len(changed) == len(event.block_hashes)
        if isinstance(event, BlockStored):
            assert not changed & held
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            held |= changed
        else:
            assert changed <= held
            held -= changed


@pytest.mark.parametrize("seed", range(10))
def test_events_replay_to_exactly_what_is_findable(seed: int) -> None:
    random = Random(seed)
    groups = ((FULL,), (FULL, windowed(6)), (windowed(5),), (FULL, STATES), (STATES,))[seed % 5]
    cache = make(*groups, num_blocks=24, state_interval=random.choice([None, 0, 8]))
    held: set[tuple[Any, int | None]] = set()
    active: list[Request] = []
    for _ in range(150):
        if active and (random.random() < 0.5 or len(active) == 3):
            cache.release(active.pop(random.randrange(len(active))).table)
        else:
            wanted = request([random.randrange(2) for _ in range(random.randrange(1, 20))])
            local = cache.find_prefix(wanted)
            if cache.blocks_to_take(wanted, local, local) <= cache.num_free:
                active.append(compute(cache, wanted, local))
        if random.random() < 0.02:
            cache.reset(tiers_too=random.random() < 0.5)
        replay(cache.take_events(), held)
        assert held == set(cache._found_by)
        cache.check([wanted.table for wanted in active])


def test_hashes_are_chained_and_grow_with_the_request() -> None:
    wanted = request(range(6))
    assert len(wanted.block_hashes) == 1
    wanted.tokens += [6, 7, 8]
    assert list(wanted.block_hashes) == hash_blocks(list(range(8)), SIZE)
