# SPDX-License-Identifier: Apache-2.0
"""Check that a container requests the driver libraries that its image needs; pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpuruntime.discover.driver_table import LIBRARIES
from gpuruntime.image.contents import stem
from gpuruntime.image.needs import Need
from gpuruntime.image.subject import FAILS, NOTE, WARNING, Finding, Subject
from gpuruntime.plan.driver_files import ABIS_OF_32_BIT
from gpuruntime.request.capabilities import COMPAT32
from gpuruntime.request.driver_options import DRIVER_CAPABILITIES
from gpuruntime.request.parse import VISIBLE_DEVICES

_MAX_NAMES = 4


def check(subject: Subject) -> Iterable[Finding]:
    """Return the findings about libraries that the image needs and the container lacks."""
    missing: dict[tuple[str, str], list[Need]] = {}
    for need in subject.needs:
        finding, capability = lacks(need, subject)
        if finding is not None:
            yield finding
        if capability:
            level = FAILS if need.is_certain else WARNING
            missing.setdefault((capability, level), []).append(need)
    for (capability, level), lacking in missing.items():
        yield Finding(
            level,
            names(need.library for need in lacking),
            f"{user_of(lacking[0])}, but the container does not request {capability}",
            f'add "{capability}" to {DRIVER_CAPABILITIES}: '
            f"{','.join(sorted({*subject.capabilities, capability}))}",
        )
    if subject.needs and not subject.environment.get(VISIBLE_DEVICES):
        yield Finding(
            NOTE,
            "no GPU",
            f"the image needs the driver, but {VISIBLE_DEVICES} is not set",
            f'run the container with "--gpus all", or with -e {VISIBLE_DEVICES}=all',
        )


def lacks(need: Need, subject: Subject) -> tuple[Finding | None, str]:
    """Return the finding about *need*, and the missing driver capability that brings it, or ""."""
    driver = subject.machine.driver
    is_32_bit = need.abi in ABIS_OF_32_BIT
    if driver is None:
        if is_32_bit and COMPAT32 not in subject.capabilities:
            return None, COMPAT32
        return None, "" if need.is_brought(subject.capabilities) else need.capability
    if any(_is_for(need, item.library.abi, item.names) for item in subject.selected):
        return None, ""
    if any(_is_for(need, item.library.abi, item.names) for item in subject.machine.libraries):
        has_32_bit = not is_32_bit or COMPAT32 in subject.capabilities
        return None, need.capability if has_32_bit else COMPAT32
    if subject.is_foreign:
        # One finding covers the whole image.
        return None, ""
    return _not_of_driver(need, subject), ""


def _is_for(need: Need, abi: str, library_names: Iterable[str]) -> bool:
    return abi == need.abi and need.library in library_names


def _not_of_driver(need: Need, subject: Subject) -> Finding:
    """Return the finding that the driver of this machine has no such library."""
    assert subject.machine.driver is not None
    version = subject.machine.driver.version
    others = [
        item.library
        for item in subject.machine.libraries
        if stem(item.library.soname) == stem(need.library)
    ]
    level = FAILS if need.is_certain else WARNING
    same_abi = [library.soname for library in others if library.abi == need.abi]
    if same_abi:
        why = f"driver {version} has {names(same_abi)} instead"
        return Finding(
            level,
            need.library,
            f"{user_of(need)}, but {why}",
            "build the program for that library",
        )
    if others:
        return Finding(
            level,
            need.library,
            f"{user_of(need)}, but driver {version} is installed here for "
            f"{names(library.abi for library in others)}, not for {need.abi}",
            f"install the driver's libraries for {need.abi}, or programs for "
            f"{subject.machine.native}",
        )
    row = LIBRARIES.get(stem(need.library))
    when = ""
    if row is not None and row.until:
        when = f": it is part of the driver up to {row.until}"
    elif row is not None and row.since:
        when = f": it is part of the driver since {row.since}"
    return Finding(
        level,
        need.library,
        f"{user_of(need)}, but driver {version} as installed here does not have it{when}",
        "install the whole driver, or a version that has it",
    )


def user_of(need: Need) -> str:
    """Return the first file that uses the library of *need*, how, and the number of others."""
    user = need.users[0]
    more = f" and {len(need.users) - 1} more" if len(need.users) > 1 else ""
    return f"{user.path} {user.how} it{more and f' ({more.strip()})'}"


def names(of: Iterable[str]) -> str:
    """Return the first of names that an image has, for a message."""
    unique = list(dict.fromkeys(of))
    more = f" and {len(unique) - _MAX_NAMES} more" if len(unique) > _MAX_NAMES else ""
    return ", ".join(unique[:_MAX_NAMES]) + more
