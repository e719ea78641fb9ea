"""Which chunks are to blame for loads that failed: those whose bytes are wrong, or that fail again and again.

Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter

from kvtier.connector.jobs import LoadJob
from kvtier.keys import OffloadKey

__all__ = ["LoadFailures"]

_FAILURES_TO_BLAME = 2  # loads of one chunk that fail in a row: the chunk itself is blamed
_MAX_COUNTED = 4096


class LoadFailures:
    """How often each chunk failed since it last arrived. Bounded: it forgets all rather than grow."""

    def __init__(self) -> None:
        self._counts: Counter[OffloadKey] = Counter()

    def blame(self, job: LoadJob) -> list[OffloadKey]:
        """Take in how a load ended, and return the chunks that should be loaded no more."""
        if self._counts:
            for index in job.arrived():
                self._counts.pop(job.keys[index], None)
        guilty = [job.keys[index] for index in job.failed if self._is_to_blame(job.keys[index], index in job.corrupt)]
        if len(self._counts) > _MAX_COUNTED:
            self._counts.clear()
        return guilty

    def _is_to_blame(self, key: OffloadKey, is_corrupt: bool) -> bool:
        self._counts[key] += 1
        is_guilty = is_corrupt or self._counts[key] >= _FAILURES_TO_BLAME
        if is_guilty:
            del self._counts[key]
        return is_guilty

    def clear(self) -> None:
        """Forget all failures."""
        self._counts.clear()
