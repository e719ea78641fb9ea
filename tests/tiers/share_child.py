"""A program: two ranks open one folder at once, again and again. `share_child.py FOLDER TIMES`.

Each time, two forks open FOLDER/NUMBER as data-parallel ranks that were not told how many they are, so that
each may take all of the capacity. Every other time, one of them is killed while it takes its space, and
opens the folder again afterwards. The program prints the largest space that they had together, in
capacities.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from pathlib import Path

from kvtier.tiers.disk import DiskConfig, DiskTier, files
from kvtier.tiers.disk.folder import taken_bytes

CAPACITY = 4 << 20


def kill_half_way(descriptor: int, offset: int, size: int) -> None:
    os.posix_fallocate(descriptor, offset, size // 2)
    if size > CAPACITY // 2:
        os.kill(os.getpid(), signal.SIGKILL)


def work(folder: Path, rank: int) -> None:
    config = DiskConfig(path=str(folder), capacity=CAPACITY)
    tier = DiskTier(config, row_bytes=4096, namespace=lambda: "model", rank=rank, threads=1)
    tier.wait_open()  # the second has no room, and does without
    tier.close()


def main(folder: Path, times: int) -> None:
    most = 0
    for number in range(times):
        start, go = os.pipe()
        children = []
        for rank in range(2):
            if (child := os.fork()) == 0:
                os.read(start, 1)
                if number % 2 and rank == 0:
                    files.os = types.SimpleNamespace(**vars(os) | {"posix_fallocate": kill_half_way})
                work(folder / str(number), rank)
                os._exit(0)
            children.append(child)
        os.write(go, b"go")
        ends = {os.waitpid(child, 0)[1] for child in children}
        os.close(start)
        os.close(go)
        if ends - {0, signal.SIGKILL}:
            sys.exit("a rank failed")
        most = max(most, taken_bytes(folder / str(number)))
        if ends != {0}:
            if (child := os.fork()) == 0:
                work(folder / str(number), 0)
                os._exit(0)
            os.waitpid(child, 0)
            most = max(most, taken_bytes(folder / str(number)))
    print(most / CAPACITY)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
