"""Whether hybrid models in vLLM give the same tokens with kvtier as alone, on a GPU or on vLLM's CPU build.

    python benchmarks/hybrid_tokens.py [--models granite-f32 qwen-bf16] [--engines 6] [--seconds 300]

Small models with random weights: Granite (Mamba 2), Qwen3-Next (gated delta nets) and Llama 4 (chunked-local
attention). Each engine has random settings: cache size, retention of states, steps scheduled ahead, failing
loads and stores; some requests are aborted, and vLLM's cache is emptied now and then. Each model and model
runner has a process of its own, which starts vLLM alone first and then the engines with kvtier, and counts
answers that differ from those of vLLM alone.

In float32 requests run together and are preempted. An answer that leaves the other one where the two best
tokens of vLLM alone are as likely to a thousandth is counted as a tie, not as wrong. In bfloat16 rounding
depends on the shapes of steps, so prompts run one at a time and every step computes one block: a loaded
prefix then makes no difference to any later step, and all tokens must be equal.

The second engine of each process is the negative control: its pool is falsified, and answers must differ.
The exit status is 1 if an answer is wrong, a control finds no difference, or a process does not end well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tests`

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRITON_F32_DEFAULT": "ieee",  # else tf32
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Read when torch and vLLM are imported."""
ANSWER = 20
TIE = 1e-3
"""The difference of log-probabilities below which float32 rounding may choose between two tokens."""


class Kind(NamedTuple):
    """A model: who saves it, its number format, and the options of its engines."""

    save: str
    dtype: str
    options: dict[str, Any]
    is_recurrent: bool = True


_GRANITE = {"max_model_len": 1024, "block_size": 128, "max_num_batched_tokens": 128}
_QWEN = {"max_model_len": 8192, "block_size": 128, "max_num_batched_tokens": 2048}
_LLAMA4 = {"max_model_len": 1024, "block_size": 32, "max_num_batched_tokens": 256}
KINDS = {
    "granite-f32": Kind("save_granite", "float32", _GRANITE),
    "granite-bf16": Kind("save_granite", "bfloat16", _GRANITE),
    "qwen-bf16": Kind("save_qwen3_next", "bfloat16", _QWEN),
    "llama4-f32": Kind("save_llama4", "float32", _LLAMA4, is_recurrent=False),
    "llama4-bf16": Kind("save_llama4", "bfloat16", _LLAMA4, is_recurrent=False),
}
RUNNERS = {"v1": "0", "v2": "1"}

START_SECONDS = 200.0
"""How long a process may take beyond its time: the first start on a GPU compiles for one to two minutes."""

Prompt = list[int]
Engine = Any  # of the tests inside vLLM, which are imported when the environment is set


def in_tests(name: str) -> Any:
    """Return a module of the tests inside vLLM. Most of them import torch, which reads the environment."""
    return import_module(f"tests.vllm.{name}")


class Expected(NamedTuple):
    """The tokens of vLLM alone, each with its lead over the second best."""

    tokens: list[int]
    leads: list[float]

    def judge(self, tokens: list[int], *, may_tie: bool) -> str:
        """Return whether tokens are `right`, part at a `tie`, or are `wrong`."""
        if tokens == self.tokens:
            return "right"
        pairs = zip(tokens, self.tokens, strict=True)
        at = next(at for at, (got, wanted) in enumerate(pairs) if got != wanted)
        return "tie" if may_tie and self.leads[at] < TIE else "wrong"


