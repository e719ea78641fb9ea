"""A real server and real clients: conversations over HTTP, a SIGKILL in the middle, and a restart."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from tests.vllm.conftest import Reference
from tests.vllm.engines import Prompt, make_prompt
from tests.vllm.test_processes import mapped_files, running, unlink_shared

CHATS, TURNS, ANSWER = 6, 3, 16
TRANSFER = {
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "kvtier.integrations.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu": {"capacity": "16MiB"}, "load_if_faster": False},
}


@contextmanager
def serving(model: Path) -> Iterator[Any]:
    """Serve a model and yield a client. In the end the server is killed, whatever it is doing."""
    from openai import OpenAI

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "port": port,
        "host": "127.0.0.1",
        "dtype": "float32",
        "max-model-len": 352,
        "max-num-seqs": 4,
        "block-size": 32,
        "num-gpu-blocks-override": 24,
        "kv-cache-memory-bytes": 64 << 20,
        "served-model-name": "tiny",
        "kv-transfer-config": json.dumps(TRANSFER),
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    # What `vllm serve` runs. The command itself looks for a package named vllm, and the CPU build has another name.
    module = "vllm.entrypoints.openai.api_server"
    with running("-m", module, "--model", str(model), "--enforce-eager", *flags) as process:
        assert process.stdout is not None
        assert any("Application startup complete" in line for line in process.stdout), "the server did not start"
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        mapped = mapped_files(process.pid)
    assert not any("kvtier" in name and name.startswith("/dev/shm/") for _, name in mapped)
    unlink_shared(mapped)


def complete(client: Any, prompt: Prompt) -> list[int]:
    """Ask for the tokens that follow."""
    answer = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=ANSWER,
        temperature=0.0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return list(answer.choices[0].model_extra["token_ids"])


def chat(client: Any, seed: int) -> Prompt:
    """Hold a conversation and return all of it."""
    said: Prompt = []
    for turn in range(TURNS):
        said = said + make_prompt(100 * seed + turn, 50)
        said = said + complete(client, said)
    return said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_conversations_survive_a_killed_server(llama: Path, reference: Reference) -> None:
    with ThreadPoolExecutor(CHATS) as pool:
        with serving(llama) as client:
            before = list(pool.map(lambda seed: chat(client, seed), range(CHATS)))
            again = list(pool.map(lambda seed: chat(client, seed), range(CHATS)))
            metrics = urlopen(str(client.base_url.join("/metrics"))).read().decode()
            interrupted = [pool.submit(chat, client, seed) for seed in range(CHATS)]
        for future in interrupted:
            with suppress(Exception):  # whatever a client makes of a server that is gone
                future.result()
        with serving(llama) as client:
            after = list(pool.map(lambda seed: chat(client, seed), range(CHATS)))
    assert before == again == after
    last_turns = [said[:-ANSWER] for said in before]
    assert [said[-ANSWER:] for said in before] == reference(llama, last_turns, ANSWER)
    loads = re.search(r"vllm:kvtier_loads_total\{.*\} ([\d.]+)", metrics)
    assert loads is not None
    assert float(loads[1]) > 0
