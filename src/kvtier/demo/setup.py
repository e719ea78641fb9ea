"""The settings of a demo: its workload, its model, and the engines made from them.

The workload is a set of conversations that share a system prompt and return after the cache forgot them.

    turn 1   system | opening message                                       -> answer 1
    turn 2   system | opening message | answer 1 | message 2                -> answer 2
    ...

Each prompt holds the whole conversation so far, so all of it but the last message has been computed before.
Every round takes all conversations in a new order, as users return in any order. Tokens are drawn from a
seed, the same on every platform; answers are the engine's own.

The built-in models are Llama configs for seeded random weights, so that nothing is downloaded. Random
weights answer nonsense, but compute exactly as trained ones: a wrong byte of KV changes the tokens.

The two engines of one process have the same model, loaded once, and the same settings; only the connector
differs. Sizes that do not fit together are refused before anything is allocated. Settings are immutable; one
thread makes engines. Only making an engine needs torch.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.config import KVTierConfig, format_size
from kvtier.errors import ConfigError, OutsideError

if TYPE_CHECKING:
    from kvtier.demo.result import RequestResult
    from kvtier.engine import Engine, EngineConfig, SamplingParams

DEMO_MODEL: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
"""10 million parameters, 6 KiB of float32 KV a token: a prompt of a thousand tokens takes half a second on
two slow cores.
"""

QUICK_MODEL: Final[dict[str, Any]] = DEMO_MODEL | {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A million parameters that cost nothing to run, for a look at the demo itself."""


