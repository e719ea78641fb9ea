"""Batches that could not be queued, folded into what they do to the published state.

Per block the counts of a publisher change by +1, by -1 but not below 0, or to a constant. All of these, one after another, are
some `n -> max(n + step, least)`, so a block needs two numbers however many batches are folded; besides them, the
event that stored it last. A fold is therefore never larger than what the cache holds or held, not as long as the backlog.
`Fold` is not for several threads at once; the outbox locks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from kvtier.errors import IntegrityError
from kvtier.events.publish.formats import HashFormat
from kvtier.events.publish.state import PublishedState
from kvtier.events.types import BlockRemoved, BlockStored, ExternalBlockHash
from kvtier.events.wire import Place, place_of

__all__ = ["Fold"]


class _Net:
    """What became of one block: its count `n` is now `max(n + step, least)`; `event` stored it last, or else removed it."""

    __slots__ = ("event", "least", "step")

    def __init__(self, event: BlockStored | BlockRemoved, step: float) -> None:
        self.event, self.step, self.least = event, step, 0


class Fold:
    """The net effect of a run of batches, and how many they were."""

    def __init__(self, counting: str = "count") -> None:
        self.batches = 0
        self._counted = counting == "count"
        self._all_cleared = False
        self._media_cleared: set[str] = set()
        self._nets: dict[Place, dict[ExternalBlockHash, _Net]] = {}

    def add(self, events: Iterable[Any]) -> None:
        """Add one batch. An event of an unknown kind does nothing to the state, nor does one that cannot be read."""
        self.batches += 1
        for event in events:
            try:
                self._add(type(event).__name__, event)
            except (AttributeError, TypeError):
                continue

    def _add(self, kind: str, event: Any) -> None:
        if kind == "BlockStored":
            nets, step = self._nets_of(event)
            for block in event.block_hashes:
                net = nets.get(block) or nets.setdefault(block, _Net(event, step))
                net.event = event
                net.step, net.least = (net.step + 1, net.least + 1) if self._counted else (-inf, 1)
        elif kind == "BlockRemoved":
            nets, step = self._nets_of(event)
            for block in event.block_hashes:
                net = nets.get(block) or nets.setdefault(block, _Net(event, step))
                net.step, net.least = (net.step - 1, max(net.least - 1, 0)) if self._counted else (-inf, 0)
        elif kind == "AllBlocksCleared":
            self._all_cleared = True
            self._nets.clear()
        elif kind == "TierCleared":
            self._media_cleared.add(event.medium)
            for place in [place for place in self._nets if place[0] == event.medium]:
                del self._nets[place]

    def _nets_of(self, event: BlockStored | BlockRemoved) -> tuple[dict[ExternalBlockHash, _Net], float]:
        """Return the blocks of the event's place, and the step of one that has no net effect yet."""
        place = place_of(event)
        emptied = self._all_cleared or place[0] in self._media_cleared
        return self._nets.setdefault(place, {}), -inf if emptied else 0

    def apply(self, state: PublishedState, formats: HashFormat) -> int:
        """Do to the state what the batches would have done; return how many blocks could not be taken in."""
        if self._all_cleared:
            state.clear()
        for medium in self._media_cleared:
            state.clear_medium(medium, [])
        return sum(_apply_nets(state, nets, formats) for nets in self._nets.values())

    def check(self) -> None:
        """Raise `IntegrityError` where a net effect is impossible."""
        for place, nets in self._nets.items():
            wrong = [block for block, net in nets.items() if net.least < 0 or net.step > net.least]
            if wrong:
                raise IntegrityError(f"fold: {place}: impossible net effect of {wrong}")


def _apply_nets(state: PublishedState, nets: dict[ExternalBlockHash, _Net], formats: HashFormat) -> int:
    """Let go first, then take in, then set counts; return how many blocks could not be taken in."""
    stored: dict[int, tuple[Any, dict[ExternalBlockHash, int]]] = {}
    lost = 0
    for original, net in nets.items():
        try:
            block = formats.block(original)
        except TypeError:  # it is no hash
            lost += 1
            continue
        before = state.count_of(net.event, block)
        after = int(max(before + net.step, net.least))
        if before:
            state.set_count(net.event, block, after)
        elif after:
            stored.setdefault(id(net.event), (net.event, {}))[1][block] = after
    return lost + sum(_adopt(state, event, counts, formats) for event, counts in stored.values())


def _adopt(state: PublishedState, event: Any, counts: dict[ExternalBlockHash, int], formats: HashFormat) -> int:
    try:
        state.adopt(formats.event(event), set(counts))
    except (AttributeError, OverflowError, TypeError, ValueError):
        return len(counts)
    for block, count in counts.items():
        state.set_count(event, block, count)
    return 0
