# SPDX-License-Identifier: Apache-2.0
"""The lowest format version that a document needs: a table of versions and predicates.

On the start path; pure. CDI SPEC.md, "Released versions".
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdi.wire import Edits, Spec

KNOWN = (
    "0.1.0",
    "0.2.0",
    "0.3.0",
    "0.4.0",
    "0.5.0",
    "0.6.0",
    "0.7.0",
    "0.8.0",
    "1.0.0",
    "1.1.0",
)
LOWEST = "0.3.0"
_DIGITS = tuple("0123456789")


def _all_edits(spec: Spec) -> Iterator[Edits]:
    yield spec.get("containerEdits") or {}
    for device in spec.get("devices") or ():
        yield device.get("containerEdits") or {}


def _needs_1_1_0(spec: Spec) -> bool:
    """Look for network devices, RDT schemata or monitoring."""
    for edits in _all_edits(spec):
        rdt = edits.get("intelRdt") or {}
        if rdt.get("schemata") is not None or rdt.get("enableMonitoring"):
            return True
        if edits.get("netDevices"):
            return True
    return False


def _needs_0_7_0(spec: Spec) -> bool:
    """Look for Intel RDT and additional group ids."""
    return any(
        e.get("intelRdt") is not None or bool(e.get("additionalGids")) for e in _all_edits(spec)
    )


def _needs_0_6_0(spec: Spec) -> bool:
    """Look for annotations and a dot in the class."""
    if "." in spec.get("kind", "").partition("/")[2] or spec.get("annotations"):
        return True
    return any(device.get("annotations") for device in spec.get("devices") or ())


def _needs_0_5_0(spec: Spec) -> bool:
    """Look for device names that begin with a digit and host paths of nodes."""
    if any(device.get("name", "")[:1] in _DIGITS for device in spec.get("devices") or ()):
        return True
    return any(
        node.get("hostPath") for e in _all_edits(spec) for node in e.get("deviceNodes") or ()
    )


def _needs_0_4_0(spec: Spec) -> bool:
    """Look for types of mounts."""
    return any(m.get("type") for e in _all_edits(spec) for m in e.get("mounts") or ())


_NEWEST_FIRST: tuple[tuple[str, Callable[[Spec], bool]], ...] = (
    ("1.1.0", _needs_1_1_0),
    ("0.7.0", _needs_0_7_0),
    ("0.6.0", _needs_0_6_0),
    ("0.5.0", _needs_0_5_0),
    ("0.4.0", _needs_0_4_0),
)


def minimum(spec: Spec) -> str:
    """Return the lowest version that has every member of *spec*, whatever version it claims."""
    for version, needed in _NEWEST_FIRST:
        if needed(spec):
            return version
    return LOWEST
