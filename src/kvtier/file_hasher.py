"""A program: the SHA-256 of standard input, at low priority.

`digests` runs it by its path, as a process of its own. A thread of an engine's process would have to take
the GIL from the engine again and again; and at low priority, on a busy machine, it would hold it for
milliseconds without running. It ends when the process is gone that it works for. It imports the standard
library alone, so that it starts at once.
"""

from __future__ import annotations

import os
import sys
from hashlib import sha256

__all__ = ["main"]

_NICENESS = 10  # a tenth of a core where all cores are busy; with 19 a large model would take hours there
_BUFFER = 4 << 20


def main(parent: int) -> None:
    """Print the digest of standard input, in hex, unless `parent` ends before."""
    os.nice(_NICENESS)
    digest, buffer = sha256(), memoryview(bytearray(_BUFFER))
    while length := os.readv(0, [buffer]):
        digest.update(buffer[:length])
        if os.getppid() != parent:
            sys.exit(1)
    print(digest.hexdigest())


if __name__ == "__main__":
    main(int(sys.argv[1]))
