"""Every setting of vLLM makes the namespace, but those that are listed as harmless, and in every process the
same one.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.models import save_blip2
from tests.vllm.test_contract import engine_config, is_at_least

from kvtier.errors import OutsideError


def settings_of(config: Any) -> str:
    from kvtier.integrations.vllm.engine_settings import all_settings

    return json.dumps(all_settings(config)(), sort_keys=True, allow_nan=False)


def settings_or_refusal(config: Any) -> str:
    try:
        return settings_of(config)
    except OutsideError as error:
        return str(error)


def harmless() -> dict[str, str]:
    from kvtier.integrations.vllm.engine_settings import HARMLESS

    return HARMLESS


def config_classes() -> list[type]:
    """Return every class of settings of the installed vLLM."""
    import vllm.config

    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.iter_modules(vllm.config.__path__, "vllm.config.")
    ]
    return [
        found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type) and is_dataclass(found) and found.__module__ == module.__name__
    ]


def with_field(config_class: type, name: str, value: Any) -> Any:
    """Return a config that was not checked, all of whose fields are None but one."""
    config = object.__new__(config_class)
    for field in fields(config_class):
        object.__setattr__(config, field.name, value if field.name == name else None)
    return config


def test_every_field_of_every_class_counts_or_is_listed() -> None:
    silent = {
        f"{config_class.__name__}.{field.name}"
        for config_class in config_classes()
        for field in fields(config_class)
        if settings_or_refusal(with_field(config_class, field.name, "one"))
        == settings_or_refusal(with_field(config_class, field.name, "two"))
    }
    assert len(config_classes()) > 30
    assert silent == harmless().keys() - missing_fields()  # so none that is listed has another name now


VERSIONS = {
    "CacheConfig.cache_hit_alignment_tokens": ("0.32", None),
    "CacheConfig.hash_block_size": ("0.32", None),
    "CacheConfig.simple_cpu_offload_num_blocks": ("0.33", None),
    "CompilationConfig.decoder_replay_cudagraph_capture_sizes": ("0.32", None),
    "KVTransferConfig.kv_buffer_size": (None, "0.32"),
    "KVTransferConfig.kv_ip": (None, "0.32"),
    "KVTransferConfig.kv_parallel_size": (None, "0.32"),
    "KVTransferConfig.kv_rank": (None, "0.32"),
    "ModelConfig.sleep_mode_offload_cudagraph": ("0.32", None),
    "VllmConfig.watchdog_config": ("0.33", None),
}
"""Fields that only some versions have: the first version with each, and the first without."""


def missing_fields() -> set[str]:
    """Return the fields that the installed version does not have."""
    return {
        name
        for name, (since, until) in VERSIONS.items()
        if (since is not None and not is_at_least(since)) or (until is not None and is_at_least(until))
    }


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Any:
    """The settings of an engine with images, a draft model, adapters and events."""
    speculative = {"model": str(llama), "method": "draft_model", "num_speculative_tokens": 2}
    return engine_config(
        save_blip2(tmp_path_factory.mktemp("blip2")),
        skip_tokenizer_init=False,
        speculative_config=speculative,
        enable_lora=True,
        kv_events_config={"enable_kv_cache_events": True},
    )


def test_every_value_of_a_real_engine_counts_or_is_listed(config: Any) -> None:
    before, seen = settings_of(config), set()
    for place, name in walk(config):
        where, value = f"{type(place).__name__}.{name}", getattr(place, name)
        object.__setattr__(place, name, another(value))
        try:
            after = settings_or_refusal(config)
        finally:
            object.__setattr__(place, name, value)
        counts = where not in harmless() or (place is config.model_config and name in TOKENIZER)
        assert (after != before) == counts, where
        seen.add(type(place).__name__)
    assert settings_of(config) == before
    assert {"VllmConfig", "ModelConfig", "MultiModalConfig", "SpeculativeConfig", "LoRAConfig"} < seen


TOKENIZER = {"model", "skip_tokenizer_init", "tokenizer"}
"""Fields that count for models with media if one of them changes alone: the tokenizer is the model's own."""


