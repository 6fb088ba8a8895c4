# SPDX-License-Identifier: Apache-2.0
"""Where the loader of an image finds libraries, and which C library it belongs to; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpuruntime.errors import LdcacheError
from gpuruntime.formats import ldcache_merge
from gpuruntime.image.contents import CACHE, LOADER_CONFIG, Binary, Contents

GLIBC, MUSL = "glibc", "musl"
_LIBC = "libc.so.6"
_MUSL_LOADER = re.compile(r"/lib/ld-musl-[a-z0-9_-]+\.so\.1\Z")
_TRIPLETS = {
    "x86-64": ("x86_64-linux-gnu",),
    "i386": ("i386-linux-gnu", "i686-linux-gnu"),
    "aarch64": ("aarch64-linux-gnu",),
    "arm-hard-float": ("arm-linux-gnueabihf",),
    "arm-soft-float": ("arm-linux-gnueabi",),
    "ppc64le": ("powerpc64le-linux-gnu",),
    "riscv64": ("riscv64-linux-gnu",),
}
_GLIBC_VERSION = re.compile(r"GLIBC_([0-9]+(?:\.[0-9]+)+)\Z")
_RELEASE = re.compile(r"/libc-([0-9]{1,3}\.[0-9]{1,3})\.so\Z")
_PARTS = (_LIBC, "libm.so.6", "libpthread.so.0")
_MAX_DIRECTORIES = 500


@dataclass(frozen=True, slots=True)
class Libc:
    """The C library of an image: *kind*, "" if there is none, and *version*, "" if unknown."""

    kind: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.kind or 'no C library'} {self.version}".rstrip()


@dataclass(frozen=True, slots=True)
class Cached:
    """An entry of the image's own loader cache.

    An entry that *is_for_cpu*, in a directory glibc-hwcaps, takes precedence over others.
    """

    soname: str
    path: str
    flags: int
    is_for_cpu: bool


class Loader:
    """The libraries that the loader of the image *contents* finds before the driver is added."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self.problem = ""
        self.cached = self._read_cache()
        self._by_name: dict[str, list[Cached]] = {}
        for entry in self.cached:
            self._by_name.setdefault(entry.soname, []).append(entry)
        self._configured = _configured(contents.config)
        self._libcs: dict[str, Libc] = {}

    def _read_cache(self) -> list[Cached]:
        """Return the entries of the cache; *problem* says why there are none."""
        data = self._contents.config.get(CACHE)
        if data is None:
            return []
        try:
            rows = ldcache_merge.parse(data)
        except LdcacheError as error:
            self.problem = error.message
            return []
        return [Cached(name, path, flags, bool(hwcap)) for name, path, flags, _, hwcap in rows]

    def find(self, soname: str, abi: str) -> Binary | None:
        """Return the library *soname* that programs of *abi* load, None if there is none."""
        flags = ldcache_merge.ABI_FLAGS.get(abi)
        paths = [row.path for row in self._by_name.get(soname, ()) if row.flags == flags]
        paths += [f"{directory}/{soname}" for directory in self.directories(abi)]
        for path in paths:
            binary = self._contents.binary(path)
            if binary is not None and binary.abi == abi:
                return binary
        return None

    def directories(self, abi: str) -> list[str]:
        """Return the directories that the loader and ldconfig search."""
        multiarch = [
            f"{lib}/{triplet}"
            for triplet in _TRIPLETS.get(abi, ())
            for lib in ("/lib", "/usr/lib")
        ]
        return [*multiarch, "/lib64", "/usr/lib64", "/lib", "/usr/lib", *self._configured]

    def _release(self, glibc: Binary) -> str:
        """Return the version of *glibc*: that in its name, by default the newest of its symbols.

        Not every release has new symbols, and some have them in other libraries than libc.so.6.
        """
        match = _RELEASE.search(glibc.path)
        if match:
            return match[1]
        parts = (self.find(name, glibc.abi) for name in _PARTS)
        return newest(version for part in parts if part for version in part.versions.provides)

    def libc(self, abi: str) -> Libc:
        """Return the C library of programs of *abi*; glibc, if the image has two."""
        if abi not in self._libcs:
            self._libcs[abi] = self._libc(abi)
        return self._libcs[abi]

    def _libc(self, abi: str) -> Libc:
        glibc = self.find(_LIBC, abi)
        if glibc is not None and newest(glibc.versions.provides):
            # A libc.so.6 without versions is a link to another C library.
            return Libc(GLIBC, self._release(glibc))
        paths = (*self._contents.links, *self._contents.binaries)
        if any(_MUSL_LOADER.match(path.removeprefix("/usr")) for path in paths):
            return Libc(MUSL)
        return Libc("")


def is_of_musl(binary: Binary) -> bool:
    """Return whether a program or library is for musl's loader."""
    return "/ld-musl-" in binary.interpreter or any(
        name == "libc.so" or name.startswith("libc.musl-") for name in binary.needed
    )


def newest(versions: Iterable[str]) -> str:
    """Return the newest version of glibc among symbol *versions*, "" if there is none."""
    releases = [match[1] for match in map(_GLIBC_VERSION.match, versions) if match]
    return max(releases, key=numbers, default="")


def numbers(version: str) -> tuple[int, ...]:
    """Return a key that orders versions."""
    return tuple(int(part) for part in version.split(".")[:4] if part.isdecimal())


def _configured(config: dict[str, bytes]) -> list[str]:
    """Return the directories that the loader's configuration files name."""
    directories: dict[str, None] = {}
    for path in sorted(config):
        if path != LOADER_CONFIG and not path.endswith(".conf"):
            continue
        for line in config[path].decode("utf-8", "surrogateescape").splitlines():
            words = line.partition("#")[0].split()
            if words and words[0].startswith("/") and len(directories) < _MAX_DIRECTORIES:
                directories[words[0].partition("=")[0].rstrip("/") or "/"] = None
    return list(directories)
