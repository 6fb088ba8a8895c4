# SPDX-License-Identifier: Apache-2.0
"""Cover a file by mount(2) alone while somebody exchanges its directory; print what came of it.

Run in a mount namespace of its own: `exchanged.py WORK KIND ours|naive`. KIND is what the
directory's name leads to when it is looked up again; "nobody" exchanges nothing, "late" does it
when all is done. Naive is the control, which believes that what it finds is its own. Standard
output is one JSON object.
"""

from __future__ import annotations

import errno
import json
import os
import posix
import subprocess
import sys
from pathlib import Path

from gpuruntime.system import mounts, syscalls
from gpuruntime.system.paths import Root
from gpuruntime.system.syscalls import SyscallError

PLACE = "/proc/driver/nvidia"
NAME = "params"


def run(*command: object) -> None:
    """Run a command of the machine."""
    subprocess.run([str(word) for word in command], check=True)


def prepare(work: Path, kind: str) -> Path:
    """Make a root with the file, and with another such directory; return it."""
    root, other = work / "root", work / "root/other/nvidia"
    place = Path(f"{root}{PLACE}")
    for directory in (place, other):
        directory.mkdir(parents=True)
    run("mount", "--bind", root, root)
    if kind == "mount":
        # As a volume.
        run("mount", "-t", "tmpfs", "others", other)
    elif kind == "mount on a mount":
        run("mount", "-t", "tmpfs", "others", other)
        run("mount", "-t", "tmpfs", "others", other)
    for directory in (place, other):
        (directory / NAME).write_text("ModifyDeviceFiles: 1\n")
    return root


def as_before_5_2() -> None:
    """Have the newer calls fail, as on a kernel that has none of them."""

    def fail(*_: object, **__: object) -> int:
        raise SyscallError(errno.ENOSYS, "missing")

    for name in ("open_tree", "mount_setattr", "move_mount", "new_tmpfs"):
        setattr(syscalls, name, fail)


def exchange(root: Path, kind: str) -> None:
    """Have the directory be another one when it, or the file in it, is looked up again."""
    name = "open_path" if kind == "late" else "open_directory"
    wanted = f"{PLACE}/{NAME}" if kind == "late" else PLACE
    real = getattr(Root, name)

    def look_up(opened: Root, path: str, **how: bool) -> int:
        if path == wanted:
            parent = Path(f"{root}{PLACE}").parent
            os.rename(parent, root / "moved")
            os.rename(root / "other", parent)
            setattr(Root, name, real)
        return int(real(opened, path, **how))

    setattr(Root, name, look_up)


def believe() -> None:
    """Have no doubt about what is found."""
    name = bytes(8)
    posix.urandom = lambda _: name  # type: ignore[assignment]
    mounts._source_of = lambda _: f"gpuruntime-{name.hex()}"
    mounts._require_same = lambda root, path, _: os.close(root.open_path(path))


def listed(below: Path) -> list[str]:
    """Return number, options and source of each mount below a directory."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        number, _, _, _, point, options, *rest = line.split()
        if below in Path(point).parents:
            found.append(f"{number} {options} {rest[rest.index('-') + 2]}")
    return found


def main() -> None:
    """Cover it, look, and print."""
    work, kind, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    root = prepare(work, kind)
    before = listed(root)
    as_before_5_2()
    if kind != "nobody":
        exchange(root, kind)
    if how == "naive":
        believe()
    refused = ""
    opened = Root(str(root))
    try:
        mounts.cover(opened, f"{PLACE}/{NAME}", b"ModifyDeviceFiles: 0\n", 0o444)
    except OSError as error:
        refused = str(error)
    place = Path(f"{root}{PLACE}")
    print(
        json.dumps(
            {
                "refused": refused,
                "gone": sorted(set(before) - set(listed(root))),
                "params": {path.name: path.read_text() for path in place.iterdir()},
            }
        )
    )


if __name__ == "__main__":
    main()
