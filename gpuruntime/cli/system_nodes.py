# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime system create-device-nodes`: create missing device nodes, and change no others."""

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
    if nothing := idle.reason(driver_root or "/"):
        click.echo(nothing, err=True)
        return
    if load_kernel_modules:
        system_modules.load(driver_root or "/", dry_run=dry_run, say=_say)
    known = devices.majors(devices.read("/proc/devices"))
    mode, uid, gid = devices.ownership()
    wanted: list[PlannedNode] = []
    if control_devices or every:
        wanted += devices.control(known)
    if gpu_devices or every:
        wanted += devices.gpus(known, devices.gpu_minors())
    wanted = [dataclasses.replace(item, mode=mode, uid=uid, gid=gid) for item in wanted]
    if mig_devices or every:
        minors = devices.mig_minors(devices.read("/proc/driver/nvidia-caps/mig-minors"))
        wanted += devices.capabilities(known, minors, devices.existing_instances())
    if not wanted:
        click.echo("nothing to make: name the nodes with an option as --control-devices", err=True)
        return
    make(dev_root or driver_root or "/", wanted, dry_run=dry_run)


def make(dev_root: str, wanted: Sequence[PlannedNode], *, dry_run: bool = False) -> None:
    """Make those of *wanted* that are missing below *dev_root*, and say which.

    Raises DiscoveryError, in the end, for what is in the way. No link is followed: what it leads
    to may be another's.
    """
    wrong = []
    for device in wanted:
        path = os.path.join(dev_root, "dev", device.name)
        try:
            problem = _make(dev_root, device, path, dry_run=dry_run)
        except OSError as error:
            raise GpuRuntimeError(
                f'cannot make "{path}": {error.strerror}',
                "run as root, and without links on the way",
            ) from error
        if problem:
            wrong.append(problem)
    if wrong:
        raise DiscoveryError(
            "; ".join(wrong), "remove what is there if nobody needs it, and run this again"
        )


def _make(dev_root: str, device: PlannedNode, path: str, *, dry_run: bool) -> str:
    """Make the node *device*, and return what is in the way, "" for nothing."""
    directory = _open(dev_root, device, create=not dry_run)
    name = os.path.basename(device.name)
    try:
        found = _status(name, directory)
        if found is not None:
            return _difference(device, path, found)
        if dry_run:
            _say(f"mknod --mode={device.mode:04o} {path} c {device.major} {device.minor}")
            return ""
        assert directory is not None
        # By the umask, for a chmod would follow what somebody puts there meanwhile.
        umask = os.umask(0)
        try:
            number = os.makedev(device.major, device.minor)
            os.mknod(name, stat.S_IFCHR | device.mode, number, dir_fd=directory)
        except FileExistsError:
            # The driver's own program was faster.
            return ""
        finally:
            os.umask(umask)
        if (device.uid, device.gid) != (0, 0):
            os.chown(name, device.uid, device.gid, dir_fd=directory, follow_symlinks=False)
        click.echo(f'made "{escape(path)}" c {device.numbers}', err=True)
        return ""
    finally:
        if directory is not None:
            os.close(directory)


def _open(dev_root: str, device: PlannedNode, *, create: bool) -> int | None:
    """Return the directory of *device*; None if there is none and it is not to be made."""
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
        # The driver's own program was faster.
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


def _difference(device: PlannedNode, path: str, found: os.stat_result) -> str:
    if not stat.S_ISCHR(found.st_mode):
        return f'"{path}" is no device node'
    numbers = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    if numbers != device.numbers:
        return f'"{path}" is device {numbers}, not {device.numbers}'
    return ""


def _say(command: str) -> None:
    click.echo(escape(command))
