"""The simulator: readers of traces, the optimum, and requests in simulated time.

`tests/engine/test_simulate.py` compares it with the reference engine.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvtier.errors import InputError
from kvtier.events.recording import RecordedBatch, RecordingWriter
from kvtier.events.types import BlockStored, KVEventBatch
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.policies import Ending, LRUPolicy, Slots
from kvtier.simulate import (
    Capacity,
    Served,
    Simulator,
    Speeds,
    Sweep,
    Trace,
    TraceRequest,
    make_config,
    make_settings,
    optimal_hits,
    read_trace,
    replay,
    run_sweep,
)
from kvtier.simulate.trace import PrefixIds

CHUNK, TOKEN_BYTES = 16, 1024
ROW = CHUNK * TOKEN_BYTES
SPEEDS = Speeds(prefill=1e4, bus=1e9, disk=1e8)


def make_trace(prompts: list[list[Any]], output: int = 1, every: float = 1.0) -> Trace:
    """Make a trace of prompts that are given by the names of their blocks."""
    ids = PrefixIds()
    requests = [
        TraceRequest(at * every, ids.number(names), len(names) * CHUNK, output, len(names) * CHUNK)
        for at, names in enumerate(prompts)
    ]
    return Trace("made", "made", CHUNK, requests)


def random_prompts(random: Random, count: int, names: int = 2, longest: int = 4) -> list[list[Any]]:
    return [[random.randrange(names) for _ in range(random.randrange(longest + 1))] for _ in range(count)]


def simulate(trace: Trace, memory: int, disk: int = 0, **settings: Any) -> tuple[Simulator, list[Served]]:
    speeds = settings.pop("speeds", SPEEDS)
    chosen = make_settings(memory * ROW, disk * ROW, **settings)
    simulator = Simulator(make_config(chosen, CHUNK, TOKEN_BYTES), speeds)
    served = list(replay(trace, simulator))
    simulator.manager.check()
    return simulator, served


# -- reading ---------------------------------------------------------------------------------------


def read(folder: Path, *lines: str, block_tokens: int = 16) -> Trace:
    file = folder / "trace"
    file.write_text("\n".join(lines) + "\n")
    return read_trace(file, block_tokens)


def test_mooncake_traces_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        '{"timestamp": 2000, "input_length": 1200, "output_length": 7, "hash_ids": [4, 5, 9]}',
        "",
        '{"timestamp": 500, "input_length": 1024, "output_length": 1, "hash_ids": [4, 5]}',
    )
    assert [request.time for request in trace.requests] == [0.5, 2.0]
    assert trace.seconds == 1.5
    assert trace.requests[1].output_tokens == 7
    assert [len(trace.chunks(request, 512)) for request in trace.requests] == [2, 2], "only full chunks"
    assert trace.num_chunks(512) == 2
    assert trace.num_chunks(1024) == 1
    assert trace.num_chunks(128) == 9, "a block of 512 has 4; the last one has 176 tokens"


def test_equal_names_in_different_prefixes_are_different_blocks(tmp_path: Path) -> None:
    trace = read(tmp_path, "time,blocks", "0,a b", "1,c b", "2,a b c")
    first, second, third = (request.ids.tolist() for request in trace.requests)
    assert not {*first} & {*second}
    assert third[:2] == first


def test_a_session_extends_its_prompts_and_answers(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "time,session,input_tokens,output_tokens,finish_reason,shared_prefix",
        "0,a,100,20,stop,agent:64",
        "1,b,100,20,,agent:64",
        "2,a,200,1,,",
        "3,a,50,1,,",
    )
    first, other, longer, anew = trace.requests
    assert longer.ids.tolist()[: 120 // 16] == first.ids.tolist()[: 120 // 16]
    assert first.ids.tolist()[:4] == other.ids.tolist()[:4], "the shared prefix"
    assert not {*first.ids.tolist()[4:]} & {*other.ids.tolist()[4:]}
    assert not {*anew.ids.tolist()} & {*longer.ids.tolist()}, "a shorter prompt begins anew"
    assert (first.finish_reason, other.finish_reason) == ("stop", None)
    assert len(trace.chunks(first, 16)) == 7, "the answer's chunks too"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["", ""], "trace: expected requests, got an empty file"),
        (["hello", "world"], "trace:1: expected JSON lines, or CSV with a header that has time"),
        (['{"time": 1}'], "trace:1: expected hash_ids (Mooncake's traces), or blocks, or session and"),
        (["time,blocks", "0,a", "1"], "trace:3: expected 2 columns, as the header has"),
        (["time,blocks", "soon,a"], "trace:2: time: expected a number of at least 0, got 'soon'"),
        (["time,blocks", "-1,a"], "trace:2: time: expected a number of at least 0, got '-1'"),
        (["time,blocks", "nan,a"], "trace:2: time: expected a number"),
        (["time,blocks,input_tokens", "0,a b,33"], "trace:2: blocks: expected one id for each 16 of 33"),
        (["time,session,input_tokens", "0,a,1.5"], "trace:2: input_tokens: expected a whole number"),
        (["time,session,input_tokens", "0,a,0"], "trace:2: input_tokens: expected a number of at least 1"),
        (["time,session,input_tokens", "0,,5"], "trace:2: session: expected a name, got None"),
        (['{"time": 0, "blocks": [1]}', '{"time": 0}'], "trace:2: blocks: expected a list of block ids"),
        (['{"time": 0, "blocks": [1]}', "[1]"], "trace:2: expected a JSON object, got '[1]'"),
        (['{"time": 0, "blocks": [1.5]}'], "trace:1: blocks: expected a list of block ids, got [1.5]"),
        (
            ['{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}'],
            "trace:1: hash_ids: expected 2 whole numbers, one for each 512 of 600 tokens, got [1]",
        ),
        (
            ["time,session,input_tokens,shared_prefix", "0,a,9,many"],
            "trace:2: shared_prefix: expected a number of tokens, or name:tokens, got 'many'",
        ),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, *lines)
    assert message in str(caught.value)


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="expected JSON lines, CSV or a recording"):
        read_trace(tmp_path / "trace")
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")


def test_a_row_of_csv_may_be_long(tmp_path: Path) -> None:
    blocks = [f"{number:016x}" for number in range(10_000)]
    trace = read(tmp_path, "time,blocks", f"0,{' '.join(blocks)}")
    assert trace.requests[0].prompt_tokens == 16 * len(blocks)
    with pytest.raises(InputError, match=r"trace:2: expected a row of CSV: field larger than field limit"):
        read(tmp_path, "time,blocks", f"0,{'0' * (17 << 20)}")


def stored(parent: int | None, *hashes: int, medium: str = "GPU") -> BlockStored:
    return BlockStored([*hashes], parent, [0] * 4 * len(hashes), 4, None, medium, None)


def test_requests_are_derived_from_a_recording(tmp_path: Path) -> None:
    batches = [
        (10.0, [stored(None, 1, 2)]),
        (10.5, [stored(2, 3), stored(None, 1, 2, medium="CPU")]),  # the next step of the same prompt
        (60.0, [stored(3, 4)]),  # the next turn
        (61.0, [stored(99, 5)]),  # its parent was stored before the recording
    ]
    with RecordingWriter(tmp_path / "trace") as writer:
        for seq, (time, events) in enumerate(batches):
            writer.write(RecordedBatch(time, seq, msgspec.msgpack.encode(KVEventBatch(time, events))))
    trace = read_trace(tmp_path / "trace")
    found = [(request.time, request.prompt_tokens) for request in trace.requests]
    assert found == [(0.0, 12), (50.0, 16), (51.0, 8)]
    assert trace.requests[1].ids.tolist()[:3] == trace.requests[0].ids.tolist()
    assert trace.block_tokens == 4
    assert any("Of 1 requests the first blocks" in note for note in trace.notes)


@pytest.mark.parametrize("stores", [[(1, 1)], [(2, 1), (3, 2), (1, 3)]])
def test_a_recording_in_which_a_block_follows_itself_is_refused(
    tmp_path: Path, stores: list[tuple[int, int]]
) -> None:
    """Guards a search for the head of a prefix that has none: it took all memory, and did not end."""
    with RecordingWriter(tmp_path / "trace") as writer:
        for seq, (parent, block) in enumerate([*stores, (1, 9)]):
            batch = KVEventBatch(10.0 * seq, [stored(parent, block)])
            writer.write(RecordedBatch(batch.ts, seq, msgspec.msgpack.encode(batch)))
    with pytest.raises(InputError, match=r"trace: expected blocks that follow others, got [123], which"):
        read_trace(tmp_path / "trace")


# -- the optimum -----------------------------------------------------------------------------------


def best_by_trying(prompts: list[tuple[int, ...]], capacity: int) -> int:
    """Return the most chunks that any choice of kept chunks finds."""

    @cache
    def best(at: int, kept: frozenset[int]) -> int:
        if at == len(prompts):
            return 0
        chunks = prompts[at]
        hits = next((depth for depth, chunk in enumerate(chunks) if chunk not in kept), len(chunks))
        held = sorted(kept.union(chunks))
        count = min(capacity, len(held))
        return hits + max(best(at + 1, frozenset(some)) for some in combinations(held, count))

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_is_what_trying_everything_finds(seed: int) -> None:
    random = Random(seed)
    trace = make_trace([names or [0] for names in random_prompts(random, 7, longest=3)])
    chunks = [tuple(trace.chunks(request, CHUNK).tolist()) for request in trace.requests]
    for capacity in (1, 2, 3, 4):
        hits = optimal_hits(trace, CHUNK, capacity)
        whole = [-(-tokens // CHUNK) for tokens in hits]  # a whole prompt lacks its last token
        assert sum(whole) == best_by_trying(chunks, capacity)


def test_the_optimum_bounds_every_policy_and_grows_with_capacity() -> None:
    trace = make_trace(random_prompts(Random(1), 150, names=3, longest=6))
    trace = Trace("", "", CHUNK, [request for request in trace.requests if request.prompt_tokens])
    infinite, last = sum(optimal_hits(trace, CHUNK, None)), 0
    for capacity in (4, 8, 16, 32, 1000):
        optimum = sum(optimal_hits(trace, CHUNK, capacity))
        assert last <= optimum <= infinite
        for policy in ("lru", "arc"):
            _, served = simulate(trace, capacity, policy=policy, load_if_faster=False)
            assert sum(one.pool_tokens for one in served) <= optimum
        last = optimum
    assert last == infinite == sum(one.pool_tokens for one in served)


def test_the_optimum_does_not_depend_on_how_blocks_are_cut() -> None:
    prompts = [names or [0] for names in random_prompts(Random(2), 200, names=3, longest=6)]
    trace = make_trace(prompts)
    whole, cut = optimal_hits(trace, CHUNK, 10), optimal_hits(trace, CHUNK // 4, 40)
    assert sum(cut) >= sum(whole)
    assert sum(optimal_hits(trace, CHUNK, None)) == sum(optimal_hits(trace, CHUNK // 4, None))


# -- requests in simulated time --------------------------------------------------------------------


def test_first_tokens_take_tokens_over_speed_and_bytes_over_bandwidth() -> None:
    _, (first, second) = simulate(make_trace([["a", "b", "c", "d"]] * 2), memory=8)
    assert first == Served(0, 0, 64, pytest.approx(64 / 1e4))
    load = 4 * ROW / 1e9 + 0.01
    assert second == Served(63, 0, 1, pytest.approx(load + 1 / 1e4)), "the last token is computed"


def test_chunks_that_left_the_pool_come_from_the_disk() -> None:
    prompts = [["a", 1, 2], ["b", 1, 2], ["a", 1, 2, 3]]
    _, served = simulate(make_trace(prompts, output=2), memory=5, disk=32, load_if_faster=False)
    moved = ROW / 1e8 + 3 * ROW / 1e9 + 0.01 + 16 / 1e4
    assert served[2] == Served(32, 16, 16, pytest.approx(moved)), "the tail had left"


def test_a_disk_that_is_too_slow_is_tried_and_then_left_alone() -> None:
    random = Random(3)
    prompts = [[random.randrange(40), *range(12)] for _ in range(200)]
    slow = Speeds(prefill=1e4, bus=1e9, disk=1e5)
    _, served = simulate(make_trace(prompts), memory=40, disk=600, speeds=slow)
    _, fast = simulate(make_trace(prompts), memory=40, disk=600, speeds=Speeds(1e4, 1e9, 1e8))
    assert sum(one.disk_tokens for one in served) < 200, "the first try, when nothing is known"
    assert sum(one.disk_tokens for one in fast) > 10_000
    late = [one for one in served if one.first_token > 13 * CHUNK / 1e4 + 0.02]
    assert 1 <= len(late) <= 10, "what a wait costs, it costs seldom"


def test_the_write_limit_counts_hours_of_the_trace() -> None:
    prompts: list[list[Any]] = [[at] for at in range(48)]
    within, _ = simulate(make_trace(prompts, every=3600.0), 8, 100, write_limit=24 * ROW)
    beyond, _ = simulate(make_trace(prompts, every=60.0), 8, 100, write_limit=24 * ROW)
    assert within.disk is not None
    assert beyond.disk is not None
    assert within.disk.stats().demoted == 48, "one row an hour"
    assert beyond.disk.stats().demoted == 24, "all rows in one hour"


def test_rows_are_written_ahead_of_their_eviction() -> None:
    prompts = [[at % 60, 1] for at in range(120)]
    simulator, served = simulate(make_trace(prompts), 32, 200, write="evict", load_if_faster=False)
    assert simulator.disk is not None
    assert simulator.disk.stats().demoted == 120
    assert sum(one.disk_tokens for one in served[60:]) > 0


class WatchingPolicy(LRUPolicy):
    """Remembers how requests ended, and when."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.endings: list[tuple[float, Ending]] = []

    def end_request(self, slots: Slots, reused: npt.NDArray[np.bool_], ending: Ending) -> None:
        self.endings.append((self.clock(), ending))
        super().end_request(slots, reused, ending)


