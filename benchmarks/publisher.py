"""The cost of publishing, beside vLLM's publisher: batches per second, the time of `publish()`, and replay.

Both publish the same batches in one run, in turns, each from this process to a subscriber in another, with
the replay endpoint on. kvtier has everything at its default: set-like filter, state, digest and marks,
which vLLM's publisher lacks. A rate counts from the first `publish()` until the subscriber has the last
batch. Every batch stores blocks of 16 tokens, in a cache that has room; with a *full cache* it also removes
as many, the last of the oldest prompt first, one event each, as vLLM's block pool does. If more than 64
batches wait, as they do here, kvtier joins them into messages of up to 32, and `batches_per_message` gives
the resulting number; vLLM sends one message a batch.

`publish()` is timed in that burst, while the publisher's thread is busy, and at a thousand batches per
second (*paced*), when the thread rests in between. *The machine alone* gives, at the same pace, the time of
a call that does nothing, and of one that writes to an eventfd on which a thread sleeps. Idle round trip: a
replay request without batches to return. A replay that loses its end marker, as vLLM's may if the client is
slow, counts as failed.

*Snapshot*: while kvtier sends the state of a million blocks to a client, a thread of this process sleeps
for a moment and measures how late it gets the interpreter back, as an engine would; and the publisher's
thread measures its CPU time between two rests. The former includes the machine's own noise, which `quiet`
shows: the same thread before the snapshot. *Filling*: the most CPU time of the publisher's thread for one
batch while those blocks come in; it bounds how long a growing table stops all threads. If the machine is a
busy virtual machine, its stops count as CPU time too: `held_ms` leaves out the stretches in which the
kernel took the CPU away from the thread, `held_any_ms` covers all of them. Figures are medians over the
runs. Needs vLLM 0.32 for the comparison (`make bench` builds an environment with it); without it, kvtier is
measured alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import resource
import select
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import zmq
from rich.console import Console
from rich.table import Table

import kvtier.events

GATES = {
    "batches_per_s, 1 block": 1.0,
    "batches_per_s, 64 blocks": 0.4,
    "paced_publish_p50_us": 3.0,
    "paced_publish_p99_us": 20.0,
    "idle_round_trip_ms": 2.0,
    "snapshot_held_ms": 1.0,
    "filling_held_ms": 3.0,
}
"""Rates are lower bounds, as parts of vLLM's; times are upper bounds."""
BLOCK_SIZE, PROMPT_BATCHES = 16, 8
SIZES = {1: 15_000, 64: 5_000}
"""The number of timed batches, by blocks per batch."""
CACHE = {1: 4_096, 64: 65_536}
# More than both buffers of 10,000 batches, so that the steady state is measured, not the start.
WARM_UP = 12_000
PACED, ROUND_TRIPS, RING = 1_000, 10, 10_000
SNAPSHOT_BLOCKS, SNAPSHOT_BATCH = 1_000_000, 16
WAIT_MS, LOST_AFTER_MS = 60_000, 3_000
END = b"\xff" * 8


# -- the subscriber, in its own process ------------------------------------------------------------


def subscribe(endpoint: str, replay_endpoint: str, control: str) -> None:
    """Receive and answer: `live` up to the batch of a given time, `idle` round trips, `replay` of all."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sub, dealer, boss = (context.socket(kind) for kind in (zmq.SUB, zmq.DEALER, zmq.PAIR))
    sub.rcvhwm = dealer.rcvhwm = 0
    sub.subscribe(b"")
    for sock, address in ((sub, endpoint), (dealer, replay_endpoint), (boss, control)):
        sock.connect(address)
    boss.send(b"ready")
    first = None
    while (order := boss.recv_multipart())[0] != b"stop":
        if order[0] == b"live":
            count, seq = receive_until(sub, order[1])
            first, answer = seq if first is None else first, float(count)
        elif order[0] == b"idle":
            answer = statistics.median(
                ask(dealer, (1 << 60).to_bytes(8, "big"))[1] for _ in range(int(order[1]))
            )
        else:
            count, seconds = ask(dealer, order[1] or first or bytes(8))
            answer = count / seconds
        boss.send(repr(answer).encode())
    context.destroy(linger=0)


def receive_until(sub: zmq.Socket[bytes], ts: bytes) -> tuple[int, bytes]:
    """Receive up to the batch of that time; return the number of messages, and the first one's number."""
    recv, count, first = sub.recv, 1, b""
    while True:
        recv()
        seq = recv()
        first = first or seq
        if recv()[2:10] == ts:
            return count, first
        count += 1


