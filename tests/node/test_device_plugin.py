# SPDX-License-Identifier: Apache-2.0
"""The device plugin between a simulated driver and a fake kubelet: the whole service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from inotify_simple import INotify
from node.fake_engine import serve_engine
from node.fake_kubelet import Connection, FakeKubelet, until
from node.node_host import NodeHost, gpu_lines, mig_uuid, uuid
from node.ports import free_port

from gpunode.cli.device_plugin import load_config
from gpunode.config.effective import OptionText
from gpunode.kubelet import directory_watch
from gpunode.kubelet.sockets import KubeletError
from gpunode.services import standalone
from gpunode.services.device_plugin import DevicePlugin
from gpuruntime.errors import DriverError, GpuRuntimeError

TREE = Path(__file__).parents[2]
PATIENCE_S = 20
GPU = "nvidia.com/gpu"


class Node:
    """A host with a driver, a kubelet, and the device plugin between them."""

    def __init__(
        self, place: Path, host: NodeHost | None, config: str = "", **options: str
    ) -> None:
        self.host = host
        self.directory = Path(options.get("kubelet_socket", place / "kubelet/kubelet.sock")).parent
        self.directory.mkdir()
        self.specs = place / "cdi"
        self.config_file = place / "config.yaml"
        self.config_file.write_text(config)
        self.kubelet = FakeKubelet(self.directory)
        options = {
            "kubelet_socket": str(self.kubelet.socket),
            "cdi_spec_dir": str(self.specs),
            "nvidia_driver_root": str(host.root) if host else str(place / "none"),
            **options,
        }
        texts = {name: OptionText(text, f"--{name}") for name, text in options.items()}

        self.port = free_port()
        self.plugin = DevicePlugin(
            lambda: load_config(str(self.config_file), texts),
            environment={},
            **({"watch": lambda _: host.watcher()} if host else {}),
        )

    async def run(self, scenario: Callable[[Node], Awaitable[None]]) -> None:
        """Play *scenario* while the plugin runs, and end it by its signal."""
        await self.kubelet.start()
        service = asyncio.create_task(standalone.run(self.plugin, f"127.0.0.1:{self.port}"))
        try:
            play = asyncio.create_task(scenario(self))  # type: ignore[arg-type]
            await asyncio.wait({service, play}, return_when=asyncio.FIRST_COMPLETED)
            if service.done():
                play.cancel()
                service.result()
                pytest.fail("the service has ended")
            await play
            start = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            await service
            assert time.monotonic() - start < 5
        finally:
            service.cancel()
            await self.kubelet.stop()
        assert [path.name for path in self.directory.iterdir()] == ["kubelet.sock"]

    def connection(self, resource: str = GPU) -> Connection | None:
        """Return the kubelet's live connection to *resource*."""
        for connection in self.kubelet.connections:
            if connection.request.resource_name == resource and not connection.is_ended:
                return connection
        return None

    async def until_units(self, expected: dict[str, dict[str, str]]) -> None:
        """Wait until the kubelet knows exactly the resources and units of *expected*."""

        def units() -> dict[str, dict[str, str]]:
            live = [self.connection(name) for name in self.kubelet.live()]
            return {
                connection.request.resource_name: connection.lists[-1]
                for connection in live
                if connection
            }

        try:
            await until(lambda: units() == expected, PATIENCE_S)
        except AssertionError:
            assert units() == expected

    async def report(self, path: str = "/readyz") -> tuple[int, dict[str, Any]]:
        """Return status and content of a probe."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), json.loads(body)


def play(node: Node, scenario: Callable[[Node], Awaitable[None]]) -> None:
    """Play *scenario* on *node*."""
    asyncio.run(node.run(scenario))


def healthy(*units: str, sick: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the units as the kubelet knows them."""
    states = dict.fromkeys(units, "Healthy") | dict.fromkeys(sick, "Unhealthy")
    return dict(sorted(states.items()))


