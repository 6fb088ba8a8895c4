# SPDX-License-Identifier: Apache-2.0
"""The watcher's child as its parent sees it: a process, the pipes to it, and its end.

The child is a fresh interpreter: a fork of a process that serves gRPC would share its threads'
locks. It imports modules from the same directories as this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cdi import strictjson
from gpunode.watch import framing

_PROGRAM = (
    "import sys; from json import loads; options = loads(sys.argv[1]); "
    "sys.path = options['path']; from gpunode.watch.child import main; main(options)"
)
_READ_BYTES = 1 << 18


class ChildHandle:
    """A running child.

    On the event loop, *on_message* is called with each message, *on_broken* with the reason if
    the output is not a sequence of messages, and *on_end* with how the process ended.
    """

    def __init__(
        self,
        options: dict[str, Any],
        on_message: Callable[[Any], None],
        on_broken: Callable[[str], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Start the child in a running event loop; raise OSError."""
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_broken = on_broken
        self._on_end = on_end
        self._frames = framing.Decoder()
        self.pid, self._input, self._output = _spawn(options)
        self._process = os.pidfd_open(self.pid)
        self._loop.add_reader(self._output, self._read)
        self._loop.add_reader(self._process, self._reap)

    def send(self, message: dict[str, Any]) -> None:
        """Send *message*; a child that has ended does not get it."""
        if self._input >= 0:
            try:
                framing.write(self._input, message)
            except OSError:
                self.end()

    def end(self) -> None:
        """Close the input of the child, which ends then if it does not hang."""
        if self._input >= 0:
            os.close(self._input)
            self._input = -1

    def kill(self) -> None:
        """Kill the child; one that waits in the driver ends when the driver answers."""
        if self._process >= 0:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def ignore(self) -> None:
        """Close the pipes of a child that was killed; its end is still noted."""
        self.end()
        self._close_output()

    def release(self) -> None:
        """Stop watching the child, when the event loop ends."""
        self.ignore()
        if self._process >= 0:
            self._loop.remove_reader(self._process)
            os.close(self._process)
            self._process = -1

    def _read(self) -> None:
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # The end of the process follows.
            self._close_output()
            return
        try:
            messages = self._frames.feed(data)
        except framing.FrameError as error:
            self._close_output()
            self._on_broken(str(error))
            return
        for message in messages:
            self._on_message(message)

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1

    def _reap(self) -> None:
        # What the child has written before its end comes first.
        while self._output >= 0:
            self._read()
        try:
            result = os.waitid(os.P_PIDFD, self._process, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            how = "status unknown"
        else:
            if result is None:
                return
            is_exit = result.si_code == os.CLD_EXITED
            how = f"{'status' if is_exit else 'signal'} {result.si_status}"
        self.release()
        self._on_end(how)


def _spawn(options: dict[str, Any]) -> tuple[int, int, int]:
    """Start the child, and return its process id, our end of its input and of its output."""
    arguments = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    arguments.append(strictjson.dumps({**options, "path": import_path()}))
    descriptors: list[int] = []
    try:
        descriptors += os.pipe()
        descriptors += os.pipe()
        os.set_blocking(descriptors[2], False)
        pid = os.posix_spawn(
            sys.executable,
            arguments,
            {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, descriptors[0], 0),
                (os.POSIX_SPAWN_DUP2, descriptors[3], 1),
            ],
            setpgroup=0,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGCHLD, signal.SIGINT, signal.SIGTERM),
        )
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    os.close(descriptors[0])
    os.close(descriptors[3])
    return pid, descriptors[1], descriptors[2]


def import_path() -> list[str]:
    """Return the directories that this process imports modules from."""
    own = str(Path(__file__).resolve().parents[2])
    return list(dict.fromkeys([own, *filter(os.path.isabs, sys.path)]))
