"""What a user may set, and what the engine adds to it: validated once, with the path of the bad field in the error.

`KVTierConfig` is the user's: a Python object, a JSON or TOML file, or the extra config of an engine's connector. Sizes
and times are readable (`"8GiB"`, `"500ms"`), unknown fields are errors with a suggestion, and the names of vLLM's own
offloading connector are understood. Whatever comes, an error is a `ConfigError` of one line. `OffloadingConfig` adds the
engine's geometry; every size that the rest of kvtier needs is derived from it here. All objects are immutable and may be
shared by any thread.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from kvtier.errors import ConfigError, show_value
from kvtier.namespace import Namespace

__all__ = [
    "LEAST_STAGING",
    "ROW_ALIGNMENT",
    "CPUConfig",
    "DiskConfig",
    "GroupConfig",
    "KVTierConfig",
    "OffloadingConfig",
    "Recompute",
    "TierConfig",
    "format_size",
    "parse_duration",
    "parse_size",
]

ROW_ALIGNMENT = 4096
"""Rows are whole pages of host memory, so that any row can be read and written with direct I/O."""

LEAST_STAGING = 1 << 20
"""With less, pieces would be smaller than 128 KiB: eight buffers share it."""

_LARGEST = (1 << 63) - 1
"""No file and no memory has more bytes."""
_MOST = (1 << 31) - 1
"""No count is higher: compiled code keeps some of them in 32 bits."""
_LONGEST = 365 * 24 * 3600
"""No wait takes more than a year; clocks and polls of the system have bounds of their own."""
_LONGEST_FILE = 1 << 20
_WRITES_A_DAY = 4
"""Times its capacity: what a data-centre disk is commonly made for, or a little more."""

_BINARY = {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTPE", start=1)}
_DECIMAL = {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGTPE", start=1)}
_SIZES = {"": 1, "B": 1} | {unit[:end]: factor for end in (-1, None) for unit, factor in (_DECIMAL | _BINARY).items()}
"""As Kubernetes writes them: `8G` is `8GB`, 8 * 10**9, and `8Gi` is `8GiB`, 8 * 2**30. Case does not matter."""
_TIMES = {
    "": Fraction(1),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
_QUANTITY = re.compile(r"\s*([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})\s*([a-zA-Z]*)\s*")

_VLLM_NAMES = {
    "cpu_bytes_to_use": "cpu.capacity",
    "eviction_policy": "cpu.policy",
    "block_size": "chunk_tokens",
    "offload_prompt_only": "prompt_only",
}
"""Where the fields of vLLM's own connector go. Those of equal name and meaning need no entry."""

_TRANSFER_CONFIG = {"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.integrations.vllm"}
"""What stands around the settings in vLLM's `--kv-transfer-config`."""


def parse_size(value: object, path: str = "") -> int:
    """Return a number of bytes from `8589934592`, `"8GiB"`, `"8Gi"`, `"8G"` or `"1.5 TB"`.

    Bytes come whole: `8.5` is an error, `8.0` is 8. What a larger unit leaves of a byte is dropped.
    """
    number, factor = _quantity(value, path, _SIZES, "a size such as 8GiB, 500MB or a number of bytes")
    if factor == 1 and number.denominator != 1:
        expected = "expected a whole number of bytes, or a unit as in 8.5GiB"
        raise ConfigError(path, f"{expected}, got {show_value(value)}")
    if number * factor > _LARGEST:
        raise ConfigError(path, f"expected a size below {format_size(_LARGEST)}, got {show_value(value)}")
    return math.floor(number * factor)


def parse_duration(value: object, path: str = "") -> float:
    """Return seconds from `2`, `0.5`, `"500ms"`, `"2s"`, `"5m"` or `"1h"`, a year at most."""
    number, factor = _quantity(value, path, _TIMES, "a time such as 500ms, 2s or a number of seconds")
    if number * factor > _LONGEST:
        raise ConfigError(path, f"expected a year (8760h) at most, got {show_value(value)}")
    return float(number * factor)


