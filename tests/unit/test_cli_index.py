"""`kvtier index serve`: it follows, answers, and ends when told to."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tests.unit.server_kit import IndexServer

from kvtier.cli import main
from kvtier.errors import InputError
from kvtier.events import BlockStored, KVEventBatch
from kvtier.events.config import KVEventsConfig
from kvtier.events.publisher import ZmqEventPublisher

TOKENS = list(range(8))
PATIENCE = 60.0


def ask(url: str, body: dict[str, Any]) -> Any:
    with urlopen(Request(url, json.dumps(body).encode()), timeout=PATIENCE) as reply:
        return json.loads(reply.read())


def url_of(process: subprocess.Popen[str]) -> str:
    """Wait until a server says its address. One that starts slowly says so first."""
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    return next(line for line in lines if line.startswith("serving on ")).split()[-1]


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "kvtier", "index", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        yield url_of(process)
        process.terminate()
        assert process.wait(PATIENCE) == 0


def status_of(url: str, body: bytes | None = None, **headers: str) -> int:
    try:
        with urlopen(Request(url, body, headers), timeout=PATIENCE) as reply:
            return int(reply.status)
    except HTTPError as error:
        return error.code


def test_only_clients_with_the_token_change_registrations(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a token of some length\n")
    file.chmod(0o600)
    body = json.dumps({"instance_id": 1, "model_name": "m", "endpoint": f"ipc://{tmp_path}/s"}).encode()
    json_type = {"Content-Type": "application/json"}
    with serving("--token-file", str(file), "--allow-ipc", "--allow-host", "index.svc") as url:
        assert status_of(f"{url}/register", body, **json_type) == 401
        given = json_type | {"Authorization": "Bearer a token of some length"}
        assert status_of(f"{url}/register", body, **given, Host="index.svc:8090") == 201
        assert status_of(f"{url}/workers", Host="other.svc") == 403


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start servers as on a machine that has compiled nothing yet."""
    pytest.importorskip("numba", reason="without numba there is nothing to compile")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("KVTIER_INDEX", raising=False)


@pytest.mark.usefixtures("cold")
def test_a_cold_server_is_compiled_when_it_first_answers() -> None:
    body = b'{"instance_id": 1, "model_name": "m", "endpoint": "tcp://127.0.0.1:1", "block_size": 4}'
    with serving() as url:
        assert status_of(f"{url}/register", body, **{"Content-Type": "application/json"}) == 201
        assert ask(f"{url}/query", {"model_name": "m", "token_ids": TOKENS})["instances"] == {}
        with urlopen(f"{url}/metrics", timeout=PATIENCE) as reply:
            lines = reply.read().decode().splitlines()
        assert [line[-1] for line in lines if line.startswith("kvtier_index_compiled{")] == ["1"]


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_still_compiles(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "kvtier", "index", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("not ready yet")
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_who_holds_a_prompt_until_a_signal_ends_it(number: signal.Signals) -> None:
    publisher = ZmqEventPublisher(
        0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=KVEventsConfig(heartbeat_interval=0.05)
    )
    publisher.publish(KVEventBatch(1.0, [BlockStored([5, 6], None, TOKENS, 4, None, "GPU", None)], 0))
    follow = f"worker-7={publisher.endpoint},{publisher.replay_endpoint}"
    command = [sys.executable, "-m", "kvtier", "index", "serve", "--port", "0", "--follow", follow]
    with subprocess.Popen([*command, "--model-name", "m"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = url_of(process)
        deadline = time.monotonic() + PATIENCE
        while (
            "worker-7"
            not in (answer := ask(f"{url}/query", {"model_name": "m", "token_ids": TOKENS}))["instances"]
        ):
            assert time.monotonic() < deadline, answer
        assert answer["instances"]["worker-7"]["gpu"] == 8
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == ""
    publisher.shutdown()


def test_log_lines_have_time_level_and_name() -> None:
    """A server's warnings came bare, as Python writes them where nobody has configured logging."""
    publisher = ZmqEventPublisher(
        0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=KVEventsConfig(heartbeat_interval=0.05)
    )
    publisher.publish(KVEventBatch(1.0, [BlockStored([5, 6], None, TOKENS, 4, None, "GPU", None)], 0))
    follow = f"worker-7={publisher.endpoint},{publisher.replay_endpoint}"
    command = [sys.executable, "-m", "kvtier", "index", "serve", "--port", "0", "--follow", follow]
    with subprocess.Popen([*command, "--block-size", "16"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url_of(process)
        line = process.stderr.readline()
        process.terminate()
        assert process.wait(PATIENCE) == 0
    publisher.shutdown()
    form = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING kvtier\.index\.prefix: the index is missing .*\n"
    assert re.fullmatch(form, line), line


WRONG = {
    "--follow here": "--follow: expected ID[:RANK]=ENDPOINT[,REPLAY], got 'here'",
    "--follow 1=localhost:5557": "--follow: expected an address such as tcp://127.0.0.1:5557",
    "--follow 1=tcp://h:1 --follow 1=tcp://h:2": "instance 1 dp_rank 0 already registered",
    "--budget lots": "--budget: expected a size such as 8GiB",
    "--budget 0": "--budget: expected at least 4.0 MiB, got '0'",
    "--budget 1": "--budget: expected at least 4.0 MiB, got '1'",
    "--budget 9999999EiB": "--budget: expected a size below",
    "--follow 1=tcp://h:99999": "--follow: expected an address such as tcp://127.0.0.1:5557",
    "--keys md5": "Invalid value for '--keys'",
    "--port 70000": "Invalid value for '--port'",
    "--block-size 0": "Invalid value for '--block-size'",
    "--block-size 1048577": "Invalid value for '--block-size'",
    "--token-file /none": "/none: cannot read the token: No such file or directory",
    "--token-file /etc/passwd": "only its owner can read, got mode 0644: chmod 600 /etc/passwd",
    "--curve-key k": "--curve-key and --curve-server: expected both or none",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_bad_input_is_one_line(
    arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_INDEX", "python")  # a busy machine that compiles says that it is not ready
    assert main(["index", "serve", "--port", "0", *arguments.split()]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert WRONG[arguments] in errors


def test_an_empty_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It listened on every address of the machine, as a variable that is not set would have it: `--host
    "$HOST"`.
    """
    assert main(["index", "serve", "--port", "0", "--host", ""]) == 2
    assert "host: expected an address such as 127.0.0.1" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"or 0\.0\.0\.0 for all of the machine's, got ''"), IndexServer(""):
        pass


def test_an_address_that_is_not_ours_is_the_worlds_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "serve", "--host", "192.0.2.1"]) == 1
    assert "cannot listen on 192.0.2.1 port 8090" in capsys.readouterr().err
