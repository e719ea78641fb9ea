"""`kvtier simulate` from its command line: table, JSON, page, and wrong options."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

from kvtier.cli import main

TOKEN = ["--bytes-per-token", "4KiB"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a file of 120 requests in 12 chats with a common beginning."""
    random, lengths, lines = (
        Random(0),
        dict[int, int](),
        ["time,session,input_tokens,output_tokens,shared_prefix"],
    )
    for at in range(120):
        chat = random.randrange(12)
        prompt = lengths.get(chat, 64) + random.randrange(10, 120)
        lengths[chat] = prompt + 30
        lines.append(f"{at},{chat},{prompt},30,64")
    file = tmp_path / "chats.csv"
    file.write_text("\n".join(lines))
    return file


def test_table_json_and_page(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, page = tmp_path / "out.json", tmp_path / "out.html"
    sizes = ["--memory", "1MiB,8MiB", "--memory", "20%", "--disk", "0,16MiB", "--policy", "lru,arc"]
    more = ["--chunk-tokens", "16,32", "--memory-price", "3", "--disk-price", "0.1", "--here", "4MiB"]
    files = ["--json", str(json_file), "--html", str(page), "--jobs", "1"]
    assert main(["simulate", str(trace), *TOKEN, *sizes, *more, *files]) == 0
    printed = capsys.readouterr().out
    assert "120 requests in 119 s" in printed
    assert "A cache without a limit would save" in printed
    result = json.loads(json_file.read_text())
    assert result["trace"]["requests"] == 120
    assert result["settings"]["speeds"]["prefill"] == 10_000
    cells = result["cells"]
    assert len(cells) == 3 * 2 * 2 * 2
    for cell in cells:
        assert cell["hit_rate"] == pytest.approx(cell["hit_rate_memory"] + cell["hit_rate_disk"])
        assert 0 < cell["hit_rate"] <= cell["hit_rate_optimum"] <= cell["hit_rate_infinite"] < 1
        assert cell["first_token_p50"] <= cell["first_token_p99"]
        assert cell["cost_per_million_tokens"] > 0
        assert (
            (cell["disk_written_per_day"] > 0)
            == (cell["disk_bytes"] > 0)
            == (cell["flash_years"] is not None)
        )
        assert f"{cell['hit_rate']:.2%}" in printed
        assert f"{cell['hit_rate']:.2%}" in page.read_text()
    text = page.read_text()
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert len(root.findall(".//svg")) == 3
    assert "you are here" in text
    assert "--policy lru,arc" in text, "the command line that repeats it"
    assert "http" not in text
    lines = root.findall(".//svg")[0].findall("polyline")
    assert len(lines) == 8 + 4 + 1, (
        "policies, disks and chunks; the optimum of each disk and chunk; the mark"
    )


def test_a_terminal_of_80_columns_gets_the_table(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["simulate", str(trace), *TOKEN, "--memory", "1GiB,16GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:])) <= 80, "sentences are left to the terminal"
    assert [line.split()[0] for line in lines if "gittins" in line] == ["1GiB", "16GiB"]


def test_a_terminal_too_narrow_for_the_table_gets_sentences(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["simulate", str(trace), *TOKEN, "--memory", "1MiB", "--jobs", "1"]) == 0
    assert "memory 1MiB, policy gittins, chunk 16, saved " in capsys.readouterr().out


def test_a_policy_in_the_current_folder(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvtier demo` and `kvtier config check` find it there; this command said that there is no module."""
    code = "from kvtier.policies import LRUPolicy\nclass Mine(LRUPolicy): pass\n"
    (tmp_path / "policy_to_simulate.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "policy_to_simulate", raising=False)
    policies = ["--policy", "lru,policy_to_simulate:Mine", "--jobs", "2"]
    assert main(["simulate", str(trace), *TOKEN, "--memory", "1MiB", *policies]) == 0
    assert "policy_to_simulate:Mine" in capsys.readouterr().out


def test_a_write_limit_reached_soon_is_told_in_minutes(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--memory", "1MiB", "--disk", "16MiB", "--write-limit", "1MiB", "--jobs", "1"]
    assert main(["simulate", str(trace), *TOKEN, *sizes]) == 0
    assert re.search(r"the first after [\d.]+ min\. From then on", capsys.readouterr().out)


def test_the_bytes_of_a_token_come_from_a_model(trace: Path, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    out = tmp_path / "out.json"
    command = ["simulate", str(trace), "--model", str(tmp_path), "--memory", "50%", "--json", str(out)]
    assert main(command) == 0
    assert json.loads(out.read_text())["settings"]["bytes_per_token"] == 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1MiB"], "expected --model FOLDER or --bytes-per-token SIZE: one of them"),
        ([*TOKEN, "--memory", "much"], "--memory: expected a size such as 8GiB"),
        (
            [*TOKEN, "--memory", "101%"],
            "--memory: expected a size, or a share such as 1% up to 100%, got '101%'",
        ),
        ([*TOKEN, "--memory", "1MiB,"], "--memory: expected values separated by commas, got '1MiB,'"),
        (
            [*TOKEN, "--memory", "1KiB"],
            "--memory: expected at least one row of 16 tokens (64.0 KiB), got 1KiB",
        ),
        ([*TOKEN, "--memory", "1MiB", "--disk", "1B"], "--disk: expected at least one row"),
        ([*TOKEN, "--memory", "1MiB", "--policy", "lur"], "--policy: expected one of arc, gittins, lru"),
        (
            [*TOKEN, "--memory", "1MiB", "--chunk-tokens", "24"],
            "expected a multiple or a divisor of the trace's",
        ),
        (
            [*TOKEN, "--memory", "1MiB", "--chunk-tokens", "x"],
            "--chunk-tokens: expected whole numbers of tokens",
        ),
        ([*TOKEN, "--memory", "1MiB", "--bus", "0"], "--bus: expected more than 0, got '0'"),
        *(
            ([*TOKEN, "--memory", "1MiB", option, "inf"], f"Invalid value for '{option}'")
            for option in ("--memory-price", "--disk-price", "--flash-writes", "--prefill")
        ),
        ([*TOKEN, "--memory", "1MiB", "--write", "back"], "--write: expected through or evict, got 'back'"),
        (
            [*TOKEN, "--memory", "1MiB", "--html", "no/such/folder.html"],
            "--html: expected a file in a folder",
        ),
    ],
)
def test_wrong_options_get_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["simulate", str(trace), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_wrong_line_of_the_trace_gets_one_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(trace.read_text() + "\n120,1,many,30,64\n")
    assert main(["simulate", str(trace), *TOKEN, "--memory", "1MiB"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"kvtier: {trace}:122: input_tokens: expected a number of at least 1, got 'many'"
    )
