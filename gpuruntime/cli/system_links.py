# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime system create-dev-char-symlinks`: create links by which systemd finds device nodes.

runc names a device to systemd as /dev/char/MAJOR:MINOR. The driver's devices have no entry in
sysfs, so nothing else creates these links; without them the device rules are lost when systemd
sets them again.
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

# Directory below /dev, and how names of nodes in it begin that a container can be given.
_PLACES = (
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
    for name, given in (
        ("--load-kernel-modules", load_kernel_modules),
        ("--create-device-nodes", create_device_nodes),
    ):
        if given and not create_all:
            click.echo(f"warning: {name} is ignored without --create-all", err=True)
    if create_all and (nothing := idle.reason(driver_root)):
        click.echo(nothing, err=True)
        return
    if create_all and load_kernel_modules:
        system_modules.load(driver_root, dry_run=dry_run, say=_say)
    if create_all:
        wanted = every()
        if create_device_nodes:
            known = devices.majors(devices.read("/proc/devices"))
            system_nodes.make(dev_root, devices.control(known), dry_run=dry_run)
    else:
        wanted = existing(dev_root)
    link(dev_char_path, dev_root, wanted, dry_run=dry_run)


def existing(dev_root: str, sys: str = "/sys") -> list[PlannedNode]:
    """Return the nodes below *dev_root* that a container can be given and sysfs does not have."""
    found = []
    for directory, prefix in _PLACES:
        place = os.path.join(dev_root, "dev", directory)
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue
        for name in names:
            status = os.lstat(os.path.join(place, name))
            if not (name.startswith(prefix) and stat.S_ISCHR(status.st_mode)):
                continue
            numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
            device = PlannedNode(os.path.join(directory, name), *numbers)
            if not os.path.lexists(f"{sys}/dev/char/{device.numbers}"):
                found.append(device)
    return found


def every(proc: str = "/proc", sys: str = "/sys") -> list[PlannedNode]:
    """Return the nodes that there can be, there or not; raise DriverError without modules."""
    known = devices.majors(devices.read(f"{proc}/devices"))
    minors = devices.mig_minors(devices.read(f"{proc}/driver/nvidia-caps/mig-minors"))
    for module in (NVIDIA, UVM, *([CAPS] if minors else [])):
        devices.major_of(known, module)
    count = devices.count_on_bus(sys)
    names = ["config", "monitor"]
    for gpu in range(count):
        names += devices.possible_instances(minors, gpu)
    return [
        *devices.control(known),
        *devices.gpus(known, range(count)),
        *devices.capabilities(known, minors, names),
    ]


def link(
    dev_char_path: str, dev_root: str, wanted: Sequence[PlannedNode], *, dry_run: bool = False
) -> None:
    """Make the links to *wanted* in *dev_char_path*, and say which; raise GpuRuntimeError."""
    if not wanted:
        click.echo("no device nodes to make links to", err=True)
        return
    problems = []
    try:
        if not dry_run:
            os.makedirs(dev_char_path, mode=0o755, exist_ok=True)
            directory = os.open(dev_char_path, _DIRECTORY)
    except OSError as error:
        raise GpuRuntimeError(
            f'cannot make links in "{dev_char_path}": {error.strerror}',
            'run as root, or name another directory with "--dev-char-path"',
        ) from error
    for device in wanted:
        target = os.path.join(os.path.abspath(dev_root), "dev", device.name)
        path = os.path.join(dev_char_path, device.numbers)
        if leads_to(path, device):
            continue
        if dry_run:
            _say(f"ln -sfn {target} {path}")
            continue
        try:
            if replace_link(directory, device.numbers, target):
                click.echo(f'made "{escape(path)}" -> "{escape(target)}"', err=True)
        except OSError as error:
            problems.append(f'"{path}": {error.strerror}')
    if not dry_run:
        os.close(directory)
    if problems:
        raise GpuRuntimeError(
            f"cannot make every link: {'; '.join(problems)}", "remove what is in the way"
        )


def leads_to(path: str, device: PlannedNode) -> bool:
    """Return whether *path* leads to *device*, by whatever link."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    number = os.makedev(device.major, device.minor)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == number


def _say(command: str) -> None:
    click.echo(escape(command))
