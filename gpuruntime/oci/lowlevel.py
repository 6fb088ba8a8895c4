# SPDX-License-Identifier: Apache-2.0
"""Find the low-level runtime and become it by exec.

On the start path. The launcher has the same search for the commands that it passes through.
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

    Names are searched on *path* and the standard directories. A candidate that is the launcher
    itself, with the *identity* `device:inode`, would start us again without end: it is skipped
    with a warning to *warn*.
    """
    for program in places(candidates, path):
        if not _is_program(program):
            continue
        if _identity(program) == identity:
            warn(f'the low-level runtime "{program}" is this program itself: skipped')
            continue
        return program
    names = ", ".join(
        f'"{candidate}"' + (" (not a program)" if os.access(candidate, os.F_OK) else "")
        for candidate in candidates
    )
    raise RuntimeExecError(
        f"no low-level runtime found; searched for {names}",
        'install runc, or name one in "nvidia-container-runtime.runtimes" of config.toml',
    )


def places(candidates: Sequence[str], path: str | None) -> list[str]:
    """Return the paths that `find` checks, in order."""
    directories = [item for item in (path or "").split(":") if item.startswith("/")]
    directories += [item for item in STANDARD_PATH if item not in directories]
    return [
        program
        for name in candidates
        for program in ([name] if "/" in name else [f"{top}/{name}" for top in directories])
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
    """Execute the program *path* in place of this one; raise RuntimeExecError (126 or 127).

    execv passes on the environment block of C, including repeated and malformed entries, which
    os.environ would lose.
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
