"""The settings of tiers below the pool, under `tiers` in a config.

    "tiers": [{"disk": {...}}, {"valkey": {...}}, {"object": {...}}, {"mooncake": {...}}]

A disk belongs to one engine. The other three are servers that engines of one namespace share. Secrets are
never settings: a password or a key is in a file, and its path is the setting. An error about a server's
settings never repeats a refused address or other text, since a secret may be in it. All objects are
immutable and may be shared by any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Self
from urllib.parse import SplitResult, urlsplit

from kvtier.config_fields import (
    at_least,
    check_names,
    is_text,
    one_of,
    optional,
    read_duration,
    read_fields,
    read_flag,
    read_name,
    read_path,
    read_size,
    read_text,
    setting,
    shown,
)
from kvtier.errors import ConfigError, show_value

DEFAULT_POLICY = "gittins"
_WRITES_A_DAY = 4
"""The default daily write limit, in capacities: about what a data-centre disk is made for, or a little more.
"""


def _read_url(*schemes: str, users: bool = False) -> Any:
    """Make a reader of addresses.

    It refuses an address that may hold a secret, because addresses are shown in logs. Without `users`, the
    service knows no user names, and text before an @ is taken for a token.

    Errors do not repeat a refused address: a password with a / or a # in it can end up in any of its parts.
    """

    def read(path: str, value: object) -> str:
        expected = (
            f"expected an address that begins with {' or '.join(f'{scheme}://' for scheme in schemes)}"
        )
        if not is_text(value) or not value:
            raise ConfigError(path, f"{expected}, got {_kind_of(value)}")
        text = str(value)
        try:
            parts = urlsplit(text)
        except ValueError:  # its message repeats the address
            raise ConfigError(path, f"{expected} and has a host behind it; got something else") from None
        behind = text.partition("://")[2].removeprefix(parts.netloc)
        if parts.password is not None or ("@" in behind and ":" in parts.netloc):
            raise ConfigError(
                path, "expected no password in the address, which is shown in logs; use a password_file"
            )
        if parts.username is not None and not users:
            raise ConfigError(path, "expected no user or token in the address, which is shown in logs")
        if parts.scheme not in schemes or "://" not in text:
            got = f"{show_value(parts.scheme)}://..." if parts.scheme and "://" in text else "something else"
            raise ConfigError(path, f"{expected}, got {got}")
        if parts.fragment or (parts.query and not _is_database(parts)):
            problem = (
                "expected nothing behind a ? or #: addresses are shown in logs, and secrets are often there"
            )
            raise ConfigError(path, problem)
        try:
            port = parts.port
        except ValueError:  # as above
            port = 0
        if port == 0:
            raise ConfigError(path, f"{expected}, with a port from 1 to 65535 if any; got another")
        return text

    return read


def _is_database(parts: SplitResult) -> bool:
    """Return whether the query of an address is the database of a Unix socket."""
    return parts.scheme == "unix" and parts.query.startswith("db=") and parts.query.isascii()


def _kind_of(value: object) -> str:
    """Describe a value without showing it, since a secret may be in it."""
    return "an empty string" if value == "" else f"a value of type {type(value).__name__}"


def _shown_name(name: object) -> str:
    """Return a name for an error message; hide anything else, such as an address or a password."""
    return name if isinstance(name, str) and name.replace("-", "_").isidentifier() else "(a name)"


def _read_server_fields(config: ValkeyConfig | ObjectConfig | MooncakeConfig) -> None:
    """Read the settings of a server. Errors do not repeat refused text, which may be a misplaced secret."""
    try:
        read_fields(config, f"{config.kind}.")
    except ConfigError as error:
        value = getattr(config, error.path.removeprefix(f"{config.kind}."))
        if isinstance(value, int | float):
            raise
        problem = str(error).removeprefix(f"{error.path}: ").replace(show_value(value), _kind_of(value))
        raise ConfigError(error.path, problem) from None


def _read_address(path: str, value: object) -> str:
    """Read `host:port`."""
    text = read_name(path, value)
    host, _, port = text.rpartition(":")
    if not host or "@" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            path, f"expected host:port, got {'something else' if '@' in text else show_value(text)}"
        )
    return text


class _TierTable:
    """The common base of the settings of all kinds of tiers."""

    __slots__ = ()
    kind: ClassVar[str]
    """The name of this kind of tier in the config, in explanations and in metrics."""

    @classmethod
    def from_dict(cls, values: object, where: str = "") -> Self:
        """Read the table under a kind in a config; `where` is its path there, such as `tiers[0].disk`."""
        where = where or cls.kind
        if not isinstance(values, Mapping):
            raise ConfigError(where, f"expected a table of settings, got {_kind_of(values)}")
        table = dict(values)
        check_names(cls, {_shown_name(name): None for name in table}, f"{where}.")
        try:
            return cls(**table)
        except ConfigError as error:
            problem = str(error).removeprefix(f"{error.path}: ")
            raise ConfigError(where + error.path.removeprefix(cls.kind), problem) from None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `from_dict` makes an equal config."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig(_TierTable):
    """A tier on a local disk: at most `capacity` bytes in the folder `path`, all files and ranks together.

    With `write` set to `through`, a row is written when it becomes ready in the pool; with `evict`, before
    it leaves. Beyond `write_limit` bytes in 24 hours (by default four times the capacity; 0 means no limit)
    a row is written only if the policy finds it worth more than a new one, or when it is offered a second
    time to a policy that cannot tell. With `durability` set to `periodic`, the files are synced every few
    seconds, for machines that lose power; correct bytes never depend on it. With `required`, the engine does
    not start without this tier. `engines` is the number of data-parallel engines that share the capacity. It
    is needed where the engine does not know that number, as in vLLM with a dense model. With
    `take_over_unused`, a start without room removes rows of other models that nobody has used for that long;
    by default it never does.
    """

    kind: ClassVar[str] = "disk"
    path: str = setting(read_path)
    capacity: int = setting(read_size)
    policy: str = setting(read_name, DEFAULT_POLICY)
    write: str = setting(one_of("through", "evict"), "through")
    write_limit: int | None = setting(optional(read_size), None)
    durability: str = setting(one_of("none", "periodic"), "none")
    required: bool = setting(read_flag, False)
    engines: int | None = setting(optional(at_least(1)), None)
    take_over_unused: float | None = setting(optional(read_duration), None)

    def __post_init__(self) -> None:
        read_fields(self, "disk.")
        if self.write_limit is None:
            object.__setattr__(self, "write_limit", _WRITES_A_DAY * self.capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyConfig(_TierTable):
    """A tier on a Valkey or Redis server: `valkey://user@host:6379/0`, `valkeys://` with TLS,
    `unix:///socket`.

    A row leaves `ttl` seconds after it was last written, if the server has not evicted it before; by default
    only the server decides. Names on the server begin with `prefix`. `write` and `required` are those of a
    disk. With `seal_key_file`, only rows sealed with the key in that file are accepted.
    """

    kind: ClassVar[str] = "valkey"
    url: str = setting(_read_url("valkey", "redis", "valkeys", "rediss", "unix", users=True))
    password_file: str | None = setting(optional(read_path), None)
    tls: bool = setting(read_flag, False)
    tls_ca_file: str | None = setting(optional(read_path), None)
    tls_cert_file: str | None = setting(optional(read_path), None)
    tls_key_file: str | None = setting(optional(read_path), None)
    ttl: float | None = setting(optional(read_duration), None)
    prefix: str = setting(read_name, "kvtier")
    connections: int = setting(at_least(1, 64), 4)
    write: str = setting(one_of("through", "evict"), "through")
    required: bool = setting(read_flag, False)
    seal_key_file: str | None = setting(optional(read_path), None)

    def __post_init__(self) -> None:
        _read_server_fields(self)
        parts = self.address
        if parts.scheme == "unix" and not parts.path.strip("/"):
            raise ConfigError("valkey.url", "expected the path of a socket behind unix://, got none")
        if parts.scheme != "unix" and not parts.hostname:
            raise ConfigError("valkey.url", "expected a host behind ://, got none")
        if parts.scheme == "unix" and self.tls:
            raise ConfigError("valkey.tls", "expected none on a Unix socket")
        database = self.database
        if database and not (database.isascii() and database.isdecimal() and len(database) < 10):
            where = "behind ?db=" if parts.scheme == "unix" else "behind the host"
            raise ConfigError(
                "valkey.url", f"expected the number of a database {where}, or nothing; got something else"
            )

    @property
    def place(self) -> str:
        """The server, for people."""
        return self.url

    @property
    def address(self) -> SplitResult:
        """The parts of the URL."""
        return urlsplit(self.url)

    @property
    def database(self) -> str:
        """The number of the database in the URL; empty if there is none."""
        parts = self.address
        return parts.query.removeprefix("db=") if parts.scheme == "unix" else parts.path.strip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectConfig(_TierTable):
    """A tier in an object store: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.

    Credentials come from the store's usual chain: environment, files, the machine's role. `endpoint` names a
    server other than the cloud's; a server without TLS needs `allow_http`. Up to `connections` calls run at
    once.
    """

    kind: ClassVar[str] = "object"
    url: str = setting(_read_url("s3", "gs", "az"))
    endpoint: str | None = setting(optional(_read_url("http", "https")), None)
    region: str | None = setting(optional(read_name), None)
    allow_http: bool = setting(read_flag, False)
    connections: int = setting(at_least(1, 256), 16)
    write: str = setting(one_of("through", "evict"), "through")
    required: bool = setting(read_flag, False)
    seal_key_file: str | None = setting(optional(read_path), None)

    def __post_init__(self) -> None:
        _read_server_fields(self)
        if not urlsplit(self.url).netloc:
            raise ConfigError("object.url", "expected a bucket behind ://, got none")
        prefix = urlsplit(self.url).path.strip("/")
        if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
            raise ConfigError("object.url", "expected a prefix without empty, . and .. parts, got one with")
        if self.endpoint is not None and self.endpoint.startswith("http://") and not self.allow_http:
            raise ConfigError(
                "object.endpoint", "expected https://, or allow_http with it, got http:// alone"
            )

    @property
    def place(self) -> str:
        """The bucket and, if it is not a cloud's, the server; for people."""
        return self.url if self.endpoint is None else f"{self.url} at {self.endpoint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig(_TierTable):
    """A tier in a Mooncake store: its master at `host:port`, and its metadata server.

    This process gives `segment` bytes of its own memory to the store; with 0 it only uses other processes'
    memory. `host` is the address under which others reach it, by default the one that faces the master.
    """

    kind: ClassVar[str] = "mooncake"
    master: str = setting(_read_address)
    metadata: str = setting(_read_url("http", "https", "etcd", "redis"))
    protocol: str = setting(one_of("tcp", "rdma"), "tcp")
    device: str = setting(read_text, "")
    segment: int = setting(read_size, 0)
    replicas: int = setting(at_least(1, 64), 1)
    host: str | None = setting(optional(read_name), None)
    prefix: str = setting(read_name, "kvtier")
    write: str = setting(one_of("through", "evict"), "through")
    required: bool = setting(read_flag, False)
    seal_key_file: str | None = setting(optional(read_path), None)

    def __post_init__(self) -> None:
        _read_server_fields(self)

    @property
    def place(self) -> str:
        """The store's master, for people."""
        return self.master


