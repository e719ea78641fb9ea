"""How vLLM's requests end: with a turn, with a call of a tool, or nobody knows.

Models end a call with a token of their own, which the files of the tokenizer name. They are read once, when
the engine starts; a tokenizer without such a token, or without readable files, makes no request end with a
call. Nothing here keeps state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.transformers_utils.repo_utils import hf_api
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

CALL_ENDS = frozenset(
    {
        "</function_calls>",
        "</minimax:tool_call>",
        "</tool_call>",
        "</tool_calls>",
        "<end_function_call>",
        "<|/tool_call|>",
        "<|END_ACTION|>",
        "<|call|>",
        "<|eom_id|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<｜tool▁calls▁end｜>",
        "[/TOOL_CALLS]",
    }
)
"""The tokens with which models end a call, or all calls of an answer."""
_LAST_TOKENS = 4
"""A call may be followed by the end of its list, a line break and the end of the turn."""
_LARGEST_FILE = 64 << 20


def how_ended(request: Request, call_ends: frozenset[int]) -> str:
    """Return how a request ended, as one of `kvtier.policies.base.ENDINGS`."""
    if request.status is not RequestStatus.FINISHED_STOPPED:
        return "unknown"
    last = {request.stop_reason, *request.output_token_ids[-_LAST_TOKENS:]}
    return "turn" if call_ends.isdisjoint(last) else "tool"


def find_call_ends(vllm_config: VllmConfig) -> frozenset[int]:
    """Return the ids of the tokens with which an engine's model ends a call of a tool."""
    model = vllm_config.model_config
    if (folder := Path(model.tokenizer)).is_dir():
        return read_call_ends(folder)
    try:
        found = hf_api().snapshot_download(
            model.tokenizer,
            revision=model.tokenizer_revision,
            cache_dir=vllm_config.load_config.download_dir,
            ignore_patterns="*",
            local_files_only=True,
        )
    except (OSError, ValueError):  # not in the hub's cache
        return frozenset()
    return read_call_ends(Path(found))


def read_call_ends(folder: Path) -> frozenset[int]:
    """Return those ids from the files of a tokenizer, of which the small one is asked first."""
    for name in ("tokenizer_config.json", "tokenizer.json"):
        tokens = dict(_added_tokens(_read_json(folder / name)))
        if tokens:
            return frozenset(token for token, content in tokens.items() if content in CALL_ENDS)
    return frozenset()


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size <= _LARGEST_FILE:
            return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        pass  # another form of tokenizer, or a broken one, about which vLLM says more
    return None


def _added_tokens(file: Any) -> Iterator[tuple[int, str]]:
    """Yield id and content of the tokens in `added_tokens_decoder` (a table) and `added_tokens` (a list)."""
    fields = file if isinstance(file, dict) else {}
    table, listed = fields.get("added_tokens_decoder"), fields.get("added_tokens")
    entries = list(table.items()) if isinstance(table, dict) else []
    for token in listed if isinstance(listed, list) else ():
        entries.append((token.get("id") if isinstance(token, dict) else None, token))
    for at, token in entries:
        content = token.get("content") if isinstance(token, dict) else None
        if isinstance(content, str) and str(at).isascii() and str(at).isdigit():
            yield int(at), content
