"""`Talk`: a workload of words. Each chat is about one chapter of the document in `document.toml`.

    turn 1   system | chapter | question 1                         -> answer 1
    turn 2   system | chapter | question 1 | answer 1 | question 2 -> answer 2

Prompts are ChatML, which SmolLM2 and Qwen speak. An answer ends after its first sentence, so that the demo
stays short. Prompts are kept as tokens: only the process that shows words needs `tokenizers`. A talk is
immutable; any thread may use it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.demo.result import RequestResult
from kvtier.demo.setup import Turn, Workload
from kvtier.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvtier.engine import SamplingParams

_ANSWER_TOKENS = 28
_END = "<|im_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk(Workload):
    """Chats about a document, in the tokens of one model."""

    folder: Path
    """The model's folder, which has its tokenizer."""
    shared: tuple[int, ...]
    """The tokens that open every chat."""
    messages: dict[Turn, tuple[int, ...]]
    questions: dict[Turn, str]
    stops: tuple[int, int]
    """The tokens that end an answer and a sentence."""

    def system_prompt(self, vocabulary: int) -> list[int]:
        """Return the tokens that open every chat."""
        return list(self.shared)

    def message_of(self, turn: Turn, vocabulary: int) -> list[int]:
        """Return the tokens of a turn: in the first one the chapter, and always a question."""
        return list(self.messages[turn])

    def answer_in_prompt(self, answer: Sequence[int]) -> Sequence[int]:
        """Return an answer without its end, with which the next message begins."""
        return answer[:-1] if answer[-1] == self.stops[0] else answer

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters: greedy, up to the end of a sentence."""
        from kvtier.engine import SamplingParams

        return SamplingParams(max_tokens=self.answer, stop_token_ids=self.stops)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the words of an answer so far; a character of which bytes are missing is left out."""
        text: str = _read_tokenizer(self.folder).decode(list(tokens))
        return text.strip().removesuffix("\N{REPLACEMENT CHARACTER}")

    def texts(self, requests: Iterable[RequestResult]) -> dict[tuple[int, int], tuple[str, str]]:
        """Return question and answer of each request."""
        asked = {Turn(request.conversation, request.turn): request.token_ids for request in requests}
        return {turn: (self.questions[turn], self.text_of(tokens)) for turn, tokens in asked.items()}


def open_talk(folder: Path, conversations: int | None, turns: int | None, seed: int) -> Talk | None:
    """Return the talk for a model; `None` if it has no tokenizer that can be read, or speaks no ChatML."""
    if find_spec("tokenizers") is None or not (folder / "tokenizer.json").is_file():
        return None
    try:
        tokenizer = _read_tokenizer(folder)
    except Exception as error:  # tokenizers has no class for it
        raise ModelError(f"{folder / 'tokenizer.json'}: expected a tokenizer ({error})") from None
    end, stop = tokenizer.token_to_id(_END), tokenizer.token_to_id(".")
    if end is None or stop is None:
        return None
    document = tomllib.loads(files("kvtier.demo").joinpath("document.toml").read_text(encoding="utf-8"))
    chapters = document["chapter"]
    most = {"conversations": len(chapters), "turns": len(chapters[0]["questions"])}
    shape = {"conversations": conversations or most["conversations"], "turns": turns or most["turns"]}
    for name in shape:
        if shape[name] > most[name]:
            problem = f"expected at most {most[name]}, as many as the document has, got {shape[name]}"
            raise ConfigError(name, f"{problem}; --random takes any number")
    questions, messages = {}, {}
    for number, chapter in enumerate(chapters[: shape["conversations"]], 1):
        text = f"{chapter['title']}\n{chapter['text']}".replace("\n", "\n\n")
        for turn, question in enumerate(chapter["questions"][: shape["turns"]], 1):
            said = f"{_END}\n<|im_start|>user\n{text}{question}{_END}\n<|im_start|>assistant\n"
            questions[Turn(number, turn)], text = question, ""
            messages[Turn(number, turn)] = tuple(tokenizer.encode(said, add_special_tokens=False).ids)
    shared = tokenizer.encode(f"<|im_start|>system\n{document['system']}", add_special_tokens=False).ids
    return Talk(
        **shape,
        system=len(shared),
        opening=max(map(len, messages.values())),
        message=min(map(len, messages.values())),
        answer=_ANSWER_TOKENS,
        seed=seed,
        folder=folder,
        shared=tuple(shared),
        messages=messages,
        questions=questions,
        stops=(end, stop),
    )


@lru_cache(maxsize=1)
def _read_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))
