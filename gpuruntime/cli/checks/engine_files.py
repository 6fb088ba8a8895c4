# SPDX-License-Identifier: Apache-2.0
"""Read what the config files of the installed engines say about runtimes."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuruntime.cli.checks import processes
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.processes import Process
from gpuruntime.engines import (
    config_paths,
    containerd_document,
    crio,
    daemons,
    docker,
    document_edits,
    podman,
    rancher,
)
from gpuruntime.engines.daemons import Daemon
from gpuruntime.engines.document_edits import look_up, table_at
from gpuruntime.engines.errors import BadFileError
from gpuruntime.errors import ConfigError

# Engine → what its daemon's process is called.
DAEMONS = {
    "docker": ("dockerd",),
    "docker-rootless": ("dockerd",),
    "containerd": ("containerd",),
    "crio": ("crio",),
    "k3s": ("k3s-server", "k3s-agent", "k3s"),
    "rke2": ("rke2",),
    "k0s": ("k0s",),
    "microk8s": ("containerd",),
}
_RUNTIME_OF_CLASS = ("options", "BinaryName")
# In a template, which is no TOML: the name of a runtime, and its program.
_OF_TEMPLATE = re.compile(
    r"""\.runtimes\.["']?([\w.-]+?)["']?\.options\][^\[]*?BinaryName\s*=\s*["']([^"'\n]+)""",
    re.DOTALL,
)


@dataclass(slots=True)
class Engine:
    """An engine: its config files *paths* that are there, and what they say together.

    *runtimes* is name → program, *default* the runtime that counts unasked, *spec_dirs* where it
    is told to look for CDI specs. *problem* is why a file cannot be used. *generated* has the
    runtimes of a file that the engine makes itself, *process* is its daemon.
    """

    name: str
    restart: str
    paths: list[str] = field(default_factory=list)
    runtimes: dict[str, str] = field(default_factory=dict)
    default: str = ""
    spec_dirs: tuple[str, ...] = ()
    has_cdi: bool | None = None
    problem: str = ""
    generated: dict[str, str] = field(default_factory=dict)
    process: Process | None = None
    document: dict[str, Any] = field(default_factory=dict)


def installed_engines(machine: ExaminedMachine) -> list[Engine]:
    """Return the engines that are installed. That of the docker snap is none, see `is_snap`."""
    host = _host(machine)
    found = []
    for name in config_paths.present(host):
        try:
            place = config_paths.find(name, host, "gpuruntime")
        except ConfigError:
            # The snap, which cannot be configured.
            continue
        engine = Engine(name, place.restart)
        engine.process = _daemon(machine, name)
        if place.family == "template":
            _template(machine, engine, place.config)
        else:
            files = [place.config, *_drop_ins(machine, place)]
            _load(machine, engine, files, _READERS[place.family])
        found.append(engine)
    return found + [_rootless(machine, process) for process in _rootless_daemons(machine)]


def is_snap(machine: ExaminedMachine) -> bool:
    """Return whether docker is here from a snap alone."""
    try:
        config_paths.find("docker", _host(machine), "gpuruntime")
    except ConfigError:
        return machine.exists("/snap/docker")
    return False


def _host(machine: ExaminedMachine) -> config_paths.HostFacts:
    running = []
    exec_roots = _exec_roots(machine)
    for process in processes.running(machine, "dockerd", "containerd", "crio"):
        name = {"dockerd": "docker"}.get(process.name, process.name)
        config = process.option("--config-file", "--config", "-c") or None
        is_servant = config is not None and daemons.is_own_config(config, exec_roots)
        if process.is_of_host and not process.uid and not is_servant:
            program = machine.link(f"/proc/{process.pid}/exe") or process.words[0]
            is_path = config is not None and config.startswith("/")
            running.append(Daemon(name, program, config if is_path else None))
    # As root: what is asked is which engines the host has, not which ours are.
    return config_paths.HostFacts(machine.environ, 0, machine.exists, tuple(running))


def _daemon(machine: ExaminedMachine, engine: str) -> Process | None:
    found = [
        process
        for process in processes.running(machine, *DAEMONS.get(engine, ()))
        if process.is_of_host and not process.uid
    ]
    # docker and k3s have a containerd of their own.
    exec_roots = _exec_roots(machine)
    found = [p for p in found if not daemons.is_own_config(p.option("--config", "-c"), exec_roots)]
    return found[0] if found else None


def _exec_roots(machine: ExaminedMachine) -> list[str]:
    """Return the directories in which dockerd has the config of a containerd of its own."""
    roots = list(daemons.EXEC_ROOTS)
    for process in processes.running(machine, "dockerd"):
        text = machine.read(process.option("--config-file") or daemons.DOCKER_CONFIG) or ""
        roots.append(process.option("--exec-root") or daemons.configured_exec_root(text.encode()))
    return roots


def _drop_ins(machine: ExaminedMachine, place: config_paths.EngineConfig) -> list[str]:
    if place.family == "podman":
        return machine.glob(posixpath.dirname(place.drop_in), "*.conf")
    if place.family == "crio":
        return machine.glob(posixpath.dirname(place.drop_in), "*")
    if place.family == "k0s":
        return machine.glob(posixpath.dirname(place.drop_in), "*.toml")
    return []


Reader = Callable[[Engine, Mapping[str, Any]], None]


def _load(machine: ExaminedMachine, engine: Engine, files: Sequence[str], reader: Reader) -> None:
    for path in files:
        if not machine.exists(path):
            continue
        engine.paths.append(path)
        try:
            document = _parse(machine, path)
            reader(engine, document)
            for included in _imported(machine, path, document):
                engine.paths.append(included)
                reader(engine, _parse(machine, included))
        except BadFileError as error:
            engine.problem = f'"{path}" {error.what}'
    for word, option in (("--add-runtime", "path"), ("--default-runtime", "default")):
        value = engine.process.option(word) if engine.process else ""
        if value and option == "default":
            engine.default = value
        elif value:
            name, _, program = value.partition("=")
            engine.runtimes[name] = program


def _parse(machine: ExaminedMachine, path: str) -> dict[str, Any]:
    text = machine.read(path)
    if text is None:
        raise BadFileError("is no file that can be read", "correct it")
    if path.endswith(".json"):
        return document_edits.parse("json", text) if text.strip() else {}
    return document_edits.parse("toml", text)


def _imported(machine: ExaminedMachine, path: str, document: Mapping[str, Any]) -> Iterator[str]:
    patterns = document.get("imports")
    for pattern in patterns if isinstance(patterns, list) else ():
        absolute = posixpath.normpath(posixpath.join(posixpath.dirname(path), str(pattern)))
        yield from machine.glob(*posixpath.split(absolute))


def _docker(engine: Engine, document: Mapping[str, Any]) -> None:
    engine.document = dict(document)
    for name, item in table_at(document, (docker.RUNTIMES,)).items():
        if isinstance(item, dict):
            engine.runtimes[name] = str(item.get("path") or item.get("runtimeType") or "")
    engine.default = str(document.get(docker.DEFAULT) or engine.default)
    engine.spec_dirs = _texts(document.get("cdi-spec-dirs"))
    cdi = look_up(document, ("features", "cdi"))
    engine.has_cdi = cdi if isinstance(cdi, bool) else engine.has_cdi


def _containerd(engine: Engine, document: Mapping[str, Any]) -> None:
    base = containerd_document.plugin_path(containerd_document.version_of(document))
    cri = table_at(document, base)
    for name, item in table_at(cri, ("containerd", "runtimes")).items():
        program = look_up(item, _RUNTIME_OF_CLASS) if isinstance(item, dict) else None
        engine.runtimes[name] = str(program or "")
    engine.default = str(look_up(cri, ("containerd", "default_runtime_name")) or engine.default)
    engine.spec_dirs = _texts(cri.get("cdi_spec_dirs")) or engine.spec_dirs
    cdi = cri.get("enable_cdi")
    engine.has_cdi = cdi if isinstance(cdi, bool) else engine.has_cdi


def _crio(engine: Engine, document: Mapping[str, Any]) -> None:
    for name, item in table_at(document, crio.RUNTIMES).items():
        if isinstance(item, dict):
            engine.runtimes[name] = str(item.get("runtime_path") or "")
    engine.default = str(look_up(document, crio.DEFAULT) or engine.default)
    engine.spec_dirs = (
        _texts(look_up(document, (*crio.RUNTIME, "cdi_spec_dirs"))) or engine.spec_dirs
    )
    engine.has_cdi = True


def _podman(engine: Engine, document: Mapping[str, Any]) -> None:
    for name, item in table_at(document, podman.RUNTIMES).items():
        engine.runtimes[name] = str(item[0]) if isinstance(item, list) and item else ""
    engine.default = str(look_up(document, podman.RUNTIME) or engine.default)
    engine.spec_dirs = _texts(look_up(document, ("engine", "cdi_spec_dirs"))) or engine.spec_dirs
    engine.has_cdi = True


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _template(machine: ExaminedMachine, engine: Engine, directory: str) -> None:
    """Read the templates in *directory*, and what k3s or RKE2 has made of them at its start."""
    made = Engine(engine.name, engine.restart)
    _load(machine, made, [f"{directory}/config.toml"], _containerd)
    engine.generated, engine.default = made.runtimes, made.default
    engine.spec_dirs, engine.has_cdi, engine.problem = made.spec_dirs, made.has_cdi, made.problem
    for name in rancher.NAMES:
        text = machine.read(f"{directory}/{name}")
        if text is not None:
            engine.paths.append(f"{directory}/{name}")
            engine.runtimes.update(_OF_TEMPLATE.findall(text))


def _rootless_daemons(machine: ExaminedMachine) -> list[Process]:
    return [process for process in processes.running(machine, "dockerd") if process.uid]


def _rootless(machine: ExaminedMachine, process: Process) -> Engine:
    home = processes.home_of(machine, process.uid)
    path = process.option("--config-file") or f"{home}/.config/docker/daemon.json"
    engine = Engine(
        f"docker of uid {process.uid}", "systemctl --user restart docker", process=process
    )
    _load(machine, engine, [path], _docker)
    engine.paths = engine.paths or [path]
    return engine


_READERS: dict[str, Reader] = {
    "docker": _docker,
    "containerd": _containerd,
    "k0s": _containerd,
    "crio": _crio,
    "podman": _podman,
}
