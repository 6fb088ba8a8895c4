# SPDX-License-Identifier: Apache-2.0
"""`missing.py`: creates on a host that lacks nodes, or has CDI specs of another driver.

Prints one JSON object: case → results of the creates (creates.py). For the simulated host.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from creates import LIBRARIES, Creates, aside, replaced
from scenario import WORK, generate, main
from ways import CAPABILITIES, CDI, REQUIREMENT

Found = dict[str, Any]
UVM = (Path("/dev/nvidia-uvm"), Path("/dev/nvidia-uvm-tools"))
MODPROBE = Path("/usr/bin/nvidia-modprobe")
CALLS = WORK / "modprobe.calls"
WARN = {"missing-gpu": "warn"}
LOAD = "nvidia-container-cli.load-kmods"
ROOTLESS = ("unshare", "--user", "--map-root-user", "--")
MODULE = Path("/proc/driver/nvidia/version")
THIRD_PARTY = Path("/etc/cdi/third.json")


def place_modprobe(*, works: bool = True) -> None:
    """Write an nvidia-modprobe that records its calls; it creates the nodes if it *works*."""
    script = f'#!/bin/sh\necho "$*" >> {CALLS}\n'
    if works:
        for minor, node in enumerate(UVM):
            major = os.major(os.lstat(node).st_rdev)
            script += f"mknod -m 666 {node} c {major} {minor}\n"
    MODPROBE.write_text(script)
    MODPROBE.chmod(0o755)


def calls() -> list[str]:
    """Return the calls of nvidia-modprobe since the last call of this function."""
    if not CALLS.exists():
        return []
    lines = CALLS.read_text().splitlines()
    CALLS.unlink()
    return lines


def nodes(bench: Creates) -> Found:
    """Request compute on a host without the node that it needs."""
    generate()
    utility = (f"{CAPABILITIES}=utility",)
    results: Found = {}
    for mode, config in (("jit-cdi", {}), ("cdi", CDI)):

        def attempt(name: str, mode: str = mode, **options: Any) -> None:
            with aside(*UVM):
                results[f"{mode}, {name}"] = {**bench.create(**options), "calls": calls()}

        bench.configure(**config)
        attempt("no program")
        if mode == "jit-cdi":
            attempt("utility", more=utility)
        place_modprobe(works=False)
        attempt("program in vain")
        place_modprobe()
        attempt("program")
        attempt("user namespace", before=ROOTLESS)
        bench.configure(**config, **{LOAD: False})
        attempt("not allowed")
        bench.configure(**config)
        results[f"{mode}, nothing missing"] = {**bench.create(), "calls": calls()}
        MODPROBE.unlink()
    return results


def warnings(bench: Creates) -> Found:
    """Start containers whose devices do not exist, with `missing-gpu` set to warn."""
    policy = {"accept-nvidia-visible-devices-envvar-when-unprivileged": False}
    results: Found = {}
    bench.configure()
    results["control"] = bench.create("99")
    bench.configure(**WARN)
    results["no such GPU"] = bench.create("99")
    results["there"] = bench.create("1")
    results["requirement"] = bench.create("1", more=(REQUIREMENT,))
    results["malformed"] = bench.create("1", more=("NO_EQUALS_SIGN",))
    results["management"] = bench.create("management.nvidia.com/gpu=all")
    with aside(*UVM):
        results["no node"] = bench.create()
    bench.fault("fault init-fails")
    os.utime(LIBRARIES)
    results["driver"] = bench.create()
    bench.fault()
    os.utime(LIBRARIES)
    bench.configure(**WARN, **CDI)
    results["no spec's device"] = bench.create("99")
    results["half"] = bench.create("1,99")
    with replaced(MODULE, MODULE.read_text().replace("550.163.01", "570.1")):
        results["stale"] = bench.create()
    hook = {"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]}
    results["hook"] = bench.create("99", members={"hooks": {"prestart": [hook]}})
    bench.configure(**WARN, **policy)
    results["policy"] = bench.create()
    bench.configure()
    return results


def stale(bench: Creates) -> Found:
    """Create with specs of another driver version, or with specs whose files do not exist."""
    mount = {"hostPath": "/opt/gone/libthird.so", "containerPath": "/opt/libthird.so"}
    old = {"hostPath": str(WORK / "libcuda.so.1.2.3"), "containerPath": "/opt/libcuda.so.1.2.3"}
    Path(old["hostPath"]).touch()
    devices = [{"name": "0", "containerEdits": {"mounts": [mount, old]}}]
    third = {"cdiVersion": "0.5.0", "kind": "third.org/card", "devices": devices}
    THIRD_PARTY.write_text(json.dumps(third))
    bench.configure(**CDI)
    results: Found = {"fits": bench.create(), "third party": bench.create("third.org/card=0")}
    results["both"] = bench.create("nvidia.com/gpu=0,third.org/card=0")
    with replaced(MODULE, MODULE.read_text().replace("550.163.01", "570.86.15")):
        for name, devices_value in (
            ("plain", "1"),
            ("qualified", "nvidia.com/gpu=1"),
            ("none", "none"),
        ):
            results[f"other driver, {name}"] = bench.create(devices_value)
        results["other driver, third party"] = bench.create("third.org/card=0")
    with replaced(MODULE, "no version at all\n"):
        results["driver unknown"] = bench.create()
    gone = LIBRARIES / "libnvidia-cfg.so.550.163.01"
    with aside(gone):
        results["file gone"] = bench.create()
    results["fits again"] = bench.create()
    THIRD_PARTY.unlink()
    return results


CASES = (nodes, warnings, stale)


def play() -> Found:
    """Run CASES."""
    bench = Creates()
    return {case.__name__: case(bench) for case in CASES}


if __name__ == "__main__":
    main({"missing": play})
