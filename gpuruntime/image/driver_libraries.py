# SPDX-License-Identifier: Apache-2.0
"""The driver's libraries on this machine, with the symbol versions that they require."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass

from gpuruntime import remedies
from gpuruntime.errors import DiscoveryError
from gpuruntime.formats.elf import ElfError
from gpuruntime.image.collect import read_of
from gpuruntime.image.contents import Versions
from gpuruntime.image.elf_file import read_versions
from gpuruntime.model import Driver, Library


@dataclass(frozen=True, slots=True)
class DriverLibrary:
    """A library of the driver; *names* are all names by which it is found."""

    library: Library
    versions: Versions
    names: frozenset[str]


def read(driver: Driver) -> list[DriverLibrary]:
    """Return the libraries of *driver*; raise DiscoveryError for one that cannot be read."""
    return [
        DriverLibrary(library, _versions(library.host_path), frozenset(_names(library)))
        for library in driver.libraries
    ]


def _names(library: Library) -> Iterable[str]:
    yield library.soname
    yield posixpath.basename(library.container_path)
    if library.dev_link:
        yield library.dev_link
    for link in library.links:
        yield posixpath.basename(link.partition("::")[2])


def _versions(path: str) -> Versions:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return read_versions(read_of(fd))
        finally:
            os.close(fd)
    except (OSError, ElfError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DiscoveryError(
            f'cannot read the driver\'s library "{path}": {reason}', remedies.REINSTALL_DRIVER
        ) from error
