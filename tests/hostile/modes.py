# SPDX-License-Identifier: Apache-2.0
"""Change the mode of a file that has several mounts in its way; print what came of it.

Run in a mount namespace of its own: `modes.py WORK KIND WALK|OPENAT2|STRING`. STRING is the
control, which changes it by its path.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from gpuruntime.system.ops import Chmod
from gpuruntime.system.paths import Root

PLACE = "/dev/dri"
MODE = 0o777


def run(*command: object) -> None:
    """Run a command of the machine."""
    subprocess.run([str(word) for word in command], check=True)


def prepare(work: Path, kind: str, way: str) -> tuple[Path, Path]:
    """Make a root with its mounts, and a host's tree; return the root and what is at PLACE."""
    root, host = work / "root", work / "host"
    place = Path(f"{root}{PLACE}")
    for directory in (place.parent, host / "dri"):
        directory.mkdir(parents=True)
    run("mount", "--bind", root, root)
    if kind == "own tmpfs":
        # As the /dev that the low-level runtime makes.
        run("mount", "-t", "tmpfs", "tmpfs", place.parent)
        place.mkdir()
        return root, place
    if kind.startswith("tmpfs "):
        if kind == "tmpfs beside the root":
            # Its name begins as the root's does.
            host = host.rename(work / "root-of-host")
        run("mount", "-t", "tmpfs", "tmpfs", host)
        (host / "dri").mkdir()
    if kind == "link":
        # Out of the root for who joins paths, and to another file inside for who does not.
        place.symlink_to("../../host/dri")
        (root / "host" / "dri").mkdir(parents=True)
        return root, host / "dri" if way == "STRING" else root / "host" / "dri"
    if kind == "directory":
        place.mkdir()
        return root, place
    if kind == "file of the host":
        (host / "file").touch()
        place.touch()
        run("mount", "--bind", host / "file", place)
        return root, host / "file"
    # `--volume /dev:/dev`, or a volume of a file system that the root is on as well.
    run("mount", "--bind", host, place.parent)
    return root, host / "dri"


def main() -> None:
    """Change it, and print."""
    work, kind, way = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    root, victim = prepare(work, kind, way)
    victim.chmod(0o700)
    warnings: list[str] = []
    if way == "STRING":
        os.chmod(f"{root}{PLACE}", MODE)
    else:
        opened = Root(str(root))
        opened._has_openat2 = way == "OPENAT2"
        Chmod(PLACE, MODE).execute(opened, warnings.append)
        opened.close()
    mode = stat.S_IMODE(victim.stat().st_mode)
    json.dump({"mode": mode, "warnings": warnings}, sys.stdout)


if __name__ == "__main__":
    main()
