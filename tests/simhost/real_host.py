#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a command with this machine's real GPUs: `real_host.py PREFIX CMD...`.

The names of its cgroups begin with PREFIX. As on the simulated host, PID, mount and cgroup
namespaces end with the command, and so does what our programs keep in /run/gpuruntime.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import cgroups
import namespace
import supervisor
from artefacts import SimhostError

STATE = Path("/run/gpuruntime")


def enter(groups: list[cgroups.Hierarchy]) -> dict[str, str]:
    """Enter the namespaces, as process 1; return changes of the command's environment."""
    cgroups.join(groups)
    namespace.unshare(namespace.CLONE_NEWNS | namespace.CLONE_NEWCGROUP)
    namespace.mount("none", "/", "", namespace.MS_REC | namespace.MS_PRIVATE)
    namespace.mount_cgroups(groups)
    namespace.mount("proc", "/proc", "proc")
    namespace.mount("tmpfs", STATE, "tmpfs", 0, "mode=755")
    return {}


def main() -> int:
    """Run the command line and return the exit status of the command."""
    is_new = not STATE.exists()
    try:
        STATE.mkdir(mode=0o755, exist_ok=True)
        return supervisor.run(sys.argv[2:], enter, sys.argv[1])
    except (SimhostError, OSError) as error:
        print(f"real_host: {error}", file=sys.stderr)
        return 1
    finally:
        if is_new:
            # Where an engine has started a container meanwhile, the directory is in use.
            with suppress(OSError):
                STATE.rmdir()


if __name__ == "__main__":
    sys.exit(main())
