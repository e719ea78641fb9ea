"""The gate before a load: requests with blocks that do not run yet, and who must wait for them.

vLLM 0.32 can leave such requests waiting for each other for ever: it reserves too few blocks for them if a
window keeps blocks; and a request whose load failed gives its blocks back but stays ahead of the others,
which are not considered while it does not fit. The gate makes no request wait for ever: it opens once the
others run. Belongs to the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvtier.config import GroupConfig

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["LoadGate"]


class LoadGate:
    """The requests between their first blocks and their first step, whichever connector loads for them."""

    def __init__(self, groups: Sequence[GroupConfig]) -> None:
        self._groups = groups
        self._windowed = any(group.sliding_window is not None for group in groups)
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Note that a request got blocks, to load into or to run in this step."""
        self._requests[request.request_id] = request

    def __contains__(self, request: Request) -> bool:
        """Say whether a request has got blocks and has not run since.

        vLLM asks again only if its load failed.
        """
        return request.request_id in self._requests

    def discard(self, req_ids: Iterable[str]) -> None:
        """Note that requests run, or have ended."""
        for req_id in self._requests.keys() & req_ids if self._requests else ():
            del self._requests[req_id]

    def must_go_first(self, request: Request, tokens: int, manager: Any) -> bool:
        """Say whether the waiting requests must run before this one, with `tokens` to load, gets blocks."""
        may_block = self._windowed if tokens else request in self
        if not may_block:
            return False
        others = self._requests.values()
        waiting = [other.request_id for other in others if other.status is not RequestStatus.RUNNING]
        taken = {req_id: sum(map(len, manager.get_block_ids(req_id))) for req_id in waiting}
        missing = sum(
            self._num_blocks(self._requests[req_id]) - count for req_id, count in taken.items() if count
        )
        free = manager.block_pool.get_num_free_blocks()
        return any(taken.values()) and bool(missing + self._num_blocks(request) > free)

    def _num_blocks(self, request: Request) -> int:
        return sum(request.num_tokens // group.block_size + 1 for group in self._groups)
