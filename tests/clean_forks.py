# SPDX-License-Identifier: Apache-2.0
"""Functions in forks of a process that has one thread, for tests whose forks load libraries.

A test worker has threads: those of gRPC stay after the tests that use it. A fork has none of
them, but the locks that they held at that moment, the loader's among them, and waits for these
without end. The forks are of a server, which is started at the first call.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAX_MESSAGE = 1 << 17
_SERVERS: dict[int, _Server] = {}


class ForkError(AssertionError):
    """The function raised an error; the text has its traceback."""


class Killed:
    """The fork was ended by a signal."""


class _Server:
    """The server of this process."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Not a child of this process, whose tests wait for all of their children.
            program = [sys.executable, __file__, str(theirs.fileno())]
            subprocess.run(
                ["sh", "-c", '"$@" &', "sh", *program],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], check=True,
            )  # fmt: skip
        self.send(sys.path)

    def send(self, message: object) -> None:
        """Send *message*."""
        self.socket.sendall(pickle.dumps(message))

    def receive(self) -> Any:
        """Return a message of the server."""
        return pickle.loads(self.socket.recv(_MAX_MESSAGE))

    def stop(self) -> None:
        """End the server, and wait until it has ended."""
        self.socket.shutdown(socket.SHUT_WR)
        self.socket.recv(1)
        self.socket.close()


def call(
    function: Callable[..., Any], *arguments: object, started: Callable[[int], None] | None = None
) -> Any:
    """Return the result of *function* with *arguments* in a fork, or a Killed.

    The function is of a module, and all can be pickled. *started* is called with the number of
    the process. Raises ForkError.
    """
    server = _SERVERS.get(os.getpid())
    if server is None:
        server = _SERVERS[os.getpid()] = _Server()
        atexit.register(server.stop)
    server.send((function.__module__, function.__qualname__, arguments, dict(os.environ)))
    pid = server.receive()
    if started is not None:
        started(pid)
    error, result = server.receive()
    if error:
        raise ForkError(error)
    return result


def _serve(connection: socket.socket) -> None:
    """Fork for each request."""
    sys.path[:] = pickle.loads(connection.recv(_MAX_MESSAGE))
    while data := connection.recv(_MAX_MESSAGE):
        module, name, arguments, environment = pickle.loads(data)
        function = getattr(importlib.import_module(module), name)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.environ.clear()
            os.environ.update(environment)
            _answer(writer, function, arguments)
        os.close(writer)
        connection.sendall(pickle.dumps(pid))
        with open(reader, "rb") as stream:
            answer = stream.read()
        _, status = os.waitpid(pid, 0)
        is_killed = os.WIFSIGNALED(status)
        connection.sendall(pickle.dumps(("", Killed())) if is_killed else answer)


def _answer(writer: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Write what *function* returns or raises, and end this process."""
    try:
        answer = ("", function(*arguments))
    except BaseException:  # noqa: BLE001 (the process must not return into the server)
        answer = (traceback.format_exc(), None)
    with open(writer, "wb") as stream:
        stream.write(pickle.dumps(answer))
    os._exit(0)


if __name__ == "__main__":
    # The classes of messages are those of the module that tests import.
    sys.path.append(str(Path(__file__).parent))
    serve = importlib.import_module("clean_forks")._serve
    serve(socket.socket(fileno=int(sys.argv[1])))
