# SPDX-License-Identifier: Apache-2.0
"""What the start path asks of the full interpreter: JSON on stdin, JSON on stdout.

Run as `python -m gpuruntime.slow config|yaml` by gpuruntime/slowpath.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from cdi import yamlio
from cdi.errors import CdiError
from gpuruntime.cli.config_compile import compile_file
from gpuruntime.errors import ConfigError

DEADLINE_S = 30


def config(path: str) -> dict[str, object]:
    """Return the values of the config file *path* and what to warn of, or an error and hint."""
    try:
        values, warnings = compile_file(path)
    except ConfigError as error:
        return {"error": error.message, "hint": error.hint}
    return {"values": values, "warnings": warnings}


def yaml(texts: dict[str, str]) -> dict[str, object]:
    """Return path → {"document": …} or {"error": text, "category": word} for each of *texts*."""
    return {
        path: {"error": found.message, "category": found.category}
        if isinstance(found, CdiError)
        else {"document": found}
        for path, found in yamlio.decode_all(texts).items()
    }


def main() -> None:
    """Answer the question named on the command line."""
    signal.alarm(DEADLINE_S)
    # Descriptors of the engine that lack O_CLOEXEC are not for this process.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    argument = json.load(sys.stdin)
    answer = config(argument) if sys.argv[1] == "config" else yaml(argument)
    json.dump(answer, sys.stdout, default=str)


if __name__ == "__main__":
    main()
