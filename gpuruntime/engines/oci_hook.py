# SPDX-License-Identifier: Apache-2.0
"""The OCI hooks file that configures older versions of podman and CRI-O; pure."""

from __future__ import annotations

import json
import os

from gpuruntime.errors import ArgumentError

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def document(program: str) -> str:
    """Return a hooks file that adds the prestart hook *program* to every container.

    Raises ArgumentError if *program* is not an absolute path.
    """
    if not program.startswith("/"):
        raise ArgumentError(f'the hook\'s path "{program}" is not absolute', "begin it with /")
    directory = os.path.dirname(program)
    path = _PATH if directory in _PATH.split(":") else f"{_PATH}:{directory}"
    hook = {
        "version": "1.0.0",
        "hook": {
            "path": program,
            "args": [os.path.basename(program), "prestart"],
            "env": [f"PATH={path}"],
        },
        "when": {"always": True, "commands": [".*"]},
        "stages": ["prestart"],
    }
    return json.dumps(hook, indent=2) + "\n"
