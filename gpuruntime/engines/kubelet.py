# SPDX-License-Identifier: Apache-2.0
"""The setting of the kubelet that the runtimes of its engine must share."""

from __future__ import annotations

import re

from gpuruntime.engines import files
from gpuruntime.errors import ConfigError

CONFIG = "/var/lib/kubelet/config.yaml"


def uses_systemd_cgroups() -> bool:
    """Return whether the kubelet of this host leaves cgroups to systemd."""
    try:
        text = files.read(CONFIG)
    except ConfigError:
        return False
    return re.search(r"^cgroupDriver:\s*[\"']?systemd\b", text or "", re.MULTILINE) is not None
