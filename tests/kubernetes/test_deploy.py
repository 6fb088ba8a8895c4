# SPDX-License-Identifier: Apache-2.0
"""A real API server takes the manifests of `deploy/`, and refuses their accounts all else."""

from __future__ import annotations

import re
from typing import Any

import pytest

# The one attempt that succeeds, of one account in a pod.
ALLOWED = "label of ours"
# Attempts that the rights on nodes allow, and the policy refuses, with its words.
POLICY = {
    "label of another node": "node of its own pod only",
    "label of others": "labels of nvidia.com only",
    "label removed": "labels of nvidia.com only",
    "annotation": "nothing but labels",
    "finalizer": "nothing but labels",
    "unschedulable": "nothing but labels",
}
pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.deadline(650)]


@pytest.fixture(scope="module")
def life(results: dict[str, Any]) -> dict[str, Any]:
    """Return the life of the node with the image."""
    life: dict[str, Any] = results["deployed"]
    return life


def test_the_server_takes_every_folder(results: dict[str, Any]) -> None:
    """By a dry run, which checks fields, rules of admission and expressions."""
    assert len(results["apply"]) > 5
    assert set(results["apply"].values()) == {""}


@pytest.mark.parametrize("account", ["device-plugin", "exporter"])
def test_an_account_without_rights_is_refused_all(results: dict[str, Any], account: str) -> None:
    """Even the label of its own node."""
    for name, answer in results["rights"][account].items():
        assert answer.startswith("403: "), name


def test_feature_discovery_may_set_our_labels_of_its_own_node(results: dict[str, Any]) -> None:
    """The control of the test below, and the service itself with this account."""
    assert results["rights"]["feature-discovery"][ALLOWED] == ""
    assert results["rights"]["labels"]["nvidia.com/gpu.count"] == "4"


def test_feature_discovery_is_refused_all_else(results: dict[str, Any]) -> None:
    """By its rights, or by the policy where rights cannot say it."""
    answers = results["rights"]["feature-discovery"]
    for name in answers.keys() - {ALLOWED}:
        assert answers[name].startswith(("403: ", "422: ")), name
        assert POLICY.get(name, "cannot") in answers[name], name


def test_a_token_without_a_pod_has_no_node(results: dict[str, Any]) -> None:
    """Such as one that was made by hand."""
    assert POLICY["label of another node"] in results["rights"]["without a pod"][ALLOWED]


def test_nothing_remains_after_the_folder_was_deleted(results: dict[str, Any]) -> None:
    """In the API server; labels of nodes are removed by a command of the documents."""
    assert results["removal"] == []


@pytest.mark.image
def test_a_node_gets_everything_from_one_folder(life: dict[str, Any]) -> None:
    """The runtime, labels, units, and a pod with one GPU that the metrics name."""
    installation = life["installation"]
    assert "installed version " in installation["log"]
    assert installation["labels"]["nvidia.com/gpu.count"] == "4"
    assert len(installation["first"]) == 1
    assert f'device="{installation["first"][0].removeprefix("/dev/")}"' in "".join(
        line for line in installation["metrics"].splitlines() if 'pod="first"' in line
    )


@pytest.mark.image
def test_restarts_take_no_gpu_from_a_pod(life: dict[str, Any]) -> None:
    """Of the engine and of the kubelet; the next pod gets another GPU."""
    assert life["restarts"]["first"] == "Running"
    assert len(life["restarts"]["second"]) == 1
    assert life["restarts"]["second"] != life["installation"]["first"]


@pytest.mark.image
def test_an_upgrade_disturbs_no_pod(life: dict[str, Any]) -> None:
    """The second version is in force for the next pod."""
    upgrade = life["upgrade"]
    assert upgrade["before"] != upgrade["after"]
    assert upgrade["first"] == "Running"
    assert len(upgrade["third"]) == 1
    assert upgrade["third"] != life["installation"]["first"]


@pytest.mark.image
def test_a_label_partitions_the_gpus(life: dict[str, Any]) -> None:
    """A pod gets a MIG device with its two capabilities; labels and metrics follow."""
    mig = life["partitioned"]
    *capabilities, gpu = mig["small"]
    assert re.fullmatch("/dev/nvidia[0-3]", gpu)
    assert len(capabilities) == 2
    assert all(path.startswith("/dev/nvidia-caps/nvidia-cap") for path in capabilities)
    assert mig["labels"]["nvidia.com/mig-1g.10gb.count"] == "28"
    assert mig["labels"]["nvidia.com/mig.config.state"] == "success"
    of_pod = [line for line in mig["metrics"].splitlines() if 'pod="small"' in line]
    assert all('GPU_I_PROFILE="1g.10gb"' in line for line in of_pod)
    assert of_pod


@pytest.mark.image
def test_one_daemon_set_has_all_services(life: dict[str, Any]) -> None:
    """A pod gets a GPU and is in the metrics; a label that was removed is there again."""
    assert len(life["agent"]["pod"]) == 1
    assert life["agent"]["labels"]["nvidia.com/gpu.count"] == "4"


@pytest.mark.image
def test_a_client_of_mps_shares_memory_with_the_daemon(life: dict[str, Any]) -> None:
    """The daemon is in a pod too; the client has the pipe of its resource."""
    pipe = "/mps/nvidia.com/gpu/pipe"
    variable, control = life["mps"]["client"]
    assert (variable, control) == (f"CUDA_MPS_PIPE_DIRECTORY={pipe}", f"{pipe}/control")
    assert life["mps"]["memory"] == ["of-client"]


@pytest.mark.image
def test_the_files_of_the_node_are_as_they_were(life: dict[str, Any]) -> None:
    """The uninstaller restores the config byte for byte, and removes all that was created."""
    assert "removed" in life["rest"]["log"]
    assert life["rest"]["files"] == []
