# SPDX-License-Identifier: Apache-2.0
"""Checks of toolkits: is another one installed, which one is called, and is ours complete."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from gpuruntime import config as settings
from gpuruntime.cli.checks import engine_files, readers
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok, warn
from gpuruntime.configfile import check
from gpuruntime.configfile import file as files
from gpuruntime.errors import ConfigError
from gpuruntime.snapshots import hook_log
from gpuruntime.snapshots.inventory_snapshot import SNAPSHOT, InventorySnapshot
from gpuruntime.snapshots.storage import RUN_DIRECTORY
from gpuruntime.trusted_files import may_trust

RUNTIME = "gpu-container-runtime"
_INCUMBENT = "nvidia-container-runtime"
_PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "nvidia-docker2",
    "nvidia-container-runtime",
)
# Releases that break containers by themselves, and how.
_BROKEN = {
    "1.14.0": "reads the wrong config file",
    "1.17.0": "fails where an image has a link of its own at the place of one of its links",
}
_LDCONFIG = "nvidia-container-cli.ldconfig"
_NO_CGROUPS = "nvidia-container-cli.no-cgroups"
_INCUMBENT_CONFIG = "/etc/nvidia-container-runtime/config.toml"
# One of each room of the start path, below the package's directory.
START_MODULES = (
    *("config", "oci/bundle", "plan/injection", "request/parse", "shim/main"),
    "snapshots/inventory_snapshot",
)
_PYTHON = re.compile(rb"/[\x21-\x7e]{1,200}/python3[0-9.]*(?=\0)")


def config(machine: ExaminedMachine) -> Iterator[Note]:
    """Check the config.toml in force, as `config check` does."""
    path = machine.config_path()
    if not path:
        yield ok("none, so the defaults")
        return
    text = machine.read(path)
    if text is None:
        yield fail(f'"{path}" cannot be read', "put a config file there, or remove it")
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
    yield ok(f'"{path}"')


def ldconfig(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the ldconfig that config.toml names is there."""
    value = machine.config[_LDCONFIG]
    path = value.removeprefix("@")
    if value == settings.DEFAULTS[_LDCONFIG]:
        yield ok("the host's own is found by itself")
    elif value.startswith("@") and not machine.is_program(path):
        others = [
            item for item in ("/sbin/ldconfig.real", "/sbin/ldconfig") if machine.is_program(item)
        ]
        there = f'; there is "{others[0]}"' if others else ""
        yield fail(
            f'config.toml names "{path}" as {_LDCONFIG}, which is no program here{there}',
            f'take "{_LDCONFIG}" out of config.toml: the right one is found by itself',
        )
    else:
        yield ok(f'"{value}"')


