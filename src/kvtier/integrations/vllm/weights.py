"""The weights of a vLLM engine: the identity of the files that it has read, and changes in memory.

The identity is the content of the files that vLLM has read. A model given by a hub's name is looked up in
the local cache, as vLLM does. Weights from anywhere else (an object store, a daemon, a plug-in) cannot be
identified, and a name is no substitute: right bytes or no bytes. Nothing is ever fetched. The engine's
thread finds the files, which is quick; the thread of a `Namespace` then calls the returned functions.

`LiveWeights` notices on a worker that weights have changed in memory, as trainers change them.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm import envs
from vllm.transformers_utils.repo_utils import hf_api

from kvtier.errors import OutsideError
from kvtier.namespace import WeightsFiles

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

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


# -- changes in memory ------------------------------------------------------------------------------

_WORDS = 64
_WORD_BYTES = 8
_SHARE_OF_PAUSE = 20
_IN_TURN = 2
"""Parameters that a step without a pause looks at."""

Parameters = dict[str, Any]
"""The parameters of one module, in its own dict: who replaces a parameter does it there."""

Children = dict[str, Any]
"""The modules of one module, in its own dict."""


@dataclass(slots=True)
class _Look:
    """The words of some parameters, on their way to host memory."""

    indices: range
    words: torch.Tensor
    arrival: Any  # an event of CUDA, or `None` if the words have come
    after_clear: bool
    modules_differ: bool

    def has_come(self) -> bool:
        return self.arrival is None or bool(self.arrival.query())


class LiveWeights:
    """Compares the parameters of a worker's models with those at its last look.

    vLLM has many ways to change weights (`reload_weights`, `update_weights`, functions of a user's own) and
    none that tells a connector. Most write through `param.data`, which leaves no trace in torch's version
    counters, so the bytes are compared: 64 words of each parameter, spread over it. A step that follows a
    pause looks at all parameters, if that takes a twentieth of the pause at most; every other step looks at
    a few, in turn. An update of all weights is such a pause, because it takes longer than a look at a few
    words of them.

    On a CUDA device the words are copied without waiting, in the order of the device's work, and compared
    once they have come. A look finds changes of before its step, but not when they happened. It belongs to
    the worker's thread.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        is_watched: Callable[[str], bool] = lambda name: True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Watch the parameters whose name is to be watched, from now on."""
        self._models, self._is_watched, self._clock = models, is_watched, clock
        self._parameters: list[tuple[Parameters, str]] = []
        self._children: list[tuple[Children, tuple[Any, ...]]] = []  # of each module, as they were
        self._words: list[torch.Tensor] = []  # as they were, in the order of `_parameters`
        self._looks: list[_Look] = []
        self._next = 0  # the parameter to go on with
        self._seconds = float("inf")  # that a look at all parameters takes, if nothing else runs
        self._pause_began = clock()
        self._start_over()

    def look(self, *, after_clear: bool = False) -> None:
        """Begin to look at the weights, before a step runs.

        With `after_clear` no KV is left of before this step, so that a change need not be reported.
        """
        count = len(self._parameters)
        if after_clear or self.pauses_enough():
            began = self._clock()
            self._begin(range(count), after_clear)
            self._seconds = min(self._seconds, self._clock() - began)
        elif not self._looks:
            stop = min(self._next + _IN_TURN, count)
            self._begin(range(self._next, stop), after_clear)
            self._next = stop % count if count else 0

    def pauses_enough(self) -> bool:
        """Return whether the next look is one at all parameters."""
        return self._clock() - self._pause_began >= _SHARE_OF_PAUSE * self._seconds

    def end_step(self) -> None:
        """Mark the end of a step: a pause begins."""
        self._pause_began = self._clock()

    @property
    def is_looking_at_all(self) -> bool:
        """Whether the words of a look at all weights have not come yet."""
        return any(len(look.indices) > _IN_TURN and not look.has_come() for look in self._looks)

    def take_change(self) -> bool:
        """Return whether a look has found other weights than before. Later looks compare with those."""
        while self._looks and self._looks[0].has_come():
            look = self._looks.pop(0)
            expected = _join([self._words[index] for index in look.indices])
            if look.modules_differ or not torch.equal(look.words, expected):
                self._start_over()
                return not look.after_clear
        return False

    def _start_over(self) -> None:
        """Take the weights as they are for those to compare with, and wait for their words."""
        began = self._clock()
        self._parameters = list(self._find_parameters())
        self._children = [
            (module._modules, tuple(module._modules.values()))
            for model in self._models
            for module in model.modules()
            if module._modules
        ]
        self._words = [_words(parameters.get(name)).cpu().clone() for parameters, name in self._parameters]
        self._looks, self._next = [], 0
        self._seconds = min(self._seconds, self._clock() - began)

    def _find_parameters(self) -> Iterator[tuple[Parameters, str]]:
        for model in self._models:
            for prefix, module in model.named_modules():
                names = [name for name in module._parameters if self._is_watched(f"{prefix}.{name}")]
                yield from ((module._parameters, name) for name in names)

    def _begin(self, indices: range, after_clear: bool) -> None:
        found = [_words(parameters.get(name)) for parameters, name in (self._parameters[i] for i in indices)]
        arrival: Any = None
        if {words.device.type for words in found if words.numel()} == {"cuda"}:
            found = [words for words in found if words.numel()]
            here = _join(found)
            words = torch.empty(here.shape, dtype=here.dtype, pin_memory=True)
            words.copy_(here, non_blocking=True)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
        else:
            words = _join([words.cpu() for words in found])
        # A replaced module has other parameters than those of `_parameters`. Each round ends with this.
        modules_differ = indices.stop == len(self._parameters) and self._has_other_modules()
        self._looks.append(_Look(indices, words, arrival, after_clear, modules_differ))

    def _has_other_modules(self) -> bool:
        return any(tuple(children.values()) != before for children, before in self._children)


def _join(words: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(words)) if words else torch.empty(0, dtype=torch.int64)


def _words(parameter: torch.Tensor | None) -> torch.Tensor:
    """Return words spread over the memory of a parameter; none if it has no memory now.

    Their distance is odd, so that they are not all of one column of a matrix.
    """
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    if parameter is None or parameter.is_meta or is_traceable_wrapper_subclass(parameter):
        return none
    start = -(-parameter.storage_offset() * parameter.element_size() // _WORD_BYTES)
    count = parameter.untyped_storage().nbytes() // _WORD_BYTES - start
    count = min(count, parameter.numel() * parameter.element_size() // _WORD_BYTES)
    if count <= 0:
        return none
    step = (count // _WORDS) | 1
    words = torch.empty(0, dtype=torch.int64, device=parameter.device)
    return words.set_(parameter.untyped_storage(), start, (min(_WORDS, -(-count // step)),), (step,))


def find_models() -> list[torch.nn.Module]:
    """Return the models of the worker that makes this call: its model and its draft model, if it has one.

    vLLM gives a connector no reference to them, so this function searches the calling frames for the runner.
    Without a runner the list is empty.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        runner: Any = frame.f_locals.get("self")
        if callable(getattr(runner, "get_model", None)):
            drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
            models = [runner.get_model(), getattr(drafter, "model", None)]
            return [model for model in models if isinstance(model, torch.nn.Module)]
    return []


def watchable(vllm_config: VllmConfig) -> Callable[[str], bool] | None:
    """Return which parameters of an engine only a new version of the weights changes.

    `None` means hardly any. vLLM moves experts between ranks (EPLB), and copies the weights of layers that
    it prefetches.
    """
    if vllm_config.offload_config.prefetch.offload_group_size:
        return None
    moves_experts = vllm_config.parallel_config.enable_eplb
    return lambda name: not (moves_experts and "experts" in name)
