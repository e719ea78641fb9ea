"""Seeded random workloads for an engine: what is run is drawn here, how it is judged stands in the tests.

A workload is an engine's shape, a tier's settings, and a list of actions by step: requests that share
prefixes and come again later, aborts, resets. The same workload can be run with and without kvtier, with and
without faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from kvtier.config import KVTierConfig, OffloadingConfig
from kvtier.connector import ConnectorStats
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.engine.cache import KVCache, group_layers
from kvtier.engine.config import ModelConfig
from kvtier.engine.model import Decoder
from kvtier.engine.weights import random_weights
from kvtier.offload import CPUOffloadingManager, OffloadingSpec, OffloadingSpecFactory

VOCABULARY = 96
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
TWO_GROUPS: dict[str, Any] = LLAMA | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "use_sliding_window": True,
}
STATES: dict[str, Any] = LLAMA | {
    "model_type": "gated_linear",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
    "sliding_window": 24,
}
MODELS = {"llama": LLAMA, "two groups": TWO_GROUPS, "states": STATES}


PACKED_HEAD_DIM = 32
"""Two heads of so many values are the fewest that can be packed."""


@lru_cache(maxsize=8)
def decoder(model: str, is_packed: bool = False) -> Decoder:
    """Return a tiny model: KV in float32, arithmetic in float64, so that tokens do not depend on the batch's
    shape. KV that is kept packed is in bfloat16, and its heads are wider.
    """
    config = ModelConfig.from_dict(MODELS[model] | ({"head_dim": PACKED_HEAD_DIM} if is_packed else {}))
    weights, dtype = random_weights(config, seed=7), torch.bfloat16 if is_packed else torch.float32
    return Decoder(config, weights, device="cpu", dtype=dtype, compute_dtype=torch.float64)


@dataclass
class Workload:
    """Everything that is drawn from one seed."""

    seed: int
    model: str
    engine: EngineConfig
    settings: dict[str, Any]
    chunks: int
    prompts: dict[str, list[int]]
    params: dict[str, SamplingParams]
    actions: dict[int, list[tuple[str, str]]]
    """What happens before which step: `("add", id)`, `("abort", id)`, `("reset", "gpu" | "all")`."""
    is_packed: bool = False

    def kvtier(self) -> KVTierConfig:
        """Return the tier's settings, with room for `chunks` rows."""
        blocks = self.settings["blocks_per_chunk"]
        layers = 1 if self.model == "states" else 2  # in each group; no state is larger than their pages
        token = 2 * 2 * (2 * PACKED_HEAD_DIM if self.is_packed else 4 * 8)
        row = blocks * layers * self.engine.block_size * token
        if self.is_packed and self.model == "states":
            row = max(row, blocks * 2 * 2 * PACKED_HEAD_DIM**2 * 8)
        row = -(-row // 4096) * 4096
        return KVTierConfig.from_dict(
            self.settings | {"cpu": {"capacity": row * self.chunks, "policy": self.policy}}
        )

    @property
    def policy(self) -> str:
        return ("lru", "arc", "gittins")[self.seed % 3]


@dataclass
class Outcome:
    """What came of a run."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    from_tiers: int = 0
    states_loaded: int = 0
    """How many of the tokens from tiers were those of models with states."""
    preemptions: int = 0
    steps: int = 0
    stats: ConnectorStats = field(default_factory=ConnectorStats)


def draw(seed: int, *, is_packed: bool = False) -> Workload:
    """Draw a workload, the same one with KV that is kept packed."""
    rng = random.Random(seed)
    block_size = rng.choice((8, 16, 32))
    model = rng.choice(("llama", "llama", "two groups", "states", "states"))
    heads = [_tokens(rng, rng.randint(1, 5) * block_size) for _ in range(2)]
    prompts: dict[str, list[int]] = {}
    for index in range(rng.randint(6, 12)):
        known = list(prompts.values())
        if known and rng.random() < 0.5:
            base = rng.choice(known)  # comes again, whole or cut, and goes on
            prompt = base[: rng.choice((len(base), len(base), rng.randint(1, len(base))))]
        else:
            prompt = rng.choice(heads)[: rng.randint(0, 5 * block_size)]
        prompts[f"r{index}"] = [*prompt, *_tokens(rng, rng.randint(1, 2 * block_size))]
    longest, budget = max(map(len, prompts.values())) + 40, rng.choice((16, 48, 128))
    config = decoder(model, is_packed).config
    cache = KVCache(group_layers(config.layer_names, config.layer_kinds), 3, block_size, max_slice=budget)
    engine = EngineConfig(
        num_blocks=cache.most_blocks(0, longest) + 2 + rng.randint(0, 3),
        block_size=block_size,
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=budget,
        state_interval=rng.choice((None, 0, 2 * block_size)),
        dtype="bfloat16" if is_packed else "float32",
        compute_dtype="float64",
        kv_layout=rng.choice(("blocks_first", "kv_first")),
    )
    settings = {
        "blocks_per_chunk": rng.choice((1, 2, 4)),
        "prompt_only": rng.random() < 0.2,
        "load_if_faster": False,
        "packing": "on" if is_packed else "auto",
    }
    params = {
        name: SamplingParams(max_tokens=rng.choice((1, 4, 12, 30, 40)), ignore_eos=True) for name in prompts
    }
    return Workload(
        seed,
        model,
        engine,
        settings,
        rng.choice((1, 4, 12, 60, 60)),
        prompts,
        params,
        _actions(rng, list(prompts)),
        is_packed,
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCABULARY) for _ in range(count)]


def _actions(rng: random.Random, names: list[str]) -> dict[int, list[tuple[str, str]]]:
    actions: dict[int, list[tuple[str, str]]] = {}
    step = 0
    for name in names:
        step += rng.choice((0, 0, 1, 3, 30))
        actions.setdefault(step, []).append(("add", name))
        if rng.random() < 0.12:
            actions.setdefault(step + rng.randint(0, 8), []).append(("abort", name))
        if rng.random() < 0.3:
            actions.setdefault(step + rng.randint(0, 12), []).append(
                ("reset", rng.choice(("gpu", "gpu", "gpu", "all")))
            )
    return actions


def run(
    workload: Workload,
    with_kvtier: bool,
    spec_factory: Callable[[OffloadingConfig], OffloadingSpec] = OffloadingSpecFactory.create_spec,
    before_step: Callable[[Engine, int], None] | None = None,
    max_steps: int = 5000,
) -> Outcome:
    """Run a workload to its end, checking every invariant after every step and that nothing is
    left behind.
    """
    outcome = Outcome()
    kvtier = workload.kvtier() if with_kvtier else None
    with Engine(
        decoder(workload.model, workload.is_packed), workload.engine, kvtier, spec_factory=spec_factory
    ) as engine:
        last = max(workload.actions)
        while outcome.steps <= last or engine.has_unfinished():
            assert outcome.steps < max_steps, f"seed {workload.seed}: a request is stuck"
            for action, name in workload.actions.get(outcome.steps, ()):
                _act(engine, workload, outcome, action, name)
            if before_step is not None:
                before_step(engine, outcome.steps)
            for output in engine.step():
                outcome.tokens[output.request_id] = output.token_ids
                if output.finished:
                    outcome.preemptions += output.preemptions
                    outcome.from_tiers += sum(output.source.tiers.values()) if output.source else 0
            engine.check()
            outcome.steps += 1
        engine.drain()
        engine.check()
        _expect_nothing_left(engine, outcome)
    return outcome


def _act(engine: Engine, workload: Workload, outcome: Outcome, action: str, name: str) -> None:
    if action == "add":
        engine.add_request(workload.prompts[name], workload.params[name], request_id=name)
    elif action == "abort":
        if engine.abort(name) is not None:
            outcome.aborted.add(name)
    else:
        engine.reset_prefix_cache(reset_connector=name == "all")


def _expect_nothing_left(engine: Engine, outcome: Outcome) -> None:
    """Every block is free, and every slot is free or ready."""
    assert engine.num_free_blocks == engine.config.num_blocks - 1
    if engine.connector is None or engine.connector.connector_scheduler is None:
        return
    scheduler = engine.connector.connector_scheduler
    outcome.stats = scheduler.stats
    assert isinstance(scheduler.manager, CPUOffloadingManager)
    stats = scheduler.manager.stats()
    assert (stats.writing, stats.reading, stats.doomed) == (0, 0, 0)
    assert stats.free + stats.ready == stats.slots


def expect_same_tokens(workload: Workload, off: Outcome, on: Outcome) -> None:
    """Compare two runs: equal tokens, and for requests that either run aborted, one a prefix of
    the other.
    """
    for name in workload.prompts:
        left, right = off.tokens.get(name, []), on.tokens.get(name, [])
        if name in off.aborted | on.aborted:
            shorter = min(len(left), len(right))
            left, right = left[:shorter], right[:shorter]
        assert left == right, f"seed {workload.seed}, request {name}: without kvtier {left}, with {right}"