def format_size(size: int) -> str:
    """Write bytes for people: `4.0 MiB`, `512 B`."""
    for unit, factor in reversed(_BINARY.items()):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _quantity(
    value: object, path: str, units: Mapping[str, int | Fraction], expected: str
) -> tuple[Fraction, int | Fraction]:
    """Return a number that is 0 or more, and what its unit multiplies it by."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return Fraction(value), 1
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    factor = {unit.lower(): factor for unit, factor in units.items()}.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(path, f"expected {expected}, got {show_value(value)}")
    return Fraction(match[1]), factor


# Readers: each turns what came into what is stored, or raises with the path of the field.
_Reader = Callable[[str, Any], Any]


def _read_size(path: str, value: object) -> int:
    return parse_size(value, path)


def _read_staging(path: str, value: object) -> int:
    size = parse_size(value, path)
    if size < LEAST_STAGING:
        raise ConfigError(path, f"expected at least {format_size(LEAST_STAGING)}, got {show_value(value)}")
    return size


def _read_duration(path: str, value: object) -> float:
    seconds = parse_duration(value, path)
    if seconds <= 0:
        raise ConfigError(path, f"expected a time greater than 0, got {show_value(value)}")
    return seconds


def _read_flag(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(path, f"expected true or false, got {show_value(value)}")
    return value


def _read_name(path: str, value: object) -> str:
    if not _is_text(value) or not value:
        raise ConfigError(path, f"expected a name, got {show_value(value)}")
    return str(value)


def _read_text(path: str, value: object) -> str:
    if not _is_text(value):
        raise ConfigError(path, f"expected a string, got {show_value(value)}")
    return str(value)


def _is_text(value: object) -> bool:
    """Say whether a value is a string that can be encoded: half a surrogate pair, as JSON may bring, cannot."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _read_namespace(path: str, value: object) -> str | Namespace:
    if not isinstance(value, (str, Namespace)):
        raise ConfigError(path, f"expected a string or a Namespace, got {show_value(value)}")
    return value


def _one_of(*choices: str) -> _Reader:
    def read(path: str, value: object) -> str:
        if value not in choices:
            close = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
            hint = f"; did you mean {close[0]!r}?" if close else ""
            expected = " or ".join(map(repr, choices))
            raise ConfigError(path, f"expected {expected}, got {show_value(value)}{hint}")
        return str(value)

    return read


def _read_path(path: str, value: object) -> str:
    if not isinstance(value, (str, Path)) or not _is_text(str(value)) or not str(value) or "\0" in str(value):
        raise ConfigError(path, f"expected a folder, got {show_value(value)}")
    return os.path.abspath(os.path.expanduser(value))