def ask(dealer: zmq.Socket[bytes], request: bytes) -> tuple[int, float]:
    """Ask for a replay; return the batches' number and the seconds; infinite if the end marker was lost."""
    begin, count = time.perf_counter(), 0
    dealer.send_multipart((b"", request))
    while dealer.poll(LOST_AFTER_MS):
        if dealer.recv_multipart()[2] == END:
            return count, time.perf_counter() - begin
        count += 1
    return count, math.inf


# -- the published batches -------------------------------------------------------------------------


@lru_cache
def make_batches(module: Any, blocks: int, count: int, room: bool) -> list[Any]:
    """Make the batches of an engine that computes prompts of `PROMPT_BATCHES` batches, with times from 1."""
    source = random.Random(0)
    tokens = [source.randrange(150_000) for _ in range(blocks * BLOCK_SIZE)]
    batches: list[Any] = []
    cached: deque[list[int]] = deque()
    prompt: list[int] = []
    held = 0
    for number in range(count):
        if number % PROMPT_BATCHES == 0:
            prompt = []
            cached.append(prompt)
        hashes = [source.getrandbits(64) for _ in range(blocks)]
        events: list[Any] = []
        while not room and held + blocks > CACHE[blocks]:
            events.append(module.BlockRemoved(block_hashes=[cached[0].pop()], medium="GPU"))
            held -= 1
            if not cached[0]:
                cached.popleft()
        parent = prompt[-1] if prompt else None
        events.append(
            module.BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=tokens,
                block_size=BLOCK_SIZE,
                lora_id=None,
                medium="GPU",
                lora_name=None,
            )
        )
        prompt += hashes
        held += blocks
        batches.append(module.KVEventBatch(ts=float(number + 1), events=events))
    return batches


class Bench:
    """One publisher and its subscriber."""

    def __init__(self, module: Any, boss: zmq.Socket[bytes], publisher: Any) -> None:
        self.module, self.publisher = module, publisher
        self._boss = boss

    def start(self, what: bytes, argument: bytes = b"") -> None:
        self._boss.send_multipart((what, argument))

    def finish(self) -> float:
        if not self._boss.poll(WAIT_MS):
            raise TimeoutError("the subscriber did not get everything")
        return float(self._boss.recv())

    def run(self, what: bytes, argument: bytes = b"") -> float:
        self.start(what, argument)
        return self.finish()

    def publish(self, batches: list[Any]) -> dict[str, float]:
        """Publish at full speed; return batches per second, CPU and latencies."""
        publish, clock = self.publisher.publish, time.perf_counter_ns
        self.start(b"live", struct.pack(">d", batches[-1].ts))
        took, cpu, begin = [], time.process_time(), time.perf_counter()
        for batch in batches:
            before = clock()
            publish(batch)
            took.append(clock() - before)
        messages = self.finish()
        seconds = time.perf_counter() - begin
        return {
            "batches_per_s": len(batches) / seconds,
            "batches_per_message": len(batches) / messages,
            "cpu_us": (time.process_time() - cpu) / len(batches) * 1e6,
            **percentiles(took, "publish"),
        }


def time_slowly(call: Callable[[Any], object], items: list[Any], name: str) -> dict[str, float]:
    """Call with one item per millisecond; return the durations of the calls."""
    took, due = [], time.perf_counter()
    for item in items:
        while time.perf_counter() < due:
            time.sleep(1e-4)
        before = time.perf_counter_ns()
        call(item)
        took.append(time.perf_counter_ns() - before)
        due += 1e-3
    return percentiles(took, f"paced_{name}")


def percentiles(nanoseconds: list[int], name: str) -> dict[str, float]:
    cuts = statistics.quantiles(nanoseconds, n=100)
    return {f"{name}_p50_us": cuts[49] / 1e3, f"{name}_p99_us": cuts[98] / 1e3}


