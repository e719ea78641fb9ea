"""Audits on the scheduler's side: which hits are audited, how jobs end, and what a mismatch does."""

from __future__ import annotations

import logging
from dataclasses import replace
from random import Random

import pytest
from tests.unit.connector_kit import (
    BLOCK,
    Clock,
    GroupKind,
    Host,
    ManagerOnlySpec,
    Request,
    make_config,
)

from kvtier.connector import KVConnectorOutput, OffloadingConnectorMetadata, OffloadingConnectorScheduler
from kvtier.connector.audit import Audits
from kvtier.connector.metadata import TransferReport
from kvtier.connector.state import ChunkGeometry
from kvtier.events.types import BlockRemoved, BlockStored
from kvtier.offload import CPUOffloadingManager, MissReason
from kvtier.transfer.base import AuditLoadStoreSpec, TransferResult

PROMPT = list(range(100, 126))  # 26 tokens: six blocks and a tail


def make_host(
    num_slots: int = 64,
    windows: tuple[GroupKind, ...] = (None,),
    world_size: int = 1,
    clock: Clock | None = None,
    audit: float = 1,
    **settings: object,
) -> Host:
    """Return a host whose scheduler audits every hit, whole: the draw is 0 each time."""
    config = make_config(windows, world_size, audit=audit, **settings)
    config = replace(config, number_format="bfloat16", audit_tolerance=0.1)
    spec = ManagerOnlySpec(config, CPUOffloadingManager(num_slots))
    host = Host(OffloadingConnectorScheduler(spec, clock or Clock(), Request.describe), world_size)
    host.scheduler._audits._rng = _Zero()
    return host


class _Zero(Random):
    """Draws that always choose the whole hit."""

    def random(self) -> float:
        return 0.0


