"""How far apart KV of the same prompt is when it is computed twice, and whether an audit ever objects.

An engine computes prompts that share prefixes in changing company: other batches, other cuts into steps,
answers that a later prompt repeats. Every hit is audited (`audit: 1`). The script counts audited chunks and
mismatches, and shows the distances beside the tolerance. Then the weights change by a little, and it shows
the distances of changed weights: another matrix in one layer, which an audit must find, and 3 % of noise on
all weights, which rounding could explain in bfloat16. There is no peer: nobody else compares.

`--engine kvtier` needs no other engine; `--engine vllm` runs inside vLLM, on a GPU if there is one.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from _common import MODEL, make_parser, open_console, write_json
from rich.table import Table

from kvtier.config import KVTierConfig
from kvtier.connector import OffloadingConnectorScheduler
from kvtier.connector import audit as audits
from kvtier.engine import Decoder, Engine, EngineConfig, ModelConfig, SamplingParams, random_weights
from kvtier.engine.weights import load_config, load_weights
from kvtier.transfer import compare

Prompts = Sequence[list[int]]


class Host(NamedTuple):
    """A running engine: how it answers, forgets the KV in its own cache, and changes its weights."""

    answer: Callable[[Prompts, int], None]
    forget: Callable[[], None]
    weights: Callable[[], Iterator[torch.Tensor]]
    scheduler: OffloadingConnectorScheduler


@contextmanager
def kvtier_engine(
    layers: int, dtype: str, window: int | None, block: int, folder: str | None = None
) -> Iterator[Host]:
    """Run kvtier's own engine, with random weights or those in a folder."""
    shape = MODEL | {"num_hidden_layers": layers, "hidden_size": 128, "intermediate_size": 256}
    if window is not None:
        shape |= {"model_type": "mistral", "sliding_window": window}
    model = ModelConfig.from_dict(shape) if folder is None else load_config(Path(folder))
    loaded = random_weights(model) if folder is None else load_weights(Path(folder), model)
    decoder = Decoder(model, loaded, dtype=getattr(torch, dtype))
    config = EngineConfig(num_blocks=512, block_size=block, dtype=dtype, max_num_batched_tokens=256)
    settings = {"cpu": {"capacity": "256MiB"}, "audit": 1, "load_if_faster": False}
    with Engine(decoder, config, KVTierConfig.from_dict(settings)) as engine:
        assert engine.connector is not None
        assert engine.connector.connector_scheduler is not None

        def answer(prompts: Prompts, max_tokens: int) -> None:
            engine.generate(prompts, SamplingParams(max_tokens=max_tokens))

        def weights() -> Iterator[torch.Tensor]:
            for layer in decoder._layers:
                yield from _tensors(layer)

        yield Host(answer, engine.reset_prefix_cache, weights, engine.connector.connector_scheduler)
        engine.drain()


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    """Yield the matrices among the attributes of a layer, and of their attributes."""
    names = getattr(part, "__slots__", None) or vars(part)
    for value in (getattr(part, name) for name in names):
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            yield value
        elif type(value).__module__.startswith("kvtier.engine.model"):
            yield from _tensors(value)


@contextmanager
def vllm_engine(layers: int, dtype: str, window: int | None, block: int, **options: Any) -> Iterator[Host]:
    """Run vLLM, with CUDA graphs and FlashAttention on a GPU."""
    from _vllm import VllmEngine, save_model

    shape: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": 512, "head_dim": 64}
    shape |= {"initializer_range": 0.02}
    if window is not None:
        kinds = ["full_attention", "sliding_attention"] * (layers // 2)
        shape |= {"layer_types": kinds, "sliding_window": window}
    on_gpu = torch.cuda.is_available()
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
    device = {"enforce_eager": False, "compilation_config": graphs, "gpu_memory_utilization": 0.3}
    extra = {"cpu": {"capacity": "1GiB"}, "audit": 1, "load_if_faster": False}
    transfer = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.integrations.vllm",
        "kv_connector_extra_config": extra,
    }
    # Else a worker would notice that the weights change.
    unwatched = patch("kvtier.integrations.vllm.connector.watchable", lambda config: None)
    with tempfile.TemporaryDirectory() as folder, unwatched:
        save_model(Path(folder), **shape)
        engine = VllmEngine(
            Path(folder),
            transfer,
            dtype=dtype,
            block_size=block,
            max_num_batched_tokens=512,
            max_num_seqs=8,
            max_model_len=4096,
            num_gpu_blocks_override=40_000 // block,
            kv_cache_memory_bytes=2 << 30,
            **((device if on_gpu else {}) | options),
        )

        def answer(prompts: Prompts, max_tokens: int) -> None:
            for prompt in prompts:
                engine.submit(prompt, max_tokens)
            engine.drain()

        def weights() -> Iterator[torch.Tensor]:
            core: Any = engine._engine.engine_core.engine_core
            model = core.model_executor.driver_worker.worker.model_runner.model
            weights = list(model.model.layers.parameters())  # on a CPU vLLM has other forms of matrices
            return iter([weight for weight in weights if weight.dim() == 2] or weights)

        try:
            yield Host(answer, engine.forget, weights, engine.kvtier)
        finally:
            engine.close()


def play(host: Host, rng: random.Random, documents: Prompts, until: Callable[[], bool]) -> None:
    """Ask about documents in random company until `until` says that it is enough."""
    while not until():
        asked = [
            document[: rng.randrange(len(document) // 3, len(document))]
            + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 60))]
            for document in rng.choices(documents, k=rng.randrange(1, 9))
        ]
        host.answer(asked, rng.randrange(1, 12))
        host.forget()


