"""`match_prefix`: how far a request's prefix can be loaded, up to the last end that every group can serve.

A full-attention group serves an end if all chunks up to it are ready. A windowed group serves it if the
chunks in the window before it are ready. If the end lies inside a chunk, all tokens of that chunk must be
the request's. A lookup pins nothing and changes nothing. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.connector.state import ChunkGeometry, GroupGeometry, GroupState, RequestState
from kvtier.keys import OffloadKey
from kvtier.offload.base import ChunkLookup


class PrefixMatch(NamedTuple):
    """The part of a request's prefix that can be loaded now."""

    end: int
    """The prefix can be loaded up to this token; equal to the local hit if nothing can be loaded."""
    pending: bool
    """Whether a chunk that is still on its way could make the match longer."""
    missing: OffloadKey | None
    """The key of the first chunk that stops the match, if the tokens left fill a chunk."""
    reach: int
    """The found chunks reach up to this token: beyond `end` if a lookahead must be covered."""


def match_prefix(
    geometry: ChunkGeometry, lookup: ChunkLookup, state: RequestState, num_tokens: int
) -> PrefixMatch:
    """Find how far a request can be loaded from the chunks that `lookup` finds.

    Where KV depends on the tokens after it (`OffloadingConfig.lookahead`), other tokens may have followed a
    stored chunk than follow it in this request. So the load ends early enough that the found chunks beyond
    its end cover the lookahead: the last chunk found is computed again.
    """
    found = _match_chunks(geometry, lookup, state, num_tokens)
    if not geometry.lookahead or found.reach == state.local:
        return found
    covered = _match_chunks(geometry, lookup, state, found.reach - geometry.lookahead)
    return found._replace(end=covered.end)


def _match_chunks(
    geometry: ChunkGeometry, lookup: ChunkLookup, state: RequestState, num_tokens: int
) -> PrefixMatch:
    """Find the last end beyond `state.local` that all groups can serve from the chunks found."""
    keyed = min(num_tokens, *(group.num_keyed for group in state.groups))
    end = keyed // geometry.alignment * geometry.alignment
    pending, missing = False, None
    for group in geometry.full:
        reach, waits, gap = _reach(lookup, state, state.groups[group.index], end)
        if reach < end:
            end, missing = reach, gap
        pending |= waits
    if geometry.windowed and end > state.local:
        found = [_Window(lookup, state, group, end) for group in geometry.windowed]
        best = _last_served(found, state.local, end, geometry.alignment, optimistic=False)
        pending |= _last_served(found, state.local, end, geometry.alignment, optimistic=True) > best
        if best < end:
            end, missing = (
                best,
                next((gap for gap in (w.last_gap() for w in found) if gap is not None), missing),
            )
    end = max(end, state.local)
    return PrefixMatch(end, pending, missing, reach=end)


def _reach(
    lookup: ChunkLookup, state: RequestState, group: GroupState, end: int
) -> tuple[int, bool, OffloadKey | None]:
    """Return how far a full-attention group reaches, whether that may grow, and the key that stops it."""
    size = group.geometry.chunk_size
    start = state.local // size
    keys = group.keys[start : -(-end // size)]
    hits = lookup.lookup_prefix(keys, state.context)
    waits = hits is None
    if hits is None:
        hits = lookup.lookup_prefix(keys, state.context, wait=False) or 0
    return (start + hits) * size, waits, keys[hits] if hits < len(keys) else None


class _Window:
    """The chunks of a windowed group between the local hit and `end`, with the runs of ready chunks."""

    def __init__(self, lookup: ChunkLookup, state: RequestState, group: GroupGeometry, end: int) -> None:
        self._group = group
        self._local = state.local
        self._start = state.local // group.chunk_size
        self._keys = state.groups[group.index].keys[self._start : -(-end // group.chunk_size)]
        found = lookup.lookup_many(self._keys, state.context)
        self._ready = _run_lengths([hit is True for hit in found])
        self._possible = _run_lengths([hit is not False for hit in found])

    def serves(self, end: int, optimistic: bool) -> bool:
        """Return whether all chunks needed to compute at `end` are ready or, `optimistic`, may be soon."""
        size = self._group.chunk_size
        stop = -(-end // size)
        runs = self._possible if optimistic else self._ready
        return runs[stop - 1 - self._start] >= stop - self._group.first_needed(self._local, end) // size

    def last_gap(self) -> OffloadKey | None:
        """Return the rightmost key that is not ready."""
        return next((self._keys[i] for i in reversed(range(len(self._keys))) if not self._ready[i]), None)


def _run_lengths(flags: Sequence[bool]) -> list[int]:
    """For each position, count the flags set in a row up to and including it."""
    runs, run = [], 0
    for flag in flags:
        run = run + 1 if flag else 0
        runs.append(run)
    return runs


def _last_served(windows: list[_Window], local: int, end: int, alignment: int, optimistic: bool) -> int:
    """Return the last aligned end that all windows serve, or `local` if there is none."""
    while end > local and not all(window.serves(end, optimistic) for window in windows):
        end -= alignment
    return max(end, local)
