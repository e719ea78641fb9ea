"""Resets, and what they tell: everything is gone from the tiers, and the event stream says so."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import Reference, tokens_of
from tests.vllm.engines import Engine, make_prompt, vllm_engine

from kvtier.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx, hash_to_u64
from kvtier.offload import OffloadingManager, ReqContext


def test_a_reset_empties_the_tiers_if_asked(llama: Path, reference: Reference) -> None:
    prompt = make_prompt(0, 100)
    with vllm_engine(llama, {}) as engine:
        engine.generate([prompt])
        engine.forget(tiers_too=True)
        output = engine.generate([prompt])[0]
    assert (output.cached, output.tokens) == (0, reference(llama, [prompt])[0])


def test_a_reset_while_requests_run(model: Path, reference: Reference) -> None:
    prompts = [make_prompt(seed, 60 + 30 * seed) for seed in range(4)]
    with vllm_engine(model, {}) as engine:
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, 40)
        for step in range(6):
            engine.step()
            if step % 2:
                scheduler = engine.core.scheduler
                assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        done = engine.run()
    assert sorted(done.values()) == sorted(reference(model, prompts, 40))


@pytest.mark.parametrize("how", ["preempted", "ended_before_the_next_reset", "waited_for"])
def test_weights_that_change_at_a_reset(model: Path, how: str) -> None:
    """As in reinforcement learning: no token may come from KV of the old weights, also of requests alive at
    the reset.
    """
    running = [make_prompt(seed, 60 + 30 * seed) for seed in range(4)]
    prompts = [prompt + make_prompt(9, 40) for prompt in running]
    with vllm_engine(model, num_blocks=256) as plain:
        before = tokens_of(plain.generate(prompts, 24))
        swap_weights(plain, seed=1)
        plain.forget()
        expected = tokens_of(plain.generate(prompts, 24))
    assert all(old != new for old, new in zip(before, expected, strict=True)), "else nothing is tested"
    with vllm_engine(model, {}) as engine:
        engine.generate(running[:2], 40)
        for index, prompt in enumerate(running):
            engine.add(str(index), prompt, 40)
        for _ in range(6):
            engine.step()
        assert engine.core.scheduler.running
        reset_with_new_weights(engine, how)
        engine.run()
        rounds = []
        for _ in range(3):
            engine.forget()
            rounds.append(tokens_of(engine.generate(prompts, 24)))
        assert engine.stats.loads > 0
    assert rounds == [expected] * 3


def test_blocks_that_vllm_could_not_clear_are_not_kept(model: Path) -> None:
    """While a request runs, a reset clears kvtier's tiers but not vLLM's own cache, from which others then
    go on.
    """
    prompts = [make_prompt(seed, 100) for seed in range(3)]
    with vllm_engine(model, num_blocks=256) as plain:
        swap_weights(plain, seed=1)
        expected = tokens_of(plain.generate(prompts))
    with vllm_engine(model, {}, num_blocks=64) as engine:
        engine.generate(prompts)
        engine.add("running", make_prompt(9, 60), 40)
        engine.step()
        swap_weights(engine, seed=1)
        assert not engine.core.scheduler.reset_prefix_cache(reset_connector=True)
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt)
        engine.run()
        hits = next(
            metric.value for metric in engine.llm.get_metrics() if metric.name == "vllm:prefix_cache_hits"
        )
        assert hits == 3 * 96, "vLLM's own cache is as it was"
        engine.forget()
        rounds = []
        for _ in range(2):
            rounds.append(tokens_of(engine.generate(prompts)))
            engine.forget()
        assert engine.stats.loads == 3, "once vLLM's cache is cleared, all is as ever"
    assert rounds == [expected] * 2


def test_kv_computed_on_uncleared_blocks_after_a_preemption_is_not_kept(llama: Path) -> None:
    """A request that ran at the reset finds its own blocks of before in vLLM's cache when it comes again."""
    running = [make_prompt(seed, 100) for seed in range(3)]
    prompts = [prompt + make_prompt(9, 20) for prompt in running]
    with vllm_engine(llama, num_blocks=256) as plain:
        swap_weights(plain, seed=1)
        expected = tokens_of(plain.generate(prompts))
    with vllm_engine(llama, {}, num_blocks=16) as engine:
        for index, prompt in enumerate(running):
            engine.add(str(index), prompt, 90)
        for _ in range(8):
            engine.step()
        swap_weights(engine, seed=1)
        assert not engine.core.scheduler.reset_prefix_cache(reset_connector=True)
        preemptions = engine.count_preemptions()
        engine.run()
        assert engine.count_preemptions() > preemptions
        engine.forget()
        assert tokens_of(engine.generate(prompts)) == expected
        engine.forget()
        assert tokens_of(engine.generate(prompts)) == expected
        assert engine.stats.loads > 0, "once vLLM's cache is cleared, all is as ever"


