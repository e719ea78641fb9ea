"""The `kvtier` command.

    0   done; also if Ctrl-C ends a command that runs until it is stopped
    1   the world or kvtier failed: tokens differ, not enough memory, output cannot be written, a check found
        our own bug
    2   the command line or a file is wrong: one line on stderr says how; nothing was started or is left
        behind
  130   interrupted

Errors are one line without a traceback; `--debug` shows it. If the reader of our output goes away
(`| head`), the command ends silently. Only this module is imported before Ctrl-C is handled, so it imports
little; commands import what they need when they run, so that `kvtier doctor` and `kvtier --version` work
without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvtier.cli.streams import INTERRUPTED, discard_output, end_at_once, flush_output, open_streams, remark
from kvtier.errors import InputError, IntegrityError, KVTierError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code.

    Without `arguments` it runs the command line of the process, and takes over its Ctrl-C and output
    streams.
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
    if isinstance(error, OSError) and error.filename is None:  # streams have no name
        return f"output cannot be written: {error.strerror}"
    return str(error)


def _fail(message: str, code: int) -> int:
    """Print the problem in one line, after all output so far."""
    flush_output()
    remark(" ".join(f"kvtier: {message}".split()))
    return code
