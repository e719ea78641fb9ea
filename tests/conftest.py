"""What all tests share: one torch thread, instructions that every machine has, and a count of what was skipped and why."""

from __future__ import annotations

import os
from collections import Counter

import pytest

os.environ.setdefault(
    "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
)  # some virtual machines offer AMX and kill whoever uses it

try:
    import torch
except ImportError:  # the tests that need torch skip themselves
    pass
else:
    torch.set_num_threads(1)  # models are tiny, and threads that spin on a busy machine cost fifty times what they save


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print `skipped: N tests`, then each reason. A skip in continuous integration must not go unseen."""
    skips = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skips)
    terminalreporter.write_line(f"skipped: {len(skips)} tests")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} x {reason}")
