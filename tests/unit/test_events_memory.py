"""Where the C form of publishing keeps what it keeps: in stretches of slabs that go back, fed by a thread that nobody notices."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from typing import Any

import pytest

_events = pytest.importorskip("kvtier._events", reason="kvtier._events was not compiled here")


def sealed(data: bytes) -> Any:
    message = _events.Message()
    message.append(data)
    message.seal(b"<", b">")
    return message


def test_messages_of_all_sizes_keep_their_bytes() -> None:
    source = random.Random(1)
    kept: dict[int, tuple[Any, bytes]] = {}
    sizes = [
        0,
        1,
        4095,
        4096,
        32_000,
        32_768,
        65_000,
        98_304,
        131_008,
        131_072,
        300_000,
        2_093_000,
        2_097_152,
        3_000_000,
    ]
    for number in range(1_500):
        data = source.randbytes(source.choice(sizes) + source.randrange(3))
        kept[number] = sealed(data), data
        while len(kept) > source.randrange(5, 60):
            message, data = kept.pop(source.choice(list(kept)))
            assert bytes(message.payload()) == b"<" + data + b">"
    assert all(bytes(message.payload()) == b"<" + data + b">" for message, data in kept.values())


def test_tables_and_messages_do_not_get_in_each_others_way() -> None:
    source = random.Random(2)
    tables: list[tuple[Any, list[int]]] = []
    messages = [(sealed(data), data) for data in (source.randbytes(100_000) for _ in range(30))]
    for number in range(1, 9):
        hashes = [source.getrandbits(64) for _ in range(50_000 if number % 2 else 200_000)]
        table = _events.Blocks()
        assert table.hold(hashes, number) is not None
        tables.append((table, hashes))
        del messages[number::9]
        if number % 3 == 0:
            tables.pop(0)
    for number, (table, hashes) in enumerate(tables, 9 - len(tables)):
        assert table.count(hashes, number) == len(table) == len(hashes)
    assert all(bytes(message.payload()) == b"<" + data + b">" for message, data in messages)


def test_tables_with_parts_of_all_sizes_find_what_they_hold() -> None:
    """From parts that are too small for a slab to some that are too large: 512 of 280 kB."""
    table, source = _events.Blocks(), random.Random(3)
    for number in range(1, 61):
        hashes = [source.getrandbits(64) for _ in range(100_000)]
        assert table.hold(hashes, number) is not None
        assert table.count(hashes[:1_000], number) == 1_000
    source = random.Random(3)
    assert table.count([source.getrandbits(64) for _ in range(100_000)], 1) == 100_000
    assert len(table) == 6_000_000


# -- in a process of its own: what the system sees of it --------------------------------------------------------------------

TOOLS = """
import os, sys, threading, time
from pathlib import Path
from kvtier import _events

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

def threads():
    return {int(task) for task in os.listdir("/proc/self/task")}

def sealed(size):
    message = _events.Message()
    message.append(bytes(size))
    message.seal(b"", b"")
    return message
"""


def run(script: str) -> list[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", TOOLS + script]  # of forks with a thread
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_what_is_given_back_goes_back_to_the_system() -> None:
    before, held, after = map(
        int,
        run(
            """
sealed(100_000)
print(resident())
messages = [sealed(100_000) for _ in range(1_000)]
print(resident())
del messages
print(resident())
"""
        ),
    )
    assert 95 <= held - before <= 95 + 12
    assert after - before <= 6  # a slab that has room, the next one, and what the system rounds up


def test_holes_are_filled_before_there_is_more() -> None:
    held, again = map(
        int,
        run(
            """
messages = [sealed(100_000) for _ in range(1_000)]
print(resident())
del messages[::2]
messages += [sealed(100_000) for _ in range(500)]
print(resident())
"""
        ),
    )
    assert abs(again - held) <= 4


@pytest.mark.parametrize("large", [50_000, 130_000, 250_000, 1_100_000, 1_900_000])
def test_what_comes_and_goes_leaves_room_for_others(large: int) -> None:
    """Small messages stay, large ones go after a while, as in a ring."""
    (more,) = run(
        f"""
from collections import deque
ring, kept = deque(), []
sealed({large})
before = resident()
for _ in range(1_500):
    kept.append(sealed(40_000))
    ring.append(sealed({large}))
    if len(ring) > 20:
        ring.popleft()
print(resident() - before)
"""
    )
    in_use = (1_500 * 40_000 + 20 * large) >> 20
    assert int(more) < 1.4 * in_use + 6


def test_little_needs_no_thread_and_much_needs_one() -> None:
    few, many, more = run(
        """
alone = threads()
message = sealed(100_000)
print(len(threads() - alone))
messages = [sealed(100_000) for _ in range(100)]
print(len(threads() - alone))
messages += [sealed(100_000) for _ in range(100)]
print(len(threads() - alone))
"""
    )
    assert (few, many, more) == ("0", "1", "1")


def test_the_thread_takes_no_signals_and_no_time_from_others() -> None:
    masks, nice, own = run(
        """
alone = threads()
messages = [sealed(100_000) for _ in range(100)]
(thread,) = threads() - alone
status = Path(f"/proc/self/task/{thread}/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")))
until = time.monotonic() + 10
while os.getpriority(os.PRIO_PROCESS, thread) == os.getpriority(os.PRIO_PROCESS, 0) and time.monotonic() < until:
    time.sleep(0.001)  # it says so itself
print(os.getpriority(os.PRIO_PROCESS, thread))
print(os.getpriority(os.PRIO_PROCESS, 0))
"""
    )
    blockable = {int(each) for each in signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}
    assert all(int(masks, 16) >> (number - 1) & 1 for number in blockable)
    assert int(nice) == max(10, int(own))


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    lines = run(
        """
messages = [sealed(100_000) for _ in range(100)]
sys.stdout.flush()
child = os.fork()
if child == 0:
    alone = threads()
    more = [sealed(90_000) for _ in range(100)]
    assert all(bytes(each.payload()) == bytes(100_000) for each in messages)
    del messages
    print(len(alone), len(threads()))
    sys.stdout.flush()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert lines == ["1", "2", "0"]


def test_without_memory_for_more_it_is_told_and_nothing_is_lost() -> None:
    assert run(
        """
import resource
messages = [sealed(100_000) for _ in range(100)]
size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (size + (24 << 20), resource.RLIM_INFINITY))
try:
    while True:
        messages.append(sealed(100_000))
except MemoryError:
    print("told", len(messages) > 200)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert all(bytes(each.payload()) == bytes(100_000) for each in messages)
del messages[50:]
messages += [sealed(100_000) for _ in range(50)]
print(len(messages))
"""
    ) == ["told", "True", "100"]
