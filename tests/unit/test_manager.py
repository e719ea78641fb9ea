"""What the CPU manager adds to the contract of managers: admission, what it tells a policy and takes from
it, its own checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.errors import ConfigError, InputError, IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload import CPULoadStoreSpec, CPUOffloadingManager, MissReason, ReqContext
from kvtier.offload.base import ReadLease, WriteLease
from kvtier.policies import KeysOf, LRUPolicy, Slots
from kvtier.testing.manager_suite import keys

A, B = ReqContext(req_id="a"), ReqContext(req_id="b")
NOBODY = ReqContext()


def store(manager: CPUOffloadingManager, *numbers: int, context: ReqContext = A) -> list[OffloadKey]:
    """Offer chunks, complete what was taken, and return it."""
    output = manager.prepare_store(keys(*numbers), context)
    taken = output.keys_to_store if output else []
    manager.complete_store(taken)
    manager.check()
    return taken


class TestConstruction:
    def test_a_policy_is_made_by_name_or_given(self) -> None:
        assert isinstance(CPUOffloadingManager(3).policy, LRUPolicy)
        policy = LRUPolicy(3)
        assert CPUOffloadingManager(3, policy).policy is policy

    def test_bad_arguments_are_one_clear_line(self) -> None:
        with pytest.raises(InputError, match="num_slots >= 0"):
            CPUOffloadingManager(-1)
        with pytest.raises(InputError, match="expected one for 3 slots, got one for 4"):
            CPUOffloadingManager(3, LRUPolicy(4))
        with pytest.raises(ConfigError, match=r"^cpu\.policy: .*'lur'.*did you mean 'lru'"):
            CPUOffloadingManager(3, "lur")


class TestSlots:
    def test_neighbours_in_a_prompt_are_neighbours_in_the_pool(self) -> None:
        manager = CPUOffloadingManager(6)
        for numbers, expected in (
            ((1, 2, 3, 4, 5, 6), [0, 1, 2, 3, 4, 5]),
            ((7, 8, 9), [3, 4, 5]),
            ((10, 11, 12, 13, 14), [4, 5, 0, 1, 2]),
        ):
            output = manager.prepare_store(keys(*numbers), A)
            assert output is not None
            assert isinstance(output.store_spec, CPULoadStoreSpec)
            assert output.store_spec.block_ids.tolist() == expected
            manager.complete_store(output.keys_to_store)

    @pytest.mark.parametrize("wrap", [tuple, set, iter, dict.fromkeys])
    def test_any_iterable_of_keys_will_do(
        self, wrap: Callable[[list[OffloadKey]], Iterable[OffloadKey]]
    ) -> None:
        manager = CPUOffloadingManager(4)
        output = manager.prepare_store(wrap(keys(1, 2)), A)
        assert output is not None
        manager.complete_store(wrap(keys(1, 2)))
        assert manager.lookup_prefix(tuple(keys(1, 2)), A) == 2
        manager.prepare_load(wrap(keys(1, 2)), A)
        manager.touch(wrap(keys(1, 2)), A)
        manager.complete_load(wrap(keys(1, 2)))
        manager.check()
        manager.discard(wrap(keys(1, 2)))
        assert manager.stats().free == 4


class TestAdmission:
    def test_a_chunk_is_taken_when_it_is_offered_often_enough(self) -> None:
        manager = CPUOffloadingManager(8, store_threshold=3)
        assert [store(manager, 1, 2), store(manager, 1), store(manager, 1, 2)] == [[], [], keys(1)]
        assert manager.explain(keys(2)[0]) is MissReason.REFUSED
        assert store(manager, 2, 3) == keys(2)
        assert manager.stats().refused == 5

    def test_an_offer_counts_once_however_often_it_names_a_chunk(self) -> None:
        manager = CPUOffloadingManager(8, store_threshold=2)
        assert store(manager, 1, 1, 1) == []
        assert store(manager, 1, 1) == keys(1)

    def test_an_offer_of_nothing_new_is_not_a_refusal(self) -> None:
        manager = CPUOffloadingManager(1, store_threshold=2)
        output = manager.prepare_store(keys(1), A)
        assert output is not None
        assert output.keys_to_store == []

    def test_reset_forgets_the_counts(self) -> None:
        manager = CPUOffloadingManager(8, store_threshold=2)
        store(manager, 1)
        manager.reset_cache()
        assert store(manager, 1) == []
        assert store(manager, 1) == keys(1)

    def test_counts_are_bounded_and_the_newest_are_kept(self) -> None:
        manager = CPUOffloadingManager(8, store_threshold=2, max_tracked=16)
        store(manager, 0)
        for number in range(1, 16):
            store(manager, number)
        store(manager, *range(100, 119))
        assert store(manager, 0) == [], "too long ago"
        assert store(manager, 118) == keys(118)


class TestReasons:
    def test_chunks_that_do_not_fit_are_refused(self) -> None:
        manager = CPUOffloadingManager(2)
        store(manager, 1, 2, 3)
        assert [manager.explain(key) for key in keys(2, 3, 4)] == [
            None,
            MissReason.REFUSED,
            MissReason.NEVER_STORED,
        ]
        assert manager.stats().refused == 1

    def test_the_last_reason_counts(self) -> None:
        manager = CPUOffloadingManager(1)
        store(manager, 1)
        store(manager, 2)
        assert manager.prepare_store(keys(1), A) is not None
        manager.complete_store(keys(1), success=False)
        assert manager.explain(keys(1)[0]) is MissReason.IO_FAILED
        store(manager, 1)
        manager.discard(keys(1), MissReason.NOT_WORTH_LOADING)
        assert manager.explain(keys(1)[0]) is MissReason.NOT_WORTH_LOADING

    @pytest.mark.parametrize("ask_often", [True, False])
    def test_memory_of_reasons_is_bounded(self, ask_often: bool) -> None:
        manager = CPUOffloadingManager(1, max_tracked=8)
        for number in range(100):
            store(manager, number)
            if ask_often:
                manager.explain(keys(number)[0])
        assert len(manager._miss_history._unfiled) <= 8
        reasons = [manager.explain(key) for key in keys(*range(100))]
        assert reasons[:85] == [MissReason.NEVER_STORED] * 85
        assert reasons[-9:] == [MissReason.EVICTED] * 8 + [None]

    def test_nothing_tracked_is_legal(self) -> None:
        manager = CPUOffloadingManager(1, max_tracked=0, store_threshold=2)
        assert store(manager, 1) == store(manager, 1) == []


class Spy(LRUPolicy):
    """Notes what it is told."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.touched: list[tuple[list[int], list[bool]]] = []

    def touch(self, slots: Slots, reused: npt.NDArray[np.bool_]) -> None:
        self.touched.append((slots.tolist(), reused.tolist()))
        super().touch(slots, reused)


