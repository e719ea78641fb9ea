"""`kvtier events` against real publishers: what it prints, how it ends, and one line for each kind of bad
input.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import zmq
from tests.ports import free_port, free_ports

from kvtier.cli import main
from kvtier.cli.event_reports import AnnouncedBlocks, HumanLines, JSONLines
from kvtier.cli.events import _paced, _record
from kvtier.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Follower,
    KVCacheEvent,
    KVEventBatch,
    Mark,
    Received,
    State,
    StateChanged,
)
from kvtier.events.config import KVEventsConfig
from kvtier.events.curve import CurveServer, make_keys
from kvtier.events.publisher import ZmqEventPublisher
from kvtier.events.recording import KeptBatch, RecordedBatch, RecordingReader, RecordingWriter
from kvtier.events.wire import DecodedBatch, EventEncoder, decode_batch, frame_batch

COMMAND = (sys.executable, "-m", "kvtier", "events")


def stored(first: int, count: int = 2, medium: str = "GPU") -> BlockStored:
    hashes = [first + at for at in range(count)]
    return BlockStored(hashes, None, list(range(4 * count)), 4, None, medium, None)


def batch(*events: KVCacheEvent) -> KVEventBatch:
    return KVEventBatch(1.0, list(events), 0)


@contextmanager
def publisher(**settings: Any) -> Iterator[ZmqEventPublisher]:
    settings = {"heartbeat_interval": 0.05} | settings
    one = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=KVEventsConfig(**settings))
    try:
        yield one
    finally:
        one.shutdown()


def addresses(one: ZmqEventPublisher) -> list[str]:
    assert one.replay_endpoint is not None
    return [one.endpoint, "--replay", one.replay_endpoint]


def json_lines(text: str, kind: str = "batch") -> list[dict[str, Any]]:
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    return text


# -- lines -----------------------------------------------------------------------------------------

EVERYTHING = DecodedBatch(
    1.5,
    [
        AllBlocksCleared(),
        BlockStored([2**63 + 1, 2**64 - 1], 255, list(range(32)), 16, None, "CPU", "sql", group_idx=1),
        BlockStored([b"\x01" * 32], None, [], 0, None, None, None),
        BlockRemoved([-1], "GPU"),
    ],
    0,
    Mark(epoch=10, blocks=1234, digest=11),
    skipped=1,
)


def test_lines_for_people() -> None:
    said = [line.split("  ", 1)[1] for line in HumanLines().batch(0.0, 7, EVERYTHING)]
    assert said == [
        "       7  cleared",
        "       7  stored   CPU group 1  2 blocks 8000000000000001 … ffffffffffffffff  "
        "after 00000000000000ff  32 tokens  lora sql",
        "       7  stored   GPU  1 block 0101010101010101  from the start  0 tokens",
        "       7  removed  GPU  1 block ffffffffffffffff",
        "       7  mark     epoch 000000000000000a  1,234 blocks  digest 000000000000000b",
        "       7  unread   1 event",
    ]
    assert next(HumanLines().batch(0.0, 8, DecodedBatch(1.0, []))).endswith("8  empty")


def test_nothing_that_a_publisher_sends_controls_the_terminal() -> None:
    event = BlockStored([1], None, [], 0, None, "GPU\x1b[2J", "line\nbreak é")
    (line,) = HumanLines().batch(0.0, 1, DecodedBatch(1.0, [event]))
    assert "GPU\\x1b[2J" in line
    assert line.endswith("lora line\\nbreak é")
    (line,) = HumanLines().state(0.0, "degraded", "\x07")
    assert line.isprintable()


def test_lines_for_programs() -> None:
    (text,) = JSONLines().batch(0.0, 7, EVERYTHING)
    line = json.loads(text)
    assert line["events"][1]["block_hashes"] == [2**63 + 1, 2**64 - 1]
    assert line["events"][2]["block_hashes"] == ["01" * 32]
    assert [event["type"] for event in line["events"]] == [
        "AllBlocksCleared",
        "BlockStored",
        "BlockStored",
        "BlockRemoved",
    ]
    assert (line["seq"], line["ts"], line["rank"], line["skipped"]) == (7, 1.5, 0, 1)
    assert line["mark"] == {"epoch": 10, "blocks": 1234, "digest": 11}


def test_lines_for_programs_have_keys_of_all_types() -> None:
    keys: list[Any] = [None, True, b"\0x", (1, b"a"), 1.5, 2**64 - 1, "text"]
    event = BlockStored([1], None, [], 0, None, "GPU", None, extra_keys=[[dict.fromkeys(keys, 1)]])
    (text,) = JSONLines().batch(0.0, 7, DecodedBatch(1.0, [event]))
    (found,) = json.loads(text)["events"][0]["extra_keys"][0]
    assert list(found) == ["None", "True", "0078", "[1, '61']", "1.5", "18446744073709551615", "text"]


# -- tail ------------------------------------------------------------------------------------------


def test_tail_from_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    """What was published before the command began is there: from the buffer, or from a snapshot."""
    with publisher() as one:
        one.publish(batch(stored(1)))
        one.publish(batch(stored(11, medium="CPU"), BlockRemoved([2], "GPU")))
        assert main(["events", "tail", *addresses(one), "--from-start", "--json", "-n", "3"]) == 0
    output = capsys.readouterr().out
    announced = AnnouncedBlocks()
    for line in json_lines(output):
        announced.apply(decode_batch(json_to_wire(line)))
    assert {place[0]: hashes for (_, place), hashes in announced.held.items()} == {
        "GPU": {1},
        "CPU": {11, 12},
    }


def json_to_wire(line: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([line["ts"], line["events"], line["rank"]])


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command until the test ends it."""
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return the first line of its output with that text."""
    assert process.stdout is not None
    return next(line for line in process.stdout if text in line)


def test_tail_shows_what_happens_after_it_joined() -> None:
    with publisher() as one:
        one.publish(batch(stored(1)))
        with running("tail", *addresses(one)) as process:
            read_until(process, "exact")
            one.publish(batch(BlockRemoved([2], "GPU")))
            assert "removed  GPU  1 block 0000000000000002" in read_until(process, "removed")


def test_tail_without_replay_shows_the_live_stream() -> None:
    with publisher() as one, running("tail", one.endpoint) as process:
        read_until(process, "mark")
        one.publish(batch(stored(1)))
        assert "stored   GPU  2 blocks" in read_until(process, "stored")


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Let children heed it, also where the tests run in the background of a shell that had them
    ignore it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_tail_quietly() -> None:
    with publisher() as one, running("tail", *addresses(one)) as process:
        read_until(process, "mark")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")


def test_a_reader_that_goes_away_ends_tail_quietly() -> None:
    with publisher(heartbeat_interval=None) as one, running("tail", *addresses(one)) as process:
        one.publish(batch(stored(1)))
        read_until(process, "exact")
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 0  # though nothing more is said
        assert process.stderr is not None
        assert process.stderr.read() == ""


# -- record and replay -----------------------------------------------------------------------------


def test_a_recording_has_what_was_received(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "stream"
    with publisher() as one:
        one.publish(batch(stored(1)))
        one.publish(batch(BlockRemoved([2], "GPU")))
        assert (
            main(["events", "record", *addresses(one)[:1], str(file), *addresses(one)[1:], "-n", "4"]) == 0
        )
    assert f"{file}: " in capsys.readouterr().err
    assert main(["events", "replay", str(file), "--json"]) == 0
    announced = AnnouncedBlocks()
    for line in json_lines(capsys.readouterr().out):
        announced.apply(decode_batch(json_to_wire(line)))
    assert {place[0]: hashes for (_, place), hashes in announced.held.items()} == {"GPU": {1}}


def test_a_normal_join_warns_of_no_other_publisher() -> None:
    """The first live batch after a join is checked; that is no sign of another publisher."""
    follower: Follower[DecodedBatch] = Follower("p", decode_batch)
    encoder = EventEncoder()
    payloads = [frame_batch(1.0, [encoder.event(stored(10 * seq))], 0) for seq in range(3)]
    follower.connected(1.0)
    for answer in ([], list(enumerate(payloads[:2]))):
        request = follower.request
        assert request is not None
        for seq, payload in answer:
            follower.reply(request, seq, payload, 1.0)
        follower.end(request, 1.0)
    follower.live(2, payloads[2], 1.0)
    told = [update for update in follower.take_updates() if isinstance(update, StateChanged)]
    assert [update.state for update in told] == [State.REPAIRING, State.EXACT, State.REPAIRING]
    assert told[-1].reason == "checking batch 2, the first that came live"


def test_a_recording_of_several_ranks_is_forgotten_for_each() -> None:
    """A clear speaks of its batch's rank alone."""
    encoder = EventEncoder()
    payloads = [frame_batch(1.0, [encoder.event(stored(10 * rank))], rank) for rank in (1, 2)]
    records = [RecordedBatch(1.0, seq, payload) for seq, payload in enumerate([*payloads, b"", payloads[1]])]
    batches = list(_paced(records, math.inf))
    cleared = [
        batch.data_parallel_rank for batch in batches if isinstance(batch.events[0], AllBlocksCleared)
    ]
    assert cleared == [1, 2]


