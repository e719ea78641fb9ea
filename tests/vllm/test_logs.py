"""kvtier's messages in vLLM's log: with vLLM's level and format, in every process, once."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.ports import free_ports
from tests.vllm.device import skip_without_devices

ROOT = Path(__file__).parents[2]
PROGRAM = """
import logging, sys
from tests.vllm.disks import PROBE, disk_tier, wait_open
from tests.vllm.engines import as_connector, make_llm, make_prompt
from pathlib import Path
from vllm import SamplingParams

def tell(worker):
    logging.getLogger("kvtier.worker").warning("a worker says %s", "this")

def explain(seed):
    params = SamplingParams(max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": PROBE})
    (done,) = llm.generate([{"prompt_token_ids": make_prompt(seed, 40)}], params, use_tqdm=False)
    return done.kv_transfer_params["kvtier"]

if __name__ == "__main__":
    logging.basicConfig(format="by the root: %(message)s")
    ranks = int(sys.argv[3])
    llm = make_llm(sys.argv[1], 24, as_connector(disk_tier(Path(sys.argv[2]))), tensor_parallel_size=ranks)
    wait_open(explain)
    llm.collective_rpc(tell)
    llm.llm_engine.engine_core.shutdown()
"""
LINE = r"^\(\w+ pid=\d+\) {level} \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] {text}$"
"""A line of vLLM's own format: the process, the level, the time and the place."""


def run(model: Path, folder: Path, ranks: int = 1, **environment: str) -> str:
    """Run an engine in processes of its own; return all that it writes."""
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_PORT": str(free_ports(16)[0]),
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))),
    }
    program = folder / "program.py"  # spawned processes import it
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(model), str(folder / "disk"), str(ranks)],
        env=env | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def lines(output: str, level: str, text: str) -> list[str]:
    return re.findall(LINE.format(level=level, text=text), output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_messages_have_time_level_and_name_in_every_process(llama: Path, tmp_path: Path, ranks: int) -> None:
    skip_without_devices(ranks)
    output = run(llama, tmp_path, ranks)
    opened = r"disk tier: \S+: open with 0 of [\d,]+ rows \(0 B of 6\d\.\d MiB\)"
    assert len(lines(output, "INFO", opened)) == 1, output[-4000:]
    assert len(lines(output, "WARNING", "a worker says this")) == ranks
    assert output.count("open with 0 of") == 1, "neither the root logger nor anybody else shows it again"
    assert output.count("a worker says this") == ranks


@pytest.fixture
def kvtier_logger() -> Iterator[logging.Logger]:
    """The logger `kvtier` as nobody has configured it; afterwards as it was."""
    logger = logging.getLogger("kvtier")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


def show(configure: bool = True, file: str | None = None) -> None:
    from kvtier.integrations.vllm.metrics import show_messages

    show_messages(SimpleNamespace(configure_logging=configure, pylogging_config_file=file))


def test_messages_go_to_the_handlers_that_vllm_has_at_the_time(
    kvtier_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm, root = logging.getLogger("vllm"), logging.getLogger().handlers[:]
    said: list[str] = []
    show()
    show()
    for name in ("old", "new"):
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, name=name: said.append(f"{name} {record.name} {record.getMessage()}")
        monkeypatch.setattr(vllm, "handlers", [handler])
        logging.getLogger("kvtier.tiers.io_tier").warning("%s", name)
        logging.getLogger("kvtier").info("not at vLLM's level")
    assert said == ["old kvtier.tiers.io_tier old", "new kvtier.tiers.io_tier new"]
    assert logging.getLogger().handlers == root
    assert kvtier_logger.level == vllm.getEffectiveLevel()


@pytest.mark.parametrize(("configure", "file"), [(False, None), (True, "/etc/logging.json")])
def test_users_who_configure_logging_are_left_alone(
    kvtier_logger: logging.Logger, configure: bool, file: str | None
) -> None:
    show(configure, file)
    assert (kvtier_logger.handlers, kvtier_logger.level, kvtier_logger.propagate) == ([], 0, True)


def test_a_handler_of_the_user_stays_the_only_one(kvtier_logger: logging.Logger) -> None:
    own = logging.NullHandler()
    kvtier_logger.addHandler(own)
    show()
    assert (kvtier_logger.handlers, kvtier_logger.level, kvtier_logger.propagate) == ([own], 0, True)


def test_a_user_who_has_silenced_it_hears_nothing(kvtier_logger: logging.Logger) -> None:
    kvtier_logger.propagate = False
    show()
    assert kvtier_logger.handlers == []


def test_a_level_of_the_user_stays(kvtier_logger: logging.Logger) -> None:
    kvtier_logger.setLevel(logging.ERROR)
    show()
    assert kvtier_logger.level == logging.ERROR
