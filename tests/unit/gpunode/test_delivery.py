# SPDX-License-Identifier: Apache-2.0
"""What a container gets by each strategy, and the CDI specs that its names are in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from effort import tries
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nodes import gpu, inventory, mig_uuid, model, uuid

from cdi import registry, yamlio
from gpunode import delivery, devices, plugin_spec
from gpunode.config import file as files
from gpunode.config.effective import Config, OptionText, effective
from gpunode.delivery import Delivery
from gpunode.devices import Resource
from gpunode.kubelet.backend import AllocationError, ContainerResponse, DeviceSpec, Mount
from gpunode.model import NodeModel
from gpunode.plugin_spec import Names, Roots
from gpuruntime.errors import SpecError
from gpuruntime.model import Driver, File, Inventory, Node

UNIQUE = "00000000-0000-4000-8000-000000000001"
WHOLE = model(gpu(0), gpu(1))
PARTS = model(gpu(0, mig=["1g.5gb", "1g.5gb"]))
SHARED = (
    "{timeSlicing: {failRequestsGreaterThanOne: false, resources: [{name: gpu, replicas: 300}]}}"
)
MPS = "{mps: {resources: [{name: gpu, replicas: 2}]}}"


def _config(sharing: str = "", **options: str) -> Config:
    text = f"sharing: {sharing}" if sharing else ""
    options_by_name = {name: OptionText(value, name) for name, value in options.items()}
    return effective(options_by_name, files.parse(text, "c.yaml"))


def _delivery(node: NodeModel, config: Config) -> Delivery:
    assert node.inventory is not None
    names = plugin_spec.names_of(node.inventory, config)
    return Delivery(config, config.device_list_strategy, names, node.inventory)


def _resource(node: NodeModel, config: Config) -> Resource:
    (resource,) = devices.offer(node, config).resources
    return resource


def _response(
    ids: Sequence[str], node: NodeModel = WHOLE, sharing: str = "", **options: str
) -> ContainerResponse:
    config = _config(sharing, **options)
    return delivery.response(_resource(node, config), ids, _delivery(node, config), UNIQUE)


def _null(name: str) -> Mount:
    return Mount(f"/var/run/nvidia-container-devices/{name}", "/dev/null")


def _cdi(name: str) -> str:
    return f"k8s.device-plugin.nvidia.com/{name}"


KEY = f"cdi.k8s.io/nvidia-device-plugin_{UNIQUE}"
CONTROL = [
    DeviceSpec(f"/dev/{name}", f"/dev/{name}")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
]
BOTH = f"{uuid(0)},{uuid(1)}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ContainerResponse(envs={"NVIDIA_VISIBLE_DEVICES": BOTH})),
        (
            {"device_id_strategy": "index"},
            ContainerResponse(envs={"NVIDIA_VISIBLE_DEVICES": "0,1"}),
        ),
        (
            {"imex_channel_ids": "0"},
            ContainerResponse(envs={"NVIDIA_VISIBLE_DEVICES": BOTH, "NVIDIA_IMEX_CHANNELS": "0"}),
        ),
        (
            {"device_list_strategy": "volume-mounts", "imex_channel_ids": "0"},
            ContainerResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
                mounts=(_null(uuid(0)), _null(uuid(1)), _null("imex/0")),
            ),
        ),
        (
            {"device_list_strategy": "envvar,volume-mounts", "device_id_strategy": "index"},
            ContainerResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
                mounts=(_null("0"), _null("1")),
            ),
        ),
        (
            {"device_list_strategy": "cdi-annotations", "imex_channel_ids": "0"},
            ContainerResponse(
                annotations={
                    KEY: f"{_cdi(f'gpu={uuid(0)}')},{_cdi(f'gpu={uuid(1)}')},"
                    f"{_cdi('imex-channel=0')}"
                }
            ),
        ),
        (
            {"device_list_strategy": "cdi-cri", "device_id_strategy": "index"},
            ContainerResponse(cdi_devices=(_cdi("gpu=0"), _cdi("gpu=1"))),
        ),
        (
            {
                "device_list_strategy": "cdi-cri,cdi-annotations",
                "cdi_annotation_prefix": "a.b/",
                "pass_device_specs": "true",
                "gds_enabled": "true",
            },
            ContainerResponse(
                annotations={
                    f"a.b/nvidia-device-plugin_{UNIQUE}": f"{_cdi(f'gpu={uuid(0)}')},"
                    f"{_cdi(f'gpu={uuid(1)}')}"
                },
                cdi_devices=(_cdi(f"gpu={uuid(0)}"), _cdi(f"gpu={uuid(1)}")),
            ),
        ),
        (
            {"device_list_strategy": "envvar,cdi-cri"},
            ContainerResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": BOTH},
                cdi_devices=(_cdi(f"gpu={uuid(0)}"), _cdi(f"gpu={uuid(1)}")),
            ),
        ),
        (
            {"pass_device_specs": "true"},
            ContainerResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": BOTH},
                devices=(
                    *CONTROL,
                    DeviceSpec("/dev/nvidia0", "/dev/nvidia0"),
                    DeviceSpec("/dev/nvidia1", "/dev/nvidia1"),
                ),
            ),
        ),
        (
            {"gds_enabled": "true", "mofed_enabled": "true", "gdrcopy_enabled": "true"},
            ContainerResponse(
                envs={
                    "NVIDIA_VISIBLE_DEVICES": BOTH,
                    "NVIDIA_GDRCOPY": "enabled",
                    "NVIDIA_GDS": "enabled",
                    "NVIDIA_MOFED": "enabled",
                }
            ),
        ),
    ],
)
def test_the_response_of_each_strategy(
    options: dict[str, str], expected: ContainerResponse
) -> None:
    """The whole response, so that nothing is in it that another strategy has."""
    assert _response([uuid(0), uuid(1)], **options) == expected


def test_device_nodes_are_below_the_root_of_the_host() -> None:
    """Report 145 of the device plugin: access was lost after an update of the cgroup.

    The engine knows the nodes, so that it allows them again.
    """
    options = {"pass_device_specs": "true", "nvidia_dev_root": "/run/d", "mig_strategy": "single"}
    ids = [mig_uuid(0, 1)]
    specs = _response(ids, PARTS, **options).devices[-3:]
    assert specs == (
        DeviceSpec("/dev/nvidia0", "/run/d/dev/nvidia0"),
        DeviceSpec("/dev/nvidia-caps/nvidia-cap3", "/run/d/dev/nvidia-caps/nvidia-cap3"),
        DeviceSpec("/dev/nvidia-caps/nvidia-cap4", "/run/d/dev/nvidia-caps/nvidia-cap4"),
    )


def test_control_nodes_that_do_not_exist_are_left_out() -> None:
    """A container with a node that the host lacks would not start."""
    config = _config(pass_device_specs="true")
    given_inventory = inventory(*WHOLE.gpus, control=["nvidiactl", "nvidia-uvm"])
    way = Delivery(config, ("envvar",), Names(), given_inventory)
    specs = delivery.response(_resource(WHOLE, config), [uuid(0)], way, UNIQUE).devices
    paths = [spec.container_path for spec in specs]
    assert paths == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]


def test_300_shares_of_a_gpu_are_one_device() -> None:
    """Report 1432 of the device plugin: the environment had 300 equal ids, and was too long."""
    ids = [f"{uuid(0)}::{i}" for i in range(300)]
    options = {"device_list_strategy": "envvar,cdi-cri,volume-mounts"}
    assert _response(ids, sharing=SHARED, **options) == ContainerResponse(
        envs={"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
        mounts=(_null(uuid(0)),),
        cdi_devices=(_cdi(f"gpu={uuid(0)}"),),
    )


def test_a_container_with_mps_sees_its_own_gpu_only() -> None:
    """Report 1299 of the device plugin: it saw all GPUs of the daemon."""
    options = {"mps_root": "/run/nvidia/mps", "device_list_strategy": "cdi-cri"}
    response = _response([f"{uuid(0)}::1"], sharing=MPS, **options)
    assert response == ContainerResponse(
        envs={
            "CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe",
            "CUDA_VISIBLE_DEVICES": uuid(0),
        },
        mounts=(
            Mount("/mps/nvidia.com/gpu/pipe", "/run/nvidia/mps/nvidia.com/gpu/pipe", False),
            Mount("/dev/shm", "/run/nvidia/mps/shm", False),
        ),
        cdi_devices=(_cdi(f"gpu={uuid(0)}"),),
    )


@pytest.mark.parametrize("strategy", ["cdi-cri", "cdi-annotations", "volume-mounts"])
def test_two_resources_of_a_container_do_not_overwrite_each_other(strategy: str) -> None:
    """Report 728 of the device plugin: of two MIG profiles, one was visible.

    The kubelet asks for each resource, and keeps one value of each key.
    """
    node = model(gpu(0, mig=["1g.5gb", "2g.10gb"]))
    config = _config(mig_strategy="mixed", device_list_strategy=strategy)
    responses = [
        delivery.response(
            resource, [unit.id for unit in resource.units], _delivery(node, config), key
        )
        for resource, key in zip(devices.offer(node, config).resources, "ab", strict=True)
    ]
    names = {name for response in responses for name in response.cdi_devices}
    annotations = {key: 1 for response in responses for key in response.annotations}
    mounts = {mount.container_path for response in responses for mount in response.mounts}
    assert [len(found) for found in (names, annotations, mounts) if found] == [2]
    variables = [response.envs for response in responses]
    assert variables[0] == variables[1]


ONE_SHARE = SHARED.replace("failRequestsGreaterThanOne: false, ", "")


@pytest.mark.parametrize(
    ("ids", "sharing", "options", "parts"),
    [
        (["GPU-x"], "", {}, ["unknown device: GPU-x", "create the pod again"]),
        (["x" * 9999], "", {}, [f"unknown device: {'x' * 64}..."]),
        (
            [f"{uuid(0)}::0", f"{uuid(1)}::0"],
            ONE_SHARE,
            {},
            [
                "maximum request size for shared resources is 1; found 2",
                '"sharing.timeSlicing.failRequestsGreaterThanOne: false"',
            ],
        ),
        (
            [f"{uuid(0)}::0", f"{uuid(0)}::1"],
            MPS,
            {"mps_root": "/mps"},
            ["found 2", '"sharing.mps.failRequestsGreaterThanOne: false"'],
        ),
    ],
)
def test_texts_of_refusals(
    ids: list[str], sharing: str, options: dict[str, str], parts: list[str]
) -> None:
    """Report 929 of the device plugin: the text reaches the pod's status, and must help there."""
    with pytest.raises(AllocationError) as caught:
        _response(ids, sharing=sharing, **options)
    text = str(caught.value)
    assert text.startswith('invalid allocation request for "nvidia.com/gpu": ')
    assert [part for part in parts if part not in text] == []
    assert "\n" not in text
    assert len(text) < 400


