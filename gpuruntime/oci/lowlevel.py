# SPDX-License-Identifier: Apache-2.0
"""Find the low-level runtime and become it by exec.

On the start path. The launcher searches in the same way for what it passes through.
"""

from __future__ import annotations

import _stat as stat
import posix as os

from gpuruntime.errors import RuntimeExecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STANDARD_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def find(
    candidates: Sequence[str],
    path: str | None,
    identity: str,
    warn: Callable[[str], None],
) -> str:
    """Return the path of the first usable candidate; raise RuntimeExecError (127).

    Names are searched on *path* and the standard directories. A candidate that is the launcher,
    whose *identity* is `device:inode`, would call us again for ever: *warn* is told, and it is
    skipped.
    """
    for place in places(candidates, path):
        if not _is_program(place):
            continue
        if _identity(place) == identity:
            warn(f'the low-level runtime "{place}" is this program itself: skipped')
            continue
        return place
    names = ", ".join(
        f'"{candidate}"' + (" (no program)" if os.access(candidate, os.F_OK) else "")
        for candidate in candidates
    )
    raise RuntimeExecError(
        f"no low-level runtime found, looked for {names}",
        'install runc, or name one in "nvidia-container-runtime.runtimes" of config.toml',
    )


def places(candidates: Sequence[str], path: str | None) -> list[str]:
    """Return where `find` looks, in order."""
    directories = [item for item in (path or "").split(":") if item.startswith("/")]
    directories += [item for item in STANDARD_PATH if item not in directories]
    return [
        place
        for name in candidates
        for place in ([name] if "/" in name else [f"{top}/{name}" for top in directories])
    ]


def _is_program(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and bool(mode & 0o111)


def _identity(path: str) -> str:
    status = os.stat(path)
    return f"{status.st_dev}:{status.st_ino}"


def execute(path: str, arguments: Sequence[str]) -> None:
    """Become the program *path*; returns only by raising RuntimeExecError (126 or 127).

    execv hands on C's own environment block, repeated and odd entries included; os.environ would
    lose them.
    """
    try:
        os.execv(path, [path, *arguments])
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        raise RuntimeExecError(
            f'cannot execute the low-level runtime "{path}": {error.strerror}',
            "install a runtime built for this machine",
            exit_code=code,
        ) from error
