# SPDX-License-Identifier: Apache-2.0
"""GPUs, MIG devices and their nodes as discovery finds them on simulated hosts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shim_host import Host

TREE = Path(__file__).parents[2]
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
# Runs inside. Prints one JSON document: what is found below the dev root, or the error and hint.
FIND = """
import json, os, sys
from gpuruntime.discover import device_nodes, nvml
from gpuruntime.errors import GpuRuntimeError

def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "__slots__"):
        return {name: plain(getattr(value, name)) for name in value.__slots__}
    return value

try:
    library = os.path.dirname(os.environ["SIMHOST_CONF"]) + "/libnvidia-ml.so.1"
    answer = nvml.query(library, 20)
    dev = device_nodes.DevRoot(sys.argv[1])
    gpus, left_out = device_nodes.gpu_nodes(answer.gpus, dev)
    found = {
        "version": answer.driver_version,
        "gpus": gpus,
        "problems": [*answer.problems, *map(str, left_out)],
        "control": device_nodes.control_nodes(dev),
        "management": device_nodes.management_nodes(dev),
    }
    print(json.dumps({name: plain(value) for name, value in found.items()}))
except GpuRuntimeError as error:
    print(json.dumps({"error": str(error), "hint": error.hint}))
"""

pytestmark = pytest.mark.system("true")


def on_host(script: str, *options: str) -> str:
    """Return what *script*, in which $FIND finds, prints on a simulated host with *options*."""
    with Host(*options) as host:
        done = host.run("sh", "-uc", script, PY=sys.executable, FIND=FIND)
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


def find(*options: str, prepare: str = ":", dev_root: str = "/") -> dict[str, Any]:
    """Return what is found on a host with *options*, after *prepare*."""
    told = on_host(f'{prepare}; "$PY" -c "$FIND" {dev_root}', *options)
    found: dict[str, Any] = json.loads(told)
    return found


def paths(nodes: list[dict[str, str]]) -> list[str]:
    """Return the container paths of *nodes*."""
    return [node["container_path"] for node in nodes]


def caps(found: dict[str, Any]) -> dict[str, list[str]]:
    """Return the last parts of the capability nodes' names, by MIG device."""
    return {
        f"{gpu['gpu']['index']}:{mig['index']}": [
            path.removeprefix("/dev/nvidia-caps/nvidia-cap") for path in paths(nodes)
        ]
        for gpu in found["gpus"]
        for mig, *nodes in gpu["mig"]
    }


def listed(gpus: list[dict[str, Any]]) -> list[str]:
    """Return indices and UUIDs of *gpus* and their MIG devices, in order."""
    lines = []
    for each in gpus:
        gpu = each["gpu"]
        lines.append(f"{gpu['index']} {gpu['uuid']}")
        lines += [f"{mig['index']} {mig['uuid']}" for mig in gpu["mig_devices"]]
    return lines


def test_what_is_found_is_what_nvidia_smi_lists() -> None:
    """The oracle of all GPU software, MIG devices included."""
    script = 'nvidia-smi -L >&3; "$PY" -c "$FIND" /'
    told = on_host(f"{{ {script}; }} 3>&1", "--gpus", "4", "--mig", "1:7", "--mig", "2:2")
    *lines, found = told.splitlines()
    pattern = r"(?:GPU|  MIG \S+ +Device) +([0-9]+): .*\(?UUID: (\S+)\)"
    matches = [re.fullmatch(pattern, line) for line in lines]
    assert len(matches) == 4 + 9
    by_smi = [" ".join(match.groups()) for match in matches if match is not None]
    assert listed(json.loads(found)["gpus"]) == by_smi
    assert lines[2].startswith("  MIG 1g.10gb     Device  0: (UUID: MIG-")


def test_a_gpu_in_mig_mode_and_one_that_is_not() -> None:
    """Both have their own and their DRM nodes; only one has capabilities."""
    found = find("--gpus", "2", "--mig", "0:2")
    assert found["problems"] == []
    assert found["version"] == "550.163.01"
    assert [gpu["gpu"]["mig_enabled"] for gpu in found["gpus"]] == [True, False]
    assert caps(found) == {"0:0": ["66", "67"], "0:1": ["75", "76"]}
    assert paths([gpu["node"] for gpu in found["gpus"]]) == ["/dev/nvidia0", "/dev/nvidia1"]
    for number, gpu in enumerate(found["gpus"], 1):
        bus_id = gpu["gpu"]["bus_id"]
        assert paths(gpu["drm"]) == [f"/dev/dri/card{number}", f"/dev/dri/renderD{128 + number}"]
        assert gpu["links"] == [
            f"../card{number}::/dev/dri/by-path/pci-{bus_id}-card",
            f"../renderD{128 + number}::/dev/dri/by-path/pci-{bus_id}-render",
        ]
    assert paths(found["control"]) == [
        *("/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl")
    ]
    assert paths(found["management"])[-6:] == [
        f"/dev/nvidia-caps/nvidia-cap{number}" for number in (1, 2, 66, 67, 75, 76)
    ]