def test_devices_that_are_not_shared_may_be_several() -> None:
    """With "devices" only some GPUs are shared; a request of whole ones is not refused."""
    sharing = "{timeSlicing: {resources: [{name: gpu, devices: [1], replicas: 2}]}}"
    node = model(gpu(0), gpu(1), gpu(2))
    assert _response([uuid(0), uuid(2)], node, sharing).envs
    with pytest.raises(AllocationError, match="found 2"):
        _response([uuid(0), f"{uuid(1)}::0"], node, sharing)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (Delivery(_config(), ("cdi-cri",), Names()), "has no CDI name"),
        (
            Delivery(_config(pass_device_specs="true"), ("envvar",), Names()),
            "device nodes are not known yet",
        ),
        (
            Delivery(_config(pass_device_specs="true"), ("envvar",), Names(), inventory()),
            "device nodes of GPU-00000000",
        ),
        (
            Delivery(_config(imex_channel_ids="0", imex_required="true"), ("envvar",), Names()),
            "IMEX channel 0 does not exist",
        ),
    ],
)
def test_what_cannot_be_delivered_is_refused(way: Delivery, expected: str) -> None:
    """A pod that runs without its GPU is worse than one that is refused."""
    with pytest.raises(AllocationError, match=expected):
        delivery.response(_resource(WHOLE, Config()), [uuid(0)], way, UNIQUE)


