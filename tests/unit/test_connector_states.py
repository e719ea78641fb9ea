"""Groups of recurrent states: what is stored of them, how far a prefix can be loaded, and what a load moves.

A state is stored only from what the engine offers in a step. A prefix can be loaded up to a boundary at
which attention reaches and every state group has its row.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from tests.unit.connector_kit import (
    BLOCK,
    STATE,
    ChunkedLocal,
    GroupKind,
    Host,
    Request,
    State,
    make_host,
)
from tests.unit.test_connector_audit import make_host as make_audited_host
from tests.unit.test_connector_promotion import TieredHost

from kvtier.config import Recompute
from kvtier.connector import (
    BoundaryState,
    CachedRequest,
    KVConnectorOutput,
    NewRequest,
    OffloadingConnectorMetadata,
    StepView,
    TransferReport,
)
from kvtier.connector.state import GroupState
from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, GPULoadStoreSpec, MissReason, TransferResult
from kvtier.offload.base import ReqContext
from kvtier.transfer.base import NULL_BLOCK

PROMPT = list(range(100, 126))  # 26 tokens: six blocks and a tail
HYBRID: tuple[GroupKind, ...] = (None, STATE)


def keys_of(host: Host, prompt: list[int], group: int) -> list[OffloadKey]:
    """Return the keys of a prompt's chunks in a group."""
    state = GroupState(host.scheduler._geometry.groups[group])
    state.extend_keys(Request("keys", prompt).block_hashes)
    return state.keys


def held(host: Host, prompt: list[int], group: int) -> list[int]:
    """Return the ends, in tokens, of the chunks of a group that are ready in the pool."""
    keys, size = keys_of(host, prompt, group), host.scheduler._geometry.groups[group].chunk_size
    found = host.scheduler.manager.lookup_many(keys, ReqContext())
    return [(at + 1) * size for at, is_there in enumerate(found) if is_there]


