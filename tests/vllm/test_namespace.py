"""Whose bytes a vLLM engine's are: the content of the weights decides, wherever vLLM has read them from."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_digests import forbid_reading, hub_file
from tests.vllm.device import on_gpu
from tests.vllm.engines import Engine, make_prompt, vllm_engine
from tests.vllm.models import save_blip2
from tests.vllm.test_contract import cache_config, engine_config
from tests.vllm.test_tiers import wait_open, wait_written

from kvtier.namespace import Namespace, WeightsFiles

__all__ = ["cache_config"]  # a fixture

COMMIT = "c" * 40
MIB = 1 << 20


def describe(vllm_config: Any, cache_config: Any) -> Namespace:
    from kvtier.integrations.vllm import describe_engine

    found = describe_engine(vllm_config, cache_config).namespace
    assert isinstance(found, Namespace)
    found.wait(60)
    return found


def known(vllm_config: Any, cache_config: Any) -> str | None:
    found = describe(vllm_config, cache_config)
    assert found.problem is None
    return found.get_nowait()


def in_hub(cache: Path, model: Path) -> Path:
    """Put a model into a cache as the hub's client does. Return its snapshot."""
    for file in sorted(model.iterdir()):
        hub_file(cache, file.read_bytes(), name=file.name)
    refs = cache / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return cache / "models--org--name" / "snapshots" / COMMIT


