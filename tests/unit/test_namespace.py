"""The namespace covers the content of the weights, and is known when a thread has read them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.test_digests import forbid_reading, hub_file

from kvtier.errors import OutsideError
from kvtier.namespace import Namespace, WeightsFiles

MIB = 1 << 20
LIMIT = 60.0


def manifest(folder: Path) -> list[list[str | int]]:
    return WeightsFiles(folder).manifest()


def names(folder: Path) -> list[str | int]:
    return [name for name, _, _ in manifest(folder)]


def write(folder: Path, *files: str, content: bytes = b"weights") -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return folder


def write_index(folder: Path, *files: str, name: str = "model.safetensors.index.json") -> Path:
    weight_map = {f"tensor {number}": file for number, file in enumerate(files)}
    return write(folder, name, content=json.dumps({"weight_map": weight_map}).encode())


class TestWeightsFiles:
    def test_nine_mib_in_six_hundred(self, tmp_path: Path) -> None:
        """A few samples of each file once told fine-tunes from their base, and left out whole matrices."""
        file = tmp_path / "model.safetensors"
        with file.open("wb") as stream:
            stream.truncate(600 * MIB)
        before = manifest(tmp_path)
        with file.open("r+b") as stream:
            # Between the first two of 64 samples, which were spread evenly over the file.
            stream.seek(MIB // 2)
            stream.write(b"\x01" * (9 * MIB - MIB // 2))
        after = manifest(tmp_path)
        assert after != before
        assert (
            [entry[:2] for entry in after]
            == [entry[:2] for entry in before]
            == [["model.safetensors", 600 * MIB]]
        )

    @pytest.mark.parametrize("where", [0, 5_000_000, 9_999_999])
    def test_one_byte(self, tmp_path: Path, where: int) -> None:
        data = bytearray(10_000_000)
        before = manifest(write(tmp_path, "model.safetensors", content=bytes(data)))
        data[where] = 1
        assert manifest(write(tmp_path, "model.safetensors", content=bytes(data))) != before

    @pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "gguf", "BIN"])
    def test_folders_without_safetensors_count_by_content(self, tmp_path: Path, suffix: str) -> None:
        before = manifest(write(tmp_path, f"model.{suffix}", content=b"one"))
        assert manifest(write(tmp_path, f"model.{suffix}", content=b"two")) != before

    def test_the_same_content_elsewhere_is_equal(self, tmp_path: Path) -> None:
        one = write(tmp_path / "one", "a.safetensors", "b.safetensors", "config.json")
        other = shutil.copytree(one, tmp_path / "other")
        link = tmp_path / "link"
        link.symlink_to(other)
        assert manifest(one) == manifest(other) == manifest(link)

    def test_a_hub_cache_equals_a_plain_folder_and_is_not_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = manifest(write(tmp_path / "plain", "model.safetensors"))
        snapshot = hub_file(tmp_path / "hub", b"weights").parent
        forbid_reading(monkeypatch)
        assert manifest(snapshot) == plain

    def test_a_plain_config_equals_that_of_a_hub(self, tmp_path: Path) -> None:
        snapshot = hub_file(tmp_path / "hub", b"weights").parent
        hub_file(tmp_path / "hub", b"weights", blob="a" * 40, name="config.json")
        assert manifest(snapshot) == manifest(write(tmp_path / "plain", "model.safetensors", "config.json"))

    def test_weights_and_their_shapes_count(self, tmp_path: Path) -> None:
        counted = [
            "added_tokens.json",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "modeling_own.py",
            "preprocessor_config.json",
            "quantize_config.json",
            "special_tokens_map.json",
            "tokenizer_config.json",  # processors of images take settings from it
            "vision/model.safetensors",
        ]
        ignored = [
            ".cache/x.bin",
            "README.md",
            "checkpoint-500/model.safetensors",
            "generation_config.json",
            "optimizer.pt",
            "original/consolidated.00.pth",
            "tokenizer.json",
            "tokenizer.model",
        ]
        write(tmp_path, *counted, *ignored)
        assert names(write_index(tmp_path, "model-00001-of-00002.safetensors")) == counted

    @pytest.mark.parametrize(
        "file",
        [
            ".hidden/model.safetensors",
            "../else/model.safetensors",
            "checkpoint-500/model.safetensors",
            "optimizer.bin",
            "original/model.safetensors",
            "weights.data",
        ],
    )
    def test_files_that_an_index_names_count_wherever_they_are(self, tmp_path: Path, file: str) -> None:
        """A folder that is skipped, or a suffix that does not count, once hid weights that were loaded."""
        folder = write_index(write(tmp_path / "model", "config.json", "extra.bin", file), file)
        before = manifest(folder)
        assert file in names(folder)
        assert manifest(shutil.copytree(tmp_path, tmp_path.with_suffix(".copy")) / "model") == before
        write(folder, file, content=b"another")
        assert manifest(folder) != before

    def test_files_that_an_index_names_elsewhere(self, tmp_path: Path) -> None:
        """By their whole path, or behind a link."""
        write(tmp_path, "one.data", "two.data")
        folder = write_index(write(tmp_path / "model", "model.bin"), str(tmp_path / "one.data"), "link")
        (folder / "link").symlink_to(tmp_path / "two.data")
        for file in ("one.data", "two.data"):
            before = manifest(folder)
            write(tmp_path, file, content=b"another")
            assert manifest(folder) != before

    def test_an_index_of_files_that_were_not_downloaded(self, tmp_path: Path) -> None:
        """Many models are there in two forms, and only the indexes of both are small."""
        folder = write_index(write(tmp_path, "model.safetensors"), "model.safetensors")
        before = manifest(write_index(folder, "absent.bin", name="pytorch_model.bin.index.json"))
        assert names(folder) == [
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin.index.json",
        ]
        assert manifest(write(folder, "absent.bin")) != before

    @pytest.mark.parametrize("content", [b"{", b"\xff", b'{"weight_map": [1]}', b'{"weight_map": {"a": 1}}'])
    def test_an_index_that_cannot_be_read_is_refused(self, tmp_path: Path, content: bytes) -> None:
        write(write(tmp_path, "model.bin"), "model.safetensors.index.json", content=content)
        with pytest.raises(OutsideError, match=r"model\.safetensors\.index\.json: expected"):
            manifest(tmp_path)

    def test_a_file_of_an_index_that_cannot_be_read_is_refused(self, tmp_path: Path) -> None:
        write_index(write(tmp_path, "model.bin"), "pipe", "dangling")
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OutsideError, match=r"pipe: expected .*: not a regular file"):
            manifest(tmp_path)
        (tmp_path / "pipe").unlink()
        (tmp_path / "dangling").symlink_to("nowhere")
        with pytest.raises(OutsideError, match=r"dangling: expected .*: No such file"):
            manifest(tmp_path)

    def test_names_count(self, tmp_path: Path) -> None:
        assert manifest(write(tmp_path / "a", "a.bin")) != manifest(write(tmp_path / "b", "b.bin"))

    def test_links_are_followed_once(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "m", "model.bin")
        (folder / "loop").symlink_to(folder)
        (folder / "encoder").symlink_to(write(tmp_path / "shared", "encoder.bin"))
        assert names(folder) == ["encoder/encoder.bin", "model.bin"]

    @pytest.mark.parametrize("files", [(), ("config.json", "tokenizer.json")])
    def test_a_folder_without_weights_is_refused(self, tmp_path: Path, files: tuple[str, ...]) -> None:
        with pytest.raises(
            OutsideError, match=r"expected files with weights \(\.bin .* \.tensors\), found none"
        ):
            manifest(write(tmp_path, *files))

    def test_unreadable_files_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            OutsideError, match="nowhere: expected a file or folder that can be read: No such file"
        ):
            manifest(tmp_path / "nowhere")
        write(tmp_path, "model.bin")
        (tmp_path / "dangling.bin").symlink_to("nowhere")
        with pytest.raises(
            OutsideError, match=r"dangling\.bin: expected a file or folder that can be read: No such file"
        ):
            manifest(tmp_path)
        (tmp_path / "dangling.bin").unlink()
        os.mkfifo(tmp_path / "pipe.bin")
        with pytest.raises(OutsideError, match=r"pipe\.bin: expected .*: not a regular file"):
            manifest(tmp_path)

    @pytest.mark.parametrize("change", ["model.bin", "another.bin"])
    def test_files_that_change_later_are_refused(self, tmp_path: Path, change: str) -> None:
        """Which of the two contents was loaded is then unknown."""
        files = WeightsFiles(write(tmp_path, "model.bin"))
        write(tmp_path, change, content=b"other weights")
        with pytest.raises(
            OutsideError, match="expected the files of when the engine was made, found others"
        ):
            files.manifest()


def compute_after(gate: threading.Event, value: str = "name") -> Callable[[], str]:
    def compute() -> str:
        assert gate.wait(LIMIT)
        return value

    return compute


class TestNamespace:
    def test_it_is_known_later(self) -> None:
        gate, told = threading.Event(), threading.Event()
        seen: list[str | None] = []

        def tell(known: Namespace) -> None:
            seen.append(known.get_nowait())
            told.set()

        namespace = Namespace(compute_after(gate), tell)
        assert namespace.get_nowait() is None
        assert namespace.wait(0) is None
        assert seen == []
        gate.set()
        assert namespace.wait(LIMIT) == namespace.get_nowait() == "name"
        assert namespace.problem is None
        assert told.wait(LIMIT)
        assert seen == ["name"]

    @pytest.mark.parametrize("error", [OutsideError("model.bin: gone"), ValueError("model.bin: gone")])
    def test_a_failed_computation_gives_a_random_namespace(self, error: Exception) -> None:
        def fail() -> str:
            raise error

        names = [Namespace(fail), Namespace(fail)]
        values = [name.wait(LIMIT) for name in names]
        assert [name.problem for name in names] == ["model.bin: gone"] * 2
        assert all(value is not None and len(value) == 64 for value in values)
        assert values[0] != values[1]

    def test_a_process_ends_without_waiting(self) -> None:
        code = """
import threading
from kvtier.namespace import Namespace
Namespace(lambda: threading.Event().wait() and "")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
        assert (done.returncode, done.stderr) == (0, "")
