"""A trace of requests, as the simulator replays it: when each came, which prefix it has, how long it is.

A prompt is known by block ids, one for every `block_tokens` tokens. Equal ids mean equal prefixes up to the
end of the block: readers chain the ids of their files (`PrefixIds`), so the blocks of a trace are a tree.
Nothing here has state that changes; any thread may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import InputError

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `ids` names its blocks: those of the prompt and, where they are known, of the answer."""

    time: float
    """Seconds since the beginning of the trace."""
    ids: Ids
    prompt_tokens: int
    output_tokens: int = 1
    keyed_tokens: int = 0
    """The number of leading tokens that the ids name. Beyond the prompt only if the answer is known."""
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they came."""

    name: str
    kind: str
    """The format of the file, for people."""
    block_tokens: int
    requests: list[TraceRequest]
    notes: tuple[str, ...] = ()
    """What the reader had to derive or leave out, in sentences."""

    @property
    def seconds(self) -> float:
        """The time from the first request to the last."""
        return self.requests[-1].time - self.requests[0].time if self.requests else 0.0

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    def expect_chunk(self, chunk_tokens: int) -> None:
        """Raise `InputError` if chunks of this size cannot be told apart by the trace's blocks."""
        size = self.block_tokens
        if chunk_tokens % size and size % chunk_tokens:
            raise InputError(
                f"--chunk-tokens: expected a multiple or a divisor of the trace's blocks of {size} tokens,"
                f" got {chunk_tokens}"
            )

    def chunks(self, request: TraceRequest, chunk_tokens: int) -> Ids:
        """Return a number for each complete chunk of a request, from its head on.

        A chunk of several blocks has the number of its last block; a block of several chunks has a number
        for each of them.
        """
        count = request.keyed_tokens // chunk_tokens
        if chunk_tokens >= self.block_tokens:
            step = chunk_tokens // self.block_tokens
            return request.ids[step - 1 :: step][:count]
        parts = self.block_tokens // chunk_tokens
        numbers = request.ids[:, None] * parts + np.arange(parts)
        return numbers.reshape(-1)[:count]

    def num_chunks(self, chunk_tokens: int) -> int:
        """Count the different chunks of all requests."""
        parts = [self.chunks(request, chunk_tokens) for request in self.requests]
        return len(np.unique(np.concatenate(parts))) if parts else 0


class PrefixIds:
    """Numbers blocks by their whole prefix: a file may name a block by its own content alone."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, object], int] = {}

    def number(self, names: list[object]) -> Ids:
        """Return a number for each block of a prompt, given by name from its head on."""
        numbers, known, parent = [], self._numbers, -1
        for name in names:
            parent = known.setdefault((parent, name), len(known))
            numbers.append(parent)
        return np.array(numbers, dtype=np.int64)
