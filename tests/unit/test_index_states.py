"""Workers with recurrent layers: a prefix counts up to the last block whose states the worker holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.seeds import seeds

from kvtier.events.publish.state import PublishedState
from kvtier.events.types import AllBlocksCleared, BlockRemoved, BlockStored
from kvtier.events.wire import EventEncoder, frame_batch
from kvtier.index import PrefixIndex
from kvtier.index.base import MAX_AREAS

SIZE = 2
GPU, CPU, DISK = "GPU", "CPU", "STORAGE"
MEDIA = (GPU, CPU, DISK)
FULL, STATE = "full_attention", "mamba"
CHAIN = list(range(101, 109))
"""Eight blocks of one prompt; block `n` has the tokens `(n, n)`."""
TOKENS = [block for block in CHAIN for _ in range(SIZE)]


@pytest.fixture(params=["python", "numba"])
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
    return str(request.param)


@pytest.fixture(params=["engine", "xxh3"])
def index(form: str, request: pytest.FixtureRequest) -> Iterator[PrefixIndex]:
    made = PrefixIndex(keys=request.param, block_size=SIZE, budget=4 << 20, form=form, counting="set")
    yield made
    made.check()


def stored(first: int, end: int, kind: str | None = FULL, group: int = 0, medium: str = GPU) -> BlockStored:
    """Store the blocks `[first, end)` of the chain in a group."""
    blocks = CHAIN[first:end]
    return BlockStored(
        list(blocks), CHAIN[first - 1] if first else None, [block for block in blocks for _ in range(SIZE)],
        SIZE, None, medium, None, group_idx=group, kv_cache_spec_kind=kind,
    )  # fmt: skip


def states(*ends: int, group: int = 1, medium: str = GPU, kind: str | None = STATE) -> list[BlockStored]:
    """Store the states after so many blocks."""
    return [stored(end - 1, end, kind, group, medium) for end in ends]


def sparse(first: int, end: int, *ends: int, group: int = 1, medium: str = GPU) -> BlockStored:
    """Store states as vLLM does: the tokens and the parent of a run, the hashes of those that it keeps."""
    return replace(stored(first, end, STATE, group, medium), block_hashes=[CHAIN[at - 1] for at in ends])


def removed(*ends: int, group: int = 1, medium: str = GPU) -> BlockRemoved:
    return BlockRemoved([CHAIN[end - 1] for end in ends], medium, group_idx=group)


def apply(index: PrefixIndex, *events: Any, worker: str = "a") -> None:
    """Apply events from the wire, as a subscriber does."""
    encoder = EventEncoder()
    index.apply(worker, index.decoder()(frame_batch(1.0, [encoder.event(event) for event in events], 0)))


def columns(index: PrefixIndex, worker: str = "a", length: int = len(CHAIN)) -> list[int]:
    """Return a worker's seven counts."""
    match = index.match_tokens(np.array(TOKENS[: length * SIZE])) if index.keys == "xxh3" else None
    match = match or index.match(CHAIN[:length])
    row = match.workers.index(worker)
    return [int(match.on_any_tier[row]), *match.on_tier[row].tolist(), *match.down_to_tier[row].tolist()]


def test_a_prefix_ends_at_the_last_state(index: PrefixIndex) -> None:
    apply(index, stored(0, 6), *states(2, 5))
    assert columns(index) == [5, 5, 0, 0, 5, 5, 5]
    assert columns(index, length=4) == [2, 2, 0, 0, 2, 2, 2]
    assert columns(index, length=1) == [0] * 7


def test_every_state_group_must_hold_the_end(index: PrefixIndex) -> None:
    apply(index, stored(0, 6), *states(2, 5), *states(2, 6, group=2))
    assert columns(index)[0] == 2
    apply(index, *states(6))
    assert columns(index)[0] == 6


def test_states_beyond_the_attention_blocks_do_not_count(index: PrefixIndex) -> None:
    apply(index, stored(0, 3), *states(2), stored(4, 6), *states(6))
    assert columns(index)[0] == 2
    apply(index, stored(3, 4))
    assert columns(index)[0] == 6


