# SPDX-License-Identifier: Apache-2.0
"""The exporter on a simulated node, with a fake kubelet: the whole program."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from node.fake_kubelet import until
from node.node_host import NodeHost, uuid
from node.ports import free_port
from node.rights import can_nobody_run, status_of
from prometheus_client.parser import text_string_to_metric_families

from gpunode.kubelet.proto import pod_resources_pb2 as messages
from gpunode.services import standalone
from gpunode.services.exporter import Exporter, Options

PATIENCE_S = 30
TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"


class FakePodResources:
    """The kubelet's list of pod resources at *path*; its *answer* is bytes, or an exception."""

    def __init__(self, path: Path) -> None:
        self.answer: Callable[[], bytes] = lambda: b""
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(lambda _, __: self.answer())
        self.server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler})]
        )
        self.server.add_insecure_port(f"unix:{path}")
        self.server.start()
        path.chmod(0o600)

    def list(self, pod: str, *ids: str) -> None:
        """Have the only pod hold the devices *ids*."""
        device = messages.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=ids)
        container = messages.ContainerResources(name="main", devices=[device])
        answer = messages.ListPodResourcesResponse(
            pod_resources=[messages.PodResources(name=pod, namespace="ns", containers=[container])]
        ).SerializeToString()
        self.answer = lambda: answer


@pytest.fixture
def kubelet(place: Path) -> Iterator[FakePodResources]:
    """Yield a kubelet whose socket only root can use."""
    fake = FakePodResources(place / "k.sock")
    yield fake
    fake.server.stop(None)


def command(host: NodeHost, place: Path, *options: str) -> list[str]:
    """Return the command line of the exporter."""
    program = "import sys; from gpunode.cli.main import main; sys.argv[0] = 'gpu-node'; main()"
    return [
        *(sys.executable, "-c", program, "exporter", f"--nvidia-driver-root={host.root}"),
        *("--listen=127.0.0.1:0", f"--pod-resources-socket={place}/k.sock", *options),
    ]


def once(host: NodeHost, place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Return the result of one scrape."""
    return subprocess.run(
        command(host, place, "--once", *options),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Return the samples of the metric *name* in a scrape."""
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]


def host_below(place: Path) -> NodeHost:
    """Return a node with two GPUs, whose files every user can read."""
    return NodeHost(place)


def test_a_scrape_names_the_pod(place: Path, kubelet: FakePodResources) -> None:
    """Through a socket that only root can use."""
    kubelet.list("train", f"{uuid(1)}::2")
    done = once(host_below(place), place, "--hostname=n1")
    assert done.returncode == 0, done.stderr
    found = {labels["gpu"]: labels for labels, _ in samples(done.stdout, TEMPERATURE)}
    assert found["0"]["hostname"] == "n1"
    assert "pod" not in found["0"]
    assert (found["1"]["pod"], found["1"]["vgpu"]) == ("train", "2")
    assert samples(done.stdout, "gpu_node_pod_mapping_up") == [({}, 1.0)]


