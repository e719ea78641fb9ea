"""Every native table beside a dict, under churn: small and large, full and nearly full, keys that are alike
in any bits.

A table that hangs holds the interpreter, and no timeout of the test's own process could end it. So each
churn is a process of its own with a limit on the CPU time that it may take, which a busy machine does not
change. By hand, also under sanitizers:

    python tests/unit/test_native_churn.py book ghosts recency blocks table names
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

CPU_SECONDS = 100
"""Ten times what a churn takes, and what compiling the index takes; a hang takes all of it."""
U64 = (1 << 64) - 1
SEED = 20_690


# -- keys that a table could mistake ---------------------------------------------------------------


def numbers(random: Random, count: int) -> Iterator[list[int]]:
    """Yield lists of different 64-bit numbers: random, sequential, equal in low bits, equal in high bits,
    multiples.
    """
    top = count << 8
    yield [random.getrandbits(32) << 32 | n ^ 0x5A5A5A for n in range(count)]
    yield list(range(count))
    yield [n << 40 | 0xABCDEF for n in range(count)]
    yield [0xABCDEF << 40 | n for n in random.sample(range(top), count)]
    yield [n * 0x10001 & U64 for n in range(1, count + 1)]


def with_home(random: Random, count: int, part: int, home: float) -> list[int]:
    """Return hashes that the publisher's table puts into one of its 512 parts, and there first tries at one
    place.

    It multiplies a hash by an odd number and takes the first 9 bits as the part and the next as the place;
    this divides.
    """
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    first = part << 55 | int(home * (1 << 32)) << 23
    return [(first + n) * inverse & U64 for n in random.sample(range(1 << 23), count)]


def as_bytes(keys: list[int], size: int, *, big: bool) -> list[bytes]:
    """Return numbers as keys of some length, with what differs at one end or at the other."""
    return [key.to_bytes(8, "big" if big else "little").rjust(size, b"k") for key in keys]


def array(values: list[int]) -> Any:
    return np.array(values, np.int64)


class Churn:
    """Random choices with a tide: the table fills up, stays full for a while, and empties."""

    def __init__(self, random: Random, keys: list[Any], batch: int) -> None:
        self.random, self.keys, self.batch = random, keys, batch
        self.operations = 0
        self._until, self._wish = 0, 1.0

    def some(self) -> list[Any]:
        """Return a batch of keys, held or not."""
        self.operations += self.batch
        return self.random.choices(self.keys, k=self.batch)

    def some_of(self, held: dict[Any, Any]) -> list[Any]:
        """Return a batch of different keys that are held."""
        self.operations += self.batch
        return self.random.sample(list(held), min(self.batch, len(held)))

    def adds(self, fill: float) -> bool:
        """Return whether to add rather than to take away, given how full the table is."""
        if self.operations >= self._until:
            self._until = self.operations + self.random.randint(1, 40) * self.batch
            self._wish = self.random.choice((0.0, 0.3, 0.9, 1.0, 1.0))
        return self.random.random() < (0.8 if fill < self._wish else 0.2)


# -- the scheduler's tables ------------------------------------------------------------------------


def new_book(kind: Any, capacity: int) -> tuple[Any, list[Any]]:
    arrays = [np.zeros(capacity, np.int64), np.zeros(capacity, np.bool_), np.zeros(capacity, np.int64)]
    return kind(*arrays), arrays


def churn_book(churn: Churn, capacity: int, operations: int) -> None:
    """Reserve, complete, pin, release, remove and free, in C, in Python and in a dict from key to slot."""
    from kvtier.native._slots import SlotBook
    from kvtier.policies.slots import PythonBook

    (one, arrays), (other, others) = new_book(SlotBook, capacity), new_book(PythonBook, capacity)
    model: dict[bytes, int] = {}
    free = set(range(capacity))

    def both(call: str, *arguments: Any) -> Any:
        first, second = getattr(one, call)(*arguments), getattr(other, call)(*arguments)
        assert np.array_equal(first, second) if isinstance(first, np.ndarray) else first == second, call
        return first

    def forget(keys: list[bytes]) -> None:
        free.update(model.pop(key) for key in keys)

    while churn.operations < operations:
        asked = churn.some()
        assert both("find", asked).tolist() == [model.get(key, -1) for key in asked]
        missing = [key for key in dict.fromkeys(asked) if key not in model]
        assert both("missing", asked) == missing
        if churn.adds(len(model) / capacity):
            wanted = missing[: len(free)]
            slots = both("reserve", churn.operations, wanted).tolist()
            assert set(slots) <= free
            assert len(set(slots)) == len(slots)
            model.update(zip(wanted, slots, strict=True))
            free.difference_update(slots)
            if churn.random.random() < 0.9:
                both("complete", wanted)
        else:
            leaving = churn.some_of(model)
            slots = array([model[key] for key in leaving])
            if churn.random.random() < 0.5:
                both("complete", leaving)
                assert both("pin", slots) == len(slots)
                assert both("release", slots) is None or not leaving
                assert both("unpin", slots) == len(slots)
                assert both("release", slots) == leaving
            else:
                assert both("remove", slots) == leaving
                both("free", slots)
            forget(leaving)
        assert len(one) == len(model)
        assert one.num_free() == len(free)
    for key in churn.keys:
        assert one.get(key) == model.get(key)
    assert sorted(both("free_slots").tolist()) == sorted(free)
    assert all(map(np.array_equal, arrays, others))


def churn_ghosts(churn: Churn, capacity: int, operations: int) -> None:
    """Remember and recall, in C, in Python and in a dict from key to list and number: the last `capacity` of
    each count.
    """
    from kvtier.native._slots import GhostLists
    from kvtier.policies.slots import PythonGhosts

    one, other = GhostLists(capacity, 2), PythonGhosts(capacity, 2)
    model: dict[bytes, tuple[int, int]] = {}
    told = [0, 0]

    def recall(key: bytes) -> int:
        which, number = model.pop(key, (-1, 0))
        known = which >= 0 and number > told[which] - capacity
        return which * capacity + (number - 1) % capacity if known else -1

    while churn.operations < operations:
        keys = churn.some()
        if churn.random.random() < 0.7:
            which = churn.random.randrange(2)
            one.remember(which, keys)
            other.remember(which, keys)
            for key in keys if capacity else ():
                told[which] += 1
                model[key] = which, told[which]
        else:
            expected = [recall(key) for key in keys]
            answers = [lists.recall(keys) for lists in (one, other)]  # type: ignore[attr-defined]
            for lists in answers:
                assert (expected if max(expected) >= 0 else None) == (
                    None if lists is None else lists.tolist()
                )
        assert one.sizes() == other.sizes()
    known = [which for which, number in model.values() if number > told[which] - capacity]
    assert one.sizes() == (known.count(0), known.count(1))


def churn_recency(churn: Churn, capacity: int, operations: int) -> None:
    """Use, renew, drop and take, in C, in Python and in a dict, which keeps the order in which slots were
    put in.
    """
    from kvtier.native._slots import RecencyList
    from kvtier.policies.slots import PythonRecency

    one, other = RecencyList(capacity), PythonRecency(capacity)
    model: dict[int, None] = {}

    def use(slots: list[int]) -> None:
        for slot in reversed(slots):
            model.pop(slot, None)
            model[slot] = None

    while churn.operations < operations:
        slots = list(dict.fromkeys(slot % capacity for slot in churn.some()))
        if churn.adds(len(model) / capacity):
            one.use(array(slots))
            other.use(array(slots))
            use(slots)
        elif churn.random.random() < 0.3:
            answers = [recency.renew(array(slots)).tolist() for recency in (one, other)]
            assert answers[0] == answers[1] == [slot for slot in slots if slot not in model]
            use([slot for slot in slots if slot in model])
        elif churn.random.random() < 0.5:
            one.drop(array(slots))
            other.drop(array(slots))
            for slot in slots:
                model.pop(slot, None)
        else:
            allowed = np.random.default_rng(churn.operations).random(capacity) < 0.7
            taken = one.take(len(slots), allowed).tolist()
            assert taken == other.take(len(slots), allowed).tolist()
            assert taken == [slot for slot in model if allowed[slot]][: len(slots)]
            for slot in taken:
                del model[slot]
        assert len(one) == len(model)
        if capacity < 100 or churn.random.random() < 0.01:
            assert one.slots().tolist() == other.slots().tolist() == list(model)


def scheduler_tables(run: Callable[[Churn, int, int], None], random: Random) -> int:
    """Churn tables of 1 to 50 slots and a large one; return how many operations that were."""
    total = 0
    for capacity in (1, 2, 3, 4, 5, 7, 8, 13, 50):
        for keys in numbers(random, 2 * capacity + 3):
            size, big = random.choice((8, 12, 36, 40)), random.random() < 0.5
            named: list[Any] = keys if run is churn_recency else as_bytes(keys, size, big=big)
            churn = Churn(random, named, min(2 * capacity, random.choice((1, 3, 40))))
            run(churn, capacity, 8_000)
            total += churn.operations
    for keys in numbers(random, 30_000):
        churn = Churn(random, keys if run is churn_recency else as_bytes(keys, 36, big=True), 1000)
        run(churn, 20_000, 200_000)
        total += churn.operations
    return total


# -- the index's tables ----------------------------------------------------------------------------


def edits(op: Any, area: int, count: int) -> Any:
    return np.array([[int(op), area, count]], np.int64)


def churn_table(churn: Churn, budget: int, workers: int, operations: int) -> None:
    """Store, remove and clear, beside a dict from hash, worker and area; where there is no room, a store
    says so.
    """
    from kvtier.index.base import Op
    from kvtier.index.compiled.table import CompiledTable

    table = CompiledTable(budget)
    for worker in range(workers):
        table.require(worker, 1)
    model: dict[tuple[int, int, int], None] = {}
    most = max(1, len(churn.keys) * workers)
    while churn.operations < operations:
        worker, area = churn.random.randrange(workers), churn.random.randrange(min(workers, 3))
        keys = list(dict.fromkeys(churn.some()))
        hashes = np.array(keys, np.uint64)
        held = [any((key, worker, place) in model for place in range(3)) for key in keys]
        assert table.holds(worker, hashes).tolist() == held
        if churn.adds(len(model) / most):
            before = table.stats().dropped
            fresh = table.store(worker, area, hashes).tolist()
            assert not any(
                new and (key, worker, area) in model for key, new in zip(keys, fresh, strict=True)
            )
            model.update({(key, worker, area): None for key, new in zip(keys, fresh, strict=True) if new})
            lost = [key for key in keys if (key, worker, area) not in model]
            assert len(lost) == table.stats().dropped - before
        elif churn.random.random() < 0.98:
            assert table.apply(worker, edits(Op.REMOVED, area, len(keys)), hashes) is None
            for key in keys:
                model.pop((key, worker, area), None)
        else:
            table.clear(worker)
            model = {entry: None for entry in model if entry[1] != worker}
        assert table.holdings() == len(model)
    table.check()
    for hashes in table.hashes():
        for key, held in zip(hashes.tolist(), table.usable(hashes), strict=True):
            tiers = {
                holder: sum(1 << area for area in range(3) if (key, holder, area) in model)
                for holder in range(workers)
            }
            assert held == {holder: bits for holder, bits in tiers.items() if bits}


def churn_names(churn: Churn, budget: int, operations: int) -> None:
    """Put and get names of blocks that are held, beside a dict from worker and engine's hash to key."""
    from kvtier.index.base import Op
    from kvtier.index.compiled.names import CompiledNames
    from kvtier.index.compiled.table import CompiledTable

    table = CompiledTable(64 << 20)
    names = CompiledNames(table, budget)
    model: dict[tuple[int, int], int] = {}
    while churn.operations < operations:
        worker, keys = churn.random.randrange(3), list(dict.fromkeys(churn.some()))
        blocks = np.array([key * 3 & U64 for key in keys], np.uint64)
        if churn.adds(len(model) / (3 * len(churn.keys))):
            table.store(worker, 0, blocks)
            names.put(worker, keys, blocks)
            for key, block in zip(keys, blocks.tolist(), strict=True):
                found = names.get(worker, key)
                assert found in (None, block)  # None: there is no room
                if found is not None:
                    model[worker, key] = block
        elif churn.random.random() < 0.97:
            table.apply(worker, edits(Op.REMOVED, 0, len(keys)), blocks)
            for key in keys:
                model.pop((worker, key), None)
            names.tidy()
        else:
            table.clear(worker)
            names.clear(worker)
            model = {name: block for name, block in model.items() if name[0] != worker}
            names.sweep()
        for key in keys[:20]:
            if (worker, key) in model:
                assert names.get(worker, key) == model[worker, key]
    names.check()
    parts = [
        zip(part.workers.tolist(), part.hashes.tolist(), part.keys.tolist(), strict=True)
        for part in names.parts()
    ]
    told = {(worker, key): block for part in parts for worker, key, block in part}
    assert model.items() <= told.items()


