# SPDX-License-Identifier: Apache-2.0
"""Plugins stay registered with a kubelet that restarts, refuses, or says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from node.backends import NAME, SetBackend
from node.fake_kubelet import CHECKPOINT, END_STREAM, NO_DIAL, REFUSE, SILENT, FakeKubelet, until

from gpunode.kubelet import directory_watch, sockets
from gpunode.kubelet.backend import Unit
from gpunode.kubelet.registration import Registrar, Timing

TREE = Path(__file__).parents[2]
OWN_SOCKET = "nvidia-gpu.sock"
SECOND = 1.0
# What the kubelet's peer waits for is short here; that of a poll is never reached by chance.
QUICK = Timing(
    poll=60, poll_without_inotify=0.05, register_deadline=0.3, first_retry=0.05, settle=0.1
)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory with a short path: those of sockets are limited."""
    path = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Node:
    """A kubelet and the registrar of one plugin beside it."""

    def __init__(self, directory: Path, *script: str, timing: Timing = QUICK) -> None:
        self.kubelet = FakeKubelet(directory, *script)
        self.backend = SetBackend({"a": True, "b": True})
        self.registrar = Registrar(str(directory / "kubelet.sock"), timing)

    async def plugin(self) -> None:
        """Start the plugin."""
        self.registrar.check()
        await self.registrar.add(self.backend)

    async def registered(self, times: int = 1, seconds: float = SECOND) -> None:
        """Return when the current socket has *times* registrations and the plugin is used."""
        await until(lambda: self.count() >= times and self.kubelet.live() == [NAME], seconds)

    def count(self) -> int:
        """Return the number of registrations with the current socket."""
        generations = [generation for generation, _ in self.kubelet.registrations]
        return generations.count(self.kubelet.generation)


@contextlib.asynccontextmanager
async def running(directory: Path, *script: str, timing: Timing = QUICK) -> AsyncIterator[Node]:
    """Yield a node whose plugin is registered once."""
    node = Node(directory, *script, timing=timing)
    await node.kubelet.start()
    try:
        await node.plugin()
        yield node
    finally:
        await node.registrar.close()
        await node.kubelet.stop()


async def _restart(node: Node) -> None:
    await node.kubelet.restart()


async def _restart_slowly(node: Node) -> None:
    """Leave the time to see every step: own socket gone, no kubelet, kubelet there."""
    await node.kubelet.stop()
    await asyncio.sleep(0.15)
    for path in node.kubelet.directory.iterdir():
        path.unlink()
        await asyncio.sleep(0.15)
    await node.kubelet.serve()


async def _replace_only_socket(node: Node) -> None:
    """Another kubelet at the same path, within milliseconds; nothing is removed."""
    await node.kubelet.stop()
    node.kubelet.socket.unlink()
    await node.kubelet.serve()


async def _replace_under_live_kubelet(node: Node) -> None:
    """Serve at the new socket before the old connections break."""
    old = node.kubelet._server
    await node.kubelet.serve()
    await old.stop(None)


async def _recreate_directory(node: Node) -> None:
    await node.kubelet.stop()
    shutil.rmtree(node.kubelet.directory)
    await asyncio.sleep(0.1)
    node.kubelet.directory.mkdir()
    await node.kubelet.serve()


async def _recreate_directory_quickly(node: Node) -> None:
    await node.kubelet.stop()
    shutil.rmtree(node.kubelet.directory)
    node.kubelet.directory.mkdir()
    await node.kubelet.serve()


async def _move_directory(node: Node) -> None:
    await node.kubelet.stop()
    moved = node.kubelet.directory.with_suffix(".old")
    node.kubelet.directory.rename(moved)
    node.kubelet.directory.mkdir()
    await node.kubelet.serve()
    shutil.rmtree(moved)


async def _start_before_wipe(node: Node) -> None:
    """Use the other order: first the new socket, then the plugin's is removed."""
    await node.kubelet.stop()
    await node.kubelet.serve()
    (node.kubelet.directory / OWN_SOCKET).unlink()


