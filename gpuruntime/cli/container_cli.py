# SPDX-License-Identifier: Apache-2.0
"""`nvidia-container-cli`: the commands `info` and `list`, for programs that parse their output.

An installation with the incumbent's names has this program; enroot, Apptainer and Slurm scripts
parse its output. It does not configure containers: the runtime and the prestart hook do that.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from gpuruntime import __version__, model
from gpuruntime.cli import completion
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
    """Add options of the incumbent that have no effect here, so that scripts run unchanged."""
    for option in _NO_EFFECT:
        command = click.option(option, is_flag=True, hidden=True, expose_value=False)(command)
    for names in (("--user", "-u"), ("--ldcache", "-l")):
        command = click.option(*names, hidden=True, expose_value=False)(command)
    return command


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: FBT001 (click's)
    """Print the version and end the program, if *value* requests that."""
    del parameter
    if not value or ctx.resilient_parsing:
        return
    # The lines of the incumbent that scripts parse, and one of ours.
    write_stdout(
        f"cli-version: {__version__}\nlib-version: {__version__}\n"
        f"build platform: {os.uname().machine}\ngpuruntime, version {__version__}\n"
    )
    ctx.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    *("--root", "-r", "driver_root"),
    default="/",
    metavar="DIR",
    help="Directory below which the driver is installed.  [default: /]",
)
@click.option(
    *("--debug", "-d"),
    metavar="FILE",
    help="Append to FILE which files are opened and which programs are started.",
)
@click.option("-k", is_flag=True, hidden=True, expose_value=False)
@_accepted
@click.option(
    *("--version", "-V"),
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.pass_context
def root(context: click.Context, driver_root: str, debug: str | None) -> None:
    """Print the driver's files and the GPUs of this host, for programs that parse the output."""
    context.obj = driver_root
    if debug:
        from gpuruntime.cli import trace  # noqa: PLC0415 (few commands are traced)

        try:
            stream = context.with_resource(open(debug, "ab", buffering=0))  # noqa: SIM115 (a context)
        except OSError as error:
            raise GpuRuntimeError(
                f'cannot write the log "{debug}": {error.strerror}', "name another file"
            ) from error
        trace.start(stream.fileno(), sys.argv)


@root.command()
@click.option("--csv", "as_csv", is_flag=True, help="Print lines of values separated by commas.")
@click.pass_obj
def info(driver_root: str, as_csv: bool) -> None:  # noqa: FBT001 (click's flag)
    """Print the versions of the driver and of CUDA, and the GPUs."""
    inventory = machine.discover(driver_root, driver_root, strict=False)
    versions = {
        "NVRM version": inventory.driver.version,
        "CUDA version": inventory.cuda_version or "unknown",
    }
    gpus = [_described(item) for item in inventory.gpus]
    write_stdout(_as_csv(versions, gpus) if as_csv else _as_text(versions, gpus))


def _described(item: GpuNodes) -> dict[str, str]:
    gpu = item.gpu
    domain, _, rest = gpu.bus_id.partition(":")
    values = (
        *(str(gpu.index), str(gpu.minor), gpu.name, gpu.brand.capitalize(), gpu.uuid),
        # With the eight digits of NVML.
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
    *("--device", "-d", "devices"),
    cls=CommaOption,
    help="List the device nodes of these GPUs, or of all.",
)
@click.option("--libraries", "-l", is_flag=True, help="List the driver's libraries.")
@click.option("--binaries", "-b", is_flag=True, help="List the driver's programs.")
@click.option("--ipcs", "-i", is_flag=True, help="List the driver's sockets.")
@click.option("--firmwares", "-f", is_flag=True, help="List the driver's firmware.")
@click.option("--compat32", is_flag=True, help="With --libraries: list 32-bit libraries too.")
@click.option("--mig-config", metavar="all", help="List the node for configuring MIG.")
@click.option("--mig-monitor", metavar="all", help="List the node for monitoring MIG.")
@click.option(
    "--imex-channel", "channels", cls=CommaOption, help="List the nodes of these IMEX channels."
)
@click.option("--no-persistenced", is_flag=True, help="Omit the socket of nvidia-persistenced.")
@click.option("--no-fabricmanager", is_flag=True, help="Omit the socket of the fabric manager.")
@click.option("--no-gsp-firmware", is_flag=True, help="Omit the firmware.")
@click.pass_obj
def list_(driver_root: str, /, **chosen: Any) -> None:  # noqa: ANN401 (click's values)
    """List the host paths that containers need, one per line; without an option, all of them."""
    inventory = machine.discover(driver_root, driver_root, strict=False)
    if not any(chosen[name] for name in _CHOICES):
        kinds = ("libraries", "binaries", "ipcs", "firmwares", "compat32")
        chosen.update(dict.fromkeys(kinds, True))
        chosen["devices"] = (devices.ALL,)
    lines = [
        *_nodes(inventory, chosen),
        *_files(inventory, chosen),
    ]
    write_stdout("".join(f"{line}\n" for line in dict.fromkeys(lines)))


