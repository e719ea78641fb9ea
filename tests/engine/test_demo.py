"""The demo itself, on real engines: same tokens, every token accounted for, and a wrong byte is noticed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvtier.cli import main
from kvtier.config import KVTierConfig
from kvtier.demo import DemoSettings, RequestResult, RunResult, Workload, runs
from kvtier.demo.setup import QUICK_MODEL, Turn
from kvtier.engine import ModelConfig, random_weights, save_model
from kvtier.rendezvous import default_directory, is_held, locked, named_files

TINY = QUICK_MODEL | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL = shlex.split("demo --quick --conversations 5 --turns 2 --no-disk --no-report --json -")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pools_left() -> set[Path]:
    """Return the named files of pools that this process holds, or nobody: other engines have theirs."""
    directory, ours = default_directory(), f"{os.getpid()} "
    with locked(directory):
        return {
            path
            for path in named_files(directory)
            if not is_held(path) or path.read_text(errors="replace").startswith(ours)
        }


def run_small(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, Any]:
    assert main([*SMALL, *options]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    expect_sums(result)
    return result


def expect_sums(result: dict[str, Any]) -> None:
    """Every prompt token has exactly one source, in sum and for each request."""
    for counts in (result, *result["per_request"]):
        tiers = sum(counts["tokens_from_tiers"].values())
        assert counts["tokens_from_gpu"] + tiers + counts["tokens_recomputed"] == counts["prompt_tokens"]
    for name in ("prompt_tokens", "tokens_from_gpu", "tokens_recomputed"):
        assert sum(request[name] for request in result["per_request"]) == result[name]


def test_quick_as_a_process(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before, disk = pools_left(), tmp_path_factory.mktemp("disk")
    command = [sys.executable, "-m", "kvtier", "demo", "--quick", "--json", "-", "--disk-folder", str(disk)]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    expect_sums(result)
    expect_answers_from_disk(result["restart"])
    assert list(disk.iterdir()) == [], "its files are removed"
    assert result["identical"] is True
    assert result["requests"] == len(result["per_request"]) == 24
    assert result["tokens_from_tiers"]["cpu"] > 0.3 * result["prompt_tokens"]
    assert result["recomputed"]["on"] == result["tokens_recomputed"] < result["recomputed"]["off"]
    assert result["wall_seconds"]["on"] > 0
    assert sum(result["why_missing"].values()) <= 24
    assert set(result["ttft_ms"]["on"]) == {"p50", "p99"}
    assert "with kvtier: 24/24 requests" in done.stderr
    assert "disk, after kill -9: 5/5 requests" in done.stderr
    assert "generated tokens are the same in all runs" in done.stderr
    page = ElementTree.parse(here / "kvtier-report.html").getroot()
    assert page.tag == "html"
    assert "built-in model (llama), 1.12 million parameters, random weights" in "".join(page.itertext())
    assert [path.name for path in here.iterdir()] == ["kvtier-report.html"]
    assert pools_left() <= before


def expect_answers_from_disk(restart: dict[str, Any]) -> None:
    """Nothing was there at first; then all but the end of each prompt came from the pool, and from disk."""
    assert restart["exit_code"] == -9, "the process was killed"
    assert restart["requests"] == len(restart["per_request"]) == 5
    loaded = restart["tokens_from_tiers"]
    assert (loaded["computed"], loaded["pool"].keys(), loaded["disk"].keys()) == ({}, {"cpu"}, {"disk"})
    assert loaded["pool"]["cpu"] == loaded["disk"]["disk"] > 0.8 * restart["prompt_tokens"]
    assert all(request["tokens_recomputed"] <= 16 for request in restart["per_request"])
    assert restart["tokens_recomputed"]["computed"] > 0.8 * restart["prompt_tokens"]
    assert restart["ttft_ms"].keys() == {"computed", "pool", "disk"}
    assert restart["restart_seconds"] > 0
    before, after = restart["tier"]["before"], restart["tier"]["after"]
    assert restart["rows_found"] >= before["demoted"] > 0
    assert (before["promoted"], after["failed_checks"]) == (0, 0)
    assert after["promoted"] * 16 >= loaded["disk"]["disk"]


class Interfering:
    """A watcher that does something when a run begins, and keeps what it is told."""

    def __init__(self, when: str, act: Callable[[], None]) -> None:
        self._when, self._act = when, act
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, run: str, requests: int) -> None:
        if run == self._when:
            self._act()

    def hear(self, run: str, turn: Turn, tokens: Sequence[int]) -> None: ...

    def advance(self, run: str, request: RequestResult) -> None: ...

    def end(self, run: str, result: RunResult) -> None: ...


def small_settings(folder: Path) -> DemoSettings:
    return DemoSettings(
        kvtier=KVTierConfig.from_dict({"cpu": {"capacity": "8MiB"}}),
        model=TINY,
        workload=Workload(conversations=2, turns=1, system=32, opening=64, answer=2),
        disk_folder=folder,
    )


class LastWords:
    """A connection of a process that ends when it has a first answer to tell, as SIGKILL has it."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        if isinstance(message, runs.Progress) and message.call == "advance":
            os.kill(os.getpid(), signal.SIGKILL)
        self._connection.send(message)


