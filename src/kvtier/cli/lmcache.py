"""LMCache's settings in kvtier's words: the answer of `kvtier config check` to a file written for LMCache.

Knows the names of LMCache 0.5: those of its YAML file, which vLLM's extra config has with the prefix
`lmcache.`, and those of its multiprocess connector. A password in an address is not repeated. Everything
here is pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvtier.config import TRANSFER_CONFIG, KVTierConfig, parse_duration, parse_file
from kvtier.errors import ConfigError, show_value

_LINE = re.compile(r"""^([a-z_][\w.]*):[ \t]+["']?(.*?)["']?[ \t]*(?:[ \t]#.*)?$""", re.MULTILINE)
"""A setting of a YAML file. Those below the top level have no counterpart here."""
_ANSWERS = {
    "chunk_size": "chunk_tokens; kvtier's default is one block, and small chunks hit more",
    "max_local_cpu_size": "cpu.capacity, which is over all ranks: multiply it by their number",
    "local_cpu": "none: the pool is always there",
    "cache_policy": "cpu.policy: lru, arc, gittins, or your own",
    "local_disk": "tiers: a disk",
    "max_local_disk_size": "the capacity of the disk",
    "remote_url": "tiers: valkey, object or mooncake; a password belongs into password_file",
    "remote_serde": "none: kvtier keeps rows as the engine has them",
    "save_decode_cache": "prompt_only, the opposite",
    "save_unfull_chunk": "none: kvtier keeps whole chunks only",
    "blocking_timeout_secs": "load_deadline",
    "lookup_timeout_ms": "none: load_deadline counts from the lookup on",
    "min_retrieve_tokens": "load_if_faster, which learns from which length on a load pays",
    "use_layerwise": "none: loads always run in parallel with the engine",
    "enable_async_loading": "none: loads always run in parallel with the engine",
    "pre_caching_hash_algorithm": "vLLM's --prefix-caching-hash-algo",
    "enable_kv_events": "vLLM's --kv-events-config",
    "enable_controller": "`kvtier index serve`, which follows event streams",
    "mp.save_decode_cache": "prompt_only, the opposite",
    "mp.eager_prefetch": "none: a lookup begins when a request is first seen",
    "mp.lazy_offload": "none: stores always run in parallel with the engine",
    "mp.": "none: kvtier runs inside the engine, without a server",
    "enable_blending": "none: kvtier reuses KV of equal prefixes only",
    **dict.fromkeys(("enable_p", "pd_", "nixl_"), "none: kvtier moves nothing from engine to engine"),
    **dict.fromkeys(("gds_", "use_gds"), "none: kvtier reads disks into host memory"),
}
"""Our setting for each of theirs, by the beginning of its name."""
_POLICIES = {"LRU": "lru", "ARC": "arc"}


class Translation(NamedTuple):
    """Settings that kvtier can read, and a line about each name that was translated."""

    settings: dict[str, Any]
    remarks: list[str]


def translate_file(file: Path) -> Translation | None:
    """Return a file of LMCache's settings in kvtier's words; `None` if it is not one."""
    if file.suffix.lower() in (".yaml", ".yml"):
        value: Any = dict(_LINE.findall(file.read_text(errors="replace"))) if file.is_file() else None
    else:
        value = parse_file(file)
    if not isinstance(value, Mapping):
        return None
    connector, role = value.get("kv_connector"), value.get("kv_role", "kv_both")
    settings = value.get("kv_connector_extra_config", value if connector is None else {})
    if (
        not isinstance(settings, Mapping)
        or "cpu" in settings
        or connector == TRANSFER_CONFIG["kv_connector"]
    ):
        return None
    values = {str(name).removeprefix("lmcache."): str(value) for name, value in settings.items()}
    is_theirs = any(str(name).startswith("lmcache.") or name in _ANSWERS for name in settings)
    if not is_theirs and "LMCache" not in str(connector):
        return None
    remarks = [*map(_answer, values)]
    if any(name.startswith("mp.") for name in values) or "MPConnector" in str(connector):
        remarks.append(
            "--l1-size-gb of the server → cpu.capacity, of each engine: choose it, 5GiB is a guess"
        )
    elif "max_local_cpu_size" not in values:
        remarks.append("cpu.capacity is LMCache's default for one rank: choose it as large as you can")
    ours = _convert(values)
    if connector is not None:
        ours = {**TRANSFER_CONFIG, "kv_role": role, "kv_connector_extra_config": ours}
    return Translation(ours, remarks)


def _answer(name: str) -> str:
    """Return the line about a name."""
    return next(
        (f"{name} → {answer}" for start, answer in _ANSWERS.items() if name.startswith(start)),
        f"{name} → no counterpart: leave it out",
    )


def _convert(values: Mapping[str, str]) -> dict[str, Any]:
    """Return kvtier's settings for LMCache's values, which are in GiB and seconds."""
    settings: dict[str, Any] = {"cpu": {"capacity": _gib("max_local_cpu_size", values, "5")}}
    if policy := _POLICIES.get(values.get("cache_policy", "").upper()):
        settings["cpu"]["policy"] = policy
    if values.get("chunk_size", "").isdecimal():
        settings["chunk_tokens"] = int(values["chunk_size"])
    if values.get("save_decode_cache", values.get("mp.save_decode_cache", "")).lower() == "false":
        settings["prompt_only"] = True
    if seconds := values.get("blocking_timeout_secs"):
        settings["load_deadline"] = parse_duration(seconds, "blocking_timeout_secs")
    tiers = []
    if (path := values.get("local_disk", "")) not in ("", "None", "null", "False", "false"):
        place = {
            "path": path.removeprefix("file://"),
            "capacity": _gib("max_local_disk_size", values, "100"),
        }
        tiers.append({"disk": place})
    tiers += _shared_tiers(values.get("remote_url", ""))
    KVTierConfig.from_dict(settings := settings | ({"tiers": tiers} if tiers else {}))
    return settings


def _gib(name: str, values: Mapping[str, str], default: str) -> str:
    try:
        return f"{float(values.get(name, default)):g}GiB"
    except ValueError:
        raise ConfigError(name, f"expected a number of GiB, got {show_value(values[name])}") from None


def _shared_tiers(url: str) -> list[dict[str, Any]]:
    """Return the tier for an address, without its password; none for a kind of store that we lack."""
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname}:{parts.port or 6379}"
    except ValueError:
        raise ConfigError("remote_url", "expected an address such as valkey://host:6379") from None
    if parts.scheme in ("redis", "rediss", "valkey"):
        user = f"{parts.username}@" if parts.username else ""
        return [{"valkey": {"url": f"{parts.scheme}://{user}{host}{parts.path.rstrip('/')}"}}]
    if parts.scheme == "mooncakestore":
        metadata = f"http://{parts.hostname}:8080/metadata"
        return [{"mooncake": {"master": f"{parts.hostname}:{parts.port or 50051}", "metadata": metadata}}]
    return [{"object": {"url": url}}] if parts.scheme == "s3" else []
