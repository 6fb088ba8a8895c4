# SPDX-License-Identifier: Apache-2.0
"""What `gpu-node validate` reports of a node, and the files that it leaves."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import driver_roots
import pytest

from gpunode.config import settings
from gpunode.engine import Engine
from gpunode.services.validation import Validation, as_json
from gpunode.validation import (
    cluster_checks,
    container_checks,
    delivery_checks,
    node_checks,
    ready_files,
)
from gpunode.validation.cluster_checks import NodeUnits
from gpunode.validation.delivery_checks import Plan
from gpunode.validation.ready_files import ReadyFileError, ReadyFiles
from gpunode.validation.trial import TrialError
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Finding, Note, combine, fail, ok

WITH_CDI = Engine("containerd", "1.7.20", has_cdi=True)
WITHOUT_CDI = Engine("containerd", "1.6.20", has_cdi=False)


class SetCluster:
    """A cluster with the amounts of the node and the devices of DRA that a test sets."""

    def __init__(
        self,
        capacity: Mapping[str, str] | None = None,
        allocatable: Mapping[str, str] | None = None,
        dra: int = 0,
        classes: Mapping[str, str] | None = None,
    ) -> None:
        self._units = NodeUnits(capacity or allocatable or {}, allocatable or {})
        self._dra = dra
        self._classes = classes or {}

    def units(self) -> NodeUnits:
        """Return the amounts."""
        return self._units

    def dra_devices(self) -> Mapping[str, int]:
        """Return the devices of our driver and another's."""
        return {"gpu.nvidia.com": self._dra, "net.example.com": 3}

    def runtime_classes(self) -> Mapping[str, str]:
        """Return the RuntimeClasses."""
        return self._classes


