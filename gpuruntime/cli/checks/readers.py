# SPDX-License-Identifier: Apache-2.0
"""Find the installed engines, their versions, and the CDI versions that they support.

The version comes from the engine's program, otherwise from the files of the package manager.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpuruntime.cli.checks import processes
from gpuruntime.cli.checks.examined_machine import ExaminedMachine

Version = tuple[int, ...]
# Program, names of packages, and pairs (release, newest version of CDI specs that it supports).
# Releases before the first one support none. The source is the module files of the releases.
_NEVER: Version = ()
_ENGINES: dict[str, tuple[str, tuple[str, ...], tuple[tuple[Version, Version], ...]]] = {
    "podman": (
        "podman",
        ("podman",),
        (
            ((4, 1), (0, 4, 0)),
            ((4, 3), (0, 5, 0)),
            ((4, 7), (0, 6, 0)),
            ((5, 1), (0, 7, 0)),
            ((5, 2), (0, 8, 0)),
            ((5, 5), (1, 0, 0)),
        ),
    ),
    "docker": (
        "dockerd",
        ("docker.io", "docker-ce", "moby-engine", "docker"),
        (
            ((25,), (0, 6, 0)),
            ((26, 1), (0, 7, 0)),
            ((27, 4), (0, 8, 0)),
            ((28, 1), (1, 0, 0)),
            ((29, 2), (1, 1, 0)),
        ),
    ),
    "containerd": (
        "containerd",
        ("containerd", "containerd.io"),
        (
            ((1, 7), (0, 5, 0)),
            ((1, 7, 12), (0, 6, 0)),
            ((1, 7, 16), (0, 7, 0)),
            ((1, 7, 27), (0, 8, 0)),
            ((2, 0, 5), (1, 0, 0)),
            ((2, 2, 1), (1, 1, 0)),
        ),
    ),
    "crio": (
        "crio",
        ("cri-o",),
        (
            ((1, 24), (0, 3, 0)),
            ((1, 25), (0, 5, 0)),
            ((1, 28), (0, 6, 0)),
            ((1, 30), (0, 7, 0)),
            ((1, 31), (0, 8, 0)),
            ((1, 33), (1, 0, 0)),
            ((1, 35), (1, 1, 0)),
        ),
    ),
}
_NUMBER = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?")


@dataclass(frozen=True, slots=True)
class Reader:
    """An engine: its *version* as text; *newest* is the CDI version it supports, () for none."""

    name: str
    version: str
    newest: Version

    def reads(self, cdi_version: str) -> bool:
        """Return whether the engine supports specs of *cdi_version*."""
        return bool(self.newest) and _parse(cdi_version.removeprefix("v")) <= self.newest


def installed(machine: ExaminedMachine) -> Iterator[Reader]:
    """Yield the installed engines whose version is known."""
    packages = dict(_packages(machine))
    for name, (program, names, table) in _ENGINES.items():
        version = _of_program(machine, _running(machine, program) or program)
        if not version:
            version = next((packages[item] for item in names if item in packages), "")
        number = _parse(version)
        if number:
            fitting = [newest for since, newest in table if since <= number]
            yield Reader(name, version, fitting[-1] if fitting else _NEVER)


def _running(machine: ExaminedMachine, name: str) -> str:
    """Return the program of the running daemon *name*, "" if it does not run."""
    for process in processes.running(machine, name):
        program = machine.link(f"/proc/{process.pid}/exe") or ""
        # The link of a daemon whose program was replaced ends in " (deleted)".
        if process.is_of_host and not process.uid and machine.is_program(program):
            return program
    return ""


def packages_of(machine: ExaminedMachine, names: tuple[str, ...]) -> dict[str, str]:
    """Return name → version of the installed packages among *names*."""
    return {name: version for name, version in _packages(machine) if name in names}


def _of_program(machine: ExaminedMachine, program: str) -> str:
    """Return the version that *program* prints, "" if it does not exist or prints none."""
    path = machine.find_program(program)
    if not path:
        return ""
    match = _NUMBER.search(machine.output(path, "--version"))
    return match[0] if match else ""


def _parse(text: str) -> Version:
    match = _NUMBER.search(text)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def _packages(machine: ExaminedMachine) -> Iterator[tuple[str, str]]:
    """Yield name and version, without epoch, of each package of dpkg, apk and pacman."""
    text = machine.read("/var/lib/dpkg/status", 64 << 20) or ""
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed") and "Version" in fields:
            yield fields.get("Package", ""), _upstream(fields["Version"])
    text = machine.read("/lib/apk/db/installed", 64 << 20) or ""
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^(P|V):(.*)$", paragraph, re.MULTILINE))
        if {"P", "V"} <= fields.keys():
            yield fields["P"], _upstream(fields["V"])
    for name in machine.names("/var/lib/pacman/local"):
        match = re.fullmatch(r"(.+)-([^-]+)-[^-]+", name)
        if match:
            yield match[1], _upstream(match[2])


def _upstream(version: str) -> str:
    return version.rpartition(":")[2]
