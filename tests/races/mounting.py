# SPDX-License-Identifier: Apache-2.0
"""Mask params again and again while somebody exchanges their directory; print where mounts went.

`mounting.py WORK WAY TRIES`, in a mount namespace of its own. WAY is OPENAT2, WALK or STRING, the
control, which looks whether the directory is a link and then mounts by path.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from gpuruntime.errors import MountError
from gpuruntime.system import ops
from gpuruntime.system.paths import Root

ON = b"ModifyDeviceFiles: 1\n"
MS_BIND = 4096
MNT_DETACH = 2
libc = ctypes.CDLL(None, use_errno=True)


def prepare(work: Path) -> tuple[Path, Path, tuple[Path, Path]]:
    """Make root and host file; return the root, the host's params, and what is to be exchanged."""
    root, host = work / "root", work / "outside" / "params"
    host.parent.mkdir(parents=True)
    host.write_bytes(ON)
    directory = Path(f"{root}{host.parent}")
    directory.mkdir(parents=True)
    (directory / "params").write_bytes(ON)
    link = directory.parent / "link"
    link.symlink_to("../" * 40 + str(host.parent).lstrip("/"))
    (work / "masked").write_bytes(ON.replace(b"1", b"0"))
    return root, host, (directory, link)


def points() -> set[str]:
    """Return where something is mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[4] for line in lines}


def mount_by_path(source: Path, target: Path) -> None:
    """Mount *source* on *target*, whose directory is no link at this moment."""
    if not target.parent.is_symlink():
        libc.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND, None)


def main() -> None:
    """Try many times, and print how many mounts were inside, outside and refused."""
    work, way, tries = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    root, host = work / "root", work / "outside" / "params"
    ops.PARAMS = str(host)
    # As the low-level runtimes do.
    libc.mount(os.fsencode(root), os.fsencode(root), None, MS_BIND, None)
    opened = Root(str(root))
    opened._has_openat2 = way == "OPENAT2"
    before = points()
    inside = outside = refused = 0
    for _ in range(tries):
        try:
            if way == "STRING":
                mount_by_path(work / "masked", Path(f"{root}{host}"))
            else:
                ops.MaskParams().execute(opened, print)
        except MountError:
            refused += 1
        new = points() - before
        outside += any(not point.startswith(f"{root}/") for point in new)
        inside += any(point.startswith(f"{root}/") for point in new)
        while new:
            for point in new:
                # The name changes all the time: whichever it is now.
                libc.umount2(os.fsencode(point), MNT_DETACH)
            new = points() - before
    json.dump({"inside": inside, "outside": outside, "refused": refused}, sys.stdout)


if __name__ == "__main__":
    main()
