"""A sequence number that outlives the process: exact after a clean end, never used twice after any other."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.event_kit import Client, batch, consume, publisher, replay, stored

from kvtier.errors import InputError, IntegrityError, OutsideError
from kvtier.events import AllBlocksCleared, decode_batch
from kvtier.events.publish.sender import SequenceFile


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client()
    yield made
    made.close()


def test_a_clean_end_is_exact(tmp_path: Path) -> None:
    file = SequenceFile(tmp_path / "new" / "seq")
    assert file.start == 0
    file.reserve(0)
    file.check()
    file.close(42)
    assert SequenceFile(tmp_path / "new" / "seq").start == 42


def test_any_other_end_leaves_a_gap(tmp_path: Path) -> None:
    file = SequenceFile(tmp_path / "seq", reserve_size=100)
    for seq in range(250):
        file.reserve(seq)
        assert file.reserved > seq
    file._drop()  # as when the process dies
    assert 250 <= SequenceFile(tmp_path / "seq").start <= 350


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    first = SequenceFile(tmp_path / "seq")
    with pytest.raises(OutsideError, match="another publisher"):
        SequenceFile(tmp_path / "seq")
    first.close(1)
    SequenceFile(tmp_path / "seq").close(1)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "seq").write_text("hello")
    with pytest.raises(InputError, match="expected one number, got 'hello'"):
        SequenceFile(tmp_path / "seq")
    with pytest.raises(OutsideError, match="cannot open"):
        SequenceFile(tmp_path)


def test_check_notices(tmp_path: Path) -> None:
    file = SequenceFile(tmp_path / "seq")
    file.reserve(5)
    (tmp_path / "seq").write_text("3")
    with pytest.raises(IntegrityError):
        file.check()


def test_a_restart_continues(client: Client, tmp_path: Path) -> None:
    settings = {"sequence_file": str(tmp_path / "seq"), "buffer_steps": 5}
    with publisher(**settings) as made:
        for n in range(1, 10):
            made.publish(batch(stored([n])))
        made.check()
        epoch, following = made.stats().epoch, made.stats().next_seq
    with publisher(**settings) as made:
        made.publish(batch(stored([77])))
        made.check()
        assert made.stats().epoch != epoch
        got = replay(made, following, client)
        assert decode_batch(got[0][1]).events == [AllBlocksCleared()]
        assert (got[0][0], {block for _, block in consume(got).held}) == (following, {77})


def test_a_replay_after_a_crash_gives_the_new_state(client: Client, tmp_path: Path) -> None:
    code = f"""
        import os
        from kvtier.events import KVEventBatch, KVEventsConfig, ZmqEventPublisher
        config = KVEventsConfig(sequence_file={str(tmp_path / "seq")!r})
        made = ZmqEventPublisher(0, "tcp://127.0.0.1:0", config=config)
        made.publish(KVEventBatch(ts=1.0, events=[]))
        made.check()
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
    with publisher(sequence_file=str(tmp_path / "seq")) as made:
        made.publish(batch(stored([5])))
        made.check()
        assert made.stats().next_seq == 10_002
        got = replay(made, 2, client)
        assert [seq for seq, _ in got] == list(range(2, 10_002))
        assert {block for _, block in consume(got).held} == {5}


def test_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    path = str(tmp_path / "seq")
    with publisher(0, sequence_file=path), publisher(1, sequence_file=path):
        pass
    assert sorted(file.name for file in tmp_path.iterdir()) == ["seq", "seq.dp1"]
