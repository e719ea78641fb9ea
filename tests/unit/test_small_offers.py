"""Calls with a single chunk, as decoding makes them, do what calls with many do, whichever form the
structures have.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_arc import NaiveARC

import kvtier.policies.recency
import kvtier.slot_table
from kvtier.keys import OffloadKey
from kvtier.offload import CPUOffloadingManager, ReqContext
from kvtier.policies import ARCPolicy
from kvtier.policies.slots import SLOTS_BY, PythonBook, PythonGhosts, PythonRecency
from kvtier.testing.manager_suite import keys

CAPACITY, UNIVERSE = 10, 24
CONTEXTS = [ReqContext(req_id=f"request {n}") for n in range(3)]
NAMES = {key: number for number, key in enumerate(keys(*range(UNIVERSE)))}

Call = tuple[str, list[int], int]
calls = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "store", "fail", "load", "unload", "touch", "touch", "discard")),
        st.lists(st.integers(0, UNIVERSE - 1), min_size=1, max_size=8, unique=True),
        st.integers(0, len(CONTEXTS) - 1),
    ),
    max_size=60,
)


def together(call: Callable[[list[OffloadKey]], Any], batch: list[OffloadKey]) -> None:
    call(batch)


def one_by_one(call: Callable[[list[OffloadKey]], Any], batch: list[OffloadKey]) -> None:
    for key in batch:
        call([key])


@dataclass
class Driver:
    """Makes calls that are legal for a manager, each with a batch or with each of its chunks."""

    manager: CPUOffloadingManager
    split: Callable[[Callable[[list[OffloadKey]], Any], list[OffloadKey]], None] = together

    def __post_init__(self) -> None:
        self.read: list[OffloadKey] = []
        self.seen: list[Any] = []
        """Slots and evictions, in order."""

    def call(self, what: str, numbers: list[int], who: int) -> None:
        batch, context, manager = keys(*numbers), CONTEXTS[who], self.manager
        match what:
            case "store" | "fail":
                self.store(batch, context, success=what == "store")
            case "load":
                batch = [key for key in batch if manager.lookup(key, context)]
                self.split(
                    lambda part: self.seen.append(manager.prepare_load(part, context).block_ids.tolist()),
                    batch,
                )
                self.read += batch
            case "unload":
                # One end each: of two, the last frees a doomed chunk, and a batch does not tell them apart.
                over = list(dict.fromkeys(self.read))
                self.split(manager.complete_load, over)
                for key in over:
                    self.read.remove(key)
            case "touch":
                order = batch[::-1] if self.split is one_by_one else batch  # the last use is the most recent
                self.split(lambda part: manager.touch(part, context), order)
            case "discard":
                self.split(manager.discard, batch)
        manager.check()

    def store(self, batch: list[OffloadKey], context: ReqContext, *, success: bool) -> None:
        output = self.manager.prepare_store(batch, context)
        if output is not None:
            self.seen += [output.store_spec, list(output.evicted_keys)]
            self.split(lambda part: self.manager.complete_store(part, success), output.keys_to_store)

    def state(self) -> dict[str, Any]:
        """Return all that happened and all that decides what will."""
        manager, policy = self.manager, self.manager.policy
        events = [(event.removed, key) for event in manager.take_events() for key in event.keys]
        return {
            "seen": str(self.seen),
            "events": [(removed, NAMES[key]) for removed, key in events],
            "stats": manager.stats(),
            "held": [manager._table._book.get(key) for key in NAMES],
            "free": manager._table._book.free_slots().tolist(),
            "arrays": [a.tolist() for a in (manager._table.readers, manager._table.evictable)],
            "ranked": policy.ranked().tolist(),
            "learned": (policy.target, policy._ghosts.sizes()) if isinstance(policy, ARCPolicy) else None,
        }


def python_manager(policy: str) -> CPUOffloadingManager:
    """Return a manager of which nothing is in C."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvtier.slot_table, "SlotBook", PythonBook)
        patch.setattr(kvtier.policies.recency, "RecencyList", PythonRecency)
        patch.setattr(kvtier.policies.recency, "GhostLists", PythonGhosts)
        return CPUOffloadingManager(CAPACITY, policy)


