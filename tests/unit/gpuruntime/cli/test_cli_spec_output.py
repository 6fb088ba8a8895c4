# SPDX-License-Identifier: Apache-2.0
"""Where a command writes a spec: directories that it makes or refuses, and what it advises."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import forked_cli
import pytest

# Each test starts the command line.
pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[4]
SPEC = {
    "cdiVersion": "0.5.0",
    "kind": "v.com/card",
    "devices": [{"name": "0", "containerEdits": {"env": ["A=b"]}}],
}
# What would take write access from the users of a directory such as /tmp.
DAMAGING = re.compile(r"chmod|chown|write access|mode 0?755")


def write(output: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Write SPEC to *output*; HOME and the like are of *environment*."""
    return forked_cli.run(
        *("cdi", "transform", "root", "--output", output),
        given=json.dumps(SPEC),
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("bits", [0o1777, 0o3775, 0o2755, 0o755])
def test_a_directory_where_others_cannot_replace_the_file_is_written_to(
    tmp_path: Path, bits: int
) -> None:
    """As `--output /tmp/x.yaml`; and its mode stays."""
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(bits)
    ran = write(directory / "x.yaml")
    assert (ran.returncode, ran.stderr) == (0, f'wrote "{directory}/x.yaml"\n')
    assert stat.S_IMODE(directory.stat().st_mode) == bits


@pytest.mark.parametrize("bits", [0o777, 0o2775, 0o775])
def test_where_others_can_replace_it_another_place_is_advised(tmp_path: Path, bits: int) -> None:
    """The directory may be the system's: its mode is not ours to change."""
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(bits)
    ran = write(directory / "x.yaml")
    assert ran.returncode == 1
    assert ran.stderr == (
        f'error: spec: cannot write "{directory}/x.yaml": "{directory}" (owner uid '
        f"{os.geteuid()}, mode {bits:04o}) lets other users replace files in it\n"
        'hint: name a file in a directory that only you can write to with "--output"\n'
    )
    assert not DAMAGING.search(ran.stderr.partition("hint: ")[2])
    assert os.listdir(directory) == []


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    """It is more likely a typing error than a wish."""
    ran = write(tmp_path / "ect" / "cdi" / "x.yaml")
    assert ran.returncode == 1
    assert ran.stderr == (
        f'error: spec: cannot write "{tmp_path}/ect/cdi/x.yaml": there is no directory '
        f'"{tmp_path}/ect/cdi"\n'
        'hint: make that directory, or name another file with "--output"\n'
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("source", ["environment", "config"])
def test_a_missing_spec_directory_is_made(tmp_path: Path, source: str) -> None:
    """Where consumers read specs, whoever says so; with what leads there, for anybody to read."""
    directory = tmp_path / "run" / "cdi"
    config = tmp_path / "config.toml"
    if source == "config":
        config.write_text(
            f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["/etc/cdi", "{directory}"]\n'
        )
        ran = write(directory / "x.yaml", GPURUNTIME_CONFIG=str(config))
    else:
        ran = write(directory / "x.yaml", GPURUNTIME_CDI_SPEC_DIRS=str(directory))
    assert (ran.returncode, ran.stderr) == (0, f'wrote "{directory}/x.yaml"\n')
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
