# SPDX-License-Identifier: Apache-2.0
"""Find the engines of a host, and read the runtimes in their config files."""

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

RUNTIME = "gpu-container-runtime"
# Engine → the names of its daemon's process.
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
# Engine → its program, if the program alone shows that the engine is installed.
_PROGRAMS = {
    "docker": "dockerd",
    "containerd": "containerd",
    "crio": "crio",
    "podman": "podman",
    "k3s": "k3s",
    "rke2": "rke2",
}
_RUNTIME_OF_CLASS = ("options", "BinaryName")
# In a template, which is not valid TOML: the name of a runtime, and its program.
_OF_TEMPLATE = re.compile(
    r"""\.runtimes\.["']?([\w.-]+?)["']?\.options\][^\[]*?BinaryName\s*=\s*["']([^"'\n]+)""",
    re.DOTALL,
)
_SYSTEMD_CGROUPS = "native.cgroupdriver=systemd"
# Where each engine looks for OCI hooks if its config names no directory.
_HOOK_DIRECTORIES = {
    "crio": ("/usr/share/containers/oci/hooks.d",),
    "podman": ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"),
}


@dataclass(slots=True)
class Engine:
    """An engine: its config files *paths* that exist, and their merged content.

    *runtimes* is name → program, *default* the name of the default runtime. *spec_dirs* are the
    directories for CDI specs that its config names, *hook_dirs* those for OCI hooks. *problem* is
    why a file cannot be used. *generated* has the runtimes of a file that the engine writes
    itself, *process* is its daemon.
    """

    name: str
    restart: str
    paths: list[str] = field(default_factory=list)
    runtimes: dict[str, str] = field(default_factory=dict)
    default: str = ""
    spec_dirs: tuple[str, ...] = ()
    hook_dirs: tuple[str, ...] = ()
    has_cdi: bool | None = None
    has_systemd_cgroups: bool = False
    problem: str = ""
    generated: dict[str, str] = field(default_factory=dict)
    process: Process | None = None
    document: dict[str, Any] = field(default_factory=dict)


def installed_engines(machine: ExaminedMachine) -> list[Engine]:
    """Return every engine that is installed or configured, except docker's snap (`is_snap`)."""
    host = _host(machine)
    names = config_paths.installed(host)
    names += [
        name
        for name, program in _PROGRAMS.items()
        if name not in names and machine.find_program(program)
    ]
    engines = []
    for name in names:
        try:
            engine_config = config_paths.find(name, host, "gpuruntime")
        except ConfigError:
            # The snap, which cannot be configured.
            continue
        engine = Engine(name, engine_config.restart, hook_dirs=_HOOK_DIRECTORIES.get(name, ()))
        engine.process = _daemon(machine, name)
        if engine_config.family == "template":
            _template(machine, engine, engine_config.config)
        else:
            _load(
                machine,
                engine,
                _config_files(machine, engine, engine_config),
                _READERS[engine_config.family],
            )
        engines.append(engine)
    return engines + [_rootless(machine, process) for process in _rootless_daemons(machine)]


def is_snap(machine: ExaminedMachine) -> bool:
    """Return whether docker is installed as a snap only."""
    try:
        config_paths.find("docker", _host(machine), "gpuruntime")
    except ConfigError:
        return machine.exists("/snap/docker")
    return False


def is_ours(machine: ExaminedMachine, path: str) -> bool:
    """Return whether the program *path* of an engine's config is our launcher."""
    program = machine.find_program(path)
    return bool(program) and machine.is_ours(program)


def our_runtimes(machine: ExaminedMachine, engine: Engine) -> dict[str, str]:
    """Return name → program of the runtimes of *engine* that are ours."""
    runtimes = {**engine.generated, **engine.runtimes}
    return {name: path for name, path in runtimes.items() if path and is_ours(machine, path)}


def runtime_in_use(machine: ExaminedMachine) -> str:
    """Return the path of our runtime that an engine runs, else that of PATH; "" for none."""
    for engine in installed_engines(machine):
        for path in our_runtimes(machine, engine).values():
            return machine.find_program(path)
    return machine.find_program(RUNTIME) or machine.beside(RUNTIME)


