# SPDX-License-Identifier: Apache-2.0
"""Where the hook programs are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuruntime.config import Config
from gpuruntime.errors import ConfigError
from gpuruntime.plan import hook_programs

CONFIG = Config({}, None)
LAUNCHER = "gpu-container-runtime"


def program(place: Path, name: str) -> Path:
    """Make a program."""
    place.mkdir(exist_ok=True)
    path = place / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no program in the directories that are looked at whatever PATH says."""
    monkeypatch.setattr(hook_programs, "STANDARD_PATH", ("/nonexistent",))


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("name", [hook_programs.HOOK, hook_programs.PRESTART_HOOK])
@pytest.mark.parametrize("path", ["bin:.", ".", "", ":", "bin", "./bin", "../{}/bin", None])
def test_what_is_beside_the_caller_s_directory_is_no_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None, name: str
) -> None:
    """It may be a bundle's: what is written to config.json runs as root of the host."""
    program(tmp_path, name)
    program(tmp_path / "bin", name)
    monkeypatch.chdir(tmp_path)
    where = path and path.format(tmp_path.name)
    with pytest.raises(ConfigError, match="neither beside"):
        hook_programs.find(name, CONFIG, LAUNCHER, where)
    # Control: the same directory by its absolute path.
    found = hook_programs.find(name, CONFIG, LAUNCHER, f"{where}:{tmp_path}/bin")
    assert found == f"{tmp_path}/bin/{name}"


@pytest.mark.usefixtures("nowhere")
def test_what_is_beside_the_launcher_goes_first(tmp_path: Path) -> None:
    """One installation has its own."""
    beside = program(tmp_path / "own", hook_programs.HOOK)
    program(tmp_path / "bin", hook_programs.HOOK)
    launcher = f"{tmp_path}/own/{LAUNCHER}"
    assert hook_programs.find(hook_programs.HOOK, CONFIG, launcher, f"{tmp_path}/bin") == str(
        beside
    )