def test_an_imex_channel_that_is_missing_is_left_out_if_not_required() -> None:
    """The incumbent names it all the same, and no engine resolves the name."""
    config = _config(imex_channel_ids="0", device_list_strategy="cdi-cri")
    way = Delivery(config, ("cdi-cri",), Names({uuid(0): uuid(0)}))
    response = delivery.response(_resource(WHOLE, config), [uuid(0)], way, UNIQUE)
    assert response.cdi_devices == (_cdi(f"gpu={uuid(0)}"),)


def _written(path: Path) -> dict[str, Any]:
    return {file.name: json.loads(file.read_text()) for file in sorted(path.iterdir())}


def _write(
    source: Inventory, config: Config, directory: Path, roots: Roots | None = None
) -> list[str]:
    specs = plugin_spec.specs(source, config, roots or Roots(), "/usr/bin/gpu-cdi-hook")
    return plugin_spec.write(specs, str(directory))


def test_one_file_for_each_class(tmp_path: Path) -> None:
    """A class without devices has no file, and loses the one that it had."""
    config = _config(mig_strategy="mixed")
    node = model(gpu(0, mig=["1g.5gb"]), gpu(1))
    assert node.inventory is not None
    assert len(_write(node.inventory, config, tmp_path)) == 2
    written = _written(tmp_path)
    prefix = "k8s.device-plugin.nvidia.com"
    assert list(written) == [f"{prefix}-gpu.json", f"{prefix}-imex-channel.json"]
    spec = written[f"{prefix}-gpu.json"]
    assert spec["kind"] == f"{prefix}/gpu"
    names = [device["name"] for device in spec["devices"]]
    assert names == [uuid(0), uuid(1), mig_uuid(0, 0), "all"]
    by_name = {device["name"]: device["containerEdits"] for device in spec["devices"]}
    paths = [node["path"] for node in by_name["all"]["deviceNodes"]]
    assert paths == [
        *("/dev/nvidia0", "/dev/nvidia1"),
        *("/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"),
    ]
    # Nothing has changed: the engine need not read the files again.
    assert _write(node.inventory, config, tmp_path) == []
    node.inventory.features["imex"] = ()
    assert _write(node.inventory, config, tmp_path) == [
        str(tmp_path / f"{prefix}-imex-channel.json")
    ]
    assert list(_written(tmp_path)) == [f"{prefix}-gpu.json"]
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o644}


