# SPDX-License-Identifier: Apache-2.0
"""The config files of each engine, its restart command, and which engines are installed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from gpuruntime.engines import daemons
from gpuruntime.engines.daemons import Daemon
from gpuruntime.errors import ArgumentError, ConfigError

Family = Literal["docker", "containerd", "k0s", "crio", "podman", "template"]

ALIASES = {"cri-o": "crio", "docker-snap": "snap-docker"}
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
# The names of our drop-ins, one for each name of the command-line program.
BRANDS = ("gpuruntime", "nvidia")
_ORDERS = ("99", "zz")
_RANCHER = "/var/lib/rancher/{}/agent/etc/containerd"
_SNAP_DOCKER = ("/var/snap/docker/", "/snap/docker/")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine: the *config* to edit, and the *drop_in* to write instead ("": none).

    *more* is another drop-in, of RKE2 and k3s only. *last* replaces *drop_in* if other drop-ins
    would be read after it. *restart* is the restart command, *note* a remark about that command.
    *socket* is the socket of the daemon that reads *config*, "" if it is not known.
    """

    name: str
    family: Family
    config: str
    drop_in: str
    restart: str
    more: str = ""
    note: str = ""
    socket: str = ""
    last: str = ""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts that the paths depend on: the environment, the user, files, and daemons."""

    environ: Mapping[str, str]
    uid: int
    exists: Callable[[str], bool]
    daemons: tuple[Daemon, ...]


def this_host() -> HostFacts:
    """Return the facts of this host."""
    return HostFacts(os.environ, os.geteuid(), os.path.lexists, tuple(daemons.running()))


def names() -> tuple[str, ...]:
    """Return the names of the engines."""
    return (*_ENGINES, "docker-rootless")


def find(name: str, host: HostFacts, brand: str) -> EngineConfig:
    """Return the config of the engine *name*; a drop-in is named after *brand*.

    Raises ConfigError if the engine is unknown or cannot be configured.
    """
    name = ALIASES.get(name, name)
    if name == "snap-docker" or (name == "docker" and _is_snap(host)):
        raise snap_refusal()
    if name == "docker-rootless":
        config = os.path.join(_home_config(host), "docker", "daemon.json")
        return EngineConfig(name, "docker", config, "", "systemctl --user restart docker")
    if name not in _ENGINES:
        raise ArgumentError(f"unrecognized runtime '{name}'", f"name one of {', '.join(names())}")
    family, config, drop_in, restart = _ENGINES[name]
    if name == "podman" and host.uid != 0:
        directory = os.path.join(_home_config(host), "containers")
        config = f"{directory}/containers.conf"
        drop_in = f"{directory}/containers.conf.d/99-{{}}.conf"
    elif name in ("docker", "containerd"):
        config = _of_daemon(name, host) or config
        drop_in = drop_in and f"{os.path.dirname(config)}/conf.d/99-{{}}.toml"
    more = f"/etc/rancher/{name}/config.yaml.d/99-{brand}.yaml" if family == "template" else ""
    note = _NOTES.get(name, "")
    socket = CONTAINERD_SOCKET if config == "/etc/containerd/config.toml" else ""
    drop_in = drop_in.format(brand)
    last = _last(drop_in, brand) if name == "containerd" else ""
    return EngineConfig(name, family, config, drop_in, restart, more, note, socket, last)


def _last(drop_in: str, brand: str) -> str:
    """Return a drop-in beside *drop_in* whose name sorts after the usual names."""
    return drop_in and os.path.join(os.path.dirname(drop_in), f"zz-{brand}.toml")


def other_drop_ins(drop_in: str) -> list[str]:
    """Return the other drop-ins beside *drop_in* that this program may write."""
    directory, name = os.path.split(drop_in)
    stem, extension = os.path.splitext(name)
    stems = [f"{order}-{brand}" for brand in BRANDS for order in _ORDERS]
    if stem not in stems:
        return []
    return [os.path.join(directory, other + extension) for other in stems if other != stem]


def beside(engine: EngineConfig, path: str, brand: str) -> EngineConfig:
    """Return *engine* for the config *path* from the engine's command line.

    containerd imports files from any directory. CRI-O and podman read drop-ins from one directory
    only, and not with another config file: then that file itself is edited.
    """
    directory = os.path.dirname(path)
    drop_in = engine.drop_in
    if engine.family in ("crio", "podman"):
        drop_in = ""
    elif drop_in:
        name = os.path.basename(os.path.dirname(drop_in))
        drop_in = os.path.join(directory, name, f"99-{brand}.toml")
    more = engine.more and os.path.join(directory, os.path.basename(engine.more))
    last = engine.last and _last(drop_in, brand)
    return dataclasses.replace(engine, config=path, drop_in=drop_in, more=more, last=last)


_ENGINES: dict[str, tuple[Family, str, str, str]] = {
    "docker": ("docker", "/etc/docker/daemon.json", "", "systemctl restart docker"),
    "containerd": (
        "containerd",
        "/etc/containerd/config.toml",
        "/etc/containerd/conf.d/99-{}.toml",
        "systemctl restart containerd",
    ),
    "crio": (
        "crio",
        "/etc/crio/crio.conf",
        "/etc/crio/crio.conf.d/99-{}.toml",
        "systemctl restart crio",
    ),
    "podman": (
        "podman",
        "/etc/containers/containers.conf",
        "/etc/containers/containers.conf.d/99-{}.conf",
        "",
    ),
    "k3s": ("template", _RANCHER.format("k3s"), "", "systemctl restart k3s"),
    "rke2": ("template", _RANCHER.format("rke2"), "", "systemctl restart rke2-server"),
    "microk8s": (
        "containerd",
        "/var/snap/microk8s/current/args/containerd-template.toml",
        "",
        "snap restart microk8s.daemon-containerd",
    ),
    "k0s": (
        "k0s",
        "/etc/k0s/containerd.toml",
        "/etc/k0s/containerd.d/99-{}.toml",
        "systemctl restart k0sworker",
    ),
}
_NOTES = {
    "k3s": 'on an agent the service is "k3s-agent"',
    "rke2": 'on an agent the service is "rke2-agent"',
    "k0s": 'on a node that is a controller too the service is "k0scontroller"',
}
# Paths that exist if the engine is installed.
_TRACES = {
    "docker": ("/etc/docker/daemon.json", "/run/docker.sock", "/usr/bin/dockerd"),
    "crio": ("/etc/crio", "/usr/bin/crio"),
    "podman": ("/usr/bin/podman",),
    "k3s": ("/etc/rancher/k3s", _RANCHER.format("k3s")),
    "rke2": ("/etc/rancher/rke2", _RANCHER.format("rke2")),
    "microk8s": ("/var/snap/microk8s",),
    "k0s": ("/etc/k0s", "/var/lib/k0s"),
    "containerd": ("/etc/containerd/config.toml", CONTAINERD_SOCKET),
}


def installed(host: HostFacts) -> list[str]:
    """Return the names of all engines that are installed, configured or running on *host*."""
    engines = [name for name, paths in _TRACES.items() if any(map(host.exists, paths))]
    running = dict.fromkeys(daemon.name for daemon in host.daemons)
    return [*engines, *(name for name in running if name not in engines)]


def present(host: HostFacts) -> list[str]:
    """Return the names of the installed engines, without a containerd that belongs to another."""
    engines = installed(host)
    rootless = os.path.join(_home_config(host), "docker", "daemon.json")
    if host.uid != 0 and host.exists(rootless):
        engines = [name for name in engines if name != "docker"] + ["docker-rootless"]
    if "containerd" in engines and len(engines) > 1 and not _is_of_its_own(host):
        engines.remove("containerd")
    if "docker" not in engines and _is_snap(host):
        engines.append("snap-docker")
    return engines


def choose(host: HostFacts) -> str:
    """Return the name of the installed engine; raise ConfigError if there is not exactly one."""
    engines = present(host)
    if len(engines) == 1:
        return engines[0]
    if not engines:
        raise ConfigError(
            "no container engine found", f"name one with --runtime: {', '.join(names())}"
        )
    raise ConfigError(
        f"found several container engines: {', '.join(engines)}", "choose one with --runtime"
    )


def _is_of_its_own(host: HostFacts) -> bool:
    """Return whether the host has a containerd of its own, not only that of docker or k3s."""
    return host.exists("/etc/containerd/config.toml") and host.exists("/var/lib/kubelet")


def _is_snap(host: HostFacts) -> bool:
    """Return whether the only docker of the host is the snap."""
    running = [daemon for daemon in host.daemons if daemon.name == "docker"]
    if running:
        return all(daemon.program.startswith("/snap/docker/") for daemon in running)
    return host.exists("/snap/docker") and not host.exists("/usr/bin/dockerd")


def is_of_snap(path: str) -> bool:
    """Return whether the file *path* belongs to the docker snap."""
    return os.path.abspath(path).startswith(_SNAP_DOCKER)


def snap_refusal() -> ConfigError:
    """Return the error of an attempt to configure the docker snap."""
    return ConfigError(
        "docker from the snap cannot run a program of the host: its dockerd lives in the snap's "
        "own mount namespace, where neither our runtime nor the driver's files are",
        'remove it ("snap remove docker") and install docker from the distribution\'s or '
        "docker's packages",
    )


def _home_config(host: HostFacts) -> str:
    home = host.environ.get("HOME") or "/"
    return host.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")


def _of_daemon(name: str, host: HostFacts) -> str | None:
    """Return the config file on the running daemon's command line, None if there is none."""
    paths = {daemon.config for daemon in host.daemons if daemon.name == name and daemon.config}
    return paths.pop() if len(paths) == 1 else None
