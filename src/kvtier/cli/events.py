"""`kvtier events`: commands that show, record, replay and check a KV event stream.

Output goes to stdout line by line, remarks for people to stderr. Endless commands end with Ctrl-C, silently
and with exit code 0, and also when the reader of their output goes away (`| head`).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from kvtier.cli.streams import ending_quietly, expect_reader, print_lines, remark
from kvtier.errors import InputError

if TYPE_CHECKING:
    from kvtier.cli.event_reports import Lines
    from kvtier.events.curve import CurveClient, CurveServer
    from kvtier.events.follow.link import Source
    from kvtier.events.publisher import PublisherStats
    from kvtier.events.recording import KeptBatch, RecordedBatch, RecordingWriter
    from kvtier.events.subscriber import Subscriber
    from kvtier.events.types import KVEventBatch
    from kvtier.events.updates import Update
    from kvtier.events.wire import DecodedBatch

events_app = typer.Typer(help="Look at a KV event stream, record it, play it again, check it.")

_WAKE = 0.5
"""Seconds between two checks that the reader of our output is still there, while a stream is silent."""

_QUEUED = 1000
"""The most batches of a recording that wait to be published."""

_SLOWEST = 1e-3
"""The lowest speed of a replay. With less, a wait could be longer than the system allows."""

_Endpoint = Annotated[
    str,
    Argument(
        metavar="ENDPOINT",
        help="Where the publisher sends: tcp://HOST:PORT (tcp://*:PORT if it connects to us) or ipc://PATH.",
    ),
]
_Replay = Annotated[
    str | None, Option("--replay", metavar="ENDPOINT", help="Where it answers: repairs and snapshots.")
]
_Topic = Annotated[str, Option(help="Take only topics that begin like this.")]
_Json = Annotated[bool, Option("--json", help="Print JSON lines.")]
_Count = Annotated[int | None, Option("--count", "-n", metavar="N", min=1, help="End after N batches.")]
_File = Annotated[Path, Argument(metavar="FILE", help="The recording.")]
Key = Annotated[str | None, Option("--curve-key", metavar="FILE", help="Our secret key (NAME.key_secret).")]
ServerKey = Annotated[
    str | None, Option("--curve-server", metavar="FILE|KEY", help="The publisher's public key.")
]

_ADDRESS = re.compile(r"tcp://(?:[^:/\s]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})|ipc://.+")


@events_app.command("tail")
def tail_command(
    endpoint: _Endpoint,
    replay: _Replay = None,
    topic: _Topic = "",
    as_json: _Json = False,
    from_start: Annotated[
        bool, Option("--from-start", help="Begin with what the publisher already holds.")
    ] = False,
    count: _Count = None,
    curve_key: Key = None,
    curve_server: ServerKey = None,
) -> None:
    """Print what a publisher sends, as it arrives, and how far it can be trusted."""
    if from_start and replay is None:
        raise InputError(
            "--from-start: expected --replay ENDPOINT too; what was said before can only be asked for"
        )
    source = _source(endpoint, replay, topic, curve_key, curve_server)
    with ending_quietly(), _following(source) as updates:
        _tail(updates, _lines(as_json), from_start or replay is None, count)


def _tail(updates: Iterable[Update], lines: Lines, joined: bool, count: int | None) -> None:
    """Print updates; before `joined`, updates that only bring us up to date are left out."""
    from kvtier.events.updates import Received, Reset, State, StateChanged

    shown = 0
    for update in updates:
        now = time.time()
        if isinstance(update, StateChanged):
            joined = joined or update.state is not State.REPAIRING
            print_lines(lines.state(now, update.state, update.reason))
        elif isinstance(update, Received) and joined:
            print_lines(lines.batch(now, update.seq, update.batch))
            shown += 1
        elif isinstance(update, Reset) and joined:
            print_lines(lines.forgotten(now))
        if shown == count:
            return


@events_app.command("record")
def record_command(
    endpoint: _Endpoint,
    file: Annotated[Path, Argument(metavar="FILE", help="Where to append; made if it does not exist.")],
    replay: _Replay = None,
    topic: _Topic = "",
    count: _Count = None,
    curve_key: Key = None,
    curve_server: ServerKey = None,
) -> None:
    """Append what a publisher sends to a file.

    With --replay it begins with what the publisher holds, and has no holes.
    """
    from kvtier.events.recording import RecordingWriter

    source = _source(endpoint, replay, topic, curve_key, curve_server)
    with ending_quietly(), _following(source) as updates, RecordingWriter(file) as writer:
        if writer.cut:
            remark(f"{file}: cut off {writer.cut} bytes of a record that was never finished")
        try:
            _record(updates, writer, topic, count)
        finally:
            remark(f"{file}: {writer.records:,} records")


def _record(updates: Iterable[Update], writer: RecordingWriter, topic: str, count: int | None) -> None:
    from kvtier.events.recording import RecordedBatch
    from kvtier.events.updates import Received, Reset, StateChanged

    written, is_resumed = 0, writer.records > 0
    for update in updates:
        now = time.time()
        if is_resumed and isinstance(update, Received):
            # the blocks of an earlier recording are not those held now
            writer.write(RecordedBatch(now, 0, b"", topic))
            is_resumed = False
        if isinstance(update, StateChanged):
            remark(f"{update.state}{': ' if update.reason else ''}{update.reason}")
        elif isinstance(update, Reset):
            writer.write(RecordedBatch(now, 0, b"", topic))
        elif isinstance(update, Received):
            writer.write(RecordedBatch(now, update.seq, update.batch.payload, topic))
            written += 1
        if written == count:
            return


@events_app.command("replay")
def replay_command(
    file: _File,
    endpoint: Annotated[
        str | None, Option(metavar="ENDPOINT", help="Publish here (tcp://*:5557) instead of printing.")
    ] = None,
    replay: Annotated[
        str | None, Option("--replay", metavar="ENDPOINT", help="Answer replay requests here.")
    ] = None,
    topic: Annotated[str, Option(help="Publish under this topic.")] = "",
    speed: Annotated[
        str, Option(metavar="X|max", help="How many times as fast as it was recorded.")
    ] = "1.0",
    keep: Annotated[
        bool, Option("--keep", help="Stay there after the end, for whoever comes late.")
    ] = False,
    as_json: _Json = False,
    curve_key: Key = None,
    curve_clients: Annotated[
        str | None, Option(metavar="DIR", help="Only clients whose public keys are here may come.")
    ] = None,
) -> None:
    """Print a recording, or publish it again as a live stream with its own sequence numbers, replay and
    snapshots.
    """
    from kvtier.events.recording import RecordingReader

    factor = _speed(speed)
    if endpoint is None and (replay or keep or curve_key or curve_clients or topic):
        raise InputError(
            "--replay, --topic, --keep and keys: expected --endpoint ENDPOINT too, "
            "without which nothing is published"
        )
    with RecordingReader(file) as reader, ending_quietly():
        if endpoint is None:
            _print_recording(reader, _lines(as_json))
        else:
            _publish_recording(
                reader, factor, keep, endpoint, replay, topic, _curve_server(curve_key, curve_clients)
            )
        if reader.torn:
            remark(f"{file}: ends with {reader.torn} bytes of a record that was never finished")


def _print_recording(records: Iterable[RecordedBatch], lines: Lines) -> None:
    for record in records:
        if record.payload:
            print_lines(lines.batch(record.time, record.seq, _read(record)))
        else:
            print_lines(lines.forgotten(record.time))


def _read(record: RecordedBatch) -> DecodedBatch:
    from kvtier.events.wire import decode_batch

    try:
        return decode_batch(record.payload)
    except ValueError as error:
        raise InputError(f"the record of batch {record.seq}: {error}") from None


def _publish_recording(
    records: Iterable[RecordedBatch],
    speed: float,
    keep: bool,
    endpoint: str,
    replay: str | None,
    topic: str,
    curve: CurveServer | None,
) -> None:
    from kvtier.events.config import KVEventsConfig
    from kvtier.events.publisher import ZmqEventPublisher

    publisher = ZmqEventPublisher(
        0, endpoint, replay, topic=topic, config=KVEventsConfig(counting="set", curve=curve, bind=True)
    )
    try:
        remark(
            f"publishing on {publisher.endpoint}"
            + (f", replay on {publisher.replay_endpoint}" if replay else "")
        )
        for number, batch in enumerate(_paced(records, speed), 1):
            publisher.publish(batch)
            if number % _QUEUED == 0:
                publisher.flush()  # it would drop batches that it cannot hold
        publisher.flush()
        remark(_describe_published(publisher.stats()))
        while keep:
            time.sleep(3600)
    finally:
        publisher.shutdown()


def _describe_published(stats: PublisherStats) -> str:
    """Return how many batches of a recording were published, without its first one and heartbeats."""
    published = stats.sent + stats.joined - stats.heartbeats - 1
    left_out = {"with nothing new": stats.filtered, "events that cannot be read": stats.unencodable}
    return f"{published:,} batches published" + "".join(
        f", {number:,} {what} left out" for what, number in left_out.items() if number
    )


def _paced(records: Iterable[RecordedBatch], speed: float) -> Iterator[KVEventBatch]:
    """Yield recorded batches when they are due; a forgotten state becomes a clearing batch for each rank."""
    from kvtier.events.types import AllBlocksCleared, KVEventBatch

    begun, first = time.monotonic(), None
    ranks: dict[int, None] = {}
    for record in records:
        first = record.time if first is None else first
        time.sleep(max(0.0, (record.time - first) / speed - (time.monotonic() - begun)))
        if record.payload:
            batch = _read(record)
            ranks[batch.data_parallel_rank or 0] = None
            yield KVEventBatch(batch.ts, batch.events, batch.data_parallel_rank)
        else:
            yield from (KVEventBatch(record.time, [AllBlocksCleared()], rank) for rank in ranks or (0,))


@events_app.command("check")
def check_command(
    endpoint: _Endpoint,
    replay: _Replay = None,
    topic: _Topic = "",
    timeout: Annotated[
        float,
        Option(metavar="SECONDS", min=0.1, max=86_400, help="How long to wait for the publisher's word."),
    ] = 10.0,
    curve_key: Key = None,
    curve_server: ServerKey = None,
) -> None:
    """Join a publisher and compare its digest with that of its announcements.

    Exits with 1 if they differ, or if some announcements are missing. An idle publisher is not at fault.
    """
    from kvtier.cli.event_reports import examine_stream

    report = examine_stream(_source(endpoint, replay, topic, curve_key, curve_server), timeout)
    print_lines(report.lines)
    raise typer.Exit(0 if report.is_good else 1)


@events_app.command("keygen")
def keygen_command(
    folder: Annotated[Path, Argument(metavar="DIR", help="Where the key files go.")],
    name: Annotated[str, Option(help="What to call them.")] = "kvtier",
) -> None:
    """Make a CURVE key pair: NAME.key to hand out, NAME.key_secret to keep."""
    from kvtier.events.curve import make_keys

    public, secret = make_keys(folder, name)
    print_lines([f"{public}  public: give it to the other side", f"{secret}  secret: keep it here"])


# -- shared by the commands ------------------------------------------------------------------------


def expect_address(option: str, text: str) -> None:
    """Refuse a text that is not the address of a publisher."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[1] or 1) < 1 << 16:
        raise InputError(
            f"{option}: expected an address such as tcp://127.0.0.1:5557 or ipc://PATH, got {text!r}"
        )


