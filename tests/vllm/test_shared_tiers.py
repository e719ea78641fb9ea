"""Engines of vLLM over one server, of each kind: what one has computed the others load, served or in this
process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.object_server import s3_credentials
from tests.tiers.server_kinds import ServerKind, serve_mooncake, serve_objects, serve_valkey
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.device import on_gpu
from tests.vllm.disks import PROBE, wait_first_miss
from tests.vllm.engines import Engine, Output, Prompt, make_prompt, vllm_engine
from tests.vllm.test_explain import ASK, explained
from tests.vllm.test_server import ANSWER, ask, check_explanations, launching, prober, wait_ready
from tests.vllm.test_tiers import wait_open, wait_written

pytestmark = pytest.mark.newest_vllm

LENGTHS = (33, 100, 250)
PROMPT, LOADED = 150, 128
ROWS = (PROMPT + ANSWER - 1) // 32
"""Blocks that a prompt and its answer fill; the last token has no KV."""


def shared_tier(tier: dict[str, Any]) -> dict[str, Any]:
    """Return settings of kvtier with a server, and with patience: machines that test are busy, and rows that
    come later than they could be computed would be computed.
    """
    return {"tiers": [tier], "load_deadline": "30s", "load_if_faster": False}


def wait_rows(server: ServerKind, count: int) -> None:
    """Block until so many rows have been written. An engine with nothing else to do writes them, too."""
    while server.num_rows() < count:
        time.sleep(0.02)


def served(
    client: Any, prompt: Prompt, asked: dict[str, Any] = ASK, **more: Any
) -> tuple[list[int], dict[str, int], int]:
    """Return what follows a prompt, which tiers gave how much of it, and how much of it was computed."""
    answer = ask(client, prompt, asked, **more)
    told = answer.kv_transfer_params["kvtier"]
    print(told)  # seen if the test fails: what was computed, and why
    return list(answer.choices[0].model_extra["token_ids"]), told["from_tiers"], told["computed"]


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("serve", [serve_valkey, serve_objects, serve_mooncake])
def test_served_engines_share_what_they_compute(
    serve: Callable[[Path, ExitStack], ServerKind], llama: Path, reference: Reference, tmp_path: Path
) -> None:
    """Two servers of vLLM at once, over Valkey the second with two data-parallel engines: three engines, one
    namespace. The server that they share dies and comes back empty; then one of them dies.
    """
    prompts = [make_prompt(seed, PROMPT) for seed in range(8)]
    expected = reference(llama, prompts, ANSWER)
    with ExitStack() as stack:
        stack.enter_context(s3_credentials())
        server = serve(tmp_path / "log", stack)
        (tier,) = server.tier
        ranks = 2 if tier == "valkey" and not on_gpu() else 1
        settings, loaded = shared_tier(server.tier), ({tier: LOADED}, PROMPT - LOADED)
        second = stack.enter_context(launching(llama, settings, data_parallel_size=ranks))
        with launching(llama, settings) as first:
            engines = [first(), *by_rank(second(), ranks)]
            for number, engine in enumerate(engines):
                prompt, tokens = prompts[number], expected[number]
                assert served(engine, prompt) == (tokens, {}, PROMPT), "nobody has computed it before"
                wait_rows(server, (number + 1) * ROWS)
                for other in [other for other in engines if other is not engine]:
                    assert served(other, prompt) == (tokens, *loaded)
            assert server.num_rows() == len(engines) * ROWS, "nothing is divided, and nothing is there twice"
            one, other = engines[0], engines[-1]
            salted = served(other, prompts[0], cache_salt="another tenant")
            assert salted == (expected[0], {}, PROMPT), "not for everybody"
            served(one, prompts[3])
            wait_rows(server, (len(engines) + 2) * ROWS)
            server.kill()
            for engine in (one, other):
                wait_first_miss("suspended", prober(engine), after=["too slow"])
            assert served(other, prompts[3], PROBE) == (expected[3], {}, PROMPT), "only the server had it"
            server.start()
            for engine in (one, other):
                wait_first_miss("never stored", prober(engine), after=["suspended", "too slow"])
            served(one, prompts[4])
            wait_rows(server, ROWS)
            assert served(other, prompts[4]) == (expected[4], *loaded), "it is back"
            for prompt in prompts[5:]:
                served(one, prompt)
            wait_rows(server, len(prompts[4:]) * ROWS)
            check_explanations(one, [make_prompt(seed, 182) for seed in range(100, 106)])
        # A read of Mooncake has failed here, once, perhaps because its store was starved (see `running`).
        # What fails is computed.
        answers = [served(other, prompt) for prompt in prompts[5:]]
        assert [tokens for tokens, *_ in answers] == expected[5:]
        sources = [source for _, *source in answers]
        num_loaded = sources.count([*loaded])
        assert num_loaded == len(answers) or (tier == "mooncake" and num_loaded), (
            "who computed it was killed"
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


def test_prompts_come_from_another_engine_and_the_server_may_die(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    prompts = [make_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    expected = reference(model, prompts)
    with ExitStack() as stack:
        server = serve_valkey(tmp_path, stack)
        settings = shared_tier(server.tier)
        elsewhere = shared_tier({"valkey": server.tier["valkey"] | {"prefix": "other"}})
        with vllm_engine(model, settings) as engine:
            first = engine.generate(prompts)
        rows = server.num_rows()
        with vllm_engine(model, elsewhere) as engine:
            other = engine.generate(prompts)
        with vllm_engine(model, settings) as engine:
            again = engine.generate(prompts)  # the first request waits for the namespace, if it must
            manager = wait_open(engine)
            loads = [(length - (len(engine.connector._groups) > 1)) // 32 * 32 for length in LENGTHS]
            forget_pool(engine)
            assert explained(engine, prompts[-1])["kvtier"]["from_tiers"] == {"valkey": loads[-1]}
            for seed in range(4):
                assert run_while_it_dies(engine, server, prompts, random.Random(seed)) == expected
            until = time.monotonic() + 60
            while True:
                # Connections that lead nowhere suspend it, and rows that are thought to be there are missed
                # when they are read: it may take a few turns until all of them are written again.
                wait_open(engine)
                forget_pool(engine)
                back = engine.generate(prompts)
                assert tokens_of(back) == expected
                if cached_of(back) == loads or time.monotonic() > until:
                    break
            manager.check()
    assert tokens_of(first) == tokens_of(other) == tokens_of(again) == expected
    assert cached_of(first) == cached_of(other) == [0] * len(prompts)
    assert cached_of(again) == cached_of(back) == loads
    assert rows >= sum(length // 32 for length in LENGTHS)


def cached_of(outputs: list[Output]) -> list[int]:
    """Return how much of each prompt was not computed."""
    return [output.cached for output in outputs]


def forget_pool(engine: Engine) -> None:
    """Empty vLLM's own cache and the pool, when what was offered is written: only the server has it then."""
    wait_written(engine)
    engine.forget()
    engine.connector._connector.connector_scheduler.manager.pool.reset_cache()


def run_while_it_dies(
    engine: Engine, server: ServerKind, prompts: list[Prompt], rng: random.Random
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