def test_host_paths_are_those_of_the_host(tmp_path: Path) -> None:
    """The plugin's container sees the driver below another directory than the engine."""
    seen = inventory(gpu(0), root="/driver-root")
    driver = Driver(
        version="550.54.15",
        libraries=(),
        files=(
            File(
                kind="binary",
                host_path="/driver-root/usr/bin/nvidia-smi",
                container_path="/usr/bin/nvidia-smi",
            ),
            File(kind="config", host_path="/driver-roots/x", container_path="/etc/x"),
        ),
    )
    source = Inventory(driver=driver, gpus=seen.gpus, control_nodes=seen.control_nodes)
    _write(
        source,
        Config(),
        tmp_path,
        Roots("/driver-root", "/run/nvidia/driver", "/driver-root", "/"),
    )
    (spec,) = _written(tmp_path).values()
    (node,) = spec["devices"][0]["containerEdits"]["deviceNodes"]
    assert node == {"path": "/dev/nvidia0", "permissions": "rw"}
    mounts = {
        mount["containerPath"]: mount["hostPath"] for mount in spec["containerEdits"]["mounts"]
    }
    assert mounts == {
        "/usr/bin/nvidia-smi": "/run/nvidia/driver/usr/bin/nvidia-smi",
        "/etc/x": "/driver-roots/x",
    }
    (hook,) = spec["containerEdits"]["hooks"]
    assert hook["path"] == "/usr/bin/gpu-cdi-hook"


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        ("/driver-root/a", "/driver-root", "/", "/a"),
        ("/driver-root", "/driver-root", "/", "/"),
        ("/driver-root/a", "/driver-root/", "/x/", "/x/a"),
        ("/a", "/", "/x", "/x/a"),
        ("/a", "/", "/", "/a"),
        ("/driver-rooted/a", "/driver-root", "/x", "/driver-rooted/a"),
    ],
)
def test_roots_are_replaced_by_whole_names(path: str, old: str, new: str, expected: str) -> None:
    """Only what is below the old root has another place on the host."""
    assert plugin_spec.moved(path, old, new) == expected


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """One line, with the option that names another directory."""
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="cannot write") as caught:
        _write(inventory(gpu(0)), Config(), tmp_path / "file")
    assert "--cdi-spec-dir" in str(caught.value.hint)


