# SPDX-License-Identifier: Apache-2.0
"""Start hostile images under each combination of factors; print what came of each.

`matrix.py ROWS ATTACKS`: ROWS is JSON, a list of [runtime, user, openat2, env]; ATTACKS are names
with commas, each an image of its own, or "together": one image that has some of them at once.
Standard output is one JSON object: row → attack → what was seen. A row has a control: the weak
hook in place of ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import hostile
import scenario

FIRST_ID = 100000
TOGETHER = (
    hostile.env_01_preload,
    hostile.link_03_conf_directory_is_a_link,
    hostile.link_04_cache_climbs,
    hostile.link_04_temporary_name,
    hostile.link_06_mount_target_is_a_link,
)
BY_NAME = {prepare.__name__: prepare for prepare, _ in hostile.ATTACKS}


def use_runtime(name: str, top: Path) -> None:
    """Have our runtime start *name*."""
    path = top / f"{name}.toml"
    path.write_text(f'[nvidia-container-runtime]\nruntimes = ["{name}"]\n')
    os.environ["GPURUNTIME_CONFIG"] = str(path)


def use_user_namespace(attack: hostile.Attack) -> None:
    """Map the container's ids, and give the root to them, as engines do."""
    linux = attack.config["linux"]
    linux["namespaces"].append({"type": "user"})
    ids = [{"containerID": 0, "hostID": FIRST_ID, "size": 65536}]
    linux["uidMappings"] = linux["gidMappings"] = ids
    # What is outside may be another container's, or the hook could not harm it anyway.
    for tree in (attack.root, attack.canary):
        scenario.run("chown", "-hR", f"{FIRST_ID}:{FIRST_ID}", tree)


def change_hook(attack: hostile.Attack, wrapper: Path, openat2: str, env: str) -> None:
    """Have our hook without openat2(2), and with the environment *env*, as a reader leaves it."""
    hook = json.loads(hostile.SPEC.read_text())["containerEdits"]["hooks"][0]
    path = str(wrapper) if openat2 == "ENOSYS" else hook["path"]
    given = {"absent": None, "[]": [], "set": hook["env"]}[env]
    attack.use_hook(path, hook["args"], given)


def build_wrapper(path: Path) -> None:
    """Build the program that takes openat2(2) away."""
    define = f'-DHOOK="{scenario.BIN / "gpu-cdi-hook"}"'
    scenario.run("gcc", "-static", "-O1", define, "-o", path, scenario.HERE / "enosys.c")


def run_row(
    row: list[str], names: list[str], top: Path, pristine: Path, spec: str
) -> dict[str, object]:
    """Start a container for each attack of *names* under the factors of *row*."""
    runtime, user, openat2, env = row
    use_runtime(runtime, top)
    seen: dict[str, object] = {}
    for name in (*names, "control"):
        hostile.SPEC.write_text(spec)
        work = top / "-".join([*row, name]) / "work"
        work.mkdir(parents=True)
        attack = hostile.Attack(work, pristine)
        if name in ("together", "control"):
            for prepare in TOGETHER:
                prepare(attack)
        else:
            BY_NAME[name](attack)
        if user == "userns":
            use_user_namespace(attack)
            if runtime == "crun":
                # What shows the simulated driver's /proc cannot with crun's.
                del attack.config["hooks"]
        if name == "control":
            hostile.weak_hook(attack)
        else:
            change_hook(attack, top / "enosys", openat2, env)
        seen[name] = {**hostile.observe(attack), "record": None}
        shutil.rmtree(work.parent)
    return seen


def without_unified() -> None:
    """Take away the hierarchy of version 2 on a hybrid host, which crun would use instead."""
    unified = "/sys/fs/cgroup/unified"
    if os.path.ismount(unified):
        subprocess.run(["umount", "--lazy", unified], check=True)


def main() -> None:
    """Run every row and print what was seen."""
    rows, names = json.loads(sys.argv[1]), sys.argv[2].split(",")
    without_unified()
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-matrix-"))
    top.chmod(0o755)
    try:
        scenario.generate()
        spec = hostile.SPEC.read_text()
        build_wrapper(top / "enosys")
        pristine = scenario.make_bundle(top / "pristine", "0")
        results = {",".join(row): run_row(row, names, top, pristine, spec) for row in rows}
        json.dump(results, sys.stdout)
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
