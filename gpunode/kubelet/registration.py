# SPDX-License-Identifier: Apache-2.0
"""Keep device plugins registered with a kubelet that may restart, refuse, or say nothing.

The kubelet removes every socket from its directory when it starts, and forgets a plugin whose
stream ends. So the directory is watched, by inotify and by polling: a plugin's socket that is
gone is made again, and each new socket of the kubelet gets one registration of each plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from grpclib import Status

import gpunode.kubelet.proto.device_plugin_pb2 as messages
from gpunode.kubelet import rpc, sockets
from gpunode.kubelet.backend import Backend
from gpunode.kubelet.directory_watch import DirectoryWatch
from gpunode.kubelet.plugin_server import GRACE, PluginServer, endpoint, options
from gpuruntime.errors import bug, escape

log = logging.getLogger(__name__)

VERSION = "v1beta1"
DEFAULT_SOCKET = "/var/lib/kubelet/device-plugins/kubelet.sock"


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations in seconds."""

    # Between two looks at the directory: with inotify, and without.
    poll: float = 2.0
    poll_without_inotify: float = 0.4
    # The kubelet answers Register at once or is not there.
    register_deadline: float = 5.0
    # Between failed registrations with one socket of the kubelet: doubled after each failure.
    first_retry: float = 0.2
    last_retry: float = 30.0
    # The kubelet may remove a plugin's socket, or end its streams, just before its own socket.
    settle: float = 0.3
    # The kubelet opens the stream within 10 s after Register, or never.
    dial_back: float = 15.0
    # A stream of this age ended for a new reason: the retries begin anew.
    steady: float = 60.0


class _Plugin:
    """A Backend, its server, and what is known of its registration."""

    def __init__(self, backend: Backend, directory: str, changed: Callable[[], None]) -> None:
        self.backend = backend
        self.server = PluginServer(backend, directory, changed)
        self.attempt: asyncio.Task[None] | None = None
        self.registered_at: float | None = None
        self.streams_before = 0  # of the server, before the registration
        self.is_connected = False  # the kubelet has opened a stream since the registration
        self.not_before = 0.0
        self.failures = 0
        self.problem = ""

    def expire(self, not_before: float) -> None:
        """Register again, at *not_before* at the earliest."""
        self.registered_at = None
        self.is_connected = False
        self.not_before = not_before

    def end_attempt(self) -> None:
        """Cancel the registration that is in progress."""
        if self.attempt is not None:
            self.attempt.cancel()
            self.attempt = None


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """Whether the kubelet uses a plugin: *problem* says why not, "" if it does."""

    resource_name: str
    is_registered: bool
    is_connected: bool
    problem: str


