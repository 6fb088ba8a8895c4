# SPDX-License-Identifier: Apache-2.0
"""Wrong command lines of every program: exit status 2, and nothing on standard output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Each test starts a program.
pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
# Program → the program that it is a name of.
NAMES = {
    "gpuruntime": "gpuruntime",
    "nvidia-ctk": "gpuruntime",
    "nvidia-container-cli": "gpuruntime",
    "gpu-cdi-hook": "gpu-cdi-hook",
    "nvidia-cdi-hook": "gpu-cdi-hook",
    "gpu-container-runtime-hook": "gpu-cdi-hook",
    "nvidia-container-runtime-hook": "gpu-cdi-hook",
    "nvidia-container-toolkit": "gpu-cdi-hook",
}
# The exceptions, which are not here:
# - gpu-container-runtime and its other names: their command line is the low-level runtime's.
# - an unknown hook, or none: 0, because a spec of a newer version must not fail containers.
# - explain: 1 for a value that docker would refuse, because its report says so.
WRONG: tuple[tuple[str, str], ...] = (
    ("gpuruntime", "no-such"),
    ("gpuruntime", "--no-such"),
    ("gpuruntime", "config no-such"),
    ("gpuruntime", "config set"),
    ("gpuruntime", "config set no-such=1"),
    ("gpuruntime", "config set hook-deadline=9999"),
    ("gpuruntime", "cdi generate --format x"),
    ("gpuruntime", "cdi generate --mode x"),
    ("gpuruntime", "cdi generate --device-name-strategy x"),
    ("gpuruntime", "cdi generate --disable-hook x"),
    ("gpuruntime", "cdi generate --vendor 0"),
    ("gpuruntime", "cdi generate --csv.compat-container-root compat"),
    ("gpuruntime", "cdi list --spec-dir="),
    ("gpuruntime", "cdi refresh --output -"),
    ("gpuruntime", "cdi transform root --from a"),
    ("gpuruntime", "cdi transform root --relative-to x"),
    ("gpuruntime", "doctor --check x"),
    ("gpuruntime", "doctor --timeout 0"),
    ("gpuruntime", "driver list --capability x"),
    ("gpuruntime", "cdi generate --mode tegra"),
    ("gpuruntime", "cdi generate --max-spec-version 9"),
    ("gpuruntime", "runtime configure --runtime x"),
    ("gpuruntime", "runtime configure --runtime docker --runtime-name runc --dry-run"),
    ("gpuruntime", "runtime configure --runtime docker --drop-in-config /x --dry-run"),
    ("gpuruntime", "runtime configure --runtime containerd --config-source x --dry-run"),
    ("gpuruntime", "hook no-such"),
    ("gpuruntime", "hook create-symlinks --link x"),
    ("gpuruntime", "system create-device-nodes --no-such"),
    ("nvidia-ctk", "no-such"),
    ("nvidia-ctk", "config --set no-such=1"),
    ("nvidia-container-cli", "no-such"),
    ("nvidia-container-cli", "info --no-such"),
    ("gpu-cdi-hook", "create-symlinks --link x"),
    ("gpu-cdi-hook", "update-container --no-such"),
    ("gpu-cdi-hook", "--no-such update-container"),
    ("gpu-cdi-hook", "--deadline=0 noop"),
    ("nvidia-cdi-hook", "chmod --mode 9 --path /x"),
    ("gpu-container-runtime-hook", ""),
    ("gpu-container-runtime-hook", "no-such"),
    ("nvidia-container-runtime-hook", "-no-such prestart"),
    ("nvidia-container-toolkit", "--no-such"),
)


@pytest.mark.parametrize(("name", "words"), WRONG)
def test_wrong_usage_is_status_2(tmp_path: Path, name: str, words: str) -> None:
    """As with any other program."""
    program = tmp_path / name
    if NAMES[name] == "gpuruntime":
        program.symlink_to(BIN / NAMES[name])
    arguments = [str(program), *words.split()]
    done = subprocess.run(
        arguments,
        executable=None if program.exists() else BIN / NAMES[name],
        input="",
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr
    assert "Traceback" not in done.stderr
