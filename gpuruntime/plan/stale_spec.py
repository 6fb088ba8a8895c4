# SPDX-License-Identifier: Apache-2.0
"""Check that the edits of a CDI spec match the loaded driver.

On the start path; reads only. A spec can outlive the driver that it was generated for. A container
with the old libraries and the new module fails in ways that are hard to diagnose.
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
# The incumbent's hooks, which its specs list without env up to 1.17.7. Our hook clears its
# environment.
_INCUMBENT_PROGRAMS = ("nvidia-ctk", "nvidia-cdi-hook")
# The incumbent's installer renames a program with this suffix and installs a script in its place.
_MOVED_SUFFIX = ".real"


def check(edits: Edits, module: str = MODULE) -> None:
    """Raise SpecError if *edits* mount a missing file, or a file of another driver version.

    It is also raised if a hook of *edits* would get the image's environment (CVE-2025-23266). The
    file *module* has the version of the loaded module; without it, versions are not compared. The
    error has no hint: the caller knows which spec must be regenerated.
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
            raise SpecError(f'the CDI spec is stale: it mounts "{path}", which does not exist')
    for hook in edits.get("hooks") or ():
        if _is_incumbent_hook(hook) and hook["hookName"] in WITH_IMAGE and not hook.get("env"):
            raise SpecError(
                f'the CDI spec is stale: its hook "{hook["path"]}" has no env, and may be given '
                "the variables of the image"
            )


def _is_incumbent_hook(hook: Hook) -> bool:
    """Return whether *hook* is the incumbent's, by its path or by its argv[0]."""
    names = [os.path.basename(word) for word in (hook["path"], *(hook.get("args") or ())[:1])]
    return any(name.removesuffix(_MOVED_SUFFIX) in _INCUMBENT_PROGRAMS for name in names)


def _loaded(module: str) -> str:
    return driver_version.of_module_text(node_numbers.read(module))
