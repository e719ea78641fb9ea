"""Results of a demo that nobody ran: plausible numbers for tests of what is shown."""

from __future__ import annotations

from dataclasses import fields, replace

from kvtier.demo.result import DemoResult, PoolUse, RequestResult, RestartResult, RunResult
from kvtier.tiers.base import TierStats

CONFIG = {
    "model": {
        "source": "built-in",
        "name": "built-in model",
        "random_weights": True,
        "family": "llama",
        "parameters": 9_967_872,
        "kv_bytes_per_token": 8192,
    },
    "engine": {"device": "cpu", "compute_dtype": "float64"},
    "kvtier": {"cpu": {"capacity": 1 << 29, "policy": "lru"}, "load_deadline": 2.0, "prompt_only": False},
}


def request(conversation: int, turn: int, *, cached: bool, ttft: float | None = None) -> RequestResult:
    """Make one request whose history was loaded, or computed again."""
    prompt = 800 + 40 * turn
    loaded = prompt - 192 - 40 if cached and turn > 1 else 0
    return RequestResult(
        conversation=conversation,
        turn=turn,
        prompt_tokens=prompt,
        token_ids=(conversation, turn, 7),
        from_gpu=192,
        from_tiers={"cpu": loaded} if loaded else {},
        recomputed=prompt - 192 - loaded,
        first_miss="never stored" if cached else None,
        ttft=(0.08 if loaded else 0.7) if ttft is None else ttft,
    )


def run(conversations: int, turns: int, *, cached: bool, ttft: float | None = None) -> RunResult:
    """Make a run of all turns of all conversations."""
    asked = [
        (conversation, turn) for turn in range(1, turns + 1) for conversation in range(1, conversations + 1)
    ]
    requests = tuple(request(*arguments, cached=cached, ttft=ttft) for arguments in asked)
    pool = PoolUse(used=600, slots=4096, row_bytes=131072, evicted=3) if cached else None
    return RunResult(requests, 16.0 if cached else 40.0, 12.0 if cached else 36.0, pool)


def demo_result(conversations: int = 6, turns: int = 4, *, ttft: float | None = None) -> DemoResult:
    """Make both runs, equal in all tokens."""
    off = run(conversations, turns, cached=False, ttft=ttft)
    return DemoResult(off, run(conversations, turns, cached=True, ttft=ttft), CONFIG)


def with_wrong_token(result: DemoResult, index: int = 3) -> DemoResult:
    """Change the second token of one answer of the run with kvtier."""
    requests = list(result.on.requests)
    first, _, *rest = requests[index].token_ids
    requests[index] = replace(requests[index], token_ids=(first, 4242, *rest))
    return replace(result, on=replace(result.on, requests=tuple(requests)))


def tier_stats(**more: object) -> TierStats:
    """Make what a disk tier counts, of 600 rows in 4,096 slots unless told otherwise."""
    counts = {counter.name: 0 for counter in fields(TierStats)}
    named = {
        "name": "disk",
        "medium": "STORAGE",
        "state": "open",
        "suspended": None,
        "used": 600,
        "capacity": 4096,
    }
    size = {"used_bytes": 600 << 17, "capacity_bytes": 4096 << 17}
    return TierStats(**counts | named | size | more)  # type: ignore[arg-type]


def with_restart(result: DemoResult) -> DemoResult:
    """Add a run over a disk of the first three requests of the last turn."""
    last = result.on.requests[-1].turn
    asked = [request for request in result.off.requests if request.turn == last][:3]
    runs = []
    for tiers, recomputed, ttft in (({}, 768, 0.9), ({"cpu": 752}, 16, 0.07), ({"disk": 752}, 16, 0.1)):
        requests = tuple(
            replace(request, from_tiers=tiers, recomputed=recomputed, ttft=ttft * number)
            for number, request in enumerate(asked, 2)
        )
        runs.append(RunResult(requests, 3.0, 2.5))
    stats = (
        tier_stats(demoted=600, demoted_bytes=600 << 17),
        tier_stats(promoted=141, promoted_bytes=141 << 17),
    )
    restart = RestartResult(*runs, exit_code=-9, restart_seconds=2.5, rows_found=600, tiers=stats)
    return replace(result, restart=restart)
