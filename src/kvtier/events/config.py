"""`KVEventsConfig`: how events are published, and the addresses of data-parallel ranks.

Has the fields and defaults of vLLM's config, and fields of our own.

Everything is checked once, when the object is made; a bad value is a `ConfigError` that names its field. The
object is immutable; any thread may use it.

Rank r moves its base address by r: the port of tcp, a suffix `_dp{r}` of ipc and inproc.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Self

from kvtier.errors import ConfigError, InputError, show_value
from kvtier.events.curve import CurveServer
from kvtier.events.wire import array_fields
from kvtier.events.wire_structs import Encoding

HASH_FORMATS = ("as_is", "u64")
COUNTINGS = ("count", "set")
VLLM_FIELDS = ("endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic")
"""The fields that every registered publisher gets by name.

It gets the whole config if any other field was set.
"""
_MOST = (1 << 31) - 1
"""The highest allowed count: ZeroMQ takes ints of 32 bits, and no machine has memory for more batches."""
_DAY = 24 * 3600
_TCP = re.compile(r"(tcp://.*):(\d+)")
_LAST_PORT = 65535


@dataclass(frozen=True)
class KVEventsConfig:
    """Whether, where and how KV cache events are published.

    - `publisher`: `zmq`, `null`, or a registered name; by default `zmq` if events are enabled and `null` if
      not.
    - `endpoint`: PUB address. It is bound if it has `*`, `::` or port 0, or is ipc or inproc; else
      connected to.
    - `replay_endpoint`: ROUTER address for replay and snapshots, always bound; `None` for no replay.
    - `buffer_steps`, `buffer_bytes`: how many batches, and how many bytes of them, are kept for replay.
    - `hwm`: how many messages wait for a slow subscriber before it misses some; about `buffer_bytes` at
      most (0: without any bound).
    - `max_queue_size`: how many batches may wait for the publisher's thread. If more wait, they are not
      sent: only their effect on the state is kept. Twice as many, and at least 10,000, find room; if the
      queue is full, batches are lost, and consumers are told to forget all blocks. If more than 64 wait, up
      to 32 travel as one, with all their events, the last one's time and one number.
    - `encoding`, `array_version`: events as `map` (vLLM 0.24 and later) or as `array`, with the fields of
      that version.
    - `hash_format`: `u64` (the low 64 bits, as Dynamo wants them; vLLM's ints unchanged) or `as_is` (bytes
      stay bytes).
    - `counting`: `count` if a block stored twice must be removed twice, `set` if one removal ends it.
    - `heartbeat_interval`: seconds of silence before a heartbeat, and the least time between two marks;
      `None` for no heartbeats.
    - `clear_on_start`: tell consumers to forget the events of an earlier process.
    - `sequence_file`: the file that keeps the sequence number across restarts; ranks above 0 append
      `.dp{rank}`. Without a file the first number comes from the clock.
    - `replay_topic_frame`: whether replies carry the topic (vLLM 0.26, SGLang 0.5.22 and later) or not
      (before).
    - `max_blocks_per_event`: cut stored events into parts of at most this many blocks; 1,024 at most.
    - `curve`: encrypt and authenticate both sockets.
    - `bind`: bind `endpoint` (true) or connect to it (false); `None` decides by its form, as said above.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    encoding: str = "map"
    array_version: str = "0.23"
    hash_format: str = "u64"
    counting: str = "count"
    heartbeat_interval: float | None = 1.0
    clear_on_start: bool = True
    sequence_file: str | None = None
    replay_topic_frame: bool = True
    max_blocks_per_event: int | None = None
    buffer_bytes: int = 256 << 20
    curve: CurveServer | None = None
    bind: bool | None = None

    def __post_init__(self) -> None:
        """Check every field, and fill in derived values."""
        if self.publisher is None:
            object.__setattr__(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")
        if isinstance(self.curve, Mapping):
            object.__setattr__(self, "curve", CurveServer.from_mapping(self.curve))
        for name in ("enable_kv_cache_events", "clear_on_start", "replay_topic_frame"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        _check("bind", self.bind, self.bind is None or isinstance(self.bind, bool), "true, false or nothing")
        for name in ("publisher", "endpoint", "topic", "array_version"):
            value = getattr(self, name)
            good = isinstance(value, str) and value.isprintable() and (value or name == "topic")
            _check(name, value, good, "a string that can be printed")
        for name in ("replay_endpoint", "sequence_file"):
            value = getattr(self, name)
            _check(name, value, value is None or (isinstance(value, str) and value), "a string or nothing")
        for name, least in (("buffer_steps", 1), ("hwm", 0), ("max_queue_size", 1)):
            _check_count(name, getattr(self, name), least, _MOST)
        _check_count("buffer_bytes", self.buffer_bytes, 1, (1 << 63) - 1)
        self._check_choices()

    def _check_choices(self) -> None:
        _check_one_of("encoding", self.encoding, [encoding.value for encoding in Encoding])
        _check_one_of("hash_format", self.hash_format, HASH_FORMATS)
        _check_one_of("counting", self.counting, COUNTINGS)
        beat, most = self.heartbeat_interval, self.max_blocks_per_event
        good = beat is None or (
            isinstance(beat, (int, float)) and not isinstance(beat, bool) and 0 < beat <= _DAY
        )
        _check(
            "heartbeat_interval", beat, good, f"seconds greater than 0 and up to a day ({_DAY}), or nothing"
        )
        if most is not None:
            _check_count("max_blocks_per_event", most, 1, _MOST, ", or nothing")
        _check(
            "curve", self.curve, self.curve is None or isinstance(self.curve, CurveServer), "a CurveServer"
        )
        try:
            array_fields(self.array_version)
        except ValueError as error:
            raise ConfigError("array_version", str(error)) from None

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Self:
        """Make a config from the names and values of a JSON file."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                shown = (
                    name
                    if isinstance(name, str) and name.isprintable() and len(name) < 80
                    else show_value(name)
                )
                near = get_close_matches(shown, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
                raise ConfigError(shown, f"unknown field{hint}")
        return cls(**settings)


def _check_count(name: str, value: object, least: int, most: int, more: str = "") -> None:
    enough = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _check(name, value, enough, f"a whole number of at least {least}{more}")
    _check(name, value, isinstance(value, int) and value <= most, f"a whole number of at most {most}{more}")


def _check(name: str, value: object, good: object, expected: str) -> None:
    if not good:
        raise ConfigError(name, f"expected {expected}, got {show_value(value)}")


def _check_one_of(name: str, value: object, choices: Sequence[str]) -> None:
    _check(name, value, value in choices, "one of " + ", ".join(choices))


# -- addresses -------------------------------------------------------------------------------------


def offset_endpoint(endpoint: str | None, rank: int) -> str | None:
    """Return the address of a data-parallel rank; port 0 stays 0, because the system picks one."""
    if not endpoint:
        return endpoint
    if "tcp" in endpoint:
        base, port = _split_tcp(endpoint)
        if port == 0 or rank == 0:
            return endpoint
        if port + rank > _LAST_PORT:
            raise InputError(
                f"{endpoint}: rank {rank} would have port {port + rank}; expected at most {_LAST_PORT}"
            )
        return f"{base}:{port + rank}"
    if "inproc" in endpoint or "ipc" in endpoint:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    raise InputError(
        f"{endpoint!r} is no address of a publisher: expected one that begins with tcp://, "
        "ipc:// or inproc://"
    )


def expect_port(endpoint: str) -> None:
    """Refuse a port that libzmq would silently reduce modulo 65,536."""
    match = _TCP.fullmatch(endpoint)
    if match is not None and (len(match[2]) > 9 or int(match[2]) > _LAST_PORT):
        raise InputError(f"{endpoint!r}: expected a port from 0 to {_LAST_PORT}, got {match[2][:20]}")


def _split_tcp(endpoint: str) -> tuple[str, int]:
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise InputError(f"{endpoint!r} has no port: expected one at its end, like tcp://*:5557")
    expect_port(endpoint)
    return match[1], int(match[2])


def check_ports(endpoint: str, replay_endpoint: str | None, rank: int) -> None:
    """Raise if this rank's ports must collide with those of this rank or a lower one.

    Takes the base addresses.
    """
    if replay_endpoint is None:
        return
    if endpoint == replay_endpoint and not endpoint.endswith(":0"):
        raise InputError(f"endpoint and replay_endpoint are both {endpoint}: expected two addresses")
    if not (endpoint.startswith("tcp") and replay_endpoint.startswith("tcp")):
        return
    port, replay_port = _split_tcp(endpoint)[1], _split_tcp(replay_endpoint)[1]
    if port and replay_port and abs(replay_port - port) <= rank:
        raise InputError(
            f"ports {port} (endpoint) and {replay_port} (replay_endpoint) are {abs(replay_port - port)} "
            f"apart, so rank {rank} "
            f"meets a lower rank's: put them further apart than there are data-parallel ranks"
        )


def is_bound(endpoint: str) -> bool:
    """Return whether a PUB socket binds this address; it connects to other addresses."""
    return (
        "*" in endpoint
        or "::" in endpoint
        or endpoint.startswith(("ipc://", "inproc://"))
        or endpoint.endswith(":0")
    )


def client_endpoint(endpoint: str) -> str:
    """Return the address with which clients reach a bound one; for a wildcard, this machine's own."""
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or host not in ("*", "0.0.0.0", "::", "[::]"):
        return endpoint
    return f"tcp://{_own_address()}{colon}{port}"


def _own_address() -> str:
    """Return the address that this machine uses towards others, or the loopback one. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Reserved for documentation: routed like any other address, but no machine has it.
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address
