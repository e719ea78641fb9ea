"""What all tests share: a torch thread, instructions every machine has, a cache folder, a count of what was
skipped and why.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

# Failures in the kit and in what tests share then show the values, as those in tests do.
_FOLDERS = [f"tests.{path.name}" for path in Path(__file__).parent.iterdir() if path.is_dir()]
pytest.register_assert_rewrite("kvtier.testing", *_FOLDERS)
# The tests inside vLLM need its environment, and run there: `make test-vllm`. Without an origin, what was
# found is the folder of those tests.
_VLLM = importlib.util.find_spec("vllm")
collect_ignore = [] if _VLLM is not None and _VLLM.origin is not None else ["vllm"]
# Some virtual machines offer AMX and kill whoever uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# A background job ignores Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    import torch
except ImportError:  # the tests that need torch skip themselves
    pass
else:
    # Models are tiny, and threads that spin on a busy machine cost fifty times what they save.
    torch.set_num_threads(1)


try:
    from hypothesis import settings
except ImportError:  # vLLM's environment has none, and its tests need none
    pass
else:
    settings.register_profile("any machine", deadline=None)  # a busy one takes its time
    settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where digests of files are remembered, here and in processes that tests start. vLLM keeps its own
    cache.
    """
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = tmp_path_factory.mktemp("cache")
    os.environ |= {
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(users / "vllm")),
        "XDG_CACHE_HOME": str(folder),
    }
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print `skipped: N tests`, then each reason. A skip in continuous integration must not go unseen."""
    skips = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skips)
    terminalreporter.write_line(f"skipped: {len(skips)} tests")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} x {reason}")
