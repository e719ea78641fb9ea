"""vLLM engines for benchmarks, each in the process that made it.

On the CPU several engines may share a process; one runs at a time. vLLM keeps a process's worker-side
connector in a global variable; `VllmEngine` puts its own there before it runs. Seeded random weights are
saved to a folder first, since each engine loads them: nothing is downloaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

THREADS = 1
"""The number of computing threads.

They spin while they wait for each other: on a machine that does anything else, two are slower than one.
"""

# torch and vLLM read these when they are imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(THREADS),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch  # noqa: E402
from _common import MODEL, Stopwatch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer import kv_transfer_state  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

__all__ = ["BLOCK", "THREADS", "Answer", "VllmEngine", "save_model"]

BLOCK = 32
"""Tokens of a block: the least that vLLM's CPU backend takes."""
SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_external_cache_hit_sources",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "request_finished_all_groups",
    "has_pending_push_work",
)
"""All connector methods that vLLM's scheduler calls while it serves."""


def save_model(folder: Path, **changes: Any) -> Path:
    """Save a Llama with random weights, far enough apart that rounding does not choose the tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(**(MODEL | {"initializer_range": 0.1} | changes))
    model = LlamaForCausalLM(config)
    model.to(torch.float32).save_pretrained(folder)
    return folder


@dataclass(slots=True)
class Answer:
    """The answer to a prompt, with the time to its first token."""

    prompt_tokens: int
    submitted: float
    ttft: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    """Prompt tokens that were not computed."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between consecutive steps that gave it tokens."""
    last: float = 0.0


class VllmEngine:
    """An engine without a connector or with one."""

    def __init__(self, model: Path, transfer: Mapping[str, Any] | None = None, **options: Any) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        config = None if transfer is None else KVTransferConfig(kv_role="kv_both", **transfer)
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK,
            "skip_tokenizer_init": True,
        }
        defaults |= {"use_tqdm_on_load": False}
        args = EngineArgs(model=str(model), kv_transfer_config=config, seed=0, **(defaults | options))
        self._engine = LLMEngine.from_engine_args(args)
        self._worker = kv_transfer_state._KV_CONNECTOR_AGENT
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._answers: dict[str, Answer] = {}
        self._submitted = 0
        self._stopwatch: Stopwatch | None = None
        self._computes = False
        self._scheduler_seconds: list[float] = []

    def time_scheduler(self) -> None:
        """From now on, time the scheduler's calls of the connector."""
        self._stopwatch = Stopwatch()
        self._stopwatch.watch(self._scheduler.connector, SCHEDULER_HOOKS)
        schedule = self._scheduler.schedule

        def note(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            self._computes = output.total_num_scheduled_tokens > 0
            return output

        self._scheduler.schedule = note

    def submit(self, prompt: Sequence[int], max_tokens: int, **asked: Any) -> str:
        """Queue a prompt and return its id. `asked` goes to the connector (`kv_transfer_params`)."""
        self._submitted += 1
        request_id = str(self._submitted)
        self._answers[request_id] = Answer(len(prompt), time.perf_counter())
        extra = {"kv_transfer_params": asked} if asked else None
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
        return request_id

    def step(self) -> dict[str, Answer]:
        """Run one step and return the complete answers."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self._worker
        outputs = self._engine.step()
        self._note_step()
        complete = {}
        for output in outputs:
            answer = self._answers[output.request_id]
            answer.tokens = list(output.outputs[0].token_ids)
            now = time.perf_counter()
            if answer.ttft:
                answer.gaps.append(now - answer.last)
            elif answer.tokens:
                answer.ttft = now - answer.submitted
            answer.last = now
            if output.finished:
                answer.cached = output.num_cached_tokens
                complete[output.request_id] = self._answers.pop(output.request_id)
        return complete

    def take_scheduler_seconds(self) -> list[float]:
        """Take the scheduler's seconds in the connector, for each step that computed."""
        taken, self._scheduler_seconds = self._scheduler_seconds, []
        return taken

    @property
    def busy(self) -> bool:
        """Whether there are requests or transfers to step for."""
        return bool(self._scheduler.has_requests())

    def drain(self) -> None:
        """Step until the last store is over."""
        while self.busy:
            self.step()

    def forget(self, *, tiers_too: bool = False) -> None:
        """Empty vLLM's own cache and, if asked, the connector's tiers."""
        self.drain()
        while not self._engine.reset_prefix_cache(reset_connector=tiers_too):
            self.step()  # with steps scheduled ahead, blocks are freed a step later
        self.drain()

    @property
    def kvtier(self) -> Any:
        """The scheduler's side of kvtier; `None` with another connector."""
        return getattr(getattr(self._scheduler.connector, "_connector", None), "connector_scheduler", None)

    def counts(self) -> dict[str, int]:
        """Return kvtier's counts; empty with another connector."""
        return {} if self.kvtier is None else asdict(self.kvtier.stats)

    def setup(self) -> dict[str, Any]:
        """Return the settings that vLLM has chosen and results depend on."""
        config = self._engine.vllm_config
        return {
            "layout": config.cache_config.kv_cache_layout,
            "block_size": config.cache_config.block_size,
            "num_blocks": config.cache_config.num_gpu_blocks,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "packing": 1 if self.kvtier is None else self.kvtier.spec.config.packing_ratio,
        }

    def close(self) -> None:
        """End the engine."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self._worker
        self._engine.engine_core.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def _note_step(self) -> None:
        """Charge calls to the next step that computes, because some steps only wait for a load."""
        if self._stopwatch is not None and self._computes:
            self._scheduler_seconds.append(sum(self._stopwatch.take().values()))
