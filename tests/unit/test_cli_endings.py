"""How commands end when they are interrupted, when nobody reads them, and when nothing can be written: never
with a traceback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.events.recording import RecordedBatch, RecordingWriter

KVTIER = (sys.executable, "-m", "kvtier")
COMMANDS = {
    "version": ("--version",),
    "a group alone": ("index",),
    "doctor": ("doctor",),
    "config": ("config", "check", "settings.json"),
    "keygen": ("events", "keygen", "keys"),
    "replay": ("events", "replay", "recording"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the commands want."""
    (tmp_path / "settings.json").write_text('{"cpu": {"capacity": "8GiB"}}')
    with RecordingWriter(tmp_path / "recording") as writer:
        writer.write(RecordedBatch(1.0, 0, b""))
    return tmp_path


def environment(buffered: bool) -> dict[str, str]:
    """Return ours, with output that is written when it is flushed, or at once: errors come up at other
    places.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | (
        {} if buffered else {"PYTHONUNBUFFERED": "1"}
    )


HELD = """
import importlib.util, runpy, sys

module = sys.argv.pop(1)


class Hold:
    def find_spec(self, name, path=None, target=None):
        if name != module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wait(made):
            execute(made)
            print("imported", file=sys.stderr, flush=True)
            sys.stdin.read()

        spec.loader.exec_module = execute_and_wait
        return spec


sys.meta_path.insert(0, Hold())
runpy.run_module("kvtier", run_name="__main__", alter_sys=True)
"""
"""Runs `python -m kvtier` with arguments behind the name of a module. When that is imported it says so, and
goes on at the end of its input."""


# -- Ctrl-C ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ("--version",)),
        ("rich.console", ("doctor",)),
        ("kvtier.config", ("config", "check", "settings.json")),
        ("kvtier.demo.result", ("demo", "--quick")),
        ("numpy", ("demo", "--quick")),
        ("torch", ("demo", "--quick")),
        ("kvtier.engine", ("demo", "--quick")),
        ("zmq", ("events", "tail", "tcp://127.0.0.1:5557")),
    ],
)
def test_an_early_interrupt_is_one_line(module: str, arguments: tuple[str, ...], folder: Path) -> None:
    """Most of the time before a command begins goes into imports. It waits in one until it is interrupted:
    else a command may be done before that.
    """
    command, pipe = [sys.executable, "-c", HELD, module, *arguments], subprocess.PIPE
    options = {"stdin": pipe, "stdout": subprocess.DEVNULL, "stderr": pipe, "text": True, "cwd": folder}
    with subprocess.Popen(command, **options) as process:  # type: ignore[call-overload]
        assert process.stderr.readline() == "imported\n"
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        assert process.stderr.read() == "kvtier: interrupted\n"
    assert process.returncode == 130
    assert {path.name for path in folder.iterdir()} == {"settings.json", "recording"}


def test_an_interrupt_in_the_middle_is_one_line(folder: Path) -> None:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    with subprocess.Popen([*KVTIER, "demo", "--quick"], **options) as process:  # type: ignore[call-overload]
        assert process.stdout.readline().startswith("without kvtier: ")
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "kvtier: interrupted\n"
    assert process.returncode == 130
    assert {path.name for path in folder.iterdir()} == {"settings.json", "recording"}


def test_a_demo_that_is_terminated_leaves_no_files(folder: Path) -> None:
    """The run over a disk has a folder of its own, in which a file of the disk tier shows that it runs."""
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    (place := folder / "place").mkdir()
    command = [*KVTIER, "demo", "--quick", "--no-report", "--disk-folder", "place"]
    with subprocess.Popen(command, **options) as process:  # type: ignore[call-overload]
        while process.poll() is None and not [*place.glob("kvtier-demo-*/*")]:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 143
    assert not [*place.iterdir()]


def test_ignored_interrupts_stay_ignored(folder: Path) -> None:
    """A script has its commands in the background ignore Ctrl-C."""
    script = "import signal, sys; from kvtier.cli import main; main(); signal.raise_signal(signal.SIGINT)"
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", script, "--version"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_within_a_process_that_is_not_ours_interrupts_are_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main(["--version"]) == 0
    assert signal.getsignal(signal.SIGINT) is before


# -- output ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_line(name: str, buffered: bool, folder: Path) -> None:
    with open("/dev/full", "w") as full:
        command, env = [*KVTIER, *COMMANDS[name]], environment(buffered)
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=folder, env=env)
    assert done.stderr == "kvtier: output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_a_full_disk_ends_the_demo_in_one_line(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*KVTIER, "demo", "--quick"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=folder
        )
    assert done.stderr == "kvtier: output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_goes_away_is_told_nothing(name: str, folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*KVTIER, *COMMANDS[name]], stdout=writing, stderr=subprocess.PIPE, text=True, cwd=folder
    )
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == (0 if name == "replay" else 1)  # a stream ends where nobody reads on


@pytest.mark.parametrize("name", ["config", "replay"])
def test_without_an_output_there_is_none(name: str, folder: Path) -> None:
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *KVTIER, *COMMANDS[name]]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_an_error_that_cannot_be_said_is_still_one(where: str, folder: Path) -> None:
    shell = ["sh", "-c", f'exec "$@" {where}', "sh", *KVTIER, "config", "check", "nowhere.json"]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")


def test_characters_that_the_output_lacks_are_written_in_ascii(folder: Path) -> None:
    """A policy of another script, and a terminal that knows Latin only."""
    (folder / "пол.py").write_text("from kvtier.policies import LRUPolicy\n\n\nclass P(LRUPolicy): ...\n")
    (folder / "settings.json").write_text('{"cpu": {"capacity": 1, "policy": "пол:P"}}')
    command = [*KVTIER, "config", "check", "settings.json"]
    env = environment(True) | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, cwd=folder, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u043f\u043e\u043b:P" in done.stdout
