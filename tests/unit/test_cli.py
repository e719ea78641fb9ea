"""The command line: exit codes, one line for each kind of bad input, and nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.demo_kit import demo_result, with_wrong_token

import kvtier
from kvtier.cli import doctor, main
from kvtier.cli.display import ProgressDisplay, print_result
from kvtier.config import KVTierConfig
from kvtier.demo.summary import summarize
from kvtier.errors import IntegrityError, PoolError
from kvtier.integrations import VLLM_VERSIONS
from kvtier.machine import MemoryBound
from kvtier.rendezvous import locked

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from kvtier.cli import main; sys.exit(main(sys.argv[1:]))"
)


def kvtier_command(
    *arguments: str, cwd: Path, program: tuple[str, ...] = ("-m", "kvtier")
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run commands in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo end at once with a result."""
    monkeypatch.setattr("kvtier.cli.demo._prepare_engine", lambda policy: None)
    monkeypatch.setattr("kvtier.cli.demo._find_model", lambda console: None)
    monkeypatch.setattr("kvtier.cli.demo.run_demo", lambda settings, watcher: demo_result())


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    assert text.startswith("kvtier")
    return text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtier {kvtier.__version__}\n"


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--polcy", "lru"], "kvtier demo: No such option: --polcy"),
        (["demo", "--turns", "many"], "kvtier demo: Invalid value for '--turns'"),
        (["frobnicate"], "kvtier: No such command 'frobnicate'"),
        (
            ["demo", "--model"],
            "kvtier demo: Option '--model' requires an argument. It takes: A folder with config.json",
        ),
        (["index", "frobnicate"], "kvtier index: No such command 'frobnicate'"),
        (["config", "check"], "kvtier config check: Missing argument 'FILE'"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert one_line(capsys.readouterr().err).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--cpu-capacity", "12XB"],
            "--cpu-capacity: expected a size such as 8GiB, 500MB or a number of bytes, got '12XB'",
        ),
        (["--chunk-blocks", "0"], "--chunk-blocks: expected a whole number of at least 1, got 0"),
        (["--turns", "0"], "--turns: expected a whole number of at least 1, got 0"),
        (["--conversations", "-3"], "--conversations: expected a whole number of at least 1, got -3"),
        (["--concurrency", "0"], "--concurrency: expected a whole number of at least 1, got 0"),
        (["--block-size", "0"], "--block-size: expected a whole number of at least 1, got 0"),
        (["--seed", "-1"], "--seed: expected a whole number from 0 to 2**63 - 1, got -1"),
        (
            ["--report", "no/such/folder.html"],
            "--report: expected a file in a folder that exists, got 'no/such/folder.html'",
        ),
        (["--json", "."], "--json: expected a file, got the folder '.'; name a file in it"),
        (["--report", "/"], "--report: expected a file, got the folder '/'; name a file in it"),
    ],
)
def test_bad_input_is_refused_by_name(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert one_line(captured.err) == f"kvtier: {message}\n"
    assert captured.out == ""
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("group", ["config", "events", "index"])
def test_a_group_without_a_command_shows_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group]) == 0
    captured = capsys.readouterr()
    assert f"Usage: kvtier {group} " in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("option", ["--report", "--json"])
