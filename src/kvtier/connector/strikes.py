"""Which chunks are to blame for loads that failed: those whose bytes are wrong, or that fail again and again.

Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter

from kvtier.connector.jobs import LoadJob
from kvtier.keys import OffloadKey

__all__ = ["Strikes"]

_ENOUGH = 2  # loads of one chunk that may fail in a row before the chunk itself is blamed
_MAX_STRUCK = 4096


class Strikes:
    """How often each chunk failed since it last arrived. Bounded: it forgets all rather than grow."""

    def __init__(self) -> None:
        self._strikes: Counter[OffloadKey] = Counter()

    def blame(self, job: LoadJob) -> list[OffloadKey]:
        """Take in how a load ended, and return the chunks that should be loaded no more."""
        if self._strikes:
            for index in job.arrived():
                self._strikes.pop(job.keys[index], None)
        guilty = [job.keys[index] for index in job.failed if self._strike(job.keys[index], index in job.corrupt)]
        if len(self._strikes) > _MAX_STRUCK:
            self._strikes.clear()
        return guilty

    def _strike(self, key: OffloadKey, is_corrupt: bool) -> bool:
        self._strikes[key] += 1
        is_out = is_corrupt or self._strikes[key] >= _ENOUGH
        if is_out:
            del self._strikes[key]
        return is_out

    def clear(self) -> None:
        """Forget all failures."""
        self._strikes.clear()
