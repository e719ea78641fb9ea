"""vLLM engines for tests: in this process, on the CPU or a GPU (`device`), small enough to overflow at once.

vLLM is imported when an engine is made, not before: without vLLM the tests are skipped and not broken.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.vllm.device import engine_options
from tests.vllm.models import VOCAB

from kvtier.keys import get_offload_group_idx

BLOCK = 32
"""Tokens of a block: the least that vLLM's CPU backend takes."""

Prompt = list[int]


@dataclass(frozen=True)
class Output:
    """What became of a prompt."""

    tokens: list[int]
    cached: int
    """Prompt tokens that were not computed."""


def make_prompt(seed: int, length: int) -> Prompt:
    """Return random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """The scheduler's half of the connector, if there is one; of a `MultiConnector` that of its first
        child.
        """
        connector = self.core.scheduler.connector
        return getattr(connector, "sub_connectors", [connector])[0]

    @property
    def stats(self) -> Any:
        """What kvtier has counted."""
        return self.connector._connector.connector_scheduler.stats

    @property
    def worker(self) -> Any:
        """The worker's half of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 8,
        salts: Sequence[str | None] = (),
        **options: Any,
    ) -> list[Output]:
        """Run prompts to their end, greedily."""
        salts = [*salts, *[None] * (len(prompts) - len(salts))]
        inputs = [_token_prompt(prompt, salt) for prompt, salt in zip(prompts, salts, strict=True)]
        done = self.llm.generate(inputs, self.params(max_tokens), use_tqdm=False, **options)
        return [Output(list(output.outputs[0].token_ids), output.num_cached_tokens) for output in done]

    def logprobs(self, prompt: Prompt, max_tokens: int = 3) -> list[float]:
        """Return how likely the tokens were that follow: a finer sieve than the tokens themselves."""
        params = self.params(max_tokens, logprobs=0)
        (done,) = self.llm.generate([_token_prompt(prompt, None)], params, use_tqdm=False)
        return [next(iter(token.values())).logprob for token in done.outputs[0].logprobs]

    def params(self, max_tokens: int, **more: Any) -> Any:
        """Return greedy sampling that does not stop early."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more
        )

    def add(self, request_id: str, prompt: Prompt, max_tokens: int = 8) -> None:
        """Queue a prompt."""
        self.llm.llm_engine.add_request(request_id, _token_prompt(prompt, None), self.params(max_tokens))

    def step(self) -> dict[str, list[int]]:
        """Run one step and return the tokens of requests that are over."""
        outputs = self.llm.llm_engine.step()
        return {
            output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished
        }

    def run(self) -> dict[str, list[int]]:
        """Step until all requests are over."""
        done: dict[str, list[int]] = {}
        while self.llm.llm_engine.has_unfinished_requests():
            done |= self.step()
        return done

    def settle(self) -> None:
        """Step until all transfers are over, and check every invariant."""
        while self.core.scheduler.has_requests():
            self.step()
        if hasattr(self.connector, "_connector"):  # else there is none, or one of vLLM's own
            self.connector._connector.connector_scheduler.check()
        # But the null block.
        assert self.free_blocks == self.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def forget(self, tiers_too: bool = False) -> None:
        """Empty vLLM's own cache, and if asked kvtier's."""
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=tiers_too)

    def falsify_pool(self, group: int | None = None) -> None:
        """Change all that the pool holds, or what it holds of a group, behind everybody's back: the sign of
        each number in it, float32 or bfloat16. A second call changes it back.

        What is loaded stays finite. A GPU's process would end at the first token that it samples from no
        number.
        """
        rows = self.worker._connector.connector_worker.spec.open_pool().rows
        for slot in range(len(rows)) if group is None else self._slots_of(group):
            rows[slot][1::2] ^= 0x80

    def _slots_of(self, group: int) -> list[int]:
        """Return the slots of the pool that hold chunks of a group."""
        table = self.connector._connector.connector_scheduler.manager._table
        held = table.held_slots()
        keys = zip(held.tolist(), table.keys(held), strict=True)
        return [slot for slot, key in keys if get_offload_group_idx(key) == group]

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def loading(self) -> int:
        """Loads on their way."""
        return len(list(self.connector._connector.connector_scheduler._jobs.loads()))

    def wait_look(self) -> None:
        """Block until the next step looks at all weights, as after a change that takes its time."""
        while hasattr(self.connector, "_connector") and not self.worker._live_weights.pauses_enough():
            time.sleep(0.001)

    @property
    def stale_blocks(self) -> int:
        """Blocks with KV of before a reset, as kvtier counts them."""
        families = self.connector._connector.connector_scheduler.metrics.collect()
        return int(next(samples[0][1] for metric, samples in families if metric.name == "stale_blocks"))

    def count_preemptions(self) -> int:
        """Return the preemptions so far."""
        metrics = self.llm.get_metrics()
        return int(next(metric.value for metric in metrics if metric.name == "vllm:num_preemptions"))


def _token_prompt(prompt: Prompt, salt: str | None) -> dict[str, Any]:
    return {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})


KVTIER = ("kvtier.integrations.vllm", "KVTierConnector")
"""Where vLLM finds the connector."""


def as_connector(
    settings: dict[str, Any], connector: tuple[str, str] = KVTIER, role: str = "kv_both"
) -> dict[str, Any]:
    """Return what tells vLLM to use a connector with these settings."""
    module, name = connector
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": role,
        "kv_connector_extra_config": {"cpu": {"capacity": "16MiB"}, "load_if_faster": False} | settings,
    }


SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 352,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "enforce_eager": True,
    "block_size": BLOCK,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_tokenizer_init": True,
}
"""What all engines of the tests are given, unless a test says otherwise."""


def make_llm(model: Path | str, num_blocks: int, transfer: dict[str, Any] | None, **options: Any) -> Any:
    """Make a vLLM engine with a cache of `num_blocks` blocks, in whatever processes the environment says."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    # From here on vLLM looks for ports that nobody listens on, and listens on them later.
    os.environ["VLLM_PORT"] = str(free_port())
    gc.freeze()  # vLLM collects garbage nine times an engine, and what was imported is never garbage
    if transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    return LLM(model=str(model), num_gpu_blocks_override=num_blocks, **(SMALL | engine_options() | options))


@contextmanager
def vllm_engine(
    model: Path,
    kvtier: dict[str, Any] | None = None,
    *,
    connector: tuple[str, str] = KVTIER,
    role: str = "kv_both",
    beside: Sequence[dict[str, Any]] | None = None,
    num_blocks: int = 24,
    **options: Any,
) -> Iterator[Engine]:
    """Run an engine with a cache of `num_blocks` blocks, without kvtier or with these settings of it.

    With `beside`, kvtier is the first child of a `MultiConnector` and these are the others.
    """
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    transfer = None if kvtier is None else as_connector(kvtier, connector, role)
    if transfer is not None and beside is not None:
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [transfer, *beside]},
        }
    engine: Engine | None = None
    try:
        llm = make_llm(model, num_blocks, transfer, **({"disable_log_stats": False, "seed": 0} | options))
        engine = Engine(llm)
        yield engine
        engine.settle()
    finally:
        if engine is not None:
            engine.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()  # one that was made and did not start has a connector, too
        llm = engine = None
        cleanup_dist_env_and_memory()
