"""Batches that found no room in the queue, reduced to what they do to the published state.

Per block the counts of a publisher change by +1, by -1 but not below 0, or to a constant. All of these, one
after another, are some `n -> max(n + step, least)`, so a block needs two numbers however many batches
overflow; besides them, the event that stored it last. An overflow is therefore never larger than what the
cache holds or held, not as long as the backlog. `Overflow` is not for several threads at once; the outbox
locks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from kvtier.errors import IntegrityError
from kvtier.events.publish.state import PublishedState
from kvtier.events.types import BlockRemoved, BlockStored, ExternalBlockHash
from kvtier.events.wire import Place, place_of

__all__ = ["Draft", "Overflow"]

Draft = Callable[[Any], tuple[list[tuple[str, Any, bytes]], list[str]]]
_UNREADABLE = (AttributeError, OverflowError, RecursionError, TypeError, ValueError)


class _Net:
    """What became of one block: its count `n` is now `max(n + step, least)`.

    `event` stored it last, or removed it.
    """

    __slots__ = ("event", "least", "step")

    def __init__(self, event: BlockStored | BlockRemoved, step: float) -> None:
        self.event, self.step, self.least = event, step, 0


class Overflow:
    """The net effect of a run of batches, and how many they were."""

    def __init__(self, counting: str, draft: Draft) -> None:
        """Begin with nothing. `draft` brings events into their published form, see `Sender.draft`."""
        self.batches = 0
        self.unreadable = 0  # batches and events that cannot be published
        self.cleared: set[int] = set()
        self._draft = draft
        self._counted = counting == "count"
        self._nets: dict[int, dict[Place, dict[ExternalBlockHash, _Net]]] = {}

    def add(self, batch: Any) -> None:
        """Add one batch.

        An event of an unknown kind does nothing to the state, nor does one that cannot be published.
        """
        self.batches += 1
        try:
            drafts, problems = self._draft(batch.events)
            self.unreadable += len(problems)
            for kind, event, _ in drafts:
                self._add(batch.data_parallel_rank, kind, event)
        except _UNREADABLE:  # dropped whole, as on the way through the queue
            self.unreadable += 1

    def _add(self, rank: int, kind: str, event: Any) -> None:
        if kind == "AllBlocksCleared":
            self.cleared.add(rank)
            self._nets.pop(rank, None)
        elif kind in ("BlockStored", "BlockRemoved"):
            nets = self._nets.setdefault(rank, {}).setdefault(place_of(event), {})
            first_step = -inf if rank in self.cleared else 0
            is_store = kind == "BlockStored"
            for block in event.block_hashes:
                net = nets.get(block)
                if net is None:
                    net = nets[block] = _Net(event, first_step)
                if is_store:
                    net.event = event
                    net.step, net.least = (net.step + 1, net.least + 1) if self._counted else (-inf, 1)
                else:
                    net.step, net.least = (
                        (net.step - 1, max(net.least - 1, 0)) if self._counted else (-inf, 0)
                    )

    def ranks(self) -> set[int]:
        """Return the ranks whose states change."""
        return self.cleared | self._nets.keys()

    def apply(self, rank: int, state: PublishedState) -> None:
        """Do to a rank's state, emptied where it was cleared, what the batches would have done."""
        for nets in self._nets.get(rank, {}).values():
            _apply_nets(state, nets)

    def check(self) -> None:
        """Raise `IntegrityError` where a net effect is impossible."""
        for rank, places in self._nets.items():
            for place, nets in places.items():
                wrong = [block for block, net in nets.items() if net.least < 0 or net.step > net.least]
                if wrong:
                    raise IntegrityError(f"overflow: rank {rank}, {place}: impossible net effect of {wrong}")


def _apply_nets(state: PublishedState, nets: dict[ExternalBlockHash, _Net]) -> None:
    """Let go first, then take in, then set counts."""
    stored: dict[int, tuple[Any, dict[ExternalBlockHash, int]]] = {}
    for block, net in nets.items():
        before = state.count_of(net.event, block)
        after = int(max(before + net.step, net.least))
        if before:
            state.set_count(net.event, block, after)
        elif after:
            stored.setdefault(id(net.event), (net.event, {}))[1][block] = after
    for event, counts in stored.values():
        state.adopt(event, set(counts))
        for block, count in counts.items():
            state.set_count(event, block, count)