def _read_tiers(path: str, value: object) -> tuple[TierConfig, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(path, f"expected a list of tiers, got {show_value(value)}")
    tiers = tuple(_read_tier(f"{path}[{i}]", tier) for i, tier in enumerate(value))
    kinds = [tier.kind for tier in tiers]
    for i, kind in enumerate(kinds):
        if kind in kinds[:i]:
            raise ConfigError(f"{path}[{i}]", f"expected one tier of each kind, got a second {kind}; remove it")
    return tiers


def _read_tier(path: str, value: object) -> TierConfig:
    """Read `{"disk": {...}}`: a tier's kind and its settings."""
    if isinstance(value, DiskConfig):
        return value
    table = _expect_table(path, value)
    if len(table) != 1:
        example = '{"disk": {"path": ..., "capacity": ...}}'
        raise ConfigError(path, f"expected the kind of one tier and its settings, {example}, got {show_value(value)}")
    ((kind, settings),) = table.items()
    if kind not in _TIER_KINDS:
        planned = kind in _PLANNED_KINDS
        close = get_close_matches(str(kind), (*_TIER_KINDS, *_PLANNED_KINDS), n=1)
        hint = "this version of kvtier has no such tier" if planned else "no such tier"
        hint += f"; did you mean {close[0]}?" if close and not planned else f"; there is {', '.join(_TIER_KINDS)}"
        raise ConfigError(f"{path}.{_shown(kind)}", hint)
    return _TIER_KINDS[kind].from_dict(settings, f"{path}.{kind}")


def _read_layer_names(path: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(path, f"expected the names of one layer or more, got {show_value(value)}")
    return tuple(_read_name(f"{path}[{i}]", name) for i, name in enumerate(value))


def _at_least(minimum: int, maximum: int = _MOST) -> _Reader:
    def read(path: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(path, f"expected a whole number of at least {minimum}, got {show_value(value)}")
        if value > maximum:
            raise ConfigError(path, f"expected a whole number of at most {maximum}, got {show_value(value)}")
        return value

    return read


def _optional(reader: _Reader) -> _Reader:
    return lambda path, value: None if value is None else reader(path, value)


def _instance(cls: type) -> _Reader:
    def read(path: str, value: object) -> object:
        if not isinstance(value, cls):
            raise ConfigError(path, f"expected a {cls.__name__}, got {show_value(value)}")
        return value

    return read


def _setting(reader: _Reader, default: Any = MISSING) -> Any:
    """Declare a dataclass field that is read by `reader`."""
    return field(default=default, metadata={"reader": reader})


def _read_fields(config: Any, prefix: str = "") -> None:
    """Pass every field of a frozen dataclass through its reader."""
    for setting in fields(config):
        value = setting.metadata["reader"](prefix + setting.name, getattr(config, setting.name))
        object.__setattr__(config, setting.name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUConfig:
    """The pool in host memory: `capacity` bytes over all ranks, and who leaves when it is full. With 0 nothing is kept."""

    capacity: int = _setting(_read_size)
    policy: str = _setting(_read_name, "lru")

    def __post_init__(self) -> None:
        _read_fields(self, "cpu.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """A tier on a local disk: at most `capacity` bytes in the folder `path`, all files and ranks together.

    `write`: a row is written when it becomes ready in the pool (`through`), or before it leaves (`evict`).
    Beyond `write_limit` bytes in 24 hours (by default four times the capacity; 0: no limit) only what is offered
    a second time is written. `durability`: `periodic` syncs every few seconds, for machines that lose power;
    right bytes need neither. `required`: an engine does not start without it.
    """

    path: str = _setting(_read_path)
    capacity: int = _setting(_read_size)
    policy: str = _setting(_read_name, "lru")
    write: str = _setting(_one_of("through", "evict"), "through")
    write_limit: int | None = _setting(_optional(_read_size), None)
    durability: str = _setting(_one_of("none", "periodic"), "none")
    required: bool = _setting(_read_flag, False)

    def __post_init__(self) -> None:
        _read_fields(self, "disk.")
        if self.write_limit is None:
            object.__setattr__(self, "write_limit", _WRITES_A_DAY * self.capacity)

    @classmethod
    def from_dict(cls, values: object, where: str = "disk") -> Self:
        """Read what stands in a config under `disk`; `where` is its path there, such as `tiers[0].disk`."""
        table = _expect_table(where, values)
        _check_names(cls, table, f"{where}.")
        try:
            return cls(**table)
        except ConfigError as error:
            problem = str(error).removeprefix(f"{error.path}: ")
            raise ConfigError(where + error.path.removeprefix("disk"), problem) from None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `from_dict` makes an equal config."""
        return asdict(self)

    @property
    def kind(self) -> str:
        """What the config, explanations and metrics call it."""
        return "disk"


TierConfig = DiskConfig
"""The settings of any tier below the pool."""
_TIER_KINDS: dict[str, type[TierConfig]] = {"disk": DiskConfig}
_PLANNED_KINDS = ("valkey", "object", "mooncake")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTierConfig:
    """Everything a user may set.

    `chunk_tokens` is another way to say `blocks_per_chunk`, resolved when the engine's block size is known. Deadlines
    are in seconds. A chunk is admitted once it has been offered `store_threshold` times; below 2 that is at once. `staging`
    is memory of a CUDA device, for the buffers of both directions together.
    """

    cpu: CPUConfig = _setting(_instance(CPUConfig))
    blocks_per_chunk: int = _setting(_at_least(1), 1)
    chunk_tokens: int | None = _setting(_optional(_at_least(1)), None)
    prompt_only: bool = _setting(_read_flag, False)
    load_deadline: float = _setting(_read_duration, 2.0)
    store_deadline: float = _setting(_read_duration, 30.0)
    store_threshold: int = _setting(_at_least(0), 0)
    load_if_faster: bool = _setting(_read_flag, True)
    staging: int = _setting(_read_staging, 256 << 20)
    self_describing_kv_events: bool = _setting(_read_flag, True)
    tiers: tuple[TierConfig, ...] = _setting(_read_tiers, ())

    def __post_init__(self) -> None:
        _read_fields(self)
        if self.chunk_tokens is not None and self.blocks_per_chunk != 1:
            raise ConfigError("chunk_tokens", "expected this or blocks_per_chunk, got both; keep one")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Read settings as they come from JSON, TOML or an engine's own config."""
        values = _translate_vllm_names(_expect_table("", settings))
        _check_names(cls, values, "")
        cpu = _expect_table("cpu", values["cpu"])
        _check_names(CPUConfig, cpu, "cpu.")
        return cls(**{**values, "cpu": CPUConfig(**cpu)})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a `.toml` or `.json` file: settings, or all of what vLLM's `--kv-transfer-config` takes. Errors name it."""
        try:
            return cls.from_dict(_unwrap(_parse_file(Path(path))))
        except ConfigError as error:
            error.args = (f"{path}: {error}",)
            raise

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `from_dict` makes an equal config."""
        return asdict(self) | {"tiers": [{tier.kind: tier.to_dict()} for tier in self.tiers]}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """One KV cache group of the engine. `bytes_per_block`: one block on one rank, all its layers, without padding."""

    block_size: int = _setting(_at_least(1))
    bytes_per_block: int = _setting(_at_least(1, _LARGEST))
    layer_names: tuple[str, ...] = _setting(_read_layer_names)
    sliding_window: int | None = _setting(_optional(_at_least(1, _LARGEST)), None)

    def __post_init__(self) -> None:
        _read_fields(self, "group.")


class Recompute(Enum):
    """What an engine computes after a load that did not deliver everything."""

    MISSING = "what did not arrive"
    REST = "everything from the first missing block on"
    ALL = "everything"


def _read_groups(path: str, value: object) -> tuple[GroupConfig, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(path, f"expected at least one KV cache group, got {show_value(value)}")
    return tuple(_instance(GroupConfig)(f"{path}[{i}]", group) for i, group in enumerate(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingConfig:
    """A user's settings and an engine's geometry, proven to fit together.

        row of a slot:  [ image of rank 0 | image of rank 1 | ... | padding to 4096 ]
                          max_image_bytes   max_image_bytes

    An image of a group with smaller blocks leaves the rest of its place unused. `launch_id` is what all
    processes of one start of the engine share and no other start has; a unique `engine_id` needs none. With
    `scheduler_apart` the scheduler's process is not that of rank 0. Of `num_engines` that serve one model side
    by side this is number `engine_index`: they share the capacity of a disk.
    """

    settings: KVTierConfig = _setting(_instance(KVTierConfig))
    groups: tuple[GroupConfig, ...] = _setting(_read_groups)
    hash_block_size: int = _setting(_at_least(1))
    world_size: int = _setting(_at_least(1), 1)
    rank: int = _setting(_at_least(0), 0)
    engine_id: str = _setting(_read_name)
    launch_id: str = _setting(_read_text, "")
    namespace: str | Namespace = _setting(_read_namespace, "")
    enable_kv_cache_events: bool = _setting(_read_flag, False)
    recompute: Recompute = _setting(_instance(Recompute), Recompute.MISSING)
    scheduler_apart: bool = _setting(_read_flag, False)
    engine_index: int = _setting(_at_least(0), 0)
    num_engines: int = _setting(_at_least(1), 1)

    def __post_init__(self) -> None:
        _read_fields(self)
        if self.rank >= self.world_size:
            raise ConfigError("rank", f"expected less than world_size ({self.world_size}), got {self.rank}")
        for i, group in enumerate(self.groups):
            if group.block_size % self.hash_block_size:
                expected = f"expected a multiple of hash_block_size ({self.hash_block_size} tokens)"
                raise ConfigError(f"groups[{i}].block_size", f"{expected}, got {group.block_size}")
        object.__setattr__(self, "settings", _resolve_chunk_tokens(self.settings, self.groups))
        if 0 < self.settings.cpu.capacity < self.row_bytes:
            expected = f"expected at least one row ({format_size(self.row_bytes)}), or 0 to keep nothing"
            raise ConfigError("cpu.capacity", f"{expected}, got {format_size(self.settings.cpu.capacity)}")
        self._check_tiers()

    def _check_tiers(self) -> None:
        """Refuse tiers that could not hold a row, or through no pool."""
        tiers, row = self.settings.tiers, format_size(self.row_bytes)
        if tiers and not self.num_slots:
            remedy = "rows of tiers pass through it; give it some, or remove tiers to keep nothing"
            raise ConfigError("cpu.capacity", f"expected at least one row ({row}) with tiers, got 0: {remedy}")
        for i, tier in enumerate(tiers):
            if tier.capacity < self.row_bytes:
                problem = f"expected at least one row ({row}), got {format_size(tier.capacity)}"
                raise ConfigError(f"tiers[{i}].{tier.kind}.capacity", problem)

    def namespace_nowait(self) -> str | None:
        """Return the namespace; None while it is not known: nothing may then be shared with another process."""
        return self.namespace if isinstance(self.namespace, str) else self.namespace.get_nowait()

    def tier_namespace_nowait(self) -> str | None:
        """Return the namespace of rows that outlive the process; None while it is not known.

        One that could not be computed is like no other: its rows would only take the place of those of others.
        """
        could_not = isinstance(self.namespace, Namespace) and self.namespace.problem is not None
        return None if could_not else self.namespace_nowait()

    def image_bytes(self, group: int) -> int:
        """Return the bytes of one chunk of a group on one rank."""
        return self.settings.blocks_per_chunk * self.groups[group].bytes_per_block

    @property
    def max_image_bytes(self) -> int:
        """The place of one rank in a row: as much as the largest group needs."""
        return max(self.image_bytes(group) for group in range(len(self.groups)))

    @property
    def row_bytes(self) -> int:
        """The bytes of one slot."""
        return -(-self.world_size * self.max_image_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def description_bytes(self) -> int:
        """Room for what the event stream tells of a chunk: tokens, hashes, and as much again of extra keys."""
        blocks = self.settings.blocks_per_chunk
        tokens = max(group.block_size for group in self.groups) * blocks
        return -(-(256 + 5 * tokens + 96 * blocks) // 256) * 256

    @property
    def num_slots(self) -> int:
        """How many rows the pool holds."""
        return self.settings.cpu.capacity // self.row_bytes


def _resolve_chunk_tokens(settings: KVTierConfig, groups: tuple[GroupConfig, ...]) -> KVTierConfig:
    """Turn `chunk_tokens` into `blocks_per_chunk`, which all groups share."""
    if settings.chunk_tokens is None:
        return settings
    sizes = sorted({group.block_size for group in groups})
    if len(sizes) > 1:
        problem = f"expected groups of one block size, got {sizes}; set blocks_per_chunk instead"
        raise ConfigError("chunk_tokens", problem)
    blocks, rest = divmod(settings.chunk_tokens, sizes[0])
    if rest:
        expected = f"expected a multiple of the engine's block size ({sizes[0]} tokens)"
        raise ConfigError("chunk_tokens", f"{expected}, got {settings.chunk_tokens}; try {(blocks + 1) * sizes[0]}")
    return replace(settings, blocks_per_chunk=blocks, chunk_tokens=None)


def _expect_table(path: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(path, f"expected a table of settings, got {show_value(value)}")
    return dict(value)


def _translate_vllm_names(values: dict[str, Any]) -> dict[str, Any]:
    """Move settings under vLLM's names to ours. Both at once is a clash."""
    for theirs, ours in _VLLM_NAMES.items():
        if theirs not in values:
            continue
        *outer, name = ours.split(".")
        table = values
        if outer:
            table = values[outer[0]] = _expect_table(outer[0], values.get(outer[0], {}))
        if name in table:
            raise ConfigError(theirs, f"clashes with {ours}, which means the same; keep one")
        table[name] = values.pop(theirs)
    return values


def _check_names(cls: type, values: Mapping[str, Any], prefix: str) -> None:
    """Refuse unknown fields with a suggestion, and missing ones."""
    known = {setting.name: setting for setting in fields(cls)}
    for name in values:
        if name not in known:
            shown = _shown(name)
            raise ConfigError(f"{prefix}{shown}", f"no such setting{_suggest(cls, shown, prefix)}")
    for name, setting in known.items():
        if setting.default is MISSING and name not in values:
            raise ConfigError(f"{prefix}{name}", "expected a value, got none; this setting is required")


def _shown(name: object) -> str:
    """Return a name as it stands in the path of an error."""
    return name if isinstance(name, str) and name.isprintable() and len(name) < 80 else show_value(name)


def _suggest(cls: type, name: str, prefix: str) -> str:
    """Say which setting was meant, wherever it belongs, or which there are."""
    outer = {setting.name: setting.name for setting in fields(KVTierConfig)}
    table = prefix or "cpu."
    inner = {setting.name: f"{table}{setting.name}" for setting in fields(cls if prefix else CPUConfig)}
    flat = {path.replace(".", mark): path for path in inner.values() for mark in "._"}
    places = outer | inner | ({} if prefix else flat | {theirs: theirs for theirs in _VLLM_NAMES})
    close = get_close_matches(name, places, n=1, cutoff=0.5)
    if not close:
        return f"; expected one of {', '.join(sorted(inner if prefix else outer))}"
    table, _, setting = places[close[0]].rpartition(".")
    where = f' Write {{"{table}": {{"{setting}": ...}}}}' if table and not prefix else ""
    where = f" Move it out of {prefix[:-1]}" if prefix and not table else where
    return f"; did you mean {places[close[0]]}?{where}"


def _unwrap(value: Any) -> Any:
    """Return the settings of what vLLM's `--kv-transfer-config` takes; anything else as it is."""
    if not isinstance(value, Mapping) or "kv_connector_extra_config" not in value:
        return value
    for name, expected in _TRANSFER_CONFIG.items():
        if value.get(name) != expected:
            raise ConfigError(name, f"expected {expected!r} for vLLM to find kvtier, got {show_value(value.get(name))}")
    return value["kv_connector_extra_config"]


def _parse_file(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
    except (OSError, ValueError) as error:
        raise ConfigError("", f"cannot read this file: {error}") from None
    if len(content) > _LONGEST_FILE:
        raise ConfigError("", f"expected a file of settings, got more than {format_size(_LONGEST_FILE)}")
    kind, parse = ("TOML", tomllib.loads) if path.suffix.lower() == ".toml" else ("JSON", _parse_json)
    try:
        return parse(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # neither parser has an own error for long numbers and deep nesting
        raise ConfigError("", f"expected {kind}: {error}") from None


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table; of a name that is there twice, the parser would silently take the last."""
    table = dict(pairs)
    if len(table) < len(pairs):
        (name, times), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{show_value(name)} is given {times} times in one table; keep one")
    return table


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