def tree(root: Path, files: Mapping[str, str]) -> ExaminedMachine:
    """Return a host with *files*; a path that ends with a slash is a directory."""
    for path, text in files.items():
        place = root / path
        if path.endswith("/"):
            place.mkdir(parents=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    return ExaminedMachine(str(root))


@pytest.mark.parametrize(
    ("capacity", "allocatable", "status", "sentence"),
    [
        ({}, {"nvidia.com/gpu": "2", "cpu": "8"}, "ok", "nvidia.com/gpu: 2"),
        ({}, {"nvidia.com/mig-1g.5gb": "7"}, "ok", "nvidia.com/mig-1g.5gb: 7"),
        ({}, {"nvidia.com/gpu.shared": "8"}, "ok", "nvidia.com/gpu.shared: 8"),
        ({"nvidia.com/gpu": "4"}, {"nvidia.com/gpu": "0"}, "fail", "none of the node's 4"),
        ({}, {"cpu": "8", "nvidia.com/gpu": "many"}, "fail", "offers no nvidia.com/gpu"),
        ({}, {"amd.com/gpu": "1", "nvidia.com/pgpu": "1"}, "fail", "offers no nvidia.com/gpu"),
    ],
)
def test_plugin(
    capacity: dict[str, str], allocatable: dict[str, str], status: str, sentence: str
) -> None:
    """Allocatable units count: capacity alone gives a pod nothing."""
    finding = combine("plugin", cluster_checks.plugin(SetCluster(capacity, allocatable)))
    assert finding.status == status
    assert sentence in finding.what
    assert bool(finding.action) == (status == "fail")


@pytest.mark.parametrize(
    ("classes", "runtimes", "default", "status", "sentence", "action"),
    [
        ({"gpu": "gpuruntime"}, ["gpuruntime"], "runc", "ok", "runtimeClassName: gpu", ""),
        ({}, ["gpuruntime"], "gpuruntime", "ok", "no RuntimeClass is needed", ""),
        ({}, ["gpuruntime"], "runc", "fail", "no RuntimeClass has the handler", "kubectl apply"),
        ({"gvisor": "runsc"}, ["gpuruntime"], "runc", "fail", "no RuntimeClass has", "kubectl"),
        (
            {"nvidia": "nvidia"},
            ["gpuruntime"],
            "runc",
            "fail",
            '"nvidia" is "nvidia"',
            "-name nvi",
        ),
        ({"gpu": "gpuruntime"}, [], "runc", "fail", "no runtime for GPUs", "gpu-node install"),
    ],
)
def test_runtime_class(
    classes: dict[str, str],
    runtimes: list[str],
    default: str,
    status: str,
    sentence: str,
    action: str,
) -> None:
    """A class with the handler of the engine's runtime for GPUs, or that as the default."""
    notes = cluster_checks.runtime_class(
        SetCluster(classes=classes), "containerd", runtimes, default
    )
    finding = combine("runtime-class", notes)
    assert finding.status == status
    assert sentence in finding.what
    assert action in finding.action


@pytest.mark.parametrize(
    ("units", "devices", "engine", "status", "sentence"),
    [
        ("2", 0, WITHOUT_CDI, "ok", "no DRA driver"),
        ("0", 2, WITH_CDI, "ok", "offers 2 device(s)"),
        ("0", 2, None, "ok", "offers 2 device(s)"),
        ("2", 2, WITH_CDI, "fail", "two pods can get one GPU"),
        ("0", 2, WITHOUT_CDI, "fail", "ignores the CDI names of claims"),
    ],
)
def test_dra(units: str, devices: int, engine: Engine | None, status: str, sentence: str) -> None:
    """Offered twice, a GPU has two owners; without CDI, a claim starts without it."""
    cluster = SetCluster(allocatable={"nvidia.com/gpu": units}, dra=devices)
    finding = combine("dra", cluster_checks.dra(cluster, engine))
    assert finding.status == status
    assert sentence in finding.what


@pytest.mark.parametrize(
    ("state", "plan", "status"),
    [
        ('{"policyName": "static"}', Plan((settings.ENVVAR,), "x"), "warn"),
        ('{"policyName": "static"}', Plan((settings.VOLUME_MOUNTS,), "x"), "warn"),
        ('{"policyName": "static"}', Plan((settings.CDI_CRI,), "x"), "ok"),
        ('{"policyName": "static"}', Plan((settings.ENVVAR,), "", (), True), "ok"),
        ('{"policyName": "none"}', Plan((settings.ENVVAR,), "x"), "ok"),
        ("[[[", Plan((settings.ENVVAR,), "x"), "ok"),
        ('{"policyName": 7}', Plan((settings.ENVVAR,), "x"), "ok"),
        ("", Plan((settings.CDI_CRI,), "x", ("CDI is off; switch it on",)), "fail"),
    ],
)
def test_delivery(tmp_path: Path, state: str, plan: Plan, status: str) -> None:
    """Complaint 21: what the engine does not know is lost when it updates a container."""
    machine = tree(tmp_path, {"var/lib/kubelet/cpu_manager_state": state})
    finding = combine("delivery", delivery_checks.delivery(machine, plan))
    assert finding.status == status
    if status == "fail":
        assert (finding.what, finding.action) == ("CDI is off", "switch it on")


@pytest.mark.parametrize("name", sorted(node_checks.FEATURES))
def test_features(tmp_path: Path, name: str) -> None:
    """A module that is loaded without its node is as good as none."""
    row = node_checks.FEATURES[name]
    check = node_checks.feature(name)
    machine = tree(tmp_path, {"sys/module/other/": ""})
    assert combine(name, check(machine)).status == "fail"
    tree(tmp_path, {f"sys/module/{row.module}/": ""})
    assert combine(name, check(machine)).status == ("fail" if row.node else "ok")
    if row.node:
        tree(tmp_path, {row.node.lstrip("/"): ""})
        assert combine(name, check(machine)).status == "ok"


def test_a_host_without_a_driver(tmp_path: Path) -> None:
    """One sentence and one action."""
    finding = combine("driver", node_checks.driver(tree(tmp_path, {"proc/": ""})))
    assert finding.status == "fail"
    assert finding.what
    assert finding.action


def test_a_host_without_a_runtime_for_gpus(tmp_path: Path) -> None:
    """The error says what the check needs, with and without an engine."""
    with pytest.raises(TrialError, match="no engine: the check needs a GPU"):
        container_checks.gpu_runtime(tree(tmp_path, {"etc/": ""}))
    runc = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]\n'
    tree(tmp_path, {"etc/containerd/config.toml": f'version = 2\n{runc}BinaryName = "runc"\n'})
    with pytest.raises(TrialError, match="in the config of containerd"):
        container_checks.gpu_runtime(ExaminedMachine(str(tmp_path)))


