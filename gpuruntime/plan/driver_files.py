# SPDX-License-Identifier: Apache-2.0
"""Select the libraries and files of a driver that driver capabilities need; pure."""

from __future__ import annotations

from gpuruntime.model import Driver
from gpuruntime.request import capabilities

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from gpuruntime.model import Library

ABIS_OF_32_BIT = ("i386", "x32", "arm-hard-float", "arm-soft-float")


def select(driver: Driver, requested: Collection[str]) -> Driver:
    """Return the part of *driver* that the *requested* capabilities need.

    The libraries include their dependencies within the driver and the ABI: graphics adds
    libnvidia-gpucomp, a library of compute. 32-bit libraries are included with `compat32` only.
    """
    names = {"", *capabilities.closed(requested)}
    # `graphics` and `display` need the same files; the table of capabilities has `graphics` only.
    libraries = [
        library
        for library in driver.libraries
        if capabilities.COMPAT32 in names or library.abi not in ABIS_OF_32_BIT
    ]
    by_soname = {(library.abi, library.soname): library for library in libraries}
    chosen = [library for library in libraries if library.capability in names]
    pending = list(chosen)
    while pending:
        library = pending.pop()
        for soname in library.needed:
            dependency = by_soname.get((library.abi, soname))
            if dependency is not None and dependency not in chosen:
                chosen.append(dependency)
                pending.append(dependency)
    return Driver(
        version=driver.version,
        libraries=tuple(_ordered(chosen)),
        files=tuple(file for file in driver.files if file.capability in names),
        problems=driver.problems,
        platform=driver.platform,
    )


def left_out(driver: Driver, chosen: Driver) -> dict[str, int]:
    """Return, for each capability, how many of its files in *driver* are not in *chosen*."""
    included = {library.host_path for library in chosen.libraries}
    included |= {file.host_path for file in chosen.files}
    omitted = [
        capabilities.COMPAT32 if library.abi in ABIS_OF_32_BIT else library.capability
        for library in driver.libraries
        if library.host_path not in included
    ]
    omitted += [file.capability for file in driver.files if file.host_path not in included]
    return {name: omitted.count(name) for name in omitted}


def without(driver: Driver, kind: str) -> Driver:
    """Return *driver* without its files of *kind*."""
    return Driver(
        version=driver.version,
        libraries=driver.libraries,
        files=tuple(file for file in driver.files if file.kind != kind),
        problems=driver.problems,
        platform=driver.platform,
    )


def _ordered(libraries: list[Library]) -> list[Library]:
    return sorted(libraries, key=lambda library: library.container_path)
