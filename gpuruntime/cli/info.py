# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime info`: print what a bug report needs, without secrets; reads only."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Iterator
from typing import Any

import click

from cdi.complete import in_user_namespace
from gpuruntime import __version__, remedies
from gpuruntime.cli import interpreter
from gpuruntime.cli import system_devices as devices
from gpuruntime.cli.checks import driver_checks, engine_files, readers, spec_fresh, spec_registry
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.output import write_stdout
from gpuruntime.config import DEFAULTS
from gpuruntime.errors import GpuRuntimeError, escape
from gpuruntime.formats import driver_version
from gpuruntime.snapshots import hook_log, inventory_json, inventory_snapshot
from gpuruntime.snapshots.inventory_snapshot import inventory_of

FORMAT = 1
_PROGRAMS = ("runc", "crun", "containerd", "dockerd", "podman", "crio", "systemctl")
_OURS = ("gpu-container-runtime", "gpu-container-runtime-hook", "gpu-cdi-hook")
_MAX_PROGRAM_BYTES = 1 << 20
_MAX_MESSAGES = 20
SLOWER = (
    "Python: every call is slower, and a hook starts in its caller's environment; "
    'for the native launcher install by a package, the bundle or "make install"'
)
_HIERARCHY = re.compile(r" (/sys/fs/cgroup\S*) .* - (cgroup2?) \S+ (\S+)$", re.MULTILINE)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--no-driver", is_flag=True, help="Do not query the driver, which may hang or initialize GPUs."
)
def info(*, as_json: bool, no_driver: bool) -> None:
    """Print versions, the config in force, the driver, its devices, cgroups, CDI specs, engines.

    Attach the output to a bug report. It contains UUIDs of GPUs, file names and device numbers,
    but no environment variables. The last messages of hooks are all that it has about containers;
    they may name a file of a container.
    """
    report = collect(ExaminedMachine("/", os.environ), ask_driver=not no_driver)
    if as_json:
        write_stdout(json.dumps(report, indent=2) + "\n")
    else:
        write_stdout("".join(f"{line}\n" for line in _lines("", report)))


def collect(machine: ExaminedMachine, *, ask_driver: bool) -> dict[str, Any]:
    """Return the report on *machine* as JSON; a test can load its `inventory`."""
    config = machine.config
    ours = {name: machine.find_program(name) or machine.beside(name) for name in _OURS}
    inventory, problem = _inventory(machine) if ask_driver else (None, "not queried")
    return {
        "format": FORMAT,
        "gpuruntime": __version__,
        "python": platform.python_version(),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "distribution": _distribution(machine),
        "programs": {name: _version(machine, name) for name in _PROGRAMS},
        "ours": ours,
        "launcher": _launcher(machine, ours.values()),
        "engines": {item.name: item.version for item in readers.installed(machine)},
        "config": {
            "path": machine.config_path(),
            # Options that are left out have the defaults of this version.
            "values": {
                key: _without_secrets(key, value)
                for key, value in config.values.items()
                if DEFAULTS.get(key) != value
            },
        },
        "driver": _driver(machine),
        "inventory": inventory,
        "inventory_problem": problem,
        "devices": list(_nodes(machine)),
        "cgroups": _cgroups(machine),
        "user_namespace": {
            "is_one": in_user_namespace({}),
            "uid_map": (machine.read("/proc/self/uid_map") or "").split(),
            "euid": os.geteuid(),
        },
        "specs": list(_specs(machine)),
        "runtimes": list(_runtimes(machine)),
        "hook_messages": (machine.read(hook_log.PATH) or "").splitlines()[-_MAX_MESSAGES:],
    }


def _without_secrets(key: str, value: Any) -> Any:  # noqa: ANN401 (as many types as options)
    """Return *value* of the option *key*, without the values of environment variables."""
    if key.endswith(".environment") and isinstance(value, list):
        return [f"{str(entry).partition('=')[0]}=..." for entry in value]
    return value


def _distribution(machine: ExaminedMachine) -> str:
    text = machine.read("/etc/os-release") or ""
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', text, re.MULTILINE)
    return match[1] if match else ""