class TestTokenizer:
    """transformers takes settings of processors of images from the tokenizer's."""

    def test_a_folder_s_files_count(self, config: Any, tmp_path: Path) -> None:
        other = copy(config)
        other.model_config = copy(config.model_config)
        other.model_config.tokenizer = str(tmp_path)
        names = {settings_of(config)}
        for content in ("{}", '{"do_normalize": false}'):
            (tmp_path / "tokenizer_config.json").write_text(content)
            names.add(settings_of(other))
        assert len(names) == 3

    def test_the_model_s_own_counts_as_such(self, config: Any, tmp_path: Path) -> None:
        own = copy(config)
        own.model_config = copy(config.model_config)
        link = tmp_path / "link"
        link.symlink_to(config.model_config.model)
        own.model_config.tokenizer = str(link)
        assert settings_of(own) == settings_of(config)
        own.model_config.model = own.model_config.tokenizer = "org/name"
        assert settings_of(own) == settings_of(config)

    def test_another_of_the_hub_counts_by_its_commit(self, config: Any) -> None:
        other = copy(config)
        other.model_config = copy(config.model_config)
        other.model_config.tokenizer, names = "org/other", {settings_of(config)}
        for commit in ("c" * 40, "d" * 40):
            other.model_config.tokenizer_revision = commit
            names.add(settings_of(other))
        assert len(names) == 3
        other.model_config.tokenizer_revision = "main"
        with pytest.raises(OutsideError, match=r"ModelConfig\.tokenizer: expected the model's own"):
            settings_of(other)

    def test_without_media_it_does_not_count(self, llama: Path, tmp_path: Path) -> None:
        config = engine_config(llama)
        before = settings_of(config)
        config.model_config.tokenizer = str(tmp_path)
        config.model_config.skip_tokenizer_init = False
        assert settings_of(config) == before


