"""Groups with blocks of different sizes: where a load may end, what it brings, and what is worth storing.

A small engine without numbers plays the part of vLLM. Each token's place in its cache holds the name of the
prefix that the token ends, so that a wrong block is seen wherever it would be attended to.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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
from tests.unit.test_connector_promotion import TieredHost

from kvtier.connector import (
    BoundaryState,
    NewRequest,
    OffloadingConnectorMetadata,
    OffloadingConnectorScheduler,
    StepView,
)
from kvtier.connector.state import GroupState
from kvtier.keys import OffloadKey
from kvtier.offload import CPULoadStoreSpec, GPULoadStoreSpec
from kvtier.offload.base import ReqContext
from kvtier.transfer.base import NULL_BLOCK
from kvtier.transfer.plan import JobBounds, pair_blocks

Ints = npt.NDArray[np.int64]

_NUM_BLOCKS = 400


class Shape(NamedTuple):
    """The groups of a model, and where its loads may end."""

    sizes: tuple[int, ...]
    windows: tuple[GroupKind, ...]
    ends: int
    """With chunks of one block, loads end at multiples of this."""

    def __str__(self) -> str:
        return "-".join(f"{size}{_show(kind)}" for size, kind in zip(self.sizes, self.windows, strict=True))

    @property
    def states(self) -> list[int]:
        """The groups of recurrent states."""
        return [group for group, kind in enumerate(self.windows) if isinstance(kind, State)]

    @property
    def attention(self) -> list[int]:
        """The other groups."""
        return [group for group in range(len(self.sizes)) if group not in self.states]


def _show(kind: GroupKind) -> str:
    if isinstance(kind, State):
        return "s"
    return f"c{kind.size}" if isinstance(kind, ChunkedLocal) else f"w{kind or ''}"


def _first_seen(kind: GroupKind, position: int) -> int:
    """Return the first token that a token at this position looks at."""
    if isinstance(kind, ChunkedLocal):
        return position // kind.size * kind.size
    return max(0, position - kind + 1) if isinstance(kind, int) else 0


SHAPES = [
    Shape((16, 16), (None, 1), 16),
    Shape((16, 12), (None, 1), 4),
    Shape((16, 12), (None, 8), 4),
    Shape((16, 12), (None, 13), 4),
    Shape((12, 16), (None, 30), 4),
    Shape((16, 24), (None, 9), 8),
    Shape((24, 16), (None, 40), 8),
    Shape((16, 32), (None, 17), 16),
    Shape((32, 16), (None, 16), 32),
    Shape((32, 8), (None, 9), 32),
    Shape((12, 16), (None, None), 4),
    Shape((16, 32, 16), (None, None, 20), 16),
    Shape((16, 32, 48), (None, 33, 70), 16),
    Shape((48, 16, 36), (None, 5, 40), 12),
    Shape((12, 16), (20, 10), 4),
    Shape((32, 16), (20, 40), 32),
    Shape((16, 16), (None, ChunkedLocal(32)), 16),
    Shape((16, 12), (None, ChunkedLocal(20)), 4),
    Shape((8, 8, 8), (None, ChunkedLocal(24), 10), 8),
    Shape((16,), (ChunkedLocal(48),), 16),
    Shape((16, 16), (None, STATE), 16),
    Shape((16, 32), (None, STATE), 32),
    Shape((32, 16), (STATE, None), 32),
    Shape((24, 8, 16), (None, STATE, STATE), 48),
    Shape((8, 8, 24), (None, 9, STATE), 24),
    Shape((8, 8, 16), (12, ChunkedLocal(16), STATE), 16),
    Shape((16, 8), (STATE, STATE), 16),
]

FEW_WINDOWS = Shape((64, 16, 4, 4), (None, 32, 8, 64), 64)
"""As in DeepSeek V4: the windows of all ends take many times the chunks of full attention."""


def _names(tokens: Sequence[int]) -> Ints:
    """Return for each token a number that stands for all tokens up to it."""
    names, name = [], 0
    for token in tokens:
        name = hash((name, token))
        names.append(name)
    return np.array(names, np.int64)


@dataclass
class Running:
    """A request with blocks."""

    request: Request
    rows: list[list[int]]
    computed: int
    names: Ints
    borrowed: set[int] = field(default_factory=set)
    """Blocks of a parent, which it does not give back."""
    saved: dict[tuple[int, int], int] = field(default_factory=dict)
    """By group and boundary, the blocks of states that it keeps."""


class SmallEngine:
    """Gives blocks as vLLM does, and looks at all that each token attends to.

    A block of a state group holds the name of the prefix that its state stands for. Steps end at boundaries
    of states where they can, and a share of the states reached there is offered.
    """

    def __init__(
        self, shape: Shape, per_chunk: int, num_slots: int = 4096, seed: int = 0, offered: float = 1.0
    ) -> None:
        self.shape, self.per_chunk, self.rng = shape, per_chunk, random.Random(seed)
        self._boundary = lcm(*(shape.sizes[group] for group in shape.states))
        self._offered = offered
        self.host: Host = make_host(
            num_slots, shape.windows, block_sizes=shape.sizes, blocks_per_chunk=per_chunk
        )
        self.scheduler = self.host.scheduler
        self._bounds = JobBounds(len(shape.sizes), _NUM_BLOCKS, num_slots, per_chunk)
        self._cache = np.zeros((_NUM_BLOCKS, max(shape.sizes)), np.int64)
        self._pool = np.zeros((num_slots, per_chunk, max(shape.sizes)), np.int64)
        self._free = list(range(1, _NUM_BLOCKS))
        self.loaded: list[int] = []

    # -- one request -------------------------------------------------------------------------------

    def run(
        self,
        request: Request,
        *,
        step: int = 10**6,
        parent: Running | None = None,
        local: int = 0,
        last_is_computed: bool = True,
        keep: bool = False,
    ) -> Running:
        """Load what can be loaded and compute the rest, at most `step` tokens at a time.

        The first `local` tokens are in the blocks of a parent. With `last_is_computed` a load ends before
        the last token, as in vLLM; else the engine computes that one again, as the reference engine does.
        """
        count, is_async = self.scheduler.get_num_new_matched_tokens(request, local)
        assert count is not None
        assert is_async == (count > 0)
        assert local + count == self.best_end(request, local), "the longest end that all groups serve"
        end = local + count
        if last_is_computed:
            end = min(end, request.num_tokens - 1)
        running = self._open(request, parent, local, end)
        self.scheduler.update_state_after_alloc(request, self._ids(running), end - local)
        if end > local:
            self.loaded.append(end - local)
            meta = self.scheduler.build_connector_meta(StepView())
            self._move_all(meta)
        running.computed = min(end, request.num_tokens - 1)
        self._attend(running, running.computed, running.computed)
        self._compute(running, step)
        self.scheduler.request_finished(request, self._ids(running))
        if not keep:
            self.free(running)
        return running

    def _ids(self, running: Running) -> tuple[list[int], ...]:
        return tuple(list(row) for row in running.rows)

    def _open(self, request: Request, parent: Running | None, local: int, end: int) -> Running:
        """Give blocks up to `end`: null where the token computed next does not look, else a parent's or new
        ones.
        """
        position = min(end, request.num_tokens - 1)
        rows, borrowed = [], set()
        for group, (size, kind) in enumerate(zip(self.shape.sizes, self.shape.windows, strict=True)):
            if isinstance(kind, State):
                hit = parent.saved[group, local] if parent is not None and local and end == local else None
                borrowed.update([] if hit is None else [hit])
                last = self._take(1) if end > local else [hit] if hit is not None else []
                rows.append([NULL_BLOCK] * (end // size - 1) + last)
                continue
            skipped = _first_seen(kind, position) // size
            shared = parent.rows[group][skipped : local // size] if parent is not None else []
            row = [NULL_BLOCK] * skipped + shared
            borrowed.update(shared)
            rows.append(row + self._take(-(-end // size) - len(row)))
        return Running(request, rows, local, _names(request.tokens), borrowed)

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop(self.rng.randrange(len(self._free))) for _ in range(count)]
        self._cache[taken] = -1  # whatever somebody else has left there
        return taken

    def free(self, running: Running) -> None:
        """Give all blocks back."""
        given = {NULL_BLOCK, *running.borrowed}
        self._free += sorted(
            {*(block for row in running.rows for block in row), *running.saved.values()} - given
        )
        for row in running.rows:
            row.clear()
        running.saved.clear()

    def _compute(self, running: Running, step: int) -> None:
        """Compute the rest of a request in steps, telling the connector as vLLM does."""
        request, fresh = running.request, True
        while running.computed < request.num_tokens:
            start, stop = running.computed, self._end_of_step(running, step)
            self._leave_behind(running, start)
            new = tuple(
                self._advance_state(running, group, start, stop)
                if group in self.shape.states
                else self._take(max(0, -(-stop // size) - len(running.rows[group])))
                for group, size in enumerate(self.shape.sizes)
            )
            for row, block_ids in zip(running.rows, new, strict=True):
                row += block_ids
            offers = {request.request_id: self._reach_states(running, stop)}
            for group in self.shape.attention:
                self._cache[self._places(running, group, start, stop)] = running.names[start:stop]
            self._attend(running, start, stop)
            if fresh:
                view = NewRequest(request.request_id, self._ids(running), start)
                meta = self.host.scheduler.build_connector_meta(
                    StepView(
                        new=[view],
                        num_scheduled_tokens={request.request_id: stop - start},
                        boundary_states=offers,
                    )
                )
            else:
                blocks = new if any(new) else None
                meta = self.host.run_more(request, start, stop - start, blocks, boundary_states=offers)
            fresh, running.computed = False, stop
            self._move_all(meta)

    def _end_of_step(self, running: Running, step: int) -> int:
        """Return where a step ends: at a boundary of all states if it can, and at the last of these."""
        start, length = running.computed, running.request.num_tokens
        stop = min(start + step, length)
        if not self.shape.states:
            return stop
        last = (length - 1) // self._boundary * self._boundary
        stop = min(stop, last) if start < last else stop
        aligned = stop // self._boundary * self._boundary
        return aligned if start < aligned else stop

    def _advance_state(self, running: Running, group: int, start: int, stop: int) -> list[int]:
        """Return new blocks for the state after `stop` tokens, if it is not in the block of that before.

        The state before must be that of the tokens so far. Its block is given back unless it is kept.
        """
        row, count = running.rows[group], -(-stop // self.shape.sizes[group])
        if start:
            assert self._cache[row[-1], 0] == running.names[start - 1]
        if count == len(row):
            return []
        if row and row[-1] not in {*running.borrowed, *running.saved.values()}:
            self._free.append(row[-1])
        if row:
            row[-1] = NULL_BLOCK
        return [NULL_BLOCK] * (count - len(row) - 1) + self._take(1)

    def _reach_states(self, running: Running, stop: int) -> list[BoundaryState]:
        """Write the states after `stop` tokens, and return those that are offered."""
        offers = []
        for group in self.shape.states:
            block = running.rows[group][-1]
            self._cache[block, 0] = running.names[stop - 1]
            if stop % self.shape.sizes[group] == 0 and self.rng.random() < self._offered:
                running.saved[group, stop] = block
                offers.append(BoundaryState(group, block, stop))
        return offers

    def _leave_behind(self, running: Running, start: int) -> None:
        """Free what windows have left; the connector is not told of it."""
        for size, kind, row in zip(self.shape.sizes, self.shape.windows, running.rows, strict=True):
            for position in range(_first_seen(kind, start) // size):
                block, row[position] = row[position], NULL_BLOCK
                if block != NULL_BLOCK and block not in running.borrowed:
                    self._free.append(block)

    def _places(self, running: Running, group: int, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return where tokens of a request are: blocks, and offsets in them."""
        blocks, offsets = np.divmod(np.arange(start, stop), self.shape.sizes[group])
        return np.array([running.rows[group][block] for block in blocks], np.int64), offsets

    def _attend(self, running: Running, start: int, stop: int) -> None:
        """Look at all tokens before `stop` that one from `start` on sees."""
        for group in self.shape.attention:
            first = _first_seen(self.shape.windows[group], start)
            places = self._places(running, group, first, stop)
            assert NULL_BLOCK not in places[0]
            assert self._cache[places].tolist() == running.names[first:stop].tolist()

    # -- what workers do ---------------------------------------------------------------------------

    def _move_all(self, meta: OffloadingConnectorMetadata) -> None:
        for req_id, (pool, cache) in meta.reqs_to_load.items():
            self._move(cache, pool, is_load=True)
            self.host.report(meta.load_jobs[req_id])
        for req_id, (cache, pool) in meta.reqs_to_store.items():
            self._move(cache, pool, is_load=False)
            self.host.report(meta.store_jobs[req_id])

    def _move(self, cache: Any, pool: Any, is_load: bool) -> None:
        assert isinstance(cache, GPULoadStoreSpec)
        assert isinstance(pool, CPULoadStoreSpec)
        plan = pair_blocks(cache, pool, self._bounds)
        if is_load:
            self._cache[plan.blocks] = self._pool[plan.slots, plan.indices]
        else:
            self._pool[plan.slots, plan.indices] = self._cache[plan.blocks]

    def can_serve(self, parent: Running, local: int) -> bool:
        """Return whether a request's blocks have all that the token at `local` looks at."""
        sizes, kinds = self.shape.sizes, self.shape.windows
        return all(
            NULL_BLOCK
            not in parent.rows[group][
                _first_seen(kinds[group], local) // sizes[group] : local // sizes[group]
            ]
            for group in self.shape.attention
        ) and all(local == 0 or (group, local) in parent.saved for group in self.shape.states)

    # -- the naive model ---------------------------------------------------------------------------

    def best_end(self, request: Request, local: int) -> int:
        """Try all ends, and of each look at every token that is needed: is the chunk that holds it there?"""
        step = self.shape.ends * self.per_chunk
        ready = [self.ready(request, group) for group in range(len(self.shape.sizes))]
        longest = request.num_tokens - bool(self.shape.states)
        ends = range(longest // step * step, local, -step)
        return next(
            (end for end in ends if all(self._serves(ready, local, end, g) for g in range(len(ready)))),
            local,
        )

    def _serves(self, ready: list[list[bool]], local: int, end: int, group: int) -> bool:
        size = self.shape.sizes[group] * self.per_chunk
        needed = range(max(local, _first_needed(self.shape.windows[group], end)), end)
        return all(token // size < len(ready[group]) and ready[group][token // size] for token in needed)

    def ready(self, request: Request, group: int) -> list[bool]:
        """Return which of a request's chunks are stored."""
        keys = _keys(self.scheduler, request, group)
        return [found is True for found in self.scheduler.manager.lookup_many(keys, ReqContext())]


def _first_needed(kind: GroupKind, end: int) -> int:
    """Return the first token whose chunk a load up to `end` needs; of a state the one before `end`."""
    if isinstance(kind, int):
        return max(0, end - kind)
    return end - 1 if isinstance(kind, State) else _first_seen(kind, end - 1)


def _keys(scheduler: OffloadingConnectorScheduler, request: Request, group: int) -> list[OffloadKey]:
    """Return the keys of a request's chunks in a group."""
    state = GroupState(scheduler._geometry.groups[group])
    state.extend_keys(request.block_hashes)
    return state.keys


def _prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(length)]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    """Each of the models."""
    assert isinstance(request.param, Shape)
    return request.param


# -- by hand ---------------------------------------------------------------------------------------


def _loaded(shape: Shape, stored: list[int], asked: list[int], per_chunk: int = 1) -> int:
    engine = SmallEngine(shape, per_chunk)
    engine.run(Request("a", stored))
    engine.run(Request("b", asked))
    return sum(engine.loaded)


@pytest.mark.parametrize(
    ("shared", "loaded"),
    [(15, 0), (16, 12), (23, 12), (24, 16), (31, 16), (33, 24), (36, 32), (40, 32), (48, 48), (84, 80)],
)
def test_a_load_ends_inside_a_block_of_the_window(shared: int, loaded: int) -> None:
    """With blocks of 16 and 12 loads used to end at multiples of 48 alone."""
    prompt = _prompt(0, 85)
    assert _loaded(Shape((16, 12), (None, 8), 4), prompt[:shared], prompt) == loaded


def test_a_load_ends_inside_a_chunk_of_a_full_group() -> None:
    """The second group has tokens 0 to 48 whole, of which the first can serve 32."""
    shape, prompt = Shape((16, 24), (None, None), 8), _prompt(0, 50)
    engine = SmallEngine(shape, 1)
    engine.run(Request("a", prompt))
    engine.scheduler.manager.discard([_keys(engine.scheduler, Request("b", prompt), 0)[2]])
    engine.run(Request("b", prompt))
    assert engine.loaded == [32]


@pytest.mark.parametrize("last_is_computed", [False, True])
def test_a_prompt_of_whole_chunks_is_loaded_but_for_its_last_token(last_is_computed: bool) -> None:
    shape, prompt = Shape((16, 12), (None, 13), 4), _prompt(0, 96)
    engine = SmallEngine(shape, 1)
    engine.run(Request("a", prompt))
    stored = engine.scheduler.stats.stores
    engine.run(Request("b", prompt), last_is_computed=last_is_computed)
    assert engine.loaded == [95 if last_is_computed else 96]
    assert engine.scheduler.stats.stores == stored, "nothing of it is stored again"


def test_a_tier_is_asked_about_the_chunk_that_an_end_lies_in() -> None:
    """Tokens 24 to 36 of the window are needed for a load that ends at 32."""
    host, prompt = TieredHost(windows=(None, 8), settings={"block_sizes": (16, 12)}), _prompt(0, 40)
    request = Request("a", prompt)
    full, window = (_keys(host.scheduler, request, group) for group in (0, 1))
    host.tier.held = {*full, *window}
    host.tier.unknown = set(host.tier.held)
    assert host.scheduler.get_num_new_matched_tokens(request, 0, 32) == (None, False)
    host.host.idle()
    ((asked, _),) = host.tier.asked
    assert asked == [window[0], full[0], window[1], full[1], window[2]], "from head to tail"
    host.tier.answer()
    host.end_step()
    assert host.scheduler.get_num_new_matched_tokens(request, 0, 32) == (None, False)
    host.host.idle()
    (job,) = host.tier.promotions.values()
    assert job.keys == [window[2], *full]
    host.tier.finish(job.job_id)
    host.end_step()
    assert host.scheduler.get_num_new_matched_tokens(request, 0, 32) == (32, True)


# -- against the naive model -----------------------------------------------------------------------


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_chunks_that_are_not_stored_are_never_missed(shape: Shape, per_chunk: int) -> None:
    """Of a prompt that was computed in one step, all is found again that its complete chunks can serve.

    With states a step ends where a load may end, for a state to be there.
    """
    prompt, step = _prompt(0, 300), shape.ends * per_chunk
    engine = SmallEngine(shape, per_chunk)
    engine.run(Request("a", prompt), step=step if shape.states else 300)
    for shared in (*range(1, 100, 7), 144, 192, 288):
        ends = [end for end in range(step, shared + 1, step) if _is_complete(shape, per_chunk, end, shared)]
        asked = Request(f"b{shared}", prompt[:shared] + [77] * 40)
        expected = max(ends, default=0)
        assert engine.scheduler.get_num_new_matched_tokens(asked, 0) == (expected, expected > 0)


def _is_complete(shape: Shape, per_chunk: int, end: int, shared: int) -> bool:
    """Return whether the chunks that an end lies in are complete within the shared tokens."""
    return all(-(-end // (size * per_chunk)) * size * per_chunk <= shared for size in shape.sizes)


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_only_what_some_end_needs_is_stored(shape: Shape, per_chunk: int) -> None:
    engine, step, prompt = (
        SmallEngine(shape, per_chunk),
        shape.ends * per_chunk,
        Request("a", _prompt(0, 600)),
    )
    engine.run(prompt)
    for group in shape.attention:
        chunk, kind = shape.sizes[group] * per_chunk, shape.windows[group]
        needed = [
            any(
                end > at * chunk and _first_needed(kind, end) < (at + 1) * chunk
                for end in range(step, 1201, step)
            )
            for at in range(600 // chunk)
        ]
        assert engine.ready(prompt, group) == needed


def test_costly_windows_are_stored_for_the_ends_of_prompts_and_of_what_they_share() -> None:
    engine, system = SmallEngine(FEW_WINDOWS, 1), _prompt(0, 150)
    assert engine.scheduler._geometry.has_costly_windows

    def ask(req_id: str, prompt: list[int], offered: int) -> None:
        request = Request(req_id, prompt)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (offered, offered > 0)
        engine.run(request, step=40)

    first = Request("first", [*system, *_prompt(1, 100)])
    engine.run(first, step=40)
    windows = [sum(engine.ready(first, group)) for group in range(4)]
    assert windows == [3, 2, 2, 16], "those of the last end, and all of full attention"
    ask("again", [*system, *_prompt(1, 100)], 192)
    ask("next turn", [*system, *_prompt(1, 100), *_prompt(2, 90)], 192)
    ask("first to share", [*system, *_prompt(3, 100)], 0)
    ask("second to share", [*system, *_prompt(4, 100)], 128)


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
@pytest.mark.parametrize("num_slots", [20, 1000])
def test_no_token_ever_sees_a_wrong_one(shape: Shape, per_chunk: int, num_slots: int) -> None:
    """Random prompts that share prefixes, in steps of random lengths, over a pool that evicts."""
    _run_random_prompts(shape, per_chunk, num_slots)


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
@pytest.mark.parametrize("num_slots", [20, 1000])
def test_no_token_ever_sees_a_wrong_one_where_few_windows_are_stored(per_chunk: int, num_slots: int) -> None:
    _run_random_prompts(FEW_WINDOWS, per_chunk, num_slots)


def _run_random_prompts(shape: Shape, per_chunk: int, num_slots: int) -> None:
    engine = SmallEngine(shape, per_chunk, num_slots, seed=num_slots, offered=0.7)
    block = lcm(*shape.sizes)
    for number, (parent_tokens, tokens, shared) in enumerate(_workload(engine.rng)):
        parent = engine.run(Request(f"p{number}", parent_tokens), keep=True)
        places = [at for at in range(0, shared + 1, block) if engine.can_serve(parent, at)]
        engine.run(
            Request(f"r{number}", tokens),
            step=engine.rng.choice([5, 17, 40, 1000]),
            parent=parent,
            local=engine.rng.choice(places),
            last_is_computed=engine.rng.random() < 0.5,
        )
        engine.free(parent)
        engine.scheduler.check()
    assert engine.loaded or num_slots < 1000 or per_chunk == 3


def _workload(rng: random.Random) -> Iterator[tuple[list[int], list[int], int]]:
    """Yield pairs of prompts, and how many tokens at least they share before the last of the second."""
    prompts = [_prompt(0, 120)]
    for _ in range(12):
        old = rng.choice(prompts)
        shared = rng.randrange(len(old) + 1)
        new = old[:shared] + [rng.randrange(50) for _ in range(rng.randrange(1, 90))]
        prompts.append(new[: rng.choice([96, 144, 200])])
        yield old, prompts[-1], min(shared, len(prompts[-1]) - 1)


assert BLOCK == 4  # the hashes that all sizes above are multiples of
