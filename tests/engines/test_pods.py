# SPDX-License-Identifier: Apache-2.0
"""Pods as in Kubernetes: by the CRI of containerd, and by conmon as CRI-O calls it.

`runtime configure` has written the CRI config; pods name our runtime by its handler.
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
def results() -> dict[str, Any]:
    """Return the results of the containers of the CRI of containerd."""
    return seen.play("containerd", program=PODS)


@pytest.fixture(scope="module", params=["runc", "crun"])
def crio(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the results of the containers by conmon, for each low-level runtime."""
    return seen.play(f"crio-{request.param}", program=PODS)


@needs_containerd
@pytest.mark.parametrize("name", FEW)
def test_a_pod_s_container_has_the_gpus_it_asked_for_and_no_other(
    results: dict[str, Any], name: str
) -> None:
    """Device plugins set the variable."""
    seen.assert_way(results, name, WAYS[name])


@needs_containerd
def test_a_pod_s_container_asks_by_annotations(results: dict[str, Any]) -> None:
    """This containerd does not support CDI: it passes on the annotations in its config."""
    container = seen.Seen.parse(results["annotated"]["asked"])
    seen.assert_granted(container, {1, 3}, results["host"])
    seen.assert_driver(container)


@needs_containerd
def test_another_annotation_asks_for_nothing(results: dict[str, Any]) -> None:
    """The control: the value alone is no request."""
    seen.assert_no_gpu(seen.Seen.parse(results["annotated"]["other"]))


@needs_containerd
def test_two_containers_of_one_pod_have_each_its_own(results: dict[str, Any]) -> None:
    """Each container of a pod makes its own request."""
    for name, gpus in (("first", {1, 3}), ("second", {0})):
        each = seen.Seen.parse(results["life"][name])
        seen.assert_granted(each, gpus, results["host"])
        seen.assert_driver(each)


@needs_containerd
def test_the_sandbox_of_a_pod_is_left_as_it_is(results: dict[str, Any]) -> None:
    """Our runtime also creates its pause container."""
    sandbox = results["life"]["sandbox"]
    assert sandbox["annotations"]["io.kubernetes.cri.container-type"] == "sandbox"
    # The pod uses the network of the node: the sandbox has no network namespace.
    assert "network" not in {each["type"] for each in sandbox["linux"]["namespaces"]}
    assert "hooks" not in sandbox
    assert "nvidia" not in json.dumps(sandbox)


@needs_containerd
def test_a_command_in_a_pod_s_container_lists_its_nodes(results: dict[str, Any]) -> None:
    """As `kubectl exec` shows them."""
    names = {name for name in results["life"]["listed"].split() if name.startswith("nvidia")}
    control = {path.removeprefix("/dev/") for path in seen.CONTROL_NODES}
    assert names == control | {"nvidia1", "nvidia3"}


@needs_containerd
def test_new_limits_take_no_gpu_away(results: dict[str, Any]) -> None:
    """A kubelet with a CPU manager changes each container after its start."""
    assert results["life"]["after"] == results["life"]["first"]


@needs_containerd
def test_a_kubelet_hears_why_a_container_has_not_started(results: dict[str, Any]) -> None:
    """The user finds the error only in the events of the pod."""
    assert_refused(results["refused"])


@needs_conmon
@pytest.mark.parametrize("name", FEW)
def test_a_container_made_by_conmon_has_the_gpus_it_asked_for_and_no_other(
    crio: dict[str, Any], name: str
) -> None:
    """As by CRI-O, whose own hooks remain: one mounts /proc/driver."""
    seen.assert_way(crio, name, WAYS[name], proc_driver=True)


@needs_conmon
def test_conmon_tells_cri_o_why_a_container_was_not_made(crio: dict[str, Any]) -> None:
    """By the pipe that otherwise carries the PID."""
    assert_refused(crio["refused"])


def assert_refused(text: str) -> None:
    """Assert that *text* has our message and what to do."""
    assert 'device: there is no device "9"; available devices: 0, 1, ' in text.replace("\\", "")
    assert "hint: " in text
