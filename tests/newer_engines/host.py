# SPDX-License-Identifier: Apache-2.0
"""`host.py ENGINE ROOT FORM`: make an engine below *ROOT* read specs that we write as *FORM*.

For a simulated host with its own driver root. Writes the specs, creates the image, and then enters
the root directory of the engines, in which the directories of this host are mounted.
"""

from __future__ import annotations

import os
import platform
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "containers"))

import image
import lab
import labspec
from drivers import BIN, TREE, run
from scenario import WORK, main, without_unified

from cdi import generate

HERE = Path(__file__).resolve().parent
# Makes $1 the root of the new mount namespace, and runs the other arguments there.
ENTER = (
    'cd "$1" && shift && pivot_root . tmp && cd / && '
    'exec /bin/busybox sh -ec \'busybox umount -l /tmp; exec "$@"\' sh "$@"'
)


def prepare(form: str) -> None:
    """Write the specs and create the image, with the programs of the machine."""
    lab.LAB.prepare()
    spec = generate.spec(labspec.KIND, lab.LAB.devices(), lab.LAB.common())
    lab.save(f"lab.{form}", spec)
    devices = [("newer", labspec.NEWER_EDITS)]
    notes = labspec.NEWER_ANNOTATIONS
    spec = generate.spec(labspec.NEWER_KIND, devices, {}, annotations=notes)
    lab.save(f"newer.{form}", spec)
    driver = Path(os.environ["SIMHOST_ROOT"])
    run(
        *(BIN / "gpuruntime", "cdi", "generate", "--output", f"{lab.STATIC}/nvidia.{form}"),
        *("--driver-root", driver, "--dev-root", "/"),
    )
    # A further directory in which the compiler looks up libcuda.
    os.environ["LIBRARY_PATH"] = f"{driver}/usr/lib/{platform.machine()}-linux-gnu"
    image.archive_in(WORK)


def enter(root: Path, engine: str) -> NoReturn:
    """Execute consumer.py for *engine* in the root of the engines."""
    without_unified()
    new = WORK / "newer" / "root"
    for name in ("root", "upper", "scratch"):
        (new.parent / name).mkdir(parents=True)
    layers = f"lowerdir={root},upperdir={new.parent}/upper,workdir={new.parent}/scratch"
    run("mount", "-t", "overlay", "-o", layers, "engines", new)
    for path in ("/dev", "/proc", "/sys", "/run", lab.STATIC, str(TREE)):
        (target := Path(f"{new}{path}")).mkdir(parents=True, exist_ok=True)
        run("mount", "--rbind", path, target)
    # Read-only: the other interpreter must not write its bytecode there.
    run("mount", "-o", "remount,bind,ro", f"{new}{TREE}")
    inside = ["/usr/bin/python3", "-B", str(HERE / "consumer.py"), engine]
    command = ["unshare", "--mount", "--propagation=private", "sh", "-ec", ENTER, "sh", str(new)]
    os.execvp("unshare", [*command, *inside])


def play(engine: str, root: str, form: str) -> dict[str, Any]:
    """Prepare the host and execute consumer.py."""
    prepare(form)
    enter(Path(root), engine)


if __name__ == "__main__":
    main({name: partial(play, name) for name in ("podman", "docker", "containerd")})