def test_policies_see_the_time_of_the_trace_and_how_requests_end(tmp_path: Path) -> None:
    lines = ["0,a,40,9,stop", "5,a,60,7,tool_calls", "9,b,40,3,length"]
    trace = read(tmp_path, "time,session,input_tokens,output_tokens,finish_reason", *lines)
    simulator, _ = simulate(trace, 32, policy=f"{__name__}:WatchingPolicy")
    assert isinstance(simulator.manager, CPUOffloadingManager)
    assert isinstance(simulator.manager.policy, WatchingPolicy)
    expected = [(0.0, Ending(9, "turn")), (5.0, Ending(7, "tool")), (9.0, Ending(3, "unknown"))]
    assert simulator.manager.policy.endings == expected


def test_sweeps_cover_every_combination_in_several_processes() -> None:
    trace = make_trace([names or [0] for names in random_prompts(Random(4), 60, names=3, longest=5)])
    sizes = Capacity("20%", share=0.2), Capacity("1MiB", size=1 << 20)
    disks = Capacity("0", size=0), Capacity("2MiB", size=2 << 20)
    sweep = Sweep(sizes, disks, ("lru", "arc"), (32,), TOKEN_BYTES, SPEEDS, memory_price=2.0, disk_price=0.1)
    results = run_sweep(trace, sweep, jobs=2)
    assert [result.cell for result in results] == sweep.cells(trace)
    assert len(results) == 8
    assert results == run_sweep(trace, sweep, jobs=1)
    for result in results:
        total = trace.prompt_tokens
        assert result.tokens_saved + result.tokens_computed == total
        assert result.hit_rate_memory + result.hit_rate_disk == pytest.approx(result.hit_rate)
        assert result.hit_rate <= result.hit_rate_optimum <= result.hit_rate_infinite
        gib = result.cell.memory_bytes * 2.0 + result.cell.disk_bytes * 0.1
        monthly = result.tokens_saved / trace.seconds * 30 * 86_400
        assert result.cost_per_million_tokens == pytest.approx(gib / (1 << 30) / monthly * 1e6)


@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
@pytest.mark.parametrize("write", ["through", "evict"])
def test_room_that_a_trace_cannot_fill_costs_no_memory(policy: str, write: str) -> None:
    """Guards books for all slots of a fleet's disk, which take more memory than a machine has."""
    trace = make_trace([names or [0] for names in random_prompts(Random(5), 200, names=3, longest=5)])
    found = []
    for size in (20 << 20, 1 << 50):
        room = (Capacity("", size=size),)
        sweep = Sweep(room, room, (policy,), (CHUNK,), TOKEN_BYTES, SPEEDS, write)
        (result,) = run_sweep(trace, sweep, jobs=1)
        assert result.hit_rate == result.hit_rate_optimum == result.hit_rate_infinite > 0.5
        found.append((result.hit_rate_memory, result.first_token_p99, result.disk_written_per_day))
    assert found[0] == found[1]
