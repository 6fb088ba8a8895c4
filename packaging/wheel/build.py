# SPDX-License-Identifier: Apache-2.0
"""Build hook: the programs of the wheel, which has no native launcher, under their names.

An editable installation, as `make setup` makes it, has the launcher instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAMS = {
    "gpu-container-runtime": "runtime",
    "gpu-container-runtime-hook": "hook",
    "gpu-cdi-hook": "hook",
}


class Programs(BuildHookInterface):  # type: ignore[type-arg] # (its parameter is not for hooks)
    """Puts each program under each of its names."""

    PLUGIN_NAME = "custom"
    _work = ""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Have the build take the programs along."""
        if version == "editable":
            return
        self._work = tempfile.mkdtemp(prefix="gpuruntime-wheel-")
        for name, source in PROGRAMS.items():
            copy = shutil.copy(Path(__file__).with_name(source), Path(self._work, name))
            # Installers keep the bit.
            os.chmod(copy, 0o755)  # noqa: S103 (a program)
            build_data["shared_scripts"][copy] = name

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copies."""
        del version, build_data, artifact_path
        if self._work:
            shutil.rmtree(self._work)
