# SPDX-License-Identifier: Apache-2.0
"""The error of an installation."""

from __future__ import annotations

from gpuruntime.errors import GpuRuntimeError


class InstallError(GpuRuntimeError):
    """The runtime cannot be installed on the host, or removed from it."""

    phase = "install"
