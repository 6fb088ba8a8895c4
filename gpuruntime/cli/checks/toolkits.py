# SPDX-License-Identifier: Apache-2.0
"""Checks of toolkits: whether another one is installed, and whether ours is complete."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from gpuruntime import config as settings
from gpuruntime import remedies
from gpuruntime.cli.checks import engine_files, processes, readers
from gpuruntime.cli.checks.engine_files import Engine
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok, warn
from gpuruntime.configfile import check
from gpuruntime.configfile import file as files
from gpuruntime.errors import ConfigError
from gpuruntime.snapshots import hook_log, inventory_snapshot
from gpuruntime.snapshots.inventory_snapshot import SNAPSHOT, InventorySnapshot
from gpuruntime.snapshots.storage import RUN_DIRECTORY
from gpuruntime.trusted_files import may_trust

_INCUMBENT = "nvidia-container-runtime"
_PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "nvidia-docker2",
    "nvidia-container-runtime",
)
# Releases with a fault that breaks containers, and the fault.
_BROKEN = {
    "1.14.0": "reads the wrong config file",
    "1.17.0": "fails if an image already has a symlink that it creates",
}
_LDCONFIG = "nvidia-container-cli.ldconfig"
_NO_CGROUPS = "nvidia-container-cli.no-cgroups"
_OURS, _THEIRS = "ours", "incumbent"
_INCUMBENT_CONFIG = "/etc/nvidia-container-runtime/config.toml"
# One module of each package of the start path, below the package's directory.
START_MODULES = (
    *("config", "oci/bundle", "plan/injection", "request/parse", "shim/main"),
    "snapshots/inventory_snapshot",
)
_PYTHON = re.compile(rb"/[\x21-\x7e]{1,200}/python3[0-9.]*(?=\0)")


def config(machine: ExaminedMachine) -> Iterator[Note]:
    """Check the config.toml in force, as `config check` does."""
    path = machine.config_path()
    yield from _other_configs(machine, path)
    if not path:
        yield ok("no config.toml: the defaults are in force")
        return
    text = machine.read(path)
    if text is None:
        yield fail(f'"{path}" cannot be read', "replace it by a config file")
        return
    try:
        _, findings = check.examine(files.parse(text, path))
    except ConfigError as error:
        yield fail(error.message, error.hint or "correct the file")
        return
    for finding in findings:
        what = f'"{path}": {finding.message}'
        if finding.severity == "error":
            yield fail(what, finding.hint)
        elif finding.severity == "warning":
            yield warn(what, finding.hint or "correct it")
    hidden = [
        other
        for other in settings.search_path(machine.environ)
        if other != path and machine.exists(other)
    ]
    yield ok(f'"{path}"' + (f', which hides "{hidden[0]}"' if hidden else ""))


def _other_configs(machine: ExaminedMachine, path: str) -> Iterator[Note]:
    """Warn if the environment of an engine makes our runtime read another config."""
    for engine in engine_files.installed_engines(machine):
        if not (engine.process and engine_files.our_runtimes(machine, engine)):
            continue
        environ = processes.environment(machine, engine.process)
        path_in_use = next((p for p in settings.search_path(environ) if machine.exists(p)), "")
        if environ and path_in_use != path:
            config_in_use = f'the config "{path_in_use}"' if path_in_use else "the default config"
            yield warn(
                f"the environment of {engine.process.name} has containers use {config_in_use}, "
                f'not "{path}" as this shell does',
                f'restart it with the environment variable GPURUNTIME_CONFIG="{path}"'
                if path
                else f'set GPURUNTIME_CONFIG="{path_in_use}" in this shell',
            )


def ldconfig(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the ldconfig that config.toml names exists, where it is used."""
    mode, value = machine.config["ldconfig-mode"], machine.config[_LDCONFIG]
    path = value.removeprefix("@")
    if mode != "host":
        yield ok(f'none is run: "ldconfig-mode" is "{mode}"')
    elif value.startswith("@") and not machine.is_program(path):
        existing = [
            item for item in ("/sbin/ldconfig.real", "/sbin/ldconfig") if machine.is_program(item)
        ]
        yield fail(
            f'"{path}", the ldconfig that config.toml names, is not a program here',
            f'set "{_LDCONFIG}" to "@{existing[0]}" in config.toml'
            if existing
            else 'set "ldconfig-mode" to "merge" in config.toml',
        )
    else:
        yield ok(f'"{value}"')


