# SPDX-License-Identifier: Apache-2.0
"""The artefacts of `make release`, for every test file that reads them: built once in a run.

They are the wheel, the source, the bundle and the Debian packages.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]


def make(target: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `make` for *target*, with this interpreter."""
    # Without the options of an outer make.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "--no-print-directory", target, f"PYTHON={sys.executable}", *options],
        cwd=TREE, env={**environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def build(place: Path, **environment: str) -> Path:
    """Make a release, copy its files to the new directory *place*, and return that."""
    done = make("release", **environment)
    assert done.returncode == 0, done.stderr
    return Path(shutil.copytree(TREE / "build" / "release", place))


def of_run(factory: pytest.TempPathFactory) -> Path:
    """Return the release of this run: the first worker that asks makes it, others wait for it."""
    top = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top = top.parent
    place = top / "release"
    with (top / "release.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            build(top / "release.new").rename(place)
    return place
