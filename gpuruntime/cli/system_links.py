# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime system create-dev-char-symlinks`: create links by which systemd finds device nodes.

runc names a device to systemd as /dev/char/MAJOR:MINOR. The driver's devices have no entry in
sysfs, so nothing else creates these links. Without them, the device rules are lost when systemd
applies them again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

import click

from gpuruntime.cli import idle, system_modules, system_nodes
from gpuruntime.cli import system_devices as devices
from gpuruntime.cli.system_devices import CAPS, NVIDIA, UVM, PlannedNode
from gpuruntime.errors import GpuRuntimeError, escape
from gpuruntime.system.replace import replace_link

# Directory below /dev, and the prefix of the nodes in it that a container can get.
_NODE_PREFIXES = (
    ("", "nvidia"),
    ("nvidia-caps", "nvidia-"),
    ("nvidia-caps-imex-channels", "channel"),
    ("", "gdrdrv"),
    ("infiniband", ""),
    ("dri", ""),
)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@click.command("create-dev-char-symlinks")
@click.option(
    "--dev-char-path",
    default="/dev/char",
    show_default=True,
    envvar=["GPURUNTIME_DEV_CHAR_PATH", "DEV_CHAR_PATH"],
    help="Directory in which the symlinks are created.",
)
@click.option(
    "--driver-root",
    default="/",
    show_default=True,
    envvar=["GPURUNTIME_DRIVER_ROOT", "NVIDIA_DRIVER_ROOT", "DRIVER_ROOT"],
    help="Directory below which the driver is installed; kernel modules are loaded from there.",
)
@click.option(
    "--dev-root",
    default="/",
    show_default=True,
    envvar=["GPURUNTIME_DEV_ROOT", "NVIDIA_DEV_ROOT", "DEV_ROOT"],
    help='Directory whose "dev" holds the device nodes.',
)
@click.option(
    "--create-all",
    is_flag=True,
    envvar=["GPURUNTIME_CREATE_ALL", "CREATE_ALL"],
    help="Create symlinks for all possible nodes, including those of future MIG devices.",
)
@click.option(
    "--load-kernel-modules",
    is_flag=True,
    envvar=["GPURUNTIME_LOAD_KERNEL_MODULES", "LOAD_KERNEL_MODULES"],
    help="First load the driver's kernel modules; needs --create-all.",
)
@click.option(
    "--create-device-nodes",
    is_flag=True,
    envvar=["GPURUNTIME_CREATE_DEVICE_NODES", "CREATE_DEVICE_NODES"],
    help="First create the control device nodes; needs --create-all.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    envvar=["GPURUNTIME_DRY_RUN", "DRY_RUN"],
    help="Print the commands that would do the same, and change nothing.",
)
def create_dev_char_symlinks(
    *,
    dev_char_path: str,
    driver_root: str,
    dev_root: str,
    create_all: bool,
    load_kernel_modules: bool,
    create_device_nodes: bool,
    dry_run: bool,
) -> None:
    """Create a symlink MAJOR:MINOR to each of the driver's device nodes.

    A symlink that resolves to the right device is left alone; any other is replaced. A file of
    another type with such a name is left alone as well: the other symlinks are created, and the
    exit status is 1. With --create-all, nothing is created on a host without a GPU or a driver.
    """
    for name, is_set in (
        ("--load-kernel-modules", load_kernel_modules),
        ("--create-device-nodes", create_device_nodes),
    ):
        if is_set and not create_all:
            click.echo(f"warning: {name} is ignored without --create-all", err=True)
    if create_all and (reason := idle.reason(driver_root)):
        click.echo(reason, err=True)
        return
    if create_all and load_kernel_modules:
        system_modules.load(driver_root, dry_run=dry_run, say=_say)
    if create_all:
        nodes = every()
        if create_device_nodes:
            majors = devices.majors(devices.read("/proc/devices"))
            system_nodes.create(dev_root, devices.control(majors), dry_run=dry_run)
    else:
        nodes = existing(dev_root)
    link(dev_char_path, dev_root, nodes, dry_run=dry_run)


def existing(dev_root: str, sys: str = "/sys") -> list[PlannedNode]:
    """Return the nodes below *dev_root* that a container can get and sysfs does not list."""
    nodes = []
    for directory, prefix in _NODE_PREFIXES:
        path = os.path.join(dev_root, "dev", directory)
        try:
            names = sorted(os.listdir(path))
        except OSError:
            continue
        for name in names:
            status = os.lstat(os.path.join(path, name))
            if not (name.startswith(prefix) and stat.S_ISCHR(status.st_mode)):
                continue
            numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
            device = PlannedNode(os.path.join(directory, name), *numbers)
            if not os.path.lexists(f"{sys}/dev/char/{device.numbers}"):
                nodes.append(device)
    return nodes


def every(proc: str = "/proc", sys: str = "/sys") -> list[PlannedNode]:
    """Return all possible nodes, existing or not; raise DriverError if a module is not loaded."""
    majors = devices.majors(devices.read(f"{proc}/devices"))
    minors = devices.mig_minors(devices.read(f"{proc}/driver/nvidia-caps/mig-minors"))
    for module in (NVIDIA, UVM, *([CAPS] if minors else [])):
        devices.major_of(majors, module)
    count = devices.count_on_bus(sys)
    names = ["config", "monitor"]
    for gpu in range(count):
        names += devices.possible_instances(minors, gpu)
    return [
        *devices.control(majors),
        *devices.gpus(majors, range(count)),
        *devices.capabilities(majors, minors, names),
    ]


def link(
    dev_char_path: str, dev_root: str, nodes: Sequence[PlannedNode], *, dry_run: bool = False
) -> None:
    """Create the links to *nodes* in *dev_char_path*, and print each; raise GpuRuntimeError."""
    if not nodes:
        click.echo("no device nodes that need a symlink", err=True)
        return
    problems = []
    try:
        if not dry_run:
            os.makedirs(dev_char_path, mode=0o755, exist_ok=True)
            directory = os.open(dev_char_path, _DIRECTORY)
    except OSError as error:
        raise GpuRuntimeError(
            f'cannot create symlinks in "{dev_char_path}": {error.strerror}',
            'run as root, or name another directory with "--dev-char-path"',
        ) from error
    for device in nodes:
        target = os.path.join(os.path.abspath(dev_root), "dev", device.name)
        path = os.path.join(dev_char_path, device.numbers)
        if leads_to(path, device):
            continue
        if dry_run:
            _say(f"ln -sfn {target} {path}")
            continue
        try:
            if replace_link(directory, device.numbers, target):
                click.echo(f'created "{escape(path)}" -> "{escape(target)}"', err=True)
        except OSError as error:
            problems.append(f'"{path}": {error.strerror}')
    if not dry_run:
        os.close(directory)
    if problems:
        raise GpuRuntimeError(
            f"cannot create every symlink: {'; '.join(problems)}",
            "remove the files that have these names",
        )


def leads_to(path: str, device: PlannedNode) -> bool:
    """Return whether *path* resolves to *device*."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    number = os.makedev(device.major, device.minor)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == number


def _say(command: str) -> None:
    click.echo(escape(command))
