r"""A request, from its prompt to its last token, and its output.

    WAITING -> RUNNING -> FINISHED          preempted: back to WAITING, tokens kept, KV gone
       \-> LOADING -/                       loading: blocks held, not scheduled, until the load is over

`Request` fits the connector's `RequestView`. The scheduler owns it; one thread uses it.

The functions at the end read a caller's values and refuse, with `InputError`, values that a step could not
run: a step computes many requests together, so a value that fails inside a step would stop them all. The
results are plain: lists of ints, and text that can be encoded. The caller's objects are not changed, and any
exception of their classes becomes an `InputError`. These functions are pure; any thread may call them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from kvtier.engine.cache import BlockTable
from kvtier.engine.sampling import SamplingParams
from kvtier.errors import InputError, show_value
from kvtier.events.tracker import Description
from kvtier.keys import BlockHash, extra_keys_of, hash_blocks

if TYPE_CHECKING:
    from kvtier.residency import MissReason


class RequestStatus(Enum):
    """The state of a request."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """The reason why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One prompt and the tokens generated for it."""

    request_id: str
    tokens: list[int]
    """Prompt and generated tokens."""
    params: SamplingParams
    arrival: int
    arrived_at: float
    block_size: int
    cache_salt: str | None = None
    lora_name: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    """The number of leading tokens whose KV is in the blocks of `table`."""
    islands: list[tuple[int, int]] = field(default_factory=list)
    """Later tokens `[start, end)` whose KV was loaded: computing jumps over them."""
    load_end: int = 0
    """The end of the tokens that the running load brings."""
    table: BlockTable = field(default_factory=BlockTable)
    has_run: bool = False
    is_resumed: bool = False
    """The request has run, lost its blocks, and has not run again since."""
    preemptions: int = 0
    from_gpu: int = 0
    """The prompt tokens that the prefix cache had when the request was last admitted before its first token.
    """
    first_token_at: float | None = None
    _hashes: list[BlockHash] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens and generated tokens so far."""
        return len(self.tokens)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """The chained hashes of all full blocks, extended by the blocks that are new since the last call."""
        done, full = len(self._hashes), self.num_tokens // self.block_size
        if full > done:
            self._hashes += hash_blocks(
                self.tokens[done * self.block_size : full * self.block_size],
                self.block_size,
                parent=self._hashes[-1] if self._hashes else None,
                extra_keys=extra_keys_of(
                    full - done, self.block_size, first_block=done, lora=self.lora_name, salt=self.cache_salt
                ),
            )
        return self._hashes

    def describe(self, start: int, stop: int, block_size: int) -> Description:
        """Describe the blocks of tokens `[start, stop)`.

        LoRA and salt are extra keys of the first block only.
        """
        marks = tuple(mark for mark in (self.lora_name, self.cache_salt) if mark is not None)
        extra = [marks, *[None] * ((stop - start) // block_size - 1)] if marks and start == 0 else None
        return Description(self.tokens[start:stop], lora_name=self.lora_name, extra_keys=extra)

    @property
    def compute_end(self) -> int:
        """The position where computing must stop: the next island, or the end of the tokens."""
        return self.islands[0][0] if self.islands else self.num_tokens

    def advance(self, num_tokens: int) -> None:
        """Count tokens as computed, and jump over an island that begins there.

        The last token is never jumped over.
        """
        self.num_computed_tokens += num_tokens
        if self.islands and self.num_computed_tokens == self.islands[0][0]:
            self.num_computed_tokens = min(self.islands.pop(0)[1], self.num_tokens - 1)

    def append(self, token: int, now: float) -> None:
        """Add a generated token."""
        self.tokens.append(token)
        if self.first_token_at is None:
            self.first_token_at = now

    def start_over(self) -> None:
        """Forget all KV, so that it is computed again from the first token on. The tokens stay."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.islands = []
        self.is_resumed = self.has_run


@dataclass(frozen=True, slots=True)
class TokenSources:
    """The sources of a prompt's KV, in tokens.

    The counts sum up to the prompt's tokens once the first token is generated.
    """

    gpu: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0
    first_miss: MissReason | None = None
    """The reason why the first missing chunk was missing; `None` without kvtier, or if none was missing."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of a request after a step. `token_ids` are all tokens generated so far."""

    request_id: str
    token_ids: list[int]
    finished: bool = False
    finish_reason: str | None = None
    source: TokenSources | None = None
    """Set when finished."""
    ttft: float | None = None
    """Seconds from `add_request` to the first token; `None` before it."""
    preemptions: int = 0


# -- reading a caller's values ---------------------------------------------------------------------

_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Types that have a length and can be iterated, but are no lists of tokens."""
_MOST_TEXT = 1 << 20  # bytes: a salt travels with the events of every first block


def count_items(where: str, values: Any, expected: str) -> int:
    """Return the length of a list, tuple, array or tensor; refuse other types."""
    with _refusing(where, expected, values):
        if isinstance(values, _NO_LISTS):
            raise TypeError("not a list")
        return len(values)


def read_items(where: str, values: Any, count: int) -> Iterator[Any]:
    """Yield the `count` items of a list, tuple, array or tensor; refuse one with another number of items."""
    with _refusing(where, f"{count} items", values):
        items = values.tolist() if isinstance(values, np.ndarray | Tensor) else values
        number = 0
        for number, item in enumerate(islice(items, count + 1), 1):
            if number <= count:
                yield item
        if number != count:
            raise ValueError("it has another length than it says")


def read_tokens(where: str, prompt: Any, count: int, vocabulary: int) -> list[int]:
    """Return the `count` tokens of a prompt, 1 or more.

    Objects with an `__index__`, such as numpy's ints, become ints.
    """
    values = list(read_items(where, prompt, count))
    tokens = values if set(map(type, values)) == {int} else [_read_token(where, value) for value in values]
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        bad = next(token for token in tokens if not 0 <= token < vocabulary)
        raise InputError(f"{where}: expected token ids from 0 to {vocabulary - 1}, got {show_value(bad)}")
    return tokens


def _read_token(where: str, value: Any) -> int:
    with _refusing(where, "token ids that are ints", value):
        if isinstance(value, bool):
            raise TypeError("not an int")
        return operator.index(value)


def read_text(where: str, value: Any) -> str:
    """Return text of at most 1 MiB that can be encoded: hashes and events are made of its bytes."""
    expected = f"text without lone surrogates, of at most {_MOST_TEXT} bytes"
    with _refusing(where, expected, value):
        encoded = str.encode(value)
        if len(encoded) > _MOST_TEXT:
            raise ValueError("too long")
        return encoded.decode()  # a plain str, without the hash and equality of a subclass


def read_path(where: str, value: Any) -> Path:
    """Return a value as a path, if it can be one."""
    with _refusing(where, "the path of a folder", value):
        path = Path(value)
        if "\0" in str(path):
            raise ValueError("no path has that character")
        return path


def expect_type(where: str, value: object, expected: type) -> None:
    """Refuse a value of another type."""
    if not isinstance(value, expected):
        raise InputError(f"{where}: expected {expected.__name__}, got {show_value(value)}")


def read_sampling(where: str, params: Any) -> SamplingParams:
    """Return the parameters of a request; the defaults for `None`."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InputError(f"{where}: expected SamplingParams or None, got {show_value(params)}")
    return params


def read_sampling_of_each(params: Any, number: int) -> list[SamplingParams]:
    """Return the parameters of each of `number` prompts; the caller may give one for all."""
    if params is None or isinstance(params, SamplingParams):
        return [read_sampling("params", params)] * number
    given = count_items("params", params, "SamplingParams, or a list of them")
    if given != number:
        raise InputError(f"params: expected one for each of {number} prompts, got {given}")
    listed = read_items("params", params, given)
    return [read_sampling(f"params[{index}]", param) for index, param in enumerate(listed)]


@contextmanager
def _refusing(where: str, expected: str, value: object) -> Iterator[None]:
    """Refuse a value if reading it raises anything: a caller's class may raise any exception."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{where}: expected {expected}, got {show_value(value)}") from error