def serve_until_it_ends(connection: Connection[Any, Any], orders: runs.Orders) -> None:
    runs.serve_until_killed(LastWords(connection), orders)  # type: ignore[arg-type]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_process_that_ends_by_itself_costs_its_run_only(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so in the middle: a kill from here may come when it has told all it had to."""
    monkeypatch.setattr(runs, "serve_until_killed", serve_until_it_ends)
    watcher = Interfering("nothing", interrupt)
    result = runs.run_demo(small_settings(here), watcher)
    assert result.identical
    assert result.restart is None
    assert result.restart_skipped == "the engine's process ended by itself, with code -9"
    assert watcher.notes == [f"no run over a disk: {result.restart_skipped}"]
    assert list(here.iterdir()) == []


def test_a_disk_without_room_costs_its_run_only(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_ROW_OVERHEAD", 1 << 45)
    watcher = Interfering("nothing", interrupt)
    result = runs.run_demo(small_settings(here), watcher)
    assert result.restart is None
    (note,) = watcher.notes
    assert "of free space, found" in note
    assert "\n" not in note
    assert list(here.iterdir()) == []


def test_memory_is_no_disk() -> None:
    watcher = Interfering("computed", interrupt)
    result = runs.run_demo(small_settings(Path("/dev/shm")), watcher)
    assert result.restart is None
    assert watcher.notes == [
        "no run over a disk: /dev/shm is memory (tmpfs); name a folder on a disk with --disk-folder"
    ]


def test_ctrl_c_leaves_nothing_behind(here: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runs.run_demo(small_settings(here), Interfering("computed", interrupt))
    assert list(here.iterdir()) == []
    assert multiprocessing.active_children() == []


def test_a_folder_that_is_none_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").touch()
    for name in ("nowhere", "file"):
        assert main(["demo", "--quick", "--disk-folder", name]) == 2
        expected = f"kvtier: --disk-folder: expected a folder that exists, got '{name}'\n"
        assert capsys.readouterr().err == expected


def test_returning_conversations_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """What is computed of a prompt that was all but there is its last message, and at most a block more."""
    result = run_small(capsys, "--seed", "3")
    returning = [request for request in result["per_request"] if request["turn"] > 1]
    assert returning
    assert all(request["tokens_recomputed"] <= 20 + 16 for request in returning)
    assert all(request["first_miss"] in ("never stored", None) for request in result["per_request"])


def test_a_wrong_byte_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: with the pool scribbled over, loaded KV is wrong, tokens differ and the demo
    fails.
    """
    ask = runs._Users.ask

    def scribble_then_ask(people: runs._Users) -> None:
        connector = people._engine.connector
        if connector is not None and connector.connector_scheduler is not None:
            connector.connector_scheduler.spec.open_pool().rows[:512] = 0x3F
        ask(people)

    monkeypatch.setattr(runs._Users, "ask", scribble_then_ask)
    result = run_small(capsys, code=1)
    assert result["identical"] is False
    assert result["first_difference"]["turn"] == 2


def test_a_small_tier_evicts_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--cpu-capacity", "700KiB", "--policy", "arc"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    expect_sums(result)
    assert result["why_missing"]["evicted"] > 0
    assert result["pool"]["evicted"] > 0
    assert "expect evictions" in captured.err


def test_a_cache_with_room_for_all_is_no_slowdown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--gpu-blocks", "400"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["fitted_in_gpu_cache"]
    assert "Everything fitted into the engine's own cache: kvtier had nothing to load" in captured.err
    assert "use more --conversations, or fewer --gpu-blocks than 400." in captured.err
    assert "×" not in captured.err


def test_a_tier_without_capacity_serves(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--cpu-capacity", "0"]) == 0
    out = capsys.readouterr().out
    assert "0 B" in out
    assert "fitted" not in out
    assert "note: no run over a disk: the pool has no room for one prompt of the last turn" in out
    assert (here / "kvtier-report.html").exists()


def test_chunks_of_several_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_small(capsys, "--block-size", "8", "--chunk-blocks", "4", "--dtype", "bfloat16")
    assert result["identical"]
    assert result["tokens_from_tiers"]["cpu"] > 0
    assert result["config"]["kvtier"]["blocks_per_chunk"] == 4
    assert result["config"]["engine"]["dtype"] == "bfloat16"


def test_a_model_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(here / "model", TINY, random_weights(ModelConfig.from_dict(TINY), seed=4))
    result = run_small(capsys, "--model", "model")
    assert result["identical"]
    assert result["config"]["model"]["source"] == result["config"]["model"]["name"] == "model"
    assert result["config"]["model"]["random_weights"] is False
    assert result["config"]["model"]["vocab_size"] == 64


def test_a_policy_from_this_folder(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (here / "demo_policy.py").write_text(
        "from kvtier.policies import LRUPolicy\n\n\nclass Mine(LRUPolicy): ...\n"
    )
    assert run_small(capsys, "--policy", "demo_policy:Mine")["identical"]


def test_the_same_seed_gives_the_same_demo(capsys: pytest.CaptureFixture[str]) -> None:
    demos = [run_small(capsys, "--seed", "7", "--concurrency", "1") for _ in range(2)]
    counts = ("prompt_tokens", "tokens_from_gpu", "tokens_from_tiers", "tokens_recomputed", "why_missing")
    assert [demos[0][name] for name in counts] == [demos[1][name] for name in counts]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--policy", "lruu"],
            "--policy: expected one of arc, gittins, lru or 'package.module:Class', got 'lruu'; did you mean"
            " 'lru'?",
        ),
        (
            ["--policy", "no.such:Thing"],
            "--policy: expected an importable 'package.module:Class', got 'no.such:Thing'",
        ),
        (
            ["--cpu-capacity", "1KiB"],
            "--cpu-capacity: expected at least one row (32.0 KiB), or 0 to keep nothing, got 1.0 KiB",
        ),
        (
            ["--chunk-blocks", "500"],
            "--chunk-blocks: expected chunks no longer than the longest conversation",
        ),
        (["--gpu-blocks", "9"], "--gpu-blocks: expected room for the longest conversation"),
        (["--gpu-blocks", "2"], "--gpu-blocks: expected a whole number of at least 3"),
        (["--gpu-blocks", "999999999"], "--gpu-blocks: expected two caches that fit into"),
        (["--turns", "3000"], "--turns: expected conversations within the model's 8192 positions"),
        (["--dtype", "int4"], "--dtype: expected one of 'float32', 'float16', 'bfloat16', got 'int4'"),
        (["--device", "tpu"], "--device: expected one of 'cpu', 'cuda', got 'tpu'"),
        (
            ["--model", "nowhere"],
            "nowhere: expected a model folder, there is none; "
            "a model folder has config.json and *.safetensors",
        ),
        (
            ["--model", "."],
            "config.json: expected a JSON file, there is none; "
            "a model folder has config.json and *.safetensors; for one: pip",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    options: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = pools_left()
    assert main(["demo", "--quick", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"kvtier: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert list(here.iterdir()) == []
    assert pools_left() <= before
