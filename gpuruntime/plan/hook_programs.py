# SPDX-License-Identifier: Apache-2.0
"""Find the hook programs, which OCI configs and CDI specs name by absolute path.

On the start path; reads only.
"""

from __future__ import annotations

import _stat as stat
import posix as os

from cdi import pathnames
from gpuruntime import config as settings
from gpuruntime.errors import ConfigError
from gpuruntime.oci.lowlevel import STANDARD_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuruntime.config import Config
    from gpuruntime.request.parse import Request

HOOK = "gpu-cdi-hook"
PRESTART_HOOK = "gpu-container-runtime-hook"
# Program → the option that can name another program, and the default, which means our program.
_OPTIONS = {
    HOOK: ("nvidia-ctk.path", "nvidia-ctk"),
    PRESTART_HOOK: ("nvidia-container-runtime-hook.path", "nvidia-container-runtime-hook"),
}


def hook_of(request: Request, find: Callable[[str], str]) -> str:
    """Return the path of the hook program that a grant for *request* names, "" if it names none.

    *find* returns the path of a program. CDI specs contain their own paths.
    """
    # In the legacy mode our hook has nothing to do.
    return find(HOOK) if request.is_automatic and request.mode != settings.LEGACY else ""


def find(name: str, config: Config, launcher: str, path: str | None) -> str:
    """Return the path of the program *name*: as configured, beside *launcher*, or on *path*.

    Raises ConfigError if there is none.
    """
    option = _OPTIONS[name][0]
    candidates = places(name, config, launcher, path)
    if config[option].startswith("/"):
        return candidates[0]
    for place in candidates:
        if _is_program(place):
            return place
    raise ConfigError(
        f'"{pathnames.basename(candidates[-1])}" is neither beside "{launcher}" nor on PATH',
        f'set "{option}" in config.toml to the absolute path of {name}',
    )


def places(name: str, config: Config, launcher: str, path: str | None) -> list[str]:
    """Return where `find` looks for the program *name*, in order."""
    option, default = _OPTIONS[name]
    configured: str = config[option]
    if configured.startswith("/"):
        return [configured]
    program = name if configured in ("", default) else configured
    directories = [item for item in (path or "").split(":") if item.startswith("/")]
    directories += STANDARD_PATH
    if "/" in launcher:
        directories.insert(0, pathnames.dirname(_absolute(launcher)))
    return [pathnames.join(directory, program) for directory in directories]


def _is_program(path: str) -> bool:
    try:
        return os.access(path, os.X_OK) and stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _absolute(path: str) -> str:
    start = "" if path.startswith("/") else os.getcwd()
    return pathnames.normpath(pathnames.join(start, path))