completion.attach(list_)
_CHOICES = (
    *("devices", "libraries", "binaries", "ipcs", "firmwares", "mig_config", "mig_monitor"),
    "channels",
)


def _nodes(inventory: Inventory, chosen: dict[str, Any]) -> list[str]:
    nodes: list[Node] = []
    if chosen["devices"]:
        nodes += inventory.control_nodes
        for device in devices.devices(chosen["devices"], inventory.gpus, inventory.left_out):
            nodes += [device.gpu.node, *(() if device.mig is None else device.mig[1:])]
    channels = {
        node.container_path.rpartition("/channel")[2]: node
        for node in inventory.features[model.IMEX]
    }
    for name in chosen["channels"]:
        number = str(driver_options.channel(name, "--imex-channel"))
        if number not in channels:
            raise UnresolvedDeviceError(
                f"IMEX channel {number} does not exist", "create the channel on the host"
            )
        nodes.append(channels[number])
    for option, feature in (("mig_config", model.MIG_CONFIG), ("mig_monitor", model.MIG_MONITOR)):
        if chosen[option]:
            nodes += inventory.features[feature]
    return [node.host_path for node in nodes]


def _files(inventory: Inventory, chosen: dict[str, Any]) -> list[str]:
    by_kind: dict[str, list[str]] = {}
    for file in inventory.driver.files:
        by_kind.setdefault(file.kind, []).append(file.host_path)
    sockets = [
        path
        for path in by_kind.get("ipc", ())
        if not (chosen["no_persistenced"] and "persistenced" in path)
        and not (chosen["no_fabricmanager"] and "fabricmanager" in path)
    ]
    native = [item for item in inventory.driver.libraries if not _is_32_bit(item)]
    libraries_32 = [item for item in inventory.driver.libraries if _is_32_bit(item)]
    return [
        *(by_kind.get("binary", ()) if chosen["binaries"] else ()),
        *(item.host_path for item in native if chosen["libraries"]),
        *(item.host_path for item in libraries_32 if chosen["libraries"] and chosen["compat32"]),
        *(sockets if chosen["ipcs"] else ()),
        *(
            by_kind.get("firmware", ())
            if chosen["firmwares"] and not chosen["no_gsp_firmware"]
            else ()
        ),
    ]


def _is_32_bit(library: Library) -> bool:
    return library.abi in _32_BIT


@root.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--device", "-d", "devices_", cls=CommaOption)
@click.argument("arguments", nargs=-1)
def configure(devices_: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """Refuse: the runtime and its hooks configure containers.

    The hook of `ctr run --gpus` of containerd 1 calls this command. The hook reads the container's
    state itself, and does not pass the request of the container to this command.
    """
    del arguments
    names = ",".join(devices_) or devices.ALL
    raise GpuRuntimeError(
        f'"{PROGRAM} configure", which "ctr run --gpus" calls, is not supported',
        f'run "ctr run --runc-binary gpu-container-runtime --env NVIDIA_VISIBLE_DEVICES={names} '
        '..." without --gpus',
    )
