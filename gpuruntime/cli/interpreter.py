# SPDX-License-Identifier: Apache-2.0
"""Find the interpreter of the slow path for the command line."""

from __future__ import annotations

import os
import sys

import gpuruntime


def of_slow_path() -> str:
    """Return the path of an interpreter that finds the package gpuruntime by itself.

    An installation has a virtual environment beside the package, whose interpreter finds the
    package. `sys.executable` may be the distribution's Python, as with the Debian package: there,
    the program adds the package to its own search path, which a child does not inherit.
    """
    library = os.path.dirname(os.path.dirname(os.path.abspath(gpuruntime.__file__)))
    installed = os.path.join(library, "venv", "bin", "python")
    return installed if os.access(installed, os.X_OK) else sys.executable
