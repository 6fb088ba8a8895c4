# SPDX-License-Identifier: Apache-2.0
"""Start containers whose root is read-only, by the low-level runtimes of the command line.

Standard output is one JSON object: runtime → case → what two starts in a row, each with a root of
its own, came to.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matrix
import scenario

SPEC = Path("/etc/cdi/nvidia.json")
ASKED = "/proc/driver/nvidia/params"
ETC = "/etc"


def _as_it_is(bundle: Path, config: dict[str, Any]) -> None:
    del bundle, config


def _mapped(bundle: Path, config: dict[str, Any]) -> None:
    """Map the container's ids, and give the root to them, as engines do."""
    del config["hooks"]
    config["linux"]["namespaces"].append({"type": "user"})
    ids = [{"containerID": 0, "hostID": matrix.FIRST_ID, "size": 65536}]
    config["linux"]["uidMappings"] = config["linux"]["gidMappings"] = ids
    scenario.run("chown", "-hR", f"{matrix.FIRST_ID}:{matrix.FIRST_ID}", bundle / "rootfs")


def _with_a_volume(bundle: Path, config: dict[str, Any]) -> None:
    """Mount something over /etc."""
    volume = bundle / "volume"
    shutil.copytree(bundle / "rootfs/etc", volume)
    config["mounts"].append(
        {"destination": ETC, "type": "bind", "source": str(volume), "options": ["rbind"]}
    )


def _not_mounted(bundle: Path, config: dict[str, Any]) -> None:
    """Have a root that is a directory like any other."""
    del config
    scenario.run("umount", bundle / "rootfs")


CASES: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "as it is": _as_it_is,
    "in a user namespace": _mapped,
    "a volume on /etc": _with_a_volume,
    "a root that is no mount": _not_mounted,
}


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def start(bundle: Path, name: str) -> dict[str, Any]:
    """Start the container of *bundle*; return what came of it, and what is new in the root."""
    root = bundle / "rootfs"
    before = set(_files(root))
    status, out = scenario.create(bundle, name, timeout_s=60)
    if status == 0:
        scenario.finish(name)
    else:
        # crun leaves the state of one whose hook has failed.
        scenario.run(scenario.RUNTIME, "delete", "--force", name, check=False)
    new = sorted(set(_files(root)) - before)
    return {"status": status, "output": out.read_text(errors="replace"), "new": new}


def main() -> None:
    """Run every case under each runtime and print what was seen."""
    matrix.without_unified()
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-read-only-"))
    top.chmod(0o755)
    results: dict[str, Any] = {}
    mounted = []
    try:
        scenario.generate(str(SPEC))
        pristine = scenario.make_bundle(top / "pristine", "nvidia.com/gpu=0")
        probe = pristine / "rootfs" / "bin" / "asks"
        scenario.run("gcc", "-o", probe, scenario.HERE / "asks.c", "-ldl")
        for runtime in sys.argv[1:]:
            matrix.use_runtime(runtime, top)
            results[runtime] = {}
            for number, (case, prepare) in enumerate(CASES.items()):
                results[runtime][case] = []
                for turn in range(2):
                    bundle = top / f"{runtime}-{number}-{turn}"
                    shutil.copytree(pristine, bundle, symlinks=True)
                    scenario.run("mount", "--bind", bundle / "rootfs", bundle / "rootfs")
                    mounted.append(bundle / "rootfs")
                    config = json.loads((bundle / "config.json").read_text())
                    config["process"]["args"] = ["/bin/asks", ASKED]
                    config["root"]["readonly"] = True
                    prepare(bundle, config)
                    (bundle / "config.json").write_text(json.dumps(config))
                    name = f"read-only-{os.getpid()}-{runtime}-{number}-{turn}"
                    results[runtime][case].append(start(bundle, name))
        json.dump(results, sys.stdout)
    finally:
        for place in mounted:
            scenario.run("umount", "--lazy", place, check=False)
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
