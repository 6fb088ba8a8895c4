# SPDX-License-Identifier: Apache-2.0
"""Renew what the host keeps about MIG devices: the nodes that grant access, and the CDI spec.

The kernel makes neither. Both are the work of our runtime's command on the host; a host without it
has nothing of ours to renew.
"""

from __future__ import annotations

import os
import sys

from gpunode.mig import commands

_PROGRAM = "gpuruntime"
_DIRECTORIES = ("/usr/bin", "/usr/local/bin", "/opt/gpuruntime/current/bin")
_SPEC = "/var/run/cdi/nvidia.yaml"


def renew(driver_root: str, host_root: str = "/") -> None:
    """Create missing nodes, and write the CDI spec again if there is one; raise CommandError.

    *host_root* is where the root of the host is mounted; the host finds its driver itself there.
    """
    root = host_root.rstrip("/")
    beside = () if root else (os.path.dirname(os.path.abspath(sys.argv[0])),)
    paths = (f"{directory}/{_PROGRAM}" for directory in (*beside, *_DIRECTORIES))
    program = next((path for path in paths if os.path.isfile(f"{root}{path}")), "")
    if not program:
        return
    prefix = ["chroot", host_root, program] if root else [program]
    options = [] if root or driver_root == "/" else [f"--driver-root={driver_root}"]
    commands.run(
        "the creation of nodes for MIG devices",
        [*prefix, "system", "create-device-nodes", "--mig-devices", *options],
    )
    if os.path.exists(f"{root}{_SPEC}"):
        commands.run("the refresh of the CDI spec", [*prefix, "cdi", "refresh", *options])
