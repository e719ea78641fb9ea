"""The contract of an eviction policy: who leaves a full tier.

A policy ranks the *slots* of one tier. It never sees bytes, requests or readers: the manager tells it what
came, what was used and what went, and asks it for victims among the slots that may leave. Slots travel as
int64 numpy arrays so that a batch costs one call; a policy that prefers plain Python loops over
`slots.tolist()`.

Implement the abstract methods in any package, register the class with `kvtier.policies.register_policy`, and
run `kvtier.testing.policy_suite` against it. Called on the scheduler thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey

__all__ = ["CachePolicy", "KeysOf", "Slots"]

Slots = npt.NDArray[np.int64]
KeysOf = Callable[[Slots], list[OffloadKey]]
"""Names the chunks that slots hold."""


class CachePolicy(ABC):
    """Ranks up to `capacity` slots, numbered from 0."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def insert(self, slots: Slots, keys: list[OffloadKey]) -> None:
        """Add new chunks, ordered head to tail of a prefix: the tail must leave before the head.

        The slots are distinct and not ranked yet. `keys` lets a policy recognise a chunk that it evicted
        before.
        """

    @abstractmethod
    def touch(self, slots: Slots, reused: npt.NDArray[np.bool_]) -> None:
        """Note a use of distinct ranked slots, ordered head to tail: the tail must leave before the head.

        `reused[i]` is False where the request that uses the chunk is the one that stored it: renewing its
        recency is right, counting it as a second use is not.
        """

    @abstractmethod
    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        """Unrank and return up to `count` slots, worst first, all of them with `evictable[slot]`.

        Returns fewer only if fewer ranked slots are evictable. A policy that remembers whom it evicted asks
        `keys_of`.
        """

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Unrank slots that went for another reason than eviction.

        They are ranked; nothing is remembered of them.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def ranked(self) -> Slots:
        """Return the ranked slots from worst to best, as `evict` would take them if all were evictable.

        For tests and reports.
        """

    def coldest(self, count: int, evictable: npt.NDArray[np.bool_]) -> Slots:
        """Return up to `count` evictable slots, worst first, as `evict` would take them, and change nothing.

        Called every few steps: a policy that ranks many slots should not walk over all of them.
        """
        ranked = self.ranked()
        return ranked[evictable[ranked]][:count]

    def check(self) -> None:
        """Raise `IntegrityError` if an invariant of the policy is broken."""
        return