@dataclass(slots=True)
class Registrar:
    """The device plugins of this process, beside the socket *kubelet_socket*.

    With "" as the socket the plugins are served in the kubelet's directory, and never registered.
    Every method is called on one event loop.
    """

    kubelet_socket: str
    timing: Timing = field(default_factory=Timing)
    clock: Callable[[], float] = time.monotonic
    directory: str = field(init=False)
    _plugins: dict[str, _Plugin] = field(init=False, default_factory=dict)
    _kubelet: sockets.PinnedSocket | None = field(init=False, default=None)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _watch: DirectoryWatch = field(init=False)
    _task: asyncio.Task[None] | None = field(init=False, default=None)
    _stopping: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.directory = os.path.dirname(os.path.abspath(self.kubelet_socket or DEFAULT_SOCKET))
        self._watch = DirectoryWatch(self.directory, self._changed.set)

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that keeps plugins registered, None before the first; only a bug ends it."""
        return self._task

    def check(self) -> None:
        """Raise KubeletError if the socket's path is too long or its directory cannot be used."""
        if self.kubelet_socket:
            sockets.check_path(os.path.abspath(self.kubelet_socket))
        sockets.check_directory(self.directory)

    async def add(self, backend: Backend) -> None:
        """Serve *backend*, and keep it registered; raise KubeletError if it cannot be served."""
        name = backend.resource_name
        assert name not in self._plugins
        plugin = _Plugin(backend, self.directory, self._changed.set)
        await plugin.server.start()
        async with self._lock:
            self._plugins[name] = plugin
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="kubelet registration")
        self._changed.set()

    async def remove(self, resource_name: str) -> None:
        """End the streams of a resource and remove its socket."""
        async with self._lock:
            plugin = self._plugins.pop(resource_name)
        plugin.end_attempt()
        await plugin.server.stop()
        log.info("%s is no longer offered", resource_name)

    async def close(self) -> None:
        """Remove every socket and end every server."""
        if self._task is not None:
            async with self._lock:  # no socket is being made
                self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        for plugin in self._plugins.values():
            plugin.end_attempt()
        await asyncio.gather(*(plugin.server.stop() for plugin in self._plugins.values()))
        self._plugins.clear()
        await asyncio.gather(*self._stopping)
        self._watch.close()
        if self._kubelet is not None:
            self._kubelet.close()
            self._kubelet = None

    def status(self) -> list[PluginStatus]:
        """Return the status of each plugin, in the order of their names."""
        return [
            PluginStatus(
                name, plugin.registered_at is not None, plugin.is_connected, plugin.problem
            )
            for name, plugin in sorted(self._plugins.items())
        ]

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            is_watched = self._watch.refresh()
            async with self._lock:
                # First the plugins' own sockets: the kubelet connects to them when it has the
                # registration.
                for plugin in self._plugins.values():
                    await self._restore(plugin)
                if self.kubelet_socket:
                    self._look_at_kubelet()
                    for plugin in self._plugins.values():
                        self._look_at_registration(plugin)
                wait = self._wait(is_watched=is_watched)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    def _wait(self, *, is_watched: bool) -> float:
        """Return the seconds until the next look without a change."""
        timing = self.timing
        now = self.clock()
        waits = [timing.poll if is_watched else timing.poll_without_inotify]
        times = [plugin.not_before for plugin in self._plugins.values()]
        waits += [not_before - now for not_before in times if not_before > now]
        return max(min(waits), 0.01)

    async def _restore(self, plugin: _Plugin) -> None:
        """Make the socket of *plugin* again if it is gone."""
        if plugin.server.is_in_place():
            return
        name = plugin.backend.resource_name
        if plugin.server.is_replaced():
            # The last one wins: two processes that replace each other's socket would register
            # for ever.
            problem = f'another process serves "{plugin.server.path}"'
            self._report(plugin, f"{problem}\nhint: stop one of the two device plugins")
            plugin.end_attempt()
            plugin.expire(0.0)
            return
        successor = PluginServer(plugin.backend, self.directory, self._changed.set)
        try:
            await successor.start()
        except sockets.KubeletError as error:
            # The next look may be at another directory: no back-off.
            self._report(plugin, error.lines())
            plugin.end_attempt()
            plugin.expire(0.0)
            return
        log.info("%s: its socket was removed; it is there again", name)
        # The kubelet may still use the connections of the old server, until it has the new
        # registration.
        self._stop_later(plugin.server.stop(GRACE))
        plugin.server = successor
        plugin.end_attempt()
        plugin.expire(self.clock() + self.timing.settle)
        plugin.problem = ""

    def _stop_later(self, stop: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(stop)
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def _look_at_kubelet(self) -> None:
        """Note a new socket of the kubelet: every plugin registers with it at once."""
        if self._kubelet is not None and self._kubelet.is_at(self.kubelet_socket):
            return
        for plugin in self._plugins.values():
            plugin.end_attempt()
            plugin.expire(0.0)
            plugin.failures = 0
        if self._kubelet is not None:
            self._kubelet.close()
        self._kubelet = sockets.pin(self.kubelet_socket)

    def _look_at_registration(self, plugin: _Plugin) -> None:
        """Register *plugin* if the kubelet has not heard of it, or no longer listens to it."""
        now = self.clock()
        service = plugin.server.service
        if plugin.registered_at is not None:
            if service.streams > plugin.streams_before:
                plugin.is_connected = True
                plugin.problem = ""
                if service.open_streams:
                    if now - plugin.registered_at > self.timing.steady:
                        plugin.failures = 0
                    return
                self._fail(plugin, "the kubelet has ended the stream of devices")
            elif now - plugin.registered_at > self.timing.dial_back:
                self._fail(plugin, "the kubelet does not connect after the registration")
        if (
            plugin.registered_at is None
            and plugin.attempt is None
            and self._kubelet is not None
            and now >= plugin.not_before
            and plugin.server.is_in_place()
        ):
            plugin.attempt = asyncio.create_task(self._register(plugin, self._kubelet))

    def _fail(self, plugin: _Plugin, problem: str) -> None:
        """Note *problem*, and try again after a time that doubles each time."""
        timing = self.timing
        delay = min(timing.first_retry * 2**plugin.failures, timing.last_retry)
        plugin.failures = min(plugin.failures + 1, 30)
        plugin.expire(self.clock() + max(delay, timing.settle))
        self._report(plugin, problem)
        self._changed.set()

    def _report(self, plugin: _Plugin, problem: str) -> None:
        """Write a line about *problem*, but not one for each time that it occurs."""
        if plugin.problem != problem:
            log.warning("%s: %s", plugin.backend.resource_name, problem)
        plugin.problem = problem

    async def _register(self, plugin: _Plugin, kubelet: sockets.PinnedSocket) -> None:
        """Register *plugin* with the kubelet behind the socket *kubelet*, and no other."""
        # The attempt is cancelled before *kubelet* is closed, but may end later.
        kubelet = kubelet.duplicate()
        name = plugin.backend.resource_name
        plugin.streams_before = plugin.server.service.streams
        method = messages.DESCRIPTOR.services_by_name["Registration"].methods_by_name["Register"]
        request = messages.RegisterRequest(
            version=VERSION,
            endpoint=endpoint(name),
            resource_name=name,
            options=options(plugin.backend),
        )
        problem = ""
        try:
            await rpc.call(kubelet.path, method, request, self.timing.register_deadline)
        except rpc.RpcError as error:
            problem = _refusal(error)
        except Exception as error:  # noqa: BLE001 (the next attempt may succeed)
            problem = bug(error).lines()
        finally:
            kubelet.close()
        plugin.attempt = None
        if problem:
            self._fail(plugin, problem)
            return
        plugin.registered_at = self.clock()
        log.info("%s is registered with the kubelet", name)
        self._changed.set()


def _refusal(error: rpc.RpcError) -> str:
    """Return what the error of a Register call means."""
    if error.status is Status.UNAVAILABLE:
        return "no kubelet listens at its socket"
    if error.status is Status.DEADLINE_EXCEEDED:
        return "the kubelet does not answer the registration"
    return f"the kubelet refuses the registration: {escape(str(error))}"