class TestTouch:
    def test_a_policy_hears_each_slot_once_and_who_else_uses_it(self) -> None:
        manager = CPUOffloadingManager(4, spy := Spy(4))
        store(manager, 1, 2, context=A)
        store(manager, 3, context=B)
        store(manager, 4, context=NOBODY)
        manager.touch(keys(3, 9, 1, 4, 3), A)
        manager.touch(keys(1, 4), NOBODY)
        manager.touch(keys(8), A)
        assert spy.touched == [([2, 0, 3], [True, False, True]), ([0, 3], [True, True])]

    def test_chunks_being_written_can_be_used(self) -> None:
        manager = CPUOffloadingManager(2, spy := Spy(2))
        assert manager.prepare_store(keys(1), A) is not None
        manager.touch(keys(1), A)
        assert spy.touched == [([0], [False])]


class Broken(LRUPolicy):
    """Returns what it is told to return."""

    answer: Callable[[Slots], Sequence[int]]

    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        return np.array(self.answer(super().ranked()), dtype=np.int64)


@pytest.mark.parametrize(
    "answer",
    [
        lambda ranked: [ranked[0], ranked[0]],
        lambda ranked: ranked[:3],
        lambda ranked: [-1],
        lambda ranked: [4],
        lambda ranked: [2],
        lambda ranked: [0],
    ],
    ids=["twice the same", "too many", "negative", "beyond the pool", "being read", "of the offer"],
)
def test_a_policy_that_breaks_the_contract_is_replaced_and_loses_nothing(
    answer: Callable[[Slots], Sequence[int]], caplog: pytest.LogCaptureFixture
) -> None:
    manager = CPUOffloadingManager(4, policy := Broken(4))
    policy.answer = answer
    store(manager, 1, 2, 3, 4)
    manager.prepare_load(keys(3), A)
    output = manager.prepare_store(keys(1, 5, 6), A)
    assert output is not None
    assert sorted(output.evicted_keys) == keys(2, 4), "neither of the offer nor being read"
    assert "policy Broken: evict failed" in caplog.text
    manager.check()
    assert manager.lookup_many(keys(1, 3), A) == [True, True]


