from __future__ import annotations

import datetime
import json
import math
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import (
    CPUConfig,
    DiskConfig,
    GroupConfig,
    KVTierConfig,
    OffloadingConfig,
    SharesConfig,
    format_size,
    parse_duration,
    parse_size,
)
from kvtier.errors import ConfigError
from kvtier.namespace import Namespace
from kvtier.tier_config import MooncakeConfig, ObjectConfig, ValkeyConfig

GIB = 1024**3
DISK: dict[str, Any] = {"disk": {"path": "/x", "capacity": "1TiB"}}
NESTED: list[Any] = []
for _ in range(100_000):
    NESTED = [NESTED]
WRAPPED = (
    '{"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.integrations.vllm", '
    '"kv_role": "kv_both", "kv_connector_extra_config": %s}'
)


def kind(value: object) -> str:
    """Name a parameter that is too long for a name."""
    return type(value).__name__


def settings(**changes: Any) -> KVTierConfig:
    return KVTierConfig.from_dict({"cpu": {"capacity": "1MiB"}} | changes)


def group(**changes: Any) -> GroupConfig:
    return GroupConfig(**{"block_size": 16, "bytes_per_block": 1000, "layer_names": ("0",)} | changes)


def offloading(**changes: Any) -> OffloadingConfig:
    fields = {"settings": settings(), "groups": (group(),), "hash_block_size": 16, "engine_id": "e"}
    return OffloadingConfig(**fields | changes)


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            (0, 0),
            (4096, 4096),
            (4096.0, 4096),
            ("4096", 4096),
            ("1B", 1),
            ("1kB", 1000),
            ("1KB", 1000),
            ("1KiB", 1024),
            ("8GiB", 8 * GIB),
            ("8 gib", 8 * GIB),
            ("8G", 8 * 10**9),
            ("8Gi", 8 * GIB),
            ("512ki", 512 * 1024),
            ("1.5T", 1_500_000_000_000),
            ("8.5GiB", 17 * GIB // 2),
            (8.5e9, 8_500_000_000),
            ("8.0", 8),
            (2**63 - 1, 2**63 - 1),
            (" 1.5 GB ", 1_500_000_000),
            (".5KiB", 512),
            ("2TiB", 2 * 1024 * GIB),
            ("1PB", 10**15),
            ("0.1GiB", 107374182),
        ],
    )
    def test_reads(self, text: object, size: int) -> None:
        assert parse_size(text) == size

    @pytest.mark.parametrize(
        "bad",
        [
            "",
            "GiB",
            "8Q",
            "8 GiB x",
            "-1GiB",
            "1,5GB",
            "1e400",
            "nan",
            "٣GiB",
            -1,
            True,
            None,
            [],
            math.nan,
            math.inf,
        ],
    )
    def test_refuses(self, bad: object) -> None:
        with pytest.raises(ConfigError) as caught:
            parse_size(bad, "cpu.capacity")
        expected = "expected a size such as 8GiB, 500MB or a number of bytes"
        assert str(caught.value) == f"cpu.capacity: {expected}, got {bad!r}"

    @pytest.mark.parametrize("half", [8.5, "8.5", "8.5B", ".5 b", 1e-300])
    def test_bytes_come_whole(self, half: object) -> None:
        """Who writes 8.5 means GiB, and would be told much later that a pool of 8 bytes holds nothing."""
        with pytest.raises(ConfigError) as caught:
            parse_size(half, "cpu.capacity")
        expected = "expected a whole number of bytes, or a unit as in 8.5GiB"
        assert str(caught.value) == f"cpu.capacity: {expected}, got {half!r}"

    @pytest.mark.parametrize(
        "huge", [2**63, 10**400, 10**5000, 1e300, "9" * 30, "8EiB", "99999999PB"], ids=kind
    )
    def test_sizes_beyond_any_machine_are_refused(self, huge: object) -> None:
        with pytest.raises(
            ConfigError, match=r"^cpu\.capacity: expected a size below 8\.0 EiB, got "
        ) as caught:
            parse_size(huge, "cpu.capacity")
        assert len(str(caught.value)) < 200

    @pytest.mark.parametrize("unreadable", ["9" * 5000, -(10**5000), "9" * 5000 + "GiB", NESTED], ids=kind)
    def test_values_that_cannot_be_printed_are_refused(self, unreadable: object) -> None:
        with pytest.raises(ConfigError, match=r"^cpu\.capacity: expected a size such as 8GiB") as caught:
            parse_size(unreadable, "cpu.capacity")
        assert len(str(caught.value)) < 200

    @pytest.mark.parametrize(
        ("size", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (4 * 1024**2, "4.0 MiB"),
            (GIB * 3 // 2, "1.5 GiB"),
        ],
    )
    def test_writes(self, size: int, text: str) -> None:
        assert format_size(size) == text

    @given(st.integers(0, 2**60))
    def test_written_sizes_read_back(self, size: int) -> None:
        assert parse_size(format_size(size)) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (2, 2.0),
        (0.5, 0.5),
        ("2", 2.0),
        ("500ms", 0.5),
        ("2s", 2.0),
        ("1.5 s", 1.5),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("20us", 2e-5),
    ],
)
def test_reads_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("long", [31_536_001, "8761h", 10**400, 10**5000, 1e300, "9" * 40 + "h"], ids=kind)
def test_a_wait_of_more_than_a_year_is_refused(long: object) -> None:
    with pytest.raises(ConfigError, match=r"^load_deadline: expected a year \(8760h\) at most, got "):
        parse_duration(long, "load_deadline")


