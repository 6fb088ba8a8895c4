# SPDX-License-Identifier: Apache-2.0
"""OCI hooks of podman and CRI-O: the hook files that they read, and whether these work."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from gpuruntime.cli.checks import engine_files
from gpuruntime.cli.checks.engine_files import Engine
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok, warn

# Directories in which packages and guides put hook files, whatever the engine's config.
_USUAL_DIRECTORIES = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
_PROGRAMS = (
    "nvidia-container-runtime-hook",
    "nvidia-container-toolkit",
    "gpu-container-runtime-hook",
)


@dataclass(frozen=True, slots=True)
class OciHook:
    """The hook of the hook file *file*: *program*, "" if the file cannot be used."""

    file: str
    program: str

    @property
    def is_of_gpus(self) -> bool:
        """Whether the hook gives GPUs to containers."""
        return posixpath.basename(self.program).removesuffix(".real") in _PROGRAMS

    def is_ours(self, machine: ExaminedMachine) -> bool:
        """Return whether the hook's program is our launcher."""
        return self.is_of_gpus and engine_files.is_ours(machine, self.program)


def effective(machine: ExaminedMachine, engine: Engine) -> list[OciHook]:
    """Return the hooks that *engine* runs; of files with the same name, the last one is used."""
    files: dict[str, str] = {}
    for directory in engine.hook_dirs:
        for path in machine.glob(directory, "*.json"):
            files[posixpath.basename(path)] = path
    return [_read(machine, path) for _, path in sorted(files.items())]


def _read(machine: ExaminedMachine, path: str) -> OciHook:
    try:
        program = json.loads(machine.read(path) or "")["hook"]["path"]
    except (ValueError, TypeError, KeyError, RecursionError):
        program = ""
    return OciHook(path, program if isinstance(program, str) else "")


def check(machine: ExaminedMachine) -> Iterator[Note]:
    """Check the hook files that give GPUs to containers of podman and CRI-O."""
    count = 0
    for engine in engine_files.installed_engines(machine):
        if not engine.hook_dirs:
            continue
        hooks = effective(machine, engine)
        for hook in hooks:
            if not hook.program:
                yield fail(
                    f'"{hook.file}" is not a valid hook file: {engine.name} starts no container '
                    "with it",
                    f'remove "{hook.file}"',
                )
            elif hook.is_of_gpus and not machine.is_program(hook.program):
                yield fail(
                    f'{engine.name} runs the hook "{hook.program}" because of "{hook.file}", and '
                    "it is not a program here: containers do not start",
                    f'remove "{hook.file}"',
                )
            elif hook.is_of_gpus:
                count += 1
                yield ok(f'{engine.name} runs "{hook.program}" because of "{hook.file}"')
        if not (
            any(hook.is_of_gpus for hook in hooks) or engine_files.our_runtimes(machine, engine)
        ):
            yield from _ignored(machine, engine)
    if not count:
        yield ok("no engine runs an OCI hook for GPUs")


def _ignored(machine: ExaminedMachine, engine: Engine) -> Iterator[Note]:
    """Report a hook file for GPUs in a directory that *engine* does not read."""
    for directory in _USUAL_DIRECTORIES:
        if directory in engine.hook_dirs:
            continue
        for path in machine.glob(directory, "*.json"):
            if _read(machine, path).is_of_gpus:
                where = ", ".join(engine.hook_dirs)
                yield warn(
                    f'{engine.name} does not read "{path}": it looks for hooks in {where} only',
                    f'add "{directory}" to "hooks_dir" of {engine.name}',
                )
                return
