"""An HTTP client of a server with OpenAI's API, as vLLM has it: whole answers, and streamed ones with times.

It opens a connection for each request. Every call ends by the deadline it is given, or by `abort`, with an
error of one line that names the server. Any thread may call it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import pairwise
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from kvtier.errors import InputError, OutsideError, show_value

_LONGEST_LINE = 16 << 20
_SHOWN = 300
"""Characters of a server's message that an error repeats."""


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
        self._parts = urlsplit(url)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        self._headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        self._lock = Lock()
        self._open: set[socket.socket] = set()
        self._is_aborted = False

    def abort(self) -> None:
        """End all running requests, and every later one, with an error in the threads that wait for them."""
        with self._lock:
            self._is_aborted = True
            for sock in self._open:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def models(self, deadline: float) -> dict[str, int | None]:
        """Return the names of the models and the longest prompt of each, if the server tells it."""
        with self._answer("GET", "/v1/models", None, deadline) as (response, _):
            found = _read_object(self.url, response.read(_LONGEST_LINE))
        try:
            return {str(model["id"]): model.get("max_model_len") for model in found["data"]}
        except (KeyError, TypeError, AttributeError):
            raise OutsideError(f"{self.url}: expected a list of models at /v1/models, got none") from None

    def complete(self, path: str, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Send a request and return its whole answer."""
        with self._answer("POST", path, body, deadline) as (response, _):
            return _read_object(self.url, response.read(_LONGEST_LINE))

    def reset_prefix_cache(self, deadline: float) -> bool:
        """Empty the engine's own prefix cache; return `False` if the server cannot do that."""
        try:
            answer = self.complete("/reset_prefix_cache", {}, deadline)
        except InputError:  # the route exists only with VLLM_SERVER_DEV_MODE=1
            return False
        return answer.get("success") is True

    def stream(self, path: str, body: dict[str, Any], deadline: float) -> StreamedAnswer:
        """Send a request and read its answer as it comes."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        start = self._clock()
        texts: list[str] = []
        times: list[float] = []
        usage: dict[str, Any] = {}
        with self._answer("POST", path, body, deadline) as (response, sock):
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise OutsideError(f"{self.url}: expected a streamed answer (text/event-stream), got {kind}")
            for now, event in self._events(response, sock, deadline):
                if "error" in event:
                    raise OutsideError(f"{self.url}: the answer is an error: {_message(event)}")
                for choice in event.get("choices") or ():
                    piece = _piece_of(choice)
                    if piece is not None:
                        texts.append(piece)
                        times.append(now - start)
                usage = event.get("usage") or usage
        if not times:
            raise OutsideError(f"{self.url}: the answer ended without a token")
        tokens = int(usage.get("completion_tokens") or len(times))
        scale = (len(times) - 1) / (tokens - 1) if tokens > 1 else 1.0
        return StreamedAnswer(
            text="".join(texts),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            answer_tokens=tokens,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            first=times[0],
            gaps=tuple((after - before) * scale for before, after in pairwise(times)),
            seconds=times[-1],
        )

    def _events(
        self, response: HTTPResponse, sock: socket.socket, deadline: float
    ) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield the JSON of each event up to the last, and when it came."""
        while line := response.readline(_LONGEST_LINE):
            if not line.startswith(b"data:"):
                continue
            now = self._clock()
            if now >= deadline:
                raise TimeoutError
            sock.settimeout(deadline - now)
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield now, _read_object(self.url, data)
        raise OutsideError(f"{self.url}: the answer broke off before its end")

    @contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, deadline: float
    ) -> Iterator[tuple[HTTPResponse, socket.socket]]:
        """Send a request and yield the response, if its status says that all is well, and its socket."""
        remaining = deadline - self._clock()
        if remaining <= 0:
            raise TimeOver(f"{self.url}: no time is left")
        make = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = make(self._parts.hostname or "", self._parts.port, timeout=remaining)
        data = None if body is None else json.dumps(body).encode()
        sock = response = None
        try:
            connection.connect()
            sock = connection.sock
            with self._lock:
                self._open.add(sock)
                if self._is_aborted:
                    raise OutsideError(f"{self.url}: aborted")
            connection.request(method, self._parts.path + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(f"{self.url}{path}", response)
            yield response, sock
        except TimeoutError:
            raise TimeOver(f"{self.url}: no answer in time") from None
        except ConnectionRefusedError:
            raise OutsideError(f"{self.url}: no server answers there (connection refused)") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise OutsideError(f"{self.url}: the request failed: {reason}") from None
        finally:
            with self._lock:
                self._open.discard(sock)
            for one in (response, connection):
                if one is not None:
                    one.close()


def _piece_of(choice: dict[str, Any]) -> str | None:
    """Return the text of a chunk, which may be empty; `None` for a chunk that only opens a chat's answer."""
    if "text" in choice:
        return str(choice["text"] or "")
    delta = choice.get("delta") or {}
    text = str(delta.get("reasoning") or "") + str(delta.get("content") or "")
    return text if text or "role" not in delta else None


def _refusal(address: str, response: HTTPResponse) -> Exception:
    """Return the error of a status other than 200: the caller's fault, or the server's."""
    data = response.read(1 << 16)
    try:
        message = _message(json.loads(data))
    except ValueError:
        message = data.decode(errors="replace")[:_SHOWN] or response.reason
    if response.status == 401:
        return InputError(f"{address}: the server expects a token ({message}): give one with --token-file")
    kind = InputError if 400 <= response.status < 500 else OutsideError
    return kind(f"{address}: the server answered {response.status}: {message}")


def _message(answer: Any) -> str:
    """Return the message in an error of OpenAI's API, or all of it."""
    for name in ("error", "message"):
        answer = answer.get(name, answer) if isinstance(answer, dict) else answer
    return " ".join(str(answer).split())[:_SHOWN]


def _read_object(url: str, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    raise OutsideError(f"{url}: expected a JSON object in the answer, got {show_value(data)}")