ORDERS: list[Callable[[Node], Awaitable[None]]] = [
    _restart,
    _restart_slowly,
    _replace_only_socket,
    _replace_under_live_kubelet,
    _recreate_directory,
    _recreate_directory_quickly,
    _move_directory,
    _start_before_wipe,
]


@pytest.mark.parametrize("restart", ORDERS, ids=lambda order: order.__name__.strip("_"))
def test_each_socket_of_the_kubelet_gets_one_registration(
    directory: Path, restart: Callable[[Node], Awaitable[None]]
) -> None:
    """Within a second, whatever the order in which sockets and directory are removed and made."""

    async def case() -> None:
        async with running(directory) as node:
            await node.registered()
            for _ in range(2):
                await restart(node)
                await node.registered()
                await asyncio.sleep(2 * QUICK.settle)
                assert node.count() == 1
                assert node.kubelet.live() == [NAME]

    asyncio.run(case())


def test_a_burst_of_restarts_ends_with_one_registration(directory: Path) -> None:
    """Sockets that exist for 10 ms; the inode numbers may be the same."""

    async def case() -> None:
        async with running(directory) as node:
            await node.registered()
            for _ in range(10):
                await node.kubelet.restart()
                await asyncio.sleep(0.01)
            await node.registered()
            await asyncio.sleep(2 * QUICK.settle)
            per_socket = [generation for generation, _ in node.kubelet.registrations]
            assert len(per_socket) == len(set(per_socket))

    asyncio.run(case())


def test_the_plugin_waits_for_the_kubelet(directory: Path) -> None:
    """The socket of the kubelet appears after the plugin has started."""

    async def case() -> None:
        node = Node(directory)
        await node.plugin()
        try:
            await asyncio.sleep(0.3)
            assert node.registrar.status()[0].is_registered is False
            await node.kubelet.serve()
            await node.registered()
            assert node.count() == 1
        finally:
            await node.registrar.close()
            await node.kubelet.stop()

    asyncio.run(case())


def test_a_directory_behind_a_symlink_is_followed(directory: Path) -> None:
    """The directory itself is watched, not the link; the link may lead elsewhere later."""

    async def case() -> None:
        first, second, link = (directory / name for name in ("first", "second", "link"))
        first.mkdir()
        second.mkdir()
        link.symlink_to(first)
        timing = Timing(poll=0.2, first_retry=0.05, settle=0.1)
        async with running(link, timing=timing) as node:
            await node.registered()
            await node.kubelet.restart()
            await node.registered()
            assert node.count() == 1
            await node.kubelet.stop()
            link.unlink()
            link.symlink_to(second)
            await node.kubelet.serve()
            await node.registered()
            assert (second / OWN_SOCKET).exists()

    asyncio.run(case())


