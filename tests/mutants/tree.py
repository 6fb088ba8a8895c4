# SPDX-License-Identifier: Apache-2.0
"""A copy of this tree that runs its own code: tests in it see what a patch has changed.

Files are copied, what is costly to make is linked. The interpreter of the copy is a virtual
environment of links, whose only file of its own says where our packages are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
# Made by tests and by setup, by the content of what it is made of: of use for any copy.
SHARED = tuple(
    f"build/{name}" for name in ("cache", "driver-root", "newer-engines", "simhost", "wheels")
)
# Of what `make setup` makes, the parts that have the tree's own path in them.
BUILT = ("build/launcher", ".venv/bin/gpu-container-runtime", ".venv/bin/gpu-cdi-hook")


class PatchError(Exception):
    """A patch that cannot be applied, or whose tree cannot be built."""


def snapshot(place: Path) -> None:
    """Copy the tree's files as they are now, committed or not, to the directory *place*."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=TREE, capture_output=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = TREE / name, place / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def copy(taken: Path, place: Path) -> None:
    """Make a tree of the snapshot *taken* in the new directory *place*."""
    shutil.copytree(taken, place, symlinks=True)
    for name in SHARED:
        (TREE / name).mkdir(parents=True, exist_ok=True)
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(TREE / name)
    _link_environment(place)


def _link_environment(place: Path) -> None:
    ours, theirs = place / ".venv", TREE / ".venv"
    (ours / "bin").mkdir(parents=True)
    shutil.copy(theirs / "pyvenv.cfg", ours)
    for path in (theirs / "bin").iterdir():
        target = ours / "bin" / path.name
        if path.is_symlink():
            if path.name not in {Path(name).name for name in BUILT}:
                target.symlink_to(path.readlink())
        elif path.is_file():
            # Scripts name their interpreter by its path.
            data = path.read_bytes()
            target.write_bytes(data.replace(os.fsencode(theirs), os.fsencode(ours), 1))
            target.chmod(0o755)
    (packages,) = (theirs / "lib").glob("python*/site-packages")
    here = ours / packages.relative_to(theirs)
    here.mkdir(parents=True)
    for path in packages.iterdir():
        if path.name == "_editable_impl_gpuruntime.pth":
            (here / path.name).write_text(f"{place}\n")
        else:
            (here / path.name).symlink_to(path)


def patch(place: Path, diff: Path) -> list[str]:
    """Apply the unified *diff* to the copy *place*; return the files that it changes.

    Raises PatchError if it does not apply.
    """
    said = []
    # In a repository, git would leave out what is not below the directory that it is in.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(place.parent)}
    for level in ("-p1", "-p0"):
        command = ["git", "apply", "--recount", "-C1", level]
        listed = subprocess.run(
            [*command, "--numstat", "-z", str(diff)],
            cwd=place, env=environment, capture_output=True, check=False,
        )  # fmt: skip
        names = [row.split("\t")[2] for row in listed.stdout.decode().split("\0") if row]
        if listed.returncode != 0 or not names:
            said.append(listed.stderr.decode().strip() or "it changes no file")
            continue
        done = subprocess.run(
            [*command, str(diff)],
            cwd=place, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return names
        said.append(done.stderr.strip())
    raise PatchError(said[0].partition("\n")[0])


def build(place: Path) -> None:
    """Compile what the copy *place* needs: the launcher, bytecode; raise PatchError."""
    # Packages are what setup looks for: they are there, or this program would not run.
    command = ["make", "--silent", "--old-file=packages", *BUILT, "build/bytecode"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PatchError(f"it does not compile: {done.stderr.strip().splitlines()[-1]}")