def change_matrix(host: Host) -> None:
    """Give one matrix, three quarters of the way up, other values of the same size."""
    weights = list(host.weights())
    chosen = weights[len(weights) * 3 // 4]
    with torch.no_grad():
        chosen.copy_(_random(chosen))


def add_noise(host: Host) -> None:
    """Add 3 % of noise to all matrices."""
    with torch.no_grad():
        for weight in host.weights():
            weight.copy_(weight.float() + 0.03 * _random(weight))


def _random(like: torch.Tensor) -> torch.Tensor:
    """Return random values of the same size as a weight's, in float32."""
    values = like.float()
    return torch.randn_like(values) * values.std()


def measure(host: Host, chunks: int, seed: int) -> dict[str, Any]:
    """Audit `chunks` chunks of the same weights, then some of others."""
    apart: list[float] = []
    original = compare.RowComparer.distance

    def note(self: compare.RowComparer, group: int, slot: int, other_slot: int) -> float:
        apart.append(original(self, group, slot, other_slot))
        return apart[-1]

    compare.RowComparer.distance = note  # type: ignore[method-assign]
    audits._MOST_MISMATCHES = 1 << 60  # one would be counted, and the run goes on
    host.scheduler._audits._rng = _WholeHits()
    try:
        rng = random.Random(seed)
        documents = [[rng.randrange(3, 500) for _ in range(rng.randrange(200, 1500))] for _ in range(12)]
        stats = host.scheduler.stats
        play(host, rng, documents, lambda: stats.audited_chunks >= chunks)
        result: dict[str, Any] = {"chunks": stats.audited_chunks, "mismatches": stats.audit_mismatches}
        result |= {"same": _quantiles(apart), "tolerance": host.scheduler.spec.config.audit_tolerance}
        for name, change in (("matrix", change_matrix), ("noise", add_noise)):
            change(host)
            host.forget()
            apart.clear()
            enough = stats.audited_chunks + 50
            play(host, rng, documents, lambda: stats.audited_chunks >= enough)  # noqa: B023
            result[name] = _quantiles(apart)
            host.scheduler.reset_cache()
            host.answer(documents, 1)
        return result
    finally:
        compare.RowComparer.distance = original  # type: ignore[method-assign]


class _WholeHits(random.Random):
    """Has audits compute the whole hit each time."""

    def random(self) -> float:
        return 0.0


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high, most = np.quantile(values, [0, 0.5, 0.99, 1])
    return {"least": float(low), "median": float(middle), "p99": float(high), "most": float(most)}


class Setup(NamedTuple):
    """One engine of a run."""

    name: str
    layers: int
    dtype: str
    window: int | None = None
    block: int = 32
    options: dict[str, Any] = {}  # noqa: RUF012


SETUPS = {
    "kvtier": [
        Setup("float32", 4, "float32", block=8),
        Setup("bfloat16", 4, "bfloat16", block=8),
        Setup("bfloat16, windows", 4, "bfloat16", window=96, block=8),
    ],
    "vllm": [
        Setup("bfloat16", 16, "bfloat16"),
        Setup("bfloat16, windows beside full attention", 16, "bfloat16", window=128),
    ],
    "vllm-gpu": [
        Setup("bfloat16", 32, "bfloat16", block=16),
        Setup("bfloat16, windows beside full attention", 16, "bfloat16", window=128, block=16),
        Setup("fp8 cache", 32, "bfloat16", block=16, options={"kv_cache_dtype": "fp8"}),
        Setup("fp8 weights", 32, "bfloat16", block=16, options={"quantization": "fp8"}),
        Setup("float16, Triton attention", 32, "float16", options={"attention_backend": "TRITON_ATTN"}),
    ],
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--engine", choices=["kvtier", "vllm"], default="kvtier")
    parser.add_argument("--chunks", type=int, default=2000, help="audited chunks of each set-up")
    parser.add_argument("--model", metavar="FOLDER", help="a Llama for kvtier's own engine, in bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="TEXT", default="", help="set-ups whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable(logging.ERROR)  # each mismatch is a line
    console = open_console(arguments)
    key = "vllm-gpu" if arguments.engine == "vllm" and torch.cuda.is_available() else arguments.engine
    make = vllm_engine if arguments.engine == "vllm" else kvtier_engine
    setups = SETUPS[key]
    if arguments.model is not None:
        setups = [Setup(Path(arguments.model).name, 0, "bfloat16", options={"folder": arguments.model})]
    table = Table("set-up", "chunks", "mismatches", "same: median, most", "tolerance", "matrix", "3 % noise")
    results = {}
    for setup in (each for each in setups if arguments.only in each.name):
        with make(setup.layers, setup.dtype, setup.window, setup.block, **setup.options) as host:
            result = results[setup.name] = measure(host, arguments.chunks, arguments.seed)
        row = [
            setup.name,
            f"{result['chunks']:,}",
            str(result["mismatches"]),
            f"{result['same']['median']:.4f}, {result['same']['most']:.4f}",
            f"{result['tolerance']:.3f}",
            f"{result['matrix']['median']:.3f}",
            f"{result['noise']['median']:.3f}",
        ]
        table.add_row(*row)
        console.print(" · ".join(row), style="dim")
        write_json(arguments, {"audit": results})
    console.print(table)


if __name__ == "__main__":
    main()
