# SPDX-License-Identifier: Apache-2.0
"""Use what packages have installed, on a simulated host; print what was seen.

Standard output is one JSON object. It runs with the Python of the root, and what that has.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import commands
import scenario
import shared

COMPLETE = """
. /usr/share/bash-completion/completions/gpuruntime
COMP_WORDS=(gpuruntime cdi gen) COMP_CWORD=2
_gpuruntime_completion gpuruntime
echo "${COMPREPLY[@]}"
"""
SCRIPT = "cd /dev; /bin/busybox ls -d nvidia*; " + scenario.SCRIPT


def containers(top: Path) -> dict[str, list[str]]:
    """Return the nodes, and the driver's mask, of containers: by each name, and by a spec."""
    bundle = scenario.make_bundle(top, "1,3")
    config = json.loads((bundle / "config.json").read_text())
    config["process"]["args"][-1] = SCRIPT
    seen = {}
    for name in ("gpu-container-runtime", "nvidia-container-runtime", "a CDI spec"):
        if name == "a CDI spec":
            scenario.run("gpuruntime", "cdi", "generate", "--output", "/etc/cdi/nvidia.yaml")
            scenario.run("gpuruntime", "cdi", "validate", "/etc/cdi/nvidia.yaml")
            names = "nvidia.com/gpu=1,nvidia.com/gpu=3"
            config["process"]["env"] = ["PATH=/bin", f"NVIDIA_VISIBLE_DEVICES={names}"]
        else:
            scenario.RUNTIME = name
        output = str(shared.observe(bundle, json.loads(json.dumps(config)))["output"])
        seen[name] = output.splitlines()
    return seen


def main() -> None:
    """Start containers, ask the command line for what needs each of its dependencies."""
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-packaged-"))
    try:
        results: dict[str, object] = {"containers": containers(top)}
    finally:
        shutil.rmtree(top)
    results["failed commands"] = commands.run_all()
    results["completion"] = scenario.run("bash", "-c", COMPLETE).stdout
    results["config"] = scenario.run("gpuruntime", "config", "show").stdout
    results["doctor"] = scenario.run("gpuruntime", "doctor", check=False).stdout
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
