"""`Explainer`: where the tokens of each request's prompt came from, and why not all came from a cache.

An explanation is fixed when a request first runs, and kept until `_REMEMBERED` newer ones have come.
Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvtier.config import Recompute
from kvtier.connector.jobs import LoadJob
from kvtier.connector.load_decision import PrefixMatch
from kvtier.connector.metadata import ReqId
from kvtier.connector.state import ChunkGeometry, RequestState
from kvtier.keys import OffloadKey, get_offload_group_idx
from kvtier.offload.base import OffloadingManager
from kvtier.residency import MissReason

_REMEMBERED = 4096
_POOL = "cpu"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The sources of one prompt, in tokens.

    `first_miss` is the reason why the first whole chunk that was not loaded had to be computed, and
    `first_missing_token` is the first token of that chunk. Both are `None` if only the unfinished tail of
    the prompt was computed. `misses` has the reasons of all tiers that have known that chunk; the last one
    decided.
    """

    from_gpu: int = 0
    from_tiers: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0
    first_miss: MissReason | None = None
    first_missing_token: int | None = None
    misses: dict[str, MissReason] = field(default_factory=dict)
    load_seconds: float | None = None
    """The time from the order of the load until every rank had reported; `None` without a load."""


class Explainer:
    """Keeps the explanations of requests."""

    def __init__(self, manager: OffloadingManager, geometry: ChunkGeometry) -> None:
        self._manager, self._geometry = manager, geometry
        self._explained: OrderedDict[ReqId, Explanation] = OrderedDict()
        self.misses: Counter[MissReason] = Counter()
        """The prompts explained so far, by the reason of their first miss."""

    def explain_match(self, state: RequestState, match: PrefixMatch, end: int, *, limited: bool) -> None:
        """Remember why the first chunk beyond `end` is not loaded, in case the request now runs.

        `limited`: there is a chunk beyond the match that the request may not load.
        """
        state.miss = {}, None
        if end < match.end:
            state.miss = {_POOL: MissReason.AUDITED if state.audit else MissReason.NOT_WORTH_LOADING}, end
        elif match.missing is not None:
            state.miss = self._explain_missing(match.missing, state), match.reach
        elif limited:
            state.miss = {_POOL: MissReason.LIMITED}, match.reach

    def _explain_missing(self, key: OffloadKey, state: RequestState) -> dict[str, MissReason]:
        """Return for each tier why it lacks a chunk. Most states are never stored, on purpose."""
        reasons = self._manager.explain_tiers(key, state.context)
        if not self._geometry.groups[get_offload_group_idx(key)].is_state:
            return reasons
        never, no_state = MissReason.NEVER_STORED, MissReason.NO_STATE
        return {tier: no_state if reason is never else reason for tier, reason in reasons.items()}

    def explain_stale_prefix(self, state: RequestState) -> None:
        """Remember that a request goes on from KV of before a reset, so that nothing of it is stored."""
        misses, token = state.miss
        if misses:
            state.miss = {_POOL: MissReason.STALE_PREFIX}, token

    def explain_load(
        self, state: RequestState, job: LoadJob, recompute: Recompute, seconds: float
    ) -> Explanation | None:
        """Explain a request whose load ended after `seconds`, unless it is explained already."""
        if job.failed:
            state.miss = {_POOL: _why(job, seconds)}, job.first_failed_token()
        return self._explain(state, job.tokens_saved(recompute), job.promoted_tokens, seconds)

    def explain_run(self, state: RequestState) -> Explanation | None:
        """Explain a request that runs without a load, unless it is explained already."""
        return self._explain(state, 0, {})

    def get(self, req_id: ReqId) -> Explanation | None:
        """Return the explanation of a request; `None` if it has not run or its explanation was dropped."""
        return self._explained.get(req_id)

    def forget(self, req_id: ReqId) -> None:
        """Drop the explanation of an id that is given to another request."""
        self._explained.pop(req_id, None)

    def _explain(
        self, state: RequestState, loaded: int, promoted: dict[str, int], seconds: float | None = None
    ) -> Explanation | None:
        req_id = state.view.request_id
        if state.explained:
            return None
        state.explained = True
        prompt = state.view.num_prompt_tokens
        local = min(state.local, prompt)
        loaded = max(0, min(loaded, prompt - 1 - local))
        misses, token = state.miss
        reason = list(misses.values())[-1] if misses else None
        if reason is not None:
            self.misses[reason] += 1
        tiers = _split(loaded, promoted)
        explanation = Explanation(local, tiers, prompt - local - loaded, reason, token, misses, seconds)
        self._explained[req_id] = explanation
        if len(self._explained) > _REMEMBERED:
            self._explained.popitem(last=False)
        return explanation


def _why(job: LoadJob, seconds: float) -> MissReason:
    """Return why a load has not delivered everything, `seconds` after its order."""
    if job.corrupt:
        return MissReason.FAILED
    if job.void and job.keys:
        return MissReason.CLEARED
    late = job.expired or seconds >= min(job.wait_budget, job.deadline)
    return MissReason.TOO_SLOW if late else MissReason.IO_FAILED


def _split(loaded: int, promoted: dict[str, int]) -> dict[str, int]:
    """Divide loaded tokens among the tiers that they came from; the rest came from the pool."""
    counts: dict[str, int] = {}
    left = loaded
    for tier, tokens in promoted.items():
        counts[tier] = min(tokens, left)
        left -= counts[tier]
    return {tier: tokens for tier, tokens in ({_POOL: left} | counts).items() if tokens}
