"""The identity of the weights that a vLLM engine has loaded: the content of the files that vLLM has read.

A model given by a hub's name is looked up in the local cache, as vLLM does. Weights from anywhere else (an
object store, a daemon, a plug-in) cannot be identified, and a name is no substitute: right bytes or no
bytes. Nothing is ever fetched.

The engine's thread finds the files, which is quick; the thread of a `Namespace` then calls the returned
functions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.transformers_utils.repo_utils import hf_api

from kvtier.errors import OutsideError
from kvtier.namespace import WeightsFiles

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

__all__ = ["Weights", "all_weights"]

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
"""Load formats that read a model's own files and nothing else: the files of a folder that have a certain
suffix, or those of them that its index names.

(`npcache` reads a copy, which may be out of date.)
"""

_ELSEWHERE = ("audio_model_id", "quantization_config_file", "text_model_id")
"""Settings of a model's config that name further sources of weights, outside of its folder."""


def all_weights(vllm_config: VllmConfig) -> list[Weights]:
    """Return the weights of the model and of the draft model, whose KV is cached too."""
    found = [_weights(vllm_config.model_config, vllm_config.load_config)]
    speculative = vllm_config.speculative_config
    draft = speculative and speculative.draft_model_config
    if draft:
        found.append(_weights(draft, speculative.draft_load_config or vllm_config.load_config))
    return found


def _weights(model: ModelConfig, load: LoadConfig) -> Weights:
    """Identify random weights by their seed, others by the files that hold them."""
    if load.load_format == "dummy":
        return partial(dict, random=model.seed, model=model.model)
    folder = None if _is_elsewhere(model, load) else _find_folder(model, load)
    if folder is None:
        return partial(_refuse, model.model, load.load_format)
    return WeightsFiles(folder).manifest


def _refuse(name: str, load_format: str) -> Any:
    expected = "expected all weights in a local folder or in a commit of the Hugging Face hub's cache"
    raise OutsideError(
        f"{name}: {expected}, got weights or code of other places (load format {load_format})"
    )


def _is_elsewhere(model: ModelConfig, load: LoadConfig) -> bool:
    """Return whether weights, or code that computes with them, may come from outside of the model's folder.

    Plug-ins may replace a loader. A pattern of files may lead anywhere. Code that is not in the model's own
    folder is in no file that is hashed.
    """
    if load.load_format not in _FILE_FORMATS or model.model_weights:
        return True
    return (
        _is_replaced(load)
        or "pattern" in load.model_loader_extra_config
        or any(getattr(model.hf_config, name, None) for name in _ELSEWHERE)
        or (model.trust_remote_code and _uses_foreign_code(model))
    )


def _is_replaced(load: LoadConfig) -> bool:
    """Return whether a plug-in has put a loader of its own in the place of vLLM's."""
    loaders = sys.modules.get("vllm.model_executor.model_loader")  # which a plug-in imports, and we need not
    return loaders is not None and not type(loaders.get_model_loader(load)).__module__.startswith("vllm.")


def _uses_foreign_code(model: ModelConfig) -> bool:
    """Return whether a config names a class (`owner/name--class`) of another repository."""
    images = model.hf_image_processor_config.get("auto_map")
    classes = str([getattr(model.hf_config, "auto_map", None), images])
    return any(owner != model.model for owner in re.findall("['\"]([^'\"]*)--", classes))


def _find_folder(model: ModelConfig, load: LoadConfig) -> Path | None:
    """Return the folder from which vLLM has read the weights, if it was a folder and is known."""
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
