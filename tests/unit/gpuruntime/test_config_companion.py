# SPDX-License-Identifier: Apache-2.0
"""What `gpuruntime config compile` writes is what the launcher reads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).parents[3]
BIN = TREE / ".venv" / "bin"
# Its own /run, which goes away with the process.
OWN_RUN = (
    *("/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-euc"),
    'mount -t tmpfs -o mode=755 run /run; eval "$1"',
    "sh",
)
# The start path's interpreter is gone: who still answers is the launcher alone.
NO_PYTHON = "mount --bind /bin/false /usr/bin/python3"

pytestmark = pytest.mark.system


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run *script* with a /run of its own."""
    return subprocess.run(
        [*OWN_RUN, script],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environment},
    )


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    """Return a config file that names one recording runtime, which is there."""
    runtime = tmp_path / "low level runtime"
    runtime.write_text('#!/bin/sh\necho "runtime $*"\n')
    runtime.chmod(0o755)
    toml = tmp_path / "config.toml"
    toml.write_text(f'[nvidia-container-runtime]\nruntimes = ["no-such", "{runtime}"]\n')
    return toml


def test_the_launcher_believes_a_compiled_config(configured: Path) -> None:
    """Then a `state` goes straight to the configured runtime, without Python."""
    done = run(
        f"'{BIN}/gpuruntime' config compile; {NO_PYTHON}; '{BIN}/gpu-container-runtime' state one",
        GPURUNTIME_CONFIG=str(configured),
    )
    assert (done.returncode, done.stdout) == (0, "runtime state one\n"), done.stderr
    assert done.stderr == f'compiled "{configured}"\n'


@pytest.mark.parametrize("python", [True, False])
def test_a_changed_config_is_python_s_affair(configured: Path, python: bool) -> None:
    """The control: the launcher alone does not believe it; Python compiles it again."""
    done = run(
        f"'{BIN}/gpuruntime' config compile; echo '# changed' >> '{configured}'; "
        f"{':' if python else NO_PYTHON}; '{BIN}/gpu-container-runtime' state one",
        GPURUNTIME_CONFIG=str(configured),
    )
    assert done.stdout == ("runtime state one\n" if python else ""), done.stderr
    assert (done.returncode == 0) is python
