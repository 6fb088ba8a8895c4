# SPDX-License-Identifier: Apache-2.0
"""Read the CSV files that list what a container gets on a Tegra: lines of `TYPE, PATH`.

A line that cannot be used is a sentence with the file and the number of the line; the other lines
count.
"""

from __future__ import annotations

import posixpath

from gpuruntime.errors import DiscoveryError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuruntime.discover.root import DriverRoot

DIRECTORY = "/etc/nvidia-container-runtime/host-files-for-container.d"
BASE = ("devices.csv", "drivers.csv", "l4t.csv")
DEVICE, DIRECTORY_TREE, LIBRARY, SYMLINK = KINDS = ("dev", "dir", "lib", "sym")
MAX_BYTES = 4 << 20
MAX_FILES = 64
MAX_ENTRIES = 20_000
MAX_SENTENCES = 16


class Entry(Record):
    """A line: its *kind*, one of KINDS, its *path* or pattern, and *where* it is in the files.

    *is_base*: the file is one of those that every container gets.
    """

    __slots__ = ("is_base", "kind", "path", "where")

    def __init__(self, kind: str, path: str, where: str, *, is_base: bool) -> None:
        self.kind = kind
        self.path = path
        self.where = where
        self.is_base = is_base


class Sentences:
    """The sentences about lines, of which only the first are kept, and the number of all."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._count = 0

    def add(self, text: str) -> None:
        """Add the sentence *text*."""
        self._count += 1
        if self._count <= MAX_SENTENCES:
            self._texts.append(text)

    def all(self) -> tuple[str, ...]:
        """Return the first sentences, and one with the number of the others."""
        rest = self._count - len(self._texts)
        return (
            *self._texts,
            *([f"{rest} more lines of the CSV files are left out"] if rest else []),
        )


def paths(root: DriverRoot, directory: str, files: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the host paths of the CSV files, each with whether every container gets its entries.

    *files*, host paths, replace those in *directory*, a host path that is looked for below *root*
    first.
    """
    if files:
        return [(path, True) for path in dict.fromkeys(files)]
    for base in dict.fromkeys((root, root.host)):
        listing = base.directory(directory)
        if listing is not None:
            names = sorted(name for name in listing.names if name.endswith(".csv")) or BASE
            ordered = [*(name for name in BASE if name in names), *names]
            return [
                (base.host_path(listing.join(name)), name in BASE)
                for name in dict.fromkeys(ordered)
            ][:MAX_FILES]
    return [(root.host_path(posixpath.join(directory, name)), True) for name in BASE]


def read(
    root: DriverRoot, listed: Sequence[tuple[str, bool]], sentences: Sentences
) -> list[Entry]:
    """Return the entries of the files *listed*, in order; faults are added to *sentences*.

    Raises DiscoveryError if no file can be used.
    """
    entries: list[Entry] = []
    refused: list[str] = []
    for host_path, is_base in listed:
        base, path = root.around(host_path)
        try:
            data = base.content(path, MAX_BYTES)
        except DiscoveryError as error:
            refused.append(error.message)
            continue
        if b"\0" in data:
            refused.append(f'"{host_path}" is not a text file')
            continue
        parsed = _parse(data, host_path, sentences, is_base=is_base)
        if not parsed:
            refused.append(f'"{host_path}" has no entry')
        entries += parsed
    if not entries:
        raise DiscoveryError(
            f"no CSV file can be used: {'; '.join(refused[:4]) or 'there is none'}",
            'install the package of JetPack with the CSV files, or name them with "--csv.file"',
        )
    for text in refused:
        sentences.add(text)
    if len(entries) > MAX_ENTRIES:
        sentences.add(f"only the first {MAX_ENTRIES} entries of the CSV files are used")
    return entries[:MAX_ENTRIES]


def _parse(data: bytes, host_path: str, sentences: Sentences, *, is_base: bool) -> list[Entry]:
    entries = []
    text = data.decode("utf-8-sig", "surrogateescape")
    for number, line in enumerate(text.split("\n"), 1):
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        where = f'"{host_path}" line {number}'
        kind, comma, path = (part.strip() for part in words.partition(","))
        if not comma:
            sentences.add(f'{where}: "{_shortened(words)}" is not of the form TYPE, PATH')
        elif kind not in KINDS:
            sentences.add(f'{where}: the type "{_shortened(kind)}" is none of {", ".join(KINDS)}')
        elif not path:
            sentences.add(f"{where}: there is no path")
        elif not (path.startswith("/") or (kind == LIBRARY and "/" not in path)):
            sentences.add(f'{where}: "{_shortened(path)}" is not an absolute path')
        else:
            entries.append(Entry(kind, path, where, is_base=is_base))
    return entries


def _shortened(text: str) -> str:
    return text if len(text) <= 64 else f"{text[:64]}..."