class Trial:
    """The engines of one model and one runner, in this process."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self._kind, self._folder = kind, getattr(in_tests("models"), kind.save)(folder)
        self._options = kind.options | {"dtype": kind.dtype, "enable_prefix_caching": True}
        if in_tests("device").on_gpu() and kind.save == "save_qwen3_next":
            self._options["additional_config"] = {"gdn_prefill_backend": "triton"}
        self._known: dict[tuple[int, ...], Expected] = {}
        with self._engine(None, num_blocks=256) as engine:  # vLLM makes blocks large enough for a state
            self.block = engine.core.vllm_config.cache_config.block_size
            self.runner = "v2" if engine.core.vllm_config.use_v2_model_runner else "v1"
        self._unit = self.block if kind.is_recurrent else 128
        self._options["max_model_len"] = 5 * self._unit
        if not self.together:
            self._options["max_num_batched_tokens"] = self.block

    @property
    def together(self) -> bool:
        """Whether requests may run together."""
        return self._kind.dtype == "float32"

    @contextmanager
    def _engine(
        self, kvtier: dict[str, Any] | None, is_faulty: bool = False, **options: Any
    ) -> Iterator[Engine]:
        engines, faults = in_tests("engines"), in_tests("test_faults")
        connector = faults.FAULTY if is_faulty else engines.KVTIER
        pool = {"cpu": {"capacity": "256MiB"}, "audit": 0}
        settings = None if kvtier is None else faults.DEADLINES | pool | kvtier
        with engines.vllm_engine(
            self._folder, settings, connector=connector, **(self._options | options)
        ) as engine:
            yield engine

    def draw_prompts(self, rng: random.Random) -> list[Prompt]:
        """Return prompts that share prefixes and end around boundaries."""
        make_prompt = in_tests("engines").make_prompt
        # Of a prompt of whole blocks that vLLM has, attention computes one token: a step of another shape.
        sides = [-1, 0, 1] if self.together or self._kind.is_recurrent else [-1, 1]
        unit = self._unit
        stems = [make_prompt(rng.randrange(10**6), 3 * unit + 1) for _ in range(2)]
        prompts = []
        for _ in range(8):
            stem, length = rng.choice(stems), rng.choice([1, 2, 3]) * unit + rng.choice(sides)
            end = make_prompt(rng.randrange(10**6), 2 * unit)
            more = rng.choice([0, unit // 2, unit])
            prompts.append(stem[:length] + end[: more if length % unit or self.together else 0])
        return prompts

    def compute(self, prompts: list[Prompt]) -> None:
        """Have vLLM alone answer prompts, one at a time."""
        new = [prompt for prompt in prompts if tuple(prompt) not in self._known]
        if not new:
            return
        with self._engine(None, num_blocks=256) as engine:
            params = engine.params(ANSWER, logprobs=2)
            for prompt in new:
                (done,) = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
                answer = done.outputs[0]
                best = [
                    sorted((one.logprob for one in each.values()), reverse=True) for each in answer.logprobs
                ]
                leads = [first - second for first, second, *_ in best]
                self._known[tuple(prompt)] = Expected(list(answer.token_ids), leads)

    def run(self, seed: int) -> dict[str, Any]:
        """Run an engine with kvtier and random settings, and return its settings and counts."""
        from kvtier.testing.faults import FaultPlan

        faults = in_tests("test_faults")
        rng = random.Random(seed)
        prompts, rate = self.draw_prompts(rng), rng.choice([0.0, 0.05, 0.2, 0.5])
        settings = {"blocks_per_chunk": rng.choice([1, 1, 2]), "prompt_only": rng.random() < 0.3}
        options = {
            "num_blocks": rng.choice([18, 24, 40])
            if self._kind.is_recurrent
            else rng.choice([96, 120, 160]),
            "max_num_seqs": rng.choice([2, 4, 8]),
            "async_scheduling": rng.random() < 0.5,
            "prefix_cache_retention_interval": rng.choice([0, None, 2 * self.block]),
        }
        if not self._kind.is_recurrent:
            options["prefix_cache_retention_interval"] = 0
        self.compute(prompts)
        plan = faults.use(FaultPlan(rng.randrange(10**6), rate, faults.KINDS))
        with self._engine(settings, is_faulty=True, **options) as engine:
            counts = Counter({"engines": 1}) + self._serve(engine, rng, prompts)
            stats = engine.stats
            counts += Counter(
                loaded_bytes=stats.load_bytes,
                loads=stats.loads,
                loads_failed=stats.loads_failed,
                stores_failed=stats.stores_failed,
                preemptions=int(engine.count_preemptions()),
                faults=sum(plan.injected.values()),
            )
        return {"seed": seed, "faults": rate, **settings, **options, "counts": dict(counts)}

    def _serve(self, engine: Engine, rng: random.Random, prompts: list[Prompt]) -> Counter[str]:
        """Run each prompt several times, in random order, and judge the answers."""
        counts: Counter[str] = Counter()
        for turn in range(3):
            names = {f"{turn}-{at}": prompts[at] for at in rng.sample(range(len(prompts)), len(prompts))}
            cached: dict[str, int] = {}
            for name, prompt in names.items():
                engine.add(name, prompt, ANSWER)
                aborts = rng.random() < 0.1
                for _ in range(rng.randrange(4) if self.together or aborts else 0):
                    self._note(engine, names, counts, cached)
                if aborts:
                    engine.llm.llm_engine.abort_request([name])
                    counts["aborted"] += 1
                if not self.together:
                    self._finish(engine, names, counts, cached)
            self._finish(engine, names, counts, cached)
            counts["cached_tokens"] += sum(cached.values())
            if rng.random() < 0.7:
                empty(engine)
        return counts

    def _finish(
        self, engine: Engine, names: dict[str, Prompt], counts: Counter[str], cached: dict[str, int]
    ) -> None:
        while engine.llm.llm_engine.has_unfinished_requests():
            self._note(engine, names, counts, cached)

    def _note(
        self, engine: Engine, names: dict[str, Prompt], counts: Counter[str], cached: dict[str, int]
    ) -> None:
        """Run a step, and judge the answers that are complete."""
        for output in engine.llm.llm_engine.step():
            cached[output.request_id] = output.num_cached_tokens or 0
            if output.finished and len(tokens := list(output.outputs[0].token_ids)) == ANSWER:
                expected = self._known[tuple(names[output.request_id])]
                counts["requests"] += 1
                counts[expected.judge(tokens, may_tie=self.together)] += 1

    def control(self, seed: int) -> dict[str, Any]:
        """Load from a falsified pool: return how many answers show it."""
        rng = random.Random(seed)
        prompts = self.draw_prompts(rng)
        self.compute(prompts)
        counts: Counter[str] = Counter()
        with self._engine({}, num_blocks=64 if self._kind.is_recurrent else 160) as engine:
            for prompt in prompts:
                engine.generate([prompt], ANSWER)
            empty(engine)
            engine.falsify_pool()
            for prompt in prompts:
                (output,) = engine.generate([prompt], ANSWER)
                empty(engine)
                if output.cached:
                    differs = output.tokens != self._known[tuple(prompt)].tokens
                    counts["control_noticed" if differs else "control_unnoticed"] += 1
        return {"seed": seed, "control": True, "counts": dict(counts)}


def empty(engine: Engine) -> None:
    """Empty vLLM's own cache. With steps scheduled ahead, blocks are freed a step later."""
    while engine.core.scheduler.has_requests():
        engine.step()
    for _ in range(8):
        if engine.llm.reset_prefix_cache():
            return
        engine.step()
    raise RuntimeError("expected all blocks to be free within eight steps")


