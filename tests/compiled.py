# SPDX-License-Identifier: Apache-2.0
"""As a program: compile the tests once, for all workers and for the programs that tests start.

Without bytecode each worker rewrites the assertions of all modules, two thirds of a collection's
time, and a simulated host compiles its modules at each start. PYTHONDONTWRITEBYTECODE, which
continuous integration may set, prevents what the interpreters write, not what this writes.
"""

from __future__ import annotations

import compileall
import contextlib
import io
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


class OnlyModules:
    """A plugin with which a collection imports the modules and makes no tests."""

    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        """Return no tests for a name of a module."""
        return []


def main() -> None:
    """Write the bytecode of the modules, and that with the assertions as pytest rewrites them.

    A module that cannot be imported is left to the collection of the tests, which names it.
    """
    compileall.compile_dir(TESTS, quiet=2)
    sys.dont_write_bytecode = False
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider"], [OnlyModules()])


if __name__ == "__main__":
    main()
