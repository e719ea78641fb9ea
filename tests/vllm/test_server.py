"""A real server and real clients: conversations over HTTP, a SIGKILL, and a restart over the same folder."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from tests.ports import free_port
from tests.vllm.conftest import Reference
from tests.vllm.device import engine_options
from tests.vllm.disks import PROBE, disk_tier, wait_open, wait_rows
from tests.vllm.engines import Prompt, as_connector, make_prompt
from tests.vllm.test_processes import mapped_files, running, unlink_shared

CHATS, TURNS, ANSWER = 6, 3, 16
ROWS = CHATS * ((TURNS * (50 + ANSWER) - 1) // 32)
"""Blocks that whole conversations fill; of each the last token has no KV."""


@contextmanager
def launching(model: Path, settings: dict[str, Any], **more: Any) -> Iterator[Callable[[], Any]]:
    """Start to serve a model; yield what waits for the server and returns a client.

    In the end the server is killed, whatever it is doing.
    """
    from openai import OpenAI

    pytest.importorskip("watchfiles", reason="vLLM's server needs it")
    port = free_port()
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
        "kv-transfer-config": json.dumps(as_connector(settings)),
    }
    device = {name: value for name, value in engine_options().items() if value is not False}
    options |= {name.replace("_", "-"): value for name, value in (device | more).items()}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    # What `vllm serve` runs. The command itself looks for a package named vllm, and the CPU build has
    # another name.
    module = "vllm.entrypoints.openai.api_server"
    with running("-m", module, "--model", str(model), "--enforce-eager", *flags) as process:

        def connect() -> Any:
            assert process.stdout is not None
            said = deque(maxlen=20)
            started = any(
                said.append(line) or "Application startup complete" in line for line in process.stdout
            )
            assert started, "the server did not start:\n" + "".join(said)
            threading.Thread(target=repeat, args=(process.stdout,), daemon=True).start()
            while not is_listening(port):  # it says so a moment before
                assert process.poll() is None, "the server has ended"
                time.sleep(0.02)
            return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

        yield connect
        mapped = mapped_files(process.pid)
    assert not any("kvtier" in name and name.startswith("/dev/shm/") for _, name in mapped)
    unlink_shared(mapped)


def repeat(output: Iterable[str]) -> None:
    """Read what a server says, so that it never waits for it, and print it: seen if the test fails."""
    with suppress(ValueError):  # closed
        for line in output:
            if "POST" not in line:
                print(line, end="")


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[Any]:
    """Serve a model over a disk, and yield a client."""
    with launching(model, disk_tier(folder)) as connect:
        yield connect()


def is_listening(port: int) -> bool:
    """Return whether somebody takes connections on a port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def wait_ready(client: Any) -> None:
    """Send prompts until the tiers of the engine that serves this client are open."""
    wait_open(prober(client))


def prober(client: Any) -> Callable[[int], dict[str, Any]]:
    """Return what asks where a prompt of a seed comes from and leaves nothing of it behind."""
    return lambda seed: explain(client, make_prompt(seed, 40), PROBE)


def complete(client: Any, prompt: Prompt) -> list[int]:
    """Ask for the tokens that follow."""
    answer = ask(client, prompt)
    return list(answer.choices[0].model_extra["token_ids"])


def explain(client: Any, prompt: Prompt, asked: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask where a prompt comes from."""
    told: dict[str, Any] = ask(client, prompt, asked or {"kvtier": {"explain": True}}).kv_transfer_params[
        "kvtier"
    ]
    return told


def ask(client: Any, prompt: Prompt, asked: dict[str, Any] | None = None, **more: Any) -> Any:
    """Send a prompt."""
    more |= {} if asked is None else {"kv_transfer_params": asked}
    return client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=ANSWER,
        temperature=0.0,
        extra_body={"return_token_ids": True, "ignore_eos": True} | more,
    )


def chat(client: Any, seed: int) -> Prompt:
    """Hold a conversation and return all of it."""
    said: Prompt = []
    for turn in range(TURNS):
        said = said + make_prompt(100 * seed + turn, 50)
        said = said + complete(client, said)
    return said


def metrics_of(client: Any) -> str:
    """Return what the server's `/metrics` shows."""
    shown: str = urlopen(str(client.base_url.join("/metrics"))).read().decode()
    return shown


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_conversations_survive_a_killed_server(
    llama: Path,
    reference: Reference,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The next server has them from disk, and `kvtier bench` finds that it loads."""
    with ThreadPoolExecutor(CHATS) as pool:
        with serving(llama, tmp_path) as client:
            before = list(pool.map(lambda seed: chat(client, seed), range(CHATS)))
            again = list(pool.map(lambda seed: chat(client, seed), range(CHATS)))
            metrics = metrics_of(client)
            wait_rows(tmp_path, ROWS)
            interrupted = [pool.submit(chat, client, seed) for seed in range(CHATS)]
        for future in interrupted:
            with suppress(Exception):  # whatever a client makes of a server that is gone
                future.result()
        with serving(llama, tmp_path) as client:
            from_disk = [explain(client, said[:-ANSWER]) for said in before]
            after = list(pool.map(lambda seed: chat(client, seed), range(CHATS)))
            measured = bench(client, tmp_path_factory.mktemp("bench"))
    assert before == again == after
    last_turns = [said[:-ANSWER] for said in before]
    assert [said[-ANSWER:] for said in before] == reference(llama, last_turns, ANSWER)
    assert [told["from_tiers"] for told in from_disk] == [{"disk": 160}] * CHATS
    assert [(told["from_gpu"], told["computed"], told["first_miss"]) for told in from_disk] == [
        (0, 22, None)
    ] * CHATS
    loads = re.search(r"vllm:kvtier_loads_total\{.*\} ([\d.]+)", metrics)
    assert loads is not None
    assert float(loads[1]) > 0
    assert measured["pairs"] == measured["same_answers"] == 4
    assert measured["without"]["sources"] == {"local_compute": 4 * 182}
    assert measured["loading"]["sources"] == {
        "external_kv_transfer": 4 * 160,
        "local_compute": 4 * 22,
    }
    assert measured["foreign_tokens"] == 0


def bench(client: Any, folder: Path) -> Any:
    """Measure the server with `kvtier bench`, over four prompts of 182 tokens and fillers for its cache."""
    prompts = [" ".join(str(token % 500) for token in make_prompt(700 + seed, 182)) for seed in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    command = [sys.executable, "-m", "kvtier", "bench", str(client.base_url), "--yes", "--json"]
    command += ["--pairs", "4", "--answer-tokens", "4", "--prompts", str(folder / "prompts.jsonl")]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def check_explanations(client: Any, prompts: list[Prompt]) -> None:
    """Hold what a client is told of six prompts of 182 tokens that nobody knows against what can have been
    done.
    """
    prompt, *others = prompts
    first, again = explain(client, prompt), explain(client, prompt)
    for other in others:
        assert explain(client, other)["from_tiers"] == {}, "nobody has it"
    evicted, plain = explain(client, prompt), ask(client, prompt)
    metrics = metrics_of(client)
    assert (first["from_gpu"], first["computed"], first["first_miss"]) == (0, 182, "never stored")
    assert first["from_tiers"] == {}
    assert again["from_gpu"] == 160
    assert evicted["from_tiers"] == {"cpu": 160}, "from host memory, since vLLM's own cache has forgotten it"
    assert not getattr(plain, "kv_transfer_params", None)
    for name in ("loads_total{", "load_seconds_bucket{", "store_seconds_count{"):
        assert f"vllm:kvtier_{name}" in metrics
