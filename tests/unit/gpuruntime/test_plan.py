# SPDX-License-Identifier: Apache-2.0
"""An inventory becomes edits: what each container gets, and what each GPU adds."""

from __future__ import annotations

from typing import Any

import pytest

from cdi import generate
from cdi.errors import CdiError
from gpuruntime import plan
from gpuruntime.model import Binary, Gpu, Inventory, Library, Node
from hooks import update_container

DIRECTORY = "/usr/lib64"


def library(name: str, soname: str, dev_link: str = "") -> Library:
    """Return a library below a driver root of its own."""
    path = f"{DIRECTORY}/{name}"
    return Library(
        host_path=f"/driver{path}",
        container_path=path,
        soname=soname,
        abi="x86-64",
        dev_link=dev_link,
    )


LIBRARIES = (
    library("libcuda.so.1.2", "libcuda.so.1", "libcuda.so"),
    library("libplain.so.1.2", "libplain.so.1.2"),
)


def inventory(*gpus: tuple[Gpu, Node], **changed: Any) -> Inventory:
    """Return a small machine with *gpus*."""
    values: dict[str, Any] = {
        "driver_version": "1.2",
        "gpus": gpus,
        "control_nodes": (Node(host_path="/host/dev/ctl", container_path="/dev/ctl"),),
        "libraries": LIBRARIES,
        "binaries": (Binary(host_path="/driver/usr/bin/smi", container_path="/usr/bin/smi"),),
        "problems": (),
    }
    return Inventory(**{**values, **changed})


def gpu(index: int, minor: int) -> tuple[Gpu, Node]:
    """Return a GPU and its node."""
    path = f"/dev/nvidia{minor}"
    return (
        Gpu(index=index, uuid=f"GPU-{index}", minor=minor, name="x"),
        Node(host_path=path, container_path=path),
    )


def test_names_follow_the_index_and_nodes_the_minor() -> None:
    """The two differ on real machines: index 0 may be /dev/nvidia3."""
    named = dict(plan.devices(inventory(gpu(0, 3), gpu(1, 0))))
    assert list(named) == ["0", "GPU-0", "1", "GPU-1", "all"]
    paths = {name: [node["path"] for node in e["deviceNodes"]] for name, e in named.items()}
    assert paths["0"] == paths["GPU-0"] == ["/dev/nvidia3"]
    assert paths["all"] == ["/dev/nvidia3", "/dev/nvidia0"]


def test_no_gpu_is_no_device() -> None:
    """An `all` of nothing would start containers without a GPU."""
    assert plan.devices(inventory()) == []
    with pytest.raises(CdiError) as error:
        generate.spec("a.b/cc", plan.devices(inventory()), {})
    assert error.value.category == "no-devices"


def test_host_paths_are_there_where_they_differ() -> None:
    """Mounts always need a source; nodes only one that is elsewhere."""
    edits = plan.common_edits(inventory(gpu(0, 0)), "/bin/gpu-cdi-hook")
    assert edits["deviceNodes"] == [
        {"path": "/dev/ctl", "hostPath": "/host/dev/ctl", "permissions": "rw"}
    ]
    assert [(m["hostPath"], m["containerPath"]) for m in edits["mounts"]] == [
        ("/driver/usr/bin/smi", "/usr/bin/smi"),
        ("/driver/usr/lib64/libcuda.so.1.2", "/usr/lib64/libcuda.so.1.2"),
        ("/driver/usr/lib64/libplain.so.1.2", "/usr/lib64/libplain.so.1.2"),
    ]
    assert all(
        m["options"] == ["ro", "nosuid", "nodev", "rbind", "rprivate"] for m in edits["mounts"]
    )


def test_links_are_the_soname_and_the_development_name() -> None:
    """None where the file has that name already."""
    assert plan.links(LIBRARIES) == [
        "libcuda.so.1.2::/usr/lib64/libcuda.so.1",
        "libcuda.so.1::/usr/lib64/libcuda.so",
    ]


def test_the_hook_understands_what_the_plan_writes() -> None:
    """Producer and consumer of the hook's arguments are two modules."""
    edits = plan.common_edits(inventory(gpu(0, 0)), "/bin/gpu-cdi-hook")
    (hook,) = edits["hooks"]
    assert hook["args"][:2] == ["gpu-cdi-hook", update_container.NAME]
    lines = [operation.describe() for operation in update_container.plan(hook["args"][2:])]
    assert lines[:2] == [
        "link /usr/lib64/libcuda.so.1 -> libcuda.so.1.2",
        "link /usr/lib64/libcuda.so -> libcuda.so.1",
    ]
    assert len(lines) == 4


def test_the_spec_is_in_canonical_order_and_of_the_lowest_version() -> None:
    """Same machine, same bytes; a newer claim only loses readers."""
    parts = (gpu(1, 1), gpu(0, 0))
    common = plan.common_edits(inventory(*parts), "/bin/gpu-cdi-hook")
    one = generate.spec("a.b/cc", plan.devices(inventory(*parts)), common)
    other = generate.spec("a.b/cc", plan.devices(inventory(*parts[::-1])), common)
    assert one["cdiVersion"] == "0.5.0"
    assert [d["name"] for d in one["devices"]] == ["0", "1", "GPU-0", "GPU-1", "all"]
    assert list(one["containerEdits"]) == ["env", "deviceNodes", "hooks", "mounts"]
    assert one["devices"][:4] == other["devices"][:4]
    plain = generate.spec("a.b/cc", [("x", {"env": ["A=b"]})], {})
    assert (plain["cdiVersion"], "containerEdits" in plain) == ("0.3.0", False)