def toolkits(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether another toolkit is installed, and which one the engines use."""
    packages = readers.packages_of(machine, _PACKAGES)
    programs = [
        path
        for name in (_INCUMBENT, f"{_INCUMBENT}-hook", "nvidia-ctk", "nvidia-cdi-hook")
        if (path := machine.find_program(name)) and not machine.is_ours(path)
    ]
    for name, version in packages.items():
        release = re.match(r"\d+\.\d+\.\d+", version)
        if release and release[0] in _BROKEN:
            yield fail(
                f"{name} {version} is installed, which {_BROKEN[release[0]]}",
                "update it",
            )
    if not (packages or programs):
        yield ok("no other toolkit is installed")
        return
    name = next((f"{n} {v}" for n, v in packages.items()), "") or f'"{programs[0]}"'
    if machine.config[_NO_CGROUPS]:
        yield warn(
            f'"{_NO_CGROUPS}" is set, which takes the GPUs from rootful containers of {name}; '
            "our runtime does not need it",
            f'run "gpuruntime config --set {_NO_CGROUPS}=false --in-place"',
        )
    engines = engine_files.installed_engines(machine)
    for engine in engines:
        kinds = {_kind(machine, path): name for name, path in engine.runtimes.items()}
        if {_OURS, _THEIRS} <= kinds.keys():
            yield warn(
                f"{engine.name} knows the runtimes of two toolkits, {name} and ours: a container "
                "gets its GPUs from the one whose name it is started with",
                f'remove the runtime "{kinds[_THEIRS]}" from the config of {engine.name}',
            )
            return
    docker = next((engine for engine in engines if engine.name == "docker"), None)
    hook = _hook_of_docker(machine, docker) if docker else ""
    if hook and not machine.is_ours(hook) and engine_files.runtime_in_use(machine):
        yield warn(
            f'two toolkits are installed, {name} and ours: "docker run --gpus" runs "{hook}" of '
            "the other one",
            f"remove {name}",
        )
    elif engine_files.runtime_in_use(machine):
        yield ok(f"{name} is installed beside ours, and no engine uses both")
    else:
        yield ok(f"{name} is installed, and our runtime is not")


def _hook_of_docker(machine: ExaminedMachine, docker: Engine) -> str:
    """Return the hook that `docker run --gpus` runs: the first on the PATH of dockerd."""
    environ = processes.environment(machine, docker.process) if docker.process else {}
    return machine.find_program(f"{_INCUMBENT}-hook", environ.get("PATH"))


def _kind(machine: ExaminedMachine, path: str) -> str:
    """Return which toolkit the runtime *path* belongs to, "" for a low-level runtime."""
    program = machine.find_program(path) if path else ""
    if not program:
        return ""
    if machine.is_ours(program):
        return _OURS
    return _THEIRS if os.path.basename(path).startswith(_INCUMBENT) else ""


def loop(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether a low-level runtime exists that is not our own runtime."""
    skipped = []
    path_variable = engine_files.search_path(machine)
    for candidate in machine.config.runtimes:
        path = machine.find_program(candidate, path_variable)
        if not path:
            continue
        if machine.is_ours(path):
            skipped.append(path)
        elif os.path.basename(path).startswith(_INCUMBENT):
            yield fail(
                f'the low-level runtime "{path}" is that of another toolkit, which would inject '
                "GPUs once more",
                'set "nvidia-container-runtime.runtimes" in config.toml to ["runc", "crun"]',
            )
            return
        else:
            if skipped:
                yield warn(
                    f'"{skipped[0]}" in "nvidia-container-runtime.runtimes" is our own runtime: '
                    f'it is skipped, and "{path}" is used',
                    'remove it from "nvidia-container-runtime.runtimes" in config.toml',
                )
            yield ok(f'"{path}"')
            return
    names = ", ".join(machine.config.runtimes)
    what = (
        f'the only low-level runtime, "{skipped[0]}", is our own runtime'
        if skipped
        else f"no low-level runtime is installed: none of {names}"
    )
    yield fail(what, "install runc")


def namespace(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the host is in a user namespace, where no device node can be created."""
    fields = (machine.read("/proc/self/uid_map") or "").split()
    if not remedies.in_user_namespace(machine):
        yield ok("the initial one: device nodes can be created")
        return
    text = machine.read(_INCUMBENT_CONFIG) or ""
    is_set = re.search(r"^\s*no-cgroups\s*=\s*true", text, re.MULTILINE)
    where = f"in a user namespace, {' '.join(fields[:3])}"
    if machine.find_program("nvidia-container-cli") and not is_set:
        yield warn(
            f"{where}: the hook of the other toolkit may not edit cgroups here, and containers "
            "fail with bpf_prog_query",
            "start containers with our runtime, which needs no such right",
        )
    else:
        yield ok(f"{where}: only nodes that the outer host has created can be used")


def snapshot(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether containers can start from a saved inventory, without querying the driver."""
    directory = RUN_DIRECTORY
    status = machine.status(directory)
    if status is None:
        yield ok("none yet: the first container with a GPU saves it")
    elif not may_trust(status):
        yield fail(
            f'"{directory}" can be written by users other than root: each container start '
            "queries the driver again",
            f'run "rm -r {directory}" as root',
        )
    elif not machine.exists(f"{directory}/{SNAPSHOT}"):
        yield ok("none yet: the first container with a GPU saves it")
    elif machine.is_live and not _is_valid(machine):
        yield ok("of an earlier state of the host: the next container with a GPU replaces it")
    else:
        yield ok(f'"{directory}/{SNAPSHOT}" is valid')


def _is_valid(machine: ExaminedMachine) -> bool:
    root, variant = machine.config.driver_root or "/", inventory_snapshot.variant(machine.config)
    return InventorySnapshot(root, _never, variant=variant).read() is not None


def _never() -> object:
    raise AssertionError


def hook_messages(machine: ExaminedMachine) -> Iterator[Note]:
    """Report the last messages of hooks, which an engine with crun does not show."""
    status = machine.status(hook_log.PATH)
    text = machine.read(hook_log.PATH)
    if status is not None and text is None:
        yield ok(f'only root can read "{hook_log.PATH}"')
        return
    messages = hook_log.parse(text or "")
    failed = [(when, what) for when, word, what in messages if word == hook_log.FAILED]
    if failed:
        # The first line of the last failure; the second is its hint.
        when, what = next(row for row in failed if row[0] == failed[-1][0])
        yield warn(
            f"at {when} a hook failed: {what}",
            f'read "{hook_log.PATH}", and remove it when the cause is cured',
        )
    elif messages:
        when, _, what = messages[-1]
        yield ok(f"no hook has failed; the last warning, at {when}: {what}")
    else:
        yield ok("no messages")


def bytecode(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the start path is compiled for the interpreter that runs it.

    Otherwise each container start compiles it again.
    """
    if not machine.is_live:
        yield ok("not checked: this is a tree of files")
        return
    launcher = engine_files.runtime_in_use(machine)
    if not launcher:
        yield ok(f"{engine_files.RUNTIME} is not installed")
        return
    python = _interpreter(machine, launcher)
    tag = machine.output(python, "-I", "-S", "-c", _PRINT_TAG).strip()
    if not tag:
        yield fail(f'"{python}", which runs the start path, does not work', "install Python 3")
        return
    directory = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for name in START_MODULES:
        source = os.path.join(directory, f"{name}.py")
        folder, module = os.path.split(os.path.join(directory, name))
        bytecode_file = os.path.join(folder, "__pycache__", f"{module}.{tag}.pyc")
        if not _is_compiled(source, bytecode_file):
            yield warn(
                f'"{source}" is not compiled for "{python}" ({tag}): each container start '
                "compiles it again",
                f'run "{python} -m compileall -q {directory}" as root',
            )
            return
    yield ok(f'compiled for "{python}" ({tag})')


_PRINT_TAG = "import sys;print(sys.implementation.cache_tag)"


def _interpreter(machine: ExaminedMachine, launcher: str) -> str:
    """Return the interpreter that *launcher* starts; it also contains the path of the CLI's."""
    matches = _PYTHON.findall(machine.read_bytes(launcher) or b"")
    paths = [os.fsdecode(path) for path in matches]
    others = [path for path in paths if not path.startswith(f"{sys.prefix}/")]
    return (others or paths or ["/usr/bin/python3"])[0]


def _is_compiled(source: str, bytecode_file: str) -> bool:
    """Return whether *bytecode_file* is compiled from the current *source*, as in PEP 552."""
    try:
        status = os.stat(source)
        with open(bytecode_file, "rb") as stream:
            header = stream.read(16)
    except OSError:
        return False
    flags, time_, size = (int.from_bytes(header[at : at + 4], "little") for at in (4, 8, 12))
    if flags:
        # The file has a hash of the source instead, which Python checks or trusts.
        return True
    return (time_, size) == (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