@contextmanager
def bench(module: Any) -> Iterator[Bench]:
    """Run a publisher with a subscriber process that is known to receive."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    boss = context.socket(zmq.PAIR)
    control = f"tcp://127.0.0.1:{boss.bind_to_random_port('tcp://127.0.0.1')}"
    publisher = module.ZmqEventPublisher(0, "tcp://*:0", "tcp://*:0")
    config = publisher.get_publisher_config()
    addresses = [getattr(publisher, name, getattr(config, name)) for name in ("endpoint", "replay_endpoint")]
    child = subprocess.Popen([sys.executable, __file__, "--subscriber", *addresses, control])
    try:
        made = Bench(module, boss, publisher)
        if not boss.poll(WAIT_MS):
            raise TimeoutError("the subscriber did not start")
        boss.recv()
        made.start(b"live", struct.pack(">d", -1.0))
        while not boss.poll(20):
            publisher.publish(module.KVEventBatch(ts=-1.0, events=[]))
        boss.recv()
        yield made
        made.start(b"stop")
        child.wait(30)
    finally:
        child.kill()
        publisher.shutdown()
        context.destroy(linger=0)


# -- the measurements ------------------------------------------------------------------------------


def measure_rate(module: Any, blocks: int, room: bool) -> dict[str, float]:
    batches = make_batches(module, blocks, WARM_UP + SIZES[blocks], room)
    gc.collect()
    gc.freeze()
    try:
        with bench(module) as made:
            made.publish(batches[:WARM_UP])
            return made.publish(batches[WARM_UP:])
    finally:
        gc.unfreeze()


def measure_rest(module: Any) -> dict[str, float]:
    batches = make_batches(module, 1, RING + PACED, room=True)
    with bench(module) as made:
        made.publish(batches[:RING])
        found = time_slowly(made.publisher.publish, batches[RING:], "publish")
        found["idle_round_trip_ms"] = made.run(b"idle", str(ROUND_TRIPS).encode()) * 1e3
        found["replay_messages_per_s"] = made.run(b"replay")
    return found


def measure_machine() -> dict[str, float]:
    """Time the lower bounds of `publish()`, at the same pace: an empty call, and waking a thread."""
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)

    def sleep_and_read() -> None:
        poller = select.poll()
        poller.register(wake_fd, select.POLLIN)
        for _ in range(PACED):
            poller.poll()
            os.eventfd_read(wake_fd)

    def do_nothing(item: Any) -> None:
        pass

    def wake(item: Any) -> None:
        os.eventfd_write(wake_fd, 1)

    found = time_slowly(do_nothing, list(range(PACED)), "nothing")
    thread = threading.Thread(target=sleep_and_read)
    thread.start()
    found |= time_slowly(wake, list(range(PACED)), "eventfd_write")
    while thread.is_alive():  # a read may have consumed two writes
        os.eventfd_write(wake_fd, 1)
        thread.join(0.01)
    os.close(wake_fd)
    return found


def measure_snapshot() -> dict[str, float]:
    """Let a client fetch a large state, and measure how long other threads wait for the interpreter."""
    with bench(kvtier.events) as made:
        batches = make_batches(kvtier.events, SNAPSHOT_BATCH, SNAPSHOT_BLOCKS // SNAPSHOT_BATCH, room=True)
        gc.collect()
        gc.freeze()
        filling = Stretches()
        filling.record_batches(made.publisher._loop.sender)
        for start in range(0, len(batches), 20_000):
            made.publish(batches[start : start + 20_000])
        gc.collect()
        gc.freeze()
        held = Stretches()
        held.record_turns(made.publisher._loop)
        quiet = lateness(lambda: time.sleep(2.0))
        held.clear()
        begin = time.perf_counter()
        late = lateness(lambda: made.run(b"replay", b"snapshot"))
        seconds = time.perf_counter() - begin
        time.sleep(0.5)  # the snapshot is freed after a quarter of a second
        gc.unfreeze()
    found = {"snapshot_s": seconds}
    for name, cpu in (("snapshot", held), ("filling", filling)):
        found |= {f"{name}_held_ms": max(cpu.undisturbed), f"{name}_held_any_ms": max(cpu.all)}
    return found | {
        f"{name}_{cut}_ms": ms
        for name, by_cut in (("quiet", quiet), ("snapshot", late))
        for cut, ms in by_cut.items()
    }


class Stretches:
    """CPU milliseconds of stretches of the publisher's thread.

    The `undisturbed` stretches kept the CPU all the time.
    """

    def __init__(self) -> None:
        self.all: list[float] = []
        self.undisturbed: list[float] = []
        self._begin, self._switches = 0.0, 0

    def clear(self) -> None:
        self.all.clear()
        self.undisturbed.clear()

    def record_batches(self, sender: Any) -> None:
        """Record each sent batch as a stretch."""
        send = sender.send

        def recorded(batch: Any, more: bool) -> None:
            self._start()
            send(batch, more=more)
            self._stop()

        sender.send = recorded

    def record_turns(self, loop: Any) -> None:
        """Record the work between two rests as a stretch."""
        turn = loop._turn

        def recorded() -> None:
            self._start()
            turn()

        def rest(seconds: float) -> None:
            self._stop()
            time.sleep(seconds)
            self._start()

        loop._turn, loop.rest = recorded, rest

    def _start(self) -> None:
        self._switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        self._begin = time.thread_time()

    def _stop(self) -> None:
        took = (time.thread_time() - self._begin) * 1e3
        self.all.append(took)
        if resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw == self._switches:
            self.undisturbed.append(took)


def lateness(work: Callable[[], object]) -> dict[str, float]:
    """Run work in another thread; return by how many milliseconds a sleeping thread wakes too late."""
    thread = threading.Thread(target=work)
    thread.start()
    late = []
    while thread.is_alive():
        begin = time.perf_counter()
        time.sleep(1e-4)
        late.append((time.perf_counter() - begin - 1e-4) * 1e3)
    late.sort()
    return {"p50": late[len(late) // 2], "p99": late[len(late) * 99 // 100], "most": late[-1]}


def measure(modules: dict[str, Any], repeat: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measure all publishers in turns; return the median of each figure by situation and publisher."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(repeat):
        for room in (True, False):
            for blocks in SIZES:
                for name, module in modules.items():
                    situation = f"{blocks} block{'s' * (blocks > 1)}{'' if room else ', full cache'}"
                    found.setdefault(situation, {}).setdefault(name, []).append(
                        measure_rate(module, blocks, room)
                    )
        for name, module in modules.items():
            found.setdefault("otherwise", {}).setdefault(name, []).append(measure_rest(module))
        found.setdefault("the machine alone", {}).setdefault("kvtier", []).append(measure_machine())
        found.setdefault(f"snapshot of {SNAPSHOT_BLOCKS:,} blocks", {}).setdefault("kvtier", []).append(
            measure_snapshot()
        )
    return {
        situation: {
            name: {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}
            for name, runs in by_name.items()
        }
        for situation, by_name in found.items()
    }


def print_table(console: Console, results: dict[str, dict[str, dict[str, float]]]) -> None:
    peer = "vllm" in results["otherwise"]
    table = Table("", "", *(["vLLM"] if peer else []), "kvtier", *(["ratio"] if peer else []), box=None)
    for situation, by_name in results.items():
        for figure, ours in by_name["kvtier"].items():
            theirs = by_name["vllm"][figure] if "vllm" in by_name else math.nan
            upper, lower = (ours, theirs) if figure.endswith("per_s") else (theirs, ours)
            better = upper / lower if lower else math.inf
            ratio = "" if figure == "batches_per_message" or math.isnan(better) else f"{better:.2f}x"
            cells = [
                situation,
                figure,
                *([f"{theirs:,.2f}" if ratio else ""] if peer else []),
                f"{ours:,.2f}",
            ]
            table.add_row(*cells, *([ratio] if peer else []))
            situation = ""
    console.print(table)


def judge(results: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float | bool]]:
    """Compare the figures with the gates.

    A rate's figure is its ratio to vLLM's: the lower of filling and full.
    """
    found: dict[str, dict[str, float | bool]] = {}
    for name, gate in GATES.items():
        figure, _, size = name.partition(", ")
        if size:
            rows = [by_name for situation, by_name in results.items() if situation.startswith(size)]
            if "vllm" not in rows[0]:
                continue
            value = min(row["kvtier"][figure] / row["vllm"][figure] for row in rows)
        else:
            value = next(
                by_name["kvtier"][figure] for by_name in results.values() if figure in by_name["kvtier"]
            )
        found[name] = {"value": value, "gate": gate, "passed": value >= gate if size else value <= gate}
    return found


def load_modules(console: Console) -> dict[str, Any]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm.distributed.kv_events as peer
    except ImportError as error:
        console.print(f"vLLM cannot be imported here ({error}): kvtier is measured alone.")
        return {"kvtier": kvtier.events}
    return {"vllm": peer, "kvtier": kvtier.events}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, help="runs of everything, in turns")
    parser.add_argument("--snapshot", action="store_true", help="measure only the snapshot")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too, `-` for stdout")
    parser.add_argument("--subscriber", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.subscriber:
        subscribe(*arguments.subscriber)
        return 0
    console = Console(stderr=arguments.json == "-", highlight=False, soft_wrap=True)
    if arguments.snapshot:
        console.print(measure_snapshot())
        return 0
    results = measure(load_modules(console), arguments.repeat)
    print_table(console, results)
    gates = judge(results)
    for name, gate in gates.items():
        sign = ">=" if "," in name else "<="
        console.print(
            f"{'pass' if gate['passed'] else 'FAIL'}  {name}: {gate['value']:.2f} {sign} {gate['gate']}"
        )
    console.print(
        "Many batches wait here: kvtier joins up to 32 of them into one message, vLLM sends one each."
    )

    machine = {"cores": len(os.sched_getaffinity(0)), "zmq": zmq.zmq_version()}
    text = json.dumps({"results": results, "gates": gates, "machine": machine}, indent=2) + "\n"
    if arguments.json == "-":
        sys.stdout.write(text)
    elif arguments.json:
        Path(arguments.json).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