@pytest.mark.parametrize(
    "bad", ["", "2 parsecs", "-1s", -1, False, None, math.inf, math.nan, "9" * 5000, NESTED], ids=kind
)
def test_refuses_durations(bad: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^load_deadline: expected a time such as 500ms, 2s or a number of seconds, got "
    ):
        parse_duration(bad, "load_deadline")


def test_rows_of_a_namespace_that_could_not_be_computed_stay_at_home() -> None:
    def fail() -> str:
        raise OSError("no such file")

    group = GroupConfig(block_size=4, bytes_per_block=64, layer_names=("layer",))
    settings = KVTierConfig(cpu=CPUConfig(capacity=1 << 20))
    config = OffloadingConfig(
        settings=settings, groups=(group,), hash_block_size=4, engine_id="test", namespace="known"
    )
    assert (config.tier_namespace_nowait() or "").startswith("known ")
    failed = Namespace(fail)
    assert failed.wait(30.0) is not None
    config = replace(config, namespace=failed)
    assert config.namespace_nowait() is not None
    assert config.tier_namespace_nowait() is None


def test_rows_of_other_chunks_have_another_namespace_though_they_are_as_long() -> None:
    group = GroupConfig(block_size=4, bytes_per_block=64, layer_names=("layer",))
    configs = [
        OffloadingConfig(
            settings=KVTierConfig(cpu=CPUConfig(capacity=1 << 20), blocks_per_chunk=blocks),
            groups=(group,),
            hash_block_size=4,
            engine_id="test",
            namespace="known",
            world_size=world_size,
        )
        for blocks, world_size in ((1, 1), (2, 1), (1, 2), (64, 1))
    ]
    assert len({config.row_bytes for config in configs}) == 1
    assert len({config.tier_namespace_nowait() for config in configs}) == len(configs)


def test_rows_of_stages_with_other_layers_have_another_namespace() -> None:
    def config(*sizes: int) -> OffloadingConfig:
        group = GroupConfig(block_size=4, bytes_per_block=sizes[0], layer_names=("layer",))
        return OffloadingConfig(
            settings=KVTierConfig(cpu=CPUConfig(capacity=1 << 20)),
            groups=(group,),
            hash_block_size=4,
            engine_id="test",
            namespace="known",
            world_size=len(sizes),
            bytes_by_rank=tuple((size,) for size in sizes),
        )

    configs = [config(128, 64, 64), config(128, 128, 64), config(128, 64, 128), config(64, 128, 128)]
    configs.append(replace(config(128, 128, 128), bytes_by_rank=()))
    assert len({config.row_bytes for config in configs}) == 1
    assert len({config.tier_namespace_nowait() for config in configs}) == len(configs)
    assert replace(configs[-1], rank=1).tier_namespace_nowait() == "known 1x3x4096", "as it was"


