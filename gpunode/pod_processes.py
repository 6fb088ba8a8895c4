# SPDX-License-Identifier: Apache-2.0
"""Which pod a process belongs to: the kubelet names its cgroup after the UID of the pod.

The name of the pod with a UID is in the name of its directory of logs.
"""

from __future__ import annotations

import os
import re

# `pod<UID>` with cgroupfs; systemd's names have underscores for dashes.
_POD = re.compile(r"pod([0-9a-f]{8}([-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?(?:/|$)")
# NAMESPACE_NAME_UID; names of namespaces and pods have no underscore.
_LOGS = re.compile(r"([^_/]+)_([^_/]+)_([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\Z")
LOGS = "/var/log/pods"
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


def pods_by_uid(directory: str = LOGS) -> dict[str, tuple[str, str]]:
    """Return UID → namespace and name of the pods whose logs are below *directory*.

    Empty if it cannot be read.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return {}
    matches = filter(None, map(_LOGS.match, names))
    return {match[3]: (match[1], match[2]) for match in matches}
