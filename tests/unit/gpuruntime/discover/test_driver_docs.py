# SPDX-License-Identifier: Apache-2.0
"""docs/reference/driver-files.md is what its command prints, and tells of every file."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from simhost import fetch_driver

TREE = Path(__file__).parents[4]
PAGE = TREE / "docs" / "reference" / "driver-files.md"
ROOTS = TREE / "build" / "driver-root"
BRANCHES = ("535", "550")


def test_the_page_is_what_its_command_prints() -> None:
    """A change of the table, or of what is found, shows itself in review."""
    if platform.machine() != "x86_64":
        pytest.skip(f"the page is of x86-64, and this is {platform.machine()}")
    for branch in BRANCHES:
        if not (ROOTS / branch).is_dir():
            pytest.skip(
                f'build/driver-root/{branch} is not there: run "make driver-root VERSION={branch}"'
            )
        version = fetch_driver.driver_version(ROOTS / branch)
        if version not in PAGE.read_text():
            pytest.skip(
                f"build/driver-root/{branch} is driver {version}, which the page is not of: "
                f'run "scripts/driver_files.py > docs/reference/driver-files.md"'
            )
    program = TREE / "scripts" / "driver_files.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text()


def test_every_row_says_what_for_whom_and_why() -> None:
    """File by file: injected or not, for which capability, why."""
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 100
    for name, rest in rows:
        *whats, capability, why = rest.split(" | ")
        assert len(whats) == len(BRANCHES), name
        assert set(whats) <= {"yes", "link", "no", "-"}, name
        assert bool(capability.strip()) == bool({"yes", "link"} & set(whats)), name
        assert why, name
