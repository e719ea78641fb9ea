"""Claim: `gittins` saves as many prompt tokens as LRU or more, less 0.3 points, whatever the workload.

Workloads made from a seed are replayed with LRU, ARC and `gittins`, in pools for a share of their
different chunks, beside the best possible policy of `kvtier simulate`. The pool's manager serves them with
the times of the trace, but without the connector around it, so that many cells take little time; on
Mooncake's traces LRU's hits are those of `kvtier simulate`. `--trace FILE` adds traces of your own. Needs no
engine.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from bisect import bisect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from _common import open_console, write_json
from rich.table import Table

from kvtier.keys import OffloadKey
from kvtier.offload.base import ReqContext
from kvtier.offload.manager import CPUOffloadingManager
from kvtier.policies import Ending, make_policy
from kvtier.simulate import Trace, TraceRequest, optimal_hits, read_trace
from kvtier.simulate.trace import PrefixIds

BLOCK = 256
HOUR = 3600.0
POLICIES = "lru", "arc", "gittins"
SHARES = 1, 2, 5, 10, 20, 50
"""Slots of the pool, in percent of the different chunks."""
STEP = 16
"""Chunks that are stored in one step."""
ENDINGS = {"tool_use": "tool", "end_turn": "turn"}
TOLERANCE = 0.3


class Asked(NamedTuple):
    """A request: its time, the names of its blocks, and how it ended."""

    time: float
    blocks: list[object]
    answer: int
    finish: str | None = None


Stream = Iterator[Asked]


def zipf(source: Random, count: int, skew: float) -> Callable[[], int]:
    """Return a function that draws numbers below `count`, the first of them most often."""
    weights = [1.0 / (rank + 1) ** skew for rank in range(count)]
    total = sum(weights)
    bounds, below = [], 0.0
    for weight in weights:
        below += weight / total
        bounds.append(below)
    return lambda: min(count - 1, bisect(bounds, source.random()))


def named(*name: object, length: int) -> list[object]:
    return [(*name, at) for at in range(length)]


def arrivals(source: Random, rate: float, seconds: float, begin: float = 0.0) -> Iterator[float]:
    """Yield the times of a Poisson process."""
    now = begin
    while (now := now + source.expovariate(rate)) < begin + seconds:
        yield now


def talk(
    source: Random, name: object, begin: float, turns: int, first: list[object], think: Callable[[], float],
    more: Callable[[], int], answer: Callable[[], int], finish: Callable[[int], str | None] = lambda _: None,
) -> Stream:  # fmt: skip
    """Yield a session: each prompt has all that was said before."""
    said, now = list(first), begin
    for turn in range(turns):
        said = said + named("turn", name, turn, length=more())
        tokens = answer()
        yield Asked(now, said, tokens, finish(turn))
        said = said + named("answer", name, turn, length=tokens // BLOCK)
        now += think()


# -- workloads ----------------------------------------------------------------------------------------


def agents(source: Random, *, tell_endings: bool = True) -> list[Stream]:
    """Agents that call tools, with a context that grows; now and then a person has to answer."""
    streams = []
    for number, begin in enumerate(arrivals(source, 1 / 25, 3 * HOUR)):
        turns = max(2, int(source.lognormvariate(2.8, 0.7)))
        person = {turn for turn in range(turns) if source.random() < 0.1} | {turns - 1}
        kind = source.randrange(4)

        medians = [180.0 if turn in person else 9.0 for turn in range(turns)]
        think = partial(next, iter([source.lognormvariate(0.0, 1.0) * median for median in medians]))

        def finish(turn: int, person: set[int] = person) -> str | None:
            return ("end_turn" if turn in person else "tool_use") if tell_endings else None

        more = partial(source.choice, (0, 1, 1, 2, 3, 8))
        answer = partial(source.choice, (60, 120, 300, 900))
        streams.append(
            talk(source, number, begin, turns, named("tools", kind, length=24), think, more, answer, finish)
        )
    return streams


def documents(source: Random, *, drifts: bool = False) -> list[Stream]:
    """Questions about documents, some of which are asked about much more often than others."""

    def ask() -> Stream:
        draw = zipf(source, 3000, 0.9)
        lengths = [source.randint(2, 30) for _ in range(3000)]
        for number, now in enumerate(arrivals(source, 1.5, 3 * HOUR)):
            shift = int(now / HOUR * 2) * 700 if drifts else 0  # other documents each half an hour
            document = (draw() + shift) % 3000
            prompt = named("system", length=3) + named("document", document, length=lengths[document])
            yield Asked(now, prompt + named("question", number, length=1), source.choice((40, 150, 400)))

    return [ask()]


def templates(source: Random) -> list[Stream]:
    """Few-shot prompts: an example set, and a question that comes once."""

    def ask() -> Stream:
        draw = zipf(source, 400, 1.1)
        for number, now in enumerate(arrivals(source, 2.0, 2 * HOUR)):
            template = draw()
            examples = named("examples", template, length=4 + template * 7 % 23)
            yield Asked(now, examples + named("question", number, length=2), source.choice((5, 20, 100)))

    return [ask()]


def chats(source: Random, rate: float = 1 / 6, median: float = 45.0, hours: float = 3.0) -> list[Stream]:
    """Chats of several turns; `median` is the time that people think."""
    streams = []
    for number, begin in enumerate(arrivals(source, rate, hours * HOUR)):
        streams.append(
            talk(
                source,
                number,
                begin,
                1 + int(source.expovariate(0.35)),
                named("system", length=2),
                lambda: source.lognormvariate(0.0, 1.2) * median,
                partial(source.choice, (1, 1, 2, 4, 20)),
                partial(source.choice, (80, 300, 700)),
            )
        )
    return streams


def scans(source: Random) -> list[Stream]:
    """Chats, and every twenty minutes a job that reads hundreds of long texts once."""

    def job(begin: float, number: int) -> Stream:
        for at, now in enumerate(arrivals(source, 4.0, 120.0, begin)):
            yield Asked(now, named("text", number, at, length=source.randint(8, 40)), 60)

    jobs = [job(600.0 + 1200.0 * number, number) for number in range(8)]
    return [*chats(source), *jobs]


def diurnal(source: Random) -> list[Stream]:
    """Two days in which chats by day give way to few-shot jobs by night."""

    def thinned(stream: Stream, is_day: bool) -> Stream:
        for asked in stream:
            if (asked.time % (2 * HOUR) < HOUR) == is_day:
                yield asked

    by_day = [thinned(stream, True) for stream in chats(source, 1 / 4, hours=4.0)]

    def night() -> Stream:
        draw = zipf(source, 150, 0.8)
        for number, now in enumerate(arrivals(source, 1.0, 4 * HOUR)):
            template = draw()
            examples = named("examples", template, length=8 + template % 40)
            yield Asked(now, examples + named("question", number, length=1), 30)

    return [*by_day, thinned(night(), False)]


def twice(source: Random) -> list[Stream]:
    """Prompts that are sent a second time within seconds, and never again."""

    def ask() -> Stream:
        for number, now in enumerate(arrivals(source, 0.5, 2 * HOUR)):
            prompt = named("prompt", number, length=source.randint(2, 30))
            yield Asked(now, prompt, 200)
            if source.random() < 0.5:
                yield Asked(now + source.uniform(0.0, 20.0), prompt, 200)

    return [iter(sorted(ask(), key=lambda asked: asked.time))]


def loop(source: Random) -> list[Stream]:
    """Documents that are read in the same order again and again, as a nightly evaluation does."""

    def ask() -> Stream:
        lengths = [source.randint(4, 30) for _ in range(400)]
        for number, now in enumerate(arrivals(source, 0.5, 2 * HOUR)):
            document = number % len(lengths)
            yield Asked(now, named("document", document, length=lengths[document]), 100)

    return [ask()]


def burst(source: Random) -> list[Stream]:
    """Chats that a machine holds: hundreds of requests in a second."""

    def ask() -> Stream:
        said: list[list[object]] = [[] for _ in range(60)]
        for number, now in enumerate(arrivals(source, 400.0, 12.0)):
            at = source.randrange(len(said))
            begins = not said[at] or len(said[at]) > 60
            head = named("system", source.randrange(8), length=8) if begins else said[at]
            said[at] = head + named("more", number, length=source.randint(2, 12))
            yield Asked(now, said[at], 100)

    return [ask()]


def tiny(source: Random) -> list[Stream]:
    """A few people who chat: 1 % of it are less slots than a prompt has chunks."""
    return chats(source, 1 / 60, hours=2.0)


WORKLOADS: dict[str, Callable[[Random], list[Stream]]] = {
    "agents": agents,
    "agents, no endings": partial(agents, tell_endings=False),
    "documents": documents,
    "other documents": partial(documents, drifts=True),
    "templates": templates,
    "chats": chats,
    "long thinking": partial(chats, rate=1 / 15, median=900.0, hours=8.0),
    "chats and scans": scans,
    "day and night": diurnal,
    "twice": twice,
    "loop": loop,
    "burst": burst,
    "tiny": tiny,
}


def make_trace(name: str, seed: int) -> Trace:
    """Make the trace of a workload."""
    streams = WORKLOADS[name](Random(f"{name} {seed}"))
    numbers = PrefixIds()
    requests = []
    for asked in heapq.merge(*streams, key=lambda asked: asked.time):
        tokens = len(asked.blocks) * BLOCK
        ids = numbers.number(asked.blocks)
        requests.append(TraceRequest(asked.time, ids, tokens, asked.answer, tokens, asked.finish))
    return Trace(name, "generated", BLOCK, requests)


class Prepared(NamedTuple):
    """A request with the keys of its chunks."""

    time: float
    keys: list[OffloadKey]
    prompt_tokens: int
    ending: Ending


def prepare(trace: Trace) -> list[Prepared]:
    """Give the chunks of all requests their keys."""
    prepared = []
    for request in trace.requests:
        data = trace.chunks(request, trace.block_tokens).tobytes()
        keys = [OffloadKey(data[at : at + 8] + bytes(28)) for at in range(0, len(data), 8)]
        ending = Ending(request.output_tokens, ENDINGS.get(request.finish_reason or "", "unknown"))
        prepared.append(Prepared(request.time, keys, request.prompt_tokens, ending))
    return prepared


def replay(requests: list[Prepared], chunk: int, slots: int, name: str) -> int:
    """Serve all requests from a pool, one after the other, and return the prompt tokens that it had."""
    policy, now, hits = make_policy(name, slots), [0.0], 0
    policy.clock = lambda: now[0]
    manager = CPUOffloadingManager(slots, policy)
    for number, request in enumerate(requests):
        now[0] = request.time
        context, keys = ReqContext(req_id=str(number)), request.keys
        found = manager.lookup_prefix(keys, context, wait=False) or 0
        manager.touch(keys[:found], context)
        hits += min(found * chunk, request.prompt_tokens - 1)
        for start in range(found, len(keys), STEP):
            output = manager.prepare_store(keys[start : start + STEP], context)
            if output is None:
                break
            manager.complete_store(output.keys_to_store)
        context.ending = request.ending
        manager.touch(keys, context)
        manager.take_events()
    manager.check()
    return hits


def measure(trace: Trace) -> dict[str, list[float]]:
    """Return the token hits of each policy, and of the optimum, in percent, for each share."""
    chunk, requests = trace.block_tokens, prepare(trace)
    slots = [max(1, int(share * trace.num_chunks(chunk) / 100)) for share in SHARES]
    percent = 100 / trace.prompt_tokens
    found = {name: [percent * replay(requests, chunk, n, name) for n in slots] for name in POLICIES}
    return found | {"optimum": [percent * sum(optimal_hits(trace, chunk, n)) for n in slots]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a trace to add")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too, `-` for stdout")
    parser.set_defaults(threads=1)
    arguments = parser.parse_args()
    traces = [make_trace(name, arguments.seed) for name in arguments.workload or WORKLOADS]
    traces += [read_trace(path) for path in arguments.trace]
    results: dict[str, Any] = {}
    table = Table("workload", "policy", *(f"{share} %" for share in SHARES))
    for trace in traces:
        found = results[trace.name] = measure(trace)
        for policy, rates in found.items():
            lru = found["lru"]
            cells = [f"{rate:.2f}" for rate in rates]
            if policy == "gittins":
                cells = [
                    f"{rate:.2f}{' !' if rate < least - TOLERANCE else ''}"
                    for rate, least in zip(rates, lru, strict=True)
                ]
            table.add_row(trace.name if policy == "lru" else "", policy, *cells)
    console = open_console(arguments)
    console.print(table)
    console.print(f"Token hits in percent. `!`: more than {TOLERANCE:g} points below LRU.")
    write_json(arguments, results | {"seed": arguments.seed})
    return 0


if __name__ == "__main__":
    sys.exit(main())
