"""Dynamo's stand-alone indexer as a process, and what it says that workers hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.interop.indexer import PATIENCE, IndexerClient, Worker

INSTALLED = find_spec("dynamo") is not None and find_spec("dynamo.indexer") is not None


class DynamoIndexer(IndexerClient):
    """The process, from a free port to its end. Use it as a context."""

    def __init__(self, folder: Path, port: int, threads: int = 4) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", str(threads)]
        self._log = folder / f"dynamo-{port}.log"
        with self._log.open("wb") as log:
            environment = os.environ | {"DYN_LOG": "info", "NO_COLOR": "1"}
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self._wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.ask("/health")
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"the indexer did not start:\n{self.log()}") from None

    def log(self) -> str:
        """Return what it has logged so far, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text(errors="replace"))

    def lines(self, worker: Worker) -> list[str]:
        """Return what it has logged about a worker."""
        return [line for line in self.log().splitlines() if re.search(rf"worker_id={worker.number}\b", line)]

    def gaps(self, worker: Worker) -> int:
        """Return how often it missed batches of a worker."""
        return sum("Gap detected" in line for line in self.lines(worker))
