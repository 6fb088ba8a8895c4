# SPDX-License-Identifier: Apache-2.0
"""`user_namespaces.py LOWLEVEL`: on the simulated host, start containers in user namespaces.

Prints one JSON object. Its cases: status and error of the create, output of the container,
rules of its cgroup.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import image
from drivers import OURS, run, until
from scenario import WORK, host_nodes, main, nothing_left, without_unified

# The /dev of a driver container.
DRIVER_DEV = WORK / "driver" / "dev"
FIRST_ID = 100000
WHOLE = ((0, FIRST_ID, 65536),)
# As `podman run --userns=keep-id`: user 1000 starts the container.
KEEP_ID = ((0, FIRST_ID, 1000), (1000, 1000, 1), (1001, FIRST_ID + 1000, 60000))
WITHOUT_ROOT = ((1, FIRST_ID, 65535),)
SCRIPT = """
b=/bin/busybox
for node in /dev/nvidia*; do
    $b stat -c 'node %n %t:%T %a %u:%g' $node
    echo "open $node $( (: <$node) 2>&1)"
done
$b sed -n 's/.* \\(\\/dev\\/nvidia[^ ]* [^ ]*\\) .*/mount \\1/p' /proc/self/mountinfo
"""
NUMBERS = {"type": "c", "major": 195, "minor": 3}
# The GPU 195:3: under the name of another GPU of the host, under a name that does not exist on the
# host, under its own name; and with a name and numbers that contradict the host.
NODES: dict[str, dict[str, Any]] = {
    "swapped": {"path": "/dev/nvidia0", "hostPath": "/dev/nvidia3"},
    "moved": {"path": "/dev/nvidia9", "hostPath": f"{DRIVER_DEV}/nvidia3"},
    "usual": {"path": "/dev/nvidia3"},
    "false": {"path": "/dev/nvidia0", **NUMBERS},
}


class Bench:
    """A bundle for *lowlevel*, started with different configs."""

    def __init__(self, lowlevel: str) -> None:
        self.lowlevel = lowlevel
        self.bundle = WORK / "bundle"
        self.rootfs = image.make_root(self.bundle / "rootfs")
        run("runc", "spec", "--bundle", self.bundle)
        self.original = (self.bundle / "config.json").read_text()
        self.count = 0
        self.environment = dict(os.environ)
        self.use(lowlevel)

    def use(self, runtime: str) -> None:
        """Configure *runtime* as the low-level runtime of ours."""
        config = WORK / "config.toml"
        config.write_text(f'[nvidia-container-runtime]\nruntimes = ["{runtime}"]\n')
        self.environment["GPURUNTIME_CONFIG"] = str(config)

    def config(
        self, device: str | None, ids: tuple[tuple[int, int, int], ...] = WHOLE, user: int = 0
    ) -> dict[str, Any]:
        """Return a config that requests *device*; *ids* are mapped in a user namespace."""
        config: dict[str, Any] = json.loads(self.original)
        process = config["process"]
        process["terminal"] = False
        process["args"] = ["/bin/sh", "-c", SCRIPT]
        process["env"] = ["PATH=/bin"]
        process["user"] = {"uid": user, "gid": user}
        if device is not None:
            process["env"].append(f"NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu={device}")
        config["root"]["readonly"] = False
        if ids:
            linux = config["linux"]
            linux["namespaces"].append({"type": "user"})
            names = ("containerID", "hostID", "size")
            maps = [dict(zip(names, numbers, strict=True)) for numbers in ids]
            linux["uidMappings"] = linux["gidMappings"] = maps
        return config

    def start(
        self, config: dict[str, Any], program: str = OURS, before: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Create, run and delete the container of *config*; *before* precedes each command."""
        self.count += 1
        name = f"look-{self.count}"
        maps = config["linux"].get("uidMappings", [{"hostID": 0}])
        owner = maps[0]["hostID"]
        # Engines that map ids change the owner in the same way.
        run("chown", "-R", f"{owner}:{owner}", self.rootfs)
        (self.bundle / "config.json").write_text(json.dumps(config))
        out, errors = WORK / "output", WORK / "errors"
        with out.open("w") as stdout, errors.open("w") as stderr:
            created = subprocess.run(
                [*before, program, "create", "--bundle", str(self.bundle), name],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=self.environment,
                check=False,
                timeout=60,
            )
        rules = Path("/sys/fs/cgroup/devices", name, "devices.list")
        result = {
            "status": created.returncode,
            "error": errors.read_text(),
            "rules": sorted(rules.read_text().splitlines()) if rules.exists() else [],
        }
        if created.returncode == 0:
            run(*before, self.lowlevel, "start", name)
            until(partial(self._has_stopped, before, name))
        run(*before, self.lowlevel, "delete", "--force", name, check=False)
        return {**result, "output": out.read_text().splitlines()}

    def _has_stopped(self, before: tuple[str, ...], name: str) -> bool:
        state = json.loads(run(*before, self.lowlevel, "state", name).stdout)
        return bool(state["status"] == "stopped")


