# SPDX-License-Identifier: Apache-2.0
"""The debug log of the command line: which files it opens and which programs it starts.

An audit hook of the interpreter records them. The discovery below a driver root opens files by
system calls that raise no audit event, so it raises one itself, LOOK. Modules of Python and of
this program are omitted. So are children of this process, such as the one that queries the driver:
in a child, the descriptor of the log may belong to another file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from gpuruntime import __version__
from gpuruntime.discover.root import LOOK
from gpuruntime.errors import escape

_STARTS = frozenset(("os.exec", "os.posix_spawn", "subprocess.Popen"))
_DIRECTORY_EVENTS = frozenset(("os.listdir", "os.scandir"))


def start(descriptor: int, arguments: Iterable[str]) -> None:
    """Start the log on *descriptor*; *arguments* is the command line of this process."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    ignored = tuple(f"{path}/" for path in {package, sys.prefix, sys.base_prefix, "/proc/self"})
    ignored_parts = ("/python3", "/site-packages/", "/__pycache__/")

    process = os.getpid()
    last = ""

    def record(text: str) -> None:
        nonlocal last
        if text == last:
            return
        last = text
        try:
            # Unbuffered: a child would write the content of an inherited buffer again.
            os.write(descriptor, f"debug: {time.strftime('%H:%M:%S')} {escape(text)}\n".encode())
        except OSError:
            # An exception in an audit hook would abort the audited operation.
            pass

    def audit(event: str, values: tuple[Any, ...]) -> None:
        if os.getpid() != process:
            return
        if event == LOOK:
            record(f'look at "{values[0]}"')
        elif event in ("open", *_DIRECTORY_EVENTS):
            path = values[0]
            if not isinstance(path, (str, bytes)) or path == ".":
                return
            name = os.fsdecode(path)
            if not name.startswith(ignored) and not any(part in name for part in ignored_parts):
                record(f'{"open" if event == "open" else "list"} "{name}"')
        elif event in _STARTS:
            record(f"start {values[1]}" if len(values) > 1 else "start a program")
        elif event == "ctypes.dlopen" and values[0]:
            record(f'load "{values[0]}"')

    record(f"gpuruntime {__version__}, Python {sys.version.split()[0]} at {sys.executable}")
    record(f"arguments: {list(arguments)}")
    sys.addaudithook(audit)
