"""A program that demotes rows to a disk and is killed at one of its writes.

`kill_child.py FOLDER FIRST LAST OFFSET`. The rows lie OFFSET bytes behind the start of a page: direct I/O
writes aligned rows of adjacent slots at once, and other rows one by one.

For each number from FIRST on, a fork works in FOLDER/NUMBER and is killed with SIGKILL before its
NUMBER-th write, wherever that is: header, emptied record, row, description, record. What it was told to be
done stands in FOLDER/NUMBER/log. It ends early when a fork comes to its own end: then there are no more
writes.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np

from kvtier.keys import make_offload_key
from kvtier.testing.faulty_backend import KillPoint
from kvtier.tiers.base import Direction, RowBuffer, RowJob
from kvtier.tiers.disk import DiskConfig, DiskTier, files

ROW_BYTES = 8192
JOBS, ROWS_PER_JOB, SLOTS = 8, 3, 6


def row_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * (ROW_BYTES // 4)


def open_tier(folder: Path) -> DiskTier:
    config = DiskConfig(path=str(folder), capacity=SLOTS * (ROW_BYTES + 128 + 576) + 20480, write_limit=0)
    tier = DiskTier(config, row_bytes=ROW_BYTES, namespace=lambda: "kill", threads=2)
    assert tier.wait_open()
    assert tier.stats().capacity == SLOTS
    return tier


def work(folder: Path, offset: int) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    tier = open_tier(folder)
    rows = b"".join(row_of(number) for number in range(JOBS * ROWS_PER_JOB))
    memory = memoryview(mmap.mmap(-1, offset + len(rows)))[offset:]
    memory[:] = rows
    tier.set_buffer(RowBuffer(memory, ROW_BYTES))
    for job in range(JOBS):
        numbers = range(job * ROWS_PER_JOB, (job + 1) * ROWS_PER_JOB)
        keys = [make_offload_key(b"%032d" % number, 0) for number in numbers]
        os.write(log, b"begin %d\n" % job)
        slots, deadline = np.array(numbers), time.monotonic() + 60
        tier.demote(
            RowJob(
                job, Direction.DEMOTE, keys, slots, deadline, lambda at, slots=slots: b"about %d" % slots[at]
            )
        )
        left = len(keys)
        while left:
            tier.wait_any(1)
            for result in tier.poll():
                left -= len(result.keys)
                if result.outcome is None:
                    for key in result.keys:
                        os.write(log, b"done %s\n" % key[:32])
        if job == JOBS // 2:
            tier.touch(keys[:1])
            tier._save_at = 0.0
            tier.poll()
    tier.close()


def main(folder: Path, first: int, last: int, offset: int) -> None:
    for number in range(first, last + 1):
        place = folder / str(number)
        place.mkdir()
        if (child := os.fork()) == 0:
            files._on_write_step = KillPoint(number)
            work(place, offset)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            print(number)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
