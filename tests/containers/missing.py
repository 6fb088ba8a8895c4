# SPDX-License-Identifier: Apache-2.0
"""`missing.py`: creates on a host that lacks nodes, or has CDI specs of another driver.

Prints one JSON object: case → what the creates came to (creates.py). For the simulated host.
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
    """Put a driver's program there that makes the nodes, or not, and notes its calls."""
    script = f'#!/bin/sh\necho "$*" >> {CALLS}\n'
    if works:
        for minor, node in enumerate(UVM):
            major = os.major(os.lstat(node).st_rdev)
            script += f"mknod -m 666 {node} c {major} {minor}\n"
    MODPROBE.write_text(script)
    MODPROBE.chmod(0o755)


def calls() -> list[str]:
    """Return the calls of the program since the last question."""
    if not CALLS.exists():
        return []
    lines = CALLS.read_text().splitlines()
    CALLS.unlink()
    return lines


def nodes(bench: Creates) -> Found:
    """Ask for compute on a host without the node that it needs."""
    generate()
    utility = (f"{CAPABILITIES}=utility",)
    found: Found = {}
    for mode, config in (("jit-cdi", {}), ("cdi", CDI)):

        def attempt(name: str, mode: str = mode, **options: Any) -> None:
            with aside(*UVM):
                found[f"{mode}, {name}"] = {**bench.create(**options), "calls": calls()}

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
        found[f"{mode}, nothing missing"] = {**bench.create(), "calls": calls()}
        MODPROBE.unlink()
    return found


def warnings(bench: Creates) -> Found:
    """Have containers start without what they ask for, where that is not there."""
    policy = {"accept-nvidia-visible-devices-envvar-when-unprivileged": False}
    found: Found = {}
    bench.configure()
    found["control"] = bench.create("99")
    bench.configure(**WARN)
    found["no such GPU"] = bench.create("99")
    found["there"] = bench.create("1")
    found["requirement"] = bench.create("1", more=(REQUIREMENT,))
    found["malformed"] = bench.create("1", more=("NO_EQUALS_SIGN",))
    found["management"] = bench.create("management.nvidia.com/gpu=all")
    with aside(*UVM):
        found["no node"] = bench.create()
    bench.fault("fault init-fails")
    os.utime(LIBRARIES)
    found["driver"] = bench.create()
    bench.fault()
    os.utime(LIBRARIES)
    bench.configure(**WARN, **CDI)
    found["no spec's device"] = bench.create("99")
    found["half"] = bench.create("1,99")
    with replaced(MODULE, MODULE.read_text().replace("550.163.01", "570.1")):
        found["stale"] = bench.create()
    hook = {"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]}
    found["hook"] = bench.create("99", members={"hooks": {"prestart": [hook]}})
    bench.configure(**WARN, **policy)
    found["policy"] = bench.create()
    bench.configure()
    return found


def stale(bench: Creates) -> Found:
    """Have specs that were made for another driver, or whose files are gone."""
    mount = {"hostPath": "/opt/gone/libthird.so", "containerPath": "/opt/libthird.so"}
    old = {"hostPath": str(WORK / "libcuda.so.1.2.3"), "containerPath": "/opt/libcuda.so.1.2.3"}
    Path(old["hostPath"]).touch()
    devices = [{"name": "0", "containerEdits": {"mounts": [mount, old]}}]
    third = {"cdiVersion": "0.5.0", "kind": "third.org/card", "devices": devices}
    THIRD_PARTY.write_text(json.dumps(third))
    bench.configure(**CDI)
    found: Found = {"fits": bench.create(), "third party": bench.create("third.org/card=0")}
    found["both"] = bench.create("nvidia.com/gpu=0,third.org/card=0")
    with replaced(MODULE, MODULE.read_text().replace("550.163.01", "570.86.15")):
        for name, asked in (("plain", "1"), ("qualified", "nvidia.com/gpu=1"), ("none", "none")):
            found[f"other driver, {name}"] = bench.create(asked)
        found["other driver, third party"] = bench.create("third.org/card=0")
    with replaced(MODULE, "no version at all\n"):
        found["driver unknown"] = bench.create()
    gone = LIBRARIES / "libnvidia-cfg.so.550.163.01"
    with aside(gone):
        found["file gone"] = bench.create()
    found["fits again"] = bench.create()
    THIRD_PARTY.unlink()
    return found


CASES = (nodes, warnings, stale)


def play() -> Found:
    """Go through CASES."""
    bench = Creates()
    return {case.__name__: case(bench) for case in CASES}


if __name__ == "__main__":
    main({"missing": play})