_GPUS = st.lists(
    st.none() | st.lists(st.sampled_from(["1g.5gb", "2g.10gb"]), max_size=3),
    min_size=1,
    max_size=4,
)


@pytest.mark.property
@settings(
    max_examples=tries(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    _GPUS,
    st.sampled_from(["none", "mixed"]),
    st.sampled_from(["uuid", "index"]),
    st.lists(st.sampled_from([*("gds", "mofed", "gdrcopy", "imex")])),
    st.data(),
)
def test_every_name_that_is_returned_resolves(
    tmp_path: Path,
    profiles: list[list[str] | None],
    mig_strategy: str,
    id_strategy: str,
    features: list[str],
    data: st.DataObject,
) -> None:
    """Reports 481 of the device plugin, 1239 and 1895 of the toolkit: names without a spec."""
    node = model(*(gpu(i, mig=mig) for i, mig in enumerate(profiles)))
    source = node.inventory
    assert source is not None
    for feature in ("gds", "mofed", "gdrcopy", "imex"):
        path = (
            "/dev/nvidia-caps-imex-channels/channel0" if feature == "imex" else f"/dev/{feature}"
        )
        nodes = (Node(host_path=path, container_path=path),)
        source.features[feature] = nodes if feature in features else ()
    config = _config(
        mig_strategy=mig_strategy,
        device_id_strategy=id_strategy,
        device_list_strategy="cdi-cri,cdi-annotations",
        imex_channel_ids="0",
        gds_enabled="true",
        mofed_enabled="true",
        gdrcopy_enabled="true",
    )
    _write(source, config, tmp_path)
    specs = registry.load([str(tmp_path)], may_trust=lambda _: True, decode_yaml=yamlio.decode_all)
    for resource in devices.offer(node, config).resources:
        ids = [unit.id for unit in resource.units]
        chosen = data.draw(st.lists(st.sampled_from(ids), unique=True, min_size=1))
        way = _delivery(node, config)
        response = delivery.response(resource, chosen, way, UNIQUE)
        assert ",".join(response.cdi_devices) in response.annotations.values()
        edits = specs.resolve(response.cdi_devices)
        assert len(edits["deviceNodes"]) >= len(chosen)
    if any(mig is None or mig for mig in profiles):
        assert specs.resolve([_cdi("gpu=all")])
