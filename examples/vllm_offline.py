"""Ask twice about documents that exceed vLLM's KV cache: the second time their KV comes from host memory.

    python examples/vllm_offline.py --model Qwen/Qwen3-0.6B

Runs wherever vLLM runs. On a machine without a GPU, `make vllm` puts vLLM's CPU build into .venv-vllm.
"""

from __future__ import annotations

import argparse
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvtier.config import parse_size


def main() -> None:
    args = parse_arguments()
    llm = LLM(
        model=args.model,
        max_model_len=args.max_model_len,
        max_num_seqs=4,
        dtype=args.dtype,
        kv_cache_memory_bytes=parse_size(args.kv_cache),
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu": {"capacity": args.capacity}},
        ),
    )
    documents = [make_document(number, args.lines) for number in range(1, args.documents + 1)]
    ask(llm, documents, "What is on line 3 ?")
    ask(llm, documents, "What is on line 5 ?")
    print(", ".join(f"{name} {value:,}" for name, value in count_kvtier(llm).items() if value))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a name on the hub or a folder")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--lines", type=int, default=200, help="of each document")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--kv-cache", default="1GiB", help="what vLLM gets: less than the documents need")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, help="the share of a GPU that must be free"
    )
    parser.add_argument("--capacity", default="4GiB", help="what kvtier gets")
    parser.add_argument(
        "--dtype", default="auto", help="float32 where vLLM's CPU build dies of an illegal instruction"
    )
    parser.add_argument("--enforce-eager", action="store_true", help="start faster, run slower")
    return parser.parse_args()


def make_document(number: int, lines: int) -> str:
    """Return a unique text."""
    return "\n".join(
        f"Line {line} : {number * line % 97} and {line * line % 89} ." for line in range(1, lines + 1)
    )


def ask(llm: LLM, documents: list[str], question: str) -> None:
    """Put one question to every document, and print where the documents' KV came from."""
    loaded = count_loaded(llm)
    started = time.perf_counter()
    outputs = llm.generate(
        [f"{document}\n{question}" for document in documents], SamplingParams(temperature=0.0, max_tokens=8)
    )
    seconds = time.perf_counter() - started
    tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    loaded = count_loaded(llm) - loaded
    print(f"{question} {seconds:.2f} s; of {tokens:,} prompt tokens {loaded:,} came back from kvtier")


def count_loaded(llm: LLM) -> int:
    """Return the number of tokens that vLLM did not compute because kvtier had them."""
    return sum(
        metric.value for metric in llm.get_metrics() if metric.name == "vllm:external_prefix_cache_hits"
    )


def count_kvtier(llm: LLM) -> dict[str, int]:
    """Return kvtier's counts: the numbers that a server shows on /metrics, which also has latencies."""
    counters = [metric for metric in llm.get_metrics() if metric.name.startswith("vllm:kvtier_")]
    return {
        metric.name.removeprefix("vllm:kvtier_"): metric.value
        for metric in counters
        if hasattr(metric, "value")
    }


if __name__ == "__main__":
    main()