def test_the_runtime_of_an_engine(tmp_path: Path) -> None:
    """The incumbent's counts; one that is not a program is an error."""
    options = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]\n'
    program = "/usr/bin/nvidia-container-runtime"
    machine = tree(
        tmp_path,
        {"etc/containerd/config.toml": f'version = 2\n{options}BinaryName = "{program}"\n'},
    )
    with pytest.raises(TrialError, match="is not a program"):
        container_checks.gpu_runtime(machine)
    tree(tmp_path, {program.lstrip("/"): "#!/bin/sh\n"})
    (tmp_path / program.lstrip("/")).chmod(0o755)
    assert container_checks.gpu_runtime(machine) == ("containerd", program)


@pytest.mark.parametrize(
    ("result", "status", "sentence"),
    [
        ({"code": 0, "library": "/l/libcuda.so.1", "injected": True}, "ok", "succeeded"),
        ({"code": 0, "library": "/l/libcuda.so.1", "injected": False}, "fail", "its own"),
        ({"code": 100, "library": "/l", "injected": True}, "fail", "CUDA finds no GPU"),
        ({"code": 999, "library": "/l", "injected": True}, "fail", "returned 999"),
        ({"problem": "libcuda.so.1: cannot open"}, "fail", "cannot open"),
    ],
)
def test_cuda(result: dict[str, Any], status: str, sentence: str) -> None:
    """The error of CUDA has a meaning and an action."""
    note = container_checks.cuda_note(result)
    assert note.status == status
    assert sentence in note.what
    assert bool(note.action) == (status == "fail")


def test_without_a_gpu_the_cuda_check_says_what_it_needs(tmp_path: Path) -> None:
    """It starts no container."""
    finding = combine("cuda", container_checks.cuda(tree(tmp_path, {"proc/": ""})))
    assert finding.status == "fail"
    assert "needs a GPU whose driver answers" in finding.what


@pytest.mark.parametrize(
    ("own_nodes", "expected"),
    [
        (False, ("/", "/host")),
        (True, ("/run/nvidia/driver", "/driver-root")),
    ],
)
def test_driver_ready_of_a_driver_container(
    tmp_path: Path, own_nodes: bool, expected: tuple[str, str]
) -> None:
    """The variables are those of the incumbent."""
    container = tmp_path / "run/nvidia/driver"
    (container / "dev").mkdir(parents=True)
    if own_nodes:
        (container / "dev/nvidiactl").write_text("")
    library = container / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.write_bytes(driver_roots.elf("libnvidia-ml.so.1"))
    assert ready_files.driver_variables(ExaminedMachine(str(tmp_path))) == {
        "IS_HOST_DRIVER": "false",
        "NVIDIA_DRIVER_ROOT": "/run/nvidia/driver",
        "DRIVER_ROOT_CTR_PATH": "/driver-root",
        "NVIDIA_DEV_ROOT": expected[0],
        "DEV_ROOT_CTR_PATH": expected[1],
    }


