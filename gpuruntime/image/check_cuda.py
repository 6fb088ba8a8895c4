# SPDX-License-Identifier: Apache-2.0
"""Check that the CUDA runtime of an image is one that the driver supports; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuruntime.formats import cuda_note
from gpuruntime.formats.driver_version import of_name
from gpuruntime.image.contents import Binary, stem
from gpuruntime.image.loader import numbers
from gpuruntime.image.subject import FAILS, NOTE, WARNING, Finding, Subject

_RUNTIME = re.compile(r"libcudart\.so\.([0-9]{1,4}(?:\.[0-9]{1,6}){0,3})\Z")
# From here on, a runtime works with each driver of its major version, but for what must be
# compiled for the GPU first.
_FIRST_COMPATIBLE = 11
_COMPAT = "/compat"


def check(subject: Subject) -> Iterable[Finding]:
    """Return the runtimes that are newer than the driver."""
    driver = subject.machine.driver
    has = numbers(subject.machine.cuda_version)
    runtimes = _runtimes(subject)
    if not runtimes:
        return
    if driver is None or len(has) < 2:
        shown = ", ".join(sorted(runtimes))
        yield Finding(NOTE, f"CUDA runtime {shown}", "which CUDA the driver supports is not known")
        return
    newer = _compat_version(subject)
    for version, path in sorted(runtimes.items()):
        wants = numbers(version)
        if newer >= wants[:2]:
            continue
        is_newer_minor = len(wants) > 1 and wants[0] == has[0] and wants[1] > has[1]
        if wants[0] <= has[0] and not is_newer_minor:
            continue
        what = f"CUDA runtime {version}"
        supports = f"driver {driver.version} supports CUDA {subject.machine.cuda_version}"
        if wants[0] == has[0] and wants[0] >= _FIRST_COMPATIBLE:
            yield Finding(
                WARNING,
                what,
                f"{supports}: {path} works with it, but its PTX cannot be compiled",
                "update the driver, or use code that is compiled for this GPU",
            )
        else:
            yield Finding(
                FAILS,
                what,
                f"{supports}, and {path} needs a newer one",
                f"update the driver, or use an image with CUDA {has[0]}.{has[1]} or older, "
                "or one with cuda-compat",
            )


def _runtimes(subject: Subject) -> dict[str, str]:
    """Return version → a file that is, or needs, the CUDA runtime of that version."""
    runtimes: dict[str, str] = {}
    for binary in subject.contents.binaries.values():
        if stem(binary.soname) == "libcudart":
            runtimes.setdefault(_version(binary), binary.path)
        for name in binary.needed:
            if stem(name) == "libcudart" and subject.loader.find(name, binary.abi) is None:
                match = _RUNTIME.match(name)
                if match:
                    runtimes.setdefault(_meant(match[1]), binary.path)
    runtimes.pop("", None)
    # A version without its minor says nothing beside one that has it.
    majors = {version.partition(".")[0] for version in runtimes if "." in version}
    return {v: path for v, path in runtimes.items() if "." in v or v not in majors}


def _version(binary: Binary) -> str:
    """Return the version in the file's name, or else in its SONAME."""
    for name in (binary.path.rpartition("/")[2], binary.soname):
        match = _RUNTIME.match(name)
        if match:
            parts = match[1].split(".")
            return ".".join(parts[:2]) if len(parts) > 2 else _meant(match[1])
    return ""


def _meant(version: str) -> str:
    """Return what a version in a SONAME means: of CUDA 11 it is 11.0 for all, later the major."""
    return "11" if version == "11.0" else version


def _compat_version(subject: Subject) -> tuple[int, ...]:
    """Return the CUDA version of a library for forward compatibility that fits the driver."""
    driver = subject.machine.driver
    assert driver is not None
    cuda = subject.machine.cuda_version
    return max(
        (
            numbers(binary.note.cuda_version)
            for binary in subject.contents.binaries.values()
            if binary.note is not None
            and _COMPAT in binary.path
            and cuda_note.is_usable(of_name(binary.path), binary.note, driver.version, cuda)
        ),
        default=(),
    )
