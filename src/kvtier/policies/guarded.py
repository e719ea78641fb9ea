"""`GuardedPolicy`: a wrapper of a foreign policy, which may choose badly but can do no other harm.

A policy runs on the engine's scheduler thread. If it raises there, or names slots that may not leave, the
error is logged and the policy is not asked again. LRU takes its place; it has followed all uses from the
start. An exception that is not an `Exception`, such as `KeyboardInterrupt`, passes: it is meant to end the
program. A policy gets copies of arrays, because the slots of a store also belong to its transfer. Scheduler
thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from kvtier.errors import InputError
from kvtier.keys import OffloadKey
from kvtier.policies.base import CachePolicy, KeysOf, Slots
from kvtier.policies.lru import LRUPolicy
from kvtier.policies.slots import Mask

__all__ = ["GuardedPolicy"]

logger = logging.getLogger(__name__)


class GuardedPolicy(CachePolicy):
    """A policy that asks `policy` as long as that keeps the contract, and LRU from then on."""

    def __init__(self, policy: CachePolicy) -> None:
        super().__init__(policy.capacity)
        self.policy = policy
        """The policy that is asked now."""
        self._lru = LRUPolicy(self.capacity)
        self._is_ranked = np.zeros(self.capacity, dtype=np.bool_)

    def insert(self, slots: Slots, keys: list[OffloadKey]) -> None:
        self._tell("insert", lambda: self.policy.insert(slots.copy(), keys.copy()))
        self._lru.insert(slots, keys)
        self._is_ranked[slots] = True

    def touch(self, slots: Slots, reused: Mask) -> None:
        self._tell("touch", lambda: self.policy.touch(slots.copy(), reused.copy()))
        self._lru.touch(slots, reused)

    def evict(self, count: int, evictable: Mask, keys_of: KeysOf) -> Slots:
        allowed = evictable & self._is_ranked
        victims = self._ask(
            "evict",
            lambda: self.policy.evict(count, evictable.copy(), keys_of),
            lambda slots: _is_choice(slots, count, allowed),
        )
        if victims is None:
            victims = self._lru.evict(count, evictable, keys_of)
        else:
            self._lru.remove(victims)
        self._is_ranked[victims] = False
        return victims

    def remove(self, slots: Slots) -> None:
        self._tell("remove", lambda: self.policy.remove(slots.copy()))
        self._lru.remove(slots)
        self._is_ranked[slots] = False

    def clear(self) -> None:
        self._tell("clear", lambda: self.policy.clear())
        self._lru.clear()
        self._is_ranked[:] = False

    def ranked(self) -> Slots:
        ranked = self._ask(
            "ranked",
            lambda: self.policy.ranked(),
            lambda slots: _is_choice(slots, self.capacity, self._is_ranked),
        )
        return self._lru.ranked() if ranked is None else ranked

    def coldest(self, count: int, evictable: Mask) -> Slots:
        allowed = evictable & self._is_ranked
        coldest = self._ask(
            "coldest",
            lambda: self.policy.coldest(count, evictable.copy()),
            lambda slots: _is_choice(slots, count, allowed),
        )
        return self._lru.coldest(count, evictable) if coldest is None else coldest

    def check(self) -> None:
        self._tell("check", lambda: self.policy.check())
        self._lru.check()

    def _tell(self, call: str, tell: Callable[[], None]) -> None:
        try:
            if self.policy is not self._lru:
                tell()
        except Exception as error:
            self._replace(call, error)

    def _ask(self, call: str, ask: Callable[[], Slots], is_right: Callable[[Slots], bool]) -> Slots | None:
        """Return the policy's answer; `None`: LRU has to answer."""
        if self.policy is self._lru:
            return None
        try:
            answer = ask()
            if type(answer) is not np.ndarray or answer.size > self.capacity:  # an iterator may never end
                raise InputError(f"expected an array of at most {self.capacity} slots")
            slots = np.array(answer, dtype=np.int64)
            if is_right(slots):
                return slots
            raise InputError(f"expected different slots that may leave, as many as asked for; got {slots}")
        except Exception as error:
            self._replace(call, error)
            return None

    def _replace(self, call: str, error: Exception) -> None:
        policy, self.policy = self.policy, self._lru  # first, since the text of a foreign error may raise
        is_ours = type(error) is InputError
        logger.error(
            "policy %s: %s failed (%s); going on with lru until the engine starts again",
            type(policy).__qualname__, call, error if is_ours else _show(error),
            exc_info=None if is_ours else error,
        )  # fmt: skip


def _show(error: Exception) -> str:
    try:
        return repr(error)
    except Exception:
        return type(error).__qualname__


def _is_choice(slots: Slots, count: int, allowed: Mask) -> bool:
    """Say whether these are `count` different allowed slots, or all allowed slots if there are fewer."""
    chosen = np.zeros_like(allowed)
    if slots.ndim != 1 or (slots < 0).any() or (slots >= len(allowed)).any():
        return False
    chosen[slots] = True
    num_chosen = int(np.count_nonzero(chosen))
    return (
        num_chosen == len(slots) == min(count, int(np.count_nonzero(allowed)))
        and not (chosen & ~allowed).any()
    )