def search_path(machine: ExaminedMachine) -> str:
    """Return the PATH that our runtime gets from an engine, else that of this process."""
    for engine in installed_engines(machine):
        if engine.process and our_runtimes(machine, engine):
            path = processes.environment(machine, engine.process).get("PATH")
            if path:
                return path
    return machine.environ.get("PATH", "")


def _host(machine: ExaminedMachine) -> config_paths.HostFacts:
    running = []
    exec_roots = _exec_roots(machine)
    for process in processes.running(machine, "dockerd", "containerd", "crio"):
        name = {"dockerd": "docker"}.get(process.name, process.name)
        config = _config_option(machine, process)
        is_private = daemons.is_own_config(config, exec_roots)
        if process.is_of_host and not process.uid and not is_private:
            program = machine.link(f"/proc/{process.pid}/exe") or process.words[0]
            running.append(Daemon(name, program, config or None))
    # As root: the engines of the host are examined, not those of the user.
    return config_paths.HostFacts(machine.environ, 0, machine.exists, tuple(running))


def _config_option(machine: ExaminedMachine, process: Process) -> str:
    """Return the config file on the command line of *process*, "" if it names none."""
    return processes.path_option(machine, process, "--config-file", "--config", "-c")


def _daemon(machine: ExaminedMachine, engine: str) -> Process | None:
    exec_roots = _exec_roots(machine)
    for process in processes.running(machine, *DAEMONS.get(engine, ())):
        # docker and k3s start a private containerd.
        is_private = daemons.is_own_config(_config_option(machine, process), exec_roots)
        if process.is_of_host and not process.uid and not is_private:
            return process
    return None


def _exec_roots(machine: ExaminedMachine) -> list[str]:
    """Return the directories in which dockerd has the config of its private containerd."""
    roots = list(daemons.EXEC_ROOTS)
    for process in processes.running(machine, "dockerd"):
        text = machine.read(process.option("--config-file") or daemons.DOCKER_CONFIG) or ""
        roots.append(process.option("--exec-root") or daemons.configured_exec_root(text.encode()))
    return roots


def _config_files(
    machine: ExaminedMachine, engine: Engine, engine_config: config_paths.EngineConfig
) -> list[str]:
    """Return the config files that *engine* reads, in order: a later one wins."""
    directory = posixpath.dirname(engine_config.drop_in)
    if engine_config.family == "podman":
        return [podman.DEFAULTS, engine_config.config, *machine.glob(directory, "*.conf")]
    if engine_config.family == "crio":
        config = engine_config.config
        if engine.process:
            config = _config_option(machine, engine.process) or config
            option = processes.path_option(machine, engine.process, "--config-dir", "-d")
            directory = option or directory
        return [config, *machine.glob(directory, "*")]
    if engine_config.family == "k0s":
        return [engine_config.config, *machine.glob(directory, "*.toml")]
    return [engine_config.config]


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
    if engine.process:
        _read_command_line(engine, engine.process)


def _read_command_line(engine: Engine, process: Process) -> None:
    """Add the options on the daemon's command line to those of its config files."""
    for value in process.options("--add-runtime"):
        name, _, program = value.partition("=")
        engine.runtimes[name] = program
    engine.default = process.option("--default-runtime") or engine.default
    engine.spec_dirs = tuple(process.options("--cdi-spec-dir")) or engine.spec_dirs
    engine.hook_dirs = tuple(process.options("--hooks-dir")) or engine.hook_dirs
    if _SYSTEMD_CGROUPS in process.options("--exec-opt"):
        engine.has_systemd_cgroups = True


def _parse(machine: ExaminedMachine, path: str) -> dict[str, Any]:
    text = machine.read(path)
    if text is None:
        raise BadFileError("cannot be read", "correct it")
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
    engine.has_systemd_cgroups = _SYSTEMD_CGROUPS in _texts(document.get("exec-opts"))
    cdi = look_up(document, ("features", "cdi"))
    engine.has_cdi = cdi if isinstance(cdi, bool) else engine.has_cdi


