# SPDX-License-Identifier: Apache-2.0
"""Checks of device nodes: are they there, the driver's, usable, and found by systemd."""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Iterator

from gpuruntime.cli import system_devices as devices
from gpuruntime.cli.checks import driver_checks
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import FAIL, WARN, Note, fail, ok, warn
from gpuruntime.cli.system_devices import PlannedNode
from gpuruntime.discover.device_nodes import REQUIRED
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.plan import hook_programs

PARAMS = "/proc/driver/nvidia/params"
_MAKE = 'run "gpuruntime system create-device-nodes --all --load-kernel-modules"'
_MAKE_MIG = 'run "gpuruntime system create-device-nodes --mig-devices"'
_LINK = 'run "gpuruntime system create-dev-char-symlinks"'
_OTHERS, _GROUP = 0o006, 0o060
_ALL_READ = 0o004
# 0666, which the driver tells in decimal.
_USUAL_MODE = "438"


def _wanted(machine: ExaminedMachine) -> list[PlannedNode]:
    """Return the nodes that there are to be, but for those of MIG devices and lacking modules."""
    known = devices.majors(machine.read("/proc/devices") or "")
    minors = devices.gpu_minors(machine.path("/proc"))
    try:
        found = devices.gpus(known, minors)
    except GpuRuntimeError:
        found = []
    try:
        return [*devices.control(known), *found]
    except GpuRuntimeError:
        return found


