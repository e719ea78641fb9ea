"""`kvtier bench` against a small server over a real socket."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.faulty_server import trickling
from tests.unit.bench_kit import CAPACITY, PATIENCE, Clock, FakeServer, serving

from kvtier.bench.client import Server
from kvtier.bench.prompts import make_document, read_prompts
from kvtier.bench.result import BenchResult
from kvtier.bench.run import Bench, BenchSettings
from kvtier.cli import main
from kvtier.errors import InputError, OutsideError

PROMPTS = tuple(" ".join(f"{number}-{word}" for word in range(20)) for number in range(4))
FEW = ["--yes", "--pairs", "2", "--tokens", "32", "--answer-tokens", "3"]


def measure(fake: FakeServer, **settings: Any) -> BenchResult:
    """Run a bench against a server whose clock is scripted."""
    assert fake.clock is not None
    chosen: dict[str, Any] = {"prompts": PROMPTS, "pairs": 4, "answer_tokens": 3} | settings
    with serving(fake) as url:
        bench = Bench(Server(url, clock=fake.clock), BenchSettings(**chosen), lambda text: None, fake.clock)
        bench.inspect()
        bench.run()
    return bench.result


def test_times_sources_and_answers_of_both_sides() -> None:
    fake = FakeServer(Clock())
    result = measure(fake)
    off, on = result.without, result.loading
    assert result.pairs == 4
    assert (off.first_ms(50), on.first_ms(99), result.speedup) == (2000, 500, 4)
    assert (off.gap_ms(50), on.gap_ms(99)) == (250, 250)
    assert off.tokens_per_second() == pytest.approx((80 + 12) / (4 * 2.5))
    assert on.tokens_per_second() == pytest.approx((80 + 12) / (4 * 1.0))
    assert (off.sources, on.sources) == ({"local_compute": 80}, {"external_kv_transfer": 80})
    assert result.different == []
    assert result.foreign_tokens == 0
    assert result.verdict() == "First token 4× faster"
    rows = {row.label: row[1:] for row in result.rows()}
    assert rows["first token, p50"] == ("2.00 s", "500 ms", "4× faster")
    assert rows["inter-token, p50"] == ("250 ms", "250 ms", "")
    assert rows["  loaded by kvtier"] == ("0 (0%)", "80 (100%)", "")
    assert rows["same answers"] == ("", "4 of 4", "")


def test_requests_of_a_pair_differ_only_in_salt_and_limits() -> None:
    fake = FakeServer(Clock())
    measure(fake)
    limits = {"max_load_tokens": 0, "max_offload_tokens": 0}
    first, second = fake.streamed[:2]
    assert first["kv_transfer_params"] == limits
    added = {name: first.pop(name) for name in ("cache_salt", "kv_transfer_params")}
    assert first == second
    assert (first["temperature"], first["max_tokens"], first["ignore_eos"]) == (0, 3, True)
    is_salted = ["cache_salt" in body for body in [first | added, *fake.streamed[1:]]]
    assert is_salted == [True, False, False, True, True, False, False, True], "the order changes"
    salts = {body["cache_salt"] for body in fake.streamed if "cache_salt" in body}
    assert salts == {added["cache_salt"]}, "so prompts that share a prefix share it on this side too"


def test_fillers_take_the_cache_and_are_not_stored() -> None:
    fake = FakeServer(Clock())
    measure(fake, pairs=6)  # more than there are prompts: a second pass
    whole = [body for _, body in fake.requests if not body.get("stream")]
    fillers = [body for body in whole if "cache_salt" in body][2:]
    assert sum(len(body["prompt"].split()) for body in fillers) >= 2 * CAPACITY
    assert len({body["prompt"] for body in fillers}) == len(fillers), "none is in the cache already"
    assert fake.stored == set(PROMPTS)
    assert all(body["kv_transfer_params"]["max_offload_tokens"] == 0 for body in fillers)
    kinds = [
        "pair" if body.get("stream") else "filler" if body in fillers else "other"
        for _, body in fake.requests
    ]
    assert kinds[:6] == ["other"] * 6, "two probes, and each prompt once"
    assert kinds[6] == "filler"
    assert kinds[-5] == "filler"


def test_a_server_that_resets_its_cache_needs_no_filler() -> None:
    fake = FakeServer(Clock())
    fake.reset = True
    assert measure(fake).pairs == 4
    assert len(fake.requests) == 2 + 4 + 8


def test_documents_of_its_own_have_the_length_asked_for() -> None:
    fake = FakeServer(Clock())
    result = measure(fake, prompts=(), tokens=48)
    assert [answer.prompt_tokens for answer in result.loading.answers] == [48] * 4
    assert len({make_document(number, 48) for number in range(50)}) == 50
    assert make_document(7, 48) == make_document(7, 48)


def test_chats_and_rounds_of_several_requests() -> None:
    fake = FakeServer()
    with serving(fake) as url:
        settings = BenchSettings(prompts=PROMPTS[:3], pairs=3, answer_tokens=2, concurrency=2, chat=True)
        bench = Bench(Server(url), settings, lambda text: None)
        bench.inspect()
        bench.run()
    assert {path for path, _ in fake.requests} == {"/v1/chat/completions"}
    assert bench.result.loading.answers[0].text == "so it is " * 2
    assert bench.result.loading.sources.keys() == {"external_kv_transfer"}
    assert ["cache_salt" in body for body in fake.streamed] == [True, True, False, False, False, True]


def test_remarks_tell_what_weakens_the_figures() -> None:
    fake = FakeServer(Clock())
    fake.answer = lambda prompt, source: source if prompt == PROMPTS[1] else "same"
    fake.stored.clear()

    def disturb(number: int) -> None:
        fake.sources["local_compute"] += 1000 if number == 1 else 0  # another client
        fake.misses["evicted"] += number == 2

    fake.before_stream = disturb
    result = measure(fake)
    told = " ".join(result.remarks())
    assert result.different == [2]
    assert "Answers differ in pair 2." in told
    assert "(1,000 prompt tokens)" in told
    assert "evicted (1)" in told
    assert "hardly more than the slowest" in told


def test_the_command_prints_a_table_json_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, prompts = tmp_path / "page.html", tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    with serving(FakeServer()) as url:
        assert main(["bench", url, *FEW, "--html", str(page)]) == 0
        table = capsys.readouterr()
        assert main(["bench", f"{url}/v1", *FEW, "--json", "--prompts", str(prompts)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["bench", url, *FEW[1:]]) == 2, "there is no terminal on which to ask"
        assert "expected --yes" in capsys.readouterr().err
    assert "first token, p50" in table.out
    assert max(map(len, table.out.splitlines())) <= 80
    assert "sends load" in table.err
    time = r"\d[\d.]* m?s"
    assert re.search(rf"pair 1 of 2: first token {time} without loading, {time} with it", table.err)
    assert found["pairs"] == found["same_answers"] == 2
    assert found["loading"]["sources"] == {"external_kv_transfer": 40}
    assert len(found["without"]["answers"]) == 2
    text = page.read_text()
    ElementTree.fromstring(text.partition("\n")[2])
    assert "2 of 2 pairs of answers are the same" in text
    assert "<td>600</td>" in re.sub(r"<td [^>]*>", "<td>", text), "a number of seconds without .0"
    assert "<script" not in text


def stream(*lines: str) -> Callable[[FakeServer], None]:
    return lambda fake: setattr(fake, "stream_lines", list(lines))


DEEP = '{"a":' + "[" * 200_000
HUGE = f'{{"usage": {{"prompt_tokens": 1{"0" * 400}}}}}'
COUNT = "vllm:prompt_tokens_by_source_total"


def let(**attributes: Any) -> Callable[[FakeServer], None]:
    return lambda fake: [setattr(fake, name, value) for name, value in attributes.items()] and None


@pytest.mark.parametrize(
    ("change", "options", "code", "message"),
    [
        (let(kvtier=False), [], 2, "shows no metrics of kvtier; start it with KVTierConnector"),
        (let(metrics=False), [], 1, "/metrics: expected vLLM's metrics: the server answered 404"),
        (let(), ["--model", "other"], 2, "expected a model of tiny, got 'other'"),
        (let(models=None), [], 2, "/v1/models: the server answered 404"),
        (let(models=[]), [], 1, "expected a list of models, got b'[]' (Expected `object`, got `array`)"),
        (let(models={"data": [{"id": "m", "max_model_len": "9"}]}), [], 1, "got `str` - at `$.data[0].max_"),
        (let(models={"data": [{"id": "m", "max_model_len": 9.5}]}), [], 1, "got `float` - at `$.data[0]."),
        (let(models={"data": [{"id": "m", "max_model_len": -9}]}), [], 1, "Expected `int` >= 1 - at"),
        (let(models={"data": [{"id": "\x1b[41m"}]}), [], 1, "expected a list of models, got"),
        (let(models=DEEP), [], 1, 'expected a list of models, got b\'{"a":[[['),
        (let(answered=DEEP), [], 1, 'expected an answer with usage.prompt_tokens, got b\'{"a":[[['),
        (let(answered='{"usage": null}'), [], 1, "Expected `object`, got `null` - at `$.usage`"),
        (let(answered='{"usage": {"prompt_tokens": 1e999}}'), [], 1, "out of range - at `$.usage.prompt_"),
        (let(answered=HUGE), [], 1, "Expected `int` <= 1099511627776 - at `$.usage.prompt_tokens`"),
        (let(more_metrics=f"{COUNT} NaN"), [], 1, f"/metrics: expected a count in {COUNT}, got nan"),
        (let(more_metrics=f"{COUNT} 1e999"), [], 1, f"/metrics: expected a count in {COUNT}, got inf"),
        (let(), ["--tokens", "1000"], 2, "expected at most 64 together, the length of tiny, got 1,003"),
        (let(status=500), [], 1, "the server answered 500: No room, sorry."),
        (let(status=401), [], 2, "expects a token (No room, sorry.): give one with --token-file"),
        (stream('data: {"error": {"message": "out of\\nmemory"}}'), [], 1, "an error: out of memory"),
        (stream('data: {"choices": [{"text": "a"}]}'), [], 1, "the answer broke off before its end"),
        (stream("data: [DONE]"), [], 1, "ended without a token"),
        (stream("data: what"), [], 1, "expected events of a streamed answer, got b'what'"),
        (stream(f"data: {DEEP}"), [], 1, 'expected events of a streamed answer, got b\'{"a":[[['),
        (stream('data: {"choices": [1]}'), [], 1, "Expected `object`, got `int` - at `$.choices[0]`"),
        (stream('data: {"choices": {"text": "a"}}'), [], 1, "got `object` - at `$.choices`"),
        (stream('data: {"choices": [{"delta": "a"}]}'), [], 1, "got `str` - at `$.choices[0].delta`"),
        (
            stream('data: {"usage": {"prompt_tokens": -1}}'),
            [],
            1,
            "Expected `int` >= 0 - at `$.usage.prompt",
        ),
        (stream('data: {"error": "\\u001b[41mred"}'), [], 1, r"the answer is an error: \x1b[41mred"),
        (let(status=500, refusal="<p>\x1b[41mred"), [], 1, r"the server answered 500: <p>\x1b[41mred"),
        (let(status=500, refusal=DEEP), [], 1, "the server answered 500: {"),
    ],
)
def test_errors_are_one_line(
    change: Callable[[FakeServer], None],
    options: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeServer()
    change(fake)
    with serving(fake) as url:
        assert main(["bench", url, *FEW, *options]) == code
    *_, last = (said := capsys.readouterr().err).splitlines()
    assert last.startswith("kvtier: ")
    assert message in last
    assert said.replace("\n", "").isprintable()


def test_no_server_and_a_prompt_that_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
    assert main(["bench", nobody, "--yes"]) == 1
    assert f"http://{nobody}: no server answers there" in capsys.readouterr().err
    (tmp_path / "long.txt").write_text("word " * 100)
    with serving(FakeServer()) as url:
        assert main(["bench", url, *FEW, "--prompts", str(tmp_path / "long.txt")]) == 2
    assert "prompt 1: " in (said := capsys.readouterr().err)
    assert "the server answered 400: This model takes 64 tokens." in said


def test_files_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Hello"}]
    file.write_text(f'"one"\n\n{{"prompt": "two"}}\n{json.dumps({"messages": chat})}\n')
    assert read_prompts(file) == ["one", "two", chat]
    for text, message in [
        ("{", "line 1: expected JSON"),
        ('"a"\n7', 'line 2: expected a string, {"prompt": "…"} or {"messages": […]}, got'),
        ("\n", "expected a prompt, got an empty file"),
    ]:
        file.write_text(text)
        with pytest.raises(InputError, match=r"prompts\.jsonl") as caught:
            read_prompts(file)
        assert message in str(caught.value)
    with pytest.raises(InputError, match="cannot read the prompts"):
        read_prompts(tmp_path / "none")


def test_the_time_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that stops answering ends the run, which shows what it has."""
    fake, over = FakeServer(), threading.Event()
    fake.before_stream = lambda number: (number == 4 and over.wait(PATIENCE)) and None
    with serving(fake) as url:
        assert main(["bench", url, *FEW, "--max-seconds", "1"]) == 0
        over.set()
    said = capsys.readouterr().out
    assert "The time of 1 s was over after 1 of 2 pairs." in " ".join(said.split())


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (EVENTS, b": ping\n\n"),
        (EVENTS, b"x"),
        (EVENTS, b'data: {"choices": [{"text": "a"}]}\n\n'),
        (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
        (b"HTTP/1.1 200 OK\r\nX: 1\r\n", b"X: 1\r\n" * 2),
        (b"", b""),
    ],
)
def test_a_call_ends_by_its_deadline_whatever_arrives(head: bytes, piece: bytes) -> None:
    with trickling(head, piece) as url:
        server = Server(url)
        with pytest.raises(OutsideError, match="in time"):
            server.stream("/v1/completions", {}, time.perf_counter() + 0.3)
        with pytest.raises(OutsideError, match="in time"):
            server.models(time.perf_counter() + 0.3)


