"""Exact means exact: whatever is called so is what the publisher holds, and what every index fed by it holds.

Thousands of schedules from seeds, each with losses aimed at cancelling, several ranks, groups and media, answers that are
refused, cut off or lost in part, restarts with and without kept numbers, tiny buffers. Each control takes one rule
away, and the oracle must notice. `KVTIER_SEED` is the first seed, `KVTIER_SEEDS` how many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from tests.chaos import exactness_kit
from tests.chaos.exactness_kit import Case, FedIndex

from kvtier.events import DecodedBatch, decode_batch
from kvtier.events.follow.replica import RankSums, Replica

FIRST = int(os.environ.get("KVTIER_SEED", "0"))
NUM_SEEDS = int(os.environ.get("KVTIER_SEEDS", "600"))
PARTS = 12
FORMS = [
    ("python", "engine"),
    ("python", "xxh3"),
    *([("numba", "engine"), ("numba", "xxh3")] if find_spec("numba") else []),
]


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_called_exact_is_what_the_publisher_holds(part: int) -> None:
    claims = 0
    for seed in range(FIRST + part, FIRST + NUM_SEEDS, PARTS):
        case = Case(seed)
        case.run()
        claims += case.claims
    assert claims


@pytest.mark.parametrize(("form", "keys"), FORMS)
def test_an_index_fed_by_it_holds_the_same(form: str, keys: str) -> None:
    """The index of a schedule and one that was filled with nothing but the truth say the same."""
    for seed in range(FIRST, FIRST + NUM_SEEDS, 40):
        case = Case(seed)
        case.run(60)
        fed, true = FedIndex(form, keys), FedIndex(form, keys)
        fed.follow(case.updates)
        true.fill(case.publisher.truth.held)
        assert fed.claims() == true.claims(), seed
        assert not fed.index.incomplete()
        fed.index.check()


# -- controls --------------------------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def _mark_confirms_over_losses(patch: pytest.MonkeyPatch) -> None:
    """Believe a mark that agrees, whatever was lost."""

    def confirm(self: RankSums, mark: Any) -> bool:
        if (mark.blocks, mark.digest) != (self.blocks, self.digest):
            return False
        self.is_open = False
        self._torn.clear()
        self._fresh.clear()
        return True

    patch.setattr(RankSums, "confirm", confirm)


def _clear_mends_all_ranks(patch: pytest.MonkeyPatch) -> None:
    add = RankSums.add

    def added(self: RankSums, rank: int | None, change: Any) -> None:
        add(self, rank, change)
        if change[0]:
            self._torn.clear()

    patch.setattr(RankSums, "add", added)


def _clear_empties_all_ranks(patch: pytest.MonkeyPatch) -> None:
    add = RankSums.add
    patch.setattr(RankSums, "add", lambda self, rank, change: add(self, 0, change))


def _clear_alone_is_a_proof(patch: pytest.MonkeyPatch) -> None:
    """Trust what was cleared, though ranks that were never heard of may hold something."""
    are_whole = RankSums.are_whole
    patch.setattr(RankSums, "are_whole", lambda self, *, has_marks: are_whole(self, has_marks=False))


def _nothing_is_torn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankSums, "tear", lambda self: None)


def _half_an_answer_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "is_building", property(lambda self: False, lambda self, value: None), raising=False)


def _other_incarnations_are_the_same(patch: pytest.MonkeyPatch) -> None:
    apply = Replica.apply

    def applied(self: Replica[Any], seq: int, batch: Any, payload: bytes, now: float, **options: bool) -> Any:
        self.epoch = batch.mark.epoch if batch.mark is not None else self.epoch
        return apply(self, seq, batch, payload, now, **options)

    patch.setattr(Replica, "apply", applied)


def _unread_events_do_not_matter(patch: pytest.MonkeyPatch) -> None:
    def decode(payload: bytes) -> DecodedBatch:
        return msgspec.structs.replace(decode_batch(payload), skipped=0)

    patch.setattr(exactness_kit, "decode_batch", decode)


CONTROLS: dict[Patch, int] = {
    _mark_confirms_over_losses: 0,
    _clear_mends_all_ranks: 200,
    _clear_empties_all_ranks: 0,
    _clear_alone_is_a_proof: 0,
    _nothing_is_torn: 0,
    _half_an_answer_counts: 0,
    _other_incarnations_are_the_same: 1200,
    _unread_events_do_not_matter: 0,
}
"""What is taken away, and the seed before one that shows it."""


@pytest.mark.parametrize("control", CONTROLS)
def test_without_each_rule_something_is_called_exact_that_is_not(
    control: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    control(monkeypatch)
    with pytest.raises(AssertionError, match="called exact and is not"):
        _make_claims(CONTROLS[control])


def _make_claims(first: int) -> None:
    """Run schedules as far as their claims go; that they come to a good end is not asked of a control."""
    for seed in range(first, first + 20_000):
        case = Case(seed)
        for _ in range(120):
            case.step()
