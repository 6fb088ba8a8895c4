# SPDX-License-Identifier: Apache-2.0
"""What `gpuruntime doctor` reports of a Kubernetes node: each fault with one action."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hosts_at_fault import Host

from gpuruntime.cli.checks import kubernetes_checks
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Finding, combine

PLUGINS = "/var/lib/kubelet/device-plugins"
REGISTRY = "/var/lib/kubelet/plugins_registry"
CONFIG = "/etc/containerd/config.toml"
RUNTIMES = 'plugins."io.containerd.grpc.v1.cri".containerd.runtimes'
Change = Callable[[Host], object]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Return a node in order, with a kubelet and containerd."""
    host = Host(tmp_path / "host")
    host.file(f"{PLUGINS}/kubelet_internal_checkpoint", "{}")
    host.process(100, "/usr/bin/kubelet", "--config=/etc/kubelet.yaml")
    host.file(CONFIG, 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n')
    host.file("/etc/containerd/conf.d/99-gpuruntime.toml", "version = 2\n")
    return host


def result(host: Host, check: str) -> Finding:
    """Return the finding of *check* on *host*."""
    function = getattr(kubernetes_checks, check)
    return combine(check, function(ExaminedMachine(str(host.path))))


def ours(host: Host, service: str = "device-plugin") -> None:
    """Run a service of ours, a script, which the kernel names after its file."""
    host.process(200, "/usr/bin/python3.11", "-ISB", "/usr/bin/gpu-node", service)
    host.file("/proc/200/comm", "gpu-node\n")


def two_plugins(host: Host) -> None:
    """Run ours and the incumbent's."""
    ours(host)
    host.process(201, "nvidia-device-plugin")


def plugin_and_dra(host: Host) -> None:
    """Run our device plugin, and register a DRA driver."""
    ours(host)
    host.file(f"{REGISTRY}/gpu.nvidia.com-1a2b-reg.sock", "")


def dra(host: Host) -> None:
    """Register a DRA driver."""
    host.file(f"{REGISTRY}/gpu.nvidia.com-1a2b-reg.sock", "")


def dra_without_cdi(host: Host) -> None:
    """Have a DRA driver, and an engine whose config switches CDI off."""
    dra(host)
    host.file(CONFIG, 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = false\n')


def dra_with_old_engine(host: Host) -> None:
    """Have a DRA driver, and an engine that does not know CDI names of the kubelet."""
    dra(host)
    host.package("containerd", "1.6.20~ds1-1")


def other_directory(host: Host) -> None:
    """Run a kubelet with another directory."""
    host.process(100, "/usr/bin/kubelet", "--root-dir=/data/kubelet")
    host.file("/data/kubelet/device-plugins/kubelet.sock", "")


def k3s_argument(host: Host) -> None:
    """Run k3s with another directory of its kubelet."""
    host.process(100, "/usr/local/bin/k3s", "server", "--kubelet-arg=root-dir=/data/kubelet")
    host.file("/data/kubelet/device-plugins/kubelet.sock", "")


def not_imported(host: Host) -> None:
    """Have a config without imports."""
    host.file(CONFIG, "version = 2\n")


def runtime_gone(host: Host) -> None:
    """Have the operator's runtime in the config, and not on the node."""
    program = "/usr/local/nvidia/toolkit/nvidia-container-runtime"
    host.file(
        CONFIG,
        f"version = 2\n[{RUNTIMES}.nvidia]\nruntime_type = 'io.containerd.runc.v2'\n"
        f'[{RUNTIMES}.nvidia.options]\nBinaryName = "{program}"\n',
    )


def toolkit_left(host: Host) -> None:
    """Have the operator's programs without its containers."""
    host.file("/usr/local/nvidia/toolkit/nvidia-ctk", "", 0o755)


def ready_left(host: Host) -> None:
    """Have a ready file without a driver."""
    host.remove("/proc/driver/nvidia/version")
    host.file("/run/nvidia/validations/driver-ready", "")


FAULTS: dict[str, tuple[str, Change, str, str, str]] = {
    "two device plugins": ("offers", two_plugins, "fail", "2 device plugins run", "but one"),
    "plugin and DRA": ("offers", plugin_and_dra, "fail", "two pods can get one GPU", "keep one"),
    "CDI is off": ("offers", dra_without_cdi, "fail", "CDI is off in containerd", "--cdi.enabled"),
    "old engine": ("offers", dra_with_old_engine, "fail", "containerd 1.6.20", "1.7 or newer"),
    "kubelet directory": ("directory", other_directory, "warn", "/data/kubelet", "volumes"),
    "directory of k3s": ("directory", k3s_argument, "warn", "/data/kubelet", "volumes"),
    "drop-in ignored": ("drop_ins", not_imported, "fail", "does not import", "runtime configure"),
    "runtime gone": ("operator", runtime_gone, "fail", 'the runtime "nvidia"', 'remove "nvidia"'),
    "toolkit left": ("operator", toolkit_left, "warn", "is left of the GPU operator", "rm -r"),
    "ready file left": ("operator", ready_left, "warn", "is left of a validation", "rm /run"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_with_its_action(host: Host, fault: str) -> None:
    """And the node without it is in order."""
    check, change, status, sentence, action = FAULTS[fault]
    before = result(host, check)
    assert before.status == "ok", before
    change(host)
    finding = result(host, check)
    assert finding.status == status, finding
    assert sentence in finding.what
    assert action in finding.action


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dra, "offered by the DRA driver"),
        (ours, "offered by gpu-node device-plugin"),
        (lambda host: host.process(200, "nvidia-device-plugin"), "offered by nvidia-device"),
        (lambda host: host.at("/var/lib/kubelet").rename(host.at("/old")), "no kubelet"),
        (lambda host: ours(host, "exporter"), "no device plugin runs"),
    ],
)
def test_one_program_that_offers_the_gpus_is_in_order(
    host: Host, change: Change, sentence: str
) -> None:
    """It is named, so that the report says which one it is."""
    host.package("containerd", "1.7.20-1")
    change(host)
    finding = result(host, "offers")
    assert finding.status == "ok", finding
    assert sentence in finding.what


def test_what_the_operator_still_manages_is_not_left_over(host: Host) -> None:
    """Its toolkit container runs."""
    toolkit_left(host)
    host.process(300, "nvidia-ctk-installer")
    assert result(host, "operator").status == "ok"
