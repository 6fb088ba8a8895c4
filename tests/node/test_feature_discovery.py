# SPDX-License-Identifier: Apache-2.0
"""Feature discovery on a simulated node: the whole program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node.fake_api_server import FakeApiServer
from node.node_host import NodeHost, gpu_lines
from node.rights import can_nobody_run, status_of

PATIENCE_S = 30
PRODUCT = "nvidia.com/gpu.product"


def command(root: Path, *options: str) -> list[str]:
    """Return the command line of feature discovery for the driver below *root*."""
    program = "import sys; from gpunode.cli.main import main; sys.argv[0] = 'gpu-node'; main()"
    words = ("feature-discovery", f"--nvidia-driver-root={root}", "--no-timestamp")
    return [sys.executable, "-c", program, *words, *options]


def labels(path: Path) -> dict[str, str]:
    """Return the labels of a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split("=", 1) for line in lines)


def until(condition: Callable[[], bool]) -> None:
    """Wait until *condition* holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_once(place: Path) -> None:
    """On standard output, in order; the options of the config file count."""
    host = NodeHost(place)
    (place / "c.yaml").write_text(
        "version: v1\n"
        "flags: {gfd: {oneshot: true}}\n"
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
    )
    done = subprocess.run(
        command(host.root, "--output-file=", f"--config-file={place}/c.yaml"),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    lines = done.stdout.splitlines()
    assert lines == sorted(lines)
    assert f"{PRODUCT}=NVIDIA-H100-80GB-HBM3-SHARED" in lines
    assert "nvidia.com/gpu.count=2" in lines
    assert "nvidia.com/gpu.replicas=4" in lines


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_asks_the_driver_has_no_rights(place: Path) -> None:
    """It is nobody, without capabilities; its parent writes to a directory that is root's."""
    host = NodeHost(place)
    private = place / "features.d"
    private.mkdir(0o700)
    path = private / "gfd"
    process = subprocess.Popen(command(host.root, f"--output-file={path}"))
    try:
        until(lambda: PRODUCT in labels(path))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        status = status_of(int(children.split()[0]))
        assert {status[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff")} == {""}
        assert status["NoNewPrivs"] == "1"
        if can_nobody_run():
            assert "0" not in status["Uid"].split()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(5) == 0
        finally:
            process.kill()


def test_labels_stay_when_the_program_ends(place: Path) -> None:
    """Complaint 23: they come with the driver, follow the GPUs, and are kept."""
    host = NodeHost(place)
    host.remove_libraries()
    path = place / "features"
    process = subprocess.Popen(
        command(host.root, "--fail-on-init-error=false", f"--output-file={path}"),
        stderr=subprocess.PIPE,
    )
    try:
        until(lambda: "nvidia.com/gpu.machine" in labels(path))
        assert PRODUCT not in labels(path)
        host.restore_libraries()
        until(lambda: PRODUCT in labels(path))
        host.lines = gpu_lines(1)
        host.say()
        until(lambda: labels(path)["nvidia.com/gpu.count"] == "1")
        host.unload_module()
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.communicate()
    assert labels(path)["nvidia.com/gpu.count"] == "1"
    assert [name for name in os.listdir(place) if name.startswith(".")] == []


NODE = "/api/v1/nodes/n1"
FEATURE = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/gpu/nodefeatures/nvidia-features-for-n1"


@pytest.mark.parametrize("kind", ["node", "feature"])
def test_labels_in_the_api_server(place: Path, kind: str) -> None:
    """One request applies them all, as ours: labels of others stay."""
    path, option = (
        (NODE, "--node-labels") if kind == "node" else (FEATURE, "--use-node-feature-api")
    )
    server = FakeApiServer({path: {"kind": "Node", "metadata": {"name": "n1"}}})
    with server.config(place / "kubeconfig") as kubeconfig:
        options = ("--oneshot", option, "--node-name=n1", "--namespace=gpu")
        done = subprocess.run(
            command(NodeHost(place).root, *options, f"--kubeconfig={kubeconfig}"),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr
    ((method, address, body),) = server.requests
    assert (method, address.partition("?")[0]) == ("PATCH", path)
    assert "fieldManager=gpu-node" in address
    document = json.loads(body)
    published = document["metadata"]["labels"] if kind == "node" else document["spec"]["labels"]
    assert published[PRODUCT] == "NVIDIA-H100-80GB-HBM3"
    assert {"nvidia.com/gpu.count", "nvidia.com/gpu.machine"} < set(published)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({}, "check the name of the node"),
        ({NODE: {"kind": "Status", "code": 403, "message": "no rights"}}, "the rights of deploy/"),
        ({NODE: {"kind": "Status", "code": 500, "message": "broken"}}, "log of the API server"),
    ],
)
def test_errors_of_the_api_server(place: Path, objects: dict[str, Any], message: str) -> None:
    """One line and a hint; no label is set in part."""
    with FakeApiServer(objects).config(place / "kubeconfig") as kubeconfig:
        options = ("--oneshot", "--node-labels", "--node-name=n1", f"--kubeconfig={kubeconfig}")
        done = subprocess.run(
            command(NodeHost(place).root, *options),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 1
    assert message in done.stderr
    assert "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--oneshot"], "the driver is absent"),
        (["--node-labels"], "the name of the node is empty"),
        (["--use-node-feature-api"], "the name of the node is empty"),
        (["--sleep-interval=often"], '--sleep-interval is "often"'),
        (["--mig-strategy=all"], '--mig-strategy is "all"'),
    ],
)
def test_errors(place: Path, options: list[str], message: str) -> None:
    """One line and a hint."""
    environment = {name: os.environ[name] for name in ("PATH",)}
    done = subprocess.run(
        command(place, f"--output-file={place}/f", *options),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=environment,
    )
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "f").exists()
