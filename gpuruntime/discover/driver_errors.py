# SPDX-License-Identifier: Apache-2.0
"""The errors of a driver that is not installed as a whole, or not loaded."""

from __future__ import annotations

from gpuruntime.errors import DriverError


class AbsentDriverError(DriverError):
    """There is no library of the driver, or its kernel module is not loaded."""


class MismatchedDriverError(DriverError):
    """The driver's library and its kernel module are of different versions."""
