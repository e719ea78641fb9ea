"""The compiled loops, and the one switch between their two forms.

Every loop is written twice: in C in this folder, and in Python in the module that calls it. The Python form
is the specification; a test compares the two.

    loop    in C       in Python                                              compared in tests/unit by
    chain   _chain.c   kvtier.keys: _chain_python                             test_keys.py
    slots   _slots.c   kvtier.policies.slots: PythonBook and its neighbours   test_slots.py
    packing _packing.c kvtier.packing: pack_python and unpack_python          test_packing.py
    pages   _pages.c   kvtier.transfer.host: store_pages_python and its twin  test_pages.py
    cuda    _cuda.c    kvtier.transfer.cuda.commands: PythonSubmitter         test_cuda_commands.py

C is used where it was compiled, unless the environment has `KVTIER_NATIVE=python`. The choice is made once,
when the module that calls a loop is imported; results are the same either way. Any thread may call this.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module

from kvtier.errors import ConfigError

__all__ = ["LOOPS", "VARIABLE", "form_of", "is_asked_for", "is_compiled", "uses_c"]

LOOPS = ("chain", "cuda", "packing", "pages", "slots")
VARIABLE = "KVTIER_NATIVE"
"""The environment variable: `c`, which is the default, or `python`."""


def is_asked_for() -> bool:
    """Return whether the environment allows the use of compiled loops."""
    value = os.environ.get(VARIABLE) or "c"
    if value not in ("c", "python"):
        raise ConfigError(VARIABLE, f"expected c or python, got {value!r}")
    return value == "c"


@cache
def is_compiled(loop: str) -> bool:
    """Return whether a loop was compiled for this Python and this machine."""
    try:
        import_module(f"kvtier.native._{loop}")
    except ImportError:
        return False
    return True


def uses_c(loop: str) -> bool:
    """Return whether the C form of a loop is used."""
    return is_asked_for() and is_compiled(loop)


def form_of(loop: str) -> str:
    """Return the form of a loop that is used: `c` or `python`."""
    return "c" if uses_c(loop) else "python"
