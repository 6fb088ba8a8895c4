# SPDX-License-Identifier: Apache-2.0
"""Checks of CDI specs: whether engines read them, and whether they fit the host."""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Iterator, Sequence

from cdi import conflicts, generate, version
from cdi.errors import CdiError
from cdi.registry import ENDINGS, Registry, SpecFile
from cdi.wire import Hook, Spec
from gpuruntime import config as settings
from gpuruntime import remedies
from gpuruntime.cli import spec_dirs
from gpuruntime.cli.checks import engine_files, readers
from gpuruntime.cli.checks.engine_files import Engine
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok, warn
from gpuruntime.cli.checks.spec_registry import (
    edits_of,
    in_use,
    is_hidden,
    load_specs,
    machine_path,
    our_path,
    refresh_action,
)

# Directories in which users have put specs, but which no engine reads.
_UNREAD_DIRECTORIES = (
    "/usr/share/cdi",
    "/usr/local/etc/cdi",
    "/etc/containers/cdi",
    "/etc/cdi.d",
    "/var/cdi",
    "/var/lib/cdi",
    "/etc/docker/cdi",
    "/etc/containerd/cdi",
)
_ALL_READ = 0o444


def directories(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether specs are in directories that engines search and can read."""
    configured = machine.config.spec_dirs
    yield from _unread_directories(machine, configured)
    for directory in configured:
        status = machine.status(directory)
        if status is None:
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield fail(f'"{directory}" is not a directory', "replace it by a directory")
            continue
        if machine.link(directory) is not None:
            yield warn(
                f'"{directory}" is a symlink: podman, containerd and docker before 29 ignore it',
                "replace it by a directory with the specs",
            )
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o055 != 0o055:
            yield warn(
                f'"{directory}" has mode {mode:04o}: rootless engines cannot read it',
                f'run "chmod 755 {directory}"',
            )
    specs = load_specs(machine)
    for engine in engine_files.installed_engines(machine):
        yield from _unread(machine, engine, specs)
    yield ok(", ".join(configured))


def _unread(machine: ExaminedMachine, engine: Engine, specs: Registry) -> Iterator[Note]:
    """Report devices of *specs* that *engine* does not find in its own directories."""
    if not engine.spec_dirs:
        return
    view = load_specs(machine, engine.spec_dirs)
    missing = [name for name in specs.devices if view.find(name) is None]
    file = specs.find(missing[0]) if missing else None
    if file is not None:
        path = machine_path(machine, file.path)
        yield fail(
            f'"{path}" defines "{missing[0]}", and {engine.name} looks for specs in '
            f"{', '.join(engine.spec_dirs)} only",
            f'add "{posixpath.dirname(path)}" to the spec directories in "{engine.paths[-1]}"',
        )


def _unread_directories(machine: ExaminedMachine, configured: Sequence[str]) -> Iterator[Note]:
    """Warn about specs in directories that neither the config nor an engine names."""
    engines = engine_files.installed_engines(machine)
    directories = [*configured, *(path for engine in engines for path in engine.spec_dirs)]
    real_directories = {machine.real(path) for path in directories}
    for directory in (*_UNREAD_DIRECTORIES, "/run/cdi", "/var/run/cdi"):
        if directory in directories or machine.real(directory) in real_directories:
            continue
        names = [name for name in machine.names(directory) if name.endswith(ENDINGS)]
        if names:
            yield warn(
                f'"{directory}/{names[0]}" is in a directory where no engine looks for specs',
                f'move it to "{configured[-1] if configured else "/etc/cdi"}"',
            )


def files(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether each spec can be used: its name, its content, its mode."""
    specs = load_specs(machine)
    for file in specs.files:
        if file.error is not None:
            path = machine_path(machine, file.path)
            yield fail(
                f'"{path}" is not used: {file.error.category}: {file.error}',
                f'correct what "gpuruntime cdi validate {path}" reports',
            )
    maintained = [our_path(machine, path) for path in spec_dirs.MAINTAINED]
    for conflict in conflicts.find(specs.files, maintained):
        stale_path, kept_path = (
            machine_path(machine, conflict.stale),
            machine_path(machine, conflict.kept),
        )
        yield fail(
            f'"{stale_path}" and "{kept_path}" both define {conflicts.some(conflict.names)}: no '
            "engine resolves a device that two files of one directory define",
            f'remove "{stale_path}"',
        )
    for directory in machine.config.spec_dirs:
        for name in machine.names(directory):
            yield from _file(machine, f"{directory}/{name}")
    count = sum(file.spec is not None for file in specs.files)
    if count:
        yield ok(f"{count} with {len(specs.devices)} device(s)")
        return
    text = "no CDI spec: containers can request devices by variables, not by qualified names"
    engines = engine_files.installed_engines(machine)
    needs_specs = any(
        engine.name == "podman" and not engine_files.our_runtimes(machine, engine)
        for engine in engines
    )
    if machine.config.mode == settings.CDI or needs_specs:
        yield warn(text, remedies.stale_spec())
    else:
        yield ok(text)


def _file(machine: ExaminedMachine, path: str) -> Iterator[Note]:
    status, link = machine.status(path), machine.link(path)
    if path.endswith(".yml"):
        yield warn(
            f'"{path}" is not read: names end in .yaml or .json',
            f'rename it to "{path.removesuffix(".yml")}.yaml"',
        )
    elif not path.endswith(ENDINGS):
        return
    elif status is None and link is not None:
        yield fail(f'"{path}" is a symlink whose target does not exist', f'remove "{path}"')
    elif status is not None and stat.S_IMODE(status.st_mode) & _ALL_READ != _ALL_READ:
        yield warn(
            f'"{path}" has mode {stat.S_IMODE(status.st_mode):04o}: rootless engines cannot '
            "read it",
            f'run "chmod 644 {path}"',
        )


def readable(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the installed engines support the versions of the specs in use."""
    engines = list(readers.installed(machine))
    used, _ = in_use(machine)
    for file in used:
        assert file.spec is not None
        for engine in engines:
            if engine.newest and not engine.reads(file.spec["cdiVersion"]):
                newest = ".".join(map(str, engine.newest))
                yield fail(
                    f'"{machine_path(machine, file.path)}" has the CDI version '
                    f"{file.spec['cdiVersion']}{_because(file.spec)}, and {engine.name} "
                    f"{engine.version} supports versions up to {newest}",
                    refresh_action(machine, file, "--force", "--max-spec-version", newest),
                )
    supported = [
        f"{engine.name} {engine.version} "
        + (f"supports CDI {'.'.join(map(str, engine.newest))}" if engine.newest else "has no CDI")
        for engine in engines
    ]
    yield ok(", ".join(supported) or "no engine whose version is known")


def _because(spec: Spec) -> str:
    """Return why *spec* has its version, "" if there is no reason."""
    needed = version.minimum(spec)
    if needed != spec["cdiVersion"]:
        return f", though it needs {needed} only"
    try:
        _, dropped = generate.lower(spec, "0.5.0")
    except CdiError:
        return ""
    return f" ({dropped[0]})" if dropped else ""


def hooks(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the hooks of the specs in use can run, without the image's variables."""
    count = 0
    specs = load_specs(machine)
    for file in specs.files:
        if file.spec is None or is_hidden(specs, file):
            continue
        for edits in edits_of(file):
            for hook in edits.get("hooks") or ():
                count += 1
                yield from _hook(machine, file, hook)
    yield ok(f"{count} hook(s)")


def _hook(machine: ExaminedMachine, file: SpecFile, hook: Hook) -> Iterator[Note]:
    path, where = hook["path"], machine_path(machine, file.path)
    if hook.get("hookName") != "startContainer" and not machine.is_program(path):
        yield fail(
            f'the hook "{path}" of "{where}" is not a program on this host',
            refresh_action(machine, file, "--force"),
        )
    if not hook.get("env"):
        yield warn(
            f'the hook "{path}" of "{where}" has no env: some low-level runtimes start it with '
            "variables of the image",
            refresh_action(machine, file, "--force"),
        )
    yield from _ldconfig(machine, file, hook.get("args") or [])


def _ldconfig(machine: ExaminedMachine, file: SpecFile, words: Sequence[str]) -> Iterator[Note]:
    """Report an ldconfig among the arguments *words* of a hook that does not exist."""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option != "--ldconfig-path":
            continue
        path = value if equals else "".join(words[index + 1 : index + 2])
        if path.startswith("/") and not machine.is_program(path):
            yield fail(
                f'a hook of "{machine_path(machine, file.path)}" has "--ldconfig-path {path}", '
                "which is not a program on this host",
                refresh_action(machine, file, "--force"),
            )