def test_the_first_group_may_hold_states(index: PrefixIndex) -> None:
    apply(index, *states(3, group=0), stored(0, 4, group=3))
    assert columns(index)[0] == 3
    apply(index, removed(3, group=0))
    assert columns(index)[0] == 0


def test_states_sent_as_vllm_sends_them_are_known_by_their_hash(index: PrefixIndex) -> None:
    """Tokens are those of the whole run, so that they do not tell which block a hash stands for."""
    apply(index, sparse(0, 6, 3, 6), sparse(0, 6, 6, group=2), stored(0, 6))
    assert columns(index)[0] == 6
    assert not index.incomplete()
    apply(index, removed(6, group=2))
    assert columns(index)[0] == 0


def test_a_run_without_any_kept_state_announces_the_group(index: PrefixIndex) -> None:
    apply(index, sparse(0, 6), stored(0, 6))
    assert columns(index) == [0] * 7


def test_removals_and_clears_keep_the_group(index: PrefixIndex) -> None:
    apply(index, stored(0, 6), *states(2, 5))
    apply(index, removed(5))
    assert columns(index)[0] == 2
    apply(index, removed(2))
    assert columns(index)[0] == 0
    apply(index, AllBlocksCleared(), stored(0, 6))
    assert columns(index)[0] == 0
    apply(index, *states(4, kind=None))  # the kind is known from before
    assert columns(index)[0] == 4


def test_a_late_joiner_knows_groups_without_states(index: PrefixIndex) -> None:
    encoder = EventEncoder()
    state, out = PublishedState(encoder), list[bytes]()
    for event in (stored(0, 4), *states(2)):
        state.store(event, encoder.event(event), out)
    state.remove(removed(2), encoder.event(removed(2)), out)
    state.begin_snapshot()
    snapshot = [event for event in state.snapshot_events() if event is not None]
    index.apply("a", index.decoder()(frame_batch(1.0, snapshot, 0)))
    assert columns(index) == [0] * 7
    apply(index, *states(3))
    assert columns(index)[0] == 3


def test_a_reset_worker_has_the_groups_that_it_announces_again(index: PrefixIndex) -> None:
    apply(index, stored(0, 6), *states(5))
    index.clear("a")
    apply(index, stored(0, 6))
    assert columns(index)[0] == 6
    index.remove_worker("a")
    apply(index, stored(0, 6), worker="b")  # takes the number of the other
    assert columns(index, "b")[0] == 6


def test_a_state_inside_a_block_is_left_out(index: PrefixIndex) -> None:
    """vLLM may also keep the state after part of a block; no prefix of whole blocks ends there."""
    apply(index, stored(0, 6), *states(5))
    part = BlockStored([7], CHAIN[5], [CHAIN[6]], 1, None, GPU, None, group_idx=1, kv_cache_spec_kind=STATE)
    apply(index, part)
    assert columns(index)[0] == 5
    assert not index.incomplete()
    assert index.stats().ignored == 1


def test_a_state_does_not_teach_the_block_size(form: str) -> None:
    """It may be one inside a block; a state at the end of one counts, although its size was not known."""
    index = PrefixIndex(keys="engine", block_size=None, budget=4 << 20, form=form, counting="set")
    part = BlockStored([7], None, [1], 1, None, GPU, None, group_idx=1, kv_cache_spec_kind=STATE)
    apply(index, part, *states(3))
    assert index.block_size is None
    apply(index, stored(0, 6))
    assert index.block_size == SIZE
    assert columns(index)[0] == 3
    assert not index.incomplete()