@pytest.mark.parametrize(
    "tiers",
    [
        "valkey://user:hunter2@host",
        {"valkey": {"url": "valkey://user:hunter2@host"}},
        ["valkey://user:hunter2@host"],
        [{"valkey": "valkey://user:hunter2@host"}],
        [{"valkey": {"url": "valkey://user:hunter2@host"}, "more": 1}],
        [{"valkey://user:hunter2@host": {}}],
        [{"valkey://user:hunter2@host": {}, "more": 1}],
        *(
            [{"valkey": {"url": url}}]
            for url in (
                "valkey://user:hunter2/x@host",
                "valkey://user:12#hunter2@host",
                "valkey://:12/hunter2@host",
                "valkey://host/hunter2",
                "valkey://host?password=hunter2",
                "unix:///socket?password=hunter2",
                "unix:///socket?db=hunter2",
                "user:hunter2@host:6379",
                "hunter2@host",
                "valkey://user:hunter2@ho\u2100st",
                "valkey://[hunter2]",
                ["valkey://user:hunter2@host"],
            )
        ),
        [{"object": {"url": "s3://bucket/hunter2//x"}}],
        [{"object": {"url": "az://container/prefix?sv=1&sig=hunter2"}}],
        [{"object": {"url": "s3://bucket", "endpoint": "https://host/?X-Amz-Signature=hunter2"}}],
        [{"mooncake": {"master": "user:hunter2@host:1", "metadata": "http://host/metadata"}}],
        [{"mooncake": {"master": "host:1", "metadata": "http://host/metadata?token=hunter2"}}],
        [{"mooncake": {"master": "host:1", "metadata": "http://hunter2@host/metadata"}}],
        [{"object": {"url": "s3://hunter2@bucket"}}],
        [{"object": {"url": "s3://bucket", "endpoint": "https://hunter2@host"}}],
        [{"valkey": {"url": "valkey://host", "password=hunter2": True}}],
        [{"valkey": {"url": "valkey://host", "valkey://user:hunter2@host": {}}}],
    ],
)
def test_an_address_that_may_hold_a_secret_is_refused_and_not_repeated(tiers: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        KVTierConfig.from_dict({"cpu": {"capacity": "1MiB"}, "tiers": tiers})
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["hunter2 sesame", ["hunter2"], {"password": "hunter2"}])
@pytest.mark.parametrize("config", [ValkeyConfig, ObjectConfig, MooncakeConfig])
def test_a_secret_in_a_wrong_place_is_not_repeated(config: type[Any], value: object) -> None:
    """A person who is asked for a password types it somewhere."""
    needed = {
        "valkey": {"url": "valkey://host"},
        "object": {"url": "s3://bucket"},
        "mooncake": {"master": "host:1", "metadata": "http://host"},
    }[config.kind]
    refused: dict[str, str] = {}
    for setting in fields(config):
        try:
            config.from_dict(needed | {setting.name: value})
        except ConfigError as error:
            refused[setting.name] = f"{error!r} {error.__cause__!r}"
    assert not [text for text in refused.values() if "hunter2" in text]
    assert {"write", "required"} <= refused.keys()
    assert value == "hunter2 sesame" or refused.keys() == {setting.name for setting in fields(config)}


@pytest.mark.parametrize("url", ["unix:///run/a@b.sock?db=3", "valkey://kv@[::1]:6379/2"])
def test_addresses_that_hold_none_are_taken(url: str) -> None:
    KVTierConfig.from_dict({"cpu": {"capacity": "1MiB"}, "tiers": [{"valkey": {"url": url}}]})


