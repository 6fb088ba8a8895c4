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
COMMAND_S = 600
IMAGE = "busybox:local"
SLEEPER = f"{IMAGE} sleep 99999"
RUNTIME = "/usr/bin/gpu-container-runtime"
# The GPU of each container, and one that it must not have.
GPU = "/dev/nvidia0"
OTHER_GPU = "/dev/nvidia1"
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

        def add(chunk: bytes) -> None:
            chunks.append(chunk)
            self._show(chunk.decode(errors="replace"))

        started = time.monotonic()
        self._show(f"$ {script}\n")
        status = self._machine.run(["sh", "-c", script], add, limit_s=limit_s)
        self._show(f"[status {status}, {time.monotonic() - started:.0f} s]\n")
        return status, b"".join(chunks).decode(errors="replace").strip()

    def _show(self, text: str) -> None:
        if self._verbose:
            print(text, end="", file=sys.stderr, flush=True)

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
    """The commands of a container that sleeps, and of its engine.

    *start* starts it, *init* prints the PID of its first process, *execute* goes in front of a
    command to run in it, *update* changes its limits ("" if the engine has no such command).
    """

    name: str
    start: str
    execute: str
    init: str
    update: str = ""

    def run(self, guest: Guest) -> Running:
        """Start it."""
        guest.run(self.start)
        return self.running(guest)

    def running(self, guest: Guest) -> Running:
        """Return it as it runs now; raise ScenarioError if it is not in a scope of systemd."""
        pid, cgroup = guest.run(
            f"pid=$({self.init}) && echo $pid && sed -n 's/^0:://p' /proc/$pid/cgroup"
        ).split()
        parts = cgroup.split("/")
        scopes = [part for part in parts if part.endswith(".scope")]
        require(scopes, f"{self.name}: no scope in the cgroup {cgroup}")
        above = parts[parts.index(scopes[-1]) - 1]
        return Running(self, guest, int(pid), f"/sys/fs/cgroup{cgroup}", scopes[-1], above)


@dataclass(frozen=True)
class Running:
    """A container that runs: its first process, its cgroup's directory, its scope, its slice."""

    container: Container
    guest: Guest
    pid: int
    cgroup: str
    unit: str
    slice: str

    def opens(self, *nodes: str, after: str = "true") -> tuple[bool, ...]:
        """Run the command *after*; then return for each of *nodes* whether it can be opened.

        Paths are those of the machine. The device rules are those of the cgroup, so a process of
        the machine that joins it opens the nodes: an engine takes ten times as long to start one.
        """
        looks = "; ".join(
            f'sh -c "echo \\$\\$ >{self.cgroup}/cgroup.procs && exec cat {node}" 2>&1 || :'
            for node in nodes
        )
        log = "/run/after.log"
        # systemd sets device rules after its answer to a reload, and before its next answer.
        done = f"{after} && systemctl show --property=Version"
        text = self.guest.run(f"{{ {done}; }} >{log} 2>&1 || {{ cat {log}; exit 1; }}; {looks}")
        what = f"{self.container.name}: opening"
        return tuple(_is_open(line, what) for line in text.splitlines())

    def has_gpu(self, after: str = "true") -> bool:
        """Run the command *after*; then return whether the container's GPU can be opened.

        Raise ScenarioError if another can.
        """
        gpu, other = self.opens(f"/proc/{self.pid}/root{GPU}", OTHER_GPU, after=after)
        require(not other, f"{self.container.name}: {OTHER_GPU} can be opened after {after}")
        return gpu

    def executes(self) -> bool:
        """Return whether a process that the engine starts in it can open its GPU."""
        _, text = self.guest.status(f"{self.container.execute} cat {GPU}")
        return _is_open(text, f"{self.container.name}: {self.container.execute}")


def _is_open(text: str, what: str) -> bool:
    for words, is_open in OPENED.items():
        if words in text:
            return is_open
    raise ScenarioError(f"{what} says: {text}")


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
        f"{command} update --cpus 1 {name}",
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


def pod(name: str, handler: str, *requests: str) -> Container:
    """Return the container of a pod of containerd with the runtime *handler*.

    *requests* are variables and CDI devices.
    """
    script = "python3 -B /srv/vm/guest/pod.py"
    identity = f"$({script} id {name})"
    return Container(
        name,
        f"{script} run {name} {handler} {shlex.join(requests)}",
        f"ctr --namespace k8s.io task exec --exec-id look-$$ {identity}",
        f"ctr --namespace k8s.io task list | awk -v id={identity} '$1 == id {{ print $2 }}'",
        f"{script} limit {name}",
    )


Scenario = Callable[[Guest], None]
