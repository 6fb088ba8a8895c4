# SPDX-License-Identifier: Apache-2.0
"""Unpack engines of newer Debian suites: `fetch.py [SUITE]…`, for `make test-newer-engines`.

apt fetches from the package source of this machine and checks the same keys, with its lists, cache
and package state below build/newer-engines. Nothing is installed and no maintainer script runs.
Each suite becomes a root directory with the engines and their dependencies, or a line with the
reason for its absence: the tests are skipped with that line.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from simhost import fetch_driver

BUILD = fetch_driver.CHECKOUT / "build" / "newer-engines"
SUITES = ("trixie", "sid")
PACKAGES = (
    *("podman", "conmon", "crun", "runc", "docker.io", "docker-cli", "containerd"),
    # Dependencies of the programs and hooks of our tests, which run there too.
    *("base-files", "busybox", "dash", "libc-bin", "python3"),
)
_PLANNED = re.compile(r"^Inst (\S+) \((\S+)", re.MULTILINE)


def root_of(suite: str) -> Path:
    """Return the directory with the engines of *suite*."""
    return BUILD / suite / "root"


def why_not(suite: str) -> str | None:
    """Return why the engines of *suite* are missing; None if they are unpacked."""
    if _versions(suite):
        return None
    note = _note(suite)
    return note.read_text() if note.exists() else "not fetched: run `make test-newer-engines`"


def version(suite: str, package: str) -> tuple[int, ...]:
    """Return the first numbers of the version of *package* that was unpacked."""
    upstream = _versions(suite)[package].rpartition(":")[2]
    return tuple(int(number) for number in re.findall(r"\d+", upstream)[:3])


def main(suites: list[str]) -> int:
    """Fetch each of *suites* and return the exit status: 0 even if a suite is unavailable."""
    unknown = set(suites) - set(SUITES)
    if unknown:
        print(f"usage: fetch.py [{'|'.join(SUITES)}]…", file=sys.stderr)
        return 2
    for suite in suites or SUITES:
        try:
            fetch(suite)
        except fetch_driver.FetchError as error:
            reason = str(error).splitlines()[0]
            _note(suite).write_text(reason)
            remark = "; the engines of the last run remain" if _versions(suite) else ""
            print(f"newer-engines: {suite}: {reason}{remark}", file=sys.stderr)
        else:
            _note(suite).unlink(missing_ok=True)
            versions = _versions(suite)
            shown = ", ".join(f"{name} {versions[name]}" for name in PACKAGES[:7])
            print(f"newer-engines: {suite}: {shown}")
    return 0


def fetch(suite: str) -> None:
    """Fetch and unpack the engines of *suite*, unless they are up to date."""
    top = BUILD / suite
    top.mkdir(parents=True, exist_ok=True)
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise fetch_driver.FetchError("this machine has no apt", "run it on Debian")
    apt = fetch_driver.Apt(top / "apt", fetch_driver.machine_source(), suite)
    failure = apt.update()
    if failure:
        raise fetch_driver.FetchError(f"apt-get update: {failure}", "check the network")
    versions = _plan(apt)
    if versions == _versions(suite):
        return
    packages = apt.download(versions)
    fresh = top / "root.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        _unpack(packages, fresh)
    except subprocess.CalledProcessError as error:
        raise fetch_driver.FetchError(str(error), "remove build/newer-engines") from error
    _stamp(suite).unlink(missing_ok=True)
    shutil.rmtree(root_of(suite), ignore_errors=True)
    fresh.rename(root_of(suite))
    _stamp(suite).write_text(json.dumps(versions, indent=1))


def _unpack(packages: list[Path], root: Path) -> None:
    """Unpack *packages* into *root*, and replace the maintainer scripts that the engines need."""
    # First the package that makes /bin, /lib and others links into /usr.
    for package in sorted(packages, key=lambda file: not file.name.startswith("base-files_")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
        package.unlink()
    for name in ("dev", "proc", "sys", "run", "tmp", "etc/cdi", "var/lib", "root"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    subprocess.run(["/sbin/ldconfig", "-X", "-r", str(root)], check=True)


def _plan(apt: fetch_driver.Apt) -> dict[str, str]:
    """Return the version of each package in an installation on an empty machine."""
    done = apt._run("apt-get", "-s", "--no-install-recommends", "install", *PACKAGES)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("E:")]
        message = f"apt-get install: {lines[0] if lines else done.returncode}"
        raise fetch_driver.FetchError(message, "choose another suite")
    return {name.partition(":")[0]: text for name, text in _PLANNED.findall(done.stdout)}


def _stamp(suite: str) -> Path:
    return BUILD / suite / "versions.json"


def _note(suite: str) -> Path:
    return BUILD / suite / "why-not"


def _versions(suite: str) -> dict[str, str]:
    """Return the version of each unpacked package; an empty dict if there is none."""
    try:
        versions: dict[str, str] = json.loads(_stamp(suite).read_text())
    except FileNotFoundError:
        return {}
    return versions


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
