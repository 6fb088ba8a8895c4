# SPDX-License-Identifier: Apache-2.0
"""Find the running engines: their programs, and the config files on their command lines."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_ENGINES = {"dockerd": "docker", "containerd": "containerd", "crio": "crio"}
_CONFIG_OPTIONS = {
    "docker": ("--config-file",),
    "containerd": ("--config", "-c"),
    "crio": ("--config", "-c"),
}
DOCKER_CONFIG = "/etc/docker/daemon.json"
MAX_FILE_BYTES = 1 << 20
# Programs that start a containerd of their own, as in /proc/PID/comm.
_PARENTS = ("dockerd", "k3s", "k3s-server", "k3s-agent", "rke2", "k0s")
# Directories with the config of such a containerd.
_OWN_DIRECTORIES = ("/var/lib/rancher/", "/run/k3s/", "/etc/k0s/")
# dockerd's default exec-root, by both of its paths.
EXEC_ROOTS = ("/run/docker", "/var/run/docker")


@dataclass(frozen=True, slots=True)
class Daemon:
    """A process: the *name* of its engine, its *program*, and the *config* file that it reads."""

    name: str
    program: str
    config: str | None


@dataclass(frozen=True, slots=True)
class _Process:
    """A daemon of an engine, with its command line and the name of its parent's program."""

    name: str
    program: str
    words: Sequence[str]
    parent: str

    def option(self, *options: str) -> str | None:
        """Return the absolute path that is the value of one of *options*, None without one."""
        for index, word in enumerate(self.words):
            option, equals, value = word.partition("=")
            if option not in options:
                continue
            if not equals:
                value = self.words[index + 1] if index + 1 < len(self.words) else ""
            if value.startswith("/"):
                return value
        return None


def running(proc: str = "/proc") -> Iterator[Daemon]:
    """Return the engines' daemons in the mount namespace of this process, not in containers.

    A containerd that another engine has started for itself is not included, nor is a child of a
    daemon that has not executed its own program yet.
    """
    processes = [
        process for process in _processes(proc) if _ENGINES.get(process.parent) != process.name
    ]
    exec_roots = {
        *EXEC_ROOTS,
        *(_exec_root(process) for process in processes if process.name == "docker"),
    }
    for process in processes:
        config = process.option(*_CONFIG_OPTIONS[process.name])
        is_own = process.name == "containerd" and (
            process.parent in _PARENTS or is_own_config(config or "", exec_roots)
        )
        if not is_own:
            yield Daemon(process.name, process.program, config)


def is_own_config(config: str, exec_roots: Collection[str] = EXEC_ROOTS) -> bool:
    """Return whether *config* belongs to a containerd that another engine starts for itself.

    *exec_roots* are the exec-roots of the running dockerd processes.
    """
    return config.startswith(_OWN_DIRECTORIES) or any(
        config.startswith(f"{root.rstrip('/')}/containerd/") for root in exec_roots if root
    )


def _processes(proc: str) -> Iterator[_Process]:
    try:
        own_namespace = os.readlink(f"{proc}/self/ns/mnt")
    except OSError:
        return
    for entry in sorted(os.listdir(proc)):
        if not entry.isdigit():
            continue
        try:
            name = _ENGINES.get(_comm(proc, entry))
            if name is None or os.readlink(f"{proc}/{entry}/ns/mnt") != own_namespace:
                continue
            program = os.readlink(f"{proc}/{entry}/exe")
            with open(f"{proc}/{entry}/cmdline", "rb") as stream:
                words = os.fsdecode(stream.read(MAX_FILE_BYTES)).split("\0")
            parent = _parent(proc, entry)
        except OSError:
            # The process has ended, or belongs to another user.
            continue
        yield _Process(name, program, words, parent)


def _comm(proc: str, pid: str) -> str:
    with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as stream:
        return stream.read().strip()


def _parent(proc: str, pid: str) -> str:
    """Return the name of the parent's program, "" if the parent has ended."""
    with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as stream:
        # The second field is a name in parentheses that can contain any character.
        parent = stream.read(MAX_FILE_BYTES).rpartition(")")[2].split()[1]
    try:
        return _comm(proc, parent)
    except OSError:
        return ""


def _exec_root(dockerd: _Process) -> str:
    """Return the exec-root of *dockerd*, "" if it has the default one.

    With live-restore, its containerd survives a restart of dockerd and is then not its child.
    """
    path = dockerd.option("--exec-root")
    if path is not None:
        return path
    try:
        with open(dockerd.option("--config-file") or DOCKER_CONFIG, "rb") as stream:
            return configured_exec_root(stream.read(MAX_FILE_BYTES))
    except OSError:
        return ""


def configured_exec_root(data: bytes) -> str:
    """Return the exec-root in *data*, a daemon.json, "" if there is none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    path = document.get("exec-root") if isinstance(document, dict) else None
    return path if isinstance(path, str) else ""
