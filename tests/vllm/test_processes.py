"""vLLM in its own processes: scheduler and workers apart, one pool between ranks, and nothing left behind by
SIGKILL.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_ports
from tests.tiers.servers import ValkeyServer
from tests.vllm.conftest import Reference
from tests.vllm.device import on_gpu, skip_without_devices
from tests.vllm.models import save_granite, save_hybrid, save_qwen3_next, save_trained
from tests.vllm.test_states import skip_without_convolution

STAGES = Path(__file__).with_name("stages.py")
TURNS = Path(__file__).with_name("turns.py")
RANKS = Path(__file__).with_name("ranks.py")
NEW_WEIGHTS = Path(__file__).with_name("new_weights.py")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vllm_offline.py"


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a process group of its own, and in the end kill all of the group without a warning.

    Not in a session of its own: Linux shares cores out by session, and 6.18 keeps all other sessions from
    running, for half a minute at times, while threads of one that wait by yielding (vLLM's) or spinning (of
    Mooncake's client) have both cores of a small machine. A server that was starved so seemed to be dead.
    """
    # Faults are in tests.vllm.
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    first_port = str(free_ports(16)[0])  # of those it looks for one after the other
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_PORT": first_port,
        "PYTHONPATH": paths,
    }
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, *command], env=env, process_group=0, **options) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def mapped_files(group: int) -> set[tuple[str, str]]:
    """Return inode and name of all files that the processes of a group have mapped; `/memfd:` is memory
    without a name.
    """
    mapped: set[tuple[str, str]] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                fields = [line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines()]
                mapped |= {(line[4], line[5]) for line in fields if len(line) == 6}
    return mapped


def unlink_shared(mapped: set[tuple[str, str]]) -> None:
    """Remove what vLLM leaves behind of its own in shared memory."""
    for _, name in mapped:
        if name.startswith("/dev/shm/"):
            Path(name).unlink(missing_ok=True)


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """Servers that end with the test."""
    with ExitStack() as stack:
        yield stack


CACHED = [32, 96, 128, 160]
"""Of the prompts of `turns.py` what fills whole blocks, and is not the last token."""


