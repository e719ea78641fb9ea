"""`Watcher`: sees the progress of a demo."""

from __future__ import annotations

from typing import Protocol

from kvtier.demo.result import RequestResult, RunResult

__all__ = ["Watcher"]


class Watcher(Protocol):
    """Calls come on the thread that runs the demo."""

    def note(self, text: str) -> None:
        """Say something worth knowing."""
        ...

    def begin(self, run: str, requests: int) -> None:
        """Tell that a run begins: `off`, `on` or one over a disk, `computed`, `pool` or `disk`."""
        ...

    def advance(self, run: str, request: RequestResult) -> None:
        """Tell that a request of it has finished."""
        ...

    def end(self, run: str, result: RunResult) -> None:
        """Tell that it is over."""
        ...
