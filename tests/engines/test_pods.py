# SPDX-License-Identifier: Apache-2.0
"""Pods as Kubernetes has them: by containerd's FEW, and by conmon as CRI-O calls it.

The CRI's config is one that `runtime configure` has made; pods name our runtime by its handler.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from containers import seen
from containers.ways import FEW, WAYS

PODS = seen.HERE / "pods.py"
needs_containerd = pytest.mark.engine("containerd", "ctr", "runc")
needs_conmon = pytest.mark.engine("conmon", "runc", "crun")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what the containers of containerd's CRI were."""
    return seen.play("containerd", program=PODS)


@pytest.fixture(scope="module", params=["runc", "crun"])
def crio(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return what the containers were that conmon made, by low-level runtime."""
    return seen.play(f"crio-{request.param}", program=PODS)


@needs_containerd
@pytest.mark.parametrize("name", FEW)
def test_a_pod_s_container_has_the_gpus_it_asked_for_and_no_other(
    found: dict[str, Any], name: str
) -> None:
    """Device plugins set the variable."""
    seen.assert_way(found, name, WAYS[name])


@needs_containerd
def test_a_pod_s_container_asks_by_annotations(found: dict[str, Any]) -> None:
    """This containerd knows nothing of CDI: it hands on what its config lists."""
    asked = seen.Seen.parse(found["annotated"]["asked"])
    seen.assert_granted(asked, {1, 3}, found["host"])
    seen.assert_driver(asked)


@needs_containerd
def test_another_annotation_asks_for_nothing(found: dict[str, Any]) -> None:
    """The control: the value alone is no request."""
    seen.assert_no_gpu(seen.Seen.parse(found["annotated"]["other"]))


@needs_containerd
def test_two_containers_of_one_pod_have_each_its_own(found: dict[str, Any]) -> None:
    """What a pod asks for is asked for by container."""
    for name, gpus in (("first", {1, 3}), ("second", {0})):
        each = seen.Seen.parse(found["life"][name])
        seen.assert_granted(each, gpus, found["host"])
        seen.assert_driver(each)


@needs_containerd
def test_the_sandbox_of_a_pod_is_left_as_it_is(found: dict[str, Any]) -> None:
    """Its pause container comes through our runtime as well."""
    sandbox = found["life"]["sandbox"]
    assert sandbox["annotations"]["io.kubernetes.cri.container-type"] == "sandbox"
    # The node's network is nothing that the sandbox has to hold.
    assert "network" not in {each["type"] for each in sandbox["linux"]["namespaces"]}
    assert "hooks" not in sandbox
    assert "nvidia" not in json.dumps(sandbox)


@needs_containerd
def test_a_command_in_a_pod_s_container_lists_its_nodes(found: dict[str, Any]) -> None:
    """As `kubectl exec` shows them."""
    names = {name for name in found["life"]["listed"].split() if name.startswith("nvidia")}
    control = {path.removeprefix("/dev/") for path in seen.CONTROL_NODES}
    assert names == control | {"nvidia1", "nvidia3"}


@needs_containerd
def test_new_limits_take_no_gpu_away(found: dict[str, Any]) -> None:
    """A kubelet with a CPU manager changes each container after its start."""
    assert found["life"]["after"] == found["life"]["first"]


@needs_containerd
def test_a_kubelet_hears_why_a_container_has_not_started(found: dict[str, Any]) -> None:
    """It is in the events of the pod, and nowhere else that a user looks."""
    assert_refused(found["refused"])


@needs_conmon
@pytest.mark.parametrize("name", FEW)
def test_a_container_made_by_conmon_has_the_gpus_it_asked_for_and_no_other(
    crio: dict[str, Any], name: str
) -> None:
    """Under CRI-O, whose own hooks stay: one shows /proc/driver."""
    seen.assert_way(crio, name, WAYS[name], proc_driver=True)


@needs_conmon
def test_conmon_tells_cri_o_why_a_container_was_not_made(crio: dict[str, Any]) -> None:
    """By the pipe on which it else tells the number of the process."""
    assert_refused(crio["refused"])


def assert_refused(text: str) -> None:
    """Assert that *text* has our message and what to do."""
    assert 'device: there is no device "9"; available devices: 0, 1, ' in text.replace("\\", "")
    assert "hint: " in text