def start_audit(
    host: Host, name: str = "b", prompt: list[int] = PROMPT, groups: int = 1
) -> tuple[Request, OffloadingConnectorMetadata, tuple[list[int], ...]]:
    """Ask about a kept prompt, which is to be computed, and compute it."""
    request = Request(name, prompt)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (0, False), "the choice is made once"
    blocks = host.blocks(-(-request.num_tokens // BLOCK), groups)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    return request, host.run_new(request, blocks), blocks


def report(host: Host, job_id: int, wrong: tuple[int, ...] = (), apart: float = 0.01) -> KVConnectorOutput:
    """Report an audit on every rank, with the positions of blocks that are too far apart."""
    reports = [
        TransferReport(
            rank,
            TransferResult(
                job_id,
                success=not wrong,
                failed_blocks=wrong or None,
                corrupt=bool(wrong),
                distance=0.9 if wrong else apart,
            ),
        )
        for rank in range(host.world_size)
    ]
    output = KVConnectorOutput(reports=reports)
    host.scheduler.update_connector_output(output)
    host.scheduler.check()
    return output


def free_slots(host: Host) -> int:
    manager = host.scheduler.manager
    assert isinstance(manager, CPUOffloadingManager)
    return manager.num_free


def test_an_audited_hit_is_computed_and_its_chunks_are_compared_with_the_kept_rows() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    free = free_slots(host)
    _request, meta, blocks = start_audit(host)
    (job_id,) = meta.audits
    req_id, (gpu, slots) = meta.audits[job_id]
    assert req_id == "b"
    assert isinstance(slots, AuditLoadStoreSpec)
    assert gpu.block_ids.tolist() == blocks[0][:6]  # type: ignore[attr-defined]
    assert len(slots.kept) == len(slots.block_ids) == 6
    assert not set(slots.kept.tolist()) & set(slots.block_ids.tolist())
    assert free_slots(host) == free - 6
    assert not meta.reqs_to_store, "nothing is stored twice"
    output = report(host, job_id)
    assert not output.distrusted
    assert free_slots(host) == free
    stats = host.scheduler.stats
    assert (stats.audited_chunks, stats.audit_mismatches, stats.stores) == (6, 0, 1)
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (explanation.first_miss, explanation.first_missing_token) == (MissReason.AUDITED, 0)
    assert explanation.recomputed == 26


def test_scratch_rows_are_never_found_or_announced() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    list(host.scheduler.take_events())
    _, meta, _ = start_audit(host)
    (job_id,) = meta.audits
    report(host, job_id)
    events = list(host.scheduler.take_events())
    assert not [event for event in events if isinstance(event, (BlockStored, BlockRemoved))], events


def test_a_wrong_row_is_dropped_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    _, meta, _ = start_audit(host)
    with caplog.at_level(logging.ERROR):
        output = report(host, next(iter(meta.audits)), wrong=(1, 2))
    assert not output.distrusted, "one audit is not several"
    assert "request b: 2 of 6 kept chunks" in caplog.text
    assert "tier cpu" in caplog.text
    assert "0.9" in caplog.text
    assert host.scheduler.stats.audit_mismatches == 2
    removed = [e for e in host.scheduler.take_events() if isinstance(e, BlockRemoved)]
    assert sum(len(event.block_hashes) for event in removed) == 2
    state = host.scheduler.manager.lookup_prefix(host.scheduler._requests["b"].all_keys(), None)  # type: ignore[arg-type]
    assert state == 1, "the chunks behind a wrong one are found no more"


def test_several_wrong_audits_make_the_process_leave_its_namespace(caplog: pytest.LogCaptureFixture) -> None:
    host = make_host()
    for name in "abc":
        host.cache(Request(name, [ord(name), *PROMPT]))
    host.cache(Request("other", list(range(500, 520))))
    outputs = []
    for name in "abc":
        _, meta, _ = start_audit(host, f"{name}2", [ord(name), *PROMPT])
        outputs.append(report(host, next(iter(meta.audits)), wrong=(0,)))
    assert [output.distrusted for output in outputs] == [False, False, True]
    assert "leaves its namespace" in caplog.text
    assert host.scheduler.stats.namespace_departures == 1
    assert free_slots(host) == 64, "rows that no audit has seen are dropped too"


def test_only_the_end_of_a_hit_is_audited_when_the_budget_is_small() -> None:
    host = make_host(audit=0.001)
    audits = host.scheduler._audits
    audits._hits_to_pass, audits._credit = 0, BLOCK + 1.0
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT)
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (20, True)
    blocks = host.blocks(7)
    host.scheduler.update_state_after_alloc(request, blocks, 20)
    job = host.idle().load_jobs["b"]
    host.report(job)
    meta = host.run_new(request, blocks, computed=20)
    ((_, (gpu, slots)),) = meta.audits.values()
    assert gpu.block_ids.tolist() == [blocks[0][5]]  # type: ignore[attr-defined]
    assert len(slots.kept) == 1  # type: ignore[attr-defined]


def test_the_budget_is_a_share_of_the_computed_tokens() -> None:
    config = replace(make_config(audit=0.001), number_format="bfloat16", audit_tolerance=0.1)
    manager, rng = CPUOffloadingManager(64), Random(1)
    audits = Audits(config, ChunkGeometry(config), manager, rng)
    audits._credit = 0.0
    spent = computed = hits = audited = 0
    for _ in range(20_000):
        tokens = audits._choose_tokens(rng.randrange(1, 200) * BLOCK)
        spent, audited, hits = spent + tokens, audited + bool(tokens), hits + 1
        audits.earn(500)
        computed += 500
    assert 0.0008 * computed < spent <= 0.001 * computed
    assert hits / 97 < audited < hits / 32


def test_no_audit_among_the_first_hits_and_some_among_a_few_hundred() -> None:
    config = replace(make_config(), number_format="bfloat16", audit_tolerance=0.1)
    for seed in range(50):
        audits = Audits(config, ChunkGeometry(config), CPUOffloadingManager(64), Random(seed))
        chosen = [audits._choose_tokens(1000) for _ in range(400)]
        assert not any(chosen[:32])
        assert sum(map(bool, chosen)) >= 4
        assert max(chosen) <= 1000


def test_without_a_share_or_a_tolerance_nothing_is_audited() -> None:
    for config in (
        replace(make_config(audit=0), number_format="bfloat16", audit_tolerance=0.1),
        make_config(audit=1),
    ):
        audits = Audits(config, ChunkGeometry(config), CPUOffloadingManager(64))
        assert [audits._choose_tokens(1000) for _ in range(400)] == [0] * 400


def test_an_audit_that_could_not_copy_is_no_mismatch() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    free = free_slots(host)
    _, meta, _ = start_audit(host)
    host.refuse(next(iter(meta.audits)))
    assert free_slots(host) == free
    assert host.scheduler.stats.audited_chunks == host.scheduler.stats.audit_mismatches == 0


def test_an_audit_that_is_never_reported_gives_its_slots_back_when_the_rank_is_done() -> None:
    clock = Clock()
    host = make_host(clock=clock)
    host.cache(Request("a", PROMPT))
    free = free_slots(host)
    _, meta, _ = start_audit(host)
    (job_id,) = meta.audits
    for _ in range(4):
        clock.now += 60
        host.scheduler.update_connector_output(KVConnectorOutput())
    assert host.scheduler.stats.expired == 1
    assert free_slots(host) < free
    orders = host.idle().jobs_to_end
    assert job_id in orders
    host.refuse(job_id)
    assert free_slots(host) == free
    assert host.scheduler.stats.audited_chunks == 0


def test_a_reset_voids_a_running_audit() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    _, meta, _ = start_audit(host)
    host.scheduler.reset_cache()
    output = report(host, next(iter(meta.audits)), wrong=(0,))
    assert not output.distrusted
    assert host.scheduler.stats.audit_mismatches == 0
    assert free_slots(host) == 64


def test_a_finished_request_holds_its_blocks_until_its_audit_is_copied() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    request, meta, blocks = start_audit(host)
    assert host.scheduler.request_finished(request, blocks) == (True, None)
    assert report(host, next(iter(meta.audits))).finished_sending == {"b"}


def test_a_block_that_an_audit_reads_is_fenced() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    _, meta, blocks = start_audit(host)
    (job_id,) = meta.audits
    other = Request("c", [7] * 8)
    host.scheduler.get_num_new_matched_tokens(other, 0)
    host.scheduler.update_state_after_alloc(other, (blocks[0][:2],), 0)
    assert host.run_new(other, (blocks[0][:2],)).jobs_to_flush == {job_id}


def test_a_full_pool_is_audited_with_few_slots_or_not_at_all() -> None:
    host = make_host(num_slots=6)
    host.cache(Request("a", PROMPT))
    _, meta, _ = start_audit(host)
    assert len(meta.audits) <= 1
    for job_id in meta.audits:
        report(host, job_id)
    host.scheduler.check()


def test_long_audits_compare_some_chunks_of_each_step() -> None:
    host = make_host(num_slots=1024, capacity=1 << 23)
    prompt = list(range(1000, 1000 + 200 * BLOCK))
    host.cache(Request("a", prompt))
    _request, meta, _ = start_audit(host, prompt=prompt)
    ((_, (gpu, slots)),) = meta.audits.values()
    assert 32 <= len(slots.kept) <= 64  # type: ignore[attr-defined]
    assert len(gpu.block_ids) == len(slots.kept)  # type: ignore[attr-defined]


def test_windowed_groups_are_audited_too() -> None:
    host = make_host(windows=(None, 8))
    host.cache(Request("a", PROMPT), groups=2)
    _request, meta, _blocks = start_audit(host, groups=2)
    ((_, (gpu, slots)),) = meta.audits.values()
    assert gpu.group_sizes[0] == 6  # type: ignore[attr-defined]
    assert gpu.group_sizes[1] > 0  # type: ignore[attr-defined]
    assert len(slots.kept) == sum(gpu.group_sizes)  # type: ignore[attr-defined]
    report(host, next(iter(meta.audits)))


def test_all_ranks_are_asked_and_any_of_them_finds_a_wrong_row() -> None:
    host = make_host(world_size=2)
    host.cache(Request("a", PROMPT))
    _, meta, _ = start_audit(host)
    (job_id,) = meta.audits
    good = TransferReport(0, TransferResult(job_id, success=True, distance=0.01))
    bad = TransferReport(
        1, TransferResult(job_id, success=False, failed_blocks=(0,), corrupt=True, distance=0.8)
    )
    host.scheduler.update_connector_output(KVConnectorOutput(reports=[good]))
    assert host.scheduler.stats.audited_chunks == 0
    host.scheduler.update_connector_output(KVConnectorOutput(reports=[bad]))
    assert host.scheduler.stats.audit_mismatches == 1
    assert host.scheduler._audits.largest_distance == 0.8


def test_a_preempted_request_is_not_audited_again() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    request, meta, _blocks = start_audit(host)
    report(host, next(iter(meta.audits)))
    host.run_more(request, 26, 0, preempted_req_ids={"b"})
    assert host.scheduler.get_num_new_matched_tokens(request, 0) == (24, True)


def test_an_engine_that_only_loads_audits_all_the_same() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    host.scheduler.spec.config = replace(host.scheduler.spec.config, may_store=False)
    _, meta, _ = start_audit(host)
    ((_, (_, slots)),) = meta.audits.values()
    assert len(slots.kept) == 6  # type: ignore[attr-defined]
    assert not meta.reqs_to_store


def test_each_chunk_is_audited_once() -> None:
    host = make_host()
    host.cache(Request("a", PROMPT))
    request = Request("b", PROMPT)
    host.scheduler.get_num_new_matched_tokens(request, 0)
    blocks = host.blocks(7)
    host.scheduler.update_state_after_alloc(request, blocks, 0)
    steps = [host.run_new(request, blocks, 0, 10)]
    steps += [host.run_more(request, computed, 8) for computed in (10, 18)]
    audited = [slots.kept.tolist() for meta in steps for _, (_, slots) in meta.audits.values()]  # type: ignore[attr-defined]
    assert [len(slots) for slots in audited] == [2, 2, 2]
    assert len({slot for slots in audited for slot in slots}) == 6