def test_workers_without_states_beside_workers_with_states(index: PrefixIndex) -> None:
    for number in range(70):
        events = [stored(0, 6), *(states(1 + number % 6) if number % 2 else ())]
        apply(index, *events, worker=f"w{number}")
    for number in range(70):
        assert columns(index, f"w{number}")[0] == (1 + number % 6 if number % 2 else 6)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # The states of a prefix on the GPU must be on the GPU, unless the tiers below have all of it.
        ([stored(0, 6), *states(4, medium=CPU)], [0, 0, 0, 0, 0, 0, 0]),
        ([stored(0, 6), stored(0, 6, medium=CPU), *states(4, medium=CPU)], [4, 0, 4, 0, 0, 4, 4]),
        ([stored(0, 6, medium=CPU), *states(4)], [0, 0, 0, 0, 0, 0, 0]),
        # A prefix on the GPU is continued from where its states are, not from where its blocks end.
        (
            [stored(0, 4), *states(2), stored(2, 6, medium=CPU), *states(6, medium=CPU)],
            [6, 2, 0, 0, 2, 6, 6],
        ),
        (
            [stored(0, 4), *states(2), stored(4, 6, medium=CPU), *states(6, medium=CPU)],
            [2, 2, 0, 0, 2, 2, 2],
        ),
        # Below the GPU, blocks and states may be on different tiers.
        ([stored(0, 6, medium=CPU), *states(6, medium=DISK)], [6, 0, 0, 0, 0, 0, 6]),
        (
            [stored(0, 3, medium=CPU), stored(3, 6, medium=DISK), *states(5, medium=CPU)],
            [5, 0, 0, 0, 0, 0, 5],
        ),
        (
            [stored(0, 3, medium=DISK), stored(3, 6, medium=CPU), *states(5, medium=CPU)],
            [5, 0, 0, 0, 0, 0, 0],
        ),
        # As with attention groups, the states of one block must all be on the same tier.
        (
            [stored(0, 6, medium=CPU), *states(6, medium=DISK), *states(6, group=2, medium=CPU)],
            [0, 0, 0, 0, 0, 0, 0],
        ),
    ],
)
def test_tiers_of_blocks_and_of_states(index: PrefixIndex, events: list[Any], expected: list[int]) -> None:
    apply(index, *events)
    assert columns(index) == expected


def test_more_groups_than_areas_count_nothing(index: PrefixIndex) -> None:
    apply(index, stored(0, 6))
    for group in range(1, MAX_AREAS + 2):
        apply(index, *states(4, group=group))
    assert columns(index) == [0] * 7
    assert "places beyond" in index.incomplete()["a"]


# -- against a naive model -------------------------------------------------------------------------

BELOW = (CPU, DISK)
WINDOW = "sliding_window"
KINDS = [
    (FULL,),
    (FULL, FULL),
    (FULL, STATE),
    (STATE, STATE, FULL, FULL),
    (FULL, WINDOW, STATE),
    (WINDOW, STATE, STATE, FULL),
]


class Naive:
    """One worker: the groups that it has announced, and its blocks as `(group, medium, hash)`."""

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}
        self.held: set[tuple[int, str, Any]] = set()

    def apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
            return
        blocks = {(event.group_idx, event.medium, block) for block in event.block_hashes}
        if isinstance(event, BlockStored):
            self.kinds[event.group_idx] = event.kv_cache_spec_kind or ""
            self.held |= blocks
        else:
            self.held -= blocks

    def has(self, kind: str, media: tuple[str, ...], block: int) -> bool:
        groups = [group for group, its_kind in self.kinds.items() if its_kind == kind]
        return any(all((group, medium, block) in self.held for group in groups) for medium in media)

    def last(self, start: int, states: tuple[str, ...], *walk: tuple[str, ...]) -> int:
        """Return the longest end of blocks that are first on these media, then on those, and so on."""

        def holds(first: int, end: int, media: tuple[str, ...], *rest: tuple[str, ...]) -> bool:
            lead = next((n for n in range(first, end) if not self.has(FULL, media, CHAIN[n])), end)
            return lead == end or (bool(rest) and holds(lead, end, *rest))

        ends = [end for end in range(start + 1, 9) if self.has(STATE, states, CHAIN[end - 1])]
        return max((end for end in ends if holds(start, end, *walk)), default=start)

    def columns(self) -> list[int]:
        gpu = self.last(0, (GPU,), (GPU,))
        any_tier = (
            self.last(gpu, BELOW, BELOW) if STATE in self.kinds.values() else self.last(0, MEDIA, MEDIA)
        )
        alone = [gpu, self.last(0, (CPU,), (CPU,)), self.last(0, (DISK,), (DISK,))]
        down = [gpu, self.last(gpu, (CPU,), (CPU,)), self.last(gpu, BELOW, (CPU,), (DISK,))]
        return [any_tier, *alone, *down]


