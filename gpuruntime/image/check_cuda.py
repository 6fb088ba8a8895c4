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
# Since this version, a runtime works with each driver of its major version; only code that must be
# compiled for the GPU first needs a newer one.
_FIRST_COMPATIBLE = 11
_COMPAT = "/compat"


def check(subject: Subject) -> Iterable[Finding]:
    """Return the findings about CUDA runtimes that are newer than the driver supports."""
    driver = subject.machine.driver
    supported = numbers(subject.machine.cuda_version)
    runtimes = _runtimes(subject)
    if not runtimes:
        return
    if driver is None or len(supported) < 2:
        shown = ", ".join(sorted(runtimes))
        yield Finding(
            NOTE, f"CUDA runtime {shown}", "the CUDA version that the driver supports is unknown"
        )
        return
    newer = _compat_version(subject)
    for version, path in sorted(runtimes.items()):
        required = numbers(version)
        if newer >= required[:2]:
            continue
        is_newer_minor = (
            len(required) > 1 and required[0] == supported[0] and required[1] > supported[1]
        )
        if required[0] <= supported[0] and not is_newer_minor:
            continue
        what = f"CUDA runtime {version}"
        supports = f"driver {driver.version} supports CUDA {subject.machine.cuda_version}"
        if required[0] == supported[0] and required[0] >= _FIRST_COMPATIBLE:
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
                f"{supports}, but {path} needs a newer version",
                "update the driver, or use an image with CUDA "
                f"{supported[0]}.{supported[1]} or older, or an image with cuda-compat",
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
                    runtimes.setdefault(_of_soname(match[1]), binary.path)
    runtimes.pop("", None)
    # A version without a minor number adds nothing to one that has it.
    majors = {version.partition(".")[0] for version in runtimes if "." in version}
    return {v: path for v, path in runtimes.items() if "." in v or v not in majors}


def _version(binary: Binary) -> str:
    """Return the version in the file's name, or else in its SONAME."""
    for name in (binary.path.rpartition("/")[2], binary.soname):
        match = _RUNTIME.match(name)
        if match:
            parts = match[1].split(".")
            return ".".join(parts[:2]) if len(parts) > 2 else _of_soname(match[1])
    return ""


def _of_soname(version: str) -> str:
    """Return the version that a SONAME has: 11.0 for all of CUDA 11, later the major alone."""
    return "11" if version == "11.0" else version


def _compat_version(subject: Subject) -> tuple[int, ...]:
    """Return the CUDA version of a forward compatibility library that fits the driver, or ()."""
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
