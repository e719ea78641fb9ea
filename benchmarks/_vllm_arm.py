"""One arm of a comparison: a vLLM engine in its own process that runs tasks on request and returns times.

Arms are started together and run one at a time. An idle arm waits for a message and leaves the GPU alone.
`Arm` is the parent's side and imports neither torch nor vLLM; `_serve` is the child's. `TASKS` has the
functions that can be requested.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from _vllm import Answer, VllmEngine

__all__ = ["Arm", "ArmPlan", "Chats"]


class Chats(NamedTuple):
    """Conversations: their number, turns of each, tokens of the first message, later ones, an answer."""

    chats: int
    turns: int
    first: int
    more: int
    answer: int
    at_once: int
    """Requests in flight, if a new one comes whenever another has ended."""


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """The setup of an arm: its connector, if any, its options, and additions to its environment."""

    name: str
    model: Path
    transfer: Mapping[str, Any] | None
    options: Mapping[str, Any]
    environment: Mapping[str, str]


class Arm:
    """The parent's side. The engine starts at once; `wait_ready` waits for it."""

    def __init__(self, plan: ArmPlan) -> None:
        self.name = plan.name
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(plan, theirs), daemon=True)
        self._process.start()
        theirs.close()  # else the end of the child would go unnoticed

    def wait_ready(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the engine runs; return its setup. `TimeoutError` after `timeout` seconds."""
        return self._wait_answer(timeout)

    def ask(self, task: str, timeout: float | None = None, **named: Any) -> dict[str, Any]:
        """Run a task, and wait for its result. `TimeoutError` after `timeout` seconds."""
        self._pipe.send((task, named))
        return self._wait_answer(timeout)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()

    def _wait_answer(self, timeout: float | None) -> dict[str, Any]:
        try:
            if not self._pipe.poll(timeout):
                raise TimeoutError(f"{self.name}: expected an answer within {timeout:.0f} s")
            answer: dict[str, Any] = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}: its process has ended; what it said is above") from None
        return answer


def _serve(plan: ArmPlan, pipe: Connection) -> None:
    """Run an engine and the parent's tasks, until this process is killed."""
    os.environ |= plan.environment  # read when torch and vLLM are imported
    from _vllm import VllmEngine

    started = time.perf_counter()
    engine = VllmEngine(plan.model, plan.transfer, **plan.options)
    gc.collect()
    gc.freeze()
    pipe.send({"start_seconds": time.perf_counter() - started} | engine.setup())
    while True:
        task, named = pipe.recv()
        gc.collect()
        pipe.send(TASKS[task](engine, **named))


def first_tokens(engine: VllmEngine, length: int, seed: int, repetitions: int) -> dict[str, Any]:
    """Time the first token of a new prompt, then after vLLM has evicted it, then when vLLM has it."""
    prompt = _prompt(length, seed)
    engine.forget()
    times: dict[str, list[float]] = {"computed": [_run(engine, prompt).ttft], "evicted": [], "hit": []}
    cached = []
    for _ in range(repetitions):
        engine.forget()
        answer = _run(engine, prompt)
        cached.append(answer.cached)
        times["evicted"].append(answer.ttft)
        times["hit"].append(_run(engine, prompt).ttft)
    return times | {"cached": cached}


def _run(engine: VllmEngine, prompt: list[int], **asked: Any) -> Answer:
    """Run a prompt to its first token, and its stores to their end."""
    request_id = engine.submit(prompt, 1, **asked)
    done: dict[str, Answer] = {}
    while request_id not in done:
        done = engine.step()
    engine.drain()
    return done[request_id]


def _prompt(length: int, seed: int) -> list[int]:
    """Return a prompt of `length` tokens and one more, which is always computed."""
    return random.Random(f"first {seed} {length}").choices(range(1, 8192), k=length + 1)


def open_disk(engine: VllmEngine, seconds: float) -> dict[str, Any]:
    """Step until the disk tier below kvtier's pool is open, for `seconds` at most, and describe it."""
    manager, until, seed = engine.kvtier.manager, time.perf_counter() + seconds, 0
    while manager.tier_stats()[0].state != "open" and time.perf_counter() < until:
        _run(engine, _prompt(8, seed))
        seed += 1
    (tier,), (stats,) = manager.tiers, manager.tier_stats()
    return {
        "state": stats.state,
        "problem": tier.problem,
        "rows": stats.capacity,
        "row_bytes": tier.row_bytes,
    }


def fill_disk(engine: VllmEngine, length: int, seconds: float) -> dict[str, Any]:
    """Compute a prompt and wait, `seconds` at most, until the disk has all of it; return its time."""
    manager, begin = engine.kvtier.manager, time.perf_counter()
    before, rows = manager.tier_stats()[0].demoted, length // engine.setup()["block_size"]
    answer = _run(engine, _prompt(length, 0))
    while (
        written := manager.tier_stats()[0].demoted - before
    ) < rows and time.perf_counter() - begin < seconds:
        _run(engine, _prompt(8, 0))  # a step registers written rows
    return {
        "computed": answer.ttft,
        "seconds": time.perf_counter() - begin,
        "rows": rows,
        "written": written,
    }


def disk_first_tokens(engine: VllmEngine, length: int) -> dict[str, Any]:
    """Time the first token of a prompt that the disk has: computed, loaded from disk, loaded from the pool.

    Also return what the cost rule expects of each way, from what it has learnt.
    """
    core, prompt = engine.kvtier, _prompt(length, 0)
    pool, block_size = core.manager.pool, engine.setup()["block_size"]
    engine.forget()
    computed = _run(engine, prompt, max_load_tokens=0)
    engine.forget()
    pool.discard(pool.hottest())  # like an eviction: the tiers below keep their rows
    before = core.manager.tier_stats()[0]
    from_disk = _run(engine, prompt)
    after = core.manager.tier_stats()[0]
    engine.forget()
    from_pool = _run(engine, prompt)
    size = after.promoted_bytes - before.promoted_bytes
    expected = {
        "promote": core.cost.promotions[after.name].seconds(size),
        "load": core.cost.loads.seconds(size),
        "compute": core.cost.compute_seconds(length),
    }
    return {
        "computed": computed.ttft,
        "disk": from_disk.ttft,
        "pool": from_pool.ttft,
        "cached": [computed.cached, from_disk.cached, from_pool.cached],
        "promoted_tokens": (after.promoted - before.promoted) * block_size,
        "promoted_bytes": size,
        "expected": expected,
    }


def chats(engine: VllmEngine, kind: Chats, seed: int, rate: float | None = None) -> dict[str, Any]:
    """Hold conversations, turn by turn, from empty caches, with fixed concurrency or a fixed rate.

    A turn sends everything said so far. With a rate, turns come at random times; a turn whose chat is still
    being answered comes when that is over, and its time begins then.
    """
    engine.forget(tiers_too=True)
    source = random.Random(f"chats {seed}")
    lengths = [kind.first, *[kind.more] * (kind.turns - 1)]
    messages = [[source.choices(range(1, 8192), k=length) for length in lengths] for _ in range(kind.chats)]
    waiting = [
        (chat, turn) for turn in range(kind.turns) for chat in source.sample(range(kind.chats), kind.chats)
    ]
    gaps = [0.0 if rate is None else source.expovariate(rate) for _ in waiting]
    said: list[list[int]] = [[] for _ in messages]
    running: dict[str, tuple[int, int]] = {}
    answers: list[tuple[int, Answer]] = []  # with the turn
    before = engine.counts()
    start = due = time.perf_counter()
    while waiting or running:
        while waiting and _may_start(waiting[0][0], running, kind, rate, due):
            chat, turn = waiting.pop(0)
            due += gaps[len(waiting)]
            said[chat] += messages[chat][turn]
            running[engine.submit(said[chat], kind.answer)] = chat, turn
        if not engine.busy:
            time.sleep(max(0.0, due - time.perf_counter()))
            continue
        for request_id, answer in engine.step().items():
            chat, turn = running.pop(request_id)
            said[chat] += answer.tokens
            answers.append((turn, answer))
    seconds = time.perf_counter() - start
    engine.drain()
    return {
        "seconds": seconds,
        "requests": len(answers),
        "ttft": [answer.ttft for _, answer in answers],
        "later_ttft": [answer.ttft for turn, answer in answers if turn],
        "gaps": [gap for _, answer in answers for gap in answer.gaps],
        "prompt_tokens": sum(answer.prompt_tokens for _, answer in answers),
        "cached_tokens": sum(answer.cached for _, answer in answers),
        "counts": {name: total - before[name] for name, total in engine.counts().items()},
    }


def _may_start(
    chat: int, running: Mapping[str, tuple[int, int]], kind: Chats, rate: float | None, due: float
) -> bool:
    if any(chat == busy for busy, _ in running.values()):
        return False
    return len(running) < kind.at_once if rate is None else time.perf_counter() >= due


def unique(engine: VllmEngine, lengths: list[int], answer: int, seed: int) -> dict[str, Any]:
    """Time new prompts, all at once, until the last token and until the last store."""
    source = random.Random(f"unique {seed}")
    prompts = [source.choices(range(1, 8192), k=length) for length in lengths]
    start = time.perf_counter()
    left = {engine.submit(prompt, answer) for prompt in prompts}
    while left:
        left -= engine.step().keys()
    served = time.perf_counter() - start
    engine.drain()
    return {"served": served, "seconds": time.perf_counter() - start}


def bus(engine: VllmEngine, size: int, repetitions: int) -> dict[str, Any]:
    """Return the bytes per second of one large copy of pinned memory to the GPU; infinite without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {"load": float("inf")}
    host = torch.empty(size, dtype=torch.int8, pin_memory=True)
    device = torch.empty(size, dtype=torch.int8, device="cuda")
    seconds = []
    for _ in range(repetitions):
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    del device
    torch.cuda.empty_cache()
    return {"load": size / statistics.median(seconds)}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "bus": bus,
    "chats": chats,
    "disk_first_tokens": disk_first_tokens,
    "fill_disk": fill_disk,
    "first_tokens": first_tokens,
    "open_disk": open_disk,
    "unique": unique,
}
"""The tasks that a parent may request."""
