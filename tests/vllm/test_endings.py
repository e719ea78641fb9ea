"""How requests end, what hints vLLM carries, and that both reach the policy's side."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.engines import make_prompt, vllm_engine
from tests.vllm.models import VOCAB

from kvtier.hints import NO_HINTS, Hints, tenant_of
from kvtier.policies import Ending

CONFIG = {
    "added_tokens_decoder": {"7": {"content": "<|call|>"}, "9": {"content": "<|end|>"}, "x": {}, "8": 3}
}
TOKENIZER = {
    "added_tokens": [{"id": 5, "content": "</tool_call>"}, {"id": 6, "content": "<s>"}, 3, {"id": []}]
}


@pytest.mark.parametrize(
    ("config", "tokenizer", "found"),
    [
        (CONFIG, TOKENIZER, {7}),
        (None, TOKENIZER, {5}),
        ({"added_tokens_decoder": {}}, TOKENIZER, {5}),
        ({"added_tokens_decoder": {"1": {"content": "<s>"}}}, TOKENIZER, set()),
        (None, None, set()),
        ([], "no table", set()),
    ],
)
def test_the_ends_of_calls_are_read_from_files(
    config: Any, tokenizer: Any, found: set[int], tmp_path: Path
) -> None:
    from kvtier.integrations.vllm.endings import read_call_ends

    for name, content in (("tokenizer_config.json", config), ("tokenizer.json", tokenizer)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert read_call_ends(tmp_path) == found
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff{")
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    assert read_call_ends(tmp_path) == set()


@pytest.mark.parametrize(
    ("status", "answer", "stop", "how"),
    [
        ("FINISHED_STOPPED", [1, 7], None, "tool"),
        ("FINISHED_STOPPED", [1, 7, 2, 3], None, "tool"),
        ("FINISHED_STOPPED", [7, 1, 2, 3, 4], None, "turn"),
        ("FINISHED_STOPPED", [1], 7, "tool"),
        ("FINISHED_STOPPED", [1], "text", "turn"),
        ("FINISHED_STOPPED", [], None, "turn"),
        ("FINISHED_LENGTH_CAPPED", [7], None, "unknown"),
        ("FINISHED_ABORTED", [7], None, "unknown"),
    ],
)
def test_how_a_request_ended(status: str, answer: list[int], stop: Any, how: str) -> None:
    from vllm.v1.request import RequestStatus

    from kvtier.integrations.vllm.endings import how_ended

    request: Any = SimpleNamespace(
        status=getattr(RequestStatus, status), output_token_ids=answer, stop_reason=stop
    )
    assert how_ended(request, frozenset({7})) == how


def test_hints_come_in_parameters_and_in_kv_hints() -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    from kvtier.integrations.vllm.requests import asked_params

    def asked(params: Any, *actions: tuple[str, Any]) -> Any:
        made = [KvHintAction("id", kind, "1", payload) for kind, payload in actions]
        return asked_params(
            SimpleNamespace(kv_transfer_params=params, kv_hints=KvHintsEnvelope("1", "id", made))  # type: ignore[arg-type]
        )

    mine = ("kvtier", {"keep": "5m", "drop": True})
    assert asked(None) is None
    assert asked({"a": 1}, ("other", {"keep": 1})) == {"a": 1}
    assert asked(None, mine) == {"kvtier": {"keep": "5m", "drop": True}}
    assert asked({"a": 1, "kvtier": {"keep": 9}}, mine) == {"a": 1, "kvtier": {"keep": 9, "drop": True}}
    assert asked({"kvtier": 3}, mine, ("kvtier", "junk")) == {"kvtier": {"keep": "5m", "drop": True}}


def test_hints_endings_and_tenants_reach_the_manager(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token but one ends a call here, so that any answer that stops does."""
    monkeypatch.setattr(
        "kvtier.integrations.vllm.connector.find_call_ends", lambda _config: frozenset(range(1, VOCAB))
    )
    seen: list[tuple[Hints, str, Ending | None]] = []
    with vllm_engine(llama, {"shares": {"limit": 0.5}}) as engine:
        manager = engine.connector._connector.connector_scheduler.manager
        touch = manager.touch

        def record(keys: Any, context: Any) -> None:
            seen.append((context.hints, context.tenant, context.ending))
            touch(keys, context)

        monkeypatch.setattr(manager, "touch", record)
        prompt = {"prompt_token_ids": make_prompt(0, 100), "cache_salt": "secret"}
        for hints, stops in (
            ({"keep": "10m"}, True),
            ({"ending": "turn"}, True),
            ({"explain": True}, False),
        ):
            extra = {"kv_transfer_params": {"kvtier": hints}}
            more = {"stop_token_ids": list(range(VOCAB))} if stops else {}
            params = engine.params(2, extra_args=extra, **more)
            engine.llm.generate([prompt], params, use_tqdm=False)
            engine.settle()
        manager.check()
    tenant = tenant_of("secret")
    assert seen == [
        (Hints(keep=600.0), tenant, Ending(1, "tool")),
        (Hints(ending="turn"), tenant, Ending(1, "turn")),
        (NO_HINTS, tenant, Ending(2, "unknown")),
    ]
