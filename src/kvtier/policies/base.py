"""The contract of an eviction policy, which decides which chunks leave a full tier.

A policy ranks the *slots* of one tier. It never sees bytes or readers. The manager tells it which slots were
filled, used and emptied, and how the requests ended that used them. It asks for victims among the slots that
may leave. Slots are passed as int64 numpy arrays, so that a batch costs one call; a policy in plain Python
can loop over `slots.tolist()`.

Implement the abstract methods in any package, register the class with `kvtier.policies.register_policy`, and
run `kvtier.testing.PolicySuite` against it. Scheduler thread only.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey

Slots = npt.NDArray[np.int64]
KeysOf = Callable[[Slots], list[OffloadKey]]
"""Returns the keys of the chunks in slots."""
ENDINGS = ("unknown", "tool", "turn")
"""How a request may have ended: nobody knows, with a call of a tool, or with the end of a turn."""


class Ending(NamedTuple):
    """How a request ended: the number of tokens of its answer, if that is known, and one of `ENDINGS`."""

    num_tokens: int | None = None
    how: str = ENDINGS[0]


UNKNOWN_ENDING = Ending()


class CachePolicy(ABC):
    """A ranking of up to `capacity` slots, numbered from 0.

    Only the abstract methods must be written. The others have defaults for a policy that takes no interest
    in what they tell.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Returns the time in seconds. Who simulates time sets another one."""

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

        A request may tell of its use when it begins and, with `end_request`, when it ends. `reused[i]` is
        False if the request that uses the chunk has stored it: this renews the chunk's recency, but is not a
        second use.
        """

    def end_request(self, slots: Slots, reused: npt.NDArray[np.bool_], ending: Ending) -> None:
        """Record a use, as `touch` does, by a request that has ended like this."""
        self.touch(slots, reused)

    @abstractmethod
    def evict(self, count: int, evictable: npt.NDArray[np.bool_], keys_of: KeysOf) -> Slots:
        """Unrank and return up to `count` slots, worst first, all of them with `evictable[slot]`.

        Return fewer only if fewer ranked slots are evictable. A policy that remembers evicted chunks gets
        their keys from `keys_of`.
        """

    def evict_for(
        self,
        newcomers: list[OffloadKey],
        count: int,
        evictable: npt.NDArray[np.bool_],
        keys_of: KeysOf,
        stored_by: Slots,
        user: int,
    ) -> Slots:
        """Evict up to `count` slots for new chunks, ordered head to tail.

        `stored_by` has a number for each slot, that of the request that stored its chunk; the new chunks are
        of the request with the number `user`.
        A policy may return fewer slots if the last newcomers are worth less than the chunks that would have
        to leave. They are not stored then. By default every newcomer is worth it.
        """
        return self.evict(count, evictable, keys_of)

    def refuse(self, newcomers: list[OffloadKey]) -> None:
        """Take note of new chunks that are not stored because a chunk before them was not worth it."""
        return

    def worth(self, newcomers: list[OffloadKey]) -> npt.NDArray[np.float64] | None:
        """Return what each new chunk is worth, where one that was never seen before is worth 1.

        `None`, the default, means that the policy cannot tell. A tier that may not write all new chunks asks
        this.
        """
        return None

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Unrank slots that are emptied for another reason than eviction.

        All of them are ranked. The policy remembers nothing of them.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all slots and keys."""

    @abstractmethod
    def ranked(self) -> Slots:
        """Return the ranked slots from worst to best, as `evict` would take them if all were evictable."""

    def coldest(self, count: int, evictable: npt.NDArray[np.bool_]) -> Slots:
        """Return up to `count` evictable slots, worst first, as `evict` would take them, and change nothing.

        This is called every few steps, so a policy that ranks many slots should not walk over all of them.
        """
        ranked = self.ranked()
        return ranked[evictable[ranked]][:count]

    def learnt(self) -> bytes:
        """Return what a policy for the same chunks should know after a restart; it is kept with the disk."""
        return b""

    def take_learnt(self, data: bytes) -> bool:
        """Begin with what `learnt` returned, and return whether it was of use. Bytes may be damaged."""
        return False

    def check(self) -> None:
        """Raise `IntegrityError` if an invariant of the policy is broken."""
        return
