"""The contract of an eviction policy, which decides which chunks leave a full tier.

A policy ranks the *slots* of one tier. It never sees bytes, requests or readers. The manager tells it which
slots were filled, used and emptied, and asks it for victims among the slots that may leave. Slots are passed
as int64 numpy arrays, so that a batch costs one call; a policy in plain Python can loop over
`slots.tolist()`.

Implement the abstract methods in any package, register the class with `kvtier.policies.register_policy`, and
run `kvtier.testing.PolicySuite` against it. Scheduler thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey

Slots = npt.NDArray[np.int64]
KeysOf = Callable[[Slots], list[OffloadKey]]
"""Returns the keys of the chunks in slots."""


class CachePolicy(ABC):
    """A ranking of up to `capacity` slots, numbered from 0."""

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
        """Record a use of distinct ranked slots, ordered head to tail: the tail must leave before the head.

        `reused[i]` is False if the request that uses the chunk has stored it: this renews the chunk's
        recency, but is not a second use.
        """

    @abstractmethod
    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        """Unrank and return up to `count` slots, worst first, all of them with `evictable[slot]`.

        Return fewer only if fewer ranked slots are evictable. A policy that remembers evicted chunks gets
        their keys from `keys_of`.
        """

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Unrank slots that are emptied for another reason than eviction.

        All of them are ranked. The policy remembers nothing of them.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def ranked(self) -> Slots:
        """Return the ranked slots from worst to best, as `evict` would take them if all were evictable."""

    def coldest(self, count: int, evictable: npt.NDArray[np.bool_]) -> Slots:
        """Return up to `count` evictable slots, worst first, as `evict` would take them, and change nothing.

        This is called every few steps, so a policy that ranks many slots should not walk over all of them.
        """
        ranked = self.ranked()
        return ranked[evictable[ranked]][:count]

    def check(self) -> None:
        """Raise `IntegrityError` if an invariant of the policy is broken."""
        return
