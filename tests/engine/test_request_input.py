"""Whatever is given as a request is refused at once and leaves no trace, or runs to its end: nobody else's
request is hurt.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.drive import expect, expect_idle, run, tokens, toy_engine
from tests.engine.test_with_kvtier import engine_with

from kvtier.engine import Engine, SamplingParams
from kvtier.errors import InputError, show_value

LONGEST = 23
"""Tokens of a request, so that one which asks for a googol of them ends."""


class Raises:
    """An object whose every answer is an exception, and not one that is expected."""

    def __len__(self) -> int:
        raise ZeroDivisionError

    __iter__ = __index__ = __hash__ = __repr__ = __len__  # type: ignore[assignment]
    __bool__ = __str__ = __float__ = __len__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError


class Endless:
    """A list of three that never ends."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


class Growing(Endless):
    """A list that is longer whenever it is asked."""

    length = 2

    def __len__(self) -> int:
        self.length *= 2
        return self.length


class Short(list[int]):
    """A list that has fewer items than it says."""

    def __len__(self) -> int:
        return 5


class UnhashableText(str):
    __slots__ = ()

    def __hash__(self) -> int:
        raise ZeroDivisionError


class Name(StrEnum):
    ONE = "one"


ODD: list[Any] = [
    None, True, False, np.True_, 0, 1, -1, 63, 64, 2**31, 2**32, 2**63, 2**64, 10**400, -(10**400), 10**5000,
    0.0, 1.0, -0.0, 0.5, 2.5, 1e-320, 5e-324, 1e308, math.inf, -math.inf, math.nan,
    np.float32(0.5), np.float64(0.5), Decimal("0.5"), Fraction(1, 2), 1j, np.int64(3), np.uint8(3),
    np.int32(-3), torch.tensor(3), torch.tensor(0.5),
    "", "a", "1", "\ud800", "a\udfff", "\0", "ü" * 2_000_000, UnhashableText("u"), Name.ONE, np.str_("n"),
    b"", b"abc", bytearray(b"abc"), memoryview(b"abc"),
    (), [], {}, set(), [1], (1,), {1: 1}, {1}, frozenset({1}), [[1]], [[1], [2, 3]], [None], ["a"], [b"a"],
    [1, 2.0], [1, True], [1, 10**5000], [-1], [64], (1, 2, 3), range(5), range(0), range(10**9),
    range(10**30), array("i", [1, 2]), array("d", [1.0]), deque([1, 2]), iter([1, 2]), (n for n in (1, 2)),
    [1] * 10_000,
    np.array([1, 2, 3]), np.array([1, 2], np.uint8), np.array([1.0]), np.array([True]), np.array(1),
    np.array([[1, 2]]), np.array([1, "a"], object), np.array([]), np.array(["a"]),
    np.ma.masked_array([1, 2], [0, 1]), [np.int64(5), np.uint16(6)],
    torch.tensor([1, 2]), torch.tensor([1.5]), torch.tensor([[1]]), torch.tensor([True]),
    object(), Raises(), Endless(), Growing(), Short([1, 2]), [Raises()], (Raises(),), SamplingParams,
    SamplingParams(), len, NotImplemented, ...,
]  # fmt: skip

Throw = Callable[[Engine, Any], Any]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 3, "seed": 7} | fields)


def add(engine: Engine, prompt: Any = (1, 2, 3, 4, 5), sampling: Any = None, **more: Any) -> str:
    return engine.add_request(
        prompt, params() if sampling is None else sampling, **{"request_id": "odd"} | more
    )


PLACES: dict[str, Throw] = {
    "prompt": lambda engine, odd: add(engine, odd),
    "token": lambda engine, odd: add(engine, [1, odd, 3]),
    "params": lambda engine, odd: engine.add_request([1, 2], odd, request_id="odd"),
    "request_id": lambda engine, odd: add(engine, request_id=odd),
    "cache_salt": lambda engine, odd: add(engine, cache_salt=odd),
    "lora_name": lambda engine, odd: add(engine, lora_name=odd),
    "abort": lambda engine, odd: engine.abort(odd),
    "prompts": lambda engine, odd: engine.generate(odd, params()),
    "second prompt": lambda engine, odd: engine.generate([[1, 2], odd], params()),
    "params of all": lambda engine, odd: engine.generate([[1, 2], [3, 4]], odd),
    "params of the second": lambda engine, odd: engine.generate([[1, 2], [3, 4]], [params(), odd]),
}
FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos")
for drawn in (0.0, 1.0):
    for name in FIELDS:
        if drawn or name != "temperature":
            PLACES[f"{name} at temperature {drawn}"] = lambda engine, odd, name=name, drawn=drawn: add(
                engine, sampling=params(**{"temperature": drawn} | {name: odd})
            )
