# SPDX-License-Identifier: Apache-2.0
"""The saving of one mount of a prepared driver view: docs/adr/0002. For the simulated host.

The config.json is the one that our runtime writes for 8 GPUs; one mount of a directory replaces
the mounts of files. Our runtime never writes such a config.json.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from bench.cases import RUNC, Case
from bench.lives import HOOK, WORK, BenchError, Place, Sample
from drivers import run

TARGET = "/usr/local/nvidia/view"


def live(place: Place, runtime: str, way: str, capabilities: str | None) -> dict[str, Sample]:
    """Run a container with driver files by *way*; return the cost of each operation.

    "files": unchanged. "directory": one mount, of copies. "directory of mounts": one recursive
    mount of a directory in which each file is a mount, shared by all containers. "nothing":
    without driver files.

    The container runs without our hook, whose cost is measured elsewhere.
    """
    edited = Case("", "view", RUNC, "all", capabilities, edits="no hook")
    config = json.loads(place.document(edited))
    config["mounts"] = _mounts(config["mounts"], way, f"{way}-{capabilities}")
    document = json.dumps(config)
    return place.live(Case("", "view", str(shutil.which(runtime)), "all"), document)


def count(place: Place, capabilities: str | None) -> dict[str, int]:
    """Return the numbers of mounted driver files, of libraries among them, nodes and hooks."""
    config = json.loads(place.document(Case("", "view", RUNC, "all", capabilities, edits="same")))
    files = [mount["destination"] for mount in config["mounts"] if is_of_driver(mount)]
    return {
        "files": len(files),
        "libraries": sum(".so" in os.path.basename(path) for path in files),
        "nodes": len(config["linux"]["devices"]),
        "hooks": sum(HOOK in hook["path"] for hooks in config["hooks"].values() for hook in hooks),
    }


def is_of_driver(mount: dict[str, Any]) -> bool:
    """Return whether our runtime added *mount*: the spec of runc has no bind mounts."""
    return "rbind" in mount.get("options", ())


def _mounts(mounts: list[dict[str, Any]], way: str, name: str) -> list[dict[str, Any]]:
    if way == "files":
        return mounts
    others = [mount for mount in mounts if not is_of_driver(mount)]
    if way == "nothing":
        return others
    view = WORK / "views" / name.replace(" ", "-")
    if not view.exists():
        view.mkdir(parents=True)
        for mount in filter(is_of_driver, mounts):
            _show(Path(mount["source"]), Path(f"{view}{mount['destination']}"), way)
    options = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
    return [*others, {"destination": TARGET, "source": str(view), "options": options}]


def _show(source: Path, target: Path, way: str) -> None:
    """Copy or mount *source* to *target*."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if way == "directory of mounts":
        if source.is_dir():
            target.mkdir()
        else:
            target.touch()
        run("mount", "--bind", source, target)
    elif source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copy(source, target)
    else:
        # A socket cannot be copied.
        raise BenchError(f"{source} is not a file or directory")
