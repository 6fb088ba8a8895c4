# SPDX-License-Identifier: Apache-2.0
"""Start containers by the programs of a wheel; print what was seen.

Called with the directory of the programs. Standard output is one JSON object: how the container
asks → what it came to.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import scenario
import shared


def main() -> None:
    """Run a container that asks by a variable, and one that asks by the name of a device."""
    programs = Path(sys.argv[1])
    scenario.RUNTIME = str(programs / "gpu-container-runtime")
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-wheel-"))
    results: dict[str, object] = {}
    try:
        bundle = scenario.make_bundle(top, "0")
        config = json.loads((bundle / "config.json").read_text())
        results["variable"] = shared.observe(bundle, config)
        results["info"] = scenario.run(programs / "gpuruntime", "info").stdout
        spec = "/etc/cdi/nvidia.json"
        scenario.run(programs / "gpuruntime", "cdi", "generate", "--output", spec)
        config["process"]["env"] = ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"]
        results["spec"] = shared.observe(bundle, config)
        os.remove(spec)
        stored = json.loads((bundle / "config.json").read_text())
        results["hooks"] = [hook["path"] for hook in stored["hooks"]["createContainer"]]
        results["nodes"] = [node["path"] for node in stored["linux"]["devices"]]
    finally:
        shutil.rmtree(top, ignore_errors=True)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
