"""An eviction policy of your own: the chunk with the fewest uses leaves first, the oldest of those first.

    PYTHONPATH=examples vllm serve MODEL --kv-transfer-config '{...
      "kv_connector_extra_config": {"cpu": {"capacity": "8GiB", "policy": "own_policy:FewestUses"}}}'

Test yours with `kvtier.testing.PolicySuite`; examples/manager_alone.py shows what it finds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey
from kvtier.policies import CachePolicy, KeysOf, Slots


class FewestUses(CachePolicy):
    """Counts uses. Plain Python; `kvtier.policies.recency` shows how arrays make a policy fast."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.clear()

    def insert(self, slots: Slots, keys: list[OffloadKey]) -> None:
        self._use(slots.tolist(), [1] * len(slots))

    def touch(self, slots: Slots, reused: npt.NDArray[np.bool_]) -> None:
        self._use(slots.tolist(), reused.tolist())

    def _use(self, slots: list[int], uses: list[int]) -> None:
        """Count uses from the tail of the prefix to its head, so that the tail leaves first."""
        for slot, more in zip(reversed(slots), reversed(uses), strict=True):
            self._clock += 1
            self._uses[slot] = self._uses.get(slot, (0, 0))[0] + more, self._clock

    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        victims = self.coldest(count, evictable)
        self.remove(victims)
        return victims

    def remove(self, slots: Slots) -> None:
        for slot in slots.tolist():
            del self._uses[slot]

    def clear(self) -> None:
        self._uses: dict[int, tuple[int, int]] = {}
        self._clock = 0

    def ranked(self) -> Slots:
        return np.array(sorted(self._uses, key=lambda slot: self._uses[slot]), dtype=np.int64)
