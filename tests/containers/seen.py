# SPDX-License-Identifier: Apache-2.0
"""Run scenarios on the simulated host, and assert what their containers must have seen."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from containers import machine
from containers.ways import Way

HERE = Path(__file__).resolve().parent
SIMHOST = HERE.parent / "simhost" / "simhost.py"
TIMEOUT_S = 120
LIBRARIES = f"/usr/lib/{platform.machine()}-linux-gnu"
CONTROL_NODES = frozenset(
    {"/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
)
# The nodes of the simulated host have no driver: an open that is allowed fails with ENXIO.
ALLOWED = "ENXIO"
REFUSED = "EPERM"
# mknod fails in a user namespace, and the owner of the nodes of the host is not mapped.
NOT_MADE = "mknod:EPERM"
NOBODY = "65534:65534"
REQUEST = "NVIDIA_VISIBLE_DEVICES="
# Driver capability → a library that only it adds.
LIBRARY_OF = {
    "compute": "libcuda",
    "utility": "libnvidia-ml",
    "video": "libnvcuvid",
    "graphics": "libGLX_nvidia",
    "ngx": "libnvidia-ngx",
}


@dataclass(frozen=True)
class Seen:
    """The output of the probe in one container."""

    nodes: dict[str, list[str]]
    links: dict[str, str]
    opened: dict[str, str]
    made: dict[str, str]
    loaded: dict[str, str]
    cached: list[str]
    environment: list[str]
    mounts: dict[str, list[str]]
    params: list[str]
    needed: list[str]

    @classmethod
    def parse(cls, output: str) -> Seen:
        """Parse the lines of the probe (probe.c)."""
        rows: dict[str, list[str]] = {}
        for line in output.splitlines():
            word, _, rest = line.partition(" ")
            rows.setdefault(word, []).append(rest)

        def pairs(word: str) -> dict[str, str]:
            return dict(row.split(" ", 1) for row in rows.get(word, []))

        mounts: dict[str, list[str]] = {}
        for row in rows["mount"]:
            place, _, kind = row.partition(" - ")
            point, options = place.split(" ")[4:6]
            # The last column and the mounted directory contain names that differ by container.
            mounts[point] = [kind.split(" ")[0], *sorted(options.split(","))]
        return cls(
            nodes={path: rest.split(" ") for path, rest in pairs("node").items()},
            links=pairs("link"),
            opened=pairs("open"),
            made=pairs("made"),
            loaded=pairs("load"),
            cached=rows.get("cached", []),
            # Engines give variables in the order of a Go map.
            environment=sorted(rows["env"]),
            mounts=mounts,
            params=rows.get("params", []),
            needed=rows.get("needed", []),
        )


def command(
    *scenario: str, program: Path = HERE / "scenario.py", host: Sequence[str] = ()
) -> list[str]:
    """Return the command line that plays *scenario* (name, devices) on a fresh simulated host."""
    inside = [sys.executable, str(program), *scenario]
    return [sys.executable, str(SIMHOST), "run", *host, "--", *inside]


def play(
    *scenario: str,
    program: Path = HERE / "scenario.py",
    host: Sequence[str] = (),
    timeout: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Play *scenario* of *program*, assert that the machine is unchanged, and return the results.

    *host*: options of the simulated host; *timeout*: seconds.
    """
    before = machine.of_machine()
    process = subprocess.Popen(
        command(*scenario, program=program, host=host),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, errors
    assert machine.groups_of(process.pid) == []
    assert machine.differences(before, machine.of_machine, lost=False) == []
    results: dict[str, Any] = json.loads(output)
    assert machine.processes_in(results["namespace"]) == []
    # Leftovers on the simulated host, which are not visible from outside. Missing if the scenario
    # itself changes that host.
    assert results.get("left", []) == []
    return results


def assert_granted(
    seen: Seen,
    gpus: Collection[int],
    host: dict[str, list[str]],
    *,
    drm: bool = True,
    mapped: bool = False,
) -> None:
    """Assert that the container has, and may open, the nodes of *gpus* and of no other GPU.

    *drm*: it has the DRM nodes as well. *mapped*: it is in a user namespace.
    """
    expected = CONTROL_NODES | {f"/dev/nvidia{index}" for index in gpus}
    for kind in ("card", "renderD") if drm else ():
        # In the order of the GPUs; the first numbers may belong to another driver.
        start = f"/dev/dri/{kind}"
        numbers_of_kind = sorted(
            int(path.removeprefix(start)) for path in host if path.startswith(start)
        )
        expected |= {f"{start}{numbers_of_kind[index]}" for index in gpus}
    nodes = {path: node for path, node in seen.nodes.items() if "nvidia" in path or "dri" in path}
    assert set(nodes) == expected
    for path in expected:
        numbers, mode, owner = nodes[path]
        assert (numbers, owner) == (host[path][0], NOBODY if mapped else host[path][2])
        # Consumers older than CDI 1.1.0 do not read the mode.
        assert mode == host[path][1] or "/dri/" in path
    for index in gpus:
        assert seen.nodes[f"/dev/nvidia{index}"][0] == f"195:{index}"
    # Each DRM node has a by-path link, and no other node has one.
    by_path = [node[0] for path, node in nodes.items() if path.startswith("/dev/dri/")]
    assert sorted(seen.links.values()) == sorted(by_path)
    # The probe opens only the nodes of the NVIDIA driver.
    own = [path for path in expected if "nvidia" in path]
    assert seen.opened == dict.fromkeys(own, ALLOWED)
    assert seen.made == {
        minor: NOT_MADE if mapped else ALLOWED if int(minor) in gpus else REFUSED
        for minor in ("0", "1", "3", "7")
    }


def assert_driver(seen: Seen) -> None:
    """Assert that the loader of the container finds the driver and the library of the image."""
    assert seen.loaded == {
        "libcuda.so.1": f"{LIBRARIES}/libcuda.so.1",
        # Already loaded: one library has two names.
        "libcuda.so": f"{LIBRARIES}/libcuda.so.1",
        "libnvidia-ml.so.1": f"{LIBRARIES}/libnvidia-ml.so.1",
        "libown.so.1": "/opt/own/lib/libown.so.1",
    }
    # From the cache: the default directories of the loader differ by distribution.
    assert seen.cached == list(seen.loaded)
    # cuInit succeeds, and driver 550 supports CUDA 12.4.
    assert seen.needed == ["0 12040"]


def assert_no_gpu(seen: Seen) -> None:
    """Assert that the container has no node, link or file of the driver."""
    assert [path for path in seen.nodes if "nvidia" in path or "dri" in path] == []
    assert seen.links == {}
    assert set(seen.made.values()) in ({REFUSED}, {NOT_MADE})
    assert_no_driver(seen)


def assert_no_driver(seen: Seen) -> None:
    """Assert that the container has no driver file."""
    assert seen.loaded == {
        "libcuda.so.1": "-",
        "libcuda.so": "-",
        "libnvidia-ml.so.1": "-",
        "libown.so.1": "/opt/own/lib/libown.so.1",
    }
    assert seen.cached == ["libown.so.1"]
    assert seen.needed == []


def assert_gpu_container(
    results: dict[str, Any],
    gpus: Collection[int],
    *,
    proc_driver: bool = False,
    mapped: bool = False,
    more: Sequence[str] = (),
) -> None:
    """Assert all properties of a container that requests *gpus*, compared with the plain one.

    *proc_driver*: the containers of the scenario have /proc/driver, as with a kernel driver.
    *mapped*: the container is in a user namespace.
    *more* are environment variables that the plain container does not have.
    """
    plain = Seen.parse(results["plain"])
    # The control: the same container without our runtime.
    assert_no_gpu(plain)
    gpu_container = Seen.parse(results["asked"])
    assert_granted(gpu_container, gpus, results["host"], mapped=mapped)
    assert_driver(gpu_container)
    assert {"MINE=kept", "EMPTY=", "CUDA_MODULE_LOADING=LAZY"} < set(gpu_container.environment)
    plain_variables = [entry for entry in plain.environment if not entry.startswith(REQUEST)]
    variables = [entry for entry in gpu_container.environment if not entry.startswith(REQUEST)]
    assert variables == sorted([*plain_variables, *more, f"NVIDIA_CTK_LIBCUDA_DIR={LIBRARIES}"])
    assert [entry for entry in gpu_container.environment if entry not in variables] == [
        f"{REQUEST}void"
    ]
    assert {path: gpu_container.nodes.get(path) for path in plain.nodes} == plain.nodes
    # In a user namespace the nodes of the host are mounted.
    added_points = set(gpu_container.mounts) - set(plain.mounts) - set(gpu_container.nodes)
    added = {point: gpu_container.mounts[point] for point in added_points}
    assert f"{LIBRARIES}/libcuda.so.550.163.01" in added
    for point, options in added.items():
        assert {"ro", "nosuid", "nodev"} <= set(options), point
    assert {point: gpu_container.mounts.get(point) for point in plain.mounts} == plain.mounts
    assert plain.params == (["ModifyDeviceFiles: 1"] if proc_driver else [])
    assert gpu_container.params == (["ModifyDeviceFiles: 0"] if proc_driver else [])


def assert_way(
    results: dict[str, Any],
    name: str,
    way: Way,
    *,
    proc_driver: bool = False,
    mapped: bool = False,
) -> None:
    """Assert that the container of *way* in *results* is as *way* describes."""
    output = results["ways"][name]
    if way.gpus is not None:
        case = {**results, "asked": output}
        assert_gpu_container(case, way.gpus, proc_driver=proc_driver, mapped=mapped, more=way.more)
        return
    plain = Seen.parse(results["plain"])
    assert_no_gpu(plain)
    plain_variables = [entry for entry in plain.environment if not entry.startswith(REQUEST)]
    request = [] if way.devices is None else [f"{REQUEST}{way.devices}"]
    environment = sorted([*plain_variables, *way.more, *request])
    assert Seen.parse(output) == replace(plain, environment=environment)


def files_for(seen: Seen) -> set[str]:
    """Return the driver capabilities whose library is mounted in the container."""
    names = {path.rpartition("/")[2].partition(".so")[0] for path in seen.mounts}
    return {capability for capability, library in LIBRARY_OF.items() if library in names}
