# SPDX-License-Identifier: Apache-2.0
"""Which device list strategy works with an engine."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node.fake_engine import serve_engine_text

from gpunode import engine
from gpunode.config.effective import Config
from gpunode.engine import Engine
from gpunode.kubelet import engine_client
from gpunode.kubelet.engine_client import EngineError
from gpunode.services.delivery_choice import DeliveryChoice


def _containerd(version: str, program: str = "", **config: Any) -> Engine:
    runtimes = {
        "runc": {"options": {"BinaryName": ""}},
        "gpu": {"options": {"BinaryName": program}},
    }
    return engine.engine_of(
        "containerd", version, {"containerd": {"runtimes": runtimes}, **config}
    )


OURS = "/usr/bin/gpu-container-runtime"


@pytest.mark.parametrize(
    ("of", "accepts_mounts", "strategy", "works"),
    [
        (_containerd("v1.7.24", enableCDI=True), False, "cdi-cri", True),
        (_containerd("2.1.4", OURS, enableCDI=True), True, "cdi-cri", True),
        (_containerd("1.7.24", OURS, enableCDI=False), False, "envvar", True),
        (_containerd("1.7.24", OURS, enableCDI=False), True, "volume-mounts", True),
        (_containerd("1.6.20~ds1", OURS), False, "envvar", True),
        (_containerd("1.6.20", "/usr/bin/nvidia-container-runtime.cdi"), False, "envvar", True),
        # A field that this version does not have.
        (_containerd("1.6.20", enableCDI=True), False, "envvar", False),
        (_containerd("1.6.20", "/usr/bin/crun"), False, "envvar", False),
        (engine.engine_of("cri-o", "1.31.0", {}), False, "cdi-cri", True),
        (engine.engine_of("cri-o", "1.26.3", {}), False, "cdi-annotations", True),
        (engine.engine_of("docker", "27.0.1", {}), False, "envvar", False),
        (engine.engine_of("containerd", "weird", {"enableCDI": True}), False, "envvar", False),
        (None, True, "envvar", False),
    ],
)
def test_the_way_that_arrives(
    of: Engine | None,
    accepts_mounts: bool,
    strategy: str,
    works: bool,
) -> None:
    """CDI by the CRI, annotations, mounts, environment, in this order."""
    choice = engine.choose(of, accepts_mounts=accepts_mounts)
    assert (choice.strategies, choice.works) == ((strategy,), works)


@pytest.mark.parametrize(
    ("of", "strategies", "count"),
    [
        (_containerd("1.6.20", enableCDI=True), ("cdi-cri", "cdi-annotations"), 2),
        (_containerd("1.7.24", enableCDI=False), ("cdi-cri", "envvar"), 1),
        (_containerd("1.7.24", enableCDI=True), ("cdi-cri", "cdi-annotations"), 0),
        (_containerd("1.6.20", OURS), ("cdi-annotations",), 0),
        (_containerd("1.6.20", OURS), ("cdi-cri",), 1),
        (_containerd("1.6.20"), ("envvar", "volume-mounts"), 0),
    ],
)
def test_a_way_that_cannot_work_is_named(
    of: Engine, strategies: tuple[str, ...], count: int
) -> None:
    """Pods would run without their GPUs, and nobody would say why."""
    sentences = engine.problems(strategies, of)
    assert len(sentences) == count
    assert all("pods start without their GPUs" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    "config",
    [
        {"containerd": 1},
        {"containerd": {"runtimes": {"a": 1, "b": {"options": []}}}},
        {"enableCDI": "yes"},
    ],
)
def test_a_config_of_another_form_is_not_an_error(config: dict[str, Any]) -> None:
    """What an engine reports is not for programs."""
    assert engine.engine_of("containerd", "1.7.1", config) == Engine("containerd", "1.7.1")


@pytest.fixture
def socket() -> Iterator[Path]:
    """Yield a short path for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="e", dir="/tmp"))
    yield directory / "e.sock"
    shutil.rmtree(directory)


def _asked(socket: Path, config: str) -> Engine:
    """Return the engine that a CRI server on *socket* describes."""

    async def run() -> Engine:
        server = await serve_engine_text(socket, "v2.0.1", config)
        try:
            paths = engine_client.sockets_of(["/nowhere/x.sock", str(socket)])
            assert paths == [str(socket)]
            return await engine_client.ask([f"{socket}.of-another", *paths])
        finally:
            await server.stop(None)

    return asyncio.run(run())


def test_an_engine_is_asked_by_its_socket(socket: Path) -> None:
    """Of the usual sockets, the first that exists."""
    config = {
        "enableCDI": True,
        "containerd": {"runtimes": {"g": {"options": {"BinaryName": OURS}}}},
    }
    expected = Engine("containerd", "2.0.1", has_cdi=True, runtimes=(OURS,))
    assert _asked(socket, json.dumps(config)) == expected


def test_a_config_that_is_not_json_is_none(socket: Path) -> None:
    """Another engine may write it in another way."""
    assert _asked(socket, "enableCDI = true") == Engine("containerd", "2.0.1")


def test_an_engine_that_is_not_there_is_an_error(socket: Path) -> None:
    """With the option that names another socket."""
    for paths in ([], [str(socket)]):
        with pytest.raises(EngineError) as caught:
            asyncio.run(engine_client.ask(paths))
        assert "--cri-socket" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("strategies", "options", "policy", "is_lost"),
    [
        (("envvar",), {}, "static", True),
        (("cdi-cri", "volume-mounts"), {}, "static", True),
        (("cdi-cri",), {}, "static", False),
        (("envvar",), {"pass_device_specs": True}, "static", False),
        (("envvar",), {}, "none", False),
    ],
)
def test_gpus_that_an_update_of_the_container_takes(
    tmp_path: Path,
    strategies: tuple[str, ...],
    options: dict[str, Any],
    policy: str,
    is_lost: bool,
) -> None:
    """Report K21: said at start, by the kubelet's own file beside its sockets."""
    (tmp_path / "cpu_manager_state").write_text(json.dumps({"policyName": policy}))
    config = Config(
        device_list_strategy=strategies,
        kubelet_socket=f"{tmp_path}/device-plugins/kubelet.sock",
        cri_socket=f"{tmp_path}/none.sock",
        **options,
    )
    choice = DeliveryChoice(config)
    asyncio.run(choice.make())
    assert any("CPU manager is static" in problem for problem in choice.problems) == is_lost


def test_two_resources_in_one_variable() -> None:
    """Report K10: the kubelet keeps one value of a variable; other ways keep both."""
    names = ("nvidia.com/mig-2g.10gb", "nvidia.com/mig-1g.5gb")
    assert "mig-1g.5gb, nvidia.com/mig-2g.10gb sees the devices of one" in engine.overwritten(
        ("envvar",), names
    )
    assert engine.overwritten(("envvar",), names[:1]) == ""
    for strategies in (("cdi-cri",), ("volume-mounts",), ("envvar", "cdi-cri")):
        assert engine.overwritten(strategies, names) == ""
