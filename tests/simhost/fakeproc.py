# SPDX-License-Identifier: Apache-2.0
"""Have a bundle's container see /proc/driver, as a kernel driver would have it (fakeproc.c)."""

from __future__ import annotations

from pathlib import Path

import artefacts


def add(bundle: Path, source: str = "/proc/driver") -> None:
    """Put the createRuntime hook that shows *source* into the config.json of *bundle*."""
    import json  # noqa: PLC0415 (simhost.py imports this for each host)

    path = bundle / "config.json"
    config = json.loads(path.read_bytes())
    hooks = config.setdefault("hooks", {}).setdefault("createRuntime", [])
    hook = str(artefacts.fakeproc_hook())
    hooks.append({"path": hook, "args": [hook, source]})
    path.write_text(json.dumps(config))
