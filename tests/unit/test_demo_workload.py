"""The workload: all turns, each once, the same on every machine; and the sizes that it announces are the
sizes it has.
"""

from __future__ import annotations

import pytest

from kvtier.demo.setup import Turn, Workload
from kvtier.errors import ConfigError

SMALL = Workload(conversations=5, turns=3, system=20, opening=40, message=8, answer=4)


def test_every_turn_is_asked_once_and_turns_of_a_conversation_in_order() -> None:
    order = list(SMALL.rounds())
    assert sorted(order) == [
        Turn(conversation, turn) for conversation in range(1, 6) for turn in range(1, 4)
    ]
    assert len(order) == SMALL.requests
    assert [turn.turn for turn in order] == [1] * 5 + [2] * 5 + [3] * 5


def test_people_come_back_in_another_order() -> None:
    order = [turn.conversation for turn in SMALL.rounds()]
    assert order[:5] != order[5:10]


def test_the_same_seed_says_the_same_on_every_machine() -> None:
    assert SMALL.system_prompt(1000)[:4] == [789, 934, 218, 284]
    assert SMALL.message_of(Turn(2, 3), 1000)[:4] == [630, 966, 308, 390]
    assert [turn.conversation for turn in SMALL.rounds()][:5] == [3, 5, 1, 4, 2]


def test_seeds_conversations_and_turns_differ() -> None:
    other = Workload(conversations=5, turns=3, system=20, opening=40, message=8, answer=4, seed=1)
    said = [tuple(load.message_of(turn, 1 << 30)) for load in (SMALL, other) for turn in load.rounds()]
    assert len(set(said)) == len(said)


def test_announced_sizes_are_those_of_the_messages() -> None:
    totals = dict.fromkeys(range(1, 6), SMALL.system)
    for turn in SMALL.rounds():
        totals[turn.conversation] += len(SMALL.message_of(turn, 100)) + SMALL.answer
    assert SMALL.longest() == max(totals.values())
    assert SMALL.total() == SMALL.system + sum(total - SMALL.system for total in totals.values())


def test_tokens_are_of_the_vocabulary() -> None:
    tokens = [token for turn in SMALL.rounds() for token in SMALL.message_of(turn, 7)]
    assert set(tokens) == set(range(7))


@pytest.mark.parametrize("field", ["conversations", "turns", "system", "opening", "message", "answer"])
def test_nothing_may_be_empty(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: expected a whole number of at least 1, got 0"):
        Workload(**{field: 0})


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_seeds_are_those_that_every_generator_takes(seed: int) -> None:
    with pytest.raises(ConfigError, match=r"^seed: "):
        Workload(seed=seed)


def test_a_prompt_is_all_that_was_said_before() -> None:
    answers = {Turn(2, 1): (7, 7), Turn(2, 2): (8,), Turn(2, 3): (9,)}
    said = [SMALL.message_of(Turn(2, number), 1000) for number in (1, 2, 3)]
    expected = [*SMALL.system_prompt(1000), *said[0], 7, 7, *said[1], 8, *said[2]]
    assert SMALL.prompt_of(Turn(2, 3), answers, 1000) == expected
