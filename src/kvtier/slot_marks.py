"""`SlotMarks`: what hints and shares say about the chunks of a table, by slot.

A table asks in which order groups of its chunks should leave; within a group, its policy decides:

    low       stored by a request that said `drop` or has a low priority
    ordinary  all others
    kept      until a time that a request gave

Nothing is pinned: if nothing else may leave, kept chunks leave. Kept chunks are at most half of the slots,
or of a tenant's share. With a share, a tenant that has as many chunks as its share makes room among its own
chunks only. Free slots are not denied to anybody; a tenant that has taken more than its share while nobody
else needed it gives way first, down to its share. The owner of a chunk is the tenant who stored it: the salt
is part of a chunk's key, so tenants cannot share one. What is remembered is bounded by the number of slots.
Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.hints import Hints
from kvtier.policies import Slots
from kvtier.policies.slots import Mask

_NOBODY = 0
"""The number of no tenant: the owner of free slots, and of chunks from an earlier process."""
_NEVER = float("-inf")
"""The time until which a chunk is kept that no hint keeps: before all times, whatever the clock says."""
_COMPARED_FOR = 1.0
"""Seconds for which the chunks that are kept are known without comparing their times."""


class SlotMarks:
    """The marks of `num_slots` slots. `share` is the part of them that a tenant may have."""

    def __init__(self, num_slots: int, share: float | None = None) -> None:
        self.num_slots = num_slots
        self.limit = None if share is None else max(1, int(share * num_slots))
        """The slots that a tenant may have before it has to make room among its own chunks."""
        self._most_kept = (num_slots if self.limit is None else self.limit) // 2
        self.not_kept = 0
        """The total of chunks that a request wanted to keep beyond what may be kept."""
        self.clear()

    def clear(self) -> None:
        """Forget all chunks."""
        self._low: Mask = np.zeros(self.num_slots, dtype=np.bool_)
        self._has_low = False  # whether any slot may be low
        self._kept_until = np.full(self.num_slots, _NEVER)
        self._last_kept_until = _NEVER
        self._is_kept: Mask = np.zeros(self.num_slots, dtype=np.bool_)
        self._compared_at = _NEVER
        owners = 0 if self.limit is None else self.num_slots
        self._owners: npt.NDArray[np.int32] = np.zeros(owners, dtype=np.int32)
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._used: Counter[int] = Counter()
        self._spare_numbers: list[int] = []
        self._above: set[int] = set()  # the tenants with more chunks than their share

    # -- chunks that come, are used, and leave -----------------------------------------------------

    def store(self, slots: Slots, tenant: str) -> None:
        """Record the owner of new chunks."""
        if self.limit is None or not len(slots):
            return
        number = self._numbers.get(tenant)
        if number is None:
            number = self._spare_numbers.pop() if self._spare_numbers else len(self._numbers) + 1
            self._numbers[tenant], self._names[number] = number, tenant
        self._owners[slots] = number
        self._count(number, len(slots))

    def end_request(self, slots: Slots, reused: Mask, hints: Hints, tenant: str, now: float) -> None:
        """Apply the hints of a request that has ended to the chunks that it used, ordered head to tail.

        Only chunks that the request stored itself can become low. A use by any other request makes a low
        chunk ordinary again, unless that request has a low priority, too.
        """
        is_low = hints.drop or hints.priority < 0
        if is_low:
            self._low[slots[~reused]] = self._has_low = True
        if self._has_low and hints.priority >= 0:
            self._low[slots[reused]] = False
        if hints.keep:
            self._keep(slots, tenant, now, now + hints.keep)
        elif hints.drop:
            self._kept_until[slots[~reused]] = _NEVER
            self._is_kept[slots[~reused]] = False

    def _keep(self, slots: Slots, tenant: str, now: float, until: float) -> None:
        """Keep a tenant's own chunks, up to half of what it may have."""
        is_kept = self._kept_at(now)
        if self.limit is not None:
            number = self._numbers.get(tenant, _NOBODY)
            slots = slots[self._owners[slots] == number]
            is_kept = is_kept & (self._owners == number)
        new = slots[~is_kept[slots]]
        room = max(0, self._most_kept - int(np.count_nonzero(is_kept)))
        self.not_kept += max(0, len(new) - room)
        kept = np.concatenate((slots[is_kept[slots]], new[:room]))
        self._kept_until[kept] = np.maximum(self._kept_until[kept], until)
        self._is_kept[kept] = True
        self._last_kept_until = max(self._last_kept_until, until)

    def _kept_at(self, now: float) -> Mask:
        """Return which chunks are kept, or were within the last second: to compare all times takes long."""
        if not 0.0 <= now - self._compared_at < _COMPARED_FOR:
            self._is_kept, self._compared_at = self._kept_until > now, now
        return self._is_kept

    def leave(self, slots: Slots) -> None:
        """Forget chunks that are not in these slots any more."""
        self._low[slots] = self._is_kept[slots] = False
        self._kept_until[slots] = _NEVER
        if self.limit is not None:
            for number, count in Counter(self._owners[slots].tolist()).items():
                if number != _NOBODY:
                    self._count(number, -count)
            self._owners[slots] = _NOBODY

    def _count(self, number: int, change: int) -> None:
        self._used[number] += change
        if self.limit is not None and self._used[number] > self.limit:
            self._above.add(number)
        else:
            self._above.discard(number)
        if not self._used[number]:
            del self._used[number], self._numbers[self._names.pop(number)]
            self._spare_numbers.append(number)

    # -- who leaves --------------------------------------------------------------------------------

    def groups(self, evictable: Mask, now: float) -> Iterator[tuple[Mask, bool]]:
        """Yield the groups of evictable chunks in the order in which they should leave.

        With each comes whether its chunks are low, so that any other chunk is worth more.
        """
        if not self._has_low and now >= self._last_kept_until:
            yield evictable, False
            return
        kept = self._kept_at(now)
        if self._has_low:
            self._has_low = bool(self._low.any())
            yield evictable & self._low & ~kept, True
        yield evictable & ~(self._low | kept), False
        if now < self._last_kept_until:
            yield evictable & kept, False

    def groups_for(
        self, tenant: str, count: int, num_free: int, evictable: Mask, now: float
    ) -> Iterator[tuple[Mask, bool, int]]:
        """Yield the groups of chunks that may leave for a tenant who needs `count` slots beyond the free.

        With each comes whether its chunks leave for any newcomer, because they are low or beyond a share;
        and how many of the `count` chunks may have left after it.
        """
        if self.limit is None:
            yield from ((group, low, count) for group, low in self.groups(evictable, now))
            return
        number = self._numbers.get(tenant, _NOBODY)
        room = min(count, self.limit - self._used[number] - num_free)
        if room > 0:
            gone, may_leave = 0, self._evictable_by_owner(evictable)
            for other in sorted(self._above, key=self._used.__getitem__, reverse=True):
                if gone >= room:
                    break
                if may_leave[other]:
                    used, theirs = self._used[other], self._owners == other
                    most = min(room, gone + used - self.limit)
                    yield from ((group & theirs, True, most) for group, _ in self.groups(evictable, now))
                    gone += used - self._used[other]
            yield from ((group, low, room) for group, low in self.groups(evictable, now))
        if number != _NOBODY:
            own = self._owners == number
            yield from ((group & own, low, count) for group, low in self.groups(evictable, now))

    def _evictable_by_owner(self, evictable: Mask) -> npt.NDArray[np.int64]:
        """Count the evictable chunks by the number of their owner."""
        most = len(self._numbers) + len(self._spare_numbers)
        return np.bincount(self._owners[evictable], minlength=most + 1)

    def available(self, tenant: str, num_free: int, evictable: Mask) -> int:
        """Count the slots that a tenant may fill: free ones, its own, and others' up to its share."""
        total = int(np.count_nonzero(evictable))
        if self.limit is None:
            return num_free + total
        number = self._numbers.get(tenant, _NOBODY)
        own = int(np.count_nonzero(evictable & (self._owners == number))) if number != _NOBODY else 0
        room = max(0, self.limit - self._used[number] - num_free)
        return num_free + own + min(room, total - own)

    # -- reports -----------------------------------------------------------------------------------

    def used_by_tenant(self) -> dict[str, int]:
        """Return the number of chunks of each tenant that has any."""
        return {name: self._used[number] for name, number in self._numbers.items()}

    def tenants_of(self, slots: Slots) -> list[str]:
        """Return the tenant of each slot; an empty name for chunks of nobody."""
        return [self._names.get(number, "") for number in self._owners[slots].tolist()]

    def check(self, held: Slots, now: float) -> None:
        """Raise `IntegrityError` if an invariant is broken. `held` are the slots with a chunk."""
        free = np.ones(self.num_slots, dtype=np.bool_)
        free[held] = False
        kept, owners = np.flatnonzero(self._kept_until > now), Counter(self._owners.tolist())
        by_owner = Counter(self._owners[kept].tolist()) if self.limit is not None else {0: len(kept)}
        del owners[_NOBODY]
        limit = self.num_slots if self.limit is None else self.limit
        latest = self._kept_until.max(initial=_NEVER)
        rules = (
            (not self._low[free].any(), "free slots are not low"),
            ((self._kept_until[free] == _NEVER).all(), "free slots are not kept"),
            (self._has_low or not self._low.any(), "low chunks are known to exist"),
            (latest <= self._last_kept_until, "the last time to keep is known"),
            (max(by_owner.values(), default=0) <= self._most_kept, "not too many chunks are kept"),
            (self.limit is None or not self._owners[free].any(), "free slots have no owner"),
            (owners == self._used, "the chunks of a tenant are counted"),
            (
                self._numbers == {name: number for number, name in self._names.items()},
                "numbers name tenants",
            ),
            (self._names.keys() == self._used.keys(), "a tenant has chunks"),
            (self._above == {at for at, used in self._used.items() if used > limit}, "the greedy are known"),
        )
        for holds, rule in rules:
            if not holds:
                raise IntegrityError(f"slot marks: expected that {rule}")
