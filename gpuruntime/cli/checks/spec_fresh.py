# SPDX-License-Identifier: Apache-2.0
"""Check whether CDI specs fit the host: driver version, files, device nodes, MIG devices."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence

from cdi.registry import SpecFile
from cdi.wire import DeviceNode
from gpuruntime import remedies
from gpuruntime.cli import spec_renewal, stamp
from gpuruntime.cli import system_devices as devices
from gpuruntime.cli.checks import driver_checks
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok, warn
from gpuruntime.cli.checks.spec_registry import edits_of, in_use, machine_path, refresh_action
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.formats import driver_version

VERSIONED = ("libcuda.so.", "libnvidia-ml.so.")
_MAX_NAMED = 3


def fresh(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the specs in use fit the driver, the device nodes and the MIG devices."""
    used, hidden = in_use(machine)
    for file in used:
        notes = list(_stale(machine, file))
        yield from notes
        if not notes and machine.is_live:
            yield from _changed(machine, file)
    if used:
        yield from _migs(machine, used)
    yield from _hidden_note(machine, hidden)
    yield ok("as a refresh would write them" if used else "no spec of NVIDIA's devices")


def _action(machine: ExaminedMachine, file: SpecFile) -> str:
    """Return the action that makes *file* fit the host: repair the driver, otherwise refresh."""
    version = driver_checks.loaded(machine)
    if not version:
        return remedies.unloaded_module(machine, machine.config.driver_root)[1]
    libraries = driver_checks.library_versions(machine)
    if libraries and version not in libraries:
        return remedies.version_mismatch(machine, version, libraries[0])
    return refresh_action(machine, file)


def _stale(machine: ExaminedMachine, file: SpecFile) -> Iterator[Note]:
    """Report files and nodes in *file* that the host does not have."""
    path, refresh = (
        machine_path(machine, file.path),
        _action(machine, file),
    )
    loaded = driver_checks.loaded(machine)
    missing = []
    for mount in (mount for edits in edits_of(file) for mount in edits.get("mounts") or ()):
        source = mount["hostPath"]
        name = posixpath.basename(source)
        version_ = driver_version.of_name(name) if name.startswith(VERSIONED) else ""
        if loaded and version_ and version_ != loaded:
            yield fail(f'"{path}" is for driver {version_}, and {loaded} is loaded', refresh)
            return
        if source.startswith("/") and machine.status(source) is None:
            missing.append(source)
    if missing:
        names = ", ".join(missing[:_MAX_NAMED])
        yield fail(f'"{path}" mounts files that do not exist: {names}', refresh)
    for node in (node for edits in edits_of(file) for node in edits.get("deviceNodes") or ()):
        yield from _stale_node(machine, file, node)


def _stale_node(machine: ExaminedMachine, file: SpecFile, node: DeviceNode) -> Iterator[Note]:
    """Report that *node* of *file* does not exist, or is another device."""
    assert file.spec is not None
    path, source = (
        machine_path(machine, file.path),
        node.get("hostPath") or node["path"],
    )
    status = machine.status(source)
    if status is None:
        yield fail(
            f'"{path}" names the device node "{source}", which does not exist',
            remedies.missing_spec_node(
                machine, source, path, file.spec["kind"], machine.config.driver_root
            ),
        )
    elif node.get("major") and (node["major"], node.get("minor", 0)) != (
        os.major(status.st_rdev),
        os.minor(status.st_rdev),
    ):
        yield fail(
            f'"{path}" has "{source}" as {node["major"]}:{node.get("minor", 0)}, which is '
            "another device in this boot",
            _action(machine, file),
        )


def _changed(machine: ExaminedMachine, file: SpecFile) -> Iterator[Note]:
    """Warn if `cdi refresh` would write a different spec *file* now."""
    spec_stamp = stamp.read(file.path)
    try:
        changed = spec_renewal.differences(file.path, spec_stamp) if spec_stamp is not None else []
    except GpuRuntimeError:
        # The checks of the driver report why no spec can be generated now.
        return
    if changed:
        yield warn(
            f'"{file.path}" does not fit the host since these have changed: {", ".join(changed)}',
            _action(machine, file),
        )


def _migs(machine: ExaminedMachine, used: Sequence[SpecFile]) -> Iterator[Note]:
    """Compare the MIG devices of the specs *used* with the host's, by their nodes."""
    minors = devices.mig_minors(machine.read("/proc/driver/nvidia-caps/mig-minors") or "")
    instances = [
        name
        for name in devices.existing_instances(machine.path("/proc"))
        if name.startswith("gpu") and name in minors
    ]
    nodes = {
        posixpath.basename(node["path"]): file
        for file in used
        for edits in edits_of(file)
        for node in edits.get("deviceNodes") or ()
    }
    # A GPU instance without compute instances is not a device yet.
    usable = [name for name in instances if "/ci" in name]
    missing = [name for name in usable if f"nvidia-cap{minors[name]}" not in nodes]
    if missing:
        yield fail(
            f"no spec has the MIG instance {_short(missing[0])}",
            _action(machine, used[0]),
        )
    expected = {f"nvidia-cap{minors[name]}" for name in instances}
    expected |= {f"nvidia-cap{minors.get(name)}" for name in ("config", "monitor")}
    stale_nodes = {name for name in nodes if name.startswith("nvidia-cap")} - expected
    if minors and stale_nodes:
        name = min(stale_nodes)
        yield fail(
            f'a spec has "{name}", of a MIG instance that no longer exists',
            _action(machine, nodes[name]),
        )


def _short(capability: str) -> str:
    return capability.removesuffix("/access")


def _hidden_note(machine: ExaminedMachine, files: Sequence[SpecFile]) -> Iterator[Note]:
    for file in files:
        yield ok(
            f'"{machine_path(machine, file.path)}" is not used: a later directory has its devices'
        )
