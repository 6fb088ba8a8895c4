# SPDX-License-Identifier: Apache-2.0
"""Check that a CDI spec's edits are for the driver that is loaded now.

On the start path; reads only. A spec can outlive the driver that it was made for: a container with
the old libraries and the new module fails in ways that are hard to understand.
"""

from __future__ import annotations

import os

from cdi.edits import WITH_IMAGE
from gpuruntime.errors import SpecError
from gpuruntime.formats import driver_version
from gpuruntime.plan import node_numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cdi.wire import Edits, Hook

MODULE = "/proc/driver/nvidia/version"
_VERSIONED = ("libcuda.so.", "libnvidia-ml.so.")
# The incumbent's, as it wrote them without env up to 1.17.7. Ours drops whatever it is given.
_PROGRAMS = ("nvidia-ctk", "nvidia-cdi-hook")
# The incumbent's installer moves a program there, and puts a script in its place.
_MOVED = ".real"


def check(edits: Edits, module: str = MODULE) -> None:
    """Raise SpecError if *edits* mount a file that is gone, or one of another driver version.

    It is also raised if a hook of theirs would get the environment of the image (CVE-2025-23266).
    *module* is where the loaded module says its version; if it does not, only files count. The
    error has no hint: the caller knows which spec to write again.
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
                f'the CDI spec is stale: it mounts "{path}", the loaded driver is {loaded}'
            )
        if not os.path.exists(path):
            raise SpecError(f'the CDI spec is stale: it mounts "{path}", which is gone')
    for hook in edits.get("hooks") or ():
        if _is_of_old(hook) and hook["hookName"] in WITH_IMAGE and not hook.get("env"):
            raise SpecError(
                f'the CDI spec is stale: its hook "{hook["path"]}" has no env, and may be given '
                "the variables of the image"
            )


def _is_of_old(hook: Hook) -> bool:
    """Return whether *hook* is the incumbent's, by its program or by how that is called."""
    names = [os.path.basename(word) for word in (hook["path"], *(hook.get("args") or ())[:1])]
    return any(name.removesuffix(_MOVED) in _PROGRAMS for name in names)


def _loaded(module: str) -> str:
    return driver_version.of_module_text(node_numbers.read(module))