def serve(name: str, runner: str, seeds: list[int], until: float, pipe: Connection) -> None:
    """Run a model's engines in this process until `until`, and send what each has counted."""
    os.environ |= ENVIRONMENT | (
        {} if runner == "default" else {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner]}
    )
    try:
        with TemporaryDirectory() as folder:
            trial = Trial(KINDS[name], Path(folder))
            pipe.send({"block": trial.block, "runner": trial.runner, "counts": {}})
            pipe.send(trial.control(-1))
            for seed in seeds:
                if seed != seeds[0] and time.time() > until:
                    break
                pipe.send(trial.run(seed))
        pipe.send(None)
    except BaseException:
        pipe.send({"problem": traceback.format_exc()[-3000:], "counts": {"broken": 1}})
        raise


def run_process(name: str, runner: str, seeds: list[int], seconds: float) -> Iterator[dict[str, Any]]:
    """Run a model's engines in a process; yield what it sends. It is killed if it takes far longer."""
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    until = time.time() + seconds
    process = context.Process(target=serve, args=(name, runner, seeds, until, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        while pipe.poll(max(0.0, until + START_SECONDS - time.time())):
            if (sent := pipe.recv()) is None:
                return
            yield sent
            if "problem" in sent:
                return
        yield {"problem": f"no answer within {seconds + START_SECONDS:.0f} s", "counts": {"broken": 1}}
    except EOFError:
        yield {"problem": "the process has ended; what it said is above", "counts": {"broken": 1}}
    finally:
        process.kill()
        process.join()


def main() -> int:
    """Run all processes one after the other, print each engine and the totals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--runners", nargs="+", choices=["default", *RUNNERS], default=["default"])
    parser.add_argument("--engines", type=int, default=6, help="of each model and runner")
    parser.add_argument("--seed", type=int, default=0, help="of the first engine")
    parser.add_argument(
        "--seconds", type=float, default=400, help="for all; each process runs one engine at least"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pairs = list(product(options.models, options.runners))
    end, totals = time.time() + options.seconds, {}
    for at, (name, runner) in enumerate(pairs):
        total = totals[f"{name} {runner}"] = Counter[str]()
        seconds = max(20.0, (end - time.time()) / (len(pairs) - at))
        seeds = list(range(options.seed, options.seed + options.engines))
        for sent in run_process(name, runner, seeds, seconds):
            total.update(sent["counts"])
            print(name, runner, json.dumps(sent) if "problem" not in sent else sent["problem"], flush=True)
        if options.json:
            options.json.write_text(json.dumps(totals, indent=1))
    print()
    for label, total in totals.items():
        keys = ("engines", "requests", "cached_tokens", "loads", "faults", "preemptions", "aborted")
        shown = [f"{key} {total[key]:,}" for key in (*keys, "tie", "wrong", "control_noticed", "broken")]
        print(f"{label:22}", "  ".join(shown))
    good = all(
        total["requests"] and total["control_noticed"] and not total["wrong"] and not total["broken"]
        for total in totals.values()
    )
    print("OK" if good else "NOT OK")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