class Turn(NamedTuple):
    """One request: a turn of a conversation, both numbered from 1."""

    conversation: int
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The shape of the conversations. Lengths are in tokens; messages vary by up to a quarter."""

    conversations: int = 10
    turns: int = 4
    system: int = 192
    """The length of the prompt that all conversations share."""
    opening: int = 896
    """The length of the first message: a document to talk about."""
    message: int = 24
    """The length of each later message."""
    answer: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("conversations", "turns", "system", "opening", "message", "answer"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(name, f"expected a whole number of at least 1, got {value}")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError("seed", f"expected a whole number from 0 to 2**63 - 1, got {self.seed}")

    @property
    def requests(self) -> int:
        """The number of requests."""
        return self.conversations * self.turns

    def rounds(self) -> Iterator[Turn]:
        """Yield all turns in the order in which they are asked."""
        for turn in range(1, self.turns + 1):
            order = list(range(1, self.conversations + 1))
            Random(f"{self.seed}/round/{turn}").shuffle(order)
            yield from (Turn(conversation, turn) for conversation in order)

    def system_prompt(self, vocabulary: int) -> list[int]:
        """Return the tokens that open every conversation."""
        return _draw(Random(f"{self.seed}/system"), self.system, vocabulary)

    def message_of(self, turn: Turn, vocabulary: int) -> list[int]:
        """Return the user's tokens of a turn."""
        random = Random(f"{self.seed}/message/{turn.conversation}/{turn.turn}")
        usual = self.opening if turn.turn == 1 else self.message
        return _draw(random, random.randint(usual - usual // 4, usual + usual // 4), vocabulary)

    def prompt_of(self, turn: Turn, answers: Mapping[Turn, Sequence[int]], vocabulary: int) -> list[int]:
        """Return the prompt of a turn: the whole conversation up to the turn's message."""
        said = self.system_prompt(vocabulary)
        for number in range(1, turn.turn + 1):
            earlier = Turn(turn.conversation, number)
            said += self.message_of(earlier, vocabulary)
            said += self.answer_in_prompt(answers[earlier]) if number < turn.turn else ()
        return said

    def answer_in_prompt(self, answer: Sequence[int]) -> Sequence[int]:
        """Return the tokens of an answer that the next prompt repeats."""
        return answer

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of every request: greedy, all of the answer's length."""
        from kvtier.engine import SamplingParams

        return SamplingParams(max_tokens=self.answer, ignore_eos=True)

    def texts(self, requests: Iterable[RequestResult]) -> dict[tuple[int, int], tuple[str, str]]:
        """Return question and answer of each request; random tokens have none."""
        return {}

    def longest(self) -> int:
        """Return the tokens of the longest conversation when it ends, prompt and answer."""
        return max(self._total_of(conversation) for conversation in range(1, self.conversations + 1))

    def total(self) -> int:
        """Return the tokens of all conversations when they end, the system prompt counted once."""
        conversations = range(1, self.conversations + 1)
        return self.system + sum(
            self._total_of(conversation) - self.system for conversation in conversations
        )

    def _total_of(self, conversation: int) -> int:
        messages = (self.message_of(Turn(conversation, turn), 1) for turn in range(1, self.turns + 1))
        return self.system + sum(map(len, messages)) + self.turns * self.answer


def _draw(random: Random, length: int, vocabulary: int) -> list[int]:
    return [random.randrange(vocabulary) for _ in range(length)]


# -- engines ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """The settings of a demo.

    By default `gpu_blocks` is 1.5 times the blocks of the conversations that run at once.
    """

    kvtier: KVTierConfig
    model: Path | dict[str, Any] = field(default_factory=lambda: DEMO_MODEL)
    """A Hugging Face folder, or the contents of a `config.json` for seeded random weights."""
    workload: Workload = field(default_factory=Workload)
    concurrency: int = 2
    block_size: int = 16
    gpu_blocks: int | None = None
    max_num_batched_tokens: int = 512
    device: str = "cpu"
    dtype: str = "float32"
    compute_dtype: str = "float64"
    disk_folder: Path | None = None
    """The run over a disk makes and removes a folder in this one; with `None` there is no such run."""

    def __post_init__(self) -> None:
        for name in ("block_size", "concurrency"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(name, f"expected a whole number of at least 1, got {value}")

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the engine's cache, including the null block."""
        if self.gpu_blocks is not None:
            return self.gpu_blocks
        return 1 + -(-3 * self.concurrency * self.workload.longest() // (2 * self.block_size))


def open_engines(settings: DemoSettings, stack: ExitStack) -> tuple[Engine, Engine]:
    """Return the engine with kvtier and the engine without it; `stack` closes both."""
    import torch

    config = _engine_config(settings)
    _refuse_misfits(settings)
    try:
        return _make_engines(settings, config, stack)
    except torch.OutOfMemoryError as error:
        raise OutsideError(f"{settings.device}: {error}") from error


def _make_engines(settings: DemoSettings, config: EngineConfig, stack: ExitStack) -> tuple[Engine, Engine]:
    """Make both engines, first the one with kvtier, because its settings may be refused."""
    from kvtier.engine import Engine

    on = stack.enter_context(make_engine(settings, settings.kvtier))
    if on.max_model_len < (longest := settings.workload.longest()):
        problem = (
            f"expected room for the longest conversation ({longest} tokens), got {config.num_blocks} blocks"
        )
        raise ConfigError("num_blocks", f"{problem} of {config.block_size}")
    return on, stack.enter_context(Engine(on.model, config))


def make_engine(settings: DemoSettings, kvtier: KVTierConfig) -> Engine:
    """Load the model and make an engine with these settings of kvtier."""
    from kvtier.engine import Engine

    config = _engine_config(settings)
    if isinstance(settings.model, Path):
        return Engine.from_folder(settings.model, config, kvtier)
    return Engine.from_config(settings.model, config, kvtier, seed=settings.workload.seed)


def _engine_config(settings: DemoSettings) -> EngineConfig:
    from kvtier.engine import EngineConfig

    return EngineConfig(
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        max_num_seqs=settings.concurrency,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        device=settings.device,
        dtype=settings.dtype,
        compute_dtype=settings.compute_dtype,
        kv_events=False,
    )


def _refuse_misfits(settings: DemoSettings) -> None:
    """Refuse sizes of model, cache, chunk and conversations that do not fit, before allocating anything."""
    import torch

    from kvtier.engine.config import ModelConfig
    from kvtier.engine.weights import load_config

    source, longest = settings.model, settings.workload.longest()
    model = load_config(source) if isinstance(source, Path) else ModelConfig.from_dict(source)
    if model.max_position_embeddings < longest:
        problem = f"expected conversations within the model's {model.max_position_embeddings} positions"
        raise ConfigError("turns", f"{problem}, got up to {longest} tokens")
    if (chunk := settings.kvtier.blocks_per_chunk * settings.block_size) > longest:
        problem = (
            f"expected chunks no longer than the longest conversation ({longest} tokens), got {chunk} tokens"
        )
        raise ConfigError("blocks_per_chunk", problem)
    token = (
        2 * model.num_layers * model.num_kv_heads * model.head_dim * getattr(torch, settings.dtype).itemsize
    )
    cache, memory = settings.num_blocks * settings.block_size * token, _physical_memory()
    if settings.device == "cpu" and 2 * cache > memory:
        problem = (
            f"expected two caches that fit into {format_size(memory)} of memory, "
            f"got {format_size(cache)} each"
        )
        raise ConfigError("num_blocks", problem)


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def token_bytes(engine: Engine) -> int:
    """Return the bytes of one token's KV in all layers."""
    cache = engine.kv_caches.values()
    return sum(tensor.nbytes for tensor in cache) // (engine.config.num_blocks * engine.config.block_size)


def describe(settings: DemoSettings, engine: Engine) -> dict[str, Any]:
    """Return the settings and the machine as plain values."""
    import torch

    from kvtier.engine.config import weight_shapes

    model = engine.model.config
    return {
        "model": {
            "source": str(settings.model)
            if isinstance(settings.model, Path)
            else "built-in, seeded random weights",
            "name": settings.model.resolve().name if isinstance(settings.model, Path) else "built-in model",
            "random_weights": not isinstance(settings.model, Path),
            "family": model.family,
            "parameters": sum(math.prod(shape) for shape in weight_shapes(model).values()),
            "layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "kv_bytes_per_token": token_bytes(engine),
        },
        "engine": {
            "device": settings.device,
            "dtype": settings.dtype,
            "compute_dtype": settings.compute_dtype,
            "gpu_blocks": settings.num_blocks,
            "block_size": settings.block_size,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "concurrency": settings.concurrency,
        },
        "kvtier": settings.kvtier.to_dict(),
        "workload": {part.name: getattr(settings.workload, part.name) for part in fields(Workload)},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
    }
