"""Claim: kvtier's CPU manager needs at most a tenth of vLLM's time per block (LRU, ARC, answers too), and
with `gittins`, which vLLM lacks, an eighth of the time of vLLM's LRU for prompts.

One trace of multi-turn conversations with shared system prompts (about 1,024 blocks a prompt, made from a
seed) is served through both managers in one process, in turns. The pool holds only a part of the
conversations, so that blocks are evicted all the time. Eight requests run at once. Each looks its prompt
up, loads the chunks it finds, offers the rest, a thousand blocks a step, and ends by renewing the recency
of all its blocks. Both managers get the same calls, each request with its own keys, and their events are
drained; vLLM's manager is asked key by key up to the first miss, as its connector does. A call counts with
its median over all repetitions. "One block" is not part of the trace: offers of a single block, as growing
answers make them. "With answers" adds to each prompt the offers of an answer of `ANSWER` times its length:
the cost of storing decoded blocks. Needs an environment with vLLM 0.32 and kvtier (`make bench` builds
one).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

from kvtier.keys import OffloadKey
from kvtier.offload.base import ReqContext
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.policies import Ending
from kvtier.policies.slots import SLOTS_BY

TARGET = 10.0
POLICIES = "lru", "arc", "gittins"
TRACE = ("lookup", "load", "store", "finish")
ALONE = "one block"
ANSWER = 0.025
CONVERSATIONS, SYSTEM_PROMPTS, OFFER, SINGLES = 48, 8, 1024, 256
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of a conversation."""

    req_id: str
    keys: list[OffloadKey]


def make_trace(num_requests: int, seed: int) -> list[Request]:
    """Make turns of interleaved conversations: each prompt extends the last one, until a new one begins."""
    source = random.Random(seed)
    systems = [random_keys(source, 96) for _ in range(SYSTEM_PROMPTS)]
    talks: list[list[OffloadKey]] = [[] for _ in range(CONVERSATIONS)]
    trace = []
    for number in range(num_requests):
        place = source.randrange(CONVERSATIONS)
        if 0 < len(talks[place]) < 1280:
            talks[place] = talks[place] + random_keys(source, source.randrange(100, 500))
        else:
            talks[place] = source.choice(systems) + random_keys(source, source.randrange(400, 800))
        trace.append(Request(f"request-{number}", talks[place]))
    return trace


def random_keys(source: random.Random, count: int) -> list[OffloadKey]:
    return [OffloadKey(source.randbytes(32) + bytes(4)) for _ in range(count)]


class Peer(Protocol):
    """A manager as its connector calls it. A context holds a request's data for the manager."""

    def context(self, request: Request) -> Any: ...
    def lookup(self, keys: Sequence[OffloadKey], context: Any) -> int: ...
    def prepare_load(self, keys: Sequence[OffloadKey], context: Any) -> object: ...
    def complete_load(self, keys: Sequence[OffloadKey], context: Any) -> None: ...
    def prepare_store(self, keys: Sequence[OffloadKey], context: Any) -> Any: ...
    def complete_store(self, keys: Sequence[OffloadKey], context: Any) -> None: ...
    def finish(self, keys: Sequence[OffloadKey], context: Any) -> None: ...
    def drain(self) -> None: ...


class KVTier:
    """Our manager."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.manager = CPUOffloadingManager(capacity, policy)
        self.prepare_store = self.manager.prepare_store
        # Simulated: `gittins` decides by time, and all passes must make the same calls.
        self.now = 0.0
        self.manager.policy.clock = lambda: self.now

    def context(self, request: Request) -> ReqContext:
        self.now += 0.05
        return ReqContext(req_id=request.req_id)

    def lookup(self, keys: Sequence[OffloadKey], context: ReqContext) -> int:
        return self.manager.lookup_prefix(keys, context, wait=False) or 0

    def prepare_load(self, keys: Sequence[OffloadKey], context: ReqContext) -> object:
        self.manager.touch(keys, context)
        return self.manager.prepare_load(keys, context)

    def complete_load(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        self.manager.complete_load(keys)

    def complete_store(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        self.manager.complete_store(keys)

    def finish(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        context.ending = Ending(100)
        self.manager.touch(keys, context)
        self.manager.on_request_finished(context)

    def drain(self) -> None:
        self.manager.take_events()


class VLLM:
    """vLLM's manager."""

    def __init__(self, capacity: int, policy: str) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        policy = "lru" if policy == "gittins" else policy
        self.manager = CPUOffloadingManager(capacity, policy, enable_events=True)
        self.new_context = ReqContext
        self.hit = LookupResult.HIT
        self.prepare_load = self.manager.prepare_load
        self.complete_load = self.manager.complete_load
        self.prepare_store = self.manager.prepare_store
        self.complete_store = self.manager.complete_store

    def context(self, request: Request) -> Any:
        context = self.new_context(req_id=request.req_id)
        for position, key in enumerate(request.keys):
            context.set_offload_key_position(key, position)
        self.manager.on_new_request(context)
        return context

    def lookup(self, keys: Sequence[OffloadKey], context: Any) -> int:
        hits = 0
        for key in keys:
            if self.manager.lookup(key, context) is not self.hit:
                break
            hits += 1
        return hits

    def finish(self, keys: Sequence[OffloadKey], context: Any) -> None:
        self.manager.on_request_finished(context)

    def drain(self) -> None:
        list(self.manager.take_events())


@dataclass(slots=True)
class Run:
    """One pass over the trace: phase and time of each call, in order, and the blocks of each phase."""

    phases: list[str] = field(default_factory=list)
    ns: list[int] = field(default_factory=list)
    blocks: Counter[str] = field(default_factory=Counter)
    hits: int = 0

    def time(self, phase: str, blocks: int, call: Callable[..., R], *arguments: Any) -> R:
        start = time.perf_counter_ns()
        result = call(*arguments)
        self.ns.append(time.perf_counter_ns() - start)
        self.phases.append(phase)
        self.blocks[phase] += blocks
        return result


