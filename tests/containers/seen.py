# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios on the simulated host, and says what their containers must have seen."""

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
# No driver is behind a node of the simulated host: opening one that is allowed gives ENXIO.
ALLOWED = "ENXIO"
REFUSED = "EPERM"
# Nobody makes nodes in a user namespace, nor is there the owner of the host's.
NOT_MADE = "mknod:EPERM"
NOBODY = "65534:65534"
REQUEST = "NVIDIA_VISIBLE_DEVICES="
# A library that nothing but this driver capability brings.
LIBRARY_OF = {
    "compute": "libcuda",
    "utility": "libnvidia-ml",
    "video": "libnvcuvid",
    "graphics": "libGLX_nvidia",
    "ngx": "libnvidia-ngx",
}


@dataclass(frozen=True)
class Seen:
    """What the probe printed in one container."""

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
        """Read the probe's lines (probe.c)."""
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
            # The last column and the mounted directory hold names that differ by container.
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
    *scenario: str, program: Path = HERE / "scenario.py", host: Sequence[str] = ()
) -> dict[str, Any]:
    """Play *scenario* of *program* and return what it found; the machine must be as it was.

    *host*: options of the simulated host.
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
        output, errors = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, errors
    assert machine.groups_of(process.pid) == []
    assert machine.differences(before, machine.of_machine, lost=False) == []
    found: dict[str, Any] = json.loads(output)
    assert machine.processes_in(found["namespace"]) == []
    # Of the host that the product saw: outside, the simulation would hide what it left. Not there
    # if the scenario itself changes that host.
    assert found.get("left", []) == []
    return found


def assert_granted(
    seen: Seen,
    gpus: Collection[int],
    host: dict[str, list[str]],
    *,
    drm: bool = True,
    mapped: bool = False,
) -> None:
    """Assert that the container has and may open the nodes of *gpus* and no other GPU's.

    *drm*: it has those of DRM as well. *mapped*: it is in a user namespace.
    """
    wanted = CONTROL_NODES | {f"/dev/nvidia{index}" for index in gpus}
    for kind in ("card", "renderD") if drm else ():
        # In the order of the GPUs; the first numbers may be those of another driver.
        start = f"/dev/dri/{kind}"
        there = sorted(int(path.removeprefix(start)) for path in host if path.startswith(start))
        wanted |= {f"{start}{there[index]}" for index in gpus}
    nodes = {path: node for path, node in seen.nodes.items() if "nvidia" in path or "dri" in path}
    assert set(nodes) == wanted
    for path in wanted:
        numbers, mode, owner = nodes[path]
        assert (numbers, owner) == (host[path][0], NOBODY if mapped else host[path][2])
        # Consumers older than CDI 1.1.0 do not read the mode.
        assert mode == host[path][1] or "/dri/" in path
    for index in gpus:
        assert seen.nodes[f"/dev/nvidia{index}"][0] == f"195:{index}"
    # Each DRM node has a name by its GPU's place on the bus, and no other node has.
    by_path = [node[0] for path, node in nodes.items() if path.startswith("/dev/dri/")]
    assert sorted(seen.links.values()) == sorted(by_path)
    # The probe opens the driver's own nodes.
    own = [path for path in wanted if "nvidia" in path]
    assert seen.opened == dict.fromkeys(own, ALLOWED)
    assert seen.made == {
        minor: NOT_MADE if mapped else ALLOWED if int(minor) in gpus else REFUSED
        for minor in ("0", "1", "3", "7")
    }


def assert_driver(seen: Seen) -> None:
    """Assert that the container's own loader finds the driver, and still the image's library."""
    assert seen.loaded == {
        "libcuda.so.1": f"{LIBRARIES}/libcuda.so.1",
        # By then it is loaded already: one library has two names.
        "libcuda.so": f"{LIBRARIES}/libcuda.so.1",
        "libnvidia-ml.so.1": f"{LIBRARIES}/libnvidia-ml.so.1",
        "libown.so.1": "/opt/own/lib/libown.so.1",
    }
    # Not only by the loader's default directories, which differ by distribution.
    assert seen.cached == list(seen.loaded)
    # cuInit succeeds, and driver 550 brings CUDA 12.4.
    assert seen.needed == ["0 12040"]


def assert_no_gpu(seen: Seen) -> None:
    """Assert that the container has nothing of the driver."""
    assert [path for path in seen.nodes if "nvidia" in path or "dri" in path] == []
    assert seen.links == {}
    assert set(seen.made.values()) in ({REFUSED}, {NOT_MADE})
    assert_no_driver(seen)


def assert_no_driver(seen: Seen) -> None:
    """Assert that the container has none of the driver's files."""
    assert seen.loaded == {
        "libcuda.so.1": "-",
        "libcuda.so": "-",
        "libnvidia-ml.so.1": "-",
        "libown.so.1": "/opt/own/lib/libown.so.1",
    }
    assert seen.cached == ["libown.so.1"]
    assert seen.needed == []


