# SPDX-License-Identifier: Apache-2.0
"""Which interpreter answers the questions that the command line asks through slowpath."""

from __future__ import annotations

import os
import sys

import gpuruntime


def of_slow_path() -> str:
    """Return the interpreter of the slow path, which imports gpuruntime by itself.

    An installation has a virtual environment beside the package. Its own program may be run by the
    distribution's Python, as from a Debian package: that is told where the package is, and a child
    of it is not.
    """
    library = os.path.dirname(os.path.dirname(os.path.abspath(gpuruntime.__file__)))
    installed = os.path.join(library, "venv", "bin", "python")
    return installed if os.access(installed, os.X_OK) else sys.executable
