# SPDX-License-Identifier: Apache-2.0
"""Mask params below a root where something else stands in its place; print where mounts went.

Run in a mount namespace of its own: `params.py WORK KIND WALK|OPENAT2|STRING`. STRING is the
control, which mounts by path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gpuruntime.errors import MountError
from gpuruntime.system import ops
from gpuruntime.system.paths import Root

ON = b"ModifyDeviceFiles: 1\n"


def prepare(work: Path, kind: str) -> tuple[Path, Path]:
    """Make root and host file; return the root and the host's params."""
    root, host = work / "root", work / "outside" / "params"
    host.parent.mkdir(parents=True)
    host.write_bytes(ON)
    place = Path(f"{root}{host}")
    place.parent.mkdir(parents=True)
    climbing = "../" * 40
    if kind == "file":
        place.write_bytes(ON)
    elif kind == "link_out":
        place.symlink_to(climbing + str(host).lstrip("/"))
    elif kind == "directory":
        place.mkdir()
    elif kind == "missing":
        assert not place.exists()
    elif kind == "parent_link_out":
        place.parent.rmdir()
        place.parent.symlink_to(climbing + str(host.parent).lstrip("/"))
    return root, host


def mount_points() -> set[str]:
    """Return where something is mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[4] for line in lines}


def main() -> None:
    """Mask and print what came of it."""
    work, kind, way = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    root, host = prepare(work, kind)
    ops.PARAMS = str(host)
    # As the low-level runtimes do.
    subprocess.run(["mount", "--bind", str(root), str(root)], check=True)
    before = mount_points()
    refused = ""
    if way == "STRING":
        masked = work / "masked"
        masked.write_bytes(ON.replace(b"1", b"0"))
        subprocess.run(["mount", "--bind", str(masked), f"{root}{host}"], check=False)
    else:
        opened = Root(str(root))
        opened._has_openat2 = way == "OPENAT2"
        try:
            ops.MaskParams().execute(opened, print)
        except MountError as error:
            refused = error.message
    after = mount_points()
    try:
        # As the container sees it, at the end of this namespace.
        os.chroot(root)
        seen = host.read_text()
    except OSError as error:
        seen = error.strerror
    json.dump(
        {
            "outside": sorted(p for p in after - before if not p.startswith(f"{root}/")),
            "inside": sorted(p for p in after - before if p.startswith(f"{root}/")),
            "gone": sorted(before - after),
            "refused": refused,
            "seen": seen,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