@pytest.mark.parametrize("fault", ["missing", "nonsense", "error", "slow"])
def test_a_scrape_without_the_kubelet(place: Path, fault: str) -> None:
    """Has the metrics of the GPUs, without pods, and says so."""
    fake, end = None, threading.Event()
    answers: dict[str, Callable[[], bytes]] = {
        "nonsense": lambda: b"\xff\xff\xff",
        "error": lambda: bytes(1 // 0),
        # Longer than the program is waited for.
        "slow": lambda: bytes(end.wait(2 * PATIENCE_S)),
    }
    if fault != "missing":
        fake = FakePodResources(place / "k.sock")
        fake.answer = answers[fault]
    try:
        done = once(host_below(place), place)
    finally:
        end.set()
        if fake is not None:
            fake.server.stop(None)
    assert done.returncode == 0, done.stderr
    assert len(samples(done.stdout, TEMPERATURE)) == 2
    assert samples(done.stdout, "gpu_node_pod_mapping_up") == [({}, 0.0)]
    assert "hint: " in done.stderr or "; " in done.stderr


class Running:
    """The exporter as a process."""

    def __init__(self, host: NodeHost, place: Path, *options: str) -> None:
        self.port = free_port()
        words = [w for w in command(host, place, *options) if not w.startswith("--listen=")]
        self.process = subprocess.Popen([*words, f"--listen=127.0.0.1:{self.port}"])

    def scrape(self, path: str = "/metrics") -> str:
        """Return the answer for *path*."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def until(self, condition: Callable[[str], bool]) -> str:
        """Return the first scrape for which *condition* holds."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                text = self.scrape()
            except (urllib.error.URLError, OSError):
                text = ""
            if text and condition(text):
                return text
            time.sleep(0.1)
        raise AssertionError("the condition never held")

    def stop(self) -> None:
        """End the process as an operator does; kill it if it stays."""
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(5) == 0
        finally:
            self.process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_reads_and_serves_has_no_rights(place: Path, kubelet: FakePodResources) -> None:
    """It is nobody, without capabilities; only its parent, which asks the kubelet, is root."""
    kubelet.list("train", uuid(0))
    running = Running(host_below(place), place)
    try:
        running.until(lambda text: 'pod="train"' in text)
        parent = running.process.pid
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        status = status_of(int(child))
        assert status["Groups"].strip() == ""
        if can_nobody_run():
            assert "0" not in status["Uid"].split()
            assert "0" not in status["Gid"].split()
        assert {status[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff")} == {""}
        assert status["NoNewPrivs"] == "1"
        listening = Path(f"/proc/{child}/net/tcp").read_text()
        assert f":{running.port:04X} " in listening
    finally:
        running.stop()


def test_a_driver_that_hangs_while_it_is_asked(place: Path) -> None:
    """Scrapes have the last values, with an age that grows, and say that the driver is not up."""
    host = host_below(place)

    async def play() -> tuple[str, str, str]:
        service = Exporter(host.watcher, None, Options(listen="127.0.0.1:0"))
        running = asyncio.create_task(standalone.run(service))

        async def scrape_until(condition: Callable[[str], bool]) -> str:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    # Without the last values this would wait as long as the driver, for ever.
                    url = f"http://127.0.0.1:{service.server.port}/metrics"
                    text = await asyncio.to_thread(get, url)
                    if condition(text):
                        return text
                    await asyncio.sleep(0.05)

        await until(lambda: service.server.port != 0)
        try:
            before = await scrape_until(lambda text: len(samples(text, TEMPERATURE)) == 2)
            host.say("fault hangs nvmlDeviceGetTemperature")
            after = await scrape_until(lambda text: up(text) == 0.0)
            later = await scrape_until(lambda text: age(text) > age(after) + 0.2)
        finally:
            service.turns.stop()
            await running
        return before, after, later

    before, after, later = asyncio.run(play())
    assert up(before) == 1.0
    for text in (after, later):
        assert up(text) == 0.0
        assert samples(text, TEMPERATURE) == samples(before, TEMPERATURE)
    ((labels, _),) = samples(after, "gpu_node_driver_up")
    assert labels["state"] == "hanging"


def get(url: str) -> str:
    """Return the body of *url*."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def up(text: str) -> float:
    """Return whether the driver is up, by a scrape."""
    ((_, value),) = samples(text, "gpu_node_driver_up")
    return value


def age(text: str) -> float:
    """Return the age of the values of a scrape."""
    ((_, value),) = samples(text, "gpu_node_telemetry_age_seconds")
    return value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--collectors=/none"], 'cannot use the collectors file "/none"'),
        (["--listen=nowhere"], '--listen is "nowhere"'),
    ],
)
def test_errors(tmp_path: Path, options: list[str], message: str) -> None:
    """One line and a hint."""
    program = "import sys; from gpunode.cli.main import main; sys.argv[0] = 'gpu-node'; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "exporter", "--kubernetes=false", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode in (1, 2)
    assert re.search(re.escape(message) + r".*\nhint: ", done.stderr)
    assert "Traceback" not in done.stderr
