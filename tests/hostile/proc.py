# SPDX-License-Identifier: Apache-2.0
"""Run the hook where /proc is not what it seems; print what came of it.

Run in a mount namespace of its own: `proc.py WORK KIND ours|walk|naive`. KIND is "fake", an option
of procfs, or what of /proc/self somebody mounts over; walk is a kernel without openat2(2), naive
the control, a hook that believes what is at /proc. Standard output is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
START_PYTHON = "/usr/bin/python3"
# What stands in for a process in a /proc of somebody else: every descriptor is his file.
DESCRIPTORS = range(3, 40)
# The last is the one that the others are mounted by.
OVER = ("mountinfo", "fdinfo", "fd")
WEAK = {
    "ours": "",
    "walk": """
def missing(*_):
    raise syscalls.SyscallError(38, "openat2")
syscalls.openat2 = missing
""",
    "naive": "paths.require_proc = lambda: None",
}
CODE = """
import sys
sys.path.append(TREE)
import os
from gpuruntime.system import paths, syscalls
from hooks import entry
WEAK
def enter_covered(_):
    # Somebody in the container's mount namespace is faster, and knows our number.
    places = {name: os.open("/proc/self/" + name, os.O_PATH) for name in COVERED}
    for name, place in places.items():
        syscalls.mount(FAKE + "/self/" + name, place, "", syscalls.MS_BIND)
entry.Work.enter = enter_covered
entry.main()
"""


def run(*command: object) -> None:
    """Run a command of the machine."""
    subprocess.run([str(word) for word in command], check=True)


def fake_proc(place: Path, victim: Path) -> None:
    """Make a /proc in which each descriptor of each process is *victim*."""
    for name in ("self/fd", "self/fdinfo"):
        (place / name).mkdir(parents=True)
    for number in DESCRIPTORS:
        (place / "self/fd" / str(number)).symlink_to(victim)
        (place / "self/fdinfo" / str(number)).write_text("pos:\t0\nmnt_id:\t1\n")
    (place / "self/mountinfo").touch()


def main() -> None:
    """Have the hook change the mode of a file of its container, and mask the params."""
    work, kind, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    target = work / "rootfs" / "opt" / "secret"
    target.mkdir(parents=True)
    victim = work / "victim"
    victim.write_text("must stay")
    for path in (target, victim):
        path.chmod(0o700)
    (work / "config.json").write_text('{"root": {"path": "rootfs"}}')
    fake = work / "fake"
    fake_proc(fake, victim)
    run("mount", "--bind", work / "rootfs", work / "rootfs")
    words = ["gpu-cdi-hook", "update-container", "--chmod=755::/opt/secret"]
    if kind == "fake":
        run("mount", "--bind", fake, "/proc")
    elif kind in ("hidepid=2", "subset=pid"):
        run("mount", "-t", "proc", "-o", kind, "proc", "/proc")
    if kind == "subset=pid":
        words.append("--mask-params")
    code = CODE.replace("TREE", repr(str(TREE))).replace("FAKE", repr(str(fake)))
    covered = [name for name in OVER if name in kind.split(",")]
    code = code.replace("COVERED", repr(covered)).replace("WEAK", WEAK[how])
    done = subprocess.run(
        [START_PYTHON, "-I", "-S", "-B", "-c", code, *words],
        input=json.dumps({"bundle": str(work)}), capture_output=True, text=True, check=False,
        timeout=30,
    )  # fmt: skip
    modes = {path.name: path.stat().st_mode & 0o777 for path in (target, victim)}
    print(json.dumps({"status": done.returncode, "error": done.stderr, **modes}))


if __name__ == "__main__":
    main()