def test_polling_alone_is_enough(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's inotify instances may be used up."""

    def refuse(**_: bool) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(directory_watch, "INotify", refuse)

    async def case() -> None:
        async with running(directory) as node:
            await node.registered()
            await node.kubelet.restart()
            await node.registered()
            await _replace_only_socket(node)
            await node.registered()
            assert node.count() == 1

    asyncio.run(case())


@pytest.mark.parametrize("fault", [REFUSE, SILENT])
def test_a_registration_that_fails_is_repeated(directory: Path, fault: str) -> None:
    """A refusal, and no answer at all; the next one succeeds."""

    async def case() -> None:
        async with running(directory, fault, fault) as node:
            await until(lambda: node.registrar.status()[0].problem, 2 * SECOND)
            await node.registered(times=3, seconds=5)
            await asyncio.sleep(2 * QUICK.settle)
            assert node.count() == 3
            assert node.registrar.status()[0].problem == ""

    asyncio.run(case())


def test_a_new_socket_ends_the_wait_for_an_answer(directory: Path) -> None:
    """The old kubelet never answers, and the deadline is far away."""

    async def case() -> None:
        timing = Timing(poll=60, register_deadline=600)
        async with running(directory, SILENT, timing=timing) as node:
            await until(lambda: node.count() == 1)
            await node.kubelet.serve()
            await node.registered()

    asyncio.run(case())


def test_refusals_are_repeated_less_and_less_often(directory: Path) -> None:
    """A kubelet that refuses for ever gets no flood of requests."""

    async def case() -> None:
        async with running(directory, *[REFUSE] * 50) as node:
            await asyncio.sleep(1.2)
            assert 2 <= node.count() <= 7
            # A new socket gets its registration at once, all the same.
            node.kubelet.script = iter(["ok"] * 5)
            await node.kubelet.restart()
            await node.registered()

    asyncio.run(case())


def test_a_kubelet_that_does_not_connect_gets_another_registration(directory: Path) -> None:
    """The kubelet forgets a plugin that it could not connect to."""

    async def case() -> None:
        timing = Timing(poll=0.1, dial_back=0.4, first_retry=0.05, settle=0.1)
        async with running(directory, NO_DIAL, timing=timing) as node:
            await asyncio.sleep(0.3)
            assert node.count() == 1
            await node.registered(times=2, seconds=3)

    asyncio.run(case())


def test_a_stream_that_the_kubelet_ends_leads_to_a_registration(directory: Path) -> None:
    """The kubelet has then dropped the plugin, and its socket stays the same."""

    async def case() -> None:
        async with running(directory, END_STREAM) as node:
            await node.registered(times=2, seconds=3)
            await asyncio.sleep(3 * QUICK.settle)
            assert node.count() == 2

    asyncio.run(case())


def test_a_removed_plugin_socket_is_made_and_registered_again(directory: Path) -> None:
    """The kubelet stays; its calls go on until it uses the new socket."""

    async def case() -> None:
        async with running(directory) as node:
            await node.registered()
            (directory / OWN_SOCKET).unlink()
            await node.registered(times=2)
            assert (await node.kubelet.connections[-1].allocate(["a"])).container_responses

    asyncio.run(case())


KILLED = """
import asyncio, sys
sys.path[:0] = sys.argv[2:]
from gpunode.kubelet.registration import Registrar
from node.backends import SetBackend

async def main():
    registrar = Registrar(sys.argv[1])
    await registrar.add(SetBackend({"a": True, "b": True}))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def start_plugin(directory: Path) -> subprocess.Popen[str]:
    """Start a process with the plugin."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", KILLED, str(directory / "kubelet.sock")),
            *(str(TREE), str(TREE / "tests")),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_killed_plugin_leaves_nothing_that_stops_the_next_one(directory: Path) -> None:
    """SIGKILL leaves the socket; the next process replaces it, and the pods keep their units."""

    async def case() -> None:
        killed = start_plugin(directory)
        async with contextlib.AsyncExitStack() as stack:
            kubelet = FakeKubelet(directory)
            await kubelet.serve()
            stack.push_async_callback(kubelet.stop)
            await until(lambda: kubelet.live() == [NAME])
            killed.kill()
            killed.communicate()
            await until(lambda: kubelet.live() == [])
            stale = (directory / OWN_SOCKET).stat().st_ino
            node = Node(directory)
            node.kubelet = kubelet
            await node.plugin()
            stack.push_async_callback(node.registrar.close)
            await until(lambda: kubelet.live() == [NAME])
            assert (directory / OWN_SOCKET).stat().st_ino != stale
            assert kubelet.connections[-1].lists == [{"a": "Healthy", "b": "Healthy"}]

    asyncio.run(case())