def curve_client(key: str | None, server: str | None) -> CurveClient | None:
    """Return the keys of a subscriber, `None` if it uses none."""
    from kvtier.events.curve import CurveClient

    if (key is None) != (server is None):
        raise InputError("--curve-key and --curve-server: expected both or none")
    return CurveClient(key, server) if key is not None and server is not None else None


@contextmanager
def _following(source: Source) -> Iterator[Iterator[Update]]:
    """Yield the source's updates, as long as our output is read."""
    from kvtier.events.recording import KeptBatch
    from kvtier.events.subscriber import Subscriber

    with Subscriber(decode=KeptBatch.read) as subscriber:
        subscriber.add(source)
        yield _updates(subscriber)


def _updates(subscriber: Subscriber[KeptBatch]) -> Iterator[Update]:
    while True:
        yield from subscriber.poll(_WAKE)
        expect_reader()


def _lines(as_json: bool) -> Lines:
    from kvtier.cli.event_reports import HumanLines, JSONLines

    return JSONLines() if as_json else HumanLines()


def _source(endpoint: str, replay: str | None, topic: str, key: str | None, server: str | None) -> Source:
    from kvtier.events.follow.link import Source

    expect_address("ENDPOINT", endpoint)
    if replay is not None:
        expect_address("--replay", replay)
    return Source(endpoint, endpoint, replay, topic, curve_client(key, server))


def _curve_server(key: str | None, clients: str | None) -> CurveServer | None:
    from kvtier.events.curve import CurveServer

    if key is None and clients is not None:
        raise InputError("--curve-clients: expected --curve-key FILE too, our own secret key")
    return None if key is None else CurveServer(key, clients)


def _speed(text: str) -> float:
    try:
        speed = math.inf if text == "max" else float(text)
    except ValueError:
        speed = 0.0
    if not speed >= _SLOWEST:
        raise InputError(f"--speed: expected a number of at least {_SLOWEST:g}, or max, got {text!r}")
    return speed