def test_gpus_are_offered_and_allocated(place: Path) -> None:
    """The whole way of a request: units, preference, allocation, specs."""

    async def scenario(node: Node) -> None:
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})
        connection = node.connection()
        assert connection is not None
        assert [[n.ID for n in device.topology.nodes] for device in connection.devices] == [
            [0],
            [1],
        ]
        response = await connection.allocate([uuid(1)])
        (container,) = response.container_responses
        assert [device.name for device in container.cdi_devices] == [
            f"k8s.device-plugin.nvidia.com/gpu={uuid(1)}"
        ]
        (spec,) = [json.loads(path.read_text()) for path in node.specs.glob("*-gpu.json")]
        assert [device["name"] for device in spec["devices"]] == [uuid(0), uuid(1), "all"]
        status, report = await node.report()
        assert (status, report["reasons"]) == (200, [])
        assert report["resources"] == {GPU: {"units": 2, "healthy": 2, "registered": True}}

    play(Node(place, NodeHost(place), device_list_strategy="cdi-cri"), scenario)


def test_an_allocation_that_is_refused_says_why(place: Path) -> None:
    """The text reaches the status of the pod."""

    async def scenario(node: Node) -> None:
        await until(lambda: node.kubelet.live() == [GPU], PATIENCE_S)
        connection = node.connection()
        assert connection is not None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await connection.allocate(["GPU-x"])
        assert "unknown device: GPU-x" in caught.value.details()

    play(Node(place, NodeHost(place)), scenario)


def test_a_sick_gpu_comes_back(place: Path) -> None:
    """Report K01: all of its shares are unhealthy, then healthy again."""
    sharing = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}"

    async def scenario(node: Node) -> None:
        first, second = ([f"{uuid(gpu)}::{i}" for i in range(2)] for gpu in range(2))
        await node.until_units({GPU: healthy(*first, *second)})
        assert node.host is not None
        node.host.say("at 0.2 xid 0 62")
        await node.until_units({GPU: healthy(*second, sick=tuple(first))})
        _, report = await node.report()
        assert report["unhealthy"] == {uuid(0): "XID 62 (internal microcontroller halt)"}
        await node.until_units({GPU: healthy(*first, *second)})

    play(Node(place, NodeHost(place), sharing, health_quiet_time="1s"), scenario)


def test_a_lost_gpu_is_unhealthy_and_others_are_allocated(place: Path) -> None:
    """Report K05: and it is healthy again when it is back and quiet."""

    async def scenario(node: Node) -> None:
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})
        assert node.host is not None
        node.host.say("fault lost 0")
        await node.until_units({GPU: healthy(uuid(1), sick=(uuid(0),))})
        connection = node.connection()
        assert connection is not None
        response = await connection.allocate([uuid(1)])
        assert response.container_responses[0].envs["NVIDIA_VISIBLE_DEVICES"] == uuid(1)
        node.host.say()
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})

    play(Node(place, NodeHost(place), health_quiet_time="100ms"), scenario)


def test_a_driver_that_hangs_makes_all_units_unhealthy(place: Path) -> None:
    """Until it answers; calls of the kubelet are answered in the meantime."""

    async def scenario(node: Node) -> None:
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})
        assert node.host is not None
        node.host.say("fault hangs nvmlDeviceGetCount_v2")
        await node.until_units({GPU: healthy(sick=(uuid(0), uuid(1)))})
        status, report = await node.report()
        assert (status, report["driver"]["state"]) == (503, "hanging")
        connection = node.connection()
        assert connection is not None
        assert (await connection.allocate([uuid(1)])).container_responses
        node.host.say()
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})

    play(Node(place, NodeHost(place)), scenario)


def _watchers_that_fail(host: NodeHost, times: int) -> Callable[[Any], Any]:
    """Return a function that fails *times* times, and then returns watchers of *host*."""
    failures = iter(range(times))

    def watch(here: Any) -> Any:
        for number in failures:
            raise RuntimeError(f"failure {number}")
        return host.watcher()

    return watch


