# SPDX-License-Identifier: Apache-2.0
"""An image and the machine that it would run on, for the checks; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpuruntime.discover.search_paths import abis
from gpuruntime.image import needs
from gpuruntime.image.contents import Contents
from gpuruntime.image.driver_libraries import DriverLibrary
from gpuruntime.image.loader import Loader
from gpuruntime.image.needs import Need
from gpuruntime.model import Driver
from gpuruntime.plan import driver_files

FAILS, WARNING, NOTE = "fails", "warning", "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about an image. *level* is FAILS if GPU work fails because of it.

    *action* is what to do about it, "" for nothing.
    """

    level: str
    what: str
    why: str
    action: str = ""


@dataclass(frozen=True)
class Machine:
    """The driver of a machine of ABI *native*; *cuda_version* is "" if it is unknown."""

    native: str
    driver: Driver | None = None
    libraries: Sequence[DriverLibrary] = ()
    cuda_version: str = ""


@dataclass(frozen=True)
class Subject:
    """The *contents* of an image, the variables of its container, and the *machine*.

    *capabilities* are the driver capabilities that the container requests.
    """

    contents: Contents
    environment: Mapping[str, str]
    capabilities: Sequence[str]
    machine: Machine

    @cached_property
    def loader(self) -> Loader:
        """The loader of the image."""
        return Loader(self.contents)

    @cached_property
    def needs(self) -> list[Need]:
        """The driver libraries that the image's files need."""
        return needs.find(self.contents)

    @cached_property
    def abi(self) -> str:
        """The ABI of most of the image's files, "" if it is not a known one."""
        counts = Counter(binary.abi for binary in self.contents.binaries.values())
        return max(counts, key=lambda abi: (counts[abi], abi), default="")

    @property
    def is_foreign(self) -> bool:
        """Whether the image is not for the architecture of the machine."""
        return bool(self.contents.binaries) and self.abi not in abis(self.machine.native)

    @cached_property
    def selected(self) -> list[DriverLibrary]:
        """The libraries of the driver that the container gets."""
        if self.machine.driver is None:
            return []
        chosen = driver_files.select(self.machine.driver, self.capabilities)
        paths = {library.host_path for library in chosen.libraries}
        return [item for item in self.machine.libraries if item.library.host_path in paths]

    @cached_property
    def abis(self) -> list[str]:
        """The ABIs of the files that need the driver; without such files, that of the image."""
        of_needs = dict.fromkeys(need.abi for need in self.needs)
        return list(of_needs) or ([self.abi] if self.contents.binaries else [])
