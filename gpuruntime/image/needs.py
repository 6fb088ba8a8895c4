# SPDX-License-Identifier: Apache-2.0
"""Which libraries of the driver an image's programs need, and what brings them; pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gpuruntime.discover.driver_table import LIBRARIES, NEVER
from gpuruntime.image.contents import Binary, Contents, stem
from gpuruntime.image.elf_file import is_drivers
from gpuruntime.request import capabilities

NEEDED, OPENED = "needs", "opens"
# A library that opens it by name, such as CUDA's runtime, does not work without it.
_CUDA = "libcuda"
_UNKNOWN = "libnvidia-"
# Not of the driver, despite their names: they belong to the NVIDIA Container Toolkit.
_OTHERS = ("libnvidia-container", "libnvidia-container-go")


@dataclass(frozen=True, slots=True)
class User:
    """A file of the image that needs a library, or *opens* it by name."""

    path: str
    how: str
    is_program: bool


@dataclass(frozen=True, slots=True)
class Need:
    """A library of the driver, named *library*, that files of the image for *abi* use.

    *capability* brings it, "" if every capability does.
    """

    library: str
    abi: str
    capability: str
    users: tuple[User, ...]

    @property
    def is_certain(self) -> bool:
        """Whether GPU work fails without it; else its users may have an alternative."""
        return stem(self.library) == _CUDA or any(
            user.how == NEEDED or user.is_program for user in self.users
        )

    def is_brought(self, requested: Collection[str]) -> bool:
        """Return whether the capabilities *requested* bring it."""
        return not self.capability or self.capability in capabilities.closed(requested)


def find(contents: Contents) -> list[Need]:
    """Return the driver libraries that the image needs, sorted by name."""
    users: dict[tuple[str, str], list[User]] = {}
    for binary in contents.binaries.values():
        if is_drivers(binary.soname or binary.path):
            # A driver library in the image: its needs are not those of a program.
            continue
        for library, how in _uses(binary).items():
            user = User(binary.path, how, is_program=bool(binary.interpreter))
            users.setdefault((library, binary.abi), []).append(user)
    return [
        Need(library, abi, _capability(library), tuple(sorted(by, key=_rank)))
        for (library, abi), by in sorted(users.items())
    ]


def _uses(binary: Binary) -> dict[str, str]:
    """Return driver library → how *binary* uses it."""
    uses = dict.fromkeys(filter(is_drivers, binary.opens), OPENED)
    for name in binary.needed:
        if is_drivers(name) or (name.startswith(_UNKNOWN) and stem(name) not in _OTHERS):
            uses[name] = NEEDED
    return uses


def _capability(library: str) -> str:
    row = LIBRARIES.get(stem(library))
    return "" if row is None or row.capability == NEVER else row.capability


def _rank(user: User) -> tuple[bool, bool, str]:
    return not user.is_program, user.how != NEEDED, user.path
