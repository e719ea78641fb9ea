"""The contract of an offloading manager as tests: subclass `ManagerSuite`, define `make`, run pytest.

    class TestMine(ManagerSuite):
        def make(self, num_slots):
            return MyManager(num_slots)

A manager may evict any chunk that may leave; everything else that `OffloadingManager` promises is tested,
at the end by random calls against a model of a few sets.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from kvtier.errors import InputError
from kvtier.keys import OffloadKey
from kvtier.offload import MissReason, OffloadingManager, ReqContext
from kvtier.testing.kit import believed_held, key, keys
from kvtier.transfer.base import BlockIDsLoadStoreSpec, LoadStoreSpec


def slots(spec: LoadStoreSpec) -> list[int]:
    """Return the slots that a spec names."""
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    return [int(slot) for slot in spec.block_ids]


class ManagerSuite:
    """The tests that every manager of one tier passes."""

    context = ReqContext(req_id="request")

    def make(self, num_slots: int) -> OffloadingManager:
        """Return a new manager with room for `num_slots` chunks that stores every offered chunk."""
        raise NotImplementedError

    def store(self, manager: OffloadingManager, *numbers: int) -> list[int]:
        """Store chunks and return their slots."""
        output = manager.prepare_store(keys(*numbers), self.context)
        assert output is not None
        manager.complete_store(output.keys_to_store)
        manager.check()
        return slots(output.store_spec)

    def held(self, manager: OffloadingManager, numbers: Iterable[int]) -> list[bool | None]:
        """Look chunks up one by one, and compare with the batch form."""
        found = [manager.lookup(key(number), self.context) for number in numbers]
        assert manager.lookup_many(keys(*numbers), self.context) == found
        return found

    # States

    def test_absent_writing_ready(self) -> None:
        manager = self.make(4)
        assert self.held(manager, (1, 2)) == [False, False]
        output = manager.prepare_store(keys(1, 2), self.context)
        assert output is not None
        assert output.keys_to_store == keys(1, 2)
        assert output.evicted_keys == []
        assert len(set(slots(output.store_spec))) == 2
        assert self.held(manager, (1, 2)) == [None, None]
        assert manager.explain(key(1)) is MissReason.WRITING
        manager.complete_store(keys(1))
        assert self.held(manager, (1, 2)) == [True, None]
        assert manager.explain(key(1)) is None
        manager.check()

    def test_a_failed_store_frees_everything_and_announces_nothing(self) -> None:
        manager = self.make(2)
        assert manager.prepare_store(keys(1, 2), self.context) is not None
        manager.complete_store(keys(1, 2), success=False)
        manager.check()
        assert self.held(manager, (1, 2)) == [False, False]
        assert list(manager.take_events()) == []
        assert len(self.store(manager, 3, 4)) == 2

    def test_completing_chunks_that_are_not_being_written_changes_nothing(self) -> None:
        manager = self.make(2)
        self.store(manager, 1)
        list(manager.take_events())
        for success in (True, False):
            manager.complete_store(keys(1, 7), success=success)
        assert self.held(manager, (1, 7)) == [True, False]
        assert list(manager.take_events()) == []
        manager.check()

    def test_loads_name_the_slots_in_order_and_pin(self) -> None:
        manager = self.make(3)
        stored = self.store(manager, 1, 2, 3)
        spec = manager.prepare_load(keys(3, 1), self.context)
        assert slots(spec) == [stored[2], stored[0]]
        output = manager.prepare_store(keys(4, 5), self.context)
        assert output is not None
        assert output.keys_to_store == keys(4), "only one chunk could leave"
        assert output.evicted_keys == keys(2)
        manager.complete_load(keys(1, 3))
        manager.check()

    def test_every_pin_needs_its_own_end(self) -> None:
        manager = self.make(1)
        self.store(manager, 1)
        manager.prepare_load(keys(1, 1), self.context)
        manager.prepare_load(keys(1), self.context)
        for _ in range(3):
            assert manager.prepare_store(keys(2), self.context) is None
            manager.complete_load(keys(1))
        assert manager.prepare_store(keys(2), self.context) is not None
        manager.check()

    @pytest.mark.parametrize("wrong", [9, 2])
    def test_loading_chunks_that_are_not_ready_is_refused_and_pins_nothing(self, wrong: int) -> None:
        manager = self.make(2)
        self.store(manager, 1)
        assert manager.prepare_store(keys(2), self.context) is not None
        with pytest.raises(InputError):
            manager.prepare_load(keys(1, wrong), self.context)
        manager.complete_store(keys(2), success=False)
        assert len(self.store(manager, 3, 4)) == 2, "chunk 1 must not be pinned"

    def test_ending_a_load_that_was_not_begun_is_refused(self) -> None:
        manager = self.make(1)
        self.store(manager, 1)
        with pytest.raises(InputError):
            manager.complete_load(keys(1))
        manager.check()

    # Offers

    def test_duplicates_in_an_offer_are_one(self) -> None:
        manager = self.make(4)
        output = manager.prepare_store(keys(1, 2, 1, 1), self.context)
        assert output is not None
        assert output.keys_to_store == keys(1, 2)
        assert len(slots(output.store_spec)) == 2
        manager.complete_store(keys(1, 2, 1))
        manager.check()

    def test_chunks_that_are_held_are_left_out(self) -> None:
        manager = self.make(4)
        self.store(manager, 1)
        assert manager.prepare_store(keys(2), self.context) is not None
        output = manager.prepare_store(keys(1, 2, 3), self.context)
        assert output is not None
        assert output.keys_to_store == keys(3)
        nothing = manager.prepare_store(keys(1, 2), self.context)
        assert nothing is not None
        assert nothing.keys_to_store == []

    def test_a_partial_fit_takes_the_leading_part(self) -> None:
        manager = self.make(3)
        output = manager.prepare_store(keys(5, 4, 3, 2, 1), self.context)
        assert output is not None
        assert output.keys_to_store == keys(5, 4, 3)

    def test_nobody_of_the_offer_leaves_for_it(self) -> None:
        manager = self.make(3)
        self.store(manager, 1, 2, 3)
        output = manager.prepare_store(keys(1, 2, 3, 4), self.context)
        assert output is None, "all who could leave are in the offer"
        assert self.held(manager, (1, 2, 3)) == [True] * 3

    def test_without_any_slot_there_is_no_store(self) -> None:
        manager = self.make(1)
        assert manager.prepare_store(keys(1), self.context) is not None
        assert manager.prepare_store(keys(2), self.context) is None
        none = self.make(0)
        assert none.prepare_store(keys(1), self.context) is None
        assert self.held(none, (1,)) == [False]
        none.check()

    # Prefixes

    def test_prefix_lookup(self) -> None:
        manager = self.make(8)
        self.store(manager, 1, 2, 4)
        prefix = manager.lookup_prefix
        assert prefix(keys(1, 2, 3, 4), self.context) == 2
        assert prefix(keys(3, 1), self.context) == 0
        assert prefix([], self.context) == 0
        assert manager.prepare_store(keys(3), self.context) is not None
        assert prefix(keys(1, 2, 3, 4), self.context) is None
        assert prefix(keys(1, 2, 3, 4), self.context, wait=False) == 2
        manager.complete_store(keys(3))
        assert prefix(keys(1, 2, 3, 4), self.context) == 4

    # Making absent

    def test_reset_makes_everything_absent_and_says_so(self) -> None:
        manager = self.make(4)
        self.store(manager, 1, 2)
        read = manager.prepare_load(keys(2), self.context)
        written = manager.prepare_store(keys(3), self.context)
        assert written is not None
        manager.reset_cache()
        manager.check()
        assert self.held(manager, (1, 2, 3)) == [False] * 3
        assert believed_held(manager.take_events()) == set()
        again = manager.prepare_store(keys(3, 2, 1), self.context)
        assert again is not None
        assert again.keys_to_store == keys(3, 2), "two of four slots are still in use, by jobs of before"
        manager.complete_load(keys(2), read)
        manager.complete_store(keys(3), True, written.store_spec)
        manager.check()
        assert self.held(manager, (2, 3)) == [None, None], "the jobs of before say nothing of these"
        manager.complete_store(keys(3, 2), True, again.store_spec)
        assert self.held(manager, (2, 3)) == [True, True]
        assert len(self.store(manager, 5, 6)) == 2, "no slot was lost"

    def test_a_discarded_chunk_is_gone_once_unread(self) -> None:
        manager = self.make(2)
        self.store(manager, 1, 2)
        manager.prepare_load(keys(1), self.context)
        manager.discard(keys(1, 2, 9))
        manager.check()
        assert self.held(manager, (1, 2)) == [False, False]
        assert manager.explain(key(1)) is MissReason.FAILED
        manager.complete_load(keys(1))
        assert len(self.store(manager, 5, 6)) == 2

    def test_a_removal_is_announced_before_the_store_that_takes_its_slot(self) -> None:
        manager = self.make(1)
        self.store(manager, 1)
        self.store(manager, 2)
        assert [(event.removed, event.keys) for event in manager.take_events()] == [
            (False, keys(1)),
            (True, keys(1)),
            (False, keys(2)),
        ]
        assert list(manager.take_events()) == []

    def test_it_remembers_why(self) -> None:
        manager = self.make(1)
        assert manager.explain(key(1)) is MissReason.NEVER_STORED
        self.store(manager, 1)
        self.store(manager, 2)
        assert manager.explain(key(1)) is MissReason.EVICTED
        manager.reset_cache()
        assert manager.explain(key(2)) is MissReason.CLEARED

    # Everything at once

    @pytest.mark.parametrize("seed", range(20))
    def test_random_calls_against_a_model(self, seed: int) -> None:
        rng = random.Random(seed)
        capacity = rng.choice((0, 1, 2, 5, 40))
        manager, model = self.make(capacity), _Model(capacity)
        for _ in range(150):
            model.random_call(rng, manager)
            manager.check()
            numbers = range(_UNIVERSE)
            assert self.held(manager, numbers) == [model.lookup(number) for number in numbers]
        model.events(manager)


_UNIVERSE = 60
_RNG_CONTEXTS = [ReqContext(req_id=f"request {number}") for number in range(4)]


@dataclass(eq=False)
class _Slot:
    """The slot of a chunk, held or doomed, and its users."""

    number: int
    readers: int = 0
    writing: bool = True


class _Job(NamedTuple):
    """A job that is not over: its slots, in the order of the spec."""

    slots: list[_Slot]
    spec: LoadStoreSpec

    @property
    def keys(self) -> list[OffloadKey]:
        return keys(*(slot.number for slot in self.slots))


@dataclass
class _Model:
    """The expected state of a manager: slots of chunks, and jobs on slots, also of absent chunks."""

    capacity: int
    held: dict[int, _Slot] = field(default_factory=dict)
    stores: list[_Job] = field(default_factory=list)
    loads: list[_Job] = field(default_factory=list)

    def lookup(self, number: int) -> bool | None:
        slot = self.held.get(number)
        return False if slot is None else None if slot.writing else True

    def random_call(self, rng: random.Random, manager: OffloadingManager) -> None:
        calls = (
            self._store,
            self._store,
            self._end_store,
            self._load,
            self._end_load,
            self._touch,
            self._drop,
        )
        rng.choice(calls)(rng, manager)

    def _ready(self) -> dict[int, _Slot]:
        return {number: slot for number, slot in self.held.items() if not slot.writing}

    def _num_free(self) -> int:
        busy = {slot for job in (*self.stores, *self.loads) for slot in job.slots}
        return self.capacity - len(busy | set(self.held.values()))

    def _store(self, rng: random.Random, manager: OffloadingManager) -> None:
        offer = [rng.randrange(_UNIVERSE) for _ in range(rng.randint(0, 12))]
        free = self._num_free()
        wanted = [n for n in dict.fromkeys(offer) if n not in self.held]
        may_leave = {n for n, slot in self._ready().items() if slot.readers == 0 and n not in offer}
        taken = wanted[: free + len(may_leave)]
        output = manager.prepare_store(keys(*offer), rng.choice(_RNG_CONTEXTS))
        if wanted and not taken:
            assert output is None
            return
        assert output is not None
        assert output.keys_to_store == keys(*taken)
        evicted = {n for n in may_leave if key(n) in output.evicted_keys}
        assert len(output.evicted_keys) == len(evicted) == max(0, len(taken) - free)
        for number in evicted:
            del self.held[number]
        new = {number: _Slot(number) for number in taken}
        self.held |= new
        self.stores.append(_Job(list(new.values()), output.store_spec))

    def _end_store(self, rng: random.Random, manager: OffloadingManager) -> None:
        """End a store, not always the oldest. If a chunk is absent by now, only its slot comes back."""
        if not self.stores:
            return
        job, failed = self.stores.pop(rng.randrange(len(self.stores))), rng.random() < 0.3
        manager.complete_store(job.keys, not failed, job.spec)
        for slot in job.slots:
            slot.writing = False
            if failed and self.held.get(slot.number) is slot:
                del self.held[slot.number]

    def _load(self, rng: random.Random, manager: OffloadingManager) -> None:
        ready = self._ready()
        chosen = rng.choices(sorted(ready), k=rng.randint(0, 8)) if ready else []
        spec = manager.prepare_load(keys(*chosen), rng.choice(_RNG_CONTEXTS))
        assert len(slots(spec)) == len(chosen)
        assert len(set(slots(spec))) == len(set(chosen))
        for number in chosen:
            ready[number].readers += 1
        self.loads.append(_Job([ready[number] for number in chosen], spec))

    def _end_load(self, rng: random.Random, manager: OffloadingManager) -> None:
        if not self.loads:
            return
        job = self.loads.pop(rng.randrange(len(self.loads)))
        manager.complete_load(job.keys, job.spec)
        for slot in job.slots:
            slot.readers -= 1

    def _touch(self, rng: random.Random, manager: OffloadingManager) -> None:
        used = [rng.randrange(_UNIVERSE) for _ in range(rng.randint(0, 10))]
        manager.touch(keys(*used), rng.choice(_RNG_CONTEXTS))

    def _drop(self, rng: random.Random, manager: OffloadingManager) -> None:
        """Discard some chunks, held or not, or rarely reset everything."""
        gone = set(rng.sample(range(_UNIVERSE), 6))
        if rng.random() < 0.2:
            gone = set(range(_UNIVERSE))
            manager.reset_cache()
        else:
            manager.discard(keys(*gone))
        self.held = {n: slot for n, slot in self.held.items() if n not in gone}

    def events(self, manager: OffloadingManager) -> None:
        """Compare a listener's belief with what is held."""
        assert believed_held(manager.take_events()) == set(keys(*self._ready()))