@pytest.mark.skipif(SLOTS_BY == "python", reason="kvtier.native._slots was not compiled here")
@pytest.mark.parametrize("policy", ["lru", "arc"])
@given(calls, st.sampled_from((together, one_by_one)))
@settings(max_examples=60, deadline=None)
def test_managers_in_c_and_in_python_do_the_same(policy: str, script: list[Call], split: Any) -> None:
    one, other = Driver(CPUOffloadingManager(CAPACITY, policy), split), Driver(python_manager(policy), split)
    for call in script:
        one.call(*call)
        other.call(*call)
        assert one.state() == other.state()


@pytest.mark.parametrize("policy", ["lru", "arc"])
@given(calls)
@settings(max_examples=60, deadline=None)
def test_calls_after_an_offer_can_be_split(policy: str, script: list[Call]) -> None:
    """Ends of stores, loads, uses and discards of single chunks leave exactly what those of many leave."""
    one, other = (Driver(CPUOffloadingManager(CAPACITY, policy), split) for split in (together, one_by_one))
    for call in script:
        one.call(*call)
        other.call(*call)
        few, many = other.state(), one.state()
        few.pop("seen"), many.pop("seen")  # loads name their slots one by one
        assert few == many


def chunks_in_order(manager: CPUOffloadingManager) -> list[int]:
    """Return the chunks that are held, worst first."""
    return [NAMES[key] for key in manager._table._book.keys(manager.policy.ranked())]


@given(calls)
@settings(max_examples=60, deadline=None)
def test_offers_of_single_chunks_evict_and_rank_as_one_offer_does(script: list[Call]) -> None:
    """Slots may differ: the last chunk of an offer is the least recent, so it goes first where each is
    offered alone.
    """
    one, other = CPUOffloadingManager(CAPACITY, "lru"), CPUOffloadingManager(CAPACITY, "lru")
    for what, numbers, who in script:
        context = CONTEXTS[who]
        batch = [key for key in keys(*numbers) if one.lookup(key, context) is False]
        if what == "touch":
            one.touch(batch, context)
            one_by_one(lambda part, context=context: other.touch(part, context), batch[::-1])
            continue
        output = one.prepare_store(batch, context)
        outputs = [other.prepare_store([key], context) for key in batch[::-1]]
        assert output is not None
        assert output.evicted_keys == [key for part in outputs if part for key in part.evicted_keys]
        one.complete_store(batch)
        one_by_one(other.complete_store, batch)
        assert chunks_in_order(one) == chunks_in_order(other)
        first, second = one.take_events(), other.take_events()
        assert [(e.removed, k) for e in first for k in e.keys] == [
            (e.removed, k) for e in second for k in e.keys
        ]
        assert one.stats() == other.stats()
        other.check()


@pytest.mark.parametrize("seed", range(10))
def test_arc_with_single_chunks_against_its_model(seed: int) -> None:
    rng = random.Random(seed)
    manager, naive = CPUOffloadingManager(CAPACITY, policy := ARCPolicy(CAPACITY)), NaiveARC(CAPACITY)
    names: dict[int, OffloadKey] = {}
    for request in range(300):
        context, (key,) = ReqContext(req_id=f"request {request}"), keys(rng.randrange(UNIVERSE))
        if key in names.values():
            manager.touch([key], context)
            naive.touch([slot for slot, name in names.items() if name == key], [True])
            continue
        output = manager.prepare_store([key], context)
        assert output is not None
        victims = naive.evict(1, [True] * CAPACITY, names) if len(names) == CAPACITY else []
        assert output.evicted_keys == [names.pop(slot) for slot in victims]
        (slot,) = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
        names[slot] = key
        naive.insert([slot], [key])
        manager.complete_store([key])
        assert (policy.target, list(policy._ghosts.sizes())) == (naive.target, naive.sizes())
        manager.check()
