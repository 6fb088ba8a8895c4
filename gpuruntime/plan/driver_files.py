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


def select(driver: Driver, wanted: Collection[str]) -> Driver:
    """Return what of *driver* the capabilities *wanted* ask for.

    The libraries are closed over what they need of the driver, within one ABI: graphics brings
    libnvidia-gpucomp, which is for compute. Those of 32 bits are there with `compat32` only.
    """
    names = {"", *capabilities.closed(wanted)}
    # Files of the two are the same; `display` is not the name of a capability in the table.
    libraries = [
        library
        for library in driver.libraries
        if capabilities.COMPAT32 in names or library.abi not in ABIS_OF_32_BIT
    ]
    by_soname = {(library.abi, library.soname): library for library in libraries}
    chosen = [library for library in libraries if library.capability in names]
    todo = list(chosen)
    while todo:
        library = todo.pop()
        for soname in library.needed:
            found = by_soname.get((library.abi, soname))
            if found is not None and found not in chosen:
                chosen.append(found)
                todo.append(found)
    return Driver(
        version=driver.version,
        libraries=tuple(_ordered(chosen)),
        files=tuple(file for file in driver.files if file.capability in names),
        problems=driver.problems,
    )


def left_out(driver: Driver, chosen: Driver) -> dict[str, int]:
    """Return capability → how many files of *driver* it would bring that *chosen* lacks."""
    there = {library.host_path for library in chosen.libraries}
    there |= {file.host_path for file in chosen.files}
    missing = [
        capabilities.COMPAT32 if library.abi in ABIS_OF_32_BIT else library.capability
        for library in driver.libraries
        if library.host_path not in there
    ]
    missing += [file.capability for file in driver.files if file.host_path not in there]
    return {name: missing.count(name) for name in missing}


def without(driver: Driver, kind: str) -> Driver:
    """Return *driver* without its files of *kind*."""
    return Driver(
        version=driver.version,
        libraries=driver.libraries,
        files=tuple(file for file in driver.files if file.kind != kind),
        problems=driver.problems,
    )


def _ordered(libraries: list[Library]) -> list[Library]:
    return sorted(libraries, key=lambda library: library.container_path)