def _version(machine: ExaminedMachine, name: str) -> dict[str, str] | None:
    path = machine.find_program(name)
    if not path:
        return None
    lines = machine.output(path, "--version").splitlines()
    return {"path": path, "version": lines[0] if lines else ""}


def _launcher(machine: ExaminedMachine, paths: Iterable[str]) -> str:
    """Return what the commands at *paths* are written in, "" if none is installed."""
    data = [machine.read_bytes(path, _MAX_PROGRAM_BYTES) for path in paths if path]
    if any(content is not None and content.startswith(b"#!") for content in data):
        return SLOWER
    return "native" if any(data) else ""


def _driver(machine: ExaminedMachine) -> dict[str, Any]:
    return {
        "root": machine.config.driver_root or "/",
        "module": driver_checks.loaded(machine),
        "module_text": (machine.read(driver_checks.MODULE) or "").splitlines()[:1],
        "params": (machine.read("/proc/driver/nvidia/params") or "").splitlines(),
        "majors": devices.majors(machine.read("/proc/devices") or ""),
        "bus": remedies.drivers_on_bus(machine),
    }


def _inventory(machine: ExaminedMachine) -> tuple[dict[str, Any] | None, str]:
    """Return the inventory and "", or None and the error."""
    try:
        reply = inventory_snapshot.discover_machine(machine.config, interpreter.of_slow_path())
        return inventory_json.encode(inventory_of(reply)), ""
    except GpuRuntimeError as error:
        return None, str(error)


def _nodes(machine: ExaminedMachine) -> Iterator[str]:
    """Yield a line for each of the driver's nodes, similar to `ls -l`."""
    dev = machine.dev()
    for path in [*machine.glob(dev, "nvidia*"), *machine.glob(f"{dev}/nvidia-caps", "*")]:
        status = machine.lstatus(path)
        if status is not None and status.st_rdev:
            numbers = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            yield f"{status.st_mode & 0o7777:04o} {status.st_uid}:{status.st_gid} {numbers} {path}"


def _cgroups(machine: ExaminedMachine) -> dict[str, Any]:
    text = machine.read("/proc/self/mountinfo") or ""
    return {
        "unified": machine.exists("/sys/fs/cgroup/cgroup.controllers"),
        "systemd": machine.is_directory("/run/systemd/system"),
        "hierarchies": [" ".join(fields) for fields in _HIERARCHY.findall(text)],
    }


def _specs(machine: ExaminedMachine) -> Iterator[dict[str, Any]]:
    for file in spec_registry.load_specs(machine).files:
        if file.spec is None:
            yield {"path": file.path, "error": f"{file.error}"}
            continue
        edits = [file.spec.get("containerEdits") or {}]
        edits += [device["containerEdits"] for device in file.spec["devices"]]
        mounts = [mount["hostPath"] for item in edits for mount in item.get("mounts") or ()]
        names = (os.path.basename(path) for path in mounts)
        # Other files are not versioned like the driver.
        versions = {driver_version.of_name(n) for n in names if n.startswith(spec_fresh.VERSIONED)}
        yield {
            "path": file.path,
            "version": file.spec["cdiVersion"],
            "kind": file.spec["kind"],
            "devices": sorted(file.devices),
            "driver_versions": sorted(versions - {""}),
            "hooks": sorted({h["path"] for item in edits for h in item.get("hooks") or ()}),
        }


def _runtimes(machine: ExaminedMachine) -> Iterator[dict[str, Any]]:
    for engine in engine_files.installed_engines(machine):
        yield {
            "engine": engine.name,
            "files": engine.paths,
            "runtimes": {**engine.generated, **engine.runtimes},
            "default": engine.default,
            "problem": engine.problem,
        }


def _lines(name: str, value: Any) -> Iterator[str]:  # noqa: ANN401 (JSON)
    """Yield the lines `name.name: value` of *value*."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _lines(f"{name}.{key}" if name else key, item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _lines(f"{name}[{index}]", item)
    elif isinstance(value, list):
        yield f"{escape(name)}: {escape(', '.join(map(str, value)))}"
    else:
        shown = "-" if value in (None, "", {}) else str(value)
        yield f"{escape(name)}: {escape(shown)}"