class TestFromDict:
    def test_defaults(self) -> None:
        config = KVTierConfig.from_dict({"cpu": {"capacity": "8GiB"}})
        assert config == KVTierConfig(cpu=CPUConfig(capacity=8 * GIB))
        assert (config.cpu.policy, config.blocks_per_chunk, config.prompt_only) == ("gittins", 1, False)
        assert (config.load_deadline, config.store_deadline, config.store_threshold) == (2.0, 30.0, 0)
        assert (config.load_if_faster, config.self_describing_kv_events, config.tiers) == (True, True, ())
        assert config.staging == 256 << 20

    def test_tiers(self) -> None:
        config = KVTierConfig.from_dict({"cpu": {"capacity": "8GiB"}, "tiers": [DISK]})
        assert config.tiers == (DiskConfig(path="/x", capacity=1024 * GIB),)
        (disk,) = config.tiers
        assert (disk.kind, disk.write, disk.write_limit, disk.durability, disk.required) == (
            "disk", "through", 4 << 40, "none", False,
        )  # fmt: skip
        assert KVTierConfig.from_dict(config.to_dict()) == config

    def test_everything(self) -> None:
        given_settings = {
            "cpu": {"capacity": "1GB", "policy": "arc"},
            "blocks_per_chunk": 4,
            "prompt_only": True,
            "load_deadline": "500ms",
            "store_deadline": "1m",
            "store_threshold": 2,
            "load_if_faster": False,
            "staging": "64MiB",
            "self_describing_kv_events": False,
            "longest_keep": "10m",
            "shares": {"by": "cache_salt", "limit": 0.5},
            "tiers": [],
        }
        config = KVTierConfig.from_dict(given_settings)
        assert config == KVTierConfig(
            cpu=CPUConfig(capacity=10**9, policy="arc"),
            blocks_per_chunk=4,
            prompt_only=True,
            load_deadline=0.5,
            store_deadline=60.0,
            store_threshold=2,
            load_if_faster=False,
            staging=64 << 20,
            self_describing_kv_events=False,
            longest_keep=600.0,
            shares=SharesConfig(limit=0.5),
        )
        assert KVTierConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    def test_does_not_change_what_it_is_given(self) -> None:
        given_settings: dict[str, Any] = {"cpu": {"policy": "arc"}, "cpu_bytes_to_use": 5}
        KVTierConfig.from_dict(given_settings)
        assert given_settings == {"cpu": {"policy": "arc"}, "cpu_bytes_to_use": 5}

    def test_vllm_names(self) -> None:
        vllm = {
            "cpu_bytes_to_use": 10**9,
            "eviction_policy": "arc",
            "block_size": 64,
            "offload_prompt_only": True,
            "store_threshold": 2,
            "self_describing_kv_events": True,
        }
        ours = {
            "cpu": {"capacity": 10**9, "policy": "arc"},
            "chunk_tokens": 64,
            "prompt_only": True,
            "store_threshold": 2,
            "self_describing_kv_events": True,
        }
        assert KVTierConfig.from_dict(vllm) == KVTierConfig.from_dict(ours)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ({}, "cpu.capacity: expected a value, got none; this setting is required"),
            ([], "expected a table of settings, got []"),
            ({"cpu": 3}, "cpu: expected a table of settings, got 3"),
            ({"cpu": {}}, "cpu.capacity: expected a value, got none; this setting is required"),
            (
                {"eviction_policy": "lru"},
                "cpu.capacity: expected a value, got none; this setting is required",
            ),
            ({"cpu": {"capacity": 1, "policy": 3}}, "cpu.policy: expected a name, got 3"),
            ({"cpu": {"capacity": 1}, "staging": "1MB"}, "staging: expected at least 1.0 MiB, got '1MB'"),
            ({"cpu": {"capacity": 1, "policy": ""}}, "cpu.policy: expected a name, got ''"),
            ({"cpu": {"capcity": 1}}, "cpu.capcity: no such setting; did you mean cpu.capacity?"),
            ({"cpu": {"x": 1}}, "cpu.x: no such setting; expected one of capacity, policy"),
            (
                {"capacity": "8GiB"},
                'capacity: no such setting; did you mean cpu.capacity? Write {"cpu": {"capacity": ...}}',
            ),
            ({"cpu_capacity": 1}, "cpu_capacity: no such setting; did you mean cpu.capacity?"),
            (
                {"cpu.capacity": 1},
                'cpu.capacity: no such setting; did you mean cpu.capacity? Write {"cpu": ',
            ),
            ({"polcy": "arc"}, "polcy: no such setting; did you mean cpu.policy?"),
            (
                {"cpu": {"capacity": 1, "load_deadline": 2}},
                "cpu.load_deadline: no such setting; did you mean load_deadline? Move it out of cpu",
            ),
            ({"block_per_chunk": 1}, "block_per_chunk: no such setting; did you mean blocks_per_chunk?"),
            ({"cpu_bytes_to_us": 1}, "cpu_bytes_to_us: no such setting; did you mean cpu_bytes_to_use?"),
            ({1: 2}, "1: no such setting; expected one of "),
            ({10**5000: 1}, "a value of type int that cannot be printed: no such setting; "),
            ({"x" * 10**6: 1}, "'xxxx"),
            ({"two\nlines": 1}, "'two\\nlines': no such setting; "),
            ({"\ud800": 1}, "'\\ud800': no such setting; "),
            ({"cpu": NESTED}, "cpu: expected a table of settings, got "),
            ({"cpu": {"capacity": datetime.date(2020, 1, 1)}}, "cpu.capacity: expected a size such as 8GiB"),
            ({"cpu": {"capacity": 1, "policy": "\ud800"}}, "cpu.policy: expected a name, got '\\ud800'"),
            ({"staging": 10**400}, "staging: expected a size below 8.0 EiB, got 1000"),
            (
                {"blocks_per_chunk": 10**400},
                "blocks_per_chunk: expected a whole number of at most 2147483647, got 1000",
            ),
            (
                {"store_threshold": -(10**5000)},
                "store_threshold: expected a whole number of at least 0, got a value",
            ),
            ({"store_deadline": 10**400}, "store_deadline: expected a year (8760h) at most, got 1000"),
            (
                {"prompt_only": NESTED},
                "prompt_only: expected true or false, got a value of type list that cannot be printed",
            ),
            ({"blocks_per_chunk": 0}, "blocks_per_chunk: expected a whole number of at least 1, got 0"),
            (
                {"blocks_per_chunk": True},
                "blocks_per_chunk: expected a whole number of at least 1, got True",
            ),
            ({"blocks_per_chunk": "2"}, "blocks_per_chunk: expected a whole number of at least 1, got '2'"),
            ({"blocks_per_chunk": 2.0}, "blocks_per_chunk: expected a whole number of at least 1, got 2.0"),
            ({"block_size": -16}, "chunk_tokens: expected a whole number of at least 1, got -16"),
            ({"store_threshold": -1}, "store_threshold: expected a whole number of at least 0, got -1"),
            ({"prompt_only": 1}, "prompt_only: expected true or false, got 1"),
            ({"prompt_only": "no"}, "prompt_only: expected true or false, got 'no'"),
            ({"load_deadline": 0}, "load_deadline: expected a time greater than 0, got 0"),
            ({"load_deadline": float("nan")}, "load_deadline: expected a time such as 500ms"),
            ({"tiers": {}}, "tiers: expected a list of tiers, "),
            ({"tiers": [{"type": "disk"}]}, "tiers[0].type: no such tier; there is disk"),
            ({"tiers": [{"dsik": {}}]}, "tiers[0].dsik: no such tier; did you mean disk?"),
            ({"tiers": [{"redis": {}}]}, "tiers[0].redis: no such tier; did you mean valkey?"),
            ({"tiers": [{10**5000: {}}]}, "tiers[0].(a name): no such tier; there is disk"),
            (
                {"tiers": [{"valkey": {}}]},
                "tiers[0].valkey.url: expected a value, got none; this setting is required",
            ),
            (
                {"tiers": [{"valkey": {"url": "http://host"}}]},
                "tiers[0].valkey.url: expected an address that begins with valkey:// or redis://",
            ),
            ({"tiers": [{"valkey": {"url": "valkey:///0"}}]}, "tiers[0].valkey.url: expected a host"),
            ({"tiers": [{"object": {"url": "s3:///x"}}]}, "tiers[0].object.url: expected a bucket"),
            (
                {"tiers": [{"mooncake": {"master": "host", "metadata": "http://host:1"}}]},
                "tiers[0].mooncake.master: expected host:port, got a value of type str",
            ),
            ({"tiers": [{"valky": {}}]}, "tiers[0].valky: no such tier; did you mean valkey?"),
            ({"tiers": ["disk"]}, "tiers[0]: expected the kind of one tier and its settings"),
            ({"tiers": [{}]}, "tiers[0]: expected the kind of one tier and its settings"),
            (
                {"tiers": [{"disk": {}}]},
                "tiers[0].disk.path: expected a value, got none; this setting is required",
            ),
            (
                {"tiers": [{"disk": {"path": "/x", "capacity": "much"}}]},
                "tiers[0].disk.capacity: expected a size",
            ),
            ({"tiers": [{"disk": {"path": "", "capacity": 1}}]}, "tiers[0].disk.path: expected a folder"),
            (
                {"tiers": [{"disk": {"path": "/x", "capacity": 1, "write_limits": 2}}]},
                "tiers[0].disk.write_limits: no such setting; did you mean tiers[0].disk.write_limit?",
            ),
            (
                {"tiers": [{"disk": {"path": "/x", "capacity": 1, "write": "thru"}}]},
                "tiers[0].disk.write: expected 'through' or 'evict', got 'thru'; did you mean 'through'?",
            ),
            ({"tiers": [DISK, DISK]}, "tiers[1]: expected one tier of each kind, got a second disk"),
            (
                {"cpu_bytes_to_use": 1},
                "cpu_bytes_to_use: clashes with cpu.capacity, which means the same; keep one",
            ),
            (
                {"prompt_only": True, "offload_prompt_only": True},
                "offload_prompt_only: clashes with prompt_only",
            ),
            (
                {"block_size": 64, "blocks_per_chunk": 4},
                "chunk_tokens: expected this or blocks_per_chunk, got both",
            ),
            ({"longest_keep": "long"}, "longest_keep: expected a time such as 500ms, 2s or a number of"),
            ({"shares": 0.5}, "shares: expected a table of settings, got 0.5"),
            ({"shares": {}}, "shares.limit: expected a value, got none; this setting is required"),
            ({"shares": {"limit": 0}}, "shares.limit: expected a share above 0, got 0"),
            ({"shares": {"limit": 2}}, "shares.limit: expected a share from 0 to 1, got 2"),
            ({"shares": {"limit": 1, "by": "user"}}, "shares.by: expected 'cache_salt', got 'user'"),
            ({"shares": {"limits": 1}}, "shares.limits: no such setting; did you mean shares.limit?"),
        ],
    )
    def test_refuses(self, bad: Any, message: str) -> None:
        complete = (
            bad
            if not bad or "cpu" in bad or "eviction_policy" in bad
            else {"cpu": {"capacity": "1GiB"}} | bad
        )
        with pytest.raises(ConfigError) as caught:
            KVTierConfig.from_dict(complete)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
        assert caught.value.path == str(caught.value).split(": ")[0] or caught.value.path == ""

    def test_a_python_object_is_validated_too(self) -> None:
        with pytest.raises(ConfigError, match=r"cpu\.capacity: "):
            CPUConfig(capacity=-1)
        with pytest.raises(ConfigError, match="cpu: expected a CPUConfig, got None"):
            KVTierConfig(cpu=None)  # type: ignore[arg-type]