def assert_gpu_container(
    found: dict[str, Any],
    gpus: Collection[int],
    *,
    proc_driver: bool = False,
    mapped: bool = False,
    more: Sequence[str] = (),
) -> None:
    """Assert all that holds for a container that asked for *gpus*, beside the engine's own.

    *proc_driver*: the scenario shows /proc/driver in its containers, as a kernel driver does.
    *mapped*: the container is in a user namespace.
    *more* is what it has in its environment, and the one without us has not.
    """
    plain = Seen.parse(found["plain"])
    # The control: the same container, not through us.
    assert_no_gpu(plain)
    asked = Seen.parse(found["asked"])
    assert_granted(asked, gpus, found["host"], mapped=mapped)
    assert_driver(asked)
    assert {"MINE=kept", "EMPTY=", "CUDA_MODULE_LOADING=LAZY"} < set(asked.environment)
    kept = [entry for entry in plain.environment if not entry.startswith(REQUEST)]
    others = [entry for entry in asked.environment if not entry.startswith(REQUEST)]
    assert others == sorted([*kept, *more, f"NVIDIA_CTK_LIBCUDA_DIR={LIBRARIES}"])
    assert [entry for entry in asked.environment if entry not in others] == [f"{REQUEST}void"]
    assert {path: asked.nodes.get(path) for path in plain.nodes} == plain.nodes
    # In a user namespace nodes are the host's, mounted.
    ours = set(asked.mounts) - set(plain.mounts) - set(asked.nodes)
    added = {point: asked.mounts[point] for point in ours}
    assert f"{LIBRARIES}/libcuda.so.550.163.01" in added
    for point, options in added.items():
        assert {"ro", "nosuid", "nodev"} <= set(options), point
    assert {point: asked.mounts.get(point) for point in plain.mounts} == plain.mounts
    assert plain.params == (["ModifyDeviceFiles: 1"] if proc_driver else [])
    assert asked.params == (["ModifyDeviceFiles: 0"] if proc_driver else [])


def assert_way(
    found: dict[str, Any],
    name: str,
    way: Way,
    *,
    proc_driver: bool = False,
    mapped: bool = False,
) -> None:
    """Assert that of the containers *found* the one of *way* is what that says."""
    output = found["ways"][name]
    if way.gpus is not None:
        case = {**found, "asked": output}
        assert_gpu_container(case, way.gpus, proc_driver=proc_driver, mapped=mapped, more=way.more)
        return
    plain = Seen.parse(found["plain"])
    assert_no_gpu(plain)
    kept = [entry for entry in plain.environment if not entry.startswith(REQUEST)]
    asked = [] if way.devices is None else [f"{REQUEST}{way.devices}"]
    environment = sorted([*kept, *way.more, *asked])
    assert Seen.parse(output) == replace(plain, environment=environment)


def files_for(seen: Seen) -> set[str]:
    """Return the driver capabilities of which the container has a library."""
    names = {path.rpartition("/")[2].partition(".so")[0] for path in seen.mounts}
    return {capability for capability, library in LIBRARY_OF.items() if library in names}
