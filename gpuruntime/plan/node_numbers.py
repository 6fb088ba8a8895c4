# SPDX-License-Identifier: Apache-2.0
"""Check that the host's device nodes are those of the driver that is loaded now.

On the start path; reads only. After a module is loaded again, the number of a remaining node may
belong to another driver.
"""

from __future__ import annotations

import posix as os

from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cdi.wire import Edits

DEVICES = "/proc/devices"
# How the nodes of a driver begin, and its names in DEVICES.
_OWNERS = (("/dev/nvidia", "nvidia"), ("/dev/dri/", "drm"), ("/dev/gdrdrv", "gdrdrv"))
_MAX_BYTES = 64 << 10


def check(edits: Edits, devices: str = DEVICES) -> None:
    """Raise CdiError "host-device-missing" if a node of completed *edits* is another driver's.

    For nodes that have the driver's own names. *devices* is where the kernel names the drivers;
    without NVIDIA's there, nothing is known.
    """
    majors = _majors(read(devices))
    if not any(name.startswith("nvidia") for names in majors.values() for name in names):
        return
    for node in edits.get("deviceNodes") or ():
        path = node["path"]
        owner = next((name for prefix, name in _OWNERS if path.startswith(prefix)), None)
        if owner is None:
            continue
        kind, major, minor = node["type"], node.get("major", 0), node.get("minor", 0)
        gpu = path[len("/dev/nvidia") :] if owner == "nvidia" else ""
        if (
            kind not in ("c", "u")
            or not any(name.startswith(owner) for name in majors.get(major, ()))
            or (gpu.isdigit() and int(gpu) != minor)
        ):
            text = f'"{node.get("hostPath") or path}" is device {kind} {major}:{minor}'
            raise CdiError("host-device-missing", f"{text}, which is not what its name says")


def _majors(text: str) -> dict[int, list[str]]:
    """Return the numbers of the character devices in *text*, and the names of their drivers."""
    found: dict[int, list[str]] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit():
            found.setdefault(int(number), []).append(name)
    return found


def read(path: str) -> str:
    """Return the text of a file that the kernel writes, "" if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, _MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
