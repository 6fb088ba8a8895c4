# SPDX-License-Identifier: Apache-2.0
"""The child of the agent that is the user nobody, as the agent sees it.

It parses what others send: requests over HTTP, the kubelet's list of pods, answers of the API
server. It is a fresh interpreter, because a fork of a process with threads would share their
locks. When it ends it is started again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cdi import strictjson
from gpunode.services.back_off import BackOff
from gpunode.services.relay import ServerEnd
from gpunode.watch.child_handle import import_path

log = logging.getLogger(__name__)

RELAY = "relay"
_PROGRAM = (
    "import sys; from json import loads; options = loads(sys.argv[1]); "
    "sys.path = options['path']; from gpunode.cli.agent_child import main; main(options)"
)
_STOP_S = 2.0

Helper = Callable[[socket.socket], Awaitable[None]]


class Unprivileged:
    """The child with *options*, JSON; `restarts` and `last_end` say how it went.

    *server_end* returns the agent's end of a connection to it. Each of *helpers* does one thing
    for it as root, on a connection of its own.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        server_end: Callable[[socket.socket], ServerEnd],
        helpers: Mapping[str, Helper],
        *,
        back_off: BackOff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.server_end = server_end
        self.helpers = helpers
        self.clock = clock
        self.restarts = 0
        self.last_end = ""
        self.pid: int | None = None
        self._back_off = back_off or BackOff()
        self._relay: ServerEnd | None = None

    async def serve(self) -> None:
        """Keep the child running until this is cancelled, which ends the child."""
        while True:
            start = self.clock()
            try:
                self.last_end = await self._run()
            except OSError as error:
                self.last_end = f"it cannot be started: {error.strerror}"
            self.restarts += 1
            delay_s = self._back_off.delay(self.clock() - start)
            log.error(
                "the process without rights has ended (%s); it is started again in %g s",
                *(self.last_end, delay_s),
            )
            await asyncio.sleep(delay_s)

    def send(self, message: dict[str, Any]) -> None:
        """Send *message* to the child if it runs."""
        if self._relay is not None:
            self._relay.send(message)

    async def _run(self) -> str:
        """Start the child, serve it, and return how it has ended; raise OSError."""
        pairs = {name: socket.socketpair() for name in (RELAY, *self.helpers)}
        theirs = {name: pair[1] for name, pair in pairs.items()}
        try:
            process = await self._start({name: end.fileno() for name, end in theirs.items()})
        except BaseException:
            for own, _ in pairs.values():
                own.close()
            raise
        finally:
            for end in theirs.values():
                end.close()
        self.pid = process.pid
        self._relay = self.server_end(pairs[RELAY][0])
        relaying = asyncio.create_task(self._relay.serve())
        tasks = [asyncio.ensure_future(self._help(name, pairs[name][0])) for name in self.helpers]
        waiting = asyncio.create_task(process.wait())
        try:
            # Without one of its connections the child is of no use.
            await asyncio.wait((waiting, relaying, *tasks), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._relay = self.pid = None
            # The child ends with its connection.
            relaying.cancel()
            await asyncio.gather(relaying, return_exceptions=True)
            await _end(process, waiting)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        code = await waiting
        return f"signal {-code}" if code < 0 else f"status {code}"

    async def _start(self, descriptors: Mapping[str, int]) -> asyncio.subprocess.Process:
        options = {**self.options, "path": import_path(), "sockets": dict(descriptors)}
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _PROGRAM, strictjson.dumps(options)),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=tuple(descriptors.values()),
        )

    async def _help(self, name: str, connection: socket.socket) -> None:
        try:
            await self.helpers[name](connection)
        except Exception:
            log.exception('the connection "%s" of the process without rights has failed', name)
        finally:
            connection.close()


async def _end(process: asyncio.subprocess.Process, waiting: asyncio.Task[int]) -> None:
    """Wait for the end of the child, and kill it if it does not end by itself."""
    await asyncio.wait((waiting,), timeout=_STOP_S)
    if not waiting.done():
        try:
            process.kill()
        except ProcessLookupError:
            pass
        await waiting
