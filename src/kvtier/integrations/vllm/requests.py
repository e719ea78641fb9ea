"""The requests of a vLLM engine: which may get blocks now, which end a step later, and why one was not
served from a cache.

A request asks for an explanation with `kv_transfer_params: {"kvtier": {"explain": true}}`, and the answer's
`kv_transfer_params` then say where its prompt came from. Hints (`kvtier.hints`) come in the same place, or
in an action of vLLM's `kv_hints`. All other parameters are left alone. Requests that lost time are in vLLM's
log now and then. All of this belongs to the scheduler thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvtier.config import GroupConfig
from kvtier.connector import CachedRequest, Explanation, read_params
from kvtier.errors import LogLimit
from kvtier.offload import MissReason

if TYPE_CHECKING:
    from vllm.v1.request import Request

INTERVAL = 30.0
"""Seconds between two lines of a `RequestLog`."""
_SHARE_OF_DEADLINE = 4  # a load that takes a quarter of its deadline is slow
_ADVICE = {
    MissReason.EVICTED: "a larger cpu.capacity keeps more",
    MissReason.REFUSED: "a larger cpu.capacity or a lower store_threshold keeps more",
    MissReason.WRITING: "it came back before it was stored",
    MissReason.FAILED: "its bytes were wrong",
    MissReason.IO_FAILED: "a transfer did not arrive",
    MissReason.TOO_SLOW: "it was given up",
}
"""The advice for misses that cost time. Other misses are new prompts, resets, or a choice."""
_STATE_BLOCKS = 8  # at most, of a request's recurrent layers: the state, the one before, and those of drafts
_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class AdmissionGate:
    """Holds a request back while others that have blocks must run first.

    It keeps the requests between their first blocks and their first step, whichever connector loads for
    them. vLLM (0.31 to 0.33) can leave such requests waiting for each other for ever: it reserves too few
    blocks for them if a window or a state keeps blocks; and a request whose load failed gives its blocks
    back but stays ahead of the others, which are not considered while it does not fit. The gate makes no
    request wait for ever: it opens once the others run.
    """

    def __init__(self, groups: Sequence[GroupConfig]) -> None:
        self._groups = groups
        self._drops_blocks = any(
            group.is_state or group.sliding_window is not None or group.attention_chunk_size is not None
            for group in groups
        )
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Add a request that got blocks, to load into or to run in this step."""
        self._requests[request.request_id] = request

    def __contains__(self, request: Request) -> bool:
        """Return whether a request has got blocks and has not run since.

        vLLM asks again only if its load failed.
        """
        return request.request_id in self._requests

    def discard(self, req_ids: Iterable[str]) -> None:
        """Remove requests that run, or have ended."""
        for req_id in self._requests.keys() & req_ids if self._requests else ():
            del self._requests[req_id]

    def must_wait(self, request: Request, tokens: int, manager: Any) -> bool:
        """Return whether others must run before this request, with `tokens` to load, gets blocks."""
        may_block = self._drops_blocks if tokens else request in self
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
        counts = [(group.is_state, request.num_tokens // group.block_size + 1) for group in self._groups]
        return sum(min(count, _STATE_BLOCKS) if is_state else count for is_state, count in counts)


class EndedRequests:
    """Keeps the requests that have ended since the last step, if vLLM schedules steps ahead.

    With asynchronous scheduling vLLM schedules a step before the tokens of the previous step are known. The
    hash of a generated block is then known one step after the block is complete, and a request that ends
    there has no such step (vLLM 0.33 puts the block into its own cache then, but tells no connector). It
    gets one more, without tokens: an entry in the view of the next step. vLLM has freed its blocks by then;
    if that step gives one of them to another request, the core stores nothing. Aborted requests are left
    out: their blocks are not worth a rule.
    """

    def __init__(self, schedules_ahead: bool) -> None:
        self._schedules_ahead = schedules_ahead
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> bool:
        """Keep a request until the next step. Return `False` if this request needs no such step."""
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


def asked_params(request: Request) -> dict[str, Any] | None:
    """Return a request's parameters, with the payloads of actions of type `kvtier` in vLLM's `kv_hints`.

    A parameter that the request has itself comes first. All of them come from a client, and the hints from
    an orchestrator before vLLM; they may be of any type.
    """
    params, envelope = read_params(request.kv_transfer_params), getattr(request, "kv_hints", None)
    actions = [action for action in envelope.actions if action.action_type == "kvtier"] if envelope else []
    if not actions:
        return params
    asked: dict[str, Any] = {}
    for payload in (*(action.payload for action in actions), (params or {}).get("kvtier")):
        asked |= payload if isinstance(payload, dict) else {}
    return {**(params or {}), "kvtier": asked}


def answer_params(request: Request, explanation: Explanation | None) -> dict[str, Any] | None:
    """Return the explanation for the answer, if the request asks for it and has run.

    The question is then withdrawn: a `MultiConnector` may have another child like this one, and does not
    accept two answers.
    """
    asked = (request.kv_transfer_params or {}).get("kvtier")
    if explanation is None or not isinstance(asked, dict) or asked.get("explain") is not True:
        return None
    asked["explain"] = False
    miss, seconds = explanation.first_miss, explanation.load_seconds
    return {
        "kvtier": {
            "prompt_tokens": _prompt_tokens(explanation),
            "from_gpu": explanation.from_gpu,
            "from_tiers": dict(explanation.from_tiers),
            "computed": explanation.recomputed,
            "first_miss": None if miss is None else miss.value,
            "first_missing_token": explanation.first_missing_token,
            "load_seconds": None if seconds is None else round(seconds, 6),
        }
    }


class RequestLog:
    """Logs requests that lost time, at most one in `INTERVAL` seconds, and counts those in between."""

    def __init__(
        self, log: Callable[[str], None], load_deadline: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._slow = load_deadline / _SHARE_OF_DEADLINE
        self._limit = LogLimit(INTERVAL, clock)

    def record(self, req_id: str, explanation: Explanation | None) -> None:
        """Log a request that has ended, if it lost time."""
        problem = None if explanation is None else self._find_problem(explanation)
        if problem is not None and (more := self._limit.admit()) is not None:
            self._log(f"kvtier: request {req_id}: {problem}{more}")

    def _find_problem(self, explanation: Explanation) -> str | None:
        seconds, prompt = explanation.load_seconds, _prompt_tokens(explanation)
        if seconds is not None and seconds >= self._slow:
            loaded = sum(explanation.from_tiers.values())
            return f"its load of {loaded:,} of {prompt:,} prompt tokens took {seconds:.2f} s"
        miss = explanation.first_miss
        if miss is None or miss not in _ADVICE or 2 * explanation.recomputed < prompt:
            return None
        at = explanation.first_missing_token or 0
        return (
            f"{explanation.recomputed:,} of {prompt:,} prompt tokens were computed; "
            f"what begins at token {at:,}: {miss.value} ({_ADVICE[miss]})"
        )


def _prompt_tokens(explanation: Explanation) -> int:
    return explanation.from_gpu + sum(explanation.from_tiers.values()) + explanation.recomputed
