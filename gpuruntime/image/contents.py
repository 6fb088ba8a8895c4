# SPDX-License-Identifier: Apache-2.0
"""The contents of an image as plain values: ELF files, links, the loader's configuration."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field

from gpuruntime.formats.cuda_note import CudaNote

MAX_LINKS = 40
MAX_PARTS = 1000  # of a path and of the links in it
CACHE = "/etc/ld.so.cache"
LOADER_CONFIG = "/etc/ld.so.conf"
LOADER_DIRECTORY = "/etc/ld.so.conf.d/"


@dataclass(frozen=True, slots=True)
class Versions:
    """Symbol versions: those a file *provides*, and those it *requires*, by SONAME."""

    provides: frozenset[str] = frozenset()
    requires: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Binary:
    """An ELF program or library of an image.

    *needed* are SONAMEs of DT_NEEDED; *opens* are names of driver libraries in its .rodata, which
    it gives to dlopen. *interpreter* is the loader that a program names, "" for a library.
    *search* are the directories of DT_RPATH or DT_RUNPATH. *note* is that of a CUDA library for
    forward compatibility. The last four are read only for files that are related to the driver.
    """

    path: str
    abi: str
    soname: str
    needed: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    interpreter: str = ""
    search: tuple[str, ...] = ()
    versions: Versions = Versions()
    note: CudaNote | None = None


@dataclass(slots=True)
class Contents:
    """The files of an image that its loader uses.

    *links* are path → target; *empty* the paths of empty files that are named like libraries;
    *config* the loader's configuration, path → bytes. *entries* counts everything. *limits* are
    sentences about files that were not examined; *is_complete* is False if libraries may be
    missing.
    """

    binaries: dict[str, Binary] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)
    config: dict[str, bytes] = field(default_factory=dict)
    entries: int = 0
    limits: list[str] = field(default_factory=list)
    is_complete: bool = True

    def resolve(self, path: str) -> str | None:
        """Return *path* with links resolved inside the image; None for a loop of links."""
        todo = [part for part in path.split("/") if part][::-1]
        parts: list[str] = []
        followed = steps = 0
        while todo:
            part = todo.pop()
            steps += 1
            if part == ".":
                continue
            if part == "..":
                parts = parts[:-1]
                continue
            target = self.links.get("/" + "/".join([*parts, part]))
            if target is None:
                parts.append(part)
                continue
            followed += 1
            if followed > MAX_LINKS or steps > MAX_PARTS:
                return None
            if target.startswith("/"):
                parts = []
            todo += [name for name in target.split("/") if name][::-1]
        return "/" + "/".join(parts)

    def binary(self, path: str) -> Binary | None:
        """Return the ELF file that *path* resolves to, None if there is none."""
        real = self.resolve(path)
        return None if real is None else self.binaries.get(real)

    def is_empty(self, path: str) -> bool:
        """Return whether *path* resolves to an empty file that is named like a library."""
        return self.resolve(path) in self.empty


def stem(name: str) -> str:
    """Return the part of the file name of *name* before `.so`."""
    return posixpath.basename(name).partition(".so")[0]
