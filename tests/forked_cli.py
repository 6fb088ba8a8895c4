# SPDX-License-Identifier: Apache-2.0
"""Run commands of the command line in processes that have its modules from the start.

The import of the modules costs more than most commands. A server process imports them once and
forks for each command. The fork has the arguments, environment, directory and standard streams
that it is started with, and is the program `python -m gpuruntime`. It ends as an interpreter ends,
except that it does not free its modules, which would copy all of them.

A test that counts what a command costs, or starts it by another name, by another interpreter or
with variables that an interpreter reads at its start (PYTHON*, LC_*), starts it itself.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NoReturn

TREE = Path(__file__).resolve().parents[1]
_MAX_REQUEST = 1 << 20


class Server:
    """The process that forks for each command."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Not a child of this process, whose tests wait for all of their children. It ends with
            # the other end of the socket.
            program = [sys.executable, "-P", __file__, str(theirs.fileno())]
            subprocess.run(
                ["sh", "-c", '"$@" &', "sh", *program],
                cwd=TREE, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], check=True,
            )  # fmt: skip

    def start(self, request: dict[str, Any], streams: list[int]) -> int:
        """Start a command on *streams* and return the id of its process."""
        socket.send_fds(self.socket, [json.dumps(request).encode()], streams)
        return int(self._receive())

    def start_host(self, request: dict[str, Any], streams: list[int]) -> None:
        """Start a simulated host on *streams*; it ends with its standard input."""
        self.start(request, streams)

    def wait(self, deadline: float) -> int:
        """Return the status of the command that was started last; raise TimeoutError."""
        self.socket.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            return int(self._receive())
        finally:
            self.socket.settimeout(None)

    def kill(self, pid: int) -> None:
        """End the command that was started last, whose process is *pid*."""
        os.kill(pid, signal.SIGKILL)
        self._receive()

    def _receive(self) -> bytes:
        data = self.socket.recv(100)
        if not data:
            raise ConnectionError("the server of the command line has ended")
        return data

    def stop(self) -> None:
        """End the server, and wait until it has ended."""
        self.socket.shutdown(socket.SHUT_WR)
        self.socket.recv(1)
        self.socket.close()


_SERVERS: dict[int, Server] = {}


def _server() -> Server:
    """Return the server of this process, which its first command starts."""
    if os.getpid() not in _SERVERS:
        _SERVERS[os.getpid()] = server = Server()
        atexit.register(server.stop)
    return _SERVERS[os.getpid()]


def run(
    *words: object,
    given: bytes | str | int = b"",
    stdout: IO[bytes] | int | None = None,
    cwd: str | Path = TREE,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60,
    processor_s: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `gpuruntime` with *words*, and return its status, output and errors.

    *given* is its standard input, or the descriptor of that; with *stdout*, there is no output.
    The kernel ends a command that takes more than *processor_s* of processor time. Raise
    TimeoutError if the command takes longer than *timeout_s*, and end it.
    """
    request = {
        **_request(cwd, os.environ if env is None else env),
        "words": [str(word) for word in words],
        "processor_s": processor_s,
    }
    with ExitStack() as stack:
        source = stack.enter_context(open(os.memfd_create("input"), "w+b"))
        pipes = [os.pipe() for _ in range(2)]
        ours = [stack.enter_context(open(reading, "rb")) for reading, _ in pipes]
        streams = [source.fileno(), *(writing for _, writing in pipes)]
        if isinstance(given, int):
            streams[0] = given
        else:
            source.write(given.encode() if isinstance(given, str) else given)
            source.seek(0)
        if stdout is not None:
            streams[1] = stdout if isinstance(stdout, int) else stdout.fileno()
        pid = _server().start(request, streams)
        for _, writing in pipes:
            os.close(writing)
        deadline = time.monotonic() + timeout_s
        try:
            output, errors = read_all(ours, deadline)
            status = _server().wait(deadline)
        except TimeoutError:
            _server().kill(pid)
            raise
    return subprocess.CompletedProcess(
        ["gpuruntime", *map(str, words)], status, output.decode(), errors.decode()
    )


def start_host(options: Sequence[str], streams: Sequence[int], env: Mapping[str, str]) -> None:
    """Start a simulated host with *options* whose commands are asked for on *streams*.

    See forked_host.py. *streams* are the three standard ones; the host ends with the first.
    """
    request = {**_request(os.getcwd(), env), "host": list(options)}
    _server().start_host(request, list(streams))


def _request(cwd: str | Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Return what each request says of the process that makes it."""
    mask = os.umask(0)
    os.umask(mask)
    return {"cwd": str(cwd), "env": dict(env), "umask": mask}


def read_all(files: Sequence[IO[bytes]], deadline: float) -> list[bytes]:
    """Return all bytes of each of *files*, which are written to at once; raise TimeoutError."""
    parts: dict[int, list[bytes]] = {file.fileno(): [] for file in files}
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                parts[key.fd].append(data)
                if not data:
                    selector.unregister(key.fileobj)
    return [b"".join(part) for part in parts.values()]


def _import_all() -> None:
    """Import the modules of the command line."""
    package = importlib.import_module("gpuruntime.cli")
    for module in pkgutil.walk_packages(package.__path__, "gpuruntime.cli."):
        importlib.import_module(module.name)


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request; return the request in the fork, as the process that it asks for."""
    hosts: set[int] = set()
    while True:
        data, streams, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 3)
        hosts -= {pid for pid in hosts if os.waitpid(pid, os.WNOHANG)[0]}
        if not data:
            sys.exit()
        request: dict[str, Any] = json.loads(data)
        is_host = "host" in request
        if is_host:
            importlib.import_module("forked_host")
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(request, streams)
            return request
        for stream in streams:
            os.close(stream)
        connection.send(str(pid).encode())
        if is_host:
            hosts.add(pid)
        else:
            _, status = os.waitpid(pid, 0)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Take the arguments, environment, directory and standard streams of a command."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    limit = request.get("processor_s")
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    os.environ.clear()
    os.environ.update(request["env"])


def main() -> None:
    """Serve on the socket whose descriptor is the argument."""
    sys.path[:0] = [str(TREE)]
    _import_all()
    # After the modules of the command line: what it needs is never one of the tests.
    sys.path += [str(TREE / "tests"), str(TREE / "tests" / "simhost")]
    # A collection in a fork would copy all that the imports have made.
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if "host" in request:
        _end(importlib.import_module("forked_host").run(request["host"]))
    become_command(request["words"])


def become_command(words: Sequence[str]) -> NoReturn:
    """Run the command line with *words* in this process, and end it."""
    sys.argv = ["gpuruntime", *words]
    try:
        runpy.run_module("gpuruntime", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        _end(error.code)
    _end(0)


def _end(code: object) -> NoReturn:
    """End the process as `sys.exit(code)` does."""
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        # What the interpreter ends with then.
        code = 120
    os._exit(code or 0)


if __name__ == "__main__":
    main()
