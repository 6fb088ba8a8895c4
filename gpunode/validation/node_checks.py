# SPDX-License-Identifier: Apache-2.0
"""Checks of the driver and of the kernel modules beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpuruntime import remedies
from gpuruntime.cli.checks import driver_checks
from gpuruntime.cli.checks.examined_machine import ExaminedMachine, RootCandidate
from gpuruntime.cli.checks.finding import Note, fail, ok
from gpuruntime.discover import nvml, user_space
from gpuruntime.discover.root import DriverRoot
from gpuruntime.errors import GpuRuntimeError

# Where the operator's driver container has its files.
DRIVER_CONTAINER = "/run/nvidia/driver"
_CONTROL_NODE = "/dev/nvidiactl"
_MODULES = "/sys/module"


@dataclass(frozen=True, slots=True)
class Feature:
    """A kernel module with a feature for GPUs.

    *module* is its name in sysfs, *node* its device node or "", and *action* loads it.
    """

    module: str
    node: str
    action: str


FEATURES = {
    "nvidia-fs": Feature(
        "nvidia_fs", "/dev/nvidia-fs0", 'load it: run "modprobe nvidia-fs" (package nvidia-fs)'
    ),
    "gdrcopy": Feature(
        "gdrdrv", "/dev/gdrdrv", 'load it: run "modprobe gdrdrv" (package gdrcopy)'
    ),
    "nvidia-peermem": Feature(
        "nvidia_peermem", "", 'load it after the network driver: run "modprobe nvidia-peermem"'
    ),
    "mofed": Feature("mlx5_core", "", "install the network driver, DOCA-OFED or the kernel's own"),
}


def driver_root(machine: ExaminedMachine) -> str:
    """Return the path on the host below which the driver is installed, "" if there is none."""
    for path in (machine.config.driver_root or "/", DRIVER_CONTAINER):
        if _nvml(RootCandidate(machine, path).open()):
            return path
    return ""


def driver(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the driver is loaded, is of one version, has its node, and answers."""
    version = driver_checks.loaded(machine)
    if not version:
        yield fail(*remedies.unloaded_module(machine, machine.config.driver_root))
        return
    path = driver_root(machine)
    if not path:
        yield fail(
            f"driver {version} is loaded, and its libraries are neither below "
            f'"{machine.config.driver_root or "/"}" nor below "{DRIVER_CONTAINER}"',
            "install the libraries of the driver, or wait for the driver container",
        )
        return
    root = DriverRoot(machine.path(path))
    try:
        reply = nvml.query(user_space.find_nvml(root), driver_checks.ANSWER_S)
    except GpuRuntimeError as error:
        yield fail(error.message, error.hint or remedies.CHECK_LOG)
        return
    for problem in reply.problems:
        yield fail(problem, remedies.RESET_GPU)
    if not reply.gpus:
        yield fail("NVML reports no GPU", remedies.CHECK_LOG)
    if not has_nodes(machine, path):
        yield fail(
            f'the driver answers, and "{_CONTROL_NODE}" is missing', remedies.create_nodes(path)
        )
    yield ok(f"driver {version} below {path} answers with {len(reply.gpus)} GPU(s)")


def has_nodes(machine: ExaminedMachine, root: str) -> bool:
    """Return whether the device nodes are on the host, or below the driver root *root*."""
    return machine.exists(_CONTROL_NODE) or machine.exists(f"{root.rstrip('/')}{_CONTROL_NODE}")


def feature(name: str) -> Callable[[ExaminedMachine], Iterator[Note]]:
    """Return the check of the module of FEATURES *name*."""
    row = FEATURES[name]

    def check(machine: ExaminedMachine) -> Iterator[Note]:
        if not machine.is_directory(f"{_MODULES}/{row.module}"):
            yield fail(f'the kernel module "{row.module}" is not loaded', row.action)
        elif row.node and not machine.exists(row.node):
            yield fail(
                f'the kernel module "{row.module}" is loaded, and "{row.node}" is missing',
                f'restart udev, or load "{row.module}" again',
            )
        else:
            yield ok(f'the kernel module "{row.module}" is loaded')

    return check


def _nvml(root: DriverRoot | None) -> str:
    """Return the path of NVML below *root*, "" if it is not there."""
    if root is None:
        return ""
    try:
        return user_space.find_nvml(root, elsewhere=())
    except GpuRuntimeError:
        return ""
