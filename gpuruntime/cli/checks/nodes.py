# SPDX-License-Identifier: Apache-2.0
"""Checks of device nodes: whether they exist, have the driver's numbers, and can be opened."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import stat
from collections.abc import Iterator

from gpuruntime import remedies
from gpuruntime.cli import system_devices as devices
from gpuruntime.cli.checks import driver_checks, engine_files
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import FAIL, WARN, Note, fail, ok, warn
from gpuruntime.cli.system_devices import PlannedNode
from gpuruntime.discover.device_nodes import REQUIRED
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.plan import hook_programs

PARAMS = "/proc/driver/nvidia/params"
_OTHERS, _GROUP = 0o006, 0o060
_ALL_READ = 0o004
# 0666, which the driver prints in decimal.
_USUAL_MODE = "438"


def _expected(machine: ExaminedMachine) -> list[PlannedNode]:
    """Return the nodes that the loaded modules need, without those of MIG devices."""
    majors = devices.majors(machine.read("/proc/devices") or "")
    minors = devices.gpu_minors(machine.path("/proc"))
    # The check "module" reports a module that is not loaded.
    planned: list[PlannedNode] = []
    with contextlib.suppress(GpuRuntimeError):
        planned += devices.control(majors)
    with contextlib.suppress(GpuRuntimeError):
        planned += devices.gpus(majors, minors)
    return planned


def nodes(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the nodes of the GPUs and the control devices exist, with their numbers."""
    if not driver_checks.loaded(machine):
        yield ok("no driver is loaded, so none is needed")
        return
    dev, root = machine.dev(), machine.config.driver_root
    expected = _expected(machine)
    missing = []
    for device in expected:
        path = f"{dev}/{device.name}"
        status = machine.lstatus(path)
        if status is None:
            missing.append(path)
        elif not stat.S_ISCHR(status.st_mode):
            yield fail(
                f'"{path}" is not a device node', remedies.foreign_node(machine, path, root)
            )
        elif _numbers(status) != device.numbers:
            yield fail(
                f'"{path}" is device {_numbers(status)}, but the driver has {device.numbers}',
                remedies.foreign_node(machine, path, root),
            )
    needed = [path for path in missing if _is_needed(path)]
    for path in needed:
        yield fail(f'no device node "{path}"', remedies.missing_node(machine, path, root))
    optional = [path for path in missing if path not in needed]
    if optional:
        names = ", ".join(optional)
        yield warn(f"no device node {names}", remedies.missing_node(machine, optional[0], root))
    count = len(expected) - len(missing)
    yield ok(f"{count} nodes, of {len(devices.gpu_minors(machine.path('/proc')))} GPU(s)")


def _is_needed(path: str) -> bool:
    name = posixpath.basename(path)
    return name in REQUIRED or re.fullmatch(r"nvidia\d+", name) is not None


def _numbers(status: os.stat_result) -> str:
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _existing(machine: ExaminedMachine) -> list[tuple[str, os.stat_result]]:
    """Return path and status of the driver's existing nodes, including those of MIG."""
    dev = machine.dev()
    paths = machine.glob(dev, "nvidia*") + machine.glob(f"{dev}/nvidia-caps", "nvidia-cap*")
    entries = [(path, machine.lstatus(path)) for path in paths]
    return [(path, status) for path, status in entries if status and stat.S_ISCHR(status.st_mode)]


def modes(machine: ExaminedMachine) -> Iterator[Note]:
    """Check which users may open the nodes."""
    entries = [
        (path, status)
        for path, status in _existing(machine)
        if _is_needed(path) or posixpath.basename(path).startswith("nvidia-uvm")
    ]
    driver_mode = _parameters(machine).get("DeviceFileMode", _USUAL_MODE)
    for path, status in entries:
        mode = stat.S_IMODE(status.st_mode)
        if mode & _OTHERS == _OTHERS and mode & ~0o777 == 0:
            continue
        what = f'"{path}" has mode {mode:04o}, uid {status.st_uid}, gid {status.st_gid}'
        if mode & _GROUP == _GROUP and mode & ~0o777 == 0:
            yield warn(
                f"{what}: only its group may open it",
                "put the users of rootless engines into that group",
            )
        elif driver_mode == _USUAL_MODE:
            yield fail(f"{what}: not even its group may open it", f'run "chmod 666 {path}"')
        else:
            yield fail(
                f"{what}: not even its group may open it, because of NVreg_DeviceFileMode",
                'set "options nvidia NVreg_DeviceFileMode=0666" in "/etc/modprobe.d", and reboot',
            )
    yield ok("all users may open them" if entries else "no nodes")


