"""The identity of the weights that a vLLM engine has loaded: the content of the files that vLLM has read.

A model given by a hub's name is looked up in the local cache, as vLLM does. Weights from anywhere else (an
object store, a daemon, a plug-in) cannot be identified, and a name is no substitute: right bytes or no
bytes. Nothing is ever fetched.

The engine's thread finds the files, which is quick; the thread of a `Namespace` then calls the returned
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.transformers_utils.repo_utils import hf_api

from kvtier.errors import OutsideError
from kvtier.namespace import WeightsFiles

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

__all__ = ["Weights", "all_weights", "nameless_hash"]

Weights = Callable[[], Any]
"""Returns the identity of weights as a JSON value, and reads them if needed; or raises `OutsideError`.
"""

_FILE_FORMATS = {
    "auto",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "mistral",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
}
"""Load formats that read a model's own files and nothing else.

(`npcache` reads a copy, which may be out of date.)
"""

_ELSEWHERE = ("audio_model_id", "quantization_config_file", "text_model_id")
"""Settings of a model's config that name further sources of weights, outside of its folder."""


def nameless_hash(model: ModelConfig) -> str:
    """Return vLLM's hash of a model's config without its location: the weights' content counts instead."""
    nameless = copy(model)
    nameless.model = nameless.model_weights = ""
    nameless.revision = None
    return str(nameless.compute_hash())


def all_weights(vllm_config: VllmConfig) -> list[Weights]:
    """Return the weights of the model and of the draft model, whose KV is cached too."""
    found = [_weights(vllm_config.model_config, vllm_config.load_config)]
    speculative = vllm_config.speculative_config
    draft = speculative and speculative.draft_model_config
    if draft:
        found.append(_weights(draft, speculative.draft_load_config or vllm_config.load_config))
        found.append(partial(list, [speculative.method, nameless_hash(draft)]))
    return found


def _weights(model: ModelConfig, load: LoadConfig) -> Weights:
    """Identify random weights by their seed, others by the files that hold them."""
    if load.load_format == "dummy":
        return partial(dict, random=model.seed, model=model.model)
    folder = _find_folder(model, load)
    if folder is None or any(getattr(model.hf_config, name, None) for name in _ELSEWHERE):
        return partial(_refuse, model.model, load.load_format)
    files, how = WeightsFiles(folder), [load.load_format, str(load.model_loader_extra_config)]
    return lambda: {"files": files.manifest(), "loader": how}


def _refuse(name: str, load_format: str) -> Any:
    expected = "expected all weights in a local folder or in a commit of the Hugging Face hub's cache"
    raise OutsideError(f"{name}: {expected}, got load format {load_format} and no such folder")


def _find_folder(model: ModelConfig, load: LoadConfig) -> Path | None:
    """Return the folder from which vLLM has read the weights, if it was a folder and is known."""
    if load.load_format not in _FILE_FORMATS or model.model_weights:
        return None
    if (folder := Path(model.model)).is_dir():
        return folder
    if envs.VLLM_USE_MODELSCOPE:
        return None
    try:
        found = hf_api().snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=load.download_dir,
            ignore_patterns="*",
            local_files_only=True,
        )
    except (OSError, ValueError):  # not in the cache, or not a hub's name: another kind of store
        return None
    # A branch may have moved since vLLM read it. A commit does not.
    commits = (model.revision, getattr(model.hf_config, "_commit_hash", None))
    return Path(found) if Path(found).name in commits else None
