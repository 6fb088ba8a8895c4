# SPDX-License-Identifier: Apache-2.0
"""`nvidia-container-cli`: its commands `info` and `list`, for programs that read their output.

With the incumbent's names installed, this command is ours; enroot, Apptainer and Slurm scripts
read what it prints. It configures no container: that is done by the runtime and the prestart hook.
"""

from __future__ import annotations

from typing import Any

import click

from gpuruntime import __version__, model
from gpuruntime.cli.comma_option import CommaOption
from gpuruntime.cli.output import write_stdout
from gpuruntime.discover import inventory as machine
from gpuruntime.errors import GpuRuntimeError, UnresolvedDeviceError
from gpuruntime.model import GpuNodes, Inventory, Library, Node
from gpuruntime.plan import devices
from gpuruntime.request import driver_options

PROGRAM = "nvidia-container-cli"
_32_BIT = ("i386", "arm-hard-float", "arm-soft-float", "x32")
_INFO = ("Device Index", "Device Minor", "Model", "Brand", "GPU UUID", "Bus Location")
_ARCHITECTURE = "Architecture"
_WIDTH = 16
_NO_EFFECT = (
    *("--load-kmods/--no-load-kmods", "--no-pivot", "--no-create-imex-channels"),
    *("--no-devbind", "--no-cgroups"),
)


