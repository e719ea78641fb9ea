"""Shared by the engine's tests: a toy engine, and a loop that checks every invariant after every step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from kvtier.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from kvtier.engine.config import STATE, LayerKind
from kvtier.testing.toy_model import ToyModel

ONE_GROUP: tuple[LayerKind, ...] = (None, None)
TWO_GROUPS: tuple[LayerKind, ...] = (None, 20, None, 20)
STATES: tuple[LayerKind, ...] = (None, STATE, STATE)
"""Full attention, and two groups of states."""
ALL_KINDS: tuple[LayerKind, ...] = (STATE, 20, None, STATE)
PATIENCE = 60.0


def toy_engine(layers: Sequence[LayerKind] = ONE_GROUP, **settings: Any) -> Engine:
    """Make an engine over the toy model, small unless told otherwise."""
    defaults = {"num_blocks": 65, "block_size": 4, "max_num_batched_tokens": 16, "kv_events": True}
    return Engine(ToyModel(layers), EngineConfig(**defaults | settings))


def tokens(count: int, seed: int = 0) -> list[int]:
    """Return seeded random token ids."""
    random = Random(seed)
    return [random.randrange(64) for _ in range(count)]


def run(engine: Engine, max_steps: int = 2000) -> dict[str, RequestOutput]:
    """Step until no request is left, checking after every step; return the last output of each.

    More steps than `max_steps` may only wait, for a thread that comes late.
    """
    outputs: dict[str, RequestOutput] = {}
    until = time.monotonic() + PATIENCE
    for step in itertools.count():
        if not engine.has_unfinished():
            return outputs
        if step >= max_steps and time.monotonic() > until:
            break
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check()
    raise AssertionError(f"requests are stuck: {engine._scheduler.waiting, engine._scheduler.running}")


def expect(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Return what the toy model must generate."""
    assert isinstance(engine.model, ToyModel)
    return engine.model.expect(prompt, params)


def expect_idle(engine: Engine) -> None:
    """Expect that every block is free again."""
    engine.drain()
    engine.check()
    assert engine.num_free_blocks == engine.config.num_blocks - 1
