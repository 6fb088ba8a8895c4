# SPDX-License-Identifier: Apache-2.0
"""`gpu-node validate`: the whole program, with an API server, an engine and real containers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from containers import seen
from node.fake_api_server import FakeApiServer
from node.fake_engine import serve_engine
from node.node_host import NodeHost

PATIENCE_S = 60
NODE = "/api/v1/nodes/one"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def validate(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return the result of the command."""
    program = "import sys; from gpunode.cli.main import main; sys.argv[0] = 'gpu-node'; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "validate", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env={"PATH": os.environ["PATH"], **variables},
    )


def node(**amounts: str) -> dict[str, Any]:
    """Return the node with *amounts* of GPUs."""
    gpus = {f"nvidia.com/{name}": amount for name, amount in amounts.items()}
    return {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {"name": "one"},
        "status": {"capacity": gpus, "allocatable": gpus},
    }


def slices(devices: int) -> dict[str, Any]:
    """Return the list with one ResourceSlice of the DRA driver."""
    spec = {
        "driver": "gpu.nvidia.com",
        "nodeName": "one",
        "devices": [{"name": f"gpu-{number}"} for number in range(devices)],
    }
    item = {
        "kind": "ResourceSlice",
        "apiVersion": "resource.k8s.io/v1",
        "metadata": {"name": "s"},
        "spec": spec,
    }
    return {"kind": "ResourceSliceList", "metadata": {}, "items": [item]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objects", "status", "statuses", "sentence"),
    [
        ({NODE: node(gpu="2")}, 0, {"plugin": "ok", "dra": "ok"}, "nvidia.com/gpu: 2"),
        (
            {NODE: node(gpu="2"), SLICES: slices(2)},
            1,
            {"plugin": "ok", "dra": "fail"},
            "two pods can get one GPU",
        ),
        ({}, 1, {"plugin": "fail", "dra": "fail"}, "not found"),
        (
            {NODE: {"code": 403, "message": "no rights"}},
            1,
            {"plugin": "fail"},
            "the rights of deploy/",
        ),
    ],
)
def test_what_the_cluster_has_of_the_node(
    tmp_path: Path,
    objects: dict[str, Any],
    status: int,
    statuses: dict[str, str],
    sentence: str,
) -> None:
    """A cluster without DRA has no ResourceSlices, and that is not an error."""
    with FakeApiServer(objects).config(tmp_path / "kubeconfig") as kubeconfig:
        done = validate(
            *(f"--component={','.join(statuses)}", "--json", f"--output-dir={tmp_path}/ready"),
            NODE_NAME="one",
            KUBECONFIG=str(kubeconfig),
        )
    assert done.returncode == status, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] == (status == 0)
    assert {item["name"]: item["status"] for item in document["components"]} == statuses
    assert sentence in done.stdout
    ready = {f"{name}-ready" for name, state in statuses.items() if state == "ok"}
    assert {path.name for path in (tmp_path / "ready").glob("*")} == ready


@pytest.mark.slow
def test_the_variables_of_the_incumbent(tmp_path: Path) -> None:
    """A component that is valid is not waited for."""
    (tmp_path / "host/sys/module/mlx5_core").mkdir(parents=True)
    done = validate(
        COMPONENT="mofed",
        WITH_WAIT="true",
        OUTPUT_DIR=f"{tmp_path}/ready",
        HOST_ROOT=f"{tmp_path}/host",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ready/mofed-ready").read_text() == ""


@pytest.mark.slow
def test_delivery_that_cannot_arrive(tmp_path: Path) -> None:
    """The engine says that it has CDI off, and the plugin is forced to rely on it."""
    socket = Path("/tmp", f"v{os.getpid()}.sock")  # short

    async def check() -> subprocess.CompletedProcess[str]:
        server = await serve_engine(socket, "1.6.20", enableCDI=False)
        try:
            return await asyncio.to_thread(
                validate,
                *("--component=delivery", "--device-list-strategy=cdi-cri", "--output-dir="),
                f"--cri-socket={socket}",
            )
        finally:
            await server.stop(None)

    done = asyncio.run(check())
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("fail  delivery        containerd 1.6.20 ignores CDI names")
    assert "switch CDI on in the engine" in done.stdout


@pytest.mark.slow
def test_the_driver_below_another_root(tmp_path: Path) -> None:
    """Its NVML is asked; the ready file says where the driver is."""
    host = NodeHost(tmp_path)
    options = ("--component=driver", f"--host-root={host.root}", f"--output-dir={tmp_path}/ready")
    done = validate(*options)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("ok    driver          driver ")
    assert "2 GPU(s)" in done.stdout
    text = (tmp_path / "ready/driver-ready").read_text()
    assert "IS_HOST_DRIVER=true\nNVIDIA_DRIVER_ROOT=/\n" in text
    host.say("init-fails")
    host.unload_module_files()
    done = validate(*options)
    assert done.returncode == 1
    assert list((tmp_path / "ready").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--component=drivers"], 'unknown component "drivers"'),
        (["--component=plugin"], "the name of the node is empty"),
        (["--wait=often"], '--wait is "often"'),
        (["--interval=-1"], '--interval is "-1"'),
        (["--device-list-strategy=pigeon"], "pigeon"),
    ],
)
def test_wrong_options(tmp_path: Path, options: list[str], message: str) -> None:
    """One line and a hint, before any check."""
    done = validate(f"--output-dir={tmp_path}/ready", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "ready").exists()


@pytest.mark.slow
@pytest.mark.system
def test_containers_of_the_configured_engine() -> None:
    """They get the GPUs and call CUDA; nothing remains, also when the runtime fails or hangs."""
    results = seen.play(
        program=Path(__file__).with_name("validate_scenario.py"), host=["--gpus", "2"]
    )
    assert results["without an engine"] == {"driver": "ok", "toolkit": "fail", "cuda": "fail"}
    assert results["works"] == {"driver": "ok", "toolkit": "ok", "cuda": "ok"}
    assert results["from a pod"] == results["works"]
    assert "has 2 GPU(s)" in results["sentences"]["toolkit"]
    assert "libcuda.so.550" in results["sentences"]["cuda"]
    assert results["runc fails"] == {"toolkit": "fail", "cuda": "fail"}
    assert results["runc hangs"] < 0
    assert results["remains"] == []
