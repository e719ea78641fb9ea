"""KV that depends on tokens after its own, as that of a draft head does (EAGLE, MTP): which of it is stored,
and which of it is loaded.
"""

from __future__ import annotations

import random

import pytest
from tests.unit.connector_kit import BLOCK, Request, make_host
from tests.unit.test_connector_promotion import PROMPT, TieredHost, keys_of

from kvtier.offload import MissReason

LONGER = PROMPT + list(range(8))


@pytest.mark.parametrize(("lookahead", "loaded"), [(0, 24), (1, 20), (4, 20), (5, 16)])
def test_chunks_found_beyond_a_load_cover_the_lookahead(lookahead: int, loaded: int) -> None:
    host = make_host(lookahead=lookahead)
    host.cache(Request("a", LONGER))
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (loaded, True)


def test_prompts_that_part_at_the_end_of_a_chunk() -> None:
    """The last token of the chunk that they share was computed before another token."""
    host = make_host(lookahead=1)
    host.cache(Request("a", PROMPT[:16] + [1, 2, 3, 4, 5]))
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (12, True)


def test_a_prompt_of_whole_chunks() -> None:
    host = make_host(lookahead=1)
    host.cache(Request("a", PROMPT[:24]))
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT[:24]), 0) == (20, True)


@pytest.mark.parametrize("local", [20, 24])
def test_tokens_that_the_engine_drops_of_its_own_hit_are_not_loaded(local: int) -> None:
    host = make_host(lookahead=1)
    host.cache(Request("a", PROMPT))
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), local) == (0, False)


def test_a_single_chunk_is_computed() -> None:
    host = make_host(lookahead=1)
    host.cache(Request("a", PROMPT[:7]))
    assert host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0) == (0, False)


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,), (9, 12)])
@pytest.mark.parametrize("lookahead", [1, 6])
def test_all_groups_serve_the_end_of_the_load_and_of_what_covers_it(
    windows: tuple[int | None, ...], lookahead: int
) -> None:
    rng = random.Random(f"{windows} {lookahead}")
    for _ in range(20):
        host = make_host(windows=windows, lookahead=lookahead)
        host.cache(Request("a", LONGER), groups=len(windows))
        gone = {(group, chunk) for group in range(len(windows)) for chunk in range(6) if rng.random() < 0.2}
        lost = [keys_of(PROMPT, group)[chunk] for group, chunk in gone]
        host.scheduler.manager.discard(lost, MissReason.EVICTED)

        def is_served(end: int, gone: set[tuple[int, int]] = gone) -> bool:
            first = [0 if window is None else max(0, end - window) // BLOCK for window in windows]
            return not any(first[group] <= chunk < end // BLOCK for group, chunk in gone)

        reach = max(end for end in range(0, 25, BLOCK) if is_served(end))
        expected = max((end for end in range(0, reach - lookahead + 1, BLOCK) if is_served(end)), default=0)
        found, _ = host.scheduler.get_num_new_matched_tokens(Request("b", PROMPT), 0)
        assert found == expected, (gone, reach)


def test_the_miss_is_told_of_the_chunk_that_was_missing() -> None:
    host = make_host(lookahead=1)
    host.cache(Request("a", PROMPT))
    host.scheduler.manager.discard(keys_of(PROMPT)[4:5], MissReason.FAILED)
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (12, True)
    blocks = host.blocks(7)
    host.scheduler.update_state_after_alloc(request, blocks, 12)
    host.report(host.idle().load_jobs["b"])
    host.run_new(request, blocks, computed=12)
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (explanation.from_tiers, explanation.recomputed) == ({"cpu": 12}, 14)
    assert (explanation.first_miss, explanation.first_missing_token) == (MissReason.FAILED, 16)


@pytest.mark.parametrize(
    ("lookahead", "expected"), [(0, [4, 8, 12]), (1, [4, 8, 12]), (2, [5, 9, 13]), (4, [7, 11])]
)
def test_a_chunk_is_stored_when_its_kv_is_final(lookahead: int, expected: list[int]) -> None:
    """The token after those of a step is known when the step is over. One token further is not."""
    host = make_host(lookahead=lookahead)
    request = Request("a", PROMPT[:1])
    host.scheduler.get_num_new_matched_tokens(request, 0)
    blocks = host.blocks(4)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    steps = [host.run_new(request, blocks)]
    for computed in range(1, 14):
        request.tokens.append(PROMPT[computed])
        steps.append(host.run_more(request, computed=computed, scheduled=1))
    assert [computed for computed, meta in enumerate(steps, 1) if meta.store_jobs] == expected


def test_drafts_that_are_not_verified_are_not_stored() -> None:
    host = make_host(lookahead=1)
    request = Request("a", PROMPT[:6], num_prompt_tokens=6)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    blocks = host.blocks(3)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    host.report(host.run_new(request, blocks).store_jobs["a"])
    request.tokens.append(PROMPT[6])
    assert not host.run_more(request, computed=6, scheduled=4).store_jobs, "three of them are drafts"
    request.tokens += PROMPT[7:9]  # one was accepted
    assert host.run_more(request, computed=8, scheduled=4).store_jobs


def test_chunks_that_cover_the_lookahead_are_promoted_too() -> None:
    host = TieredHost(settings={"lookahead": 1})
    host.tier.held = set(keys_of(PROMPT))
    request = Request("a", PROMPT)
    assert host.ask(request) is None
    host.host.idle()
    (job,) = host.tier.promotions.values()
    assert job.keys == keys_of(PROMPT)
    host.tier.finish(job.job_id)
    host.end_step()
    assert host.ask(request) == 20
    host.load(request)
    explanation = host.scheduler.explain("a")
    assert explanation is not None
    assert (explanation.from_tiers, explanation.recomputed) == ({"disk": 20}, 6)
    assert explanation.first_miss is None
    host.scheduler.request_finished(request)
    host.tiered.manager.check()


def test_nobody_waits_for_a_chunk_that_only_covers_the_lookahead() -> None:
    host = TieredHost(settings={"lookahead": 1})
    host.tier.held = set(keys_of(PROMPT))
    assert host.ask(Request("a", PROMPT), local=20) == 0
