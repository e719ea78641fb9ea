"""The `kvtier` command, and `python -m kvtier`.

This module imports little, because Ctrl-C can come before the command has begun.
"""

from __future__ import annotations

import sys


def run() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        from kvtier.cli import main
    except KeyboardInterrupt:
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
