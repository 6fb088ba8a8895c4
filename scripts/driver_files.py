#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference/driver-files.md: each file of two real drivers, and what becomes of it.

Usage: .venv/bin/python scripts/driver_files.py > docs/reference/driver-files.md
The packages are unpacked by "make driver-root VERSION=535" and "make driver-root VERSION=550".
"""

from __future__ import annotations

import fnmatch
import os
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TREE))

from gpuruntime.discover import driver_table  # noqa: E402
from gpuruntime.discover.user_space import DriverRoot, find_driver  # noqa: E402
from gpuruntime.model import Driver, File, Library  # noqa: E402
from gpuruntime.plan import driver_files, gpu_edits  # noqa: E402 (the path to it)

BRANCHES = ("535", "550")
ROOTS = TREE / "build" / "driver-root"
# display has the files of graphics, and compat32 is a matter of width.
COLUMNS = ("compute", "utility", "video", "graphics", "ngx")
# Files that no container gets: pattern → why. A pattern may stand for many files.
ON_THE_HOST = {
    "etc/init.d/*": "starts a daemon on the host",
    "usr/lib/systemd/system/*": "starts a daemon on the host",
    "usr/bin/nvidia-modprobe": "loads modules and makes device nodes, on the host",
    "usr/sbin/nvidia-powerd": "daemon that shifts power, on the host",
    "usr/lib/nvidia/current/nvidia-bug-report.sh": "collects the state of the host",
    "usr/lib/nvidia/current/nvidia.ids": "names of PCI devices, for the package itself",
    "usr/lib/nvidia/current/*.1.gz": "manual page",
    "usr/share/bug/*": "for reports of bugs in packages",
    "usr/share/doc/*": "documentation",
    "usr/share/lintian/*": "for checks of packages",
    "usr/share/man/*": "manual page",
    "usr/share/nvidia/nvidia-application-profiles-*-key-documentation": "documentation",
    "usr/share/nvidia/rim/*": "reference measurements, for who attests the host",
}
# Names of links that the container does without.
LINKS = {
    "bin": "link of the distribution",
    "lib": "link of the distribution",
    "sbin": "link of the distribution",
    "usr/lib/*/nvidia/current/nvidia-drm_gbm.so": "the container has gbm/nvidia-drm_gbm.so",
    "usr/lib/nvidia/current/libglxserver_nvidia.so": "the container has it in Xorg's directory",
}
# Patterns that are one row, for each would be hundreds.
GROUPS = ("usr/share/bug/*", "usr/share/doc/*", "usr/share/lintian/*", "usr/share/man/*")
HEAD = """# The driver's files, one by one

<!-- made by scripts/driver_files.py: edit that -->

What `gpuruntime cdi generate` does with each file of NVIDIA's user space, as Debian packages it:
driver {versions}.
Other distributions have the same files elsewhere, and `gpuruntime driver list` shows those of the
machine it runs on.
The rules are one table, `gpuruntime/discover/driver_table.py`.
A library that the table does not have, with the driver's version in its name, is for every
capability.

- **yes**: mounted, read-only, at its own path or where the last column says.
- **link**: made in the container as a link, not mounted.
- **no**: stays on the host.
- **-**: not part of that driver.

*For* names the capabilities of `NVIDIA_DRIVER_CAPABILITIES` that bring the file, those included
that need it for another file; `display` brings what `graphics` does, and `all` brings everything.
*Since* and *until* are drivers that were the first and the last to have a file.
`VERSION` stands for the driver's version.

What only a running system has is not in packages: the sockets of nvidia-persistenced and
nv-fabricmanager below `/run` (for utility) and the directory of MPS, `/tmp/nvidia-mps` or
`CUDA_MPS_PIPE_DIRECTORY` (for compute, video).
They are mounted writable.

