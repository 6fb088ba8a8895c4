# SPDX-License-Identifier: Apache-2.0
"""Bring files of the host into a root, as the prestart hook does; print what came of it.

Run in a mount namespace of its own: `binds.py WORK KIND ours|naive`. KIND is what there is in the
root at the place, or "shared", for a host whose mounts are peers of each other. Naive is the
control: mount(8), by paths. Standard output is one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gpuruntime.errors import MountError
from gpuruntime.system.bind import BindMount
from gpuruntime.system.paths import Root

PLACE = "usr/lib/libcuda.so.1"
CHANNELS = "run/channels"


def run(*command: object) -> None:
    """Run a command of the machine."""
    subprocess.run([str(word) for word in command], check=True)


def prepare(work: Path, kind: str) -> tuple[Path, Path, Path]:
    """Make a root, a host's tree and what is beside them; return the three."""
    root, host, outside = (work / name for name in ("root", "host", "outside"))
    place = root / PLACE
    for directory in (place.parent, host / "channels", outside):
        directory.mkdir(parents=True)
    (host / "library").write_text("of the driver")
    if kind == "shared":
        run("mount", "-t", "tmpfs", "tmpfs", host)
        run("mount", "--make-shared", host)
        (host / "channels").mkdir()
        (host / "library").write_text("of the driver")
    run("mount", "--bind", root, root)
    if kind == "shared":
        run("mount", "--make-rshared", root)
        # What is mounted below the root appears in its twin, as on a host.
        (work / "twin").mkdir()
        run("mount", "--bind", root, work / "twin")
    new = outside / "new"
    targets = {
        "absolute": str(new),
        "climbing": "../" * 40 + str(new).lstrip("/"),
        "relative": os.path.relpath(new, place.parent),
        "nowhere": "/nowhere/at/all",
    }
    if kind in targets:
        place.symlink_to(targets[kind])
    elif kind == "parent":
        # There is no such directory inside.
        place.parent.rmdir()
        place.parent.symlink_to(outside)
    return root, host, outside


def mounted(below: Path) -> dict[str, list[str]]:
    """Return the optional fields of each mount below a place, by where it is there."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    found = {line.split()[4]: line.partition(" - ")[0].split()[6:] for line in lines}
    return {
        str(Path(point).relative_to(below)): fields
        for point, fields in found.items()
        if below in Path(point).parents
    }


def bring(root: Path, wanted: dict[Path, str], how: str) -> str:
    """Mount the files; return why not."""
    opened = Root(str(root))
    try:
        for source, place in wanted.items():
            if how == "naive":
                target = root / place
                if source.is_dir():
                    target.mkdir(parents=True)
                else:
                    target.touch()
                run("mount", "--rbind", source, target)
            else:
                options = ("rbind", "ro", "nosuid", "nodev")
                BindMount(str(source), f"/{place}", options).execute(opened, print)
    except MountError as error:
        return error.message
    finally:
        opened.close()
    return ""


def main() -> None:
    """Bring them, mount something on the host, look, and print."""
    work, kind, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    root, host, outside = prepare(work, kind)
    refused = bring(root, {host / "library": PLACE, host / "channels": CHANNELS}, how)
    ours = mounted(root)
    elsewhere = mounted(work)
    # What the host mounts later, as the next daemon's directory.
    (host / "channels/later").mkdir()
    run("mount", "-t", "tmpfs", "tmpfs", host / "channels/later")
    print(
        json.dumps(
            {
                "refused": refused,
                "ours": ours,
                "later": sorted(mounted(root).keys() - ours.keys()),
                "outside": sorted(os.listdir(outside)),
                "elsewhere": sorted(elsewhere.keys() - {f"root/{name}" for name in ours}),
            }
        )
    )


if __name__ == "__main__":
    main()