class TestDoomed:
    def test_a_reset_while_a_chunk_is_written_frees_its_slot_when_the_job_ends(self) -> None:
        manager = CPUOffloadingManager(2)
        assert manager.prepare_store(keys(1, 2), A) is not None
        manager.reset_cache()
        manager.check()
        assert manager.take_events() == [], "nothing was ready"
        assert manager.stats().doomed == 2
        assert manager.explain(keys(1)[0]) is MissReason.CLEARED
        assert manager.prepare_store(keys(3), A) is None, "their slots are still being written to"
        manager.complete_store(keys(1))
        manager.complete_store(keys(2), success=False)
        manager.check()
        assert manager.take_events() == []
        assert manager.stats().free == 2
        assert store(manager, 1) == keys(1)

    def test_ends_of_another_kind_do_not_free_a_doomed_slot(self) -> None:
        manager = CPUOffloadingManager(2)
        store(manager, 1)
        manager.prepare_load(keys(1, 1), A)
        assert manager.prepare_store(keys(2), A) is not None
        manager.reset_cache()
        manager.complete_store(keys(1))
        with pytest.raises(InputError, match="complete_load: expected chunks that are being read"):
            manager.complete_load(keys(1, 2))
        assert manager.stats().doomed == 2
        manager.complete_load(keys(1))
        assert manager.stats().doomed == 2, "one reader is left"
        manager.complete_load(keys(1))
        manager.complete_store(keys(2))
        assert manager.stats().free == 2
        with pytest.raises(InputError):
            manager.complete_load(keys(1))
        manager.check()

    def test_a_key_is_stored_elsewhere_while_its_old_slot_is_still_written(self) -> None:
        """Doomed slots belong to jobs: the old job's end must neither wait for the new one nor make its
        bytes ready.
        """
        manager = CPUOffloadingManager(2)
        old = manager.prepare_store(keys(1), A)
        manager.reset_cache()
        new = manager.prepare_store(keys(1), A)
        assert old is not None
        assert new is not None
        assert (new.keys_to_store, manager.stats().doomed) == (keys(1), 1)
        manager.complete_store(keys(1), spec=old.store_spec)
        assert manager.lookup(keys(1)[0], A) is None, "the new bytes are still on their way"
        assert (manager.stats().doomed, manager.stats().free) == (0, 1)
        manager.complete_store(keys(1), spec=new.store_spec)
        assert manager.lookup(keys(1)[0], A) is True
        manager.check()

    def test_a_key_is_read_from_its_new_slot_while_the_old_one_is_still_read(self) -> None:
        manager = CPUOffloadingManager(3)
        store(manager, 1)
        old = manager.prepare_load(keys(1), A)
        manager.discard(keys(1))
        store(manager, 1)
        new = manager.prepare_load(keys(1), A)
        assert old.block_ids.tolist() != new.block_ids.tolist()
        manager.complete_load(keys(1), new)
        assert (manager.stats().doomed, manager.stats().reading) == (1, 0)
        manager.complete_load(keys(1), old)
        assert (manager.stats().doomed, manager.stats().free) == (0, 2)
        manager.check()

    def test_events_before_a_reset_stay_before_it(self) -> None:
        manager = CPUOffloadingManager(2)
        store(manager, 1, 2)
        manager.prepare_load(keys(2), A)
        manager.reset_cache()
        manager.complete_load(keys(2))
        store(manager, 2)
        assert [(event.removed, event.keys) for event in manager.take_events()] == [
            (False, keys(1, 2)),
            (True, keys(1, 2)),
            (False, keys(2)),
        ]