def test_driver_ready_of_a_driver_on_the_host(tmp_path: Path) -> None:
    """Where the operator's pods see it."""
    assert ready_files.driver_variables(tree(tmp_path, {"etc/": ""})) == {
        "IS_HOST_DRIVER": "true",
        "NVIDIA_DRIVER_ROOT": "/",
        "DRIVER_ROOT_CTR_PATH": "/host",
        "NVIDIA_DEV_ROOT": "/",
        "DEV_ROOT_CTR_PATH": "/host",
    }


def _validated(
    machine: ExaminedMachine, files: ReadyFiles | None, *rounds: dict[str, str]
) -> tuple[list[Finding], int]:
    """Return the findings of components whose statuses in each round are *rounds*, and sleeps.

    The rounds are files of the machine, for each check is a process of its own.
    """
    state = Path(machine.root) / "round"

    def check(name: str) -> Any:
        def notes(_: ExaminedMachine) -> Iterator[Note]:
            status = rounds[int(state.read_text())][name]
            yield ok("fine") if status == "ok" else fail("broken", "mend it")

        return notes

    state.write_text("0")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        state.write_text(str(len(slept)))

    names = rounds[0]
    validation = Validation({name: check(name) for name in names}, machine, files)
    findings = validation.run(5.0 * (len(rounds) - 1), 5.0, clock=lambda: sum(slept), sleep=sleep)
    return findings, len(slept)


def test_a_component_that_fails_is_checked_again(tmp_path: Path) -> None:
    """Until it is valid; one that was valid is not checked again."""
    machine = tree(tmp_path, {"etc/": ""})
    rounds = ({"toolkit": "fail", "cuda": "ok"}, {"toolkit": "ok", "cuda": "fail"})
    findings, sleeps = _validated(machine, None, *rounds, rounds[1])
    assert [(item.check, item.status) for item in findings] == [("toolkit", "ok"), ("cuda", "ok")]
    assert sleeps == 1


def test_the_wait_is_bounded(tmp_path: Path) -> None:
    """A component that never becomes valid has failed."""
    machine = tree(tmp_path, {"etc/": ""})
    findings, sleeps = _validated(machine, None, *[{"toolkit": "fail"}] * 3)
    assert [item.status for item in findings] == ["fail"]
    assert sleeps == 2
    assert as_json(findings) == {
        "ok": False,
        "components": [
            {"name": "toolkit", "status": "fail", "sentence": "broken", "action": "mend it"}
        ],
    }
    json.dumps(as_json(findings))


def test_a_ready_file_is_complete_or_missing(tmp_path: Path) -> None:
    """GO#508: while a valid component is checked again, its file is the old one, not none."""
    machine = tree(tmp_path / "host", {"etc/": ""})
    directory = tmp_path / "ready"
    files = ReadyFiles(str(directory))
    _validated(machine, files, {"driver": "ok", "toolkit": "ok"})
    path = directory / "driver-ready"
    text = path.read_text()
    assert "IS_HOST_DRIVER=true\n" in text
    assert (path.stat().st_mode & 0o777) == 0o644
    before = path.stat().st_ino
    with path.open() as reader:
        _validated(machine, files, {"driver": "ok", "toolkit": "fail"})
        # The file that a program reads meanwhile is whole.
        assert reader.read() == text
    assert path.stat().st_ino != before
    assert sorted(os.listdir(directory)) == ["driver-ready"]


def test_a_ready_file_stays_if_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    """It was not removed before."""
    files = ReadyFiles(str(tmp_path))
    files.write("driver", "A=old\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ReadyFileError, match="cannot write"):
            files.write("driver", "A=new\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "driver-ready": "A=old\n"
    }


def test_a_ready_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The component has failed for those that wait for the file."""
    machine = tree(tmp_path / "host", {"etc/": ""})
    (tmp_path / "file").write_text("")
    findings, _ = _validated(machine, ReadyFiles(str(tmp_path / "file")), {"cuda": "ok"})
    assert findings[0].status == "fail"
    assert "--output-dir" in findings[0].action
