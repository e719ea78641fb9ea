"""An HTTP client of a server with OpenAI's API, as vLLM has it: whole answers, and streamed ones with times.

It opens a connection for each request. Every call ends by the deadline it is given, whatever the server
sends, or by `abort`, with an error of one line that names the server. Answers are read by their types below:
one that does not fit is an error that says what was expected and what came. Any thread may call it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from itertools import pairwise
from threading import Lock
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvtier.cli.http import BoundedConnection
from kvtier.cli.scrape import describe_failure
from kvtier.errors import InputError, OutsideError, show_text, show_value

_LONGEST_ANSWER = 16 << 20
_SHOWN = 300
"""Characters of a server's message that an error repeats."""

_Answer = TypeVar("_Answer")
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class _Model(Struct):
    id: Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]+\Z")]
    max_model_len: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None


class _Models(Struct):
    data: list[_Model]


class _Details(Struct):
    cached_tokens: _Count | None = None


class _Usage(Struct):
    prompt_tokens: _Count
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Completion(Struct):
    usage: _Usage


class _Reset(Struct):
    success: Any = None


class _Delta(Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None


class _Choice(Struct):
    text: str | UnsetType | None = UNSET
    delta: _Delta | None = None

    @property
    def piece(self) -> str | None:
        """The text of a chunk, which may be empty; `None` for a chunk that only opens a chat's answer."""
        if self.text is not UNSET:
            return self.text or ""
        delta = self.delta or _Delta()
        text = (delta.reasoning or "") + (delta.content or "")
        return text if text or delta.role is None else None


class _Event(Struct):
    error: Any = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


class TimeOver(OutsideError):
    """The deadline has passed before an answer was complete."""


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A streamed answer. Times are in seconds from when the request was sent."""

    text: str
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int | None
    """The prompt tokens that were not computed, if the server tells (`--enable-prompt-tokens-details`)."""
    first: float
    """The time of the first token."""
    gaps: tuple[float, ...]
    """The times between two tokens. A server that sends several at once counts with their mean."""
    seconds: float


class Server:
    """A server at `url`, which is the address without `/v1`. `token` is a bearer token, if it wants one."""

    def __init__(
        self, url: str, token: str | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.url, self._clock = url, clock
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        self._headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        self._lock = Lock()
        self._open: set[BoundedConnection] = set()
        self._is_aborted = False

    def abort(self) -> None:
        """End all running requests, and every later one, with an error in the threads that wait for them."""
        with self._lock:
            self._is_aborted = True
            for connection in self._open:
                connection.abort()

    def models(self, deadline: float) -> dict[str, int | None]:
        """Return the names of the models and the longest prompt of each, if the server tells it."""
        models = self._ask("GET", "/v1/models", None, _Models, "a list of models", deadline)
        return {model.id: model.max_model_len for model in models.data}

    def complete(self, path: str, body: dict[str, Any], deadline: float) -> int:
        """Send a request, wait for its whole answer, and return the tokens of its prompt."""
        expected = "an answer with usage.prompt_tokens"
        return self._ask("POST", path, body, _Completion, expected, deadline).usage.prompt_tokens

    def reset_prefix_cache(self, deadline: float) -> bool:
        """Empty the engine's own prefix cache; return `False` if the server cannot do that."""
        path = "/reset_prefix_cache"
        try:
            return self._ask("POST", path, {}, _Reset, "a JSON object", deadline).success is True
        except InputError:  # the route exists only with VLLM_SERVER_DEV_MODE=1
            return False

    def stream(self, path: str, body: dict[str, Any], deadline: float) -> StreamedAnswer:
        """Send a request and read its answer as it comes."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        start = self._clock()
        texts: list[str] = []
        times: list[float] = []
        usage = _Usage(prompt_tokens=0)
        with self._answer("POST", path, body, deadline) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise OutsideError(
                    f"{self.url}: expected a streamed answer (text/event-stream), got {show_text(kind)}"
                )
            for now, event in self._events(f"{self.url}{path}", response):
                if event.error is not None:
                    raise OutsideError(f"{self.url}: the answer is an error: {_message(event.error)}")
                for choice in event.choices or ():
                    if (piece := choice.piece) is not None:
                        texts.append(piece)
                        times.append(now - start)
                usage = event.usage or usage
        if not times:
            raise OutsideError(f"{self.url}: the answer ended without a token")
        tokens = usage.completion_tokens or len(times)
        scale = (len(times) - 1) / (tokens - 1) if tokens > 1 else 1.0
        return StreamedAnswer(
            text="".join(texts),
            prompt_tokens=usage.prompt_tokens,
            answer_tokens=tokens,
            cached_tokens=(usage.prompt_tokens_details or _Details()).cached_tokens,
            first=times[0],
            gaps=tuple((after - before) * scale for before, after in pairwise(times)),
            seconds=times[-1],
        )

    def _events(self, address: str, response: HTTPResponse) -> Iterator[tuple[float, _Event]]:
        """Yield each event up to the last, and when it came."""
        size = 0
        while line := response.readline(_LONGEST_ANSWER):
            size += len(line)
            if size > _LONGEST_ANSWER:
                raise OutsideError(f"{address}: the answer is longer than {_LONGEST_ANSWER >> 20} MiB")
            if not line.startswith(b"data:"):
                continue
            now, data = self._clock(), line[5:].strip()
            if data == b"[DONE]":
                return
            yield now, _read(address, data, _Event, "events of a streamed answer")
        raise OutsideError(f"{self.url}: the answer broke off before its end")

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        kind: type[_Answer],
        expected: str,
        deadline: float,
    ) -> _Answer:
        """Send a request and return its whole answer."""
        with self._answer(method, path, body, deadline) as response:
            return _read(f"{self.url}{path}", response.read(_LONGEST_ANSWER), kind, expected)

    @contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, deadline: float
    ) -> Iterator[HTTPResponse]:
        """Send a request and yield the response, if its status says that all is well."""
        remaining = deadline - self._clock()
        if remaining <= 0:
            raise TimeOver(f"{self.url}: no time is left")
        data = None if body is None else json.dumps(body).encode()
        connection = None
        try:
            connection = BoundedConnection(self.url, remaining)
            with self._lock:
                self._open.add(connection)
                if self._is_aborted:
                    raise OutsideError(f"{self.url}: aborted")
            response = connection.request(method, urlsplit(self.url).path + path, data, self._headers)
            if response.status != 200:
                raise _refusal(f"{self.url}{path}", response)
            yield response
        except TimeoutError:
            raise TimeOver(f"{self.url}{path}: no complete answer in time") from None
        except ConnectionRefusedError:
            raise OutsideError(f"{self.url}: no server answers there (connection refused)") from None
        except (OSError, HTTPException, UnicodeError) as error:
            raise OutsideError(f"{self.url}: the request failed: {describe_failure(error)}") from None
        finally:
            if connection is not None:
                with self._lock:
                    self._open.discard(connection)
                connection.close()


def _read(address: str, data: bytes, kind: type[_Answer], expected: str) -> _Answer:
    """Read JSON of a server. Nothing that it sends may be trusted."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        shown, problem = show_value(data[:_SHOWN]), show_text(str(error))
        raise OutsideError(f"{address}: expected {expected}, got {shown} ({problem})") from None


def _refusal(address: str, response: HTTPResponse) -> Exception:
    """Return the error of a status other than 200: the caller's fault, or the server's."""
    data = response.read(1 << 16)
    try:
        message = _message(msgspec.json.decode(data))
    except (ValueError, RecursionError):
        message = show_text(data.decode(errors="replace") or response.reason)[:_SHOWN]
    if response.status == 401:
        return InputError(f"{address}: the server expects a token ({message}): give one with --token-file")
    kind = InputError if 400 <= response.status < 500 else OutsideError
    return kind(f"{address}: the server answered {response.status}: {message}")


def _message(answer: Any) -> str:
    """Return the message in an error of OpenAI's API, or all of it."""
    for name in ("error", "message"):
        answer = answer.get(name, answer) if isinstance(answer, dict) else answer
    return (show_text(answer) if isinstance(answer, str) else show_value(answer))[:_SHOWN]