def test_64_gpus_with_7_mig_devices_each() -> None:
    """The largest host: bus ids of more than 4 digits, capabilities of more than 32 GPUs."""
    found = find("--gpus", "64", "--mig", "all:7")
    assert found["problems"] == []
    assert len(caps(found)) == 64 * 7
    assert len({number for pair in caps(found).values() for number in pair}) == 64 * 7 * 2
    assert all(len(gpu["drm"]) == len(gpu["links"]) == 2 for gpu in found["gpus"])
    assert found["gpus"][63]["gpu"]["bus_id"] == "10000:08:00.0"


def test_mig_mode_without_instances() -> None:
    """B064: no device and no failure; the other GPU is as it was."""
    found = find("--gpus", "2", "--mig", "0:0")
    assert found["problems"] == []
    assert [gpu["gpu"]["mig_enabled"] for gpu in found["gpus"]] == [True, False]
    assert caps(found) == {}


def test_mig_devices_without_capability_nodes_are_left_out() -> None:
    """B114: minors 66 and 67 are told and the nodes are missing; only the GPU would be seen."""
    found = find("--gpus", "1", "--mig", "0:1", "--fault", "nonode nvidia-caps/nvidia-cap6[67]")
    assert caps(found) == {}
    (problem,) = found["problems"]
    assert problem.startswith("MIG device 0:0 is left out: ")
    assert '"/dev/nvidia-caps/nvidia-cap66"' in problem
    assert "gpuruntime system create-device-nodes --all" in problem


def test_capabilities_come_from_either_file() -> None:
    """`mig-minors` and the tree of capabilities agree; a kernel with neither grants nothing."""
    options = ("--gpus", "2", "--mig", "1:3")
    whole = find(*options)
    assert len(caps(whole)) == 3
    assert find(*options, "--fault", "no-mig-minors") == whole
    assert find(*options, "--fault", "no-capabilities") == whole
    neither = find(*options, "--fault", "no-mig-minors", "--fault", "no-capabilities")
    assert caps(neither) == {}
    assert "MIG device 1:0 is left out: neither " in neither["problems"][0]


def test_a_new_mig_layout_is_found_at_the_next_look() -> None:
    """B030: nothing is remembered, and of a new instance without nodes it is told."""
    change = (
        'sed -i "/^mig 0 1/d" "$SIMHOST_CONF"; '
        'echo "mig 0 4 MIG-3a7c0004-51d2-5e0b-9f14-0b2a3c4d5e00 11 0 1 1 9856" >> "$SIMHOST_CONF"'
    )
    make = "; ".join(f"mknod /dev/nvidia-caps/nvidia-cap{n} c 236 {n}" for n in (102, 103))
    look = '"$PY" -c "$FIND" /'
    told = on_host(f"{look}; {change}; {look}; {make}; {look}", "--gpus", "1", "--mig", "0:2")
    before, between, after = map(json.loads, told.splitlines())
    assert list(caps(before)) == ["0:0", "0:1"]
    assert list(caps(between)) == ["0:0"]
    assert '"/dev/nvidia-caps/nvidia-cap102"' in between["problems"][0]
    assert caps(after) == {"0:0": ["66", "67"], "0:4": ["102", "103"]}


def test_a_fresh_host_without_uvm_is_an_error() -> None:
    """B046: CUDA would not start, and nothing in the container could say why."""
    found = find(prepare="rm /dev/nvidia-uvm")
    assert 'no device node "/dev/nvidia-uvm"' in found["error"]
    assert "create-device-nodes --all" in found["hint"]


def test_a_fresh_host_with_nvidiactl_only() -> None:
    """B046: each GPU is named that has no node, before anything else is said."""
    found = find("--gpus", "2", prepare="rm /dev/nvidia[0-9]*")
    lines = [f'GPU {index} is left out: no device node "/dev/nvidia{index}"' for index in (0, 1)]
    assert found["problems"] == lines
    assert found["gpus"] == []