SharedTierConfig = ValkeyConfig | ObjectConfig | MooncakeConfig
"""The settings of a tier that engines share."""
TierConfig = DiskConfig | SharedTierConfig
"""The settings of any tier below the pool."""

_KINDS: dict[str, type[TierConfig]] = {
    cls.kind: cls for cls in (DiskConfig, ValkeyConfig, ObjectConfig, MooncakeConfig)
}
_OTHER_NAMES = {"redis": "valkey", "s3": "object", "ssd": "disk", "nvme": "disk"}
"""What people call a kind of tier, for the hint of an error."""


def read_tiers(path: str, value: object) -> tuple[TierConfig, ...]:
    """Read a list of tiers, from the fastest to the slowest, each kind once."""
    if not isinstance(value, (list, tuple)):
        example = '[{"disk": {"path": ..., "capacity": ...}}]'
        raise ConfigError(path, f"expected a list of tiers, {example}, got {_kind_of(value)}")
    tiers = tuple(_read_tier(f"{path}[{i}]", tier) for i, tier in enumerate(value))
    kinds = [tier.kind for tier in tiers]
    for i, kind in enumerate(kinds):
        if kind in kinds[:i]:
            raise ConfigError(
                f"{path}[{i}]", f"expected one tier of each kind, got a second {kind}; remove it"
            )
    return tiers


def _read_tier(path: str, value: object) -> TierConfig:
    """Read `{"disk": {...}}`: a tier's kind and its settings."""
    if isinstance(value, tuple(_KINDS.values())):
        return value  # type: ignore[return-value]
    if not isinstance(value, Mapping) or len(value) != 1:
        example = '{"disk": {"path": ..., "capacity": ...}}'
        got = f"{len(value)} names" if isinstance(value, Mapping) else _kind_of(value)
        raise ConfigError(path, f"expected the kind of one tier and its settings, {example}, got {got}")
    table = dict(value)
    ((kind, settings),) = table.items()
    if kind not in _KINDS:
        name = _OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else ""
        close = get_close_matches(name, _KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(_KINDS)}"
        raise ConfigError(f"{path}.{shown(_shown_name(kind))}", f"no such tier; {hint}")
    return _KINDS[kind].from_dict(settings, f"{path}.{kind}")
