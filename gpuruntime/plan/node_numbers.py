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
# The path prefix of the nodes of a driver, and the names under which DEVICES lists it. The longer
# of two prefixes comes first. The names are those in the sources: nv.c, nv-frontend.c (drivers
# before 560), nv-caps.c, nv-caps-imex.c, nvlink_linux.c, linux_nvswitch.c and uvm.c of NVIDIA's
# open-gpu-kernel-modules, nvfs-core.h of gds-nvidia-fs, gdrdrv.c of gdrcopy; drm_drv.c,
# uverbs_main.c, and ucma.c, sev-guest.c and tdx-guest.c (misc devices) of Linux.
_OWNERS = (
    ("/dev/nvidia-caps-imex-channels/", ("nvidia-caps-imex-channels",)),
    ("/dev/nvidia-caps/", ("nvidia-caps",)),
    ("/dev/nvidia-fs", ("nvidia-fs",)),
    ("/dev/nvidia-modeset", ("nvidia-modeset", "nvidia-frontend")),
    ("/dev/nvidia-nvlink", ("nvidia-nvlink",)),
    ("/dev/nvidia-nvswitch", ("nvidia-nvswitch",)),
    ("/dev/nvidia-uvm", ("nvidia-uvm",)),
    ("/dev/nvidia", ("nvidia", "nvidiactl", "nvidia-frontend")),
    ("/dev/dri/", ("drm",)),
    ("/dev/gdrdrv", ("gdrdrv",)),
    ("/dev/infiniband/rdma_cm", ("misc",)),
    ("/dev/infiniband/uverbs", ("infiniband_verbs",)),
    ("/dev/sev-guest", ("misc",)),
    ("/dev/tdx_guest", ("misc",)),
)
_GPU = "/dev/nvidia"
_MAX_BYTES = 64 << 10


def check(edits: Edits, devices: str = DEVICES) -> list[str]:
    """Return warnings about nodes of completed *edits* whose drivers have unknown names.

    Raises CdiError "host-device-missing" for a node that is another driver's or that no driver
    has. Only nodes with the drivers' own names are checked. *devices* is the file in which the
    kernel lists the drivers; nothing is checked if it does not list NVIDIA's.
    """
    majors = _majors(read(devices))
    if not any(name.startswith("nvidia") for names in majors.values() for name in names):
        return []
    warnings = []
    for node in edits.get("deviceNodes") or ():
        path = node["path"]
        owners = next((names for prefix, names in _OWNERS if path.startswith(prefix)), None)
        if owners is None:
            continue
        kind, major, minor = node["type"], node.get("major", 0), node.get("minor", 0)
        names = majors.get(major, []) if kind in ("c", "u") else []
        gpu = path[len(_GPU) :] if path.startswith(_GPU) else ""
        is_its_own = any(name in owners for name in names)
        is_wrong_gpu = is_its_own and gpu.isdigit() and int(gpu) != minor
        if is_its_own and not is_wrong_gpu:
            continue
        text = f'"{node.get("hostPath") or path}" is device {kind} {major}:{minor}'
        if not is_wrong_gpu and names and not _is_others(names):
            warnings.append(f'{text}, of the driver "{names[0]}", which is not known to have it')
            continue
        raise CdiError("host-device-missing", f"{text}, which does not match its name")
    return warnings


def _is_others(names: list[str]) -> bool:
    """Return whether one of *names* is that of a driver of other nodes."""
    if any(name in owners for name in names for _, owners in _OWNERS):
        return True
    from gpuruntime.plan.other_drivers import NAMES  # noqa: PLC0415 (only for a strange node)

    return any(name in NAMES for name in names)


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