def run_turns(*arguments: str, program: Path = TURNS) -> tuple[dict[str, list[Any]], set[tuple[str, str]]]:
    """Run a program until it has told its results and kill it; return these and the files it had mapped."""
    with running(str(program), *arguments) as process:
        assert process.stdout is not None
        said: list[str] = []
        told = any(said.append(line) or line.startswith('{"computed"') for line in process.stdout)
        why = [line for line in said if "nanobind" not in line and not line.startswith(" - ")]
        assert told, "it has ended:\n" + "".join(why[-40:])
        mapped = mapped_files(process.pid)
    return json.loads(said[-1]), mapped


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_same_tokens_and_nothing_left_behind(
    llama: Path, tensor_parallel_size: int, tmp_path: Path, servers: ExitStack
) -> None:
    """Two ranks have a disk and a server below their pool: killed, and started again, they have from the
    disk what they had, and others without that disk from the server.
    """
    skip_without_devices(tensor_parallel_size)
    places: list[str] = []
    if tensor_parallel_size > 1:
        places = [str(tmp_path), servers.enter_context(ValkeyServer()).url]
    arguments = [str(llama), str(tensor_parallel_size)]
    result, mapped = run_turns(*arguments, *places)
    tokens, cached, sources = zip(*result["loaded"], strict=True)
    assert list(tokens) == [tokens for tokens, *_ in result["computed"]]
    assert [turn[1:] for turn in result["computed"]] == [[0, {}]] * 4, "nothing is in the folder yet"
    assert list(cached) == CACHED
    assert list(sources) == [{"cpu": count} for count in CACHED]
    pools = [
        name.removeprefix("/memfd:").split()[0] for _, name in mapped if name.startswith("/memfd:kvtier-")
    ]
    assert len(pools) == (tensor_parallel_size > 1), (
        "one process with nobody to share needs no shared memory"
    )
    assert not any(Path(f"/dev/shm/{name}.pool").exists() for name in pools), "the ranks have met"
    unlink_shared(mapped)
    for source, place in zip(("disk", "valkey"), places, strict=False):
        again, mapped = run_turns(*arguments, place)
        unlink_shared(mapped)
        expected = zip(tokens, CACHED, [{source: count} for count in CACHED], strict=True)
        assert again["computed"] == [list(turn) for turn in expected]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_right_tokens_although_one_rank_fails_before_another(model: Path) -> None:
    """vLLM hears of a failed block from one rank at once, and of the end of the load when all have ended
    theirs.
    """
    _run_faulty_ranks(model, {"tensor_parallel_size": 2})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_states_that_are_divided_among_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    skip_without_convolution()
    model = save_granite(tmp_path_factory.mktemp("granite"))
    _run_faulty_ranks(model, {"tensor_parallel_size": 2, "block_size": 128, "max_num_batched_tokens": 128})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_states_of_pipeline_stages(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With one request at a time: the model computes in bfloat16, which rounds by what runs together."""
    model = save_qwen3_next(tmp_path_factory.mktemp("qwen"), repeats=2)
    steps = {"max_num_seqs": 1, "max_num_batched_tokens": 384, "max_model_len": 2048}
    _run_faulty_ranks(model, {"pipeline_parallel_size": 2, "dtype": "bfloat16"} | steps, times=6)


def _run_faulty_ranks(model: Path, options: dict[str, Any], times: int = 1) -> None:
    skip_without_devices(2)
    with running(str(RANKS), str(model), json.dumps(options), str(times)) as process:
        assert process.stdout is not None
        said: list[str] = []
        told = any(said.append(line) or line.startswith('{"wrong"') for line in process.stdout)
        assert told, "it has ended:\n" + "".join(said[-40:])
        mapped = mapped_files(process.pid)
    unlink_shared(mapped)
    result = json.loads(said[-1])
    assert result["wrong"] == 0
    assert result["vllm:kvtier_loads"] > result["vllm:kvtier_loads_failed"] > 8


def run_stages(model: Path, *arguments: str) -> dict[str, list[Any]]:
    """Run `stages.py`, and look at what it says but for how the prompts were computed first."""
    result, mapped = run_turns(str(model), *arguments, program=STAGES)
    unlink_shared(mapped)
    tokens = [turn[0] for turn in result["computed"]]
    for loads in ("loaded", "after"):
        expected = zip(tokens, CACHED, [{"cpu": count} for count in CACHED], strict=True)
        assert result[loads] == [list(turn) for turn in expected]
    for computes in {"failing", "cleared"} & result.keys():
        assert result[computes] == [[turn, 0, {}] for turn in tokens]
    assert result["failed loads"] == len(CACHED)
    return result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pipeline_stages_of_unequal_length(llama: Path, reference: Reference, tmp_path: Path) -> None:
    """Of three layers the first stage has two. Killed, and started again, they have from their disk what
    they had.
    """
    skip_without_devices(2)
    from tests.vllm.turns import PROMPTS, ROWS

    tokens = reference(llama, PROMPTS)
    first = run_stages(llama, str(tmp_path), str(ROWS))
    assert first["computed"] == [[turn, 0, {}] for turn in tokens]
    again = run_stages(llama, str(tmp_path))
    expected = zip(tokens, CACHED, [{"disk": count} for count in CACHED], strict=True)
    assert again["computed"] == [list(turn) for turn in expected]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pipeline_stages_with_unequal_parts_of_two_groups(
    reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of three layers with full attention the first stage has two, of three with a window it has one."""
    skip_without_devices(2)
    from tests.vllm.turns import PROMPTS

    model = save_hybrid(tmp_path_factory.mktemp("hybrid"), pairs=3)
    result = run_stages(model, str(tmp_path_factory.mktemp("disk")))
    assert result["computed"] == [[turn, 0, {}] for turn in reference(model, PROMPTS)]


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_ranks_notice_weights_that_are_reloaded(llama: Path, tmp_path: Path) -> None:
    skip_without_devices(2)
    result, mapped = run_turns(str(llama), str(save_trained(tmp_path, llama)), program=NEW_WEIGHTS)
    unlink_shared(mapped)
    old, unsaid, said = result["computed"]
    assert unsaid == said
    assert all(before != after for before, after in zip(old, said, strict=True))
    assert result["vllm:kvtier_weight_changes"] == 1
    assert result["vllm:kvtier_loads"] > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_runs(llama: Path) -> None:
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    options = [
        "--max-model-len",
        "512",
        "--documents",
        "12",
        "--lines",
        "50",
        "--kv-cache",
        "2MiB",
        "--enforce-eager",
    ]
    # Some virtual machines offer AMX and kill whoever uses it, as bfloat16 does.
    options += [
        "--dtype",
        "float32",
    ]
    if on_gpu():  # other tests have the rest of it
        options += ["--gpu-memory-utilization", "0.1"]
    command = [sys.executable, str(EXAMPLE), "--model", str(llama), "--capacity", "64MiB", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"of ([\d,]+) prompt tokens ([\d,]+) came back from kvtier", done.stdout)
    assert first[1] == "0"
    assert second[1] != "0"
    assert re.search(r"loads \d+, load_bytes [\d,]+, stores \d+", done.stdout)