def index_tables(random: Random) -> int:
    """Churn the table of blocks: one worker where nothing more fits, several with many sets of holders."""
    total = 0
    for budget, workers, count in (
        (256 << 10, 1, 30_000),
        (1 << 20, 3, 50),
        (1 << 20, 4, 2_000),
        (32 << 20, 6, 40_000),
    ):
        for keys in numbers(random, count):
            churn = Churn(random, keys, min(count, 500))
            churn_table(churn, budget, workers, 40_000 if count < 100 else 300_000)
            total += churn.operations
    return total


def index_names(random: Random) -> int:
    """Churn the names of blocks, in books that are too small and in one that is not."""
    total = 0
    for budget, count in ((1, 3_000), (256 << 10, 8_000), (16 << 20, 40_000)):
        for keys in numbers(random, count):
            churn = Churn(random, keys, 300)
            churn_names(churn, budget, 60_000)
            total += churn.operations
    return total


TABLES: dict[str, Callable[[Random], int]] = {
    "book": lambda random: scheduler_tables(churn_book, random),
    "ghosts": lambda random: scheduler_tables(churn_ghosts, random),
    "recency": lambda random: scheduler_tables(churn_recency, random),
    "table": index_tables,
    "names": index_names,
}
NEEDS = {"table": "numba", "names": "numba"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TABLES)
def test_a_native_table_is_a_dict_under_churn(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "kvtier.native._slots"), reason="it was not compiled here")
    done = subprocess.run(
        [sys.executable, __file__, name], capture_output=True, text=True, timeout=570, check=False
    )
    assert done.returncode >= 0, (
        f"killed by signal {-done.returncode}: a hang, if that is SIGXCPU\n{done.stderr}"
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)


if __name__ == "__main__":
    if "asan" not in sys.argv:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    for table in sys.argv[1:]:
        if table in TABLES:
            print(table, TABLES[table](Random(SEED)), "operations", flush=True)