class TestFromFile:
    def test_json_and_toml_say_the_same(self, tmp_path: Path) -> None:
        (tmp_path / "c.json").write_text('{"cpu": {"capacity": "8GiB"}, "load_deadline": "1s"}')
        (tmp_path / "c.toml").write_text('load_deadline = "1s"\n[cpu]\ncapacity = "8GiB"\n')
        assert KVTierConfig.from_file(tmp_path / "c.json") == KVTierConfig.from_file(
            str(tmp_path / "c.toml")
        )

    @pytest.mark.parametrize(
        ("name", "text", "problem"),
        [
            ("c.json", '{"cpu": {"capacity": "8"GiB}}', "expected JSON: Expecting ',' delimiter"),
            ("c.toml", "cpu = ", "expected TOML: Invalid value"),
            (
                "c.toml",
                "[cpu]\ncapacity = 1\npolice = 'lru'",
                "cpu.police: no such setting; did you mean cpu.policy?",
            ),
            ("c.json", "[]", "expected a table of settings, got []"),
            ("c.json", "cpu:\n  capacity: 8GiB", "expected JSON: Expecting value"),
            ("c.json", '{"cpu": {"capacity": NaN}}', "expected JSON: NaN is no number"),
            ("c.json", '{"cpu": {"capacity": -Infinity}}', "expected JSON: -Infinity is no number"),
            ("c.json", '{"cpu": {"capacity": 1e400}}', "cpu.capacity: expected a size such as 8GiB"),
            (
                "c.json",
                '{"cpu": {"capacity": 1, "capacity": 2}}',
                "expected JSON: 'capacity' is given 2 times",
            ),
            ("c.json", '{"cpu": {"capacity": %s}}' % ("9" * 5000), "expected JSON: Exceeds the limit"),
            ("c.json", '{"cpu": %s}' % ("[" * 200_000), "expected JSON: "),
            (
                "c.json",
                '{"cpu": {"capacity": 1, "policy": "\\ud800"}}',
                "cpu.policy: expected a name, got '\\ud800'",
            ),
            ("c.toml", "cpu = %s" % ("[" * 200_000), "expected TOML: "),
            ("c.toml", "[cpu]\ncapacity = 1\ncapacity = 2", "expected TOML: Cannot overwrite a value"),
            ("c.toml", "[cpu]\ncapacity = %s" % ("9" * 5000), "expected TOML: Exceeds the limit"),
            ("c.toml", "[cpu]\ncapacity = inf", "cpu.capacity: expected a size such as 8GiB"),
            ("c.TOML", "[cpu]\ncapacity = 2020-01-01", "cpu.capacity: expected a size such as 8GiB"),
            ("c.json", " " * (1 << 20) + "{}", "expected a file of settings, got more than 1.0 MiB"),
            (
                "c.json",
                '{"kv_connector": "X", "kv_connector_extra_config": {}}',
                "kv_connector: expected 'KVTierConn",
            ),
            ("c.json", WRAPPED % "null", "expected a table of settings, got None"),
            ("c.json", WRAPPED % '{"capacity": 1}', "capacity: no such setting; did you mean cpu.capacity?"),
        ],
        ids=kind,
    )
    def test_errors_name_the_file(self, tmp_path: Path, name: str, text: str, problem: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError) as caught:
            KVTierConfig.from_file(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: {problem}")
        assert "\n" not in str(caught.value)

    def test_all_that_vllm_takes_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "c.json").write_text(WRAPPED % '{"cpu_bytes_to_use": "8Gi"}')
        assert KVTierConfig.from_file(tmp_path / "c.json") == KVTierConfig(cpu=CPUConfig(capacity=8 * GIB))

    def test_a_byte_order_mark_is_read_over(self, tmp_path: Path) -> None:
        for name, text in {"c.json": '{"cpu": {"capacity": 5}}', "c.toml": "cpu.capacity = 5"}.items():
            (tmp_path / name).write_text(text, encoding="utf-8-sig")
            assert KVTierConfig.from_file(tmp_path / name).cpu.capacity == 5

    @pytest.mark.parametrize("content", [b"\xff\xfe{\x00}\x00", b'{"cpu": "\xff"}', bytes(range(256))])
    def test_files_that_are_not_utf_8_are_refused(self, tmp_path: Path, content: bytes) -> None:
        for name in ("c.json", "c.toml"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ConfigError, match=rf"{name}: expected .*'utf-8' codec can't decode"):
                KVTierConfig.from_file(tmp_path / name)

    @pytest.mark.parametrize("path", ["", ".", "a\0b", "/dev/null/c.json", "\udcff.json"])
    def test_paths_that_are_no_file_are_refused(self, path: str) -> None:
        with pytest.raises(ConfigError, match="cannot read this file: "):
            KVTierConfig.from_file(path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"gone\.json: cannot read this file: No such file"):
            KVTierConfig.from_file(tmp_path / "gone.json")

    def test_settings_instead_of_a_file(self) -> None:
        with pytest.raises(ConfigError, match=r"No such file or directory; expected a file, got settings$"):
            KVTierConfig.from_file('{"cpu": {"capacity": "8GiB"}}')