class TestModelClass:
    """A plug-in may give an architecture a class of its own."""

    def test_a_plug_in_s_code_counts(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm import ModelRegistry

        config, folder = engine_config(llama), tmp_path / "own_models"
        names = {settings_of(config)}
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        ModelRegistry.register_model("LlamaForCausalLM", "own_models.llama:Own")
        for file in ("llama.py", "helper.py"):
            (folder / file).write_text(f"# {file}")
            names.add(settings_of(config))
        assert len(names) == 3
        assert settings_of(config) in names

    def test_a_class_that_was_imported_counts(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch
        from vllm import ModelRegistry

        config = engine_config(llama)
        before = settings_of(config)
        Own = type("Own", (torch.nn.Module,), {"__module__": __name__})
        entry = SimpleNamespace(model_cls=Own)
        monkeypatch.setitem(ModelRegistry.models, "LlamaForCausalLM", entry)
        assert settings_of(config) != before
        Own.__module__ = "__main__"
        with pytest.raises(OutsideError, match="__main__: expected a model's class in a package"):
            settings_of(config)

    def test_an_architecture_without_a_class_is_refused(
        self, llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm import ModelRegistry

        config = engine_config(llama)
        monkeypatch.delitem(ModelRegistry.models, "LlamaForCausalLM")
        with pytest.raises(OutsideError, match="LlamaForCausalLM: expected a class of vLLM's registry"):
            settings_of(config)


def test_libraries_that_prepare_media_and_weights_count() -> None:
    from kvtier.integrations.vllm.engine_settings import installed_libraries

    assert {"vllm", "torch", "transformers", "Pillow", "numpy"} <= installed_libraries().keys()


def test_fields_that_only_some_processes_fill_in_do_not_count(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler apart from its workers never sees these two."""
    if not is_at_least("0.32"):
        pytest.skip("vLLM has these fields from 0.32 on")
    before = settings_of(config)
    for name in ("hash_block_size", "cache_hit_alignment_tokens"):
        monkeypatch.setattr(config.cache_config, name, 32)
    assert settings_of(config) == before


def walk(config: Any) -> Iterator[tuple[Any, str]]:
    """Yield the fields of a config and of the configs in it that count."""
    from transformers import PretrainedConfig

    for field in fields(config):
        yield config, field.name
        value = getattr(config, field.name)
        is_config = is_dataclass(value) and not isinstance(value, type | PretrainedConfig)
        if is_config and f"{type(config).__name__}.{field.name}" not in harmless():
            yield from walk(value)


def another(value: Any) -> Any:
    """Return another value, of the same type where that is easy."""
    if isinstance(value, Enum):
        return next((other for other in type(value) if other is not value), None)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list):
        return [*value, "x"]
    if isinstance(value, dict):
        return {**value, "x": "x:x"}  # vLLM takes it for a class where it expects one
    if isinstance(value, set):
        return value | {"x"}
    return "x" if value is None else None


def test_the_model_s_config_counts(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_of(config)
    monkeypatch.setattr(config.model_config.hf_config.vision_config, "layer_norm_eps", 0.5)
    assert settings_of(config) != before


def test_a_field_that_a_new_vllm_adds_counts(config: Any) -> None:
    from vllm.config import CacheConfig

    Newer = make_dataclass("Newer", [("twist", int, 0)], bases=(CacheConfig,))
    names = {settings_of(config)}
    for twist in (0, 1):
        newer, cache = copy(config), object.__new__(Newer)
        cache.__dict__ |= vars(config.cache_config) | {"twist": twist}
        newer.cache_config = cache
        names.add(settings_of(newer))
        cache.num_gpu_blocks = 12345  # still harmless
        names.add(settings_of(newer))
    assert len(names) == 3


def _named(config: Any) -> Any:
    return config


class _Opaque:
    def method(self, config: Any) -> Any:
        return config


@dataclass
class _Holder:
    hf_overrides: Any


@pytest.mark.parametrize(
    "value", [lambda config: config, _Opaque(), _Opaque().method, partial(_Opaque().method)]
)
def test_a_value_without_a_name_is_refused(value: Any) -> None:
    expected = (
        r"_Holder\.hf_overrides\['x'\].*: expected a value that has the same name in every process, got"
    )
    with pytest.raises(OutsideError, match=expected):
        settings_of(_Holder({"x": value}))


def test_values_with_a_name_are_told_apart() -> None:
    import torch

    values: list[Any] = [
        *(None, True, 1, 1.5, "1", b"1", float("inf"), float("nan")),
        *(_named, partial(_named, 1), partial(_named, 2), _Opaque, Path("1"), torch.float16, torch.bfloat16),
        *([1], [2], {1}, {"1"}, {1: 2}, {"1": 2}, {"a": {"b": [1, {2}]}}, _Holder(1), _Holder("1")),
    ]
    assert len({settings_of(_Holder(value)) for value in values}) == len(values)
    assert settings_of(_Holder({"a": {3, 1, 2}, "b": 1})) == settings_of(_Holder({"b": 1, "a": {2, 3, 1}}))


def test_a_file_beside_the_weights_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images = config.model_config.multimodal_config
    monkeypatch.setattr(images, "mm_encoder_fp8_scale_path", "scales.json")
    with pytest.raises(
        OutsideError, match=r"mm_encoder_fp8_scale_path: expected no file beside the weights"
    ):
        settings_of(config)


def test_a_length_that_is_fitted_to_memory_does_not_count(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With -1 each start may get another one, for a model that was built before."""
    names = {settings_of(config)}
    monkeypatch.setattr(config.model_config, "original_max_model_len", -1)
    for length in (512, 640):
        monkeypatch.setattr(config.model_config, "max_model_len", length)
        names.add(settings_of(config))
    assert len(names) == 2


def test_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {settings_of(_Holder(1))}
    for name in ("VLLM_MLA_DISABLE", "VLLM_A_NEW_ONE", "VLLM_FLOAT32_MATMUL_PRECISION"):
        monkeypatch.setenv(name, "1")
        names.add(settings_of(_Holder(1)))
    assert len(names) == 4


HARMLESS_VARIABLES = {
    "VLLM_API_KEY": "secret",
    "VLLM_DP_RANK": "1",
    "VLLM_HOST_IP": "10.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PORT": "tcp://10.0.0.1:80",  # all of these by Kubernetes, for a service of the name vllm
    "VLLM_PORT_80_TCP": "tcp://10.0.0.1:80",
    "VLLM_PORT_80_TCP_ADDR": "10.0.0.1",
    "VLLM_SERVICE_HOST": "10.0.0.1",
    "VLLM_SERVICE_PORT": "80",
    "VLLM_SERVICE_PORT_HTTP": "80",
}


def test_harmless_variables_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_of(_Holder(1))
    for name, value in HARMLESS_VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert settings_of(_Holder(1)) == before


STARTED = """
import sys
from tests.vllm.test_contract import engine_config
from tests.vllm.test_engine_settings import settings_of
print("settings:", settings_of(engine_config(sys.argv[1], **eval(sys.argv[2]))))
"""


def test_another_process_has_the_same_settings(llama: Path) -> None:
    """Also with other harmless settings."""
    variables = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    options: dict[str, Any] = {
        "async_scheduling": False,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 96,
        "gpu_memory_utilization": 0.3,
        "seed": 7,
    }
    starts = []
    for more, chosen in (({}, {}), (variables, options | {"served_model_name": "name"})):
        code = [sys.executable, "-c", STARTED, str(llama), repr(chosen)]
        done = subprocess.run(code, env=os.environ | more, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        starts += [line for line in done.stdout.splitlines() if line.startswith("settings:")]
    assert len(starts) == 2
    assert starts[0] == starts[1]