| file | {branches} | for | why |
|---|{rules}---|---|
"""


class Root:
    """The user space of one *branch*: the driver found in it, and what each file is for."""

    def __init__(self, branch: str) -> None:
        self.path = ROOTS / branch
        self.driver = find_driver(DriverRoot(str(self.path)), native="x86-64")
        self.items: dict[str, Library | File] = {
            os.path.relpath(item.host_path, self.path): item
            for item in (*self.driver.libraries, *self.driver.files)
        }
        self.links = {link.partition("::")[2].lstrip("/") for link in gpu_edits.links(self.driver)}
        self.brings = {name: _paths(driver_files.select(self.driver, [name])) for name in COLUMNS}

    def files(self) -> list[str]:
        """Return the paths of all files and links, relative."""
        paths = []
        for directory, names, files in os.walk(self.path):
            links = [name for name in names if os.path.islink(os.path.join(directory, name))]
            paths += [
                os.path.relpath(os.path.join(directory, name), self.path)
                for name in (*files, *links)
            ]
        return sorted(paths)

    def row(self, path: str) -> tuple[str, str, str, str]:
        """Return (file, what becomes of it, for what, why)."""
        name = path.replace(self.driver.version, driver_table.VERSION)
        item = self.items.get(path)
        if item is not None:
            return name, "yes", self._for(item), _why(path, item)
        if path in self.links:
            target = os.path.relpath(os.path.realpath(self.path / path), self.path)
            return name, "link", self._for(self.items[target]), "programs open it by this name"
        for rules, is_link in ((LINKS, True), (ON_THE_HOST, False)):
            for pattern, why in rules.items():
                if (
                    fnmatch.fnmatchcase(path, pattern)
                    and is_link <= (self.path / path).is_symlink()
                ):
                    return (pattern if pattern in GROUPS else name), "no", "", why
        if (self.path / path).is_symlink():
            target = os.path.relpath(os.path.realpath(self.path / path), self.path)
            item = self.items.get(target)
            if item is not None and item.container_path == f"/{path}":
                return (
                    name,
                    "yes",
                    self._for(item),
                    f"{_told(target, item)}; the file is `{target}`",
                )
        raise SystemExit(f"driver_files: no row describes {self.path / path}")

    def _for(self, item: Library | File) -> str:
        if item.capability == driver_table.ALL:
            return "all"
        return ", ".join(name for name in COLUMNS if item.host_path in self.brings[name])


def _paths(driver: Driver) -> set[str]:
    return {item.host_path for item in (*driver.libraries, *driver.files)}


def _row(path: str, item: Library | File) -> driver_table.Row:
    """Return the table's row of *item*, whose path is *path*."""
    if isinstance(item, Library):
        name = os.path.basename(path).partition(".so")[0]
        return driver_table.LIBRARIES.get(name) or driver_table.unknown(name)
    for row in (
        *driver_table.BINARIES,
        *driver_table.CONFIGS,
        *driver_table.DATA,
        *driver_table.XORGS,
        *driver_table.FIRMWARES,
    ):
        pattern = row.name.replace(driver_table.VERSION, "*") + (
            "*" if row.kind == driver_table.XORG else ""
        )
        if row.kind == item.kind and fnmatch.fnmatchcase(item.container_path, f"*/{pattern}"):
            return row
    raise SystemExit(f"driver_files: no row of the table is for {path}")


def _told(path: str, item: Library | File) -> str:
    row = _row(path, item)
    drivers = f"since {row.since}" if row.since else ""
    if row.until:
        drivers = f"{drivers}, until {row.until}".removeprefix(", ")
    return f"{row.why} ({drivers})" if drivers else row.why


def _why(path: str, item: Library | File) -> str:
    why = _told(path, item)
    if item.container_path.lstrip("/") == path or item.kind == "firmware":
        return why
    return f"{why}; at `{os.path.dirname(item.container_path)}`"


def main() -> None:
    """Print the page."""
    for branch in BRANCHES:
        if not (ROOTS / branch).is_dir():
            raise SystemExit(
                f"driver_files: build/driver-root/{branch} does not exist\n"
                f'hint: run "make driver-root VERSION={branch}"'
            )
    roots = {branch: Root(branch) for branch in BRANCHES}
    rows: dict[str, dict[str, tuple[str, str, str]]] = {}
    for branch, root in roots.items():
        for path in root.files():
            name, what, for_, why = root.row(path)
            rows.setdefault(name, {})[branch] = (what, for_, why)
    versions = " and ".join(root.driver.version for root in roots.values())
    lines = [
        HEAD.format(versions=versions, branches=" | ".join(BRANCHES), rules="---|" * len(BRANCHES))
    ]
    for name, by_branch in sorted(rows.items()):
        whats = " | ".join(
            by_branch[branch][0] if branch in by_branch else "-" for branch in BRANCHES
        )
        # A newer driver may need a file for more.
        _, for_, why = by_branch[max(by_branch)]
        lines.append(f"| `{name}` | {whats} | {for_} | {why} |\n")
    sys.stdout.write("".join(lines))


if __name__ == "__main__":
    main()
