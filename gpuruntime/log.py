# SPDX-License-Identifier: Apache-2.0
"""Write messages to stderr, to the engine's --log file and to the debug file of config.toml.

On the start path. An engine shows the last record of the --log file to its user, and parses it as
JSON if it has requested that format.
"""

from __future__ import annotations

import _stat as stat
import posix as os
import sys
import time

from cdi import pathnames, strictjson
from gpuruntime.errors import escape

LEVELS = ("error", "warning", "info", "debug")


class Log:
    """The log files; *engine_log* and *json_format* come from the command line."""

    def __init__(self, engine_log: str | None, *, json_format: bool, level: str = "info") -> None:
        self.engine_log = engine_log
        self.json_format = json_format
        self.level = level
        self.debug_file: str | None = None

    def is_on(self, level: str) -> bool:
        """Return whether records of *level* are written."""
        return LEVELS.index(level) <= LEVELS.index(self.level)

    def record(self, level: str, message: str) -> None:
        """Write one record to the engine's log and the debug file, if its level is on."""
        if not self.is_on(level):
            return
        for path in (self.engine_log, self.debug_file):
            if path and path != "/dev/null":
                _append(path, self._line(level, message), make=path == self.debug_file)

    def error(self, text: str) -> None:
        """Write the lines of an error to stderr, and as one record to the log files."""
        self.record("error", text)
        if sys.stderr is not None:
            try:
                os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))
            except OSError:
                # stderr is closed; the log has the error.
                pass

    def warning(self, message: str) -> None:
        """Record a warning, whose text may come from a container."""
        self.record("warning", escape(message))

    def _line(self, level: str, message: str) -> str:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if self.json_format:
            return strictjson.dumps({"level": level, "msg": message, "time": now})
        return f'time="{now}" level={level} msg={strictjson.dumps(message)}'


def _append(path: str, line: str, *, make: bool) -> None:
    """Append *line* to the regular file *path*; errors must not stop a container: ignored.

    A file with another hard link is not written, because it may belong to another program. With
    *make*, missing directories are created; those of the engine's log are the engine's task.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags, 0o644)
        except FileNotFoundError:
            if not make:
                return
            from os import makedirs  # noqa: PLC0415 (once for each log)

            makedirs(pathnames.dirname(path), 0o755, exist_ok=True)
            fd = os.open(path, flags, 0o644)
    except OSError:
        return
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.write(fd, f"{line}\n".encode())
    except OSError:
        return
    finally:
        os.close(fd)
