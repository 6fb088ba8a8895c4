# SPDX-License-Identifier: Apache-2.0
"""Check that the loader of the image can load the driver's libraries; pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpuruntime.discover.driver_table import LIBRARIES
from gpuruntime.image.check_requests import names
from gpuruntime.image.contents import stem
from gpuruntime.image.driver_libraries import DriverLibrary
from gpuruntime.image.loader import GLIBC, MUSL, Libc, is_of_musl, newest, numbers
from gpuruntime.image.subject import FAILS, NOTE, WARNING, Finding, Subject
from gpuruntime.request.capabilities import COMPUTE, UTILITY

# Without its library, a capability does not work at all.
_FIRST = {COMPUTE: "libcuda.so.1", UTILITY: "libnvidia-ml.so.1"}
_PLATFORMS = {"x86-64": "linux/amd64", "aarch64": "linux/arm64"}


def check(subject: Subject) -> Iterable[Finding]:
    """Return which of the driver's libraries would not load, and why."""
    if subject.is_foreign:
        native = subject.machine.native
        yield Finding(
            FAILS,
            "all libraries of the driver",
            f"the image is for {subject.abi or 'another architecture'}, and the driver of this "
            f"machine for {native}",
            f'use the image of the platform "{_PLATFORMS.get(native, native)}"',
        )
        return
    yield from _of_other_libc(subject)
    for abi in subject.abis:
        libc = subject.loader.libc(abi)
        if libc.kind == GLIBC:
            yield from _of_glibc(subject, abi, libc)
        else:
            yield _without_glibc(libc, is_complete=subject.contents.is_complete)


def _without_glibc(libc: Libc, *, is_complete: bool) -> Finding:
    if libc.kind == MUSL:
        return Finding(
            FAILS,
            "all libraries of the driver",
            "they are for glibc, and the image has musl",
            "build on an image with glibc, such as debian, ubuntu or ubi",
        )
    if not is_complete:
        return Finding(
            WARNING,
            "all libraries of the driver",
            "they are for glibc, and no libc.so.6 is in the examined part of the image",
        )
    return Finding(
        FAILS,
        "all libraries of the driver",
        "they are for glibc, and the image has no libc.so.6",
        "build on an image with glibc: static programs cannot load them",
    )


def _of_other_libc(subject: Subject) -> Iterable[Finding]:
    """Return the programs for musl that need the driver, in an image that has glibc as well."""
    programs = [
        user.path
        for need in subject.needs
        for user in need.users
        if subject.loader.libc(need.abi).kind == GLIBC
        and is_of_musl(subject.contents.binaries[user.path])
    ]
    if programs:
        yield Finding(
            FAILS,
            names(programs),
            "it is for musl's loader, which cannot load the driver's libraries",
            "build it for glibc",
        )


def _of_glibc(subject: Subject, abi: str, libc: Libc) -> Iterable[Finding]:
    """Return what the driver's libraries for *abi* lack in the image, one finding a reason."""
    libraries = [item for item in subject.selected if item.library.abi == abi]
    essential = _essential(subject, abi, libraries)
    drivers = {name for item in libraries for name in item.names}
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for item in libraries:
        is_essential = bool(item.names & essential)
        for level, why, action in _lacks(subject, item, drivers, libc):
            key = (FAILS if is_essential else level, why, action)
            reasons.setdefault(key, []).append(item.library.soname)
    for (level, why, action), sonames in reasons.items():
        yield Finding(level, names(sonames), why, action)


def _essential(subject: Subject, abi: str, libraries: list[DriverLibrary]) -> set[str]:
    """Return the names of the libraries without which the image's GPU work fails."""
    todo = [need.library for need in subject.needs if need.abi == abi and need.is_certain]
    todo += [name for capability, name in _FIRST.items() if capability in subject.capabilities]
    essential: set[str] = set()
    while todo:
        name = todo.pop()
        if name in essential:
            continue
        essential.add(name)
        for item in libraries:
            if name in item.names:
                row = LIBRARIES.get(stem(item.library.soname))
                todo += [*item.library.needed, *(row.opens if row else ())]
    return essential


def _lacks(
    subject: Subject, item: DriverLibrary, drivers: set[str], libc: Libc
) -> Iterable[tuple[str, str, str]]:
    """Return (level, reason, action) for each reason why *item* would not load.

    The level is that of a library that the image does not need.
    """
    abi = item.library.abi
    for soname in item.library.needed:
        if soname not in drivers and subject.loader.find(soname, abi) is None:
            # Most images do not use these, such as libraries of window systems.
            yield NOTE, f"{soname} is not in the image", f"install the package that has {soname}"
    missing: dict[str, list[str]] = {}
    for soname, version in item.versions.requires:
        provider = None if soname in drivers else subject.loader.find(soname, abi)
        # The loader accepts a library without versions.
        if provider and provider.versions.provides and version not in provider.versions.provides:
            missing.setdefault(soname, []).append(version)
    for soname, versions in missing.items():
        required = newest(versions)
        if required and numbers(required) > numbers(libc.version or "0"):
            has = libc.version or "an older version"
            yield (
                WARNING,
                f"needs glibc {required} (GLIBC_{required} of {soname}), the image has {has}",
                f"build on an image with glibc {required} or newer, or use an older driver",
            )
        else:
            yield (
                WARNING,
                f"{soname} of the image lacks the symbol versions {names(sorted(versions))}",
                f"install a newer {soname} in the image",
            )
