r"""A request, from its prompt to its last token, and its output.

    WAITING -> RUNNING -> FINISHED          preempted: back to WAITING, tokens kept, KV gone
       \-> LOADING -/                       loading: blocks held, not scheduled, until the load is over

`Request` fits the connector's `RequestView`. The scheduler owns it; one thread uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvtier.engine.cache import BlockTable
from kvtier.events.tracker import Description
from kvtier.keys import BlockHash, extra_keys_of, hash_blocks

if TYPE_CHECKING:
    from kvtier.engine.sampling import SamplingParams
    from kvtier.offload.base import MissReason

__all__ = ["FinishReason", "Request", "RequestOutput", "RequestStatus", "TokenSources"]


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
