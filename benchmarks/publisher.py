"""What publishing costs, beside vLLM's publisher: batches per second, the time that `publish()` takes, and replay.

Both publish the same batches in one run, in turns, each from this process to a subscriber in another, replay endpoint on, kvtier
with everything at its default: set-like filter, state, digest, marks, which vLLM's has not. A rate counts from the first
`publish()` until the subscriber has the last batch. Every batch stores blocks of 16 tokens, in a cache that has room; with a
*full cache* it also removes as many, the last of the oldest prompt first, one event each, as vLLM's block pool does. Where more
than 64 batches wait, as they do here, kvtier joins them into messages of up to 32, and `batches_per_message` says how many it
came to; vLLM sends one message a batch. `publish()` is timed in that burst, while the publisher's thread is busy, and at a
thousand batches a second (*paced*), when the thread rests in between. Idle round trip: a replay request that has nothing to
give. A replay that loses its end marker, as vLLM's may when the client is slow, counts as none.
Needs vLLM 0.32 for the comparison (`make bench` builds an environment that has it); without it, kvtier is measured alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import zmq
from rich.console import Console
from rich.table import Table

import kvtier.events
from kvtier.events.publish.hot import HOT_BY

TARGETS = {"rate": 2.0, "publish_p99_us": 20.0, "idle_round_trip_ms": 2.0}
BLOCK_SIZE, PROMPT_BATCHES = 16, 8
SIZES = {1: 15_000, 64: 5_000}
"""Blocks a batch: how many batches are timed."""
CACHE = {1: 4_096, 64: 65_536}
WARM_UP = 12_000  # beyond both buffers of 10,000 batches: what is measured is how it goes on, not how it starts
PACED, ROUND_TRIPS, RING = 1_000, 10, 10_000
WAIT_MS, LOST_AFTER_MS = 60_000, 3_000
END = b"\xff" * 8


# -- the subscriber, a process of its own -------------------------------------------------------------------------------------


def subscribe(endpoint: str, replay_endpoint: str, control: str) -> None:
    """Receive and answer: `live` until a batch with the given time, `idle` round trips, `replay` of everything."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sub, dealer, boss = (context.socket(kind) for kind in (zmq.SUB, zmq.DEALER, zmq.PAIR))
    sub.rcvhwm = dealer.rcvhwm = 0
    sub.subscribe(b"")
    for sock, address in ((sub, endpoint), (dealer, replay_endpoint), (boss, control)):
        sock.connect(address)
    boss.send(b"ready")
    while (order := boss.recv_multipart())[0] != b"stop":
        if order[0] == b"live":
            answer = float(receive_until(sub, order[1]))
        elif order[0] == b"idle":
            answer = statistics.median(ask(dealer, 1 << 60)[1] for _ in range(int(order[1])))
        else:
            count, seconds = ask(dealer, 0)
            answer = count / seconds
        boss.send(repr(answer).encode())
    context.destroy(linger=0)


def receive_until(sub: zmq.Socket[bytes], ts: bytes) -> int:
    """Receive up to the batch of that time; return how many messages came."""
    recv, count = sub.recv, 1
    while True:
        recv()
        recv()
        if recv()[2:10] == ts:
            return count
        count += 1


def ask(dealer: zmq.Socket[bytes], start: int) -> tuple[int, float]:
    """Replay from `start`; return how many batches came, and the seconds it took; forever, if the end marker was lost."""
    begin, count = time.perf_counter(), 0
    dealer.send_multipart((b"", start.to_bytes(8, "big")))
    while dealer.poll(LOST_AFTER_MS):
        if dealer.recv_multipart()[2] == END:
            return count, time.perf_counter() - begin
        count += 1
    return count, math.inf


# -- what is published ----------------------------------------------------------------------------------------------------------


@lru_cache
def make_batches(module: Any, blocks: int, count: int, room: bool) -> list[Any]:
    """Make the batches of an engine that computes prompts of `PROMPT_BATCHES` batches, with times from 1 on."""
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

    def publish_slowly(self, batches: list[Any]) -> dict[str, float]:
        """Publish one batch a millisecond; return latencies."""
        took, due = [], time.perf_counter()
        for batch in batches:
            while time.perf_counter() < due:
                time.sleep(1e-4)
            before = time.perf_counter_ns()
            self.publisher.publish(batch)
            took.append(time.perf_counter_ns() - before)
            due += 1e-3
        return percentiles(took, "paced_publish")


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


# -- what is measured -----------------------------------------------------------------------------------------------------------


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
        found = made.publish_slowly(batches[RING:])
        found["idle_round_trip_ms"] = made.run(b"idle", str(ROUND_TRIPS).encode()) * 1e3
        found["replay_batches_per_s"] = made.run(b"replay")
    return found


def measure(modules: dict[str, Any], repeat: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measure all publishers in turns; return the median of each figure by situation and publisher."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(repeat):
        for room in (True, False):
            for blocks in SIZES:
                for name, module in modules.items():
                    situation = f"{blocks} block{'s' * (blocks > 1)}{'' if room else ', full cache'}"
                    found.setdefault(situation, {}).setdefault(name, []).append(measure_rate(module, blocks, room))
        for name, module in modules.items():
            found.setdefault("otherwise", {}).setdefault(name, []).append(measure_rest(module))
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
            theirs = by_name["vllm"][figure] if peer else 0.0
            upper, lower = (ours, theirs) if figure.endswith("per_s") else (theirs, ours)
            better = upper / lower if lower else math.inf
            ratio = "" if figure == "batches_per_message" else f"{better:.1f}x"
            cells = [situation, figure, *([f"{theirs:,.2f}"] if peer else []), f"{ours:,.2f}"]
            table.add_row(*cells, *([ratio] if peer else []))
            situation = ""
    console.print(table)


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
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too, `-` for stdout")
    parser.add_argument("--subscriber", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.subscriber:
        subscribe(*arguments.subscriber)
        return 0
    console = Console(stderr=arguments.json == "-", highlight=False, soft_wrap=True)
    results = measure(load_modules(console), arguments.repeat)
    print_table(console, results)
    console.print("Many batches wait here: kvtier joins up to 32 of them into one message, vLLM sends one each.")
    console.print(f"kvtier's hot steps in {HOT_BY}. Targets: {TARGETS}")
    machine = {"cores": len(os.sched_getaffinity(0)), "zmq": zmq.zmq_version(), "hot_by": HOT_BY}
    text = json.dumps({"results": results, "targets": TARGETS, "machine": machine}, indent=2) + "\n"
    if arguments.json == "-":
        sys.stdout.write(text)
    elif arguments.json:
        Path(arguments.json).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
