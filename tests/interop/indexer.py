"""A client of an indexer's HTTP interface, as Dynamo defines it. It knows nothing of who answers."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.interop.traffic import Block

PATIENCE = 60.0
_MEDIUM = {"device": "GPU", "host_pinned": "CPU", "disk": "STORAGE"}


class Worker(NamedTuple):
    """One publisher as the indexer knows it."""

    number: int
    model: str


class IndexerClient:
    """Asks one indexer. Every worker has a model of its own."""

    def __init__(self, url: str, dumps_parents: bool = True) -> None:
        self._url = url
        self._dumps_parents = dumps_parents
        self._numbers = itertools.count(1)

    def register(self, endpoint: str, replay_endpoint: str | None, block_size: int) -> Worker:
        """Let it follow a publisher. The indexer connects on its own time."""
        number = next(self._numbers)
        worker = Worker(number, f"model-{number}")
        body = {
            "instance_id": worker.number,
            "model_name": worker.model,
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint,
            "block_size": block_size,
            "dp_rank": 0,
        }
        self.ask("/register", body)
        return worker

    def unregister(self, worker: Worker) -> None:
        """Let it forget a publisher."""
        self.ask("/unregister", {"instance_id": worker.number, "model_name": worker.model})

    def held(self, worker: Worker) -> set[Block]:
        """Return what it believes that the worker holds."""
        dump = self.ask("/dump").get(f"{worker.model}:default", {"events": []})
        return {block for entry in dump["events"] for block in _blocks_of(entry)}

    def query(self, worker: Worker, tokens: Sequence[int]) -> dict[str, int]:
        """Return how many tokens of a prompt the worker holds: in all, and on each tier or one above it."""
        answer = self.ask("/query", {"model_name": worker.model, "token_ids": list(tokens)})
        instance = answer["instances"].get(str(worker.number), {})
        return {name: instance.get(name, 0) for name in ("longest_matched", "gpu", "cpu", "disk")}

    def wait_until_holds(self, worker: Worker, truth: Collection[Block]) -> None:
        """Ask until its replica is the truth; fail with the difference when that takes too long."""
        wanted, deadline = set(map(self._as_dumped, truth)), time.monotonic() + PATIENCE
        while (held := set(map(self._as_dumped, self.held(worker)))) != wanted:
            if time.monotonic() > deadline:
                missing, extra = wanted - held, held - wanted
                raise AssertionError(
                    f"of {len(wanted)} blocks {len(missing)} are missing, {len(extra)} too many: "
                    f"{sorted(missing)[:3]} … {sorted(extra)[:3]} …"
                )

    def _as_dumped(self, block: Block) -> Block:
        return block if self._dumps_parents else block._replace(parent=0)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return the answer's JSON."""
        data = None if body is None else json.dumps(body).encode()
        with urlopen(
            Request(self._url + path, data, {"content-type": "application/json"}), timeout=PATIENCE
        ) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def status(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> int:
        """Send a request and return the answer's status."""
        try:
            with urlopen(
                Request(self._url + path, json.dumps(body).encode(), headers), timeout=PATIENCE
            ) as reply:
                return int(reply.status)
        except HTTPError as error:
            return error.code


def _blocks_of(entry: dict[str, Any]) -> list[Block]:
    """Return the blocks that an entry of the dump stores, each with its parent."""
    stored = entry["event"]["data"]["stored"]
    hashes = [block["block_hash"] for block in stored["blocks"]]
    parents = [stored["parent_hash"], *hashes]
    return [
        Block(_MEDIUM[entry["storage_tier"]], block, parents[at] or 0) for at, block in enumerate(hashes)
    ]
