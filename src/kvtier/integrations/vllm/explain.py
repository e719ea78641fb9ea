"""Why a request was not served from a cache: in its answer on request, and now and then in vLLM's log.

A request asks with `kv_transfer_params: {"kvtier": {"explain": true}}`, and the answer's
`kv_transfer_params` then say where its prompt came from. All other parameters are left alone. Belongs to
the scheduler thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtier.connector import Explanation
from kvtier.log_limit import LogLimit
from kvtier.offload import MissReason

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["INTERVAL", "RequestLog", "answer_params"]

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
    """Logs requests that lost time, at most once in `INTERVAL` seconds; those in between are counted."""

    def __init__(
        self, tell: Callable[[str], None], load_deadline: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._slow = load_deadline / _SHARE_OF_DEADLINE
        self._limit = LogLimit(INTERVAL, clock)

    def note(self, req_id: str, explanation: Explanation | None) -> None:
        """Note a request that has ended."""
        problem = None if explanation is None else self._find_problem(explanation)
        if problem is not None and (more := self._limit.admit()) is not None:
            self._tell(f"kvtier: request {req_id}: {problem}{more}")

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