def serve(peer: Peer, request: Request, run: Run) -> Iterator[None]:
    """Take one request through its life, a step at a time."""
    # Every request hashes its own tokens, so no two requests share a key object.
    keys = [OffloadKey(bytes(bytearray(key))) for key in request.keys]
    context = peer.context(Request(request.req_id, keys))
    hits = run.time("lookup", 0, peer.lookup, keys, context)
    run.blocks["lookup"] += min(hits + 1, len(keys))
    run.hits += hits
    if hits:
        run.time("load", hits, peer.prepare_load, keys[:hits], context)
        yield
        run.time("load", 0, peer.complete_load, keys[:hits], context)
    for start in range(hits, len(keys), OFFER):
        yield from store(peer, keys[start : start + OFFER], context, run, "store")
    run.time("finish", len(keys), peer.finish, keys, context)


def store(peer: Peer, keys: list[OffloadKey], context: Any, run: Run, phase: str) -> Iterator[None]:
    """Offer keys and, a step later, complete the keys that were taken."""
    output = run.time(phase, len(keys), peer.prepare_store, keys, context)
    yield
    run.time(phase, 0, peer.complete_store, output.keys_to_store if output else [], context)


def replay(peer: Peer, trace: list[Request], concurrency: int) -> Run:
    """Serve the whole trace, a step of each of `concurrency` requests in turn; then single blocks."""
    run, waiting, running = Run(), iter(trace), list[Iterator[None]]()
    gc.collect()
    gc.disable()
    while True:
        running += [serve(peer, request, run) for request in islice(waiting, concurrency - len(running))]
        if not running:
            break
        running = [request for request in running if next(request, run) is None]
        run.time("finish", 0, peer.drain)
    answer = Request("answer", random_keys(random.Random(-1), SINGLES))
    context = peer.context(answer)
    for key in answer.keys:
        list(store(peer, [key], context, run, ALONE))
    gc.enable()
    return run


def ns_per_block(runs: list[Run]) -> dict[str, float]:
    """Return the time of a block in each phase, and in the trace, per block of a prompt."""
    total: Counter[str] = Counter()
    for phase, *times in zip(runs[0].phases, *(run.ns for run in runs), strict=True):
        total[phase] += int(median(times))
    blocks = runs[0].blocks
    phases = {phase: total[phase] / max(1, blocks[phase]) for phase in (*TRACE, ALONE)}
    whole = sum(total[phase] for phase in TRACE) / blocks["finish"]
    return phases | {"whole trace": whole, "with answers": (whole + ANSWER * phases[ALONE]) / (1 + ANSWER)}


def measure(policy: str, trace: list[Request], arguments: argparse.Namespace) -> dict[str, Any]:
    """Replay the trace through both managers in turns; return the time of a block, ratios and hit rates."""
    peers: dict[str, Callable[[int, str], Peer]] = {"kvtier": KVTier, "vllm": VLLM}
    runs: dict[str, list[Run]] = {name: [] for name in peers}
    for _ in range(arguments.repeat):
        for name, peer in peers.items():
            runs[name].append(replay(peer(arguments.capacity, policy), trace, arguments.concurrency))
    ns = {name: ns_per_block(passes) for name, passes in runs.items()}
    return {
        "ns_per_block": ns,
        "ratio": {phase: ns["vllm"][phase] / ns["kvtier"][phase] for phase in ns["vllm"]},
        "hit_rate": {name: passes[0].hits / passes[0].blocks["finish"] for name, passes in runs.items()},
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as text."""
    lines = []
    for policy, result in results.items():
        lines.append(f"{policy:12} {'vLLM':>9} {'kvtier':>9}   ns/block")
        for phase in (*TRACE, "whole trace", ALONE, "with answers"):
            theirs, ours = (result["ns_per_block"][name][phase] for name in ("vllm", "kvtier"))
            lines.append(f"{phase:12} {theirs:9.0f} {ours:9.0f} {theirs / ours:8.1f}x")
        rates = result["hit_rate"]
        lines.append(f"{'hit rate':12} {rates['vllm']:9.1%} {rates['kvtier']:9.1%}\n")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--capacity", type=int, default=32_768, help="slots of the pool")
    parser.add_argument("--concurrency", type=int, default=8, help="requests that run at once")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too, `-` for stdout")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    trace = make_trace(arguments.requests, arguments.seed)
    try:
        results = {policy: measure(policy, trace, arguments) for policy in arguments.policy or POLICIES}
    except ModuleNotFoundError as error:
        print(
            f"benchmarks/manager.py: {error}; run it with an environment that has vLLM, "
            "as `make bench` does",
            file=sys.stderr,
        )
        return 2
    blocks = sum(len(request.keys) for request in trace) / len(trace)
    report = sys.stderr if arguments.json == "-" else sys.stdout
    print(
        f"{len(trace)} requests of {blocks:.0f} blocks, {arguments.capacity} slots, "
        f"kvtier's in {SLOTS_BY}\n",
        file=report,
    )
    print(
        f"{table(results)}The claim is {TARGET:g}x over the whole trace of prompts, and with answers.",
        file=report,
    )
    text = (
        json.dumps(
            {"policies": results, "target": TARGET, "slots_by": SLOTS_BY, **vars(arguments)}, indent=2
        )
        + "\n"
    )
    if arguments.json == "-":
        sys.stdout.write(text)
    elif arguments.json:
        Path(arguments.json).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