def write_recording(file: Path, *batches: KVEventBatch) -> None:
    encoder = EventEncoder()
    with RecordingWriter(file) as writer:
        for at, batch in enumerate(batches):
            writer.write(
                RecordedBatch(
                    float(at), at, frame_batch(batch.ts, [encoder.event(event) for event in batch.events], 0)
                )
            )


def test_replay_prints_a_recording_and_says_if_it_is_torn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stream"
    write_recording(file, batch(stored(1)), batch(AllBlocksCleared()), batch(stored(9)))
    os.truncate(file, file.stat().st_size - 1)
    assert main(["events", "replay", str(file)]) == 0
    output, errors = capsys.readouterr()
    assert [line.split()[2] for line in output.splitlines()] == ["stored", "cleared"]
    assert "of a record that was never finished" in one_line(errors)


def test_record_cuts_a_torn_end_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "stream"
    write_recording(file, batch(stored(1)), batch(stored(9)))
    os.truncate(file, file.stat().st_size - 1)
    with publisher() as one:
        assert main(["events", "record", one.endpoint, str(file), "-n", "2"]) == 0
    assert "cut off" in capsys.readouterr().err
    with RecordingReader(file) as reader:
        assert [bool(record.payload) for record in reader] == [True, False, True, True]
        assert reader.torn == 0


