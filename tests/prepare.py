# SPDX-License-Identifier: Apache-2.0
"""Build what several tests need, once, before the tests lose the network (isolated.py).

As a program: build all of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from simhost import artefacts
from watched import build as watched

TREE = Path(__file__).resolve().parents[1]
# Those of the node services have those of the command line among them.
PINS = TREE / "requirements" / "node.txt"
WHEELS = TREE / "build" / "wheels" / f"{zlib.crc32(PINS.read_bytes()):x}"
# What `make install` keeps between calls.
INSTALL = TREE / "build" / "install"
START_PYTHON = "/usr/bin/python3"


class PrepareError(Exception):
    """A build that failed, with the errors of the program that should have made it."""


def launcher() -> None:
    """Build the watched launcher."""
    try:
        watched.build()
    except subprocess.CalledProcessError as error:
        raise PrepareError(f"the watched launcher: {error.stderr}") from error


def driver() -> None:
    """Build the simulated driver of the default version."""
    try:
        artefacts.driver_tree(artefacts.DEFAULT_VERSION)
        artefacts.fakeproc_hook()
    except artefacts.SimhostError as error:
        raise PrepareError(str(error)) from error


def wheels() -> None:
    """Fetch what the command lines depend on, for each Python that tests install them with."""
    if WHEELS.is_dir():
        return
    fresh = WHEELS.with_name(f"{WHEELS.name}.{os.getpid()}")
    for python in dict.fromkeys((sys.executable, *_other_python())):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "--python", python, "download", "-qq"),
                *("--disable-pip-version-check", "--only-binary", ":all:", "--require-hashes"),
                *("-r", str(PINS), "-d", str(fresh)),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            shutil.rmtree(fresh, ignore_errors=True)
            raise PrepareError(f"dependencies of the command lines: {done.stderr.strip()}")
    try:
        fresh.rename(WHEELS)
    except OSError:
        # Another process has fetched them meanwhile.
        shutil.rmtree(fresh)


def dependencies() -> None:
    """Have `make install` unpack what the command lines depend on, which it keeps.

    Each worker has a copy of build/ of its own, and would unpack them again.
    """
    pinned = PINS.stat().st_mtime
    if all(
        any(path.stat().st_mtime > pinned for path in INSTALL.glob(f"python*-{name}-*"))
        for name in ("runtime", "node")
    ):
        return
    # What an outer make tells its children is not for this one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    with tempfile.TemporaryDirectory() as place:
        command = ["make", "--no-print-directory", "install", "NODE=1", f"DESTDIR={place}"]
        done = subprocess.run(
            [*command, f"PYTHON={sys.executable}"],
            cwd=TREE, env=kept, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise PrepareError(f"make install: {done.stderr.strip()}")


def _other_python() -> list[str]:
    """Return the start path's interpreter if the command line can be installed for it too."""
    if not os.path.exists(START_PYTHON):
        return []
    command = [START_PYTHON, "-I", "-S", "-c", "import sys; print(*sys.version_info[:2])"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    version = tuple(map(int, done.stdout.split()))
    return [START_PYTHON] if version >= (3, 11) and version != sys.version_info[:2] else []


def main() -> None:
    """Build all of it."""
    try:
        launcher()
        driver()
        wheels()
        dependencies()
    except PrepareError as error:
        sys.exit(f"prepare: {error}")


if __name__ == "__main__":
    main()
