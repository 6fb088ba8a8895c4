# SPDX-License-Identifier: Apache-2.0
"""`host.py ENGINE ROOT FORM`: have an engine below *ROOT* read specs that we write as *FORM*.

For a simulated host with a driver root of its own. Writes the specs, makes the image, and then the
root directory's engines are this host's: everything else of it is shown there.
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
# Makes $1 the root of a mount namespace of its own, and runs the rest there.
ENTER = (
    'cd "$1" && shift && pivot_root . tmp && cd / && '
    'exec /bin/busybox sh -ec \'busybox umount -l /tmp; exec "$@"\' sh "$@"'
)


def prepare(form: str) -> None:
    """Write the specs and make the image, with the machine's own programs."""
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
    # Where the compiler is to look for libcuda too.
    os.environ["LIBRARY_PATH"] = f"{driver}/usr/lib/{platform.machine()}-linux-gnu"
    image.archive_in(WORK)


def enter(root: Path, engine: str) -> NoReturn:
    """Become the program that uses *engine*, in the engines' own root."""
    without_unified()
    new = WORK / "newer" / "root"
    for name in ("root", "upper", "scratch"):
        (new.parent / name).mkdir(parents=True)
    layers = f"lowerdir={root},upperdir={new.parent}/upper,workdir={new.parent}/scratch"
    run("mount", "-t", "overlay", "-o", layers, "engines", new)
    for path in ("/dev", "/proc", "/sys", "/run", lab.STATIC, str(TREE)):
        (target := Path(f"{new}{path}")).mkdir(parents=True, exist_ok=True)
        run("mount", "--rbind", path, target)
    # Another interpreter shall not leave its bytecode there.
    run("mount", "-o", "remount,bind,ro", f"{new}{TREE}")
    inside = ["/usr/bin/python3", "-B", str(HERE / "consumer.py"), engine]
    command = ["unshare", "--mount", "--propagation=private", "sh", "-ec", ENTER, "sh", str(new)]
    os.execvp("unshare", [*command, *inside])


def play(engine: str, root: str, form: str) -> dict[str, Any]:
    """Prepare the host, and leave the rest to consumer.py."""
    prepare(form)
    enter(Path(root), engine)


if __name__ == "__main__":
    main({name: partial(play, name) for name in ("podman", "docker", "containerd")})
