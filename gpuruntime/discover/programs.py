# SPDX-License-Identifier: Apache-2.0
"""The directories in which the driver's programs can be, in the order of the search.

These are the usual ones, those beside the driver's libraries, and the rest of the host's PATH; or
only those that the operator names.
"""

from __future__ import annotations

import posixpath

from gpuruntime.discover import search_paths
from gpuruntime.discover.root import DriverRoot, normal
from gpuruntime.errors import DiscoveryError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Where a container finds a program of a directory that is not on the PATH of an image.
CONTAINER_DIRECTORY = "/usr/bin"
# The loaders that images have, by the paths that programs of the driver name.
_LOADERS = (
    "/lib64/ld-linux-x86-64.so.2",
    "/lib/ld-linux.so.2",
    "/lib/ld-linux-aarch64.so.1",
    "/lib/ld-linux-armhf.so.3",
)
# Beside "bin", where NixOS keeps the programs as NVIDIA built them, for containers.
_ORIGINALS = "origBin"
# More entries than this are not a PATH that anybody has written.
_MAX_PATH_ENTRIES = 200


class Place(Record):
    """A directory of programs: its *root* and its *path* there.

    *is_usual* is false for one that PATH or an option names: the directories above it are then
    checked as well, because they may be anywhere.
    """

    __slots__ = ("is_usual", "path", "root")

    def __init__(self, root: DriverRoot, path: str, *, is_usual: bool = True) -> None:
        self.root = root
        self.path = path
        self.is_usual = is_usual

    @property
    def host_path(self) -> str:
        """The directory's path on the host."""
        return self.root.host_path(self.path)

    @property
    def container_path(self) -> str:
        """The directory in a container, one that is on the PATH of images.

        /usr/sbin is a symlink to /usr/bin on some hosts, and not in the image.
        """
        directory = self.root.directory(self.path)
        candidates = [directory.path if directory is not None else "", self.path]
        on_path = (path for path in candidates if path in search_paths.IMAGE_PATH)
        return next(on_path, CONTAINER_DIRECTORY)


def places(
    root: DriverRoot,
    libraries: Iterable[tuple[DriverRoot, str]],
    search_path: Sequence[str] = (),
    path: str = "",
) -> list[Place]:
    """Return where programs are looked for, each directory once.

    *libraries* are the directories of the driver's libraries; *search_path*, host paths, replaces
    the usual directories. *path* is the PATH of the host; it applies below *root*.
    """
    if search_path:
        return [Place(*root.around(directory), is_usual=False) for directory in search_path]
    usual = [Place(root, directory) for directory in search_paths.BINARIES]
    beside = [
        Place(base, directory)
        for base, library_directory in libraries
        for directory in search_paths.programs_beside(library_directory)
    ]
    entries = path.split(":", _MAX_PATH_ENTRIES)[:_MAX_PATH_ENTRIES]
    on_path = [
        Place(root, normal(entry), is_usual=False) for entry in entries if entry.startswith("/")
    ]
    first: dict[tuple[str, str], Place] = {}
    for place in (*usual, *beside, *on_path):
        first.setdefault((place.root.path, place.path), place)
    return list(first.values())


def check(place: Place) -> None:
    """Raise DiscoveryError if other users than root can replace the directory *place*."""
    if place.is_usual:
        return
    directory = place.root.directory(place.path)
    path = directory.path if directory is not None else place.path
    while path not in ("", "/"):
        path = posixpath.dirname(path)
        place.root.trusted_directory(path)


def original(path: str) -> str:
    """Return where NixOS keeps the program *path* as NVIDIA built it."""
    directory, name = posixpath.split(path)
    return posixpath.join(posixpath.dirname(directory), _ORIGINALS, name)


def doubt(root: DriverRoot, path: str, native: str) -> str:
    """Return why the program *path* of *root* may not run in a container, "" if it does.

    A host may have a script that starts the program, or have changed the program so that it
    uses another loader: an image has neither what the script starts nor that loader.
    """
    try:
        _, elf = root.library(path)
    except DiscoveryError:
        return "not an ELF program"
    if elf.abi != native:
        return f"for {elf.abi or 'another machine'}, not for {native}"
    if elf.interpreter and elf.interpreter not in _LOADERS:
        return f'its loader "{elf.interpreter}" is not in images'
    return ""