def test_a_block_that_was_not_full_at_a_reset_is_not_kept(llama: Path) -> None:
    """vLLM's cache is empty then, and has that block as soon as it is full."""
    prompt = make_prompt(0, 20)
    with vllm_engine(llama, {}) as engine:
        engine.add("running", prompt, 40)
        for _ in range(4):
            engine.step()
        swap_weights(engine, seed=1)
        assert not engine.core.scheduler.reset_prefix_cache(reset_connector=True)
        (done,) = engine.run().values()
        again = [*prompt, *done, *make_prompt(1, 10)]
        assert engine.generate([again])[0].cached > 0, "vLLM's own, as without kvtier"
        engine.forget()
        rounds = []
        for _ in range(2):
            rounds.append(tokens_of(engine.generate([again])))
            engine.forget()
        assert engine.stats.loads == 1
    with vllm_engine(llama) as plain:
        swap_weights(plain, seed=1)
        assert rounds == [tokens_of(plain.generate([again]))] * 2


def test_loads_and_stores_resume_once_the_kept_blocks_were_handed_out(model: Path) -> None:
    """vLLM's cache is never cleared after the reset: its blocks are handed out anew, one after the other."""
    before = [make_prompt(seed, 100) for seed in range(3)]
    later = [make_prompt(20 + seed, 100 + 10 * seed) for seed in range(8)]
    with vllm_engine(model, num_blocks=256) as plain:
        swap_weights(plain, seed=1)
        expected = tokens_of(plain.generate([*later, *before]))
    with vllm_engine(model, {}) as engine:
        engine.generate(before)
        engine.add("running", make_prompt(9, 60), 40)
        engine.step()
        swap_weights(engine, seed=1)
        assert not engine.core.scheduler.reset_prefix_cache(reset_connector=True)
        assert engine.stale_blocks > 0
        engine.run()
        prompts = [*later, *before]
        rounds = [[engine.generate([prompt])[0].tokens for prompt in prompts] for _ in range(3)]
        assert engine.stale_blocks == 0
        assert engine.stats.loads > 0
    assert rounds == [expected] * 3


def test_weights_that_change_again_and_again_while_requests_run(model: Path) -> None:
    """vLLM's cache is cleared only in the end: then all that kvtier gives must be of the last weights."""
    rng = random.Random(0)
    heads = [make_prompt(head, 64) for head in range(3)]
    prompts = [heads[tail % 3] + make_prompt(100 + tail, rng.randrange(8, 120)) for tail in range(9)]
    num_changes = 4
    with vllm_engine(model, num_blocks=256) as plain:
        for change in range(num_changes):
            swap_weights(plain, seed=change)
        expected = [plain.generate([prompt])[0].tokens for prompt in prompts]
    with vllm_engine(model, {}, num_blocks=28) as engine:
        names = count()
        for change in range(num_changes):
            for _ in range(6):
                engine.add(str(next(names)), rng.choice(prompts), rng.randrange(4, 40))
                for _ in range(rng.randrange(4)):
                    engine.step()
            assert engine.core.scheduler.running
            swap_weights(engine, seed=change)
            assert not engine.core.scheduler.reset_prefix_cache(reset_connector=True)
        for _ in range(30):
            engine.add(str(next(names)), rng.choice(prompts), rng.randrange(4, 40))
            for _ in range(rng.randrange(6)):
                engine.step()
        engine.run()
        loads = engine.stats.loads
        rounds = []
        for _ in range(2):
            engine.forget()
            rounds.append([engine.generate([prompt])[0].tokens for prompt in prompts])
        assert engine.stats.loads > loads
    assert rounds == [expected] * 2


