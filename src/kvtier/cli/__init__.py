"""The `kvtier` command.

    0   done; commands that run until they are stopped end so with Ctrl-C, too
    1   the world or kvtier failed: tokens differ, memory could not be had, output cannot be written, a check
        found our own bug
    2   what was asked for is wrong: one line on stderr says what, and nothing was started or is left behind
  130   interrupted

Errors are one line without a traceback; `--debug` shows it. A reader of our output that goes away (`| head`)
is told nothing. This module is all that is imported before Ctrl-C has been taken care of, so it imports
little; commands import what they need when they run, so that `kvtier doctor` and `kvtier --version` work
without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvtier.cli.interrupts import INTERRUPTED, end_at_once
from kvtier.cli.streams import discard_output, flush_output, open_streams, remark
from kvtier.errors import InputError, IntegrityError, KVTierError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code.

    Without arguments it is that of the process, whose Ctrl-C and output streams are then taken charge of.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        end_at_once()
        open_streams()
    try:
        from kvtier.cli.app import run

        return run(list(arguments))
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        discard_output()
        return 1
    except (KVTierError, MemoryError, OSError) as error:
        if "--debug" in arguments:
            raise
        return _fail(_explain(error), 2 if isinstance(error, InputError) else 1)


def _explain(error: KVTierError | MemoryError | OSError) -> str:
    if isinstance(error, IntegrityError):
        return f"a bug in kvtier, please report it: {error}"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}"
    if isinstance(error, OSError) and error.filename is None:  # a stream knows no name
        return f"output cannot be written: {error.strerror}"
    return str(error)


def _fail(message: str, code: int) -> int:
    """Say what went wrong in one line, after what was said before."""
    flush_output()
    remark(" ".join(f"kvtier: {message}".split()))
    return code
