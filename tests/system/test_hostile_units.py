# SPDX-License-Identifier: Apache-2.0
"""CDI-09: each line by which the refresh unit is confined counts, and without them it is seen.

That it is confined enough is in test_boot.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system("systemd-analyze"), pytest.mark.catalogue("CDI-09")]
UNIT = Path(__file__).parents[2] / "packaging" / "systemd" / "gpuruntime-cdi-refresh.service"
MAX_EXPOSURE = 1.5
# What is not for confinement.
NEEDED = ("Type", "ExecStart")


def exposure(work: Path, text: str) -> float:
    """Return how much systemd says that a unit of *text* may do, of 10."""
    unit = work / UNIT.name
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", unit],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert found, done.stderr
    return float(found[1])


def service(text: str) -> list[str]:
    """Return the lines of the service that could confine it."""
    body = text.partition("[Service]\n")[2].partition("[Install]")[0]
    return [line for line in body.splitlines() if "=" in line and not line.startswith("#")]


def test_control_a_unit_that_confines_nothing(tmp_path: Path) -> None:
    """The same program, as root with all that root may do."""
    lines = [line for line in service(UNIT.read_text()) if line.startswith(NEEDED)]
    weak = "\n".join(["[Service]", *lines, ""])
    assert exposure(tmp_path, weak) > 9


@pytest.mark.parametrize("word", ["CapabilityBoundingSet", "ProtectSystem", "SystemCallFilter"])
def test_control_a_line_that_is_taken_away_is_noticed(tmp_path: Path, word: str) -> None:
    """By the same number that is held below its limit."""
    text = UNIT.read_text()
    weak = "".join(line for line in text.splitlines(True) if not line.startswith(word))
    assert weak != text
    assert exposure(tmp_path, weak) > max(exposure(tmp_path, text), MAX_EXPOSURE - 0.2)
