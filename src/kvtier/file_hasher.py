"""A program that prints the SHA-256 of standard input, at low priority.

`digests` runs it by its path, as a process of its own. A thread in the engine's process would take the GIL
from the engine again and again. At low priority on a busy machine, that thread would even hold the GIL for
milliseconds without running. The program ends when its parent process is gone. It imports only the standard
library, so that it starts at once.
"""

from __future__ import annotations

import os
import sys
from hashlib import sha256

_NICENESS = 10  # a tenth of a core when all cores are busy; at 19 a large model would then take hours
_BUFFER = 4 << 20


def main(parent: int) -> None:
    """Print the digest of standard input, in hex, unless the process `parent` ends first."""
    os.nice(_NICENESS)
    digest, buffer = sha256(), memoryview(bytearray(_BUFFER))
    while length := os.readv(0, [buffer]):
        digest.update(buffer[:length])
        if os.getppid() != parent:
            sys.exit(1)
    print(digest.hexdigest())


if __name__ == "__main__":
    main(int(sys.argv[1]))
