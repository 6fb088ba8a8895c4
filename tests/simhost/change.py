#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Change a simulated GPU host while programs run on it: `change.py say 'at 0 xid 0 79'`.

Run it on the host, that is as a command of simhost.py or from a shell on it. `say LINE...` has the
fake NVML report further lines, `unsay` takes back all of them, `unload` unloads the kernel module,
`load [VERSION]` loads it again, in another version if one is named.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nvml_file import NvmlFile

DRIVER = Path("/proc/driver")
LOADED, UNLOADED = DRIVER / "nvidia", DRIVER / ".nvidia-unloaded"
# What follows is not part of the host as it was made.
MARK = "# said"


def main(arguments: list[str]) -> int:
    """Run the command line, and return the exit status."""
    named = os.environ.get("SIMHOST_CONF")
    if named is None or not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    conf = NvmlFile(Path(named))
    lines = conf.lines()
    made = lines[: lines.index(MARK)] if MARK in lines else lines
    match arguments:
        case ["say", *said]:
            # Times count from now: lines that were said before would happen again.
            conf.replace([*made, MARK, *said])
        case ["unsay"]:
            conf.replace(made)
        case ["unload"]:
            LOADED.rename(UNLOADED)
            conf.replace([*made, MARK, "unloaded"])
        case ["load", *version]:
            _load(*version)
            conf.replace(made)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def _load(version: str = "") -> None:
    UNLOADED.rename(LOADED)
    file = LOADED / "version"
    text = file.read_text()
    if version:
        head, separator, rest = text.partition("Kernel Module  ")
        text = f"{head}{separator}{version}  {rest.partition('  ')[2]}"
    # Another load has other files.
    fresh = file.with_name(".version")
    fresh.write_text(text)
    fresh.replace(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
