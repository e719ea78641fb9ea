"""The workload of a demo: conversations that share a system prompt and return after the cache forgot them.

    turn 1   system | opening message                                       -> answer 1
    turn 2   system | opening message | answer 1 | message 2                -> answer 2
    ...

Each prompt holds the whole conversation so far, so all of it but the last message has been computed before.

Every round takes all conversations in a new order, as users return in any order. Tokens are drawn from a
seed, the same on every platform; answers are the engine's own. A `Workload` is immutable; any thread may use
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from kvtier.errors import ConfigError

__all__ = ["Turn", "Workload"]


class Turn(NamedTuple):
    """One request: a turn of a conversation, both numbered from 1."""

    conversation: int
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The shape of the conversations. Lengths are in tokens; messages vary by up to a quarter."""

    conversations: int = 10
    turns: int = 4
    system: int = 192
    """The length of the prompt that all conversations share."""
    opening: int = 896
    """The length of the first message: a document to talk about."""
    message: int = 24
    """The length of each later message."""
    answer: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("conversations", "turns", "system", "opening", "message", "answer"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(name, f"expected a whole number of at least 1, got {value}")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError("seed", f"expected a whole number from 0 to 2**63 - 1, got {self.seed}")

    @property
    def requests(self) -> int:
        """The number of requests."""
        return self.conversations * self.turns

    def rounds(self) -> Iterator[Turn]:
        """Yield all turns in the order in which they are asked."""
        for turn in range(1, self.turns + 1):
            order = list(range(1, self.conversations + 1))
            Random(f"{self.seed}/round/{turn}").shuffle(order)
            yield from (Turn(conversation, turn) for conversation in order)

    def system_prompt(self, vocabulary: int) -> list[int]:
        """Return the tokens that open every conversation."""
        return _draw(Random(f"{self.seed}/system"), self.system, vocabulary)

    def message_of(self, turn: Turn, vocabulary: int) -> list[int]:
        """Return the user's tokens of a turn."""
        random = Random(f"{self.seed}/message/{turn.conversation}/{turn.turn}")
        return _draw(random, self._length_of(turn, random), vocabulary)

    def prompt_of(self, turn: Turn, answers: Mapping[Turn, Sequence[int]], vocabulary: int) -> list[int]:
        """Return the prompt of a turn: the whole conversation up to the turn's message."""
        said = self.system_prompt(vocabulary)
        for number in range(1, turn.turn + 1):
            earlier = Turn(turn.conversation, number)
            said += self.message_of(earlier, vocabulary)
            said += answers[earlier] if number < turn.turn else ()
        return said

    def longest(self) -> int:
        """Return the tokens of the longest conversation when it ends, prompt and answer."""
        return max(self._total_of(conversation) for conversation in range(1, self.conversations + 1))

    def total(self) -> int:
        """Return the tokens of all conversations when they end, the system prompt counted once."""
        conversations = range(1, self.conversations + 1)
        return self.system + sum(
            self._total_of(conversation) - self.system for conversation in conversations
        )

    def _total_of(self, conversation: int) -> int:
        turns = [Turn(conversation, turn) for turn in range(1, self.turns + 1)]
        seeds = (Random(f"{self.seed}/message/{turn.conversation}/{turn.turn}") for turn in turns)
        messages = sum(self._length_of(turn, random) for turn, random in zip(turns, seeds, strict=True))
        return self.system + messages + self.turns * self.answer

    def _length_of(self, turn: Turn, random: Random) -> int:
        usual = self.opening if turn.turn == 1 else self.message
        return random.randint(usual - usual // 4, usual + usual // 4)


def _draw(random: Random, length: int, vocabulary: int) -> list[int]:
    return [random.randrange(vocabulary) for _ in range(length)]
