"""The most that any policy could save: Belady's MIN over the chunks of a trace, with the future known.

MIN keeps the chunks that are used next soonest. Chunks form a tree, and a parent is used with each of its
children, so with ties broken by depth MIN never keeps a child without its parent. A hit of a prefix is then
a hit of each of its chunks, and MIN is the exact optimum for one tier of this capacity, whether or not it
must store what is computed. Every hit counts, also where a load would be slower than computing.

Chunks that always come together (between two branches of the tree) have one future, so they are one `run`
here: MIN takes chunks from the end of a run. That makes the cost independent of the size of chunks. Pure;
any thread may call it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from kvtier.simulate.trace import Trace

_NEVER = 1 << 62


@dataclass(slots=True)
class _Runs:
    """A trace in runs: for each request the runs that it uses, from its head on."""

    uses: list[list[int]]
    next_use: list[list[int]]
    """For each request and run, the number of the next request that uses it."""
    lengths: list[int]
    depths: list[int]
    """The number of chunks before a run."""


def optimal_hits(trace: Trace, chunk_tokens: int, capacity: int | None) -> list[int]:
    """Return for each request the prompt tokens that MIN finds, with room for `capacity` chunks.

    `None` stands for unlimited room. The last token of a prompt is computed in any case.
    """
    runs = _find_runs(trace, chunk_tokens)
    room = _NEVER if capacity is None else capacity
    kept = [0] * len(runs.lengths)
    """The chunks that are kept of each run, from its head on."""
    due = [_NEVER] * len(runs.lengths)
    victims: list[tuple[int, int, int]] = []
    used, hits = 0, []
    for request, uses, nexts in zip(trace.requests, runs.uses, runs.next_use, strict=True):
        found = sum(kept[run] for run in uses)
        full = min(found, request.prompt_tokens // chunk_tokens)  # the rest is of the answer
        hits.append(min(full * chunk_tokens, request.prompt_tokens - 1))
        for run, after in zip(uses, nexts, strict=True):
            wanted = runs.lengths[run] if after != _NEVER else 0
            used, kept[run], due[run] = used + wanted - kept[run], wanted, after
            if wanted:
                heapq.heappush(victims, (-after, -runs.depths[run], run))
        while used > room:
            after, depth, run = heapq.heappop(victims)
            if due[run] != -after or not kept[run]:
                continue  # it was used since
            gone = min(kept[run], used - room)
            used, kept[run] = used - gone, kept[run] - gone
            if kept[run]:
                heapq.heappush(victims, (after, depth, run))
    return hits


def _find_runs(trace: Trace, chunk_tokens: int) -> _Runs:
    """Divide the chunks of a trace into runs.

    Requests that use a chunk use its parent too, so if both are used equally often, it is by the same
    requests.
    """
    requests = [trace.chunks(request, chunk_tokens) for request in trace.requests]
    _, numbers = np.unique(np.concatenate([*requests, np.empty(0, np.int64)]), return_inverse=True)
    counts = np.bincount(numbers)
    run_of: dict[int, int] = {}
    runs = _Runs([], [], [], [])
    start = 0
    for chunks in requests:
        own = numbers[start : start + len(chunks)]
        start += len(chunks)
        heads = np.flatnonzero(np.diff(counts[own], prepend=-1))
        stops = [*heads[1:].tolist(), len(own)][: len(heads)]
        uses = []
        for first, head, stop in zip(own[heads].tolist(), heads.tolist(), stops, strict=True):
            run = run_of.setdefault(first, len(run_of))
            if run == len(runs.lengths):
                runs.lengths.append(stop - head)
                runs.depths.append(head)
            uses.append(run)
        runs.uses.append(uses)
    last = [_NEVER] * len(run_of)
    for at in range(len(requests) - 1, -1, -1):
        runs.next_use.append([last[run] for run in runs.uses[at]])
        for run in runs.uses[at]:
            last[run] = at
    runs.next_use.reverse()
    return runs
