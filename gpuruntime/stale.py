# SPDX-License-Identifier: Apache-2.0
"""Tell whether edits of a CDI spec are those of the driver that is loaded now.

On the start path; looks at files and changes nothing. A spec outlives the driver that it was made
for: a container with the old libraries and the new module fails in ways that nobody understands.
"""

from __future__ import annotations

import os

from gpuruntime import driver_version
from gpuruntime.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cdi.wire import Edits

MODULE = "/proc/driver/nvidia/version"
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


def _loaded(module: str) -> str:
    try:
        fd = os.open(module, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return driver_version.of_module_text(os.read(fd, _MAX_BYTES).decode("utf-8", "replace"))
    except OSError:
        return ""
    finally:
        os.close(fd)