class TestResetsInSlices:
    """A reset of a large pool makes everything absent at once and is announced bit by bit."""

    def test_no_event_names_more_than_a_slice(self) -> None:
        manager, numbers = CPUOffloadingManager(5000), range(5000)
        store(manager, *numbers)
        manager.take_events()
        manager.reset_cache()
        manager.check()
        assert manager.stats().free == 5000
        assert not any(manager.lookup_many(keys(*numbers), A))
        assert manager.explain(keys(4999)[0]) is MissReason.CLEARED, "which is not announced yet"
        told, takes = [], 0
        while manager.has_pending_work():
            assert takes < 3
            takes += 1
            for event in manager.take_events():
                assert event.removed
                assert len(event.keys) <= 2048
                told += event.keys
        assert sorted(told) == sorted(keys(*numbers))
        assert manager.explain(keys(4999)[0]) is MissReason.CLEARED

    def test_a_removal_comes_before_its_key_or_its_place_is_announced_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvtier.slot_table._CLEARED_SLICE", 1)
        manager = CPUOffloadingManager(4)
        store(manager, 1, 2, 3, 4)
        manager.reset_cache()
        store(manager, 4)
        assert [(event.removed, event.keys) for event in manager.take_events()] == [
            (False, keys(1, 2, 3, 4)),
            (True, keys(1)),
            (True, keys(4)),  # 4 took the place of 1, which is announced already
            (False, keys(4)),
            (True, keys(2)),
        ]
        assert [(event.removed, event.keys) for event in manager.take_events()] == [(True, keys(3))]
        assert manager.take_events() == []
        assert not manager.has_pending_work()

    @pytest.mark.parametrize("policy", ["lru", "arc"])
    @pytest.mark.parametrize("seed", range(8))
    def test_a_listener_that_applies_all_events_is_exact(
        self, seed: int, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stores, loads, failures and resets in any order; events are taken now and then."""
        monkeypatch.setattr("kvtier.slot_table._CLEARED_SLICE", 2)
        source, manager, heard = Random(seed), CPUOffloadingManager(8, policy), set[OffloadKey]()
        stores, loads = list[tuple[list[OffloadKey], object]](), list[tuple[list[OffloadKey], object]]()

        def listen() -> None:
            for event in manager.take_events():
                for key in event.keys:
                    assert (key in heard) is event.removed, "each change is told once"
                    (heard.remove if event.removed else heard.add)(key)
                assert len(heard) <= 8, "a place is announced as free before it is announced as used again"

        for _ in range(400):
            choice = source.random()
            numbers = keys(*source.sample(range(20), source.randint(1, 4)))
            if choice < 0.35 and (output := manager.prepare_store(numbers, A)) is not None:
                stores.append((output.keys_to_store, output.store_spec))
            elif choice < 0.65 and stores:
                done, spec = stores.pop(source.randrange(len(stores)))
                manager.complete_store(done, source.random() < 0.9, spec)  # type: ignore[arg-type]
            elif choice < 0.75 and (ready := [key for key in numbers if manager.lookup(key, A)]):
                loads.append((ready, manager.prepare_load(ready, A)))
            elif choice < 0.85 and loads:
                done, spec = loads.pop()
                manager.complete_load(done, spec)  # type: ignore[arg-type]
            elif choice < 0.9:
                manager.reset_cache()
            else:
                listen()
            manager.check()
        while manager.has_pending_work():
            listen()
        listen()
        assert heard == {key for key in keys(*range(20)) if manager.lookup(key, A)}


class TestLoads:
    def test_too_many_ends_in_one_call_change_nothing(self) -> None:
        manager = CPUOffloadingManager(2)
        store(manager, 1, 2)
        manager.prepare_load(keys(1, 2, 2), A)
        with pytest.raises(InputError, match=keys(1)[0].hex()):
            manager.complete_load(keys(2, 1, 1))
        assert manager.stats().reading == 2
        manager.complete_load(keys(2, 1, 2))
        assert manager.stats().reading == 0
        manager.check()

    def test_the_error_says_which_chunk_and_why(self) -> None:
        manager = CPUOffloadingManager(1)
        store(manager, 1)
        store(manager, 2)
        with pytest.raises(
            InputError,
            match=f"prepare_load: expected chunks that are ready, got {keys(1)[0].hex()}, which is evicted",
        ):
            manager.prepare_load(keys(2, 1), A)

    def test_a_spec_is_not_a_view_of_the_manager(self) -> None:
        manager = CPUOffloadingManager(4)
        output = manager.prepare_store(keys(1, 2), A)
        assert output is not None
        output.keys_to_store.clear()
        output.store_spec.block_ids[:] = 99  # type: ignore[attr-defined]
        manager.complete_store(keys(1, 2))
        manager.prepare_load(keys(1, 2), A).block_ids[:] = 99
        manager.complete_load(keys(1, 2))
        manager.check()


class TestLeases:
    """A job gives its slots back once, in parts or whole, whatever became of the chunks meanwhile."""

    def write(self, manager: CPUOffloadingManager, *numbers: int) -> WriteLease:
        output = manager.prepare_store(keys(*numbers), A)
        assert output is not None
        return WriteLease(manager, output.keys_to_store, output.store_spec)

    def read(self, manager: CPUOffloadingManager, *numbers: int) -> ReadLease:
        return ReadLease(manager, keys(*numbers), manager.prepare_load(keys(*numbers), A))

    def test_a_store_commits_the_chunks_that_it_does_not_abandon(self) -> None:
        manager = CPUOffloadingManager(4)
        lease = self.write(manager, 1, 2, 3, 4)
        lease.abandon({3, 1})
        lease.commit([0])
        lease.commit()
        assert manager.lookup_many(keys(1, 2, 3, 4), A) == [True, False, True, False]
        assert (manager.stats().writing, manager.stats().free) == (0, 2)
        manager.check()

    def test_a_load_releases_its_chunks_in_parts(self) -> None:
        manager = CPUOffloadingManager(4)
        store(manager, 1, 2, 3)
        lease = self.read(manager, 1, 2, 3)
        lease.release([2])
        assert manager.stats().reading == 2
        lease.release()
        assert manager.stats().reading == 0
        manager.check()

    @pytest.mark.parametrize("positions", [None, [0], [0, 2]])
    def test_slots_are_given_back_once(self, positions: list[int] | None) -> None:
        manager = CPUOffloadingManager(4)
        store(manager, 1, 2, 3)
        other, lease = self.read(manager, 1, 2, 3), self.read(manager, 1, 2, 3)
        lease.release(positions)
        with pytest.raises(InputError, match="expected positions that are left"):
            lease.release([0, 1])
        lease.release()
        lease.release()
        assert manager.stats().reading == 3, "the other job still reads them"
        other.release()
        assert manager.stats().reading == 0

    def test_leases_of_before_a_reset_leave_the_chunks_of_after_it_alone(self) -> None:
        manager = CPUOffloadingManager(6)
        store(manager, 1, 2)
        read, written = self.read(manager, 1, 2), self.write(manager, 3)
        manager.reset_cache()
        again = self.write(manager, 1, 2, 3)
        read.release([1])
        written.commit()
        read.release()
        assert manager.lookup_many(keys(1, 2, 3), A) == [None, None, None]
        again.commit()
        assert manager.lookup_many(keys(1, 2, 3), A) == [True, True, True]
        assert (manager.stats().doomed, manager.stats().free) == (0, 3)
        manager.check()


def test_stats_add_up() -> None:
    manager = CPUOffloadingManager(4)
    store(manager, 1, 2, 3)
    store(manager, 4, 5)
    manager.prepare_load(keys(1, 5), A)
    assert manager.prepare_store(keys(6), A) is not None
    stats = manager.stats()
    assert (stats.slots, stats.free, stats.ready, stats.reading, stats.writing, stats.doomed) == (
        4,
        0,
        3,
        2,
        1,
        0,
    )
    assert (stats.stored, stats.evicted, stats.refused) == (5, 2, 0)


def test_returned_keys_are_not_the_announced_list() -> None:
    manager = CPUOffloadingManager(1)
    store(manager, 1)
    output = manager.prepare_store(keys(2), A)
    assert output is not None
    output.evicted_keys.clear()
    assert [event.keys for event in manager.take_events()] == [keys(1), keys(1)]


def test_events_are_drained_even_if_nobody_looks_at_them() -> None:
    manager = CPUOffloadingManager(4)
    store(manager, 1)
    next(iter(manager.take_events()))
    assert manager.take_events() == []


def empty_the_last(manager: CPUOffloadingManager) -> None:
    """Have slot 3 be of no key and not free, as a doomed chunk's is, but unused."""
    manager._table._book.reserve(0, keys(8))
    manager._table._book.remove(np.array([3]))
    manager._table.readers[3] = 0


BREAKAGES: dict[str, Callable[[CPUOffloadingManager], object]] = {
    "every slot is held, doomed or free": lambda m: m._table._doomed.update({3: keys(7)[0]}),
    "a slot has a key iff it is held": lambda m: m._table._book.remove(np.array([0])),
    "doomed slots are in use": lambda m: empty_the_last(m) or m._table._doomed.update({3: keys(7)[0]}),
    "a chunk has one writer": lambda m: m._table.readers.__setitem__(1, -2),
    "free slots are not in use": lambda m: m._table.readers.__setitem__(3, 1),
    "what may be evicted is ready and unread": lambda m: m._table.evictable.__setitem__(0, False),
    "LRUPolicy ranks what is held": lambda m: m.policy.remove(np.array([1])),
}


@pytest.mark.parametrize("what", BREAKAGES)
def test_check_finds_contradictions(what: str) -> None:
    manager = CPUOffloadingManager(4)
    store(manager, 1, 2)
    assert manager.prepare_store(keys(3), A) is not None
    manager.check()
    BREAKAGES[what](manager)
    with pytest.raises(IntegrityError, match=f"expected that {what}"):
        manager.check()