def test_a_bug_does_not_end_it_at_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It begins again."""

    async def scenario(node: Node) -> None:
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})

    node = Node(place, NodeHost(place))
    assert node.host is not None
    node.plugin.watch = _watchers_that_fail(node.host, 5)
    play(node, scenario)
    assert caplog.text.count("this is a bug") == 5


def test_a_registration_that_ends_by_a_bug_begins_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the next kubelet would never hear of the plugin."""
    failures = iter([RuntimeError("no watch")])

    def fail_once(**options: bool) -> INotify:
        for failure in failures:
            raise failure
        return INotify(**options)

    async def scenario(node: Node) -> None:
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})

    monkeypatch.setattr(directory_watch, "INotify", fail_once)
    play(Node(place, NodeHost(place)), scenario)
    assert "no watch" in caplog.text


def test_a_bug_that_occurs_too_often_ends_it(place: Path) -> None:
    """More than five times in an hour; the kubelet starts the pod again."""

    async def scenario(node: Node) -> None:
        await asyncio.sleep(PATIENCE_S)

    node = Node(place, NodeHost(place))
    assert node.host is not None
    node.plugin.watch = _watchers_that_fail(node.host, 6)
    with pytest.raises(GpuRuntimeError, match="this is a bug: RuntimeError"):
        play(node, scenario)


def test_it_ends_in_time_while_the_driver_hangs(place: Path) -> None:
    """The sockets are removed before the child is waited for."""

    async def scenario(node: Node) -> None:
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})
        assert node.host is not None
        node.host.say("fault hangs nvmlDeviceGetCount_v2")
        await node.until_units({GPU: healthy(sick=(uuid(0), uuid(1)))})

    play(Node(place, NodeHost(place)), scenario)


def _divide(host: NodeHost, count: int) -> None:
    """Have the host's GPUs in MIG mode, with *count* devices of the first."""
    host.allow_mig(*(f"gpu0/gi{i + 1}/ci0" for i in range(count)))
    host.lines = gpu_lines(2, (0, 1))
    host.say(*(f"mig 0 {i} {mig_uuid(0, i)} {i + 1} 0 1 1 9728" for i in range(count)))


def test_resources_follow_the_mig_devices(place: Path) -> None:
    """Report K17: the stream of the old resource ends, and the new one is registered."""

    async def scenario(node: Node) -> None:
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})
        assert node.host is not None
        _divide(node.host, 2)
        slices = [mig_uuid(0, 0), mig_uuid(0, 1)]
        await until(lambda: node.kubelet.live() not in ([GPU], []), PATIENCE_S)
        (name,) = node.kubelet.live()
        assert name.startswith("nvidia.com/mig-1g.")
        await node.until_units({name: healthy(*slices)})
        node.host.lines = gpu_lines(2)
        node.host.say()
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})

    play(Node(place, NodeHost(place), mig_strategy="mixed"), scenario)


def test_a_config_that_is_read_again(place: Path) -> None:
    """SIGHUP; a config that cannot be used leaves the one in force, and says so."""

    async def scenario(node: Node) -> None:
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})
        node.config_file.write_text("version: v2\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: node.plugin.config_problem, PATIENCE_S)
        status, report = await node.report()
        assert status == 200
        assert 'unknown version: "v2"' in report["config_error"]
        node.config_file.write_text(
            "sharing: {timeSlicing: {resources: "
            "[{name: gpu, devices: [0], replicas: 2, rename: part}]}}"
        )
        os.kill(os.getpid(), signal.SIGHUP)
        parts = healthy(f"{uuid(0)}::0", f"{uuid(0)}::1")
        await node.until_units({GPU: healthy(uuid(1)), "nvidia.com/part": parts})
        assert (await node.report())[1]["config_error"] == ""
        # The resource that stays was not interrupted.
        names = [name for _, name in node.kubelet.registrations]
        assert sorted(names) == [GPU, "nvidia.com/part"]

    play(Node(place, NodeHost(place)), scenario)


def test_a_layout_that_does_not_fit_is_not_ready(place: Path) -> None:
    """Report K16: later than at start, it is not an error that ends the plugin."""

    async def scenario(node: Node) -> None:
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})
        assert node.host is not None
        _divide(node.host, 1)
        await node.until_units({})
        status, report = await node.report()
        assert status == 503
        assert "device 1 has no MIG devices configured" in report["reasons"][0]

    play(Node(place, NodeHost(place), mig_strategy="single"), scenario)