def test_a_namespace_may_be_known_later() -> None:
    gate = threading.Event()

    def compute() -> str:
        assert gate.wait(60)
        return "name"

    later = Namespace(compute)
    config = replace(offloading(namespace=later), rank=0)
    assert config.namespace_nowait() is None
    gate.set()
    later.wait()
    assert config.namespace_nowait() == offloading(namespace="name").namespace_nowait() == "name"


class TestGeometry:
    def test_sizes(self) -> None:
        config = offloading(
            settings=settings(blocks_per_chunk=2, cpu={"capacity": 50_000}),
            groups=(group(), group(bytes_per_block=3000)),
            world_size=2,
        )
        assert [config.image_bytes(0), config.image_bytes(1)] == [2000, 6000]
        assert config.max_image_bytes == 6000
        assert config.row_bytes == 12288  # 2 ranks x 6000, up to a multiple of 4096
        assert config.num_slots == 4

    def test_sizes_where_ranks_differ(self) -> None:
        config = offloading(
            settings=settings(blocks_per_chunk=2, cpu={"capacity": 50_000}),
            groups=(group(), group(bytes_per_block=3000)),
            world_size=2,
            bytes_by_rank=((1000, 3000), (2000, 4000)),
        )
        assert [config.image_bytes(0), config.image_bytes(1)] == [2000, 6000]
        assert config.max_image_bytes == 8000
        assert config.row_bytes == 16384  # 2 ranks x 8000, up to a multiple of 4096
        assert [config.bytes_of_all_ranks(0), config.bytes_of_all_ranks(1)] == [3000, 7000]
        assert [offloading(world_size=3).bytes_of_all_ranks(0)] == [3000]

    @given(st.integers(1, 10**7), st.integers(1, 8), st.integers(1, 9))
    def test_a_row_holds_every_rank_and_wastes_less_than_a_page(
        self, size: int, ranks: int, factor: int
    ) -> None:
        config = offloading(
            settings=settings(blocks_per_chunk=factor, cpu={"capacity": "1TiB"}),
            groups=(group(bytes_per_block=size),),
            world_size=ranks,
        )
        assert config.row_bytes % 4096 == 0
        assert 0 <= config.row_bytes - size * ranks * factor < 4096
        assert config.num_slots * config.row_bytes <= config.settings.cpu.capacity

    def test_a_slot_has_room_behind_its_row_for_a_mooncake_store_alone(self) -> None:
        mooncake = {"mooncake": {"master": "host:1", "metadata": "http://host/metadata"}}
        valkey = {"valkey": {"url": "valkey://host"}}
        for tiers, room in (([], 0), ([valkey], 0), ([valkey, mooncake], 4096)):
            config = offloading(
                settings=settings(cpu={"capacity": 100_000}, tiers=tiers),
                groups=(group(bytes_per_block=8192),),
            )
            assert (config.row_bytes, config.slot_bytes) == (8192, 8192 + room)
            assert config.num_slots == 100_000 // config.slot_bytes, "the room is part of the capacity"
        with pytest.raises(ConfigError, match=r"expected at least one row \(8\.0 KiB\), .* got 7\.8 KiB"):
            offloading(settings=settings(cpu={"capacity": 8000}, tiers=[mooncake]))

    def test_chunk_tokens_become_blocks(self) -> None:
        config = offloading(settings=settings(block_size=64))
        assert (config.settings.blocks_per_chunk, config.settings.chunk_tokens) == (4, None)
        assert settings(block_size=64).chunk_tokens == 64

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"groups": ()}, "groups: expected at least one KV cache group, got ()"),
            ({"groups": ("x",)}, "groups[0]: expected a GroupConfig, got 'x'"),
            ({"hash_block_size": 0}, "hash_block_size: expected a whole number of at least 1, got 0"),
            (
                {"groups": (group(), group(block_size=24))},
                "groups[1].block_size: expected a multiple of hash_block_size (16 tokens), got 24",
            ),
            ({"world_size": 0}, "world_size: expected a whole number of at least 1, got 0"),
            ({"rank": 1}, "rank: expected less than world_size (1), got 1"),
            ({"rank": -1}, "rank: expected a whole number of at least 0, got -1"),
            (
                {"bytes_by_rank": ((1000,), (500,))},
                "bytes_by_rank: expected 1 ranks with 1 group(s) each, got ((1000,), (500,))",
            ),
            (
                {"bytes_by_rank": ((1000, 500),)},
                "bytes_by_rank: expected 1 ranks with 1 group(s) each, got ((1000, 500),)",
            ),
            (
                {"bytes_by_rank": ((500,),)},
                "bytes_by_rank[0]: expected (1000,), as its groups have, got (500,)",
            ),
            (
                {"bytes_by_rank": ((1000,), (0,)), "world_size": 2},
                "bytes_by_rank[1][0]: expected a whole number of at least 1, got 0",
            ),
            (
                {"replicas": 2, "world_size": 3},
                "replicas: expected a divisor of world_size (3), got 2",
            ),
            ({"bytes_by_rank": (1000,)}, "bytes_by_rank: expected sizes by group of each rank, got (1000,)"),
            ({"engine_id": ""}, "engine_id: expected a name, got ''"),
            ({"engine_id": "\ud800"}, "engine_id: expected a name, got '\\ud800'"),
            (
                {"world_size": 2**31},
                "world_size: expected a whole number of at most 2147483647, got 2147483648",
            ),
            ({"namespace": None}, "namespace: expected a string or a Namespace, got None"),
            ({"settings": {}}, "settings: expected a KVTierConfig, got {}"),
            (
                {"settings": settings(cpu={"capacity": "4kB"})},
                "cpu.capacity: expected at least one row (4.0 KiB), or 0 to keep nothing, got 3.9 KiB",
            ),
            (
                {"settings": settings(cpu={"capacity": 1})},
                "cpu.capacity: expected at least one row (4.0 KiB), or 0 to keep nothing, got 1 B",
            ),
            (
                {"settings": settings(block_size=24)},
                "chunk_tokens: expected a multiple of the engine's block size (16 tokens), got 24; try 32",
            ),
            (
                {"settings": settings(block_size=32), "groups": (group(), group(block_size=32))},
                "chunk_tokens: expected groups of one block size, got [16, 32]; "
                "set blocks_per_chunk instead",
            ),
        ],
    )
    def test_refuses(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            offloading(**changes)
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"block_size": 0}, "group.block_size: expected a whole number of at least 1, got 0"),
            (
                {"bytes_per_block": None},
                "group.bytes_per_block: expected a whole number of at least 1, got None",
            ),
            ({"layer_names": ()}, "group.layer_names: expected the names of one layer or more, got ()"),
            (
                {"layer_names": "attn"},
                "group.layer_names: expected the names of one layer or more, got 'attn'",
            ),
            ({"layer_names": ("a", 3)}, "group.layer_names[1]: expected a name, got 3"),
            ({"sliding_window": 0}, "group.sliding_window: expected a whole number of at least 1, got 0"),
        ],
    )
    def test_refuses_a_group(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            group(**changes)
        assert str(caught.value) == message

    @pytest.mark.parametrize("nothing", [0, "0", "0GiB"])
    def test_a_capacity_of_zero_keeps_nothing(self, nothing: object) -> None:
        assert offloading(settings=settings(cpu={"capacity": nothing})).num_slots == 0

    def test_a_capacity_of_exactly_one_row_will_do(self) -> None:
        assert offloading(settings=settings(cpu={"capacity": 4096})).num_slots == 1


@pytest.mark.parametrize(
    "url", ["valkey://user:geheim@host:1/0", "redis://:geheim@host", "valkeys://u:geheim@[::1"]
)
def test_a_password_in_an_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.valkey\.url: expected") as caught:
        KVTierConfig.from_dict({"cpu": {"capacity": 1}, "tiers": [{"valkey": {"url": url}}]})
    assert "geheim" not in str(caught.value)


def test_settings_of_shared_tiers_come_back_equal() -> None:
    tiers = [
        {"valkey": {"url": "valkeys://user@host:6380/2", "ttl": "1h", "password_file": "/secret"}},
        {"object": {"url": "s3://bucket/prefix", "endpoint": "http://127.0.0.1:9000", "allow_http": True}},
        {"mooncake": {"master": "host:50051", "metadata": "http://host:8080/metadata", "segment": "1GiB"}},
    ]
    config = KVTierConfig.from_dict({"cpu": {"capacity": "1GiB"}, "tiers": tiers})
    assert [tier.kind for tier in config.tiers] == ["valkey", "object", "mooncake"]
    assert KVTierConfig.from_dict(config.to_dict()) == config