def nodes(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the nodes of the GPUs and the control nodes are there, and the driver's own."""
    if not driver_checks.loaded(machine):
        yield ok("none to look for: no driver is loaded")
        return
    dev = machine.dev()
    wanted = _wanted(machine)
    missing = []
    for device in wanted:
        path = f"{dev}/{device.name}"
        status = machine.lstatus(path)
        if status is None:
            missing.append(path)
        elif not stat.S_ISCHR(status.st_mode):
            yield fail(
                f'"{path}" is no device node',
                f"remove it, then {_MAKE}",
            )
        elif _numbers(status) != device.numbers:
            yield fail(
                f'"{path}" is device {_numbers(status)}, and the driver has {device.numbers}',
                f"remove it, then {_MAKE}",
            )
    needed = [path for path in missing if _is_needed(path)]
    for path in needed:
        yield fail(f'no device node "{path}"', f"{_MAKE} as root, once after each boot")
    others = [path for path in missing if path not in needed]
    if others:
        yield warn(f"no device node {', '.join(others)}", _MAKE)
    count = len(wanted) - len(missing)
    yield ok(f"{count} nodes, of {len(devices.gpu_minors(machine.path('/proc')))} GPU(s)")


def _is_needed(path: str) -> bool:
    name = posixpath.basename(path)
    return name in REQUIRED or re.fullmatch(r"nvidia\d+", name) is not None


def _numbers(status: os.stat_result) -> str:
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _there(machine: ExaminedMachine) -> list[tuple[str, os.stat_result]]:
    """Return path and status of the driver's nodes that are there, MIG's included."""
    dev = machine.dev()
    paths = machine.glob(dev, "nvidia*") + machine.glob(f"{dev}/nvidia-caps", "nvidia-cap*")
    found = [(path, machine.lstatus(path)) for path in paths]
    return [(path, status) for path, status in found if status and stat.S_ISCHR(status.st_mode)]


def modes(machine: ExaminedMachine) -> Iterator[Note]:
    """See who may open the nodes."""
    found = [
        (path, status)
        for path, status in _there(machine)
        if _is_needed(path) or posixpath.basename(path).startswith("nvidia-uvm")
    ]
    for path, status in found:
        mode = stat.S_IMODE(status.st_mode)
        if mode & _OTHERS == _OTHERS and mode & ~0o777 == 0:
            continue
        what = f'"{path}" has mode {mode:04o}, uid {status.st_uid}, gid {status.st_gid}'
        if mode & _GROUP == _GROUP and mode & ~0o777 == 0:
            yield warn(
                f"{what}: only its group may use it",
                "put the users of rootless engines into that group",
            )
        else:
            yield fail(
                f"{what}: not even its group may use it",
                f'set the driver\'s NVreg_DeviceFileMode to 0666, and run "chmod 666 {path}"',
            )
    yield ok("all users may open them" if found else "no nodes")


def dev_char(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether systemd finds the nodes, which it does by links in /dev/char."""
    found = _there(machine)
    lost = []
    for path, status in found:
        link = f"/dev/char/{_numbers(status)}"
        led = machine.status(link)
        if led is None and not machine.exists(f"/sys{link}"):
            lost.append(path)
        elif led is not None and led.st_rdev != status.st_rdev:
            yield fail(f'"{link}" leads to another device than "{path}"', _LINK)
    if lost:
        manager = cgroup_manager(machine)
        names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        what = f'no link in "/dev/char" for {names}: containers with systemd\'s cgroups lose them'
        status_ = FAIL if manager else WARN
        yield Note(status_, f'{what} at "systemctl daemon-reload"{manager}', _LINK)
    yield ok(f"{len(found)} nodes have their links" if found else "no nodes")


def cgroup_manager(machine: ExaminedMachine) -> str:
    """Return why containers here are systemd's, "" if nothing says so."""
    if not machine.is_directory("/run/systemd/system"):
        return ""
    if machine.exists("/sys/fs/cgroup/cgroup.controllers"):
        return " (systemd and cgroup v2, where engines use it)"
    settings = (
        ("/etc/docker/daemon.json", "native.cgroupdriver=systemd"),
        ("/etc/containerd/config.toml", "SystemdCgroup = true"),
        ("/etc/crio/crio.conf", 'cgroup_manager = "systemd"'),
    )
    for path, text in settings:
        if text in (machine.read(path) or ""):
            return f' ("{path}" has {text})'
    return ""


def params(machine: ExaminedMachine) -> Iterator[Note]:
    """See what the driver is told about making nodes, and whether containers can be kept off."""
    if not driver_checks.loaded(machine):
        yield ok("none: no driver is loaded")
        return
    text = machine.read(PARAMS)
    if text is None:
        yield warn(
            f'"{PARAMS}" cannot be read: containers may make the driver\'s nodes',
            "load the driver's module again",
        )
        return
    told = dict(re.findall(r"^(\w+): (.*)$", text, re.MULTILINE))
    if told.get("ModifyDeviceFiles") == "0":
        yield ok("ModifyDeviceFiles is 0: nothing to be done in containers")
    elif _has_hook(machine):
        yield ok("ModifyDeviceFiles is 1, which our hook hides from containers")
    else:
        yield warn(
            "ModifyDeviceFiles is 1, and our hook, which hides that from containers, is not "
            "installed",
            f"install {hook_programs.HOOK}, or load the driver with NVreg_ModifyDeviceFiles=0",
        )
    mode = told.get("DeviceFileMode", _USUAL_MODE)
    if mode != _USUAL_MODE and mode.isdigit():
        yield ok(f"nodes are made with mode {int(mode):04o}, as NVreg_DeviceFileMode says")


def _has_hook(machine: ExaminedMachine) -> bool:
    configured = machine.config["nvidia-ctk.path"]
    name = configured if configured.startswith("/") else hook_programs.HOOK
    return bool(machine.find_program(name) or machine.beside(name))


def mig(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether each MIG instance has the node that grants it."""
    proc = machine.path("/proc")
    names = devices.existing_instances(proc)
    minors = devices.mig_minors(machine.read("/proc/driver/nvidia-caps/mig-minors") or "")
    known = devices.majors(machine.read("/proc/devices") or "")
    instances = [name for name in names if name.startswith("gpu")]
    unknown = [name for name in instances if name not in minors]
    if unknown:
        yield fail(
            f'the driver does not tell the minor of "{unknown[0]}" in mig-minors',
            "reload the driver's modules",
        )
    if not instances:
        yield ok("no MIG devices")
        return
    try:
        wanted = devices.capabilities(known, minors, instances)
    except GpuRuntimeError as error:
        yield fail(error.message, error.hint or _MAKE_MIG)
        return
    dev = machine.dev()
    for device in wanted:
        path = f"{dev}/{device.name}"
        status = machine.lstatus(path)
        if status is None:
            yield fail(f'no node "{path}", which grants a MIG device', _MAKE_MIG)
        elif not stat.S_ISCHR(status.st_mode) or _numbers(status) != device.numbers:
            yield fail(f'"{path}" is not device {device.numbers}', f"remove it, then {_MAKE_MIG}")
        elif not status.st_mode & _ALL_READ:
            yield warn(f'"{path}" may be read by root alone', f'run "chmod 444 {path}"')
    yield ok(f"{len(wanted)} nodes of MIG instances")
