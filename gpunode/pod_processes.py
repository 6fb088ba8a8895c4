# SPDX-License-Identifier: Apache-2.0
"""Which pod a process belongs to, by its cgroup: the kubelet names it after the pod's UID."""

from __future__ import annotations

import os
import re

# `pod<UID>` with cgroupfs; systemd's names have underscores for dashes.
_POD = re.compile(r"pod([0-9a-f]{8}([-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?(?:/|$)")
_MAX_BYTES = 64 << 10


def pod_of(pid: int, proc: str = "/proc") -> str:
    """Return the UID of the pod that the process *pid* belongs to, "" if it is in none."""
    try:
        fd = os.open(f"{proc}/{pid}/cgroup", os.O_RDONLY | os.O_CLOEXEC)
        with open(fd, encoding="utf-8", errors="replace") as stream:
            return uid_of(stream.read(_MAX_BYTES))
    except OSError:
        return ""


def uid_of(cgroups: str) -> str:
    """Return the UID of the pod in the text of /proc/PID/cgroup, "" if there is none."""
    for line in cgroups.splitlines():
        match = _POD.search(line.split(":", 2)[-1])
        if match:
            return match[1].replace("_", "-")
    return ""
