"""`MissHistory`: a manager's notes on chunks that it does not hold: how often they were offered, and why
they are absent.

The notes are bounded: of each kind, the newest `limit` keys are remembered, or up to an eighth more.
Scheduler thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvtier.keys import OffloadKey
from kvtier.offload.base import MissReason
from kvtier.residency import BoundedKeyMap

__all__ = ["MissHistory"]


class MissHistory:
    """The record of offers and absences of keys."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._offers: BoundedKeyMap[int] = BoundedKeyMap(limit)
        self._reasons: BoundedKeyMap[MissReason] = BoundedKeyMap(limit)
        # Filed on the first question: chunks leave by the thousand and few are asked about.
        self._unfiled: deque[tuple[tuple[OffloadKey, ...], MissReason]] = deque()
        self._num_unfiled = 0

    def count_offers(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, int]:
        """Count one more offer of each key and return their counts."""
        counts = {key: (self._offers.get(key) or 0) + 1 for key in keys}
        self._offers.update(counts)
        return counts

    def forget_offers(self) -> None:
        """Start counting anew."""
        self._offers.clear()

    def note(self, keys: list[OffloadKey], reason: MissReason) -> None:
        """Remember why these keys are absent from now on."""
        if not keys:
            return
        self._unfiled.append((tuple(keys), reason))
        self._num_unfiled += len(keys)
        while self._unfiled and self._num_unfiled - len(self._unfiled[0][0]) >= self._limit:
            self._num_unfiled -= len(self._unfiled.popleft()[0])

    def reason(self, key: OffloadKey) -> MissReason:
        """Say why an absent key is absent, as far as is remembered.

        The last reason is returned; the age of the first one decides when the key is forgotten.
        """
        for keys, reason in self._unfiled:
            self._reasons.update(dict.fromkeys(keys, reason), renew=False)
        self._unfiled.clear()
        self._num_unfiled = 0
        return self._reasons.get(key) or MissReason.NEVER_STORED