PLACES["stop token"] = lambda engine, odd: add(engine, sampling=params(stop_token_ids=(1, odd)))


def state(engine: Engine) -> Any:
    """Return what a refusal must not change."""
    queues = engine._scheduler.waiting, engine._scheduler.loading, engine._scheduler.running
    return (
        engine._arrivals,
        dict(engine._requests),
        [list(queue) for queue in queues],
        engine.num_free_blocks,
    )


def throw(engine: Engine, call: Throw, odd: Any) -> bool:
    """Throw one oddity at an engine beside a good request, and say whether it was refused."""
    prompt, sampling = tokens(9), params(max_tokens=4)
    good = engine.add_request(prompt, sampling)
    engine.step()
    before, refusal, outputs = state(engine), "", {}
    try:
        returned = call(engine, odd)
        if isinstance(returned, list):
            outputs = {output.request_id: output for output in returned}
    except InputError as error:
        refusal = str(error)
    if refusal:
        assert "expected" in refusal
        assert len(refusal) < 300
        assert state(engine) == before
    if engine.has_unfinished():
        outputs = run(engine) | outputs
        assert outputs[good].token_ids == expect(engine, prompt, sampling)
    assert engine.step() == []
    expect_idle(engine)
    return bool(refusal)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("with_kvtier", [False, True])
def test_random_input_is_refused_or_runs_to_its_end(place: str, with_kvtier: bool) -> None:
    """Guards against a step that raises until somebody finds out which request to abort."""
    make = engine_with if with_kvtier else toy_engine
    refused = 0
    with make(max_model_len=LONGEST, kv_events=True) as engine:
        for odd in ODD:
            refused += throw(engine, PLACES[place], odd)
            assert add(engine) == "odd", "the id can be used again"
            assert engine.abort("odd") is not None
            engine.take_events()
        expect_idle(engine)
    assert 0 < refused < len(ODD), "some of them are right, and some are wrong"


@pytest.mark.parametrize(
    "prompt",
    [
        (5, 6, 7),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], np.uint16),
        [np.int64(5), 6, np.uint8(7)],
        torch.tensor([5, 6, 7]),
        array("H", [5, 6, 7]),
        deque([5, 6, 7]),
        range(5, 8),
    ],
)
def test_tokens_become_ints_whatever_ints_they_were(prompt: Any) -> None:
    engine = toy_engine()
    engine.add_request(prompt, params())
    (request,) = engine._scheduler.waiting
    assert request.tokens == [5, 6, 7]
    assert {type(token) for token in request.tokens} == {int}


def test_a_prompt_is_copied() -> None:
    engine, prompt = toy_engine(), tokens(6)
    name = engine.add_request(prompt, params())
    prompt.clear()
    assert run(engine)[name].token_ids == expect(engine, tokens(6), params())


def test_an_id_of_ours_that_a_caller_has_chosen_is_passed_over() -> None:
    """Guards against a refusal, halfway through a batch, of an id that nobody gave."""
    engine = toy_engine()
    engine.add_request(tokens(5), params(max_tokens=9), request_id="request-2")
    outputs = engine.generate([tokens(5, seed=n) for n in range(3)], params())
    assert [len(output.token_ids) for output in outputs] == [3, 3, 3]
    assert "request-2" in engine._requests


def test_prompts_are_refused_together_and_the_bad_one_is_named() -> None:
    engine = toy_engine()
    for prompts, sampling, problem in (
        ([[1], [2, 0.5]], None, r"prompts\[1\]: expected token ids that are ints, got 0.5"),
        ([1, 2, 3], None, r"prompts\[0\]: expected a list of token ids, got 1"),
        ([[1], [2]], [params()], "params: expected one for each of 2 prompts, got 1"),
        ([[1], [2]], [params(), {}], r"params\[1\]: expected SamplingParams or None, got {}"),
    ):
        with pytest.raises(InputError, match=problem):
            engine.generate(prompts, sampling)  # type: ignore[arg-type]
        assert not engine.has_unfinished()


def test_anything_can_be_shown() -> None:
    for value, shown in (
        ("\ud800", r"'\ud800'"),
        (10**5000, "a value of type int that cannot be printed"),
        (Raises(), "a value of type Raises that cannot be printed"),
    ):
        assert show_value(value) == shown
        assert len(show_value([value] * 10_000)) <= 101