def by_name(model: Path, cache: Path, *, commit: str | None = COMMIT, **load: Any) -> Any:
    """Return the config of an engine whose model was given by its name on the hub.

    Tests run offline, where vLLM puts the folder in the name's place.
    """
    found = engine_config(model)
    found.model_config.model = "org/name"
    found.model_config.hf_config._commit_hash = commit
    found.load_config.download_dir = str(cache)
    for name, value in load.items():
        setattr(found.load_config, name, value)
    return found


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_changed_weights_have_another_namespace(
    llama: Path, tmp_path: Path, cache_config: Any, name: str
) -> None:
    """Samples of each file once left out whole matrices, and folders without safetensors counted by their
    path.
    """
    folder = shutil.copytree(llama, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / name).write_bytes(bytes(64 * MIB))
    before = known(engine_config(folder), cache_config)
    copy = known(engine_config(shutil.copytree(folder, tmp_path / "copy")), cache_config)
    with (folder / name).open("r+b") as stream:
        stream.seek(MIB // 8)
        stream.write(b"\x01" * (MIB // 2))
    assert known(engine_config(folder), cache_config) != before
    assert copy == before


class TestHub:
    def test_a_name_is_its_files(self, llama: Path, tmp_path: Path, cache_config: Any) -> None:
        snapshot = in_hub(tmp_path / "hub", llama)
        configs = engine_config(llama), engine_config(snapshot), by_name(llama, tmp_path / "hub")
        assert len({known(config, cache_config) for config in configs}) == 1

    def test_and_they_are_not_read(
        self, llama: Path, tmp_path: Path, cache_config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        in_hub(tmp_path / "hub", llama)
        forbid_reading(monkeypatch)
        assert describe(by_name(llama, tmp_path / "hub"), cache_config).problem is None

    @pytest.mark.parametrize(
        "options",
        [
            {"commit": None},
            {"commit": "d" * 40},
            {"load_format": "tensorizer"},
            {"load_format": "npcache"},
            {"download_dir": "/nowhere"},
        ],
    )
    def test_weights_that_are_in_no_known_files_are_like_no_others(
        self, llama: Path, tmp_path: Path, cache_config: Any, options: dict[str, Any]
    ) -> None:
        """A branch that has moved, another kind of loader, another kind of store."""
        in_hub(tmp_path / "hub", llama)
        names = [describe(by_name(llama, tmp_path / "hub", **options), cache_config) for _ in range(2)]
        assert names[0].get_nowait() != names[1].get_nowait()
        assert "org/name: expected all weights in a local folder or in a commit of the" in str(
            names[0].problem
        )

    @pytest.mark.parametrize("name", ["s3://bucket/model", "not a name"])
    def test_other_stores(self, llama: Path, cache_config: Any, name: str) -> None:
        config = engine_config(llama)
        config.model_config.model = name
        assert str(describe(config, cache_config).problem).startswith(f"{name}: expected all weights in")

    def test_modelscope(
        self, llama: Path, tmp_path: Path, cache_config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has models of equal name, which need not be equal."""
        in_hub(tmp_path / "hub", llama)
        config = by_name(llama, tmp_path / "hub")
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
        assert describe(config, cache_config).problem is not None


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_the_draft_model_counts(llama: Path, tmp_path: Path, cache_config: Any, method: str) -> None:
    """Its KV is in the same cache."""
    names = {known(engine_config(llama), cache_config)}
    for content in (b"one", b"two"):
        draft = shutil.copytree(llama, tmp_path / content.decode())
        (draft / "extra.safetensors").write_bytes(content)
        speculative = {"model": str(draft), "method": method, "num_speculative_tokens": 2}
        names.add(known(engine_config(llama, speculative_config=speculative), cache_config))
    assert len(names) == 3


def ask_about_image(engine: Engine) -> tuple[list[int], int]:
    """Return the answer to a question about an image, and how much was cached."""
    from PIL import Image

    image = Image.frombytes("RGB", (28, 28), random.Random(0).randbytes(28 * 28 * 3))
    prompt = {"prompt_token_ids": make_prompt(1, 40), "multi_modal_data": {"image": image}}
    (done,) = engine.llm.generate([prompt], engine.params(8), use_tqdm=False)
    return list(done.outputs[0].token_ids), done.num_cached_tokens


def test_images_that_are_prepared_in_another_way_are_computed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """vLLM names an image by its content as it came. The second start once answered as the first."""
    model, changed = save_blip2(tmp_path_factory.mktemp("blip2")), {"do_normalize": False}
    answers, cached = [], []
    starts = [(True, None), (True, changed), (False, changed), (True, None), (True, changed)]
    for with_disk, options in starts:
        # The first start may take all that it is given of the folder, so later ones are given more.
        disk = {"path": str(tmp_path), "capacity": "64MiB" if answers else "16MiB"}
        kvtier = {"tiers": [{"disk": disk}], "load_deadline": "30s"} if with_disk else None
        with vllm_engine(model, kvtier, skip_tokenizer_init=False, mm_processor_kwargs=options) as engine:
            if with_disk:
                wait_open(engine)
            answer, hit = ask_about_image(engine)
            if with_disk:
                wait_written(engine)
        answers.append(answer)
        cached.append(hit)
    first, second, computed, *again = answers
    assert second == computed != first
    assert again == [first, second]
    assert cached == [0, 0, 0, 64, 64]


@pytest.mark.parametrize(("dtype", "counts"), [("bfloat16", True), ("float32", False)])
def test_the_layout_of_cpu_kernels_counts(
    llama: Path, cache_config: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, counts: bool
) -> None:
    """With AMX the keys of a block in bf16 have another order than without."""
    if on_gpu():
        pytest.skip("no CPU kernels")
    names = set()
    for has_amx in (False, True):
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        names.add(known(engine_config(llama, dtype=dtype), cache_config))
    assert len(names) == 1 + counts


class TestOtherSources:
    """Weights or code that vLLM does not take from the model's folder make a namespace like no other."""

    def test_a_pattern_of_files(self, llama: Path, cache_config: Any) -> None:
        config = engine_config(llama, load_format="sharded_state")
        assert describe(config, cache_config).problem is None
        config.load_config.model_loader_extra_config = {"pattern": "../{rank}-{part}.safetensors"}
        assert describe(config, cache_config).problem is not None

    def test_a_loader_of_a_plug_in(
        self, llama: Path, cache_config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.model_executor import model_loader

        class Loader(model_loader.DefaultModelLoader):
            pass

        monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Loader)
        assert describe(engine_config(llama), cache_config).problem is not None

    @pytest.mark.parametrize(
        ("owner", "trusted", "is_known"),
        [("", True, True), ("org/other--", True, False), ("org/other--", False, True)],
    )
    def test_code_of_another_repository(
        self, llama: Path, cache_config: Any, owner: str, trusted: bool, is_known: bool
    ) -> None:
        config = engine_config(llama)
        config.model_config.trust_remote_code = trusted
        config.model_config.hf_config.auto_map = {"AutoModelForCausalLM": f"{owner}modeling.Model"}
        assert (describe(config, cache_config).problem is None) == is_known


def test_a_setting_without_a_name_is_like_no_other(llama: Path, cache_config: Any) -> None:
    config = engine_config(llama)
    config.additional_config = {"hook": lambda: None}
    names = [describe(config, cache_config) for _ in range(2)]
    assert names[0].get_nowait() != names[1].get_nowait()
    assert "VllmConfig.additional_config['hook']: expected a value that has the same" in str(
        names[0].problem
    )


def test_the_start_does_not_wait(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.integrations.vllm.connector import logger

    gate, told, lines = threading.Event(), threading.Event(), []
    real = WeightsFiles.manifest

    def manifest(files: WeightsFiles) -> list[list[str | int]]:
        assert gate.wait(60)
        return real(files)

    def info(text: str, *values: object) -> None:
        lines.append(text % values)
        if "the namespace is" in text:
            told.set()

    monkeypatch.setattr(WeightsFiles, "manifest", manifest)
    monkeypatch.setattr(logger, "info", info)
    with vllm_engine(llama, {}) as engine:
        assert engine.generate([[1, 2, 3]])
        config = engine.connector._connector.connector_scheduler.spec.config
        assert config.namespace_nowait() is None
        assert any(line.endswith("namespace being computed") for line in lines)
        gate.set()
        assert told.wait(60)
        assert f"kvtier: the namespace is {config.namespace_nowait()[:12]}" in lines


def test_an_engine_that_keeps_nothing_reads_nothing(llama: Path, cache_config: Any) -> None:
    from kvtier.integrations.vllm import describe_engine

    config = engine_config(llama)
    config.kv_transfer_config.kv_connector_extra_config = {"cpu": {"capacity": 0}}
    assert describe_engine(config, cache_config).namespace == ""
