"""`KVEventsConfig`: how events are published, and the addresses of data-parallel ranks.

Has the fields and defaults of vLLM's config, and fields of our own.

Everything is checked once, when the object is made; a bad value is a `ConfigError` that names its field. The
object is immutable; any thread may use it.

Rank r moves its base address by r: the port of tcp, a suffix `_dp{r}` of ipc and inproc.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from kvtier.config_fields import (
    LARGEST,
    at_least,
    instance,
    one_of,
    optional,
    read_fields,
    read_flag,
    read_name,
    setting,
)
from kvtier.errors import ConfigError, InputError, show_value
from kvtier.events.curve import CurveServer
from kvtier.events.wire import array_fields
from kvtier.events.wire_structs import Encoding

VLLM_FIELDS = ("endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic")
"""The fields that every registered publisher gets by name.

It gets the whole config if any other field was set.
"""
_DAY = 24 * 3600
_TCP = re.compile(r"(tcp://.*):(\d+)")
_LAST_PORT = 65535


def _read_text(path: str, value: object) -> str:
    if not (isinstance(value, str) and value.isprintable()):
        raise ConfigError(path, f"expected a string that can be printed, got {show_value(value)}")
    return value


def _read_address(path: str, value: object) -> str:
    if not _read_text(path, value):
        raise ConfigError(path, "expected an address such as tcp://*:5557, got an empty one")
    return str(value)


def _read_version(path: str, value: object) -> str:
    version = _read_text(path, value)
    try:
        array_fields(version)
    except ValueError as error:
        raise ConfigError(path, str(error)) from None
    return version


def _read_interval(path: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _DAY:
        expected = f"seconds greater than 0 and up to a day ({_DAY}), or nothing"
        raise ConfigError(path, f"expected {expected}, got {show_value(value)}")
    return value


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

    enable_kv_cache_events: bool = setting(read_flag, False)
    publisher: str | None = setting(optional(read_name), None)
    endpoint: str = setting(_read_address, "tcp://*:5557")
    replay_endpoint: str | None = setting(optional(_read_address), None)
    buffer_steps: int = setting(at_least(1), 10_000)
    hwm: int = setting(at_least(0), 100_000)
    max_queue_size: int = setting(at_least(1), 100_000)
    topic: str = setting(_read_text, "")
    encoding: str = setting(one_of(*(encoding.value for encoding in Encoding)), "map")
    array_version: str = setting(_read_version, "0.23")
    hash_format: str = setting(one_of("as_is", "u64"), "u64")
    counting: str = setting(one_of("count", "set"), "count")
    heartbeat_interval: float | None = setting(optional(_read_interval), 1.0)
    clear_on_start: bool = setting(read_flag, True)
    sequence_file: str | None = setting(optional(read_name), None)
    replay_topic_frame: bool = setting(read_flag, True)
    max_blocks_per_event: int | None = setting(optional(at_least(1)), None)
    buffer_bytes: int = setting(at_least(1, LARGEST), 256 << 20)
    curve: CurveServer | None = setting(optional(instance(CurveServer)), None)
    bind: bool | None = setting(optional(read_flag), None)

    def __post_init__(self) -> None:
        """Check every field, and fill in derived values."""
        read_fields(self)
        if self.publisher is None:
            object.__setattr__(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")


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