def _containerd(engine: Engine, document: Mapping[str, Any]) -> None:
    """Read the CRI table of *document*, which replaces the whole table of an earlier file."""
    base = containerd_document.plugin_path(containerd_document.version_of(document))
    if table_at(document, base):
        engine.runtimes, engine.default, engine.spec_dirs = {}, "", ()
        engine.has_cdi, engine.has_systemd_cgroups = None, False
    _merged_containerd(engine, document)


def _merged_containerd(engine: Engine, document: Mapping[str, Any]) -> None:
    """Read the CRI table of *document*, which k0s merges with its own table."""
    base = containerd_document.plugin_path(containerd_document.version_of(document))
    cri = table_at(document, base)
    for name, item in table_at(cri, ("containerd", "runtimes")).items():
        program = look_up(item, _RUNTIME_OF_CLASS) if isinstance(item, dict) else None
        engine.runtimes[name] = str(program or "")
        if isinstance(item, dict) and look_up(item, ("options", "SystemdCgroup")) is True:
            engine.has_systemd_cgroups = True
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
    directories = look_up(document, (*crio.RUNTIME, "hooks_dir"))
    if isinstance(directories, list):
        # The list of a later file replaces that of an earlier one.
        engine.hook_dirs = _texts(directories)
    manager = look_up(document, (*crio.RUNTIME, "cgroup_manager"))
    engine.has_systemd_cgroups = manager == "systemd" if manager else engine.has_systemd_cgroups
    engine.has_cdi = True


def _podman(engine: Engine, document: Mapping[str, Any]) -> None:
    for name, item in table_at(document, podman.RUNTIMES).items():
        engine.runtimes[name] = str(item[0]) if isinstance(item, list) and item else ""
    engine.default = str(look_up(document, podman.RUNTIME) or engine.default)
    engine.spec_dirs = _texts(look_up(document, ("engine", "cdi_spec_dirs"))) or engine.spec_dirs
    engine.hook_dirs = _appended(look_up(document, ("engine", "hooks_dir")), engine.hook_dirs)
    manager = look_up(document, ("engine", "cgroup_manager"))
    engine.has_systemd_cgroups = manager == "systemd" if manager else engine.has_systemd_cgroups
    engine.has_cdi = True


def _appended(value: object, before: tuple[str, ...]) -> tuple[str, ...]:
    """Return the list *value* of containers.conf, after *before* if *value* says append."""
    if not isinstance(value, list):
        return before
    texts = tuple(item for item in value if isinstance(item, str))
    appends = any(isinstance(item, dict) and item.get("append") is True for item in value)
    return (*before, *texts) if appends else texts


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _template(machine: ExaminedMachine, engine: Engine, directory: str) -> None:
    """Read the templates in *directory*, and the config that k3s or RKE2 has generated of them."""
    generated = Engine(engine.name, engine.restart)
    _load(machine, generated, [f"{directory}/config.toml"], _containerd)
    engine.generated, engine.default = generated.runtimes, generated.default
    engine.spec_dirs, engine.has_cdi, engine.problem = (
        generated.spec_dirs,
        generated.has_cdi,
        generated.problem,
    )
    engine.has_systemd_cgroups = generated.has_systemd_cgroups
    for name in rancher.NAMES:
        text = machine.read(f"{directory}/{name}")
        if text is not None:
            engine.paths.append(f"{directory}/{name}")
            engine.runtimes.update(_OF_TEMPLATE.findall(text))


def _rootless_daemons(machine: ExaminedMachine) -> list[Process]:
    return [process for process in processes.running(machine, "dockerd") if process.uid]


def _rootless(machine: ExaminedMachine, process: Process) -> Engine:
    home = processes.home_of(machine, process.uid)
    path = _config_option(machine, process) or f"{home}/.config/docker/daemon.json"
    engine = Engine(
        f"docker of uid {process.uid}", "systemctl --user restart docker", process=process
    )
    _load(machine, engine, [path], _docker)
    engine.paths = engine.paths or [path]
    return engine


_READERS: dict[str, Reader] = {
    "docker": _docker,
    "containerd": _containerd,
    "k0s": _merged_containerd,
    "crio": _crio,
    "podman": _podman,
}
