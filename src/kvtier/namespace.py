"""The namespace of an engine's bytes. It covers the content of the weights, so it may be unknown at first.

`WeightsFiles` are the files of a model's folder that decide what KV it computes, and the files that an index
in the folder names, wherever they are. Only all of their bytes tell two models apart: a fine-tune has the
names and sizes of its base, and may differ in one matrix. Reading the files takes about as long as loading
the model did. So they are read once (`digests` remembers) and beside the engine's work; a `Namespace`
reports when the result is known. A file of the Hugging Face hub's cache is not read: the cache has named it
by its digest, and that name is believed.

Until it is known, nothing may be shared with another process. If the content cannot be known, the namespace
is random, so that nothing is ever shared. Only `wait` and `manifest` block. Any thread may call all of this.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

from kvtier.digests import Digests, FileState, default_file
from kvtier.errors import OutsideError, show_value

_WEIGHTS = {
    ".bin",
    ".ckpt",
    ".distcp",
    ".gguf",
    ".h5",
    ".msgpack",
    ".nemo",
    ".npy",
    ".npz",
    ".onnx",
    ".onnx_data",
    ".pt",
    ".pth",
    ".safetensors",
    ".tensors",
}
_SHAPES = {".json", ".py", ".yaml", ".yml"}
"""Files that shape how weights are read: configs, indexes, quantisation, the model's own code.

Each of them may change KV.
"""

_INDEX = ".index.json"
"""The end of the name of an index, which gives the file of each tensor."""

_WITHOUT_EFFECT = {
    # These act before the KV is computed (text to tokens) or after it (logits to text). The settings of a
    # tokenizer are not among them: processors of images take defaults of theirs from it.
    "chat_template.json",
    "generation_config.json",
    "tokenizer.json",
    "vocab.json",
    # Leftovers of training.
    "optimizer.bin",
    "optimizer.pt",
    "scaler.pt",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
}


class WeightsFiles:
    """The files of a folder that decide what KV a model computes, in the state they were found in.

    Make it before the weights are loaded, so that `manifest` notices any later change: after a change it is
    unknown which content was loaded.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self._found = _look(self.folder)

    def manifest(self, digests: Digests | None = None) -> list[list[str | int]]:
        """Return `[name, size, SHA-256]` of each file; read the files whose digest is not known.

        Raise `OutsideError` if a file cannot be read or has changed, or if there are no weights.
        """
        if isinstance(self._found, str):
            raise OutsideError(self._found)
        if not any(path.suffix.lower() in _WEIGHTS for path in self._found):
            known = " ".join(sorted(_WEIGHTS))
            raise OutsideError(f"{self.folder}: expected files with weights ({known}), found none")
        if _look(self.folder) != self._found:
            raise OutsideError(
                f"{self.folder}: expected the files of when the engine was made, found others"
            )
        digests = digests or Digests(default_file())
        found = sorted((self._name(path), path, state) for path, state in self._found.items())
        return [[name, state.size, digests.of(path, state)] for name, path, state in found]

    def _name(self, path: Path) -> str:
        """Return a file's name in the folder: with `..`, or whole, if an index names a file elsewhere."""
        return (path.relative_to(self.folder) if path.is_relative_to(self.folder) else path).as_posix()


def _look(folder: Path) -> dict[Path, FileState] | str:
    """Return the state of every file that counts, or the problem with one of them."""
    try:
        files = set(_walk(folder))
        for index in [path for path in files if path.name.endswith(_INDEX)]:
            files |= _files_named_by(index)
        return {path: FileState.of(path) for path in sorted(files)}
    except OutsideError as error:
        return str(error)
    except OSError as error:
        path, problem = error.filename or folder, error.strerror or error
        return f"{path}: expected a file or folder that can be read: {problem}"


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files that count. Links are followed, but a loop of links ends."""
    seen: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=True, onerror=_fail):
        seen.add(os.path.realpath(root))
        parts = sorted(filter(_is_part, folders))
        folders[:] = [part for part in parts if os.path.realpath(os.path.join(root, part)) not in seen]
        yield from (Path(root, file) for file in files if _counts(file))


def _files_named_by(index: Path) -> set[Path]:
    """Return the files that an index names, whatever their folder and suffix, and that exist.

    A loader that uses an index fails if a file of it is missing. So an index without its files belongs to a
    form of the weights that was not downloaded and is not loaded.
    """
    try:
        content = json.loads(index.read_bytes())
    except ValueError as error:
        raise OutsideError(f"{index}: expected an index of weights in JSON: {error}") from None
    names = content.get("weight_map", {}) if isinstance(content, dict) else {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        expected = f"{index}: expected weight_map to name the file of each tensor"
        raise OutsideError(f"{expected}, got {show_value(names)}")
    files = {index.parent / name for name in set(names.values())}
    return {file for file in files if os.path.lexists(file)}


def _fail(error: OSError) -> None:
    raise error


def _is_part(folder: str) -> bool:
    """Refuse folders with the same weights in another form, with earlier weights, or with a tool's files."""
    return folder != "original" and not folder.startswith(("checkpoint-", "."))


def _counts(file: str) -> bool:
    return Path(file).suffix.lower() in _WEIGHTS | _SHAPES and file not in _WITHOUT_EFFECT


class Namespace:
    """A namespace that a thread computes; `get_nowait()` returns it once it is known.

    If it could not be computed, `problem` says why, and the namespace is random: equal to no other.
    """

    def __init__(
        self, compute: Callable[[], str], on_known: Callable[[Namespace], None] | None = None
    ) -> None:
        """Start the thread that computes.

        It calls `on_known` when the namespace is known. It does not keep the process alive.
        """
        self.problem: str | None = None
        self._value = ""
        self._known = Event()
        Thread(target=self._run, args=(compute, on_known), name="kvtier-namespace", daemon=True).start()

    def get_nowait(self) -> str | None:
        """Return the namespace, or None while it is not known: the caller must then share nothing."""
        return self._value if self._known.is_set() else None

    def wait(self, timeout: float | None = None) -> str | None:
        """Wait for the namespace; return None after `timeout` seconds.

        An engine thread must not call this.
        """
        self._known.wait(timeout)
        return self.get_nowait()

    def _run(self, compute: Callable[[], str], on_known: Callable[[Namespace], None] | None) -> None:
        try:
            self._value = compute()
        except Exception as error:
            self.problem, self._value = str(error), secrets.token_hex(32)
        self._known.set()
        if on_known is not None:
            on_known(self)
