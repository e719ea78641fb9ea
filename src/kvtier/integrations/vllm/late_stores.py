"""Requests that have ended, but whose last block may not be stored, because vLLM schedules steps ahead.

With asynchronous scheduling vLLM schedules a step before the tokens of the previous step are known. The
hash of a generated block is then known one step after the block is complete, and a request that ends there
has no such step. It gets one more, without tokens: an entry in the view of the next step. vLLM has freed
its blocks by then; if that step gives one of them to another request, the core stores nothing.

Aborted requests are left out: their blocks are not worth a rule. Belongs to the scheduler thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvtier.connector import CachedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["EndedRequests"]

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class EndedRequests:
    """The requests that have ended since the last step, if vLLM schedules ahead."""

    def __init__(self, schedules_ahead: bool) -> None:
        self._schedules_ahead = schedules_ahead
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> bool:
        """Keep a request until the next step; `False`: not needed for this request."""
        if not self._schedules_ahead or request.status not in _COMPLETE:
            return False
        self._requests[request.request_id] = request
        return True

    def entries(self) -> list[CachedRequest]:
        """Return the requests' entries in the next step. The last token has no KV."""
        return [
            CachedRequest(req_id, None, min(request.num_computed_tokens, request.num_tokens - 1))
            for req_id, request in self._requests.items()
        ]

    def take(self, req_id: str) -> list[Request]:
        """Take the request of this id, if there is one."""
        return [self._requests.pop(req_id)] if req_id in self._requests else []

    def take_all(self) -> list[Request]:
        """Take all of them."""
        taken, self._requests = list(self._requests.values()), {}
        return taken
