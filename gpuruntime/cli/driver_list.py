# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime driver list`: print the driver's files that a container needs to use its GPUs."""

from __future__ import annotations

import json
from typing import Any

import click

from gpuruntime.cli import config_in_force
from gpuruntime.cli.comma_option import CommaOption
from gpuruntime.cli.output import write_stdout
from gpuruntime.discover import search_paths
from gpuruntime.discover import user_space as discovery
from gpuruntime.errors import ArgumentError, escape
from gpuruntime.model import Driver, File, Library
from gpuruntime.plan import driver_files, gpu_edits
from gpuruntime.request import capabilities

ALL = "all"
# The kinds of files in the order of the list; libraries follow the first kind.
_KINDS = ("binary", "config", "xorg", "ipc", "firmware")


@click.command("list")
@click.option(
    "--driver-root",
    default="",
    envvar=["GPURUNTIME_DRIVER_ROOT", "NVIDIA_CTK_DRIVER_ROOT"],
    help="Directory below which the driver is installed.  [default: config.toml's, or /]",
)
@click.option(
    *("--capability", "requested"),
    cls=CommaOption,
    envvar="GPURUNTIME_DRIVER_CAPABILITIES",
    metavar="NAME",
    help=f"Only the files for {', '.join(capabilities.ALL)}; repeatable.  [default: all]",
)
@click.option(
    *("--library-search-path", "library_search_paths"),
    cls=CommaOption,
    envvar="GPURUNTIME_LIBRARY_SEARCH_PATHS",
    help="Directory of the driver's libraries, in place of the usual ones.",
)
@click.option(
    *("--config-search-path", "config_search_paths"),
    cls=CommaOption,
    envvar="GPURUNTIME_CONFIG_SEARCH_PATHS",
    help="Directory of the driver's other files, in place of the usual ones.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_(
    driver_root: str,
    requested: tuple[str, ...],
    library_search_paths: tuple[str, ...],
    config_search_paths: tuple[str, ...],
    as_json: bool,  # noqa: FBT001 (click's flag)
) -> None:
    """List the files of the driver, one path on the host a line.

    Programs, libraries, 32-bit libraries, configuration, sockets, firmware. The driver need not
    run: its version is that of the loaded module, or else of its libraries. What was left out is
    warned of on standard error.
    """
    for name in requested:
        if name not in (ALL, *capabilities.ALL):
            names = ", ".join((ALL, *capabilities.ALL))
            raise ArgumentError(f'invalid driver capability: "{name}"', f"use {names}")
    driver = discovery.find_driver(
        discovery.DriverRoot(driver_root or config_in_force.driver_root()),
        library_search_path=library_search_paths,
        config_search_path=config_search_paths,
    )
    if requested and ALL not in requested:
        driver = driver_files.select(driver, requested)
    if as_json:
        write_stdout(f"{json.dumps(as_object(driver), indent=2)}\n")
        return
    for problem in driver.problems:
        click.echo(f"warning: {escape(problem)}", err=True)
    items = ordered(driver)
    write_stdout("".join(f"{escape(item.host_path)}\n" for item in items))
    click.echo(f"driver {driver.version}: {len(items)} files", err=True)


def ordered(driver: Driver) -> list[Library | File]:
    """Return the driver's libraries and files, kind by kind."""
    native = search_paths.native_abi()
    files = {kind: [file for file in driver.files if file.kind == kind] for kind in _KINDS}
    libraries = sorted(driver.libraries, key=lambda library: library.abi != native)
    first, *rest = _KINDS
    return [*files[first], *libraries, *(file for kind in rest for file in files[kind])]


def as_object(driver: Driver) -> dict[str, Any]:
    """Return the object that `--json` prints for *driver*."""
    return {
        "version": driver.version,
        "files": [_file(item) for item in ordered(driver)],
        "links": gpu_edits.links(driver),
        "problems": list(driver.problems),
    }


def _file(item: Library | File) -> dict[str, Any]:
    described = {
        "path": item.host_path,
        "containerPath": item.container_path,
        "kind": item.kind if isinstance(item, File) else "library",
        "capability": item.capability or ALL,
    }
    if isinstance(item, File):
        return described
    return {
        **described,
        "soname": item.soname,
        "abi": item.abi,
        "needed": list(item.needed),
    }