def test_of_two_plugins_of_one_resource_the_last_one_serves(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They do not take the socket from each other in turn; the first is back when it is free."""

    async def case() -> None:
        timing = Timing(poll=0.1, first_retry=0.05, settle=0.1)
        async with running(directory, timing=timing) as node:
            await node.registered()
            other = start_plugin(directory)
            await until(lambda: node.count() == 2)
            await asyncio.sleep(3 * QUICK.settle)
            assert node.count() == 2
            assert "another process serves" in caplog.text
            other.kill()
            other.communicate()
            await node.registered(times=3, seconds=3)

    asyncio.run(case())


def test_two_resources_are_registered_and_removed_alone(directory: Path) -> None:
    """A change of the MIG strategy ends the streams of one resource."""

    async def case() -> None:
        async with running(directory) as node:
            other = SetBackend({"m": True}, "example.com/mig-1g.5gb")
            await node.registrar.add(other)
            await until(lambda: len(node.kubelet.live()) == 2)
            await node.registrar.remove(NAME)
            await until(lambda: node.kubelet.live() == [other.resource_name])
            assert sorted(path.name for path in directory.iterdir()) == [
                "kubelet.sock",
                "nvidia-mig-1g.5gb.sock",
            ]
            assert node.backend.open_iterators == 0
            await node.registrar.add(node.backend)
            await until(lambda: len(node.kubelet.live()) == 2)

    asyncio.run(case())


def test_nothing_stays_after_the_end(directory: Path) -> None:
    """Only what is not the plugin's."""

    async def case() -> None:
        (directory / CHECKPOINT).write_text("{}")
        async with running(directory) as node:
            await node.registered()
            assert stat.S_IMODE((directory / OWN_SOCKET).stat().st_mode) == 0o600
            descriptors = len(os.listdir("/proc/self/fd"))
            await node.kubelet.restart()
            await node.registered()
            begin = time.monotonic()
            await node.registrar.close()
            assert time.monotonic() - begin < 4
            assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert sorted(path.name for path in directory.iterdir()) == ["kubelet.sock", CHECKPOINT]

    asyncio.run(case())


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_the_end_is_heard_while_something_changes(directory: Path, turns: int) -> None:
    """So many turns of the event loop after a change that the registrar is about to notice."""

    async def case() -> None:
        async with asyncio.timeout(20), running(directory) as node:
            await node.registered()
            node.registrar._changed.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            await node.registrar.close()

    asyncio.run(case())


def test_an_empty_socket_option_serves_without_registering(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets are in the kubelet's directory."""
    monkeypatch.setattr(
        "gpunode.kubelet.registration.DEFAULT_SOCKET", str(directory / "kubelet.sock")
    )

    async def case() -> None:
        kubelet = FakeKubelet(directory)
        await kubelet.start()
        registrar = Registrar("", QUICK)
        await registrar.add(SetBackend({"a": True}))
        await asyncio.sleep(0.3)
        assert (directory / OWN_SOCKET).exists()
        assert kubelet.registrations == []
        await registrar.close()
        await kubelet.stop()

    asyncio.run(case())


def test_a_change_of_units_reaches_the_kubelet_once(directory: Path) -> None:
    """The whole list is sent; a change that changes nothing is not."""

    async def case() -> None:
        async with running(directory) as node:
            await node.registered()
            (connection,) = node.kubelet.connections
            await node.backend.set(node.backend.units)
            await node.backend.set([Unit("a", healthy=False), Unit("b", healthy=True)])
            await until(lambda: len(connection.lists) == 2)
            assert connection.lists[1] == {"a": "Unhealthy", "b": "Healthy"}

    asyncio.run(case())


LONG = "/run/" + "x" * 120 + "/kubelet.sock"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: LONG, "has 138 bytes; the kernel allows 107"),
        (lambda directory: str(directory / "no" / "kubelet.sock"), "does not exist"),
        (lambda directory: str(directory / "file" / "kubelet.sock"), "Not a directory"),
        (lambda _: "/sys/kubelet.sock", "cannot make a socket"),
    ],
)
def test_a_directory_that_cannot_be_used_is_one_error(
    directory: Path, make: Callable[[Path], str], message: str
) -> None:
    """Before anything is served."""
    (directory / "file").touch()
    with pytest.raises(sockets.KubeletError, match=message) as error:
        Registrar(make(directory)).check()
    assert error.value.hint


def test_a_plugin_socket_with_a_long_name_is_an_error(directory: Path) -> None:
    """The kubelet's own socket fits, the plugin's does not."""
    place = directory / ("d" * (sockets.MAX_PATH_BYTES - len(str(directory)) - 17))
    place.mkdir()
    backend_name = "example.com/mig-1g.5gb.shared"

    async def case() -> None:
        registrar = Registrar(str(place / "kubelet.sock"))
        registrar.check()
        with pytest.raises(sockets.KubeletError, match="the kernel allows 107"):
            await registrar.add(SetBackend({"a": True}, backend_name))
        await registrar.close()
        assert list(place.iterdir()) == []

    asyncio.run(case())
