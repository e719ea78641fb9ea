"""`kvtier demo`: the demonstration on a terminal. Everything is checked before the first token is computed.

With `--json -` only the JSON goes to stdout and all text for people to stderr. Files are written at the
end, whole or not at all.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from kvtier.cli.display import ProgressDisplay, print_result
from kvtier.cli.streams import interruptible
from kvtier.config import DEFAULT_POLICY, KVTierConfig
from kvtier.demo.model import cached_model
from kvtier.demo.result import DemoResult
from kvtier.demo.runs import run_demo
from kvtier.demo.setup import DEMO_MODEL, QUICK_MODEL, DemoSettings, Workload
from kvtier.demo.talk import Talk, open_talk
from kvtier.errors import ConfigError, InputError, OutsideError
from kvtier.report import render_report

_FAMILIES = "Llama, Qwen2, Qwen3, Mistral or Ministral"
_QUICK: dict[str, int] = {
    "conversations": 8,
    "turns": 3,
    "system": 64,
    "opening": 384,
    "message": 16,
    "answer": 6,
}

_OPTIONS = {
    "cpu.capacity": "--cpu-capacity",
    "cpu.policy": "--policy",
    "blocks_per_chunk": "--chunk-blocks",
    "num_blocks": "--gpu-blocks",
    "block_size": "--block-size",
    "group.block_size": "--block-size",
    "dtype": "--dtype",
    "compute_dtype": "--compute-dtype",
    "device": "--device",
    "conversations": "--conversations",
    "turns": "--turns",
    "seed": "--seed",
    "concurrency": "--concurrency",
    "max_num_seqs": "--concurrency",
}
"""The option that sets each field, so that an error names the option that was typed."""

_Model = Annotated[
    Path | None,
    Option(
        metavar="FOLDER",
        help=f"A folder with config.json and *.safetensors of a {_FAMILIES} model, "
        "as `hf download Qwen/Qwen3-0.6B --local-dir FOLDER` makes it.",
        show_default="SmolLM2-135M-Instruct",
    ),
]
_Random = Annotated[bool, Option("--random", help="Random tokens and, without --model, random weights.")]
_Device = Annotated[str, Option(help="cpu or cuda.")]
_Dtype = Annotated[str, Option(help="Of weights and KV: float32, float16 or bfloat16.")]
_Compute = Annotated[
    str | None,
    Option(
        help="Of activations. With float64, rounding does not depend on the batch.",
        show_default="float32 for words, float64 for random tokens",
    ),
]
_Capacity = Annotated[str, Option(metavar="SIZE", help="Host memory for KV.")]
_Policy = Annotated[str, Option(help="Who leaves a full tier: lru, arc, gittins or package.module:Class.")]
_Chunk = Annotated[int, Option(metavar="N", help="Blocks that are stored and loaded as one.")]
_Block = Annotated[int, Option(metavar="N", help="Tokens of a block.")]
_Blocks = Annotated[
    int | None, Option(metavar="N", help="Blocks of the engine's cache.", show_default="too few for all")
]
_People = Annotated[
    int | None, Option(metavar="N", help="How many people talk.", show_default="4, or 10 at random")
]
_Turns = Annotated[
    int | None, Option(metavar="N", help="How often each of them asks.", show_default="3, or 4 at random")
]
_AtOnce = Annotated[
    int | None, Option(metavar="N", help="How many of them wait at once.", show_default="1, or 2 at random")
]
_Seed = Annotated[int, Option(help="Of the tokens, the order of asking and the built-in weights.")]
_Json = Annotated[
    str | None, Option("--json", metavar="FILE|-", help="Also write the result as JSON; - is stdout.")
]
_Report = Annotated[Path, Option(metavar="FILE", help="Where the HTML report goes.")]
_DiskFolder = Annotated[
    Path | None,
    Option(
        metavar="FOLDER",
        help="Where the run over a disk keeps its files, a while.",
        show_default="temporary files",
    ),
]
_NoDisk = Annotated[bool, Option("--no-disk", help="Leave out the run over a disk.")]
_NoReport = Annotated[bool, Option("--no-report", help="Write no report.")]
_Quick = Annotated[bool, Option("--quick", help="A tiny model and short conversations: a few seconds.")]
_Debug = Annotated[bool, Option("--debug", help="Show tracebacks of errors.")]


def demo_command(
    context: typer.Context,
    model: _Model = None,
    random: _Random = False,
    device: _Device = "cpu",
    dtype: _Dtype = "float32",
    compute_dtype: _Compute = None,
    cpu_capacity: _Capacity = "512MiB",
    policy: _Policy = DEFAULT_POLICY,
    chunk_blocks: _Chunk = 1,
    block_size: _Block = 16,
    gpu_blocks: _Blocks = None,
    conversations: _People = None,
    turns: _Turns = None,
    concurrency: _AtOnce = None,
    seed: _Seed = 0,
    disk_folder: _DiskFolder = None,
    no_disk: _NoDisk = False,
    json_file: _Json = None,
    report: _Report = Path("kvtier-report.html"),
    no_report: _NoReport = False,
    quick: _Quick = False,
    debug: _Debug = False,
) -> None:
    """Run conversations over a GPU cache too small for them, without and with kvtier, and compare.

    Then an engine over a disk is killed and started again. Exits with 1 if any token differs.
    """
    try:
        asked = {"conversations": conversations, "turns": turns}
        shape = (_QUICK if quick else {}) | {
            name: value for name, value in asked.items() if value is not None
        }
        settings = DemoSettings(
            kvtier=KVTierConfig.from_dict(
                {"cpu": {"capacity": cpu_capacity, "policy": policy}, "blocks_per_chunk": chunk_blocks}
            ),
            model=model or (QUICK_MODEL if quick else DEMO_MODEL),
            workload=Workload(**shape, seed=seed),
            concurrency=2 if concurrency is None else concurrency,
            block_size=block_size,
            gpu_blocks=gpu_blocks,
            device=device,
            dtype=dtype,
            compute_dtype=compute_dtype or "float64",
            disk_folder=None if no_disk else _expect_folder(disk_folder or Path(tempfile.gettempdir())),
        )
        page = None if no_report else report
        expect_writable("--report", page)
        expect_writable("--json", None if json_file in (None, "-") else Path(str(json_file)))
        _prepare_engine(policy)
        console = Console(stderr=json_file == "-", highlight=False)
        if not (random or quick) and (folder := model or _find_model(console)) is not None:
            talk = open_talk(folder, conversations, turns, seed)
            settings = replace(settings, model=folder)
            if talk is not None:
                compute, at_once = compute_dtype or "float32", concurrency or 1
                settings = replace(settings, workload=talk, compute_dtype=compute, concurrency=at_once)
        identical = _run(settings, console, ["kvtier", *(context.obj or ["demo"])], json_file, page)
    except ConfigError as error:
        _name_option(error)
        raise
    raise typer.Exit(0 if identical else 1)


def _find_model(console: Console) -> Path | None:
    """Return the folder of the demo's own model, or say in one line why there is none."""
    try:
        return cached_model(lambda text: console.print(f"note: {text}", style="dim", soft_wrap=True))
    except OutsideError as error:
        console.print(f"note: random weights, so no words: {error}", style="yellow", soft_wrap=True)
        return None


