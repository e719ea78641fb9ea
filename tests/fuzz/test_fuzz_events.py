"""Any bytes may arrive: nothing crashes, nothing grows, and whoever serves goes on serving.

In the suite all of it takes about ten seconds, from a fixed seed. `KVTIER_FUZZ=1000000` gives the decoder a
million frames, the scanner half as many, and what is behind a socket or in a file a tenth or less;
`KVTIER_FUZZ_SEED` draws others.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fuzz.mutate import corpus, mutate

from kvtier.cli.event_reports import HumanLines, JSONLines
from kvtier.errors import InputError
from kvtier.events.recording import RecordedBatch, RecordingReader, RecordingWriter
from kvtier.events.wire import DecodedBatch, EventEncoder, decode_batch, frame_batch
from kvtier.index.compiled.scan import ScannedBatch, Scanner

FRAMES = int(os.environ.get("KVTIER_FUZZ", "30000"))
SEED = int(os.environ.get("KVTIER_FUZZ_SEED", "20261115"))
MAY_GROW = 48 << 20
"""More than any allocator keeps back, far less than one leaked frame in a hundred of a long run
would take.
"""


def resident_bytes() -> int:
    """Return how much memory this process has in use."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def frames(count: int) -> Iterator[bytes]:
    rng, samples = random.Random(SEED), corpus()
    return (mutate(rng, samples) for _ in range(count))


@pytest.fixture
def bounded() -> Iterator[None]:
    """Fail a test during which memory grew, once its targets are warm: the scanner's compiler takes far
    more.
    """
    scan = Scanner()
    for frame in corpus():
        decode_batch(frame)
        scan(frame)
    before = resident_bytes()
    yield
    assert resident_bytes() - before < MAY_GROW


def decode(frame: bytes, tokens: bool) -> DecodedBatch | None:
    try:
        return decode_batch(frame, tokens)
    except ValueError:  # what it promises for bytes that are no batch
        return None


def test_every_valid_batch_decodes_whole() -> None:
    """Without this, mutating the corpus would prove nothing."""
    batches = [decode_batch(payload) for payload in corpus()]
    assert [batch.skipped for batch in batches] == [0] * len(batches)
    assert sum(len(batch.events) for batch in batches) == 2 * (1 + 2 + 1 + 1 + 1 + 40)
    assert sum(batch.mark is not None for batch in batches) == 2 * 3


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("tokens", [True, False])
def test_the_decoder_takes_anything(tokens: bool) -> None:
    """What it does return is sound: it can be summed up, sent on and shown."""
    encoder = EventEncoder("map")
    alive = 0
    for frame in frames(FRAMES // 2):
        batch = decode(frame, tokens)
        if batch is not None:
            alive += bool(batch.events)
            change = batch.change()
            assert 0 <= change.digest < 1 << 64
            again = decode_batch(
                frame_batch(batch.ts, [encoder.event(event) for event in batch.events], 0), tokens
            )
            assert again.change() == change
            assert all(line.isprintable() for line in HumanLines().batch(0.0, 0, batch))
            assert len([json.loads(line) for line in JSONLines().batch(0.0, 0, batch)]) == 1
    assert alive > FRAMES // 20


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("bounded")
def test_the_scanner_agrees_with_the_decoder() -> None:
    """It reads the same bytes by other means, so it must refuse the same ones and see the same blocks in the
    others.
    """
    scan, scanned = Scanner(), 0
    for frame in frames(FRAMES // 2):
        expected = decode(frame, tokens=False)
        try:
            batch = scan(frame)
        except ValueError:
            assert expected is None, frame.hex()
            continue
        assert expected is not None, frame.hex()
        assert batch.change() == expected.change(), frame.hex()
        assert (batch.mark, batch.ts) == (expected.mark, expected.ts) or batch.ts != batch.ts, frame.hex()
        scanned += isinstance(batch, ScannedBatch)
    assert scanned > FRAMES // 40


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("bounded")
def test_a_reader_of_recordings_takes_anything(tmp_path: Path) -> None:
    """Damage is an `InputError`, a torn end is none; whatever is read was written."""
    path, rng = tmp_path / "stream", random.Random(SEED)
    written = [RecordedBatch(float(at), at, payload) for at, payload in enumerate(corpus())]
    with RecordingWriter(path) as writer:
        for record in written:
            writer.write(record)
    whole, outcomes = path.read_bytes(), Counter[str]()
    for _ in range(FRAMES // 50):
        path.write_bytes(mutate(rng, [whole]))
        records, outcome = read_recording(path)
        assert [record for record in records if record not in written] == []
        outcomes[outcome] += 1
    assert outcomes.keys() == {"whole", "torn", "refused"}


def read_recording(path: Path) -> tuple[list[RecordedBatch], str]:
    """Return what could be read, and how that ended."""
    records: list[RecordedBatch] = []
    try:
        with RecordingReader(path) as reader:
            records.extend(reader)
    except InputError:
        return records, "refused"
    return records, "torn" if reader.torn else "whole"