def _accepted(command: Any) -> Any:  # noqa: ANN401 (a click decorator)
    """Add the options that ask for nothing here, so that scripts need not change."""
    for option in _NO_EFFECT:
        command = click.option(option, is_flag=True, hidden=True, expose_value=False)(command)
    for names in (("--debug", "-d"), ("--user", "-u"), ("--ldcache", "-l")):
        command = click.option(*names, hidden=True, expose_value=False)(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--root", "-r", "driver_root", default="/", help="The driver root.  [default: /]")
@click.option("-k", is_flag=True, hidden=True, expose_value=False)
@_accepted
@click.version_option(__version__, "--version", "-V", prog_name=PROGRAM)
@click.pass_context
def root(context: click.Context, driver_root: str) -> None:
    """Tell about the driver and the GPUs of this host."""
    context.obj = driver_root


@root.command()
@click.option("--csv", "as_csv", is_flag=True, help="Print lines of values with commas.")
@click.pass_obj
def info(driver_root: str, as_csv: bool) -> None:  # noqa: FBT001 (click's flag)
    """Print the versions of driver and CUDA, and the GPUs."""
    found = machine.discover(driver_root, driver_root, strict=False)
    versions = {
        "NVRM version": found.driver.version,
        "CUDA version": found.cuda_version or "unknown",
    }
    gpus = [_described(item) for item in found.gpus]
    write_stdout(_as_csv(versions, gpus) if as_csv else _as_text(versions, gpus))


def _described(item: GpuNodes) -> dict[str, str]:
    gpu = item.gpu
    domain, _, rest = gpu.bus_id.partition(":")
    values = (
        *(str(gpu.index), str(gpu.minor), gpu.name, gpu.brand.capitalize(), gpu.uuid),
        # With the eight digits that NVML has.
        f"{domain:0>8}:{rest}" if rest else "",
    )
    return {**dict(zip(_INFO, values, strict=True)), _ARCHITECTURE: gpu.architecture}


def _as_text(versions: dict[str, str], gpus: list[dict[str, str]]) -> str:
    blocks = [
        "".join(f"{f'{name}:':<{_WIDTH}}{value}\n" for name, value in block.items())
        for block in (versions, *gpus)
    ]
    return "\n".join(blocks)


def _as_csv(versions: dict[str, str], gpus: list[dict[str, str]]) -> str:
    lines = [
        ",".join(versions),
        ",".join(versions.values()),
        "",
        ",".join((*_INFO, _ARCHITECTURE)),
    ]
    lines += [",".join(gpu.values()) for gpu in gpus]
    return "".join(f"{line}\n" for line in lines)


@root.command("list")
@click.option(
    *("--device", "-d", "devices"), cls=CommaOption, help="Nodes of these devices, or all."
)
@click.option("--libraries", "-l", is_flag=True, help="The driver's libraries.")
@click.option("--binaries", "-b", is_flag=True, help="Its programs.")
@click.option("--ipcs", "-i", is_flag=True, help="Its sockets.")
@click.option("--firmwares", "-f", is_flag=True, help="Its firmware.")
@click.option("--compat32", is_flag=True, help="32-bit libraries, too.")
@click.option("--mig-config", help="The node of the right to configure MIG: all.")
@click.option("--mig-monitor", help="The node of the right to monitor MIG: all.")
@click.option("--imex-channel", "channels", cls=CommaOption, help="Nodes of these channels.")
@click.option("--no-persistenced", is_flag=True, help="Without that socket.")
@click.option("--no-fabricmanager", is_flag=True, help="Without that socket.")
@click.option("--no-gsp-firmware", is_flag=True, help="Without firmware.")
@click.pass_obj
def list_(driver_root: str, /, **wanted: Any) -> None:  # noqa: ANN401 (click's values)
    """List what a container needs, one path on the host a line; without an option, all of it."""
    found = machine.discover(driver_root, driver_root, strict=False)
    everything = not any(wanted[name] for name in _CHOICES)
    if everything:
        kinds = ("libraries", "binaries", "ipcs", "firmwares", "compat32")
        wanted.update(dict.fromkeys(kinds, True))
        wanted["devices"] = (devices.ALL,)
    lines = [
        *_nodes(found, wanted),
        *_files(found, wanted),
    ]
    write_stdout("".join(f"{line}\n" for line in dict.fromkeys(lines)))


_CHOICES = (
    *("devices", "libraries", "binaries", "ipcs", "firmwares", "mig_config", "mig_monitor"),
    "channels",
)


def _nodes(found: Inventory, wanted: dict[str, Any]) -> list[str]:
    nodes: list[Node] = []
    if wanted["devices"]:
        nodes += found.control_nodes
        for device in devices.devices(wanted["devices"], found.gpus):
            nodes += [device.gpu.node, *(() if device.mig is None else device.mig[1:])]
    channels = {
        node.container_path.rpartition("/channel")[2]: node for node in found.features[model.IMEX]
    }
    for name in wanted["channels"]:
        number = str(driver_options.channel(name, "--imex-channel"))
        if number not in channels:
            raise UnresolvedDeviceError(
                f"there is no IMEX channel {number}", "make the channel on the host"
            )
        nodes.append(channels[number])
    for option, feature in (("mig_config", model.MIG_CONFIG), ("mig_monitor", model.MIG_MONITOR)):
        if wanted[option]:
            nodes += found.features[feature]
    return [node.host_path for node in nodes]


def _files(found: Inventory, wanted: dict[str, Any]) -> list[str]:
    by_kind: dict[str, list[str]] = {}
    for file in found.driver.files:
        by_kind.setdefault(file.kind, []).append(file.host_path)
    sockets = [
        path
        for path in by_kind.get("ipc", ())
        if not (wanted["no_persistenced"] and "persistenced" in path)
        and not (wanted["no_fabricmanager"] and "fabricmanager" in path)
    ]
    native = [item for item in found.driver.libraries if not _is_32_bit(item)]
    others = [item for item in found.driver.libraries if _is_32_bit(item)]
    return [
        *(by_kind.get("binary", ()) if wanted["binaries"] else ()),
        *(item.host_path for item in native if wanted["libraries"]),
        *(item.host_path for item in others if wanted["libraries"] and wanted["compat32"]),
        *(sockets if wanted["ipcs"] else ()),
        *(
            by_kind.get("firmware", ())
            if wanted["firmwares"] and not wanted["no_gsp_firmware"]
            else ()
        ),
    ]


def _is_32_bit(library: Library) -> bool:
    return library.abi in _32_BIT


@root.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--device", "-d", "asked", cls=CommaOption)
@click.argument("arguments", nargs=-1)
def configure(asked: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """Refuse: containers are configured by the runtime and its hooks.

    `ctr run --gpus` of containerd 1 calls it, in a hook that reads the container's state itself:
    nothing says here what the container may have.
    """
    del arguments
    names = ",".join(asked) or devices.ALL
    raise GpuRuntimeError(
        f'"{PROGRAM} configure", which "ctr run --gpus" calls, is not here',
        f'run "ctr run --runc-binary gpu-container-runtime --env NVIDIA_VISIBLE_DEVICES={names} '
        '..." without --gpus',
    )
