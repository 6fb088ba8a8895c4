# SPDX-License-Identifier: Apache-2.0
"""The artefacts of `make release`, for every test file that reads them: built once in a run.

They are the wheel, the source, the bundle and the Debian packages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

TREE = Path(__file__).parents[1]


# Of the environment of a build: what must not show in the files.
FOREIGN = {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "5"}


@contextlib.contextmanager
def foreign_mask() -> Iterator[None]:
    """Have another mask for the modes of new files within the context."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make(target: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `make` for *target*, with this interpreter."""
    return subprocess.run(
        _command(target, *options), cwd=TREE, env={**_environment(), **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def start(target: str, *, stderr: IO[str]) -> subprocess.Popen[str]:
    """Start `make` for *target* in a process group of its own, its errors to *stderr*."""
    return subprocess.Popen(
        _command(target), cwd=TREE, env=_environment(), stdin=subprocess.DEVNULL,
        stdout=stderr, stderr=stderr, text=True, start_new_session=True,
    )  # fmt: skip


def _command(target: str, *options: str) -> list[str]:
    return ["make", "--no-print-directory", target, f"PYTHON={sys.executable}", *options]


def _environment() -> dict[str, str]:
    """Return the environment without the options of an outer make."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


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