def test_a_published_recording_is_a_stream_like_any_other(tmp_path: Path) -> None:
    """Also for who comes after its end, and also where the recorded publisher started again."""
    file, ports = tmp_path / "stream", free_ports(2)
    write_recording(file, batch(stored(1)), batch(stored(5)))
    with RecordingWriter(file) as writer:
        writer.write(RecordedBatch(2.0, 0, b""))
    write_recording_more = [batch(stored(21, count=3))]
    write_recording(file, *write_recording_more)
    live, replay = (f"tcp://127.0.0.1:{port}" for port in ports)  # the first was connected to, not bound
    with running(
        "replay", str(file), "--endpoint", live, "--replay", replay, "--speed", "max", "--keep"
    ) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "4 batches published" in line)
        done = subprocess.run(
            [*COMMAND, "check", f"tcp://127.0.0.1:{ports[0]}", "--replay", f"tcp://127.0.0.1:{ports[1]}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "exact" in done.stdout
    assert "3 blocks" in done.stdout


def test_replay_counts_what_went_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It counted what it handed over, also what was known already."""
    file = tmp_path / "stream"
    write_recording(file, *(batch(stored(first, count=1)) for first in (1, 1, 2, *range(3, 203), 2)))
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    assert main(["events", "replay", str(file), "--endpoint", endpoint, "--speed", "max"]) == 0
    assert "202 batches published, 2 with nothing new left out" in capsys.readouterr().err


def test_check_takes_a_batch_without_a_rank_for_one_of_rank_0() -> None:
    announced = AnnouncedBlocks()
    announced.apply(DecodedBatch(1.0, [stored(1)]))
    announced.apply(DecodedBatch(1.0, [BlockRemoved([1], "GPU")], 0))
    assert (announced.blocks, announced.removed_unheld) == (1, 0)
    announced.apply(DecodedBatch(1.0, [AllBlocksCleared()], 0))
    assert announced.blocks == 0


# -- check -----------------------------------------------------------------------------------------


def test_check_finds_an_honest_publisher_exact(capsys: pytest.CaptureFixture[str]) -> None:
    with publisher() as one:
        one.publish(batch(stored(1, count=5), stored(1, count=3, medium="CPU")))
        assert main(["events", "check", *addresses(one)]) == 0
    line = one_line(capsys.readouterr().out)
    assert line.startswith("exact at ")
    assert "8 blocks" in line


def check(capsys: pytest.CaptureFixture[str], address: Iterable[str], *said: str) -> tuple[int, str]:
    """Check a stream until all of this is said, and return the code and what was said.

    A check takes all of its time where nothing proves anything: it has little at first, and more on a busy
    machine, where little is not enough to join.
    """
    for seconds in (1, 4, 16, 64):
        code = main(["events", "check", *address, "--timeout", str(seconds)])
        output = capsys.readouterr().out.replace(f" in {seconds} s", " in time")
        if all(words in output for words in said):
            break
    return code, output


def test_check_needs_no_heartbeat(capsys: pytest.CaptureFixture[str]) -> None:
    with publisher(heartbeat_interval=None) as one:
        one.publish(batch(stored(1, count=5)))
        code, output = check(capsys, addresses(one), "exact at ")
    assert code == 0
    assert one_line(output).startswith("exact at ")


class HandMade:
    """A publisher whose every batch is what the test says, repeated for whoever comes; it
    answers no replay.
    """

    def __init__(self, payloads: list[bytes]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._payloads = payloads
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for seq in itertools.count():
            self._socket.send_multipart(
                [b"", struct.pack(">Q", seq), self._payloads[min(seq, len(self._payloads) - 1)]]
            )
            if self._stop.wait(0.02):
                break
        self._socket.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.term()


def test_check_finds_a_publisher_out_that_says_what_is_not_so(capsys: pytest.CaptureFixture[str]) -> None:
    encoder = EventEncoder()
    mark = encoder.mark(Mark(epoch=5, blocks=2, digest=3))
    with HandMade([frame_batch(1.0, [encoder.event(AllBlocksCleared()), mark], 0)]) as one:
        told = "blocks: the publisher has 2, it announced 0"
        code, output = check(capsys, [one.endpoint], told)
    assert code == 1
    assert told in output


def test_check_says_what_can_be_known_of_a_stock_publisher(capsys: pytest.CaptureFixture[str]) -> None:
    payload = frame_batch(1.0, [EventEncoder().event(stored(1))], 0)
    with HandMade([payload]) as one:
        told = "no mark in time: stock publishers", "2 blocks announced"
        _, output = check(capsys, [one.endpoint], *told)
    assert all(words in output for words in told)


def test_check_does_not_blame_an_idle_publisher(capsys: pytest.CaptureFixture[str]) -> None:
    """A vLLM without requests says nothing, and without a replay address it cannot be asked."""
    with zmq.Context() as context, context.socket(zmq.PUB) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        told = "said nothing in time: an idle vLLM"
        code, output = check(capsys, [f"tcp://127.0.0.1:{port}"], told)
    assert code == 0
    assert told in output
    assert "--replay" in output


def test_check_of_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "check", f"tcp://127.0.0.1:{free_port()}", "--timeout", "0.2"]) == 1
    assert " in 0.2 s" in capsys.readouterr().out


# -- keys ------------------------------------------------------------------------------------------


def test_keys_open_a_stream_and_without_them_it_stays_shut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", "keygen", str(tmp_path), "--name", "publisher"]) == 0
    assert main(["events", "keygen", str(tmp_path / "clients"), "--name", "me"]) == 0
    keys = [
        "--curve-key",
        str(tmp_path / "clients/me.key_secret"),
        "--curve-server",
        str(tmp_path / "publisher.key"),
    ]
    curve = CurveServer(str(tmp_path / "publisher.key_secret"), str(tmp_path / "clients"))
    with publisher(curve=curve) as one:
        one.publish(batch(stored(1)))
        assert main(["events", "check", *addresses(one), *keys]) == 0
        assert main(["events", "check", *addresses(one), "--timeout", "0.5"]) == 1
        stranger = make_keys(tmp_path, "stranger")[1]
        assert (
            main(
                [
                    "events",
                    "check",
                    *addresses(one),
                    "--timeout",
                    "0.5",
                    "--curve-key",
                    str(stranger),
                    *keys[2:],
                ]
            )
            == 1
        )
    assert "nothing received" in capsys.readouterr().out


def test_secret_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    assert main(["events", "keygen", str(tmp_path)]) == 0
    assert (tmp_path / "kvtier.key_secret").stat().st_mode & 0o777 == 0o600


# -- bad input -------------------------------------------------------------------------------------

WRONG = {
    "tail localhost:5557": "ENDPOINT: expected an address such as tcp://127.0.0.1:5557",
    "tail tcp://127.0.0.1:99999": "ENDPOINT: expected an address",
    "tail tcp://127.0.0.1:1 --replay here": "--replay: expected an address",
    "tail tcp://127.0.0.1:1 --from-start": "--from-start: expected --replay ENDPOINT too",
    "tail tcp://127.0.0.1:1 --count 0": "Invalid value for '--count'",
    "tail tcp://127.0.0.1:1 --curve-key k": "--curve-key and --curve-server: expected both or none",
    "tail tcp://127.0.0.1:1 --curve-key k --curve-server s": "k: cannot read a CURVE key",
    "record tcp://127.0.0.1:1 nowhere/file": "nowhere/file: cannot be opened: No such file",
    "record tcp://127.0.0.1:1 other": "other: not a recording of events",
    "replay missing": "missing: cannot be opened: No such file",
    "replay other": "other: not a recording of events",
    "replay junk": "the record of batch 3: not an event batch",
    "replay stream --speed fast": "--speed: expected a number of at least 0.001, or max, got 'fast'",
    "replay stream --speed nan": "--speed: expected a number of at least 0.001, or max, got 'nan'",
    "replay stream --speed 1e-300": "--speed: expected a number of at least 0.001, or max, got '1e-300'",
    "replay stream --endpoint tcp://*:99999": "expected a port from 0 to 65535, got 99999",
    "replay stream --endpoint tcp://*:0 --replay tcp://*:65536": "a port from 0 to 65535, got 65536",
    "check tcp://127.0.0.1:1 --timeout 0": "Invalid value for '--timeout'",
    "check tcp://127.0.0.1:1 --timeout inf": "Invalid value for '--timeout'",
    "replay stream --keep": "expected --endpoint ENDPOINT too",
    "replay stream --endpoint tcp://*:0 --curve-clients d": "--curve-clients: expected --curve-key FILE too",
    "replay stream --endpoint nowhere": "expected one that begins with tcp://",
    "check tcp://127.0.0.1": "ENDPOINT: expected an address",
    "keygen keys": "keys/kvtier.key exists",
    "keygen new --name ../x": "name: expected the name of a file, without a folder, got '../x'",
    "keygen new --name=": "name: expected the name of a file, without a folder, got ''",
    "keygen other": "other: expected a folder that keys can be written to",
    "keygen other/new": "other/new: expected a folder that keys can be written to",
    "frobnicate": "No such command 'frobnicate'",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_bad_input_is_one_line(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_keys("keys", "kvtier")
    Path("other").write_text("something else entirely")
    write_recording(Path("stream"), batch(stored(1)))
    with RecordingWriter("junk") as writer:
        writer.write(RecordedBatch(1.0, 3, b"junk"))
    assert main(["events", *arguments.split()]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert WRONG[arguments] in one_line(errors)


def test_help_needs_no_sockets() -> None:
    code = (
        "import sys; sys.modules['zmq'] = None; from kvtier.cli import main; "
        "sys.exit(main(['events', 'tail', '--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--from-start" in done.stdout


def test_a_recording_that_is_resumed_forgets_what_it_held(tmp_path: Path) -> None:
    """A publisher may have lost everything between the two, and a stock one says no clear."""
    file = tmp_path / "stream"
    for first in (1, 2):
        update = Received("s", 0, KeptBatch.read(frame_batch(1.0, [EventEncoder().event(stored(first))], 0)))
        with RecordingWriter(file) as writer:
            _record([update], writer, "", None)
    with RecordingReader(file) as reader:
        assert [bool(record.payload) for record in reader] == [True, False, True]
