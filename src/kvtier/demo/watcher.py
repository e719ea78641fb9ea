"""`Watcher`: the observer of a demo's progress."""

from __future__ import annotations

from typing import Protocol

from kvtier.demo.result import RequestResult, RunResult

__all__ = ["Watcher"]


class Watcher(Protocol):
    """An observer of a demo's progress. The thread that runs the demo calls it."""

    def note(self, text: str) -> None:
        """Take a remark for the user."""
        ...

    def begin(self, run: str, requests: int) -> None:
        """Note that a run begins: `off`, `on` or, over a disk, `computed`, `pool` or `disk`."""
        ...

    def advance(self, run: str, request: RequestResult) -> None:
        """Note that a request of a run has finished."""
        ...

    def end(self, run: str, result: RunResult) -> None:
        """Note that a run is over."""
        ...
