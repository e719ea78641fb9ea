"""The settings of a user, and the geometry that the engine adds: validated once, with the path of the bad
field in the error.

`KVTierConfig` holds the user's settings. They come as a Python object, as a JSON or TOML file, or as the
extra config of an engine's connector. Sizes and times are readable (`"8GiB"`, `"500ms"`), unknown fields are
errors with a suggestion, and the names of vLLM's own offloading connector are understood. Every error is a
`ConfigError` of one line. `OffloadingConfig` adds the engine's geometry and derives every size that the rest
of kvtier needs. All objects are immutable and may be shared by any thread.

Names imported with `as` are part of this module's surface: the settings of tiers, and sizes and times.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from kvtier.config_fields import (
    LARGEST,
    at_least,
    check_names,
    expect_table,
    instance,
    one_of,
    optional,
    read_duration,
    read_fields,
    read_flag,
    read_name,
    read_number,
    read_share,
    read_size,
    read_text,
    setting,
)
from kvtier.config_fields import format_size as format_size
from kvtier.config_fields import parse_duration as parse_duration
from kvtier.config_fields import parse_size as parse_size
from kvtier.errors import ConfigError, show_value
from kvtier.namespace import Namespace
from kvtier.packing import BlockFormat, block_format, name_rows, pages_fit
from kvtier.tier_config import DEFAULT_POLICY as DEFAULT_POLICY
from kvtier.tier_config import DiskConfig as DiskConfig
from kvtier.tier_config import MooncakeConfig as MooncakeConfig
from kvtier.tier_config import ObjectConfig as ObjectConfig
from kvtier.tier_config import TierConfig as TierConfig
from kvtier.tier_config import ValkeyConfig as ValkeyConfig
from kvtier.tier_config import read_tiers

ROW_ALIGNMENT = 4096
"""Rows are whole pages of host memory, so that any row can be read and written with direct I/O."""

LEAST_STAGING = 1 << 20
"""Eight buffers share the staging memory: with less, a buffer would be smaller than 128 KiB."""

_LONGEST_FILE = 1 << 20

_VLLM_NAMES = {
    "cpu_bytes_to_use": "cpu.capacity",
    "eviction_policy": "cpu.policy",
    "block_size": "chunk_tokens",
    "offload_prompt_only": "prompt_only",
}
"""Our path for each field of vLLM's own connector. Fields of equal name and meaning need no entry."""

TRANSFER_CONFIG = {
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "kvtier.integrations.vllm",
}
"""The fields around the settings in vLLM's `--kv-transfer-config`."""


def _read_staging(path: str, value: object) -> int:
    size = parse_size(value, path)
    if size < LEAST_STAGING:
        raise ConfigError(path, f"expected at least {format_size(LEAST_STAGING)}, got {show_value(value)}")
    return size


def _read_limit(path: str, value: object) -> float:
    limit = read_share(path, value)
    if not limit:
        raise ConfigError(path, f"expected a share above 0, got {show_value(value)}")
    return limit


def _read_longest_keep(path: str, value: object) -> float:
    return parse_duration(value, path)


def _read_namespace(path: str, value: object) -> str | Namespace:
    if not isinstance(value, (str, Namespace)):
        raise ConfigError(path, f"expected a string or a Namespace, got {show_value(value)}")
    return value


