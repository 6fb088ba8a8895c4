# SPDX-License-Identifier: Apache-2.0
"""Install into a prefix of this host, use what is there, uninstall; print what was seen.

Standard output is one JSON object: command → output.
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

# A directory of every system, empty on most; here it is a file system of its own.
PLACE = "/srv"
PREFIX = f"{PLACE}/gpuruntime"
PROGRAMS = f"{PREFIX}/bin"
DOCKER = ("runtime", "configure", "--runtime", "docker", "--dry-run")
COMPLETE = f"""
. {PREFIX}/share/bash-completion/completions/gpuruntime
COMP_WORDS=(gpuruntime cdi gen) COMP_CWORD=2
_gpuruntime_completion gpuruntime
echo "${{COMPREPLY[@]}}"
"""


def make(target: str) -> None:
    """Have the Makefile do *target*, as a user without our virtual environment does."""
    options = [f"PREFIX={PREFIX}", "COMPAT=nvidia", f"PYTHON={sys.executable}"]
    # What an outer make tells its children is not for this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    scenario.run("make", "--no-print-directory", "-C", scenario.TREE, target, *options,
                 env=environment)  # fmt: skip


def files() -> dict[str, str]:
    """Return path → type, mode, links and bytes of what an installation could touch."""
    entries = {}
    for top in (PLACE, "/etc"):
        for directory, names, others in os.walk(top):
            for name in names + others:
                path = Path(directory, name)
                status = path.lstat()
                data = path.read_bytes().hex() if path.is_file() else ""
                entries[str(path)] = (
                    f"{status.st_mode:o} {status.st_mtime_ns if data else ''} {data}"
                )
    return entries


def tell(*words: str) -> str:
    """Return what a program of ours prints."""
    return scenario.run(f"{PROGRAMS}/{words[0]}", *words[1:]).stdout


def containers(top: Path) -> dict[str, object]:
    """Return what containers came to: by each of our names, and by a spec that names our hook."""
    bundle = scenario.make_bundle(top, "0")
    original = (bundle / "config.json").read_text()
    results: dict[str, object] = {}
    for name in ("gpu-container-runtime", "nvidia-container-runtime"):
        scenario.RUNTIME = f"{PROGRAMS}/{name}"
        results[name] = shared.observe(bundle, json.loads(original))
    tell("gpuruntime", "cdi", "generate", "--output", "/etc/cdi/nvidia.json")
    config = json.loads(original)
    config["process"]["env"] = ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"]
    results["spec"] = shared.observe(bundle, config)
    stored = json.loads((bundle / "config.json").read_text())
    results["hooks"] = [hook["path"] for hook in stored["hooks"]["createContainer"]]
    os.remove("/etc/cdi/nvidia.json")
    return results


def main() -> None:
    """Install, look, use, uninstall."""
    scenario.run("mount", "-t", "tmpfs", "tmpfs", PLACE)
    os.environ["PATH"] = f"{PROGRAMS}:{os.environ['PATH']}"
    os.makedirs("/etc/cdi", exist_ok=True)
    before = files()
    make("install")
    installed = files()
    results: dict[str, object] = {
        "version": [tell(name, "--version") for name in ("gpuruntime", "nvidia-ctk")],
        "runtime version": tell("gpu-container-runtime", "--version"),
        "nvidia-container-cli": tell("nvidia-container-cli", "--version"),
        "explain": tell("gpuruntime", "explain", "--env", "NVIDIA_VISIBLE_DEVICES=1,3"),
        "completion": scenario.run("bash", "-c", COMPLETE).stdout,
        "configure": tell("nvidia-ctk", *DOCKER),
        "our configure": tell("gpuruntime", *DOCKER),
    }
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-installed-"))
    try:
        results["containers"] = containers(top)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    used = files()
    make("uninstall")
    after = files()
    results["written by use"] = sorted(
        path for path in installed.keys() | used.keys() if installed.get(path) != used.get(path)
    )
    results["left"] = sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )
    results["installed"] = len(installed) - len(before)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