@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
def test_without_a_driver_it_ends_with_the_reason(place: Path, strategy: str) -> None:
    """Report K19: exit with one line, also with CDI."""

    async def scenario(node: Node) -> None:
        await asyncio.sleep(PATIENCE_S)

    host = NodeHost(place)
    host.remove_libraries()
    with pytest.raises(DriverError) as caught:
        play(Node(place, host, device_list_strategy=strategy), scenario)
    assert "the driver is absent" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
def test_without_a_driver_it_waits_if_told_so(place: Path, strategy: str) -> None:
    """Report K19: NVML is tried again, and CDI does not end the plugin."""

    async def scenario(node: Node) -> None:
        await until(lambda: node.plugin.state.status.reason, PATIENCE_S)
        status, report = await node.report()
        assert status == 503
        assert report["reasons"][0].startswith("the driver is absent")
        assert node.kubelet.registrations == []
        assert node.host is not None
        node.host.restore_libraries()
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})

    host = NodeHost(place)
    host.remove_libraries()
    node = Node(place, host, device_list_strategy=strategy, fail_on_init_error="false")
    play(node, scenario)


def test_a_plugin_socket_with_a_long_name_ends_it(place: Path) -> None:
    """Nothing is half registered."""
    name = "n" * 52
    config = (
        f"sharing: {{timeSlicing: {{resources: [{{name: gpu, replicas: 2, rename: {name}}}]}}}}"
    )
    directory = place / ("d" * 50)

    async def scenario(node: Node) -> None:
        del node
        await asyncio.sleep(PATIENCE_S)

    node = Node(place, NodeHost(place), config, kubelet_socket=f"{directory}/kubelet.sock")
    with pytest.raises(KubeletError, match="bytes; the kernel allows 107"):
        play(node, scenario)
    assert node.kubelet.registrations == []
    assert [path.name for path in directory.iterdir()] == ["kubelet.sock"]


def test_the_program_ends_with_code_1_without_a_driver(place: Path) -> None:
    """One error line with a hint, no traceback, no socket."""
    (place / "none").mkdir()
    (place / "kubelet").mkdir()
    command = [sys.executable, "-c", "from gpunode.cli.main import main; main()", "device-plugin"]
    options = [
        f"--kubelet-socket={place}/kubelet/kubelet.sock",
        f"--nvidia-driver-root={place}/none",
        "--log-format=json",
    ]
    done = subprocess.run(
        [*command, *options], cwd=TREE, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert all({"level", "msg", "time"} == set(record) for record in logged)
    others = [line for line in lines if not line.startswith("{")]
    assert [line.split(":")[0] for line in others] == ["error", "hint"]
    assert list((place / "kubelet").iterdir()) == []


def test_the_engine_is_asked_what_arrives(place: Path) -> None:
    """Without an answer it is the environment, and the engine is asked again."""
    socket = place / "engine.sock"

    async def scenario(node: Node) -> None:
        await node.until_units({GPU: healthy(uuid(0), uuid(1))})
        _, report = await node.report()
        assert report["strategies"] == ["envvar"]
        assert "does not answer" in report["problems"][0]
        server = await serve_engine(socket, "1.7.24", enableCDI=True)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: node.plugin.delivery_choice.is_made, PATIENCE_S)
        await until(lambda: list(node.specs.glob("*-gpu.json")), PATIENCE_S)
        _, report = await node.report()
        assert report["strategies"] == ["cdi-cri"]
        assert report["delivery"] == "containerd 1.7.24 has CDI on"
        assert report["problems"] == []
        await server.stop(None)

    node = Node(place, NodeHost(place), device_list_strategy="auto", cri_socket=str(socket))
    play(node, scenario)
