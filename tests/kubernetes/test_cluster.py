# SPDX-License-Identifier: Apache-2.0
"""Pods of a real Kubernetes get the GPUs of a simulated host, by our plugin and our runtime."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.deadline(650)]


def gpus(lines: list[str]) -> set[str]:
    """Return the device nodes of GPUs among what a pod sees."""
    return {line for line in lines if re.fullmatch(r"/dev/nvidia[0-9]+", line)}


def test_a_pod_gets_exactly_the_gpus_that_it_asks_for(results: dict[str, Any]) -> None:
    """Two of four, by the variable of the plugin and our OCI runtime."""
    assert len(gpus(results["life"]["two"])) == 2


def test_the_node_has_labels_and_the_metrics_name_the_pod(results: dict[str, Any]) -> None:
    """The real API server accepts the labels, and the real kubelet lists the pod's devices."""
    observed = results["life"]["observed"]
    assert observed["labels"]["nvidia.com/gpu.count"] == "4"
    assert observed["labels"]["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    # Labels of others stay.
    assert observed["labels"]["kubernetes.io/hostname"] == "one"
    of_pod = {
        sample.labels["device"]
        for family in text_string_to_metric_families(observed["metrics"])
        for sample in family.samples
        if sample.name == "DCGM_FI_DEV_GPU_TEMP" and sample.labels.get("pod") == "two"
    }
    assert {f"/dev/{device}" for device in of_pod} == gpus(results["life"]["two"])
    assert "gpu_node_pod_mapping_up 1.0" in observed["metrics"]
    validation = observed["validation"]
    assert [(item["name"], item["status"]) for item in validation["components"]] == [
        ("plugin", "ok"),
        ("dra", "ok"),
    ]


def test_a_restart_of_the_kubelet_takes_no_gpu_from_a_pod(results: dict[str, Any]) -> None:
    """The kubelet removes the plugin's socket; the other pod gets the other two GPUs."""
    life = results["life"]
    assert life["registrations"] == 1
    assert life["two after restart"] == "Running"
    assert gpus(life["others"]) == {f"/dev/nvidia{n}" for n in range(4)} - gpus(life["two"])


def test_a_sick_gpu_is_offered_again_after_a_quiet_time(results: dict[str, Any]) -> None:
    """The node had one GPU less meanwhile, and the plugin was not restarted."""
    assert results["life"]["back after"] > 0


def test_pods_share_a_gpu_by_the_config_that_the_label_names(results: dict[str, Any]) -> None:
    """Two pods have a unit each of the GPU that is shared; one that asks for none has none.

    Not even if it names all GPUs: the runtime accepts what the plugin mounts only.
    """
    shared = results["shared"]
    assert gpus(shared["one"]) == gpus(shared["other"]) == {"/dev/nvidia0"}
    assert gpus(shared["none"]) == set()
    assert len(gpus(shared["all"])) == 4


def test_a_container_with_mps_has_the_pipe_and_the_memory_of_its_daemon(
    results: dict[str, Any],
) -> None:
    """And its own GPU; the label had another config before."""
    mps = results["shared"]["mps"]
    pipe = "/mps/nvidia.com/gpu.mps/pipe"
    assert f"CUDA_MPS_PIPE_DIRECTORY={pipe}" in mps
    assert pipe in mps
    assert mps[mps.index("/dev/shm") - 1] == "shm"
    assert gpus(mps) == {"/dev/nvidia1"}


def test_the_text_of_a_refused_allocation_is_in_the_status_of_the_pod(
    results: dict[str, Any],
) -> None:
    """It is all that the user sees."""
    assert results["shared"]["reason"] == "UnexpectedAdmissionError"
    assert "failRequestsGreaterThanOne" in results["shared"]["message"]


def test_the_plugin_works_in_a_pod_of_a_daemon_set(results: dict[str, Any]) -> None:
    """With the same result for another pod."""
    assert len(gpus(results["in_pod"]["one"])) == 1


def test_the_manager_of_mig_follows_its_label(results: dict[str, Any]) -> None:
    """The API server accepts its labels and events; the operand is as before."""
    states, events = results["partitioned"]["states"], results["partitioned"]["events"]
    assert states == {"small": ["success", "yes"], "disabled": ["success", "yes"]}
    assert events.count("MigOperandsPaused") == events.count("MigConfigApplied") == 2