def test_a_request_that_reuses_kept_blocks_is_told_why_nothing_of_it_is_kept(llama: Path) -> None:
    prompt = make_prompt(0, 100)
    with vllm_engine(llama, {}) as engine:
        engine.generate([prompt])
        engine.add("1000", make_prompt(9, 60), 40)
        engine.step()
        assert not engine.core.scheduler.reset_prefix_cache(reset_connector=True)
        params = engine.params(8, extra_args={"kv_transfer_params": {"kvtier": {"explain": True}}})
        longer = {"prompt_token_ids": prompt + make_prompt(1, 100)}
        done = engine.llm.generate([longer], params, use_tqdm=False)
    (told,) = [output.kv_transfer_params["kvtier"] for output in done if output.kv_transfer_params]
    assert (told["from_gpu"], told["first_miss"]) == (96, "follows KV of before a reset")


def reset_with_new_weights(engine: Engine, how: str) -> None:
    """Swap the weights and reset everything, as a trainer may: with running requests preempted, left alone,
    or ended.
    """
    if how == "waited_for":
        engine.run()
        engine.settle()
    swap_weights(engine, seed=1)
    preempts = how == "preempted"
    cleared = engine.core.scheduler.reset_prefix_cache(reset_running_requests=preempts, reset_connector=True)
    assert cleared == (how != "ended_before_the_next_reset"), "vLLM clears nothing while requests run"


def swap_weights(engine: Engine, seed: int) -> None:
    """Change weights in place: those of the norms, since vLLM's CPU backend keeps the matrices in a form of
    its own.
    """
    engine.llm.apply_model(partial(_add_noise, seed=seed))
    engine.wait_look()


def _add_noise(model: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in sorted(model.named_parameters()):
            if "norm" in name:
                weights += torch.randn(weights.shape, generator=generator).to(weights)


def test_events_say_what_the_pool_holds(model: Path) -> None:
    from vllm.config import KVEventsConfig

    events: list[Any] = []
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with vllm_engine(model, {"cpu": {"capacity": "1MiB"}}, kv_events_config=config) as engine:
        engine.core.scheduler.kv_event_publisher.publish = lambda batch: events.extend(batch.events)
        watch = _Watch(engine.connector._connector.connector_scheduler.manager)
        for seed in range(12):
            engine.generate([make_prompt(seed, 150)])
        engine.settle()
        assert 0 < len(_replay(events)) < 12 * 4
        assert _replay(events) == watch.held()
        engine.forget(tiers_too=True)
        engine.generate([make_prompt(99, 100)])
        engine.settle()
        assert _replay(events) == watch.held()
        assert len(watch.held()) == 3 * len(engine.connector._groups)


def _replay(events: Iterable[Any]) -> set[tuple[int, int]]:
    held: set[tuple[int, int]] = set()
    for event in events:
        if type(event).__name__ == "AllBlocksCleared":
            held.clear()
        if getattr(event, "medium", None) != "CPU":
            continue
        named = {(block_hash, event.group_idx) for block_hash in event.block_hashes}
        if type(event).__name__ == "BlockStored":
            assert not named & held
            held |= named
        else:
            assert named <= held
            held -= named
    return held


class _Watch:
    """Knows all keys that were ever offered to a manager, and so which of them it holds."""

    def __init__(self, manager: OffloadingManager) -> None:
        self._manager = manager
        self._offered: set[OffloadKey] = set()
        self._prepare_store = manager.prepare_store
        manager.prepare_store = self._note  # type: ignore[method-assign]

    def _note(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Any:
        self._offered |= set(keys)
        return self._prepare_store(keys, req_context)

    def held(self) -> set[tuple[int, int]]:
        ready = [key for key in self._offered if self._manager.lookup(key, ReqContext())]
        return {(hash_to_u64(get_offload_block_hash(key)), get_offload_group_idx(key)) for key in ready}
