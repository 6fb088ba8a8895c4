# SPDX-License-Identifier: Apache-2.0
"""What a scenario does in the virtual machine: commands, containers, and looks at devices."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from vm.machine import Machine

# One command; under emulation the start of a container takes seconds.
COMMAND_S = 180
IMAGE = "busybox:local"
SLEEPER = f"{IMAGE} sleep 99999"
RUNTIME = "/usr/bin/gpu-container-runtime"
# What an open of a node without a driver behind it says, by what the device rules let through.
OPENED = {"No such device or address": True, "Operation not permitted": False}


class ScenarioError(Exception):
    """What a scenario saw that must not be."""


class Guest:
    """The virtual machine as scenarios see it."""

    def __init__(self, machine: Machine, *, verbose: bool) -> None:
        self._machine = machine
        self._verbose = verbose

    def run(self, script: str, *, limit_s: float = COMMAND_S) -> str:
        """Return what *script*, run by sh, writes; raise ScenarioError if it fails."""
        status, output = self.status(script, limit_s=limit_s)
        if status != 0:
            raise ScenarioError(f"exit status {status} of: {script}\n{output}")
        return output

    def status(self, script: str, *, limit_s: float = COMMAND_S) -> tuple[int, str]:
        """Return the exit status of *script* and what it writes to both outputs."""
        chunks: list[bytes] = []
        status = self._machine.run(["sh", "-c", script], chunks.append, limit_s=limit_s)
        output = b"".join(chunks).decode(errors="replace").strip()
        if self._verbose:
            print(f"$ {script}\n{output}\n[{status}]", file=sys.stderr, flush=True)
        return status, output

    def reboot(self) -> None:
        """Reboot the virtual machine."""
        self._machine.reboot()

    def wait_until(self, script: str, what: str, *, limit_s: float = COMMAND_S) -> None:
        """Run *script* until it succeeds; raise ScenarioError, which says *what* is awaited."""
        deadline = time.monotonic() + limit_s
        while self.status(script)[0] != 0:
            if time.monotonic() > deadline:
                raise ScenarioError(f"not within {limit_s:.0f} s: {what}")
            time.sleep(1)

    def require_healthy(self) -> None:
        """Raise ScenarioError if systemd has a failed unit."""
        failed = self.run("systemctl --failed --plain --no-legend | cut -d ' ' -f 1").split()
        if failed:
            journal = self.run(
                f"journalctl --no-pager --lines 20 --unit {' --unit '.join(failed)}"
            )
            raise ScenarioError(f"failed units: {', '.join(failed)}\n{journal}")


def require(condition: object, message: str) -> None:
    """Raise ScenarioError with *message* unless *condition* holds."""
    if not condition:
        raise ScenarioError(message)


@dataclass(frozen=True)
class Container:
    """A container that sleeps: its engine's commands, with `NAME` for its name."""

    name: str
    start: str
    execute: str
    init: str
    update: str = ""

    def run(self, guest: Guest) -> None:
        """Start it."""
        guest.run(self.start)

    def opens(self, guest: Guest, node: str = "/dev/nvidia0") -> bool:
        """Return whether a process in it may open *node*; raise ScenarioError if none exists."""
        _, text = guest.status(f"{self.execute} cat {node}")
        for words, opened in OPENED.items():
            if words in text:
                return opened
        raise ScenarioError(f"{self.name}: opening {node} says: {text}")

    def unit(self, guest: Guest) -> str:
        """Return the scope of systemd that it runs in."""
        path = guest.run(f"sed -n 's/^0:://p' /proc/$({self.init})/cgroup")
        scopes = [part for part in path.split("/") if part.endswith(".scope")]
        require(scopes, f"{self.name}: no scope in the cgroup {path}")
        return scopes[-1]


def docker(name: str, *options: str) -> Container:
    """Return a container of docker with *options* of `docker run`."""
    return Container(
        name,
        f"docker run --detach --name {name} --network none {shlex.join(options)} {SLEEPER}",
        f"docker exec {name}",
        f"docker inspect --format '{{{{.State.Pid}}}}' {name}",
        f"docker update --cpus 1 {name}",
    )


def podman(name: str, *options: str, runtime: str = "runc") -> Container:
    """Return a container of podman with *options* of `podman run` and the OCI *runtime*."""
    command = f"podman --runtime {runtime} --cgroup-manager systemd"
    return Container(
        name,
        f"{command} run --detach --name {name} --network none {shlex.join(options)} {SLEEPER}",
        f"{command} exec {name}",
        f"podman inspect --format '{{{{.State.Pid}}}}' {name}",
    )


def containerd(name: str, *options: str) -> Container:
    """Return a container of containerd with *options* of `ctr run`, in a scope of systemd."""
    scope = f"system.slice:ctr:{name}"
    return Container(
        name,
        f"ctr run --detach --runc-binary {RUNTIME} --runc-systemd-cgroup --cgroup {scope} "
        f"{shlex.join(options)} docker.io/library/{IMAGE} {name} sleep 99999",
        f"ctr task exec --exec-id look-$$ {name}",
        f"ctr task list | awk '$1 == \"{name}\" {{ print $2 }}'",
    )


Scenario = Callable[[Guest], None]