def dev_char(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether /dev/char has the symlinks by which systemd finds the nodes."""
    entries = _existing(machine)
    without_link = []
    for path, status in entries:
        link = f"/dev/char/{_numbers(status)}"
        target = machine.status(link)
        if target is None and not machine.exists(f"/sys{link}"):
            without_link.append(path)
        elif target is not None and target.st_rdev != status.st_rdev:
            yield fail(f'"{link}" leads to another device than "{path}"', remedies.CREATE_LINKS)
    if without_link:
        manager = cgroup_manager(machine)
        names = ", ".join(without_link[:3])
        if len(without_link) > 3:
            names += f" and {len(without_link) - 3} more"
        what = f'no link in "/dev/char" for {names}: containers with systemd\'s cgroups lose them'
        yield Note(
            FAIL if manager else WARN,
            f'{what} at "systemctl daemon-reload"{manager}',
            remedies.CREATE_LINKS,
        )
    yield ok(f"{len(entries)} nodes have their links" if entries else "no nodes")


def cgroup_manager(machine: ExaminedMachine) -> str:
    """Return why containers of this host use systemd's cgroups, "" if nothing indicates it."""
    if not machine.is_directory("/run/systemd/system"):
        return ""
    if machine.exists("/sys/fs/cgroup/cgroup.controllers"):
        return " (systemd and cgroup v2, where engines use it)"
    for engine in engine_files.installed_engines(machine):
        if engine.has_systemd_cgroups:
            return f" ({engine.name} uses systemd's cgroups)"
    return ""


def _parameters(machine: ExaminedMachine) -> dict[str, str]:
    """Return the parameters of the loaded module."""
    return dict(re.findall(r"^(\w+): (.*)$", machine.read(PARAMS) or "", re.MULTILINE))


def params(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether containers may create the driver's nodes, or our hook prevents that."""
    if not driver_checks.loaded(machine):
        yield ok("no driver is loaded")
        return
    parameters = _parameters(machine)
    if not parameters:
        yield warn(
            f'"{PARAMS}" cannot be read: containers may make the driver\'s nodes',
            remedies.REBOOT,
        )
        return
    if parameters.get("ModifyDeviceFiles") == "0":
        yield ok("ModifyDeviceFiles is 0: containers make no nodes")
    elif _has_hook(machine):
        yield ok("ModifyDeviceFiles is 1, which our hook hides from containers")
    else:
        yield warn(
            "ModifyDeviceFiles is 1, and our hook, which hides that from containers, is not "
            "installed",
            f"install {hook_programs.HOOK}",
        )
    mode = parameters.get("DeviceFileMode", _USUAL_MODE)
    if mode != _USUAL_MODE and mode.isdigit():
        yield ok(f"NVreg_DeviceFileMode gives nodes the mode {int(mode):04o}")


def _has_hook(machine: ExaminedMachine) -> bool:
    """Return whether the runtime finds its hook program on its search path."""
    config, runtime = machine.config, engine_files.runtime_in_use(machine)
    paths = hook_programs.places(
        hook_programs.HOOK, config, runtime, engine_files.search_path(machine)
    )
    return any(map(machine.is_program, paths))


def mig(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether each MIG instance has the node that grants it."""
    names = devices.existing_instances(machine.path("/proc"))
    minors = devices.mig_minors(machine.read("/proc/driver/nvidia-caps/mig-minors") or "")
    majors = devices.majors(machine.read("/proc/devices") or "")
    instances = [name for name in names if name.startswith("gpu")]
    unknown = [name for name in instances if name not in minors]
    if unknown:
        yield fail(f'"{unknown[0]}" has no minor in mig-minors', remedies.REBOOT)
    if not instances:
        yield ok("no MIG devices")
        return
    try:
        expected = devices.capabilities(majors, minors, instances)
    except GpuRuntimeError as error:
        yield fail(error.message, error.hint or remedies.CHECK_LOG)
        return
    dev, root = machine.dev(), machine.config.driver_root
    for device in expected:
        path = f"{dev}/{device.name}"
        status = machine.lstatus(path)
        if status is None:
            yield fail(
                f'no device node "{path}", which grants a MIG device',
                remedies.missing_node(machine, path, root),
            )
        elif not stat.S_ISCHR(status.st_mode) or _numbers(status) != device.numbers:
            yield fail(
                f'"{path}" is not device {device.numbers}',
                remedies.foreign_node(machine, path, root),
            )
        elif not status.st_mode & _ALL_READ:
            yield warn(f'only root can read "{path}"', f'run "chmod 444 {path}"')
    yield ok(f"{len(expected)} nodes of MIG instances")
