# SPDX-License-Identifier: Apache-2.0
"""Start containers that share mounts with the host; print what of ours the host then has.

Standard output is one JSON object: case → status, output, the host's own params, mounts of ours.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import scenario

PARAMS = Path("/proc/driver/nvidia/params")
MOUNTS = Path("/proc/self/mountinfo")


def prepare(config: dict[str, Any], case: str) -> None:
    """Change *config* so that its mounts and the host's are peers, or a limit is tight."""
    if case == "host-proc":
        # The host's own /proc, recursively shared: also without what stands in for the driver.
        config.pop("hooks")
        proc = {
            "destination": "/proc",
            "type": "bind",
            "source": "/proc",
            "options": ["rbind", "rshared"],
        }
        config["mounts"] = [m for m in config["mounts"] if m["destination"] != "/proc"] + [proc]
        linux = config["linux"]
        linux["namespaces"] = [n for n in linux["namespaces"] if n["type"] != "pid"]
        del linux["maskedPaths"], linux["readonlyPaths"]
    elif case == "pids-limit":
        config["linux"]["resources"]["pids"] = {"limit": 8}
    else:
        config["linux"]["rootfsPropagation"] = case


def observe(bundle: Path, config: dict[str, Any]) -> dict[str, object]:
    """Run the container of *bundle* with *config*; return what it came to."""
    (bundle / "config.json").write_text(json.dumps(config))
    before = MOUNTS.read_text().splitlines()
    name = f"shared-{os.getpid()}"
    status, out = scenario.create(bundle, name)
    during = [line for line in MOUNTS.read_text().splitlines() if line not in before]
    if status == 0:
        scenario.finish(name)
    return {
        "status": status,
        "output": out.read_text(),
        "params": PARAMS.read_text(),
        "mounted": [line for line in during if "params" in line],
    }


def main() -> None:
    """Run every case and print what was seen."""
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-shared-"))
    try:
        scenario.generate()
        bundle = scenario.make_bundle(top, "0")
        original = (bundle / "config.json").read_text()
        scenario.run("mount", "--make-rshared", "/")
        results = {}
        for case in ("pids-limit", "shared", "rshared", "slave", "host-proc"):
            config = json.loads(original)
            prepare(config, case)
            results[case] = observe(bundle, config)
        json.dump(results, sys.stdout)
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
