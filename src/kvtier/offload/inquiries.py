"""Inquiries: questions to tiers that do not know what they hold, and the requests that wait for the answers.

    note --submit--> asked --poll--> answered, or over at the deadline

Noting an inquiry starts nothing; `submit` has the tiers ask their servers, once in a step. `is_waiting`
answers in O(1). When a wait is over, the tiers' lookups give the answers found by then; a chunk without an
answer counts as absent. Scheduler thread only; nothing blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.errors import IntegrityError
from kvtier.keys import OffloadKey
from kvtier.offload.base import NO_REQUEST, ReqContext
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.offload.promotions import TierCost
from kvtier.tiers.base import Tier

__all__ = ["Inquiries", "Inquiry", "InquiryTime"]


class Inquiry(NamedTuple):
    """Chunks of a prefix, from its head on, that a tier may have; and the cost of promoting all of them."""

    tier: Tier
    keys: list[OffloadKey]
    cost: TierCost


class InquiryTime(NamedTuple):
    """The time that a tier took to answer. `lost`: it had not answered after `seconds`."""

    tier: str
    seconds: float
    lost: bool


@dataclass(slots=True, eq=False)
class _Asker:
    """A request that waits for answers."""

    req_id: str
    inquiries: list[Inquiry]
    deadline: float
    started: float | None = None

    def unanswered(self) -> list[Inquiry]:
        """Return the inquiries that are not answered.

        While the first key of an inquiry has no answer, its other keys are not looked at.
        """
        return [inquiry for inquiry in self.inquiries if not _is_answered(inquiry)]


def _is_answered(inquiry: Inquiry) -> bool:
    tier, keys, _ = inquiry
    return tier.lookup(keys[0]) is not None and None not in tier.lookup_many(keys)


class Inquiries:
    """The inquiries of requests to `tiers`."""

    def __init__(
        self,
        pool: CPUOffloadingManager,
        tiers: Sequence[Tier],
        row_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._pool, self._tiers, self._row_bytes, self._clock = pool, tiers, row_bytes, clock
        self._noted: list[_Asker] = []
        self._askers: dict[str, _Asker] = {}
        self._times: list[InquiryTime] = []

    def unknown(self, keys: Sequence[OffloadKey]) -> list[Inquiry]:
        """Return, for each tier, the chunks that it may have and that no other tier is known to have.

        This changes nothing.
        """
        keys = [key for key in keys if self._pool.lookup(key, NO_REQUEST) is False]
        answers = [(tier, tier.lookup_many(keys)) for tier in self._tiers]
        had = [any(answer[at] for _, answer in answers) for at in range(len(keys))]
        inquiries = []
        for tier, answer in answers:
            open_keys = [
                key
                for key, found, is_had in zip(keys, answer, had, strict=True)
                if found is None and not is_had
            ]
            if open_keys:
                cost = TierCost(tier.name, len(open_keys) * self._row_bytes, tier.promotion_bytes)
                inquiries.append(Inquiry(tier, open_keys, cost))
        return inquiries

    def note(self, inquiries: list[Inquiry], seconds: float, context: ReqContext) -> None:
        """Note that a request wants answers, and waits for them for `seconds` at most."""
        asker = self._askers[context.req_id] = _Asker(context.req_id, inquiries, self._clock() + seconds)
        self._noted.append(asker)

    def submit(self) -> None:
        """Have the tiers asked for everything that was noted in this step."""
        noted, self._noted = self._noted, []
        for asker in noted:
            if self._askers.get(asker.req_id) is asker:
                asker.started = self._clock()
                for tier, keys, _ in asker.inquiries:
                    tier.ask(keys, asker.deadline)

    def is_waiting(self, context: ReqContext) -> bool:
        """Say whether a request should go on waiting for answers."""
        asker = self._askers.get(context.req_id)
        return asker is not None and self._clock() < asker.deadline

    def load(self) -> tuple[int, int]:
        """Return how many requests wait for answers, and about how many chunks."""
        asked = [len(inquiry.keys) for asker in self._askers.values() for inquiry in asker.inquiries]
        return len(self._askers), sum(asked)

    def busy_tiers(self) -> list[Tier]:
        """Return the tiers whose answers a request waits for."""
        return [
            tier
            for tier in self._tiers
            if any(tier is i.tier for a in self._askers.values() for i in a.inquiries)
        ]

    def poll(self) -> None:
        """End the waits that are over: everything is answered, or the deadline has passed."""
        now = self._clock()
        for asker in list(self._askers.values()):
            if asker.started is None:
                continue
            is_over, left = now >= asker.deadline, asker.unanswered()
            unanswered = {inquiry.tier for inquiry in left}
            for inquiry in asker.inquiries:
                if is_over or inquiry.tier not in unanswered:
                    self._times.append(InquiryTime(inquiry.tier.name, now - asker.started, lost=is_over))
            asker.inquiries = left
            if is_over or not left:
                del self._askers[asker.req_id]

    def take_times(self) -> list[InquiryTime]:
        """Take the times of the answers since the last call."""
        times, self._times = self._times, []
        return times

    def release(self, context: ReqContext) -> None:
        """Forget a request that has ended. The tiers still remember the answers to its questions."""
        self._askers.pop(context.req_id, None)

    def reset(self) -> None:
        """Forget all requests."""
        self._askers.clear()
        self._noted.clear()

    def check(self) -> None:
        """Raise `IntegrityError` if a request waits whose inquiries were neither noted nor submitted."""
        noted = {asker.req_id for asker in self._noted}
        for req_id, asker in self._askers.items():
            if asker.started is None and req_id not in noted:
                raise IntegrityError(f"inquiries: request {req_id} waits for answers that nobody asks for")
