"""kvtier's messages in vLLM's log, in the processes of the scheduler and of the workers.

vLLM gives handlers to loggers below `vllm` only. Messages of kvtier's own modules, which log below `kvtier`,
go to the same handlers, with vLLM's level and format. The root logger is left alone. So are users who
configure logging themselves: those who tell vLLM so, and those who have given the logger `kvtier` a handler
or cut it off (`propagate`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config.logging import LoggingConfig

__all__ = ["show_messages"]

_OURS, _VLLM = logging.getLogger("kvtier"), logging.getLogger("vllm")


class _ToVllm(logging.Handler):
    """Passes messages to the handlers that vLLM's logger has then: vLLM replaces them at each start."""

    def emit(self, record: logging.LogRecord) -> None:
        _VLLM.handle(record)


def show_messages(config: LoggingConfig) -> None:
    """Show kvtier's messages as vLLM shows its own, unless the user configures logging. Idempotent."""
    if not config.configure_logging or config.pylogging_config_file:
        return
    if _OURS.handlers or not _OURS.propagate:
        return
    _OURS.addHandler(_ToVllm())
    _OURS.propagate = False  # a handler of the root logger would show messages a second time
    if _OURS.level == logging.NOTSET:
        _OURS.setLevel(_VLLM.getEffectiveLevel())