def test_an_empty_dev_root_while_the_nodes_are_in_dev() -> None:
    """The hint says where they are."""
    found = find(prepare="mkdir -p /run/nvidia/driver/dev", dev_root="/run/nvidia/driver")
    assert 'below the dev root "/run/nvidia/driver"' in found["error"]
    assert 'use "--dev-root /"' in found["hint"]


def test_a_dev_root_of_its_own() -> None:
    """The nodes have host paths below it, and container paths as ever."""
    root = "/run/nvidia/driver"
    prepare = f"mkdir -p {root}/dev; cp -a /dev/nvidia* /dev/dri {root}/dev"
    found = find("--gpus", "1", "--mig", "0:1", prepare=prepare, dev_root=root)
    gpu = found["gpus"][0]
    nodes = [gpu["node"], *gpu["drm"], *gpu["mig"][0][1:], *found["control"], *found["management"]]
    assert len(nodes) == 1 + 2 + 2 + 4 + 9
    for node in nodes:
        assert node["host_path"] == root + node["container_path"]
    assert len(gpu["links"]) == 2


@pytest.mark.parametrize(
    ("function", "devices"),
    [
        ("nvmlDeviceGetMaxMigDeviceCount", 1),
        ("nvmlDeviceGetMigMode", 0),
        ("nvmlDeviceGetUUID", 1),
        ("nvmlDeviceGetMinorNumber", 1),
        ("nvmlDeviceGetPciInfo_v3", 1),
        ("nvmlInit_v2", 1),
    ],
)
def test_an_old_nvml_costs_what_needs_the_function(function: str, devices: int) -> None:
    """B134: the loader itself does not find the function."""
    found = find("--gpus", "2", "--mig", "1:1", "--fault", f"nosymbol {function}")
    assert found["problems"] == []
    assert [gpu["node"]["container_path"] for gpu in found["gpus"]] == [
        *("/dev/nvidia0", "/dev/nvidia1")
    ]
    assert len(caps(found)) == devices


def test_an_empty_bus_id() -> None:
    """B134: no DRM nodes, and no link that is called pci--card."""
    found = find("--gpus", "2", "--fault", "nobusid 0")
    assert [len(gpu["drm"]) for gpu in found["gpus"]] == [0, 2]
    assert [len(gpu["links"]) for gpu in found["gpus"]] == [0, 2]


def test_lost_devices_do_not_cost_the_others() -> None:
    """A GPU, a MIG device."""
    faults = ("--fault", "lost 1", "--fault", "mig-lost 0 1")
    found = find("--gpus", "3", "--mig", "0:3", *faults)
    assert [gpu["gpu"]["index"] for gpu in found["gpus"]] == [0, 2]
    assert list(caps(found)) == ["0:0", "0:2"]
    assert found["problems"] == [
        "MIG device 0:1 is left out: GPU is lost",
        "GPU 1 is left out: GPU is lost",
    ]


def test_odd_names() -> None:
    """They are kept, and compared with nothing but what they are."""
    odd = r"NVIDIA\x0a\x1b[31m\xff" + "x" * 300
    names = ("--gpu-name", f"0:{odd}", "--gpu-name", "1:NVIDIA DGX Display")
    found = find("--gpus", "3", *names)
    assert [gpu["gpu"]["name"] for gpu in found["gpus"]] == [
        "NVIDIA\n\x1b[31m\udcff" + "x" * 300,
        "NVIDIA DGX Display",
        "NVIDIA H100 80GB HBM3",
    ]


def test_nodes_for_a_group_tell_it() -> None:
    """B136: mode 0440 of group 44, as Tegra's nvmap has it."""
    prepare = "chgrp 44 /dev/nvidia0 /dev/nvidia1; chmod 440 /dev/nvidia0"
    found = find("--gpus", "2", prepare=prepare)
    assert [gpu["node"]["group"] for gpu in found["gpus"]] == [44, 0]


def test_a_library_that_is_not_there_cannot_be_missed() -> None:
    """A fault that is none is told, or a test would test nothing."""
    command = [sys.executable, str(SIMHOST), "run", "--fault", "nosymbol nvmlNone", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == 'simhost: NVML has no function "nvmlNone" that could be missing\n'


@pytest.mark.parametrize(
    "options", [("--mig", "8:1"), ("--mig", "0:8"), ("--mig", "1"), ("--gpu-name", "X")]
)
def test_options_that_mean_nothing_are_refused(options: tuple[str, ...]) -> None:
    """A typing mistake in a test."""
    command = [sys.executable, str(SIMHOST), "run", *options, "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f'simhost: {options[0]} "{options[1]}" is not GPU:')
