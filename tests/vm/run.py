# SPDX-License-Identifier: Apache-2.0
"""Scenarios in a virtual machine with systemd and cgroup v2; for `make test-vm`.

    run.py [--suite SUITE] [--verbose] [SCENARIO ...]

Our packages are installed in it beside a simulated driver; each scenario resumes the same saved
machine. Everything is kept below build/vm, and made anew when packages or `guest/` change.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
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
VERSIONS = (artefacts.DEFAULT_VERSION, scenarios.OTHER_VERSION)


def main() -> int:
    """Run the scenarios named, or all, and return the exit status."""
    options = _parser().parse_args()
    chosen = [s for s in scenarios.SCENARIOS if not options.names or s.__name__ in options.names]
    if unknown := set(options.names) - {scenario.__name__ for scenario in chosen}:
        print(f"test-vm: no such scenario: {', '.join(sorted(unknown))}", file=sys.stderr)
        names = " ".join(scenario.__name__ for scenario in scenarios.SCENARIOS)
        print(f"hint: choose of: {names}", file=sys.stderr)
        return 2
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
    for scenario in chosen:
        started = time.monotonic()
        error = play(scenario, disk, saved, verbose=options.verbose)
        failed += bool(error)
        word = "FAILED" if error else "ok"
        took = f"{time.monotonic() - started:.0f} s"
        print(f"test-vm: {word:6} {scenario.__name__} ({took}): {scenario.__doc__}")
        if error:
            print("".join(f"    {line}\n" for line in error.splitlines()), end="")
        sys.stdout.flush()
    passed = len(chosen) - failed
    print(f"test-vm: {image.SUITES[options.suite]}: {passed} of {len(chosen)} scenarios passed")
    return bool(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=image.SUITES, default="bookworm")
    parser.add_argument("--verbose", action="store_true", help="show each command in the machine")
    parser.add_argument("names", nargs="*", metavar="SCENARIO")
    return parser


def play(scenario: Scenario, disk: Path, saved: Path, *, verbose: bool) -> str:
    """Play *scenario* in a machine of its own and return what was wrong, "" if nothing was."""
    try:
        with machine.resumed(disk, saved) as running:
            scenario(Guest(running, verbose=verbose))
    except (ScenarioError, VmError) as error:
        return str(error)
    return ""


def prepared(suite: str, *, verbose: bool) -> tuple[Path, Path]:
    """Return the directories of the disk and of the saved machine; make what is missing."""
    clean_roots.build_packages()
    disk = image.make(suite, clean_roots.dependencies())
    files = {
        image.GUEST: "srv/vm/guest",
        TREE / "tests/simhost": "srv/vm/simhost",
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
        digest.update(os.fsencode(path))
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
