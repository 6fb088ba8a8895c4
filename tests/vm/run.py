# SPDX-License-Identifier: Apache-2.0
"""Scenarios in a virtual machine with systemd and cgroup v2; for `make test-vm`.

    run.py [--suite SUITE] [--verbose] [SCENARIO ...]

Our packages are installed in it beside a simulated driver; scenarios resume the same saved
machine. Everything is kept below build/vm, and made anew when packages or `guest/` change.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

import artefacts
import clean_roots
from vm import image, machine, scenarios
from vm.guest import Guest, Scenario, ScenarioError
from vm.image import BUILD, VmError

TREE = Path(__file__).resolve().parents[2]
PREPARE_S = 1200
# Of a package, what changes nothing of what it does.
DESCRIPTIONS = ("./control", "./md5sums")
DOCUMENTS = ("./usr/share/doc/", "./usr/share/man/")
VERSIONS = (artefacts.DEFAULT_VERSION, scenarios.OTHER_VERSION)


def main() -> int:
    """Run the scenarios named, or all, and return the exit status."""
    options = _parser().parse_args()
    by_name = {scenario.__name__: scenario for scenario in scenarios.SCENARIOS[options.suite]}
    names = options.names or list(by_name)
    if unknown := sorted(set(names) - set(by_name)):
        print(f"test-vm: no scenario of {options.suite}: {', '.join(unknown)}", file=sys.stderr)
        print(f"hint: choose from: {' '.join(by_name)}", file=sys.stderr)
        return 2
    chosen = [by_name[name] for name in names]
    # So that the directories of the machine that runs are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if os.geteuid() != 0:
        print("test-vm: making the virtual machine needs root", file=sys.stderr)
        print("hint: run: sudo make test-vm", file=sys.stderr)
        return 1
    try:
        disk, saved = prepared(options.suite, verbose=options.verbose)
    except (VmError, ScenarioError) as error:
        print(f"test-vm: {error}", file=sys.stderr)
        return 1
    failed = 0
    stage = Stage(disk, saved, verbose=options.verbose)
    for scenario in chosen:
        started = time.monotonic()
        error = stage.play(scenario)
        failed += bool(error)
        word = "FAILED" if error else "ok"
        took = f"{time.monotonic() - started:.0f} s"
        print(f"test-vm: {word:6} {scenario.__name__} ({took}): {scenario.__doc__}")
        if error:
            print("".join(f"    {line}\n" for line in error.splitlines()), end="")
        sys.stdout.flush()
    stage.end()
    passed = len(chosen) - failed
    print(f"test-vm: {image.SUITES[options.suite]}: {passed} of {len(chosen)} scenarios passed")
    return bool(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=image.SUITES, default="bookworm")
    parser.add_argument("--verbose", action="store_true", help="show each command in the machine")
    parser.add_argument("names", nargs="*", metavar="SCENARIO")
    return parser


class Stage:
    """Where scenarios are played: each in a machine of its own, or those that share one in turn.

    An emulated processor translates each program at its first use, so that the second container of
    a machine starts several times as fast as the first.
    """

    def __init__(self, disk: Path, saved: Path, *, verbose: bool) -> None:
        self._disk = disk
        self._saved = saved
        self._verbose = verbose
        self._stack = contextlib.ExitStack()
        self._guest: Guest | None = None

    def play(self, scenario: Scenario) -> str:
        """Play *scenario* and return what was wrong, "" if nothing was."""
        shares = scenario in scenarios.SHARING
        try:
            if self._guest is None or not shares:
                self.end()
                running = self._stack.enter_context(machine.resumed(self._disk, self._saved))
                self._guest = Guest(running, verbose=self._verbose)
            scenario(self._guest)
        except (ScenarioError, VmError) as error:
            self.end()
            return str(error)
        if not shares:
            self.end()
        return ""

    def end(self) -> None:
        """End the machine that runs."""
        self._guest = None
        self._stack.close()


def prepared(suite: str, *, verbose: bool) -> tuple[Path, Path]:
    """Return the directories of the disk and of the saved machine; make what is missing."""
    clean_roots.build_packages("NODE=0")
    disk = image.make(suite, clean_roots.dependencies())
    files = {
        image.GUEST: "srv/vm/guest",
        TREE / "tests/simhost": "srv/vm/simhost",
        TREE / "tests/containers/cri": "srv/vm/containers/cri",
        clean_roots.PACKAGES: "srv/vm/packages",
        **{artefacts.driver_tree(version): f"srv/vm/driver/{version}" for version in VERSIONS},
    }
    saved = BUILD / f"{disk.name}+{_digest(files)}"
    if not saved.is_dir():
        for old in BUILD.glob(f"{suite}-*+*"):
            shutil.rmtree(old)
        print(f"test-vm: booting {image.SUITES[suite]}, installing the packages", flush=True)
        with machine.booted(disk, files) as running:
            guest = Guest(running, verbose=verbose)
            guest.run(f"/srv/vm/guest/prepare {VERSIONS[0]} 2>&1", limit_s=PREPARE_S)
            guest.require_healthy()
            machine.keep(running, saved)
    return disk, saved


def _digest(files: Iterable[Path]) -> str:
    """Return a digest of the content of the directories *files*."""
    digest = hashlib.sha256()
    for path in sorted(path for directory in files for path in directory.rglob("*")):
        if "__pycache__" in path.parts or not path.is_file():
            continue
        digest.update(os.fsencode(path))
        digest.update(_package_content(path) if path.suffix == ".deb" else path.read_bytes())
    return digest.hexdigest()[:12]


def _package_content(package: Path) -> bytes:
    """Return a digest of what a Debian package does, that is without its documents and times."""
    digest = hashlib.sha256()
    for part in ("--ctrl-tarfile", "--fsys-tarfile"):
        archive = subprocess.run(
            ["dpkg-deb", part, str(package)], check=True, stdout=subprocess.PIPE
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            for member in members:
                if member.name in DESCRIPTIONS or member.name.startswith(DOCUMENTS):
                    continue
                digest.update(f"{member.name} {member.mode} {member.linkname}".encode())
                if member.isfile():
                    digest.update(members.extractfile(member).read())
    return digest.digest()


if __name__ == "__main__":
    sys.exit(main())