@pytest.mark.parametrize("path", ["/proc/page.html", "/dev/null/page.html", "loop", "x" * 300])
def test_a_place_that_cannot_be_written_is_found_before_the_run(
    option: str, path: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for root, whom no permission stops: the file that will be written is made, and taken away."""
    monkeypatch.setattr("kvtier.cli.demo._prepare_engine", lambda policy: pytest.fail("the run has begun"))
    (here / "loop").symlink_to("loop")
    assert main(["demo", option, path]) == 2
    assert one_line(capsys.readouterr().err).startswith(f"kvtier: {option}: expected a file ")
    assert [entry.name for entry in here.iterdir()] == ["loop"]


def test_as_a_process(tmp_path: Path) -> None:
    done = kvtier_command("demo", "--cpu-capacity", "12XB", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(done.stderr).startswith("kvtier: --cpu-capacity: ")
    assert list(tmp_path.iterdir()) == []


def test_without_torch_the_demo_says_what_to_install(tmp_path: Path) -> None:
    done = kvtier_command("demo", cwd=tmp_path, program=("-c", WITHOUT_TORCH))
    assert done.returncode == 2
    assert (
        one_line(done.stderr)
        == "kvtier: kvtier demo needs torch, which is missing: pip install torch safetensors\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PoolError("pool: needs 9 GiB"), "kvtier: pool: needs 9 GiB\n"),
        (IntegrityError("slot 3 is lost"), "kvtier: a bug in kvtier, please report it: slot 3 is lost\n"),
        (MemoryError("112 GiB"), "kvtier: not enough memory: 112 GiB\n"),
        (KeyboardInterrupt(), "kvtier: interrupted\n"),
    ],
)
def test_failures_are_one_line_and_leave_nothing(
    error: BaseException,
    message: str,
    here: Path,
    no_demo: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("kvtier.cli.demo.run_demo", fail)
    code = main(["demo", "--json", "result.json"])
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert one_line(capsys.readouterr().err) == message
    assert list(here.iterdir()) == []


def test_debug_shows_the_traceback(here: Path) -> None:
    with pytest.raises(kvtier.errors.ConfigError):
        main(["demo", "--debug", "--chunk-blocks", "0"])
    with pytest.raises(kvtier.errors.ConfigError):
        main(["--debug", "demo", "--chunk-blocks", "0"])


def test_the_demo_ends_in_a_table_a_report_and_json(
    here: Path, no_demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--json", "result.json", "--report", "page.html", "--seed", "5"]) == 0
    out = capsys.readouterr().out
    assert "8.75×" in out
    assert "✓ identical: all 72 generated tokens are the same in both runs" in out
    assert json.loads((here / "result.json").read_text())["identical"] is True
    assert "kvtier demo --json result.json --report page.html --seed 5" in (here / "page.html").read_text()
    assert sorted(path.name for path in here.iterdir()) == ["page.html", "result.json"]


def test_no_report_writes_none(here: Path, no_demo: None) -> None:
    assert main(["demo", "--no-report"]) == 0
    assert list(here.iterdir()) == []


def test_json_on_stdout_is_alone_there(
    here: Path, no_demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["requests"] == 24
    assert "identical" in captured.err


def test_a_difference_fails(
    here: Path, no_demo: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "kvtier.cli.demo.run_demo", lambda settings, watcher: with_wrong_token(demo_result())
    )
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out
    assert (
        "✗ tokens differ, first in conversation 4, turn 1, answer token 2: token 1 without kvtier, "
        "4242 with it" in out
    )
    assert "✗ tokens differ" in (here / "kvtier-report.html").read_text()


def test_a_file_that_cannot_be_written_is_said_in_one_line(
    here: Path, no_demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--no-report", "--json", "/proc/kvtier.json"]) in (1, 2)
    assert "/proc/kvtier.json" in one_line(capsys.readouterr().err)


def test_a_pipe_is_written_to_and_not_replaced(here: Path, no_demo: None) -> None:
    os.mkfifo("pipe")
    reader = subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE, text=True)
    assert main(["demo", "--no-report", "--json", "pipe"]) == 0
    assert json.loads(reader.communicate(timeout=60)[0])["identical"] is True
    assert (here / "pipe").is_fifo()


def test_a_link_keeps_leading_to_its_file(here: Path, no_demo: None) -> None:
    (here / "link.json").symlink_to("real.json")
    assert main(["demo", "--no-report", "--json", "link.json"]) == 0
    assert (here / "link.json").is_symlink()
    assert json.loads((here / "real.json").read_text())["identical"] is True


@pytest.mark.parametrize("columns", [20, 40, 60, 72, 80, 200])
def test_no_width_of_a_terminal_costs_a_column(columns: int) -> None:
    result = demo_result()
    console = Console(width=columns, file=StringIO(), highlight=False)
    print_result(console, result)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    shown = "".join(output.split())
    assert "…" not in output
    assert all(len(line) <= columns or "identical" in line for line in output.splitlines())
    for row in summarize(result):
        assert all("".join(cell.split()) in shown for cell in row)


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_no_width_costs_the_live_table_a_column(columns: int) -> None:
    console = Console(width=columns, file=StringIO(), highlight=False, force_terminal=True)
    display, result = ProgressDisplay(console), demo_result()
    for name, run in (("off", result.off), ("on", result.on)):
        display.begin(name, len(run.requests))
        for request in run.requests:
            display.advance(name, request)
        display.end(name, run)
    with console.capture() as capture:
        console.print(display._render())
    shown = "".join(capture.get().split())
    assert "…" not in shown
    assert all(
        value in shown for value in ("24/24", "4,608", "12,384", "16,992", "700ms", "80.0ms", "40s", "16s")
    )


# -- config ----------------------------------------------------------------------------------------


def test_config_check_prints_what_was_understood(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "c.toml").write_text(
        'load_deadline = "500ms"\n[cpu]\ncapacity = "8Gi"\npolicy = "arc"\n[shares]\nlimit=0.5'
    )
    assert main(["config", "check", "c.toml"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["cpu.capacity"].strip() == "8.0 GiB, 8,589,934,592 bytes"
    assert lines["cpu.policy"].strip() == "arc"
    assert lines["load_deadline"].strip() == "0.5 s"
    assert lines["store_deadline"].strip() == "30 s (default)"
    assert lines["prompt_only"].strip() == "false (default)"
    assert lines["longest_keep"].strip() == "3600 s (default)"
    assert lines["shares.limit"].strip() == "0.5"


def test_config_check_prints_a_line_for_each_setting_of_a_tier(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It printed `(DiskConfig(path=...),)`, cut into lines of a terminal's width."""
    monkeypatch.setenv("COLUMNS", "80")
    path = "/mnt" + "/a-long-name" * 10
    tiers = [
        {"disk": {"path": path, "capacity": "10GiB"}},
        {"valkey": {"url": "valkey://user@host:6379/2", "ttl": "1h"}},
        {"object": {"url": "s3://bucket/prefix"}},
        {"mooncake": {"master": "host:50051", "metadata": "http://host:8080/metadata"}},
    ]
    (here / "c.json").write_text(json.dumps({"cpu": {"capacity": "1GiB"}, "tiers": tiers}))
    assert main(["config", "check", "c.json"]) == 0
    out = capsys.readouterr().out
    assert "Config(" not in out
    assert "None" not in out
    lines = dict(line.split(None, 1) for line in out.splitlines())
    assert lines["tiers[0].disk.path"] == path
    assert lines["tiers[0].disk.capacity"] == "10.0 GiB, 10,737,418,240 bytes"
    assert lines["tiers[0].disk.write_limit"] == "40.0 GiB, 42,949,672,960 bytes (default)"
    assert lines["tiers[1].valkey.url"] == "valkey://user@host:6379/2"
    assert lines["tiers[1].valkey.ttl"] == "3600 s"
    assert lines["tiers[2].object.allow_http"] == "false (default)"
    assert lines["tiers[3].mooncake.segment"].startswith("0: none of this process's memory")


def test_config_check_says_that_a_policy_is_only_in_this_folder(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vllm serve` does not look for modules in its current folder."""
    code = "from kvtier.policies import LRUPolicy\nclass Class(LRUPolicy): pass"
    (here / "only_here.py").write_text(code)
    (here / "c.json").write_text('{"cpu": {"capacity": 1, "policy": "only_here:Class"}}')
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(here))])
    monkeypatch.delitem(sys.modules, "only_here", raising=False)
    assert main(["config", "check", "c.json"]) == 0
    said = capsys.readouterr()
    assert "cpu.policy                 only_here:Class" in said.out
    assert f"PYTHONPATH={here}" in one_line(said.err)
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])
    assert main(["config", "check", "c.json"]) == 0
    assert capsys.readouterr().err == ""


def test_config_check_reads_what_vllm_takes_and_writes_what_we_read(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = {"cpu_bytes_to_use": 10**9, "offload_prompt_only": True}
    names = {"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.integrations.vllm"}
    (here / "c.json").write_text(
        json.dumps(names | {"kv_role": "kv_both", "kv_connector_extra_config": inner})
    )
    assert main(["config", "check", "c.json", "--json"]) == 0
    assert KVTierConfig.from_dict(json.loads(capsys.readouterr().out)) == KVTierConfig.from_dict(inner)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"capacity": "8GiB"}', "capacity: no such setting; did you mean cpu.capacity?"),
        (
            '{"cpu": {"capacity": 8.5}}',
            "cpu.capacity: expected a whole number of bytes, or a unit as in 8.5GiB, got 8.5",
        ),
        (
            '{"cpu": {"capacity": 1}, "tiers": [{"disk": {"path": "/x", "capacity": 1, "policy": "nope"}}]}',
            "tiers[0].disk.policy: expected one of arc, gittins, lru or 'package.module:Class'",
        ),
        (
            '{"cpu": {"capacity": 1, "policy": "lruu"}}',
            "cpu.policy: expected one of arc, gittins, lru or 'package.module:Class'",
        ),
        ("{", "expected JSON: "),
    ],
)
def test_config_check_says_in_one_line_what_is_wrong(
    text: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "c.json").write_text(text)
    assert main(["config", "check", "c.json"]) == 2
    captured = capsys.readouterr()
    assert one_line(captured.err).startswith(f"kvtier: c.json: {message}")
    assert captured.out == ""


BAD_POLICIES = {
    "syntax error(": "SyntaxError",
    "raise SystemExit(3)": "SystemExit: 3",
    "import x.y": "ModuleNotFoundError",
    "raise RuntimeError('two\\nlines')": "RuntimeError: two lines",
    "def __getattr__(name): raise OSError('no')": "OSError: no",
    "Class = 5": "expected a subclass of kvtier.policies.CachePolicy",
    "import kvtier.policies as p\nclass Class(p.CachePolicy): pass": "TypeError",
    "import kvtier.policies as p\nclass Class(p.LRUPolicy):\n def __init__(self, capacity): exit(1)": (
        "SystemExit: 1"
    ),
}


@pytest.mark.parametrize("code", BAD_POLICIES)
def test_a_policy_that_fails_is_one_line(code: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "c.json").write_text('{"cpu": {"capacity": 1, "policy": "mine:Class"}}')
    done = kvtier_command("config", "check", "c.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(done.stderr).startswith("kvtier: c.json: cpu.policy: expected ")
    assert "'mine:Class'" in done.stderr
    assert BAD_POLICIES[code] in done.stderr


@pytest.mark.parametrize("path", ["..x:y", ":", ":y", "os:", "\\u0000:y", "a:b:c", "os:path.join"])
def test_a_policy_that_has_no_import_path_is_one_line(
    path: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "c.json").write_text(f'{{"cpu": {{"capacity": 1, "policy": "{path}"}}}}')
    assert main(["config", "check", "c.json"]) == 2
    assert "cpu.policy: expected " in one_line(capsys.readouterr().err)


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_works_without_torch(tmp_path: Path) -> None:
    done = kvtier_command("doctor", "--json", cwd=tmp_path, program=("-c", WITHOUT_TORCH))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    by_name = {check["name"]: check for check in found["checks"]}
    assert found["usable"] is True
    assert found["kvtier_version"] == kvtier.__version__
    assert by_name["torch"]["status"] == "missing"
    assert by_name["torch"]["hint"] == "in a checkout: pip install '.[engine]'"
    assert by_name["packages"]["status"] == "ok"


def test_doctor_prints_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("python", "packages", "torch", "vllm", "memory", "shared pools"):
        assert name in out
    assert "kvtier can run here." in out


def test_doctor_fails_if_a_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor._version_of
    monkeypatch.setattr(
        doctor, "_version_of", lambda package: None if package == "xxhash" else found(package)
    )
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] is False
    assert [check for check in report["checks"] if check["status"] == "fail"] == [
        {"name": "packages", "status": "fail", "detail": "missing: xxhash", "hint": "pip install xxhash"}
    ]


@pytest.mark.parametrize(("installed", "status"), [("0.31.0", "ok"), ("0.33.1", "ok"), ("0.30.2", "warn")])
def test_doctor_knows_which_vllm_fits(installed: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda package: installed if package == "vllm" else None)
    check = doctor._check_vllm()
    assert check.status.value == status
    assert installed in check.detail
    assert status == "ok" or check.hint == f'pip install "vllm{VLLM_VERSIONS}"'


def test_doctor_finds_pools_that_nobody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "default_directory", lambda: tmp_path)
    left, held = tmp_path / "kvtier-left.pool", tmp_path / "kvtier-held.pool"
    left.touch()
    held.touch()
    with held.open() as party:
        fcntl.flock(party, fcntl.LOCK_SH)
        found = doctor._check_leftovers()
        assert found == doctor.Check(
            "shared pools", doctor.Status.WARN, f"1 left behind in {tmp_path}", f"rm {left}"
        )
        left.unlink()
        assert doctor._check_leftovers().detail == f"1 starting up, none left behind in {tmp_path}"
    assert held.exists()
    with locked(tmp_path):
        assert "locked by another process" in doctor._check_leftovers().detail


@pytest.mark.parametrize(
    "name", [b"a $(touch PWNED); x", b"it's", b"\x1b[2Jx\nrm -rf ~\r", b"\xff\x7f'\\", "ü".encode()]
)
def test_doctor_tells_nobody_to_run_what_a_file_is_called(
    name: bytes, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anybody may have made it: names were pasted into a command line as they are."""
    folder = here / "shm"
    folder.mkdir()
    left = Path(os.fsdecode(os.fsencode(folder) + b"/kvtier-" + name + b".pool"))
    left.touch()
    monkeypatch.setattr(doctor, "default_directory", lambda: folder)
    hint = doctor._check_leftovers().hint
    assert hint.isprintable()
    main(["doctor"])
    assert set("\x1b\r\x7f").isdisjoint(capsys.readouterr().out)
    subprocess.run(["bash", "-c", hint], check=True, timeout=60)
    assert not left.exists()
    assert [entry.name for entry in here.iterdir()] == ["shm"]


def test_doctor_says_what_bounds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as what a pool goes by: a control group that is nearly full is not hidden by its limit."""
    monkeypatch.setattr(
        doctor, "free_memory", lambda: MemoryBound(100 << 20, "is left of the 8.0 GiB that ...")
    )
    found = doctor._check_memory()
    assert (found.status, found.detail) == (doctor.Status.WARN, "100.0 MiB is left of the 8.0 GiB that ...")
    monkeypatch.setattr(doctor, "free_memory", lambda: None)
    assert doctor._check_memory().detail == "this system does not say how much is available"


def test_doctor_reports_the_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    unset = doctor._check_seed()
    assert "nothing with xxhash" in unset.detail
    assert unset.hint.endswith("export PYTHONHASHSEED=0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert doctor._check_seed().hint == ""