def test_an_answer_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.bench.client._LONGEST_ANSWER", 1 << 10)
    with (
        trickling(EVENTS, b": ping\n\n" * 100) as url,
        pytest.raises(OutsideError, match="the answer is longer than"),
    ):
        Server(url).stream("/v1/completions", {}, time.perf_counter() + PATIENCE)


def test_no_pair_in_time_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    fake, over = FakeServer(), threading.Event()
    fake.before_stream = lambda number: over.wait(PATIENCE) and None
    with serving(fake) as url:
        assert main(["bench", url, *FEW, "--max-seconds", "1"]) == 1
        over.set()
    said = capsys.readouterr().err
    assert (
        "nothing was measured: --max-seconds (1) were over before the first pair was complete: http" in said
    )


def test_labels_of_a_server_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    fake, fake.before_stream = FakeServer(), lambda number: fake.misses.update(["[/b]\x1b[41m"])
    with serving(fake) as url:
        assert main(["bench", url, *FEW]) == 0
    assert r"[/b]\x1b[41m" in "".join(capsys.readouterr().out.split("\n"))


def test_ctrl_c_prints_what_was_measured() -> None:
    fake, reached, over = FakeServer(), threading.Event(), threading.Event()

    def hang(number: int) -> None:
        if number == 3:
            reached.set()
            over.wait(PATIENCE)

    fake.before_stream = hang
    with serving(fake) as url:
        command = [sys.executable, "-m", "kvtier", "bench", url, *FEW]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert reached.wait(PATIENCE)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE)
        over.set()
    assert process.returncode == 130
    assert "first token, p50" in out
    assert "Interrupted after 1 of 2 pairs." in " ".join(out.split())
    assert "Traceback" not in err
