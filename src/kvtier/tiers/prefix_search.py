"""`search_prefix`: finds in few round trips which chunks of a prefix a server has. Any thread; it blocks.

A prefix is stored from its head on, so the stored chunks are usually a run from the head. If one call can
ask about all chunks, it does, and sees gaps. Otherwise the search asks about the first chunk first, since
most prompts are new, and then searches for the end of the run: each round asks about chunks at even
distances and leaves one interval between two of them. It does not notice a gap before that end (other
engines' rows may have evicted a chunk): the read of that chunk fails then. `CallsAtOnce` asks about the
chunks of a round in several calls, on the threads that are free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from kvtier.keys import get_offload_group_idx
from kvtier.tiers.base import BackendRow

__all__ = ["CallsAtOnce", "FoundPrefix", "search_prefix"]

Contains = Callable[[Sequence[BackendRow]], list[bool]]


class FoundPrefix(NamedTuple):
    """Whether each chunk is stored, and the number of sequential calls that it took to find out."""

    there: list[bool]
    round_trips: int


def search_prefix(
    contains: Contains, rows: Sequence[BackendRow], width: int, is_wanted: Callable[[], bool] = lambda: True
) -> FoundPrefix:
    """Say which rows of a prefix are there, with calls of `width` rows at most.

    Rows of several groups are searched group by group if one call cannot take all. Once the answer is no
    longer wanted, no further call is made, and chunks not known by then count as absent.
    """
    if not rows:
        return FoundPrefix([], 0)
    if len(rows) <= width:
        return FoundPrefix(contains(rows), 1)
    places: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(get_offload_group_idx(row.key), []).append(place)
    there, round_trips = [False] * len(rows), 0
    for group in places.values():
        found = _search_run(contains, [rows[place] for place in group], width, is_wanted)
        round_trips += found.round_trips
        for place, is_there in zip(group, found.there, strict=True):
            there[place] = is_there
    return FoundPrefix(there, round_trips)


def _search_run(
    contains: Contains, rows: Sequence[BackendRow], width: int, is_wanted: Callable[[], bool]
) -> FoundPrefix:
    """Search for the end of the run: `[0, low)` is there, `[high, ...)` is not."""
    low, high, round_trips = 0, len(rows), 0
    while low < high and is_wanted():
        left = high - low
        if left <= width:
            last = contains(rows[low:high])
            return FoundPrefix([True] * low + last + [False] * (len(rows) - high), round_trips + 1)
        asked = [low + (at + 1) * left // (width + 1) for at in range(width)]
        if round_trips == 0:
            asked[0] = 0
        answers = contains([rows[at] for at in asked])
        round_trips += 1
        num_there = next((at for at, is_there in enumerate(answers) if not is_there), width)
        if num_there < width:
            high = asked[num_there]
        if num_there:
            low = asked[num_there - 1] + 1
    return FoundPrefix([True] * low + [False] * (len(rows) - low), round_trips)


class CallsAtOnce:
    """Splits one call of `contains` about many rows into several parallel calls of `batch` rows each.

    `spawn` runs a function on a free thread, now or later. The calling thread works too, and waits only for
    calls that have begun, so it does not matter if no other thread is ever free.
    """

    def __init__(
        self, contains: Contains, batch: int, most: int, spawn: Callable[[Callable[[], None]], None]
    ) -> None:
        self._contains, self._batch, self._most, self._spawn = contains, batch, most, spawn
        self.width = batch * most
        """The rows of one call of `contains`, at most."""

    def contains(self, rows: Sequence[BackendRow]) -> list[bool]:
        """Say for each row whether it is stored. `OSError` if a call fails."""
        parts = [rows[at : at + self._batch] for at in range(0, len(rows), self._batch)]
        answers: list[Future[list[bool]]] = [Future() for _ in parts]
        left = deque(zip(parts, answers, strict=True))

        def work() -> None:
            while left:
                try:
                    part, answer = left.popleft()
                except IndexError:  # another thread was quicker
                    return
                try:
                    answer.set_result(self._contains(part))
                except Exception as error:  # the top of the work that another thread does for us
                    answer.set_exception(error)

        for _ in range(min(len(parts), self._most) - 1):
            self._spawn(work)
        work()
        return [is_there for answer in answers for is_there in answer.result()]
