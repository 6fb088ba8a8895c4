# SPDX-License-Identifier: Apache-2.0
"""Check that no library of the image hides one of the driver's; pure.

The runtime puts the driver first in the loader cache. Only what the loader searches before its
cache can hide the driver: LD_LIBRARY_PATH, DT_RPATH and DT_RUNPATH.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable

from gpuruntime.formats import cuda_note
from gpuruntime.formats.driver_version import of_name
from gpuruntime.image.check_requests import names
from gpuruntime.image.contents import CACHE, Binary, stem
from gpuruntime.image.elf_file import is_drivers
from gpuruntime.image.subject import FAILS, NOTE, WARNING, Finding, Subject

_LIBRARY_PATH = "LD_LIBRARY_PATH"
_STUBS = "stubs"
_COMPAT = "compat"
_CUDA = "libcuda"
_ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1")
_MAX_DIRECTORIES = 200


def check(subject: Subject) -> Iterable[Finding]:
    """Return the libraries that hide the driver's, and driver libraries in the image's cache."""
    yield from _by_variable(subject)
    yield from _by_programs(subject)
    yield from _of_cache(subject)
    yield from _own(subject)


def _by_variable(subject: Subject) -> Iterable[Finding]:
    words = subject.environment.get(_LIBRARY_PATH, "").replace(";", ":").split(":")
    where = f"{_LIBRARY_PATH} of the container"
    for directory in list(dict.fromkeys(filter(None, words)))[:_MAX_DIRECTORIES]:
        for name, abi in _loaded(subject):
            yield from _hides(subject, name, abi, directory, where)


def _by_programs(subject: Subject) -> Iterable[Finding]:
    done: set[tuple[str, str]] = set()
    for need in subject.needs:
        for user in need.users:
            origin = posixpath.dirname(user.path)
            for entry in subject.contents.binaries[user.path].search[:_MAX_DIRECTORIES]:
                directory = entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)
                if (need.library, directory) in done:
                    continue
                done.add((need.library, directory))
                where = f"DT_RUNPATH or DT_RPATH of {user.path}"
                yield from _hides(subject, need.library, need.abi, directory, where)


def _loaded(subject: Subject) -> list[tuple[str, str]]:
    """Return the names of driver libraries that programs load, each with its ABI."""
    names_and_abis = dict.fromkeys((need.library, need.abi) for need in subject.needs)
    for abi in subject.abis:
        names_and_abis |= dict.fromkeys((name, abi) for name in _ALWAYS)
    return list(names_and_abis)


def _hides(subject: Subject, name: str, abi: str, directory: str, where: str) -> Iterable[Finding]:
    """Return the finding that *directory* has a library *name*, if it has one."""
    if not directory.startswith("/"):
        # Relative to the working directory of the program, which is unknown.
        return
    path = posixpath.join(directory, name)
    if subject.contents.resolve(directory) in _places(subject, name, abi):
        # The hook replaces the file of this name there.
        return
    if subject.contents.is_empty(path):
        yield Finding(
            FAILS,
            path,
            f"it is empty and hides the driver's {name}: {where} names its directory",
            f"remove the file from the image, or {directory} from {where}",
        )
        return
    binary = subject.contents.binary(path)
    if binary is None or binary.abi != abi:
        # The loader skips a library for another machine.
        return
    yield _verdict(subject, name, path, binary, where)


def _verdict(subject: Subject, name: str, path: str, binary: Binary, where: str) -> Finding:
    directory = posixpath.dirname(path)
    if _STUBS in posixpath.dirname(binary.path).split("/") or _STUBS in directory.split("/"):
        return Finding(
            FAILS,
            path,
            f"a stub of the CUDA toolkit, which is for the linker only, hides the driver's "
            f"{name}: {where} names its directory",
            f"remove {directory} from {where} when the image is built",
        )
    driver = subject.machine.driver
    version = of_name(binary.path)
    if driver is not None and stem(name) == _CUDA and binary.note is not None:
        cuda = subject.machine.cuda_version
        if cuda_note.is_usable(version, binary.note, driver.version, cuda):
            return Finding(
                NOTE, path, "CUDA for forward compatibility is used in place of the driver's"
            )
        if version and version == driver.version:
            return Finding(NOTE, path, "it has the version of the driver")
        return Finding(
            FAILS,
            path,
            f"CUDA for forward compatibility that is not for driver {driver.version} hides the "
            f"driver's {name}: {where} names its directory",
            f"remove {directory} from {where}: if it fits, the runtime puts it first",
        )
    if driver is not None and version == driver.version:
        return Finding(WARNING, path, "a copy of the driver's library", "remove it from the image")
    return Finding(
        FAILS,
        path,
        f"the image's own library{f' of driver {version}' if version else ''} hides the driver's "
        f"{name}: {where} names its directory",
        f"remove the file from the image, or {directory} from {where}",
    )


def _places(subject: Subject, name: str, abi: str) -> set[str | None]:
    """Return the directories in which the container gets the driver's library *name*."""
    return {
        subject.contents.resolve(posixpath.dirname(item.library.container_path))
        for item in subject.selected
        if item.library.abi == abi and name in item.names
    }


def _own(subject: Subject) -> Iterable[Finding]:
    """Return the driver libraries that the image brings and its loader finds."""
    places = {
        subject.contents.resolve(directory)
        for abi in subject.abis
        for directory in subject.loader.directories(abi)
    }
    places |= {
        subject.contents.resolve(posixpath.dirname(row.path)) for row in subject.loader.cached
    }
    own = [
        binary.path
        for binary in subject.contents.binaries.values()
        if is_drivers(binary.path)
        and posixpath.dirname(binary.path) in places
        and not {_STUBS, _COMPAT} & set(binary.path.split("/"))
    ]
    if own:
        yield Finding(
            WARNING,
            names(sorted(own)),
            "the image has driver libraries; this runtime puts those of the machine first, other "
            "runtimes may not",
            "remove them from the image",
        )


def _of_cache(subject: Subject) -> Iterable[Finding]:
    if subject.loader.problem:
        yield Finding(
            WARNING,
            CACHE,
            f"the image's loader cache is not used: {subject.loader.problem}",
            "run ldconfig when the image is built",
        )
    brought = {name for item in subject.selected for name in item.names}
    certain = {need.library for need in subject.needs if need.is_certain}
    stale: dict[str, list[str]] = {}
    for row in subject.loader.cached:
        if not is_drivers(row.soname):
            continue
        fails = row.soname in certain and row.soname not in brought
        if row.is_for_cpu and subject.contents.binary(row.path) is not None:
            yield Finding(
                FAILS,
                row.path,
                f"it hides the driver's {row.soname}: the loader prefers libraries for this CPU",
                "remove the file from the image",
            )
        elif _is_stale(subject, row.path):
            stale.setdefault(FAILS if fails else WARNING, []).append(row.soname)
    for level, sonames in stale.items():
        yield Finding(
            level,
            CACHE,
            "the image's loader cache is stale: it lists driver libraries that are not in the "
            f"image: {names(sonames)}",
            "run ldconfig when the image is built, without the driver",
        )


def _is_stale(subject: Subject, path: str) -> bool:
    contents = subject.contents
    return contents.is_complete and (contents.binary(path) is None or contents.is_empty(path))
