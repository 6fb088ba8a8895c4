# SPDX-License-Identifier: Apache-2.0
"""Check that the host's device nodes are those of the driver that is loaded now.

On the start path; reads only. After a module is reloaded, the number of an old node may belong
to another driver.
"""

from __future__ import annotations

import posix as os

from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cdi.wire import Edits

DEVICES = "/proc/devices"
# The path prefix of a driver's nodes, and the prefix of its names in DEVICES.
_OWNERS = (("/dev/nvidia", "nvidia"), ("/dev/dri/", "drm"), ("/dev/gdrdrv", "gdrdrv"))
_MAX_BYTES = 64 << 10


def check(edits: Edits, devices: str = DEVICES) -> None:
    """Raise CdiError "host-device-missing" if a node of completed *edits* is another driver's.

    Only nodes with the driver's own names are checked. *devices* is the file in which the kernel
    lists the drivers; nothing is checked if it does not list NVIDIA's.
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
            raise CdiError("host-device-missing", f"{text}, which does not match its name")


def _majors(text: str) -> dict[int, list[str]]:
    """Return the driver names of each major number of character devices in *text*."""
    names_by_major: dict[int, list[str]] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit():
            names_by_major.setdefault(int(number), []).append(name)
    return names_by_major


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