def _read_layer_names(path: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(path, f"expected the names of one layer or more, got {show_value(value)}")
    return tuple(read_name(f"{path}[{i}]", name) for i, name in enumerate(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUConfig:
    """The pool in host memory: `capacity` bytes over all ranks, and the policy that evicts when it is full.

    With a capacity of 0 nothing is kept.
    """

    capacity: int = setting(read_size)
    policy: str = setting(read_name, DEFAULT_POLICY)

    def __post_init__(self) -> None:
        read_fields(self, "cpu.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesConfig:
    """Shares of tenants, whom their cache salts tell apart: the part of each tier that one may fill."""

    by: str = setting(one_of("cache_salt"), "cache_salt")
    limit: float = setting(_read_limit)

    def __post_init__(self) -> None:
        read_fields(self, "shares.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTierConfig:
    """Everything a user may set.

    `chunk_tokens` is `blocks_per_chunk` in tokens, resolved when the engine's block size is known.
    Deadlines are in seconds. A chunk is admitted once it has been offered `store_threshold` times; with 0 or
    1 it is admitted at once. `staging` is memory of a CUDA device, for the buffers of both directions
    together. `audit` is the share of computed tokens that may be spent on audits: 0 for none, 1 for an audit
    of every hit. `packing` says whether rows of bfloat16 KV are packed (`kvtier.packing`); with `auto` they
    are where that was measured to be faster. `longest_keep` bounds the time that a hint may keep chunks;
    0 ignores such hints.
    """

    cpu: CPUConfig = setting(instance(CPUConfig))
    blocks_per_chunk: int = setting(at_least(1), 1)
    chunk_tokens: int | None = setting(optional(at_least(1)), None)
    prompt_only: bool = setting(read_flag, False)
    load_deadline: float = setting(read_duration, 2.0)
    store_deadline: float = setting(read_duration, 30.0)
    store_threshold: int = setting(at_least(0), 0)
    load_if_faster: bool = setting(read_flag, True)
    staging: int = setting(_read_staging, 256 << 20)
    self_describing_kv_events: bool = setting(read_flag, True)
    audit: float = setting(read_share, 0.001)
    packing: str = setting(one_of("auto", "on", "off"), "auto")
    longest_keep: float = setting(_read_longest_keep, 3600.0)
    shares: SharesConfig | None = setting(optional(instance(SharesConfig)), None)
    tiers: tuple[TierConfig, ...] = setting(read_tiers, ())

    def __post_init__(self) -> None:
        read_fields(self)
        if self.chunk_tokens is not None and self.blocks_per_chunk != 1:
            raise ConfigError("chunk_tokens", "expected this or blocks_per_chunk, got both; keep one")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Read settings as they come from JSON, TOML or an engine's own config."""
        values = {"cpu": {}} | _translate_vllm_names(expect_table("", settings))
        check_names(cls, values, "", _suggest)
        cpu = expect_table("cpu", values["cpu"])
        check_names(CPUConfig, cpu, "cpu.", _suggest)
        if (shares := values.get("shares")) is not None and not isinstance(shares, SharesConfig):
            shares = expect_table("shares", shares)
            check_names(SharesConfig, shares, "shares.", _suggest)
            values["shares"] = SharesConfig(**shares)
        return cls(**{**values, "cpu": CPUConfig(**cpu)})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a `.toml` or `.json` file: the settings, or the whole value of vLLM's `--kv-transfer-config`.

        Errors name the file.
        """
        try:
            return cls.from_dict(_unwrap(parse_file(Path(path))))
        except ConfigError as error:
            error.args = (f"{path}: {error}",)
            raise

    @property
    def tenant_share(self) -> float | None:
        """The part of a tier that one tenant may fill; `None` without shares."""
        return None if self.shares is None else self.shares.limit

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `from_dict` makes an equal config."""
        return asdict(self) | {"tiers": [{tier.kind: tier.to_dict()} for tier in self.tiers]}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """One KV cache group of the engine.

    `bytes_per_block` is the size of one block on one rank: all its layers, without padding. A group is of
    full attention, or has one of three other kinds: a `sliding_window`; chunked-local attention, in which a
    token sees those before it in its own `attention_chunk_size` tokens; or a recurrent state (`is_state`).
    The block of a state group at position p is the state after exactly `(p + 1) * block_size` tokens.
    """

    block_size: int = setting(at_least(1))
    bytes_per_block: int = setting(at_least(1, LARGEST))
    layer_names: tuple[str, ...] = setting(_read_layer_names)
    sliding_window: int | None = setting(optional(at_least(1, LARGEST)), None)
    attention_chunk_size: int | None = setting(optional(at_least(1, LARGEST)), None)
    is_state: bool = setting(read_flag, False)

    def __post_init__(self) -> None:
        read_fields(self, "group.")
        kinds = (self.sliding_window is not None, self.attention_chunk_size is not None, self.is_state)
        if sum(kinds) > 1:
            names = "sliding_window, attention_chunk_size and is_state"
            raise ConfigError("group", f"expected at most one of {names}, got {show_value(kinds)}")


class Recompute(Enum):
    """The part of a load's tokens that an engine computes after the load did not deliver everything."""

    MISSING = "what did not arrive"
    REST = "everything from the first missing block on"
    ALL = "everything"


def _read_groups(path: str, value: object) -> tuple[GroupConfig, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(path, f"expected at least one KV cache group, got {show_value(value)}")
    return tuple(instance(GroupConfig)(f"{path}[{i}]", group) for i, group in enumerate(value))


def _read_flags(path: str, value: object) -> tuple[bool, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(path, f"expected a flag for each KV cache group, got {show_value(value)}")
    return tuple(read_flag(f"{path}[{i}]", flag) for i, flag in enumerate(value))


def _read_bytes_by_rank(path: str, value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(sizes, (list, tuple)) for sizes in value):
        raise ConfigError(path, f"expected sizes by group of each rank, got {show_value(value)}")
    read = at_least(1, LARGEST)
    return tuple(
        tuple(read(f"{path}[{rank}][{i}]", size) for i, size in enumerate(sizes))
        for rank, sizes in enumerate(value)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingConfig:
    """A user's settings and an engine's geometry, proven to fit together.

        row of a slot:  [ image of rank 0 | image of rank 1 | ... | padding to 4096 ]
                          max_image_bytes   max_image_bytes

    Where `replicas` consecutive ranks hold the same bytes, a row has one image for them: the first of these
    ranks stores it and all load it. Image i then belongs to `replicas` ranks, from rank `i * replicas` on.

    A shorter image, of a group with smaller blocks or of a rank with fewer layers, leaves the rest of its
    room unused. `groups` are the groups of this rank. Where ranks have different layers (pipeline stages),
    `bytes_by_rank` gives the bytes of a block for each rank and group; if it is empty, all ranks are like
    this one. All processes of one start of the engine share a `launch_id`, which no other start has; it may
    be empty if `engine_id` is unique. With `scheduler_apart` the scheduler does not live in the process of
    rank 0. This engine is number `engine_index` of `num_engines` that serve one model side by side and share
    the capacity of a disk.
    """

    settings: KVTierConfig = setting(instance(KVTierConfig))
    groups: tuple[GroupConfig, ...] = setting(_read_groups)
    hash_block_size: int = setting(at_least(1))
    world_size: int = setting(at_least(1), 1)
    rank: int = setting(at_least(0), 0)
    engine_id: str = setting(read_name)
    launch_id: str = setting(read_text, "")
    namespace: str | Namespace = setting(_read_namespace, "")
    enable_kv_cache_events: bool = setting(read_flag, False)
    recompute: Recompute = setting(instance(Recompute), Recompute.MISSING)
    lookahead: int = setting(at_least(0), 0)
    """The number of later tokens that a token's KV may depend on; not 0 with a draft head (EAGLE, MTP)."""
    scheduler_apart: bool = setting(read_flag, False)
    engine_index: int = setting(at_least(0), 0)
    num_engines: int = setting(at_least(1), 1)
    bytes_by_rank: tuple[tuple[int, ...], ...] = setting(_read_bytes_by_rank, ())
    replicas: int = setting(at_least(1), 1)
    packed_groups: tuple[bool, ...] = setting(_read_flags, ())
    """The groups whose blocks are kept packed; if it is empty, none are."""
    number_format: str = setting(read_text, "")
    """The format of the values in the caches, as torch names it; it may be empty without audits."""
    audit_tolerance: float = setting(read_number, 0.0)
    """The largest distance of rows of the same KV (`transfer.compare.tolerance`); 0 means no audits."""
    writes_before_fence: bool = setting(read_flag, False)
    """Whether the engine may write to blocks that it hands out before it calls `handle_preemptions`."""
    may_load: bool = setting(read_flag, True)
    """Whether the engine loads anything, from the pool or from a tier below it."""
    may_store: bool = setting(read_flag, True)
    """Whether the engine stores what it computes."""

    def __post_init__(self) -> None:
        read_fields(self)
        if self.rank >= self.world_size:
            raise ConfigError("rank", f"expected less than world_size ({self.world_size}), got {self.rank}")
        if self.world_size % self.replicas:
            problem = f"expected a divisor of world_size ({self.world_size}), got {self.replicas}"
            raise ConfigError("replicas", problem)
        if self.bytes_by_rank:
            self._check_bytes_by_rank()
        self._check_packed_groups()
        for i, group in enumerate(self.groups):
            if group.block_size % self.hash_block_size:
                expected = f"expected a multiple of hash_block_size ({self.hash_block_size} tokens)"
                raise ConfigError(f"groups[{i}].block_size", f"{expected}, got {group.block_size}")
        object.__setattr__(self, "settings", _resolve_chunk_tokens(self.settings, self.groups))
        if 0 < self.settings.cpu.capacity < self.slot_bytes:
            expected = f"expected at least one row ({format_size(self.slot_bytes)}), or 0 to keep nothing"
            raise ConfigError("cpu.capacity", f"{expected}, got {format_size(self.settings.cpu.capacity)}")
        self._check_tiers()

    def _check_bytes_by_rank(self) -> None:
        """Refuse sizes that do not cover all ranks and groups, or that differ from this rank's groups."""
        ranks, own = self.bytes_by_rank, tuple(group.bytes_per_block for group in self.groups)
        if len(ranks) != self.world_size or any(len(sizes) != len(own) for sizes in ranks):
            expected = f"expected {self.world_size} ranks with {len(own)} group(s) each"
            raise ConfigError("bytes_by_rank", f"{expected}, got {show_value(ranks)}")
        if ranks[self.rank] != own:
            problem = f"expected {show_value(own)}, as its groups have, got {show_value(ranks[self.rank])}"
            raise ConfigError(f"bytes_by_rank[{self.rank}]", problem)

    def _check_packed_groups(self) -> None:
        """Refuse groups that cannot be packed."""
        if self.packed_groups and len(self.packed_groups) != len(self.groups):
            problem = f"expected one for each of {len(self.groups)} groups, got {len(self.packed_groups)}"
            raise ConfigError("packed_groups", problem)
        for i, (is_packed, group) in enumerate(zip(self.packed_groups, self.groups, strict=False)):
            if is_packed and (group.is_state or self.packed_format(i) is None):
                problem = f"expected blocks of KV that can be packed, got {show_value(group)}"
                raise ConfigError(f"packed_groups[{i}]", problem)

    def _check_tiers(self) -> None:
        """Refuse tiers that cannot hold a row, and tiers without a pool."""
        tiers, row = self.settings.tiers, format_size(self.row_bytes)
        if tiers and not self.num_slots:
            remedy = "rows of tiers pass through it; give it some, or remove tiers to keep nothing"
            slot = format_size(self.slot_bytes)
            raise ConfigError(
                "cpu.capacity", f"expected at least one row ({slot}) with tiers, got 0: {remedy}"
            )
        for i, tier in enumerate(tiers):
            if isinstance(tier, DiskConfig) and tier.capacity < self.row_bytes:
                problem = f"expected at least one row ({row}), got {format_size(tier.capacity)}"
                raise ConfigError(f"tiers[{i}].{tier.kind}.capacity", problem)
            if isinstance(tier, DiskConfig) and tier.engines is not None:
                self._check_engines(tier.engines, f"tiers[{i}].{tier.kind}.engines")

    def _check_engines(self, engines: int, path: str) -> None:
        """Refuse a number of data-parallel engines that this one knows to be wrong."""
        if self.num_engines not in (1, engines):
            problem = f"expected {self.num_engines}, as the engine says, or none; got {engines}"
            raise ConfigError(path, problem)
        if self.engine_index >= engines:
            problem = f"expected more than {self.engine_index}, the index of this engine, got {engines}"
            raise ConfigError(path, f"{problem}; set the number of data-parallel engines")

    def namespace_nowait(self) -> str | None:
        """Return the namespace, or None while it is not known.

        Until it is known, nothing may be shared with another process.
        """
        return self.namespace if isinstance(self.namespace, str) else self.namespace.get_nowait()

    def tier_namespace_nowait(self) -> str | None:
        """Return the namespace of rows that outlive the process, or None while it is not known.

        It stays None if the namespace could not be computed: a random one would match no other engine, and
        its rows would only take space from useful ones. A key names only the last block of a row, so the
        namespace adds the row's shape: the blocks per chunk, the number of ranks and the bytes, and the
        packed form of groups.
        """
        could_not = isinstance(self.namespace, Namespace) and self.namespace.problem is not None
        namespace = None if could_not else self.namespace_nowait()
        if namespace is None:
            return None
        ranks = f"{self.world_size}/{self.replicas}" if self.replicas > 1 else self.world_size
        shape = f"{self.settings.blocks_per_chunk}x{ranks}x{self.row_bytes}"
        if self.bytes_by_rank:
            shape += "x" + sha256(json.dumps(self.bytes_by_rank).encode()).hexdigest()[:16]
        if self.packs:
            shape += name_rows(self.packed_groups, self.raw_row_bytes)
        return f"{namespace} {shape}"

    @property
    def audits(self) -> bool:
        """Whether rows are audited.

        With a lookahead, the KV of a chunk's last token depends on the token after the chunk, which may be
        another in each request. States are not compared, only the KV of attention layers.
        """
        has_attention = any(not group.is_state for group in self.groups)
        return self.settings.audit > 0 and self.audit_tolerance > 0 and not self.lookahead and has_attention

    @property
    def storing_ranks(self) -> range:
        """The ranks that store: the first of each set of ranks that hold the same bytes."""
        return range(0, self.world_size, self.replicas)

    def by_image(self) -> Self:
        """Return the geometry that handlers use: one rank for each image, without replicas."""
        if self.replicas == 1:
            return self
        return replace(
            self,
            world_size=self.world_size // self.replicas,
            rank=self.rank // self.replicas,
            bytes_by_rank=self.bytes_by_rank[:: self.replicas],
            replicas=1,
        )

    def packed_format(self, group: int) -> BlockFormat | None:
        """Return the form in which blocks of a group are kept; `None` if they are kept as they are."""
        if not self.packed_groups or not self.packed_groups[group]:
            return None
        return block_format(self.groups[group].bytes_per_block, self.groups[group].block_size)

    def kept_bytes(self, group: int, raw_bytes: int | None = None) -> int:
        """Return the bytes that a block of a group takes in a row.

        `raw_bytes` are its bytes in the engine, where they are not those of this rank.
        """
        size = self.groups[group].bytes_per_block if raw_bytes is None else raw_bytes
        if not self.packed_groups or not self.packed_groups[group]:
            return size
        packed = block_format(size, self.groups[group].block_size)
        return size if packed is None else packed.bytes

    def image_bytes(self, group: int) -> int:
        """Return the bytes of one chunk of a group on this rank."""
        return self.settings.blocks_per_chunk * self.kept_bytes(group)

    def bytes_of_all_ranks(self, group: int) -> int:
        """Return the bytes of one block of a group in a row, over all ranks."""
        if self.bytes_by_rank:
            return sum(self.kept_bytes(group, sizes[group]) for sizes in self.bytes_by_rank)
        return self.world_size * self.kept_bytes(group)

    @property
    def max_image_bytes(self) -> int:
        """The bytes that a row reserves for one image: as many as the largest group of any rank needs."""
        ranks = self.bytes_by_rank or (tuple(group.bytes_per_block for group in self.groups),)
        blocks = [self.kept_bytes(group, size) for sizes in ranks for group, size in enumerate(sizes)]
        return self.settings.blocks_per_chunk * max(blocks)

    @property
    def raw_row_bytes(self) -> int:
        """The bytes of one row if no group is packed."""
        ranks = self.bytes_by_rank or (tuple(group.bytes_per_block for group in self.groups),)
        return self._row_bytes(self.settings.blocks_per_chunk * max(max(sizes) for sizes in ranks))

    @property
    def packs(self) -> bool:
        """Whether any group is kept packed."""
        return any(self.packed_groups)

    @property
    def packing_ratio(self) -> float:
        """How many times the tokens the same memory keeps because rows are packed; 1 if they are not."""
        return self.raw_row_bytes / self.row_bytes

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, the unit that all tiers move and seal."""
        return self._row_bytes(self.max_image_bytes)

    def _row_bytes(self, image_bytes: int) -> int:
        return -(-len(self.storing_ranks) * image_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def slot_bytes(self) -> int:
        """The bytes from one slot to the next: a row, and behind it room for a header with a Mooncake tier.

        With the header there, row and header are one transfer.
        """
        needs_room = any(isinstance(tier, MooncakeConfig) for tier in self.settings.tiers)
        return self.row_bytes + needs_room * ROW_ALIGNMENT

    @property
    def description_bytes(self) -> int:
        """The room for a chunk's description in the event stream: tokens, hashes, and as much again for
        extra keys.
        """
        blocks = self.settings.blocks_per_chunk
        tokens = max(group.block_size for group in self.groups) * blocks
        return -(-(256 + 5 * tokens + 96 * blocks) // 256) * 256

    @property
    def num_slots(self) -> int:
        """The number of rows that the pool holds."""
        return self.settings.cpu.capacity // self.slot_bytes


def groups_to_pack(
    settings: KVTierConfig,
    groups: Sequence[GroupConfig],
    page_bytes: Sequence[Iterable[int]],
    number_format: str,
) -> tuple[bool, ...]:
    """Return which groups of an engine are kept packed; nothing if none are.

    `page_bytes` are the bytes of each page of a group's blocks. States are never packed. Packing on the host
    takes the processor's time, and on a GPU the engine's, so it is done only where it was asked for.
    """
    if settings.packing != "on":
        return ()
    if number_format != "bfloat16":
        got = number_format or "other formats, or several"
        raise ConfigError("packing", f"expected a cache of bfloat16, got {got}; set it to auto or off")
    packed = tuple(
        not group.is_state and pages_fit(pages, group.block_size)
        for group, pages in zip(groups, page_bytes, strict=True)
    )
    if not any(packed):
        sizes = [group.block_size for group in groups]
        expected = "expected blocks of at least 8 tokens with heads of 64 values or more"
        problem = f"{expected}, got blocks of {sizes} tokens whose pages cannot be packed; set it to auto"
        raise ConfigError("packing", problem)
    return packed


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
        raise ConfigError(
            "chunk_tokens", f"{expected}, got {settings.chunk_tokens}; try {(blocks + 1) * sizes[0]}"
        )
    return replace(settings, blocks_per_chunk=blocks, chunk_tokens=None)


def _translate_vllm_names(values: dict[str, Any]) -> dict[str, Any]:
    """Move settings under vLLM's names to ours. Both at once is a clash."""
    for theirs, ours in _VLLM_NAMES.items():
        if theirs not in values:
            continue
        *outer, name = ours.split(".")
        table = values
        if outer:
            table = values[outer[0]] = expect_table(outer[0], values.get(outer[0], {}))
        if name in table:
            raise ConfigError(theirs, f"clashes with {ours}, which means the same; keep one")
        table[name] = values.pop(theirs)
    return values


def _suggest(cls: type, name: str, prefix: str) -> str:
    """Suggest the setting that an unknown name resembles, in any table; else list the settings."""
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
    """Return the settings inside a value of vLLM's `--kv-transfer-config`; leave anything else unchanged."""
    if not isinstance(value, Mapping) or "kv_connector_extra_config" not in value:
        return value
    for name, expected in TRANSFER_CONFIG.items():
        if value.get(name) != expected:
            raise ConfigError(
                name, f"expected {expected!r} for vLLM to find kvtier, got {show_value(value.get(name))}"
            )
    return value["kv_connector_extra_config"]


def parse_file(path: Path) -> Any:
    """Return the content of a JSON or TOML file, whatever it is."""
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "; expected a file, got settings" if str(path).lstrip().startswith("{") else ""
        raise ConfigError("", f"cannot read this file: {reason}{hint}") from None
    if len(content) > _LONGEST_FILE:
        raise ConfigError("", f"expected a file of settings, got more than {format_size(_LONGEST_FILE)}")
    kind, parse = ("TOML", tomllib.loads) if path.suffix.lower() == ".toml" else ("JSON", _parse_json)
    try:
        return parse(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # long numbers and deep nesting too
        raise ConfigError("", f"expected {kind}: {error}") from None


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table, and refuse a name that is given twice: the parser would silently take the last value."""
    table = dict(pairs)
    if len(table) < len(pairs):
        (name, times), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{show_value(name)} is given {times} times in one table; keep one")
    return table


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