def prepare() -> None:
    """Create the node of the driver container and a CDI spec of NODES."""
    DRIVER_DEV.mkdir(parents=True)
    status = os.lstat("/dev/nvidia3")
    os.mknod(DRIVER_DEV / "nvidia3", status.st_mode, status.st_rdev)
    os.chmod(DRIVER_DEV / "nvidia3", 0o666)
    devices = [
        {"name": name, "containerEdits": {"deviceNodes": [{**node, "permissions": "rw"}]}}
        for name, node in NODES.items()
    ]
    spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices}
    Path("/etc/cdi/nvidia.json").write_text(json.dumps(spec))


def play(lowlevel: str) -> dict[str, Any]:
    """Start a container for each case with *lowlevel*."""
    without_unified()
    prepare()
    bench = Bench(lowlevel)
    results: dict[str, Any] = {"before": host_nodes()}
    with nothing_left(results):
        results["plain"] = bench.start(bench.config(None), lowlevel)
        for name in NODES:
            results[name] = bench.start(bench.config(name))
            results[f"{name}, no ids mapped"] = bench.start(bench.config(name, ids=()))
        results["swapped, keep-id"] = bench.start(bench.config("swapped", KEEP_ID, 1000))
        results["swapped, no root"] = bench.start(bench.config("swapped", WITHOUT_ROOT, 1))
        results["swapped, nested"] = nested(bench)
        # What docker writes for `--device /dev/nvidia3:/dev/nvidia0`.
        listed = bench.config(None)
        listed["linux"]["devices"] = [{"path": "/dev/nvidia0", **NUMBERS, "fileMode": 0o666}]
        rules = listed["linux"]["resources"]["devices"]
        rules.append({"allow": True, **NUMBERS, "access": "rw"})
        results["control"] = bench.start(listed, lowlevel)
        listed["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=swapped")
        results["swapped, listed"] = bench.start(listed)
        results["moved, removed"] = removed(bench)
    return results


def nested(bench: Bench) -> dict[str, Any]:
    """Start the runtime in a user namespace; the container has no further user namespace."""
    config = bench.config("swapped", ids=())
    for mount in config["mounts"]:
        # Only one group is mapped.
        mount["options"] = [word for word in mount.get("options", ()) if word != "gid=5"]
    return bench.start(config, before=("unshare", "--user", "--map-root-user", "--"))


def removed(bench: Bench) -> dict[str, Any]:
    """Remove the node between the check of our runtime and the low-level runtime."""
    wrapper = WORK / "late"
    wrapper.write_text(f'#!/bin/sh\nrm {DRIVER_DEV}/nvidia3\nexec {bench.lowlevel} "$@"\n')
    wrapper.chmod(0o755)
    bench.use(str(wrapper))
    return bench.start(bench.config("moved"))


if __name__ == "__main__":
    main({"runc": partial(play, "runc"), "crun": partial(play, "crun")})
