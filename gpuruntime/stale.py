# SPDX-License-Identifier: Apache-2.0
"""Tell whether edits are those of the driver that is loaded now.

On the start path; looks at files and changes nothing. A spec outlives the driver that it was made
for: a container with the old libraries and the new module fails in ways that nobody understands.
So does a device node: with the next load of the module, its number may be another driver's.
"""

from __future__ import annotations

import os

from cdi.errors import CdiError
from gpuruntime import driver_version
from gpuruntime.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cdi.wire import Edits

MODULE = "/proc/driver/nvidia/version"
DEVICES = "/proc/devices"
# How the nodes of a driver begin, and its names in DEVICES.
_OWNERS = (("/dev/nvidia", "nvidia"), ("/dev/dri/", "drm"), ("/dev/gdrdrv", "gdrdrv"))
_MAX_BYTES = 64 << 10
_VERSIONED = ("libcuda.so.", "libnvidia-ml.so.")
_HINT = 'run "gpuruntime cdi refresh"'


def check(edits: Edits, module: str = MODULE) -> None:
    """Raise SpecError if *edits* mount a file that is gone, or one of another driver version.

    *module* is where the loaded module says its version; if it does not, only files count.
    """
    loaded = _loaded(module)
    for mount in edits.get("mounts") or ():
        path = mount["hostPath"]
        if mount.get("type", "") not in ("", "bind", "none") or not os.path.isabs(path):
            continue
        name = os.path.basename(path)
        version = driver_version.of_name(name) if name.startswith(_VERSIONED) else ""
        if loaded and version and version != loaded:
            raise SpecError(
                f'the CDI spec is stale: it mounts "{path}", the loaded driver is {loaded}', _HINT
            )
        if not os.path.exists(path):
            raise SpecError(f'the CDI spec is stale: it mounts "{path}", which is gone', _HINT)


def check_nodes(edits: Edits, devices: str = DEVICES) -> None:
    """Raise CdiError "host-device-missing" if a node of completed *edits* is another driver's.

    For nodes that have the driver's own names. *devices* is where the kernel names the drivers;
    without NVIDIA's there, nothing is known.
    """
    majors = _majors(_read(devices))
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


def _loaded(module: str) -> str:
    return driver_version.of_module_text(_read(module))


def _read(path: str) -> str:
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
