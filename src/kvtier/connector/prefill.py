"""The prompt tokens that requests have still to compute, in the order in which the engine asked about them.

Computing a prompt instead of loading it takes its turn behind these. An entry begins with the answer to a
question and ends when the engine has scheduled its last prompt token, or with its request. Scheduler thread
only; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.connector.metadata import ReqId
from kvtier.errors import IntegrityError

__all__ = ["PrefillQueue"]


class PrefillQueue:
    """Tokens left to compute, by request."""

    def __init__(self) -> None:
        self._left: dict[ReqId, int] = {}

    def put(self, req_id: ReqId, tokens: int) -> None:
        """Note what a request has to compute. One that is asked about again keeps its place."""
        self._left[req_id] = tokens

    def discard(self, req_id: ReqId) -> None:
        """Forget a request that has ended."""
        self._left.pop(req_id, None)

    def take_step(self, num_scheduled_tokens: Mapping[ReqId, int]) -> None:
        """Note what a step computes. Most steps compute no prompt."""
        for req_id in self._left.keys() & num_scheduled_tokens.keys() if self._left else ():
            self._left[req_id] -= num_scheduled_tokens[req_id]
            if self._left[req_id] <= 0:
                del self._left[req_id]

    def ahead_of(self, req_id: ReqId) -> int:
        """Count the tokens of the requests before this one."""
        total = 0
        for other, tokens in self._left.items():
            if other == req_id:
                break
            total += tokens
        return total

    def check(self) -> None:
        """Raise `IntegrityError` if a request is kept that has nothing left."""
        if done := [req_id for req_id, tokens in self._left.items() if tokens <= 0]:
            raise IntegrityError(f"expected requests with tokens to compute, got {done[:5]} with none")
