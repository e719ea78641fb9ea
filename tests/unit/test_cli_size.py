"""`kvtier size`: bytes of a token of known models, the figures that follow, and bad configs."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cli.model_shape import ModelShape, read_shape
from kvtier.cli.size import make_report
from kvtier.config import KVTierConfig
from kvtier.errors import ModelError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
}
QWEN_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "dtype": "bfloat16",
}


def report_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["size", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 131_072),
        (DEEPSEEK, 70_272),
        ({**DEEPSEEK, "index_head_dim": 128}, 70_272 + 61 * 132),
        (GEMMA, 62 * 2 * 16 * 128 * 2),
        (QWEN_NEXT, 12 * 2 * 2 * 256 * 2),
        ({**LLAMA, "torch_dtype": "float32"}, 262_144),
        ({**LLAMA, "num_key_value_heads": None}, 524_288),
    ],
)
def test_bytes_of_a_token(config: dict[str, Any], expected: int) -> None:
    assert read_shape(config).bytes_per_token == expected


def changed(**changes: Any) -> dict[str, Any]:
    """Return a config without a number of KV heads, and with these fields."""
    return {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"} | changes


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (changed(model_type="step3_text", head_dim=256, num_attention_groups=1), 32 * 1 * 256 * 4),
        (
            changed(model_type="chatglm", multi_query_attention=True, multi_query_group_num=2),
            32 * 2 * 128 * 4,
        ),
        (changed(model_type="chatglm", multi_query_attention=False, kv_channels=64), 32 * 32 * 64 * 4),
        (LLAMA | {"attn_type_list": [0, 0, 0, 1] * 8}, 8 * 8 * 128 * 4),
        (changed(num_key_value_heads_per_layer=[4] * 32), 32 * 4 * 128 * 4),
        (LLAMA | {"full_attn_idxs": [2, 5, 8]}, 3 * 8 * 128 * 4),
        (LLAMA | {"model_type": "mistral", "head_dim": None}, 32 * 8 * 128 * 4),
        (LLAMA | {"model_type": "mixtral"}, 32 * 8 * 128 * 4),
        ({"num_hidden_layers": 2, "dtype": "float32", "text_config": LLAMA}, 32 * 8 * 128 * 4),
        (
            LLAMA
            | {
                "model_type": "recurrent_gemma",
                "block_types": ["recurrent", "recurrent", "attention"],
                "attention_window_size": 2048,
            },
            10 * 8 * 128 * 4,
        ),
        (
            LLAMA | {"mamba_ssm_dtype": [1], "layer_types": ["mamba", "attention"] * 16},
            16 * 8 * 128 * 4,
        ),
    ],
)
def test_fields_that_families_name_otherwise(config: dict[str, Any], expected: int) -> None:
    assert read_shape(config).bytes_per_token == expected


def test_options_come_before_all_names_of_a_field() -> None:
    config = changed(multi_query_attention=True, multi_query_group_num=2, kv_channels=64)
    nested = {"text_config": config}
    given = {"num_hidden_layers": 4, "num_key_value_heads": 8, "head_dim": 32, "dtype": "float32"}
    assert read_shape(nested, given=given).bytes_per_token == 4 * 8 * 32 * 2 * 4


def test_the_window_of_a_recurrent_gemma() -> None:
    config = LLAMA | {"block_types": ["attention"], "attention_window_size": 2048}
    (layers,) = read_shape(config).sets
    assert (layers.kind, layers.window) == ("sliding attention", 2048)


def test_a_pipe_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert main(["size", str(tmp_path)]) == 2
    assert "config.json: expected a file, got a folder, a pipe or a device" in capsys.readouterr().err


def test_a_cache_of_eight_bits_takes_half() -> None:
    assert read_shape(LLAMA, cache_dtype="fp8").bytes_per_token == 65_536


def test_windows_bound_what_a_load_brings() -> None:
    shape = read_shape(GEMMA)
    assert {layers.kind: (layers.layers, layers.window) for layers in shape.sets} == {
        "sliding attention": (52, 1024),
        "full attention": (10, None),
    }
    layer = 2 * 16 * 128 * 2
    assert shape.load_bytes(100, per_rank=False) == 62 * layer * 100
    assert shape.load_bytes(5000, per_rank=False) == layer * (10 * 5000 + 52 * 1024)


@pytest.mark.parametrize(
    ("more", "full", "windowed"),
    [
        ({"model_type": "mistral", "head_dim": 128, "sliding_window": 4096}, 0, 32),
        ({"model_type": "mistral", "head_dim": 128, "sliding_window": None}, 32, 0),
        ({"model_type": "gemma2", "head_dim": 256, "sliding_window": 4096}, 16, 16),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 32, 0),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 28,
            },
            28,
            4,
        ),
        (
            {
                "model_type": "gpt_oss",
                "head_dim": 64,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"] * 16,
            },
            16,
            16,
        ),
    ],
)
def test_kinds_of_layers(more: dict[str, Any], full: int, windowed: int) -> None:
    sets = read_shape({**LLAMA, **more}).sets
    assert sum(layers.layers for layers in sets if layers.window is None) == full
    assert sum(layers.layers for layers in sets if layers.window is not None) == windowed


def test_states_are_counted_by_boundary() -> None:
    shape = read_shape(QWEN_NEXT)
    conv, recurrent = 3 * (2 * 16 * 128 + 32 * 128) * 2, 32 * 128 * 128 * 2
    assert (shape.state_layers, shape.state_bytes) == (36, 36 * (conv + recurrent))
    in_float = read_shape({**QWEN_NEXT, "mamba_ssm_dtype": "float32"})
    assert in_float.state_bytes == 36 * (conv + 2 * recurrent)
    mamba = {
        "layer_types": ["mamba", "attention"] * 16,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    }
    shape = read_shape({**LLAMA, **mamba})
    assert shape.bytes_per_token == 131_072 // 2
    assert shape.state_bytes == 16 * 2 * (3 * (128 * 64 + 2 * 128) + 128 * 64 * 128)
    shape = read_shape({**LLAMA, "layer_types": ["conv", "full_attention"] * 16})
    assert (shape.state_layers, shape.state_bytes) == (16, None)


def test_ranks_divide_heads_and_repeat_what_cannot_be_divided() -> None:
    two = read_shape(LLAMA, tensor_parallel=2)
    assert (two.bytes_per_rank, two.bytes_per_token) == (65_536, 131_072)
    sixteen = read_shape(LLAMA, tensor_parallel=16)
    assert (sixteen.bytes_per_rank, sixteen.bytes_per_token) == (16_384, 262_144), "each head is kept twice"
    mla = read_shape(DEEPSEEK, tensor_parallel=8)
    assert (mla.bytes_per_rank, mla.bytes_per_token, mla.is_replicated) == (70_272, 70_272, True)
    with pytest.raises(
        ModelError, match="--tensor-parallel: expected a divisor or a multiple of the 8 KV heads, got 3"
    ):
        read_shape(LLAMA, tensor_parallel=3)


def figures(shape: ModelShape, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "tensor_parallel": 1,
        "block_size": 16,
        "memory": None,
        "disk": None,
        "bus": 55_000_000_000,
        "disk_bandwidth": 3_000_000_000,
        "prefill": 10_000.0,
    }
    return make_report(shape, **{**given, **changes})


def test_the_prompt_from_which_a_load_pays() -> None:
    """A load costs 10 ms and its bytes: with 131,072 bytes a token, 2.38 µs a token over the bus."""
    pool, disk = figures(read_shape(LLAMA)).sources
    assert pool.pays_from == int(0.01 / (1e-4 - 131_072 / 55e9)) + 1 == 103
    assert disk.pays_from == int(0.01 / (1e-4 - 131_072 / 55e9 - 131_072 / 3e9)) + 1
    assert pool.tokens_per_second == pytest.approx(55e9 / 131_072)
    slow = figures(read_shape(LLAMA), disk_bandwidth=1_000_000_000).sources[1]
    assert slow.pays_from is None, "131 µs a token from disk, 100 µs to compute"
    windowed = figures(read_shape(GEMMA), disk_bandwidth=2_000_000_000).sources[1]
    assert windowed.pays_from is not None
    assert windowed.pays_from > 1024, "within the window a token is read more slowly than computed"
    chunk = figures(read_shape(LLAMA), block_size=512).sources[0]
    assert chunk.pays_from == 513, "only whole chunks are loaded"


def test_rows_that_a_disk_likes() -> None:
    small = read_shape({**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 1})
    report = figures(small, memory=1 << 30, disk=1 << 33)
    assert report.settings["blocks_per_chunk"] == 8
    assert report.row_bytes == 8 * 16 * small.bytes_per_token == 256 << 10
    assert report.sources[1].tokens == (1 << 33) // small.bytes_per_token


def test_padding_of_rows_takes_room() -> None:
    """A row of 16 tokens of DeepSeek V3 is 1,124,352 bytes, in whole pages 1,126,400."""
    report = figures(read_shape(DEEPSEEK, tensor_parallel=8), tensor_parallel=8, memory=100 << 30)
    assert report.row_bytes == 1_126_400
    assert report.sources[0].tokens == (100 << 30) // 1_126_400 * 16


def test_json_and_settings_that_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = report_json(capsys, str(tmp_path), "--memory", "64GiB", "--disk", "1TiB")
    assert found["bytes_per_token"] == 131_072
    assert found["tokens_per_gib"] == 8192
    assert [source["tokens"] for source in found["sources"]] == [524_288, 8_388_608]
    assert KVTierConfig.from_dict(found["settings"]).cpu.capacity == 64 << 30
    assert found == report_json(
        capsys, str(tmp_path / "config.json"), "--memory", "64GiB", "--disk", "1024GiB"
    )

    assert main(["size", str(tmp_path), "--memory", "64GiB", "--disk", "1TiB"]) == 0
    printed = capsys.readouterr().out
    assert "131,072 bytes" in printed
    (flag,) = [line for line in printed.splitlines() if "--kv-transfer-config" in line]
    (tmp_path / "flag.json").write_text(shlex.split(flag)[-1])
    assert KVTierConfig.from_file(tmp_path / "flag.json").tiers[0].to_dict()["capacity"] == 1 << 40


def test_numbers_in_place_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bfloat16")
    assert report_json(capsys, *options)["bytes_per_token"] == 131_072
    (tmp_path / "config.json").write_text(json.dumps(GEMMA | {"dtype": None}))
    found = report_json(capsys, str(tmp_path), "--kv-heads", "8", "--dtype", "float16")
    assert found["bytes_per_token"] == 62 * 2 * 8 * 128 * 2, "options come before the config"


def test_the_table_names_what_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_NEXT))
    assert main(["size", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "states, not by token" in printed
    assert "36 recurrent layers" in printed
    assert "depends on how the engine puts layers into groups" in printed
    assert "Give --memory" in printed


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            without(LLAMA, "num_hidden_layers"),
            "num_hidden_layers: expected a positive whole number, got nothing; give --layers",
        ),
        (
            without(without(LLAMA, "num_attention_heads"), "num_key_value_heads"),
            "num_key_value_heads: expected a positive whole number, got nothing; give --kv-heads",
        ),
        (
            without(LLAMA, "hidden_size"),
            "head_dim: expected a positive whole number, got nothing; give --head-dim",
        ),
        ({**LLAMA, "model_type": "qwen3"}, "head_dim: expected a positive whole number, got nothing"),
        (without(LLAMA, "torch_dtype"), "dtype: expected float32, float16, bfloat16, got nothing; give"),
        ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers: expected a positive whole number, got -1"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types: expected a list of one per layer"),
        ({**LLAMA, "layer_types": ["novel"] * 32}, "got 'novel'; leave out MODEL and give --layers"),
        ({**LLAMA, "block_configs": [{}]}, "block_configs: the layers of such a model keep KV of sizes"),
        ({**LLAMA, "layer_types": ["mamba"] * 32}, "expected at least one layer with attention, got none"),
        (without(DEEPSEEK, "qk_rope_head_dim"), "qk_rope_head_dim: expected a positive whole number"),
        ({**LLAMA, "cross_attention_layers": [3]}, "cross_attention_layers: the layers of such a model"),
        ({**LLAMA, "mamba_step": 2}, "mamba_step: the layers of such a model keep KV of sizes"),
        ({**LLAMA, "use_cla": True, "cla_share_factor": 2}, "use_cla: the layers of such a model"),
        (
            {**without(LLAMA, "num_key_value_heads"), "num_key_value_heads_per_layer": [4, 2] * 16},
            "num_key_value_heads_per_layer: expected the same number for all layers",
        ),
        ({**LLAMA, "layer_types": [{}] * 32}, "layer_types: expected attention"),
        ({**LLAMA, "attn_type_list": [1.0] * 32}, "attn_type_list: expected 0 or 1 for each layer"),
        ({**LLAMA, "full_attn_idxs": [[1]]}, "full_attn_idxs: expected numbers of layers, below 32"),
        ({**LLAMA, "attn_layer_indices": [32]}, "attn_layer_indices: expected numbers of layers, below 32"),
        ({**LLAMA, "block_types": [[]]}, "block_types: expected a list of recurrent, attention"),
        ({**LLAMA, "num_hidden_layers": 16_000_000}, "num_hidden_layers: expected at most 16,384"),
        (
            {**LLAMA, "num_attention_heads": 8192},
            "hidden_size: expected a multiple of the 8192 heads, got 4096; give --head-dim",
        ),
        (
            {**without(LLAMA, "num_key_value_heads"), "model_type": "mistral"},
            "num_key_value_heads: expected",
        ),
    ],
)
def test_a_config_that_does_not_say_enough(
    config: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["size", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvtier: {tmp_path}: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected MODEL, or --layers, --kv-heads, --head-dim, --dtype"),
        (["nowhere"], "expected a folder with a model's config.json, or that file: No such file or dir"),
        (["a/deep/folder"], "or that file: No such file or directory\n"),
        (["org/model-8B"], "; to fetch one: hf download org/model-8B config.json --local-dir FOLDER\n"),
        (["--layers", "2", "--cache-dtype", "int3"], "--cache-dtype: expected one of float32"),
        (
            ["--layers=1", "--kv-heads=1", "--head-dim=8", "--dtype=float16", "--bus=0"],
            "--bus: expected more than 0",
        ),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000])
def test_a_file_that_is_no_config(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["size", str(tmp_path)]) == 2
    assert "config.json: expected" in capsys.readouterr().err