def tables(host: Host, num_tokens: int) -> tuple[list[int], ...]:
    """Return fresh blocks for all groups; of a state group only the last position has one."""
    rows = []
    for group in host.scheduler._geometry.groups:
        (row,) = host.blocks(-(-num_tokens // group.block_size))
        rows.append([NULL_BLOCK] * (len(row) - 1) + row[-1:] if group.is_state else row)
    return tuple(rows)


def offers_at(host: Host, *boundaries: int, groups: Iterable[int] | None = None) -> list[BoundaryState]:
    """Return offers at these boundaries, of all state groups unless some are given, in fresh blocks."""
    states = [group.index for group in host.scheduler._geometry.states] if groups is None else groups
    return [BoundaryState(group, host.blocks(1)[0][0], at) for at in boundaries for group in states]


def begin(host: Host, request: Request, local: int = 0) -> tuple[list[int], ...]:
    """Ask about a request and give it blocks to compute in."""
    host.scheduler.get_num_new_matched_tokens(request, local)
    blocks = tables(host, request.num_tokens)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    return blocks


def compute(
    host: Host, name: str, offers: list[BoundaryState], prompt: list[int] = PROMPT, **step: Any
) -> OffloadingConnectorMetadata:
    """Compute a prompt in one step in which these states are offered."""
    request = Request(name, prompt)
    return host.run_new(request, begin(host, request), boundary_states={name: offers}, **step)


def cache(host: Host, *boundaries: int, prompt: list[int] = PROMPT, name: str = "cached") -> None:
    """Compute and store a prompt with states at these boundaries."""
    meta = compute(host, name, offers_at(host, *boundaries), prompt)
    for job_id in (*meta.store_jobs.values(), *meta.audits):
        host.report(job_id)
    host.scheduler.request_finished(Request(name, prompt))


def ask(host: Host, prompt: list[int] = PROMPT, local: int = 0, name: str = "asks") -> int | None:
    """Ask about a prompt, as a request that then goes away."""
    found, _ = host.scheduler.get_num_new_matched_tokens(Request(name, prompt), local)
    host.scheduler.request_finished(Request(name, prompt))
    return found


def stored_blocks(meta: OffloadingConnectorMetadata, group: int = 1, name: str = "a") -> list[int]:
    """Return the blocks of a group that a request's store reads."""
    if name not in meta.reqs_to_store:
        return []
    gpu = meta.reqs_to_store[name][0]
    return blocks_of(gpu, group)


def blocks_of(gpu: object, group: int) -> list[int]:
    """Return the blocks of a group in the GPU end of a job."""
    assert isinstance(gpu, GPULoadStoreSpec)
    start = sum(gpu.group_sizes[:group])
    return [int(block) for block in gpu.block_ids[start : start + gpu.group_sizes[group]]]


def used_slots(host: Host) -> int:
    manager = host.scheduler.manager
    assert isinstance(manager, CPUOffloadingManager)
    return manager.stats().slots - manager.stats().free


# -- storing ---------------------------------------------------------------------------------------


def test_states_are_stored_from_offers_and_never_from_the_table() -> None:
    host = make_host(windows=HYBRID)
    meta = compute(host, "a", [BoundaryState(1, 90, 20), BoundaryState(1, 91, 8)])
    assert stored_blocks(meta) == [91, 90], "from head to tail"
    host.report(meta.store_jobs["a"])
    assert held(host, PROMPT, 1) == [8, 20]
    assert held(host, PROMPT, 0) == [4, 8, 12, 16, 20, 24]


def test_without_an_offer_only_attention_is_stored() -> None:
    host = make_host(windows=HYBRID)
    request = Request("a", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    blocks = host.blocks(7, groups=2)  # a table without a null block
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    metas = [host.run_new(request, blocks, 0, 9), host.run_more(request, 9, 17, host.blocks(1, groups=2))]
    for meta in metas:
        assert stored_blocks(meta, 0)
        assert stored_blocks(meta, 1) == []
        host.report(meta.store_jobs["a"])
    assert held(host, PROMPT, 1) == []
    assert ask(host) == 0


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_a_state_is_the_last_block_of_its_chunk(per_chunk: int) -> None:
    host = make_host(windows=HYBRID, blocks_per_chunk=per_chunk)
    end = 12 // (BLOCK * per_chunk) * BLOCK * per_chunk
    meta = compute(host, "a", [BoundaryState(1, 90, end)])
    assert stored_blocks(meta) == [NULL_BLOCK] * (per_chunk - 1) + [90]
    gpu = meta.reqs_to_store["a"][0]
    assert isinstance(gpu, GPULoadStoreSpec)
    assert gpu.block_indices is not None
    assert gpu.block_indices[1] == end // BLOCK - per_chunk
    host.report(meta.store_jobs["a"])
    assert held(host, PROMPT, 1) == [end]


@pytest.mark.parametrize(
    ("block", "boundary"),
    [(90, 6), (90, 4), (90, 25), (90, 26), (90, 28), (90, 32), (90, 0), (90, -8), (NULL_BLOCK, 8)],
)
def test_offers_that_no_load_could_use_are_left_out(block: int, boundary: int) -> None:
    """With chunks of two blocks: inside a chunk or a block, beyond the request, or without a block."""
    host = make_host(windows=HYBRID, blocks_per_chunk=2)
    meta = compute(host, "a", [BoundaryState(1, block, boundary)])
    assert stored_blocks(meta, 0), "attention is stored all the same"
    assert stored_blocks(meta) == []


def test_an_offer_beyond_the_tokens_of_its_step_is_left_out() -> None:
    host = make_host(windows=HYBRID)
    meta = compute(host, "a", [BoundaryState(1, 90, 12), BoundaryState(1, 91, 8)], scheduled=11)
    assert stored_blocks(meta) == [91]


def test_an_offer_within_drafted_tokens_is_left_out() -> None:
    """A step computes drafts beyond the request's tokens; none of them is known to be the next token."""
    host = make_host(windows=HYBRID)
    request = Request("a", PROMPT[:7])
    blocks = begin(host, request)
    host.run_new(request, blocks, scheduled=7)
    meta = host.run_more(request, 7, 4, boundary_states={"a": [BoundaryState(1, 90, 8)]})
    assert stored_blocks(meta) == []


@pytest.mark.parametrize(("generated", "expected"), [(0, [8, 12]), (18, [8])])
def test_prompt_only_limits_states_too(generated: int, expected: list[int]) -> None:
    host = make_host(windows=HYBRID, prompt_only=True)
    request = Request("a", PROMPT, num_prompt_tokens=len(PROMPT) - generated)
    meta = host.run_new(request, begin(host, request), boundary_states={"a": offers_at(host, 8, 12)})
    host.report(meta.store_jobs["a"])
    assert held(host, PROMPT, 1) == expected


@pytest.mark.parametrize(("limit", "expected"), [(0, []), (11, [8]), (12, [8, 12])])
def test_a_requests_own_limit_holds_for_states(limit: int, expected: list[int]) -> None:
    host = make_host(windows=HYBRID)
    request = Request("a", PROMPT, kv_transfer_params={"max_offload_tokens": limit})
    meta = host.run_new(request, begin(host, request), boundary_states={"a": offers_at(host, 8, 12, 16)})
    for job_id in meta.store_jobs.values():
        host.report(job_id)
    assert held(host, PROMPT, 1) == expected


def test_an_engine_that_may_not_store_stores_no_state() -> None:
    host = make_host(windows=HYBRID, may_store=False)
    assert not compute(host, "a", offers_at(host, 8)).reqs_to_store


@pytest.mark.parametrize("offers", [[BoundaryState(1, 90, 8)], []])
def test_offers_of_unknown_requests_are_ignored(offers: list[BoundaryState]) -> None:
    host = make_host(windows=HYBRID)
    meta = host.scheduler.build_connector_meta(StepView(boundary_states={"nobody": offers}))
    assert not meta.reqs_to_store
    request = Request("a", PROMPT)
    host.report(host.run_new(request, begin(host, request)).store_jobs["a"])
    host.scheduler.request_finished(request)
    meta = host.scheduler.build_connector_meta(StepView(boundary_states={"a": offers}))
    assert not meta.reqs_to_store, "it has finished"


def test_a_request_that_does_not_run_is_stored_up_to_the_state_that_is_offered() -> None:
    host = make_host(windows=HYBRID)
    request = Request("a", PROMPT)
    blocks = begin(host, request)
    host.report(host.run_new(request, blocks, scheduled=10).store_jobs["a"])
    meta = host.scheduler.build_connector_meta(StepView(boundary_states={"a": offers_at(host, 8)}))
    assert stored_blocks(meta, 0) == [], "attention was stored before"
    assert len(stored_blocks(meta)) == 1
    host.report(meta.store_jobs["a"])
    assert held(host, PROMPT, 1) == [8]
    assert host.run_more(request, 10, 16).reqs_to_store, "it goes on as usual"


def test_an_empty_list_of_offers_is_no_offer() -> None:
    """An engine may offer only states of groups that are not kept."""
    host = make_host(windows=HYBRID)
    request = Request("a", PROMPT)
    host.run_new(request, begin(host, request), scheduled=10)
    assert not host.scheduler.build_connector_meta(StepView(boundary_states={"a": []})).reqs_to_store


def test_an_offer_counts_in_its_own_step_only() -> None:
    host = make_host(windows=HYBRID)
    request = Request("a", PROMPT)
    blocks = begin(host, request)
    offers = offers_at(host, 8)
    host.report(host.run_new(request, blocks, 0, 9, boundary_states={"a": offers}).store_jobs["a"])
    host.scheduler.manager.discard(keys_of(host, PROMPT, 1), MissReason.EVICTED)
    later = host.run_more(request, 9, 17)
    assert stored_blocks(later, 0)
    assert stored_blocks(later) == []


def test_a_request_that_runs_at_a_reset_stores_no_state_after_it() -> None:
    host = make_host(windows=HYBRID)
    request = Request("a", PROMPT)
    host.report(host.run_new(request, begin(host, request), scheduled=9).store_jobs["a"])
    host.scheduler.reset_cache()
    offers = {"a": offers_at(host, 8, 12)}
    assert not host.run_more(request, 9, 4, boundary_states=offers).reqs_to_store
    assert not host.scheduler.build_connector_meta(StepView(boundary_states=offers)).reqs_to_store
    assert used_slots(host) == 0


def test_a_request_that_goes_on_from_a_kept_state_stores_no_state() -> None:
    """Only the state's block was kept at the reset; attention's blocks have been handed out anew."""
    for kept, is_stored in (([52], False), ([53], True)):
        host = make_host(windows=HYBRID)
        host.scheduler.reset_cache(kept_blocks=kept)
        request = Request("a", PROMPT)
        host.scheduler.get_num_new_matched_tokens(request, 8)
        blocks = ([1, 2, 3, 4, 5, 6, 7], [NULL_BLOCK, 52, NULL_BLOCK, NULL_BLOCK, 54])
        host.scheduler.update_state_after_alloc(request, blocks, 0)
        meta = host.run_new(request, blocks, 8, boundary_states={"a": [BoundaryState(1, 54, 20)]})
        assert bool(meta.reqs_to_store) is is_stored


def test_a_state_copied_from_a_kept_block_is_stale() -> None:
    for source, is_stored in ((9, False), (8, True)):
        host = make_host(windows=HYBRID)
        host.scheduler.reset_cache(kept_blocks=[9])
        request = Request("a", PROMPT)
        blocks = begin(host, request)
        copy = blocks[1][-1]
        meta = host.run_new(
            request,
            blocks,
            copied_blocks=[(source, copy)],
            boundary_states={"a": [BoundaryState(1, copy, 24)]},
        )
        assert bool(meta.reqs_to_store) is is_stored


def test_a_state_that_finds_the_pool_full_is_lost_and_later_ones_are_not() -> None:
    host = make_host(num_slots=4, windows=HYBRID)
    first = compute(host, "other", [], prompt=list(range(16)))  # four chunks, which cannot be evicted now
    request = Request("a", PROMPT)
    blocks = begin(host, request)
    assert not host.run_new(request, blocks, 0, 6, boundary_states={"a": offers_at(host, 4)}).reqs_to_store
    host.report(first.store_jobs["other"])
    meta = host.run_more(request, 6, 3, boundary_states={"a": [BoundaryState(1, 90, 8)]})
    assert stored_blocks(meta) == [90], "an offer does not wait for the next attempt"
    host.report(meta.store_jobs["a"])
    assert (held(host, PROMPT, 0), held(host, PROMPT, 1)) == ([4, 8], [8])


def test_a_state_that_is_held_is_not_stored_again() -> None:
    host = make_host(windows=HYBRID)
    cache(host, 8)
    meta = compute(host, "a", offers_at(host, 8))
    assert not meta.reqs_to_store


def test_an_ended_request_that_has_lost_its_blocks_stores_nothing() -> None:
    """Another request writes into its blocks of attention in the step in which its state is offered."""
    for is_lost in (False, True):
        host = make_host(windows=HYBRID)
        request = Request("a", PROMPT)
        blocks = begin(host, request)
        host.run_new(request, blocks, scheduled=2)
        taken = blocks[0][:2] if is_lost else host.blocks(2)[0]
        other = Request("other", list(range(8)))
        host.scheduler.get_num_new_matched_tokens(other, 0)
        meta = host.scheduler.build_connector_meta(
            StepView(
                new=[NewRequest("other", (taken, host.blocks(1)[0]), 0)],
                num_scheduled_tokens={"other": 8},
                ended=[CachedRequest("a", None, 26)],
                boundary_states={"a": offers_at(host, 24)},
            )
        )
        assert ("a" in meta.reqs_to_store) is not is_lost


# -- fences ----------------------------------------------------------------------------------------


def _running_store(host: Host) -> tuple[int, int]:
    """Start a store of a state; return its job and the state's block."""
    (offer,) = offers_at(host, 20)
    return compute(host, "a", [offer]).store_jobs["a"], offer.block_id


def test_a_state_that_is_handed_out_again_is_fenced() -> None:
    host = make_host(windows=HYBRID)
    job, block = _running_store(host)
    request = Request("a", PROMPT)
    later = host.run_more(request, 26, 1, ([], [block]))
    assert later.jobs_to_flush == {job}, "also to the request itself"
    assert host.run_more(request, 27, 1, (host.blocks(1)[0], [])).jobs_to_flush == set()
    other = Request("b", list(range(8)))
    host.scheduler.get_num_new_matched_tokens(other, 0)
    host.scheduler.update_state_after_alloc(other, (host.blocks(2)[0], [NULL_BLOCK, block]), 0)
    assert host.idle().jobs_to_flush == {job}, "before it runs"
    blocks = (host.blocks(2)[0], [NULL_BLOCK, block])
    assert host.run_new(Request("unknown", list(range(8))), blocks).jobs_to_flush == {job}
    step = StepView(speculative_blocks={block})
    assert host.scheduler.build_connector_meta(step).jobs_to_flush == {job}
    host.report(job)
    assert host.scheduler.build_connector_meta(step).jobs_to_flush == set()


def test_a_state_that_is_copied_over_is_fenced() -> None:
    host = make_host(windows=HYBRID)
    job, block = _running_store(host)
    source = host.blocks(1)[0][0]
    assert host.scheduler.build_connector_meta(StepView(copied_blocks=[(block, source)])).jobs_to_flush == (
        set()
    ), "to read it does no harm"
    step = StepView(copied_blocks=[(source, block)])
    assert host.scheduler.build_connector_meta(step).jobs_to_flush == {job}


def test_the_null_blocks_of_a_state_are_not_fenced() -> None:
    host = make_host(windows=HYBRID, blocks_per_chunk=2)
    meta = compute(host, "a", [BoundaryState(1, 90, 8)])
    assert NULL_BLOCK in stored_blocks(meta)
    assert host.run_more(Request("a", PROMPT), 26, 1, ([], [NULL_BLOCK])).jobs_to_flush == set()


def test_a_request_that_is_preempted_while_its_state_is_stored() -> None:
    """Its blocks are free, so that a fence guards them, and it stores no less when it comes again."""
    host = make_host(windows=HYBRID)
    job, block = _running_store(host)
    request = Request("a", PROMPT)
    meta = host.scheduler.build_connector_meta(StepView(preempted_req_ids={"a"}))
    assert meta.jobs_to_flush == set()
    assert host.scheduler.request_finished(request) == (False, None), "it holds no blocks"
    other = Request("b", list(range(8)))
    host.scheduler.get_num_new_matched_tokens(other, 0)
    flush = host.run_new(other, (host.blocks(2)[0], [NULL_BLOCK, block]))
    assert flush.jobs_to_flush == {job}
    host.report(job, success=False)
    assert ask(host) == 0


def test_a_request_that_was_preempted_stores_states_when_it_comes_again() -> None:
    host = make_host(windows=HYBRID)
    job, _ = _running_store(host)
    request = Request("a", PROMPT)
    host.scheduler.build_connector_meta(StepView(preempted_req_ids={"a"}))
    host.report(job)
    tokens, _ = host.scheduler.get_num_new_matched_tokens(request, 0)
    assert tokens == 20, "of its own store"
    host.scheduler.manager.discard(keys_of(host, PROMPT, 1), MissReason.EVICTED)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    blocks = tables(host, 26)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    again = host.run_more(
        request, 0, 26, blocks, resumed=True, boundary_states={"a": [BoundaryState(1, 99, 24)]}
    )
    assert stored_blocks(again) == [99]
    host.report(again.store_jobs["a"])
    assert ask(host) == 24


# -- lookups ---------------------------------------------------------------------------------------


def test_a_prefix_ends_at_the_last_boundary_where_all_state_groups_have_a_row() -> None:
    host = make_host(windows=(None, STATE, STATE))
    offers = offers_at(host, 8, 12, groups=[1]) + offers_at(host, 8, 20, groups=[2])
    host.report(compute(host, "a", offers).store_jobs["a"])
    assert ask(host) == 8
    assert ask(host, local=8) == 0
    assert ask(host, local=4) == 4
    assert ask(host, PROMPT[:10]) == 8
    assert ask(host, PROMPT[:8]) == 0


def test_attention_that_does_not_reach_a_state_makes_it_useless() -> None:
    host = make_host(windows=HYBRID)
    cache(host, 8, 20)
    host.scheduler.manager.discard(keys_of(host, PROMPT, 0)[3:4], MissReason.EVICTED)
    assert ask(host) == 8


@pytest.mark.parametrize(("length", "expected"), [(7, 4), (8, 4), (9, 8), (12, 8), (13, 12), (4, 0), (5, 4)])
def test_the_last_token_is_never_in_a_loaded_state(length: int, expected: int) -> None:
    """A state that has seen the last token would see it again when that token is computed."""
    host = make_host(windows=HYBRID)
    cache(host, *range(4, 25, 4))
    assert ask(host, PROMPT[:length]) == expected
    assert ask(host, PROMPT[:length], local=expected) == 0


def test_a_model_of_states_alone() -> None:
    host = make_host(windows=(STATE, STATE), block_sizes=(4, 8))
    cache(host, *range(4, 25, 4))
    assert (held(host, PROMPT, 0), held(host, PROMPT, 1)) == ([4, 8, 12, 16, 20, 24], [8, 16, 24])
    assert ask(host) == 24
    assert ask(host, PROMPT[:24]) == 16


def test_a_load_does_not_begin_inside_a_block() -> None:
    """With blocks of unequal sizes, the engine's own hit may end inside a block of the state group."""
    host = make_host(windows=HYBRID, block_sizes=(4, 8))
    cache(host, 8, 16, 24)
    assert [ask(host, local=local) for local in range(0, 25, 4)] == [24, 0, 16, 0, 8, 0, 0]
    assert [ask(host, local=local) for local in (1, 5, 10, 15)] == [0, 0, 0, 0]


KINDS: list[tuple[tuple[GroupKind, ...], tuple[int, ...], int]] = [
    ((None, STATE), (4, 4), 4),
    ((None, STATE), (4, 12), 12),
    ((None, STATE), (12, 4), 12),
    ((None, STATE), (8, 12), 24),
    ((None, STATE, STATE), (4, 8, 12), 24),
    ((None, 5, STATE), (4, 4, 8), 8),
    ((None, 9, STATE), (8, 12, 8), 8),
    ((6, STATE), (4, 8), 8),
    ((None, ChunkedLocal(12)), (4, 4), 4),
    ((None, ChunkedLocal(12)), (8, 12), 4),
    ((None, ChunkedLocal(16), STATE), (4, 8, 8), 8),
    ((ChunkedLocal(8), STATE), (4, 4), 4),
    ((None, 7, ChunkedLocal(20), STATE, STATE), (4, 4, 4, 4, 8), 8),
    ((STATE,), (4,), 4),
]
"""Kinds and block sizes of groups, and the least end of a load with chunks of one block."""


def first_needed(kind: GroupKind, end: int) -> int:
    """Return the first token before `end` whose chunk is needed to go on at `end` or `end - 1`."""
    if isinstance(kind, State):
        return end - 1  # the chunk that ends there
    if isinstance(kind, ChunkedLocal):
        return max(token for token in range(end) if token % kind.size == 0)
    return 0 if kind is None else max(0, end - kind)


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
@pytest.mark.parametrize(("kinds", "sizes", "least"), KINDS)
def test_lookups_against_a_naive_model(
    kinds: tuple[GroupKind, ...], sizes: tuple[int, ...], least: int, per_chunk: int
) -> None:
    rng, hits = random.Random(f"{sizes} {per_chunk}"), 0
    has_state = any(isinstance(kind, State) for kind in kinds)
    for _ in range(40):
        host = make_host(512, kinds, block_sizes=sizes, blocks_per_chunk=per_chunk)
        prompt = [rng.randrange(50) for _ in range(least * per_chunk * 4 + rng.choice([0, 1, 3]))]
        boundaries = [at for at in range(4, len(prompt) + 1, 4) if rng.random() < 0.9]
        cache(host, *boundaries, prompt=prompt)
        ready = []
        for group, size in enumerate(sizes):
            keys = keys_of(host, prompt, group)
            lost = [key for key in keys if rng.random() < 0.1]
            host.scheduler.manager.discard(lost, MissReason.EVICTED)
            ends = held(host, prompt, group)
            ready.append({(end - 1) // (size * per_chunk) for end in ends})
        block = max(sizes) if least % max(sizes) == 0 else least
        for local in (0, rng.randrange(0, len(prompt), block)):
            limit = len(prompt) - has_state
            expected = local
            for end in range(least * per_chunk, limit + 1, least * per_chunk):
                needed = [
                    {
                        token // (size * per_chunk)
                        for token in range(max(local, first_needed(kind, end)), end)
                    }
                    for kind, size in zip(kinds, sizes, strict=True)
                ]
                if end > local and all(need <= there for need, there in zip(needed, ready, strict=True)):
                    expected = end
            if any(local % size for size in sizes):
                expected = local
            assert ask(host, prompt, local) == expected - local, (local, ready)
            hits += expected > local
    assert hits > 10


# -- loads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
@pytest.mark.parametrize("local", [0, 12])
def test_a_load_moves_one_block_of_a_state_group(per_chunk: int, local: int) -> None:
    host = make_host(windows=HYBRID, blocks_per_chunk=per_chunk)
    cache(host, 12, 24)
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, local) == (24 - local, True)
    blocks = host.blocks(6, groups=2)  # a table without null blocks: only the last is to be filled
    host.scheduler.update_state_after_alloc(request, blocks, 24 - local)
    meta = host.idle()
    pool, gpu = meta.reqs_to_load["b"]
    assert isinstance(gpu, GPULoadStoreSpec)
    assert blocks_of(gpu, 0) == blocks[0][local // 4 :]
    assert blocks_of(gpu, 1) == blocks[1][5:]
    assert gpu.block_indices is not None
    assert gpu.block_indices[1] == 5, "its place in the row is that of the last block of the chunk"
    assert len(pool.block_ids) == -(-6 // per_chunk) - local // 4 // per_chunk + 1  # type: ignore[attr-defined]
    host.report(meta.load_jobs["b"])
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (explanation.from_gpu, explanation.from_tiers) == (local, {"cpu": 24 - local})


def _fail_before_it_begins(host: Host, blocks: tuple[list[int], ...], tokens: int) -> None:
    """Plan a load of fewer tokens than were offered, and see that nothing is loaded and all has failed."""
    request = Request("b", PROMPT)
    host.scheduler.update_state_after_alloc(request, blocks, tokens)
    meta = host.idle()
    assert not meta.reqs_to_load
    ((job, order),) = meta.jobs_to_end.items()
    assert order.void
    output = KVConnectorOutput(reports=[TransferReport(0, TransferResult(job, success=False))])
    host.scheduler.update_connector_output(output)
    assert (output.finished_recving, output.failed_recving) == ({"b"}, {"b"})
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (0, False), "it computes"
    host.scheduler.check()
    host.scheduler.request_finished(request)
    assert ask(host) == 24, "the rows are not to blame"


@pytest.mark.parametrize("tokens", [23, 22, 21, 20, 16, 10, 4, 1])
def test_a_load_that_was_cut_where_there_is_no_state_has_failed(tokens: int) -> None:
    host = make_host(windows=HYBRID)
    cache(host, 8, 24)
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (24, True)
    _fail_before_it_begins(host, tables(host, tokens), tokens)


@pytest.mark.parametrize("tokens", [12, 4, 20])
def test_a_load_that_was_cut_inside_a_chunk_has_failed(tokens: int) -> None:
    """The row of the chunk holds the state at its end, which has seen more tokens."""
    host = make_host(windows=HYBRID, blocks_per_chunk=2)
    cache(host, 8, 16, 24)
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (24, True)
    _fail_before_it_begins(host, tables(host, tokens), tokens)


def test_a_load_that_was_cut_at_another_state_loads_that_one() -> None:
    host = make_host(windows=HYBRID)
    cache(host, 8, 24)
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (24, True)
    (state,) = keys_of(host, PROMPT, 1)[1:2]
    expected = host.scheduler.manager.prepare_load([state], ReqContext())
    host.scheduler.manager.complete_load([state])
    blocks = tables(host, 8)
    host.scheduler.update_state_after_alloc(request, blocks, 8)
    pool, gpu = host.idle().reqs_to_load["b"]
    assert blocks_of(gpu, 1) == blocks[1][1:]
    assert pool.block_ids[-1] == expected.block_ids[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("group", [0, 1])
def test_a_row_that_is_gone_when_the_load_begins_is_a_failed_load(group: int) -> None:
    host = make_host(windows=HYBRID)
    cache(host, 24)
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (24, True)
    host.scheduler.manager.discard(keys_of(host, PROMPT, group)[5:], MissReason.EVICTED)
    host.scheduler.update_state_after_alloc(request, tables(host, 24), 24)
    meta = host.idle()
    assert not meta.reqs_to_load
    assert [order.void for order in meta.jobs_to_end.values()] == [True]


@pytest.mark.parametrize("kinds", [(None, STATE), (STATE, None), (STATE,), (STATE, ChunkedLocal(8))])
def test_a_load_without_a_block_for_its_state_has_failed(kinds: tuple[GroupKind, ...]) -> None:
    host = make_host(windows=kinds)
    cache(host, 24)
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (24, True)
    rows = tuple(
        [NULL_BLOCK] * 6 if isinstance(kind, State | ChunkedLocal) else host.blocks(6)[0] for kind in kinds
    )
    _fail_before_it_begins(host, rows, 24)


def test_a_state_that_does_not_arrive_is_a_failed_request() -> None:
    host = make_host(windows=HYBRID, recompute=Recompute.MISSING)
    cache(host, 8, 24)
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (24, True)
    blocks = tables(host, 24)
    host.scheduler.update_state_after_alloc(request, blocks, 24)
    job = host.idle().load_jobs["b"]
    result = TransferResult(job, success=False, failed_blocks=(6,))
    output = KVConnectorOutput(reports=[TransferReport(0, result)])
    host.scheduler.update_connector_output(output)
    assert output.failed_recving == {"b"}
    assert output.invalid_block_ids == {blocks[1][5]}
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (explanation.from_tiers, explanation.recomputed) == ({}, 26), "all of it is computed"
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    blocks = tables(host, 26)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    meta = host.run_new(request, blocks, boundary_states={"b": [BoundaryState(1, 99, 16)]})
    assert stored_blocks(meta, name="b") == [99]


def test_a_state_with_wrong_bytes_is_not_loaded_again() -> None:
    host = make_host(windows=HYBRID)
    cache(host, 8, 24)
    request = Request("b", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    host.scheduler.update_state_after_alloc(request, tables(host, 24), 24)
    host.report(host.idle().load_jobs["b"], success=False, failed_blocks=(6,), corrupt=True)
    assert held(host, PROMPT, 1) == [8]
    assert held(host, PROMPT, 0) == [4, 8, 12, 16, 20, 24]
    assert ask(host) == 8


# -- explanations ----------------------------------------------------------------------------------


def _explain(host: Host, prompt: list[int] = PROMPT) -> tuple[MissReason | None, int | None]:
    """Run a request with what is offered to it, and return why not more was loaded."""
    request = Request("explained", prompt)
    tokens, _ = host.scheduler.get_num_new_matched_tokens(request, 0)
    assert tokens is not None
    host.scheduler.update_state_after_alloc(request, tables(host, tokens or request.num_tokens), tokens)
    for job in host.idle().load_jobs.values():
        host.report(job)
    host.run_new(request, tables(host, request.num_tokens), tokens)
    explanation = host.scheduler.explain("explained")
    assert explanation is not None
    assert sum(explanation.from_tiers.values()) == tokens
    return explanation.first_miss, explanation.first_missing_token


def test_a_state_that_was_never_offered_is_no_state() -> None:
    host = make_host(windows=HYBRID)
    cache(host, 12)
    assert _explain(host) == (MissReason.NO_STATE, 12)


def test_a_state_that_was_evicted() -> None:
    host = make_host(windows=HYBRID)
    cache(host, 12, 24)
    host.scheduler.manager.discard(keys_of(host, PROMPT, 1)[5:], MissReason.EVICTED)
    assert _explain(host) == (MissReason.EVICTED, 12)


def test_attention_that_was_never_stored_is_not_a_missing_state() -> None:
    host = make_host(windows=HYBRID)
    cache(host, 12, prompt=PROMPT[:13])
    assert _explain(host) == (MissReason.NEVER_STORED, 12)


def test_a_prompt_of_whole_blocks_misses_nothing_but_its_last_block() -> None:
    host = make_host(windows=HYBRID)
    cache(host, 20, 24)
    assert _explain(host, PROMPT[:24]) == (None, None)


# -- lookahead -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lookahead", "boundaries", "expected"),
    [
        (1, [8, 20], 20),
        (1, [8, 24], 8),
        (4, [16, 20], 16),
        (5, [12, 16], 12),
        (1, [24], 0),
        (1, [8], 8),
        (6, [4], 4),
        (1, [], 0),
    ],
)
def test_attention_alone_covers_the_lookahead(lookahead: int, boundaries: list[int], expected: int) -> None:
    """A draft head has no states, and states exist at a few boundaries: two in a row may never be stored."""
    host = make_host(windows=HYBRID, lookahead=lookahead)
    cache(host, *boundaries)
    assert ask(host) == expected
    assert ask(host, local=expected) == 0


@pytest.mark.parametrize(
    ("length", "lookahead", "expected"),
    [(26, 1, 16), (26, 8, 16), (26, 9, 0), (21, 1, 16), (20, 1, 0), (19, 1, 0), (38, 1, 32), (36, 1, 16)],
)
def test_attention_covers_the_lookahead_with_blocks_that_end_before_the_next_state(
    length: int, lookahead: int, expected: int
) -> None:
    host = make_host(windows=HYBRID, block_sizes=(4, 16), lookahead=lookahead)
    prompt = list(range(100, 138))
    cache(host, 16, 32, prompt=prompt)
    assert ask(host, prompt[:length]) == expected


@pytest.mark.parametrize("lookahead", [1, 5])
@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        ((None, STATE), (4, 4)),
        ((None, STATE), (4, 12)),
        ((None, STATE, STATE), (4, 8, 4)),
        ((None, 5, STATE), (4, 4, 8)),
        ((5, STATE), (4, 16)),
        ((None, ChunkedLocal(8), STATE), (4, 4, 16)),
    ],
)
def test_a_lookahead_against_a_naive_model(
    kinds: tuple[GroupKind, ...], sizes: tuple[int, ...], lookahead: int
) -> None:
    rng, hits = random.Random(f"{sizes} {lookahead}"), 0
    for _ in range(30):
        host = make_host(512, kinds, block_sizes=sizes, lookahead=lookahead)
        prompt = [rng.randrange(50) for _ in range(rng.randrange(20, 60))]
        cache(host, *(at for at in range(4, 61, 4) if rng.random() < 0.7), prompt=prompt)
        ready = []
        for group in range(len(kinds)):
            lost = [key for key in keys_of(host, prompt, group) if rng.random() < 0.05]
            host.scheduler.manager.discard(lost, MissReason.EVICTED)
            ready.append({(end - 1) // sizes[group] for end in held(host, prompt, group)})
        attention = [group for group, kind in enumerate(kinds) if not isinstance(kind, State)]

        def serves(end: int, group: int, ready: list[set[int]] = ready) -> bool:
            needed = range(first_needed(kinds[group], end), end)
            return {token // sizes[group] for token in needed} <= ready[group]

        ends = range(4, len(prompt), 4)
        reach = max((end for end in ends if all(serves(end, group) for group in attention)), default=0)
        expected = max(
            (
                end
                for end in range(max(sizes), reach - lookahead + 1, max(sizes))
                if all(serves(end, group) for group in range(len(kinds)))
            ),
            default=0,
        )
        assert ask(host, prompt) == expected, (reach, ready)
        hits += expected > 0
    assert hits > 3


def test_windowed_chunks_that_cover_a_lookahead_beyond_the_last_state_are_stored() -> None:
    host = make_host(windows=(None, 4, STATE), block_sizes=(4, 4, 16), lookahead=1)
    cache(host, 16)
    assert held(host, PROMPT, 1) == [4, 8, 12, 16, 20, 24]
    assert ask(host) == 16


# -- tiers -----------------------------------------------------------------------------------------


def _in_tier(windows: tuple[GroupKind, ...], ends: dict[int, list[int]], **settings: Any) -> TieredHost:
    """Return a host whose tier holds the chunks of `PROMPT` that end at these tokens, by group."""
    host = TieredHost(windows=windows, settings=settings)
    for group, of_group in ends.items():
        size = host.scheduler._geometry.groups[group].chunk_size
        host.tier.held |= {keys_of(host.host, PROMPT, group)[end // size - 1] for end in of_group}
    return host


def _promoted(host: TieredHost, request: Request, local: int = 0) -> list[OffloadKey]:
    """Ask, and return the keys of the promotion that begins."""
    assert host.ask(request, local) is None
    host.host.idle()
    (job,) = host.tier.promotions.values()
    return job.keys


ALL = list(range(4, 25, 4))


def test_a_promotion_brings_the_state_first_and_no_attention_beyond_it() -> None:
    host = _in_tier(HYBRID, {0: ALL, 1: [8, 16]})
    request = Request("a", PROMPT)
    attention, states = (keys_of(host.host, PROMPT, group) for group in (0, 1))
    assert _promoted(host, request) == [states[3], *attention[:4]]
    host.tier.finish(next(iter(host.tier.promotions)))
    host.end_step()
    assert host.ask(request) == 16
    host.scheduler.update_state_after_alloc(request, tables(host.host, 16), 16)
    host.host.report(host.host.idle().load_jobs["a"])
    explanation = host.scheduler.explain("a")
    assert explanation is not None
    assert (explanation.from_tiers, explanation.first_missing_token) == ({"disk": 16}, 16)


@pytest.mark.parametrize(
    ("lookahead", "sizes", "states", "chunks"),
    [
        (1, (4, 4), [8], 3),
        (4, (4, 4), [8], 3),
        (5, (4, 4), [8], 4),
        (1, (4, 4), [8, 20], 6),
        (1, (4, 8), [8, 24], 3),
        (5, (4, 16), [16], 6),
        (1, (4, 16), [16], 5),
    ],
)
def test_a_promotion_covers_the_lookahead_and_no_more(
    lookahead: int, sizes: tuple[int, int], states: list[int], chunks: int
) -> None:
    host = _in_tier(HYBRID, {0: ALL, 1: states}, lookahead=lookahead, block_sizes=sizes)
    request, end = Request("a", PROMPT), max(at for at in states if at + lookahead <= 24)
    expected = [keys_of(host.host, PROMPT, 1)[end // sizes[1] - 1], *keys_of(host.host, PROMPT, 0)[:chunks]]
    assert _promoted(host, request) == expected
    host.tier.finish(next(iter(host.tier.promotions)))
    host.end_step()
    assert host.ask(request) == end


def test_only_a_missing_state_is_promoted() -> None:
    host = _in_tier(HYBRID, {1: [16]})
    cache(host.host)
    request = Request("a", PROMPT)
    assert _promoted(host, request) == keys_of(host.host, PROMPT, 1)[3:4]
    host.tier.finish(next(iter(host.tier.promotions)))
    host.end_step()
    assert host.ask(request) == 16


def test_nothing_is_promoted_for_a_state_that_is_nowhere() -> None:
    host = _in_tier((None, STATE, STATE), {0: ALL, 1: [8], 2: [12]})
    assert host.ask(Request("a", PROMPT)) == 0
    assert not host.tier.promotions


@pytest.mark.parametrize("group", [0, 1])
def test_a_promotion_of_which_a_row_fails_is_of_no_use(group: int) -> None:
    """All or nothing: attention without its state cannot be loaded, nor a state without attention."""
    host = _in_tier(HYBRID, {0: ALL, 1: [16]})
    request = Request("a", PROMPT)
    _promoted(host, request)
    (job,) = host.tier.promotions.values()
    lost = keys_of(host.host, PROMPT, group)[3]
    host.tier.finish_rows(job, [lost], MissReason.IO_FAILED)
    host.tier.finish_rows(job, [key for key in job.keys if key != lost])
    host.end_step()
    assert host.ask(request) == 0
    host.tiered.manager.check()


def test_a_tier_that_does_not_know_is_asked_about_all_states_beyond_the_local_hit() -> None:
    host = _in_tier(HYBRID, {0: ALL, 1: [12]}, block_sizes=(4, 4))
    host.tier.unknown = {key for group in (0, 1) for key in keys_of(host.host, PROMPT, group)}
    request = Request("a", PROMPT)
    assert host.ask(request, local=4) is None
    host.host.idle()
    ((asked, _),) = host.tier.asked
    assert set(asked) == {key for group in (0, 1) for key in keys_of(host.host, PROMPT, group)[1:]}
    host.tier.answer()
    host.end_step()
    attention, states = (keys_of(host.host, PROMPT, group) for group in (0, 1))
    assert _promoted(host, request, local=4) == [states[2], *attention[1:3]]


def test_a_tier_that_does_not_know_is_asked_about_the_chunk_that_covers_the_lookahead() -> None:
    host = _in_tier(HYBRID, {0: ALL, 1: [16]}, block_sizes=(4, 16), lookahead=1)
    host.tier.unknown = {key for group in (0, 1) for key in keys_of(host.host, PROMPT, group)}
    request = Request("a", PROMPT)
    assert host.ask(request) is None
    host.host.idle()
    host.tier.answer()
    host.end_step()
    assert len(_promoted(host, request)) == 1 + 5


def test_a_state_beyond_the_last_possible_end_is_not_asked_about() -> None:
    host, prompt = (
        TieredHost(windows=HYBRID, settings={"block_sizes": (4, 16), "lookahead": 1}),
        list(range(32)),
    )
    attention, states = (keys_of(host.host, prompt, group) for group in (0, 1))
    host.tier.unknown = {*attention, *states}
    assert host.ask(Request("a", prompt)) is None
    host.host.idle()
    ((asked, _),) = host.tier.asked
    assert set(asked) == {*attention[:7], states[0]}


def test_a_promotion_that_finds_no_room_for_all_brings_nothing() -> None:
    host = TieredHost(num_slots=4, windows=HYBRID)
    host.tier.held = {*keys_of(host.host, PROMPT, 0), keys_of(host.host, PROMPT, 1)[3]}
    request = Request("a", PROMPT)
    host.ask(request)
    host.host.idle()
    assert not host.tier.promotions, "five rows are needed"
    host.end_step()
    assert host.ask(request) == 0


# -- audits ----------------------------------------------------------------------------------------


def _audited(host: Host, prompt: list[int] = PROMPT) -> tuple[int | None, list[list[int]]]:
    """Run a request; return the tokens that it loads, and the sizes by group of each audit."""
    request = Request("b", prompt)
    tokens, _ = host.scheduler.get_num_new_matched_tokens(request, 0)
    if tokens:
        host.scheduler.update_state_after_alloc(request, tables(host, tokens), tokens)
        host.report(host.idle().load_jobs["b"])
    blocks = tables(host, request.num_tokens)
    if not tokens:
        host.scheduler.update_state_after_alloc(request, blocks, 0)
    offers = {"b": offers_at(host, 24)}
    meta = host.run_new(request, blocks, tokens or 0, boundary_states=offers)
    sizes = []
    for job, (_, (gpu, _)) in meta.audits.items():
        assert isinstance(gpu, GPULoadStoreSpec)
        sizes.append(list(gpu.group_sizes))
        host.report(job)
    host.scheduler.check()
    return tokens, sizes


def test_states_are_not_compared() -> None:
    host = make_audited_host(windows=HYBRID)
    cache(host, 8, 24)
    assert _audited(host) == (0, [[6, 0]])
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (explanation.first_miss, explanation.first_missing_token) == (MissReason.AUDITED, 0)


def test_a_model_of_states_alone_is_not_audited() -> None:
    host = make_audited_host(windows=(STATE,))
    assert not host.scheduler.spec.config.audits
    cache(host, 8, 24)
    assert _audited(host) == (24, [])


@pytest.mark.parametrize(("states", "loaded", "cost"), [([20, 24], 20, 4), ([8, 24], 8, 16), ([24], 0, 24)])
def test_the_budget_pays_for_the_way_back_to_the_last_state(
    states: list[int], loaded: int, cost: int
) -> None:
    host = make_audited_host(windows=HYBRID, audit=0.001)
    cache(host, *states)
    audits = host.scheduler._audits
    audits._hits_to_pass, audits._credit = 0, 5.0  # for one chunk
    request = Request("b", PROMPT)
    for _ in range(2):
        assert host.scheduler.get_num_new_matched_tokens(request, 0)[0] == loaded
        assert audits._credit == 5.0 - cost, "it is paid once"


def test_a_hit_whose_last_state_but_one_is_too_far_away_is_not_audited() -> None:
    """No audit computes more than 4,096 tokens, however few of them were asked for."""
    prompt = list(range(5000))
    for states, is_audited in (([4, 4980], False), ([1000, 4980], True)):
        host = make_audited_host(4096, HYBRID, capacity=1 << 26, audit=0.001)
        cache(host, *states, prompt=prompt)
        audits = host.scheduler._audits
        audits._hits_to_pass, audits._credit = 0, 5.0
        expected = states[0] if is_audited else 4980
        assert ask(host, prompt) == expected
        assert audits._credit <= 5.0
        if not is_audited:
            assert audits._credit == 5.0, "nothing is computed, and nothing is spent"


def test_each_chunk_is_audited_once_beside_states_with_larger_blocks() -> None:
    host = make_audited_host(windows=HYBRID, block_sizes=(4, 24))
    cache(host, 24)
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    blocks = tables(host, 26)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    steps = [host.run_new(request, blocks, 0, 10)]
    steps += [host.run_more(request, computed, 8) for computed in (10, 18)]
    audited = [blocks_of(gpu, 0) for meta in steps for _, (gpu, _) in meta.audits.values()]
    assert audited == [blocks[0][:2], blocks[0][2:4], blocks[0][4:6]]
