# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime system create-device-nodes`: create missing device nodes; existing ones stay."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Sequence

import click

from gpuruntime.cli import idle, system_modules
from gpuruntime.cli import system_devices as devices
from gpuruntime.cli.system_devices import PlannedNode
from gpuruntime.errors import DiscoveryError, GpuRuntimeError, escape

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY_MODE = 0o755


@click.command("create-device-nodes")
@click.option(
    *("--driver-root", "--root", "driver_root"),
    default="/",
    show_default=True,
    envvar=["GPURUNTIME_DRIVER_ROOT", "NVIDIA_DRIVER_ROOT", "DRIVER_ROOT", "ROOT"],
    help="Directory below which the driver is installed; kernel modules are loaded from there.",
)
@click.option(
    "--dev-root",
    envvar=["GPURUNTIME_DEV_ROOT", "NVIDIA_DEV_ROOT", "DEV_ROOT"],
    help='Directory in whose "dev" the nodes are created.  [default: the driver root]',
)
@click.option(
    "--control-devices",
    is_flag=True,
    help="Create the control devices, which every GPU container gets.",
)
@click.option(
    "--gpu-devices", is_flag=True, help="Create the nodes of the GPUs that the driver reports."
)
@click.option(
    "--mig-devices",
    is_flag=True,
    help="Create the nodes that grant access to the existing MIG devices.",
)
@click.option("--all", "every", is_flag=True, help="Create all of these.")
@click.option(
    "--load-kernel-modules", is_flag=True, help="First load the driver's kernel modules."
)
@click.option(
    "--dry-run",
    is_flag=True,
    envvar=["GPURUNTIME_DRY_RUN", "DRY_RUN"],
    help="Print the commands that would do the same, and change nothing.",
)
def create_device_nodes(
    *,
    driver_root: str,
    dev_root: str | None,
    control_devices: bool,
    gpu_devices: bool,
    mig_devices: bool,
    every: bool,
    load_kernel_modules: bool,
    dry_run: bool,
) -> None:
    """Create the driver's missing device nodes, with the numbers that its modules registered.

    An existing node is left alone. If it belongs to another device, or is not a device node, the
    other nodes are created nevertheless, and the exit status is 1. On a host without a GPU or a
    driver, there is nothing to create.
    """
    if reason := idle.reason(driver_root or "/"):
        click.echo(reason, err=True)
        return
    if load_kernel_modules:
        system_modules.load(driver_root or "/", dry_run=dry_run, say=_say)
    majors = devices.majors(devices.read("/proc/devices"))
    mode, uid, gid = devices.ownership()
    nodes: list[PlannedNode] = []
    if control_devices or every:
        nodes += devices.control(majors)
    if gpu_devices or every:
        nodes += devices.gpus(majors, devices.gpu_minors())
    nodes = [dataclasses.replace(item, mode=mode, uid=uid, gid=gid) for item in nodes]
    if mig_devices or every:
        minors = devices.mig_minors(devices.read("/proc/driver/nvidia-caps/mig-minors"))
        nodes += devices.capabilities(majors, minors, devices.existing_instances())
    if not nodes:
        click.echo("no device nodes are selected: use an option such as --all", err=True)
        return
    create(dev_root or driver_root or "/", nodes, dry_run=dry_run)


def create(dev_root: str, nodes: Sequence[PlannedNode], *, dry_run: bool = False) -> None:
    """Create the missing ones of *nodes* below *dev_root*, and print each.

    If another file has the name of a node, the other nodes are created before DiscoveryError is
    raised. No symlink is followed: it may lead to any file.
    """
    problems = []
    for device in nodes:
        path = os.path.join(dev_root, "dev", device.name)
        try:
            problem = _create(dev_root, device, path, dry_run=dry_run)
        except OSError as error:
            raise GpuRuntimeError(
                f'cannot create "{path}": {error.strerror}',
                "run as root; no directory of the path may be a symlink",
            ) from error
        if problem:
            problems.append(problem)
    if problems:
        raise DiscoveryError(
            "; ".join(problems), "remove the file unless it is needed, and run this command again"
        )


def _create(dev_root: str, device: PlannedNode, path: str, *, dry_run: bool) -> str:
    """Create the node *device*; return why a file with its name is wrong, "" if none is."""
    directory = _open(dev_root, device, create=not dry_run)
    name = os.path.basename(device.name)
    try:
        status = _status(name, directory)
        if status is not None:
            return _difference(device, path, status)
        if dry_run:
            _say(f"mknod --mode={device.mode:04o} {path} c {device.major} {device.minor}")
            return ""
        assert directory is not None
        # The umask ensures the mode: chmod would follow a symlink that has replaced the node.
        umask = os.umask(0)
        try:
            number = os.makedev(device.major, device.minor)
            os.mknod(name, stat.S_IFCHR | device.mode, number, dir_fd=directory)
        except FileExistsError:
            # The driver's own program has just created the node.
            return ""
        finally:
            os.umask(umask)
        if (device.uid, device.gid) != (0, 0):
            os.chown(name, device.uid, device.gid, dir_fd=directory, follow_symlinks=False)
        click.echo(f'created "{escape(path)}" c {device.numbers}', err=True)
        return ""
    finally:
        if directory is not None:
            os.close(directory)


def _open(dev_root: str, device: PlannedNode, *, create: bool) -> int | None:
    """Return the directory of *device*, created if *create*; None if it does not exist."""
    parts = ["dev", *device.name.split("/")[:-1]]
    fd = os.open(os.path.realpath(dev_root), _DIRECTORY)
    for part in parts:
        try:
            if create and _status(part, fd) is None:
                _mkdir(part, fd)
            below = os.open(part, _DIRECTORY, dir_fd=fd)
        except FileNotFoundError:
            if create:
                raise
            return None
        finally:
            os.close(fd)
        fd = below
    return fd


def _mkdir(name: str, dirfd: int) -> None:
    umask = os.umask(0o022)
    try:
        os.mkdir(name, _DIRECTORY_MODE, dir_fd=dirfd)
    except FileExistsError:
        # The driver's own program has just created the directory.
        return
    finally:
        os.umask(umask)


def _status(name: str, dirfd: int | None) -> os.stat_result | None:
    if dirfd is None:
        return None
    try:
        return os.stat(name, dir_fd=dirfd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _difference(device: PlannedNode, path: str, status: os.stat_result) -> str:
    if not stat.S_ISCHR(status.st_mode):
        return f'"{path}" is not a device node'
    numbers = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    if numbers != device.numbers:
        return f'"{path}" is device {numbers}, not {device.numbers}'
    return ""


def _say(command: str) -> None:
    click.echo(escape(command))