def random_event(rng: Random, kinds: tuple[str, ...], naive: Naive) -> Any:
    """Return a store or a removal in a random group and medium."""
    group = rng.randrange(len(kinds))
    kind, medium = kinds[group], rng.choice(MEDIA)
    if rng.random() < 0.2 and naive.held:
        group, medium, block = rng.choice(sorted(naive.held))
        return BlockRemoved([block], medium, group_idx=group)
    first = rng.randrange(8)
    end = rng.randrange(first + 1, 9)
    if kind == STATE:
        if rng.random() < 0.5:
            return sparse(first, end, end, group=group, medium=medium)
        first = rng.choice([first, end - 1])
    elif rng.random() < 0.5:
        first = 0
    return stored(first, end, kind, group, medium)


class History:
    """Workers that announce the same to an index and to naive models."""

    def __init__(self, index: PrefixIndex, seed: int) -> None:
        self.index, self.rng = index, Random(seed)
        self.kinds = {f"{seed}.{number}": self.rng.choice(KINDS) for number in range(5)}
        self.models = {worker: Naive() for worker in self.kinds}

    def run(self, seen: Counter[str]) -> None:
        for worker in self.kinds:
            self._announce(worker, self._whole_chain(worker))
        for _ in range(60):
            self._change(self.rng.choice(list(self.kinds)))
            for worker in self.kinds:
                self._compare(worker, seen)
        for worker in self.kinds:
            self.index.remove_worker(worker)

    def _change(self, worker: str) -> None:
        what, model = self.rng.random(), self.models[worker]
        if what < 0.01:
            self.index.clear(worker)
            self.models[worker] = Naive()
            self._announce(worker, self._whole_chain(worker))
        elif what < 0.02:
            self._announce(worker, AllBlocksCleared(), self._whole_chain(worker))
        else:
            count = self.rng.randrange(1, 5)
            self._announce(
                worker, *(random_event(self.rng, self.kinds[worker], model) for _ in range(count))
            )

    def _whole_chain(self, worker: str) -> BlockStored:
        """Return a store that names all blocks, so that none of them waits for its parent."""
        return stored(0, 8, FULL, self.kinds[worker].index(FULL), self.rng.choice(MEDIA))

    def _announce(self, worker: str, *events: Any) -> None:
        apply(self.index, *events, worker=worker)
        for event in events:
            self.models[worker].apply(event)

    def _compare(self, worker: str, seen: Counter[str]) -> None:
        model, told = self.models[worker], columns(self.index, worker)
        assert told == model.columns(), (worker, model.kinds, sorted(model.held))
        any_tier, gpu, *_, to_cpu, to_storage = told
        has_states = STATE in model.kinds.values()
        seen["no states"] += any_tier > 0 and not has_states
        seen["states"] += any_tier > 0 and has_states
        seen["GPU, then below"] += 0 < gpu < to_storage and has_states
        seen["CPU, then storage"] += gpu < to_cpu < to_storage and has_states
        seen["mixed below"] += to_storage < any_tier and has_states


@pytest.mark.parametrize("part", seeds(6, few=2))
def test_random_histories_agree_with_a_naive_model(index: PrefixIndex, part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(10 * part, 10 * part + 10):
        History(index, seed).run(seen)
    assert not index.incomplete()
    assert min(seen.values()) > 5, seen