def toolkits(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether there is another toolkit, whether it is a broken one, and who is called."""
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
                "update it, or remove it",
            )
    if not (packages or programs):
        yield ok("no other toolkit is installed")
        return
    name = next((f"{n} {v}" for n, v in packages.items()), "") or f'"{programs[0]}"'
    if machine.config[_NO_CGROUPS]:
        yield warn(
            f'"{_NO_CGROUPS}" is set, which takes the GPUs from rootful containers of {name}; '
            "we need it for none",
            f'run "gpuruntime config --set {_NO_CGROUPS}=false --in-place"',
        )
    ours = machine.find_program(RUNTIME) or machine.beside(RUNTIME)
    both = [
        engine.name
        for engine in engine_files.installed_engines(machine)
        if len({_kind(machine, path) for path in engine.runtimes.values()} - {""}) > 1
    ]
    if both:
        yield warn(
            f"{both[0]} knows the runtimes of two toolkits, {name} and ours: which of them gives "
            "a container its GPUs depends on the name it is started with",
            "take one of them out of the engine's config",
        )
    elif ours:
        yield warn(
            f"two toolkits are installed, {name} and ours: docker's --gpus goes to the one whose "
            "hook it finds first",
            "remove the one that is not to be used",
        )
    else:
        yield ok(f"{name} is installed, and our runtime is not")


def _kind(machine: ExaminedMachine, path: str) -> str:
    found = machine.find_program(path) if path else ""
    if not found:
        return ""
    if machine.is_ours(found):
        return "ours"
    return "incumbent" if os.path.basename(path).startswith(_INCUMBENT) else ""


def loop(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the low-level runtime is one, and not we ourselves."""
    skipped = []
    for candidate in machine.config.runtimes:
        path = machine.find_program(candidate)
        if not path:
            continue
        if machine.is_ours(path):
            skipped.append(path)
        elif os.path.basename(path).startswith(_INCUMBENT):
            yield fail(
                f'"{path}", the low-level runtime, is another toolkit\'s front to one: it would '
                "inject once more",
                'name runc or crun in "nvidia-container-runtime.runtimes" of config.toml',
            )
            return
        else:
            if skipped:
                yield warn(
                    f'the low-level runtime "{skipped[0]}" is our own: it is passed over for '
                    f'"{path}"',
                    'take it out of "nvidia-container-runtime.runtimes" of config.toml',
                )
            yield ok(f'"{path}"')
            return
    names = ", ".join(machine.config.runtimes)
    what = (
        f'the low-level runtime "{skipped[0]}" is our own, and there is no other'
        if skipped
        else f"no low-level runtime found, looked for {names}"
    )
    yield fail(what, 'install runc, or name one in "nvidia-container-runtime.runtimes"')


def namespace(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the host is itself a container of somebody, which limits what can be done."""
    fields = (machine.read("/proc/self/uid_map") or "").split()
    if fields[:3] == ["0", "0", "4294967295"] or not fields:
        yield ok("the host's own: devices are granted by rules of each container")
        return
    text = machine.read(_INCUMBENT_CONFIG) or ""
    sets = re.search(r"^\s*no-cgroups\s*=\s*true", text, re.MULTILINE)
    where = f"in a user namespace, {' '.join(fields[:3])}"
    if machine.find_program("nvidia-container-cli") and not sets:
        yield warn(
            f"{where}: the hook of the other toolkit may not edit cgroups here, and containers "
            "fail with bpf_prog_query",
            "start containers with our runtime, which needs no such right",
        )
    else:
        yield ok(f"{where}: nodes can only be those that the host has made")


def snapshot(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether containers can start from what was found before, or each asks the driver."""
    directory = RUN_DIRECTORY
    status = machine.status(directory)
    if status is None:
        yield ok("none yet: the first container that asks for a GPU makes it")
    elif not may_trust(status):
        yield fail(
            f'"{directory}" may be written by others than root: each container asks the driver '
            "anew",
            f'run "rm -r {directory}" as root',
        )
    elif not machine.exists(f"{directory}/{SNAPSHOT}"):
        yield ok("none yet: the first container that asks for a GPU makes it")
    elif machine.is_live and not _fits(machine):
        yield ok("of another state of the host: the next container makes it anew")
    else:
        yield ok(f'"{directory}/{SNAPSHOT}", made once for all containers')


def _fits(machine: ExaminedMachine) -> bool:
    root = machine.config.driver_root or "/"
    return InventorySnapshot(root, _never).read() is not None


def _never() -> object:
    raise AssertionError


def hook_messages(machine: ExaminedMachine) -> Iterator[Note]:
    """See what hooks have said last, which an engine with crun does not show."""
    status = machine.status(hook_log.PATH)
    text = machine.read(hook_log.PATH)
    if status is not None and text is None:
        yield ok(f'"{hook_log.PATH}" can be read by root only')
        return
    said = hook_log.parse(text or "")
    failed = [(when, what) for when, word, what in said if word == hook_log.FAILED]
    if failed:
        # The first line of the last failure; the next is its hint.
        when, what = next(row for row in failed if row[0] == failed[-1][0])
        yield warn(
            f"at {when} a hook failed: {what}",
            f'read "{hook_log.PATH}", and remove it when that is mended',
        )
    elif said:
        when, _, what = said[-1]
        yield ok(f"none has failed; the last warning, at {when}: {what}")
    else:
        yield ok("none has said anything")


def bytecode(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the modules of the start path are compiled for the interpreter that runs them.

    Without that each container's start compiles them again.
    """
    if not machine.is_live:
        yield ok("not looked at: this is a tree of files")
        return
    launcher = machine.find_program(RUNTIME) or machine.beside(RUNTIME)
    if not launcher:
        yield ok(f"{RUNTIME} is not installed")
        return
    python = _interpreter(machine, launcher)
    tag = machine.output(python, "-I", "-S", "-c", _TELL_TAG).strip()
    if not tag:
        yield fail(f'"{python}", which runs the start path, does not work', "install Python 3")
        return
    directory = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for name in START_MODULES:
        source = os.path.join(directory, f"{name}.py")
        folder, module = os.path.split(os.path.join(directory, name))
        made = os.path.join(folder, "__pycache__", f"{module}.{tag}.pyc")
        if not _is_compiled(source, made):
            yield warn(
                f'"{source}" is not compiled for "{python}" ({tag}): each container\'s start '
                "compiles it",
                f'run "{python} -m compileall -q {directory}" as root',
            )
            return
    yield ok(f'compiled for "{python}" ({tag})')


_TELL_TAG = "import sys;print(sys.implementation.cache_tag)"


def _interpreter(machine: ExaminedMachine, launcher: str) -> str:
    """Return the interpreter that *launcher* starts: it has its path, and that of the CLI's."""
    found = _PYTHON.findall(machine.read_bytes(launcher) or b"")
    paths = [os.fsdecode(path) for path in found]
    others = [path for path in paths if not path.startswith(f"{sys.prefix}/")]
    return (others or paths or ["/usr/bin/python3"])[0]


def _is_compiled(source: str, made: str) -> bool:
    """Return whether the bytecode *made* is of *source* as it is: PEP 552, by time and length."""
    try:
        status = os.stat(source)
        with open(made, "rb") as stream:
            header = stream.read(16)
    except OSError:
        return False
    flags, time_, size = (int.from_bytes(header[at : at + 4], "little") for at in (4, 8, 12))
    if flags:
        # By a hash of the source, which is checked or trusted by whoever made it.
        return True
    return (time_, size) == (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
