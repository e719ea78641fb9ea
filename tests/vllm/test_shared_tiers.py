"""Engines of vLLM over one Valkey server: what one has computed the others load, served or in
this process.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.servers import ValkeyServer
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.device import on_gpu
from tests.vllm.engines import Engine, Prompt, make_prompt, vllm_engine
from tests.vllm.test_explain import ASK, explained
from tests.vllm.test_server import ANSWER, ask, check_explanations, launching, wait_ready
from tests.vllm.test_tiers import wait_open

LENGTHS = (33, 100, 250)
PROMPT, LOADED = 150, 128
ROWS = (PROMPT + ANSWER - 1) // 32
"""Blocks that a prompt and its answer fill; the last token has no KV."""


def valkey_tier(server: ValkeyServer, **more: Any) -> dict[str, Any]:
    """Return settings of kvtier with a server, and with patience: machines that test are busy."""
    return {"tiers": [{"valkey": {"url": server.url} | more}], "load_deadline": "30s"}


def num_rows(server: ValkeyServer) -> int:
    """Count the rows that are on a server."""
    return int(server.say("DBSIZE")[1:])


def wait_rows(server: ValkeyServer, count: int) -> None:
    """Block until so many rows have been written. An engine with nothing else to do writes them, too."""
    while num_rows(server) < count:
        time.sleep(0.02)


def served(client: Any, prompt: Prompt, **more: Any) -> tuple[list[int], dict[str, int], int]:
    """Return what follows a prompt, which tiers gave how much of it, and how much of it was computed."""
    answer = ask(client, prompt, ASK, **more)
    told = answer.kv_transfer_params["kvtier"]
    return list(answer.choices[0].model_extra["token_ids"]), told["from_tiers"], told["computed"]


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_served_engines_share_what_they_compute(llama: Path, reference: Reference) -> None:
    """Two servers of vLLM at once, the second with two data-parallel engines: three engines, one
    namespace.
    """
    prompts = [make_prompt(seed, PROMPT) for seed in range(6)]
    expected = reference(llama, prompts, ANSWER)
    ranks = 1 if on_gpu() else 2
    with ValkeyServer() as server, launching(llama, valkey_tier(server), data_parallel_size=ranks) as second:
        with launching(llama, valkey_tier(server)) as first:
            engines = [first(), *by_rank(second(), ranks)]
            for number, engine in enumerate(engines):
                prompt, tokens = prompts[number], expected[number]
                assert served(engine, prompt) == (tokens, {}, PROMPT), "nobody has computed it before"
                wait_rows(server, (number + 1) * ROWS)
                for other in [other for other in engines if other is not engine]:
                    assert served(other, prompt) == (tokens, {"valkey": LOADED}, PROMPT - LOADED)
            assert num_rows(server) == len(engines) * ROWS, "nothing is divided, and nothing is there twice"
            salted = served(engines[-1], prompts[0], cache_salt="another tenant")
            assert salted == (expected[0], {}, PROMPT), "not for everybody"
            served(engines[0], prompts[4])
            wait_rows(server, (len(engines) + 2) * ROWS)
            server.say("FLUSHALL")
            assert served(engines[-1], prompts[4]) == (expected[4], {}, PROMPT), "only the server had it"
            wait_rows(server, ROWS)
            served(engines[0], prompts[5])
            wait_rows(server, 2 * ROWS)
            check_explanations(engines[0], [make_prompt(seed, 182) for seed in range(100, 106)])
        assert served(engines[-1], prompts[5]) == (expected[5], {"valkey": LOADED}, PROMPT - LOADED), (
            "it was killed"
        )


def by_rank(client: Any, ranks: int) -> list[Any]:
    """Return a client for each data-parallel engine of a server, when its tiers are open."""
    if ranks == 1:
        return [client]
    clients = [
        client.with_options(default_headers={"X-data-parallel-rank": str(rank)}) for rank in range(ranks)
    ]
    for rank in clients:
        wait_ready(rank)
    return clients


def test_prompts_come_from_another_engine_and_the_server_may_die(model: Path, reference: Reference) -> None:
    prompts = [make_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    expected = reference(model, prompts)
    with ValkeyServer() as server:
        with vllm_engine(model, valkey_tier(server)) as engine:
            wait_open(engine)
            first = engine.generate(prompts)
        rows = num_rows(server)
        with vllm_engine(model, valkey_tier(server, prefix="other")) as engine:
            wait_open(engine)
            other = engine.generate(prompts)
        with vllm_engine(model, valkey_tier(server)) as engine:
            manager = wait_open(engine)
            again = engine.generate(prompts)
            loads = [(length - (len(engine.connector._groups) > 1)) // 32 * 32 for length in LENGTHS]
            forget_pool(engine)
            assert explained(engine, prompts[-1])["kvtier"]["from_tiers"] == {"valkey": loads[-1]}
            for seed in range(4):
                assert run_while_it_dies(engine, server, prompts, random.Random(seed)) == expected
            wait_open(engine)
            forget_pool(engine)
            assert tokens_of(engine.generate(prompts)) == expected
            forget_pool(engine)
            back = engine.generate(prompts)
            manager.check()
    assert tokens_of(first) == tokens_of(other) == tokens_of(again) == tokens_of(back) == expected
    assert [output.cached for output in first] == [output.cached for output in other] == [0] * len(prompts)
    assert [output.cached for output in again] == [output.cached for output in back] == loads
    assert rows >= sum(length // 32 for length in LENGTHS)


def forget_pool(engine: Engine) -> None:
    """Empty vLLM's own cache and the pool, when what was offered is written: only the server has it then."""
    engine.forget()
    engine.connector._connector.connector_scheduler.manager.pool.reset_cache()


def run_while_it_dies(
    engine: Engine, server: ValkeyServer, prompts: list[Prompt], rng: random.Random
) -> list[list[int]]:
    """Run prompts that only the server has, kill it after some step and start it after another, empty."""
    forget_pool(engine)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt)
    done: dict[str, list[int]] = {}
    for change in (server.kill, server.start):
        for _ in range(rng.randrange(6)):
            done |= engine.step()
        change()
    done |= engine.run()
    return [done[str(number)] for number in range(len(prompts))]