def _run(
    settings: DemoSettings, console: Console, command: list[str], json_file: str | None, report: Path | None
) -> bool:
    """Run the demo, show it, write the requested files, and return whether all tokens are the same."""
    talk = settings.workload if isinstance(settings.workload, Talk) else None
    with interruptible():
        with ProgressDisplay(console, talk) as display:
            result = run_demo(settings, display)
        print_result(console, result)
        if report is not None:
            write_whole(report, render_report(result, command=command))
            console.print(f"report: {report}", soft_wrap=True)
        if json_file is not None:
            _write_json(json_file, result)
    return result.identical


def _expect_folder(path: Path) -> Path:
    if not path.is_dir():
        raise InputError(f"--disk-folder: expected a folder that exists, got {str(path)!r}")
    return path


def expect_writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before any work is lost.

    Tries the later temporary file beside it.
    """
    if path is None:
        return
    try:
        target = path.resolve()
        if target.is_dir():
            raise InputError(f"{option}: expected a file, got the folder {str(path)!r}; name a file in it")
        if not target.parent.is_dir():
            raise InputError(f"{option}: expected a file in a folder that exists, got {str(path)!r}")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError("it may not be written")
        if not target.exists() or target.is_file():
            _partial(target).touch()
            _partial(target).unlink()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{option}: expected a file that can be written, got {str(path)!r} ({reason})"
        ) from None


def find_policies_here(names: Iterable[str]) -> None:
    """Let import paths among these names begin in the current folder, as with `python -m`."""
    if any(":" in name for name in names) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _prepare_engine(policy: str) -> None:
    """Import the engine, or say what to install."""
    # Else the threads of a parallel loop spin while they wait for each other. If other processes need the
    # cores too, every small step is then several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    find_policies_here([policy])
    try:
        import kvtier.engine  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise InputError(
            f"kvtier demo needs {error.name}, which is missing: pip install torch safetensors"
        ) from None


def _name_option(error: ConfigError) -> None:
    """Name the option that was typed instead of the field that it sets."""
    option = _OPTIONS.get(error.path)
    if option is not None:
        error.args = (option + str(error).removeprefix(error.path),)


def _write_json(file: str, result: DemoResult) -> None:
    text = json.dumps(result.to_dict(), indent=2) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        write_whole(Path(file), text)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees half of it.

    A target that is not a regular file, e.g. a pipe, is written directly.
    """
    target = path.resolve()
    partial = _partial(target)
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(target)
    except OSError as error:
        raise OutsideError(f"{path}: expected a file that can be written: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")
