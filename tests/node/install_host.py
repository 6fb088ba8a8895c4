# SPDX-License-Identifier: Apache-2.0
"""A host below a directory for `gpu-node install`, and bundles to install there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

GPU_NODE = Path(sys.prefix, "bin", "gpu-node")
TOP = "opt/gpuruntime"
RUNTIME = f"/{TOP}/current/bin/gpu-container-runtime"
# A static program, since the host has no interpreter: it notes its arguments, and reports that
# the units in /active are active.
SYSTEMCTL = r"""
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv)
{
	FILE *file = fopen("/calls", "a");
	char line[100];
	int status = 3;
	fprintf(file, "%s %s\n", argv[1], argc > 2 ? argv[2] : "");
	fclose(file);
	if (strcmp(argv[1], "is-active") != 0)
		return fopen("/broken", "r") != NULL;
	file = fopen("/active", "r");
	while (file != NULL && fgets(line, sizeof line, file) != NULL)
		if (strcspn(line, "\n") == strlen(argv[2]) && strncmp(line, argv[2], strlen(argv[2])) == 0)
			status = 0;
	return status;
}
"""


def make_bundle(directory: Path, version: str = "1.0.0") -> Path:
    """Make a small tree with the parts that an installation looks at."""
    package = directory / "lib/gpuruntime/gpuruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (directory / "bin").mkdir()
    (directory / "lib/gpuruntime/launcher").write_bytes(b"\x7fELF" + version.encode())
    (directory / "lib/gpuruntime/launcher").chmod(0o755)
    (directory / "bin/gpu-container-runtime").symlink_to("../lib/gpuruntime/launcher")
    return directory


def make_host(directory: Path, files: dict[str, str]) -> Path:
    """Make the root directory of a host with *files*, by path."""
    for path in ("etc", "opt", "run", "tmp", "var/lib"):
        (directory / path).mkdir(parents=True)
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return directory


def tree_of(root: Path) -> dict[str, tuple[int, object]]:
    """Return the modes and contents of all files below *root*."""
    result: dict[str, tuple[int, object]] = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        content: object = None
        if stat.S_ISLNK(mode):
            content = os.readlink(path)
        elif stat.S_ISREG(mode):
            content = path.read_bytes()
        result[str(path.relative_to(root))] = (mode, content)
    return result


def gpu_node(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of gpu-node for the host *root*."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [str(GPU_NODE), words[0], f"--host-root={root}", *words[1:]],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
