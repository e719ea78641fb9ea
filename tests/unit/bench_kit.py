"""A small server with OpenAI's API and vLLM's metrics, which pretends to have kvtier, for tests of the
bench.

It keeps no KV. It counts where a prompt would have come from: a prompt that may be loaded and was sent
before comes from kvtier, all others are computed. Its time is a clock that moves only when it says so.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CAPACITY = 96
PATIENCE = 30.0


class Clock:
    """A clock that the server moves, once its client has looked at it."""

    def __init__(self) -> None:
        self._now, self._reads = 100.0, 0
        self._changed = threading.Condition()

    def __call__(self) -> float:
        with self._changed:
            self._reads += 1
            self._changed.notify_all()
            return self._now

    def reads(self) -> int:
        """Return how often the clock was read."""
        return self._reads

    def advance(self, seconds: float, reads: int = 0) -> None:
        """Move on, as soon as the clock was read more often than so."""
        with self._changed:
            assert self._changed.wait_for(lambda: reads == 0 or self._reads > reads, PATIENCE)
            self._now += seconds


class FakeServer:
    """What the server does and has seen. Tests change the attributes."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.sources: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.stored: set[str] = set()
        self.models: Any = {"data": [{"id": "tiny", "max_model_len": 64}]}
        self.metrics = True
        self.kvtier = True
        self.reset: bool | None = None
        self.first = {"local_compute": 2.0, "external_kv_transfer": 0.5}
        self.answer: Callable[[str, str], str] = lambda prompt, source: "so it is "
        self.before_stream: Callable[[int], None] = lambda number: None
        self.stream_lines: list[str] | None = None
        """Sent in place of the answer's events, if not `None`."""
        self.answered: str | None = None
        """Sent in place of each whole answer, if not `None`."""
        self.more_metrics = ""
        self.status: int | None = None
        self.refusal = '{"error": {"message": "No room,\\nsorry."}}'

    @property
    def streamed(self) -> list[dict[str, Any]]:
        """The bodies of the streamed requests."""
        return [body for _, body in self.requests if body.get("stream")]

    def metrics_text(self) -> str:
        lines = [
            f'vllm:prompt_tokens_by_source_total{{source="{one}"}} {self.sources[one]}' for one in SOURCES
        ]
        lines += [f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{CAPACITY // 16}"}} 1']
        lines += [self.more_metrics]
        if self.kvtier:
            lines += ["vllm:kvtier_loads_total 0"]
            lines += [f'vllm:kvtier_misses_total{{reason="{one}"}} {n}' for one, n in self.misses.items()]
        return "\n".join(lines) + "\n"

    def take(self, body: dict[str, Any]) -> tuple[str, int, str]:
        """Count a request; return its prompt, the length of that, and where it came from."""
        prompt = body.get("prompt") or json.dumps(body["messages"])
        params = body.get("kv_transfer_params", {})
        length = len(prompt.split())
        loads = prompt in self.stored and "cache_salt" not in body and params.get("max_load_tokens") != 0
        source = "external_kv_transfer" if loads else "local_compute"
        if params.get("max_offload_tokens") != 0 and "cache_salt" not in body:
            self.stored.add(prompt)
        self.sources[source] += length
        return prompt, length, source


@contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    """Serve at a free port, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics" and fake.metrics:
                self._reply(200, fake.metrics_text().encode(), "text/plain")
            elif self.path == "/v1/models" and fake.models is not None:
                text = fake.models if isinstance(fake.models, str) else json.dumps(fake.models)
                self._reply(200, text.encode())
            else:
                self._reply(404, b'{"detail": "Not Found"}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/reset_prefix_cache":
                found = json.dumps({"success": fake.reset}).encode()
                self._reply(404 if fake.reset is None else 200, found)
                return
            fake.requests.append((self.path, body))
            if fake.status is not None:
                self._reply(fake.status, fake.refusal.encode())
                return
            prompt, length, source = fake.take(body)
            if length + body["max_tokens"] > 64:
                self._reply(400, b'{"error": {"message": "This model takes 64 tokens."}}')
            elif body.get("stream"):
                self._stream(prompt, length, source, body)
            else:
                usage = json.dumps({"usage": {"prompt_tokens": length}})
                self._reply(200, (usage if fake.answered is None else fake.answered).encode())

        def _stream(self, prompt: str, length: int, source: str, body: dict[str, Any]) -> None:
            fake.before_stream(len(fake.streamed))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            if fake.stream_lines is not None:
                self.wfile.write("".join(f"{line}\n\n" for line in fake.stream_lines).encode())
                return
            reads, delay = 0, fake.first[source]
            is_chat = "messages" in body
            if is_chat:
                self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for piece in [fake.answer(prompt, source)] * body["max_tokens"]:
                if fake.clock is not None:
                    fake.clock.advance(delay, reads)
                    reads, delay = fake.clock.reads(), 0.25
                self._event({"choices": [{"delta": {"content": piece}} if is_chat else {"text": piece}]})
            usage = {"prompt_tokens": length, "completion_tokens": body["max_tokens"]}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

        def _reply(self, status: int, data: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    class QuietServer(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing: clients that go away are part of the tests."""

    server = QuietServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
